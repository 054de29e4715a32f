"""The Responses API over a WebSocket: turns as over HTTP, lanes, memory, and what a client can do wrong.

The scenarios of Open Responses are rules of the audit (audit/turns.py), which tests/wire asks of this server.
"""

import asyncio
import gc
import json
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest
import uvicorn
from starlette.websockets import WebSocket
from uvicorn.server import ServerState
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Opcode
from websockets.sync.client import ClientConnection

from background import Registry
from helpers.asked import HI, MINE, NO_END, RESPONSES
from helpers.limits import PATIENCE_S
from helpers.serving import Json, Server, http_bytes, serve, until
from helpers.tables import table
from helpers.wire import UPGRADE, Wire, frame
from request.refusals import BadInput
from request.room import Rooms, Visit
from service import connections
from service.websocket import MAX_LANES, Connection
from store import Retention, Store
from streaming import cancel
from worker import Workers

SLOW = 668  # a seed of faulty_server.py
TABLE = table("websocket")
ASKED: Json = HI | {"store": False, "temperature": 0}
LAST = ("response.completed", "response.incomplete", "response.failed", "error")
FLAGS = ("--max-body", "1M", "--reader-timeout", "2")


@pytest.fixture
def client(server: Server) -> Iterator[ClientConnection]:
    with server.websocket() as connection:
        yield connection


def send(client: ClientConnection, body: Json) -> None:
    client.send(json.dumps({"type": "response.create"} | body))


def received(client: ClientConnection) -> list[Json]:
    """Return the messages of a turn, to its last one."""
    messages: list[Json] = []
    while not messages or messages[-1]["type"] not in LAST:
        messages.append(json.loads(client.recv(PATIENCE_S)))
    return messages


def turn(client: ClientConnection, body: Json) -> list[Json]:
    send(client, body)
    return received(client)


def answer(client: ClientConnection, body: Json) -> Json:
    """Return the response of a turn that succeeds."""
    *_, last = turn(client, body)
    assert last["type"] in ("response.completed", "response.incomplete"), last
    return dict(last["response"])


def refusal(client: ClientConnection, body: Json) -> tuple[int, str]:
    """Return status and code of the error that a turn gets at once."""
    (error,) = turn(client, body)
    assert error["type"] == "error"
    assert error["error"].keys() == {"message", "type", "param", "code"}
    return error["status"], error["error"]["code"]


def close_code(client: ClientConnection) -> int:
    """Return the code of the close that comes after what the server still sends."""
    with suppress(ConnectionClosed):
        while True:
            client.recv(PATIENCE_S)
    return client.protocol.close_code or 0


# --- lanes --------------------------------------------------------------------------------------------------

RUNS: Json = HI | NO_END | {"seed": SLOW, "store": False, "temperature": 1}


def test_there_are_so_many_lanes(client: ClientConnection) -> None:
    for i in range(MAX_LANES):
        assert refusal(client, {"stream_id": f"lane.{i}"})[0] == 400
    assert refusal(client, {"stream_id": "one-more"}) == (400, "websocket_stream_limit_reached")
    assert refusal(client, {})[1] == "missing_required_parameter"


# --- what is refused ----------------------------------------------------------------------------------------

