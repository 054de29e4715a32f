"""The README and the tour show what becomes of one request and what it passes, as the modules are today."""

import subprocess
import sys

import one_step
import reading_list
import walkthrough

MAX_LINES = 65  # a page: a reader takes it in at once


def test_the_readme_shows_what_becomes_of_a_request() -> None:
    text = walkthrough.walkthrough()
    assert len(text.splitlines()) <= MAX_LINES
    readme = walkthrough.README.read_text(encoding="utf-8")
    assert readme == walkthrough.in_page(text), "python tests/walkthrough.py --write"


def test_the_readme_shows_one_step_of_the_engine() -> None:
    text = one_step.one_step()
    assert len(text.splitlines()) <= MAX_LINES
    readme = walkthrough.README.read_text(encoding="utf-8")
    assert readme == walkthrough.in_page(text, one_step.BEGIN, one_step.END), (
        "python tests/one_step.py --write"
    )


def test_the_tour_lists_what_one_request_passes() -> None:
    """In a process of its own, which a signal stops."""
    command = [sys.executable, reading_list.__file__]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    page = reading_list.PAGE.read_text(encoding="utf-8")
    expected = walkthrough.in_page(text, reading_list.BEGIN, reading_list.END, reading_list.PAGE)
    assert page == expected, "python tests/reading_list.py --write, and its sum in README.md"
