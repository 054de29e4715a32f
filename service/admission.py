"""Admission control: how many requests clients hold open at once, and how many bytes of bodies, by owner.

    owner --Room.visit()--> Visit          a message of its body --Room.receive()--> the message, or BadInput

A visit begins with the head of a request. While its body arrives it holds the bytes that have come; when that
is whole it takes a stream, if there is one, and then one for each further choice. One that asks for what is
stored holds an answer instead, and the bytes of that. It ends with the request, and gives back what it holds.
On a WebSocket each turn is a visit, and so is what has come of the next message.

Authority: rule 1 of request/room.py; MinRate of Apache's RequestReadTimeout for rule 2,
https://httpd.apache.org/docs/2.4/mod/mod_reqtimeout.html

Rules of this file:
1. A body that arrives slowly gives way: the oldest of the same owner's, where that owner lacks room.
2. A body must be whole within MAX_BODY_S, and the time that what has come takes at BODY_BYTES_A_S.

Not here: how owners share (request/room.py), connections (connections.py), who an owner is (middleware.py),
how many requests the engine runs at once (scheduler.py), background responses that wait (background.py).
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from starlette.types import Message, Receive

from request import room
from request.body import MAX_BODY_BYTES
from request.refusals import BadInput
from request.room import Turns

BETWEEN_MESSAGES_S = 0.001  # of all WebSockets: a flood of them takes a part of the event loop alone
MAX_BODY_S = 30  # from the head of the request to the last byte of its body, were that empty
BODY_BYTES_A_S = 256 * 1024  # at least, behind those: five times as many come over 200 ms, there and back
BYTES_A_STREAM = 256 * 1024  # of a body, on average: 64,000 tokens of text
MIN_LARGEST_BODIES = 16  # that there is room for, however few the streams


@dataclass(eq=False)
class Visit:
    """A request that a client holds open."""

    owner: str
    deadline: float  # of its body, by the event loop's clock
    n_bytes: int = 0  # of its body, so far, or of its answer
    is_arriving: bool = False
    n_streams: int = 0
    has_answer: bool = False
    give_way: Callable[[], None] | None = None  # ends the arrival; None: nothing of a body is awaited


class Room:
    """What all clients of a server hold together; `is_shared`: there are several owners."""

    def __init__(
        self, max_streams: int, max_body_bytes: int = MAX_BODY_BYTES, is_shared: bool = False
    ) -> None:
        self.max_body_bytes = max_body_bytes
        self._max_streams = max_streams
        n_bytes = max(max_streams * BYTES_A_STREAM, MIN_LARGEST_BODIES * max_body_bytes)
        self._max_answer_bytes = n_bytes // 4
        self._streams = room.Room("open requests", max_streams, is_shared)
        self._bodies = room.Room("bodies on their way", max_streams, is_shared)
        self._answers = room.Room("answers on their way", max_streams, is_shared)
        self._bytes = room.Room("bytes of bodies", n_bytes, is_shared)
        self._sockets = room.Room("open WebSockets", max_streams, is_shared)
        self.remembered = room.Room("bytes of what connections remember", n_bytes, is_shared)
        self._messages = Turns(1)  # of WebSockets, that are begun at a time
        # Ids of the requests, and turns, whose answers have not begun: a stop waits for them.
        self.unanswered: set[str] = set()
        self._arriving: dict[Visit, None] = {}  # the oldest first

    @contextmanager
    def visit(self, owner: str) -> Iterator[Visit]:
        visit = Visit(owner, asyncio.get_running_loop().time() + MAX_BODY_S)
        try:
            yield visit
        finally:
            self._end_arrival(visit)
            self._bytes.give_back(owner, visit.n_bytes)
            self._streams.give_back(owner, visit.n_streams)
            self._answers.give_back(owner, int(visit.has_answer))

    def enter(self, visit: Visit, n_streams: int = 1) -> None:
        """Give a visit its stream, or more of them, for each choice is one; raises BadInput.

        Half of all are the most that one has, for it to get in at all beside other owners.
        """
        self._end_arrival(visit)
        n_streams = min(n_streams, max(1, self._max_streams // 2) - visit.n_streams)
        if n_streams > 0:
            self._streams.take(visit.owner, n_streams)
            visit.n_streams += n_streams

    def enter_for_answer(self, visit: Visit) -> None:
        """Let a visit have an answer that is stored; raises BadInput.

        These are counted apart from streams: a poll gets in while all streams are taken.
        """
        self._answers.take(visit.owner, 1)
        visit.has_answer = True

    def hold(self, visit: Visit, n_bytes: int) -> None:
        """Take room for what is loaded for an answer; raises BadInput.

        A quarter of all is the most that one takes, for it to be had at all beside others.
        """
        n_more = min(n_bytes, self._max_answer_bytes) - visit.n_bytes
        if n_more > 0:  # else it is held already
            self._bytes.take(visit.owner, n_more)
            visit.n_bytes += n_more

    async def receive(self, visit: Visit, receive: Receive) -> Message:
        """The next message of a client; raises BadInput where its body has no room, or no time left."""
        if visit.n_streams:  # all that can still come is that the client leaves
            return await receive()
        self._begin_arrival(visit)
        try:
            async with asyncio.timeout_at(visit.deadline) as timeout:
                visit.give_way = partial(timeout.reschedule, 0)
                message = await receive()
        except TimeoutError as error:
            expected = (
                f"Expected the body within {MAX_BODY_S} s and a second for each {BODY_BYTES_A_S} bytes that "
                "came, or before other bodies needed its room."
            )
            raise BadInput(expected, None, "request_timeout") from error
        finally:
            visit.give_way = None
        if message["type"] == "http.request":
            n_more = len(message.get("body", b""))
            self._resize(visit, visit.n_bytes + n_more)
            visit.deadline += n_more / BODY_BYTES_A_S
            if not message.get("more_body"):
                self.enter(visit)
        return message

    # --- WebSockets -----------------------------------------------------------------------------------------

    @contextmanager
    def socket(self, owner: str) -> Iterator[Visit]:
        """An open WebSocket, and what has come of its next message; raises BadInput."""
        self._sockets.take(owner, 1)
        try:
            with self.visit(owner) as visit:
                try:
                    yield visit
                finally:
                    visit.give_way = None
        finally:
            self._sockets.give_back(owner, 1)

    def hold_message(self, visit: Visit, n_bytes: int, give_way: Callable[[], None] | None) -> None:
        """Count what has come of messages, 0 for none, until the next one is asked for; raises BadInput.

        `give_way` None: it is whole, and stays.
        """
        visit.give_way = give_way
        if n_bytes and give_way:
            self._begin_arrival(visit)
        else:
            self._end_arrival(visit)
        self._resize(visit, n_bytes)

    async def until_next_message(self, owner: str) -> None:
        """To be awaited between two messages of a WebSocket: by turns of the owners."""
        async with self._messages.turn(owner):
            await asyncio.sleep(BETWEEN_MESSAGES_S)

    @contextmanager
    def turn(self, owner: str, n_bytes: int) -> Iterator[None]:
        """A turn whose message has come, which is an open request like any other; raises BadInput."""
        with self.visit(owner) as visit:
            self._resize(visit, n_bytes)
            self.enter(visit)
            yield

    # --- bodies that arrive ---------------------------------------------------------------------------------

    def _begin_arrival(self, visit: Visit) -> None:
        if not visit.is_arriving:
            self._take(self._bodies, visit, 1)
            self._arriving[visit] = None
            visit.is_arriving = True

    def _resize(self, visit: Visit, n_bytes: int) -> None:
        """Have a visit hold so many bytes; raises BadInput."""
        if n_bytes > visit.n_bytes:
            self._take(self._bytes, visit, n_bytes - visit.n_bytes)
        else:
            self._bytes.give_back(visit.owner, visit.n_bytes - n_bytes)
        visit.n_bytes = n_bytes

    def _take(self, shares: room.Room, visit: Visit, n: int) -> None:
        """Raises BadInput where there is no room, and rule 1 makes none."""
        if not shares.has_room(visit.owner, n):
            older = [other for other in self._arriving if other.owner == visit.owner and other is not visit]
            while older and not shares.has_room(visit.owner, n):
                self._expire(older.pop(0))
        shares.take(visit.owner, n)

    def _expire(self, visit: Visit) -> None:
        self._end_arrival(visit)
        self._resize(visit, 0)
        visit.deadline = 0
        if visit.give_way:
            visit.give_way()

    def _end_arrival(self, visit: Visit) -> None:
        if visit.is_arriving:
            visit.is_arriving = False
            del self._arriving[visit]
            self._bodies.give_back(visit.owner, 1)
