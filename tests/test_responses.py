"""Laws of responses.py over any outputs and any end. The documented bugs are in
tests/replays/responses-*.toml."""

import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent

import responses
import sse
from channels import UNLIKELY, Arguments, Call, Channel, Compaction, Delta, Finish, Output, TokenLogprob
from event_log import Entry, encode_event
from helpers import clients, laws
from helpers.laws import deltas, finishes, outputs, texts
from helpers.scripted import HEAD, builder, events_of
from responses import ENDINGS, GRAMMAR, KINDS, REASONING_EVENTS, Builder, Event, IllegalEvent, fold, label

# --- laws ---------------------------------------------------------------------------------------------------


@given(outputs, finishes)
def test_shape_sum_order_and_status(outputs: list[Output], finish: Finish) -> None:
    """Laws 3, 4 and 5, and every event and body by the SDK's own models, strictly."""
    events = laws.on_the_wire(events_of([*outputs, finish]))
    laws.check_response(events)
    laws.check_body(json.loads(json.dumps(fold(events))))


@given(outputs, finishes)
def test_nothing_is_lost_or_added(outputs: list[Output], finish: Finish) -> None:
    """The items are those of the outputs, commentary being a message too."""
    output = fold(events_of([*outputs, finish]))["output"]
    assert [*map(shown, output)] == [[KINDS[item[0]].item, *item[1:]] for item in laws.items(outputs)]
    namespaces = [said.namespace for said in outputs if isinstance(said, Call)]
    assert [item.get("namespace", "") for item in output if "call_id" in item] == namespaces


def shown(item: dict[str, Any]) -> list[str]:
    if "call_id" in item:
        return [item["type"], item["name"], item["input" if "input" in item else "arguments"]]
    return [item["type"], *(part.get("text") or part["refusal"] for part in item["content"])]


@given(outputs, finishes)
def test_the_sdk_adds_up_the_same(outputs: list[Output], finish: Finish) -> None:
    """The official client's accumulator raises if an id or an index is not the one announced.

    It adds up the text of messages and the arguments of functions.
    """
    events = laws.on_the_wire(events_of([*outputs, finish]))
    output = fold(events)["output"]
    said = [shown(item)[-1] for item in output if re.search("output_text|function_call", str(item))]
    assert [*clients.openai_sdk(events)] == [*filter(None, said)]


def test_a_logprob_is_encoded_once() -> None:
    """The events that close an item said all logprobs four times, each time encoded anew: 1.7 s of 2,000
    tokens with 20 candidates. What is echoed of the request was encoded three times.
    """
    b = Builder(HEAD | {"instructions": "word " * 1000}, lambda prefix: f"{prefix}_1", "{}: {}".format)
    logprob = TokenLogprob("a", -math.inf, b"a", (TokenLogprob("b", -1.5, b"b"),) * 20)
    events = [*b.start(), *b.feed(Delta("final", "aa", (logprob,) * 2)), *b.finish(Finish("stop"), 2)]
    *_, delta, done, part_done, item_done, completed = events
    items = [item_done["item"], completed["response"]["output"][0]]
    parts = [part_done["part"], *(item["content"][0] for item in items)]
    assert len({tuple(map(id, each["logprobs"])) for each in (delta, done, *parts)}) == 1
    assert all(isinstance(logprob, sse.Encoded) for logprob in done["logprobs"])
    assert len({id(event["response"]["instructions"]) for event in events if "response" in event}) == 1
    assert {json.loads(sse.dumps(part))["logprobs"][0]["logprob"] for part in parts} == {UNLIKELY}


def test_a_first_logprob_that_cannot_be_encoded_opens_no_item() -> None:
    """Bug: the item was closed at the end, and had never been announced."""
    b = builder()
    b.start()
    with pytest.raises(ValueError, match="surrogate"):
        b.feed(Delta("final", "b", (TokenLogprob("\ud800", -1, b"b"),)))
    assert [event["type"] for event in b.finish(Finish("failed"), 2)] == ["response.failed"]


