"""Connections: what they read of what is sent, bytes that cost, clients that half leave, too many of them."""

import asyncio
import json
import resource
import selectors
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.server import ServerState

from engine import SWITCH_INTERVAL_S
from helpers.asked import HI, RESPONSES
from helpers.limits import PATIENCE_S
from helpers.serving import Json, Server, http_bytes, http_frames, serve
from helpers.tables import table
from helpers.wire import UPGRADE, Wire
from service import connections, options
from streaming import cancel

CHUNKED = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


# --- the law: what is sent comes, however it is cut ---------------------------------------------------------

TABLE = table("connections")
GET = ("/get", b"", "host")
REQUESTS = {(r["path"], r["body"].encode(), r["headers"]): r["sent"].encode() for r in TABLE["requests"]}


def application(told: list[Any]) -> Any:
    """Return one that notes what it is told: path, body, names of headers."""
    turn = asyncio.Lock()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert not turn.locked()  # one at a time
        async with turn:
            request = Request(scope, receive)
            names = sorted(name for name in request.headers if name != "connection")
            told.append((scope["path"], await request.body(), " ".join(names)))
            await asyncio.sleep(0)
        await Response()(scope, receive, send)

    return app


def connected(app: Any) -> tuple[Any, Wire, ServerState]:
    config, state, wire = uvicorn.Config(app, log_config=None, lifespan="off"), ServerState(), Wire()
    config.load()
    limits: Json = {"max_connections": 9, "idle": {}, "reader_timeout": 60}
    protocol: Any = type("LimitedProtocol", (connections.Protocol,), limits)(config, state, {})
    protocol.connection_made(wire)
    return protocol, wire, state


async def answered(pieces: list[bytes]) -> tuple[list[Any], Wire]:
    """What an application is told, and what is answered."""
    told: list[Any] = []
    protocol, wire, state = connected(application(told))
    for piece in pieces:
        protocol.data_received(piece)
        while state.tasks:
            await asyncio.sleep(0)
    protocol.connection_lost(None)
    return told, wire


@pytest.mark.bug("H13")
async def test_a_request_comes_wherever_it_is_cut() -> None:
    """And after it another one on the same connection."""
    for request, sent in REQUESTS.items():
        for cut in range(len(sent)):
            told, wire = await answered([sent[:cut], sent[cut:], REQUESTS[GET]])
            assert told == [request, GET]
            assert wire.written.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("more", [http_bytes("/", method="GET") * 1000, b"nonsense\r\n\r\n"])
async def test_what_comes_before_an_answer_is_not_read(more: bytes) -> None:
    """The request before it is answered, and the connection ends with that: RFC 9112, section 9.3.2."""
    told, wire = await answered([REQUESTS[GET] + more])
    assert told == [GET]
    assert wire.written.count(b"HTTP/1.1 200") == 1
    assert b"HTTP/1.1 400" not in wire.written
    assert wire.is_closed


async def test_a_request_starts_when_it_is_whole() -> None:
    """Bugs: 1,100 half-sent bodies at once were 0.4 s of tasks, and as many refusals when they gave way. A
    client that wanted its connection closed, and did not read its answer, kept it for ever.
    """
    protocol, _, state = connected(Response())
    *begun, end = http_bytes(RESPONSES, HI, Connection="close")
    for data, n_running in ((bytes(begun), 0), (bytes([end]), 1)):
        protocol.data_received(data)
        assert (len(state.tasks), len(protocol.idle)) == (n_running, 1 - n_running)
    await asyncio.gather(*state.tasks)
    assert list(protocol.idle) == [protocol]


