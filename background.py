"""Event logs, and the responses that fill them: in the foreground or in the background, by one way.

    Producer --fill()--> EventLog --write()--> store.py
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
   events are shown all the same, and the next write takes them too.
4. A response ends once, in its log: a cancel that comes before the last event wins, a later one is void.
5. Everything ends: a producer that returns, raises, is cancelled or was killed leaves a terminal event.

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
Write = Callable[[int, list[bytes], Snapshot], Awaitable[None]]  # see EventLog

MAINTENANCE_INTERVAL_S = 1  # the store is maintained when a response ends or is asked for, not more often


# --- the log ------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """An event in the log."""

    frame: bytes
    snapshot: Snapshot  # the newest response object, in this event or in one before it


class EventLog:
    """The events of one response, or the chunks of one completion.

    An entry is appended (pending), then written, then shown to readers. Only where a write fails are entries
    shown before they are written. A log that is not stored shows them at once.

    `write(number of the first frame, frames, snapshot)` stores frames, and the newest response object unless
    that is None: it is as before. `write` None: nothing is stored. `frames` are those that an earlier process
    has stored, `snapshot` is the newest response object in them.
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
        self._pending: list[Entry] = []  # not shown yet: a write of them is under way, or comes next
        self._n_written = len(frames)  # fewer than there are in `_shown` where a write has failed
        self._writing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._news = asyncio.Event()  # set, and replaced by a new one, when readers have something to look at

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

    async def until_begun(self) -> None:
        """Wait until there is an event, or never will be."""
        while not (self.events or self._is_closed):
            await self._news.wait()

    async def until_shown(self) -> None:
        """Wait until the events that there are now are shown to readers."""
        n_entries = len(self._shown) + len(self._pending)
        while len(self._shown) < n_entries:
            await self._news.wait()

    async def read(self, after: int = -1) -> AsyncGenerator[bytes]:
        """The frames that follow number `after`: those there are, then those to come."""
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
            await asyncio.shield(self._writing)  # the write goes on where its caller is cancelled
        return self.is_stored

    async def _write_all(self, write: Write) -> None:
        """Write until all entries are written, or a write fails and no new ones have come meanwhile."""
        while self._pending or not self.is_stored:
            n_pending = len(self._pending)
            entries = self._shown[self._n_written :] + self._pending
            snapshot = newest_snapshot(entries)
            if self._n_written and snapshot is self._shown[self._n_written - 1].snapshot:
                snapshot = None  # it is written already
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
        """Show the first pending entries to readers."""
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


class Producer(Protocol):
    """Makes the events of one response."""

    def start(self) -> list[Event]:
        """The events of a background response that is accepted, and waits: created, queued."""

    async def fill(self, log: EventLog) -> None:
        """Append all other events. Where a foreground request is refused it raises before the first one."""

    def end(self, reason: Reason, message: str) -> list[Event]:
        """The terminal event where fill() does not come to it, and what it closes."""


class Ending(NamedTuple):
    """How a response ends that its producer does not bring to an end."""

    reason: Reason
    message: str


CANCELLED = Ending("cancelled", "")
UNFINISHED = Ending("failed", "The run ended without a last event.")
NOT_STORED = Ending("failed", "The response could not be stored.")
SHUT_DOWN = Ending("failed", "The server is shutting down.")


@dataclass(eq=False)
class ResponseJob:
    """A response that has not ended, and the task that fills its log."""

    row: Row
    producer: Producer
    log: EventLog
    if_cancelled: Ending | None  # how it ends when its task is cancelled; None: the next process shall run it
    task: asyncio.Task[None] = field(init=False)

    async def until_ended(self) -> None:
        """Wait until it has ended and its last event is shown."""
        await asyncio.wait({self.task})


class QueueFull(Exception):
    """Too many background responses wait, or the server is about to stop."""


class NotStored(Exception):
    """The store does not take the response, so nobody can promise that it will end."""


