"""What all measurements share: rounds, medians and tables, and what the times of answers say.

    [Case, ...] --rounds()--> {row: {contender: median}} --table()--> Markdown

Rules of this file:
1. Contenders take turns in each round: when the machine is busy for a while, it is busy for all of them.
2. The first round warms up, and does not count. The result is the ratio of the medians.
3. Texts are of prose.txt, which never changes: the figures of two commits are of the same texts.

Why not pytest-benchmark: it runs one contender to its end before the next, so a machine that gets busy in
between changes the ratio.

Not here: what is asked.
"""

import argparse
import math
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from itertools import chain, cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

BEGAN_AT = time.monotonic()
FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
GOOD_FIRST_MS = 1000
GOOD_BETWEEN_S = 0.1  # on average
N_WARM = 2  # ticks, while streams are still being opened

Figures = Mapping[str, float]  # by row of the table
Medians = dict[str, dict[str, float]]  # by row, by contender; NaN: not run


class Case(NamedTuple):
    rows: Sequence[str]  # of the table
    contenders: Mapping[str, Any]  # by name
    measure: Callable[[Any], Iterable[float]]  # a contender to its value in each row


def rounds(cases: Sequence[Case], n_rounds: int, end_at: float) -> Medians:
    """Run all cases n_rounds times and once before, as long as there is time, and return the medians."""
    seen = {(row, name): list[float]() for case in cases for row in case.rows for name in case.contenders}
    for number, case in product(range(n_rounds + 1), cases):
        for name, contender in case.contenders.items():
            if time.monotonic() > end_at:
                continue
            for row, value in zip(case.rows, case.measure(contender), strict=False):
                print(f"round {number}/{n_rounds}  {row:40} {name:24} {value:.1f}", file=sys.stderr)
                seen[row, name].append(value)
    medians: Medians = defaultdict(dict)
    for (row, name), values in seen.items():
        medians[row][name] = median(values[1:] or [math.nan])
    return medians


def table(medians: Medians) -> Iterator[str]:
    """Yield each row: its values with three digits, each with the ratio to the first one."""
    contenders = list(dict.fromkeys(chain(*medians.values())))
    yield f"| median (ratio to the first) | {' | '.join(contenders)} |"
    yield "|---" * (1 + len(contenders)) + "|"
    for row, values in medians.items():
        first = next(iter(values.values())) or math.nan
        cells = {name: f"{value:#.3g} ({value / first:.2f})" for name, value in values.items()}
        line = f"| {row} | {' | '.join(cells.get(name, '') for name in contenders)} |"
        yield line.replace("nan (nan)", "not run")


def report(args: argparse.Namespace, about: str, cases: Sequence[Case]) -> None:
    """Measure, and print the table, with what was measured, when, where and of which commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    end_at = BEGAN_AT + 60 * getattr(args, "minutes", math.inf)
    lines = table(rounds(cases, args.repeat, end_at))
    page = "\n".join([f"{date.today()}, commit {commit.stdout.strip()}, {machine}.", about, "", *lines])
    print(page)
    if file := getattr(args, "file", ""):
        Path(file).write_text(f"{page}\n", encoding="utf-8")


class Answer(NamedTuple):
    """When the pieces of an answer came: by time.monotonic(), which all processes of a machine share."""

    asked_at: float
    times: list[float]  # of its texts, or of its tokens
    n_events: int


def figures(answers: list[Answer], wall_s: float = 1, cpu_s: float = 0, kb: float = 0) -> Figures:
    """Return all that can be said of some answers; a row picks what it is about.

    Tokens a second are counted from the first of any answer to the last of all. A delta is late by the time
    since the tick of all streams.
    """
    times = [time for answer in answers for time in answer.times]
    start, end = min(times), max(times)
    n_later = sum(time > start for time in times)
    waits_ms = [1e3 * (answer.times[0] - answer.asked_at) for answer in answers]
    n_good = 0
    for wait_ms, (_, own, _n) in zip(waits_ms, answers, strict=True):
        n_good += wait_ms < GOOD_FIRST_MS and own[-1] - own[0] < GOOD_BETWEEN_S * len(own)
    late_ms = sorted(1e3 * time % 1e3 for answer in answers for time in answer.times[N_WARM:]) or [0.0]
    n_events = sum(answer.n_events for answer in answers)
    return {
        "first text, ms": median(waits_ms),
        "last first text, ms": max(waits_ms),
        "tokens/s": n_later and n_later / (end - start),
        "good answers/s": n_good / wall_s,
        "events/s": n_events / wall_s,
        "CPU µs an event": 1e6 * cpu_s / n_events,
        "CPU ms a stream": 1e3 * cpu_s / len(answers),  # of streams of one token the price of a request
        "median late, ms": median(late_ms),
        "p99 late, ms": late_ms[len(late_ms) * 99 // 100],
        "kB a stream": kb / len(answers),  # in a process that has had none before
        "% of a core": 100 * cpu_s / wall_s,
    }


def prose(n_characters: int) -> str:
    """Return the beginning of the text that all texts are of, repeated if it is too short."""
    text = (FOLDER / "prose.txt").read_text(encoding="utf-8")
    return "".join(islice(cycle(text), n_characters))
