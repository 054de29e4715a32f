"""store.py on its own: what goes in comes out, what is over a limit goes, and a terminal state stays."""

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import N_EVICTED, TERMINAL, Retention, Row, Store

NOW = 1_000_000.0
WEATHER = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}"}
ODD_TEXT = 'ü 水 🦜 \u2028 \0 \\ "'


@pytest.fixture
def db() -> Iterator[Store]:
    with closing(Store(":memory:", Retention())) as opened:
        yield opened


def row(id: str = "resp_1", **changes: Any) -> Row:
    request = dumped({"model": "m", "instructions": ODD_TEXT})
    items = dumped([{"type": "message", "id": "msg_1", "role": "user", "content": ODD_TEXT}])
    new = Row(id, "", NOW, None, True, True, True, request, items)
    return new.with_response(*state("queued", id=id), NOW)._replace(**changes)


def ended(id: str, at: float = NOW, **changes: Any) -> Row:
    return row(id).with_response(*state("completed", id=id), at)._replace(**changes)


def state(status: str, *output: dict[str, Any], id: str = "resp_1") -> tuple[str, str]:
    return status, dumped({"id": id, "status": status, "output": list(output)})


def newer(status: str = "", *output: dict[str, Any], id: str = "resp_1", at: float = NOW) -> Row:
    """A row whose response object is newer than the stored one; "": the events have brought none."""
    return row(id).with_response(*(state(status, *output, id=id) if status else ("", "")), at)


def evict(db: Store, now: float) -> None:
    while db.evict(now):
        pass


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def size(kept: Row, *frames: bytes) -> int:
    """What the limit on bytes counts."""
    texts = [kept.request_json, kept.items_json, kept.response_json]
    return sum(map(len, [*(text.encode() for text in texts), *frames]))


def ids(db: Store, *asked: str) -> list[str]:
    return [name for name in asked if db.get(name)]


# --- in and out ---------------------------------------------------------------------------------------------


@pytest.mark.bug("F10")
@pytest.mark.parametrize("damage", ["DELETE FROM events", "UPDATE events SET frame = x'30'"])
def test_lost_events_are_noticed(db: Store, damage: str) -> None:
    """The place in the list was taken for the number: every event after a gap was off by one."""
    db.write(row(), 0, [b"zero", b"one", b"two"])
    db._db.execute(damage + " WHERE number = 1")
    assert db.frames("resp_1") == []


def test_what_is_continued_has_no_logprobs(db: Store) -> None:
    """No model reads them, and each response of a chain would hold those of all before it."""
    part = {"type": "output_text", "text": ODD_TEXT, "annotations": [], "logprobs": [{"token": "a"}] * 9}
    message = {"type": "message", "id": "msg_2", "content": [part]}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    db.write(row().with_response(*state("completed", thought, message, WEATHER), NOW))
    stored = db.get("resp_1")
    assert stored
    found = db.to_continue(stored)
    said = [thought, message | {"content": [part | {"logprobs": []}]}, WEATHER]
    assert found.response == {"status": found.status, "output": said}


@pytest.mark.parametrize("status", TERMINAL)
@pytest.mark.parametrize("later", ["", "in_progress", *TERMINAL])
def test_terminal_state_never_changes(db: Store, status: str, later: str) -> None:
    """Nor does a late write bring back what is deleted: EricLBuehler/mistral.rs, background_tasks.rs."""
    db.write(row(), 0, [b"0"])
    db.write(newer(status, WEATHER), 1, [b"1"])
    db.write(newer(later, at=NOW + 1), 2, [b"2"])
    assert db.get("resp_1") == row().with_response(*state(status, WEATHER), NOW)
    assert db.frames("resp_1") == [b"0", b"1"]
    db.delete("resp_1")
    db.write(newer(later), 2, [b"2"])
    assert (db.get("resp_1"), db.frames("resp_1")) == (None, [])


# --- limits -------------------------------------------------------------------------------------------------

# Event_bytes 0 means expired: no frame is empty.
frames = st.lists(st.binary(min_size=1, max_size=300), max_size=3)
ages = st.integers(0, 9)


@pytest.mark.bug("F13")
@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), ages, st.booleans(), frames), max_size=9),
    st.just(9) | st.integers(0, 6),
    st.just(10_000) | st.integers(0, 2000),
    st.just(9) | ages,
    st.just(9) | ages,
)
def test_limits(
    rows: list[tuple[str, int, bool, list[bytes]]], count: int, max_bytes: int, age: int, events_age: int
) -> None:
    """The same rules once more, in Python, over any rows. What is live never goes.

    Of all that is left the owner who holds most loses the oldest: one key pushed out what others had stored.
    """
    with closing(Store(":memory:", Retention(count, max_bytes, age, events_age))) as db:
        db.write(row("live", born_at=-1e9), 0, [b"0" * 3000])
        left = list[tuple[Row, list[bytes]]]()
        for i, (owner, at, kept, frames) in enumerate(rows):
            one = ended(f"r{i}", at, owner=owner, kept=kept, born_at=i)
            db.write(one, 0, frames)
            if 9 - at <= (age if kept else min(age, events_age)):
                left.append((one, frames if 9 - at <= events_age else []))
        left.sort(key=lambda each: each[0].ended_at or 0)
        limits: list[tuple[int, Callable[..., int]]] = [(count, lambda *_: 1), (max_bytes, size)]
        for limit, size_of in limits:
            while sum(size_of(one, *frames) for one, frames in left) > limit:
                held = Counter[str]()
                for one, frames in left:
                    held[one.owner] += size_of(one, *frames)
                left.remove(next(each for each in left if held[each[0].owner] == max(held.values())))
        evict(db, 9)
        found = {name: db.frames(name) for name in ids(db, *(f"r{i}" for i in range(9)))}
        assert found == {one.id: frames for one, frames in left}
        assert ids(db, "live") == ["live"]
        sizes = [db.size(one.id, one.owner) for one, _ in left]
        counted = db._db.execute("SELECT SUM(n), SUM(n_bytes) FROM owners").fetchone()
        assert counted == (len(sizes), sum(sizes))


