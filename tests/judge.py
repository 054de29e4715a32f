"""The judge of the course: does a repaired module do what the original does?

    judge(exercise, the student's folder) --> why it is refused, or "" if nothing speaks against it

    python tests/judge.py              judges all rows of course/fixes.toml, and those made by rule
    python tests/judge.py 8.1 7        those of these exercises, or chapters
    python tests/judge.py --few        one wrong and one right fix a chapter, without the laws

We copy the checkout, and of the student's folder take only modules: no test, no conftest. In the copy we run
the test of the bug; then oracle.py compares a pure module with the original, and explore.py tries orders of
events; then come the laws: tests of the module, or of its mutants, and all replays. No exit status counts,
for a module can end its process as it likes: a test must be reported as passed, and an outcome must be there.
"""

import argparse
import ast
import contextlib
import functools
import json
import operator
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from mutants import LEFT_OUT, ROOT, Mutant, copied, mutants, taken_out
from oracle import ORACLES

MAX_CPU_S = 60  # of a process: what takes longer does not end
# Of each chapter one exercise whose test is a quick one; no two of a module.
FEW = ["1.1", "2.1", "3.1", "4.6", "5.1", "6.6", "7.1", "8.1", "9.3", "10.6", "11.4"]
# Runs of pytest in one process, for its start takes as long as some laws; in the laws, few cuts of a replay.
# A run of single tests is ended by SIGPROF after 20 s of processor time for each.
RUNS = """import os, pytest, signal, sys
for run in sys.argv[1:]:
    is_of_laws = "not sweep" in run
    os.environ.update({"REPLAYS_CUT_EVERY": "9"} if is_of_laws else {})
    signal.setitimer(signal.ITIMER_PROF, 0 if is_of_laws else 20 * max(1, run.count("::")))
    if pytest.main(run.splitlines()):
        break
"""
MAX_LINES, MAX_WIDTH = 10, 160  # of what a test says
NOT_PASSED = "failure", "error", "skipped"
SAID = re.compile(r">|E |.*: error:")  # lines of pytest, and of a compiler
CHAPTERS = tomllib.loads((ROOT / "course" / "exercises.toml").read_text("utf-8"))
LAWS: dict[str, list[str]] = CHAPTERS.pop("laws")
FIXES: dict[str, dict[str, list[Any]]] = tomllib.loads((ROOT / "course" / "fixes.toml").read_text("utf-8"))
Judged = Iterator[tuple[str, bool, str, str]]  # exercise, is the fix right, its place, why it is refused
Reported = list[tuple[str, list[str]]]  # the name of each test, and what speaks against it


def exercises() -> dict[str, Mutant]:
    """Return each exercise by its number: first the bugs to be found, then the functions to be written."""
    numbered, rows = dict[str, Mutant](), [*mutants()]
    for chapter, fields in CHAPTERS.items():
        found = [row for words in fields["find"] for row in rows if words in str(row)]
        found += [taken_out(*words.split()) for words in fields["write"]]
        numbered |= {f"{chapter}.{i}": exercise for i, exercise in enumerate(found, 1)}
    return numbered


def judge(exercise: Mutant, work: Path, has_laws: bool = True) -> str:
    """Return why a student's folder is refused, in a few lines, or ""."""
    of_mutants = [each.test for each in mutants() if each.module == exercise.module]
    laws = LAWS.get(exercise.test, LAWS.get(exercise.module, of_mutants))
    files = [law for law in laws if law.startswith("--") or "::" not in law]
    named = [law for law in (exercise.test, *laws) if "::" in law and law not in files]
    others = [*files, *(f"--deselect={test}" for test in named), "-m", "not sweep"]
    runs = [["-m", "", *dict.fromkeys(named)]] if named else []
    runs += [others] if files and has_laws else []
    with TemporaryDirectory() as folder:
        copy = repaired(work, Path(folder))
        whys = tested(runs, copy)
        own = whys[0] if named else ""
        data = "" if "to its end" in own else compared(exercise.module, copy)
        if own and data.startswith("an order of events"):  # of which the test has told
            return own
        return "\n".join(filter(None, [own, data])) or "".join(whys)


