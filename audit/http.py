"""HTTP/1.1 read by hand: a server as seen from outside, nothing known of the program.

    with connected(url, seconds_left) as socket:
        Connection(socket, seconds_left).reply("GET /models") --> Reply, or NoReply

The problem is that a server under audit may be hostile: it may send headers by the byte, a chunk of a
terabyte, a body without end. So all bytes come through one place, Connection._receive(), which has a limit
in time and in bytes. The bytes of a reply are kept as they were written, chunk by chunk.

Authority: RFC 9112 (HTTP/1.1).

Rules of this file:
1. `seconds_left` raises NoReply when the budget of the rule is used up: every wait asks it.
2. A reply that breaks off is an EOFError. A server that cannot be reached is NoReply, which names the layer:
   name, connection, TLS or HTTP.

Not here: what is asked (peer.py), what the replies must be (clients.py, answers.py and so on).
"""

import contextlib
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import SplitResult

from audit.rules import NoReply, NotApplicable
from audit.schema import Json, shortened
from audit.stream import events_of, parsed

NOT_THERE = {404, 405, 501}
REFUSED = NOT_THERE | {400, 403, 415, 422}
PIECE_BYTES = 2**16  # read at once
MAX_BYTES = 2**26  # of a reply: no answer that a rule asks for has a tenth of that
STATUS_LINE = re.compile(r"HTTP/1\.[01] (\d{3})")
CHUNK_SIZE = re.compile(r"([0-9a-fA-F]+)\s*(?:;.*)?")
SEGMENT_BYTES = 536  # of a slow client: a server can send it 40 kB at most before it has to wait


@dataclass
class Reply:
    asked: str  # the request, as people read it
    status: int
    headers: Mapping[str, str]  # names in lower case
    pieces: Iterable[bytes]  # of the body, as they come; chunks, if it comes in chunks
    connection: "Connection"  # what comes after an upgrade

    @cached_property
    def chunks(self) -> list[bytes]:
        """Read the pieces to their end."""
        return list(self.pieces)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

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
        return list(events_of(self.chunks))

    def if_there(self, refusals: Iterable[int] = NOT_THERE) -> "Reply":
        """Return this, unless it is one of the refusals: no rule is about what a server need not have."""
        if self.status in refusals:
            raise NotApplicable(f"refused: {self.refusal}")
        return self

    def if_stream(self) -> "Reply":
        """Return this, if it is a stream: else (see the rule stream-comes) no other rule is about it."""
        if not self.is_stream:
            raise NotApplicable(f"no stream came: {self.refusal}")
        return self

    @property
    def refusal(self) -> str:
        """The status, and what the server says about it."""
        message = str(self.error.get("message") or self.text)
        return f"{self.status} {shortened(' '.join(message.split()), 160)}"

    def __str__(self) -> str:
        return f"{self.asked} -> {self.status} {shortened(' '.join(self.text.split()), 300)}"


class Connection:
    """Bytes to a server and from it, MAX_BYTES at most, each in what is left of the rule's budget."""

    def __init__(self, connection: socket.socket, seconds_left: Callable[[], float]) -> None:
        self._socket = connection
        self._seconds_left = seconds_left
        self._unread = bytearray()
        self._n_left = MAX_BYTES

    def send(self, data: bytes) -> None:
        self._socket.settimeout(self._seconds_left())
        self._socket.sendall(data)

    def _receive(self) -> None:
        """Read on; raises EOFError at the end."""
        self._socket.settimeout(self._seconds_left())
        data = self._socket.recv(PIECE_BYTES)
        if not data:
            raise EOFError("the connection ended before the reply did")
        self._unread += data
        self._n_left -= len(data)
        if self._n_left < 0:
            raise NoReply(f"expected {MAX_BYTES} bytes at most, got more")

    def line(self) -> str:
        while b"\n" not in self._unread:
            self._receive()
        line = self.exactly(self._unread.index(b"\n") + 1)
        return line.decode("latin-1").strip()

    def exactly(self, n_bytes: int) -> bytes:
        while len(self._unread) < n_bytes:
            self._receive()
        data = bytes(self._unread[:n_bytes])
        del self._unread[:n_bytes]
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
            headers = self._headers()
        return Reply(asked, status, headers, self._body(status, headers), self)

    def _headers(self) -> dict[str, str]:
        lines = [line.partition(":") for line in iter(self.line, "")]
        return {name.lower(): value.strip() for name, _, value in lines}

    def _body(self, status: int, headers: Mapping[str, str]) -> Iterator[bytes]:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            while chunk := self._chunk():
                yield chunk
            self._headers()
        elif "content-length" in headers:
            length = headers["content-length"]
            if not length.isdecimal():
                raise NoReply(f"HTTP: expected a number as Content-Length, got {length!r}")
            yield self.exactly(int(length))
        elif status != 204:
            with contextlib.suppress(EOFError):
                while True:
                    yield self.exactly(len(self._unread))
                    self._receive()

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


def connected(url: SplitResult, seconds_left: Callable[[], float], is_slow: bool = False) -> socket.socket:
    """Connect to the first address that answers."""
    host = url.hostname or ""
    has_tls = url.scheme == "https"
    try:
        addresses = socket.getaddrinfo(host, url.port or (80, 443)[has_tls], type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NoReply(f"name: no address of {host!r} is known: {error}") from error
    failure: OSError | None = None
    for family, kind, protocol, _, address in addresses:
        timeout = seconds_left()
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(timeout)
        if is_slow:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # rounded up to the least
        try:
            connection.connect(address)
            if has_tls:
                return ssl.create_default_context().wrap_socket(connection, server_hostname=host)
            return connection
        except OSError as error:
            connection.close()
            failure = error
    layer = "TLS" if isinstance(failure, ssl.SSLError) else "connection"
    raise NoReply(f"{layer}: {failure}") from failure
