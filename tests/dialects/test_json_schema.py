"""What is read of schemas before llguidance has seen them, and that the work with it is bounded."""

from typing import Any
from unittest.mock import Mock

import pytest

from dialects import json_schema
from dialects.families import DIALECTS
from dialects.json_schema import MAX_VARIANTS, BadGrammar, has_circle, target, types_of, variants
from dialects.structured_output import answer_grammar
from helpers.tables import table
from request.tools import StructuredOutput, Tool


class Unread(list[Any]):
    """A list that is looked at by index only."""

    def __iter__(self) -> Any:
        raise AssertionError("all of the list is read")


TABLE = table("json_schema")


@pytest.mark.parametrize(("ref", "found"), [*TABLE["targets"], ("#/a/" + "9" * 5000, 0)])
def test_pointers(ref: str, found: Any) -> None:
    """https://www.rfc-editor.org/rfc/rfc6901. A list was made into a dict for each: ten hours for a body."""
    assert target({"a": Unread([1, {"b/c": 2, "d~e": 3, "f g": 4}])}, ref) == (found or None)


def test_types_of_a_property_with_very_many_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is read in the loop of all streams, and the schema of a free call has not been checked."""
    counted = Mock(wraps=target)
    monkeypatch.setattr(json_schema, "target", counted)
    many: list[Any] = [{"type": "null"}, *[{"$ref": "#/properties/r"}] * 50_000]
    root = {"properties": {"q": {"anyOf": [{"anyOf": many}, *many]}, "r": {"anyOf": many}}}
    found = variants(root, "q")
    assert len(found) <= MAX_VARIANTS
    assert types_of(found) == {"null"}
    assert 0 < counted.call_count <= MAX_VARIANTS


def test_what_is_written_is_bounded() -> None:
    """Each parameter in XML has all definitions written beside it: their number times their size."""
    definitions = {f"d{i}": {"description": "x" * 100, "type": "integer"} for i in range(2000)}
    properties = {f"p{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i}"}} for i in range(2000)}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    demanded = StructuredOutput("required", (Tool("f", parameters=schema, strict=True),))
    answer_grammar(demanded, DIALECTS["hermes"], {}, "over")
    with pytest.raises(BadGrammar, match="at most 1048576 characters"):
        answer_grammar(demanded, DIALECTS["qwen3-coder"], {}, "over")


@pytest.mark.parametrize(("schema", "expected"), TABLE["in_a_circle"])
def test_a_ref_that_leads_back_to_itself_is_seen(schema: Any, expected: bool) -> None:
    assert has_circle(schema) == expected
