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

Not here: what a value may be, and how an error sounds (validation.py), what messages mean (messages.py),
which models there are (api.py), how long a prompt is (worker.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from request import messages
from request.refusals import BadInput, missing, shown, unsupported, wrong_value
from request.tools import (
    Calls,
    Grammar,
    Tool,
    ToolChoice,
    chat_tool,
    identifier,
    responses_tool,
    tool_choice,
)
from request.validation import (
    Check,
    anything,
    boolean,
    integer,
    list_of,
    mapping,
    members,
    needed,
    number,
    one_of,
    refused,
    string,
    text,
)

MAX_STOP = 1024  # characters of a stop string: so many are held back


class StructuredOutput(NamedTuple):
    """What the answer must be, behind the reasoning."""

    calls: Calls
    functions: tuple[tuple[str, dict[str, Any]], ...] = ()  # those it may call: name, schema of the arguments
    one_call: bool = False
    inputs: tuple[tuple[str, Grammar], ...] = ()  # of those of them that are custom tools with a grammar
    schema: dict[str, Any] | None = None  # of the text, where it is to be JSON
    schema_path: str = ""  # where that stands in the request


class TextFormat(NamedTuple):
    schema: dict[str, Any] | None  # None: any text
    path: str  # where the schema stands in the request


@dataclass(frozen=True)
class Request:
    """What is asked for, the same for both APIs."""

    model: str
    explicit: frozenset[str]  # parameters that the client has set; the others have their defaults
    messages: list[messages.Message]
    tools: list[dict[str, Any]]  # as chat templates take them; [] also where tool_choice is none
    called: dict[str, Tool]  # the tools that calls mean, by their names in `tools`
    structured_output: StructuredOutput | None  # None: the model may say anything
    named_call: bool  # tool_choice names the one tool to call
    stream: bool
    include_usage: bool  # chat: one more chunk with the usage
    n: int  # choices
    max_tokens: int | None  # None: as far as the context reaches
    sampling: dict[str, Any]  # a value for each name in SAMPLING; seed None: another one each time
    n_top_logprobs: int | None  # None: no logprobs
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool  # go on behind the model's own end
    store: bool  # Responses: keep the response, so that it can be retrieved and continued
    background: bool  # Responses: the run does not end with the HTTP request
    parallel_tool_calls: bool
    truncate: bool  # drop the oldest messages rather than refuse a prompt that is too long
    seal_reasoning: bool  # Responses: reasoning items carry `encrypted_content`
    template_kwargs: dict[str, Any]  # for the chat template: enable_thinking and whatever else it takes
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


def model_name(body: Any) -> str:
    """The model that a request names, which decides who serves it; raises BadInput."""
    if not isinstance(body, dict):
        raise BadInput(f"The request body must be a JSON object, got {shown(body)}.", None, "invalid_type")
    if body.get("model") is None:
        raise missing("model")
    return str(COMMON["model"].check(body["model"], "model"))


def read(body: Any, rows: Mapping[str, Row], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every parameter in the table, each checked by itself.

    `defaults` are the model's own (generation_config.json). Raises BadInput.
    """
    values: dict[str, Any] = {"model": model_name(body)}
    explicit = frozenset(name for name in rows if body.get(name) is not None)
    for name, row in rows.items():
        if name in explicit:
            values[name] = row.check(body[name], name)
        else:
            values[name] = defaults.get(name, row.default)
    if values["stream_options"] is not None and not values["stream"]:
        raise wrong_value("stream_options", "stream to be true when it is set", body["stream_options"])
    return values | {"explicit": explicit}


def read_responses(body: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a body of POST /v1/responses: all that can be checked without its chain."""
    if isinstance(body, dict) and body.get("conversation") and body.get("previous_response_id"):
        message = "'conversation' and 'previous_response_id' cannot both be set."
        raise BadInput(message, "conversation", "mutually_exclusive_parameters")
    return read(body, RESPONSES, defaults)


def from_responses(body: Any, defaults: Mapping[str, Any]) -> Request:
    """Check a body of POST /v1/responses that refers to nothing; raises BadInput."""
    values = read_responses(body, defaults)
    return responses_request(values, (), values["input"])


def responses_request(values: Mapping[str, Any], chain: Sequence[dict[str, Any]], input: Any) -> Request:
    """The Request of what read_responses() has read and items.resolve() has resolved; raises BadInput."""
    if input is None:
        raise missing("input")
    tools = [responses_tool(tool, f"tools[{i}]") for i, tool in enumerate(values["tools"])]
    offered = [tool for _, several in tools for tool in several]
    reasoning = values["reasoning"] or {}
    n_top_logprobs = None
    if "message.output_text.logprobs" in values["include"]:
        n_top_logprobs = values["top_logprobs"]
    echo = {name: values[name] for name, row in RESPONSES.items() if row.echo}
    echo |= {
        "tools": [repeated for repeated, _ in tools],
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "text": {"format": {"type": "text"}} | values["text"],
        "service_tier": "default",
    }
    return request(
        values,
        messages=messages.from_responses(input, values["instructions"], chain),
        tools=offered,
        text_format=text_format(values["text"].get("format", {}), "text.format"),
        max_tokens=values["max_output_tokens"],
        n_top_logprobs=n_top_logprobs,
        effort=reasoning.get("effort"),
        echo=echo,
    )


def from_chat(body: Any, defaults: Mapping[str, Any]) -> Request:
    """Check a body of POST /v1/chat/completions; raises BadInput."""
    values = read(body, CHAT, defaults)
    if values["messages"] is None:
        raise missing("messages")
    if values["top_logprobs"] and not values["logprobs"]:
        raise wrong_value("top_logprobs", "logprobs to be true where it is not 0", values["top_logprobs"])
    response_format = values["response_format"]
    if response_format.get("type") == "json_schema":
        inside = needed(response_format, "json_schema", mapping, "response_format")
        response_format = {"type": "json_schema"} | inside
    max_tokens = values["max_completion_tokens"]
    if max_tokens is None:
        max_tokens = values["max_tokens"]  # its older name
    n_top_logprobs = None
    if values["logprobs"]:
        n_top_logprobs = values["top_logprobs"]
    return request(
        values,
        messages=messages.from_chat(values["messages"]),
        tools=[chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(values["tools"])],
        text_format=text_format(response_format, "response_format.json_schema"),
        max_tokens=max_tokens,
        n_top_logprobs=n_top_logprobs,
        effort=values["reasoning_effort"],
        echo={},
    )


def request(
    values: Mapping[str, Any],
    messages: list[messages.Message],
    tools: list[Tool],
    text_format: TextFormat,
    max_tokens: int | None,
    n_top_logprobs: int | None,
    effort: str | None,
    echo: dict[str, Any],
) -> Request:
    """What both APIs have in common."""
    choice = tool_choice(tools, values["tool_choice"])
    offered = [] if choice.calls == "none" else tools
    stream_options = values["stream_options"] or {}
    return Request(
        model=values["model"],
        explicit=values["explicit"],
        messages=messages,
        tools=[tool.offer() for tool in offered],
        called={tool.known_as: tool for tool in offered},
        structured_output=structured_output(tools, choice, text_format, values["parallel_tool_calls"]),
        named_call=choice.named,
        stream=values["stream"],
        include_usage=bool(stream_options.get("include_usage")) or not values["stream"],
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
        template_kwargs=thinking_kwargs(effort) | values["chat_template_kwargs"],
        echo=echo,
    )


def thinking_kwargs(effort: str | None) -> dict[str, Any]:
    """What the chat templates of reasoning models take; {} leaves it to the template."""
    if effort is None:
        return {}
    return {"enable_thinking": effort != "none", "reasoning_effort": EFFORTS[effort]}


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


def structured_output(
    tools: list[Tool], choice: ToolChoice, text: TextFormat, parallel: bool
) -> StructuredOutput | None:
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
    return StructuredOutput(
        calls=choice.calls,
        functions=tuple(schemas.items()),
        one_call=choice.named or not parallel,
        inputs=tuple((tool.known_as, tool.grammar) for tool in choice.allowed if tool.grammar),
        schema=text.schema,
        schema_path=text.path,
    )
