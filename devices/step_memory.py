"""A step's numbers on a GPU: rows, positions, tiles and sampling, in memory that a CUDA graph can reuse.

    Spans, Contexts --step_fields(), step_tiles()--> HostMemory --one copy--> the device

Authority: the arguments of kernels.cu, by name.

Rules of this file:
1. All numbers of a step lie in one piece of memory: one copy brings them to the device.
2. The host's side is pinned memory, which the device reads by itself. We do not write to the source of a
   copy while its step is in flight.
3. Steps of decoding are padded to a few sizes (buckets), each with memory of its own: a CUDA graph has the
   addresses of its size. Steps of whole prefill chunks have few sizes by themselves.
4. The step after one of decoding often has the same rows, one token later. The device makes its numbers
   itself (`pick`, ADVANCES), so nothing is copied.

Not here: the ops (cuda.py), which rows come next (scheduler.py).
"""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from devices.kernels import (
    ADVANCES,
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
    Named,
)
from model import Span
from sampling import NO_TOKEN, Choice, Context

Spans = Sequence[Span]
Contexts = Sequence[Context]  # one for each wanted row, in the order of the rows

# ---- memory ------------------------------------------------------------------------------------------------


PADDING = {"positions": -1, "pick_rows": -1}  # values that mean no row; of other fields 0


def step_layout(n_rows: int, n_wanted: int, n_tiles: int) -> "np.dtype[Any]":
    """The fields of a step, one after another in one piece of memory."""
    # fmt: off
    return np.dtype([
        ("seeds",     "u8", (n_wanted, SEEDS_WIDTH)),  # seed; choice; number of the output token
        ("tokens",    "i4", (n_rows,)),  # -1: the token that the slot chose last
        ("slots",     "i4", (n_rows,)),
        ("positions", "i4", (n_rows,)),  # -1: the row only pads the step
        ("tiles",     "i4", (n_tiles, TILE_WIDTH)),  # struct Tile of kernels.cu
        ("wanted",    "i4", (n_wanted,)),  # rows whose logits are wanted
        ("pick_rows", "i4", (n_wanted, PICK_ROW_WIDTH)),  # struct PickRow
        ("settings",  "f4", (n_wanted, SETTINGS_WIDTH)),  # struct Settings
    ])
    # fmt: on


def views(layout: Any, memory: Any) -> Named:
    """The fields as arrays, in memory (bytes,) uint8 of the host or the device."""
    arrays = {}
    for name, (field, begin, *_) in layout.fields.items():
        arrays[name] = memory[begin : begin + field.itemsize].view(field.base).reshape(field.shape)
    return arrays


class HostMemory:
    """Pinned memory that a step in flight copies from and to, and no other until the step is read."""

    def __init__(self, cp: Any, memory: "StepMemory", page_tables_shape: tuple[int, ...]) -> None:
        self.free = memory.free  # the list that it returns to when the step is read
        layout = np.dtype([
            ("numbers", "u1", (memory.layout.itemsize,)),
            ("page_tables", "i4", page_tables_shape),  # (max_batch, max_pages)
            ("choices", "i4", (len(memory.views["wanted"]), CHOICE_WIDTH)),  # the output of `pick`
        ])  # fmt: skip
        pinned = np.frombuffer(cp.cuda.alloc_pinned_memory(layout.itemsize), np.uint8, layout.itemsize)
        self.numbers, self.page_tables, self.choices = views(layout, pinned).values()
        self.views = views(memory.layout, self.numbers)
        self.arrived = cp.cuda.Event(disable_timing=True)
        self.contexts: Contexts = ()  # one for each choice that comes

    def fill(self, fields: Named) -> None:
        """Write the values of fields, row after row, and padding after them."""
        for name, rows in fields.items():
            flat = self.views[name].reshape(-1)
            values = np.ravel(rows)
            flat[: len(values)] = values
            flat[len(values) :] = PADDING.get(name, 0)


class StepMemory(NamedTuple):
    """The memory for steps of one size: on the device, and on the host for each step in flight."""

    layout: "np.dtype[Any]"
    numbers: DeviceArray  # (layout.itemsize,) uint8
    views: dict[str, DeviceArray]
    free: list[HostMemory]  # not used by a step in flight


