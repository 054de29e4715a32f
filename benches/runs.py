"""The engine as a contender: prompts in, tokens a second out."""

import asyncio
import time
from typing import NamedTuple

import numpy as np

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

    first_s: float  # until each sequence has its first token
    prefill: float  # tokens a second
    decode: float  # of all that comes after the first tokens
    said: list[int]  # by the first sequence


def speeds(prompts: Prompts, started: float, token_times: list[list[float]], said: list[int]) -> Speeds:
    first = max(times[0] for times in token_times)
    last = max(times[-1] for times in token_times)
    n_decoded = sum(t > first for times in token_times for t in times)
    n_prompt = sum(map(len, prompts))
    return Speeds(first - started, n_prompt / (first - started), n_decoded / max(last - first, 1e-9), said)


def random_prompts(vocab_size: int, batch: int, n_prompt: int, number: int) -> Prompts:
    """The same for the same number."""
    rng = np.random.default_rng(number)
    prompts: Prompts = rng.integers(vocab_size, size=(batch, n_prompt)).tolist()
    return prompts


def with_pages(ops: type[NumpyOps], config: Config, weights: Weights, max_seq_len: int) -> NumpyOps:
    """With pages for all sequences of a batch."""
    return ops(config, weights, max_seq_len, MAX_BATCH * -(-max_seq_len // PAGE), MAX_BATCH)


def generate(engine: Engine, prompts: Prompts, n_new: int, sampling: Sampling = GREEDY) -> Speeds:
    """Engine.generate, as the server calls it, for all prompts together."""

    async def one(prompt: list[int]) -> list[tuple[float, int]]:
        said: list[tuple[float, int]] = []

        def take(step: StepOutput) -> bool:
            said.extend((time.perf_counter(), token.token_id) for token in step.tokens)
            if step.finish == "failed":
                raise RuntimeError(step.message)
            return True

        await engine.generate(Sequence(prompt, n_new, frozenset(), sampling), take)
        return said

    async def all_of() -> Speeds:
        started = time.perf_counter()
        sequences = await asyncio.gather(*(one(prompt) for prompt in prompts))
        times = [[t for t, _ in sequence] for sequence in sequences]
        return speeds(prompts, started, times, [token_id for _, token_id in sequences[0]])

    return asyncio.run(all_of())
