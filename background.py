"""Event logs, and the responses that fill them: in the foreground or in the background, by one way.

    Run --fill()--> EventLog --write()--> store.py
                       +-----read()--> any number of readers, at any time, from any event

A foreground response ends with its HTTP request, and is stored as a whole. A background response is stored
before anything else, event by event; it waits for a slot, and survives its request and this process.

Authority: https://platform.openai.com/docs/guides/background. What went wrong elsewhere: a background run
that expected another kind of message than a stream sends, github.com/EricLBuehler/mistral.rs/issues/1945.
Here there is one kind.

Rules of this file:
1. An event gets its number where it is appended, and nowhere else: 0, 1, 2, ... without a gap.
2. An event is encoded once, then and there: all readers share those bytes, and nothing can change them.
3. An event is shown when it is written, so no restart takes back what was seen. One write takes all events
   that came during the last one: the tokens do not wait for the disk. A write that fails is logged, its
   events are shown all the same, and the next write takes them too. (To fail the response instead would
   need the same retry: that it has failed must be stored once there is room, or it would stay in progress.)
4. A response ends once, in its log: a cancel that comes before the last event wins, a later one is void.
5. Everything ends: a run that returns, raises, is cancelled or was killed leaves a terminal event.

Not here: SQL (store.py), what an event says (responses.py), HTTP (api.py, streaming.py).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from store import TERMINAL, Row, Snapshot, Store

log = logging.getLogger("background")
T = TypeVar("T")

Event = dict[str, Any]
Encode = Callable[[int, Event], bytes]  # (number, event) -> its frame
Write = Callable[[int, list[bytes], Snapshot], Awaitable[None]]  # as EventLog says

EVICT_EVERY_S = 1  # the store's limits are looked at when a response ends or is asked for, not more often


# --- the log ------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    frame: bytes
    snapshot: Snapshot  # the newest response object, in this event or in one before it


class EventLog:
    """The events of one response, or the chunks of one completion.

    `write(number of the first, frames, snapshot)` stores frames, and the newest response object where it is
    new; None stores nothing. `frames` are those that an earlier process has stored, `snapshot` the newest
    response object in them.
    """

    def __init__(
        self,
        encode: Encode,
        write: Write | None = None,
        frames: Sequence[bytes] = (),
        snapshot: Snapshot = None,
    ) -> None:
        self.events: list[Event] = []  # appended by this process
        self._encode = encode
        self._write = write
        self._shown = [Entry(frame, snapshot) for frame in frames]  # what readers get
        self._pending: list[Entry] = []  # encoded, not written yet
        self._n_written = len(frames)  # fewer than there are in `_shown` where a write has failed
        self._writing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._news = asyncio.Event()  # set, and replaced by a new one, whenever something has changed

    @property
    def status(self) -> str:
        """The response's: queued, in_progress or a terminal one; "" before its first event."""
        newest = newest_snapshot(self._pending) or self.snapshot
        return newest["status"] if newest else ""

    @property
    def snapshot(self) -> Snapshot:
        """The newest response object that is shown to readers."""
        return newest_snapshot(self._shown)

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL

    @property
    def is_stored(self) -> bool:
        """Whether all that readers see is written."""
        return self._n_written >= len(self._shown)

    @property
    def is_broken_off(self) -> bool:
        """A response that the next process shall run: what was read of it is no whole stream."""
        return self._is_closed and bool(self.status) and not self.ended

    def extend(self, events: Iterable[Event]) -> None:
        """Append events, in their order."""
        for event in events:
            frame = self._encode(len(self._shown) + len(self._pending), event)
            newest = event.get("response") or newest_snapshot(self._pending) or self.snapshot
            self._pending.append(Entry(frame, newest))
            self.events.append(event)
        if self._write is None:
            self._show(len(self._pending))
        elif self._pending and self._writing is None:
            self._writing = asyncio.create_task(self._write_all(self._write))

    def close(self) -> None:
        """Nothing follows."""
        self._is_closed = True
        self._wake_readers()

    async def begun(self) -> None:
        """Wait until there is an event, or never will be."""
        while not (self.events or self._is_closed):
            await self._news.wait()

    async def written(self) -> None:
        """Wait until the events that there are now are shown."""
        n_entries = len(self._shown) + len(self._pending)
        while len(self._shown) < n_entries:
            await self._news.wait()

    async def read(self, after: int = -1) -> AsyncGenerator[bytes]:
        """The frames behind number `after`: those there are, then those to come."""
        position = after + 1
        while position < len(self._shown) or self._pending or not self._is_closed:
            if position < len(self._shown):
                yield self._shown[position].frame
                position += 1
            else:
                await self._news.wait()

    async def write_again(self) -> bool:
        """Try once more what a write has failed to store; whether all is stored now."""
        if self._write and not self.is_stored and self._writing is None:
            self._writing = asyncio.create_task(self._write_all(self._write))
        if self._writing:
            await asyncio.shield(self._writing)  # whoever waits may leave
        return self.is_stored

    async def _write_all(self, write: Write) -> None:
        while self._pending or not self.is_stored:
            n_pending = len(self._pending)
            entries = self._shown[self._n_written :] + self._pending
            written_snapshot = newest_snapshot(self._shown[self._n_written - 1 : self._n_written])
            snapshot = newest_snapshot(entries)
            if snapshot is written_snapshot:
                snapshot = None  # nothing new
            try:
                await write(self._n_written, [entry.frame for entry in entries], snapshot)
            except Exception:
                log.exception("%d events could not be stored yet", len(entries))
                self._show(n_pending)
                if not self._pending:
                    break
            else:
                self._n_written += len(entries)
                self._show(n_pending)
        self._writing = None

    def _show(self, n_entries: int) -> None:
        """The first pending ones are for readers now."""
        self._shown += self._pending[:n_entries]
        del self._pending[:n_entries]
        self._wake_readers()

    def _wake_readers(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def newest_snapshot(entries: Sequence[Entry]) -> Snapshot:
    return entries[-1].snapshot if entries else None


# --- what fills it ------------------------------------------------------------------------------------------

Reason = Literal["failed", "cancelled"]


class Run(Protocol):
    """What makes the events of one response."""

    def start(self) -> list[Event]:
        """The response is accepted, and waits: created, queued. For a background response alone."""

    async def fill(self, log: EventLog) -> None:
        """Append all other events. A foreground response may be refused: then it raises before the first."""

    def end(self, reason: Reason, message: str) -> list[Event]:
        """The terminal event where fill() does not come to it, and what it closes."""


class Ending(NamedTuple):
    reason: Reason
    message: str


CANCELLED = Ending("cancelled", "")
UNFINISHED = Ending("failed", "The run ended without a last event.")
NOT_STORED = Ending("failed", "The response could not be stored.")
SHUT_DOWN = Ending("failed", "The server is shutting down.")


@dataclass(eq=False)
class Job:
    """A response that has not ended.

    `if_cancelled` says how it ends when its task is cancelled; None: the next process shall run it.
    """

    row: Row
    run: Run
    log: EventLog
    if_cancelled: Ending | None
    task: asyncio.Task[None] = field(init=False)

    async def wait(self) -> None:
        """Wait until it has ended and that is written."""
        await asyncio.wait({self.task})


class QueueFull(Exception):
    """Too many background responses wait, or the server is about to stop."""


class NotStored(Exception):
    """The store does not take the response, so nobody can promise that it will end."""


class Registry:
    """The responses that run, those in the background by id, and the store behind them."""

    def __init__(self, store: Store, encode: Encode, max_running: int = 8, max_queued: int = 256) -> None:
        self._store = store
        self._encode = encode
        self._slots = asyncio.Semaphore(max_running)  # the engine's other places are left to the foreground
        self._max_running = max_running
        self._max_queued = max_queued
        self._jobs: dict[str, Job] = {}  # in the background
        self._thread = ThreadPoolExecutor(1, "store")  # SQLite is asked in order, and never in the event loop
        self._evicted_at = 0.0
        self._is_stopping = False
        self.ended = Counter[str]()  # background responses of this process, by their last status

    # --- what a request asks for ----------------------------------------------------------------------------

    async def start(self, row: Row, run: Run) -> Job:
        """Start a response.

        One in the foreground belongs to its request: whoever cancels the task ends it as cancelled, and the
        task raises what refuses the request. One in the background is accepted: when this returns it will
        end, whatever happens to this process. Raises QueueFull, NotStored.
        """
        events = EventLog(self._encode, self._write_of(row))
        if not row.background:
            return self._launch(Job(row, run, events, if_cancelled=CANCELLED))
        n_live = len([job for job in self._jobs.values() if not job.log.ended])
        if self._is_stopping or n_live >= self._max_running + self._max_queued:
            raise QueueFull(
                f"expected a server that runs, and room in its queue, got {n_live} live responses"
            )
        events.extend(run.start())
        job = self._jobs[row.id] = self._launch(Job(row, run, events, if_cancelled=None))
        await events.written()
        if not events.is_stored:
            self._stop(self._jobs.pop(row.id), NOT_STORED)
            raise NotStored(f"expected {row.id} to be written; the log says why it was not")
        return job

    async def get(self, id: str) -> Row | None:
        """A response as it stands."""
        if job := self._jobs.get(id):
            return job.row._replace(response=job.log.snapshot or job.row.response)
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
            self._stop(job, CANCELLED)
            await job.wait()

    async def delete(self, id: str) -> None:
        """Forget a response that has ended."""
        if job := self._jobs.get(id):
            await job.wait()  # its last event is shown, and it is about to go
            self._jobs.pop(id, None)
        await self._call(self._store.delete, id)

    # --- the life of a process ------------------------------------------------------------------------------

    async def take_over(
        self, run_again: Callable[[Row], Awaitable[Run]], interrupted: Callable[[list[bytes]], Event]
    ) -> None:
        """See to what the last process left: run again what was queued, end what was in progress.

        `interrupted(frames)` makes the last event of a response behind those that are stored.
        """
        for row in await self._call(self._store.live):
            frames = await self._call(self._store.frames, row.id)
            events = EventLog(self._encode, self._write_of(row), frames, row.response)
            if row.response["status"] == "queued":
                try:
                    run = await run_again(row)
                except Exception:  # another model serves now, or one with a shorter context
                    log.exception("%s was queued, and cannot run any more", row.id)
                else:
                    log.info("%s was queued: it runs again", row.id)
                    run.start()  # its events are stored: the last process has appended them
                    self._jobs[row.id] = self._launch(Job(row, run, events, if_cancelled=None))
                    continue
            log.info("%s was interrupted: it has failed", row.id)
            events.extend([interrupted(frames)])
            await events.written()

    def hold(self) -> None:
        """Start no more: what is queued stays queued."""
        self._is_stopping = True

    async def close(self, persistent: bool) -> None:
        """End what runs; what is queued in a persistent store waits there for the next process."""
        self._is_stopping = True
        for job in self._jobs.values():
            is_left = persistent and job.log.status == "queued"
            self._stop(job, None if is_left else SHUT_DOWN)
        tasks = {job.task for job in self._jobs.values()}
        if tasks:
            await asyncio.wait(tasks)

    @property
    def accepts(self) -> bool:
        return not self._is_stopping

    def counts(self) -> dict[str, int]:
        return {"background": len(self._jobs)}

    def live(self) -> dict[str, int]:
        """How many background responses are queued, and how many in progress."""
        statuses = [job.log.status for job in self._jobs.values()]
        return {status: statuses.count(status) for status in ("queued", "in_progress")}

    # --- the life of a job ----------------------------------------------------------------------------------

    def _launch(self, job: Job) -> Job:
        job.task = asyncio.create_task(self._see_to_its_end(job))
        return job

    async def _see_to_its_end(self, job: Job) -> None:
        try:
            with closing(job.log):
                await self._fill(job)
            await job.log.written()
            await self._evict()
        finally:  # also where it was cancelled or refused
            await job.log.written()
            if job.row.background:
                self._forget(job)

    async def _fill(self, job: Job) -> None:
        """Fill the log of a job; whatever happens, what has begun gets its terminal event."""
        ending: Ending | None = UNFINISHED
        try:
            async with self._turn(job):
                await job.run.fill(job.log)
        except asyncio.CancelledError:
            ending = job.if_cancelled
            raise
        except Exception as error:
            if not job.log.status:  # a refusal, or a fault before anything was said: the request gets it
                raise
            log.error("the run of %s failed", job.row.id, exc_info=error)
            message = f"{type(error).__name__} in the server; its log has the details."
            ending = Ending("failed", message)
        finally:
            if ending and job.log.status and not job.log.ended:
                job.log.extend(job.run.end(*ending))

    @asynccontextmanager
    async def _turn(self, job: Job) -> AsyncIterator[None]:
        """A slot, for which a background response waits; the foreground's number is limited by admission."""
        if not job.row.background:
            yield
            return
        await job.log.written()
        async with self._slots:
            if self._is_stopping:
                await asyncio.Event().wait()  # until close() cancels it
            yield

    def _stop(self, job: Job, ending: Ending | None) -> None:
        """Who is the first to stop a job decides how it ends."""
        if not (job.log.ended or job.task.cancelling()):
            job.if_cancelled = ending
            job.task.cancel()

    def _forget(self, job: Job) -> None:
        if job.log.ended:
            self.ended[job.log.status] += 1
        if job.log.is_stored:  # else what the store says of it is not what was shown
            self._jobs.pop(job.row.id, None)

    # --- the store's thread ---------------------------------------------------------------------------------

    def _write_of(self, row: Row) -> Write | None:
        """How the log of a response is stored."""

        async def write_events(first: int, frames: list[bytes], snapshot: Snapshot) -> None:
            """The first write takes the row with it: none is ever stored without its first events."""
            if first == 0 and snapshot:
                await self._call(self._store.insert, row.with_snapshot(snapshot, time.time()), frames)
            else:
                await self._call(self._store.append, row.id, first, frames, snapshot, time.time())

        async def write_at_its_end(first: int, frames: list[bytes], snapshot: Snapshot) -> None:
            if snapshot and snapshot["status"] in TERMINAL:
                await self._call(self._store.insert, row.with_snapshot(snapshot, time.time()))

        if row.background:
            return write_events
        return write_at_its_end if row.kept else None

    async def _evict(self) -> None:
        if time.monotonic() - self._evicted_at <= EVICT_EVERY_S:
            return
        self._evicted_at = time.monotonic()
        for job in [*self._jobs.values()]:
            if job.task.done() and await job.log.write_again():  # the disk was full
                self._jobs.pop(job.row.id, None)
        try:
            await self._call(self._store.evict, time.time())
        except Exception:
            log.exception("the store could not be cut to its limits")  # no fault of whoever has come along

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
