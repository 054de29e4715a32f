"""Room and turns: what one owner may hold of the server, and whose turn it is. An owner is an API key.

    Room.take(owner, n), give_back(owner, n)           there is so much: now, or BadInput
    with Room.visit(owner, n) as visit                 the same, given back at the end
    async with Turns.turn(owner)                       so many at once; the others wait
    await Threads.call(owner, function, ...)           a thread runs it when its owner's turn has come

What may stay full for long is refused (Room); what is free again soon is waited for (Turns). Both are coarse
on purpose: how long an owner has kept its turns is not counted.

Authority: A. K. Choudhury and E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet
switches", IEEE/ACM Transactions on Networking 6 (1998), for rule 1; round robin for rule 2.

Rules of this file:
1. If there are several owners, none takes more than what it then leaves free. So there is always room for an
   owner that holds nothing. That one may take all that is free: else no one could ever take a single thing.
2. An owner waits in each queue with one of its own at a time. First come, first served is then round robin.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from typing import TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from request.refusals import BadInput

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Threads of the event loop, for what would keep it too long. They share Python's lock, which the event loop
# wants back after each system call: with six at work a turn of it took 0.2 s.
N_THREADS = 2


# --- room ---------------------------------------------------------------------------------------------------


class Room:
    """So many things that all owners hold together. `things` names them: bytes, as a rule."""

    def __init__(self, things: str, n_total: int, is_shared: bool) -> None:
        """`is_shared`: there are several owners."""
        self.n_total = n_total
        self._things = things
        self._is_shared = is_shared
        self._n_free = n_total
        self._held = Counter[str]()  # by owner

    def has_room(self, owner: str, n: int) -> bool:
        n_held = self._held[owner]
        n_left = self._n_free - n
        if self._is_shared and n_held:
            return n_held + n <= n_left  # rule 1
        return n_left >= 0

    def take(self, owner: str, n: int) -> None:
        """Take n of them; raises BadInput if there is no room."""
        if self._n_free < n:
            message = f"There is no room for more {self._things}; try again later."
            raise BadInput(message, None, "server_is_overloaded")
        if not self.has_room(owner, n):
            share = f"{self._held[owner]} of {self.n_total} {self._things}"
            message = f"Your key holds {share}, and more would leave too few for others; try again later."
            raise BadInput(message, None, "rate_limit_exceeded")
        self._held[owner] += n
        self._n_free -= n

    def give_back(self, owner: str, n: int) -> None:
        self._held[owner] -= n
        self._n_free += n

    @contextmanager
    def visit(self, owner: str, n: int = 0) -> Iterator["Visit"]:
        """Hold n of them, and what the visit takes later, until it ends; raises BadInput."""
        visit = Visit(self, owner)
        visit.resize(n)
        try:
            yield visit
        finally:
            visit.resize(0)


class Visit:
    """What one request, WebSocket or turn holds of a room."""

    def __init__(self, room: Room, owner: str) -> None:
        self.n = 0
        self._room = room
        self._owner = owner

    def resize(self, n: int) -> None:
        """Hold n of them, instead of as many as now; raises BadInput, and then holds what it held."""
        if n > self.n:
            self._room.take(self._owner, n - self.n)
        else:
            self._room.give_back(self._owner, self.n - n)
        self.n = n


# --- turns --------------------------------------------------------------------------------------------------


class Turns:
    """So many at once, by turns of the owners. Here "a" has asked three times before "b" asked once:

    waits for a place     a b          (first come, first served)
    waits for its owner   a a          (each is let on when the one before it has got a place)
    """

    def __init__(self, n_places: int) -> None:
        self.waiting = Counter[str]()  # how many wait, by owner
        self._places = asyncio.Semaphore(n_places)
        # By owner: held by the one that waits for a place. A lock that no one holds or awaits is forgotten.
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        self.waiting[owner] += 1
        try:
            async with self._locks.setdefault(owner, asyncio.Lock()):
                await self._places.acquire()
        finally:
            self.waiting[owner] -= 1
        try:
            yield
        finally:
            self._places.release()


class Threads:
    """Threads that work by turns of the owners: the event loop's own, or those of an executor."""

    def __init__(self, n_threads: int = N_THREADS, executor: Executor | None = None) -> None:
        self._turns = Turns(n_threads)
        self._executor = executor

    async def call(self, owner: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call the function in a thread. If the caller is cancelled before it has begun, it never begins."""
        loop = asyncio.get_running_loop()
        async with self._turns.turn(owner):
            return await loop.run_in_executor(self._executor, copy_context().run, function, *args)

    async def until_idle(self) -> None:
        """Wait until all calls are done, also those that are made meanwhile."""
        while self._turns.waiting.total():
            await asyncio.sleep(0.01)
