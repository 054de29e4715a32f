"""Rows of a table whose contenders decode: prompts in, tokens a second out. The engine is one of them.

Row, {contender: Run} --row_cases()--> cases        prompts --generate()--> Speeds of an Engine
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from benches.harness import Case, Figures
from checkpoint.config import Config
from checkpoint.weights import Weights
from engine import Engine, StepOutput
from model import PAGE, NumpyOps
from sampling import Sampling
from scheduler import Sequence

Prompts = list[list[int]]
GREEDY = Sampling(temperature=0)
MAX_BATCH = 8


class Speeds(NamedTuple):
    """Of one run."""

    first_ms: float  # until each sequence has its first token
    prefill: float  # tokens a second
    decode: float  # of all that comes after the first tokens


Run = Callable[[Prompts, int], Speeds]  # (prompts of one length, tokens to say after each)


class Row(NamedTuple):
    name: str
    figure: str  # the name of one of the Speeds
    batch: int
    n_prompt: int
    n_new: int


_numbers = itertools.count()  # of runs: none finds its prompt in a prefix cache


def random_prompts(vocab_size: int, batch: int, n_prompt: int) -> Prompts:
    """Return prompts of random tokens, which no run has had before, and the next benchmark has again."""
    rng = np.random.default_rng(next(_numbers))
    prompts: Prompts = rng.integers(vocab_size, size=(batch, n_prompt)).tolist()
    return prompts


def row_cases(rows: Iterable[Row], runs: Mapping[str, Run], vocab_size: int) -> Iterator[Case]:
    def measure(run: Run, row: Row) -> Figures:
        speeds = run(random_prompts(vocab_size, row.batch, row.n_prompt), row.n_new)
        return {row.name: getattr(speeds, row.figure)}

    for row in rows:
        yield {name: partial(measure, run, row) for name, run in runs.items()}


def speeds(prompts: Prompts, started: float, token_times: list[list[float]]) -> Speeds:
    first = max(times[0] for times in token_times)
    last = max(times[-1] for times in token_times)
    n_decoded = sum(t > first for times in token_times for t in times)
    n_prompt = sum(map(len, prompts))
    return Speeds(1e3 * (first - started), n_prompt / (first - started), n_decoded / max(last - first, 1e-9))


def with_pages(ops: type[NumpyOps], config: Config, weights: Weights, max_seq_len: int) -> NumpyOps:
    """Return ops with pages for all sequences of a batch."""
    return ops(config, weights, max_seq_len, MAX_BATCH * -(-max_seq_len // PAGE), MAX_BATCH)


def generate(engine: Engine, prompts: Prompts, n_new: int, sampling: Sampling = GREEDY) -> Speeds:
    """Engine.generate, as the server calls it, for all prompts together."""

    async def one(prompt: list[int]) -> list[float]:
        times: list[float] = []

        def read(step: StepOutput) -> bool:
            times.extend(time.perf_counter() for _ in step.tokens)
            if step.finish == "failed":
                raise RuntimeError(step.message)
            return True

        await engine.generate(Sequence(prompt, n_new, frozenset(), sampling), read)
        return times

    async def all_of() -> Speeds:
        started = time.perf_counter()
        return speeds(prompts, started, await asyncio.gather(*map(one, prompts)))

    return asyncio.run(all_of())
