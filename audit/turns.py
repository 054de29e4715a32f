"""Rules on the WebSocket mode of the Responses API: turns, what a connection remembers, errors, the end.

    WebSocket --rule--> nothing, or Failed, or NotApplicable

Authority: https://developers.openai.com/api/docs/guides/websocket-mode, and
https://www.openresponses.org/specification, WebSocket transport: its seven tests of compliance are here.

Rules of this file:
1. The events of a turn are judged by the rules of events.py, as those of a stream are.

Not here: frames and the handshake (websocket.py), streams over HTTP (clients.py).
"""

import json
from contextlib import suppress
from typing import Any

from audit.agents import ORPHAN
from audit.asking import CUT, outline, recorded, request, same_answer, with_stream
from audit.events import TERMINAL
from audit.linter import violations
from audit.peer import REFUSED, Peer
from audit.rules import Check, Failed, NotApplicable, expect, presumed, rules_of
from audit.schema import Json
from audit.stream import STREAM_RULES, captured
from audit.websocket import ENDS, TEXT, Closed, WebSocket, connected, handshake


def connecting(check: Check, _: str) -> Check:
    """Bind a function that takes a WebSocket to a connection."""

    def on_a_connection(peer: Peer) -> None:
        with connected(peer) as socket:
            check(socket)

    return on_a_connection


must, should, _ = rules_of("websocket", "websocket", connecting)
PATH, ASKED = request("responses", store=False)
BRIEF = ASKED | {"max_output_tokens": CUT}
BAD = BRIEF | {"input": 42}
NOT_FOUND = "previous_response_not_found"


def turn(socket: WebSocket) -> list[Json]:
    """Return the events of a turn; if its end is no terminal event the rule ws-turn says so."""
    events = socket.turn(ASKED)
    if events[-1].get("type") not in TERMINAL:
        raise NotApplicable("the turn has no terminal event")
    return events


def responded(socket: WebSocket, body: Json) -> Json:
    """Return the response of a turn; if there is none the rule ws-turn says so."""
    last = socket.turn(body)[-1]
    response = last.get("response")
    if last.get("type") not in TERMINAL or not isinstance(response, dict):
        raise NotApplicable(f"the turn ends with {last}")
    return response


def expect_response(socket: WebSocket, body: Json, message: str) -> Json:
    """Return the last event of a turn that must not fail."""
    last = socket.turn(body)[-1]
    expect(last.get("type") in TERMINAL, message, last)
    return last


def expect_not_found(socket: WebSocket, id_: object, why: str) -> None:
    last = socket.turn(BRIEF | {"previous_response_id": id_})[-1]
    error = last.get("error")
    is_refused = last.get("type") == "error" and isinstance(error, dict) and error.get("code") == NOT_FOUND
    expect(is_refused, f"expected an error with the code {NOT_FOUND}: {why}", last)


# --- turns --------------------------------------------------------------------------------------------------


@must("ws-turn")
def ws_turn(socket: WebSocket) -> None:
    """response.create begins a turn: its events are text messages, the last one terminal

    the guide on WebSocket mode; websocket-response of Open Responses
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    expect_response(socket, ASKED, "expected a turn to end with a terminal event")


@must("ws-events")
def ws_events(socket: WebSocket) -> None:
    """the events of a turn obey the rules of a stream

    the guide on WebSocket mode: the events and their order are those of streaming
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    events = turn(socket)
    named = {"numbers"}  # by ws-numbers, and what the stream over HTTP breaks too
    with suppress(NotApplicable, ValueError):
        named |= {violation.rule for violation in violations(recorded(socket.peer, "text").events)}
    musts = {name for name, rule in STREAM_RULES.items() if rule.strength == "must"}
    found = violations(captured(events), musts - named)
    for first in found[:1]:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        message = f"{first.rule}: event {first.event}: {first.message}{more}"
        raise Failed(message, events[first.event])


@must("ws-is-http")
def ws_is_http(socket: WebSocket) -> None:
    """a turn has the events, and the response, that a stream over HTTP has

    the guide on WebSocket mode: the events and their order are those of streaming
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    path, body = request("responses")
    over_http = told(recorded(socket.peer, "text").events)
    again = with_stream(socket.peer, body)
    same_answer(
        over_http,
        told(turn(socket)),
        lambda: told(socket.peer.ask("POST", path, again).events),
        "over-HTTP in-a-turn",
    )


def told(events: list[Json]) -> Json:
    """Return the types of events, deltas of one text once, and what the response says."""
    kinds: list[str] = []
    for event in events:
        kind = str(event.get("type"))
        if not kind.endswith(".delta") or kinds[-1:] != [kind]:
            kinds.append(kind)
    return {"events": kinds} | outline(events[-1].get("response") or {})


@must("ws-two-turns")
def ws_two_turns(socket: WebSocket) -> None:
    """a connection takes one turn after the other, each a response

    the guide on WebSocket mode; websocket-sequential-responses of Open Responses
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    ids = [responded(socket, BRIEF).get("id") for _ in range(2)]
    expect(all(ids) and ids[0] != ids[1], f"expected two turns to be two responses, got the ids {ids}", ids)


