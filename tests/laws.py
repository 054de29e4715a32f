"""The five laws of a response, as checks that any test of a stream can call.

    1  however the bytes are cut, the events are the same                   test_sse.py
    2  however the tokens are grouped, what they say is the same            parse(), test_channels.py
    3  the deltas add up to the output of the terminal event                added_up()
    4  the events come in the order of responses.GRAMMAR, numbered from 0   check_order()
    5  a status only moves along, a terminal one never changes              check_statuses()

check_response() is laws 3, 4 and 5, and the shape of every event: the table below, and the models of the
`openai` package.
Nothing here uses responses.fold or its builder: what is judged does not judge.
"""

import asyncio
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from typing import Any, get_args

import pydantic
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

import api
import sse
from background import EventLog
from channels import (
    Arguments,
    Call,
    Channel,
    Close,
    Delta,
    Finish,
    Output,
    Parser,
    Piece,
    TokenLogprob,
    Usage,
)
from responses import GRAMMAR, label

Json = dict[str, Any]

# --- law 2: what outputs say --------------------------------------------------------------------------------


def parse(pieces: Iterable[Piece], parser: Parser, cut: bool = False) -> list[list[str]]:
    """The items that a parser finds."""
    outputs = [output for piece in pieces for output in parser.feed(piece)]
    return items([*outputs, *parser.close(cut)])


def items(outputs: Iterable[Output]) -> list[list[str]]:
    """[channel, text] and ["call" or "custom", name, arguments]: what outputs say, however they were cut."""
    found: list[list[str]] = []
    open_item = False
    for output in outputs:
        match output:
            case Delta(channel, text, _):
                if not open_item or found[-1][0] != channel:
                    found.append([channel, ""])
                found[-1][1] += text
            case Call(name, custom):
                found.append(["custom" if custom else "call", name, ""])
            case Arguments(text):
                assert open_item
                assert found[-1][0] in ("call", "custom")
                found[-1][2] += text
        open_item = output != Close()
    return found


