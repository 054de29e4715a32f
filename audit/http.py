"""HTTP/1.1 read by hand: a server as seen from outside, nothing known of the program.

    Http("http://host:8000/v1", "model").ask("POST", "/responses", {...}) --> Reply, or NoReply

The problem is that a server under audit may be hostile: it may send headers by the byte, a chunk of a
terabyte, a body without end. So all bytes come through one place, Bounded.readinto(), which has a limit in
time and in bytes. The bytes of a reply are kept as they were written, chunk by chunk.

Authority: RFC 9112 (HTTP/1.1).

Rules of this file:
1. A rule has a budget of seconds, start() begins one: what a server does not answer within it is NoReply.
2. A reply that breaks off is an AssertionError. A server that cannot be reached is NoReply, which names the
   layer: name, connection, TLS or HTTP.

Not here: what is asked (peer.py), what the replies must be (clients.py, answers.py and so on).
"""

import contextlib
import io
import itertools
import json
import re
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from audit.rules import NoReply, NotApplicable, presumed
from audit.schema import Json, shortened
from audit.stream import events_in, parsed

NOT_THERE = {404, 405, 501}
REFUSED = NOT_THERE | {400, 403, 415, 422}
BUSY = {429, 503}
BUDGET_S = 120.0  # of a rule: a small model on a busy machine
PIECE_BYTES = 2**16  # read at once
MAX_BYTES = 2**26  # of a reply: no answer that a rule asks for has a tenth of that
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})")
CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]+)[ \t]*(?:;.*)?\r?\n")
BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
SEGMENT_BYTES = 536  # of a slow client: a server can send it 40 kB at most before it has to wait


class Reply(NamedTuple):
    asked: str  # the request, as people read it
    status: int
    headers: dict[str, str]  # names in lower case
    pieces: Iterable[bytes]  # of the body, as they come; chunks, if it comes in chunks
    connection: "Connection"  # what comes after an upgrade
    body: bytes = b""

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    @property
    def json(self) -> Json:
        return parsed(self.text)

    @property
    def error(self) -> Json:
        """The object in the member `error`; {} if there is none."""
        error = self.json.get("error")
        return error if isinstance(error, dict) else {}

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_refusal(self) -> bool:
        return 400 <= self.status < 500

    @property
    def events(self) -> list[Json]:
        return list(events_in(self.body))

    def if_there(self, refusals: Iterable[int] = NOT_THERE) -> "Reply":
        """Return this, unless it is one of the refusals: no rule is about what a server need not have."""
        if self.status in refusals:
            raise NotApplicable(f"refused: {self.refusal}")
        return self

    @property
    def refusal(self) -> str:
        """The status, and what the server says about it."""
        message = str(self.error.get("message") or self.text)
        return f"{self.status} {shortened(' '.join(message.split()), 160)}"

    def __str__(self) -> str:
        return f"{self.asked} -> {self.status} {shortened(' '.join(self.text.split()), 300)}"


# --- bytes --------------------------------------------------------------------------------------------------


class Bounded(io.RawIOBase):
    """The bytes from a server, MAX_BYTES at most, each read in what is left of the rule's budget."""

    def __init__(self, http: "Http", connection: socket.socket) -> None:
        self._http = http
        self._socket = connection
        self._n_left = MAX_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(self._http.seconds_left())
        n_bytes = self._socket.recv_into(buffer)
        self._n_left -= n_bytes
        if self._n_left < 0:
            raise NoReply(f"expected {MAX_BYTES} bytes at most, got more")
        return n_bytes


