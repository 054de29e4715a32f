"""What all measurements share: rounds, medians and tables; processes.

    [(contenders, measure), ...] --rounds()--> {row: {contender: median}} --table()--> Markdown

Rules of this file:
1. Contenders take turns in each round: when the machine is busy for a while, it is busy for all of them.
2. The first round warms up, and does not count. The result is the ratio of the medians.
3. Texts are of prose.txt, which stays as it is: figures of two commits are of the same texts.

Not here: anything that is measured.
"""

import argparse
import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent

Figures = Mapping[str, float]  # by row of the table
Case = tuple[Mapping[str, Any], Callable[[Any], Figures]]  # contenders by name, and what measures one of them
Medians = dict[str, dict[str, float]]  # by row, by contender
Options = dict[str, tuple[Any, str]]  # the default of each, and what it is
Commands = dict[str, tuple[Callable[[argparse.Namespace], None], Options]]


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
        first, *others = values.values()
        cells = dict.fromkeys(contenders, "")
        for name, value in values.items():
            cells[name] = f"{value:.{max(0, 3 - len(f'{value:.0f}'))}f}"
            if first and others:
                cells[name] += f" ({value / first:.2f})"
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


# --- processes ----------------------------------------------------------------------------------------------


class Running(NamedTuple):
    url: str
    pid: int

    def used_s(self) -> float:
        """Return the seconds of processors that the process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_kb(self) -> float:
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1024


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
