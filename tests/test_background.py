"""background.py on its own: real stores, and producers that say what the test wants, when it wants.

The bugs are those of servers that have background responses: a run that nobody ends, a reader that nobody
wakes, a cancel that a late completion overwrites.
"""

import asyncio
import gc
import itertools
import json
import math
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import background
import sse
from background import READ_BYTES, Entry, EventLog, Registry, Run, Said, Snapshot
from channels import Accepted, Delta, Finish, TokenLogprob, Usage
from helpers import laws
from request import params
from request.refusals import BadInput
from responses import Builder, Event
from store import TERMINAL, Retention, Row, Store

PATIENCE_S = 30
RACES = 1000
BODY = {"model": "m", "input": "hi", "background": True, "stream": True}
HEAD = {"object": "response", "created_at": 1, "model": "m"} | params.from_responses(BODY, {}).echo
DONE = Finish("stop", Usage(3, 2))
SHUT_DOWN = "The server is shutting down."
INTERRUPTED = "interrupted by a restart"
UNFINISHED = "The run ended without a last event."
RAISED = "ZeroDivisionError in the server; its log has the details."

Says = Callable[[], AsyncIterator[Said]]
numbers = itertools.count()


def within_patience(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))


def new_id(prefix: str) -> str:
    return f"{prefix}_{next(numbers)}"


def row(**changes: Any) -> Row:
    new = Row(
        id=new_id("resp"),
        owner="",
        born_at=0,
        ended_at=None,
        kept=True,
        background=True,
        streamed=True,
        request_json=json.dumps(BODY),
        items_json="[]",
    )
    return new._replace(**changes)


def builder_of(row: Row) -> Builder:
    return Builder({"id": row.id, **HEAD}, new_id)


def run_of(says: Says) -> Run:
    """A run that says what the test wants."""

    async def run(emit: Callable[[Said], None]) -> None:
        emit(Accepted())
        async for said in says():
            emit(said)

    return run


async def started(registry: Registry, row: Row, says: Says) -> EventLog:
    job = await registry.start(row, builder_of(row), run_of(says))
    return job.log


async def hello() -> AsyncIterator[Said]:
    yield Delta("final", "Hel")
    yield Delta("final", "lo")
    yield DONE


class Held:
    """Says half, then nothing until it is let go."""

    def __init__(self) -> None:
        self.runs = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self) -> AsyncIterator[Said]:
        yield Delta("analysis", "Hm.")
        yield Delta("final", "Hel")
        self.runs.set()
        await self.go_on.wait()
        yield Delta("final", "lo")
        yield DONE


@asynccontextmanager
async def registry_of(**limits: Any) -> AsyncIterator[Registry]:
    """A registry over a store of its own; in the end what runs is ended."""
    registry = Registry(Store(":memory:", Retention()), **limits)
    try:
        yield registry
    finally:
        await registry.close(persistent=False)
        await registry.close_store()


async def read(log: EventLog, after: int = -1) -> list[bytes]:
    async with aclosing(log.read(after)) as logged:
        return [frame async for frames in logged for frame in frames]


def parsed(frames: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in sse.Parser().feed(b"".join(frames))]


async def ended(registry: Registry, asked: Row) -> Row:
    """A response when it is terminal, as GET tells it."""
    while True:
        found = await registry.get(asked.id, asked.owner)
        assert found
        if found.status in TERMINAL:
            return found
        await asyncio.sleep(0)


async def check_end(registry: Registry, store: Store, asked: Row, *ends: str) -> dict[str, Any]:
    """It ends in one of these ways, its log is a whole response, and the store holds what was seen."""
    log = await registry.events(asked)
    assert log
    seen = await read(log)
    found = await ended(registry, asked)
    events = parsed(seen)
    laws.check_order(events)
    laws.check_statuses(events)
    assert events[-1]["response"] == found.response
    assert found.response["status"] in ends
    while registry.counts()["background"]:
        await asyncio.sleep(0)
    kept = store.get(asked.id)
    assert kept
    assert (kept.response, store.frames(asked.id)) == (found.response, seen)
    assert kept.ended_at is not None
    return found.response


# --- the log ------------------------------------------------------------------------------------------------


def encode(number: int, event: dict[str, Any]) -> Entry:
    snapshot = Snapshot(event["status"], "{}") if "status" in event else None
    return Entry(b"%d %d" % (number, event["n"]), snapshot)


