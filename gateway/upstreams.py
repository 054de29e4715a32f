"""The upstream servers: load balancing, failover and circuit breaker, and the connection to each of them.

    body --------Upstreams.open()--> Reply --> [chunk, ...], and so on to the end of the answer
    path, body --Upstreams.ask()---> one JSON object, of an endpoint that not every server has

Authority: https://www.python-httpx.org/advanced/timeouts/; the circuit breaker is that of
https://martinfowler.com/bliki/CircuitBreaker.html, except that a health probe closes it, not a request.

Rules of this file:
1. Load balancing is least-connections: of the upstreams that have the model and whose circuit is closed, the
   one with the fewest requests in flight is asked.
2. Until text, reasoning or a call has come, another upstream may be asked, and nothing leaves: no text is
   sent twice, and the role and the id come once. An answer that begins with an error is a refusal, whatever
   its status line says.
3. Nothing goes on for ever. There is a timeout for connecting, for the first text, for silence after it and
   for the whole answer. After an error or [DONE] the upstream is left at once; after the last finish_reason
   it has GRACE_S, which only usage renews. A refusal has REFUSAL_S for its body.
4. Each request has its own connection: closing it is how an upstream learns that its client is gone, and no
   connection is ever stale.
5. Back-pressure: nothing is read ahead, so a client that reads slowly slows its upstream down.
6. An upstream that fails several times in a row gets no requests until a probe succeeds; both are logged. A
   failure is a probe without an answer, or a request that another upstream could answer: one that no upstream
   can answer may be the reason itself, and must not close the way for all others.
7. A key goes to the upstream that it is for, and to no other.
"""

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import httpx2 as httpx

from completions import Chunk
from gateway.answers import Answer, Asked, object_in, objects
from gateway.metering import Meter
from gateway.refused import RETRYABLE, Refused, no_answer, read_refusal, reason, refusal_in

log = logging.getLogger("upstreams")

MAX_ERROR_BYTES = 64 * 2**10
MAX_OBJECT_BYTES = 2**21  # a list of models, or the 300k token ids of a prompt
MAX_SILENT_BYTES = 2**22  # of an answer before its first text
MAX_PIECE_BYTES = 16 * 2**10  # what is read of an answer before others get a turn
MAX_FAILURES = 3  # in a row: then the circuit opens
RETRY_AFTER_S = "5"
GRACE_S = 3  # for usage and [DONE], after the last finish_reason
REFUSAL_S = 3  # for the body of a refusal
# Of a body: gzip, which some servers send unasked, is unpacked piece by piece; the others make gigabytes of a
# chunk.
ENCODINGS = ("identity", "gzip")
PATH = "chat/completions"
UNREACHABLE = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, TimeoutError)


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
    """One server, and its circuit breaker."""

    url: str  # the SDK's base_url: http://host:8000/v1
    headers: dict[str, str]  # of each request to it
    max_failures: int
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # the newest list of its /v1/models
    is_known: bool = False  # it has listed its models once
    is_open: bool = False  # the circuit is open: no requests, only probes
    n_failures: int = 0  # in a row
    n_running: int = 0  # requests in flight
    n_asked: int = 0  # requests since the start

    def worked(self) -> None:
        self.n_failures = 0
        if self.is_open:
            self.is_open = False
            log.warning("%s: circuit closed, it works again", self.url)

    def failed(self, why: str) -> None:
        self.n_failures += 1
        level = logging.DEBUG if self.is_open else logging.WARNING
        log.log(level, "%s: %s", self.url, why)
        if self.n_failures >= self.max_failures and not self.is_open:
            self.is_open = True
            log.warning("%s: circuit opened after %d failures in a row", self.url, self.n_failures)


# --- one answer ---------------------------------------------------------------------------------------------

CLOSING: set[asyncio.Future[None]] = set()  # the event loop holds its tasks by weak references alone


