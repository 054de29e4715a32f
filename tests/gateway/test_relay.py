"""Upstreams, raw sockets that send what a test says: what passes, what becomes of an answer that breaks, and
which of them is asked. The bugs of other relays are replays; here: their laws, and what needs a connection.
"""

import asyncio
import gzip
import itertools
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from typing import Any, cast

import pytest
from starlette.types import Message

import sse
from channels import Accepted, Delta, Finish, Output, Usage
from gateway import refused, remote, upstreams
from gateway.answers import Answer as Reader
from gateway.answers import Asked
from gateway.metering import Meter
from gateway.refused import Refused
from gateway.relay import frames_of as frames_of_chunks
from gateway.relay import whole
from gateway.remote import RemoteWorker, UpstreamPrompt
from gateway.upstreams import Timeouts, Upstreams
from helpers import laws
from helpers import upstream as scripted
from helpers.pulled import pulled
from helpers.serving import Json
from helpers.upstream import (
    CHUNKED,
    DONE,
    FRAMES,
    STREAM,
    Answer,
    Exchange,
    Upstream,
    delta,
    event,
    finish,
    head,
    json_answer,
    says,
    upstream,
)
from request import params
from request.refusals import BadInput

ASK: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAMED: Json = ASK | {"stream": True}
QUICK = Timeouts(connect_s=5, first_byte_s=10, idle_s=10)

# --- the seed: three scenarios, and what they cost ----------------------------------------------------------

SEED = (
    b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    b'data: {"id":"1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":'
    b'{"prompt_tokens":14,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":3}}}\n\n'
    b"data: [DONE]\n\n"
)
PLAIN = (
    b'{"id":"1","choices":[],"usage":'
    + SEED[SEED.index(b'{"prompt_tokens') : SEED.index(b"}\n\ndata: [")]
    + b"}"
)


@pytest.mark.bug("B01")
@pytest.mark.parametrize(
    ("chunks", "stream"),
    [([SEED], True), ([SEED[i : i + 1] for i in range(len(SEED))], True), ([PLAIN], False)],
    ids=["sse_whole_events", "sse_byte_split", "raw_json_non_stream"],
)
def test_relay_json_parser_eats_sse(chunks: list[bytes], stream: bool) -> None:
    """200 and no byte: a JSON parser met SSE. https://github.com/TelegramMessenger/cocoon/issues/49"""
    meter = Meter(price=1)
    reader = Reader(meter=meter, asked=Asked(shows_usage=True))
    read = [*itertools.chain.from_iterable(map(reader.feed, chunks)), *reader.close()]
    out = frames_of_chunks(read) if stream else whole(read).encode()
    assert b'"prompt_total_cost":14,"completion_total_cost":7,"total_cost":21' in out
    line = " ".join(f"{name}={n}" for name, n in meter.used().items())
    assert line == "prompt=11 cached=3 completion=7 reasoning=0 total=21 cost=21"


@pytest.mark.parametrize(("cached", "reasoning", "used"), [(9, 0, (0, 5, 1, 0)), (0, 9, (5, 0, 0, 1))])
def test_a_part_is_no_more_than_its_whole(cached: int, reasoning: int, used: tuple[int, ...]) -> None:
    """Bug: more was cached than the prompt has, the rest cost -4, and the counter of all costs fell."""
    details = {"prompt_tokens_details": {"cached_tokens": cached}, "reasoning_tokens": reasoning}
    meter = Meter()
    meter.read({"prompt_tokens": 5, "completion_tokens": 1} | details)
    assert tuple(meter.used().values()) == (*used, 6)


# --- law 1: where the bytes were cut cannot be seen ---------------------------------------------------------

CRLF = STREAM.replace(b"\n", b"\r\n")
# fmt: off
STREAMS = {
    "as ours":        STREAM,
    "CR":             STREAM.replace(b"\n", b"\r"),
    "mixed":          b"\xef\xbb\xbf: hi\r\n\r" + CRLF[:200] + STREAM[200 - STREAM[:190].count(b"\n"):],
    "not ended":      STREAM[:-1],
    "cut":            STREAM[:-40],
    "not SSE":        b"  \n <html>no</html>",
    "JSON":           json.dumps({"choices": [{"index": 0, "message": {"content": "\u2028"}}]}).encode(),
    "half a letter":  delta(content="x").replace(b"x", b"caf\xc3") + finish() + b"data: \xc3",
    "separators":     delta(content="x").replace(b"x", "\u2028\u0085\f".encode()) + finish() + DONE + DONE,
}
# fmt: on