class Connection:
    """Bytes to a server, and replies from it."""

    def __init__(self, http: "Http", connection: socket.socket) -> None:
        self._http = http
        self._socket = connection
        self._reader = io.BufferedReader(Bounded(http, connection), PIECE_BYTES)

    def send(self, data: bytes) -> None:
        self._socket.settimeout(self._http.seconds_left())
        self._socket.sendall(data)

    def line(self) -> bytes:
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the connection ended before the reply did")
        return line

    def exactly(self, n_bytes: int) -> bytes:
        if n_bytes > MAX_BYTES:
            raise NoReply(f"expected {MAX_BYTES} bytes at most, {n_bytes} are to come")
        data = self._reader.read(n_bytes)
        if len(data) < n_bytes:
            raise EOFError("the connection ended before the reply did")
        return data

    # --- HTTP -----------------------------------------------------------------------------------------------

    def reply(self, asked: str) -> Reply:
        """Read the status and the headers; the body is still to come."""
        status = 100
        headers: dict[str, str] = {}
        while 100 <= status < 200 and status != 101:
            status_line = self.line()
            match = STATUS_LINE.match(status_line)
            if not match:
                raise NoReply(f"HTTP: expected HTTP/1.1 and a status, got {status_line[:80]!r}")
            status = int(match[1])
            headers = dict(self._headers())
        return Reply(asked, status, headers, self._body(status, headers), self)

    def _headers(self) -> Iterator[tuple[str, str]]:
        while line := self.line().decode("latin-1").strip():
            name, _, value = line.partition(":")
            yield name.lower(), value.strip()

    def _body(self, status: int, headers: Mapping[str, str]) -> Iterator[bytes]:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            while chunk := self._chunk():
                yield chunk
            dict(self._headers())
        elif "content-length" in headers:
            length = headers["content-length"]
            if not length.isdecimal():
                raise NoReply(f"HTTP: expected a number as Content-Length, got {length!r}")
            yield self.exactly(int(length))
        elif status != 204:
            while data := self._reader.read1(PIECE_BYTES):
                yield data

    def _chunk(self) -> bytes:
        """Read the next chunk; the last one is empty."""
        line = self.line()
        match = CHUNK_SIZE.fullmatch(line)
        if not match:
            raise NoReply(f"HTTP: expected the size of a chunk, got {line[:80]!r}")
        chunk = self.exactly(int(match[1], 16))
        if chunk:
            self.line()
        return chunk


# --- requests -----------------------------------------------------------------------------------------------


