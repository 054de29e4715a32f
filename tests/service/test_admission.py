"""Admission: bodies that come slowly, and what clients hold; rooms alone, and the real server."""

import asyncio
import json
import select
import time
from collections.abc import Awaitable
from contextlib import ExitStack

import pytest
from starlette.requests import Request as HttpRequest
from starlette.types import Message

from helpers.faulty_server import SLOW
from helpers.serving import TINY, Json, http_bytes, http_frames, serve, until
from request import body
from request.body import SMALL_BODY_BYTES
from request.refusals import STATUS, BadInput
from request.room import Rooms, Visit

RESPONSES = "/v1/responses"
FAULTY = ("-m", "tests.helpers.faulty_server")
HI: Json = {"model": "tiny", "input": "hi"}
SHORT = HI | {"max_output_tokens": 1}
EOS = json.loads((TINY / "generation_config.json").read_text())["eos_token_id"]
ENDLESS: Json = HI | {"seed": SLOW, "logit_bias": {str(token_id): -100 for token_id in EOS}, "stream": True}
HALF_OF_SMALL = http_bytes(RESPONSES, HI)[:-5]
HALF = http_bytes(RESPONSES, HI | {"input": "x" * 2 * SMALL_BODY_BYTES})[:-5]


# --- a room -------------------------------------------------------------------------------------------------


def arriving(visit: Visit, part: bytes, *waits_s: float) -> Awaitable[object]:
    """Wait for a body of which this part comes after each of these times."""
    left = list(waits_s)

    async def receive() -> Message:
        await asyncio.sleep(left.pop(0))
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    return body.receive(HttpRequest({"type": "http", "headers": []}, receive), visit)


def test_a_body_has_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: 64 MB, which --max-body may allow, take 50 s to a client that is 200 ms away, and got a 408."""
    monkeypatch.setattr(body, "MAX_BODY_S", 0.01)

    async def read() -> None:
        with Rooms(2).visit("") as visit:
            with pytest.raises(BadInput) as caught:
                await arriving(visit, b"0123456789", 0, 0.5)
            assert STATUS[caught.value.code] == 408
            monkeypatch.setattr(body, "BODY_BYTES_A_S", 1)  # so what comes at once has ten seconds more
            await arriving(visit, b"0123456789", 0, 0.05)

    asyncio.run(read())


def test_bodies_of_one_owner_leave_room() -> None:
    """There is room for 16 of the largest, of which m may have as many as are left besides: 7."""
    rooms = Rooms(32, max_body_bytes=2**20, is_shared=True)

    async def run() -> None:
        with ExitStack() as held:

            async def upload(owner: str) -> None:
                await arriving(held.enter_context(rooms.visit(owner)), bytes(2**20), 0)

            await upload("y")
            for _ in range(7):
                await upload("m")
            with pytest.raises(BadInput) as caught:
                await upload("m")
            assert caught.value.code == "rate_limit_exceeded"
        rooms.bytes.add("m", 16 * 2**20)  # all has been given back

    asyncio.run(run())


def test_what_a_body_continues_is_held_beside_it() -> None:
    """Bug: 300 requests of 110 bytes that continue a large response held 430 MB, and counted as 33 kB."""
    rooms = Rooms(32, max_body_bytes=2**20)
    with rooms.visit("m") as visit:
        visit.hold(rooms.bytes, 2**20)
        for _ in range(15):
            visit.load(2**20)
        with pytest.raises(BadInput):
            visit.load(1)
    assert not any(visit.held.values())


# --- the server ---------------------------------------------------------------------------------------------


def test_half_sent_bodies_take_no_streams() -> None:
    """Bug: 1,024 of them, which cost a client nothing, and everybody else got 503 for a minute.

    Small ones begin when they are whole.
    """
    with serve("--max-streams", "2") as server, ExitStack() as held:
        small = [held.enter_context(server.connect(HALF_OF_SMALL)) for _ in range(10)]
        clients = [held.enter_context(server.connect(HALF)) for _ in range(10)]
        time.sleep(0.1)
        assert server.post(RESPONSES, SHORT).status == 200
        assert not select.select(clients, [], [], 0)[0]
        small[0].sendall(http_bytes(RESPONSES, HI)[-5:])
        assert small[0].recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_body_has_so_many_bytes() -> None:
    with serve("--max-body", "10K") as server:
        padding = "x" * (10 * 1024 - len(json.dumps(SHORT | {"metadata": {}, "banana": ""})))
        assert server.post(RESPONSES, SHORT | {"metadata": {}, "banana": padding}).status == 200
        refused = server.post(RESPONSES, SHORT | {"metadata": {}, "banana": padding + "x"})
        assert (refused.status, refused.json["error"]["code"]) == (413, "body_too_large")


MINE = {"Authorization": "Bearer mine"}
KEYS = ("--api-key", "mine", "--api-key", "yours")


def large_response(n_bytes: int) -> Json:
    """What makes a response that is so large, for it repeats its schema."""
    schema = {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
        "description": "x" * n_bytes,
    }
    return SHORT | {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}


def test_what_is_loaded_for_an_answer_has_room_first() -> None:
    """Bug: of 500 that nobody read each was loaded, and only then refused: others waited a second.

    There is room for 16 MB, half of it for one of several owners.
    """
    with serve(*KEYS, "--max-streams", "64", "--max-body", "1M") as server, ExitStack() as held:
        path = f"{RESPONSES}/{server.post(RESPONSES, large_response(900_000), **MINE).json['id']}"
        ask = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer mine\r\n\r\n".encode()
        n_loaded = 0
        while server.get(path, **MINE).status == 200:
            client = held.enter_context(server.connect(ask))
            assert client.recv(12) == b"HTTP/1.1 200"
            n_loaded += 1
        assert 2 <= n_loaded <= 8
        for method, refused_path in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
            refused = server.request(method, refused_path, None, **MINE)
            assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "bytes of bodies" in refused.json["error"]["message"]
        assert server.get(path, Authorization="Bearer yours").status == 404


def test_each_choice_is_a_stream() -> None:
    """Bug: 64 requests with 16 choices each were 64 streams, and 1,024 sequences that wait."""
    rooms = Rooms(100, is_shared=True)
    with ExitStack() as held:
        for _ in range(3):
            visit = held.enter_context(rooms.visit("m"))
            visit.enter()
            visit.enter(16)
        fourth = held.enter_context(rooms.visit("m"))
        fourth.enter()
        with pytest.raises(BadInput) as refusal:
            fourth.enter(16)
        assert refusal.value.code == "rate_limit_exceeded"
        held.enter_context(rooms.visit("another")).enter(16)
    with rooms.visit("m") as visit:
        visit.enter(1000)  # as half of them: else it would never get in
        assert visit.held[rooms.streams] == 50


def test_of_two_keys_one_cannot_take_all_streams() -> None:
    keys = ("--api-key", "mine", "--api-key", "yours")
    request = http_bytes(RESPONSES, ENDLESS).replace(b"Host: ", b"Authorization: Bearer mine\r\nHost: ")
    with serve(*keys, "--max-streams", "4", script=FAULTY) as server, ExitStack() as held:
        for _ in range(2):
            next(http_frames(held.enter_context(server.connect(request))))
        refused = server.post(RESPONSES, SHORT, Authorization="Bearer mine")
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "2 of 4 open requests" in refused.json["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert server.post(RESPONSES, SHORT, Authorization="Bearer yours").status == 200
        held.close()
        until(
            lambda: server.post(RESPONSES, SHORT, Authorization="Bearer mine").status == 200,
            "there is room again",
        )
