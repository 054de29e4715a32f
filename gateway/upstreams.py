"""The servers behind this one: which of them there are, which one is asked, and the connection to it.

    path, body --Upstreams.open()--> Reply --chunks()--> bytes, as the upstream wrote them

Authority: https://www.python-httpx.org/advanced/timeouts/; the circuit is that of
https://martinfowler.com/bliki/CircuitBreaker.html, which a probe closes instead of a request.

Rules of this file:
1. Of the upstreams that have the model and work, the one with the fewest requests under way is asked.
2. Another one is asked only while no byte of an answer has come: nothing that was seen is said again.
3. Nothing waits for ever: there is a limit on connecting, on the first byte, and on silence after it.
4. One connection a request: closing it is how an upstream learns that nobody waits, and none is ever stale.
5. Nothing is read ahead: a client that reads slowly slows its upstream down.
6. An upstream that fails several times in a row is left alone until a probe succeeds, and the log says both.

Not here: what the bytes mean (relay.py), what is asked (remote.py).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx2 as httpx

from gateway.deltas import objects
from gateway.relay import SICK, Refused, document, refusal

log = logging.getLogger("upstreams")

MAX_ERROR_BYTES = 64 * 2**10
MAX_MODELS_BYTES = 4 * 2**20
RETRY_AFTER_S = "5"
LINGER_S = 2  # for what may still come behind [DONE]


class Limits(NamedTuple):
    connect_s: float = 5
    first_byte_s: float = (
        600  # from the request to the first byte of the answer: a long prompt is read meanwhile
    )
    idle_s: float = 120  # between two chunks of it
    probe_s: float = 5  # between two probes, and for one
    max_failures: int = 3  # in a row, until the circuit opens


DEFAULTS = Limits()


class Died(Exception):
    """The upstream has not said all of its answer."""


@dataclass(eq=False)
class Upstream:
    """One server."""

    url: str  # as the SDK's base_url: http://host:8000/v1
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # of its /v1/models, the newest that came
    is_known: bool = False  # it has listed its models once
    is_open: bool = False  # the circuit: nothing is sent
    n_failures: int = 0  # in a row
    n_running: int = 0
    n_asked: int = 0  # ever

    def worked(self) -> None:
        self.n_failures = 0
        if self.is_open:
            self.is_open = False
            log.warning("%s: circuit closed, it works again", self.url)

    def failed(self, why: str, max_failures: int) -> None:
        self.n_failures += 1
        log.log(logging.DEBUG if self.is_open else logging.WARNING, "%s: %s", self.url, why)
        if self.n_failures >= max_failures and not self.is_open:
            self.is_open = True
            log.warning("%s: circuit opened after %d failures in a row", self.url, self.n_failures)


CLOSING: set[asyncio.Future[None]] = set()  # the event loop itself forgets tasks that nobody holds


class Reply:
    """An answer whose first bytes are there; close() it, in whatever state it is."""

    def __init__(
        self,
        upstream: Upstream,
        response: httpx.Response,
        chunks: AsyncGenerator[bytes],
        first: bytes,
        limits: Limits,
    ) -> None:
        self.upstream = upstream
        self.headers = response.headers.raw
        self.content_type: str = response.headers.get("content-type", "")
        self._response = response
        self._chunks = chunks
        self._first = first
        self._limits = limits
        self.is_said = False  # set by the reader: only the end is missing, and nobody waits long for that
        self._is_closed = False

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The bytes as they come; raises Died."""
        yield self._first
        while chunk := await self._next():
            yield chunk

    async def _next(self) -> bytes:
        """b"" at the end."""
        try:
            async with asyncio.timeout(LINGER_S if self.is_said else self._limits.idle_s):
                return await anext(self._chunks, b"")
        except (httpx.HTTPError, httpx.StreamError, TimeoutError) as error:
            if self.is_said:
                return b""
            why = f"the upstream broke off in its answer ({reason(error)})"
            self.upstream.failed(why, self._limits.max_failures)
            raise Died(why) from error

    def close(self) -> None:
        """Close the connection, and so end the work behind it if that is not done.

        In a task of its own: who leaves is often cancelled twice, and this must not be.
        """
        if not self._is_closed:
            self._is_closed = True
            self.upstream.n_running -= 1
            task = asyncio.ensure_future(self._aclose())
            CLOSING.add(task)
            task.add_done_callback(CLOSING.discard)

    async def _aclose(self) -> None:
        with contextlib.suppress(RuntimeError):  # somebody still waits for a chunk: the next line ends that
            await self._chunks.aclose()
        await self._response.aclose()


async def beginning(response: httpx.Response, n: int) -> bytes:
    """The first n bytes of a body, a few more or all of it; the response is closed."""
    body = b""
    async with aclosing(response), aclosing(response.aiter_bytes()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) >= n:
                break
    return body


def reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it was silent for too long"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Upstreams:
    """All of them."""

    def __init__(
        self,
        urls: Sequence[str],
        api_key: str | None = None,
        limits: Limits = DEFAULTS,
        unlisted: Sequence[str] = (),
    ) -> None:
        """`unlisted`: models that they all have, whatever their lists say."""
        self._unlisted = {name: {"id": name} for name in unlisted}
        self._upstreams = [Upstream(url.rstrip("/")) for url in urls]
        self._limits = limits
        # No proxy and no netrc of the environment: what is asked goes where the command line says.
        self._client = httpx.AsyncClient(
            headers={"accept-encoding": "identity"}
            | ({"authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=httpx.Timeout(None, connect=limits.connect_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )
        self._probing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask them for their models, and again from time to time."""
        await self.probe()
        self._probing = asyncio.create_task(self._probe_forever())

    async def close(self) -> None:
        if self._probing:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        await self._client.aclose()

    def models(self) -> dict[str, dict[str, Any]]:
        """By name, as the first upstream that has it says."""
        found: dict[str, dict[str, Any]] = {}
        for upstream in self._upstreams:
            found = found | {name: m for name, m in upstream.models.items() if name not in found}
        return found

    def all_known(self) -> bool:
        return all(upstream.is_known for upstream in self._upstreams)

    def counts(self) -> dict[str, int]:
        return {
            "upstreams": len(self._upstreams),
            "upstreams_down": sum(upstream.is_open for upstream in self._upstreams),
            "running": sum(upstream.n_running for upstream in self._upstreams),
            "waiting": 0,  # they do that there
        }

    # --- asking ---------------------------------------------------------------------------------------------

    async def open(self, path: str, body: Mapping[str, Any]) -> Reply:
        """The answer of one that has the body's model; raises Refused."""
        tried: list[Upstream] = []
        last = Refused(
            503, f"No upstream that has '{body['model']}' can be reached.", retry_after=RETRY_AFTER_S
        )
        while upstream := self._pick(str(body["model"]), tried):
            tried.append(upstream)
            try:
                return await self._ask(upstream, path, body)
            except Refused as refused:
                if not refused.elsewhere:
                    raise
                last = refused
        raise last

    def _pick(self, model: str, tried: list[Upstream]) -> Upstream | None:
        there = [u for u in self._upstreams if model in u.models and not u.is_open and u not in tried]
        return min(there, key=lambda u: (u.n_running, u.n_asked), default=None)

    async def _ask(self, upstream: Upstream, path: str, body: Mapping[str, Any]) -> Reply:
        """The answer of this one; raises Refused, with `elsewhere` set where another may do better."""
        upstream.n_running += 1
        upstream.n_asked += 1
        response = None
        try:
            async with asyncio.timeout(self._limits.first_byte_s):
                request = self._client.build_request("POST", f"{upstream.url}/{path}", json=body)
                response = await self._client.send(request, stream=True)
                if response.status_code != 200:
                    raise await self._refusal(upstream, response)
                chunks = response.aiter_bytes()
                first = b""
                while not first:
                    first = await anext(chunks)
        except BaseException as error:
            upstream.n_running -= 1
            if response:
                await response.aclose()
            if not isinstance(error, httpx.HTTPError | httpx.InvalidURL | TimeoutError | StopAsyncIteration):
                raise
            empty = isinstance(error, StopAsyncIteration)
            why = f"no answer to a request ({'an empty one' if empty else reason(error)})"
            upstream.failed(why, self._limits.max_failures)
            status = 504 if isinstance(error, TimeoutError) else 502
            raise Refused(status, f"The upstream gave {why}.", elsewhere=True) from error
        upstream.worked()
        return Reply(upstream, response, chunks, first, self._limits)

    async def _refusal(self, upstream: Upstream, response: httpx.Response) -> Refused:
        body = await beginning(response, MAX_ERROR_BYTES)
        if response.status_code in SICK:
            upstream.failed(f"status {response.status_code} to a request", self._limits.max_failures)
        return refusal(response.status_code, response.headers, body)

    # --- probing --------------------------------------------------------------------------------------------

    async def _probe_forever(self) -> None:
        while True:
            await asyncio.sleep(self._limits.probe_s)
            await self.probe()

    async def probe(self) -> None:
        """Ask all of them for their models."""
        await asyncio.gather(*map(self._probe, self._upstreams))

    async def _probe(self, upstream: Upstream) -> None:
        """Ask for its models: that it answers is what opens and closes the circuit."""
        try:
            async with asyncio.timeout(self._limits.probe_s):
                request = self._client.build_request("GET", f"{upstream.url}/models")
                response = await self._client.send(request, stream=True)
                body = await beginning(response, MAX_MODELS_BYTES)
            found = document(body) or {}
            if response.status_code != 200 or not isinstance(found.get("data"), list):
                raise ValueError(f"status {response.status_code} and no list of models")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TimeoutError) as error:
            upstream.failed(f"GET {upstream.url}/models: {reason(error)}", self._limits.max_failures)
            return
        listed = {m["id"]: m for m in objects(found["data"]) if isinstance(m.get("id"), str)}
        upstream.models = self._unlisted | listed
        upstream.is_known = True
        if upstream.is_open:
            upstream.worked()