def everything(chunks: list[bytes], stream: bool) -> list[Any]:
    """All that a relay makes of these chunks."""
    meter = Meter(price=1)
    reader = Reader(meter=meter, asked=Asked(shows_usage=True))
    read = [*itertools.chain.from_iterable(map(reader.feed, chunks)), *reader.close()]
    if stream:
        return [*(frames_of_chunks([chunk]) for chunk in read), meter.usage]
    try:
        return [whole(read), meter.usage]
    except Refused as error:
        return [error.message, meter.usage]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("name", STREAMS)
def test_cuts_cannot_be_seen(name: str, stream: bool) -> None:
    data = STREAMS[name]
    expected = everything([data], stream)
    assert everything([data[i : i + 1] for i in range(len(data))], stream) == expected
    for i in range(len(data) + 1):
        assert everything([data[:i], b"", data[i:]], stream) == expected, i


@pytest.mark.bug("B02")
@pytest.mark.parametrize("line_end", [b"\n", b"\r", b"\r\n"])
def test_every_frame_leaves_before_the_next_comes(line_end: bytes) -> None:
    """Elsewhere all of it left at the end: cocoon, CountTokens.cpp. And a CR must not wait for an LF."""
    reader = Reader(asked=Asked(shows_usage=True))
    *others, used, _ = FRAMES
    for frame in others:
        assert frames_of_chunks(reader.feed(frame.replace(b"\n", line_end))) == frame
    assert reader.feed(used + DONE) == []
    assert frames_of_chunks(reader.close()) == used


def test_a_call_that_was_cut_does_not_end_as_one_to_run() -> None:
    """Bug: behind [DONE] without a finish_reason it got `tool_calls`, and clients run what ends so."""
    function = {"name": "f", "arguments": '{"a": '}
    cut = {"index": 0, "id": "call_1", "type": "function", "function": function}
    reader = Reader()
    *_, error = reader.feed(delta(tool_calls=[cut]) + DONE) + reader.close()
    assert "not a JSON object" in error["error"]["message"]


# --- errors of upstreams ------------------------------------------------------------------------------------

LONG = "This model's maximum context length is 10 tokens."
# fmt: off
ERRORS: list[tuple[int, Any, int, str | None, str, str]] = [
    # status, body of the upstream       ours, param, code, message
    (400, {"error": {"message": "No.", "param": "top_p", "code": "invalid_value"}},
                                         400, "top_p", "invalid_value", "No."),
    (400, {"error": {"message": LONG, "code": 400}},
                                         400, None, "context_length_exceeded", LONG),
    (400, {"object": "error", "message": "No.", "code": 40301},
                                         400, None, "", "No."),
    (500, {"error": {"message": LONG}},  502, None, "", LONG),
    (404, {"detail": "No such model."},  404, None, "", "No such model."),
    (401, {"error": "Bad key"},          502, None, "", "The upstream does not take this server's key (401)"),
    (429, {"error": {"message": "Wait.", "code": "rate_limit_exceeded"}},
                                         429, None, "rate_limit_exceeded", "Wait."),
    (503, None,                          503, None, "", "The upstream answered with status 503."),
    (400, {"error": {"message": "x" * 50_000, "param": 7}},
                                         400, None, "", "xxx"),
]
# fmt: on


@pytest.mark.parametrize(("status", "body", "ours", "param", "code", "message"), ERRORS)
def test_refusals(status: int, body: Any, ours: int, param: str | None, code: str, message: str) -> None:
    found = refused.read_refusal(status, {}, json.dumps(body).encode())
    assert (found.status, found.param, found.code) == (ours, param, code)
    assert found.message.startswith(message)
    assert len(found.message) < 2000


@pytest.mark.parametrize(("theirs", "ours"), [("7", "7"), ("\u20ac", ""), ("soon", "")])
def test_retry_after_is_seconds(theirs: str, ours: str) -> None:
    """Bug: 500, for a header cannot hold a euro."""
    assert refused.read_refusal(429, {"retry-after": theirs}, b"").retry_after == ours


# fmt: off
#  what the upstream finds fault with              what the client has sent
RENAMED = [
    ("response_format.json_schema.schema.type",     "text.format"),
    ("messages[3].content",                         "input"),
    ("temperature",                                 "temperature"),
]
# fmt: on


@pytest.mark.parametrize(("theirs", "ours"), RENAMED)
def test_an_upstream_names_what_the_client_has_sent(theirs: str, ours: str) -> None:
    """Bug: a parameter of the other API was named, which no client had sent."""

    async def check(worker: RemoteWorker, _: Upstream) -> None:
        for asked, param in ((said(worker), ours), (passed(worker, ASK), theirs)):
            with pytest.raises(Refused) as caught:
                await asked
            assert caught.value.param == param

    over(check, says(json_answer({"error": {"message": "No.", "param": theirs}}, "400 Bad Request")))


