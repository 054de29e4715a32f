"""Rules on the bytes of a stream: frames, lines, encoding, the end.

    Capture --rule--> (number of an event, what is wrong with it), ...

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html

Not here: what the events say (rules_events.py, rules_chunks.py), the list of all rules (rules.py).
"""

import re
from collections.abc import Iterator

import sse
from audit.members import Faults, shortened
from audit.recordings import Capture, parsed

# What some clients take for a line end: https://github.com/modelcontextprotocol/typescript-sdk/pull/1926
FOREIGN_LINE_END = re.compile("[\u0085\u2028\u2029]")


def data_frames(capture: Capture) -> Iterator[tuple[int, sse.Event]]:
    """The frames that hold data, each with the number of its event."""
    return ((frame.number, frame.event) for frame in capture.frames if frame.event)


def whole_frames(capture: Capture) -> Faults:
    if capture.tail:
        yield len(capture.raw), capture.tail


def one_json_line(capture: Capture) -> Faults:
    for number, event in data_frames(capture):
        if not parsed(event.data) and event.data != "[DONE]":
            yield number, f"expected a JSON object or [DONE] as data, got {shortened(event.data)!r}"
        elif "\n" in event.data:
            yield number, "expected one line of data, got several"


def only_utf8(capture: Capture) -> Faults:
    for frame in capture.frames:
        try:
            frame.raw.decode("utf-8")
        except UnicodeDecodeError as error:
            yield frame.number, f"expected UTF-8, got {frame.raw[error.start : error.end + 1]!r}"


def no_foreign_line_ends(capture: Capture) -> Faults:
    for number, event in data_frames(capture):
        if match := FOREIGN_LINE_END.search(event.data):
            yield number, f"expected it escaped, got U+{ord(match[0]):04X} itself"


def named_frames(capture: Capture) -> Faults:
    for number, event in data_frames(capture):
        value = parsed(event.data)
        expected = "message"
        if capture.kind == "responses":
            expected = value.get("type", "message")
        if value and event.type != expected:
            yield number, f"expected the event field to say {expected!r}, got {event.type!r}"


def no_ids(capture: Capture) -> Faults:
    for frame in capture.frames:
        if re.search(rb"^(?:id|retry)\b", frame.raw, re.MULTILINE):
            yield frame.number, "expected no id: and no retry: line"


def done_is_last(capture: Capture) -> Faults:
    frames = list(data_frames(capture))
    done = [number for number, event in frames if event.data == "[DONE]"]
    if len(done) > 1:
        yield done[1], f"expected one [DONE], got {len(done)}"
    if done and done[0] < len(frames) - len(done):
        yield done[0], "expected nothing behind [DONE]"
    if not done and capture.frames and capture.kind == "chat":
        yield len(capture.raw), "expected [DONE], got the end of the bytes"
