"""The engine's steps as data, to see it work: what each step did, and the state that it left behind.

    Scheduler, batch, choices --Observer.look(), in the engine's thread--> Step --Steps.read()--> SSE frames
    State, Step --State.apply()--> State

A reader gets a state, then the steps behind it. What the scheduler holds, page tables, prefix cache and
queues, is the fold of these.

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html for the stream.

Rules of this file:
1. The scheduler does not know that it is watched: a step is the difference between what it holds and the
   fold of the steps so far.
2. The engine waits for no reader. The ring of steps is bounded in bytes; a reader that is slower than the
   steps loses the oldest, is told how many, and goes on from the state behind them.
3. An owner reads the ids and the tokens of its own requests. Of others it sees the shapes alone: rows, pages,
   phases, queues.

Not here: what is decided (scheduler.py), the page that draws it (engine.html).
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Set
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import sse
from engine import Engine
from model import PAGE
from sampling import Choice
from scheduler import Scheduled, Scheduler, Sequence
from streaming import SSE_HEADERS, KeptAlive, while_connected

RING_BYTES = 16 * 2**20  # of the steps that are kept, about: thousands, tens of thousands without logprobs
OBJECT_BYTES = 800  # of a step, and of each sequence in it, besides what they list
NUMBER_BYTES = 40  # of a number in a list
TOKEN_BYTES = 200  # of a chosen token, and of each token whose logprob stands beside it

Phase = Literal["prefill", "decode", ""]  # of a sequence in a step; "": it had no rows

# --- what a step did ----------------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """A sequence that is seen for the first time."""

    sequence: int  # its number, from 0
    owner: str
    request_id: str
    choice: int  # of the request's n
    n_prompt: int


class Share(NamedTuple):
    """What a step did for one sequence, or to it."""

    sequence: int
    owner: str
    phase: Phase
    start: int  # its rows: the tokens from here
    end: int  # to here, drafts among them
    n_drafts: int
    n_accepted: int
    tokens: list[Choice]  # chosen
    found: list[int]  # pages of the prefix cache that are in its page table now
    taken: list[int]  # free pages that are in its page table now
    released: list[int]  # pages that are no longer in its page table
    cached: list[int]  # pages that its rows have filled, and that the prefix cache knows now
    preempted: str  # what for: Sequence.preempted_for
    ended: str  # stop, length, or "left": it has failed, or nobody reads it any more


class Step(NamedTuple):
    """What has changed since the step before."""

    number: int  # from 0
    time_s: float  # when it was read, since the first step began
    duration_s: float
    arrived: list[Arrival]
    shares: list[Share]
    running: list[int] | None  # sequences, in the scheduler's order; None: as before
    waiting: list[int] | None
    evicted: list[int]  # pages that the prefix cache has lost, besides those that were taken
    n_free_pages: int

    @property
    def n_bytes(self) -> int:
        """About what it takes in memory."""
        n_numbers = len(self.running or ()) + len(self.waiting or ()) + len(self.evicted)
        n_tokens = 0
        for share in self.shares:
            n_numbers += len(share.found) + len(share.taken) + len(share.released) + len(share.cached)
            n_tokens += sum(1 + len(token.top) for token in share.tokens)
        n_objects = 1 + len(self.arrived) + len(self.shares)
        return OBJECT_BYTES * n_objects + NUMBER_BYTES * n_numbers + TOKEN_BYTES * n_tokens


# --- the fold of the steps ----------------------------------------------------------------------------------


@dataclass
class View:
    """A sequence that waits or runs."""

    arrival: Arrival
    page_table: list[int] = field(default_factory=list)
    n_output: int = 0


@dataclass
class State:
    """What the scheduler holds behind a step."""

    number: int = -1  # of that step
    sequences: dict[int, View] = field(default_factory=dict)  # those that wait or run
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)  # pages that the prefix cache knows, in use or free

    def apply(self, step: Step) -> None:
        self.number = step.number
        for arrival in step.arrived:
            self.sequences[arrival.sequence] = View(arrival)
        for share in step.shares:
            view = self.sequences[share.sequence]
            n_kept = len(view.page_table) - len(share.released)
            view.page_table = view.page_table[:n_kept] + share.found + share.taken
            view.n_output += len(share.tokens)
            self.cached.difference_update(share.taken)
            if share.ended:
                del self.sequences[share.sequence]
        self.cached.difference_update(step.evicted)
        for share in step.shares:  # a page is filled after it was taken, by whomever
            self.cached.update(share.cached)
        if step.running is not None:
            self.running = step.running
        if step.waiting is not None:
            self.waiting = step.waiting

    def copy(self) -> "State":
        """A copy that later steps leave alone: they replace page tables and queues, and change none."""
        sequences = {
            number: View(view.arrival, view.page_table, view.n_output)
            for number, view in self.sequences.items()
        }
        return State(self.number, sequences, self.running, self.waiting, set(self.cached))


# --- from the scheduler to steps ----------------------------------------------------------------------------


class Known(NamedTuple):
    """A sequence that waits or runs, as it was at the last look."""

    number: int
    page_table: list[int]
    n_output: int
    n_preemptions: int


class Observer:
    """Looks at a scheduler behind each of its steps; `state` is the fold of what it has seen."""

    def __init__(self) -> None:
        self.state = State()
        self._known: dict[Sequence, Known] = {}
        self._running: list[Sequence] = []  # at the last look
        self._ended = WeakSet[Sequence]()  # steps in flight may still hold them
        self._n_arrived = 0
        self._began_at: float | None = None

    def look(
        self, scheduler: Scheduler, batch: list[Scheduled], choices: list[list[Choice]], duration_s: float
    ) -> Step | None:
        """What has changed since the last look; None where nothing has.

        `batch` is the step that has just been read, [] where none has; `choices` has a list for each of it
        that has contexts.
        """
        read_at = time.perf_counter()
        if self._began_at is None:
            self._began_at = read_at - duration_s
        rows_of = {scheduled.sequence: scheduled for scheduled in batch}
        with_choices = [scheduled.sequence for scheduled in batch if scheduled.contexts]
        choices_of = dict(zip(with_choices, choices, strict=True))
        # One that is done after a single step has come and gone since the last look.
        arrived = self._arrivals([*scheduler.running, *scheduler.waiting, *rows_of])
        gone = self._known.keys() - {*scheduler.running, *scheduler.waiting}
        cached_pages = scheduler.pool.cached_pages
        shares: list[Share] = []
        for sequence in dict.fromkeys([*self._running, *scheduler.running, *rows_of, *gone]):
            if sequence not in self._known:  # it ended while this step was in flight
                continue
            share = self._share(sequence, rows_of.get(sequence), choices_of.get(sequence, []), cached_pages)
            if sequence in gone:
                share = share._replace(ended=sequence.finish or "left")
            if any(share[2:]):
                shares.append(share)
        step = Step(
            self.state.number + 1,
            read_at - self._began_at,
            duration_s,
            arrived,
            shares,
            self._numbers(scheduler.running, self.state.running),
            self._numbers(scheduler.waiting, self.state.waiting),
            self._evicted(shares, cached_pages),
            scheduler.pool.n_free,
        )
        if not (arrived or shares) and step.running is None and step.waiting is None:
            return None
        self.state.apply(step)
        self._running = list(scheduler.running)
        for sequence in gone:
            del self._known[sequence]
            self._ended.add(sequence)
        return step

    def _arrivals(self, sequences: Iterable[Sequence]) -> list[Arrival]:
        """Those that have not been seen before."""
        arrivals: list[Arrival] = []
        for sequence in sequences:
            if sequence in self._known or sequence in self._ended:
                continue
            number = self._n_arrived
            self._n_arrived += 1
            self._known[sequence] = Known(number, [], 0, 0)
            n_prompt, choice = len(sequence.prompt), sequence.sampling.choice
            arrivals.append(Arrival(number, sequence.owner, sequence.request_id, choice, n_prompt))
        return arrivals

    def _share(
        self, sequence: Sequence, rows: Scheduled | None, choices: list[Choice], cached_pages: Set[int]
    ) -> Share:
        """What was done for a sequence; `rows` None: nothing was computed."""
        known = self._known[sequence]
        preempted = ""
        n_kept = n_common(known.page_table, sequence.page_table)
        if sequence.n_preemptions > known.n_preemptions:
            preempted = sequence.preempted_for
        phase: Phase = ""
        start = end = n_drafts = 0
        filled: list[int] = []  # pages that its rows have reached the end of
        if rows is not None:
            phase = "prefill" if rows.is_prefill else "decode"
            start, end, n_drafts = rows.span.start, rows.span.end, len(rows.drafts)
            filled = list(rows.span.pages[start // PAGE : end // PAGE])
        added = sequence.page_table[n_kept:]
        # A page that is in the prefix cache, and not by this step, was found there.
        taken = [page for page in added if page in filled or page not in cached_pages]
        n_new = len(sequence.output) - known.n_output
        self._known[sequence] = Known(
            known.number, list(sequence.page_table), len(sequence.output), sequence.n_preemptions
        )
        return Share(
            known.number,
            sequence.owner,
            phase,
            start,
            end,
            n_drafts,
            max(0, n_new - 1),
            choices[:n_new],
            added[: len(added) - len(taken)],
            taken,
            known.page_table[n_kept:],
            [page for page in filled if page in cached_pages],
            preempted,
            "",
        )

    def _numbers(self, sequences: Iterable[Sequence], before: list[int]) -> list[int] | None:
        """The numbers of a queue; None if they are what they were."""
        numbers = [self._known[sequence].number for sequence in sequences]
        if numbers == before:
            return None
        return numbers

    def _evicted(self, shares: list[Share], cached_pages: Set[int]) -> list[int]:
        """Pages of the prefix cache that were taken by a sequence which has given them back already."""
        taken = {page for share in shares for page in share.taken}
        filled = {page for share in shares for page in share.cached}
        n_taken = len(self.state.cached & taken)
        if len(self.state.cached) - n_taken + len(filled) == len(cached_pages):
            return []
        return sorted((self.state.cached - taken) - cached_pages)


def n_common(a: list[int], b: list[int]) -> int:
    """How many numbers are the same at the beginning of both lists."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:  # almost always
        return n
    return next(i for i in range(n) if a[i] != b[i])


