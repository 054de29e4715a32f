"""Rules that agents rely on: reasoning, tools and their choice, structured output, logprobs, tokens counted.

    Peer --check--> nothing, or Failed, or NotApplicable

Authority: https://platform.openai.com/docs/guides/function-calling, .../structured-outputs and .../reasoning

Rules of this file:
1. What a model may do or leave is no rule: only what was forced, forbidden or already said is judged.

Not here: one call, streamed and plain (checks_answers.py), refusals (checks_refusals.py).
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from audit.peer import NOT_THERE, REFUSED, Json, NotApplicable, Peer, Reply, expect, presumed
from audit.probes import (
    CHAT,
    CUT,
    GITHUB,
    HI,
    LIMITED,
    OPENAI,
    TOKYO,
    WEATHER,
    WITH_LOGPROBS,
    Check,
    chat_outline,
    final,
    outline,
    streamed,
    whole,
)

GUIDES = "https://platform.openai.com/docs/guides/"
TIME: Json = WEATHER | {"name": "get_time", "description": "Get the time in a city"}
TWO_TOOLS: list[Json] = [{"type": "function", **WEATHER}, {"type": "function", **TIME}]
ASK_WEATHER: Json = LIMITED | {"input": TOKYO, "tools": TWO_TOOLS}
NAMED: Json = {"type": "function", "name": "get_time"}
CHAT_TOOLS: list[Json] = [{"type": "function", "function": tool} for tool in (WEATHER, TIME)]
CHAT_WEATHER: Json = CHAT | {"messages": [{"role": "user", "content": TOKYO}], "tools": CHAT_TOOLS}
COLOUR: Json = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}, "n": {"type": "integer"}},
    "required": ["colour", "n"],
    "additionalProperties": False,
}
NAME_A_COLOUR = "Name a colour and a number."
BLANKS = re.compile(r"\s{100}")  # a model that may write blanks between two members can do so for ever


def items(response: Json, type_: str) -> list[Json]:
    return [item for item in response.get("output") or () if item.get("type") == type_]


def both(peer: Peer, path: str, body: Json) -> Iterator[tuple[str, Json]]:
    """("plain" or "streamed", the final object of a Responses answer)"""
    yield "plain", whole(peer, path, body)
    reply = streamed(peer, path, body)
    if reply.is_stream:
        with contextlib.suppress(NotApplicable):
            yield "streamed", final(reply)


def message(answer: Json) -> Json:
    """The message of a chat completion."""
    choices = answer.get("choices") or [{}]
    return choices[0].get("message") or {}


# --- which tool ---------------------------------------------------------------------------------------------


def named_call(peer: Peer) -> None:
    body = ASK_WEATHER | {"tool_choice": NAMED}
    for how, response in both(peer, "/responses", body):
        names = [call.get("name") for call in items(response, "function_call")]
        is_called = names and {*names} == {"get_time"}
        expect(is_called, f"{how}: expected a call of get_time alone, got {names}", outline(response))


def chat_named_call(peer: Peer) -> None:
    choice = {"type": "function", "function": {"name": "get_time"}}
    answer = whole(peer, "/chat/completions", CHAT_WEATHER | {"tool_choice": choice})
    names = [(call.get("function") or {}).get("name") for call in message(answer).get("tool_calls") or ()]
    expect(names and {*names} == {"get_time"}, f"expected a call of get_time alone, got {names}", answer)


def no_call(peer: Peer) -> None:
    for how, response in both(peer, "/responses", ASK_WEATHER | {"tool_choice": "none"}):
        calls = items(response, "function_call")
        expect(not calls, f"{how}: expected no call, for tool_choice forbids it", outline(response))


def chat_no_call(peer: Peer) -> None:
    answer = whole(peer, "/chat/completions", CHAT_WEATHER | {"tool_choice": "none"})
    calls = message(answer).get("tool_calls")
    expect(not calls, "expected no call, for tool_choice forbids it", answer)


def allowed_tools(peer: Peer) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
    response = whole(peer, "/responses", ASK_WEATHER | {"tool_choice": choice})
    names = [call.get("name") for call in items(response, "function_call")]
    is_called = names and {*names} == {"get_time"}
    expect(is_called, f"expected calls of the allowed tool alone, got {names}", outline(response))


def one_call(peer: Peer) -> None:
    body = ASK_WEATHER | {
        "input": "What is the weather in Tokyo, in Paris and in Rome?",
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
    }
    for how, response in both(peer, "/responses", body):
        n_calls = len(items(response, "function_call"))
        message_ = f"{how}: expected at most one call without parallel_tool_calls, got {n_calls}"
        expect(n_calls <= 1, message_, outline(response))


def unknown_tool_choice(peer: Peer) -> None:
    choice = NAMED | {"name": "no_such_tool"}
    reply = peer.post("/responses", ASK_WEATHER | {"tool_choice": choice})
    if reply.status in NOT_THERE:
        raise NotApplicable(f"no Responses API: {reply.refusal}")
    expect(400 <= reply.status < 500, "expected a refusal: there is no tool of that name", reply)


# --- calls that are cut, and their arguments ----------------------------------------------------------------


TOKENS_LESS = 4


def cut_call(peer: Peer) -> None:
    """A few tokens less than a forced call takes: it is cut within its arguments."""
    body = ASK_WEATHER | {"tool_choice": NAMED}
    usage = whole(peer, "/responses", body | {"max_output_tokens": 400}).get("usage") or {}
    limit = max(CUT, usage.get("output_tokens", 0) - TOKENS_LESS)
    for how, response in both(peer, "/responses", body | {"max_output_tokens": limit}):
        for call in items(response, "function_call"):
            is_whole = is_object(call.get("arguments"))
            status = call.get("status")
            message_ = f"{how}: expected a call that was cut to be incomplete, got {status}"
            expect(is_whole or status == "incomplete", message_, outline(response))


def is_object(text: object) -> bool:
    try:
        return isinstance(json.loads(str(text)), dict)
    except ValueError:
        return False


def chat_cut_call(peer: Peer) -> None:
    body = CHAT_WEATHER | {"tool_choice": "required"}
    usage = whole(peer, "/chat/completions", body | {"max_tokens": 400}).get("usage") or {}
    limit = max(CUT, usage.get("completion_tokens", 0) - TOKENS_LESS)
    plain = whole(peer, "/chat/completions", body | {"max_tokens": limit})
    reply = streamed(peer, "/chat/completions", body | {"max_tokens": limit})
    for how, chunks in (("plain", [plain]), ("streamed", reply.events)):
        arguments = arguments_of(chunks)
        reason = chat_outline(chunks).get(0, {}).get("finish_reason")
        is_whole = all(map(is_object, arguments.values()))
        message_ = f"{how}: expected finish_reason length, got {reason}"
        expect(is_whole or reason == "length", message_, arguments)


def arguments_of(chunks: list[Json]) -> dict[int, str]:
    """The arguments of each call of the first choice, by its index; of chunks, or of a completion."""
    arguments: dict[int, str] = {}
    for chunk in chunks:
        for choice in (chunk.get("choices") or ())[:1]:
            said = choice.get("delta") or choice.get("message") or {}
            for place, call in enumerate(said.get("tool_calls") or ()):
                index = call.get("index", place)
                more = (call.get("function") or {}).get("arguments") or ""
                arguments[index] = arguments.get(index, "") + more
    return arguments


def no_blank_message(peer: Peer) -> None:
    response = whole(peer, "/responses", ASK_WEATHER | {"tool_choice": "required", "max_output_tokens": 200})
    for said in items(response, "message"):
        text = "".join(part.get("text") or "" for part in said.get("content") or ())
        expect(text.strip(), "expected no blank message beside a call", outline(response))


# --- results given back -------------------------------------------------------------------------------------


def call_of(id_: str, city: str) -> Json:
    arguments = json.dumps({"city": city})
    return {"type": "function_call", "call_id": id_, "name": "get_weather", "arguments": arguments}


def result_of(id_: str, text: str) -> Json:
    return {"type": "function_call_output", "call_id": id_, "output": text}


QUESTION: Json = {"role": "user", "content": "What is the weather in Tokyo and in Paris?"}
CALLS = [call_of("call_tokyo", "Tokyo"), call_of("call_paris", "Paris")]
RESULTS = [result_of("call_tokyo", "It rains."), result_of("call_paris", "The sun shines.")]


def results_accepted(peer: Peer) -> None:
    whole(peer, "/responses", ASK_WEATHER)  # tools may be refused
    reply = peer.post("/responses", LIMITED | {"input": [QUESTION, *CALLS, *RESULTS], "tools": TWO_TOOLS})
    expect(reply.status == 200, "expected an answer to the results of calls", reply)


def results_in_any_order(peer: Peer) -> None:
    """The call_id tells which result is whose: the prompt is as long whatever comes first."""
    with presumed("results"):
        results_accepted(peer)
    counts = []
    for results in (RESULTS, RESULTS[::-1]):
        body = LIMITED | {"input": [QUESTION, *CALLS, *results], "tools": TWO_TOOLS}
        response = whole(peer, "/responses", body)
        counts.append((response.get("usage") or {}).get("input_tokens"))
    expect(counts[0] == counts[1], f"expected prompts of one length, got {counts} tokens", "swapped results")


def orphan_result(peer: Peer) -> None:
    with presumed("results"):
        results_accepted(peer)
    reply = peer.post("/responses", LIMITED | {"input": [QUESTION, result_of("call_nobody", "It rains.")]})
    expect(400 <= reply.status < 500, "expected a refusal of a result without its call", reply)


def reused_call_ids(peer: Peer) -> None:
    """Some models count their calls from 0 in each turn; OpenAI's own server refuses such a conversation."""
    with presumed("results"):
        results_accepted(peer)
    long = "It rains, and it will rain tomorrow and the day after tomorrow. " * 4
    counts = []
    for texts in (("It rains.", "It rains."), (long, "It rains."), ("It rains.", long)):
        turns = [[call_of("call_0", "Tokyo"), result_of("call_0", text)] for text in texts]
        body = LIMITED | {"input": [QUESTION, *turns[0], QUESTION, *turns[1]], "tools": TWO_TOOLS}
        usage = whole(peer, "/responses", body).get("usage") or {}
        counts.append(usage.get("input_tokens", 0))
    is_read = counts[0] < min(counts[1:])
    message_ = f"expected a longer prompt with a longer result in either turn, got {counts} tokens"
    expect(is_read, message_, "short results; a long one in the first turn; a long one in the second")


