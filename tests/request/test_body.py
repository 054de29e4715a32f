"""Bodies: what they may hold, how they may be compressed, how slowly they may come; and what clients hold."""

import asyncio
import gzip
import json
import select
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest
from starlette.requests import Request as HttpRequest
from starlette.types import Message

from helpers.asked import RESPONSES, error
from helpers.serving import Json, Server, http_bytes, serve
from helpers.tables import table
from request import body
from request.refusals import BadInput
from request.room import Rooms, Visit

HI: Json = {"model": "tiny", "input": "hi", "max_output_tokens": 1}


def banana(n_values: int) -> bytes:
    """A body with as many values in a member that nobody knows: 3 bytes a value, 72 in memory."""
    return b'{"model": "tiny", "input": "hi", "banana": [%s0]}' % (b"{}," * ((n_values - 6) // 2))


@pytest.mark.bug("I06")
def test_bodies_hold_so_many_values(server: Server) -> None:
    """8 kB of gzip became 2.7 million objects, and 200 MB that a background response held while it waited."""
    assert server.post(RESPONSES, banana(body.MAX_VALUES)).status == 200
    for n_values in (body.MAX_VALUES + 10, 1_000_000):
        refusal = error(server.post(RESPONSES, banana(n_values)), 413)
        assert str(body.MAX_VALUES) in refusal["message"]
    strings = b'["' + b'","' * (2 * body.MAX_VALUES) + b'"]'
    assert error(server.post(RESPONSES, strings), 413)["code"] == "body_too_large"


@pytest.mark.parametrize(("text", "n_values", "nesting"), table("request")["counts"])
def test_what_stands_outside_strings(text: str, n_values: int, nesting: int) -> None:
    outside = body.outside_strings(text.encode())
    assert (body.n_values(outside), body.nesting(outside)) == (n_values, nesting)


def test_lists_and_objects_nest_so_deep() -> None:
    """What the server builds of a body is read by functions that recurse."""
    text = "[" * body.MAX_DEPTH + "]" * body.MAX_DEPTH
    assert body.parse(text.encode()) == json.loads(text)
    for deep in (f"[{text}]", "[" * 10_000 + "]" * 10_000):
        with pytest.raises(BadInput) as refusal:
            body.parse(deep.encode())
        assert (refusal.value.status, refusal.value.code) == (400, "invalid_json")


PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": body.zstd.compress}


@pytest.mark.bug("H12")
@pytest.mark.parametrize("encoding", PACKERS)
def test_bodies_may_be_compressed(server: Server, encoding: str) -> None:
    whole = PACKERS[encoding](json.dumps(HI | {"banana": "".join(map(str, range(20_000)))}).encode())
    assert server.post(RESPONSES, whole, Content_Encoding=encoding).status == 200
    for broken in (whole[:-1], whole + b"x", b"", b"x" * 99):
        refusal = error(server.post(RESPONSES, broken, Content_Encoding=encoding), 400)
        assert refusal["code"] == "invalid_json"
    assert "backports.zstd" in error(server.post(RESPONSES, whole, Content_Encoding="br"), 415)["message"]


@pytest.mark.bug("I06")
@pytest.mark.parametrize("encoding", PACKERS)
def test_a_body_unpacks_to_so_much(server: Server, encoding: str) -> None:
    """8 kB became 8 MB."""
    bomb = PACKERS[encoding](json.dumps(HI | {"banana": "x" * 2**21}).encode())
    refusal = error(server.post(RESPONSES, bomb, Content_Encoding=encoding), 413)
    assert str(2**21) in refusal["message"]


def test_what_a_body_unpacks_to_is_held() -> None:
    text = b" " * 100_000
    with Rooms(max_streams=8, max_body_bytes=2**21, is_shared=False).visit("") as visit:
        assert body.unpacked(gzip.compress(text), "gzip", visit) == text
        assert visit.held[visit.rooms.bytes] == len(text)


def test_the_parser_rests_as_long_as_it_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: bodies of 2 MB from 50 clients kept the interpreter's lock from the streams for 0.3 s."""
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    async def parse(text: bytes) -> None:
        with Rooms(max_streams=8, max_body_bytes=2**21, is_shared=False).visit("") as visit:
            async with body.parsed(text.rjust(body.SMALL_BODY_BYTES + 1), visit):
                pass

    monkeypatch.setattr(time, "thread_time", iter([10.0, 10.25, 20.0, 20.5]).__next__)
    monkeypatch.setattr(asyncio, "sleep", rest)
    asyncio.run(parse(b"[1]"))
    with pytest.raises(BadInput):
        asyncio.run(parse(b"[1"))
    assert rests == [0.25, 0.5]


@pytest.mark.bug("P18")
def test_half_a_surrogate_pair_is_a_replacement_character() -> None:
    """Such a text stays in the history of its client: a refusal would be for ever."""
    assert body.parse(rb'{"content": "cut \ud83d", "b": "\ud83d\ude00"}') == {
        "content": "cut \ufffd",
        "b": "\U0001f600",
    }


# --- how they come, and what clients hold -------------------------------------------------------------------


def arriving(visit: Visit, part: bytes, *waits_s: float) -> Awaitable[object]:
    """Wait for a body of which this part comes after each of these times."""
    left = list(waits_s)

    async def receive() -> Message:
        await asyncio.sleep(left.pop(0))
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    return body.receive_body(HttpRequest({"type": "http", "headers": []}, receive), visit)


async def test_a_body_has_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: 64 MB, which --max-body may allow, take 50 s to a client that is 200 ms away, and got a 408."""
    monkeypatch.setattr(body, "MAX_BODY_S", 0.2)
    with Rooms(max_streams=2, max_body_bytes=2**21, is_shared=False).visit("") as visit:
        for small_bytes in (10, 5):
            monkeypatch.setattr(body, "SMALL_BODY_BYTES", small_bytes)
            with pytest.raises(BadInput) as caught:
                await arriving(visit, b"0123456789", 0, 0.5)
            assert caught.value.status == 408
        monkeypatch.setattr(body, "BODY_BYTES_A_S", 1)  # a large body has ten seconds more for ten bytes
        await arriving(visit, b"0123456789", 0, 0.3)


async def test_a_body_has_so_many_bytes() -> None:
    with Rooms(max_streams=2, max_body_bytes=10, is_shared=False).visit("") as visit:
        await arriving(visit, b"0123456789", 0)
        with pytest.raises(BadInput) as caught:
            await arriving(visit, b"0123456789+", 0)
        assert (caught.value.status, caught.value.code) == (413, "body_too_large")


async def test_bodies_of_one_owner_leave_room() -> None:
    """There is room for 16 of the largest, of which m may have as many as are left besides: 7."""
    rooms = Rooms(max_streams=32, max_body_bytes=2**20, is_shared=True)
    with ExitStack() as held:
        for owner in "y" + "m" * 7:
            await arriving(held.enter_context(rooms.visit(owner)), bytes(2**20), 0)
        with pytest.raises(BadInput) as caught:
            await arriving(held.enter_context(rooms.visit("m")), bytes(2**20), 0)
        assert caught.value.code == "rate_limit_exceeded"
    rooms.bytes.add("m", 16 * 2**20)  # all has been given back


def test_what_a_body_continues_is_held_beside_it() -> None:
    """Bug: 300 requests of 110 bytes that continue a large response held 430 MB, and counted as 33 kB."""
    rooms = Rooms(max_streams=32, max_body_bytes=2**20, is_shared=False)
    with rooms.visit("m") as visit:
        visit.set_held(rooms.bytes, 2**20)
        for _ in range(15):
            visit.add_bytes(2**20)
        with pytest.raises(BadInput):
            visit.add_bytes(1)
    assert not any(visit.held.values())


def test_each_choice_is_a_stream() -> None:
    """Bug: 64 requests with 16 choices each were 64 streams, and 1,024 sequences that wait."""
    rooms = Rooms(max_streams=100, max_body_bytes=2**21, is_shared=True)
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


def test_half_sent_bodies_take_no_streams() -> None:
    """Bug: 1,024 of them, which cost a client nothing, and everybody else got 503 for a minute.

    Small ones begin when they are whole.
    """
    small, large = (http_bytes(RESPONSES, HI | {"input": "x" * n}) for n in (2, 2 * body.SMALL_BODY_BYTES))
    with serve("--max-streams", "2") as server, ExitStack() as held:
        halves = [held.enter_context(server.connect(ask[:-5])) for ask in [small, large] * 10]
        time.sleep(0.1)
        assert server.post(RESPONSES, HI).status == 200
        assert not select.select(halves, [], [], 0)[0]
        halves[0].sendall(small[-5:])
        assert halves[0].recv(65536).startswith(b"HTTP/1.1 200 ")
