"""engine.py with the tiny model: what a request gets alone it gets in any company; all ends; memory goes.

Watch stands in the engine's thread, as a subclass of the ops: it writes down each step, holds some back,
makes one raise. Order follows from that and from asyncio's queue of tasks, never from the clock.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, TypeVar

import pytest

import engine
from chat import ChatTemplate
from engine import CLOSING, MAX_TILES, Engine, Job, Step
from model import Choice, Context, NumpyOps, Sampling, Span, Ticket
from parity import TINY, Ours
from tokenizer import Tokenizer

T = TypeVar("T")

PATIENCE_S = 30  # for what takes milliseconds on a quiet machine
TILE = NumpyOps.tile
MAX_BATCH = 16
GREEDY = Sampling(
    temperature=0, n_top_logprobs=2
)  # with logprobs, == compares the bits of the logits as well
QUESTIONS = [
    "What is 2+2? Answer with just the number.",
    "hi",
    "Say OK",
    "What is the capital of France?",
    "What is 17 plus 25?",
    "Tell me a story about a fox that wanted to learn how to read, and about the owl who taught it.",
]


class WatchedStep(NamedTuple):
    rows: list[int]  # of each sequence
    n_running: int  # with pages when the step begins


class Watch:
    """The engine's thread, seen from inside."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.steps: list[WatchedStep] = []
        self.hold_at: set[int] = set()  # steps, counted from 0, that wait to be released
        self.fail_at: int | None = None
        self._held = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def step(self, spans: Sequence[Span]) -> None:
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
        async with aclosing(engine.generate(endless(1, 1))) as steps:
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


@pytest.fixture
def watch() -> Watch:
    return Watch()


@cache
def tiny() -> Ours:
    return Ours(TINY)


@contextmanager
def started(
    watch: Watch, max_seq_len: int = 1024, n_pages: int = 256, n_ahead: int = 0, speculate: int = 0
) -> Iterator[Engine]:
    class WatchedOps(NumpyOps):
        def launch(self, spans: Sequence[Span], contexts: Sequence[Context]) -> Ticket:
            watch.step(spans)
            return super().launch(spans, contexts)

    WatchedOps.n_ahead = n_ahead
    ops = WatchedOps(tiny().config, tiny().weights, max_seq_len, n_pages, MAX_BATCH)
    watch.engine = started = Engine(ops, speculate)
    try:
        yield started
    finally:
        for _ in watch.hold_at:
            watch.release()
        started.close()
        assert started.counts()["free_pages"] == n_pages


@pytest.fixture
def tiny_engine(watch: Watch) -> Iterator[Engine]:
    with started(watch) as running:
        yield running


@cache
def chat_tools() -> tuple[ChatTemplate, Tokenizer]:
    return ChatTemplate.load(TINY), Tokenizer(TINY / "tokenizer.json")


def job(question: str, max_tokens: int = 40, sampling: Sampling = GREEDY) -> Job:
    """What the worker makes of a chat."""
    template, tokenizer = chat_tools()
    text = template.render([{"role": "user", "content": question}], None, datetime(2026, 1, 1))
    return Job(tokenizer.encode(text), max_tokens, frozenset(tiny().config.eos_token_ids), sampling)


def endless(n_prompt: int, max_tokens: int, first: int = 5) -> Job:
    """Nonsense that no token stops."""
    return Job([(first + 7 * i) % 2000 for i in range(n_prompt)], max_tokens, frozenset(), GREEDY)


async def steps_of(engine: Engine, job: Job) -> list[Step]:
    async with aclosing(engine.generate(job)) as steps:
        return [step async for step in steps]


class Answer(NamedTuple):
    """The steps of a sequence as one; the last of them is its only finish."""

    tokens: list[Choice]
    finish: str | None
    message: str

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


def answer(steps: Sequence[Step]) -> Answer:
    assert [bool(step.finish) for step in steps] == [False] * (len(steps) - 1) + [True]
    return Answer([token for step in steps for token in step.tokens], steps[-1].finish, steps[-1].message)


def play(main: Coroutine[Any, Any, T], what: str) -> T:
    async def limited() -> T:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await main
        except TimeoutError:
            raise AssertionError(f"waited {PATIENCE_S} s for {what}") from None

    return asyncio.run(limited())


def alone(engine: Engine, job: Job) -> Answer:
    return answer(play(steps_of(engine, job), "an answer"))