actions = st.lists(
    st.tuples(st.just("extend"), st.integers(0, 3))
    | st.tuples(st.just("read"), st.integers(-1, 12))
    | st.tuples(st.sampled_from(["write", "fail", "pass"]), st.just(0)),
    max_size=25,
)


@given(actions, st.booleans())
def test_readers_get_the_same_bytes(actions: list[tuple[str, int]], stored: bool) -> None:
    """Whenever they come, and from wherever on: what is written, all of it, in order, and then the end.

    A reader who has seen more than there is gets nothing: a client drops the numbers that it knows.
    """

    async def main() -> None:
        written: list[bytes] = []
        has_failed = False  # since the last write that has not
        gate = asyncio.Queue[bool]()

        async def write(first: int, frames: list[bytes], newest: Snapshot | None) -> bool:
            nonlocal has_failed
            assert first == len(written), "no gap, and nothing twice"
            has_failed = not await gate.get()
            if not has_failed:
                written.extend(frames)
            return not has_failed

        async def follow(after: int) -> list[bytes]:
            got = []
            async with aclosing(log.read(after)) as logged:
                async for frames in logged:
                    got += frames
                    number = int(frames[-1].split()[0])
                    assert not stored or has_failed or number < len(written), "seen before it was written"
            return got

        log = EventLog(encode, write if stored else None)
        readers: list[tuple[int, asyncio.Task[list[bytes]]]] = []
        n = 0
        for action, argument in actions:
            if action == "extend":
                log.extend({"n": n + i} for i in range(argument))
                n += argument
            elif action == "read":
                readers.append((argument, asyncio.create_task(follow(argument))))
            elif action != "pass":
                gate.put_nowait(action == "write")
            await asyncio.sleep(0)
        log.extend([{"n": n}])
        log.close()
        for _ in range(n + 1):
            gate.put_nowait(True)
        readers += [(after, asyncio.create_task(follow(after))) for after in range(-1, n + 2)]
        expected = [b"%d %d" % (i, i) for i in range(n + 1)]
        for after, task in readers:
            assert await task == expected[after + 1 :]
        await log.until_stored()
        assert written == expected or not stored

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(background, "RETRY_S", 0)
        within_patience(main())


def test_log_goes_on_from_an_earlier_process() -> None:
    """Numbers go on where the frames end, and a reader sees both."""

    async def main() -> list[list[bytes]]:
        log = EventLog(encode, stored=[Entry(b"0 zero"), Entry(b"1 one", Snapshot("in_progress", "{}"))])
        early = asyncio.create_task(read(log, after=0))
        await asyncio.sleep(0)
        assert (log.status, log.ended) == ("in_progress", False)
        log.extend([{"n": 7, "status": "failed"}])
        log.close()
        assert (log.shown, log.ended) == (("failed", "{}"), True)
        return [await early, await read(log), await read(log, 2), await read(log, 99)]

    assert within_patience(main()) == [[b"1 one", b"2 7"], [b"0 zero", b"1 one", b"2 7"], [], []]


def test_state_is_seen_when_it_is_written() -> None:
    """Who polls must not learn what a restart could take back."""

    async def main() -> None:
        async def write(first: int, frames: list[bytes], newest: Snapshot | None) -> bool:
            begun.set()
            await go_on.wait()
            return True

        begun, go_on = asyncio.Event(), asyncio.Event()
        log = EventLog(encode, write)
        log.extend([{"n": 0, "status": "completed"}])
        await begun.wait()
        assert (log.shown, log.status) == (None, "completed")
        go_on.set()
        await log.until_shown()
        assert log.shown == ("completed", "{}")

    within_patience(main())


def test_waiting_for_what_is_there_does_not_wait_for_what_comes() -> None:
    """A POST that waits for its first events must return however fast the tokens come."""

    async def main() -> None:
        async def write(first: int, frames: list[bytes], newest: Snapshot | None) -> bool:
            log.extend([{"n": 0}])  # there is always a next one
            await asyncio.sleep(0)
            return True

        log = EventLog(encode, write)
        log.extend([{"n": 0}])
        await asyncio.wait_for(log.until_shown(), PATIENCE_S)

    within_patience(main())


