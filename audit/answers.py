"""Rules on answers: streamed and plain say the same; cuts, calls, stop strings, choices and logprobs.

    Asking --rule--> nothing, or Failed, or NotApplicable

Authority: that of each rule is the link in its docstring.

Not here: one stream by itself (frames.py, events.py, chunks.py), what is stored (stored.py).
"""

from collections.abc import Iterator

from audit.asking import CALLED, CUT, GOOD, LOGPROBS, STORY, Answer, Asking, asking, recorded, same_answer
from audit.peer import NOT_THERE
from audit.rules import NotApplicable, expect, rules_of
from audit.schema import ROWS, Json, required

must, should, _ = rules_of("answers", "responses", asking)

# --- one answer, however it is asked for --------------------------------------------------------------------


@must("plain-by-default", profiles="chat responses")
def plain_by_default(ask: Asking) -> None:
    """without stream the answer is a JSON object

    the API reference: stream is false by default
    B09 https://platform.openai.com/docs/api-reference/responses/create
    """
    for path, body in GOOD.items():
        reply = ask.peer.once(path, {"model": ask.peer.model} | body)
        if reply.status not in NOT_THERE:
            expect(reply.json, "expected a JSON object, for no stream was asked for", reply)


@must("answer-fields")
def answer_fields(ask: Asking) -> None:
    """a plain answer has the members it must have

    openai/openai-openapi calls these members required
    C22 https://github.com/lemonade-sdk/lemonade/issues/3607
    """
    response = ask.plain().response
    missing = [name for name in required(ROWS["response"]) if name not in response]
    expect(not missing, f"expected the answer to have {missing}", response)


@must("stream-is-answer", "chat-stream-is-answer")
def stream_is_answer(ask: Asking) -> None:
    """a stream says what the plain answer says; the last event of a Responses stream counts the same usage

    the API reference: the last event has the response that is returned without stream
    C06 C15 G05 https://github.com/EricLBuehler/mistral.rs/pull/2309
    the API reference: deltas make up the message
    D02 D15 E11 https://github.com/vllm-project/vllm/pull/30437
    """
    told = ask.streamed().outline
    plain = ask.plain()
    if ask.api == "chat":
        (body,) = plain.response["chunks"]
        expect(body.get("object") == "chat.completion", "expected object chat.completion", body)
    same_answer(plain.outline, told, lambda: ask.plain().outline)


@must("chat-usage")
def chat_usage(ask: Asking) -> None:
    """usage comes in the stream if it was asked for, and is that of the plain answer

    the API reference on stream_options.include_usage
    G05 G07 https://github.com/vllm-project/vllm/pull/24477
    """
    told = ask.streamed(stream_options={"include_usage": True})
    told.expect(told.usage, "usage, for it was asked for")
    same_answer(counts(ask.plain()), counts(told), lambda: counts(ask.plain()))


