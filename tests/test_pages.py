"""pages.py under any order of take, register, share and release; what is kept, and what is lost first."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pages import OutOfPages, PagePool, PrefixHash, prefix_hash, root_hash

ROOT = root_hash("")
N = 4
HASHES = [prefix_hash(ROOT, [i]) for i in range(4)]


class Machine(RuleBasedStateMachine):
    """Page tables that share pages, beside a dictionary of what each page was last registered to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(N)
        self.tables: list[list[int]] = [[]]
        self.cached: dict[int, PrefixHash] = {}

    def users(self) -> Counter[int]:
        return Counter(page for table in self.tables for page in table)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        used = self.users()
        try:
            page = self.pool.take()
        except OutOfPages:
            assert len(used) == N
            return
        assert page not in used
        uncached = {*range(N)} - {*used, *self.cached}
        assert page in uncached or not uncached  # the cache is kept as long as can be
        self.cached.pop(page, None)
        table.append(page)

    @precondition(lambda self: self.users())
    @rule(data=st.data(), page_hash=st.sampled_from(HASHES))
    def register(self, data: st.DataObject, page_hash: PrefixHash) -> None:
        page = data.draw(st.sampled_from(sorted(self.users())))
        self.pool.register(page, page_hash)
        if page not in self.cached and page_hash not in self.cached.values():
            self.cached[page] = page_hash

    @rule(data=st.data(), page_hash=st.sampled_from(HASHES))
    def share(self, data: st.DataObject, page_hash: PrefixHash) -> None:
        page = self.pool.find(page_hash)
        assert {page: page_hash} == {p: h for p, h in self.cached.items() if h == page_hash} or page is None
        table = data.draw(st.sampled_from(self.tables))
        if page is not None and page not in table:
            self.pool.share(page)
            table.append(page)

    @rule()
    def new_table(self) -> None:
        self.tables.append([])

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.release(table)
        table.clear()

    @invariant()
    def a_page_is_free_or_used(self) -> None:
        used = self.users()
        assert self.pool.n_free == N - len(used)
        assert {*self.pool._free} == {*range(N)} - {*used}
        assert self.pool._n_users == [used[page] for page in range(N)]

    @invariant()
    def cached_is_what_was_registered_and_not_taken_again(self) -> None:
        assert {page_hash: page for page, page_hash in self.cached.items()} == self.pool._page_of
        assert self.cached == self.pool._hash_of


Machine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestPages = Machine.TestCase


def test_a_hash_is_that_of_the_whole_prefix() -> None:
    """Keys depend on all tokens before them: equal tokens after others are another page."""
    assert prefix_hash(ROOT, [1, 2]) == prefix_hash(ROOT, (1, 2))
    texts = [[1], [2], [1, 2], [513]]
    hashes = [prefix_hash(before, text) for before in (ROOT, *HASHES) for text in texts]
    assert len({*hashes}) == len(hashes)


def test_the_least_recently_used_is_forgotten_first_and_the_end_before_the_beginning() -> None:
    pool = PagePool(4)
    old, new = [pool.take(), pool.take()], [pool.take(), pool.take()]
    for page, page_hash in zip([*old, *new], HASHES, strict=True):
        pool.register(page, page_hash)
    pool.release(old)
    pool.release(new)
    for page in old:  # used once more
        pool.share(page)
    pool.release(old)
    lost = [pool.take() for _ in range(4)]
    assert lost == [*reversed(new), *reversed(old)]
    assert [pool.find(page_hash) for page_hash in HASHES] == [None] * 4
    with pytest.raises(OutOfPages):
        pool.take()
