"""What a model says: the vocabulary of its output, and the parser that finds it in the pieces.

    Piece --Parser.feed()--> [Delta | Call | Arguments | Close, ...] --Parser.close()--> the rest

Authority: the chat templates of the models (`<think>` of Qwen3, DeepSeek-R1, SmolLM3; `<tool_call>` of
Hermes and Qwen).

Rules of this file:
1. Every piece is seen, one after another: how many tokens an engine step held cannot be seen from outside.
2. A marker that is one token of the vocabulary is matched as that token, so text that merely spells it
   opens nothing. Only where the vocabulary has no such token is the marker looked for in the text.
3. What may still become a marker or a stop string is held, no more; it leaves by the same path as the rest.
4. Newlines beside a marker are the template's, not the model's, and are dropped with it.
5. Stop strings are looked for where the markers are gone, in what the user reads, never in reasoning.
6. Malformed output is text. Nothing here raises on what a model says.

Not here: token ids (tokenizer.py), item and call ids (responses.py), when generation stops (worker.py).
"""

import json
from collections.abc import Collection, Iterator, Mapping
from itertools import takewhile
from typing import Literal, NamedTuple, cast

# --- vocabulary ---------------------------------------------------------------------------------------------

Channel = Literal[
    "analysis", "commentary", "final"
]  # harmony's words: reasoning, asides to the user, the answer


class TokenLogprob(NamedTuple):
    """One sampled token and how likely it was."""

    token: str  # its text; U+FFFD where its bytes are no whole character
    logprob: float
    bytes: bytes
    top: tuple["TokenLogprob", ...] = ()


class Piece(NamedTuple):
    """What one token adds to the text."""

    text: str  # whole characters; "" for control tokens
    special: str = ""  # the spelling of the added token that this is, "" for ordinary text
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens that this text completes

    def cut(self, n: int) -> tuple["Piece", "Piece"]:
        """Split behind `n` characters; a token's logprob goes with its first character."""
        return Piece(self.text[:n], "", self.logprobs), Piece(self.text[n:])


class Delta(NamedTuple):
    """A piece of output on a channel."""

    channel: Channel
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Call(NamedTuple):
    """A function call begins; its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """More of the open call's arguments, as the model wrote them."""

    text: str


class Close(NamedTuple):
    """The open item ends here: what comes next is another one, even on the same channel."""


Output = Delta | Call | Arguments | Close


class Usage(NamedTuple):
    """Tokens in and out; every sampled token counts, a stop token and a marker too."""

    input_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int = 0


class Accepted(NamedTuple):
    """The first thing a worker says of a request: it cannot be refused any more."""


class Finish(NamedTuple):
    """The last thing a worker says of a request."""

    reason: Literal["stop", "length", "content_filter", "failed", "cancelled"]
    usage: Usage | None = None
    message: str = ""  # for failed: what went wrong
    code: str = "server_error"


# --- markers ------------------------------------------------------------------------------------------------

State = Literal["analysis", "commentary", "final", "call"]

# fmt: off
#  (state now,   marker seen)        state next
TRANSITIONS: dict[tuple[State, str], State] = {
    ("final",    "<think>"):         "analysis",
    ("analysis", "<think>"):         "analysis",
    ("analysis", "</think>"):        "final",
    ("final",    "</think>"):        "final",     # a stray one is markup all the same
    ("final",    "<tool_call>"):     "call",
    ("analysis", "<tool_call>"):     "call",      # it ends the reasoning: vllm-project/vllm#43221
    ("call",     "<tool_call>"):     "call",      # the call before it was never closed
    ("call",     "</tool_call>"):    "final",
    ("call",     "<think>"):         "analysis",  # nor was this one
    ("call",     "</think>"):        "final",
    ("final",    "</tool_call>"):    "final",
    ("analysis", "</tool_call>"):    "analysis",
}
# fmt: on

REASONING_MARKERS = ("<think>", "</think>")
TOOL_MARKERS = ("<tool_call>", "</tool_call>")


