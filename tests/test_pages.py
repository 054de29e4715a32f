"""pages.py: hashes, and what is lost first. Its laws under any order of events are in explore.py."""

import pytest

from pages import OutOfPages, PagePool, prefix_hash, root_hash

ROOT = root_hash("")
HASHES = [prefix_hash(ROOT, [i]) for i in range(4)]


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
