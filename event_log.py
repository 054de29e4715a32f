"""Event logs: the events of one response, or the chunks of one completion, encoded once for all readers.

    events --extend()--> EventLog --its `write`--> the store, if the response is run in the background
                            +-------read()---> any number of readers, whenever they come, from any number on

Authority: https://platform.openai.com/docs/guides/background for what a reader may ask for.

Rules of this file:
1. An event's number is its place in the log: 0, 1, 2, ... without a gap. Chunks of a completion and
   events of a message have none. A WebSocket goes on counting between two responses (service/websocket.py).
2. An event is encoded when it is appended, together with its response object. Readers, the store and GET
   share those bytes. Nothing changes them. Two kinds are encoded once before, to be stored first: the last
   event of a foreground response (jobs.py), and those of a response that is queued (background.py).
3. Readers see an event of a background response only after a write of it, so a restart takes back nothing
   that they saw. One write takes all events since the last one began: tokens do not wait for the disk. If
   the write fails, readers see its events all the same, and the next write takes them too.
4. Nothing here bounds a log in bytes: what its run may say does, and how many run. A delta takes about 240
   bytes, so the 4096 tokens of --max-output-tokens take 1 MB, and the last events repeat the text four times.
   Logprobs have a bound of their own (MAX_LOGPROBS in worker.py), and so has the answer of an upstream
   (MAX_ANSWER_BYTES in gateway/answers.py). Logs of streams are --max-streams at most; those of background
   responses count in bytes (background.py).

Why one log that readers poll by position, and not a queue for each reader: a reader may come later, from any
number on, and a slow one must not make the others wait. The price is that a log keeps all frames while its
response runs. The event loop alone uses a log: it has no lock.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

import msgspec

import sse
from responses import Event
from store import TERMINAL

FRAMES_A_READ = 64  # the most that a reader gets at once


class Entry(msgspec.Struct, frozen=True):
    """The bytes of an event, and its response object with its status, "" without one."""

    frame: bytes
    status: str = ""
    response_json: str = ""


# Takes the number of the first entry; returns whether all of them could be written.
Write = Callable[[int, Sequence[Entry]], Awaitable[bool]]


def newest_of(entries: Sequence[Entry]) -> Entry:
    """Return the newest entry that has a response object, else an empty one."""
    return next((entry for entry in reversed(entries) if entry.status), Entry(b""))


def encode_event(number: int, event: Event) -> Entry:
    """Encode an event, or a chunk of chat: rule 2. Raises ValueError for values that JSON cannot express."""
    type_ = event.get("type")
    if type_ and type_.startswith("response."):
        event = {"type": type_, "sequence_number": number, **event}
    if "response" not in event:
        return Entry(sse.encode(event, type_))
    response_json = sse.dumps(event["response"])
    encoded = event | {"response": sse.Encoded(response_json)}
    return Entry(sse.encode(encoded, type_), event["response"]["status"], response_json)


class EventLog:
    """The events of one response, or the chunks of one completion.

    Readers see an event after a `write` of it (rule 3); without `write` at once. `stored`: events that the
    store has already.
    """

    def __init__(self, write: Write | None = None, stored: Sequence[Entry] = ()) -> None:
        self.entries = [*stored]
        # With the newest response object, and with the newest one that readers see.
        self.newest = self.shown = newest_of(stored)
        self._write = write
        self._n_shown = self._n_written = len(stored)
        self._writing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._news = asyncio.Event()  # a pulse, set and cleared at once: every waiting reader looks again

    def extend(self, events: Iterable[Event]) -> None:
        """Append events in their order, and write and show them. If `events` raises, those before it stay."""
        for event in events:
            entry = encode_event(len(self.entries), event)
            self.entries.append(entry)
            if entry.status:
                self.newest = entry
                if self._write is None:
                    self.shown = entry
        if self._write is None:
            self._show(len(self.entries))
        elif self._writing is None:
            self._writing = asyncio.create_task(self._write_all(self._write))

    def _show(self, n_shown: int) -> None:
        """Show the first `n_shown` entries to readers, and wake those that wait."""
        self._n_shown = n_shown
        self._news.set()
        self._news.clear()

    async def until_begun(self) -> None:
        """Wait for the first event, or for the end of a log without events."""
        while not (self.entries or self._is_closed):
            await self._news.wait()

    async def read(self, after: int = -1) -> AsyncGenerator[list[bytes]]:
        """Yield the frames after number `after` in batches, as they come, until the log is over."""
        position = after + 1
        while not self.is_over(position):
            if position >= self._n_shown:
                await self._news.wait()
                await asyncio.sleep(0)  # collect all events of this turn of the event loop in one write
                continue
            entries = self.entries[position : min(position + FRAMES_A_READ, self._n_shown)]
            position += len(entries)
            yield [entry.frame for entry in entries]
            if position < self._n_shown:
                await asyncio.sleep(0)  # let others run, however fast this reader is

    def is_over(self, position: int) -> bool:
        """Return whether a reader who has come to this number has read all: the log is closed, and shown."""
        return self._is_closed and position >= self._n_shown == len(self.entries)

    def close(self) -> None:
        """End the log: no event follows."""
        self._is_closed = True
        self._show(self._n_shown if self._write else len(self.entries))  # also if extend() has raised

    @property
    def status(self) -> str:
        """Of the newest response object, even if readers do not see it yet."""
        return self.newest.status

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    async def _write_all(self, write: Write) -> None:
        """Write until all entries are written: rule 3."""
        while unwritten := self.entries[self._n_written :]:
            newest = self.newest
            is_written = await write(self._n_written, unwritten)
            self._show(self._n_written + len(unwritten))
            self.shown = newest
            if is_written:
                self._n_written += len(unwritten)
            else:
                await asyncio.sleep(RETRY_S)
        self._writing = None

    async def until_over(self) -> None:
        while not self.is_over(self._n_shown):
            await self._news.wait()


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

RETRY_S = 5  # after a write that failed
