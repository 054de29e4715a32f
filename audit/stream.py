"""One stream: bytes to frames, frames to events, events to members of known types; and the rules on it.

    bytes --read()--> Capture        [event, ...] --captured()--> Capture

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html for the frames, schema.py for types.

Rules of this file:
1. All of it is read, however wrong: the rules say what is wrong, and need to see it.
2. `Capture.events` has no member of another type than the API's: a rule that reads one need not ask again.
3. A rule raises for no stream, whatever it holds, and says little of what another rule forbids.
4. An event's number is its place in the recording, 0 the first: its `sequence_number`, if that is right.

Not here: the rules themselves (frames.py, events.py, chunks.py), who records a stream (linter.py, asking.py).
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from audit.rules import Rule
from audit.schema import Faults, Json, shortened, typed

EVENTS = {"responses": "event", "chat": "chunk"}  # kind of a stream -> what schema.py calls its events

LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
COMMENT = re.compile(rb":[^\r\n]*[\r\n]+")
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
    complete: list[Frame] = []
    lines: list[bytes] = []  # of the frame that is open
    number = 0
    last_id = ""
    for line in LINE.findall(stream.removeprefix(BOM)):
        lines.append(line)
        if line.strip(b"\r\n"):
            continue
        if size(lines):
            frame = frame_of(number, lines, last_id)
            number += frame.data is not None
            last_id = frame.id
            complete.append(frame)
        lines.clear()
    if n_bytes := size(lines):
        return complete, f"expected a blank line before the stream ends, got {n_bytes} bytes of an open event"
    return complete, ""


def size(lines: list[bytes]) -> int:
    """Count the bytes of an event; comments that have ended are not part of it."""
    return sum(len(line.rstrip(b"\r\n")) for line in lines if not COMMENT.fullmatch(line))


def frame_of(number: int, lines: list[bytes], last_id: str) -> Frame:
    event_type = ""
    data: list[str] = []
    for line in lines:
        name, _, value = line.rstrip(b"\r\n").decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            event_type = value
        elif name == "id" and "\0" not in value:
            last_id = value
    return Frame(number, b"".join(lines), event_type or "message", "\n".join(data) if data else None, last_id)


def read(stream: bytes) -> Capture:
    """Read a recorded stream; raises ValueError if it is of neither kind."""
    stream_frames, tail = frames_of(stream)
    try:
        capture = captured(events_in(stream))
    except ValueError as error:
        # Most often it is an error's body, which says more than we can.
        beginning = stream[:400].decode(errors="replace")
        printable = "".join(c if c.isprintable() else " " for c in beginning)
        raise ValueError(f"{error}: {printable or 'nothing'}") from error
    return capture._replace(frames=stream_frames, tail=tail)


def events_in(stream: bytes) -> Iterator[Json]:
    """Yield the events of a stream, or of a part of one that ends with a frame."""
    stream_frames, _ = frames_of(stream)
    for frame in stream_frames:
        if frame.data not in (None, DONE):
            yield parsed(frame.data or "")


def captured(raw: Iterable[Json]) -> Capture:
    """Make a capture of events without their bytes; raises ValueError if they are of neither kind."""
    events = list(raw)
    kinds = [kind for kind in map(kind_of, events) if kind]
    if not kinds:
        raise ValueError(
            "expected server-sent events of a Responses stream or of chat completion chunks, "
            f"got {len(events)} events of neither"
        )
    return Capture(kinds[0], [], events, [typed(event, EVENTS[kinds[0]]) for event in events], "")


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


# --- the rules on it ----------------------------------------------------------------------------------------

STREAM_RULES: dict[str, Rule] = {}  # their check is a function from a Capture to its Faults

# --- what streams of both APIs carry ------------------------------------------------------------------------

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
