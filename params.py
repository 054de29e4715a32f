"""Request JSON to a checked Request: one table row a parameter, or an error that names it.

    body of POST /v1/responses         --from_responses()--> Request
    body of POST /v1/chat/completions  --from_chat()-------> Request

Authority: https://platform.openai.com/docs/api-reference/responses/create and .../chat/create. What OpenAI
lacks (top_k, min_p, repetition_penalty, stop_token_ids, chat_template_kwargs) has the names of vLLM.

Rules of this file:
1. null means absent. Unknown keys are ignored: https://github.com/openresponses/openresponses
2. What would change the answer and is not built is refused with `unsupported_parameter`, never ignored.
3. A hint, which cannot change the answer, is accepted, and echoed where the response has a place for it.
4. Every error has a message that says what was expected and what came, the parameter's path, and a code.

Not here: what messages mean (chat.py), which models there are (api.py), how long a prompt is (worker.py).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import chat
from chat import BadInput
from tools import Grammar, Tool, joined

Check = Callable[[Any, str], Any]  # (value, its path) -> the value as we use it; raises BadRequest

MAX_ITEMS = 4096  # of a conversation: each costs time in the template, whatever the context holds
MAX_STOP = 1024  # characters of a stop string: so many are held back
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_GRAMMAR = 2**16  # characters


class BadRequest(BadInput):
    """The request cannot be served as it is."""


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
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None  # None: another one each time
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    n_top_logprobs: int | None  # None: no logprobs
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    store: bool  # Responses: keep it, so that it can be asked for and continued
    background: bool  # Responses: run it apart from this request
    parallel_tool_calls: bool
    truncate: bool  # drop the oldest messages rather than refuse a prompt that is too long
    seal_reasoning: bool  # Responses: reasoning items carry a blob of themselves, to be given back
    template_kwargs: dict[str, Any]  # for the chat template: enable_thinking and whatever else it knows
    echo: dict[str, Any]  # Responses: the members of the response object that repeat the request


# --- checks -------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """A value for an error message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def wrong_type(path: str, expected: str, value: Any) -> BadRequest:
    return BadRequest(
        f"Invalid type for '{path}': expected {expected}, got {shown(value)}.", path, "invalid_type"
    )


def wrong_value(path: str, expected: str, value: Any) -> BadRequest:
    return BadRequest(
        f"Invalid value for '{path}': expected {expected}, got {shown(value)}.", path, "invalid_value"
    )


