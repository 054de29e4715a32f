"""The engine's steps as data, to see it work: a picture of the scheduler after each step.

    Scheduler, batch, choices --Steps.observe(), in the engine's thread--> Step --Steps.read()--> SSE frames

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html for the stream.

Rules of this file:
1. The scheduler does not know that it is watched. A picture is whole. What has changed between two of them
   (pages found, taken, released) the page finds by itself (engine.html).
2. The engine waits for no reader. The newest MAX_STEPS are kept; a reader that is slower than the steps loses
   the oldest, which the numbers of the steps show.
3. An owner reads the ids and the tokens of its own requests. Of others it sees the shapes alone: rows, pages,
   phases, queues.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import sse
from engine import Engine
from model import PAGE
from sampling import Choice
from scheduler import Scheduled, Scheduler, Sequence
from streaming import SSE_HEADERS, KeptAlive, while_connected

MAX_STEPS = 2000


class Row(NamedTuple):
    """A sequence in a step, and what the step did for it."""

    owner: str
    own: dict[str, Any]  # what its owner alone may know: the request's id, and which of its n choices this is
    shape: dict[str, Any]  # members of the JSON that anybody may know
    tokens: list[Choice]  # chosen in this step


class Step(NamedTuple):
    """The scheduler after a step."""

    shape: dict[str, Any]  # members of the JSON that anybody may know
    rows: list[Row]


class Known(NamedTuple):
    """A sequence as it was after the last step."""

    number: int  # from 0, in the order in which they came
    page_table: list[int]
    n_output: int
    n_preemptions: int


class Steps:
    """The newest steps of an engine, as streams."""

    def __init__(self, engine: Engine, token_bytes: Callable[[int], bytes]) -> None:
        self._n_pages = engine.counts()["pages"]
        self._token_bytes = token_bytes
        self._steps = deque[Step](maxlen=MAX_STEPS)
        self._known: dict[Sequence, Known] = {}  # those that wait or run
        self._ended = WeakSet[Sequence]()  # steps in flight may still hold them
        self._n_sequences = 0  # that have come
        self._n_steps = 0
        self._began_at = time.perf_counter()
        self._readers: dict[
            asyncio.Event, asyncio.AbstractEventLoop
        ] = {}  # those that wait for the next step
        self._is_closed = False
        engine.observer = self.observe

    # --- in the engine's thread -----------------------------------------------------------------------------

    def observe(
        self, scheduler: Scheduler, batch: list[Scheduled], choices: list[list[Choice]], duration_s: float
    ) -> None:
        """Take a picture of the scheduler, which has just read a step; `batch` is [] if it has read none.

        `choices` has a list for each of the batch.
        """
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        here = {*running, *waiting}
        rows_of = {scheduled.sequence: scheduled for scheduled in batch}
        choices_of = dict(zip(rows_of, choices, strict=True))
        rows = [
            self._row(sequence, rows_of.get(sequence), choices_of.get(sequence, []), sequence in here)
            for sequence in dict.fromkeys([*running, *waiting, *rows_of, *self._known])
            if sequence not in self._ended
        ]
        if not batch and not any(row.shape["ended"] for row in rows):
            return  # nothing has been computed, and none has left
        numbers = {sequence: known.number for sequence, known in self._known.items()}
        cached = np.zeros(self._n_pages, bool)
        cached[list(scheduler.pool.cached_pages)] = True
        shape = {
            "type": "step",
            "step": self._n_steps,
            "time_s": round(time.perf_counter() - self._began_at, 6),
            "duration_s": round(duration_s, 6),
            "page_size": PAGE,
            "n_pages": self._n_pages,
            "n_free_pages": scheduler.pool.n_free,
            "cached": np.packbits(cached).tobytes().hex(),  # a bit a page: does the prefix cache know it?
            "running": [numbers[sequence] for sequence in running],
            "waiting": [numbers[sequence] for sequence in waiting],
        }
        for sequence in self._known.keys() - here:
            del self._known[sequence]
            self._ended.add(sequence)
        self._n_steps += 1
        self._steps.append(Step(shape, rows))
        self._wake_readers()

    def _row(
        self, sequence: Sequence, scheduled: Scheduled | None, choices: list[Choice], is_here: bool
    ) -> Row:
        """Describe a sequence; `scheduled` None: nothing was computed for it."""
        known = self._known.get(sequence)
        if known is None:
            known = Known(self._n_sequences, [], 0, 0)
            self._n_sequences += 1
        page_table = known.page_table
        if page_table != sequence.page_table:
            page_table = list(sequence.page_table)
        n_new = len(sequence.output) - known.n_output
        preempted = sequence.preempted_for if sequence.n_preemptions > known.n_preemptions else ""
        self._known[sequence] = Known(known.number, page_table, len(sequence.output), sequence.n_preemptions)
        shape: dict[str, Any] = {
            "sequence": known.number,
            "n_prompt": len(sequence.prompt),
            "page_table": page_table if is_here else [],
            "phase": "",  # it had no rows
            "start": 0,
            "end": 0,
            "n_drafts": 0,
            "n_accepted": max(0, n_new - 1),
            "n_tokens": len(choices[:n_new]),
            "preempted": preempted,  # what for: Sequence.preempted_for
            "ended": "" if is_here else sequence.finish or "left",  # left: it failed, or its reader has gone
        }
        if scheduled:
            shape["phase"] = "prefill" if scheduled.is_prefill else "decode"
            shape |= {
                "start": scheduled.span.start,
                "end": scheduled.span.end,
                "n_drafts": len(scheduled.drafts),
            }
        own = {"request_id": sequence.request_id, "choice": sequence.sampling.choice}
        return Row(sequence.owner, own, shape, choices[:n_new])

    def newest(self) -> Step:
        return self._steps[-1]

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        self._wake_readers()

    def _wake_readers(self) -> None:
        for news, loop in list(self._readers.items()):
            with suppress(RuntimeError):  # its loop has closed
                loop.call_soon_threadsafe(news.set)

    # --- as JSON, for the eyes of one owner -----------------------------------------------------------------

    async def read(self, owner: str) -> AsyncGenerator[bytes]:
        """Yield the frames for one reader: the steps that are kept, then the next ones as they come."""
        news = asyncio.Event()
        self._readers[news] = asyncio.get_running_loop()
        n_read = 0
        try:
            while not self._is_closed:
                news.clear()
                for step in list(self._steps):  # a copy: the engine's thread goes on
                    if step.shape["step"] >= n_read:
                        n_read = step.shape["step"] + 1
                        yield sse.encode(sse.dumps(self._event(step, owner)))
                await news.wait()
        finally:
            del self._readers[news]

    def _event(self, step: Step, owner: str) -> dict[str, Any]:
        sequences: list[dict[str, Any]] = []
        for row in step.rows:
            sequence = dict(row.shape)
            if row.owner == owner:
                sequence |= row.own | {"tokens": [self._token(token) for token in row.tokens]}
            sequences.append(sequence)
        return step.shape | {"sequences": sequences}

    def _token(self, token: Choice) -> dict[str, Any]:
        said = {"id": token.token_id, "text": self._text(token.token_id)}
        if token.logprob is None:
            return said
        top = [
            {"id": token_id, "text": self._text(token_id), "logprob": finite(logprob)}
            for token_id, logprob in token.top
        ]
        return said | {"logprob": finite(token.logprob), "top": top}

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")


def finite(logprob: float) -> float | None:
    """Return a logprob as JSON can say it: None if it is not a finite number."""
    return logprob if math.isfinite(logprob) else None


class StepStream(Response):
    """Answers with the frames of Steps.read(), until the client leaves or the server stops."""

    def __init__(self, frames: AsyncGenerator[bytes]) -> None:
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await while_connected(self._send_frames(send), receive)

    async def _send_frames(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        async with aclosing(KeptAlive(send)) as stream, aclosing(self._frames) as frames:
            async for frame in frames:
                await stream.write(frame)
        await send({"type": "http.response.body", "body": b""})
