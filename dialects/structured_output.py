"""What a model must say: calls and formats as a grammar, and the grammar as masks over the vocabulary.

    StructuredOutput --lark()--> grammar --Grammars.constraint()--> Constraint --mask()--> allowed tokens

Authority: https://platform.openai.com/docs/guides/structured-outputs and .../function-calling (tool_choice);
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md for the language of the grammars.

Rules of this file:
1. Reasoning comes first and is free: what is demanded holds for what follows it (vllm-project/vllm#44012).
2. What is demanded is written in the forms of the dialect (families.py): it is what the parser finds there.
3. A schema that cannot be enforced is refused before anything runs.

Not here: which request demands what (request/output_format.py), choosing among the tokens (model.py).
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from channels import Dialect
from dialects import calls, grammar_in_json
from request.output_format import StructuredOutput
from request.tools import Grammar


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


class _Writer:
    """Writes one grammar: its rules, as `name: rule`."""

    def __init__(self, dialect: Dialect, added: Mapping[str, int]) -> None:
        self.dialect = dialect
        self.rules = {"NEWLINES: ": r"/\n*/", "ANY: ": "/(?s:.*)/"}
        self._added = added

    def rule(self, name: str, *alternatives: str) -> str:
        self.rules[f"{name}: "] = " | ".join(alternatives)
        return name

    def sequence(self, form: str, **places: str) -> str:
        """A form of the dialect: its markers, the text between them, and what the places stand for."""
        cuts = sorted([*self.dialect.markers, *places], key=len, reverse=True)
        parts = [part for part in re.split("(" + "|".join(map(re.escape, cuts)) + ")", form) if part]
        spelled = self.dialect.markers - self.dialect.tokens
        written, behind = list[str](), ""
        for part, following in itertools.pairwise([*parts, ""]):
            if places.get(part) == "ANY" and following in spelled:
                written.append(self.lazy("(?s:.*)", following))
            elif not (places.get(behind) == "ANY" and part in spelled):
                written.append(places.get(part) or self._literal(part))
            behind = part
        return " ".join(written)

    def lazy(self, regex: str, end: str) -> str:
        """What the regex matches, up to the first such end, and the end."""
        name = f"lazy_{len(self.rules)}"
        self.rules[f"{name}[suffix={json.dumps(end)}]: "] = f"/{regex}/"
        return name

    def _literal(self, part: str) -> str:
        if part in self.dialect.tokens:
            return f"<[{self._added[part]}]>"
        # The lexer takes the longest lexeme: a "{" that may as well begin other JSON stands alone.
        texts = ["{", part[1:]] if part.startswith("{") else [part]
        return " ".join(map(json.dumps, texts))

    def __str__(self) -> str:
        return "\n".join(name + rule for name, rule in self.rules.items())


def lark(spec: StructuredOutput, dialect: Dialect, added: Mapping[str, int], thinking: Thinking) -> str:
    """The grammar of an answer; `added` has the ids of the dialect's tokens."""
    writer, forms = _Writer(dialect, added), dialect.forms
    newlines = "NEWLINES" if dialect.trims else ""
    opening, ending = forms.thought
    if thinking == "open":
        thought = writer.sequence("THOUGHT" + ending, THOUGHT="ANY") + " " + newlines
    elif thinking == "possible" and set(dialect.reasoning_markers) <= dialect.markers:
        thought = "(" + writer.sequence(f"{opening}THOUGHT{ending}", THOUGHT="ANY") + f" {newlines})?"
    else:
        thought = ""
    writer.rule("start", f"{thought} body")
    content = _plain(writer) if spec.schema is None else writer.rule("json", _json(spec.schema))
    text = writer.rule("text", writer.sequence(forms.text, TEXT=content))
    if spec.calls == "none":
        writer.rule("body", text)
    else:
        _calls(writer, spec)
    return str(writer)


