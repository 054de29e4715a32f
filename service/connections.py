"""HTTP/1.1 and WebSockets: the listening socket, and limits on what a client may send and how slowly.

    host, port --bind()--> listening socket
    ASGI application, options --http_config()--> uvicorn.Config --HttpServer--> connections, each a Protocol
    bytes of a connection --httptools--> callbacks --uvicorn--> ASGI messages, of one request at a time
    a handshake --uvicorn--> WebSocketProtocol --websockets--> frames --> ASGI messages

uvicorn speaks both protocols. We add the limits through documented interfaces: the methods that asyncio calls
on a protocol, those that httptools calls as it parses, and the protocol of the package `websockets`.
We also use a dozen undocumented names of uvicorn, so pyproject.toml allows no later minor version:
HttpToolsProtocol with connections, parser, headers, url, scope, handle_websocket_upgrade and
on_response_complete; its cycle with send, chunked_encoding and expected_content_length;
WebSocketsSansIOProtocol with conn, read_paused, handle_events, handle_connect, handle_text and handle_bytes;
shutdown of both; Server with capture_signals and server_state. And `websockets` has conn.events.

The life of a connection ("<" is from the client):

    < head of A, half of its body   A is coming; the connection is idle, and its timer runs
    < the rest of A                 A starts as a task, and is whole; the connection is busy
    > answer to A                   A is answered; the connection is idle, and its timer runs

Authority: https://www.uvicorn.org/settings/; RFC 9112; the parser is llhttp, as Node.js has it. RFC 6455 for
WebSockets, which the package `websockets` speaks.

Rules of this file:
1. We close a connection on which no request starts within IDLE_S of the last answer. A request starts when
   all of it, or more than SMALL_BODY_BYTES of its body, has come. We drop a client that reads nothing for
   --reader-timeout.
2. Bytes that are not HTTP, or could mean two requests (RFC 9112, section 11.2), are refused with 400. The
   connection ends with that.
3. Requests are not pipelined: if a client sends a request before it has the answer to its last one, we do not
   read that request, and close the connection after the answer. RFC 9112, section 9.3.2, has clients send it
   again.
4. A client that closes its connection, or its sending side, has left.
5. Connections never take the last file descriptors: we close the connection that has been idle (or has sent
   only a part of a request) the longest.
6. A turn of the event loop is short: it accepts, reads and writes a few connections, even if thousands are
   ready, and it reads few bytes of a WebSocket, because the smallest frame has six.
"""

import argparse
import asyncio
import contextlib
import logging
import resource
import selectors
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade
from starlette.types import ASGIApp, Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

import sse
from engine import SWITCH_INTERVAL_S
from request.body import SMALL_BODY_BYTES
from request.ids import new_id
from request.refusals import BadInput, error_body

log = logging.getLogger("connections")

READ_BYTES = 32 * 1024  # of a connection in a turn of the event loop: 3 ms, if it is HTTP chunks of one byte
READ_FRAMES_BYTES = 256  # of a WebSocket in one turn: 42 of the smallest frames, 1.5 ms
READ_MESSAGE_BYTES = 2 * 1024  # the same, while no frame ends: a large message comes
MAX_FRAMES = 1000  # of a WebSocket in FRAMES_S: messages, their fragments, pings, pongs
FRAMES_S = 20
MAX_LARGEST = 2  # times --max-body: a larger message closes its connection
MAX_FRAMING_BYTES = 32 * 1024  # of a request without its body: head, chunk sizes, trailers
NEVER_S = 10**6
IDLE_S = 75  # nginx's default: clients that reuse a connection drop it before we do
# Buffers of a connection; Linux takes twice as many bytes. As the receive buffer is set, it does not grow by
# itself: with a round trip of 100 ms a client sends 2 MB/s.
SEND_BUFFER_BYTES = 128 * 1024
RECEIVE_BUFFER_BYTES = 256 * 1024
MAX_CLOSE_S = 60  # for running requests, after their grace: no step of the engine takes as long
STALLED_S = 2  # at a stop, for clients to read their last event and to leave

BACKLOG = 4096  # connections that the system holds until we accept them; a client beyond them tries again
ACCEPTED_A_TURN = 32  # connections in a turn of the event loop, which are read in the next one: 5 ms
READY_A_TURN = 8  # connections that are read or written: each takes some 1 ms
CROWD_SWITCH_S = 0.0002  # SWITCH_INTERVAL_S while more are ready; at all times it costs a tenth of the tokens
MAX_IDLE = 1024  # connections beyond --max-streams: idle ones, bodies on their way, short requests
MIN_FILES = 112  # OWN_FILES, and those of 16 connections: with fewer a server would only seem to answer
OWN_FILES = 80  # the store, the model, pipes, logs, connections that are accepted to be dropped


