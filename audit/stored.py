"""Rules on responses that are kept: GET, DELETE, chains, input items; in the background, resumed, cancelled.

    Asking --rule--> nothing, or Failed, or NotApplicable

Authority: https://platform.openai.com/docs/api-reference/responses and .../docs/guides/background; where
these are silent, what Azure probed: Azure/azure-sdk-for-net, api-behaviour-contract.md.

Not here: what must be refused (refusals.py), connections that remember (turns.py).
"""

import json
import time
from typing import NamedTuple

from audit.asking import (
    STORY,
    Answer,
    Asking,
    asking,
    final,
    of_response,
    outline,
    recorded,
    request,
    same_answer,
)
from audit.peer import NOT_THERE, REFUSED, Peer, Reply
from audit.rules import Failed, NoReply, NotApplicable, expect, rules_of
from audit.schema import Json


class Kept(NamedTuple):
    """A response that has an id."""

    peer: Peer
    response: Json

    def ask(self, method: str, rest: str = "") -> Reply:
        return self.peer.ask(method, f"/responses/{self.response.get('id')}{rest}")

    def ask_if_there(self, method: str, rest: str = "") -> Reply:
        """Ask for what a server need not have."""
        reply = self.ask(method, rest)
        if reply.status in NOT_THERE:
            raise NotApplicable(f"no {method} {rest}: {reply.refusal}")
        return reply

    def expect(self, holds: object, message: str, other: Json) -> None:
        expect(holds, message, f"{outline(self.response)}\n{outline(other)}")


def kept(ask: Asking, **asked: object) -> Kept:
    """Make a response that can be asked for by its id."""
    made = Kept(ask.peer, ask.plain(store=True, **asked).response)
    reply = made.ask("GET")
    if reply.status in REFUSED:
        raise NotApplicable(f"responses are not kept: {reply.refusal}")
    return made


must, should, _ = rules_of("stored", "stateful", asking)


@must("stored")
def stored(ask: Asking) -> None:
    """GET gives what was answered, streamed or not

    the API reference: GET returns the response with this id
    F12 https://github.com/EricLBuehler/mistral.rs/issues/1946
    """
    for made in (kept(ask), Kept(ask.peer, final(recorded(ask.peer, "text")))):
        later = made.ask("GET").json
        made.expect(later == made.response, "expected GET to give the answer once more", later)


@must("deleted")
def deleted(ask: Asking) -> None:
    """a deleted response is gone

    the API reference on DELETE
    F07 https://platform.openai.com/docs/api-reference/responses/delete
    """
    made = kept(ask)
    gone = made.ask_if_there("DELETE")
    expect(gone.status == 200, "expected status 200", gone)
    for method in ("GET", "DELETE"):
        reply = made.ask(method)
        expect(reply.status == 404, "expected status 404, for it is deleted", reply)


@must("unknown-id")
def unknown_id(ask: Asking) -> None:
    """an unknown id is a 404

    SDKs raise NotFoundError for 404 alone
    F06 https://github.com/Azure/azure-sdk-for-net/tree/main/sdk/agentserver/Azure.AI.AgentServer.Responses/docs
    """
    unknown = Kept(kept(ask).peer, {"id": "resp_00000000000000000000000000000000"})
    for reply in (unknown.ask("GET"), unknown.ask("DELETE"), unknown.ask("POST", "/cancel")):
        expect(reply.status in NOT_THERE, "expected status 404 of an unknown id", reply)


def chain(ask: Asking, **asked: object) -> tuple[Answer, Answer]:
    """Return a first response, and one that continues it."""
    first = of_response("first", kept(ask, **asked).response)
    return first, ask.plain(previous_response_id=first.response["id"])


@must("chained")
def chained(ask: Asking) -> None:
    """the prompt holds what the previous response said

    the API reference on previous_response_id
    F14 https://github.com/tetherto/qvac/pull/2030
    """
    first, second = chain(ask)
    lengths = [first.n_prompt, second.n_prompt]
    second.expect(lengths[0] < lengths[1], f"a longer prompt after a previous response, got {lengths} tokens")


@must("instructions")
def instructions(ask: Asking) -> None:
    """a chain does not carry the previous response's instructions over

    the API reference: instructions from a previous response will not be carried over
    F14 https://platform.openai.com/docs/api-reference/responses/create
    """
    # Long instructions of the first turn do not make the second prompt longer than the first was.
    sentence = "Answer in one short sentence, and never mention the weather, the sea or the moon. "
    first, second = chain(ask, instructions=sentence * 40)
    lengths = [first.n_prompt, second.n_prompt]
    message = f"the prompt without the instructions to be shorter, got {lengths} tokens"
    second.expect(lengths[0] > lengths[1], message)


