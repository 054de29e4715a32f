"""Deltas to the chunks of Chat Completions, and chunks to the completion that they amount to.

    [Delta | Call | Arguments | Close, ...], Finish --Chunks--> [chunk, ...] --fold()--> chat.completion

Authority: https://platform.openai.com/docs/api-reference/chat-streaming and the chat types of the `openai`
package.

Rules of this file:
1. The answer without `stream` is the fold of the same chunks.
2. Every chunk has the same id, created and model, and a list of choices; `finish_reason` is null until the
   last chunk of a choice, and never absent.
3. A call's first delta carries index, id, type, name and empty arguments; later ones index and arguments.
   A custom tool's has `custom` for `function`, `input` for `arguments` (the SDK's chunk type lacks them).
4. Usage comes in one more chunk, without choices, if the client has asked for it: sgl-project/sglang#5451
5. Reasoning has two names, DeepSeek's `reasoning_content` and OpenRouter's `reasoning`: same text in both.

Why no table of what may follow what, as in responses.py and blocks.py: a chunk opens and closes nothing, so
any chunk may follow any other. Clients rely on one order, a call's head before its arguments, and the deltas
have it already.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sse
from channels import Accepted, Arguments, Call, Close, Compaction, Delta, Finish, Said, TokenLogprob, Usage
from request.refusals import BadInput, error_body

Chunk = sse.Object  # as on the wire; the logprobs of a token are encoded already

# fmt: off
#  is it a custom tool's?  (type of the call, member that holds its arguments or input)
CALL_MEMBERS = {
    False:             ("function", "arguments"),
    True:              ("custom",   "input"),
}
# fmt: on


@dataclass
class Chunks:
    """Makes the chunks of one request, for all its choices. All calls come from the event loop."""

    head: sse.Object  # members of every chunk: id, created, model, system_fingerprint, service_tier
    new_id: Callable[[str], str]  # draws an id with this prefix
    n: int  # choices
    include_usage: bool
    # tool_choice names the function to call: "finish_reason will be 'stop'" then, according to
    # https://platform.openai.com/docs/guides/function-calling
    named_call: bool = False

    def __post_init__(self) -> None:
        # For each choice, and each of its calls so far: is it a call of a custom tool?
        self._calls: list[list[bool]] = [[] for _ in range(self.n)]
        self._usages: list[Usage] = []  # of the choices that have ended
        self._failed = False  # a choice has failed: no chunk of any choice follows the error

    def feed(self, index: int, said: Said) -> list[Chunk]:
        """Return the chunks of one thing that a choice says. A failure is the end of the whole request.

        After the last choice comes the usage, which is summed over all: they share one prompt.
        """
        if self._failed:
            return []
        delta: Chunk = {}
        members: Chunk = {}  # more of the choice than its delta
        calls = self._calls[index]
        match said:
            case Accepted():  # before the prompt is read; later deltas omit it: sgl-project/sglang#18335
                delta = {"role": "assistant", "content": ""}
            case Delta("analysis", text):
                delta = {"reasoning_content": text, "reasoning": text}
            case Delta("refusal", text):
                delta = {"refusal": text}
            case Delta(_, text, logprobs):
                delta = {"content": text}
                members["logprobs"] = _logprobs(logprobs)
            case Call(name, is_custom):
                type_, member = CALL_MEMBERS[is_custom]
                calls.append(is_custom)
                call = {"id": self.new_id("call"), "type": type_, type_: {"name": name, member: ""}}
                delta = _called(calls, call)
            case Arguments(text):
                type_, member = CALL_MEMBERS[calls[-1]]
                delta = _called(calls, {type_: {member: text}})
            case Finish("failed"):
                self._failed = True
                return [error_body(BadInput(said.message, code=said.code))]
            case Finish(reason, usage):
                self._usages.append(usage or Usage(0, 0))
                members["finish_reason"] = reason
                if reason == "stop" and calls and not self.named_call:
                    members["finish_reason"] = "tool_calls"
            case Close() | Compaction():
                return []
        return self._chunks(index, {"delta": delta} | members)

    def _chunks(self, index: int, members: Chunk) -> list[Chunk]:
        """Return the chunk of a choice, and after the last one that of the usage."""
        choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": None} | members
        chunks = [self.head | {"object": "chat.completion.chunk", "choices": [choice]}]
        if self.include_usage:
            chunks[0]["usage"] = None
            if len(self._usages) == self.n:
                chunks.append(chunks[0] | {"choices": [], "usage": _usage(self._usages)})
        return chunks


# --- chunks to a completion ---------------------------------------------------------------------------------

TEXTS = (
    "content", "reasoning_content", "reasoning", "refusal", "name", "arguments", "input",
    "text", "thinking", "signature", "partial_json",  # of a block (blocks.py)
)  # fmt: skip
NUMBERED = ("choices", "tool_calls")  # lists whose elements say by their `index` which of them grows


def fold(chunks: Iterable[Chunk]) -> Chunk:
    """Return the chat.completion object of a stream, or the error object that ends it."""
    said: list[Chunk] = [{}, *chunks]
    if "error" in said[-1]:
        return said[-1]
    completion: Chunk = grown("", said)
    choices = [ended(choice) for choice in completion.pop("choices", ())]
    return completion | {"object": "chat.completion", "choices": choices}


def grown(name: str, said: Iterable[Any]) -> Any:
    """Return a member after all of its values in the chunks.

    One rule holds for all members, also for members that only another server knows: texts and lists grow, an
    object grows member by member, null changes nothing, and any other value replaces the one before.
    """
    values = [value for value in said if value is not None]
    if not values:
        return None
    newest = values[-1]
    values = [value for value in values if type(value) is type(newest)]
    match newest:
        case str() if name in TEXTS:
            return "".join(values)
        case dict():
            members: dict[str, list[Any]] = {}
            for member, value in itertools.chain(*map(dict.items, values)):
                members.setdefault(member, []).append(value)
            return {member: grown(member, known) for member, known in members.items()}
        case list() if name in NUMBERED:
            by_index: dict[int, list[Chunk]] = {}
            for element in itertools.chain(*values):
                match element:
                    case {"index": int(index)}:  # another server may send anything by this name
                        by_index.setdefault(index, []).append(element)
            return [grown(name, by_index[index]) for index in sorted(by_index)]
        case list():
            return [*itertools.chain(*values)]
    return newest


def ended(choice: Chunk) -> Chunk:
    """Return a choice with a message instead of its delta."""
    message: Chunk = {"role": "assistant", "content": "", "refusal": None, "annotations": []}
    message |= choice.pop("delta")
    for call in message.get("tool_calls") or ():
        del call["index"]
    if not message["content"] and (message.get("tool_calls") or message["refusal"]):
        message["content"] = None  # OpenAI's value if the model only calls, or refuses
    members = {"index": choice["index"], "message": message, "logprobs": None, "finish_reason": None}
    return members | choice


def _called(calls: list[bool], call: Chunk) -> Chunk:
    """Return the delta of the newest of these calls."""
    return {"tool_calls": [{"index": len(calls) - 1, **call}]}


def _usage(usages: Sequence[Usage]) -> sse.Object:
    n_prompt = max(usage.input_tokens for usage in usages)
    n_completion = sum(usage.output_tokens for usage in usages)
    # The smallest: one choice may find tokens in the prefix cache that another choice has computed.
    n_cached = min(usage.cached_tokens for usage in usages)
    n_reasoning = sum(usage.reasoning_tokens for usage in usages)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "completion_tokens_details": {"reasoning_tokens": n_reasoning},
    }


def _logprobs(logprobs: Sequence[TokenLogprob]) -> Chunk | None:
    """Encode each logprob now, since the whole answer repeats it."""
    if not logprobs:
        return None
    return {"content": [sse.encoded(token.entry()) for token in logprobs], "refusal": None}
