"""Responses on disk: the request, the newest response object and every event, in SQLite.

    Row, its first events --write()--> a live response --write()--> more events, in the end a terminal state
    id --get()--> Row        id --frames()--> [frame, ...]

Authority: https://www.sqlite.org/wal.html. A committed transaction survives the death of this process
(kill -9), and that of the machine except for what it had not yet written to the disk (synchronous = NORMAL).

Rules of this file:
1. Events and the state they bring are one transaction: no reader and no restart sees one without the other.
2. A row needs no other: it holds the items of the chain before it, so deleting a parent loses nothing.
3. A terminal state never changes: the statement that writes a state says so.
4. The store is bounded by count, bytes and age. Live rows never go. Of the others, the owner that holds most
   loses the oldest, so no owner can push out what others keep.
5. One process owns the file: a second one would take the live responses for interrupted ones and end them.
   Only the user of that process can read the file.
6. A response object may be large, so it stays JSON text. If SQL looks into it, SQLite parses it without
   holding Python's lock.
"""

import logging
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

log = logging.getLogger("store")

TERMINAL = ("completed", "incomplete", "failed", "cancelled")
IN_MEMORY = ":memory:"

VERSION = 3
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id          TEXT PRIMARY KEY,
    owner       TEXT NOT NULL,              -- digest of the API key of the request
    born_at     REAL NOT NULL,              -- Unix seconds, as all times here
    ended_at    REAL,                       -- null while live
    kept        INTEGER NOT NULL,           -- store: true
    background  INTEGER NOT NULL,
    streamed    INTEGER NOT NULL,           -- created with stream: true
    request     TEXT NOT NULL,              -- the body, to run it again after a restart
    items       TEXT NOT NULL,              -- those of the chain, then the input; each has an id
    status      TEXT NOT NULL,              -- that of the response
    response    TEXT NOT NULL,              -- the newest response object
    event_bytes INTEGER NOT NULL,           -- size of the response's events, 0 when they have expired
    row_bytes   INTEGER NOT NULL GENERATED ALWAYS AS (  -- size of the three texts
        length(CAST(request AS BLOB)) + length(CAST(items AS BLOB)) + length(CAST(response AS BLOB))
    ) STORED
);
CREATE TABLE IF NOT EXISTS events (
    response_id TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
    number      INTEGER NOT NULL,
    frame       BLOB NOT NULL,
    PRIMARY KEY (response_id, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_end ON responses (ended_at);
PRAGMA user_version = 3;
"""
SETTINGS = ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON")
N_EVICTED = 8  # at a time
LOCK_TIMEOUT_S = 1  # another process has the file, and may be about to end

COLUMNS = "id, owner, born_at, ended_at, kept, background, streamed, request, items, status, response"

INSERT = f"INSERT INTO responses ({COLUMNS}, event_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

# What another response begins with: no model reads logprobs, and they may be a hundred times the text.
CONTINUED = """
SELECT json_object('status', json_extract(:response, '$.status'), 'output', (
    SELECT json_group_array(json(json_replace(item.value, '$.content[0].logprobs', json('[]'))))
    FROM json_each(:response, '$.output') AS item
))
"""

# '' stands for a status and a response object that are as they were.
UPDATE = """
UPDATE responses SET event_bytes = event_bytes + ?, ended_at = ?,
    status = ifnull(nullif(?, ''), status), response = ifnull(nullif(?, ''), response)
WHERE id = ? AND ended_at IS NULL
"""

DELETE = ("DELETE FROM responses WHERE id = ?",)
DELETE_EVENTS = (
    "DELETE FROM events WHERE response_id = ?",
    "UPDATE responses SET event_bytes = 0 WHERE id = ?",
)

EXPIRED_EVENTS = "SELECT id FROM responses WHERE ended_at < ? AND event_bytes > 0"
EXPIRED = "SELECT id FROM responses WHERE ended_at < ? OR (ended_at < ? AND NOT kept)"

# `nth` and `held` count an owner's responses and their bytes, from its newest one on. Sorted by them, the
# last ones are the oldest of the owners who hold most: `n` and `total` count over all, up to the limits.
OVER_LIMIT = """
WITH terminal AS (
    SELECT id, ended_at, born_at, row_bytes + event_bytes AS size,
        ROW_NUMBER() OVER newest AS nth,
        SUM(row_bytes + event_bytes) OVER newest AS held
    FROM responses WHERE ended_at IS NOT NULL AND (
        -- Whether there are too many: to find out which ones takes a hundred times as long.
        SELECT COUNT(*) > ?1 OR TOTAL(row_bytes + event_bytes) > ?2 FROM responses WHERE ended_at IS NOT NULL
    )
    WINDOW newest AS (PARTITION BY owner ORDER BY ended_at DESC, born_at DESC, id)
)
SELECT id FROM (
    SELECT id,
        ROW_NUMBER() OVER (ORDER BY nth, ended_at DESC, born_at DESC, id) AS n,
        SUM(size) OVER (ORDER BY held, ended_at DESC, born_at DESC, id) AS total
    FROM terminal
) WHERE n > ?1 OR total > ?2
"""


class Row(NamedTuple):
    """One response as it is stored. `request`, `items` and `response` parse anew at each use."""

    id: str
    owner: str  # "": the server needs no key
    born_at: float
    ended_at: float | None
    kept: bool
    background: bool
    streamed: bool
    request_json: str
    items_json: str
    status: str = ""  # "": no event has brought a response object yet
    response_json: str = ""

    @property
    def n_bytes(self) -> int:
        """Size of what the client has sent."""
        return len((self.request_json + self.items_json).encode())

    @property
    def request(self) -> dict[str, Any]:
        return dict(msgspec.json.decode(self.request_json))

    @property
    def items(self) -> list[dict[str, Any]]:
        return list(msgspec.json.decode(self.items_json))

    @property
    def response(self) -> dict[str, Any]:
        return dict(msgspec.json.decode(self.response_json))

    def with_response(self, status: str, response_json: str, now: float) -> "Row":
        """Return the row with a newer response object, which ends it `now` if it is terminal."""
        ended_at = now if status in TERMINAL else None
        return self._replace(status=status, response_json=response_json, ended_at=ended_at)


@dataclass(frozen=True)
class Retention:
    """How many terminal responses the store keeps, and for how long."""

    max_responses: int = 10_000
    max_bytes: int = 2**28
    max_age_s: float = 30 * 86_400  # as long as OpenAI keeps them: platform.openai.com/docs/guides/your-data
    events_age_s: float = 600  # after its end: the events of a response, and all of one with store: false


class Store:
    """Opens or creates the file; ":memory:" is a store that is lost with the process."""

    def __init__(self, path: str, retention: Retention) -> None:
        self._retention = retention
        if path != IN_MEMORY:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # SQLite gives its other files the same mode
            os.fchmod(file, 0o600)
            os.close(file)
        self._db = sqlite3.connect(path, LOCK_TIMEOUT_S, check_same_thread=False)
        for setting in SETTINGS:
            self._db.execute(f"PRAGMA {setting}")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            advice = "give another file, and this one to the release that made it"
            raise sqlite3.DatabaseError(f"expected version {VERSION}, got version {version}: {advice}")
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        self._db.close()

    # --- writing --------------------------------------------------------------------------------------------

    def write(self, row: Row, first_number: int = 0, frames: Sequence[bytes] = ()) -> None:
        """Store the events from `first_number` on and the state that they bring; the first ones make the row.

        In later calls `row` has the newest response object, "" if these events have brought none. A
        response that was not run in the background comes at its end, without events. To one that has ended,
        or is deleted, nothing is added.
        """
        n_bytes = sum(map(len, frames))
        events = [(row.id, number, frame) for number, frame in enumerate(frames, first_number)]
        with self._db:  # one transaction
            if first_number == 0:
                self._db.execute(INSERT, (*row, n_bytes))
            else:
                newer = (n_bytes, row.ended_at, row.status, row.response_json, row.id)
                if not self._db.execute(UPDATE, newer).rowcount:
                    return
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?)", events)

    def delete(self, id: str) -> None:
        with self._db:
            self._db.execute(*DELETE, (id,))

    # --- reading --------------------------------------------------------------------------------------------

    def get(self, id: str) -> Row | None:
        """Return a response; None if there is none."""
        found = self._db.execute(f"SELECT {COLUMNS} FROM responses WHERE id = ?", (id,)).fetchone()
        return Row(*found) if found else None

    def size(self, id: str, owner: str) -> int:
        """Return the bytes that get() and frames() load; 0 if there is no such response."""
        select = "SELECT ifnull(SUM(row_bytes + event_bytes), 0) FROM responses WHERE id = ? AND owner = ?"
        (size,) = self._db.execute(select, (id, owner)).fetchone()
        return int(size)

    def to_continue(self, row: Row) -> Row:
        """Return the row with only the status and the output of its response, without logprobs."""
        (response_json,) = self._db.execute(CONTINUED, {"response": row.response_json}).fetchone()
        return row._replace(response_json=response_json)

    def frames(self, id: str) -> list[bytes]:
        """Return all events of a response, in order; [] if they are no longer kept, or one is missing."""
        size = "SELECT ifnull(SUM(event_bytes), 0) FROM responses WHERE id = ?"
        (n_expected,) = self._db.execute(size, (id,)).fetchone()
        events = "SELECT frame FROM events WHERE response_id = ? ORDER BY number"
        frames = [frame for (frame,) in self._db.execute(events, (id,))]
        if sum(map(len, frames)) != n_expected:
            log.error("response %s is damaged in the store: not all of its events are there", id)
            return []
        return frames

    def live(self) -> list[str]:
        """Return the ids of what has not ended, oldest first: at the start, what a dead process left."""
        return self._ids("SELECT id FROM responses WHERE ended_at IS NULL ORDER BY born_at")

    # --- limits ---------------------------------------------------------------------------------------------

    def evict(self, now: float) -> bool:
        """Delete a few of what is over the limits, so that writes get in between; False: there are none.

        Events expire before their responses, and if no response is older than the retention, the oldest go
        while there are too many.
        """
        limits = self._retention
        delete: tuple[str, ...] = DELETE_EVENTS
        ids = self._ids(EXPIRED_EVENTS, now - limits.events_age_s)
        if not ids:
            delete = DELETE
            ids = self._ids(EXPIRED, now - limits.max_age_s, now - limits.events_age_s)
        if not ids:
            ids = self._ids(OVER_LIMIT, limits.max_responses, limits.max_bytes)
        with self._db:
            for id_ in ids[:N_EVICTED]:
                for statement in delete:
                    self._db.execute(statement, (id_,))
        return bool(ids)

    def _ids(self, select: str, *values: float) -> list[str]:
        return [id_ for (id_,) in self._db.execute(select, values)]
