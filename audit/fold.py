"""What an answer says, in the words of neither API: plain or streamed, a response or a completion.

    response --of_response()--> Answer        [chunk, ...] --of_chunks()--> Answer
    [chunk, ...] --choices_of()--> {index: Answer}        a completion is one chunk

Authority: https://platform.openai.com/docs/api-reference for the objects.

Not here: what an answer must be (answers.py, agents.py, chunks.py), how it is asked for (peer.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from audit.schema import Json, without

CALLS = ("function_call", "custom_tool_call")
ENDS = {"max_output_tokens": "length", "completed": "stop"}
# Members that differ from one time to the next, and those that items need not have.
VOLATILE = ("id", "call_id", "status", "encrypted_content", "logprobs")


@dataclass
class Answer:
    end: str = ""  # stop, length, tool_calls, failed, ...: as chat completions call it
    text: str = ""
    tokens: str = ""  # of the logprobs
    calls: dict[int, Json] = field(default_factory=dict)  # with a name and arguments; of a response its items
    response: Json = field(default_factory=dict)  # as it came; of a completion the chunk with the usage

    @property
    def usage(self) -> Json:
        return dict(self.response.get("usage") or {})

    @property
    def n_prompt(self) -> int:
        return self.counts.get("input_tokens", self.counts.get("prompt_tokens", 0))

    @property
    def n_output(self) -> int:
        return self.counts.get("output_tokens", self.counts.get("completion_tokens", 0))

    @property
    def counts(self) -> dict[str, int]:
        return {name: n for name, n in self.usage.items() if isinstance(n, int)}

    @property
    def names(self) -> list[str]:
        """Those of the tools that are called."""
        return [call["name"] for call in self.calls.values()]

    @property
    def outline(self) -> Json:
        """What is said, without ids and times."""
        if "output" not in self.response:
            return {"end": self.end, "text": self.text, "calls": self.calls}
        output, error = (without(self.response.get(name), *VOLATILE) for name in ("output", "error"))
        return {"end": self.end, "usage": self.counts, "output": output, "error": error}

    def items(self, type_: str) -> list[Json]:
        return [item for item in self.response.get("output") or () if item.get("type") == type_]


def of_response(response: Json) -> Answer:
    answer = Answer(response=response)
    for item in response.get("output") or ():
        if item.get("type") in CALLS:
            answer.calls[len(answer.calls)] = item
    for message in answer.items("message"):
        for part in message.get("content") or ():
            answer.text += part.get("text") or ""
            answer.tokens += tokens_of(part.get("logprobs"))
    reason = (response.get("incomplete_details") or {}).get("reason") or response.get("status")
    is_called = answer.calls and reason == "completed"
    answer.end = "tool_calls" if is_called else ENDS.get(str(reason), str(reason))
    return answer


def choices_of(chunks: Iterable[Json]) -> dict[int, Answer]:
    """Add up the choices of chunks."""
    answers: dict[int, Answer] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or ():
            answer = answers.setdefault(choice.get("index", 0), Answer())
            said = choice.get("delta") or choice.get("message") or {}
            answer.text += said.get("content") or ""
            answer.tokens += tokens_of((choice.get("logprobs") or {}).get("content"))
            answer.end = choice.get("finish_reason") or answer.end
            for place, more in enumerate(said.get("tool_calls") or ()):
                call = answer.calls.setdefault(more.get("index", place), {"name": "", "arguments": ""})
                for member in call:
                    call[member] += (more.get("function") or {}).get(member) or ""
    return answers


def of_chunks(chunks: list[Json]) -> Answer:
    """Return the first choice, with the usage of all."""
    answer = choices_of(chunks).get(0, Answer())
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    answer.response = [{}, *chunks[-1:], *with_usage][-1]
    return answer


def tokens_of(logprobs: Iterable[Json] | None) -> str:
    return "".join(str(entry.get("token")) for entry in logprobs or ())
