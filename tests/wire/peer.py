"""A server as seen from outside: an address, raw HTTP, and nothing known of the program behind it.

    Peer("http://host:8000/v1", "model").ask("POST", "/responses", {...}) --> Reply

The bytes of a reply are kept as they were written, chunk by chunk.
"""

import contextlib
import http.client
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from audit import recordings
from audit.members import shortened

Json = dict[str, Any]
PATIENCE_S = 120.0  # a small model on a busy machine
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class Reply(NamedTuple):
    asked: str  # the request, as people read it
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes
    chunks: list[bytes]  # as written, with Transfer-Encoding: chunked; [] without

    @property
    def json(self) -> Json:
        return recordings.parsed(self.body.decode("utf-8", "replace"))

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def events(self) -> list[Json]:
        """The events of a stream."""
        return list(events_in(self.body))

    def __str__(self) -> str:
        body = self.body.decode("utf-8", "replace").strip()
        return f"{self.asked} -> {self.status} {shortened(body, 300)}"


class NotApplicable(Exception):
    """The server lacks what the rule is about, and may."""


class Failed(AssertionError):
    """The server breaks the rule; the excerpt shows it."""

    def __init__(self, message: str, excerpt: object) -> None:
        super().__init__(f"{message}\n{excerpt}")
        self.message, self.excerpt = message, str(excerpt)


def expect(holds: object, message: str, excerpt: object) -> None:
    if not holds:
        raise Failed(message, excerpt)


class Peer:
    """`long`: members of a body that make its answer long, such as a bias against the end token."""

    def __init__(self, base_url: str, model: str, api_key: str = "", long: Json | None = None) -> None:
        self.url = urlsplit(base_url.rstrip("/"))
        self.model = model
        self.long = long or {}
        self._authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._replies: dict[tuple[str, str], Reply] = {}

    def ask(self, method: str, path: str, body: Json | bytes | None = None, **headers: str) -> Reply:
        """A request and its whole reply; one that does not come within PATIENCE_S has status 0."""
        try:
            with self.open(method, path, body, **headers) as response:
                return Reply(*self._head(method, path, body, response), *read_all(response))
        except (OSError, http.client.HTTPException) as error:
            return Reply(described(method, path, body), 0, {}, repr(error).encode(), [])

    def post(self, path: str, body: Json | None = None) -> Reply:
        """A request to the model, without stream unless the body says so."""
        return self.ask("POST", path, {"model": self.model, "stream": False} | (body or {}))

    def first_events(self, path: str, body: Json, n: int) -> list[Json]:
        """The first n events of a stream, which is left then."""
        with self.stream(path, body) as events:
            return [event for event, _ in zip(events, range(n), strict=False)]

    @contextlib.contextmanager
    def stream(self, path: str, body: Json) -> Iterator[Iterator[Json]]:
        """The events of a stream as they come; leaving the block is leaving the stream."""
        with self.open("POST", path, {"model": self.model, "stream": True} | body) as response:
            head = self._head("POST", path, body, response)
            if response.status != 200:
                raise NotApplicable(f"refused: {Reply(*head, response.read(), [])}")
            yield events_of(response)

    @contextlib.contextmanager
    def open(
        self, method: str, path: str, body: Json | bytes | None, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        connection_type = CONNECTIONS[self.url.scheme]
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        all_headers = dict(self._authorization)
        if raw is not None:
            all_headers["Content-Type"] = "application/json"
        for name, value in headers.items():
            all_headers[name.replace("_", "-")] = value
        with contextlib.closing(connection_type(self.url.netloc, timeout=PATIENCE_S)) as connection:
            connection.request(method, self.url.path + path, raw, all_headers)
            yield connection.getresponse()

    def once(self, path: str, body: Json | bytes) -> Reply:
        """The reply to a request that several rules are about."""
        key = path, str(body)
        if key not in self._replies:
            self._replies[key] = self.ask("POST", path, body)
        return self._replies[key]

    def _head(
        self, method: str, path: str, body: Json | bytes | None, response: http.client.HTTPResponse
    ) -> tuple[str, int, dict[str, str]]:
        headers = {name.lower(): value for name, value in response.getheaders()}
        return described(method, path, body), response.status, headers


def described(method: str, path: str, body: Json | bytes | None) -> str:
    shown = json.dumps(body) if isinstance(body, dict) else (body or b"").decode("utf-8", "replace")
    return shortened(f"{method} {path} {shown}", 300)


def read_all(response: http.client.HTTPResponse) -> tuple[bytes, list[bytes]]:
    """The body, and its chunks."""
    if not response.chunked:
        return response.read(), []
    chunks: list[bytes] = []
    chunk = b""
    while piece := response.read1():  # no more than what is left of a chunk
        chunk += piece
        if response.chunk_left == 0:
            chunks.append(chunk)
            chunk = b""
    return b"".join(chunks), chunks


def events_of(response: Iterable[bytes]) -> Iterator[Json]:
    """The events of a stream as its lines come."""
    lines: list[bytes] = []
    for line in response:
        lines.append(line)
        if not line.strip():
            yield from events_in(b"".join(lines))
            lines.clear()


def events_in(stream: bytes) -> Iterator[Json]:
    """The events of a stream, or of a part of one that ends with a frame."""
    stream_frames, _ = recordings.frames(stream)
    for _, _, event in stream_frames:
        if event and event.data != "[DONE]":
            yield recordings.parsed(event.data)