def n_steps(n_rows: int) -> int:
    """Count the instructions that SQLite carries out to find that nothing is to go, and then eight rows."""
    steps: list[None] = []
    with closing(Store(":memory:", Retention(n_rows))) as db:
        for i in range(n_rows):
            db.write(ended(str(i), NOW + i, owner="ab"[3 * i > n_rows], kept=bool(i % 2)), 0, [b"0"])
        db._db.set_progress_handler(lambda: steps.append(None), 1)
        db.evict(NOW)
        db._retention = Retention(n_rows - N_EVICTED)
        assert db.evict(NOW)
    return len(steps)


def test_eviction_costs_the_same_however_many_rows_there_are() -> None:
    """Bug: with 10,000 responses, its default, a server was a sixth as fast as with none, for ever after."""
    assert n_steps(1000) < 1.1 * n_steps(50)


def test_events_do_not_write_the_request_again(tmp_path: Path) -> None:
    """Bug: with a tool of 1.9 MB the 200 tokens of an answer were 49 MB on the disk."""
    with closing(Store(str(tmp_path / "db"), Retention())) as db:
        db.write(row(request_json=dumped("x" * 2**20)), 0, [b"0"])
        size = (tmp_path / "db-wal").stat().st_size
        for number in range(1, 50):
            db.write(newer(), number, [b"0"])
        assert (tmp_path / "db-wal").stat().st_size < size + 2**20


# --- the file -----------------------------------------------------------------------------------------------


def test_file_is_found_again(tmp_path: Path) -> None:
    """By one process at a time: a second one would fail, as interrupted, what still runs in the first."""
    path = str(tmp_path / "a b.db")
    with closing(Store(path, Retention())) as db:
        db.write(row(), 0, [b"0"])
        db.write(newer("in_progress"), 1, [b"1"])
        db.write(ended("resp_2"))
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            Store(path, Retention())
    with closing(Store(path, Retention())) as db:
        assert db.live() == ["resp_1"]
        assert db.get("resp_1") == row().with_response(*state("in_progress"), NOW)
        assert db.frames("resp_1") == [b"0", b"1"]
        assert db.get("resp_2") == ended("resp_2")
        assert not (tmp_path / "a b.db-wal").stat().st_size  # nothing was written: the disk may be full


COLUMNS = (
    "id PRIMARY KEY, owner, born_at, ended_at, kept, background, streamed, request, items, status, response"
)
VERSION_3 = f"CREATE TABLE responses ({COLUMNS}, event_bytes, row_bytes); PRAGMA user_version = 3;"


def test_a_store_of_version_3_is_taken_over(tmp_path: Path) -> None:
    events = "response_id REFERENCES responses ON DELETE CASCADE, number, frame"
    rows = [row(), ended("resp_2")]
    with closing(sqlite3.connect(tmp_path / "db")) as old:
        old.executescript(f"{VERSION_3} CREATE TABLE events ({events})")
        old.execute("CREATE INDEX by_end ON responses (ended_at)")
        for each in rows:
            old.execute(f"INSERT INTO responses VALUES ({'?, ' * 12}0)", (*each, 4))
            old.execute("INSERT INTO events VALUES (?, 0, x'30313233')", (each.id,))
        old.commit()
    for _ in range(2):
        with closing(Store(str(tmp_path / "db"), Retention(max_responses=1))) as db:
            assert [db.get(each.id) for each in rows] == rows
            assert [db.frames(each.id) for each in rows] == [[b"0123"]] * 2
            assert [db.size(each.id, "") for each in rows] == [size(each, b"0123") for each in rows]
            assert not db.evict(NOW)
    with closing(Store(str(tmp_path / "db"), Retention(max_responses=0))) as db:
        db.write(newer(), 1, [b"4"])
        evict(db, NOW)
        assert (db.frames("resp_1"), db.get("resp_2"), db.frames("resp_2")) == ([b"0123", b"4"], None, [])


FOREIGN = ["a text", "CREATE TABLE theirs (a)", "PRAGMA user_version = 5", "PRAGMA application_id = 7",
           VERSION_3]  # fmt: skip


@pytest.mark.parametrize("content", FOREIGN)
def test_the_file_of_another_program_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    """Bug: it got another mode, and the tables of the store if it was SQLite's."""
    path = tmp_path / "file"
    if content == "a text":
        path.write_text(content)
    else:
        with closing(sqlite3.connect(path)) as other:
            other.executescript(content)
    path.chmod(0o644)
    held = path.read_bytes()
    with pytest.raises(sqlite3.DatabaseError, match=r"expected an empty file|not a database"):
        Store(str(path), Retention())
    assert (path.stat().st_mode & 0o777, path.read_bytes(), [*tmp_path.iterdir()]) == (0o644, held, [path])


@pytest.mark.parametrize("exists", [True, False])
def test_its_files_are_readable_by_their_owner_alone(tmp_path: Path, exists: bool) -> None:
    """Bug: every conversation of every key was there to read for all users of the machine."""
    path = tmp_path / "db"
    if exists:
        path.touch(0o644)
    with closing(Store(str(path), Retention())) as db:
        db.write(row(), 0, [b"0"])
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == {"db": 0o600, "db-wal": 0o600}
