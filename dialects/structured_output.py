"""Structured output: what an answer must be, as a grammar, and the grammar as masks over the vocabulary.

    StructuredOutput --lark()--> grammar --Grammars.constraint()--> Constraint --mask()--> allowed tokens

It is also called constrained decoding (or guided), and the mask a token bitmask. The library that follows the
grammar is llguidance; other servers use XGrammar or Outlines in its place. `StructuredOutput` is what is
asked for (request/params.py), `lark()` writes it in the forms of the dialect, `Grammars` checks and compiles
for one vocabulary, and a `Constraint` masks the tokens of one answer.

Authority: https://platform.openai.com/docs/guides/structured-outputs and .../function-calling (tool_choice);
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md for the language of the grammars.

Rules of this file:
1. Reasoning comes first and is free: the grammar holds for what follows it (vllm-project/vllm#44012).
2. Calls and texts are demanded in the forms of the dialect (families.py): the parser finds what they write.
3. A schema that cannot be enforced is refused before anything runs.

Not here: which request asks for what (request/output_format.py), sampling under the mask (sampling.py).
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
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
    """The grammar or schema cannot be enforced; `part` names it: "schema", or the name of a function."""

    def __init__(self, message: str, part: str) -> None:
        super().__init__(message)
        self.part = part


# The separators of JSON are fixed: where they are free, a model at a high temperature writes blanks for ever.
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# llguidance follows a schema by recursion: some 900 objects deep its stack, and with it the process, is gone.
MAX_LEVELS = 1000

# The reasoning: the prompt has begun it; the model may begin it; the prompt has ended it.
Thinking = Literal["open", "possible", "over"]

# --- the grammar of an answer -------------------------------------------------------------------------------


class _Writer:
    """Collects the rules of one grammar; terminals have names in capitals, as Lark wants it."""

    def __init__(self, dialect: Dialect, added: Mapping[str, int]) -> None:
        self.dialect = dialect
        self.rules = {"NEWLINES: ": r"/\n*/", "ANY: ": "/(?s:.*)/"}  # "name: " -> what it stands for
        self._added = added  # ids of the added tokens

    def rule(self, name: str, *alternatives: str) -> str:
        self.rules[f"{name}: "] = " | ".join(alternatives)
        return name

    def sequence(self, form: str, **places: str) -> str:
        """A form of the dialect: its markers, the text between them, and what the places stand for.

        Any text in front of a marker that is no token ends where the marker is spelled for the first time.
        """
        cuts = sorted([*self.dialect.markers, *places], key=len, reverse=True)
        parts = [part for part in re.split("(" + "|".join(map(re.escape, cuts)) + ")", form) if part]
        spelled = self.dialect.markers - self.dialect.tokens
        written: list[str] = []
        before = ""
        for part, following in itertools.pairwise([*parts, ""]):
            if places.get(part) == "ANY" and following in spelled:
                written.append(self.lazy("(?s:.*)", following))
            elif not (places.get(before) == "ANY" and part in spelled):
                written.append(places.get(part) or self._literal(part))
            before = part
        return " ".join(written)

    def lazy(self, regex: str, end: str) -> str:
        """What the regex matches, up to the first such end, and the end."""
        name = f"lazy_{len(self.rules)}"
        self.rules[f"{name}[suffix={json.dumps(end)}]: "] = f"/{regex}/"
        return name

    def _literal(self, part: str) -> str:
        if part in self.dialect.tokens:
            return f"<[{self._added[part]}]>"
        if part.startswith(
            "{"
        ):  # alone: the lexer takes the longest lexeme, and other JSON begins with it too
            return f'"{{" {json.dumps(part[1:])}'
        return json.dumps(part)

    def __str__(self) -> str:
        return "\n".join(name + rule for name, rule in self.rules.items())


def lark(spec: StructuredOutput, dialect: Dialect, added: Mapping[str, int], thinking: Thinking) -> str:
    """The grammar of an answer; `added` has the ids of the dialect's tokens."""
    writer = _Writer(dialect, added)
    writer.rule("start", f"{_reasoning(writer, thinking)} body")
    content = _plain_text(writer)
    if spec.schema is not None:
        content = writer.rule("json", _json(spec.schema))
    text = writer.rule("text", writer.sequence(dialect.forms.text, TEXT=content))
    if spec.calls == "none":
        writer.rule("body", text)
    else:
        _calls(writer, spec)
    return str(writer)