# --- one request, in this process ---------------------------------------------------------------------------


Check = Callable[..., Awaitable[None]]  # (worker over some upstreams, these upstreams)


def over(check: Check, *answers: Answer, **options: Any) -> list[Upstream]:
    """Check a worker over upstreams that answer so; return them."""

    async def run(running: list[Upstream]) -> None:
        urls = [each.url for each in running]
        worker = RemoteWorker(Upstreams(urls, dict.fromkeys(urls, "key"), options.get("timeouts", QUICK)), 2)
        try:
            await worker.upstreams.probe()
            await asyncio.wait_for(check(worker, *running), 20)
            await asyncio.sleep(0)
            assert worker.counts()["running"] == 0
        finally:
            await worker.close()

    with ExitStack() as stack:
        running = [stack.enter_context(upstream(answer)) for answer in answers]
        asyncio.run(run(running))
        return running


class Client:
    """Calls an ASGI application, and stays for as long as it is told."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.is_gone = asyncio.Event()
        self.on_body: Callable[[bytes], None] = lambda body: None

    async def call(self, app: Any) -> None:
        async def receive() -> Message:
            await self.is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append(message)
            self.on_body(message.get("body", b""))

        await app({"type": "http"}, receive, send)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def passed(worker: RemoteWorker, body: Json) -> Client:
    """A chat request passed through; raises Refused."""
    client = Client()
    await client.call(worker.pass_through(body))
    return client


async def said(worker: RemoteWorker, **body: Any) -> list[Accepted | Output | Finish]:
    """What the worker says of a Responses request; raises Refused."""
    request = params.from_responses({"model": "m", "input": "hi"} | body, {})
    outputs: list[Accepted | Output | Finish] = []
    await (await worker.prepare(request)).run(outputs.append)
    return outputs


def frames_of(body: bytes) -> list[Any]:
    """The events of a whole stream; its [DONE] came once, and last."""
    parser = sse.Parser()
    found = [found.data for found in parser.feed(body)]
    parser.close()
    assert [data == "[DONE]" for data in found] == [False] * (len(found) - 1) + [True]
    return [json.loads(data) for data in found[:-1]]


SAID = [["analysis", "so"], ["final", "caf\u00e9"], ["call", "f", '{"x":1}']]  # by STREAM


def test_a_request_and_its_answer() -> None:
    async def check(worker: RemoteWorker, _: Upstream) -> None:
        client = await passed(worker, STREAMED | {"stream_options": {"include_usage": True}})
        assert client.sent[0]["status"] == 200
        assert dict(client.sent[0]["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert frames_of(client.body)[-1]["usage"]["total_cost"] == 42
        assert client.body.startswith(b"".join(FRAMES[:-2]))
        first, *outputs, end = await said(worker)
        assert (first, end) == (Accepted(), Finish("stop", Usage(14, 7, 0, 3)))
        assert laws.items(cast(list[Output], outputs)) == SAID

    (asked,) = over(check, says(head() + STREAM))
    for exchange in asked.exchanges:
        assert exchange.headers["accept-encoding"] == "identity"
        assert exchange.headers["authorization"] == "Bearer key"
        assert exchange.body["stream_options"] == {"include_usage": True}


# --- chaos --------------------------------------------------------------------------------------------------

CHUNKED_HEAD = head("text/event-stream", "200 OK", CHUNKED)
ENDS: dict[str, tuple[int, Callable[[int], Answer]]] = {
    # at every n-th byte, the stream up to there, and then
    "end of the connection": (1, lambda n: says(head() + STREAM[:n])),
    "end inside a chunk": (7, lambda n: says(CHUNKED_HEAD + b"%x\r\n" % len(STREAM) + STREAM[:n])),
}


@pytest.mark.bug("B13")
@pytest.mark.parametrize("how", ENDS)
def test_upstream_dies_at_every_byte(how: str) -> None:
    """Elsewhere: 200, half an answer, no error, no [DONE]. https://github.com/open-webui/open-webui/issues/29628"""
    step, ending = ENDS[how]
    whole_ = [json.loads(frame[6:]) for frame in FRAMES[:-2]]
    begun = len(FRAMES[0] + FRAMES[1]) - 2  # bytes until something is said; before that others may be asked
    finished = len(b"".join(FRAMES[:-2])) - 2  # until all is said; usage and [DONE] may be missing
    # Only after its blank line is an event known to be whole, unless the upstream has ended its answer.
    at_least = 0 if how == "end of the connection" else 2

    async def check(worker: RemoteWorker, upstream: Upstream) -> None:
        for n in range(0, len(STREAM) + 1, step):
            upstream.answer = ending(n)
            if n < begun + at_least:
                with pytest.raises(Refused):
                    await passed(worker, STREAMED)
                with pytest.raises(Refused):
                    await said(worker)
                continue
            frames = frames_of((await passed(worker, STREAMED)).body)
            complete = [frame for frame in frames if "error" not in frame]
            errors = frames[len(complete) :]
            assert complete == whole_[: len(complete)]
            assert [error["error"]["code"] for error in errors] == ["server_error"] * (
                n < finished + at_least
            )
            end = (await said(worker))[-1]
            assert isinstance(end, Finish)
            assert (end.reason == "failed") == bool(errors)
            if not errors:
                assert complete == whole_

    over(check, hangs)


