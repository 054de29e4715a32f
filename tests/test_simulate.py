"""The simulator: a seed is a run, no law breaks, and a planted bug is found and told in a short story."""

import pytest

from helpers.device_ops import sweep
from helpers.serving import run

pytestmark = pytest.mark.timeout(600)  # of a busy machine; on a quiet one they take half a minute


def test_a_seed_is_a_run() -> None:
    """The same seed has the same trace, whatever the order of sets, and however busy the machine is.

    In this one a process is killed, the next one finds a row that is damaged, and its store's file is cut.
    """
    one, other = (run("tests/simulate.py", "--seed", "76", timeout=None) for _ in range(2))
    assert one.returncode == 0, one.stdout + one.stderr
    assert one.stdout.splitlines()[0] == other.stdout.splitlines()[0]


@pytest.mark.bug("F01", "F02", "F03", "F04", "F05", "F09", "F12", "I01", "I02", "M14", "P09")
@pytest.mark.parametrize("n_seeds", sweep([150, 300], [150]))
def test_no_law_breaks(n_seeds: int) -> None:
    """The first run that breaks one prints its story.

    Bugs of others that it finds: a run without an end; a reader that waits for ever; a cancel that stops
    nothing; an accepted response that fails because no upstream has been reached yet; a resumed stream that
    repeats an event; a response that is not stored though its last event has been seen; work that goes on
    for a client that has left, amid a stream or before an answer; a lane of a WebSocket that forgets what it
    can continue.
    """
    ended = run("tests/simulate.py", "--seeds", str(n_seeds), "-n", "2", "--first-only", timeout=None)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "'upstream: whole': " in ended.stdout  # bug: none was ever reached, and no law was broken by that
