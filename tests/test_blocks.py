"""Laws of blocks.py over any outputs and any end; the `anthropic` package's own accumulator is the judge."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

import sse
from blocks import Builder, fold
from channels import Accepted, Call, Delta, Finish, Output, Usage
from event_log import encode_event
from helpers import laws
from helpers.scripted import counted_ids

reasons = st.sampled_from(["stop", "length", "content_filter"])
ended = st.builds(Finish, reasons, st.none() | laws.usages, stop_sequence=st.sampled_from(["", "END"]))


@pytest.fixture(scope="module")
def client() -> SimpleNamespace:
    """The official client's types; its import takes two seconds, which other tests need not."""
    from anthropic.lib.streaming._messages import accumulate_event
    from anthropic.types import Message, RawMessageStreamEvent

    event: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    return SimpleNamespace(event=event.validate_python, message=Message, accumulate=accumulate_event)


def events_of(outputs: list[Output | Finish]) -> list[dict[str, Any]]:
    builder = Builder({"id": "msg_1", "model": "m"}, counted_ids(), "{}: {}".format)
    events = [event for said in [Accepted(7), *outputs] for event in builder.feed(0, said)]
    return [json.loads(sse.data(encode_event(0, event).frame)) for event in events]


BLOCK = r"text (text_delta )+|thinking (thinking_delta )+signature_delta |tool_use (input_json_delta )*"
MESSAGE = re.compile(f"message_start (({BLOCK})content_block_stop )*message_delta message_stop ")


@given(outputs=laws.outputs, finish=ended)
def test_shape_and_order(client: SimpleNamespace, outputs: list[Output], finish: Finish) -> None:
    """One block is open at a time, its deltas are of its kind, a thought is signed once and last."""
    told, n_blocks = "", 0
    for event in events_of([*outputs, finish]):
        client.event(event)
        held = event.get("content_block") or ("index" in event and event.get("delta")) or event
        told += held["type"] + " "
        if "index" in event:
            n_blocks += "content_block" in event
            assert event["index"] == n_blocks - 1
    assert MESSAGE.fullmatch(told)


@pytest.mark.bug("S25")
@given(outputs=laws.outputs, finish=ended)
def test_the_fold_is_what_a_client_accumulates(client: Any, outputs: list[Output], finish: Finish) -> None:
    events = events_of([*outputs, finish])
    message = fold(events)
    client.message.model_validate(message, strict=True)
    snapshot: Any = None
    for event in events:
        if event.get("delta", {}).get("type") == "input_json_delta":
            continue  # the client parses what is no JSON in its own way
        snapshot = client.accumulate(event=client.event(event), current_snapshot=snapshot, json_bufs={})
    told = snapshot.to_dict()
    for block in (*message["content"], *told["content"]):
        block.pop("input", None)
    assert told["content"] == message["content"]
    for name in ("stop_reason", "stop_sequence", "usage"):
        assert told[name] == message[name]


@given(laws.outputs, ended)
def test_nothing_is_lost_or_added(outputs: list[Output], finish: Finish) -> None:
    """However the deltas were cut. All texts that follow each other are one block."""
    texts = [*outputs]
    for n, output in enumerate(outputs):
        if isinstance(output, Delta) and output.channel != "analysis":
            texts[n] = Delta("final", output.text)
    content = fold(events_of([*outputs, finish]))["content"]
    for block, (kind, said, *arguments) in zip(content, laws.items(texts), strict=True):
        member = {"analysis": "thinking", "final": "text"}.get(kind, "name")
        assert (block["type"], block[member]) == ("tool_use" if member == "name" else member, said)
        for written in arguments:
            assert block["input"] == (sse.loads(written, "replace") if sse.is_object(written) else {})


@pytest.mark.bug("S07")
def test_ends() -> None:
    def end(*outputs: Output | Finish) -> tuple[str, str | None]:
        message = fold(events_of([*outputs]))
        return message["stop_reason"], message["stop_sequence"]

    usage = Usage(10, 4, 1, 3)
    assert end(Delta("final", "a"), Finish("stop", usage)) == ("end_turn", None)
    assert end(Call("f"), Finish("stop", usage)) == ("tool_use", None)
    assert end(Call("f"), Finish("length", usage)) == ("max_tokens", None)
    assert end(Delta("refusal", "no"), Finish("stop", usage)) == ("refusal", None)
    assert end(Finish("content_filter", usage)) == ("refusal", None)
    assert end(Delta("final", "a"), Finish("stop", usage, stop_sequence="E")) == ("stop_sequence", "E")
    failed = fold(events_of([Delta("final", "a"), Finish("failed", None, "broke")]))
    assert failed == {"type": "error", "error": {"type": "api_error", "message": "broke"}}
