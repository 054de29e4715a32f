"""A server as seen from outside: an address, raw HTTP, and nothing known of the program behind it.

    Peer("http://host:8000/v1", "model").ask("POST", "/responses", {...}) --> Reply, or NoReply

The bytes of a reply are kept as they were written, chunk by chunk.

Authority: RFC 9112 (HTTP/1.1).

Rules of this file:
1. A rule has a budget of seconds, start() begins one: what a server does not answer within it is NoReply.
2. Failed is the server's fault, NotApplicable nobody's; NoReply says that a rule could not be judged.

Not here: what is asked (probes.py), what the replies must be (checks_*.py).
"""

import contextlib
import http.client
import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from audit import recordings
from audit.members import shortened

Json = dict[str, Any]
NOT_THERE = {404, 405, 501}
REFUSED = {400, 403, 404, 405, 415, 422, 501}
BUSY = {429, 503}
PIECE_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 2**20  # no answer that a rule asks for has a tenth of that
BUDGET_S = 120.0  # of a rule: a small model on a busy machine
BROKEN_OFF = (http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionResetError)
BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
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

    @property
    def refusal(self) -> str:
        """The status, and what the server says about it."""
        error = self.json.get("error")
        if isinstance(error, dict):
            error = error.get("message")
        return f"{self.status} {shortened(' '.join(str(error or self._text).split()), 160)}"

    def __str__(self) -> str:
        return f"{self.asked} -> {self.status} {shortened(self._text, 300)}"

    @property
    def _text(self) -> str:
        text = self.body.decode("utf-8", "replace").strip()
        if "html" not in self.headers.get("content-type", ""):
            return text
        readable = re.sub(r"<style.*?</style>|<script.*?</script>|<[^>]*>", " ", text, flags=re.DOTALL)
        return " ".join(readable.split())


class NotApplicable(Exception):
    """The server lacks what the rule is about, and may."""


class Failed(AssertionError):
    """The server breaks the rule; the excerpt shows it."""

    def __init__(self, message: str, excerpt: object) -> None:
        self.message = message
        self.excerpt = str(excerpt)
        if isinstance(excerpt, dict | list):
            self.excerpt = json.dumps(excerpt, ensure_ascii=False, default=str)
        super().__init__(f"{message}\n{self.excerpt}")


class NoReply(Exception):
    """Nobody is there, or the time is over; what breaks off has Failed."""


def expect(holds: object, message: str, excerpt: object) -> None:
    if not holds:
        raise Failed(message, excerpt)


@contextlib.contextmanager
def presumed(rule: str) -> Iterator[None]:
    """What a rule builds on and another one is about: a fault in there is for that other rule to name."""
    try:
        yield
    except Failed as failure:
        raise NotApplicable(f"the rule {rule} fails: {failure.message}") from failure