def dialect(added: Collection[str], template: str, tools: bool) -> dict[str, bool]:
    """The markers this model may write in this response, each with: is it a single token of the vocabulary?

    A model is taken to write the markers that its vocabulary or its chat template knows; calls only when it
    was offered tools.
    """
    known = [m for m in REASONING_MARKERS if m in added or m in template]
    return {m: m in added for m in (*known, *(TOOL_MARKERS if tools else ()))}


def opening_state(prompt: str, markers: Mapping[str, bool]) -> State:
    """The state in which generation begins: some templates open the reasoning themselves.

    The prompt's tail decides, never text further up: https://github.com/vllm-project/vllm/pull/34779
    """
    return "analysis" if "<think>" in markers and prompt.rstrip().endswith("<think>") else "final"


# --- finding strings in text that arrives in pieces ---------------------------------------------------------


class Finder:
    """Finds `needles` in a text that comes in pieces, holding back only what may still become one.

    Where several match, the one that is complete first wins, then the longest: so cuts between pieces cannot
    be seen.
    """

    def __init__(self, needles: Collection[str]) -> None:
        self._needles = tuple(needles)
        self._pieces: list[Piece] = []
        self._text = ""  # of those pieces: always shorter than the longest needle between two calls

    def feed(self, piece: Piece) -> Iterator[Piece | str]:
        """The text that is certain, as pieces, and each needle found, as a str."""
        self._pieces.append(piece)
        self._text += piece.text
        while found := min((m for n in self._needles if (m := self._match(n))), default=None):
            end, start, needle = found
            yield from self._take(start)
            list(self._take(end - start))
            yield needle
        yield from self._take(len(self._text) - self._ambiguous())

    def flush(self) -> Iterator[Piece]:
        """What was held: it became nothing."""
        return self._take(len(self._text))

    def _match(self, needle: str) -> tuple[int, int, str] | None:
        start = self._text.find(needle)
        return (start + len(needle), start, needle) if start >= 0 else None

    def _ambiguous(self) -> int:
        """Length of the longest end of the text that is a proper beginning of a needle."""
        ends = (
            k
            for n in self._needles
            for k in range(min(len(n) - 1, len(self._text)), 0, -1)
            if self._text.endswith(n[:k])
        )
        return max(ends, default=0)

    def _take(self, n: int) -> Iterator[Piece]:
        self._text = self._text[n:]
        while n > 0:
            head, rest = self._pieces.pop(0).cut(n)
            n -= len(head.text)
            if rest.text:
                self._pieces.insert(0, rest)
            yield head


# --- Hermes calls -------------------------------------------------------------------------------------------


KEYS = {"name": "name", "arguments": "arguments", "parameters": "arguments"}  # Llama 3's word