def chat_results_accepted(peer: Peer) -> None:
    arguments = json.dumps({"city": "Tokyo"})
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": TOKYO},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It rains."},
    ]
    whole(peer, "/chat/completions", CHAT_WEATHER)  # tools may be refused
    reply = peer.post("/chat/completions", CHAT_WEATHER | {"messages": messages})
    expect(reply.status == 200, "expected an answer to the result of a call", reply)


def output_given_back(peer: Peer) -> None:
    """What agents without a store do: the output of one turn is part of the next one's input."""
    output = whole(peer, "/responses", HI).get("output") or ()
    reply = next_turn(peer, [item for item in output if item.get("type") != "reasoning"])
    expect(reply.status == 200, "expected the output of a response to be taken as input", reply)


def next_turn(peer: Peer, output: list[Json], more: Json | None = None) -> Reply:
    """The reply to a question behind a turn that had this output."""
    conversation = [{"role": "user", "content": "hi"}, *output, QUESTION]
    return peer.post("/responses", LIMITED | {"input": conversation} | (more or {}))


# --- custom tools -------------------------------------------------------------------------------------------


def custom_tool(peer: Peer) -> None:
    tool = {"type": "custom", "name": "get_weather", "description": "Get the weather of a city"}
    body = LIMITED | {"input": TOKYO, "tools": [tool], "tool_choice": "required", "max_output_tokens": 400}
    response = whole(peer, "/responses", body)
    calls = items(response, "custom_tool_call")
    if not calls and response.get("status") == "incomplete":
        raise NotApplicable("the response was cut before the call")
    expect(calls, "expected a custom_tool_call, or a refusal of the tool", outline(response))
    named = calls[0].get("name") == "get_weather" and isinstance(calls[0].get("input"), str)
    expect(named, "expected the tool's name, and its input as text", calls[0])


