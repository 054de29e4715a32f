"""An engine with the tiny model, and a watch in its thread; for test_engine.py and test_scheduling.py.

    with started(watch) as engine:
        alone(engine, job) --> Answer; together(engine, watch, jobs) --> [Answer, ...]

Watch stands in the engine's thread, as a subclass of the ops: it writes down each step, holds some back,
makes one raise. Order follows from that and from asyncio's queue of tasks, never from the clock.
"""

import asyncio
import math
import threading
from collections import Counter, abc, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from datetime import datetime
from functools import cache, partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

from engine import Engine, StepOutput
from helpers.pulled import pulled
from model import NumpyOps, Span, Ticket
from parity import TINY, Ours
from request.template import ChatTemplate
from sampling import Choice, Context, Sampling
from scheduler import Scheduled, Scheduler, Sequence
from service.steps import Share, Steps
from tokenizer import Tokenizer

T = TypeVar("T")

PATIENCE_S = 30  # for what takes milliseconds on a quiet machine
CHUNK = NumpyOps.chunk
MAX_BATCH = 16
GREEDY = Sampling(temperature=0, n_top_logprobs=2)  # with logprobs, == compares the bits of logits as well


class WatchedStep(NamedTuple):
    rows: list[int]  # of each sequence
    n_running: int  # with pages when the step begins


class WatchedScheduler:
    """The steps of a scheduler as service/steps.py shows them, and where a picture differs from it."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []  # chosen in all steps
        self.violations: list[str] = []
        self._pictures = Steps(cast(Engine, SimpleNamespace()), lambda _: b"")

    def observe(
        self, scheduler: Scheduler, batch: list[Scheduled], choices: list[list[Choice]], seconds: float
    ) -> None:
        before = list(self._pictures.steps)[-1:]
        self._pictures.observe(scheduler, batch, choices, seconds)
        newest = list(self._pictures.steps)[-1:]
        if newest != before:  # else nothing was computed, and none has left
            self._compare(scheduler, *newest[0])

    def _compare(self, scheduler: Scheduler, step: dict[str, Any], shares: list[Share]) -> None:
        """The law: page tables, users of each page, prefix cache and queues are in each picture."""
        self.tokens += [token for _, _, texts in shares for token in texts["tokens"]]
        shown = {share["sequence"]: share for _, share, _ in shares}
        tables = [shown[number]["page_table"] for number in step["running"]]
        users = Counter(page for table in tables for page in table)
        pool = scheduler.pool
        cached = {page for page, digit in enumerate(step["cached"]) if digit == "1"}
        left = [members["page_table"] for members in shown.values() if "ended" in members]
        n_waiting = [shown[number]["n_prompt"] for number in step["waiting"]]
        seen = [
            tables,
            n_waiting,
            [users[page] for page in range(pool.n_pages)],
            cached,
            step["n_free_pages"],
        ]
        held = [
            [one.page_table for one in scheduler.running],
            [len(one.prompt) for one in scheduler.waiting],
            pool._n_users,
            set(pool.cached_pages),
            pool.n_free,
        ]
        if seen != held or any(left):
            self.violations.append(
                f"after step {step['step']}: {seen}, {held}, pages of those that left: {left}"
            )


class Watch:
    """The engine's thread, seen from inside."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.scheduler = WatchedScheduler()
        self.steps: list[WatchedStep] = []
        self.hold_at: set[int] = set()  # steps, counted from 0, that wait to be released
        self.fail_at: int | None = None
        self._held = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def step(self, spans: abc.Sequence[Span]) -> None:
        n = len(self.steps)
        assert self.engine
        self.steps.append(WatchedStep([s.end - s.start for s in spans], self.engine.counts()["running"]))
        if n in self.hold_at:
            self._held.release()
            self._go.acquire()
        if n == self.fail_at:
            raise FloatingPointError("a fault made on purpose")

    @asynccontextmanager
    async def paused(self, engine: Engine) -> AsyncIterator[None]:
        """What an idle engine is asked within begins together, in the step after this one."""
        self.hold_at.add(len(self.steps))
        async with aclosing(stepwise(engine, endless(1, 1))) as steps:
            step = asyncio.ensure_future(anext(steps))
            await self.held()
            yield
            await asyncio.sleep(0)  # the readers that were made begin
            self.release()
            await step

    async def held(self) -> None:
        """Wait until the next of the steps in `hold_at` has begun."""
        assert await asyncio.to_thread(self._held.acquire, timeout=PATIENCE_S), "no step was held"

    def release(self) -> None:
        self._go.release()


@cache
def tiny() -> Ours:
    return Ours(TINY)


