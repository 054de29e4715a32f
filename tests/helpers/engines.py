"""An engine with the tiny model, watched from its own thread; for test_engine.py and test_scheduling.py.

    with started() as engine:
        alone(engine, job) --> Answer; engine.together(jobs) --> [Answer, ...]

It writes down each step, and holds some back. Order follows from that and from asyncio's queue of tasks,
never from the clock.
"""

import asyncio
import math
import threading
from collections import Counter, abc, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast
from unittest.mock import patch

from engine import Engine, StepOutput, StepRead
from helpers.limits import PATIENCE_S
from model import NumpyOps, Span, Ticket
from parity import TINY, Ours
from sampling import Choice, Context, Sampling
from scheduler import Scheduler, Sequence
from service.steps import Share, Steps

T = TypeVar("T")

MAX_BATCH = 16
GREEDY = Sampling(temperature=0, n_top_logprobs=2)  # with logprobs, == compares the bits of logits as well


@cache
def tiny() -> Ours:
    return Ours(TINY)


# ---- The engine --------------------------------------------------------------------------------------------


class WatchedScheduler:
    """The steps of a scheduler as service/steps.py shows them, and where a picture differs from it."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []  # chosen in all steps
        self.violations: list[str] = []
        self._pictures = Steps(cast(Engine, SimpleNamespace()), lambda _: b"")

    def observe(self, scheduler: Scheduler, read: StepRead, seconds: float) -> None:
        before = list(self._pictures.steps)[-1:]
        self._pictures.observe(scheduler, read, seconds)
        newest = list(self._pictures.steps)[-1:]
        if newest != before:  # else nothing was computed, and none has left
            self._compare(scheduler, *newest[0])

    def _compare(self, scheduler: Scheduler, step: dict[str, Any], shares: list[Share]) -> None:
        """The law: page tables, users of each page, prefix cache and queues are in each picture."""
        self.tokens += [token for _, _, texts in shares for token in texts["tokens"]]
        shown = {share["sequence"]: share for _, share, _ in shares}
        tables = [shown[number]["page_table"] for number in step["running"]]
        waiting = [shown[number]["n_prompt"] for number in step["waiting"]]
        left = [share["page_table"] for share in shown.values() if "ended" in share]
        users = Counter(page for table in tables for page in table)
        pool = scheduler.pool
        seen = [tables, waiting, dict(users), step["cached"], step["n_free_pages"], any(left)]
        held_tables = [one.page_table for one in scheduler.running]
        held_waiting = [len(one.prompt) for one in scheduler.waiting]
        held_users = {page: n for page, n in enumerate(pool._n_users) if n}
        held = [held_tables, held_waiting, held_users, [*pool.cached_pages], pool.n_free, False]
        if seen != held:
            self.violations.append(f"after step {step['step']}: {seen}, {held}")


class WatchedOps(NumpyOps):
    """NumpyOps that take chained spans, as a GPU does: each goes on from its slot's last choice."""

    before_step: Callable[[abc.Sequence[Span]], None]

    def __init__(self, max_seq_len: int, n_pages: int, n_ahead: int) -> None:
        super().__init__(tiny().config, tiny().weights, max_seq_len, n_pages, MAX_BATCH)
        self.n_ahead = n_ahead
        self._chosen = defaultdict[int, list[int]](list)  # the tokens that each slot has chosen

    def launch(self, spans: abc.Sequence[Span], contexts: abc.Sequence[Context]) -> Ticket:
        self.before_step(spans)
        slots = [span.slot for span in spans for _ in range(span.n_wanted)]  # of each context
        known = [*map(self._as_read, slots, contexts)]
        ticket = super().launch([*map(self._unchained, spans)], known)
        for slot, choice in zip(slots, ticket, strict=True):
            self._chosen[slot].append(choice.token_id)
        return ticket

    def _unchained(self, span: Span) -> Span:
        return span._replace(token_ids=span.token_ids or self._chosen[span.slot][-1:])

    def _as_read(self, slot: int, context: Context) -> Context:
        """The context as it will be when the engine has read all choices of the slot."""
        n = context.n_unread
        unread = self._chosen[slot][-n:] if n else []
        return context._replace(output=[*context.output, *unread], n_unread=0)


