"""Rounds, medians and tables, for all measurements.

    [{contender: measure()}, ...] --rounds()--> {row: {contender: median}} --table()--> Markdown

Rules of this file:
1. Contenders take turns in each round: when the machine is busy for a while, it is busy for all of them.
2. The first round warms up, and does not count. The result is the ratio of the medians.
3. Texts are of prose.txt, which stays as it is: figures of two commits are of the same texts.

Not here: anything that is measured.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent

Figures = Mapping[str, float]  # by row of the table
Case = Mapping[str, Callable[[], Figures]]  # what is measured together: by contender
Medians = dict[str, dict[str, float]]  # by row, by contender


def rounds(cases: Sequence[Case], n_rounds: int) -> Medians:
    """Run all cases n_rounds times and once before, and return the medians."""
    seen: dict[str, dict[str, list[float]]] = {}
    for number in range(n_rounds + 1):
        for case in cases:
            for contender, measure in case.items():
                for row, value in measure().items():
                    print(f"round {number}/{n_rounds}  {row:40} {contender:24} {value:.1f}", file=sys.stderr)
                    values = seen.setdefault(row, {}).setdefault(contender, [])
                    if number > 0:
                        values.append(value)
    medians: Medians = {}
    for row, of_contenders in seen.items():
        medians[row] = {contender: median(values) for contender, values in of_contenders.items()}
    return medians


def table(medians: Medians) -> Iterator[str]:
    """Each value, with its ratio to the first one of the row."""
    contenders = list(dict.fromkeys(name for row in medians.values() for name in row))
    yield f"| median (ratio to the first) | {' | '.join(contenders)} |"
    yield "|---" * (1 + len(contenders)) + "|"
    for row, values in medians.items():
        first = next(iter(values))
        cells = dict.fromkeys(contenders, "")
        for contender, value in values.items():
            cells[contender] = shown(value)
            if contender != first and values[first]:
                cells[contender] += f" ({value / values[first]:.2f})"
        yield f"| {row} | {' | '.join(cells.values())} |"
    yield ""


def shown(value: float) -> str:
    """Three digits at least."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def about(what: str) -> str:
    """What was measured, when, where and of which commit: without it no figure means anything."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = asked.stdout.strip() or "unknown"
    machine = f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{date.today()}, commit {commit}, {machine}.\n{what}\n"


def report(args: argparse.Namespace, what: str, cases: Sequence[Case]) -> None:
    """Run the cases, and write the table."""
    medians = rounds(cases, args.repeat)
    write([about(what), *table(medians)], args.out)


def write(lines: Iterable[str], out: Path | None) -> None:
    """Write lines to stdout, and to a file if one is named."""
    text = "\n".join(lines)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.processor() or platform.machine()


def prose(n_characters: int) -> str:
    """The text that all texts are pieces of, over and over if it is too short."""
    text = (FOLDER / "prose.txt").read_text(encoding="utf-8")
    return (text * (1 + n_characters // len(text)))[:n_characters]


def model_option(add: argparse.ArgumentParser) -> None:
    add.add_argument("--model", metavar="DIR|ID", help="as of server.py; without it, the default model")


def number_option(add: argparse.ArgumentParser, name: str, default: int, about: str) -> None:
    add.add_argument(name, type=int, default=default, metavar="N", help=f"{about} (default: {default})")
