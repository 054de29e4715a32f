"""The upstream servers: load balancing, failover and health probes, and the connection to each of them.

    body --Upstreams.open()--> Reply --> [chunk, ...], and so on to the end of the answer

Authority: https://www.python-httpx.org/advanced/timeouts/.

Rules of this file:
1. Load balancing is least-connections: of the upstreams that have the model and are not down (rule 6), the
   one with the fewest requests in flight is asked.
2. Until text, reasoning or a call has come, or MAX_BEGINNING chunks without any, another upstream may be
   asked, and nothing leaves: no text is
   sent twice, and the role and the id come once. An answer that begins with an error is a refusal, even with
   status 200.
3. Nothing goes on for ever. There is a timeout for connecting, for the first text, for silence after it and
   for the whole answer. After an error or [DONE] the upstream is left at once; after the last finish_reason
   it has GRACE_S for usage and [DONE]. A refusal has BODY_S for its body.
4. Each request has its own connection: closing it is how an upstream learns that its client is gone, and no
   connection is ever stale.
5. Back-pressure: nothing is read ahead, so a client that reads slowly slows its upstream down.
6. An upstream that leaves several probes in a row unanswered gets no requests until it answers a probe. Only
   probes mark an upstream as down, never failed requests: one poisonous request must not take every upstream
   out of rotation.
7. A key goes to the upstream that it is for, and to no other.
8. We ask for uncompressed answers. Some gateways send gzip all the same, which we unpack piece by piece, at
   most a thousandfold: https://github.com/Wei-Shaw/claude-relay-service/issues/1027. We unpack nothing else.
"""

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx2 as httpx

from completions import Chunk
from gateway.answers import Answer, Asked, document, objects
from gateway.metering import Meter
from gateway.refused import Refused, read_refused, refused_by, without_what_is_refused
from request.body import GZIP
from sse import Object

log = logging.getLogger("upstreams")

MAX_REPLY_BYTES = 2**21  # a refusal, or a list of models
MAX_FAILURES = 3  # probes in a row: then an upstream is down
GRACE_S = 3  # for usage and [DONE], after the last finish_reason
BYTES_A_TURN = 2048  # read in one turn of the event loop: 200 of the smallest events, which take 3 ms
MAX_BEGINNING = 1000  # empty chunks, held until the first that holds anything
BODY_S = 3  # for the body of a refusal, or of a list of models
UNREACHABLE = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, TimeoutError, zlib.error)


def reason(error: Exception) -> str:
    """Return why an answer did not come, or broke off."""
    if isinstance(error, TimeoutError):
        return "it took too long"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class Timeouts(NamedTuple):
    """Seconds; `--upstream-timeout` sets them."""

    connect_s: float = 5
    # From the request to the first text: the upstream reads a long prompt meanwhile.
    first_byte_s: float = 600
    idle_s: float = 120  # between two chunks of an answer
    answer_s: float = 7200  # from the first text of an answer to its end: a long one has 128k tokens
    probe_s: float = 5  # between two probes, and for one


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(eq=False)
class Upstream:
    """One server."""

    url: str  # the SDK's base_url: http://host:8000/v1
    headers: dict[str, str]  # of each request to it
    models: dict[str, Object] = field(default_factory=dict)  # the newest list of its /v1/models
    n_failures: int = 0  # probes in a row without an answer
    n_running: int = 0  # requests in flight

    @property
    def is_down(self) -> bool:
        return self.n_failures >= MAX_FAILURES or not self.models


# --- one answer ---------------------------------------------------------------------------------------------

CLOSING = set[asyncio.Future[None]]()  # the event loop holds its tasks by weak references alone


RawHeaders = list[tuple[bytes, bytes]]  # as they came