def together(engine: Engine, watch: Watch, jobs: Sequence[Job]) -> list[Answer]:
    """All of them begin in the same step, as far as they fit."""

    async def main() -> list[Answer]:
        async with watch.paused(engine):
            readers = [asyncio.create_task(steps_of(engine, job)) for job in jobs]
        return [answer(await reader) for reader in readers]

    return play(main(), f"{len(jobs)} answers")


# ---- The same in any company -------------------------------------------------------------------------------


def test_text_is_the_models(tiny_engine: Engine) -> None:
    """One request, read in one tile: what the forward pass says without an engine."""
    asked = job("Say OK")
    got = alone(tiny_engine, asked)
    assert got.finish == "stop"
    assert got.ids == tiny().greedy(asked.prompt, len(got.ids))
    assert chat_tools()[1].encode("OK")[0] in got.ids


def test_greedy_in_one_batch_is_as_alone(tiny_engine: Engine, watch: Watch) -> None:
    jobs = [job(question) for question in QUESTIONS]
    expected = [alone(tiny_engine, job) for job in jobs]
    assert together(tiny_engine, watch, jobs) == expected
    assert max(len(step.rows) for step in watch.steps) == len(jobs)
    assert len({len(answer.ids) for answer in expected}) > 2  # they leave at different times


def test_seeded_sampling_is_the_same_alone_and_beside_seven_others(tiny_engine: Engine, watch: Watch) -> None:
    hot = Sampling(temperature=1.5, top_p=0.98, n_top_logprobs=2)
    jobs = [
        job("Tell me a story.", 60, replace(hot, seed=seed, choice=choice))
        for seed, choice in [(7, 0), (7, 1), (8, 0), (7, 0), (-1, 0), (1, 0), (2, 0), (3, 0)]
    ]
    expected = [alone(tiny_engine, job) for job in jobs]
    assert together(tiny_engine, watch, jobs) == expected
    assert max(len(step.rows) for step in watch.steps) == len(jobs)
    texts = [tuple(answer.ids) for answer in expected]
    assert texts[0] == texts[3]
    assert len({*texts}) == 7


@pytest.mark.parametrize("n_prompt", [1, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1])
def test_prompts_are_cut_at_the_same_places_in_any_company(n_prompt: int, watch: Watch) -> None:
    """Else their sums would be rounded otherwise, and once in many answers another token would come."""
    asked = endless(n_prompt, 10)
    with started(watch) as cold:
        expected = alone(cold, asked)
    company = [endless(n, 30, first=n) for n in (1, 3, 200, 300)]
    with started(watch) as crowded:
        assert together(crowded, watch, [*company, asked, *company])[4] == expected


# ---- How it ends -------------------------------------------------------------------------------------------


def test_stop_tokens(tiny_engine: Engine) -> None:
    """The first of them ends the answer, and is in it."""
    full = alone(tiny_engine, endless(20, 30))
    for wanted in {*full.ids}:
        n = full.ids.index(wanted) + 1
        got = alone(tiny_engine, replace(endless(20, 30), stop_token_ids=frozenset([wanted, 2047])))
        assert got == Answer(full.tokens[:n], "stop", "")


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33])
def test_max_tokens(n: int, tiny_engine: Engine) -> None:
    full = alone(tiny_engine, endless(20, 40))
    assert alone(tiny_engine, endless(20, n)) == Answer(full.tokens[:n], "length", "")


def test_a_stop_token_at_max_tokens_is_a_stop(tiny_engine: Engine) -> None:
    full = alone(tiny_engine, job("Say OK"))
    assert full.finish == "stop"
    assert alone(tiny_engine, job("Say OK", max_tokens=len(full.ids))) == full


def test_the_context_can_be_used_to_its_end(watch: Watch) -> None:
    """max_tokens comes from worker.py, which leaves the engine what the context has left."""
    with started(watch, max_seq_len=64) as small, started(watch) as large:
        for n_prompt in (1, 40, 63):
            full = endless(n_prompt, 64 - n_prompt)
            assert alone(small, full) == alone(large, full)
            assert len(alone(small, full).ids) == 64 - n_prompt


