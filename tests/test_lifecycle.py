"""Responses that outlive their request, as clients meet them: over HTTP, with the tiny model.

What happens in which order is tested by the state machine in test_background.py; here is what clients are
told, by status, and chains, limits, and what a kill leaves.
The authority is the OpenAI reference; where it is silent, the behaviour that Azure has probed:
github.com/Azure/azure-sdk-for-net, Azure.AI.AgentServer.Responses, docs/api-behaviour-contract.md.
"""

import dataclasses
import itertools
import json
import resource
import signal
import socket
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest

import sse
from background import MAX_RUNNING
from dialects.matchers import N_CHECKS
from helpers import laws
from helpers.serving import PATIENCE_S, TINY, Json, Reply, Server, http_bytes, http_frames, run, serve, until
from request import params
from store import TERMINAL

RESPONSES = "/v1/responses"
FAULTY = ("-m", "tests.helpers.faulty_server")
RAISES = 666  # a seed that faulty_server.py takes for a fault
N_SLOTS = MAX_RUNNING
KILLS = 3  # processes that test_kill_loses_nothing_that_was_accepted kills

HI: Json = {"model": "tiny", "input": "hi"}
HELLO = "Hello! How can I help you today?"
EOS = json.loads((TINY / "generation_config.json").read_text())["eos_token_id"]
ENDLESS: Json = {"logit_bias": {str(token_id): -100 for token_id in EOS}}
LONG: Json = HI | ENDLESS | {"max_output_tokens": 1900}  # seconds
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
    with serve(script=FAULTY) as started:
        yield started
        assert "Task exception was never retrieved" not in started.log()


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with server.sdk() as client:
        yield client


def path(id: str, *rest: str) -> str:
    return "/".join((RESPONSES, id, *rest))


def created(server: Server, body: Json) -> Json:
    reply = server.post(RESPONSES, body)
    assert reply.status == 200, reply.body
    made: Json = reply.json
    return made


def ended(server: Server, id: str) -> Json:
    """A response when it is terminal."""
    found: Json = {}

    def is_terminal() -> bool:
        found.update(server.get(path(id)).json)
        return found["status"] in TERMINAL

    until(is_terminal, f"{id} is terminal")
    return found


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
    (event,) = sse.Parser().feed(frame)
    found: Json = json.loads(event.data)
    return found


def error(message: str, param: str | None = None, code: str = "invalid_value") -> Json:
    """The whole body of a refusal."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


def not_found(id: str) -> tuple[int, Json]:
    return 404, error(f"Response with id '{id}' not found.", None, "response_not_found")


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
        kinds = [event["type"].removeprefix("response.") for event in events[:3]]
        queued = ["queued"] if background else []
        assert kinds[: len(queued) + 2] == ["created", *queued, "in_progress"]
    else:
        first, last = reply.json, reply.json
    if background:
        assert (first["status"], first["output"], first["usage"]) == ("queued", [], None)
        laws.check_body(first)
        last = ended(server, first["id"])
    assert server.get(path(first["id"])).json == last
    laws.check_body(last)
    assert (last["status"], last["background"]) == ("completed", background)
    assert last["output"][-1]["content"][0]["text"]
    assert last["usage"]["output_tokens"] > 0
    plain = created(server, ORIGIN)
    assert [item["content"] for item in last["output"]] == [item["content"] for item in plain["output"]]


@pytest.mark.bug("I05")
def test_background_must_survive_disconnect(server: Server) -> None:
    """The client leaves after three frames, and the run goes on: vllm-project/vllm#23927, its test."""
    with streaming(server, LONG | BACKGROUND | {"max_output_tokens": 500}) as (id_, frames):
        seen = list(itertools.islice(frames, 3))
        assert server.get(path(id_)).json["status"] == "in_progress"
    assert ended(server, id_)["status"] == "incomplete"
    assert frames_of(replay(server, id_).body)[:3] == seen


# --- resume -------------------------------------------------------------------------------------------------


@pytest.mark.bug("F09")
def test_starting_after_is_a_number(server: Server) -> None:
    """%D9%A3 is a three that Python's int() takes. Without stream it is not looked at."""
    whole = server.post(RESPONSES, HI | BACKGROUND | STREAM).body
    id_ = parsed(frames_of(whole)[0])["response"]["id"]
    for after in ("-1", "", "1.0", "%2B1", "%D9%A3", "9" * 5000):
        refused = replay(server, id_, after)
        assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_value")
        assert refused.json["error"]["param"] == "starting_after"
        assert server.get(path(id_) + f"?starting_after={after}").json["id"] == id_


