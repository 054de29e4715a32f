"""streaming.py on its own: answers, as ASGI sees them."""

import asyncio
import json

import pytest
from starlette.types import Message

import streaming
from streaming import KEEP_ALIVE, PIECE_BYTES, JsonAnswer, kept_alive, while_connected


async def test_a_large_answer_leaves_in_pieces() -> None:
    """Each waits until the client has read most of those before."""
    text = json.dumps("x" * 3 * PIECE_BYTES)
    sent: list[Message] = []

    async def receive() -> Message:
        return await asyncio.Future()  # the client stays

    async def send(message: Message) -> None:
        sent.append(message)

    await JsonAnswer(text, headers={"Warning": "299"})({"type": "http"}, receive, send)
    start, *pieces = sent
    assert (start["status"], dict(start["headers"])[b"warning"]) == (200, b"299")
    assert int(dict(start["headers"])[b"content-length"]) == len(text)
    assert b"".join(piece["body"] for piece in pieces) == text.encode()
    assert max(len(piece["body"]) for piece in pieces) == PIECE_BYTES


async def test_work_that_is_cancelled_as_its_client_leaves_is_cancelled() -> None:
    """It runs in the task of its caller, and a stop of the server must end that."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def work_on() -> None:
        working.cancel()
        await asyncio.sleep(60)

    working = asyncio.create_task(while_connected(work_on(), receive))
    await asyncio.wait([working])
    assert working.cancelled()


async def written_in(
    monkeypatch: pytest.MonkeyPatch, silence_s: float, n_writes: int, wait_s: float, reads: bool = True
) -> list[bytes]:
    """What a stream has sent in the end that writes, then waits, and may be silent for so long."""
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", silence_s)
    written: list[bytes] = []

    async def send(message: Message) -> None:
        written.append(message["body"])
        if not reads:
            await asyncio.Future()

    async with kept_alive(send) as write:
        for _ in range(n_writes):
            await write(b"1")
            await asyncio.sleep(wait_s)
        await asyncio.sleep(wait_s)
    n_written = len(written)
    await asyncio.sleep(0.01)
    assert len(written) == n_written, "a comment after the end"
    return written


async def test_a_stream_that_is_not_silent_gets_no_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write puts the next comment off."""
    assert await written_in(monkeypatch, 0.1, n_writes=30, wait_s=0.01) == [b"1"] * 30


async def test_a_client_that_does_not_read_has_one_comment_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-pressure holds a comment like any frame; a second one would wait after it."""
    assert await written_in(monkeypatch, 0.001, n_writes=0, wait_s=0.05, reads=False) == [KEEP_ALIVE]
