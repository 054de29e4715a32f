"""Token ids to token ids: which rows the next step computes, and what became of them.

    Job --Engine.generate()--> Step, Step, ... the last one with `finish`

Rules of this file:
1. One thread owns the model. asyncio talks to it through two queues: jobs and aborts in, steps out.
2. Sequences wait, then run. A step takes one token of every running sequence that decodes, and a tile of
   prompt of those that do not yet, oldest first: long prompts are read beside the decoding of others.
3. A sequence ends once: stop token, length, failure or abort. Its memory is dropped before the next step.
4. An exception in a step fails the sequences in it, and no others: the next request works.

Not here: text (tokenizer.py, worker.py), the forward pass and sampling (model.py).
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from model import Batch, Cache, Choice, Context, NumpyOps, Sampling, Span, forward
from weights import Config, Weights

log = logging.getLogger("engine")

MAX_RUNNING = 16  # sequences a step
MAX_STEP_ROWS = 256  # tokens a step: bounds how long the others wait for a prompt
TILE = (
    128  # prompt tokens a sequence a step: always cut at its multiples, so that the sums are always the same
)
MAX_STEP_S = 30  # of the slowest model; it is waited for at the end
CLOSING = "The server is shutting down."


class Constraint(Protocol):
    """What may be generated, where that is not anything."""

    def mask(self) -> NDArray[np.bool_]: ...  # the tokens that may come next, (vocab_size,)

    def advance(self, token_id: int) -> None: ...  # one of them came; raises ValueError if it gives up


@dataclass(frozen=True)
class Job:
    """What to generate."""

    prompt: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int]
    sampling: Sampling
    constraint: Constraint | None = None


class Step(NamedTuple):
    """What a step brought to one sequence: its new tokens, a stop token among them, and whether they are the
    last.
    """

    tokens: list[Choice]
    finish: Literal["stop", "length", "failed"] | None = None
    message: str = ""  # for failed: what went wrong


@dataclass(eq=False)
class Sequence:
    """A job while it runs."""

    job: Job
    emit: Callable[[Step], None]
    cache: Cache | None = None  # None while waiting
    n_cached: int = 0  # tokens whose keys and values are in the cache
    output: list[int] = field(default_factory=list)
    mask: NDArray[np.bool_] | None = None  # the tokens that may come next, where a constraint says so

    def span(self) -> Span:
        """The tokens to compute next."""
        assert self.cache is not None
        tile = self.job.prompt[self.n_cached : self.n_cached + TILE] or self.output[-1:]
        return Span(self.cache, tile, self.n_cached, wanted=self.n_cached + len(tile) >= len(self.job.prompt))

    def context(self) -> Context:
        """What the choice of its next token depends on."""
        return Context(self.job.sampling, self.job.prompt, self.output, self.mask)


class Engine:
    """Runs a model in a thread of its own."""

    def __init__(
        self, config: Config, weights: Weights, max_seq_len: int, ops: type[NumpyOps] = NumpyOps
    ) -> None:
        self.config = config
        self.max_seq_len = max_seq_len
        self._weights = weights
        self._ops = ops(config, max_seq_len)
        self.about = self._ops.about
        self.weights_mb = weights.nbytes / 1e6
        self._inbox: queue.SimpleQueue[tuple[Literal["start", "abort", "wake"], Sequence | None]] = (
            queue.SimpleQueue()
        )
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._open = True  # False: nothing is put into the inbox any more that would need an answer
        self._lock = threading.Lock()  # holds that sentence together: close() comes from another thread
        self.n_steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, job: Job) -> AsyncGenerator[Step]:
        """Steps of one sequence. Leaving early, by whatever way, aborts it: consume under
        contextlib.aclosing.
        """
        loop, steps = asyncio.get_running_loop(), asyncio.Queue[Step]()
        sequence = Sequence(job, emit=lambda step: _call_soon(loop, steps, step))
        with self._lock:
            if self._open:
                self._inbox.put(("start", sequence))
            else:
                sequence.emit(Step([], "failed", CLOSING))
        try:
            while True:
                step = await steps.get()
                yield step
                if step.finish:
                    return
        finally:
            self._inbox.put(("abort", sequence))  # nothing to do if it has ended

    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def counts(self) -> dict[str, int]:
        return {"running": len(self._running), "waiting": len(self._waiting), "steps": self.n_steps}

    def close(self) -> None:
        """Fail what is left, end the thread; one that does not come back from a step is left behind."""
        with self._lock:
            self._open = False
        self._inbox.put(("wake", None))
        self._thread.join(MAX_STEP_S)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._open:
            idle = not self._running and not self._waiting
            self._read_inbox(wait=idle)
            while self._waiting and len(self._running) < MAX_RUNNING:
                self._running.append(sequence := self._waiting.popleft())
                sequence.cache = Cache(self.config, len(sequence.job.prompt) + sequence.job.max_tokens)
                self._constrain(sequence)
            if self._running:
                self._step()
        self._read_inbox(wait=False)
        for sequence in [*self._running, *self._waiting]:
            self._fail(sequence, CLOSING)

    def _read_inbox(self, wait: bool) -> None:
        while wait or not self._inbox.empty():
            wait = False
            match self._inbox.get():
                case "start", Sequence() as sequence:
                    self._waiting.append(sequence)
                case "abort", Sequence() as sequence:
                    self._drop(sequence)
                case _:
                    pass  # the loop looks at what woke it

    def _step(self) -> None:
        spans = self._schedule()
        try:
            logits = forward(self._ops, self._weights, Batch([span for _, span in spans]))
            wanted = [sequence for sequence, span in spans if span.wanted]
            contexts = [s.context() for s in wanted]
            choices = iter(self._ops.pick(logits, contexts))
        except Exception as error:
            log.exception("a step failed, and the %d requests in it", len(spans))
            for sequence, _ in spans:
                self._fail(sequence, f"{type(error).__name__} in the engine; its log has the details.")
            return
        self.n_steps += 1
        for sequence, span in spans:
            sequence.n_cached += len(span.token_ids)
            if span.wanted:
                self._advance(sequence, next(choices))

    def _schedule(self) -> list[tuple[Sequence, Span]]:
        """Decoding sequences first: a step never makes them wait."""
        free, spans = MAX_STEP_ROWS, []
        for sequence in sorted(self._running, key=lambda s: not s.output):  # stable: oldest first
            span = sequence.span()
            if len(span.token_ids) <= free:
                spans.append((sequence, span))
                free -= len(span.token_ids)
        return spans

    def _advance(self, sequence: Sequence, choice: Choice) -> None:
        sequence.output.append(choice.token_id)
        finish: Literal["stop", "length"] | None = None
        if choice.token_id in sequence.job.stop_token_ids:
            finish = "stop"
        elif len(sequence.output) == sequence.job.max_tokens:
            finish = "length"
        if finish:
            self._drop(sequence)
        sequence.emit(Step([choice], finish))
        if not finish:
            self._constrain(sequence, choice.token_id)

    def _constrain(self, sequence: Sequence, token_id: int | None = None) -> None:
        """Bring the sequence's mask up to date; where its constraint gives up, the sequence alone fails."""
        if constraint := sequence.job.constraint:
            try:
                if token_id is not None:
                    constraint.advance(token_id)
                sequence.mask = constraint.mask()
                if not sequence.mask.any():
                    raise ValueError("no token may come next")
            except Exception:
                log.exception("the constraint of a request gave up")
                self._fail(sequence, "The constraint on the output gave up; the log has the details.")

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._drop(sequence)
        sequence.emit(Step([], "failed", message))

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        sequence.cache = None


def _call_soon(loop: asyncio.AbstractEventLoop, steps: asyncio.Queue[Step], step: Step) -> None:
    try:
        loop.call_soon_threadsafe(steps.put_nowait, step)
    except RuntimeError:  # the loop has closed, and with it whoever waited
        log.debug("a step came after its reader had gone")
