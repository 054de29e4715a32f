"""Rules on responses that are kept: GET, DELETE, chains, input items; in the background, resumed, cancelled.

    Peer --rule--> nothing, or AssertionError, or NotApplicable

Authority: https://platform.openai.com/docs/api-reference/responses and .../docs/guides/background; where
these are silent, what Azure probed: Azure/azure-sdk-for-net, api-behaviour-contract.md.

Not here: what must be refused (exchanges.py), connections that remember (turns.py).
"""

import time
from typing import NamedTuple

from audit.exchanges import enter_texts
from audit.http import REFUSED, Reply
from audit.peer import STORY, Peer, final
from audit.rules import NoReply, NotApplicable, rules_of
from audit.schema import Json, expect_members
from audit.stream import of_response

HAS_ANSWERED = "completed", "incomplete"


class Kept(NamedTuple):
    """A response that has an id."""

    peer: Peer
    response: Json

    def ask(self, method: str, rest: str = "") -> Reply:
        return self.peer.ask(method, f"/responses/{self.response.get('id')}{rest}")


must = rules_of("stored", "stateful")[0]


@must
def stored(peer: Peer) -> None:
    """stored: GET gives what was answered, streamed or not

    the API reference: GET returns the response with this id
    F12 https://github.com/EricLBuehler/mistral.rs/issues/1946
    """
    made = Kept(peer, peer.plain(store=True).response)
    made.ask("GET").if_there(REFUSED)
    for one in (made, Kept(peer, final(peer.recorded("text")))):
        assert one.ask("GET").json == one.response


BY_ID = """
must of stateful
deleted: a deleted response is gone

the API reference on DELETE
F07 https://platform.openai.com/docs/api-reference/responses/delete

responses  {"store": true} -> object:=response
GET /responses/ID -> object:=response
DELETE /responses/ID -> deleted:=true
GET /responses/ID -> 404
DELETE /responses/ID -> 404


must of stateful
unknown-id: an unknown id is a 404

SDKs raise NotFoundError for 404 alone
F06 https://github.com/Azure/azure-sdk-for-net/tree/main/sdk/agentserver/Azure.AI.AgentServer.Responses/docs

responses  {"store": true} -> object:=response
GET /responses/ID -> object:=response
GET /responses/resp_00000000000000000000000000000000 -> 404
DELETE /responses/resp_00000000000000000000000000000000 -> 404, or 405, or 501
POST /responses/resp_00000000000000000000000000000000/cancel -> 404, or 405, or 501


must of stateful
chained: the prompt holds what the previous response said

the API reference on previous_response_id
F14 https://github.com/tetherto/qvac/pull/2030

responses  {"store": true} -> object:=response
GET /responses/ID -> object:=response
responses  {"previous_response_id": "ID"} -> a longer prompt


must of stateful
instructions: a chain does not carry the previous response's instructions over

the API reference: instructions from a previous response will not be carried over
F14 https://platform.openai.com/docs/api-reference/responses/create

responses  {"store": true, "instructions": "SENTENCES"} -> object:=response
GET /responses/ID -> object:=response
responses  {"previous_response_id": "ID"} -> a shorter prompt


must of stateful
not-stored: store: false keeps nothing

the API reference on store; clients that send it count on it
F12 https://platform.openai.com/docs/api-reference/responses/create

responses  {"store": true} -> object:=response
GET /responses/ID -> object:=response
responses  {"store": false} -> object:=response
GET /responses/ID -> 404


should of stateful
metadata: metadata comes back as it was sent

the API reference on metadata
https://platform.openai.com/docs/api-reference/responses/create

responses  {"store": true, "metadata": {"user": "u-1", "note": "caf\u00e9"}} -> metadata:noted
GET /responses/ID -> metadata:noted


should of stateful
input-order: the list of input items has an order, a limit and has_more

the API reference on input items
https://platform.openai.com/docs/api-reference/responses/input-items

responses  {"store": true, "input": [{"role": "user", "content": "one"}, {"role": "user", "content": "two"},
             {"role": "user", "content": "three"}]} -> object:=response
GET /responses/ID/input_items?order=asc&limit=1 -> data:[item_one] has_more:=true
GET /responses/ID/input_items?order=desc&limit=1 -> data:[item_three] has_more:=true


should of stateful
input-items: the input can be listed: items with ids, texts of the assistant's with annotations

the API reference on input items
https://platform.openai.com/docs/api-reference/responses/input-items

responses  {"store": true, "input": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [
             {"type": "output_text", "text": "Hello."}]}, {"role": "user", "content": "hi"}]}
             -> object:=response
GET /responses/ID/input_items -> object:=list data:[input_item]


should of stateful
foreground-as-stream: GET with stream=true of a response without stream is refused, or gives its events

Azure's contract of behaviour: it was not created with stream=true
F09 https://github.com/Azure/azure-sdk-for-net/tree/main/sdk/agentserver/Azure.AI.AgentServer.Responses/docs

responses  {"store": true} -> object:=response
GET /responses/ID -> object:=response
GET /responses/ID?stream=true -> refused, or stream


must of stateful, after cancel
cancel-synchronous: the cancel of a foreground response is a 400

the API reference: only responses created with background can be cancelled
F06 https://github.com/Azure/azure-sdk-for-net/tree/main/sdk/agentserver/Azure.AI.AgentServer.Responses/docs

responses  {"store": true} -> object:=response
GET /responses/ID -> object:=response
POST /responses/ID/cancel -> 400


must of stateful, after cancel
cancel-again: a second cancel is answered like the first

the guide on background mode: cancelling twice is idempotent
F06 https://github.com/ogx-ai/ogx/issues/5180

responses  {"background": true, "input": "STORY", "max_output_tokens": 1500}
             -> status:=queued|=in_progress
POST /responses/ID/cancel -> status:=cancelled
POST /responses/ID/cancel -> 200 status:=cancelled


must of stateful
background: background: true is refused, or answered at once with a response that is queued or in progress

the guide on background mode: it returns at once, queued or in_progress
F01 F03 https://github.com/EricLBuehler/mistral.rs/issues/1945

responses  {"background": true} -> status:=queued|=in_progress output:=[]
"""
enter_texts("stored", BY_ID)


