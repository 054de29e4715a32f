"""The events of a log over HTTP: as a stream of server-sent events, or folded into one JSON object.

    EventLog --Answer--> frames as they come, or one JSON object at the end        status, message --> error

Authority: https://platform.openai.com/docs/guides/error-codes; https://asgi.readthedocs.io for disconnects.

Rules of this file:
1. Before the first byte an error has its status code; after it, only the last event tells of a failure.
2. When the client leaves, the task that works for it alone is cancelled, and with it the engine's sequence.
3. An event is one write: some parsers lose an event that is cut.
4. Back-pressure ends here: a client that reads slowly keeps its own frames waiting, and nobody else's.

Not here: endpoints (api.py), what an event looks like (responses.py, completions.py), bodies that come in
(request/body.py).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

import sse
from background import Event, EventLog
from request.refusals import RETRY_AFTER_S, error_body

# "every 15 seconds or so": html.spec.whatwg.org/multipage/server-sent-events.html#authoring-notes
KEEP_ALIVE_S = 15

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),  # open-metadata/OpenMetadata#29532
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


def error_response(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> JSONResponse:
    return json_response(status, error_body(status, message, param, code))


def json_response(status: int, body: dict[str, Any]) -> JSONResponse:
    headers = {}
    if status in RETRY_AFTER_S:
        headers["Retry-After"] = str(RETRY_AFTER_S[status])
    return JSONResponse(body, status, headers)


def wants_stream(query: QueryParams) -> bool:
    """Whether a GET of a response asks for its events."""
    return query.get("stream") in ("true", "True", "1")


# --- answers ------------------------------------------------------------------------------------------------

Fold = Callable[[list[Event]], tuple[int, dict[str, Any]]]  # all events -> status and body


class Answer(Response):
    """Answers with a log: folded at its end, or as a stream of the events behind `after`, and then `done`.

    `filling` works for this client alone; None: the log fills without it. One that raises before the first
    event has refused the request. Later it has a bug: its client gets a 500 or, in a stream, a connection
    that breaks, no clean end.
    """

    def __init__(
        self,
        log: EventLog,
        filling: asyncio.Task[None] | None = None,
        fold: Fold | None = None,
        done: bytes = b"",
        after: int = -1,
    ) -> None:
        self._log = log
        self._filling = filling
        self._fold = fold
        self._done = done
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = self._send_events(send) if self._fold is None else self._send_body(scope, receive, send)
        try:
            await while_there(sending, receive)
        finally:
            if self._filling:
                self._filling.cancel()
                await asyncio.gather(self._filling, return_exceptions=True)

    async def _send_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._fold
        assert self._filling
        await self._filling
        status, body = self._fold(self._log.events)
        await json_response(status, body)(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        if self._filling:
            await self._log.begun()
            if not self._log.events:
                await self._filling  # raises why it has refused: that still has its status
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        async with aclosing(kept_alive(self._log.read(self._after))) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        if self._filling:
            await self._filling
        if not self._log.is_broken_off:  # else the connection just ends, and the client knows
            await send({"type": "http.response.body", "body": self._done})


async def while_there(sending: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Send an answer for as long as the client is there."""
    answer = asyncio.ensure_future(sending)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_answered = answer.done()
        for task in (answer, leaving):
            task.cancel()
        await asyncio.gather(answer, leaving, return_exceptions=True)
    if is_answered:
        answer.result()  # raises what it raised


async def _disconnect(receive: Receive) -> None:
    message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()


async def kept_alive(frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The frames, and a comment whenever none came for a while: proxies close streams that are silent."""
    coming = asyncio.ensure_future(anext(frames, None))
    try:
        while True:
            await asyncio.wait({coming}, timeout=KEEP_ALIVE_S)
            if not coming.done():
                yield sse.comment("keep-alive")
                continue
            frame = coming.result()
            if frame is None:
                return
            yield frame
            coming = asyncio.ensure_future(anext(frames, None))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
