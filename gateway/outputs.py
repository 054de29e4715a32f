"""An answer of one choice as the outputs that a response is built of.

    [chunk, ...] --Outputs.read()--> [Delta | Call | Arguments, ...] --close()--> the rest, Finish

Authority: https://platform.openai.com/docs/api-reference/responses-streaming, where one item comes after
another; in chunks text and several calls may come by turns.

    chunk                   outputs
    call 0: {"x":           Call f, Arguments {"x":
    text: hi                                            waits, for call 0 is open
    call 1: {"y":2}                                     waits
    call 0: 1}              Arguments 1}, Delta hi, Call g, Arguments {"y":2}
    finish_reason           Finish

Rules of this file:
1. Reasoning and calls are what the upstream says they are. What looks like a marker in its text is text.
2. An item closes before the next one opens: the first call is sent until its arguments are whole; other
   calls, and text amid its arguments, wait for their turn.
3. A logprob goes with its text. Those of text that has not come yet wait for it, those of a marker before the
   text are dropped. Parts of a character have no bytes with vLLM; they are not dropped.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from channels import UNLIKELY, Arguments, Call, Channel, Delta, Finish, Output, TokenLogprob, Usage
from completions import Chunk
from gateway.answers import CUT, TEXTS, Answer, ToolCall, objects
from request.refusals import shown

MAX_TOKEN_BYTES = 1024  # of one token of the logprobs; the longest of known vocabularies have some 200
MAX_TOP_LOGPROBS = 20  # OpenAI's limit
MAX_LOGPROB = 10**6  # magnitude: what is larger is not a logprob, and may not be a float


class Outputs:
    """Reads the chunks of an answer of one choice, and the fragments of its calls, which the answer holds."""

    def __init__(self, answer: Answer, n_top_logprobs: int = MAX_TOP_LOGPROBS) -> None:
        self._answer = answer
        self._n_top_logprobs = n_top_logprobs  # a token has no more alternatives, whatever is sent
        self._said: list[Output] = []  # what leaves now
        self._waiting: deque[ToolCall | Delta] = deque()  # the first is a call, which may be open
        self._n_sent = 0  # fragments of that call; 0: it is not open
        self._channel: Channel | None = None  # of the text that has left last; None: a call, or nothing
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
        self._send_waiting(is_over=True)
        if self._logprobs and self._channel == "final":  # such as that of a stop token
            self._said.append(Delta("final", "", tuple(self._logprobs)))
        return [*self._said, self._finish._replace(usage=usage)]

    def _choice(self, choice: Chunk) -> None:
        delta = choice["delta"]
        logprobs = self._logprobs_of(choice)
        for channel, (name, *_) in TEXTS.items():
            if text := delta.get(name):
                self._waiting.append(Delta(channel, text, logprobs if channel == "final" else ()))
        for fragment in delta.get("tool_calls") or ():
            if "id" in fragment:  # its first fragment
                self._waiting.append(self._answer.choices[0].calls[fragment["index"]])
        self._send_waiting()
        if choice.get("finish_reason") in CUT:
            self._finish = Finish(choice["finish_reason"])

    # --- logprobs -------------------------------------------------------------------------------------------

    def _logprobs_of(self, choice: Chunk) -> tuple[TokenLogprob, ...]:
        """Return the logprobs of the text in this chunk: rule 3."""
        if not self._logprobs and not choice.get("logprobs"):
            return ()
        delta = choice["delta"]
        entries = (choice.get("logprobs") or {}).get("content")
        self._logprobs += map(self._logprob, objects(entries))
        text = delta.get("content") or ""
        has_others = bool(delta.get("reasoning") or delta.get("refusal") or delta.get("tool_calls"))
        if not (text or has_others):
            return ()
        logprobs = self._logprobs
        self._logprobs = []
        if has_others or self._channel != "final":
            logprobs = spelling(text, logprobs, and_rest=not has_others)
        return tuple(logprobs)

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

    def _send_waiting(self, is_over: bool = False) -> None:
        """Send what waits, up to a call that is not whole, and of that call what has come."""
        while self._waiting:
            item = self._waiting[0]
            if isinstance(item, Delta):
                self._channel = item.channel
                self._said.append(item)
            else:
                self._send(item, is_over)
                has_left = self._n_sent and item.nesting.is_whole and len(self._waiting) > 1
                if not (has_left or is_over):
                    return
                self._n_sent = 0
            self._waiting.popleft()

    def _send(self, call: ToolCall, is_over: bool) -> None:
        """Send what has come of a call; until its arguments begin its name may grow."""
        fragments = call.fragments[self._n_sent :]
        if not call.name or not (fragments or is_over):
            return
        if not self._n_sent:
            self._channel = None
            self._said.append(Call(call.name, call.type == "custom"))
        if fragments:
            self._said.append(Arguments("".join(fragments)))
        self._n_sent = len(call.fragments)


def bytes_of(value: Any, token: str) -> bytes:
    """Return the bytes of a token; some servers send none. bytes(300000000) would be as many zeros."""
    if isinstance(value, list) and len(value) <= MAX_TOKEN_BYTES:
        with suppress(TypeError, ValueError):
            return bytes(value)
    return token.encode()


def spelling(text: str, logprobs: Sequence[TokenLogprob], and_rest: bool) -> list[TokenLogprob]:
    """Return the logprobs whose tokens spell the text; all of them if none do.

    Reasoning or a marker may stand before them. Calls or a stop token may follow: `and_rest` keeps those.
    """
    spelled = b"".join(p.bytes for p in logprobs)
    wanted = text.encode()
    start = spelled.rfind(wanted)
    if start < 0 or (and_rest and spelled.startswith(wanted)):
        start = 0
    end = len(spelled) + 1 if and_rest else start + len(wanted)
    chosen = []
    at = 0
    for p in logprobs:
        if at < end and max(at + len(p.bytes), at + 1) > start:
            chosen.append(p)
        at += len(p.bytes)
    return chosen