def _reasoning(writer: _Writer, thinking: Thinking) -> str:
    """What may stand in front of the body."""
    dialect = writer.dialect
    opening, ending = dialect.forms.thought
    newlines = ""
    if dialect.trims:
        newlines = "NEWLINES"
    if thinking == "open":
        return f"{writer.sequence('THOUGHT' + ending, THOUGHT='ANY')} {newlines}"
    can_think = set(dialect.reasoning_markers) <= dialect.markers
    if thinking == "possible" and can_think:
        return f"({writer.sequence(f'{opening}THOUGHT{ending}', THOUGHT='ANY')} {newlines})?"
    return ""


def _plain_text(writer: _Writer) -> str:
    """Text in which the parser finds nothing else."""
    dialect, forms = writer.dialect, writer.dialect.forms
    spelled = dialect.markers - dialect.tokens - set(dialect.reasoning_markers)  # reasoning is free
    if forms.before == "TEXT":  # the marker that begins a call ends the text, token or not
        spelled |= {marker for marker in dialect.markers if (forms.calls[0] + forms.call).startswith(marker)}
    terms = ["ANY"]
    if spelled:
        writer.rule("SPELLED", f"/(?s:.*)({'|'.join(map(_escaped, sorted(spelled)))})(?s:.*)/")
        terms.append("~SPELLED")
    if dialect.start == "call":
        terms.append(BARE)
    return writer.rule("PLAIN", " & ".join(terms))


BARE = r"~/\s*[\[{](?s:.*)/"  # a call without a marker


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _calls(writer: _Writer, spec: StructuredOutput) -> None:
    """One call or several, and what may stand before them, or instead."""
    forms, places = writer.dialect.forms, []
    for i, (name, schema) in enumerate(spec.functions):
        grammar = dict(spec.inputs).get(name)
        arguments = writer.rule(f"arguments_{i}", _arguments(writer, name, schema, grammar))
        places.append({"NAME": json.dumps(name), "ARGUMENTS": arguments})
    opening, ending = forms.calls
    writer.rule("call", *(writer.sequence(forms.call, **place) for place in places))
    more = ""
    if not spec.one_call and forms.separator is not None:
        more = f"({_optional(writer, forms.separator)} call)*"
    rest = f"{more} {_optional(writer, ending)}"
    calls = f"{_optional(writer, opening)} call {rest}"
    if spec.calls == "required":
        writer.rule("body", calls)
    elif spec.schema is not None or forms.before is None:
        writer.rule("body", "text", calls)
    else:
        form = f"{forms.before}{opening}{forms.call}"
        first = writer.rule("first", *(writer.sequence(form, TEXT="ANY", **place) for place in places))
        writer.rule("body", "text", calls, f"{first} {rest}")


def _optional(writer: _Writer, form: str) -> str:
    """A form that may be empty: nothing can be written between two calls, or around them."""
    if not form:
        return ""
    return writer.sequence(form)


def _arguments(writer: _Writer, name: str, schema: Mapping[str, Any], grammar: Grammar | None) -> str:
    """The arguments of a function; `grammar` is that of a custom tool's input, see tools.Tool.schema()."""
    if writer.dialect.forms.arguments == "json":
        if grammar is None:
            return _json(schema)
        return _quoted(grammar)
    if grammar:
        return f'"<parameter=input>\\n" %lark {{\n{as_lark(grammar)}\n}} {json.dumps(PARAMETER_END)}'
    try:
        return " ".join(_parameters(writer, schema)) or '""'
    except BadGrammar as error:
        raise BadGrammar(str(error), name) from error


# --- arguments in XML ---------------------------------------------------------------------------------------

