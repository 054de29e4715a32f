"""The house: which module may import which, what stays pure, and whether the papers agree with the code."""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pictures
from helpers.serving import ROOT, run

CHAPTERS = ["audit", "checkpoint", "devices", "dialects", "gateway", "request", "service"]
SPINE = {path.stem: path for path in ROOT.glob("*.py")}
MODULES = SPINE | {
    f"{chapter}.{path.stem}": path
    for chapter in CHAPTERS
    for path in (ROOT / chapter).glob("*.py")
    if path.stem != "__init__"
}
TESTS = {path.stem: path for path in (ROOT / "tests").rglob("*.py") if "models" not in path.parts}
MAX_SPINE = 18  # modules in the root: an afternoon's reading
SCRIPTS = {"bench"}  # run from the checkout, and imported by nobody

# Arrows go down only: a module of the root, or a chapter, may import what stands in its row, all of it from
# rows above. An arrow changes only here, with the reason in the commit.
# fmt: off
#  module or chapter   of ours, it may import
MAY_IMPORT = {
    "channels":        set(),
    "checkpoint":      set(),
    "drafts":          set(),
    "pages":           set(),
    "sampling":        set(),
    "sse":             set(),
    "store":           set(),
    "background":      {"store"},
    "responses":       {"channels"},
    "tokenizer":       {"channels"},
    "audit":           {"responses", "sse"},
    "model":           {"checkpoint", "sampling"},
    "devices":         {"checkpoint", "model", "sampling"},
    "request":         {"channels"},
    "completions":     {"channels", "request"},
    "dialects":        {"channels", "request", "sse"},
    "engine":          {"checkpoint", "drafts", "model", "pages", "sampling"},
    "streaming":       {"background", "request", "sse"},
    "gateway":         {"channels", "completions", "request", "sse", "streaming"},
    "worker":          {"channels", "dialects", "engine", "request", "sampling", "tokenizer"},
    "service":         {"checkpoint", "devices", "dialects", "engine", "gateway", "model", "request",
                        "responses", "store", "streaming", "tokenizer", "worker"},
    "api":             {"background", "channels", "completions", "gateway", "request", "responses", "service",
                        "sse", "store", "streaming", "worker"},
    "middleware":      {"api", "gateway", "request", "service", "streaming"},
    "bench":           set(),
    "server":          {"api", "background", "checkpoint", "gateway", "middleware", "service", "store",
                        "worker"},
}
# fmt: on

# Bytes and time come from outside: these are functions of their arguments.
SANS_IO = {
    "audit.chunks", "audit.events", "audit.framing", "audit.recordings", "audit.rules", "audit.shapes",
    "channels", "completions", "dialects.calls", "dialects.families", "dialects.grammar_in_json", "drafts",
    "gateway.deltas", "gateway.metering", "gateway.relay", "pages", "request.messages", "request.params",
    "request.refusals", "request.tool_calls", "request.tools", "request.validation", "responses",
    "service.signed_content", "sse",
}  # fmt: skip
IO = {"asyncio", "concurrent", "multiprocessing", "os", "queue", "random", "secrets", "select", "socket",
      "subprocess", "tempfile", "threading", "time", "uuid"}  # fmt: skip