class Listener(socket.socket):
    """A listening socket. asyncio gives its backlog and what it accepts in a turn the same number."""

    def listen(self, _: int = BACKLOG) -> None:
        super().listen(BACKLOG)


def bind(host: str, port: int) -> Listener:
    """Return the listening socket; raises OSError.

    It is made before the model is loaded: a port in use is known at once, and early clients wait.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only if TCP is named does asyncio turn Nagle's algorithm off: events would wait for their ACKs.
    listener = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # By default the system buffers up to 4 MB for a client that reads nothing, and we would not notice it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    # And up to 32 MB of what we do not read yet.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
    try:
        listener.bind((host, port))
        listener.listen()  # a port that is only bound could be bound again
    except (OSError, UnicodeError) as error:
        raise OSError(f"cannot listen on {host} port {port}: {error}") from error
    return listener


def max_connections(max_streams: int) -> int:
    """Return how many connections there may be at once, and let this process have files for as many.

    Upstreams take as many files as clients do. Raises ValueError if the system allows too few.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_files = 2 * (max_streams + MAX_IDLE) + OWN_FILES
    if hard_limit != resource.RLIM_INFINITY:
        n_files = min(n_files, hard_limit)
    if n_files < MIN_FILES:
        raise ValueError(f"the system allows {n_files} open files: expected {MIN_FILES} or more (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, hard_limit))
    return (n_files - OWN_FILES) // 2


# --- turns of the event loop --------------------------------------------------------------------------------

LOOKUPS = ThreadPoolExecutor(8, "lookup")  # look-ups of upstreams' names


class EventLoop(asyncio.SelectorEventLoop):
    """Looks names up in threads of its own: one may take half a minute, and requests have few threads."""

    def __init__(self) -> None:
        super().__init__(FairSelector())

    def getaddrinfo(self, *address: Any, **hints: Any) -> Any:
        return self.run_in_executor(LOOKUPS, partial(socket.getaddrinfo, *address, **hints))


class FairSelector(selectors.DefaultSelector):
    """Report a few ready files at a time: a thousand ready files take many turns of the loop.

    A half of them are the next ones, round robin, and the others the newest: a client that comes amid a crowd
    does not wait for all of it. Always with them is the file that was opened first, the listening socket; if
    that is ready, so are all connections of the last turn, or later ones would bury them. Meanwhile the
    engine and the event loop give each other the interpreter sooner.
    """

    _start = 0  # index of the next one

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)  # epoll has them in the order in which they became ready
        is_crowd = len(ready) > READY_A_TURN
        sys.setswitchinterval(CROWD_SWITCH_S if is_crowd else SWITCH_INTERVAL_S)
        if not is_crowd:
            return ready
        n, first = READY_A_TURN // 2, min(ready)
        self._start = (self._start + n) % len(ready)
        # The keys of the map are descriptors; to look its values up would take 0.4 ms for 2,000 of them.
        n_newest = ACCEPTED_A_TURN if first[0].fd == min(self.get_map()) else n  # type: ignore[type-var]
        chosen = [first, *(ready[self._start :] + ready)[:n], *ready[-n_newest:]]
        return [*{event[0].fd: event for event in chosen}.values()]


# --- uvicorn, with limits -----------------------------------------------------------------------------------


class HttpServer(uvicorn.Server):
    """uvicorn. At a stop server.py first gives open streams their last event; so it handles the signals."""

    capture_signals = contextlib.nullcontext  # type: ignore[assignment]

    def drop_clients(self, every: bool = False) -> None:
        """Drop those whose bodies have not come, and after STALLED_S `every` one that has not left.

        Later uvicorn would cancel their requests, and log that. For a tenth of a second it still accepts
        connections: those that come meanwhile are dropped with the others.
        """
        for connection in self.server_state.connections:
            if every or getattr(connection, "state", "") == "started":
                connection.transport.abort()
        if not every:
            asyncio.get_running_loop().call_later(STALLED_S, self.drop_clients, True)


class Limited(asyncio.Protocol):
    """Drops a connection whose client does not read.

    The transport calls pause_writing() when 64 KiB wait for a full socket, and resume_writing() when it has
    sent most of these.
    """

    transport: asyncio.Transport
    reader_timeout: float  # seconds
    timer: asyncio.TimerHandle | None = None  # drops a client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self.timer = asyncio.get_running_loop().call_later(self.reader_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.timer:
            self.timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(None)  # with an error uvicorn would keep its timer, and with that all this
        self.resume_writing()


# --- HTTP ---------------------------------------------------------------------------------------------------


