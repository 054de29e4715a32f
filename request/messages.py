"""Messages: the input items of Responses, or the messages of chat, to those that a chat template takes.

    input, instructions, chain --from_responses()--> [Message, ...]
    messages                   --from_chat()-------> [Message, ...]

    reasoning "Hm.", message "Sure.", function_call f, function_call_output "42"
      --> {role: assistant, reasoning_content: "Hm.", content: "Sure.", tool_calls: [f]}, {role: tool, "42"}

Authority: https://platform.openai.com/docs/api-reference/responses/create (`input`),
https://platform.openai.com/docs/api-reference/chat/create (`messages`); for what comes out,
https://huggingface.co/docs/transformers/chat_templating

Rules of this file:
1. One assembler for both APIs: the reasoning, text and calls of one turn of the assistant are one message.
2. Instructions and the system and developer messages right after them are one system message; later ones
   stay where they are.
3. Content that the model cannot read is refused, by the name of its place in the request, and never left out.
4. Each result follows its call, once, in the order of the calls. Each call has its result, unless it could
   not be run: a limit cut it, or its arguments are not an object.
5. The arguments of a call are an object, as Llama's, Mistral's and Qwen3-Coder's templates want it. Those
   that are not a JSON object are the one member of one: https://github.com/vllm-project/vllm/issues/43995
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sse
from request.body import MAX_VALUES, n_values, too_many_values
from request.ids import PREFIXES
from request.refusals import BadInput, no_images, wrong_type
from request.tool_items import (
    CALL_IDS,
    IMAGE_MEMBERS,
    IMAGE_TEXT,
    MAY_LACK_RESULT,
    TOOL_ITEMS,
    TYPE_SUFFIXES,
)
from request.tools import CLIENT_TOOLS, as_arguments, as_json, flat, qualified_name
from request.validation import list_of, mapping, one_of, required, text

MAX_ITEMS = 4096  # in a conversation: each costs time in the template, even if the context cannot hold it

Message = dict[str, Any]  # role, content (a string); reasoning_content, tool_calls; tool_call_id, name


# --- the assembler ------------------------------------------------------------------------------------------


class OpenCall(NamedTuple):
    """A call whose result has not come."""

    number: int  # among the conversation's calls
    name: str  # a result has only the call's id, and templates want the name too
    needs_result: bool


class Conversation:
    """The messages so far, as a chat template takes them; texts that become one are joined at the end."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._n_calls = 0
        self._n_argument_values = 0  # in all calls: each is held as an object
        self._open_calls: dict[str, OpenCall] = {}  # by call_id, which a later turn may use again
        self._answered: list[int] = []  # numbers of the calls whose results are the last messages

    def _turn(self, role: str) -> Message:
        """Return the message that a role continues, or begins.

        A turn of the assistant is one message, and so is what the system says at the beginning.
        """
        can_continue = role == "assistant" or (role == "system" and len(self._messages) == 1)
        if not can_continue or not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]

    def add_text(self, role: str, text: str) -> None:
        self._turn(role)["content"].append(text)

    def add_reasoning(self, text: str) -> None:
        self._turn("assistant").setdefault("reasoning_content", []).append(text)

    def add_call(self, call_id: str, name: str, written: str, is_cut: bool = False) -> None:
        """Raise BadInput if the arguments of all calls have more values than a body may have."""
        arguments = None
        if written.lstrip().startswith("{"):
            self._n_argument_values += n_values(written)
            if self._n_argument_values > MAX_VALUES:
                raise too_many_values()
            arguments = parsed_object(written)
        is_object = arguments is not None
        if arguments is None:
            arguments = {"arguments": written} if written.strip() else {}
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn("assistant").setdefault("tool_calls", []).append(call)
        self._open_calls[call_id] = OpenCall(self._n_calls, name, is_object and not is_cut)
        self._n_calls += 1

    def add_result(self, call_id: str, text: str, path: str) -> None:
        """Put the result after those of earlier calls: many templates show neither its id nor its name.

        Raise BadInput at `path`, where call_id stands, unless a call waits for this result.
        """
        if call_id not in self._open_calls:
            raise BadInput(f"No tool call found for function call output with call_id {call_id}.", path)
        call = self._open_calls.pop(call_id)
        if self._messages[-1]["role"] != "tool":
            self._answered = []
        n_earlier = bisect(self._answered, call.number)
        n_later = len(self._answered) - n_earlier
        self._answered.insert(n_earlier, call.number)
        result = {"role": "tool", "tool_call_id": call_id, "name": call.name, "content": [text]}
        self._messages.insert(len(self._messages) - n_later, result)

    def close(self, path: str) -> list[Message]:
        """Return the messages; raise BadInput at `path` if there is none, or a call lacks its result."""
        if not self._messages:
            raise BadInput(f"'{path}' has no message.", path)
        for call_id, call in self._open_calls.items():
            if call.needs_result:
                raise BadInput(f"No tool output found for function call {call_id}.", path)
        for message in self._messages:
            for name in ("content", "reasoning_content"):
                if name in message:
                    message[name] = paragraphs(*message[name])
        return self._messages


