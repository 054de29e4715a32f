"""Every rule against our own server, which breaks none, and against a minimal one that is correct too."""

from collections.abc import Iterator

import pytest

from audit.peer import Peer
from audit.rules import RULES
from audit.session import Result, judge
from wire.minimal import minimal


@pytest.mark.parametrize("rule", RULES)
def test_rule(peer: Peer, rule: str) -> None:
    assert judge(peer, rule) == Result(rule, "pass")


@pytest.fixture(scope="module")
def minimal_peer() -> Iterator[Peer]:
    with minimal() as url:
        yield Peer(url, "minimal")


def test_a_minimal_server_is_not_accused(minimal_peer: Peer) -> None:
    """What it does not have it may refuse: then the rule does not apply; most rules do."""
    verdicts = {rule: judge(minimal_peer, rule).verdict for rule in RULES}
    assert {rule: verdict for rule, verdict in verdicts.items() if verdict not in ("pass", "n/a")} == {}
    assert [*verdicts.values()].count("pass") > 80