def _plain(writer: _Writer) -> str:
    """Text in which the parser finds nothing else."""
    dialect, forms = writer.dialect, writer.dialect.forms
    spelled = dialect.markers - dialect.tokens - set(dialect.reasoning_markers)  # reasoning is free
    if forms.before == "TEXT":  # what ends the text begins a call, token or not
        spelled |= {m for m in dialect.markers if (forms.calls[0] + forms.call).startswith(m)}
    if spelled:
        writer.rule("SPELLED", f"/(?s:.*)({'|'.join(map(_escaped, sorted(spelled)))})(?s:.*)/")
    not_these = [*(["~SPELLED"] if spelled else []), *([BARE] if dialect.start == "call" else [])]
    return writer.rule("PLAIN", " & ".join(["ANY", *not_these]))


BARE = r"~/\s*[\[{](?s:.*)/"  # a call without a marker


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _calls(writer: _Writer, spec: StructuredOutput) -> None:
    """One call or several, and what may stand before them, or instead."""
    forms, places = writer.dialect.forms, []
    for i, (name, schema) in enumerate(spec.functions):
        wanted = dict(spec.inputs).get(name)
        arguments = writer.rule(f"arguments_{i}", _arguments(writer, name, schema, wanted))
        places.append({"NAME": json.dumps(name), "ARGUMENTS": arguments})
    opening, ending = forms.calls
    writer.rule("call", *(writer.sequence(forms.call, **place) for place in places))
    more = "" if spec.one_call or forms.separator is None else f"({_optional(writer, forms.separator)} call)*"
    rest = f"{more} {_optional(writer, ending)}"
    calls = f"{_optional(writer, opening)} call {rest}"
    if spec.calls == "required":
        writer.rule("body", calls)
    elif spec.schema is not None or forms.before is None:
        writer.rule("body", "text", calls)
    else:
        begun = f"{forms.before}{opening}{forms.call}"
        first = writer.rule("first", *(writer.sequence(begun, TEXT="ANY", **place) for place in places))
        writer.rule("body", "text", calls, f"{first} {rest}")


def _optional(writer: _Writer, form: str) -> str:
    return writer.sequence(form) if form else ""


def _arguments(writer: _Writer, name: str, schema: Mapping[str, Any], wanted: Grammar | None) -> str:
    """Of a function; with a grammar, of a custom tool, which has one: tools.Tool.schema()."""
    if writer.dialect.forms.arguments == "json":
        return _json(schema) if wanted is None else _quoted(wanted)
    if wanted:
        return f'"<parameter=input>\\n" %lark {{\n{as_lark(wanted)}\n}} {json.dumps(PARAMETER_END)}'
    try:
        return " ".join(_parameters(writer, schema)) or '""'
    except BadGrammar as error:
        raise BadGrammar(str(error), name) from error


# --- arguments in XML ---------------------------------------------------------------------------------------

# What can be enforced where strings are not quoted; all else is refused.
NOTES = {"title", "description", "default", "examples", "deprecated", "$schema", "$comment"}
OF_OBJECTS = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
OF_STRINGS = NOTES | {"type", "minLength", "maxLength"}
PARAMETER_NAME = re.compile(r"[^<>\s]+")
PARAMETER_END = f"\n{calls.VALUE_END}\n"


def _parameters(writer: _Writer, root: Mapping[str, Any]) -> Iterator[str]:
    """In the order of the schema, those that are not required or not."""
    if unknown := root.keys() - OF_OBJECTS:
        raise BadGrammar(f"{', '.join(sorted(unknown))} cannot be enforced on parameters", "")
    described, required = root.get("properties", {}), root.get("required", [])
    for name, schema in (
        described | dict.fromkeys((n for n in required if n not in described), True)
    ).items():
        if not PARAMETER_NAME.fullmatch(name):
            raise BadGrammar(f"'{name}' cannot be the name of a parameter", "")
        if schema is not False:
            written = f"{json.dumps(f'<parameter={name}>')} {_value(writer, root, name, schema)}"
            yield written if name in required else f"({written})?"


