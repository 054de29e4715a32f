"""The relay: one chat completion on its way from an upstream to the client.

    Upstreams.open() --> Reply --read()--> [chunk, ...] --ChatFrames--> frames, or Completion --> one object

Authority: https://platform.openai.com/docs/api-reference/chat-streaming.

Rules of this file:
1. The client gets what it asked for, a stream or one object, whichever of them the upstream has sent: the
   object is the fold of the chunks.
2. Chunks pass as soon as they are read, put right (answers.py) and encoded again. `event:`, `id:` and comment
   lines do not pass.
3. Usage is taken out of every chunk and counted. It reaches the client once, in a chunk of its own before
   [DONE], and only if it was asked for.
4. [DONE] comes once and last. An answer that breaks off has an error event before it.
5. A request is checked before it is passed on, so that what is wrong has our names. What is only not built
   here (pictures, vLLM's parameters) passes unchecked, for the upstream may have it.
"""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import sse
from completions import Chunk, Completion
from gateway.answers import MAX_ANSWER_BYTES, MAX_KEPT_BYTES, Answer
from gateway.metering import Ledger, Meter, Outcome
from gateway.refused import Refused, refusal_in
from gateway.upstreams import Reply, Upstreams, discard
from request import params
from request.params import Request
from request.refusals import error_object
from streaming import SSE_HEADERS, KeptAlive, while_connected

PATH = "chat/completions"
# After so many seconds the client of a stream gets its head, although the upstream may still read the prompt.
# Until then a refusal keeps its status.
ACCEPT_S = 5

# --- the request --------------------------------------------------------------------------------------------

# Parts of a message that only an upstream may be able to read: OpenAI's, and vLLM's for sound and video.
MEDIA = ("image_url", "input_audio", "audio_url", "video_url", "file")


def checkable(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body without what is only not built here, which our checks would refuse: rule 5."""
    kept = {name: value for name, value in body.items() if name not in params.NOT_BUILT_IN_CHAT}
    messages = body.get("messages")
    if isinstance(messages, list):
        kept["messages"] = [_without_media(message) for message in messages]
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") == "structural_tag":  # vLLM's
        del kept["response_format"]
    return kept


def _without_media(message: Any) -> Any:
    """Return the message with empty texts for pictures and the like: errors name a part by its place."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for part in message["content"]:
        if isinstance(part, dict) and part.get("type") in MEDIA:
            part = {"type": "text", "text": ""}
        parts.append(part)
    return message | {"content": parts}


# --- the answer ---------------------------------------------------------------------------------------------

# Headers that say something of the answer or of the account, which holds for the client too. All others
# describe the connection, or tell the client's browser what only this server may tell it.
# https://platform.openai.com/docs/api-reference/debugging-requests
FORWARDED = {
    b"openai-model", b"openai-processing-ms", b"openai-version",
    b"x-ratelimit-limit-requests", b"x-ratelimit-remaining-requests", b"x-ratelimit-reset-requests",
    b"x-ratelimit-limit-tokens", b"x-ratelimit-remaining-tokens", b"x-ratelimit-reset-tokens",
}  # fmt: skip


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that the client gets, their names in lower case.

    Names have no case: https://github.com/timoklimmer/powerproxy-aoai/issues/53
    """
    lowered = [(name.lower(), value) for name, value in headers]
    return [(name, value) for name, value in lowered if name in FORWARDED]


class ChatFrames:
    """Writes the chunks of one answer as frames."""

    def __init__(self, meter: Meter, shows_usage: bool) -> None:
        self.failed = False
        self._meter = meter
        self._shows_usage = shows_usage
        self._usage_chunk: Chunk = {}

    def encode(self, chunks: Iterable[Chunk]) -> bytes:
        frames = []
        for chunk in chunks:
            self._meter.read(chunk)
            if isinstance(chunk.get("usage"), dict):
                self._usage_chunk = chunk | {"choices": []}
                if not chunk["choices"]:
                    continue
                del chunk["usage"]
            self.failed = self.failed or "error" in chunk
            frames.append(sse.encode(sse.dumps(chunk)))
        return b"".join(frames)

    def end(self) -> bytes:
        if self._usage_chunk and self._shows_usage and not self.failed:
            return sse.encode(sse.dumps(self._usage_chunk)) + sse.DONE
        return sse.DONE


def whole(chunks: Iterable[Chunk], meter: Meter) -> str:
    """Return the object that the chunks amount to; raises Refused if one is an error."""
    completion = Completion()
    for chunk in chunks:
        if "error" in chunk:
            raise refusal_in(chunk["error"])
        meter.read(chunk)
        completion.add(chunk)
    return sse.dumps(completion.value())


class RelayedChat(Response):
    """Answers with one chat completion of an upstream, for as long as the client is there.

    `body` is what the upstream gets, `request` the same, checked.
    """

    def __init__(self, upstreams: Upstreams, ledger: Ledger, request: Request, body: dict[str, Any]) -> None:
        self.n_choices = request.n
        self._upstreams = upstreams
        self._ledger = ledger
        self._request = request
        self._body = body
        self._meter = Meter(ledger.prices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await while_connected(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome: Outcome = "error"
        request = self._request
        answer = partial(
            Answer,
            n=request.n,
            one_call=not request.parallel_tool_calls,
            named_call=request.named_call,
            max_bytes=MAX_ANSWER_BYTES if request.stream else MAX_KEPT_BYTES,
        )
        opening = asyncio.ensure_future(self._upstreams.open(PATH, self._body, answer))
        try:
            timeout_s = ACCEPT_S if request.stream else None
            await asyncio.wait({opening}, timeout=timeout_s)
            headers = []
            if opening.done():
                headers = forwarded(opening.result().headers)
            if not request.stream:
                response = Response(await self._completion(opening.result()), media_type="application/json")
                response.raw_headers += headers
                await response(scope, receive, send)
                outcome = "done"
            elif await self._send_stream(opening, headers, send):
                outcome = "done"
        except asyncio.CancelledError:
            outcome = "disconnect"
            raise
        finally:
            self._ledger.settle(self._body["model"], discard(opening), outcome, self._meter)

    async def _send_stream(
        self, opening: asyncio.Future[Reply], headers: list[tuple[bytes, bytes]], send: Send
    ) -> bool:
        """Return whether the answer came without an error."""
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *SSE_HEADERS]})
        frames = ChatFrames(self._meter, self._request.include_usage)
        async with aclosing(KeptAlive(send)) as stream:
            try:
                reply = await opening
                while (chunks := await reply.read()) is not None:
                    if data := frames.encode(chunks):
                        await stream.write(data)
            except Refused as refused:
                error = error_object(refused.message, code=refused.code or "server_error")
                await stream.write(frames.encode([{"error": error}]))
            await stream.write(frames.end())
        await send({"type": "http.response.body", "body": b""})
        return not frames.failed

    async def _completion(self, reply: Reply) -> str:
        """Return the answer as one object; raises Refused if it ended with an error."""
        chunks: list[Chunk] = []
        while (more := await reply.read()) is not None:
            chunks += more
        return await asyncio.to_thread(whole, chunks, self._meter)  # it may be megabytes