MAX_LINES = 65  # of a function


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """What a file imports, wherever in it: `a` for a module, `a.b` for a module of a chapter."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert node.level == 0
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def place(name: str) -> str:
    """The row of a module: itself in the root, else its chapter."""
    return name.partition(".")[0]


# --- arrows -------------------------------------------------------------------------------------------------


def test_every_module_has_its_row() -> None:
    assert MAY_IMPORT.keys() == SPINE.keys() | {*CHAPTERS}


def test_every_folder_of_the_root_is_known() -> None:
    """A chapter is a folder one level deep."""
    packages = {path.parent.relative_to(ROOT) for path in ROOT.glob("*/**/__init__.py")}
    ours = {
        str(path) for path in packages if path.parts[0] not in ("tests", "build") and path.parts[0][0] != "."
    }
    assert ours == {*CHAPTERS, "benches"}


def test_the_spine_is_short() -> None:
    assert len(SPINE) <= MAX_SPINE


def test_arrows_go_down_only() -> None:
    above: set[str] = set()
    for name, arrows in MAY_IMPORT.items():
        assert arrows <= above
        above.add(name)


@pytest.mark.parametrize("name", MODULES)
def test_imports(name: str) -> None:
    ours = {place(other) for other in imported(MODULES[name])} & MAY_IMPORT.keys()
    assert ours - {place(name)} <= MAY_IMPORT[place(name)]


def test_no_circle() -> None:
    """Inside a chapter neither; raises CycleError."""
    arrows = {name: {*imported(path)} & MODULES.keys() for name, path in MODULES.items()}
    TopologicalSorter(arrows).prepare()


@pytest.mark.parametrize("chapter", [*CHAPTERS, "benches"])
def test_a_chapter_re_exports_nothing(chapter: str) -> None:
    (docstring,) = tree(ROOT / chapter / "__init__.py").body
    assert isinstance(docstring, ast.Expr)


@pytest.mark.parametrize("name", sorted(SANS_IO))
def test_pure_modules(name: str) -> None:
    assert not {place(other) for other in imported(MODULES[name])} & IO
    functions = [node for node in ast.walk(tree(MODULES[name])) if isinstance(node, ast.AsyncFunctionDef)]
    assert functions == []
    calls = [node.func for node in ast.walk(tree(MODULES[name])) if isinstance(node, ast.Call)]
    called = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
    assert not called & {"now", "today", "utcnow", "print", "open", "input"}


def test_no_module_hides_the_standard_library() -> None:
    assert not (SPINE.keys() | {*CHAPTERS} | TESTS.keys()) & sys.stdlib_module_names


def test_no_test_hides_a_module() -> None:
    top = {path.stem for folder in ("tests", "tests/devices") for path in (ROOT / folder).glob("*.py")}
    assert not (SPINE.keys() | {*CHAPTERS}) & top


# --- size and prose -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*MODULES.values(), *TESTS.values()], ids=lambda path: path.stem)
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
    found = re.findall(r"\bpython ((?:\S+\.py|-m audit)[^`\n&|;]*)", README)
    return [shlex.split(command) for command in found]


def test_what_is_installed_is_what_there_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(project["tool"]["setuptools"]["py-modules"]) == SPINE.keys() - SCRIPTS
    assert project["tool"]["setuptools"]["packages"] == CHAPTERS


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
    n_program = 2 if words[0] == "-m" else 1
    program, rest = words[:n_program], words[n_program:]
    flags = [word for word in rest if word.startswith("-")]
    subcommand = rest[: rest.index(flags[0])] if flags else rest
    ended = run(*program, *subcommand, "--help")
    assert ended.returncode == 0, ended.stderr
    assert set(flags) <= set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", ended.stdout))


@pytest.mark.parametrize("file", sorted(set(re.findall(r"\]\(([\w./-]+)\)", README))))
def test_readme_links_to_files_that_exist(file: str) -> None:
    assert (ROOT / file).exists()


def test_the_readme_lists_the_spine_and_every_chapter() -> None:
    spine, *chapters = re.split(r"^#### `(\w+)/`", README.split("### The spine")[1], flags=re.MULTILINE)
    named = {"": spine} | dict(zip(chapters[::2], chapters[1::2], strict=True))
    listed = {
        folder: sorted(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)) for folder, text in named.items()
    }
    there = {"": ["kernels.cu", *(f"{name}.py" for name in SPINE.keys() - SCRIPTS)]} | {
        chapter: [path.name for path in (ROOT / chapter).glob("*.py") if not path.name.startswith("__")]
        for chapter in CHAPTERS
    }
    assert listed == {folder: sorted(files) for folder, files in there.items()}


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
