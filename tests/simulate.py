"""Deterministic simulation: one seed is one run of the whole server, with all that may go wrong around it.

    python tests/simulate.py --seed 7                  one run: the same seed has the same hash
    python tests/simulate.py --seeds 1000 -n 2         many, two at a time; one that fails prints its story
    python tests/simulate.py --seed 7 --without 3,5    the same run without some of its events
    python tests/simulate.py --seed 7 --tail 200       and the last lines of its trace
    python tests/simulate.py --mutants cancel          plant bugs, those with this word: results/simulated.md

    seed --> processes, one after another on one file --> clients, faults --> laws of what they see

What runs is the real server.serve(): the endpoints, the middleware, the registry, SQLite, the engine, the
gateway. helpers/world.py is what surrounds it. A run is a list of events: what a client does, or what goes
wrong. Each event has its own random numbers, so a run that breaks a law is run again without some of them,
as long as it breaks the same law: what is left is its story.

A reader may expect a state machine of Hypothesis. It shrinks what it has drawn, but it awaits each step: it
cannot put one action between two turns of the loop in which another one is half done.

Rules of this file:
1. A law is checked wherever something is seen, not at the end: the story stops where the law is broken.
2. What a fault excuses is said where the law is, and no wider.
"""

import argparse
import asyncio
import gc
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__" and os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings have one order
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})

sys.path.insert(0, str(Path(__file__).parent.parent))  # the server's modules

import background
import jobs
import server
from channels import Finish
from checkpoint.config import read_config
from event_log import FRAMES_A_READ
from gateway.remote import RemoteWorker
from gateway.upstreams import CLOSING, Timeouts
from helpers import world as worlds
from helpers.world import CHANCE, FAR, Broken, HashRunner, Killed, Loop, SimEngine, SimStore, World
from middleware import digest, make_app
from mutants import ROOT, Mutant, copied, mutants, mutated
from request.template import ChatTemplate
from responses import Builder, fold
from store import IN_MEMORY, TERMINAL, Retention
from streaming import KEEP_ALIVE_S
from tokenizer import Tokenizer
from worker import LocalWorker

Json = dict[str, Any]

TINY = ROOT / "tests/models/tiny"
CONFIG, TEMPLATE, TOKENIZER = read_config(TINY), ChatTemplate.load(TINY), Tokenizer(TINY / "tokenizer.json")
GRAMMARS: Any = SimpleNamespace(turns=SimpleNamespace(n_waiting=0), close=lambda: None)
KEYS = ("alice", "bob")
N_EVENTS = 60
BEYOND = 999  # the number of an event that no response has
PATIENCE_S = 36_000  # virtual: a client that waits for longer waits for ever
MAX_SILENCE_S = 16  # of a stream
LIFE = ("background", "jobs", "event_log", "store", "streaming")  # of a response: its modules
RANK = {"queued": 0, "in_progress": 1} | dict.fromkeys(TERMINAL, 2)
WORDS = ("hi", "what", "is", "2+2", "水")

OF_ONE = ("get", "resume", "cancel", "delete", "foreign", "items")  # what clients do with one response
OTHERS = ("chat", "large", "socket", "other")  # and else, beside creating responses
# What goes wrong, and what of the world is then so; "": more than that.
FAULTS = {"stop": "", "full": "disk_full", "bad write": "", "slow": "", "jump": "", "broken": "device_broken",
          "nan": "device_nan", "upstream": "upstream_down", "file": "", "bugs": "has_bugs"}  # fmt: skip
# What may be damaged between two processes: what was asked for, or an event, also after the end.
DAMAGE_REQUEST = "UPDATE texts SET request = '{' WHERE id = ?"
DAMAGE_EVENT = "DELETE FROM events WHERE response_id = ? AND number = 0"

# Small, so that they are reached: what runs at once, and all background responses together.
background.MAX_RUNNING = 3
background.MAX_LIVE_BYTES = 12 * background.MIN_BYTES
background.EVICTION_INTERVAL_S = 10


# --- the process --------------------------------------------------------------------------------------------


@dataclass
class Process:
    """One process of the server, as clients and laws reach it; to server.serve() it is uvicorn's server."""

    is_persistent: bool  # its store outlives it
    is_stopping: bool = False
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    stops: asyncio.Event = field(default_factory=asyncio.Event)
    connections: dict["Connection", None] = field(default_factory=dict)  # in the order in which they came
    app: Any = None
    registry: Any = None
    rooms: Any = None

    should_exit = property(lambda self: self.stops.is_set(), lambda self, _: self.stops.set())

    async def serve(self, sockets: object) -> None:
        self.is_up.set()
        await self.stops.wait()
        self.is_up.clear()
        while self.connections:
            await asyncio.sleep(0.1)

    def drop_clients(self) -> None:
        for connection in [*self.connections]:
            connection.leave()


PROCESS: Process


def app_of(api: Any, keys: Any, rooms: Any, *more: Any) -> Any:
    """Make the application, and keep what clients ask and laws look into."""
    PROCESS.app, PROCESS.registry, PROCESS.rooms = make_app(api, keys, rooms, *more), api.registry, rooms
    return PROCESS.app


server.HttpServer, server.http_config = lambda app: PROCESS, lambda app, args: app  # type: ignore
server.announce = server.tune_garbage_collector = lambda *_: None  # type: ignore
server.make_app = app_of  # type: ignore


# --- bugs, in spite of which a response ends: rule 3 of jobs.py ---------------------------------------------


async def run_amid_bugs(prompt: Any, make_events: Any, *more: Any, real: Any = jobs.run) -> None:
    """Run as the real one does; amid bugs all that comes is lost, or only the end, or some of it raises."""
    bug = worlds.WORLD.random.choice(("all", "end", "raises")) if worlds.WORLD.has_bugs else ""

    def make(said: Any) -> Iterator[Any]:
        if bug != "all" and not (bug == "end" and isinstance(said, Finish)):
            yield from make_events(said)
        if bug == "raises" and worlds.WORLD.chance(0.2):
            raise ZeroDivisionError("a bug of a run")

    await real(prompt, make, *more)


def finish_amid_bugs(builder: Any, *about: Any, real: Any = Builder.finish) -> Any:
    if worlds.WORLD.has_bugs and worlds.WORLD.chance(0.2):
        raise ZeroDivisionError("a bug of the builder")
    return real(builder, *about)


jobs.run, Builder.finish = run_amid_bugs, finish_amid_bugs  # type: ignore


# --- connections --------------------------------------------------------------------------------------------


