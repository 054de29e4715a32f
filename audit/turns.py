"""The WebSocket mode of the Responses API: its client, and the rules on turns, memory, errors and the end.

    with connected(peer) as socket:
        socket.turn(said="hi") --> [event, ...]        socket.ping(b"x") --> messages before its answer
    WebSocket --rule--> nothing, or AssertionError, or NotApplicable

The client is of the standard library alone: a handshake, masked frames, messages.

Authority: RFC 6455; https://developers.openai.com/api/docs/guides/websocket-mode for what a turn is;
https://www.openresponses.org/specification, WebSocket transport: its seven tests of compliance are here.

Rules of this file:
1. A server that does not switch protocols has no WebSocket: no rule is about it.
2. What a server must not send (masked frames, binary messages, half a frame) is an AssertionError.
3. The events of a turn are judged by the rules of events.py, as those of a stream are.

Not here: HTTP (peer.py), streams over HTTP (answers.py).
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

from audit.agents import HI, compacted
from audit.events import TERMINAL
from audit.http import Connection, Reply
from audit.peer import CUT, Peer, response_of
from audit.recording import violations
from audit.rules import RULES, NotApplicable, presumed, rules_of
from audit.schema import Json, expect_members, object_in
from audit.stream import DONE, captured, of_response, parsed

KEY, ACCEPT = "dGhlIHNhbXBsZSBub25jZQ==", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # RFC 6455, section 1.3
TEXT, CLOSE, PING, PONG = 1, 8, 9, 10  # opcodes, section 5.2
FINAL = MASKED = 0x80  # bits of the first and of the second byte of a frame
LENGTHS = {126: 2, 127: 8}  # second byte of a frame -> bytes of the length that follows


class Closed(AssertionError):
    """The server has closed the connection, unasked."""


class WebSocket(NamedTuple):
    """One connection after its handshake."""

    peer: Peer
    connection: Connection

    def turn(self, **asked: Any) -> list[Json]:
        """Return the events of one turn, to its last one or to an error; it is asked as by Peer.request()."""
        _, body = self.peer.request(stream=None, **{"store": False, "limit": CUT} | asked)
        self.send(TEXT, json.dumps({"type": "response.create"} | body).encode())
        events = [self.event()]
        while events[-1].get("type") not in {*TERMINAL, "error"}:
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
        self.send(PING, text)
        earlier: list[bytes] = []
        opcode, payload = self.message()
        while opcode != PONG:
            earlier.append(payload)
            opcode, payload = self.message()
        assert payload == text, "expected a pong with the text of its ping"
        return earlier

    def send(self, opcode: int, payload: bytes) -> None:
        """Send a message as one frame."""
        if opcode == TEXT:
            self.connection.asked += f"\n# then the message: {payload.decode('utf-8', 'replace')}"
        size = len(payload)
        head = bytes([FINAL | opcode, MASKED | min(size, 126 + (size >= 2**16))])
        if size >= 126:
            head += size.to_bytes(LENGTHS[head[1] - MASKED], "big")
        # A mask keeps what a web page sends from being taken for HTTP by a proxy; this one changes nothing.
        self.connection.send(head + bytes(4) + payload)

    def message(self) -> tuple[int, bytes]:
        """Return opcode and payload of the next message, or of the answer to a ping; answer pings."""
        opcode = 0  # that of frames which continue a message
        payload = b""
        while True:
            first, size = self.connection.exactly(2)
            assert not size & MASKED, "expected frames of a server not to be masked"
            if size in LENGTHS:
                size = int.from_bytes(self.connection.exactly(LENGTHS[size]), "big")
            data = self.connection.exactly(size)
            self.peer.shown = data.decode("utf-8", "replace") or "an empty frame"
            kind = first & 0x0F
            if kind == CLOSE:
                code = int.from_bytes(data[:2], "big")
                raise Closed(f"expected the connection to stay open, got a close with the code {code}")
            if kind == PING:
                self.send(PONG, data)
                continue
            opcode = opcode or kind
            payload += data
            if first & FINAL:
                return opcode, payload


@contextmanager
def connected(peer: Peer) -> Iterator[WebSocket]:
    """Yield a connection; raises NotApplicable if the server has no WebSocket."""
    with handshake(peer) as reply:
        if reply.status != 101:
            raise NotApplicable(f"no WebSocket: {reply.status}")
        got = reply.headers.get("sec-websocket-accept")
        assert got == ACCEPT, f"expected Sec-WebSocket-Accept {ACCEPT}, got {got}"
        yield WebSocket(peer, reply.connection)


def handshake(peer: Peer, **headers: Any) -> AbstractContextManager[Reply]:
    """Ask for an upgrade."""
    return peer.open(
        "GET",
        "/responses",
        Upgrade="websocket",
        Connection="Upgrade",
        Sec_WebSocket_Version="13",
        Sec_WebSocket_Key=KEY,
        **headers,
    )


# --- the rules ----------------------------------------------------------------------------------------------

must, should, _ = rules_of("websocket", "websocket")
UNKNOWN = "resp_00000000000000000000000000000000"


def id_of(events: list[Json]) -> Any:
    """Return the id of the response of a turn, which the rule ws-turn is about."""
    with presumed("ws-turn"):
        return response_of(events).get("id")


def error_of(events: list[Json]) -> Json:
    """Return the error that ends a turn; {} if none does."""
    return object_in(events[-1], "error")


def expect_not_found(socket: WebSocket, id_: object) -> None:
    """Expect an error, with this code, of a turn that continues the response of this id."""
    assert error_of(socket.turn(previous_response_id=id_)).get("code") == "previous_response_not_found"


# --- turns --------------------------------------------------------------------------------------------------


@must
def ws_turn(socket: WebSocket) -> None:
    """ws-turn: response.create begins a turn: its events are text messages, the last one terminal

    the guide on WebSocket mode; websocket-response of Open Responses
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    response_of(socket.turn(limit=64))


