"""Upstreams, raw sockets that send what a test says: what passes, what becomes of an answer that breaks, and
which of them is asked. The bugs of other relays are replays; here: their laws, and what needs a connection.
"""

import asyncio
import gzip
import json
import logging
import threading
import time
from collections import ChainMap, Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.types import Message

import blocks
from channels import Accepted, Call, Finish, Output
from gateway import refused, remote, upstreams
from gateway.answers import Answer as Reader
from gateway.answers import Asked
from gateway.metering import Meter
from gateway.outputs import Outputs
from gateway.refused import Refused
from gateway.relay import frames_of
from gateway.remote import RemoteWorker
from gateway.upstreams import Timeouts
from helpers.asked import events_in
from helpers.limits import PATIENCE_S
from helpers.serving import Json
from helpers.tables import table
from helpers.upstream import (
    CHUNKED,
    DONE,
    FRAMES,
    SAYS_STREAM,
    STREAM,
    USAGE,
    USED,
    Answer,
    Exchange,
    Upstream,
    delta,
    event,
    finish,
    hangs,
    head,
    json_answer,
    says,
    says_and_hangs,
    upstream,
)
from request import params
from request.refusals import BadInput
from responses import Builder

TABLE = table("relay")
ASK: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
FOR_EVER_S = 6 * upstreams.GRACE_S  # long enough to see that the front does not end it
STREAMED: Json = ASK | {"stream": True}
QUICK = Timeouts(connect_s=5, first_byte_s=10, idle_s=10)


@pytest.mark.bug("B02")
@pytest.mark.parametrize("line_end", [b"\n", b"\r", b"\r\n"])
def test_every_frame_leaves_before_the_next_comes(line_end: bytes) -> None:
    """Elsewhere all of it left at the end: cocoon, CountTokens.cpp. And a CR must not wait for an LF."""
    reader = Reader(Meter(), Asked(shows_usage=True))
    *others, end, used, _ = FRAMES
    for frame in others:
        assert frames_of(reader.feed(frame.replace(b"\n", line_end))) == frame
    assert reader.feed(end + used + DONE) == []  # more might come
    assert frames_of(reader.close()) == end + used


@pytest.mark.bug("B13")
def test_upstream_dies_at_every_byte() -> None:
    """Elsewhere: 200, half an answer, no error, no [DONE]. https://github.com/open-webui/open-webui/issues/29628"""
    all_said = [json.loads(frame[6:]) for frame in FRAMES[:-2]]
    finished = len(b"".join(FRAMES[:-2])) - 2  # bytes until all is said; usage and [DONE] may be missing
    for n in range(len(STREAM) + 1):
        reader = Reader(Meter(), Asked())
        chunks = reader.feed(STREAM[:n]) + reader.close()
        complete = [chunk for chunk in chunks if "error" not in chunk]
        outputs = Outputs(reader, n_top_logprobs=20)
        outputs.read(chunks)
        end: Any = outputs.close(None)[-1]
        assert (end.reason == "failed") == (n < finished)
        assert chunks[: len(complete)] == all_said[: len(complete)]
        errors = [chunk["error"]["code"] for chunk in chunks[len(complete) :]]
        assert errors == ["server_error"] * (n < finished)
        assert n < finished or complete == all_said


# --- errors of upstreams ------------------------------------------------------------------------------------

NO: Json = {"message": "No."}
ERRORS = [
    *TABLE["errors"],
    (503, None, 503, "", "", "The upstream answered with status 503."),
    (400, {"message": "x" * 50_000, "param": 7}, 400, "", "", "xxx"),
]


@pytest.mark.parametrize("row", ERRORS, ids=lambda row: f"{row[0]}-{row[1]}"[:50])
def test_refusals(row: tuple[Any, ...]) -> None:
    status, error, *ours, message = row
    found = refused.read_refused(status, {}, json.dumps({"error": error}).encode())
    assert [found.status, found.param or "", found.code] == ours
    assert found.message.startswith(message)
    assert len(found.message) < 2000


@pytest.mark.bug("M07")
@pytest.mark.parametrize(("error", "status"), TABLE["first_frames"])
def test_an_error_in_the_first_frame_has_its_status(error: Json, status: int) -> None:
    """Bug: 200, for the response was accepted before the first frame was looked at."""
    for sent in (b": hi\n\n" + event(error) + DONE, json.dumps(error).encode()):
        reader = Reader(Meter(), Asked())
        *_, chunk = reader.feed(sent) + reader.close()
        found = refused.refused_by(200, chunk["error"])
        assert (found.status, found.message) == (status, "No.")


