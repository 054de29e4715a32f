"""Rules on the chunks of a chat completion stream: what they hold, their choices, calls and usage.

    Capture --rule--> (number of a chunk, what is wrong with it), ...

Authority: https://platform.openai.com/docs/api-reference/chat-streaming

Not here: bytes (frames.py), the Responses API (events.py).
"""

from collections.abc import Iterator

from audit.rules import rules_of
from audit.schema import Faults, Json, missing, shortened
from audit.stream import Capture, changes, choices_of, is_object, markup, usage_faults

FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter")  # and "function_call", long deprecated

must, should, _ = rules_of("chunks", "chat")


def choices(capture: Capture) -> Iterator[tuple[int, int, Json]]:
    """Yield (number of the chunk, index of the choice, the choice)."""
    for number, chunk in enumerate(capture.events):
        for choice in chunk.get("choices", ()):
            yield number, choice.get("index", 0), choice


# --- what chunks hold ---------------------------------------------------------------------------------------


@must
def chunk_fields(capture: Capture) -> Faults:
    """chunk-fields: chunks have id, object, created, model and choices; choices index, delta and
    finish_reason

    openai/openai-openapi calls these members required
    G01 G07 https://github.com/vllm-project/vllm/pull/19662
    """
    for number, chunk in enumerate(capture.raw):
        if chunk and "error" not in chunk:
            for fault in missing(chunk, "chunk"):
                yield number, fault


@must
def one_completion(capture: Capture) -> Faults:
    """one-completion: id, created and model are the same in all chunks

    the API reference: each chunk has the same id and the same timestamp
    C07 https://platform.openai.com/docs/api-reference/chat-streaming
    """
    chunks = [chunk if "choices" in chunk else {} for chunk in capture.events]
    yield from changes(chunks, lambda name: name in ("id", "created", "model"))


@should
def role(capture: Capture) -> Faults:
    """role: the first delta of a choice has the role, later ones have none

    OpenAI's streams; clients that concatenate the members of deltas make 'assistantassistant'
    H05 https://github.com/sgl-project/sglang/issues/18335
    """
    begun: set[int] = set()  # choices
    for number, index, choice in choices(capture):
        delta = choice.get("delta", {})
        got = delta.get("role")
        if index not in begun and got != "assistant":
            yield number, f"expected role 'assistant' in the first delta of a choice, got {got!r}"
        elif index in begun and "role" in delta:
            yield number, f"expected no role in later deltas, got {got!r}"
        begun.add(index)


@must
def finish_reason(capture: Capture) -> Faults:
    """finish-reason: finish_reason is null until the last chunk of a choice, and then one of the API's

    openai/openai-openapi lists the reasons; agents decide by them
    G01 C18 https://github.com/ollama/ollama/issues/4357
    """
    ended: dict[int, str | None] = {}  # choice -> its finish_reason, None until it has one
    for number, index, choice in choices(capture):
        before = ended.get(index)
        reason = choice.get("finish_reason")
        if before is not None:
            yield number, f"expected nothing of a choice after its finish_reason {before!r}"
        elif reason not in (None, *FINISH_REASONS):
            yield number, f"expected finish_reason to be null or one of {FINISH_REASONS}, got {reason!r}"
        ended[index] = before or reason
    for index, reason in ended.items():
        if reason is None and not any("error" in chunk for chunk in capture.raw):
            message = f"expected a finish_reason of choice {index}, got the end of the stream"
            yield len(capture.raw) - 1, message


@must
def call_deltas(capture: Capture) -> Faults:
    """call-deltas: a call begins with index, id, type and name; then come index and arguments

    SDKs add up the deltas of a call by its index, and concatenate what is repeated
    E02 E04 G02 https://github.com/ggml-org/llama.cpp/pull/13800
    """
    n_calls: dict[int, int] = {}  # of a choice, so far
    for number, index, choice in choices(capture):
        for call in choice.get("delta", {}).get("tool_calls", ()):
            call_index = call.get("index", "none")
            called = call.get("function", {}) | call.get("custom", {})
            if call_index == n_calls.setdefault(index, 0):
                n_calls[index] += 1
                if not (call.get("id") and call.get("type") and called.get("name")):
                    yield number, f"expected a call to begin with id, type and name, got {call}"
            elif call_index not in range(n_calls[index]):
                yield number, f"expected the calls of a choice to count 0, 1, 2, ..., got {call_index}"
            elif {"id", "type"} & call.keys() or "name" in called:
                yield number, f"expected later deltas of a call to hold index and arguments only, got {call}"
        if choice.get("finish_reason") == "tool_calls" and not n_calls.get(index):
            yield number, "expected finish_reason 'tool_calls' of a choice with calls only, got one without"


@must
def chunk_texts(capture: Capture) -> Faults:
    """chunk-texts: none of the model's own markup in the content; the arguments of a call are JSON

    the API reference: the arguments are JSON text; markup in a text is shown to people
    E01 E05 E06 E09 E16 https://github.com/vllm-project/vllm/issues/10395
    """
    last = len(capture.events) - 1
    for answer in choices_of(capture.events).values():
        if answer.end not in ("stop", "tool_calls"):
            continue
        if marker := markup(answer.text):
            yield last, f"expected content without markup of the model's, got {marker}"
        for call in answer.calls.values():
            if call["name"] and not is_object(call["arguments"]):
                got = shortened(call["arguments"])
                yield last, f"expected the arguments of a call to be a JSON object, got {got!r}"


# --- usage and errors ---------------------------------------------------------------------------------------


@should
def usage_chunk(capture: Capture) -> Faults:
    """usage-chunk: usage comes once, last, without choices; before it usage is null

    the API reference: one more chunk with empty choices, and null in all others
    B10 B11 G05 G07 https://github.com/BerriAI/litellm/issues/28735
    """
    with_usage = [number for number, chunk in enumerate(capture.events) if "usage" in chunk]
    for number in with_usage:
        yield from usage_faults(number, capture.events[number]["usage"], "prompt", "completion")
    if len(with_usage) > 1:
        yield with_usage[1], "expected usage once"
    for number, raw in enumerate(capture.raw):
        if "choices" in raw and (raw["choices"] == []) != (number in with_usage):
            yield number, "expected usage in a chunk without choices, and nothing else in such a chunk"
        if with_usage and number < with_usage[0] and "usage" not in raw and "choices" in raw:
            yield number, "expected usage: null in the chunks before the one that has it, got no usage"
        if with_usage and number > with_usage[0] and raw.get("choices"):
            yield number, "expected the chunk of the usage to be the last"


@should
def error_frame(capture: Capture) -> Faults:
    """error-frame: an error has message, type, param and code, and is the last chunk

    the SDKs raise what stands in the member error, and read no further
    B13 C20 https://github.com/open-webui/open-webui/issues/29628
    """
    for number, chunk in enumerate(capture.raw):
        error = chunk.get("error")
        if not error:
            continue
        for fault in missing(error if isinstance(error, dict) else {}, "error"):
            yield number, fault
        if number < len(capture.raw) - 1:
            yield number + 1, "expected nothing after an error but [DONE]"
