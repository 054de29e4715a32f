"""Server-sent events: bytes to events (Parser), events to bytes (dumps, encode).

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html, 9.2.5 (grammar) and 9.2.6 (what a
line does). Words in quotes are its words; the other links are bugs, each kept out by the line it stands at.

    chunk of bytes --Parser.feed()--> [Event, ...]      end of the bytes --Parser.close()--> None or Truncated
    object --encode()--> frame      object --dumps()--> JSON      what many objects hold is Encoded once

Rules of this file:
  - The parser finds lines in the bytes and decodes them whole: the cuts between chunks change nothing.
  - The unit is the event, never the line. The caller knows the JSON in its data and the meaning of [DONE].
  - A stream that ends inside an event and an event that does not end are errors, never shorter answers.
  - The writer writes no `id:` and no event without data: a heartbeat is a comment (streaming.py).

Why a class that is fed, and not a generator over lines: the caller owns the socket, its timeouts and its
limits, and a test can cut the bytes anywhere. The state has an attribute for each fact that a cut separates.

Not here: reconnecting (so `retry:` is ignored), HTTP headers, and the rule which event must end a stream.
"""

import json
import re
from typing import Any, NamedTuple

import msgspec

DONE = b"data: [DONE]\n\n"  # the last frame of a stream of chunks, and by default of Responses events

# Some clients take these for line ends, https://github.com/modelcontextprotocol/typescript-sdk/pull/1926.
# They can only be inside JSON strings, where an escape means the same.
ESCAPED = re.compile("[\u0085\u2028\u2029]")

Object = dict[str, Any]  # of JSON
Encoded = msgspec.Raw  # a value as its JSON text, which dumps() copies

# Possibly half a surrogate pair; a text without a match needs no second look.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


# --- Writer -------------------------------------------------------------------------------------------------


def loads(text: str | bytes | bytearray, errors: str = "strict") -> Any:
    """Return the value of a JSON text; raises ValueError for any fault in it.

    This includes NaN and 1e999, which JSON lacks, and nesting deeper than Python can follow. Half a surrogate
    pair is not a character: `errors` is applied to it, as in bytes.decode().
    """
    if not isinstance(text, str):
        text = text.decode("utf-8-sig")
    try:
        if errors != "strict" and SURROGATE.search(text):
            written = json.dumps(json.loads(text), ensure_ascii=False).encode("utf-16", "surrogatepass")
            text = written.decode("utf-16", errors)
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def dumps(obj: Any) -> str:
    """Return obj as JSON in one line; NaN and the infinities, which JSON lacks, become null.

    Raises ValueError for half a surrogate pair, which UTF-8 cannot hold: loads() refuses them.
    """
    json_text = msgspec.json.encode(obj).decode()
    if json_text.isascii():
        return json_text
    return ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", json_text)


def encode(obj: Any, event: str | None = None) -> bytes:
    """Return the frame of one event, for one write; its data is one line, because JSON has no line end."""
    frame = f"data: {dumps(obj)}\n\n"
    if event is not None:
        frame = f"event: {event}\n{frame}"
    return frame.encode()


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

# "a CRLF pair, a single LF not preceded by CR, and a single CR not followed by LF being the ways in which a
# line can end". str.splitlines() has eight more: https://github.com/florimondmanca/httpx-sse/issues/34
LINE_END = re.compile(rb"\r\n|\n|\r")
BOM = b"\xef\xbb\xbf"

# A peer that never ends its event must not fill our memory: https://github.com/lidge-jun/opencodex/pull/1133
# The largest event is the terminal one, which repeats the whole output: 128k tokens of 4 bytes, each byte at
# worst the 6 of a \u escape, are 3 MiB.
MAX_EVENT_BYTES = 16 * 2**20


class Event(NamedTuple):
    type: str  # "message" if the stream names none
    data: str
    id: str  # the last one that the stream has set, "" before the first


class Truncated(ValueError):
    """The stream ended inside an event."""


class EventTooLarge(ValueError):
    """An event is larger than max_event_bytes, complete or not."""


# --- Parser -------------------------------------------------------------------------------------------------