def counts(answer: Answer) -> Json:
    return {name: answer.usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


@must("usage-unasked", profiles="chat")
def usage_unasked(ask: Asking) -> None:
    """no usage and no chunk without choices in the stream if it was not asked for

    the API reference: only with include_usage; clients read choices[0] of every other chunk
    B08 B10 G07 https://github.com/sgl-project/sglang/issues/5451
    """
    for chunk in recorded(ask.peer, "chat").events:
        is_silent = "error" in chunk or (chunk.get("choices") and not chunk.get("usage"))
        expect(is_silent, "expected no usage, for it was not asked for", chunk)


@must("two-choices", profiles="chat")
def two_choices(ask: Asking) -> None:
    """n=2 makes two choices, two ends and one [DONE]

    the API reference on n; clients count the choices
    A21 https://github.com/vllm-project/vllm/pull/378
    """
    reply = recorded(ask.peer, "chat-two")
    ends: Json = {}
    for chunk in reply.events:
        for choice in chunk.get("choices", ()):
            index = choice.get("index", -1)
            ends[index] = choice.get("finish_reason") or ends.get(index)
    expect(ends.keys() == {0, 1}, f"expected choices 0 and 1, got {sorted(map(str, ends))}", reply)
    n_done = reply.body.count(b"[DONE]")
    expect(all(ends.values()) and n_done == 1, "expected two ends and one [DONE]", ends)


@must("logprobs", "chat-logprobs")
def logprobs(ask: Asking) -> None:
    """logprobs have an entry for each token of the text, streamed or not, or are refused

    the API reference on include: message.output_text.logprobs
    C22 https://platform.openai.com/docs/api-reference/responses/create
    the API reference: the log probabilities of each output token
    C22 D08 D21 https://github.com/vllm-project/vllm/pull/47616
    """
    for answer in ask(**LOGPROBS[ask.api]):
        is_whole = answer.tokens.startswith(answer.text) and (answer.tokens or not answer.text)
        answer.expect(is_whole, f"logprobs of tokens that make up {answer.text!r}, got {answer.tokens!r}")


# --- cut, called, stopped -----------------------------------------------------------------------------------


def cut_answers(ask: Asking, limit: int = CUT) -> Iterator[Answer]:
    for answer in ask(said=STORY, limit=limit, **ask.peer.long):
        if answer.end == "stop" and 0 < answer.n_output < limit:
            raise NotApplicable(f"the answer ends before the limit of {limit} tokens")
        yield answer


@must("cut", "chat-cut")
def cut(ask: Asking) -> None:
    """an answer that was cut at its limit of tokens says so, streamed or not; a completion has so many tokens

    the API reference: status incomplete with incomplete_details.reason max_output_tokens
    C15 https://github.com/vllm-project/agentic-api/issues/273
    the API reference: finish_reason length if max_tokens was reached
    D10 G01 https://github.com/llm-d/llm-d-inference-sim/pull/545
    """
    for answer in cut_answers(ask):
        answer.expect(answer.end == "length", f"an answer that was cut to end with length, got {answer.end}")
        if ask.api == "chat" and answer.how == "plain":
            answer.expect(answer.n_output == CUT, f"{CUT} tokens, as asked for, got {answer.n_output}")


@should("cut-item")
def cut_item(ask: Asking) -> None:
    """the item that was cut is incomplete

    the API reference: an item that is incomplete has this status
    C16 https://github.com/vllm-project/vllm/issues/57998
    """
    # A cut may fall between two items; two cuts do not.
    answers = [*cut_answers(ask), *cut_answers(ask, CUT + 3)]
    last = [(answer.response.get("output") or [{}])[-1] for answer in answers]
    statuses = [item.get("status") for item in last]
    is_told = statuses[0] == statuses[1] and "incomplete" in statuses
    expect(is_told, "expected the item that was cut to be incomplete", last)


@should("cut-exactly")
def cut_exactly(ask: Asking) -> None:
    """a response that was cut has max_output_tokens tokens, no less and no more

    the API reference: an upper bound, reasoning included; bills are made of the count
    D10 G04 G06 https://github.com/ikawrakow/ik_llama.cpp/pull/2358
    """
    for answer in cut_answers(ask):
        answer.expect(answer.n_output == CUT, f"{CUT} tokens, as asked for, got {answer.n_output}")


@must("call", "chat-call")
def call(ask: Asking) -> None:
    """tool_choice required makes a call of a tool that there is, and ends as calls do

    the API reference: required means that the model must call one or more tools
    E01 C13 https://github.com/vllm-project/vllm/issues/36435
    the API reference: required, and finish_reason tool_calls if the model called a tool
    G02 https://github.com/vllm-project/vllm/pull/9209
    """
    for answer in ask(**CALLED):
        names = [made["name"] for made in answer.calls]
        answer.expect({*names} == {"get_weather"}, f"a call of get_weather, as it was required, got {names}")
        answer.expect(answer.end in ("tool_calls", "length"), f"an end with tool_calls, got {answer.end}")
        if ask.api == "responses" and answer.end == "tool_calls":
            answer.expect(answer.calls[0].get("status") == "completed", "the call to be completed")


@must("stop-string", profiles="chat")
def stop_string(ask: Asking) -> None:
    """nothing of a stop string is sent, nor anything after it, and all before it

    the API reference: the returned text will not contain the stop sequence
    D16 D17 https://github.com/SharpAI/SwiftLM/issues/126
    """
    text = ask.plain().text
    middle = len(text) // 2
    stop = text[middle : middle + 5]
    if len(stop) < 5:
        raise NotApplicable(f"the answer is too short: {text!r}")
    expected = text[: text.index(stop)], "stop"
    for answer in ask(stop=[stop]):
        is_right = (answer.text, answer.end) == expected
        if not is_right and ask.plain().text != text:
            raise NotApplicable("the server says something else each time, at temperature 0")
        answer.expect(is_right, f"{expected} with stop {stop!r}")
