"""What a model says: the vocabulary of its output, and the parser that finds it in the pieces.

    Piece --Parser.feed()--> [Delta | Call | Arguments | Close, ...] --Parser.close()--> the rest

Other servers have a reasoning parser and a tool call parser; this is both in one, made for streaming.

Why one parser over a table, and not one for each model: they share their faults (a marker cut in two, a step
that holds several channels), which are mended here once. Why no regular expression over the text so far: it
would read the answer again for every token, and take text for a token. A new notation of calls is a reader.

Authority: the chat templates of the models; what each family writes is a row of dialects/families.py.

Rules of this file:
1. The parser sees every piece, one after another: its output does not depend on how many tokens a step held.
2. A marker that is one token of the vocabulary is matched as that token, so text that merely spells it
   opens nothing. The parser looks for a marker in the text only if the vocabulary has no such token.
3. Only text that may still become a marker, a stop string, a call or a header, or be trimmed, is held back.
4. If the dialect trims, newlines beside a marker are the template's, not the model's, and go with it.
5. Stop strings are looked for in the text that the user reads, without its markers, never in the reasoning.
6. Malformed output is passed on as text. We drop four things: a malformed message header, a call without a
   name, a marker without meaning in this state, and text between or after calls. No output raises here.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, cast

import msgspec

# Harmony's words for the reasoning, asides to the user, and the answer. Only other servers distinguish a
# refusal from an answer (gateway/outputs.py): a model has no marker for it.
Channel = Literal["analysis", "commentary", "final", "refusal"]


# --- vocabulary ---------------------------------------------------------------------------------------------

# What is made for each token is a Struct: that takes a third of a NamedTuple's time.


class Arguments(NamedTuple):
    """The next part of the open call's arguments, as the model wrote them."""

    text: str


class Call(NamedTuple):
    """The start of a call; its arguments follow, or the input of a custom tool."""

    name: str
    custom: bool = False  # request/tool_calls.py sets it and the namespace: a model knows only functions
    namespace: str = ""
    extra: Mapping[str, Any] = {}  # members of an upstream's call that it wants back: `extra_content`


class Close(NamedTuple):
    """The end of the open item: the next output starts another one, even on the same channel."""

    is_cut: bool = False  # it is incomplete, though the answer goes on


class TokenLogprob(NamedTuple):
    """One sampled token and its log probability."""

    token: str  # its text; U+FFFD for bytes that are not whole characters
    logprob: float
    bytes: bytes
    top: tuple["TokenLogprob", ...] = ()  # the likeliest tokens in its place (top_logprobs)

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def entry(self) -> dict[str, Any]:
        """Return it in the spelling of both APIs, with the likeliest tokens. JSON encodes NaN as null."""
        spelled: list[dict[str, Any]] = [
            {"token": each.token, "logprob": max(each.logprob, UNLIKELY), "bytes": list(each.bytes)}
            for each in (self, *self.top)
        ]
        return spelled[0] | {"top_logprobs": spelled[1:]}


