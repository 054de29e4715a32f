"""What a correct stream looks like from outside: RULES, for the streams of any server.

    Capture --violations()--> [Violation(event, rule, message, link), ...]

Authority: https://github.com/openai/openai-openapi (events, items, chunks, and the members they must have),
https://platform.openai.com/docs/api-reference/responses-streaming, and the WHATWG's text on the bytes. Where
these are silent, what Azure probed: Azure/azure-sdk-for-net, api-behaviour-contract.md (B1 to B37).

Rules of this file:
1. RULES is the one list: the command line, the tests' laws and `pytest tests/wire` judge by it.
2. A rule raises for no stream, whatever it holds, and says little of what another rule forbids.
3. What is judged does not judge: of responses.py there is its GRAMMAR, and nothing that makes events.
4. An event's number is its place in the recording, 0 the first: its `sequence_number`, if that is right.

Not here: recordings (captures.py), the command line (audit.py), what takes a second request to be seen
(tests/wire/), and what a text should say.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import sse
from captures import Capture, Json, captured, parsed
from responses import GRAMMAR

Found = Iterator[tuple[int, str]]  # (number of an event, what is wrong with it)


class Violation(NamedTuple):
    event: int
    rule: str  # key of RULES
    message: str
    link: str


# --- the shapes ---------------------------------------------------------------------------------------------

# fmt: off
#  event                                        what it holds besides type and sequence_number
FIELDS = {
    "response.created":                         "response",
    "response.queued":                          "response",
    "response.in_progress":                     "response",
    "response.completed":                       "response",
    "response.incomplete":                      "response",
    "response.failed":                          "response",
    "response.output_item.added":               "output_index item",
    "response.output_item.done":                "output_index item",
    "response.content_part.added":              "item_id output_index content_index part",
    "response.content_part.done":               "item_id output_index content_index part",
    "response.output_text.delta":               "item_id output_index content_index delta logprobs",
    "response.output_text.done":                "item_id output_index content_index text logprobs",
    "response.output_text.annotation.added":    "item_id output_index content_index annotation_index",
    "response.refusal.delta":                   "item_id output_index content_index delta",
    "response.refusal.done":                    "item_id output_index content_index refusal",
    "response.reasoning_text.delta":            "item_id output_index content_index delta",
    "response.reasoning_text.done":             "item_id output_index content_index text",
    "response.reasoning.delta":                 "item_id output_index content_index delta",
    "response.reasoning.done":                  "item_id output_index content_index text",
    "response.reasoning_summary_part.added":    "item_id output_index summary_index part",
    "response.reasoning_summary_part.done":     "item_id output_index summary_index part",
    "response.reasoning_summary_text.delta":    "item_id output_index summary_index delta",
    "response.reasoning_summary_text.done":     "item_id output_index summary_index text",
    "response.function_call_arguments.delta":   "item_id output_index delta",
    "response.function_call_arguments.done":    "item_id output_index name arguments",
    "response.custom_tool_call_input.delta":    "item_id output_index delta",
    "response.custom_tool_call_input.done":     "item_id output_index input",
    "error":                                    "code message param",
}

#  item or part          what it holds besides type
MEMBERS = {
    "message":           "id status role content",
    "reasoning":         "id summary",
    "function_call":     "id status call_id name arguments",
    "custom_tool_call":  "id call_id name input",
    "output_text":       "text annotations logprobs",
    "refusal":           "refusal",
    "reasoning_text":    "text",
    "summary_text":      "text",
}

# Of a response object, null where there is nothing to say: "required" in openai-openapi, `Response`.
RESPONSE = (
    "id object created_at status error incomplete_details instructions model tools output tool_choice "
    "parallel_tool_calls metadata temperature top_p"
)
CHUNK = "id object created model choices"
CHOICE = "index delta finish_reason"
ERROR = "message type param code"

# What servers may say and ours has no need to: more parts, refusals, annotations, summaries.
#  (state,                     event, and the item or part it opens or ends)             next state
MORE = {
    ("message done",            "response.content_part.added output_text"):               "text",
    ("text",                    "response.output_text.annotation.added"):                 "text",
    ("message done",            "response.content_part.added refusal"):                   "refusal",

    ("reasoning done",          "response.content_part.added reasoning_text"):            "thought",
    ("reasoning",               "response.output_item.done reasoning"):                   "between",
    ("reasoning",               "response.reasoning_summary_part.added summary_text"):    "summary",
    ("reasoning done",          "response.reasoning_summary_part.added summary_text"):    "summary",
    ("summary",                 "response.reasoning_summary_text.delta"):                 "summary",
    ("summary",                 "response.reasoning_summary_text.done"):                  "summary done",
    ("summary done",            "response.reasoning_summary_part.done summary_text"):     "reasoning done",

    ("between",                 "response.output_item.added *"):                          "hosted",
    ("hosted",                  "response.*"):                                            "hosted",
    ("hosted",                  "response.output_item.done *"):                           "between",
}
HOSTED = ("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_",
          "computer_call", "local_shell_call", "shell_call", "apply_patch_call", "tool_search")

# Whatever is open may be left open by a failure.
FAILED = dict.fromkeys([(s, "response.failed") for s in {*(GRAMMAR | MORE).values()} - {"end"}], "end")
ORDER = GRAMMAR | MORE | FAILED
AFTER = {event: state for (_, event), state in ORDER.items()}  # where an event leads, if it may not come

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

#  member                   the one status that it is not null with
ONLY_WITH = {
    "error":                "failed",
    "incomplete_details":   "incomplete",
    "completed_at":         "completed",
}

#  what a done event says once more, and where
WHOLE = {
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
# Members of a response that change with it, and the tier, of which it may be told only in the end.
CHANGING = {"status", "output", "usage", "error", "incomplete_details", "completed_at", "service_tier"}
FINISH_REASONS = {"stop", "length", "tool_calls", "content_filter"}  # and "function_call", long deprecated
MARKUP = re.compile(r"<\|\w+\|>|</?think>|</?tool_calls?>|\[TOOL_CALLS\]")
OUR_LINE_ENDS = re.compile("[\u0085\u2028\u2029]")


def shortened(text: str, length: int = 80) -> str:
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-length // 2 :]}"


# --- bytes --------------------------------------------------------------------------------------------------


def whole_frames(c: Capture) -> Found:
    if c.tail:
        yield len(c.raw), c.tail


def one_json_line(c: Capture) -> Found:
    for n, frame in data_frames(c):
        if not parsed(frame.data) and frame.data != "[DONE]":
            yield n, f"expected a JSON object or [DONE] as data, got {shortened(frame.data)!r}"
        elif "\n" in frame.data:
            yield n, "expected one line of data, got several"


def only_utf8(c: Capture) -> Found:
    for frame in c.frames:
        try:
            frame.raw.decode("utf-8")
        except UnicodeDecodeError as error:
            yield frame.number, f"expected UTF-8, got {frame.raw[error.start : error.end + 1]!r}"


def no_foreign_line_ends(c: Capture) -> Found:
    for n, frame in data_frames(c):
        if found := OUR_LINE_ENDS.search(frame.data):
            yield n, f"expected it escaped, got U+{ord(found[0]):04X} itself"


def named_frames(c: Capture) -> Found:
    for n, frame in data_frames(c):
        type_ = parsed(frame.data).get("type", "message") if c.kind == "responses" else "message"
        if frame.type != type_ and parsed(frame.data):
            yield n, f"expected the event field to say {type_!r}, got {frame.type!r}"


def no_ids(c: Capture) -> Found:
    for frame in c.frames:
        if re.search(rb"^(?:id|retry)\b", frame.raw, re.MULTILINE):
            yield frame.number, "expected no id: and no retry: line"


def done_is_last(c: Capture) -> Found:
    places = [n for n, frame in data_frames(c) if frame.data == "[DONE]"]
    if len(places) > 1:
        yield places[1], f"expected one [DONE], got {len(places)}"
    if places and places[0] < len(list(data_frames(c))) - len(places):
        yield places[0], "expected nothing behind [DONE]"
    if not places and c.frames and c.kind == "chat":
        yield len(c.raw), "expected [DONE], got the end of the bytes"


def data_frames(c: Capture) -> Iterator[tuple[int, sse.Event]]:
    return ((frame.number, frame.event) for frame in c.frames if frame.event)


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


# --- chat completion chunks ---------------------------------------------------------------------------------


def chunk_fields(c: Capture) -> Found:
    for n, (chunk, raw) in enumerate(zip(c.events, c.raw, strict=True)):
        if "error" in raw or not raw:
            continue
        yield from missing(n, "a chunk", chunk, raw, CHUNK)
        if chunk.get("object", "") not in ("", "chat.completion.chunk"):
            yield n, f"expected object chat.completion.chunk, got {chunk['object']}"
        for choice, its_raw in paired(chunk, raw, "choices"):
            reason = {"finish_reason": None} if its_raw.get("finish_reason", "") is None else {}
            yield from missing(n, "a choice", choice | reason, its_raw, CHOICE)


def one_completion(c: Capture) -> Found:
    chunks = [(n, chunk) for n, chunk in enumerate(c.events) if "choices" in chunk]
    for n, chunk in chunks[1:]:
        for member in ("id", "created", "model"):
            if member in chunk and (first := chunks[0][1].get(member, chunk[member])) != chunk[member]:
                yield n, f"expected {member} {first!r} as in the first chunk, got {chunk[member]!r}"


def choices(c: Capture) -> Iterator[tuple[int, int, Json, Json]]:
    """(number of the chunk, index of the choice, the choice, as it came)"""
    for n, (chunk, raw) in enumerate(zip(c.events, c.raw, strict=True)):
        for choice, its_raw in paired(chunk, raw, "choices"):
            yield n, choice.get("index", 0), choice, its_raw


def one_role(c: Capture) -> Found:
    seen: set[int] = set()
    for n, index, choice, raw in choices(c):
        delta = raw.get("delta") or {}
        if index not in seen and choice.get("delta", {}).get("role") != "assistant":
            yield n, f"expected role 'assistant' in the first delta of a choice, got {delta.get('role')!r}"
        elif index in seen and "role" in delta:
            yield n, f"expected no role in later deltas, got {delta['role']!r}"
        seen.add(index)


def one_finish(c: Capture) -> Found:
    ended: dict[int, str] = {}
    for n, index, choice, _ in choices(c):
        reason = choice.get("finish_reason")
        if index in ended:
            yield n, f"expected nothing of a choice behind its finish_reason {ended[index]!r}"
        elif reason is not None and reason not in FINISH_REASONS:
            yield n, f"expected finish_reason to be null or one of {sorted(FINISH_REASONS)}, got {reason!r}"
        if reason is not None:
            ended[index] = reason
    failed = any("error" in chunk for chunk in c.raw)
    for index in sorted({index for _, index, _, _ in choices(c)} - ended.keys()):
        if not failed:
            yield len(c.raw) - 1, f"expected a finish_reason of choice {index}, got the end of the stream"


def calls(c: Capture) -> Found:
    known: dict[int, int] = {}  # calls of a choice
    for n, index, choice, raw in choices(c):
        for call, its_raw in paired(choice.get("delta", {}), raw.get("delta") or {}, "tool_calls"):
            named, place = call.get("function", {}) | call.get("custom", {}), call.get("index")
            if place is None:
                yield n, "expected an index in each delta of a call, got none"
            elif place == known.get(index, 0):
                known[index] = place + 1
                if not begins(call):
                    yield n, f"expected a call to begin with id, type, name and arguments '', got {its_raw}"
            elif place >= known.get(index, 0):
                yield n, f"expected the calls of a choice to count 0, 1, 2, ..., got {place}"
            elif {"id", "type"} & its_raw.keys() or "name" in named:
                yield n, f"expected later deltas of a call to hold index and arguments only, got {its_raw}"
        if choice.get("finish_reason") == "tool_calls" and not known.get(index):
            yield n, "expected finish_reason 'tool_calls' of a choice with calls only, got one without"


def begins(call: Json) -> bool:
    kind = call.get("type", "")
    said, holds = call.get(kind, {}), {"function": "arguments", "custom": "input"}
    return "id" in call and kind in holds and "name" in said and said.get(holds[kind]) == ""


def chunk_texts(c: Capture) -> Found:
    content, arguments = dict[int, str](), dict[tuple[int, int], str]()
    for n, index, choice, _ in choices(c):
        delta = choice.get("delta", {})
        content[index] = content.get(index, "") + delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            place = index, call.get("index", 0)
            arguments[place] = arguments.get(place, "") + call.get("function", {}).get("arguments", "")
        if choice.get("finish_reason") in ("stop", "tool_calls"):
            if found := MARKUP.search(content[index]):
                yield n, f"expected content without markup of the model's, got {found[0]}"
            for text in (
                text for (i, _), text in arguments.items() if i == index and text and not is_json(text)
            ):
                yield n, f"expected the arguments of a call to be JSON, got {shortened(text)!r}"


def usage_apart(c: Capture) -> Found:
    places = [n for n, chunk in enumerate(c.events) if "usage" in chunk]
    for n in places:
        if c.raw[n].get("choices") != []:
            yield n, "expected usage in a chunk without choices, got choices beside it"
        else:
            yield from usage_adds_up(n, c.events[n]["usage"], "prompt", "completion")
    if len(places) > 1:
        yield places[1], "expected usage once"
    for n, chunk in enumerate(c.raw):
        if chunk.get("choices") == [] and "usage" not in c.events[n]:
            yield n, "expected a chunk without choices to hold usage"
        if places and n < places[0] and "usage" not in chunk and "choices" in chunk:
            yield n, "expected usage: null in the chunks before the one that has it, got no usage"
        if places and n > places[0] and chunk.get("choices"):
            yield n, "expected the chunk of the usage to be the last"


def error_is_last(c: Capture) -> Found:
    for n, (chunk, raw) in enumerate(zip(c.events, c.raw, strict=True)):
        if raw.get("error"):
            yield from missing(n, "an error", raw["error"], chunk.get("error", {}), ERROR)
            if n < len(c.raw) - 1:
                yield n + 1, "expected nothing behind an error but [DONE]"


# --- the rules ----------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    kind: str  # of a capture; "" for both
    find: Callable[[Capture], Found]
    bugs: str  # ids of tests/BUGS.md
    title: str
    link: str  # the rule's authority, or a report of what happens without it


SSE = "https://html.spec.whatwg.org/multipage/server-sent-events.html"
EVENTS = "https://platform.openai.com/docs/api-reference/responses-streaming"
CHUNKS = "https://platform.openai.com/docs/api-reference/chat-streaming"
GITHUB = "https://github.com/"

# fmt: off
RULES = {
    #  rule            kind         what finds it         bugs
    #      title
    #      link
    "whole-frames":   Rule("",          whole_frames,         "A16 A17",
        "the bytes end with the end of a frame",
        GITHUB + "NousResearch/hermes-agent/pull/42314"),
    "json-line":      Rule("",          one_json_line,        "A11 A14 B14",
        "the data of a frame is one line: a JSON object, or [DONE]",
        GITHUB + "caozhiyuan/copilot-api/pull/88"),
    "utf-8":          Rule("",          only_utf8,            "A08 A09",
        "the bytes are UTF-8",
        SSE + "#parsing-an-event-stream"),
    "line-ends":      Rule("",          no_foreign_line_ends, "A01 A02",
        "what clients take for a line end is escaped",
        GITHUB + "modelcontextprotocol/typescript-sdk/pull/1926"),
    "event-name":     Rule("",          named_frames,         "B17",
        "the event field is the type of the event; chat completion chunks have none",
        EVENTS),
    "no-id":          Rule("",          no_ids,               "A12",
        "no id: and no retry: lines",
        GITHUB + "theopenco/llmgateway/pull/2334"),
    "done-line":      Rule("",          done_is_last,         "A21 C19",
        "[DONE] is the last frame, and there is one; a Responses stream may have none",
        GITHUB + "vllm-project/vllm/pull/378"),

    "event-types":    Rule("responses", known_types,          "A15 C05",
        "the types of the events are those of the API",
        GITHUB + "router-for-me/CLIProxyAPI/pull/4691"),
    "fields":         Rule("responses", required_fields,      "C09 C22 H06 H07",
        "events, items, parts and the response have the members they must have",
        GITHUB + "lemonade-sdk/lemonade/issues/3607"),
    "numbers":        Rule("responses", numbered,             "C17",
        "sequence_number counts 0, 1, 2, ...",
        GITHUB + "BerriAI/litellm/pull/28899"),
    "nested-numbers": Rule("responses", no_nested_numbers,    "C02",
        "nothing inside an event has a sequence_number",
        GITHUB + "vllm-project/vllm/pull/37071"),
    "order":          Rule("responses", in_order,             "C01 C05 C08 C13 C14 E01",
        "events come in the order of responses.GRAMMAR",
        EVENTS),
    "terminal":       Rule("responses", one_terminal,         "C18 C19 C20",
        "the last event is terminal, and no other is",
        GITHUB + "EricLBuehler/mistral.rs/pull/1943"),
    "status":         Rule("responses", true_status,          "C15 C23",
        "an event tells of the status that its response has; error, incomplete_details, completed_at too",
        GITHUB + "vllm-project/agentic-api/issues/273"),
    "item-status":    Rule("responses", closed_items,         "C16",
        "in the end items are completed, but for the last one of a response that was cut",
        GITHUB + "vllm-project/vllm/issues/57998"),
    "snapshots":      Rule("responses", empty_until_the_end,  "C04",
        "output is [] and usage null until the terminal event",
        EVENTS),
    "one-response":   Rule("responses", one_response,         "C06 C07",
        "id, model and parameters of the response never change",
        GITHUB + "BerriAI/litellm/issues/19125"),
    "ids":            Rule("responses", one_id_an_item,       "C04 C06 C07 H04",
        "an item has one id, and a call one call_id, in all its events and in the final output",
        GITHUB + "BerriAI/litellm/issues/30071"),
    "indices":        Rule("responses", indices,              "C03 C10 C11 H01",
        "output_index counts items, content_index the parts of an item: 0, 1, 2, ...",
        GITHUB + "vllm-project/vllm/issues/45742"),
    "announced":      Rule("responses", announced_empty,      "C12",
        "an item or part is announced empty and in_progress",
        EVENTS),
    "sums":           Rule("responses", sums,                 "C01 C06 D01 D02 D06 D11 D12 E06 G06",
        "deltas add up to what the done events say, and these to the final output",
        GITHUB + "vllm-project/vllm/pull/30437"),
    "usage":          Rule("responses", counted,              "D09 G04 G05",
        "the final usage has all its counts, and they agree",
        GITHUB + "openai/openai-agents-python/issues/1179"),
    "markup":         Rule("responses", no_markup,            "E01 E09 E16 D18",
        "no markup of the model's in texts, names and arguments",
        GITHUB + "vllm-project/vllm/issues/36435"),
    "arguments":      Rule("responses", arguments_are_json,   "C12 E05 E06",
        "the arguments of a completed call are JSON",
        GITHUB + "vllm-project/vllm/issues/51697"),

    "chunk-fields":   Rule("chat",      chunk_fields,         "G01 G07",
        "chunks have id, object, created, model and choices; choices index, delta and finish_reason",
        GITHUB + "vllm-project/vllm/pull/19662"),
    "one-completion": Rule("chat",      one_completion,       "C07",
        "id, created and model are the same in all chunks",
        CHUNKS),
    "role":           Rule("chat",      one_role,             "H05",
        "the first delta of a choice has the role, later ones have none",
        GITHUB + "sgl-project/sglang/issues/18335"),
    "finish-reason":  Rule("chat",      one_finish,           "G01 C18",
        "finish_reason is null until the last chunk of a choice, and then one of the API's",
        GITHUB + "ollama/ollama/issues/4357"),
    "call-deltas":    Rule("chat",      calls,                "E02 E04 G02",
        "a call begins with index, id, type, name and arguments '', then come index and arguments",
        GITHUB + "ggml-org/llama.cpp/pull/13800"),
    "chunk-texts":    Rule("chat",      chunk_texts,          "E01 E05 E06 E09 E16",
        "no markup of the model's in the content; the arguments of a call are JSON",
        GITHUB + "vllm-project/vllm/issues/10395"),
    "usage-chunk":    Rule("chat",      usage_apart,          "B10 B11 G05 G07",
        "usage comes once, last, without choices; before it usage is null",
        GITHUB + "BerriAI/litellm/issues/28735"),
    "error-frame":    Rule("chat",      error_is_last,        "B13 C20",
        "an error has message, type, param and code, and is the last chunk",
        GITHUB + "open-webui/open-webui/issues/29628"),
}
# fmt: on


def violations(what: Capture | Iterable[Json], rules: Iterable[str] = RULES) -> list[Violation]:
    """What is wrong with a stream, in its order."""
    capture = what if isinstance(what, Capture) else captured(what)
    return sorted(
        Violation(number, id_, message, RULES[id_].link)
        for id_ in rules
        if RULES[id_].kind in ("", capture.kind)
        for number, message in RULES[id_].find(capture)
    )