class Peer:
    """One server.

    `long`: members of a body that make its answer long, such as a bias against the end token.
    `budget`: seconds for each rule.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str = "",
        long: Json | None = None,
        headers: Mapping[str, str] | None = None,
        budget: float = BUDGET_S,
    ) -> None:
        self.url = urlsplit(base_url.rstrip("/"))
        self.model = model
        self.long = long or {}
        self.headers = dict(headers or {})
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._replies: dict[tuple[str, str], Reply | NoReply | Failed] = {}
        self._budget = budget
        self.start()

    @property
    def has_key(self) -> bool:
        return "Authorization" in self.headers

    def without_key(self) -> "Peer":
        """The same server, for a client that has no key."""
        headers = {name: value for name, value in self.headers.items() if name != "Authorization"}
        return Peer(self.url.geturl(), self.model, headers=headers, budget=self._budget)

    def at_root(self) -> "Peer":
        """The same server above its base URL, where its metrics are."""
        root = f"{self.url.scheme}://{self.url.netloc}"
        return Peer(root, self.model, headers=self.headers, budget=self._budget)

    def start(self) -> None:
        """Begin the budget of a rule."""
        self._deadline = time.monotonic() + self._budget

    def seconds_left(self) -> float:
        """Of the budget; raises NoReply where nothing is left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise NoReply(f"the rule's budget of {self._budget:g} s is used up")
        return left

    def ask(self, method: str, path: str, body: Json | bytes | None = None, **headers: str) -> Reply:
        """A request and its whole reply; raises NoReply, for a server that is busy too."""
        with self.open(method, path, body, **headers) as response:
            reply = Reply(*self._head(method, path, body, response), *self._read_all(response))
        if reply.status in BUSY:
            raise NoReply(f"the server is busy: {reply}")
        return reply

    def post(self, path: str, body: Json | None = None) -> Reply:
        """A request to the model, without stream unless the body says so."""
        return self.ask("POST", path, {"model": self.model, "stream": False} | (body or {}))

    def first_events(self, path: str, body: Json, n: int) -> list[Json]:
        """The first n events of a stream, which is left then."""
        with self.stream(path, body) as events:
            return [event for event, _ in zip(events, range(n), strict=False)]

    @contextlib.contextmanager
    def stream(self, path: str, body: Json) -> Iterator[Iterator[Json]]:
        """The events of a stream as they come, one at least; leaving the block is leaving the stream."""
        with self.open("POST", path, {"model": self.model, "stream": True} | body) as response:
            head = Reply(*self._head("POST", path, body, response), b"", [])
            if not head.is_stream:
                refused = head._replace(body=b"".join(self.pieces(response)))
                raise NotApplicable(f"no stream came: {refused.refusal}")
            events = events_of(self.pieces(response))
            first = next(events, None)
            if first is None:
                raise NotApplicable("no event came")
            yield itertools.chain([first], events)

    @contextlib.contextmanager
    def open(
        self, method: str, path: str, body: Json | bytes | None, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """The reply as it comes, in a with block; raises NoReply, out of the block too."""
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        all_headers = dict(self.headers)
        if raw is not None:
            all_headers["Content-Type"] = "application/json"
        for name, value in headers.items():
            all_headers[name.replace("_", "-")] = value
        with self.connection(described(method, path, body)) as connection:
            connection.request(method, self.url.path + path, raw, all_headers)
            yield connection.getresponse()

    @contextlib.contextmanager
    def connection(self, asked: str) -> Iterator[http.client.HTTPConnection]:
        """A connection of its own, in a with block; `asked` names what is asked for in what is raised."""
        try:
            with contextlib.closing(
                CONNECTIONS[self.url.scheme](self.url.netloc, timeout=self.seconds_left())
            ) as connection:
                yield connection
        except BROKEN_OFF as error:
            reason = f"{asked} -> {type(error).__name__}: {error}"
            raise Failed("expected a whole reply", reason) from error
        except (OSError, http.client.HTTPException) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if isinstance(error, TimeoutError):
                reason = f"nothing came for the rest of the rule's budget of {self._budget:g} s"
            raise NoReply(f"{asked} -> {reason}") from error

    def once(self, path: str, body: Json | bytes) -> Reply:
        """The reply to a request that several rules are about; one that breaks off is none of them's."""
        with presumed("whole-frames"):
            return self.shared(path, body)

    def shared(self, path: str, body: Json | bytes) -> Reply:
        """The reply to a request that several rules are about, which has a budget of its own."""
        key = path, str(body)
        if key not in self._replies:
            self.start()
            try:
                self._replies[key] = self.ask("POST", path, body)
            except (NoReply, Failed) as error:  # a hang is waited for once
                self._replies[key] = error
        reply = self._replies[key]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pieces(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """The body as it comes; raises NoReply where the time is up, or more comes than anybody reads."""
        n_bytes = 0
        while piece := response.read1(PIECE_BYTES):  # no more than what is left of a chunk
            n_bytes += len(piece)
            if n_bytes > MAX_BODY_BYTES:
                raise NoReply(f"expected a body of {MAX_BODY_BYTES} bytes at most, got more")
            yield piece
            self.seconds_left()

    def _read_all(self, response: http.client.HTTPResponse) -> tuple[bytes, list[bytes]]:
        """The body, and its chunks."""
        if not response.chunked:
            return b"".join(self.pieces(response)), []
        chunks: list[bytes] = []
        parts: list[bytes] = []  # of the chunk that is open
        for piece in self.pieces(response):
            parts.append(piece)
            if response.chunk_left == 0:
                chunks.append(b"".join(parts))
                parts.clear()
        return b"".join(chunks), chunks

    def _head(
        self, method: str, path: str, body: Json | bytes | None, response: http.client.HTTPResponse
    ) -> tuple[str, int, dict[str, str]]:
        headers = {name.lower(): value for name, value in response.getheaders()}
        return described(method, path, body), response.status, headers


def described(method: str, path: str, body: Json | bytes | None) -> str:
    shown = ""
    if isinstance(body, dict):
        shown = json.dumps(body)
    elif body:
        shown = body.decode("ascii", "replace")
        if not shown.isprintable():
            shown = f"({len(body)} bytes)"
    return shortened(f"{method} {path} {shown}".strip(), 300)


def events_of(pieces: Iterable[bytes]) -> Iterator[Json]:
    """The events of a stream as its bytes come; where it breaks off they end: see the rule whole-frames."""
    open_event = b""
    with contextlib.suppress(http.client.IncompleteRead):
        for piece in pieces:
            open_event += piece
            while blank_line := BLANK_LINE.search(open_event):
                yield from events_in(open_event[: blank_line.end()])
                open_event = open_event[blank_line.end() :]


def events_in(stream: bytes) -> Iterator[Json]:
    """The events of a stream, or of a part of one that ends with a frame."""
    stream_frames, _ = recordings.frames(stream)
    for _, _, event in stream_frames:
        if event and event.data != "[DONE]":
            yield recordings.parsed(event.data)
