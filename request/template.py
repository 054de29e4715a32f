"""The chat template: messages and tools to the prompt that the model was trained on.

    messages, tools --ChatTemplate.render()--> prompt

Authority: the model's chat template, and what it is given:
https://huggingface.co/docs/transformers/chat_templating

Rules of this file:
1. A template that ignores tools or system messages gets them as text, one that cannot show a turn of text and
   several calls gets a message for each; what it takes is found out by trying.
2. A template is somebody else's program: it runs in Jinja's sandbox.

Not here: how a request becomes messages (messages.py), what the model says in answer (channels.py).
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from request.messages import Conversation, Message, Tools, paragraphs
from request.refusals import BadInput

# --- templates that take less -------------------------------------------------------------------------------

_dumps = partial(json.dumps, ensure_ascii=False)

# The format of https://github.com/NousResearch/Hermes-Function-Calling, which Qwen's templates have too.
TOOLS = """# Tools

You may call functions to help the user. These are their signatures, as JSON within <tools></tools> tags:
<tools>
{}
</tools>

To call a function, write its name and arguments as one JSON object within <tool_call></tool_call> tags:
<tool_call>
{{"name": <name of the function>, "arguments": <object of its arguments>}}
</tool_call>"""


def tools_as_text(messages: list[Message], tools: Tools) -> list[Message]:
    """The tools in the system message, calls in the assistant's text, their results in the user's."""
    n_system = int(messages[0]["role"] == "system")
    offer = [{"role": "system", "content": TOOLS.format("\n".join(map(_dumps, tools)))}] if tools else []
    talk = Conversation()
    for message in [*messages[:n_system], *offer, *messages[n_system:]]:
        role, lines = message["role"], [message["content"]] if message["content"] else []
        if role == "tool":
            role, lines = "user", ["<tool_response>", *lines, "</tool_response>"]
            if talk.messages[-1]["role"] == "user":  # the results of parallel calls are one message
                lines.insert(0, talk.messages.pop()["content"])
        for call in message.get("tool_calls", []):
            lines += ["<tool_call>", _dumps(call["function"]), "</tool_call>"]
        talk.say(role, "\n".join(lines))
        if "reasoning_content" in message:
            talk.think(message["reasoning_content"])
    return talk.messages


def system_as_text(messages: list[Message]) -> list[Message]:
    """Each system message at the head of the next user message."""
    told, system = Conversation(), ""
    for message in messages:
        if message["role"] == "system":
            system = paragraphs(system, message["content"])
        elif message["role"] == "user":
            told.say("user", paragraphs(system, message["content"]))
            system = ""
        else:
            told.messages.append(message)
    if system:
        told.say("user", system)
    return told.messages


def calls_apart(messages: list[Message]) -> list[Message]:
    """The text of a turn, then each of its calls with its result, as messages of their own."""
    results = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    apart: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls", [])
        if not calls and message["role"] != "tool":
            apart.append(message)
        elif calls and message["content"]:
            apart.append({"role": "assistant", "content": message["content"]})
        thought = {k: v for k, v in message.items() if k == "reasoning_content"}
        for call in calls:
            apart.append({"role": "assistant", "content": "", "tool_calls": [call]} | thought)
            apart += [results[call["id"]]] if call["id"] in results else []
            thought = {}
    return apart


def for_all(messages: list[Message]) -> list[Message]:
    """As every template takes them: gpt-oss's has another name for reasoning, Mistral's want call ids of nine
    letters and digits.
    """
    calls = [call["id"] for message in messages for call in message.get("tool_calls", [])]
    ids = {call_id: f"call{n:05}" for n, call_id in enumerate(dict.fromkeys(calls))}
    given = []
    for message in messages:
        given.append({**message})
        if "reasoning_content" in message:
            given[-1]["thinking"] = message["reasoning_content"]
        if "tool_calls" in message:
            given[-1]["tool_calls"] = [call | {"id": ids[call["id"]]} for call in message["tool_calls"]]
        if "tool_call_id" in message:
            given[-1]["tool_call_id"] = ids[message["tool_call_id"]]
    return given


def described(tools: Tools) -> Tools:
    """Some templates take it for granted that a function has a description. None for no tools."""
    return [
        tool | {"function": tool["function"] | {"description": tool["function"].get("description", "")}}
        for tool in tools or []
    ] or None


# --- the template -------------------------------------------------------------------------------------------


class BadTemplate(ValueError):
    """The model has no chat template, or one that is no Jinja template."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks for training what the assistant wrote; in a prompt it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# As in https://github.com/huggingface/transformers/blob/main/src/transformers/utils/chat_template_utils.py
ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
ENVIRONMENT.filters["tojson"] = _dumps  # Jinja's own escapes < and > for HTML
ENVIRONMENT.globals["raise_exception"] = _raise_exception