# The keywords of JSON schema that are enforced where strings are not quoted; all others are refused.
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$schema", "$comment"}
OF_OBJECTS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
OF_STRINGS = ANNOTATIONS | {"type", "minLength", "maxLength"}
PARAMETER_NAME = re.compile(r"[^<>\s]+")
PARAMETER_END = f"\n{calls.VALUE_END}\n"


def _parameters(writer: _Writer, root: Mapping[str, Any]) -> Iterator[str]:
    """The parameters in the order of the schema, those that it only requires behind those it describes."""
    if unknown := root.keys() - OF_OBJECTS:
        raise BadGrammar(f"{', '.join(sorted(unknown))} cannot be enforced on parameters", "")
    described, required = root.get("properties", {}), root.get("required", [])
    undescribed = [name for name in required if name not in described]
    for name, schema in (described | dict.fromkeys(undescribed, True)).items():
        if not PARAMETER_NAME.fullmatch(name):
            raise BadGrammar(f"'{name}' cannot be the name of a parameter", "")
        if schema is False:  # nothing fits it: it cannot be given
            continue
        parameter = f"{json.dumps(f'<parameter={name}>')} {_value(writer, root, name, schema)}"
        if name in required:
            yield parameter
        else:
            yield f"({parameter})?"


def _value(writer: _Writer, root: Mapping[str, Any], name: str, schema: Any) -> str:
    """A string is bare, all else is JSON; newlines around it."""
    while isinstance(schema, dict) and "$ref" in schema:
        schema = calls.target(root, schema["$ref"])
    if not isinstance(schema, dict):  # true: any value
        schema = {}
    types = calls.json_types(root, name)
    variants = schema.get("anyOf") or schema.get("oneOf") or [schema]
    if "string" not in types:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        value = writer.rule(f"json_{len(writer.rules)}", _json(schema | definitions))
        return f'"\\n" {value} {json.dumps(PARAMETER_END)}'
    if "enum" in schema and types == {"string"}:
        values = [json.dumps(f"\n{value}{PARAMETER_END}") for value in schema["enum"]]
        return f"({' | '.join(values)})"
    if types == {"string"} and schema.keys() <= OF_STRINGS:
        length = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        return f'"\\n" {writer.lazy(f"(?s:.{length})", PARAMETER_END)}'
    if all(variant.keys() <= ANNOTATIONS | {"type"} for variant in variants):
        return f'"\\n" {writer.lazy("(?s:.*)", PARAMETER_END)}'  # any text is a string, if it is nothing else
    raise BadGrammar(f"'{name}': of a string only enum, minLength and maxLength can be enforced", "")


# --- what a grammar of Lark embeds --------------------------------------------------------------------------


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(dict(schema) | {"x-guidance": JSON_LAYOUT})


def _quoted(grammar: Grammar) -> str:
    """A custom tool's input as a member of a JSON object."""
    text = grammar_in_json.grammar(grammar.syntax, grammar.definition)  # its names are its own, within %lark
    return f'"{{\\"input\\": \\"" %lark {{\n{text}\n}} "\\"}}"'


def as_lark(grammar: Grammar) -> str:
    if grammar.syntax == "lark":
        return grammar.definition
    return f"start: /{regex_to_lark(grammar.definition, '')}/"


# --- masks --------------------------------------------------------------------------------------------------


