"""The engine: a thread that runs the model step by step, and what goes between it and asyncio.

    Sequence --Engine.generate()--> on_step(StepOutput), on_step(StepOutput), ... the last one with `finish`
    the thread, over and over: read the inbox -> bring masks -> schedule() -> launch() -> read() -> hand out

Why a thread and two queues, and not a task of the event loop or a lock: a step computes for milliseconds and
would hold up every stream; with a lock around the scheduler each request would wait for a step. Why not a
process: every token would be pickled, and on a CPU the kernels release Python's lock anyway. The cost is that
the thread and the event loop share one interpreter: SWITCH_INTERVAL_S bounds how long either waits for it.

Rules of this file:
1. One thread owns the scheduler and the model. Requests and aborts come in by a queue. The outputs of steps
   are handed to the event loop, with one wake-up a step for all sequences.
2. The engine launches up to `n_ahead` more steps of the model runner before it reads the oldest one, so that
   the device does not wait for this thread. It discards tokens computed past the end of a sequence.
3. An exception in a step fails the sequences in it, and no others: the next request works. A fault of one
   sequence, such as logits that are not numbers, fails that sequence alone. An exception outside of a step
   fails all sequences, and the engine reports that it is not alive.
4. While sequences decode, a step with prefill chunks has about as many rows as are computed in STEP_S.
5. Every reader gets exactly one StepOutput with `finish`, unless it is cancelled or wants no more. The engine
   drops whatever it computes after that.
6. While the device is busy, the thread launches the next step before it hands the last one's tokens to the
   event loop, whose work with them would hold up the launch; unless the step waits for masks.
7. A step waits a moment for the masks of structured output. While other sequences can go on, it does not wait
   again for a mask that was late.
"""

import asyncio
import contextvars
import logging
import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from checkpoint.config import Config
from model import PAGE, Span, Ticket
from sampling import Choice, Context
from scheduler import FinishReason, Scheduled, Scheduler, Sequence, Step

log = logging.getLogger("engine")

SWITCH_INTERVAL_S = 0.0005  # another thread may keep the interpreter from this one for so long
STEP_S = 0.08  # length of a step with prefill chunks beside decoding: no stream may pause for 0.1 s


class StepOutput(NamedTuple):
    """The new tokens of one sequence after a step, including a stop token."""

    tokens: list[Choice]  # empty while the prompt is being computed
    finish: FinishReason | None = None  # None: more will come
    message: str = ""  # why it failed
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache


# LocalPrompt.run() makes it: takes the output of a step for its sequence, and returns whether it wants more.
# Runs in the event loop.
OnStep = Callable[[StepOutput], bool]

StepRead = list[tuple[Scheduled, list[Choice]]]  # a step that has been read: its sequences' new tokens


class ModelRunner(Protocol):
    """Computes the steps, and owns the memory of the KV cache; model.NumpyOps is the spec."""

    config: Config
    about: dict[str, str]  # what it computes with: lines of the server's start
    degraded: dict[str, str]  # what it does slowly because something failed, and why
    max_seq_len: int
    n_pages: int
    max_batch: int  # sequences a step (--max-batch)
    chunk: int  # tokens of a prefill chunk
    max_wanted: int  # rows of a step from which a token may be chosen
    n_ahead: int  # steps that are launched after the one that is read next; 0: each is read at once

    def launch(self, spans: list[Span], contexts: list[Context]) -> Ticket:
        """Start a step. `contexts` has one for each wanted row of the spans, in their order."""

    def read(self, ticket: Ticket) -> list[Choice]:
        """Wait for the oldest step; return one choice for each of its contexts."""