class CallScanner:
    """`{"name": NAME, "arguments": VALUE}` by character: NAME announces the call, VALUE leaves as written.

    Nothing is completed or repaired, so what was sent never has to be taken back:
    https://github.com/vllm-project/vllm/issues/10395
    """

    def __init__(self) -> None:
        self.raw: list[str] = []  # the body so far, should it turn out to be no call
        self.name: str | None = None
        self.malformed = False
        self._expect: Literal["open", "key", "colon", "value", "end"] = "open"
        self._key = ""  # the one being read, as KEYS has it
        self._seen: set[str] = set()  # keys: of two that are the same the first counts, for it has left
        self._value: list[str] = []  # of the member being read, and of arguments that come before the name
        self._arguments: str | None = None  # complete arguments that wait for the name
        self._sent = False  # some arguments have left
        self._depth = 0  # of brackets inside the value
        self.in_string = self._escaped = False

    def feed(self, text: str) -> Iterator[Call | Arguments]:
        self.raw.append(text)
        for char in text:
            yield from self._char(char)
        yield from self._stream()

    def _char(self, c: str) -> Iterator[Call | Arguments]:
        if self.in_string or (self._expect == "value" and self._value):
            bare = not self.in_string and not self._depth  # a number, true, false, null
            if bare and (c in ",}" or c.isspace()):
                yield from self._member()
                yield from self._char(c)
            else:
                yield from self._inside(c)
        elif self.malformed or c.isspace() or self._expect == "end":
            pass  # what follows the object is dropped: it was a call already
        elif self._expect in ("key", "value") and (self._expect == "value" or c == '"'):
            yield from self._inside(c)
        elif (self._expect, c) == ("open", "{"):
            self._expect = "key"
        elif (self._expect, c) == ("colon", ":"):
            self._expect = "value"
        elif (self._expect, c) == ("key", "}"):
            yield from self._end()
        elif (self._expect, c) != ("key", ","):
            self.malformed = True

    def _inside(self, c: str) -> Iterator[Call | Arguments]:
        """A character of a key or a value."""
        self._value.append(c)
        if self.in_string:
            self.in_string = self._escaped or c != '"'
            self._escaped = c == "\\" and not self._escaped
            closed = not self.in_string
        else:
            self.in_string = c == '"'
            self._depth += (c in "{[") - (c in "}]")
            closed = c in "}]"
        if closed and self._depth <= 0:
            yield from self._member()

    def _member(self) -> Iterator[Call | Arguments]:
        """A key or a value is complete."""
        is_key, streams = self._expect == "key", self._streams()
        written = "" if streams else "".join(self._value)
        if streams:
            yield from self._stream()
        self._value, self._depth = [], 0
        self._expect = "colon" if is_key else "key"
        if is_key:
            key = KEYS.get(_string(written) or "", "")
            self._key = "" if key in self._seen else key
            self._seen.add(key)
        elif self._key == "name":
            self.name = _string(written) or None
            self.malformed = self.name is None
            if self.name is not None:
                yield Call(self.name)
                yield from self._late()
        elif self._key == "arguments" and written:
            text = _string(written)  # some models write the object into a string
            self._arguments = "{}" if written == "null" else written if text is None else text
            yield from self._late()

    def _late(self) -> Iterator[Call | Arguments]:
        """Arguments that could not be streamed: they came before the name, or as a string."""
        if self.name is not None and self._arguments is not None:
            self._sent = True
            yield Arguments(self._arguments)
            self._arguments = None

    def _streams(self) -> bool:
        """Is an object being read that can leave as it comes?"""
        here = self._expect == "value" and self._key == "arguments" and self.name is not None
        return here and (self._sent or self._value[:1] == ["{"])

    def _stream(self) -> Iterator[Call | Arguments]:
        if self._streams() and (text := "".join(self._value)):
            self._sent = True
            self._value = [""]  # not empty: the value goes on
            yield Arguments(text)

    def _end(self) -> Iterator[Call | Arguments]:
        self._expect = "end"
        self.malformed = self.name is None
        if self.name is not None and not self._sent:
            yield Arguments("{}")


def _string(written: str) -> str | None:
    """The value of a JSON string literal, None if it is none, or no text: "\\ud800" is half a character."""
    try:
        value = json.loads(written, strict=False)
        return value if isinstance(value, str) and value.encode() else None
    except (ValueError, RecursionError):
        return None


# --- the parser ---------------------------------------------------------------------------------------------


