"""background.py on its own: real stores, and runs that say what the test wants, when it wants."""

import asyncio
import functools
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

import background
import sse
from background import MIN_BYTES, Registry
from channels import Accepted, Compaction, Delta, Finish, Take, TokenLogprob, Usage
from event_log import EventLog, encode_event
from helpers import laws
from helpers.limits import PATIENCE_S
from jobs import MAX_TOGETHER, UNFINISHED, Archive, Job
from request import items, params
from request.refusals import BadInput
from responses import Builder
from service.metrics import Metrics, Stopwatch
from store import TERMINAL, Retention, Row, Store
from worker import Prompt, Workers

pytestmark = pytest.mark.timeout(PATIENCE_S)
BODY = {"model": "m", "input": "hi", "background": True, "stream": True}
HEAD = {"object": "response", "created_at": 1, "model": "m"} | params.from_responses(BODY, {}).echo
DONE = Finish("stop", Usage(3, 2))
FULL = "PRAGMA max_page_count = 1"  # SQLite's own limit: as much as there is, and no more
ITEM = {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}

Says = Callable[[], AsyncIterator[items.Said]]
numbers = itertools.count()


def new_id(prefix: str) -> str:
    return f"{prefix}_{next(numbers)}"


def row(**changes: Any) -> Row:
    id_ = new_id("resp")
    body = json.dumps(BODY | {"metadata": {"id": id_}})
    return Row(id_, "", 0, None, True, True, True, body, json.dumps([ITEM]))._replace(**changes)


def builder_of(row: Row) -> Builder:
    return Builder({"id": row.id, **HEAD}, new_id, "{}: {}".format)


@dataclass
class Script:
    """A Prompt that says what a test wants."""

    says: Says
    request: params.Request = field(default_factory=functools.partial(params.from_responses, BODY, {}))
    headers: dict[str, str] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)

    async def run(self, take: Take, choice: int = 0) -> None:
        take([Accepted()])
        async for said in self.says():
            assert not isinstance(said, Compaction)
            take([said])


class Scripts(Workers):
    """Workers that say what each response is to say, by its id; what was not told says hello."""

    alive = True

    def __init__(self) -> None:
        super().__init__()
        self.says: dict[str, Says] = {}

    def find(self, model: str) -> Any:
        return SimpleNamespace(defaults={})

    async def prepare(self, request: params.Request, conversation: Any) -> Prompt:
        return Script(self.says.get(request.echo["metadata"]["id"], hello), request)


def job_of(registry: Registry, row: Row) -> Job:
    watch = Stopwatch(Metrics("m", dict))
    return Job(row, builder_of(row), registry.archive, watch)


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


async def hello() -> AsyncIterator[items.Said]:
    yield Delta("final", "Hello")
    yield DONE


class Held:
    """Says half, then nothing until it is let go."""

    def __init__(self, rest: str = "lo") -> None:
        self.rest = rest
        self.runs = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self) -> AsyncIterator[items.Said]:
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
            await registry.close()
        await registry.close_store()


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


async def left_by_another(registry: Registry) -> Row:
    """A response that was queued when its process died."""
    left = row()
    queued = [encode_event(n, event) for n, event in enumerate(builder_of(left).queue())]
    assert await registry._write(left, 0, queued)
    return left


async def yields(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


# --- how a run ends; simulate.py has any order of all that can happen ---------------------------------------

NOT_UTF_8 = Delta("final", "x", (TokenLogprob("\ud800", -1, b"x"),))  # half a surrogate pair

#   how a run ends            what it says or raises last        status        of the error message
ENDS: dict[str, tuple[items.Said | Exception | None, str, str | None]] = {
    "completes":              (DONE,                             "completed",  None),
    "is cut":                 (Finish("length", Usage(3, 1)),    "incomplete", None),
    "fails":                  (Finish("failed", message="Gone"), "failed",     "Gone"),
    "raises":                 (ZeroDivisionError("a bug"),       "failed",     UNFINISHED.message),
    "returns":                (None,                             "failed",     UNFINISHED.message),
    "says what UTF-8 cannot": (NOT_UTF_8,                        "failed",     UNFINISHED.message),
}  # fmt: skip


@pytest.mark.bug("F01", "F02", "F03", "F04")
@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("how", ENDS)
async def test_how_a_run_ends(how: str, in_background: bool) -> None:
    """Bugs of others: runs without an end, readers that wait for ever (BUGS.md)."""
    last, status, error = ENDS[how]

    async def says() -> AsyncIterator[items.Said]:
        yield Delta("final", "Hel")
        if isinstance(last, Exception):
            raise last
        if last:
            yield last

    async with registry_of() as registry:
        asked = row(background=in_background)
        job = job_of(registry, asked)
        await start(registry, job, says)
        frames = await laws.read(job.log)
        await job.task  # raises nothing: the end has told it
        events = parsed(frames)
        laws.check_order(events)
        response = events[-1]["response"]
        assert (response["status"], (response["error"] or {}).get("message")) == (status, error)
        assert response["output"][0]["content"][0]["text"] == "Hel"
        assert (await ended(registry, asked)).response == response
        assert registry._store.frames(asked.id) == (frames if in_background else [])


@pytest.mark.bug("F03")
async def test_what_has_no_prompt_when_its_turn_comes_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripts, "prepare", AsyncMock(side_effect=BadInput("Gone")))
    async with registry_of() as registry:
        frames = await laws.read(await started(registry, row(), hello))
    assert parsed(frames)[-1]["response"]["error"]["message"] == "Gone"


async def test_what_is_damaged_on_a_full_disk_does_not_end_the_start() -> None:
    async with registry_of() as registry:
        left = await left_by_another(registry)
        await execute(registry, "DELETE FROM events WHERE response_id = ?", left.id)
        await execute(registry, "PRAGMA query_only = ON")
        await registry.recover(functools.partial(job_of, registry))
        assert not registry.jobs
        await execute(registry, "PRAGMA query_only = OFF")


