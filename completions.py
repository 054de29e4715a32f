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

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from channels import Arguments, Call, Close, Delta, Finish, Output, TokenLogprob, Usage
from request.refusals import error_object

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
            return [{"error": error_object(finish.message, code=finish.code)}]
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
