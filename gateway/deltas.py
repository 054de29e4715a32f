"""The one reader of another server's chat completions: chunks, or a whole completion, to deltas.

    [chunk, ...] --Deltas.feed()--> [Delta | Call | Arguments | Close, ...] --close()--> the rest, Finish

Authority: https://platform.openai.com/docs/api-reference/chat-streaming; of what servers really send,
tests/replays/completions-*.toml.

Rules of this file:
1. Reasoning and calls are what the server says they are; what looks like a marker in its text is text, for
   without tokens nobody can tell.
2. An answer is whole when the server says so.

Not here: bytes and frames (relay.py), our own chunks (completions.py).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from channels import Arguments, Call, Channel, Close, Delta, Finish, Output, TokenLogprob, Usage
from completions import Chunk

# --- chunks of another server -------------------------------------------------------------------------------

MAX_CHARS = 16 * 2**20  # of an answer: whoever keeps it keeps all of it

Reason = Literal["stop", "length", "content_filter"]

# fmt: off
#  its finish_reason        ours         every other, "abort" for one, is a failure
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
    """The answer is not what it should be."""


@dataclass(eq=False)
class _Call:
    """A call of the answer."""

    id: Any
    name: str = ""
    text: str = ""  # all arguments so far
    held: list[str] = field(default_factory=list)  # those that have not left
    is_open: bool = False
    is_over: bool = False

    def is_another(self, id_: Any, name: Any, arguments: Any) -> bool:
        """Whether this is a piece of the next call; some servers give all of them one index, or no id."""
        if id_ and self.id:
            return bool(id_ != self.id)
        return bool(name and arguments) and _is_object(self.text)


class Deltas:
    """The first choice of another server's chunks, or of the completion that it sends at once, to what its
    model says. Raises Unreadable.
    """

    def __init__(self, one_call: bool = False) -> None:
        self.is_whole = False  # it says so, with a finish_reason; the caller, with [DONE]
        self.is_over = False  # nothing that still comes is wanted: an error came, or a second call
        self._one_call = one_call
        self._reason: Reason = "stop"
        self._failure = ""
        self._calls: list[_Call] = []  # that are not over, in their order; the first may have begun to leave
        self._called: dict[Any, _Call] = {}  # the newest call of each index
        self._n_chars = 0

    def feed(self, chunk: Chunk) -> Iterator[Output]:
        if error := chunk.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            self._failure, self.is_over = str(message), True
            return
        for choice in objects(chunk.get("choices")):
            if choice.get("index", 0) == 0:
                yield from self._delta(choice.get("delta") or choice.get("message"), choice)
                if reason := choice.get("finish_reason"):
                    self.is_whole = True
                    self._reason = REASONS.get(str(reason), "stop")
                    if str(reason) not in REASONS:
                        self._failure = f"The upstream ended its answer for the reason '{reason}'."

    def close(self, usage: Usage | None) -> Iterator[Output | Finish]:
        """The end of the answer."""
        if not (self._failure or self.is_whole or self.is_over):
            self._failure = "The upstream ended its answer before it had finished."
        if self._failure:
            yield Finish("failed", usage, self._failure)
            return
        yield from self._leave(at_end=True)
        yield Finish(self._reason, usage)

    def _delta(self, delta: Any, choice: Chunk) -> Iterator[Output]:
        if not isinstance(delta, dict):
            return
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):  # the same text by two names
            yield from self._text("analysis", thought)
        if refusal := delta.get("refusal"):
            yield from self._text("refusal", refusal)
        if text := delta.get("content"):
            shown = choice.get("logprobs")
            logprobs = objects(shown.get("content")) if isinstance(shown, dict) else []
            yield from self._text("final", text, tuple(map(_read_logprob, logprobs)))
        for call in objects(delta.get("tool_calls")):
            yield from self._fragment(call)

    def _text(self, channel: Channel, text: Any, logprobs: tuple[TokenLogprob, ...] = ()) -> Iterator[Output]:
        if isinstance(text, list):  # of parts, as Mistral has it
            text = "".join(str(part.get("text", "")) for part in objects(text))
        if not isinstance(text, str):
            raise Unreadable("expected text in a chunk, got something else")
        self._measure(text)
        if self._calls and not text.strip():  # newlines between two calls
            return
        yield from self._leave(at_end=True)
        yield Delta(channel, text, logprobs)

    def _fragment(self, call: Chunk) -> Iterator[Output]:
        """A piece of a call."""
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        id_, name, arguments, index = (
            call.get("id"), function.get("name"), function.get("arguments"), call.get("index"),
        )  # fmt: skip
        if not isinstance(index, int):  # ollama/ollama#7881
            index = len(self._called) if name else len(self._called) - 1
        known = self._called.get(index)
        if known is None or known.is_another(id_, name, arguments):
            if self._one_call and self._called:
                self.is_over = True
                return
            known = self._called[index] = _Call(id_)
            self._calls.append(known)
        known.id, known.name = known.id or id_, known.name or str(name or "")
        if arguments:
            is_text = isinstance(arguments, str)
            text = arguments if is_text else json.dumps(arguments, ensure_ascii=False)
            self._measure(text)
            if known.is_over and text.strip():
                raise Unreadable(f"more arguments came for the call of '{known.name}', which had ended")
            known.held.append(text)
            known.text += text
        yield from self._leave()

    def _leave(self, at_end: bool = False) -> Iterator[Output]:
        """What may leave of the calls: an item closes before the next opens, so each waits for its turn."""
        while self._calls:
            call = self._calls[0]
            if not call.name:
                if at_end:
                    raise Unreadable("a call came without a name")
                return
            is_last = len(self._calls) == 1
            if not call.is_open:
                call.is_open = True
                yield Call(call.name)
            if at_end and not call.text:
                call.held.append("{}")
            if call.held:
                yield Arguments("".join(call.held))
                call.held.clear()
            if not at_end and (is_last or not _is_object(call.text)):
                return
            call.is_over = True
            del self._calls[0]
            if not is_last:  # the last is closed by what follows, as what that says: completed, or cut
                yield Close()

    def _measure(self, text: str) -> None:
        self._n_chars += len(text)
        if self._n_chars > MAX_CHARS:
            raise Unreadable(f"expected an answer of at most {MAX_CHARS} characters")


def objects(value: Any) -> list[Chunk]:
    """The objects of a list; whatever else another server may send is none."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _read_logprob(found: Chunk) -> TokenLogprob:
    token = str(found.get("token", ""))
    try:
        spelled = bytes(found["bytes"])
    except (KeyError, TypeError, ValueError):  # some servers have none
        spelled = token.encode()
    logprob = found.get("logprob")
    known = float(logprob) if isinstance(logprob, int | float) else -9999.0  # OpenAI's word for unlikely
    return TokenLogprob(token, known, spelled, tuple(map(_read_logprob, objects(found.get("top_logprobs")))))