REFUSED = [*TABLE["refused"], [{"stream_id": "a" * 257}, 400, "invalid_value"]]
REFUSED.append(["[" + "0," * 60_000 + "0]", 413, "body_too_large"])


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
    with suppress(ConnectionClosed):
        client.send(["x" * (9_000_000 // n_fragments)] * n_fragments)
    assert close_code(client) in (1009, 1006)  # the code may be lost while the client is still sending


# --- steering -----------------------------------------------------------------------------------------------


def steer(client: ClientConnection, id: Any, said: Any = "Stop now.") -> None:
    client.send(json.dumps({"type": "response.steer", "previous_response_id": id, "input": said}))


def test_a_response_is_steered(server: Server) -> None:
    """By the official client: what was said is kept, and a successor has the input."""
    sdk = openai.OpenAI(base_url=server.url + "/v1", api_key="any")
    more = {"stream_id": "a", "store": True, "max_output_tokens": 400}
    create: Any = {"type": "response.create"} | RUNS | more
    with sdk, sdk.responses.connect() as connection:
        connection.send(create)
        events: list[Any] = []
        while [event.type for event in events].count("response.incomplete") < 2:
            events.append(connection.recv())
            if len(events) == 6:  # it speaks
                connection.response.steer(input="Stop now.", previous_response_id=events[0].response.id)
        ends = [event.response for event in events if event.type == "response.incomplete"]
        kinds = [event.type for event in events if "delta" not in event.type]
        (second,) = [event.response for event in events[6:] if event.type == "response.created"]
        asked: Any = sdk.responses.input_items.list(second.id, order="asc").data
    assert kinds.count("response.steer.accepted") == 1
    assert kinds.index("response.incomplete") < kinds.index("response.created", 1)
    assert {event.stream_id for event in events} == {"a"}
    assert [end.incomplete_details.reason for end in ends] == ["steered", "max_output_tokens"]
    assert ends[0].usage.output_tokens < 400
    assert second.previous_response_id == ends[0].id
    told = [item.content[0].text for item in asked]
    assert [told[0], *told[-2:]] == ["hi", ends[0].output[-1].content[0].text, "Stop now."]


@pytest.mark.bug("M13")
def test_a_response_is_not_steered(client: ClientConnection) -> None:
    """Bug: the answer was an `error` event, of which a client cannot tell what it is about.

    That its lane is told, in which the numbers go on, is a law of simulate.py.
    """
    send(client, RUNS | {"max_output_tokens": 100})
    id_ = json.loads(client.recv(PATIENCE_S))["response"]["id"]
    wrong: list[Any] = [5, [], ["Stop now."]]
    for what in wrong:
        steer(client, id_, what)
    events = received(client)
    steer(client, id_)
    events.append(json.loads(client.recv(PATIENCE_S)))
    failed = [event for event in events if event["type"] == "response.steer.failed"]
    told = [(event["steer"]["input"], event["error"]["code"]) for event in failed]
    assert told == [*((what, "invalid_input") for what in wrong), ("Stop now.", "response_already_completed")]
    assert failed[-1]["error"]["type"] == "invalid_request_error"


def test_what_steers_a_turn_is_bounded_in_bytes(locked: Server) -> None:
    """Bug: each was kept until the response ended, and there was no room to count them in: 595 MB."""
    x = {"type": "string", "minLength": 500}
    schema = {"type": "object", "properties": {"x": x}, "required": ["x"]}
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    calls = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": {}}
    large = {"type": "response.steer", "input": "x" * 900_000}
    with locked.websocket(additional_headers=MINE) as client:
        send(client, RUNS | calls)
        event = json.loads(client.recv(PATIENCE_S))
        id_ = event["response"]["id"]
        while event.get("item", {}).get("type") != "function_call":
            event = json.loads(client.recv(PATIENCE_S))
        for _ in range(14):
            client.send(json.dumps(large | {"previous_response_id": id_}))
        codes = Counter[str]()
        while codes.total() < 14:
            codes[json.loads(client.recv(PATIENCE_S)).get("error", {}).get("code", "")] += 1
            del codes[""]  # of other events
    assert codes.keys() <= {"too_many_pending_steers", "rate_limit_exceeded", "successor_creation_failed"}
    assert codes["rate_limit_exceeded"] > 2  # 16 MB for two keys


@pytest.mark.parametrize("grace", ["0", "30"])
def test_a_stop_of_the_server(grace: str) -> None:
    """A turn gets its last event, one that waits is refused; then all connections are closed with 1012."""
    with serve("--shutdown-grace", grace) as server:
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

PAGE = "https://example.org"
LOCKED = ("--api-key", "mine", "--api-key", "yours", "--cors-origin", PAGE, "--max-body", "1M")


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    with serve(*LOCKED, "--max-streams", "8") as started:
        yield started


def refused_handshake(server: Server, **settings: Any) -> tuple[int, str]:
    """Return status and code of the refusal, which looks like every other."""
    with pytest.raises(InvalidStatus) as refused, server.websocket(**settings):
        pass
    reply = refused.value.response
    error = json.loads(reply.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    until(lambda: f"[{reply.headers['x-request-id']}]" in server.log(), "it is logged")
    return reply.status_code, error["code"]


def test_a_page_of_another_site_opens_none(server: Server, locked: Server) -> None:
    assert refused_handshake(server, origin=PAGE) == (403, "origin_not_allowed")
    ours, allowed = (server, {"origin": server.url}), (locked, {"origin": PAGE, "additional_headers": MINE})
    for asked, settings in (ours, allowed):
        with asked.websocket(**settings) as client:
            assert answer(client, ASKED)["status"] == "completed"


# --- frames -------------------------------------------------------------------------------------------------

HANDSHAKE = http_bytes(RESPONSES, None, "GET", **UPGRADE)


def test_a_handshake_with_what_is_wrong_is_refused(server: Server) -> None:
    """Bug: one that the package `websockets` refuses left a traceback in the log."""
    n_logged = len(server.log())
    data = HANDSHAKE[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
    with server.connect(data) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert server.health()["status"] == "ok"
    assert "Traceback" not in server.log()[n_logged:]


async def accepted() -> tuple[Any, Wire]:
    """A connection, with an application that takes no message."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        await never()

    config, wire = uvicorn.Config(app, log_config=None, lifespan="off"), Wire()
    config.load()
    limited = type("LimitedProtocol", (connections.WebSocketProtocol,), {"reader_timeout": 60})
    connection: Any = limited(config, ServerState(), {})
    connection.connection_made(wire)
    connection.data_received(HANDSHAKE)
    await asyncio.sleep(0.01)
    return connection, wire


SMALL = [frame(b"", Opcode.PING), frame(b"", Opcode.PONG), frame(b"", Opcode.CONT, fin=False)]


@pytest.mark.parametrize("small", SMALL, ids=("ping", "pong", "fragment"))
async def test_few_frames_come_in_a_time(monkeypatch: pytest.MonkeyPatch, small: bytes) -> None:
    """Bug: connections that sent nothing but pings lived, and were answered, for ever. And a message of empty
    fragments would grow for as long as it may take to come.
    """
    client, wire = await accepted()
    client.data_received(frame(b"[", fin=False))
    client.data_received(small * (connections.MAX_FRAMES - 3))
    with monkeypatch.context() as later:  # a client that is idle may ping for ever
        later.setattr(connections, "FRAMES_S", 0)
        client.data_received(small * (connections.MAX_FRAMES - 3))
    assert not wire.is_closed
    assert wire.max_size == connections.READ_FRAMES_BYTES  # bug: 340 pings in a read, and others waited 0.2 s
    client.data_received(small * 4)
    assert wire.is_closed


async def test_nothing_is_read_before_the_answer_to_a_handshake() -> None:
    """Bug: a traceback, if it was no frame that the package could read."""
    client, wire = await accepted()
    assert not wire.is_read
    await client.receive()  # as Starlette does before it answers
    assert wire.is_read


async def test_what_was_sent_on_a_connection_is_not_held_after_it() -> None:
    """Bug: of one that was lost the package held all that had come, until a garbage collection."""
    client, wire = await accepted()
    client.data_received(frame(b"x" * 100_000)[:65536])
    assert client.conn.reader.buffer
    assert wire.max_size == connections.READ_MESSAGE_BYTES
    client.connection_lost(ConnectionResetError())
    assert not client.conn.reader.buffer


# --- turns, in this process ---------------------------------------------------------------------------------

TURN = b'{"type": "response.create"}'


class Client:
    """Sends these messages, and then nothing; a deaf one reads nothing either."""

    def __init__(self, *messages: bytes, is_deaf: bool = False) -> None:
        self.coming: list[Json] = [{"type": "websocket.connect"}]
        self.coming += [{"type": "websocket.receive", "bytes": message} for message in messages]
        self.is_told = asyncio.Event()
        self.is_deaf = is_deaf

    async def receive(self) -> Any:
        return self.coming.pop(0) if self.coming else await never()

    async def send(self, message: Any) -> None:
        if message["type"] == "websocket.send":
            self.is_told.set()
            if self.is_deaf:
                await never()

    def talk(self, begin: Callable[..., Awaitable[Any]], rooms: Rooms) -> asyncio.Task[None]:
        """Return a task that serves the connection of this client; `begin` is that of Api."""
        websocket = WebSocket({"type": "websocket", "subprotocols": []}, self.receive, self.send)
        registry = Registry(Store(":memory:", Retention()), Workers())
        return asyncio.create_task(Connection(websocket, Visit(rooms, ""), registry, begin).run())


async def never(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


async def test_a_client_that_reads_no_answer_holds_up_no_other() -> None:
    """Messages are begun one after another, whoever sends them; errors are sent beside that."""
    has_begun = asyncio.Event()

    async def begin(*_: Any, **__: Any) -> Any:
        has_begun.set()
        await never()

    rooms, deaf = Rooms(max_streams=8, max_body_bytes=2**20, is_shared=False), Client(b"[]", is_deaf=True)
    first = deaf.talk(begin, rooms)
    await deaf.is_told.wait()
    second = Client(b"[]", TURN).talk(begin, rooms)  # its turn comes after a refusal
    await asyncio.wait_for(has_begun.wait(), PATIENCE_S)
    await asyncio.gather(cancel(first), cancel(second))


async def test_a_turn_that_is_refused_is_forgotten() -> None:
    """Bug: its refusal held on to the frame that held the refusal, and so to the body."""
    bodies: list[weakref.ref[object]] = []

    async def begin(*_: Any, **__: Any) -> Any:
        body = asyncio.Event()  # or any other object
        bodies.append(weakref.ref(body))
        raise BadInput("no")

    client = Client(TURN)
    gc.disable()
    try:
        task = client.talk(begin, Rooms(max_streams=8, max_body_bytes=2**20, is_shared=False))
        await client.is_told.wait()
        await asyncio.sleep(0.01)
        assert bodies[0]() is None
        await cancel(task)
    finally:
        gc.enable()


# --- what it remembers --------------------------------------------------------------------------------------


def test_memory_is_bounded(locked: Server) -> None:
    """There is room for 16 MB, of which one of several keys may have half. What has no room is forgotten."""
    with locked.websocket(additional_headers=MINE) as client:
        schema = {"type": "object", "additionalProperties": False, "description": "x" * 500_000}  # repeated
        asked = ASKED | {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}
        ids = [answer(client, asked | {"stream_id": str(i)})["id"] for i in range(20)]
        chained = [ASKED | {"previous_response_id": id_} for id_ in ids]
        assert refusal(client, chained[-1]) == (400, "previous_response_not_found")
        assert answer(client, chained[0] | {"stream_id": "0"})["status"] == "completed"


def test_logprobs_are_not_remembered(server: Server, client: ClientConnection) -> None:
    """No model reads them, and they may be a hundred times the text."""
    first = answer(client, ASKED | {"include": ["message.output_text.logprobs"], "top_logprobs": 5})
    assert first["output"][-1]["content"][0]["logprobs"]
    second = answer(client, ASKED | {"previous_response_id": first["id"], "store": True})
    items = server.get(f"{RESPONSES}/{second['id']}/input_items").json["data"]
    assert [item["content"][0]["logprobs"] for item in items if item.get("role") == "assistant"] == [[]]
