"""Connections, as the real server meets them: bytes that cost, clients that half leave, too many of them."""

import asyncio
import json
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPResponse

import pytest

from helpers.faulty_server import SLOW
from helpers.serving import PATIENCE_S, TINY, Json, Reply, Server, http_bytes, http_frames, serve, until
from service import connections

RESPONSES = "/v1/responses"
FAULTY = ("-m", "tests.helpers.faulty_server")
HI: Json = {"model": "tiny", "input": "hi"}
EOS = json.loads((TINY / "generation_config.json").read_text())["eos_token_id"]
ENDLESS: Json = HI | {"seed": SLOW, "logit_bias": {str(token_id): -100 for token_id in EOS}}
ALIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


COUNTING_TASKS = """
import runpy, sys
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
run_asgi = RequestResponseCycle.run_asgi
def counted(*args):
    print("a task starts", file=sys.stderr, flush=True)
    return run_asgi(*args)
RequestResponseCycle.run_asgi = counted
sys.argv[0] = "server.py"
runpy.run_path("server.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(script=FAULTY) as started:
        yield started
        assert "Traceback" not in started.log()


def answer(client: socket.socket) -> Reply:
    whole = HTTPResponse(client)
    whole.begin()
    return Reply(whole.status, {}, whole.read())


# --- work ---------------------------------------------------------------------------------------------------

# fmt: off
#  what a body is wrapped in   bytes that say so little
FRAMING = {
    "chunks of a byte":        CHUNKED + b"1\r\nx\r\n" * 20_000,
    "an endless chunk size":   CHUNKED + b"1;x=" + b"x" * 100_000,
    "endless trailers":        CHUNKED + b"0\r\n" + b"x" * 100_000,
}
# fmt: on


@pytest.mark.parametrize("data", FRAMING.values(), ids=FRAMING)
def test_what_wraps_a_body_is_bounded(server: Server, data: bytes) -> None:
    """Bug: each chunk was worked on, and 2 MB in chunks of a byte stopped all streams for a second."""
    with server.connect(b"") as client:
        with suppress(ConnectionError):  # it is refused before all has come
            client.sendall(data)
        reply = answer(client)
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_http")
    assert str(connections.MAX_FRAMING_BYTES) in reply.json["error"]["message"]


# fmt: off
#  what a URL has                status  of which there may be so many
URLS = {
    "parameters":                (400,   "a&" * connections.MAX_QUERY,        connections.MAX_QUERY),
    "bytes":                     (414,   "x" * connections.MAX_LINE,          connections.MAX_LINE),
    "bytes, and ten times more": (414,   "x" * 10 * connections.MAX_LINE,     connections.MAX_LINE),
}
# fmt: on


@pytest.mark.parametrize(("status", "query", "limit"), URLS.values(), ids=URLS)
def test_what_a_url_says_is_bounded(server: Server, status: int, query: str, limit: int) -> None:
    """Bug: a query of 60 kB took 0.3 s to be read, before its key was looked at: 40 clients stopped all
    streams for three seconds.
    """
    with server.connect(
        f"GET {RESPONSES}/resp_1?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    ) as client:
        reply = answer(client)
    assert (reply.status, reply.json["error"]["code"]) == (status, "invalid_http")
    assert str(limit) in reply.json["error"]["message"]


def test_one_turn_reads_so_much() -> None:
    """What a client has sent meanwhile waits in the system: the loop looks at everybody else first."""
    assert len(connections.Protocol.read_buffer) <= 64 * 1024
    assert len(connections.WebSocketProtocol.read_buffer) <= 4 * 1024  # the smallest frame has six bytes


@pytest.mark.skipif(sys.platform != "linux", reason="it takes twice what is asked for")
def test_what_nobody_has_read_yet_is_bounded() -> None:
    """Bug: the system held up to 32 MB of each connection that was not read."""
    with connections.bind("127.0.0.1", 0) as listener, socket.socket() as other:
        of_ours, by_default = [
            each.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for each in (listener, other)
        ]
    assert of_ours != by_default  # which would grow: tcp(7), tcp_moderate_rcvbuf
    assert of_ours <= 2 * connections.RECEIVE_BUFFER_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")
def test_one_turn_tells_of_so_many_connections() -> None:
    """Bug: a thousand that were closed at once were one turn of the event loop, and streams waited for it."""
    with connections.FairSelector() as selector, ExitStack() as held:
        for number in range(3 * connections.READY_A_TURN):
            ours, theirs = socket.socketpair()
            held.enter_context(ours)
            held.enter_context(theirs).sendall(b"x")
            selector.register(ours, selectors.EVENT_READ, number)
        turns = [selector.select(0) for _ in range(3)]
    assert {len(turn) for turn in turns} == {connections.READY_A_TURN}
    assert len({key.data for turn in turns for key, _ in turn}) == 3 * connections.READY_A_TURN


def test_a_name_is_looked_up_beside_threads_that_are_all_busy() -> None:
    """Else two upstreams whose names nobody answers for would hold up every request."""
    done = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, done.wait)
        try:
            assert await asyncio.wait_for(loop.getaddrinfo("localhost", 80), PATIENCE_S)
        finally:
            done.set()
            await busy

    with asyncio.Runner(loop_factory=connections.EventLoop) as runner:
        runner.run(main())


def test_a_request_starts_when_it_is_whole() -> None:
    """Bug: 1,100 half-sent bodies at once were 0.4 s of tasks, and as many refusals when they gave way."""
    with serve(script=("-c", COUNTING_TASKS)) as server, ExitStack() as held:
        clients = [held.enter_context(server.connect(http_bytes(RESPONSES, HI)[:-1])) for _ in range(20)]
        assert server.get("/health/live").status == 200
        assert server.log().count("a task starts") == 1
        clients[0].sendall(b"}")
        assert answer(clients[0]).status == 200
        assert server.log().count("a task starts") == 2


def test_trailers_are_no_headers(server: Server) -> None:
    """Else what a proxy has checked is not what we see: RFC 9110, section 6.5.1."""
    body = json.dumps(HI | {"max_output_tokens": 1}).encode()
    chunks = b"%x\r\n%s\r\n0\r\nContent-Encoding: banana\r\n\r\n" % (len(body), body)
    with server.connect(CHUNKED + chunks) as client:
        assert answer(client).status == 200


# --- upgrades, pipelining -----------------------------------------------------------------------------------


@pytest.mark.bug("H13")
@pytest.mark.parametrize("before", [b"", ALIVE])
@pytest.mark.parametrize("in_one", [True, False])
def test_a_body_with_an_upgrade_to_http_2(server: Server, in_one: bool, before: bytes) -> None:
    """Java's own client offers one with each body; the parser takes what follows for HTTP/2, so the body was
    lost, or read as the next request: Kludex/uvicorn#2722. It was also lost after a request before it.
    """
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQC\r\n\r\n"
    head, _, body = http_bytes(RESPONSES, HI | {"max_output_tokens": 1}).partition(b"\r\n\r\n")
    parts = [head + b"\r\n" + offer, body]
    if in_one:
        parts = [b"".join(parts)]
    with server.connect(before) as client:
        for part in parts:
            client.sendall(part)
            time.sleep(0.02)
        assert statuses(client, 2 if before else 1)[-1] == 200
        client.sendall(ALIVE)
        assert answer(client).status == 200


NOT_JSON = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n{bad"


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    """Regression: the first was answered, and then the connection closed. RFC 9112, section 9.3.2."""
    with server.connect(ALIVE + ALIVE + NOT_JSON + ALIVE) as client:
        assert statuses(client, 4) == [200, 200, 400, 200]
        client.sendall(ALIVE[:20])
        time.sleep(0.02)
        client.sendall(ALIVE[20:] + http_bytes(RESPONSES, HI | {"max_output_tokens": 1})[:-1])
        assert statuses(client, 1) == [200]
        client.sendall(b"}" + ALIVE)
        assert statuses(client, 2) == [200, 200]


def statuses(client: socket.socket, n: int) -> list[int]:
    """Read n answers, which may come in one piece."""
    found: list[int] = []
    file = client.makefile("rb")
    for _ in range(n):
        found.append(int(file.readline().split()[1]))
        n_bytes = 0
        while (line := file.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                n_bytes = int(value)
        file.read(n_bytes)
    return found


def test_requests_before_what_is_not_http_are_answered(server: Server) -> None:
    with server.connect(ALIVE + ALIVE + b"nonsense\r\n\r\n") as client:
        read = b"".join(iter(lambda: client.recv(65536), b""))
    assert read.count(b"HTTP/1.1 200") == 2
    assert read.count(b"HTTP/1.1 ") == 2


def test_few_requests_wait_in_a_connection(server: Server) -> None:
    n = 10 * connections.MAX_PIPELINED
    with server.connect(http_bytes(RESPONSES, HI | {"max_output_tokens": 1}) + ALIVE * n) as client:
        read = b"".join(iter(lambda: client.recv(65536), b""))
    assert read.count(b"HTTP/1.1 200") == 1 + connections.MAX_PIPELINED


def test_a_stream_of_http_1_0_ends_with_the_connection(server: Server) -> None:
    """Regression: it was sent in chunks, which RFC 9112, section 6.1, forbids."""
    request = http_bytes(RESPONSES, HI | {"max_output_tokens": 2, "stream": True})
    with server.connect(request.replace(b"HTTP/1.1", b"HTTP/1.0")) as client:
        read = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = read.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"event: response.created\ndata: ")
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_stop_waits_for_no_half_request() -> None:
    """Bug: one byte of a small body held it up for 7 to 9 seconds, and each left a traceback."""
    whole = http_bytes(RESPONSES, HI)
    large = http_bytes(RESPONSES, HI | {"input": "x" * 100_000})
    with serve(script=FAULTY) as server, ExitStack() as held:
        for begun in [whole[:-1], whole[:20], ALIVE, large[:50_000]] * 5:
            held.enter_context(server.connect(begun))
        assert server.get("/health/live").status == 200
        server.interrupt(signal.SIGTERM)
        assert server.exit_status() == 0
        assert "Traceback" not in server.log()
        assert "running task(s)" not in server.log()


def test_a_handshake_with_a_header_that_is_not_ascii_is_answered(server: Server) -> None:
    """Bug: two tracebacks, and no answer; the fixture looks for the tracebacks."""
    handshake = (
        b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nX-Name: caf\xe9\r\n\r\n"
    )
    with server.connect(handshake) as client:
        assert answer(client).status == 426


# --- clients that leave -------------------------------------------------------------------------------------


@pytest.mark.bug("I02")
def test_a_client_that_closes_without_an_answer_has_left(server: Server) -> None:
    """The end of its side alone does not say so: it is written to, and its system resets the connection."""
    with server.connect(http_bytes(RESPONSES, ENDLESS)):
        until(lambda: server.health()["running"] == 1, "it runs")
    until(lambda: server.health()["running"] == 0, "it does not")
    assert server.log().count("nobody waits any longer") >= 1


def test_a_client_that_ends_its_side_of_a_stream_has_left(server: Server) -> None:
    with server.connect(http_bytes(RESPONSES, ENDLESS | {"stream": True})) as client:
        next(http_frames(client))
        client.shutdown(socket.SHUT_WR)
        until(lambda: server.health()["running"] == 0, "it does not run")


# --- too many connections -----------------------------------------------------------------------------------

FEW_FILES = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sys.argv[0] = "server.py"
runpy.run_path("server.py", run_name="__main__")
"""


@pytest.mark.bug("I06")
@pytest.mark.skipif(sys.platform == "win32", reason="a socket is no file there")
def test_idle_connections_do_not_take_the_last_files() -> None:
    """Bug: 300 of them under `ulimit -n 256` ended the service, with 57,308 tracebacks in the log in 8 s."""
    with serve(script=("-c", FEW_FILES)) as server, ExitStack() as held:
        stream = held.enter_context(server.connect(http_bytes(RESPONSES, HI | {"stream": True})))
        chunks = http_frames(stream)
        next(chunks)
        for begun in [b"", b"GET /hea", http_bytes(RESPONSES, HI)[:-1]] * 100:
            held.enter_context(server.connect(begun))
        assert server.get("/health/live").status == 200
        assert b"response.completed" in b"".join(chunks)
        assert server.log().count("one without a request gives way") == 1
        assert len(server.log().splitlines()) < 50
