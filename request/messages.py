"""Messages: the input items of Responses, or the messages of chat, to those that a chat template takes.

    items, instructions, chain --from_items()---------> Conversation
    messages                   --from_chat_messages()-> Conversation
    system, messages           --from_blocks()--------> Conversation

    reasoning "Hm.", message "Sure.", function_call f, function_call_output "42"
      --> {role: assistant, reasoning_content: "Hm.", content: "Sure.", tool_calls: [f]}, {role: tool, "42"}

Authority: https://platform.openai.com/docs/api-reference/responses/create (`input`),
https://platform.openai.com/docs/api-reference/chat/create (`messages`); for the output,
https://huggingface.co/docs/transformers/chat_templating

Rules of this file:
1. One assembler for all APIs: the reasoning, text and calls of one turn of the assistant are one message.
2. Instructions and the system and developer messages right after them are one system message. Later ones
   stay where they are, and are one message if they follow each other.
3. We refuse content that the model cannot read, by the name of its place in the request, and never omit it.
4. The results of a turn follow it, once, in the order of its calls, whenever they have come. Each call of a
   function has its result, unless it could not be run: a limit cut it, or its arguments are not an object.
   Many templates show neither the id nor the name of a result.
5. The arguments of a call are an object, as Llama's, Mistral's and Qwen3-Coder's templates want it. We
   wrap arguments that are no JSON object into an object, as its one member: https://github.com/vllm-project/vllm/issues/43995
6. Each call has an id of ours, which Mistral's template takes: nine letters and digits. Some clients begin
   again at "call_0" in each turn.
"""

import copy
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import sse
from request.body import MAX_VALUES, n_values, outside_strings, too_many_values
from request.refusals import BadInput, missing, no_images, wrong_value
from request.tool_items import CALL_IDS, IMAGE_MEMBERS, IMAGE_TEXT, NOT_TOLD, RESULT_SUFFIXES, TOOL_ITEM
from request.tools import CLIENT_TOOLS, DeclaredTool, as_json, called_name, flat, read_tool
from request.validation import Place, boolean, list_of, mapping, one_of, place, text, text_or_array
from sse import Object

MAX_ITEMS = 4096  # in a conversation: each costs time in the template, even if the context cannot hold it

Message = Object  # role, content (a string); reasoning_content, tool_calls; tool_call_id, name
Messages = list[Message]

objects = list_of(place, MAX_ITEMS)
every = list_of(place, 2**31)  # items.py has bounded them
Items = list[Object]


# --- Responses: input items ---------------------------------------------------------------------------------


def from_items(items: Items, instructions: str | None, chain: Items) -> "Conversation":
    """Return the conversation of the items of a chain, and then of the input; raises BadInput."""
    conversation = Conversation()
    if instructions:
        conversation.add_text("system", instructions)
    for item in every(chain, "previous_response_id") + every(items, "input"):
        type_ = item.members.get("type") or "message"
        if type_ == "message":
            add_message(conversation, item)
        else:
            add_item(conversation, item, type_)
    return conversation.close("input")


# --- the assembler ------------------------------------------------------------------------------------------