def namespaced_tool(peer: Peer) -> None:
    namespace = {"type": "namespace", "name": "travel", "description": "Tools for travellers"}
    tools = [namespace | {"tools": [{"type": "function", **WEATHER}]}]
    body = LIMITED | {"input": TOKYO, "tools": tools, "tool_choice": "required", "max_output_tokens": 400}
    for how, response in both(peer, "/responses", body):
        calls = items(response, "function_call")
        if not calls and response.get("status") == "incomplete":
            raise NotApplicable("the response was cut before the call")
        named = [(call.get("namespace"), call.get("name")) for call in calls]
        is_named = named and {*named} == {("travel", "get_weather")}
        message_ = f"{how}: expected a call of travel, get_weather, or a refusal, got {named}"
        expect(is_named, message_, outline(response))


# --- structured output --------------------------------------------------------------------------------------


def fits(text: str) -> bool:
    """Whether it is what COLOUR describes."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if not isinstance(value, dict) or value.keys() != {"colour", "n"}:
        return False
    return value["colour"] in ("red", "green") and isinstance(value["n"], int)


def check_text(text: str, was_cut: bool, shown: object) -> None:
    expect(was_cut or fits(text), f"expected what the schema describes, got {text!r}", shown)


def check_blanks(text: str, was_cut: bool, shown: object) -> None:
    expect(not BLANKS.search(text), "expected no more than some blanks in JSON", shown)


def json_schema(check: Callable[[str, bool, object], None], peer: Peer) -> None:
    text_format = {"type": "json_schema", "name": "colour", "schema": COLOUR, "strict": True}
    body = LIMITED | {"input": NAME_A_COLOUR, "text": {"format": text_format}, "max_output_tokens": 400}
    for how, response in both(peer, "/responses", body):
        said = items(response, "message")
        text = "".join(part.get("text") or "" for item in said for part in item.get("content") or ())
        check(text, response.get("status") == "incomplete", {how: outline(response)})


def chat_json_schema(check: Callable[[str, bool, object], None], peer: Peer) -> None:
    json_schema_ = {"name": "colour", "schema": COLOUR, "strict": True}
    body = CHAT | {
        "messages": [{"role": "user", "content": NAME_A_COLOUR}],
        "response_format": {"type": "json_schema", "json_schema": json_schema_},
        "max_tokens": 400,
    }
    answer = whole(peer, "/chat/completions", body)
    was_cut = (answer.get("choices") or [{}])[0].get("finish_reason") == "length"
    check(message(answer).get("content") or "", was_cut, answer)


def bad_schema(peer: Peer) -> None:
    text_format = {"type": "json_schema", "name": "x", "schema": {"type": "no such type"}, "strict": True}
    reply = peer.post("/responses", HI | {"text": {"format": text_format}})
    if reply.status in NOT_THERE:
        raise NotApplicable(f"no Responses API: {reply.refusal}")
    expect(400 <= reply.status < 500, "expected a refusal of a schema that is none", reply)


# --- reasoning ----------------------------------------------------------------------------------------------


def reasoned(peer: Peer, body: Json | None = None) -> Json:
    """A response with a reasoning item."""
    response = whole(peer, "/responses", HI | {"max_output_tokens": 400} | (body or {}))
    if not items(response, "reasoning"):
        raise NotApplicable("the model does not reason")
    return response


def reasoning_first(peer: Peer) -> None:
    types = [item.get("type") for item in reasoned(peer).get("output", ())]
    expect(
        types[0] == "reasoning",
        f"expected the reasoning in front of what follows from it, got {types}",
        types,
    )


def reasoning_counted(peer: Peer) -> None:
    response = reasoned(peer)
    usage = response.get("usage") or {}
    n = (usage.get("output_tokens_details") or {}).get("reasoning_tokens")
    has_text = any(item.get("content") or item.get("summary") for item in items(response, "reasoning"))
    expect(n or not has_text, f"expected reasoning_tokens to count the reasoning, got {n}", usage)


def reasoning_given_back(peer: Peer) -> None:
    first = reasoned(peer)
    with presumed("output-as-input"):
        output_given_back(peer)
    reply = next_turn(peer, first["output"])
    expect(reply.status == 200, "expected reasoning items to be taken back as they came", reply)


SEALED: Json = {"include": ["reasoning.encrypted_content"], "store": False}


def encrypted_reasoning(peer: Peer) -> None:
    for item in items(reasoned(peer, SEALED), "reasoning"):
        blob = item.get("encrypted_content")
        expect(isinstance(blob, str) and blob, "expected encrypted_content, for it was asked for", item)


def encrypted_given_back(peer: Peer) -> None:
    with presumed("encrypted-reasoning"):
        encrypted_reasoning(peer)
    with presumed("reasoning-as-input"):
        reasoning_given_back(peer)
    reply = next_turn(peer, reasoned(peer, SEALED)["output"], SEALED)
    expect(reply.status == 200, "expected encrypted_content to be taken back", reply)


def forged_encrypted(peer: Peer) -> None:
    with presumed("encrypted-reasoning"):
        encrypted_reasoning(peer)
    forged = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "Zm9yZ2Vk"}
    reply = next_turn(peer, [forged], SEALED)
    expect(
        400 <= reply.status < 500, "expected a refusal of encrypted_content that is not the server's", reply
    )


def effort(peer: Peer) -> None:
    reply = peer.post("/responses", HI | {"reasoning": {"effort": "low"}})
    if reply.status in REFUSED:
        raise NotApplicable(f"refused: {reply.refusal}")
    expect(reply.status == 200, "expected an answer, or a refusal", reply)
    echoed = (reply.json.get("reasoning") or {}).get("effort")
    expect(echoed in (None, "low"), f"expected the effort to be repeated, got {echoed!r}", reply)


# --- control tokens in what a user says ---------------------------------------------------------------------

CONTROL_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>")  # of many families
N_COPIES = 16


def spelled_tokens(peer: Peer) -> None:
    """A server may drop or refuse what spells a control token; for a model without the token it is text."""
    for spelled in CONTROL_TOKENS:
        once, twice = prompt_tokens(peer, spelled, N_COPIES), prompt_tokens(peer, spelled, 2 * N_COPIES)
        n_tokens = (twice - once) / N_COPIES - 1  # of a copy: the digit behind it is a token too
        message = f"expected {spelled} in a user's message to be text, which is never one token"
        counts = f"prompt_tokens with {N_COPIES} and {2 * N_COPIES} of {spelled}1: {once} and {twice}"
        expect(n_tokens != 1, message, counts)


def prompt_tokens(peer: Peer, spelled: str, n_copies: int) -> int:
    """The tokens of a prompt that says so; 0 where it is refused."""
    content = "1" + f"{spelled}1" * n_copies
    body = CHAT | {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    reply = peer.post("/chat/completions", body)
    if reply.status in NOT_THERE:
        raise NotApplicable(f"refused: {reply.refusal}")
    n_tokens: int = (reply.json.get("usage") or {}).get("prompt_tokens", 0)
    return n_tokens


# --- logprobs, tokens, compaction ---------------------------------------------------------------------------


def logprobs(peer: Peer) -> None:
    body = HI | WITH_LOGPROBS
    for how, response in both(peer, "/responses", body):
        parts = [part for item in items(response, "message") for part in item.get("content") or ()]
        for part in parts:
            entries = part.get("logprobs") or []
            tokens = "".join(str(entry.get("token")) for entry in entries)
            text = part.get("text") or ""
            message_ = f"{how}: expected logprobs of tokens that make up {text!r}, got {tokens!r}"
            expect(tokens.startswith(text) and (entries or not text), message_, part)


def counted_before(peer: Peer) -> None:
    reply = peer.ask("POST", "/responses/input_tokens", {"model": peer.model, "input": HI["input"]})
    if reply.status in REFUSED:
        raise NotApplicable(f"tokens are not counted: {reply.refusal}")
    counted = reply.json.get("input_tokens")
    used = (whole(peer, "/responses", HI).get("usage") or {}).get("input_tokens")
    expect(counted == used, f"expected the count of the answer's usage, {used}, got {counted}", reply)


def compacted(peer: Peer) -> None:
    conversation: list[Any] = [QUESTION, {"role": "assistant", "content": "It rains."}, QUESTION]
    reply = peer.ask("POST", "/responses/compact", {"model": peer.model, "input": conversation})
    if reply.status in REFUSED:
        raise NotApplicable(f"nothing is compacted: {reply.refusal}")
    output = reply.json.get("output") or []
    kinds = [item.get("type") for item in output if isinstance(item, dict)]
    expect(kinds.count("compaction") == 1, f"expected one compaction item, got {kinds}", reply)
    again = peer.post("/responses", LIMITED | {"input": [*output, QUESTION]})
    expect(again.status == 200, "expected what was compacted to be taken as input", again)


# --- the table ----------------------------------------------------------------------------------------------

FUNCTIONS = GUIDES + "function-calling"
STRUCTURED = GUIDES + "structured-outputs"
REASONING = GUIDES + "reasoning"

# fmt: off
CHECKS = {
    #  rule    what checks it, its profiles, its strength, bugs of tests/BUGS.md
    #      title
    #      source
    #      link
    "named-call": Check(named_call, "responses agents", "must", "",
        "tool_choice with a name calls that tool, and no other",
        "the guide on function calling: forced function",
        FUNCTIONS),
    "chat-named-call": Check(chat_named_call, "chat agents", "must", "",
        "tool_choice with a name calls that tool, and no other",
        "the API reference on tool_choice",
        OPENAI + "chat/create"),
    "no-call": Check(no_call, "responses agents", "must", "",
        "tool_choice none makes no call",
        "the API reference: none means the model will not call any tool",
        OPENAI + "responses/create"),
    "chat-no-call": Check(chat_no_call, "chat agents", "must", "",
        "tool_choice none makes no call",
        "the API reference: none means the model will not call any tool",
        OPENAI + "chat/create"),
    "allowed-tools": Check(allowed_tools, "responses agents", "must", "",
        "allowed_tools keeps calls to the tools that it names",
        "the guide on function calling: allowed tools",
        FUNCTIONS),
    "one-call": Check(one_call, "responses agents", "must", "",
        "parallel_tool_calls: false makes one call at most",
        "the guide on function calling: exactly zero or one tool is called",
        FUNCTIONS),
    "unknown-tool-choice": Check(unknown_tool_choice, "responses agents", "should", "",
        "tool_choice with the name of no tool is refused",
        "OpenAI's own server; else a client waits for a call that cannot come",
        OPENAI + "responses/create"),
    "cut-call": Check(cut_call, "responses agents", "must", "C16",
        "a call that was cut is incomplete, streamed or not",
        "agents run what is completed",
        GITHUB + "vllm-project/vllm/issues/57998"),
    "chat-cut-call": Check(chat_cut_call, "chat agents", "must", "G01",
        "a completion that was cut within a call ends with length",
        "the API reference: finish_reason length where max_tokens was reached; agents run calls else",
        OPENAI + "chat/object"),
    "no-blank-message": Check(no_blank_message, "responses agents", "should", "",
        "no message of blanks stands beside a call",
        "agents take a message for the end of the turn, and show it",
        FUNCTIONS),
    "results": Check(results_accepted, "responses agents", "must", "",
        "the results of two calls are taken back",
        "the guide on function calling",
        FUNCTIONS),
    "results-order": Check(results_in_any_order, "responses agents", "should", "",
        "results may come in any order: the call_id tells whose they are",
        "agents run calls in parallel, and send the results as they come",
        FUNCTIONS),
    "orphan-result": Check(orphan_result, "responses agents", "should", "",
        "a result of no call is refused",
        "OpenAI's own server: No tool call found for function call output",
        FUNCTIONS),
    "reused-call-ids": Check(reused_call_ids, "responses agents", "should", "",
        "a call_id that comes again in a later turn is refused, or the result of each turn is read",
        "models that count their calls from 0 in each turn, and agents that send back what they said",
        GITHUB + "NousResearch/hermes-agent/pull/88324"),
    "chat-results": Check(chat_results_accepted, "chat agents", "must", "",
        "the result of a call is taken back",
        "the API reference on messages of the role tool",
        OPENAI + "chat/create"),
    "output-as-input": Check(output_given_back, "responses agents", "must", "",
        "the output of a response is taken as input",
        "the guide on conversation state: append the output to the next input",
        GUIDES + "conversation-state"),
    "custom-tool": Check(custom_tool, "responses agents", "must", "",
        "a custom tool makes a custom_tool_call with its input as text, or is refused",
        "the guide on function calling: custom tools",
        FUNCTIONS),
    "namespace": Check(namespaced_tool, "responses agents", "must", "",
        "a tool in a namespace is called with its own name and that of the namespace, or is refused",
        "the guide on function calling: namespaces; an agent finds the tool by both",
        FUNCTIONS),
    "json-schema": Check(partial(json_schema, check_text), "responses agents", "must", "",
        "text.format json_schema with strict makes what the schema describes",
        "the guide on structured outputs",
        STRUCTURED),
    "chat-json-schema": Check(partial(chat_json_schema, check_text), "chat agents", "must", "",
        "response_format json_schema with strict makes what the schema describes",
        "the guide on structured outputs",
        STRUCTURED),
    "json-blanks": Check(partial(json_schema, check_blanks), "responses agents", "should", "",
        "a constrained answer does not spend its tokens on blanks",
        "whitespace is legal JSON, and a small model that may write it can do so up to its limit",
        GITHUB + "jundot/omlx/issues/2990"),
    "chat-json-blanks": Check(partial(chat_json_schema, check_blanks), "chat agents", "should", "",
        "a constrained answer does not spend its tokens on blanks",
        "whitespace is legal JSON, and a small model that may write it can do so up to its limit",
        GITHUB + "jundot/omlx/issues/2990"),
    "bad-schema": Check(bad_schema, "responses agents", "should", "",
        "a schema that is none is refused",
        "the guide on structured outputs: schemas that are not supported are an error",
        STRUCTURED),
    "reasoning-first": Check(reasoning_first, "responses agents", "must", "",
        "the reasoning item stands in front",
        "the guide on reasoning: items are given back in their order",
        REASONING),
    "reasoning-counted": Check(reasoning_counted, "responses agents", "should", "G05",
        "reasoning_tokens counts the reasoning",
        "the guide on reasoning: output_tokens_details",
        REASONING),
    "reasoning-as-input": Check(reasoning_given_back, "responses agents", "must", "",
        "reasoning items are taken back as they came",
        "the guide on reasoning: keep reasoning items in context",
        REASONING),
    "encrypted-reasoning": Check(encrypted_reasoning, "responses agents", "must", "",
        "include reasoning.encrypted_content is refused, or puts it into each reasoning item",
        "the guide on reasoning: encrypted reasoning items",
        REASONING),
    "encrypted-as-input": Check(encrypted_given_back, "responses agents", "must", "",
        "encrypted_content is taken back",
        "the guide on reasoning: encrypted reasoning items",
        REASONING),
    "forged-encrypted": Check(forged_encrypted, "responses agents", "should", "",
        "encrypted_content that the server did not make is refused",
        "OpenAI's own server: The encrypted content could not be verified",
        REASONING),
    "effort": Check(effort, "responses agents", "should", "",
        "reasoning.effort is taken and repeated, or refused",
        "the API reference on reasoning",
        REASONING),
    "spelled-tokens": Check(spelled_tokens, "chat agents", "advice", "K01",
        "a control token that a user spells is text, and so costs more than one token",
        "what ends a turn or begins one of the system is the template's alone: else users forge turns",
        GITHUB + "huggingface/transformers/issues/29279"),
    "logprobs": Check(logprobs, "responses", "must", "C22",
        "message.output_text.logprobs is refused, or gives an entry for each token of the text",
        "the API reference on include",
        OPENAI + "responses/create"),
    "input-tokens": Check(counted_before, "responses", "should", "",
        "input_tokens counts what the usage counts",
        "the API reference on input token counts",
        OPENAI + "responses/input-tokens"),
    "compact": Check(compacted, "responses agents", "should", "",
        "a conversation is compacted into one item, which is taken back",
        "the API reference on compact",
        OPENAI + "responses/compact"),
}
# fmt: on
