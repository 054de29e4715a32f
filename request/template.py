"""The chat template: messages and tools to the prompt that the model was trained on.

    model directory                 --ChatTemplate.load()----> ChatTemplate, probed for its features
    messages, tools, now, kwargs    --ChatTemplate.render()--> prompt
                                        traced: the same, with the template's own text marked

    render(): messages --one of WAYS, system_as_text()--> messages for this template --Jinja--> prompt

Authority: the model's chat template, and its variables:
https://huggingface.co/docs/transformers/chat_templating

Rules of this file:
1. No part of a request is lost because a template does not show it: a template that ignores system messages
   gets them as the user's, and a template that shows one call a message gets a message for each call. With a
   template that ignores tools, tools and calls are refused: its model was not trained to call any.
2. We find the features of a template by rendering probes, and never guess them from its name or its source.
3. A template is a program of the model's authors: it runs in Jinja's sandbox, and any exception that it
   raises on a request is that request's error.
4. A template ends: it has so many turns for a request of this size, and each turn of a loop, each call and
   each character of a repeated text takes one. We count turns and not seconds, so that a request is not
   refused because a machine is busy.
"""

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from request.messages import Message, Messages, arguments_as_text, paragraphs
from request.refusals import BadInput, unsupported
from request.special_tokens import ALPHABET, Own
from request.tools import Tool, as_json
from sse import Object

Tools = list[Object] | None  # None: none are offered
TURNS = "turns left"  # the variable; a template has no name for it, because of the blank
# gpt-oss's template goes through all messages for each call: 6 million turns for 2,500 calls, in 1 s.
MIN_TURNS, TURNS_A_CHARACTER, MAX_TURNS = 20_000, 10, 10_000_000


