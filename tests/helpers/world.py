"""The world of a simulated run: time, chance, an event loop, a disk, a device and an upstream, from a seed.

    seed --World--> Loop, SimStore, SimEngine over HashRunner, SimUpstream --> the real server.serve() on top

What a process gets from outside comes from here, so the same seed is the same run, bit for bit. Time is a
number: waiting costs nothing, and a run of ten virtual minutes takes a third of a second. A reader may expect
mocks of our modules instead. There are none: what is replaced is what the operating system, the network and
the GPU do, and everything above them runs as it is.

Authority: FoundationDB's simulation (apple.github.io/foundationdb/testing.html) and TigerBeetle's VOPR.

Rules of this file:
1. Chance is asked from World.random alone. What one event of a run causes asks that event's own numbers, so a
   run without some of its events is nearly the same run: that is what shortens a story.
2. Whatever can be seen from outside goes into the hash of the trace.
3. A moment is a point beside which windows are narrow: a write begins or ends, a step ends, an answer ends.
   Processes die, and clients act, within a few turns of the loop after one.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import queue
import random
import secrets
import sqlite3
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar
from itertools import count
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import numpy as np

import engine
import model
import scheduler
from checkpoint.config import Config
from engine import OnStep
from gateway import upstreams
from helpers.upstream import DONE, Json, event
from request.ids import REQUEST_ID
from sampling import NO_TOKEN, Choice
from sampling import Context as SamplingContext
from store import DAMAGED, TERMINAL, Row, Store

EPOCH = 1_800_000_000.0
PAGE = 8  # instead of 64: page tables grow, run out, are shared and preempted in short runs
MAX_TURNS = 500_000  # of the loop, in one run: then it is busy for ever
TURN_S = (1e-6, 1e-6, 2e-5, 2e-4)  # what a turn of the loop may take
CHANCE: ContextVar[random.Random] = ContextVar("CHANCE")  # of the event that a task works for: rule 1


class Broken(Exception):
    """A law does not hold."""


class Killed(BaseException):
    """kill -9: the process is gone, at whatever await it was."""


class World:
    """What outlives the processes of a run."""

    def __init__(self, seed: int, folder: str, n_kept: int = 0) -> None:
        """`folder`: of its files; its name is another one in each run."""
        self.folder = folder
        self.own = random.Random(f"{seed} world")
        self.now = 0.0  # of the event loop
        self.cpu = 0.0  # what time.perf_counter() adds: the steps of the device
        self.skew = 0.0  # of the wall clock
        self.n_ticks = self.n_turns = 0
        self.hash = hashlib.sha256()
        self.tail = deque[str](maxlen=n_kept)  # the last lines of the trace
        self.story: list[str] = []  # what clients and the world have done
        self.errors: list[str] = []  # laws broken where no one could raise
        self.counts = Counter[str]()
        self.graveyard: list[object] = []  # killed processes: nothing of them may be finalised during the run
        self.gone = set[str]()  # ids of requests that are over, and whose work must be over too
        self.next_process()

    def next_process(self) -> None:
        """Heal everything, and forget what belongs to a process."""
        self.kill_at, self.kill_turn = float("inf"), 1 << 60  # a time, a turn of the loop
        self.kill_moment, self.n_moments = "", 0  # the n-th moment of this kind
        self.disk_s, self.step_s = 0.0005, 0.01  # of a call, of a step
        self.free_at = defaultdict[object, list[float]](lambda: [0.0])  # when each thread of an executor is
        self.waiting = defaultdict[str, list[asyncio.Future[None]]](list)  # for a moment, by id of a response
        self.writing = ""  # the id of the response that is being written
        self.open_bodies = set[int]()  # answers of upstreams whose connections are open
        self.heal()

    def heal(self) -> None:
        self.disk_full = self.device_broken = self.device_nan = self.upstream_down = self.has_bugs = False
        self.disk_slow_s, self.n_bad_writes = 0.0, 0
        self.fails_ends = False  # bad are only writes of last events

    @property
    def is_slow(self) -> bool:
        """The disk is slow, or was, or was full: what waits for it has no limit."""
        return bool(self.disk_s > 0.01 or self.counts["slow disks"] or self.counts["disk faults"])

    random = property(lambda self: CHANCE.get(self.own))

    def chance(self, p: float) -> bool:
        return CHANCE.get(self.own).random() < p

    def delay(self, mean: float) -> float:
        """Draw a time: now and then none, now and then ten times as long."""
        return float(self.random.choice((0, 1, 1, 1, 10)) * self.random.expovariate(1 / mean))

    def trace(self, *what: object) -> None:
        line = f"{self.now:.6f} " + " ".join(map(str, what))
        self.hash.update(line.encode())
        self.tail.append(line)

    def tell(self, *what: object) -> None:
        """Add to the story: what a reader needs to see how it came to a broken law."""
        self.trace(*what)
        self.story.append(f"{self.now:10.4f}  " + " ".join(map(str, what)))

    def law(self, holds: object, *what: object) -> None:
        if not holds:
            self.tell("BROKEN:", *what)
            self.errors.append(" ".join(map(str, what)))
            raise Broken(self.errors[0])

    def moment(self, what: str, id: str = "") -> None:
        """Wake those who wait for it, and plan the death of the process if it shall die beside this one."""
        if what == self.kill_moment:
            self.n_moments -= 1
            if self.n_moments == 0:
                self.kill_turn = self.n_turns + self.own.choice((1, 1, 2, 3, 8))
        for future in self.waiting.pop(id, ()) if self.waiting else ():
            if not future.done():
                future.set_result(None)

    async def beside_a_moment(self, id: str, seconds: float) -> None:
        """Return within a few turns of the loop after a response's next moment, or after these seconds.

        With " ends" after the id: after that at which its last event is to be written.
        """
        future = asyncio.get_running_loop().create_future()
        self.waiting[id].append(future)
        await asyncio.wait([future], timeout=seconds)
        for _ in range(self.random.choice((0, 0, 1, 2, 5, 12))):
            await asyncio.sleep(0)


WORLD: World  # of this process: a run has a process of its own


def enter(world: World) -> None:
    """Make this the world of this process: what modules call through `time` and `secrets` comes from it."""
    global WORLD
    WORLD = world

    def perf_counter() -> float:
        world.n_ticks += 1
        return world.now + world.cpu + world.n_ticks * 1e-9

    time.time = lambda: EPOCH + world.now + world.skew
    time.monotonic = time.thread_time = lambda: world.now
    time.perf_counter = perf_counter
    secrets.token_hex = lambda nbytes=None: world.random.randbytes(nbytes or 32).hex()
    secrets.randbits = lambda k: world.random.getrandbits(k)


# --- the event loop -----------------------------------------------------------------------------------------


class SimTask(asyncio.Task[Any]):
    """Its hash is its number, not its address: sets of tasks (asyncio.wait, TaskGroup) keep their order."""

    numbers = count(1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = next(SimTask.numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self.number


class Selector:
    """In the place of select(): waiting takes no time. Each turn of the loop costs some, so that timers,
    threads and clients come between any two turns."""

    def select(self, timeout: float | None) -> Sequence[object]:
        world = WORLD
        if world.errors:
            raise Broken(world.errors[0])
        if timeout is None:
            raise Broken("nothing will ever happen: a wake-up was lost")
        world.now += timeout or TURN_S[int(world.own.random() * len(TURN_S))]
        world.n_turns += 1
        world.law(world.n_turns < MAX_TURNS, "the loop is busy for ever")
        if world.now >= world.kill_at or world.n_turns >= world.kill_turn:
            world.tell("kill -9")
            raise Killed
        return ()


class Loop(asyncio.BaseEventLoop):
    """asyncio's own loop over Selector. Its order of ready callbacks is kept: asyncio promises it."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = Selector()
        self.signal_handlers: dict[int, Callable[..., object]] = {}
        self.set_task_factory(lambda loop, coro, **kwargs: SimTask(coro, loop=loop, **kwargs))
        self.set_exception_handler(self._on_error)

    def _on_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Broken):
            WORLD.errors.append(f"the loop was told: {context['message']} {error!r}")

    def time(self) -> float:
        return WORLD.now

    def _process_events(self, _: object) -> None:
        pass

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        self.signal_handlers[sig] = callback

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Call in virtual threads, as many as the executor has: first come, first served."""
        world, future = WORLD, self.create_future()
        for row in (one for one in args if isinstance(one, Row)):  # what is to be written
            world.moment("asked", f"{row.id} ends" if row.status in TERMINAL else row.id)
        threads: ThreadPoolExecutor = executor or self._default_executor  # type: ignore[attr-defined]
        is_store = threads._thread_name_prefix == "store"
        free_at = world.free_at[threads]
        while len(free_at) < threads._max_workers:
            free_at.append(0.0)
        begins = max(self.time(), min(free_at))
        lasts = world.delay((world.disk_slow_s or world.disk_s) if is_store else 0.0005)
        free_at[free_at.index(min(free_at))] = begins + lasts
        outcome: list[tuple[Callable[[Any], None], Any]] = []

        def begin() -> None:
            if future.cancelled():  # one that is cancelled later is called all the same
                return
            try:
                outcome.append((future.set_result, func(*args)))
            except Exception as error:
                outcome.append((future.set_exception, error))
            self.call_later(lasts, end)

        def end() -> None:
            world.moment("called", world.writing if is_store else "")
            if not future.cancelled():
                set_outcome, value = outcome[0]
                set_outcome(value)

        self.call_at(begins, begin)
        return future


# --- the disk -----------------------------------------------------------------------------------------------

# Of each owner what has ended: all, what is kept, and what has events that are older than they may be.
HELD = f"""
SELECT owner, COUNT(*), SUM(kept), SUM(ended_at < ? AND event_bytes > 0 AND owner <> '{DAMAGED}')
FROM responses WHERE ended_at IS NOT NULL GROUP BY owner
"""


class SimStore(Store):
    """The real store, on a disk that may be full."""

    def _disk(self, what: str, *about: object, is_end: bool = False) -> None:
        """Note a call of the disk; raise if it fails. `is_end`: a last event is written."""
        WORLD.trace("disk", what, *about)
        WORLD.moment(what, WORLD.writing)
        is_bad = WORLD.n_bad_writes > 0 and (not WORLD.fails_ends or is_end)
        if WORLD.disk_full or is_bad:
            WORLD.n_bad_writes -= 1
            WORLD.counts["disk faults"] += 1
            WORLD.tell("the disk is full:", what, *about)
            raise sqlite3.OperationalError("database or disk is full")

    def write(self, row: Row, first_number: int = 0, frames: Sequence[bytes] = ()) -> None:
        WORLD.writing = row.id
        is_end = row.status in TERMINAL
        self._disk("write", row.id, f"events {first_number}+{len(frames)}", row.status, is_end=is_end)
        super().write(row, first_number, frames)

    def delete(self, id: str) -> None:
        WORLD.writing = id
        self._disk("delete", id)
        super().delete(id)

    def set_aside(self, id: str, now: float) -> None:
        self._disk("set aside", id)
        super().set_aside(id, now)

    def evict(self, now: float) -> bool:
        if WORLD.disk_full:
            self._disk("evict")
        live, before = self.live(), self._held(now)
        is_more = super().evict(now)
        WORLD.law(self.live() == live, "a live response was evicted")
        held = self._held(now)
        for owner in before:  # what is kept is not here for so long that it is too old
            is_fair = held[owner][1] == before[owner][1] or held[owner][0] + 1 >= max(held.values())[0]
            WORLD.law(is_fair, "an owner who holds less than another loses a response:", owner)
        n, _, n_old = map(sum, zip((0, 0, 0), *held.values(), strict=True))
        is_within = is_more or (n <= self._retention.max_responses and not n_old)
        WORLD.law(is_within, "more is kept than may be:", n, "responses, old events of", n_old)
        return is_more

    def _held(self, now: float) -> defaultdict[str, tuple[int, ...]]:
        rows = self._db.execute(HELD, (now - self._retention.events_age_s,))
        return defaultdict(lambda: (0, 0, 0), {owner: tuple(counts) for owner, *counts in rows})

    def live_statuses(self) -> dict[str, str]:
        """Return the status of each response that has not ended, by id."""
        return dict(self._db.execute("SELECT id, status FROM responses WHERE ended_at IS NULL"))


# --- the device ---------------------------------------------------------------------------------------------

EOS, THINK, END_THINK = 2041, 2046, 2047  # of tests/models/tiny
WORDS = 501, 345, 348, 291, 17, 156  # few, so drafts are right now and then; 156: one byte of a character
LINE_ENDS = 198, 312  # of a prompt, which has one or two
# <tool_call>{"name": "f", "arguments": {}}</tool_call>
CALL = [2042, 266, 282, 257, 256, 69, 274, 256, 359, 257, 220, 90, 293, 2043]


def grow(value: int, token_id: int, position: int) -> int:
    """Return what the KV cache holds of a token: it depends on all tokens before it."""
    return zlib.crc32(b"%d %d %d" % (value, token_id, position))


def token_of(seen: int, choice: int, last: list[int]) -> int:
    """Return the token that follows what has been seen, the last tokens of which are these."""
    for n in range(1, len(CALL)):
        if last[-n:] == CALL[:n]:  # a call has begun
            return CALL[n]
    n = zlib.crc32(b"%d %d" % (seen, choice))
    if n % 61 == 0:
        return EOS
    if n % 2 and last[-1] in LINE_ENDS:
        return CALL[0]
    return {1: THINK, 2: END_THINK}.get(n % 31) or WORDS[n % 7 % len(WORDS)]


def alone(sequence: scheduler.Sequence) -> Iterator[int]:
    """Yield the answer as it is without company, pages, cache, drafts or preemption."""
    value = seen = 0
    for position, token_id in enumerate(sequence.prompt):
        value = grow(value, token_id, position)
        seen = zlib.crc32(np.int64(value).tobytes(), seen)
    said = [*sequence.prompt]
    for n in range(sequence.max_tokens):
        token_id = token_of(seen, sequence.sampling.choice, said)
        said.append(token_id)
        yield token_id
        if token_id in sequence.stop_token_ids:
            return
        value = grow(value, token_id, len(sequence.prompt) + n)
        seen = zlib.crc32(np.int64(value).tobytes(), seen)


class HashRunner:
    """A device whose next token is a hash of all that the page table leads to: a page mixed up changes it."""

    chunk = PAGE
    max_seq_len = 400

    def __init__(self, config: Config, n_pages: int, max_batch: int, n_ahead: int) -> None:
        self.config, self.n_pages, self.max_batch, self.n_ahead = config, n_pages, max_batch, n_ahead
        self.max_wanted = max_batch + WORLD.own.choice((0, 1, max_batch))  # the rest is for drafts
        self.about, self.degraded = {"device": "a hash"}, dict[str, str]()
        self._kv, self._tokens = np.zeros((2, n_pages, PAGE), np.int64)
        self._chosen = defaultdict[int, list[int]](list)  # by slot

    def launch(self, spans: list[model.Span], contexts: list[SamplingContext]) -> Any:
        WORLD.cpu += WORLD.own.choice((0.001, 0.02, 0.3))
        if WORLD.device_broken and WORLD.own.random() < 0.3:
            WORLD.tell("a step fails")
            raise RuntimeError("the device is broken")
        wanted, step = iter(contexts), list[Choice]()
        for span in spans:
            token_ids = span.token_ids or self._chosen[span.slot][-1:]
            pages = [*span.pages]
            for position, token_id in enumerate(token_ids, span.start):
                before = self._kv[pages[(position - 1) // PAGE], (position - 1) % PAGE] if position else 0
                self._kv[pages[position // PAGE], position % PAGE] = grow(before, token_id, position)
                self._tokens[pages[position // PAGE], position % PAGE] = token_id
            choices = []
            for end in range(span.end - span.n_wanted + 1, span.end + 1):
                seen = zlib.crc32(self._kv[pages].ravel()[:end].tobytes())
                last = self._tokens[pages].ravel()[max(0, end - len(CALL)) : end].tolist()
                choices.append(Choice(token_of(seen, next(wanted).sampling.choice, last)))
            if choices and WORLD.device_nan and WORLD.own.random() < 0.02:
                choices[-1] = Choice(NO_TOKEN)
            self._chosen[span.slot] = [choice.token_id for choice in choices]
            step += choices
        return step

    def read(self, ticket: Any) -> list[Choice]:
        choices: list[Choice] = ticket
        return choices


class Inbox(queue.SimpleQueue[Callable[[], object]]):
    """The engine's inbox, which wakes a timer instead of a thread."""

    on_put: Callable[[], None] = staticmethod(lambda: None)

    def put(self, item: Callable[[], object], block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        self.on_put()


# The engine has no thread: its work is done by timers of the event loop.
engine.threading = SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=lambda: None))  # type: ignore
engine.queue = SimpleNamespace(SimpleQueue=Inbox)  # type: ignore
for module in (model, scheduler, engine):
    module.PAGE = PAGE  # type: ignore[attr-defined]


