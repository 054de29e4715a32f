"""Tool items: calls that have item types of their own, and their results, as calls of functions.

    shell_call {call_id: "c", action: {commands: [...]}} --said()--> Call("c", "shell", '{"commands": [...]}')
    shell_call_output {call_id: "c", output: [...]}      --said()--> Result("c", '{"output": [...]}')
    web_search_call {id: "ws_1", action: {query: "x"}}   --said()--> Call, Result: it has run elsewhere

Agents send back what other models have called, of tools that this server does not have. No model here was
trained on those items, but each was trained on calls of functions; so they are told as those.

Authority: openai.types.responses.ResponseInputItemParam. What becomes of a session where they are refused:
https://github.com/caozhiyuan/copilot-api/issues/359

Rules of this file:
1. A new type is one row of TOOL_ITEMS, and nothing else.
2. What the row names is told, as it came; other members mean nothing to a model.
3. Images are refused, by the name of their place, unless items.py has put a text there (IMAGE_TEXT).

Not here: functions and custom tools, which this server's models call (messages.py); tools that an item brings
with it (params.py).
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from request.refusals import no_images
from request.validation import text

IMAGE_TEXT = "[an image, which cannot be shown here]"


class Call(NamedTuple):
    """A call as the model would have made it."""

    call_id: str
    name: str
    arguments: str  # JSON
    needs_result: bool


class Result(NamedTuple):
    """What came of a call."""

    call_id: str
    text: str


class ToolItem(NamedTuple):
    """What is told of an item of one type: its members, with blanks between their names."""

    prefix: str  # of its id
    arguments: str  # an object is the arguments, anything else is one of them; "": the item is no call
    result: str  # "": the result is another item

    @property
    def is_call(self) -> bool:
        return bool(self.arguments)

    @property
    def has_result(self) -> bool:
        return bool(self.result)


# fmt: off
#   type of an item                     prefix  arguments                      result
TOOL_ITEMS = {
    "shell_call":              ToolItem("sh",   "action",                      ""),
    "shell_call_output":       ToolItem("sho",  "",                            "output"),
    "local_shell_call":        ToolItem("lsh",  "action",                      ""),
    "local_shell_call_output": ToolItem("lsho", "",                            "output"),
    "apply_patch_call":        ToolItem("apc",  "operation",                   ""),
    "apply_patch_call_output": ToolItem("apco", "",                            "status output"),
    "computer_call":           ToolItem("cu",   "action actions",              ""),
    "computer_call_output":    ToolItem("cuo",  "",                            "output"),
    "tool_search_call":        ToolItem("tsc",  "arguments",                   ""),
    "tool_search_output":      ToolItem("tso",  "",                            "tools"),
    "program":                 ToolItem("prg",  "code",                        ""),
    "program_output":          ToolItem("prgo", "",                            "result"),
    "mcp_approval_request":    ToolItem("mcpr", "server_label name arguments", ""),
    "mcp_approval_response":   ToolItem("mcpa", "",                            "approve reason"),
    "mcp_list_tools":          ToolItem("mcpl", "server_label",                "tools error"),
    "mcp_call":                ToolItem("mcp",  "server_label name arguments", "output error"),
    "web_search_call":         ToolItem("ws",   "action",                      "status"),
    "file_search_call":        ToolItem("fs",   "queries",                     "results status"),
    "code_interpreter_call":   ToolItem("ci",   "code",                        "outputs status"),
    "image_generation_call":   ToolItem("ig",   "revised_prompt",              "result status"),
}

#   type of an item            its member that is the id of the call, or another one where that is not given;
CALL_IDS = {                 # else it is `call_id`, or `id` where call and result are one item
    "local_shell_call_output": ("call_id", "id"),
    "mcp_approval_request":    ("id",),
    "mcp_approval_response":   ("approval_request_id",),
}

#   type of an item            its member that holds an image
IMAGE_MEMBERS = {
    "computer_call_output":    "output",
    "image_generation_call":   "result",
}
# fmt: on
MAY_LACK_RESULT = ("mcp_approval_request",)  # the user may go on without an answer to it
TYPE_SUFFIXES = ("_output", "_call", "_request", "_response")  # behind the name of the tool


def function_name(item_type: str) -> str:
    """The function that stands for the tool of an item."""
    for suffix in TYPE_SUFFIXES:
        item_type = item_type.removesuffix(suffix)
    return item_type


def call_id_members(item_type: str) -> tuple[str, ...]:
    row = TOOL_ITEMS[item_type]
    if item_type in CALL_IDS:
        return CALL_IDS[item_type]
    if row.is_call and row.has_result:
        return ("id",)
    return ("call_id",)


def said(item: Mapping[str, Any], path: str) -> list[Call | Result]:
    """Return what an item with a row in TOOL_ITEMS says; raises BadInput."""
    item_type = item["type"]
    row = TOOL_ITEMS[item_type]
    image_member = IMAGE_MEMBERS.get(item_type, "")
    if item.get(image_member) not in (None, IMAGE_TEXT):
        raise no_images(f"{path}.{image_member}")
    function = function_name(item_type)
    call_id = function  # of a search that the server runs: it has no other
    for name, value in _given(item, call_id_members(item_type)).items():
        call_id = text(value, f"{path}.{name}")
        break
    told: list[Call | Result] = []
    if row.is_call:
        needs_result = item.get("status") != "incomplete" and item_type not in MAY_LACK_RESULT
        told.append(Call(call_id, function, _arguments(_given(item, row.arguments.split())), needs_result))
    if row.has_result:
        told.append(Result(call_id, _text(_given(item, row.result.split()))))
    return told


def _given(item: Mapping[str, Any], members: Iterable[str]) -> dict[str, Any]:
    return {name: item[name] for name in members if item.get(name) is not None}


def _arguments(members: Mapping[str, Any]) -> str:
    arguments: dict[str, Any] = {}
    for name, value in members.items():
        if isinstance(value, dict):
            arguments |= value
        else:
            arguments[name] = value
    return _as_json(arguments)


def _text(members: Mapping[str, Any]) -> str:
    """A text as it is, anything else as JSON."""
    values = list(members.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return _as_json(members)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
