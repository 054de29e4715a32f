"""What a model must say: calls and formats as a grammar, and the grammar as masks over the vocabulary.

    Demand --lark()--> grammar --Grammars.constraint()--> Constraint --mask()--> tokens that may come next

Authority: https://platform.openai.com/docs/guides/structured-outputs and .../function-calling (tool_choice);
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md for the language of the grammars.

Rules of this file:
1. Reasoning comes first and is free: what is demanded holds for what follows it (vllm-project/vllm#44012).
2. The markers are those of channels.py: what is demanded here is what the parser finds there.
3. A schema that cannot be enforced is refused before anything runs.

Not here: which request demands what (params.py), choosing among the tokens (model.py).
"""

import json
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

import quoted
from params import Demand
from tools import Grammar


class BadGrammar(ValueError):
    """The demand cannot be enforced; `part` is the place of the schema that is to blame."""

    def __init__(self, message: str, part: str) -> None:
        super().__init__(message)
        self.part = part


# How the models write JSON: fixed separators, for free ones let a hot model write blanks without end.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


# llguidance follows a schema by recursion: some 900 objects deep its stack, and with it the process, is gone.
MAX_LEVELS = 1000

# The prompt has begun it; the model may begin it; the prompt has ended it.
Thinking = Literal["open", "possible", "over"]

STARTS = {"open": "thought NEWLINES body", "possible": "think? body", "over": "body"}


def lark(demand: Demand, markers: Mapping[str, bool], thinking: Thinking) -> str:
    """The grammar of an answer; `markers` are those of channels.dialect()."""
    rules = {"NEWLINES": r"/\n*/", "ANY": "/(?s:.*)/", "PLAIN": "ANY & ~/(?s:.*<tool_call>.*)/"}
    rules["start"] = STARTS[thinking if "<think>" in markers else "over"]
    if "<think>" in markers:
        rules |= _up_to("thought", "</think>", markers)
        rules["think"] = f"{_literal('<think>', markers)} thought NEWLINES"
    rules["text"] = "PLAIN" if demand.schema is None else _json(demand.schema)
    rules |= {"body": "text"} if demand.calls == "none" else _calls(demand, markers)
    return "\n".join(f"{name}: {rule}" if ":" not in name else name + rule for name, rule in rules.items())


def _calls(demand: Demand, markers: Mapping[str, bool]) -> dict[str, str]:
    """One call or several, as Hermes writes them."""
    opening, closing = _literal("<tool_call>", markers), _literal("</tool_call>", markers)
    rules = {"call": rf'{opening} "\n" object "\n" {closing}'}
    rules["object"] = " | ".join(f"function_{i}" for i in range(len(demand.functions)))
    for i, (name, schema) in enumerate(demand.functions):
        head = json.dumps(f'{{"name": "{name}", "arguments": ')
        rules[f"arguments_{i}"] = _arguments(schema, dict(demand.inputs).get(name))
        rules[f"function_{i}"] = f'{head} arguments_{i} "}}"'
    more = "" if demand.one_call else r' ("\n" call)*'
    if demand.calls == "required":
        return rules | {"body": "call" + more}
    if demand.schema is not None:
        return rules | {"body": f"text | call{more}"}
    # Text, then calls: the text ends where the first marker is complete.
    first = {"first": rf'before "\n" object "\n" {closing}'}
    return rules | first | _up_to("before", "<tool_call>", markers) | {"body": f"text | first{more}"}


def _up_to(name: str, marker: str, markers: Mapping[str, bool]) -> dict[str, str]:
    """A rule for anything up to the first such marker, and the marker."""
    if markers[marker]:
        return {name: f"ANY {_literal(marker, markers)}"}
    return {f"{name}[suffix={json.dumps(marker)}]: ": "/(?s:.*)/"}


def _literal(marker: str, markers: Mapping[str, bool]) -> str:
    """A marker that is one token is written as it is, another as a string."""
    return marker if markers[marker] else json.dumps(marker)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(dict(schema) | {"x-guidance": LAYOUT})


def _arguments(schema: Mapping[str, Any], wanted: Grammar | None) -> str:
    """The object of a call's arguments; with a grammar, of a custom tool's: tools.Tool.schema()."""
    if wanted is None:
        return _json(schema)
    text = quoted.grammar(wanted.syntax, wanted.definition)  # its names are its own, within %lark
    return f'"{{\\"input\\": \\"" %lark {{\n{text}\n}} "\\"}}"'


