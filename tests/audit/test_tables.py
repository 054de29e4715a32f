"""The audit's tables hold what the types of the `openai` package require, and no edit of a member passes."""

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel

from audit import schema
from audit.recording import violations
from audit.stream import captured
from helpers.serving import Json

TYPES = {"event": ResponseStreamEvent, "chunk": ChatCompletionChunk}  # kind -> the type of all of them
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
            if field.is_required() and not (name in needed and is_closed):
                yield f"{type_ or kind} {name}"
            inner = kind_of(told)
            if inner and f"{inner} {field.annotation}" not in seen:
                seen.add(f"{inner} {field.annotation}")
                yield from looser(field.annotation, inner, seen)


def test_a_table_demands_what_the_types_demand() -> None:
    """All events, items, parts and tools of the package's release."""
    found = {*looser(ResponseStreamEvent, "event", set()), *looser(ChatCompletionChunk, "chunk", set())}
    found -= {
        name
        for name in found
        if name.startswith(("usage ", "response.")) or name.endswith(" sequence_number")
    }
    assert found == LOOSE


def members(
    annotation: Any, value: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Yield (path, its model's type and its name, annotation) of each member that the types require."""
    for type_, fields in models(annotation) if isinstance(value, dict) else ():
        if type_ == value.get("type", type_) and fields.keys() >= value.keys() - {"obfuscation", "bytes"}:
            for name in fields.keys() & value.keys():
                if fields[name].is_required():
                    yield (*path, name), f"{type_} {name}", fields[name].annotation
                yield from members(fields[name].annotation, value[name], (*path, name))
    for place, entry in enumerate(value if isinstance(value, list) else ()):
        yield from members(annotation, entry, (*path, place))


def edits(event: Json, path: tuple[Any, ...], annotation: Any) -> Iterator[Json]:
    """Yield the event with one member absent, null, of another type, and out of its literals."""
    *outer, name = path
    of_text = str in options(annotation)
    other = ... if object in options(annotation) else {"x": 1} if of_text else "x"
    for new in (..., None, other, "x" if literals(annotation) else ...):
        edited = copy.deepcopy(event)
        inner: Any = edited
        for step in outer:
            inner = inner[step]
        inner |= {name: new}
        if new is ...:
            del inner[name]
        yield edited


@pytest.mark.parametrize("kind", TYPES)
def test_no_edit_of_a_member_passes(kind: str) -> None:
    lines = Path(__file__).with_name(f"newer_{kind}s.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    seen: set[str] = set()
    for number, event in enumerate(events):
        for path, name, annotation in members(TYPES[kind], event):
            if name not in seen and not (name.endswith(" sequence_number") and seen):
                seen.add(name)
                for edited in edits(event, path, annotation):
                    changed = [*events[:number], edited, *events[number + 1 :]]
                    bad = schema.Typed(edited, kind).faults or violations(captured(changed))
                    assert bad or name in LOOSE, edited
    assert len(seen) > 10
