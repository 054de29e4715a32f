"""Rules on answers (streamed and plain say the same; cuts, calls, stop strings, choices, logprobs), on HTTP,
and on what clients do besides asking: they leave, come at once, compress.

    Peer --rule--> nothing, or AssertionError, or NotApplicable

Authority: that of each rule is the link in its docstring.

Not here: one stream by itself (frames.py, events.py, chunks.py), what is stored (stored.py).
"""

import gzip
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress

from audit.events import TERMINAL
from audit.exchanges import enter_texts
from audit.peer import CUT, STORY, Peer
from audit.rules import NoReply, NotApplicable, rules_of
from audit.schema import Json, shortened
from audit.stream import Answer, choices_of

must, should, _ = rules_of("answers", "responses")

# --- one answer, however it is asked for --------------------------------------------------------------------


ALONE = r"""
must of chat responses
plain-by-default: without stream the answer is a JSON object

the API reference: stream is false by default
B09 https://platform.openai.com/docs/api-reference/responses/create

responses  {"stream": null} -> object:=response
chat       {"stream": null} -> object:=chat.completion


must of responses
answer-fields: a plain answer has the members it must have

openai/openai-openapi calls these members required
C22 https://github.com/lemonade-sdk/lemonade/issues/3607

responses  {} -> response


should of responses, after answer-fields
echo: the response has the parameters as they were asked, and the tools

the API reference: they are members of the response; SDKs and logs show them
https://platform.openai.com/docs/api-reference/responses/object

responses  {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 20, "tool_choice": "none",
             "instructions": "Brief!", "parallel_tool_calls": false, "metadata": {"a": "b"}, "tools": [TOOL]}
             -> temperature:=0.5 top_p:=0.9 max_output_tokens:=20 tool_choice:=none tools:+get_weather
             instructions:=Brief! parallel_tool_calls:=false metadata:a_is_b


must of responses
instructions-read: the instructions are part of the prompt

the API reference: a system message, inserted into the context of the model
https://platform.openai.com/docs/api-reference/responses/create

responses  {} -> object:=response
responses  {"instructions": "SENTENCES"} -> a longer prompt


must of chat
max-completion-tokens: max_completion_tokens is the limit that max_tokens was

the API reference: max_tokens is deprecated in favor of it
https://platform.openai.com/docs/api-reference/chat/create

chat       {"messages": [{"role": "user", "content": "STORY"}], "max_tokens": null,
             "max_completion_tokens": 4} -> usage:four_tokens


must of chat responses
stream-comes: stream: true is answered with an event stream

the API reference: stream
https://platform.openai.com/docs/api-reference/responses-streaming

responses  {"stream": true} -> stream
chat       {"stream": true} -> stream


should of chat responses
models: GET /models lists the models

the API reference; user interfaces fill their lists with it
https://platform.openai.com/docs/api-reference/models/list

GET /models -> object:=list data:+model


advice of chat responses, after stream-comes
cache-control: a stream is not kept by caches

proxies may keep or collect what is not marked no-cache
B06 https://github.com/open-metadata/OpenMetadata/pull/29532

responses  {"stream": true} -> header cache-control no-cache|no-store
chat       {"stream": true} -> header cache-control no-cache|no-store


must of chat responses, after stream-comes
stream-headers: a stream is text/event-stream in UTF-8, not encoded, of one length or chunked

the HTML standard: text/event-stream, and UTF-8; RFC 9112 on lengths
A09 B06 B07 https://github.com/open-metadata/OpenMetadata/pull/29532

responses  {"stream": true} -> header content-type ^text/event-stream(;\s*charset="?utf-8"?)?$
responses  {"stream": true} -> header content-encoding ^$
responses  {"stream": true} -> header content-length ^$, or header transfer-encoding ^$
chat       {"stream": true} -> header content-type ^text/event-stream(;\s*charset="?utf-8"?)?$


advice of chat responses
request-id: every reply has an x-request-id

the guide on debugging requests: x-request-id is what support asks for
https://platform.openai.com/docs/api-reference/debugging-requests

GET /models -> header x-request-id .
responses  {"stream": true} -> header x-request-id .
responses  {"model": -> header x-request-id .
chat       {} -> header x-request-id .
"""
enter_texts("answers", ALONE)


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
    peer.same_answer(lambda: peer.plain().outline, told)


@must(profiles="chat")
def chat_usage(peer: Peer) -> None:
    """chat-usage: usage comes in the stream if it was asked for, and is that of the plain answer

    the API reference on stream_options.include_usage
    G05 G07 https://github.com/vllm-project/vllm/pull/24477
    """
    told = peer.streamed(stream_options={"include_usage": True})
    assert told.usage
    peer.same_answer(lambda: peer.plain().counts, told.counts)


