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
6. A response object may be large, so it stays JSON text. SQL that reads its members parses it in SQLite,
   which does not hold Python's lock.

Why SQLite and one thread, and not files or a database server: a commit is atomic over a crash, and a server
would be a second program to install. Statements are constants with `?`, so none is built from a request.
"""

import logging
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

TERMINAL = ("completed", "incomplete", "failed", "cancelled")

# The first two take a Row: ?1 is its first member, ?11 its last, and ?12 the size of its events. The others
# take what has changed: SQLite would copy a large request at each write of an event.
INSERT = """
INSERT INTO responses VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?10,
    length(CAST(?8 AS BLOB)) + length(CAST(?9 AS BLOB)), length(CAST(?11 AS BLOB)), ?12)
"""
INSERT_TEXTS = "INSERT INTO texts VALUES (?1, ?8, ?9, ?11)"

# '' stands for a status and a response object that are as they were.
UPDATE = """
UPDATE responses SET event_bytes = event_bytes + ?, ended_at = ?, status = ifnull(nullif(?, ''), status),
    response_bytes = ifnull(nullif(length(CAST(? AS BLOB)), 0), response_bytes)
WHERE id = ? AND ended_at IS NULL
"""
UPDATE_TEXTS = "UPDATE texts SET response = ? WHERE id = ?"


@dataclass(frozen=True)
class Retention:
    """How many terminal responses the store keeps, and how long."""

    max_responses: int = 10_000
    max_bytes: int = 2**28
    max_age_s: float = 30 * 86_400  # as long as OpenAI keeps them: platform.openai.com/docs/guides/your-data
    events_age_s: float = 600  # after its end: the events of a response, and all of one with store: false


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

    def with_response(self, status: str, response_json: str, now: float) -> "Row":
        """Return the row with a newer response object, which ends it `now` if it is terminal."""
        ended_at = now if status in TERMINAL else None
        return self._replace(status=status, response_json=response_json, ended_at=ended_at)

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

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


class Store:
    """Opens or creates the file; ":memory:" is lost with the process. One thread at a time may call it."""

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
                self._db.execute(INSERT_TEXTS, row)
            else:
                newer = (n_bytes, row.ended_at, row.status, row.response_json, row.id)
                if not self._db.execute(UPDATE, newer).rowcount:
                    return
                if row.response_json:
                    self._db.execute(UPDATE_TEXTS, (row.response_json, row.id))
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?)", events)

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    def __init__(self, path: str, retention: Retention) -> None:
        """Raises OSError or sqlite3.Error for a file that is not ours, and then has not changed it."""
        self._path = path
        self._retention = retention
        if path != IN_MEMORY:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            if not os.path.isfile(path):
                raise OSError("expected a file")
            self._file = os.stat(path)
        self._db = sqlite3.connect(path, LOCK_TIMEOUT_S, check_same_thread=False)
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        contents = self._db.execute(CONTENTS).fetchone()
        if contents not in SCRIPTS:
            raise sqlite3.DatabaseError(f"expected an empty file, or a store of version {VERSION} or 3")
        if path != IN_MEMORY:
            os.chmod(path, 0o600)  # SQLite gives its other files the same mode
        self._db.executescript(f"BEGIN; {SCRIPTS[contents]} COMMIT; {SETTINGS}")

    def close(self) -> None:
        self._db.close()

    # --- writing --------------------------------------------------------------------------------------------

    def delete(self, id: str) -> None:
        with self._db:
            self._db.execute(*DELETE, (id,))

    def set_aside(self, id: str, now: float) -> None:
        """Withdraw a response that cannot be read from its owner, and keep it as long as others."""
        with self._db:
            self._db.execute(SET_ASIDE, (now, id))

    # --- reading --------------------------------------------------------------------------------------------

    def get(self, id: str) -> Row | None:
        """Return a response; None if the store has none with this id."""
        found = self._db.execute(GET, (id,)).fetchone()
        return Row(*found) if found else None

    def size(self, id: str, owner: str) -> int:
        """Return the bytes that get() and frames() load; 0 if there is no such response."""
        select = "SELECT ifnull(SUM(size), 0) FROM responses WHERE id = ? AND owner = ?"
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
        select = "SELECT id FROM responses WHERE ended_at IS NULL ORDER BY born_at"
        return [id_ for (id_,) in self._db.execute(select)]

    # --- limits ---------------------------------------------------------------------------------------------

    def evict(self, now: float) -> bool:
        """Delete a few responses over the limits, so that writes get in between; return whether more remain.

        Raises OSError if the file has been removed, replaced or cut, which SQLite may not notice.
        """
        with self._db:
            is_more = all(self._evict_one(now) for _ in range(N_EVICTED))
        if self._path != IN_MEMORY:
            file = os.stat(self._path)
            if file.st_ino != self._file.st_ino or file.st_size < self._file.st_size:
                raise OSError(f"{self._path} has been replaced or cut")
            self._file = file
        return is_more

    def _evict_one(self, now: float) -> bool:
        """Delete one response, or only its events, which expire first; without an expired one, the oldest."""
        limits = self._retention
        events_end = now - limits.events_age_s
        # fmt: off
        for select, limit, deletes in (
            (EXPIRED_EVENTS, events_end,             DELETE_EVENTS),
            (EXPIRED_UNKEPT, events_end,             DELETE),
            (EXPIRED,        now - limits.max_age_s, DELETE),
            (TOO_MANY,       limits.max_responses,   DELETE),
            (TOO_MUCH,       limits.max_bytes,       DELETE),
        ):
            # fmt: on
            if found := self._db.execute(select, (limit,)).fetchone():
                for delete in deletes:
                    self._db.execute(delete, found)
                return True
        return False


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

log = logging.getLogger("store")
IN_MEMORY = ":memory:"

DAMAGED = "damaged"  # owner of what cannot be read: no key sees it

# In the header of the file: https://www.sqlite.org/pragma.html#pragma_application_id
APPLICATION_ID = 0x6C6C6D72  # "llmr"
VERSION = 4
SCHEMA = f"""
CREATE TABLE responses (
    id             TEXT PRIMARY KEY,
    owner          TEXT NOT NULL,           -- digest of the API key of the request; or DAMAGED
    born_at        REAL NOT NULL,           -- Unix seconds, as all times here
    ended_at       REAL,                    -- null while live
    kept           INTEGER NOT NULL,        -- store: true
    background     INTEGER NOT NULL,
    streamed       INTEGER NOT NULL,        -- created with stream: true
    status         TEXT NOT NULL,           -- that of the response
    request_bytes  INTEGER NOT NULL,        -- size of the request and the items
    response_bytes INTEGER NOT NULL,
    event_bytes    INTEGER NOT NULL,        -- size of the response's events, 0 when they have expired
    size           INTEGER NOT NULL AS (request_bytes + response_bytes + event_bytes)
);
-- Apart, for they may be large: if event_bytes changes, SQLite writes the whole row again that it is in.
CREATE TABLE texts (
    id             TEXT PRIMARY KEY REFERENCES responses ON DELETE CASCADE,
    request        TEXT NOT NULL,           -- the body, to run it again after a restart
    items          TEXT NOT NULL,           -- those of the chain, then the input; each has an id
    response       TEXT NOT NULL            -- the newest response object
);
CREATE TABLE IF NOT EXISTS events (         -- those of version 3 stay
    response_id    TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
    number         INTEGER NOT NULL,
    frame          BLOB NOT NULL,
    PRIMARY KEY (response_id, number)
) WITHOUT ROWID;

