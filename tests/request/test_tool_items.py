"""Items of other tools: every type that the SDK has is told to the model, or is refused by its place."""

import json
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from helpers.tables import table
from request import params
from request.ids import PREFIXES
from request.items import with_image_texts
from request.messages import from_responses
from request.refusals import BadInput
from request.tool_items import IMAGE_TEXT, TOOL_ITEM

Json = dict[str, Any]

TABLE = table("tool_items")


@pytest.mark.bug("H09")
@pytest.mark.parametrize("row", TABLE["told"], ids=lambda row: row["function"])
def test_told_as_calls_of_functions(row: Json) -> None:
    """It was a 400, and the end of the session."""
    (turn, *outcome), *_ = from_responses(row["items"], None, [])
    (said,) = turn["tool_calls"]
    assert said["function"] == {"name": row["function"], "arguments": row["arguments"]}
    told = {"role": "tool", "tool_call_id": said["id"], "name": row["function"]}
    assert outcome == ([told | {"content": json.dumps(row["result"])}] if "result" in row else [])


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


@pytest.mark.parametrize(("item", "param"), TABLE["images"])
def test_images_are_refused_by_their_place_or_told_of(item: Json, param: str) -> None:
    before = {"type": "computer_call", "call_id": "c", "action": {"type": "click", "x": 1, "y": 2}}
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
