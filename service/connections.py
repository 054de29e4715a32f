"""HTTP/1.1 and WebSockets: the listening socket, and limits on what a client may send and how slowly.

    host, port --bind()--> listening socket
    ASGI application, options --http_config()--> uvicorn.Config --HttpServer--> connections, each a Protocol
    bytes of a connection --httptools--> callbacks of Protocol --uvicorn--> ASGI messages
    a handshake --uvicorn--> WebSocketProtocol --websockets--> frames --> ASGI messages

uvicorn speaks both protocols. What stands here are limits, put where its classes call themselves. So these
classes know names of uvicorn's that are not documented: pyproject.toml allows it no later minor version.

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
   ready, and of a WebSocket it reads few bytes, for the smallest frame has six.
6. What comes over a WebSocket waits for the application, which decides when the next part of it is read.
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
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame, Opcode

from request.body import SMALL_BODY_BYTES
from request.ids import REQUEST_ID, new_id
from request.refusals import error_body
from service.logs import Rarely

log = logging.getLogger("connections")
P = TypeVar("P")

MAX_READ_BYTES = 64 * 1024  # of a connection in one turn of the event loop: in chunks of a byte, 6 ms
MAX_FRAMES_BYTES = 4 * 1024  # of a WebSocket in one turn: 680 of the smallest frames, 2 ms
PART_BYTES = 128 * 1024  # of a message, after which the application says when to read on
MAX_FRAGMENTS = 1024  # of a message
MAX_LARGEST = 8  # times --max-body: a larger message may never end, and closes the connection
MAX_PINGS = 64  # and pongs, between two messages, or two pings of our own
# Bytes of the first line of a request but for its method: RFC 9112, section 3, demands to take so many. The
# package `websockets` takes 8192, for each line of a handshake.
MAX_LINE = 8000
MAX_QUERY = 100  # parameters: to read one takes as long as to read a kilobyte of a body
PING_INTERVAL_S = 20  # of a WebSocket
MAX_FRAMING_BYTES = 64 * 1024  # of a request, all but its body: head, chunk sizes, trailers
MAX_HEADERS = 100  # of a request, as Apache has it
MAX_HEAD_S = 60  # from the first moment in which a request may come until it starts
KEEP_ALIVE_S = 75  # of an idle connection, nginx's default: clients that reuse one drop it before we do
LINGER_S = 2  # for what a client still sends when it has been told why its connection ends
MAX_PIPELINED = 16  # requests of a connection that wait for the answer to the one before
SEND_BUFFER_BYTES = 128 * 1024  # of a connection; Linux takes twice as many
# Likewise, if the system allows as much, and it does not grow by itself any more: a client that is 100 ms
# away, there and back, sends 2 MB/s.
RECEIVE_BUFFER_BYTES = 256 * 1024
STALLED_S = 2  # what clients get at a stop to read their last event, after the grace

BACKLOG = 4096  # connections that the system holds for us; after that a client tries again in a second
ACCEPTED_A_TURN = 16  # of the event loop: what a request does takes half a millisecond a turn
READY_A_TURN = 16  # connections that are read or written, for the same reason
MAX_LOOKUPS = 8  # of names, at once: of upstreams
MAX_IDLE = 1024  # connections beyond --max-streams: idle ones, bodies on their way, short requests
OWN_FILES = 80  # the store, the model, pipes, logs, connections that are accepted to be dropped
MAX_FILES = 10240  # macOS gives a process no more


def bind(host: str, port: int) -> socket.socket:
    """Return the listening socket; raises OSError.

    It is made before the model is loaded: a port in use is known at once, and early clients wait.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only if TCP is named does asyncio turn Nagle's algorithm off: events would wait for their ACKs.
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

    def __init__(self) -> None:
        super().__init__(FairSelector())
        self._lookups = ThreadPoolExecutor(MAX_LOOKUPS, "lookup")

    async def getaddrinfo(self, host: Any, port: Any, **hints: int) -> list[Any]:
        return await self.run_in_executor(self._lookups, partial(socket.getaddrinfo, host, port, **hints))

    def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)
        super().close()


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
    """Return how many connections there may be at once; raise the limit of files as far as it may be."""
    n_connections = max_streams + MAX_IDLE
    try:
        import resource
    except ImportError:  # Windows, where a socket is not a file
        return n_connections
    n_files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_wanted = hard_limit if hard_limit != resource.RLIM_INFINITY else MAX_FILES
    if n_files != resource.RLIM_INFINITY and n_files < n_wanted:
        with contextlib.suppress(ValueError, OSError):  # the system has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (n_wanted, hard_limit))
            n_files = n_wanted
    if n_files == resource.RLIM_INFINITY:
        return n_connections
    return max(1, min(n_connections, n_files - OWN_FILES))


