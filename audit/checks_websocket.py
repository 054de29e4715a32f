"""Rules on the WebSocket mode of the Responses API: turns, what a connection remembers, errors, the end.

    Peer --check--> nothing, or Failed, or NotApplicable

Authority: https://developers.openai.com/api/docs/guides/websocket-mode, and
https://www.openresponses.org/specification, WebSocket transport: its seven tests of compliance are here.

Rules of this file:
1. The events of a turn are judged by the rules of rules.py, as those of a stream are.
2. What another rule is about is presumed: a server whose turns fail fails the rule ws-turn alone.

Not here: frames and the handshake (websocket.py), streams over HTTP (checks_streams.py).
"""

from contextlib import suppress
from functools import partial

from audit import recordings, rules
from audit.checks_stored import UNKNOWN
from audit.peer import REFUSED, Failed, Json, NotApplicable, Peer, expect, presumed
from audit.probes import CUT, GITHUB, HI, Check, outline, recorded, same_answer, streamed
from audit.rules_events import TERMINAL
from audit.websocket import TEXT, Closed, WebSocket, connected, handshake

ASKED: Json = HI | {"store": False}
BRIEF: Json = ASKED | {"max_output_tokens": CUT}
NOT_FOUND = "previous_response_not_found"


def responded(socket: WebSocket, body: Json) -> Json:
    """The response of a turn; where there is none the rule ws-turn says so."""
    last = socket.turn(body)[-1]
    if last.get("type") not in TERMINAL or not isinstance(last.get("response"), dict):
        raise NotApplicable(f"the turn ends with {last}")
    response: Json = last["response"]
    return response


def expect_not_found(socket: WebSocket, id: object, why: str) -> None:
    last = socket.turn(BRIEF | {"previous_response_id": id})[-1]
    error = last.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    is_refused = last.get("type") == "error" and code == NOT_FOUND
    expect(is_refused, f"expected an error with the code {NOT_FOUND}: {why}", last)


# --- turns --------------------------------------------------------------------------------------------------


def a_turn(peer: Peer) -> None:
    with connected(peer) as socket:
        events = socket.turn(ASKED)
    last = events[-1].get("type")
    expect(last in TERMINAL, f"expected a turn to end with a terminal event, got {last}", events[-1])


def obeys_the_rules(peer: Peer) -> None:
    with connected(peer) as socket:
        events = socket.turn(ASKED)
    if events[-1].get("type") not in TERMINAL:
        raise NotApplicable("the turn has no terminal event")
    musts = {name for name, rule in rules.RULES.items() if rule.strength == "must"} - {"numbers"}
    names = [name for name in rules.RULES if name in musts - broken_over_http(peer)]
    violations = rules.violations(recordings.captured(events), names)
    if violations:
        first = violations[0]
        more = f", and {len(violations) - 1} more" if len(violations) > 1 else ""
        raise Failed(f"{first.rule}: event {first.event}: {first.message}{more}", events[first.event])


def broken_over_http(peer: Peer) -> set[str]:
    """The rules that the stream breaks too: they have been named."""
    with suppress(NotApplicable, ValueError):
        return {violation.rule for violation in rules.violations(recorded(peer, "text").events)}
    return set()


def as_over_http(peer: Peer) -> None:
    with connected(peer) as socket:
        turn = socket.turn(ASKED)
    if turn[-1].get("type") not in TERMINAL:
        raise NotApplicable("the turn has no terminal event")
    told = what_is_told(turn)
    over_http = what_is_told(recorded(peer, "text").events)
    same_answer(over_http, told, partial(streamed_again, peer), ("over HTTP", "in a turn"))


def streamed_again(peer: Peer) -> Json:
    return what_is_told(streamed(peer, "/responses", HI).events)


def what_is_told(events: list[Json]) -> Json:
    """The types of events, deltas of one text once, and what the response says."""
    types = [str(event.get("type")) for event in events]
    pairs = zip(types, ["", *types], strict=False)
    kinds = [type_ for type_, before in pairs if type_ != before or not type_.endswith(".delta")]
    return {"events": kinds} | outline(events[-1].get("response") or {})


def two_turns(peer: Peer) -> None:
    with connected(peer) as socket:
        ids = [responded(socket, BRIEF).get("id") for _ in range(2)]
    expect(all(ids) and ids[0] != ids[1], f"expected two turns to be two responses, got the ids {ids}", ids)


def numbers(peer: Peer) -> None:
    with connected(peer) as socket:
        for turn in ("first", "second"):
            events = socket.turn(BRIEF)
            got = [event.get("sequence_number") for event in events]
            message = f"expected the events of the {turn} turn to count 0, 1, 2, ..., got {got}"
            expect(got == [*range(len(events))] or events[-1].get("type") == "error", message, events[0])


