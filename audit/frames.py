"""Rules on the bytes of a stream: frames, lines, encoding, the end.

    Capture --rule--> (number of an event, what is wrong with it), ...

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html

Not here: the contents of events (events.py, chunks.py).
"""

import re
from collections.abc import Iterator

from audit.rules import rules_of
from audit.schema import Faults, shortened
from audit.stream import DONE, Capture, Frame


def with_data(capture: Capture) -> Iterator[tuple[Frame, str]]:
    """Yield each frame that is an event, [DONE] included, and its data."""
    for frame in capture.frames:
        if frame.data is not None:
            yield frame, frame.data


must, should, advice = rules_of("frames", "chat responses")


@must
def whole_frames(capture: Capture) -> Faults:
    """whole-frames: the bytes end with the end of a frame

    the HTML standard: what follows the last blank line is thrown away
    A16 A17 https://github.com/NousResearch/hermes-agent/pull/42314
    """
    for frame in capture.frames:
        if frame.fault:
            yield frame.number, frame.fault


@must
def json_data(capture: Capture) -> Faults:
    """json-data: the data of a frame is a JSON object, or [DONE]

    the SDKs parse the data of a frame as one JSON value
    A11 A14 B14 https://github.com/caozhiyuan/copilot-api/pull/88
    """
    for frame, data in with_data(capture):
        if not frame.value and data != DONE:
            yield frame.number, f"expected a JSON object or [DONE] as data, got {shortened(data)}"


@advice
def json_line(capture: Capture) -> Faults:
    """json-line: the data of a frame is one line

    the HTML standard allows several; clients that read line by line do not join them
    A11 https://github.com/caozhiyuan/copilot-api/pull/88
    """
    for frame, data in with_data(capture):
        if "\n" in data:
            yield frame.number, "expected one line of data, got several"


@must
def utf_8(capture: Capture) -> Faults:
    """utf-8: the bytes are UTF-8

    the HTML standard: an event stream is UTF-8
    A08 A09 https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """
    for frame in capture.frames:
        try:
            frame.raw.decode("utf-8")
        except UnicodeDecodeError as error:
            if not frame.fault:
                yield frame.number, f"expected UTF-8, got {shortened(frame.raw[error.start : error.end + 1])}"


@advice
def line_ends(capture: Capture) -> Faults:
    """line-ends: what clients take for a line end is escaped

    some clients split lines where Python's str.splitlines() does
    A01 A02 https://github.com/modelcontextprotocol/typescript-sdk/pull/1926
    """
    for frame, data in with_data(capture):
        if match := re.search("[\u0085\u2028\u2029]", data):
            yield frame.number, f"expected it escaped, got U+{ord(match[0]):04X} itself"


@should
def event_name(capture: Capture) -> Faults:
    """event-name: the event field is the type of the event; chat completion chunks have none

    OpenAI's streams name each Responses event, and listeners are registered by that name
    B17 https://platform.openai.com/docs/api-reference/responses-streaming
    """
    for frame, _ in with_data(capture):
        expected = frame.value.get("type", "message") if capture.kind == "responses" else "message"
        if frame.value and frame.type != expected:
            yield frame.number, f"expected the event field to say {expected}, got {frame.type}"


@advice
def no_id(capture: Capture) -> Faults:
    """no-id: no id: and no retry: lines

    an id makes a browser's EventSource ask again with Last-Event-ID, which no server here answers
    A12 https://github.com/theopenco/llmgateway/pull/2334
    """
    for frame in capture.frames:
        if re.search(rb"^(?:id|retry)\b", frame.raw, re.MULTILINE):
            yield frame.number, "expected no id: and no retry: line"


@must
def done_line(capture: Capture) -> Faults:
    """done-line: [DONE] is the last frame, and there is one; a Responses stream may have none

    the API reference: a chat stream is ended by data: [DONE]; SDKs read nothing after it
    A21 C19 https://github.com/vllm-project/vllm/pull/378
    """
    texts = [data for _, data in with_data(capture)]
    if DONE in texts[:-1]:
        yield texts.index(DONE), "expected [DONE] once, and nothing after it"
    if texts and DONE not in texts and capture.kind == "chat":
        yield len(capture.raw), "expected [DONE], got the end of the bytes"
