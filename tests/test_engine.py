"""engine.py with the tiny model: what a request gets alone it gets in any company; all ends; memory goes."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from multiprocessing import connection
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import BROKEN, CLOSING, GAVE_UP, Engine, StepOutput
from helpers.engines import (
    CHUNK,
    GREEDY,
    MAX_BATCH,
    Answer,
    Watch,
    WatchedStep,
    alone,
    answer,
    chat_tools,
    endless,
    failed,
    job,
    play,
    started,
    state,
    steps_of,
    stepwise,
    tiny,
    together,
)
from sampling import Sampling
from scheduler import Scheduler, Sequence


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def tiny_engine(watch: Watch) -> Iterator[Engine]:
    with started(watch) as running:
        yield running


# ---- The same in any company -------------------------------------------------------------------------------


def test_text_is_the_models(tiny_engine: Engine) -> None:
    """One request, read in one chunk: what the forward pass says without an engine."""
    asked = job("Say OK")
    got = alone(tiny_engine, asked)
    assert got.finish == "stop"
    assert got.ids == tiny().greedy(asked.prompt, len(got.ids))
    assert chat_tools()[1].encode("OK")[0] in got.ids


# ---- How it ends -------------------------------------------------------------------------------------------


async def cancelled(engine: Engine, watch: Watch) -> None:
    reader = asyncio.create_task(steps_of(engine, endless(1, 700)))
    await watch.held()
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()


async def forgotten(engine: Engine, watch: Watch) -> None:
    """The loop cancels the task of generate() when it ends."""
    steps = stepwise(engine, endless(1, 700))
    await anext(steps)
    await watch.held()


@pytest.mark.parametrize("way", [cancelled, forgotten])
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


def test_a_step_with_decoding_sequences_takes_no_longer_than_it_may(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a row takes 5 ms, and a step 20 ms more: 12 rows in 80 ms."""

    def now() -> float:
        return sum(0.02 + 0.005 * sum(step.rows) for step in watch.steps)

    monkeypatch.setattr("time.perf_counter", now)
    with started(watch, step_s=0.08) as engine:
        together(engine, watch, [endless(1, 60), endless(300, 1)])
    durations = [0.02 + 0.005 * sum(step.rows) for step in watch.steps if len(step.rows) == 2]
    assert sum(sum(step.rows) - 1 for step in watch.steps if len(step.rows) == 2) >= 300
    assert max(durations[4:]) < 0.085
    assert min(durations[4:-1]) > 0.06


# ---- Failures ----------------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_its_requests_alone_and_the_next_works(
    tiny_engine: Engine, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two chunks fill the step, so the third prompt and the fourth have to wait, and only for that."""
    jobs = [endless(n, 3, first=n) for n in (CHUNK, CHUNK, CHUNK + 1, 7)]
    watch.fail_at = 1
    one, two, three, four = together(tiny_engine, watch, jobs)
    assert watch.steps[1].rows == [CHUNK, CHUNK]
    assert failed(one, "FloatingPointError in the engine")
    assert failed(two, "FloatingPointError in the engine")
    assert "a fault made on purpose" in caplog.text
    assert [three, four] == [alone(tiny_engine, job) for job in jobs[2:]]


def test_an_engine_whose_steps_all_fail_is_not_alive(tiny_engine: Engine) -> None:
    """Three requests that cannot be served, of which worker.py lets none through; the next one works."""
    out_of_vocabulary = Sampling(logit_bias={9999: 1})
    for asked in 2 * [replace(endless(3, 5), sampling=out_of_vocabulary)] + [
        replace(endless(3, 5), prompt=[9999])
    ]:
        assert tiny_engine.alive
        assert failed(alone(tiny_engine, asked), "IndexError")
    assert not tiny_engine.alive
    assert alone(tiny_engine, job("Say OK")).finish == "stop"
    assert tiny_engine.alive
    assert tiny_engine.counts()["running"] == 0


class NeverReady:
    """A constraint whose masks do not come."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()

    def mask(self, output: list[int]) -> NDArray[np.bool_] | None:
        return None

    def fileno(self) -> int:
        return self._ours.fileno()

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class Allows(NeverReady):
    """A constraint with the same mask before every token, and none after so many."""

    def __init__(self, *token_ids: int, n_tokens: int = 1000) -> None:
        self._token_ids = list(token_ids)
        self._n_tokens = n_tokens
        self.is_followed = False  # it holds something

    def mask(self, output: list[int]) -> NDArray[np.bool_] | None:
        self.is_followed = True
        if len(output) == self._n_tokens:
            raise ValueError("a fault made on purpose")
        mask = np.zeros(tiny().config.vocab_size, np.bool_)
        mask[self._token_ids] = True
        return mask

    def close(self) -> None:
        self.is_followed = False