class Constraint:
    """One answer under a grammar: a token mask before every token."""

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
    """Compiles grammars for one vocabulary."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=list(eos_token_ids))

    def check(self, spec: StructuredOutput) -> None:
        """Raises BadGrammar for a schema or grammar that cannot be enforced."""
        if spec.schema is not None:
            self._check_schema(spec.schema, "schema")
        for name, schema in spec.functions:
            self._check_schema(schema, name)
        for name, grammar in spec.inputs:
            try:
                in_json = grammar_in_json.grammar(grammar.syntax, grammar.definition)
            except grammar_in_json.BadSource as error:
                raise BadGrammar(str(error), name) from error
            self._check_lark(as_lark(grammar), name)
            self._check_lark(in_json, name)

    def _check_schema(self, schema: dict[str, Any], part: str) -> None:
        for problem in _not_enforceable(schema):
            raise BadGrammar(problem, part)
        if _n_levels(schema) > MAX_LEVELS:
            raise BadGrammar(f"it is more than {MAX_LEVELS} levels deep, $refs included", part)
        if _is_circular(schema):
            raise BadGrammar("a $ref leads back to itself", part)
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema)
        except ValueError as error:  # a number of more than 64 bits
            raise BadGrammar(str(error), part) from error
        if message := LLMatcher.validate_grammar(grammar, self._tokenizer):
            raise BadGrammar(message, part)

    def _check_lark(self, text: str, part: str) -> None:
        if message := LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text), self._tokenizer):
            raise BadGrammar(message.splitlines()[0], part)

    def constraint(self, grammar: str) -> Constraint:
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar))
        if matcher.is_error():
            raise BadGrammar(matcher.get_error(), "")
        return Constraint(matcher, self._vocab_size)


# --- what llguidance does not check itself ------------------------------------------------------------------


def _is_circular(root: dict[str, Any]) -> bool:
    """Is there a schema that stands for itself and nothing else? llguidance would follow it for ever."""
    graph: dict[int, list[int]] = {}  # id of a schema -> ids of the schemas that must hold at the same place
    for node in _nodes(root):
        graph[id(node)] = [id(schema) for schema in _stands_for(root, node)]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def _stands_for(root: dict[str, Any], schema: Any) -> list[Any]:
    """The schemas that must hold at the same place as this one."""
    if not isinstance(schema, dict):
        return []
    same_place = _ref_target(root, schema)
    for keyword in ("allOf", "anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        if isinstance(alternatives, list) and (keyword == "allOf" or len(alternatives) == 1):
            same_place += alternatives
    return same_place


def _ref_target(root: dict[str, Any], schema: Any) -> list[Any]:
    """The schema that its $ref leads to, if it has one."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        return [calls.target(root, schema["$ref"])]
    return []


def _not_enforceable(root: dict[str, Any]) -> Iterator[str]:
    """References that llguidance may follow and this file cannot: to another document, or to another $id."""
    for node in _nodes(root):
        if isinstance(node, dict):
            ref = node.get("$ref")
            if isinstance(ref, str) and calls.target(root, ref) is None:
                yield f"$ref {ref[:80]} leads nowhere in the schema"
            if node is not root and isinstance(node.get("$id"), str):
                yield "an $id inside the schema cannot be enforced"


def _n_levels(root: dict[str, Any]) -> int:
    """How deep the schema is, $refs followed.

    Where they go in circles it is a bound: the depth without $refs, and that of all their targets, for no
    chain of $refs is longer than all of them one below the other.
    """
    nodes, depths = _nodes(root), dict[int, int]()  # id of a node -> its depth
    below: dict[int, list[int]] = {}
    for node in nodes:
        below[id(node)] = [id(inner) for inner in (*_inside(node), *_ref_target(root, node))]
    try:
        for node_id in TopologicalSorter(below).static_order():
            depths[node_id] = 1 + max((depths[inner] for inner in below.get(node_id, ())), default=0)
        return depths[id(root)]
    except CycleError:
        depths.clear()
    for node in reversed(nodes):  # what a node holds comes before it
        depths[id(node)] = 1 + max((depths[id(inner)] for inner in _inside(node)), default=0)
    targets = {id(target) for node in nodes for target in _ref_target(root, node)}
    return depths[id(root)] + sum(depths.get(target, 0) for target in targets)


def _nodes(root: dict[str, Any]) -> list[Any]:
    """The schema and the objects and lists in it, each behind what holds it."""
    nodes: list[Any] = [root]
    for node in nodes:  # it grows
        nodes += _inside(node)
    return nodes


def _inside(node: dict[str, Any] | list[Any]) -> list[Any]:
    values: Iterable[Any] = node
    if isinstance(node, dict):
        values = node.values()
    return [value for value in values if isinstance(value, dict | list)]
