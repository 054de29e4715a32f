"""Responses that outlive their request, as clients meet them: over HTTP, with the tiny model.

What happens in which order is tested by the state machine in test_background.py; here is what clients are
told, by status, and chains, limits, and what a kill leaves. For the authority see api.py.
"""

import dataclasses
import itertools
import json
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import sse
from dialects.matchers import N_CHECKS
from helpers import laws
from helpers.asked import HI, NO_END, RESPONSES
from helpers.limits import PATIENCE_S
from helpers.serving import Json, Reply, Server, http_bytes, http_frames, serve, until
from request import items, params
from store import TERMINAL

RAISES = 666  # a seed that faulty_server.py takes for a fault
LONG: Json = HI | NO_END | {"max_output_tokens": 1900}  # seconds
BACKGROUND: Json = {"background": True}
STREAM: Json = {"stream": True}

WEATHER: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOKYO = "What is the weather in Tokyo?"
RESULT = '{"temperature": 21, "condition": "sunny"}'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as started:
        yield started
        assert "Task exception was never retrieved" not in started.log()


def path(id: str, *rest: str) -> str:
    return "/".join((RESPONSES, id, *rest))


def created(server: Server, body: Json) -> Json:
    reply = server.post(RESPONSES, body)
    assert reply.status == 200, reply.body
    return dict(reply.json)


def ended(server: Server, id: str) -> Json:
    """A response when it is terminal."""
    until(lambda: server.get(path(id)).json["status"] in TERMINAL, f"{id} is terminal")
    return dict(server.get(path(id)).json)


def is_idle(server: Server) -> bool:
    health = server.health()
    return (health["running"], health["waiting"], health["background"]) == (0, 0, 0)


def replay(server: Server, id: str, after: int | str | None = None) -> Reply:
    query = "" if after is None else f"&starting_after={after}"
    return server.get(path(id) + "?stream=true" + query)


def frames_of(body: bytes) -> list[bytes]:
    """A stream's frames, without its [DONE]."""
    *frames, last = [frame + b"\n\n" for frame in body.split(b"\n\n")[:-1]]
    assert last == sse.DONE
    return frames


def parsed(frame: bytes) -> Json:
    return dict(json.loads(sse.data(frame)))


def check_refusal(reply: Reply, message: str, param: str | None = None, code: str = "invalid_value") -> None:
    """Its status, and the whole body of it."""
    status = 404 if code == "response_not_found" else 400
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    assert (reply.status, reply.json) == (status, {"error": error})


# Every use of a response by its id.
USES = [("GET", ""), ("GET", "?stream=true"), ("GET", "?stream=true&starting_after=0")]
USES += [("POST", "/cancel"), ("DELETE", ""), ("GET", "/input_items")]


def check_not_found(server: Server, id: str) -> None:
    for method, use in USES:
        reply = server.request(method, path(id) + use, None)
        check_refusal(reply, f"Response with id '{id}' not found.", None, "response_not_found")


@contextmanager
def streaming(server: Server, body: Json) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The id of a response, and its frames as they come; leaving the block is leaving the stream."""
    with server.connect(http_bytes(RESPONSES, body | STREAM)) as connection:
        if not connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError("the server has gone")
        chunks = http_frames(connection)
        first = next(chunks)
        try:
            yield parsed(first)["response"]["id"], itertools.chain([first], chunks)
        finally:
            connection.shutdown(socket.SHUT_RDWR)


# --- mistral.rs 2114 ----------------------------------------------------------------------------------------

ORIGIN = {"model": "default", "input": "What is 2+2? Answer with just the number."}


@pytest.mark.bug("F01")
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_background_stream_unexpected_type(server: Server, background: bool, stream: bool) -> None:
    """The background handler waited for another kind of message than a stream sends, and failed with
    "Unexpected response type": github.com/EricLBuehler/mistral.rs/issues/1945. Here the four combinations
    differ in who reads, not in what there is.
    """
    reply = server.post(RESPONSES, {**ORIGIN, "background": background, "stream": stream})
    assert reply.status == 200
    if stream:
        events = [parsed(frame) for frame in frames_of(reply.body)]
        laws.check_response(events)
        first, last = events[0]["response"], events[-1]["response"]
        assert (events[1]["type"] == "response.queued") == background
    else:
        first, last = reply.json, reply.json
    if background:
        assert (first["status"], first["output"], first["usage"]) == ("queued", [], None)
        laws.check_body(first)
        last = ended(server, first["id"])
    assert server.get(path(first["id"])).json == last
    laws.check_body(last)
    assert (last["status"], last["background"]) == ("completed", background)
    assert last["usage"]["output_tokens"] > 0
    plain = created(server, ORIGIN)
    assert [item["content"] for item in last["output"]] == [item["content"] for item in plain["output"]]
    if not (background and stream):
        lacks = "stream" if background else "background"
        why = f"This response cannot be streamed because it was not created with {lacks}=true."
        check_refusal(replay(server, first["id"]), why, "stream")
    why = CANNOT_CANCEL["completed"] if background else "Cannot cancel a synchronous response."
    check_refusal(server.post(path(first["id"], "cancel"), {}), why)


@pytest.mark.bug("I05")
def test_background_must_survive_disconnect(server: Server) -> None:
    """The client leaves after three frames, and the run goes on: vllm-project/vllm#23927, its test."""
    with streaming(server, LONG | BACKGROUND | {"max_output_tokens": 400}) as (id_, frames):
        seen = list(itertools.islice(frames, 3))
        assert server.get(path(id_)).json["status"] == "in_progress"
    assert ended(server, id_)["status"] == "incomplete"
    assert frames_of(replay(server, id_).body)[:3] == seen


