"""Laws of responses.py over any outputs and any end. The documented bugs are in
tests/replays/responses-*.toml."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

import responses
import sse
from channels import UNLIKELY, Arguments, Call, Channel, Compaction, Delta, Finish, Output, TokenLogprob
from event_log import encode_event
from helpers import laws
from helpers.laws import deltas, finishes, outputs, texts
from request import params
from responses import ENDINGS, GRAMMAR, KINDS, REASONING_EVENTS, Builder, Event, IllegalEvent, fold, label

BODY = {"model": "m", "input": "hi", "tools": [{"type": "function", "name": "f"}], "metadata": {"a": "b"}}
ECHO = params.from_responses(BODY, {}).echo
HEAD = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m"} | ECHO
NOW = 2


def builder() -> Builder:
    number = itertools.count(1)
    return Builder(HEAD, lambda prefix: f"{prefix}_{next(number)}")


def events_of(outputs: Sequence[Output | Compaction], finish: Finish) -> list[Event]:
    b = builder()
    return [*b.start(), *(event for output in outputs for event in b.feed(output)), *b.finish(finish, NOW)]


# --- laws ---------------------------------------------------------------------------------------------------


@given(outputs, finishes)
def test_shape_sum_order_and_status(outputs: list[Output], finish: Finish) -> None:
    """Laws 3, 4 and 5, and every event and body by the SDK's own models, strictly."""
    events = laws.on_the_wire(events_of(outputs, finish))
    laws.check_response(events)
    laws.check_body(json.loads(json.dumps(fold(events))))


@given(outputs, finishes)
def test_nothing_is_lost_or_added(outputs: list[Output], finish: Finish) -> None:
    """The items are those of the outputs, commentary being a message too."""
    said = [[KINDS[item[0]].item, *item[1:]] for item in laws.items(outputs)]
    assert list(map(shown, fold(events_of(outputs, finish))["output"])) == said
    namespaces = [output.namespace for output in outputs if isinstance(output, Call)]
    calls = [item for item in fold(events_of(outputs, finish))["output"] if "call_id" in item]
    assert [item.get("namespace", "") for item in calls] == namespaces


def shown(item: dict[str, Any]) -> list[str]:
    if "call_id" in item:
        return [item["type"], item["name"], item["input" if "input" in item else "arguments"]]
    return [item["type"], *(part.get("text") or part["refusal"] for part in item["content"])]


@given(outputs, finishes)
def test_the_sdk_adds_up_the_same(outputs: list[Output], finish: Finish) -> None:
    """The official client's accumulator raises where an id or an index is not the one announced."""
    state: ResponseStreamState[None] = ResponseStreamState(text_format=omit, input_tools=omit)
    texts = {}
    for event in laws.on_the_wire(events_of(outputs, finish)):
        for seen in state.handle_event(laws.STREAM_EVENT.validate_python(event)):
            if seen.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                texts[seen.output_index] = seen.snapshot
    output = fold(events_of(outputs, finish))["output"]
    said = {i: shown(item)[-1] for i, item in enumerate(output) if is_added_up(item)}
    assert texts == {i: text for i, text in said.items() if text}


def is_added_up(item: dict[str, Any]) -> bool:
    """The SDK adds up the text of messages and the arguments of functions."""
    return item["type"] == "function_call" or "output_text" in [p["type"] for p in item.get("content", [])]


def test_a_logprob_is_encoded_once() -> None:
    """The events that close an item said all logprobs four times, each time encoded anew: 1.7 s of 2,000
    tokens with 20 candidates. What is echoed of the request was encoded three times.
    """
    b = Builder(HEAD | {"instructions": "word " * 1000}, lambda prefix: f"{prefix}_1")
    logprob = TokenLogprob("a", -math.inf, b"a", (TokenLogprob("b", -1.5, b"b"),) * 20)
    events = [*b.start(), *b.feed(Delta("final", "aa", (logprob,) * 2)), *b.finish(Finish("stop"), NOW)]
    by_type = {event["type"]: event for event in events}
    delta, done = by_type["response.output_text.delta"], by_type["response.output_text.done"]
    assert list(map(id, done["logprobs"])) == list(map(id, delta["logprobs"]))
    parts = [
        by_type["response.content_part.done"]["part"],
        by_type["response.output_item.done"]["item"]["content"][0],
        by_type["response.completed"]["response"]["output"][0]["content"][0],
    ]
    assert len({tuple(map(id, part["logprobs"])) for part in parts}) == 1
    assert all(isinstance(logprob, sse.Encoded) for logprob in (*done["logprobs"], *parts[0]["logprobs"]))
    assert len({id(event["response"]["instructions"]) for event in events if "response" in event}) == 1
    (got,) = {json.loads(sse.dumps(part))["logprobs"][0]["logprob"] for part in parts}
    assert got == UNLIKELY


