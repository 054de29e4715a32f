"""background.py on its own: real stores, and runs that say what the test wants, when it wants."""

import asyncio
import functools
import itertools
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import Phase, given, settings
from hypothesis import stateful as machine
from hypothesis import strategies as st

import background
import event_log
import sse
from background import Registry
from channels import Accepted, Compaction, Delta, Finish, Take, TokenLogprob, Usage
from event_log import MAX_FRAMES, Entry, EventLog, encode_event
from helpers import laws
from jobs import UNFINISHED, Job, Said
from request import params
from request.items import sealer
from request.refusals import BadInput
from responses import Builder
from service.metrics import Metrics, Stopwatch
from store import TERMINAL, Retention, Row, Store
from worker import Prompt, Workers

pytestmark = pytest.mark.timeout(30)
BODY = {"model": "m", "input": "hi", "background": True, "stream": True}
HEAD = {"object": "response", "created_at": 1, "model": "m"} | params.from_responses(BODY, {}).echo
DONE = Finish("stop", Usage(3, 2))
SHUT_DOWN = "The server is shutting down."
INTERRUPTED = "interrupted by a restart"
ITEM = {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])
Says = Callable[[], AsyncIterator[Said]]
numbers = itertools.count()


def new_id(prefix: str) -> str:
    return f"{prefix}_{next(numbers)}"


def row(**changes: Any) -> Row:
    id_ = new_id("resp")
    body = json.dumps(BODY | {"metadata": {"id": id_}})
    return Row(id_, "", 0, None, True, True, True, body, json.dumps([ITEM]))._replace(**changes)


def builder_of(row: Row) -> Builder:
    return Builder({"id": row.id, **HEAD}, new_id)


@dataclass
class Script:
    """A Prompt that says what a test wants."""

    says: Says
    request: params.Request = field(default_factory=functools.partial(params.from_responses, BODY, {}))

    async def count_tokens(self) -> int:
        return 0

    async def run(self, take: Take, choice: int = 0) -> None:
        take([Accepted()])
        async for said in self.says():
            assert not isinstance(said, Compaction)
            take([said])


class Scripts(Workers):
    """Workers that say what each response is to say, by its id; what was not told says hello."""

    def __init__(self) -> None:
        super().__init__()
        self.says: dict[str, Says] = {}

    def find(self, model: str) -> Any:
        return SimpleNamespace(defaults={})

    async def prepare(self, request: params.Request, conversation: Any) -> Prompt:
        return Script(self.says.get(request.echo["metadata"]["id"], hello), request)


def job_of(registry: Registry, row: Row) -> Job:
    watch = Stopwatch(Metrics("m", dict))
    return Job(row, builder_of(row), registry.archive, watch, sealer(b"", "", "compaction"))


async def start(registry: Registry, job: Job, says: Says) -> None:
    if job.row.background:
        assert isinstance(registry.workers, Scripts)
        registry.workers.says[job.row.id] = says
        await registry.queue(job)
    else:
        await job.start(nullcontext(Script(says)))


async def started(registry: Registry, row: Row, says: Says) -> EventLog:
    job = job_of(registry, row)
    await start(registry, job, says)
    return job.log


async def hello() -> AsyncIterator[Said]:
    yield Delta("final", "Hello")
    yield DONE


class Held:
    """Says half, then nothing until it is let go."""

    def __init__(self, rest: str = "lo") -> None:
        self.rest = rest
        self.runs = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self) -> AsyncIterator[Said]:
        yield Delta("analysis", "Hm.")
        yield Delta("final", "Hel")
        self.runs.set()
        await self.go_on.wait()
        yield Delta("final", self.rest)
        yield DONE


@asynccontextmanager
async def registry_of(is_shared: bool = False, path: str = ":memory:") -> AsyncIterator[Registry]:
    """A registry over a store of its own; in the end what runs is ended."""
    registry = Registry(Store(path, Retention()), Scripts(), is_shared)
    try:
        async with asyncio.timeout(20):
            yield registry
    finally:
        async with asyncio.timeout(20):
            await registry.close(persistent=False)
        await registry.archive.close()


def parsed(frames: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in sse.Parser().feed(b"".join(frames))]


