"""Request JSON to a checked Request: one table row a parameter, or an error that names it.

    body of POST /v1/responses         --from_responses()--> Request
    body of POST /v1/chat/completions  --from_chat()-------> Request

Authority: https://platform.openai.com/docs/api-reference/responses/create and .../chat/create. What OpenAI
lacks (top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos, chat_template_kwargs) has vLLM's names:
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html

Rules of this file:
1. null means absent. Unknown keys are ignored: https://github.com/openresponses/openresponses
2. What would change the answer and is not built is refused with `unsupported_parameter`, never ignored.
3. A hint, which cannot change the answer, is accepted, and echoed where the response has a place for it.

Not here: what a value may be, and how an error sounds (checks.py), what messages mean (chat.py), which models
there are (api.py), how long a prompt is (worker.py).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import chat
from checks import (
    BadInput,
    Check,
    anything,
    boolean,
    integer,
    list_of,
    mapping,
    members,
    missing,
    needed,
    number,
    one_of,
    refused,
    shown,
    string,
    text,
    unsupported,
    wrong_value,
)
from tools import Grammar, Tool, joined

MAX_STOP = 1024  # characters of a stop string: so many are held back
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_GRAMMAR = 2**16  # characters

Calls = Literal["none", "auto", "required"]  # may the answer, or must it, call functions


class Demand(NamedTuple):
    """What the answer must be, behind the reasoning."""

    calls: Calls
    functions: tuple[tuple[str, dict[str, Any]], ...] = ()  # those it may call: name, schema of the arguments
    one_call: bool = False
    inputs: tuple[tuple[str, Grammar], ...] = ()  # of those of them that are custom tools with a grammar
    schema: dict[str, Any] | None = None  # of the text, where it is to be JSON
    schema_path: str = ""  # where that stands in the request


class ToolChoice(NamedTuple):
    calls: Calls
    allowed: list[Tool]  # those that may be called
    named: bool  # one, by its name


class TextFormat(NamedTuple):
    schema: dict[str, Any] | None  # None: any text
    path: str  # where the schema stands in the request


@dataclass(frozen=True)
class Request:
    """What is asked for, the same for both APIs."""

    model: str
    given: frozenset[str]  # parameters that the client has set itself; the others have their defaults
    messages: list[chat.Message]
    tools: list[dict[str, Any]]  # as chat templates take them; [] also when tool_choice is none
    called: dict[str, Tool]  # what the calls mean, by the names in `tools`
    demand: Demand | None  # None: the model may say anything
    named_call: bool  # tool_choice names the one tool to call
    stream: bool
    include_usage: bool  # chat: one more chunk with the usage
    n: int  # choices
    max_tokens: int | None  # None: as far as the context reaches
    sampling: dict[str, Any]  # those of SAMPLING; seed None: another one each time
    n_top_logprobs: int | None  # None: no logprobs
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool  # go on behind the model's own end
    store: bool  # Responses: keep it, so that it can be asked for and continued
    background: bool  # Responses: run it apart from this request
    parallel_tool_calls: bool
    truncate: bool  # drop the oldest messages rather than refuse a prompt that is too long
    seal_reasoning: bool  # Responses: reasoning items carry a blob of themselves, to be given back
    template_kwargs: dict[str, Any]  # for the chat template: enable_thinking and whatever else it knows
    echo: dict[str, Any]  # Responses: the members of the response object that repeat the request


# --- checks of one parameter each ---------------------------------------------------------------------------


def metadata(value: Any, path: str) -> dict[str, str]:
    if len(mapping(value, path)) > 16:
        raise wrong_value(path, "at most 16 pairs", f"{len(value)} pairs")
    return {string(64)(k, path): string(512)(v, f"{path}.{k}") for k, v in value.items()}


def logit_bias(value: Any, path: str) -> dict[int, float]:
    bias = {}
    for key, amount in mapping(value, path).items():
        if not re.fullmatch("[0-9]{1,9}", key):
            raise wrong_value(path, "token ids as keys", key)
        bias[int(key)] = number(-100, 100)(amount, f"{path}.{key}")
    return bias


def identifier(value: Any, path: str) -> str:
    if not NAME.fullmatch(text(value, path)):
        raise wrong_value(path, "1 to 64 letters, digits, '_' or '-'", value)
    return str(value)


def top_k(value: Any, path: str) -> int:
    """0 is all; -1 is vLLM's."""
    return int(max(integer(-1, 2**31)(value, path), 0))