@pytest.mark.bug("P08")
def test_retry_after_is_seconds_or_a_date() -> None:
    """Bug: 500, for a header cannot hold a euro."""
    date = "Fri, 27 Nov 2026 10:00:00 GMT"
    for theirs, ours in (("7", "7"), ("1.5", "2"), (date, date), ("\u20ac", ""), ("soon", "")):
        assert refused.read_refused(429, {"retry-after": theirs}, b"").headers.get("Retry-After", "") == ours


async def test_an_upstream_names_what_the_client_has_sent() -> None:
    """Bug: a parameter of the other API was named, which no client had sent."""
    theirs = "response_format.json_schema.schema.type"
    answer = says(json_answer({"error": NO | {"param": theirs}}, "400 Bad Request"))
    async with over(answer) as (worker, _):
        for asked, param in ((said(worker), "text.format"), (passed(worker, ASK), theirs)):
            with pytest.raises(Refused) as caught:
                await asked
            assert caught.value.param == param


def refuses(*messages: str) -> list[Answer]:
    return [says(json_answer({"error": NO | {"message": each}}, "400 Bad Request")) for each in messages]


SYSTEMS = [{"role": role, "content": role[0]} for role in ("system", "developer", "user")]
NEWER = "Use 'max_completion_tokens' instead.", {"max_tokens": 3}, {"max_completion_tokens": 3}
ONE = {"messages": [{"role": "system", "content": "s\n\nd"}, SYSTEMS[2]]}
FIRST = "System message must be at the beginning", {"messages": SYSTEMS}, ONE


@pytest.mark.bug("P04")
@pytest.mark.bug("P05")
@pytest.mark.parametrize("mended", [[NEWER], [FIRST], [NEWER, FIRST]])
async def test_what_an_upstream_refuses_is_asked_once_more(mended: list[tuple[str, Json, Json]]) -> None:
    """Once for each thing, as that upstream spells it. Bug: an upstream that wants both refused for ever."""
    messages, more, then = zip(*mended, strict=True)
    body = dict(ChainMap(*more, ASK))
    answers = [SAYS_STREAM, *reversed(refuses(*messages))]
    async with over(lambda exchange: answers.pop()(exchange)) as (worker, (asked,)):
        await passed(worker, body)
    kept = {name: value for name, value in body.items() if name != "max_tokens"}
    assert asked.exchanges[-1].body == dict(ChainMap(*then, kept))
    async with over(*refuses(" ".join(messages))) as (worker, (asked,)):
        with pytest.raises(Refused):
            await passed(worker, body)
        assert len(asked.exchanges) == 1 + len(mended)


@pytest.mark.bug("P03")
async def test_reasoning_goes_back_by_both_names() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []}
    items = [{"role": "user", "content": "a"}, thought, {"role": "assistant", "content": "b"}]
    async with over(SAYS_STREAM) as (worker, (asked,)):
        await said(worker, input=[*items, items[0]])
    turn = asked.exchanges[0].body["messages"][1]
    assert (turn["reasoning"], turn["reasoning_content"]) == ("Hm.", "Hm.")


SIGNED = {"google": {"thought_signature": "sig"}}
FUNCTION = {"name": "f", "arguments": "{}"}
SIGNED_CALL = {"index": 0, "id": "c", "function": FUNCTION, "extra_content": SIGNED}


@pytest.mark.bug("P07")
async def test_a_call_goes_back_with_its_thought_signature() -> None:
    """Over both APIs that know items of their own: Gemini answered the next turn with 400."""
    answer = says(head() + delta(tool_calls=[SIGNED_CALL]) + finish() + DONE)
    async with over(answer) as (worker, _):
        (call,) = [output for output in await said(worker, tools=TOOLS) if isinstance(output, Call)]
    builder = Builder({"id": "resp_1", "output": []}, lambda prefix: prefix, lambda *_: "")
    builder.start()
    (*_, added) = builder.feed(call)
    done = added["item"] | {"arguments": "{}", "status": "completed"}
    output = {"type": "function_call_output", "call_id": done["call_id"], "output": "1"}
    message = blocks.Builder({}, lambda prefix: prefix, lambda *_: "")
    (_, started) = [*message.feed(0, Accepted(1)), *message.feed(0, call)]
    use = started["content_block"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "1"}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    for request in (
        params.from_responses({"model": "m", "input": [*ASK["messages"], done, output]}, {}),
        params.from_messages(ASK | {"max_tokens": 1, "messages": [*ASK["messages"], *turns]}, {}),
    ):
        assert remote.chat_body(request, "m")["messages"][1]["tool_calls"][0]["extra_content"] == SIGNED


