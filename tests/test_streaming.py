"""streaming.py on its own: answers, as ASGI sees them. Comments in a silence are laws of simulate.py."""

import asyncio
import json

from starlette.types import Message

from streaming import PIECE_BYTES, JsonAnswer, while_connected


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
