"""Every rule against the server: a test a rule, and what is not applicable to a foreign server is skipped."""

import pytest

from wire.checks import CHECKS
from wire.conftest import RESULTS
from wire.peer import Failed, NotApplicable, Peer


@pytest.mark.timeout(600)  # for a foreign server on a slow machine
@pytest.mark.parametrize("rule", CHECKS)
def test_rule(peer: Peer, rule: str, is_foreign: bool, pytestconfig: pytest.Config) -> None:
    results = pytestconfig.stash[RESULTS]
    try:
        CHECKS[rule].run(peer)
    except Failed as error:
        results[rule] = "FAIL", str(error)
        raise
    except NotApplicable as error:
        results[rule] = "n/a", str(error)
        if is_foreign:
            pytest.skip(str(error))
        raise  # every rule applies to ours
    results[rule] = "pass", ""