@pytest.mark.bug("P07")
async def test_an_error_in_a_list_is_read() -> None:
    """As Gemini writes it: its message never reached the client."""
    for status in ("400 Bad Request", "200 OK"):
        async with over(says(json_answer([{"error": NO}], status))) as (worker, _):
            with pytest.raises(Refused, match=NO["message"]):
                await said(worker)


async def test_a_count_of_the_prompt_that_comes_early_is_told_at_once() -> None:
    """Claude Code showed an empty context: https://github.com/sgl-project/sglang/issues/20678."""
    begun = event({"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": USAGE})
    async with over(says(head() + begun + finish() + DONE)) as (worker, _):
        assert (await said(worker))[0].input_tokens == USAGE["prompt_tokens"]


async def test_the_warning_of_an_upstream_is_passed_on() -> None:
    """Bug: behind a front nobody was told what had no effect; chat alone passed it on."""
    theirs = '299 - "accepted, and without any effect here: top_k"'
    answer = says(head("text/event-stream", "200 OK", f"Warning: {theirs}") + STREAM)
    async with over(answer) as (worker, _):
        prompt = await worker.prepare(params.from_responses({"model": "m", "input": "hi"}, {}))
        prompt.headers["Warning"] = "ours"
        await prompt.run(lambda _: None)
    assert prompt.headers == {"Warning": f"ours, {theirs}"}


# --- one request, in this process ---------------------------------------------------------------------------


@asynccontextmanager
async def over(
    *answers: Answer, timeouts: Timeouts = QUICK
) -> AsyncIterator[tuple[RemoteWorker, list[Upstream]]]:
    """A worker over upstreams that answer so, and these upstreams."""
    with ExitStack() as stack:
        running = [stack.enter_context(upstream(answer)) for answer in answers]
        urls = [each.url for each in running]
        worker = RemoteWorker(urls, dict.fromkeys(urls, "key"), timeouts, 2)
        try:
            await worker.probe()
            async with asyncio.timeout(20):
                yield worker, running
            await asyncio.sleep(0)
            assert worker.counts()["running"] == 0
        finally:
            await worker.close()


