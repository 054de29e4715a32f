"""A recorded stream as what it says: bytes to frames, frames to events, events to members of known types.

    bytes --read()--> Capture        [event, ...] --captured()--> Capture

Authority: for the frames that of sse.py, for the members https://github.com/openai/openai-openapi.

Rules of this file:
1. All of it is read, however wrong: the rules say what is wrong, and need to see it.
2. A member of another type than the API's is left out of `events`: what reads them need not ask again.

Not here: what must hold of a stream (rules.py), and who records it (__main__.py, tests/wire/).
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import sse

Json = dict[str, Any]


class Frame(NamedTuple):
    number: int  # of its event; where it has none, of the next
    raw: bytes
    event: sse.Event | None  # None: it has no data


class Capture(NamedTuple):
    kind: str  # "responses" or "chat"
    frames: list[Frame]  # [] where only the events are known
    raw: list[Json]  # what the frames say; {} for one that is no JSON object
    events: list[Json]  # the same, without members of another type than TYPES has
    tail: str  # what is wrong with the end of the bytes


# --- types of members ---------------------------------------------------------------------------------------

# fmt: off
COUNTS = {"input_tokens": int, "output_tokens": int, "total_tokens": int, "prompt_tokens": int,
          "completion_tokens": int, "cached_tokens": int, "reasoning_tokens": int}
USAGE = COUNTS | {f"{side}_tokens_details": COUNTS for side in ("input", "output", "prompt", "completion")}
PART = {"type": str, "text": str, "refusal": str, "annotations": list, "logprobs": list}
ITEM = {"type": str, "id": str, "status": str, "role": str, "content": [PART], "summary": [PART],
        "call_id": str, "name": str, "arguments": str, "input": str}
SNAPSHOT = {"id": str, "status": str, "output": [ITEM], "usage": USAGE, "error": {}, "incomplete_details": {}}
CALL = {
    "index": int, "id": str, "type": str,
    "function": {"name": str, "arguments": str}, "custom": {"name": str, "input": str},
}  # fmt: skip
DELTA = {"role": str, "content": str, "tool_calls": [CALL]}

#  kind          the types of an event's members: [X] is a list of objects of type X; others may be anything
TYPES: dict[str, Any] = {
    "responses": {"type": str, "sequence_number": int, "output_index": int, "content_index": int,
                  "summary_index": int, "annotation_index": int, "item_id": str, "delta": str, "text": str,
                  "refusal": str, "arguments": str, "input": str, "name": str, "logprobs": list, "item": ITEM,
                  "part": PART, "response": SNAPSHOT},
    "chat":      {"id": str, "object": str, "created": int, "model": str, "usage": USAGE, "error": {},
                  "choices": [{"index": int, "delta": DELTA, "finish_reason": str}]},
}
# fmt: on

# --- reading ------------------------------------------------------------------------------------------------

LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")


def frames(stream: bytes) -> tuple[list[Frame], str]:
    """The frames of a recording, without those of comments, and what is wrong with its end."""
    parser, found, lines, number = sse.Parser(len(stream)), list[Frame](), list[bytes](), 0
    for line in LINE.findall(stream):
        lines.append(line)
        events = parser.feed(line)
        if not line.strip(b"\r\n"):
            if not all(line.startswith((b":", b"\r", b"\n")) for line in lines):
                found.append(Frame(number, b"".join(lines), events[0] if events else None))
                number += len(events)
            lines.clear()
    try:
        parser.close()
    except sse.Truncated as error:
        return found, str(error)
    return found, ""


def read(stream: bytes) -> Capture:
    """A recorded stream; raises ValueError where it is of neither kind."""
    found, tail = frames(stream)
    raw = [parsed(frame.event.data) for frame in found if frame.event and frame.event.data != "[DONE]"]
    try:
        return captured(raw)._replace(frames=found, tail=tail)
    except ValueError as error:  # an error's body, most often: it says more than we can
        said = "".join(c if c.isprintable() else " " for c in stream[:400].decode(errors="replace"))
        raise ValueError(f"{error}: {said or 'nothing'}") from error


def captured(raw: Iterable[Json]) -> Capture:
    """Events without their bytes, as a capture."""
    events = list(raw)
    kind = next(filter(None, map(kind_of, events)), None)
    if kind is None:
        raise ValueError(
            "expected server-sent events of a Responses stream or of chat completion chunks, "
            f"got {len(events)} events of neither"
        )
    return Capture(kind, [], events, [typed(event, TYPES[kind]) for event in events], "")


def kind_of(event: Json) -> str | None:
    if str(event.get("type")).startswith("response."):
        return "responses"
    return "chat" if "choices" in event or event.get("object") == "chat.completion.chunk" else None


def parsed(data: str) -> Json:
    """A JSON object; {} for anything else."""
    try:
        value = json.loads(data, parse_constant=no_constant)
        json.dumps(value)  # all that is done with it goes no deeper
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def typed(value: Json, types: Mapping[str, Any]) -> Json:
    """Without the members that are of another type than they should be."""
    kept = {name: fitted(v, types[name]) if name in types else v for name, v in value.items()}
    return {name: v for name, v in kept.items() if v is not WRONG}


WRONG = object()


def fitted(value: Any, want: Any) -> Any:
    match want:
        case dict() if isinstance(value, dict):
            return typed(value, want)
        case [types] if isinstance(value, list):
            return [typed(v, types) for v in value if isinstance(v, dict)]
        case type() if isinstance(value, want) and not (want is int and isinstance(value, bool)):
            return value
        case _:
            return WRONG
