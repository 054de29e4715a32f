"""Structured output: what an answer must be, as a grammar.

    StructuredOutput --answer_grammar()--> AnswerGrammar --matchers.py--> masks over the vocabulary

It is also called constrained decoding or guided decoding, and the mask a token bitmask. The library that
follows the grammar is llguidance; other servers use XGrammar or Outlines in its place. `StructuredOutput` is
what is asked for (request/tools.py), `lark()` writes it in the forms of the dialect.

Authority: https://platform.openai.com/docs/guides/structured-outputs and .../function-calling (tool_choice);
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md for the language of the grammars.

Rules of this file:
1. Reasoning comes first and is free: the grammar holds for what follows it (vllm-project/vllm#44012).
2. Calls and texts are demanded in the forms of the dialect (families.py): the parser finds what they write.
3. A schema that cannot be enforced is refused before anything runs.
4. What is written is bounded, and so are the blanks between what is demanded: a model that is held to a form
   it does not like writes them for ever where it may: https://github.com/vllm-project/vllm/issues/38696

Not here: which request asks for what (request/tools.py), compiling a grammar and following it
(matchers.py), sampling under the mask (sampling.py).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from llguidance import regex_to_lark

from channels import Dialect
from dialects import calls, grammar_in_json, json_schema
from request.refusals import shown
from request.tools import Grammar, Schema, StructuredOutput

T = TypeVar("T")


class BadGrammar(ValueError):
    """The grammar or schema cannot be enforced.

    `part` names it: "schema", the name of a function, or "" for all of them together.
    """

    def __init__(self, message: str, part: str) -> None:
        super().__init__(message)
        self.part = part


MAX_LARK = 2**20  # characters of the grammar of an answer, and of what a client has sent for it
MAX_CALLS = 16  # of one answer: a small model that must call goes on until its context is full
NEWLINES = r"/\n{0,2}/"  # after the reasoning; models were trained on two

# The separators of JSON are fixed: free ones let a model at a high temperature write blanks for ever.
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# The reasoning: the prompt has begun it, the model may begin it, the prompt has ended it.
Thinking = Literal["open", "possible", "over"]

# --- the grammar of an answer -------------------------------------------------------------------------------


class _Writer:
    """Collects the rules of one grammar; terminals have names in capitals, as Lark wants it."""

    def __init__(self, dialect: Dialect, added: Mapping[str, int]) -> None:
        self.dialect = dialect
        self.rules = {"NEWLINES": NEWLINES, "ANY": "/(?s:.*)/"}  # name -> what it stands for
        self._added = added  # ids of the added tokens
        self._n_characters = 0

    def rule(self, name: str, *alternatives: str) -> str:
        self.rules[name] = " | ".join(alternatives)
        self._n_characters += len(self.rules[name])
        check_size(self._n_characters)
        return name

    def sequence(self, form: str, **places: str) -> str:
        """Write a form of the dialect: markers, the text between them, and what the places stand for.

        Any text before a marker that is not a token ends where the marker is spelled for the first time.
        """
        spelled = self.dialect.markers - self.dialect.tokens
        free_places = [place for place, rule in places.items() if rule == "ANY"]
        lazy_ends = {place + marker: marker for place in free_places for marker in spelled}
        cuts = sorted([*lazy_ends, *self.dialect.markers, *places], key=len, reverse=True)
        written: list[str] = []
        for part in re.split("(" + "|".join(map(re.escape, cuts)) + ")", form):
            if part in lazy_ends:
                written.append(self.lazy("(?s:.*)", lazy_ends[part]))
            elif part:
                written.append(places.get(part) or self._literal(part))
        return " ".join(written)

    def lazy(self, regex: str, end: str) -> str:
        """Write what the regex matches, up to the first such end, and the end."""
        name = f"lazy_{len(self.rules)}"
        self.rules[f"{name}[suffix={json.dumps(end)}]"] = f"/{regex}/"
        return name

    def _literal(self, part: str) -> str:
        if part in self.dialect.tokens:
            return f"<[{self._added[part]}]>"
        if part.startswith("{"):
            # A lexeme of its own: the lexer takes the longest one, and other JSON begins with a brace too.
            return f'"{{" {json.dumps(part[1:])}'
        return json.dumps(part)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {rule}" for name, rule in self.rules.items())


def check_size(n_characters: int) -> None:
    """Raises BadGrammar."""
    if n_characters > MAX_LARK:
        raise BadGrammar(f"expected schemas and grammars that take at most {MAX_LARK} characters in all", "")


def lark(spec: StructuredOutput, dialect: Dialect, added: Mapping[str, int], thinking: Thinking) -> str:
    """Return the grammar of an answer; `added` has the ids of the dialect's tokens."""
    writer = _Writer(dialect, added)
    writer.rule("start", _reasoning(writer, thinking) + " body")
    content = _plain_text(writer)
    if spec.schema is not None:
        content = writer.rule("json", _json(spec.schema))
    alternatives = [writer.rule("text", writer.sequence(dialect.forms.text, TEXT=content))]
    if spec.calls != "none":
        alternatives = _calls(writer, spec)
    writer.rule("body", *alternatives)
    return str(writer)


