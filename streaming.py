"""Answers over HTTP: a log as a stream of server-sent events, or one JSON object; clients that disconnect.

    EventLog --EventStream--> frames as they come           JSON text --JsonAnswer--> an answer, in pieces
    work --while_connected()--> its result

Authority: https://platform.openai.com/docs/guides/error-codes; https://asgi.readthedocs.io for disconnects.

Rules of this file:
1. Before the first byte, an error has its status code. After it, only the last event can report a failure.
2. When the client leaves, the task that works for it alone is cancelled, and with it the engine's sequence.
3. A write holds whole events, because some parsers lose one that is cut. Waiting events share one write.
4. Back-pressure ends here: a client that reads slowly delays its own frames, and no other client's. One that
   reads nothing for --reader-timeout is dropped (service/connections.py).

Why not Starlette's StreamingResponse: it runs a second task for each stream, cannot turn an error before the
first event into a status, and ends a stream cleanly when its generator raises. Why a log between the work and
the client, and not a generator: a stream that is followed by several readers, or again later, is read the
same way.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import sse
from event_log import EventLog

T = TypeVar("T")

# A stream is silent for twice as long at most: "a comment line [...] every 15 seconds or so", says
# html.spec.whatwg.org/multipage/server-sent-events.html#authoring-notes
KEEP_ALIVE_S = 7.5

# Clients ignore a comment. Its blank line is for relays that frame by it:
# https://github.com/PrimeIntellect-ai/verifiers/pull/2056
KEEP_ALIVE = b": keep-alive\n\n"

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),  # open-metadata/OpenMetadata#29532
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


# --- while the client is connected --------------------------------------------------------------------------


async def while_connected(
    work: Awaitable[T], receive: Receive, look: Callable[[], Awaitable[None]] | None = None
) -> T:
    """Await work for a client, such as sending its answer; raises ClientDisconnect if it leaves first.

    Then `work` is cancelled, with any task that it awaits. Like asyncio.timeout(), this cancels the task that
    calls it, and so needs no second task for the work. `look` is called every KEEP_ALIVE_S.
    """
    working = asyncio.current_task()
    assert working
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while not has_left:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S if look else None):
                    has_left = (await receive())["type"] == "http.disconnect"
            except TimeoutError:
                assert look
                await look()
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        result = await work
    except (Exception, asyncio.CancelledError):
        if not has_left:  # else drop the exception of the cancelled work
            raise
    finally:
        watching.cancel()
    if not has_left:
        return result
    if working.uncancel():  # something else has cancelled it too
        raise asyncio.CancelledError
    raise ClientDisconnect


# --- answers ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class EventStream(Response):
    """Answers with the events of a log that follow number `after`, as they come, then with `done`.

    `task` fills the log for this client alone; None: something else fills it. A task that raises before the
    first event refuses the request. A task that raises later has a bug: the connection breaks, which no
    client takes for a clean end of a stream.
    """

    log: EventLog
    task: asyncio.Task[None] | None = None
    done: bytes = b""
    after: int = -1
    more_headers: Mapping[str, str] | None = None
    keep_alive: bytes = KEEP_ALIVE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = Writer(send, self.keep_alive)
        try:
            with suppress(ClientDisconnect):
                await while_connected(self._send_events(writer), receive, writer.look)
        finally:
            if self.task:
                await cancel(self.task)

    async def _send_events(self, writer: "Writer") -> None:
        if self.task:
            await self.log.until_begun()
            if not self.log.entries:
                await self.task  # raises the refusal while the answer can still have its HTTP status
        await writer.begin([*SSE_HEADERS, *Headers(self.more_headers).raw])
        position = self.after + 1
        body = b""
        async with aclosing(self.log.read(self.after)) as logged:
            async for frames in logged:
                body = b"".join(frames)
                position += len(frames)
                if not self.log.is_over(position):  # else the end goes with them
                    await writer.write(body)
                    body = b""
        if self.task:
            await self.task  # a bug in it raises here: then the connection breaks, instead of a clean end
        # A log without a status holds chunks. A response that has not ended will be run by the next process:
        # its stream is not complete, so the connection just ends.
        is_whole = self.log.ended or not self.log.status
        if is_whole:
            body += self.done
        await writer.write(body, more=not is_whole)


# --- a stream that is silent --------------------------------------------------------------------------------


@dataclass(eq=False)
class Writer:
    """Writes a stream; its silences have comments in them, or proxies would hang up.

    `send` is send_with_id() of middleware.py, then uvicorn's, which waits while the client reads too slowly.
    """

    send: Send
    comment: bytes = KEEP_ALIVE
    is_open: bool = False  # the head has been sent, and the end has not
    is_silent: bool = False  # since the last look

    async def begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        self.is_open = True

    async def write(self, frames: bytes, more: bool = True) -> None:
        self.is_silent = False
        self.is_open = more
        await self.send({"type": "http.response.body", "body": frames, "more_body": more})

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    async def look(self) -> None:
        """Write a comment after a silence; the next look waits until the client has read it."""
        if self.is_open and self.is_silent:
            await self.write(self.comment)
        self.is_silent = True


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task unless it has ended, wait until it has, and drop its exception."""
    if task.cancel():
        await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # asyncio would log one that nothing has looked at


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

PIECE_BYTES = 64 * 1024  # a piece of a large answer: about what a connection takes before it pauses us


class JsonAnswer(Response):
    """Answers with JSON text in pieces; sends each when the client has read most of those before.

    The call returns when at most 64 KiB of the answer wait in the transport.
    """

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = "websocket." if scope["type"] == "websocket" else ""  # of a handshake that is refused
        start, body = f"{prefix}http.response.start", f"{prefix}http.response.body"
        await send({"type": start, "status": self.status_code, "headers": self.raw_headers})
        for i in range(0, len(self.body), PIECE_BYTES):
            await send({"type": body, "body": self.body[i : i + PIECE_BYTES], "more_body": True})
        await send({"type": body, "body": b""})  # waits until at most 64 KiB wait in the transport


def json_response(body: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    return JsonAnswer(sse.dumps(body), status, headers)
