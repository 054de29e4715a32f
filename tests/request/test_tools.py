"""What a model is told of the client's tools, and what its calls become on their way back."""

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from channels import Arguments, Call, Close, Delta, Output, Parser, Piece
from dialects.families import DIALECTS
from helpers import laws, scripted
from helpers.tables import table
from request.messages import from_responses
from request.tool_calls import Restorer, input_of
from request.tools import NO_PARAMETERS, Grammar, Tool, tool_called

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


@pytest.mark.parametrize(("written", "input"), table("tools")["odd"])
def test_nothing_is_repaired_or_lost(written: str, input: str) -> None:
    assert input_of(written) == input


@given(texts.filter(lambda text: "tool_call>" not in text))
def test_what_a_template_renders_is_read_back(text: str) -> None:
    """A custom call in the history is written as the model would write it now."""
    call = {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": text}
    output = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}
    messages, *_ = from_responses([{"role": "user", "content": "hi"}, call, output], None, [])
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