class Reply:
    """The answer of an upstream; the caller must close() it, in whatever state it is."""

    def __init__(self, upstream: Upstream, timeouts: Timeouts) -> None:
        self.upstream = upstream
        self.answer = Answer()
        self.headers: list[tuple[bytes, bytes]] = []
        self._timeouts = timeouts
        self._deadline = 0.0
        self._response: httpx.Response | None = None
        self._beginning: list[Chunk] = []
        self._reads = self._read_all()
        upstream.n_running += 1
        upstream.n_asked += 1

    async def begin(self, response: httpx.Response, answer: Answer) -> None:
        """Read up to the first text, reasoning or call; raises Refused if an error came first."""
        self._response = response
        self.answer = answer
        self.headers = response.headers.raw
        while not (answer.has_said or answer.is_over or answer.n_bytes > MAX_SILENT_BYTES):
            chunks = await anext(self._reads, None)
            if chunks is None:
                break
            self._beginning += chunks
        if answer.failed and not answer.has_said:
            raise refusal_in(self._beginning[-1]["error"])
        if not answer.is_finished:
            self._deadline = time.monotonic() + self._timeouts.answer_s

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Chunk]:
        """Return what comes next. An answer that breaks off ends with an error."""
        if self._beginning:
            chunks = self._beginning
            self._beginning = []
            return chunks
        seconds_left = self._deadline - time.monotonic()
        try:
            async with asyncio.timeout(min(seconds_left, self._timeouts.idle_s)):
                return await anext(self._reads)
        except UNREACHABLE as error:
            if self.answer.is_finished:  # all is said; only usage and [DONE] may be missing
                return self.answer.close()
            why = reason(error)
            if time.monotonic() >= self._deadline:
                why = "it took too long in all"
            log.warning("%s: the upstream broke off in its answer (%s)", self.upstream.url, why)
            return self.answer.fail(f"The answer broke off: {why}.")

    async def _read_all(self) -> AsyncGenerator[list[Chunk]]:
        assert self._response
        answer = self.answer
        async with aclosing(unpacked(self._response)) as body:
            async for piece in body:
                before = answer.is_finished, answer.meter.counts
                chunks = answer.feed(piece)
                if answer.is_finished and before != (True, answer.meter.counts):
                    self._deadline = time.monotonic() + GRACE_S
                yield chunks
                if answer.is_over:
                    break
                await asyncio.sleep(0)  # one read may have thousands of frames
        yield await asyncio.to_thread(answer.close)  # it may be all of the answer

    def close(self) -> None:
        """Close the connection, which ends the upstream's work on the request.

        A task of its own does it: a client's disconnect often cancels the caller twice.
        """
        self.upstream.n_running -= 1
        task = asyncio.ensure_future(self._aclose())
        CLOSING.add(task)
        task.add_done_callback(CLOSING.discard)

    async def _aclose(self) -> None:
        with contextlib.suppress(RuntimeError):  # a chunk is still awaited: closing the response ends that
            await self._reads.aclose()
        if self._response:
            await self._response.aclose()


