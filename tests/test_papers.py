"""What the README and docs/ say is there: commands, links, functions, files, figures."""

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest

import pictures
from benches.decoding import SHAPES, op_bytes
from checkpoint.config import FAMILIES, parse_config
from checkpoint.weights import n_weight_bytes
from dialects.families import DIALECTS
from helpers.serving import ROOT, run
from test_layout import CHAPTERS, SCRIPTS, SPINE, tree

PAGES = [
    ROOT / "README.md",
    *(path for name in ("audit", "docs", "course") for path in (ROOT / name).glob("*.md")),
]
README, TOUR, OPERATING, PERFORMANCE = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/reading.md", "docs/operating.md", "docs/performance.md")
)
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
COMMANDS = re.findall(r"\bpython ((?:\S+\.py\b|-m audit)[^`\n&|;]*)", TEXT)
MAX_README = 260  # lines


def test_what_is_installed_is_what_there_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    data = project["tool"]["setuptools"]["package-data"]["llmref"]
    folders = {pattern.partition("/")[0] for pattern in data if "/" in pattern}
    assert folders == {*CHAPTERS, "benches", "course", "docs", "results", "tests"}


def test_the_readme_is_short_and_starts_in_one_command() -> None:
    assert len(README.splitlines()) <= MAX_README
    for extra in ("fast]' && python server.py", "dev]' && pytest -n auto"):
        assert README.count(f"pip install -e '.[{extra}") == 1


@cache
def flags_of(*program: str) -> set[str]:
    """Return the flags that a command's help lists."""
    ended = run(*program, "--help")
    assert ended.returncode == 0, ended.stderr
    return {*re.findall(r"(?<![\w-])--[a-z][a-z-]*", ended.stdout)}


@pytest.mark.parametrize("words", sorted({command.strip() for command in COMMANDS if " " in command.strip()}))
def test_commands_exist(words: str) -> None:
    found = re.match(r"-m \w+|bench.py \S+|\S+", words)
    assert found
    assert {*re.findall(r"--[a-z][a-z-]*", words)} <= flags_of(*found[0].split())


@pytest.mark.parametrize("program", [["server.py"], ["bench.py"], ["-m", "course"]])
def test_a_start_without_its_packages_says_what_to_install(program: list[str]) -> None:
    """-S: as in a Python where nothing is installed."""
    ended = run("-S", *program)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: expected Python 3.11 or later, and its packages: pip install")
    assert ended.stderr.count("\n") == 1


def test_the_package_has_the_commands_of_the_checkout() -> None:
    assert run(".", "--version").stdout == run("server.py", "--version").stdout
    for command in ("audit", "bench", "course"):
        assert f"llmref {command}" in run(".", command, *([] if command == "course" else ["--help"])).stdout
    refused = run("server.py", "--port", "0", "--store", "/no/such/store")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --store /no/such/store: ")


def test_links_lead_to_files_that_exist() -> None:
    for page in PAGES:
        links = re.findall(r"\]\(([\w./-]+)\)", page.read_text(encoding="utf-8"))
        assert [(page, link) for link in links if not (page.parent / link).exists()] == []


def functions(body: list[ast.stmt]) -> Iterator[str]:
    """The names in a module: `function`, `Class`, `Class.method`."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            yield from (f"{node.name}.{name}" for name in functions(node.body))


def test_functions_that_are_named_exist() -> None:
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", TEXT)
    assert named
    assert [pair for pair in named if pair[1] not in functions(tree(ROOT / pair[0]).body)] == []


def test_the_readme_quotes_the_way_of_a_token() -> None:
    source = (ROOT / "jobs.py").read_text(encoding="utf-8")
    functions = (node for node in ast.walk(tree(ROOT / "jobs.py")) if isinstance(node, ast.FunctionDef))
    (take,) = (node for node in functions if node.name == "take")
    assert textwrap.dedent(ast.get_source_segment(source, take, padded=True) or "") in README
    assert len(take.body) <= 15


def test_the_readme_and_the_tour_list_the_spine_in_the_same_words() -> None:
    readme, tour = (re.findall(r"^(\w+\.py) +([a-z].+)$", text, re.MULTILINE) for text in (README, TOUR))
    assert readme == tour
    assert {name for name, _ in tour} == {f"{name}.py" for name in SPINE.keys() - SCRIPTS}


def test_the_tour_lists_every_chapter() -> None:
    """A line `folder/`, then a line for each file in it."""
    blocks = re.split(r"^(\w+)/ ", TOUR.split("```")[1], flags=re.MULTILINE)[1:]
    listed = {
        folder: re.findall(r"^    ([\w.]+) ", lines, re.MULTILINE)
        for folder, lines in zip(blocks[::2], blocks[1::2], strict=True)
    }
    assert listed.keys() == {*CHAPTERS}
    for folder, files in listed.items():
        modules = {path.name for path in (ROOT / folder).glob("*.py") if not path.name.startswith("__")}
        assert {name for name in files if name.endswith(".py")} == modules
        assert [name for name in files if not (ROOT / folder / name).is_file()] == []


def test_the_readme_says_how_long_the_spine_is() -> None:
    """Within a tenth; the tokens that one request passes are the sum in the tour."""
    claim = re.search(r"about ([\d,]+) lines of Python.*?root is ([\d,]+)\nPython tokens", README, re.DOTALL)
    assert claim
    n_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in SPINE.values())
    n_claimed = int(claim[1].replace(",", ""))
    assert abs(n_lines - n_claimed) <= n_claimed / 10
    assert re.search(rf"^the root +{claim[2]} tokens above the folds", TOUR, re.MULTILINE)


def test_the_models_and_dialects_are_named() -> None:
    """Each architecture that is served, and each dialect that is parsed."""
    assert [name for name in {*FAMILIES, *DIALECTS} if f"`{name}`" not in OPERATING] == []


def test_figures_are_measured() -> None:
    """Each row of figures stands in results/, with date, machine and versions above it."""
    rows = {line for line in PERFORMANCE.splitlines() if re.search(r"\| \d+\.\d", line)}
    results = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "results").glob("*.md"))
    assert rows
    assert rows <= {*results.splitlines()}


def test_the_sizes_of_gpt_oss_are_those_of_its_weights() -> None:
    config = parse_config(SHAPES["gpt-oss-20b"], {})
    of_ops = op_bytes(config, 1, 0, packed=1)
    sizes = {f"{n_bytes / 1e9:.1f}" for n_bytes in (n_weight_bytes(config), sum(of_ops.values()))}
    assert {*re.findall(r"([\d.]+) GB", OPERATING)} <= sizes


def test_the_picture_of_the_events_is_drawn_from_their_table() -> None:
    drawn = pictures.PICTURE.read_text(encoding="utf-8")
    assert drawn == pictures.events(), "python tests/pictures.py draws it"
