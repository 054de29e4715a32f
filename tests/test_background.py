"""background.py on its own: real stores, and runs that say what the test wants, when it wants.

The bugs are those of servers that have background responses: a run that is never ended, a reader that is
never woken, a cancel that a late completion overwrites. A state machine looks for them: RegistryMachine.
"""

import asyncio
import gc
import itertools
import json
import math
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import background
import event_log
import sse
from background import Registry, Run, Said
from channels import Accepted, Delta, Finish, TokenLogprob, Usage
from event_log import READ_BYTES, Entry, EventLog
from helpers import laws
from request import params
from request.refusals import BadInput
from responses import Builder, Event
from store import TERMINAL, Retention, Row, Store

PATIENCE_S = 30
RACES = 300
BODY = {"model": "m", "input": "hi", "background": True, "stream": True}
HEAD = {"object": "response", "created_at": 1, "model": "m"} | params.from_responses(BODY, {}).echo
DONE = Finish("stop", Usage(3, 2))
SHUT_DOWN = "The server is shutting down."
INTERRUPTED = "interrupted by a restart"
UNFINISHED = "The run ended without a last event."
NO_JSON = "ValueError in the server; its log has the details."
RAISED = "ZeroDivisionError in the server; its log has the details."

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])
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
    state = (event["status"], "{}") if "status" in event else ()
    return Entry(b"%d %d" % (number, event["n"]), *state)


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

        async def write(first: int, entries: Sequence[Entry]) -> bool:
            nonlocal has_failed
            assert first == len(written), "no gap, and nothing twice"
            has_failed = not await gate.get()
            if not has_failed:
                written.extend(entry.frame for entry in entries)
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
        monkeypatch.setattr(event_log, "RETRY_S", 0)
        within_patience(main())


def test_log_goes_on_from_an_earlier_process() -> None:
    """Numbers go on where the frames end, and a reader sees both."""

    async def main() -> list[list[bytes]]:
        log = EventLog(encode, stored=[Entry(b"0 zero"), Entry(b"1 one", "in_progress", "{}")])
        early = asyncio.create_task(read(log, after=0))
        await asyncio.sleep(0)
        assert (log.status, log.ended) == ("in_progress", False)
        log.extend([{"n": 7, "status": "failed"}])
        log.close()
        assert (log.shown, log.ended) == (Entry(b"2 7", "failed", "{}"), True)
        return [await early, await read(log), await read(log, 2), await read(log, 99)]

    assert within_patience(main()) == [[b"1 one", b"2 7"], [b"0 zero", b"1 one", b"2 7"], [], []]


def test_state_is_seen_when_it_is_written() -> None:
    """Who polls must not learn what a restart could take back."""

    async def main() -> None:
        async def write(first: int, entries: Sequence[Entry]) -> bool:
            begun.set()
            await go_on.wait()
            return True

        begun, go_on = asyncio.Event(), asyncio.Event()
        log = EventLog(encode, write)
        log.extend([{"n": 0, "status": "completed"}])
        await begun.wait()
        assert (log.shown, log.status) == (None, "completed")
        go_on.set()
        log.close()
        await log.until_over()
        assert log.shown == Entry(b"0 0", "completed", "{}")

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


# --- any order of all that can happen -----------------------------------------------------------------------

INDEX = st.integers(0, 99)  # of a response, among those that fit
STATUSES = ("queued", "in_progress", *TERMINAL)
N_RUNNING = 2  # at a time, of those in the background
NOT_A_NUMBER = Delta("final", "x", (TokenLogprob("x", math.nan, b"x"),))

# fmt: off
#   how a run ends            what it says or raises last        status        of the error message
ENDS: dict[str, tuple[Said | Exception | None, str, str | None]] = {
    "completes":              (DONE,                             "completed",  None),
    "is cut":                 (Finish("length", Usage(3, 1)),    "incomplete", None),
    "fails":                  (Finish("failed", message="Gone"), "failed",     "Gone"),
    "raises":                 (ZeroDivisionError("a bug"),       "failed",     RAISED),
    "returns":                (None,                             "failed",     UNFINISHED),
    "says what JSON cannot":  (NOT_A_NUMBER,                     "failed",     NO_JSON),
}
# fmt: on


