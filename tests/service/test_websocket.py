"""The Responses API over a WebSocket, against the real server: the scenarios of Open Responses, the official
client, and what a client can do wrong.

The names of the first tests are those of openresponses/openresponses, src/lib/compliance-tests.ts.
"""

import asyncio
import gc
import json
import re
import tomllib
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
import uvicorn
from starlette.websockets import WebSocket
from uvicorn.server import ServerState
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.sync.client import ClientConnection

from background import Registry
from helpers import laws
from helpers.serving import Json, Server, serve, until
from helpers.upstream import head, upstream
from helpers.wire import Wire
from request.refusals import BadInput
from request.room import Rooms, Visit
from service import connections
from service.websocket import MAX_LANES, Connection
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


# --- the official client ------------------------------------------------------------------------------------


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


def test_a_lane_has_an_order(client: ClientConnection) -> None:
    """Nothing of a turn comes before the end of the one before it."""
    for max_tokens in (60, 16, 16):
        send(client, RUNS | {"stream_id": "a", "max_output_tokens": max_tokens})
    ids = [event["response"]["id"] for _ in range(3) for event in received(client) if "response" in event]
    assert len(list(groupby(ids))) == 3


def test_a_fork_that_fails_leaves_its_parent(client: ClientConnection) -> None:
    parent = answer(client, ASKED | {"stream_id": "a"})
    chained = ASKED | {"previous_response_id": parent["id"]}
    (error,) = turn(client, chained | ORPHAN | {"stream_id": "b"})
    assert (error["stream_id"], error["status"]) == ("b", 400)
    assert answer(client, chained | {"stream_id": "b"})["status"] == "completed"
    assert refusal(client, chained | ORPHAN | {"stream_id": "a"})[0] == 400
    assert refusal(client, chained | {"stream_id": "b"}) == NOT_FOUND


def test_there_are_so_many_lanes(client: ClientConnection) -> None:
    for i in range(MAX_LANES):
        assert refusal(client, {"stream_id": f"lane.{i}"})[0] == 400
    assert refusal(client, {"stream_id": "one-more"}) == (400, "websocket_stream_limit_reached")
    assert refusal(client, {})[1] == "missing_required_parameter"


# --- what is refused ----------------------------------------------------------------------------------------

#  what is refused, on a connection that lives on   status   code
REFUSED: list[tuple[Json | str | bytes, int, str]] = [
    ({"model": "nope"},                               404,    "model_not_found"),
    ({"type": "response.cancel"},                     400,    "invalid_value"),
    ({"type": ["response.create"]},                   400,    "invalid_value"),
    ({"type": None},                                  400,    "invalid_value"),
    ({"background": True},                            400,    "unsupported_parameter"),
    ({"stream_id": "a" * 257},                        400,    "invalid_value"),
    ({"temperature": "hot"},                          400,    "invalid_type"),
    ("[]",                                            400,    "invalid_type"),
    ("null",                                          400,    "missing_required_parameter"),
    ("{nope",                                         400,    "invalid_json"),
    (b'{"\xff"}',                                     400,    "invalid_json"),
    ("[" * 1000,                                      400,    "invalid_json"),
    ("[" + "0," * 60_000 + "0]",                      413,    "body_too_large"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "status", "code"), REFUSED, ids=range(len(REFUSED)))
def test_refused(client: ClientConnection, message: Any, status: int, code: str) -> None:
    """As over HTTP. What Codex says when it has read an answer is not a turn."""
    if isinstance(message, dict):
        send(client, ASKED | message)
    else:
        client.send(message, text=True)
    (error,) = received(client)
    assert (error["status"], error["error"]["code"]) == (status, code)
    client.send('{"type": "response.processed", "response_id": "resp_1"}')
    assert answer(client, ASKED | {"stream": False})["status"] == "completed"


