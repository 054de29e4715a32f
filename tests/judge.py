"""The judge of the course: does a repaired module do what the original does?

    judge(exercise, the student's folder) --> why it is refused, or "" if nothing speaks against it

    python tests/judge.py              judges all rows of course/fixes.toml, and those made by rule
    python tests/judge.py 8.1 7        those of these exercises, or chapters
    python tests/judge.py --few        one wrong and one right fix a chapter

We copy the checkout, and of the student's folder take only modules: no test, no conftest. In the copy run
the test of the bug, the tests of the module, those of its mutants, and all replays. Then oracle.py compares a
pure module with the original, and explore.py tries orders of events. No exit status counts, for a module
can end its process as it likes: a test must be reported as passed, and an outcome must be there.
"""

import argparse
import ast
import functools
import json
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

from mutants import LEFT_OUT, REPLAY, ROOT, Mutant, copied, mutants, taken_out
from oracle import ORACLES

MAX_CPU_S = 60  # of a process: what takes longer does not end
MAX_LINES, MAX_WIDTH = 12, 160  # of what a test says
SAID = re.compile(r">|E |.*: error:")  # lines of pytest, and of a compiler
CHAPTERS = tomllib.loads((ROOT / "course" / "exercises.toml").read_text("utf-8"))
LAWS: dict[str, list[str]] = CHAPTERS.pop("laws")
FIXES: dict[str, dict[str, list[Any]]] = tomllib.loads((ROOT / "course" / "fixes.toml").read_text("utf-8"))


def exercises() -> dict[str, Mutant]:
    """Return each exercise by its number: first the bugs to be found, then the functions to be written."""
    numbered, rows = dict[str, Mutant](), [*mutants()]
    for chapter, fields in CHAPTERS.items():
        found = [row for words in fields["find"] for row in rows if words in str(row)]
        found += [taken_out(*words.split()) for words in fields["write"]]
        numbered |= {f"{chapter}.{i}": exercise for i, exercise in enumerate(found, 1)}
    return numbered


def judge(exercise: Mutant, work: Path) -> str:
    """Return why a student's folder is refused, in a few lines, or ""."""
    with TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for path in [path for path in copy.rglob("*") if path.suffix in (".py", ".cu")]:
            place = path.relative_to(copy)
            if place.parts[0] not in ("tests", "course"):
                path.unlink()
                if (work / place).is_file():
                    shutil.copy(work / place, path)
        others = [mutant.test for mutant in mutants() if mutant.module == exercise.module]
        replays = [test for test in others if test.startswith(REPLAY)]
        laws = [*LAWS[exercise.module], *replays] if exercise.module in LAWS else others
        options = [law for law in laws if law.startswith("--")]
        own = [exercise.test, *options] if exercise.test not in LAWS.get(exercise.module, []) else []
        for tests in filter(None, (own, laws)):
            if why := tested(tests, copy) or compared(exercise.module, copy):
                return why
        return ""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    few = {"EXAMPLES": "20", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *command]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | few, preexec_fn=limit
    )


