"""HTTP/1.1 connections: the listening socket, and time limits for clients that say nothing or read nothing.

    host, port --bind()--> listening socket
    ASGI application, options --http_config()--> uvicorn.Config --HttpServer--> connections, each a Protocol

A connection has two timers, and is dropped when one of them ends. The head timer runs from the start, and
from the end of each request, until the next head has come. The read timer runs while back-pressure pauses our
writing, because the client does not read.

Authority: https://www.uvicorn.org/settings/; RFC 9112.

Rules of this file:
1. A head must come within MAX_HEAD_S, and a client must read what it gets within --reader-timeout.
2. What is no HTTP is answered with an error object like any other.

Not here: the application behind it (middleware.py, api.py), when it starts and stops (server.py).
"""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import socket
import struct
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from request.ids import new_id
from request.refusals import error_body
from service import logs

log = logging.getLogger("connections")

MAX_HEAD_BYTES = 64 * 1024  # of a request: its line and its headers; h11 answers 400 to more
MAX_HEAD_S = 60  # from the first moment in which a request may come
KEEP_ALIVE_S = 75  # of an idle connection, nginx's default: clients that reuse one drop it before we do
SEND_BUFFER_BYTES = 128 * 1024  # of a connection; Linux takes twice as many
STALLED_S = 2  # what clients get at a stop to read their last event, after the grace


def bind(host: str, port: int) -> socket.socket:
    """The listening socket; raises OSError.

    It is made before the model is loaded: a port in use is known at once, and early clients wait.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only where TCP is named does asyncio turn Nagle's algorithm off: events would wait for their ACKs.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # By default the system buffers up to 4 MB for a client that reads nothing, and we would not notice it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if os.name == "posix":  # a port in TIME_WAIT is free; elsewhere the option means something else
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # a port that is only bound could be bound again
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen on {host} port {port}: {reason}") from error
    return listener


# --- uvicorn, adapted ---------------------------------------------------------------------------------------


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: server.py gives open streams their last event before the stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


NO_HTTP_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"x-request-id: %s\r\nConnection: close\r\n\r\n%s"
)


class Protocol(H11Protocol):
    """One connection, dropped when its client does not send a head or does not read.

    The transport calls pause_writing() when 64 KiB wait behind a full socket, and resume_writing() when most
    of them have left.
    """

    reader_timeout: float  # seconds
    read_timer: asyncio.TimerHandle | None = None  # runs while writing is paused
    head_timer: asyncio.TimerHandle  # runs while what comes belongs to no request that is being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.head_timer = self.loop.call_later(MAX_HEAD_S, self.drop)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle and not self.cycle.response_complete:
            self.head_timer.cancel()
        elif self.head_timer.cancelled():  # the next head begins, or the rest of a body that nobody reads
            self.head_timer = self.loop.call_later(MAX_HEAD_S, self.drop)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP with an error object; an answer that has begun breaks off."""
        request_id = new_id("req")
        token = logs.REQUEST_ID.set(request_id)
        log.info("400: %s", msg)
        logs.REQUEST_ID.reset(token)
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True  # so that the application does not answer it too
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        body = json.dumps(error_body(400, msg, code="invalid_http")).encode()
        self.transport.write(NO_HTTP_ANSWER % (len(body), request_id.encode(), body))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.read_timer = self.loop.call_later(self.reader_timeout, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.head_timer.cancel()
        self.stop_read_timer()

    def stop_read_timer(self) -> None:
        if self.read_timer:
            self.read_timer.cancel()

    def drop(self) -> None:
        """Reset the connection."""
        no_linger = struct.pack("ii", 1, 0)  # what the system has buffered is dropped too: man 7 socket
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        self.transport.abort()


def protocol(seconds: float) -> type[H11Protocol]:
    """Protocol, with this time limit for clients that do not read."""

    class TimedProtocol(Protocol):
        reader_timeout = seconds

    return TimedProtocol


def http_config(app: ASGIApp, args: argparse.Namespace) -> uvicorn.Config:
    stop_s = math.ceil(args.shutdown_grace) + STALLED_S
    return uvicorn.Config(
        app,
        http=protocol(args.reader_timeout),
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=stop_s,  # for clients that neither read nor leave
    )