class Connection:
    """One request or WebSocket, as uvicorn hands it to an application."""

    def __init__(
        self, world: World, key: str, method: str, path: str, body: Json | None = None, slow: float = 0.0
    ) -> None:
        """`slow`: how many seconds the client takes to read a message."""
        self.world, self.slow = world, slow
        self.kind = "http" if method else "websocket"
        raw = b"" if body is None else json.dumps(body).encode()
        n = world.random.choice((1, 1, 3)) if raw else 1
        self.parts = [raw[i * len(raw) // n : (i + 1) * len(raw) // n] for i in range(n)]
        slow_s = world.random.choice((0.001,) * 19 + (20,))
        self.part_s = slow_s if raw else 0.001  # between the parts of its body
        self.status: int | None = None
        self.body = b""
        self.chunks = asyncio.Queue[Any]()  # of the answer; None: it is over
        self.messages = asyncio.Queue[Json]()  # of a WebSocket, to the server
        self.is_whole = False
        self.is_over = asyncio.Event()  # the answer is, or the client has left
        path, _, query = path.partition("?")
        headers = {"host": "localhost", "authorization": f"Bearer {key}", "content-type": "application/json"}
        self.scope = {
            "type": self.kind, "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()], "scheme": "http",
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "subprotocols": [],
        }  # fmt: skip
        self.label = f"{key}: {method or 'WebSocket'} {path}{query and '?'}{query}"
        self.about = "" if body is None else json.dumps(body, ensure_ascii=False)[:200]
        self.request_id = ""
        self.is_loaded = False  # the answer is a response
        self.is_outlived = bool(body and body.get("background"))
        self.sent_at: float | None = None  # the last time, of a stream
        self.written_at = 0.0  # the last time that something was written
        self.has_comment = False  # that is not read yet
        self.full_at = 0  # the turn of the loop in which the last piece of a log came, if that was a full one
        self.left_at = float("inf")

    json = property(lambda self: json.loads(self.body))

    def start(self, leaves_after: float | None = None) -> bool:
        """Connect; return whether the server listens. The client leaves after so many seconds."""
        if not PROCESS.is_up.is_set():
            return False
        self.world.tell(self.label, self.about)
        PROCESS.connections[self] = None
        self.task = asyncio.create_task(self._run())
        if leaves_after is not None:
            asyncio.get_running_loop().call_later(leaves_after, self.leave)
        return True

    async def read(self, leaves_after: float | None = None) -> "Connection":
        """Connect, and read to the end."""
        if self.start(leaves_after):
            while await self.chunks.get() is not None:
                pass
        return self

    def leave(self) -> None:
        if not self.is_over.is_set():
            self.world.tell(self.label, "leaves")
            self.left_at = self.world.now
            self._end()

    def _end(self) -> None:
        self.is_over.set()
        self.chunks.put_nowait(None)
        self.messages.put_nowait({"type": "websocket.disconnect", "code": 1006})

    async def _run(self) -> None:
        try:
            await PROCESS.app(self.scope, self.receive, self.send)
            is_cut = self.kind == "http" and not self.is_over.is_set() and not PROCESS.is_stopping
            self.world.law(not is_cut, self.label, "the server cut its own answer")
        except sqlite3.OperationalError:
            pass  # uvicorn logs it, and drops the connection; Starlette raises it after a 500
        except Exception as error:
            if not (self.world.counts["bugs"] and "made no event" in repr(error)):
                self.world.errors.append(f"{self.label}: raised {error!r}")
        finally:
            took_s = self.world.now - self.left_at
            self.world.law(took_s < MAX_SILENCE_S or self.world.is_slow, self.label, "left", took_s, "s ago")
            how = "" if self.is_whole else "(not whole)"
            self.world.tell(self.label, "->", self.status or "cut", how, self.request_id)
            self._end()
            if self.request_id and not self.is_outlived:
                self.world.gone.add(self.request_id)
            PROCESS.connections.pop(self, None)

    async def receive(self) -> Json:
        if self.kind == "websocket":
            return await self.messages.get()
        if self.parts:
            await self._until_over(self.world.delay(self.part_s))
            if not self.is_over.is_set():
                part = self.parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(self.parts)}
        await self.is_over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Json) -> None:
        if self.is_over.is_set():
            return
        world, headers = self.world, dict(message.get("headers", ()))
        self.request_id = headers.get(b"x-request-id", self.request_id.encode()).decode()
        rooms = PROCESS.rooms.streams, PROCESS.rooms.sockets, PROCESS.rooms.bytes
        world.law(all(room.held.total() <= room.n_total for room in rooms), "more is held than there is")
        world.trace(self.label, message["type"], message.get("status", ""), message.get("body", ""))
        is_comment = message.get("body", b"").startswith(b":")
        is_late = world.now - self.written_at > 0.9 * KEEP_ALIVE_S
        world.law(is_late or not is_comment, self.label, "a comment where no silence was")
        world.law(not (is_comment and self.has_comment), self.label, "a comment after one that waits")
        if not is_comment:
            world.law(world.n_turns != self.full_at, self.label, "leaves no turn to others")
            self.full_at = world.n_turns if message.get("body", b"").count(b"\n\n") == FRAMES_A_READ else 0
        is_held = rooms[2].held.total() >= len(message.get("body", b""))
        world.law(is_held or not self.is_loaded, self.label, "has no room for what it has loaded")
        self.written_at, self.has_comment = world.now, self.has_comment or is_comment
        if self.sent_at is not None and not self.slow:
            world.law(world.now - self.sent_at < MAX_SILENCE_S, self.label, "was silent since", self.sent_at)
        match message["type"]:
            case "http.response.start":
                self.status = message["status"]
                if b"event-stream" in headers[b"content-type"]:
                    self.sent_at = world.now
                else:
                    self.is_loaded = self.status == 200 and "GET /v1/responses/" in self.label
                excused = world.counts["disk faults"] or world.counts["device faults"] or world.counts["bugs"]
                excused = excused or PROCESS.is_stopping or "/compact" in self.label  # no summary was written
                world.law(self.status != 500 or excused, self.label, "says 500")
            case "http.response.body":
                self.body += message["body"]
                self.chunks.put_nowait(message["body"])
                self.is_whole = not message.get("more_body")
            case "websocket.send":
                self.chunks.put_nowait(message["text"])
            case "websocket.close":
                self.is_whole = True
        if self.is_whole:
            self._end()
        if self.slow:
            await self._until_over(world.delay(self.slow))
        self.has_comment &= not is_comment
        if self.sent_at is not None:
            self.sent_at = world.now

    async def _until_over(self, seconds: float) -> None:
        with suppress(TimeoutError):  # not wait_for(): before Python 3.12 it may swallow a cancellation
            async with asyncio.timeout(seconds):
                await self.is_over.wait()


# --- what clients know, and laws ----------------------------------------------------------------------------


@dataclass(eq=False)
class Known:
    """What clients know of one response."""

    request: Connection  # that has made it
    owner: str
    body: Json
    sent_at: float
    faulted: bool = False  # the disk has failed while it lived: the next process may not know what was seen
    id: str = ""
    accepted: bool = False  # it must never be lost: a background one, or one whose last event has been seen
    status: str = "queued"
    final: bytes = b""  # its last object
    frames: dict[int, bytes] = field(default_factory=dict)  # by number
    deleted: bool = False
    asked_to_delete: bool = False
    asked_to_cancel: bool = False
    cancelled: bool = False
    was_queued: bool = False  # when the last process was killed
    was_left: bool = False  # its client has left this process: what has begun ends, and is stored if kept
    news: asyncio.Event = field(default_factory=asyncio.Event)  # a pulse with each object that is seen

    def forget(self) -> None:
        """Know no more than that it was accepted."""
        self.status, self.final, self.frames = "queued", b"", {}
        self.deleted = self.cancelled = self.faulted = self.was_left = False

    is_background = property(lambda self: bool(self.body.get("background")))
    is_streamed = property(lambda self: bool(self.body.get("stream")))


