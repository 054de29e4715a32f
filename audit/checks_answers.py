"""Rules on answers: streamed and plain say the same; cuts, calls, stop strings, choices and logprobs.

    Peer --check--> nothing, or Failed, or NotApplicable

Authority: that of each rule is the link in checks.py.

Not here: one stream by itself (checks_streams.py), what is stored (checks_stored.py).
"""

from collections.abc import Iterator
from functools import partial

from audit import members
from audit.peer import NOT_THERE, REFUSED, Json, NotApplicable, Peer, expect
from audit.probes import (
    CHAT,
    CUT,
    GITHUB,
    GOOD,
    HI,
    OPENAI,
    Check,
    asked,
    chat_outline,
    final,
    outline,
    recorded,
    same_answer,
    streamed,
    whole,
)

# --- one answer, however it is asked for --------------------------------------------------------------------


def stream_is_the_answer(peer: Peer) -> None:
    told = outline(final(recorded(peer, "text")))
    answer = partial(whole, peer, "/responses", HI)
    plain = outline(answer())
    same_answer(plain, told, lambda: outline(answer()))


def answer_members(peer: Peer) -> None:
    response = whole(peer, "/responses", HI)
    missing = [name for name in members.required(members.RESPONSE) if name not in response]
    expect(not missing, f"expected the answer to have {missing}", response)


def plain_by_default(peer: Peer) -> None:
    for path, body in GOOD.items():
        reply = peer.once(path, {"model": peer.model} | body)
        if reply.status not in NOT_THERE:
            expect(reply.json, "expected a JSON object, for no stream was asked for", reply)


def chat_stream_is_the_answer(peer: Peer) -> None:
    told = chat_outline(recorded(peer, "chat").events)
    answer = partial(whole, peer, "/chat/completions", CHAT)
    body = answer()
    expect(body.get("object") == "chat.completion", "expected object chat.completion", body)
    plain = chat_outline([body])
    same_answer(plain, told, lambda: chat_outline([answer()]))


def chat_usage_is_the_answers(peer: Peer) -> None:
    usages = [chunk["usage"] for chunk in recorded(peer, "chat-usage").events if chunk.get("usage")]
    expect(usages, "expected usage, for it was asked for", recorded(peer, "chat-usage"))
    answer = partial(whole, peer, "/chat/completions", CHAT)
    plain = counts_of(answer())
    same_answer(plain, counts_of({"usage": usages[-1]}), lambda: counts_of(answer()))