def test_a_first_logprob_that_cannot_be_encoded_opens_no_item() -> None:
    """Bug: the item was closed at the end, and had never been announced."""
    b = builder()
    b.start()
    with pytest.raises(ValueError, match="surrogate"):
        b.feed(Delta("final", "b", (TokenLogprob("\ud800", -1, b"b"),)))
    assert [event["type"] for event in b.finish(Finish("failed"), NOW)] == ["response.failed"]


@given(outputs, finishes)
def test_the_response_in_an_event_is_encoded_with_it(outputs: list[Output], finish: Finish) -> None:
    """Its bytes in the frame are those that GET answers with, and that the store keeps."""
    for number, event in enumerate(events_of(outputs, finish)):
        numbered = {"type": event["type"], "sequence_number": number} | event
        entry = encode_event(number, event)
        assert entry.frame == sse.encode(sse.dumps(numbered), event["type"])
        if "response" not in event:
            assert entry[1:] == ("", "")
            continue
        assert entry[1:] == (event["response"]["status"], sse.dumps(event["response"]))
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
    ended = laws.on_the_wire([*left, *second.finish(Finish("failed", message="interrupted"), NOW)])
    laws.check_response(ended)
    said = [item for item in fold(ended)["output"] if item.get("status") == "incomplete"]
    assert len(said) <= 1


@given(outputs, finishes, finishes, deltas | st.builds(Call, texts))
def test_nothing_follows_the_end(outputs: list[Output], finish: Finish, late: Finish, more: Output) -> None:
    """Law 5: a terminal status never changes, whatever still comes."""
    b = builder()
    said: list[list[Event]] = [b.start(), *map(b.feed, outputs), b.finish(finish, NOW)]
    assert said[-1][-1]["response"]["status"] == ENDINGS[finish.reason].status
    with pytest.raises(IllegalEvent):
        b.finish(late, NOW)
    with pytest.raises(IllegalEvent):
        b.feed(more)


def test_the_trace_is_what_happens() -> None:
    """The worked example in responses.py: the events that are made, and the state behind each."""
    source = Path(responses.__file__).read_text(encoding="utf-8")
    trace = re.findall(r"^#     .* (response\.[\w.]+(?: \w+)?) {2,}([\w ]+)$", source, re.MULTILINE)
    outputs: list[Output] = [Delta("final", "Hi"), Delta("final", "!"), Call("f"), Arguments("{}")]
    state, made = "start", []
    for event in events_of(outputs, Finish("stop")):
        state = GRAMMAR[state, label(event)]
        made.append((label(event), state))
    assert trace == made


# --- the tables ---------------------------------------------------------------------------------------------


@pytest.mark.bug("A15")
def test_every_event_of_the_grammar_is_made_and_is_one_of_the_sdk() -> None:
    """No event that the SDK does not know (A15), and no row that nothing reaches but those for `queued`."""
    used, state = set(), "start"
    outputs: list[Output | Compaction] = [Call("f"), Arguments("{}"), Call("g", custom=True), Arguments("x")]
    outputs.append(Compaction("sealed"))
    outputs += [Delta(channel, "a") for channel in get_args(Channel)]
    for event in events_of(outputs, Finish("stop")):
        used.add((state, label(event)))
        state = GRAMMAR[state, label(event)]
    queued = {row for row in GRAMMAR if "queued" in row[0] + row[1]}
    theirs = {row for row in GRAMMAR if row[1].startswith(REASONING_EVENTS["open-responses"] + ".")}
    assert GRAMMAR.keys() - used - queued - theirs == {
        ("between", "response.incomplete"),
        ("between", "response.failed"),
    }
    union = get_args(get_args(ResponseStreamEvent)[0])
    known = {name for model in union for name in get_args(model.model_fields["type"].annotation)}
    assert {event.split(" ")[0] for _, event in GRAMMAR.keys() - theirs} <= known


@given(outputs, finishes)
def test_reasoning_under_its_other_name(outputs: list[Output], finish: Finish) -> None:
    """`--reasoning-events open-responses`: the same stream but for two names, and never both of one."""
    number = itertools.count(1)
    b = Builder(HEAD, lambda prefix: f"{prefix}_{next(number)}", reasoning_events="open-responses")
    theirs = [*b.start(), *(event for output in outputs for event in b.feed(output)), *b.finish(finish, NOW)]
    ours = events_of(outputs, finish)
    assert [e | {"type": e["type"].replace("reasoning_text.", "reasoning.")} for e in ours] == theirs
