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

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from llguidance import regex_to_lark

from channels import Dialect
from dialects import calls, grammar_in_json, json_schema
from dialects.json_schema import References
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
NEWLINES = r"/\n{0,2}/"  # behind the reasoning; models were trained on two

# The separators of JSON are fixed: where they are free, a model at a high temperature writes blanks for ever.
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# The reasoning: the prompt has begun it; the model may begin it; the prompt has ended it.
Thinking = Literal["open", "possible", "over"]

# --- the grammar of an answer -------------------------------------------------------------------------------


class _Writer:
    """Collects the rules of one grammar; terminals have names in capitals, as Lark wants it."""

    def __init__(self, dialect: Dialect, added: Mapping[str, int]) -> None:
        self.dialect = dialect
        self.rules = {"NEWLINES: ": NEWLINES, "ANY: ": "/(?s:.*)/"}  # "name: " -> what it stands for
        self._added = added  # ids of the added tokens
        self._n_characters = 0

    def rule(self, name: str, *alternatives: str) -> str:
        self.rules[f"{name}: "] = " | ".join(alternatives)
        self._n_characters += len(self.rules[f"{name}: "])
        check_size(self._n_characters)
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
        if part.startswith("{"):
            # A lexeme of its own: the lexer takes the longest one, and other JSON begins with a brace too.
            return f'"{{" {json.dumps(part[1:])}'
        return json.dumps(part)

    def __str__(self) -> str:
        return "\n".join(name + rule for name, rule in self.rules.items())


def check_size(n_characters: int) -> None:
    """Raises BadGrammar."""
    if n_characters > MAX_LARK:
        raise BadGrammar(f"expected schemas and grammars that take at most {MAX_LARK} characters in all", "")


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
        more = f"({writer.sequence(forms.separator)} call){{0,{MAX_CALLS - 1}}}"
    rest = f"{more} {writer.sequence(ending)}"
    calls = f"{writer.sequence(opening)} call {rest}"
    if spec.calls == "required":
        writer.rule("body", calls)
    elif spec.schema is not None or forms.before is None:
        writer.rule("body", "text", calls)
    else:
        form = f"{forms.before}{opening}{forms.call}"
        first = writer.rule("first", *(writer.sequence(form, TEXT="ANY", **place) for place in places))
        writer.rule("body", "text", calls, f"{first} {rest}")


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
    references = References(root)
    described = expect(dict, root.get("properties", {}))
    required = {expect(str, name): True for name in expect(list, root.get("required", []))}
    for name, schema in (described | (required | described)).items():
        if not PARAMETER_NAME.fullmatch(name):
            raise BadGrammar(f"'{name}' cannot be the name of a parameter", "")
        if schema is False:  # nothing fits it: it cannot be given
            continue
        parameter = f"{json.dumps(f'<parameter={name}>')} {_value(writer, references, name, schema)}"
        if name in required:
            yield parameter
        else:
            yield f"({parameter})?"


def _value(writer: _Writer, references: References, name: str, schema: Any) -> str:
    """A string is bare, all else is JSON; newlines around it."""
    while targets := references.of(schema):  # they do not go round: _schemas() has refused such
        (schema,) = targets
    if not isinstance(schema, dict):  # true: any value
        schema = {}
    types = json_schema.property_types(references, name)
    variants = expect(list, schema.get("anyOf") or schema.get("oneOf") or [schema])
    if "string" not in types:
        value = writer.rule(f"json_{len(writer.rules)}", _json(_with_definitions(schema, references.root)))
        return f'"\\n" {value} {json.dumps(PARAMETER_END)}'
    if "enum" in schema and types == {"string"}:
        values = [json.dumps(f"\n{value}{PARAMETER_END}") for value in expect(list, schema["enum"])]
        return f"({' | '.join(values)})"
    if types == {"string"} and schema.keys() <= OF_STRINGS:
        length = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
        return f'"\\n" {writer.lazy(f"(?s:.{length})", PARAMETER_END)}'
    if all(expect(dict, variant).keys() <= ANNOTATIONS | {"type"} for variant in variants):
        return f'"\\n" {writer.lazy("(?s:.*)", PARAMETER_END)}'  # any text is a string, if it is nothing else
    raise BadGrammar(f"'{name}': of a string only enum, minLength and maxLength can be enforced", "")


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema as a schema of its own."""
    if '"$ref"' not in json.dumps(schema):
        return dict(schema)
    return dict(schema) | {key: root[key] for key in ("$defs", "definitions") if key in root}


def expect(kind: type[T], value: Any) -> T:
    """Return a value of a schema, which llguidance has not validated yet; raises BadGrammar."""
    if not isinstance(value, kind):
        raise BadGrammar(f"expected a value of type {kind.__name__}, got {shown(value)}", "")
    return value


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
    """What is compiled (matchers.py); raises BadGrammar for what can be known before that."""
    parts = json.dumps([*_schemas(spec), *_inputs(spec)])
    check_size(len(parts))
    return AnswerGrammar(lark(spec, dialect, added, thinking), parts)


def _schemas(spec: StructuredOutput) -> Iterator[tuple[str, Schema, None]]:
    """Raises BadGrammar."""
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


def _inputs(spec: StructuredOutput) -> Iterator[tuple[str, None, str]]:
    """Each grammar as the client has written it, which is what an error is about, and as it is in JSON."""
    for name, grammar in spec.inputs:
        try:
            in_json = grammar_in_json.grammar(grammar.syntax, grammar.definition)
        except grammar_in_json.BadSource as error:
            raise BadGrammar(str(error), name) from error
        yield name, None, as_lark(grammar)
        yield name, None, in_json
