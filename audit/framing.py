"""Rules on the bytes of a stream: frames, lines, encodings, the end.

    Capture --rule--> (number of an event, what is wrong with it), ...

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html

Not here: what the events say (events.py, chunks.py), the list of all rules (rules.py).
"""

import re
from collections.abc import Iterator

import sse
from audit.recordings import Capture, parsed
from audit.shapes import OUR_LINE_ENDS, Found, shortened

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
