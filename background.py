"""An append-only log of one response's events, and its readers.

    producer --extend()--> EventLog --read()--> any number of readers, at any time, from any event

Rules of this file:
1. An event gets its number where it is appended, and nowhere else: 0, 1, 2, ... without a gap.
2. An event is encoded once, then and there: all readers share those bytes, and nothing can change them.
3. A reader ends when the log is closed and read to its end; a log is closed on every path of its producer.

Not here: what an event says (responses.py, completions.py), who runs the producer (server.py).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any


class EventLog:
    """`encode(number, event)` gives an event's frame."""

    def __init__(self, encode: Callable[[int, dict[str, Any]], bytes]) -> None:
        self.events: list[dict[str, Any]] = []
        self._encode = encode
        self._frames: list[bytes] = []
        self._closed = False
        self._news = asyncio.Event()

    def extend(self, events: Iterable[dict[str, Any]]) -> None:
        """Append events, in their order."""
        for event in events:
            self._frames.append(self._encode(len(self._frames), event))
            self.events.append(event)
        self._wake()

    def close(self) -> None:
        """Nothing follows."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def read(self, after: int = -1) -> AsyncGenerator[bytes]:
        """The frames behind number `after`: those there are, then those to come."""
        position = after + 1
        while position < len(self._frames) or not self._closed:
            if position < len(self._frames):
                yield self._frames[position]
                position += 1
            else:
                await self._news.wait()