def bucket(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << (n - 1).bit_length()


def read_choices(rows: Any, contexts: Contexts) -> list[Choice]:
    """Choices of rows (n, CHOICE_WIDTH) int32: token, its logprob, the likeliest tokens, their logprobs."""
    choices = list(map(Choice, rows[: len(contexts), 0].tolist()))
    for i, context in enumerate(contexts):
        n = context.sampling.n_top_logprobs
        if n is not None and choices[i].token_id != NO_TOKEN:
            row = rows[i]
            logprobs = row.view(np.float32)
            top = zip(row[2 : 2 + n].tolist(), logprobs[2 + MAX_TOP :].tolist(), strict=False)
            choices[i] = Choice(int(row[0]), float(logprobs[1]), tuple(top))
    return choices


# ---- a step ------------------------------------------------------------------------------------------------


class DeviceStep(NamedTuple):
    """The sizes of a step; the numbers themselves lie in `views`."""

    views: dict[str, DeviceArray]
    n_rows: int
    n_wanted: int
    n_split_tiles: int  # the first tiles, whose splits are shared out to blocks
    n_whole_tiles: int  # the tiles after them, which a block takes as a whole
    n_splits: int  # splits of the longest sequence in the first tiles
    is_decode: bool  # is each span one tile of the former? Then `attend` writes the keys on the way
    comes_again: bool  # one of the few sizes that steps have again and again: worth a CUDA graph


def is_prompt(span: Span) -> bool:
    """True for a chunk of a prompt: of the newest token and its drafts every row is wanted."""
    return span.n_rows > span.n_wanted


# Of a step (kernels.cu): each has QUERIES queries of a span to one key head. TILE_WIDTH numbers each
Tiles = list[tuple[int, ...]]


def n_splits(span: Span, split_keys: int) -> int:
    """The splits that a span has places for; so many that most steps after it have as many."""
    return bucket(-(-span.end // split_keys))


def follow(spans: Spans, before: Spans, split_keys: int) -> bool:
    """True if each span is chained to the one before in its place, and has as many splits."""
    chained = [(span.slot, span.start, span.token_ids, n_splits(span, split_keys)) for span in spans]
    return chained == [(span.slot, span.end, None, n_splits(span, split_keys)) for span in before]


def step_tiles(spans: Spans, of: Named, max_parts: int) -> tuple[Tiles, Tiles, int]:
    """Return the tiles with split attention, those that a block takes as a whole, and a number of splits.

    Tiles of prefill chunks are many, and taken as a whole; so are others for which `part` has no room. The
    number is that of the longest sequence among the split ones, as n_splits() rounds it.
    """
    split, whole = Tiles(), Tiles()
    first_row = n_parts = 0
    most_splits = 1
    for span in spans:
        size, n = span.n_rows, n_splits(span, of["SPLIT_KEYS"])
        tiles = whole
        first_part = n_parts
        if not is_prompt(span) and n_parts + size * n <= max_parts:
            tiles = split
            n_parts += size * n
            most_splits = max(most_splits, n)
        for first_query in range(0, size * of["GROUP"], QUERIES):
            tiles.append((first_row, span.start, size, first_query, span.slot, first_part))
        first_row += size
    return split, whole, most_splits


def flags_of(context: Context) -> int:
    """What a token's choice needs more than the logits for."""
    s = context.sampling
    is_penalised = (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) != (0, 0, 1)
    return PENALISED * is_penalised | BIASED * bool(s.logit_bias) | MASKED * (context.mask is not None)


UNREAD = (-1,)  # in place of the token that the slot chose last, which the host has not read
OF_WANTED = "wanted", "pick_rows", "settings", "seeds"  # fields that each wanted row has


def step_fields(spans: Spans, contexts: Contexts, advances: bool) -> Named:
    """The fields of step_layout(), but for tiles.

    The columns are those of PickRow, Settings and `seeds` in kernels.cu. `advances`: `pick` makes the numbers
    of the next step, in which each row is one token later.
    """
    tokens, slots, positions, picked = list[int](), list[int](), list[int](), list[Any]()
    of_row = iter(contexts)
    for span in spans:
        tokens += UNREAD if span.token_ids is None else span.token_ids
        slots += (span.slot,) * span.n_rows
        positions += range(span.start, span.end)
        first = len(tokens) - span.n_wanted  # drafts follow it
        for n_before, context in enumerate(islice(of_row, span.n_wanted)):
            s = context.sampling
            flags = flags_of(context) | CHAINS * (span.n_wanted == 1) | ADVANCES * advances
            n_top = -1 if s.n_top_logprobs is None else s.n_top_logprobs
            sharpness = 0.0  # greedy
            if s.temperature:
                sharpness = min(1 / (s.temperature * math.log(2)), 1e30)  # of 2^x, not e^x
            penalties = s.presence_penalty, s.frequency_penalty, s.repetition_penalty
            pick_row = span.slot, first, n_before, min(s.top_k, 1 << 30), flags, n_top
            seeds = s.seed & 0xFFFF_FFFF_FFFF_FFFF, s.choice, context.n_output
            picked.append((first + n_before, pick_row, (sharpness, s.top_p, s.min_p, *penalties), seeds))
    of_rows = {"tokens": tokens, "slots": slots, "positions": positions}
    return of_rows | dict(zip(OF_WANTED, zip(*picked, strict=True), strict=False))
