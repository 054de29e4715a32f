"""Bodies: what they may hold, and how they may be compressed."""

import asyncio
import gzip
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest

from helpers.serving import ROOT, Json, Reply, Server, serve
from request import body
from request.refusals import BadInput
from request.room import MAX_BODY_BYTES, Rooms

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

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
#   text                          values, at most
COUNTS = [
    (b"",                         1),
    (b"1",                        1),
    (b"[1]",                      2),
    (b"[]",                       2),
    (b'{"a": 1, "b": [2, 3]}',    5),
    (b'{"a,b": ",,[{"}',          2),
    (rb'["\",", 1]',              3),
    (rb'["\\", [[1]]]',           5),
]
# fmt: on


@pytest.mark.parametrize(("text", "n_values"), COUNTS)
def test_count(text: bytes, n_values: int) -> None:
    assert body.n_values(body.outside_strings(text)) == n_values


@pytest.mark.parametrize("nested", ["[%s]", '{"a": %s}', '[0, {"[": %s}]'])
def test_lists_and_objects_nest_so_deep(nested: str) -> None:
    """What the server builds of a body is read by functions that recurse."""
    n_levels = body.MAX_DEPTH // (nested.count("[") + nested.count("{") - nested.count('"["'))
    text = '"[[{"'
    for _ in range(n_levels):
        text = nested % text
    assert body.parse(text.encode()) == json.loads(text)
    for deep in (f"[{text}]", "[" * 10_000 + "]" * 10_000):
        with pytest.raises(BadInput) as refusal:
            body.parse(deep.encode())
        assert (refusal.value.status, refusal.value.code) == (400, "invalid_json")


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}


@pytest.mark.bug("H12")
@pytest.mark.parametrize("encoding", PACKERS)
def test_bodies_may_be_compressed(server: Server, encoding: str) -> None:
    pack = PACKERS[encoding]
    text = "".join(map(str, range(20_000)))
    whole = pack(json.dumps(HI | {"banana": text}).encode())
    assert server.post(RESPONSES, whole, Content_Encoding=encoding).status == 200
    for broken in (whole[:-1], whole + b"x", b"", b"x" * 99):
        refusal = error(server.post(RESPONSES, broken, Content_Encoding=encoding), 400)
        assert refusal["code"] == "invalid_json"


@pytest.mark.bug("I06")
@pytest.mark.parametrize("encoding", PACKERS)
def test_a_body_unpacks_to_so_much(server: Server, encoding: str) -> None:
    """In bytes, and in bytes for each that came: 8 kB became 8 MB."""
    small = json.dumps(HI | {"banana": "x" * (body.SMALL_BYTES - 200)}).encode()
    assert server.post(RESPONSES, PACKERS[encoding](small), Content_Encoding=encoding).status == 200
    for n_bytes in (MAX_BODY_BYTES // 2, MAX_BODY_BYTES):
        bomb = PACKERS[encoding](json.dumps(HI | {"banana": "x" * n_bytes}).encode())
        refusal = error(server.post(RESPONSES, bomb, Content_Encoding=encoding), 413)
        assert f"{body.MAX_RATIO} for each" in refusal["message"]


def test_a_server_that_cannot_read_zstd_names_the_package() -> None:
    script = (
        "import sys; sys.modules['backports.zstd'] = sys.modules['compression.zstd'] = None\n"
        "from request import body, refusals\n"
        "try: raise body.unknown_encoding('zstd')\n"
        "except refusals.BadInput as refusal: print(refusal.code, refusal.message)"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith("unsupported_content_encoding Expected")
    assert "backports.zstd" in said.stdout


def test_the_parser_rests_as_long_as_it_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: bodies of 2 MB from 50 clients kept the interpreter's lock from the streams for 0.3 s."""
    rests: list[float] = []
    clock = iter([10.0, 10.25, 20.0, 20.5])

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    async def talk() -> None:
        with Rooms(8).visit("") as visit:
            for tail in (b"[1]", b"[1"):
                content = b" " * body.SMALL_BODY_BYTES + tail
                with nullcontext() if tail == b"[1]" else pytest.raises(BadInput):
                    async with body.parsed(content, visit) as value:
                        assert value == [1]

    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", rest)
        asyncio.run(talk())
    assert rests == [0.25, 0.5]
