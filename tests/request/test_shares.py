"""What owners share: room, slots and threads, with one who asks for all of it."""

import asyncio
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable

import pytest

from request.refusals import BadInput
from request.shares import OWNER, FairExecutor, Shares, Slots

# --- room ---------------------------------------------------------------------------------------------------


def code_of(take: Callable[[], None]) -> str | None:
    try:
        take()
    except BadInput as refusal:
        return refusal.code
    return None


def test_one_owner_may_have_all() -> None:
    shares = Shares("things", 3, is_shared=False)
    assert [code_of(lambda: shares.take("", 1)) for _ in range(4)] == [
        None,
        None,
        None,
        "server_is_overloaded",
    ]
    shares.give_back("", 3)
    assert shares.has_room("", 3)


def test_of_several_owners_none_holds_more_than_what_is_left() -> None:
    """However many of them want all, there is room for one who holds nothing."""
    shares = Shares("things", 100, is_shared=True)
    for owner in "abcdef":
        n_taken = 0
        while code_of(lambda owner=owner: shares.take(owner, 1)) is None:  # type: ignore[misc]
            n_taken += 1
        assert n_taken > 0
        assert code_of(lambda owner=owner: shares.take(owner, 1)) == "rate_limit_exceeded"  # type: ignore[misc]
    assert shares.has_room("g", 1)


def test_who_holds_nothing_may_take_the_last() -> None:
    """Bug: with --max-streams 1 and two keys nobody was ever served."""
    shares = Shares("things", 1, is_shared=True)
    shares.take("a", 1)
    assert code_of(lambda: shares.take("b", 1)) == "server_is_overloaded"
    shares.give_back("a", 1)
    shares.take("b", 1)


# --- slots --------------------------------------------------------------------------------------------------


def turns(slots: Slots, *owners: str, leaves: int | None = None) -> list[str]:
    """Who holds the one slot, in order, where all have asked for it while another held it."""

    async def main() -> list[str]:
        held: list[str] = []

        async def ask(owner: str) -> None:
            async with slots.slot(owner):
                held.append(owner)

        async with slots.slot("first"):
            asking = [asyncio.create_task(ask(owner)) for owner in owners]
            await asyncio.sleep(0)
            assert slots.waiting() == Counter(owners)
            if leaves is not None:
                asking[leaves].cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert slots.waiting() == {}
        async with slots.slot("last"):
            return held

    return asyncio.run(main())


def test_owners_take_turns() -> None:
    """One who asks a hundred times kept all others out until all hundred were done."""
    assert turns(Slots(1), "a", "a", "a", "b", "c", "b") == ["a", "b", "c", "a", "b", "a"]


@pytest.mark.parametrize("leaves", [0, 1, 3])
def test_who_leaves_loses_nobodys_turn(leaves: int) -> None:
    assert len(turns(Slots(1), "a", "a", "a", "b", leaves=leaves)) == 3


# --- threads ------------------------------------------------------------------------------------------------


def test_threads_work_by_turns_of_the_owners() -> None:
    """Bug: what a hundred requests of one key had asked a thread for came before another's."""
    begin = threading.Event()
    done: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        executor = FairExecutor(1, "test")
        work: list[asyncio.Future[object]] = [loop.run_in_executor(executor, begin.wait)]
        for owner in "aaabcb":
            OWNER.set(owner)
            work.append(loop.run_in_executor(executor, done.append, owner))
        work[1].cancel()
        await asyncio.sleep(0)  # then the executor knows of it
        begin.set()
        await asyncio.gather(*work, return_exceptions=True)
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(executor, divmod, 1, 0)
        executor.shutdown()

    asyncio.run(main())
    assert done == ["b", "c", "a", "b", "a"]


def test_what_has_failed_in_a_thread_is_forgotten() -> None:
    """Bug: its error held on to the future that held the error, and so each body that was refused stayed."""
    arguments: list[weakref.ref[object]] = []

    def refuse(body: object) -> None:
        arguments.append(weakref.ref(body))
        raise ValueError("no")

    class Body:
        pass

    async def main() -> None:
        executor = FairExecutor(1, "test")
        with pytest.raises(ValueError, match="no"):
            await asyncio.get_running_loop().run_in_executor(executor, refuse, Body())
        executor.shutdown()

    gc.disable()
    try:
        asyncio.run(main())
        assert arguments[0]() is None
    finally:
        gc.enable()
