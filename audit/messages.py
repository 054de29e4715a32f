"""Rules on Anthropic's Messages API, which other servers have too: blocks, ends, calls, counts, refusals.

    Peer --rule--> nothing, or AssertionError, or NotApplicable

A stream is message_start, blocks one after another (content_block_start, content_block_delta ...,
content_block_stop), message_delta, message_stop.

Authority: https://platform.claude.com/docs/en/build-with-claude/streaming, and the link of each rule.

Not here: the bodies of the other APIs (peer.py).
"""

import json
import re

from audit.http import Reply
from audit.peer import Peer
from audit.rules import NotApplicable, rules_of
from audit.schema import Json, without
from audit.stream import frames_of

must, should, _ = rules_of("messages", "messages")

BODY = '{"max_tokens": 64, "temperature": 0, "messages": [{"role": "user", "content": "hi"}]}'
CALLED = """{
    "messages": [{"role": "user", "content": "What is the weather in Tokyo?"}],
    "tools": [{"name": "get_weather", "input_schema": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]
    }}], "tool_choice": {"type": "any"}
}"""
HISTORY = """{"messages": [
    {"role": "user", "content": "What is the weather in Tokyo?"},
    {"role": "assistant", "content": [
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Tokyo"}}
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": true, "content": "No such city."}
    ]}
]}"""
CHANGES = ("id", "signature", "usage")  # of a message, different in each answer


def asked(peer: Peer, change: str = "{}", path: str = "/messages") -> Reply:
    """Ask with a body in which members are changed; null leaves one out."""
    body = {"model": peer.model} | json.loads(BODY) | json.loads(change)
    return peer.once(path, {name: value for name, value in body.items() if value is not None}).if_there()


def message(peer: Peer, change: str = "{}") -> Json:
    reply = asked(peer, change).if_there({400})
    assert reply.status == 200, "expected status 200"
    return reply.json


def events(peer: Peer) -> list[Json]:
    """Return the events of a stream, without pings, which may come anywhere."""
    reply = asked(peer, '{"stream": true}').if_stream()
    return [event for event in reply.events if event.get("type") != "ping"]


def n_prompt(usage: Json) -> int:
    """Return the tokens of a prompt: usage counts tokens from the prefix cache apart."""
    return usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)  # type: ignore[no-any-return]


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
            assert event.get("index") == n_started - 1, f"expected index {n_started - 1} in {kind}"


@must
def messages_event_name(peer: Peer) -> None:
    """messages-event-name: each event is named by its type

    the guide to streaming: the SDK reads the events whose name it knows
    https://platform.claude.com/docs/en/build-with-claude/streaming
    """
    for frame in frames_of(asked(peer, '{"stream": true}').if_stream().chunks):
        assert frame.type == frame.value.get("type", frame.type), f"expected its type, got {frame.type}"


@must(after="messages-order")
def messages_signature(peer: Peer) -> None:
    """messages-signature: a thought ends with one signature, which is not empty

    the guide to extended thinking: clients send the block back as it came
    https://github.com/sgl-project/sglang/issues/39752
    """
    thinks, signatures = False, list[object]()
    for event in events(peer):
        if block := event.get("content_block"):
            thinks, signatures = block.get("type") == "thinking", []
        if "signature" in (delta := event.get("delta", {})):
            signatures.append(delta["signature"])
        if thinks and event["type"] == "content_block_stop":
            assert [*map(bool, signatures)] == [True], f"expected one signature, got {signatures}"


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
    peer.same_answer(lambda: {name: without(message(peer), *CHANGES).get(name) for name in told}, told)


# --- messages -----------------------------------------------------------------------------------------------


@must
def messages_fields(peer: Peer) -> None:
    """messages-fields: a message has the members that it must have

    the SDK's type Message
    https://platform.claude.com/docs/en/api/messages
    """
    told = message(peer)
    assert (told.get("type"), told.get("role")) == ("message", "assistant")
    assert {"id", "model", "content", "stop_reason", "stop_sequence", "usage"} <= told.keys()


