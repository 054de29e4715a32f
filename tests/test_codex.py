"""Codex as a client: its requests in the form that version 0.169 sends, and what it must get back.

codex.json has a turn, and items that newer versions send. The texts are shorter than Codex's, for the tiny
model reads 2048 tokens; keys, types and order are its own.
"""

import json

import pytest

import sse
from helpers import laws
from helpers.serving import ROOT, Json, Server
from request.body import zstd

SENT = json.loads((ROOT / "tests" / "codex.json").read_text(encoding="utf-8"))
BODY: Json = SENT["body"]
INPUT, TOOLS = BODY["input"], BODY["tools"]


def message(text: str) -> Json:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": "msg_01a1fe9f-user", "role": "user", "content": content}


def turn(server: Server, body: Json) -> list[Json]:
    """Return the events of a turn, every one checked. Its body is compressed, as Codex does it."""
    packed = zstd.compress(json.dumps(body).encode(), 3)
    reply = server.post("/v1/responses", packed, Accept="text/event-stream", Content_Encoding="zstd")
    assert reply.status == 200, reply.body
    events = [json.loads(frame.data) for frame in sse.Parser().feed(reply.body) if frame.data != "[DONE]"]
    laws.check_order(events)
    for event in events:
        laws.STREAM_EVENT.validate_json(json.dumps(event), strict=True)
    return events


def usage_of(server: Server, body: Json) -> Json:
    found: Json = turn(server, body)[-1]["response"]["usage"]
    return found


CUT = {"max_output_tokens": 40}  # not Codex's: the tiny model knows no end here


@pytest.mark.bug("H12")
def test_a_turn(server: Server) -> None:
    events = turn(server, BODY | CUT)
    assert len(events) > 40
    assert [tool["type"] for tool in events[-1]["response"]["tools"]] == [tool["type"] for tool in TOOLS]
    assert "tool_search, web_search" in server.log()


TRIGGER = {"type": "compaction_trigger"}


@pytest.mark.bug("H09", "H11")
@pytest.mark.parametrize("name", ["plan", "spawn"])
def test_items_of_other_tools_are_told_and_what_they_load_can_be_called(server: Server, name: str) -> None:
    """Each of them was a 400, and the end of the session."""
    choice = {"type": "function", "name": name}
    if name == "spawn":
        choice["namespace"] = "collaboration"
    body = BODY | {"input": SENT["of_others"], "tool_choice": choice, "reasoning": {"effort": "none"}}
    events = turn(server, body | {"max_output_tokens": 60})
    (call,) = events[-1]["response"]["output"]
    assert {key: call.get(key) for key in choice} == choice | {"type": "function_call"}
    assert len(events[-1]["response"]["tools"]) == len(TOOLS)  # the response says what the request has said


@pytest.mark.bug("H08")
def test_a_compaction_trigger_makes_one_compaction(server: Server) -> None:
    """As codex-rs/core/src/compact_remote_v2.rs asks for it: more items than one, or none, are fatal."""
    said = {"role": "assistant", "content": "Tokyo is sunny today."}
    history = [*INPUT, said, message("And Paris?")]
    events = turn(server, BODY | {"input": [*history, TRIGGER]})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    item = events[-2]["item"]
    response = events[-1]["response"]
    assert (item["type"], item.keys()) == ("compaction", {"id", "type", "encrypted_content"})
    assert (response["output"], response["status"]) == ([item], "completed")
    assert response["usage"]["output_tokens"] > 0
    laws.check_response(events)
    kept, go_on = [*INPUT, message("And Paris?")], message("go on")
    n_with, n_without = (
        usage_of(server, BODY | CUT | {"input": items})["input_tokens"]
        for items in ([*kept, item, go_on], [*kept, go_on])
    )
    assert n_with > n_without


def test_a_trigger_works_without_a_stream_and_in_a_chain(server: Server) -> None:
    """Behind it the chain has what the user has said, and the compaction: not what that stands for."""
    said = {"role": "assistant", "content": "Hello."}
    first = server.post("/v1/responses", {"model": "default", "input": [*INPUT, said, TRIGGER]}).json
    assert [item["type"] for item in first["output"]] == ["compaction"]
    second = {"model": "default", "input": "hi", "previous_response_id": first["id"]}
    made = server.post("/v1/responses", second | CUT).json
    listed = server.get(f"/v1/responses/{made['id']}/input_items?order=asc").json["data"]
    kinds = [(item["type"], item.get("role")) for item in listed]
    assert kinds == [("message", "user"), ("compaction", None), ("message", "user")]
    asked = second | {"input": [TRIGGER]}
    again = server.post("/v1/responses", asked).json
    assert [item["type"] for item in again["output"]] == ["compaction"]
    counted = server.post("/v1/responses/input_tokens", asked).json
    assert counted["input_tokens"] == again["usage"]["input_tokens"]


@pytest.mark.bug("H10")
@pytest.mark.parametrize("asked", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
def test_a_warm_up_says_nothing_and_is_found_in_the_cache(server: Server, asked: Json) -> None:
    """It was answered with 24 tokens, as if it had not been asked for."""
    instructions = f"Be brief. {asked} " * 20
    body = BODY | CUT | {"instructions": instructions, "input": []}
    events = turn(server, body | asked | {"input": INPUT, "store": True})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == ["created", "in_progress", "completed"]
    warmed = events[-1]["response"]
    assert (warmed["output"], warmed["status"], warmed["max_output_tokens"]) == ([], "completed", 40)
    assert warmed["usage"]["input_tokens"] == warmed["usage"]["total_tokens"] > 100
    chained = {"input": [message("go on")], "previous_response_id": warmed["id"]}
    for next_turn in ({"input": INPUT}, chained):
        usage = usage_of(server, body | next_turn)
        assert usage["input_tokens_details"]["cached_tokens"] >= 64
        assert usage["output_tokens"] > 0