def test_stream_in_a_query_is_true_or_false(server: Server) -> None:
    """Bug: any other word meant no, so that a client waited for events that never came."""
    id_ = created(server, HI | {"max_output_tokens": 1})["id"]
    for word in ("maybe", "", "x" * 5000):
        refused = server.get(path(id_) + f"?stream={word}")
        assert (refused.status, refused.json["error"]["param"]) == (400, "stream")
        assert len(refused.body) < 300
    for word in ("false", "False"):
        assert server.get(path(id_) + f"?stream={word}").json["id"] == id_


NO_STREAM = "This response cannot be streamed because it was not created with "


@pytest.mark.parametrize(
    ("mode", "lacks"), [({}, "background"), (STREAM, "background"), (BACKGROUND, "stream")]
)
def test_what_was_not_streamed_is_not_replayed(server: Server, mode: Json, lacks: str) -> None:
    reply = server.post(RESPONSES, HI | mode)
    made = parsed(frames_of(reply.body)[0])["response"] if mode == STREAM else reply.json
    for _ in range(2):  # while it runs, if it does, and at its end
        refused = replay(server, made["id"])
        assert (refused.status, refused.json) == (400, error(f"{NO_STREAM}{lacks}=true.", "stream"))
        ended(server, made["id"])


# --- by status ----------------------------------------------------------------------------------------------

# fmt: off
#   status          how to make a response of it
BODIES: dict[str, Json] = {
    "in_progress":  LONG,
    "completed":    HI,
    "incomplete":   HI | {"max_output_tokens": 5},
    "failed":       LONG | {"seed": RAISES},
    "cancelled":    LONG,
}

CANNOT_CANCEL = {
    "completed":    "Cannot cancel a completed response.",
    "failed":       "Cannot cancel a failed response.",
    "incomplete":   "Cannot cancel a response in terminal state.",
}
# fmt: on
SYNCHRONOUS = "Cannot cancel a synchronous response."


@contextmanager
def response_of(server: Server, status: str) -> Iterator[str]:
    """The id of a background response of this status; it does not run any longer than that."""
    id_ = created(server, BODIES[status] | BACKGROUND)["id"]
    try:
        if status == "cancelled":
            server.post(path(id_, "cancel"), {})
        until(lambda: server.get(path(id_)).json["status"] == status, f"it is {status}")
        yield id_
    finally:
        server.post(path(id_, "cancel"), {})
        until(lambda: is_idle(server), "the engine is idle")


@pytest.mark.bug("F06", "F07")
@pytest.mark.parametrize("status", BODIES)
def test_what_cancel_and_delete_answer(server: Server, status: str) -> None:
    """Of a finished one, cancel said "Cannot cancel a synchronous response." (vllm-project/vllm#57999), 409
    (ogx-ai/ogx#5180) or 404 (mistral.rs). One that was deleted while it ran was stored again at its end:
    mistral.rs, background_tasks.rs at 9e92262.
    """
    with response_of(server, status) as id_:
        if status not in TERMINAL:
            refused = server.request("DELETE", path(id_), None)
            assert (refused.status, refused.json) == (400, error("Cannot delete an in-flight response."))
        before = server.get(path(id_)).json
        for _ in range(2):
            reply = server.post(path(id_, "cancel"), {})
            if status in CANNOT_CANCEL:
                assert (reply.status, reply.json) == (400, error(CANNOT_CANCEL[status]))
                assert server.get(path(id_)).json == before
            else:
                assert (reply.status, reply.json["status"]) == (200, "cancelled")
                assert reply.json == server.get(path(id_)).json
                laws.check_body(reply.json)
        deleted = server.request("DELETE", path(id_), None)
        assert (deleted.status, deleted.json) == (200, {"id": id_, "object": "response", "deleted": True})
        for method, target in every_use(id_):
            gone = server.request(method, target, None)
            assert (gone.status, gone.json) == not_found(id_)


def every_use(id: str) -> list[tuple[str, str]]:
    """Of a response, by its id."""
    return [
        ("GET", path(id)),
        ("GET", path(id) + "?stream=true"),
        ("GET", path(id) + "?stream=true&starting_after=0"),
        ("POST", path(id, "cancel")),
        ("DELETE", path(id)),
        ("GET", path(id, "input_items")),
    ]


def test_foreground_response_that_has_ended(server: Server) -> None:
    made = created(server, HI)
    assert server.get(path(made["id"])).json == made
    reply = server.post(path(made["id"], "cancel"), {})
    assert (reply.status, reply.json) == (400, error(SYNCHRONOUS))