@must(profiles="chat")
def usage_unasked(peer: Peer) -> None:
    """usage-unasked: no usage and no chunk without choices in the stream if it was not asked for

    the API reference: only with include_usage; clients read choices[0] of every other chunk
    B08 B10 G07 https://github.com/sgl-project/sglang/issues/5451
    """
    for chunk in peer.recorded("chat").events:
        assert "error" in chunk or (chunk.get("choices") and not chunk.get("usage"))


@must(profiles="chat")
def two_choices(peer: Peer) -> None:
    """two-choices: n=2 makes two choices and two ends

    the API reference on n; clients count the choices
    A21 https://github.com/vllm-project/vllm/pull/378
    """
    answers = choices_of(peer.recorded("chat-two").events)
    assert {index for index, answer in answers.items() if answer.end} == {0, 1}


@must
def logprobs(peer: Peer) -> None:
    """logprobs, chat-logprobs: logprobs have an entry for each token of the text, streamed or not, or are
    refused

    the API reference on include: message.output_text.logprobs
    C22 https://platform.openai.com/docs/api-reference/responses/create
    the API reference: the log probabilities of each output token
    C22 D08 D21 https://github.com/vllm-project/vllm/pull/47616
    """
    for answer in peer.both(**peer.asks("logprobs")):
        is_whole = answer.tokens.startswith(answer.text)
        assert is_whole, f"expected tokens that make up {answer.text}, got {answer.tokens}"


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
        assert answer.end == "length"
        if peer.api == "chat" and answer.usage:
            assert answer.n_output == CUT


@must
def characters(peer: Peer) -> None:
    """characters, chat-characters: a character of several tokens comes whole: only the last one of an answer,
    if it is cut there, may be U+FFFD

    text is UTF-8: half a character is held until its other half comes
    D11 https://github.com/antonellof/ferrox/issues/124
    text is UTF-8: half a character is held until its other half comes
    D11 https://github.com/waybarrios/vllm-mlx/pull/109
    """
    # A schema forces a text of foxes, each of which is several tokens for most models; most end in a fox.
    for answer in peer.both(**peer.asks("animals")):
        if len(answer.text) < CUT:
            raise NotApplicable(f"the answer is too short: {answer.text}")
        assert "\ufffd" not in answer.text[:-3]  # a fox has 4 bytes, so 3 may be left


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
    for answer in peer.both(**peer.asks("call")):
        assert answer.names == {"get_weather"}
        assert answer.end in ("tool_calls", "length")
        status = answer.calls[0].get("status", "completed")
        assert status == "completed" or answer.end == "length"


@should(profiles="chat")
def logit_bias(peer: Peer) -> None:
    """logit-bias: a bias of 100 for a token makes another answer, or is refused

    the API reference on logit_bias: 100 should result in exclusive selection of the token
    https://platform.openai.com/docs/api-reference/chat/create
    """
    told = peer.plain().text
    if not told:
        raise NotApplicable("the answer has no text")
    assert peer.plain(logit_bias={"42": 100}).text != told


