"""JSON schemas: where the $refs of one lead, and which types a property may have.

    schema --target()--> what a $ref points to; --property_types()--> which JSON a property may be
    schema --problem()--> why it cannot be enforced, or None

Authority: https://json-schema.org/draft/2020-12/json-schema-core; RFC 6901 (JSON pointers); for what the
library that follows a schema leaves unchecked, https://github.com/guidance-ai/llguidance

Rules of this file:
1. The work is linear in the size of a schema. A body bounds that (request/body.py).
2. What llguidance refuses by itself is not checked here: $refs to nowhere, depth. It is asked in a process
   that can be killed (matchers.py).
"""

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any
from urllib.parse import unquote

Node = Any  # of a schema: an object, a list, true, false

MAX_VARIANTS = 1_000  # schemas looked at to learn which types a property may have

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

    `part` names it: "schema", the name of a function, or "" for all of them together.
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


def property_types(root: Mapping[str, Any], name: str) -> set[str]:
    """Return the JSON types that a property of these arguments may have; none if the schema does not say."""
    types = set[str]()
    variants: list[Node] = []  # schemas of which one must hold
    match root:
        case {"properties": {**properties}}:
            variants.append(properties.get(name))
    for variant in islice(variants, MAX_VARIANTS):  # it grows, and $refs may form a circle
        match variant:
            case {"$ref": str(ref)}:
                variants.append(target(root, ref))
            case {"type": [*kinds]}:
                types.update(map(str, kinds))
            case {"type": kind}:
                types.add(str(kind))
            case {"anyOf": [*several]} | {"oneOf": [*several]}:
                variants += several[:MAX_VARIANTS]
            case {"enum": [*values]}:
                types.update(*(JSON_TYPES[type(value)] for value in values))
    return types


def objects_in(root: Node) -> list[dict[str, Any]]:
    """Return a schema and all objects in it."""
    nodes: list[Node] = [root]
    for node in nodes:  # it grows
        values: Iterable[Node] = node.values() if isinstance(node, dict) else node
        nodes += [value for value in values if isinstance(value, dict | list)]
    return [node for node in nodes if isinstance(node, dict)]


def problem(root: Mapping[str, Any]) -> str | None:
    """Return why this schema, which llguidance would take, cannot be enforced; None: it may look at it.

    It sees a circle of $refs only when a token of the answer comes there. In a circle a schema is one of
    those that hold at the same place as itself.
    """
    at_the_same_place: dict[int, list[int]] = {}
    for schema in objects_in(root):
        if schema is not root and isinstance(schema.get("$id"), str):  # it changes where $refs lead
            return "an $id inside the schema cannot be enforced"
        others: list[Node] = []
        for keyword in ("allOf", "anyOf", "oneOf"):
            match schema.get(keyword):
                case [*several]:
                    others += several
        match schema:
            case {"$ref": str(ref)}:
                others.append(target(root, ref))
        at_the_same_place[id(schema)] = [id(other) for other in others]
    try:
        TopologicalSorter(at_the_same_place).prepare()
    except CycleError:
        return "a $ref leads back to itself"
    return None