# --- Jinja, as Transformers sets it up ----------------------------------------------------------------------


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which a call takes a turn, and repeated text one for each character.

    We refuse powers, because 10 ** (10 ** 10) would not end. str() refuses a factor of more than MAX_DIGITS
    digits (server.py).
    """

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        next(__context.parent[TURNS])
        return super().call(__context, __obj, *args, **kwargs)

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise Endless("it may take no powers")
        for text, n in ((left, right), (right, left)):
            if isinstance(text, Sized):
                _counted(context, range(len(text) * n))
            str(text)
        return left * right


# --- the template -------------------------------------------------------------------------------------------


def _turns(n: int) -> Iterator[int]:
    yield from range(n)
    raise Endless(f"for messages of this size it may take {n} calls and turns of loops")


@jinja2.pass_context
def _counted(context: Any, items: Iterable[Any]) -> list[Any]:
    """Return what a loop goes through, and take a turn for each."""
    return [item for item, _ in zip(items, context.parent[TURNS])]  # noqa: B905


class ChatTemplate:
    """How one model wants its prompts. Its fields, below, are what probes of the template have found."""

    def render(
        self, messages: Messages, tools: Tools, now: datetime, traced: bool = False, /, **kwargs: Any
    ) -> str:
        """Return the prompt, up to where the assistant begins; kwargs are variables of the template, such as
        `enable_thinking`. Raises BadInput if the template refuses, such as roles that do not alternate.

        If `traced`, the template's own text is in its own alphabet (special_tokens.py).
        """
        if tools and self.with_tools is not self:
            return self.with_tools.render(messages, tools, now, traced, **kwargs)
        if not self.shows_all:
            messages = self._adapted(messages, tools)
        template, own = self._forms[traced]
        told = []
        for message in messages:
            if message["role"] == "assistant":
                message = with_reasoning(message)
            told.append(message | {"role": own(message["role"])})
        variables = {
            **kwargs,
            "messages": told,
            "tools": tools or None,
            "add_generation_prompt": True,
            "strftime_now": now.strftime,
            TURNS: _turns(min(MIN_TURNS + TURNS_A_CHARACTER * len(str((messages, tools))), MAX_TURNS)),
        }
        try:
            return template.render(variables)  # type: ignore[no-any-return]
        except MemoryError:  # not the fault of these messages
            raise
        except Exception as error:  # a template may raise anything: these messages are the cause
            raise BadInput(
                f"The model's chat template refuses these messages: {str(error)[:MAX_REASON]}",
                code="invalid_prompt",
            ) from error

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens`: bos_token, eos_token, ..., which templates write by name. Raises BadTemplate."""
        self.source = source
        self.tokens = tokens
        try:
            tree = ENVIRONMENT.parse(GENERATION.sub(r"\1with", source))
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
            tracing = Tracing()
            traced = tracing.visit(copy.deepcopy(tree))  # Jinja folds the constants of what it compiles
            own = {name: Own(token) for name, token in tokens.items()}
            # By `traced`: the template, and what a role is to it.
            self._forms: list[Any] = [
                (ENVIRONMENT.from_string(tree, {**tokens}), str),
                (TRACING_ENVIRONMENT.from_string(traced, own | tracing.texts), Own),
            ]
            for template, _ in self._forms:  # Jinja copies them for each rendering, and a ChainMap slowly
                template.globals = {**template.globals}
        except jinja2.TemplateError as error:
            raise BadTemplate(f"the chat template is not a Jinja template: {error}") from error
        self.with_tools = self  # the template of requests that offer tools, which may be another one
        self.shows_all = True  # the probes are rendered as they are
        self.takes_tools = self._shows([USER], PROBE_TOOLS, PROBE)
        self.takes_system = self._shows([SYSTEM, USER], None, PROBE)
        late_system = [USER, ASSISTANT, SYSTEM, USER]
        self.takes_late_system = self.takes_system and self._shows(late_system, None, PROBE)
        ways = (way for way in WAYS if self._shows(way(PROBE_TURN), PROBE_TOOLS, PROBE, SECOND_PROBE))
        self.way = next(ways, one_call_a_message)
        self.shows_all = self.takes_tools and self.takes_late_system and self.way is list

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """Return the template of the model in the directory; raises BadTemplate."""
        config_file = directory / "tokenizer_config.json"
        template_file = directory / "chat_template.jinja"
        tool_use_file = directory / "additional_chat_templates" / "tool_use.jinja"
        config: Object = {}
        try:
            if config_file.exists():
                config |= json.loads(config_file.read_text(encoding="utf-8"))
            source: Any = config.get("chat_template")
            if isinstance(source, list):
                named = {entry["name"]: entry["template"] for entry in source}
            else:
                named = {"default": source}
            for name, file in (("default", template_file), ("tool_use", tool_use_file)):
                if file.exists():
                    named[name] = file.read_text(encoding="utf-8")
        except (TypeError, ValueError) as error:
            expected = f"a JSON object in {config_file}, and text in {template_file}"
            raise BadTemplate(f"expected {expected}: {error}") from error
        if named.get("default") is None:
            looked = f"looked for {template_file} and for chat_template in {config_file}"
            raise BadTemplate(f"no chat template: {looked}")
        tokens = _special_tokens(config)
        template = cls(named["default"], tokens)
        if "tool_use" in named:  # as in Hermes 3; https://github.com/huggingface/transformers/pull/31429
            template.with_tools = cls(named["tool_use"], tokens)
        return template

    def _adapted(self, messages: Messages, tools: Tools) -> Messages:
        """Return the messages in a form that the template shows; raises BadInput if there is none: rule 1."""
        messages = self.way(messages)
        if not self.takes_tools and (tools or any(message["role"] == "tool" for message in messages)):
            raise unsupported("tools", "The model was not trained to call any: its chat template shows none.")
        if not self.takes_late_system:
            n_taken = int(self.takes_system)
            messages = [*messages[:n_taken], *system_as_text(messages[n_taken:])]
        return messages

    def _shows(self, messages: Messages, tools: Tools, *words: str) -> bool:
        try:
            prompt = self.render(messages, tools, datetime(2000, 1, 1))
        except BadInput as refusal:
            if isinstance(refusal.__cause__, Endless):
                raise BadTemplate(refusal.message) from refusal
            return False
        return all(word in prompt for word in words)


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

MAX_REASON = 300  # characters of what a template raises: it may quote the messages


# --- messages for templates that take less ------------------------------------------------------------------


def with_reasoning(answer: Message) -> Message:
    """Give an answer without reasoning an empty `reasoning_content`; copy any other to `thinking`, gpt-oss's
    name for it.

    Qwen3's template looks in the text: it takes an answer that mentions `</think>` for reasoning up to there.
    """
    if "tool_calls" not in answer:
        answer = {"reasoning_content": ""} | answer
    if reasoning := answer.get("reasoning_content"):
        answer = answer | {"thinking": reasoning}
    return answer


