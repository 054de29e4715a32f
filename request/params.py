"""Parameters: request JSON to a checked Request, one table row a parameter, or an error that names it.

    body of POST /v1/responses         --read(), items.resolve(), responses_request()--> Request
    body of POST /v1/chat/completions  --from_chat()-------> Request
    body of POST /v1/messages          --from_messages()---> Request

A new parameter is one row of COMMON (all APIs), RESPONSES, CHAT or MESSAGES: the check of its value, its
default, and whether the response object repeats it. A parameter that we only refuse is a name in NOT_BUILT.
The effect of a parameter is a field of Request, filled in request(), which knows chat's names alone:
responses_request(), from_chat() and from_messages() first move parameters with another name or place under
that name.

Authority: https://platform.openai.com/docs/api-reference/responses/create and .../chat/create;
https://platform.claude.com/docs/en/api/messages/create. Others (top_k, min_p, repetition_penalty,
stop_token_ids, ignore_eos, chat_template_kwargs) have vLLM's names:
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html

Rules of this file:
1. null means absent.
2. We refuse a parameter with `unsupported_parameter` if it would change the meaning of the answer and we have
   not built it.
3. Unknown parameters and unknown types of tools are accepted, as https://github.com/openresponses/openresponses
   wants it, and named in Request.not_run, so that the answer can name them.
4. A hint, which cannot change the answer, is accepted, and echoed if the response has a place for it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from request import messages
from request.refusals import BadInput, missing, shown, wrong_value
from request.tools import (
    MAX_TOOLS,
    StructuredOutput,
    Tool,
    demands,
    read_client_tool,
    read_tool,
    text_format,
)
from request.validation import (
    Check,
    Place,
    boolean,
    hint,
    integer,
    list_of,
    mapping,
    members,
    number,
    one_of,
    pairs_of,
    place,
    refused,
    string,
    text,
    text_or_object,
)
from sse import Object

Defaults = Mapping[str, Any]  # of a model's parameters, by their names (generation_config.json)
FREE_TEXT = {"type": "text"}  # a response_format


# --- the parameters -----------------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """A row of a table. The tables are below the fold, for a plain request gives four of their parameters:

    "model":       Parameter(string(1, 256))
    "input":       Parameter(input_items, [])
    "stream":      Parameter(boolean,       False)
    "temperature": Parameter(number(0, 2),  1.0,    True)
    """

    check: Check
    default: Any = None
    echo: bool = False  # the response object has a member of this name


def input_items(value: Any, path: str) -> Any:
    """Return the items of the input; a text is a message of the user."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return list_of(mapping, messages.MAX_ITEMS)(value, path)


@dataclass(frozen=True)
class Request:
    """A checked request, in the same form for all APIs."""

    model: str
    owner: str  # who asks: digest of the API key; "": the server needs none
    explicit: frozenset[str]  # parameters that the client has set; the others have their defaults
    not_run: tuple[str, ...]  # unknown parameters and types of tools: accepted, and without any effect
    messages: messages.Messages
    sampling: Object  # a value for each name in SAMPLING; seed None: another one each time
    max_tokens: int | None  # None: as far as the context reaches
    stream: bool
    echo: Object  # Responses: the members of the response object that repeat the request

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    n: int  # choices
    tools: list[Object]  # as chat templates take them, even if tool_choice is none
    response_format: Object  # of the text, in Responses' form, as an upstream is asked for it
    reasoning_effort: str | None
    include_usage: bool  # chat: one more chunk with the usage
    n_top_logprobs: int | None  # None: no logprobs
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool  # go on after the model's stop token
    parallel_tool_calls: bool
    template_kwargs: Object  # variables of the chat template, such as enable_thinking
    # Tools that may be called, by their names in `tools`; {}: tool_choice is none.
    called: dict[str, Tool] = field(default_factory=dict)
    structured_output: StructuredOutput | None = None  # None: the model may say anything
    named_call: bool = False  # tool_choice names the one tool to call
    store: bool = False  # Responses: keep the response, so that it can be retrieved and continued
    truncate: bool = False  # drop the oldest messages rather than refuse a prompt that is too long
    seal_reasoning: bool = False  # Responses: reasoning items carry `encrypted_content`
    background: bool = False  # Responses: the run does not end with the HTTP request
    generate: bool = True  # False: compute the prompt for the prefix cache, and answer nothing
    compacts: bool = False  # the model's text is the summary that becomes a compaction


