"""Responses on disk: the request, the newest response object and every event, in SQLite.

    Row, frames --insert()--> a live response --append()--> more events, in the end a terminal state
    id --get()--> Row        id --frames()--> [frame, ...]

Authority: https://www.sqlite.org/wal.html. A committed transaction survives the death of this process
(kill -9); of the machine too, but for what it had not yet written to the disk (synchronous = NORMAL).

Rules of this file:
1. Events and the state they bring are one transaction: no reader and no restart sees one without the other.
2. A row needs no other: it holds the items of the chain before it, so deleting a parent loses nothing.
3. A terminal state never changes: the statement that writes a state says so.
4. The store is bounded by count, bytes and age; the oldest terminal rows go first, live ones never.
5. One process owns the file: another one would end as interrupted what still runs here.

Not here: threads (background.py calls all this in one), what an event says (responses.py).
"""

import json
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

log = logging.getLogger("store")

TERMINAL = ("completed", "incomplete", "failed", "cancelled")

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id          TEXT PRIMARY KEY,
    born_at     REAL NOT NULL,              -- Unix seconds, as all times here
    ended_at    REAL,                       -- null while live
    kept        INTEGER NOT NULL,           -- store: true
    background  INTEGER NOT NULL,
    streamed    INTEGER NOT NULL,           -- created with stream: true
    row_bytes   INTEGER NOT NULL,           -- size of the three texts
    event_bytes INTEGER NOT NULL,           -- size of the response's events, 0 when they have expired
    request     TEXT NOT NULL,              -- the body, to run it again after a restart
    items       TEXT NOT NULL,              -- those of the chain, then the input; each has an id
    response    TEXT NOT NULL,              -- the newest response object
    owner       TEXT NOT NULL DEFAULT ''    -- digest of the API key of the request
);
CREATE TABLE IF NOT EXISTS events (
    response_id TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
    number      INTEGER NOT NULL,
    frame       BLOB NOT NULL,
    PRIMARY KEY (response_id, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_end ON responses (ended_at);
PRAGMA user_version = 2;
"""
VERSION = 2

#  version   what makes a file of it one of the next version
UPGRADES = {1: "ALTER TABLE responses ADD COLUMN owner TEXT NOT NULL DEFAULT ''; PRAGMA user_version = 2;"}

SETTINGS = ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON")

LOCK_TIMEOUT_S = 1  # another process has the file, and may be about to end
COLUMNS = "id, born_at, ended_at, kept, background, streamed, request, items, response, owner"

# Counts responses and sums up their bytes, from the newest one on, and deletes those past a limit.
DELETE_OVER_LIMIT = """
DELETE FROM responses WHERE id IN (
    SELECT id FROM (
        SELECT id, ROW_NUMBER() OVER newest AS n, SUM(row_bytes + event_bytes) OVER newest AS total
        FROM responses WHERE ended_at IS NOT NULL
        WINDOW newest AS (ORDER BY ended_at DESC, born_at DESC, id)
    ) WHERE n > ? OR total > ?
)
"""

Snapshot = dict[str, Any] | None  # a response object as an event holds it


class Ended(Exception):
    """The response is terminal, or deleted: nothing can be appended."""


class Row(NamedTuple):
    """One response as it is stored."""

    id: str
    born_at: float
    ended_at: float | None
    kept: bool
    background: bool
    streamed: bool
    request: dict[str, Any]
    items: list[dict[str, Any]]
    response: dict[str, Any]
    owner: str = ""  # "": the server needs no key

    @property
    def context(self) -> list[dict[str, Any]]:
        """What a response that continues this one begins with."""
        return [*self.items, *self.response["output"]]

    def with_snapshot(self, snapshot: dict[str, Any], now: float) -> "Row":
        """The row with a newer response object, which ends it `now` if it is terminal."""
        ended_at = now if snapshot["status"] in TERMINAL else None
        return self._replace(response=snapshot, ended_at=ended_at)


@dataclass(frozen=True)
class Retention:
    """How many terminal responses the store keeps, and for how long."""

    max_responses: int = 10_000
    max_bytes: int = 2**30
    max_age_s: float = 30 * 86_400  # as long as OpenAI keeps them: platform.openai.com/docs/guides/your-data
    events_age_s: float = 600  # after its end: the events of a response, and all of one with store: false


class Store:
    """Opens or creates the file; ":memory:" is a store that is lost with the process."""

    def __init__(self, path: str, retention: Retention) -> None:
        self._retention = retention
        self._db = sqlite3.connect(path, LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        for setting in SETTINGS:
            self._db.execute(f"PRAGMA {setting}")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise sqlite3.DatabaseError(f"expected a file of version {VERSION} at most, got {version}")
        while version in UPGRADES:
            self._db.executescript(f"BEGIN; {UPGRADES[version]} COMMIT")
            version += 1
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        self._db.close()

    def insert(self, row: Row, frames: Sequence[bytes] = ()) -> None:
        """Accept a response with the events that it has; a foreground one comes at its end, with none."""
        texts = [_dumps(row.request), _dumps(row.items), _dumps(row.response)]
        times_and_flags = (row.born_at, row.ended_at, row.kept, row.background, row.streamed)
        sizes = (n_bytes(texts), n_bytes(frames))
        values = (row.id, *times_and_flags, *texts, row.owner, *sizes)
        marks = ", ".join("?" * len(values))
        with self._transaction():
            self._db.execute(
                f"INSERT INTO responses ({COLUMNS}, row_bytes, event_bytes) VALUES ({marks})", values
            )
            self._insert_events(row.id, 0, frames)

    def append(
        self, id: str, first_number: int, frames: Sequence[bytes], snapshot: Snapshot, now: float
    ) -> None:
        """Store the events from `first_number` on, and the newest response object; None: it is as before.

        Raises Ended.
        """
        with self._transaction():
            update = self._db.execute(
                "UPDATE responses SET event_bytes = event_bytes + ? WHERE id = ? AND ended_at IS NULL",
                (n_bytes(frames), id),
            )
            if not update.rowcount:
                raise Ended(f"expected a live response, got {id}, which has ended or is gone")
            self._insert_events(id, first_number, frames)
            if snapshot:
                text = _dumps(snapshot)
                ended_at = now if snapshot["status"] in TERMINAL else None
                self._db.execute(
                    "UPDATE responses SET response = ?, ended_at = ?, "
                    "row_bytes = length(request) + length(items) + ? WHERE id = ?",
                    (text, ended_at, len(text), id),
                )

    def get(self, id: str) -> Row | None:
        columns = self._db.execute(f"SELECT {COLUMNS} FROM responses WHERE id = ?", (id,)).fetchone()
        return _row(columns) if columns else None

    def frames(self, id: str) -> list[bytes]:
        """All events of a response, in order; [] when they are no longer kept."""
        rows = self._db.execute("SELECT frame FROM events WHERE response_id = ? ORDER BY number", (id,))
        return [frame for (frame,) in rows]

    def delete(self, id: str) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM responses WHERE id = ?", (id,))

    def live(self) -> list[Row]:
        """The responses that have not ended, oldest first: at the start, those that a dead process left."""
        live = self._db.execute(f"SELECT {COLUMNS} FROM responses WHERE ended_at IS NULL ORDER BY born_at")
        rows = []
        for columns in live:
            try:
                rows.append(_row(columns))
            except ValueError:
                log.exception("response %s cannot be read, and stays as it is", columns[0])
        return rows

    def evict(self, now: float) -> None:
        """Delete what is older than the retention, then the oldest responses while there are too many."""
        limits = self._retention
        events_expire = now - limits.events_age_s  # those of a response that ended before this time
        responses_expire = now - limits.max_age_s
        with self._transaction():
            expired = "ended_at < ? AND event_bytes > 0"
            ids = f"SELECT id FROM responses WHERE {expired}"
            self._db.execute(f"DELETE FROM events WHERE response_id IN ({ids})", (events_expire,))
            self._db.execute(f"UPDATE responses SET event_bytes = 0 WHERE {expired}", (events_expire,))
            self._db.execute(
                "DELETE FROM responses WHERE ended_at < ? OR (ended_at < ? AND NOT kept)",
                (responses_expire, events_expire),
            )
            self._db.execute(DELETE_OVER_LIMIT, (limits.max_responses, limits.max_bytes))

    def _insert_events(self, id: str, first_number: int, frames: Sequence[bytes]) -> None:
        rows = ((id, number, frame) for number, frame in enumerate(frames, first_number))
        self._db.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # On a full disk SQLite may have rolled back itself: sqlite.org/lang_transaction.html
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def _row(columns: tuple[Any, ...]) -> Row:
    id_, born_at, ended_at, *flags, request, items, response, owner = columns
    kept, background, streamed = map(bool, flags)
    return Row(
        id_,
        born_at,
        ended_at,
        kept,
        background,
        streamed,
        json.loads(request),
        json.loads(items),
        json.loads(response),
        owner,
    )


def n_bytes(texts: Sequence[str | bytes]) -> int:
    return sum(map(len, texts))


def _dumps(value: Any) -> str:
    """JSON in ASCII, of which a character is a byte."""
    return json.dumps(value, separators=(",", ":"))