def ends(peer: Peer) -> None:
    with connected(peer) as socket:
        socket.turn(BRIEF)
        with presumed("ws-ping"):
            later = socket.ping(b"the end")
    expect(not later, "expected nothing behind the terminal event: no [DONE]", later)


# --- the connection -----------------------------------------------------------------------------------------


def ping(peer: Peer) -> None:
    with connected(peer) as socket:
        socket.ping(b"are you there?")


def closes(peer: Peer) -> None:
    with connected(peer) as socket:
        socket.close()


def key(peer: Peer) -> None:
    if not peer.has_key:
        raise NotApplicable("no key was given")
    with connected(peer):
        pass
    stranger = peer.without_key()
    with stranger.connection("WebSocket without a key") as connection:
        reply, _ = handshake(stranger, connection)
    expect(reply.status == 401, "expected the handshake to be refused with 401", f"{reply.status}")


# --- what a connection remembers ----------------------------------------------------------------------------


def continued(peer: Peer) -> None:
    with connected(peer) as socket:
        first = responded(socket, ASKED)
        events = socket.turn(ASKED | {"previous_response_id": first.get("id")})
    last = events[-1]
    expect(last.get("type") in TERMINAL, "expected a turn to continue the one before it", last)
    usage = [(r.get("usage") or {}).get("input_tokens", 0) for r in (first, last.get("response") or {})]
    expect(usage[0] < usage[1], f"expected a longer prompt behind another turn, got {usage} tokens", last)


def forgotten(peer: Peer) -> None:
    with presumed("ws-unknown-previous"):
        unknown_previous(peer)
    with connected(peer) as socket:
        id_ = responded(socket, BRIEF).get("id")
    with connected(peer) as socket:
        expect_not_found(socket, id_, "it was not stored, and its connection is gone")


def unknown_previous(peer: Peer) -> None:
    with connected(peer) as socket:
        expect_not_found(socket, UNKNOWN, "there is no such response")


ORPHAN: Json = {"input": [{"type": "function_call_output", "call_id": "call_nobody", "output": "none"}]}


def evicted(peer: Peer) -> None:
    with presumed("ws-reconnect"):
        forgotten(peer)
    with presumed("ws-continuation"):
        continued(peer)
    with connected(peer) as socket:
        id_ = responded(socket, BRIEF).get("id")
        last = socket.turn(BRIEF | ORPHAN | {"previous_response_id": id_})[-1]
        if last.get("type") != "error":
            raise NotApplicable("a result without its call is taken")
        expect_not_found(socket, id_, "a turn that continued it has failed")


def warm_up(peer: Peer) -> None:
    with connected(peer) as socket:
        events = socket.turn(ASKED | {"generate": False})
        if events[-1].get("type") == "error":
            raise NotApplicable(f"generate: false is refused: {events[-1]}")
        output = (events[-1].get("response") or {}).get("output")
        expect(not output, "expected no output, for generate is false", events[-1])
        id_ = (events[-1].get("response") or {}).get("id")
        last = socket.turn(BRIEF | {"previous_response_id": id_})[-1]
        expect(last.get("type") in TERMINAL, "expected a turn to continue what was warmed up", last)


def compact(peer: Peer) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]
    with connected(peer) as socket:
        reply = peer.ask("POST", "/responses/compact", {"model": peer.model, "input": said})
        if reply.status in REFUSED:
            raise NotApplicable(f"nothing is compacted: {reply.refusal}")
        output = reply.json.get("output") or []
        last = socket.turn(BRIEF | {"input": [*output, {"role": "user", "content": "hi"}]})[-1]
    expect(last.get("type") in TERMINAL, "expected what was compacted to begin a new chain", last)


# --- errors -------------------------------------------------------------------------------------------------


BAD: Json = BRIEF | {"input": 42}


def error_shape(peer: Peer) -> None:
    with connected(peer) as socket:
        last = socket.turn(BAD)[-1]
    if last.get("type") != "error":
        raise NotApplicable(f"a wrong input is not refused: {last}")
    error = last.get("error")
    is_right = isinstance(error, dict) and isinstance(error.get("message"), str) and "code" in error
    is_right = is_right and isinstance(last.get("status"), int)
    expect(is_right, "expected a status, and an error with a message and a code", last)


def survives_an_error(peer: Peer) -> None:
    with connected(peer) as socket:
        socket.turn(BAD)
        try:
            responded(socket, BRIEF)
        except Closed as closed:
            raise Failed("expected the connection to outlive a turn that is refused", closed) from closed


