"""hostile.py: what it makes of what it has measured; the attacks themselves are run by hand."""

import pytest

from helpers.attacks import ATTACKS, Client
from hostile import Result, cells, markdown
from service import options

CALM = Result("calm", pause_ms=40, ping_ms=10, stop_s=1)


# fmt: off
#   measured                                              goals that it fails
ROWS = [
    ({},                                                  []),
    ({"pause_ms": 139, "ping_ms": 199},                   []),
    ({"pause_ms": 141},                                   ["pause"]),
    ({"pause_ms": 190, "calm_ms": 100},                   []),
    ({"ping_ms": 201},                                    ["ping"]),
    ({"memory_mb": 140, "sent_mb": 8},                    []),
    ({"memory_mb": 150, "sent_mb": 8},                    ["memory"]),
    ({"answer": "200", "freed": "3 files", "stop_s": 10}, ["answer", "freed", "stop"]),
    ({"n_failures": 1},                                   ["victim"]),
]
# fmt: on


@pytest.mark.parametrize(("measured", "failed"), ROWS)
def test_a_row_fails_the_goals_that_it_misses(measured: dict[str, float], failed: list[str]) -> None:
    assert Result("attack", **measured).failed_goals(calm_ms=40) == failed  # type: ignore[arg-type]


def test_the_table_shows_another_server_beside() -> None:
    rows = [CALM, Result("long-prompt", pause_ms=50), Result("wire", answer="a|b\n c")]
    before = [CALM, Result("long-prompt", pause_ms=9000, ping_ms=20)]
    text = markdown(rows, before, "about")
    assert "2 of 3 rows pass" in text
    assert "| long-prompt | 50 (0) |" in text
    assert "| 9000 | 20 | 0 | fails: pause |" in text
    assert "a\\|b c" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert cells(CALM, 40)[-1] == "pass"


def test_attacks_have_names_of_their_own_and_options_that_there_are() -> None:
    names = [attack.name for attack in ATTACKS]
    assert names[0] == "calm"
    assert len(set(names)) == len(names)
    for attack in ATTACKS:
        flags = [flag for flag in attack.flags if flag != "UPSTREAM"]
        options.arguments().parse_args(flags)


def test_an_attacker_whom_nobody_answers_goes_on() -> None:
    assert Client("http://127.0.0.1:1").post("/v1/responses", {}).expect(200) == "no answer"