@pytest.mark.parametrize(("old", "new", "answer"), TABLE["handshakes"].values(), ids=TABLE["handshakes"])
async def test_a_handshake_that_is_refused_is_told_why_in_json(old: str, new: str, answer: str) -> None:
    """Bugs: the answer was plain text, or there was none; one that is not ASCII was counted for ever."""
    protocol, wire, _ = connected(application([]))
    protocol.ws_protocol_class = connections.WebSocketProtocol
    right = http_bytes(RESPONSES, method="GET", **UPGRADE).decode()
    protocol.data_received(right.replace(old, new).encode())
    head, body = wire.written.split(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {answer}".encode())
    assert (b"Sec-WebSocket-Version: 13" in head) == (b" 426 " in head)
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert wire.is_closed


async def test_at_the_end_of_its_grace_a_stop_waits_for_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: with the half of a large one it took 2 s more, which are for clients to read their last event; it
    waited for those who had come after it had looked, before the socket was closed."""
    protocols = [connected(application([])) for _ in range(4)]
    head = http_bytes(RESPONSES, None, Content_Length="100000")
    for (protocol, _, _), data in zip(protocols, (head + bytes(50_000), WHOLE, b"", b""), strict=True):
        protocol.data_received(data)
    server = connections.HttpServer(uvicorn.Config(application([])))
    *here, late = (protocol for protocol, _, _ in protocols)
    server.server_state.connections = {*here}
    monkeypatch.setattr(connections, "STALLED_S", 0)
    server.drop_clients()
    assert [wire.is_closed for _, wire, _ in protocols] == [True, False, False, False]
    server.server_state.connections.add(late)
    for _ in range(2):
        await asyncio.sleep(0)
    assert all(wire.is_closed for _, wire, _ in protocols)
    await asyncio.gather(*(cancel(task) for _, _, state in protocols for task in state.tasks))


def test_a_start_with_too_few_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the server said that it listens, and dropped every connection."""
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    for limit, n in ((112, 16), (1024, 472), (resource.RLIM_INFINITY, 1025)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert connections.max_connections(1) == n
    monkeypatch.setattr(resource, "getrlimit", lambda _: (111, 111))
    with pytest.raises(ValueError, match="the system allows 111 open files: expected 112 or more"):
        connections.max_connections(1)


async def test_nothing_is_written_amid_an_answer() -> None:
    """Bug: an answer that had begun before its request was whole got a 400 among its bytes."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: one", "more_body": True})
        await asyncio.sleep(PATIENCE_S)

    protocol, wire, state = connected(app)
    protocol.data_received(CHUNKED + b"8000\r\n%b\r\n" % bytes(2**15))
    await asyncio.sleep(0.01)
    protocol.data_received(b"nonsense\r\n")
    assert b"data: one" in wire.written
    assert b"400" not in wire.written
    assert wire.is_closed
    for task in state.tasks:
        task.cancel()


# --- what is bounded ----------------------------------------------------------------------------------------

FRAMING = {
    "chunks of a byte": b"1\r\nx\r\n" * 20_000,
    "an endless chunk size": b"1;x=" + b"x" * 100_000,
    "endless trailers": b"0\r\n" + b"x" * 100_000,
    "a large chunk, then chunks of a byte": b"8000\r\n%b\r\n" % bytes(2**15) + b"1\r\nx\r\n" * 20_000,
}


@pytest.mark.parametrize("data", FRAMING.values(), ids=FRAMING)
def test_what_wraps_a_body_is_bounded(server: Server, data: bytes) -> None:
    """Bug: each chunk was worked on, and 2 MB in chunks of a byte stopped all streams for a second."""
    with server.connect(CHUNKED) as client:
        with suppress(ConnectionError):  # it is refused before all has come
            client.sendall(data)
        whole = HTTPResponse(client)
        whole.begin()
        error = json.loads(whole.read())["error"]
    assert (whole.status, error["code"]) == (400, "invalid_http")
    assert str(connections.MAX_FRAMING_BYTES) in error["message"]


@pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")
def test_one_turn_tells_of_so_many_connections() -> None:
    """Bugs: one turn for a thousand that were closed at once; a new client, or the engine, behind a crowd."""
    n = 5 * connections.READY_A_TURN
    with connections.FairSelector() as selector, ExitStack() as held:
        ends = [[held.enter_context(end) for end in socket.socketpair()] for _ in range(n)]
        for number, (ours, theirs) in enumerate(ends):
            theirs.sendall(b"x")
            selector.register(ours.fileno(), selectors.EVENT_READ, number)  # as asyncio does
        amid_new = {key.data for key, _ in selector.select(0)}
        ends[0][0].recv(1)  # nobody else comes
        turns = [[key.data for key, _ in selector.select(0)] for _ in range(10)]
        assert sys.getswitchinterval() < SWITCH_INTERVAL_S
        for ours, _ in ends[connections.READY_A_TURN :]:
            selector.unregister(ours.fileno())
        selector.select(0)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    assert {0, *range(n - connections.ACCEPTED_A_TURN, n)} <= amid_new != {*range(n)}
    assert all(n - 1 in turn and len({*turn}) == len(turn) <= connections.READY_A_TURN + 1 for turn in turns)
    assert {number for turn in turns for number in turn} == {*range(1, n)}


def test_a_name_is_looked_up_beside_threads_that_are_all_busy() -> None:
    """Else two upstreams whose names are not answered would hold up every request."""
    done = threading.Event()

    async def look_up() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, done.wait)
        try:
            assert await asyncio.wait_for(loop.getaddrinfo("localhost", 80), PATIENCE_S)
        finally:
            done.set()
            await busy

    with asyncio.Runner(loop_factory=connections.EventLoop) as runner:
        runner.run(look_up())


LIMIT_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
RUN_SERVER = "import runpy; runpy.run_module('tests.helpers.faulty_server', run_name='__main__')"


@pytest.mark.bug("I06")
def test_idle_connections_do_not_take_the_last_files() -> None:
    """Bug: 300 of them under `ulimit -n 256` ended the service, with 57,308 tracebacks in the log in 8 s."""
    with serve(script=("-c", f"{LIMIT_FILES}; {RUN_SERVER}")) as server, ExitStack() as held:
        stream = held.enter_context(server.connect(http_bytes(RESPONSES, HI | {"stream": True})))
        chunks = http_frames(stream)
        next(chunks)
        for begun in [b"", b"GET /hea", http_bytes(RESPONSES, HI)[:-1]] * 100:
            held.enter_context(server.connect(begun))
        assert server.get("/health/live").status == 200
        assert b"response.completed" in b"".join(chunks)
        assert len(server.log().splitlines()) < 50


# --- time ---------------------------------------------------------------------------------------------------

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
UNREAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 20_000
DAWDLERS = [
    # what comes at once    then, one by one    n of answers
    (b"",                   b"",                0),
    (b"GET /hea",           b"",                0),
    (b"GET /",              b"a",               0),
    (WHOLE,                 b"a",               1),
    (WHOLE,                 b"\r\n",            1),
    (UNREAD,                b"a",               1),  # a body that is not read
]  # fmt: skip


@pytest.mark.parametrize(("begun", "drop", "n_answers"), DAWDLERS)
async def test_a_head_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch, begun: bytes, drop: bytes, n_answers: int
) -> None:
    """Bug: half a head held its connection for ever, however slowly it came, and nothing counted it."""
    monkeypatch.setattr(connections, "IDLE_S", 0.05)
    protocol, wire, _ = connected(Response())
    protocol.data_received(begun)
    async with asyncio.timeout(PATIENCE_S):
        while not wire.is_closed:
            await asyncio.sleep(0.002)
            if drop and wire.is_read:
                protocol.data_received(drop)
    assert wire.written.count(b"HTTP/1.1 200 OK") == n_answers


async def test_an_answer_may_take_longer_than_a_connection_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the timer of the answer before it ended the connection."""
    monkeypatch.setattr(connections, "IDLE_S", 0.05)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.1)
        await Response()(scope, receive, send)

    protocol, wire, state = connected(app)
    for _ in range(2):
        protocol.data_received(WHOLE)
        await asyncio.gather(*state.tasks)
    assert wire.written.count(b"HTTP/1.1 200 OK") == 2
    assert not wire.is_closed
    kept = connections.http_config(Starlette(), options.arguments().parse_args([]))
    assert kept.timeout_keep_alive == connections.NEVER_S


def test_a_client_of_http_1_0_gets_no_chunks(server: Server) -> None:
    """RFC 9112, section 6.1: its body ends when the connection closes."""
    request = http_bytes(RESPONSES, HI | {"stream": True})
    with server.connect(request.replace(b"HTTP/1.1", b"HTTP/1.0")) as client:
        read = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = read.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"event: response.created\ndata: ")
    assert body.endswith(b"data: [DONE]\n\n")
