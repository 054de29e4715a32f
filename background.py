"""Responses that outlive their request: an event log for each, and the registry of those that run.

    Producer --extend()--> EventLog --write()--> store.py
                              +-----read()--> any number of readers, at any time, from any event

Authority: https://platform.openai.com/docs/guides/background. What went wrong elsewhere: a background run
that expected another kind of message than a stream sends, github.com/EricLBuehler/mistral.rs/issues/1945.
Here there is one kind.

Rules of this file:
1. An event gets its number where it is appended, and nowhere else: 0, 1, 2, ... without a gap.
2. An event is encoded once, then and there: all readers share those bytes, and nothing can change them.
3. An event is seen when it is written, so no restart takes back what was seen. One write takes all events
   that came during the last one: the tokens do not wait for the disk. A write that fails is logged, its
   events are seen all the same, and the next write takes them too.
4. A response ends once, in its log: a cancel that comes before the last event wins, a later one is void.
5. Everything ends: a producer that returns, raises, is cancelled or was killed leaves a terminal event.

Not here: SQL (store.py), what an event says (responses.py), HTTP (api.py, streaming.py).
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from store import TERMINAL, Newest, Row, Store

log = logging.getLogger("background")
T = TypeVar("T")

Event = dict[str, Any]
Encode = Callable[[int, Event], bytes]
Write = Callable[[int, list[bytes], Newest], Awaitable[None]]

EVICT_EVERY_S = 1  # the limits are looked at when a response ends or is asked for, no more often than this


class EventLog:
    """The events of one response, or the chunks of one completion.

    `encode(number, event)` gives an event's frame; `write(first, frames, newest)` keeps frames, None keeps
    nothing; `frames` are those that an earlier process wrote, `newest` the response object in them.
    """

    def __init__(
        self, encode: Encode, write: Write | None = None, frames: Sequence[bytes] = (), newest: Newest = None
    ) -> None:
        self.events: list[Event] = []  # of this process
        self._encode = encode
        self._write = write
        # A frame, and the newest response object in it and those before it.
        self._frames: list[tuple[bytes, Newest]] = [(frame, newest) for frame in frames]  # readers see these
        self._pending: list[tuple[bytes, Newest]] = []  # encoded, not written yet
        self._n_kept = len(frames)  # written: fewer than `_frames` when a write has failed
        self._writing: asyncio.Task[None] | None = None
        self._closed = False
        self._news = asyncio.Event()

    @property
    def status(self) -> str:
        """Of the response: queued, in_progress or a terminal one; "" before its first event."""
        newest = _newest(self._pending) or self.seen
        return newest["status"] if newest else ""

    @property
    def seen(self) -> Newest:
        """The newest response object that readers see."""
        return _newest(self._frames)

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    @property
    def is_kept(self) -> bool:
        """Whether all that readers see is written."""
        return self._n_kept >= len(self._frames)

    def extend(self, events: Iterable[Event]) -> None:
        """Append events, in their order."""
        for event in events:
            frame = self._encode(len(self._frames) + len(self._pending), event)
            newest = event.get("response") or _newest(self._pending) or self.seen
            self._pending.append((frame, newest))
            self.events.append(event)
        if self._write is None:
            self._show(len(self._pending))
        elif self._pending and self._writing is None:
            self._writing = asyncio.create_task(self._write_all(self._write))

    def close(self) -> None:
        """Nothing follows."""
        self._closed = True
        self._wake()

    @property
    def broken_off(self) -> bool:
        """A response that the next process shall run: what was read of it is no whole stream."""
        return self._closed and bool(self.status) and not self.ended

    async def begun(self) -> None:
        """Wait until there is an event, or never will be."""
        while not (self.events or self._closed):
            await self._news.wait()

    async def written(self) -> None:
        """Wait until the events that there are now are written."""
        n = len(self._frames) + len(self._pending)
        while len(self._frames) < n:
            await self._news.wait()

    async def read(self, after: int = -1) -> AsyncGenerator[bytes]:
        """The frames behind number `after`: those there are, then those to come."""
        position = after + 1
        while position < len(self._frames) or self._pending or not self._closed:
            if position < len(self._frames):
                yield self._frames[position][0]
                position += 1
            else:
                await self._news.wait()

    async def write_again(self) -> bool:
        """Try once more what a write has failed to keep; whether all is kept now."""
        if self._write and not self.is_kept and self._writing is None:
            self._writing = asyncio.create_task(self._write_all(self._write))
        if self._writing:
            await asyncio.shield(self._writing)  # whoever waits may leave
        return self.is_kept

    async def _write_all(self, write: Write) -> None:
        while self._pending or not self.is_kept:
            n, newest = len(self._pending), _newest(self._pending) or self.seen
            kept = _newest(self._frames[self._n_kept - 1 : self._n_kept])
            frames = [frame for frame, _ in self._frames[self._n_kept :] + self._pending]
            try:
                await write(self._n_kept, frames, None if newest is kept else newest)
            except Exception:
                log.exception("%d events could not be stored yet", len(frames))
                self._show(n)
                if not self._pending:
                    break
            else:
                self._n_kept += len(frames)
                self._show(n)
        self._writing = None

    def _show(self, n: int) -> None:
        """The first `n` pending events are for readers now."""
        self._frames += self._pending[:n]
        del self._pending[:n]
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _newest(frames: Sequence[tuple[bytes, Newest]]) -> Newest:
    return frames[-1][1] if frames else None


class Producer(NamedTuple):
    """What makes the events of one response."""

    start: Callable[[], list[Event]]  # accepted: created, queued
    fill: Callable[[EventLog], Awaitable[None]]  # in_progress ... and the terminal event
    end: Callable[[str, str], list[Event]]  # (failed | cancelled, message): the terminal event instead


@dataclass(eq=False)
class Job:
    """A background response that has not ended."""

    row: Row
    log: EventLog
    filling: asyncio.Future[None]
    stop: tuple[str, str] | None = None  # why `filling` was cancelled; None: the next process shall run it
    ending: asyncio.Task[None] | None = None  # sees it to its end

    async def end(self) -> None:
        """Wait until it has ended and that is written."""
        assert self.ending
        await asyncio.wait({self.ending})


class QueueFull(Exception):
    """Too many background responses wait, or the server is about to stop."""


class NotStored(Exception):
    """The store does not take the response, so nobody can promise that it will end."""


class Registry:
    """The background responses of this process, and the store behind them."""

    def __init__(self, store: Store, encode: Encode, max_running: int = 8, max_queued: int = 256) -> None:
        self._store = store
        self._encode = encode
        self._slots = asyncio.Semaphore(max_running)  # the engine's other places are left to the foreground
        self._max_running, self._max_queued = max_running, max_queued
        self._jobs: dict[str, Job] = {}
        self._thread = ThreadPoolExecutor(1, "store")  # SQLite is asked in order, and never in the event loop
        self._evicted_at = 0.0
        self._holding = False
        self.ended: dict[str, int] = {}  # in this process, by their last status

    # --- what a request asks for ----------------------------------------------------------------------------

    async def submit(self, row: Row, producer: Producer) -> EventLog:
        """Accept a background response: when this returns it will end, whatever happens to this process."""
        n_live = sum(not job.log.ended for job in self._jobs.values())
        if self._holding or n_live >= self._max_running + self._max_queued:
            raise QueueFull
        events = EventLog(self._encode, self._writer(row))
        events.extend(producer.start())
        self._run(row, events, producer)
        await events.written()
        if not events.is_kept:
            self._stop(self._jobs.pop(row.id), ("failed", "The response could not be stored."))
            raise NotStored(f"expected {row.id} to be written; the log says why it was not")
        return events

    def foreground_log(self, row: Row | None) -> EventLog:
        """A log that is stored as a whole, before its last event is seen; `row` None: not at all."""

        async def keep(first: int, frames: list[bytes], newest: Newest) -> None:
            if row and newest and newest["status"] in TERMINAL:
                await self._call(self._store.insert, _with(row, newest))
                await self._evict()

        return EventLog(self._encode, keep if row else None)

    async def get(self, id: str) -> Row | None:
        """A response as it stands."""
        if job := self._jobs.get(id):
            return job.row._replace(response=job.log.seen or job.row.response)
        await self._evict()
        return await self._call(self._store.get, id)

    async def events(self, id: str) -> EventLog | None:
        """The log of a background response; None when its events are no longer kept."""
        if job := self._jobs.get(id):
            return job.log
        frames = await self._call(self._store.frames, id)
        events = EventLog(self._encode, frames=frames)
        events.close()
        return events if frames else None

    async def cancel(self, id: str) -> None:
        """Stop a background response; when this returns it has ended, and the engine has been told."""
        if job := self._jobs.get(id):
            if not job.log.ended:
                self._stop(job, ("cancelled", ""))
            await job.end()

    async def delete(self, id: str) -> None:
        """Forget a response that has ended."""
        if job := self._jobs.get(id):
            await job.end()  # its last event is seen, and it is about to go
            self._jobs.pop(id, None)
        await self._call(self._store.delete, id)

    # --- the life of a job ----------------------------------------------------------------------------------

    async def take_over(
        self, producer: Callable[[Row], Awaitable[Producer]], interrupted: Callable[[list[bytes]], Event]
    ) -> None:
        """What the last process left: run again what was queued, end what was in progress."""
        for row in await self._call(self._store.live):
            frames = await self._call(self._store.frames, row.id)
            events = EventLog(self._encode, self._writer(row), frames, row.response)
            if row.response["status"] == "queued":
                try:
                    again = await producer(row)
                except Exception:  # another model serves now, or one with a shorter context
                    log.exception("%s was queued, and cannot run any more", row.id)
                else:
                    log.info("%s was queued: it runs again", row.id)
                    again.start()  # which the last process has said
                    self._run(row, events, again)
                    continue
            log.info("%s was interrupted: it has failed", row.id)
            events.extend([interrupted(frames)])
            await events.written()

    def hold(self) -> None:
        """Start no more: what is queued stays queued."""
        self._holding = True

    async def close(self, persistent: bool) -> None:
        """End what runs; what is queued in a persistent store waits there for the next process."""
        self._holding = True
        for job in self._jobs.values():
            if not (job.log.ended or job.stop):
                waits = persistent and job.log.status == "queued"
                self._stop(job, None if waits else ("failed", "The server is shutting down."))
        if endings := {job.ending for job in self._jobs.values() if job.ending}:
            await asyncio.wait(endings)

    def counts(self) -> dict[str, int]:
        return {"background": len(self._jobs)}

    def live(self) -> dict[str, int]:
        """How many are queued, and how many in progress."""
        statuses = [job.log.status for job in self._jobs.values()]
        return {status: statuses.count(status) for status in ("queued", "in_progress")}

    @property
    def accepts(self) -> bool:
        return not self._holding

    def _run(self, row: Row, events: EventLog, producer: Producer) -> None:
        async def in_turn() -> None:
            await events.written()
            async with self._slots:
                if self._holding:
                    await asyncio.Event().wait()  # until close() cancels it
                await producer.fill(events)

        job = self._jobs[row.id] = Job(row, events, asyncio.ensure_future(in_turn()))
        job.ending = asyncio.create_task(self._finish(job, producer))

    async def _finish(self, job: Job, producer: Producer) -> None:
        """See a job to its end: never cancelled itself, so there always is one."""
        await asyncio.wait({job.filling})
        stop = job.stop
        if not job.filling.cancelled():
            stop = stop or ("failed", "The run ended without a last event.")
            if error := job.filling.exception():
                log.error("the run of %s failed", job.row.id, exc_info=error)
                stop = ("failed", f"{type(error).__name__} in the server; its log has the details.")
        with closing(job.log):
            if stop and not job.log.ended:
                job.log.extend(producer.end(*stop))
        await job.log.written()
        if job.log.ended:
            self.ended[job.log.status] = self.ended.get(job.log.status, 0) + 1
        if job.log.is_kept:  # else what the store says of it is not what was seen
            self._jobs.pop(job.row.id, None)
        await self._evict()

    def _stop(self, job: Job, why: tuple[str, str] | None) -> None:
        job.stop = why
        job.filling.cancel()

    # --- the store's thread ---------------------------------------------------------------------------------

    def _writer(self, row: Row) -> Write:
        """The first write takes the row with it: none is ever stored without its first events."""

        async def write(first: int, frames: list[bytes], newest: Newest) -> None:
            if first == 0 and newest:
                await self._call(self._store.insert, _with(row, newest), frames)
            else:
                await self._call(self._store.append, row.id, first, frames, newest, time.time())

        return write

    async def _evict(self) -> None:
        if time.monotonic() - self._evicted_at > EVICT_EVERY_S:
            self._evicted_at = time.monotonic()
            for job in [*self._jobs.values()]:
                if job.ending and job.ending.done() and await job.log.write_again():  # the disk was full
                    self._jobs.pop(job.row.id, None)
            await self._call(self._store.evict, time.time())

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _with(row: Row, newest: dict[str, Any]) -> Row:
    """A row as its newest response object has it."""
    return row._replace(response=newest, ended_at=time.time() if newest["status"] in TERMINAL else None)
