"""A step's numbers on a GPU: rows, positions, tiles and sampling, in memory that a CUDA graph can reuse.

    Spans, Contexts --place_spans(), row_fields(), pick_fields()--> HostMemory --one copy--> the device

Authority: the arguments of kernels.cu, by name.

Rules of this file:
1. All numbers of a step lie in one piece of memory: one copy brings them to the device.
2. The host's side is pinned memory, which the device reads by itself. What a step in flight copies from,
   nobody else writes until the step is read.
3. Steps of decoding are padded to a few sizes (buckets), each with memory of its own: a CUDA graph has the
   addresses of its size. Steps of whole prefill chunks have few sizes by themselves.

Not here: the ops (cuda.py), which rows come next (scheduler.py).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.kernels import (
    BIASED,
    CHAINS,
    CHOICE_WIDTH,
    MASKED,
    MAX_TOP,
    PENALISED,
    PICK_ROW_WIDTH,
    SEEDS_WIDTH,
    SETTINGS_WIDTH,
    TILE_WIDTH,
    DeviceArray,
)
from model import Span
from sampling import Choice, Context, Sampling

# ---- memory ------------------------------------------------------------------------------------------------


class StepLayout:
    """Where each field of a step lies in one piece of memory."""

    def __init__(self, n_rows: int, n_wanted: int, n_tiles: int) -> None:
        # fmt: off
        #  name         dtype, shape,                    padding: a value that means no row, no tile
        self.fields: dict[str, tuple[str, tuple[int, ...], int]] = {
            "seeds":     ("u8", (n_wanted, SEEDS_WIDTH),    0),
            "tokens":    ("i4", (n_rows,),                  0),  # -1: the token that the slot chose last
            "slots":     ("i4", (n_rows,),                  0),
            "positions": ("i4", (n_rows,),                 -1),
            "tiles":     ("i4", (n_tiles, TILE_WIDTH),      0),
            "wanted":    ("i4", (n_wanted,),                0),  # rows whose logits are wanted
            "pick_rows": ("i4", (n_wanted, PICK_ROW_WIDTH), -1),
            "settings":  ("f4", (n_wanted, SETTINGS_WIDTH), 0),
        }
        # fmt: on
        self.n_bytes = sum(n_bytes(dtype, shape) for dtype, shape, _ in self.fields.values())

    def views(self, memory: Any) -> dict[str, Any]:
        """The fields as arrays, in memory (n_bytes,) uint8 of the host or the device."""
        views = {}
        begin = 0
        for name, (dtype, shape, _) in self.fields.items():
            end = begin + n_bytes(dtype, shape)
            views[name] = memory[begin:end].view(np.dtype(dtype)).reshape(shape)
            begin = end
        return views


def n_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def pinned(cp: Any, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Pinned memory of the host: the device reads and writes it while the host does something else."""
    size = n_bytes(dtype, shape)
    memory = np.frombuffer(cp.cuda.alloc_pinned_memory(size), np.uint8, size)
    return memory.view(np.dtype(dtype)).reshape(shape)


class HostMemory:
    """Pinned memory that a step in flight copies from and to; nobody else's until the step is read."""

    def __init__(self, cp: Any, layout: StepLayout, page_tables_shape: tuple[int, ...]) -> None:
        self.fields = layout.fields
        self.page_tables = pinned(cp, "i4", page_tables_shape)  # (max_batch, max_pages)
        self.numbers = pinned(cp, "u1", (layout.n_bytes,))
        self.views = layout.views(self.numbers)
        self.choices = pinned(cp, "i4", (len(self.views["wanted"]), CHOICE_WIDTH))  # what `pick` writes
        self.arrived = cp.cuda.Event(disable_timing=True)
        self.n_choices: list[int] = []  # of each span that wants any
        self.n_top: list[int] = []  # n_top_logprobs of each wanted row; -1: no logprobs

    def fill(self, **lists: Sequence[Any]) -> None:
        """Write the values of fields, and padding behind them."""
        for name, values in lists.items():
            view, padding = self.views[name], self.fields[name][2]
            view[len(values) :] = padding
            if values:
                view[: len(values)] = values

    def expect_choices(self, step: "list[PlacedSpan]") -> None:
        """Remember how the choices that will come are shared out to spans, and which have logprobs."""
        self.n_choices = [len(placed.contexts) for placed in step if placed.contexts]
        self.n_top = []
        for placed in step:
            for context in placed.contexts:
                n_top = context.sampling.n_top_logprobs
                self.n_top.append(-1 if n_top is None else n_top)

    def read_choices(self) -> Iterator[list[Choice]]:
        """The choices that have arrived, of each span that wants any."""
        token_ids = self.choices[:, 0].tolist()
        logprobs = self.choices.view(np.float32)
        first = 0
        for n in self.n_choices:
            of_span = []
            for i in range(first, first + n):
                if self.n_top[i] < 0:
                    of_span.append(Choice(token_ids[i]))
                else:
                    of_span.append(self._with_logprobs(i, logprobs[i]))
            yield of_span
            first += n

    def _with_logprobs(self, i: int, logprobs: NDArray[np.float32]) -> Choice:
        """Row i of `choices`; logprobs: the same row as float32."""
        row, n = self.choices[i], self.n_top[i]
        top_ids = row[2 : 2 + n].tolist()
        top_logprobs = logprobs[2 + MAX_TOP : 2 + MAX_TOP + n].tolist()
        return Choice(int(row[0]), float(logprobs[1]), tuple(zip(top_ids, top_logprobs, strict=True)))