# --- Theory of operation ------------------------------------------------------------------------------------
#
# This is the thread beside a device, with n_ahead = 1. It launches step 4 before it reads step 3, so the
# scheduler chains step 4 to tokens that only the device knows yet. Only then does it hand out the tokens of
# step 2 to their readers: the event loop makes events of them while the device computes.
#
#   thread   read 2   launch 4   hand out 2   read 3 ............   launch 5   hand out 3   read 4 .......
#   device   step 3 .....................................   step 4 .....................................
#
# On a CPU n_ahead is 0: launch() itself computes, read() returns at once, and the tokens are handed to their
# readers before the next step is scheduled.
#
# Structured output needs a mask before each choice. The thread asks for it as soon as it has read the token
# before, and computes the other sequences if it does not come in a moment:
#
#   read 2: token 17   ask for the mask after 17   wait, 5 ms at most   schedule 3, with the mask or without
class Engine:
    """Runs a model in a thread of its own."""

    def __init__(self, runner: ModelRunner, speculate: int = 0) -> None:
        """`speculate`: drafts a step may verify for a sequence; 0: none."""
        self.config = runner.config
        self.max_seq_len = min(runner.max_seq_len, runner.n_pages * PAGE)
        self.about, self.degraded = runner.about, runner.degraded
        self.observer: Observer = lambda *step: None  # service/steps.py, if the steps are to be seen
        self._runner = runner
        self._scheduler = Scheduler(
            runner.n_pages, runner.max_batch, runner.chunk, speculate, runner.max_wanted
        )
        self._inbox = queue.SimpleQueue[Callable[[], object]]()  # between two steps: Scheduler.add or remove
        # Steps that are launched and not yet read, oldest first.
        self._in_flight: deque[tuple[Ticket, Step]] = deque()
        self._readers = WeakKeyDictionary[
            Sequence, tuple[contextvars.Context, OnStep, asyncio.Future[None]]
        ]()
        self._late: set[Sequence] = set()  # sequences whose masks were late
        self._outbox: list[tuple[Sequence, StepOutput]] = []  # what leaves the thread at the end of a step
        self._rows_per_s = math.inf  # of the last step with a prefill chunk
        self._began_at = 0.0  # the time when the oldest step in flight could begin
        self._n_failed_steps = 0  # since one that worked
        self._why_closed = ""  # the error of requests once the thread ends; "" while it runs
        self._event_loop: asyncio.AbstractEventLoop  # of the readers: generate() sets it
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, sequence: Sequence, on_step: OnStep) -> None:
        """Hand the tokens of one sequence to its reader, step by step, and return after the last.

        Call it in the event loop; always in the same one. To abort, cancel the caller: however this ends,
        Scheduler.remove() frees its pages in the engine's thread. An exception of on_step() is raised here.
        """
        self._event_loop = asyncio.get_running_loop()
        ended = self._event_loop.create_future()
        request_context = contextvars.copy_context()  # for its log records and the tasks of on_step()
        self._readers[sequence] = request_context, on_step, ended
        self._inbox.put(partial(self._scheduler.add, sequence))
        if self._why_closed:  # the thread may have read its inbox for the last time
            self._hand_out([(sequence, StepOutput([], "failed", self._why_closed))])
        try:
            await ended
        finally:
            self._inbox.put(partial(self._scheduler.remove, sequence))  # it may have ended by itself

    def _loop(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            while not self._why_closed:
                self._read_inbox(wait=not self.busy() and not self._in_flight)
                self._step()
        except BaseException:  # SystemExit too: no reader may wait for a thread that has ended
            log.exception("the engine has stopped")
            self._why_closed = BROKEN
        self._read_inbox(wait=False)
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            self._fail(sequence, self._why_closed)
        self._flush_outbox()
        self._end_constraints()

    def _read_inbox(self, wait: bool) -> None:
        """Add and remove the sequences of the requests since the last step; with `wait`, wait for one."""
        while wait or not self._inbox.empty():
            self._inbox.get()()
            wait = False

    def _step(self) -> None:
        """Schedule and launch the next step, then read the oldest one in flight."""
        # 1. The masks of structured output, as far as they have come.
        awaits_mask = any(sequence.awaits_mask for sequence in self._scheduler.running)
        self._late = self._wait_for_masks() if awaits_mask else set()
        # 2. The next step, launched before the last one is read.
        in_flight = [step for _, step in self._in_flight]
        step = self._scheduler.schedule(in_flight, max_rows=STEP_S * self._rows_per_s)
        if step:
            self._launch(step)
        # 3. To the event loop: that prompts have begun and, if steps run ahead (GPU), the tokens read before.
        self._flush_outbox()
        # 4. The oldest step in flight, if n_ahead others follow it, or there is nothing to launch.
        read: tuple[StepRead, float] = [], 0.0
        if len(self._in_flight) > (self._runner.n_ahead if step else 0):
            read = self._read()
        self._end_constraints()
        self.observer(self._scheduler, *read)
        if not self._in_flight:  # else the device is at work, and is to be given its next step first
            self._flush_outbox()

    def _launch(self, step: Step) -> None:
        spans = [scheduled.span for scheduled in step]
        contexts = [context for scheduled in step for context in scheduled.contexts]
        if not self._in_flight:
            self._began_at = time.perf_counter()
        try:
            self._in_flight.append((self._runner.launch(spans, contexts), step))
            self._scheduler.counts["steps"] += 1
            # Their prompts are being computed: a background response is no longer queued (LocalPrompt.run).
            begun = [each.sequence for each in step if each.is_prefill and not each.sequence.output]
            self._outbox += [(sequence, StepOutput([])) for sequence in begun]
        except Exception as error:
            self._fail_step(step, error)

    def _flush_outbox(self) -> None:
        """Empty the outbox with one call of the event loop: a call per sequence would outlast a step."""
        if self._outbox:
            with suppress(RuntimeError):  # the loop has closed, and its readers are gone
                self._event_loop.call_soon_threadsafe(self._hand_out, self._outbox)
            self._outbox = []

    def _read(self) -> tuple[StepRead, float]:
        """Hand the choices of the oldest step to the scheduler; return its new tokens and its seconds."""
        ticket, step = self._in_flight.popleft()
        try:
            choices = iter(self._runner.read(ticket))
        except Exception as error:
            self._fail_step(step, error)
            return [], 0.0
        self._n_failed_steps = 0
        read_at = time.perf_counter()
        seconds = read_at - self._began_at
        self._began_at = read_at
        if any(scheduled.is_prefill for scheduled in step):
            n_rows = sum(scheduled.span.n_rows for scheduled in step)
            self._rows_per_s = n_rows / seconds
        brought: StepRead = []
        for scheduled in step:
            sequence = scheduled.sequence
            chosen = [next(choices) for _ in scheduled.contexts]
            tokens = self._scheduler.postprocess(scheduled, chosen)
            brought.append((scheduled, tokens))
            if tokens:
                output = StepOutput(tokens, sequence.finish, cached_tokens=sequence.n_cached)
                self._outbox.append((sequence, output))
            elif sequence.finish == "failed":
                self._fail(sequence, NO_NUMBERS)
        assert next(choices, None) is None, "a choice without a context"
        return brought, seconds

    def _end_constraints(self) -> None:
        """End the processes that make masks for sequences that have left the batch, ended or preempted."""
        for sequence in self._scheduler.left:
            if sequence.constraint is not None:
                sequence.constraint.close()
        self._scheduler.left.clear()

    def busy(self) -> bool:
        """Return whether there is work. Any thread may call it; the answer may be a step old."""
        is_asked = not self._inbox.empty()  # for a sequence that the scheduler does not know yet
        is_at_work = is_asked or self._scheduler.running or self._scheduler.waiting
        return bool(is_at_work) and not self._why_closed

    def _hand_out(self, outputs: list[tuple[Sequence, StepOutput]]) -> None:
        """Give each reader the output of a step, and end those with their last. Runs in the event loop."""
        for sequence, output in outputs:
            request_context, on_step, ended = self._readers[sequence]
            if ended.done():
                continue
            try:
                wants_more = request_context.run(on_step, output)
            except Exception as error:
                ended.set_exception(error)
            else:
                if output.finish or not wants_more:
                    ended.set_result(None)

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    @property
    def alive(self) -> bool:
        """False if its thread has ended, or its steps fail one after another. Any thread may read it."""
        return not self._why_closed and self._n_failed_steps < MAX_FAILED_STEPS

    def counts(self) -> dict[str, int]:
        """Return gauges for /health and /metrics. Any thread may call it; numbers may be of two steps."""
        scheduler = self._scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            **scheduler.counts,
            "pages": scheduler.pool.n_pages,
            "free_pages": scheduler.pool.n_free,
        }

    def close(self) -> None:
        """Fail all sequences that are left, and end the thread; give up if a step outlasts MAX_STEP_S.

        Call it from another thread than the engine's, and not in the event loop: it waits.
        """
        self._why_closed = self._why_closed or CLOSING
        self._inbox.put(lambda: None)  # it wakes up
        self._thread.join(MAX_STEP_S)

    # --- the thread: it alone calls these -------------------------------------------------------------------

    def _is_held_up(self, sequence: Sequence) -> bool:
        """Ask for the mask that a sequence needs, and take it if it has come.

        Return whether the sequence cannot go on without it.
        """
        if not sequence.awaits_mask:
            return False
        assert sequence.constraint
        try:
            sequence.mask = sequence.constraint.mask(sequence.output)
            if sequence.mask is not None and not sequence.mask.any():
                raise ValueError("expected a token that may come next, the constraint allows none")
        except Exception as error:
            log.error("%s failed alone: its constraint gave up: %r", sequence.request_id, error)
            self._fail(sequence, GAVE_UP)
            return False
        return sequence.awaits_mask and sequence.n_ready <= 0

    def _wait_for_masks(self) -> set[Sequence]:
        """Wait for masks for a moment, but not for late ones while other sequences can go on.

        Return the sequences whose masks have not come.
        """
        deadline = time.monotonic() + MASK_WAIT_S
        # A copy: a sequence whose constraint gives up leaves `running`.
        while held_up := [one for one in list(self._scheduler.running) if self._is_held_up(one)]:
            others_can_go_on = len(held_up) < len(self._scheduler.running)
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0 or (others_can_go_on and self._late.issuperset(held_up)):
                break
            self._flush_outbox()  # the event loop need not wait for them
            wait([sequence.constraint.fileno() for sequence in held_up if sequence.constraint], seconds_left)
        return set(held_up)

    # --- what comes out -------------------------------------------------------------------------------------

    def _fail_step(self, step: Step, error: Exception) -> None:
        self._n_failed_steps += 1
        ids = [scheduled.sequence.request_id for scheduled in step]
        log.error("a step failed, and with it %s", ids, exc_info=error)
        for scheduled in step:
            self._fail(scheduled.sequence, f"{type(error).__name__} in the engine; its log has the details.")

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._scheduler.remove(sequence)
        self._outbox.append((sequence, StepOutput([], "failed", message)))


# --- the fold: a plain streamed request passes what stands above --------------------------------------------

# Called in the engine's thread after each step, with the scheduler, and the step if one was read (else []).
Observer = Callable[[Scheduler, StepRead, float], None]

MASK_WAIT_S = 0.005  # a step waits for masks for so long; most come within 1 ms
MAX_STEP_S = 30  # the longest that close() waits for the step that runs
MAX_FAILED_STEPS = 3  # one after another, and the engine is not alive: a device can fail for good

CLOSING = "The server is shutting down."
BROKEN = "The engine has stopped; its log has the details."
NO_NUMBERS = "The model's logits are not finite numbers."
GAVE_UP = (
    "The constraint on the output gave up: its schema or definition is too costly or too ambiguous to be "
    "followed any further, or allows nothing here. Simplify it; the log has the details."
)