@pytest.mark.parametrize(
    ("constraint", "n_said", "logged"),
    [
        (Allows(7, n_tokens=2), 2, "a fault made on purpose"),
        (Allows(), 0, "expected a token that may come next"),  # before a token is computed
    ],
)
def test_a_constraint_that_gives_up_ends_its_sequence_alone(
    tiny_engine: Engine,
    watch: Watch,
    caplog: pytest.LogCaptureFixture,
    constraint: Allows,
    n_said: int,
    logged: str,
) -> None:
    jobs = [replace(endless(5, 30), constraint=constraint), endless(5, 30)]
    given_up, other = together(tiny_engine, watch, jobs)
    assert failed(given_up, GAVE_UP)
    assert given_up.ids == [7] * n_said
    assert (other.finish, len(other.ids)) == ("length", 30)
    assert logged in caplog.text


def test_a_constraint_is_followed_only_while_its_sequence_runs() -> None:
    """It has a process of its own, of which there may be as many as there are slots."""
    constraints = [Allows(7), Allows(7)]
    jobs = [
        replace(endless(60, 100, first=i), constraint=constraint) for i, constraint in enumerate(constraints)
    ]
    followed = set[tuple[bool, ...]]()
    with started(watch := Watch(), n_pages=3) as engine:
        watched = engine.observer

        def observe(scheduler: Scheduler, *step: Any) -> None:
            watched(scheduler, *step)
            running = [one.constraint for one in scheduler.running]
            followed.add(tuple(one.is_followed for one in constraints if one not in running))

        engine.observer = observe
        assert [len(answer.ids) for answer in together(engine, watch, jobs)] == [100, 100]
        assert engine.counts()["preemptions"] >= 1
    assert not any(one.is_followed for one in constraints)
    assert (False,) in followed
    assert (True,) not in followed


@pytest.mark.parametrize("fails", [False, True])
def test_a_reader_that_wants_no_more_or_fails_ends_its_sequence(
    tiny_engine: Engine, watch: Watch, fails: bool
) -> None:
    taken: list[StepOutput] = []

    def take(step: StepOutput) -> bool:
        taken.append(step)
        if len(taken) == 3 and fails:
            raise LookupError("a fault made on purpose")
        return len(taken) < 3

    asked = tiny_engine.generate(endless(1, 700), take)
    with pytest.raises(LookupError) if fails else nullcontext():
        play(asked, "three tokens")
    alone(tiny_engine, endless(1, 1))
    assert len(taken) == 3
    assert state(tiny_engine)[2] < 100  # steps: a few may have begun before it was aborted


@pytest.mark.parametrize(("n_ahead", "n_taken"), [(0, 5), (1, 3)])
def test_the_next_step_is_launched_before_tokens_are_emitted(
    watch: Watch, n_ahead: int, n_taken: int
) -> None:
    """Else the event loop's work with them takes the interpreter from the launch. While the sixth step is
    launched the fourth has been read, and its token waits; where no step is in flight none waits.
    """
    taken: list[StepOutput] = []

    def take(step: StepOutput) -> bool:
        taken.append(step)
        return True

    async def main(engine: Engine) -> int:
        generating = asyncio.create_task(engine.generate(endless(1, 20), take))
        await watch.held()
        n_taken = len(taken)
        watch.release()
        await generating
        return n_taken

    watch.hold_at = {5}
    with started(watch, n_ahead=n_ahead) as engine:
        assert play(main(engine), "twenty tokens") == n_taken
    assert len(taken) == 20