class Client:
    """What a client has got, and whether it is still there."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.is_gone = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def nothing(*_: Any) -> None:
    """What is done when something has come, unless a test says otherwise."""


async def passed(worker: RemoteWorker, body: Json, on_body: Callable[[Client], None] = nothing) -> Client:
    """A chat request passed through; raises Refused."""
    client = Client()

    async def receive() -> Message:
        await client.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        client.sent.append(message)
        if client.body:
            on_body(client)

    await worker.pass_through(body)({"type": "http"}, receive, send)
    return client


async def said(worker: RemoteWorker, on_output: Callable[[], None] = nothing, **body: Any) -> list[Any]:
    """What the worker says of a Responses request; raises Refused."""
    request = params.from_responses({"model": "m", "input": "hi"} | body, {})
    outputs: list[Accepted | Output | Finish] = []

    def emit(said: Any) -> None:
        for output in said:
            outputs.append(output)
            on_output()

    await (await worker.prepare(request)).run(emit)
    return outputs


# --- chaos --------------------------------------------------------------------------------------------------

CHUNKED_HEAD, LONGER = (head("text/event-stream", "200 OK", how) for how in (CHUNKED, "Content-Length: 300"))


def reset(exchange: Exchange) -> None:
    exchange.send(head() + STREAM[:300])
    exchange.reset()


def for_ever(sent: bytes) -> Answer:
    """This, then comments, until the other side has gone, which raises OSError."""

    def answer(exchange: Exchange) -> None:
        exchange.send(sent)
        ends_at = time.monotonic() + FOR_EVER_S
        while time.monotonic() < ends_at:
            exchange.send(b": ping\n\n")
            time.sleep(0.02)

    return answer


SAYS_HI = delta(role="assistant", content="") + delta(content="Hi")
NAMELESS = delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])
NONSENSE = event({"choices": [{"delta": {"content": 7, "tool_calls": 5}}, 3]})
OOPS = delta(content="x")[:-6] + b"\n\n"
EMPTY = delta(role="assistant", content="") + delta() + event({"choices": []})
# what becomes of an answer: streamed, plain, as a response; the answer; what the front has patience for
WHOLE, BROKEN, REFUSED = ["whole", "whole", "stop"], ["error", "502", "failed"], ["502"] * 3
LATE = ["504"] * 3
CHAOS: dict[str, tuple[Any, ...]] = {
    "more after [DONE]":  (WHOLE,   says(head() + STREAM + DONE + b"\x00\xff" * 9)),
    "wrong chunk size":   (WHOLE,   says(CHUNKED_HEAD + b"fff\r\n" + STREAM[:-9])),
    "half an answer":     (BROKEN,  says(head() + delta(content="half"))),
    "too short":          (BROKEN,  says(LONGER + STREAM)),
    "reset":              (BROKEN,  reset),
    "call without name":  (BROKEN,  says(head() + NAMELESS + DONE)),
    "silence":            (BROKEN,  says_and_hangs(head() + FRAMES[1]), QUICK._replace(idle_s=0.05)),
    "never ends":         (BROKEN,  for_ever(head() + FRAMES[1]), QUICK._replace(answer_s=0.3)),
    "never begins":       (LATE,    for_ever(head()), QUICK._replace(first_byte_s=0.3)),
    "no byte":            (LATE,    hangs, QUICK._replace(first_byte_s=0.05)),
    "no answer":          (REFUSED, says(b"")),
    "no text":            (REFUSED, says(head() + b": hi\n\n" + EMPTY)),
    "packed":             (REFUSED, says(head() + gzip.compress(STREAM))),
    "packed as said":     (WHOLE, says(head("", "200 OK", "Content-Encoding: gzip") + gzip.compress(STREAM))),
    "garbage":            (REFUSED, says(head() + bytes(range(256)) * 99)),
    "unreadable frame":   (REFUSED, says(head() + OOPS + finish() + DONE)),
    "HTML":               (REFUSED, says(head("text/html") + b"<html>")),
    "an array":           (REFUSED, says(head("application/json") + b"[1]")),
    "nonsense":           (REFUSED, says(head() + NONSENSE + DONE)),
    "no HTTP":            (REFUSED, says(b"\x00\xff garbage \r\n\r\n" * 9)),
    "an error":           (["503"] * 3, says(head() + event({"error": NO | {"code": 503}}))),
    "500":                (REFUSED, says(json_answer({"error": NO}, "500 Internal Server Error"))),
    "429":                (["429"] * 3, says(json_answer({}, "429 Too Many Requests"))),
    "400":                (["400"] * 3, says(json_answer({"error": NO}, "400 Bad Request"))),
}  # fmt: skip


@pytest.mark.bug("B18", "P08")
@pytest.mark.parametrize("name", CHAOS)
async def test_chaos(name: str) -> None:
    """Whatever comes: an answer or an error, in time, and the books are kept."""
    expected, answer, timeouts = (*CHAOS[name], QUICK)[:3]
    async with over(answer, timeouts=timeouts) as (worker, _):
        assert await outcomes(worker) == expected
        done, failed, left = (worker.totals[f"relayed_{end}"] for end in ("done", "error", "disconnect"))
        assert (done + failed, left) == (3, 0)


@pytest.mark.bug("M06")
@pytest.mark.parametrize("name", [name for name, row in CHAOS.items() if len(row) == 2])
async def test_until_something_is_said_another_is_asked(name: str) -> None:
    """Elsewhere the first byte, or the role, was the end of all failover."""
    expected, answer = CHAOS[name]
    is_asked = expected[0].isdigit() and name != "400"  # that is the request's fault
    async with over(answer, says(head() + STREAM)) as (worker, (_, other)):
        assert await outcomes(worker) == (WHOLE if is_asked else expected)
    assert len(other.exchanges) == 3 * is_asked


async def outcome(worker: RemoteWorker, body: Json) -> str:
    """What becomes of a chat request, or of a Responses request that is empty: its end, or a status."""
    try:
        if not body:
            return str((await said(worker))[-1].reason)
        client = await passed(worker, body)
    except Refused as refusal:
        return str(refusal.status)
    frames = events_in(client.body) if body.get("stream") else [json.loads(client.body)]
    return "error" if "error" in frames[-1] else "whole"


async def outcomes(worker: RemoteWorker) -> list[str]:
    return [await outcome(worker, body) for body in (STREAMED, ASK, {})]


BOOM = event({"error": {"message": "boom", "type": "server_error", "code": "x"}})
TOO_MANY = head("application/json", "429 Too Many", "Retry-After: 7", "Content-Length: 500") + b'{"error": {'
LEFT: dict[str, tuple[Answer, list[Any]]] = {
    # sent, and then nothing more, or comments                          what is told of it
    "an error":  (for_ever(head() + SAYS_HI + BOOM),                    ["boom", False]),
    "the end":   (for_ever(head() + SAYS_HI + finish()),                ["", False]),
    "usage":     (says(head() + SAYS_HI + finish() + USED),    ["", True]),
    "a refusal": (says(TOO_MANY),                                       [429, "7"]),
}  # fmt: skip


@pytest.mark.bug("M01", "M02", "M03")
@pytest.mark.parametrize("name", LEFT)
async def test_who_has_no_more_to_say_is_left_within_seconds(name: str) -> None:
    """Elsewhere the client waited for [DONE], or the rest of a refusal, for as long as the upstream liked."""
    answer, expected = LEFT[name]
    n_left = threading.Semaphore(0)

    def held(exchange: Exchange) -> None:
        with suppress(ConnectionError):
            answer(exchange)
            if not exchange.wait_closed():
                return
        n_left.release()

    async with over(held) as (worker, _):
        chat = passed(worker, STREAMED | {"stream_options": {"include_usage": True}})
        found = await asyncio.gather(chat, said(worker), return_exceptions=True)
        assert [told(each) for each in found] == [expected] * 2
        for _each in found:
            assert await asyncio.to_thread(n_left.acquire, timeout=FOR_EVER_S), "the upstream was not left"


def told(found: Any) -> list[Any]:
    if isinstance(found, Refused):
        return [found.status, found.headers.get("Retry-After", "")]
    if isinstance(found, Client):
        last = events_in(found.body)[-1]
        return [last.get("error", {}).get("message", ""), "usage" in last]
    return [found[-1].message, found[-1].usage is not None]


async def test_a_refusal_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of a stream does not wait for a long prompt: an error is told in band. Bug: a client that
    wants no stream got 200 without Retry-After too.
    """
    monkeypatch.setattr("gateway.relay.ACCEPT_S", 0.01)
    monkeypatch.setattr("streaming.KEEP_ALIVE_S", 0.01)  # the first body that is heard is a comment
    heard = threading.Event()
    is_plain = True

    def answer(exchange: Exchange) -> None:
        heard.wait(0.2 if is_plain else PATIENCE_S)
        exchange.send(json_answer({"error": NO}, "429 Too Many", "Retry-After: 7"))

    async with over(answer) as (worker, _):
        for asked in (passed(worker, ASK), said(worker)):
            with pytest.raises(Refused) as caught:
                await asked
            assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "7"})
        is_plain = False
        client = await passed(worker, STREAMED, lambda client: heard.set())
        (error,) = events_in(client.body)
        assert (client.sent[0]["status"], error["error"]["message"]) == (200, "No.")
        heard.clear()
        with pytest.raises(Refused, match="No"):
            await said(worker, stream=True, on_output=heard.set)  # refused after its Accepted