def hangs(exchange: Exchange) -> None:
    exchange.wait_closed()


def reset(exchange: Exchange) -> None:
    exchange.send(head() + STREAM[:300])
    exchange.reset()


def streams(header: str) -> bytes:
    return head("text/event-stream", "200 OK", header) + STREAM


# what becomes of an answer: streamed, plain, as a response
WHOLE, BROKEN, REFUSED = ["whole", "whole", "stop"], ["error", "refused", "failed"], ["refused"] * 3
OOPS = delta(content="x")[:-6] + b"\n\n"
NONSENSE = event({"choices": [{"delta": {"content": 7, "tool_calls": 5}}, 3]})
NAMELESS = delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])
# fmt: off
CHAOS: dict[str, tuple[list[str], Answer]] = {
    "more after [DONE]":  (WHOLE,   says(head() + STREAM + DONE + b"\x00\xff" * 9)),
    "wrong chunk size":   (WHOLE,   says(CHUNKED_HEAD + b"fff\r\n" + STREAM[:-9])),
    "too short":          (BROKEN,  says(streams("Content-Length: 300"))),
    "reset":              (BROKEN,  reset),
    "no finish_reason":   (BROKEN,  says(head() + FRAMES[0] + FRAMES[2])),
    "call without name":  (BROKEN,  says(head() + NAMELESS + DONE)),
    "packed":             (REFUSED, says(head() + gzip.compress(STREAM))),
    "garbage":            (REFUSED, says(head() + bytes(range(256)) * 99)),
    "unreadable frame":   (REFUSED, says(head() + OOPS + finish() + DONE)),
    "HTML":               (REFUSED, says(head("text/html") + b"<html>")),
    "an array":           (REFUSED, says(head("application/json") + b"[1]")),
    "nonsense":           (REFUSED, says(head() + NONSENSE + DONE)),
    "no HTTP":            (REFUSED, says(b"\x00\xff garbage \r\n\r\n" * 9)),
}
# fmt: on


@pytest.mark.parametrize("name", CHAOS)
def test_chaos(name: str) -> None:
    """Whatever comes: an answer or an error, in time, and the books are kept."""
    expected, answer = CHAOS[name]

    async def check(worker: RemoteWorker, _: Upstream) -> None:
        assert await outcomes(worker) == expected
        totals = worker.totals
        assert totals["relayed_done"] + totals["relayed_error"] == 3
        assert totals["relayed_disconnect"] == 0

    over(check, answer)


async def outcome(worker: RemoteWorker, body: Json) -> str:
    try:
        client = await passed(worker, body)
    except Refused:
        return "refused"
    if body.get("stream"):
        assert client.body.endswith(DONE)
        assert client.body.count(DONE) == 1
        return "error" if b'data: {"error":' in client.body else "whole"
    json.loads(client.body)
    return "whole"


async def outcomes(worker: RemoteWorker) -> list[str]:
    found = [await outcome(worker, STREAMED), await outcome(worker, ASK)]
    try:
        end = (await said(worker))[-1]
    except Refused:
        return [*found, "refused"]
    assert isinstance(end, Finish)
    return [*found, end.reason]


# --- an error with status 200, an answer without an end -----------------------------------------------------

BAD = {"message": "No.", "type": "BadRequestError", "param": None}
# fmt: off
FIRST_FRAMES: list[tuple[Json, int]] = [
    # the first event of an answer with status 200                                     status
    ({"error": BAD | {"code": 400}},                                                   400),
    ({"error": BAD | {"code": "429"}},                                                 429),
    ({"object": "error", "message": "No.", "type": "BadRequestError", "code": 400},    400),
    ({"error": "No."},                                                                 502),
    ({"detail": "No."},                                                                502),
]
AS_SENT: dict[str, Callable[[Json], bytes]] = {
    "an event after a comment": lambda error: head() + b": hi\n\n" + event(error) + DONE,
    "no event":                 lambda error: head() + json.dumps(error).encode(),
    "an object":                json_answer,
}
# fmt: on