@dataclass(eq=False)
class Model:
    """A response as it should be."""

    row: Row
    status: str
    error: str | None = None
    said: str = ""
    frames: list[bytes] = field(default_factory=list)  # as its first reader gets them, in all processes
    followers: list[tuple[int, asyncio.Task[list[bytes]]]] = field(default_factory=list)  # after which number
    script: asyncio.Queue[Said | Exception | None] = field(default_factory=asyncio.Queue)
    leave: Callable[[], object] = field(init=False)  # what a client does that leaves
    watching: asyncio.Task[None] = field(init=False)

    @property
    def is_live(self) -> bool:
        return self.status not in TERMINAL

    def end(self, status: str, error: str | None = None) -> None:
        self.status, self.error = status, error

    async def run(self, emit: Callable[[Said], None]) -> None:
        emit(Accepted())
        while said := await self.script.get():
            if isinstance(said, Exception):
                raise said
            emit(said)

    async def watch(self, log: EventLog) -> None:
        async with aclosing(log.read(len(self.frames) - 1)) as logged:
            async for frames in logged:
                self.frames += frames


def has(*statuses: str) -> Callable[[F], F]:
    """Let a rule run only if there is a response of one of these statuses."""
    decorate: Callable[[F], F] = precondition(lambda machine: bool(machine.fitting(*statuses)))
    return decorate


