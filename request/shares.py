"""Fair shares: what the owners of requests have together, and whose turn it is. An owner is an API key.

    Shares.take(owner, n), give_back(owner, n)       room, of which there is so much: or BadInput
    async with Slots.slot(owner)                     places that are waited for
    FairExecutor.submit(function), as OWNER          threads that work for one after another

Authority: A. K. Choudhury and E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet
switches", IEEE/ACM Transactions on Networking 6 (1998), for rule 1; round robin for rule 2.

Rules of this file:
1. Of several owners none takes more than what is then still free, so there is room for one who holds nothing;
   that one may take all that is free: of one stream it could else have none.
2. Who waits is served by turns of the owners, however much each has queued. What one owner asks for is served
   in its order.

Not here: what there is room for (service/admission.py, background.py), whom the engine computes next
(scheduler.py), who an owner is (middleware.py).
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from request.refusals import BadInput

OWNER = ContextVar("OWNER", default="")  # whose request the task at hand works for

# --- room ---------------------------------------------------------------------------------------------------


def has_room(n_free: int, n_held: int, n_more: int, is_shared: bool) -> bool:
    """Whether an owner who holds `n_held` may have more: rule 1 where there are several."""
    n_left = n_free - n_more
    if is_shared and n_held:
        return n_held + n_more <= n_left
    return n_left >= 0


class Shares:
    """A number of things; `is_shared`: there are several owners."""

    def __init__(self, name: str, total: int, is_shared: bool) -> None:
        self._name = name
        self._total = total
        self._is_shared = is_shared
        self._n_free = total
        self._held: Counter[str] = Counter()  # by owner

    def has_room(self, owner: str, n: int) -> bool:
        return has_room(self._n_free, self._held[owner], n, self._is_shared)

    def take(self, owner: str, n: int) -> None:
        """Raises BadInput where there is no room."""
        if self._n_free < n:
            message = f"There is no room for more {self._name}; try again later."
            raise BadInput(message, None, "server_is_overloaded")
        if not self.has_room(owner, n):
            share = f"{self._held[owner]} of {self._total} {self._name}"
            message = f"Your key holds {share}, and more would leave too few for others; try again later."
            raise BadInput(message, None, "rate_limit_exceeded")
        self._held[owner] += n
        self._n_free -= n

    def give_back(self, owner: str, n: int) -> None:
        self._held[owner] -= n
        self._n_free += n
        if not self._held[owner]:
            del self._held[owner]


# --- turns --------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """Somebody who waits for a slot."""

    owner: str
    has_come: asyncio.Future[None]


class Slots:
    """So many at once.

    A slot goes to the owner who holds the fewest; of several, to the one who has not got one for the longest
    time. With one slot they take turns, however many each waits for.
    """

    def __init__(self, n_slots: int) -> None:
        self._n_free = n_slots
        self._n_held = Counter[str]()  # by owner
        self._n_given = 0
        self._last_given = Counter[str]()  # by owner: the number of the last slot given, 0 for none
        self._waiting: list[Turn] = []  # in the order in which they came

    def waiting(self) -> Counter[str]:
        """How many wait, by owner."""
        return Counter(turn.owner for turn in self._waiting if not turn.has_come.cancelled())

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        await self._take(owner)
        try:
            yield
        finally:
            self._give_back(owner)

    async def _take(self, owner: str) -> None:
        turn = Turn(owner, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        self._hand_out()
        try:
            await turn.has_come
        except asyncio.CancelledError:
            if not turn.has_come.cancelled():  # it has come in the same moment
                self._give_back(owner)
            raise

    def _give_back(self, owner: str) -> None:
        self._n_held[owner] -= 1
        self._n_free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        self._waiting = [turn for turn in self._waiting if not turn.has_come.cancelled()]
        while self._n_free and self._waiting:
            turn = min(self._waiting, key=self._precedence)
            self._waiting.remove(turn)
            self._n_free -= 1
            self._n_held[turn.owner] += 1
            self._n_given += 1
            self._last_given[turn.owner] = self._n_given
            turn.has_come.set_result(None)

    def _precedence(self, turn: Turn) -> tuple[int, int]:
        return self._n_held[turn.owner], self._last_given[turn.owner]


class Work(NamedTuple):
    """A call for a thread."""

    future: Future[Any]
    call: Callable[[], Any]


class FairExecutor(ThreadPoolExecutor):
    """Threads that work for one owner after another."""

    def __init__(self, n_threads: int, name: str) -> None:
        super().__init__(n_threads, name)
        self._lock = threading.Lock()
        self._queues: dict[str, deque[Work]] = {}  # by owner; whose turn is next comes first

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        work = Work(Future(), partial(fn, *args, **kwargs))
        with self._lock:
            super().submit(self._work)  # which work that will be is decided when a thread is free
            self._queues.setdefault(OWNER.get(), deque()).append(work)
        return work.future

    def _work(self) -> None:
        with self._lock:
            owner = next(iter(self._queues))
            queue = self._queues.pop(owner)
            future, call = queue.popleft()
            if queue:
                self._queues[owner] = queue  # behind the others
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
            # The error's traceback holds this frame: a circle, and with it the request, until a collection.
            del future
