"""Deltas to chat completion chunks, chunks to the completion they amount to, and chunks back to deltas.

    [Delta | Call | Arguments | Close, ...], Finish --Chunks--> [chunk, ...] --fold()--> chat.completion
    [chunk of another server, ...] --Deltas--> [Delta | Call | Arguments | Close, ...], Finish

Authority: https://platform.openai.com/docs/api-reference/chat-streaming and the chat types of the `openai`
package.

Rules of this file:
1. The non-streaming answer is the fold of the same chunks.
2. Every chunk has the same id, created and model, and a list of choices; `finish_reason` is null until the
   last one of a choice, and never absent.
3. A call's first delta carries index, id, type, name and empty arguments; later ones index and arguments.
   A custom tool's has `custom` for `function` and `input` for `arguments` (the SDK's chunk lags behind).
4. Usage comes in one more chunk, without choices, to those who asked: sgl-project/sglang#5451
5. Reasoning has two names, DeepSeek's `reasoning_content` and OpenRouter's `reasoning`: same text in both.
6. Of other servers less is expected. Reasoning and calls are what they say they are; what looks like a marker
   in their text is text, for without tokens nobody can tell. An answer is whole when they say so.

Not here: `[DONE]` and frames (sse.py), ids and the time (arguments).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from channels import Arguments, Call, Channel, Close, Delta, Finish, Output, TokenLogprob, Usage

Chunk = dict[str, Any]

# fmt: off
#  custom     type of a call, and the name of its members; what it is called with
FIELDS = {
    False:      ("function", "arguments"),
    True:       ("custom",   "input"),
}
# fmt: on


class Chunks:
    """Makes the chunks of one request, of all its choices.

    `named_call`: the request names the function to call, and "finish_reason will be 'stop'" then:
    https://platform.openai.com/docs/guides/function-calling

    `head` holds what every chunk repeats: id, created, model, system_fingerprint. `new_id(prefix)` draws an
    id.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        new_id: Callable[[str], str],
        n: int,
        include_usage: bool,
        named_call: bool = False,
    ) -> None:
        self._head = dict(head)
        self._new_id = new_id
        self._include_usage = include_usage
        self._named_call = named_call
        self._n_calls = [0] * n
        self._custom = [False] * n  # is the newest call one of a custom tool
        self._usage: list[Usage] = []
        self._failed = False  # one choice did: nothing follows the error, of the other choices either

    def start(self) -> list[Chunk]:
        """The role, before the prompt is read: later deltas omit it
        (github.com/sgl-project/sglang/issues/18335).
        """
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(len(self._n_calls))]

    def feed(self, index: int, output: Output) -> list[Chunk]:
        match output:
            case _ if self._failed:
                return []
            case Delta("analysis", text, _):
                return [self._chunk(index, {"reasoning_content": text, "reasoning": text})]
            case Delta("refusal", text, _):
                return [self._chunk(index, {"refusal": text})]
            case Delta(_, text, logprobs):
                return [self._chunk(index, {"content": text}, logprobs=logprobs)]
            case Call(name, custom):
                self._n_calls[index] += 1
                self._custom[index] = custom
                kind, field = FIELDS[custom]
                call = {"id": self._new_id("call"), "type": kind, kind: {"name": name, field: ""}}
                return [self._call(index, call)]
            case Arguments(text):
                kind, field = FIELDS[self._custom[index]]
                return [self._call(index, {kind: {field: text}})]
            case Close():
                return []

    def finish(self, index: int, finish: Finish) -> list[Chunk]:
        """The end of one choice; of the request, if it failed."""
        if self._failed:
            return []
        if finish.reason in ("failed", "cancelled"):
            self._failed = True
            error = {"message": finish.message, "type": "server_error", "param": None, "code": finish.code}
            return [{"error": error}]
        if finish.usage:
            self._usage.append(finish.usage)
        called = finish.reason == "stop" and self._n_calls[index] and not self._named_call
        return [self._chunk(index, {}, finish_reason="tool_calls" if called else finish.reason)]

    def end(self) -> list[Chunk]:
        """The end of the request: its usage, summed over the choices, which share one prompt."""
        if self._failed or not self._include_usage:
            return []
        return [self._head | {"object": "chat.completion.chunk", "choices": [], "usage": _usage(self._usage)}]

    def _call(self, index: int, call: Mapping[str, Any]) -> Chunk:
        return self._chunk(index, {"tool_calls": [{"index": self._n_calls[index] - 1, **call}]})

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        finish_reason: str | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Chunk:
        shown = {"content": [_logprob(p) for p in logprobs], "refusal": None} if logprobs else None
        choice = {"index": index, "delta": dict(delta), "logprobs": shown, "finish_reason": finish_reason}
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice]}
        return chunk | {"usage": None} if self._include_usage else chunk


def fold(chunks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The chat.completion object that a stream amounts to; the error object, if it ends in one."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if "error" in chunk:
            return dict(chunk)
        whole |= {k: v for k, v in chunk.items() if k != "choices" and v is not None} | {
            "object": "chat.completion"
        }
        for part in chunk.get("choices") or ():
            index = part.get("index", 0)
            _add(choices.setdefault(index, _empty_choice(index)), part)
    for choice in choices.values():
        message = choice["message"]
        if message["content"] == "" and ("tool_calls" in message or message["refusal"]):
            message["content"] = None  # as OpenAI has it where the model only calls, or refuses
    return whole | {"choices": [choices[i] for i in sorted(choices)]}


def _empty_choice(index: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": "", "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": None}


def _add(choice: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add one chunk's part to the choice it belongs to; another server's may lack what ours always have."""
    message, delta = choice["message"], part.get("delta") or {}
    for name in ("content", "reasoning_content", "reasoning", "refusal"):
        if isinstance(delta.get(name), str):
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        kind, field = FIELDS["custom" in call]
        said = call.get(kind) or {}
        if call.get("index", len(calls)) >= len(calls):
            new = said | {field: said.get(field) or ""}
            calls.append({"id": call.get("id"), "type": kind, kind: new})
        elif kind in (known := calls[call["index"]]):
            known[kind][field] += said.get(field) or ""
    if logprobs := part.get("logprobs"):
        choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
        choice["logprobs"]["content"] += logprobs.get("content") or []
    choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]


def _usage(choices: list[Usage]) -> dict[str, Any]:
    prompt, completion = (
        max((u.input_tokens for u in choices), default=0),
        sum(u.output_tokens for u in choices),
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        # What one choice finds may be what another of them has computed: that was no saving.
        "prompt_tokens_details": {"cached_tokens": min((u.cached_tokens for u in choices), default=0)},
        "completion_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for u in choices)},
    }


def _logprob(p: TokenLogprob) -> dict[str, Any]:
    return _without_top(p) | {"top_logprobs": [_without_top(t) for t in p.top]}


def _without_top(p: TokenLogprob) -> dict[str, Any]:
    return {"token": p.token, "logprob": p.logprob, "bytes": list(p.bytes)}


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