@pytest.mark.bug("M07")
@pytest.mark.parametrize("name", AS_SENT)
def test_an_error_in_the_first_frame_has_its_status(name: str) -> None:
    """Bug: 200, for the response was accepted before the first frame was looked at."""

    async def check(worker: RemoteWorker, upstream: Upstream) -> None:
        for error, status in FIRST_FRAMES:
            upstream.answer = says(AS_SENT[name](error))
            for asked in (passed(worker, STREAMED), passed(worker, ASK), said(worker)):
                with pytest.raises(Refused, match=r"No\.") as caught:
                    await asked
                assert caught.value.status == status

    over(check, hangs)


FOR_EVER_S = 6 * upstreams.GRACE_S  # long enough to see that the front does not end it
SAYS_HI = delta(role="assistant", content="") + delta(content="Hi")
BOOM = event({"error": {"message": "boom", "type": "server_error", "code": "x"}})
TOO_MANY = head("application/json", "429 Too Many", "Retry-After: 7", "Content-Length: 500") + b'{"error": {'


def for_ever(sent: bytes) -> Answer:
    """This, then comments, until the other side has gone, which raises OSError."""

    def answer(exchange: Exchange) -> None:
        exchange.send(sent)
        ends_at = time.monotonic() + FOR_EVER_S
        while time.monotonic() < ends_at:
            exchange.send(b": ping\n\n")
            time.sleep(0.02)

    return answer


async def left(upstream: Upstream, answer: Answer, asked: Coroutine[Any, Any, Any]) -> Any:
    """What is said, once the upstream, which answers so, has been left."""
    was_left = threading.Event()

    def held(exchange: Exchange) -> None:
        with suppress(ConnectionError):
            answer(exchange)
            if not exchange.wait_closed():
                return
        was_left.set()

    upstream.answer = held
    found = (await asyncio.gather(asked, return_exceptions=True))[0]
    assert await asyncio.to_thread(was_left.wait, FOR_EVER_S), "the upstream was not left"
    return found


@pytest.mark.bug("M01")
def test_an_error_ends_the_answer() -> None:
    """Elsewhere: keep-alives for as long as the upstream held its connection."""

    async def check(worker: RemoteWorker, upstream: Upstream) -> None:
        boom = says(head() + SAYS_HI + BOOM)
        body = (await left(upstream, boom, passed(worker, STREAMED))).body
        assert (body.count(b'"message":"boom"'), body[-len(DONE) :]) == (1, DONE)
        assert (await left(upstream, boom, said(worker)))[-1].message == "boom"

    over(check, hangs)


# fmt: off
FINISHED = {
    "text, pings": for_ever(head() + SAYS_HI + finish()),
    "usage":       says(head() + SAYS_HI + finish() + scripted.USED),
}
# fmt: on


@pytest.mark.bug("M02")
@pytest.mark.parametrize("name", FINISHED)
def test_after_its_end_an_answer_has_seconds(name: str) -> None:
    """Elsewhere the client waited for [DONE] for as long as the upstream liked."""

    async def check(worker: RemoteWorker, upstream: Upstream) -> None:
        asked = STREAMED | {"stream_options": {"include_usage": True}}
        frames = frames_of((await left(upstream, FINISHED[name], passed(worker, asked))).body)
        assert "error" not in frames[-1]
        assert ("usage" in frames[-1]) == (name == "usage")
        end = (await left(upstream, FINISHED[name], said(worker)))[-1]
        assert (end.reason, bool(end.usage)) == ("stop", name == "usage")

    over(check, hangs)


@pytest.mark.bug("M03")
def test_a_refusal_does_not_wait_for_its_body() -> None:
    """Elsewhere: 28 s, then 200 and a failure, for the rest of the body never came."""

    async def check(worker: RemoteWorker, upstream: Upstream) -> None:
        for asked in (passed(worker, STREAMED), said(worker)):
            found = await left(upstream, says(TOO_MANY), asked)
            assert (found.status, found.retry_after) == (429, "7")

    over(check, hangs)


# --- time ---------------------------------------------------------------------------------------------------


def stalls(exchange: Exchange) -> None:
    exchange.send(head() + FRAMES[1])
    exchange.wait_closed()


# fmt: off
TIMES: dict[str, tuple[Answer, Timeouts, list[str]]] = {
    "no first byte": (hangs,                    QUICK._replace(first_byte_s=0.05), REFUSED),
    "never begins":  (for_ever(head()),         QUICK._replace(first_byte_s=0.3),  REFUSED),
    "silence":       (stalls,                   QUICK._replace(idle_s=0.05),       BROKEN),
    "never ends":    (for_ever(head() + FRAMES[1]), QUICK._replace(answer_s=0.3),      BROKEN),
}
# fmt: on