@must("ws-numbers")
def ws_numbers(socket: WebSocket) -> None:
    """sequence_number counts the events of each response: 0, 1, 2, ...

    the guide on WebSocket mode: the events are those of streaming
    C17 https://developers.openai.com/api/docs/guides/websocket-mode
    """
    for which in ("first", "second"):
        events = socket.turn(BRIEF)
        got = [event.get("sequence_number") for event in events]
        message = f"expected the events of the {which} turn to count 0, 1, 2, ..., got {got}"
        expect(got == [*range(len(events))] or events[-1].get("type") == "error", message, events[0])


@must("ws-end")
def ws_end(socket: WebSocket) -> None:
    """nothing comes after the terminal event of a turn: no [DONE]

    Open Responses: messages are JSON; SDKs parse each one
    A21 https://www.openresponses.org/specification
    """
    socket.turn(BRIEF)
    with presumed("ws-ping"):
        later = socket.ping(b"the end")
    expect(not later, "expected nothing after the terminal event: no [DONE]", later)


# --- the connection -----------------------------------------------------------------------------------------


@must("ws-ping")
def ws_ping(socket: WebSocket) -> None:
    """a ping is answered with a pong that says the same

    RFC 6455, section 5.5.3; clients and proxies end what does not answer
    https://www.rfc-editor.org/rfc/rfc6455#section-5.5.3
    """
    socket.ping(b"are you there?")


@must("ws-close")
def ws_close(socket: WebSocket) -> None:
    """a close is answered with a close

    RFC 6455, section 5.5.1
    https://www.rfc-editor.org/rfc/rfc6455#section-5.5.1
    """
    socket.close()


@must("ws-key")
def ws_key(socket: WebSocket) -> None:
    """without the key the handshake is refused with 401

    the guide on WebSocket mode: the same header Authorization as over HTTP
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    if not socket.peer.has_key:
        raise NotApplicable("no key was given")
    with socket.peer.connection("WebSocket without a key") as connection:
        reply, _ = handshake(socket.peer, connection, Authorization="")
    expect(reply.status == 401, "expected the handshake to be refused with 401", f"{reply.status}")


# --- what a connection remembers ----------------------------------------------------------------------------


@must("ws-continuation")
def ws_continuation(socket: WebSocket) -> None:
    """previous_response_id continues a turn of the connection that was not stored

    the guide on WebSocket mode; websocket-continuation of Open Responses
    F14 https://developers.openai.com/api/docs/guides/websocket-mode
    """
    first = responded(socket, ASKED)
    next_turn = ASKED | {"previous_response_id": first.get("id")}
    last = expect_response(socket, next_turn, "expected a turn to continue the one before it")
    n = [(r.get("usage") or {}).get("input_tokens", 0) for r in (first, last.get("response") or {})]
    expect(n[0] < n[1], f"expected a longer prompt after another turn, got {n} tokens", last)


@must("ws-unknown-previous")
def ws_unknown_previous(socket: WebSocket) -> None:
    """an unknown previous_response_id is an error with the code previous_response_not_found

    the guide on WebSocket mode; websocket-previous-response-not-found of Open Responses
    F14 https://developers.openai.com/api/docs/guides/websocket-mode
    """
    expect_not_found(socket, "resp_00000000000000000000000000000000", "there is no such response")


@must("ws-reconnect", after="ws-unknown-previous")
def ws_reconnect(socket: WebSocket) -> None:
    """what was not stored is not found on a new connection

    the guide on WebSocket mode; websocket-reconnect-store-false-recovery of Open Responses
    F12 https://developers.openai.com/api/docs/guides/websocket-mode
    """
    with connected(socket.peer) as earlier:
        id_ = responded(earlier, BRIEF).get("id")
    expect_not_found(socket, id_, "it was not stored, and its connection is gone")


@must("ws-eviction", after="ws-reconnect ws-continuation")
def ws_eviction(socket: WebSocket) -> None:
    """a turn that fails makes its connection forget the turn that it continued

    the guide on WebSocket mode; websocket-failed-continuation-evicts-cache of Open Responses
    https://github.com/Menci/Floway/pull/322
    """
    id_ = responded(socket, BRIEF).get("id")
    last = socket.turn(BRIEF | {"input": [ORPHAN], "previous_response_id": id_})[-1]
    if last.get("type") != "error":
        raise NotApplicable("a result without its call is taken")
    expect_not_found(socket, id_, "a turn that continued it has failed")


@should("ws-warm-up")
def ws_warm_up(socket: WebSocket) -> None:
    """generate: false makes no output, and can be continued

    the guide on WebSocket mode: warm up; Codex begins with it
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    warm = socket.turn(ASKED | {"generate": False})[-1]
    if warm.get("type") == "error":
        raise NotApplicable(f"generate: false is refused: {warm}")
    response = warm.get("response") or {}
    expect(not response.get("output"), "expected no output, for generate is false", warm)
    next_turn = BRIEF | {"previous_response_id": response.get("id")}
    expect_response(socket, next_turn, "expected a turn to continue what was warmed up")


