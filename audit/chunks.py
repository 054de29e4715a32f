"""Rules on the chunks of a chat completion stream: members, choices, calls and usage.

    Capture --rule--> (number of a chunk, its fault), ...

Authority: https://platform.openai.com/docs/api-reference/chat-streaming

Not here: bytes (frames.py), the Responses API (events.py).
"""

from collections import Counter
from collections.abc import Iterator

from audit.rules import rules_of
from audit.schema import Faults, Typed, faults_in, object_in, shortened
from audit.stream import MARKUP, Capture, agreed, changes, choices_of, is_object, usage_faults

FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter")  # and "function_call", long deprecated

must, should, _ = rules_of("chunks", "chat")


def choices(capture: Capture) -> Iterator[tuple[int, int, Typed]]:
    """Yield (number of the chunk, index of the choice, the choice)."""
    for number, chunk in capture.events:
        for choice in chunk["choices"]:
            yield number, choice.index or 0, choice


# --- what chunks hold ---------------------------------------------------------------------------------------


@must
def one_completion(capture: Capture) -> Faults:
    """one-completion: id, created and model are the same in all chunks

    the API reference: each chunk has the same id and the same timestamp
    C07 https://platform.openai.com/docs/api-reference/chat-streaming
    """
    for_all = {"id", "created", "model"}
    yield from changes({name: chunk[name] for name in for_all & chunk.keys()} for _, chunk in capture.events)


@should
def role(capture: Capture) -> Faults:
    """role: the first delta of a choice has the role, later ones have none

    OpenAI's streams; clients that concatenate the members of deltas make 'assistantassistant'
    H05 https://github.com/sgl-project/sglang/issues/18335
    """
    begun: set[int] = set()  # choices
    for number, index, choice in choices(capture):
        if choice.delta.role != (None if index in begun else "assistant"):
            yield number, f"expected the role in the first delta alone, got {shortened(choice.delta)}"
        begun.add(index)


@must
def finish_reason(capture: Capture) -> Faults:
    """finish-reason: finish_reason is null until the last chunk of a choice, and then one of the API's

    openai/openai-openapi lists the reasons; agents decide by them
    G01 C18 https://github.com/ollama/ollama/issues/4357
    """
    ended: dict[int, str | None] = {}  # choice -> its finish_reason, None until it has one
    for number, index, choice in choices(capture):
        reason = choice.finish_reason
        if ended.get(index) is not None:
            yield number, f"expected nothing after a finish_reason, got {shortened(choice)}"
        elif reason not in (None, *FINISH_REASONS):
            yield number, f"expected null or one of {shortened(FINISH_REASONS)}, got {reason}"
        ended[index] = ended.get(index) or reason
    if None in ended.values() and not any("error" in chunk for chunk in capture.raw):
        yield len(capture.raw) - 1, "expected a finish_reason of each choice, got the end of the stream"


@must
def call_deltas(capture: Capture) -> Faults:
    """call-deltas: a call begins with index, id, type and name; then come index and arguments

    SDKs add up the deltas of a call by its index, and concatenate what is repeated
    E02 E04 G02 https://github.com/ggml-org/llama.cpp/pull/13800
    """
    n_begun = Counter[int]()  # choice -> how many calls it has
    for number, index, choice in choices(capture):
        for call in choice.delta.tool_calls:
            head = [call.id, call.type, call.function.name or call.custom.name]
            is_new = call.index not in range(n_begun[index])
            if is_new:
                yield from agreed(number, "the index of a new call to be", n_begun[index], call.index)
                n_begun[index] += 1
            if not all(head) if is_new else head != [None] * 3:
                yield number, f"expected id, type and name in the first delta alone, got {shortened(call)}"
        if choice.finish_reason == "tool_calls" and not n_begun[index]:
            yield number, "expected finish_reason 'tool_calls' of a choice with calls only, got one without"


@must
def chunk_texts(capture: Capture) -> Faults:
    """chunk-texts: none of the model's own markup in the content; the arguments of a call are JSON

    the API reference: the arguments are JSON text; markup in a text is shown to people
    E01 E05 E06 E09 E16 https://github.com/vllm-project/vllm/issues/10395
    """
    last = len(capture.events) - 1
    for answer in choices_of(capture.raw).values():
        if answer.end in ("stop", "tool_calls"):
            if marker := MARKUP.search(answer.text):
                yield last, f"expected content without markup of the model's, got {marker[0]}"
            for call in answer.calls.values():
                if call["name"] and not is_object(call["arguments"]):
                    yield last, f"expected arguments that are a JSON object, got {shortened(call)}"


# --- usage and errors ---------------------------------------------------------------------------------------


@should
def usage_chunk(capture: Capture) -> Faults:
    """usage-chunk: usage comes once, last, without choices; before it usage is null

    the API reference: one more chunk with empty choices, and null in all others
    B10 B11 G05 G07 https://github.com/BerriAI/litellm/issues/28735
    """
    counted = [number for number, chunk in capture.events if "usage" in chunk]
    for number in counted:
        yield from usage_faults(number, capture.events[number][1].usage, "prompt", "completion")
    for number, chunk in enumerate(capture.raw):
        if "choices" not in chunk or chunk.get("moderation") or not chunk.get("object"):
            continue  # OpenAI's moderation comes after the usage, and Azure's filter tells when it has read
        if (chunk["choices"] == []) != (number in counted):
            yield number, "expected usage in a chunk without choices, and nothing else in such a chunk"
        if counted and number < counted[0] and "usage" not in chunk:
            yield number, "expected usage: null in the chunks before the one that has it, got no usage"
        if number - 1 in counted:
            yield number, "expected the chunk of the usage to be the last"


@should
def error_frame(capture: Capture) -> Faults:
    """error-frame: an error has message, type, param and code, and is the last chunk

    the SDKs raise what stands in the member error, and read no further
    B13 C20 https://github.com/open-webui/open-webui/issues/29628
    """
    for number, chunk in enumerate(capture.raw):
        if chunk.get("error"):
            for fault in faults_in(object_in(chunk, "error"), "error"):
                yield number, fault
            if number < len(capture.raw) - 1:
                yield number + 1, "expected nothing after an error but [DONE]"
