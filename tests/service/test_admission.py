"""Admission: bodies that come slowly, and what clients hold; rooms alone, and the real server."""

import asyncio
import select
import time
from collections.abc import Awaitable
from contextlib import ExitStack

import pytest
from starlette.requests import Request as HttpRequest
from starlette.types import Message

from helpers.asked import HI, RESPONSES, large
from helpers.serving import http_bytes, serve
from request import body
from request.body import SMALL_BODY_BYTES
from request.refusals import BadInput
from request.room import Rooms, Visit

SHORT = HI | {"max_output_tokens": 1}
MINE, YOURS = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer yours"}
KEYS = ("--api-key", "mine", "--api-key", "yours")


# --- a room -------------------------------------------------------------------------------------------------


def arriving(visit: Visit, part: bytes, *waits_s: float) -> Awaitable[object]:
    """Wait for a body of which this part comes after each of these times."""
    left = list(waits_s)

    async def receive() -> Message:
        await asyncio.sleep(left.pop(0))
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    return body.receive(HttpRequest({"type": "http", "headers": []}, receive), visit)


async def test_a_body_has_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: 64 MB, which --max-body may allow, take 50 s to a client that is 200 ms away, and got a 408."""
    monkeypatch.setattr(body, "MAX_BODY_S", 0.2)
    with Rooms(2).visit("") as visit:
        with pytest.raises(BadInput) as caught:
            await arriving(visit, b"0123456789", 0, 0.5)
        assert caught.value.status == 408
        monkeypatch.setattr(body, "BODY_BYTES_A_S", 1)  # so what comes at once has ten seconds more,
        monkeypatch.setattr(body, "SMALL_BODY_BYTES", 5)  # if it is not small
        await arriving(visit, b"0123456789", 0, 0.3)


async def test_a_body_has_so_many_bytes() -> None:
    with Rooms(2, max_body_bytes=10).visit("") as visit:
        await arriving(visit, b"0123456789", 0)
        with pytest.raises(BadInput) as caught:
            await arriving(visit, b"0123456789+", 0)
        assert (caught.value.status, caught.value.code) == (413, "body_too_large")


async def test_bodies_of_one_owner_leave_room() -> None:
    """There is room for 16 of the largest, of which m may have as many as are left besides: 7."""
    rooms = Rooms(32, max_body_bytes=2**20, is_shared=True)
    with ExitStack() as held:
        for owner in "y" + "m" * 7:
            await arriving(held.enter_context(rooms.visit(owner)), bytes(2**20), 0)
        with pytest.raises(BadInput) as caught:
            await arriving(held.enter_context(rooms.visit("m")), bytes(2**20), 0)
        assert caught.value.code == "rate_limit_exceeded"
    rooms.bytes.add("m", 16 * 2**20)  # all has been given back


def test_what_a_body_continues_is_held_beside_it() -> None:
    """Bug: 300 requests of 110 bytes that continue a large response held 430 MB, and counted as 33 kB."""
    rooms = Rooms(32, max_body_bytes=2**20)
    with rooms.visit("m") as visit:
        visit.set_held(rooms.bytes, 2**20)
        for _ in range(15):
            visit.add_bytes(2**20)
        with pytest.raises(BadInput):
            visit.add_bytes(1)
    assert not any(visit.held.values())


def test_each_choice_is_a_stream() -> None:
    """Bug: 64 requests with 16 choices each were 64 streams, and 1,024 sequences that wait."""
    rooms = Rooms(100, is_shared=True)
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(rooms.visit("m")).set_streams(16)
        with pytest.raises(BadInput) as refusal:
            held.enter_context(rooms.visit("m")).set_streams(16)
        assert refusal.value.code == "rate_limit_exceeded"
        held.enter_context(rooms.visit("another")).set_streams(16)
    with rooms.visit("m") as visit:
        visit.set_streams(1000)  # as half of them: else it would never get in
        assert visit.held[rooms.streams] == 50


# --- the server ---------------------------------------------------------------------------------------------


def test_half_sent_bodies_take_no_streams() -> None:
    """Bug: 1,024 of them, which cost a client nothing, and everybody else got 503 for a minute.

    Small ones begin when they are whole.
    """
    small, large = (http_bytes(RESPONSES, HI | {"input": "x" * n}) for n in (2, 2 * SMALL_BODY_BYTES))
    with serve("--max-streams", "2") as server, ExitStack() as held:
        halves = [held.enter_context(server.connect(ask[:-5])) for ask in [small, large] * 10]
        time.sleep(0.1)
        assert server.post(RESPONSES, SHORT).status == 200
        assert not select.select(halves, [], [], 0)[0]
        halves[0].sendall(small[-5:])
        assert halves[0].recv(65536).startswith(b"HTTP/1.1 200 ")


def test_what_is_loaded_for_an_answer_has_room_first() -> None:
    """Bug: of 500 that nobody read each was loaded, and only then refused: others waited a second.

    There is room for 16 MB, half of it for one of several owners.
    """
    with serve(*KEYS, "--max-streams", "64", "--max-body", "1M") as server, ExitStack() as held:
        path = f"{RESPONSES}/{server.post(RESPONSES, SHORT | large(900_000), **MINE).json['id']}"
        n_loaded = 0
        while server.get(path, **MINE).status == 200:
            client = held.enter_context(server.connect(http_bytes(path, None, "GET", **MINE)))
            assert client.recv(12) == b"HTTP/1.1 200"
            n_loaded += 1
        assert 2 <= n_loaded <= 8
        for method, refused_path in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
            refused = server.request(method, refused_path, None, **MINE)
            assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "bytes of bodies" in refused.json["error"]["message"]
        assert server.get(path, **YOURS).status == 404