@should("ws-compact")
def ws_compact(socket: WebSocket) -> None:
    """what was compacted begins a new chain

    the guide on WebSocket mode; websocket-compact-new-chain of Open Responses
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    hi = {"role": "user", "content": "hi"}
    said = [hi, {"role": "assistant", "content": "Hello."}]
    reply = socket.peer.ask("POST", "/responses/compact", {"model": socket.peer.model, "input": said})
    if reply.status in REFUSED:
        raise NotApplicable(f"nothing is compacted: {reply.refusal}")
    chain = BRIEF | {"input": [*(reply.json.get("output") or []), hi]}
    expect_response(socket, chain, "expected what was compacted to begin a new chain")


# --- errors -------------------------------------------------------------------------------------------------


@must("ws-error-shape")
def ws_error_shape(socket: WebSocket) -> None:
    """a refusal is a message of the type error, with its status, and an error with message and code

    the guide on WebSocket mode: errors
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    last = socket.turn(BAD)[-1]
    if last.get("type") != "error":
        raise NotApplicable(f"a wrong input is not refused: {last}")
    error = last.get("error")
    is_right = isinstance(error, dict) and isinstance(error.get("message"), str) and "code" in error
    is_right = is_right and isinstance(last.get("status"), int)
    expect(is_right, "expected a status, and an error with a message and a code", last)


@must("ws-survives")
def ws_survives(socket: WebSocket) -> None:
    """a connection outlives a turn that is refused

    the guide on WebSocket mode: start a new turn after an error
    https://developers.openai.com/api/docs/guides/websocket-mode
    """
    socket.turn(BAD)
    try:
        responded(socket, BRIEF)
    except Closed as closed:
        raise Failed("expected the connection to outlive a turn that is refused", closed) from closed


@should("ws-large")
def ws_large(socket: WebSocket) -> None:
    """a message that is too large is refused by an event, and the connection lives

    a client takes a close for a broken network, and sends all of it again
    M11 https://github.com/Soju06/codex-lb/pull/1236
    """
    last = socket.turn(BRIEF | {"input": "fox " * 800_000})[-1]
    expect(last.get("type") in ENDS, "expected an answer, or an error", last)
    with presumed("ws-ping"):
        socket.ping(b"are you there?")


@should("ws-steer")
def ws_steer(socket: WebSocket) -> None:
    """the steering of an unknown response fails by name, and its input is given back

    the types of openai-python: response.steer.failed, with an error and the steer
    M13 https://github.com/openai/openai-python
    """
    steer = {"previous_response_id": "resp_00000000000000000000000000000000", "input": "Stop now."}
    socket.send_frame(TEXT, json.dumps({"type": "response.steer"} | steer).encode())
    event = socket.event()
    if event.get("type") == "error":
        raise NotApplicable(f"response.steer is not known: {event}")
    error: Any = event.get("error")
    given_back = event.get("steer")
    is_failed = event.get("type") == "response.steer.failed" and isinstance(error, dict)
    is_named = is_failed and error.get("code") == "response_not_found"
    expect(is_named, "expected response.steer.failed, with the code response_not_found", event)
    is_back = isinstance(given_back, dict) and steer.items() <= given_back.items()
    expect(is_back, "expected the steer with its input to be given back", event)


@should("ws-bad-json")
def ws_bad_json(socket: WebSocket) -> None:
    """a message that is not JSON gets an error, or closes the connection

    a client that sent half a message waits for ever else
    https://www.openresponses.org/specification
    """
    with suppress(Closed):
        socket.send_frame(TEXT, b'{"type": ')
        event = socket.event()
        expect(
            event.get("type") == "error",
            "expected an error, or a close, for a message that is not JSON",
            event,
        )
