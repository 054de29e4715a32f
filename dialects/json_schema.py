"""JSON schemas: where the $refs of one lead, and what in one cannot be enforced.

    schema --problem()--> why it cannot be enforced, or nothing
    schema --References.target()--> what a $ref points to; --property_types()--> which JSON a property may be

Authority: https://json-schema.org/draft/2020-12/json-schema-core; RFC 6901 (JSON pointers); for what the
library that follows a schema leaves unchecked, https://github.com/guidance-ai/llguidance

Rules of this file:
1. The work is linear in the size of a schema: each $ref is followed once, and there are only so many nodes.
2. A schema is refused for what it is, never repaired: https://github.com/vllm-project/vllm/issues/10395

Not here: which request has which schemas (request/tools.py), what llguidance says of a schema and
what it costs to compile (matchers.py).
"""

import re
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

Node = Any  # of a schema: an object, a list, true, false

MAX_NODES = 10_000  # objects and lists, in all schemas of a request: tens of milliseconds of work
MAX_REFERENCES = 5_000  # of one schema; those that programs generate have some hundred
MAX_VARIANTS = 1_000  # schemas looked at to learn of which type a property is
# llguidance follows a schema by recursion: some 900 objects deep its stack, and with it the process, is gone.
MAX_LEVELS = 1000

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
        """The schema that the node's $ref leads to, if it has one."""
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


# --- what cannot be enforced --------------------------------------------------------------------------------


def n_nodes(root: Node) -> int:
    """The objects and lists of a schema, counted as far as MAX_NODES."""
    return len(_nodes(root))


def problem(root: dict[str, Any]) -> str | None:
    """Why this schema cannot be enforced; None where llguidance may look at it. At most MAX_NODES nodes."""
    references = References(root)
    nodes = _nodes(root)
    n_references = 0
    for node in nodes:
        if not isinstance(node, dict):
            continue
        if isinstance(node.get("$ref"), str):
            n_references += 1
            # llguidance may follow it to another document, or to another $id; this file cannot.
            if references.target(node["$ref"]) is None:
                return f"$ref {node['$ref'][:80]} leads nowhere in the schema"
        if node is not root and isinstance(node.get("$id"), str):
            return "an $id inside the schema cannot be enforced"
    if n_references > MAX_REFERENCES:
        return f"expected at most {MAX_REFERENCES} $refs, it has {n_references}"
    if _n_levels(references, nodes) > MAX_LEVELS:
        return f"it is more than {MAX_LEVELS} levels deep, $refs included"
    if _is_circular(references, nodes):
        return "a $ref leads back to itself"
    return None


def _is_circular(references: References, nodes: list[Node]) -> bool:
    """Is there a schema that stands for itself and nothing else? llguidance would follow it for ever."""
    graph: dict[int, list[int]] = {}  # id of a schema -> ids of the schemas that must hold at the same place
    for node in nodes:
        graph[id(node)] = [id(schema) for schema in _stands_for(references, node)]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def _stands_for(references: References, schema: Node) -> list[Node]:
    """The schemas that must hold at the same place as this one."""
    if not isinstance(schema, dict):
        return []
    same_place = references.of(schema)
    for keyword in ("allOf", "anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        if isinstance(alternatives, list) and (keyword == "allOf" or len(alternatives) == 1):
            same_place += alternatives
    return same_place


def _n_levels(references: References, nodes: list[Node]) -> int:
    """How deep the schema is, $refs followed.

    Where they go in circles it is a bound: the depth without $refs, and that of all their targets, for no
    chain of $refs is longer than all of them one below the other.
    """
    root = id(nodes[0])
    depths = dict[int, int]()  # id of a node -> its depth
    below: dict[int, list[int]] = {}
    for node in nodes:
        below[id(node)] = [id(inner) for inner in (*_inside(node), *references.of(node))]
    try:
        for node_id in TopologicalSorter(below).static_order():
            depths[node_id] = 1 + max((depths[inner] for inner in below.get(node_id, ())), default=0)
        return depths[root]
    except CycleError:
        depths.clear()
    for node in reversed(nodes):  # what a node holds comes before it
        depths[id(node)] = 1 + max((depths[id(inner)] for inner in _inside(node)), default=0)
    targets = {id(target) for node in nodes for target in references.of(node)}
    return depths[root] + sum(depths.get(target, 0) for target in targets)


def _nodes(root: Node) -> list[Node]:
    """The schema and the objects and lists in it, each behind what holds it; a few more than MAX_NODES."""
    nodes: list[Node] = [root]
    for node in nodes:  # it grows
        nodes += _inside(node)
        if len(nodes) > MAX_NODES:
            break
    return nodes


def _inside(node: Node) -> list[Node]:
    values: Iterable[Node] = node
    if isinstance(node, dict):
        values = node.values()
    return [value for value in values if isinstance(value, dict | list)]
