"""The audit's tables hold what the types of the `openai` package require."""

import itertools
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel

from audit import schema

# What the types demand and the tables do not: rules are about the types of events, the index of a call, and
# usage; OpenAI's recorded streams lack an action, and a code of an error is each server's own.
LOOSE = {"error type", "function index", "failure code", "program_output status", "web_search_call action"}


def options(annotation: Any) -> list[Any]:
    """Return the types that a member may have, those of a list's entries too."""
    if get_origin(annotation) in (Annotated, list):
        return options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [option for inner in get_args(annotation) for option in options(inner)]
    return [annotation]


def literals(annotation: Any) -> list[str]:
    values = [get_args(option) for option in options(annotation) if get_origin(option) is Literal]
    return [] if str in options(annotation) else [*itertools.chain(*values)]


def models(annotation: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (type, its fields by their names) for each model, once for each of its types."""
    for option in options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            fields = {field.alias or name: field for name, field in option.model_fields.items()}
            for type_ in (literals(fields["type"].annotation) if "type" in fields else []) or [""]:
                yield type_, fields


def kind_of(told: str) -> str:
    """Return the kind of object that a type of the tables is, or lists."""
    return next((kind for one in told.split("|") if (kind := one.strip("[]")) in schema.ROWS), "")


def looser(annotation: Any, kind: str, seen: set[str]) -> Iterator[str]:
    """Yield the members of which a table demands less than the types do, at any depth."""
    for type_, fields in models(annotation):
        types, needed = schema.types_of(kind, type_)
        for name, field in fields.items():
            told = types.get(name, "")
            words = {one for one in told.split("|") if one.startswith("=")}
            expected = {f"={word}" for word in literals(field.annotation)}
            is_closed = not expected or name == "type" or words == expected
            is_typed = told != "any" or object in options(field.annotation)
            if field.is_required() and not (name in needed and is_closed and is_typed):
                yield f"{type_ or kind} {name}"
            inner = kind_of(told)
            if inner and f"{inner} {field.annotation}" not in seen:
                seen.add(f"{inner} {field.annotation}")
                yield from looser(field.annotation, inner, seen)


def test_a_table_demands_what_the_types_demand() -> None:
    """Of all events, items, parts and tools of the release; tests/faults.toml has edited members."""
    found = {*looser(ResponseStreamEvent, "event", set()), *looser(ChatCompletionChunk, "chunk", set())}
    beside = re.compile(r"usage .*|response\..*|.* sequence_number")
    assert {name for name in found if not beside.fullmatch(name)} == LOOSE
