"""A step's numbers on a GPU: rows, positions, pages and settings, in memory that a CUDA graph can reuse.

    Spans, Contexts --placed(), rows_of(), wanted_of()--> HostMemory --one copy--> the device

Authority: the structures of kernels.cu, by name.

Rules of this file:
1. All numbers of a step lie in one piece of memory: one copy brings them to the device.
2. What a step in flight copies from, nobody else writes until the step is read.

Not here: the ops (cuda.py), which rows come next (scheduler.py).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.kernels import CHOICE, MAX_TOP, DeviceArray
from model import Span
from sampling import Choice, Context, Sampling

# ---- A step's numbers --------------------------------------------------------------------------------------

PENALISED, BIASED, MASKED, CHAINS = 1, 2, 4, 8  # kernels.cu's Flags


class Table:
    """The numbers of a step, in one piece of memory, so that one copy brings them to the device."""

    def __init__(self, n_rows: int, n_wanted: int, n_tiles: int) -> None:
        #  name        dtype, shape, padding: no row, no tile, not wanted
        self.fields: dict[str, tuple[str, tuple[int, ...], int]] = {
            "seeds": ("u8", (n_wanted, 3), 0),  # seed, choice, number
            "tokens": ("i4", (n_rows,), 0),  # -1: what the slot has chosen
            "slots": ("i4", (n_rows,), 0),
            "positions": ("i4", (n_rows,), -1),
            "tiles": ("i4", (n_tiles, 5), 0),
            "wanted": ("i4", (n_wanted,), 0),  # rows
            "picked": ("i4", (n_wanted, 6), -1),  # kernels.cu's Picked
            "settings": ("f4", (n_wanted, 6), 0),  # kernels.cu's Settings
        }
        self.n_bytes = sum(n_bytes(dtype, shape) for dtype, shape, _ in self.fields.values())

    def views(self, memory: Any) -> dict[str, Any]:
        """The fields as arrays, in memory (n_bytes,) uint8 of the host or the device."""
        views, begin = {}, 0
        for name, (dtype, shape, _) in self.fields.items():
            end = begin + n_bytes(dtype, shape)
            views[name] = memory[begin:end].view(np.dtype(dtype)).reshape(shape)
            begin = end
        return views


def n_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


class HostMemory:
    """Memory of the host that a step in flight copies from and to; nobody else's until it is read."""

    def __init__(self, cp: Any, table: Table, pages: tuple[int, ...]) -> None:
        """pages: the shape of the tables of all slots."""
        self.fields = table.fields
        self.pages = pinned(cp, n_bytes("i4", pages)).view(np.int32).reshape(pages)
        self.numbers = pinned(cp, table.n_bytes)
        self.views = table.views(self.numbers)
        shape = len(self.views["wanted"]), CHOICE
        self.choices = pinned(cp, n_bytes("i4", shape)).view(np.int32).reshape(shape)  # kernels.cu's `pick`
        self.arrived = cp.cuda.Event(disable_timing=True)
        self.n_choices: list[int] = []  # of each span that wants any
        self.n_top: list[int] = []  # of each wanted row; -1: no logprobs

    def fill(self, **lists: Sequence[Any]) -> None:
        """The table's fields: what there is, then padding."""
        for name, values in lists.items():
            view, padding = self.views[name], self.fields[name][2]
            view[len(values) :] = padding
            if values:
                view[: len(values)] = values

    def expect(self, step: "list[Placed]") -> None:
        """Remember how the choices that will come are shared out to spans, and what belongs to each."""
        contexts = [context for p in step for context in p.contexts]
        self.n_choices = [len(p.contexts) for p in step if p.contexts]
        self.n_top = [
            -1 if c.sampling.n_top_logprobs is None else c.sampling.n_top_logprobs for c in contexts
        ]

    def read(self) -> Iterator[list[Choice]]:
        """What has arrived, of each span that wants any."""
        token_ids, logprobs = self.choices[:, 0].tolist(), self.choices.view(np.float32)
        first = 0
        for n in self.n_choices:
            rows = range(first, first + n)
            yield [
                Choice(token_ids[i]) if self.n_top[i] < 0 else self._with_logprobs(i, logprobs[i])
                for i in rows
            ]
            first += n

    def _with_logprobs(self, i: int, logprobs: NDArray[np.float32]) -> Choice:
        row, n = self.choices[i], self.n_top[i]
        top = zip(row[2 : 2 + n].tolist(), logprobs[2 + MAX_TOP :].tolist(), strict=False)
        return Choice(int(row[0]), float(logprobs[1]), tuple(top))


