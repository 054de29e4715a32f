"""What owners share: room, turns and threads, with one who asks for all of it."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from request.refusals import BadInput
from request.room import Room, Threads, Turns


def has_room(room: Room, owner: str, n: int) -> bool:
    try:
        room.add(owner, n)
    except BadInput:
        return False
    room.add(owner, -n)
    return True


OWNERS = st.sampled_from("abcde")
N_TOTAL = 100

# --- room ---------------------------------------------------------------------------------------------------


class RoomOfSeveral(RuleBasedStateMachine):
    """Owners who take and give back as they like; what the room says is compared with what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room("things", N_TOTAL, is_shared=True)
        self.held = Counter[str]()

    @property
    def n_free(self) -> int:
        return N_TOTAL - self.held.total()

    @rule(owner=OWNERS, n=st.integers(1, N_TOTAL))
    def add(self, owner: str, n: int) -> None:
        fits = n <= self.n_free
        is_fair = not self.held[owner] or self.held[owner] + n <= self.n_free - n
        if fits and is_fair:
            self.room.add(owner, n)
            self.held[owner] += n
            return
        why = r"Your key holds \d+ of 100 things" if fits else "at its limit for things"
        with pytest.raises(BadInput, match=why) as refused:
            self.room.add(owner, n)
        assert refused.value.code == ("rate_limit_exceeded" if fits else "server_is_overloaded")

    @precondition(lambda self: self.held.total())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(+self.held)))
        n = data.draw(st.integers(1, self.held[owner]))
        self.room.add(owner, -n)
        self.held[owner] -= n

    @invariant()
    def one_who_holds_nothing_may_have_all_that_is_free(self) -> None:
        assert has_room(self.room, "newcomer", self.n_free)
        assert not has_room(self.room, "newcomer", self.n_free + 1)


TestRoomOfSeveral = RoomOfSeveral.TestCase


# --- turns --------------------------------------------------------------------------------------------------


def round_robin(owners: Sequence[str]) -> list[str]:
    """One of each owner after the other, in the order in which they came."""
    rounds = [owners[:i].count(owner) for i, owner in enumerate(owners)]
    by_round = sorted(zip(rounds, map(owners.index, owners), owners, strict=True))
    return [owner for _, _, owner in by_round]


async def served(owners: Sequence[str]) -> list[str]:
    """Whose turn it was, in order, if all have asked while another held the place."""
    async with asyncio.timeout(10):
        turns, order = Turns(1), list[str]()

        async def ask(owner: str) -> None:
            async with turns.turn(owner):
                order.append(owner)
                await asyncio.sleep(0)

        async with turns.turn("first"):
            asking = [asyncio.create_task(ask(owner)) for owner in owners]
            await asyncio.sleep(0)
            assert turns.n_waiting == len(owners)
        await asyncio.gather(*asking)
        assert not turns.n_waiting
        return order


@given(st.lists(OWNERS, max_size=12))
def test_owners_take_turns(owners: list[str]) -> None:
    """One who asks a hundred times kept all others out until all hundred were done."""
    assert asyncio.run(served(owners)) == round_robin(owners)


# --- threads ------------------------------------------------------------------------------------------------


async def test_threads_work_by_turns_of_the_owners() -> None:
    """Bug: what a hundred requests of one key had asked a thread for came before another's."""
    begin = threading.Event()
    done: list[object] = []
    with ThreadPoolExecutor(1) as executor:
        threads = Threads(1, executor)
        work: list[asyncio.Task[object]] = [asyncio.create_task(threads.call("first", begin.wait))]
        for owner in "aaabcb":
            work.append(asyncio.create_task(threads.call(owner, done.append, owner)))
        await asyncio.sleep(0)
        work[1].cancel()
        await asyncio.sleep(0)
        begin.set()
        await asyncio.gather(*work, return_exceptions=True)
        with pytest.raises(ZeroDivisionError):
            await threads.call("a", divmod, 1, 0)
    assert done == ["b", "c", "a", "b", "a"]
