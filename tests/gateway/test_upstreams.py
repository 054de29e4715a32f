"""A server in front of upstreams that refuse, that never end, or that enforce what they are asked to.

The upstream is a raw socket that sends what a test says (helpers/upstream.py), the front is a real server.
"""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx2 as httpx
import pytest

from gateway import upstreams
from gateway.upstreams import Upstreams
from helpers.serving import PATIENCE_S, Json, Server, serve
from helpers.upstream import (
    CHUNKED,
    DONE,
    USED,
    Exchange,
    Upstream,
    chunk,
    delta,
    event,
    finish,
    head,
    json_answer,
    says,
    upstream,
)
from helpers.upstream import Answer as Answers

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
INPUT: Json = {"model": "m", "input": "hi"}
MESSAGES: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ASKED = {RESPONSES: INPUT, CHAT: MESSAGES}
BOTH = pytest.mark.parametrize("path", [RESPONSES, CHAT])
STREAM_OR_NOT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])


@pytest.fixture(scope="module")
def worker() -> Iterator[Upstream]:
    with upstream() as running:
        yield running


@pytest.fixture(scope="module")
def front(worker: Upstream) -> Iterator[Server]:
    with serve("--upstream", worker.url, model=None) as started:
        yield started


def test_a_url_without_its_v1_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: "ValueError: status 404 and no list of models", and the operator looked at the server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(json_answer({"detail": "Not Found"}, "404 Not Found"))
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            pool = Upstreams([f"http://127.0.0.1:{port}/"])
            await pool.probe()
            await pool.close()

    asyncio.run(run())
    assert "; most servers have it under /v1" in caplog.text


# --- refusals -----------------------------------------------------------------------------------------------

BAD = {"message": "No.", "type": "BadRequestError", "param": None}
# fmt: off
FIRST_FRAMES = [
    # the first event of an answer with status 200                                     status, message
    ({"error": BAD | {"code": 400}},                                                   400, "No."),
    ({"error": BAD | {"code": "429"}},                                                 429, "No."),
    ({"error": BAD | {"code": None, "type": "invalid_request_error"}},                 400, "No."),
    ({"object": "error", "message": "No.", "type": "BadRequestError", "code": 400},    400, "No."),
    ({"error": BAD | {"code": 500}},                                                   502, "No."),
    ({"error": "No."},                                                                 502, "No."),
    ({"detail": "No."},                                                                502, "No."),
]
AS_SENT: dict[str, Callable[[Json], bytes]] = {
    "an event":                  lambda error: head() + event(error) + DONE,
    "an event behind a comment": lambda error: head() + b": hi\n\n" + event(error) + DONE,
    "no event":                  lambda error: head() + json.dumps(error).encode(),
    "an object":                 json_answer,
}
# fmt: on


@pytest.mark.bug("M07")
@BOTH
@STREAM_OR_NOT
@pytest.mark.parametrize(("error", "status", "message"), FIRST_FRAMES)
def test_an_error_in_the_first_frame_has_its_status(
    worker: Upstream, front: Server, path: str, stream: bool, error: Json, status: int, message: str
) -> None:
    """Bug: 200, for the response was accepted before the first frame was looked at."""
    for name, sent in AS_SENT.items():
        worker.answer = says(sent(error))
        reply = front.post(path, ASKED[path] | {"stream": stream})
        assert (reply.status, reply.json["error"]["message"]) == (status, message), name


def test_another_is_asked_where_the_first_frame_is_an_error() -> None:
    """And that is no failure of the upstream: a client can make it say so."""
    works = says(head() + delta(content="b") + finish() + DONE)
    overloaded = says(head() + event({"error": BAD | {"code": 503}}))
    with upstream(overloaded) as a, upstream(works) as b:
        with serve("--upstream", a.url, "--upstream", b.url, model=None) as front:
            for _ in range(8):
                assert front.post(RESPONSES, INPUT).json["output"][0]["content"][0]["text"] == "b"
            assert front.health()["upstreams_down"] == 0
        assert len(a.exchanges) > upstreams.MAX_FAILURES


# fmt: off
RETRY_AFTER = [
    ("7",                             "7"),
    ("Fri, 31 Dec 1999 23:59:59 GMT", "Fri, 31 Dec 1999 23:59:59 GMT"),
    ("\u20ac",                        "10"),  # our own
    ("soon",                          "10"),
]
# fmt: on


@pytest.mark.parametrize(("theirs", "ours"), RETRY_AFTER)
def test_retry_after_is_seconds_or_a_date(worker: Upstream, front: Server, theirs: str, ours: str) -> None:
    """Bug: 500, for a header cannot hold a euro."""
    status = b"HTTP/1.1 429 Too Many\r\nRetry-After: " + theirs.encode() + b"\r\nContent-Length: 0\r\n\r\n"
    worker.answer = says(status)
    reply = front.post(CHAT, MESSAGES)
    assert (reply.status, reply.headers["retry-after"]) == (429, ours)


