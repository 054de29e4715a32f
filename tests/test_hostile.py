"""hostile.py: what it makes of what it has measured; the attacks themselves are run by hand."""

import pytest

from helpers.attacks import ATTACKS, Reply
from helpers.serving import Json
from hostile import failed_goals
from service import options

CALM = {"calm, ms": 20.0, "pause, ms": 40.0, "ping, ms": 10.0, "sent, MB": 0.0, "memory, MB": 0.0,
        "answer": "right", "freed": "yes", "stop, s": 1.0, "tracebacks": 0}  # fmt: skip

# fmt: off
#   measured                                                        goals that it fails
ROWS: list[tuple[Json, list[str]]] = [
    ({},                                                            []),
    ({"pause, ms": 139, "ping, ms": 199},                           []),
    ({"pause, ms": 141},                                            ["pause, ms"]),
    ({"pause, ms": 190, "calm, ms": 100},                           []),
    ({"ping, ms": float("inf")},                                    ["ping, ms"]),
    ({"memory, MB": 140, "sent, MB": 8},                            []),
    ({"memory, MB": 150, "sent, MB": 8},                            ["memory, MB"]),
    ({"answer": "200", "freed": "3 files", "stop, s": 10},          ["answer", "freed", "stop, s"]),
    ({"tracebacks": 1},                                             ["tracebacks"]),
]
# fmt: on


@pytest.mark.parametrize(("measured", "failed"), ROWS)
def test_a_row_fails_the_goals_that_it_misses(measured: Json, failed: list[str]) -> None:
    assert failed_goals(ATTACKS[0], CALM | measured, calm_ms=40) == failed


def test_attacks_have_options_that_there_are() -> None:
    for attack in ATTACKS:
        options.arguments().parse_args([flag for flag in attack.flags if flag != "UPSTREAM"])


def test_a_refusal_is_short_and_in_our_words() -> None:
    assert Reply(400, b"expected a number").problem((400,)) == ""
    assert Reply(200, b"x" * 9000).problem((200, 400)) == ""
    assert Reply(400, b"x" * 9000).problem((200, 400)).startswith("400, 9000 bytes")
    assert Reply(400, b"panicked at lib.rs:1").problem((400,)) != ""
    assert Reply(500).problem((200, 400)).startswith("500, 0 bytes")
