"""Token ids to token ids: which rows the next step computes, and what became of them.

    Job --Engine.generate()--> Step, Step, ... the last one with `finish`

Rules of this file:
1. One thread owns the model. asyncio talks to it through two queues: jobs and aborts in, steps out.
2. Sequences wait, then run. A step takes the next token of every running sequence that decodes, and chunks of
   prompt of those that do not yet, oldest first: long prompts are read beside the decoding of others.
3. A chunk of a prompt is found in the pages of an earlier one where its bits are the same, else computed.
4. Where pages run out, the youngest goes back to wait. What it had is computed again, row by row as it was:
   its tokens are those of a sequence that nobody disturbed.
5. Steps are launched before those ahead of them are read, as many as the ops allow. Tokens computed past the
   end of a sequence are discarded.
6. Drafts are computed beside the next token and kept as far as they are what is chosen: what is said does
   not depend on them.
7. A sequence ends once: stop token, length, failure or abort. Its pages are free before the next step.
8. An exception in a step fails the sequences in it, and no others: the next request works. One outside of a
   step, which nobody foresaw, fails all, and the engine says that it is not alive.

Not here: text (tokenizer.py, worker.py), the forward pass and sampling (model.py), the pool (pages.py), what
may come next (drafts.py).
"""

import asyncio
import logging
import queue
import sys
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from checkpoint.config import Config
from drafts import Lookup
from model import PAGE, Span, Ticket
from pages import ROOT, Name, OutOfPages, Pages, name_of
from sampling import Choice, Context, Sampling

log = logging.getLogger("engine")

MAX_CHUNKS = 2  # a step, beside the sequences that decode: bounds how long they wait for a prompt
SWITCH_S = 0.0005  # how long the other threads of the process may keep this one from the interpreter
MAX_STEP_S = 30  # of the slowest model; it is waited for at the end
MAX_FAILED = 3  # steps one after another, and the engine is not alive: a device can fail for good
CLOSING = "The server is shutting down."
BROKEN = "The engine has stopped; its log has the details."


class Ops(Protocol):
    """What computes the steps, and owns the memory of the pages: model.NumpyOps is the spec."""

    config: Config
    about: str  # what it computes with, for who starts the server
    max_seq_len: int
    n_pages: int
    max_batch: int  # sequences a step
    chunk: int  # tokens of a prompt that are computed together, whole pages; always cut at its multiples
    n_ahead: int  # steps that may be launched before the first of them is read
    chunk_invariant: bool  # has a row the same bits in a prefill chunk as by itself?

    def launch(self, spans: Items[Span], contexts: Items[Context]) -> Ticket: ...

    def read(self, ticket: Ticket) -> list[list[Choice]]: ...


class Constraint(Protocol):
    """What may be generated, where that is not anything."""

    def mask(self) -> NDArray[np.bool_]: ...  # the tokens that may come next, (vocab_size,)

    def advance(self, token_id: int) -> None: ...  # one of them came; raises ValueError if it gives up

    def copy(self) -> "Constraint": ...  # to look ahead with


@dataclass(frozen=True)
class Job:
    """What to generate."""

    prompt: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int]
    sampling: Sampling
    constraint: Constraint | None = None


class Step(NamedTuple):
    """What a step brought to one sequence: its new tokens, a stop token among them, and whether they are the
    last.
    """

    tokens: list[Choice]
    finish: Literal["stop", "length", "failed"] | None = None
    message: str = ""  # for failed: what went wrong
    cached_tokens: int = 0  # of the prompt, that were found and not computed