class Http:
    """One server.

    `long`: members of a body that make its answer long, such as a bias against the end token.
    `budget`: seconds for each rule.
    """

    shown = ""  # what was answered last: it stands by the verdict

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
        self.headers = {"Host": self.url.netloc, "Accept-Encoding": "identity"} | dict(headers or {})
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._budget = budget
        self.forget()
        self.start()

    @property
    def has_key(self) -> bool:
        return "Authorization" in self.headers

    def start(self) -> None:
        """Begin the budget of a rule."""
        self._deadline = time.monotonic() + self._budget

    def hurry(self, seconds: float) -> None:
        """Leave at most so long for the rest of the rule."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def forget(self) -> None:
        """Ask again what several rules are about."""
        self._replies: dict[tuple[str, str], Reply | Exception] = {}

    def seconds_left(self) -> float:
        """Return what is left of the budget; raises NoReply if nothing is."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise NoReply(f"the rule's budget of {self._budget:g} s is used up")
        return left

    def ask(self, method: str, path: str, body: Json | bytes | None = None, **headers: str) -> Reply:
        """Ask, and read the whole reply; raises NoReply, for a server that is busy too."""
        with self.open(method, path, body, headers) as reply:
            pieces = list(reply.pieces)
        reply = reply._replace(pieces=pieces, body=b"".join(pieces))
        if reply.status in BUSY:
            raise NoReply(f"the server is busy: {reply}")
        self.shown = str(reply)
        return reply

    def once(self, path: str, body: Json | bytes) -> Reply:
        """Ask what several rules are about; a reply that breaks off is left to the rule whole-frames."""
        with presumed("whole-frames"):
            return self.shared(path, body)

    def shared(self, path: str, body: Json | bytes) -> Reply:
        """Ask once what several rules are about; the request has a budget of its own."""
        key = path, str(body)
        if key not in self._replies:
            self.start()
            try:
                self._replies[key] = self.ask("POST", path, body)
            except (NoReply, AssertionError) as error:  # a hang is waited for once
                self._replies[key] = error
        reply = self._replies[key]
        if isinstance(reply, Exception):
            raise reply
        self.shown = str(reply)
        return reply

    @contextlib.contextmanager
    def stream(self, path: str, body: Json, is_slow: bool = False) -> Iterator[Iterator[Json]]:
        """Yield the events of a stream as they come, one at least; leaving the block leaves the stream."""
        body = {"model": self.model, "stream": True} | body
        with self.open("POST", path, body, is_slow=is_slow) as reply:
            if not reply.is_stream:
                refused = reply._replace(body=b"".join(reply.pieces))
                raise NotApplicable(f"no stream came: {refused.refusal}")
            events = self._shown(events_of(reply.pieces))
            first = next(events, None)
            if first is None:
                raise NotApplicable("no event came")
            yield itertools.chain([first], events)

    def _shown(self, events: Iterator[Json]) -> Iterator[Json]:
        for event in events:
            self.shown = json.dumps(event, ensure_ascii=False)
            yield event

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        body: Json | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        is_slow: bool = False,
    ) -> Iterator[Reply]:
        """Yield the reply as it comes, on a connection of its own."""
        raw = json.dumps(body).encode() if isinstance(body, dict) else body or b""
        names = dict(headers or {})
        if body is not None:
            names |= {"Content-Type": "application/json", "Content-Length": str(len(raw))}
        shown = f"({len(raw)} bytes)" if isinstance(body, bytes) else json.dumps(body or "")
        asked = shortened(f"{method} {path} {shown}", 300)
        try:
            with self._connected(is_slow) as connected:
                connection = Connection(self, connected)
                connection.send(self._head(method, path, names) + raw)
                reply = connection.reply(asked)
                self.shown = str(reply)
                yield reply
        except (EOFError, ConnectionResetError) as error:
            raise AssertionError(f"expected a whole reply: {asked} -> {error}") from error
        except TimeoutError as error:
            reason = f"nothing came for the rest of the rule's budget of {self._budget:g} s"
            raise NoReply(f"{asked} -> {reason}") from error
        except OSError as error:
            raise NoReply(f"{asked} -> {error}") from error

    def _head(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        """Make the head of a request; a header that is "" is not sent, a path with // begins at the root."""
        target = path.removeprefix("/") if path.startswith("//") else self.url.path + path
        lines = [f"{method} {target} HTTP/1.1"]
        for name, value in (self.headers | headers).items():
            if value:
                lines.append(f"{name.replace('_', '-')}: {value}")
        return "\r\n".join([*lines, "", ""]).encode()

    def _connected(self, is_slow: bool) -> socket.socket:
        host = self.url.hostname or ""
        has_tls = self.url.scheme == "https"
        try:
            addresses = socket.getaddrinfo(host, self.url.port or (80, 443)[has_tls], type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise NoReply(f"name: no address of {host!r} is known: {error}") from error
        failure: OSError | None = None
        for family, kind, protocol, _, address in addresses:
            timeout = self.seconds_left()
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(timeout)
                if is_slow:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # rounded up to the least
                connection.connect(address)
                if has_tls:
                    return ssl.create_default_context().wrap_socket(connection, server_hostname=host)
                return connection
            except OSError as error:
                connection.close()
                failure = error
        layer = "TLS" if isinstance(failure, ssl.SSLError) else "connection"
        raise NoReply(f"{layer}: {failure}") from failure


def events_of(pieces: Iterable[bytes]) -> Iterator[Json]:
    """Yield the events of a stream as its bytes come; one that breaks off ends: see the rule whole-frames."""
    unread = b""
    with contextlib.suppress(EOFError):
        for piece in pieces:
            unread += piece
            while blank_line := BLANK_LINE.search(unread):
                yield from events_in(unread[: blank_line.end()])
                unread = unread[blank_line.end() :]