async def test_a_read_of_many_events_takes_many_turns() -> None:
    """Bug: the events of one read were one turn of the event loop, those before the first text another."""
    n_turns = 0

    async def count_turns() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await asyncio.sleep(0)

    writes: list[tuple[int, int]] = []  # the turn of each, and its events

    def on_body(client: Client) -> None:
        writes.append((n_turns, client.sent[-1]["body"].count(b"data: {")))

    says_nothing = b"data:{}\n\n" * 5000
    async with over(says(head() + says_nothing + STREAM)) as (worker, _):
        counting = asyncio.create_task(count_turns())
        client = await passed(worker, STREAMED, on_body)
        counting.cancel()
    assert events_in(client.body)[5000:] == events_in(STREAM.replace(USED, b""))
    assert max(n_events for _, n_events in writes) < 1300
    turns = Counter(turn for turn, n_events in writes if n_events)
    assert max(turns.values()) <= 2  # the last two at the end


@pytest.mark.bug("I06")
async def test_a_slow_client_slows_its_upstream_down() -> None:
    """Nothing is read ahead: what the upstream has sent is bounded by the sockets' buffers."""
    n_sent = 0
    frame = delta(content="x" * 60_000)

    def answer(exchange: Exchange) -> None:
        nonlocal n_sent
        exchange.send(head())
        for _ in range(1000):  # 60 MB
            exchange.send(frame)
            n_sent += len(frame)

    async def never(message: Message | None = None) -> Any:
        if message is None or message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async with over(answer) as (worker, _):
        working = asyncio.create_task(worker.pass_through(STREAMED)({}, never, never))
        before = -1
        while before != n_sent or n_sent == 0:  # until it stands still
            before = n_sent
            await asyncio.sleep(0.1)
        assert n_sent < 20_000_000
        working.cancel()
        await asyncio.wait({working})


