"""The house: which module may import which, what stays pure, and whether the papers agree with the code."""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import pictures
from serving import ROOT, run

MODULES = {path.stem: path for path in ROOT.glob("*.py")}
TESTS = {path.stem: path for path in (ROOT / "tests").glob("*.py")}
WIRE = sorted((ROOT / "tests" / "wire").glob("*.py"))
SCRIPTS = {"bench"}  # run from the checkout, and imported by nobody

# Arrows go down only: a module may import what stands in its row, all of it from rows above. An arrow changes
# only here, with the reason in the commit.
# fmt: off
#  module         of ours, it may import
MAY_IMPORT = {
    "channels":    set(),
    "checks":      set(),
    "drafts":      set(),
    "logs":        set(),
    "metering":    set(),
    "metrics":     set(),
    "page":        set(),
    "pages":       set(),
    "quoted":      set(),
    "rope":        set(),
    "sealed":      set(),
    "sse":         set(),
    "store":       set(),
    "background":  {"store"},
    "calls":       {"channels"},
    "captures":    {"sse"},
    "completions": {"channels"},
    "responses":   {"channels"},
    "tokenizer":   {"channels"},
    "tools":       {"channels"},
    "weights":     {"rope"},
    "answers":     {"background", "checks", "sse"},
    "chat":        {"checks", "tools"},
    "dialects":    {"calls", "channels"},
    "hub":         {"weights"},
    "kernels":     {"weights"},
    "model":       {"rope", "weights"},
    "relay":       {"checks", "completions", "metering", "sse"},
    "rules":       {"captures", "responses", "sse"},
    "audit":       {"captures", "rules"},
    "cpu":         {"model", "weights"},
    "engine":      {"drafts", "model", "pages", "weights"},
    "gpu":         {"kernels", "model", "rope", "weights"},
    "params":      {"chat", "checks", "tools"},
    "upstreams":   {"completions", "relay"},
    "grammar":     {"calls", "channels", "params", "quoted", "tools"},
    "plain":       {"gpu", "kernels", "weights"},
    "remote":      {"answers", "channels", "chat", "checks", "completions", "metering", "params", "relay",
                    "sse", "upstreams"},
    "worker":      {"channels", "chat", "checks", "dialects", "engine", "grammar", "model", "params",
                    "tokenizer"},
    "api":         {"answers", "background", "channels", "chat", "checks", "completions", "metrics",
                    "params", "relay", "remote", "responses", "sealed", "sse", "store", "tools", "worker"},
    "loading":     {"chat", "cpu", "engine", "gpu", "grammar", "kernels", "model", "params", "tokenizer",
                    "weights", "worker"},
    "front":       {"answers", "api", "checks", "logs", "metrics", "page", "relay"},
    "bench":       set(),
    "server":      {"answers", "api", "background", "dialects", "front", "hub", "loading", "logs",
                    "metering", "remote", "responses", "store", "upstreams", "worker"},
}
# fmt: on

# Bytes and time come from outside: these are functions of their arguments.
SANS_IO = {"calls", "captures", "channels", "chat", "completions", "dialects", "drafts", "metering",
           "pages", "params", "quoted", "relay", "responses", "rules", "sealed", "sse", "tools"}  # fmt: skip
IO = {"asyncio", "concurrent", "multiprocessing", "os", "queue", "random", "secrets", "select", "socket",
      "subprocess", "tempfile", "threading", "time", "uuid"}  # fmt: skip

MAX_LINES = 65  # of a function


def tree(path: Path) -> ast.Module:
    """A file as it is when imported: what it does as a command, under its last `if`, is no arrow."""
    parsed = ast.parse(path.read_text(encoding="utf-8"))
    if isinstance(parsed.body[-1], ast.If) and ast.unparse(parsed.body[-1].test) == "__name__ == '__main__'":
        parsed.body.pop()
    return parsed


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert node.level == 0
            yield node.module.partition(".")[0]


# --- arrows -------------------------------------------------------------------------------------------------


def test_every_module_has_its_row() -> None:
    assert MAY_IMPORT.keys() == MODULES.keys()


def test_arrows_go_down_only() -> None:
    above: set[str] = set()
    for name, arrows in MAY_IMPORT.items():
        assert arrows <= above
        above.add(name)


@pytest.mark.parametrize("name", MODULES)
def test_imports(name: str) -> None:
    assert set(imported(MODULES[name])) & MODULES.keys() <= MAY_IMPORT[name]


