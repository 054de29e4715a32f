"""Rules on the events of a Responses stream: what they hold, their order, their ids, indices and sums.

    Capture --rule--> (number of an event, what is wrong with it), ...

Authority: https://platform.openai.com/docs/api-reference/responses-streaming

Not here: bytes (framing.py), chat completions (chunks.py), the list of all rules (rules.py).
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from audit.recordings import Capture, Json
from audit.shapes import (
    AFTER,
    CHANGING,
    CONTENT,
    FIELDS,
    HOSTED,
    MARKUP,
    MEMBERS,
    MORE,
    ONLY_WITH,
    ORDER,
    RESPONSE,
    STATUSES,
    TERMINAL,
    WHOLE,
    Found,
    shortened,
)
from responses import GRAMMAR

# --- events: what they hold ---------------------------------------------------------------------------------


def known_types(c: Capture) -> Found:
    for n, event in enumerate(c.events):
        if (type_ := event.get("type")) not in FIELDS and label(event) != "response.*" and event:
            yield n, f"expected a type of event that the API has, got {type_!r}"


def required_fields(c: Capture) -> Found:
    for n, (event, raw) in enumerate(zip(c.events, c.raw, strict=True)):
        type_ = event.get("type", "an event")
        yield from missing(n, type_, event, raw, FIELDS.get(type_, ""))
        for held, its_raw in holdings(event, raw):
            kind = held.get("type", "")
            yield from missing(n, kind or "an item or part", held, its_raw, "type " + MEMBERS.get(kind, ""))
        if "response" in event:  # null is something to say
            yield from missing(n, "a response", raw["response"], raw["response"], RESPONSE)


def holdings(event: Json, raw: Json) -> Iterator[tuple[Json, Json]]:
    """Items and parts, wherever they stand in an event: typed, and as they came."""
    items = [(event["item"], raw["item"])] if "item" in event else []
    if "response" in event:
        items += paired(event["response"], raw["response"], "output")
    parts = [(event["part"], raw["part"])] if "part" in event else []
    for item, its_raw in items:
        parts += paired(item, its_raw, "content") + paired(item, its_raw, "summary")
    yield from items + parts


def paired(holder: Json, raw: Json, member: str) -> list[tuple[Json, Json]]:
    """The objects of a list: typed, and as they came."""
    objects = [value for value in raw[member] if isinstance(value, dict)] if member in holder else []
    return list(zip(holder.get(member, ()), objects, strict=True))


def missing(n: int, what: str, holder: Json, raw: Json, names: str) -> Found:
    for wanted in names.split():
        if wanted not in raw:
            yield n, f"{what} lacks {wanted}"
        elif wanted not in holder:
            yield n, f"{what} has {wanted} of another type: {shortened(json.dumps(raw[wanted]))}"


def numbered(c: Capture) -> Found:
    expected = 0
    for n, event in enumerate(c.events):
        got = event.get("sequence_number")
        if got is None:
            yield n, "expected a sequence_number, got none"
        elif got != expected:
            yield n, f"expected sequence_number {expected}, got {got}"
        expected = (expected if got is None else got) + 1


def no_nested_numbers(c: Capture) -> Found:
    for n, event in enumerate(c.raw):
        if json.dumps(event).count('"sequence_number":') > ("sequence_number" in event):
            yield n, "expected no sequence_number but that of the event"


def no_markup(c: Capture) -> Found:
    for n, event in enumerate(c.events):
        said = "".join(str(event.get(member, "")) for member in ("text", "arguments", "name", "refusal"))
        if found := MARKUP.search(said if event.get("type") in WHOLE else ""):
            yield n, f"expected text without markup of the model's, got {found[0]}"


def arguments_are_json(c: Capture) -> Found:
    for n, event in enumerate(c.events):
        item = event.get("item", {})
        if (item.get("type"), item.get("status")) == ("function_call", "completed"):
            text = item.get("arguments", "")
            if text and not is_json(text):
                yield n, f"expected the arguments of a completed call to be JSON, got {shortened(text)!r}"


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


# --- events: their order ------------------------------------------------------------------------------------


def label(event: Json) -> str:
    """Under which ORDER knows an event: its type, and that of the item or part that it opens or ends."""
    type_ = str(event.get("type"))
    if type_.removeprefix("response.").startswith(HOSTED):
        return "response.*"
    inner = event.get("item") or event.get("part")
    kind = inner.get("type", "") if inner else ""
    if type_.startswith("response.output_item.") and kind.startswith(HOSTED):
        kind = "*"
    return f"{type_} {kind}" if inner else type_


def in_order(c: Capture) -> Found:
    state = "start"
    for n, event in enumerate(c.events):
        if state == "end":
            return
        if (got := label(event)) not in AFTER and event.get("type") not in FIELDS:
            continue
        if (state, got) not in ORDER:
            legal = " or ".join(event for s, event in GRAMMAR | MORE if s == state)
            yield n, f"expected {legal}, got {got}"
        state = ORDER.get((state, got)) or AFTER.get(got, state)


def one_terminal(c: Capture) -> Found:
    ends = [n for n, event in enumerate(c.events) if event.get("type") in TERMINAL]
    if not ends:
        expected = " or ".join(sorted(TERMINAL))
        yield len(c.events) - 1, f"expected {expected}, got the end of the stream"
    elif ends[0] < len(c.events) - 1:
        yield ends[0] + 1, "expected nothing behind the terminal event"


def true_status(c: Capture) -> Found:
    for n, event, response in snapshots(c):
        status, allowed = response.get("status"), STATUSES[event["type"]]
        if event["type"] == "response.created" and response.get("background") is True:
            allowed = {"queued", "in_progress"}
        if status not in allowed:
            yield n, f"expected {event['type']} around status {' or '.join(sorted(allowed))}, got {status}"
        for member, only in ONLY_WITH.items():
            if response.get(member) is not None and status != only:
                yield n, f"expected {member} only if the status is {only}, got it with {status}"
            elif member in response and response[member] is None and status == only != "completed":
                yield n, f"expected {member} if the status is {only}, got null"


def snapshots(c: Capture) -> Iterator[tuple[int, Json, Json]]:
    """(number, event, its response, with the members that are null); of terminal events all are."""
    for n, (event, raw) in enumerate(zip(c.events, c.raw, strict=True)):
        if "response" in event and event.get("type") in STATUSES:
            nulls = {member: None for member, value in raw["response"].items() if value is None}
            yield n, event, nulls | event["response"]


def empty_until_the_end(c: Capture) -> Found:
    for n, event, response in snapshots(c):
        if event["type"] not in TERMINAL and (response.get("output") or response.get("usage")):
            yield n, "expected output [] and usage null before the terminal event"


def one_response(c: Capture) -> Found:
    first: Json = {}
    for n, event in enumerate(c.raw):
        response = event.get("response")
        if not isinstance(response, dict):
            continue
        first = first or response
        for member in first.keys() - CHANGING:
            if response.get(member, first[member]) != first[member]:
                was, now = json.dumps(first[member]), json.dumps(response[member])
                yield n, f"expected {member} to stay {shortened(was)}, got {shortened(now)}"


def closed_items(c: Capture) -> Found:
    for n, event, response in snapshots(c):
        statuses = [item["status"] for item in response.get("output", ()) if "status" in item]
        if event["type"] != "response.completed" and statuses[-1:] == ["incomplete"]:
            statuses.pop()  # the item that was cut
        for status in {*statuses} - {"completed"}:
            yield n, f"expected items to be completed, but for the last one of a cut response, got {status}"


def counted(c: Capture) -> Found:
    for n, event, response in snapshots(c):
        if event["type"] in ("response.completed", "response.incomplete"):
            yield from usage_adds_up(n, response.get("usage"), "input", "output")


def usage_adds_up(n: int, usage: Json | None, came: str, went: str) -> Found:
    if usage is None:
        yield n, "expected usage, got null"
        return
    n_in, n_out, total = (usage.get(f"{name}_tokens", -1) for name in (came, went, "total"))
    cached = usage.get(f"{came}_tokens_details", {}).get("cached_tokens", -1)
    reasoning = usage.get(f"{went}_tokens_details", {}).get("reasoning_tokens", -1)
    if min(n_in, n_out, total, cached, reasoning) < 0:
        yield n, f"expected all counts, and those of the details, got {shortened(json.dumps(usage), 200)}"
    elif not (cached <= n_in > 0 and reasoning <= n_out and total == n_in + n_out):
        yield n, f"expected counts that agree with each other, got {shortened(json.dumps(usage), 200)}"


# --- events: ids, indices, sums -----------------------------------------------------------------------------


def one_id_an_item(c: Capture) -> Found:
    announced: dict[int, Json] = {}
    for n, event in enumerate(c.events):
        held: Json = event.get("item", {})
        place: int = event.get("output_index", -1)
        match event.get("type"):
            case "response.output_item.added":
                if "id" in held and held["id"] in [other.get("id") for other in announced.values()]:
                    yield n, f"expected an id that no other item has, got {held['id']!r}"
                announced[place] = held
            case "response.output_item.done":
                yield from same_ids(n, announced.get(place, {}), held)
            case terminal if terminal in TERMINAL:
                for i, item in enumerate(event.get("response", {}).get("output", ())):
                    yield from same_ids(n, announced.get(i, {}), item)
            case _ if "item_id" in event and place in announced:
                yield from same_ids(n, announced[place], {"id": event["item_id"]})


def same_ids(n: int, announced: Json, item: Json) -> Found:
    for member in ("id", "call_id"):
        if {member} <= announced.keys() & item.keys() and announced[member] != item[member]:
            yield n, f"expected {member} {announced[member]!r} as announced, got {item[member]!r}"


def indices(c: Capture) -> Found:
    n_items, n_parts = 0, {"content_index": 0, "summary_index": 0}
    for n, event in enumerate(c.events):
        type_ = event.get("type", "")
        if type_ == "response.output_item.added":
            n_items, n_parts = n_items + 1, dict.fromkeys(n_parts, 0)
        for part in n_parts:
            n_parts[part] += part in event and type_.endswith("_part.added")
            yield from at(n, event, part, n_parts[part] - 1)
        yield from at(n, event, "output_index", n_items - 1)


def at(n: int, event: Json, index: str, expected: int) -> Found:
    if index in event and expected >= 0 and event[index] != expected:
        yield n, f"expected {index} {expected}, got {event[index]}"


def announced_empty(c: Capture) -> Found:
    for n, event in enumerate(c.events):
        held: Json = event.get("item") or event.get("part") or {}
        if str(event.get("type")).endswith(".added"):
            if full := [member for member in CONTENT if held.get(member)]:
                yield n, f"expected what is announced to be empty, got {full[0]}"
            elif held.get("status", "in_progress") != "in_progress":
                yield n, f"expected what is announced to be in_progress, got {held['status']}"


def sums(c: Capture) -> Found:
    """The fold law: deltas add up to what done events say, and those to the terminal event's output."""
    text, logprobs, parts, done = "", list[Any](), list[Json](), list[Any]()
    for n, (event, raw) in enumerate(zip(c.events, c.raw, strict=True)):
        type_ = event.get("type", "")
        if type_.endswith(".delta"):
            text += event.get("delta", "")
            logprobs += event.get("logprobs", ())
        elif type_ in WHOLE:
            yield from says_again(n, event, WHOLE[type_], text, logprobs)
            parts += [raw["part"]] if "part" in event else []
        elif type_ == "response.output_item.done":
            yield from holds_again(n, event.get("item", {}), raw.get("item"), text, parts)
            done.append(raw.get("item"))
        elif type_ in TERMINAL and "output" in event.get("response", {}):
            yield from puts_out(n, raw["response"]["output"], done)
        if type_.endswith(("_item.added", "_part.added", "_item.done")):
            text, logprobs = "", []
            parts = [] if "item" in event else parts


