"""engine.py with the tiny model: how a sequence ends, and who waits for what."""

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import connection
from typing import Any

import numpy as np
import pytest

from engine import BROKEN, CLOSING, GAVE_UP, Engine, StepOutput
from helpers import engines
from helpers.engines import Answer, WatchedEngine, alone, answer, endless, play, started, steps_of
from sampling import Choice, Sampling
from scheduler import Mask, Scheduler


@pytest.fixture
def engine() -> Iterator[WatchedEngine]:
    with started() as running:
        yield running


# ---- Who leaves, and who runs when -------------------------------------------------------------------------


def test_a_reader_that_fails_ends_its_sequence_alone(engine: WatchedEngine) -> None:
    """Another one, which is fed after it, misses nothing."""
    fed: list[StepOutput] = []

    def feed(step: StepOutput) -> bool:
        fed.append(step)
        if len(fed) == 3:
            raise LookupError("a fault made on purpose")
        return True

    async def both() -> Answer:
        async with engine.paused():
            first = asyncio.create_task(engine.generate(endless(1, 700), feed))
            await asyncio.sleep(0)
            second = asyncio.create_task(steps_of(engine, endless(1, 30)))
        with pytest.raises(LookupError):
            await first
        return answer(await second)

    assert len(play(both()).ids) == 30
    alone(engine, endless(1, 1))
    assert len(fed) == 3
    assert engine.counts()["steps"] < 100  # a few may have begun before it was aborted


def test_a_step_with_decoding_sequences_takes_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a row takes 5 ms, and a step 20 ms more: 12 rows in 80 ms."""
    with started(step_s=0.08) as engine:
        monkeypatch.setattr(
            "time.perf_counter", lambda: sum(0.02 + 0.005 * sum(rows) for rows in engine.steps)
        )
        engine.together([endless(1, 60), endless(300, 1)])
    n_rows = [sum(rows) for rows in engine.steps if len(rows) == 2]
    assert sum(n_rows) - len(n_rows) >= 300
    durations = [0.02 + 0.005 * n for n in n_rows]
    assert max(durations[4:]) < 0.085
    assert min(durations[4:-1]) > 0.06


@pytest.mark.parametrize(("n_ahead", "n_fed"), [(0, 5), (1, 3)])
def test_the_next_step_is_launched_before_tokens_are_fed(n_ahead: int, n_fed: int) -> None:
    """Else the event loop's work with them takes the interpreter from the launch. While the sixth step is
    launched the fourth has been read, and its token waits; if no step is in flight none waits.
    """
    fed: list[Choice] = []

    def feed(step: StepOutput) -> bool:
        fed.extend(step.tokens)
        return True

    async def main(engine: WatchedEngine) -> None:
        generating = asyncio.create_task(engine.generate(endless(1, 20), feed))
        await engine.held()
        assert len(fed) == n_fed
        engine.release()
        await generating

    with started(n_ahead=n_ahead) as engine:
        engine.hold_at = {5}
        play(main(engine))
    assert len(fed) == 20


# ---- Constraints -------------------------------------------------------------------------------------------


class Allows:
    """A constraint with the same mask before every token, and none after so many."""

    def __init__(self, *token_ids: int, n_tokens: int = 1000) -> None:
        self._mask = np.isin(np.arange(engines.tiny().config.vocab_size), token_ids)
        self._n_tokens = n_tokens
        self.is_followed = False  # it holds something

    def mask(self, output: list[int]) -> Mask | None:
        self.is_followed = True
        if len(output) == self._n_tokens:
            raise ValueError("a fault made on purpose")
        return self._mask

    def fileno(self) -> int:
        raise MemoryError("a fault made on purpose")

    def close(self) -> None:
        self.is_followed = False


class NeverReady(Allows):
    """A constraint whose masks do not come; without sockets it cannot even be waited for."""

    def __init__(self, *sockets: socket.socket) -> None:
        super().__init__()
        self._sockets = sockets

    def mask(self, output: list[int]) -> Mask | None:
        return None

    def fileno(self) -> int:
        return self._sockets[0].fileno() if self._sockets else super().fileno()

    def close(self) -> None:
        for one in self._sockets:
            one.close()


@pytest.mark.parametrize(
    ("constraint", "n_said", "logged"),
    [
        (Allows(7, n_tokens=2), 2, "a fault made on purpose"),
        (Allows(), 0, "expected a token that may come next"),  # before a token is computed
    ],
)
def test_a_constraint_that_gives_up_ends_its_sequence_alone(
    engine: WatchedEngine, caplog: pytest.LogCaptureFixture, constraint: Allows, n_said: int, logged: str
) -> None:
    given_up, other = engine.together([replace(endless(5, 30), constraint=constraint), endless(5, 30)])
    assert given_up.failed(GAVE_UP)
    assert given_up.ids == [7] * n_said
    assert (other.finish, len(other.ids)) == ("length", 30)
    assert logged in caplog.text


def test_a_constraint_is_followed_only_while_its_sequence_runs() -> None:
    """It has a process of its own, of which there may be as many as there are slots."""
    constraints = [Allows(7), Allows(7)]
    jobs = [replace(endless(60, 100, first=i), constraint=one) for i, one in enumerate(constraints)]
    followed = set[tuple[bool, ...]]()

    def observe(scheduler: Scheduler, *_: Any) -> None:
        running = [one.constraint for one in scheduler.running]
        followed.add(tuple(one.is_followed for one in constraints if one not in running))

    with started(n_pages=3) as engine:
        engine.observer = observe
        assert [len(answer.ids) for answer in engine.together(jobs)] == [100, 100]
        assert engine.counts()["preemptions"] >= 1
    assert not any(one.is_followed for one in constraints)
    assert (False,) in followed
    assert (True,) not in followed


def test_steps_rarely_wait_for_a_late_mask(engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask can take 0.2 s: each step would wait for it in vain, and all streams with it."""
    waits: list[float] = []

    def counted(fds: list[Any], timeout: float) -> list[Any]:
        waits.append(timeout)
        return connection.wait(fds, timeout)

    async def main() -> Answer:
        late = replace(endless(3, 30), constraint=NeverReady(*socket.socketpair()))
        waiting = asyncio.create_task(steps_of(engine, late))
        await asyncio.sleep(0)
        free = answer(await steps_of(engine, endless(5, 100)))
        waiting.cancel()
        await asyncio.wait([waiting])
        return free

    monkeypatch.setattr("engine.wait", counted)
    assert len(play(main()).tokens) == 100
    assert len(waits) < 50


