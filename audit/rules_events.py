"""Rules on the events of a Responses stream: what they hold, their order, their ids, indices and sums.

    Capture --rule--> (number of an event, what is wrong with it), ...

Authority: https://platform.openai.com/docs/api-reference/responses-streaming

Rules of this file:
1. A rule is one pass over the events, and remembers no more than it needs to judge the next.

Not here: bytes (rules_framing.py), chat completions (rules_chunks.py), the list of all rules (rules.py).
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from audit.contents import is_object, markup, usage_faults
from audit.members import EVENTS, ITEMS, PARTS, RESPONSE, Faults, Json, Members, missing, paired, shortened
from audit.order import AFTER, ORDER, expected_in, is_steering, label
from audit.recordings import Capture

# fmt: off
#  event                    the statuses that its response may have; no event is named after a cancel
STATUSES = {
    "response.created":     {"in_progress"},  # in the background: or queued
    "response.queued":      {"queued"},
    "response.in_progress": {"in_progress"},
    "response.completed":   {"completed"},
    "response.incomplete":  {"incomplete"},
    "response.failed":      {"failed", "cancelled"},
}
TERMINAL = {"response.completed", "response.incomplete", "response.failed"}

#  member of a response     the one status with which it is not null
ONLY_WITH = {
    "error":                "failed",
    "incomplete_details":   "incomplete",
    "completed_at":         "completed",
}

#  a done event                               the member in which it says all deltas once more
REPEATS = {
    "response.output_text.done":              "text",
    "response.refusal.done":                  "refusal",
    "response.reasoning_text.done":           "text",
    "response.reasoning.done":                "text",
    "response.reasoning_summary_text.done":   "text",
    "response.function_call_arguments.done":  "arguments",
    "response.custom_tool_call_input.done":   "input",
    "response.content_part.done":             "part",
    "response.reasoning_summary_part.done":   "part",
}
# fmt: on

CONTENT = ("content", "summary", "text", "refusal", "arguments", "input")  # of an item or a part
# Members of a response that change with it; the tier is one that the server may choose as late as the end,
# and whether the response is stored is known when it is, or could not be.
CHANGING = {
    *("status", "output", "usage", "error", "incomplete_details", "completed_at", "service_tier", "store"),
}


# --- what events hold ---------------------------------------------------------------------------------------


def known_types(capture: Capture) -> Faults:
    for number, event in enumerate(capture.events):
        if event and not is_known(event):
            yield number, f"expected a type of event that the API has, got {event.get('type')!r}"


def is_known(event: Json) -> bool:
    """Whether the API has events of its type."""
    return event.get("type") in EVENTS or label(event) == "response.*"


def required_members(capture: Capture) -> Faults:
    for number, event, raw in capture.typed_and_raw():
        event_type = event.get("type", "an event")
        yield from missing(number, event_type, event, raw, EVENTS.get(event_type, {}))
        for inner, raw_inner in items_and_parts(event, raw):
            inner_type = inner.get("type", "")
            members: Members = {"type": str} | (ITEMS | PARTS).get(inner_type, {})
            yield from missing(number, inner_type or "an item or part", inner, raw_inner, members)
        if "response" in event:  # compared as it came, for a null is an answer too
            yield from missing(number, "a response", raw["response"], raw["response"], RESPONSE)


def items_and_parts(event: Json, raw: Json) -> Iterator[tuple[Json, Json]]:
    """Items and parts, wherever they stand in an event: each typed and as it came."""
    items = [(event["item"], raw["item"])] if "item" in event else []
    if "response" in event:
        items += paired(event["response"], raw["response"], "output")
    parts = [(event["part"], raw["part"])] if "part" in event else []
    for item, raw_item in items:
        parts += paired(item, raw_item, "content") + paired(item, raw_item, "summary")
    yield from items + parts


def numbered(capture: Capture) -> Faults:
    expected = 0
    for number, event in enumerate(capture.events):
        got = event.get("sequence_number", expected)
        if "sequence_number" not in event:
            if not is_known(event):
                continue
            yield number, "expected a sequence_number, got none"
        elif got != expected:
            yield number, f"expected sequence_number {expected}, got {got}"
        expected = got + 1


def no_nested_numbers(capture: Capture) -> Faults:
    for number, event in enumerate(capture.raw):
        outer = {name: value for name, value in event.items() if name != "sequence_number"}
        if '"sequence_number":' in json.dumps(outer):
            yield number, "expected no sequence_number but that of the event"


def no_markup(capture: Capture) -> Faults:
    for number, event in enumerate(capture.events):
        if event.get("type") not in REPEATS:
            continue
        texts = [str(event.get(member, "")) for member in ("text", "arguments", "name", "refusal")]
        if marker := markup("".join(texts)):
            yield number, f"expected text without markup of the model's, got {marker}"


def arguments_are_objects(capture: Capture) -> Faults:
    for number, event in enumerate(capture.events):
        item = event.get("item", {})
        if (item.get("type"), item.get("status")) != ("function_call", "completed"):
            continue
        arguments = item.get("arguments", "")
        if not is_object(arguments):
            message = "expected the arguments of a completed call to be a JSON object"
            yield number, f"{message}, got {shortened(arguments)!r}"


# --- their order --------------------------------------------------------------------------------------------


def in_order(capture: Capture) -> Faults:
    state = "start"
    for number, event in enumerate(capture.events):
        if state == "end":
            return
        if is_steering(event):
            continue
        event_label = label(event)
        if event_label not in AFTER and event.get("type") not in EVENTS:
            continue
        if (state, event_label) not in ORDER:
            yield number, f"expected {expected_in(state)}, got {event_label}"
        state = ORDER.get((state, event_label)) or AFTER.get(event_label, state)


def one_terminal(capture: Capture) -> Faults:
    last = max((n for n, event in enumerate(capture.events) if not is_steering(event)), default=0)
    ends = [number for number, event in enumerate(capture.events) if event.get("type") in TERMINAL]
    if not ends:
        yield last, f"expected {' or '.join(sorted(TERMINAL))}, got the end of the stream"
    elif ends[0] < last:
        yield ends[0] + 1, "expected nothing behind the terminal event"


def true_status(capture: Capture) -> Faults:
    for number, event, response in snapshots(capture):
        status = response.get("status")
        allowed = STATUSES[event["type"]]
        if event["type"] == "response.created" and response.get("background") is True:
            allowed = {"queued", "in_progress"}
        if status not in allowed:
            expected = " or ".join(sorted(allowed))
            yield number, f"expected {event['type']} around status {expected}, got {status}"
        for member, only_status in ONLY_WITH.items():
            value = response.get(member)
            is_null = member in response and value is None
            if value is not None and status != only_status:
                yield number, f"expected {member} only if the status is {only_status}, got it with {status}"
            elif is_null and status == only_status != "completed":  # completed_at may stay null
                yield number, f"expected {member} if the status is {only_status}, got null"


def snapshots(capture: Capture) -> Iterator[tuple[int, Json, Json]]:
    """(number of the event, the event, its response), the response with its members that are null."""
    for number, event, raw in capture.typed_and_raw():
        if "response" in event and event.get("type") in STATUSES:
            nulls = {member: None for member, value in raw["response"].items() if value is None}
            yield number, event, nulls | event["response"]


def empty_until_the_end(capture: Capture) -> Faults:
    for number, event, response in snapshots(capture):
        is_empty = not response.get("output") and not response.get("usage")
        if event["type"] not in TERMINAL and not is_empty:
            yield number, "expected output [] and usage null before the terminal event"


def one_response(capture: Capture) -> Faults:
    first: Json = {}
    for number, event in enumerate(capture.raw):
        response = event.get("response")
        if not isinstance(response, dict):
            continue
        first = first or response
        for member in first.keys() - CHANGING:
            if response.get(member, first[member]) != first[member]:
                expected = shortened(json.dumps(first[member]))
                got = shortened(json.dumps(response[member]))
                yield number, f"expected {member} to stay {expected}, got {got}"


def closed_items(capture: Capture) -> Faults:
    for number, event, response in snapshots(capture):
        if event["type"] not in TERMINAL:
            continue
        statuses = [item["status"] for item in response.get("output", ()) if "status" in item]
        if response.get("status") != "completed" and statuses[-1:] == ["incomplete"]:
            statuses.pop()  # the item that was cut
        for status in {*statuses} - {"completed"}:
            message = "expected items to be completed, but for the last one of a cut response"
            yield number, f"{message}, got {status}"


def counted(capture: Capture) -> Faults:
    for number, event, response in snapshots(capture):
        if event["type"] in ("response.completed", "response.incomplete"):
            yield from usage_faults(number, response.get("usage"), "input", "output")


# --- ids, indices, sums -------------------------------------------------------------------------------------


def one_id_an_item(capture: Capture) -> Faults:
    announced: dict[int, Json] = {}  # output_index -> the item as it was announced
    for number, event in enumerate(capture.events):
        item: Json = event.get("item", {})
        index: int = event.get("output_index", -1)
        event_type = event.get("type")
        if event_type == "response.output_item.added":
            if "id" in item and item["id"] in [other.get("id") for other in announced.values()]:
                yield number, f"expected an id that no other item has, got {item['id']!r}"
            announced[index] = item
        elif event_type == "response.output_item.done":
            yield from same_ids(number, announced.get(index, {}), item)
        elif event_type in TERMINAL:
            for place, output_item in enumerate(event.get("response", {}).get("output", ())):
                yield from same_ids(number, announced.get(place, {}), output_item)
        elif "item_id" in event:
            yield from same_ids(number, announced.get(index, {}), {"id": event["item_id"]})


def same_ids(number: int, announced: Json, item: Json) -> Faults:
    for member in ("id", "call_id"):
        expected = announced.get(member)
        if member in announced and item.get(member, expected) != expected:
            yield number, f"expected {member} {expected!r} as announced, got {item[member]!r}"


def indices(capture: Capture) -> Faults:
    n_items = 0
    n_parts = {"content_index": 0, "summary_index": 0}  # of the last item
    for number, event in enumerate(capture.events):
        event_type = event.get("type", "")
        if event_type == "response.output_item.added":
            n_items += 1
            n_parts = dict.fromkeys(n_parts, 0)
        for index in n_parts:
            if index in event and event_type.endswith("_part.added"):
                n_parts[index] += 1
            yield from at_index(number, event, index, n_parts[index] - 1)
        yield from at_index(number, event, "output_index", n_items - 1)


def at_index(number: int, event: Json, index: str, expected: int) -> Faults:
    if index in event and expected >= 0 and event[index] != expected:
        yield number, f"expected {index} {expected}, got {event[index]}"


def announced_empty(capture: Capture) -> Faults:
    for number, event in enumerate(capture.events):
        if not str(event.get("type")).endswith(".added"):
            continue
        announced: Json = event.get("item") or event.get("part") or {}
        full = [member for member in CONTENT if announced.get(member)]
        status = announced.get("status", "in_progress")
        if full:
            yield number, f"expected what is announced to be empty, got {full[0]}"
        elif status != "in_progress":
            yield number, f"expected what is announced to be in_progress, got {status}"


def annotations_counted(capture: Capture) -> Faults:
    announced: list[Any] = []  # annotations of the part that is open
    for number, event, raw in capture.typed_and_raw():
        event_type = event.get("type")
        if event_type == "response.content_part.added":
            announced = []
        elif event_type == "response.output_text.annotation.added":
            yield from at_index(number, event, "annotation_index", len(announced))
            announced.append(raw.get("annotation"))
        elif (
            event_type == "response.content_part.done" and event.get("part", {}).get("type") == "output_text"
        ):
            annotations = raw["part"].get("annotations")
            if without_nulls(annotations or []) != without_nulls(announced):
                got = shortened(json.dumps(annotations))
                yield number, f"expected the {len(announced)} annotations that were announced, got {got}"


def sums(capture: Capture) -> Faults:
    """The fold law: deltas add up to what done events say, and those to the terminal event's output."""
    text = ""  # of the item or part that is open, as its deltas add up
    logprobs: list[Any] = []
    parts: list[Json] = []  # of the item that is open, as its parts were done
    items: list[Any] = []  # of the response, as they were done
    for number, event, raw in capture.typed_and_raw():
        event_type = event.get("type", "")
        if event_type.endswith(".delta"):
            text += event.get("delta", "")
            logprobs += event.get("logprobs", ())
        elif event_type in REPEATS:
            yield from repeats_deltas(number, event, REPEATS[event_type], text, logprobs)
            if "part" in event:
                parts.append(raw["part"])
        elif event_type == "response.output_item.done":
            yield from repeats_parts(number, event.get("item", {}), raw.get("item"), text, parts)
            items.append(raw.get("item"))
        elif event_type in TERMINAL and "output" in event.get("response", {}):
            yield from repeats_items(number, raw["response"]["output"], items)
        if event_type.endswith(("_item.added", "_part.added", "_item.done")):
            text = ""
            logprobs = []
            if "item" in event:
                parts = []


