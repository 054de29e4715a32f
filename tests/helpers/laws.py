"""The five laws of a response, as checks that any test of a stream can call.

    1  however the bytes are cut, the events are the same                   test_sse.py
    2  however the tokens are grouped, what they say is the same            parse(), test_channels.py
    3  the deltas add up to the output of the terminal event                audit/events.py
    4  the events come in the order of responses.GRAMMAR, numbered from 0   audit/events.py
    5  a status only moves along, a terminal one never changes              audit/events.py

check_response() is laws 3, 4 and 5, which any server must keep, and what only ours must: the models of the
`openai` package, strictly, and no member that the rules do not know.
Nothing here uses responses.fold or its builder: what is judged does not judge.
"""

import asyncio
import json
import re
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any, get_args

import pydantic
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

import channels
import sse
from audit import recording, schema, stream
from audit.rules import RULES
from channels import Arguments, Call, Close, Delta, Finish, Output, Parser, Piece, TokenLogprob, Usage
from event_log import EventLog

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
        open_item = not isinstance(output, Close)
    return found


# --- what workers say ---------------------------------------------------------------------------------------

# Small: of large ones Hypothesis throws most away, and making them takes longer than what is tested.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
token = (
    st.sampled_from(["a", " b", "\ufffd", "水"]),
    st.sampled_from([-99.0, -0.25, 0.0]),
    st.binary(max_size=2),
)
tops = st.lists(st.builds(TokenLogprob, *token), max_size=2).map(tuple)
logprobs = st.just(()) | st.lists(st.builds(TokenLogprob, *token, tops), max_size=2).map(tuple)
deltas = st.builds(Delta, st.sampled_from(get_args(channels.Channel)), texts, logprobs)
names = st.builds(Call, texts, st.booleans(), st.just("") | texts, st.just({}))
arguments = st.lists(st.builds(Arguments, texts), max_size=3)
calls = st.tuples(names, arguments).map(lambda call: [call[0], *call[1]])
some = st.lists(deltas.map(lambda d: [d]) | calls | st.just([Close()]), max_size=6)
outputs = some.map(lambda runs: [output for run in runs for output in run])
usages = st.builds(Usage, *[st.integers(0, 9)] * 4)
reasons = st.sampled_from(["stop", "length", "failed", "cancelled"])
finishes = st.builds(Finish, reasons, st.none() | usages, texts, st.just("server_error"))

# --- the wire -----------------------------------------------------------------------------------------------


def on_the_wire(events: Iterable[Json]) -> list[Json]:
    """Events through the log and the SSE encoding and back, as a client gets them."""
    parser, got = sse.Parser(), []
    log = EventLog()
    log.extend(events)
    log.close()
    for frame in asyncio.run(read(log)):
        (event,) = parser.feed(frame)  # one frame an event
        got.append(json.loads(event.data))
        assert event.type == got[-1]["type"]
        assert sse.data(frame) == event.data  # what a WebSocket sends
    parser.close()
    return got


async def read(log: EventLog, after: int = -1) -> list[bytes]:
    async with aclosing(log.read(after)) as logged:
        return [frame async for frames in logged for frame in frames]


# --- shape --------------------------------------------------------------------------------------------------

# Every response object has them, whatever its status: github.com/openresponses/openresponses, zod schema.
RESPONSE_KEYS = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "error", "model"),
    *("previous_response_id", "instructions", "output", "tools", "tool_choice", "parallel_tool_calls"),
    *("truncation", "text", "temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs"),
    *("reasoning", "usage", "max_output_tokens", "max_tool_calls", "store", "background", "service_tier"),
    *("metadata", "safety_identifier", "prompt_cache_key"),
}

STREAM_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def check_shape(event: Json) -> None:
    """One event as it came off the wire."""
    STREAM_EVENT.validate_json(json.dumps(event), strict=True)
    check_names({*event} - {"sequence_number"}, "event", event["type"])
    for held in (event.get("item"), event.get("part")):
        if held:
            check_members(held)
    if "response" in event:
        check_body(event["response"])


def check_body(response: Json) -> None:
    """A response object, in an event or as the whole answer."""
    Response.model_validate_json(json.dumps(response), strict=True)
    assert response.keys() == RESPONSE_KEYS
    for item in response["output"]:
        check_members(item)


def check_members(part: Json) -> None:
    """Of our items and parts: some may go without a member, but ours do not; a call may have a namespace."""
    check_names({*part}, "item" if part["type"] in schema.ROWS["item"] else "part", part["type"])
    for inner in part.get("content", []):
        check_members(inner)


def check_names(names: set[str], kind: str, type_: str) -> None:
    """What must be there is there, and nothing that the table does not know."""
    row = schema.ROWS[kind][type_]
    required = {name for name in row if "?" not in name}
    assert {"type"} | required <= names <= {"type", *(name.removesuffix("?") for name in row)}


def check_chunks(chunks: list[Json]) -> None:
    """The chunks of a completion: what the SDK demands, the keys whose null means something, and the rules.

    Its type of a chunk knows calls of functions only; its type of a message knows custom ones, in the same
    form.
    """
    for chunk in chunks:
        known = re.sub('"type": "custom", "custom"', '"type": "function", "custom"', json.dumps(chunk))
        ChatCompletionChunk.model_validate_json(known, strict=True)
        for choice in chunk["choices"]:
            assert choice.keys() == {"index", "delta", "finish_reason", "logprobs"}
    check_rules(chunks, "one-completion", "chunk-fields", "role", "finish-reason", "call-deltas")


def check_completion(body: Json) -> None:
    ChatCompletion.model_validate_json(json.dumps(body), strict=True)


# --- laws 3 to 5 --------------------------------------------------------------------------------------------

OF_THE_WORKER = {"arguments", "markup", "usage"}  # what it says is not made here: any text, any counts


def check_response(events: list[Json]) -> None:
    """All that must hold of a whole stream, as a client got it."""
    for event in events:
        check_shape(event)
    check_rules(events, *(RULES.keys() - OF_THE_WORKER))
    last = events[-1]["response"]
    assert (last["completed_at"] is not None) == (last["status"] == "completed")


def check_rules(events: list[Json], *names: str) -> None:
    faults = recording.violations(stream.captured([*events]))
    assert [fault for fault in faults if fault.rule in names] == []


def check_order(events: list[Json]) -> None:
    """Laws 4 and 5 alone: of whatever the events tell."""
    check_rules(events, "order", "numbers", "nested-numbers", "terminal")
    check_rules(events, "status", "item-status", "snapshots", "one-response")
