"""What a model is told of the client's tools, and what its calls become on their way back."""

import json
from datetime import datetime
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from channels import Arguments, Call, Close, Delta, Output, Parser, Piece
from dialects.families import DIALECTS
from helpers import laws, scripted
from helpers.tables import table
from request import params
from request.ids import PREFIXES
from request.items import with_image_texts
from request.messages import from_items
from request.refusals import BadInput
from request.tool_calls import Restorer, input_of
from request.tool_items import IMAGE_TEXT, TOOL_ITEM
from request.tools import NO_PARAMETERS, Grammar, Tool, tool_called

Json = dict[str, Any]
TABLE = table("tools")
texts = st.text(st.characters(exclude_categories=["Cs"]))

PATCH = Tool("patch", custom=True, description="Edit.", grammar=Grammar("lark", 'start: "a"'))
SEARCH = Tool("search", namespace="docs", parameters={"type": "object"})
NOTE = Tool("note", namespace="docs", custom=True)
PLAIN = Tool("f")
TOOLS = {tool.qualified_name: tool for tool in (PATCH, SEARCH, NOTE, PLAIN)}


# --- the input of a custom tool -----------------------------------------------------------------------------


def every_escape(text: str) -> str:
    """JSON with nothing left unescaped, in UTF-16 as JSON has it."""
    units = text.encode("utf-16-be")
    return '"' + "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2)) + '"'


WRITERS = [json.dumps, every_escape, lambda text: json.dumps(text, ensure_ascii=False).replace("/", "\\/")]


@given(texts, st.sampled_from(WRITERS), st.sampled_from(["", " ", "\n  "]))
def test_input_is_what_json_says(text: str, write: Any, blank: str) -> None:
    """However it is written."""
    written = f'{blank}{{{blank}"input"{blank}:{blank}{write(text)}{blank}}}{blank}'
    assert json.loads(written) == {"input": text}
    assert input_of(written) == text


@pytest.mark.parametrize(("written", "input"), TABLE["odd"])
def test_nothing_is_repaired_or_lost(written: str, input: str) -> None:
    assert input_of(written) == input


@given(texts.filter(lambda text: "tool_call>" not in text))
def test_what_a_template_renders_is_read_back(text: str) -> None:
    """A custom call in the history is written as the model would write it now."""
    call = {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": text}
    output = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}
    messages = from_items([{"role": "user", "content": "hi"}, call, output], None, []).messages
    prompt = scripted.TEMPLATES["hermes"].render(messages, [PATCH.definition()], datetime(2026, 1, 1))
    written = prompt[prompt.rindex("<tool_call>") : prompt.rindex("</tool_call>") + len("</tool_call>")]
    restorer, parser = Restorer(TOOLS), Parser(DIALECTS["hermes"])
    read: list[Any] = [output for one in parser.feed(Piece(written)) for output in restorer.feed(one)]
    assert laws.items(read) == [["custom", "patch", text]]


# --- calls --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [[Call("f"), Arguments("{}")], [Delta("final", "a")], [Close()]])
def test_the_input_of_a_call_leaves_before_what_follows(after: list[Output]) -> None:
    restorer = Restorer(TOOLS)
    found = [Call("docs__note"), Arguments('{"in'), Arguments('put": "a"}'), *after]
    told = [output for one in found for output in restorer.feed(one)]
    assert told == [Call("note", custom=True, namespace="docs"), Arguments("a"), *after]


@pytest.mark.bug("P20")
def test_a_tool_is_found_by_a_bare_or_dotted_name() -> None:
    """If only one has it: a model that knows `docs__note` calls `docs.note` or `note`."""
    other = Tool("search", namespace="web")
    assert [tool_called(TOOLS, name) for name in ("note", "docs.note", "search")] == [NOTE, NOTE, SEARCH]
    assert tool_called(TOOLS | {"web__search": other}, "search") == Tool("search")


def test_what_the_model_is_told() -> None:
    told = {name: tool.definition() for name, tool in TOOLS.items()}
    assert told["f"]["function"] == {"name": "f", "description": "", "parameters": NO_PARAMETERS}
    assert told["docs__search"]["function"]["parameters"] == {"type": "object"}
    patch = told["patch"]["function"]
    assert patch["description"] == "Edit."
    assert patch["parameters"]["required"] == ["input"]
    assert 'start: "a"' in patch["parameters"]["properties"]["input"]["description"]


# --- items of other tools: the model is told of each type that the SDK has, or it is refused by its place ---


@pytest.mark.bug("H09")
@pytest.mark.parametrize("row", TABLE["told"], ids=lambda row: row["function"])
def test_told_as_calls_of_functions(row: Json) -> None:
    """It was a 400, and the end of the session."""
    turn, *outcome = from_items(row["items"], None, []).messages
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
        from_items([before, item], None, [])
    assert (refusal.value.param, refusal.value.code) == (param, "unsupported_parameter")
    assert "--images placeholder" in refusal.value.message
    told = from_items([before, *with_image_texts([item])], None, []).messages
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
        from_items(with_image_texts(odd), None, [])
    assert (refusal.value.param, refusal.value.code) == ("input[0].content[0].type", "invalid_type")