@pytest.mark.bug("M11")
@pytest.mark.parametrize("n_fragments", [1, 40])
def test_too_large(client: ClientConnection, n_fragments: int) -> None:
    """Bug: the connection was closed, which a client takes for a broken network: it sent all of it again."""
    client.send(["x" * (1_600_000 // n_fragments)] * n_fragments)
    (error,) = received(client)
    assert (error["status"], error["error"]["code"]) == (400, "websocket_message_too_large")
    assert str(2**20) in error["error"]["message"]
    assert answer(client, ASKED)["status"] == "completed"


@pytest.mark.parametrize("n_fragments", [1, 90])
def test_far_too_large(client: ClientConnection, n_fragments: int) -> None:
    message = ["x" * 100_000] * n_fragments if n_fragments > 1 else "x" * 9_000_000
    with suppress(ConnectionClosed):
        client.send(message)
    assert close_code(client) in (1009, 1006)  # the code may be lost while the client is still sending


# --- steering -----------------------------------------------------------------------------------------------


def steer(client: ClientConnection, id: Any) -> None:
    client.send(json.dumps({"type": "response.steer", "previous_response_id": id, "input": "Stop now."}))


def check_steer_failed(event: Json, id: Any, code: str) -> None:
    assert event["type"] == "response.steer.failed"
    assert (event["error"]["type"], event["error"]["code"]) == ("invalid_request_error", code)
    assert event["steer"] == {"input": "Stop now.", "previous_response_id": id}


@pytest.mark.bug("M13")
def test_a_response_that_runs_is_not_steered(client: ClientConnection) -> None:
    """Bug: the answer was an `error` event, of which a client cannot tell what it is about."""
    send(client, RUNS | {"stream_id": "a", "max_output_tokens": 100})
    created = json.loads(client.recv(timeout=30))
    steer(client, created["response"]["id"])
    events = [created, *received(client)]
    (failed,) = [event for event in events if event["type"] == "response.steer.failed"]
    check_steer_failed(failed, created["response"]["id"], "steering_not_supported")
    assert {event["stream_id"] for event in events} == {"a"}
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert events[-1]["type"] == "response.incomplete"


@pytest.mark.bug("M13")
def test_a_response_that_has_ended_is_not_steered(client: ClientConnection) -> None:
    events = turn(client, ASKED | {"stream_id": "a"})
    id_ = events[-1]["response"]["id"]
    steer(client, id_)
    failed = json.loads(client.recv(timeout=30))
    check_steer_failed(failed, id_, "response_already_completed")
    assert (failed["stream_id"], failed["sequence_number"]) == ("a", len(events))


@pytest.mark.bug("M13")
@pytest.mark.parametrize("id", ["resp_missing", None, ["resp"]])
def test_a_response_that_is_not_known_is_not_steered(client: ClientConnection, id: Any) -> None:
    steer(client, id)
    failed = json.loads(client.recv(timeout=30))
    check_steer_failed(failed, id, "response_not_found")
    assert failed["sequence_number"] == 0
    assert "stream_id" not in failed


# --- its end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grace", ["0", "30"])
def test_a_stop_of_the_server(grace: str) -> None:
    """A turn gets its last event, one that waits is refused; then all connections are closed with 1012."""
    with serve("--shutdown-grace", grace, script=FAULTY) as server:
        with server.websocket() as idle, server.websocket() as client:
            send(client, RUNS | {"max_output_tokens": 60})
            send(client, ASKED)
            until(lambda: server.health()["running"] == 1, "it runs")
            server.interrupt()
            assert close_code(idle) == 1012
            *_, last = received(client)
            assert last["type"] == ("response.failed" if grace == "0" else "response.incomplete")
            (error,) = received(client)
            assert (error["status"], error["error"]["code"]) == (503, "server_is_overloaded")
            assert close_code(client) == 1012
        assert server.exit_status() == 0


# --- the handshake ------------------------------------------------------------------------------------------

KEYS = ("--api-key", "mine", "--api-key", "yours")
MINE, YOURS = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer yours"}
PAGE = "https://example.org"


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    flags = ("--cors-origin", PAGE, "--max-streams", "8", "--max-body", "1M")
    with serve(*KEYS, *flags, script=FAULTY) as started:
        yield started


def refused_handshake(server: Server, **settings: Any) -> tuple[int, str]:
    """Status and code of the refusal, which looks like every other."""
    with pytest.raises(InvalidStatus) as refused, server.websocket(**settings):
        pass
    reply = refused.value.response
    error = json.loads(reply.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    until(lambda: f"[{reply.headers['x-request-id']}]" in server.log(), "it is logged")
    return reply.status_code, error["code"]


def test_a_page_gives_its_key_as_a_subprotocol(locked: Server) -> None:
    """A browser lets it set no header, and wants one of the subprotocols that it has offered."""
    offered = ["responses", "openai-insecure-api-key.mine"]
    with locked.websocket(subprotocols=offered) as client:
        assert client.subprotocol == "responses"
        assert answer(client, ASKED)["status"] == "completed"
    assert refused_handshake(locked, subprotocols=["openai-insecure-api-key.nope"])[0] == 401


def test_a_page_of_another_site_opens_none(server: Server, locked: Server) -> None:
    assert refused_handshake(server, origin=PAGE) == (403, "origin_not_allowed")
    with server.websocket(origin=server.url) as client:
        assert answer(client, ASKED)["status"] == "completed"
    with locked.websocket(origin=PAGE, additional_headers=MINE) as client:
        assert answer(client, ASKED)["status"] == "completed"


# --- what a client can do to others -------------------------------------------------------------------------


HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def frame(opcode: Opcode, data: bytes, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def test_a_handshake_with_what_is_wrong_is_dropped(server: Server) -> None:
    """Bug: one that the package `websockets` refuses left a traceback in the log."""
    n_logged = len(server.log())
    data = HANDSHAKE[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
    with server.connect(data) as connection, suppress(ConnectionResetError):
        assert connection.recv(4096) == b""
    assert server.health()["status"] == "ok"
    assert "Traceback" not in server.log()[n_logged:]


async def accepted() -> tuple[Any, Wire]:
    """A connection, with an application that takes no message."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        await asyncio.Event().wait()

    config, state, wire = uvicorn.Config(app, log_config=None, lifespan="off"), ServerState(), Wire()
    config.load()
    limited = type("LimitedProtocol", (connections.WebSocketProtocol,), {"reader_timeout": 60})
    connection: Any = limited(config, state, {})
    connection.connection_made(wire)
    connection.data_received(HANDSHAKE)
    await asyncio.sleep(0.01)
    return connection, wire


SMALL = [frame(Opcode.PING, b""), frame(Opcode.PONG, b""), frame(Opcode.CONT, b"", fin=False)]


@pytest.mark.parametrize("small", SMALL, ids=("ping", "pong", "fragment"))
def test_few_frames_come_in_a_time(monkeypatch: pytest.MonkeyPatch, small: bytes) -> None:
    """Bug: connections that sent nothing but pings lived, and were answered, for ever. And a message of empty
    fragments would grow for as long as it may take to come.
    """

    async def talk() -> None:
        client, wire = await accepted()
        client.data_received(frame(Opcode.TEXT, b"[", fin=False))
        client.data_received(small * (connections.MAX_FRAMES - 3))
        with monkeypatch.context() as later:  # a client that is idle may ping for ever
            later.setattr(connections, "FRAMES_S", 0)
            client.data_received(small * (connections.MAX_FRAMES - 3))
        assert not wire.is_closed
        client.data_received(small * 4)
        assert wire.is_closed

    asyncio.run(talk())


def test_what_comes_before_the_answer_to_a_handshake_ends_the_connection() -> None:
    """Bug: a traceback, if it was no frame that the package could read."""

    async def talk() -> None:
        client, wire = await accepted()
        client.conn.state = State.CONNECTING
        client.data_received(b"\xff" * 9)
        assert wire.is_closed

    asyncio.run(talk())


def test_what_was_sent_on_a_connection_is_not_held_after_it() -> None:
    """Bug: of one that was lost the package held all that had come, until a garbage collection."""

    async def talk() -> None:
        client, _ = await accepted()
        client.data_received(frame(Opcode.TEXT, b"x" * 100_000)[:65536])
        assert client.conn.reader.buffer
        client.connection_lost(ConnectionResetError())
        assert not client.conn.reader.buffer

    asyncio.run(talk())


# --- turns, in this process ---------------------------------------------------------------------------------

TURN = b'{"type": "response.create"}'
Begin = Callable[..., Awaitable[Any]]


class Client:
    """Sends these messages, and then nothing, and remembers what it is sent.

    A deaf one reads nothing, one that has left cannot be written to.
    """

    def __init__(self, *messages: bytes | None, is_deaf: bool = False, has_left: bool = False) -> None:
        self.coming: list[Json] = [{"type": "websocket.connect"}]
        for message in messages:
            self.coming.append({"type": "websocket.receive", "bytes": message})
        self.sent: list[Json] = []
        self.is_told = asyncio.Event()
        self.is_deaf = is_deaf
        self.has_left = has_left

    async def receive(self) -> Any:
        if not self.coming:
            await asyncio.Event().wait()
        return self.coming.pop(0)

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "websocket.send":
            self.is_told.set()
            if self.has_left:
                raise OSError
            if self.is_deaf:
                await asyncio.Event().wait()


def running(
    client: Client, begin: Begin, rooms: Rooms, stop: asyncio.Event | None = None
) -> asyncio.Task[None]:
    """A connection of this client."""
    websocket = WebSocket({"type": "websocket", "subprotocols": []}, client.receive, client.send)
    registry = cast(Registry, SimpleNamespace(stopping=stop or asyncio.Event()))
    connection = Connection(websocket, Visit(rooms, ""), registry, begin)
    return asyncio.create_task(connection.run())


async def never(*_: Any, **recall: Any) -> Any:
    await asyncio.Event().wait()


def test_a_client_that_reads_no_answer_holds_up_no_other() -> None:
    """Messages are begun one after another, whoever sends them; errors are sent beside that."""
    has_started = asyncio.Event()

    async def begin(*_: Any, **recall: Any) -> Any:
        has_started.set()
        await never()

    async def talk() -> None:
        rooms, deaf = Rooms(8), Client(b"[]", is_deaf=True)
        first = running(deaf, begin, rooms)
        await deaf.is_told.wait()
        second = running(Client(b"[]", TURN), begin, rooms)  # its turn comes after a refusal
        await asyncio.wait_for(has_started.wait(), 30)
        first.cancel()
        second.cancel()

    asyncio.run(talk())


def test_a_turn_ends_with_its_client() -> None:
    """Also one that sends nothing, at which it would see that its client has left."""
    has_ended = asyncio.Event()

    async def begin(*_: Any, **recall: Any) -> Any:
        try:
            await never()
        finally:
            has_ended.set()

    async def talk() -> None:
        client = Client(TURN)
        client.coming.append({"type": "websocket.disconnect"})
        await asyncio.wait_for(running(client, begin, Rooms(8)), 30)
        assert has_ended.is_set()

    asyncio.run(talk())


def test_a_stop_says_nothing_to_a_client_that_has_left() -> None:
    """Bug: each of 500 left a traceback, when the server had met their end while it told of an error."""

    async def talk() -> None:
        client, stop = Client(b"[]", has_left=True), asyncio.Event()
        task = running(client, never, Rooms(8), stop)
        await client.is_told.wait()
        stop.set()
        await asyncio.wait_for(task, 30)
        assert client.sent[-1]["type"] == "websocket.send"

    asyncio.run(talk())


def test_a_turn_that_is_refused_is_forgotten() -> None:
    """Bug: its refusal held on to the frame that held the refusal, and so to the body."""
    bodies: list[weakref.ref[object]] = []

    class Body:
        pass

    async def begin(*_: Any, **recall: Any) -> Any:
        body = Body()
        bodies.append(weakref.ref(body))
        raise BadInput("no")

    async def talk() -> None:
        client = Client(TURN)
        task = running(client, begin, Rooms(8))
        await client.is_told.wait()
        await asyncio.sleep(0.01)
        assert bodies[0]() is None
        task.cancel()

    gc.disable()
    try:
        asyncio.run(talk())
    finally:
        gc.enable()


# --- what it remembers --------------------------------------------------------------------------------------


def test_memory_is_bounded(locked: Server) -> None:
    """What has no room is not remembered.

    There is room for 16 MB, of which one of several keys may have half.
    """
    described: Json = {"type": "object", "properties": {}, "additionalProperties": False}
    schema = described | {"description": "x" * 500_000}
    large = ASKED | {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}
    with locked.websocket(additional_headers=MINE) as client:
        ids = [answer(client, large | {"stream_id": str(i)})["id"] for i in range(20)]
        chained = [ASKED | {"previous_response_id": id_} for id_ in ids]
        assert refusal(client, chained[-1]) == NOT_FOUND
        assert answer(client, chained[0] | {"stream_id": "0"})["status"] == "completed"


def test_logprobs_are_not_remembered(server: Server, client: ClientConnection) -> None:
    """No model reads them, and they may be a hundred times the text."""
    first = answer(client, ASKED | {"include": ["message.output_text.logprobs"], "top_logprobs": 5})
    assert first["output"][-1]["content"][0]["logprobs"]
    second = answer(client, ASKED | {"previous_response_id": first["id"], "store": True})
    items = server.get(f"/v1/responses/{second['id']}/input_items").json["data"]
    assert [item["content"][0]["logprobs"] for item in items if item.get("role") == "assistant"] == [[]]