def test_leaving_frees_the_memory_within_one_step(tiny_engine: Engine, watch: Watch) -> None:
    """Two run; one is left during step 5. In step 6 the other is alone, and so are its keys and values."""

    async def main() -> Answer:
        async with watch.paused(tiny_engine):
            stays = asyncio.create_task(steps_of(tiny_engine, endless(3, 20)))
            leaves = tiny_engine.generate(endless(3, 20))
            first = asyncio.ensure_future(anext(leaves))
            watch.hold_at.add(5)
        async with aclosing(leaves):
            await first
            await watch.held()
        watch.release()
        return answer(await stays)

    assert len(play(main(), "a sequence beside one that was left").ids) == 20
    both, one = WatchedStep([1, 1], 2), WatchedStep([1], 1)
    assert watch.steps[1:] == [WatchedStep([3, 3], 2), *[both] * 4, *[one] * 15]
    assert state(tiny_engine) == (0, 0, 21)


async def cancelled(engine: Engine, watch: Watch) -> None:
    reader = asyncio.create_task(steps_of(engine, endless(1, 700)))
    await watch.held()
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()


async def broken_off(engine: Engine, watch: Watch) -> None:
    async with aclosing(engine.generate(endless(1, 700))) as steps:
        await anext(steps)
        await watch.held()


async def forgotten(engine: Engine, watch: Watch) -> None:
    """The loop closes the generator when it ends."""
    steps = engine.generate(endless(1, 700))
    await anext(steps)
    await watch.held()


@pytest.mark.parametrize("way", [cancelled, broken_off, forgotten])
def test_nothing_stays_of_a_sequence_however_its_reader_leaves(
    way: Callable[[Engine, Watch], Coroutine[Any, Any, None]], tiny_engine: Engine, watch: Watch
) -> None:
    watch.hold_at = {12}
    play(way(tiny_engine, watch), "a reader that leaves")
    watch.release()
    alone(tiny_engine, endless(1, 1))
    assert watch.steps == [WatchedStep([1], 1)] * 14  # the last of them is that of the second request
    assert state(tiny_engine) == (0, 0, 14)


# ---- Who runs when -----------------------------------------------------------------------------------------


def test_what_is_too_much_waits(tiny_engine: Engine, watch: Watch) -> None:
    """The oldest run, and each that ends makes room for the next."""
    jobs = [endless(2, 10 + i, first=i) for i in range(MAX_BATCH + 5)]
    expected = [alone(tiny_engine, job) for job in jobs]
    first = len(watch.steps)
    assert together(tiny_engine, watch, jobs) == expected
    n_running = [len(step.rows) for step in watch.steps[first:]]
    assert max(n_running) == MAX_BATCH
    assert n_running.count(MAX_BATCH) >= 10
    assert max(step.n_running for step in watch.steps) == MAX_BATCH


def test_leaving_while_waiting(tiny_engine: Engine, watch: Watch) -> None:
    async def main() -> list[Answer]:
        async with watch.paused(tiny_engine):
            readers = [asyncio.create_task(steps_of(tiny_engine, endless(1, 9))) for _ in range(MAX_BATCH)]
            waiting = asyncio.create_task(steps_of(tiny_engine, endless(1, 9)))
            watch.hold_at.add(3)
        await watch.held()
        assert state(tiny_engine) == (MAX_BATCH, 1, 3)
        waiting.cancel()
        await asyncio.wait([waiting])
        watch.release()
        return [answer(await reader) for reader in readers]

    assert len(play(main(), "sequences while another waits and leaves")) == MAX_BATCH
    assert watch.steps[1:] == [WatchedStep([1] * MAX_BATCH, MAX_BATCH)] * 9
    assert state(tiny_engine) == (0, 0, 10)


def test_a_long_prompt_does_not_hold_up_who_decodes(tiny_engine: Engine, watch: Watch) -> None:
    """Each step that reads a tile of the one brings the other a token."""
    got = together(tiny_engine, watch, [endless(1, 30), endless(4 * TILE - 5, 1)])
    assert [len(answer.ids) for answer in got] == [30, 1]
    assert [step.rows for step in watch.steps[1:]] == [*[[1, TILE]] * 3, [1, TILE - 5], *[[1]] * 26]