class Registry:
    """Starts responses, finds them, ends them, and stores those that are to be kept."""

    def __init__(self, store: Store, encode: Encode, max_running: int = 8, max_queued: int = 256) -> None:
        self._store = store
        self._encode = encode
        self._slots = asyncio.Semaphore(max_running)  # the engine's other places are left to the foreground
        self._max_running = max_running
        self._max_queued = max_queued
        self._jobs: dict[str, ResponseJob] = {}  # those in the background, by id of the response
        # SQLite is asked in order, and never in the event loop.
        self._store_thread = ThreadPoolExecutor(1, "store")
        self._maintained_at = 0.0
        self._is_stopping = False
        self.ended = Counter[str]()  # background responses of this process, by their last status

    # --- what a request asks for ----------------------------------------------------------------------------

    async def start(self, row: Row, producer: Producer) -> ResponseJob:
        """Start a response.

        In the foreground it belongs to its HTTP request, which ends it by cancelling the task; the task
        raises what refuses the request. In the background it is stored when this returns: it will end,
        whatever happens to this process. Raises QueueFull, NotStored.
        """
        event_log = EventLog(self._encode, self._writer(row))
        if not row.background:
            return self._launch(ResponseJob(row, producer, event_log, if_cancelled=CANCELLED))
        n_live = len([job for job in self._jobs.values() if not job.log.ended])
        if self._is_stopping or n_live >= self._max_running + self._max_queued:
            raise QueueFull(
                f"expected a server that runs, and room in its queue, got {n_live} live responses"
            )
        event_log.extend(producer.start())
        job = self._launch(ResponseJob(row, producer, event_log, if_cancelled=None))
        self._jobs[row.id] = job
        await event_log.until_shown()
        if not event_log.is_stored:
            self._stop(self._jobs.pop(row.id), NOT_STORED)
            raise NotStored(f"expected {row.id} to be written; the log says why it was not")
        return job

    async def get(self, id: str) -> Row | None:
        """A response as it stands."""
        if job := self._jobs.get(id):
            return job.row._replace(response=job.log.snapshot or job.row.response)
        await self._maintain_store()
        return await self._call_store(self._store.get, id)

    async def events(self, id: str) -> EventLog | None:
        """The log of a background response; None when its events are no longer kept."""
        if job := self._jobs.get(id):
            return job.log
        frames = await self._call_store(self._store.frames, id)
        if not frames:
            return None
        event_log = EventLog(self._encode, frames=frames)
        event_log.close()
        return event_log

    async def cancel(self, id: str) -> None:
        """Stop a background response; when this returns it has ended, and the engine has been told."""
        if job := self._jobs.get(id):
            self._stop(job, CANCELLED)
            await job.until_ended()

    async def delete(self, id: str) -> None:
        """Forget a response that has ended."""
        if job := self._jobs.get(id):
            await job.until_ended()  # its last event is shown, and it is about to go
            self._jobs.pop(id, None)
        await self._call_store(self._store.delete, id)

    # --- the life of a process ------------------------------------------------------------------------------

    async def recover(
        self,
        make_producer: Callable[[Row], Awaitable[Producer]],
        interrupted: Callable[[list[bytes]], Event],
    ) -> None:
        """Run again what the last process left queued, and end what it left in progress.

        `interrupted(frames)` makes the last event of a response from the frames that are stored.
        """
        for row in await self._call_store(self._store.live):
            frames = await self._call_store(self._store.frames, row.id)
            event_log = EventLog(self._encode, self._writer(row), frames, row.response)
            producer = await self._requeued(row, make_producer)
            if producer is None:
                log.info("%s was interrupted: it has failed", row.id)
                event_log.extend([interrupted(frames)])
                await event_log.until_shown()
            else:
                log.info("%s was queued: it runs again", row.id)
                job = ResponseJob(row, producer, event_log, if_cancelled=None)
                self._jobs[row.id] = self._launch(job)

    async def _requeued(
        self, row: Row, make_producer: Callable[[Row], Awaitable[Producer]]
    ) -> Producer | None:
        """The producer of a response that was queued; None where it cannot run any more."""
        if row.response["status"] != "queued":
            return None
        try:
            producer = await make_producer(row)
        except Exception:  # another model serves now, or one with a shorter context
            log.exception("%s was queued, and cannot run any more", row.id)
            return None
        producer.start()  # the last process has stored these events
        return producer

    def stop_accepting(self) -> None:
        """Accept no more background responses; what is queued stays queued."""
        self._is_stopping = True

    async def close(self, persistent: bool) -> None:
        """End what runs; what is queued in a persistent store waits there for the next process."""
        self._is_stopping = True
        for job in self._jobs.values():
            ending: Ending | None = SHUT_DOWN
            if persistent and job.log.status == "queued":
                ending = None
            self._stop(job, ending)
        tasks = {job.task for job in self._jobs.values()}
        if tasks:
            await asyncio.wait(tasks)

    async def close_store(self) -> None:
        """Close the store in its own thread, after all that was asked of it there."""
        await self._call_store(self._store.close)

    @property
    def is_accepting(self) -> bool:
        return not self._is_stopping

    def counts(self) -> dict[str, int]:
        return {"background": len(self._jobs)}

    def live(self) -> dict[str, int]:
        """How many background responses are queued, and how many in progress."""
        statuses = [job.log.status for job in self._jobs.values()]
        return {status: statuses.count(status) for status in ("queued", "in_progress")}

    # --- the life of a job ----------------------------------------------------------------------------------
    #
    # Who ends a response: its producer, if fill() comes to the end; else _fill() appends the terminal event.
    # If the task is cancelled it does so by `if_cancelled`. _stop() sets that before it cancels a background
    # job. A foreground job has CANCELLED there from its start, for streaming.py cancels its task when the
    # client leaves. Where it is None there is no terminal event: the next process runs the response.

    def _launch(self, job: ResponseJob) -> ResponseJob:
        job.task = asyncio.create_task(self._run(job))
        return job

    async def _run(self, job: ResponseJob) -> None:
        """Fill and close the log; then the job is forgotten, also where it was cancelled or refused."""
        try:
            with closing(job.log):
                await self._fill(job)
            await job.log.until_shown()  # now the store's limits count this response too
            await self._maintain_store()
        finally:
            await job.log.until_shown()
            if job.row.background:
                self._forget(job)

    async def _fill(self, job: ResponseJob) -> None:
        """Fill the log of a job; whatever happens, what has begun gets its terminal event."""
        ending: Ending | None = UNFINISHED
        try:
            async with self._slot(job):
                await job.producer.fill(job.log)
        except asyncio.CancelledError:
            ending = job.if_cancelled
            raise
        except Exception as error:
            if not job.log.status:  # no event yet: the error becomes the answer to the request
                raise
            log.error("the run of %s failed", job.row.id, exc_info=error)
            message = f"{type(error).__name__} in the server; its log has the details."
            ending = Ending("failed", message)
        finally:
            if ending and job.log.status and not job.log.ended:
                job.log.extend(job.producer.end(*ending))

    @asynccontextmanager
    async def _slot(self, job: ResponseJob) -> AsyncIterator[None]:
        """Hold one of the slots of background responses; wait for it while all are taken."""
        if not job.row.background:  # middleware.Admission limits how many of these there are
            yield
            return
        await job.log.until_shown()
        async with self._slots:
            if self._is_stopping:
                await asyncio.Event().wait()  # until close() cancels it
            yield

    def _stop(self, job: ResponseJob, ending: Ending | None) -> None:
        """Cancel a job that has not ended; who is the first to stop it decides how it ends."""
        if not (job.log.ended or job.task.cancelling()):
            job.if_cancelled = ending
            job.task.cancel()

    def _forget(self, job: ResponseJob) -> None:
        """Count how a job has ended; from now on the store answers for it."""
        if job.log.ended:
            self.ended[job.log.status] += 1
        if job.log.is_stored:  # else the store knows less than was shown: _maintain_store() writes it again
            self._jobs.pop(job.row.id, None)

    # --- the store's thread ---------------------------------------------------------------------------------

    def _writer(self, row: Row) -> Write | None:
        """What writes the log of a response to the store; None where it is not to be stored."""

        async def write_events(first_number: int, frames: list[bytes], snapshot: Snapshot) -> None:
            """The first write inserts the row too: no row is ever stored without its first events."""
            if first_number == 0 and snapshot:
                await self._call_store(self._store.insert, row.with_snapshot(snapshot, time.time()), frames)
            else:
                await self._call_store(
                    self._store.append, row.id, first_number, frames, snapshot, time.time()
                )

        async def write_at_its_end(_: int, frames: list[bytes], snapshot: Snapshot) -> None:
            if snapshot and snapshot["status"] in TERMINAL:
                await self._call_store(self._store.insert, row.with_snapshot(snapshot, time.time()))

        if row.background:
            return write_events
        return write_at_its_end if row.kept else None

    async def _maintain_store(self) -> None:
        """Now and then: write again what could not be written, and delete what is over the store's limits."""
        if time.monotonic() - self._maintained_at <= MAINTENANCE_INTERVAL_S:
            return
        self._maintained_at = time.monotonic()
        for job in [*self._jobs.values()]:
            if job.task.done() and await job.log.write_again():  # the disk was full when it ended
                self._jobs.pop(job.row.id, None)
        try:
            await self._call_store(self._store.evict, time.time())
        except Exception:
            log.exception("the store could not be cut to its limits")  # the request at hand goes on

    async def _call_store(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._store_thread, function, *args)