class SimEngine(engine.Engine):
    """The real engine; the loop of its thread, Engine._loop(), is here as timers of the event loop."""

    _inbox: Inbox

    def __init__(self, runner: HashRunner, speculate: int, loop: Loop) -> None:
        super().__init__(runner, speculate)
        self._event_loop: Loop = loop
        self._inbox.on_put = self._wake
        self._is_at_work = False
        self._left: list[scheduler.Sequence] = []  # whose readers have left

    def _wake(self) -> None:
        if not self._is_at_work:
            self._is_at_work = True
            self._event_loop.call_later(WORLD.own.expovariate(10_000), self._begin, context=Context())

    def _begin(self) -> None:
        self._read_inbox(wait=False)
        known = {*self._scheduler.running, *self._scheduler.waiting}
        WORLD.law(known.isdisjoint(self._left), "the engine goes on for a client that has left")
        self._left.clear()
        WORLD.law(WORLD.gone.isdisjoint({one.request_id for one in known}), "a request that is over runs on")
        is_full = all(len(one.prefix_hashes) * PAGE <= one.n_tokens for one in known)
        WORLD.law(is_full, "a page has a hash before it is full")
        self._event_loop.call_later(WORLD.delay(WORLD.step_s), self._end_step, context=Context())

    def _launch(self, step: scheduler.Step) -> None:
        for sequence, span in ((one.sequence, one.span) for one in step):
            is_needed = span.end < len(sequence.prompt) + sequence.max_tokens
            WORLD.law(is_needed, "a row is computed after which nothing comes:", sequence.request_id)
        super()._launch(step)

    def _end_step(self) -> None:
        if not self._why_closed:
            self._step()
        scheduler = self._scheduler
        WORLD.trace("step", len(scheduler.running), len(scheduler.waiting), scheduler.pool.n_free)
        WORLD.moment("step")
        self._is_at_work = False
        if self._why_closed:
            self.close()
        elif self.busy() or self._in_flight:
            self._wake()

    def close(self) -> None:
        self._why_closed = self._why_closed or engine.CLOSING
        self._read_inbox(wait=False)
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            self._fail(sequence, self._why_closed)
        self._flush_outbox()

    async def generate(self, sequence: scheduler.Sequence, on_step: OnStep) -> None:
        expected, is_told = alone(sequence), False

        def check_and_feed(step: engine.StepOutput) -> bool:
            nonlocal is_told
            is_own = REQUEST_ID.get() == sequence.request_id
            WORLD.law(is_own, "its reader works for another request:", sequence.request_id)
            WORLD.law(
                is_told or not step.tokens, "that its prompt is computed is not told:", sequence.request_id
            )
            is_told = True
            for token in step.tokens:
                past = f"preempted for {sequence.preempted_for!r}, {sequence.n_cached} tokens from the cache"
                is_right = token.token_id == next(expected, -1)
                WORLD.law(is_right, "other tokens than alone:", sequence.request_id, past)
            return on_step(step)

        try:
            await super().generate(sequence, check_and_feed)
        finally:
            self._left.append(sequence)
            WORLD.counts["answers"] += sequence.finish in ("stop", "length")

    def check_idle(self) -> None:
        scheduler, runner = self._scheduler, self._runner
        WORLD.law(not self.busy(), "the engine never rests")
        WORLD.law(scheduler.pool.n_free == runner.n_pages, "pages are held:", self.counts())
        WORLD.law(len(scheduler._free_slots) == runner.max_batch, "slots are held")


