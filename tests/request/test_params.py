"""Parameters: each takes a value as it is, or refuses it by its name; what comes of it, and is echoed."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from helpers.tables import table
from request import params
from request.params import CHAT, RESPONSES, Request
from request.refusals import MAX_MESSAGE, MAX_SHOWN, BadInput, shown
from request.tools import Grammar, Tool
from request.tools import StructuredOutput as Must

Json = dict[str, Any]
Read = Callable[[Any, dict[str, Any]], Request]

APIS: dict[str, tuple[Read, Json, dict[str, params.Parameter]]] = {
    "responses": (params.from_responses, {"model": "m", "input": "hi"}, RESPONSES),
    "chat": (params.from_chat, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, CHAT),
}

TYPE, VALUE, UNSUPPORTED = "invalid_type", "invalid_value", "unsupported_parameter"
MISSING = "missing_required_parameter"
NAN = float("nan")
NO_IDS = ("a", "-1", "1.0", "", "\N{SUPERSCRIPT TWO}", "9" * 5000)
HI = {"role": "user", "content": "hi"}
LOW = {"effort": "low", "summary": "auto"}
JSON = {"type": "json_object"}
OBJECT = Must("none", schema={"type": "object"})
FUNCTION = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}
ONE_TOOL = {"tools": [FUNCTION]}
CUSTOM = {"type": "custom", "name": "p", "format": {"type": "text"}}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
PATCH = CUSTOM | {"format": LARK}
NESTED_PATCH = {"type": "custom", "custom": {"name": "p", "format": {"type": "grammar", "grammar": LARK}}}
GRAMMAR = Grammar("lark", LARK["definition"], "tools[0].format.definition")
GRAMMAR_INPUT = Tool("p", custom=True, grammar=GRAMMAR).schema()
F, IN_N = (("f", {"type": "object"}),), (("n__f", {"type": "object"}),)
P, LIMITED = (("p", Tool("p", custom=True).schema()),), (("p", GRAMMAR_INPUT),)
F_, N_F, N_P = Tool("f"), Tool("f", namespace="n"), Tool("p", namespace="n", custom=True)
CHAT_P = Tool("p", custom=True, grammar=GRAMMAR._replace(path="tools[0].custom.format.grammar.definition"))
KEPT_TO = Must("auto", LIMITED, inputs=(("p", GRAMMAR),))
BY_NAME = {"f": F_, "n__f": N_F, "n__p": N_P}
NAMESPACE = {"type": "namespace", "name": "n", "description": "", "tools": [FUNCTION, CUSTOM]}
EMPTY = {"type": "namespace", "name": "n"}
NESTED = {"type": "function", "function": {"name": "f"}}
TOLD = Tool("f").definition()
TWO_TOOLS = {"tools": [FUNCTION, CUSTOM]}
TOOLS = {"tools": [NESTED]}
HOSTED = {"type": "web_search"}
NAMED = {"type": "function", "name": "f"}
PICKED = {"type": "custom", "name": "p"}
IN_NAMESPACE = {"type": "function", "name": "f", "namespace": "n"}
NAMED_IN_N = {"tools": [NAMESPACE], "tool_choice": IN_NAMESPACE}
SOME = {"type": "allowed_tools", "mode": "auto", "tools": [PICKED, HOSTED]}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
CHAT_ONLY = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NESTED]}}
DEFERRED = FUNCTION | {"defer_loading": True}
LOADS = [HI, {"type": "additional_tools", "role": "developer", "tools": [DEFERRED]}]
THINKS, SKIPS = ({"enable_thinking": thinks, "reasoning_effort": "low"} for thinks in (True, False))
BRIEF = {"role": "system", "content": "Be brief."}
BOTH_LIMITS = {"max_tokens": 5, "max_completion_tokens": 6}

# fmt: off
ODD: list[Any] = [
    True, False, -1, 7, 0.5, NAN, 10**30, "", "x" * 2000, [], [5], ["x"], [[]], {}, {"x": 5}, {"x": {}},
]
CODES = (TYPE, VALUE, UNSUPPORTED, MISSING)

#   API           param of the error  code   what is wrong; tables/params.toml has what is data alone
BAD: list[tuple[str, str, str, Json]] = [
    *((api, *row) for api, rows in table("params")["bad"].items() for row in rows),
    ("responses", "metadata",         VALUE, {"metadata": {str(i): "" for i in range(17)}}),
    ("chat",      "logit_bias",       VALUE, {"logit_bias": {str(token_id): 0 for token_id in range(301)}}),
    *(("chat",    "logit_bias",       VALUE, {"logit_bias": {id_: 1}}) for id_ in NO_IDS),
    ("responses", "tools",            VALUE, {"tools": [FUNCTION] * 129}),
]
# fmt: on


def read(api: str, change: Json, defaults: Json | None = None) -> Request:
    from_body, body, _ = APIS[api]
    return from_body(body | change, defaults or {})


def refusal(api: str, change: Json) -> BadInput:
    with pytest.raises(BadInput) as caught:
        read(api, change)
    assert caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    return caught.value


ROWS = [(api, name) for api, (_, _, rows) in APIS.items() for name in rows]


@pytest.mark.parametrize(("api", "name"), ROWS)
def test_a_value_is_taken_as_it_is_or_refused_by_its_name(api: str, name: str) -> None:
    taken, refused = [], []
    for value in ODD:
        try:
            taken.append((value, read(api, {"stream": True} | {name: value}).echo))
        except BadInput as error:
            refused.append((re.split(r"\W", str(error.param))[0], error.code in CODES))
    assert {*refused} <= {(name, True)}
    assert refused or name in ("prompt_cache_retention", "service_tier", "user")
    if APIS[api][2][name].echo and name != "tools":
        assert [echo.get(name, value) for value, echo in taken] == [value for value, _ in taken]


@pytest.mark.parametrize(("api", "param", "code", "change"), BAD)
def test_bad_value(api: str, param: str, code: str, change: Json) -> None:
    error = refusal(api, change)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(("api", "name"), ROWS)
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
    ("chat",      "max_tokens",      6,                          BOTH_LIMITS),
    ("responses", "n_top_logprobs",  0,                          {"include": [params.LOGPROBS]}),
    ("chat",      "n_top_logprobs",  0,                          {"logprobs": True}),
    ("chat",      "n_top_logprobs",  3,                          {"logprobs": True, "top_logprobs": 3}),
    ("responses", "truncate",        True,                       {"truncation": "auto"}),
    ("chat",      "include_usage",   True,                       {}),
    ("chat",      "include_usage",   False,                      {"stream": True}),
    ("responses", "template_kwargs", THINKS,                     {"reasoning": LOW}),
    ("chat",      "template_kwargs", SKIPS,                      {"reasoning_effort": "none"}),
    ("chat",      "tools",           [TOLD],                     {"tools": [NESTED]}),
    ("responses", "tools",           [TOLD],                     {"tools": [FUNCTION, HOSTED]}),
    ("responses", "tools",           [TOLD],                     {"tools": [FUNCTION, EMPTY]}),  # P20
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
    ("chat",      "structured_output", OBJECT,                   {"response_format": JSON}),
    ("chat",      "structured_output", Must("none", schema=HI),  {"response_format": JSON | {"schema": HI}}),
    ("responses", "generate",        False,                      {"prompt_cache_options": {"prewarm": True}}),
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
    ({"tools": [NAMED, PATCH, NAMESPACE]},  {"tools": [FUNCTION, PATCH, NAMESPACE]}),
    (TWO_TOOLS | {"tool_choice": SOME},     {"tool_choice": SOME}),
]
# fmt: on


@pytest.mark.bug("P22")
def test_a_hint_fits_its_parameter() -> None:
    """min_tokens was told that for functions there are 'tools', and `messages: []` that it was missing."""
    hints = {"min_tokens": "leave it out.", "functions": "there are 'tools' and 'tool_choice'."}
    for name, hint in hints.items():
        with pytest.raises(BadInput) as refusal:
            read("chat", {name: 5})
        assert refusal.value.message == f"Unsupported parameter: '{name}'. It is not built here: {hint}"
    with pytest.raises(BadInput, match="with at least one message"):
        read("chat", {"messages": []})


@pytest.mark.bug("N02")
@pytest.mark.parametrize(("api", "attribute", "value", "change"), MEANING)
def test_meaning(api: str, attribute: str, value: Any, change: Json) -> None:
    found = getattr(read(api, change), attribute)
    if isinstance(found, Must):
        found = found._replace(schema_path="")
    assert found == value


@pytest.mark.parametrize(("change", "members"), ECHOES)
def test_echo(change: Json, members: Json) -> None:
    echo = read("responses", change).echo
    assert {name: echo[name] for name in members} == members
    assert echo.keys() == ECHOES[0][1].keys()


@pytest.mark.parametrize(
    ("given", "holds"), [({}, 0.2), ({"temperature": None}, 0.2), ({"temperature": 0}, 0)]
)
def test_defaults_are_the_models(given: Json, holds: float) -> None:
    response, chat = (read(api, given, {"temperature": 0.2}) for api in APIS)
    assert response.sampling["temperature"] == chat.sampling["temperature"] == holds
    assert response.echo["temperature"] == holds  # a number, never null: openresponses' schema
    assert chat.echo == {}


def test_of_a_large_value_no_more_is_written_than_is_shown() -> None:
    """Bug: all of a body of 8 MB was written, 0.25 s, to quote 60 characters."""

    class Counted:
        n_written = 0

        def __str__(self) -> str:
            Counted.n_written += 1
            return "x"

    assert shown([Counted()] * 1000).startswith('["x", "x", ')
    assert Counted.n_written <= MAX_SHOWN