def _reasoning(writer: _Writer, thinking: Thinking) -> str:
    """Return what may stand before the body."""
    dialect = writer.dialect
    opening, ending = dialect.forms.thought
    can_think = set(dialect.reasoning_markers) <= dialect.markers
    if thinking == "over" or (thinking == "possible" and not can_think):
        return ""
    if thinking == "open":
        opening = ""
    thought = writer.sequence(f"{opening}THOUGHT{ending}", THOUGHT="ANY")
    if dialect.trims:
        thought += " NEWLINES"
    if thinking == "possible":
        thought = f"({thought})?"
    return thought


def _plain_text(writer: _Writer) -> str:
    """Return the rule of text in which the parser finds nothing else."""
    dialect, forms = writer.dialect, writer.dialect.forms
    spelled = dialect.markers - dialect.tokens - set(dialect.reasoning_markers)  # reasoning is free
    if forms.before == "TEXT":  # the marker that begins a call ends the text, token or not
        spelled |= {marker for marker in dialect.markers if (forms.calls[0] + forms.call).startswith(marker)}
    terms = ["ANY"]
    if spelled:
        markers = "|".join(re.escape(marker).replace("/", r"\/") for marker in sorted(spelled))
        writer.rule("SPELLED", f"/(?s:.*)({markers})(?s:.*)/")
        terms.append("~SPELLED")
    if dialect.start == "call":
        terms.append(BARE)
    return writer.rule("PLAIN", " & ".join(terms))


BARE = r"~/\s*[\[{](?s:.*)/"  # a call without a marker


def _calls(writer: _Writer, spec: StructuredOutput) -> list[str]:
    """Return the bodies with one call or several, what may stand before them, and what instead."""
    forms = writer.dialect.forms
    grammars = dict(spec.inputs)
    places: list[dict[str, str]] = []
    for i, (name, schema) in enumerate(spec.functions):
        arguments = writer.rule(f"arguments_{i}", _arguments(writer, name, schema, grammars.get(name)))
        places.append({"NAME": json.dumps(name), "ARGUMENTS": arguments})
    opening, ending = forms.calls
    writer.rule("call", *(writer.sequence(forms.call, **place) for place in places))
    rest = writer.sequence(ending)
    if not spec.one_call and forms.separator is not None:
        rest = f"({writer.sequence(forms.separator)} call){{0,{MAX_CALLS - 1}}} {rest}"
    calls = f"{writer.sequence(opening)} call {rest}"
    if spec.calls == "required":
        return [calls]
    if spec.schema is not None or forms.before is None:
        return ["text", calls]
    form = f"{forms.before}{opening}{forms.call}"
    writer.rule("first", *(writer.sequence(form, TEXT="ANY", **place) for place in places))
    return ["text", calls, f"first {rest}"]


def _arguments(writer: _Writer, name: str, schema: Mapping[str, Any], grammar: Grammar | None) -> str:
    """Return the arguments of a function; `grammar` is that of a custom tool's input (Tool.schema())."""
    if writer.dialect.forms.arguments == "json":
        if grammar is None:
            return _json(schema)
        text = grammar_in_json.grammar(grammar.syntax, grammar.definition)  # its names are its own in %lark
        return f'"{{\\"input\\": \\"" %lark {{\n{text}\n}} "\\"}}"'
    if grammar:
        return f'"<parameter=input>\\n" %lark {{\n{as_lark(grammar)}\n}} {json.dumps(PARAMETER_END)}'
    try:
        return " ".join(_parameters(writer, schema)) or '""'
    except BadGrammar as error:
        raise BadGrammar(str(error), name) from error


# --- arguments in XML ---------------------------------------------------------------------------------------