class Parser:
    """Pieces of one response to what they mean.

    `markers` is what dialect() found; `state` what opening_state() found; `after_marker` says that the prompt
    ends with a marker, so that leading newlines belong to it. `one_call` ends the response behind the first
    call (parallel_tool_calls=false). `stopped` turns True when a stop string or the one call is complete:
    what is fed afterwards is dropped.
    """

    def __init__(
        self,
        markers: Mapping[str, bool],
        state: State = "final",
        after_marker: bool = False,
        stop: Collection[str] = (),
        one_call: bool = False,
    ) -> None:
        self.state: State = state
        self.stopped = False
        self._tokens = {m for m, is_token in markers.items() if is_token}
        self._finder = Finder([m for m, is_token in markers.items() if not is_token])
        self._stop = Finder(stop)
        self._one_call = one_call
        self._leading = after_marker or state == "analysis"  # newlines that come now are a marker's
        self._visible = False  # this run of text has shown something
        self._blank: list[Piece] = []  # whitespace that is dropped if a marker follows
        self._open: Literal["", "text", "call"] = ""  # what a Close would end
        self._call = CallScanner()
        self._origin: State = "final"  # where a malformed call returns to
        self._fallen = False  # in the rest of a malformed call, whose closing marker is text too

    def feed(self, piece: Piece) -> list[Output]:
        return self._until_stop(self._feed(piece))

    def close(self, cut: bool) -> list[Output]:
        """The end of the output; `cut` says that the model was interrupted, not done."""
        return self._until_stop(self._close(cut))

    def _until_stop(self, outputs: Iterator[Output]) -> list[Output]:
        kept: list[Output] = []
        for output in takewhile(lambda _: not self.stopped, outputs):
            kept.append(output)
            called = self._open == "call" and isinstance(output, Close)
            self.stopped = called and self._one_call
        return kept

    def _feed(self, piece: Piece) -> Iterator[Output]:
        if piece.special in self._tokens:
            yield from self._flush_finder()
            yield from self._marker(piece.special)
        elif piece.text:
            for found in self._finder.feed(piece):
                yield from self._marker(found) if isinstance(found, str) else self._text(found)

    def _flush_finder(self) -> Iterator[Output]:
        for piece in self._finder.flush():
            yield from self._text(piece)

    def _close(self, cut: bool) -> Iterator[Output]:
        yield from self._flush_finder()
        if self.state == "call" and not cut:
            yield from self._not_a_call()
        if self.state != "call":
            yield from self._flush_stop()
            yield from self._deltas(self._blank)

    def _marker(self, marker: str) -> Iterator[Output]:
        if self.state == "call" and self._call.in_string and marker in REASONING_MARKERS:
            yield from self._text(Piece(marker))  # an argument about markers
            return
        if self.state == "call":
            yield from self._not_a_call()
        if self._fallen and marker == "</tool_call>":
            yield from self._text(Piece(marker))
            self._fallen = False
            return
        yield from self._flush_stop()
        following = TRANSITIONS[self.state, marker]
        if self.state == "call" or following != "call":  # before a call it is too early: it may be none
            if self._open:
                yield Close()
            self._open, self._blank, self._visible, self._leading = "", [], False, True
        if following == "call":
            self._origin = "final" if self.state == "call" else self.state
            self._call = CallScanner()
        self.state, self._fallen = following, False

    def _text(self, piece: Piece) -> Iterator[Output]:
        if self.state == "call":
            for output in self._call.feed(piece.text):
                self._open, self._blank = "call", []
                yield output
            if self._call.malformed:
                yield from self._not_a_call()
        elif rest := self._without_leading(piece):
            yield from self._shown(rest) if self.state == "analysis" else self._read(rest)

    def _not_a_call(self) -> Iterator[Output]:
        """A body that announced no call is text, markers and all, on the channel it came from."""
        if self._open != "call":
            self.state, self._leading, self._fallen = self._origin, False, True
            yield from self._text(Piece("<tool_call>" + "".join(self._call.raw)))

    def _without_leading(self, piece: Piece) -> Piece | None:
        if self._leading:
            piece = piece._replace(text=piece.text.lstrip("\n"))
            self._leading = not piece.text
        return piece if piece.text else None

    def _read(self, piece: Piece) -> Iterator[Output]:
        """What the user will read, up to a stop string."""
        for found in self._stop.feed(piece):
            if isinstance(found, str):
                yield from self._deltas(self._blank)
                self.stopped = True
                return
            yield from self._shown(found)

    def _flush_stop(self) -> Iterator[Output]:
        """What was held did not become a stop string."""
        for piece in self._stop.flush():
            yield from self._shown(piece)

    def _shown(self, piece: Piece) -> Iterator[Output]:
        """Hold what may stand before a marker: newlines behind text, any whitespace before it."""
        solid = piece.text.rstrip("\n") if self._visible or piece.text.strip() else ""
        if not solid:
            self._blank.append(piece)
            return
        head, tail = piece.cut(len(solid))
        yield from self._deltas([*self._blank, head])
        self._visible, self._blank = True, [tail] if tail.text else []

    def _deltas(self, pieces: list[Piece]) -> Iterator[Output]:
        for piece in pieces:
            self._open = "text"
            yield Delta(cast(Channel, self.state), piece.text, piece.logprobs)