@must(after="messages-fields")
def messages_usage(peer: Peer) -> None:
    """messages-usage: the tokens of the answer are counted; a stream counts those of the prompt at once

    clients show and bill them
    https://github.com/sgl-project/sglang/issues/20678
    """
    assert n_prompt(events(peer)[0]["message"]["usage"]) > 0, "expected input_tokens in message_start"
    assert message(peer)["usage"]["output_tokens"] > 0


@must(after="messages-fields")
def messages_cut(peer: Peer) -> None:
    """messages-cut: an answer that max_tokens ends says so

    the API reference on stop_reason
    https://platform.claude.com/docs/en/api/messages
    """
    assert message(peer, '{"max_tokens": 2}')["stop_reason"] == "max_tokens"


@must(after="messages-fields")
def messages_stop(peer: Peer) -> None:
    """messages-stop: a stop sequence ends the answer and is named

    the API reference on stop_sequences
    https://github.com/vllm-project/vllm/issues/48273
    """
    stop = message(peer)["content"][-1].get("text", "")[2:5]
    if not stop.strip():
        raise NotApplicable("the answer is too short")
    told = message(peer, json.dumps({"stop_sequences": [stop]}))
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)


@must(after="messages-fields")
def messages_call(peer: Peer) -> None:
    """messages-call: tool_choice any makes a call with an object for its input, and its stop_reason

    agents run what stop_reason tool_use announces
    https://github.com/BerriAI/litellm/issues/34692
    """
    told = message(peer, CALLED)
    inputs = [block["input"] for block in told["content"] if block["type"] == "tool_use"]
    assert isinstance([*inputs, None][0], dict), "expected a block tool_use with an input"
    assert told["stop_reason"] == "tool_use"


@must(after="messages-fields")
def messages_no_call(peer: Peer) -> None:
    """messages-no-call: tool_choice none makes no call

    the API reference on tool_choice
    https://platform.claude.com/docs/en/api/messages
    """
    assert "tool_use" not in str(message(peer, CALLED.replace("any", "none"))["content"])


@must
def messages_result(peer: Peer) -> None:
    """messages-result: the result of a call is taken, also one that is an error

    agents send the call and its result
    https://github.com/vllm-project/vllm/issues/38738
    """
    assert asked(peer, HISTORY).status == 200, "expected status 200"


@must
def messages_system(peer: Peer) -> None:
    """messages-system: instructions may be blocks of text

    Claude Code sends them so
    https://github.com/anthropics/claude-code/issues/68900
    """
    assert asked(peer, '{"system": [{"type": "text", "text": "Be brief."}]}').status == 200


@must(after="messages-fields")
def messages_count(peer: Peer) -> None:
    """messages-count: count_tokens counts what usage counts

    clients plan by the count
    https://github.com/router-for-me/CLIProxyAPI/issues/679
    """
    n_used = n_prompt(message(peer)["usage"])
    counted = asked(peer, '{"max_tokens": null, "temperature": null}', "/messages/count_tokens")
    assert counted.json.get("input_tokens") == n_used, f"expected {n_used} as in usage"


# --- refusals -----------------------------------------------------------------------------------------------


@must
def messages_refusals(peer: Peer) -> None:
    """messages-refusals: what is wrong is refused with 400, before a stream begins

    the API reference on errors; the SDK raises by the status
    https://platform.claude.com/docs/en/api/errors
    """
    for change in ('{"messages": 42}', '{"max_tokens": "many", "stream": true}'):
        assert asked(peer, change).status == 400, f"expected status 400 for {change}"


@must(after="messages-refusals")
def messages_error(peer: Peer) -> None:
    """messages-error: an error has Anthropic's form

    the SDK reads error.type
    https://platform.claude.com/docs/en/api/errors
    """
    refused = asked(peer, '{"messages": 42}')
    assert refused.json.get("type") == "error"
    assert {"type", "message"} <= refused.error.keys()


@should(after="messages-fields")
def messages_unknown_model(peer: Peer) -> None:
    """messages-unknown-model: a model that is not there is a not_found_error

    the API reference on errors
    https://platform.claude.com/docs/en/api/errors
    """
    refused = peer.once("/messages", json.loads(BODY) | {"model": "no-such-model"})
    if refused.status == 200:
        raise NotApplicable("any name of a model will do")
    assert refused.error.get("type") == "not_found_error"
