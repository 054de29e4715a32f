"""Runs: an answer from its prompt to its last event, for each API. A Job is a response while it runs.

    Prompt --run()--> take(outputs): Restorer -> OutputFilter -> Job.feed(), or another API's -> EventLog
    Job.start() --> its task: run() --> Builder.finish() --> the last event, stored before it is shown

Every response runs here, in one way. A foreground response belongs to its HTTP request and ends with it. A
background response (background.py) waits for its turn first, and its events are stored as they come.

Why one function that a worker calls with lists, and not `async for outputs in prompt.run()`: the engine's
thread passes the outputs of a step, for all sequences, to the event loop in one turn. A generator for each
sequence would be a task to wake for each of its tokens; with 50 streams that is a tenth of an event's cost.

Rules of this file:
1. A foreground response is stored before its last event is shown; if that fails, the event says
   `store: false`.
2. A response ends once, in its log: a cancel before the last event wins, a later one has no effect.
3. Everything ends: a response that has begun gets a terminal event, from this process or the next, also if
   its run raises, is cancelled or was killed. One that raises before its first event refuses the request.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, Protocol

from channels import Finish, Said, WorkerOutput
from event_log import Entry, EventLog, encode_event, newest_of
from request.items import OutputFilter
from request.refusals import BadInput
from request.room import Threads
from request.tool_calls import Restorer
from responses import Builder, Event
from store import Row, Store
from worker import Prompt

log = logging.getLogger("jobs")

UNFINISHED = Finish("failed", message="The run broke off; the server's log has the details.")
CANCELLED = Finish("cancelled")


# --- the way of a token -------------------------------------------------------------------------------------


Log = EventLog | list[Event]  # takes the events of one answer in their order; a list is read at the end


class Watch(Protocol):
    """Times one run and counts its tokens: Stopwatch of service/metrics.py."""

    is_accepted: bool  # the worker has accepted the request
    finish: Finish  # of the worker

    def note(self, output: WorkerOutput) -> None: ...
    def end(self) -> None: ...


async def run(
    prompt: Prompt,
    make_events: Callable[[Said], Iterable[Event]],
    event_log: Log,
    watch: Watch,
    choice: int = 0,
) -> None:
    """Run one choice of a prompt to its end, and log the events that its client sees.

    `make_events` makes the events of one API: Job.feed(), completions.Chunks.feed(), blocks.Builder.feed().
    Call run() in the event loop. It raises the refusal of the request; an exception of Prompt.run() after
    Accepted becomes a Finish.
    """
    restorer = Restorer(prompt.request.called)
    output_filter = OutputFilter(prompt.request)

    def take(outputs: Iterable[WorkerOutput]) -> None:
        """Pass on the outputs of a step: worker.Answer.feed() has decoded and parsed its tokens."""
        for output in outputs:
            for restored in restorer.feed(output):  # calls of the client's tools
                watch.note(restored)  # metrics
                for said in output_filter.feed(restored):  # for a compaction, less
                    event_log.extend(make_events(said))  # numbered, encoded once, shown to every reader

    try:
        await prompt.run(take, choice)
    except Exception as error:
        if not watch.is_accepted:  # it is the answer to the HTTP request
            raise
        take([failure(error)])
    finally:
        watch.end()


# --- the store ----------------------------------------------------------------------------------------------


MAX_TOGETHER = 8  # large ones take 10 ms each, and others wait for their turn


class Batch:
    """Writes of one owner that are done together: to wake the thread costs more than a small write."""

    task: asyncio.Task[list[Exception | None]]  # what each of them raised

    def __init__(self) -> None:
        self.writes: list[tuple[Row, int, list[bytes]]] = []


class Archive:
    """The store, called for one thing at a time and never in the event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, "store")
        self.threads = Threads(1, self._thread)
        self.call = self.threads.call
        self._due: dict[str, Batch] = {}  # by owner: the newest that waits for its turn

    async def write(self, row: Row, first_number: int, entries: Sequence[Entry]) -> bool:
        """Store events of a background response, or the last event of another; return whether it worked.

        It is done even if the caller is cancelled.
        """
        newest = newest_of(entries)
        frames = [entry.frame for entry in entries] if row.background else []
        batch = self._due.get(row.owner)
        if not batch or len(batch.writes) == MAX_TOGETHER:
            batch = self._due[row.owner] = Batch()
            batch.task = asyncio.create_task(self._write_batch(row.owner, batch))
        number = len(batch.writes)
        batch.writes.append(
            (row.with_response(newest.status, newest.response_json, time.time()), first_number, frames)
        )
        errors = await asyncio.shield(batch.task)
        if error := errors[number]:  # a full disk fails every write: a line is enough
            log.error("%s could not be stored: %s", row.id, error)
        return not error

    async def _write_batch(self, owner: str, batch: Batch) -> list[Exception | None]:
        async with self.threads.turn(owner):
            if self._due[owner] is batch:
                del self._due[owner]
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, list, starmap(self._write, batch.writes))

    def _write(self, *what: Any) -> Exception | None:
        """Write in the store's thread; return what it raises."""
        try:
            self.store.write(*what)
        except Exception as error:
            return error
        return None