async def unpacked(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield a body as it comes, without its gzip, in pieces that are small enough to give others a turn."""
    is_packed = response.headers.get("content-encoding") == "gzip"
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)  # 16: gzip's header
    async with aclosing(response.aiter_raw()) as chunks:
        async for chunk in chunks:
            while chunk and not unpacker.eof:
                piece, rest = chunk[:MAX_PIECE_BYTES], chunk[MAX_PIECE_BYTES:]
                if is_packed:
                    try:
                        piece = unpacker.decompress(chunk, MAX_PIECE_BYTES)
                    except zlib.error as error:
                        raise httpx.DecodingError(str(error)) from error
                    rest = unpacker.unconsumed_tail
                yield piece
                chunk = rest


async def read_beginning(response: httpx.Response, n_bytes: int, seconds: float) -> bytes:
    """Read of a body what comes in time, until it has n_bytes or ends, and close the response."""
    body = b""
    with contextlib.suppress(*UNREACHABLE):
        async with asyncio.timeout(seconds), aclosing(response), aclosing(unpacked(response)) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) >= n_bytes:
                    break
    return body


# --- all of them --------------------------------------------------------------------------------------------


class Upstreams:
    """The pool of upstreams that requests are balanced over."""

    def __init__(
        self,
        urls: Sequence[str],
        api_keys: Mapping[str, str] | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        """`api_keys` by URL; an upstream without one gets none."""
        self._upstreams = []
        for url in urls:
            headers = {"accept-encoding": "identity"}
            if api_keys and url in api_keys:
                headers["authorization"] = f"Bearer {api_keys[url]}"
            self._upstreams.append(Upstream(url.rstrip("/"), headers, max_failures))
        self._timeouts = timeouts
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=timeouts.connect_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # neither a proxy nor a netrc: requests go where the command line says
        )
        self._probing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Probe all upstreams now, and again every `probe_s` seconds."""
        await self.probe()
        self._probing = asyncio.create_task(self._probe_forever())

    async def close(self) -> None:
        if self._probing:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        await self._client.aclose()

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the models by name; one that several upstreams have is described by the first of them."""
        models: dict[str, dict[str, Any]] = {}
        for upstream in self._upstreams:
            models |= upstream.models | models
        return models

    def all_known(self) -> bool:
        return all(upstream.is_known for upstream in self._upstreams)

    def counts(self) -> dict[str, int]:
        return {
            "upstreams": len(self._upstreams),
            "upstreams_down": sum(upstream.is_open or not upstream.is_known for upstream in self._upstreams),
            "running": sum(upstream.n_running for upstream in self._upstreams),
            "waiting": 0,  # requests wait inside the upstreams, which do not say how many
        }

    # --- asking ---------------------------------------------------------------------------------------------

    async def open(self, body: Mapping[str, Any], meter: Meter, asked: Asked) -> Reply:
        """Ask an upstream that has the body's model for a completion; raises Refused if none answers."""
        model = str(body["model"])
        tried: list[Upstream] = []
        suspects: list[Upstream] = []
        refusal = unreachable(model)
        while upstream := self._pick(model, tried):
            tried.append(upstream)
            try:
                reply = await self._ask(upstream, body, meter, asked)
            except Refused as error:
                if error.upstream_status not in RETRYABLE:
                    raise
                log.warning("%s: %s", upstream.url, error.message)
                refusal = error
                if error.is_failure:
                    suspects.append(upstream)
                continue
            for suspect in suspects:
                suspect.failed(f"it failed at a request that {upstream.url} answers")
            return reply
        raise refusal

    def _pick(self, model: str, tried: list[Upstream]) -> Upstream | None:
        """Least-connections; None if no upstream is left that has the model and a closed circuit."""
        if self._client.is_closed:  # the server stops
            return None
        candidates = [
            upstream
            for upstream in self._upstreams
            if model in upstream.models and not upstream.is_open and upstream not in tried
        ]
        return min(candidates, key=lambda upstream: (upstream.n_running, upstream.n_asked), default=None)

    async def _ask(self, upstream: Upstream, body: Mapping[str, Any], meter: Meter, asked: Asked) -> Reply:
        """Ask this upstream, and wait until its answer has begun; raises Refused."""
        reply = Reply(upstream, self._timeouts)
        try:
            async with asyncio.timeout(self._timeouts.first_byte_s):
                response = await self._send(upstream, "POST", f"{upstream.url}/{PATH}", body)
                content_type = response.headers.get("content-type", "")
                await reply.begin(response, Answer(content_type, meter, asked))
        except BaseException as error:
            reply.close()
            if isinstance(error, UNREACHABLE):
                raise no_answer(error) from error
            raise
        upstream.worked()
        return reply

    async def ask(self, path: str, body: Mapping[str, Any]) -> Chunk:
        """Ask an endpoint beside /v1 of an upstream that has the body's model; raises Refused."""
        upstream = self._pick(str(body["model"]), [])
        if upstream is None:
            raise unreachable(str(body["model"]))
        url = upstream.url.removesuffix("/v1") + path
        return await self._object(upstream, "POST", url, self._timeouts.idle_s, body)

    async def _object(
        self, upstream: Upstream, method: str, url: str, seconds: float, body: Mapping[str, Any] | None = None
    ) -> Chunk:
        """Return the JSON object that an endpoint answers with, {} for anything else; raises Refused."""
        try:
            async with asyncio.timeout(seconds):
                response = await self._send(upstream, method, url, body)
        except UNREACHABLE as error:
            raise no_answer(error) from error
        return object_in(await read_beginning(response, MAX_OBJECT_BYTES, seconds))

    async def _send(
        self, upstream: Upstream, method: str, url: str, body: Mapping[str, Any] | None
    ) -> httpx.Response:
        """Return the head of an answer with status 200; raises Refused, or one of UNREACHABLE."""
        request = self._client.build_request(method, url, json=body, headers=upstream.headers)
        response = await self._client.send(request, stream=True)
        encoding = response.headers.get("content-encoding", "identity")
        if encoding not in ENCODINGS:
            await response.aclose()
            raise httpx.DecodingError(f"identity was asked for, {encoding} came")
        if response.status_code != 200:
            error_body = await read_beginning(response, MAX_ERROR_BYTES, REFUSAL_S)
            raise read_refusal(response.status_code, response.headers, error_body)
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
        """Ask an upstream for its models: an answer closes its circuit, no answer is a failure."""
        url = f"{upstream.url}/models"
        try:
            models = (await self._object(upstream, "GET", url, self._timeouts.probe_s)).get("data")
            if not isinstance(models, list):
                raise ValueError("no list of models")
        except ValueError as error:  # Refused too, and what httpx says of a key that no header can hold
            hint = ""
            if isinstance(error, Refused) and error.status == 404 and not upstream.url.endswith("/v1"):
                hint = "; most servers have it under /v1"
            upstream.failed(f"GET {url}: {error}{hint}")
            return
        named = [model for model in objects(models) if isinstance(model.get("id"), str)]
        upstream.models = {model["id"]: model for model in named}
        upstream.is_known = True
        if upstream.is_open:
            upstream.worked()


def unreachable(model: str) -> Refused:
    return Refused(503, f"No upstream that has '{model}' can be reached.", retry_after=RETRY_AFTER_S)
