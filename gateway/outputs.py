"""An answer of one choice as the outputs that a response is built of.

    chunk --Outputs.read()--> [Delta | Call | Arguments | Close, ...] --close()--> the rest, Finish

Authority: https://platform.openai.com/docs/api-reference/responses-streaming, where one item comes after
another; in chunks text and several calls may come by turns.

    chunk                   outputs
    call 0: {"x":           Call f, Arguments {"x":
    text: hi                                            waits, for call 0 is open
    call 1: {"y":2}                                     waits
    call 0: 1}              Arguments 1}, Close, Delta hi, Call g, Arguments {"y":2}
    finish_reason           Finish                      only now it is known whether call 1 is complete

Rules of this file:
1. Reasoning and calls are what the upstream says they are. What looks like a marker in its text is text.
2. An item closes before the next one opens: the first call is sent until its arguments are whole; other
   calls, and text amid its arguments, wait for their turn.
3. A logprob goes with its text. Those of text that has not come yet wait for it, those of a marker before the
   text are dropped. Parts of a character have no bytes with vLLM; they are not dropped.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from channels import UNLIKELY, Arguments, Call, Channel, Close, Delta, Finish, Output, TokenLogprob, Usage
from completions import Chunk
from gateway.answers import CUT, PAYLOADS, ToolCall, objects, texts_of
from request.refusals import shown

MAX_TOKEN_BYTES = 1024  # of one token of the logprobs; the longest of known vocabularies have some 200
MAX_TOP_LOGPROBS = 20  # OpenAI's limit
MAX_LOGPROB = 10**6  # magnitude: what is larger is no logprob, and may be no float


class Outputs:
    """Reads the chunks of an Answer of one choice."""

    def __init__(self, n_top_logprobs: int = MAX_TOP_LOGPROBS) -> None:
        self.failure = ""  # the message of an error
        self._n_top_logprobs = n_top_logprobs  # a token has no more alternatives, whatever is sent
        self._calls: dict[int, ToolCall] = {}
        self._waiting: deque[ToolCall | Delta] = deque()  # the first is a call, which may be open
        self._channel: Channel | None = None  # of the text that has left last; None: a call, or nothing
        self._logprobs: list[TokenLogprob] = []  # their text has not come
        self._reason: Any = "stop"

    def read(self, chunk: Chunk) -> Iterator[Output]:
        if "error" in chunk:
            self.failure = chunk["error"]["message"]
            return
        for choice in chunk["choices"]:
            yield from self._choice(choice)

    def close(self, usage: Usage | None) -> Iterator[Output | Finish]:
        while self._waiting:
            yield from self._leave()
        yield from self._rest_of_logprobs()
        if self.failure:
            yield Finish("failed", usage, self.failure)
        else:
            yield Finish(self._reason, usage)

    def _choice(self, choice: Chunk) -> Iterator[Output]:
        texts = texts_of(choice["delta"])
        content = texts["final"]
        entries = (choice.get("logprobs") or {}).get("content")
        logprobs = [self._logprob(entry) for entry in objects(entries)]
        has_others = texts["analysis"] or texts["refusal"] or choice["delta"].get("tool_calls")
        if has_others:
            yield from self._rest_of_logprobs()
            logprobs = spelling(content, logprobs)
        self._logprobs += logprobs
        for channel, text in texts.items():
            if text:
                yield from self._text(channel, text)
        for fragment in choice["delta"].get("tool_calls") or ():
            self._call_fragment(fragment)
        yield from self._advance()
        if choice.get("finish_reason") in CUT:
            self._reason = choice["finish_reason"]

    # --- text -----------------------------------------------------------------------------------------------

    def _text(self, channel: Channel, text: str) -> Iterator[Output]:
        logprobs: list[TokenLogprob] = []
        if channel == "final":
            logprobs = self._logprobs
            self._logprobs = []
            if self._channel != "final":
                logprobs = spelling(text, logprobs, and_rest=True)
        delta = Delta(channel, text, tuple(logprobs))
        if self._waiting:
            self._waiting.append(delta)
        else:
            self._channel = channel
            yield delta

    def _rest_of_logprobs(self) -> Iterator[Output]:
        """Logprobs without a text, such as that of a stop token, go with the text before."""
        if self._logprobs and self._channel == "final":
            yield Delta("final", "", tuple(self._logprobs))
        self._logprobs = []

    def _logprob(self, entry: Chunk) -> TokenLogprob:
        token = entry.get("token")
        if not isinstance(token, str):
            token = shown(token)
        logprob = entry.get("logprob")
        if not isinstance(logprob, int | float) or abs(logprob) > MAX_LOGPROB:
            logprob = UNLIKELY
        token_bytes = token.encode()
        if are_bytes(entry.get("bytes")):  # some servers send none
            token_bytes = bytes(entry["bytes"])
        alternatives = objects(entry.get("top_logprobs"))[: self._n_top_logprobs]
        return TokenLogprob(token, float(logprob), token_bytes, tuple(map(self._logprob, alternatives)))

    # --- calls ----------------------------------------------------------------------------------------------

    def _call_fragment(self, fragment: Chunk) -> None:
        index = fragment["index"]
        if index not in self._calls:
            self._calls[index] = ToolCall(index, fragment["id"], fragment["type"])
            self._waiting.append(self._calls[index])
        call = self._calls[index]
        said = fragment.get(call.type) or {}
        call.name += said.get("name") or ""
        call.add(said.get(PAYLOADS[call.type]) or "")

    def _advance(self) -> Iterator[Output]:
        """What waits leaves, up to a call that is not whole, and of that call what has come."""
        while self._waiting:
            item = self._waiting[0]
            if isinstance(item, ToolCall):
                if not (item.name and item.fragments):  # until then the name may grow
                    return
                yield from self._unsent(item)
                if len(self._waiting) == 1 or not item.nesting.is_whole:
                    return
            yield from self._leave()

    def _unsent(self, call: ToolCall) -> Iterator[Output]:
        self._channel = None
        if not call.is_open:
            call.is_open = True
            yield Call(call.name, call.type == "custom")
        text = "".join(call.fragments[call.n_sent :])
        call.n_sent = len(call.fragments)
        if text:
            yield Arguments(text)

    def _leave(self) -> Iterator[Output]:
        """The first that waits leaves for good."""
        item = self._waiting.popleft()
        if isinstance(item, Delta):
            self._channel = item.channel
            yield item
        elif item.name:  # it may have been cut before that
            yield from self._unsent(item)
            if self._waiting:
                yield Close(is_cut=not item.is_whole())


def are_bytes(value: Any) -> bool:
    """Whether these may be the bytes of a token. bytes(300000000) would be as many of them, all zero."""
    if not isinstance(value, list) or len(value) > MAX_TOKEN_BYTES:
        return False
    return all(type(byte) is int and 0 <= byte <= 255 for byte in value)


def spelling(text: str, logprobs: list[TokenLogprob], and_rest: bool = False) -> list[TokenLogprob]:
    """Return the logprobs whose tokens spell the text; all of them if none do.

    Reasoning or a marker may stand before them. Calls or a stop token may follow: `and_rest` keeps those.
    """
    spelled = b"".join(p.bytes for p in logprobs)
    wanted = text.encode()
    start = spelled.rfind(wanted)
    if start < 0 or (and_rest and spelled.startswith(wanted)):
        start = 0
    end = start + len(wanted)
    if and_rest:
        end = len(spelled) + 1
    chosen = []
    at = 0
    for p in logprobs:
        if at < end and max(at + len(p.bytes), at + 1) > start:
            chosen.append(p)
        at += len(p.bytes)
    return chosen
