"""One stream: bytes to frames, frames to events, events to what they say and to what is wrong with them.

    bytes --frames_of()--> Frame, ... --events_of()--> event, ...
    bytes --read()--> Capture        [event, ...] --captured()--> Capture
    Capture --violations()--> what is wrong with it
    response --of_response()--> Answer        [chunk, ...] --of_chunks()--> Answer

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html for the frames, schema.py for types.

Rules of this file:
1. All of it is read, however wrong: the rules say what is wrong, and need to see it.
2. `Capture.events` has no member of another type than the API's: a rule that reads one need not ask again.
3. A rule raises for no stream, whatever it holds, and says little of what another rule forbids.
4. An event's number is its place in the recording, 0 the first: its `sequence_number`, if that is right.
5. An Answer has the words of neither API, and is the same plain or streamed.

Not here: the rules on one stream (frames.py, events.py, chunks.py), who records it (report.py, peer.py).
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from audit.rules import OF_STREAMS, RULES, NotApplicable
from audit.schema import Faults, Json, printable, shortened, typed, without

EVENTS = {"responses": "event", "chat": "chunk"}  # kind of a stream -> what schema.py calls its events

FRAME = re.compile(rb".*?(?>\r\n|\n|\r)(?:\r\n|\n|\r)", re.DOTALL)  # it ends with a blank line
LINE_END = re.compile("\r\n|\n|\r")
BOM = b"\xef\xbb\xbf"
DONE = "[DONE]"


class Frame(NamedTuple):
    number: int  # of its event; a frame without one has the number of the next event
    raw: bytes
    type: str  # "message" if the frame names none
    data: str | None  # None: without data it is not an event
    id: str  # the last one that the stream has set
    fault: str = ""  # of bytes that are no whole frame: they end the stream


class Capture(NamedTuple):
    kind: str  # "responses" or "chat"
    frames: list[Frame]  # [] if only the events are known
    raw: list[Json]  # the events as they came; {} for one that is not a JSON object
    events: list[Json]  # the same events without members of a wrong type


# --- bytes to events ----------------------------------------------------------------------------------------


def frames_of(pieces: Iterable[bytes]) -> Iterator[Frame]:
    """Yield the frames of a stream as its bytes come, but for those of comments alone."""
    unread = b""
    start = BOM
    last_id = ""
    number = 0
    for piece in pieces:
        unread += piece
        end = 0
        for match in FRAME.finditer(unread):
            raw = match[0].removeprefix(start)
            fields = fields_of(raw)
            if fields:
                event_type = fields.get("event", [""])[-1] or "message"
                data = "\n".join(fields["data"]) if "data" in fields else None
                last_id = [last_id, *(id_ for id_ in fields.get("id", ()) if "\0" not in id_)][-1]
                yield Frame(number, raw, event_type, data, last_id)
                number += data is not None
            start = b""
            end = match.end()
        unread = unread[end:]
    rest = unread.removeprefix(start)
    if fields_of(rest) or rest[-1:] not in (b"", b"\r", b"\n"):
        fault = f"expected a blank line before the stream ends, got {rest[-80:]!r}"
        yield Frame(number, rest, "", None, last_id, fault)


def fields_of(raw: bytes) -> dict[str, list[str]]:
    """Collect the values of a frame's lines by the name before the colon; a comment has none."""
    fields: dict[str, list[str]] = {}
    for line in LINE_END.split(raw.decode("utf-8", "replace")):
        name, _, value = line.partition(":")
        if name:
            fields.setdefault(name, []).append(value.removeprefix(" "))
    return fields


def events_of(pieces: Iterable[bytes]) -> Iterator[Json]:
    """Yield the events of a stream as its bytes come; one that breaks off ends: see the rule whole-frames."""
    with contextlib.suppress(EOFError):
        for frame in frames_of(pieces):
            if frame.data not in (None, DONE):
                yield parsed(frame.data or "")


def read(stream: bytes) -> Capture:
    """Read a recorded stream; raises NotApplicable if it is of neither kind."""
    return captured(events_of([stream]), stream)


def captured(raw: Iterable[Json], stream: bytes = b"") -> Capture:
    """Make a capture of events, and of their bytes if these are known; raises NotApplicable."""
    events = list(raw)
    kind = next(filter(None, map(kind_of, events)), "")
    if not kind:
        # Most often it is an error's body, which says more than we can.
        beginning = printable(stream[:400].decode(errors="replace"))
        expected = "server-sent events of a Responses stream or of chat completion chunks"
        got = f"{len(events)} events of neither: {beginning or 'nothing'}"
        raise NotApplicable(f"expected {expected}, got {got}")
    return Capture(kind, [*frames_of([stream])], events, [typed(event, EVENTS[kind], []) for event in events])


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