def stop(value: Any, path: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (string(MAX_STOP, min_length=1)(value, path),)
    return tuple(list_of(string(MAX_STOP, min_length=1), max_items=4)(value, path))


# --- the parameters -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    check: Check
    default: Any = None
    echo: bool = False  # the response object has a member of this name


NOT_STORED = "This server keeps Responses, not chat completions: leave it out, or send false."


def output_format(value: Any, path: str) -> dict[str, Any]:
    given = members(type=one_of("text", "json_schema", "json_object"))(value, path)
    if "type" not in given:
        raise missing(f"{path}.type")
    return dict(given)


def template_kwargs(value: Any, path: str) -> dict[str, Any]:
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in mapping(value, path):
            raise unsupported(f"{path}.{name}", "The answer always begins a new turn of the assistant.")
    return dict(value)


SUMMARIES = ("auto", "concise", "detailed")
# fmt: off
#   effort     what the template of gpt-oss knows it as; others have a switch
EFFORTS = {
    "none":    "low",
    "minimal": "low",
    "low":     "low",
    "medium":  "medium",
    "high":    "high",
    "xhigh":   "high",
    "max":     "high",
}
# fmt: on
INCLUDES = (  # openai.types.responses.ResponseIncludable
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
)

# fmt: off
# How a token is chosen: the fields of model.Sampling.
#   parameter              check                                       default     echoed
SAMPLING = {
    "temperature":         Row(number(0, 2),                           1.0,        True),
    "top_p":               Row(number(0, 1),                           1.0,        True),
    "top_k":               Row(top_k,                                  0),
    "min_p":               Row(number(0, 1),                           0.0),
    "seed":                Row(integer(-(2**63), 2**63 - 1)),
    "presence_penalty":    Row(number(-2, 2),                          0.0,        True),
    "frequency_penalty":   Row(number(-2, 2),                          0.0,        True),
    "repetition_penalty":  Row(number(0.01, 10),                       1.0),
    "logit_bias":          Row(logit_bias,                             {}),
}

# What others have and this server has not.
#   parameter                    what asks for nothing
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "structured_outputs":         (),        # vLLM's, as all but `grammar`; OpenAI has text.format
    "guided_json":                (),        # its older names
    "guided_choice":              (),
    "guided_regex":               (),
    "guided_grammar":             (),
    "grammar":                    ("",),     # llama.cpp's
    "min_tokens":                 (0,),
    "bad_words":                  ([],),
    "allowed_token_ids":          (),
    "prompt_logprobs":            (),
    "logprob_token_ids":          (),
    "best_of":                    (1,),
    "use_beam_search":            (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens":        (True,),
    "add_special_tokens":         (False,),
    "truncate_prompt_tokens":     (),
    "thinking_token_budget":      (),
    "include_reasoning":          (True,),
    "repetition_detection":       (),
    "documents":                  ([],),
    "chat_template":              (),
    "echo":                       (False,),
    "add_generation_prompt":      (True,),
    "continue_final_message":     (False,),
}

#   parameter              check                                       default     echoed
COMMON = SAMPLING | {
    "model":               Row(string(256, min_length=1)),
    "stream":              Row(boolean,                                False),
    "top_logprobs":        Row(integer(0, 20),                         0,          True),
    "stop":                Row(stop,                                   ()),
    "stop_token_ids":      Row(list_of(integer(0, 2**31)),             []),
    "ignore_eos":          Row(boolean,                                False),
    "parallel_tool_calls": Row(boolean,                                True,       True),
    "metadata":            Row(metadata,                               {},         True),
    "chat_template_kwargs": Row(template_kwargs,                       {}),
    "safety_identifier":   Row(string(128),                            None,       True),
    "prompt_cache_key":    Row(string(1024),                           None,       True),
    "service_tier":        Row(anything),
    "user":                Row(anything),
    "moderation":          Row(refused("This server does not moderate.")),
} | {name: Row(refused("It is not built here.", *harmless)) for name, harmless in NOT_BUILT.items()}

#   in chat completions    in the Responses API
MOVED = {
    "messages":              "input",
    "max_tokens":            "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format":       "text.format",
    "reasoning_effort":      "reasoning.effort",
}

RESPONSES = COMMON | {
    "input":                Row(anything),  # chat.from_responses checks it
    "instructions":         Row(text,                                  None,       True),
    "previous_response_id": Row(text,                                  None,       True),
    "conversation":         Row(refused("This server keeps no conversations; send their items as input.")),
    "store":                Row(boolean,                               True,       True),
    "background":           Row(boolean,                               False,      True),
    "stream_options":       Row(members(include_obfuscation=boolean)),
    "max_output_tokens":    Row(integer(1, 2**31),                     None,       True),
    "max_tool_calls":       Row(integer(1, 2**31),                     None,       True),  # of built-in tools
    "include":              Row(list_of(one_of(*INCLUDES)),            []),
    "reasoning":            Row(members(effort=one_of(*EFFORTS), summary=one_of(*SUMMARIES))),
    "text":                 Row(members(format=output_format, verbosity=one_of("low", "medium", "high")), {}),
    "tools":                Row(list_of(mapping, max_items=128),       []),
    "tool_choice":          Row(anything,                              "auto",     True),
    "truncation":           Row(one_of("auto", "disabled"),            "disabled", True),
    "prompt":               Row(refused("This server has no stored prompts.")),
    "context_management":   Row(refused("This server does not compact by itself.", []), []),
    "n":                    Row(refused("A response is one answer; ask for each.", 1), 1),
    "logprobs":             Row(refused("Use 'include' and 'top_logprobs'.", False)),
} | {
    name: Row(refused(f"In the Responses API, this parameter has moved to '{new}'."))
    for name, new in MOVED.items()
}

CHAT = COMMON | {
    "messages":              Row(anything),  # chat.from_chat checks them
    "n":                     Row(integer(1, 16),                       1),
    "max_tokens":            Row(integer(1, 2**31)),
    "max_completion_tokens": Row(integer(1, 2**31)),
    "logprobs":              Row(boolean,                              False),
    "stream_options":        Row(members(include_usage=boolean, include_obfuscation=boolean)),
    "response_format":       Row(output_format,                        {}),
    "tools":                 Row(list_of(mapping, max_items=128),      []),
    "tool_choice":           Row(anything,                             "auto"),
    "reasoning_effort":      Row(one_of(*EFFORTS)),
    "store":                 Row(refused(NOT_STORED, False)),
    "modalities":            Row(refused("This server takes and gives text.", ["text"])),
    "audio":                 Row(refused("This server takes and gives text.")),
    "prediction":            Row(refused("This server does not take predictions.")),
    "web_search_options":    Row(refused("This server does not search the web.")),
    "functions":             Row(refused("Use 'tools'.")),
    "function_call":         Row(refused("Use 'tool_choice'.")),
}
# fmt: on


def read(body: Any, rows: Mapping[str, Row], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter of the table, checked and resolved; `defaults` are the model's own
    (generation_config.json).
    """
    if not isinstance(body, dict):
        raise BadInput(f"The request body must be a JSON object, got {shown(body)}.", None, "invalid_type")
    values = {}
    for name, row in rows.items():
        given = body.get(name)
        values[name] = defaults.get(name, row.default) if given is None else row.check(given, name)
    if values["model"] is None:
        raise missing("model")
    values["given"] = frozenset(name for name in rows if body.get(name) is not None)
    if values["stream_options"] is not None and not values["stream"]:
        raise wrong_value("stream_options", "stream to be true when it is set", body["stream_options"])
    return values


def read_responses(body: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What can be said of a body of POST /v1/responses before its chain is known; raises BadInput."""
    if isinstance(body, dict) and body.get("conversation") and body.get("previous_response_id"):
        message = "'conversation' and 'previous_response_id' cannot both be set."
        raise BadInput(message, "conversation", "mutually_exclusive_parameters")
    return read(body, RESPONSES, defaults)


def from_responses(body: Any, defaults: Mapping[str, Any]) -> Request:
    """Check a body of POST /v1/responses that continues no chain; raises BadInput."""
    return continued(read_responses(body, defaults), ())


def continued(values: dict[str, Any], context: Sequence[dict[str, Any]]) -> Request:
    """What read_responses() has read; `context` are the items of the chain before it. Raises BadInput."""
    if values["input"] is None:
        raise missing("input")
    tools = [responses_tool(tool, f"tools[{i}]") for i, tool in enumerate(values["tools"])]
    offered = [tool for _, several in tools for tool in several]
    shows_logprobs = "message.output_text.logprobs" in values["include"]
    effort = (values["reasoning"] or {}).get("effort")
    return request(
        values,
        messages=chat.from_responses(values["input"], values["instructions"], context),
        tools=offered,
        text_format=text_format(values["text"].get("format", {}), "text.format"),
        max_tokens=values["max_output_tokens"],
        n_top_logprobs=values["top_logprobs"] if shows_logprobs else None,
        effort=effort,
        echo={name: values[name] for name, row in RESPONSES.items() if row.echo}
        | {
            "tools": [repeated for repeated, _ in tools],
            "reasoning": {"effort": effort, "summary": (values["reasoning"] or {}).get("summary")},
            "text": {"format": {"type": "text"}} | values["text"],
            "service_tier": "default",
        },
    )


def from_chat(body: Any, defaults: Mapping[str, Any]) -> Request:
    """Check a body of POST /v1/chat/completions; raises BadInput."""
    values = read(body, CHAT, defaults)
    if values["messages"] is None:
        raise missing("messages")
    if values["top_logprobs"] and not values["logprobs"]:
        raise wrong_value("top_logprobs", "logprobs to be true where it is not 0", values["top_logprobs"])
    tools = [chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(values["tools"])]
    limit = values["max_completion_tokens"]
    wanted, path = values["response_format"], "response_format.json_schema"
    if wanted.get("type") == "json_schema":
        wanted = {"type": "json_schema"} | needed(wanted, "json_schema", mapping, "response_format")
    return request(
        values,
        messages=chat.from_chat(values["messages"]),
        tools=tools,
        text_format=text_format(wanted, path),
        max_tokens=values["max_tokens"] if limit is None else limit,
        n_top_logprobs=values["top_logprobs"] if values["logprobs"] else None,
        effort=values["reasoning_effort"],
        echo={},
    )


def request(
    values: Mapping[str, Any],
    messages: list[chat.Message],
    tools: list[Tool],
    text_format: TextFormat,
    max_tokens: int | None,
    n_top_logprobs: int | None,
    effort: str | None,
    echo: dict[str, Any],
) -> Request:
    """What both APIs have in common."""
    switches = {"enable_thinking": effort != "none", "reasoning_effort": EFFORTS.get(effort or "")}
    thinking = {} if effort is None else switches
    choice = tool_choice(tools, values["tool_choice"])
    offered = tools if choice.calls != "none" else []
    return Request(
        model=values["model"],
        given=values["given"],
        messages=messages,
        tools=[tool.offer() for tool in offered],
        called={tool.known_as: tool for tool in offered},
        demand=demand(tools, choice, text_format, values["parallel_tool_calls"]),
        named_call=choice.named,
        stream=values["stream"],
        include_usage=bool((values["stream_options"] or {}).get("include_usage")) or not values["stream"],
        n=values["n"],
        max_tokens=max_tokens,
        sampling={name: values[name] for name in SAMPLING},
        n_top_logprobs=n_top_logprobs,
        stop=values["stop"],
        stop_token_ids=tuple(values["stop_token_ids"]),
        ignore_eos=values["ignore_eos"],
        store=bool(values["store"]),
        background=values.get("background", False),
        parallel_tool_calls=values["parallel_tool_calls"],
        truncate=values.get("truncation") == "auto",
        seal_reasoning="reasoning.encrypted_content" in values.get("include", ()),
        template_kwargs=thinking | values["chat_template_kwargs"],
        echo=echo,
    )


# --- tools --------------------------------------------------------------------------------------------------

Told = tuple[dict[str, Any], list[Tool]]  # a tool as the response object repeats it, and what it offers


def responses_tool(tool: dict[str, Any], path: str) -> Told:
    """Hosted tools are accepted, and never offered to the model: Codex sends some unasked."""
    kind = needed(tool, "type", one_of(*TOOL_TYPES, *HOSTED), path)
    return (tool, []) if kind in HOSTED else TOOL_TYPES[kind](tool, path)


def chat_tool(tool: dict[str, Any], path: str) -> Tool:
    """Its fields stand below a key of its type, those of a grammar below one more."""
    kind = needed(tool, "type", one_of("function", "custom"), path)
    fields, place = needed(tool, kind, mapping, path), f"{path}.{kind}"
    if kind == "function":
        return function_tool(fields, place)[1][0]
    wanted, inside = fields.get("format"), "format"
    if isinstance(wanted, dict) and wanted.get("type") == "grammar":
        inside = "format.grammar"
        wanted = {"type": "grammar", **needed(wanted, "grammar", mapping, f"{place}.format")}
    return custom_tool(fields | {"format": wanted}, place, inside=inside)[1][0]


function_fields = members(description=text, parameters=mapping, strict=boolean)
custom_fields = members(description=text)
grammar_fields = members(
    type=one_of("text", "grammar"),
    syntax=one_of("lark", "regex"),
    definition=string(MAX_GRAMMAR, min_length=1),
)


def function_tool(tool: Mapping[str, Any], path: str, namespace: str = "") -> Told:
    """All keys present, null where nothing was said: https://github.com/openresponses/openresponses (zod
    schema)
    """
    name, given = needed(tool, "name", identifier, path), function_fields(tool, path)
    echoed = {"name": name} | {k: given.get(k) for k in ("description", "parameters")}
    offered = Tool(**echoed, namespace=namespace, strict=bool(given.get("strict")))
    return {"type": "function", **echoed, "strict": offered.strict}, [offered]


def custom_tool(tool: Mapping[str, Any], path: str, namespace: str = "", inside: str = "format") -> Told:
    """A tool that takes any text, or what a grammar accepts, whose fields are `inside`."""
    name, given = needed(tool, "name", identifier, path), custom_fields(tool, path)
    place, grammar = f"{path}.{inside}", None
    wanted = grammar_fields(given.get("format", {"type": "text"}), place)
    for field in ("type", "syntax", "definition") if wanted.get("type") != "text" else ():
        if field not in wanted:
            raise missing(f"{place}.{field}")
    if wanted["type"] == "grammar":
        grammar = Grammar(wanted["syntax"], wanted["definition"], f"{place}.definition")
    about = {"name": name, "description": given.get("description")}
    offered = Tool(**about, namespace=namespace, custom=True, grammar=grammar)
    return {"type": "custom", **about, "format": wanted}, [offered]


def namespace_tool(tool: Mapping[str, Any], path: str) -> Told:
    """Functions and custom tools under one name more."""
    name = needed(tool, "name", identifier, path)
    description = text(tool.get("description") or "", f"{path}.description")
    told: list[Told] = []
    for i, inner in enumerate(needed(tool, "tools", list_of(mapping, 128), path)):
        place = f"{path}.tools[{i}]"
        kind = needed(inner, "type", one_of("function", "custom"), place)
        told.append((function_tool if kind == "function" else custom_tool)(inner, place, name))
    echoed = {"type": "namespace", "name": name, "description": description}
    return echoed | {"tools": [one for one, _ in told]}, [tool for _, tools in told for tool in tools]


TOOL_TYPES: dict[str, Callable[[dict[str, Any], str], Told]] = {
    "function": function_tool,
    "custom": custom_tool,
    "namespace": namespace_tool,
}


# Those that a server runs itself: openai.types.responses.ToolParam.
HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)


# --- what the answer must be --------------------------------------------------------------------------------


def tool_choice(tools: list[Tool], choice: Any) -> ToolChoice:
    """Whether tools may or must be called, and which.

    allowed_tools limits the calls, never the prompt: that would spoil its cached beginning (Open Responses).
    """
    known = {(tool.custom, tool.known_as): tool for tool in tools}
    names = [tool.known_as for tool in tools]
    if len(set(names)) < len(tools):
        raise wrong_value("tools", "every name once", names)
    if isinstance(choice, str):
        calls = one_of("none", "auto", "required")(choice, "tool_choice")
        picked, named = list(known), False
    else:
        calls, picked, named = picked_tools(mapping(choice, "tool_choice"))
    for custom, name in picked:
        if (custom, name) not in known:
            raise wrong_value("tool_choice", "the type and name of one of 'tools'", name)
    if calls == "required" and not picked:
        raise wrong_value("tool_choice", "functions or custom tools to choose from", choice)
    return ToolChoice(calls if picked else "none", [known[key] for key in picked], named)


def picked_tools(choice: dict[str, Any]) -> tuple[Calls, list[tuple[bool, str]], bool]:
    """Of a tool_choice that is an object: (is it a custom one, its name) of each tool that it lists."""
    kind = needed(choice, "type", text, "tool_choice")
    if kind in ("function", "custom"):
        return "required", named_tool(choice, "tool_choice"), True
    if kind in ("auto", "none", "required"):
        raise wrong_value("tool_choice", f"the string '{kind}'", choice)
    if kind != "allowed_tools":
        why = f"This server runs no tools, so none can be forced: {shown(kind)}"
        raise unsupported("tool_choice.type", why)
    fields, path = beside_or_below(choice, kind, "tool_choice")
    listed = needed(fields, "tools", list_of(named_tool, 128, min_items=1), path)
    calls = needed(fields, "mode", one_of("auto", "required"), path)
    return "required" if calls == "required" else "auto", [one for tools in listed for one in tools], False


def named_tool(value: Any, path: str) -> list[tuple[bool, str]]:
    """Nothing for a hosted tool: the model is not told of it."""
    kind = one_of("function", "custom", *HOSTED)(mapping(value, path).get("type", "function"), f"{path}.type")
    if kind in HOSTED:
        return []
    fields, path = beside_or_below(value, kind, path)
    namespace = text(fields.get("namespace") or "", f"{path}.namespace")
    return [(kind == "custom", joined(namespace, needed(fields, "name", text, path)))]


def beside_or_below(value: dict[str, Any], kind: str, path: str) -> tuple[dict[str, Any], str]:
    """The fields that belong to a type, and where: beside `type` in Responses, below its name in chat."""
    return (needed(value, kind, mapping, path), f"{path}.{kind}") if kind in value else (value, path)


def text_format(given: Mapping[str, Any], path: str) -> TextFormat:
    """The schema that the text must fit."""
    match given.get("type", "text"):
        case "json_schema":
            needed(given, "name", identifier, path)
            return TextFormat(needed(given, "schema", mapping, path), f"{path}.schema")
        case "json_object":
            return TextFormat({"type": "object"}, path)
        case _:
            return TextFormat(None, "")


def demand(tools: list[Tool], choice: ToolChoice, text: TextFormat, parallel: bool) -> Demand | None:
    """What to enforce; None: the model may say anything."""
    has_limits = any(tool.strict or tool.grammar for tool in choice.allowed)
    is_limited = len(choice.allowed) < len(tools) or has_limits
    if text.schema is None and not (choice.calls == "required" or (choice.calls == "auto" and is_limited)):
        return None
    schemas = {tool.known_as: {"type": "object"} | (tool.schema() or {}) for tool in choice.allowed}
    for name, schema in schemas.items():
        if schema["type"] != "object":
            message = f"Invalid schema for '{name}': arguments are an object."
            raise BadInput(message, "tools", "invalid_json_schema")
    return Demand(
        calls=choice.calls,
        functions=tuple(schemas.items()),
        one_call=choice.named or not parallel,
        inputs=tuple((tool.known_as, tool.grammar) for tool in choice.allowed if tool.grammar),
        schema=text.schema,
        schema_path=text.path,
    )