# --- a response ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """A response that has not ended, and the task that fills its log."""

    row: Row
    builder: Builder
    archive: Archive
    watch: Watch
    log: EventLog = field(default_factory=EventLog)
    finish: Finish | None = UNFINISHED  # how it ends; None: it does not end, the next process runs it again
    if_cancelled: Finish | None = CANCELLED  # `finish`, if its task is cancelled
    n_bytes: int = 0  # its share of the room for background responses
    task: asyncio.Task[None] = field(init=False)

    async def start(self, due_prompt: AbstractAsyncContextManager[Prompt]) -> None:
        """Start the task that runs the response.

        The task enters `due_prompt`, which yields the prompt: at once in the foreground (nullcontext), and in
        the background when its turn has come (Registry._due_prompt).
        """
        self.task = asyncio.create_task(self._fill(due_prompt))
        # Let it begin: a task that is cancelled before its first step would make no event, not even the last.
        await asyncio.sleep(0)

    async def _fill(self, due_prompt: AbstractAsyncContextManager[Prompt]) -> None:
        """Fill the log. However the run ends, a response that has begun gets its terminal event."""
        with closing(self.log):
            try:
                async with due_prompt as prompt:
                    await run(prompt, self.feed, self.log, self.watch)
                    assert self.log.status, "a run has made no event"
            except asyncio.CancelledError:
                # Not raised again: its traceback would keep the task and the request in a reference cycle.
                self.finish = self.if_cancelled
            except Exception as error:
                if not self.log.status:  # no event yet: the error becomes the answer to the request
                    raise
                self.finish = failure(error)
            finally:
                if self.finish and self.log.status:
                    usage = self.finish.usage or self.watch.finish.usage
                    await self.end(self.finish._replace(usage=usage))

    def feed(self, said: Said) -> list[Event]:
        """Make the events of one output. Only remember a Finish: end() makes its events."""
        if self.task.cancelling():  # the worker does not know it yet
            return []
        if isinstance(said, Finish):
            self.finish = said
            return []
        return self.builder.feed(said)

    async def end(self, finish: Finish) -> None:
        """Append the last events. Store a foreground response before the last one: rule 1."""
        try:
            *others, last = self.builder.finish(finish, int(time.time()))
        except Exception:  # rule 3 holds in spite of a bug
            log.exception("%s could not be ended as it should be", self.row.id)
            self.builder.state = "end"  # what comes while the end is stored does not stop it
            error = {"code": UNFINISHED.code, "message": UNFINISHED.message}
            response = self.shown_row().response | {"status": "failed", "error": error}
            others, last = [], {"type": "response.failed", "response": response}
        self.log.extend(others)
        if self.row.kept and not self.row.background:
            entry = encode_event(len(self.log.entries), last)
            last["response"]["store"] = await self.archive.write(self.row, 0, [entry])
        self.log.extend([last])

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def shown_row(self) -> Row:
        """Return the row with the newest response object that readers may see."""
        return self.row.with_response(self.log.shown.status, self.log.shown.response_json, time.time())

    def stop(self, finish: Finish | None) -> None:
        """Cancel the response unless its last event is made; the first to stop it decides how it ends."""
        if not (self.builder.state == "end" or self.task.cancelling()):
            self.if_cancelled = finish
            self.task.cancel()


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

STEERED = Finish("steered")
SHUT_DOWN = Finish("failed", message="The server is shutting down.")
INTERRUPTED = Finish("failed", message="interrupted by a restart")


def failure(error: Exception) -> Finish:
    """Return how an answer ends that can no longer be refused."""
    if isinstance(error, BadInput):
        return Finish("failed", None, error.message, error.late_code)
    log.error("a run failed", exc_info=error)
    return UNFINISHED