# --- resume -------------------------------------------------------------------------------------------------


@pytest.mark.bug("F09")
def test_starting_after_is_a_number(server: Server) -> None:
    """%D9%A3 is a three that Python's int() takes. Without stream it is not looked at."""
    id_ = created(server, HI)["id"]
    for after in ("-1", "", "1.0", "%2B1", "%D9%A3", "9" * 5000):
        refused = replay(server, id_, after)
        assert (refused.status, refused.json["error"]["param"]) == (400, "starting_after")
        assert server.get(path(id_) + f"?starting_after={after}").json["id"] == id_
    for word in ("maybe", "", "x" * 5000):  # bug: it meant no, and the client waited for events
        refused = server.get(path(id_) + f"?stream={word}")
        assert (refused.status, refused.json["error"]["param"]) == (400, "stream")
        assert len(refused.body) < 300
    assert server.get(path(id_) + "?stream=False").json["id"] == id_


# --- by status ----------------------------------------------------------------------------------------------

#   status          how to make a response of it
BODIES: dict[str, Json] = {
    "in_progress":  LONG,
    "completed":    HI,
    "incomplete":   HI | {"max_output_tokens": 5},
    "failed":       LONG | {"seed": RAISES},
}  # fmt: skip

CANNOT_CANCEL = {
    "completed":    "Cannot cancel a completed response.",
    "failed":       "Cannot cancel a failed response.",
    "incomplete":   "Cannot cancel a response in terminal state.",
}  # fmt: skip


@contextmanager
def response_of(server: Server, status: str) -> Iterator[str]:
    """The id of a background response of this status; it does not run any longer than that."""
    id_ = created(server, BODIES[status] | BACKGROUND)["id"]
    try:
        until(lambda: server.get(path(id_)).json["status"] == status, f"it is {status}")
        yield id_
    finally:
        server.post(path(id_, "cancel"), {})
        until(lambda: is_idle(server), "the engine is idle")


@pytest.mark.bug("F06", "F07")
@pytest.mark.parametrize("status", BODIES)
def test_what_cancel_and_delete_answer(server: Server, status: str) -> None:
    """Of a finished one, cancel said "Cannot cancel a synchronous response." (vllm-project/vllm#57999), 409
    (ogx-ai/ogx#5180) or 404; one that was deleted while it ran was stored again at its end (mistral.rs).
    """
    with response_of(server, status) as id_:
        if status not in TERMINAL:
            refused = server.request("DELETE", path(id_), None)
            check_refusal(refused, "Cannot delete an in-flight response.")
        before = server.get(path(id_)).json
        for _ in range(2):
            reply = server.post(path(id_, "cancel"), {})
            if status in CANNOT_CANCEL:
                check_refusal(reply, CANNOT_CANCEL[status])
                assert server.get(path(id_)).json == before
            else:
                assert (reply.status, reply.json["status"]) == (200, "cancelled")
                assert reply.json == server.get(path(id_)).json
                laws.check_body(reply.json)
        deleted = server.request("DELETE", path(id_), None)
        assert (deleted.status, deleted.json) == (200, {"id": id_, "object": "response", "deleted": True})
        check_not_found(server, id_)


def test_foreground_response_that_runs_is_its_clients_alone(server: Server) -> None:
    with streaming(server, LONG) as (id_, _):
        check_not_found(server, id_)
        reply = server.post(RESPONSES, HI | {"previous_response_id": id_})
        assert reply.json["error"]["code"] == "previous_response_not_found"
    until(lambda: is_idle(server), "the engine is idle")


# --- chains -------------------------------------------------------------------------------------------------


def listed(server: Server, id: str) -> list[Json]:
    page: Json = server.get(path(id, "input_items") + "?order=asc&limit=100").json
    assert not page["has_more"]
    return list(page["data"])