# --- background ---------------------------------------------------------------------------------------------

# All that follows builds on the rule background.
must, should, _ = rules_of("background", "stateful", "background")


def begun(peer: Peer, **asked: object) -> Kept:
    return Kept(peer, peer.plain(background=True, **asked).response)


def ended(made: Kept) -> Json:
    """Return a background response when it is terminal; a slow one uses up the rule's budget."""
    while True:
        reply = made.ask("GET")
        assert reply.status == 200
        if reply.json.get("status") in (*HAS_ANSWERED, "failed", "cancelled"):
            return reply.json
        time.sleep(0.1)


@must
def background_completes(peer: Peer) -> None:
    """background-completes: a background response comes to say what the foreground says

    the guide on background mode: poll until it is terminal
    F01 F02 F03 https://github.com/EricLBuehler/mistral.rs/issues/1945
    """
    told = of_response(ended(begun(peer))).outline
    peer.same_answer(lambda: peer.plain().outline, told)


@must
def background_stream(peer: Peer) -> None:
    """background-stream: background and stream are one request: its events, and GET gives the last one's
    response

    the guide on background mode: background and stream at once
    F01 https://github.com/EricLBuehler/mistral.rs/pull/2114
    """
    made = Kept(peer, final(peer.recorded("background")))
    assert ended(made) == made.response


@must
def background_late_refusal(peer: Peer) -> None:
    """background-late-refusal: a background response that cannot run is refused, or fails

    the guide on background mode: poll until it is terminal
    F08 https://github.com/EricLBuehler/mistral.rs/blob/9e922623f24b32d41f3892b74f0eed18707f4e6c/mistralrs-server-core/src/background_tasks.rs
    """
    reply = peer.reply(said="fox " * 200_000, background=True)
    if not reply.is_refusal:
        expect_members(ended(Kept(peer, reply.json)), "status:=failed error:dict")


@must
def background_survives(peer: Peer) -> None:
    """background-survives: a background response goes on when its client leaves

    the guide on background mode: the run needs no connection
    I05 https://github.com/vllm-project/vllm/pull/23927
    """
    with peer.live(said=STORY, limit=300, background=True, **peer.long) as events:
        made = Kept(peer, next(events).response)
        next(events)
    assert ended(made).get("status") in HAS_ANSWERED


# --- resumed ------------------------------------------------------------------------------------------------


def followed(peer: Peer) -> tuple[Kept, Reply]:
    """Return a background response that was streamed and can be streamed again, and its stream."""
    stream = peer.recorded("background")
    made = Kept(peer, final(stream))
    again = made.ask("GET", "?stream=true").if_there(REFUSED)
    assert again.body == stream.body, "expected the same bytes once more"
    return made, stream