# --- reading them -------------------------------------------------------------------------------------------


def model_name(body: Any) -> str:
    """Return the model that a request names, which decides who serves it; raises BadInput."""
    if not isinstance(body, dict):
        raise BadInput(f"The request body must be a JSON object, got {shown(body)}.", code="invalid_type")
    return str(COMMON["model"].check(body.get("model"), "model"))


def read(table: Mapping[str, Parameter], body: Any, defaults: Defaults, owner: str = "") -> Object:
    """Return the value of every parameter in the table, each checked by itself, and a few more by name:
    `explicit`, `not_run`, `owner`. Raises BadInput.

    `defaults` are the model's own (generation_config.json).
    """
    values = {name: parameter.default for name, parameter in table.items()}
    values |= {**defaults, "model": model_name(body)}
    given = [name for name in body if body[name] is not None]
    known = [name for name in given if name in table]
    values |= {name: table[name].check(body[name], name) for name in known}
    if "stream_options" in given and not values["stream"]:
        raise wrong_value("stream_options", "stream to be true when it is set", body["stream_options"])
    not_run = [name for name in given if name not in table or name == "max_tool_calls"]
    return values | {"explicit": frozenset(known), "not_run": not_run, "owner": owner}


def responses_request(values: Object, chain: messages.Items, input: messages.Items) -> Request:
    """Return the Request of what read() has read and items.resolve() has resolved; raises BadInput."""
    conversation = messages.from_items(input, values["instructions"], chain)
    generate = values["generate"] and not values["prompt_cache_options"].get("prewarm")
    echo = {name: values[name] for name in ECHOED} | {
        "tools": [entry.echo for entry in values["tools"]],
        "service_tier": SERVICE_TIER,
    }
    by_chats_names = {
        "echo": echo,
        # A warm-up chooses one token, with the last row of the prompt; the client does not see it.
        "max_tokens": values["max_output_tokens"] if generate else 1,
        "logprobs": LOGPROBS in values["include"],
        "response_format": values["text"]["format"],
        "reasoning_effort": values["reasoning"]["effort"],
        "generate": generate,
        "truncate": values["truncation"] == "auto",
        "seal_reasoning": SEALED_REASONING in values["include"],
    }
    return request(values | by_chats_names, "text.format.schema", conversation)


def request(values: Object, schema_path: str, conversation: messages.Conversation) -> Request:
    """Return the Request of parameters that have chat's names, and of what was said before.

    `schema_path` is the place of the text's schema in the body.
    """
    values = values | {
        "messages": conversation.messages,
        "not_run": (*values["not_run"], *conversation.not_read),
    }
    is_free = values["tool_choice"] == "auto" and values["response_format"] == FREE_TEXT
    # A plain request demands no form of its answer.
    if values["tools"] or conversation.brought or not is_free:
        values |= demands(values, conversation.brought, schema_path)
    if values["not_run"]:
        values["not_run"] = printable(values["not_run"])
    # Most fields of Request are parameters of the same name, in `values`. Fields in neither dict keep their
    # defaults: those that this API lacks, what only tools demand, and `compacts`, which
    # items.summary_request() sets.
    known = values | {
        "include_usage": values["stream_options"].get("include_usage") or not values["stream"],
        "sampling": {name: values[name] for name in SAMPLING},
        "n_top_logprobs": values["top_logprobs"] if values["logprobs"] else None,
        "template_kwargs": VARIABLES.get(values["reasoning_effort"], {}) | values["chat_template_kwargs"],
    }
    return Request(**{name: known[name] for name in Request.__annotations__.keys() & known})


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

ALIAS = "default"  # a name that any model answers to
SERVICE_TIER = "default"  # the only one here
MAX_NOT_RUN = 8  # names in Request.not_run
MAX_NAME = 64  # characters of each
MAX_BIASES = 300  # OpenAI's limit
MAX_STOP = 1024  # characters of a stop string: while it may be coming, so many are held back
count = integer(1, 2**31)