@pytest.mark.parametrize(("answer", "timeouts", "found"), TIMES.values(), ids=TIMES)
def test_nothing_waits_for_ever(answer: Answer, timeouts: Timeouts, found: list[str]) -> None:
    async def check(worker: RemoteWorker, _: Upstream) -> None:
        assert await outcomes(worker) == found

    over(check, answer, timeouts=timeouts)


def test_a_client_hears_from_us_while_the_upstream_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the head of a stream nor its first event waits for a long prompt; an error is told in band."""
    monkeypatch.setattr("gateway.relay.ACCEPT_S", 0.01)
    heard = threading.Event()

    def answer(exchange: Exchange) -> None:
        assert heard.wait(20), "nothing came before the upstream's answer"
        exchange.send(json_answer({"error": {"message": "No."}}, "400 Bad Request"))

    async def check(worker: RemoteWorker, _: Upstream) -> None:
        client = Client()
        client.on_body = lambda body: heard.set()
        await client.call(worker.pass_through(STREAMED))
        assert client.sent[0]["status"] == 200
        (error,) = frames_of(client.body)
        assert error["error"]["message"] == "No."
        heard.clear()
        request = params.from_responses({"model": "m", "input": "hi", "stream": True}, {})
        prompt = await worker.prepare(request)
        async with aclosing(pulled(partial(UpstreamPrompt.run, prompt))) as outputs:
            assert await anext(outputs) == Accepted()
            heard.set()
            end = await anext(outputs)
        assert isinstance(end, Finish)
        assert (end.reason, end.message) == ("failed", "No.")

    over(check, answer)


def test_a_late_refusal_of_a_plain_request_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: 200 without Retry-After if the upstream took longer than ACCEPT_S to say 429."""
    monkeypatch.setattr("gateway.relay.ACCEPT_S", 0.01)

    def answer(exchange: Exchange) -> None:
        time.sleep(0.2)
        exchange.send(json_answer({"error": {"message": "Wait."}}, "429 Too Many", "Retry-After: 7"))

    async def check(worker: RemoteWorker, _: Upstream) -> None:
        for asked in (passed(worker, ASK), said(worker)):
            with pytest.raises(Refused) as caught:
                await asked
            assert (caught.value.status, caught.value.retry_after) == (429, "7")

    over(check, answer)


@pytest.mark.bug("I03")
@pytest.mark.parametrize("after", ["no byte", "some bytes"])
@pytest.mark.parametrize("body", [STREAMED, ASK, None], ids=["stream", "plain", "response"])
def test_who_leaves_ends_the_work_behind(body: Json | None, after: str) -> None:
    """https://github.com/BerriAI/litellm/pull/30245: the upstream ran on for nobody."""
    asked, ended = threading.Event(), threading.Event()

    def answer(exchange: Exchange) -> None:
        exchange.send(head() + FRAMES[1] if after == "some bytes" else b"")
        asked.set()
        if exchange.wait_closed():
            ended.set()

    async def check(worker: RemoteWorker, _: Upstream) -> None:
        client = Client()
        app = worker.pass_through(body) if body else None
        working: asyncio.Task[Any] = asyncio.create_task(client.call(app) if app else said(worker))
        await asyncio.to_thread(asked.wait, 20)
        if body:
            client.is_gone.set()
            await working
        else:
            working.cancel()
            await asyncio.wait({working})
        assert await asyncio.to_thread(ended.wait, 20), "the connection stayed open"
        assert worker.totals["relayed_disconnect"] == 1

    over(check, answer)


@pytest.mark.bug("I06")
def test_a_slow_client_slows_its_upstream_down() -> None:
    """Nothing is read ahead: what the upstream has sent is bounded by the sockets' buffers."""
    n_sent = 0
    frame = delta(content="x" * 60_000)

    def answer(exchange: Exchange) -> None:
        nonlocal n_sent
        exchange.send(head())
        for _ in range(1000):  # 60 MB
            exchange.send(frame)
            n_sent += len(frame)

    async def check(worker: RemoteWorker, _: Upstream) -> None:
        async def never(*_: Any) -> Any:
            await asyncio.Event().wait()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                await never()

        working = asyncio.create_task(worker.pass_through(STREAMED)({}, never, send))
        before = -1
        while before != n_sent or n_sent == 0:  # until it stands still
            before = n_sent
            await asyncio.sleep(0.1)
        assert n_sent < 20_000_000
        working.cancel()
        await asyncio.wait({working})

    over(check, answer)


# --- accounting ---------------------------------------------------------------------------------------------


