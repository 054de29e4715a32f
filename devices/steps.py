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
    QUERIES,
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
        self.flat_views = {name: view.reshape(-1) for name, view in self.views.items()}
        self.choices = pinned(cp, "i4", (len(self.views["wanted"]), CHOICE_WIDTH))  # what `pick` writes
        self.arrived = cp.cuda.Event(disable_timing=True)
        self.n_choices: list[int] = []  # of each span that wants any
        self.n_top: list[int] = []  # n_top_logprobs of each wanted row; -1: no logprobs

    def fill(self, fields: "dict[str, Sequence[int] | NDArray[Any]]") -> None:
        """Write the values of fields, row after row, and padding behind them."""
        for name, values in fields.items():
            flat = self.flat_views[name]
            n = len(values)
            flat[:n] = values
            if n < len(flat):
                flat[n:] = self.fields[name][2]

    def advance(self, before: "HostMemory", n: int) -> None:
        """Write the numbers of the step after one of n rows: a token later, which the host has not read."""
        self.numbers[:] = before.numbers
        views = self.views
        views["tokens"][:n] = UNREAD
        views["positions"][:n] += 1
        views["tiles"][:n, 1] += 1  # `start`, as Tile in kernels.cu reads it
        views["seeds"][:n, 2] += np.uint64(1)
        self.n_choices = before.n_choices
        self.n_top = before.n_top

    def expect_choices(self, step: "PlacedStep") -> None:
        """Remember how the choices that will come are shared out to spans, and which have logprobs."""
        self.n_choices = [span.n_wanted for span in step.spans if span.n_wanted]
        self.n_top = []
        for context in step.contexts:
            n_top = context.sampling.n_top_logprobs
            self.n_top.append(-1 if n_top is None else n_top)

    def read_choices(self) -> Iterator[list[Choice]]:
        """The choices that have arrived, of each span that wants any."""
        token_ids = self.choices[: len(self.n_top), 0].tolist()
        choices = list(map(Choice, token_ids))
        logprobs = self.choices.view(np.float32)
        for i, n_top in enumerate(self.n_top):
            if n_top >= 0:
                choices[i] = self._with_logprobs(i, logprobs[i])
        first = 0
        for n in self.n_choices:
            yield choices[first : first + n]
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


class PlacedStep(NamedTuple):
    """The spans of a step, and which of its rows are theirs."""

    spans: Sequence[Span]
    contexts: Sequence[Context]  # of each wanted row, in the order of the spans
    sizes: list[int]  # rows of each span
    first_rows: list[int]  # of each span

    @property
    def n_rows(self) -> int:
        return sum(self.sizes)


def place_spans(spans: Sequence[Span], contexts: Sequence[Context]) -> PlacedStep:
    """Give the spans their rows, in their order; those of prompts come after all others."""
    sizes = [n_rows(span) for span in spans]
    next_row = 0
    next_chunk_row = sum(size for span, size in zip(spans, sizes, strict=True) if not is_prompt(span))
    first_rows = []
    for span, size in zip(spans, sizes, strict=True):
        if is_prompt(span):
            first_rows.append(next_chunk_row)
            next_chunk_row += size
        else:
            first_rows.append(next_row)
            next_row += size
    return PlacedStep(spans, contexts, sizes, first_rows)


def n_rows(span: Span) -> int:
    if span.token_ids is None:
        return 1
    return len(span.token_ids)


def is_prompt(span: Span) -> bool:
    """True for a chunk of a prompt: of the newest token and its drafts every row is wanted."""
    return n_rows(span) > span.n_wanted


UNREAD = (-1,)  # in place of the token that the slot chose last, which the host has not read


def row_fields(step: PlacedStep) -> dict[str, list[int]]:
    """The fields that each row has, in the order of the rows."""
    tokens, slots, positions = list[int](), list[int](), list[int]()
    for i in sorted(range(len(step.spans)), key=step.first_rows.__getitem__):
        span, size = step.spans[i], step.sizes[i]
        tokens += UNREAD if span.token_ids is None else span.token_ids
        slots += (span.slot,) * size
        positions += range(span.start, span.start + size)
    return {"tokens": tokens, "slots": slots, "positions": positions}


