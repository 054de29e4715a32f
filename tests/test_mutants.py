"""The lists of mutants have not rotted: all can be made, and their tests exist. A few are run here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import index
import mutants

MUTANTS = [*mutants.mutants(), *mutants.mutants("planted.toml")]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.module}-{m.undoes}" for m in MUTANTS])
def test_mutant_can_be_made(mutant: mutants.Mutant) -> None:
    text = mutants.mutated(mutant)
    if mutant.file.endswith(".py"):
        compile(text, mutant.module, "exec")
    path, _, name = mutant.test.partition("::")
    function, _, case = name.partition("[")
    assert not function or f"def {function}(" in (mutants.ROOT / path).read_text(encoding="utf-8")
    if function == "test_replay":
        assert (index.TESTS / "replays" / (case.rstrip("]") + ".toml")).is_file()


def test_every_name_in_a_mutant_exists(tmp_path: Path) -> None:
    """A mutant that ends in a NameError fails any test, and brings no bug back."""
    for number, mutant in enumerate(MUTANTS):
        path = tmp_path / f"{number}_{mutant.file.replace('/', '_')}"
        path.write_text(mutants.mutated(mutant), encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823", str(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_every_documented_bug_has_a_mutant() -> None:
    """Without one we would not know whether any test notices when the bug comes back."""
    undone = {mutant.undoes for mutant in MUTANTS}
    assert {name for name in undone if re.fullmatch("[A-Z][0-9]{2}", name)} == index.bugs().keys()


(BARE_CR,) = (mutant for mutant in MUTANTS if "[sse-bare-cr]" in mutant.test)
#  instead of what the mutant does: CR alone ends no line      verdict
CHANGES = [
    (BARE_CR.new,                                              mutants.KILLED),
    (r'LINE_END = re.compile(rb"\r\n|\r|\n")',                 mutants.SURVIVED),     # it means the same
    (r'LINE_END = re.compile(rb"\r\n|\n|\r|l")',               mutants.ANOTHER_BUG),  # `was` tells of CR
    ('LINE_END = re.compile(rb"[")',                           "NOT RUN"),
    (BARE_CR.old,                                              "CANNOT BE MADE"),
]  # fmt: skip


@pytest.mark.sweep
def test_another_bug_is_told_from_this_one() -> None:
    verdicts = [mutants.outcome(BARE_CR._replace(new=new))[0] for new, _ in CHANGES]
    assert [verdict.partition(" (")[0] for verdict in verdicts] == [verdict for _, verdict in CHANGES]