@must
def resume(peer: Peer) -> None:
    """resume: starting_after gives the rest of the stream from there on, the same bytes

    the guide on background mode: GET with stream and starting_after
    F09 https://github.com/exo-explore/exo/issues/1356
    """
    made, stream = followed(peer)
    n_events = len(stream.events)
    for after in {0, n_events // 2, n_events - 2}:
        reply = made.ask("GET", f"?stream=true&starting_after={after}")
        assert stream.body.endswith(reply.body)
        assert reply.events == stream.events[after + 1 :]


@must(after="resume")
def resume_end(peer: Peer) -> None:
    """resume-end: starting_after the last event, or beyond, ends at once

    the guide on background mode; a client that has all events waits for ever else
    F09 https://github.com/exo-explore/exo/issues/1356
    """
    # No event is to come; a reader of events that were lost may be told how it ended.
    made, stream = followed(peer)
    for after in (len(stream.events) - 1, 10**6):
        try:
            reply = made.ask("GET", f"?stream=true&starting_after={after}")
        except NoReply as error:
            raise AssertionError(f"expected the stream to end after its last event: {error}") from error
        assert reply.status < 500
        assert reply.events in ([], stream.events[-1:])


@should(after="resume")
def resume_number(peer: Peer) -> None:
    """resume-number: starting_after is refused if it is not the number of an event

    Azure's contract of behaviour: a cursor that is not a number is a 400
    F09 https://github.com/Azure/azure-sdk-for-net/tree/main/sdk/agentserver/Azure.AI.AgentServer.Responses/docs
    """
    made, _ = followed(peer)
    for after in ("-1", "x"):
        assert made.ask("GET", f"?stream=true&starting_after={after}").is_refusal


# --- cancelled, deleted -------------------------------------------------------------------------------------


def begun_story(peer: Peer) -> Kept:
    return begun(peer, said=STORY, limit=1500, **peer.long)


def cancelled(peer: Peer) -> Kept:
    """Return a background response that was cancelled as it ran."""
    made = begun_story(peer)
    reply = made.ask("POST", "/cancel").if_there()
    if reply.status == 400 and ended(made).get("status") in HAS_ANSWERED:
        raise NotApplicable("it ended before the cancel")
    assert reply.json.get("status") == "cancelled"
    return Kept(peer, reply.json)


@must
def cancel(peer: Peer) -> None:
    """cancel: a cancelled response is cancelled, and stays so

    the API reference on cancel: status cancelled, and no late completion
    F05 https://github.com/SamSaffron/term-llm/pull/789
    """
    made = cancelled(peer)
    for _ in range(5):  # a late completion must not win
        assert ended(made) == made.response


@should(after="cancel")
def cancel_completed(peer: Peer) -> None:
    """cancel-completed: the cancel of a response that has ended is a 400

    Azure's contract of behaviour: what is terminal cannot be cancelled
    F06 https://github.com/vllm-project/vllm/issues/57999
    """
    made = begun(peer)
    last = ended(made)
    assert made.ask("POST", "/cancel").status == 400
    assert ended(made) == last


@must(after="cancel")
def follower_ends(peer: Peer) -> None:
    """follower-ends: a stream whose response is cancelled ends with a terminal event

    a reader that follows a stream waits for its terminal event
    F04 C19 https://github.com/vllm-project/vllm/pull/49721
    """
    with peer.live(said=STORY, limit=1500, background=True, **peer.long) as events:
        first = next(events)
        Kept(peer, first.response).ask("POST", "/cancel")
        try:
            last = [first, *events][-1]
        except NoReply as error:
            raise AssertionError(f"expected the stream of a cancelled response to end: {error}") from error
    assert last.type == "response.failed"
    assert last.response.status == "cancelled"


@should
def delete_running(peer: Peer) -> None:
    """delete-running: a running response is not deleted, or stays deleted

    what DELETE answered must hold: a run that is stored again has not been deleted
    F07 https://github.com/EricLBuehler/mistral.rs/blob/9e922623f24b32d41f3892b74f0eed18707f4e6c/mistralrs-server-core/src/background_tasks.rs
    """
    made = begun_story(peer)
    reply = made.ask("DELETE").if_there()
    made.ask("POST", "/cancel")
    assert made.ask("GET").status == (404 if reply.status == 200 else 200)
