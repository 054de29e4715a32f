"""Mutants: what keeps a bug out is undone, one place at a time, and the test that replays it must fail.

    python tests/mutants.py [WORD]     all of tests/mutants.toml, or those with this word in them

In a copy of the checkout; exits 1 if one survives, or its test cannot be run.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "results", "*.egg-info", "build")
# Exit statuses of pytest: 1 is "Tests were collected and run but some of the tests failed".
KILLED, SURVIVED = 1, 0
VERDICTS = {KILLED: "killed", SURVIVED: "SURVIVED"}
PATIENCE_S = 120  # a mutant that hangs is one whose test does not fail in time: not killed


class Mutant(NamedTuple):
    module: str
    undoes: str
    old: str
    new: str
    test: str

    def __str__(self) -> str:
        return f"{self.module}.py: {self.undoes}: {self.test}"


def mutants() -> Iterator[Mutant]:
    rows = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf-8"))
    for module, changes in rows.items():
        yield from (Mutant(module, **change) for change in changes)


def mutated(mutant: Mutant) -> str:
    """The module's text; raises ValueError where `old` does not stand there once."""
    text = (ROOT / f"{mutant.module}.py").read_text(encoding="utf-8")
    if text.count(mutant.old) != 1 or mutant.new == mutant.old:
        raise ValueError(
            f"expected this once, got it {text.count(mutant.old)} times: {mutant}: {mutant.old!r}"
        )
    return text.replace(mutant.old, mutant.new)


def copied(folder: Path) -> Path:
    return shutil.copytree(ROOT, folder / "copy", ignore=LEFT_OUT)


def status(mutant: Mutant, copy: Path) -> int:
    """How pytest ends; the copy is as it was before."""
    path = copy / f"{mutant.module}.py"
    before = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutant), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant.test]
        unwritten = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # bytecode is found by time and size
        ended = subprocess.run(command, cwd=copy, env=unwritten, capture_output=True, timeout=PATIENCE_S)
        return ended.returncode
    except subprocess.TimeoutExpired:
        return SURVIVED
    finally:
        path.write_text(before, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Undo what keeps bugs out, and see that tests fail.")
    parser.add_argument("word", nargs="?", default="", help="only those with this word in them")
    word = parser.parse_args().word
    chosen = [mutant for mutant in mutants() if word in str(mutant)]
    started = time.monotonic()
    n_killed = 0
    with TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for mutant in chosen:
            ended = status(mutant, copy)
            if ended == KILLED:
                n_killed += 1
            verdict = VERDICTS.get(ended, f"NOT RUN (pytest ended with {ended})")
            print(f"{verdict:8} {mutant}", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = f"{time.monotonic() - started:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processor time"
    print(f"{n_killed} of {len(chosen)} mutants killed in {seconds}")
    return int(n_killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