@must("not-stored")
def not_stored(ask: Asking) -> None:
    """store: false keeps nothing

    the API reference on store; clients that send it count on it
    F12 https://platform.openai.com/docs/api-reference/responses/create
    """
    kept(ask)
    reply = Kept(ask.peer, ask.plain(store=False).response).ask("GET")
    expect(reply.status == 404, "expected status 404 of what was not to be stored", reply)


@should("metadata")
def metadata(ask: Asking) -> None:
    """metadata comes back as it was sent

    the API reference on metadata
    https://platform.openai.com/docs/api-reference/responses/create
    """
    pairs = {"user": "u-1", "note": "caf\u00e9"}
    made = kept(ask, metadata=pairs)
    for response in (made.response, made.ask("GET").json):
        got = response.get("metadata")
        expect(got == pairs, f"expected the metadata as it was sent, got {got}", response)


@should("input-order")
def input_order(ask: Asking) -> None:
    """the list of input items has an order, a limit and has_more

    the API reference on input items
    https://platform.openai.com/docs/api-reference/responses/input-items
    """
    made = kept(ask, said=[{"role": "user", "content": text} for text in ("one", "two", "three")])
    for order, first in (("asc", "one"), ("desc", "three")):
        reply = made.ask_if_there("GET", f"/input_items?order={order}&limit=2")
        items = reply.json.get("data") or [{}]
        expect(len(items) == 2, f"expected two items, for the limit is 2, got {len(items)}", reply)
        expect(reply.json.get("has_more") is True, "expected has_more, for there are three", reply)
        is_ordered = first in json.dumps(items[0])
        expect(is_ordered, f"expected the item {first!r} first with order={order}", reply)


@should("input-items")
def input_items(ask: Asking) -> None:
    """the input can be listed: items with ids, texts of the assistant's with annotations

    the API reference on input items
    https://platform.openai.com/docs/api-reference/responses/input-items
    """
    # As clients write a turn of the assistant, without the list that its type must have.
    hi = {"role": "user", "content": "hi"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}
    reply = kept(ask, said=[hi, said, hi]).ask_if_there("GET", "/input_items")
    items = reply.json.get("data") or [{}]
    has_ids = reply.json.get("object") == "list" and "id" in items[0]
    expect(has_ids, "expected a list of items with ids", reply)
    for item in items:
        for part in item.get("content") or ():
            if isinstance(part, dict) and part.get("type") == "output_text":
                has_list = isinstance(part.get("annotations"), list)
                expect(has_list, "expected annotations in an output_text, even if there are none", reply)


@should("foreground-as-stream")
def foreground_as_stream(ask: Asking) -> None:
    """GET with stream=true of a response without stream is refused, or gives its events

    Azure's contract of behaviour: it was not created with stream=true
    F09 https://github.com/Azure/azure-sdk-for-net/tree/main/sdk/agentserver/Azure.AI.AgentServer.Responses/docs
    """
    reply = kept(ask).ask("GET", "?stream=true")
    message = "expected a refusal, or the events once more, of a response that was not streamed"
    expect(reply.is_refusal or (reply.is_stream and reply.events), message, reply)


# --- background ---------------------------------------------------------------------------------------------

must, should, _ = rules_of("background", "stateful", asking)
ENDED = {"completed", "incomplete", "failed", "cancelled"}
POLL_S, MAX_POLL_S = 0.02, 1.0  # between two looks at a response that runs: the first pause, the longest


def begun(ask: Asking, **asked: object) -> Kept:
    return Kept(ask.peer, ask.plain(background=True, **asked).response)


def begun_story(ask: Asking) -> Kept:
    return begun(ask, said=STORY, limit=400, **ask.peer.long)


def ended(made: Kept) -> Json:
    """Return a background response when it is terminal; a slow one uses up the rule's budget."""
    pause_s = POLL_S
    while True:
        reply = made.ask("GET")
        expect(reply.status == 200, "expected status 200 of a background response", reply)
        if reply.json.get("status") in ENDED:
            return reply.json
        time.sleep(min(pause_s, made.peer.seconds_left()))
        pause_s = min(2 * pause_s, MAX_POLL_S)