class RegistryMachine(RuleBasedStateMachine):
    """Responses that are started, followed, cancelled and deleted in any order, in one process after another.

    A terminal status stays; all that was said is in the response; whoever follows gets the rest of what was
    streamed, and an end; what is stored is what was streamed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.models: list[Model] = []  # of what is not deleted, the oldest first
        self._folder = TemporaryDirectory()
        self._loop = asyncio.new_event_loop()
        self._do(self._open())

    def _do(self, work: Awaitable[T]) -> T:
        """Wait for work, and for all that comes of it."""

        async def done() -> T:
            result = await work
            for _ in range(5):
                await self._registry._call("", list)  # the store has one thread
                await yields(10)
            return result

        return self._loop.run_until_complete(asyncio.wait_for(done(), 10))

    async def _open(self) -> None:
        def revive(row: Row) -> tuple[Builder, Run]:
            (model,) = [model for model in self.models if model.row.id == row.id]
            model.script = asyncio.Queue()
            return builder_of(row), model.run

        self._store = Store(self._folder.name + "/db", Retention())
        self._registry = Registry(self._store, max_running=N_RUNNING)
        await self._registry.recover(revive)

    def fitting(self, *statuses: str) -> list[Model]:
        return [model for model in self.models if model.status in statuses]

    def some(self, i: int, *statuses: str) -> Model:
        fit = self.fitting(*(statuses or STATUSES))
        return fit[i % len(fit)]

    @initialize(kinds=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=5))
    def begin(self, kinds: list[tuple[bool, bool]]) -> None:
        for in_background, kept in kinds:
            self.start(background=in_background, kept=kept)
        self.all_are_as_they_should_be()
        for i in range(len(self.fitting("in_progress"))):
            self.say(i, "final", "a")

    @rule(background=st.booleans(), kept=st.booleans())
    def start(self, background: bool, kept: bool) -> None:
        new = row(background=background, kept=kept, born_at=next(numbers))
        model = Model(new, "queued" if background else "in_progress")
        self.models.append(model)

        async def start() -> None:
            job = await self._registry.start(new, builder_of(new), model.run)
            model.leave = job.task.cancel
            model.watching = asyncio.create_task(model.watch(job.log))

        self._do(start())

    @has("in_progress")
    @rule(i=INDEX, channel=st.sampled_from(["analysis", "final"]), word=st.sampled_from("a\u2028水"))
    def say(self, i: int, channel: Literal["analysis", "final"], word: str) -> None:
        model = self.some(i, "in_progress")
        model.said += word
        model.script.put_nowait(Delta(channel, word))

    @has("in_progress")
    @rule(i=INDEX, how=st.sampled_from(["completes", "is cut", "fails"]))
    def end(self, i: int, how: str) -> None:
        self._end(i, how)

    @has("in_progress")
    @rule(i=INDEX, how=st.sampled_from(["returns", "raises", "says what JSON cannot"]))
    def break_off(self, i: int, how: str) -> None:
        self._end(i, how)

    def _end(self, i: int, how: str) -> None:
        model = self.some(i, "in_progress")
        last, status, error = ENDS[how]
        model.script.put_nowait(last)
        model.script.put_nowait(None)
        model.end(status, error)

    @has(*STATUSES)
    @rule(i=INDEX)
    def cancel(self, i: int) -> None:
        """Or leave: a foreground response ends with its client."""
        model = self.some(i)
        if model.is_live:
            model.end("cancelled")
        if model.row.background:
            self._do(self._registry.cancel(model.row))
        else:
            model.leave()

    @has(*TERMINAL)
    @rule(i=INDEX)
    def delete(self, i: int) -> None:
        model = self.some(i, *TERMINAL)
        self.models.remove(model)
        self._do(self._registry.delete(model.row))
        assert self._do(self._registry.get(model.row.id, "")) is None
        assert self._do(self._registry.events(model.row)) is None

    @has(*STATUSES)
    @rule(i=INDEX, after=st.integers(-1, 12))
    def follow(self, i: int, after: int) -> None:
        model = self.some(i)
        if model.row.background:
            log = self._do(self._registry.events(model.row))
            assert log
            model.followers.append((after, self._loop.create_task(read(log, after))))

    @rule(is_killed=st.booleans())
    def go_on_in_the_next_process(self, is_killed: bool) -> None:
        for model in self.models:
            model.followers = []
            if model.status == "in_progress" and not model.row.background:
                model.leave()
                model.end("cancelled")
            elif model.status == "in_progress":
                model.end("failed", INTERRUPTED if is_killed else SHUT_DOWN)
        self._do(yields(1))
        if not is_killed:
            self._do(self._registry.close(persistent=True))
        self._loop.run_until_complete(self._die())
        self._do(self._open())
        for model in self.models:
            if model.row.background:
                log = self._do(self._registry.events(model.row))
                assert log
                model.watching = self._loop.create_task(model.watch(log))

    async def _die(self) -> None:
        """End all tasks: none of them ends a response."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._registry.close_store()

    @invariant()
    def all_are_as_they_should_be(self) -> None:
        waiting = [model for model in self.models if model.is_live and model.row.background]
        for model in waiting[:N_RUNNING]:  # they run in the order in which they came
            model.status = "in_progress"
        self._do(yields(20))
        for model in self.models:
            if model.row.background or (model.row.kept and not model.is_live):
                found = self._do(self._registry.get(model.row.id, ""))
                assert found
                assert found.status == model.status
                if not model.is_live:
                    self._check_end(model, found)
            else:
                assert self._do(self._registry.get(model.row.id, "")) is None

    def _check_end(self, model: Model, found: Row) -> None:
        events = parsed(model.frames)
        laws.check_order(events)
        laws.check_statuses(events)
        response = found.response
        texts = [item["content"][0]["text"] for item in response["output"]]
        assert "".join(texts) == model.said
        assert (response["error"] or {}).get("message") == model.error
        assert events[-1]["response"] == response
        assert model.watching.done()
        for after, follower in model.followers:
            assert follower.result() == model.frames[after + 1 :]
        if model.row.background:
            assert self._store.frames(model.row.id) == model.frames

    def teardown(self) -> None:
        for model in self.models:
            if not model.row.background:
                model.leave()
        self._do(self._registry.close(persistent=False))
        self._loop.run_until_complete(self._die())
        self._loop.close()
        self._folder.cleanup()