# ---- Failures ----------------------------------------------------------------------------------------------


def test_an_engine_whose_steps_all_fail_is_not_alive(engine: Engine) -> None:
    """Three requests that cannot be served, of which worker.py lets none through; the next one works."""
    out_of_vocabulary = Sampling(logit_bias={9999: 1})
    biased = replace(endless(3, 5), sampling=out_of_vocabulary)
    for asked in (biased, biased, replace(endless(3, 5), prompt=[9999])):
        assert engine.alive
        assert alone(engine, asked).failed("IndexError")
    assert not engine.alive
    assert alone(engine, endless(3, 5)).finish == "length"
    assert engine.alive


def test_an_unforeseen_exception_fails_all_and_hangs_none(caplog: pytest.LogCaptureFixture) -> None:
    """The engine's thread died, and everybody waited for ever."""
    asked = replace(endless(80, 30), constraint=NeverReady())
    with started(speculate=4) as engine:
        assert all(answer.failed(BROKEN) for answer in engine.together([asked, endless(5, 30)]))
        assert not engine.alive
        assert alone(engine, endless(3, 5)).failed(BROKEN)
    assert "a fault made on purpose" in caplog.text


def test_close_fails_what_runs_what_waits_and_what_comes_later(engine: WatchedEngine) -> None:
    async def main() -> list[Answer]:
        jobs = [endless(2, 1000)] * (engines.MAX_BATCH + 3)
        async with engine.paused():
            readers = [asyncio.create_task(steps_of(engine, job)) for job in jobs]
        await asyncio.to_thread(engine.close)  # as server.py does, while others may still ask
        return [answer(await reader) for reader in readers]

    assert all(answer.failed(CLOSING) for answer in play(main()))
    counts = engine.counts()
    assert (counts["running"], counts["waiting"]) == (0, 0)
    assert alone(engine, endless(3, 5)).failed(CLOSING)
    engine.close()  # once more is harmless
