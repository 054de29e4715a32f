"""The client side of a WebSocket, against bytes as RFC 6455 has them."""

import socket
from collections.abc import Iterator

import pytest

from audit.http import Connection
from audit.peer import Peer
from audit.turns import CLOSE, PING, PONG, TEXT, WebSocket

CONTINUATION, BINARY = 0, 2  # opcodes
Pair = tuple[WebSocket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    peer = Peer("http://127.0.0.1:9", "m", budget=5)
    with ours, theirs:
        yield WebSocket(peer, Connection(ours, peer.seconds_left)), theirs


def frame(opcode: int, payload: bytes, is_final: bool = True, mask: int = 0) -> bytes:
    size = len(payload)
    short, n_bytes = (size, 0) if size < 126 else (126, 2) if size < 1 << 16 else (127, 8)
    length = bytes([mask | short]) + size.to_bytes(8, "big")[8 - n_bytes :]
    return bytes([is_final << 7 | opcode]) + length + payload


def received(theirs: socket.socket) -> tuple[int, bytes]:
    """Return opcode and payload of a short frame of the client, whose mask changes nothing."""
    data = theirs.recv(200)
    assert data[1] & 128, "a client masks its frames"
    assert data[2:6] == bytes(4)
    return data[0] & 15, data[6:]


def test_messages_of_any_size_in_parts_and_what_comes_before_a_pong(pair: Pair) -> None:
    client, theirs = pair
    for size in (0, 125, 126, 65_535, 65_536):
        theirs.sendall(frame(TEXT, b'{"a": "%b"}' % (b"x" * size)))
        assert client.event() == {"a": "x" * size}
    parts = frame(TEXT, b'{"a"', is_final=False) + frame(PING, b"there?") + frame(CONTINUATION, b": 1}")
    theirs.sendall(parts + frame(TEXT, b"[DONE]") + frame(PONG, b"x"))
    assert client.event() == {"a": 1}
    assert received(theirs) == (PONG, b"there?")
    assert client.ping(b"x") == [b"[DONE]"]
    assert received(theirs) == (PING, b"x")


MASKED, HALF = frame(TEXT, b"{}", mask=128), frame(TEXT, b"{}")[:2]


CLOSED = frame(CLOSE, (1012).to_bytes(2, "big"))
NO_TEXT, NO_JSON = frame(BINARY, b'{"a": 1}'), frame(TEXT, b"no JSON")
WRONG = {"masked": MASKED, "a text message": NO_TEXT, "a JSON object": NO_JSON, "ended": HALF, "1012": CLOSED}


@pytest.mark.parametrize("said", WRONG)
def test_what_a_server_must_not_send(pair: Pair, said: str) -> None:
    client, theirs = pair
    theirs.sendall(WRONG[said])
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises((AssertionError, EOFError), match=said):
        client.event()
