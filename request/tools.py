"""Tools: what a client offers, how a model is told of it, what of it may be called, what the answer must be.

    tools                           --read_tool()---> echo, [Tool, ...]
    tool_choice                     --tool_choice()-> ToolChoice            all three
    text.format or response_format  --text_format()-> schema                --structured_output()-->
                                                                            StructuredOutput or None
    Tool --Tool.definition()--> the definition of a function, for the chat template

Authority: https://platform.openai.com/docs/guides/function-calling (custom tools, namespaces, tool_choice,
strict tools) and https://platform.openai.com/docs/guides/structured-outputs (formats of the text).

Rules of this file:
1. Chat keeps the members of a tool, a reference or a format below a key named like its type, where Responses
   has them beside the type. flat() moves them there first, so there is one reader for both APIs.
2. Models know functions with JSON arguments, and nothing else: a custom tool is defined to the model as a
   function of one string, `input`, and a tool in a namespace by a qualified name, `namespace__name`.
3. Hosted tools, which a server would run itself, are accepted, and the model is not told of them: Codex sends
   some unasked. Request.not_run names them.
4. tool_choice limits the calls, never the prompt: other tools in it would change its beginning, and so lose
   the prefix cache.
5. What is demanded is enforced by constrained decoding, never left to the prompt. It holds for what follows
   the reasoning, which is always free.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from request.refusals import BadInput, shown, unsupported, wrong_value
from request.validation import (
    Object,
    Place,
    boolean,
    list_of,
    mapping,
    members,
    one_of,
    place,
    refused,
    string,
    text,
)

Schema = Object  # a JSON schema

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_QUALIFIED_NAME = 64 + len("__") + 64  # characters of Tool.qualified_name
MAX_TOOLS = 128
MAX_GRAMMAR = 2**16  # characters

CLIENT_TOOLS: tuple[str, ...] = ("function", "custom")
HOSTED = (  # openai.types.responses.ToolParam
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
TOOL_TYPES: tuple[str, ...] = (*CLIENT_TOOLS, "namespace", *HOSTED)
NESTED_IN_CHAT = (*CLIENT_TOOLS, "grammar", "json_schema")  # types whose members have a key of that name


def flat(given: Place, is_chat: bool = False) -> Place:
    """Return an object in Responses' form. Chat's form is taken in Responses too; chat takes no other."""
    type_ = str(given.members.get("type"))
    if given.members.get(type_) is None and not (is_chat and type_ in NESTED_IN_CHAT):
        return given
    return Place(given.need(type_, mapping) | {"type": type_}, f"{given.path}.{type_}")


# --- a tool -------------------------------------------------------------------------------------------------


def identifier(value: Any, path: str) -> Any:
    if not NAME.fullmatch(text(value, path)):
        raise wrong_value(path, "1 to 64 letters, digits, '_' or '-'", value)
    return value


def qualified_name(namespace: str, name: str) -> str:
    """Return the name by which the model knows a tool."""
    if not namespace:
        return name
    return f"{namespace}__{name}"


class Grammar(NamedTuple):
    """What the input of a custom tool must match."""

    syntax: str  # lark, regex
    definition: str
    path: str = ""  # where it stands in the request


class Tool(NamedTuple):
    """A function or a custom tool, which the client runs."""

    name: str
    namespace: str = ""
    description: str | None = None
    parameters: Schema | None = None  # the schema of a function's arguments; None: any
    strict: bool = False  # a function's arguments are held to `parameters`
    custom: bool = False
    grammar: Grammar | None = None  # a custom tool's; None: it takes any text
    is_deferred: bool = False  # the model shall know of it when a search has found it, and not before

    @property
    def qualified_name(self) -> str:
        return qualified_name(self.namespace, self.name)

    def schema(self) -> Schema | None:
        """Return the schema of the arguments as the model writes them, None if they may be anything."""
        if not self.custom:
            return self.parameters
        input_schema = {"type": "string"}
        if self.grammar:
            accepted = f"A text that this {self.grammar.syntax} grammar accepts:\n"
            input_schema["description"] = accepted + self.grammar.definition
        return {
            "type": "object",
            "properties": {"input": input_schema},
            "required": ["input"],
            "additionalProperties": False,
        }

    def definition(self) -> Object:
        """Return the tool as chat templates take it: always a function."""
        told = {"name": self.qualified_name, "description": self.description, "parameters": self.schema()}
        function = {name: value for name, value in told.items() if value is not None}
        return {"type": "function", "function": function}


def as_arguments(input: str) -> str:
    """Return the input of a custom tool as the arguments in which the model wrote it, or would have."""
    return as_json({"input": input})


def as_json(value: Any) -> str:
    """Return the JSON that a model reads: as text, without escapes."""
    return json.dumps(value, ensure_ascii=False)


# --- tools of a request -------------------------------------------------------------------------------------


class DeclaredTool(NamedTuple):
    """One entry of `tools`, read."""

    echo: Object  # the entry as the response object repeats it
    tools: list[Tool]  # what it lets the model call: a namespace several tools, a hosted tool none


NOT_ASYNC = "This server waits for the result of every call."

check_tool = members(
    description=text,
    parameters=mapping,
    strict=boolean,
    format=mapping,
    defer_loading=boolean,
    **{"async": refused(NOT_ASYNC, False)},
)


def read_tool(value: Any, path: str, is_chat: bool = False, namespace: str = "") -> DeclaredTool:
    """Read an entry of `tools`; raises BadInput.

    The echo has all keys, null for what the client leaves out, as the zod schema of
    https://github.com/openresponses/openresponses wants it.
    """
    tool = flat(place(value, path), is_chat)
    types = CLIENT_TOOLS if is_chat or namespace else TOOL_TYPES
    type_ = tool.need("type", one_of(*types))
    if type_ in HOSTED:
        return DeclaredTool(tool.members, [])
    name = tool.need("name", identifier)
    echo = {"type": type_, "name": name}
    if type_ == "namespace":
        echo["description"] = tool.get("description", text, "")
        inner = tool.need("tools", list_of(partial(read_tool, namespace=name), MAX_TOOLS))
        echo["tools"] = [entry.echo for entry in inner]
        return DeclaredTool(echo, [tool for entry in inner for tool in entry.tools])
    fields = check_tool(*tool)
    description = echo["description"] = fields.get("description")
    made = Tool(name, namespace, description, is_deferred=fields.get("defer_loading", False))
    if type_ == "function":
        given = {"parameters": fields.get("parameters"), "strict": fields.get("strict", False)}
        return DeclaredTool(echo | given, [made._replace(**given)])
    input_format = flat(Place(fields.get("format", {"type": "text"}), f"{tool.path}.format"), is_chat)
    grammar = None
    if input_format.need("type", one_of("text", "grammar")) == "grammar":
        syntax = input_format.need("syntax", one_of("lark", "regex"))
        definition = input_format.need("definition", string(MAX_GRAMMAR, min_length=1))
        grammar = Grammar(syntax, definition, f"{input_format.path}.definition")
    return DeclaredTool(
        echo | {"format": input_format.members}, [made._replace(custom=True, grammar=grammar)]
    )


# --- tool_choice --------------------------------------------------------------------------------------------

Calls = Literal["none", "auto", "required"]  # whether the answer may, or must, call tools
CALLS: tuple[str, ...] = get_args(Calls)


class ToolChoice(NamedTuple):
    calls: Calls
    allowed: list[Tool]  # those that may be called
    named: bool  # it names one tool, which must be called once
    echo: Any  # as the response object repeats it, in Responses' form


def tool_choice(tools: list[Tool], value: Any) -> ToolChoice:
    """Return whether tools may or must be called, and which; raises BadInput."""
    by_name = {tool.qualified_name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise wrong_value("tools", "every name once", [tool.qualified_name for tool in tools])
    choice = _choice(by_name, value)
    if choice.allowed:
        return choice
    if choice.calls == "required":
        raise wrong_value("tool_choice", "functions or custom tools to choose from", value)
    return choice._replace(calls="none")


def _choice(by_name: Mapping[str, Tool], value: Any) -> ToolChoice:
    if isinstance(value, str):
        return ToolChoice(one_of(*CALLS)(value, "tool_choice"), [*by_name.values()], False, value)
    given = flat(place(value, "tool_choice"))
    type_ = given.need("type", text)
    if type_ in CLIENT_TOOLS:
        echo, allowed = _referred(by_name, value, "tool_choice")
        return ToolChoice("required", allowed, True, echo)
    if type_ == "allowed_tools":
        referred = given.need("tools", list_of(partial(_referred, by_name), MAX_TOOLS, min_items=1))
        mode = given.need("mode", one_of("auto", "required"))
        echo = {"type": type_, "mode": mode, "tools": [echo for echo, _ in referred]}
        return ToolChoice(mode, [tool for _, found in referred for tool in found], False, echo)
    if type_ in CALLS:
        raise wrong_value("tool_choice", f"the string '{type_}'", value)
    why = f"This server runs no tools, so none can be forced: {shown(type_)}"
    raise unsupported("tool_choice.type", why)


def _referred(by_name: Mapping[str, Tool], value: Any, path: str) -> tuple[Object, list[Tool]]:
    """Return a reference as it is repeated, and the tool that it names: for a hosted one there is none."""
    given = place(value, path)
    type_ = given.get("type", one_of(*CLIENT_TOOLS, *HOSTED), "function")
    if type_ in HOSTED:
        return {"type": type_}, []
    fields = flat(Place(given.members | {"type": type_}, path))
    name = fields.need("name", text)
    echo = {"type": type_, "name": name}
    if namespace := fields.get("namespace", text, ""):
        echo["namespace"] = namespace
    known_as = qualified_name(namespace, name)
    tool = by_name.get(known_as)
    if tool is None or tool.custom != (type_ == "custom"):
        raise wrong_value("tool_choice", "the type and name of one of 'tools'", known_as)
    return echo, [tool]


# --- what the answer must be --------------------------------------------------------------------------------


class StructuredOutput(NamedTuple):
    """What the answer must be, after the reasoning."""

    calls: Calls
    functions: tuple[tuple[str, Schema], ...] = ()  # that may be called: name, schema of the arguments
    one_call: bool = False  # at most one
    inputs: tuple[tuple[str, Grammar], ...] = ()  # the custom tools of `functions` that have a grammar
    schema: Schema | None = None  # what the text must fit; None: any text
    schema_path: str = ""  # where `schema` stands in the request


check_format = members(
    type=one_of("text", "json_schema", "json_object"),
    name=text,
    description=text,
    schema=mapping,
    strict=boolean,
)


def text_format(value: Any, path: str) -> Object:
    """Check the format of a text, and return it in Responses' form."""
    given = Place(check_format(value, path), path)
    if given.need("type", text) == "json_schema":
        given.need("name", identifier)
        given.need("schema", mapping)
    return given.members


