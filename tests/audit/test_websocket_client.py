"""The client side of a WebSocket, against bytes as RFC 6455 has them."""

import socket
from collections.abc import Iterator

import pytest

from audit.http import Connection
from audit.peer import Peer
from audit.turns import CLOSE, PING, PONG, TEXT, Closed, WebSocket

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
    if size < 126:
        length = bytes([mask | size])
    elif size < 1 << 16:
        length = bytes([mask | 126]) + size.to_bytes(2, "big")
    else:
        length = bytes([mask | 127]) + size.to_bytes(8, "big")
    return bytes([is_final << 7 | opcode]) + length + payload


def received(theirs: socket.socket) -> tuple[int, bytes]:
    """Opcode and payload of a short frame of the client."""
    data = theirs.recv(200)
    size = data[1] & 127
    assert data[1] & 128, "a client masks its frames"
    mask = data[2:6]
    return data[0] & 15, bytes(byte ^ mask[i % 4] for i, byte in enumerate(data[6 : 6 + size]))


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_a_message_of_any_size(pair: Pair, size: int) -> None:
    client, theirs = pair
    theirs.sendall(frame(TEXT, b'{"a": "%b"}' % (b"x" * size)))
    assert client.event() == {"a": "x" * size}


def test_a_message_in_parts_with_a_ping_between(pair: Pair) -> None:
    client, theirs = pair
    theirs.sendall(
        frame(TEXT, b'{"a"', is_final=False) + frame(PING, b"there?") + frame(CONTINUATION, b": 1}")
    )
    assert client.event() == {"a": 1}
    assert received(theirs) == (PONG, b"there?")


def test_what_comes_before_a_pong(pair: Pair) -> None:
    client, theirs = pair
    theirs.sendall(frame(TEXT, b"[DONE]") + frame(PONG, b"x"))
    assert client.ping(b"x") == [b"[DONE]"]
    assert received(theirs) == (PING, b"x")


@pytest.mark.parametrize(
    "sent",
    [
        frame(TEXT, b"{}", mask=128),
        frame(BINARY, b'{"a": 1}'),
        frame(TEXT, b"no JSON"),
        frame(TEXT, b"{}")[:2],
    ],
    ids=["masked", "binary", "no-json", "half"],
)
def test_what_a_server_must_not_send(pair: Pair, sent: bytes) -> None:
    client, theirs = pair
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises((AssertionError, EOFError)):
        client.event()


def test_a_close(pair: Pair) -> None:
    client, theirs = pair
    theirs.sendall(frame(CLOSE, (1012).to_bytes(2, "big")))
    with pytest.raises(Closed, match="1012"):
        client.event()