def says_again(n: int, event: Json, member: str, text: str, logprobs: list[Any]) -> Found:
    said = event.get(member, text)
    if isinstance(said, dict):
        said = said.get("text", said.get("refusal", text))
    if said != text:
        yield n, f"the deltas add up to {shortened(text)!r}, the event says {shortened(said)!r}"
    if without_bytes(event.get("part", event).get("logprobs", logprobs)) != without_bytes(logprobs):
        yield n, "the logprobs of the deltas are not those that the event says"


def holds_again(n: int, item: Json, raw: Any, text: str, parts: list[Json]) -> Found:
    if item.get("type") in ("function_call", "custom_tool_call"):
        expected, said = [text], [str(item.get("arguments", item.get("input", text)))]
    elif item.get("type") in ("message", "reasoning"):  # whichever of a summary and a content came first
        held = [part for member in ("content", "summary") for _, part in paired(item, raw, member)]
        expected, said = sorted(map(json.dumps, parts)), sorted(map(json.dumps, held))
    else:
        return
    if said != expected:
        yield n, f"the events before say {shortened(str(expected))}, the item {shortened(str(said))}"


def puts_out(n: int, output: list[Any], done: list[Any]) -> Found:
    if output != done:
        pairs = zip(output, done, strict=False)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        yield n, f"{len(done)} items were done, the response has {len(output)}; the first {same} are equal"


def without_bytes(value: Any) -> Any:
    """Parts list the bytes of a token, events do not: openai.types.responses has it so."""
    if isinstance(value, list):
        return [without_bytes(v) for v in value]
    if isinstance(value, dict):
        return {k: without_bytes(v) for k, v in value.items() if k != "bytes"}
    return value
