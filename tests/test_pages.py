"""pages.py under any sequence of takes, shares, names and releases; what is kept, and what is lost first."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pages import ROOT, Name, OutOfPages, Pages, name_of

N = 4
NAMES = [name_of(ROOT, [i]) for i in range(4)]


class Machine(RuleBasedStateMachine):
    """Tables that share pages, beside a dictionary that knows what each page was last said to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(N)
        self.tables: list[list[int]] = [[]]
        self.holds: dict[int, Name] = {}

    def users(self) -> Counter[int]:
        return Counter(page for table in self.tables for page in table)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        used = self.users()
        try:
            page = self.pages.take()
        except OutOfPages:
            assert len(used) == N
            return
        assert page not in used
        unnamed = {*range(N)} - {*used, *self.holds}
        assert page in unnamed or not unnamed  # what is known is kept as long as can be
        self.holds.pop(page, None)
        table.append(page)

    @precondition(lambda self: self.users())
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def name(self, data: st.DataObject, name: Name) -> None:
        page = data.draw(st.sampled_from(sorted(self.users())))
        self.pages.name(page, name)
        if page not in self.holds and name not in self.holds.values():
            self.holds[page] = name

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def share(self, data: st.DataObject, name: Name) -> None:
        page = self.pages.find(name)
        assert {page: name} == {p: n for p, n in self.holds.items() if n == name} or page is None
        table = data.draw(st.sampled_from(self.tables))
        if page is not None and page not in table:
            self.pages.share(page)
            table.append(page)

    @rule()
    def new_table(self) -> None:
        self.tables.append([])

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pages.release(table)
        table.clear()

    @invariant()
    def a_page_is_free_or_used(self) -> None:
        used = self.users()
        assert self.pages.n_free == N - len(used)
        assert {*self.pages._free} == {*range(N)} - {*used}
        assert self.pages._users == [used[page] for page in range(N)]

    @invariant()
    def known_is_what_was_named_and_not_taken_again(self) -> None:
        assert {name: page for page, name in self.holds.items()} == self.pages._named
        assert self.holds == self.pages._names


Machine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestPages = Machine.TestCase


def test_a_name_is_that_of_the_whole_beginning() -> None:
    """Keys depend on all tokens before them: equal tokens behind others are another page."""
    assert name_of(ROOT, [1, 2]) == name_of(ROOT, (1, 2))
    names = [
        name_of(before, token_ids) for before in (ROOT, *NAMES) for token_ids in ([1], [2], [1, 2], [513])
    ]
    assert len({*names}) == len(names)


def test_the_least_recently_used_is_forgotten_first_and_the_end_before_the_beginning() -> None:
    pages = Pages(4)
    old, new = [pages.take(), pages.take()], [pages.take(), pages.take()]
    for page, name in zip([*old, *new], NAMES, strict=True):
        pages.name(page, name)
    pages.release(old)
    pages.release(new)
    for page in old:  # used once more
        pages.share(page)
    pages.release(old)
    lost = [pages.take() for _ in range(4)]
    assert lost == [*reversed(new), *reversed(old)]
    assert [pages.find(name) for name in NAMES] == [None] * 4
    with pytest.raises(OutOfPages):
        pages.take()