-- Each question of evict() has its index: the answer costs the same however many responses there are.
CREATE INDEX by_end ON responses (ended_at);
CREATE INDEX by_owner ON responses (owner, ended_at, born_at);
CREATE INDEX having_events ON responses (ended_at) WHERE event_bytes > 0;
CREATE INDEX not_kept ON responses (ended_at) WHERE NOT kept;

-- What each owner holds in terminal responses. Triggers count it, so no statement can forget to.
CREATE TABLE owners (
    owner          TEXT PRIMARY KEY,
    n              INTEGER NOT NULL,
    n_bytes        INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO owners VALUES ('{DAMAGED}', 0, 0);
CREATE TRIGGER comes BEFORE INSERT ON responses
    BEGIN INSERT OR IGNORE INTO owners VALUES (new.owner, 0, 0); END;
CREATE TRIGGER is_inserted AFTER INSERT ON responses WHEN new.ended_at IS NOT NULL
    BEGIN UPDATE owners SET n = n + 1, n_bytes = n_bytes + new.size WHERE owner = new.owner; END;
CREATE TRIGGER is_deleted AFTER DELETE ON responses WHEN old.ended_at IS NOT NULL
    BEGIN UPDATE owners SET n = n - 1, n_bytes = n_bytes - old.size WHERE owner = old.owner; END;
CREATE TRIGGER is_updated_from AFTER UPDATE ON responses WHEN old.ended_at IS NOT NULL
    BEGIN UPDATE owners SET n = n - 1, n_bytes = n_bytes - old.size WHERE owner = old.owner; END;
CREATE TRIGGER is_updated_to AFTER UPDATE ON responses WHEN new.ended_at IS NOT NULL
    BEGIN UPDATE owners SET n = n + 1, n_bytes = n_bytes + new.size WHERE owner = new.owner; END;

PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""
# Without legacy_alter_table the events would refer to version_3, and not to the new table.
FROM_VERSION_3 = f"""
PRAGMA legacy_alter_table = ON;
ALTER TABLE responses RENAME TO version_3;
DROP INDEX by_end;
{SCHEMA}
INSERT INTO responses SELECT id, owner, born_at, ended_at, kept, background, streamed, status,
    length(CAST(request AS BLOB)) + length(CAST(items AS BLOB)), length(CAST(response AS BLOB)), event_bytes
    FROM version_3;
INSERT INTO texts SELECT id, request, items, response FROM version_3;
DROP TABLE version_3;
"""
SCRIPTS = {  # by what is in a file, what makes it a store of this version
    # application_id, user_version, tables
    (0, 0, ""): SCHEMA,
    (0, 3, "events responses"): FROM_VERSION_3,
    (APPLICATION_ID, VERSION, "events owners responses texts"): "",
}
CONTENTS = """
SELECT application_id, user_version, (
    SELECT ifnull(group_concat(name, ' '), '') FROM (
        SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name
    )
) FROM pragma_application_id, pragma_user_version
"""

SETTINGS = "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON"
N_EVICTED = 8  # at a time
LOCK_TIMEOUT_S = 1  # another process has the file, and may be about to end
GET = """
SELECT id, owner, born_at, ended_at, kept, background, streamed, request, items, status, response
FROM responses JOIN texts USING (id) WHERE id = ?
"""

# What another response begins with: no model reads logprobs, and they may be a hundred times the text.
CONTINUED = """
SELECT json_object('status', json_extract(:response, '$.status'), 'output', (
    SELECT json_group_array(json(json_replace(item.value, '$.content[0].logprobs', json('[]'))))
    FROM json_each(:response, '$.output') AS item
))
"""

SET_ASIDE = f"UPDATE responses SET owner = '{DAMAGED}', kept = true, ended_at = ? WHERE id = ?"
DELETE = ("DELETE FROM responses WHERE id = ?",)
DELETE_EVENTS = (
    "DELETE FROM events WHERE response_id = ?",
    "UPDATE responses SET event_bytes = 0 WHERE id = ?",
)

# The next to go. The last two: if all owners together hold too many, or too much, the oldest of the one that
# holds most; if two hold as much, the older one.
EXPIRED_EVENTS = f"""
SELECT id FROM responses WHERE ended_at < ? AND event_bytes > 0 AND owner <> '{DAMAGED}' LIMIT 1
"""
EXPIRED_UNKEPT = "SELECT id FROM responses WHERE ended_at < ? AND NOT kept LIMIT 1"
EXPIRED = "SELECT id FROM responses WHERE ended_at < ? LIMIT 1"
TOO_MANY, TOO_MUCH = (
    f"""
SELECT oldest.id FROM owners JOIN responses AS oldest ON oldest.id = (
    SELECT id FROM responses WHERE owner = owners.owner AND ended_at IS NOT NULL
    ORDER BY owner, ended_at, born_at LIMIT 1
)
WHERE {held} = (SELECT MAX({held}) FROM owners) AND (SELECT SUM({held}) FROM owners) > ?
ORDER BY oldest.ended_at, oldest.born_at LIMIT 1
"""
    for held in ("n", "n_bytes")
)
