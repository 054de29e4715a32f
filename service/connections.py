"""HTTP/1.1 connections: the listening socket, and limits on clients that say nothing or read nothing.

    socket --bind()--> uvicorn.Config with Protocol --> the application

Authority: https://www.uvicorn.org/settings/; RFC 9112.

Rules of this file:
1. A head must have come within a time, and a client must read what it gets within another.
2. What is no HTTP is answered with an error object like any other.

Not here: the application behind it (middleware.py, api.py).
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

log = logging.getLogger("server")

MAX_HEAD_BYTES = 64 * 1024  # of a request: its line and its headers; h11 answers 400 to more
MAX_HEAD_S = 60  # until it has come
KEEP_ALIVE_S = 75  # of an idle connection, as nginx has it: clients that reuse one drop it before we do
SEND_BUFFER_BYTES = 128 * 1024  # of a connection; Linux takes twice as many
STALLED_S = 2  # at a stop, what clients get to take their last event, after the grace


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded, so that a taken one is known at once; early clients wait."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only where TCP is named does asyncio turn Nagle's algorithm off: events would wait for their ACKs.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # Else the system keeps up to 4 MB, by and by, for a client that reads nothing, and we would not notice.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if os.name == "posix":  # a port in TIME_WAIT is free; elsewhere the option means something else
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # bound only, it could be bound again
    except (OSError, OverflowError, UnicodeError) as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return listener


# --- start and stop -----------------------------------------------------------------------------------------


class HttpServer(uvicorn.Server):
    """uvicorn, with the signals left to us: open streams need their last event before they are waited for."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


NO_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"x-request-id: %s\r\nConnection: close\r\n\r\n%s"
)


class Protocol(H11Protocol):
    """HTTP/1.1, without clients that never say what they want, or that do not read what they get.

    The transport asks to pause when 64 KiB wait behind a full socket, and to go on when most have left.
    """

    reader_timeout: float  # seconds
    deadline: asyncio.TimerHandle | None = None  # while writing is paused
    head_due: asyncio.TimerHandle  # runs while what comes belongs to no request that is being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.head_due = self.loop.call_later(MAX_HEAD_S, self.drop)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle and not self.cycle.response_complete:
            self.head_due.cancel()
        elif self.head_due.cancelled():  # the next head begins, or a body goes on that nobody wants
            self.head_due = self.loop.call_later(MAX_HEAD_S, self.drop)

    def send_400_response(self, msg: str) -> None:
        """An error like any other, to what is no HTTP; an answer that has begun breaks off."""
        id_ = new_id("req")
        token = logs.REQUEST_ID.set(id_)
        log.info("400: %s", msg)
        logs.REQUEST_ID.reset(token)
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True  # nobody answers it once more
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        body = json.dumps(error_body(400, msg, code="invalid_http")).encode()
        self.transport.write(NO_HTTP % (len(body), id_.encode(), body))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.deadline = self.loop.call_later(self.reader_timeout, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.relent()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.head_due.cancel()
        self.relent()

    def relent(self) -> None:
        if self.deadline:
            self.deadline.cancel()

    def drop(self) -> None:
        linger_for_nothing = struct.pack("ii", 1, 0)  # what waits in the system goes too: man 7 socket
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_nothing)
        self.transport.abort()


def protocol(seconds: float) -> type[H11Protocol]:
    class Timed(Protocol):
        reader_timeout = seconds

    return Timed


def http_config(app: ASGIApp, args: argparse.Namespace) -> uvicorn.Config:
    patience = math.ceil(args.shutdown_grace) + STALLED_S
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
        timeout_graceful_shutdown=patience,  # for clients that neither read nor leave
    )
