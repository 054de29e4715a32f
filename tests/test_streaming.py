"""streaming.py on its own: answers, as ASGI sees them."""

import asyncio
import json
import time
from typing import Any

from starlette.types import Message

from streaming import JsonAnswer

FOLD_S = 0.3


def test_a_large_answer_does_not_stop_the_loop() -> None:
    """Folding and encoding an answer of 32 MB held up all streams for four seconds."""
    n_turns = 0

    def fold() -> tuple[int, dict[str, Any]]:
        deadline = time.monotonic() + FOLD_S
        while time.monotonic() < deadline:
            pass
        return 200, {"turns": n_turns}

    async def main() -> list[Message]:
        sent: list[Message] = []

        async def receive() -> Message:
            return await asyncio.Future()  # the client stays

        async def send(message: Message) -> None:
            sent.append(message)

        async def count_turns() -> None:
            nonlocal n_turns
            while True:
                await asyncio.sleep(0)
                n_turns += 1

        counting = asyncio.create_task(count_turns())
        done = asyncio.create_task(asyncio.sleep(0))
        await JsonAnswer(done, fold)({"type": "http"}, receive, send)
        counting.cancel()
        return sent

    start, body = asyncio.run(main())
    assert start["status"] == 200
    assert json.loads(body["body"])["turns"] > 10