@given(outputs, finishes)
def test_the_response_in_an_event_is_encoded_with_it(outputs: list[Output], finish: Finish) -> None:
    """Its bytes in the frame are those that GET answers with, and that the store keeps."""
    for number, event in enumerate(events_of([*outputs, finish])):
        numbered = {"type": event["type"], "sequence_number": number} | event
        entry = encode_event(number, event)
        assert entry.frame == sse.encode(numbered, event["type"])
        told = (response["status"], sse.dumps(response)) if (response := event.get("response")) else ()
        assert entry == Entry(entry.frame, *told)
        assert entry.response_json.encode() in entry.frame


@given(outputs.flatmap(lambda said: st.sampled_from([said, [*said, Compaction("x")]])), st.data())
def test_a_builder_takes_up_what_another_one_has_left(
    outputs: list[Output | Compaction], data: st.DataObject
) -> None:
    """Bug: a process that died left a response with nothing of what it had said in its last event.

    Bug: one that died after a compaction was taken for damaged, and deleted.
    """
    first = builder()
    n_left = data.draw(st.integers(0, len(outputs)))  # what is fed at once is stored at once
    events = [*first.start(), *(event for output in outputs[:n_left] for event in first.feed(output))]
    left = json.loads(sse.dumps(events))
    second = builder()
    second.resume(left)
    ended = laws.on_the_wire([*left, *second.finish(Finish("failed", message="interrupted"), 2)])
    laws.check_response(ended)
    said = [item for item in fold(ended)["output"] if item.get("status") == "incomplete"]
    assert len(said) <= 1


@given(outputs, finishes, finishes, deltas | texts.map(Call))
def test_nothing_follows_the_end(outputs: list[Output], finish: Finish, late: Finish, more: Output) -> None:
    """Law 5: a terminal status never changes, whatever still comes."""
    b = builder()
    said: list[list[Event]] = [b.start(), *map(b.feed, outputs), b.finish(finish, 2)]
    assert said[-1][-1]["response"]["status"] == ENDINGS[finish.reason].status
    with pytest.raises(IllegalEvent):
        b.finish(late, 2)
    with pytest.raises(IllegalEvent):
        b.feed(more)


def test_the_trace_is_what_happens() -> None:
    """The worked example in responses.py: the events that are made, and the state after each."""
    source = Path(responses.__file__).read_text(encoding="utf-8")
    trace = re.findall(r"^#     .* (response\.[\w.]+(?: \w+)?) {2,}([\w ]+)$", source, re.MULTILINE)
    outputs: list[Output] = [Delta("final", "Hi"), Delta("final", "!"), Call("f"), Arguments("{}")]
    state, made = "start", []
    for event in events_of([*outputs, Finish("stop")]):
        state = GRAMMAR[state, label(event)]
        made.append((label(event), state))
    assert trace == made


# --- the tables ---------------------------------------------------------------------------------------------


@pytest.mark.bug("A15")
def test_every_event_of_the_grammar_is_made_and_is_one_of_the_sdk() -> None:
    """No event that the SDK does not know (A15), and no row that nothing reaches but those for `queued`."""
    used, state = set(), "start"
    calls: list[Output] = [Call("f"), Arguments("{}"), Call("g", custom=True), Arguments("x")]
    deltas = [Delta(channel, "a") for channel in get_args(Channel)]
    for event in events_of([*calls, Compaction("sealed"), *deltas, Finish("stop")]):
        used.add((state, label(event)))
        state = GRAMMAR[state, label(event)]
    queued = {row for row in GRAMMAR if "queued" in row[0] + row[1]}
    theirs = {row for row in GRAMMAR if row[1].startswith(REASONING_EVENTS["open-responses"] + ".")}
    other_ends = {("between", "response.incomplete"), ("between", "response.failed")}
    assert GRAMMAR.keys() - used - queued - theirs == other_ends
    union = get_args(get_args(ResponseStreamEvent)[0])
    known = {name for model in union for name in get_args(model.model_fields["type"].annotation)}
    assert {event.split(" ")[0] for _, event in GRAMMAR.keys() - theirs} <= known


@given(outputs, finishes)
def test_reasoning_under_its_other_name(outputs: list[Output], finish: Finish) -> None:
    """`--reasoning-events open-responses`: the same stream but for two names, and never both of one."""
    ours = events_of([*outputs, finish])
    theirs = events_of([*outputs, finish], reasoning_events="open-responses")
    assert [e | {"type": e["type"].replace("reasoning_text.", "reasoning.")} for e in ours] == theirs