@pytest.mark.bug("B12")
@pytest.mark.parametrize("how", ["done", "error", "disconnect"])
def test_usage_is_settled_once_on_every_path(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Elsewhere before the stream ran, so as zero: https://github.com/api7/aisix/issues/108"""
    used = event({"choices": [{"index": 0, "delta": {"content": "hi"}}], "usage": scripted.USAGE})

    def answer(exchange: Exchange) -> None:
        exchange.send(head() + used)
        if how == "disconnect":
            exchange.wait_closed()
        elif how == "done":
            exchange.send(finish() + DONE)

    async def check(worker: RemoteWorker, _: Upstream) -> None:
        client = Client()
        if how == "disconnect":
            client.on_body = lambda body: client.is_gone.set() if body else None
        await client.call(worker.pass_through(STREAMED))
        totals = worker.totals
        found = [totals[f"relayed_{name}"] for name in (how, "cost", "usage_unknown")]
        assert found == [1, 42, 0]

    caplog.set_level(logging.INFO, "remote")
    over(check, answer)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "remote"]
    assert line.endswith(f": {how}, usage: prompt=11 cached=3 completion=7 reasoning=0 total=21 cost=42")


# --- which upstream -----------------------------------------------------------------------------------------


def names(name: str) -> Answer:
    """An upstream that says its name."""
    return says(head() + delta(content=name) + finish() + DONE)


async def who(worker: RemoteWorker) -> str:
    """The name of the upstream that was asked."""
    return "".join(o.text for o in await said(worker) if isinstance(o, Delta))


def test_the_least_busy_is_asked() -> None:
    held = threading.Event()

    def busy(exchange: Exchange) -> None:
        exchange.send(head() + delta(content="a"))
        held.wait(20)
        exchange.send(finish() + DONE)

    async def check(worker: RemoteWorker, *_: Upstream) -> None:
        first = asyncio.create_task(who(worker))
        while worker.counts()["running"] == 0:
            await asyncio.sleep(0)
        assert [await who(worker) for _ in range(3)] == ["b"] * 3
        held.set()
        assert await first == "a"

    over(check, busy, names("b"))


# fmt: off
FALLS = {
    "no answer":       says(b""),
    "a comment":       says(head() + b": hi\n\n"),
    "a role":          says(head() + delta(role="assistant", content="")),
    "empty deltas":    says(head() + delta(content="") + delta() + event({"choices": []})),
    "an error":        says(head() + event({"error": {"message": "No.", "code": 503}})),
    "500":             says(json_answer({"error": {"message": "No."}}, "500 Internal Server Error")),
    "429":             says(json_answer({}, "429 Too Many Requests")),
}
# fmt: on


@pytest.mark.bug("M06")
@pytest.mark.parametrize("name", FALLS)
def test_until_something_is_said_another_is_asked(name: str) -> None:
    """Elsewhere the first byte, or the role, was the end of all failover."""

    async def check(worker: RemoteWorker, *_: Upstream) -> None:
        assert await who(worker) == "b"
        assert b'"b"' in (await passed(worker, STREAMED)).body

    over(check, FALLS[name], names("b"))


BAD_REQUEST = says(json_answer({"error": {"message": "No."}}, "400 Bad Request"))
STAYS = {"half an answer": (says(head() + delta(content="half")), "error"), "a 400": (BAD_REQUEST, "refused")}


@pytest.mark.bug("M06")
@pytest.mark.parametrize(("answer", "found"), STAYS.values(), ids=STAYS)
def test_no_other_is_asked(answer: Answer, found: str) -> None:
    async def check(worker: RemoteWorker, *_: Upstream) -> None:
        assert await outcome(worker, STREAMED) == found

    _, other = over(check, answer, names("b"))
    assert not other.exchanges


