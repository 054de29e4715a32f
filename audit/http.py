"""A server as seen from outside, over HTTP/1.1: nothing is known of the program.

    Connection(socket, seconds_left, "curl ...").reply("GET /models") --> Reply, or NoReply

The problem is that a server under audit may be hostile: it may send headers by the byte, a chunk of a
terabyte, a body without end. So all bytes come through one place, Connection.readinto(), which has a limit
in time and in bytes. http.client reads the status and the headers. The body is read here, because the rule
`writes` needs its chunks as they were written.

Authority: RFC 9112 (HTTP/1.1).

Rules of this file:
1. `seconds_left` raises NoReply when the budget of the rule is used up: every wait asks it.
2. A reply that breaks off is an EOFError.

Not here: the requests (peer.py), the rules on replies (answers.py, agents.py and so on).
"""

import io
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPResponse
from typing import Any

from audit.rules import NoReply, NotApplicable
from audit.schema import Json, object_in, shortened
from audit.stream import events_of, parsed

NOT_THERE = {404, 405, 501}
REFUSED = NOT_THERE | {400, 403, 415, 422}
MAX_BYTES = 2**26  # of a reply: no answer to a rule has a tenth of that
SHOWN_BYTES = 2**14  # of a reply, shown in a report


@dataclass
class Reply:
    asked: str  # the request, as people read it
    status: int
    headers: dict[str, str]  # names in lower case
    pieces: Iterable[bytes]  # of the body, as they come; chunks, if it comes in chunks
    connection: "Connection"  # the bytes after an upgrade

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
        """The object in the member `error`; {} without one."""
        return object_in(self.json, "error")

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
            raise NotApplicable(f"refused with {self.status}: {self}")
        return self

    def if_stream(self) -> "Reply":
        """Return this, if it is a stream: else (see the rule stream-comes) no other rule is about it."""
        if not self.is_stream:
            raise NotApplicable(f"no stream came: {self}")
        return self

    def __str__(self) -> str:
        return f"{self.asked} -> {self.status} {shortened(' '.join(self.text.split()), 300)}"


class Connection(io.RawIOBase):
    """Bytes to a server and from it, MAX_BYTES at most, each in what is left of the rule's budget.

    `asked` is the request as a command for a shell, `received` the first bytes of the reply, as they came.
    """

    def __init__(self, connection: socket.socket, seconds_left: Callable[[], float], asked: str) -> None:
        self.asked = asked
        self.received = b""
        self._socket = connection
        self._seconds_left = seconds_left
        self._n_left = MAX_BYTES
        self._reader = io.BufferedReader(self)

    def send(self, data: bytes) -> None:
        self._socket.settimeout(self._seconds_left())
        self._socket.sendall(data)

    def exactly(self, n_bytes: int) -> bytes:
        if n_bytes not in range(MAX_BYTES):
            raise NoReply(f"expected fewer than {MAX_BYTES} bytes, got {n_bytes}")
        data = self._reader.read(n_bytes)
        if len(data) < n_bytes:
            raise EOFError("the connection ended before the reply did")
        return data

    def reply(self, asked: str) -> Reply:
        """Read the status and the headers; the body is still to come. Raises http.client.HTTPException."""
        head = HTTPResponse(self)  # type: ignore[arg-type]  # it calls makefile() alone
        head.begin()
        headers = {name.lower(): value for name, value in head.getheaders()}
        return Reply(asked, head.status, headers, self._body(head), self)

    def _body(self, head: HTTPResponse) -> Iterator[bytes]:
        if head.length is not None:
            yield self.exactly(head.length)
        elif not head.chunked:
            yield from iter(self._reader.read1, b"")
        else:
            while line := self._reader.readline():
                n_bytes = int(line.partition(b";")[0], 16)
                if n_bytes == 0:
                    return
                yield self.exactly(n_bytes)
                self.exactly(len(b"\r\n"))
            raise EOFError("the connection ended before the last chunk")

    # --- what io and http.client call -----------------------------------------------------------------------

    def makefile(self, mode: str) -> io.BufferedIOBase:
        return self._reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(self._seconds_left())
        n_bytes = self._socket.recv_into(buffer)
        self.received += bytes(buffer[: min(n_bytes, SHOWN_BYTES - len(self.received))])
        self._n_left -= n_bytes
        if self._n_left < 0:
            raise NoReply(f"expected {MAX_BYTES} bytes at most, got more")
        return n_bytes