def repaired(work: Path, folder: Path) -> Path:
    """Return a copy of the checkout with a student's modules."""
    copy = copied(folder)
    for path in [path for path in copy.rglob("*") if path.suffix in (".py", ".cu")]:
        place = path.relative_to(copy)
        if place.parts[0] not in ("tests", "course"):
            path.unlink()
            if (work / place).is_file():
                shutil.copy(work / place, path)
    return copy


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    cpu_s = MAX_CPU_S // 4 if command[0] == "tests/oracle.py" else MAX_CPU_S
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_CPU, (cpu_s, cpu_s))
    # With bytecode pytest starts a second sooner.
    few = {"EXAMPLES": "20", "NO_SHRINK": "", "PYTHONDONTWRITEBYTECODE": ""}
    few["HYPOTHESIS_STORAGE_DIRECTORY"] = str(ROOT / ".hypothesis")  # a table of all characters: five seconds
    options: Any = {"cwd": folder, "capture_output": True, "text": True, "preexec_fn": limit}
    return subprocess.run([sys.executable, *command], env=os.environ | few | more, **options)


def reported(runs: list[list[str]], copy: Path) -> tuple[list[Reported], Any]:
    """Run pytest with these options, until a run fails; return what is reported, and the ended process."""
    found: list[Reported] = [[] for _ in runs]
    with TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{number}.xml" for number in range(len(runs))]
        options = [["-q", "-p", "no:cacheprovider", f"--junitxml={report}"] for report in reports]
        ended = run(["-c", RUNS, *map("\n".join, map(operator.add, options, runs))], copy)
        for tests, report in zip(found, reports, strict=True):
            with contextlib.suppress(OSError, ElementTree.ParseError):
                for case in ElementTree.parse(report).iter("testcase"):
                    bad = [why.get("message", "") for why in case if why.tag in NOT_PASSED]
                    file = case.attrib["classname"].replace(".", "/")
                    tests.append((f"{file}.py::{case.get('name')}", bad))
    return found, ended


def tested(runs: list[list[str]], copy: Path) -> list[str]:
    """Run tests; return of each run what the first test says that is not reported as passed."""
    found, ended = reported([["-x", *run] for run in runs], copy)
    said, whys = [line[:MAX_WIDTH] for line in ended.stdout.splitlines() if SAID.match(line)], []
    for tests, run in zip(found, runs, strict=True):
        failed = [(f"{name} does not pass", bad) for name, bad in tests if bad]
        unrun = f"no test of {' '.join(run)} was run to its end (exit status {ended.returncode})"
        name, why = (failed or [(unrun, ended.stderr.splitlines()[-3:])])[0]
        is_right = tests and not failed
        whys.append("" if is_right else "\n".join([name[:MAX_WIDTH], *(said or why)[:MAX_LINES]]))
    return whys


