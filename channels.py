"""What a model says: the vocabulary of its output, and the parser that finds it in the pieces.

    Piece --Parser.feed()--> [Delta | Call | Arguments | Close, ...] --Parser.close()--> the rest

Authority: the chat templates of the models; what each family writes is a row of dialects/families.py.

Rules of this file:
1. Every piece is seen, one after another: how many tokens an engine step held cannot be seen from outside.
2. A marker that is one token of the vocabulary is matched as that token, so text that merely spells it
   opens nothing. Only where the vocabulary has no such token is the marker looked for in the text.
3. What may still become a marker, a stop string, a call or a header is held, no more; it leaves by the same
   path as the rest.
4. Where the dialect trims, newlines beside a marker are the template's, not the model's, and go with it.
5. Stop strings are looked for where the markers are gone, in what the user reads, never in reasoning.
6. Malformed output is text, a header of its message is not. Nothing here raises on what a model says.

Not here: the markers (dialects/families.py), how a call is written between them (dialects/calls.py), token
ids (tokenizer.py), item and call ids (responses.py), when generation stops (worker.py).
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import takewhile
from typing import Any, Literal, NamedTuple, Protocol, cast

# --- vocabulary ---------------------------------------------------------------------------------------------

# harmony's words: reasoning, asides to the user, the answer; a refusal is one that only a relay tells apart
Channel = Literal["analysis", "commentary", "final", "refusal"]


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
    """A call begins; its arguments follow, or the input of a custom tool."""

    name: str
    custom: bool = False  # what follows, and the namespace, request/tools.py finds out
    namespace: str = ""


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


# --- dialects -----------------------------------------------------------------------------------------------

# Where the parser stands: in what is said, or before it. In "between" a message may begin; in "role" one has,
# in "header" it has gone on; its content has not begun.
State = Literal["analysis", "commentary", "final", "call", "between", "role", "header", "end"]
Next = State | Literal["content"]  # of this kind the header says which: a channel, or a call

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of the functions offered, by name


class Body(Protocol):
    """Reads what a call is written as between its markers."""

    @property
    def called(self) -> bool: ...  # the name has been said: it is a call now, whatever follows

    @property
    def malformed(self) -> bool: ...  # it will never be one

    @property
    def in_string(self) -> bool: ...  # of JSON, where a marker of reasoning is an argument's text

    def feed(self, piece: Piece) -> Iterator[Output]:
        """More of it; a marker that the dialect has no row for comes here too."""

    def end(self) -> Iterator[Output]:
        """The model is done with it."""


class Forms(NamedTuple):
    """How it is all written, for grammars: TEXT, NAME and ARGUMENTS stand for what is said."""

    thought: tuple[str, str]  # around the reasoning
    text: str  # the answer
    before: str | None  # text before calls; None: there is none
    call: str
    more: str | None  # between two calls; None: one is all
    calls: tuple[str, str] = ("", "")  # around all calls
    arguments: Literal["json", "xml"] = "json"


class Dialect(NamedTuple):
    """How a family of models marks what it says."""

    known_by: tuple[str, ...]  # what its chat templates hold, all of these
    transitions: Mapping[tuple[State | Literal["any"], str], Next]
    body: Callable[[Schemas], Body]
    forms: Forms
    header: Callable[[str], tuple[State, Body | None]] | None = None  # what follows this header
    start: State = "final"  # where an answer begins, unless the prompt ends with a marker
    reasoning: tuple[str, ...] = ()  # markers that not all models of the family know
    calls: tuple[str, ...] = ()  # markers that are used only where tools are offered
    closing: str = ""  # the one that ends a call; of a malformed call it is text too
    trims: bool = True  # newlines beside markers are the template's
    tokens: frozenset[str] = frozenset()  # the markers that are one token of the vocabulary

    @property
    def markers(self) -> frozenset[str]:
        return frozenset(marker for _, marker in self.transitions)

    def next(self, state: State, marker: str) -> Next | None:
        """Where the marker leads; None: it means nothing here."""
        return self.transitions.get((state, marker), self.transitions.get(("any", marker)))


# --- finding strings in text that arrives in pieces ---------------------------------------------------------


class Finder:
    """Finds `needles` in a text that comes in pieces, holding back only what may still become one.

    Where several match, the one that is complete first wins, then the longest: so cuts between pieces cannot
    be seen.
    """

    def __init__(self, needles: Collection[str]) -> None:
        self._needles = tuple(needles)
        firsts = "".join({re.escape(needle[0]) for needle in needles})
        self._begins = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._pieces: list[Piece] = []
        self._text = ""  # of those pieces: always shorter than the longest needle between two calls

    def feed(self, piece: Piece) -> Iterator[Piece | str]:
        """The text that is certain, as pieces, and each needle found, as a str."""
        if not self._text and not self._begins.search(piece.text):  # most pieces, and nothing to do
            yield piece
            return
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


# --- the parser ---------------------------------------------------------------------------------------------


UNSAID = ("between", "role", "header")  # states in which a message may begin, or has and has said nothing


class Parser:
    """Pieces of one response to what they mean.

    `state` and `after_marker` are what dialects.opening() found. `schemas` are of the functions offered.
    `one_call` ends the response behind the first call (parallel_tool_calls=false). `stopped` turns True when
    a stop string, the one call or the turn is complete: what is fed afterwards is dropped.
    """

    def __init__(
        self,
        dialect: Dialect,
        state: State = "final",
        after_marker: bool = False,
        stop: Collection[str] = (),
        one_call: bool = False,
        schemas: Schemas | None = None,
    ) -> None:
        self.state: State = state
        self.stopped = False
        self._dialect = dialect
        self._schemas = schemas or {}
        self._finder = Finder(dialect.markers - dialect.tokens)
        self._stop = Finder(stop)
        self._one_call = one_call
        self._leading = dialect.trims and after_marker  # newlines that come now are a marker's
        self._visible = False  # this run of text has shown something
        self._blank: list[Piece] = []  # whitespace that is dropped if a marker follows
        self._open: Literal["", "text", "call"] = ""  # what a Close would end
        self._header: list[Piece] = []  # of the message to come; in "between" it may turn out to be text
        self._body = dialect.body(self._schemas)
        self._opened_by = ""  # the marker of the call; some calls at the very beginning have none
        self._raw: list[Piece] = []  # the body so far, should it turn out to be no call
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
        if piece.special in self._dialect.tokens:
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
        yield from self._lost_header(cut)
        if self.state == "call" and not (cut and self._opened_by):
            yield from self._end_call()
        if self.state != "call":
            yield from self._flush_stop()
            yield from self._deltas(self._blank)

    # --- markers --------------------------------------------------------------------------------------------

    def _marker(self, marker: str) -> Iterator[Output]:
        if self._dialect.next(self.state, marker) not in ("header", "content"):
            yield from self._lost_header(cut=False)
        if self.state == "call":
            quoted = self._body.in_string and marker in self._dialect.reasoning  # an argument about markers
            if quoted or not self._dialect.next(self.state, marker):
                yield from self._to_body(Piece(marker, marker))
                return
            yield from self._end_call()
        if self._fallen and marker == self._dialect.closing:
            yield from self._text(Piece(marker))
            self._fallen = False
            return
        yield from self._flush_stop()
        following = self._dialect.next(self.state, marker) or self.state
        is_opening = following == "call" and marker in self._dialect.calls
        if self.state == "call" or not is_opening:  # before a call it is too early: it may be none
            if self._open:
                yield Close()
            self._open, self._blank, self._visible, self._leading = "", [], False, self._dialect.trims
        self._fallen = False
        if following == "content":
            yield from self._content()
        else:
            self._enter(following, marker)

    def _enter(self, state: State, marker: str) -> None:
        if state == "call":
            marked = marker in self._dialect.calls
            self._origin = self.state if marked and self.state != "call" else "final"
            self._opened_by = marker if marked else ""
            self._body, self._raw = self._dialect.body(self._schemas), []
        elif state == "header":
            self._header.append(Piece(" "))  # the marker keeps the words beside it apart
        self.state, self.stopped = state, self.stopped or state == "end"

    def _content(self) -> Iterator[Output]:
        """The header is complete, and says what its message is."""
        header = "".join(piece.text for piece in self._header)
        self._header = []
        assert self._dialect.header
        self.state, body = self._dialect.header(header)
        if body:
            self._body, self._opened_by = body, header  # which, unlike a call's own marker, is never text
            yield from self._to_body(Piece(""))  # the name leaves

    def _lost_header(self, cut: bool) -> Iterator[Output]:
        """A header without content: a recipient is called without arguments, stray text between two messages
        is text, all else is markup.
        """
        if self.state not in UNSAID:
            return
        if self.state != "between":
            if not cut:
                yield from self._content()
            return
        stray, self._header, self.state = self._header, [], "final"
        if any(piece.text.strip() for piece in stray):
            for piece in stray:
                yield from self._text(piece)

    # --- text -----------------------------------------------------------------------------------------------

    def _text(self, piece: Piece) -> Iterator[Output]:
        if self.state == "call":
            yield from self._to_body(piece)
        elif self.state in UNSAID:
            self._header.append(piece)
        elif rest := self._without_leading(piece):
            yield from self._shown(rest) if self.state == "analysis" else self._read(rest)

    def _to_body(self, piece: Piece) -> Iterator[Output]:
        if not self._body.called:
            self._raw.append(piece)
        yield from self._calling(self._body.feed(piece))
        if self._body.malformed:
            yield from self._not_a_call()

    def _end_call(self) -> Iterator[Output]:
        yield from self._calling(self._body.end())
        yield from self._not_a_call()

    def _calling(self, outputs: Iterator[Output]) -> Iterator[Output]:
        for output in outputs:
            self._open, self._blank = "call", []
            yield output

    def _not_a_call(self) -> Iterator[Output]:
        """A body that announced no call is text, markers and all, on the channel it came from."""
        if not self._body.called:
            self.state, self._fallen = self._origin, True
            for piece in (Piece(self._opened_by), *self._raw):
                yield from self._text(piece)

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
        if not self._dialect.trims:
            yield from self._deltas([piece])
            return
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