@dataclass
class Conversation:
    """The messages so far, as a chat template takes them; texts that become one are joined at the end."""

    joins_users: bool = False  # the user's messages without an answer in between become one message, too
    messages: Messages = field(default_factory=list)
    current: Message = field(default_factory=dict)  # the last turn; {}: results of its calls have come

    def add_text(self, role: str, text: str, member: str = "content") -> None:
        self._turn(role).setdefault(member, []).append(text)

    def _turn(self, role: str) -> Message:
        """Return the message that a role continues, or begins.

        A turn of the assistant is one message, and so are adjacent messages of the system (rules 1 and 2).
        """
        is_apart = role == "user" and not self.joins_users
        if is_apart or self.current.get("role") != role:
            self.current = {"role": role, "content": []}
            self.messages.append(self.current)
        return self.current

    def close(self, path: str) -> "Conversation":
        """Join the texts; raise BadInput at `path` if there are no messages, or a call lacks its result."""
        if not self.messages:
            raise missing(path, ", with at least one message")
        for call_id, (_, needs_result) in self.open_calls.items():
            if needs_result:
                raise BadInput(f"No tool output found for function call {call_id}.", param=path)
        # Without the messages for results that need not come.
        self.messages = [message for message in self.messages if "content" in message]
        for message in self.messages:
            for name in message.keys() & {"content", "reasoning_content"}:
                message[name] = paragraphs(*message[name])
        return self

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    not_read: list[str] = field(default_factory=list)  # what the Warning of the answer names: types of items
    brought: list[DeclaredTool] = field(default_factory=list)  # tools that items bring with them
    n_calls: int = 0
    n_argument_values: int = 0  # in all calls: each is held as an object
    # The calls that wait for a result, by the client's id, which a later turn may use again. A value is the
    # message for the result, in its place but without content, and whether the result must come.
    open_calls: dict[str, tuple[Message, bool]] = field(default_factory=dict)

    def add_call(self, call_id: str, name: str, written: str, is_cut: bool = False, **members: Any) -> None:
        """Raise BadInput if the arguments of all calls have more values than a body may have."""
        arguments = None
        if written.lstrip().startswith("{"):
            self.n_argument_values += n_values(outside_strings(written.encode()))
            if self.n_argument_values > MAX_VALUES:
                raise too_many_values()
            with suppress(ValueError):  # a limit may have cut it
                arguments = sse.loads(written)
        needs_result = arguments is not None and not is_cut
        if arguments is None:
            arguments = {"arguments": written} if written.strip() else {}
        own_id = f"call{self.n_calls:05}"
        self.n_calls += 1
        function = {"name": name, "arguments": arguments}
        call = {"id": own_id, "type": "function", "function": function, **members}
        self._turn("assistant").setdefault("tool_calls", []).append(call)
        result = {"role": "tool", "tool_call_id": own_id, "name": name}
        self.messages.append(result)
        self.open_calls[call_id] = result, needs_result

    def add_result(self, call_id: str, text: str, path: str) -> None:
        """Put a result after its call; raise BadInput at `path`, that of call_id, if no call waits for it."""
        if call_id not in self.open_calls:
            raise BadInput(f"No tool call found for function call output with call_id {call_id}.", param=path)
        result, _ = self.open_calls.pop(call_id)
        result["content"] = [text]
        self.current = {}


# --- content and calls, the same in both APIs ---------------------------------------------------------------


def add_message(conversation: Conversation, message: Place) -> None:
    role = message.need("role", one_of(*ROLES))
    conversation.add_text(ROLES[role], message.need("content", content_text))


def content_text(content: Any, path: str) -> str:
    """Return the text of a string, or of an array of parts: a line each, as vLLM and llama.cpp join them."""
    if isinstance(text_or_array(content, path), str):
        return str(content)
    return "\n".join(map(part_text, objects(content, path)))


def part_text(part: Place) -> str:
    type_ = part.need("type", text)
    member = PART_TEXTS.get(type_)
    return str(part.need(member, text)) if member else text_of_other_part(part, type_)


def paragraphs(*texts: str) -> str:
    """Join the texts that become one message."""
    return "\n\n".join(filter(None, texts))


# --- the fold: a plain streamed request passes what stands above --------------------------------------------


# --- content and calls, the same in both APIs ---------------------------------------------------------------

# fmt: off
#   type of a part     its member that is text for the model
PART_TEXTS = {
    "input_text":        "text",
    "output_text":       "text",
    "reasoning_text":    "text",
    "text":              "text",
    "refusal":           "refusal",
}
# fmt: on
IMAGES = ("input_image", "image_url", "image")  # types of parts
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def text_of_other_part(part: Place, type_: str) -> str:
    """Return the text of a search result, or of a document; raises BadInput for what holds no text."""
    if type_ in IMAGES:
        raise no_images(f"{part.path}.type")
    return readable(part.members) or str(part.need("type", one_of(*PART_TEXTS)))


def add_call(conversation: Conversation, type_: str, call_id: str, call: Place) -> None:
    name = called_name(call)
    if type_ == "custom":
        written = as_json({"input": call.need("input", text)})
    else:
        written = call.need("arguments", text)
    is_cut = call.members.get("status") == "incomplete"
    conversation.add_call(call_id, name, written, is_cut, **kept(call.members))


