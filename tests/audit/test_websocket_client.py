"""The client side of a WebSocket, against bytes as RFC 6455 has them."""

import socket
from collections.abc import Iterator
from functools import partial

import pytest
from websockets.frames import Opcode

from audit.http import Connection
from audit.peer import Peer
from audit.turns import WebSocket
from helpers.wire import frame

Pair = tuple[WebSocket, socket.socket]
said = partial(frame, mask=False)  # by a server


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    peer = Peer("http://127.0.0.1:9", "m", budget=5)
    with ours, theirs:
        yield WebSocket(peer, Connection(ours, peer.seconds_left, "")), theirs


def received(theirs: socket.socket) -> tuple[int, bytes]:
    """Return opcode and payload of a short frame of the client, whose mask changes nothing."""
    data = theirs.recv(200)
    assert data[1] & 128, "a client masks its frames"
    assert data[2:6] == bytes(4)
    return data[0] & 15, data[6:]


def test_messages_of_any_size_in_parts_and_what_comes_before_a_pong(pair: Pair) -> None:
    client, theirs = pair
    for size in (0, 125, 126, 65_535, 65_536):
        theirs.sendall(said(b'{"a": "%b"}' % (b"x" * size)))
        assert client.event() == {"a": "x" * size}
    theirs.sendall(said(b'{"a"', fin=False) + said(b"there?", Opcode.PING))
    theirs.sendall(said(b": 1}", Opcode.CONT) + said(b"[DONE]") + said(b"x", Opcode.PONG))
    assert client.event() == {"a": 1}
    assert received(theirs) == (Opcode.PONG, b"there?")
    assert client.ping(b"x") == [b"[DONE]"]
    assert received(theirs) == (Opcode.PING, b"x")


WRONG = {
    "masked": frame(b"{}"),
    "a text message": said(b'{"a": 1}', Opcode.BINARY),
    "a JSON object": said(b"no JSON"),
    "ended": said(b"{}")[:2],
    "1012": said((1012).to_bytes(2, "big"), Opcode.CLOSE),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_a_server_must_not_send(pair: Pair, why: str) -> None:
    client, theirs = pair
    theirs.sendall(WRONG[why])
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises((AssertionError, EOFError), match=why):
        client.event()
