"""A planted fault for every rule: behind a server that misbehaves by script, its rule fails, and says so."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from audit import rules
from audit.checks import CHECKS
from audit.peer import Failed, Peer
from helpers.serving import Server, serve
from wire.conftest import ENDLESS, KEY
from wire.foreign import misbehaving

HERE = Path(__file__).parent
PATHS = {"responses": "POST /v1/responses", "chat": "POST /v1/chat"}


def faults() -> dict[str, dict[str, Any]]:
    """A fault for each rule: of a rule on one stream it is the first one in tests/faults.toml."""
    by_rule = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))
    of_streams = tomllib.loads((HERE.parent / "faults.toml").read_text(encoding="utf-8"))
    for rule, (first, *_) in of_streams.items():
        when = PATHS[first["stream"]] + '.*"stream": true'
        by_rule[rule] = {"when": when, "joined": True, "reply": [first["old"], first["new"]]}
    return by_rule


FAULTS = faults()


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serve("--api-key", KEY) as server:
        yield server


def test_every_rule_has_a_fault() -> None:
    assert FAULTS.keys() == CHECKS.keys()


def test_the_readme_counts_the_rules() -> None:
    readme = (HERE.parent.parent / "README.md").read_text(encoding="utf-8")
    assert f"holds {len(CHECKS)} rules against" in readme


@pytest.mark.parametrize("rule", CHECKS)
def test_a_planted_fault_is_named(ours: Server, rule: str) -> None:
    with misbehaving(ours.url, FAULTS[rule]) as url, pytest.raises(Failed) as failure:
        CHECKS[rule].run(Peer(url, "tiny", KEY, long=ENDLESS))
    assert failure.value.excerpt, "what shows it is quoted"


def test_a_server_without_a_fault_is_not_accused(ours: Server) -> None:
    """The server between is not what fails: without a fault in it every rule passes."""
    with misbehaving(ours.url, {"when": "$^"}) as url:
        peer = Peer(url, "tiny", KEY, long=ENDLESS)
        for rule in CHECKS.keys() - rules.RULES.keys() | {"sums", "finish-reason"}:
            CHECKS[rule].run(peer)
