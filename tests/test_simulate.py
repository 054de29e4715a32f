"""The simulator: a seed is a run, and a story is short."""

import subprocess
import sys

import pytest

from helpers.serving import ROOT


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tests/simulate.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.timeout(60)
def test_a_seed_is_a_run() -> None:
    """The same seed has the same trace, whatever the order of sets, and however busy the machine is."""
    one, other = (simulate("--seed", "5") for _ in range(2))
    assert one.returncode == 0, one.stdout + one.stderr
    assert one.stdout.splitlines()[0] == other.stdout.splitlines()[0]
