"""Structured output: what an answer may and must be, as a request demands it.

    text.format or response_format --text_format()---+
    tools, tool_choice --tools.tool_choice()---------+--structured_output()--> StructuredOutput or None

Authority: https://platform.openai.com/docs/guides/structured-outputs (the text),
https://platform.openai.com/docs/guides/function-calling (strict tools, tool_choice, custom tools' grammars).

Rules of this file:
1. What is demanded is enforced, by constrained decoding, and never left to the prompt.
2. None where nothing is demanded: the model then decodes without a mask.
3. A demand is about what stands behind the reasoning, which is always free.

Not here: reading the tools and tool_choice (tools.py), the grammar that enforces a StructuredOutput
and the refusal of a schema that cannot be enforced (dialects/structured_output.py).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from request.refusals import BadInput
from request.tools import Calls, Grammar, Tool, ToolChoice, identifier
from request.validation import anything, boolean, hint, mapping, members, one_of, required, text

Schema = dict[str, Any]  # a JSON schema


class StructuredOutput(NamedTuple):
    """What the answer must be, behind the reasoning."""

    calls: Calls
    functions: tuple[tuple[str, Schema], ...] = ()  # that may be called: name, schema of the arguments
    one_call: bool = False  # at most one
    inputs: tuple[tuple[str, Grammar], ...] = ()  # the custom tools of `functions` that have a grammar
    schema: Schema | None = None  # of the text; None: it may be any text
    schema_path: str = ""  # where `schema` stands in the request


class TextFormat(NamedTuple):
    schema: Schema | None  # None: any text
    path: str  # where the schema stands in the request


def format_object(value: Any, path: str) -> dict[str, Any]:
    """Check what a format has in both APIs: its type, and that its other members may be told of."""
    check_members = members(
        type=one_of("text", "json_schema", "json_object"),
        name=hint,
        description=text,
        schema=anything,
        strict=boolean,
        json_schema=anything,
    )
    fields: dict[str, Any] = check_members(value, path)
    required(fields, "type", text, path)
    return fields


def text_format(fields: Mapping[str, Any], path: str) -> TextFormat:
    """Return the schema that the text must fit; a format that is not set is `text`."""
    match fields.get("type", "text"):
        case "json_schema":
            required(fields, "name", identifier, path)
            schema = required(fields, "schema", mapping, path)
            return TextFormat(schema, f"{path}.schema")
        case "json_object":
            return TextFormat({"type": "object"}, path)
        case _:
            return TextFormat(None, "")


def structured_output(
    tools: list[Tool], choice: ToolChoice, text: TextFormat, parallel: bool
) -> StructuredOutput | None:
    """Return what to enforce; None where the model may say anything. Raises BadInput."""
    if text.schema is None and not _limits_calls(tools, choice):
        return None
    functions: list[tuple[str, Schema]] = []
    inputs: list[tuple[str, Grammar]] = []
    for tool in choice.allowed:
        name = tool.qualified_name
        schema = {"type": "object"} | (tool.schema() or {})
        if schema["type"] != "object":
            message = f"Invalid schema for '{name}': arguments are an object."
            raise BadInput(message, "tools", "invalid_json_schema")
        functions.append((name, schema))
        if tool.grammar:
            inputs.append((name, tool.grammar))
    return StructuredOutput(
        calls=choice.calls,
        functions=tuple(functions),
        one_call=choice.named or not parallel,
        inputs=tuple(inputs),
        schema=text.schema,
        schema_path=text.path,
    )


def _limits_calls(tools: list[Tool], choice: ToolChoice) -> bool:
    """Say whether a call must come, or the calls that may come are not all those that a model could write."""
    if choice.calls == "auto":
        is_subset = len(choice.allowed) < len(tools)
        return is_subset or any(tool.strict or tool.grammar for tool in choice.allowed)
    return choice.calls == "required"