def bad_json(peer: Peer) -> None:
    with connected(peer) as socket:
        socket.send_frame(TEXT, b'{"type": ')
        try:
            event = socket.event()
        except Closed:
            return
    expect(event.get("type") == "error", "expected an error, or a close, for what is no JSON", event)


# --- the table ----------------------------------------------------------------------------------------------

GUIDE = "https://developers.openai.com/api/docs/guides/websocket-mode"
OPEN_RESPONSES = "https://www.openresponses.org/specification"
RFC = "https://www.rfc-editor.org/rfc/rfc6455"

# fmt: off
CHECKS = {
    #  rule    what checks it, its profiles, its strength, bugs of tests/BUGS.md
    #      title
    #      source
    #      link
    "ws-turn": Check(a_turn, "websocket", "must", "",
        "response.create begins a turn: its events are text messages, the last one terminal",
        "the guide on WebSocket mode; websocket-response of Open Responses",
        GUIDE),
    "ws-events": Check(obeys_the_rules, "websocket", "must", "",
        "the events of a turn obey the rules of a stream",
        "the guide on WebSocket mode: the events and their order are those of streaming",
        GUIDE),
    "ws-is-http": Check(as_over_http, "websocket", "must", "",
        "a turn has the events, and the response, that a stream over HTTP has",
        "the guide on WebSocket mode: the events and their order are those of streaming",
        GUIDE),
    "ws-two-turns": Check(two_turns, "websocket", "must", "",
        "a connection takes one turn behind the other, each a response",
        "the guide on WebSocket mode; websocket-sequential-responses of Open Responses",
        GUIDE),
    "ws-numbers": Check(numbers, "websocket", "must", "C17",
        "sequence_number counts the events of each response: 0, 1, 2, ...",
        "the guide on WebSocket mode: the events are those of streaming",
        GUIDE),
    "ws-end": Check(ends, "websocket", "must", "A21",
        "nothing comes behind the terminal event of a turn: no [DONE]",
        "Open Responses: messages are JSON; SDKs parse each one",
        OPEN_RESPONSES),
    "ws-ping": Check(ping, "websocket", "must", "",
        "a ping is answered with a pong that says the same",
        "RFC 6455, section 5.5.3; clients and proxies end what does not answer",
        RFC + "#section-5.5.3"),
    "ws-close": Check(closes, "websocket", "must", "",
        "a close is answered with a close",
        "RFC 6455, section 5.5.1",
        RFC + "#section-5.5.1"),
    "ws-key": Check(key, "websocket", "must", "",
        "without the key the handshake is refused with 401",
        "the guide on WebSocket mode: the same header Authorization as over HTTP",
        GUIDE),
    "ws-continuation": Check(continued, "websocket", "must", "F14",
        "previous_response_id continues a turn of the connection that was not stored",
        "the guide on WebSocket mode; websocket-continuation of Open Responses",
        GUIDE),
    "ws-reconnect": Check(forgotten, "websocket", "must", "F12",
        "what was not stored is not found on a new connection",
        "the guide on WebSocket mode; websocket-reconnect-store-false-recovery of Open Responses",
        GUIDE),
    "ws-unknown-previous": Check(unknown_previous, "websocket", "must", "F14",
        "an unknown previous_response_id is an error with the code previous_response_not_found",
        "the guide on WebSocket mode; websocket-previous-response-not-found of Open Responses",
        GUIDE),
    "ws-eviction": Check(evicted, "websocket", "must", "",
        "a turn that fails makes its connection forget the turn that it continued",
        "the guide on WebSocket mode; websocket-failed-continuation-evicts-cache of Open Responses",
        GITHUB + "Menci/Floway/pull/322"),
    "ws-warm-up": Check(warm_up, "websocket", "should", "",
        "generate: false makes no output, and can be continued",
        "the guide on WebSocket mode: warm up; Codex begins with it",
        GUIDE),
    "ws-compact": Check(compact, "websocket", "should", "",
        "what was compacted begins a new chain",
        "the guide on WebSocket mode; websocket-compact-new-chain of Open Responses",
        GUIDE),
    "ws-error-shape": Check(error_shape, "websocket", "must", "",
        "a refusal is a message of the type error, with its status, and an error with message and code",
        "the guide on WebSocket mode: errors",
        GUIDE),
    "ws-survives": Check(survives_an_error, "websocket", "must", "",
        "a connection outlives a turn that is refused",
        "the guide on WebSocket mode: start a new turn after an error",
        GUIDE),
    "ws-bad-json": Check(bad_json, "websocket", "should", "",
        "what is no JSON is told, or closes the connection",
        "a client that sent half a message waits for ever else",
        OPEN_RESPONSES),
}
# fmt: on
