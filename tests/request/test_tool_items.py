"""Items of other tools: every type that the SDK has is told to the model, or is refused by its place."""

import json
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from request import params
from request.ids import PREFIXES
from request.items import with_image_texts
from request.messages import from_responses
from request.refusals import BadInput
from request.tool_items import IMAGE_TEXT, TOOL_ITEM

Json = dict[str, Any]

SCREENSHOT = {"type": "computer_screenshot", "image_url": "data:"}
CLICK = {"type": "click", "x": 1, "y": 2, "button": "left"}
TOOLS = {"tools": [{"type": "function", "name": "f"}]}
RAN = {"output": [{"stdout": "a", "outcome": {"type": "exit", "exit_code": 0}}], "status": "completed"}
LS = {"action": {"command": ["ls"]}}
ASKED = {"server_label": "docs", "name": "find", "arguments": '{"q": "x"}'}


def call(item_type: str, **members: Any) -> Json:
    return {"type": item_type, "call_id": "c"} | members


# fmt: off
#   items
#       the call: function, arguments; its result
TOLD: list[tuple[list[Json], str, Json, Json | None]] = [
    ([call("shell_call", **LS), call("shell_call_output", **RAN)],
        "shell", LS, RAN),
    ([call("local_shell_call", **LS), {"type": "local_shell_call_output", "id": "c", "output": "a"}],
        "local_shell", LS, {"output": "a"}),
    ([{"type": "tool_search_call", "arguments": "x"}, {"type": "tool_search_output"} | TOOLS],
        "tool_search", {"arguments": "x"}, TOOLS),
    ([{"type": "mcp_approval_request", "id": "m"} | ASKED,
      {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True}],
        "mcp_approval", ASKED, {"approve": True}),
    ([{"type": "mcp_call", "id": "m", "output": "a"} | ASKED],
        "mcp", {"output": "a"} | ASKED, None),
    ([{"type": "mcp_list_tools", "id": "m"} | TOOLS],
        "mcp_list_tools", TOOLS, None),
]
# fmt: on


@pytest.mark.bug("H09")
@pytest.mark.parametrize(("items", "function", "arguments", "result"), TOLD)
def test_told_as_calls_of_functions(items: list[Json], function: str, arguments: Json, result: Any) -> None:
    """It was a 400, and the end of the session."""
    (turn, *outcome), *_ = from_responses(items, None, [])
    (said,) = turn["tool_calls"]
    assert said["function"] == {"name": function, "arguments": arguments}
    told = {"role": "tool", "tool_call_id": said["id"], "name": function, "content": json.dumps(result)}
    assert outcome == ([told] if result else [])


def test_the_tools_of_a_request_win() -> None:
    """Bug: what an old search had found replaced the tool of that name, and its strict schema."""

    def tool(name: str, about: str) -> Json:
        return {"type": "function", "name": name, "description": about}

    brought = {"tools": [tool("f", "old"), tool("g", "old")]}
    items = [{"type": "additional_tools", "role": "developer"} | brought, {"role": "user", "content": "hi"}]
    body = {"model": "m", "input": items, "tools": [tool("f", "new")]}
    told = [one["function"] for one in params.from_responses(body, {}).tools]
    assert [(one["name"], one["description"]) for one in told] == [("f", "new"), ("g", "old")]


def test_all_types_are_those_of_the_sdk() -> None:
    """All but a change of the configuration, which no model reads."""
    theirs: set[str] = set()
    for item in get_args(ResponseInputItemParam):
        theirs.update(name for name in get_args(get_type_hints(item)["type"]) if isinstance(name, str))
    theirs.discard("configuration_update")
    assert {name for name in theirs if not TOOL_ITEM.fullmatch(name)} <= {*PREFIXES, "item_reference"}


IMAGE = {"type": "input_image", "image_url": "x"}
IMAGES: list[tuple[Json, str]] = [
    (call("computer_call_output", output=SCREENSHOT), "input[1].output"),
    ({"type": "image_generation_call", "result": "iVBO"}, "input[1].result"),
    ({"role": "user", "content": [IMAGE]}, "input[1].content[0].type"),
    (call("function_call_output", output=[IMAGE]), "input[1].output[0].type"),
]


@pytest.mark.parametrize(("item", "param"), IMAGES)
def test_images_are_refused_by_their_place_or_told_of(item: Json, param: str) -> None:
    before = call("computer_call", action=CLICK)
    with pytest.raises(BadInput) as refusal:
        from_responses([before, item], None, [])
    assert (refusal.value.param, refusal.value.code) == (param, "unsupported_parameter")
    assert "--images placeholder" in refusal.value.message
    told, *_ = from_responses([before, *with_image_texts([item])], None, [])
    assert IMAGE_TEXT in str(told)


def test_what_a_tool_was_called_with_is_no_image() -> None:
    """Bug: with --images placeholder the input of a call lost what looked like an image."""
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"type": "image", "content": [IMAGE]}}
    messages = [{"role": "assistant", "content": [use, IMAGE]}]
    (told,) = with_image_texts(messages)
    assert told["content"] == [use, {"type": "input_text", "text": IMAGE_TEXT}]


def test_a_part_whose_type_is_not_a_text_is_refused_with_placeholders_too() -> None:
    """Bug: with --images placeholder its type was looked up as it came, and a list has no hash: a 500."""
    odd: list[Any] = [{"role": "user", "content": [{"type": []}]}, {"type": {}, "content": [{"type": []}]}]
    assert with_image_texts(odd) == odd
    with pytest.raises(BadInput) as refusal:
        from_responses(with_image_texts(odd), None, [])
    assert (refusal.value.param, refusal.value.code) == ("input[0].content[0].type", "invalid_type")
