"""The index of the documented bugs: `python tests/index.py` writes tests/BUGS.md; a test fails if it is old.

bugs.toml, replays/*.toml, @pytest.mark.bug("F03"), the rules' `bugs` --index()--> BUGS.md
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mutants import ROOT, Mutant

TESTS = Path(__file__).parent
GITHUB = "https://github.com/"
INTRO = """\
# Documented bugs of others, and what keeps them out here

Made by `python tests/index.py`. A replay is a file in `replays/` and says in words what went wrong; a test is
in the file named; `wire` is a rule that `pytest tests/wire` checks against any server, ours too.
`tests/mutants.toml` undoes what keeps each bug out; `python tests/mutants.py` sees that it comes back and is
noticed.
"""
TABLE = "| | what went wrong | our rule | where |\n|---|---|---|---|"
DEFINES = re.compile(
    r"\s+self\.(\w+)(?::| =)|\s*(?:async )?def (\w+)\(|__device__ \w+ (\w+)\(|([A-Z]\w+)(?::| =)"
)
OTHERS = "## Replays of rules\n\n| | |\n|---|---|"


def read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def bugs() -> dict[str, list[str]]:
    """Return name, link and rule of each bug, by id."""
    groups = read(TESTS / "bugs.toml").values()
    return {id_: row for group in groups for id_, row in group.items() if id_ != "title"}


@cache
def files() -> list[tuple[Path, dict[str, str]]]:
    """Return each file of replays/ and what is in it."""
    return [(path, read(path)) for path in sorted((TESTS / "replays").glob("*.toml"))]


def docstring(mutant: Mutant) -> str:
    """Return what the function around a change says that it does, or the comment over a kernel."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    before = text[: text.index(mutant.old)]
    if mutant.file.endswith(".cu"):
        return str(re.findall(r"(?:^//.*\n)+", before, re.MULTILINE)[-1])
    n, functions = before.count("\n") + 1, list[Any](ast.walk(ast.parse(text)))
    around = [f for f in functions if hasattr(f, "returns") and f.lineno <= n <= f.end_lineno]
    return "".join(f"{function.name}(): {ast.get_docstring(function)}\n" for function in around[-1:])


def told(mutant: Mutant) -> tuple[str, str]:
    """Return what the reporter of a mutant's bug saw and where, and a hint: our rule, or where to read."""
    hint = f"{docstring(mutant)}Read {mutant.test}."
    name, _, is_written = mutant.undoes.partition("() has been taken out")
    if is_written:
        test = mutant.test.partition("::")[0]
        is_imported = re.compile(rf"^(from|import) {mutant.module}\b", re.M)
        text, known = (ROOT / mutant.file).read_text(encoding="utf-8"), dict[str, str]()
        used = {*re.findall(r"\w+", mutant.old)} - {name}
        for line in text.replace(mutant.old, "").splitlines():
            if (found := DEFINES.match(line)) and found[found.lastindex or 0] in used:
                known.setdefault(found[found.lastindex or 0], f"    {line.strip()}")
        uses = ["It was written with these of its module:", *known.values()] if known else []
        uses += [f"It is judged by {mutant.test}. It is used here:"]
        uses += ["    devices/cuda.py launches it, or what calls it"] * mutant.file.endswith(".cu")
        others = [ROOT / test, *ROOT.glob("*.py"), *ROOT.glob("gateway/*.py")]
        texts = {path: path.read_text(encoding="utf-8") for path in others}
        if sum(f"def {name}(" in each for each in texts.values()) > 1:  # a call may be of another one
            del others[1:]
        importing = [path for path in others if is_imported.search(texts[path])]
        for path in dict.fromkeys((ROOT / mutant.file, *importing)):
            for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if re.search(rf"^\s+(?!.*(def |float \*|-->)).*\b{name}\(", line):
                    uses.append(f"    {path.relative_to(ROOT)}:{n}: {line.strip()}")
        return mutant.undoes, "\n".join(uses[:16])
    for path, fields in files():
        if mutant.test.endswith(f"[{path.stem}]"):
            return f"{fields['went_wrong'].strip()}\n{fields['source']}", fields["title"]
    if mutant.undoes in bugs():
        name, link, rule = bugs()[mutant.undoes]
        return f"{name.replace('-', ' ')}; expected: {rule}\n{GITHUB}{link}", hint
    return mutant.undoes, hint


def replays() -> Iterator[tuple[str, str]]:
    """Yield (id of a bug, where it is replayed): in replays/, or by a test with `@pytest.mark.bug("F03")`."""
    for path, fields in files():
        yield from ((id_, f"[{path.stem}](replays/{path.name})") for id_ in fields.get("bug", "").split())
    for path in sorted(TESTS.glob("**/test_*.py")):
        name = path.relative_to(TESTS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.bug":
                    place = f"[{name}]({name}) `{getattr(node, 'name', '')}`"
                    yield from ((ast.literal_eval(argument), place) for argument in mark.args)


def wire_rules() -> Iterator[tuple[str, str]]:
    import audit.session  # noqa: F401 (it enters the rules)
    from audit.rules import RULES

    for rule, check in sorted(RULES.items()):
        yield from ((id_, f"wire `{rule}`") for id_ in check.bugs.split())


def index() -> str:
    where: dict[str, list[str]] = {}
    replayed = list(replays())
    for id_, place in (*replayed, *wire_rules()):
        where.setdefault(id_, []).append(place)
    lines = [INTRO]
    for group in read(TESTS / "bugs.toml").values():
        lines += [f"## {group.pop('title')}", "", TABLE]
        for id_, (name, link, rule) in group.items():
            places = "<br>".join(where.get(id_, ["not yet"]))
            lines.append(f"| {id_} | [{name}]({GITHUB}{link}) | {rule} | {places} |")
        lines.append("")
    lines.append(OTHERS)
    for path, fields in files():
        if "bug" not in fields:  # it replays a rule, and its source states the rule
            lines.append(f"| [{path.stem}](replays/{path.name}) | [{fields['title']}]({fields['source']}) |")
    n_replayed = len({id_ for id_, _ in replayed})
    return "\n".join([*lines, "", f"{n_replayed} of {len(bugs())} bugs are replayed.", ""])


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(TESTS.parent))
    (TESTS / "BUGS.md").write_text(index(), encoding="utf-8")
