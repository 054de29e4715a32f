"""What all measurements share: rounds, medians and tables; servers that run while they are measured.

    [(contenders, measure), ...] --rounds()--> {row: {contender: median}} --table()--> Markdown

Rules of this file:
1. Contenders take turns in each round: when the machine is busy for a while, it is busy for all of them.
2. The first round warms up, and does not count. The result is the ratio of the medians.
3. Texts are of prose.txt, which never changes: the figures of two commits are of the same texts.

Why not pytest-benchmark: it runs one contender to its end before the next, so a machine that gets busy in
between changes the ratio.

Not here: anything that is measured.
"""

import argparse
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from socket import create_server
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urljoin

import httpx2 as httpx

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"

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
    """Yield each row: its values with three digits, each with the ratio to the first one."""
    contenders = list(dict.fromkeys(name for row in medians.values() for name in row))
    yield f"| median (ratio to the first) | {' | '.join(contenders)} |"
    yield "|---" * (1 + len(contenders)) + "|"
    for row, values in medians.items():
        first = next(iter(values.values())) or float("nan")
        cells = dict.fromkeys(contenders, "")
        for name, value in values.items():
            cells[name] = f"{value:#.3g} ({value / first:.2f})"
        yield f"| {row} | {' | '.join(cells.values())} |"


def report(args: argparse.Namespace, about: str, cases: Sequence[Case]) -> None:
    """Measure, and print the table, with what was measured, when, where and of which commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{date.today()}, commit {commit.stdout.strip()}, {machine}.\n{about}\n")
    print(*table(rounds(cases, args.repeat)), sep="\n")


def prose(n_characters: int) -> str:
    """Return the beginning of the text that all texts are of, repeated if it is too short."""
    text = (FOLDER / "prose.txt").read_text(encoding="utf-8")
    return (text * (1 + n_characters // len(text)))[:n_characters]


# --- servers ------------------------------------------------------------------------------------------------


class Server(NamedTuple):
    url: str  # of its endpoint
    model: str
    pid: int = 0  # 0: we have not started it

    def used_s(self) -> float:
        """Return the seconds of processors that the process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_kb(self) -> int:
        """Return the most memory that the process has had."""
        return int(Path(f"/proc/{self.pid}/status").read_text().split("VmHWM:")[1].split()[0])


def running(url: str) -> Server:
    """Return the server that has this endpoint; raises httpx.HTTPError."""
    models = httpx.get(urljoin(url, "/v1/models"), trust_env=False).raise_for_status().json()
    return Server(url, models["data"][0]["id"])


@contextmanager
def started(command: str, path: str) -> Iterator[Server]:
    """Run a server, ours or another, until the block ends. In its command PORT is for the port."""
    with create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = shlex.split(command.replace("PORT", port))
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                with suppress(httpx.HTTPError):
                    yield running(f"http://127.0.0.1:{port}{path}")._replace(pid=process.pid)
                    return
                time.sleep(0.1)
            raise SystemExit(f"{command}: it has ended before it could answer")
        finally:
            process.terminate()
