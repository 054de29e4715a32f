"""Jobs: every response while it runs; and the registry, which starts them and finds those in the background.

    outputs of a worker --Job.add()--> Builder --events--> EventLog --write()--> store.py
                                                               +----read()----> any number of readers

Every response is run here, in one way. A foreground response belongs to its HTTP request and ends with it. A
background response waits for its turn, can be found by its id while it runs, and survives its request and
this process.

Authority: https://platform.openai.com/docs/guides/background

Rules of this file:
1. A background response is stored before it begins, and then event by event (rule 3 of event_log.py). A
   foreground response is stored before its last event is shown; if that fails, the event says `store: false`.
2. A response ends once, in its log: a cancel before the last event wins, a later one has no effect.
3. Everything ends: a run that returns, raises, is cancelled or was killed leaves a terminal event.
4. The queue is bounded in bytes. No owner can fill it, and none waits for all that another has queued.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import sse
from channels import Accepted, Compaction, Finish, Output
from event_log import Entry, EventLog, encode_event, newest_of
from request.refusals import BadInput
from request.room import Room, Threads, Turns
from responses import Builder
from store import Row, Store

log = logging.getLogger("background")

MAX_LIVE_BYTES = 128 * 2**20  # all background responses together that have not ended
MIN_BYTES = MAX_LIVE_BYTES // 264  # one of them, for its events; its request comes on top
MAX_RUNNING = 8  # background responses at once; the engine's other places are left to the foreground
EVICTION_INTERVAL_S = 1


Said = Accepted | Output | Compaction | Finish  # what a run emits, a Compaction from items.py
Run = Callable[[Callable[[Said], None]], Awaitable[None]]  # emits it

CANCELLED = Finish("cancelled")
UNFINISHED = Finish("failed", message="The run broke off; the server's log has the details.")
SHUT_DOWN = Finish("failed", message="The server is shutting down.")
INTERRUPTED = Finish("failed", message="interrupted by a restart")


@dataclass(eq=False)
class Job:
    """A response that has not ended, and the task that fills its log."""

    row: Row
    builder: Builder
    run: Run
    log: EventLog = field(default_factory=EventLog)
    finish: Finish | None = UNFINISHED  # how it ends when its task is over; None: the next process runs it
    n_bytes: int = 0  # what it takes of the room for background responses
    task: asyncio.Task[None] = field(init=False)

    def add(self, said: Said) -> None:
        """Make events of what a worker says. A Finish is only remembered: _end() makes its events."""
        if isinstance(said, Finish):
            self.finish = said
        else:
            self.log.extend(self.builder.feed(said))

    def shown_row(self) -> Row:
        """Return the row with the response as readers see it, which they do from its first event on."""
        return self.row.with_response(self.log.shown.status, self.log.shown.response_json, time.time())


class Registry:
    """Starts responses, finds them, ends them, and stores those that are to be kept.

    `is_shared`: there are several owners.
    """

    def __init__(self, store: Store, is_shared: bool = False) -> None:
        self.jobs: dict[str, Job] = {}  # those in the background, by id of the response
        self.stopping = asyncio.Event()  # set: no more background responses are accepted, or begin to run
        self.ended = Counter[str]()  # background responses of this process, by their last status
        self._store = store
        self._turns = Turns(MAX_RUNNING)
        self._room = Room("bytes of background responses", MAX_LIVE_BYTES, is_shared)
        # SQLite is asked one thing at a time, never in the event loop.
        self._threads = Threads(1, ThreadPoolExecutor(1, "store"))
        self._call = self._threads.call

    # --- what a request asks for ----------------------------------------------------------------------------

    async def start(self, job: Job) -> None:
        """Start a response; raises BadInput.

        In the foreground its task raises what refuses it; in the background it is stored when this returns.
        """
        if job.row.background:
            await self._queue(job)
        await self._launch(job)

    async def get(self, id: str, owner: str, hold: Callable[[int], object] = int) -> Row | None:
        """Return a response of this owner as it stands: for others it does not exist.

        Before it is loaded, `hold` is told the bytes that it takes, its events included.
        """
        job = self.jobs.get(id)
        if job and job.row.owner == owner:  # all readers share its events
            hold(job.n_bytes)
            return job.shown_row()
        n_bytes = await self._call(owner, self._store.size, id, owner)
        hold(n_bytes)
        return await self._call(owner, self._store.get, id) if n_bytes else None

    async def to_continue(self, row: Row) -> Row:
        """Return a response as another one continues it, be it stored or not: without logprobs."""
        return await self._call(row.owner, self._store.to_continue, row)

    async def events(self, row: Row) -> EventLog:
        """Return the log of a background response; raises BadInput if its events are not there."""
        if job := self.jobs.get(row.id):
            return job.log
        frames = await self._call(row.owner, self._store.frames, row.id)
        if not frames:
            raise BadInput("This response can no longer be streamed: its events have expired.", "stream")
        *before, last = frames
        entries = [*map(Entry, before), Entry(last, row.status, row.response_json)]
        with closing(EventLog(None, entries)) as event_log:
            return event_log

    async def cancel(self, row: Row) -> Row:
        """Stop a background response; return it when it has ended, and the engine has been told."""
        job = self.jobs.get(row.id)
        if job is None:
            return row
        self._stop(job, CANCELLED)
        await job.log.until_over()
        return job.shown_row()

    async def delete(self, row: Row) -> None:
        """Forget a response that has ended."""
        await self._call(row.owner, self._store.delete, row.id)

    def counts(self) -> dict[str, Mapping[str, int]]:
        """Return how many background responses are live, and how many have ended, by their last status."""
        live = {"queued": 0, "in_progress": 0} | Counter(job.log.status for job in self.jobs.values())
        return {"live": live, "ended": self.ended}

    # --- the life of a process ------------------------------------------------------------------------------

    async def recover(self, revive: Callable[[Row], Job]) -> None:
        """Run again what the last process left queued, and end what it left in progress."""
        for id_ in await self._call("", self._store.live):
            try:
                row = await self._call("", self._store.get, id_)
                assert row, "it cannot be read"
                entries = (await self.events(row)).entries
                job = revive(row)
                job.builder.resume(sse.loads(sse.data(entry.frame)) for entry in entries)
                job.log = EventLog(partial(self._write, row), entries)
                if row.status == "queued":
                    await self._launch(job)
                else:
                    await self._end(job, INTERRUPTED)
            except Exception as error:
                log.error("%s is damaged, and set aside in the store: %r", id_, error)
                await self._call("", self._store.set_aside, id_, time.time())

    async def evict(self) -> None:
        """Delete what is over the store's limits, now and then, until the server stops."""
        told = ""
        while True:
            try:
                while await self._call("", self._store.evict, time.time()):
                    pass
            except Exception as error:
                if told != str(error):
                    told = str(error)
                    log.error("the store has a fault: %s", told)
            await asyncio.sleep(EVICTION_INTERVAL_S)

    async def close(self, persistent: bool) -> None:
        """End what runs; what is queued in a persistent store waits there for the next process."""
        self.stopping.set()
        jobs = [*self.jobs.values()]
        for job in jobs:
            waits = persistent and job.log.status == "queued"
            self._stop(job, None if waits else SHUT_DOWN)
        for job in jobs:
            await job.log.until_over()

    async def close_store(self) -> None:
        """Close the store after all that was asked of it."""
        await self._threads.until_idle()
        await self._call("", self._store.close)

    # --- the life of a job ----------------------------------------------------------------------------------

    async def _queue(self, job: Job) -> None:
        """Store a background response before it begins; raises BadInput."""
        row = job.row
        if self.stopping.is_set():
            raise BadInput("The server is about to stop.", None, "server_is_overloaded")
        job.n_bytes = row.n_bytes + MIN_BYTES
        self._room.add(row.owner, job.n_bytes)
        entries = [encode_event(number, event) for number, event in enumerate(job.builder.queue())]
        if not await self._write(row, 0, entries):
            self._room.add(row.owner, -job.n_bytes)
            raise BadInput("The response could not be stored; try later.", None, "server_is_overloaded")
        job.log = EventLog(partial(self._write, row), entries)

    async def _launch(self, job: Job) -> None:
        if job.row.background:
            self.jobs[job.row.id] = job
        job.task = asyncio.create_task(self._fill(job))
        # Let it begin: a task that is cancelled before its first step would not even make the last event.
        await asyncio.sleep(0)

    async def _fill(self, job: Job) -> None:
        """Fill a job's log. Whatever happens, what has begun gets its terminal event, and the log ends."""
        row = job.row
        with closing(job.log):
            try:
                if row.background:
                    async with self._turns.turn(row.owner):
                        if self.stopping.is_set():
                            await asyncio.Future()  # until close() cancels it
                        await job.run(job.add)
                else:  # request/room.py limits how many there are of these
                    await job.run(job.add)
            except asyncio.CancelledError:
                # Not raised again: by its traceback the task would hold itself, and the whole request.
                if not row.background:
                    job.finish = CANCELLED
            except Exception as error:
                if not job.log.status:  # no event yet: the error becomes the answer to the request
                    raise
                if isinstance(error, BadInput):
                    job.finish = Finish("failed", None, error.message, error.late_code)
                else:
                    log.exception("the run of %s failed", row.id)
            finally:
                if job.finish and job.log.status:
                    await self._end(job, job.finish)

    async def _end(self, job: Job, finish: Finish) -> None:
        """Append the last events. A foreground response that is kept is stored before the last: rule 1."""
        try:
            *others, last = job.builder.finish(finish, int(time.time()))
        except Exception:  # rule 3 holds in spite of a bug
            log.exception("%s could not be ended as it should be", job.row.id)
            error = {"code": UNFINISHED.code, "message": UNFINISHED.message}
            response = job.shown_row().response | {"status": "failed", "error": error}
            others, last = [], {"type": "response.failed", "response": response}
        job.log.extend(others)
        if job.row.kept and not job.row.background:
            entry = encode_event(len(job.log.entries), last)
            # It is stored even if the client leaves now.
            last["response"]["store"] = await asyncio.shield(self._write(job.row, 0, [entry]))
        job.log.extend([last])

    def _stop(self, job: Job, finish: Finish | None) -> None:
        """Cancel a job that has not ended; the first to stop it decides how it ends."""
        if not (job.log.ended or job.task.cancelling()):
            job.finish = finish
            job.task.cancel()

    # --- the store ------------------------------------------------------------------------------------------

    async def _write(self, row: Row, first_number: int, entries: Sequence[Entry]) -> bool:
        """Store events of a background response, or the last one of another; return whether it could be."""
        _, status, response_json = newest_of(entries)
        newest = row.with_response(status, response_json, time.time())
        frames = [entry.frame for entry in entries] if row.background else []
        try:
            await self._call(row.owner, self._store.write, newest, first_number, frames)
        except Exception as error:  # a full disk fails every write: a line is enough
            log.error("%s could not be stored: %s", row.id, error)
            return False
        if newest.ended_at and (job := self.jobs.get(row.id)):  # from now on the store answers for it
            del self.jobs[row.id]
            self.ended[status] += 1
            self._room.add(row.owner, -job.n_bytes)
        return True