class Reply:
    """The answer of an upstream. The caller must close() it, also if it failed or has ended."""

    answer: Answer
    headers: RawHeaders
    _reads: AsyncGenerator[list[Chunk]]
    _deadline = 0.0  # of time.monotonic()

    def __init__(self, upstream: Upstream, timeouts: Timeouts) -> None:
        self.upstream = upstream
        self._timeouts = timeouts
        self._response: httpx.Response | None = None
        self._beginning: list[Chunk] = []
        upstream.n_running += 1

    async def begin(self, response: httpx.Response, answer: Answer) -> None:
        """Read up to the first text, reasoning or call; raises Refused if an error came first."""
        self._response = response
        self.answer = answer
        self.headers = response.headers.raw
        self._reads = self._read_all(response)
        async for chunks in self._reads:
            self._beginning += chunks
            if answer.has_said or answer.is_over or len(self._beginning) >= MAX_BEGINNING:
                break
        if answer.failed and not answer.has_said:
            raise refused_by(200, self._beginning[-1]["error"])
        if not answer.is_finished:
            self._deadline = time.monotonic() + self._timeouts.answer_s

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        """Yield what comes. An answer that breaks off ends with an error."""
        chunks: list[Chunk] | None = self._beginning
        while chunks is not None:
            yield chunks
            seconds_left = self._deadline - time.monotonic()
            try:
                async with asyncio.timeout(min(seconds_left, self._timeouts.idle_s)):
                    chunks = await anext(self._reads, None)
            except UNREACHABLE as error:
                if self.answer.is_finished:  # the answer is whole; only usage and [DONE] may be missing
                    chunks = self.answer.close()
                else:
                    log.warning("%s broke off in its answer: %s", self.upstream.url, reason(error))
                    chunks = self.answer.fail(f"The answer broke off: {reason(error)}.")

    async def _read_all(self, response: httpx.Response) -> AsyncGenerator[list[Chunk]]:
        answer = self.answer
        async with aclosing(pieces(response)) as body:
            async for piece in body:
                had_finished = answer.is_finished
                chunks = answer.feed(piece)
                if answer.is_finished and (chunks or not had_finished):  # it may go on all the same
                    self._deadline = time.monotonic() + GRACE_S
                yield chunks
                if answer.is_over:
                    break
                await asyncio.sleep(0)
        yield await asyncio.to_thread(answer.close)  # it may be all of the answer

    def close(self) -> None:
        """Close the connection, which ends the upstream's work on the request.

        A task of its own does it: a client's disconnect often cancels the caller twice.
        """
        self.upstream.n_running -= 1
        if self._response:
            task = asyncio.ensure_future(self._response.aclose())
            CLOSING.add(task)
            task.add_done_callback(CLOSING.discard)


