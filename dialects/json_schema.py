"""JSON schemas: where the $refs of one lead, and which types a property may have.

    schema --References.target()--> what a $ref points to; --property_types()--> which JSON a property may be

Authority: https://json-schema.org/draft/2020-12/json-schema-core; RFC 6901 (JSON pointers); for what the
library that follows a schema leaves unchecked, https://github.com/guidance-ai/llguidance

Rules of this file:
1. The work is linear in the size of a schema: each $ref is followed once, and the number of nodes is bounded.
2. What llguidance refuses by itself is not checked here: $refs to nowhere, depth. It is asked in a process
   that can be killed (matchers.py).
"""

import re
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

Node = Any  # of a schema: an object, a list, true, false

MAX_NODES = 10_000  # objects and lists, in all schemas of a request: tens of milliseconds of work
MAX_VARIANTS = 1_000  # schemas looked at to learn of which type a property is

ARRAY_INDEX = re.compile("0|[1-9][0-9]{0,8}")  # RFC 6901, section 4

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


class References:
    """The $refs of one schema, each followed once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._targets: dict[str, Node] = {}

    def target(self, ref: str) -> Node:
        """What a local $ref points to, None for others."""
        if ref not in self._targets:
            self._targets[ref] = self._follow(ref)
        return self._targets[ref]

    def _follow(self, ref: str) -> Node:
        pointer = unquote(ref[1:])
        is_anchor = pointer and not pointer.startswith("/")  # a fuller program would look these up
        if not ref.startswith("#") or is_anchor:
            return None
        node: Node = self.root
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping):
                node = node.get(name)
            elif isinstance(node, list) and ARRAY_INDEX.fullmatch(name) and int(name) < len(node):
                node = node[int(name)]
            else:
                return None
        return node

    def of(self, node: Node) -> list[Node]:
        """Return the schema that the node's $ref leads to, if it has one."""
        if isinstance(node, dict) and isinstance(node.get("$ref"), str):
            return [self.target(node["$ref"])]
        return []


def property_types(references: References, name: str) -> set[str]:
    """The JSON types that a property of these arguments may have; none where the schema does not say."""
    properties = references.root.get("properties")
    types = set[str]()
    refs = set[str]()  # followed: they may form a circle
    variants: list[Node] = []  # schemas to look at
    if isinstance(properties, dict):
        variants.append(properties.get(name))
    for variant in variants:  # it grows
        match variant:
            case {"$ref": str(ref)} if ref not in refs:
                refs.add(ref)
                variants.append(references.target(ref))
            case {"type": str(kind)}:
                types.add(kind)
            case {"type": [*several]}:
                types.update(kind for kind in several if isinstance(kind, str))
            case {"anyOf": [*several]} | {"oneOf": [*several]}:
                variants += several[: MAX_VARIANTS - len(variants)]
            case {"enum": [*values]}:
                types.update(*(JSON_TYPES[type(value)] for value in values))
    return types


def nodes_of(root: Node) -> list[Node]:
    """Return a schema and the objects and lists in it, as far as MAX_NODES and a few more."""
    nodes: list[Node] = [root]
    for node in nodes:  # it grows
        values: Iterable[Node] = node.values() if isinstance(node, dict) else node
        nodes += [value for value in values if isinstance(value, dict | list)]
        if len(nodes) > MAX_NODES:
            break
    return nodes


def problem(nodes: list[Node]) -> str | None:
    """Return why a schema of these nodes cannot be enforced; None: llguidance may look at it."""
    if any(isinstance(node, dict) and isinstance(node.get("$id"), str) for node in nodes[1:]):
        return "an $id inside the schema cannot be enforced"  # it changes where $refs lead
    references = References(nodes[0])
    graph = {id(node): [id(other) for other in _at_the_same_place(references, node)] for node in nodes}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:  # llguidance would see it only when a token of the answer comes there
        return "a $ref leads back to itself"
    return None


def _at_the_same_place(references: References, schema: Node) -> list[Node]:
    """Return the schemas that must hold where this one does."""
    if not isinstance(schema, dict):
        return []
    others = references.of(schema)
    for keyword in ("allOf", "anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        if isinstance(alternatives, list) and (keyword == "allOf" or len(alternatives) == 1):
            others += alternatives
    return others
