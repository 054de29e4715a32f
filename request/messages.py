"""Messages and tools to the prompt the model was trained on.

    input, instructions --from_responses()--> [Message, ...] --ChatTemplate.render()--> prompt
    messages            --from_chat()-------> [Message, ...] --ChatTemplate.render()--> prompt

Authority: the model's chat template, and what it is given: https://huggingface.co/docs/transformers/chat_templating
What a request may say: https://platform.openai.com/docs/api-reference/responses/create (`input`)
and https://platform.openai.com/docs/api-reference/chat/create (`messages`).

Rules of this file:
1. One assembler for both APIs: the reasoning, text and calls of one turn of the assistant are one message.
2. Instructions and the system and developer messages behind them are one system message; later ones stay.
3. Content that the model cannot read is refused, by the name of its place in the request, and never left out.
4. A template that ignores tools or system messages gets them as text, one that cannot show a turn of text and
   several calls gets a message for each; what it takes is found out by trying.

Not here: the checks of `tools` (params.py), what the model says in answer (channels.py).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from request.refusals import BadInput, wrong_type
from request.tools import as_arguments, joined
from request.validation import list_of, mapping, needed, one_of, text

MAX_ITEMS = 4096  # of a conversation: each costs time in the template, whatever the context holds

Message = dict[str, Any]  # role, content (a string); reasoning_content, tool_calls; tool_call_id, name
Tools = list[dict[str, Any]] | None  # {"type": "function", "function": {"name", "description", "parameters"}}


# --- content ------------------------------------------------------------------------------------------------

# fmt: off
#  type of part      where its text is
PARTS = {
    "input_text":     "text",
    "output_text":    "text",
    "reasoning_text": "text",
    "text":           "text",
    "refusal":        "refusal",
}
# fmt: on


def _text(content: Any, path: str) -> str:
    """The text of a string, or of an array of parts: a line each, as vLLM and llama.cpp join them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(path, "a string or an array", content)
    lines = []
    for place, part in _objects(content, path):
        field = PARTS[needed(part, "type", one_of(*PARTS), place)]
        lines.append(needed(part, field, text, place))
    return "\n".join(lines)


def _objects(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of an array, each behind its own path."""
    for i, item in enumerate(list_of(mapping, MAX_ITEMS)(value, path)):
        yield f"{path}[{i}]", item


#  type of call   what it is called with, and that as the model wrote it
CALLS: dict[str, tuple[str, Callable[[str], str]]] = {
    "function": ("arguments", str),
    "custom": ("input", as_arguments),
}


# --- the assembler ------------------------------------------------------------------------------------------


def paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


class Conversation:
    """The messages so far, as a chat template takes them."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        # Calls without their result, by id: what is called (a result has only the id, templates want both),
        # and whether a result must come, which nobody has of a call that was cut.
        self.waiting: dict[str, tuple[str, bool]] = {}

    def say(self, role: str, text: str) -> None:
        """A message, or more of the last: a turn of the assistant is one, the system's beginning is one."""
        joins = role == "assistant" or (role == "system" and len(self.messages) == 1)
        if joins and self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] = paragraphs(self.messages[-1]["content"], text)
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Reasoning of the assistant's turn."""
        self.say("assistant", "")
        turn = self.messages[-1]
        turn["reasoning_content"] = paragraphs(turn.get("reasoning_content", ""), text)

    def call(self, call_id: str, name: str, arguments: str, is_cut: bool = False) -> None:
        """A function call of the assistant's turn."""
        self.say("assistant", "")
        self.waiting[call_id] = name, not is_cut
        function = {"name": name, "arguments": _arguments(arguments)}
        call = {"id": call_id, "type": "function", "function": function}
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str, path: str) -> None:
        """What the function returned to an earlier call: once."""
        if call_id not in self.waiting:
            raise BadInput(f"No tool call found for function call output with call_id {call_id}.", path)
        name, _ = self.waiting.pop(call_id)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})

    def whole(self, path: str) -> list[Message]:
        """The messages, which came at `path`: there are some, and each call has its result."""
        if not self.messages:
            raise BadInput(f"'{path}' has no message.", path)
        for call_id, (_, is_due) in self.waiting.items():
            if is_due:
                raise BadInput(f"No tool output found for function call {call_id}.", path)
        return self.messages


