"""The members of events, items, parts and chunks: which there must be, and the type of each.

    JSON object --typed()--> the same object without members of a wrong type
    JSON object --missing()--> a fault for each member that must be there and is not, or has a wrong type

Authority: https://github.com/openai/openai-openapi, the types of its schemas and what they call "required".

Rules of this file:
1. One table says it all about one kind of object. A member whose name ends with "?" may be absent, as in
   TypeScript; every other one must be there.
2. A type is str, int, list or object (anything, null too); a table, for an object with these members; or
   [table], for a list of such objects.
3. Members that stand in no table may be there and are not looked at.

Not here: which event may follow which (order.py), what the members must say (rules.py).
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

Json = dict[str, Any]
Members = dict[str, Any]  # name -> type
Faults = Iterator[tuple[int, str]]  # (number of an event, what is wrong with it)


def union(tables: Iterable[Members]) -> Members:
    """The members that any of the tables has: no name has two types."""
    return {name: type_ for table in tables for name, type_ in table.items()}


# --- both APIs ----------------------------------------------------------------------------------------------

# fmt: off
COUNTS = {
    "input_tokens?": int, "output_tokens?": int, "total_tokens?": int, "prompt_tokens?": int,
    "completion_tokens?": int, "cached_tokens?": int, "reasoning_tokens?": int,
}
USAGE = COUNTS | {
    "input_tokens_details?": COUNTS, "output_tokens_details?": COUNTS,
    "prompt_tokens_details?": COUNTS, "completion_tokens_details?": COUNTS,
}
ERROR = {"message": object, "type": object, "param": object, "code": object}

# --- the Responses API --------------------------------------------------------------------------------------

#  part, by type         its members besides type
PARTS: dict[str, Members] = {
    "output_text":       {"text": str, "annotations": list, "logprobs": list},
    "refusal":           {"refusal": str},
    "reasoning_text":    {"text": str},
    "summary_text":      {"text": str},
}
PART: Members = {"type": str} | union(PARTS.values())

#  item, by type         its members besides type
ITEMS: dict[str, Members] = {
    "message":           {"id": str, "status": str, "role": str, "content": [PART]},
    "reasoning":         {"id": str, "status?": str, "summary": [PART], "content?": [PART]},
    "function_call":     {"id": str, "status": str, "call_id": str, "name": str, "arguments": str},
    "custom_tool_call":  {"id": str, "status?": str, "call_id": str, "name": str, "input": str},
    "compaction":        {"id": str, "encrypted_content": str},
}
ITEM: Members = {"type": str} | union(ITEMS.values())

RESPONSE: Members = {
    "id": str, "object": object, "created_at": object, "status": str, "error": {}, "incomplete_details": {},
    "instructions": object, "model": object, "tools": object, "output": [ITEM], "tool_choice": object,
    "parallel_tool_calls": object, "metadata": object, "temperature": object, "top_p": object,
    "usage?": USAGE,
}

# Where in the output an event belongs.
ITEM_PLACE = {"item_id": str, "output_index": int}
PART_PLACE = ITEM_PLACE | {"content_index": int}
SUMMARY_PLACE = ITEM_PLACE | {"summary_index": int}

#  event, by type                              its members besides type and sequence_number
EVENTS: dict[str, Members] = {
    "response.created":                        {"response": RESPONSE},
    "response.queued":                         {"response": RESPONSE},
    "response.in_progress":                    {"response": RESPONSE},
    "response.completed":                      {"response": RESPONSE},
    "response.incomplete":                     {"response": RESPONSE},
    "response.failed":                         {"response": RESPONSE},
    "response.output_item.added":              {"output_index": int, "item": ITEM},
    "response.output_item.done":               {"output_index": int, "item": ITEM},
    "response.content_part.added":             PART_PLACE | {"part": PART},
    "response.content_part.done":              PART_PLACE | {"part": PART},
    "response.output_text.delta":              PART_PLACE | {"delta": str, "logprobs": list},
    "response.output_text.done":               PART_PLACE | {"text": str, "logprobs": list},
    "response.output_text.annotation.added":   PART_PLACE | {"annotation_index": int, "annotation": object},
    "response.refusal.delta":                  PART_PLACE | {"delta": str},
    "response.refusal.done":                   PART_PLACE | {"refusal": str},
    "response.reasoning_text.delta":           PART_PLACE | {"delta": str},
    "response.reasoning_text.done":            PART_PLACE | {"text": str},
    "response.reasoning.delta":                PART_PLACE | {"delta": str},
    "response.reasoning.done":                 PART_PLACE | {"text": str},
    "response.reasoning_summary_part.added":   SUMMARY_PLACE | {"part": PART},
    "response.reasoning_summary_part.done":    SUMMARY_PLACE | {"part": PART},
    "response.reasoning_summary_text.delta":   SUMMARY_PLACE | {"delta": str},
    "response.reasoning_summary_text.done":    SUMMARY_PLACE | {"text": str},
    "response.function_call_arguments.delta":  ITEM_PLACE | {"delta": str},
    "response.function_call_arguments.done":   ITEM_PLACE | {"name?": str, "arguments": str},
    "response.custom_tool_call_input.delta":   ITEM_PLACE | {"delta": str},
    "response.custom_tool_call_input.done":    ITEM_PLACE | {"input": str},
    "response.compaction.compacting":          ITEM_PLACE,
    "response.steer.accepted":                 {"steer": object},
    "response.steer.pending":                  {"steer": object, "reason": str, "required_input": list},
    "response.steer.failed":                   {"steer": object, "error": object},
    "error":                                   {"code": object, "message": object, "param": object},
}
EVENT: Members = {"type": str, "sequence_number": int} | union(EVENTS.values())

# --- chat completions ---------------------------------------------------------------------------------------

CALL = {
    "index?": int, "id?": str, "type?": str,
    "function?": {"name?": str, "arguments?": str}, "custom?": {"name?": str, "input?": str},
}
DELTA = {"role?": str, "content?": str, "tool_calls?": [CALL]}
CHOICE = {"index": int, "delta": DELTA, "finish_reason": str}  # its null means: not yet
CHUNK = {
    "id": str, "object": str, "created": int, "model": str, "choices": [CHOICE],
    "usage?": USAGE, "error?": ERROR,
}
# fmt: on


# --- objects against their table ----------------------------------------------------------------------------


def required(members: Members) -> list[str]:
    return [name for name in members if not name.endswith("?")]


def typed(value: Json, members: Members) -> Json:
    """The object without members of another type than their table says, at any depth."""
    fitted = {name: fit(member, type_of(name, members)) for name, member in value.items()}
    return {name: member for name, member in fitted.items() if member is not WRONG}


def type_of(name: str, members: Members) -> Any:
    return members.get(name, members.get(f"{name}?", object))


WRONG = object()  # in place of a value of another type


def fit(value: Any, type_: Any) -> Any:
    match type_:
        case dict() if isinstance(value, dict):
            return typed(value, type_)
        case [members] if isinstance(value, list):
            return [typed(entry, members) for entry in value if isinstance(entry, dict)]
        case type() if isinstance(value, type_) and not (type_ is int and isinstance(value, bool)):
            return value
        case _:
            return WRONG


def paired(holder: Json, raw: Json, member: str) -> list[tuple[Json, Json]]:
    """The objects in a list, each typed and as it came; [] where the holder has no such list."""
    if member not in holder:
        return []
    raw_objects = [value for value in raw[member] if isinstance(value, dict)]
    return list(zip(holder[member], raw_objects, strict=True))


def missing(number: int, what: str, holder: Json, raw: Json, members: Members) -> Faults:
    """Faults of an object that lacks a required member, or has it of another type.

    `number` is that of the event, `what` names the object; `holder` is the object typed, `raw` as it came.
    """
    for name in required(members):
        if name not in raw:
            yield number, f"{what} lacks {name}"
        elif name not in holder:
            yield number, f"{what} has {name} of another type: {shortened(json.dumps(raw[name]))}"


def shortened(text: str, length: int = 80) -> str:
    if len(text) <= length:
        return text
    return f"{text[: length // 2]}...{text[-length // 2 :]}"
