"""The engine's steps as data, to see it work: a picture of the scheduler after each step.

    Scheduler, batch, choices --Steps.observe(), in the engine's thread--> Step --Steps.read()--> SSE frames

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html for the stream.

Rules of this file:
1. The scheduler does not know that it is watched. A picture is whole. What has changed between two of them
   (pages found, taken, released) the page finds by itself (engine.html).
2. The engine waits for no reader, and makes no JSON. The newest MAX_STEPS are kept; a reader that is slower
   than the steps loses the oldest, which the numbers of the steps show.
3. An owner reads the ids and the tokens of its own requests. Of others it sees the shapes alone: rows, pages,
   phases, queues.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
from starlette.responses import Response, StreamingResponse

import sse
from engine import Engine
from model import PAGE
from sampling import Choice
from scheduler import Scheduled, Scheduler, Sequence
from streaming import KEEP_ALIVE, KEEP_ALIVE_S, SSE_HEADERS

MAX_STEPS = 2000
POLL_S = 0.05  # between two looks of a reader


class Row(NamedTuple):
    """A sequence in a step, and what the step did for it."""

    sequence: int  # its number: from 0, in the order in which they came
    n_prompt: int
    page_table: list[int]
    n_accepted: int  # drafts
    owner: str
    request_id: str
    choice: int  # which of the request's n choices it is
    tokens: list[Choice]  # chosen in this step
    phase: str = ""  # prefill or decode; "": it had no rows
    start: int = 0
    end: int = 0
    n_drafts: int = 0
    preempted: str = ""  # what for: Sequence.preempted_for
    ended: str = ""  # "left": it failed, or its reader has gone


OWN = {"owner", "request_id", "choice", "tokens"}  # what no other owner may know


class Step(NamedTuple):
    """The scheduler after a step."""

    step: int  # its number
    time_s: float
    duration_s: float
    page_size: int
    n_pages: int
    n_free_pages: int
    cached: str  # hex digits, a bit a page: does the prefix cache know it?
    running: list[int]
    waiting: list[int]
    sequences: list[Row]


class Known(NamedTuple):
    """A sequence as it was after the last step."""

    number: int
    page_table: list[int]
    n_output: int
    n_preemptions: int


class Steps:
    """The newest steps of an engine, as streams."""

    def __init__(self, engine: Engine, token_bytes: Callable[[int], bytes]) -> None:
        self._n_pages = engine.counts()["pages"]
        self._token_bytes = token_bytes
        self.steps = deque[Step](maxlen=MAX_STEPS)
        self._known: dict[Sequence, Known] = {}  # those that wait or run
        self._ended = WeakSet[Sequence]()  # steps in flight may still hold them
        self._sequence_numbers = count()
        self._step_numbers = count()
        self._began_at = time.perf_counter()
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
        scheduled_of = {scheduled.sequence: scheduled for scheduled in batch}
        choices_of = dict(zip(scheduled_of, choices, strict=True))
        rows = [
            self._row(sequence, scheduled_of.get(sequence), choices_of.get(sequence, []), sequence in here)
            for sequence in dict.fromkeys([*running, *waiting, *scheduled_of, *self._known])
            if sequence not in self._ended
        ]
        if not batch and not any(row.ended for row in rows):
            return  # nothing has been computed, and none has left
        cached = np.zeros(self._n_pages, bool)
        cached[list(scheduler.pool.cached_pages)] = True
        step = Step(
            next(self._step_numbers),
            round(time.perf_counter() - self._began_at, 6),
            round(duration_s, 6),
            PAGE,
            self._n_pages,
            scheduler.pool.n_free,
            np.packbits(cached).tobytes().hex(),
            [self._known[sequence].number for sequence in running],
            [self._known[sequence].number for sequence in waiting],
            rows,
        )
        for sequence in self._known.keys() - here:
            del self._known[sequence]
            self._ended.add(sequence)
        self.steps.append(step)

    def _row(
        self, sequence: Sequence, scheduled: Scheduled | None, choices: list[Choice], is_here: bool
    ) -> Row:
        """Describe a sequence; `scheduled` None: nothing was computed for it."""
        known = self._known.get(sequence)
        if known is None:
            known = Known(next(self._sequence_numbers), [], 0, 0)
        page_table = known.page_table  # shared by all steps in which it is the same
        if page_table != sequence.page_table:
            page_table = list(sequence.page_table)
        n_new = len(sequence.output) - known.n_output
        self._known[sequence] = Known(known.number, page_table, len(sequence.output), sequence.n_preemptions)
        row = Row(
            known.number,
            len(sequence.prompt),
            page_table,
            max(0, n_new - 1),
            sequence.owner,
            sequence.request_id,
            sequence.sampling.choice,
            choices[:n_new],
        )
        if scheduled:
            start, end = scheduled.span.start, scheduled.span.end
            phase = "prefill" if scheduled.is_prefill else "decode"
            row = row._replace(phase=phase, start=start, end=end, n_drafts=len(scheduled.drafts))
        if sequence.n_preemptions > known.n_preemptions:
            row = row._replace(preempted=sequence.preempted_for)
        if not is_here:
            row = row._replace(page_table=[], ended=sequence.finish or "left")
        return row

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True

    # --- as JSON, for the eyes of one owner -----------------------------------------------------------------

    def stream(self, owner: str) -> Response:
        """Answer with the frames of read(), until the client leaves or the server stops."""
        response = StreamingResponse(self.read(owner))
        response.raw_headers = SSE_HEADERS
        return response

    async def read(self, owner: str) -> AsyncGenerator[bytes]:
        """Yield the frames for one reader: the steps that are kept, then the next ones as they come."""
        n_read = 0
        silent_s = 0.0
        while not self._is_closed:
            news = [step for step in list(self.steps) if step.step >= n_read]  # the engine's thread goes on
            for step in news:
                yield sse.encode(sse.dumps(self._event(step, owner)))
                n_read = step.step + 1
                silent_s = 0
            if silent_s > KEEP_ALIVE_S:
                yield KEEP_ALIVE
                silent_s = 0
            await asyncio.sleep(POLL_S)
            silent_s += POLL_S

    def _event(self, step: Step, owner: str) -> dict[str, Any]:
        sequences: list[dict[str, Any]] = []
        for row in step.sequences:
            members = row._asdict() | {"n_tokens": len(row.tokens)}
            shown = {name: value for name, value in members.items() if name not in OWN}
            if row.owner == owner:
                tokens = [self._token(token) for token in row.tokens]
                shown |= {"request_id": row.request_id, "choice": row.choice, "tokens": tokens}
            sequences.append(shown)
        return {"type": "step"} | step._asdict() | {"sequences": sequences}

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
