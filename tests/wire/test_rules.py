"""Every rule against our own server: none is broken, and each of them applies."""

import pytest

from audit.checks import CHECKS
from audit.peer import Peer
from audit.session import Result, judge


@pytest.mark.parametrize("rule", CHECKS)
def test_rule(peer: Peer, rule: str) -> None:
    assert judge(peer, rule) == Result(rule, "pass")