@must("background")
def background(ask: Asking) -> None:
    """background: true is refused, or answered at once with a response that is queued or in progress

    the guide on background mode: it returns at once, queued or in_progress
    F01 F03 https://github.com/EricLBuehler/mistral.rs/issues/1945
    """
    response = begun(ask).response
    waits = response.get("status") in ("queued", "in_progress") and response.get("output") == []
    expect(waits, "expected background: true to be refused, or answered with what is queued", response)


@must("background-completes", after="background")
def background_completes(ask: Asking) -> None:
    """a background response comes to say what the foreground says

    the guide on background mode: poll until it is terminal
    F01 F02 F03 https://github.com/EricLBuehler/mistral.rs/issues/1945
    """
    last = outline(ended(begun(ask)))
    same_answer(ask.plain().outline, last, lambda: ask.plain().outline, "foreground background")


@must("background-stream", after="background")
def background_stream(ask: Asking) -> None:
    """background and stream are one request: its events, and GET gives the last one's response

    the guide on background mode: background and stream at once
    F01 https://github.com/EricLBuehler/mistral.rs/pull/2114
    """
    made = Kept(ask.peer, final(recorded(ask.peer, "background")))
    later = ended(made)
    made.expect(later == made.response, "expected GET to give what the stream said", later)


@must("background-late-refusal", after="background")
def background_late_refusal(ask: Asking) -> None:
    """a background response that cannot run is refused, or fails

    the guide on background mode: poll until it is terminal
    F08 https://github.com/EricLBuehler/mistral.rs/blob/9e922623f24b32d41f3892b74f0eed18707f4e6c/mistralrs-server-core/src/background_tasks.rs
    """
    reply = ask.reply(said="fox " * 200_000, background=True)
    if reply.status != 200:
        expect(reply.is_refusal, "expected a refusal of a prompt that is too long", reply)
        return
    last = ended(Kept(ask.peer, reply.json))
    has_failed = last.get("status") == "failed" and last.get("error")
    expect(
        has_failed, "expected a prompt that is too long to fail, with an error that says why", outline(last)
    )


@must("background-survives", after="background")
def background_survives(ask: Asking) -> None:
    """a background response goes on when its client leaves

    the guide on background mode: the run needs no connection
    I05 https://github.com/vllm-project/vllm/pull/23927
    """
    with ask.peer.stream(*request("responses", said=STORY, limit=100, background=True)) as events:
        first = next(events)
        next(events)
    last = ended(Kept(ask.peer, first.get("response") or {}))
    expect(last.get("status") in ("completed", "incomplete"), "expected the run to go on", outline(last))


# --- resumed ------------------------------------------------------------------------------------------------


def followed(ask: Asking) -> tuple[Kept, Reply, Reply]:
    """Return a background response that was streamed: its stream, and that of a later reader."""
    stream = recorded(ask.peer, "background")
    made = Kept(ask.peer, final(stream))
    follow = made.ask("GET", "?stream=true")
    if follow.status in REFUSED:
        raise NotApplicable(f"refused: {follow.refusal}")
    return made, stream, follow


