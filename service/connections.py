"""HTTP/1.1 and WebSockets: the listening socket, and limits on what a client may send and how slowly.

    host, port --bind()--> listening socket
    ASGI application, options --http_config()--> uvicorn.Config --HttpServer--> connections, each a Protocol
    bytes of a connection --httptools--> callbacks of Protocol --uvicorn--> ASGI messages

A request starts, as a task, when it is whole, or has brought more than a small body. A connection has two
timers, and is dropped when one of them ends. The head timer runs from the first moment in which a request may
come until it starts. The read timer runs while back-pressure pauses our writing, because the client does not
read.

Authority: https://www.uvicorn.org/settings/; RFC 9112; the parser is llhttp, as Node.js has it. RFC 6455 for
WebSockets, which the package `websockets` speaks.

Rules of this file:
1. A head, with its body if that is small, must come within MAX_HEAD_S, and a client must read what it gets
   within --reader-timeout.
2. Bytes that are not HTTP, or could mean two requests (RFC 9112, section 11.2), are answered with an error.
3. Requests may be pipelined (RFC 9112, section 9.3.2): they are answered one after another, in order, and a
   few may wait. A client that closes its connection, or ends its side of it, has left.
4. Connections never take the last file descriptors: the one that was longest without a request, or with a
   part of one, gives way.
5. A turn of the event loop is short: it accepts, reads and writes a few connections, even if thousands are
   ready.
"""

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import re
import selectors
import socket
import struct
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request
from websockets.streams import StreamReader

from request.body import MAX_BODY_BYTES, SMALL_BODY_BYTES
from request.ids import REQUEST_ID, new_id
from request.refusals import BadInput, error_body
from service.admission import BODY_BYTES_A_S, MAX_BODY_S

log = logging.getLogger("connections")

MAX_READ_BYTES = 64 * 1024  # of a connection in one turn of the event loop: in chunks of a byte, 6 ms
MAX_FRAGMENTS = 1024  # of a message
# A message above --max-body is dropped as it comes, and its client is told. One above so many times that may
# never end: the connection is closed.
MAX_DROPPED = 8
MAX_PINGS = 64  # and pongs, between two messages
TURN_COST = 256 * 1024  # of a WebSocket: bytes, which take half a millisecond; then it waits for its turn
FRAME_COST = TURN_COST // 32  # of a frame, beside its bytes
BRAKE_S = 0.002  # between two such turns
# Bits of a frame's first byte, RFC 6455, section 5.2: it ends a message; it is a ping, a pong or a close.
FIN = 0x80
CONTROL = 0x08
# Bytes of the first line of a request but for its method: RFC 9112, section 3, demands to take so many. The
# package `websockets` takes 8192, for each line of a handshake.
MAX_LINE = 8000
MAX_QUERY = 100  # parameters: to read one takes as long as to read a kilobyte of a body
PING_INTERVAL_S = 20  # of a WebSocket
MAX_FRAMING_BYTES = 64 * 1024  # of a request, all but its body: head, chunk sizes, trailers
MAX_HEADERS = 100  # of a request, as Apache has it
MAX_HEAD_S = 60  # from the first moment in which a request may come until it starts
KEEP_ALIVE_S = 75  # of an idle connection, nginx's default: clients that reuse one drop it before we do
LINGER_S = 2  # for what a client still sends when it has been told that it is not HTTP
MAX_PIPELINED = 16  # requests of a connection that wait for the answer to the one before
SEND_BUFFER_BYTES = 128 * 1024  # of a connection; Linux takes twice as many
# Likewise, where the system allows as much, and it does not grow by itself any more: a client that is 100 ms
# away, there and back, sends 2 MB/s.
RECEIVE_BUFFER_BYTES = 256 * 1024
STALLED_S = 2  # what clients get at a stop to read their last event, after the grace

