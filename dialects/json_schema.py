"""JSON schemas: where the $refs of one lead, and which types a property may have.

    schema --target()--> what a $ref points to; --property_types()--> which JSON a property may be

Authority: https://json-schema.org/draft/2020-12/json-schema-core; RFC 6901 (JSON pointers); for what the
library that follows a schema leaves unchecked, https://github.com/guidance-ai/llguidance

Rules of this file:
1. The work is linear in the size of a schema, whose number of nodes is bounded.
2. What llguidance refuses by itself is not checked here: $refs to nowhere, depth. It is asked in a process
   that can be killed (matchers.py).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any
from urllib.parse import unquote

Node = Any  # of a schema: an object, a list, true, false

MAX_NODES = 10_000  # objects and lists, in all schemas of a request: tens of milliseconds of work
MAX_VARIANTS = 1_000  # schemas looked at to learn which types a property may have

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


def target(root: Node, ref: str) -> Node:
    """Return what a local $ref points to; None for others."""
    elsewhere, _, pointer = ref.partition("#")
    anchor, *names = unquote(pointer).split("/")
    if elsewhere or anchor:  # a fuller program would look anchors up
        return None
    node = root
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(name)
        elif isinstance(node, list) and ARRAY_INDEX.fullmatch(name) and int(name) < len(node):
            node = node[int(name)]
        else:
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
            case {"type": str(kind)}:
                types.add(kind)
            case {"type": [*several]}:
                types.update(kind for kind in several if isinstance(kind, str))
            case {"anyOf": [*several]} | {"oneOf": [*several]}:
                variants += several[:MAX_VARIANTS]
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
    """Return why a schema of these nodes cannot be enforced; None: llguidance may look at it.

    llguidance sees a circle of $refs only when a token of the answer comes there.
    """
    root, *inner = [node for node in nodes if isinstance(node, dict)]
    if any(isinstance(schema.get("$id"), str) for schema in inner):
        return "an $id inside the schema cannot be enforced"  # it changes where $refs lead
    graph = {id(schema): map(id, _at_the_same_place(root, schema)) for schema in [root, *inner]}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return "a $ref leads back to itself"
    return None


def _at_the_same_place(root: Node, schema: Mapping[str, Any]) -> Iterator[Node]:
    """Yield the schemas that must hold where this one does."""
    match schema:
        case {"$ref": str(ref)}:
            yield target(root, ref)
    for keyword in ("allOf", "anyOf", "oneOf"):
        match schema.get(keyword):
            case [*several] if keyword == "allOf" or len(several) == 1:
                yield from several
