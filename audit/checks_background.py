"""Rules on background responses: queued at once, polled, streamed, resumed, cancelled, deleted.

    Peer --check--> nothing, or Failed, or NotApplicable

Authority: https://platform.openai.com/docs/guides/background; where that is silent, what Azure probed:
Azure/azure-sdk-for-net, api-behaviour-contract.md.

Not here: responses that are stored in the foreground (checks_stored.py).
"""

import time
from functools import partial
from http.client import HTTPException

from audit.checks_stored import at, kept
from audit.peer import NOT_THERE, REFUSED, Failed, Json, NoReply, NotApplicable, Peer, Reply, expect, presumed
from audit.probes import (
    AZURE,
    GITHUB,
    HI,
    MISTRAL_RS,
    STORY,
    Check,
    final,
    outline,
    recorded,
    same_answer,
    whole,
)

POLL_S, MAX_POLL_S = 0.02, 1.0  # between two looks at a response that runs: the first pause, the longest
TERMINAL = {"completed", "incomplete", "failed", "cancelled"}

# --- background ---------------------------------------------------------------------------------------------


def in_background(peer: Peer, body: Json) -> Json:
    first = peer.once("/responses", {"model": peer.model, "stream": False, "background": True} | HI)
    if first.json.get("background") is not True and first.json.get("status") in TERMINAL:
        raise NotApplicable(f"background is ignored: the answer is {first.json['status']} at once")
    return whole(peer, "/responses", body | {"background": True})


def ended(peer: Peer, id: object) -> Json:
    """A background response when it is terminal; a slow one uses up the rule's budget, and breaks no rule."""
    pause_s = POLL_S
    while True:
        reply = peer.ask("GET", at(id))
        expect(reply.status == 200, "expected status 200 of a background response", reply)
        if reply.json.get("status") in TERMINAL:
            return reply.json
        time.sleep(min(pause_s, peer.seconds_left()))
        pause_s = min(2 * pause_s, MAX_POLL_S)


def background_is_honoured(peer: Peer) -> None:
    reply = peer.once("/responses", {"model": peer.model, "stream": False, "background": True} | HI)
    if reply.status in REFUSED:
        raise NotApplicable(f"refused: {reply.refusal}")
    waits = reply.json.get("status") in ("queued", "in_progress") and reply.json.get("output") == []
    expect(
        reply.status == 200 and waits,
        "expected background: true to be refused, or answered with what is queued",
        reply,
    )


def background_completes(peer: Peer) -> None:
    last = ended(peer, in_background(peer, HI)["id"])
    plain = outline(whole(peer, "/responses", HI))
    again = partial(whole, peer, "/responses", HI)
    same_answer(plain, outline(last), lambda: outline(again()), ("foreground", "background"))


def background_streams(peer: Peer) -> None:
    in_background(peer, HI)
    last = final(recorded(peer, "background"))
    later = ended(peer, last.get("id"))
    expect(later == last, "expected GET to give what the stream said", f"{outline(last)}\n{outline(later)}")


def refused_in_background(peer: Peer) -> None:
    in_background(peer, HI)
    for body in (HI | {"temperature": 99}, HI | {"input": 42}):
        reply = peer.post("/responses", body | {"background": True})
        expect(400 <= reply.status < 500, "expected a refusal, not a response that fails later", reply)


def followed(peer: Peer) -> tuple[str, Reply]:
    """A background response that was streamed: its id, and its stream as a later reader gets it."""
    in_background(peer, HI)
    id_ = final(recorded(peer, "background")).get("id")
    follow = peer.ask("GET", at(id_, "?stream=true"))
    if follow.status in REFUSED:
        raise NotApplicable(f"refused: {follow.refusal}")
    return str(id_), follow


