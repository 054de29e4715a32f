"""The client side of a WebSocket, of the standard library alone: a handshake, masked frames, messages.

    with connected(peer) as socket:
        socket.turn({"input": "hi"}) --> [event, ...]        socket.ping(b"x") --> messages before its answer

Authority: RFC 6455; https://developers.openai.com/api/docs/guides/websocket-mode for what a turn is.

Rules of this file:
1. A server that does not switch protocols has no WebSocket: no rule is about it.
2. What a server must not send (masked frames, binary messages, half a frame) is Failed.

Not here: what the events must say (checks_websocket.py), HTTP (peer.py).
"""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import socket
from collections.abc import Iterator
from typing import BinaryIO

from audit import recordings
from audit.peer import Failed, Json, NotApplicable, Peer, expect
from audit.rules_events import TERMINAL

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10  # opcodes, section 5.2
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
    """One connection behind its handshake; `peer` has the budget of seconds."""

    def __init__(self, peer: Peer, connection: socket.socket, incoming: BinaryIO) -> None:
        self._peer = peer
        self._connection = connection
        self._incoming = incoming

    # --- turns ----------------------------------------------------------------------------------------------

    def turn(self, body: Json) -> list[Json]:
        """The events of one turn, to its last one or to an error."""
        message = {"type": "response.create", "model": self._peer.model} | body
        self.send_frame(TEXT, json.dumps(message).encode())
        events = [self.event()]
        while events[-1].get("type") not in ENDS:
            events.append(self.event())
        return events

    def event(self) -> Json:
        """The next message, which is an event; [DONE] is for the rule ws-end to name."""
        opcode, payload = self.message()
        while opcode == PONG or payload == b"[DONE]":
            opcode, payload = self.message()
        text = payload.decode("utf-8", "replace")
        expect(opcode == TEXT, "expected a text message", f"a binary one of {len(payload)} bytes")
        event = recordings.parsed(text)
        expect(event, "expected a message to be a JSON object", text)
        return event

    def ping(self, text: bytes) -> list[bytes]:
        """Messages that come before the answer to a ping."""
        self.send_frame(PING, text)
        earlier: list[bytes] = []
        opcode, payload = self.message()
        while opcode != PONG:
            earlier.append(payload)
            opcode, payload = self.message()
        expect(payload == text, "expected a pong with the text of its ping", payload)
        return earlier

    def close(self) -> int:
        """Close it, and give the code with which the server closes."""
        self.send_frame(CLOSE, (1000).to_bytes(2, "big"))
        try:
            while True:
                self.message()
        except Closed as closed:
            return closed.code

    # --- frames ---------------------------------------------------------------------------------------------

    def message(self) -> tuple[int, bytes]:
        """Opcode and payload of the next message, or of the answer to a ping."""
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
        head = bytes([FINAL | opcode])
        size = len(payload)
        if size < 126:
            head += bytes([MASKED | size])
        elif size < 1 << 16:
            head += bytes([MASKED | 126]) + size.to_bytes(2, "big")
        else:
            head += bytes([MASKED | 127]) + size.to_bytes(8, "big")
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
        self._connection.settimeout(self._peer.seconds_left())
        self._connection.sendall(head + mask + masked)

    def _frame(self) -> tuple[bool, int, bytes]:
        first, second = self._read(2)
        expect(
            not second & MASKED, "expected frames of a server not to be masked", f"{first:08b} {second:08b}"
        )
        size = second & 0x7F
        if size > 125:
            size = int.from_bytes(self._read(2 if size == 126 else 8), "big")
        return bool(first & FINAL), first & 0x0F, self._read(size)

    def _read(self, n_bytes: int) -> bytes:
        self._connection.settimeout(self._peer.seconds_left())
        data = self._incoming.read(n_bytes)
        if len(data) < n_bytes:
            raise Failed("expected the server to close the connection before it ends it", data)
        return data


@contextlib.contextmanager
def connected(peer: Peer) -> Iterator[WebSocket]:
    """A connection, in a with block; raises NotApplicable where the server has no WebSocket."""
    with peer.connection(f"WebSocket {PATH}") as connection:
        reply, key = handshake(peer, connection)
        if reply.status != http.client.SWITCHING_PROTOCOLS:
            raise NotApplicable(f"no WebSocket: {reply.status} {reply.reason}")
        digest = hashlib.sha1(key + GUID, usedforsecurity=False).digest()
        expected = base64.b64encode(digest).decode()
        got = reply.headers.get("Sec-WebSocket-Accept")
        expect(got == expected, f"expected Sec-WebSocket-Accept {expected}, got {got}", reply.headers)
        try:
            yield WebSocket(peer, connection.sock, reply.fp)
        except Closed as closed:
            raise Failed("expected the connection to stay open", closed) from closed


def handshake(peer: Peer, connection: http.client.HTTPConnection) -> tuple[http.client.HTTPResponse, bytes]:
    """The reply to an upgrade, and the key that was sent."""
    key = base64.b64encode(os.urandom(16))
    headers = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": key.decode(),
        "Sec-WebSocket-Version": "13",
    }
    connection.request("GET", peer.url.path + PATH, headers=peer.headers | headers)
    return connection.getresponse(), key