def kept(call: Object) -> Object:
    """Return what an upstream wants back with a call, such as Gemini's thought signature.

    It refuses the next turn without it: https://github.com/securo-finance/securo/issues/884
    """
    extra = call.get("extra_content")
    return {"extra_content": extra} if extra else {}


# --- Responses: input items ---------------------------------------------------------------------------------

SUMMARY = "Summary of the conversation so far:\n"


def add_item(conversation: Conversation, item: Place, type_: str) -> None:
    """Add the content of an item that is no message."""
    match type_:
        case "reasoning":
            # The model's own words; a summary is in another's, and no model was trained on it.
            reasoning = item.get("content", content_text, "")
            if item.members.get("encrypted_content") and not reasoning:
                # Sealed by another server, or with another secret: items.py could not open it.
                conversation.not_read.append("reasoning.encrypted_content")
                reasoning = readable(item.members.get("summary"))
            if reasoning:
                conversation.add_text("assistant", reasoning, "reasoning_content")
        case "function_call" | "custom_tool_call":
            add_call(conversation, type_.partition("_")[0], item.need("call_id", text), item)
        case "function_call_output" | "custom_tool_call_output":
            output = item.need("output", content_text)
            conversation.add_result(item.need("call_id", text), output, f"{item.path}.call_id")
        case "compaction":  # replaces an older part of the conversation (items.py)
            conversation.add_text("user", SUMMARY + item.need("summary", text))
        case "compaction_trigger" | "additional_tools":
            pass  # no text: items.py handles the one, and the other brings tools
        case _ if tool := TOOL_ITEM.fullmatch(type_):
            add_tool_item(conversation, item, type_, tool[1] or type_)
        case _:
            add_unknown_item(conversation, item, type_)
    if type_ in ("additional_tools", "tool_search_output"):
        conversation.brought += item.need("tools", list_of(read_tool))


def readable(content: Any) -> str:
    """Return the text in what has an unknown type, such as a search result; "" if it has none."""
    match content:
        case str():
            return content
        case list():
            return "\n".join(filter(None, map(readable, content)))
        case (
            {"content": inside}
            | {"text": inside}
            | {"source": {"type": "text", "data": inside}}
            # A text for another agent: only OpenAI's server encrypts it. github.com/openai/codex/issues/43893
            | {"type": "encrypted_content", "encrypted_content": inside}
            | {"type": "web_search_result", "title": inside}  # only Anthropic can read the rest
        ):
            return readable(inside)
    return ""


def add_unknown_item(conversation: Conversation, item: Place, type_: str) -> None:
    """Add and name the text of an item of an unknown type: a refused one would come again in each request.

    An example is Codex's agent_message: https://github.com/openai/codex/issues/33551
    """
    said = readable(item.members)
    if not said:
        raise wrong_value(f"{item.path}.type", "a known type, or content with text", type_)
    ends = [f"{name} {item.members[name]}" for name in ("author", "recipient") if name in item.members]
    role = ROLES.get(str(item.members.get("role")), "user")
    conversation.add_text(role, f"{', '.join([type_, *ends])}:\n{said}")
    conversation.not_read.append(type_)


def add_tool_item(conversation: Conversation, item: Place, type_: str, function: str) -> None:
    """Add an item of another tool as a call of a function, or as the result of one (tool_items.py)."""
    image_member = IMAGE_MEMBERS.get(type_, "")
    if item.members.get(image_member) not in (None, IMAGE_TEXT):
        raise no_images(f"{item.path}.{image_member}")
    id_member = CALL_IDS.get(type_, "call_id")
    call_id = item.get(id_member, text, function)
    told = as_json({name: value for name, value in item.members.items() if name not in NOT_TOLD})
    if type_.endswith(RESULT_SUFFIXES):
        conversation.add_result(call_id, told, f"{item.path}.{id_member}")
    else:
        conversation.add_call(call_id, function, told, is_cut=True)  # if it ran elsewhere it has no result


# --- Chat Completions: messages -----------------------------------------------------------------------------


