"""Tools: the client's tools, their definitions for the model, the allowed calls, the form of the answer.

    tools                           --read_tool()---> echo, [Tool, ...]
    tool_choice                     --tool_choice()-> StructuredOutput      all three --demands()-->
    text.format or response_format  --text_format()-> schema                fields of Request
    Tool --Tool.definition()--> the definition of a function, for the chat template

Authority: https://platform.openai.com/docs/guides/function-calling (custom tools, namespaces, tool_choice,
strict tools) and https://platform.openai.com/docs/guides/structured-outputs (formats of the text).

Rules of this file:
1. Chat keeps the members of a tool, a reference or a format below a key named like its type; Responses
   has them beside the type. flat() moves them there first, so there is one reader, and both APIs take both.
2. Models know functions with JSON arguments, and nothing else: a custom tool is defined to the model as a
   function of one string, `input`, and a tool in a namespace by a qualified name, `namespace__name`.
3. Any other type of tool is one that a server would run itself. We accept it, but do not show it to the
   model: Codex sends some unasked, and new types come each month. Request.not_run names them.
4. tool_choice limits the calls, never the prompt: other tools in it would change its beginning, and so lose
   the prefix cache.
5. Constrained decoding enforces each demand; we never leave it to the prompt. The demand holds for the output
   after the reasoning, which is always free.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from request.refusals import BadInput, shown, unsupported, wrong_value
from request.validation import Place, boolean, list_of, mapping, members, one_of, place, refused, string, text
from sse import Object

Schema = Object  # a JSON schema
ByName = Mapping[str, "Tool"]  # tools by Tool.qualified_name
MAX_TOOLS = 128
CLIENT_TOOLS = ("function", "custom")
NO_PARAMETERS: Schema = {"type": "object", "properties": {}}  # if the client has left them out
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_QUALIFIED_NAME = 130  # characters of Tool.qualified_name: two names, and "__" between them
MAX_GRAMMAR = 2**16  # characters


# --- a tool -------------------------------------------------------------------------------------------------


def flat(value: Any, path: str) -> Place:
    """Return an object with its members beside its type: rule 1."""
    given = place(value, path)
    type_ = str(given.members.get("type"))
    if given.members.get(type_) is None:
        return given
    return Place(given.need(type_, mapping) | {"type": type_}, f"{path}.{type_}")


class Grammar(NamedTuple):
    """What the input of a custom tool must match."""

    syntax: str  # lark, regex
    definition: str
    path: str = ""  # its place in the request


class Tool(NamedTuple):
    """A function or a custom tool, which the client runs."""

    name: str
    namespace: str = ""
    description: str | None = None
    parameters: Schema | None = None  # the schema of a function's arguments; None: any
    strict: bool = False  # held to `parameters`; else what of them cannot be enforced is passed over
    custom: bool = False
    grammar: Grammar | None = None  # a custom tool's; None: it takes any text

    @property
    def qualified_name(self) -> str:
        """The name by which the model knows the tool."""
        return f"{self.namespace}__{self.name}" if self.namespace else self.name

    def schema(self) -> Schema:
        """Return the schema of the arguments as the model writes them, {} if they may be anything."""
        if not self.custom:
            return self.parameters or {}
        input_schema = {"type": "string"}
        if self.grammar:
            input_schema["description"] = (
                f"A text that this {self.grammar.syntax} grammar accepts:\n{self.grammar.definition}"
            )
        return {
            "type": "object",
            "properties": {"input": input_schema},
            "required": ["input"],
            "additionalProperties": False,
        }

    def definition(self) -> Object:
        """Return the tool as chat templates take it: always a function, and one that has a description."""
        function = {
            "name": self.qualified_name,
            "description": self.description or "",
            "parameters": self.schema() or NO_PARAMETERS,  # templates iterate over the properties
        }
        return {"type": "function", "function": function}


def identifier(value: Any, path: str) -> Any:
    if not NAME.fullmatch(text(value, path)):
        raise wrong_value(path, "1 to 64 letters, digits, '_' or '-'", value)
    return value


def called_name(call: Place) -> str:
    """Return the qualified name in a call, or in a reference to a tool; raises BadInput."""
    return Tool(call.need("name", text), call.get("namespace", text, "")).qualified_name


def tool_called(by_name: ByName, name: str) -> Tool:
    """Return the tool that a model means: by its qualified name, else the only one of this name.

    Models trained on dotted names call so: https://github.com/openai/codex/issues/20652
    """
    fitting = [tool for tool in by_name.values() if name in (tool.name, f"{tool.namespace}.{tool.name}")]
    return by_name.get(name) or (fitting[0] if len(fitting) == 1 else Tool(name))


as_json = partial(json.dumps, ensure_ascii=False)  # as a model reads it: text without escapes


# --- tools of a request -------------------------------------------------------------------------------------


class DeclaredTool(NamedTuple):
    """One entry of `tools`, read."""

    echo: Object  # the entry as the response object repeats it
    tools: list[Tool]  # the tools that the model may call: a namespace has several, any other type none


# A function has all of these in the response object: zod schema of github.com/openresponses/openresponses.
NOT_GIVEN = {"description": None, "parameters": None, "strict": False}

# The members of a tool, or of a text format, that are read.
check_members = members(
    type=text,
    name=identifier,
    description=text,
    parameters=mapping,
    schema=mapping,
    strict=boolean,
    format=mapping,
    defer_loading=boolean,  # a hint: to load a tool later saves tokens, and changes no answer
    **{"async": refused("This server waits for the result of every call.", False)},
)


def read_tool(value: Any, path: str, namespace: str = "") -> DeclaredTool:
    """Read an entry of `tools`; raises BadInput."""
    tool = flat(value, path)
    type_ = tool.need("type", text)
    if type_ not in (*CLIENT_TOOLS, "namespace"):
        return DeclaredTool(tool.members, [])  # rule 3
    name = tool.need("name", identifier)
    echo = check_members(*tool)
    if type_ == "namespace":
        inner = tool.get("tools", list_of(partial(read_tool, namespace=name), MAX_TOOLS), [])
        echo["tools"] = [entry.echo for entry in inner]
        return DeclaredTool(echo, [tool for entry in inner for tool in entry.tools])
    made = Tool(name, namespace, echo.get("description"), custom=type_ == "custom")
    if type_ == "function":
        echo = NOT_GIVEN | echo
        made = made._replace(parameters=echo["parameters"], strict=echo["strict"])
    elif "format" in echo:
        input_format = flat(echo["format"], f"{tool.path}.format")
        if input_format.need("type", one_of("text", "grammar")) == "grammar":
            syntax = input_format.need("syntax", one_of("lark", "regex"))
            definition = input_format.need("definition", string(1, MAX_GRAMMAR))
            made = made._replace(grammar=Grammar(syntax, definition, f"{input_format.path}.definition"))
    return DeclaredTool(echo, [made])


def read_client_tool(value: Any, path: str) -> DeclaredTool:
    """Read an entry of `tools` in the Messages API; there `custom`, or no type, is a function."""
    tool = place(value, path)
    if tool.get("type", text, "custom") != "custom":
        return DeclaredTool(tool.members, [])  # rule 3
    function = {"type": "function", "parameters": tool.need("input_schema", mapping)}
    return read_tool(tool.members | function, path)


# --- tool_choice --------------------------------------------------------------------------------------------


class StructuredOutput(NamedTuple):
    """What the answer must be, after the reasoning; tool_choice() leaves the text free."""

    calls: Literal["none", "auto", "required"]  # whether it may, or must, call tools
    tools: tuple[Tool, ...] = ()  # that may be called
    one_call: bool = False  # at most one; tool_choice names it
    schema: Schema | None = None  # the schema of the text; None: any text
    strict: bool = False  # the text is held to it; else what of it cannot be enforced is passed over
    schema_path: str = ""  # the place of `schema` in the request, if it has one


def tool_choice(by_name: ByName, value: Any) -> StructuredOutput:
    """Return whether tools may or must be called, and which; raises BadInput."""
    if isinstance(value, str):
        calls = one_of("none", "auto", "required")(value, "tool_choice")
        choice = StructuredOutput(calls, tuple(by_name.values()))
    else:
        given = flat(value, "tool_choice")
        type_ = given.need("type", text)
        if type_ in CLIENT_TOOLS:
            choice = StructuredOutput("required", _referred(by_name, value, "tool_choice"), one_call=True)
        elif type_ == "allowed_tools":
            lists = given.need("tools", list_of(partial(_referred, by_name), MAX_TOOLS))
            mode = given.need("mode", one_of("auto", "required"))
            choice = StructuredOutput(mode, sum(lists, ()))
        else:
            why = f"This server runs no tools, so none can be forced: {shown(type_)}"
            raise unsupported("tool_choice.type", why)
    if choice.tools:
        return choice
    if choice.calls == "required":
        raise wrong_value("tool_choice", "functions or custom tools to choose from", value)
    return StructuredOutput("none")


def _referred(by_name: ByName, value: Any, path: str) -> tuple[Tool, ...]:
    """Return the tool that a reference names; raises BadInput for a tool that a server would run itself."""
    given = flat(value, path)
    type_ = given.need("type", text)
    if type_ not in CLIENT_TOOLS:
        return ()
    name = called_name(given)
    tool = by_name.get(name)
    if tool is None or tool.custom != (type_ == "custom"):
        raise wrong_value("tool_choice", "the type and name of one of 'tools'", name)
    return (tool,)


# --- what the answer must be --------------------------------------------------------------------------------


def text_format(value: Any, path: str) -> Object:
    """Check the format of a text, and return it in Responses' form."""
    given = flat(value, path)
    if given.need("type", one_of("text", "json_schema", "json_object")) == "json_schema":
        given.need("name", identifier)
        given.need("schema", mapping)
    return dict(check_members(*given))