BACKLOG = 4096  # connections that the system holds for us; behind that a client tries again after a second
ACCEPTED_A_TURN = 16  # of the event loop: what a request does takes half a millisecond a turn
MAX_LOOKUPS = 8  # of names, at once: of upstreams
READY_A_TURN = 16  # connections that are read or written, for the same reason
MAX_IDLE = 1024  # connections beyond --max-streams: idle ones, bodies on their way, short requests
OWN_FILES = 64  # the store, the model, pipes, logs
MAX_FILES = 10240  # macOS gives a process no more
QUIET_S = 60  # between two lines of the log about the same trouble


def bind(host: str, port: int) -> socket.socket:
    """The listening socket; raises OSError.

    It is made before the model is loaded: a port in use is known at once, and early clients wait.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only where TCP is named does asyncio turn Nagle's algorithm off: events would wait for their ACKs.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # By default the system buffers up to 4 MB for a client that reads nothing, and we would not notice it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    # And as much of what we do not read yet.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    if os.name == "posix":  # a port in TIME_WAIT is free; elsewhere the option means something else
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # a port that is only bound could be bound again
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen on {host} port {port}: {reason}") from error
    return listener


# --- turns of the event loop --------------------------------------------------------------------------------


class EventLoop(asyncio.SelectorEventLoop):
    """Looks names up in threads of its own: one may take half a minute, and requests have few."""

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        super().__init__(selector)
        self._lookups = ThreadPoolExecutor(MAX_LOOKUPS, "lookup")

    async def getaddrinfo(self, host: Any, port: Any, **hints: int) -> list[Any]:
        return await self.run_in_executor(self._lookups, partial(socket.getaddrinfo, host, port, **hints))

    def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)
        super().close()


def event_loop() -> asyncio.AbstractEventLoop:
    return EventLoop(FairSelector())


class FairSelector(selectors.DefaultSelector):
    """Tells of a few ready files at a time, by turns: a thousand of them take many turns of the loop."""

    _start = 0  # of the next few

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if len(ready) <= READY_A_TURN:
            return ready
        self._start = (self._start + READY_A_TURN) % len(ready)
        return [*ready, *ready][self._start : self._start + READY_A_TURN]


# --- file descriptors ---------------------------------------------------------------------------------------


def max_connections(max_streams: int) -> int:
    """How many connections there may be at once; raises the limit of files for them, as far as it may."""
    n_connections = max_streams + MAX_IDLE
    try:
        import resource
    except ImportError:  # Windows, where a socket is no file
        return n_connections
    n_spare = ACCEPTED_A_TURN + OWN_FILES
    n_wanted = max(
        2 * n_connections + n_spare, MAX_FILES
    )  # twice: upstreams take a file for each stream, too
    n_files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit != resource.RLIM_INFINITY:
        n_wanted = min(n_wanted, hard_limit)
    if n_files != resource.RLIM_INFINITY and n_files < n_wanted:
        with contextlib.suppress(ValueError, OSError):  # the system has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (n_wanted, hard_limit))
            n_files = n_wanted
    if n_files == resource.RLIM_INFINITY:
        return n_connections
    return max(1, min(n_connections, n_files - n_spare))


next_line_at: dict[str, float] = {}  # by message


def warn_rarely(message: str, *args: object) -> None:
    """Log what each of a thousand connections could cause, once in QUIET_S."""
    now = time.monotonic()
    if now >= next_line_at.get(message, 0):
        next_line_at[message] = now + QUIET_S
        log.warning(message, *args)


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio logs a traceback for each connection that it could not accept: python/cpython#151615."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        warn_rarely("no file is left for another connection: %s", error)
    else:
        loop.default_exception_handler(context)


# --- uvicorn, adapted ---------------------------------------------------------------------------------------


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: server.py gives open streams their last event before the stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(on_loop_error)
        await super().startup(sockets)
        for listener in sockets or ():  # asyncio has one number for both: Config.backlog
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drop clients that neither read nor leave, a second before uvicorn cancels their requests.

        It would log a traceback for each.
        """
        grace_s = self.config.timeout_graceful_shutdown or 0
        asyncio.get_running_loop().call_later(grace_s - 1, self.drop_all)
        await super().shutdown(sockets)

    def drop_all(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class BadHttp(ValueError):
    """What came is no HTTP request that can mean one thing only, or is too long for one."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


BAD_HTTP_ANSWER = (
    b"HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"x-request-id: %s\r\nConnection: close\r\n\r\n%s"
)
# Headers that say one thing: of two, a proxy could believe one and we the other (RFC 9110, section 5.3).
SINGLE_HEADERS = (
    b"host",
    b"authorization",
    b"content-type",
    b"content-encoding",
    b"origin",
    b"sec-websocket-key",
    b"sec-websocket-version",
)
# An offer of another protocol, whose body the parser would lose: Kludex/uvicorn#2722.
OTHER_UPGRADE = re.compile(rb"\r\nupgrade:(?!\s*websocket\s*\r\n)", re.IGNORECASE)
WEBSOCKET_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")  # 16 bytes: RFC 6455, section 4.2.1


class ReaderTimeout(asyncio.BaseProtocol):
    """Drops a connection whose client does not read.

    The transport calls pause_writing() when 64 KiB wait behind a full socket, and resume_writing() when most
    of them have left.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    reader_timeout: float  # seconds
    read_timer: asyncio.TimerHandle | None = None  # runs while writing is paused

    def pause_writing(self) -> None:
        super().pause_writing()
        self.read_timer = self.loop.call_later(self.reader_timeout, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_read_timer()

    def stop_read_timer(self) -> None:
        if self.read_timer:
            self.read_timer.cancel()

    def drop(self) -> None:
        """Reset the connection."""
        no_linger = struct.pack("ii", 1, 0)  # what the system has buffered is dropped too: man 7 socket
        connection = self.transport.get_extra_info("socket")
        if connection.fileno() >= 0:  # else it is lost already
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
            self.transport.abort()


class Protocol(ReaderTimeout, HttpToolsProtocol, asyncio.BufferedProtocol):
    """One connection, dropped when its client does not send a head or does not read.

    `cycle` is uvicorn's object for the newest request; `running` is the one that is being answered, and
    `pipeline` has those between, the newest first.
    """

    max_connections: int
    max_body_bytes: int
    idle: ClassVar["OrderedDict[Protocol, None]"]  # all without a request that has started, the longest first
    head_timer: asyncio.TimerHandle | None = None  # runs while what comes belongs to no running request
    running: RequestResponseCycle | None = None
    start: Callable[[], None] | None = None  # starts the request that has begun to come
    n_framing_bytes = 0  # that the request had so far, without its body
    n_headers = 0
    in_head = False  # else a header is a trailer
    is_deaf = False  # nothing more is read here
    received = b""  # what is being parsed
    read_buffer = bytearray(MAX_READ_BYTES)  # of all connections, for what one has read is parsed at once

    # --- its beginning and its end --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle[self] = None
        self.wait_for_head()
        if len(self.connections) > self.max_connections:
            longest_idle = next(iter(self.idle))
            longest_idle.drop()
            warn_rarely(
                "%d connections: one without a request gives way to each new one", self.max_connections
            )

    def wait_for_head(self) -> None:
        if self.head_timer is None:
            self.head_timer = self.loop.call_later(MAX_HEAD_S, self.drop)

    def stop_head_timer(self) -> None:
        if self.head_timer:
            self.head_timer.cancel()
        self.head_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn does not after a reset: the timer would keep all this
        self.idle.pop(self, None)
        self.stop_head_timer()
        self.stop_read_timer()
        self.pipeline.clear()
        if self.running:  # uvicorn has told the newest request
            self.running.disconnected = True
            self.running.message_event.set()
        self.start = None  # it, and what it starts, refer to this object
        self.cycle = None  # type: ignore[assignment]

    def drop(self) -> None:
        self.idle.pop(self, None)
        super().drop()

    def shutdown(self) -> None:
        """Stop: a request that is being answered ends, one that is not whole yet has not been accepted."""
        self.pipeline.clear()
        self.start = None
        if self.running and not self.running.more_body:
            self.running.keep_alive = False
        else:
            self.transport.close()

    # --- what comes -----------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.is_deaf:
            return
        data = bytes(memoryview(self.read_buffer)[:nbytes])
        if self.running is None:
            self.wait_for_head()
            head, end, rest = data.partition(b"\r\n\r\n")
            data = OTHER_UPGRADE.sub(b"\r\nx-upgrade:", head + end) + rest
        self.n_framing_bytes += len(data)
        self.received = data
        self.data_received(data)
        if self.n_framing_bytes > MAX_FRAMING_BYTES and not self.is_deaf:
            self.refuse(BadHttp(f"head, chunk sizes and trailers are more than {MAX_FRAMING_BYTES} bytes"))

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise BadHttp(f"more than {MAX_PIPELINED} requests wait for an answer")
        super().on_message_begin()
        self.n_headers = 0
        self.in_head = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_LINE:
            raise BadHttp(f"the URL is more than {MAX_LINE} bytes", HTTPStatus.REQUEST_URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.n_headers += 1
        if self.n_headers > MAX_HEADERS:
            raise BadHttp(f"there are more than {MAX_HEADERS} headers")
        if self.in_head:  # a trailer is not a header: RFC 9110, section 6.5.1
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.in_head = False
        self.check_head()
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        """True for a handshake that WebSocketProtocol accepts; other heads are answered as HTTP."""
        headers = dict(self.headers)
        lines = [self.url, *(name + value for name, value in self.headers)]
        return (
            super()._should_upgrade()
            and self.running is None
            and self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and headers.get(b"sec-websocket-version") == b"13"
            and WEBSOCKET_KEY.fullmatch(headers.get(b"sec-websocket-key", b"")) is not None
            and all(line.isascii() and len(line) <= MAX_LINE for line in lines)
        )

    def handle_websocket_upgrade(self) -> None:
        self.is_deaf = True  # from here on the connection is a WebSocketProtocol's
        self.stop_head_timer()
        self.idle.pop(self, None)
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        super().handle_websocket_upgrade()
        websocket = self.transport.get_protocol()
        assert isinstance(websocket, WebSocketProtocol)
        if not websocket.handshake_initiated:
            websocket.drop()  # the package has not understood the head, and says nothing
        websocket.data_received(self.received[upgrade.args[0] :])  # what came after the head

    def check_head(self) -> None:
        """Refuse what the parser lets through; raises BadHttp."""
        version = self.parser.get_http_version()
        names = [name for name, _ in self.headers]
        if self.url.count(b"&") >= MAX_QUERY:
            raise BadHttp(f"the query has more than {MAX_QUERY} parameters")
        if version not in ("1.0", "1.1"):
            raise BadHttp(f"expected HTTP/1.1, got HTTP/{version}")
        if self.parser.get_method() == b"CONNECT":
            raise BadHttp("this server is not a proxy")
        if version == "1.1" and b"host" not in names:  # RFC 9112, section 3.2
            raise BadHttp("the Host header is missing")
        if version == "1.0" and b"transfer-encoding" in names:  # RFC 9112, section 6.1
            raise BadHttp("HTTP/1.0 has no Transfer-Encoding")
        for name in SINGLE_HEADERS:
            if names.count(name) > 1:
                raise BadHttp(f"there are two {name.decode()} headers")

    def on_body(self, body: bytes) -> None:
        self.n_framing_bytes -= len(body)
        super().on_body(body)
        if len(self.cycle.body) > SMALL_BODY_BYTES:
            self.start_request()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.n_framing_bytes = 0
        self.start_request()

    # --- what is answered -----------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Keep a request whose head has come, and which uvicorn would start, for start_request()."""
        if cycle.scope["http_version"] == "1.0":
            app = partial(ended_by_closing, cycle, app)
        self.start = partial(super()._start_asgi_task, cycle, app)
        self.running = cycle
        n_announced = int(dict(cycle.scope["headers"]).get(b"content-length", 0))
        # A body that is too large is refused unread; one that is expected comes when it is asked for.
        if not cycle.more_body or n_announced > self.max_body_bytes or cycle.waiting_for_100_continue:
            self.start_request()

    def start_request(self) -> None:
        """Start the request that has come, unless it has started."""
        if self.start:
            self.start()
            self.start = None
            self.idle.pop(self, None)
            self.stop_head_timer()

    def on_response_complete(self) -> None:
        self.running = None
        super().on_response_complete()
        if self.running is None and not self.transport.is_closing():
            self.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser has raised for; it wraps what a callback raises."""
        error = sys.exception()
        assert error
        self.refuse(error.__context__ or error)

    def refuse(self, error: BaseException) -> None:
        """Answer what is not HTTP with an error object, after the answers to the requests before it."""
        self.is_deaf = True
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()  # it is the one that is not HTTP
        before = self.pipeline[0][0] if self.pipeline else self.running
        if before and not before.more_body:
            before.keep_alive = False
            return
        if before and before.response_started:
            self.transport.abort()
            return
        self.start = None
        if before:
            before.disconnected = True  # so that the application does not answer it too
            before.message_event.set()
        status = error.status if isinstance(error, BadHttp) else HTTPStatus.BAD_REQUEST
        message = f"Invalid HTTP request received: {error}."
        request_id = new_id("req")
        token = REQUEST_ID.set(request_id)
        log.info("%d: %s", status, message)
        REQUEST_ID.reset(token)
        body = json.dumps(error_body(status, message, code="invalid_http")).encode()
        first_line = (status, status.phrase.encode())
        self.transport.write(BAD_HTTP_ANSWER % (*first_line, len(body), request_id.encode(), body))
        self.transport.write_eof()  # without close(), at which what the client still sends would reset it
        self.loop.call_later(LINGER_S, self.transport.abort)


async def ended_by_closing(
    cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a client of HTTP/1.0, which knows no chunks: RFC 9112, section 6.1.

    uvicorn sends a body as it is if it expects each of its parts to be as long as it is.
    """
    cycle.chunked_encoding = False

    async def send_as_it_is(message: Message) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_as_it_is)


class FrameReader(StreamReader):
    """What the package's parser reads frames from. Of a payload that is too large nothing is kept."""

    def __init__(self, buffer: bytearray, max_bytes: int) -> None:
        """`buffer` is that of the reader before: the parser may still be waiting for it to fill."""
        super().__init__()
        self.buffer = buffer
        self.max_bytes = max_bytes
        self.n_dropped = 0  # bytes of the message that is coming

    def read_exact(self, n: int) -> Generator[None, None, bytes]:
        if n <= self.max_bytes:
            return (yield from super().read_exact(n))
        while n:
            n_now = min(n, len(self.buffer))
            del self.buffer[:n_now]
            self.n_dropped += n_now
            n -= n_now
            if n:
                yield
        return b""


class WebSocketProtocol(ReaderTimeout, WebSocketsSansIOProtocol, asyncio.BufferedProtocol):
    """One WebSocket behind its handshake, dropped when its client does not read.

    What comes is parsed frame by frame, and no further than to the end of a message: the next one is looked
    at when the application asks for it. A message must be whole in time, as a body must, and come in few
    fragments. What has come of it is counted by the application, in scope["hold_message"], until that
    asks for the next one. The application closes the connection at a stop.

    A message above max_body_bytes is dropped as it comes. The application then gets {"type":
    "websocket.receive", "n_bytes": its size} in its place.

    No application asks for pings and pongs, so few of them may come between two messages, or between two
    pings of our own: a client that is idle may ping for ever.

    Parsing has a cost, in bytes. A connection that has brought more than TURN_COST waits for its turn behind
    Brake. The end of a frame costs as much as all of it, for it is unmasked there, and the end of a message
    as much as all its frames, for they are joined and decoded: many that end at once do so one by one.
    """

    message_timer: asyncio.TimerHandle | None = None  # runs while a message is not whole
    message_began_at = 0.0  # by the event loop's clock
    is_braked = False  # it waits for its turn behind Brake
    is_deaf = False  # the client has been told why the connection ends
    n_frame_bytes_left = 0  # of the frame that is being parsed
    ends_message = False  # that frame does
    cost = 0  # of what was parsed since it last waited behind Brake
    n_pings = 0  # and pongs, since the application asked for a message, or we sent a ping
    n_whole_bytes = 0  # of the messages that are whole, and with the application
    brake: "Brake"  # of all connections
    max_body_bytes: int
    reader: FrameReader
    read_buffer = bytearray(MAX_READ_BYTES)  # of all connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.close_timeout = LINGER_S  # for the client's answer to our close
        self.unparsed = bytearray()  # what has come

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self.read_buffer)[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self.is_deaf:
            return
        self.unparsed += data
        self.parse()

    def parse(self, is_its_turn: bool = False) -> None:
        """Parse what has come, and read on: see is_busy()."""
        while not self.is_deaf and not self.is_busy():
            piece = self.next_piece()
            if not piece:
                break
            cost = self.cost_of(piece)
            if self.cost + cost > TURN_COST and not is_its_turn:
                self.brake.add(self)
                break
            is_its_turn = False
            self.cost += cost
            self.n_frame_bytes_left -= len(piece)
            del self.unparsed[: len(piece)]
            super().data_received(piece)
            self.drop_what_is_too_large()
            if len(self.frames) > MAX_FRAGMENTS:
                expected = f"expected a message of at most {MAX_FRAGMENTS} fragments"
                self.fail(CloseCode.POLICY_VIOLATION, expected)
            if self.n_pings > MAX_PINGS and not self.is_deaf:
                expected = f"expected at most {MAX_PINGS} pings between two messages"
                self.fail(CloseCode.POLICY_VIOLATION, expected)
        if self.is_deaf:
            self.unparsed.clear()
        elif self.handshake_initiated and not self.close_sent:
            self.hold_message()
        self.pace()

    def next_piece(self) -> bytes:
        """What has come of the next frame and is not parsed; b"" where its head is not whole yet."""
        if not self.handshake_initiated:
            self.n_frame_bytes_left = len(self.unparsed)
        elif not self.n_frame_bytes_left:
            self.n_frame_bytes_left = frame_bytes(self.unparsed)
            first_byte = self.unparsed[0] if self.unparsed else 0
            self.ends_message = first_byte & (FIN | CONTROL) == FIN
        return bytes(memoryview(self.unparsed)[: self.n_frame_bytes_left])

    def cost_of(self, piece: bytes) -> int:
        if len(piece) < self.n_frame_bytes_left:
            return len(piece)
        cost: int = FRAME_COST + len(piece) + len(self.conn.reader.buffer)
        if self.ends_message:
            cost += self.conn.cur_size or 0
        return cost

    def handle_events(self) -> None:
        frames = [event for event in self.conn.events if isinstance(event, Frame)]
        super().handle_events()
        for frame in frames:
            frame.data = b""  # which the package's parser would hold until the next frame comes

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        self.reader = FrameReader(self.conn.reader.buffer, self.max_body_bytes)
        self.conn.reader = self.reader

    def handle_ping(self) -> None:
        self.n_pings += 1
        # An earlier frame of the same piece may have ended the connection, and each write to one that was
        # reset is a line in asyncio's log.
        if not self.is_deaf and not self.transport.is_closing():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        self.n_pings += 1
        super().handle_pong(event)

    def send_keepalive_ping(self) -> None:
        self.n_pings = 0
        super().send_keepalive_ping()

    def n_kept_bytes(self) -> int:
        """Bytes of the fragments that have come of a message and were not dropped."""
        return sum(len(data) for data in self.frames)

    def drop_what_is_too_large(self) -> None:
        """Drop the fragments of a message that is above the limit; close for one that is far above."""
        if not self.handshake_initiated:
            return
        n_bytes = self.reader.n_dropped + self.n_kept_bytes()
        if n_bytes > self.max_body_bytes:
            self.reader.n_dropped = n_bytes
            self.frames[:] = [b""] * len(self.frames)
        if n_bytes > MAX_DROPPED * self.max_body_bytes:
            expected = f"expected a message of at most {self.max_body_bytes} bytes"
            self.fail(CloseCode.MESSAGE_TOO_BIG, expected)

    def owner(self) -> str:
        """Who has sent the handshake; "" before that is known."""
        scope: dict[str, Any] = {**self.scope}
        return scope.get("owner") or ""

    def is_busy(self) -> bool:
        """A message is with the application, or others' frames come first, or the client does not read.

        Else the answers to its pings would pile up.
        """
        return self.read_paused or self.is_braked or not self.writable.is_set()

    def pace(self) -> None:
        """Read on, or do not. What nobody looks at is always read."""
        if self.is_busy() and not self.is_deaf:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def hold_message(self) -> None:
        """Count what has come of messages, and time the one that is not whole yet."""
        scope: dict[str, Any] = {**self.scope}
        hold = scope.get("hold_message")  # none before the application has let the client in
        if not hold:
            return
        n_open_bytes = self.n_open_bytes()
        is_whole = self.n_whole_bytes > 0
        give_way = None if is_whole else self.drop
        try:
            hold(self.n_whole_bytes + n_open_bytes, give_way)
        except BadInput as error:
            if not is_whole:  # else its turn is refused
                self.fail(CloseCode.TRY_AGAIN_LATER, error.message)
                return
        if is_whole or not n_open_bytes:
            self.stop_message_timer()
        elif not self.message_timer:
            self.message_began_at = self.loop.time()
            self.message_timer = self.loop.call_later(MAX_BODY_S, self.on_message_timer)

    def n_open_bytes(self) -> int:
        """What has come of a message that is not whole."""
        return len(self.unparsed) + len(self.conn.reader.buffer) + self.n_kept_bytes()

    def on_message_timer(self) -> None:
        """Drop a connection whose message is late: rule 2 of admission.py."""
        n_bytes = self.reader.n_dropped + self.n_open_bytes()
        deadline = self.message_began_at + MAX_BODY_S + n_bytes / BODY_BYTES_A_S
        if deadline > self.loop.time():
            self.message_timer = self.loop.call_at(deadline, self.on_message_timer)
        else:
            self.drop()

    async def receive(self) -> Any:
        """The next message; the application has done with those before."""
        if self.queue.empty():
            self.n_whole_bytes = 0
            self.n_pings = 0
            self.read_paused = False
            self.parse()
        message = await super().receive()
        self.read_paused = True
        self.pace()
        return message

    def send_receive_event_to_app(self) -> None:
        """uvicorn would log a traceback of what is no UTF-8."""
        data = b"".join(self.frames)
        self.frames = []
        n_bytes = self.reader.n_dropped + len(data)
        self.reader.n_dropped = 0
        if self.close_sent:  # the application asks for no more
            return
        self.read_paused = True
        if n_bytes > self.max_body_bytes:
            dropped: Any = {"type": "websocket.receive", "n_bytes": n_bytes}
            self.queue.put_nowait(dropped)
            return
        self.n_whole_bytes += len(data)
        if self.curr_msg_data_type == "bytes":
            self.queue.put_nowait({"type": "websocket.receive", "bytes": data})
            return
        try:
            self.queue.put_nowait({"type": "websocket.receive", "text": data.decode()})
        except UnicodeDecodeError as error:
            self.fail(CloseCode.INVALID_DATA, f"expected UTF-8: {error.reason}")

    def stop_message_timer(self) -> None:
        if self.message_timer:
            self.message_timer.cancel()
        self.message_timer = None

    def fail(self, code: CloseCode, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        """Close the connection for what has come: the code of the close is in what is to be sent.

        The client may be sending still. If nobody read that, the system would reset the connection, and the
        client could lose the code.
        """
        self.is_deaf = True
        self.disconnected = True  # for the application: uvicorn tells it so when it sends
        if not self.handshake_complete:  # the client did not wait for it: a close would come before its head
            self.drop()
            return
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.ABNORMAL_CLOSURE})
        self.transport.write_eof()
        self.pace()
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # else uvicorn logs an error for each refusal
        elif message["type"] == "websocket.close":
            self.parse()  # the client's own close may have come already

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.is_deaf = True
        self.stop_message_timer()
        self.stop_read_timer()
        # The package's connection refers to itself: what has come would stay until a collection.
        self.conn.reader.discard()
        self.unparsed.clear()
        self.frames.clear()

    def shutdown(self) -> None:
        """The server stops: the application, which knows it, closes the connection behind its turns."""

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:  # else a message is with the application, and receive() parses on
            self.parse()


def frame_bytes(data: bytearray) -> int:
    """The length of the frame that begins here, with its head; 0 where that is not whole yet.

    RFC 6455, section 5.2.
    """
    if len(data) < 2:
        return 0
    is_masked, n_payload_bytes = divmod(data[1], 128)
    n_head_bytes = 2
    if n_payload_bytes >= 126:
        n_head_bytes = 4 if n_payload_bytes == 126 else 10
        n_payload_bytes = int.from_bytes(data[2:n_head_bytes], "big")
    n_head_bytes += 4 * is_masked
    if len(data) < n_head_bytes:
        return 0
    return n_head_bytes + n_payload_bytes


class Brake:
    """Lets connections that have brought many frames, or bytes, go on: one after another, by turns of owners.

    All of them together get a fifth of the event loop, and 120 MB/s. Of an owner's large frames the one that
    was begun first is whole first: were all of them to grow together, they would be held together, too.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[WebSocketProtocol]] = {}  # by owner; whose turn is next comes first
        self._is_waiting = False

    def add(self, connection: WebSocketProtocol) -> None:
        connection.is_braked = True
        connection.cost = 0
        waiting = self._waiting.setdefault(connection.owner(), deque())
        if len(connection.conn.reader.buffer) > TURN_COST:  # it has had a turn for a part of a frame
            waiting.appendleft(connection)
        else:
            waiting.append(connection)
        if not self._is_waiting:
            self._wait()

    def _wait(self) -> None:
        self._is_waiting = True
        asyncio.get_running_loop().call_later(BRAKE_S, self._release)

    def _release(self) -> None:
        self._is_waiting = False
        while self._waiting:
            connection = self._next()
            connection.is_braked = False
            if not connection.is_deaf:  # who has gone takes no turn
                connection.parse(is_its_turn=True)  # it may join the others again
                break
        if self._waiting and not self._is_waiting:
            self._wait()

    def _next(self) -> WebSocketProtocol:
        owner = next(iter(self._waiting))
        connections = self._waiting.pop(owner)
        connection = connections.popleft()
        if connections:
            self._waiting[owner] = connections  # behind the others
        return connection


def protocol(
    seconds: float, n_connections: int = MAX_IDLE, n_body_bytes: int = MAX_BODY_BYTES
) -> type[Protocol]:
    """Protocol with these limits: the time to read, how many connections there may be, --max-body."""

    class LimitedProtocol(Protocol):
        reader_timeout = seconds
        max_connections = n_connections
        max_body_bytes = n_body_bytes
        idle: ClassVar[OrderedDict[Protocol, None]] = OrderedDict()

    return LimitedProtocol


def websocket_protocol(seconds: float, n_body_bytes: int = MAX_BODY_BYTES) -> type[WebSocketProtocol]:
    class LimitedWebSocketProtocol(WebSocketProtocol):
        reader_timeout = seconds
        max_body_bytes = n_body_bytes
        brake = Brake()

    return LimitedWebSocketProtocol


def http_config(app: ASGIApp, args: argparse.Namespace) -> uvicorn.Config:
    stop_s = math.ceil(args.shutdown_grace) + STALLED_S + 1  # see HttpServer.shutdown()
    return uvicorn.Config(
        app,
        http=protocol(args.reader_timeout, max_connections(args.max_streams), args.max_body),
        ws=websocket_protocol(args.reader_timeout, args.max_body),
        ws_max_size=MAX_DROPPED * args.max_body,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=args.reader_timeout,
        ws_per_message_deflate=False,  # a few bytes could unpack to megabytes
        backlog=ACCEPTED_A_TURN,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=stop_s,  # for clients that neither read nor leave
    )
