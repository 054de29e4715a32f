"""What streams are made of: the members of events, items, parts and chunks, and which event may follow which.

    JSON object --typed()--> the same object without members of a wrong type
    JSON object --missing()--> a fault for each member that must be there and is not, or has a wrong type
    event --label()--> its name in GRAMMAR        (state, label) --ORDER--> the next state

Authority: https://github.com/openai/openai-openapi, the types of its schemas and what they call "required";
https://platform.openai.com/docs/api-reference/responses-streaming for the order.

Rules of this file:
1. One table says it all about one kind of object. A member whose name ends with "?" may be absent, as in
   TypeScript; every other one must be there. Members that stand in no table are not looked at.
2. A type is str, int, list or object (anything, null too); a table, for an object with these members; or
   [table], for a list of such objects. Events, items and parts each have one type for one name.
3. The tables are the judge's own: nothing is imported from a server that is judged.
4. What a server runs itself (web search, code, MCP) is one state, "hosted": its events are its own.

Not here: what the members must say (events.py, chunks.py).
"""

import json
import re
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


# --- which event may follow which ---------------------------------------------------------------------------

# state         event, and the item or part it opens or ends              next state
TABLE = """
start           response.created                                          created
created         response.queued                                           queued
created         response.in_progress                                      between
queued          response.in_progress                                      between

between         response.output_item.added message                        message
message         response.content_part.added output_text                   text
text            response.output_text.delta                                text
text            response.output_text.done                                 text done
text done       response.content_part.done output_text                    message done
message         response.content_part.added refusal                       refusal
refusal         response.refusal.delta                                    refusal
refusal         response.refusal.done                                     refusal done
refusal done    response.content_part.done refusal                        message done
message done    response.output_item.done message                         between

between         response.output_item.added reasoning                      reasoning
reasoning       response.content_part.added reasoning_text                thought
thought         response.reasoning_text.delta                             thought
thought         response.reasoning_text.done                              thought done
thought         response.reasoning.delta                                  thought
thought         response.reasoning.done                                   thought done
thought done    response.content_part.done reasoning_text                 reasoning done
reasoning done  response.output_item.done reasoning                       between

between         response.output_item.added function_call                  call
call            response.function_call_arguments.delta                    call
call            response.function_call_arguments.done                     call done
call done       response.output_item.done function_call                   between

between         response.output_item.added custom_tool_call               custom
custom          response.custom_tool_call_input.delta                     custom
custom          response.custom_tool_call_input.done                      custom done
custom done     response.output_item.done custom_tool_call                between

between         response.output_item.added compaction                     compaction
compaction      response.output_item.done compaction                      between

between         response.completed                                        end
between         response.incomplete                                       end
between         response.failed                                           end
queued          response.failed                                           end

message done    response.content_part.added output_text                   text
text            response.output_text.annotation.added                     text
message done    response.content_part.added refusal                       refusal

reasoning done  response.content_part.added reasoning_text                thought
reasoning       response.output_item.done reasoning                       between
reasoning       response.reasoning_summary_part.added summary_text        summary
reasoning done  response.reasoning_summary_part.added summary_text        summary
summary         response.reasoning_summary_text.delta                     summary
summary         response.reasoning_summary_text.done                      summary done
summary done    response.reasoning_summary_part.done summary_text         reasoning done

compaction      response.compaction.compacting                            compaction

between         response.output_item.added *                              hosted
hosted          response.*                                                hosted
hosted          response.output_item.done *                               between
"""
ROWS = [re.split("  +", row) for row in TABLE.splitlines() if row]
GRAMMAR = {(state, event): then for state, event, then in ROWS}
# fmt: off
HOSTED = ("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_",
          "computer_call", "local_shell_call", "shell_call", "apply_patch_call", "tool_search")
# fmt: on

# A failure may leave open whatever is open.
ORDER = GRAMMAR | {(state, "response.failed"): "end" for state in {*GRAMMAR.values()} - {"end"}}
AFTER = {event: state for (_, event), state in ORDER.items()}  # where an event leads that came out of order


def label(event: Json) -> str:
    """Name an event as GRAMMAR does: its type, and the type of the item or part that it opens or ends."""
    event_type = str(event.get("type"))
    if event_type.removeprefix("response.").startswith(HOSTED):
        return "response.*"
    inner: Json | None = event.get("item") or event.get("part")
    if not inner:
        return event_type
    inner_type = inner.get("type", "")
    if event_type.startswith("response.output_item.") and inner_type.startswith(HOSTED):
        inner_type = "*"
    return f"{event_type} {inner_type}"


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