class Constraint:
    """One answer under a grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = allocate_token_bitmask(1, vocab_size)

    def copy(self) -> "Constraint":
        """The same, for another answer: cheaper than compiling the grammar again."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size)

    def mask(self) -> NDArray[np.bool_]:
        """Which tokens may come next, (vocab_size,); the eos tokens once the grammar is satisfied."""
        fill_next_token_bitmask(self._matcher, self._bits)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(np.bool_)

    def advance(self, token_id: int) -> None:
        """The token came; raises BadGrammar where the matcher gives up: a limit, or a token not allowed."""
        if not self._matcher.consume_token(token_id):
            raise BadGrammar(self._matcher.get_error(), "")


class Grammars:
    """Makes constraints for one vocabulary."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=list(eos_token_ids))

    def check(self, demand: Demand) -> None:
        """Raises BadGrammar for a schema or grammar that cannot be enforced."""
        schemas = [("schema", demand.schema)] if demand.schema is not None else []
        for part, schema in [*schemas, *demand.functions]:
            if _levels(schema) > MAX_LEVELS:
                raise BadGrammar(f"it is more than {MAX_LEVELS} levels deep, $refs included", part)
            if _goes_round(schema):
                raise BadGrammar("a $ref leads back to itself", part)
            try:
                grammar = LLMatcher.grammar_from_json_schema(schema)
            except ValueError as error:  # a number that is no 64-bit one
                raise BadGrammar(str(error), part) from error
            if message := LLMatcher.validate_grammar(grammar, self._tokenizer):
                raise BadGrammar(message, part)
        for name, wanted in demand.inputs:
            try:
                rewritten = quoted.grammar(wanted.syntax, wanted.definition)
            except quoted.BadSource as error:
                raise BadGrammar(str(error), name) from error
            as_lark = f"start: /{regex_to_lark(wanted.definition, '')}/"
            self._check_lark(wanted.definition if wanted.syntax == "lark" else as_lark, name)
            self._check_lark(rewritten, name)

    def _check_lark(self, text: str, part: str) -> None:
        if message := LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text), self._tokenizer):
            raise BadGrammar(message.splitlines()[0], part)

    def constraint(self, grammar: str) -> Constraint:
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar))
        if matcher.is_error():
            raise BadGrammar(matcher.get_error(), "")
        return Constraint(matcher, self._vocab_size)


def _goes_round(root: dict[str, Any]) -> bool:
    """Is there a schema that stands for itself and nothing else? llguidance would follow it for ever."""

    def stands_for(schema: Any) -> list[Any]:
        """The schemas that must hold at the same place."""
        if not isinstance(schema, dict):
            return []
        same = [_target(root, schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
        for name in ("allOf", "anyOf", "oneOf"):
            alternatives = schema.get(name)
            if isinstance(alternatives, list) and (name == "allOf" or len(alternatives) == 1):
                same += alternatives
        return same

    graph = {id(node): [id(schema) for schema in stands_for(node)] for node in _nodes(root)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def _levels(root: dict[str, Any]) -> int:
    """How deep it is, with all that its $refs lead to one below the other: no chain of them is longer."""
    nodes, depths = _nodes(root), dict[int, int]()
    for node in reversed(nodes):  # what a node holds comes before it
        depths[id(node)] = 1 + max((depths[id(held)] for held in _held(node)), default=0)
    refs = {node["$ref"] for node in nodes if isinstance(node, dict) and isinstance(node.get("$ref"), str)}
    return depths[id(root)] + sum(depths.get(id(_target(root, ref)), 0) for ref in refs)


def _nodes(root: dict[str, Any]) -> list[Any]:
    """The schema and the objects and lists in it, each behind what holds it."""
    nodes: list[Any] = [root]
    for node in nodes:  # it grows
        nodes += _held(node)
    return nodes


def _held(node: dict[str, Any] | list[Any]) -> list[Any]:
    inside = node.values() if isinstance(node, dict) else node
    return [value for value in inside if isinstance(value, dict | list)]


def _target(root: dict[str, Any], ref: str) -> Any:
    """What a local $ref points to, None for others: https://www.rfc-editor.org/rfc/rfc6901"""
    node: Any = root
    for part in ref.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node if ref.startswith("#") else None