# fmt: off
PROBE, SECOND = "probe_4711", "probe_4712"  # in no template
USER = {"role": "user", "content": "Hi"}
PROBE_TOOL = {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}}
PROBE_CALLS = [
    {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}
    for name in ("first", SECOND)
]
PROBE_TURN: list[Message] = [
    USER,
    {"role": "assistant", "content": PROBE, "reasoning_content": "Hm.", "tool_calls": PROBE_CALLS},
    *({"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "1"} for call in PROBE_CALLS),
    {"role": "assistant", "content": "Hello"},
    USER,
]
# fmt: on


def _spelling(token: Any) -> Any:
    """Of a token in tokenizer_config.json: a string, an object with it, null; add_bos_token is a boolean."""
    return token.get("content") if isinstance(token, dict) else token


class ChatTemplate:
    """How one model wants its prompts."""

    def __init__(self, source: str, tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """`tool_source`: the template for requests with tools, if there is one. Raises BadTemplate."""
        self.source = source + (tool_source or "")
        self._tokens = tokens  # bos_token, eos_token, ...: what templates write by name
        try:
            self._template = ENVIRONMENT.from_string(source)
            self._tool_template = ENVIRONMENT.from_string(tool_source or source)
        except jinja2.TemplateError as error:
            raise BadTemplate(f"the chat template is no Jinja template: {error}") from error
        tools = [{"type": "function", "function": PROBE_TOOL}]
        self.takes_tools = self._shows([USER], tools, PROBE)
        self.takes_system = self._shows([{"role": "system", "content": PROBE}, USER], None, PROBE)
        turns = (PROBE_TURN, calls_apart(PROBE_TURN))
        whole, apart = (self._shows(turn, tools, PROBE, SECOND) for turn in turns)
        self.takes_turns = whole or not apart
        late = [USER, {"role": "assistant", "content": "Hello"}, {"role": "system", "content": PROBE}, USER]
        self.takes_late_system = self._shows(late, None, PROBE)

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """The template of the model in the directory; raises BadTemplate."""
        file, config_file = directory / "chat_template.jinja", directory / "tokenizer_config.json"
        try:
            config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
        except ValueError as error:
            raise BadTemplate(f"{config_file} is no JSON: {error}") from error
        if not isinstance(config, dict):
            raise BadTemplate(f"{config_file} holds no object")
        try:
            found: Any = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
        except UnicodeDecodeError as error:
            raise BadTemplate(f"{file} is no text: {error}") from error
        if isinstance(found, str):
            found = [{"name": "default", "template": found}]
        named = {entry["name"]: entry["template"] for entry in found or []}
        if "default" not in named:
            raise BadTemplate(f"no chat template: looked for {file} and for chat_template in {config_file}")
        spelled = {name: _spelling(token) for name, token in config.items() if name.endswith("_token")}
        tokens = {name: token for name, token in spelled.items() if isinstance(token, str)}
        return cls(named["default"], tokens, named.get("tool_use"))

    def render(self, messages: list[Message], tools: Tools, now: datetime, /, **kwargs: Any) -> str:
        """The prompt, up to where the assistant begins; kwargs are the template's own: `enable_thinking`, ...

        Raises BadInput where the template refuses: roles that do not alternate, ...
        """
        if not self.takes_tools:
            messages, tools = tools_as_text(messages, tools), None
        elif not self.takes_turns:
            messages = calls_apart(messages)
        if not self.takes_system:
            messages = system_as_text(messages)
        elif not self.takes_late_system:
            messages = [*messages[:1], *system_as_text(messages[1:])]
        return self._filled(messages, tools, now, kwargs)

    def _filled(self, messages: list[Message], tools: Tools, now: datetime, kwargs: dict[str, Any]) -> str:
        template = self._tool_template if tools else self._template
        given = {"messages": for_all(messages), "tools": described(tools), "add_generation_prompt": True}
        try:
            return template.render({**self._tokens, **kwargs, **given, "strftime_now": now.strftime})
        except Exception as error:  # whatever a template raises, it raises over these messages
            message = f"The model's chat template refuses these messages: {error}"
            raise BadInput(message, None, "invalid_prompt") from error

    def _shows(self, messages: list[Message], tools: Tools, *words: str) -> bool:
        try:
            prompt = self._filled(messages, tools, datetime(2000, 1, 1), {})
        except BadInput:
            return False
        return all(word in prompt for word in words)
