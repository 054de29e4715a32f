"""explore.py: no order of events breaks a law, and planted bugs have the stories of explored.toml."""

import pytest

import explore
from helpers.device_ops import sweep

STORIES: dict[str, list[object]] = explore.PLANTED["stories"]
BUGS = {bug.undoes: bug for bug in explore.bugs()}


@pytest.mark.parametrize("label", sweep(explore.CASES, explore.CASES.keys() - {"tails"}))
def test_no_order_of_events_breaks_a_law(label: str) -> None:
    result = explore.explore(explore.CASES[label])
    assert (result.story, result.n_left) == ([], 0), "\n".join(result.story)


@pytest.mark.parametrize("undoes", STORIES)
def test_the_story_of_a_planted_bug(undoes: str) -> None:
    """The shortest one has so many actions; a law that has been lost makes it longer, or there is none."""
    label, n_actions = STORIES[undoes]
    _, lines = explore.found(BUGS[undoes], str(label))
    assert len(lines) == n_actions, "\n".join(lines)


def test_all_planted_bugs_have_a_story() -> None:
    assert {bug.undoes for bug in BUGS.values() if not bug.test} <= STORIES.keys() <= BUGS.keys()


@pytest.mark.sweep
def test_a_million_states() -> None:
    assert sum(result.n_states for result in explore.explored(n_large=700_000)) > 1_000_000