@pytest.mark.bug("F02", "F03", "F04", "F05", "F07", "F09")
def test_whatever_happens_in_whatever_order() -> None:
    """A worker that was gone left the run open, or its error was that of another message:
    github.com/EricLBuehler/mistral.rs/pull/2114; vLLM had no error handling around a run at all:
    github.com/vllm-project/vllm/pull/49721; a follower returned on response.completed only, and a number was
    taken for a place in a list that may have gaps (vLLM, serving.py, 0001948); a cancel set a flag that was
    never read, and a deleted run was stored again at its end (mistral.rs, background_tasks.rs, 9e92262).
    """
    phases = [Phase.generate]  # a few steps need no shrinking
    run_state_machine_as_test(
        RegistryMachine, settings=settings(max_examples=40, stateful_step_count=20, phases=phases)
    )


async def raises() -> AsyncIterator[Said]:
    yield Delta("final", "Hel")
    raise ZeroDivisionError("a bug")


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


# --- the queue ----------------------------------------------------------------------------------------------


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
            await started(registry, stored, held)
            await held.runs.wait()
            while registry._jobs[stored.id].shown_row().status == "queued":
                await asyncio.sleep(0)
            rows = await asyncio.gather(*(registry.get(stored.id, stored.owner) for _ in range(50)))
            assert {found.status for found in rows if found} == {"in_progress"}
            assert len({id(found.response_json) for found in rows if found}) == 1
            held_bytes: list[int] = []
            await registry.get(stored.id, stored.owner, held_bytes.append)
            assert held_bytes[0] >= stored.n_bytes
            assert await registry.get(stored.id, "another", held_bytes.append) is None
            assert held_bytes[1:] == [0]
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


# --- stop and start -----------------------------------------------------------------------------------------


def test_what_met_a_full_disk_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed in memory for ever, and after a restart what had completed had failed."""
    monkeypatch.setattr(event_log, "RETRY_S", 0.01)
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


def left_by_a_dead_process(path: Path) -> tuple[list[Row], dict[str, list[bytes]]]:
    """Two that ran and two that were queued when it died: asyncio.run() lets no task end by itself."""
    store = Store(str(path), Retention())
    asked = [row() for _ in range(4)]

    async def main() -> None:
        registry = Registry(store, max_running=2)
        for one in asked:
            held = Held()
            log = await started(registry, one, held)
            while one in asked[:2] and b"Hel" not in b"".join(
                entry.frame for entry in log._entries[: log._n_shown]
            ):
                await asyncio.sleep(0)

    within_patience(main())
    with closing(store):
        return asked, {one.id: store.frames(one.id) for one in asked}


def hello_again(left: Row) -> tuple[Builder, Run]:
    return builder_of(left), run_of(hello)


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


def test_eviction_lets_writes_in_between() -> None:
    """Bug: while the store deleted what one owner had too much of, the events of all others waited."""

    async def main() -> None:
        store = Store(":memory:", Retention(max_responses=0))
        registry, held, deleted = Registry(store), Held(), []
        ended_row = row(background=False).with_response("completed", "{}", 1)
        for _ in range(100):
            store.write(ended_row._replace(id=new_id("resp")))
        delete = store.delete

        def count(id: str) -> None:
            deleted.append(id)
            delete(id)

        store.delete = count  # type: ignore[method-assign]
        log = await started(registry, row(background=True), held)
        await registry.recover(hello_again)
        while not deleted:
            await asyncio.sleep(0)
        async with aclosing(log.read()) as logged:
            async for frames in logged:
                if b"Hel" in frames[-1]:
                    break
        assert len(deleted) < 20
        await registry.close(persistent=False)
        await registry.close_store()

    within_patience(main())
