"""background.py on its own: its queue. simulate.py sees how runs end, in any order of what can happen."""

import asyncio
import functools
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import background
from background import MIN_BYTES, Registry
from channels import Accepted, Compaction, Delta, Finish, Said, Take, Usage
from event_log import EventLog, encode_event
from helpers.limits import PATIENCE_S
from jobs import MAX_TOGETHER, Archive, Job
from request import params
from request.refusals import BadInput
from responses import Builder
from service.metrics import Metrics, Stopwatch
from store import Retention, Row, Store
from worker import Prompt, Workers

pytestmark = pytest.mark.timeout(PATIENCE_S)
BODY = {"model": "m", "input": "hi", "background": True, "stream": True}
HEAD = {"object": "response", "created_at": 1, "model": "m"} | params.from_responses(BODY, {}).echo
DONE = Finish("stop", Usage(3, 2))
ITEM = {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}

Says = Callable[[], AsyncIterator[Said]]
numbers = itertools.count()


def new_id(prefix: str) -> str:
    return f"{prefix}_{next(numbers)}"


def row(**changes: Any) -> Row:
    id_ = new_id("resp")
    body = json.dumps(BODY | {"metadata": {"id": id_}})
    return Row(id_, "", 0, None, True, True, True, body, json.dumps([ITEM]))._replace(**changes)


@dataclass
class Script:
    """A Prompt that says what a test wants."""

    says: Says
    request: params.Request
    headers: dict[str, str] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)

    async def run(self, take: Take, choice: int = 0) -> None:
        take([Accepted()])
        async for said in self.says():
            assert not isinstance(said, Compaction)
            take([said])


class Scripts(Workers):
    """Workers that say what each response is to say, by its id."""

    def __init__(self) -> None:
        super().__init__()
        self.says: dict[str, Says] = {}

    def find(self, model: str) -> Any:
        return SimpleNamespace(defaults={}, alive=True)

    async def prepare(self, request: params.Request, conversation: Any) -> Prompt:
        return Script(self.says[request.echo["metadata"]["id"]], request)


async def started(registry: Registry, row: Row, says: Says) -> EventLog:
    builder = Builder({"id": row.id, **HEAD}, new_id, "{}: {}".format)
    job = Job(row, builder, registry.archive, Stopwatch(Metrics("m", dict)))
    assert isinstance(registry.workers, Scripts)
    registry.workers.says[row.id] = says
    await registry.queue(job)
    return job.log


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
async def registry_of(is_shared: bool = False) -> AsyncIterator[Registry]:
    """A registry over a store of its own; in the end what runs is ended."""
    registry = Registry(Store(":memory:", Retention()), Scripts(), is_shared)
    try:
        async with asyncio.timeout(20):
            yield registry
    finally:
        async with asyncio.timeout(20):
            await registry.close()
        await registry.close_store()


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
        while registry.jobs:
            await asyncio.sleep(0)
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
