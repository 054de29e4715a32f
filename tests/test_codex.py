"""Codex as a client: its requests in the form that version 0.169 sends, and what it must get back.

The texts are shorter than Codex's, for the tiny model reads 2048 tokens; keys, types and order are its own.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

import sse
from helpers import clients, laws
from helpers.serving import SERVER, Json, Server, serve
from request.body import zstd

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": PATCH}


def arguments(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def function(name: str, parameters: Json, **more: Any) -> Json:
    fields = {"type": "function", "name": name, "description": "Runs.", "strict": False}
    return fields | {"parameters": parameters} | more


def namespace(name: str, tool: Json) -> Json:
    return {"type": "namespace", "name": name, "description": "Agents.", "tools": [tool]}


COMMAND = arguments(cmd={"type": "string", "description": "What to run."}) | {"required": ["cmd"]}
AGENT = arguments(target={"type": "string"})


TOOLS: list[Json] = [
    function("exec_command", COMMAND),
    {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR},
    namespace("multi_agent_v1", function("close_agent", AGENT)),
    {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": COMMAND},
    {"type": "web_search", "external_web_access": False},
]


def message(role: str, *texts: str) -> Json:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_01a1fe9f-{role}", "role": role, "content": content}


INPUT = [
    message("developer", "Be brief."),
    message("developer", "Skills.", "No rights."),
    message("user", "hi"),
]
BODY: Json = {
    "model": "default", "stream": True, "input": INPUT, "tools": TOOLS, "tool_choice": "auto",
    "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "01a1fe9f-7f5f-79b1-9a33-cf6a41d2aa23",
    "text": {"verbosity": "low"},
    "client_metadata": {"thread_id": "01a1fe9f", "x-codex-turn-metadata": '{"window_number":0}'},
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(script=SERVER) as started:
        yield started


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


ENDED = {"status": "completed"}
CUT = {"max_output_tokens": 40}  # not Codex's: the tiny model knows no end here


@pytest.mark.bug("H12")
def test_a_turn(server: Server) -> None:
    events = turn(server, BODY | CUT)
    assert len(events) > 40
    assert [tool["type"] for tool in events[-1]["response"]["tools"]] == [tool["type"] for tool in TOOLS]
    assert "tool_search, web_search" in server.log()


@pytest.mark.bug("H03")
def test_codex_reads_what_it_needs_of_a_turn(server: Server) -> None:
    events = turn(server, BODY | {"tools": [], "input": "What is 2+2? Answer with just the number."})
    assert [kind for kind, *_ in clients.codex(events)] == ["reasoning", "message", "usage", "completed"]


# --- what newer versions send -------------------------------------------------------------------------------

SPAWN = namespace("collaboration", function("spawn", AGENT, defer_loading=True))
SHELL = {"command": ["ls"], "env": {}, "timeout_ms": 100, "type": "exec"}
TRIGGER = {"type": "compaction_trigger"}
SEARCH = {"call_id": "call_2", "execution": "client"}
OF_OTHERS: list[Json] = [
    {"type": "additional_tools", "role": "developer", "id": "at_1", "tools": [SPAWN]},
    message("user", "hi"),
    {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_1", "action": SHELL} | ENDED,
    {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
    {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "x"}} | ENDED,
    {"type": "tool_search_call", "arguments": {"query": "plan"}} | SEARCH,
    {"type": "tool_search_output", "tools": [function("plan", AGENT)]} | SEARCH | ENDED,
    message("user", "go on"),
]


@pytest.mark.bug("H09", "H11")
@pytest.mark.parametrize("name", ["plan", "spawn"])
def test_items_of_other_tools_are_told_and_what_they_load_can_be_called(server: Server, name: str) -> None:
    """Each of them was a 400, and the end of the session."""
    choice = {"type": "function", "name": name}
    if name == "spawn":
        choice["namespace"] = "collaboration"
    body = BODY | {"input": OF_OTHERS, "tool_choice": choice, "reasoning": {"effort": "none"}}
    events = turn(server, body | {"max_output_tokens": 60})
    (call,) = events[-1]["response"]["output"]
    assert {key: call.get(key) for key in choice} == choice | {"type": "function_call"}
    assert len(events[-1]["response"]["tools"]) == len(TOOLS)  # the response says what the request has said


@pytest.mark.bug("H08")
def test_a_compaction_trigger_makes_one_compaction(server: Server) -> None:
    """As codex-rs/core/src/compact_remote_v2.rs asks for it: more items than one, or none, are fatal."""
    said = {"role": "assistant", "content": "Tokyo is sunny today."}
    history = [*INPUT, said, message("user", "And Paris?")]
    events = turn(server, BODY | {"input": [*history, TRIGGER]})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    item = events[-2]["item"]
    response = events[-1]["response"]
    assert (item["type"], item.keys()) == ("compaction", {"id", "type", "encrypted_content"})
    assert (response["output"], response["status"]) == ([item], "completed")
    assert response["usage"]["output_tokens"] > 0
    laws.check_response(events)
    kept, go_on = [*INPUT, message("user", "And Paris?")], message("user", "go on")
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
    chained = {"input": [message("user", "go on")], "previous_response_id": warmed["id"]}
    for next_turn in ({"input": INPUT}, chained):
        usage = usage_of(server, body | next_turn)
        assert usage["input_tokens_details"]["cached_tokens"] >= 64
        assert usage["output_tokens"] > 0
