"""The one reader of another server's chat completions: chunks, or a whole completion, to deltas.

    [chunk, ...] --Deltas.feed()--> [Delta | Call | Arguments | Close, ...] --close()--> the rest, Finish

Authority: https://platform.openai.com/docs/api-reference/chat-streaming; for what servers really send,
tests/replays/completions-*.toml.

Rules of this file:
1. Reasoning and calls are what the server declares as such; what looks like a marker in its text is text,
   for without tokens nobody can tell.
2. An answer is complete when the server says so: with a finish_reason, or with [DONE].
3. An item closes before the next one opens: of several calls the first streams, the others wait their turn.

Not here: bytes and frames (relay.py), the chunks that we write (completions.py).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import sse
from channels import Arguments, Call, Channel, Close, Delta, Finish, Output, TokenLogprob, Usage
from completions import Chunk

MAX_CHARS = 16 * 2**20  # of an answer, which is kept as a whole
UNLIKELY = -9999.0  # OpenAI's logprob of a token that is too unlikely to have one

Reason = Literal["stop", "length", "content_filter"]

# fmt: off
#  its finish_reason        ours         any other, such as "abort", is a failure
REASONS: dict[str, Reason] = {
    "stop":                 "stop",
    "tool_calls":           "stop",
    "function_call":        "stop",
    "eos_token":            "stop",            # TGI
    "stop_sequence":        "stop",
    "length":               "length",
    "model_length":         "length",          # Mistral
    "content_filter":       "content_filter",
}
# fmt: on


class Unreadable(ValueError):
    """The answer is not a chat completion."""


@dataclass(eq=False)
class _Call:
    """A tool call of the answer."""

    id: Any
    name: str = ""
    arguments: str = ""  # all that have come
    unsent: list[str] = field(default_factory=list)  # fragments of the arguments that no Arguments has yet
    is_open: bool = False  # its Call has left
    is_over: bool = False  # the next call, or text, has ended it

    def is_another(self, id_: Any, name: Any, arguments: Any) -> bool:
        """Whether a fragment with the same index begins the next call.

        Some servers give all calls one index, and some give no ids.
        """
        if id_ and self.id:
            return bool(id_ != self.id)
        return bool(name and arguments) and _is_object(self.arguments)


class Deltas:
    """Reads the first choice of another server's chunks, or of the completion that it sends at once.

    feed() and close() raise Unreadable.
    """

    def __init__(self, one_call: bool = False) -> None:
        self.is_whole = False  # the answer is complete: a finish_reason came, or the caller has read [DONE]
        self.is_over = False  # what still comes is ignored: an error came, or a call after the only one
        self._one_call = one_call
        self._reason: Reason = "stop"
        self._failure = ""  # the message of an error
        self._calls: list[_Call] = []  # calls that are not over, in their order; the first may be open
        self._newest: dict[Any, _Call] = {}  # the newest call of each index
        self._n_chars = 0

    def feed(self, chunk: Chunk) -> Iterator[Output]:
        if error := chunk.get("error"):
            if isinstance(error, dict):
                error = error.get("message")
            self._failure = str(error)
            self.is_over = True
            return
        for choice in objects(chunk.get("choices")):
            if choice.get("index", 0) == 0:
                yield from self._choice(choice)

    def close(self, usage: Usage | None) -> Iterator[Output | Finish]:
        """End the answer."""
        if not (self._failure or self.is_whole or self.is_over):
            self._failure = "The upstream ended its answer before it had finished."
        if self._failure:
            yield Finish("failed", usage, self._failure)
            return
        yield from self._end_calls()
        yield Finish(self._reason, usage)

    def _choice(self, choice: Chunk) -> Iterator[Output]:
        message = choice.get("delta") or choice.get("message")
        if isinstance(message, dict):
            yield from self._message(message, choice)
        if finish_reason := choice.get("finish_reason"):
            self.is_whole = True
            reason = REASONS.get(str(finish_reason))
            if reason is None:
                self._failure = f"The upstream ended its answer for the reason '{finish_reason}'."
            else:
                self._reason = reason

    def _message(self, message: Chunk, choice: Chunk) -> Iterator[Output]:
        """A delta of a chunk, or the message of a completion: they have the same members."""
        # Some servers send the same reasoning under both names.
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            yield from self._text("analysis", reasoning)
        if refusal := message.get("refusal"):
            yield from self._text("refusal", refusal)
        if content := message.get("content"):
            yield from self._text("final", content, _read_logprobs(choice))
        for fragment in objects(message.get("tool_calls")):
            yield from self._call_fragment(fragment)

    def _text(self, channel: Channel, text: Any, logprobs: tuple[TokenLogprob, ...] = ()) -> Iterator[Output]:
        if isinstance(text, list):  # Mistral's: a list of parts
            text = "".join(str(part.get("text", "")) for part in objects(text))
        if not isinstance(text, str):
            raise Unreadable("expected text in a chunk, got something else")
        self._count_chars(text)
        if self._calls and not text.strip():  # newlines between two calls
            return
        yield from self._end_calls()
        yield Delta(channel, text, logprobs)

    # --- calls ----------------------------------------------------------------------------------------------

    def _call_fragment(self, fragment: Chunk) -> Iterator[Output]:
        function = fragment.get("function")
        if not isinstance(function, dict):
            function = {}
        call = self._call_of(fragment, function)
        if call is None:
            return
        call.id = call.id or fragment.get("id")
        call.name = call.name or str(function.get("name") or "")
        if arguments := function.get("arguments"):
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            self._count_chars(arguments)
            if call.is_over and arguments.strip():
                raise Unreadable(f"more arguments came for the call of '{call.name}', which had ended")
            call.unsent.append(arguments)
            call.arguments += arguments
        yield from self._stream_calls()

    def _call_of(self, fragment: Chunk, function: Chunk) -> _Call | None:
        """The call that a fragment belongs to, begun if it is new; None if no other call is wanted."""
        id_ = fragment.get("id")
        name = function.get("name")
        index = fragment.get("index")
        if not isinstance(index, int):  # https://github.com/ollama/ollama/issues/7881
            index = len(self._newest) if name else len(self._newest) - 1
        call = self._newest.get(index)
        if call and not call.is_another(id_, name, function.get("arguments")):
            return call
        if self._one_call and self._newest:
            self.is_over = True
            return None
        call = _Call(id_)
        self._newest[index] = call
        self._calls.append(call)
        return call

    def _stream_calls(self) -> Iterator[Output]:
        """Stream the first call; once its arguments are complete and another has begun, stream that."""
        while self._calls and self._calls[0].name:
            call = self._calls[0]
            yield from _stream(call)
            if len(self._calls) == 1 or not _is_object(call.arguments):
                return
            call.is_over = True
            del self._calls[0]
            yield Close()

    def _end_calls(self) -> Iterator[Output]:
        """Stream what is left of all calls. What follows closes the last one: its status depends on that."""
        while self._calls:
            call = self._calls[0]
            if not call.name:
                raise Unreadable("a call came without a name")
            if not call.arguments:
                call.unsent.append("{}")
            yield from _stream(call)
            call.is_over = True
            del self._calls[0]
            if self._calls:
                yield Close()

    def _count_chars(self, text: str) -> None:
        self._n_chars += len(text)
        if self._n_chars > MAX_CHARS:
            raise Unreadable(f"expected an answer of at most {MAX_CHARS} characters")


def _stream(call: _Call) -> Iterator[Output]:
    """What has come of a call and not left."""
    if not call.is_open:
        call.is_open = True
        yield Call(call.name)
    if call.unsent:
        yield Arguments("".join(call.unsent))
        call.unsent.clear()


def objects(value: Any) -> list[Chunk]:
    """The objects in a list; none where another server has sent something else."""
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, dict)]


def _is_object(text: str) -> bool:
    """Whether this is a complete JSON object."""
    try:
        return isinstance(sse.loads(text), dict)
    except ValueError:
        return False


def _read_logprobs(choice: Chunk) -> tuple[TokenLogprob, ...]:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return ()
    return tuple(map(_read_logprob, objects(logprobs.get("content"))))


def _read_logprob(entry: Chunk) -> TokenLogprob:
    token = str(entry.get("token", ""))
    try:
        token_bytes = bytes(entry["bytes"])
    except (KeyError, TypeError, ValueError):  # some servers send none
        token_bytes = token.encode()
    logprob = entry.get("logprob")
    if not isinstance(logprob, int | float):
        logprob = UNLIKELY
    alternatives = tuple(map(_read_logprob, objects(entry.get("top_logprobs"))))
    return TokenLogprob(token, float(logprob), token_bytes, alternatives)
