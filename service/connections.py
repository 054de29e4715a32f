"""HTTP/1.1 and WebSockets: the listening socket, and limits on what a client may send and how slowly.

    host, port --bind()--> listening socket
    ASGI application, options --http_config()--> uvicorn.Config --HttpServer--> connections, each a Protocol
    bytes of a connection --one request at a time--> httptools --callbacks--> uvicorn --> ASGI messages
    a handshake --uvicorn--> WebSocketProtocol --websockets--> frames --> ASGI messages

uvicorn speaks both protocols. What stands here are limits, put where its classes call themselves. So these
classes know names of uvicorn's that are not documented: pyproject.toml allows it no later minor version.

The life of a connection, with two requests that come at once ("<" is from the client):

    < head of A, half of its body   A has begun; the connection is idle, and its timer runs
    < the rest of A, and B          A is whole and starts as a task; B is held, and not parsed yet
    > answer to A                   the connection is idle, and its timer runs; B is parsed, and starts

Authority: https://www.uvicorn.org/settings/; RFC 9112; the parser is llhttp, as Node.js has it. RFC 6455 for
WebSockets, which the package `websockets` speaks.

Rules of this file:
1. A request must start within KEEP_ALIVE_S of the answer before it. It starts when it is whole, or if its
   body is large. And a client must read what it gets within --reader-timeout.
2. Bytes that are not HTTP, or could mean two requests (RFC 9112, section 11.2), are answered with an error.
3. Requests may be pipelined (RFC 9112, section 9.3.2): each is parsed when the one before it is answered. A
   client that closes its connection, or ends its side of it, has left.
4. Connections never take the last file descriptors: the one that was longest without a request, or with a
   part of one, gives way.
5. A turn of the event loop is short: it accepts, reads and writes a few connections, even if thousands are
   ready, and of a WebSocket it reads few bytes, for the smallest frame has six.
6. What comes over a WebSocket waits for the application, which decides when the next part of it is read.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import re
import resource
import selectors
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from request.body import SMALL_BODY_BYTES
from request.ids import REQUEST_ID, new_id
from request.refusals import error_body

log = logging.getLogger("connections")

MAX_READ_BYTES = 64 * 1024  # of a connection in one turn of the event loop: in chunks of a byte, 6 ms
MAX_FRAMES_BYTES = 4 * 1024  # of a WebSocket in one turn: 680 of the smallest frames, 2 ms
PIECE_BYTES = 2048  # of those, after which we look at what has come
PART_BYTES = 128 * 1024  # of a message, after which the application says when to read on
MAX_LARGEST = 8  # times --max-body: a larger message may never end, and closes the connection
SMALL_FRAME_BYTES = 128  # a turn reads few frames that are larger
MAX_SMALL_FRAMES = 64  # between two messages or parts, or two pings of our own
# Bytes of the first line of a request but for its method: RFC 9112, section 3, demands to take so many. The
# package `websockets` takes 8192, for each line of a handshake.
MAX_LINE = 8000
MAX_QUERY = 100  # parameters: to read one takes as long as to read a kilobyte of a body
PING_INTERVAL_S = 20  # of a WebSocket
MAX_FRAMING_BYTES = 64 * 1024  # of a request, all but its body: head, chunk sizes, trailers
MAX_HEADERS = 100  # of a request, as Apache has it
KEEP_ALIVE_S = 75  # nginx's default: clients that reuse a connection drop it before we do
MAX_PIPELINED = 16  # requests of a connection that wait for the answer to the one before
LINGER_S = 2  # for what a client still sends when it has been told why its connection ends
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


class Listener(socket.socket):
    """A listening socket. asyncio has one number for what waits here and what it accepts in a turn."""

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
    # And as much of what we do not read yet.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
    try:
        listener.bind((host, port))
        listener.listen()  # a port that is only bound could be bound again
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen on {host} port {port}: {reason}") from error
    return listener


def max_connections(max_streams: int) -> int:
    """Return how many connections there may be at once, and let this process have files for as many.

    Upstreams take as many files as clients do.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_files = 2 * (max_streams + MAX_IDLE) + OWN_FILES
    if hard_limit != resource.RLIM_INFINITY:
        n_files = min(n_files, hard_limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, hard_limit))
    return max(1, (n_files - OWN_FILES) // 2)


# --- turns of the event loop --------------------------------------------------------------------------------

LOOKUPS = ThreadPoolExecutor(MAX_LOOKUPS, "lookup")


class EventLoop(asyncio.SelectorEventLoop):
    """Looks names up in threads of its own: one may take half a minute, and requests have few."""

    def __init__(self) -> None:
        super().__init__(FairSelector())

    async def getaddrinfo(self, host: Any, port: Any, **hints: int) -> list[Any]:
        return await self.run_in_executor(LOOKUPS, partial(socket.getaddrinfo, host, port, **hints))


class FairSelector(selectors.DefaultSelector):
    """Tells of a few ready files at a time, by turns: a thousand of them take many turns of the loop."""

    _start = 0  # of the next few

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        self._start = (self._start + READY_A_TURN) % max(len(ready), 1)
        return [*ready[self._start :], *ready[: self._start]][:READY_A_TURN]


# --- uvicorn, with limits -----------------------------------------------------------------------------------


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: server.py gives open streams their last event before the stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Limited(asyncio.BufferedProtocol):
    """Reads at most a buffer in a turn of the event loop, and drops a connection whose client does not read.

    The transport calls pause_writing() when 64 KiB wait for a full socket, and resume_writing() when most
    of them have left.
    """

    config: uvicorn.Config
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    read_buffer: memoryview  # of all connections, for what one has read is parsed at once
    reader_timeout: float  # seconds
    data_received: Any
    read_timer: asyncio.TimerHandle | None = None  # runs while writing is paused

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self.read_buffer[:nbytes]))

    def eof_received(self) -> None:
        """A client that ends its side has left: the transport closes."""

    def pause_writing(self) -> None:
        super().pause_writing()
        self.read_timer = self.loop.call_later(self.reader_timeout, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.read_timer:
            self.read_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(None)  # with an error uvicorn would keep its timer, and with that all this
        self.resume_writing()

    def shutdown(self) -> None:
        """At a stop, drop a client that does not leave before uvicorn cancels its request: it logs that.

        The application itself closes WebSockets, after their turns.
        """
        stop_s = self.config.timeout_graceful_shutdown or 0
        self.loop.call_later(stop_s - 1, self.drop)

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

    status = HTTPStatus.BAD_REQUEST


class LongUrl(BadHttp):
    status = HTTPStatus.REQUEST_URI_TOO_LONG


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
WEBSOCKET_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")  # 16 bytes: RFC 6455, section 4.2.1
# Each head ends with one, and so does each body in chunks.
BLANK_LINE = b"\r\n\r\n"


class Protocol(Limited, HttpToolsProtocol):
    """One connection. `cycle` is uvicorn's object for its newest request: the parser gets one at a time."""

    read_buffer = memoryview(bytearray(MAX_READ_BYTES))
    max_connections: int
    idle: "OrderedDict[Protocol, None]"  # all without a request that has started, the longest first
    start: Callable[[], None] | None = None  # starts the request that has begun to come
    n_body_left = 0  # bytes of its body that are still to come, if it has said how many
    n_framing_bytes = 0  # that the request had so far, without its body
    n_pipelined = 0  # requests that have been answered since something has come
    is_deaf = False  # nothing more is parsed here

    # --- its beginning and its end --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.held = bytearray()  # what is not parsed yet
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        self.idle[self] = None
        if len(self.connections) > self.max_connections:
            longest_idle, _ = self.idle.popitem(last=False)
            longest_idle.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.idle.pop(self, None)
        self.start = None  # it, and the request, refer to this object
        self.cycle = None  # type: ignore[assignment]

    def shutdown(self) -> None:
        """Stop: a request that is being answered ends, one that is not whole yet has not been accepted."""
        super().shutdown()
        HttpToolsProtocol.shutdown(self)
        if self.cycle and self.cycle.more_body:
            self.transport.close()

    # --- what comes -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.is_deaf:
            return
        self.held += data
        if data:
            self.n_pipelined = 0
        while piece := self.next_piece():
            self.parse(piece)
        if len(self.held) > MAX_READ_BYTES:
            self.flow.pause_reading()

    def next_piece(self) -> bytes:
        """Return bytes that end where a request does, or before; none while a request is being answered."""
        is_answering = self.cycle and not (self.cycle.more_body or self.cycle.response_complete)
        if is_answering or self.is_deaf or self.transport.is_closing():
            return b""
        end = self.held.find(BLANK_LINE) + len(BLANK_LINE)
        if self.n_body_left:
            end = min(self.n_body_left, len(self.held))
            self.n_body_left -= end
        elif end < len(BLANK_LINE):  # there is none, but the beginning of one may have come
            end = len(self.held.rstrip(BLANK_LINE))
        piece = bytes(self.held[:end])
        del self.held[:end]
        return piece

    def parse(self, piece: bytes) -> None:
        self.n_framing_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
            if self.n_framing_bytes > MAX_FRAMING_BYTES:
                raise BadHttp(f"head, chunk sizes and trailers are more than {MAX_FRAMING_BYTES} bytes")
        except httptools.HttpParserUpgrade:
            self.upgrade()
        except (httptools.HttpParserError, BadHttp) as error:
            self.refuse(error.__context__ or error)  # the parser wraps what a callback raises

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_LINE:
            raise LongUrl(f"the URL is more than {MAX_LINE} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise BadHttp(f"there are more than {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        """Refuse what the parser lets through; raises BadHttp."""
        version = self.parser.get_http_version()
        names = [name for name, _ in self.headers]
        if self.n_pipelined > MAX_PIPELINED:
            raise BadHttp(f"more than {MAX_PIPELINED} requests have waited for an answer")
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
        if self.parser.should_upgrade():
            return  # see upgrade()
        super().on_headers_complete()
        self.n_body_left = int(dict(self.headers).get(b"content-length", 0))
        self.headers = []  # what still comes are trailers, not headers: RFC 9110, section 6.5.1
        # The body is refused unread if it is too large. One that is expected comes when it is asked for.
        if self.n_body_left > SMALL_BODY_BYTES or self.cycle.waiting_for_100_continue:
            self.start_request()

    def on_body(self, body: bytes) -> None:
        self.n_framing_bytes -= len(body)
        super().on_body(body)
        if len(self.cycle.body) > SMALL_BODY_BYTES:
            self.start_request()

    def on_message_complete(self) -> None:
        self.n_framing_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self.start_request()

    def upgrade(self) -> None:
        """Go on after a head that offers another protocol, of which the parser does not read the body.

        A handshake that WebSocketProtocol accepts becomes one. Any other offer is ignored: its head is parsed
        once more, without the header that makes it one. uvicorn loses the body: Kludex/uvicorn#2722.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        headers = dict(self.headers)
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        # The parser takes Proxy-Connection for Connection.
        lines += [b"%s: %s" % header for header in self.headers if not header[0].endswith(b"connection")]
        head = b"\r\n".join(lines) + BLANK_LINE
        if not (
            self._should_upgrade()
            and (method, version, headers.get(b"sec-websocket-version")) == (b"GET", b"1.1", b"13")
            and WEBSOCKET_KEY.fullmatch(headers.get(b"sec-websocket-key", b""))
            and head.isascii()
            and len(head) <= MAX_LINE
        ):
            self.held[:0] = head
            return
        self._unset_keepalive_if_required()
        self.idle.pop(self, None)
        self.scope["method"] = "GET"
        self.handle_websocket_upgrade()
        websocket: Any = self.transport.get_protocol()  # a WebSocketProtocol
        if websocket.handshake_initiated and len(self.held) <= MAX_FRAMES_BYTES:
            websocket.data_received(bytes(self.held))  # a client should wait: RFC 6455, section 4.1
        else:
            websocket.drop()  # or the package has not understood the head, and says nothing
        self.held.clear()

    # --- what is answered -----------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Keep a request whose head has come, and which uvicorn would start, for start_request()."""
        if cycle.scope["http_version"] == "1.0":
            app = partial(ended_by_closing, cycle, app)
        self.start = partial(super()._start_asgi_task, cycle, app)

    def start_request(self) -> None:
        """Start the request that has come, unless it has started."""
        if self.start:
            self.start()
            self.start = None
            self.idle.pop(self, None)
            self._unset_keepalive_if_required()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self.idle[self] = None
            self.n_pipelined += 1
            self.loop.call_soon(self.data_received, b"")

    def refuse(self, error: BaseException) -> None:
        """Answer what is not HTTP with an error object, unless it has begun to be answered as a request."""
        if self.cycle:
            if self.cycle.response_started and not self.cycle.response_complete:
                self.transport.abort()
                return
            self.cycle.disconnected = True  # so that the application does not answer it too
            self.cycle.message_event.set()
        self.start = None
        self.is_deaf = True
        status = getattr(error, "status", HTTPStatus.BAD_REQUEST)
        message = f"Invalid HTTP request received: {error}."
        request_id = new_id("req")
        REQUEST_ID.set(request_id)
        log.info("%d: %s", status, message)
        body = json.dumps(error_body(status, message, code="invalid_http")).encode()
        first_line = (status, status.phrase.encode())
        self.transport.write(BAD_HTTP_ANSWER % (*first_line, len(body), request_id.encode(), body))
        self.transport.write_eof()  # without close(), at which what the client still sends would reset it
        self.loop.call_later(LINGER_S, self.transport.abort)


async def ended_by_closing(cycle: Any, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
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
    come, how many bytes that had: it counts them, and lets clients go on by turns. For meanwhile nothing is
    read, until it asks for the next message or part. The application closes the connection at a stop.

        {"type": "websocket.receive", "n_bytes": 131326}
        {"type": "websocket.receive", "n_bytes": 135168}
        {"type": "websocket.receive", "bytes": b"...", "is_text": True}
    """

    read_buffer = memoryview(bytearray(MAX_FRAMES_BYTES))
    n_bytes = 0  # that have come since the last message or part
    n_small_frames = 0  # likewise, or since our own ping

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.close_timeout = LINGER_S  # for the client's answer to our close

    def data_received(self, data: bytes) -> None:
        self.n_bytes += len(data)
        for start in range(0, len(data), PIECE_BYTES):
            if not self.disconnected:
                WebSocketsSansIOProtocol.data_received(self, data[start : start + PIECE_BYTES])
        if self.n_bytes > PART_BYTES:
            self.tell({"n_bytes": self.n_bytes})

    def tell(self, message: dict[str, Any]) -> None:
        """Have the application receive a message or a part of one, and read no more before it has."""
        self.n_bytes = self.n_small_frames = 0
        if self.close_sent:  # it asks for no more
            return
        received: Any = {"type": "websocket.receive"} | message
        self.queue.put_nowait(received)
        self.read_paused = True
        self.transport.pause_reading()

    def send_receive_event_to_app(self) -> None:
        message = {"bytes": b"".join(self.frames), "is_text": self.curr_msg_data_type == "text"}
        self.frames = []
        self.tell(message)

    def handle_events(self) -> None:
        frames = [event for event in self.conn.events if isinstance(event, Frame)]
        self.n_small_frames += sum(len(frame.data) < SMALL_FRAME_BYTES for frame in frames)
        super().handle_events()
        for frame in frames:
            frame.data = b""  # which the package's parser would hold until the next frame comes
        if self.n_small_frames > MAX_SMALL_FRAMES:
            expected = f"expected at most {MAX_SMALL_FRAMES} pings, or small fragments, between two messages"
            self.conn.fail(CloseCode.POLICY_VIOLATION, expected)
            self.handle_parser_exception()

    def send_keepalive_ping(self) -> None:
        self.n_small_frames = 0  # a client that is idle may ping for ever
        super().send_keepalive_ping()

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
        self.conn.parser.close()  # the package's parser and connection refer to each other


# --- the whole ----------------------------------------------------------------------------------------------


def http_config(app: ASGIApp, args: argparse.Namespace) -> uvicorn.Config:
    limits = {"reader_timeout": args.reader_timeout}
    of_http = {"max_connections": max_connections(args.max_streams), "idle": OrderedDict()}
    return uvicorn.Config(
        app,
        http=type("LimitedProtocol", (Protocol,), limits | of_http),
        ws=type("LimitedWebSocketProtocol", (WebSocketProtocol,), limits),
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
        # For clients that neither read nor leave: see Limited.shutdown().
        timeout_graceful_shutdown=math.ceil(args.shutdown_grace) + STALLED_S + 1,
    )
