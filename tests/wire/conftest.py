"""The command line of `pytest tests/wire`, the server it is about, and the table at its end."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from audit.members import shortened
from helpers.serving import TINY, serve
from wire.checks import CHECKS
from wire.peer import Peer

RESULTS = pytest.StashKey[dict[str, tuple[str, str]]]()  # rule -> (result, what shows it)
EOS = json.loads((TINY / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
ENDLESS = {"logit_bias": {str(token_id): -100 for token_id in EOS}}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("wire", "a server to hold the rules against")
    group.addoption(
        "--base-url", help="address, such as http://localhost:8000/v1; without it: our own server"
    )
    group.addoption("--model", help="the name of its model", default="default")
    group.addoption("--api-key", help="sent as a bearer token", default="")
    group.addoption("--long", help="JSON: members of a body that make an answer long", default="{}")
    group.addoption("--report", help="a file for the table, in Markdown", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = {}


@pytest.fixture(scope="session")
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """The server."""
    option = request.config.getoption
    if url := option("--base-url", None):
        yield Peer(url, option("--model"), option("--api-key"), json.loads(option("--long")))
        return
    with serve() as ours:
        yield Peer(ours.url + "/v1", "tiny", long=ENDLESS)


@pytest.fixture
def is_foreign(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--base-url", None))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    results = config.stash[RESULTS]
    if not results or not config.getoption("--base-url", None):
        return
    terminalreporter.section("rules")
    for rule, (result, shown) in results.items():
        check = CHECKS[rule]
        terminalreporter.line(f"{rule:22} {result:5} {check.bugs:24} {check.title}")
        details = [*shown.splitlines(), check.link] if result == "FAIL" else shown[:200].splitlines()
        for line in details:
            terminalreporter.line(f"    {line}")
    terminalreporter.line(tally(results))
    if path := config.getoption("--report"):
        Path(path).write_text(markdown(results), encoding="utf-8")


def tally(results: dict[str, tuple[str, str]]) -> str:
    verdicts = [verdict for verdict, _ in results.values()]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in ("pass", "FAIL", "n/a")]
    return f"{len(verdicts)} rules: {', '.join(counts)}"


def markdown(results: dict[str, tuple[str, str]]) -> str:
    lines = ["| rule | result | bugs | what shows it |", "|---|---|---|---|"]
    for rule, (result, shown) in results.items():
        cell = " ".join(shortened(shown, 400).replace("|", "\\|").replace("`", "'").split())
        if cell:
            cell = f"`{cell}`"
        lines.append(f"| {rule}: {CHECKS[rule].title} | {result} | {CHECKS[rule].bugs} | {cell} |")
    return "\n".join([*lines, "", tally(results) + ".", ""])