def changes(objects: Iterable[Json], may_not: Callable[[str], bool]) -> Faults:
    """Find the members that change from the first object on, of those that may not; each event has one."""
    first: Json = {}
    for number, value in enumerate(objects):
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
    counts = usage or {}
    n_prompt, n_output, n_total = (counts.get(f"{side}_tokens", -1) for side in (prompt, output, "total"))
    details = [counts.get(f"{side}_tokens_details", {}) for side in (prompt, output)]
    unknown = -1 if prompt == "input" else 0  # chat completions need no details
    n_cached = details[0].get("cached_tokens", unknown)
    n_reasoning = details[1].get("reasoning_tokens", unknown)
    shown = shortened(json.dumps(usage), 200)
    if min(n_prompt, n_output, n_total, n_cached, n_reasoning) < 0:
        yield number, f"expected all counts, got {shown}"
    elif not (n_cached <= n_prompt > 0 and n_reasoning <= n_output and n_total == n_prompt + n_output):
        yield number, f"expected counts that agree with each other, got {shown}"


# --- what is wrong with a stream ----------------------------------------------------------------------------


class Violation(NamedTuple):
    event: int  # its number
    rule: str  # key of RULES
    message: str
    link: str


def violations(stream: Capture | Iterable[Json], names: Iterable[str] = RULES) -> list[Violation]:
    """Find what is wrong with a stream, in its order; only the rules on one stream have something to say."""
    capture = stream if isinstance(stream, Capture) else captured(stream)
    found: list[Violation] = []
    for rule in map(RULES.__getitem__, names):
        if rule.group in OF_STREAMS and capture.kind in rule.profiles.split():
            found += [Violation(number, rule.name, text, rule.link) for number, text in rule.check(capture)]
    return sorted(found)


# --- what an answer says ------------------------------------------------------------------------------------

CALLS = ("function_call", "custom_tool_call")
ENDS = {"max_output_tokens": "length", "completed": "stop"}
# Members that differ from one time to the next, and those that items need not have.
VOLATILE = ("id", "call_id", "status", "encrypted_content", "logprobs")


@dataclass
class Answer:
    end: str = ""  # stop, length, tool_calls, failed, ...: as chat completions call it
    text: str = ""
    tokens: str = ""  # of the logprobs
    calls: dict[int, Json] = field(default_factory=dict)  # with a name and arguments; of a response its items
    response: Json = field(default_factory=dict)  # as it came; of a completion the chunk with the usage

    @property
    def usage(self) -> Json:
        return dict(self.response.get("usage") or {})

    @property
    def n_prompt(self) -> int:
        return self.counts.get("input_tokens", self.counts.get("prompt_tokens", 0))

    @property
    def n_output(self) -> int:
        return self.counts.get("output_tokens", self.counts.get("completion_tokens", 0))

    @property
    def counts(self) -> dict[str, int]:
        return {name: n for name, n in self.usage.items() if isinstance(n, int)}

    @property
    def names(self) -> list[str]:
        """Those of the tools that are called."""
        return [call["name"] for call in self.calls.values()]

    @property
    def outline(self) -> Json:
        """What is said, without ids and times."""
        if "output" not in self.response:
            return {"end": self.end, "text": self.text, "calls": self.calls}
        output, error = (without(self.response.get(name), *VOLATILE) for name in ("output", "error"))
        return {"end": self.end, "usage": self.counts, "output": output, "error": error}

    def items(self, type_: str) -> list[Json]:
        return [item for item in self.response.get("output") or () if item.get("type") == type_]


def of_response(response: Json) -> Answer:
    answer = Answer(response=response)
    for item in response.get("output") or ():
        if item.get("type") in CALLS:
            answer.calls[len(answer.calls)] = item
    for message in answer.items("message"):
        for part in message.get("content") or ():
            answer.text += part.get("text") or ""
            answer.tokens += tokens_of(part.get("logprobs"))
    reason = (response.get("incomplete_details") or {}).get("reason") or response.get("status")
    is_called = answer.calls and reason == "completed"
    answer.end = "tool_calls" if is_called else ENDS.get(str(reason), str(reason))
    return answer


def choices_of(chunks: Iterable[Json]) -> dict[int, Answer]:
    """Add up the choices of chunks."""
    answers: dict[int, Answer] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            answer = answers.setdefault(choice.get("index", 0), Answer())
            said = choice.get("delta") or choice.get("message") or {}
            answer.text += said.get("content") or ""
            answer.tokens += tokens_of((choice.get("logprobs") or {}).get("content"))
            answer.end = choice.get("finish_reason") or answer.end
            for place, more in enumerate(said.get("tool_calls") or ()):
                call = answer.calls.setdefault(more.get("index", place), {"name": "", "arguments": ""})
                for member in call:
                    call[member] += (more.get("function") or {}).get(member) or ""
    return answers


def of_chunks(chunks: list[Json]) -> Answer:
    """Return the first choice, with the usage of all."""
    answer = choices_of(chunks).get(0, Answer())
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    answer.response = [{}, *chunks[-1:], *with_usage][-1]
    return answer


def tokens_of(logprobs: Iterable[Json] | None) -> str:
    return "".join(str(entry.get("token")) for entry in logprobs or ())