@contextmanager
def started(
    watch: Watch,
    max_seq_len: int = 1024,
    n_pages: int = 256,
    n_ahead: int = 0,
    speculate: int = 0,
    step_s: float = math.inf,
) -> Iterator[Engine]:
    """An engine; when it is left, all pages must be free. `step_s` inf: no step depends on the clock."""

    class WatchedOps(NumpyOps):
        """NumpyOps that take chained spans, as a GPU does: each goes on from its slot's last choice."""

        def launch(self, spans: abc.Sequence[Span], contexts: abc.Sequence[Context]) -> Ticket:
            watch.step(spans)
            slots = [span.slot for span in spans for _ in range(span.n_wanted)]  # of each context
            pairs = zip(slots, contexts, strict=True)
            ticket = super().launch(list(map(self.unchained, spans)), [self.as_read(*pair) for pair in pairs])
            for slot, choice in zip(slots, chain.from_iterable(ticket), strict=True):
                chosen[slot].append(choice.token_id)
            return ticket

        def unchained(self, span: Span) -> Span:
            if span.token_ids is None:
                span = span._replace(token_ids=chosen[span.slot][-1:])
            return span

        def as_read(self, slot: int, context: Context) -> Context:
            """The context as it will be when the engine has read all choices of the slot."""
            if not context.n_unread:
                return context
            unread = chosen[slot][-context.n_unread :]
            return context._replace(output=[*context.output, *unread], n_unread=0)

    chosen: defaultdict[int, list[int]] = defaultdict(list)  # the tokens that each slot has chosen

    WatchedOps.n_ahead = n_ahead
    ops = WatchedOps(tiny().config, tiny().weights, max_seq_len, n_pages, MAX_BATCH)
    watch.engine = started = Engine(ops, speculate, step_s)
    watched = watch.scheduler = WatchedScheduler()
    started.observer = watched.observe
    try:
        yield started
    finally:
        for _ in watch.hold_at:
            watch.release()
        started.close()
        assert started.counts()["free_pages"] == n_pages
        assert watched.violations == []


@cache
def chat_tools() -> tuple[ChatTemplate, Tokenizer]:
    return ChatTemplate.load(TINY), Tokenizer(TINY / "tokenizer.json")


def job(question: str, max_tokens: int = 40, sampling: Sampling = GREEDY) -> Sequence:
    """What the worker makes of a chat."""
    template, tokenizer = chat_tools()
    text = template.render([{"role": "user", "content": question}], None, datetime(2026, 1, 1))
    return Sequence(tokenizer.encode(text), max_tokens, frozenset(tiny().config.eos_token_ids), sampling)


def endless(n_prompt: int, max_tokens: int, first: int = 5) -> Sequence:
    """Nonsense that no token stops."""
    return Sequence([(first + 7 * i) % 2000 for i in range(n_prompt)], max_tokens, frozenset(), GREEDY)


def stepwise(engine: Engine, job: Sequence) -> AsyncGenerator[StepOutput]:
    """The steps of a sequence, to wait for each, or to leave early: use it under aclosing."""
    return pulled(partial(engine.generate, fresh(job)))


def fresh(job: Sequence) -> Sequence:
    """The same request, of which nothing has been computed yet."""
    asked = job.prompt, job.max_tokens, job.stop_token_ids, job.sampling
    return Sequence(*asked, job.constraint, job.owner, job.request_id)


async def steps_of(engine: Engine, job: Sequence) -> list[StepOutput]:
    return [step async for step in stepwise(engine, job)]


class Answer(NamedTuple):
    """The steps of a sequence as one; the last of them is its only finish."""

    tokens: list[Choice]
    finish: str | None
    message: str

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


def answer(steps: abc.Sequence[StepOutput]) -> Answer:
    assert [bool(step.finish) for step in steps] == [False] * (len(steps) - 1) + [True]
    return Answer([token for step in steps for token in step.tokens], steps[-1].finish, steps[-1].message)


def play(main: Coroutine[Any, Any, T], what: str, patience_s: float = PATIENCE_S) -> T:
    async def limited() -> T:
        try:
            async with asyncio.timeout(patience_s):
                return await main
        except TimeoutError:
            raise AssertionError(f"waited {patience_s} s for {what}") from None

    return asyncio.run(limited())


def alone(engine: Engine, job: Sequence) -> Answer:
    return answer(play(steps_of(engine, job), "an answer"))


def together(engine: Engine, watch: Watch, jobs: abc.Sequence[Sequence]) -> list[Answer]:
    """All of them begin in the same step, as far as they fit."""

    async def main() -> list[Answer]:
        async with watch.paused(engine):
            readers = [asyncio.create_task(steps_of(engine, job)) for job in jobs]
        return [answer(await reader) for reader in readers]

    return play(main(), f"{len(jobs)} answers")


def state(engine: Engine) -> tuple[int, int, int]:
    counts = engine.counts()
    return counts["running"], counts["waiting"], counts["steps"]


def failed(answer: Answer, message: str) -> bool:
    return answer.finish == "failed" and message in answer.message
