"""README.md shows what becomes of one request, and one step, as the modules make it today."""

import one_step
import walkthrough

MAX_LINES = 65  # a page: a reader takes it in at once


def test_the_readme_shows_what_becomes_of_a_request() -> None:
    text = walkthrough.walkthrough()
    assert len(text.splitlines()) <= MAX_LINES
    readme = walkthrough.README.read_text(encoding="utf-8")
    assert readme == walkthrough.in_readme(text), "python tests/walkthrough.py --write"


def test_the_readme_shows_one_step_of_the_engine() -> None:
    text = one_step.one_step()
    assert len(text.splitlines()) <= MAX_LINES
    readme = walkthrough.README.read_text(encoding="utf-8")
    expected = walkthrough.in_readme(text, one_step.BEGIN, one_step.END)
    assert readme == expected, "python tests/one_step.py --write"