@must("resume", after="background")
def resume(ask: Asking) -> None:
    """starting_after gives the rest of the stream from there on, the same bytes

    the guide on background mode: GET with stream and starting_after
    F09 https://github.com/exo-explore/exo/issues/1356
    """
    made, stream, follow = followed(ask)
    expect(follow.body == stream.body, "expected the same bytes once more", follow)
    n_events = len(stream.events)
    for after in {0, 1, n_events // 2, n_events - 2}:
        reply = made.ask("GET", f"?stream=true&starting_after={after}")
        numbers = [event.get("sequence_number") for event in reply.events]
        expected = [*range(after + 1, n_events)]
        expect(numbers == expected, f"expected events {expected} after {after}, got {numbers}", reply)
        expect(stream.body.endswith(reply.body), f"expected the same bytes after {after}", reply)


@must("resume-end", after="background")
def resume_end(ask: Asking) -> None:
    """starting_after the last event, or beyond, ends at once

    the guide on background mode; a client that has all events waits for ever else
    F09 https://github.com/exo-explore/exo/issues/1356
    """
    # No event is to come; a reader of events that were lost may be told how it ended.
    made, stream, _ = followed(ask)
    last = len(stream.events) - 1
    for after in (last, last + 1, 10**6):
        try:
            reply = made.ask("GET", f"?stream=true&starting_after={after}")
        except NoReply as error:
            raise Failed("expected the stream to end after its last event", error) from error
        is_told = all(event.get("sequence_number") == last for event in reply.events)
        expect(reply.status < 500 and is_told, "expected no event but the last, or a refusal", reply)


@should("resume-number", after="background")
def resume_number(ask: Asking) -> None:
    """starting_after is refused if it is not the number of an event

    Azure's contract of behaviour: a cursor that is not a number is a 400
    F09 https://github.com/Azure/azure-sdk-for-net/tree/main/sdk/agentserver/Azure.AI.AgentServer.Responses/docs
    """
    made, _, _ = followed(ask)
    for after in ("-1", "-3", "x"):
        reply = made.ask("GET", f"?stream=true&starting_after={after}")
        expect(reply.is_refusal, "expected a refusal of what is not the number of an event", reply)


# --- cancelled, deleted -------------------------------------------------------------------------------------


def cancelled(ask: Asking) -> Kept:
    """Return a background response that was cancelled as it ran."""
    made = begun_story(ask)
    reply = made.ask_if_there("POST", "/cancel")
    if reply.status == 400 and ended(made).get("status") in ("completed", "incomplete"):
        raise NotApplicable("it ended before the cancel; try --long")
    is_cancelled = reply.status == 200 and reply.json.get("status") == "cancelled"
    expect(is_cancelled, "expected status cancelled", reply)
    return Kept(ask.peer, reply.json)


@must("cancel", after="background")
def cancel(ask: Asking) -> None:
    """a cancelled response is cancelled, and stays so

    the API reference on cancel: status cancelled, and no late completion
    F05 https://github.com/SamSaffron/term-llm/pull/789
    """
    made = cancelled(ask)
    for _ in range(5):  # a late completion must not win
        later = ended(made)
        made.expect(later == made.response, "expected a cancelled response to stay as it is", later)


@must("cancel-again", after="cancel")
def cancel_again(ask: Asking) -> None:
    """a second cancel is answered like the first

    the guide on background mode: cancelling twice is idempotent
    F06 https://github.com/ogx-ai/ogx/issues/5180
    """
    made = cancelled(ask)
    again = made.ask("POST", "/cancel")
    is_same = again.status == 200 and again.json == made.response
    expect(is_same, "expected the same answer to a second cancel", again)


@should("cancel-completed", after="cancel")
def cancel_completed(ask: Asking) -> None:
    """the cancel of a response that has ended is a 400

    Azure's contract of behaviour: what is terminal cannot be cancelled
    F06 https://github.com/vllm-project/vllm/issues/57999
    """
    made = begun(ask)
    last = ended(made)
    reply = made.ask("POST", "/cancel")
    message = f"expected status 400 for the cancel of a response that is {last['status']}"
    expect(reply.status == 400, message, reply)
    expect(ended(made) == last, "expected it to stay as it is", reply)


@must("cancel-synchronous", after="cancel")
def cancel_synchronous(ask: Asking) -> None:
    """the cancel of a foreground response is a 400

    the API reference: only responses created with background can be cancelled
    F06 https://github.com/Azure/azure-sdk-for-net/tree/main/sdk/agentserver/Azure.AI.AgentServer.Responses/docs
    """
    reply = kept(ask).ask("POST", "/cancel")
    expect(reply.status == 400, "expected status 400 for the cancel of a foreground response", reply)


@must("follower-ends", after="cancel")
def follower_ends(ask: Asking) -> None:
    """a stream whose response is cancelled ends with a terminal event

    a reader that follows a stream waits for its terminal event
    F04 C19 https://github.com/vllm-project/vllm/pull/49721
    """
    asked = request("responses", said=STORY, limit=400, background=True, **ask.peer.long)
    with ask.peer.stream(*asked) as events:
        last = next(events)
        Kept(ask.peer, last.get("response") or {}).ask("POST", "/cancel")
        try:
            for event in events:
                last = event
        except (NoReply, OSError) as error:
            raise Failed("expected the stream of a cancelled response to end", repr(error)) from error
    end = last.get("type"), (last.get("response") or {}).get("status")
    expect(end == ("response.failed", "cancelled"), f"expected a failed response, cancelled, got {end}", last)


@should("delete-running", after="background")
def delete_running(ask: Asking) -> None:
    """a running response is not deleted, or stays deleted

    what DELETE answered must hold: a run that is stored again has not been deleted
    F07 https://github.com/EricLBuehler/mistral.rs/blob/9e922623f24b32d41f3892b74f0eed18707f4e6c/mistralrs-server-core/src/background_tasks.rs
    """
    made = begun_story(ask)
    reply = made.ask_if_there("DELETE")
    made.ask("POST", "/cancel")
    later = made.ask("GET")
    expected = 404 if reply.status == 200 else 200
    expect(later.status == expected, f"expected what DELETE answered with {reply.status} to hold", later)