def tested(tests: list[str], copy: Path) -> str:
    """Run tests; return what the first says that is not reported as passed."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-qx", "-p", "no:cacheprovider", f"--junitxml={report}"]
        ended = run(["-m", "pytest", *options, *dict.fromkeys(tests)], copy)
        try:
            cases = [*ElementTree.parse(report).iter("testcase")]
        except (OSError, ElementTree.ParseError):
            cases = []
    failed = [case for case in cases if len(case) and case[0].tag in ("failure", "error", "skipped")]
    if cases and not failed:
        return ""
    name = f"{failed[0].get('classname')}::{failed[0].get('name')}" if failed else f"no test of {tests[0]}"
    said = [line[:MAX_WIDTH] for line in ended.stdout.splitlines() if SAID.match(line)]
    why = said or [*(case[0].get("message", "") for case in failed), *ended.stderr.splitlines()[-3:]]
    verb = f"was not run to its end (exit status {ended.returncode})" if not failed else "does not pass"
    return "\n".join([f"{name} {verb}", *why[:MAX_LINES]])


def compared(module: str, copy: Path) -> str:
    """Return the smallest input that the original makes something else of, as data."""
    if module not in ORACLES:
        return ""
    right, found = outcomes(module, ROOT), outcomes(module, copy)
    differing = [case for case in right if found.get(case) != right[case]]
    if not differing:
        return ""
    case = min(differing, key=len)
    got = found.get(case, "nothing: the module has raised, or ended")
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

    MIRRORED = ((ast.Lt, ast.Gt), (ast.LtE, ast.GtE), (ast.Eq, ast.Eq), (ast.NotEq, ast.NotEq))

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


class Mirrored(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        """Write a < b as b > a, if both are simple."""
        self.generic_visit(node)
        pairs: dict[type[ast.cmpop], type[ast.cmpop]] = {
            left: right for a, b in Rewritten.MIRRORED for left, right in ((a, b), (b, a))
        }
        sides = (node.left, *node.comparators)
        if len(sides) > 2 or not all(isinstance(each, ast.Name | ast.Constant) for each in sides):
            return node
        turned = pairs.get(type(node.ops[0]))
        return ast.Compare(sides[1], [turned()], [sides[0]]) if turned else node


def versions(number: str, exercise: Mutant, is_first: bool = True) -> Iterator[tuple[bool, str, str]]:
    """Yield (is it right, where it comes from, the module's text) of each fix that we know.

    `is_first`: of the exercises of a module, for which the whole module is rewritten by rule.
    """
    text = (ROOT / exercise.file).read_text(encoding="utf-8")
    for kind in ("right", "wrong"):
        for i, fix in enumerate(FIXES.get(number, {}).get(kind, []), 1):
            old, new = fix if isinstance(fix, list) else (exercise.old, fix)
            assert text.count(old) == 1, (number, kind, i, text.count(old))
            yield kind == "right", f"{kind} {i}", text.replace(old, new)
    for transformer in (Rewritten(), Mirrored()) if is_first and exercise.file.endswith(".py") else ():
        tree = ast.fix_missing_locations(transformer.visit(ast.parse(text)))
        yield True, f"by rule: {type(transformer).__name__}", ast.unparse(tree)
    yield False, "by rule: untouched", text.replace(exercise.old, exercise.new)
    siblings = [one for one in mutants() if one.module == exercise.module and one.old != exercise.old]
    for one in siblings[: max(0, 2 - len(FIXES.get(number, {}).get("wrong", [])))]:
        yield False, f"by rule: solved, and {one.undoes}", text.replace(one.old, one.new)


def main(known: dict[str, Mutant]) -> int:
    parser = argparse.ArgumentParser(description="Judge the fixes that we know.")
    parser.add_argument("numbers", nargs="*", default=[], help="exercises, or chapters")
    parser.add_argument("--few", action="store_true", help="one wrong and one right fix a chapter")
    arguments = parser.parse_args()
    wrong_verdicts, counts, seen, modules = [], Counter[str](), set[tuple[str, bool]](), set[str]()
    for number, exercise in known.items():
        chapter = number.split(".")[0]
        if arguments.numbers and not {number, chapter} & {*arguments.numbers}:
            continue
        is_first = exercise.module not in modules
        modules.add(exercise.module)
        for is_right, name, text in versions(number, exercise, is_first):
            if arguments.few and (chapter, is_right) in seen:
                continue
            seen.add((chapter, is_right))
            with TemporaryDirectory() as folder:
                work = shutil.copytree(ROOT, Path(folder) / "work", ignore=LEFT_OUT)
                (work / exercise.file).write_text(text, encoding="utf-8")
                began = cpu_s()
                why = judge(exercise, work)
            verdict = f"{'right' if is_right else 'wrong'} and {'refused' if why else 'accepted'}"
            counts[verdict] += 1
            line = f"{number:5} {verdict:18} {cpu_s() - began:5.1f} s  {name}"
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