def test_long_prompts_share_steps(tiny_engine: Engine, watch: Watch) -> None:
    """No step is larger than it may be, none lacks the sequence that decodes, and no token is read twice."""
    jobs = [endless(1, 40), *(endless(2 * TILE, 1, first=i) for i in range(4)), endless(TILE // 2, 1)]
    got = together(tiny_engine, watch, jobs)
    assert [len(answer.ids) for answer in got] == [40, 1, 1, 1, 1, 1]
    rows = [step.rows for step in watch.steps[1:]]
    assert len(rows) == 40
    assert all(row[0] == 1 and sum(row) <= 1 + MAX_TILES * TILE for row in rows)
    assert sum(sum(row) for row in rows) == 40 + sum(len(job.prompt) for job in jobs[1:])


def test_prompts_are_read_oldest_first(tiny_engine: Engine, watch: Watch) -> None:
    finished: list[int] = []

    async def read(i: int) -> None:
        await steps_of(tiny_engine, endless(3 * TILE, 1))
        finished.append(i)

    async def main() -> None:
        async with watch.paused(tiny_engine):
            readers = [asyncio.create_task(read(i)) for i in range(7)]
        await asyncio.wait(readers)

    play(main(), "seven prompts")
    assert finished == [*range(7)]


# ---- Failures ----------------------------------------------------------------------------------------------


def state(engine: Engine) -> tuple[int, int, int]:
    counts = engine.counts()
    return counts["running"], counts["waiting"], counts["steps"]


def failed(answer: Answer, message: str) -> bool:
    return answer.finish == "failed" and message in answer.message


def test_a_step_that_fails_ends_its_requests_and_the_next_works(
    tiny_engine: Engine, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [job(question) for question in QUESTIONS[:3]]
    expected = [alone(tiny_engine, job) for job in jobs]
    watch.fail_at = len(watch.steps) + 4
    got = together(tiny_engine, watch, jobs)
    assert all(failed(answer, "FloatingPointError in the engine") for answer in got)
    assert [a.tokens for a in got] == [b.tokens[:3] for b in expected]  # one step was paused()'s
    assert "a fault made on purpose" in caplog.text
    assert together(tiny_engine, watch, jobs) == expected


def test_a_step_that_fails_leaves_no_memory(
    tiny_engine: Engine, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.log, "disabled", True)  # else pytest keeps the traceback, and that the arrays
    watch.fail_at = 3
    assert failed(alone(tiny_engine, endless(5, 9)), "FloatingPointError")
    alone(tiny_engine, endless(1, 1))
    assert watch.steps[-1].n_running == 1


def test_a_step_that_fails_spares_who_is_not_in_it(tiny_engine: Engine, watch: Watch) -> None:
    """Two tiles fill the step, so the third prompt and the fourth have to wait, and only for that."""
    jobs = [endless(n, 3, first=n) for n in (TILE, TILE, TILE + 1, 7)]
    watch.fail_at = 1
    one, two, three, four = together(tiny_engine, watch, jobs)
    assert watch.steps[1].rows == [TILE, TILE]
    assert failed(one, "FloatingPointError")
    assert failed(two, "FloatingPointError")
    assert [three, four] == [alone(tiny_engine, job) for job in jobs[2:]]


OUT_OF_VOCABULARY = Sampling(logit_bias={9999: 1})

# fmt: off
#   what                         job                                                 message
FAULTS = [
    ("a bias without a token",   replace(endless(3, 5), sampling=OUT_OF_VOCABULARY), "IndexError"),
    ("a prompt without a token", replace(endless(3, 5), prompt=[5, 9999]),           "IndexError"),
    ("no prompt",                endless(0, 5),                                      "got 0 and at most 5"),
    ("beyond the context",       endless(1000, 30),                                  "got 1000 and"),
]
# fmt: on


@pytest.mark.parametrize(("what", "asked", "message"), FAULTS)
def test_a_request_that_cannot_be_served(what: str, asked: Job, message: str, tiny_engine: Engine) -> None:
    """worker.py lets none of these through; the engine must outlive them all the same."""
    assert failed(alone(tiny_engine, asked), message)
    assert alone(tiny_engine, job("Say OK")).finish == "stop"
    assert tiny_engine.counts()["running"] == 0


def test_close_fails_who_runs_and_who_waits(tiny_engine: Engine, watch: Watch) -> None:
    async def main() -> list[Answer]:
        async with watch.paused(tiny_engine):
            readers = [
                asyncio.create_task(steps_of(tiny_engine, endless(2, 1000))) for _ in range(MAX_BATCH + 3)
            ]
        await asyncio.to_thread(tiny_engine.close)  # as server.py does, while others may still ask
        return [answer(await reader) for reader in readers]

    assert all(failed(answer, CLOSING) for answer in play(main(), "the end of all"))
    assert tiny_engine.counts()["running"] == tiny_engine.counts()["waiting"] == 0


def test_a_request_after_close_fails_at_once(tiny_engine: Engine) -> None:
    """It waited for ever: nobody read the queue of jobs any more."""
    tiny_engine.close()
    assert failed(alone(tiny_engine, job("hi")), CLOSING)
    tiny_engine.close()  # once more is harmless
