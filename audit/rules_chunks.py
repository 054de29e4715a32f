"""Rules on the chunks of a chat completion stream: what they hold, their choices, calls and usage.

    Capture --rule--> (number of a chunk, what is wrong with it), ...

Authority: https://platform.openai.com/docs/api-reference/chat-streaming

Not here: bytes (rules_framing.py), the Responses API (rules_events.py), the list of all rules (rules.py).
"""

from collections.abc import Iterator

from audit.contents import is_object, markup, usage_faults
from audit.members import CHOICE, CHUNK, ERROR, Faults, Json, missing, paired, shortened
from audit.recordings import Capture

FINISH_REASONS = {"stop", "length", "tool_calls", "content_filter"}  # and "function_call", long deprecated
CALL_TYPES = {"function", "custom"}


def choices(capture: Capture) -> Iterator[tuple[int, int, Json, Json]]:
    """(number of the chunk, index of the choice, the choice typed, the choice as it came)"""
    for number, chunk, raw in capture.typed_and_raw():
        for choice, raw_choice in paired(chunk, raw, "choices"):
            yield number, choice.get("index", 0), choice, raw_choice


# --- what chunks hold ---------------------------------------------------------------------------------------


def chunk_members(capture: Capture) -> Faults:
    for number, chunk, raw in capture.typed_and_raw():
        if "error" in raw or not raw:
            continue
        yield from missing(number, "a chunk", chunk, raw, CHUNK)
        object_type = chunk.get("object", "")
        if object_type not in ("", "chat.completion.chunk"):
            yield number, f"expected object chat.completion.chunk, got {object_type}"
        for choice, raw_choice in paired(chunk, raw, "choices"):
            if raw_choice.get("finish_reason", "") is None:  # there, and not yet known
                choice = choice | {"finish_reason": None}
            yield from missing(number, "a choice", choice, raw_choice, CHOICE)


def one_completion(capture: Capture) -> Faults:
    chunks = [(number, chunk) for number, chunk in enumerate(capture.events) if "choices" in chunk]
    for number, chunk in chunks[1:]:
        _, first = chunks[0]
        for member in ("id", "created", "model"):
            got = chunk.get(member)
            expected = first.get(member, got)
            if member in chunk and got != expected:
                yield number, f"expected {member} {expected!r} as in the first chunk, got {got!r}"


def error_is_last(capture: Capture) -> Faults:
    for number, chunk, raw in capture.typed_and_raw():
        if not raw.get("error"):
            continue
        yield from missing(number, "an error", raw["error"], chunk.get("error", {}), ERROR)
        if number < len(capture.raw) - 1:
            yield number + 1, "expected nothing behind an error but [DONE]"


# --- choices ------------------------------------------------------------------------------------------------


def one_role(capture: Capture) -> Faults:
    begun: set[int] = set()  # choices
    for number, index, choice, raw in choices(capture):
        role = choice.get("delta", {}).get("role")
        raw_delta = raw["delta"] if "delta" in choice else {}
        if index not in begun and role != "assistant":
            got = raw_delta.get("role")
            yield number, f"expected role 'assistant' in the first delta of a choice, got {got!r}"
        elif index in begun and "role" in raw_delta:
            yield number, f"expected no role in later deltas, got {raw_delta['role']!r}"
        begun.add(index)


def one_finish(capture: Capture) -> Faults:
    begun: set[int] = set()  # choices
    ended: dict[int, str] = {}  # choice -> its finish_reason
    for number, index, choice, _ in choices(capture):
        begun.add(index)
        reason = choice.get("finish_reason")
        if index in ended:
            yield number, f"expected nothing of a choice behind its finish_reason {ended[index]!r}"
        elif reason is not None and reason not in FINISH_REASONS:
            expected = sorted(FINISH_REASONS)
            yield number, f"expected finish_reason to be null or one of {expected}, got {reason!r}"
        if reason is not None:
            ended[index] = reason
    has_failed = any("error" in chunk for chunk in capture.raw)
    if not has_failed:
        for index in sorted(begun - ended.keys()):
            message = f"expected a finish_reason of choice {index}, got the end of the stream"
            yield len(capture.raw) - 1, message


def calls(capture: Capture) -> Faults:
    n_calls: dict[int, int] = {}  # of a choice, so far
    for number, index, choice, raw in choices(capture):
        raw_delta = raw["delta"] if "delta" in choice else {}
        for call, raw_call in paired(choice.get("delta", {}), raw_delta, "tool_calls"):
            call_index = call.get("index")
            next_index = n_calls.get(index, 0)
            if call_index is None:
                yield number, "expected an index in each delta of a call, got none"
            elif call_index > next_index:
                yield number, f"expected the calls of a choice to count 0, 1, 2, ..., got {call_index}"
            elif call_index == next_index:
                n_calls[index] = next_index + 1
                if not begins(call):
                    expected = "expected a call to begin with id, type and name"
                    yield number, f"{expected}, got {raw_call}"
            elif not continues(call, raw_call):
                expected = "expected later deltas of a call to hold index and arguments only"
                yield number, f"{expected}, got {raw_call}"
        if choice.get("finish_reason") == "tool_calls" and not n_calls.get(index):
            yield number, "expected finish_reason 'tool_calls' of a choice with calls only, got one without"


def begins(call: Json) -> bool:
    """Whether it is the first delta of a call, with all that names the call."""
    call_type = call.get("type", "")
    return "id" in call and call_type in CALL_TYPES and "name" in call.get(call_type, {})


def continues(call: Json, raw_call: Json) -> bool:
    """Whether it is a later delta of a call, which names nothing again."""
    called = call.get("function", {}) | call.get("custom", {})
    return not {"id", "type"} & raw_call.keys() and "name" not in called


def chunk_texts(capture: Capture) -> Faults:
    content: dict[int, str] = {}  # by choice
    arguments: dict[int, dict[int, str]] = {}  # by choice, by call
    for number, index, choice, _ in choices(capture):
        delta = choice.get("delta", {})
        content[index] = content.get(index, "") + delta.get("content", "")
        by_call = arguments.setdefault(index, {})
        for call in delta.get("tool_calls", ()):
            if "function" in call:
                call_index = call.get("index", 0)
                more = call["function"].get("arguments", "")
                by_call[call_index] = by_call.get(call_index, "") + more
        if choice.get("finish_reason") not in ("stop", "tool_calls"):
            continue
        if marker := markup(content[index]):
            yield number, f"expected content without markup of the model's, got {marker}"
        for text in by_call.values():
            if not is_object(text):
                yield number, f"expected the arguments of a call to be a JSON object, got {shortened(text)!r}"


# --- usage --------------------------------------------------------------------------------------------------


def usage_apart(capture: Capture) -> Faults:
    with_usage = [number for number, chunk in enumerate(capture.events) if "usage" in chunk]
    for number in with_usage:
        if capture.raw[number].get("choices"):
            yield number, "expected usage in a chunk without choices, got choices beside it"
        else:
            yield from usage_faults(number, capture.events[number]["usage"], "prompt", "completion")
    if len(with_usage) > 1:
        yield with_usage[1], "expected usage once"
    for number, chunk, raw in capture.typed_and_raw():
        if raw.get("choices") == [] and "usage" not in chunk:
            yield number, "expected a chunk without choices to hold usage"
        if not with_usage:
            continue
        if number < with_usage[0] and "usage" not in raw and "choices" in raw:
            yield number, "expected usage: null in the chunks before the one that has it, got no usage"
        if number > with_usage[0] and raw.get("choices"):
            yield number, "expected the chunk of the usage to be the last"