# fmt: off
#   effort     as gpt-oss's template knows it; other templates have `enable_thinking`, false for none
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
# Variables for the chat templates of reasoning models.
VARIABLES = {
    effort: {"enable_thinking": effort != "none", "reasoning_effort": known}
    for effort, known in EFFORTS.items()
}

SEALED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
INCLUDES = (  # openai.types.responses.ResponseIncludable
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    SEALED_REASONING,
    LOGPROBS,
)
# Unsupported parameters of OpenAI, vLLM and llama.cpp. Their values false, 0, "" and [] ask for nothing, and
# only these are accepted.
NOT_BUILT = (
    "structured_outputs", "guided_json", "guided_choice", "guided_regex", "guided_grammar", "grammar",
    "bad_words", "allowed_token_ids", "prompt_logprobs", "logprob_token_ids", "use_beam_search", "echo",
    "include_stop_str_in_output", "add_special_tokens", "truncate_prompt_tokens", "thinking_token_budget",
    "repetition_detection", "documents", "chat_template", "continue_final_message", "min_tokens",
    "moderation", "background_options", "prompt", "context_management", "audio", "prediction",
    "web_search_options", "thread",
)  # fmt: skip
# Likewise, but true or 1 asks for nothing: it is their default.
NOT_TURNED_OFF = ("best_of", "skip_special_tokens", "include_reasoning", "add_generation_prompt")

NOT_SAID = {"effort": None, "summary": None}  # of the reasoning
reasoning = members(NOT_SAID, effort=one_of(*EFFORTS), summary=one_of("auto", "concise", "detailed"))
PLAIN_TEXT = {"format": FREE_TEXT}
text_options = members(PLAIN_TEXT, format=text_format, verbosity=one_of("low", "medium", "high"))
NOT_HERE = "This server does not implement it: leave it out."
TOOLS_INSTEAD = "This server does not implement it: use 'tools' and 'tool_choice'."


# --- the parameters of Responses ----------------------------------------------------------------------------


def stop(value: Any, path: str) -> Any:
    strings = [value] if isinstance(value, str) else value
    return list_of(string(1, MAX_STOP), 4)(strings, path)