class Laws:
    """What is checked of every answer."""

    def __init__(self, world: World) -> None:
        self.world, self.law = world, world.law
        self.known: list[Known] = []
        self.may_expire = False  # the clock has jumped, or few responses are kept

    def may_be_gone(self, known: Known) -> bool:
        return self.may_expire or known.asked_to_delete or known.body.get("store") is False

    def saw(self, known: Known, response: Json, raw: bytes, rank: int = 0) -> None:
        """Check a response object: a status only moves along, and a terminal one never changes."""
        law, status = self.law, response["status"]
        known.id = known.id or response["id"]
        law(response["id"] == known.id, known.id, "became", response["id"])
        law(RANK[status] >= rank, known.id, "was", known.status, "and is", status)
        if RANK[status] > RANK[known.status]:
            known.status = status
        known.news.set()
        known.news.clear()
        if status not in TERMINAL:
            return
        if not known.final:
            self.world.tell(known.id, "is", status)
            self.world.moment("ended", known.id)
        law(known.final in (b"", raw), known.id, "ended twice:", known.final, raw)
        known.final, known.status = raw, status
        known.accepted |= response["store"]
        took_s = (response["completed_at"] or response["created_at"]) - response["created_at"]
        law(took_s >= 0, known.id, "was over before it began:", took_s)
        law(not known.cancelled or status == "cancelled", known.id, "was cancelled, and is", status)
        is_asked = known.asked_to_cancel or not known.is_background
        law(is_asked or status != "cancelled", known.id, "is cancelled, which nobody has asked for")
        message = (response["error"] or {}).get("message") or ""
        is_cut = "interrupted" in message
        law(not is_cut or not known.was_queued, known.id, "was queued, and was not run again")
        is_early = known.is_background and "reached yet" in message
        law(not is_early, known.id, "did not wait for its upstream")
        if status == "completed" and known.body["model"] == FAR:
            said = "".join(item["content"][0]["text"] for item in response["output"])
            asked = known.body["input"]  # or the results of calls, of which the upstream has heard the last
            is_right = said == worlds.far_answer(asked if isinstance(asked, str) else asked[-1]["output"])
            law(is_right, known.id, "is not what the upstream said:", said)

    async def read_stream(
        self, connection: Connection, known: Known, after: int = -1, n_wanted: int = 10**9
    ) -> None:
        """Read events until the end, or until so many have come; then leave."""
        law, number, rest, has_ended = self.law, after, b"", False
        while (chunk := await connection.chunks.get()) is not None:
            if connection.status != 200:
                continue
            law(not chunk or chunk.endswith(b"\n\n"), connection.label, "sent a part of an event")
            *frames, rest = (rest + chunk).split(b"\n\n")
            n_events = len(frames) - (b"data: [DONE]" in frames)  # which leaves with the last ones
            law(n_events <= FRAMES_A_READ, connection.label, "sent many events at once:", n_events)
            for frame in frames:
                if frame.startswith(b":"):
                    continue
                law(not has_ended or frame == b"data: [DONE]", known.id, "something after the end:", frame)
                if frame == b"data: [DONE]":
                    is_end = has_ended or ((known.final or after == BEYOND) and after >= max(known.frames))
                    law(is_end, known.id, "is done without a last event")
                    continue
                number += 1
                has_ended = self.saw_event(known, number, frame)
                if b"response.output_item.done" in frame and self.world.chance(0.3):
                    connection.leave()  # while the last event is on its way to the store
            if number - after >= n_wanted:
                connection.leave()
        if connection.status == 200 and connection.is_whole:
            waits = PROCESS.is_stopping and known.status == "queued" and PROCESS.is_persistent
            is_end = has_ended or waits or after >= max(known.frames, default=-1)
            law(is_end, known.id, "a stream without an end")

    def saw_event(self, known: Known, number: int, frame: bytes) -> bool:
        """Check an event; return whether it is the last one."""
        event = json.loads(frame.partition(b"data: ")[2])
        numbered, known_frame = event["sequence_number"], known.frames.setdefault(number, frame)
        self.law(numbered == number, known.id, "event", numbered, "not", number)
        self.law(known_frame == frame, known.id, "event", number, "was another one")
        if "response" not in event:
            return False
        _, _, rest = frame.partition(b'"response":')
        self.saw(known, event["response"], rest[:-1])
        known.accepted |= known.is_background
        return event["response"]["status"] in TERMINAL

    def got(self, known: Known, connection: Connection, rank: int, accepted: bool, deleted: bool) -> None:
        """Check the answer to a GET; what was known is that from before it was sent."""
        law, status = self.law, connection.status
        if status in (None, 429, 503):
            return
        if deleted:
            law(status == 404, known.id, "was deleted, and GET says", status)
        elif status == 404:
            law(not accepted or self.may_be_gone(known), known.id, "is lost")
        else:
            law(status == 200, known.id, "GET says", status, connection.body)
            law(connection.is_whole or PROCESS.is_stopping, known.id, "GET was cut")
            if connection.is_whole:
                self.saw(known, connection.json, connection.body, rank)

    def refused(self, connection: Connection, body: Json, parent: Known | None) -> None:
        """Check why a response was not made."""
        is_gone = parent and (self.may_be_gone(parent) or parent.faulted)
        is_too_long = b"context_length_exceeded" in connection.body
        is_fault = self.world.counts["disk faults"] or self.world.counts["bugs"] or PROCESS.is_stopping
        excused = body["model"] == FAR or {400: is_gone or is_too_long, 408: True, 500: is_fault}
        expected = excused is True or excused.get(connection.status or 0)
        self.law(expected, "create says", connection.status, connection.body)


