"""Every rule against our own server, which breaks none, and against a minimal one that is correct too."""

from collections.abc import Iterator

import pytest

from audit.peer import Peer
from audit.rules import RULES
from audit.session import Result, chosen, judge
from wire.minimal import minimal


@pytest.mark.parametrize("rule", RULES)
def test_rule(peer: Peer, rule: str) -> None:
    result = judge(peer, rule)
    assert result == Result(rule, "pass")


@pytest.fixture(scope="module")
def minimal_peer() -> Iterator[Peer]:
    with minimal() as url:
        yield Peer(url, "minimal")


@pytest.mark.parametrize("rule", RULES)
def test_a_minimal_server_is_not_accused(minimal_peer: Peer, rule: str) -> None:
    """What it does not have it may refuse: then the rule does not apply."""
    result = judge(minimal_peer, rule)
    assert result.verdict in ("pass", "n/a"), result


def test_most_rules_of_the_two_apis_apply_to_a_minimal_server(minimal_peer: Peer) -> None:
    names = chosen("chat", ["*"]) + chosen("responses", ["*"])
    verdicts = [judge(minimal_peer, name).verdict for name in names]
    assert verdicts.count("pass") > 60
