"""Event logs: the events of one response, or the chunks of one completion, encoded once for all readers.

    events --extend()--> EventLog --write()--> the store, if the response is run in the background
                            +-------read()---> any number of readers, whenever they come, from any number on

Authority: https://platform.openai.com/docs/guides/background for what a reader may ask for.

Rules of this file:
1. An event gets its number where it is appended, and nowhere else: 0, 1, 2, ... without a gap.
2. An event is encoded once, then and there, together with the response object in it. Readers, the store
   and GET share those bytes, and nothing can change them.
3. An event that is to be stored is shown when it is written, so no restart takes back what was seen. One
   write takes all events that came during the last one: tokens do not wait for the disk. If a write fails,
   its events are shown all the same, and it is tried again.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

import sse
from responses import Event
from store import TERMINAL

READ_BYTES = 64 * 1024  # of frames that a reader gets at once: what a connection takes before it pauses us
RETRY_S = 5  # after a write that failed


class Entry(NamedTuple):
    """An event as it is sent, and the response object in it, with its status; "" if it has none."""

    frame: bytes
    status: str = ""
    response_json: str = ""


Encode = Callable[[int, Event], Entry]  # the event gets its number
Write = Callable[
    [int, Sequence[Entry]], Awaitable[bool]
]  # takes the first one's number; returns whether it could


def encode_event(number: int, event: Event) -> Entry:
    """Encode an event of the Responses API: rule 2. Raises ValueError for what JSON cannot say."""
    numbered = {"type": event["type"], "sequence_number": number} | event
    status = response_json = ""
    if "response" in event:
        status = event["response"]["status"]
        response_json = sse.dumps(event["response"])
        numbered["response"] = sse.Encoded(response_json)
    return Entry(sse.encode(sse.dumps(numbered), event["type"]), status, response_json)


def newest_of(entries: Sequence[Entry]) -> Entry | None:
    """Return the newest entry that has a response object."""
    return next((entry for entry in reversed(entries) if entry.status), None)


class EventLog:
    """The events of one response, or the chunks of one completion.

    What is appended is shown to readers when it is written; without `write` at once. `stored` was written by
    an earlier process. After a write that has failed, and is tried again:

    entries    0 1 2 3 4 5 6 7 8
    written    0 1 2 3              the next write takes 4 to 8
    shown      0 1 2 3 4 5 6 7 8    until then no reader waits for the store
    """

    def __init__(self, encode: Encode, write: Write | None = None, stored: Sequence[Entry] = ()) -> None:
        self.events: list[Event] = []  # appended by this process
        self.shown = newest_of(stored)  # has the newest response object that readers see
        self.status = self.shown.status if self.shown else ""  # of the newest one, be it shown or not
        self._encode = encode
        self._write = write
        self._entries = [*stored]
        self._n_shown = self._n_written = len(stored)
        self._writing: asyncio.Task[None] | None = None
        self._is_closed = False
        # The readers that wait for news, in their order: asyncio.Event is slower.
        self._waiters: dict[asyncio.Future[None], None] = {}

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    @property
    def is_broken_off(self) -> bool:
        """The next process shall run this response: what was read of it is not a whole stream."""
        return self._is_closed and bool(self.status) and not self.ended

    def encode(self, event: Event) -> Entry:
        """Encode an event as it will be if it is appended next."""
        return self._encode(len(self._entries), event)

    def extend(self, events: Iterable[Event]) -> None:
        """Append events, in their order."""
        for event in events:
            self.append(event, self.encode(event))

    def append(self, event: Event, entry: Entry) -> None:
        """Append an event, to be written and shown."""
        self.events.append(event)
        self._entries.append(entry)
        self.status = entry.status or self.status
        if self._write is None or self._n_shown > self._n_written:
            self._show()
        elif self._writing is None:
            self._writing = asyncio.create_task(self._write_all(self._write))

    async def _write_all(self, write: Write) -> None:
        """Write until all entries are written: rule 3."""
        while self._n_written < len(self._entries):
            entries = self._entries[self._n_written :]
            if await write(self._n_written, entries):
                self._n_written += len(entries)
                self._show(self._n_written)
            else:
                self._show()
                await asyncio.sleep(RETRY_S)
        self._writing = None

    def _show(self, n_entries: int | None = None) -> None:
        """Show the first entries to readers; None: all of them."""
        news = self._entries[self._n_shown : n_entries]
        self._n_shown += len(news)
        self.shown = newest_of(news) or self.shown
        self._wake_readers()

    def close(self) -> None:
        """Nothing follows."""
        self._is_closed = True
        self._wake_readers()

    def _wake_readers(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():  # woken already, or its reader was cancelled and does not know it yet
                waiter.set_result(None)

    async def _news(self) -> None:
        """Wait until there is something to look at."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            del self._waiters[waiter]

    async def until_begun(self) -> None:
        """Wait until there is an event, or never will be."""
        while not (self._entries or self._is_closed):
            await self._news()

    async def until_over(self) -> None:
        """Wait until all is shown that there will ever be."""
        while not self._is_closed or self._n_shown < len(self._entries):
            await self._news()

    async def until_stored(self) -> None:
        """Wait until all is written, however long the store takes, or give_up() is called."""
        if self._writing:
            await asyncio.wait({self._writing})

    def give_up(self) -> None:
        """Write no more."""
        if self._writing:
            self._writing.cancel()

    async def read(self, after: int = -1) -> AsyncGenerator[list[bytes]]:
        """Yield the frames after number `after`: batches of those that are there, then those to come.

        A batch ends with the frame that reaches READ_BYTES.
        """
        position = after + 1
        while position < self._n_shown or self._n_shown < len(self._entries) or not self._is_closed:
            frames: list[bytes] = []
            n_bytes = 0
            while position < self._n_shown and n_bytes < READ_BYTES:
                frames.append(self._entries[position].frame)
                n_bytes += len(frames[-1])
                position += 1
            if frames:
                yield frames
            if position < self._n_shown:
                await asyncio.sleep(0)  # others have their turn, however fast this reader is
            elif not frames:
                await self._news()
