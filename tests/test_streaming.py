"""streaming.py on its own: answers, as ASGI sees them."""

import asyncio
import json
from contextlib import aclosing

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

import streaming
from streaming import KEEP_ALIVE, PIECE_BYTES, JsonAnswer, KeptAlive, while_connected


def test_a_large_answer_leaves_in_pieces() -> None:
    """Each waits until the client has read most of those before."""
    text = json.dumps("x" * 3 * PIECE_BYTES)
    sent: list[Message] = []

    async def receive() -> Message:
        return await asyncio.Future()  # the client stays

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(JsonAnswer(text, headers={"Warning": "299"})({"type": "http"}, receive, send))
    start, *pieces = sent
    assert (start["status"], dict(start["headers"])[b"warning"]) == (200, b"299")
    assert int(dict(start["headers"])[b"content-length"]) == len(text)
    assert b"".join(piece["body"] for piece in pieces) == text.encode()
    assert max(len(piece["body"]) for piece in pieces) == PIECE_BYTES


def test_work_ends_with_its_client() -> None:
    """What it raises on its way out is dropped; while the client is there, what it raises is told."""
    has_left = asyncio.Event()

    async def receive() -> Message:
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def work_on() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError("nobody is there")

    async def fail() -> str:
        raise TimeoutError("an upstream was too slow")

    async def main() -> None:
        with pytest.raises(TimeoutError, match="too slow"):
            await while_connected(fail(), receive)
        asyncio.get_running_loop().call_soon(has_left.set)
        with pytest.raises(ClientDisconnect):
            await while_connected(work_on(), receive)

    asyncio.run(main())


def test_silence_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is silent for longer than KEEP_ALIVE_S gets comments, and every frame still once."""
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.001)

    async def main() -> list[bytes]:
        written: list[bytes] = []
        has_comments = asyncio.Event()

        async def send(message: Message) -> None:
            written.append(message["body"])
            if written.count(KEEP_ALIVE) == 2:
                has_comments.set()

        async with aclosing(KeptAlive(send)) as stream:
            await stream.write(b"1")
            await has_comments.wait()
            await stream.write(b"2")
        n_written = len(written)
        await asyncio.sleep(0.01)
        assert len(written) == n_written, "a comment behind the end"
        return written

    written = asyncio.run(main())
    assert [frames for frames in written if frames != KEEP_ALIVE] == [b"1", b"2"]
    assert written[1] == KEEP_ALIVE


def test_a_stream_that_is_not_silent_gets_no_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one timer of a stream is pushed back by each write."""
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.1)

    async def main() -> list[bytes]:
        written: list[bytes] = []

        async def send(message: Message) -> None:
            written.append(message["body"])

        async with aclosing(KeptAlive(send)) as stream:
            for _ in range(30):
                await stream.write(b"1")
                await asyncio.sleep(0.01)
        return written

    assert asyncio.run(main()) == [b"1"] * 30


def test_a_client_that_does_not_read_has_one_comment_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-pressure holds a comment like any frame; a second one would wait behind it."""
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.001)

    async def main() -> int:
        n_waiting = 0

        async def send(_: Message) -> None:
            nonlocal n_waiting
            n_waiting += 1
            await asyncio.Future()  # the client does not read

        async with aclosing(KeptAlive(send)):
            await asyncio.sleep(0.05)
            return n_waiting

    assert asyncio.run(main()) == 1
