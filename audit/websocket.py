"""The client side of a WebSocket, of the standard library alone: a handshake, masked frames, messages.

    with connected(peer) as socket:
        socket.turn(said="hi") --> [event, ...]        socket.ping(b"x") --> messages before its answer

Authority: RFC 6455; https://developers.openai.com/api/docs/guides/websocket-mode for what a turn is.

Rules of this file:
1. A server that does not switch protocols has no WebSocket: no rule is about it.
2. What a server must not send (masked frames, binary messages, half a frame) is an AssertionError.

Not here: what the events must say (turns.py), HTTP (peer.py).
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from audit.events import TERMINAL
from audit.http import Connection, Reply
from audit.peer import Peer
from audit.rules import NotApplicable
from audit.schema import Json
from audit.stream import DONE, parsed

KEY, ACCEPT = "dGhlIHNhbXBsZSBub25jZQ==", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # RFC 6455, section 1.3
TEXT, CLOSE, PING, PONG = 1, 8, 9, 10  # opcodes, section 5.2
FINAL = MASKED = 0x80  # bits of the first and of the second byte of a frame
LENGTHS = {126: 2, 127: 8}  # second byte of a frame -> bytes of the length that follows
# A mask keeps what a web page sends from being taken for HTTP by a proxy; this one changes nothing.
MASK = bytes(4)
NO_CODE = 1005  # of a close that gives none, section 7.4.1
ENDS = {*TERMINAL, "error"}


class Closed(AssertionError):
    """The server has closed the connection, unasked."""


class WebSocket:
    """One connection after its handshake."""

    def __init__(self, peer: Peer, connection: Connection) -> None:
        self.peer = peer
        self._connection = connection

    def turn(self, **asked: Any) -> list[Json]:
        """Return the events of one turn, to its last one or to an error; it is asked as by Peer.request()."""
        _, body = self.peer.request(stream=None, **{"store": False} | asked)
        self.send_frame(TEXT, json.dumps({"type": "response.create"} | body).encode())
        events = [self.event()]
        while events[-1].get("type") not in ENDS:
            events.append(self.event())
        return events

    def event(self) -> Json:
        """Return the next message, which is an event; [DONE] is for the rule ws-end to name."""
        opcode, payload = self.message()
        while opcode == PONG or payload == DONE.encode():
            opcode, payload = self.message()
        event = parsed(payload.decode("utf-8", "replace"))
        assert opcode == TEXT, "expected a text message"
        assert event, "expected a JSON object"
        return event

    def ping(self, text: bytes) -> list[bytes]:
        """Return the messages that come before the answer to a ping."""
        self.send_frame(PING, text)
        messages = [self.message()]
        while messages[-1][0] != PONG:
            messages.append(self.message())
        *earlier, pong = (payload for _, payload in messages)
        assert pong == text, "expected a pong with the text of its ping"
        return earlier

    def close(self) -> None:
        """Close it, and wait for the server's close."""
        self.send_frame(CLOSE, (1000).to_bytes(2, "big"))
        with contextlib.suppress(Closed):
            while True:
                self.message()

    def message(self) -> tuple[int, bytes]:
        """Return opcode and payload of the next message, or of the answer to a ping."""
        opcode, payload, is_final = self._frame()
        while not is_final:
            _, more, is_final = self._frame()
            payload += more
        return opcode, payload

    def send_frame(self, opcode: int, payload: bytes) -> None:
        size = len(payload)
        head = bytes([FINAL | opcode, MASKED | min(size, 126 + (size >= 2**16))])
        if size >= 126:
            head += size.to_bytes(LENGTHS[head[1] - MASKED], "big")
        self._connection.send(head + MASK + payload)

    def _frame(self) -> tuple[int, bytes, int]:
        """Return opcode, payload and the final bit of the next frame; a ping is answered."""
        while True:
            first, size = self._connection.exactly(2)
            assert not size & MASKED, "expected frames of a server not to be masked"
            if size in LENGTHS:
                size = int.from_bytes(self._connection.exactly(LENGTHS[size]), "big")
            data = self._connection.exactly(size)
            self.peer.shown = data.decode("utf-8", "replace") or "an empty frame"
            opcode = first & 0x0F
            if opcode == CLOSE:
                code = int.from_bytes(data[:2], "big") or NO_CODE
                raise Closed(f"expected the connection to stay open, got a close with the code {code}")
            if opcode != PING:
                return opcode, data, first & FINAL
            self.send_frame(PONG, data)


@contextlib.contextmanager
def connected(peer: Peer) -> Iterator[WebSocket]:
    """Yield a connection; raises NotApplicable if the server has no WebSocket."""
    with handshake(peer) as reply:
        if reply.status != 101:
            raise NotApplicable(f"no WebSocket: {reply.status}")
        got = reply.headers.get("sec-websocket-accept")
        assert got == ACCEPT, f"expected Sec-WebSocket-Accept {ACCEPT}, got {got}"
        yield WebSocket(peer, reply.connection)


def handshake(peer: Peer, **headers: Any) -> contextlib.AbstractContextManager[Reply]:
    """Ask for an upgrade."""
    headers |= {"Upgrade": "websocket", "Connection": "Upgrade"}
    headers |= {"Sec_WebSocket_Version": "13", "Sec_WebSocket_Key": KEY}
    return peer.open("GET", "/responses", **headers)
