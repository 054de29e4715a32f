"""JSON schemas: which schemas a property of some arguments has, and which types of JSON they allow.

    schema of an object --variants()--> [schema, ...] of one property --types_of()--> {"string", "null"}
    schema --has_circle()--> True: nothing can fit it

Authority: https://json-schema.org/draft/2020-12/json-schema-core; RFC 6901 (JSON pointers).

Rules of this file:
1. The work is bounded, because a schema may come here unchecked.
2. llguidance decides whether a schema can be enforced, in a process that can be killed (matchers.py). But it
   notices a $ref that leads back to itself only when the answer reaches it. So we look for such a $ref here.
"""

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any
from urllib.parse import unquote

Node = Any  # of a schema: an object, a list, true, false

MAX_VARIANTS = 1_000  # schemas of a property that are looked at

# fmt: off
JSON_TYPES: dict[type, set[str]] = {
    str:        {"string"},
    bool:       {"boolean"},
    int:        {"integer", "number"},
    float:      {"number"},
    list:       {"array"},
    dict:       {"object"},
    type(None): {"null"},
}
# fmt: on


class BadGrammar(ValueError):
    """The grammar or schema cannot be enforced.

    `part` names the culprit: "schema", the name of a function, or "" for all grammars together.
    """

    def __init__(self, message: str, part: str = "") -> None:
        super().__init__(message)
        self.part = part


def target(root: Node, ref: str) -> Node:
    """Return what a local $ref points to; None for others."""
    elsewhere, _, pointer = ref.partition("#")
    anchor, *names = unquote(pointer).split("/")
    if elsewhere or anchor:  # a fuller program would look anchors up
        return None
    node = root
    try:
        for name in names:
            key = name.replace("~1", "/").replace("~0", "~")
            node = node[int(key)] if isinstance(node, list) else node[key]
    except (LookupError, TypeError, ValueError):  # it leads to nowhere
        return None
    return node


def has_circle(root: Node) -> bool:
    """True if a $ref in this schema leads back to itself, without going one level down into the value."""
    same_place = TopologicalSorter[int]()  # a schema -> the schemas that apply to the same value
    nodes: list[Node] = [root]
    for node in nodes:  # it grows
        if isinstance(node, list):
            nodes += node
        if isinstance(node, dict):
            nodes += node.values()
            same_place.add(id(node), id(target(root, str(node.get("$ref")))))
            for keyword in ("allOf", "anyOf", "oneOf"):
                if isinstance(several := node.get(keyword), list):
                    same_place.add(id(node), *map(id, several))
    try:
        same_place.prepare()
    except CycleError:
        return True
    return False


def variants(root: Mapping[str, Any], name: str) -> list[Node]:
    """Return the schemas of a property of these arguments: its own, and those that this is made of."""
    found: list[Node] = []
    match root.get("properties", {}):
        case {**properties}:
            found.append(properties.get(name, {}))
    for schema in islice(found, MAX_VARIANTS):  # it grows, and $refs may form a circle
        match schema:
            case {"$ref": str(ref)}:
                found.append(target(root, ref))
            case {"anyOf": [*several]} | {"oneOf": [*several]}:
                found += several[:MAX_VARIANTS]
    return found[:MAX_VARIANTS]


def types_of(schemas: Iterable[Node]) -> set[str]:
    """Return the JSON types that these schemas allow together; none if they do not say."""
    types = set[str]()
    for schema in schemas:
        match schema:
            case {"type": [*kinds]}:
                types.update(map(str, kinds))
            case {"type": kind}:
                types.add(str(kind))
            case {"enum": [*values]}:
                types.update(*(JSON_TYPES[type(value)] for value in values))
    return types