def test_an_upstream_that_answers_no_probe_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Requests that fail do not count. Bug: after three of one client nobody was served for a while."""

    async def check(worker: RemoteWorker, a: Upstream, b: Upstream) -> None:
        for _ in range(upstreams.MAX_FAILURES):
            assert await who(worker) == "b"
        assert worker.counts()["upstreams_down"] == 0
        a.models, models = {}, a.models
        for _ in range(upstreams.MAX_FAILURES):
            await worker.upstreams.probe()
        assert worker.counts()["upstreams_down"] == 1
        assert await who(worker) == "b"
        assert len(a.exchanges) == upstreams.MAX_FAILURES
        a.models, a.answer = models, names("a")
        await worker.upstreams.probe()
        assert await who(worker) == "a"

    caplog.set_level(logging.WARNING, "upstreams")
    over(check, says(b""), names("b"))
    assert (
        "failed 3 times: ValueError: expected a list of models; most servers have it under /v1" in caplog.text
    )


# --- what is asked ------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")]
F: Json = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
G: Json = {"type": "function", "function": {"name": "g", "description": "", "parameters": {"type": "object"}}}
STRICT_F, STRICT_G = (tool | {"function": tool["function"] | {"strict": True}} for tool in (F, G))
SCHEMA = {"name": "n", "schema": {"type": "object"}, "strict": True}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
NAMED = {"type": "function", "function": {"name": "f"}}
LOGPROBS = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
# fmt: off
REQUESTS: list[tuple[Json, Json]] = [
    # more of the Responses request                     more of the chat request
    ({},                                                {}),
    ({"max_output_tokens": 7, "seed": 5, "stop": "x"},  {"max_tokens": 7, "seed": 5, "stop": ["x"]}),
    ({"temperature": 0, "top_p": 0.5, "top_k": 4},      {"temperature": 0, "top_p": 0.5, "top_k": 4}),
    ({"ignore_eos": True, "stop_token_ids": [3]},       {"ignore_eos": True, "stop_token_ids": [3]}),
    ({"reasoning": {"effort": "low"}},
                    {"reasoning_effort": "low",
                     "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"}}),
    ({"tools": TOOLS},                                  {"tools": [F, G], "tool_choice": "auto"}),
    ({"tools": TOOLS, "tool_choice": "none"},           {"tools": [F, G], "tool_choice": "none"}),
    ({"tools": TOOLS, "tool_choice": "required"},       {"tools": [STRICT_F, STRICT_G],
                                                         "tool_choice": "required"}),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}},
                                                        {"tools": [STRICT_F], "tool_choice": NAMED}),
    ({"tools": TOOLS, "tool_choice": ALLOWED},          {"tools": [STRICT_G], "tool_choice": "required"}),
    ({"tools": [TOOLS[0] | {"strict": True}]},          {"tools": [STRICT_F], "tool_choice": "auto"}),
    ({"tools": TOOLS, "parallel_tool_calls": False},
                    {"tools": [F, G], "tool_choice": "auto", "parallel_tool_calls": False}),
    ({"text": {"format": {"type": "json_schema"} | SCHEMA}},
                    {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}),
    ({"text": {"format": {"type": "json_object"}}},     {"response_format": {"type": "json_object"}}),
    (LOGPROBS,                                          {"logprobs": True, "top_logprobs": 2}),
    ({"include": LOGPROBS["include"]},                  {"logprobs": True}),
]
# fmt: on


@pytest.mark.parametrize(("asked", "more"), REQUESTS)
def test_what_is_asked(asked: Json, more: Json) -> None:
    request = params.from_responses({"model": "m", "input": "hi"} | asked, {})
    always = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    always["messages"] = [{"role": "user", "content": "hi"}]
    found = json.loads(json.dumps(remote.chat_body(request, "m")))
    assert found == always | more


# fmt: off
READ_HERE = [
    ({"stream_options": {"include_usage": True}},               "stream_options"),
    ({"stream": False, "stream_options": {}},                   "stream_options"),
    ({"stream": "yes"},                                         "stream"),
    ({"stream": True, "stream_options": 7},                     "stream_options"),
    ({"n": 10**6},                                              "n"),
    ({"tool_choice": "required"},                               "tool_choice"),
]
# fmt: on


@pytest.mark.bug("B09")
@pytest.mark.parametrize(("more", "param"), READ_HERE)
def test_stream_options_turn_nothing_into_a_stream(more: Json, param: str) -> None:
    """A client that wanted JSON got SSE: cocoon, ValidateRequest.cpp. What is read here is checked here."""
    with pytest.raises(BadInput) as caught:
        RemoteWorker(Upstreams([], {}, QUICK)).pass_through(ASK | more)
    assert caught.value.param == param


F_ALONE = {"tools": [F], "tool_choice": "required"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PASSED: list[tuple[Json, Json]] = [
    # more of the chat request                          what else the upstream gets
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, PICTURE]}]}, {}),
    ({"guided_json": {"type": "object"}, "temperature": "hot", "store": True, "what_nobody_knows": [1]}, {}),
    (F_ALONE, {"tools": [STRICT_F]}),  # Bug: nine clients got the arguments "gaben", though a call was forced
]


@pytest.mark.parametrize(("more", "put_right"), PASSED)
def test_what_only_an_upstream_has_passes(more: Json, put_right: Json) -> None:
    async def check(worker: RemoteWorker, _: Upstream) -> None:
        await passed(worker, ASK | more)

    (asked,) = over(check, says(json_answer({"choices": []})))
    assert asked.exchanges[0].body == ASK | more | put_right
