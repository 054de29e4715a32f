"""A server in front of upstreams that refuse, that never end, or that enforce what they are asked to.

The upstream is a raw socket (helpers/upstream.py), the front is a real server.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gateway import upstreams
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
)  # fmt: skip

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


# --- refusals -----------------------------------------------------------------------------------------------

BAD = {"message": "No.", "type": "BadRequestError", "param": None}
# fmt: off
FIRST_FRAMES = [
    # the first event of an answer with status 200                                     status
    ({"error": BAD | {"code": 400}},                                                   400),
    ({"error": BAD | {"code": "429"}},                                                 429),
    ({"object": "error", "message": "No.", "type": "BadRequestError", "code": 400},    400),
    ({"error": BAD | {"code": 500}},                                                   502),
    ({"error": "No."},                                                                 502),
    ({"detail": "No."},                                                                502),
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
@pytest.mark.parametrize(("error", "status"), FIRST_FRAMES)
def test_an_error_in_the_first_frame_has_its_status(
    worker: Upstream, front: Server, path: str, stream: bool, error: Json, status: int
) -> None:
    """Bug: 200, for the response was accepted before the first frame was looked at."""
    for name, sent in AS_SENT.items():
        worker.answer = says(sent(error))
        reply = front.post(path, ASKED[path] | {"stream": stream})
        assert (reply.status, reply.json["error"]["message"]) == (status, "No."), name


@pytest.mark.parametrize(("theirs", "ours"), [("7", "7"), ("\u20ac", "10"), ("soon", "10")])
def test_retry_after_is_seconds(worker: Upstream, front: Server, theirs: str, ours: str) -> None:
    """Bug: 500, for a header cannot hold a euro."""
    worker.answer = says(f"HTTP/1.1 429 No\r\nRetry-After: {theirs}\r\nContent-Length: 0\r\n\r\n".encode())
    reply = front.post(CHAT, MESSAGES)
    assert (reply.status, reply.headers["retry-after"]) == (429, ours)


def test_a_packed_answer_is_refused(worker: Upstream, front: Server) -> None:
    worker.answer = says(head("text/event-stream", "200 OK", "Content-Encoding: gzip") + b"\x1f\x8b")
    reply = front.post(CHAT, MESSAGES)
    assert reply.status == 502
    assert "packs its answers (gzip)" in reply.json["error"]["message"]


def test_tokens_are_not_counted_here(front: Server) -> None:
    reply = front.post(RESPONSES + "/input_tokens", INPUT)
    assert reply.status == 501
    assert reply.json["error"].keys() == {"message", "type", "param", "code"}


# --- what is asked ------------------------------------------------------------------------------------------


# fmt: off
FAULTS: list[tuple[Json, str]] = [
    # more of a request                       param: what the relay itself acts on
    ({"n": 10**6},                            "n"),
    ({"tool_choice": "required"},             "tool_choice"),
    ({"stream_options": {}},                  "stream_options"),
]
# fmt: on


@pytest.mark.parametrize(("more", "param"), FAULTS)
def test_what_the_relay_acts_on_is_checked(front: Server, more: Json, param: str) -> None:
    reply = front.post(CHAT, MESSAGES | more)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)


def test_what_the_upstream_refuses_is_a_400_with_all_members(worker: Upstream, front: Server) -> None:
    error = {"message": "Bad.", "type": "BadRequestError", "param": "temperature", "code": 400}
    worker.answer = says(json_answer({"error": error}, "400 Bad Request"))
    reply = front.post(CHAT, MESSAGES | {"temperature": 9})
    expected = {"message": "Bad.", "type": "invalid_request_error", "param": "temperature", "code": None}
    assert (reply.status, reply.json["error"]) == (400, expected)


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
    {"modalities": ["text", "audio"], "audio": {"voice": "alloy"}, "store": True, "temperature": "hot"},
    {"add_generation_prompt": False, "continue_final_message": True, "what_nobody_knows": [1]},
]


@pytest.mark.parametrize("more", PASSED)
def test_what_only_an_upstream_has_passes(worker: Upstream, front: Server, more: Json) -> None:
    worker.answer = says(json_answer({"choices": []}))
    assert front.post(CHAT, MESSAGES | more).status == 200
    assert worker.exchanges[-1].body == MESSAGES | more


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