@pytest.mark.parametrize("name", sorted(SANS_IO))
def test_pure_modules(name: str) -> None:
    assert not set(imported(MODULES[name])) & IO
    functions = [node for node in ast.walk(tree(MODULES[name])) if isinstance(node, ast.AsyncFunctionDef)]
    assert functions == []
    calls = [node.func for node in ast.walk(tree(MODULES[name])) if isinstance(node, ast.Call)]
    called = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
    assert not called & {"now", "today", "utcnow", "print", "open", "input"}


def test_no_module_hides_the_standard_library() -> None:
    assert not (MODULES.keys() | TESTS.keys()) & sys.stdlib_module_names


def test_no_test_hides_a_module() -> None:
    assert not MODULES.keys() & TESTS.keys()


# --- size and prose -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*MODULES.values(), *TESTS.values(), *WIRE], ids=lambda path: path.stem)
def test_file_can_be_read(path: Path) -> None:
    assert ast.get_docstring(tree(path)), "a module says what it is"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno
            assert node.end_lineno - node.lineno < MAX_LINES, node.name


@pytest.mark.parametrize("name", MODULES)
def test_module_says_what_it_leaves_to_others(name: str) -> None:
    assert "\nNot here: " in (ast.get_docstring(tree(MODULES[name])) or "")


# --- papers -------------------------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text(encoding="utf-8")


def readme_commands() -> list[list[str]]:
    """The words of each `python FILE ...` in README.md, up to the end of its code."""
    found = re.findall(r"\bpython (\S+\.py[^`\n&|;]*)", README)
    return [shlex.split(command) for command in found]


def test_py_modules_are_the_modules() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(project["tool"]["setuptools"]["py-modules"]) == MODULES.keys() - SCRIPTS


@pytest.mark.parametrize(
    "command", ["pip install -e '.[fast]' && python server.py", "pip install -e '.[dev]' && pytest"]
)
def test_readme_starts_in_one_command(command: str) -> None:
    assert sum(command in line for line in README.splitlines()) == 1


def test_curl_in_the_readme_says_what_it_sends() -> None:
    """vLLM and SGLang refuse a body whose type is not JSON; curl's own is that of a form."""
    commands = [line for line in README.splitlines() if re.match(r" +curl .* -d ", line)]
    assert len(commands) == len(re.findall(r"\bcurl [^`]*? -d ", README)) > 0
    assert [line for line in commands if "-H 'Content-Type: application/json'" not in line] == []


@pytest.mark.parametrize("words", [words for words in readme_commands() if len(words) > 1], ids=shlex.join)
def test_readme_commands_exist(words: list[str]) -> None:
    script, *rest = words
    flags = [word for word in rest if word.startswith("-")]
    subcommand = rest[: rest.index(flags[0])] if flags else rest
    ended = run(script, *subcommand, "--help")
    assert ended.returncode == 0, ended.stderr
    assert set(flags) <= set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", ended.stdout))


@pytest.mark.parametrize("file", sorted(set(re.findall(r"[\w./-]+\.py\b", README))))
def test_readme_names_files_that_exist(file: str) -> None:
    assert (ROOT / file).is_file()


def test_readme_names_every_module() -> None:
    assert {path.name for path in MODULES.values()} <= set(re.findall(r"\w+\.py", README))


def test_numbers_in_the_readme_are_measured() -> None:
    """Each row of its table of speeds stands in results/, with date, device and versions above it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if re.search(r"\| \d+\.\d", line)]
    measured = (ROOT / "results" / "cpu.md").read_text(encoding="utf-8").splitlines()
    assert rows
    assert set(rows) <= set(measured)


def test_the_picture_of_the_events_is_drawn_from_their_table() -> None:
    assert pictures.PICTURE.read_text(encoding="utf-8") == pictures.events(), (
        "python tests/pictures.py draws it"
    )


CHAPTERS = re.findall(r"^### ([^\n]*): ([\d,]+) lines\n(.*?)(?=^##)", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("title", "size", "text"), CHAPTERS, ids=[title for title, *_ in CHAPTERS])
def test_chapters_of_the_readme_are_as_long_as_they_say(title: str, size: str, text: str) -> None:
    files = re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)
    n_lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert abs(n_lines - int(size.replace(",", ""))) <= 50, n_lines


def test_each_module_has_one_chapter() -> None:
    named = [file for *_, text in CHAPTERS for file in re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)]
    assert sorted(named) == sorted({path.name for path in MODULES.values()} - {"bench.py"} | {"kernels.cu"})
