"""The README and the tour show what becomes of one request and what it passes, as the modules are today."""

from types import ModuleType

import pytest

import one_step
import reading_list
import walkthrough
from helpers.limits import PATIENCE_S
from helpers.serving import run

MAX_LINES = 65  # a page: a reader takes it in at once


@pytest.mark.parametrize("script", [walkthrough, one_step], ids=lambda script: script.__name__)
def test_the_readme_shows_the_data(script: ModuleType) -> None:
    text = getattr(script, script.__name__)()
    assert len(text.splitlines()) <= MAX_LINES
    readme = walkthrough.README.read_text(encoding="utf-8")
    assert readme == walkthrough.in_page(text, script.__name__), f"python {script.__file__} --write"


def test_the_tour_lists_what_one_request_passes() -> None:
    """In a process of its own, which a signal stops."""
    text = run(reading_list.__file__, check=True, timeout=4 * PATIENCE_S).stdout
    expected = walkthrough.in_page(text, "reading_list", reading_list.PAGE)
    page = reading_list.PAGE.read_text(encoding="utf-8")
    assert page == expected, "python tests/reading_list.py --write, and its sum in README.md"
