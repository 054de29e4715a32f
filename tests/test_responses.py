"""Laws of responses.py over any outputs and any end. The documented bugs are in tests/replays/responses-*.toml."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

import laws
import params
from channels import Arguments, Call, Close, Delta, Finish, Output, TokenLogprob, Usage
from responses import ENDINGS, GRAMMAR, KINDS, Builder, Event, fold

BODY = {"model": "m", "input": "hi", "tools": [{"type": "function", "name": "f"}], "metadata": {"a": "b"}}
HEAD = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m"} | params.from_responses(BODY, {}).echo
NOW = 2


def builder() -> Builder:
    number = itertools.count(1)
    return Builder(HEAD, lambda prefix: f"{prefix}_{next(number)}")


def events_of(outputs: Sequence[Output], finish: Finish) -> list[Event]:
    b = builder()
    return [*b.start(), *(event for output in outputs for event in b.feed(output)), *b.finish(finish, NOW)]


# --- what workers say ---------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
tops = st.builds(TokenLogprob, texts, st.floats(-99, 0), st.binary(max_size=3))
logprobs = st.builds(TokenLogprob, texts, st.floats(-99, 0), st.binary(max_size=3), st.lists(tops, max_size=2).map(tuple))
deltas = st.builds(
    Delta, st.sampled_from(["analysis", "commentary", "final"]), texts, st.lists(logprobs, max_size=2).map(tuple)
)
calls = st.tuples(st.builds(Call, texts), st.lists(st.builds(Arguments, texts), max_size=3)).map(
    lambda call: [call[0], *call[1]]
)
outputs = st.lists(deltas.map(lambda d: [d]) | calls | st.just([Close()]), max_size=8).map(
    lambda runs: [output for run in runs for output in run]
)
usages = st.builds(Usage, *[st.integers(0, 9)] * 4)
finishes = st.builds(
    Finish,
    st.sampled_from(["stop", "length", "failed", "cancelled"]),
    st.none() | usages,
    texts,
    st.just("server_error"),
)

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
    said = [["message" if item[0] in ("final", "commentary") else item[0], *item[1:]] for item in laws.items(outputs)]
    output = fold(events_of(outputs, finish))["output"]
    assert [shown(item) for item in output] == [["reasoning", *s[1:]] if s[0] == "analysis" else s for s in said]


def shown(item: dict[str, Any]) -> list[str]:
    if item["type"] == "function_call":
        return ["call", item["name"], item["arguments"]]
    return [item["type"], "".join(part["text"] for part in item["content"])]


@given(outputs, finishes)
def test_the_sdk_adds_up_the_same(outputs: list[Output], finish: Finish) -> None:
    """The official client's accumulator: it raises where an id or an index is not the one that was announced."""
    state: ResponseStreamState[None] = ResponseStreamState(text_format=omit, input_tools=omit)
    texts = {}
    for event in laws.on_the_wire(events_of(outputs, finish)):
        for seen in state.handle_event(laws.STREAM_EVENT.validate_python(event)):
            if seen.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                texts[seen.output_index] = seen.snapshot
    output = fold(events_of(outputs, finish))["output"]
    assert texts == {i: s[-1] for i, s in enumerate(map(shown, output)) if s[0] != "reasoning" and s[-1]}


@given(outputs, finishes)
def test_an_event_never_changes_once_it_is_made(outputs: list[Output], finish: Finish) -> None:
    """C-rule 5: encoded at birth or at the end of the response, it is the same."""
    b = builder()
    at_birth, kept = [], []
    feeds = [b.start, *(lambda o=o: b.feed(o) for o in outputs), lambda: b.finish(finish, NOW)]  # type: ignore[misc]
    for make in feeds:
        events = make()
        at_birth += [json.dumps(event) for event in events]
        kept += events
    assert [json.dumps(event) for event in kept] == at_birth


@given(outputs, finishes, finishes, deltas | st.builds(Call, texts))
def test_nothing_follows_the_end(outputs: list[Output], finish: Finish, late: Finish, more: Output) -> None:
    """Law 5: a terminal status never changes, whatever still comes."""
    b = builder()
    for _ in (b.start(), *map(b.feed, outputs), b.finish(finish, NOW)):
        pass
    status = b.status
    assert status == ENDINGS[finish.reason][0]
    with pytest.raises(KeyError):
        b.finish(late, NOW)
    with pytest.raises(KeyError):
        b.feed(more)
    assert b.status == status


def test_statuses_move_along() -> None:
    b = builder()
    seen = [b.status]
    for step in (b.start, lambda: b.feed(Delta("final", "a")), lambda: b.finish(Finish("stop"), NOW)):
        step()
        seen.append(b.status)
    assert seen == ["in_progress", "in_progress", "in_progress", "completed"]


# --- the tables ---------------------------------------------------------------------------------------------


def test_every_event_of_the_grammar_is_made_and_is_one_of_the_sdk() -> None:
    """No event that the SDK does not know (A15), and no row that nothing reaches but those for `queued`."""
    used, state = set(), "start"
    b = builder()
    said = [Delta("analysis", "a"), Call("f"), Arguments("{}"), Delta("final", "b")]
    for event in [*b.start(), *(e for o in said for e in b.feed(o)), *b.finish(Finish("stop"), NOW)]:
        used.add((state, laws.label(event)))
        state = GRAMMAR[state, laws.label(event)]
    rest = {event for state, event in GRAMMAR.keys() - used if "queued" not in (state, event.split(".")[-1])}
    assert rest == {"response.incomplete", "response.failed"}
    known = {literal for model in ResponseStreamEvent.__origin__.__args__ for literal in model.model_fields["type"].annotation.__args__}
    assert {event.split(" ")[0] for _, event in GRAMMAR} <= known


def test_every_channel_has_a_kind() -> None:
    assert KINDS.keys() == {"analysis", "commentary", "final", "call"}
