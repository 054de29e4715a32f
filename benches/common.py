"""What the measurements share: prompts, the engine as a contender, the machine, the report.

Not here: anything that is measured.
"""

import argparse
import asyncio
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from checkpoint.config import Config
from checkpoint.weights import Weights
from engine import Engine, StepOutput
from model import PAGE, NumpyOps
from sampling import Sampling
from scheduler import Sequence
from tokenizer import Tokenizer

Prompts = list[list[int]]
GREEDY = Sampling(temperature=0)
MAX_BATCH = 8


class Speeds(NamedTuple):
    """Of one run: tokens a second, and what was said first."""

    prefill: float
    decode: float
    said: list[int]  # by the first sequence


Run = Callable[[Prompts, int], Speeds]  # (prompts of one length, tokens to say after each)


def speeds(prompts: Prompts, started: float, token_times: list[list[float]], said: list[int]) -> Speeds:
    """Prefill lasts until each sequence has its first token; decoding is all that comes after it."""
    first, last = max(times[0] for times in token_times), max(times[-1] for times in token_times)
    n_decoded = sum(t > first for times in token_times for t in times)
    n_prompt = sum(map(len, prompts))
    return Speeds(n_prompt / (first - started), n_decoded / max(last - first, 1e-9), said)


def with_pages(ops: type[NumpyOps], config: Config, weights: Weights, max_seq_len: int) -> NumpyOps:
    """With pages for all sequences of a batch."""
    return ops(config, weights, max_seq_len, MAX_BATCH * -(-max_seq_len // PAGE), MAX_BATCH)


def engine_run(engine: Engine, sampling: Sampling = GREEDY) -> Run:
    """Engine.generate, as the server calls it."""

    async def one(prompt: list[int], n_new: int) -> list[tuple[float, int]]:
        said = list[tuple[float, int]]()

        def take(step: StepOutput) -> bool:
            said.extend((time.perf_counter(), token.token_id) for token in step.tokens)
            if step.finish == "failed":
                raise RuntimeError(step.message)
            return True

        await engine.generate(Sequence(prompt, n_new, frozenset(), sampling), take)
        return said

    async def all_of(prompts: Prompts, n_new: int) -> Speeds:
        started = time.perf_counter()
        tokens = await asyncio.gather(*(one(prompt, n_new) for prompt in prompts))
        times = [[t for t, _ in sequence] for sequence in tokens]
        return speeds(prompts, started, times, [token_id for _, token_id in tokens[0]])

    return lambda prompts, n_new: asyncio.run(all_of(prompts, n_new))


def prompts(tokenizer: Tokenizer, batch: int, n_prompt: int, number: int = 0) -> Prompts:
    """Pieces of the README's prose; those of each number begin with another token, so none is in a cache."""
    prose = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    token_ids = tokenizer.encode(prose * (1 + batch * n_prompt // 1024))
    return [[number, *token_ids[i * n_prompt + 1 : (i + 1) * n_prompt]] for i in range(batch)]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def resident_mb(pid: int | str = "self") -> float:
    """Of a process; 0 where /proc does not say."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1e3


def write(lines: Iterable[str], out: Path | None) -> None:
    """To stdout, and to a file where one is named."""
    report = "\n".join(lines)
    print(report, end="")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report, encoding="utf-8")


def model_option(add: argparse.ArgumentParser) -> None:
    add.add_argument("--model", metavar="DIR|ID", help="as of server.py; without it, the default model")


def repeat_option(add: argparse.ArgumentParser) -> None:
    add.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default: 5)")
