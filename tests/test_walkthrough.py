"""README.md shows what becomes of one request, and it is what the modules make of it today."""

import walkthrough

MAX_LINES = 65  # a page: a reader takes it in at once


def test_the_readme_shows_what_becomes_of_a_request() -> None:
    text = walkthrough.walkthrough()
    assert len(text.splitlines()) <= MAX_LINES
    readme = walkthrough.README.read_text(encoding="utf-8")
    assert readme == walkthrough.in_readme(text), "python tests/walkthrough.py --write"