@pytest.mark.bug("F14")
def test_previous_response(server: Server) -> None:
    """An unknown id was ignored, one step of history was all there was, calls were not in it: mistral.rs at
    9e92262, gpt-oss at 7b58334, tetherto/qvac#2030. Here the chain is what was said, all of it, in order.
    """
    tools = {"tools": [WEATHER]}
    first = created(server, HI | tools | {"input": TOKYO, "instructions": "Be brief.", "background": True})
    first = ended(server, first["id"])
    thought, call = first["output"]
    assert (thought["type"], call["type"]) == ("reasoning", "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    second = created(server, HI | tools | {"input": [result], "previous_response_id": first["id"]})
    assert second["output"][-1]["content"][0]["text"].endswith("sunny in Tokyo.")
    assert (second["instructions"], second["previous_response_id"]) == (None, first["id"])
    items = listed(server, second["id"])
    kinds = [item["type"] for item in items]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output"]
    assert items[1:3] == [thought, call]
    assert items[0] == listed(server, first["id"])[0]

    # The same as if all had been sent at once: without the instructions, which are those of one turn.
    said = [{"role": "user", "content": TOKYO}, thought, call, result]
    at_once = created(server, HI | tools | {"input": said})
    details = {"input_tokens_details": at_once["usage"]["input_tokens_details"]}
    assert at_once["usage"] == second["usage"] | details
    assert [item["content"] for item in at_once["output"]] == [item["content"] for item in second["output"]]
    continued = HI | {"previous_response_id": second["id"]}
    assert server.request("DELETE", path(first["id"]), None).status == 200
    third = created(server, continued)  # a child stands for itself: its parent may go
    assert server.request("DELETE", path(second["id"]), None).status == 200
    assert listed(server, third["id"])[:-1] == [*items, *second["output"]]
    message = f"Previous response with id '{second['id']}' not found."
    reply = server.post(RESPONSES, continued)
    check_refusal(reply, message, "previous_response_id", "previous_response_not_found")


# --- what is kept -------------------------------------------------------------------------------------------


AS_IT_IS = '{ "output": [ ] }'
LISTED = '[{"id":  "msg_1"}]' + " " * 1000


@pytest.mark.bug("F11")
def test_what_is_stored_is_sent_as_it_is(tmp_path: Path) -> None:
    """All of a row of 62 MB was parsed, to write one member of it again: no client was served for 2.5 s.

    Ten minutes after its end a stream is gone, and so is all of a background response with store: false;
    what is stored can still be got: github.com/openai/openai-python/issues/2828.
    """
    file, temporary = tmp_path / "store.db", BACKGROUND | {"store": False}
    with serve("--store", str(file)) as server:
        replies = [server.post(RESPONSES, HI | STREAM | more) for more in (BACKGROUND, temporary)]
    kept, forgotten = (parsed(frames_of(reply.body)[0])["response"]["id"] for reply in replies)
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("UPDATE responses SET ended_at = ended_at - 610")
        db.execute("UPDATE texts SET response = ?, items = ?, request = '{}'", (AS_IT_IS, LISTED))
    with serve("--store", str(file), "--no-temporary") as server:
        assert server.get(path(kept)).body == AS_IT_IS.encode()
        assert server.get(path(kept, "input_items")).json["data"] == [{"id": "msg_1"}]
        why = "This response can no longer be streamed: its events have expired."
        check_refusal(replay(server, kept), why, "stream")
        assert server.get(path(forgotten)).status == 404
        strict = server.post(RESPONSES, HI | temporary).json["error"]  # as OpenAI answered at first
        assert (strict["code"], strict["param"]) == ("unsupported_parameter", "background")


JUNK = [{"zz": "zz"}] * 1000
ODD: Json = HI | {
    "logit_bias": {"5": 1},
    "tools": [WEATHER | {"zz": JUNK}],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "reasoning": {"effort": "none", "zz": JUNK},
    "text": {"format": {"type": "text", "zz": JUNK}},
    **dict.fromkeys(("user", "service_tier", "zz"), JUNK),
}


@pytest.mark.bug("I06")
@pytest.mark.parametrize("body", [ODD, ODD | {"input": [{"role": "user", "content": "hi"}, items.TRIGGER]}])
def test_what_is_kept_of_a_request_is_what_means_something(body: Json) -> None:
    """Its members that no table knows were held as long as it waited, and stored: 200 MB of 8 kB of gzip.

    What is left asks for the same after a restart, also for a compaction.
    """
    values = params.read(params.RESPONSES, body, {})
    asked = params.responses_request(values, [], values["input"])
    kept = items.new_row(asked, values, values["input"])
    assert "zz" not in kept.request_json
    again = params.from_responses(items.body_of(kept), {})
    assert (again.not_run, asked.not_run) == ((), ("zz",))  # the client has been told
    assert again == dataclasses.replace(asked, not_run=())


# --- the end of a process -----------------------------------------------------------------------------------


def costly(factor: int) -> Json:
    """A body whose schema takes too long to compile: a 400, after 0.25 s of a processor."""
    number = {"type": "integer", "multipleOf": factor, "minimum": -1e15, "maximum": 1e15}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    return HI | {"text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": schema}}}


def test_stop_waits_for_what_is_prepared() -> None:
    """Bug: a request whose grammar was being compiled, of which no engine knows yet, had no grace."""
    bodies = [costly(99_999_989 + 2 * i) for i in range(N_CHECKS + 4)]  # the last ones wait
    flags = ("--shutdown-grace", str(PATIENCE_S))
    with serve(*flags) as server, ThreadPoolExecutor(len(bodies)) as pool:
        replies = [pool.submit(server.post, RESPONSES, body) for body in bodies]
        until(lambda: server.health()["grammars_waiting"] >= 1, "one waits")
        server.interrupt()
        for reply in replies:
            assert reply.result().json["error"]["code"] == "invalid_json_schema"
        assert server.exit_status() == 0
