"""The client side of a WebSocket, against bytes as RFC 6455 has them."""

import socket
from collections.abc import Iterator

import pytest
from websockets.frames import Frame, Opcode

from audit.http import Connection
from audit.peer import Peer
from audit.turns import WebSocket

Pair = tuple[WebSocket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    peer = Peer("http://127.0.0.1:9", "m", budget=5)
    with ours, theirs:
        yield WebSocket(peer, Connection(ours, peer.seconds_left, "")), theirs


def frame(opcode: Opcode, payload: bytes, fin: bool = True, mask: bool = False) -> bytes:
    return Frame(opcode, payload, fin).serialize(mask=mask)


def received(theirs: socket.socket) -> tuple[int, bytes]:
    """Return opcode and payload of a short frame of the client, whose mask changes nothing."""
    data = theirs.recv(200)
    assert data[1] & 128, "a client masks its frames"
    assert data[2:6] == bytes(4)
    return data[0] & 15, data[6:]


def test_messages_of_any_size_in_parts_and_what_comes_before_a_pong(pair: Pair) -> None:
    client, theirs = pair
    for size in (0, 125, 126, 65_535, 65_536):
        theirs.sendall(frame(Opcode.TEXT, b'{"a": "%b"}' % (b"x" * size)))
        assert client.event() == {"a": "x" * size}
    theirs.sendall(frame(Opcode.TEXT, b'{"a"', fin=False) + frame(Opcode.PING, b"there?"))
    theirs.sendall(frame(Opcode.CONT, b": 1}") + frame(Opcode.TEXT, b"[DONE]") + frame(Opcode.PONG, b"x"))
    assert client.event() == {"a": 1}
    assert received(theirs) == (Opcode.PONG, b"there?")
    assert client.ping(b"x") == [b"[DONE]"]
    assert received(theirs) == (Opcode.PING, b"x")


WRONG = {
    "masked": frame(Opcode.TEXT, b"{}", mask=True),
    "a text message": frame(Opcode.BINARY, b'{"a": 1}'),
    "a JSON object": frame(Opcode.TEXT, b"no JSON"),
    "ended": frame(Opcode.TEXT, b"{}")[:2],
    "1012": frame(Opcode.CLOSE, (1012).to_bytes(2, "big")),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_a_server_must_not_send(pair: Pair, said: str) -> None:
    client, theirs = pair
    theirs.sendall(WRONG[said])
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises((AssertionError, EOFError), match=said):
        client.event()