class StepTiles(NamedTuple):
    """The tiles of a step (kernels.cu): each has QUERIES queries of a span to one key head."""

    split: list[int]  # with split attention, TILE_WIDTH numbers each
    whole: list[int]  # those that a block takes as a whole: of prefill chunks
    n_split_spans: int
    longest: int  # tokens of the longest sequence among the split ones

    @property
    def n_split(self) -> int:
        return len(self.split) // TILE_WIDTH

    @property
    def n_whole(self) -> int:
        return len(self.whole) // TILE_WIDTH


def step_tiles(step: PlacedStep, group_size: int, max_split_rows: int) -> StepTiles:
    split, whole = list[int](), list[int]()
    n_split_spans = 0
    longest = 1
    for span, size, first_row in zip(step.spans, step.sizes, step.first_rows, strict=True):
        tiles = split
        if is_prompt(span) or first_row + size > max_split_rows:
            tiles = whole
        else:
            n_split_spans += 1
            longest = max(longest, span.start + size)
        for first_query in range(0, size * group_size, QUERIES):
            tiles += (first_row, span.start, size, first_query, span.slot)
    return StepTiles(split, whole, n_split_spans, longest)


class SlotSamplings:
    """What `pick` has to know of the Sampling of each slot: rows that a step takes, and changes a little.

    The columns are those of PickRow, Settings and `seeds` in kernels.cu.
    """

    def __init__(self, max_batch: int) -> None:
        self.samplings: list[Sampling | None] = [None] * max_batch  # None: the slot has had none
        self.flags = [0] * max_batch
        self.pick_rows = np.zeros((max_batch, PICK_ROW_WIDTH), np.int32)
        self.settings = np.zeros((max_batch, SETTINGS_WIDTH), np.float32)
        self.seeds = np.zeros((max_batch, SEEDS_WIDTH), np.uint64)

    def update(self, slot: int, s: Sampling) -> None:
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
        self.samplings[slot] = s
        self.flags[slot] = flags
        self.pick_rows[slot] = slot, 0, 0, min(s.top_k, 1 << 30), flags, n_top
        self.settings[slot] = sharpness, s.top_p, s.min_p, *penalties
        self.seeds[slot] = s.seed & 0xFFFF_FFFF_FFFF_FFFF, s.choice, 0


def pick_fields(step: PlacedStep, samplings: SlotSamplings) -> dict[str, Any]:
    """The fields that each wanted row has, in the order of the contexts."""
    wanted = list[int]()
    slots = list[int]()
    first_wanted = list[int]()
    n_before = list[int]()
    flags = list[int]()
    for span, size, first_row in zip(step.spans, step.sizes, step.first_rows, strict=True):
        n = span.n_wanted
        first = first_row + size - n  # drafts follow it
        of_slot = samplings.flags[span.slot]
        if n == 1:
            of_slot |= CHAINS
        wanted += range(first, first + n)
        slots += (span.slot,) * n
        first_wanted += (first,) * n
        n_before += range(n)
        flags += (of_slot,) * n
    for i, context in enumerate(step.contexts):
        if context.mask is not None:
            flags[i] |= MASKED
    slot_array = np.array(slots, np.int64)
    pick_rows = samplings.pick_rows.take(slot_array, 0)
    pick_rows[:, 1] = first_wanted
    pick_rows[:, 2] = n_before
    pick_rows[:, 4] = flags
    seeds = samplings.seeds.take(slot_array, 0)
    seeds[:, 2] = [context.n_output for context in step.contexts]
    return {
        "wanted": wanted,
        "pick_rows": pick_rows.reshape(-1),
        "settings": samplings.settings.take(slot_array, 0).reshape(-1),
        "seeds": seeds.reshape(-1),
    }
