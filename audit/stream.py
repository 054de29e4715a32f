"""One stream: bytes to frames, frames to events, events to what they say.

    bytes --frames_of()--> Frame, ... --events_of()--> event, ...
    bytes --read()--> Capture        [event, ...] --captured()--> Capture
    response --of_response()--> Answer        [chunk, ...] --of_chunks()--> Answer

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html for the frames, schema.py for types.

Rules of this file:
1. All of it is read, however wrong: the rules say what is wrong, and need to see it.
2. `Capture.events` has no member of another type than the API's: a rule that reads one need not ask again.
3. A rule raises for no stream, whatever it holds, and says little of what another rule forbids.
4. An event's number is its place in the recording, 0 the first: its `sequence_number`, if that is right.
5. An Answer has the words of neither API, and is the same plain or streamed.

Not here: the rules on one stream (frames.py, events.py, chunks.py; recording.py asks them all), who records
it (__main__.py, peer.py).
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from audit.rules import NotApplicable
from audit.schema import Faults, Json, Typed, object_in, printable, shortened, without

EVENTS = {"responses": "event", "chat": "chunk"}  # kind of a stream -> what schema.py calls its events
MARKS = {"responses": '"type": "response.', "chat": '"choices": '}  # kind of a stream -> a text in it

FRAME_END = re.compile(rb"(?>\r\n|\n|\r)(?:\r\n|\n|\r)")  # the end of a line, and a blank one
LINE_END = re.compile("\r\n|\n|\r")
BOM = b"\xef\xbb\xbf"
DONE = "[DONE]"


class Frame(NamedTuple):
    number: int  # of its event; a frame without one has the number of the next event
    raw: bytes
    type: str  # "message" if the frame names none
    data: str | None  # None: without data it is not an event
    value: Json  # the object that the data is; {} for anything else
    fault: str  # of bytes that are no whole frame: they end the stream


class Capture(NamedTuple):
    kind: str  # "responses" or "chat"
    frames: list[Frame]  # [] if only the events are known
    raw: list[Json]  # the events as they came; {} for one that is not a JSON object
    events: list[tuple[int, Typed]]  # (number, the same event without members of a wrong type)


# --- bytes to events ----------------------------------------------------------------------------------------


def frames_of(pieces: Iterable[bytes]) -> Iterator[Frame]:
    """Yield the frames of a stream as its bytes come."""
    unread = b""
    start = BOM
    number = 0
    for piece in pieces:
        unread += piece
        end = 0
        for match in FRAME_END.finditer(unread):
            frame = frame_of(number, unread[end : match.end()].removeprefix(start))
            yield frame
            number += frame.data is not None
            start = b""
            end = match.end()
        unread = unread[end:]
    rest = unread.removeprefix(start)
    if not re.fullmatch(rb"(?:(?::[^\r\n]*)?[\r\n])*", rest):  # comments and blank lines
        yield Frame(
            number, rest, "", None, {}, f"expected a blank line before the end, got {shortened(rest)}"
        )


def frame_of(number: int, raw: bytes) -> Frame:
    fields: dict[str, list[str]] = {"event": ["message"]}  # their values by the name before the colon
    for line in LINE_END.split(raw.decode("utf-8", "replace")):
        name, _, value = line.partition(":")
        fields.setdefault(name, []).append(value.removeprefix(" "))
    data = "\n".join(fields["data"]) if "data" in fields else None
    return Frame(number, raw, fields["event"][-1] or "message", data, parsed(data or ""), "")


def events_of(pieces: Iterable[bytes]) -> Iterator[Json]:
    """Yield the events of a stream as its bytes come; one that breaks off ends: see the rule whole-frames."""
    with contextlib.suppress(EOFError):
        for frame in frames_of(pieces):
            if frame.data not in (None, DONE):
                yield frame.value


@functools.lru_cache(32)  # each rule on streams reads the same ones
def read(stream: bytes) -> Capture:
    """Read a recorded stream; raises NotApplicable if it is of neither kind. Do not change the result."""
    return captured([*events_of([stream])], stream)


def captured(raw: list[Json], stream: bytes = b"") -> Capture:
    """Make a capture of events, and of their bytes if these are known; raises NotApplicable."""
    kind = next((kind for kind, mark in MARKS.items() if mark in json.dumps(raw)), "")
    if not kind:
        # Most often it is an error's body, which says more than we can.
        got = printable(stream[:400].decode(errors="replace")) or "nothing"
        raise NotApplicable(
            f"expected server-sent events of a Responses or chat completion stream, got {got}"
        )
    events = []
    for event in raw:
        # Azure tells of its content filter in chunks of their own, which say nothing of the answer.
        if event.get("object") == "" and "content_filter_results" in json.dumps(event):
            event = {}
        # OpenAI's streams have the members of an error in an object of their own.
        events.append(Typed(object_in(event, "error") | event, EVENTS[kind]))
    return Capture(kind, [*frames_of([stream])], raw, [*enumerate(events)])


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


def agreed(number: int, what: str, expected: Any, got: Any) -> Faults:
    """Expect of an event what was said before; a member that is null may be absent."""
    if without(got) != without(expected):
        yield number, f"expected {what} {shortened(expected)}, got {shortened(got)}"


def changes(objects: Iterable[Json]) -> Faults:
    """Find the members that change from the first object on; each event has one of the objects, or {}."""
    first: Json = {}
    for number, value in enumerate(objects):
        first = first or value
        for name in first.keys() & value.keys():
            yield from agreed(number, name, first[name], value[name])


MARKUP = re.compile(r"<\|\w+\|>|</?think>|</?tool_calls?>|\[TOOL_CALLS\]")


def is_object(text: str) -> bool:
    """True for the JSON text of an object, as the arguments of a call are."""
    return isinstance(loads(text), dict)


def usage_faults(number: int, usage: Typed, prompt: str, output: str) -> Faults:
    """Find what is wrong with the usage of an event; the API calls its two sides `prompt` and `output`."""
    n_prompt, n_output, n_total = (usage.get(f"{side}_tokens", -1) for side in (prompt, output, "total"))
    unknown = -1 if prompt == "input" else 0  # chat completions need no details
    n_cached = usage[f"{prompt}_tokens_details"].get("cached_tokens", unknown)
    n_reasoning = usage[f"{output}_tokens_details"].get("reasoning_tokens", unknown)
    parts_fit = 0 <= n_cached <= n_prompt and 0 <= n_reasoning <= n_output
    if not parts_fit or n_prompt == 0 or n_total != n_prompt + n_output:
        yield number, f"expected all counts, and that they agree, got {shortened(usage)}"


# --- what an answer says ------------------------------------------------------------------------------------

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
    def usage(self) -> Typed:
        """That of a response or of a completion: the members have two names."""
        usage: Typed = Typed(self.response, "response").usage
        return usage

    @property
    def n_prompt(self) -> int:
        """Count the tokens of the prompt; the Messages API counts cached ones apart."""
        uncached = self.usage.input_tokens or self.usage.prompt_tokens or 0
        return uncached + (self.usage.cache_read_input_tokens or 0)

    @property
    def n_output(self) -> int:
        return self.usage.output_tokens or self.usage.completion_tokens or 0

    @property
    def counts(self) -> Json:
        return {"prompt": self.n_prompt, "output": self.n_output}

    @property
    def names(self) -> set[str]:
        """Those of the tools that are called."""
        return {call["name"] for call in self.calls.values()}

    @property
    def output(self) -> list[Json]:
        return self.response.get("output") or []

    def items(self, *types: str) -> list[Json]:
        return [item for item in self.output if item.get("type") in types]

    @property
    def outline(self) -> Json:
        """What is said, without ids and times."""
        said: Json = {"end": self.end, "text": self.text, "calls": self.calls, "output": self.output}
        if "output" in self.response:
            said |= {"usage": self.counts, "error": self.response.get("error")}
        return dict(without(said, *VOLATILE))


def of_response(response: Json) -> Answer:
    answer = Answer(response=response)
    answer.calls = dict(enumerate(answer.items("function_call", "custom_tool_call")))
    for item in Typed(response, "response").output:
        for part in item.content if item.type == "message" else ():
            answer.text += part.text
            answer.tokens += tokens_of(part.logprobs)
    reason = (response.get("incomplete_details") or response).get("reason", response.get("status"))
    answer.end = ENDS.get(str(reason), str(reason))
    if answer.calls and answer.end == "stop":
        answer.end = "tool_calls"
    return answer


def choices_of(chunks: Iterable[Json]) -> dict[int, Answer]:
    """Add up the choices of chunks."""
    answers: dict[int, Answer] = {}
    for chunk in chunks:
        for choice in Typed(chunk, "chunk").choices:
            answer = answers.setdefault(choice.index or 0, Answer())
            said = choice.delta or choice.message
            answer.text += said.content or ""
            answer.tokens += tokens_of(choice.logprobs.content)
            answer.end = choice.finish_reason or answer.end
            for place, more in enumerate(said.tool_calls):
                call = answer.calls.setdefault(more.get("index", place), {"name": "", "arguments": ""})
                for member in call:
                    call[member] += more.function[member] or ""
    return answers


def of_chunks(chunks: list[Json]) -> Answer:
    """Return the first choice, with the usage of all."""
    answer = choices_of(chunks).get(0, Answer())
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    answer.response = [{}, *chunks[-1:], *with_usage][-1]
    return answer


def tokens_of(logprobs: list[Json]) -> str:
    return "".join(str(entry.get("token")) for entry in logprobs)
