"""The engine's steps as data, to see it work: a picture of the scheduler after each step.

    Scheduler, StepRead --Steps.observe(), in the engine's thread--> steps --Steps.read()--> SSE frames

Authority: https://html.spec.whatwg.org/multipage/server-sent-events.html for the stream.

Rules of this file:
1. The engine calls observe() after each step; the scheduler does not know of it. A picture is whole. The page
   compares two pictures to find the changes (pages found, taken, released, sequences preempted): engine.html.
2. The engine waits for no reader, and makes no JSON. The newest MAX_STEPS are kept; a reader that is slower
   than the steps loses the oldest, which the numbers of the steps show.
3. An owner reads the ids and the tokens of its own requests. Of others it sees the shapes alone: rows, pages,
   phases, queues.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import count
from weakref import WeakKeyDictionary

import sse
from engine import Engine, StepRead
from model import PAGE
from request.room import Visit
from sampling import Choice
from scheduler import Scheduled, Scheduler, Sequence

MAX_STEPS = 2000
POLL_S = 0.05  # a reader looks for new steps so often
STEPS_A_TURN = 16  # that one reader gets in a turn of the event loop: 5 ms

# The owner of a sequence, what a step did for it, and what of that the owner alone may read.
Share = tuple[str, sse.Object, sse.Object]


class Steps:
    """The newest steps of an engine, as streams."""

    def __init__(self, engine: Engine, token_bytes: Callable[[int], bytes]) -> None:
        self.steps = deque[tuple[sse.Object, list[Share]]](maxlen=MAX_STEPS)
        self._token_bytes = token_bytes
        self._step_numbers = count()
        self._sequence_numbers = count()
        # Sequences by their numbers, from 0. Steps in flight may still hold those that have left.
        self._numbers = WeakKeyDictionary[Sequence, int]()
        self._here: list[Sequence] = []  # those that waited or ran after the last picture, then newer ones
        engine.observer = self.observe

    # --- in the engine's thread -----------------------------------------------------------------------------

    def observe(self, scheduler: Scheduler, read: StepRead, duration_s: float) -> None:
        """Take a picture of the scheduler, which has just read a step, with the new tokens of its sequences.

        `read` is [] if it has read none.
        """
        here = [*scheduler.running, *scheduler.waiting]
        brought = {scheduled.sequence: (scheduled, tokens) for scheduled, tokens in read}
        for sequence in [*here, *brought]:
            if sequence not in self._numbers:
                self._numbers[sequence] = next(self._sequence_numbers)
                self._here.append(sequence)
        left = {*self._here} - {*here}
        if not read and not left:
            return  # nothing has been computed
        shares = [self._share(one, one in left, *brought.get(one, (None, []))) for one in self._here]
        self._here = here
        pool = scheduler.pool
        step: sse.Object = {
            "step": next(self._step_numbers),
            "time_s": time.perf_counter(),
            "duration_s": duration_s,
            "page_size": PAGE,
            "n_pages": pool.n_pages,
            "n_free_pages": pool.n_free,
            "cached": list(pool.cached_pages),  # by the prefix cache
            "running": [self._numbers[sequence] for sequence in scheduler.running],
            "waiting": [self._numbers[sequence] for sequence in scheduler.waiting],
        }
        self.steps.append((step, shares))

    def _share(
        self, sequence: Sequence, has_left: bool, scheduled: Scheduled | None, tokens: list[Choice]
    ) -> Share:
        """Describe a sequence, and what the step did for it; `scheduled` None: nothing."""
        share: sse.Object = {
            "sequence": self._numbers[sequence],
            "n_prompt": len(sequence.prompt),
            "page_table": list(sequence.page_table),
            "preempted_for": sequence.preempted_for,  # the last time
            "n_tokens": len(tokens),
        }
        if scheduled:
            share |= {
                "phase": "prefill" if scheduled.is_prefill else "decode",
                "start": scheduled.span.start,
                "end": scheduled.span.end,
                "n_drafts": len(scheduled.drafts),
            }
        if has_left:
            share["ended"] = sequence.finish or "left"
        texts = {"request_id": sequence.request_id, "tokens": list(map(self._token, tokens))}
        return sequence.owner, share, texts

    def _token(self, chosen: Choice) -> sse.Object:
        return {
            "id": chosen.token_id,
            "text": self._token_bytes(chosen.token_id).decode(errors="replace"),
            "logprob": chosen.logprob,
            "top": [self._token(Choice(*likely)) for likely in chosen.top],
        }

    # --- as JSON, for the eyes of one owner -----------------------------------------------------------------

    async def read(self, visit: Visit, stopping: asyncio.Event) -> AsyncGenerator[bytes]:
        """Yield the frames for one reader: the steps that are kept, then those to come, until a stop."""
        next_step = 0
        while not stopping.is_set():
            kept = list(self.steps)  # a copy: the engine's thread adds steps meanwhile
            if part := [each for each in kept if each[0]["step"] >= next_step][:STEPS_A_TURN]:
                next_step = part[-1][0]["step"] + 1
                frames = b""
                for step, shares in part:
                    sequences = [
                        share | texts if whose == visit.owner else share  # rule 3
                        for whose, share, texts in shares
                    ]
                    frames += sse.encode(step | {"sequences": sequences})
                yield frames
                await visit.until_its_turn()
            else:
                await asyncio.sleep(POLL_S)