def test_tokens_are_emitted_in_the_context_of_their_request(tiny_engine: Engine) -> None:
    """The id of the request in the log, and the owner in whose name the store is called."""
    of_request = ContextVar("of_request", default="")
    seen: list[str] = []

    def take(step: StepOutput) -> bool:
        seen.append(of_request.get())
        return True

    async def main() -> None:
        of_request.set("req_1")
        await tiny_engine.generate(endless(1, 3), take)

    play(main(), "three tokens")
    assert seen == ["req_1"] * 3


def test_steps_rarely_wait_for_a_mask_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask can take 0.2 s: each step would wait for it in vain, and all streams with it."""
    waits: list[float] = []

    def counted(fds: list[Any], timeout: float) -> list[Any]:
        waits.append(timeout)
        return connection.wait(fds, timeout)

    monkeypatch.setattr("engine.wait", counted)

    async def main(engine: Engine) -> Answer:
        late = Sequence([5, 6, 7], 30, frozenset(), GREEDY, NeverReady())
        async with aclosing(stepwise(engine, late)) as steps:
            waiting = asyncio.ensure_future(anext(steps))
            while not engine.busy():
                await asyncio.sleep(0)
            waits.clear()
            free = answer(await steps_of(engine, endless(5, 100)))
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        return free

    with started(Watch()) as engine:
        free = play(main(engine), "a hundred tokens")
    assert len(free.tokens) == 100
    assert len(waits) < 5


def test_it_is_busy_from_the_moment_it_is_asked() -> None:
    """Bug: a stop of the server ended what was accepted a moment before, without its grace."""

    async def main(engine: Engine) -> bool:
        asked = asyncio.create_task(engine.generate(endless(5, 1), lambda step: True))
        await asyncio.sleep(0)
        is_busy = engine.busy()
        await asked
        return is_busy

    with started(Watch()) as engine:
        assert play(main(engine), "a token")


class CannotBeWaitedFor(NeverReady):
    """A constraint that fails where it should not."""

    def fileno(self) -> int:
        raise MemoryError("a fault made on purpose")


def test_an_unforeseen_exception_fails_all_and_hangs_none(caplog: pytest.LogCaptureFixture) -> None:
    """The engine's thread died, and everybody waited for ever."""
    asked = Sequence([5, 6, 7, 8] * 20, 30, frozenset(), GREEDY, CannotBeWaitedFor())
    with started(watch := Watch(), speculate=4) as engine:
        assert all(failed(answer, BROKEN) for answer in together(engine, watch, [asked, endless(5, 30)]))
        assert not engine.alive
        assert failed(alone(engine, job("hi")), BROKEN)
    assert "a fault made on purpose" in caplog.text


def test_close_fails_what_runs_what_waits_and_what_comes_later(tiny_engine: Engine, watch: Watch) -> None:
    async def main() -> list[Answer]:
        async with watch.paused(tiny_engine):
            readers = [
                asyncio.create_task(steps_of(tiny_engine, endless(2, 1000))) for _ in range(MAX_BATCH + 3)
            ]
        await asyncio.to_thread(tiny_engine.close)  # as server.py does, while others may still ask
        return [answer(await reader) for reader in readers]

    assert all(failed(answer, CLOSING) for answer in play(main(), "the end of all"))
    assert tiny_engine.counts()["running"] == tiny_engine.counts()["waiting"] == 0
    assert failed(alone(tiny_engine, job("hi")), CLOSING)
    tiny_engine.close()  # once more is harmless