async def send_as_it_is(cycle: Any, send: Send, message: Message) -> None:
    """Send to a client of HTTP/1.0, which knows no chunks: RFC 9112, section 6.1.

    uvicorn sends a body as it is if it expects each of its parts to be as long as it is.
    """
    cycle.chunked_encoding = False
    cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


BAD_HTTP_ANSWER = (
    "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    "x-request-id: %s\r\nConnection: close\r\n\r\n%s"
)
BAD_REQUEST = "400 Bad Request"
# RFC 6455, section 4.4, and RFC 9110, section 15.5.22
BAD_VERSION = "426 Upgrade Required\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13"
# Headers that say one thing: of two, a proxy could believe one and we the other (RFC 9110, section 5.3).
SINGLE_HEADERS = (b"host", b"authorization", b"content-type", b"content-encoding", b"origin")


class Protocol(Limited, HttpToolsProtocol):
    """One connection. The parser calls the methods that begin with on_; uvicorn's own are called later,
    in pass_on(), when the request is to start.
    """

    max_connections: int
    # All connections without a request that has started, the longest idle first, with their timers: rule 1.
    idle: "dict[Protocol, asyncio.TimerHandle]"
    # Of the newest request: "coming", "started" when it has been passed on to uvicorn, "whole". It may be
    # "answered" before it is whole.
    state = "answered"
    n_framing_bytes = 0  # of this request, without its body

    # --- beginning and end --------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # asyncio's own is 256 KiB
        self.become_idle()
        if len(self.connections) > self.max_connections:
            longest_idle = next(iter(self.idle))
            longest_idle.become_busy()
            longest_idle.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.become_busy()

    def become_idle(self) -> None:
        """Start the timer of a connection that has no request, or only a part of one."""
        self.idle[self] = asyncio.get_running_loop().call_later(IDLE_S, self.transport.abort)

    def become_busy(self) -> None:
        """Stop the timer: a request has started, the connection is a WebSocket now, or it has ended."""
        if self in self.idle:
            self.idle.pop(self).cancel()

    # --- what comes -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.n_framing_bytes += len(data)
        try:
            self.parser.feed_data(data)
            if self.n_framing_bytes > MAX_FRAMING_BYTES:
                raise HttpParserError(
                    f"head, chunk sizes and trailers are more than {MAX_FRAMING_BYTES} bytes"
                )
        except HttpParserUpgrade as upgrade:
            self.upgrade(data[upgrade.args[0] :])  # the bytes after the head
        except HttpParserError as error:
            self.refuse(error.__context__ or error)  # the parser wraps what a callback raises

    def on_message_begin(self) -> None:
        if self.state == "whole":
            raise HttpParserError("the request before this one has no answer yet")
        super().on_message_begin()
        self.state = "coming"
        self.body = b""  # received, and not passed on yet

    def on_headers_complete(self) -> None:
        """Refuse what the parser lets through; raises HttpParserError."""
        names = [name for name, _ in self.headers]
        if self.parser.get_method() == b"CONNECT":
            raise HttpParserError("this is not a proxy")
        if b"host" not in names and self.parser.get_http_version() == "1.1":  # RFC 9112, section 3.2
            raise HttpParserError("the Host header is missing")
        for name in SINGLE_HEADERS:
            if names.count(name) > 1:
                raise HttpParserError(f"there are two {name.decode()} headers")
        if self.parser.should_upgrade():
            return  # see upgrade()
        self.headers = []  # from now on they are trailers, not headers: RFC 9110, section 6.5.1
        if b"expect" in names:  # the body comes when the application asks for it
            self.pass_on()

    def on_body(self, body: bytes) -> None:
        self.n_framing_bytes -= len(body)
        self.body += body
        if self.state != "coming" or len(self.body) > SMALL_BODY_BYTES:
            self.pass_on()

    def on_message_complete(self) -> None:
        self.n_framing_bytes = 0
        if not self.parser.should_upgrade():
            self.pass_on()
            super().on_message_complete()
            if self.state == "started":
                self.state = "whole"

    def pass_on(self) -> None:
        """Have uvicorn see what has come of the request, and start it if it has not started."""
        if self.state == "coming":
            self.state = "started"
            self.become_busy()
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                cycle: Any = self.cycle
                cycle.send = partial(send_as_it_is, cycle, cycle.send)
        super().on_body(self.body)
        self.body = b""

    def upgrade(self, rest: bytes) -> None:
        """Go on after a head that offers another protocol, of which the parser does not read the body.

        A handshake becomes a WebSocketProtocol, which expects nothing before its answer (RFC 6455, section
        4.1). Any other offer is ignored: its head is parsed once more, without the header that makes it one.
        uvicorn loses the body: Kludex/uvicorn#2722.
        """
        # The parser takes Proxy-Connection for Connection.
        kept = [header for header in self.headers if not header[0].endswith(b"connection")]
        method = self.parser.get_method()
        if dict(kept)[b"upgrade"].lower() == b"websocket":
            if not all(value.isascii() for _, value in self.headers):  # else `websockets` raises
                self.refuse(HttpParserError("a header of the handshake is not ASCII"))
                return
            self.become_busy()
            self.scope["method"] = method.decode()
            self.handle_websocket_upgrade()
        else:
            start = b"%b %b HTTP/1.1" % (method, self.url)
            lines = [start, *(b"%b: %b" % header for header in kept), b"", rest]
            self.data_received(b"\r\n".join(lines))

    # --- what is answered -----------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.state = "answered"
        self.become_idle()  # also if it is closing: its client may not read what is left

    def refuse(self, error: BaseException) -> None:
        """Refuse bytes that are not HTTP. A whole request before them still gets its answer, the last one."""
        if self.state == "started" and self.cycle.response_started:  # nothing may interrupt that answer
            self.transport.abort()
        if self.state == "whole":
            self.shutdown()
            log.info("400: %s", error)
        else:
            refuse(self.transport, error)