class Delta(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A piece of output on a channel."""

    channel: Channel
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


Output = Delta | Call | Arguments | Close


class Accepted(NamedTuple):
    """The first output of a worker for a request: after it, a refusal can only be an error of the answer."""

    input_tokens: int = 0  # of its prompt; 0: only the upstream can count them


@dataclass(slots=True)
class Usage:
    """Tokens in and out; every sampled token counts, including stop tokens and markers."""

    input_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int = 0


class Finish(NamedTuple):
    """The last output of a worker for a request."""

    reason: Literal["stop", "length", "content_filter", "steered", "failed", "cancelled"]
    usage: Usage | None = None
    message: str = ""  # why it failed
    code: str = "server_error"
    stop_sequence: str = ""  # the stop string that ended it


WorkerOutput = Accepted | Output | Finish
Take = Callable[[Sequence[WorkerOutput]], None]  # takes a worker's output: rule 2 of worker.py

# The part of the answer that the output has reached. dialects/families.py explains headers and their states
# beside the one dialect that has them.
HeaderState = Literal["between", "role", "header"]
State = Literal["analysis", "commentary", "final", "call", "end"] | HeaderState
NextState = State | Literal["content", "bare"]  # the end of a header; a call that lacks its marker
Transitions = Mapping[tuple[State | Literal["any"], str], NextState]  # (state, marker) -> next state

HEADER_STATES = ("between", "role", "header")

Schemas = Mapping[str, Mapping[str, Any]]  # name of a function on offer -> JSON schema of its arguments


class Piece(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """The text that one token adds."""

    text: str  # whole characters; "" for control tokens
    special: str = ""  # the spelling of an added token, "" for ordinary text
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token that this text completes

    def cut(self, n: int) -> tuple["Piece", "Piece"]:
        """Split after `n` characters; the logprobs go with the first half."""
        return Piece(self.text[:n], "", self.logprobs), Piece(self.text[n:])


# --- theory of operation ------------------------------------------------------------------------------------


# The parser is four state machines; a piece passes them from left to right:
#
#     marker --> channel
#     text ----> channel --+--> call body -----------------------------------> Call, Arguments
#                          |        | text that turns out to be no call
#                          +<-------+
#                          +--> trimming --> stop strings --> trimming ------> Delta
#
# channel       The part that the output has reached (State): the reasoning, an answer, a call, a header, the
#               end. Markers alone move it, by the dialect's table of transitions. A Finder finds the markers
#               that are not tokens of the vocabulary in the text.
# call body     The text between the markers of a call (CallBody). A call that has been announced cannot be
#               taken back, so the text is held back until a name has been read; from then on it leaves as
#               arguments. If it is not a call (a model may write about <tool_call>), it becomes text of the
#               channel that it interrupted, with its markers.
# trimming      The newlines beside markers (Trimming). Newlines after a marker are dropped at once. Newlines
#               that may precede a marker are held back: a marker drops them too, other text releases them.
# stop strings  A Finder on the text of all channels but the reasoning. It looks after leading newlines are
#               trimmed and before trailing ones are: so it finds a stop string of newlines, although a marker
#               might still drop them.
#
# An answer in the hermes dialect, with the stop string "END". Its markers are tokens, the rest is text:
#
#     piece                        channel   held back by               what comes out
#     <think>                      analysis
#     '\n2 and 2'                  analysis                             Delta('analysis', '2 and 2')
#     '\n'                         analysis  trimming: '\n'
#     </think>                     final                                Close()
#     '\n\nLet us add. E'          final     stop strings: 'E'          Delta('final', 'Let us add. ')
#     '\n'                         final     trimming: '\n'             Delta('final', 'E')
#     <tool_call>                  call      trimming: '\n'
#     '\n{"name": "add'            call      call body: all of it
#     '", "arguments": {"a": 2'    call                                 Call('add'), Arguments('{"a": 2')
#     '}}\n'                       call                                 Arguments('}')
#     </tool_call>                 final                                Close()
#     '\nThe EN'                   final     stop strings: 'EN'         Delta('final', 'The ')
#     'D of it'                    stopped


# --- dialects -----------------------------------------------------------------------------------------------


class Dialect(NamedTuple):
    """How a family of models marks the parts of its output."""

    known_by: tuple[str, ...]  # substrings that its chat templates all have
    transitions: Transitions
    call_reader: Callable[[Schemas], "CallReader"]
    forms: "Forms"
    # Takes the words of a message's header, which precede its content; returns the state that follows, and
    # the reader of the call if the message is one. None: messages have no headers.
    header: Callable[[str], tuple[State, "CallReader | None"]] | None = None
    start: State = "final"  # the state of an answer's beginning, unless the prompt ends with a marker
    call_markers: tuple[str, ...] = ()  # plain text unless the request offers tools
    trims: bool = True  # newlines beside markers are the template's
    tokens: frozenset[str] = frozenset()  # the markers that are one token of the vocabulary

    @property
    def markers(self) -> frozenset[str]:
        return frozenset(marker for _, marker in self.transitions)

    def next(self, state: State, marker: str) -> NextState | None:
        """Return the state that the marker leads to; None: it has no meaning in this state."""
        return self.transitions.get((state, marker), self.transitions.get(("any", marker)))


# --- the parser ---------------------------------------------------------------------------------------------


class Parser:
    """Turns the pieces of one response into outputs.

    `state` and `after_marker` come from dialects.families.opening(), `schemas` from the functions on offer.
    `one_call` ends the response after a call (parallel_tool_calls=false). `stopped` turns True when a stop
    string, the one call or the turn is complete: pieces fed afterwards are dropped.
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
        self.state = state
        self.stopped = False
        self.stop_sequence = ""  # the one that stopped it
        self._dialect = dialect
        self._schemas = schemas or {}
        self._one_call = one_call
        self._markers = Finder(dialect.markers - dialect.tokens)
        self._header: list[Piece] = []  # the words of the header so far
        self._call = CallBody(dialect.call_reader(self._schemas))  # read in the state "call" alone
        self._trimming = Trimming(dialect.trims, after_marker)
        self._stop = Finder(stop)
        self._open_item: Literal["", "text", "call"] = ""  # the item that a Close would end
        self._in_malformed_call = False  # "<tool_call>no call" | "</tool_call>": its end is text too
        self._outputs: list[Output] = []  # of this call of feed() or close()
        # The last piece came out as it went in, and nothing is held: the next one passes too, unless it has a
        # character that a machine looks for. Nearly all pieces do, and to see it takes a tenth of the time.
        self._is_amid_text = False
        self._looked_for = {"\n"} | self._markers.first_characters | self._stop.first_characters

    def feed(self, piece: Piece) -> list[Output]:
        """Return the outputs that are certain after this piece; hold the rest back (rule 3)."""
        passed = Delta(cast(Channel, self.state), piece.text, piece.logprobs)
        if (
            self._is_amid_text
            and piece.text
            and not piece.special
            and self._looked_for.isdisjoint(piece.text)
        ):
            return [passed]
        outputs = self._by_machines(piece)
        self._is_amid_text = outputs == [passed] and not (self._markers.held_text or self._stop.held_text)
        return outputs

    def _by_machines(self, piece: Piece) -> list[Output]:
        self._outputs = []
        if piece.special in self._dialect.tokens:
            for held in self._markers.flush():
                self._text(held)
            self._marker(piece.special)
        elif piece.text:
            if piece.special:  # an added token that is not a marker of this dialect is text
                piece = Piece(piece.text, "", piece.logprobs)
            for part in self._markers.feed(piece):
                if isinstance(part, str):
                    self._marker(part)
                else:
                    self._text(part)
        return self._outputs

    def _marker(self, marker: str) -> None:
        """End the open header or call, unless the marker is part of it; then move to the next state.

        The order of the steps matters, for the first two may change the state: a header may begin a call. A
        call may turn out not to be one: then it becomes text, and the marker of its end does too.
        """
        leads_to = self._dialect.next(self.state, marker)
        if leads_to == "bare":
            self._bare_call(marker)
            return
        if self.state in HEADER_STATES and leads_to not in ("header", "content"):
            self._end_header()
        if self.state == "call":
            leads_to = self._dialect.next("call", marker)
            is_in_string = self._call.reader.in_string and leads_to != "end"
            if leads_to is None or is_in_string:  # it is text of the call
                self._to_call(Piece(marker, marker))
                return
            self._end_call()
        ends_malformed_call = self._in_malformed_call and ("call", marker) in self._dialect.transitions
        self._in_malformed_call = False
        if ends_malformed_call:
            self._text(Piece(marker))
            return
        self._show_up_to_stop(self._stop.flush())
        self._transition(marker)

    def _show_up_to_stop(self, parts: Iterable[Piece | str]) -> None:
        for part in parts:
            if isinstance(part, str):
                self._show(self._trimming.release())
                self.stopped = True
                self.stop_sequence = part
                return
            self._show(self._trimming.without_trailing(part))

    def _transition(self, marker: str) -> None:
        leads_to = self._dialect.next(self.state, marker) or self.state
        opens_call = leads_to == "call" and marker in self._dialect.call_markers
        is_after_a_call = self.state == "call"  # _marker() has ended it
        # After a marker of a call the open item stays open: what follows may turn out to be its text.
        if is_after_a_call or not opens_call:
            if self._open_item:
                self._collect([Close()])
            self._trimming.marker()
        if leads_to == "content":
            self.state = "header"  # a message has begun, if only by its content
            self._end_header()
            return
        if leads_to == "call":
            self._call = CallBody(self._dialect.call_reader(self._schemas))
            if opens_call:
                self._call.opened_by = marker
                if not is_after_a_call:
                    self._call.interrupted = self.state
        elif leads_to == "header":
            self._header.append(Piece(" "))  # a marker keeps the words beside it apart
        elif leads_to == "end":
            self.stopped = True
        self.state = cast(State, leads_to)  # _marker() has handled "bare"

    def _text(self, piece: Piece) -> None:
        if self.state == "call":
            self._to_call(piece)
        elif self.state in HEADER_STATES:
            self._header.append(piece)
        elif (trimmed := self._trimming.without_leading(piece)).text:
            if self.state == "analysis":
                self._show(self._trimming.without_trailing(trimmed))
            else:
                self._show_up_to_stop(self._stop.feed(trimmed))

    def _show(self, pieces: list[Piece]) -> None:
        self._collect(Delta(cast(Channel, self.state), piece.text, piece.logprobs) for piece in pieces)

    def _collect(self, outputs: Iterable[Output]) -> None:
        """Keep outputs for feed() or close() to return, up to the output that ends the response."""
        for output in outputs:
            if self.stopped:
                return
            self._outputs.append(output)
            match output:
                case Delta():
                    self._open_item = "text"
                case Close():
                    self.stopped = self._one_call and self._open_item == "call"
                    self._open_item = ""
                case _:
                    self._open_item = "call"
                    self._trimming.release()  # the newlines before the call's marker go with it

    def close(self, cut: bool) -> list[Output]:
        """Return the rest at the end of the output; `cut`: the model was interrupted, it was not done."""
        self._outputs = []
        for piece in self._markers.flush():
            self._text(piece)
        if self.state == "between" or (self.state in HEADER_STATES and not cut):
            self._end_header()
        if self.state == "call":
            is_half_a_call = self._call.opened_by or self._call.reader.called
            if not (cut and is_half_a_call):  # half a call is neither completed nor shown as text
                self._end_call()
        if self.state != "call":
            self._show_up_to_stop(self._stop.flush())
            self._show(self._trimming.release())
        return self._outputs

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    # --- channel: markers move it, text goes where it stands ------------------------------------------------

    def _end_header(self) -> None:
        """Enter the state that the header names; words between two messages are stray text.

        A header counts even if the content of its message is missing: then it calls a function without
        arguments.
        """
        pieces = self._header
        self._header = []
        words = "".join(piece.text for piece in pieces)
        if self.state != "between":
            assert self._dialect.header
            self.state, reader = self._dialect.header(words)
            if reader:
                self._call = CallBody(reader)
                self._to_call(Piece(""))  # the name was in the header: it is announced now
            return
        self.state = "final"
        if words.strip():
            for piece in pieces:
                self._text(piece)

    def _bare_call(self, marker: str) -> None:
        if self.state == "final":  # elsewhere it is text
            self._show_up_to_stop(self._stop.flush())
            self._call = CallBody(self._dialect.call_reader(self._schemas))
            self.state = "call"
            self._to_call(Piece(marker, marker))
        else:
            self._text(Piece(marker))

    def _to_call(self, piece: Piece) -> None:
        if not self._call.reader.called:
            self._call.held_pieces.append(piece)
        self._collect(self._call.reader.feed(piece))
        if self._call.reader.malformed:
            self._not_a_call()

    def _end_call(self) -> None:
        self._collect(self._call.reader.end())
        if not self._call.reader.called:
            self._not_a_call()

    def _not_a_call(self) -> None:
        """Pass a body that announced no call to the channel that it interrupted, with its markers."""
        self.state = self._call.interrupted
        self._in_malformed_call = True
        for piece in [Piece(self._call.opened_by), *self._call.held_pieces]:
            self._text(piece)


class Trimming:
    """Removes newlines beside markers: those after a marker, and those held back before a marker."""

    def __init__(self, enabled: bool, after_marker: bool) -> None:
        self._enabled = enabled
        self._after_marker = enabled and after_marker  # <think> | "\na": newlines that come next are dropped
        self._has_text = False  # <think> | " " | </think>: any whitespace is held until the first text
        self._held_pieces: list[Piece] = []  # "a\n" | <think>: whitespace that a marker drops

    def marker(self) -> None:
        """Drop the newlines before a marker, and from now on those after it."""
        self._after_marker = self._enabled
        self._has_text = False
        self._held_pieces = []

    def without_leading(self, piece: Piece) -> Piece:
        if self._after_marker:
            piece = Piece(piece.text.lstrip("\n"), "", piece.logprobs)
            self._after_marker = not piece.text
        return piece

    def without_trailing(self, piece: Piece) -> list[Piece]:
        """Return the held pieces and this one without the newlines at its end, which are held now."""
        if not self._enabled:
            return [piece]
        self._has_text = self._has_text or bool(piece.text.strip())
        n_before_newlines = len(piece.text.rstrip("\n"))
        if not self._has_text or not n_before_newlines:
            self._held_pieces.append(piece)
            return []
        head, newlines = piece.cut(n_before_newlines)
        released = [*self.release(), head]
        if newlines.text:
            self._held_pieces = [newlines]
        return released

    def release(self) -> list[Piece]:
        """Return the held pieces: no marker has come."""
        released, self._held_pieces = self._held_pieces, []
        return released


# --- finding strings in text that arrives in pieces ---------------------------------------------------------


class Finder:
    """Finds `needles` in a text that comes in pieces, holding back only text that may still become one.

    If several match, the first to be complete wins, then the longest: so the result does not depend on the
    cuts between the pieces.
    """

    def __init__(self, needles: Collection[str]) -> None:
        self._needles = needles
        self.first_characters = {needle[0] for needle in needles}
        self._held_pieces: list[Piece] = []
        self.held_text = ""  # the text of these; after each feed() it is shorter than the longest needle

    def flush(self) -> list[Piece]:
        """Release the text that is held: it did not become a needle."""
        released, self._held_pieces, self.held_text = self._held_pieces, [], ""
        return released

    def feed(self, piece: Piece) -> Iterator[Piece | str]:
        """Yield the text that is no needle for certain, as pieces, and each needle found, as a str."""
        if not self.held_text and self.first_characters.isdisjoint(piece.text):  # as in most pieces
            yield piece
            return
        self._held_pieces.append(piece)
        self.held_text += piece.text
        while match := self._first_match():
            end, start, needle = match
            yield from self._release(start)
            self._release(end - start)  # the needle leaves as a str, not as pieces
            yield needle
        yield from self._release(len(self.held_text) - self._n_ambiguous())

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def _first_match(self) -> tuple[int, int, str] | None:
        """Return (end, start, needle) of the match that ends first; of several, of the longest."""
        matches = [
            (start + len(needle), start, needle)
            for needle in self._needles
            if (start := self.held_text.find(needle)) >= 0
        ]
        return min(matches, default=None)

    def _n_ambiguous(self) -> int:
        """Return the length of the longest end of the text that is a proper beginning of a needle."""
        longest = 0
        for needle in self._needles:
            for n in range(longest + 1, min(len(needle) - 1, len(self.held_text)) + 1):
                if self.held_text.endswith(needle[:n]):
                    longest = n
        return longest

    def _release(self, n: int) -> list[Piece]:
        """Release the first `n` characters held."""
        released: list[Piece] = []
        self.held_text = self.held_text[n:]
        while n > 0:
            head, rest = self._held_pieces.pop(0).cut(n)
            released.append(head)
            n -= len(head.text)
            if rest.text:
                self._held_pieces.insert(0, rest)
        return released


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

UNLIKELY = -9999.0  # OpenAI's logprob of a token that is too unlikely to have one: JSON has no infinity


class Compaction(NamedTuple):
    """The conversation as one item, which the server makes from the model's summary."""

    summary: str


Said = WorkerOutput | Compaction  # what the client is shown of a run


# --- dialects -----------------------------------------------------------------------------------------------


class CallReader(Protocol):
    """Reads the text between the markers of a call; dialects/calls.py has a reader for each notation."""

    called: bool  # the name has been passed on: it is a call now, whatever follows
    malformed: bool  # it can never become a call
    in_string: bool  # a string of the arguments is open: a marker is text in it, but for the turn's end

    def feed(self, piece: Piece) -> list[Output]:
        """Read more of the call, including markers without a row in the dialect's table."""

    def end(self) -> list[Output]:
        """Return the rest: the model has ended the call."""


@dataclass
class CallBody:
    """The text of one call, held back while it may turn out not to be a call."""

    reader: CallReader
    opened_by: str = ""  # the marker before it; "" if a call may stand without one
    interrupted: State = "final"  # the state of its text if it is not a call
    held_pieces: list[Piece] = field(default_factory=list)


class Forms(NamedTuple):
    """How to write the dialect, for grammars: TEXT, NAME and ARGUMENTS are placeholders."""

    call: str
    separator: str | None  # between two calls; None: an answer has only one call
    thought: tuple[str, str] = ("<think>", "</think>")  # not all models of a family know them
    text: str = "TEXT"  # an answer without calls
    before: str | None = "TEXT"  # text before calls; None: not allowed
    calls: tuple[str, str] = ("", "")  # around all calls
    arguments: Literal["json", "xml"] = "json"