# --- what workers say ---------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
tops = st.builds(TokenLogprob, texts, st.floats(-99, 0), st.binary(max_size=3))
logprobs = st.builds(
    TokenLogprob, texts, st.floats(-99, 0), st.binary(max_size=3), st.lists(tops, max_size=2).map(tuple)
)
deltas = st.builds(
    Delta,
    st.sampled_from(get_args(Channel)),
    texts,
    st.lists(logprobs, max_size=2).map(tuple),
)
names = st.builds(Call, texts, st.booleans(), st.just("") | texts)
calls = st.tuples(names, st.lists(st.builds(Arguments, texts), max_size=3)).map(
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

# --- the wire -----------------------------------------------------------------------------------------------


def on_the_wire(events: Iterable[Json]) -> list[Json]:
    """Events through the log and the SSE encoding and back, as a client gets them."""
    parser, got = sse.Parser(), []
    log = EventLog(api.encode_event)
    log.extend(events)
    log.close()
    for frame in asyncio.run(read(log)):
        (event,) = parser.feed(frame)  # one frame an event
        got.append(json.loads(event.data))
        assert event.type == got[-1]["type"]
    parser.close()
    return got


async def read(log: EventLog) -> list[bytes]:
    async with aclosing(log.read()) as frames:
        return [frame async for frame in frames]


# --- shape --------------------------------------------------------------------------------------------------

# fmt: off
#  event                                 what it holds besides type and sequence_number: no less, and no more
FIELDS = {
    "created":                           {"response"},
    "queued":                            {"response"},
    "in_progress":                       {"response"},
    "completed":                         {"response"},
    "incomplete":                        {"response"},
    "failed":                            {"response"},
    "output_item.added":                 {"output_index", "item"},
    "output_item.done":                  {"output_index", "item"},
    "content_part.added":                {"item_id", "output_index", "content_index", "part"},
    "content_part.done":                 {"item_id", "output_index", "content_index", "part"},
    "output_text.delta":                 {"item_id", "output_index", "content_index", "delta", "logprobs"},
    "output_text.done":                  {"item_id", "output_index", "content_index", "text", "logprobs"},
    "reasoning_text.delta":              {"item_id", "output_index", "content_index", "delta"},
    "reasoning_text.done":               {"item_id", "output_index", "content_index", "text"},
    "refusal.delta":                     {"item_id", "output_index", "content_index", "delta"},
    "refusal.done":                      {"item_id", "output_index", "content_index", "refusal"},
    "function_call_arguments.delta":     {"item_id", "output_index", "delta"},
    "function_call_arguments.done":      {"item_id", "output_index", "name", "arguments"},
    "custom_tool_call_input.delta":      {"item_id", "output_index", "delta"},
    "custom_tool_call_input.done":       {"item_id", "output_index", "input"},
}

#  item or part                          of a call, there may be its namespace too
MEMBERS = {
    "message":                           {"id", "type", "status", "role", "content"},
    "reasoning":                         {"id", "type", "status", "summary", "content"},
    "function_call":                     {"id", "type", "status", "call_id", "name", "arguments"},
    "custom_tool_call":                  {"id", "type", "status", "call_id", "name", "input"},
    "output_text":                       {"type", "text", "annotations", "logprobs"},
    "refusal":                           {"type", "refusal"},
    "reasoning_text":                    {"type", "text"},
}
# fmt: on

# Every response object has them, whatever its status: github.com/openresponses/openresponses, zod schema.
RESPONSE_KEYS = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "error", "model"),
    *("previous_response_id", "instructions", "output", "tools", "tool_choice", "parallel_tool_calls"),
    *("truncation", "text", "temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs"),
    *("reasoning", "usage", "max_output_tokens", "max_tool_calls", "store", "background", "service_tier"),
    *("metadata", "safety_identifier", "prompt_cache_key"),
}
assert len(RESPONSE_KEYS) == 31

STREAM_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def check_shape(event: Json) -> None:
    """One event as it came off the wire."""
    STREAM_EVENT.validate_json(json.dumps(event), strict=True)
    fields = FIELDS[event["type"].removeprefix("response.")]
    assert event.keys() == fields | {"type", "sequence_number"}, event
    for part in parts(event):
        check_members(part)
    if "response" in event:
        check_body(event["response"])


def check_body(response: Json) -> None:
    """A response object, in an event or as the whole answer."""
    Response.model_validate_json(json.dumps(response), strict=True)
    assert response.keys() == RESPONSE_KEYS
    for item in response["output"]:
        for part in [item, *item.get("content", [])]:
            check_members(part)


def check_members(part: Json) -> None:
    optional = {"namespace"} if part["type"].endswith("_call") else set()
    assert part.keys() - optional == MEMBERS[part["type"]], part


def parts(event: Json) -> Iterator[Json]:
    """The item or part that an event holds, and the parts of that item."""
    for held in (event.get("item"), event.get("part")):
        if held:
            yield held
            yield from held.get("content", [])


def check_chunk(chunk: Json) -> None:
    """A chat completion chunk: what the SDK demands, and the keys whose null means something.

    Its type of a chunk knows calls of functions only; its type of a message knows custom ones, in the same
    form.
    """
    known = re.sub('"type": "custom", "custom"', '"type": "function", "custom"', json.dumps(chunk))
    ChatCompletionChunk.model_validate_json(known, strict=True)
    for choice in chunk["choices"]:
        assert choice.keys() == {"index", "delta", "finish_reason", "logprobs"}


def check_completion(body: Json) -> None:
    ChatCompletion.model_validate_json(json.dumps(body), strict=True)


# --- law 3: the sum of the deltas ---------------------------------------------------------------------------