def _arguments(text: str) -> Any:
    """The object that the JSON holds, as Llama's and Mistral's templates want it; else the text as it is."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # "\\ud800" is half a character: no tokenizer takes it
    except (ValueError, RecursionError):  # a model wrote it
        return text
    return value if isinstance(value, dict) else text


# --- Responses: input items ---------------------------------------------------------------------------------

Reader = Callable[[Conversation, dict[str, Any], str], None]  # adds the item at a path to the conversation
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def _message(talk: Conversation, item: dict[str, Any], path: str) -> None:
    role = ROLES[needed(item, "role", one_of(*ROLES), path)]
    talk.say(role, needed(item, "content", _text, path))


def _reasoning(talk: Conversation, item: dict[str, Any], path: str) -> None:
    """The model's own words; a summary is another's, and no model was trained on it."""
    if thought := _text(item.get("content") or "", f"{path}.content"):
        talk.think(thought)


def _call(kind: str, talk: Conversation, item: dict[str, Any], path: str) -> None:
    """By the name that the model knows."""
    field, as_written = CALLS[kind]
    call_id, name = needed(item, "call_id", text, path), needed(item, "name", text, path)
    known_as = joined(text(item.get("namespace") or "", f"{path}.namespace"), name)
    called = as_written(needed(item, field, text, path))
    talk.call(call_id, known_as, called, is_cut=item.get("status") == "incomplete")


def _call_output(talk: Conversation, item: dict[str, Any], path: str) -> None:
    output = needed(item, "output", _text, path)
    talk.result(needed(item, "call_id", text, path), output, f"{path}.call_id")


def _compaction(talk: Conversation, item: dict[str, Any], path: str) -> None:
    """What POST /v1/responses/compact has made of an older part of the conversation."""
    talk.say("user", "Summary of the conversation so far:\n" + needed(item, "summary", text, path))


ITEMS: dict[str, Reader] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": partial(_call, "function"),
    "function_call_output": _call_output,
    "custom_tool_call": partial(_call, "custom"),
    "custom_tool_call_output": _call_output,
    "compaction": _compaction,
}


def from_responses(
    input: str | list[Any], instructions: str | None, context: Sequence[dict[str, Any]] = ()
) -> list[Message]:
    """The messages of a Responses request behind the items of its chain; raises BadInput."""
    talk = Conversation()
    if instructions:
        talk.say("system", instructions)
    if not isinstance(input, str | list):
        raise wrong_type("input", "a string or an array", input)
    items = [{"role": "user", "content": input}] if isinstance(input, str) else input
    chain = [(f"previous_response_id[{i}]", item) for i, item in enumerate(context)]
    for path, item in [*chain, *_objects(items, "input")]:
        kind = "message" if item.get("type") is None else item["type"]
        ITEMS[one_of(*ITEMS)(kind, f"{path}.type")](talk, item, path)
    if not items:
        raise BadInput("'input' has no message.", "input")
    return talk.whole("input")


# --- Chat Completions: messages -----------------------------------------------------------------------------


def _assistant(talk: Conversation, message: dict[str, Any], path: str) -> None:
    """Reasoning by either of its two names: https://docs.vllm.ai/en/latest/features/reasoning_outputs.html"""
    names = [name for name in ("reasoning_content", "reasoning") if message.get(name)]
    calls = message.get("tool_calls") or []
    for name in names[:1]:
        talk.think(text(message[name], f"{path}.{name}"))
    refusal = text(message.get("refusal") or "", f"{path}.refusal")
    if message.get("content") is not None or not (names or calls or refusal):
        _message(talk, message, path)
    if refusal:
        talk.say("assistant", refusal)
    for place, call in _objects(calls, f"{path}.tool_calls"):
        kind = one_of(*CALLS)(call.get("type") or "function", f"{place}.type")
        (field, as_written), inside = CALLS[kind], f"{place}.{kind}"
        called = needed(call, kind, mapping, place)
        name, given = needed(called, "name", text, inside), needed(called, field, text, inside)
        is_cut = kind == "function" and isinstance(_arguments(given), str)  # by a limit: nobody could run it
        talk.call(needed(call, "id", text, place), name, as_written(given), is_cut)


def _tool(talk: Conversation, message: dict[str, Any], path: str) -> None:
    content = needed(message, "content", _text, path)
    talk.result(needed(message, "tool_call_id", text, path), content, f"{path}.tool_call_id")


CHAT_ROLES: dict[str, Reader] = {
    "system": _message,
    "developer": _message,
    "user": _message,
    "assistant": _assistant,
    "tool": _tool,
}


def from_chat(messages: list[Any]) -> list[Message]:
    """The messages of a Chat Completions request; raises BadInput."""
    talk = Conversation()
    for path, message in _objects(messages, "messages"):
        CHAT_ROLES[needed(message, "role", one_of(*CHAT_ROLES), path)](talk, message, path)
    return talk.whole("messages")


# --- prompts that are too long ------------------------------------------------------------------------------


def shortened(messages: list[Message]) -> list[list[Message]]:
    """The messages, then without their oldest turn, then without the two oldest, ...

    A turn goes from one user message to the next, so that a call never loses its output; the system's
    beginning stays: https://platform.openai.com/docs/api-reference/responses/create (truncation)
    """
    n_system = int(messages[0]["role"] == "system")
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return [messages, *(messages[:n_system] + messages[i:] for i in users[1:])]
