"""The registry of background responses: they wait for their turn, and survive their request and this process.

    Job --queue()--> stored, waits --turn--> Job.start()     get(), events(), cancel(), delete(): by its id
    a start of the server --recover()--> queued ones run again, those in progress have failed

Authority: https://platform.openai.com/docs/guides/background

Rules of this file:
1. A background response is stored before it begins, and its events before they are shown, unless the disk
   fails (rule 3 of event_log.py).
2. The queue is bounded in bytes. No owner can fill it, and none waits for everything another has queued.
3. A waiting response is held as its row of JSON text: its prompt would take many times the room.
4. Whoever asks for an id gets None unless the response is its own: get() looks, before any other method is
   called with its row.

Why tasks of this process, and not a task queue such as Celery: a run holds the log that its readers follow,
and the model is here anyway. The price: only this process can run what it has accepted, so recover() must.
The event loop alone calls a Registry; it asks the store in a thread.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial

import sse
from event_log import Entry, EventLog, encode_event, newest_of
from jobs import CANCELLED, INTERRUPTED, SHUT_DOWN, Archive, Job
from request import items, params
from request.refusals import BadInput
from request.room import Room, Turns
from store import TERMINAL, Row, Store
from worker import Prompt, Workers

log = logging.getLogger("background")

MAX_LIVE_BYTES = 128 * 2**20  # all background responses together that have not ended
MIN_BYTES = MAX_LIVE_BYTES // 264  # the output of one of them; its request is counted on top
MAX_RUNNING = 8  # background responses at once
MAX_POLLS = 600  # for a worker that is alive: after a restart no upstream may have been reached yet
WORKER_POLL_S = 1
# Copies of the constant part of a response, such as its tools: in its builder, in each of four events, and in
# the response objects of these.
N_HEADS = 12
EVICTION_INTERVAL_S = 1


class Registry:
    """Finds responses, and queues, runs, ends and stores background responses.

    `is_shared`: there are several owners. `is_persistent`: the store outlives this process, so what is queued
    at a stop waits there for the next one. `max_batch`: requests that a worker computes at once.
    """

    def __init__(
        self,
        store: Store,
        workers: Workers,
        is_shared: bool = False,
        is_persistent: bool = False,
        max_batch: int = MAX_RUNNING + 1,
    ) -> None:
        self.jobs: dict[str, Job] = {}  # of background responses, by id
        self.stopping = asyncio.Event()  # set: no background response is accepted or begins to run
        self.archive = Archive(store)
        self.workers = workers
        self._store = store
        self._end_of_queued = None if is_persistent else SHUT_DOWN
        self._call = self.archive.call
        self._turns = Turns(max(1, min(MAX_RUNNING, max_batch - 1)))  # a place is left to the foreground
        self._room = Room("bytes of background responses", MAX_LIVE_BYTES, is_shared)

    # --- what a request asks for ----------------------------------------------------------------------------

    async def queue(self, job: Job) -> None:
        """Store a background response, then let it wait for its turn. Raises BadInput."""
        row = job.row
        if self.stopping.is_set():
            raise BadInput("The server is about to stop.", code="server_is_overloaded")
        entries = [encode_event(number, event) for number, event in enumerate(job.builder.queue())]
        job.n_bytes = n_held(row, entries[-1].response_json)
        self._room.add(row.owner, job.n_bytes)
        if not await self._write(row, 0, entries):
            self._room.add(row.owner, -job.n_bytes)
            raise BadInput("The response could not be stored; try later.", code="server_is_overloaded")
        await self._launch(job, entries)

    async def get(self, id: str, owner: str, hold: Callable[[int], object] = int) -> Row | None:
        """Return the newest state of a response of this owner; None for others.

        Call `hold` with its bytes, including its events, before it is loaded: `hold` may refuse.
        """
        job = self.jobs.get(id)
        if job and job.row.owner == owner:  # all readers share its events
            hold(job.n_bytes)
            return job.shown_row()
        n_bytes = await self._call(owner, self._store.size, id, owner)
        hold(n_bytes)
        return await self._call(owner, self._store.get, id) if n_bytes else None

    async def to_continue(self, row: Row) -> Row:
        """Return the part of a response that another one continues: the output, without logprobs."""
        return await self._call(row.owner, self._store.to_continue, row)

    async def events(self, row: Row) -> EventLog | None:
        """Return the log of a background response; None if its events are no longer kept."""
        if job := self.jobs.get(row.id):
            return job.log
        frames = await self._call(row.owner, self._store.frames, row.id)
        if not frames:
            return None
        *before, last = frames
        entries = [*map(Entry, before), Entry(last, row.status, row.response_json)]
        with closing(EventLog(None, entries)) as event_log:
            return event_log

    async def cancel(self, row: Row) -> Row:
        """Stop a background response; return it when it has ended and the engine has dropped it."""
        job = self.jobs.get(row.id)
        if job is None:
            return row
        job.stop(CANCELLED)
        await job.log.until_over()
        return job.shown_row()

    async def delete(self, row: Row) -> None:
        """Delete a response that has ended, even if its end could not be stored yet."""
        await self._call(row.owner, self._store.delete, row.id)
        self._leave(row.id)

    def counts(self) -> dict[str, int]:
        """Count the background responses that have not ended, by status."""
        return {"queued": 0, "in_progress": 0} | Counter(job.log.status for job in self.jobs.values())

    # --- the life of a process ------------------------------------------------------------------------------

    async def recover(self, revive: Callable[[Row], Job]) -> None:
        """Queue the responses that the last process left queued; end those that it left in progress.

        Call it once, before the server listens.
        """
        for id_ in await self._call("", self._store.live):
            try:
                row = await self._call("", self._store.get, id_)
                assert row, "it cannot be read"
                stored = await self.events(row)
                assert stored, "its events cannot be read"
                job = revive(row)
                job.builder.resume(sse.loads(sse.data(entry.frame)) for entry in stored.entries)
                job.n_bytes = n_held(row, row.response_json)
                self._room.held[row.owner] += job.n_bytes  # even if it is too much: it has been accepted
                await self._launch(job, stored.entries)
                if row.status != "queued":
                    job.stop(INTERRUPTED)
            except Exception as error:
                log.error("%s is damaged, and set aside in the store: %r", id_, error)
                with suppress(Exception):  # a full disk, which the next start may find empty
                    await self._call("", self._store.set_aside, id_, time.time())

    async def evict(self) -> None:
        """Delete what exceeds the store's limits, once a second, until the task is cancelled."""
        told = ""
        while True:
            try:
                while await self._call("", self._store.evict, time.time()):
                    pass
                told = ""
            except Exception as error:
                if told != str(error):
                    told = str(error)
                    log.error("the store has a fault: %s", told)
            await asyncio.sleep(EVICTION_INTERVAL_S)

    async def close(self) -> None:
        """End all running responses, and the queued ones unless the next process will run them."""
        self.stopping.set()
        jobs = [*self.jobs.values()]
        for job in jobs:
            job.stop(self._end_of_queued if job.log.status == "queued" else SHUT_DOWN)
        for job in jobs:
            await job.log.until_over()

    async def close_store(self) -> None:
        """Close the store after everything that was asked of it; nothing may be asked later."""
        await self.archive.threads.until_idle()
        await self._call("", self._store.close)

    # --- the life of a job ----------------------------------------------------------------------------------

    async def _launch(self, job: Job, stored: Sequence[Entry]) -> None:
        """Let a response wait for its turn; `stored`: its events in the store."""
        job.log = EventLog(partial(self._write, job.row), stored)
        self.jobs[job.row.id] = job
        await job.start(self._due_prompt(job))

    @asynccontextmanager
    async def _due_prompt(self, job: Job) -> AsyncIterator[Prompt]:
        """Wait for the turn of a response, then make its prompt again: rule 3. Raises BadInput."""
        row = job.row
        for n_polls in range(MAX_POLLS + 1):
            async with self._turns.turn(row.owner):
                if self.stopping.is_set():  # close() may be over, if the disk was slow
                    job.stop(self._end_of_queued)
                    await asyncio.sleep(0)  # raises CancelledError
                if n_polls == MAX_POLLS or self._has_worker(job.builder.head["model"]):
                    body = await asyncio.to_thread(items.body_of, row)
                    defaults = self.workers.find(body["model"]).defaults
                    request = await asyncio.to_thread(params.from_responses, body, defaults, row.owner)
                    yield await self.workers.prepare(request, body["input"])
                    return
            await asyncio.sleep(WORKER_POLL_S)  # others have its place

    def _has_worker(self, model: str) -> bool:
        """Return whether a model's worker is alive; after a restart its upstream may not be known yet."""
        try:
            return self.workers.find(model).alive
        except BadInput as refusal:
            return refusal.code != "server_is_overloaded"

    async def _write(self, row: Row, first_number: int, entries: Sequence[Entry]) -> bool:
        """Store events; after the last one drop the job. Return whether the store has them."""
        is_written = await self.archive.write(row, first_number, entries)
        if is_written and newest_of(entries).status in TERMINAL:
            self._leave(row.id)
        return is_written

    def _leave(self, id: str) -> None:
        """Drop the job of a response that has ended, if it still has one."""
        if job := self.jobs.pop(id, None):
            self._room.add(job.row.owner, -job.n_bytes)


def n_held(row: Row, response_json: str) -> int:
    """Estimate the bytes that a background response holds until it ends, including its events."""
    return row.n_bytes + N_HEADS * len(response_json) + MIN_BYTES
