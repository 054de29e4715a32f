"""Every row of params.RESPONSES and params.CHAT: what it takes, what it refuses, and what is echoed."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from request import params
from request.params import CHAT, RESPONSES, Request
from request.refusals import MAX_MESSAGE, MAX_SHOWN, BadInput, shown
from request.tools import Grammar, Tool
from request.tools import StructuredOutput as Must

Json = dict[str, Any]
Read = Callable[[Any, dict[str, Any]], Request]

RESPONSES_BODY: Json = {"model": "m", "input": "hi"}
CHAT_BODY: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
APIS: dict[str, tuple[Read, Json, dict[str, params.Parameter]]] = {
    "responses": (params.from_responses, RESPONSES_BODY, RESPONSES),
    "chat": (params.from_chat, CHAT_BODY, CHAT),
}

TYPE, VALUE, UNSUPPORTED = "invalid_type", "invalid_value", "unsupported_parameter"
MISSING, EXCLUSIVE = "missing_required_parameter", "mutually_exclusive_parameters"
NAN = float("nan")
BIASES_301 = {str(token_id): 0 for token_id in range(301)}
NO_TOKEN_IDS = [
    BIASES_301,
    *({name: 1} for name in ("a", "-1", "1.0", "", "\N{SUPERSCRIPT TWO}", "9" * 5000)),
]
LONGEST = {"k" * 64: "v" * 512}
PAIRS_17 = {str(i): "" for i in range(17)}
HI = {"role": "user", "content": "hi"}
LOW = {"effort": "low", "summary": "auto"}
PLAIN = {"format": {"type": "text"}}
JSON = {"type": "json_object"}
SCHEMA = {"type": "json_schema", "name": "x"}
UNWRAPPED = {"type": "json_schema", "json_schema": {"type": "object", "properties": {}}}
OBJECT = Must("none", schema={"type": "object"})
FUNCTION = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}
ONE_TOOL = {"tools": [FUNCTION]}
TOO_MANY = [FUNCTION] * 129
CUSTOM = {"type": "custom", "name": "p", "format": {"type": "text"}}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
PATCH = CUSTOM | {"format": LARK}
NESTED_PATCH = {"type": "custom", "custom": {"name": "p", "format": {"type": "grammar", "grammar": LARK}}}
GRAMMAR = Grammar("lark", LARK["definition"], "tools[0].format.definition")
INPUT = Tool("p", custom=True).schema() or {}
GRAMMAR_INPUT = Tool("p", custom=True, grammar=GRAMMAR).schema() or {}
F, IN_N = (("f", {"type": "object"}),), (("n__f", {"type": "object"}),)
P, LIMITED = (("p", INPUT),), (("p", GRAMMAR_INPUT),)
F_, N_F, N_P = Tool("f"), Tool("f", namespace="n"), Tool("p", namespace="n", custom=True)
CHAT_P = Tool("p", custom=True, grammar=GRAMMAR._replace(path="tools[0].custom.format.grammar.definition"))
KEPT_TO = Must("auto", LIMITED, inputs=(("p", GRAMMAR),))
BY_NAME = {"f": F_, "n__f": N_F, "n__p": N_P}
OF_ANY_TEXT = {"type": "grammar", "grammar": {"type": "text"}}
NO_SYNTAX = {"type": "custom", "custom": {"name": "p", "format": OF_ANY_TEXT}}
NAMESPACE = {"type": "namespace", "name": "n", "description": "", "tools": [FUNCTION, CUSTOM]}
NESTED = {"type": "function", "function": {"name": "f"}}
TOLD = {"type": "function", "function": {"name": "f", "description": ""}}
TWO_TOOLS = {"tools": [FUNCTION, CUSTOM]}
TOOLS = {"tools": [NESTED]}
HOSTED = {"type": "web_search"}
HOSTED_ONLY = {"tools": [HOSTED]}
NAMED = {"type": "function", "name": "f"}
FORCED = {"type": "web_search"}
PICKED = {"type": "custom", "name": "p"}
IN_NAMESPACE = {"type": "function", "name": "f", "namespace": "n"}
NAMED_IN_N = {"tools": [NAMESPACE], "tool_choice": IN_NAMESPACE}
SOME = {"type": "allowed_tools", "mode": "auto", "tools": [PICKED, FORCED]}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
CHAT_ONLY = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NESTED]}}
OTHER, IN_ONE = NAMED | {"name": "g"}, {"conversation": "c"}
NO_OBJECT = {"tools": [FUNCTION | {"parameters": {"type": "array"}}]}
NONE_OF_THEM = ALLOWED | {"tools": []}
NAMELESS = {"type": "function"}
BAD_SCHEMA = "invalid_json_schema"
UNDEFINED = LARK | {"definition": None}
JOINED = FUNCTION | {"name": "n__f"}
PREWARM = {"prewarm": True}
ASYNC = {"type": "function", "function": {"name": "f", "async": True}}
DEFERRED = FUNCTION | {"defer_loading": True}
LOADS = [HI, {"type": "additional_tools", "role": "developer", "tools": [DEFERRED]}]
LOADS_NAMELESS = {"type": "additional_tools", "role": "developer", "tools": [NAMELESS]}
STREAM = {"stream": True}  # what stream_options needs
VERBOSE = {"verbosity": "low"}
KWARGS = {"enable_thinking": True}


def thinking(enabled: bool, effort: str) -> Json:
    return {"enable_thinking": enabled, "reasoning_effort": effort}


BRIEF = {"role": "system", "content": "Be brief."}
BOTH_LIMITS = {"max_tokens": 5, "max_completion_tokens": 6}
USAGE = {"include_usage": True}
SHOWN = "message.output_text.logprobs"

Values = tuple[list[Any], list[Any], list[Any], list[Any]]
BOOLEAN: Values = ([True, False], [0, 1, "true"], [], [])
TRUE_ONLY: Values = ([True, 1], [], [], [False, 2])
NEVER: Values = ([], [], [], [{}, [], "auto", 5])
HINTS = ("prompt_cache_retention", "service_tier", "user")  # cannot be wrong
# fmt: off
#   parameter                good                            of another type out of range      unsupported
COMMON: dict[str, Values] = {
    "model":                 (["m", "x" * 256],              [5, []],     ["", "x" * 257],  []),
    "temperature":           ([0, 0.5, 2],                   ["1", True], [-0.1, 2.1, NAN], []),
    "top_p":                 ([0, 0.5, 1],                   [[], False], [-0.1, 1.1],      []),
    "top_k":                 ([-1, 0, 50],                   [1.5, True], [-2],             []),
    "min_p":                 ([0, 0.05, 1],                  ["0"],       [-0.1, 1.1],      []),
    "seed":                  ([0, -1, 2**63 - 1],            [1.0, "1"],  [2**63],          []),
    "presence_penalty":      ([-2, 0, 2],                    [{}],        [-2.1, 2.1],      []),
    "frequency_penalty":     ([-2, 0, 2],                    ["0"],       [-2.1, 2.1],      []),
    "repetition_penalty":    ([0.5, 1, 1.3],                 ["1"],       [0, -1],          []),
    "logit_bias":            ([{}, {"5": -100, "07": 1}],    [[], "5"],   NO_TOKEN_IDS,     []),
    "top_logprobs":          ([0, 20],                       [True, "1"], [-1, 21],         []),
    "stop":                  (["a", list("abcd"), []],       [5, {}],     [["a"] * 5],      []),
    "stop_token_ids":        ([[], [0, 5]],                  [5, "5"],    [[5] * 129],      []),
    "metadata":              ([{}, LONGEST],                 [[], "a"],   [PAIRS_17],       []),
    "chat_template_kwargs":  ([{}, KWARGS],                  [[], True],  [],               []),
    "safety_identifier":     (["", "x" * 128],               [5],         ["x" * 129],      []),
    "prompt_cache_key":      (["", "x" * 1024],              [[]],        ["x" * 1025],     []),
    "stream_options":        ([{}, USAGE],                   [[], True],  [],               []),
    "tools":                 ([[], [FUNCTION], [HOSTED], [NESTED]], [{}], [TOO_MANY],       []),
    "tool_choice":           (["auto", "none"],              [5],         ["any"],          []),
}
COMMON |= dict.fromkeys(params.NOT_BUILT, ([False, 0, "", []], [], [], [True, {}, 5]))
COMMON |= dict.fromkeys(params.NOT_TURNED_OFF, TRUE_ONLY)
COMMON |= dict.fromkeys(("stream", "ignore_eos", "parallel_tool_calls"), BOOLEAN)
COMMON |= dict.fromkeys(HINTS, (["24h", "of next year", ""], [], [], []))

VALUES: dict[str, dict[str, Values]] = {
  "responses": COMMON | dict.fromkeys(params.MOVED, NEVER) | {
    **dict.fromkeys(("generate", "store", "background"), BOOLEAN),
    "input":                 (["", "hi", [HI]],              [5, {}],     [],               []),
    "prompt_cache_options":  ([{}, PREWARM, {"mode": "x"}],  [True],      [],               []),
    "instructions":          (["", "Be brief."],             [5, []],     [],               []),
    "previous_response_id":  (["resp_1"],                    [5],         ["x" * 257],      []),
    "conversation":          ([],                            [],          [],               ["c", {}]),
    "max_output_tokens":     ([1, 15, 2**31],                [1.0, "9"],  [0, -1],          []),
    "max_tool_calls":        ([1, 100],                      ["1"],       [0],              []),
    "include":               ([[], [*params.INCLUDES]],      ["all"],     [],               []),
    "reasoning":             ([{}, {"effort": "none"}, LOW], ["none"],    [],               []),
    "text":                  ([{}, PLAIN, VERBOSE],          ["text"],    [],               []),
    "truncation":            (["auto", "disabled"],          [False],     ["none"],         []),
    "n":                     ([1],                           [],          [],               [2, "many"]),
    "logprobs":              ([False],                       [],          [],               [True, 5]),
  },
  "chat": COMMON | {
    "messages":              ([[HI]],                        ["hi", 5],   [],               []),
    "n":                     ([1, 16],                       ["1", True], [0, 17],          []),
    "max_tokens":            ([1, 2**31],                    [1.5],       [0],              []),
    "max_completion_tokens": ([1, 2**31],                    [True],      [0],              []),
    "logprobs":              ([True, False],                 [1, 5],      [],               []),
    "response_format":       ([{"type": "text"}, JSON],      ["text"],    [],               []),
    "reasoning_effort":      (["none", "low", "max"],        [1],         ["much"],         []),
    "modalities":            ([["text"]],                    [],          [],               [["audio"]]),
  },
}
CODES = (TYPE, VALUE, UNSUPPORTED)

#   API           param of the error              code         what is wrong
INSIDE: list[tuple[str, str, str, Json]] = [
    ("responses", "conversation",                 EXCLUSIVE,   {"previous_response_id": "r"} | IN_ONE),
    ("responses", "input",                        MISSING,     {"input": []}),
    ("chat",      "messages",                     MISSING,     {"messages": []}),
    ("responses", "stop[1]",                      VALUE,       {"stop": ["a", ""]}),
    ("responses", "reasoning.effort",             VALUE,       {"reasoning": {"effort": "much"}}),
    ("responses", "text.format.schema",           MISSING,     {"text": {"format": SCHEMA}}),
    ("responses", "stream_options",               VALUE,       {"stream_options": {}}),
    ("chat",      "response_format.type",         VALUE,       {"response_format": {"type": "xml"}}),
    ("chat",      "response_format.name",         MISSING,     {"response_format": {"type": "json_schema"}}),
    # It was taken for a format of the type "object", which is none, and nothing was enforced.
    ("chat",      "response_format.json_schema.name", MISSING, {"response_format": UNWRAPPED}),
    ("responses", "tools[0]",                     TYPE,        {"tools": [5]}),
    ("responses", "tools[1].type",                MISSING,     {"tools": [FUNCTION, {}]}),
    ("responses", "tools[0].name",                MISSING,     {"tools": [CUSTOM | {"name": None}]}),
    ("responses", "tools[0].format.definition",   MISSING,     {"tools": [CUSTOM | {"format": UNDEFINED}]}),
    ("responses", "tools",                        VALUE,       {"tools": [NAMESPACE, JOINED]}),
    ("chat",      "tools[0].custom.format.grammar.syntax", MISSING, {"tools": [NO_SYNTAX]}),
    ("chat",      "tools[0].function.name",       MISSING,     {"tools": [NESTED | {"function": {}}]}),
    ("responses", "tool_choice",                  VALUE,       ONE_TOOL | {"tool_choice": OTHER}),
    ("responses", "tool_choice.type",             MISSING,     ONE_TOOL | {"tool_choice": {"name": "f"}}),
    ("responses", "tool_choice.type",             UNSUPPORTED, HOSTED_ONLY | {"tool_choice": FORCED}),
    ("responses", "tool_choice.type",             UNSUPPORTED, ONE_TOOL | {"tool_choice": {"type": "auto"}}),
    ("responses", "tool_choice.tools",            MISSING,     {"tool_choice": {"type": "allowed_tools"}}),
    ("responses", "tool_choice",                  VALUE,       ONE_TOOL | {"tool_choice": NONE_OF_THEM}),
    ("responses", "tools",                        BAD_SCHEMA,  NO_OBJECT | {"tool_choice": "required"}),
    ("chat",      "tools[0].function.async",      UNSUPPORTED, {"tools": [ASYNC]}),
    ("responses", "input[0].tools[0].name",       MISSING,     {"input": [LOADS_NAMELESS, HI]}),
]
# fmt: on


def read(api: str, change: Json, defaults: Json | None = None) -> Request:
    from_body, body, _ = APIS[api]
    return from_body(body | change, defaults or {})


def context(api: str, name: str, value: Any) -> Json:
    """The value in a request that allows for it."""
    needs = STREAM if name == "stream_options" else {}
    return needs | {name: value}


def refusal(api: str, change: Json) -> BadInput:
    with pytest.raises(BadInput) as caught:
        read(api, change)
    assert caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    return caught.value


ROWS = [(api, name, values) for api, table in VALUES.items() for name, values in table.items()]
GOOD = [(api, name, value) for api, name, (good, *_) in ROWS for value in good]
BAD = [
    (api, name, code, context(api, name, value))
    for api, name, (_, *bad) in ROWS
    for values, code in zip(bad, CODES, strict=True)
    for value in values
]


@pytest.mark.parametrize("api", APIS)
def test_no_row_is_missing_here(api: str) -> None:
    assert VALUES[api].keys() == APIS[api][2].keys()
    assert {name for name, (_, *bad) in VALUES[api].items() if not any(bad)} == {*HINTS}
    with pytest.raises(BadInput, match="must be a JSON object"):
        APIS[api][0]([RESPONSES_BODY], {})


@pytest.mark.parametrize(("api", "name", "value"), GOOD)
def test_good_value(api: str, name: str, value: Any) -> None:
    request = read(api, context(api, name, value))
    if APIS[api][2][name].echo and name != "tools":
        assert request.echo.get(name, value) == value


@pytest.mark.parametrize(("api", "param", "code", "change"), [*BAD, *INSIDE])
def test_bad_value(api: str, param: str, code: str, change: Json) -> None:
    error = refusal(api, change)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(("api", "name"), [row[:2] for row in ROWS])
def test_null_is_absent(api: str, name: str) -> None:
    if name in ("model", "input" if api == "responses" else "messages"):
        error = refusal(api, {name: None})
        assert (error.param, error.code) == (name, "missing_required_parameter")
    else:
        assert read(api, {name: None}) == read(api, {})


def test_a_refusal_is_short() -> None:
    """Bug: the id of a call was repeated, however long it was."""
    output = {"type": "function_call_output", "call_id": "x" * 1_000_000, "output": ""}
    with pytest.raises(BadInput) as caught:
        read("responses", {"input": [output]})
    assert len(caught.value.message) == len(str(caught.value)) == MAX_MESSAGE


@pytest.mark.parametrize("api", APIS)
def test_unknown_parameters_change_nothing_and_are_named(api: str) -> None:
    plain = read(api, {})
    assert read(api, {"banana": object(), "temprature": 0, "of_none": None}) == dataclasses.replace(
        plain, not_run=("banana", "temprature")
    )
    assert plain.not_run == ()


@pytest.mark.bug("M12")
def test_what_is_not_run_is_named() -> None:
    """Hosted tools were dropped without a word, and the limit on their calls with them."""
    tools = [FUNCTION, {"type": "mcp", "server_label": "x"}, HOSTED, HOSTED]
    not_run = read("responses", {"tools": tools, "max_tool_calls": 3}).not_run
    assert not_run == ("max_tool_calls", "mcp", "web_search")


def test_names_of_what_is_not_run_fit_into_a_header() -> None:
    odd = {'a"b\\c\r\n': 1, "é\N{LINE SEPARATOR}": 1, "x" * 65: 1} | {f"p{i}": 1 for i in range(9)}
    names = read("chat", odd).not_run
    assert names == ("a?b?c??", "??", "x" * 64, "p0", "p1", "p2", "p3", "p4")


# --- what comes of it ---------------------------------------------------------------------------------------

# fmt: off
MEANING: list[tuple[str, str, Any, Json]] = [
#   API           attribute          value                       change
    ("responses", "max_tokens",      5,                          {"max_output_tokens": 5}),
    ("chat",      "max_tokens",      6,                          BOTH_LIMITS),
    ("responses", "n_top_logprobs",  0,                          {"include": [SHOWN]}),
    ("chat",      "n_top_logprobs",  0,                          {"logprobs": True}),
    ("chat",      "n_top_logprobs",  3,                          {"top_logprobs": 3}),
    ("responses", "truncate",        True,                       {"truncation": "auto"}),
    ("chat",      "include_usage",   True,                       {}),
    ("chat",      "include_usage",   False,                      STREAM),
    ("responses", "template_kwargs", thinking(True, "low"),      {"reasoning": LOW}),
    ("chat",      "template_kwargs", thinking(False, "low"),     {"reasoning_effort": "none"}),
    ("chat",      "tools",           [TOLD],                     {"tools": [NESTED]}),
    ("responses", "tools",           [TOLD],                     {"tools": [FUNCTION, HOSTED]}),
    ("responses", "structured_output", None,                       {"tools": [FUNCTION, CUSTOM, NAMESPACE]}),
    ("responses", "structured_output", Must("required", P, True), {"tools": [CUSTOM], "tool_choice": PICKED}),
    ("responses", "structured_output", Must("auto", P),          TWO_TOOLS | {"tool_choice": SOME}),
    ("responses", "structured_output", KEPT_TO,                    {"tools": [PATCH]}),
    ("responses", "structured_output", Must("required", IN_N, True), NAMED_IN_N),
    ("responses", "called",          BY_NAME,                    {"tools": [FUNCTION, NAMESPACE, HOSTED]}),
    ("chat",      "called",          {"p": CHAT_P},              {"tools": [NESTED_PATCH]}),
    ("chat",      "called",          {},                         TOOLS | {"tool_choice": "none"}),
    ("responses", "structured_output", Must("required", F),      ONE_TOOL | {"tool_choice": ALLOWED}),
    ("responses", "structured_output", Must("required", F, True), ONE_TOOL | {"tool_choice": NAMED}),
    ("responses", "structured_output", Must("auto", F),          {"tools": [FUNCTION | {"strict": True}]}),
    ("chat",      "structured_output", Must("required", F, True), TOOLS | {"tool_choice": NESTED}),
    ("chat",      "structured_output", Must("required", F),      TOOLS | {"tool_choice": CHAT_ONLY}),
    ("chat",      "structured_output", OBJECT,                     {"response_format": JSON}),
    ("responses", "generate",        False,                      {"prompt_cache_options": PREWARM}),
    ("responses", "max_tokens",      1,                          {"generate": False, "max_output_tokens": 9}),
    ("responses", "tools",           [TOLD],                     {"input": LOADS, "tools": [DEFERRED]}),
    ("chat",      "generate",        True,                       {"generate": False}),
    ("responses", "messages",        [BRIEF, HI],                {"instructions": BRIEF["content"]}),
]

#  change                                   member of the response object: what it says
ECHOES: list[tuple[Json, Json]] = [
    ({},                                    {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0,
                                             "frequency_penalty": 0.0, "top_logprobs": 0, "tools": [],
                                             "tool_choice": "auto", "truncation": "disabled", "metadata": {},
                                             "parallel_tool_calls": True, "store": True, "background": False,
                                             "text": {"format": {"type": "text"}}, "service_tier": "default",
                                             "reasoning": {"effort": None, "summary": None},
                                             "previous_response_id": None, "instructions": None,
                                             "max_output_tokens": None, "max_tool_calls": None,
                                             "safety_identifier": None, "prompt_cache_key": None}),
    ({"service_tier": "flex"},              {"service_tier": "default"}),
    ({"text": {"verbosity": "low"}},        {"text": {"format": {"type": "text"}, "verbosity": "low"}}),
    ({"reasoning": {"effort": "low"}},      {"reasoning": {"effort": "low", "summary": None}}),
    ({"tools": [{"type": "function", "name": "f"}]},  {"tools": [FUNCTION]}),
    (NAMED_IN_N,                            {"tool_choice": IN_NAMESPACE}),
    (TWO_TOOLS | {"tool_choice": SOME},     {"tool_choice": SOME}),
    ({"tools": [PATCH, NAMESPACE]},         {"tools": [PATCH, NAMESPACE]}),
]
# fmt: on


@pytest.mark.parametrize(("api", "attribute", "value", "change"), MEANING)
def test_meaning(api: str, attribute: str, value: Any, change: Json) -> None:
    found = getattr(read(api, change), attribute)
    if isinstance(found, Must):
        found = found._replace(schema_path="")
    assert found == value


@pytest.mark.parametrize("api", APIS)
def test_sampling(api: str) -> None:
    found = read(api, {"top_k": -1, "logit_bias": {"05": 1}, "min_p": 0.5}).sampling
    assert found.keys() == params.SAMPLING.keys()
    assert (found["top_k"], found["logit_bias"], found["min_p"], found["seed"]) == (-1, {5: 1}, 0.5, None)


@pytest.mark.parametrize(("change", "members"), ECHOES)
def test_echo(change: Json, members: Json) -> None:
    echo = read("responses", change).echo
    assert {name: echo[name] for name in members} == members
    assert echo.keys() == ECHOES[0][1].keys()


@pytest.mark.parametrize("api", APIS)
def test_defaults_are_the_models(api: str) -> None:
    default = {"temperature": 0.2}
    for given, holds in (({}, 0.2), ({"temperature": None}, 0.2), ({"temperature": 0}, 0)):
        request = read(api, given, default)
        assert request.sampling["temperature"] == holds
        if api == "responses":
            assert request.echo["temperature"] == holds  # numbers, never null: openresponses' schema
        else:
            assert request.echo == {}


# --- what an error quotes -----------------------------------------------------------------------------------


def test_of_a_large_value_no_more_is_written_than_is_shown() -> None:
    """Bug: all of a body of 8 MB was written, 0.25 s, to quote 60 characters."""

    class Counted(list[int]):
        n_read = 0

        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                self.n_read += 1
                yield item

    value = Counted(range(1000))
    assert shown(value).startswith("[0, 1, 2")
    assert value.n_read <= MAX_SHOWN