def repeats_deltas(number: int, event: Json, member: str, text: str, logprobs: list[Any]) -> Faults:
    repeated = event.get(member, text)
    if isinstance(repeated, dict):  # a part
        repeated = repeated.get("text", repeated.get("refusal", text))
    if repeated != text:
        yield number, f"the deltas add up to {shortened(text)!r}, the event says {shortened(repeated)!r}"
    repeated_logprobs = event.get("part", event).get("logprobs", logprobs)
    if without_bytes(repeated_logprobs) != without_bytes(logprobs):
        yield number, "the logprobs of the deltas are not those that the event says"


def repeats_parts(number: int, item: Json, raw: Any, text: str, parts: list[Json]) -> Faults:
    if item.get("type") in ("function_call", "custom_tool_call"):
        expected = [text]
        got = [str(item.get("arguments", item.get("input", text)))]
    elif parts and item.get("type") in ("message", "reasoning"):  # without parts the rule order is broken
        raw_parts = [part for member in ("content", "summary") for _, part in paired(item, raw, member)]
        expected = sorted(
            map(json.dumps, without_nulls(parts))
        )  # whichever of summary and content came first
        got = sorted(map(json.dumps, without_nulls(raw_parts)))
    else:
        return
    if got != expected:
        yield number, f"the events before say {shortened(str(expected))}, the item {shortened(str(got))}"


def repeats_items(number: int, output: list[Any], items: list[Any]) -> Faults:
    output = without_nulls(output)
    items = without_nulls(items)
    if output != items:
        pairs = zip(output, items, strict=False)
        n_equal = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        message = f"{len(items)} items were done, the response has {len(output)}"
        yield number, f"{message}; the first {n_equal} are equal"


def without_nulls(value: Any) -> Any:
    """What is null and what is absent mean the same."""
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    if isinstance(value, dict):
        return {name: without_nulls(member) for name, member in value.items() if member is not None}
    return value


def without_bytes(value: Any) -> Any:
    """Logprobs without the bytes of each token: parts list them, events do not (openai.types.responses)."""
    if isinstance(value, list):
        return [without_bytes(entry) for entry in value]
    if isinstance(value, dict):
        return {name: without_bytes(member) for name, member in value.items() if name != "bytes"}
    return value