@dataclass(eq=False)
class Sequence:
    """A job while it runs."""

    job: Job
    loop: asyncio.AbstractEventLoop  # of whoever waits
    steps: asyncio.Queue[Step]  # for him
    n_prefill: int  # tokens that are read in chunks
    output: list[int] = field(default_factory=list)  # as far as it is read
    slot: int | None = None  # None while waiting
    pages: list[int] = field(default_factory=list)  # its table
    names: list[Name] = field(default_factory=list)  # of its first pages, by their content
    n_launched: int = 0  # tokens whose keys and values are in the pages, once all that is launched has run
    n_unread: int = 0  # tokens that were chosen in steps not read yet
    verifying: bool = False  # is a step with drafts of it not read yet? It says how many tokens there are
    n_drafts: int = 0  # to compute at once: fewer while they are wrong
    lookup: Lookup | None = None
    mask: NDArray[np.bool_] | None = None  # the tokens that may come next, where a constraint says so
    n_found: int = 0  # tokens of the prompt that others had computed
    n_lost: int = 0  # tokens it had when its pages were taken from it: to find them again is no gain

    @property
    def n_known(self) -> int:
        return len(self.job.prompt) + len(self.output)

    def finish(self) -> Literal["stop", "length"] | None:
        if self.output[-1] in self.job.stop_token_ids:
            return "stop"
        return "length" if len(self.output) == self.job.max_tokens else None

    def token_ids(self, start: int, end: int) -> list[int]:
        n = len(self.job.prompt)
        return self.job.prompt[start:end] + self.output[max(0, start - n) : max(0, end - n)]

    def name(self, i: int) -> Name:
        """Of its page number i."""
        for j in range(len(self.names), i + 1):
            before = self.names[-1] if self.names else ROOT
            self.names.append(name_of(before, self.token_ids(j * PAGE, (j + 1) * PAGE)))
        return self.names[i]

    def next_name(self) -> Name | None:
        """Of the page that it reads next, where another may share it."""
        return self.name(self.n_launched // PAGE) if self.n_launched + PAGE < self.n_prefill else None

    def n_lacking(self) -> int:
        """Pages that it needs for its tokens and one more."""
        return max(0, -(-(self.n_known + 1) // PAGE) - len(self.pages))

    def contexts(self, drafts: Items[int] = ()) -> list[Context]:
        """What the choice of the next token depends on, and after each draft that its constraint allows."""
        prompt, sampling, mask = self.job.prompt, self.job.sampling, self.mask
        contexts = [Context(sampling, prompt, self.output, mask, self.n_unread)]
        ahead = self.job.constraint.copy() if self.job.constraint and drafts else None
        for i, token_id in enumerate(drafts, 1):
            if ahead and mask is not None:
                mask = _mask_after(ahead, token_id) if mask[token_id] else None
                if mask is None:
                    break
            contexts.append(Context(sampling, prompt, [*self.output, *drafts[:i]], mask))
        return contexts


def _mask_after(constraint: Constraint, token_id: int) -> NDArray[np.bool_] | None:
    """None where nothing may come, or the constraint gives up: when the token comes, that is said."""
    try:
        constraint.advance(token_id)
        mask = constraint.mask()
    except Exception:
        return None
    return mask if mask.any() else None


class Planned(NamedTuple):
    """A sequence's part in a step."""

    sequence: Sequence
    span: Span
    contexts: list[Context]  # of its wanted rows
    drafts: list[int]  # the last of its tokens that nobody has chosen yet

    def names(self) -> list[Name]:
        """Of the pages that a part of a prompt fills."""
        numbers = range(self.span.start // PAGE, self.span.end // PAGE) if self.span.is_chunk else ()
        return [self.sequence.name(i) for i in numbers]


class Flight(NamedTuple):
    """A step that was launched."""

    ticket: Ticket
    plan: list[Planned]


class Engine:
    """Runs a model in a thread of its own."""

    def __init__(self, ops: Ops, speculate: int = 0) -> None:
        """`speculate`: tokens to draft at once, at most."""
        self.config = ops.config
        self.max_seq_len = min(ops.max_seq_len, ops.n_pages * PAGE)
        self.about = ops.about
        self._ops = ops
        self._speculate = speculate
        self._inbox = queue.SimpleQueue[Callable[[], None]]()  # what to do between two steps
        self._waiting: deque[Sequence] = deque()  # oldest first, all younger than those that run
        self._running: list[Sequence] = []  # oldest first
        self._flights: deque[Flight] = deque()
        self._pages = Pages(ops.n_pages)
        self._slots = list(reversed(range(ops.max_batch)))  # the free ones
        self._said: list[tuple[Sequence, Step]] = []  # since the last _deliver()
        self._why_closed = CLOSING
        self._open = True  # False: no new job may be queued
        self._lock = threading.Lock()  # of looking at that and queueing: close() comes from another thread
        self._n_failed = 0  # steps since one that worked
        self._count = dict.fromkeys(["steps", "preemptions", "cached_tokens", "drafted", "accepted"], 0)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, job: Job) -> AsyncGenerator[Step]:
        """Steps of one sequence. Leaving early, by whatever way, aborts it: consume under
        contextlib.aclosing.
        """
        steps = asyncio.Queue[Step]()
        n_drafts, n_prefill = self._speculate, len(job.prompt)
        sequence = Sequence(job, asyncio.get_running_loop(), steps, n_prefill, n_drafts=n_drafts)
        with self._lock:
            if self._open:
                self._inbox.put(partial(self._start, sequence))
            else:
                steps.put_nowait(Step([], "failed", self._why_closed))
        try:
            while True:
                step = await steps.get()
                yield step
                if step.finish:
                    return
        finally:
            self._inbox.put(partial(self._drop, sequence))  # nothing to do if it has ended

    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def alive(self) -> bool:
        """Whether jobs are worked at."""
        return self._open and self._thread.is_alive() and self._n_failed < MAX_FAILED

    def counts(self) -> dict[str, int]:
        now = {"running": len(self._running), "waiting": len(self._waiting)}
        return now | self._count | {"pages": self._pages.n, "free_pages": self._pages.n_free}

    def close(self) -> None:
        """Fail what is left, end the thread; one that does not come back from a step is left behind."""
        with self._lock:
            self._open = False
        self._inbox.put(lambda: None)  # to wake it
        self._thread.join(MAX_STEP_S)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        sys.setswitchinterval(SWITCH_S)
        try:
            while self._open:
                self._turn()
        except Exception:
            log.exception("the engine has stopped")
            self._why_closed = BROKEN
        with self._lock:
            self._open = False
        self._read_inbox(wait=False)
        for sequence in [*self._running, *self._waiting]:
            self._fail(sequence, self._why_closed)
        self._deliver()

    def _turn(self) -> None:
        self._read_inbox(wait=not self._running and not self._waiting and not self._flights)
        self._admit()
        if plan := self._plan():
            self._launch(plan)
        if self._flights and (len(self._flights) > self._ops.n_ahead or not plan):
            self._read()
        self._deliver()

    def _read_inbox(self, wait: bool) -> None:
        while wait or not self._inbox.empty():
            wait = False
            self._inbox.get()()

    def _start(self, sequence: Sequence) -> None:
        job = sequence.job
        self._waiting.append(sequence)
        if not job.prompt or job.max_tokens < 1 or len(job.prompt) + job.max_tokens > self.max_seq_len:
            got = f"got {len(job.prompt)} and at most {job.max_tokens}"
            self._fail(sequence, f"expected a prompt and a token more, {self.max_seq_len} in all; {got}")

    def _deliver(self) -> None:
        """To each event loop at once: a call for each sequence takes longer than a small model's step."""
        by_loop = defaultdict[asyncio.AbstractEventLoop, list[tuple[Sequence, Step]]](list)
        for sequence, step in self._said:
            by_loop[sequence.loop].append((sequence, step))
        self._said = []
        for loop, said in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_over, said)
            except RuntimeError:  # the loop has closed, and with it whoever waited
                log.debug("a step came after its reader had gone")

    def _admit(self) -> None:
        """Let the oldest run while there are pages for all that is known, and one more for each that runs."""
        while self._waiting and self._slots:
            sequence = self._waiting[0]
            owed = sum(s.n_lacking() for s in [*self._running, sequence]) - self._n_shared(sequence)
            if self._running and owed + len(self._running) > self._pages.n_free:
                return
            self._waiting.popleft()
            sequence.slot = self._slots.pop()
            if self._speculate and sequence.lookup is None:
                sequence.lookup = Lookup(sequence.job.prompt)
            self._running.append(sequence)
            self._constrain(sequence)

    def _n_shared(self, sequence: Sequence) -> int:
        """Pages of its prompt that others have in use: it will need none of its own for them."""
        names = (sequence.name(i) for i in range((sequence.n_prefill - 1) // PAGE))
        return sum(1 for _ in takewhile(self._pages.is_used, names))

    # --- what comes next ------------------------------------------------------------------------------------

    def _plan(self) -> list[Planned]:
        """The next step; what is in flight and then the youngest make room where pages run out."""
        while True:
            try:
                return self._planned()
            except OutOfPages:
                if self._flights:
                    self._read()
                else:
                    self._preempt(self._running[-1])

    def _planned(self) -> list[Planned]:
        """Decoding sequences first: a step never makes them wait."""
        plan = list[Planned]()
        n_left = MAX_CHUNKS * self._ops.chunk  # rows of prompts, and of what is computed again
        reading = {s.next_name() or s for s in self._running if s.n_launched < s.n_prefill}
        share = n_left // max(1, min(len(reading), MAX_CHUNKS))  # a short prompt need not wait for a long one
        flights = self._flights if reading else ()  # where all decode, nobody asks
        being_read = {name for flight in flights for planned in flight.plan for name in planned.names()}
        for sequence in sorted(self._running, key=lambda s: s.n_launched < s.n_prefill):  # oldest first
            self._find(sequence)
            if sequence.next_name() in being_read:
                continue  # another reads the same, and it will be found
            if planned := self._next(sequence, min(n_left, share)):
                self._reserve(sequence, planned.span.end)
                plan.append(planned)
                being_read.update(planned.names())
                n_rows = planned.span.end - planned.span.start - len(planned.drafts)
                n_left -= n_rows if n_rows > 1 else 0
        return plan

    def _find(self, sequence: Sequence) -> None:
        """Share what comes next, as far as somebody has computed them; never the last token."""
        n = PAGE if self._ops.chunk_invariant else self._ops.chunk
        while sequence.n_launched + n < sequence.n_prefill:
            numbers = range(sequence.n_launched // PAGE, (sequence.n_launched + n) // PAGE)
            found = [page for i in numbers if (page := self._pages.find(sequence.name(i))) is not None]
            if len(found) < len(numbers):
                return
            for page in found:
                self._pages.share(page)
            self._pages.release(sequence.pages[numbers.start :])  # reserved for a step that was not launched
            sequence.pages[numbers.start :] = found
            sequence.n_launched += n
            if sequence.n_launched > sequence.n_lost:
                sequence.n_found += n
                self._count["cached_tokens"] += n

    def _next(self, sequence: Sequence, n_left: int) -> Planned | None:
        """The sequence's part in the next step; None where it has to wait."""
        s, start = sequence, sequence.n_launched
        assert s.slot is not None
        if s.n_unread:
            chained = Span(s.slot, s.pages, None, start, 1, is_chunk=False)
            return Planned(s, chained, s.contexts(), []) if self._may_chain(s) else None
        is_chunk = start < s.n_prefill
        end = s.n_prefill if is_chunk else s.n_known
        if end - start > max(n_left, 1):
            end = start + n_left // self._ops.chunk * self._ops.chunk
        if end == start:
            return None
        contexts = s.contexts([] if is_chunk else self._drafts(s)) if end == s.n_known else []
        drafts = [*contexts[-1].output[len(s.output) :]] if contexts else []
        token_ids = s.token_ids(start, end) + drafts
        return Planned(s, Span(s.slot, s.pages, token_ids, start, len(contexts), is_chunk), contexts, drafts)

    def _may_chain(self, sequence: Sequence) -> bool:
        """May it go on from a token that nobody has read?"""
        s = sequence
        needs_it = s.job.constraint or s.verifying or (s.lookup and s.lookup.drafts(1))
        return not needs_it and len(s.output) + s.n_unread < s.job.max_tokens

    def _drafts(self, sequence: Sequence) -> list[int]:
        """What may come after its last token; no stop token, for nothing comes after that."""
        s = sequence
        if s.lookup is None:
            return []
        n_free = max(0, self._pages.n_free - len(self._running))  # drafts drive nobody out
        room = (len(s.pages) + n_free) * PAGE - s.n_known
        n = min(s.n_drafts, s.job.max_tokens - len(s.output) - 1, room)
        return list(takewhile(lambda token_id: token_id not in s.job.stop_token_ids, s.lookup.drafts(n)))

    def _reserve(self, sequence: Sequence, end: int) -> None:
        """Pages for all tokens before `end`; raises OutOfPages."""
        pages = sequence.pages
        while len(pages) * PAGE < end:
            pages.append(self._pages.take())

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the others that wait, before them all: they are younger."""
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)
        self._clear(sequence)
        sequence.n_lost = max(sequence.n_lost, sequence.n_launched)
        sequence.n_launched = 0
        if self._ops.chunk_invariant:
            sequence.n_prefill = sequence.n_known
        self._count["preemptions"] += 1

    # --- steps ----------------------------------------------------------------------------------------------

    def _launch(self, plan: list[Planned]) -> None:
        try:
            contexts = [context for planned in plan for context in planned.contexts]
            ticket = self._ops.launch([planned.span for planned in plan], contexts)
        except Exception as error:
            while self._flights:  # what was chosen before
                self._read()
            self._fail_all(plan, error)
            return
        for sequence, span, _, _ in plan:
            sequence.n_launched = span.end
            sequence.n_unread += span.n_wanted
            sequence.verifying = span.n_wanted > 1
        self._flights.append(Flight(ticket, plan))
        self._count["steps"] += 1

    def _read(self) -> None:
        """What the oldest step in flight has brought."""
        ticket, plan = self._flights.popleft()
        try:
            chosen = iter(self._ops.read(ticket))
        except Exception as error:
            self._fail_all(plan, error)
            return
        self._n_failed = 0
        for planned in plan:
            choices = next(chosen) if planned.contexts else []
            if planned.sequence.slot is not None:  # it has not ended, and nobody has left it
                self._advance(planned, choices)

    def _advance(self, planned: Planned, choices: list[Choice]) -> None:
        """Keep the drafts that were chosen, and what was chosen after the last of them."""
        s, span, _, drafts = planned
        s.n_unread -= len(choices)
        pairs = zip(drafts, choices, strict=False)
        n_kept = len(list(takewhile(lambda pair: pair[0] == pair[1].token_id, pairs)))
        if drafts:
            s.verifying = False
            s.n_launched -= len(drafts) - n_kept
            s.n_drafts = min(self._speculate, 2 * n_kept or 1)
            self._count["drafted"] += len(drafts)
            self._count["accepted"] += n_kept
        tokens = choices[: n_kept + 1]
        s.output += (token_ids := [choice.token_id for choice in tokens])
        if s.lookup:
            s.lookup.extend(token_ids)
        self._name(s, span.start, span.end - len(drafts) + n_kept)
        if not tokens:
            return
        finish = s.finish()
        if finish:
            self._drop(s)
        self._said.append((s, Step(tokens, finish, cached_tokens=s.n_found)))
        if not finish:
            self._constrain(s, tokens)

    def _name(self, sequence: Sequence, start: int, end: int) -> None:
        """Make known the pages that these tokens have filled, where anybody may share them."""
        s, chunk = sequence, self._ops.chunk
        limit = end if self._ops.chunk_invariant else min(end, s.n_prefill // chunk * chunk)
        for i in range(start // PAGE, limit // PAGE):
            self._pages.name(s.pages[i], s.name(i))

    def _constrain(self, sequence: Sequence, tokens: Items[Choice] = ()) -> None:
        """Bring the sequence's mask up to date; where its constraint gives up, the sequence alone fails."""
        if constraint := sequence.job.constraint:
            try:
                for token in tokens:
                    constraint.advance(token.token_id)
                sequence.mask = constraint.mask()
                if not sequence.mask.any():
                    raise ValueError("no token may come next")
            except Exception:
                log.exception("the constraint of a request gave up")
                self._fail(sequence, "The constraint on the output gave up; the log has the details.")

    # --- ends -----------------------------------------------------------------------------------------------

    def _fail_all(self, plan: list[Planned], error: Exception) -> None:
        self._n_failed += 1
        log.error("a step failed, and the %d requests in it", len(plan), exc_info=error)
        for sequence, *_ in plan:
            if sequence.slot is not None:
                self._fail(sequence, f"{type(error).__name__} in the engine; its log has the details.")

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._drop(sequence)
        self._said.append((sequence, Step([], "failed", message)))

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._clear(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def _clear(self, sequence: Sequence) -> None:
        """Give its place and its pages back. What is in flight may still write to them, and has its turn
        before whatever is launched for others.
        """
        assert sequence.slot is not None
        self._slots.append(sequence.slot)
        self._pages.release(sequence.pages)
        sequence.slot, sequence.pages = None, []


def _hand_over(said: list[tuple[Sequence, Step]]) -> None:
    for sequence, step in said:
        sequence.steps.put_nowait(step)
