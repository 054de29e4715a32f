"""A recorded stream read: bytes to frames, frames to events, events to members of known types.

    bytes --read()--> Capture        [event, ...] --captured()--> Capture

Authority: for the frames that of sse.py, for the types of members that of members.py.

Rules of this file:
1. All of it is read, however wrong: the rules say what is wrong, and need to see it.
2. `Capture.events` has no member of another type than the API's: a rule that reads one need not ask again.

Not here: what must hold of a stream (rules.py), and who records it (__main__.py, tests/wire/).
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import sse
from audit.members import CHUNK, EVENT, Json, Members, typed

TYPES: dict[str, Members] = {"responses": EVENT, "chat": CHUNK}  # kind of a stream -> members of its events

LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")


class Frame(NamedTuple):
    number: int  # of its event; a frame without one has the number of the next event
    raw: bytes
    event: sse.Event | None  # None: it has no data


class Capture(NamedTuple):
    kind: str  # "responses" or "chat"
    frames: list[Frame]  # [] where only the events are known
    raw: list[Json]  # the events as they came; {} for one that is no JSON object
    events: list[Json]  # the same events without members of a wrong type
    tail: str  # what is wrong with the end of the bytes; "" for nothing

    def typed_and_raw(self) -> Iterator[tuple[int, Json, Json]]:
        """(number of the event, the event without members of a wrong type, the event as it came)"""
        for number, (event, raw) in enumerate(zip(self.events, self.raw, strict=True)):
            yield number, event, raw


def read(stream: bytes) -> Capture:
    """A recorded stream; raises ValueError where it is of neither kind."""
    stream_frames, tail = frames(stream)
    raw = [parsed(event.data) for _, _, event in stream_frames if event and event.data != "[DONE]"]
    try:
        capture = captured(raw)
    except ValueError as error:
        # Most often it is an error's body, which says more than we can.
        beginning = stream[:400].decode(errors="replace")
        printable = "".join(c if c.isprintable() else " " for c in beginning)
        raise ValueError(f"{error}: {printable or 'nothing'}") from error
    return capture._replace(frames=stream_frames, tail=tail)


def frames(stream: bytes) -> tuple[list[Frame], str]:
    """The frames of a recording, without those of comments alone, and what is wrong with its end."""
    parser = sse.Parser(len(stream))
    complete: list[Frame] = []
    lines: list[bytes] = []  # of the frame that is open
    number = 0
    for line in LINE.findall(stream):
        lines.append(line)
        events = parser.feed(line)
        if line.strip(b"\r\n"):
            continue
        is_comment = all(line.startswith((b":", b"\r", b"\n")) for line in lines)
        if not is_comment:
            complete.append(Frame(number, b"".join(lines), events[0] if events else None))
            number += len(events)
        lines.clear()
    try:
        parser.close()
    except sse.Truncated as error:
        return complete, str(error)
    return complete, ""


def captured(raw: Iterable[Json]) -> Capture:
    """Events without their bytes, as a capture; raises ValueError where they are of neither kind."""
    events = list(raw)
    kinds = [kind for kind in map(kind_of, events) if kind]
    if not kinds:
        raise ValueError(
            "expected server-sent events of a Responses stream or of chat completion chunks, "
            f"got {len(events)} events of neither"
        )
    return Capture(kinds[0], [], events, [typed(event, TYPES[kinds[0]]) for event in events], "")


def kind_of(event: Json) -> str:
    """The kind of stream that an event is of; "" for neither."""
    if str(event.get("type")).startswith("response."):
        return "responses"
    if "choices" in event or event.get("object") == "chat.completion.chunk":
        return "chat"
    return ""


def parsed(data: str) -> Json:
    """A JSON object; {} for anything else."""
    try:
        value = sse.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