def added_up(events: Iterable[Json]) -> list[Json]:
    """The output that the deltas amount to; what a done event repeats must be that, as far as it has come."""
    output: list[Json] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
        elif "output_index" in event:
            item = output[event["output_index"]]
            assert item is output[-1]
            assert item["id"] == event.get("item_id", item["id"])
            add(event, kind, item)
    return output


# fmt: off
#  events                      where the item or its part holds what they add to
ADDED_TO = {
    "output_text":             "text",
    "reasoning_text":          "text",
    "refusal":                 "refusal",
    "function_call_arguments": "arguments",
    "custom_tool_call_input":  "input",
}
# fmt: on


def add(event: Json, kind: str, item: Json) -> None:
    what, _, step = kind.rpartition(".")
    if kind == "content_part.added":
        assert event["content_index"] == len(item["content"])
        item["content"].append(event["part"])
        return
    held = item["content"][event["content_index"]] if "content_index" in event else item
    match what, step:
        case "content_part", "done":
            assert held == without_bytes(event["part"])
        case "output_item", "done":
            item["status"] = event["item"]["status"]
            assert item == without_bytes(event["item"])
        case _, "delta":
            held[ADDED_TO[what]] += event["delta"]
            if "logprobs" in event:
                held["logprobs"] += event["logprobs"]
        case _, "done":
            assert ADDED_TO[what] in event
            repeated = event.keys() & held.keys() - {"type"}
            assert {name: event[name] for name in repeated} == {name: held[name] for name in repeated}
        case _:
            raise AssertionError(f"expected an event that adds to an item, got {kind}")


def without_bytes(value: Any) -> Any:
    """Parts list the bytes of a token, events do not: the SDK's types have it so."""
    if isinstance(value, list):
        return [without_bytes(v) for v in value]
    if isinstance(value, dict):
        return {k: without_bytes(v) for k, v in value.items() if k != "bytes"}
    return value


# --- laws 4 and 5 -------------------------------------------------------------------------------------------


def check_order(events: list[Json]) -> None:
    state = "start"
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        assert json.dumps(event).count('"sequence_number"') == 1, "none below the top level"
        assert (state, label(event)) in GRAMMAR, f"{label(event)} in state {state}"
        state = GRAMMAR[state, label(event)]
    assert state == "end"


# fmt: off
#  status           those that may follow
STATUSES = {
    "queued":       {"queued", "in_progress", "failed", "cancelled"},
    "in_progress":  {"in_progress", "completed", "incomplete", "failed", "cancelled"},
}
TERMINAL = {
    "completed":    "response.completed",
    "incomplete":   "response.incomplete",
    "failed":       "response.failed",
    "cancelled":    "response.failed",   # no event is named after it
}
# fmt: on


def check_statuses(events: list[Json]) -> None:
    snapshots = [event["response"] for event in events if "response" in event]
    for before, after in itertools.pairwise(snapshots):
        assert after["status"] in STATUSES[before["status"]]
        changing = {"status", "output", "usage", "completed_at", "error", "incomplete_details"}
        assert {k: v for k, v in before.items() if k not in changing}.items() <= after.items()
        assert before["output"] == []
        assert before["usage"] is None
    last = snapshots[-1]
    assert last is events[-1]["response"]
    assert events[-1]["type"] == TERMINAL[last["status"]]
    assert (last["error"] is not None) == (last["status"] == "failed")
    assert (last["incomplete_details"] is not None) == (last["status"] == "incomplete")
    assert (last["completed_at"] is not None) == (last["status"] == "completed")
    cut = last["status"] != "completed"  # then the last item is, and no other
    for i, item in enumerate(last["output"]):
        allowed = {"completed", "incomplete"} if cut and i == len(last["output"]) - 1 else {"completed"}
        assert item["status"] in allowed


def check_response(events: list[Json]) -> None:
    """All that must hold of a whole stream, as a client got it."""
    for event in events:
        check_shape(event)
    check_order(events)
    check_statuses(events)
    assert added_up(json.loads(json.dumps(events))) == without_bytes(events[-1]["response"]["output"])
