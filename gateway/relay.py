"""The relay: one chat completion on its way from an upstream to the client.

    Upstreams.open() --asking()--> Reply --> [chunk, ...] --send_stream()--> frames, or whole() --> one object

Authority: https://platform.openai.com/docs/api-reference/chat-streaming.

Rules of this file:
1. The client gets the form that it asked for, a stream or one object, even if the upstream sends the other:
   the object is the fold of the chunks.
2. Chunks pass as soon as they are read, corrected (answers.py) and encoded again. `event:`, `id:` and comment
   lines do not pass.
3. [DONE] comes once and last. An answer that breaks off has an error event before it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import sse
from completions import Chunk, fold
from gateway.metering import Meter, Outcome
from gateway.refused import Refused, refused_by
from gateway.upstreams import RawHeaders, Reply
from request.refusals import error_body
from streaming import SSE_HEADERS, JsonAnswer, Writer, while_connected

# Seconds after which a request that can wait is accepted, although the upstream may still read its prompt.
# Until then a refusal keeps its status.
ACCEPT_S = 5

Opening = asyncio.Future[Reply]  # until the answer begins

# --- one request --------------------------------------------------------------------------------------------


@asynccontextmanager
async def asking(
    open_reply: Callable[[], Awaitable[Reply]], can_wait: bool, meter: Meter
) -> AsyncIterator[Opening]:
    """Ask an upstream, and read its reply in the block; settle the request at the end, also if it failed.

    The block begins with the reply, or after ACCEPT_S if the request `can_wait`. Raises Refused before that.
    """
    outcome: Outcome = "error"
    opening = asyncio.ensure_future(open_reply())
    try:
        await asyncio.wait({opening}, timeout=ACCEPT_S if can_wait else None)
        if opening.done():
            opening.result()
        yield opening
        if not (opening.exception() or opening.result().answer.failed):
            outcome = "done"
    except asyncio.CancelledError:
        outcome = "disconnect"
        raise
    finally:
        opening.cancel()
        opening.add_done_callback(leave)
        meter.settle(outcome)


def leave(opening: Opening) -> None:
    """Close the reply, if there is one. Looks at the task's error: asyncio would log it if nothing did."""
    if not (opening.cancelled() or opening.exception()):
        opening.result().close()


# --- the answer ---------------------------------------------------------------------------------------------

# Headers that say something of the answer or of the account, which holds for the client too. All others
# describe the connection, or tell the client's browser what only this server may tell it.
# https://platform.openai.com/docs/api-reference/debugging-requests
FORWARDED = (b"openai-model", b"openai-processing-ms", b"openai-version", b"warning", b"x-ratelimit-")


def forwarded(opening: Opening) -> RawHeaders:
    """Return the headers that the client gets, their names in lower case; none before the answer begins.

    Names have no case: https://github.com/timoklimmer/powerproxy-aoai/issues/53. A value with a control
    character is dropped: uvicorn raises at it.
    """
    if not opening.done():
        return []
    return [
        (name.lower(), value)
        for name, value in opening.result().headers
        if name.lower().startswith(FORWARDED) and value.decode("latin-1").isprintable()
    ]


def whole(chunks: Iterable[Chunk]) -> str:
    """Return the object that the chunks amount to; raises Refused if one is an error."""
    completion = fold(chunks)
    if "error" in completion:
        raise refused_by(200, completion["error"])
    return sse.dumps(completion)


@dataclass(eq=False)
class RelayedChat(Response):
    """Answers with one chat completion of an upstream, for as long as the client is there."""

    asking: AbstractAsyncContextManager[Opening]
    n_choices: int
    is_stream: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = Writer(send)
        with suppress(ClientDisconnect):
            await while_connected(self._answer(scope, receive, writer), receive, writer.look)

    async def _answer(self, scope: Scope, receive: Receive, writer: Writer) -> None:
        async with self.asking as opening:
            headers = forwarded(opening)
            if self.is_stream:
                await send_stream(opening, headers, writer)
                return
            chunks = [chunk async for read in opening.result() for chunk in read]
            response = JsonAnswer(await asyncio.to_thread(whole, chunks))
            response.raw_headers += headers
            await response(scope, receive, writer.send)


async def send_stream(opening: Opening, headers: RawHeaders, writer: Writer) -> None:
    await writer.begin([*headers, *SSE_HEADERS])
    try:
        async for chunks in await opening:
            if chunks:
                await writer.write(frames_of(chunks))
    except Refused as refused:
        await writer.write(frames_of([error_body(refused)]))
    await writer.write(sse.DONE, more=False)


def frames_of(chunks: Iterable[Chunk]) -> bytes:
    return b"".join(sse.encode(chunk) for chunk in chunks)