def refuse(transport: asyncio.Transport, error: BaseException, status: str = BAD_REQUEST) -> None:
    """Log a refusal; send it, as the last answer on the connection, unless that is closing."""
    request_id = new_id("req")
    log.info("%.3s: %s: %s", status, request_id, error)
    if not transport.is_closing():
        refusal = BadInput(f"Invalid HTTP request received: {error}.", code="invalid_http")
        body = sse.dumps(error_body(refusal))
        transport.write((BAD_HTTP_ANSWER % (status, len(body), request_id, body)).encode())
        transport.close()


# --- WebSockets ---------------------------------------------------------------------------------------------


class WebSocketProtocol(Limited, WebSocketsSansIOProtocol):
    """One WebSocket, from its handshake. The application gets each message as bytes.

    uvicorn reads on when the application has taken all received messages. The first of these represents the
    handshake; the application takes it when it answers the handshake.
    """

    transport: Any
    n_frames = 0  # since `counted_since`
    counted_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = READ_FRAMES_BYTES
        transport.pause_reading()
        self.read_paused = True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if error := self.conn.handshake_exc:
            status = BAD_VERSION if "-Version" in str(error) else BAD_REQUEST
            refuse(self.transport, error.__cause__ or error, status)

    def handle_connect(self, event: Request) -> None:
        self.conn.accept(event)
        if not self.conn.handshake_exc:  # else uvicorn would send the package's answer, which is plain text
            super().handle_connect(event)

    def handle_events(self) -> None:
        now = time.monotonic()
        if now > self.counted_since + FRAMES_S:
            self.counted_since = now
            self.n_frames = 0
        self.n_frames += len(self.conn.events)
        self.transport.max_size = READ_FRAMES_BYTES if self.conn.events else READ_MESSAGE_BYTES
        if self.n_frames > MAX_FRAMES:
            self.transport.abort()
        super().handle_events()

    # As bytes: at a text that is not UTF-8 uvicorn would log a traceback.
    handle_text = WebSocketsSansIOProtocol.handle_bytes

    def shutdown(self) -> None:
        """At a stop, let the turns go on: the application closes the connection after them."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.conn.receive_eof()  # frees what has come


# --- the whole ----------------------------------------------------------------------------------------------


def http_config(app: ASGIApp, args: argparse.Namespace) -> uvicorn.Config:
    """Return the settings of uvicorn, and set the limits of all connections of this process."""
    Limited.reader_timeout = args.reader_timeout
    Protocol.max_connections = max_connections(args.max_streams)
    Protocol.idle = {}
    # It logs an error for each handshake that the application refuses.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "completing handshake" not in record.msg)
    return uvicorn.Config(
        app,
        http=Protocol,
        ws=WebSocketProtocol,
        ws_max_size=MAX_LARGEST * args.max_body,
        ws_ping_timeout=args.reader_timeout,  # uvicorn pings every 20 s
        ws_per_message_deflate=False,  # a few bytes could unpack to megabytes
        backlog=ACCEPTED_A_TURN,
        log_config=None,
        access_log=False,
        log_level="error",  # it warns about requests that we refuse, and log ourselves with their ids
        lifespan="off",
        server_header=False,
        timeout_keep_alive=NEVER_S,  # become_idle() has a timer that ends when the next request starts
        timeout_graceful_shutdown=int(args.shutdown_grace) + MAX_CLOSE_S,  # later than drop_clients()
    )