# The keywords of JSON schema that are enforced on values in XML, whose strings are bare; others are refused.
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$schema", "$comment"}
OF_OBJECTS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
OF_STRINGS = ANNOTATIONS | {"type", "minLength", "maxLength"}
PARAMETER_NAME = re.compile(r"[^<>\s]+")
PARAMETER_END = f"\n{calls.VALUE_END}\n"


def _parameters(writer: _Writer, root: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parameters in the order of the schema, those that it only requires last."""
    if unknown := root.keys() - OF_OBJECTS:
        raise BadGrammar(f"{', '.join(sorted(unknown))} cannot be enforced on parameters", "")
    described = expect(dict, root.get("properties", {}))
    required = {expect(str, name): True for name in expect(list, root.get("required", []))}
    for name, schema in (described | (required | described)).items():
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
    """Return what a value is: a string is bare, all else is JSON; newlines around it."""
    while isinstance(schema, dict) and "$ref" in schema:  # not for ever: _parts() has refused circles
        schema = json_schema.target(root, expect(str, schema["$ref"]))
    if not isinstance(schema, dict):  # true: any value
        schema = {}
    types = json_schema.property_types(root, name)
    if "string" not in types:
        as_json = _json(schema)
        if '"$ref"' in as_json:
            as_json = _json(schema | {key: root[key] for key in ("$defs", "definitions") if key in root})
        return f'"\\n" {writer.rule(f"json_{len(writer.rules)}", as_json)} {json.dumps(PARAMETER_END)}'
    if "enum" in schema and types == {"string"}:
        values = [json.dumps(f"\n{value}{PARAMETER_END}") for value in expect(list, schema["enum"])]
        return f"({' | '.join(values)})"
    characters = "(?s:.*)"  # any text is a string, if it is nothing else
    variants = expect(list, schema.get("anyOf") or schema.get("oneOf") or [schema])
    if types == {"string"} and schema.keys() <= OF_STRINGS:
        characters = f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
    elif any(expect(dict, variant).keys() - ANNOTATIONS - {"type"} for variant in variants):
        raise BadGrammar(f"'{name}': of a string only enum, minLength and maxLength can be enforced", "")
    return f'"\\n" {writer.lazy(characters, PARAMETER_END)}'


def expect(kind: type[T], value: Any) -> T:
    """Return a value of a schema, which llguidance has not validated yet; raises BadGrammar."""
    if not isinstance(value, kind):
        raise BadGrammar(f"expected a value of type {kind.__name__}, got {shown(value)}", "")
    return value


# --- what a grammar of Lark embeds --------------------------------------------------------------------------


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(dict(schema) | {"x-guidance": JSON_LAYOUT})


def as_lark(grammar: Grammar) -> str:
    if grammar.syntax == "lark":
        return grammar.definition
    return f"start: /{regex_to_lark(grammar.definition, '')}/"


# --- the grammar of an answer, to be compiled ---------------------------------------------------------------


class AnswerGrammar(NamedTuple):
    """The grammar of an answer, and what in it a client has sent."""

    lark: str
    # JSON, [[name, schema or null, Lark or null], ...]: each is checked by itself, so that an error names it.
    parts: str


NO_PARTS = "[]"


def answer_grammar(
    spec: StructuredOutput, dialect: Dialect, added: Mapping[str, int], thinking: Thinking
) -> AnswerGrammar:
    """Return what is compiled (matchers.py); raises BadGrammar for what can be known before that."""
    parts = json.dumps(list(_parts(spec)))
    check_size(len(parts))
    return AnswerGrammar(lark(spec, dialect, added, thinking), parts)


def _parts(spec: StructuredOutput) -> Iterator[tuple[str, Schema | None, str | None]]:
    """Yield what is checked by itself; raises BadGrammar."""
    schemas = list(spec.functions)
    if spec.schema is not None:
        schemas.append(("schema", spec.schema))
    n_nodes = 0
    for name, schema in schemas:
        nodes = json_schema.nodes_of(schema)
        n_nodes += len(nodes)
        if n_nodes > json_schema.MAX_NODES:
            message = f"expected at most {json_schema.MAX_NODES} objects and lists in all schemas together"
            raise BadGrammar(message, name)
        if problem := json_schema.problem(nodes):
            raise BadGrammar(problem, name)
        yield name, schema, None
    for name, grammar in spec.inputs:
        try:
            in_json = grammar_in_json.grammar(grammar.syntax, grammar.definition)
        except grammar_in_json.BadSource as error:
            raise BadGrammar(str(error), name) from error
        yield name, None, as_lark(grammar)  # an error is about what the client has written
        yield name, None, in_json