def test_foreground_response_that_runs_is_its_clients_alone(server: Server) -> None:
    with streaming(server, LONG) as (id_, _):
        for method, target in every_use(id_):
            reply = server.request(method, target, None)
            assert (reply.status, reply.json) == not_found(id_)
        reply = server.post(RESPONSES, HI | {"previous_response_id": id_})
        assert reply.json["error"]["code"] == "previous_response_not_found"
    until(lambda: is_idle(server), "the engine is idle")


def test_foreground_response_whose_client_left(server: Server) -> None:
    """It was gone for ever; "the cancelled non-background response becomes retrievable" (B17)."""
    with streaming(server, LONG) as (id_, frames):
        seen = [parsed(frame) for frame in itertools.islice(frames, 40)]
    until(lambda: server.get(path(id_)).status == 200, "it is stored")
    found = server.get(path(id_)).json
    laws.check_body(found)
    assert (found["status"], found["usage"], found["error"]) == ("cancelled", None, None)
    said = "".join(event["delta"] for event in seen if event["type"].endswith("reasoning_text.delta"))
    assert said
    assert found["output"][0]["content"][0]["text"].startswith(said)


def test_unknown_response(server: Server) -> None:
    for id_ in ("resp_unknown", "x" * 2000, "%00", "a%20b", "%F0%9F%A6%9C"):
        for method, target in every_use(id_):
            reply = server.request(method, target, None)
            assert (reply.status, reply.json["error"]["code"]) == (404, "response_not_found")


@pytest.mark.bug("F05")
def test_cancel_does_not_cancel(server: Server) -> None:
    """It set a flag that nothing read, the engine ran on, and the completion overwrote it: mistral.rs at
    9e92262. Here the engine has dropped it within a step, what was said stays, and the stream ends.
    """
    with streaming(server, LONG | BACKGROUND) as (id_, frames):
        seen = list(itertools.islice(frames, 60))
        reply = server.post(path(id_, "cancel"), {}).json
        until(lambda: is_idle(server), "the engine is idle")
        n_steps = server.health()["steps"]
        events = [parsed(frame) for frame in [*seen, *frames] if frame != sse.DONE]
    laws.check_response(events)
    assert events[-1]["response"] == reply
    assert [item["status"] for item in reply["output"]] == ["completed", "incomplete"]
    assert server.health()["steps"] == n_steps


# --- the official client ------------------------------------------------------------------------------------


def test_sdk_background(sdk: openai.OpenAI) -> None:
    made = sdk.responses.create(model="tiny", input="hi", background=True)
    assert (made.status, made.output, made.usage) == ("queued", [], None)
    until(lambda: sdk.responses.retrieve(made.id).status == "completed", "it is completed")
    found = sdk.responses.retrieve(made.id)
    assert (found.output_text, found.background) == (HELLO, True)
    assert found.usage
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a completed response\."):
        sdk.responses.cancel(made.id)
    sdk.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(made.id)


def test_sdk_resumes(sdk: openai.OpenAI) -> None:
    """By its plain stream, and by its helper, which asks for everything and shows what is behind the number:
    github.com/openai/openai-node/pull/1984.
    """
    with sdk.responses.create(model="tiny", input="hi", background=True, stream=True) as stream:
        seen = list(stream)
    assert seen[0].type == "response.created"
    id_ = seen[0].response.id
    for after in (0, 1, 17, len(seen) - 2, len(seen) - 1):
        with sdk.responses.retrieve(id_, stream=True, starting_after=after) as rest:
            assert list(rest) == seen[after + 1 :]
        with sdk.responses.stream(response_id=id_, starting_after=after) as helper:
            assert [e.sequence_number for e in helper] == [e.sequence_number for e in seen[after + 1 :]]
            assert helper.get_final_response().output_text == HELLO


def test_sdk_pages_through_the_input_of_a_chain(sdk: openai.OpenAI) -> None:
    last: Any = openai.omit
    for i in range(4):
        said: Any = [{"role": "user", "content": f"hi {i}"}, {"role": "user", "content": "hello"}]
        made = sdk.responses.create(model="tiny", input=said, previous_response_id=last, max_output_tokens=3)
        last = made.id
    everything = sdk.responses.input_items.list(last, order="asc", limit=100)
    forward = everything.data
    assert not everything.has_more
    kinds = [item.type for item in forward]
    assert kinds == ["message", "message", "reasoning"] * 3 + ["message", "message"]
    assert len({item.id for item in forward}) == 11
    for limit in (1, 3, 11, 12):
        assert list(sdk.responses.input_items.list(last, order="asc", limit=limit)) == forward
        assert list(sdk.responses.input_items.list(last, limit=limit)) == forward[::-1]
    after = str(forward[4].id)
    assert list(sdk.responses.input_items.list(last, order="asc", after=after)) == forward[5:]
    assert list(sdk.responses.input_items.list(last, after=after)) == forward[:4][::-1]


def test_sdk_counts_as_create_does(sdk: openai.OpenAI) -> None:
    """With and without a chain, and of a chain alone."""
    first = sdk.responses.create(model="tiny", input="hi", instructions="Be brief.")
    assert first.usage
    counted = sdk.responses.input_tokens.count(model="tiny", input="hi", instructions="Be brief.")
    assert counted.input_tokens == first.usage.input_tokens
    assert counted.object == "response.input_tokens"
    second = sdk.responses.create(model="tiny", input="hello", previous_response_id=first.id)
    assert second.usage
    chained = sdk.responses.input_tokens.count(input="hello", previous_response_id=first.id)
    assert chained.input_tokens == second.usage.input_tokens
    alone = sdk.responses.input_tokens.count(previous_response_id=first.id)
    said: Any = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output)]
    assert alone == sdk.responses.input_tokens.count(input=said)


def test_sdk_compacts(sdk: openai.OpenAI) -> None:
    """User messages stay, the rest is one item, which later requests, chains and compactions take."""
    first = sdk.responses.create(model="tiny", input="hi")
    compacted = sdk.responses.compact(model="tiny", previous_response_id=first.id)
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.output_tokens > 0
    items: list[Any] = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    hello: Any = {"role": "user", "content": "hello"}
    second = sdk.responses.create(model="tiny", input=[*items, hello])
    listed = sdk.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == ["message", "compaction", "message"]
    third = sdk.responses.create(model="tiny", input="hi", previous_response_id=second.id)
    assert third.status == "completed"
    again = sdk.responses.compact(model="tiny", input="hello", previous_response_id=third.id)
    assert [item.type for item in again.output] == ["message"] * 4 + ["compaction"]


# --- chains -------------------------------------------------------------------------------------------------


def listed(server: Server, id: str) -> list[Json]:
    page: Json = server.get(path(id, "input_items") + "?order=asc&limit=100").json
    assert not page["has_more"]
    items: list[Json] = page["data"]
    return items


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
    assert at_once["usage"] == second["usage"] | {
        "input_tokens_details": at_once["usage"]["input_tokens_details"]
    }
    assert [item["content"] for item in at_once["output"]] == [item["content"] for item in second["output"]]
    for turn in (first["id"], second["id"]):
        assert server.request("DELETE", path(turn), None).status == 200
        third = HI | {"input": "hi", "previous_response_id": second["id"]}
        if turn == first["id"]:  # a child stands for itself: its parent may go
            third_made = created(server, third)
            assert listed(server, third_made["id"])[:-1] == [*items, *second["output"]]
    reply = server.post(RESPONSES, third)
    message = f"Previous response with id '{second['id']}' not found."
    expected = error(message, "previous_response_id", "previous_response_not_found")
    assert (reply.status, reply.json) == (400, expected)
    assert listed(server, third_made["id"])[:-1] == [*items, *second["output"]]


def test_chain_behind_one_that_was_cut(server: Server) -> None:
    for status in ("incomplete", "cancelled"):
        with response_of(server, status) as id_:
            made = created(server, HI | {"input": "hello", "previous_response_id": id_})
            assert made["status"] == "completed"


def test_chain_behind_one_that_runs(server: Server) -> None:
    with response_of(server, "in_progress") as id_:
        reply = server.post(RESPONSES, HI | {"previous_response_id": id_})
        message = f"Previous response with id '{id_}' has not ended yet."
        assert (reply.status, reply.json) == (400, error(message, "previous_response_id"))


def test_item_references(server: Server) -> None:
    """As the Vercel AI SDK sends what was said before (packages/openai,
    convert-to-openai-responses-input.ts), and in the shortest form that the SDK has.
    """
    tools = {"tools": [WEATHER]}
    asked = {"role": "user", "content": [{"type": "input_text", "text": TOKYO}]}
    thought, call = created(server, HI | tools | {"input": [asked]})["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    whole = created(server, HI | tools | {"input": [asked, thought, call, result]})
    references = [{"type": "item_reference", "id": thought["id"]}, {"id": call["id"]}]
    second = created(server, HI | tools | {"input": [asked, *references, result]})
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert listed(server, second["id"])[1:3] == [thought, call]
    for unknown in ("\0", thought["id"] + "0"):
        reply = server.post(RESPONSES, HI | {"input": [asked, {"type": "item_reference", "id": unknown}]})
        message = f"Item with id '{unknown}' not found."
        assert (reply.status, reply.json) == (404, error(message, "input[1].id", "item_not_found"))


def test_what_is_wrong_in_itself_is_told_before_the_chain_is_looked_up(server: Server) -> None:
    reply = server.post(RESPONSES, HI | {"temperature": 9, "previous_response_id": "resp_unknown"})
    assert (reply.status, reply.json["error"]["param"]) == (400, "temperature")


# --- what is kept -------------------------------------------------------------------------------------------


@pytest.mark.bug("F12")
def test_streamed_response_not_stored(server: Server) -> None:
    """It was stored when its body had been read to the end, which not every client does:
    github.com/EricLBuehler/mistral.rs/issues/1946. Who has seen the last event finds it.
    """
    for _ in range(10):
        with streaming(server, HI) as (id_, frames):
            for frame in frames:
                if b"response.completed" in frame:
                    reply = server.get(path(id_))
                    assert (reply.status, reply.json) == (200, parsed(frame)["response"])
                    break


def test_what_a_full_disk_does_not_take_is_not_told_as_stored(tmp_path: Path) -> None:
    """It was answered with `store: true`, and then a 404."""
    with serve("--store", str(tmp_path / "store.db"), script=FAULTY) as server:
        assert created(server, HI)["store"] is True
        unlimited = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        made = created(server, HI)
        streamed = parsed(frames_of(server.post(RESPONSES, HI | STREAM).body)[-1])["response"]
        for response in (made, streamed):
            assert (response["status"], response["store"]) == ("completed", False)
            assert server.get(path(response["id"])).status == 404
        refused = server.post(RESPONSES, HI | BACKGROUND)
        assert (refused.status, refused.json["error"]["code"]) == (503, "server_is_overloaded")
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, unlimited)
        again = created(server, HI)
        assert again["store"] is True
        assert server.get(path(again["id"])).json == again


@dataclass
class Left:
    """A store that a process has left, in which time has passed since; and the server that has it now."""

    server: Server
    file: Path
    streams: dict[str, bytes]  # what clients of the first process have got, by name
    responses: dict[str, Json]  # at their ends
    stored: tuple[Any, ...]  # of the odd one: request, items, response, and how many bytes they are

    def replay(self, name: str, after: int | None = None) -> Reply:
        return replay(self.server, self.responses[name]["id"], after)

    def get(self, name: str) -> Reply:
        return self.server.get(path(self.responses[name]["id"]))


JUNK = [{"zz": "zz"}] * 1000
TOOL = WEATHER | {"zz": JUNK}
MEANT: Json = {"logit_bias": {"5": 1}, "stop": "###", "top_k": -1, "metadata": {"a": "b"}}
ODD: Json = MEANT | {
    "model": "tiny",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": TOKYO, "zz": JUNK}]}],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": TOOL["name"]},
    "reasoning": {"effort": "none", "zz": JUNK},
    "text": {"format": {"type": "text", "zz": JUNK}},
    "stream_options": {"zz": JUNK},
    "user": JUNK,
    "service_tier": JUNK,
    "zz": JUNK,
}
TEMPORARY = {"store": False}
AS_IT_IS = '{ "output": [ ] }'
LISTED = '[{"id":  "msg_1"}]' + " " * 1000
AGED = "UPDATE responses SET ended_at = ended_at - {} WHERE id = ?"
GAP = "DELETE FROM events WHERE number = 5 AND response_id = ?"
CHANGED = f"UPDATE responses SET response = '{AS_IT_IS}', items = '{LISTED}', request = '{{}}' WHERE id = ?"

# fmt: off
#   name                created with  what happens to it in the store
LEFT: dict[str, tuple[Json, str]] = {
    "young":            ({},          AGED.format(590)),
    "young, temporary": (TEMPORARY,   AGED.format(590)),
    "old":              ({},          AGED.format(610)),
    "old, temporary":   (TEMPORARY,   AGED.format(610)),
    "gap":              ({},          GAP),
    "changed":          ({},          CHANGED),
    "odd":              (ODD,         ""),
}
# fmt: on


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    file = tmp_path_factory.mktemp("left") / "store.db"
    with serve("--store", str(file), script=FAULTY) as server:
        streams = {
            name: server.post(RESPONSES, HI | BACKGROUND | STREAM | more).body
            for name, (more, _) in LEFT.items()
        }
    responses = {name: parsed(frames_of(stream)[-1])["response"] for name, stream in streams.items()}
    with closing(sqlite3.connect(file)) as db, db:
        for name, (_, change) in LEFT.items():
            if change:
                db.execute(change, (responses[name]["id"],))
        columns = "SELECT request, items, response, row_bytes FROM responses WHERE id = ?"
        (stored,) = db.execute(columns, (responses["odd"]["id"],))
    with serve("--store", str(file), "--no-temporary", script=FAULTY) as server:
        yield Left(server, file, streams, responses, stored)


@pytest.mark.bug("F11")
def test_resume_window_expired(left: Left) -> None:
    """Ten minutes after its end a stream is gone, and so is all of a background response with store: false;
    what is stored can still be got: github.com/openai/openai-python/issues/2828.
    """
    for name in ("young", "young, temporary"):
        assert left.replay(name).body == left.streams[name]
        assert left.get(name).json == left.responses[name]
    assert left.get("old").json == left.responses["old"]
    message = "This response can no longer be streamed: its events have expired."
    assert (left.replay("old").status, left.replay("old").json) == (400, error(message, "stream"))
    assert left.get("old, temporary").status == 404
    child = HI | {"previous_response_id": left.responses["old, temporary"]["id"]}
    assert left.server.post(RESPONSES, child).json["error"]["code"] == "previous_response_not_found"


@pytest.mark.bug("F10")
def test_resume_gap_unnoticed(left: Left) -> None:
    """Events lost in a stopped store: the gap was sent, and each number after it was off. A client that has
    seen more than there is gets nothing, and GET without `stream` says how the response has ended.
    """
    for after in (None, 2, 7):
        refused = left.replay("gap", after)
        message = "This response can no longer be streamed: not all of its events are in the store."
        assert (refused.status, refused.json) == (400, error(message, "stream"))
    assert left.get("gap").json["status"] == "completed"
    assert left.replay("young", 399).body == sse.DONE


def test_what_is_stored_is_sent_as_it_is(left: Left) -> None:
    """All of a row of 62 MB was parsed, to write one member of it again: no client was served for 2.5 s."""
    assert left.get("changed").body == AS_IT_IS.encode()
    page = left.server.get(path(left.responses["changed"]["id"], "input_items")).json
    assert (page["data"], page["has_more"]) == ([{"id": "msg_1"}], False)


@pytest.mark.bug("I06")
def test_what_is_kept_of_a_request_is_what_means_something(left: Left) -> None:
    """Its members that no table knows were held as long as it waited, and stored: 200 MB of 8 kB of gzip."""
    request, items, response, n_bytes = left.stored
    assert "zz" not in request + items + response
    assert n_bytes < 10_000
    again = params.from_responses(json.loads(request) | {"input": json.loads(items)}, {})
    asked = params.from_responses(ODD | BACKGROUND | STREAM, {})
    assert (again.not_run, asked.not_run) == ((), ("zz",))  # the client has been told
    assert again == dataclasses.replace(asked, not_run=())


def test_one_server_a_store(left: Left, tmp_path: Path) -> None:
    """A second one would end what the first still runs; a file that is no store is left alone."""
    text = tmp_path / "letter.txt"
    text.write_text("Dear Sir or Madam, " * 99)
    for file, why in ((left.file, "database is locked"), (text, "file is not a database")):
        second = run("server.py", "--model", str(TINY), "--port", "0", "--store", str(file))
        last = second.stderr.splitlines()[-1]  # after what computes
        assert (second.returncode, last) == (2, f"error: --store {file}: {why}")
    assert text.read_text().startswith("Dear Sir")


def test_background_that_may_not_be_stored_is_refused_on_demand(left: Left) -> None:
    """The strict way, as OpenAI answered at first."""
    refused = left.server.post(RESPONSES, HI | BACKGROUND | TEMPORARY).json["error"]
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "background")


@pytest.mark.bug("F13")
def test_store_grows_forever() -> None:
    """A cleanup function existed, and nothing called it: mistral.rs, cached_responses.rs;
    github.com/vllm-project/vllm/issues/48275.
    """
    with serve("--store-max-responses", "3", script=FAULTY) as server:
        ids = [created(server, HI | {"max_output_tokens": 1})["id"] for _ in range(6)]
        until(lambda: server.get(path(ids[2])).status == 404, "the oldest are forgotten")
        assert [server.get(path(id_)).status for id_ in ids] == [404] * 3 + [200] * 3


# --- refusals -----------------------------------------------------------------------------------------------

LONG_TEXT = "word " * 3000
MISSING, VALUE = "missing_required_parameter", "invalid_value"

# fmt: off
#   change to a good request                   status param                   code
REFUSED: list[tuple[Json, int, str | None, str]] = [
    ({"model": "gpt-5"},                       404,    "model",                "model_not_found"),
    ({"input": []},                            400,    "input",                MISSING),
    ({"input": LONG_TEXT},                     400,    None,                   "context_length_exceeded"),
    ({"temperature": 3},                       400,    "temperature",          VALUE),
    ({"tools": [{"type": "function"}]},        400,    "tools[0].name",        MISSING),
    ({"previous_response_id": "resp_unknown"}, 400,    "previous_response_id", "previous_response_not_found"),
    ({"conversation": "conv_1"},               400,    "conversation",         "unsupported_parameter"),
]
# fmt: on


@pytest.mark.bug("F08")
@pytest.mark.parametrize(("change", "status", "param", "code"), REFUSED)
def test_validation_after_200(
    server: Server, change: Json, status: int, param: str | None, code: str
) -> None:
    """In the background the request was parsed after the 200, and failed then: mistral.rs at 9e92262. Here
    every mode refuses alike, and nothing is left of it.
    """
    n_steps = server.health()["steps"]
    for mode in ({}, STREAM, BACKGROUND, BACKGROUND | STREAM):
        reply = server.post(RESPONSES, HI | mode | change)
        refused = reply.json["error"]
        assert (reply.status, refused["param"], refused["code"]) == (status, param, code), refused["message"]
    assert is_idle(server)
    assert server.health()["steps"] == n_steps


def test_input_items_refuses(server: Server) -> None:
    id_ = created(server, HI | {"max_output_tokens": 1})["id"]
    bad = ["limit=0", "limit=101", "limit=", "limit=" + "9" * 5000, "order=random", "after=msg_unknown"]
    for query in bad:
        refusal = server.get(path(id_, "input_items") + "?" + query).json["error"]
        assert (refusal["param"], refusal["code"]) == (query.partition("=")[0], "invalid_value")


# --- the end of a process -----------------------------------------------------------------------------------


def test_stop_with_background_work(tmp_path: Path) -> None:
    """What runs may finish for a while, then it fails with a last event; what waits is run by the next."""
    flags = ("--store", str(tmp_path / "store.db"), "--shutdown-grace", "0.5")
    with serve(*flags, script=FAULTY) as server, ExitStack() as stack:
        short = created(server, HI | ENDLESS | BACKGROUND | {"max_output_tokens": 20})["id"]
        reader = stack.enter_context(streaming(server, LONG | BACKGROUND))
        running = [created(server, LONG | BACKGROUND)["id"] for _ in range(N_SLOTS - 1)]
        queued = [created(server, HI | BACKGROUND)["id"] for _ in range(2)]
        trigger = {"input": [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}]}
        compaction = created(server, HI | BACKGROUND | trigger)["id"]
        until(lambda: server.get(path(short)).json["status"] == "incomplete", "the short one has ended")
        assert server.get(path(queued[0])).json["status"] == "queued"
        server.interrupt()
        seen = [frame for frame in reader[1] if frame != sse.DONE]
        assert server.exit_status() == 0
        assert "Traceback" not in server.log()
    laws.check_response([parsed(frame) for frame in seen])
    last = parsed(seen[-1])["response"]
    assert (last["status"], last["error"]["message"]) == ("failed", "The server is shutting down.")
    with serve(*flags, script=FAULTY) as server:
        assert replay(server, reader[0]).body == b"".join(seen) + sse.DONE
        assert server.get(path(reader[0])).json == last
        assert server.get(path(short)).json["status"] == "incomplete"
        for id_ in running:
            assert ended(server, id_)["error"]["message"] == last["error"]["message"]
        for id_ in queued:
            assert ended(server, id_)["output"][-1]["content"][0]["text"] == HELLO
        assert [item["type"] for item in ended(server, compaction)["output"]] == ["compaction"]


def costly(factor: int) -> Json:
    """A body whose schema takes too long to compile: a 400, after 0.25 s of a processor."""
    number = {"type": "integer", "multipleOf": factor, "minimum": -1e15, "maximum": 1e15}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    return HI | {"text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": schema}}}


@pytest.mark.parametrize("over", ["HTTP", "a WebSocket"])
def test_stop_waits_for_what_is_prepared(over: str) -> None:
    """Bug: a request whose grammar was being compiled, of which no engine knows yet, had no grace."""
    bodies = [costly(99_999_989 + 2 * i) for i in range(N_CHECKS + 4)]  # the last ones wait
    flags = ("--shutdown-grace", str(PATIENCE_S))
    with serve(*flags, script=FAULTY) as server, ThreadPoolExecutor(len(bodies)) as pool, ExitStack() as held:
        if over == "HTTP":
            replies = [pool.submit(server.post, "/v1/responses", body) for body in bodies]
        else:
            client = held.enter_context(server.websocket())
            for i, body in enumerate(bodies):
                client.send(json.dumps(body | {"type": "response.create", "stream_id": str(i)}))
        until(lambda: server.health()["grammars_waiting"] >= 1, "one waits")
        server.interrupt()
        if over == "HTTP":
            answers = [reply.result().json for reply in replies]
        else:
            answers = [json.loads(client.recv(PATIENCE_S)) for _ in bodies]
        for answer in answers:
            assert answer["error"]["code"] == "invalid_json_schema"
        assert server.exit_status() == 0


class Load:
    """Clients that start background responses until the server has gone; they remember what it told them."""

    def __init__(self, server: Server, chance: Random) -> None:
        self.statuses: dict[str, str] = {}  # of every response that got a 200, as it was seen last
        self.frames: dict[str, list[bytes]] = {}  # of those with stream: true, what was seen
        self._server = server
        self._seeds = [chance.random() for _ in range(4)]

    def run_until_killed_after(self, seconds: float) -> None:
        threads = [threading.Thread(target=self._client, args=(Random(seed),)) for seed in self._seeds]
        killer = threading.Timer(seconds, self._server.process.kill)
        for thread in [*threads, killer]:
            thread.start()
        for thread in [*threads, killer]:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _client(self, chance: Random) -> None:
        bodies = [HI, HI | {"max_output_tokens": 5}, LONG | {"max_output_tokens": 120}]
        try:
            for _ in range(12):
                body = chance.choice(bodies) | BACKGROUND
                if chance.random() < 0.5:
                    self._stream(body, chance.randrange(40))
                else:
                    self._poll(body, chance.randrange(4))
        except (OSError, HTTPException, ValueError, StopIteration):  # it was killed
            assert self._server.process.wait(PATIENCE_S) == -signal.SIGKILL

    def _stream(self, body: Json, n_frames: int) -> None:
        with streaming(self._server, body) as (id_, frames):
            self.statuses[id_] = "queued"
            self.frames[id_] = []
            for frame in itertools.islice(frames, n_frames + 1):
                if frame.endswith(b"\n\n") and frame != sse.DONE:
                    self.frames[id_].append(frame)
                    self.statuses[id_] = parsed(frame).get("response", self._known(id_))["status"]

    def _poll(self, body: Json, n_polls: int) -> None:
        id_ = created(self._server, body)["id"]
        self.statuses[id_] = "queued"
        for _ in range(n_polls):
            self.statuses[id_] = self._server.get(path(id_)).json["status"]

    def _known(self, id: str) -> Json:
        return {"status": self.statuses[id]}


def test_kill_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    """kill -9 under load: what got a 200 ends, what was seen stays seen, and the file is whole."""
    for seed in range(KILLS):
        kill_once(tmp_path / f"{seed}.db", Random(seed))


def kill_once(file: Path, chance: Random) -> None:
    with serve("--store", str(file), script=FAULTY) as server:
        load = Load(server, chance)
        load.run_until_killed_after(chance.uniform(0.05, 1))
    with serve("--store", str(file), script=FAULTY) as server:
        last = {id_: ended(server, id_) for id_ in load.statuses}
        replayed = {id_: replay(server, id_).body for id_ in load.frames}
        # A response may be accepted and stored, and its client killed with the server before it reads the id.
        until(lambda: server.health()["background"] == 0, "the responses that no client knows of have ended")
    for id_, status in load.statuses.items():
        assert status not in TERMINAL or last[id_]["status"] == status
    for id_, seen in load.frames.items():
        assert replayed[id_].startswith(b"".join(seen))
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        rows = {id_: json.loads(text) for id_, text in db.execute("SELECT id, response FROM responses")}
        for id_, response in rows.items():
            kept = "SELECT number, frame FROM events WHERE response_id = ? ORDER BY number"
            frames = dict(db.execute(kept, (id_,)).fetchall())
            assert list(frames) == list(range(len(frames)))
            check_log([parsed(frame) for frame in frames.values()], response)
            assert id_ not in load.frames or replayed[id_] == b"".join(frames.values()) + sse.DONE
    assert rows.keys() >= load.statuses.keys()


def check_log(events: list[Json], response: Json) -> None:
    """One whole log: numbered, with one terminal event, the last, and what was interrupted is closed."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["response"]["status"] in TERMINAL for event in events if "response" in event][-2:] == [
        False,
        True,
    ]
    laws.check_statuses(events)
    laws.check_order(events)
    assert events[-1]["response"] == response
    if response["status"] == "failed":
        assert response["error"] == {"code": "server_error", "message": "interrupted by a restart"}