class StepMemory(NamedTuple):
    """Where the numbers of steps of one size lie: on the device, and on the host for those in flight."""

    layout: StepLayout
    numbers: DeviceArray  # (layout.n_bytes,) uint8
    views: dict[str, DeviceArray]
    free: list[HostMemory]  # those that no step in flight uses


StepsInFlight = list[tuple[StepMemory, HostMemory]]  # the parts of a step that was launched and not yet read


def bucket(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << (n - 1).bit_length()


def buckets(n: int) -> list[int]:
    """1, 2, 4, ... up to bucket(n)."""
    return [1 << i for i in range(bucket(n).bit_length())]


# ---- a step ------------------------------------------------------------------------------------------------


class DeviceStep(NamedTuple):
    """How much there is of what in a step; the numbers themselves lie in `views`."""

    views: dict[str, DeviceArray]
    n_rows: int
    n_wanted: int
    n_split_tiles: int  # the first tiles, whose splits are shared out to blocks
    n_whole_tiles: int  # the tiles behind them, which a block takes as a whole
    n_splits: int  # of the longest sequence among the former
    is_decode: bool  # is each span one tile of the former? Then `attend` writes the keys on the way
    comes_again: bool  # one of the few sizes that steps have again and again: worth a CUDA graph

    @property
    def sizes(self) -> tuple[int, ...]:
        """A CUDA graph of one step serves for every other with the same."""
        return self[1:]


class PlacedSpan(NamedTuple):
    """A span, its rows in the step, and what the choices at the last of them depend on."""

    span: Span
    contexts: Sequence[Context]
    rows: range


def place_spans(spans: Sequence[Span], contexts: Sequence[Context]) -> list[PlacedSpan]:
    """Spans in their order; the rows of prefill chunks come behind all others."""
    next_row = 0
    next_chunk_row = sum(n_rows(span) for span in spans if not span.is_chunk)
    n_contexts = 0
    step = []
    for span in spans:
        if span.is_chunk:
            rows = range(next_chunk_row, next_chunk_row + n_rows(span))
            next_chunk_row = rows.stop
        else:
            rows = range(next_row, next_row + n_rows(span))
            next_row = rows.stop
        step.append(PlacedSpan(span, contexts[n_contexts : n_contexts + span.n_wanted], rows))
        n_contexts += span.n_wanted
    return step


def n_rows(span: Span) -> int:
    if span.token_ids is None:
        return 1
    return len(span.token_ids)


def row_fields(step: list[PlacedSpan]) -> dict[str, list[int]]:
    """The fields that each row has, in the order of the rows."""
    tokens, slots, positions = list[int](), list[int](), list[int]()
    for span, _, rows in sorted(step, key=lambda placed: placed.rows.start):
        tokens += [-1] if span.token_ids is None else span.token_ids
        slots += [span.slot] * len(rows)
        positions += range(span.start, span.end)
    return {"tokens": tokens, "slots": slots, "positions": positions}


class KernelSampling(NamedTuple):
    """A Sampling as `pick` reads it: what stays the same from step to step."""

    flags: int
    top_k: int
    n_top: int
    settings: tuple[float, ...]  # SETTINGS_WIDTH
    seed: int


def kernel_sampling(s: Sampling) -> KernelSampling:
    penalties = s.presence_penalty, s.frequency_penalty, s.repetition_penalty
    flags = 0
    if penalties != (0, 0, 1):
        flags |= PENALISED
    if s.logit_bias:
        flags |= BIASED
    n_top = -1
    if s.n_top_logprobs is not None:
        n_top = min(s.n_top_logprobs, MAX_TOP)
    sharpness = 0.0  # greedy
    if s.temperature:
        sharpness = min(1 / (s.temperature * math.log(2)), 1e30)  # of 2^x, not e^x
    settings = sharpness, s.top_p, s.min_p, *penalties
    return KernelSampling(flags, min(s.top_k, 1 << 30), n_top, settings, s.seed & 0xFFFF_FFFF_FFFF_FFFF)


def pick_fields(step: list[PlacedSpan], samplings: list[KernelSampling]) -> dict[str, list[Any]]:
    """The fields that each wanted row has, in the order of the contexts. `samplings`: of the slots."""
    wanted, pick_rows, settings, seeds = list[int](), list[Any](), list[Any](), list[Any]()
    for span, contexts, rows in step:
        sampling = samplings[span.slot]
        first = rows.stop - len(contexts)  # the first wanted row; drafts follow it
        for i, context in enumerate(contexts):
            flags = sampling.flags
            if context.mask is not None:
                flags |= MASKED
            if len(contexts) == 1:
                flags |= CHAINS
            wanted.append(first + i)
            pick_rows.append((span.slot, first, i, sampling.top_k, flags, sampling.n_top))
            settings.append(sampling.settings)
            seeds.append((sampling.seed, context.sampling.choice, context.n_output))
    return {"wanted": wanted, "pick_rows": pick_rows, "settings": settings, "seeds": seeds}
