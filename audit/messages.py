"""Rules on Anthropic's Messages API, which other servers have too: blocks, ends, calls, counts, refusals.

    Peer --rule--> nothing, or AssertionError, or NotApplicable

A stream is message_start, blocks one after another (content_block_start, content_block_delta ...,
content_block_stop), message_delta, message_stop.

Authority: https://platform.claude.com/docs/en/build-with-claude/streaming, and the link of each rule.

Not here: the bodies of the other APIs (peer.py).
"""

import re

from audit.exchanges import enter_texts
from audit.peer import Peer
from audit.rules import NotApplicable, rules_of
from audit.schema import Json, without
from audit.stream import frames_of, of_response

must, should, _ = rules_of("messages", "messages")

CHANGES = ("id", "signature", "usage")  # of a message, different in each answer
SAID = r"""
must of messages
messages-fields: a message has the members that it must have

the SDK's type Message
https://platform.claude.com/docs/en/api/messages

messages  {} -> message


must of messages, after messages-fields
messages-cut: an answer that max_tokens ends says so

the API reference on stop_reason
https://platform.claude.com/docs/en/api/messages

messages  {"max_tokens": 2} -> stop_reason:=max_tokens


must of messages, after messages-fields
messages-call: tool_choice any makes a call with an object for its input, and its stop_reason

agents run what stop_reason tool_use announces
https://github.com/BerriAI/litellm/issues/34692

messages  {"messages": [QUESTION], "max_tokens": 400,
            "tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}}
            -> stop_reason:=tool_use content:+tool_use


must of messages, after messages-fields
messages-no-call: tool_choice none makes no call

the API reference on tool_choice
https://platform.claude.com/docs/en/api/messages

messages  {"messages": [QUESTION], "max_tokens": 400,
            "tools": [MESSAGES_TOOL], "tool_choice": {"type": "none"}}
            -> content:[not_a_call]


must of messages
messages-result: the result of a call is taken, also one that is an error

agents send the call and its result
https://github.com/vllm-project/vllm/issues/38738

messages  {"messages": [QUESTION,
            {"role": "assistant", "content": [
              {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Tokyo"}}]},
            {"role": "user", "content": [
              {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": true, "content": "No such city."}
            ]}]} -> 200


must of messages
messages-system: instructions may be blocks of text

Claude Code sends them so
https://github.com/anthropics/claude-code/issues/68900

messages  {"system": [{"type": "text", "text": "Be brief."}]} -> 200


must of messages, after messages-fields
messages-count: count_tokens counts what usage counts

clients plan by the count
https://github.com/router-for-me/CLIProxyAPI/issues/679

messages  {} -> message
POST /messages/count_tokens {"model": "MODEL", "messages": [{"role": "user", "content": "hi"}]}
            -> a prompt of this length


must of messages
messages-refusals: what is wrong is refused with 400, before a stream begins

the API reference on errors; the SDK raises by the status
https://platform.claude.com/docs/en/api/errors

messages  {"messages": 42} -> 400
messages  {"max_tokens": "many", "stream": true} -> 400


must of messages, after messages-refusals
messages-error: an error has Anthropic's form

the SDK reads error.type
https://platform.claude.com/docs/en/api/errors

messages  {"messages": 42} -> 400 type:=error error:message_error


should of messages, after messages-fields
messages-unknown-model: a model that is not there is a not_found_error

the API reference on errors
https://platform.claude.com/docs/en/api/errors

messages  {"model": "no-such-model"} -> 404 error:not_found
"""
enter_texts("messages", SAID)


def events(peer: Peer) -> list[Json]:
    """Return the events of a stream, without pings, which may come anywhere."""
    return [event for event in peer.stream().events if event.get("type") != "ping"]


# --- streams ------------------------------------------------------------------------------------------------


@must
def messages_order(peer: Peer) -> None:
    """messages-order: the events of a stream come in their order, and no block starts within another

    the guide to streaming: each block has a start, deltas and a stop
    https://github.com/sgl-project/sglang/issues/24293
    """
    types = " ".join(str(event.get("type")).removeprefix("content_block_") for event in events(peer))
    expected = "message_start (start (delta )*stop )*message_delta message_stop"
    assert re.fullmatch(expected, types), f"expected {expected}, got {types}"


@must
def messages_index(peer: Peer) -> None:
    """messages-index: the events of a block have its index, and blocks count from 0

    the SDK's accumulator puts a delta into the block with its index
    https://github.com/sgl-project/sglang/issues/39782
    """
    n_started = 0
    for event in events(peer):
        if (kind := str(event.get("type"))).startswith("content_block_"):
            n_started += kind.endswith("start")
            assert event.get("index") == n_started - 1


@must
def messages_event_name(peer: Peer) -> None:
    """messages-event-name: each event is named by its type

    the guide to streaming: the SDK reads the events whose name it knows
    https://platform.claude.com/docs/en/build-with-claude/streaming
    """
    for frame in frames_of(peer.stream().chunks):
        assert frame.type == frame.value.get("type", frame.type), f"expected its type, got {frame.type}"


@must(after="messages-order")
def messages_signature(peer: Peer) -> None:
    """messages-signature: a thought ends with one signature, which is not empty

    the guide to extended thinking: clients send the block back as it came
    https://github.com/sgl-project/sglang/issues/39752
    """
    kinds = [event.get("content_block", {}).get("type") for event in events(peer)]
    deltas = [event.get("delta", {}) for event in events(peer)]
    signatures = [delta["signature"] for delta in deltas if "signature" in delta]
    assert [*map(bool, signatures)] == [True] * kinds.count("thinking")


@must(after="messages-order")
def messages_stream_is_answer(peer: Peer) -> None:
    """messages-stream-is-answer: the deltas of a stream add up to the message that comes without stream

    the guide to streaming: the deltas make up the message
    https://github.com/open-webui/open-webui/issues/26790
    """
    streamed: Json = {"content": []}
    for event in events(peer):
        match event:
            case {"content_block": block}:
                streamed["content"].append(block)
            case {"index": _, "delta": delta}:
                block = streamed["content"][-1]
                block |= {name: block.get(name, "") + text for name, text in delta.items() if name != "type"}
            case {"delta": delta}:
                streamed |= delta
    told = without(streamed, *CHANGES)

    def plain() -> Json:
        answer = without(peer.plain().response, *CHANGES)
        return {name: answer.get(name) for name in told}

    peer.same_answer(plain, told)


# --- messages -----------------------------------------------------------------------------------------------


@must(after="messages-fields")
def messages_usage(peer: Peer) -> None:
    """messages-usage: the tokens of the answer are counted; a stream counts those of the prompt at once

    clients show and bill them
    https://github.com/sgl-project/sglang/issues/20678
    """
    assert of_response(events(peer)[0]["message"]).n_prompt, "expected input_tokens in message_start"
    assert peer.plain().response["usage"]["output_tokens"]


@must(after="messages-fields")
def messages_stop(peer: Peer) -> None:
    """messages-stop: a stop sequence ends the answer and is named

    the API reference on stop_sequences
    https://github.com/vllm-project/vllm/issues/48273
    """
    stop = peer.plain().response["content"][-1].get("text", "")[2:5]
    if not stop.strip():
        raise NotApplicable("the answer is too short")
    told = peer.plain(stop_sequences=[stop]).response
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)