def _value(writer: _Writer, root: Mapping[str, Any], name: str, schema: Any) -> str:
    """A string is bare, all else is JSON; newlines around it."""
    while isinstance(schema, dict) and "$ref" in schema:
        schema = calls.target(root, schema["$ref"])
    schema = schema if isinstance(schema, dict) else {}
    kinds, variants = calls.kinds(root, name), schema.get("anyOf") or schema.get("oneOf") or [schema]
    if "string" not in kinds:
        defined = {key: root[key] for key in ("$defs", "definitions") if key in root}
        written = writer.rule(f"json_{len(writer.rules)}", _json(schema | defined))
        return f'"\\n" {written} {json.dumps(PARAMETER_END)}'
    if "enum" in schema and kinds == {"string"}:
        values = [json.dumps(f"\n{value}{PARAMETER_END}") for value in schema["enum"]]
        return f"({' | '.join(values)})"
    if kinds == {"string"} and schema.keys() <= OF_STRINGS:
        length = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        return f'"\\n" {writer.lazy(f"(?s:.{length})", PARAMETER_END)}'
    if all(variant.keys() <= NOTES | {"type"} for variant in variants):
        return f'"\\n" {writer.lazy("(?s:.*)", PARAMETER_END)}'  # any text is a string, if it is nothing else
    raise BadGrammar(f"'{name}': of a string only enum, minLength and maxLength can be enforced", "")


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(dict(schema) | {"x-guidance": LAYOUT})


def _quoted(wanted: Grammar) -> str:
    """A custom tool's input as a member of a JSON object."""
    text = grammar_in_json.grammar(wanted.syntax, wanted.definition)  # its names are its own, within %lark
    return f'"{{\\"input\\": \\"" %lark {{\n{text}\n}} "\\"}}"'


def as_lark(wanted: Grammar) -> str:
    if wanted.syntax == "lark":
        return wanted.definition
    return f"start: /{regex_to_lark(wanted.definition, '')}/"


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

    def check(self, spec: StructuredOutput) -> None:
        """Raises BadGrammar for a schema or grammar that cannot be enforced."""
        schemas = [("schema", spec.schema)] if spec.schema is not None else []
        for part, schema in [*schemas, *spec.functions]:
            if lost := next(_lost(schema), None):
                raise BadGrammar(lost, part)
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
        for name, wanted in spec.inputs:
            try:
                rewritten = grammar_in_json.grammar(wanted.syntax, wanted.definition)
            except grammar_in_json.BadSource as error:
                raise BadGrammar(str(error), name) from error
            self._check_lark(as_lark(wanted), name)
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
        same = [calls.target(root, schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
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


def _lost(root: dict[str, Any]) -> Iterator[str]:
    """What llguidance may follow and this file cannot: to somewhere else, or from another beginning."""
    for node in _nodes(root):
        if isinstance(node, dict):
            if isinstance(ref := node.get("$ref"), str) and calls.target(root, ref) is None:
                yield f"$ref {ref[:80]} leads nowhere in the schema"
            if node is not root and isinstance(node.get("$id"), str):
                yield "an $id inside the schema cannot be enforced"


def _levels(root: dict[str, Any]) -> int:
    """How deep it is, $refs followed. Where they go in circles: with all that they lead to one below the
    other, for no chain of them is longer.
    """

    def behind(node: Any) -> list[Any]:
        ref = node.get("$ref") if isinstance(node, dict) else None
        return [calls.target(root, ref)] if isinstance(ref, str) else []

    nodes, depths = _nodes(root), dict[int, int]()
    below = {id(node): [id(held) for held in (*_held(node), *behind(node))] for node in nodes}
    try:
        for node in TopologicalSorter(below).static_order():
            depths[node] = 1 + max((depths[held] for held in below.get(node, ())), default=0)
        return depths[id(root)]
    except CycleError:
        depths.clear()
    for node in reversed(nodes):  # what a node holds comes before it
        depths[id(node)] = 1 + max((depths[id(held)] for held in _held(node)), default=0)
    targets = {id(found) for node in nodes for found in behind(node)}
    return depths[id(root)] + sum(depths.get(found, 0) for found in targets)


def _nodes(root: dict[str, Any]) -> list[Any]:
    """The schema and the objects and lists in it, each behind what holds it."""
    nodes: list[Any] = [root]
    for node in nodes:  # it grows
        nodes += _held(node)
    return nodes


def _held(node: dict[str, Any] | list[Any]) -> list[Any]:
    inside = node.values() if isinstance(node, dict) else node
    return [value for value in inside if isinstance(value, dict | list)]
