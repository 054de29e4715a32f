"""Codex as a client: its requests in the form that version 0.169 sends, and what it must get back.

The texts are shorter than Codex's, for the tiny model reads 2048 tokens; keys, types and order are its own.
"""

import json
from collections.abc import Iterator

import pytest

import sse
from helpers import clients, laws
from helpers.serving import Json, Server, serve

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
STRING = {"type": "string", "description": "What to run."}
COMMAND = {
    "type": "object",
    "properties": {"cmd": STRING},
    "required": ["cmd"],
    "additionalProperties": False,
}
AGENT = {"type": "object", "properties": {"target": {"type": "string"}}, "additionalProperties": False}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": PATCH}
TOOLS: list[Json] = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Runs.",
        "strict": False,
        "parameters": COMMAND,
    },
    {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR},
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Agents.",
        "tools": [
            {
                "type": "function",
                "name": "close_agent",
                "description": "Ends.",
                "strict": False,
                "parameters": AGENT,
            }
        ],
    },
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
    "model": "default",
    "stream": True,
    "input": INPUT,
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a1fe9f-7f5f-79b1-9a33-cf6a41d2aa23",
    "text": {"verbosity": "low"},
    "client_metadata": {"thread_id": "01a1fe9f", "x-codex-turn-metadata": '{"window_number":0}'},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as started:
        yield started


def turn(server: Server, body: Json) -> list[Json]:
    """The events of a turn, every one checked."""
    reply = server.post("/v1/responses", body, Accept="text/event-stream")
    assert reply.status == 200, reply.body
    events = [json.loads(frame.data) for frame in sse.Parser().feed(reply.body) if frame.data != "[DONE]"]
    laws.check_order(events)
    laws.check_statuses(events)
    for event in events:
        laws.STREAM_EVENT.validate_json(json.dumps(event), strict=True)
    return events


CUT = {"max_output_tokens": 40}  # not Codex's: the tiny model knows no end here


def test_a_turn(server: Server) -> None:
    events = turn(server, BODY | CUT)
    assert len(events) > 40
    assert [tool["type"] for tool in events[-1]["response"]["tools"]] == [tool["type"] for tool in TOOLS]
    assert "tool_search, web_search" in server.log()


@pytest.mark.bug("H03")
def test_the_next_turn_gives_all_back(server: Server) -> None:
    """Reasoning by its blob, the calls with their outputs, each under the id that it had."""
    simple = {"tools": [], "input": "What is 2+2? Answer with just the number."}
    first = turn(server, BODY | simple)
    thought, said = first[-1]["response"]["output"]
    assert [kind for kind, *_ in clients.codex(first)] == ["reasoning", "message", "usage", "completed"]
    call = {"type": "function_call", "status": "completed", "id": "fc_1", "call_id": "call_1"}
    agent = {"name": "close_agent", "namespace": "multi_agent_v1", "arguments": '{"target": "a1"}'}
    patch = {"type": "custom_tool_call", "status": "completed", "id": "ctc_1", "call_id": "call_2"}
    history = [
        *INPUT,
        {name: thought[name] for name in ("type", "id", "summary", "encrypted_content")},
        said,
        call | agent,
        patch | {"name": "apply_patch", "input": "*** Begin Patch\n*** Delete File: a\n*** End Patch"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "no such agent"},
        {"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "call_2", "output": "Exit code: 0"},
    ]
    given = turn(server, BODY | CUT | {"input": history})[-1]["response"]["usage"]["input_tokens"]
    forgotten = [item for item in history if item.get("type") != "reasoning"]
    assert turn(server, BODY | CUT | {"input": forgotten})[-1]["response"]["usage"]["input_tokens"] < given


@pytest.mark.parametrize("index", [0, 1, 2])
def test_any_of_its_tools_can_be_called(server: Server, index: int) -> None:
    """Its items are read by Codex's rules: names and namespaces as it sent them, the patch without JSON."""
    named = TOOLS[index] if index < 2 else TOOLS[2]["tools"][0] | {"namespace": "multi_agent_v1"}
    choice = {name: named[name] for name in ("type", "name", "namespace") if name in named}
    short = {"reasoning": {"effort": "none"}, "max_output_tokens": 60}
    output = turn(server, BODY | short | {"tool_choice": choice})[-1]["response"]["output"]
    (call,) = output
    assert {name: call.get(name) for name in choice if name != "type"} == {
        k: choice[k] for k in choice if k != "type"
    }
    if index == 1:
        assert call["type"] == "custom_tool_call"
        assert call["input"].startswith("*** Begin Patch\n*** ")
    else:
        assert call["arguments"].startswith("{")


def test_a_hosted_tool_cannot_be_forced(server: Server) -> None:
    reply = server.post("/v1/responses", BODY | {"tool_choice": {"type": "web_search"}})
    assert (reply.status, reply.json["error"]["code"]) == (400, "unsupported_parameter")