# --- what is asked ------------------------------------------------------------------------------------------


# fmt: off
FAULTS: list[tuple[Json, str]] = [
    ({"messages": []},                                                         "messages"),
    ({"messages": "hi"},                                                       "messages"),
    ({"messages": [{"role": "robot", "content": "hi"}]},                       "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]},                           "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},         "messages[0].content[0].type"),
    ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "42"}]},   "messages[0].tool_call_id"),
    ({"temperature": 9},                                                       "temperature"),
    ({"n": 10**6},                                                             "n"),
    ({"tool_choice": "required"},                                              "tool_choice"),
    ({"response_format": {"type": "xml"}},                                     "response_format.type"),
]
# fmt: on


@pytest.mark.parametrize(("more", "param"), FAULTS)
def test_chat_is_checked_before_it_is_passed_on(
    worker: Upstream, front: Server, more: Json, param: str
) -> None:
    """Bug: the leniency and the names of vLLM reached the client, as `body.messages`."""
    worker.answer = says(json_answer({"choices": []}))
    n_asked = len(worker.exchanges)
    reply = front.post(CHAT, MESSAGES | more)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert len(worker.exchanges) == n_asked


def test_the_functions_of_a_forced_call_are_strict_in_chat_too(worker: Upstream, front: Server) -> None:
    """Bug: nine clients got the arguments "gaben", a JSON string, though the call was forced."""
    worker.answer = says(json_answer({"choices": []}))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    front.post(CHAT, MESSAGES | {"tools": [tool], "tool_choice": "required"})
    assert worker.exchanges[-1].body["tools"][0]["function"]["strict"] is True


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PASSED: list[Json] = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, PICTURE]}]},
    {"guided_json": {"type": "object"}, "min_tokens": 3, "structured_outputs": {"regex": "a"}},
    {"response_format": {"type": "structural_tag", "format": {}}},
    {"modalities": ["text", "audio"], "audio": {"voice": "alloy"}, "store": True, "web_search_options": {}},
    {"add_generation_prompt": False, "continue_final_message": True, "what_nobody_knows": [1]},
]


@pytest.mark.parametrize("more", PASSED)
def test_what_only_an_upstream_has_passes(worker: Upstream, front: Server, more: Json) -> None:
    worker.answer = says(json_answer({"choices": []}))
    assert front.post(CHAT, MESSAGES | more).status == 200
    assert worker.exchanges[-1].body == MESSAGES | more


# --- tokens counted -----------------------------------------------------------------------------------------

COUNTED: Json = INPUT | {"instructions": "Be brief.", "tools": [{"type": "function", "name": "f"}]}


def vllm(exchange: Exchange) -> None:
    n_tokens = len(exchange.body["messages"]) + len(exchange.body["tools"])
    exchange.send(json_answer({"count": n_tokens, "max_model_len": 9, "tokens": [5] * n_tokens}))


def llama_cpp(exchange: Exchange) -> None:
    if exchange.path == "/tokenize":  # it takes no messages, and says so by an empty list
        exchange.send(json_answer({"tokens": []}))
        return
    assert exchange.path == "/v1/chat/completions/input_tokens"
    n_tokens = 10 * len(exchange.body["messages"])
    exchange.send(json_answer({"input_tokens": n_tokens, "object": "response.input_tokens"}))


# fmt: off
COUNTS = [
    # the upstream's answer                                          status, tokens or message
    (vllm,                                                           200, 3),
    (llama_cpp,                                                      200, 20),
    (says(json_answer({"detail": "Not Found"}, "404 Not Found")),    400, "it has no /tokenize and no"),
    (says(json_answer({"error": {"message": "No."}}, "400 Bad")),    400, "No."),
    (says(b""),                                                      502, "gave no answer"),
]
# fmt: on


@pytest.mark.parametrize(("answer", "status", "expected"), COUNTS)
def test_the_upstream_counts_tokens(
    worker: Upstream, front: Server, answer: Answers, status: int, expected: int | str
) -> None:
    worker.answer = answer
    reply = front.post(RESPONSES + "/input_tokens", COUNTED)
    assert reply.status == status
    if isinstance(expected, int):
        assert reply.json == {"object": "response.input_tokens", "input_tokens": expected}
    else:
        assert expected in reply.json["error"]["message"]


# --- what never ends, or never fits -------------------------------------------------------------------------


FOR_EVER_S = 6 * upstreams.GRACE_S  # long enough to see that nobody has ended it