def structured_output(
    tools: ByName, choice: StructuredOutput, values: Object, schema_path: str
) -> StructuredOutput | None:
    """Return what to enforce, None if the model may say anything. Raises BadInput."""
    form = values["response_format"]
    schema = form.get("schema")
    if form["type"] == "json_object":
        schema = schema or {"type": "object"}
    # Without a grammar if the model may answer freely: all calls that it could write may come.
    held = [tool for tool in tools.values() if tool.strict or tool.grammar or tool not in choice.tools]
    if schema is None and (choice.calls == "none" or (choice.calls == "auto" and not held)):
        return None
    for tool in choice.tools:
        if tool.schema().get("type", "object") != "object":
            why = f"Invalid schema for '{tool.qualified_name}': expected a schema of type object."
            raise BadInput(why, param="tools", code="invalid_json_schema")
    one_call = choice.one_call or not values["parallel_tool_calls"]
    strict = form.get("strict", False)
    return choice._replace(one_call=one_call, schema=schema, strict=strict, schema_path=schema_path)


# --- all three ----------------------------------------------------------------------------------------------


def demands(values: Object, brought: list[DeclaredTool], schema_path: str) -> Object:
    """Return the fields of a Request that tools, tool_choice and the format of the text decide.

    `values` are parameters by chat's names; `brought`: tools of items; `schema_path`: the place of the text's
    schema in the body. Raises BadInput.
    """
    names = [tool.qualified_name for entry in values["tools"] for tool in entry.tools]
    if len({*names}) < len(names):
        raise wrong_value("tools", "every name once", names)
    # The request's own come first; of one name we take its own, else the newest.
    entries = [*values["tools"], *brought, *values["tools"]]
    tools = {tool.qualified_name: tool for entry in entries for tool in entry.tools}
    choice = tool_choice(tools, values["tool_choice"])
    not_offered = [entry.echo["type"] for entry in entries if not entry.tools]
    return {
        "tools": [tool.definition() for tool in tools.values()],
        "called": {} if choice.calls == "none" else tools,
        "structured_output": structured_output(tools, choice, values, schema_path),
        "named_call": choice.one_call,
        "not_run": (*values["not_run"], *not_offered),
    }