def missing(path: str) -> BadRequest:
    return BadRequest(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")


def unsupported(path: str, why: str) -> BadRequest:
    return BadRequest(f"Unsupported parameter: '{path}'. {why}", path, "unsupported_parameter")


def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(path, "a boolean", value)
    return value


def number(low: float, high: float) -> Check:
    def check(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(path, "a number", value)
        if not low <= value <= high:  # NaN too
            raise wrong_value(path, f"a number from {low:g} to {high:g}", value)
        return value

    return check


def integer(low: int, high: int) -> Check:
    def check(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(path, "an integer", value)
        if not low <= value <= high:
            raise wrong_value(path, f"an integer from {low} to {high}", value)
        return value

    return check


def string(max_length: int = 2**20, min_length: int = 0) -> Check:
    def check(value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(path, "a string", value)
        if not min_length <= len(value) <= max_length:
            raise wrong_value(path, f"a string of {min_length} to {max_length} characters", value)
        return value

    return check


def one_of(*allowed: str) -> Check:
    def check(value: Any, path: str) -> str:
        if string()(value, path) not in allowed:
            raise wrong_value(path, "one of " + ", ".join(map(repr, allowed)), value)
        return str(value)

    return check


def list_of(item: Check, max_items: int = 1024) -> Check:
    def check(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise wrong_type(path, "a list", value)
        if len(value) > max_items:
            raise wrong_value(path, f"at most {max_items} items", f"{len(value)} items")
        return [item(v, f"{path}[{i}]") for i, v in enumerate(value)]

    return check


def mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    return value


def members(**rows: Check) -> Check:
    """An object; the members named are checked, others are let through, nulls are absent."""

    def check(value: Any, path: str) -> dict[str, Any]:
        present = {k: v for k, v in mapping(value, path).items() if v is not None}
        return {k: rows[k](v, f"{path}.{k}") if k in rows else v for k, v in present.items()}

    return check


def anything(value: Any, path: str) -> Any:
    """A hint, whatever it says: enums of hints grow monthly."""
    return value


def bounded(value: Any, path: str) -> Any:
    """A list that is checked elsewhere, but for its length."""
    return list_of(anything, MAX_ITEMS)(value, path) if isinstance(value, list) else value


def refused(why: str, *harmless: Any) -> Check:
    """Only the values that ask for nothing are taken."""

    def check(value: Any, path: str) -> Any:
        if not any(type(value) is type(h) and value == h for h in harmless):  # 0 == False
            raise unsupported(path, why)
        return value

    return check


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
#   parameter              check                                       default     echoed
COMMON = {
    "model":               Row(string(256, min_length=1)),
    "stream":              Row(boolean,                                False),
    "temperature":         Row(number(0, 2),                           1.0,        True),
    "top_p":               Row(number(0, 1),                           1.0,        True),
    "top_k":               Row(integer(-1, 2**31),                     0),         # -1 is vLLM's "all"
    "min_p":               Row(number(0, 1),                           0.0),
    "seed":                Row(integer(-(2**63), 2**63 - 1)),
    "presence_penalty":    Row(number(-2, 2),                          0.0,        True),
    "frequency_penalty":   Row(number(-2, 2),                          0.0,        True),
    "repetition_penalty":  Row(number(0.01, 10),                       1.0),
    "logit_bias":          Row(logit_bias,                             {}),
    "top_logprobs":        Row(integer(0, 20),                         0,          True),
    "stop":                Row(stop,                                   ()),
    "stop_token_ids":      Row(list_of(integer(0, 2**31)),             []),
    "parallel_tool_calls": Row(boolean,                                True,       True),
    "metadata":            Row(metadata,                               {},         True),
    "chat_template_kwargs": Row(template_kwargs,                       {}),
    "safety_identifier":   Row(string(128),                            None,       True),
    "prompt_cache_key":    Row(string(1024),                           None,       True),
    "service_tier":        Row(anything),
    "user":                Row(anything),
    "moderation":          Row(refused("This server does not moderate.")),
}

RESPONSES = COMMON | {
    "input":                Row(bounded),  # chat.from_responses checks it
    "instructions":         Row(string(),                              None,       True),
    "previous_response_id": Row(string(),                              None,       True),
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
    "context_management":   Row(refused("This server does not compact by itself.")),
}

CHAT = COMMON | {
    "messages":              Row(bounded),  # chat.from_chat checks them
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
        raise BadRequest(f"The request body must be a JSON object, got {shown(body)}.", None, "invalid_type")
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


def from_responses(body: Any, defaults: Mapping[str, Any], context: Sequence[dict[str, Any]] = ()) -> Request:
    """Check a body of POST /v1/responses; `context` are the items of the chain before it. Raises BadInput."""
    if isinstance(body, dict) and body.get("conversation") and body.get("previous_response_id"):
        message = "'conversation' and 'previous_response_id' cannot both be set."
        raise BadRequest(message, "conversation", "mutually_exclusive_parameters")
    values = read(body, RESPONSES, defaults)
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
    if body.get("top_logprobs") is not None and not values["logprobs"]:
        raise wrong_value("top_logprobs", "logprobs to be true when it is set", values["top_logprobs"])
    tools = [chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(values["tools"])]
    limit = values["max_completion_tokens"]
    wanted, path = values["response_format"], "response_format.json_schema"
    if wanted.get("type") == "json_schema":
        wanted = {"type": "json_schema"} | mapping(wanted.get("json_schema"), path)
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
        n=values.get("n", 1),
        max_tokens=max_tokens,
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=max(values["top_k"], 0),
        min_p=values["min_p"],
        seed=values["seed"],
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        repetition_penalty=values["repetition_penalty"],
        logit_bias=values["logit_bias"],
        n_top_logprobs=n_top_logprobs,
        stop=values["stop"],
        stop_token_ids=tuple(values["stop_token_ids"]),
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
    read = TOOL_TYPES.get(string()(tool.get("type"), f"{path}.type"))
    return read(tool, path) if read else (tool, [])


def chat_tool(tool: dict[str, Any], path: str) -> Tool:
    """Its fields stand below a key of its type, those of a grammar below one more."""
    kind = one_of("function", "custom")(tool.get("type"), f"{path}.type")
    place = f"{path}.{kind}"
    fields = mapping(tool.get(kind), place)
    if kind == "function":
        return function_tool(fields, place)[1][0]
    wanted, inside = fields.get("format"), "format"
    if isinstance(wanted, dict) and wanted.get("type") == "grammar":
        inside = "format.grammar"
        wanted = {"type": "grammar", **mapping(wanted.get("grammar"), f"{place}.{inside}")}
    return custom_tool(fields | {"format": wanted}, place, inside=inside)[1][0]


function_fields = members(description=string(), parameters=mapping, strict=boolean)
custom_fields = members(description=string())
grammar_fields = members(
    type=one_of("text", "grammar"),
    syntax=one_of("lark", "regex"),
    definition=string(MAX_GRAMMAR, min_length=1),
)


def function_tool(tool: Mapping[str, Any], path: str, namespace: str = "") -> Told:
    """All keys present, null where nothing was said: https://github.com/openresponses/openresponses (zod
    schema)
    """
    name, given = tool_name(tool, path), function_fields(tool, path)
    echoed = {"name": name} | {k: given.get(k) for k in ("description", "parameters")}
    offered = Tool(**echoed, namespace=namespace, strict=bool(given.get("strict")))
    return {"type": "function", **echoed, "strict": offered.strict}, [offered]


def custom_tool(tool: Mapping[str, Any], path: str, namespace: str = "", inside: str = "format") -> Told:
    """A tool that takes any text, or what a grammar accepts, whose fields are `inside`."""
    name, given = tool_name(tool, path), custom_fields(tool, path)
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
    name, description = tool_name(tool, path), string()(tool.get("description") or "", f"{path}.description")
    told: list[Told] = []
    for i, inner in enumerate(list_of(mapping, 128)(tool.get("tools"), f"{path}.tools")):
        place = f"{path}.tools[{i}]"
        kind = one_of("function", "custom")(inner.get("type"), f"{place}.type")
        told.append((function_tool if kind == "function" else custom_tool)(inner, place, name))
    echoed = {"type": "namespace", "name": name, "description": description}
    return echoed | {"tools": [one for one, _ in told]}, [tool for _, tools in told for tool in tools]


TOOL_TYPES: dict[str, Callable[[dict[str, Any], str], Told]] = {
    "function": function_tool,
    "custom": custom_tool,
    "namespace": namespace_tool,
}


def tool_name(tool: Mapping[str, Any], path: str) -> str:
    name: str = string()("" if tool.get("name") is None else tool["name"], f"{path}.name")
    if not TOOL_NAME.fullmatch(name):
        raise wrong_value(f"{path}.name", "1 to 64 letters, digits, '_' or '-'", tool.get("name"))
    return name


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
    kind = string()(choice.get("type"), "tool_choice.type")
    if kind in ("function", "custom"):
        return "required", [named_tool(choice, f"tool_choice.{kind}")], True
    if kind != "allowed_tools":
        raise unsupported("tool_choice.type", f"This server runs no tools, so none can be forced: {kind}")
    # The fields stand beside `type` in Responses, below a key of that name in chat completions.
    path = "tool_choice.allowed_tools"
    fields = mapping(choice.get(kind, choice), path)
    listed = list_of(mapping, 128)(fields.get("tools"), "tool_choice.tools")
    ours = [tool for tool in listed if tool.get("type", "function") in ("function", "custom")]
    calls = one_of("auto", "required")(fields.get("mode"), "tool_choice.mode")
    return "required" if calls == "required" else "auto", [named_tool(tool, path) for tool in ours], False


def named_tool(tool: dict[str, Any], path: str) -> tuple[bool, str]:
    kind = tool.get("type", "function")
    fields = mapping(tool.get(kind, tool), path)
    namespace = string()(fields.get("namespace") or "", path)
    return kind == "custom", joined(namespace, string()(fields.get("name"), path))


def text_format(given: Mapping[str, Any], path: str) -> TextFormat:
    """The schema that the text must fit."""
    match given.get("type", "text"):
        case "json_schema":
            for name, check in (("name", string(64, min_length=1)), ("schema", mapping)):
                if given.get(name) is None:
                    raise missing(f"{path}.{name}")
                check(given[name], f"{path}.{name}")
            return TextFormat(given["schema"], f"{path}.schema")
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
            raise BadRequest(message, "tools", "invalid_json_schema")
    return Demand(
        calls=choice.calls,
        functions=tuple(schemas.items()),
        one_call=choice.named or not parallel,
        inputs=tuple((tool.known_as, tool.grammar) for tool in choice.allowed if tool.grammar),
        schema=text.schema,
        schema_path=text.path,
    )
