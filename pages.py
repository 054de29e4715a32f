"""The pool of KV cache pages (PagedAttention), and the prefix cache: full pages that can be used again.

    take() --> a page in use --register()--> found by its prefix hash --release()--> free, and still found
                     ^----------------------- find(), share() --------------------------'

Authority: PagedAttention, https://arxiv.org/abs/2309.06180; automatic prefix caching, and cache isolation by
a salt, which is the owner (the API key) here, https://docs.vllm.ai/en/latest/design/prefix_caching.html.

Rules of this file:
1. The users of a page are the page tables that contain it. A page without users is free.
2. Keys and values depend on a token and all tokens before it, and so does the hash of a page. The hash is
   cryptographic: no client can make a second text with the same hash, and read the keys of another text.
3. Only its owner can find a page: `cached_tokens` would reveal the prompts of others, page by page.
4. A free page stays in the prefix cache until it is taken. Free pages that are not in the cache are taken
   first, then the least recently used.

Why hashes of pages, and not a radix tree over tokens as in SGLang: a tree shares beginnings to the token, but
needs nodes that split, and a lock or count on each. A page of 64 tokens loses at most 63 of a shared
beginning. The engine's thread alone calls the pool: it has no lock.
"""

from array import array
from collections import OrderedDict
from collections.abc import KeysView, Sequence
from hashlib import sha256

PrefixHash = bytes


class PagePool:
    """The pages 0 to n_pages - 1."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        # Free pages in the order in which they will be taken, an ordered set.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_pages))
        self._n_users = [0] * n_pages  # page tables that hold the page
        self._page_of: dict[PrefixHash, int] = {}  # the prefix cache
        self._hash_of: dict[int, PrefixHash] = {}  # the same, page to hash

    def take(self) -> int:
        """Allocate a page to one sequence, and drop it from the prefix cache. Raises OutOfPages."""
        if not self._free:
            raise OutOfPages
        page, _ = self._free.popitem(last=False)
        evicted_hash = self._hash_of.pop(page, None)
        if evicted_hash is not None:
            del self._page_of[evicted_hash]
        self._n_users[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Take a user from each page of a page table.

        Later pages are freed first, and so taken first: a page is useless without the pages before it.
        """
        for page in reversed(pages):
            self._n_users[page] -= 1
            if self._n_users[page]:
                continue
            self._free[page] = None
            if page not in self._hash_of:
                self._free.move_to_end(page, last=False)  # taken first: rule 4

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def cached_pages(self) -> KeysView[int]:
        """The pages of the prefix cache, in use or free."""
        return self._hash_of.keys()

    def register(self, page: int, page_hash: PrefixHash) -> None:
        """Put a full page, which is in use, into the prefix cache, unless it has a page with this hash."""
        if page not in self._hash_of and page_hash not in self._page_of:
            self._page_of[page_hash] = page
            self._hash_of[page] = page_hash

    def find(self, page_hash: PrefixHash) -> int | None:
        """Return the page of the prefix cache with this hash, which may be free."""
        return self._page_of.get(page_hash)

    def is_in_use(self, page_hash: PrefixHash) -> bool:
        return page_hash in self._page_of and self._page_of[page_hash] not in self._free

    def share(self, page: int) -> None:
        """Add a user to a page that find() has returned."""
        self._n_users[page] += 1
        self._free.pop(page, None)


# --- the fold: a plain streamed request passes what stands above --------------------------------------------


def root_hash(owner: str) -> PrefixHash:
    """Return the hash of the empty prefix of an owner: rule 3."""
    return sha256(owner.encode()).digest()


def prefix_hash(before: PrefixHash, token_ids: Sequence[int]) -> PrefixHash:
    """Return the hash of a page with these tokens after the prefix `before`, and of that prefix."""
    return sha256(before + array("q", token_ids).tobytes()).digest()


class OutOfPages(Exception):
    """All pages are in use."""
