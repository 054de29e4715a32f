"""The client side of a WebSocket, of the standard library alone: a handshake, masked frames, messages.

    with connected(peer) as socket:
        socket.turn({"input": "hi"}) --> [event, ...]        socket.ping(b"x") --> messages before its answer

Authority: RFC 6455; https://developers.openai.com/api/docs/guides/websocket-mode for what a turn is.

Rules of this file:
1. A server that does not switch protocols has no WebSocket: no rule is about it.
2. What a server must not send (masked frames, binary messages, half a frame) is an AssertionError.

Not here: what the events must say (turns.py), HTTP (peer.py).
"""

import base64
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator

from audit.events import TERMINAL
from audit.http import Connection, Reply
from audit.peer import Peer
from audit.rules import NotApplicable
from audit.schema import Json
from audit.stream import DONE, parsed

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
TEXT, CLOSE, PING, PONG = 1, 8, 9, 10  # opcodes, section 5.2
FINAL = MASKED = 0x80  # bits of the first and of the second byte of a frame
NO_CODE = 1005  # of a close that gives none, section 7.4.1
ENDS = {*TERMINAL, "error"}
PATH = "/responses"


class Closed(Exception):
    """The server has closed the connection."""

    def __init__(self, code: int) -> None:
        super().__init__(f"closed with code {code}")
        self.code = code


class WebSocket:
    """One connection after its handshake."""

    def __init__(self, peer: Peer, connection: Connection) -> None:
        self.peer = peer
        self._connection = connection

    def turn(self, body: Json) -> list[Json]:
        """Return the events of one turn, to its last one or to an error."""
        message = {"type": "response.create", "model": self.peer.model} | body
        self.send_frame(TEXT, json.dumps(message).encode())
        events = [self.event()]
        while events[-1].get("type") not in ENDS:
            events.append(self.event())
        return events

    def event(self) -> Json:
        """Return the next message, which is an event; [DONE] is for the rule ws-end to name."""
        opcode, payload = self.message()
        while opcode == PONG or payload == DONE.encode():
            opcode, payload = self.message()
        text = payload.decode("utf-8", "replace")
        event = parsed(text)
        is_event = opcode == TEXT and event
        assert is_event, "expected a text message that is a JSON object"
        return event

    def ping(self, text: bytes) -> list[bytes]:
        """Return the messages that come before the answer to a ping."""
        self.send_frame(PING, text)
        earlier: list[bytes] = []
        opcode, payload = self.message()
        while opcode != PONG:
            earlier.append(payload)
            opcode, payload = self.message()
        assert payload == text, "expected a pong with the text of its ping"
        return earlier

    def close(self) -> int:
        """Close it, and return the code with which the server closes."""
        self.send_frame(CLOSE, (1000).to_bytes(2, "big"))
        try:
            while True:
                self.message()
        except Closed as closed:
            return closed.code

    def message(self) -> tuple[int, bytes]:
        """Return opcode and payload of the next message, or of the answer to a ping."""
        kind = 0
        payload = b""
        while True:
            is_final, opcode, data = self._frame()
            if opcode == CLOSE:
                raise Closed(int.from_bytes(data[:2], "big") or NO_CODE)
            if opcode == PONG:
                return opcode, data
            if opcode == PING:
                self.send_frame(PONG, data)
                continue
            kind = kind or opcode
            payload += data
            if is_final:
                return kind, payload

    def send_frame(self, opcode: int, payload: bytes) -> None:
        size = len(payload)
        if size < 126:
            length = bytes([MASKED | size])
        elif size < 2**16:
            length = bytes([MASKED | 126]) + size.to_bytes(2, "big")
        else:
            length = bytes([MASKED | 127]) + size.to_bytes(8, "big")
        mask = os.urandom(4)
        masks = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        masked = (int.from_bytes(payload, "big") ^ masks).to_bytes(size, "big")
        self._connection.send(bytes([FINAL | opcode]) + length + mask + masked)

    def _frame(self) -> tuple[bool, int, bytes]:
        first, second = self._connection.exactly(2)
        assert not second & MASKED, "expected frames of a server not to be masked"
        size = second
        if size > 125:
            size = int.from_bytes(self._connection.exactly(2 if size == 126 else 8), "big")
        data = self._connection.exactly(size)
        self.peer.shown = data.decode("utf-8", "replace") or "an empty frame"
        return bool(first & FINAL), first & 0x0F, data


@contextlib.contextmanager
def connected(peer: Peer) -> Iterator[WebSocket]:
    """Yield a connection; raises NotApplicable if the server has no WebSocket."""
    key = base64.b64encode(os.urandom(16))
    with handshake(peer, key.decode()) as reply:
        if reply.status != 101:
            raise NotApplicable(f"no WebSocket: {reply.status}")
        digest = hashlib.sha1(key + GUID, usedforsecurity=False).digest()
        expected = base64.b64encode(digest).decode()
        got = reply.headers.get("sec-websocket-accept")
        assert got == expected, f"expected Sec-WebSocket-Accept {expected}, got {got}"
        try:
            yield WebSocket(peer, reply.connection)
        except Closed as closed:
            raise AssertionError(f"expected the connection to stay open: {closed}") from closed


def handshake(peer: Peer, key: str, **headers: str) -> contextlib.AbstractContextManager[Reply]:
    """Ask for an upgrade."""
    headers |= {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    return peer.open("GET", PATH, headers=headers | {"Sec-WebSocket-Key": key})