class WatchedEngine(Engine):
    """An engine, seen from inside its thread."""

    def __init__(self, ops: WatchedOps, speculate: int) -> None:
        self.steps: list[list[int]] = []  # the rows of each sequence in it
        self.hold_at = set[int]()  # steps, counted from 0, that wait to be released
        self._held = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        ops.before_step = self._before_step
        super().__init__(ops, speculate)
        self.pictures = WatchedScheduler()
        self.observer = self.pictures.observe

    def _before_step(self, spans: abc.Sequence[Span]) -> None:
        n = len(self.steps)
        self.steps.append([span.end - span.start for span in spans])
        if n in self.hold_at:
            self._held.release()
            self._go.acquire()

    async def held(self) -> None:
        """Wait until the next of the steps in `hold_at` has begun."""
        assert await asyncio.to_thread(self._held.acquire, timeout=PATIENCE_S), "no step was held"

    def release(self) -> None:
        self._go.release()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """What an idle engine is asked within begins together, in the step after this one."""
        self.hold_at.add(len(self.steps))
        before = asyncio.create_task(steps_of(self, endless(1, 1)))
        await self.held()
        yield
        await asyncio.sleep(0)  # the readers that were made begin
        self.release()
        await before

    def together(self, jobs: abc.Sequence[Sequence]) -> "list[Answer]":
        """All of them begin in the same step, as far as they fit."""

        async def main() -> list[Answer]:
            async with self.paused():
                readers = [asyncio.create_task(steps_of(self, job)) for job in jobs]
            return [answer(await reader) for reader in readers]

        return play(main())


@contextmanager
def started(
    max_seq_len: int = 1024,
    n_pages: int = 256,
    n_ahead: int = 0,
    speculate: int = 0,
    step_s: float = math.inf,
) -> Iterator[WatchedEngine]:
    """An engine; when it is left, all pages must be free. `step_s` inf: no step depends on the clock."""
    with patch("engine.STEP_S", step_s):
        engine = WatchedEngine(WatchedOps(max_seq_len, n_pages, n_ahead), speculate)
        try:
            yield engine
        finally:
            for _ in engine.hold_at:
                engine.release()
            engine.close()
            assert (engine.counts()["free_pages"], engine.pictures.violations) == (n_pages, [])


# ---- What it is asked, and answers -------------------------------------------------------------------------


def endless(n_prompt: int, max_tokens: int, first: int = 5) -> Sequence:
    """Nonsense that no token stops."""
    return Sequence([(first + 7 * i) % 2000 for i in range(n_prompt)], max_tokens, frozenset(), GREEDY)


async def steps_of(engine: Engine, job: Sequence, n_steps: int | None = None) -> list[StepOutput]:
    """What the reader of a new sequence like this one gets, if it wants no more than so many steps."""
    steps: list[StepOutput] = []

    def feed(step: StepOutput) -> bool:
        steps.append(step)
        return len(steps) != n_steps

    asked = job.prompt, job.max_tokens, job.stop_token_ids, job.sampling, job.constraint
    await engine.generate(Sequence(*asked), feed)
    return steps


class Answer(NamedTuple):
    """The steps of a sequence as one; the last of them is its only finish."""

    tokens: list[Choice]
    finish: str | None
    message: str

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    def failed(self, message: str) -> bool:
        return self.finish == "failed" and message in self.message


def answer(steps: abc.Sequence[StepOutput]) -> Answer:
    assert [bool(step.finish) for step in steps] == [False] * (len(steps) - 1) + [True]
    return Answer([token for step in steps for token in step.tokens], steps[-1].finish, steps[-1].message)


def play(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))


def alone(engine: Engine, job: Sequence) -> Answer:
    return answer(play(steps_of(engine, job)))
