"""hostile.py: what it makes of what it has measured; the attacks themselves are run by hand."""

import pytest

from helpers.attacks import ATTACKS, NO_REPLY, problem
from helpers.serving import Json, Reply
from hostile import failed_goals
from service import options

CALM = {"calm, ms": 20.0, "pause, ms": 40.0, "ping, ms": 10.0, "sent, MB": 0.0, "memory, MB": 0.0,
        "answer": "right", "freed": "yes", "stop, s": 1.0, "tracebacks": 0}  # fmt: skip
ROWS: list[tuple[Json, list[str]]] = [
    # measured                                           goals that it fails
    ({"pause, ms": 139, "ping, ms": 199},                []),
    ({"pause, ms": 141, "ping, ms": float("inf")},       ["pause, ms", "ping, ms"]),
    ({"pause, ms": 190, "calm, ms": 100},                []),
    ({"memory, MB": 140, "sent, MB": 8},                 []),
    ({"memory, MB": 150, "sent, MB": 8},                 ["memory, MB"]),
    ({"answer": "200", "freed": "3 files", "stop, s": 10, "tracebacks": 1},
     ["answer", "freed", "stop, s", "tracebacks"]),
]  # fmt: skip


@pytest.mark.parametrize(("measured", "failed"), ROWS)
def test_a_row_fails_the_goals_that_it_misses(measured: Json, failed: list[str]) -> None:
    assert failed_goals(ATTACKS[0], CALM | measured, calm_ms=40) == failed


def test_attacks_have_options_that_there_are() -> None:
    for attack in ATTACKS:
        options.arguments().parse_args([flag for flag in attack.flags if flag != "UPSTREAM"])


def test_a_refusal_is_short_and_in_our_words() -> None:
    assert problem(Reply(400, {}, b"expected a number"), (400,)) == ""
    assert problem(Reply(200, {}, b"x" * 9000), (200, 400)) == ""
    for body in (b"x" * 9000, b"panicked at lib.rs:1"):
        assert problem(Reply(400, {}, body), (200, 400)).startswith(f"400, {len(body)} bytes")
    assert problem(NO_REPLY, (200,)) == "0, 0 bytes: "