async def pieces(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield a body in pieces, unpacked: one read may have thousands of frames."""
    is_gzip = "gzip" in response.headers.get("content-encoding", "")
    unpack = zlib.decompressobj(GZIP).decompress if is_gzip else bytes
    async with aclosing(response.aiter_raw()) as reads:
        async for data in reads:
            for start in range(0, len(data), BYTES_A_TURN):
                yield unpack(data[start : start + BYTES_A_TURN])


async def beginning(response: httpx.Response) -> bytes:
    """Return the beginning of a body: what comes within BODY_S, about MAX_REPLY_BYTES at most. Close it."""
    body = b""
    with contextlib.suppress(*UNREACHABLE):
        async with asyncio.timeout(BODY_S), aclosing(response):
            async for piece in pieces(response):
                body += piece
                if len(body) >= MAX_REPLY_BYTES:
                    break
    return body


# --- all upstreams ------------------------------------------------------------------------------------------


class Upstreams:
    """The pool of upstreams that requests are balanced over."""

    def __init__(self, urls: Sequence[str], api_keys: Mapping[str, str], timeouts: Timeouts) -> None:
        """`api_keys` by URL; an upstream without one gets none."""
        self._upstreams = []
        for url in urls:
            headers = {"accept-encoding": "identity"}
            if url in api_keys:
                headers["authorization"] = f"Bearer {api_keys[url]}"
            self._upstreams.append(Upstream(url.rstrip("/"), headers))
        self._timeouts = timeouts
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=timeouts.connect_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # no proxy, no netrc: requests go to the URLs of the command line
        )
        self._probing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Probe all upstreams now, and again every `probe_s` seconds."""
        await self.probe()
        self._probing = asyncio.create_task(self._probe_forever())

    async def close(self) -> None:
        """Fail what still runs."""
        if self._probing:
            self._probing.cancel()
        await self._client.aclose()

    def models(self) -> dict[str, Object]:
        """Return the models by name; if several upstreams have a model, the first one describes it."""
        models: dict[str, Object] = {}
        for upstream in self._upstreams:
            models |= upstream.models | models
        return models

    def counts(self) -> dict[str, int]:
        return {
            "upstreams": len(self._upstreams),
            "upstreams_down": sum(upstream.is_down for upstream in self._upstreams),
            "running": sum(upstream.n_running for upstream in self._upstreams),
            "waiting": 0,  # requests wait inside the upstreams, which do not say how many
        }

    # --- asking ---------------------------------------------------------------------------------------------

    async def open(self, body: Object, meter: Meter, asked: Asked) -> Reply:
        """Ask the upstreams that have the body's model for a completion, each once, the idlest first.

        If one fails, ask the next, unless the request is at fault. Raises Refused if none answers.
        """
        model = str(body["model"])
        candidates = [each for each in self._upstreams if model in each.models and not each.is_down]
        refusal = Refused(f"No upstream that has '{model}' can be reached.", code="server_is_overloaded")
        for upstream in sorted(candidates, key=lambda upstream: upstream.n_running):
            if self._client.is_closed:  # the server stops
                break
            try:
                return await self._ask(upstream, body, meter, asked)
            except Refused as error:
                if error.status < 500 and error.status != 429:  # the request is at fault
                    raise
                log.warning("%s: %s", upstream.url, error.message)
                refusal = error
        raise refusal

    async def _ask(self, upstream: Upstream, body: Object, meter: Meter, asked: Asked) -> Reply:
        """Ask this upstream, and wait until its answer has begun; raises Refused.

        It is asked again for as long as it names what it does not take, and the body can be mended.
        """
        reply = Reply(upstream, self._timeouts)
        try:
            async with asyncio.timeout(self._timeouts.first_byte_s):
                response = await self._send(upstream, "/chat/completions", body)
                await reply.begin(response, Answer(meter, asked))
        except BaseException as error:
            reply.close()
            if isinstance(error, UNREACHABLE):
                status = 504 if isinstance(error, TimeoutError) else 502
                message = f"The upstream gave no answer to a request ({reason(error)})."
                raise Refused(message, code="server_error", status=status) from error
            if isinstance(error, Refused):
                other = without_what_is_refused(body, error)
                if other != body:
                    return await self._ask(upstream, other, meter, asked)
            raise
        meter.upstream = upstream.url
        return reply

    async def _send(self, upstream: Upstream, path: str, body: Object | None = None) -> httpx.Response:
        """Return the head of an answer with status 200; raises Refused, or one of UNREACHABLE."""
        method = "POST" if body else "GET"
        request = self._client.build_request(method, upstream.url + path, json=body, headers=upstream.headers)
        response = await self._client.send(request, stream=True)
        if response.status_code != 200:
            raise read_refused(response.status_code, response.headers, await beginning(response))
        return response

    # --- probing --------------------------------------------------------------------------------------------

    async def _probe_forever(self) -> None:
        while True:
            await asyncio.sleep(self._timeouts.probe_s)
            await self.probe()

    async def probe(self) -> None:
        """Ask all upstreams for their models."""
        await asyncio.gather(*map(self._probe, self._upstreams))

    async def _probe(self, upstream: Upstream) -> None:
        """Ask an upstream for its models."""
        try:
            async with asyncio.timeout(self._timeouts.probe_s):
                response = await self._send(upstream, "/models")
            models = document(await beginning(response)).get("data")
            if not isinstance(models, list):
                raise ValueError("expected a list of models")
        except (ValueError, *UNREACHABLE) as error:  # Refused too, and a key that no header can hold
            upstream.n_failures += 1
            if upstream.n_failures <= MAX_FAILURES:
                log.warning(
                    "GET %s/models failed %d times: %s; most servers have it under /v1",
                    upstream.url,
                    upstream.n_failures,
                    reason(error),
                )
            return
        upstream.models = {
            model["id"]: model for model in objects(models) if isinstance(model.get("id"), str)
        }
        upstream.n_failures = 0
