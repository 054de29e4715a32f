"""Rules on the chunks of a chat completion stream.

    Capture --rule--> (number of a chunk, what is wrong with it), ...

Authority: https://platform.openai.com/docs/api-reference/chat-streaming

Not here: bytes (framing.py), the Responses API (events.py), the list of all rules (rules.py).
"""

from collections.abc import Iterator

from audit.events import is_json, missing, paired, usage_adds_up
from audit.recordings import Capture, Json
from audit.shapes import CHOICE, CHUNK, ERROR, FINISH_REASONS, MARKUP, Found, shortened

# --- chat completion chunks ---------------------------------------------------------------------------------


def chunk_fields(c: Capture) -> Found:
    for n, (chunk, raw) in enumerate(zip(c.events, c.raw, strict=True)):
        if "error" in raw or not raw:
            continue
        yield from missing(n, "a chunk", chunk, raw, CHUNK)
        if chunk.get("object", "") not in ("", "chat.completion.chunk"):
            yield n, f"expected object chat.completion.chunk, got {chunk['object']}"
        for choice, its_raw in paired(chunk, raw, "choices"):
            reason = {"finish_reason": None} if its_raw.get("finish_reason", "") is None else {}
            yield from missing(n, "a choice", choice | reason, its_raw, CHOICE)


def one_completion(c: Capture) -> Found:
    chunks = [(n, chunk) for n, chunk in enumerate(c.events) if "choices" in chunk]
    for n, chunk in chunks[1:]:
        for member in ("id", "created", "model"):
            if member in chunk and (first := chunks[0][1].get(member, chunk[member])) != chunk[member]:
                yield n, f"expected {member} {first!r} as in the first chunk, got {chunk[member]!r}"


def choices(c: Capture) -> Iterator[tuple[int, int, Json, Json]]:
    """(number of the chunk, index of the choice, the choice, as it came)"""
    for n, (chunk, raw) in enumerate(zip(c.events, c.raw, strict=True)):
        for choice, its_raw in paired(chunk, raw, "choices"):
            yield n, choice.get("index", 0), choice, its_raw


def one_role(c: Capture) -> Found:
    seen: set[int] = set()
    for n, index, choice, raw in choices(c):
        delta = raw.get("delta") or {}
        if index not in seen and choice.get("delta", {}).get("role") != "assistant":
            yield n, f"expected role 'assistant' in the first delta of a choice, got {delta.get('role')!r}"
        elif index in seen and "role" in delta:
            yield n, f"expected no role in later deltas, got {delta['role']!r}"
        seen.add(index)


def one_finish(c: Capture) -> Found:
    ended: dict[int, str] = {}
    for n, index, choice, _ in choices(c):
        reason = choice.get("finish_reason")
        if index in ended:
            yield n, f"expected nothing of a choice behind its finish_reason {ended[index]!r}"
        elif reason is not None and reason not in FINISH_REASONS:
            yield n, f"expected finish_reason to be null or one of {sorted(FINISH_REASONS)}, got {reason!r}"
        if reason is not None:
            ended[index] = reason
    failed = any("error" in chunk for chunk in c.raw)
    for index in sorted({index for _, index, _, _ in choices(c)} - ended.keys()):
        if not failed:
            yield len(c.raw) - 1, f"expected a finish_reason of choice {index}, got the end of the stream"


def calls(c: Capture) -> Found:
    known: dict[int, int] = {}  # calls of a choice
    for n, index, choice, raw in choices(c):
        for call, its_raw in paired(choice.get("delta", {}), raw.get("delta") or {}, "tool_calls"):
            named, place = call.get("function", {}) | call.get("custom", {}), call.get("index")
            if place is None:
                yield n, "expected an index in each delta of a call, got none"
            elif place == known.get(index, 0):
                known[index] = place + 1
                if not begins(call):
                    yield n, f"expected a call to begin with id, type, name and arguments '', got {its_raw}"
            elif place >= known.get(index, 0):
                yield n, f"expected the calls of a choice to count 0, 1, 2, ..., got {place}"
            elif {"id", "type"} & its_raw.keys() or "name" in named:
                yield n, f"expected later deltas of a call to hold index and arguments only, got {its_raw}"
        if choice.get("finish_reason") == "tool_calls" and not known.get(index):
            yield n, "expected finish_reason 'tool_calls' of a choice with calls only, got one without"


def begins(call: Json) -> bool:
    kind = call.get("type", "")
    said, holds = call.get(kind, {}), {"function": "arguments", "custom": "input"}
    return "id" in call and kind in holds and "name" in said and said.get(holds[kind]) == ""


def chunk_texts(c: Capture) -> Found:
    content, arguments = dict[int, str](), dict[tuple[int, int], str]()
    for n, index, choice, _ in choices(c):
        delta = choice.get("delta", {})
        content[index] = content.get(index, "") + delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            place = index, call.get("index", 0)
            arguments[place] = arguments.get(place, "") + call.get("function", {}).get("arguments", "")
        if choice.get("finish_reason") in ("stop", "tool_calls"):
            if found := MARKUP.search(content[index]):
                yield n, f"expected content without markup of the model's, got {found[0]}"
            for text in (
                text for (i, _), text in arguments.items() if i == index and text and not is_json(text)
            ):
                yield n, f"expected the arguments of a call to be JSON, got {shortened(text)!r}"


def usage_apart(c: Capture) -> Found:
    places = [n for n, chunk in enumerate(c.events) if "usage" in chunk]
    for n in places:
        if c.raw[n].get("choices") != []:
            yield n, "expected usage in a chunk without choices, got choices beside it"
        else:
            yield from usage_adds_up(n, c.events[n]["usage"], "prompt", "completion")
    if len(places) > 1:
        yield places[1], "expected usage once"
    for n, chunk in enumerate(c.raw):
        if chunk.get("choices") == [] and "usage" not in c.events[n]:
            yield n, "expected a chunk without choices to hold usage"
        if places and n < places[0] and "usage" not in chunk and "choices" in chunk:
            yield n, "expected usage: null in the chunks before the one that has it, got no usage"
        if places and n > places[0] and chunk.get("choices"):
            yield n, "expected the chunk of the usage to be the last"


def error_is_last(c: Capture) -> Found:
    for n, (chunk, raw) in enumerate(zip(c.events, c.raw, strict=True)):
        if raw.get("error"):
            yield from missing(n, "an error", raw["error"], chunk.get("error", {}), ERROR)
            if n < len(c.raw) - 1:
                yield n + 1, "expected nothing behind an error but [DONE]"
