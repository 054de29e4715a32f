"""What comes in and goes out over HTTP: JSON bodies, errors, and the events of a log as they grow or whole.

    request --read_json()--> body        EventLog --Answer--> frames, or one JSON object

Authority: https://platform.openai.com/docs/guides/error-codes; https://asgi.readthedocs.io for disconnects.

Rules of this file:
1. Before the first byte an error has its status code; after it, failures are reported only by the last event.
2. When the client leaves, a producer that works for it alone is cancelled, and so the engine's sequence.
3. One write an event: some parsers lose an event that is cut.

Not here: routes (api.py), what an event looks like (responses.py, completions.py).
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

import sse
from background import EventLog
from request.refusals import RETRY_AFTER_S, error_body

# "every 15 seconds or so": html.spec.whatwg.org/multipage/server-sent-events.html#authoring-notes
KEEP_ALIVE_S = 15

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),  # open-metadata/OpenMetadata#29532
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def now() -> int:
    return int(time.time())


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> JSONResponse:
    return json_response(status, error_body(status, message, param, code))


def json_response(status: int, body: dict[str, Any]) -> JSONResponse:
    retry = {"Retry-After": str(RETRY_AFTER_S[status])} if status in RETRY_AFTER_S else None
    return JSONResponse(body, status, retry)


def wants_stream(query: QueryParams) -> bool:
    """Whether who gets a response asks for its events."""
    return query.get("stream") in ("true", "True", "1")


# --- answers ------------------------------------------------------------------------------------------------

Producing = asyncio.Future[None]
# The events of a log to a status and a body.
Whole = Callable[[list[dict[str, Any]]], tuple[int, dict[str, Any]]]


class Answer(Response):
    """Answers with a log: as a stream that ends in `done`, or with what `whole` makes of it at its end.

    `producer` fills the log for as long as the client is there; None: it fills without us. A producer that
    raises before its first event has refused the request. Later it is a bug of ours: its client gets a 500
    or, in a stream, a connection that breaks, no clean end.
    """

    def __init__(
        self,
        events: EventLog,
        producer: Coroutine[Any, Any, None] | None = None,
        whole: Whole | None = None,
        done: bytes = b"",
        after: int = -1,
    ) -> None:
        self._events, self._producer, self._whole = events, producer, whole
        self._done, self._after = done, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        producing = asyncio.ensure_future(self._producer or _nothing())
        try:
            await while_there(self._send(producing, scope, receive, send), receive)
        finally:
            producing.cancel()
            await asyncio.gather(producing, return_exceptions=True)

    async def _send(self, producing: Producing, scope: Scope, receive: Receive, send: Send) -> None:
        if self._whole:
            await producing
            await self._events.written()
            status, body = self._whole(self._events.events)
            await json_response(status, body)(scope, receive, send)
            return
        if self._producer:
            await self._events.begun()
            if not self._events.events:
                await producing  # it raises why: nothing has been said, so that has its status
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        async with aclosing(kept_alive(self._events.read(self._after))) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await producing
        if not self._events.broken_off:  # else the connection just ends, and the client knows
            await send({"type": "http.response.body", "body": self._done})


async def while_there(sending: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Send an answer for as long as the client is there."""
    answer, leaving = asyncio.ensure_future(sending), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        answered = answer.done()
        for task in (answer, leaving):
            task.cancel()
        await asyncio.gather(answer, leaving, return_exceptions=True)
    if answered:
        answer.result()  # raises what it raised


async def _nothing() -> None:
    pass


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def kept_alive(frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The frames, and a comment whenever none came for a while: proxies close streams that are silent."""
    coming = asyncio.ensure_future(anext(frames, None))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=KEEP_ALIVE_S)
            if not done:
                yield sse.comment("keep-alive")
            elif (frame := coming.result()) is None:
                return
            else:
                yield frame
                coming = asyncio.ensure_future(anext(frames, None))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