# --- the ring, and those who read it ------------------------------------------------------------------------


class Reader(NamedTuple):
    """A coroutine that waits for the next step, as the engine's thread reaches it."""

    loop: asyncio.AbstractEventLoop
    news: asyncio.Event


class Steps:
    """The newest steps of an engine, as streams."""

    def __init__(
        self, engine: Engine, token_bytes: Callable[[int], bytes], ring_bytes: int = RING_BYTES
    ) -> None:
        self._n_pages = engine.counts()["pages"]
        self._token_bytes = token_bytes
        self._ring_bytes = ring_bytes
        self._observer = Observer()
        self._lock = threading.Lock()  # held for all that follows: the engine's thread writes, readers read
        self._ring = deque[Step]()
        self._n_bytes = 0  # of the steps in the ring
        self._before = State()  # the fold of the steps that the ring has dropped
        self._readers = set[Reader]()
        self._is_closed = False
        engine.observer = self.observe

    def observe(
        self, scheduler: Scheduler, batch: list[Scheduled], choices: list[list[Choice]], duration_s: float
    ) -> None:
        step = self._observer.look(scheduler, batch, choices, duration_s)
        if step is None:
            return
        with self._lock:
            self._ring.append(step)
            self._n_bytes += step.n_bytes
            while self._n_bytes > self._ring_bytes:
                oldest = self._ring.popleft()
                self._n_bytes -= oldest.n_bytes
                self._before.apply(oldest)
        self._wake_readers()

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        self._wake_readers()

    def _wake_readers(self) -> None:
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            with suppress(RuntimeError):  # its loop has closed
                reader.loop.call_soon_threadsafe(reader.news.set)

    async def read(self, owner: str) -> AsyncGenerator[bytes]:
        """The frames for one reader: a state, and the steps behind it as they come."""
        reader = Reader(asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._readers.add(reader)
        seen: int | None = None  # number of the last step that the reader has
        try:
            while not self._is_closed:
                reader.news.clear()
                news = self._behind(seen)
                match news:
                    case None:
                        await reader.news.wait()
                        continue
                    case State():
                        n_lost = 0
                        if seen is not None:
                            n_lost = news.number - seen
                        event = self._state_event(news, n_lost, owner)
                    case Step():
                        event = self._step_event(news, owner)
                seen = news.number
                yield sse.encode(sse.dumps(event), event["type"])
                await asyncio.sleep(0)  # thousands of steps that are kept must not stop other streams
        finally:
            with self._lock:
                self._readers.discard(reader)

    def _behind(self, seen: int | None) -> Step | State | None:
        """What follows the last step that a reader has: a state where the ring has dropped the next one."""
        with self._lock:
            if seen is None or seen < self._before.number:
                return self._before.copy()
            n_seen = seen - self._before.number  # of those in the ring
            if n_seen < len(self._ring):
                return self._ring[n_seen]
            return None

    # --- as JSON, for the eyes of one owner -----------------------------------------------------------------

    def _state_event(self, state: State, n_lost: int, owner: str) -> dict[str, Any]:
        sequences = [
            arrival_json(view.arrival, owner) | {"page_table": view.page_table, "n_output": view.n_output}
            for view in state.sequences.values()
        ]
        return {
            "type": "state",
            "step": state.number,
            "n_lost": n_lost,
            "page_size": PAGE,
            "n_pages": self._n_pages,
            "sequences": sequences,
            "running": state.running,
            "waiting": state.waiting,
            "cached": sorted(state.cached),
        }

    def _step_event(self, step: Step, owner: str) -> dict[str, Any]:
        event: dict[str, Any] = {
            "type": "step",
            "step": step.number,
            "time_s": round(step.time_s, 6),
            "duration_s": round(step.duration_s, 6),
            "n_rows": sum(share.end - share.start for share in step.shares),
            "n_free_pages": step.n_free_pages,
            "arrived": [arrival_json(arrival, owner) for arrival in step.arrived],
            "sequences": [self._share_json(share, owner) for share in step.shares],
            "evicted": step.evicted,
        }
        if step.running is not None:
            event["running"] = step.running
        if step.waiting is not None:
            event["waiting"] = step.waiting
        return event

    def _share_json(self, share: Share, owner: str) -> dict[str, Any]:
        shape = share._asdict()
        del shape["owner"], shape["tokens"]
        shape["n_tokens"] = len(share.tokens)
        if share.owner == owner:
            shape["tokens"] = [self._token_json(token) for token in share.tokens]
        return shape

    def _token_json(self, token: Choice) -> dict[str, Any]:
        said = {"id": token.token_id, "text": self._text(token.token_id)}
        if token.logprob is None:
            return said
        top = [
            {"id": token_id, "text": self._text(token_id), "logprob": finite(logprob)}
            for token_id, logprob in token.top
        ]
        return said | {"logprob": finite(token.logprob), "top": top}

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")


def arrival_json(arrival: Arrival, owner: str) -> dict[str, Any]:
    shape = {"sequence": arrival.sequence, "n_prompt": arrival.n_prompt}
    if arrival.owner != owner:
        return shape
    return shape | {"request_id": arrival.request_id, "choice": arrival.choice}


def finite(logprob: float) -> float | None:
    """A logprob as JSON can say it: None where it is no finite number."""
    return logprob if math.isfinite(logprob) else None


class StepStream(Response):
    """Answers with the frames of Steps.read(), until the client leaves or the server stops."""

    def __init__(self, frames: AsyncGenerator[bytes]) -> None:
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(self._send_frames(send), receive)

    async def _send_frames(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        async with aclosing(KeptAlive(send)) as stream, aclosing(self._frames) as frames:
            async for frame in frames:
                await stream.write(frame)
        await send({"type": "http.response.body", "body": b""})
