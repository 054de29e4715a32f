"""What all measurements share: rounds, medians and tables; processes; runs that decode.

    [(contenders, measure), ...] --rounds()--> {row: {contender: median}} --table()--> Markdown
    prompts --generate()--> when each token came --speed()--> tokens a second

Rules of this file:
1. Contenders take turns in each round: when the machine is busy for a while, it is busy for all of them.
2. The first round warms up, and does not count. The result is the ratio of the medians.
3. Texts are of prose.txt, which stays as it is: figures of two commits are of the same texts.

Not here: anything that is measured.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import scheduler
from engine import Engine, StepOutput
from sampling import Sampling

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
GREEDY = Sampling(temperature=0)

Figures = Mapping[str, float]  # by row of the table
Case = tuple[Mapping[str, Any], Callable[[Any], Figures]]  # contenders by name, and what measures one of them
Medians = dict[str, dict[str, float]]  # by row, by contender


def rounds(cases: Sequence[Case], n_rounds: int) -> Medians:
    """Run all cases n_rounds times and once before, and return the medians."""
    seen: dict[str, dict[str, list[float]]] = {}
    for number in range(n_rounds + 1):
        for contenders, measure in cases:
            for name, contender in contenders.items():
                for row, value in measure(contender).items():
                    print(f"round {number}/{n_rounds}  {row:40} {name:24} {value:.1f}", file=sys.stderr)
                    seen.setdefault(row, {}).setdefault(name, []).append(value)
    return {
        row: {name: median(values[1:]) for name, values in by_name.items()} for row, by_name in seen.items()
    }


def table(medians: Medians) -> Iterator[str]:
    """Yield each row: its values, each with the ratio to the first one."""
    contenders = list(dict.fromkeys(name for row in medians.values() for name in row))
    yield f"| median (ratio to the first) | {' | '.join(contenders)} |"
    yield "|---" * (1 + len(contenders)) + "|"
    for row, values in medians.items():
        first = next(iter(values.values()))
        cells = dict.fromkeys(contenders, "")
        for name, value in values.items():
            digits = max(0, 3 - len(f"{value:.0f}"))
            cells[name] = f"{value:.{digits}f}" + (
                f" ({value / first:.2f})" if first and len(values) > 1 else ""
            )
        yield f"| {row} | {' | '.join(cells.values())} |"
    yield ""


def report(args: argparse.Namespace, about: str, cases: Iterable[Case]) -> None:
    """Measure, and write the table, with what was measured, when, where and of which commit."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    cpu = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores"
    when = f"{date.today()}, commit {asked.stdout.strip()}, {machine}, Python {platform.python_version()}."
    text = "\n".join([f"{when}\n{about}\n", *table(rounds(list(cases), args.repeat))])
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


def prose(n_characters: int) -> str:
    """Return a piece of the text that all texts are of, which is repeated if it is too short."""
    text = (FOLDER / "prose.txt").read_text(encoding="utf-8")
    return (text * (1 + n_characters // len(text)))[:n_characters]


def number_option(add: argparse.ArgumentParser, name: str, default: int | list[int], about: str) -> None:
    nargs = "+" if isinstance(default, list) else None
    add.add_argument(name, type=int, nargs=nargs, default=default, metavar="N", help=about)


# --- processes ----------------------------------------------------------------------------------------------


class Running(NamedTuple):
    url: str
    pid: int


@contextlib.contextmanager
def started(*words: str) -> Iterator[Running]:
    """Run a Python process of this checkout until the block ends; it announces its URL."""
    command = [sys.executable, *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            url = next(line.split()[1] for line in process.stdout if line.startswith("listening"))
            yield Running(url, process.pid)
        finally:
            process.kill()


# --- runs that decode ---------------------------------------------------------------------------------------

Prompts = list[list[int]]
TokenTimes = list[list[float]]  # of each sequence: seconds from the question to each of its tokens
Run = Callable[[Prompts, int], TokenTimes]  # (prompts of one length, tokens to say after each)
N_WORDS = 512  # tokens that every vocabulary has

_numbers = itertools.count()  # of runs: none finds its prompt in a prefix cache


class Row(NamedTuple):
    name: str
    batch: int
    n_prompt: int
    n_new: int  # 1: the row is about the prompt


def random_prompts(batch: int, n_prompt: int) -> Prompts:
    """Return prompts of random tokens, which no run has had before, and the next benchmark has again."""
    rng = np.random.default_rng(next(_numbers))
    prompts: Prompts = rng.integers(N_WORDS, size=(batch, n_prompt)).tolist()
    return prompts


def speed(run: Run, row: Row) -> Figures:
    """Return tokens a second: of the prompts if one token is said, else of all after the first ones."""
    token_times = run(random_prompts(row.batch, row.n_prompt), row.n_new)
    first_s = max(times[0] for times in token_times)
    if row.n_new == 1:
        return {row.name: row.batch * row.n_prompt / first_s}
    last_s = max(times[-1] for times in token_times)
    n_decoded = sum(s > first_s for times in token_times for s in times)
    return {row.name: n_decoded / max(last_s - first_s, 1e-9)}


def generate(engine: Engine, prompts: Prompts, n_new: int) -> TokenTimes:
    """Ask the engine for all answers together, as the server does."""

    async def one(prompt: list[int]) -> list[float]:
        times: list[float] = []

        def read(step: StepOutput) -> bool:
            times.extend(time.perf_counter() - began for _ in step.tokens)
            if step.finish == "failed":
                raise RuntimeError(step.message)
            return True

        await engine.generate(scheduler.Sequence(prompt, n_new, frozenset(), GREEDY), read)
        return times

    async def all_of() -> TokenTimes:
        return await asyncio.gather(*map(one, prompts))

    began = time.perf_counter()
    return asyncio.run(all_of())