def response_format(value: Any, path: str) -> Object:
    """Check chat's text_format()."""
    return text_format(*flat(place(value, path), is_chat=True))


def structured_output(
    tools: list[Tool], choice: ToolChoice, format_: Object, path: str, parallel: bool
) -> StructuredOutput | None:
    """Return what to enforce, None if the model may say anything. Raises BadInput.

    `format_` is what text_format() has returned for the text, {} for none; its schema stands at `path`.
    """
    schemas = {"json_schema": format_.get("schema"), "json_object": {"type": "object"}}
    schema = schemas.get(str(format_.get("type")))
    # The calls that may come are all that a model could write.
    is_any = len(choice.allowed) == len(tools) and not any(tool.strict or tool.grammar for tool in tools)
    is_free = choice.calls == "none" or (choice.calls == "auto" and is_any)
    if schema is None and is_free:
        return None
    functions = []
    for tool in choice.allowed:
        name = tool.qualified_name
        arguments = {"type": "object"} | (tool.schema() or {})
        if arguments["type"] != "object":
            message = f"Invalid schema for '{name}': arguments are an object."
            raise BadInput(message, "tools", "invalid_json_schema")
        functions.append((name, arguments))
    inputs = [(tool.qualified_name, tool.grammar) for tool in choice.allowed if tool.grammar]
    schema_path = "" if schema is None else path
    one_call = choice.named or not parallel
    return StructuredOutput(choice.calls, tuple(functions), one_call, tuple(inputs), schema, schema_path)
