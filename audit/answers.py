"""Rules on answers: streamed and plain say the same; cuts, calls, stop strings, choices and logprobs.

    Peer --rule--> nothing, or AssertionError, or NotApplicable

Authority: that of each rule is the link in its docstring.

Not here: one stream by itself (frames.py, events.py, chunks.py), what is stored (stored.py).
"""

from collections.abc import Iterator

from audit.peer import CALLED, CUT, STORY, STREAMS, Peer
from audit.rules import NotApplicable, rules_of
from audit.schema import ROWS, Json, required
from audit.stream import Answer, choices_of

must, should, _ = rules_of("answers", "responses")

# --- one answer, however it is asked for --------------------------------------------------------------------


@must(profiles="chat responses")
def plain_by_default(peer: Peer) -> None:
    """plain-by-default: without stream the answer is a JSON object

    the API reference: stream is false by default
    B09 https://platform.openai.com/docs/api-reference/responses/create
    """
    for reply in peer.of_each_api(limit=CUT, stream=None):
        assert reply.json


@must
def answer_fields(peer: Peer) -> None:
    """answer-fields: a plain answer has the members it must have

    openai/openai-openapi calls these members required
    C22 https://github.com/lemonade-sdk/lemonade/issues/3607
    """
    lacks = {*required(ROWS["response"]["*"])} - peer.plain().response.keys()
    assert not lacks, f"expected the answer to have {lacks}"


@must
def stream_is_answer(peer: Peer) -> None:
    """stream-is-answer, chat-stream-is-answer: a stream says what the plain answer says; the last event of a
    Responses stream counts the same usage

    the API reference: the last event has the response that is returned without stream
    C06 C15 G05 https://github.com/EricLBuehler/mistral.rs/pull/2309
    the API reference: deltas make up the message
    D02 D15 E11 https://github.com/vllm-project/vllm/pull/30437
    """
    told = peer.streamed().outline
    object_type = peer.plain().response.get("object")
    assert object_type == "chat.completion" or peer.api == "responses"
    peer.same_answer(lambda: peer.plain().outline, told)


@must
def chat_usage(peer: Peer) -> None:
    """chat-usage: usage comes in the stream if it was asked for, and is that of the plain answer

    the API reference on stream_options.include_usage
    G05 G07 https://github.com/vllm-project/vllm/pull/24477
    """
    told = peer.streamed(stream_options={"include_usage": True})
    assert told.counts
    peer.same_answer(lambda: peer.plain().counts, told.counts)


@must(profiles="chat")
def usage_unasked(peer: Peer) -> None:
    """usage-unasked: no usage and no chunk without choices in the stream if it was not asked for

    the API reference: only with include_usage; clients read choices[0] of every other chunk
    B08 B10 G07 https://github.com/sgl-project/sglang/issues/5451
    """
    for chunk in peer.recorded("chat").events:
        assert "error" in chunk or (chunk.get("choices") and not chunk.get("usage")), chunk


@must(profiles="chat")
def two_choices(peer: Peer) -> None:
    """two-choices: n=2 makes two choices, two ends and one [DONE]

    the API reference on n; clients count the choices
    A21 https://github.com/vllm-project/vllm/pull/378
    """
    reply = peer.recorded("chat-two")
    ends = {index: answer.end for index, answer in choices_of(reply.events).items() if answer.end}
    assert ends.keys() == {0, 1}, f"expected choices 0 and 1, and an end of each, got {ends}"
    assert reply.body.count(b"[DONE]") == 1, "expected one [DONE]"


@must
def logprobs(peer: Peer) -> None:
    """logprobs, chat-logprobs: logprobs have an entry for each token of the text, streamed or not, or are
    refused

    the API reference on include: message.output_text.logprobs
    C22 https://platform.openai.com/docs/api-reference/responses/create
    the API reference: the log probabilities of each output token
    C22 D08 D21 https://github.com/vllm-project/vllm/pull/47616
    """
    for answer in peer.both(**STREAMS["chat-logprobs" if peer.api == "chat" else "logprobs"]):
        is_whole = answer.tokens.startswith(answer.text) and (answer.tokens or not answer.text)
        assert is_whole, f"expected tokens that make up {answer.text!r}, got {answer.tokens!r}"