def test_a_reader_gets_what_waits_in_pieces() -> None:
    """All frames that wait leave at once, but for a reader that is far behind: between its pieces the others
    have their turn, however fast it is.
    """

    async def main() -> list[int]:
        log = EventLog(lambda number, _: Entry(b"x" * (READ_BYTES // 4)))
        log.extend([{}] * 9)
        log.close()
        sizes: list[int] = []

        async def look() -> None:
            while True:
                seen.append(len(sizes))
                await asyncio.sleep(0)

        seen: list[int] = []
        looking = asyncio.create_task(look())
        async with aclosing(log.read()) as logged:
            async for frames in logged:
                sizes.append(len(frames))
        looking.cancel()
        assert seen == [1, 2]
        return sizes

    assert within_patience(main()) == [4, 4, 1]


def test_a_foreground_response_is_stored_before_its_last_event_is_shown() -> None:
    """And none of its other events waits for the store."""

    async def main() -> None:
        async with registry_of() as registry:
            held, asked = Held(), row(background=False)
            busy = threading.Event()
            blocked = asyncio.create_task(registry._call("", busy.wait))
            log = await started(registry, asked, held)
            await held.runs.wait()
            assert log.shown
            assert log.shown.status == "in_progress"
            held.go_on.set()
            await yields(50)
            assert log.status == "in_progress"
            busy.set()
            assert b"response.completed" in (await read(log))[-1]
            found = await registry.get(asked.id, asked.owner)
            assert found
            assert found.status == "completed"
            await blocked

    within_patience(main())


def test_reader_that_leaves_takes_nothing_with_it() -> None:
    async def main() -> None:
        log = EventLog(encode)
        leaving, staying = asyncio.create_task(read(log)), asyncio.create_task(read(log))
        await asyncio.sleep(0)
        leaving.cancel()
        log.extend([{"n": 0}])
        log.close()
        assert await staying == [b"0 0"]

    within_patience(main())


# --- producers, as they end ---------------------------------------------------------------------------------


async def raises() -> AsyncIterator[Said]:
    yield Delta("final", "Hel")
    raise ZeroDivisionError("a bug")


async def returns_early() -> AsyncIterator[Said]:
    yield Delta("final", "Hel")


async def says_nothing() -> AsyncIterator[Said]:
    raise ZeroDivisionError("a bug, at once")
    yield DONE


async def fails() -> AsyncIterator[Said]:
    yield Delta("final", "Hel")
    yield Finish("failed", message="The worker is gone.")


async def is_cut() -> AsyncIterator[Said]:
    yield Delta("final", "Hel")
    yield Finish("length", Usage(3, 1))


# fmt: off
#   name, a documented bug's words          producer        status        of the error message
ENDINGS: list[tuple[str, Says, str, str | None]] = [
    ("completes",                           hello,          "completed",  None),
    ("is_cut",                              is_cut,         "incomplete", None),
    ("fails",                               fails,          "failed",     "The worker is gone."),
    ("task_exception_leaves_in_progress",   raises,         "failed",     RAISED),
    ("task_exception_leaves_queued",        says_nothing,   "failed",     RAISED),
    ("closed_channel_leaves_task_open",     returns_early,  "failed",     UNFINISHED),
]
# fmt: on


@pytest.mark.bug("F02", "F03")
@pytest.mark.parametrize(("_", "says", "status", "message"), ENDINGS, ids=[case[0] for case in ENDINGS])
def test_every_producer_ends(_: str, says: Says, status: str, message: str | None) -> None:
    """A worker that was gone left the run open, or its error was that of another message:
    github.com/EricLBuehler/mistral.rs/pull/2114; vLLM had no error handling around a run at all:
    github.com/vllm-project/vllm/pull/49721. Here readers, at any time, get one terminal event and end.
    """

    async def main() -> None:
        with closing(Store(":memory:", Retention())) as store:
            registry, asked = Registry(store), row()
            log = await started(registry, asked, says)
            early = asyncio.create_task(read(log))
            response = await check_end(registry, store, asked, status)
            laws.check_response(parsed(await early))
            assert (response["error"] or {}).get("message") == message
            late = await registry.events(asked)
            assert late
            assert await early == await read(late)

    within_patience(main())


def test_readers_end_even_if_the_last_event_cannot_be_made() -> None:
    """The worst case: the run fails, and so does saying it."""

    class WorstBuilder(Builder):
        def finish(self, finish: Finish, now: int) -> list[Event]:
            raise ZeroDivisionError("a bug in the bug's handler")

    async def main() -> None:
        async with registry_of() as registry:
            asked = row()
            job = await registry.start(asked, WorstBuilder({"id": asked.id, **HEAD}, new_id), run_of(raises))
            *_, delta, last = parsed(await read(job.log))
            assert (delta["type"], last["type"]) == ("response.output_text.delta", "response.failed")
            await registry.cancel(asked)  # nor does this hang
            assert (await ended(registry, asked)).response == last["response"]

    within_patience(main())


# --- cancel and delete --------------------------------------------------------------------------------------


def test_cancel_of_a_running_one_keeps_what_it_said() -> None:
    """And stops the producer before it returns: one set a flag that nobody read (mistral.rs, 9e92262)."""

    async def main() -> None:
        left: list[bool] = []

        async def says() -> AsyncIterator[Said]:
            try:
                async for said in held():
                    yield said
            finally:
                left.append(True)

        with closing(Store(":memory:", Retention())) as store:
            held, registry, asked = Held(), Registry(store), row()
            await started(registry, asked, says)
            await held.runs.wait()
            follower = asyncio.create_task(read((await registry.events(asked)) or EventLog(encode)))
            await registry.cancel(asked)
            assert left == [True]
            response = await check_end(registry, store, asked, "cancelled")
            said = [(item["status"], item["content"][0]["text"]) for item in response["output"]]
            assert said == [("completed", "Hm."), ("incomplete", "Hel")]
            assert response["usage"] is None
            assert parsed(await follower)[-1]["response"] == response
            await registry.cancel(asked)
            await registry.cancel(row())
            assert (await ended(registry, asked)).response == response

    within_patience(main())


@pytest.mark.parametrize("in_background", [True, False])
def test_nothing_of_a_cancelled_one_waits_for_a_collection(in_background: bool) -> None:
    """Bug: whoever left amid a stream left the request behind, prompt and all, until the collector ran: that
    counts objects, not bytes.
    """

    async def main() -> None:
        async with registry_of() as registry:
            held = Held()
            asked = row(background=in_background)
            run = run_of(held)
            job = await registry.start(asked, builder_of(asked), run)
            await held.runs.wait()
            left = weakref.ref(run)
            job.task.cancel()
            await asyncio.wait({job.task})
            await asyncio.sleep(0)
            del run, job
            assert left() is None

    gc.collect()
    gc.disable()
    try:
        within_patience(main())
    finally:
        gc.enable()


def test_cancel_of_a_queued_one_lets_the_next_run() -> None:
    async def main() -> None:
        with closing(Store(":memory:", Retention())) as store:
            held, registry = Held(), Registry(store, max_running=1)
            first, second, third = row(), row(), row()
            await started(registry, first, held)
            await held.runs.wait()
            for asked in (second, third):
                await started(registry, asked, hello)
            await registry.cancel(second)
            assert (await ended(registry, second)).response["output"] == []
            held.go_on.set()
            for asked, status in ((first, "completed"), (second, "cancelled"), (third, "completed")):
                await check_end(registry, store, asked, status)

    within_patience(main())


@pytest.mark.bug("F05")
def test_cancel_against_completion() -> None:
    """A status that anybody has seen does not change: a late completion overwrote cancelled, and the other
    way round (github.com/SamSaffron/term-llm/pull/789). A thousand runs, each with its own interleaving.
    """

    async def main() -> None:
        with closing(Store(":memory:", Retention(max_responses=10 * RACES))) as store:
            registry = Registry(store, max_running=3)
            ends = [await race(registry, store, Random(seed)) for seed in range(RACES)]
            assert min(ends.count("cancelled"), ends.count("completed")) > RACES / 10, "there was a race"

    within_patience(main())


# What one who asks now and then may see follow each other.
ONWARD = {("queued", "in_progress"), *itertools.product(("queued", "in_progress"), TERMINAL)}


async def race(registry: Registry, store: Store, chance: Random) -> str:
    """One response, with readers, pollers and cancellers; its status in the end."""
    asked, seen = row(), list[list[str]]()

    async def says() -> AsyncIterator[Said]:
        said: list[Said] = [Delta("analysis", "a"), Delta("final", "b"), DONE]
        for one in said:
            await yields(chance.randrange(30))
            yield one

    async def poll(cancels_after: int) -> None:
        seen.append(statuses := [])
        for i in range(6):
            if i == cancels_after:
                await registry.cancel(asked)
            found = await registry.get(asked.id, asked.owner)
            assert found
            statuses.append(found.response["status"])
            await yields(chance.randrange(5))
        if cancels_after < 6:
            assert statuses[cancels_after] in ("cancelled", "completed")

    log = await started(registry, asked, says)
    pollers = [asyncio.create_task(poll(chance.randrange(12))) for _ in range(2)]
    followers = [asyncio.create_task(read(log, after)) for after in (-1, 2)]
    await asyncio.gather(*pollers)
    response = await check_end(registry, store, asked, "completed", "cancelled")
    assert await followers[0] == store.frames(asked.id)
    assert await followers[1] == store.frames(asked.id)[3:]
    for statuses in seen:
        for before, after in itertools.pairwise([*statuses, response["status"]]):
            assert after == before or (before, after) in ONWARD
    return str(response["status"])


async def yields(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


@pytest.mark.bug("F07")
def test_delete_is_not_undone_by_the_end_of_the_run() -> None:
    """The run stored its result when it ended, after the delete: mistral.rs, background_tasks.rs. Whoever has
    seen the last event may delete at once.
    """

    async def main() -> None:
        with closing(Store(":memory:", Retention())) as store:
            registry = Registry(store)
            for _ in range(50):
                asked = row()
                log = await started(registry, asked, hello)
                async with aclosing(log.read()) as logged:
                    async for frames in logged:
                        if b"response.completed" in frames[-1]:
                            await registry.delete(asked)
                            assert await registry.get(asked.id, asked.owner) is None
                            assert await registry.events(asked) is None
                assert await registry.get(asked.id, asked.owner) is None
            assert registry.counts() == {"background": 0}

    within_patience(main())


# --- the queue ----------------------------------------------------------------------------------------------


def test_queued_ones_wait_their_turn() -> None:
    async def main() -> None:
        with closing(Store(":memory:", Retention())) as store:
            registry, all_held = Registry(store, max_running=2), [Held() for _ in range(5)]
            asked = [row() for _ in all_held]
            for one, held in zip(asked, all_held, strict=True):
                await started(registry, one, held)

            async def statuses() -> str:
                found = [await registry.get(one.id, one.owner) for one in asked]
                return " ".join(one.response["status"] for one in found if one)

            for i in range(5):
                for held in all_held[: i + 2]:
                    await held.runs.wait()
                n_run = min(2, 5 - i)
                expected = ["completed"] * i + ["in_progress"] * n_run + ["queued"] * (5 - i - n_run)
                while await statuses() != " ".join(expected):
                    await asyncio.sleep(0)
                all_held[i].go_on.set()
                await ended(registry, asked[i])

    within_patience(main())


def test_owners_take_turns() -> None:
    """One who had queued a hundred was served a hundred times before the next one."""

    async def main() -> None:
        order: list[str] = []

        def says(name: str) -> Says:
            async def only_its_end() -> AsyncIterator[Said]:
                order.append(name)
                yield DONE

            return only_its_end

        async with registry_of(max_running=1) as registry:
            held, cancelled = Held(), row(owner="d")
            await started(registry, row(owner="a"), held)
            await held.runs.wait()
            for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
                await started(registry, row(owner=name[0]), says(name))
            await started(registry, cancelled, says("d1"))
            await registry.cancel(cancelled)
            held.go_on.set()
            while registry.counts()["background"]:
                await asyncio.sleep(0)
            assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]

    within_patience(main())


def test_the_store_is_closed_behind_all_that_was_asked_of_it() -> None:
    """The server is an owner, too: by turns it would be closed before what another waits for."""

    async def close() -> None:
        registry = Registry(Store(":memory:", Retention()))
        asked = [asyncio.create_task(registry.items(row(owner="busy"))) for _ in range(9)]
        await asyncio.sleep(0)
        await registry.close_store()
        assert await asyncio.gather(*asked) == [[]] * 9

    within_patience(close())


def test_those_who_poll_share_what_is_encoded() -> None:
    """Bug: each GET of a large response that runs made JSON of it, in the event loop."""

    async def poll() -> None:
        async with registry_of() as registry:
            held = Held()
            stored = row()
            event_log = await started(registry, stored, held)
            await held.runs.wait()
            await event_log.until_shown()
            rows = await asyncio.gather(*(registry.get(stored.id, stored.owner) for _ in range(50)))
            assert {found.status for found in rows if found} == {"in_progress"}
            assert len({id(found.response_json) for found in rows if found}) == 1
            assert await registry.size(stored.id, stored.owner) >= stored.n_bytes
            assert await registry.size(stored.id, "another") == 0
            held.go_on.set()

    within_patience(poll())


def test_no_owner_fills_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key queued 264 jobs, and the others got 429. By count, then by bytes."""

    async def n_accepted(*owners: str, is_shared: bool = True, **changes: Any) -> list[int]:
        counts = []
        async with registry_of(max_running=1, max_live=32, is_shared=is_shared) as registry:
            for owner in owners:
                submits = (started(registry, row(owner=owner, **changes), Held()) for _ in range(33))
                done = await asyncio.gather(*submits, return_exceptions=True)
                refused = [error for error in done if isinstance(error, BadInput)]
                assert refused[0].code == "rate_limit_exceeded"
                counts.append(len(done) - len(refused))
        return counts

    assert within_patience(n_accepted("a", "b", "c")) == [16, 8, 4]
    assert within_patience(n_accepted("the only one", is_shared=False)) == [32]
    monkeypatch.setattr(background, "MAX_LIVE_BYTES", 1_000_000)
    assert within_patience(n_accepted("a", "b", "c", items_json='["' + "x" * 90_000 + '"]')) == [5, 2, 1]


@pytest.mark.bug("I06")
def test_queue_is_bounded() -> None:
    """By what is accepted at once, too."""

    async def main() -> None:
        with closing(Store(":memory:", Retention())) as store:
            registry, held = Registry(store, max_running=1, max_live=4), Held()
            first = row()
            await started(registry, first, held)
            await held.runs.wait()
            asked = [row() for _ in range(10)]
            submits = (started(registry, one, hello) for one in asked)
            done = await asyncio.gather(*submits, return_exceptions=True)
            assert [isinstance(d, BadInput) for d in done] == [False] * 3 + [True] * 7
            assert registry.counts() == {"background": 4}
            assert [await registry.get(one.id, one.owner) for one in asked[3:]] == [None] * 7
            await registry.cancel(asked[0])
            again = row()
            await started(registry, again, hello)
            held.go_on.set()
            for one in (first, asked[1], asked[2], again):
                assert (await ended(registry, one)).response["status"] == "completed"

    within_patience(main())


# --- a store that does not take it --------------------------------------------------------------------------


def test_nothing_is_accepted_that_is_not_stored() -> None:
    async def main() -> None:
        store = Store(":memory:", Retention())
        registry, asked = Registry(store), row()
        store.close()
        with pytest.raises(BadInput, match="could not be stored"):
            await started(registry, asked, hello)
        assert registry.counts() == {"background": 0}

    within_patience(main())


@pytest.mark.parametrize("kept", [True, False])
def test_what_could_not_be_stored_is_not_told_as_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    """A foreground response was answered with `store: true` though its write had failed."""

    async def main() -> None:
        store = Store(str(tmp_path / "store.db"), Retention())
        registry = Registry(store)
        store._db.execute("PRAGMA max_page_count = 1")  # SQLite's own: as much as there is, and no more
        body = json.dumps({"instructions": "long" * 20_000})
        asked = row(background=False, kept=kept, request_json=body)
        job = await registry.start(asked, builder_of(asked), run_of(hello))
        events = parsed(await read(job.log))
        await job.task
        laws.check_response(events)
        stored = [event["response"]["store"] for event in events if "response" in event]
        assert stored == [True, True, not kept]
        assert job.log.events[-1]["response"]["store"] == stored[-1]
        assert await registry.get(asked.id, asked.owner) is None
        assert ("could not be stored" in caplog.text) == kept
        await registry.close_store()

    within_patience(main())


def test_what_json_cannot_say_fails_once() -> None:
    """A logprob that was NaN left its run in_progress for ever, and its cancel was a 500; nine of them left
    no room for others.
    """

    async def not_a_number() -> AsyncIterator[Said]:
        yield Delta("final", "Hel")
        yield Delta("final", "lo", (TokenLogprob("lo", math.nan, b"lo"),))
        yield DONE

    async def main() -> None:
        async with registry_of(max_running=1, max_live=2) as registry:
            for _ in range(3):
                asked = row()
                log = await started(registry, asked, not_a_number)
                laws.check_response(parsed(await read(log)))
                response = (await ended(registry, asked)).response
                assert response["error"]["message"] == "ValueError in the server; its log has the details."

    within_patience(main())


def test_readers_end_when_the_store_has_gone() -> None:
    """What was seen stays so, for as long as the process lives."""

    async def main() -> None:
        store = Store(":memory:", Retention())
        held, registry, asked = Held(), Registry(store), row()
        log = await started(registry, asked, held)
        await held.runs.wait()
        follower = asyncio.create_task(read(log))
        await log.until_shown()
        store.close()
        held.go_on.set()
        laws.check_response(parsed(await follower))
        assert (await ended(registry, asked)).response["status"] == "completed"
        late = await registry.events(asked)
        assert late
        assert await read(late) == await follower
        await registry.cancel(asked)
        assert (await ended(registry, asked)).response["status"] == "completed"

    within_patience(main())


# --- stop and start -----------------------------------------------------------------------------------------


def test_what_met_a_full_disk_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed in memory for ever, and after a restart what had completed had failed."""
    monkeypatch.setattr(background, "RETRY_S", 0.01)
    path = str(tmp_path / "store.db")
    limit = "PRAGMA max_page_count = {}"

    async def main() -> None:
        with closing(Store(path, Retention())) as store:
            registry, go = Registry(store), asyncio.Event()

            async def waits() -> AsyncIterator[Said]:
                await go.wait()
                yield Delta("final", "long" * 20_000)
                yield DONE

            first, second = row(), row()
            log = await started(registry, first, waits)
            store._db.execute(limit.format(1))  # SQLite's own: as much as there is, and no more
            go.set()
            frames = await read(log)
            assert log.status == "completed"
            assert (await ended(registry, first)).response["status"] == "completed"
            assert registry.counts() == {"background": 1}
            store._db.execute(limit.format(1 << 20))
            await started(registry, second, hello)
            await ended(registry, second)
            while registry.counts()["background"]:
                await asyncio.sleep(0.01)
            assert store.frames(first.id) == frames
        with closing(Store(path, Retention())) as store:
            assert not store.live()

    within_patience(main())


@pytest.mark.parametrize("persistent", [True, False])
def test_close_ends_what_runs(persistent: bool) -> None:
    """A producer that never ends, and one that waits behind it: it waits for the next process, if any."""

    async def main() -> None:
        with closing(Store(":memory:", Retention())) as store:
            registry, running, queued = Registry(store, max_running=1), row(), row()
            logs = [await started(registry, one, Held()) for one in (running, queued)]
            followers = [asyncio.create_task(read(log)) for log in logs]
            while logs[0].status == "queued":
                await asyncio.sleep(0)
            registry.stop_accepting()
            refused = row()
            with pytest.raises(BadInput, match="about to stop"):
                await started(registry, refused, hello)
            await registry.close(persistent)
            response = await check_end(registry, store, running, "failed")
            assert response["error"] == {"code": "server_error", "message": SHUT_DOWN}
            assert await followers[0] == store.frames(running.id)
            assert await followers[1] == store.frames(queued.id)
            if persistent:
                assert store.live() == [queued.id]
                assert len(await followers[1]) == 2
            else:
                await check_end(registry, store, queued, "failed")

    within_patience(main())


@pytest.mark.parametrize("persistent", [True, False])
def test_cancel_wins_over_close(persistent: bool) -> None:
    async def main() -> None:
        with closing(Store(":memory:", Retention())) as store:
            registry, running, queued = Registry(store, max_running=1), row(), row()
            for one in (running, queued):
                await started(registry, one, Held())
            cancels = [asyncio.create_task(registry.cancel(one)) for one in (running, queued)]
            await asyncio.sleep(0)
            await registry.close(persistent)
            await asyncio.gather(*cancels)
            for one in (running, queued):
                await check_end(registry, store, one, "cancelled")

    within_patience(main())


def left_by_a_dead_process(path: Path) -> tuple[list[Row], dict[str, list[bytes]]]:
    """Two that ran and two that were queued when it died: asyncio.run() lets no task end by itself."""
    store = Store(str(path), Retention())
    asked = [row() for _ in range(4)]

    async def main() -> None:
        registry = Registry(store, max_running=2)
        for one in asked:
            held = Held()
            log = await started(registry, one, held)
            if one in asked[:2]:
                await held.runs.wait()
                await log.until_shown()

    within_patience(main())
    with closing(store):
        return asked, {one.id: store.frames(one.id) for one in asked}


def hello_again(left: Row) -> tuple[Builder, Run]:
    return builder_of(left), run_of(hello)


def test_next_process_ends_what_a_dead_one_left(tmp_path: Path) -> None:
    """Bug: of what an interrupted one had said nothing was in its response, though its events were stored.

    Numbers go on without a gap after the bytes that were seen, and no number goes backwards.
    """
    asked, before = left_by_a_dead_process(tmp_path / "db")

    async def main() -> None:
        with closing(Store(str(tmp_path / "db"), Retention())) as store:
            registry = Registry(store)
            await registry.recover(hello_again)
            for one in asked[:2]:
                response = (await ended(registry, one)).response
                assert response["error"] == {"code": "server_error", "message": INTERRUPTED}
                assert response["usage"] is None
                said = [(item["status"], item["content"][0]["text"]) for item in response["output"]]
                assert said == [("completed", "Hm."), ("incomplete", "Hel")]
            for one in asked[:2]:
                await check_end(registry, store, one, "failed")
            for one in asked[2:]:
                await check_end(registry, store, one, "completed")
            for one in asked:
                log = await registry.events(one)
                assert log
                seen = await read(log)
                assert seen[: len(before[one.id])] == before[one.id]
                laws.check_response(parsed(seen))
            assert store.live() == []
            await registry.recover(hello_again)
            assert registry.counts() == {"background": 0}

    within_patience(main())


@pytest.mark.parametrize("what", ["UPDATE responses SET items = '{'", "DELETE FROM events WHERE number = 1"])
def test_what_is_damaged_stops_nothing_else(tmp_path: Path, what: str) -> None:
    """A row that cannot be read, or whose events cannot, is logged, and as good as absent."""
    asked, _ = left_by_a_dead_process(tmp_path / "db")

    async def main() -> None:
        with closing(Store(str(tmp_path / "db"), Retention())) as store:
            registry = Registry(store)
            for one in (asked[0], asked[2]):
                store._db.execute(
                    what + (" AND response_id" if "events" in what else " WHERE id") + " = ?", (one.id,)
                )
            await registry.recover(hello_again)
            assert await registry.get(asked[0].id, "") is None
            assert await registry.get(asked[2].id, "") is None
            await check_end(registry, store, asked[1], "failed")
            await check_end(registry, store, asked[3], "completed")

    within_patience(main())


def test_a_full_disk_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: 5,000 tracebacks in 25 s."""

    async def main() -> None:
        with closing(Store(str(tmp_path / "db"), Retention())) as store:
            registry = Registry(store)
            store._db.execute("PRAGMA max_page_count = 1")  # SQLite's own: as much as there is, and no more
            for _ in range(20):
                with pytest.raises(BadInput, match="could not be stored"):
                    await started(registry, row(request_json=json.dumps({"a": "x" * 9000})), hello)

    within_patience(main())
    failures = [record for record in caplog.records if "could not be stored" in record.getMessage()]
    assert len(failures) == 1


def test_a_store_file_that_is_deleted_is_noticed(tmp_path: Path) -> None:
    """Bug: SQLite wrote on into a file that no process could open any more."""

    async def main() -> None:
        with closing(Store(str(tmp_path / "db"), Retention())) as store:
            registry = Registry(store)
            await started(registry, row(), hello)
            (tmp_path / "db").unlink()
            with pytest.raises(BadInput, match="could not be stored"):
                await started(registry, row(), hello)

    within_patience(main())


def test_eviction_lets_writes_in_between() -> None:
    """Bug: while the store deleted what one owner had too much of, the events of all others waited."""

    async def main() -> None:
        store = Store(":memory:", Retention(max_responses=0))
        registry, held, deleted = Registry(store), Held(), []
        ended_row = row(background=False).with_response("completed", "{}", 1)
        for _ in range(100):
            store.insert(ended_row._replace(id=new_id("resp")))
        delete = store.delete

        def count(id: str) -> None:
            deleted.append(id)
            delete(id)

        store.delete = count  # type: ignore[method-assign]
        log = await started(registry, row(background=True), held)
        registry._evict_if_due()
        while not deleted:
            await asyncio.sleep(0)
        await held.runs.wait()
        await log.until_shown()
        assert len(deleted) < 20
        await registry.close(persistent=False)
        await registry.close_store()

    within_patience(main())
