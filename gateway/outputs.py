"""An answer of one choice as the outputs from which a response is built.

    [chunk, ...] --Outputs.read()--> [Delta | Call | Arguments, ...] --close()--> the rest, Finish

Authority: https://platform.openai.com/docs/api-reference/responses-streaming: one item comes after another.
In chunks, text and several calls may come by turns.

    chunk                   outputs
    call 0: {"x":1}         Call f, Arguments {"x":1}
    call 1: {"y":           Call g, Arguments {"y":       for call 0 is whole
    text: hi                                              waits, for call 1 is not
    call 1: 2}              Arguments 2}
    finish_reason           Delta hi, Finish

Rules of this file:
1. The upstream decides what is reasoning and what is a call. Text that looks like a marker is text.
2. An item closes before the next one opens. If the next item comes before a call is whole, they come by
   turns. Then the call is sent as it comes, and everything else waits for the end of the answer.
3. A logprob goes with its text. Logprobs that arrive before their text wait for it; logprobs of reasoning and
   markers before the text are dropped. With vLLM parts of a character have no bytes; we keep these.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import suppress
from itertools import accumulate
from typing import Any

from channels import UNLIKELY, Arguments, Call, Channel, Delta, Finish, Output, TokenLogprob, Usage
from completions import Chunk
from gateway.answers import CUT, TEXTS, Answer, ToolCall, objects
from request.refusals import shown

MAX_LOGPROB = 10**6  # magnitude: a larger number is no logprob, and may not fit a float


class Outputs:
    """Reads the chunks of an answer of one choice, and the fragments of its calls, which the answer holds."""

    def __init__(self, answer: Answer, n_top_logprobs: int) -> None:
        self._answer = answer
        self._n_top_logprobs = n_top_logprobs  # at most so many alternatives of a token are kept
        self._said: list[Output] = []  # outputs that leave now
        self._call: ToolCall | None = None  # the open one
        self._n_sent = 0  # its fragments
        self._waiting: list[ToolCall | Delta] = []  # until the open call, which was not whole, has ended
        self._channel: Channel | None = None  # of the newest output, if that is text
        self._logprobs: list[TokenLogprob] = []  # their text has not come
        self._finish = Finish("stop")

    def read(self, chunks: Iterable[Chunk]) -> list[Output]:
        """Return what can leave now."""
        self._said = []
        for chunk in chunks:
            if "error" in chunk:
                self._finish = Finish("failed", message=chunk["error"]["message"])
            for choice in chunk.get("choices", ()):
                self._choice(choice)
        return self._said

    def close(self, usage: Usage | None) -> list[Output | Finish]:
        """Return the rest, and how the answer ends."""
        self._said = []
        self._end_call()
        for item in self._waiting:
            self._add(item)
            self._end_call()
        if self._logprobs and self._channel == "final":  # such as that of a stop token
            self._said.append(Delta("final", "", tuple(self._logprobs)))
        return [*self._said, self._finish._replace(usage=usage)]

    def _choice(self, choice: Chunk) -> None:
        delta = choice["delta"]
        logprobs = self._logprobs_of(choice)
        for channel, (name, *_) in TEXTS.items():
            if text := delta.get(name):
                self._add(Delta(channel, text, logprobs if channel == "final" else ()))
        for fragment in delta.get("tool_calls") or ():
            if "id" in fragment:  # its first fragment
                self._add(self._answer.choices[0].calls[fragment["index"]])
        if self._call and self._call.fragments:  # until they begin its name may grow
            self._send(self._call)
        if choice.get("finish_reason") in CUT:
            self._finish = Finish(choice["finish_reason"])
        stop = choice.get("stop_reason") or choice.get("matched_stop")  # vLLM's name, and SGLang's
        if isinstance(stop, str):  # for a stop token it is an id, no text
            self._finish = self._finish._replace(stop_sequence=stop)

    # --- logprobs -------------------------------------------------------------------------------------------

    def _logprobs_of(self, choice: Chunk) -> tuple[TokenLogprob, ...]:
        """Return the logprobs of the text in this chunk: rule 3."""
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            self._logprobs += map(self._logprob, objects(logprobs.get("content")))
        text = choice["delta"].get("content")
        if not (text and self._logprobs):
            return ()
        start, end = span(text, self._logprobs)
        found = self._logprobs[start:end]
        self._logprobs = self._logprobs[end:]
        return tuple(found)

    def _logprob(self, entry: Chunk) -> TokenLogprob:
        token = entry.get("token")
        if not isinstance(token, str):
            token = shown(token)
        logprob = entry.get("logprob")
        if not isinstance(logprob, int | float) or abs(logprob) > MAX_LOGPROB:
            logprob = UNLIKELY
        token_bytes = bytes_of(entry.get("bytes"), token)
        alternatives = objects(entry.get("top_logprobs"))[: self._n_top_logprobs]
        return TokenLogprob(token, float(logprob), token_bytes, tuple(map(self._logprob, alternatives)))

    # --- one item after another -----------------------------------------------------------------------------

    def _add(self, item: ToolCall | Delta) -> None:
        """Begin an item once the open call is whole."""
        # If something waits already, its arguments were not whole then: they are parsed once.
        if self._call and not self._waiting and self._call.has_object():
            self._end_call()
        if self._call:
            self._waiting.append(item)
        elif isinstance(item, Delta):
            self._channel = item.channel
            self._said.append(item)
        else:
            self._call = item
            self._n_sent = 0

    def _end_call(self) -> None:
        if self._call:
            self._send(self._call)
        self._call = None

    def _send(self, call: ToolCall) -> None:
        """Send what has come of the open call; of one without a name nothing."""
        if not call.name:
            return
        if not self._n_sent:
            self._channel = None
            self._said.append(Call(call.name, call.type == "custom", extra=call.extra))
        if fragments := call.fragments[self._n_sent :]:
            self._said.append(Arguments("".join(fragments)))
        self._n_sent = len(call.fragments)


def bytes_of(value: Any, token: str) -> bytes:
    """Return the bytes of a token; some servers send none. bytes(300000000) would be as many zeros."""
    with suppress(TypeError, ValueError):
        if isinstance(value, list):
            return bytes(value)
    return token.encode()


def span(text: str, logprobs: list[TokenLogprob]) -> tuple[int, int]:
    """Return the range of the logprobs whose tokens spell the text; the range of all if no tokens do."""
    spelled = b"".join(p.bytes for p in logprobs)
    start = spelled.rfind(text.encode())
    if start < 0:
        return 0, len(logprobs)
    ends = [*accumulate(len(p.bytes) for p in logprobs)]
    first = bisect_right(ends, start) if start else 0  # parts of a character have no bytes
    return first, bisect_left(ends, start + len(text.encode())) + 1