@pytest.mark.bug("P09")
@pytest.mark.parametrize("max_batch", [1, 2])
async def test_what_waits_is_queued(monkeypatch: pytest.MonkeyPatch, max_batch: int) -> None:
    """For a place that is not the foreground's; or, bug: it failed, for an upstream to come back."""
    monkeypatch.setattr(background, "WORKER_POLL_S", 0)
    scripts = Scripts()
    registry = Registry(Store(":memory:", Retention()), scripts, max_batch=max_batch)
    scripts.alive = False
    held, asked = Held(), [row(), row()]
    for one in asked:
        await started(registry, one, held)
    await yields(99)
    assert {job.log.status for job in registry.jobs.values()} == {"queued"}
    scripts.alive = True
    await held.runs.wait()
    await yields(99)
    assert [job.log.status for job in registry.jobs.values()] == ["in_progress", "queued"]
    held.go_on.set()
    await until_idle(registry)
    await registry.close_store()


# --- the queue ----------------------------------------------------------------------------------------------


async def test_owners_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One who had queued a hundred was served a hundred times before the next one."""
    monkeypatch.setattr(background, "MAX_RUNNING", 1)
    order: list[str] = []

    async def says(name: str) -> AsyncIterator[items.Said]:
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


async def test_an_owner_who_stores_much_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes that wait are done together, but not all of them: large ones take 10 ms each."""
    order: list[str] = []
    monkeypatch.setattr(Store, "write", lambda _, row, *events: order.append(row.owner))
    archive = Archive(Store(":memory:", Retention()))
    entry = encode_event(0, {"type": "response.queued", "response": {"status": "queued"}})
    await asyncio.gather(*(archive.write(row(owner=name), 0, [entry]) for name in "a" * 31 + "b"))
    assert order.index("b") == 2 * MAX_TOGETHER  # those that run, and those that wait for the thread
    assert len(order) == 32


async def test_the_store_is_closed_after_all_that_was_asked_of_it() -> None:
    """By turns of the owners it would be closed before what another one waits for."""
    registry = Registry(Store(":memory:", Retention()), Scripts())
    asked = [asyncio.create_task(registry.get("resp_unknown", "busy")) for _ in range(9)]
    await asyncio.sleep(0)
    await registry.close_store()
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
        assert held_bytes[0] > MIN_BYTES + 8 * len(log.shown.response_json)  # its tools are in each snapshot
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
    monkeypatch.setattr(background, "N_HEADS", 0)
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


@pytest.mark.parametrize("damage", DAMAGE)
async def test_what_is_damaged_stops_nothing_else(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A live row that cannot be read, or whose events cannot, is set aside. Bug: deleted, and a traceback."""

    def revive(left: Row) -> Job:
        assert left.request["input"] == "hi"  # read, as the server does
        return job_of(registry, left)

    async with registry_of() as registry:
        damaged, whole = [await left_by_another(registry) for _ in range(2)]
        await execute(registry, damage, damaged.id)
        await registry.recover(revive)
        assert await registry.get(damaged.id, "") is None
        assert (await ended(registry, whole)).status == "completed"
        owners = await registry._call("", registry._store._db.execute, "SELECT owner FROM responses")
        assert sorted(owners) == [("",), ("damaged",)]
        [told] = [record for record in caplog.records if record.name == "background"]
        assert told.getMessage().startswith(f"{damaged.id} is damaged, and set aside in the store: ")
        assert not told.exc_info


HARMS: dict[str, Callable[[Path], None]] = {
    "No such file": Path.unlink,
    "replaced or cut": lambda path: os.truncate(path, path.stat().st_size - 1),
}


@pytest.mark.parametrize("told", HARMS)
async def test_a_store_that_is_removed_or_cut_is_told_once(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite went on without a word, and the next start found nothing."""
    monkeypatch.setattr(background, "EVICTION_INTERVAL_S", 0)
    async with registry_of(path=str(tmp_path / "db")) as registry:
        await registry._call("", registry._store.evict, 0)
        HARMS[told](tmp_path / "db")
        evicting = asyncio.create_task(registry.evict())
        for _ in range(9):
            await registry._call("", int)  # by turns with it
        [record] = caplog.records
        assert told in record.getMessage()
        if (tmp_path / "db").exists():  # bug: once it had been told, it was not told when it came back
            for n_bytes in (1, -1):
                os.truncate(tmp_path / "db", (tmp_path / "db").stat().st_size + n_bytes)
                for _ in range(9):
                    await registry._call("", int)
            assert len(caplog.records) == 2
        evicting.cancel()


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

    def seal(type: str, text: str) -> str:
        raise ZeroDivisionError(type, text)

    async def thinks() -> AsyncIterator[items.Said]:
        yield Delta("analysis", "Hm.")
        yield DONE

    async with registry_of() as registry:
        asked = row(background=in_background)
        job = job_of(registry, asked)
        job.builder = Builder({"id": asked.id, **HEAD}, new_id, seal, seals_reasoning=True)
        await start(registry, job, thinks)
        events = parsed(await laws.read(job.log))
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        last = events[-1]["response"]
        assert (last["status"], last["error"]["message"]) == ("failed", UNFINISHED.message)
        if in_background:
            assert (await ended(registry, asked)).response == last


async def test_what_the_builder_cannot_begin_is_an_error() -> None:
    """Not an empty stream that ends as if all were well."""
    async with registry_of() as registry:
        job = job_of(registry, row(background=False))
        job.builder.state = "end"
        await start(registry, job, hello)
        with pytest.raises(AssertionError, match="no event"):
            await job.task