def compared(module: str, copy: Path) -> str:
    """Return the smallest input that the original makes something else of, as data."""
    if module not in ORACLES:
        return ""
    right, found = outcomes(module, ROOT), outcomes(module, copy)
    differing = [case for case in right if found.get(case) != right[case]]
    if not differing:
        return ""
    case = min(differing, key=len)
    got = found.get(case, "nothing: the module has raised or ended, or goes on for ever")
    if case.startswith("an order of events") and case in found:
        return "\n".join([f"{case} breaks a law:", *ast.literal_eval(got)])
    pairs = enumerate(zip(right[case], got, strict=False))
    n_alike = max(0, next((i for i, (a, b) in pairs if a != b), 0) - MAX_WIDTH // 3)
    expected, came = (text[n_alike : n_alike + MAX_WIDTH] for text in (right[case], got))
    after = f", after {n_alike} characters that are alike" if n_alike else ""
    return "\n".join([f"input     {case}", f"expected  {expected}", f"got       {came}{after}"])


@functools.cache  # of the original; a copy has a name of its own, and a second look costs nothing
def outcomes(module: str, folder: Path) -> dict[str, str]:
    lines = run(["tests/oracle.py", module], folder).stdout.splitlines()
    return dict(json.loads(line) for line in lines if line.startswith('["'))


# --- the table ----------------------------------------------------------------------------------------------


class Rewritten(ast.NodeTransformer):
    """Write a program otherwise: the order of branches, and what is returned under a name first."""

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        if node.orelse and not any(isinstance(each, ast.NamedExpr) for each in ast.walk(node.test)):
            node.test, node.body, node.orelse = ast.UnaryOp(ast.Not(), node.test), node.orelse, node.body
        return node

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        if node.value is None:
            return node
        keep = ast.Assign([ast.Name("outcome_", ast.Store())], node.value)
        return [ast.copy_location(keep, node), ast.Return(ast.Name("outcome_", ast.Load()))]


@functools.cache
def rewritten(file: str) -> str:
    """Return a whole module, written otherwise by rules."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".cu"):
        return re.sub(r"\b(\w+) < ([^;]+); \1\+\+", r"\2 > \1; ++\1", text)  # the loops
    return ast.unparse(ast.fix_missing_locations(Rewritten().visit(ast.parse(text))))


def versions(number: str, exercise: Mutant) -> Iterator[tuple[bool, str, str]]:
    """Yield (is it right, where it comes from, the module's text) of each fix that we know."""
    text = (ROOT / exercise.file).read_text(encoding="utf-8")
    for kind in ("right", "wrong"):
        for i, fix in enumerate(FIXES.get(number, {}).get(kind, []), 1):
            old, new = fix if isinstance(fix, list) else (exercise.old, fix)
            assert text.count(old) == 1, (number, kind, i, text.count(old))
            yield kind == "right", f"{kind} {i}", text.replace(old, new)
    yield True, "rewritten by rule", rewritten(exercise.file)
    yield False, "by rule: untouched", text.replace(exercise.old, exercise.new)


def judged(known: dict[str, Mutant], numbers: list[str]) -> Judged:
    modules = set[str]()
    for number, exercise in known.items():
        if numbers and not {number, number.split(".")[0]} & {*numbers}:
            continue
        for is_right, name, text in versions(number, exercise):
            with TemporaryDirectory() as folder:
                work = shutil.copytree(ROOT, Path(folder) / "work", ignore=LEFT_OUT)
                (work / exercise.file).write_text(text, encoding="utf-8")
                # A module that is rewritten as a whole has met the laws in its first exercise.
                has_laws = exercise.module not in modules or name != "rewritten by rule"
                yield number, is_right, name, judge(exercise, work, has_laws)
        modules.add(exercise.module)


def few(known: dict[str, Mutant]) -> Judged:
    """Judge the first right and the first wrong fix of each of FEW, in a copy that all share."""
    os.environ["CASES"] = "40"  # of oracle.py
    chosen = {number: known[number] for number in FEW}
    for kind in ("right", "wrong"):
        with TemporaryDirectory() as folder:
            copy = copied(Path(folder))
            for number, exercise in chosen.items():
                texts = {name: text for _, name, text in versions(number, exercise)}
                (copy / exercise.file).write_text(texts[f"{kind} 1"], encoding="utf-8")
            ([tests], _) = reported([["-m", "", *(exercise.test for exercise in chosen.values())]], copy)
            for number, exercise in chosen.items():
                own = [bad for name, bad in tests if name.startswith(exercise.test)]
                is_right = len(own) > 0 and not any(own)
                why = compared(exercise.module, copy) if is_right else f"{exercise.test} does not pass"
                yield number, kind == "right", f"{kind} 1", why


def main(known: dict[str, Mutant]) -> int:
    parser = argparse.ArgumentParser(description="Judge the fixes that we know.")
    parser.add_argument("numbers", nargs="*", default=[], help="exercises, or chapters")
    parser.add_argument("--few", action="store_true", help="one wrong and one right fix a chapter")
    arguments = parser.parse_args()
    wrong_verdicts, counts, began = [], Counter[str](), cpu_s()
    for number, is_right, name, why in few(known) if arguments.few else judged(known, arguments.numbers):
        verdict = f"{'right' if is_right else 'wrong'} and {'refused' if why else 'accepted'}"
        counts[verdict] += 1
        line = f"{number:5} {verdict:18} {cpu_s() - began:5.1f} s  {name}"
        began = cpu_s()
        print(line, (why.splitlines() or [""])[0][:90], flush=True)
        if is_right == bool(why):
            wrong_verdicts.append(f"{line}\n{why}")
    print(*wrong_verdicts, *(f"{n:4} {verdict}" for verdict, n in sorted(counts.items())), sep="\n")
    return int(bool(wrong_verdicts))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main(exercises()))
