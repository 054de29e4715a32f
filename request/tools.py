"""The tools of a request: what a client may offer, how a model is told of them, and which it may call.

    tools, tool_choice --responses_tool(), chat_tool(), tool_choice()--> [Tool, ...], ToolChoice
    Tool --offer()--> a function, for the chat template

Authority: https://platform.openai.com/docs/guides/function-calling (custom tools, namespaces).

Rules of this file:
1. Models know functions with JSON arguments, and nothing else: a custom tool is offered as a function of one
   string, `input`, and a tool of a namespace under both names, joined.
2. Tools that a server would run itself are accepted, and the model is not told of them.

Not here: what the model calls (tool_calls.py), what it must call (structured_output.py).
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from request.refusals import missing, shown, unsupported, wrong_value
from request.validation import (
    boolean,
    list_of,
    mapping,
    members,
    needed,
    one_of,
    string,
    text,
)


class Grammar(NamedTuple):
    """Of the input of a custom tool."""

    syntax: str  # lark, regex
    definition: str
    path: str = ""  # where it stands in the request


class Tool(NamedTuple):
    """What can be called."""

    name: str
    namespace: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    custom: bool = False
    grammar: Grammar | None = None  # of a custom tool; None: any text

    @property
    def known_as(self) -> str:
        """The name by which the model knows it."""
        return joined(self.namespace, self.name)

    def schema(self) -> dict[str, Any] | None:
        """Of the arguments; None: there is none."""
        if not self.custom:
            return self.parameters
        text = {"type": "string"}
        if self.grammar:
            accepted = f"A text that this {self.grammar.syntax} grammar accepts:\n"
            text["description"] = accepted + self.grammar.definition
        return {
            "type": "object",
            "properties": {"input": text},
            "required": ["input"],
            "additionalProperties": False,
        }

    def offer(self) -> dict[str, Any]:
        """As chat templates take it."""
        told = {"name": self.known_as, "description": self.description, "parameters": self.schema()}
        return {"type": "function", "function": {k: v for k, v in told.items() if v is not None}}


def joined(namespace: str, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def as_arguments(input: str) -> str:
    """The call of a custom tool as the model wrote it, or would have."""
    return json.dumps({"input": input}, ensure_ascii=False)


NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_KNOWN_AS = 64 + len("__") + 64  # characters of Tool.known_as: a namespace and a name, each a NAME
MAX_GRAMMAR = 2**16  # characters

Calls = Literal["none", "auto", "required"]  # may the answer, or must it, call functions


class ToolChoice(NamedTuple):
    calls: Calls
    allowed: list[Tool]  # those that may be called
    named: bool  # one, by its name


def identifier(value: Any, path: str) -> str:
    if not NAME.fullmatch(text(value, path)):
        raise wrong_value(path, "1 to 64 letters, digits, '_' or '-'", value)
    return str(value)


# --- tools --------------------------------------------------------------------------------------------------

Told = tuple[dict[str, Any], list[Tool]]  # a tool as the response object repeats it, and what it offers


def responses_tool(tool: dict[str, Any], path: str) -> Told:
    """Hosted tools are accepted, and never offered to the model: Codex sends some unasked."""
    kind = needed(tool, "type", one_of(*TOOL_TYPES, *HOSTED), path)
    return (tool, []) if kind in HOSTED else TOOL_TYPES[kind](tool, path)


def chat_tool(tool: dict[str, Any], path: str) -> Tool:
    """Its fields stand below a key of its type, those of a grammar below one more."""
    kind = needed(tool, "type", one_of("function", "custom"), path)
    fields, place = needed(tool, kind, mapping, path), f"{path}.{kind}"
    if kind == "function":
        return function_tool(fields, place)[1][0]
    wanted, inside = fields.get("format"), "format"
    if isinstance(wanted, dict) and wanted.get("type") == "grammar":
        inside = "format.grammar"
        wanted = {"type": "grammar", **needed(wanted, "grammar", mapping, f"{place}.format")}
    return custom_tool(fields | {"format": wanted}, place, inside=inside)[1][0]


function_fields = members(description=text, parameters=mapping, strict=boolean)
custom_fields = members(description=text)
grammar_fields = members(
    type=one_of("text", "grammar"),
    syntax=one_of("lark", "regex"),
    definition=string(MAX_GRAMMAR, min_length=1),
)


def function_tool(tool: Mapping[str, Any], path: str, namespace: str = "") -> Told:
    """All keys present, null where nothing was said: https://github.com/openresponses/openresponses (zod
    schema)
    """
    name, given = needed(tool, "name", identifier, path), function_fields(tool, path)
    echoed = {"name": name} | {k: given.get(k) for k in ("description", "parameters")}
    offered = Tool(**echoed, namespace=namespace, strict=bool(given.get("strict")))
    return {"type": "function", **echoed, "strict": offered.strict}, [offered]


def custom_tool(tool: Mapping[str, Any], path: str, namespace: str = "", inside: str = "format") -> Told:
    """A tool that takes any text, or what a grammar accepts, whose fields are `inside`."""
    name, given = needed(tool, "name", identifier, path), custom_fields(tool, path)
    place, grammar = f"{path}.{inside}", None
    wanted = grammar_fields(given.get("format", {"type": "text"}), place)
    for field in ("type", "syntax", "definition") if wanted.get("type") != "text" else ():
        if field not in wanted:
            raise missing(f"{place}.{field}")
    if wanted["type"] == "grammar":
        grammar = Grammar(wanted["syntax"], wanted["definition"], f"{place}.definition")
    about = {"name": name, "description": given.get("description")}
    offered = Tool(**about, namespace=namespace, custom=True, grammar=grammar)
    return {"type": "custom", **about, "format": wanted}, [offered]


def namespace_tool(tool: Mapping[str, Any], path: str) -> Told:
    """Functions and custom tools under one name more."""
    name = needed(tool, "name", identifier, path)
    description = text(tool.get("description") or "", f"{path}.description")
    told: list[Told] = []
    for i, inner in enumerate(needed(tool, "tools", list_of(mapping, 128), path)):
        place = f"{path}.tools[{i}]"
        kind = needed(inner, "type", one_of("function", "custom"), place)
        told.append((function_tool if kind == "function" else custom_tool)(inner, place, name))
    echoed = {"type": "namespace", "name": name, "description": description}
    return echoed | {"tools": [one for one, _ in told]}, [tool for _, tools in told for tool in tools]


TOOL_TYPES: dict[str, Callable[[dict[str, Any], str], Told]] = {
    "function": function_tool,
    "custom": custom_tool,
    "namespace": namespace_tool,
}


# Those that a server runs itself: openai.types.responses.ToolParam.
HOSTED = (
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


# --- what the answer must be --------------------------------------------------------------------------------


def tool_choice(tools: list[Tool], choice: Any) -> ToolChoice:
    """Whether tools may or must be called, and which.

    allowed_tools limits the calls, never the prompt: that would spoil its cached beginning (Open Responses).
    """
    known = {(tool.custom, tool.known_as): tool for tool in tools}
    names = [tool.known_as for tool in tools]
    if len(set(names)) < len(tools):
        raise wrong_value("tools", "every name once", names)
    if isinstance(choice, str):
        calls = one_of("none", "auto", "required")(choice, "tool_choice")
        picked, named = list(known), False
    else:
        calls, picked, named = picked_tools(mapping(choice, "tool_choice"))
    for custom, name in picked:
        if (custom, name) not in known:
            raise wrong_value("tool_choice", "the type and name of one of 'tools'", name)
    if calls == "required" and not picked:
        raise wrong_value("tool_choice", "functions or custom tools to choose from", choice)
    return ToolChoice(calls if picked else "none", [known[key] for key in picked], named)


def picked_tools(choice: dict[str, Any]) -> tuple[Calls, list[tuple[bool, str]], bool]:
    """Of a tool_choice that is an object: (is it a custom one, its name) of each tool that it lists."""
    kind = needed(choice, "type", text, "tool_choice")
    if kind in ("function", "custom"):
        return "required", named_tool(choice, "tool_choice"), True
    if kind in ("auto", "none", "required"):
        raise wrong_value("tool_choice", f"the string '{kind}'", choice)
    if kind != "allowed_tools":
        why = f"This server runs no tools, so none can be forced: {shown(kind)}"
        raise unsupported("tool_choice.type", why)
    fields, path = beside_or_below(choice, kind, "tool_choice")
    listed = needed(fields, "tools", list_of(named_tool, 128, min_items=1), path)
    calls = needed(fields, "mode", one_of("auto", "required"), path)
    return "required" if calls == "required" else "auto", [one for tools in listed for one in tools], False


def named_tool(value: Any, path: str) -> list[tuple[bool, str]]:
    """Nothing for a hosted tool: the model is not told of it."""
    kind = one_of("function", "custom", *HOSTED)(mapping(value, path).get("type", "function"), f"{path}.type")
    if kind in HOSTED:
        return []
    fields, path = beside_or_below(value, kind, path)
    namespace = text(fields.get("namespace") or "", f"{path}.namespace")
    return [(kind == "custom", joined(namespace, needed(fields, "name", text, path)))]


def beside_or_below(value: dict[str, Any], kind: str, path: str) -> tuple[dict[str, Any], str]:
    """The fields that belong to a type, and where: beside `type` in Responses, below its name in chat."""
    return (needed(value, kind, mapping, path), f"{path}.{kind}") if kind in value else (value, path)
