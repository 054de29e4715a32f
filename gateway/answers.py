"""The one reader of other servers: their chat completions, put right.

    bytes --Documents--> documents --Answer.feed()--> [chunk, ...], as OpenAI would have sent them

relay.py writes the chunks to a client of Chat Completions; outputs.py turns them into the outputs from which
a response is built.

The deviations of servers, and our reading of each. Each row is a replay, in
tests/replays/completions-deltas-*.toml or relay-*.toml, with a link to the server that does so:

    sent                                                              read as
    one JSON object for a request with stream=true, or a stream       as its first byte shows
      for one without
    an error as `error: {...}`, `event: error`, a bare line of        the error that ends the answer
      JSON, a `message` or `detail` without choices, with status 200
    data that is empty or null, comments, other fields                nothing
    a last event without its blank line                               the event; half of one is an error,
                                                                      unless every choice has finished
    [DONE] after each of several choices                              the end of those that have finished
    nothing after the finish_reason, not even the end                 the end (upstreams.py waits for seconds)
    an end without a finish_reason, or without [DONE]                 whole, if either came
    a finish_reason, and then more of the answer                      more of the answer; the last one holds
    "eos_token", "STOP", "end_turn", "tool_use", "", ...              one of OpenAI's five, or none
    a finish_reason that is not known                                 "stop", and it is logged
    no choice at all, and the end                                     an error
    a call, and then the finish_reason "stop"                         tool_calls
    the role in every delta                                           once
    reasoning as `reasoning`, as `reasoning_content`, as both,        reasoning, once; a chunk has both names,
      or as parts of the content                                      for clients read the one or the other
    blank text before reasoning, text or a call                       part of the text, else nothing
    the whole message once more after its deltas                      nothing
    calls without an index, or with ids of their own but the same     calls 0, 1, 2, ..., each with an id
      index; without an id, or with an id that changes
    the name of a call in pieces, or in every fragment                one name
    arguments as an object, or none at all                            JSON text
    arguments of two calls, or a call and text, by turns              chunks: as they come; outputs: in order

Authority: https://platform.openai.com/docs/api-reference/chat-streaming.

Rules of this file:
1. Chunks add up: the strings of a delta are appended, and the fragments of a call have its index.
2. A chunk is corrected in place: correct and unknown members stay as they are.
3. A fragment continues the newest call of its index, or begins another one if it has a name and another id.
   Without an index, a fragment with a name begins a call, and one without continues the newest call.
4. A call can be run if its arguments are a JSON object; the input of a custom tool is any text. An answer
   with a call that cannot be run ends with an error that names the call, unless its finish_reason shows
   that it was cut.
5. Nothing is read after an error, or after [DONE]. Unreadable data is an error too, because text may be lost.
   But once every choice has finished, unreadable data counts as the end.
6. Usage is taken out of every chunk and counted. It leaves once, in the last chunk, if it was asked for.
7. The bytes of an event, of an object and of the answer are bounded, and the characters of the calls.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import sse
from channels import Channel
from completions import CALL_MEMBERS, Chunk
from gateway.metering import Meter
from request import ids
from request.messages import kept
from request.refusals import BadInput, error_body, shown
from request.tools import as_json
from sse import is_object

log = logging.getLogger("remote")

# The event loop is blocked while JSON is read: 20 ms a MiB of text, 200 a MiB of the smallest objects. The
# longest events have the whole arguments of a call, the longest objects the logprobs of a whole answer.
MAX_EVENT_BYTES = 2**19
MAX_OBJECT_BYTES = 2**22
MAX_ANSWER_BYTES = 48 * 2**20  # 128k tokens are 32 MB, and 16 for their chunks
CHUNK_BYTES = 2**7  # each chunk counts for so many: an empty one takes more memory than its 8 bytes
MAX_CALL_CHARACTERS = 2**21  # names, ids and arguments of all calls of a choice
CALL_CHARACTERS = 2**10  # each call counts for so many
MAX_BLANKS = 1024  # characters of blank text that are held until text follows

# fmt: off
#  words in a finish_reason, in any case; the first row holds          OpenAI's
FINISH_REASONS = {
    "abort|error|fail|cancel|timeout|disconnect|malformed|unexpected":  None,       # a failure
    "filter|safety|sensitive|prohibit|block|recitation|guardrail|spii":  "content_filter",
    "length|max_|limit|window":                                         "length",
    "^$|stop|eos|end|complete|finish|tool|function":                    "stop",
    "":                                                                 "unknown",  # and read as stop
}
CUT = ("length", "content_filter")  # these end an answer before it is complete

#  channel       members of a delta that hold its text; both names of the reasoning hold the same
TEXTS: dict[Channel, tuple[str, ...]] = {
    "analysis":  ("reasoning_content", "reasoning"),
    "refusal":   ("refusal",),
    "final":     ("content",),
}
# fmt: on

SAYING = ("tool_calls", *(name for names in TEXTS.values() for name in names))  # members of a delta


class Unreadable(ValueError):
    """The answer is not a chat completion. An Answer turns this error into an error chunk."""


class Asked(NamedTuple):
    """The demands of the request on its answer."""

    n: int = 1  # choices
    one_call: bool = False  # parallel_tool_calls=false: keep only the first call of each choice
    # tool_choice names the function: then "finish_reason will be 'stop'", according to
    # https://platform.openai.com/docs/guides/function-calling
    named_call: bool = False
    shows_usage: bool = False
    new_id: Callable[[str], str] = ids.new_id  # draws an id, with this prefix, for a call without one


# --- documents ----------------------------------------------------------------------------------------------

JSON_STARTS = b"{["  # no line of an event stream starts with one of these, but for a bare error amid one
# Sent to keep a connection alive: OpenAI's client takes it for JSON, and its callers take null for a chunk.
# https://github.com/openai/openai-python/issues/2722 https://github.com/NousResearch/hermes-agent/pull/80822
SILENT = ("", "null")
SPACES = bytes.maketrans(b"\r\n", b"  ")


class Documents(sse.Parser):
    """Cuts an answer into its documents: the JSON object of each event, None for [DONE].

    An answer that is one JSON object is read as an event of one line, with [DONE] after it. read() and end()
    raise Unreadable or sse.EventTooLarge.
    """

    def __init__(self) -> None:
        super().__init__(MAX_EVENT_BYTES)
        self._is_stream: bool | None = None  # its first byte will tell
        self._beginning = b""  # perhaps a part of a BOM

    def read(self, data: bytes) -> Iterator[Chunk | None]:
        if self._is_stream is None:
            self._beginning = data = (self._beginning + data).lstrip().removeprefix(sse.BOM).lstrip()
            if sse.BOM.startswith(data):
                return
            self._is_stream = data[0] not in JSON_STARTS
            if not self._is_stream:
                self.max_event_bytes = MAX_OBJECT_BYTES
                data = b"data:" + data
        if not self._is_stream:
            data = data.translate(SPACES)  # JSON has no line end inside a string
        for event in self.feed(data):
            text = event.data.strip()
            if text == "[DONE]":
                yield None
            elif text not in SILENT:
                value = document(text)
                if event.type == "error" and not value.get("error"):
                    value = {"error": value}
                yield value

    def end(self) -> Iterator[Chunk | None]:
        """End the answer, whose last event may lack the blank line."""
        is_object = self._is_stream is False
        self._is_stream = True
        yield from self.read(b"\n\n")
        if is_object:
            yield None

    def _process_field(self, name: str, value: str) -> None:
        """Read the errors that some servers write without "data:", bare or in a field of that name.

        https://github.com/Atomic-Germ/OpenFlowLM-Next/issues/64
        https://github.com/ggml-org/llama.cpp/pull/16109
        """
        if name.startswith("{"):
            self.data.append(f"{name}:{value}")
        elif name == "error":
            self.data.append(value)
        else:
            super()._process_field(name, value)


def document(text: str | bytes) -> Chunk:
    """Return the JSON object that a text is, half a surrogate pair in it as U+FFFD; raises Unreadable."""
    try:
        value = sse.loads(text, "replace")
    except ValueError as error:
        raise Unreadable(f"expected JSON, got {shown(text)}") from error
    match value:
        case [dict() as only]:  # Gemini's error
            return only
        case dict():
            return value
    raise Unreadable(f"expected a JSON object, got {shown(text)}")


# --- values -------------------------------------------------------------------------------------------------


def objects(value: Any) -> list[Chunk]:
    """Return the objects in a list; none if another server has sent something else."""
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, dict)]


def error_of(document: Chunk) -> Chunk | None:
    """Return the error that a document tells of: its message; its type, param and code if it has them."""
    error = document.get("error")
    if not error and "choices" not in document:
        error = document if "message" in document else document.get("detail")
    if not error:
        return None
    if not isinstance(error, dict):
        error = {"message": error}
    message = error.get("message") or error.get("detail") or error
    if not isinstance(message, str):
        message = shown(message)
    members = {name: error[name] for name in ("type", "param", "code") if name in error}
    return {"message": message} | members


def text_of(value: Any) -> str:
    """Return a text, or those of a list of parts; raises Unreadable for anything else that is not null.

    Mistral's content is a list of parts: https://github.com/BerriAI/litellm/issues/16272
    """
    if isinstance(value, list):
        return "".join(text_of(part.get("text")) for part in objects(value))
    if value and not isinstance(value, str):
        raise Unreadable(f"expected text in a chunk, got {shown(value)}")
    return value or ""


@lru_cache(maxsize=64)  # once
def warn_of(reason: str) -> None:
    log.warning("The finish_reason '%s' of an upstream is not known, and read as 'stop'.", reason)


# --- one choice ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ToolCall:
    """A call of the answer, as far as it has come."""

    index: int  # ours
    type: str  # function or custom
    id: str  # the server's; "": it has given none
    name: str = ""
    fragments: list[str] = field(default_factory=list)  # of its arguments
    extra: Chunk = field(default_factory=dict)  # see channels.Call

    def has_object(self) -> bool:
        """Return whether its arguments are a JSON object, and so are whole."""
        return is_object("".join(self.fragments))


class Choice:
    """Correct one choice of an answer, chunk by chunk."""

    def __init__(self, asked: Asked) -> None:
        self.calls: list[ToolCall] = []  # by our index, those that are not wanted too
        self.has_said = False  # text, reasoning, a call or the end has left
        self.is_finished = False  # a finish_reason came, or a whole message
        self.failure = ""  # why the answer ends with an error
        self._reason = ""  # the newest finish_reason
        self._last: Chunk | None = None  # the newest that was read, while the end is not in it
        self._asked = asked
        self._has_role = False
        self._newest: dict[int | None, ToolCall] = {}  # by the server's index; None: the newest of all
        self._n_characters = 0  # of calls
        self._open: Channel | None = None  # the channel that has left last; None: a call, or nothing
        self._blank: tuple[Channel, str] = ("final", "")  # the text that is held

    def read(self, choice: Chunk, is_end: bool = False) -> None:
        """Correct a chunk of this choice; `is_end` if nothing more can come."""
        delta = choice.get("delta")
        message = choice.pop("message", None)
        if not (delta or self.has_said):
            # After deltas it repeats them: https://github.com/abundantbeing/hermes-browser-extension/issues/11
            delta = message
        if not isinstance(delta, dict):
            delta = {}
        choice["delta"] = delta
        self._delta(delta)
        self._last = choice
        self.finish(choice.get("finish_reason"), is_end)
        if "finish_reason" in choice:
            choice["finish_reason"] = None  # until end()

    def finish(self, reason: Any, is_end: bool = False) -> None:
        if reason or is_end:  # "" is none: https://github.com/ollama/ollama/issues/4357
            self._reason = str(reason or "")
            self.is_finished = self.has_said = True

    def end(self) -> None:
        """Add to the last chunk that was read how the answer ends, if it has finished."""
        if self.is_finished and self._last:
            self._last["finish_reason"] = self._end(self._reason, self._last["delta"])
            self._last = None

    def _end(self, reason: str, delta: Chunk) -> str | None:
        """Add to the last delta what the answer lacks; return the finish_reason, None if it is a failure.

        Clients take an answer without one for a cut one: https://github.com/earendil-works/pi/pull/4558
        """
        ours = next(ours for words, ours in FINISH_REASONS.items() if re.search(words, reason, re.I))
        if ours is None:
            self.failure = f"The upstream ended its answer for the reason '{reason[:60]}'."
            return None
        if ours == "unknown":
            warn_of(reason[:60])
        channel, blank = self._blank
        if blank and not (self._open or self.calls):
            delta |= dict.fromkeys(TEXTS[channel], blank)
        if ours in CUT:  # nothing is made up for a call that was cut
            return ours
        for call in self.calls[: 1 if self._asked.one_call else None]:
            if not call.name:
                self.failure = "The answer cannot be used: a call came without a name."
            elif not call.fragments and call.type == "function":
                call.fragments.append("{}")
                fragment = {"index": call.index, "function": {"arguments": "{}"}}
                delta["tool_calls"] = [*delta.get("tool_calls", []), fragment]
            elif call.type == "function" and not call.has_object():
                self.failure = f"The arguments of the call of '{call.name}' are not a JSON object."
            if self.failure:
                return None
        return "tool_calls" if self.calls and not self._asked.named_call else "stop"

    # --- text -----------------------------------------------------------------------------------------------

    def _delta(self, delta: Chunk) -> None:
        # The `openai` package appends it: https://github.com/BerriAI/litellm/pull/9986
        # The Vercel AI SDK takes no null: https://github.com/vercel/ai/issues/2548
        if self._has_role or not delta.get("role"):
            delta.pop("role", None)
        else:
            self._has_role = True
        parts = objects(delta.get("content"))
        if thoughts := [part.get("thinking") for part in parts if part.get("type") == "thinking"]:
            delta["reasoning_content"] = "".join(map(text_of, thoughts))
        for channel, names in TEXTS.items():
            if value := delta.get(names[0]) or delta.get(names[-1]):
                text = self._text(channel, text_of(value))
                delta |= dict.fromkeys(names, text)
        if fragments := delta.get("tool_calls"):
            delta["tool_calls"] = [*filter(self._call_fragment, objects(fragments))]

    def _text(self, channel: Channel, text: str) -> str:
        """Return what leaves now of a text. Blank text begins no item: it is held until text follows."""
        if not text or channel == self._open:
            return text
        if channel == self._blank[0]:
            text = self._blank[1] + text
        self._blank = (channel, text)
        if not text.strip() and len(text) <= MAX_BLANKS:
            return ""
        self._begin(channel)
        return text

    def _begin(self, channel: Channel | None) -> None:
        """Let text of a channel, or a call, leave; blank text before it becomes part of it, or is dropped."""
        self._open = channel
        self._blank = ("final", "")
        self.has_said = True

    # --- calls ----------------------------------------------------------------------------------------------

    def _call_fragment(self, fragment: Chunk) -> bool:
        """Correct a fragment of a call; return whether the client wants the call."""
        type_, member = CALL_MEMBERS[bool(fragment.get("custom"))]  # some servers write "custom": null
        said = fragment.get(type_)
        if not isinstance(said, dict):
            said = {}
        name = text_of(said.get("name"))
        arguments = said.get(member) or ""
        if not isinstance(arguments, str):
            arguments = as_json(arguments)
        n_calls = len(self.calls)
        call = self._call_of(fragment, type_, name)
        piece = name.removeprefix(call.name)  # https://github.com/continuedev/continue/pull/5849
        call.name += piece
        call.extra |= kept(fragment)
        if arguments:
            call.fragments.append(arguments)
        self._n_characters += len(piece) + len(arguments)
        if self._n_characters > MAX_CALL_CHARACTERS:
            raise Unreadable(f"expected at most {MAX_CALL_CHARACTERS} characters of calls")
        fragment |= {"index": call.index, type_: said | {"name": piece, member: arguments}}
        if len(self.calls) > n_calls:
            fragment |= {"id": call.id or self._asked.new_id("call"), "type": type_}
        else:
            fragment.pop("id", None)
            if not piece:
                del fragment[type_]["name"]
        self._begin(None)
        return call.index == 0 or not self._asked.one_call

    def _call_of(self, fragment: Chunk, type_: str, name: str) -> ToolCall:
        """Return the call that a fragment belongs to, a new one if it begins one: rule 3."""
        id_ = str(fragment.get("id") or "")
        index = fragment.get("index")
        if type(index) is not int:  # https://github.com/ollama/ollama/issues/7881
            index = None
        call = self._newest.get(index)
        is_another = index is None
        if call and call.id and id_:
            is_another = id_ != call.id
        # Without a name the id may change: https://github.com/poolsideai/pool/issues/9
        if call is None or (name and is_another):
            call = ToolCall(len(self.calls), type_, id_)
            self.calls.append(call)
            self._n_characters += CALL_CHARACTERS + len(id_)
        self._newest |= {index: call, None: call}
        return call


# --- the answer ---------------------------------------------------------------------------------------------


class Answer:
    """Reads an answer; `meter` counts its usage."""

    def __init__(self, meter: Meter, asked: Asked) -> None:
        self.meter = meter
        self.choices = defaultdict[int, Choice](partial(Choice, asked))  # those that have begun
        self.is_over = False  # an error came, or [DONE]: nothing more is read
        self.failed = False  # an error has left
        self._documents = Documents()
        self._asked = asked
        self._n_bytes = 0
        self._n_finished = 0  # choices
        self._newest: Chunk = {}
        self._usage_chunk: Chunk = {}  # the newest
        self._held: list[Chunk] = []  # since the last finish_reason: more of the answer may come

    @property
    def has_said(self) -> bool:
        """Whether text, reasoning or a call has come, or the end of a choice."""
        return any(choice.has_said for choice in self.choices.values())

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its finish_reason: usage should follow, and [DONE], and nothing else."""
        return self._n_finished == self._asked.n

    def feed(self, data: bytes) -> list[Chunk]:
        self._n_bytes += len(data)
        if self._n_bytes > MAX_ANSWER_BYTES:
            return self.fail(f"The answer cannot be used: it is longer than {MAX_ANSWER_BYTES} bytes.")
        chunks = self._read(self._documents.read(data))
        self._n_bytes += CHUNK_BYTES * len(chunks)
        return chunks

    def close(self) -> list[Chunk]:
        """End the answer: return what it lacks. An error is the last chunk of all."""
        chunks = [*self._read(self._documents.end()), *self._release()]
        unfinished = [index for index, choice in self.choices.items() if not choice.is_finished]
        if not self.is_over and (unfinished or not self.choices):
            chunks += self.fail("The upstream ended its answer before it had finished.")
        if self.failed:
            return chunks
        if unfinished:
            ends = [{"index": index, "message": None} for index in unfinished]
            end = self._newest | {"object": "chat.completion.chunk", "choices": ends}
            self._says(end)
            self._release()
            chunks.append(end)
        for choice in self.choices.values():
            if choice.failure:
                chunks += self.fail(choice.failure)
        if self._usage_chunk and self._asked.shows_usage and not self.failed:
            chunks.append(self._usage_chunk)
        return chunks

    def fail(self, message: str, **members: Any) -> list[Chunk]:
        """End the answer with an error, unless one has ended it."""
        error = error_body(BadInput(message, code="server_error"))["error"] | members
        chunks = [] if self.failed else [*self._release(), {"error": error}]
        self.is_over = self.failed = True
        return chunks

    def _read(self, documents: Iterable[Chunk | None]) -> list[Chunk]:
        chunks: list[Chunk] = []
        if self.is_over:
            return chunks
        try:
            for document in documents:
                if document is None:
                    # Some servers send one after each choice: https://github.com/vllm-project/vllm/pull/378
                    self.is_over = self._n_finished in (0, self._asked.n)
                    if not self.choices:
                        chunks += self.fail("The answer of the upstream has no choice.")
                elif error := error_of(document):
                    chunks += self.fail(**error)
                elif self._says(document):
                    if document["choices"]:
                        chunks += self._held
                        self._held = []
                    (self._held if self.is_finished else chunks).append(document)
                if self.is_over:
                    break
        except (Unreadable, sse.EventTooLarge) as error:
            if self.is_finished and isinstance(error, Unreadable):  # no text is lost with it
                self.is_over = True
            else:
                chunks += self.fail(f"The answer cannot be used: {error}.")
        return chunks

    def _release(self) -> list[Chunk]:
        """End the choices that have finished; return what was held."""
        for choice in self.choices.values():
            choice.end()
        held = self._held
        self._held = []
        return held

    def _says(self, chunk: Chunk) -> bool:
        """Correct a chunk; return whether it holds anything."""
        self._newest = chunk
        chunk.pop("error", None)  # it is null
        n = self._asked.n
        choices = objects(chunk.get("choices"))[:n]
        chunk["choices"] = []  # clients trip over null: https://github.com/langfuse/langfuse/issues/6658
        for choice in choices:
            # The index of the only one does not matter: https://github.com/microsoft/Foundry-Local/issues/144
            choice["index"] = index = 0 if n == 1 else choice.get("index")
            if type(index) is not int or not 0 <= index < n:
                raise Unreadable(f"expected the index of one of {n} choices, got {shown(index)}")
            is_whole = "message" in choice and "delta" not in choice
            if is_whole:
                chunk["object"] = "chat.completion.chunk"
            found = self.choices[index]
            had_finished = found.is_finished
            delta = choice.get("delta")
            says_more = isinstance(delta, dict) and any(map(delta.get, SAYING))
            if had_finished and not says_more:  # else its end was none
                found.finish(choice.get("finish_reason"))
                continue
            found.read(choice, is_end=is_whole)
            self._n_finished += found.is_finished - had_finished
            chunk["choices"].append(choice)
            if n > 1:  # the end of one cannot wait until the others have ended
                found.end()
        has_usage = isinstance(chunk.get("usage"), dict)
        if has_usage:
            self.meter.read(chunk["usage"])
            self._usage_chunk = chunk | {"choices": []}
        if has_usage or not self._asked.shows_usage:
            chunk.pop("usage", None)
        return bool(chunk["choices"]) or not (choices or has_usage)
