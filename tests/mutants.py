"""Mutants: undo what keeps a bug out, one place at a time, and check that a test notices.

    python tests/mutants.py                          all of tests/mutants.toml
    python tests/mutants.py D01 F01 "no usage"       those with one of these words in them
    python tests/mutants.py --module sse,channels    those of these modules; words narrow them down
    python tests/mutants.py -n 4                     four at a time

Each mutant is made in a copy of the checkout, and its test is run there, with its sweep. The test must fail.
If it is a replay (tests/replays/), the mutated program must yield exactly the replay's `was`: then this bug
came back, and not another. Exits with 1 if a mutant is not killed; the last lines name these mutants.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
MORE = {"EXAMPLES": "100", "PATIENCE_S": "30"}
MORE["PYTHONDONTWRITEBYTECODE"] = "1"  # Python finds bytecode by time and size
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "results", "*.egg-info", "build", "course-work")
REPLAY = "tests/test_replays.py::test_replay["
YIELDS_WAS = {"REPLAYS_YIELD": "was"}  # test_replays.py compares with `was` if this is in the environment
# Exit statuses of pytest: 1 is "Tests were collected and run but some of the tests failed".
ALL_PASSED, SOME_FAILED = 0, 1
PATIENCE_S = 300  # a mutant whose test takes longer is not killed

KILLED = "killed"
SURVIVED = "SURVIVED"
ANOTHER_BUG = "ANOTHER BUG"


class Mutant(NamedTuple):
    module: str
    undoes: str
    old: str
    new: str
    test: str = ""  # "": explore.py or simulate.py finds it
    unseen: str = ""  # why no run of simulate.py can find it

    def __str__(self) -> str:
        return f"{self.file}: {self.undoes}: {self.test}"

    @property
    def file(self) -> str:
        return self.module if self.module.endswith(".cu") else f"{self.module}.py"


def mutants(file: str = "mutants.toml") -> Iterator[Mutant]:
    rows = tomllib.loads((ROOT / "tests" / file).read_text(encoding="utf-8"))
    for module, changes in rows.items():
        yield from (Mutant(module, **change) for change in changes)


def mutated(mutant: Mutant) -> str:
    """Return the module's text with the change; raises ValueError unless `old` stands there once."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    n_found = text.count(mutant.old)
    if n_found != 1 or mutant.new == mutant.old:
        raise ValueError(f"expected this once, got it {n_found} times: {mutant}: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def taken_out(module: str, name: str, test: str) -> Mutant:
    """Return the change that takes the body of a function out of its module, except its docstring."""
    undoes = f"{name}() has been taken out: write it again, as its docstring says."
    if module.endswith(".cu"):
        text = (ROOT / module).read_text(encoding="utf-8")
        found = re.search(rf"\b{name}\([^{{]*\) {{\n(.*?)^}}", text, re.MULTILINE | re.DOTALL)
        assert found
        body = "  return 0;  // write it again\n" if f"float {name}(" in text else "  // write it again\n"
        undoes = undoes.replace("docstring says", "comment says")
        return Mutant(module, undoes, found[0], found[0].replace(found[1], body), test)
    text = (ROOT / f"{module}.py").read_text(encoding="utf-8")
    (function,) = (node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") == name)
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    first = function.body[1]  # after the docstring
    old = "\n".join(text.splitlines()[first.lineno - 1 : function.end_lineno])
    new = " " * first.col_offset + 'raise NotImplementedError("write it again")'
    return Mutant(module, undoes, old, new, test)


def copied(folder: Path) -> Path:
    return shutil.copytree(ROOT, folder / "copy", ignore=LEFT_OUT)


def outcome(mutant: Mutant) -> tuple[str, str]:
    """Run the mutant's test in a copy of the checkout.

    Returns KILLED or why it is not, and what pytest said about that.
    """
    environment = os.environ | MORE
    is_replay = mutant.test.startswith(REPLAY)
    if is_replay:
        environment |= YIELDS_WAS
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", mutant.test]
    with TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        more: Any = {"cwd": copy, "env": environment, "capture_output": True, "text": True}
        try:
            (copy / mutant.file).write_text(mutated(mutant), encoding="utf-8")
            ended = subprocess.run(command, timeout=PATIENCE_S, **more)
        except ValueError as error:
            return "CANNOT BE MADE", str(error)
        except subprocess.TimeoutExpired:
            return f"NOT IN {PATIENCE_S} S", ""
    if ended.returncode not in (ALL_PASSED, SOME_FAILED):
        return f"NOT RUN (pytest ended with {ended.returncode})", ended.stdout + ended.stderr
    if ended.returncode == (ALL_PASSED if is_replay else SOME_FAILED):
        return KILLED, ""
    failure = "\n".join(line for line in ended.stdout.splitlines() if line.startswith("E  "))
    return SURVIVED if not is_replay or SURVIVED in failure else ANOTHER_BUG, failure


def main() -> int:
    parser = argparse.ArgumentParser(description="Undo what keeps bugs out, and see that they are noticed.")
    parser.add_argument("words", nargs="*", default=[""], help="run only mutants with one of these in them")
    parser.add_argument("--module", default="", help="run only mutants of these modules: sse,gateway/relay")
    parser.add_argument("-n", type=int, default=1, help="how many to run at a time")
    arguments = parser.parse_args()
    modules = arguments.module.split(",")
    chosen = [mutant for mutant in mutants() if any(word in str(mutant) for word in arguments.words)]
    chosen = [mutant for mutant in chosen if modules == [""] or mutant.module in modules]
    if not chosen:
        parser.error(f"no mutant of {arguments.module or 'any module'} has one of {arguments.words} in it")
    alive: list[str] = []
    with ThreadPoolExecutor(arguments.n) as threads:
        for mutant, (verdict, said) in zip(chosen, threads.map(outcome, chosen), strict=True):
            print(f"{verdict:8} {mutant}\n{said}".rstrip(), flush=True)
            if verdict != KILLED:
                alive.append(f"{verdict}: {mutant}")
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants killed", *alive, sep="\n")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