class Parser:
    """Parses one stream. After an exception it is of no further use."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.max_event_bytes = max_event_bytes  # without line ends and ended comments
        self.line = bytearray()  # "da" | "ta: a\n": the line so far; appending takes linear time
        self.after_cr = False  # "data: a\r" | "\n": the line has ended, but an LF now is part of its end
        self.first_line = True  # "\xef" | "\xbb\xbfdata: a\n": a BOM is data anywhere else
        self.type = ""  # "event type buffer"
        self.data: list[str] = []  # "data buffer", one entry for each data line; []: there is none
        self.id = ""  # "last event ID buffer"
        self.ended_bytes = 0  # size of the fields that this event has so far

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that chunk completes.

        Raises EventTooLarge at an event that is too large. If this chunk has completed events before that
        one, return them and drop the rest of the chunk; the next call with bytes, or close(), raises.
        The size is looked at after each piece of a line, not once a chunk. An empty chunk changes nothing.
        """
        events: list[Event] = []
        if not chunk:
            return events
        if self.after_cr:  # https://github.com/rexxars/eventsource-parser/issues/17
            chunk = chunk.removeprefix(b"\n")
        self.after_cr = chunk.endswith(b"\r")
        for i, piece in enumerate(LINE_END.split(chunk)):
            if i > 0 and (event := self._end_line()):  # a line end stands between two pieces
                events.append(event)
            self.line += piece
            if self._event_bytes() > self.max_event_bytes:
                break
        if not events:
            self._check_size()
        return events

    def close(self) -> None:
        """End the stream; raises Truncated if anything but whole comments follows the last blank line.

        "(If the file ends in the middle of an event, before the final empty line, the incomplete event is not
        dispatched.)" Nor is it a clean end: https://github.com/NousResearch/hermes-agent/pull/42314
        """
        self._check_size()
        if n := self._event_bytes():
            raise Truncated(f"expected a blank line before the stream ends, got {n} bytes of an open event")

    def _event_bytes(self) -> int:
        return self.ended_bytes + len(self.line)

    def _check_size(self) -> None:
        if self._event_bytes() > self.max_event_bytes:
            raise EventTooLarge(f"expected at most {self.max_event_bytes} bytes an event")

    def _end_line(self) -> Event | None:
        """Process self.line, now that it is whole; return the event if this was its blank line."""
        line = bytes(self.line)
        self.line.clear()
        if self.first_line:  # "strips one leading UTF-8 Byte Order Mark (BOM), if any"
            line = line.removeprefix(BOM)
            self.first_line = False
        if not line:
            return self._dispatch()
        # "If the line starts with a U+003A COLON character (:)": "Ignore the line."
        if not line.startswith(b":"):
            self.ended_bytes += len(line)
            # Always UTF-8, not the headers' charset. No character holds a line end, so a line can be decoded
            # alone; a chunk cannot: https://github.com/mpetazzoni/sseclient/issues/8
            name, _, value = line.decode("utf-8", "replace").partition(":")
            self._process_field(name, value.removeprefix(" "))  # one space: "  x" is " x"
        return None

    def _process_field(self, name: str, value: str) -> None:
        if name == "data":
            self.data.append(value)
        elif name == "event":
            self.type = value
        elif name == "id" and "\0" not in value:  # "If the field value does not contain U+0000 NULL"
            self.id = value
        # "Otherwise: The field is ignored."

    def _dispatch(self) -> Event | None:
        # "If the data buffer is an empty string, set the data buffer and the event type buffer to the empty
        # string and return." An id is not data: https://github.com/florimondmanca/httpx-sse/issues/35
        event = None
        if self.data:
            event = Event(self.type or "message", "\n".join(self.data), self.id)
        self.type = ""  # self.id stays: "The buffer does not get reset"
        self.data = []
        self.ended_bytes = 0
        return event


# --- Writer -------------------------------------------------------------------------------------------------


def encoded(obj: Any) -> Encoded:
    return Encoded(dumps(obj))


def data(frame: bytes) -> str:
    """Return the data of a frame that encode() has made."""
    _, _, line = frame.partition(b"data: ")
    return line.removesuffix(b"\n\n").decode()


def is_object(arguments: str) -> bool:
    """Return whether this is the text of a JSON object, which the arguments of a function must be."""
    try:
        return isinstance(loads(arguments, "replace"), dict)
    except ValueError:
        return False