@pytest.mark.bug("B12", "I03")
@pytest.mark.parametrize("how", ["done", "error", "disconnect"])
async def test_usage_is_settled_once_on_every_path(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Elsewhere before the stream ran, so as zero: https://github.com/api7/aisix/issues/108"""
    used = event({"choices": [{"index": 0, "delta": {"content": "hi"}}], "usage": USAGE})
    ended = threading.Event()

    def leave(client: Client) -> None:
        client.is_gone.set()

    def answer(exchange: Exchange) -> None:
        exchange.send(head() + used + (finish() + DONE if how == "done" else b""))
        if how != "disconnect" or exchange.wait_closed():
            ended.set()

    caplog.set_level(logging.INFO, "remote")
    async with over(answer) as (worker, _):
        await passed(worker, STREAMED, leave if how == "disconnect" else nothing)
        assert [worker.totals[f"relayed_{name}"] for name in (how, "cost", "usage_unknown")] == [1, 42, 0]
        assert await asyncio.to_thread(ended.wait, 20), "the upstream runs on for no one"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "remote"]
    assert line.endswith(f": {how}, usage: prompt=11 cached=3 completion=7 reasoning=0 total=21 cost=42")


async def test_the_least_busy_is_asked() -> None:
    async with over(hangs, says(head() + STREAM)) as (worker, (a, b)):
        first = asyncio.create_task(said(worker))
        while not a.exchanges:
            await asyncio.sleep(0.01)
        for _ in range(3):
            await said(worker)
        assert (len(a.exchanges), len(b.exchanges)) == (1, 3)
        first.cancel()
        await asyncio.wait({first})


async def test_an_upstream_that_answers_no_probe_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Requests that fail do not count. Bug: after three of one client nobody was served for a while."""
    caplog.set_level(logging.WARNING, "upstreams")
    async with over(says(b""), says(head() + STREAM)) as (worker, (a, _)):
        for _ in range(upstreams.MAX_FAILURES):
            await said(worker)
        assert worker.counts()["upstreams_down"] == 0
        a.models, models = {}, a.models
        for _ in range(upstreams.MAX_FAILURES):
            await worker.probe()
        assert worker.counts()["upstreams_down"] == 1
        await said(worker)
        assert len(a.exchanges) == upstreams.MAX_FAILURES
        a.models = models
        await worker.probe()
        await said(worker)
        assert len(a.exchanges) == upstreams.MAX_FAILURES + 1
    expected = "failed 3 times: ValueError: expected a list of models; most servers have it under /v1"
    assert expected in caplog.text


# --- what is asked ------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")]


@pytest.mark.parametrize(("asked", "more"), TABLE["requests"])
def test_what_is_asked(asked: Json, more: Json) -> None:
    request = params.from_responses({"model": "m", "input": "hi"} | asked, {})
    always = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    always["messages"] = [{"role": "user", "content": "hi"}]
    found = json.loads(json.dumps(remote.chat_body(request, "m")))
    assert found == always | more


@pytest.mark.bug("B09")
@pytest.mark.parametrize(("more", "param"), TABLE["read_here"])
def test_stream_options_turn_nothing_into_a_stream(more: Json, param: str) -> None:
    """A client that wanted JSON got SSE: cocoon, ValidateRequest.cpp. What is read here is checked here."""
    with pytest.raises(BadInput) as caught:
        RemoteWorker([], {}, QUICK, None).pass_through(ASK | more)
    assert caught.value.param == param


@pytest.mark.parametrize("more", TABLE["passed"])
async def test_what_only_an_upstream_has_passes(more: Json) -> None:
    async with over(SAYS_STREAM) as (worker, (asked,)):
        await passed(worker, ASK | more)
    assert asked.exchanges[0].body == ASK | more