def from_chat_messages(messages: list[Place]) -> Conversation:
    """Return the conversation of a Chat Completions request; raises BadInput."""
    conversation = Conversation()
    for message in messages:
        match message.need("role", one_of(*ROLES, "tool")):
            case "assistant":
                add_assistant(conversation, message)
            case "tool":
                result = message.need("content", content_text)
                call_id = message.need("tool_call_id", text)
                conversation.add_result(call_id, result, f"{message.path}.tool_call_id")
            case _:
                add_message(conversation, message)
    return conversation.close("messages")


def add_assistant(conversation: Conversation, message: Place) -> None:
    # Reasoning has two names: https://docs.vllm.ai/en/latest/features/reasoning_outputs.html
    reasoning = message.get("reasoning_content", text, "") or message.get("reasoning", text, "")
    if reasoning:
        conversation.add_text("assistant", reasoning, "reasoning_content")
    conversation.add_text("assistant", message.get("content", content_text, ""))
    conversation.add_text("assistant", message.get("refusal", text, ""))
    for call in message.get("tool_calls", objects, []):
        type_ = call.get("type", one_of(*CLIENT_TOOLS), "function")
        add_call(conversation, type_, call.need("id", text), flat(call.members | {"type": type_}, call.path))


# --- for templates and upstreams that take less -------------------------------------------------------------


def arguments_as_text(messages: Messages) -> Messages:
    """Return the messages with the arguments of each call as JSON text; most templates want objects."""
    copies = copy.deepcopy(messages)
    for message in copies:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = as_json(function["arguments"])
    return copies


# --- Messages: content blocks -------------------------------------------------------------------------------

# Claude Code's first words, of which some change with each request: the prefix cache would hold nothing.
# https://github.com/anthropics/claude-code/issues/68900
BILLING = re.compile(r"^x-anthropic-billing-header:.*\n?")


def from_blocks(messages: list[Place], system: str) -> Conversation:
    """Return the conversation of a request of the Messages API.

    "Consecutive `user` or `assistant` turns in your request will be combined into a single turn." Raises
    BadInput.
    """
    conversation = Conversation(joins_users=True)
    if system := BILLING.sub("", system):
        conversation.add_text("system", system)
    for message in messages:
        role = message.need("role", one_of("user", "assistant", "system"))
        content = message.need("content", text_or_array)
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for block in objects(content, f"{message.path}.content"):
            add_block(conversation, role, block)
    if conversation.close("messages").messages[-1]["role"] == "assistant":
        raise BadInput(
            "This model does not support assistant message prefill. The conversation must end with a user "
            "message.",
            param="messages",
        )
    return conversation


def add_block(conversation: Conversation, role: str, block: Place) -> None:
    match block.members.get("type"):
        case "thinking":
            conversation.add_text("assistant", block.need("thinking", text), "reasoning_content")
        case "redacted_thinking":
            conversation.not_read.append("redacted_thinking")  # only the server that wrote it can read it
        case "tool_use":
            written = as_json(block.need("input", mapping))
            conversation.add_call(
                block.need("id", text), block.need("name", text), written, **kept(block.members)
            )
        case "tool_result":
            result = block.get("content", content_text, "")
            if block.get("is_error", boolean, False):
                result = f"Error: {result}"
            conversation.add_result(block.need("tool_use_id", text), result, f"{block.path}.tool_use_id")
        case "text" | "image" | None:
            conversation.add_text(role, part_text(block))
        case other:
            add_unknown_item(conversation, block, str(other))


# --- prompts that are too long ------------------------------------------------------------------------------


def turn_starts(messages: Messages) -> list[int]:
    """Return the indices at which the conversation may begin: 0, and each message of the user."""
    return [i for i, message in enumerate(messages) if i == 0 or message["role"] == "user"]


def without_old_turns(messages: Messages, start: int) -> Messages:
    """Return the messages from one of turn_starts() on; the system message at the beginning stays.

    A result goes with its call, which it follows:
    https://platform.openai.com/docs/api-reference/responses/create (truncation)
    """
    system = [message for message in messages[: min(start, 1)] if message["role"] == "system"]
    return system + messages[start:]