@dataclass
class Lane:
    """What the client of a WebSocket knows of one of its lanes."""

    number: int = -1  # of its last event
    newest: str = ""  # its newest response
    last: str = ""  # the response that its next turn can continue: rule 3 of service/websocket.py
    is_kept: bool = False  # that one is stored
    asked: deque[str | None] = field(default_factory=deque)  # what the turns continue that have not begun
    forgotten: set[str] = field(default_factory=set)
    is_in_turn: bool = True  # no turn was refused before those that had been asked before it

    def hear(self, law: Any, event: Json, begins_unasked: bool) -> None:
        """Check an event: its number, and whether its turn could continue what it did, or could not."""
        type_, response, error = event["type"], event.get("response", {}), event.get("error", {})
        if type_ == "response.created":
            self.newest = response["id"]
        if "sequence_number" in event:
            # What is told of steers before a response has begun may have the first numbers of its log.
            begins = event["sequence_number"] == 0 and (type_ == "response.created" or "steer" in type_)
            self.number = 0 if begins else self.number + 1
            law(event["sequence_number"] == self.number, "socket: event", event, self.number)
        if type_ == "error":
            is_gone = error["code"] == "previous_response_not_found"
            known = ("context_length_exceeded", "invalid_value", "no")  # the last is an upstream's
            expected = is_gone or event["status"] in (429, 502, 503) or error["code"] in known
            law(expected, "socket: error", event)
            self.is_in_turn &= event["status"] not in (429, 503)  # there was no room
            # A steer that finds no room is refused by such an event, too.
            law(self.asked or event["status"] == 429, "socket: nothing was asked", event)
            if self.asked and self.asked.popleft() == self.last:
                law(not (is_gone and self.is_in_turn), "socket: its lane has forgotten", self.last)
                self._forget()
        elif type_ == "response.created" and not begins_unasked:
            parent = self.asked.popleft()
            is_known = parent not in self.forgotten or not self.is_in_turn
            law(is_known, "socket: its lane has not forgotten", parent)
        elif response.get("status") in TERMINAL:
            self._forget()
            is_steered = (response["incomplete_details"] or {}).get("reason") == "steered"
            law(not (is_steered and results_of(response["output"])), "socket: steered in a call:", response)
            is_counted = response["usage"] or not response["output"] or response["model"] == FAR
            law(is_counted or response["status"] == "failed", "socket: counts no tokens:", response["id"])
            if response["status"] != "failed":
                self.last, self.is_kept = response["id"], response["store"]

    def _forget(self) -> None:
        if not self.is_kept:
            self.forgotten.add(self.last)
        self.last, self.is_kept = "", False


# How often the client of a WebSocket steers at an event.
STEERED_AT = {"in_progress": 0.2, "output_text.delta": 0.2, "function_call_arguments.delta": 0.5}


