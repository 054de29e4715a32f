"""Structured output: the form that an answer must have, as a grammar.

    StructuredOutput --answer_grammar()--> AnswerGrammar --matchers.py--> masks over the vocabulary

It is also called constrained decoding or guided decoding, and the mask a token bitmask. The library that
follows the grammar is llguidance; other servers use XGrammar or Outlines in its place. `StructuredOutput`
is the demand of a request (request/tools.py); `answer_grammar()` writes it in the forms of the dialect.

Authority: https://platform.openai.com/docs/guides/structured-outputs and .../function-calling (tool_choice);
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md for the language of the grammars.

Rules of this file:
1. Reasoning comes first and is free: the grammar holds for what follows it (vllm-project/vllm#44012).
2. Calls and texts are demanded in the forms of the dialect (families.py): the parser finds what they write.
3. A schema that cannot be enforced is refused before anything runs, by compiling it, and by following its
   $refs (json_schema.py). Of a function that is not strict, keywords that cannot be enforced are passed over:
   MCP servers write many. https://github.com/1jehuang/jcode/issues/687
4. The texts that a grammar demands are bounded, and so are the blanks between them: a model that is forced
   into a form may write blanks without end: https://github.com/vllm-project/vllm/issues/38696

Not here: which request asks for what (request/tools.py), compiling a grammar and following it
(matchers.py), sampling under the mask (sampling.py).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from llguidance import regex_to_lark

from channels import Dialect
from dialects import calls, grammar_in_json
from dialects.json_schema import BadGrammar, has_circle, types_of, variants
from request.tools import Grammar, StructuredOutput, Tool

MAX_LARK = 2**20  # characters of the grammar of an answer
MAX_CALLS = 16  # of one answer: a small model that must call goes on until its context is full
NEWLINES = r"/\n{0,2}/"  # after the reasoning; models were trained on two

# The separators of JSON are fixed: free ones let a model at a high temperature write blanks for ever.
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# The reasoning: the prompt has begun it, the model may begin it, the prompt has ended it.
Thinking = Literal["open", "possible", "over"]


class AnswerGrammar(NamedTuple):
    """The grammar of an answer, to be compiled, and what in it a client has sent."""

    lark: str
    # (name, Lark) of each schema and each grammar: if the whole fails they are compiled one by one, so that
    # the error names one.
    parts: tuple[tuple[str, str], ...] = ()


# --- the grammar of an answer -------------------------------------------------------------------------------


class _Writer:
    """Collects the rules of one grammar; terminals have names in capitals, as Lark wants it."""

    def __init__(self, dialect: Dialect, added: Mapping[str, int]) -> None:
        self.dialect = dialect
        self.rules = {"NEWLINES": NEWLINES, "ANY": "/(?s:.*)/"}  # name -> its definition
        self.parts: list[tuple[str, str]] = []
        self._added = added  # ids of the added tokens
        self._n_characters = 0

    def rule(self, name: str, *alternatives: str) -> str:
        """Write a rule, and return its name; raises BadGrammar if the grammar gets too long."""
        self.rules[name] = " | ".join(alternatives)
        self._n_characters += len(self.rules[name])
        if self._n_characters > MAX_LARK:
            raise BadGrammar(f"expected schemas and grammars that take at most {MAX_LARK} characters in all")
        return name

    def sequence(self, form: str, **places: str) -> str:
        """Write a form of the dialect: markers, the text between them, and the values of its places.

        Any text before a marker that is not a token ends at the first spelling of the marker.
        """
        markers = self.dialect.markers
        cuts = sorted([*markers, *places], key=len, reverse=True)
        written: list[str] = []
        for part in re.split("(" + "|".join(map(re.escape, cuts)) + ")", form):
            if written[-1:] == ["ANY"] and part in markers - self.dialect.tokens:
                written[-1] = self.lazy(part)
            elif part:
                written.append(places.get(part) or self._literal(part))
        return " ".join(written)

    def lazy(self, end: str) -> str:
        """Write any text up to the first such end, and the end."""
        name = f"lazy_{len(self.rules)}"
        self.rules[f"{name}[suffix={json.dumps(end)}]"] = "/(?s:.*)/"
        return name

    def _literal(self, part: str) -> str:
        if part in self.dialect.tokens:
            return f"<[{self._added[part]}]>"
        if part.startswith("{"):
            # A lexeme of its own: the lexer takes the longest one, and other JSON begins with a brace too.
            return f'"{{" {json.dumps(part[1:])}'
        return json.dumps(part)


def answer_grammar(
    spec: StructuredOutput, dialect: Dialect, added: Mapping[str, int], thinking: Thinking
) -> AnswerGrammar:
    """Return the grammar of an answer; `added` has the ids of the dialect's tokens.

    Raises BadGrammar for what can be known before it is compiled (matchers.py).
    """
    writer = _Writer(dialect, added)
    writer.rule("start", _reasoning(writer, thinking) + " body")
    content = _plain_text(writer)
    if spec.schema is not None:
        content = writer.rule("json", _part(writer, "schema", spec.schema, spec.strict))
    writer.rule("text", writer.sequence(dialect.forms.text, TEXT=content))
    writer.rule("body", *_bodies(writer, spec))
    lark = "\n".join(f"{name}: {rule}" for name, rule in writer.rules.items())
    return AnswerGrammar(lark, tuple(writer.parts))


def _reasoning(writer: _Writer, thinking: Thinking) -> str:
    """Return the grammar of the text that may precede the body."""
    dialect = writer.dialect
    opening, ending = dialect.forms.thought
    can_think = dialect.header or {opening, ending} <= dialect.markers
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
    dialect = writer.dialect
    spelled = dialect.markers - dialect.tokens - set(dialect.forms.thought)  # reasoning is free
    terms = ["ANY"]
    if spelled:
        markers = "|".join(re.escape(marker).replace("/", r"\/") for marker in sorted(spelled))
        writer.rule("SPELLED", f"/(?s:.*)({markers})(?s:.*)/")
        terms.append("~SPELLED")
    if dialect.start == "call":
        terms.append(r"~/\s*[\[{](?s:.*)/")  # a call without a marker
    return writer.rule("PLAIN", " & ".join(terms))


def _bodies(writer: _Writer, spec: StructuredOutput) -> list[str]:
    """Return what may follow the reasoning: the text, or calls, or text and then calls."""
    if spec.calls == "none":
        return ["text"]
    forms = writer.dialect.forms
    places: list[dict[str, str]] = []
    for i, tool in enumerate(spec.tools):
        arguments = writer.rule(f"arguments_{i}", _arguments(writer, tool))
        places.append({"NAME": json.dumps(tool.qualified_name), "ARGUMENTS": arguments})
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


def _arguments(writer: _Writer, tool: Tool) -> str:
    """Return the arguments of a call of the tool."""
    name = tool.qualified_name
    schema = {"type": "object", **tool.schema()}
    try:
        in_xml = writer.dialect.forms.arguments == "xml"
        if tool.grammar:
            return _input(writer, name, tool.grammar, in_xml)
        as_json = _part(writer, name, schema, tool.strict)
        if in_xml:
            return " ".join(_parameters(writer, schema, tool.strict)) or '""'
        return as_json
    except BadGrammar as error:
        error.part = name
        raise
    except (AttributeError, TypeError) as error:  # llguidance has not looked at it yet
        raise BadGrammar("it is not a JSON schema", name) from error


def _part(writer: _Writer, name: str, schema: Mapping[str, Any], strict: bool) -> str:
    """Return the JSON that fits a schema of the client."""
    if has_circle(schema):
        raise BadGrammar("a $ref leads back to itself", name)
    as_json = _json(schema, strict)
    writer.parts.append((name, f"start: {as_json}"))
    return as_json


def _json(schema: Mapping[str, Any], strict: bool) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {**JSON_LAYOUT, "lenient": not strict}})


def _input(writer: _Writer, name: str, grammar: Grammar, in_xml: bool) -> str:
    """Return the input of a custom tool: in the quotes of JSON, or bare."""
    bare = grammar.definition
    if grammar.syntax == "regex":
        bare = f"start: /{regex_to_lark(bare, '')}/"
    writer.parts.append((name, bare))  # an error is about what the client has written
    in_json = grammar_in_json.grammar(grammar.syntax, grammar.definition)  # it refuses what is not a text
    if in_xml:
        return f'"<parameter=input>\\n" %lark {{\n{bare}\n}} {json.dumps(PARAMETER_END)}'
    return f'"{{\\"input\\": \\"" %lark {{\n{in_json}\n}} "\\"}}"'


# --- arguments in XML ---------------------------------------------------------------------------------------

# The keywords of JSON schema that are supported if parameters are written in XML: in the schema of all the
# arguments, and in that of a string, which is bare. A grammar does not follow the others: they are refused.
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$schema", "$comment"}
OF_OBJECTS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
OF_STRINGS = ANNOTATIONS | {"type", "anyOf", "oneOf", "$ref"}
PARAMETER_NAME = re.compile(r"[^<>\s]+")
PARAMETER_END = f"\n{calls.VALUE_END}\n"


def _parameters(writer: _Writer, root: Mapping[str, Any], strict: bool) -> Iterator[str]:
    """Yield the parameters in the order of the schema, those that it only requires last."""
    _check_keywords([root], OF_OBJECTS, strict)
    required = dict.fromkeys(root.get("required", ()))
    for name in dict.fromkeys([*root.get("properties", ()), *required]):
        if not PARAMETER_NAME.fullmatch(name):
            raise BadGrammar(f"'{name}' cannot be the name of a parameter")
        parameter = f"{json.dumps(f'<parameter={name}>')} {_value(writer, root, name, strict)}"
        yield parameter if name in required else f"({parameter})?"


def _value(writer: _Writer, root: Mapping[str, Any], name: str, strict: bool) -> str:
    """Return one of three: a string of an enum, any string, or JSON; newlines around it."""
    schemas = variants(root, name)
    schema: Any = next((each for each in schemas if "$ref" not in each), None)
    types = types_of(schemas)
    if "string" not in types:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        as_json = writer.rule(f"json_{len(writer.rules)}", _json(schema | definitions, strict))
        return f'"\\n" {as_json} {json.dumps(PARAMETER_END)}'
    if "enum" in schema and types == {"string"}:
        values = [json.dumps(f"\n{value}{PARAMETER_END}") for value in schema["enum"]]
        return f"({' | '.join(values)})"
    _check_keywords(schemas, OF_STRINGS, strict)
    return f'"\\n" {writer.lazy(PARAMETER_END)}'


def _check_keywords(schemas: Iterable[Mapping[str, Any]], enforced: set[str], strict: bool) -> None:
    """Raise BadGrammar for keywords that a grammar of parameters in XML does not follow: rule 3."""
    unknown = set[str]().union(*schemas) - enforced
    if unknown and strict:
        raise BadGrammar(f"{', '.join(sorted(unknown))} cannot be enforced on parameters in XML")