def counts_of(body: Json) -> Json:
    usage = body.get("usage") or {}
    return {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def usage_unasked(peer: Peer) -> None:
    for chunk in recorded(peer, "chat").events:
        silent = "error" in chunk or (chunk.get("choices") and not chunk.get("usage"))
        expect(silent, "expected no usage, for nobody asked for it", chunk)


# --- cut, called, stopped -----------------------------------------------------------------------------------


def cut_responses(peer: Peer) -> Iterator[Json]:
    """Of a limit that is too small, streamed and plain."""
    plain = whole(peer, *asked(peer, "cut"))
    n_tokens = (plain.get("usage") or {}).get("output_tokens") or CUT
    if plain.get("status") == "completed" and n_tokens < CUT:
        raise NotApplicable(f"the answer ends before the limit of {CUT} tokens")
    yield final(recorded(peer, "cut"))
    yield plain


def cut_is_told(peer: Peer) -> None:
    for response in cut_responses(peer):
        end = response.get("status"), (response.get("incomplete_details") or {}).get("reason")
        expected = ("incomplete", "max_output_tokens")
        expect(end == expected, f"expected {', '.join(expected)}, got {end}", outline(response))


def cut_item_is_told(peer: Peer) -> None:
    """A cut may fall between two items; two cuts do not."""
    path, body = asked(peer, "cut")
    more = whole(peer, path, body | {"max_output_tokens": CUT + 3})
    last = [(response.get("output") or [{}])[-1] for response in (*cut_responses(peer), more)]
    first, plain, later = (item.get("status") for item in last)
    is_told = first == plain and "incomplete" in (plain, later)
    expect(is_told, "expected the item that was cut to be incomplete", last)


def cut_exactly(peer: Peer) -> None:
    for response in cut_responses(peer):
        n = (response.get("usage") or {}).get("output_tokens")
        expect(n == CUT, f"expected output_tokens {CUT}, as asked for, got {n}", outline(response))


def chat_cut(peer: Peer) -> None:
    body = whole(peer, *asked(peer, "chat-cut"))
    n = (body.get("usage") or {}).get("completion_tokens")
    if n is not None and n < CUT and chat_outline([body]).get(0, {}).get("finish_reason") == "stop":
        raise NotApplicable(f"the answer ends before the limit of {CUT} tokens")
    for chunks in (recorded(peer, "chat-cut").events, [body]):
        reason = chat_outline(chunks).get(0, {}).get("finish_reason")
        expect(reason == "length", f"expected finish_reason length, got {reason}", chunks[-1])
    expect(n == CUT, f"expected completion_tokens {CUT}, as asked for, got {n}", body)


def required_call(peer: Peer) -> None:
    response = final(recorded(peer, "call"))
    calls = [item for item in response.get("output", ()) if item.get("type") == "function_call"]
    expect(calls, "expected a function_call, as tool_choice required it", outline(response))
    expect(calls[0].get("name") == "get_weather", "expected the tool that there is", calls[0])
    if response.get("status") == "completed":
        expect(calls[0].get("status") == "completed", "expected the call to be completed", calls[0])


def chat_required_call(peer: Peer) -> None:
    chunks = recorded(peer, "chat-call").events
    deltas = [c.get("delta") or {} for chunk in chunks for c in chunk.get("choices", ())]
    reason = chat_outline(chunks).get(0, {}).get("finish_reason")
    expect(
        any(delta.get("tool_calls") for delta in deltas),
        "expected a call, as tool_choice required it",
        chunks[-1],
    )
    expect(reason in ("tool_calls", "length"), f"expected finish_reason tool_calls, got {reason}", chunks[-1])


def stop_string(peer: Peer) -> None:
    text = said_by_chat(peer)
    middle = len(text) // 2
    stop = text[middle : middle + 5]
    if len(stop) < 5:
        raise NotApplicable(f"the answer is too short: {text!r}")
    body = CHAT | {"stop": [stop]}
    expected = {0: {"content": text[: text.index(stop)], "finish_reason": "stop"}}
    for reply in (
        peer.post("/chat/completions", body),
        streamed(peer, "/chat/completions", body),
    ):
        if reply.status in REFUSED:
            raise NotApplicable(f"refused: {reply.refusal}")
        chunks = reply.events if reply.is_stream else [reply.json]
        how = "streamed" if reply.is_stream else "plain"
        answer = chat_outline(chunks)
        if answer != expected and said_by_chat(peer) != text:
            raise NotApplicable("the server says something else each time, at temperature 0")
        expect(answer == expected, f"{how}: expected {expected[0]} with stop {stop!r}", answer)


def said_by_chat(peer: Peer) -> str:
    content: str = chat_outline([whole(peer, "/chat/completions", CHAT)]).get(0, {}).get("content", "")
    return content


def two_choices(peer: Peer) -> None:
    reply = recorded(peer, "chat-two")
    choices = chat_outline(reply.events)
    expect(choices.keys() == {0, 1}, f"expected choices 0 and 1, got {sorted(map(str, choices))}", reply)
    ended = all(choice["finish_reason"] for choice in choices.values())
    expect(ended and reply.body.count(b"[DONE]") == 1, "expected two ends and one [DONE]", choices)


def chat_logprobs(peer: Peer) -> None:
    body = whole(peer, *asked(peer, "chat-logprobs"))
    for how, chunks in (("plain", [body]), ("streamed", recorded(peer, "chat-logprobs").events)):
        logprobs = [c.get("logprobs") or {} for chunk in chunks for c in chunk.get("choices", ())]
        entries = [entry for by_token in logprobs for entry in by_token.get("content") or ()]
        text = chat_outline(chunks).get(0, {}).get("content", "")
        tokens = "".join(str(entry.get("token")) for entry in entries)
        expect(entries, f"{how}: expected logprobs, for they were asked for", chunks[0])
        message = f"{how}: expected tokens that make up {text!r}, got {tokens!r}"
        expect(tokens.startswith(text), message, entries[-1])


# --- the table ----------------------------------------------------------------------------------------------

# fmt: off
CHECKS = {
    #  rule    what checks it, its profiles, its strength, bugs of tests/BUGS.md
    #      title
    #      source
    #      link
    "plain-by-default": Check(plain_by_default, "chat responses", "must", "B09",
        "without stream the answer is a JSON object",
        "the API reference: stream is false by default",
        OPENAI + "responses/create"),
    "answer-fields": Check(answer_members, "responses", "must", "C22",
        "a plain answer has the members it must have",
        "openai/openai-openapi calls these members required",
        GITHUB + "lemonade-sdk/lemonade/issues/3607"),
    "stream-is-answer": Check(stream_is_the_answer, "responses", "must", "C06 C15 G05",
        "a Responses stream says what the plain answer says, and so counts its usage",
        "the API reference: the last event has the response that is returned without stream",
        GITHUB + "EricLBuehler/mistral.rs/pull/2309"),
    "chat-stream-is-answer": Check(chat_stream_is_the_answer, "chat", "must", "D02 D15 E11",
        "a chat stream says what the plain answer says",
        "the API reference: deltas make up the message",
        GITHUB + "vllm-project/vllm/pull/30437"),
    "chat-usage": Check(chat_usage_is_the_answers, "chat", "must", "G05 G07",
        "usage comes in the stream if it was asked for, and is that of the plain answer",
        "the API reference on stream_options.include_usage",
        GITHUB + "vllm-project/vllm/pull/24477"),
    "usage-unasked": Check(usage_unasked, "chat", "must", "B08 B10 G07",
        "no usage and no chunk without choices in the stream if it was not asked for",
        "the API reference: only with include_usage; clients read choices[0] of every other chunk",
        GITHUB + "sgl-project/sglang/issues/5451"),
    "cut": Check(cut_is_told, "responses", "must", "C15",
        "a response that was cut at max_output_tokens is incomplete, streamed or not",
        "the API reference: status incomplete with incomplete_details.reason max_output_tokens",
        GITHUB + "vllm-project/agentic-api/issues/273"),
    "cut-item": Check(cut_item_is_told, "responses", "should", "C16",
        "the item that was cut is incomplete",
        "the API reference: the status of an item is incomplete where it is",
        GITHUB + "vllm-project/vllm/issues/57998"),
    "cut-exactly": Check(cut_exactly, "responses", "should", "D10 G04 G06",
        "a response that was cut has max_output_tokens tokens, no less and no more",
        "the API reference: an upper bound, reasoning included; bills are made of the count",
        GITHUB + "ikawrakow/ik_llama.cpp/pull/2358"),
    "chat-cut": Check(chat_cut, "chat", "must", "D10 G01",
        "a completion that was cut ends with length, at max_tokens",
        "the API reference: finish_reason length where max_tokens was reached",
        GITHUB + "llm-d/llm-d-inference-sim/pull/545"),
    "call": Check(required_call, "responses agents", "must", "E01 C13",
        "tool_choice required makes a function_call",
        "the API reference: required means that the model must call one or more tools",
        GITHUB + "vllm-project/vllm/issues/36435"),
    "chat-call": Check(chat_required_call, "chat agents", "must", "G02",
        "tool_choice required makes a call, and finish_reason tool_calls",
        "the API reference: required, and finish_reason tool_calls if the model called a tool",
        GITHUB + "vllm-project/vllm/pull/9209"),
    "stop-string": Check(stop_string, "chat", "must", "D16 D17",
        "nothing of a stop string is sent, nor anything behind it, and all before it",
        "the API reference: the returned text will not contain the stop sequence",
        GITHUB + "SharpAI/SwiftLM/issues/126"),
    "two-choices": Check(two_choices, "chat", "must", "A21",
        "n=2 makes two choices, two ends and one [DONE]",
        "the API reference on n; clients count the choices",
        GITHUB + "vllm-project/vllm/pull/378"),
    "chat-logprobs": Check(chat_logprobs, "chat", "must", "C22 D08 D21",
        "logprobs have an entry for each token of the text, streamed or not",
        "the API reference: the log probabilities of each output token",
        GITHUB + "vllm-project/vllm/pull/47616"),
}
# fmt: on
