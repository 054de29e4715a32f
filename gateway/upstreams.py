"""The upstream servers: load balancing, failover and circuit breaker, and the connection to each of them.

    path, body --Upstreams.open()--> Reply --chunks()--> bytes, as the upstream wrote them
    path, body --Upstreams.ask()---> one JSON object, of an endpoint that not every server has

Authority: https://www.python-httpx.org/advanced/timeouts/; the circuit breaker is that of
https://martinfowler.com/bliki/CircuitBreaker.html, except that a health probe closes it, not a request.

Rules of this file:
1. Load balancing is least-connections: of the upstreams that have the model and whose circuit is closed, the
   one with the fewest requests in flight is asked.
2. A request is retried on another upstream only until the first event of an answer: no text is sent twice.
   Where that event is an error, the upstream has refused the request, whatever its status line says.
3. Nothing goes on for ever: there is a timeout for connecting, for the first event, for silence after it and
   for the whole answer, which has a limit in bytes too.
4. Each request has its own connection: closing it is how an upstream learns that its client is gone, and no
   connection is ever stale.
5. Back-pressure: nothing is read ahead, so a client that reads slowly slows its upstream down.
6. An upstream that fails several times in a row gets no requests until a probe succeeds; both are logged. A
   failure is a probe without an answer, or a request that another upstream could answer: one that none can
   answer may be the reason itself, and must not close the way for all others.

Not here: what the bytes mean (relay.py), what the request says (remote.py).
"""

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx2 as httpx

import sse
from gateway.chunks import objects
from gateway.metering import Document
from gateway.relay import FAILURES, Refused, document, mode, quoted, read_refusal, refusal_in

log = logging.getLogger("upstreams")

# Of what is read as one JSON text: the event loop stands still meanwhile, 20 ms a MiB of text, 200 a MiB of
# the smallest objects.
MAX_ERROR_BYTES = 64 * 2**10
MAX_OBJECT_BYTES = 2**21  # a list of models, or the 300k token ids of a prompt
# Of an answer: 128k tokens, each with its logprob and twenty others', are 256 MB.
MAX_ANSWER_BYTES = 256 * 2**20
MAX_FAILURES = 3  # in a row: then the circuit opens
RETRY_AFTER_S = "5"
# Of a body: gzip, which some servers send unasked, is unpacked piece by piece (unpacked()); the others make
# gigabytes of a chunk.
ENCODINGS = ("identity", "gzip")
NO_SUCH_ENDPOINT = (404, 405, 501)
MAX_PIECE_BYTES = 16 * 2**10  # what is read of an answer before others get a turn
LINGER_S = 2  # for the end of a body whose [DONE] has come


class Timeouts(NamedTuple):
    """Seconds; `--upstream-timeout` sets them."""

    connect_s: float = 5
    # From the request to the first event: the upstream reads a long prompt meanwhile.
    first_byte_s: float = 600
    idle_s: float = 120  # between two chunks of an answer
    answer_s: float = 7200  # from the first event of an answer to its end: a long one has 128k tokens
    probe_s: float = 5  # between two probes, and for one


DEFAULT_TIMEOUTS = Timeouts()


class Died(Exception):
    """The upstream has broken off in its answer, or begun none."""