@must
def ws_events(socket: WebSocket) -> None:
    """ws-events: the events of a turn obey the rules of a stream

    the guide on WebSocket mode: the events and their order are those of streaming
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    events = socket.turn(limit=64)
    id_of(events)
    over_http = captured(socket.peer.recorded("text").events)
    named = {"numbers"} | {violation.rule for violation in violations(over_http)}  # see the rule ws-numbers
    for violation in violations(captured(events)):
        is_new = violation.rule not in named and RULES[violation.rule].strength == "must"
        assert not is_new, f"{violation.rule}: event {violation.event}: {violation.message}"


@must
def ws_is_http(socket: WebSocket) -> None:
    """ws-is-http: a turn has the response that HTTP has

    the guide on WebSocket mode: the events and their order are those of streaming
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    events = socket.turn(limit=64)
    id_of(events)
    told = of_response(response_of(events)).outline
    socket.peer.same_answer(lambda: socket.peer.plain().outline, told)


@must
def ws_two_turns(socket: WebSocket) -> None:
    """ws-two-turns: a connection takes one turn after the other, each a response

    the guide on WebSocket mode; websocket-sequential-responses of Open Responses
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    ids = {id_of(socket.turn()) for _ in range(2)} - {None}
    assert len(ids) == 2


@must
def ws_numbers(socket: WebSocket) -> None:
    """ws-numbers: sequence_number counts the events of each response: 0, 1, 2, ...

    the guide on WebSocket mode: the events are those of streaming
    C17 https://developers.openai.com/api/docs/guides/websocket-mode
    """
    for events in (socket.turn(), socket.turn()):
        got = [event.get("sequence_number") for event in events]
        assert got == [*range(len(events))] or error_of(events)


@must(after="ws-ping")
def ws_end(socket: WebSocket) -> None:
    """ws-end: nothing comes after the terminal event of a turn: no [DONE]

    Open Responses: messages are JSON; SDKs parse each one
    A21 https://www.openresponses.org/specification
    """
    socket.turn()
    assert not socket.ping(b"the end")


# --- the connection -----------------------------------------------------------------------------------------


@must
def ws_ping(socket: WebSocket) -> None:
    """ws-ping: a ping is answered with a pong that says the same

    RFC 6455, section 5.5.3; clients and proxies end what does not answer
    https://www.rfc-editor.org/rfc/rfc6455#section-5.5.3
    """
    socket.ping(b"are you there?")


@must
def ws_close(socket: WebSocket) -> None:
    """ws-close: a close is answered with a close

    RFC 6455, section 5.5.1
    https://www.rfc-editor.org/rfc/rfc6455#section-5.5.1
    """
    socket.send(CLOSE, (1000).to_bytes(2, "big"))
    with suppress(Closed):
        while True:
            socket.message()


@must
def ws_key(socket: WebSocket) -> None:
    """ws-key: without the key the handshake is refused with 401

    the guide on WebSocket mode: the same header Authorization as over HTTP
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    with handshake(socket.peer, **socket.peer.without_key()) as reply:
        assert reply.status == 401


# --- what a connection remembers ----------------------------------------------------------------------------