def one_call_a_message(messages: Messages) -> Messages:
    """Split a turn into a message for its text and one for each call, each followed by the call's result."""
    results = {message["tool_call_id"]: [message] for message in messages if message["role"] == "tool"}
    split: Messages = []
    for message in messages:
        calls = message.get("tool_calls", [])
        if calls and message["content"]:
            split.append({"role": "assistant", "content": message["content"]})
        for call in calls:
            split.append(message | {"content": "", "tool_calls": [call]})
            split += results.get(call["id"], [])
            message = {"role": "assistant"}  # the reasoning has led to the first call
        if not calls and message["role"] != "tool":
            split.append(message)
    return split


def system_as_text(messages: Messages) -> Messages:
    """Make each system message a part of the user's message before or after it, or one of the user."""
    told: Messages = []
    was_system = False
    for message in messages:
        is_system = message["role"] == "system"
        if is_system:
            message = message | {"role": "user"}
        if (is_system or was_system) and told and message["role"] == told[-1]["role"] == "user":
            message = message | {"content": paragraphs(told.pop()["content"], message["content"])}
        told.append(message)
        was_system = is_system
    return told


# Ways to show calls; we use the first one that a template supports.
WAYS: tuple[Callable[[Messages], Messages], ...] = (list, arguments_as_text, one_call_a_message)


# --- Jinja, as Transformers sets it up ----------------------------------------------------------------------


# As in https://github.com/huggingface/transformers/blob/main/src/transformers/utils/chat_template_utils.py
ENVIRONMENT = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

# `{% generation %}` marks what the assistant wrote, for training. A prompt has its content unchanged.
GENERATION = re.compile(r"({%[-+]?\s*(?:end)?)generation(?=\s*[-+]?%})")
TRACING_ENVIRONMENT = ENVIRONMENT.overlay()


class BadTemplate(ValueError):
    """The model has no chat template, or one that Jinja cannot read."""


class Endless(jinja2.TemplateError):
    """A template has taken all its turns: rule 4."""


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# Jinja's own tojson escapes < and > for HTML.
ENVIRONMENT.filters |= {"counted": _counted, "tojson": as_json, "own": Own.read}
ENVIRONMENT.globals["raise_exception"] = _raise_exception


class Tracing(NodeTransformer):
    """Makes a template write its own text as such: its constants become `texts`, variables which are Own.

    The result of a macro, a block or ~ on them is Own too. Arguments of filters stay as they are, because
    `replace` and its like search in the printed text.
    """

    def __init__(self) -> None:
        self.texts: dict[str, Own] = {}

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.TemplateData(node.data.translate(ALPHABET))

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if not isinstance(node.value, str):
            return node
        name = f"_text_{len(self.texts)}"
        self.texts[name] = Own(node.value)
        return nodes.Name(name, "load")

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return nodes.Filter(self.generic_visit(node), "own", [], [], None, None)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.node:  # else it is that of a block
            node.node = self.visit(node.node)
        return node


# Joins what a macro or a block writes.
TRACING_ENVIRONMENT.concat = lambda texts: Own.read("".join(map(str, texts)))  # type: ignore[method-assign]


# --- the template -------------------------------------------------------------------------------------------


# fmt: off
PROBE, SECOND_PROBE = "probe_4711", "probe_4712"  # words that no template contains
USER: Message = {"role": "user", "content": "Hi"}
ASSISTANT: Message = {"role": "assistant", "content": "Hello"}
SYSTEM: Message = {"role": "system", "content": PROBE}
PROBE_TOOLS = [Tool(PROBE, "", PROBE, {"type": "object", "properties": {}}).definition()]
PROBE_CALLS = [
    {"id": f"call{n:05}", "type": "function", "function": {"name": name, "arguments": {}}}
    for n, name in enumerate(("first", SECOND_PROBE))
]
PROBE_TURN: Messages = [
    USER,
    {"role": "assistant", "content": PROBE, "reasoning_content": "Hm.", "tool_calls": PROBE_CALLS},
    *({"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "1"} for call in PROBE_CALLS),
    ASSISTANT,
    USER,
]
# fmt: on


def _special_tokens(config: Object) -> dict[str, str]:
    """Return the tokens: each is a string, an object that holds it, or null; add_bos_token is not a token."""
    tokens = {}
    for name, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens
