"""The Responses API over a WebSocket, against the real server: the scenarios of Open Responses, the official
client, and what a client can do wrong.

The names of the first tests are those of openresponses/openresponses, src/lib/compliance-tests.ts.
"""

import asyncio
import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from helpers import laws
from helpers.serving import Json, Server, serve
from helpers.upstream import head, upstream
from service.websocket import MAX_LANES, MAX_TURNS
from test_lifecycle import ENDLESS, FAULTY, HELLO, HI, LONG, RAISES

SLOW = 668  # the seed of faulty_server.py for a hundredth of a second a token
ASKED: Json = HI | {"store": False, "temperature": 0}
LAST = ("response.completed", "response.incomplete", "response.failed", "error")
REPLAYS = Path(__file__).parents[1] / "replays"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--max-body", "1M", "--reader-timeout", "2", script=FAULTY) as started:
        yield started
        for line in ("ERROR websocket", "ERROR uvicorn", "Task exception was never retrieved"):
            assert line not in started.log()


@pytest.fixture
def client(server: Server) -> Iterator[ClientConnection]:
    with server.websocket() as connection:
        yield connection


def send(client: ClientConnection, body: Json) -> None:
    client.send(json.dumps({"type": "response.create"} | body))


def received(client: ClientConnection, lane: str | None = None) -> list[Json]:
    """The messages of a turn, to its last one; of all lanes, unless one is named."""
    messages: list[Json] = []
    while not messages or messages[-1]["type"] not in LAST:
        message = json.loads(client.recv(timeout=30))
        if lane is None or message.get("stream_id") == lane:
            messages.append(message)
    return messages


def turn(client: ClientConnection, body: Json) -> list[Json]:
    send(client, body)
    return received(client)


def answer(client: ClientConnection, body: Json) -> Json:
    """The response of a turn that all goes well with."""
    *_, last = turn(client, body)
    assert last["type"] in ("response.completed", "response.incomplete"), last
    response: Json = last["response"]
    return response


def refusal(client: ClientConnection, body: Json) -> tuple[int, str]:
    """Status and code of the error that a turn gets at once."""
    (error,) = turn(client, body)
    assert error["type"] == "error"
    assert error["error"].keys() == {"message", "type", "param", "code"}
    return error["status"], error["error"]["code"]


def close_code(client: ClientConnection) -> int:
    """The code of the close that comes behind what the server still sends."""
    with suppress(ConnectionClosed):
        while True:
            client.recv(timeout=30)
    return client.protocol.close_code or 0


def is_idle(server: Server) -> bool:
    health = server.health()
    return bool(health["running"] == health["waiting"] == 0)


NOT_FOUND = (400, "previous_response_not_found")

# --- the scenarios of Open Responses ------------------------------------------------------------------------


def test_websocket_response(client: ClientConnection) -> None:
    events = turn(client, ASKED)
    laws.check_order(events)
    laws.check_statuses(events)
    for event in events:
        laws.STREAM_EVENT.validate_json(json.dumps(event), strict=True)
    assert events[-1]["response"]["output"][-1]["content"][0]["text"] == HELLO


def test_websocket_sequential_responses(client: ClientConnection) -> None:
    """Both are sent at once; each is numbered from 0, and the second begins when the first has ended."""
    send(client, ASKED)
    send(client, ASKED)
    first, second = received(client), received(client)
    for events in (first, second):
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert first[-1]["response"]["id"] != second[0]["response"]["id"]


def test_websocket_continuation(client: ClientConnection) -> None:
    first = answer(client, ASKED)
    more = ASKED | {"input": "Who are you?"}
    second = answer(client, more | {"previous_response_id": first["id"]})
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > answer(client, more)["usage"]["input_tokens"]


def test_websocket_reconnect_store_false_recovery(server: Server, client: ClientConnection) -> None:
    first = answer(client, ASKED)
    with server.websocket() as other:
        assert refusal(other, ASKED | {"previous_response_id": first["id"]}) == NOT_FOUND
        assert answer(other, ASKED)["status"] == "completed"


def test_websocket_previous_response_not_found(client: ClientConnection) -> None:
    assert refusal(client, ASKED | {"previous_response_id": "resp_openresponses_missing"}) == NOT_FOUND


ORPHAN: Json = {"input": [{"type": "function_call_output", "call_id": "call_missing", "output": "none"}]}


def test_websocket_failed_continuation_evicts_cache(client: ClientConnection) -> None:
    first = answer(client, ASKED)
    chained = ASKED | {"previous_response_id": first["id"]}
    assert refusal(client, chained | ORPHAN) == (400, "invalid_value")
    assert refusal(client, chained) == NOT_FOUND


def test_websocket_failed_generation_evicts_cache(client: ClientConnection) -> None:
    first = answer(client, ASKED)
    chained = ASKED | {"previous_response_id": first["id"]}
    *_, last = turn(client, chained | {"seed": RAISES, "temperature": 1} | ENDLESS)
    assert last["type"] == "response.failed"
    assert refusal(client, chained) == NOT_FOUND


def test_websocket_compact_new_chain(server: Server, client: ClientConnection) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello!"}]
    compacted = server.post("/v1/responses/compact", {"model": "tiny", "input": said}).json["output"]
    more = [*compacted, {"role": "user", "content": "Who are you?"}]
    assert answer(client, ASKED | {"input": more})["status"] == "completed"


def test_websocket_generate_false(client: ClientConnection) -> None:
    """What Codex sends first: the prompt is computed, and the next turn finds it in the cache."""
    story = ASKED | {"input": "Once upon a time. " * 40}
    events = turn(client, story | {"generate": False})
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    warm = events[-1]["response"]
    assert (warm["output"], warm["usage"]["output_tokens"]) == ([], 0)
    more = {"previous_response_id": warm["id"], "input": "hi", "max_output_tokens": 16}
    assert answer(client, story | more)["usage"]["input_tokens_details"]["cached_tokens"] >= 64


def test_a_compaction_is_asked_for_in_a_turn(client: ClientConnection) -> None:
    trigger = [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}]
    compacted = answer(client, ASKED | {"input": trigger})
    assert [item["type"] for item in compacted["output"]] == ["compaction"]
    chained = ASKED | {"previous_response_id": compacted["id"]}
    assert answer(client, chained)["status"] == "completed"


# --- the official client ------------------------------------------------------------------------------------


def test_sdk(server: Server) -> None:
    with server.sdk() as sdk, sdk.responses.connect() as connection:
        previous: str | None = None
        for _ in range(3):
            connection.response.create(
                model="tiny", input="hi", store=False, temperature=0, previous_response_id=previous
            )
            for event in connection:
                if event.type == "response.completed":
                    previous = event.response.id
                    assert event.response.output
                    break
                assert event.type != "error", event


async def lanes_of_the_sdk(server: Server) -> None:
    sdk = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any")
    async with sdk, sdk.responses.connect() as connection:
        await connection.response.create(
            model="tiny", input="hi", stream_id="a", previous_response_id="resp_1"
        )
        event = await connection.recv()
        assert event.type == "error"
        assert (event.stream_id, event.status) == ("a", 400)
        assert event.error.code == "previous_response_not_found"
        for lane in ("a", "b"):
            await connection.response.create(model="tiny", input="hi", stream_id=lane, temperature=0)
        texts = {"a": "", "b": ""}
        n_completed = 0
        while n_completed < 2:
            event = await connection.recv()
            if event.type == "response.output_text.delta":
                texts[event.stream_id or ""] += event.delta
            n_completed += event.type == "response.completed"
        assert texts == {"a": HELLO, "b": HELLO}


def test_async_sdk(server: Server) -> None:
    asyncio.run(lanes_of_the_sdk(server))


# --- the law: one stream of events --------------------------------------------------------------------------

DRAWN = re.compile(r'"(resp|msg|rs|fc|ctc|call)_[0-9a-zA-Z]+"|"(created_at|completed_at)":\d+')


def drawn_apart(text: str) -> str:
    """The text of an event without what is drawn for each request."""
    return DRAWN.sub("*", text)


def test_a_turn_is_the_stream_of_http(server: Server, client: ClientConnection) -> None:
    same_as_http(server, client, ASKED)


@pytest.fixture(scope="module")
def relayed() -> Iterator[tuple[Server, Any]]:
    """A server that asks an upstream, which says what a test wants it to."""
    with upstream(lambda _: None) as worker, serve("--upstream", worker.url, model=None) as front:
        yield front, worker


@pytest.mark.parametrize("name", sorted(path.stem for path in REPLAYS.glob("completions-deltas-*.toml")))
def test_a_turn_is_the_stream_of_http_in_each_replay(relayed: tuple[Server, Any], name: str) -> None:
    """Whatever an upstream sends, byte for byte."""
    front, worker = relayed
    replay = tomllib.loads((REPLAYS / f"{name}.toml").read_text(encoding="utf-8"))
    said = "".join(replay["input"]).encode()
    content_type = replay.get("options", {}).get("content_type") or "text/event-stream"
    worker.answer = lambda exchange: exchange.send(head(content_type) + said)
    with front.websocket() as client:
        same_as_http(front, client, {"model": "m", "input": "hi"})


def same_as_http(server: Server, client: ClientConnection, body: Json) -> None:
    reply = server.post("/v1/responses", body | {"stream": True})
    send(client, body)
    if reply.status != 200:
        (error,) = received(client)
        assert error == {"type": "error", "status": reply.status} | reply.json
        return
    frames = reply.body.decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    for frame in frames:
        data = frame.split("\ndata: ", 1)[1]
        text = client.recv(timeout=30)
        assert isinstance(text, str)
        assert drawn_apart(text) == drawn_apart(data)


# --- lanes --------------------------------------------------------------------------------------------------

RUNS: Json = LONG | {"seed": SLOW, "store": False, "temperature": 1}


def test_lanes_run_beside_each_other(client: ClientConnection) -> None:
    send(client, RUNS | {"stream_id": "a", "max_output_tokens": 100})
    send(client, ASKED | {"stream_id": "b"})
    send(client, ASKED)
    ended: list[str] = []
    while len(ended) < 3:
        message = json.loads(client.recv(timeout=30))
        if message["type"] in LAST:
            ended.append(message.get("stream_id", ""))
    assert ended[-1] == "a"


def test_a_lane_has_an_order(client: ClientConnection) -> None:
    for max_tokens in (40, 16, 16):
        send(client, RUNS | {"stream_id": "a", "max_output_tokens": max_tokens})
    ids = [event["response"]["id"] for _ in range(3) for event in received(client) if "response" in event]
    assert [id_ for i, id_ in enumerate(ids) if id_ not in ids[:i]] == ids[::3] or len({*ids}) == 3
    assert sorted(ids, key=ids.index) == ids


def test_a_fork_that_fails_leaves_its_parent(client: ClientConnection) -> None:
    parent = answer(client, ASKED | {"stream_id": "a"})
    chained = ASKED | {"previous_response_id": parent["id"]}
    (error,) = turn(client, chained | ORPHAN | {"stream_id": "b"})
    assert (error["stream_id"], error["status"]) == ("b", 400)
    assert answer(client, chained | {"stream_id": "b"})["status"] == "completed"
    assert refusal(client, chained | ORPHAN | {"stream_id": "a"})[0] == 400
    assert refusal(client, chained | {"stream_id": "b"}) == NOT_FOUND


@pytest.mark.parametrize("stream_id", ["", "a b", "é", "a" * 257, 7, ["a"]])
def test_invalid_stream_id(client: ClientConnection, stream_id: Any) -> None:
    assert refusal(client, ASKED | {"stream_id": stream_id}) == (400, "invalid_stream_id")


def test_there_are_so_many_lanes(client: ClientConnection) -> None:
    for i in range(MAX_LANES):
        assert refusal(client, {"stream_id": f"lane.{i}"})[0] == 400
    assert refusal(client, {"stream_id": "one-more"}) == (400, "websocket_stream_limit_reached")
    assert refusal(client, {})[1] == "missing_required_parameter"


def test_so_many_turns_wait(client: ClientConnection) -> None:
    for _ in range(MAX_TURNS):
        send(client, RUNS)
    assert refusal_of(client, RUNS | {"stream_id": "b"}) == (429, "rate_limit_exceeded")


def refusal_of(client: ClientConnection, body: Json) -> tuple[int, str]:
    """As refusal(), while other lanes are running."""
    send(client, body)
    (error,) = received(client, body["stream_id"])
    return error["status"], error["error"]["code"]


# --- what is refused ----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Json, str]] = {
    "steer": ({"type": "response.steer"}, "unsupported_parameter"),
    "cancel": ({"type": "response.cancel"}, "unsupported_parameter"),
    "other": ({"type": "response.dance"}, "invalid_value"),
    "type": ({"type": ["response.create"]}, "invalid_value"),
    "no type": ({"type": None}, "missing_required_parameter"),
    "background": ({"background": True}, "unsupported_parameter"),
    "no stream": ({"stream": False}, "invalid_value"),
    "a parameter": ({"temperature": "hot"}, "invalid_type"),
    "no input": ({"input": None}, "missing_required_parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(client: ClientConnection, name: str) -> None:
    """The connection lives on."""
    body, code = REFUSED[name]
    assert refusal(client, ASKED | body) == (400, code)
    assert answer(client, ASKED | {"stream": True})["status"] == "completed"


def test_the_model_is_not_found(client: ClientConnection) -> None:
    assert refusal(client, ASKED | {"model": "nope"}) == (404, "model_not_found")


@pytest.mark.parametrize("message", ["[]", "null", '"response.create"', "7"])
def test_a_message_is_an_object(client: ClientConnection, message: str) -> None:
    client.send(message)
    assert received(client)[0]["error"]["code"] in ("invalid_type", "missing_required_parameter")
    assert answer(client, ASKED)["status"] == "completed"


def test_what_codex_says_when_it_has_read_an_answer_is_no_turn(client: ClientConnection) -> None:
    client.send('{"type": "response.processed", "response_id": "resp_1"}')
    assert answer(client, ASKED)["status"] == "completed"


UNREADABLE: dict[str, tuple[str | bytes, int, str]] = {
    "no JSON": ("{nope", 1007, "invalid_json"),
    "too deep": ("[" * 1000, 1007, "invalid_json"),
    "too many": ("[" + "0," * 60_000 + "0]", 1009, "body_too_large"),
    "binary": (b"{}", 1003, "unsupported_content_type"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_nobody_can_read_ends_the_connection(client: ClientConnection, name: str) -> None:
    message, code, error_code = UNREADABLE[name]
    client.send(message)
    assert received(client)[0]["error"]["code"] == error_code
    assert close_code(client) == code


@pytest.mark.parametrize("in_fragments", [False, True])
def test_too_large(client: ClientConnection, in_fragments: bool) -> None:
    """The client is told so, though it is still sending."""
    message = ["x" * 100_000] * 40 if in_fragments else "x" * 4_000_000
    with suppress(ConnectionClosed):
        client.send(message)
    assert close_code(client) == 1009


def test_no_utf_8(client: ClientConnection) -> None:
    client.send(b'{"\xff"}', text=True)
    assert close_code(client) == 1007
