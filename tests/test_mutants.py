"""The list of mutants has not rotted: all can be made, their tests exist, and two of them are killed here."""

import re
from pathlib import Path

import pytest

import index
import mutants

MUTANTS = list(mutants.mutants())
FAST = ["sse-bare-cr", "responses-item-id-changes-per-event"]  # the others: make mutants


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


@pytest.mark.parametrize("case", FAST)
def test_mutant_is_killed(case: str, tmp_path: Path) -> None:
    (mutant,) = (m for m in MUTANTS if f"[{case}]" in m.test)
    copy = mutants.copied(tmp_path)
    untouched = mutant._replace(old="import", new="import ")  # every module says so, once and more
    with pytest.raises(ValueError, match="expected this once"):
        mutants.mutated(untouched)
    assert mutants.status(mutant, copy) == mutants.KILLED
    assert (copy / f"{mutant.module}.py").read_bytes() == (mutants.ROOT / f"{mutant.module}.py").read_bytes()
