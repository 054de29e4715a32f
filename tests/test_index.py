"""The index of bugs is what the tests say, and they say nothing of bugs that there are not."""

import re

import index


def test_the_index_is_made_of_the_tests() -> None:
    written = (index.TESTS / "BUGS.md").read_text(encoding="utf-8")
    assert written == index.index(), "python tests/index.py writes it anew"


def test_every_bug_that_is_named_is_listed() -> None:
    assert {id_ for id_, _ in (*index.replays(), *index.wire_rules())} <= index.bugs().keys()


def test_every_bug_has_a_link_and_a_rule() -> None:
    for name, link, rule in index.bugs().values():
        assert re.fullmatch(r"[a-z0-9-]+", name)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+/(issues|pull)/\d+|[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/\S+", link)
        assert rule
        assert "|" not in rule


def test_every_replay_of_a_report_names_its_bug() -> None:
    """The others replay a rule: their source is the rule itself."""
    for path, fields in index.files():
        is_report = re.search(r"github\.com/[\w.-]+/[\w.-]+/(issues|pull)/", fields["source"])
        assert fields.get("bug", "").split() if is_report else fields.get("bug") != "", path.name


def test_the_readme_tells_how_many() -> None:
    """Its sentence is the last line of the index."""
    tally = index.index().splitlines()[-1]
    readme = (index.TESTS.parent / "README.md").read_text(encoding="utf-8")
    assert tally.removesuffix(".") in " ".join(readme.split())