def token_id(value: str, path: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", value):
        raise wrong_value(path, "token ids as keys", value)
    return int(value)


def moved(names: Mapping[str, str]) -> dict[str, Parameter]:
    """Return the rows of parameters that this API has by another name."""
    return {old: Parameter(refused(f"In this API it is '{new}'.")) for old, new in names.items()}


# fmt: off
#   in chat completions       in the Responses API
MOVED = {
    "messages":               "input",
    "max_tokens":             "max_output_tokens",
    "max_completion_tokens":  "max_output_tokens",
    "response_format":        "text.format",
    "reasoning_effort":       "reasoning.effort",
}

# How a token is chosen: fields of sampling.Sampling.
#   parameter                 Parameter(check,                           default,    echo)
SAMPLING = {
    "temperature":            Parameter(number(0, 2),                    1.0,        True),
    "top_p":                  Parameter(number(0, 1),                    1.0,        True),
    "top_k":                  Parameter(integer(-1, 2**31),              0),  # -1 is vLLM's 0: all tokens
    "min_p":                  Parameter(number(0, 1),                    0.0),
    "seed":                   Parameter(integer(-(2**63), 2**63 - 1)),
    "presence_penalty":       Parameter(number(-2, 2),                   0.0,        True),
    "frequency_penalty":      Parameter(number(-2, 2),                   0.0,        True),
    "repetition_penalty":     Parameter(number(0.01, 10),                1.0),
    "logit_bias":             Parameter(pairs_of(token_id, number(-100, 100), MAX_BIASES), {}),
}

COMMON = SAMPLING | {
    "model":                  Parameter(string(1, 256)),
    "stream":                 Parameter(boolean,                         False),
    "stream_options":         Parameter(members(include_usage=boolean),  {}),
    "top_logprobs":           Parameter(integer(0, 20),                  0,          True),
    "stop":                   Parameter(stop,                            []),
    "stop_token_ids":         Parameter(list_of(integer(0, 2**31), 128), []),
    "ignore_eos":             Parameter(boolean,                         False),
    "tools":                  Parameter(list_of(read_tool, MAX_TOOLS),   [],         True),
    "parallel_tool_calls":    Parameter(boolean,                         True,       True),
    "tool_choice":            Parameter(text_or_object,                  "auto",     True),
    "metadata":               Parameter(pairs_of(string(0, 64), string(0, 512), 16), {}, True),
    "chat_template_kwargs":   Parameter(mapping,                         {}),
    "safety_identifier":      Parameter(string(0, 128),                  None,       True),
    "prompt_cache_key":       Parameter(string(0, 1024),                 None,       True),
    "prompt_cache_retention": Parameter(hint),
    "service_tier":           Parameter(hint),
    "user":                   Parameter(hint),
    **dict.fromkeys(NOT_BUILT,      Parameter(refused(NOT_HERE, False, "", []))),
    **dict.fromkeys(("functions", "function_call"), Parameter(refused(TOOLS_INSTEAD, False, "", []))),
    **dict.fromkeys(NOT_TURNED_OFF, Parameter(refused(NOT_HERE, True))),
}

RESPONSES = COMMON | {
    "input":                  Parameter(input_items,                     []),
    "generate":               Parameter(boolean,                         True),
    "prompt_cache_options":   Parameter(members(prewarm=boolean),        {}),
    "instructions":           Parameter(text,                            None,       True),
    "previous_response_id":   Parameter(string(0, 256),                  None,       True),
    "store":                  Parameter(boolean,                         True,       True),
    "background":             Parameter(boolean,                         False,      True),
    "max_output_tokens":      Parameter(count,                           None,       True),
    "max_tool_calls":         Parameter(count,                           None,       True),  # of hosted tools
    "include":                Parameter(list_of(one_of(*INCLUDES)),      []),
    "truncation":             Parameter(one_of("auto", "disabled"),      "disabled", True),
    "reasoning":              Parameter(reasoning,                       NOT_SAID,   True),
    "text":                   Parameter(text_options,                    PLAIN_TEXT, True),
    "conversation":           Parameter(refused("No conversations are kept; send their items as input.")),
    "n":                      Parameter(refused("A response has one answer: send several requests.", 1), 1),
    "logprobs":               Parameter(refused("Use 'include' and 'top_logprobs'.", False)),
    **moved(MOVED),
}
# fmt: on
ECHOED = [name for name, parameter in RESPONSES.items() if parameter.echo]

# --- the parameters of the two other APIs -------------------------------------------------------------------

# fmt: off
#   thinking.type     effort, if output_config has none
THINKING = {
    "enabled":        "high",
    "adaptive":       "high",
    "between_tools":  "low",
    "disabled":       "none",
}
#   tool_choice.type  in chat completions; "tool" names one
TOOL_CHOICES = {
    "auto":           "auto",
    "any":            "required",
    "none":           "none",
    "tool":           "function",
}
# fmt: on


def nameless_format(value: Any, path: str) -> Any:
    """Check a format of the Messages API, which has no name; return it in Responses' form."""
    return text_format({"name": "answer", "strict": True} | mapping(value, path), path)


thinking = members(type=one_of(*THINKING), budget_tokens=count, display=text)
output_config = members(effort=one_of(*EFFORTS), format=nameless_format)

# fmt: off
CHAT = COMMON | {
    "messages":               Parameter(messages.objects,                []),
    "n":                      Parameter(integer(1, 16),                  1),
    "max_tokens":             Parameter(count),
    "max_completion_tokens":  Parameter(count),
    "logprobs":               Parameter(boolean,                         False),
    "response_format":        Parameter(text_format,                     FREE_TEXT),
    "reasoning_effort":       Parameter(one_of(*EFFORTS)),
    "modalities":             Parameter(refused("This server takes and gives text.", ["text"])),
}

#   in chat completions       in the Messages API
RENAMED = {
    "max_completion_tokens":  "max_tokens",
    "stop":                   "stop_sequences",
    "response_format":        "output_config.format",
    "reasoning_effort":       "output_config.effort",
    "parallel_tool_calls":    "tool_choice.disable_parallel_tool_use",
}

MESSAGES = CHAT | {
    "system":                 Parameter(messages.content_text,           ""),
    "max_tokens":             Parameter(integer(0, 2**31)),  # 0: compute the prompt, answer nothing
    "stop_sequences":         Parameter(list_of(string(1, MAX_STOP), 64), []),
    "tools":                  Parameter(list_of(read_client_tool, MAX_TOOLS), []),
    "tool_choice":            Parameter(place,                           Place({"type": "auto"}, "")),
    "thinking":               Parameter(thinking,                        {}),
    "output_config":          Parameter(output_config,                   {}),
    "output_format":          Parameter(nameless_format,                 FREE_TEXT),  # its older name
    "metadata":               Parameter(hint),
    "cache_control":          Parameter(hint),  # the prefix cache needs none
    "n":                      Parameter(refused("A message has one answer: send several requests.", 1), 1),
    "logprobs":               Parameter(refused(NOT_HERE, False),        False),
    "top_logprobs":           Parameter(refused(NOT_HERE, 0),            0),
    **moved(RENAMED),
}
del MESSAGES["context_management"]  # a hint of Claude Code's, and named as any that is not known
# fmt: on


# --- reading them -------------------------------------------------------------------------------------------


def printable(names: Iterable[str]) -> tuple[str, ...]:
    """Return as much of these names as a header may repeat: ASCII without quotes."""
    first = [*dict.fromkeys(filter(None, names))][:MAX_NOT_RUN]
    return tuple(re.sub(r'[^ -~]|["\\]', "?", name[:MAX_NAME]) for name in first)


def from_responses(body: Any, defaults: Defaults, owner: str = "") -> Request:
    """Check a body of POST /v1/responses that refers to nothing; raises BadInput."""
    values = read(RESPONSES, body, defaults, owner)
    return responses_request(values, [], values["input"])


def from_chat(body: Any, defaults: Defaults, owner: str = "") -> Request:
    """Check a body of POST /v1/chat/completions; raises BadInput."""
    values = read(CHAT, body, defaults, owner) | {"echo": {}}
    values["max_tokens"] = values["max_completion_tokens"] or values["max_tokens"]  # the older name
    if values["top_logprobs"] and not values["logprobs"]:
        raise wrong_value("top_logprobs", "'logprobs' to be true when it is set", values["top_logprobs"])
    conversation = messages.from_chat_messages(values["messages"])
    return request(values, "response_format.json_schema.schema", conversation)


def from_messages(body: Any, defaults: Defaults, owner: str = "", counts: bool = False) -> Request:
    """Check a body of POST /v1/messages, or of one that only `counts` its tokens; raises BadInput."""
    values = read(MESSAGES, body, defaults, owner)
    if values["max_tokens"] is None and not counts:
        raise missing("max_tokens")
    choice: Place = values["tool_choice"]
    calls: Any = TOOL_CHOICES[choice.need("type", one_of(*TOOL_CHOICES))]
    if calls == "function":
        calls = {"type": calls, "name": choice.need("name", text)}
    conversation = messages.from_blocks(values["messages"], values["system"])
    config = values["output_config"]
    effort = THINKING.get(values["thinking"].get("type"))
    if effort != "none":
        effort = config.get("effort", effort)
    by_chats_names = {
        "echo": {},
        "max_tokens": values["max_tokens"] or 1,
        "generate": values["max_tokens"] != 0,
        "stop": values["stop_sequences"],
        "explicit": {name.removesuffix("_sequences") for name in values["explicit"]},
        "tool_choice": calls,
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", boolean, False),
        "response_format": config.get("format", values["output_format"]),
        "reasoning_effort": effort,
        "not_run": values["not_run"] + [f"thinking.{name}" for name in values["thinking"] if name != "type"],
    }
    return request(values | by_chats_names, "output_config.format.schema", conversation)