@must(profiles="chat")
def stop_string(peer: Peer) -> None:
    """stop-string: nothing of a stop string is sent, nor anything after it, and all before it

    the API reference: the returned text will not contain the stop sequence
    D16 D17 https://github.com/SharpAI/SwiftLM/issues/126
    """
    text = peer.plain().text
    stop = text[len(text) // 2 :][:5]
    if len(stop) < 5:
        raise NotApplicable(f"the answer is too short: {text}")

    def expected() -> Json:
        whole = peer.plain().text
        return {"whole": whole, "text": whole.partition(stop)[0], "end": "stop"}

    for answer in peer.both(stop=[stop]):
        peer.same_answer(expected, {"whole": text, "text": answer.text, "end": answer.end})


# --- HTTP ---------------------------------------------------------------------------------------------------

PATIENCE_S = 2  # with what a server does when an answer is over

must, should, _ = rules_of("http", "chat responses")


@must(after="stream-comes")
def stream_ends(peer: Peer) -> None:
    """stream-ends: the body of a stream ends soon after its last event

    RFC 9112, section 6.3: a client that reads to the end waits as long as the server holds it open
    M01 M02 https://github.com/openai/codex/issues/43140
    """
    for api in ("responses", "chat"):
        peer.start()
        is_over = False
        try:
            with suppress(NotApplicable), peer.live(api=api, said="Say goodbye.", limit=CUT) as events:
                for event in events:
                    # After its last event only usage and [DONE] can come.
                    has_reason = any(choice.finish_reason for choice in event.choices or ())
                    if has_reason or "error" in event or event.type in TERMINAL:
                        is_over = True
                        peer.start(PATIENCE_S)
        except NoReply:
            assert not is_over
            raise


@should
def writes(peer: Peer) -> None:
    """writes: an event is written when it is made, and whole

    clients that parse what one read brings, and proxies that pass on a write at a time
    B02 D21 https://github.com/openresponses/openresponses/blob/main/src/lib/sse-parser.ts
    """
    try:
        reply = peer.recorded("text")
    except NotApplicable:
        reply = peer.recorded("chat")
    if "chunked" not in reply.headers.get("transfer-encoding", ""):
        raise NotApplicable("the stream is not sent in chunks")
    for chunk in reply.chunks[:-1]:  # the rule whole-frames is about the end
        assert chunk.endswith((b"\n\n", b"\r\n\r\n")), f"expected whole frames, got {shortened(chunk[-200:])}"
    assert len(reply.chunks) > 2, "expected events as they are made, got all at once"


# --- clients ------------------------------------------------------------------------------------------------

must, should, advice = rules_of("clients", "responses")


@must
def two_at_once(peer: Peer) -> None:
    """two-at-once: two streams at once are two responses, each on its own connection

    the API reference: a stream is of one response
    C07 https://platform.openai.com/docs/api-reference/responses-streaming
    """
    with peer.live(limit=2 * CUT) as one, peer.live(limit=2 * CUT) as other:
        ids = {last.response.id for *_, last in (one, other)} - {""}
    assert len(ids) == 2, f"expected two ids, got {' and '.join(ids) or 'none'}"


@advice
def first_event(peer: Peer) -> None:
    """first-event: the first event does not wait for a long prompt to be read

    proxies and clients end what says nothing for some seconds
    https://platform.openai.com/docs/api-reference/responses-streaming
    """
    # A busy machine may spoil a try; each prompt is new to the prefix cache. No client feels 0.05 s.
    short_s = 0.0  # to the first event of a short prompt
    for number in range(4):
        said = f"Text {number}. " + "The quick brown fox jumps over the lazy dog. " * 80 * min(number, 1)
        started_at = time.monotonic()
        with peer.live(said=said, limit=CUT) as events:
            next(events, None)
            first_s = time.monotonic() - started_at
            if not any(event.type.endswith(".delta") for event in events):
                raise NotApplicable("the stream has no delta")
            delta_s = time.monotonic() - started_at
        short_s = short_s or first_s
        if number and first_s - short_s < max(0.05, 0.8 * (delta_s - short_s)):
            return
    raise AssertionError(
        f"expected the first event well before the first delta, {delta_s:.3f} s, got {first_s:.3f} s"
    )


# A gauge of vLLM's and ours, of llama.cpp's or of SGLang's.
RUNNING = re.compile(
    r"^\w+:(?:num_requests_running|requests_processing|num_running_reqs)\S* ([\d.e+]+)", re.MULTILINE
)


@should
def leaving(peer: Peer) -> None:
    """leaving: the work of a foreground stream ends when its client leaves

    what no client reads takes the place of others
    I01 https://github.com/vllm-project/vllm/pull/11190
    """
    # Seen if the server has metrics: the gauge of running requests falls before the answer's end.
    if n_running(peer, 0):
        raise NotApplicable("requests of others run")
    with peer.live(said=STORY, limit=2000, **peer.long) as events:
        next(events)
        if not n_running(peer, 1):
            raise NotApplicable("the metrics do not show a running request")
    assert not n_running(peer, 0)


def n_running(peer: Peer, expected: int) -> int:
    """Count the running requests, once they are as many, or after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        counts = RUNNING.findall(peer.ask("GET", "//metrics").text)
        if not counts:
            raise NotApplicable("the server has no metrics of running requests")
        n = int(sum(map(float, counts)))
        if n == expected or time.monotonic() > deadline:
            return n
        time.sleep(0.05)


@should
def compressed(peer: Peer) -> None:
    """compressed: a body in gzip is taken, or refused with 415

    RFC 9110, section 15.5.16: clients send it again without
    https://www.rfc-editor.org/rfc/rfc9110#section-15.5.16
    """
    path, body = peer.request()
    packed = gzip.compress(json.dumps(body).encode())
    assert peer.ask("POST", path, packed, Content_Encoding="gzip").if_there().status in (200, 415)


@must(profiles="chat responses")
def key(peer: Peer) -> None:
    """key: without the key the answer is a 401 with an error object

    the guide on error codes: SDKs raise AuthenticationError for 401
    https://platform.openai.com/docs/guides/error-codes
    """
    reply = peer.ask("POST", *peer.request(), **peer.without_key())
    assert reply.status == 401
    assert reply.error.get("message")