async def ended(registry: Registry, asked: Row) -> Row:
    """A response when it is terminal, as GET tells it."""
    while not (found := await registry.get(asked.id, asked.owner)) or found.status not in TERMINAL:
        await asyncio.sleep(0)
    return found


async def until_idle(registry: Registry) -> None:
    while registry.jobs:
        await asyncio.sleep(0)


async def execute(registry: Registry, statement: str, *values: str) -> None:
    """In the store's thread: SQLite may be at work."""
    await registry._call("", registry._store._db.execute, statement, values)


async def yields(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


# --- the log ------------------------------------------------------------------------------------------------


def event(n: int) -> dict[str, Any]:
    return {"type": "response.created", "response": {"status": str(n)}}


actions = st.lists(
    st.tuples(st.just("extend"), st.integers(0, 3))
    | st.tuples(st.just("read"), st.integers(-1, 12))
    | st.tuples(st.sampled_from(["write", "fail", "pass"]), st.just(0)),
    max_size=25,
)


class SlowStore:
    """Its writes wait until they are told whether they succeed."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.has_failed = False  # in its last write: then what is not written is shown all the same
        self.succeeds = asyncio.Queue[bool]()

    async def write(self, first: int, entries: Sequence[Entry]) -> bool:
        assert first == len(self.written), "no gap, and nothing twice"
        self.has_failed = not await self.succeeds.get()
        if not self.has_failed:
            self.written.extend(entry.frame for entry in entries)
        return not self.has_failed

    def check_shown(self, number: int) -> None:
        assert self.has_failed or number < len(self.written), "seen before it was written"


@given(actions, st.booleans(), st.integers(0, 2))
def test_readers_get_the_same_bytes(actions: list[tuple[str, int]], stored: bool, n_earlier: int) -> None:
    """Whenever they come, and from any number on: what is written, all of it, in order, and then the end.

    One who has seen more than there is gets nothing. No client learns what a restart could take back.
    """

    async def main() -> None:
        store = SlowStore()
        store.has_failed = not stored
        earlier = [encode_event(n, event(n)) for n in range(n_earlier)]
        store.written = [entry.frame for entry in earlier]
        log = EventLog(store.write if stored else None, earlier)

        async def follow(after: int) -> list[bytes]:
            got = []
            async with aclosing(log.read(after)) as logged:
                async for frames in logged:
                    got += frames
                    store.check_shown(json.loads(sse.data(frames[-1]))["sequence_number"])
            return got

        readers: list[tuple[int, asyncio.Task[list[bytes]]]] = []
        n = n_earlier
        for action, argument in actions:
            if action == "extend":
                log.extend(event(n + i) for i in range(argument))
                n += argument
            elif action == "read":
                readers.append((argument, asyncio.create_task(follow(argument))))
            elif action != "pass":
                store.succeeds.put_nowait(action == "write")
            await asyncio.sleep(0)
            store.check_shown(int(log.shown.status or -1))
        log.extend([event(n)])
        log.close()
        for _ in range(n + 1):
            store.succeeds.put_nowait(True)
        readers += [(after, asyncio.create_task(follow(after))) for after in range(-1, n + 2)]
        expected = [encode_event(i, event(i)).frame for i in range(n + 1)]
        for after, task in readers:
            assert await task == expected[after + 1 :]
        assert (log.shown.status, log.status) == (str(n), str(n))
        while stored and store.written != expected:
            await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(event_log, "RETRY_S", 0)
        asyncio.run(main())


async def test_a_reader_gets_what_waits_in_pieces() -> None:
    """Between the pieces the others have their turn, however fast the reader is."""
    log = EventLog()
    log.extend([{}] * (2 * MAX_FRAMES + 1))
    log.close()
    readers = [log.read(), log.read()]
    sizes: list[tuple[int, int]] = []

    async def follow(i: int) -> None:
        async for frames in readers[i]:
            sizes.append((i, len(frames)))

    await asyncio.gather(follow(0), follow(1))
    assert sizes == [(i, n) for n in (MAX_FRAMES, MAX_FRAMES, 1) for i in (0, 1)]


# --- any order of all that can happen -----------------------------------------------------------------------

INDEX = st.integers(0, 99)  # of a response, among those that fit
STATUSES = ("queued", "in_progress", *TERMINAL)
N_RUNNING = 2  # at a time, of those in the background
NOT_UTF_8 = Delta("final", "x", (TokenLogprob("\ud800", -1, b"x"),))  # half a surrogate pair

#   how a run ends            what it says or raises last        status        of the error message
ENDS: dict[str, tuple[Said | Exception | None, str, str | None]] = {
    "completes":              (DONE,                             "completed",  None),
    "is cut":                 (Finish("length", Usage(3, 1)),    "incomplete", None),
    "fails":                  (Finish("failed", message="Gone"), "failed",     "Gone"),
    "raises":                 (ZeroDivisionError("a bug"),       "failed",     UNFINISHED.message),
    "returns":                (None,                             "failed",     UNFINISHED.message),
    "says what UTF-8 cannot": (NOT_UTF_8,                        "failed",     UNFINISHED.message),
}  # fmt: skip


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
    task: asyncio.Task[None] = field(init=False)  # which a client cancels that leaves
    watching: asyncio.Task[None] = field(init=False)

    @property
    def is_live(self) -> bool:
        return self.status not in TERMINAL

    def end(self, status: str, error: str | None = None) -> None:
        self.status, self.error = status, error

    async def says(self) -> AsyncIterator[Said]:
        while said := await self.script.get():
            if isinstance(said, Exception):
                raise said
            yield said

    async def watch(self, log: EventLog) -> None:
        async with aclosing(log.read(len(self.frames) - 1)) as logged:
            async for frames in logged:
                self.frames += frames


def has(*statuses: str) -> Callable[[F], F]:
    """Let a rule run only if there is a response of one of these statuses."""
    decorate: Callable[[F], F] = machine.precondition(lambda self: bool(self.fitting(*statuses)))
    return decorate


class RegistryMachine(machine.RuleBasedStateMachine):
    """Responses that are started, followed, cancelled and deleted in any order, in one process after another.

    A terminal status stays; all that was said is in the response, and in its stream and the store.
    """

    def __init__(self) -> None:
        super().__init__()
        self.models: list[Model] = []  # of what is not deleted, the oldest first
        self._folder = TemporaryDirectory()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(1))
        self._do(self._open())

    def _do(self, work: Awaitable[T]) -> T:
        """Wait for work, and for all that comes of it."""

        async def done() -> T:
            result = await work
            for _ in range(5):
                await self._registry._call("", list)  # the store has one thread
                await asyncio.to_thread(list)  # as all others here
                await yields(10)
            return result

        return self._loop.run_until_complete(asyncio.wait_for(done(), 10))

    async def _open(self) -> None:
        def revive(row: Row) -> Job:
            (model,) = [model for model in self.models if model.row.id == row.id]
            model.script = asyncio.Queue()
            workers.says[row.id] = model.says
            return job_of(self._registry, row)

        workers = Scripts()
        self._store = Store(self._folder.name + "/db", Retention())
        self._registry = Registry(self._store, workers)
        await self._registry.recover(revive)

    def fitting(self, *statuses: str) -> list[Model]:
        return [model for model in self.models if model.status in statuses]

    def some(self, i: int, *statuses: str) -> Model:
        fit = self.fitting(*(statuses or STATUSES))
        return fit[i % len(fit)]

    @machine.initialize(kinds=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=5))
    def begin(self, kinds: list[tuple[bool, bool]]) -> None:
        for in_background, kept in kinds:
            self.start(background=in_background, kept=kept)
        self.all_are_as_they_should_be()
        for i in range(len(self.fitting("in_progress"))):
            self.say(i, "final", "a")

    @machine.rule(background=st.booleans(), kept=st.booleans())
    def start(self, background: bool, kept: bool) -> None:
        new = row(background=background, kept=kept, born_at=next(numbers))
        model = Model(new, "queued" if background else "in_progress")
        self.models.append(model)

        async def begin() -> None:
            job = job_of(self._registry, new)
            await start(self._registry, job, model.says)
            model.task = job.task
            model.watching = asyncio.create_task(model.watch(job.log))

        self._do(begin())

    @has("in_progress")
    @machine.rule(i=INDEX, channel=st.sampled_from(["analysis", "final"]), word=st.sampled_from("a\u2028水"))
    def say(self, i: int, channel: Literal["analysis", "final"], word: str) -> None:
        model = self.some(i, "in_progress")
        model.said += word
        model.script.put_nowait(Delta(channel, word))

    @has("in_progress")
    @machine.rule(i=INDEX, how=st.sampled_from([*ENDS]))
    def end(self, i: int, how: str) -> None:
        model = self.some(i, "in_progress")
        last, status, error = ENDS[how]
        model.script.put_nowait(last)
        model.script.put_nowait(None)
        model.end(status, error)

    @has(*STATUSES)
    @machine.rule(i=INDEX)
    def cancel(self, i: int) -> None:
        """Or leave: a foreground response ends with its client."""
        model = self.some(i)
        if model.is_live:
            model.end("cancelled")
        if model.row.background:
            self._do(self._registry.cancel(model.row))
        else:
            model.task.cancel()

    @has("in_progress")
    @machine.rule(i=INDEX, n_yields=st.integers(0, 40))
    def cancel_near_the_end(self, i: int, n_yields: int) -> None:
        """Either may win, and then it stays."""
        model = self.some(i, "in_progress")
        self.end(i, "completes")
        if not model.row.background:
            return

        async def cancel() -> None:
            await yields(n_yields)
            await self._registry.cancel(model.row)
            await model.watching

        self._do(cancel())
        last = parsed(model.frames)[-1]["response"]
        assert last["status"] in ("completed", "cancelled")
        model.end(last["status"])

    @has(*TERMINAL)
    @machine.rule(i=INDEX)
    def delete(self, i: int) -> None:
        model = self.some(i, *TERMINAL)
        self.models.remove(model)
        self._do(self._registry.delete(model.row))
        assert self._do(self._registry.get(model.row.id, "")) is None
        with pytest.raises(BadInput):
            self._do(self._registry.events(model.row))

    @has(*STATUSES)
    @machine.rule(i=INDEX, after=st.integers(-1, 12))
    def follow(self, i: int, after: int) -> None:
        model = self.some(i)
        if model.row.background:
            log = self._do(self._registry.events(model.row))
            assert log
            model.followers.append((after, self._loop.create_task(laws.read(log, after))))

    @machine.rule(is_killed=st.booleans())
    def go_on_in_the_next_process(self, is_killed: bool) -> None:
        for model in self.models:
            model.followers = []
            if model.status == "in_progress" and not model.row.background:
                model.task.cancel()
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
        for job in self._registry.jobs.values():
            job.finish = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._registry.archive.close()

    @machine.invariant()
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
        response = found.response
        texts = [item["content"][0]["text"] for item in response["output"]]
        assert "".join(texts) == model.said
        assert (response["error"] or {}).get("message") == model.error
        assert events[-1]["response"] == response
        assert model.watching.done()
        assert model.task.cancelled() or model.task.exception() is None
        for after, follower in model.followers:
            assert follower.result() == model.frames[after + 1 :]
        if model.row.background:
            assert self._store.frames(model.row.id) == model.frames

    def teardown(self) -> None:
        for model in self.models:
            if not model.row.background:
                model.task.cancel()
        self._do(self._registry.close(persistent=False))
        self._loop.run_until_complete(self._die())
        self._loop.close()
        self._folder.cleanup()


@pytest.mark.bug("F02", "F03", "F04", "F05", "F07", "F09")
def test_whatever_happens_in_whatever_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs of others: runs without an end, cancels that are lost, readers that wait for ever (BUGS.md)."""
    monkeypatch.setattr(background, "MAX_RUNNING", N_RUNNING)
    limits = settings(max_examples=40, stateful_step_count=20, phases=[Phase.generate])  # no shrinking
    machine.run_state_machine_as_test(RegistryMachine, settings=limits)


# --- the queue ----------------------------------------------------------------------------------------------


async def test_owners_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One who had queued a hundred was served a hundred times before the next one."""
    monkeypatch.setattr(background, "MAX_RUNNING", 1)
    order: list[str] = []

    async def says(name: str) -> AsyncIterator[Said]:
        order.append(name)
        yield DONE

    async with registry_of() as registry:
        held, cancelled = Held(), row(owner="d")
        await started(registry, row(owner="a"), held)
        await held.runs.wait()
        for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
            await started(registry, row(owner=name[0]), functools.partial(says, name))
        await started(registry, cancelled, functools.partial(says, "d1"))
        await registry.cancel(cancelled)
        held.go_on.set()
        await until_idle(registry)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_the_store_is_closed_after_all_that_was_asked_of_it() -> None:
    """By turns of the owners it would be closed before what another one waits for."""
    registry = Registry(Store(":memory:", Retention()), Scripts())
    asked = [asyncio.create_task(registry.get("resp_unknown", "busy")) for _ in range(9)]
    await asyncio.sleep(0)
    await registry.archive.close()
    assert await asyncio.gather(*asked) == [None] * 9


async def test_those_who_poll_share_what_is_encoded() -> None:
    """Bug: each GET of a large response that runs made JSON of it, in the event loop."""
    async with registry_of() as registry:
        held, stored, held_bytes = Held(), row(), list[int]()
        log = await started(registry, stored, held)
        await held.runs.wait()
        while log.shown.status == "queued":
            await asyncio.sleep(0)
        found = [await registry.get(stored.id, "", held_bytes.append) for _ in range(2)]
        assert [row.status for row in found if row] == ["in_progress"] * 2
        assert len({id(row.response_json) for row in found if row}) == 1
        assert held_bytes[0] >= stored.n_bytes
        assert await registry.get(stored.id, "another", held_bytes.append) is None
        assert held_bytes[2:] == [0]


# owners; bytes of an item; how many of 33 each are accepted
QUEUES = [("a b c", 0, [16, 8, 4]), ("alone", 0, [32]), ("a b c", 90_000, [4, 2, 1])]


@pytest.mark.bug("I06")
@pytest.mark.parametrize(("owners", "n_bytes", "accepted"), QUEUES)
async def test_no_owner_fills_the_queue(
    owners: str, n_bytes: int, accepted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key queued 264 jobs, and the others got 429. What is refused leaves nothing."""
    monkeypatch.setattr(background, "MIN_BYTES", 1_000_000 // 33)
    monkeypatch.setattr(background, "MAX_LIVE_BYTES", 1_000_000)
    items_json = json.dumps([ITEM | {"content": "x" * n_bytes}])
    async with registry_of(is_shared=len(accepted) > 1) as registry:
        for owner, n in zip(owners.split(), accepted, strict=True):
            asked = [row(owner=owner, items_json=items_json) for _ in range(33)]
            submits = (started(registry, one, Held()) for one in asked)
            done = await asyncio.gather(*submits, return_exceptions=True)
            refused = [error for error in done if isinstance(error, BadInput)]
            assert refused[0].code == ("rate_limit_exceeded" if len(accepted) > 1 else "server_is_overloaded")
            assert len(done) - len(refused) == n
            assert await registry.get(asked[-1].id, owner) is None
        await registry.cancel(asked[0])
        await started(registry, row(owner=owner, items_json=items_json), Held())


# --- a store that does not take it --------------------------------------------------------------------------

FULL = "PRAGMA max_page_count = 1"  # SQLite's own limit: as much as there is, and no more
DAMAGE = ["UPDATE texts SET request = '{' WHERE id = ?", "DELETE FROM events WHERE response_id = ?"]
TOO_MUCH = json.dumps({"instructions": "long" * 20_000})


@pytest.mark.parametrize("kept", [True, False])
async def test_what_could_not_be_stored_is_not_told_as_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    """Bugs: it was answered with `store: true`; a full disk was 5,000 tracebacks in 25 s."""
    async with registry_of(path=str(tmp_path / "db")) as registry:
        await execute(registry, FULL)
        asked = row(background=False, kept=kept, request_json=TOO_MUCH)
        events = parsed(await laws.read(await started(registry, asked, hello)))
        laws.check_response(events)
        stored = [event["response"]["store"] for event in events if "response" in event]
        assert stored == [True, True, not kept]
        assert await registry.get(asked.id, "") is None
        with pytest.raises(BadInput, match="could not be stored") as refused:
            await started(registry, row(request_json=TOO_MUCH), hello)
        assert refused.value.status == 503
    assert [record.exc_info for record in caplog.records] == [None] * (1 + kept)
    assert caplog.records[0].getMessage().endswith("could not be stored: database or disk is full")


async def test_what_met_a_full_disk_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed in memory for ever, and after a restart what had completed had failed."""
    monkeypatch.setattr(event_log, "RETRY_S", 0.01)
    async with registry_of(path=str(tmp_path / "db")) as registry:
        asked, held = row(), Held(TOO_MUCH)
        log = await started(registry, asked, held)
        await execute(registry, FULL)
        held.go_on.set()
        frames = await laws.read(log)
        assert (await ended(registry, asked)).status == "completed"
        assert registry.jobs
        await execute(registry, "PRAGMA max_page_count = 1000000")
        await until_idle(registry)
        assert registry._store.frames(asked.id) == frames
        assert not registry._store.live()


@pytest.mark.parametrize("damage", DAMAGE)
async def test_what_is_damaged_stops_nothing_else(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A live row that cannot be read, or whose events cannot, is set aside. Bug: deleted, and a traceback."""

    def revive(left: Row) -> Job:
        assert left.request["input"] == "hi"  # read, as the server does
        return job_of(registry, left)

    async with registry_of() as registry:
        damaged, whole = row(), row()
        for left in (damaged, whole):
            queued = builder_of(left).queue()
            assert await registry._write(left, 0, [encode_event(n, event) for n, event in enumerate(queued)])
        await execute(registry, damage, damaged.id)
        await registry.recover(revive)
        assert await registry.get(damaged.id, "") is None
        assert (await ended(registry, whole)).status == "completed"
        owners = await registry._call("", registry._store._db.execute, "SELECT owner FROM responses")
        assert sorted(owners) == [("",), ("damaged",)]
        [told] = [record for record in caplog.records if record.name == "background"]
        assert told.getMessage().startswith(f"{damaged.id} is damaged, and set aside in the store: ")
        assert not told.exc_info


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (Path.unlink, "No such file"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "replaced or cut"),
    ],
)
async def test_a_store_that_is_removed_or_cut_is_told_once(
    harm: Callable[[Path], None],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SQLite went on without a word, and the next start found nothing."""
    monkeypatch.setattr(background, "EVICTION_INTERVAL_S", 0)
    async with registry_of(path=str(tmp_path / "db")) as registry:
        await registry._call("", registry._store.evict, 0)
        harm(tmp_path / "db")
        evicting = asyncio.create_task(registry.evict())
        for _ in range(9):
            await registry._call("", int)  # by turns with it
        evicting.cancel()
        [record] = caplog.records
        assert told in record.getMessage()


async def test_eviction_lets_writes_in_between() -> None:
    """Bug: while the store deleted what one owner had too much of, the events of all others waited."""
    async with registry_of() as registry:
        store = registry._store
        ended_row = row(background=False).with_response("completed", "{}", 1)
        for i in range(100):
            store.write(ended_row._replace(id=f"r{i}"))
        store._retention = Retention(max_responses=0)
        evicting = asyncio.create_task(registry.evict())
        await asyncio.sleep(0)  # it begins
        log = await started(registry, row(), Held())
        async for frames in log.read():
            if b"Hel" in frames[-1]:
                break
        left = await registry._call("", store._db.execute, "SELECT COUNT(*) FROM responses")
        assert left.fetchone() > (20,)
        evicting.cancel()


@pytest.mark.parametrize("in_background", [True, False])
async def test_what_the_builder_cannot_end_ends_all_the_same(in_background: bool) -> None:
    """Bug: it stayed in progress. Here the seal raises, with which a thought is closed."""

    def seal(text: str) -> str:
        raise ZeroDivisionError(text)

    async def thinks() -> AsyncIterator[Said]:
        yield Delta("analysis", "Hm.")
        yield DONE

    async with registry_of() as registry:
        asked = row(background=in_background)
        job = job_of(registry, asked)
        job.builder = Builder({"id": asked.id, **HEAD}, new_id, seal)
        await start(registry, job, thinks)
        events = parsed(await laws.read(job.log))
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        last = events[-1]["response"]
        assert (last["status"], last["error"]["message"]) == ("failed", UNFINISHED.message)
        if in_background:
            assert (await ended(registry, asked)).response == last