def pinned(cp: Any, n: int) -> NDArray[np.uint8]:
    """Memory of the host that the device reads and writes by itself."""
    return np.frombuffer(cp.cuda.alloc_pinned_memory(n), np.uint8, n)


class StepMemory(NamedTuple):
    """Where the numbers of steps of one size lie: on the device, and on the host for those in flight."""

    table: Table
    numbers: DeviceArray  # (table.n_bytes,) uint8
    views: dict[str, DeviceArray]
    free: list[HostMemory]  # those that no step uses


class DeviceStep(NamedTuple):
    """How much there is of what in a step; the numbers themselves lie in `views`."""

    views: dict[str, DeviceArray]
    n_rows: int
    n_wanted: int
    n_split: int  # tiles, the first ones, whose pieces are shared out to blocks
    n_whole: int  # tiles behind them that a block takes as a whole
    n_pieces: int  # of the longest sequence among the former
    is_decode: bool  # is each span a tile of the former? Then keys are written on the way


class Placed(NamedTuple):
    """A span, its rows in the step, and what the choices at the last of them depend on."""

    span: Span
    contexts: Sequence[Context]
    rows: range


def placed(spans: Sequence[Span], contexts: Sequence[Context]) -> list[Placed]:
    """In the order of the spans; the rows of prompts come behind all others."""
    first = {False: 0, True: sum(n_rows(span) for span in spans if not span.is_chunk)}
    found, i = list[Placed](), 0
    for span in spans:
        begin, n_wanted = first[span.is_chunk], span.n_wanted
        first[span.is_chunk] = end = begin + n_rows(span)
        found.append(Placed(span, contexts[i : i + n_wanted], range(begin, end)))
        i += n_wanted
    return found


def n_rows(span: Span) -> int:
    return 1 if span.token_ids is None else len(span.token_ids)


def rows_of(step: list[Placed]) -> dict[str, list[Any]]:
    """What the table holds of each row, in the order of the rows."""
    in_order = sorted(step, key=lambda p: p.rows.start)
    return {
        "tokens": [t for p in in_order for t in ([-1] if p.span.token_ids is None else p.span.token_ids)],
        "slots": [p.span.slot for p in in_order for _ in p.rows],
        "positions": [position for p in in_order for position in range(p.span.start, p.span.end)],
    }


class Rules(NamedTuple):
    """What kernels.cu knows of a Sampling: it stays the same from step to step."""

    flags: int
    top_k: int
    n_top: int
    settings: tuple[float, ...]
    seed: int


def rules_of(s: Sampling) -> Rules:
    penalties = s.presence_penalty, s.frequency_penalty, s.repetition_penalty
    flags = PENALISED * (penalties != (0, 0, 1)) | BIASED * bool(s.logit_bias)
    n_top = -1 if s.n_top_logprobs is None else min(s.n_top_logprobs, MAX_TOP)
    sharpness = min(1 / (s.temperature * math.log(2)), 1e30) if s.temperature else 0  # of 2^x, not e^x
    settings = sharpness, s.top_p, s.min_p, *penalties
    return Rules(flags, min(s.top_k, 1 << 30), n_top, settings, s.seed & 0xFFFF_FFFF_FFFF_FFFF)


def wanted_of(step: list[Placed], rules: list[Rules]) -> dict[str, list[Any]]:
    """What the table holds of each wanted row, in the order of the contexts. `rules`: of the slots."""
    rows, picked, settings, seeds = list[int](), [], [], []
    for span, contexts, span_rows in step:
        first, rule = span_rows.stop - len(contexts), rules[span.slot]  # of them; behind it come the drafts
        for i, context in enumerate(contexts):
            flags = rule.flags | MASKED * (context.mask is not None) | CHAINS * (len(contexts) == 1)
            rows.append(first + i)
            picked.append((span.slot, first, i, rule.top_k, flags, rule.n_top))
            settings.append(rule.settings)
            seeds.append((rule.seed, context.sampling.choice, context.n_output))
    return {"wanted": rows, "picked": picked, "settings": settings, "seeds": seeds}


Ticket = list[tuple[StepMemory, HostMemory]]


def buckets(n: int) -> list[int]:
    """1, 2, 4, ... up to the first that is n or more."""
    return [1 << i for i in range((n - 1).bit_length() + 1)]


def bucket(n: int) -> int:
    return buckets(n)[-1]