def for_ever(exchange: Exchange, data: bytes, pause_s: float) -> None:
    """Until the other side has gone, which raises OSError."""
    ends_at = time.monotonic() + FOR_EVER_S
    while time.monotonic() < ends_at:
        exchange.send(data)
        time.sleep(pause_s)


SAYS_HI = delta(role="assistant", content="") + delta(content="Hi")
A_CALL = delta(
    tool_calls=[{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
)
BOOM = event({"error": {"message": "boom", "type": "server_error", "code": "x"}})


class Held:
    """An upstream that says something, and then neither ends its answer nor, perhaps, is silent."""

    def __init__(self, said: bytes, transfer: str = "", pings: bool = False) -> None:
        self.was_left = threading.Event()  # the front has closed the connection
        self._said = said
        self._transfer = transfer
        self._pings = pings

    def __call__(self, exchange: Exchange) -> None:
        if self._transfer:
            exchange.send(head("text/event-stream", "200 OK", CHUNKED) + chunk(self._said))
        else:
            exchange.send(head() + self._said)
        try:
            if self._pings:
                for_ever(exchange, chunk(b": ping\n\n") if self._transfer else b": ping\n\n", pause_s=0.5)
            elif exchange.wait_closed():
                self.was_left.set()
        except ConnectionError:
            self.was_left.set()


@pytest.mark.bug("M01")
@BOTH
@pytest.mark.parametrize("transfer", ["", CHUNKED], ids=["close-delimited", "chunked"])
def test_an_error_ends_the_answer(worker: Upstream, front: Server, path: str, transfer: str) -> None:
    """Elsewhere: keep-alives for as long as the upstream held its connection."""
    held = Held(SAYS_HI + BOOM, transfer)
    worker.answer = held
    body = front.post(path, ASKED[path] | {"stream": True}).body
    assert held.was_left.wait(PATIENCE_S), "the upstream was not left"
    assert body.count(b'"message":"boom"') == 1
    assert body.endswith(DONE)


# fmt: off
FINISHED = {
    #              said                                      the silence after it has pings?
    "text, pings": (SAYS_HI + finish(),                      True),
    "usage":       (SAYS_HI + finish() + USED,               False),
    "a call":      (A_CALL + finish("tool_calls"),           False),
}
# fmt: on


@pytest.mark.bug("M02")
@BOTH
@pytest.mark.parametrize("name", FINISHED)
def test_after_its_end_an_answer_has_seconds(worker: Upstream, front: Server, path: str, name: str) -> None:
    """Elsewhere the client waited for [DONE] for as long as the upstream liked."""
    said, pings = FINISHED[name]
    held = Held(said, CHUNKED, pings)
    worker.answer = held
    asked = ASKED[path] | {"stream": True}
    if path == CHAT:
        asked |= {"stream_options": {"include_usage": True}}
    body = front.post(path, asked).body
    assert held.was_left.wait(PATIENCE_S), "the upstream was not left"
    assert b'"error":{' not in body
    assert body.endswith(DONE)
    if path == RESPONSES:
        assert b"event: response.completed" in body
    assert (b'put_tokens":14' in body or b'"prompt_tokens":14' in body) == (name == "usage")


@pytest.mark.bug("M03")
@BOTH
@STREAM_OR_NOT
def test_a_refusal_does_not_wait_for_its_body(
    worker: Upstream, front: Server, path: str, stream: bool
) -> None:
    """Elsewhere: 28 s, then 200 and a failure, for the rest of the body never came."""
    was_left = threading.Event()

    def answer(exchange: Exchange) -> None:
        headers = ("Retry-After: 7", "Content-Length: 500")
        exchange.send(head("application/json", "429 Too Many", *headers) + b'{"error": {"message": "Wait')
        if exchange.wait_closed():
            was_left.set()

    worker.answer = answer
    reply = front.post(path, ASKED[path] | {"stream": stream})
    assert was_left.wait(PATIENCE_S), "the upstream was not left"
    assert (reply.status, reply.headers["retry-after"]) == (429, "7")


def test_gzip_is_unpacked_piece_by_piece() -> None:
    """Bug: 64 KiB were unpacked to 64 MiB in one go."""
    data = b"x" * 2**22 + b"y"

    async def packed() -> AsyncIterator[bytes]:
        whole = gzip.compress(data)
        for start in range(0, len(whole), 1000):
            yield whole[start : start + 1000]

    async def run() -> list[bytes]:
        response = httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=packed())
        return [piece async for piece in upstreams.unpacked(response)]

    found = asyncio.run(run())
    assert b"".join(found) == data
    assert max(map(len, found)) == upstreams.MAX_PIECE_BYTES
