"""The registry of background responses: they wait for their turn, and survive their request and this process.

    Job --queue()--> stored, waits --turn--> Job.start()     get(), events(), cancel(), delete(): by its id
    a start of the server --recover()--> queued ones run again, those in progress have failed

Authority: https://platform.openai.com/docs/guides/background

Rules of this file:
1. A background response is stored before it begins, and then event by event (rule 3 of event_log.py).
2. The queue is bounded in bytes. No owner can fill it, and none waits for all that another has queued.
3. A response that waits is held as its row of JSON text: its prompt would take many times the room.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
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
MIN_BYTES = MAX_LIVE_BYTES // 264  # one of them, for its events; its request comes on top
MAX_RUNNING = 8  # background responses at once; the engine's other places are left to the foreground
EVICTION_INTERVAL_S = 1


class Registry:
    """Finds responses; queues, runs and ends those in the background; stores those that are to be kept.

    `is_shared`: there are several owners.
    """

    def __init__(self, store: Store, workers: Workers, is_shared: bool = False) -> None:
        self.jobs: dict[str, Job] = {}  # those in the background, by id of the response
        self.stopping = asyncio.Event()  # set: no more background responses are accepted, or begin to run
        self.ended = Counter[str]()  # background responses of this process, by their last status
        self.archive = Archive(store)
        self.workers = workers
        self._store = store
        self._call = self.archive.call
        self._turns = Turns(MAX_RUNNING)
        self._room = Room("bytes of background responses", MAX_LIVE_BYTES, is_shared)

    # --- what a request asks for ----------------------------------------------------------------------------

    async def queue(self, job: Job) -> None:
        """Store a background response, and have it wait for its turn; raises BadInput."""
        row = job.row
        if self.stopping.is_set():
            raise BadInput("The server is about to stop.", code="server_is_overloaded")
        job.n_bytes = row.n_bytes + MIN_BYTES
        self._room.add(row.owner, job.n_bytes)
        entries = [encode_event(number, event) for number, event in enumerate(job.builder.queue())]
        if not await self._write(row, 0, entries):
            self._room.add(row.owner, -job.n_bytes)
            raise BadInput("The response could not be stored; try later.", code="server_is_overloaded")
        await self._launch(job, entries)

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
            raise BadInput(
                "This response can no longer be streamed: its events have expired.", param="stream"
            )
        *before, last = frames
        entries = [*map(Entry, before), Entry(last, row.status, row.response_json)]
        with closing(EventLog(None, entries)) as event_log:
            return event_log

    async def cancel(self, row: Row) -> Row:
        """Stop a background response; return it when it has ended, and the engine has been told."""
        job = self.jobs.get(row.id)
        if job is None:
            return row
        job.stop(CANCELLED)
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
                if row.status == "queued":
                    await self._launch(job, entries)
                else:
                    job.log = EventLog(partial(self._write, row), entries)
                    await job.end(INTERRUPTED)
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
            job.stop(None if waits else SHUT_DOWN)
        for job in jobs:
            await job.log.until_over()

    # --- the life of a job ----------------------------------------------------------------------------------

    async def _launch(self, job: Job, stored: Sequence[Entry]) -> None:
        """Let a response wait for its turn; `stored` are its events in the store."""
        job.log = EventLog(partial(self._write, job.row), stored)
        self.jobs[job.row.id] = job
        await job.start(self._turn(job.row))

    @asynccontextmanager
    async def _turn(self, row: Row) -> AsyncIterator[Prompt]:
        """Wait for the turn of a response, then make its prompt again: rule 3. Raises BadInput."""
        async with self._turns.turn(row.owner):
            if self.stopping.is_set():
                await asyncio.Future()  # until close() cancels it
            body = await asyncio.to_thread(items.body_of, row)
            defaults = self.workers.find(body["model"]).defaults
            request = await asyncio.to_thread(params.from_responses, body, defaults, row.owner)
            yield await self.workers.prepare(request, body["input"])

    async def _write(self, row: Row, first_number: int, entries: Sequence[Entry]) -> bool:
        """Store events; after the last one the store answers for the response. Return whether it could be."""
        is_written = await self.archive.write(row, first_number, entries)
        status = newest_of(entries).status
        if is_written and status in TERMINAL and (job := self.jobs.pop(row.id, None)):
            self.ended[status] += 1
            self._room.add(row.owner, -job.n_bytes)
        return is_written
