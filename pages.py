"""Whose page is whose: the pool of pages, and which of them hold a beginning that is known.

    take() --> a page, in use --name()--> known by its content --release()--> free, and still known
                      ^--------------------- find(), share() ---------------------'

Authority: paged attention (arXiv 2309.06180) and the automatic prefix caching that grew from it.

Rules of this file:
1. A page is in use by as many tables as it has users, or free; never both.
2. A page is named after its tokens and all before them, for keys and values depend on both. The name is a
   digest that nobody can find a second text for: one request never reads the keys of another text.
3. A free page keeps its name until it is taken. Those without a name go first, then the least recently used.

Not here: what is in the pages (model.py), which tokens may share one (engine.py).
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

Name = bytes
ROOT: Name = b""  # what stands before the first page


def name_of(before: Name, token_ids: Sequence[int]) -> Name:
    """The name of a page with these tokens after a page with that name."""
    return sha256(before + array("q", token_ids).tobytes()).digest()


class OutOfPages(Exception):
    """All pages are in use."""


class Pages:
    """The pages 0 to n - 1."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n))  # the next to be taken first
        self._users = [0] * n
        self._named: dict[Name, int] = {}
        self._names: dict[int, Name] = {}  # the same, the other way round

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A page for one user; raises OutOfPages."""
        if not self._free:
            raise OutOfPages
        page, _ = self._free.popitem(last=False)
        if (name := self._names.pop(page, None)) is not None:
            del self._named[name]
        self._users[page] = 1
        return page

    def name(self, page: int, name: Name) -> None:
        """Say what a page in use holds; the first page of a name keeps it."""
        if page not in self._names and name not in self._named:
            self._named[name] = page
            self._names[page] = name

    def find(self, name: Name) -> int | None:
        return self._named.get(name)

    def is_used(self, name: Name) -> bool:
        return name in self._named and self._named[name] not in self._free

    def share(self, page: int) -> None:
        """One user more for a page that was found."""
        self._users[page] += 1
        self._free.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One user less for each page of a table; later pages are freed first, so that a page outlives
        those that depend on it.
        """
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None
                self._free.move_to_end(page, last=page in self._names)