@dataclass(eq=False)
class Upstream:
    """One server, and its circuit breaker."""

    url: str  # the SDK's base_url: http://host:8000/v1
    max_failures: int = MAX_FAILURES
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
    """An answer whose first event has come; the caller must close() it, in whatever state it is."""

    def __init__(
        self,
        upstream: Upstream,
        response: httpx.Response,
        chunks: AsyncGenerator[bytes],
        beginning: bytes,
        timeouts: Timeouts,
    ) -> None:
        self.upstream = upstream
        self.headers = response.headers.raw
        self.content_type: str = response.headers.get("content-type", "")
        self._response = response
        self._chunks = chunks
        self._beginning = beginning
        self._idle_s = timeouts.idle_s
        self._deadline = time.monotonic() + timeouts.answer_s
        self.is_done = False  # the caller has read [DONE]
        self._is_closed = False

    def note_done(self) -> None:
        """[DONE] has come: whatever still comes, the end of the body is waited for LINGER_S at most."""
        if not self.is_done:
            self.is_done = True
            self._deadline = time.monotonic() + LINGER_S

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The bytes as they come; raises Died."""
        chunk = self._beginning
        n_bytes = 0
        while chunk:
            for piece in pieces(chunk):
                yield piece
                await asyncio.sleep(0)  # one read may have thousands of frames
            n_bytes += len(chunk)
            if n_bytes > MAX_ANSWER_BYTES:
                self._break_off(f"it is longer than {MAX_ANSWER_BYTES} bytes")
                return
            chunk = await self._next()

    async def _next(self) -> bytes:
        """The next chunk; b"" at the end."""
        seconds_left = self._deadline - time.monotonic()
        try:
            if seconds_left <= 0:  # the timeout alone never fires where the next chunk is always there
                raise TimeoutError
            async with asyncio.timeout(min(seconds_left, self._idle_s)):
                return await anext(self._chunks, b"")
        except (httpx.HTTPError, httpx.StreamError, TimeoutError) as error:
            why = reason(error)
            if time.monotonic() >= self._deadline:
                why = "it took too long in all"
            return self._break_off(why)

    def _break_off(self, why: str) -> bytes:
        """End an answer that has no end: b"" where all of it has come, up to [DONE]; else raises Died."""
        if self.is_done:
            return b""
        message = f"the upstream broke off in its answer ({why})"
        log.warning("%s: %s", self.upstream.url, message)
        raise Died(message)

    def close(self) -> None:
        """Close the connection, which ends the upstream's work on the request.

        A task of its own does it: a client's disconnect often cancels the caller twice.
        """
        if not self._is_closed:
            self._is_closed = True
            self.upstream.n_running -= 1
            task = asyncio.ensure_future(self._aclose())
            CLOSING.add(task)
            task.add_done_callback(CLOSING.discard)

    async def _aclose(self) -> None:
        with contextlib.suppress(RuntimeError):  # a chunk is still awaited: closing the response ends that
            await self._chunks.aclose()
        await self._response.aclose()


async def unpacked(response: httpx.Response) -> AsyncGenerator[bytes]:
    """A body as it comes, without its gzip: 64 KiB of it may be 64 MiB, never all at once."""
    is_packed = response.headers.get("content-encoding") == "gzip"
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)  # 16: gzip's header
    async with aclosing(response.aiter_raw()) as chunks:
        async for chunk in chunks:
            if not is_packed:
                yield chunk
                continue
            packed = chunk
            piece = b" "
            while (packed or len(piece) == MAX_PIECE_BYTES) and not unpacker.eof:
                try:
                    piece = unpacker.decompress(packed, MAX_PIECE_BYTES)
                except zlib.error as error:
                    raise httpx.DecodingError(str(error)) from error
                packed = unpacker.unconsumed_tail
                if piece:
                    yield piece


async def read_beginning(response: httpx.Response, n_bytes: int) -> bytes:
    """Read a body until it has n_bytes or ends, and close the response; the last chunk is kept whole."""
    body = b""
    async with aclosing(response), aclosing(unpacked(response)) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) >= n_bytes:
                break
    return body


async def read_first_event(content_type: str, chunks: AsyncIterator[bytes]) -> tuple[bytes, Document | None]:
    """The bytes of an answer up to its first event, and that event's data, where this is a JSON object.

    An answer that is no SSE is one event; of what is too long for an error only the beginning is read.
    """
    parser = sse.Parser()
    beginning = bytearray()
    async for chunk in chunks:
        beginning += chunk
        events: list[sse.Event] = []
        if mode(content_type, bytes(beginning[:64])) != "json":
            for piece in pieces(chunk):
                events += parser.feed(piece)
                await asyncio.sleep(0)
        if events:
            return bytes(beginning), document(events[0].data)
        if len(beginning) > MAX_ERROR_BYTES:
            return bytes(beginning), None
    if not beginning:
        raise Died("an empty one")
    answer = document(beginning)
    if answer is None and mode(content_type, b"") != "sse" and not parser.feed(b"\n\n"):
        raise Died("neither a JSON object nor an event but " + quoted(beginning))
    return bytes(beginning), answer


def pieces(chunk: bytes) -> Iterator[bytes]:
    for start in range(0, len(chunk), MAX_PIECE_BYTES):
        yield chunk[start : start + MAX_PIECE_BYTES]


def reason(error: BaseException) -> str:
    """Why there is no answer, or no more of it."""
    if isinstance(error, TimeoutError):
        return "it was silent for too long"
    if isinstance(error, Died):
        return str(error)
    if str(error):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


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
        self._upstreams = [Upstream(url.rstrip("/"), max_failures) for url in urls]
        self._authorization: dict[str, str] = {}  # by the URL of the upstream that alone is sent it
        self._timeouts = timeouts
        for url, api_key in (api_keys or {}).items():
            self._authorization[url.rstrip("/")] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            headers={"accept-encoding": "identity"},
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
        """The models by name; one that several upstreams have is described by the first of them."""
        models: dict[str, dict[str, Any]] = {}
        for upstream in self._upstreams:
            for name, model in upstream.models.items():
                models.setdefault(name, model)
        return models

    def all_known(self) -> bool:
        return all(upstream.is_known for upstream in self._upstreams)

    def counts(self) -> dict[str, int]:
        return {
            "upstreams": len(self._upstreams),
            "upstreams_down": sum(upstream.is_open for upstream in self._upstreams),
            "running": sum(upstream.n_running for upstream in self._upstreams),
            "waiting": 0,  # requests wait inside the upstreams, which do not say how many
        }

    # --- asking ---------------------------------------------------------------------------------------------

    async def open(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Send the request to an upstream that has the body's model; raises Refused where none answers it."""
        model = str(body["model"])
        tried: list[Upstream] = []
        suspects: list[Upstream] = []
        refusal = self._unreachable(model)
        while upstream := self._pick(model, tried):
            tried.append(upstream)
            try:
                reply = await self._ask(upstream, path, body)
            except Refused as error:
                if not error.is_retryable:
                    raise
                refusal = error
                if error.is_failure:
                    suspects.append(upstream)
                continue
            for suspect in suspects:
                suspect.failed(f"it failed at a request that {upstream.url} answers")
            return reply
        raise refusal

    def _unreachable(self, model: str) -> Refused:
        return Refused(503, f"No upstream that has '{model}' can be reached.", retry_after=RETRY_AFTER_S)

    def _pick(self, model: str, tried: list[Upstream]) -> Upstream | None:
        """Least-connections; None where no upstream is left that has the model and a closed circuit."""
        candidates = [
            upstream
            for upstream in self._upstreams
            if model in upstream.models and not upstream.is_open and upstream not in tried
        ]
        return min(candidates, key=lambda upstream: (upstream.n_running, upstream.n_asked), default=None)

    async def _ask(self, upstream: Upstream, path: str, body: Mapping[str, Any]) -> Reply:
        """Send the request to this upstream; raises Refused."""
        upstream.n_running += 1
        upstream.n_asked += 1
        response = None
        try:
            async with asyncio.timeout(self._timeouts.first_byte_s):
                response = await self._send("POST", upstream, f"{upstream.url}/{path}", body)
                if response.status_code != 200:
                    raise await self._refusal(upstream, response)
                chunks = unpacked(response)
                content_type = response.headers.get("content-type", "")
                beginning, first_event = await read_first_event(content_type, chunks)
                if first_event and (refusal := refusal_in(first_event)):
                    raise refusal
        except BaseException as error:
            upstream.n_running -= 1
            if response:
                await response.aclose()
            if not isinstance(error, httpx.HTTPError | httpx.InvalidURL | TimeoutError | Died):
                raise
            why = f"no answer to a request ({reason(error)})"
            log.warning("%s: %s", upstream.url, why)
            status = 504 if isinstance(error, TimeoutError) else 502
            refusal = Refused(status, f"The upstream gave {why}.", is_retryable=True)
            refusal.is_failure = True
            raise refusal from error
        upstream.worked()
        return Reply(upstream, response, chunks, beginning, self._timeouts)

    async def _send(
        self, method: str, upstream: Upstream, url: str, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        """Return the head of the answer; raises httpx.HTTPError."""
        headers: dict[str, str] = {}
        if upstream.url in self._authorization:
            headers["authorization"] = self._authorization[upstream.url]
        request = self._client.build_request(method, url, json=body, headers=headers)
        response = await self._client.send(request, stream=True)
        encoding = response.headers.get("content-encoding", "identity")
        if encoding not in ENCODINGS:
            await response.aclose()
            raise httpx.DecodingError(f"identity was asked for, {encoding} came")
        return response

    async def _refusal(self, upstream: Upstream, response: httpx.Response) -> Refused:
        body = await read_beginning(response, MAX_ERROR_BYTES)
        refusal = read_refusal(response.status_code, response.headers, body)
        if response.status_code in FAILURES:
            log.warning("%s: status %d to a request", upstream.url, response.status_code)
            refusal.is_failure = True
        return refusal

    async def ask(self, path: str, body: Mapping[str, Any]) -> Document | None:
        """Ask an endpoint beside /v1 of an upstream that has the body's model; None where it has no such.

        Raises Refused.
        """
        upstream = self._pick(str(body["model"]), [])
        if upstream is None:
            raise self._unreachable(str(body["model"]))
        url = upstream.url.removesuffix("/v1") + path
        try:
            async with asyncio.timeout(self._timeouts.idle_s):
                response = await self._send("POST", upstream, url, body)
                answer = await read_beginning(response, MAX_OBJECT_BYTES)
        except (httpx.HTTPError, TimeoutError) as error:
            raise Refused(502, f"The upstream gave no answer to {path} ({reason(error)}).") from error
        if response.status_code in NO_SUCH_ENDPOINT:
            return None
        if response.status_code != 200:
            raise read_refusal(response.status_code, response.headers, answer)
        return document(answer)

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
            async with asyncio.timeout(self._timeouts.probe_s):
                response = await self._send("GET", upstream, url)
                body = await read_beginning(response, MAX_OBJECT_BYTES)
            answer = document(body) or {}
            if response.status_code != 200 or not isinstance(answer.get("data"), list):
                hint = ""
                if response.status_code == 404 and not upstream.url.endswith("/v1"):
                    hint = "; most servers have it behind /v1"
                raise Died(f"status {response.status_code} and no list of models{hint}")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, Died, TimeoutError) as error:
            upstream.failed(f"GET {url}: {reason(error)}")
            return
        models = [model for model in objects(answer["data"]) if isinstance(model.get("id"), str)]
        upstream.models = {model["id"]: model for model in models}
        upstream.is_known = True
        if upstream.is_open:
            upstream.worked()