# --- an upstream --------------------------------------------------------------------------------------------

FAR = "far"  # the name of its model
#  how an answer goes, and how often
SCRIPTS = {"whole": 8, "json": 1, "no [DONE]": 1, "cut": 1, "an error": 1, "silent": 1,
           "429": 1, "500": 1, "400": 1, "no connection": 1, "nothing": 1}  # fmt: skip


def far_answer(text: str) -> str:
    """Return what the upstream answers to a text: whoever asks again hears the same."""
    rng = random.Random(text)
    return " ".join(rng.choice(("far", "away", "\u2028", "水")) for _ in range(rng.choice((1, 4, 20))))


async def silence(closed: asyncio.Event, seconds: float | None) -> None:
    """Hear nothing for so many seconds, or for ever; raises what httpx does once its client is closed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await closed.wait()
    if closed.is_set():
        raise httpx.ReadError("closed")


class SimBody(httpx.AsyncByteStream):
    """The body of an answer, piece by piece. None: the upstream says nothing more, and stays connected.

    `closed`: the client that reads it is; then it breaks off.
    """

    def __init__(
        self, closed: asyncio.Event, pieces: Iterable[bytes | Exception | None], pause_s: float = 0.001
    ) -> None:
        self._closed, self._pieces, self._pause_s = closed, pieces, pause_s
        self._number = WORLD.own.getrandbits(64)
        WORLD.open_bodies.add(self._number)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            await silence(self._closed, None if piece is None else WORLD.delay(self._pause_s))
            if isinstance(piece, Exception):
                raise piece
            assert piece
            yield piece

    async def aclose(self) -> None:
        WORLD.open_bodies.discard(self._number)


class SimUpstream(httpx.AsyncBaseTransport):
    """The network behind Upstreams, with an OpenAI-compatible server that fails as a script says."""

    def __init__(self) -> None:
        self._closed = asyncio.Event()

    async def aclose(self) -> None:
        self._closed.set()

    def _whole(self, status: int, value: Json) -> httpx.Response:
        """Return an answer in one piece; as a stream: what httpx has read itself cannot be read raw."""
        return httpx.Response(status, stream=SimBody(self._closed, [json.dumps(value).encode()]))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await silence(self._closed, WORLD.delay(0.01))
        if WORLD.upstream_down:
            raise httpx.ConnectError("connection refused")
        if request.url.path.endswith("/models"):
            return self._whole(200, {"data": [{"id": FAR, "object": "model"}]})
        script = WORLD.random.choices([*SCRIPTS], [*SCRIPTS.values()])[0]
        body = json.loads(request.content)
        WORLD.tell("the upstream is asked, and answers:", script)
        WORLD.counts[f"upstream: {script}"] += 1
        if script == "no connection":
            raise httpx.ConnectError("connection refused")
        if script == "nothing":
            await silence(self._closed, None)
        if script.isdigit():
            return self._whole(int(script), {"error": {"message": "no", "code": "no"}})
        content = body["messages"][-1]["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        return self._answer(script, far_answer(text), body)

    def _answer(self, script: str, text: str, body: Json) -> httpx.Response:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": FAR}
        usage = {"prompt_tokens": 3, "completion_tokens": len(text), "total_tokens": 3 + len(text)}
        n = body.get("n") or 1
        if script == "json" or not body.get("stream"):
            message = {"role": "assistant", "content": text}
            choices: list[Any] = [{"index": i, "message": message, "finish_reason": "stop"} for i in range(n)]
            return self._whole(200, head | {"object": "chat.completion", "choices": choices, "usage": usage})

        def chunk(i: int, delta: Json, reason: str | None = None) -> bytes:
            return event(head | {"choices": [{"index": i, "delta": delta, "finish_reason": reason}]})

        cuts = range(0, len(text), 5)
        texts = [{"role": "assistant", "content": text[cut : cut + 5]} for cut in cuts]
        frames: list[bytes | Exception | None] = [chunk(i, delta) for i in range(n) for delta in texts]
        ends = [chunk(i, {}, "stop") for i in range(n)]
        last = [event(head | {"choices": [], "usage": usage}), DONE]
        n_sent = WORLD.random.randrange(len(frames) + 1)
        match script:
            case "whole":
                frames += [*ends, *last]
            case "no [DONE]":
                frames += [*ends, None]
            case "cut":
                frames = [*frames[:n_sent], httpx.ReadError("connection reset")]
            case "an error":
                failure = {"error": {"message": "out of memory", "code": 500}}
                frames = [*frames[:n_sent], event(failure)]
            case "silent":
                frames = [*frames[:n_sent], None]
        headers = {"content-type": "text/event-stream"}
        stream = SimBody(self._closed, frames, WORLD.random.choice((0.001, 0.1)))
        return httpx.Response(200, headers=headers, stream=stream)


def client(original: Any = httpx.AsyncClient, **options: Any) -> httpx.AsyncClient:
    return original(transport=SimUpstream(), **options)  # type: ignore[no-any-return]


upstreams.httpx.AsyncClient = client  # type: ignore


# --- the log ------------------------------------------------------------------------------------------------

HARMS = "No such file", "replaced or cut"  # that come to the file of the store


class Errors(logging.Handler):
    """Puts the log into the trace. An error that no fault has caused is a broken law."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().replace(WORLD.folder, "")
        WORLD.trace("log", record.name, record.levelname, message)
        excused = record.levelno < logging.ERROR
        is_told = ("could not be" in message or "has a fault" in message) and not record.exc_info  # in a line
        excused |= WORLD.counts["disk faults"] > 0 and is_told
        is_harmed = WORLD.counts["harms"] > 0 and any(harm in message for harm in HARMS)
        WORLD.counts["harms told"] += is_harmed
        excused |= is_harmed or (WORLD.counts["damages"] > 0 and "damaged" in message)
        excused |= WORLD.counts["device faults"] > 0 and "a step failed" in message
        excused |= WORLD.counts["bugs"] > 0 and ("a run failed" in message or "could not be ended" in message)
        if not excused:
            error = record.exc_info[1] if record.exc_info else ""
            WORLD.errors.append(f"logged: {message} {error!r}")
