"""Room and turns: how much of the server one owner may hold, and who is next. An owner is an API key.

    Room.add(owner, n), add(owner, -n)                 the owner holds n more, or fewer: now, or BadInput
    with Rooms.visit(owner) as visit                   what one request holds, given back at its end
    async with Turns.turn(owner)                       so many at once; the others wait
    await Threads.call(owner, function, ...)           a thread runs it when its owner's turn has come

A resource that may stay full for long is refused (Room); a request waits for one that is free again soon
(Turns). Both are coarse on purpose: Turns do not count how long an owner has kept one. Rooms has those for
bodies, streams and WebSockets; that for background responses is in background.py (MAX_LIVE_BYTES).

Authority: A. K. Choudhury and E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet
switches", IEEE/ACM Transactions on Networking 6 (1998), for rule 1; round robin for rule 2.

Rules of this file:
1. If there are several owners, one that holds something may add to it only if at least as much as it would
   then hold stays free for the others. An owner that holds nothing may take everything that is free;
   otherwise large requests would never fit.
2. An owner has at most one waiter in each queue at a time. First come, first served is then round robin.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from request.refusals import BadInput

T = TypeVar("T")


# --- what requests hold -------------------------------------------------------------------------------------


class Rooms:
    """What all clients of a server hold together: streams, WebSockets, bytes of bodies; and who waits."""

    @contextmanager
    def visit(self, owner: str | None) -> Iterator["Visit"]:
        """Hold the room that a request takes until it ends; `owner` None: the request has no valid key."""
        visit = Visit(self, owner or "", owner is not None)
        try:
            yield visit
        finally:
            for room in visit.held:
                visit.set_held(room, 0)

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def __init__(self, max_streams: int, max_body_bytes: int, is_shared: bool) -> None:
        n_bytes = max(max_streams * BYTES_A_STREAM, MIN_LARGEST_BODIES * max_body_bytes)
        self.max_body_bytes = max_body_bytes
        self.streams = Room("open requests", max_streams, is_shared)
        self.sockets = Room("open WebSockets", MAX_SOCKETS, is_shared)
        self.bytes = Room("bytes of bodies", n_bytes, is_shared)
        self.begun = Turns(BEGUN_A_TURN)  # in a turn of the event loop
        self.parsing = Turns(1)  # large bodies: two at once would keep the engine from the interpreter
        self.chunks = Turns(1)  # of large bodies, of streams of steps; WebSocket messages, scrapes
        # Ids of the requests whose answers have not begun: a stop waits for them.
        self.unanswered: set[str] = set()


# --- room ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Room:
    """A number of things, such as bytes, that all owners together may hold."""

    things: str  # their name in messages: bytes, as a rule
    n_total: int
    is_shared: bool  # there are several owners
    held: Counter[str] = field(default_factory=Counter)  # by owner

    def add(self, owner: str, n: int) -> None:
        """Count n more as held by the owner, or -n fewer; raises BadInput if they find no room."""
        n_held = self.held[owner]
        n_left = self.n_total - self.held.total() - n
        if n > 0 and n_left < 0:
            raise BadInput(
                f"The server is at its limit for {self.things}; try again later.",
                code="server_is_overloaded",
            )
        if n > 0 and self.is_shared and n_held and n_held + n > n_left:  # rule 1
            share = f"{n_held} of {self.n_total} {self.things}"
            message = f"Your key holds {share}, and more would leave too few for others; try again later."
            raise BadInput(message, code="rate_limit_exceeded")
        self.held[owner] += n


@dataclass
class Visit:
    """What one request, WebSocket or message of a WebSocket holds until it ends, and whose it is."""

    rooms: Rooms
    owner: str
    has_key: bool = True  # a valid one, or the server has no keys
    held: Counter[Room] = field(default_factory=Counter)
    is_small: bool = False  # a small body that neither continues nor refers to another response

    def set_streams(self, n: int = 1) -> None:
        """Hold n streams, one for each choice, in place of as many as now; raises BadInput.

        One request holds at most half of all streams: a larger one would never get in while other owners
        hold any.
        """
        self.set_held(self.rooms.streams, min(n, max(1, self.rooms.streams.n_total // 2)))

    def set_held(self, room: Room, n: int) -> None:
        """Hold n of a room, in place of as many as now; raises BadInput, and then holds what it held."""
        room.add(self.owner, n - self.held[room])
        self.held[room] = n

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that works on the body.

        We use a thread, because thousands of items would stop the streams; a small body is done before a
        thread could start.
        """
        if self.is_small:
            return function(*args)
        return await asyncio.to_thread(function, *args)

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def add_bytes(self, n_bytes: int) -> None:
        """Hold what is about to be loaded too, beside what is held already, such as the chain of a body.

        It counts as at most a quarter of the room; otherwise what is larger could never be read. Raises
        BadInput.
        """
        room = self.rooms.bytes
        self.set_held(room, self.held[room] + min(n_bytes, room.n_total // 4))

    async def until_its_turn(self) -> None:
        """Wait for a turn: chunks of large bodies, WebSocket messages, and scrapes come one by one."""
        async with self.rooms.chunks.turn(self.owner):
            await asyncio.sleep(BETWEEN_TURNS_S)


# --- turns --------------------------------------------------------------------------------------------------


class Turns:
    """So many at once, by turns of the owners. Here "a" has asked three times before "b" asked once:

    waits for a place     a b          (first come, first served)
    waits for its owner   a a          (each is let on when the one before it has got a place)

    Each owner has a lock, and its request that waits for a place holds it.
    """

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        self.n_waiting += 1
        try:
            async with self._locks.setdefault(owner, asyncio.Lock()):
                await self._places.acquire()
        finally:
            self.n_waiting -= 1
        try:
            yield
        finally:
            self._places.release()

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def __init__(self, n_places: int) -> None:
        self.n_waiting = 0
        self._places = asyncio.Semaphore(n_places)
        # By owner. Python drops a lock that nothing holds or awaits.
        self._locks = WeakValueDictionary[str, asyncio.Lock]()


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

BYTES_A_STREAM = 256 * 1024  # a body, on average: 64,000 tokens of text
MIN_LARGEST_BODIES = 16  # that there is room for, however few the streams
MAX_SOCKETS = 128  # WebSockets: each may hold a message of twice --max-body
BEGUN_A_TURN = 4  # requests
BETWEEN_TURNS_S = 0.001  # the event loop has this time for others


# --- turns --------------------------------------------------------------------------------------------------

# Threads of the event loop, for what would keep it too long. They share Python's lock, which the event loop
# wants back after each system call: with six threads at work, a turn of the event loop took 0.2 s.
N_THREADS = 2


class Threads(Turns):
    """Threads that work by turns of the owners: the event loop's own, or those of an executor."""

    def __init__(self, n_threads: int = N_THREADS, executor: Executor | None = None) -> None:
        super().__init__(n_threads)
        self._executor = executor

    async def call(self, owner: str, function: Callable[..., T], *args: Any) -> T:
        """Call the function in a thread. If the caller is cancelled before it has begun, it never begins."""
        loop = asyncio.get_running_loop()
        async with self.turn(owner):
            return await loop.run_in_executor(self._executor, copy_context().run, function, *args)

    async def until_idle(self) -> None:
        """Wait until all calls have begun, also those that are made meanwhile."""
        await asyncio.sleep(0)  # a task may not have asked for its turn yet
        while self.n_waiting:
            await asyncio.sleep(0.01)