def results_of(output: list[Json]) -> list[Json]:
    """Return what a client says of the calls in an output."""
    ids = [item["call_id"] for item in output if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": id_, "output": "42"} for id_ in ids]


def pending(steered: dict[str, str], became: dict[str, str]) -> bool:
    """Return whether all accepted steers wait for a turn with the results of calls."""
    return all(became.get(response_id) == "pending" for response_id in steered.values())


# --- what clients do ----------------------------------------------------------------------------------------


class Clients:
    """What clients do: one method is one kind of event."""

    def __init__(self, world: World, laws: Laws) -> None:
        self.world, self.laws, self.law = world, laws, world.law
        self.connection = partial(Connection, world)
        self.is_far = False

    random = property(lambda self: self.world.random)

    def leaving(self, p: float, rate: float) -> float | None:
        """Draw after how many seconds a client leaves; None: it stays."""
        return self.random.expovariate(rate) if self.world.chance(p) else None

    async def act(self, kind: str) -> None:
        with_id = [known for known in self.laws.known if known.id]
        if kind in OF_ONE and with_id:
            await getattr(self, kind)(self.random.choice(with_id[-12:]))
        else:
            await getattr(self, "create" if kind in OF_ONE else kind)()

    def body(self) -> Json:
        text = " ".join(self.random.choice(WORDS) for _ in range(self.random.choice((1, 3, 30))))
        model = FAR if self.is_far or self.world.chance(0.2) else "tiny"
        body: Json = {"model": model, "input": text, "max_output_tokens": self.random.choice((1, 5, 60))}
        if self.world.chance(0.1):
            parameters = {"type": "object", "description": "z" * self.random.choice((10, 3_000, 20_000))}
            body["tools"] = [{"type": "function", "name": "f", "parameters": parameters}]
        elif self.world.chance(0.3):
            body |= {"tools": [{"type": "function", "name": "f"}], "max_output_tokens": 60}  # it may call
        return body

    async def create(self) -> None:
        world, random, key = self.world, self.random, self.random.choice(KEYS)
        body = self.body()
        body |= {name: True for name in ("background", "stream") if world.chance(0.6)}
        if world.chance(0.2):
            body["store"] = False
        parents = [one for one in self.laws.known if one.owner == key and one.status == "completed"]
        parent = random.choice(parents) if parents and world.chance(0.3) else None
        if parent:
            body["previous_response_id"] = parent.id
            body["input"] = results_of(json.loads(parent.final)["output"]) or body["input"]
        slow = random.choice((0, 0, 0, 0.1, 5))
        connection = self.connection(key, "POST", "/v1/responses", body, slow=slow)
        known = Known(connection, key, body, world.now, world.disk_full or world.n_bad_writes > 0)
        self.laws.known.append(known)
        if not connection.start(self.leaving(0.25, 2)):
            return
        racing = asyncio.create_task(self.race(known, connection)) if known.is_background else None
        if known.is_streamed:
            await self.laws.read_stream(connection, known)
        else:
            while await connection.chunks.get() is not None:
                pass
            if connection.status == 200 and connection.is_whole:
                known.id = connection.json["id"]
                known.accepted = known.is_background
                self.laws.saw(known, connection.json, connection.body)
        known.news.set()
        known.was_left = bool(known.id) and not known.faulted and not PROCESS.is_stopping
        if racing:
            await racing
        if connection.is_whole and connection.status not in (200, 429, 503):
            self.laws.refused(connection, body, parent)

    async def race(self, known: Known, connection: Connection) -> None:
        """Do something beside a moment of a response, or when its end has just been seen."""
        while not known.id and not connection.is_over.is_set():
            await known.news.wait()
        for _ in range(self.random.choice((0, 0, 1, 3)) if known.id else 0):
            if known.is_streamed and self.world.chance(0.3):
                while not (known.final or connection.is_over.is_set()):
                    await known.news.wait()
            if not PROCESS.is_up.is_set():
                return  # else the next process would begin when the waiting of this client is over
            is_last = not known.final and self.world.chance(0.3)
            n_steps = 200 if is_last else 20
            moment = known.id + " ends" * is_last
            await self.world.beside_a_moment(moment, self.world.delay(n_steps * self.world.step_s))
            if is_last and self.world.chance(0.5):
                await self.cancel(known)
            elif self.world.chance(0.2):
                await asyncio.gather(self.cancel(known), self.delete(known), self.get(known))
            else:
                await getattr(self, self.random.choice(OF_ONE))(known)

    async def chat(self) -> None:
        n, stream, said = self.random.choice((1, 2, 3)), self.world.chance(0.5), self.body()
        messages = [{"role": "user", "content": said["input"]}]
        body = {"model": said["model"], "messages": messages, "n": n, "stream": stream, "stop": "2"}
        connection = self.connection(self.random.choice(KEYS), "POST", "/v1/chat/completions", body)
        got = await connection.read(self.leaving(0.3, 2))
        if got.status != 200 or not got.is_whole:
            return
        if not stream:
            self.law(len(got.json["choices"]) == n, "chat: choices", got.json)
            return
        *frames, done, _ = got.body.split(b"\n\n")
        self.law(done == b"data: [DONE]", "chat: a stream without an end", got.body)
        chunks = [json.loads(frame[6:]) for frame in frames if not frame.startswith(b":")]
        ends = [one["index"] for chunk in chunks for one in chunk.get("choices", ()) if one["finish_reason"]]
        self.law("error" in chunks[-1] or sorted(ends) == [*range(n)], "chat: choices that ended:", ends)

    async def other(self) -> None:
        path = self.random.choice(("responses/compact", "responses/input_tokens", "models"))
        method, body = ("GET", None) if path == "models" else ("POST", self.body())
        connection = self.connection(self.random.choice(KEYS), method, f"/v1/{path}", body)
        await connection.read(self.leaving(0.3, 20))

    async def large(self) -> None:
        """Send a body that may be too large, and leave while it comes."""
        body = self.body() | {"zz": "z" * self.random.choice((5_000, 20_000, 70_000)), "store": False}
        connection = self.connection(self.random.choice(KEYS), "POST", "/v1/responses", body)
        await connection.read(self.leaving(0.5, 50))

    async def get(self, known: Known) -> Connection:
        before = RANK[known.status], known.accepted, known.deleted
        connection = await self.connection(known.owner, "GET", f"/v1/responses/{known.id}").read()
        self.laws.got(known, connection, *before)
        return connection

    async def resume(self, known: Known) -> None:
        """Read events from any number on, all of them or some, slowly or not."""
        some = self.random.choices([*known.frames, -1], k=5)
        after = self.random.choice((-1, -1, BEYOND, *some)) if known.frames else -1
        path = f"/v1/responses/{known.id}?stream=true" + f"&starting_after={after}" * (after >= 0)
        connection = self.connection(known.owner, "GET", path, slow=self.random.choice((0, 0, 0.1, 5)))
        deleted, accepted = known.deleted, known.accepted
        if not connection.start():
            return
        await self.laws.read_stream(connection, known, after, self.random.choice((1, 5, 10**9, 10**9)))
        if connection.status == 200:
            self.law(not deleted, known.id, "was deleted, and its events are there")
        elif connection.status == 400 and known.is_background and known.is_streamed:
            may_expire = self.laws.may_expire or self.world.now - known.sent_at > Retention.events_age_s
            self.law(may_expire, known.id, "cannot be resumed:", connection.body)
        elif connection.status == 404:
            self.law(not accepted or self.laws.may_be_gone(known), known.id, "is lost")

    async def cancel(self, known: Known) -> None:
        known.asked_to_cancel, asked_at = True, self.world.now
        connection = self.connection(known.owner, "POST", f"/v1/responses/{known.id}/cancel")
        await connection.read()
        is_quick = self.world.now - asked_at < MAX_SILENCE_S
        self.law(is_quick or self.world.is_slow or connection.part_s > 1, known.id, "cancel is slow")
        if connection.status == 200 and connection.is_whole:
            self.law(connection.json["status"] == "cancelled", known.id, "cancel says", connection.body)
            known.cancelled = True
            self.laws.saw(known, connection.json, connection.body)

    async def delete(self, known: Known) -> None:
        known.asked_to_delete, final = True, known.final
        connection = await self.connection(known.owner, "DELETE", f"/v1/responses/{known.id}").read()
        known.deleted |= connection.status == 200 and connection.is_whole
        self.world.gone |= {known.request.request_id} if known.deleted else set()
        self.law(connection.status != 400 or not final, known.id, "has ended, and cannot be deleted")
        if known.deleted:
            await self.get(known)

    async def foreign(self, known: Known) -> None:
        other = KEYS[known.owner == KEYS[0]]
        for method, end in (("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("GET", "/input_items")):
            got = await self.connection(other, method, f"/v1/responses/{known.id}{end}").read()
            self.law(got.status in (404, 503, 429, None), known.id, "is seen by another key:", got.status)
            is_unknown = f"Response with id '{known.id}' not found.".encode() in got.body
            self.law(is_unknown or got.status != 404, known.id, "is there, another key learns:", got.body)

    async def items(self, known: Known) -> None:
        await self.connection(known.owner, "GET", f"/v1/responses/{known.id}/input_items").read()

    async def socket(self) -> None:
        """Take turns in lanes of a WebSocket, one after another or at once, and steer; then leave."""
        world, lanes, n_ended = self.world, defaultdict[str, Lane](Lane), 0
        steered = dict[str, str]()  # accepted steers that no response has as input yet: what they steer
        became = dict[str, str]()  # "failed", or "pending": its steers wait for the results of its calls
        connection = self.connection(self.random.choice(KEYS), "", "/v1/responses")
        connection.messages.put_nowait({"type": "websocket.connect"})

        def say(type: str, **members: Any) -> None:
            data = json.dumps({"type": type, **members}).encode()
            world.tell(connection.label, "says", data.decode()[:200])
            connection.messages.put_nowait({"type": "websocket.receive", "bytes": data})
            if type == "response.create":
                lanes[members["stream_id"]].asked.append(members.get("previous_response_id"))

        n_turns = self.random.choice((1, 3, 6))
        for _ in range(n_turns):
            more = {"store": world.chance(0.5), "stream_id": self.random.choice(("", "a", "b"))}
            say("response.create", **self.body(), **more)
        if not connection.start(self.leaving(0.4, 2)):
            return
        while n_ended < n_turns or not pending(steered, became):
            if (text := await connection.chunks.get()) is None:
                break
            event = json.loads(text)
            name, type_, response = event.get("stream_id", ""), event["type"], event.get("response", {})
            lane = lanes[name]
            if response or "steer" in type_ or type_ == "error":
                world.tell(connection.label, "hears in lane", name, type_, response.get("id", ""))
            n_ended += type_ == "error" or response.get("status") in TERMINAL
            if type_ in ("response.completed", "response.incomplete") and world.chance(0.3):
                wrong = ({"previous_response_id": "resp_0"}, {"temperature": 9})
                first = self.random.choice(({"model": FAR}, {"model": FAR}, *wrong))
                for more in (first, {}):  # the first one may fail, or is refused
                    n_turns += 1
                    more = {"previous_response_id": response["id"], "store": world.chance(0.5)} | more
                    more |= {"input": results_of(response["output"]) or "hi", "stream_id": name}
                    say("response.create", **self.body() | more)
            elif type_ == "response.steer.pending" and lane.newest not in became:
                n_turns += 1
                became[lane.newest] = "pending"
                world.counts["steers after calls"] += 1
                results = [stub | {"output": "42"} for stub in event["required_input"]]
                more = {"previous_response_id": lane.newest, "input": results, "stream_id": name}
                say("response.create", **self.body() | more)
            elif world.chance(STEERED_AT.get(type_.removeprefix("response."), 0)):
                say("response.steer", input="more", previous_response_id=lane.newest)
            begins_unasked = self.saw_steer(event, steered, became)
            n_turns += begins_unasked
            lane.hear(self.law, event, begins_unasked)
        connection.leave()

    def saw_steer(self, event: Json, steered: dict[str, str], became: dict[str, str]) -> bool:
        """Note what becomes of steers; return whether a response begins that nothing else has asked for."""
        steer, response = event.get("steer", {}), event.get("response", {})
        match event["type"]:
            case "response.failed":
                became[response["id"]] = "failed"
            case "response.steer.accepted":
                steered[steer["id"]] = steer["previous_response_id"]
            case "response.steer.failed" if "id" in steer:
                self.law(steer["input"] == "more", "socket: not what was given", event)
                is_early = "No tool output" in event["error"]["message"]
                has_failed = became.get(steer["previous_response_id"]) == "failed"
                self.law(has_failed or not is_early, "socket: a successor before the results", event)
                self.law(steered.pop(steer["id"], ""), "socket: given back twice, or after its use", event)
            case "response.created" if response["previous_response_id"] in steered.values():
                for id_ in [id_ for id_, of in steered.items() if of == response["previous_response_id"]]:
                    del steered[id_]
                return became.get(response["previous_response_id"]) != "pending"
        return False


# --- a run --------------------------------------------------------------------------------------------------


class Simulation:
    """One run: processes one after another on one file, clients, faults."""

    loop: Loop
    store: SimStore
    life: random.Random  # of a process
    retention: Retention
    is_last: bool
    file: Path  # of the store
    tasks: list[asyncio.Task[None]]
    is_harmed: bool

    away = property(lambda self: Path(f"{self.file}.away"))  # where it is if it has been taken away

    def __init__(self, seed: int, n_events: int, without: frozenset[str], n_kept: int) -> None:
        """`without`: the names of events that do not happen."""
        folder = tempfile.mkdtemp(dir="/dev/shm" if os.path.exists("/dev/shm") else None)
        self.world = World(seed, folder, n_kept)
        self.laws = Laws(self.world)
        self.clients = Clients(self.world, self.laws)
        self.seed, self.n_events, self.without = seed, n_events, without
        self.n_begun = self.n_processes = 0
        own = self.world.own
        self.n_pages = own.choice((14, 18, 24, 60))  # the context follows from it: the same after a restart
        weights = {kind: own.choice((0, 1, 1, 3)) for kind in (*OF_ONE, *OTHERS)} | {"create": 8}
        self.kinds = [kind for kind, n in weights.items() for _ in range(n)]
        self.path = IN_MEMORY if own.random() < 0.15 else ""
        self.clients.is_far = own.random() < 0.1  # there are upstreams alone
        self.had_slow_disk = False
        self.ended_well = False  # the last process: what is in the store is as it should be
        self.damaged = ""  # a response that had not ended, and can no longer be read

    def run(self) -> None:
        worlds.enter(self.world)
        try:
            while not self.run_process():
                pass
        finally:
            shutil.rmtree(self.world.folder)

    # --- a process ------------------------------------------------------------------------------------------

    def n_written(self) -> int:
        wal = Path(f"{self.file}-wal")
        return wal.stat().st_size if wal.exists() else 0

    def run_process(self) -> bool:
        """Run one process; return whether it was the last."""
        global PROCESS
        world, n = self.world, self.n_processes
        world.tell("a process begins")
        world.next_process()
        CLOSING.clear()  # what the last process has left open ended with it
        PROCESS = Process(is_persistent=not self.path)
        self.plan(n)
        self.loop = Loop()
        self.file = Path(f"{world.folder}/{n}.db")
        n_written = self.n_written()
        self.store = SimStore(self.path or str(self.file), self.retention)
        world.law(not n or self.n_written() == n_written, "a start writes, and the disk may be full")
        statuses = {*self.store.live_statuses().values()}
        world.law(not self.ended_well or statuses <= {"queued"}, "a stop has not ended", statuses)
        self.note_faults()
        was_killed = False
        try:
            self.loop.run_until_complete(self.main())
        except Killed:
            was_killed = True
            world.counts["kills"] += 1
            world.graveyard.append((vars(self.loop), self.store, asyncio.all_tasks(self.loop), PROCESS))
        finally:
            asyncio.set_event_loop(None)
        self.n_processes += 1
        self.ended_well = not was_killed and not world.counts["disk faults"]
        self.leave_behind(n, was_killed)
        return not was_killed and self.is_last

    def plan(self, n: int) -> None:
        """Draw what a process is like, and when it dies."""
        world, life = self.world, random.Random(f"{self.seed} life{n}")
        world.disk_s, world.step_s = life.choice((0.0005, 0.005, 0.05)), life.choice((0.001, 0.01, 0.05, 2))
        self.retention = Retention(max_responses=life.choice((10_000, 10_000, 4)))
        self.laws.may_expire |= self.retention.max_responses == 4
        self.life, self.is_last = life, False
        ends = life.choice(("", "", "time", "moment"))
        if f"life{n}" in self.without or self.n_begun == self.n_events:
            return
        world.disk_full, world.upstream_down = (n > 0 and life.random() < p for p in (0.3, 0.2))
        if ends == "time":
            world.kill_at = world.now + life.choice((0.01, 0.3, 3)) * life.expovariate(1)
        elif ends == "moment":
            world.kill_moment = life.choice(("write", "write", "called", "step", "ended", "delete"))
            world.n_moments = life.randint(1, 20)

    def leave_behind(self, n: int, was_killed: bool) -> None:
        """Give the next process what is on the disk: after a power failure, not the newest of it.

        Now and then some of it is damaged.
        """
        is_cut = was_killed and not self.path and self.life.random() < 0.15
        live: dict[str, str] = {}
        with suppress(sqlite3.ProgrammingError):  # it was closed already
            live = self.store.live_statuses()
        if self.away.exists():
            self.away.rename(self.file)
        for end in ("", "-wal"):  # what kill -9 leaves; its locks are on the old file
            path = Path(f"{self.file}{end}")
            if path.exists():
                data = path.read_bytes()
                if end and is_cut:
                    self.world.tell("the power has failed, too")
                    data = data[: self.life.randrange(len(data) + 1)]
                Path(f"{self.world.folder}/{n + 1}.db{end}").write_bytes(data)
        if self.path:
            self.laws.known.clear()  # it was in memory
        for known in self.laws.known:
            known.was_queued = live.get(known.id) == "queued" and not is_cut
            known.was_left = False
            known.accepted &= not is_cut
            if known.faulted or is_cut:
                known.forget()
        if not self.path and self.life.random() < 0.15:
            self.damage(f"{self.world.folder}/{n + 1}.db")

    def damage(self, path: str) -> None:
        """Lose an event of a response, or what has been asked for. One that has not ended is set aside."""
        events = "SELECT id, ended_at IS NULL FROM responses WHERE event_bytes > 0 ORDER BY id"
        with closing(sqlite3.connect(path)) as db, db:
            if rows := db.execute(events).fetchall():
                id_, is_live = self.life.choice(rows)
                damage = self.life.choice((DAMAGE_EVENT, DAMAGE_REQUEST if is_live else DAMAGE_EVENT))
                self.world.tell(id_, "is damaged:", damage)
                self.world.counts["damages"] += 1
                db.execute(damage, (id_,))
                self.damaged = id_ if is_live else ""
        for known in [known for known in self.laws.known if rows and known.id == id_]:
            known.sent_at = -PATIENCE_S  # as if its events had expired
            if is_live:
                self.laws.known.remove(known)

    async def main(self) -> None:
        world, self.tasks, self.is_harmed = self.world, list[asyncio.Task[None]](), False
        self.loop.call_later(self.life.expovariate(0.2), world.heal)
        grace = self.life.choice((0.0, 0.5, 5.0))
        serving, is_up = asyncio.create_task(self.serve(grace)), asyncio.create_task(PROCESS.is_up.wait())
        await asyncio.wait([serving, is_up], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            raise Broken(f"it did not start: {serving.exception()!r}")
        world.law(not self.damaged or self.store.get(self.damaged), self.damaged, "is damaged, and lost")
        self.damaged = ""
        is_stopped = False
        while self.n_begun < self.n_events and not is_stopped:
            name, chance = str(self.n_begun), random.Random(f"{self.seed} {self.n_begun}")
            self.n_begun += 1
            await asyncio.sleep(chance.choice((0, 1, 1, 10)) * chance.expovariate(50))
            if name not in self.without and chance.random() < 0.06:
                is_stopped = self.fail(chance)
            elif name not in self.without:
                self.tasks.append(asyncio.create_task(self.event(chance)))
        if not is_stopped:
            await asyncio.gather(*self.tasks)
            world.kill_at, world.kill_turn, world.kill_moment = float("inf"), 1 << 60, ""
            world.heal()
            await self.quiet()
            await self.last_look()
            self.is_last = True
            self.stop()
        stopped_at = world.now
        await serving
        is_slow = self.had_slow_disk or world.counts["disk faults"] or world.disk_s > 0.01 or world.step_s > 1
        world.law(world.now - stopped_at < grace + 5 or is_slow, "the stop took", world.now - stopped_at, "s")
        for id_ in [*world.waiting]:
            world.moment("stopped", id_)
        await asyncio.gather(*self.tasks)
        await asyncio.sleep(0)
        others: Any = asyncio.all_tasks() - {asyncio.current_task()}
        names = {task.get_coro().__qualname__ for task in others}
        retried = {"EventLog._write_all", "Archive._write_batch"}  # after a write that failed
        excused = retried if world.counts["disk faults"] else set()
        world.law(names <= excused, "tasks are left over:", names)
        world.graveyard.append(others)

    async def serve(self, grace: float) -> None:
        choice = self.life.choice
        max_batch = choice((2, 5, 16))
        self.n_places = min(max_batch - 1, background.MAX_RUNNING)
        runner = HashRunner(CONFIG, self.n_pages, max_batch, choice((0, 0, 1, 2)))
        self.engine = SimEngine(runner, choice((0, 3)), self.loop)
        local = LocalWorker(self.engine, TOKENIZER, TEMPLATE, GRAMMARS, None, ["tiny"], {}, 60)
        timeouts = Timeouts(5, 20, 10, 60, probe_s=30)
        remote = RemoteWorker(["http://far/v1", "http://farther/v1"], {}, timeouts, None)
        args: Any = SimpleNamespace(
            secret=["secret"], debug_steps=False, no_done_line=False, no_temporary=False, images="refuse",
            reasoning_events="openai", max_streams=choice((8, 30)), max_body=64 * 1024, host="127.0.0.1",
            allowed_host=[], cors_origin=[], shutdown_grace=grace, store=self.path or "file",
            max_batch=max_batch,
        )  # fmt: skip
        listener: Any = None
        workers = (None if self.clients.is_far else local), remote
        await server.serve(args, {*map(digest, KEYS)}, *workers, self.store, listener)

    async def event(self, chance: random.Random) -> None:
        CHANCE.set(chance)
        kind = chance.choice(self.kinds)
        self.world.counts[kind] += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.clients.act(kind)
        except TimeoutError:
            self.world.law(False, "a client waits for ever")

    # --- faults ---------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self.world.tell("SIGTERM")
        PROCESS.is_stopping = True
        self.loop.signal_handlers[signal.SIGTERM]()
        if self.life.random() < 0.3:
            self.loop.call_later(self.life.expovariate(2), self.loop.signal_handlers[signal.SIGINT])

    def fail(self, chance: random.Random) -> bool:
        """Let something go wrong, for a while; return whether the process stops."""
        world, kind = self.world, chance.choice([*FAULTS])
        world.tell("fault:", kind)
        if FAULTS[kind]:
            setattr(world, FAULTS[kind], True)
            world.counts["device faults"] += FAULTS[kind].startswith("device")
            world.counts["bugs"] += kind == "bugs"
        match kind:
            case "stop":
                self.stop()
            case "bad write":
                world.n_bad_writes, world.fails_ends = chance.choice((1, 1, 3)), chance.random() < 0.5
            case "slow":
                world.disk_slow_s = 0.5
                world.counts["slow disks"] += 1
                self.had_slow_disk = True
            case "jump":
                world.skew += chance.choice((-3600, -1, 1, 700, 3600))
                self.laws.may_expire = True
            case "file" if not (self.path or self.is_harmed):
                self.is_harmed = True
                self.tasks.append(asyncio.create_task(self.harm(chance.random() < 0.5)))
        self.loop.call_later(chance.choice((0, 1, 10)) * chance.expovariate(0.5), world.heal)
        self.note_faults()
        return kind == "stop"

    async def harm(self, is_cut: bool) -> None:
        """Take the store's file away, or cut it, twice: SQLite goes on, and each time one line tells it."""
        world, file = self.world, self.file
        for _ in range(2):
            if is_cut:
                os.truncate(file, file.stat().st_size + 1)  # one byte of which SQLite knows nothing
            await asyncio.sleep(30)
            size = file.stat().st_size
            if PROCESS.is_stopping or (is_cut and size % 4096 != 1):
                return  # SQLite has cut it off, when it closed the file or took over what is in the WAL
            n_told = world.counts["harms told"]
            world.counts["harms"] += 1
            world.tell("the store's file is", "cut" if is_cut else "taken away")
            if is_cut:
                os.truncate(file, size - 1)
            else:
                file.rename(self.away)
            await asyncio.sleep(30)
            n = world.counts["harms told"] - n_told
            has_grown = is_cut and file.stat().st_size >= size  # before anyone looked
            is_told = n == 1 or has_grown or world.is_slow or PROCESS.is_stopping
            world.law(is_told, "what has become of the store's file is told", n, "times")
            if not is_cut:
                self.away.rename(file)

    def note_faults(self) -> None:
        for known in self.laws.known if self.world.disk_full or self.world.n_bad_writes > 0 else ():
            known.faulted = True

    # --- the end --------------------------------------------------------------------------------------------

    async def quiet(self) -> None:
        """All have left: nothing is held, nothing runs."""
        law, registry, rooms = self.world.law, PROCESS.registry, PROCESS.rooms
        remote = registry.workers.all[-1]
        for _ in range(PATIENCE_S):
            is_at_work = self.engine.busy() or remote.busy() or registry.archive.threads.n_waiting
            if not (registry.jobs or PROCESS.connections or is_at_work):
                break
            await asyncio.sleep(1)
        open_before = {*self.world.open_bodies}  # later probes open others for a moment
        await asyncio.sleep(10)  # what a full disk has refused is written by now
        law(not registry.jobs, "jobs that never end:", [*registry.jobs])
        law(not remote.busy(), "requests to upstreams never end")
        law(not (self.world.open_bodies & open_before or CLOSING), "connections to upstreams stay open")
        self.engine.check_idle()
        held = [room.held for room in (rooms.streams, rooms.sockets, rooms.bytes, registry._room)]
        law(not any(any(owners.values()) for owners in held), "room is held:", held)
        law(not rooms.unanswered, "unanswered:", rooms.unanswered)
        law(registry._turns._places._value == self.n_places, "turns are held")

    async def last_look(self) -> None:
        """Every response is what its events say, in the store too."""
        law = self.world.law
        for known in [known for known in self.laws.known if known.id]:
            known.accepted |= known.was_left and not known.faulted
            got = await self.clients.get(known)
            if got.status != 200:
                continue
            law(got.json["status"] in TERMINAL, known.id, "never ended")
            row, frames = self.store.get(known.id), self.store.frames(known.id)
            law(row and row.response_json.encode() == got.body, known.id, "is not what is stored")
            if known.is_background and known.is_streamed and frames:
                events = [json.loads(frame.partition(b"data: ")[2]) for frame in frames]
                numbers = [event["sequence_number"] for event in events]
                law(fold(events) == got.json, known.id, "is not what its events say")
                law(numbers == [*range(len(events))], known.id, "has gaps:", numbers)
                law(len(frames) > max(known.frames, default=0), known.id, "lost events")


# --- many runs ----------------------------------------------------------------------------------------------


def run(seed: int, n_events: int = N_EVENTS, without: frozenset[str] = frozenset(), n_kept: int = 0) -> Json:
    """Run one seed in this process, which must be a new one; return what came of it."""
    simulation, error, began_at = Simulation(seed, n_events, without, n_kept), "", os.times()
    world = simulation.world
    try:
        simulation.run()
        gc.collect()  # tasks whose exceptions were never retrieved tell the loop
    except Exception as exception:
        error = f"{type(exception).__name__}: {exception}"
    ended_at = os.times()
    return {
        "seed": seed,
        "error": world.errors[0] if world.errors else error,
        "hash": world.hash.hexdigest()[:16],
        "virtual_s": world.now,
        "cpu_s": ended_at.user + ended_at.system - began_at.user - began_at.system,
        "names": [*map(str, range(simulation.n_begun)), *(f"life{i}" for i in range(simulation.n_processes))],
        "counts": dict(world.counts),
        "story": world.story,
        "tail": [*world.tail],
    }


def outcomes(seeds: list[int], n_at_once: int = 1, *args: Any) -> Iterator[Json]:
    """Run seeds, each in a process of its own: all begin from the same state. Yield what ends first."""
    fork = multiprocessing.get_context("fork")

    def begin(seed: int) -> Any:
        reading, writing = fork.Pipe(duplex=False)
        # A daemon: the end of this process does not wait for what it will not read.
        fork.Process(target=lambda: writing.send(run(seed, *args)), daemon=True).start()
        writing.close()
        return reading

    waiting = iter(seeds)
    running = [*map(begin, islice(waiting, n_at_once))]
    while running:
        ended: list[Any] = multiprocessing.connection.wait(running)
        for reading in ended:
            running.remove(reading)
            running += map(begin, islice(waiting, 1))
            yield reading.recv()


def law_of(error: str) -> str:
    """Return what runs that break the same law have in common: its first words, without ids and numbers."""
    return " ".join([word for word in error.split()[:12] if word.isalpha()][:4])


def shortened(found: Json, n_events: int, without: frozenset[str]) -> tuple[Json, frozenset[str]]:
    """Take events out of a run while it breaks the same law: a half of them, a quarter, in the end one."""
    left = [name for name in found["names"] if name not in without]
    n = len(left)
    while n > 1:
        n = (n + 1) // 2
        for start in range(0, len(left), n):
            tried = without | {*left[start : start + n]}
            (again,) = outcomes([found["seed"]], 1, n_events, tried)
            if again["error"] and law_of(again["error"]) == law_of(found["error"]):
                found, without = again, tried
        left = [name for name in left if name not in without]
    return found, without


def show(found: Json, n_events: int, without: frozenset[str]) -> None:
    print(f"seed {found['seed']}: {found['error'][:1000]}")
    short, without = shortened(found, n_events, without)
    print(*(line[:300] for line in short["story"]), sep="\n")
    again = f"--seed {found['seed']} --events {n_events} --without {','.join(sorted(without))}"
    print(f"python tests/simulate.py {again}", flush=True)


def plant(mutant: Mutant, n_seeds: int) -> str:
    """Run seeds in a copy with a bug until one finds it; return a row of a table: which one, and its law."""
    command = [sys.executable, "tests/simulate.py", "--seeds", str(n_seeds), "--first-only", "--brief"]
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        (copy / mutant.file).write_text(mutated(mutant), encoding="utf-8")
        ended = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        seed, _, law = (ended.stdout or ended.stderr[-300:]).splitlines()[0].partition(": ")
        return f"| {mutant.module} | {mutant.undoes} | {seed.removeprefix('seed ')} | {law[:150]} |"


def planted() -> Iterator[Mutant]:
    """Yield bugs that a run should find: those of planted.toml, and those of the life of responses.

    Not those that change only what something costs, a form that no event changes, or what no run gets to.
    """
    yield from mutants("planted.toml")
    yield from (each for each in mutants() if each.module in LIFE and not each.unseen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*", help="with --mutants: only those with one of these in them")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--first-only", action="store_true", help="end with the first seed that fails")
    parser.add_argument("--brief", action="store_true", help="print no stories")
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--events", type=int, default=N_EVENTS)
    parser.add_argument("--without", type=lambda text: frozenset(text.split(",")), default=frozenset())
    parser.add_argument("--tail", type=int, default=0)
    parser.add_argument("-n", type=int, default=1, help="how many at a time")
    args = parser.parse_args()
    if args.mutants:
        for mutant in planted():
            if not args.words or any(word in str(mutant) for word in args.words):
                print(plant(mutant, args.seeds), flush=True)
        return 0
    logging.basicConfig(level=logging.WARNING, handlers=[worlds.Errors()])
    gc.collect()
    gc.freeze()
    gc.disable()
    seeds = [*range(args.first, args.first + args.seeds)] if args.seed is None else [args.seed]
    began_at, n, n_bad, virtual_s, cpu_s, counts = time.monotonic(), 0, 0, 0.0, 0.0, Counter[str]()
    for found in outcomes(seeds, args.n, args.events, args.without, args.tail):
        print(*found["tail"], sep="\n", end="\n" * bool(args.tail))
        n, virtual_s, cpu_s = n + 1, virtual_s + found["virtual_s"], cpu_s + found["cpu_s"]
        counts.update(found["counts"])
        if args.seed is not None:
            print(found["hash"], found["counts"])
        if found["error"]:
            n_bad += 1
            if args.brief:
                print(f"seed {found['seed']}: {found['error'][:300]}", flush=True)
            else:
                show(found, args.events, args.without)
            if args.first_only:
                break
    rate = n / (time.monotonic() - began_at) * 60
    print(f"{n} seeds, {n_bad} with errors; {rate:.0f} seeds a minute, {cpu_s / n:.2f} s of a processor each")
    print(f"{virtual_s / 3600:.1f} virtual hours, {dict(sorted(counts.items()))}")
    return bool(n_bad)


if __name__ == "__main__":
    sys.exit(main())