is_news = Rarely()


def warn_rarely(message: str, *args: object) -> None:
    """Log what each of a thousand connections could cause, once a minute."""
    if is_news(message):
        log.warning(message, *args)


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio logs a traceback for each connection that it could not accept: python/cpython#151615."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        warn_rarely("no file is left for another connection: %s", error)
    else:
        loop.default_exception_handler(context)


# --- uvicorn, with limits -----------------------------------------------------------------------------------


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


class Limited(asyncio.BufferedProtocol):
    """Reads at most a buffer in a turn of the event loop, and drops a connection whose client does not read.

    The transport calls pause_writing() when 64 KiB wait for a full socket, and resume_writing() when most
    of them have left.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    read_buffer: bytearray  # of all connections, for what one has read is parsed at once
    reader_timeout: float  # seconds
    read_timer: asyncio.TimerHandle | None = None  # runs while writing is paused

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self.read_buffer)[:nbytes]))

    def data_received(self, data: bytes) -> None:
        raise NotImplementedError

    def eof_received(self) -> None:
        """A client that ends its side has left: the transport closes."""

    def pause_writing(self) -> None:
        super().pause_writing()
        self.read_timer = self.loop.call_later(self.reader_timeout, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
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


# --- HTTP ---------------------------------------------------------------------------------------------------


class BadHttp(ValueError):
    """What came is not an HTTP request that can mean one thing only, or is too long for one."""

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
# An offer of another protocol, whose body the parser would lose: Kludex/uvicorn#2722. It gets another name of
# the same length. In a body that is JSON it cannot stand: a string there has no raw line break.
OTHER_UPGRADE = re.compile(rb"\r\nupgrade:(?!\s*websocket\s*\r\n)", re.IGNORECASE)
NO_UPGRADE = b"\r\nignored:"
WEBSOCKET_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")  # 16 bytes: RFC 6455, section 4.2.1


class Protocol(Limited, HttpToolsProtocol):
    """One connection, dropped when its client does not send a head or does not read.

    `cycle` is uvicorn's object for the newest request; `running` is the one that is being answered, and
    `pipeline` has those between, the newest first.
    """

    read_buffer = bytearray(MAX_READ_BYTES)
    max_connections: int
    max_body_bytes: int
    idle: "OrderedDict[Protocol, None]"  # all without a request that has started, the longest first
    head_timer: asyncio.TimerHandle | None = None  # runs while what comes belongs to no running request
    running: RequestResponseCycle | None = None
    start: Callable[[], None] | None = None  # starts the request that has begun to come
    n_framing_bytes = 0  # that the request had so far, without its body
    n_headers = 0
    in_head = False  # else a header is a trailer
    is_deaf = False  # nothing more is read here
    received = b""  # what is being parsed

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

    def data_received(self, data: bytes) -> None:
        if self.is_deaf:
            return
        if self.running is None:
            self.wait_for_head()
        self.received = OTHER_UPGRADE.sub(NO_UPGRADE, data)
        self.n_framing_bytes += len(data)
        HttpToolsProtocol.data_received(self, self.received)
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
        """Refuse what the parser lets through; raises BadHttp."""
        self.in_head = False
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
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.n_framing_bytes -= len(body)
        super().on_body(body)
        if len(self.cycle.body) > SMALL_BODY_BYTES:
            self.start_request()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.n_framing_bytes = 0
        self.start_request()

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
        after_head = self.received[upgrade.args[0] :]
        super().handle_websocket_upgrade()
        websocket = self.transport.get_protocol()
        assert isinstance(websocket, WebSocketProtocol)
        if websocket.handshake_initiated and len(after_head) <= MAX_FRAMES_BYTES:
            websocket.data_received(after_head)  # a client should wait: RFC 6455, section 4.1
        else:
            websocket.drop()  # or the package has not understood the head, and says nothing

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


# --- WebSockets ---------------------------------------------------------------------------------------------


class WebSocketProtocol(Limited, WebSocketsSansIOProtocol):
    """One WebSocket after its handshake, dropped when its client does not read.

    The application gets a message as its bytes. Of a large one it is told before, each time another part has
    come, how much of it there is: it counts them, and lets clients go on by turns. For meanwhile nothing is
    read, until it asks for the next message or part. The application closes the connection at a stop.

        {"type": "websocket.receive", "n_bytes": 131326}
        {"type": "websocket.receive", "n_bytes": 266494}
        {"type": "websocket.receive", "bytes": b"...", "is_text": True}
    """

    read_buffer = bytearray(MAX_FRAMES_BYTES)
    n_told = 0  # bytes of the message that is coming, of which the application knows
    n_pings = 0  # and pongs, since the last message or part, or our own ping

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.close_timeout = LINGER_S  # for the client's answer to our close

    def data_received(self, data: bytes) -> None:
        if self.disconnected:  # it has been told why
            return
        WebSocketsSansIOProtocol.data_received(self, data)
        n_bytes = len(self.conn.reader.buffer) + (self.conn.cur_size or 0)
        if n_bytes > self.n_told + PART_BYTES:
            self.n_told = n_bytes
            self.tell({"n_bytes": n_bytes})

    def tell(self, message: dict[str, Any]) -> None:
        """Have the application receive a message or a part of one, and read no more before it has."""
        self.n_pings = 0
        if self.close_sent:  # it asks for no more
            return
        received: Any = {"type": "websocket.receive"} | message
        self.queue.put_nowait(received)
        self.read_paused = True
        self.transport.pause_reading()

    def send_receive_event_to_app(self) -> None:
        message = {"bytes": b"".join(self.frames), "is_text": self.curr_msg_data_type == "text"}
        self.frames = []
        self.n_told = 0
        self.tell(message)

    def handle_events(self) -> None:
        frames = [event for event in self.conn.events if isinstance(event, Frame)]
        self.n_pings += sum(frame.opcode in (Opcode.PING, Opcode.PONG) for frame in frames)
        if not self.transport.is_closing():  # after a reset each pong would be a line in asyncio's log
            super().handle_events()
        for frame in frames:
            frame.data = b""  # which the package's parser would hold until the next frame comes
        if self.n_pings > MAX_PINGS:
            self.refuse(f"expected at most {MAX_PINGS} pings between two messages")
        elif len(self.frames) > MAX_FRAGMENTS:
            self.refuse(f"expected a message of at most {MAX_FRAGMENTS} fragments")

    def send_keepalive_ping(self) -> None:
        self.n_pings = 0  # a client that is idle may ping for ever
        super().send_keepalive_ping()

    def refuse(self, why: str) -> None:
        self.conn.fail(CloseCode.POLICY_VIOLATION, why)
        self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        """Close the connection for what has come: the code of the close is in what is to be sent.

        The client may be sending still. If that were not read, the system would reset the connection, and the
        client could lose the code.
        """
        self.disconnected = True  # for the application: uvicorn tells it so when it sends
        if not self.handshake_complete:  # the client did not wait for it: a close would come before its head
            self.drop()
            return
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.ABNORMAL_CLOSURE})
        self.transport.write_eof()
        self.transport.resume_reading()
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # else uvicorn logs an error for each refusal

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # The package's connection refers to itself: what has come would stay until a collection.
        self.conn.reader.discard()
        self.frames.clear()

    def shutdown(self) -> None:
        """Leave it to the application, which closes the connection after its turns."""


# --- the whole ----------------------------------------------------------------------------------------------


def limited(protocol: type[P], **limits: Any) -> type[P]:
    """Return a protocol with the limits of one server."""
    return type("LimitedProtocol", (protocol,), limits)


def http_config(app: ASGIApp, args: argparse.Namespace) -> uvicorn.Config:
    n_connections = max_connections(args.max_streams)
    limits = {"max_connections": n_connections, "max_body_bytes": args.max_body, "idle": OrderedDict()}
    stop_s = math.ceil(args.shutdown_grace) + STALLED_S + 1  # see HttpServer.shutdown()
    return uvicorn.Config(
        app,
        http=limited(Protocol, reader_timeout=args.reader_timeout, **limits),
        ws=limited(WebSocketProtocol, reader_timeout=args.reader_timeout),
        ws_max_size=MAX_LARGEST * args.max_body,
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