def resumed(peer: Peer) -> None:
    id_, follow = followed(peer)
    frames = recorded(peer, "background").body
    events = recorded(peer, "background").events
    expect(follow.body == frames, "expected the same bytes once more", follow)
    for after in {0, 1, len(events) // 2, len(events) - 2}:
        reply = peer.ask("GET", at(id_, f"?stream=true&starting_after={after}"))
        numbers = [event.get("sequence_number") for event in reply.events]
        expected = list(range(after + 1, len(events)))
        expect(numbers == expected, f"expected events {expected} behind {after}, got {numbers}", reply)
        expect(frames.endswith(reply.body), f"expected the same bytes behind {after}", reply)


def resumed_at_the_end(peer: Peer) -> None:
    """Nothing is to come; who saw events that were lost may be told how it ended."""
    id_, _ = followed(peer)
    events = recorded(peer, "background").events
    for after in (len(events) - 1, len(events), 10**6):
        try:
            reply = peer.ask("GET", at(id_, f"?stream=true&starting_after={after}"))
        except NoReply as error:
            raise Failed("expected the stream to end behind its last event", error) from error
        is_told = all(event.get("sequence_number") == len(events) - 1 for event in reply.events)
        expect(reply.status < 500 and is_told, "expected no event but the last, or a refusal", reply)


def resumed_at_no_number(peer: Peer) -> None:
    id_, _ = followed(peer)
    for after in ("-1", "-3", "x"):
        reply = peer.ask("GET", at(id_, f"?stream=true&starting_after={after}"))
        expect(400 <= reply.status < 500, "expected a refusal of what is no number of an event", reply)


def late_refusal(peer: Peer) -> None:
    """What turns out to be impossible ends: it does not stay queued for ever."""
    in_background(peer, HI)
    too_long = HI | {"input": "fox " * 200_000, "background": True}
    reply = peer.post("/responses", too_long)
    if reply.status == 200:
        last = ended(peer, reply.json.get("id"))
        expect(last.get("status") == "failed", "expected a prompt that is too long to fail", outline(last))
        expect(last.get("error"), "expected the error to say why", outline(last))
    else:
        expect(400 <= reply.status < 500, "expected a refusal of a prompt that is too long", reply)


def survives_its_client(peer: Peer) -> None:
    in_background(peer, HI)
    body = STORY | {"max_output_tokens": 100, "background": True}
    seen = peer.first_events("/responses", body, 3)
    last = ended(peer, (seen[0].get("response") or {}).get("id"))
    expect(last.get("status") in ("completed", "incomplete"), "expected the run to go on", outline(last))


def cancelled(peer: Peer) -> Json:
    """A background response that was cancelled as it ran."""
    id_ = in_background(peer, STORY | peer.long)["id"]
    reply = peer.ask("POST", at(id_, "/cancel"))
    if reply.status in NOT_THERE:
        raise NotApplicable(f"nothing can be cancelled: {reply.refusal}")
    if reply.status == 400 and ended(peer, id_).get("status") in ("completed", "incomplete"):
        raise NotApplicable("it ended before the cancel; try --long")
    expect(
        reply.status == 200 and reply.json.get("status") == "cancelled", "expected status cancelled", reply
    )
    return reply.json


def cancel(peer: Peer) -> None:
    response = cancelled(peer)
    for _ in range(5):  # a late completion must not win
        later = ended(peer, response["id"])
        shown = f"{outline(response)}\n{outline(later)}"
        expect(later == response, "expected a cancelled response to stay as it is", shown)


def cancel_again(peer: Peer) -> None:
    with presumed("cancel"):
        response = cancelled(peer)
    again = peer.ask("POST", at(response["id"], "/cancel"))
    expect(
        again.status == 200 and again.json == response, "expected the same answer to a second cancel", again
    )


def cancel_the_completed(peer: Peer) -> None:
    with presumed("cancel"):
        cancelled(peer)
    last = ended(peer, in_background(peer, HI)["id"])
    reply = peer.ask("POST", at(last["id"], "/cancel"))
    expect(
        reply.status == 400,
        f"expected status 400 for the cancel of a response that is {last['status']}",
        reply,
    )
    expect(ended(peer, last["id"]) == last, "expected it to stay as it is", reply)


def cancel_the_synchronous(peer: Peer) -> None:
    with presumed("cancel"):
        cancelled(peer)
    reply = peer.ask("POST", at(kept(peer)["id"], "/cancel"))
    expect(reply.status == 400, "expected status 400 for the cancel of a foreground response", reply)


def follower_of_the_cancelled(peer: Peer) -> None:
    with presumed("cancel"):
        cancelled(peer)
    with peer.stream("/responses", STORY | peer.long | {"background": True}) as events:
        first = next(events)
        id_ = (first.get("response") or {}).get("id")
        peer.ask("POST", at(id_, "/cancel"))
        try:
            seen = [first, *events]
        except (OSError, HTTPException) as error:
            raise Failed("expected the stream of a cancelled response to end", repr(error)) from error
    last = seen[-1]
    expect(last.get("type") == "response.failed", "expected a terminal event, response.failed", last)
    status = (last.get("response") or {}).get("status")
    expect(status == "cancelled", f"expected a response that is cancelled, got {status}", last)


def delete_the_running(peer: Peer) -> None:
    id_ = in_background(peer, STORY | peer.long)["id"]
    reply = peer.ask("DELETE", at(id_))
    if reply.status in NOT_THERE:
        raise NotApplicable(f"nothing can be deleted: {reply.refusal}")
    peer.ask("POST", at(id_, "/cancel"))
    later = peer.ask("GET", at(id_))
    expected = 404 if reply.status == 200 else 200
    expect(later.status == expected, f"expected what DELETE answered with {reply.status} to hold", later)


# --- the table ----------------------------------------------------------------------------------------------

# fmt: off
CHECKS = {
    #  rule    what checks it, its profiles, its strength, bugs of tests/BUGS.md
    #      title
    #      source
    #      link
    "background": Check(background_is_honoured, "stateful", "must", "F01 F03",
        "background: true is refused, or answered at once with a response that is queued or in progress",
        "the guide on background mode: it returns at once, queued or in_progress",
        GITHUB + "EricLBuehler/mistral.rs/issues/1945"),
    "background-completes": Check(background_completes, "stateful", "must", "F01 F02 F03",
        "a background response comes to say what the foreground says",
        "the guide on background mode: poll until it is terminal",
        GITHUB + "EricLBuehler/mistral.rs/issues/1945"),
    "background-stream": Check(background_streams, "stateful", "must", "F01",
        "background and stream are one request: its events, and GET gives the last one's response",
        "the guide on background mode: background and stream at once",
        GITHUB + "EricLBuehler/mistral.rs/pull/2114"),
    "background-refuses": Check(refused_in_background, "stateful", "should", "F08",
        "a bad request is refused before it is accepted, in the background too",
        "Azure's contract of behaviour: what is wrong is refused before it is accepted",
        MISTRAL_RS + "background_tasks.rs"),
    "background-survives": Check(survives_its_client, "stateful", "must", "I05",
        "a background response goes on when its client leaves",
        "the guide on background mode: the run needs no connection",
        GITHUB + "vllm-project/vllm/pull/23927"),
    "resume": Check(resumed, "stateful", "must", "F09",
        "starting_after gives the rest of the stream from there on, the same bytes",
        "the guide on background mode: GET with stream and starting_after",
        GITHUB + "exo-explore/exo/issues/1356"),
    "resume-end": Check(resumed_at_the_end, "stateful", "must", "F09",
        "starting_after the last event, or beyond, ends at once",
        "the guide on background mode; a client that has all events waits for ever else",
        GITHUB + "exo-explore/exo/issues/1356"),
    "background-late-refusal": Check(late_refusal, "stateful", "must", "F08",
        "a background response that cannot run is refused, or fails",
        "the guide on background mode: poll until it is terminal",
        MISTRAL_RS + "background_tasks.rs"),
    "resume-number": Check(resumed_at_no_number, "stateful", "should", "F09",
        "starting_after is refused if it is no number of an event",
        "Azure's contract of behaviour: a cursor that is no number is a 400",
        AZURE),
    "cancel": Check(cancel, "stateful", "must", "F05",
        "a cancelled response is cancelled, and stays so",
        "the API reference on cancel: status cancelled, and no late completion",
        GITHUB + "SamSaffron/term-llm/pull/789"),
    "cancel-again": Check(cancel_again, "stateful", "must", "F06",
        "a second cancel is answered like the first",
        "the guide on background mode: cancelling twice is idempotent",
        GITHUB + "ogx-ai/ogx/issues/5180"),
    "cancel-completed": Check(cancel_the_completed, "stateful", "should", "F06",
        "the cancel of a response that has ended is a 400",
        "Azure's contract of behaviour: what is terminal cannot be cancelled",
        GITHUB + "vllm-project/vllm/issues/57999"),
    "cancel-synchronous": Check(cancel_the_synchronous, "stateful", "must", "F06",
        "the cancel of a foreground response is a 400",
        "the API reference: only responses created with background can be cancelled",
        AZURE),
    "follower-ends": Check(follower_of_the_cancelled, "stateful", "must", "F04 C19",
        "a stream whose response is cancelled ends with a terminal event",
        "who follows a stream waits for its terminal event",
        GITHUB + "vllm-project/vllm/pull/49721"),
    "delete-running": Check(delete_the_running, "stateful", "should", "F07",
        "a running response is not deleted, or stays deleted",
        "what DELETE answered must hold: a run that is stored again has not been deleted",
        MISTRAL_RS + "background_tasks.rs"),
}
# fmt: on
