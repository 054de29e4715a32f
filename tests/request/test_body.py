"""Bodies: what they may hold, and how they may be compressed."""

import asyncio
import gzip
import json
import time
from collections.abc import Callable, Iterator

import pytest

from helpers.serving import Json, Reply, Server, serve
from request import body
from request.refusals import BadInput
from request.room import MAX_BODY_BYTES, Rooms

RESPONSES = "/v1/responses"
HI: Json = {"model": "tiny", "input": "hi", "max_output_tokens": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as started:
        yield started
        assert "Traceback" not in started.log()


def error(reply: Reply, status: int) -> Json:
    assert reply.status == status, reply.body
    found: Json = reply.json["error"]
    return found


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


# fmt: off
#   text                          values, at most; how deep they nest
COUNTS = [
    (b"1",                        1, 0),
    (b"[]",                       2, 1),
    (b'{"a": 1, "b": [2, 3]}',    5, 2),
    (b'{"a,b": ",,[{"}',          2, 1),
    (rb'["\",", 1]',              3, 1),
    (rb'["\\", [[1]]]',           5, 3),
]
# fmt: on


@pytest.mark.parametrize(("text", "n_values", "nesting"), COUNTS)
def test_what_stands_outside_strings(text: bytes, n_values: int, nesting: int) -> None:
    outside = body.outside_strings(text)
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
    bomb = PACKERS[encoding](json.dumps(HI | {"banana": "x" * MAX_BODY_BYTES}).encode())
    refusal = error(server.post(RESPONSES, bomb, Content_Encoding=encoding), 413)
    assert str(MAX_BODY_BYTES) in refusal["message"]


def test_what_a_body_unpacks_to_is_held() -> None:
    text = b" " * 100_000
    with Rooms(8).visit("") as visit:
        assert body.unpacked(gzip.compress(text), "gzip", visit) == text
        assert visit.held[visit.rooms.bytes] == len(text)


def test_the_parser_rests_as_long_as_it_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: bodies of 2 MB from 50 clients kept the interpreter's lock from the streams for 0.3 s."""
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    async def parse(text: bytes) -> None:
        with Rooms(8).visit("") as visit:
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