# --- cut, called, stopped -----------------------------------------------------------------------------------


def cut_answers(peer: Peer, limit: int = CUT) -> Iterator[Answer]:
    for answer in peer.both(said=STORY, limit=limit, **peer.long):
        if answer.end == "stop" and 0 < answer.n_output < limit:
            raise NotApplicable(f"the answer ends before the limit of {limit} tokens")
        yield answer


@must
def cut(peer: Peer) -> None:
    """cut, chat-cut: an answer that was cut at its limit of tokens says so, streamed or not; a completion has
    so many tokens

    the API reference: status incomplete with incomplete_details.reason max_output_tokens
    C15 https://github.com/vllm-project/agentic-api/issues/273
    the API reference: finish_reason length if max_tokens was reached
    D10 G01 https://github.com/llm-d/llm-d-inference-sim/pull/545
    """
    for answer in cut_answers(peer):
        assert answer.end == "length", f"expected an answer that was cut to end with length, got {answer.end}"
        if peer.api == "chat" and answer.counts:
            assert answer.n_output == CUT, f"expected {CUT} tokens, as asked for, got {answer.n_output}"


@should
def cut_item(peer: Peer) -> None:
    """cut-item: the item that was cut is incomplete

    the API reference: an item that is incomplete has this status
    C16 https://github.com/vllm-project/vllm/issues/57998
    """
    # A cut may fall between two items; two cuts do not.
    answers = [*cut_answers(peer), *cut_answers(peer, CUT + 3)]
    statuses = [[{}, *answer.output][-1].get("status") for answer in answers]
    is_told = statuses[0] == statuses[1] and "incomplete" in statuses
    assert is_told, f"expected the item that was cut to be incomplete, got {statuses}"


@should
def cut_exactly(peer: Peer) -> None:
    """cut-exactly: a response that was cut has max_output_tokens tokens, no less and no more

    the API reference: an upper bound, reasoning included; bills are made of the count
    D10 G04 G06 https://github.com/ikawrakow/ik_llama.cpp/pull/2358
    """
    for answer in cut_answers(peer):
        assert answer.n_output == CUT


@must
def call(peer: Peer) -> None:
    """call, chat-call: tool_choice required makes a call of a tool that there is, and ends as calls do

    the API reference: required means that the model must call one or more tools
    E01 C13 https://github.com/vllm-project/vllm/issues/36435
    the API reference: required, and finish_reason tool_calls if the model called a tool
    G02 https://github.com/vllm-project/vllm/pull/9209
    """
    for answer in peer.both(**CALLED):
        assert {*answer.names} == {"get_weather"}, f"expected a call of get_weather, got {answer.names}"
        assert answer.end in ("tool_calls", "length"), f"expected an end with tool_calls, got {answer.end}"
        status = answer.calls[0].get("status", "completed")
        assert status == "completed" or answer.end == "length", "expected the call to be completed"


@must(profiles="chat")
def stop_string(peer: Peer) -> None:
    """stop-string: nothing of a stop string is sent, nor anything after it, and all before it

    the API reference: the returned text will not contain the stop sequence
    D16 D17 https://github.com/SharpAI/SwiftLM/issues/126
    """
    text = peer.plain().text
    stop = text[len(text) // 2 :][:5]
    if len(stop) < 5:
        raise NotApplicable(f"the answer is too short: {text!r}")

    def expected() -> Json:
        whole = peer.plain().text
        return {"whole": whole, "text": whole.partition(stop)[0], "end": "stop"}

    for answer in peer.both(stop=[stop]):
        peer.same_answer(expected, {"whole": text, "text": answer.text, "end": answer.end})
