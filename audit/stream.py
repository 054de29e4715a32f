"""One stream: bytes to frames, frames to events, events to members of known types; and the rules on it.

    bytes --read()--> Capture        [event, ...] --captured()--> Capture

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html for the frames, schema.py for types.

Rules of this file:
1. All of it is read, however wrong: the rules say what is wrong, and need to see it.
2. `Capture.events` has no member of another type than the API's: a rule that reads one need not ask again.
3. A rule raises for no stream, whatever it holds, and says little of what another rule forbids.
4. An event's number is its place in the recording, 0 the first: its `sequence_number`, if that is right.

Not here: the rules themselves (frames.py, events.py, chunks.py), who records a stream (linter.py, peer.py).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from audit.rules import Rule
from audit.schema import Faults, Json, shortened, typed

STREAM_RULES: dict[str, Rule] = {}  # their check is a function from a Capture to its Faults
EVENTS = {"responses": "event", "chat": "chunk"}  # kind of a stream -> what schema.py calls its events

LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
BOM = b"\xef\xbb\xbf"
DONE = "[DONE]"


class Frame(NamedTuple):
    number: int  # of its event; a frame without one has the number of the next event
    raw: bytes
    type: str  # "message" if the frame names none
    data: str | None  # None: it has no data, so it is no event
    id: str  # the last one that the stream has set


class Capture(NamedTuple):
    kind: str  # "responses" or "chat"
    frames: list[Frame]  # [] if only the events are known
    raw: list[Json]  # the events as they came; {} for one that is not a JSON object
    events: list[Json]  # the same events without members of a wrong type
    tail: str  # what is wrong with the end of the bytes; "" for nothing


# --- bytes to events ----------------------------------------------------------------------------------------


def frames_of(stream: bytes) -> tuple[list[Frame], str]:
    """Return the frames of a recording, without those of comments alone, and what is wrong with its end."""
    frames: list[Frame] = []
    last_id = ""
    n_events = 0
    raw = b""  # of the frame that is open
    fields: dict[str, list[str]] = {}  # its lines by the name before the colon; a comment has none
    for line in LINE.findall(stream.removeprefix(BOM)):
        raw += line
        if line.strip(b"\r\n"):
            name, _, value = line.rstrip(b"\r\n").decode("utf-8", "replace").partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
            continue
        if any(fields):
            event_type = fields.get("event", [""])[-1] or "message"
            data = "\n".join(fields["data"]) if "data" in fields else None
            last_id = [last_id, *(id_ for id_ in fields.get("id", ()) if "\0" not in id_)][-1]
            frames.append(Frame(n_events, raw, event_type, data, last_id))
            n_events += data is not None
        raw = b""
        fields = {}
    is_open = any(fields) or (raw and not raw.endswith((b"\r", b"\n")))
    return frames, f"expected a blank line before the stream ends, got {raw[-80:]!r}" if is_open else ""


def read(stream: bytes) -> Capture:
    """Read a recorded stream; raises ValueError if it is of neither kind."""
    frames, tail = frames_of(stream)
    try:
        capture = captured(events_in(stream))
    except ValueError as error:
        # Most often it is an error's body, which says more than we can.
        beginning = stream[:400].decode(errors="replace")
        printable = "".join(c if c.isprintable() else " " for c in beginning)
        raise ValueError(f"{error}: {printable or 'nothing'}") from error
    return capture._replace(frames=frames, tail=tail)


def events_in(stream: bytes) -> Iterator[Json]:
    """Yield the events of a stream, or of a part of one that ends with a frame."""
    frames, _ = frames_of(stream)
    for frame in frames:
        if frame.data not in (None, DONE):
            yield parsed(frame.data or "")


def captured(raw: Iterable[Json]) -> Capture:
    """Make a capture of events without their bytes; raises ValueError if they are of neither kind."""
    events = list(raw)
    for kind in map(kind_of, events):
        if kind:
            return Capture(kind, [], events, [typed(event, EVENTS[kind]) for event in events], "")
    expected = "server-sent events of a Responses stream or of chat completion chunks"
    raise ValueError(f"expected {expected}, got {len(events)} events of neither")


def kind_of(event: Json) -> str:
    """Name the kind of stream that an event is of; "" for neither."""
    if str(event.get("type")).startswith("response."):
        return "responses"
    if "choices" in event or event.get("object") == "chat.completion.chunk":
        return "chat"
    return ""


def parsed(text: str) -> Json:
    """Parse a JSON object; {} for anything else."""
    value = loads(text)
    return value if isinstance(value, dict) else {}


def loads(text: str) -> Any:
    """Parse JSON; None for anything that is not: NaN, 1e999 and half a surrogate pair too."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


# --- what streams of both APIs carry ------------------------------------------------------------------------


def changes(objects: Iterable[tuple[int, Json]], may_not: Callable[[str], bool]) -> Faults:
    """Find the members that change from the first object on, of those that may not."""
    first: Json = {}
    for number, value in objects:
        first = first or value
        for name in filter(may_not, first.keys() & value.keys()):
            if value[name] != first[name]:
                expected, got = (shortened(json.dumps(each[name])) for each in (first, value))
                yield number, f"expected {name} to stay {expected}, got {got}"


MARKUP = re.compile(r"<\|\w+\|>|</?think>|</?tool_calls?>|\[TOOL_CALLS\]")


def markup(text: str) -> str:
    """Find the first marker of a model's own language in the text; "" if there is none."""
    match = MARKUP.search(text)
    return match[0] if match else ""


def is_object(text: str) -> bool:
    """True for the JSON text of an object, as the arguments of a call are."""
    return isinstance(loads(text), dict)


def usage_faults(number: int, usage: Json | None, prompt: str, output: str) -> Faults:
    """Find what is wrong with the usage of an event; the API calls its two sides `prompt` and `output`."""
    if usage is None:
        yield number, "expected usage, got null"
        return
    n_prompt = usage.get(f"{prompt}_tokens", -1)
    n_output = usage.get(f"{output}_tokens", -1)
    n_total = usage.get("total_tokens", -1)
    unknown = -1 if prompt == "input" else 0  # chat completions need no details
    n_cached = usage.get(f"{prompt}_tokens_details", {}).get("cached_tokens", unknown)
    n_reasoning = usage.get(f"{output}_tokens_details", {}).get("reasoning_tokens", unknown)
    shown = shortened(json.dumps(usage), 200)
    adds_up = n_total == n_prompt + n_output
    if min(n_prompt, n_output, n_total, n_cached, n_reasoning) < 0:
        yield number, f"expected all counts, got {shown}"
    elif not (n_cached <= n_prompt > 0 and n_reasoning <= n_output and adds_up):
        yield number, f"expected counts that agree with each other, got {shown}"
