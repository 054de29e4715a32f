"""The house: which module may import which, what stays pure, and whether the papers agree with the code."""

import ast
import re
import shlex
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pictures
from checkpoint.config import FAMILIES
from dialects.families import DIALECTS
from helpers.serving import ROOT, run

CHAPTERS = ["audit", "checkpoint", "devices", "dialects", "gateway", "request", "service"]
SPINE = {path.stem: path for path in ROOT.glob("*.py")}
MODULES = SPINE | {
    f"{chapter}.{path.stem}": path
    for chapter in CHAPTERS
    for path in (ROOT / chapter).glob("*.py")
    if path.stem != "__init__"
}
TESTS = {path.stem: path for path in (ROOT / "tests").rglob("*.py")}
SCRIPTS = {"bench"}  # run from the checkout, and imported by nobody

# Arrows go down only: a module of the root, or a chapter, may import what stands in its row, all of it from
# rows above. An arrow changes only here, with the reason in the commit.
# fmt: off
#  module or chapter   of ours, it may import
MAY_IMPORT = {
    "channels":        set(),
    "checkpoint":      set(),
    "pages":           set(),
    "sampling":        set(),
    "sse":             set(),
    "store":           set(),
    "responses":       {"channels", "sse"},
    "tokenizer":       {"channels"},
    "audit":           set(),
    "model":           {"checkpoint", "sampling"},
    "devices":         {"checkpoint", "model", "sampling"},
    "request":         {"channels", "sse", "store"},
    "background":      {"channels", "request", "responses", "sse", "store"},
    "completions":     {"channels", "request", "sse"},
    "dialects":        {"channels", "request", "sse"},
    "scheduler":       {"model", "pages", "sampling"},
    "engine":          {"checkpoint", "model", "sampling", "scheduler"},
    "streaming":       {"background", "request", "sse"},
    "gateway":         {"channels", "completions", "request", "sse", "streaming"},
    "worker":          {"channels", "dialects", "engine", "request", "sampling", "scheduler", "tokenizer"},
    "service":         {"background", "checkpoint", "devices", "dialects", "engine", "gateway", "model",
                        "request", "responses", "sampling", "scheduler", "sse", "store", "streaming",
                        "tokenizer", "worker"},
    "api":             {"background", "channels", "completions", "gateway", "request", "responses", "service",
                        "sse", "store", "streaming", "worker"},
    "middleware":      {"api", "gateway", "request", "service", "streaming"},
    "bench":           set(),
    "server":          {"api", "background", "checkpoint", "gateway", "middleware", "request", "service",
                        "store", "worker"},
}
# fmt: on

# Bytes and time come from outside: these are functions of their arguments.
SANS_IO = {
    "audit.chunks", "audit.events", "audit.frames", "audit.rules", "audit.schema", "audit.stream",
    "channels", "completions",
    "dialects.calls", "dialects.families", "dialects.grammar_in_json", "dialects.json_schema",
    "gateway.answers", "gateway.metering", "gateway.outputs", "gateway.refused", "pages", "request.messages",
    "request.params", "request.query", "request.refusals", "request.special_tokens",
    "request.tool_calls", "request.validation", "responses", "scheduler",
    "sse",
}  # fmt: skip
IO = {"asyncio", "concurrent", "multiprocessing", "os", "queue", "random", "secrets", "select", "socket",
      "subprocess", "tempfile", "threading", "time", "uuid"}  # fmt: skip

MAX_LINES = 70  # of a function


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


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_tests_mirror_the_chapters(chapter: str) -> None:
    assert [*(ROOT / "tests" / chapter).glob("test_*.py")]


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


def test_files_can_be_read() -> None:
    """A module says what it is, and no function is longer than a screen."""
    for path in [*MODULES.values(), *TESTS.values()]:
        assert ast.get_docstring(tree(path)), path
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno
                assert node.end_lineno - node.lineno < MAX_LINES, (path, node.name)


# Tokens of a folder, without comments and docstrings. A cap is raised only with its reason in the commit.
# fmt: off
CAPS = {
    "":           37_900,  # the root, bench.py too
    "audit":      27_700,
    "benches":    12_600,
    "checkpoint": 12_100,
    "devices":    23_100,
    "dialects":   10_900,
    "gateway":    12_400,
    "request":    17_600,
    "service":    16_300,
}
# fmt: on
MAX_MODULE = 750  # lines of a module of the root, theory included
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENCODING, tokenize.ENDMARKER}  # fmt: skip


def n_tokens(path: Path) -> int:
    docstrings: set[int] = set()  # lines
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    return sum(token.type not in NO_CODE and token.start[0] not in docstrings for token in tokens)