def paragraphs(*texts: str) -> str:
    """Join what becomes one message."""
    return "\n\n".join(text for text in texts if text)


def parsed_object(written: str) -> dict[str, Any] | None:
    """Return the JSON object that begins with this brace, None if it is not one: a limit may have cut it."""
    try:
        value: dict[str, Any] = sse.loads(written)
    except ValueError:
        return None
    return value


# --- content and calls, the same in both APIs ---------------------------------------------------------------

# fmt: off
#   type of a part     its member that is text for the model
PART_TEXTS = {
    "input_text":     "text",
    "output_text":    "text",
    "reasoning_text": "text",
    "text":           "text",
    "refusal":        "refusal",
}

#   type of a part     that of a text in its place
IMAGES = {
    "input_image":    "input_text",
    "image_url":      "text",
}

#   type of a call     its member that holds what the tool gets
PAYLOADS = {
    "function":       "arguments",
    "custom":         "input",
}
# fmt: on


def objects(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the value of each object of an array."""
    for i, item in enumerate(list_of(mapping, MAX_ITEMS)(value, path)):
        yield f"{path}[{i}]", item


def content_text(content: Any, path: str) -> str:
    """Return the text of a string, or of an array of parts: a line each, as vLLM and llama.cpp join them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(path, "a string or an array", content)
    lines = []
    for part_path, part in objects(content, path):
        type_ = required(part, "type", text, part_path)
        if type_ in IMAGES:
            raise no_images(f"{part_path}.type")
        member = PART_TEXTS[one_of(*PART_TEXTS)(type_, f"{part_path}.type")]
        lines.append(required(part, member, text, part_path))
    return "\n".join(lines)


ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def add_message(conversation: Conversation, message: dict[str, Any], path: str) -> None:
    role = required(message, "role", one_of(*ROLES), path)
    conversation.add_text(ROLES[role], required(message, "content", content_text, path))


def add_call(conversation: Conversation, type_: str, call_id: str, fields: dict[str, Any], path: str) -> None:
    name = required(fields, "name", text, path)
    namespace = text(fields.get("namespace") or "", f"{path}.namespace")
    written = required(fields, PAYLOADS[type_], text, path)
    if type_ == "custom":
        written = as_arguments(written)
    is_cut = fields.get("status") == "incomplete"
    conversation.add_call(call_id, qualified_name(namespace, name), written, is_cut)


# --- Responses: input items ---------------------------------------------------------------------------------

ITEM_TYPES = (*PREFIXES, *TOOL_ITEMS)
SUMMARY = "Summary of the conversation so far:\n"


def add_item(conversation: Conversation, item: dict[str, Any], path: str) -> None:
    """Add what an item says; the easy form of a message has no type."""
    type_ = item.get("type")
    match one_of(*ITEM_TYPES)("message" if type_ is None else type_, f"{path}.type"):
        case "message":
            add_message(conversation, item, path)
        case "reasoning":
            # The model's own words; a summary is in another's, and no model was trained on it.
            for part_path, part in objects(item.get("summary") or [], f"{path}.summary"):
                required(part, "text", text, part_path)
            if reasoning := content_text(item.get("content") or "", f"{path}.content"):
                conversation.add_reasoning(reasoning)
        case "function_call" | "custom_tool_call" as type_:
            call_id = required(item, "call_id", text, path)
            add_call(conversation, type_.partition("_")[0], call_id, item, path)
        case "function_call_output" | "custom_tool_call_output":
            output = required(item, "output", content_text, path)
            conversation.add_result(required(item, "call_id", text, path), output, f"{path}.call_id")
        case "compaction":  # stands for an older part of the conversation (items.py)
            conversation.add_text("user", SUMMARY + required(item, "summary", text, path))
        case "compaction_trigger" | "additional_tools":
            pass  # nothing was said: items.py and params.py do what they ask for
        case type_:
            add_tool_item(conversation, item, type_, path)


def add_tool_item(conversation: Conversation, item: dict[str, Any], type_: str, path: str) -> None:
    """Add an item with a row in TOOL_ITEMS as a call of a function, as its result, or as both."""

    def given(members: str) -> dict[str, Any]:
        return {name: item[name] for name in members.split() if item.get(name) is not None}

    row = TOOL_ITEMS[type_]
    image_member = IMAGE_MEMBERS.get(type_, "")
    if item.get(image_member) not in (None, IMAGE_TEXT):
        raise no_images(f"{path}.{image_member}")
    function = type_
    for suffix in TYPE_SUFFIXES:
        function = function.removesuffix(suffix)
    call_id = function  # a search that the server runs has no id
    own_id = "id" if row.arguments and row.result else "call_id"
    for name, value in given(CALL_IDS.get(type_, own_id)).items():
        call_id = text(value, f"{path}.{name}")
        break
    if row.arguments:
        arguments: dict[str, Any] = {}
        for name, value in given(row.arguments).items():
            arguments |= value if isinstance(value, dict) else {name: value}
        may_lack_result = item.get("status") == "incomplete" or type_ in MAY_LACK_RESULT
        conversation.add_call(call_id, function, as_json(arguments), may_lack_result)
    if row.result:
        results = given(row.result)
        match [*results.values()]:
            case [str(result)]:
                pass
            case _:
                result = as_json(results)
        conversation.add_result(call_id, result, f"{path}.call_id")


def from_responses(
    input: str | list[Any], instructions: str | None, context: Sequence[dict[str, Any]] = ()
) -> list[Message]:
    """Return the messages of `context`, the items of the chain, and then of `input`; raises BadInput."""
    conversation = Conversation()
    if instructions:
        conversation.add_text("system", instructions)
    for path, item in placed(input, context):
        add_item(conversation, item, path)
    if input == []:
        raise BadInput("'input' has no message.", "input")
    return conversation.close("input")


def placed(input: Any, context: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the path and the value of each item of the chain, then of the input; raises BadInput."""
    chain = [(f"previous_response_id[{i}]", item) for i, item in enumerate(context)]
    if isinstance(input, str):
        return [*chain, ("input", {"role": "user", "content": input})]
    if not isinstance(input, list):
        raise wrong_type("input", "a string or an array", input)
    return [*chain, *objects(input, "input")]


def brought_tools(input: Any, context: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the path and the value of each tool that items bring with them; raises BadInput."""
    tools: list[tuple[str, dict[str, Any]]] = []
    for path, item in placed(input, context):
        if item.get("type") in ("additional_tools", "tool_search_output"):
            tools += objects(item.get("tools"), f"{path}.tools")
    return tools


# --- Chat Completions: messages -----------------------------------------------------------------------------


def from_chat(messages: list[Any]) -> list[Message]:
    """Return the messages of a Chat Completions request; raises BadInput."""
    conversation = Conversation()
    for path, message in objects(messages, "messages"):
        match required(message, "role", one_of(*ROLES, "tool"), path):
            case "assistant":
                add_assistant(conversation, message, path)
            case "tool":
                result = required(message, "content", content_text, path)
                call_id = required(message, "tool_call_id", text, path)
                conversation.add_result(call_id, result, f"{path}.tool_call_id")
            case _:
                add_message(conversation, message, path)
    return conversation.close("messages")


def add_assistant(conversation: Conversation, message: dict[str, Any], path: str) -> None:
    # Reasoning has two names: https://docs.vllm.ai/en/latest/features/reasoning_outputs.html
    name = "reasoning_content" if message.get("reasoning_content") else "reasoning"
    reasoning = text(message.get(name) or "", f"{path}.{name}")
    calls = message.get("tool_calls") or []
    refusal = text(message.get("refusal") or "", f"{path}.refusal")
    if reasoning:
        conversation.add_reasoning(reasoning)
    may_lack_content = reasoning or calls or refusal
    if message.get("content") is not None or not may_lack_content:
        add_message(conversation, message, path)
    if refusal:
        conversation.add_text("assistant", refusal)
    for call_path, call in objects(calls, f"{path}.tool_calls"):
        type_ = one_of(*CLIENT_TOOLS)(call.get("type") or "function", f"{call_path}.type")
        fields, fields_path = flat(call | {"type": type_}, call_path, CLIENT_TOOLS)
        add_call(conversation, type_, required(call, "id", text, call_path), fields, fields_path)


# --- prompts that are too long ------------------------------------------------------------------------------


def split_system(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Return the system message at the beginning, or nothing, and all the others."""
    n_system = int(messages[0]["role"] == "system")
    return messages[:n_system], messages[n_system:]


def turn_starts(messages: list[Message]) -> list[int]:
    """Return where the conversation may begin, after its system message: at 0, at its second turn, ...

    A turn begins with a user message, unless that stands between a call and its result.
    """
    _, turns = split_system(messages)
    starts = []
    unmet: set[str] = set()  # ids of the calls of results from message i on, which stand before it
    for i, message in reversed(list(enumerate(turns))):
        if message["role"] == "user" and not unmet and i > 0:
            starts.append(i)
        if message["role"] == "tool":
            unmet.add(message["tool_call_id"])
        for call in message.get("tool_calls", []):
            unmet.discard(call["id"])
    return [0, *reversed(starts)]


def without_old_turns(messages: list[Message], start: int) -> list[Message]:
    """Return the messages from one of turn_starts() on; the system message at the beginning stays.

    https://platform.openai.com/docs/api-reference/responses/create (truncation)
    """
    system, turns = split_system(messages)
    return [*system, *turns[start:]]


def shortened(messages: list[Message]) -> list[list[Message]]:
    """Return the messages, then those without their oldest turn, then without the two oldest, ..."""
    return [without_old_turns(messages, start) for start in turn_starts(messages)]