@must
def ws_continuation(socket: WebSocket) -> None:
    """ws-continuation: previous_response_id continues a turn of the connection that was not stored

    the guide on WebSocket mode; websocket-continuation of Open Responses
    F14 https://developers.openai.com/api/docs/guides/websocket-mode
    """
    events = socket.turn(limit=64)
    later = socket.turn(limit=64, previous_response_id=id_of(events))
    n = [of_response(response_of(turn)).n_prompt for turn in (events, later)]
    assert n[0] < n[1]


@must
def ws_unknown_previous(socket: WebSocket) -> None:
    """ws-unknown-previous: an unknown previous_response_id is an error with the code
    previous_response_not_found

    the guide on WebSocket mode; websocket-previous-response-not-found of Open Responses
    F14 https://developers.openai.com/api/docs/guides/websocket-mode
    """
    expect_not_found(socket, UNKNOWN)


@must(after="ws-unknown-previous")
def ws_reconnect(socket: WebSocket) -> None:
    """ws-reconnect: what was not stored is not found on a new connection

    the guide on WebSocket mode; websocket-reconnect-store-false-recovery of Open Responses
    F12 https://developers.openai.com/api/docs/guides/websocket-mode
    """
    with connected(socket.peer) as earlier:
        id_ = id_of(earlier.turn())
    expect_not_found(socket, id_)


@must(after="ws-reconnect ws-continuation")
def ws_eviction(socket: WebSocket) -> None:
    """ws-eviction: a turn that fails makes its connection forget the turn that it continued

    the guide on WebSocket mode; websocket-failed-continuation-evicts-cache of Open Responses
    https://github.com/Menci/Floway/pull/322
    """
    id_ = id_of(socket.turn())
    orphan = {"type": "function_call_output", "call_id": "call_nobody", "output": "It rains."}
    if not error_of(socket.turn(said=[orphan], previous_response_id=id_)):
        raise NotApplicable("a result without its call is taken")
    expect_not_found(socket, id_)


@should
def ws_warm_up(socket: WebSocket) -> None:
    """ws-warm-up: generate: false makes no output, and can be continued

    the guide on WebSocket mode: warm up; Codex begins with it
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    warm = socket.turn(limit=64, generate=False)
    if error_of(warm):
        raise NotApplicable(f"generate: false is refused: {warm}")
    response = object_in(warm[-1], "response")
    assert not response.get("output")
    response_of(socket.turn(previous_response_id=response.get("id")))


@should
def ws_compact(socket: WebSocket) -> None:
    """ws-compact: what was compacted begins a new chain

    the guide on WebSocket mode; websocket-compact-new-chain of Open Responses
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    response_of(socket.turn(said=[*compacted(socket.peer), HI]))


# --- errors -------------------------------------------------------------------------------------------------


@must
def ws_error_shape(socket: WebSocket) -> None:
    """ws-error-shape: a refusal is a message of the type error, with its status, and an error with message
    and code

    the guide on WebSocket mode: errors
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    last = socket.turn(said=42)[-1]
    if last.get("type") != "error":
        raise NotApplicable(f"a wrong input is not refused: {last}")
    expect_members(last, "refused_turn")


@must
def ws_survives(socket: WebSocket) -> None:
    """ws-survives: a connection outlives a turn that is refused

    the guide on WebSocket mode: start a new turn after an error
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    socket.turn(said=42)
    id_of(socket.turn())


@should(after="ws-ping")
def ws_large(socket: WebSocket) -> None:
    """ws-large: a message that is too large is refused by an event, and the connection lives

    a client takes a close for a broken network, and sends all of it again
    M11 https://github.com/Soju06/codex-lb/pull/1236
    """
    socket.turn(said="fox " * 800_000)
    socket.ping(b"are you there?")


@should
def ws_steer(socket: WebSocket) -> None:
    """ws-steer: the steering of an unknown response fails by name, and its input is given back

    the types of openai-python: response.steer.failed, with an error and the steer
    M13 https://github.com/openai/openai-python
    """
    steer = {"type": "response.steer", "previous_response_id": UNKNOWN, "input": "Stop!"}
    socket.send(TEXT, json.dumps(steer).encode())
    event = socket.event()
    if event.get("type") == "error":
        raise NotApplicable(f"response.steer is not known: {event}")
    expect_members(event, "steer_failed")


@should
def ws_bad_json(socket: WebSocket) -> None:
    """ws-bad-json: a message that is not JSON gets an error, or closes the connection

    a client that sent half a message waits for ever else
    https://www.openresponses.org/specification
    """
    socket.send(TEXT, b'{"type": ')
    with suppress(Closed):
        assert socket.event().get("type") == "error"