@pytest.mark.parametrize("folder", CAPS)
def test_a_folder_stays_small(folder: str) -> None:
    assert sum(map(n_tokens, (ROOT / folder).glob("*.py"))) <= CAPS[folder]


@pytest.mark.parametrize("name", SPINE)
def test_a_module_of_the_root_is_read_in_one_sitting(name: str) -> None:
    assert len(SPINE[name].read_text(encoding="utf-8").splitlines()) <= MAX_MODULE


# --- papers -------------------------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text(encoding="utf-8")


def readme_commands() -> list[list[str]]:
    """The words of each `python FILE ...` in README.md, up to the end of its code."""
    commands = re.findall(r"\bpython ((?:\S+\.py\b|-m audit)[^`\n&|;]*)", README)
    return [shlex.split(command) for command in commands]


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


def section(heading: str) -> str:
    """README.md from a heading to the next one that is not below it."""
    level = heading.split()[0]
    text = README.split(f"\n{heading}\n")[1]
    return re.split(rf"^#{{1,{len(level)}}} ", text, maxsplit=1, flags=re.MULTILINE)[0]


def files_in_the_tree() -> dict[str, set[str]]:
    """The files that README.md lists, by folder; "" for the root."""
    listed: dict[str, set[str]] = {"": set()}
    folder = ""
    for line in section("### The files").split("```")[1].splitlines():
        if match := re.match(r"(\w+)/ ", line):
            folder = match[1]
            listed[folder] = set()
        elif match := re.match(r"(?:    )?([\w.]+) ", line):
            listed[folder].add(match[1])
    return listed


def test_the_readme_lists_the_spine_and_every_chapter() -> None:
    """All modules, and other files where they are there."""
    listed = files_in_the_tree()
    assert listed.keys() == {"", *CHAPTERS}
    for folder, files in listed.items():
        modules = {path.name for path in (ROOT / folder).glob("*.py") if not path.name.startswith("__")}
        scripts = {f"{name}.py" for name in SCRIPTS}
        assert {name for name in files if name.endswith(".py")} == modules - scripts
        assert [name for name in files if not (ROOT / folder / name).is_file()] == []


def test_the_readme_says_how_long_the_spine_is() -> None:
    """Within a tenth; the lines that one request passes are the sum of the reading list."""
    claim = re.search(r"about ([\d,]+) lines of Python.*? passes ([\d,]+) of them", README, re.DOTALL)
    assert claim
    n_claimed, n_passed = (int(number.replace(",", "")) for number in claim.groups())
    n_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in SPINE.values())
    assert abs(n_lines - n_claimed) <= n_claimed / 10
    assert re.search(rf"^together +{n_passed} lines$", README, re.MULTILINE)


def glossary() -> Iterator[tuple[str, str]]:
    """(word, file that it stands in)"""
    for words, file in re.findall(r"^\| (.+?) \| \[([\w./]+)\]", section("### The words"), re.MULTILINE):
        for word in re.split(r", | \(", words):
            yield word.removesuffix(")"), file


@pytest.mark.parametrize(("word", "file"), list(glossary()))
def test_a_word_of_the_glossary_stands_in_its_file(word: str, file: str) -> None:
    """A search for the field's word leads to the place."""
    text = (ROOT / file).read_text(encoding="utf-8").casefold()
    assert word.casefold() in " ".join(text.split()), file


def test_the_readme_names_the_models_that_are_served() -> None:
    sentence, _, _ = section("### The models").partition("; unquantised")
    assert {*re.findall(r"`(\w+)`", sentence)} - {"model_type"} == FAMILIES.keys()


def test_the_readme_names_the_dialects_that_are_parsed() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", section("### The models"), re.MULTILINE)
    assert sorted(rows) == sorted(DIALECTS)


def test_numbers_in_the_readme_are_measured() -> None:
    """Each row of its table of speeds stands in results/, with date, device and versions above it."""
    rows = [line for line in README.splitlines() if re.search(r"\| \d+\.\d", line)]
    measured = (ROOT / "results" / "cpu.md").read_text(encoding="utf-8").splitlines()
    assert rows
    assert set(rows) <= set(measured)


def test_the_sizes_in_the_readme_are_measured() -> None:
    """Those of gpt-oss-20b, in the paragraph that names where they stand."""
    measured = re.findall(r"([\d.]+) GB", (ROOT / "results" / "shapes.md").read_text(encoding="utf-8"))
    rounded = {f"{float(size):.1f}" for size in measured}
    assert {*re.findall(r"([\d.]+) GB", section("### The models"))} <= rounded


def test_the_picture_of_the_events_is_drawn_from_their_table() -> None:
    assert pictures.PICTURE.read_text(encoding="utf-8") == pictures.events(), (
        "python tests/pictures.py draws it"
    )
