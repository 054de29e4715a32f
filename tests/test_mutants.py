"""The list of mutants has not rotted: all can be made, and their tests exist. A few are run here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import index
import mutants

MUTANTS = list(mutants.mutants())


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.module}-{m.undoes}" for m in MUTANTS])
def test_mutant_can_be_made(mutant: mutants.Mutant) -> None:
    compile(mutants.mutated(mutant), mutant.module, "exec")
    path, _, name = mutant.test.partition("::")
    source = (mutants.ROOT / path).read_text(encoding="utf-8")
    function, _, case = name.partition("[")
    assert not function or f"def {function}(" in source
    if function == "test_replay":
        assert (index.TESTS / "replays" / (case.rstrip("]") + ".toml")).is_file()
    if re.fullmatch("[A-Z][0-9]{2}", mutant.undoes):
        assert mutant.undoes in index.bugs()


def test_every_name_in_a_mutant_exists(tmp_path: Path) -> None:
    """A mutant that ends in a NameError fails any test, and brings no bug back."""
    for number, mutant in enumerate(MUTANTS):
        path = tmp_path / f"{mutant.module.replace('/', '_')}_{number}.py"
        path.write_text(mutants.mutated(mutant), encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823", str(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def mutant_of(case: str) -> mutants.Mutant:
    """The only mutant whose test is this replay."""
    (mutant,) = (m for m in MUTANTS if f"[{case}]" in m.test)
    return mutant


# fmt: off
#  instead of what the mutant does: CR alone ends no line      verdict
CHANGES = [
    (mutant_of("sse-bare-cr").new,                             mutants.KILLED),
    (r'LINE_END = re.compile(rb"\r\n|\r|\n")',                 mutants.SURVIVED),     # it means the same
    (r'LINE_END = re.compile(rb"\r\n|\n|\r|l")',               mutants.ANOTHER_BUG),  # `was` tells of CR
    ('LINE_END = re.compile(rb"[")',                           "NOT RUN"),
]
# fmt: on


@pytest.mark.parametrize(("new", "verdict"), CHANGES)
def test_another_bug_is_told_from_this_one(new: str, verdict: str, tmp_path: Path) -> None:
    mutant = mutant_of("sse-bare-cr")._replace(new=new)
    copy = mutants.copied(tmp_path)
    assert mutants.outcome(mutant, copy).verdict.startswith(verdict)
    assert (copy / "sse.py").read_bytes() == (mutants.ROOT / "sse.py").read_bytes()


def test_what_stands_twice_is_no_mutant() -> None:
    with pytest.raises(ValueError, match="expected this once"):
        mutants.mutated(MUTANTS[0]._replace(old="import", new="import "))


def test_every_documented_bug_has_a_mutant() -> None:
    """Without one we would not know whether any test notices when the bug comes back."""
    assert index.bugs().keys() - {mutant.undoes for mutant in MUTANTS} == set()
