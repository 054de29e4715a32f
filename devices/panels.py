"""Weights as the kernels of a CPU read them: panels of WIDTH outputs side by side, in the format of the file.

    matrix, or blocks of a file --pack()--> Panels, which microkernel.py reads from front to back

Most checkpoints hold bfloat16, the upper half of a float32; blocks of 8 or 4 bits with a scale are half and a
quarter of that. Decoding takes as long as these bytes take to come from memory.

Authority: the names and the blocks of the formats are GGUF's (checkpoint/gguf_blocks.py).

Rules of this file:
1. Packing floats loses no bit: a matrix is kept in the narrowest format that holds all its values. Only
   --weights rounds them (cpu.WEIGHTS), and a file of blocks is read as with_minima() leaves it.

Not here: reading files (checkpoint/weights.py), the loop of all products (microkernel.py).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkpoint.gguf_blocks import FLOATS, Blocks, decoded, kept, quantized, with_minima
from checkpoint.weights import Mxfp4, bfloat16, gguf_bytes, unpacked
from devices.microkernel import BLOCK, CACHE_LINE, WIDTH, X_DTYPE, X_WORDS
from model import Array, Ints, Numbers

ARENA = 2**26  # bytes of packed matrices that lie in one piece of memory
FIRST = {"F32": 4, "BF16": 4, "MXFP4": 1}  # bytes of a block's first unit, see sections(); of other formats 2
NIBBLES = ("Q4_1", "Q5_1", "MXFP4")  # formats whose blocks end with two numbers a byte


@dataclass(frozen=True)
class Panels:
    """A matrix (n_out, n_in) of one format, padded with zeros to whole panels.

    In a panel lie WIDTH outputs side by side, block of inputs after block, so that a kernel reads memory from
    front to back: words (n_panels, n_blocks) of records, whose one field has the name of the format.
    """

    n_out: int
    n_in: int
    format: str  # GGUF's name, a key of microkernel.FORMATS
    words: Numbers

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    @property
    def is_quantized(self) -> bool:
        return self.format not in FLOATS

    def inputs(self, n_rows: int, of_bfloat16: Any = X_DTYPE) -> Numbers:
        """Memory for rows of x in the form that the product takes: store_row() fills it.

        Bfloat16 can be multiplied by rows in float32 too, which `of_bfloat16` asks for.
        """
        n_blocks = self.words.shape[1]
        if self.is_quantized:
            return np.empty((n_rows, n_blocks, 2 * X_WORDS), np.int16)
        if self.format == "BF16":
            return np.empty((n_rows, 2 * n_blocks), of_bfloat16)
        return np.empty((n_rows, n_blocks), np.float32)

    def take(self, rows: Ints) -> Array:
        """Some rows of the matrix, (len(rows), n_in) float32."""
        data = np.empty((len(rows), self.words.shape[1], self.words.itemsize // WIDTH), np.uint8)
        for units, panels in sections(self.format, data, self.words):
            units[...] = swapped(self.format, panels[rows // WIDTH, :, :, rows % WIDTH])
        if self.is_quantized:
            return decoded(Blocks(self.format, data))
        numbers: Array = unpacked(data.reshape(len(rows), -1).view(FLOATS[self.format]))
        return numbers[:, : self.n_in]


def sections(name: str, data: Any, words: Any) -> Iterator[tuple[Numbers, Numbers]]:
    """The units of blocks in two parts, (n_out, n_blocks, units) and (n_panels, n_blocks, units, WIDTH).

    data (n_out, n_blocks, bytes of a block) uint8. The first unit is a scale, or a float, of BF16 a pair of
    these; the others are two bytes, or four of nibbles.
    """
    first, n_bytes = FIRST.get(name, 2), data.shape[2]
    middle = n_bytes - BLOCK // 2 * (name in NIBBLES)
    for begin, end, size in ((0, first, first), (first, middle, 2), (middle, n_bytes, 4)):
        panels = words[name][..., begin * WIDTH : end * WIDTH].view(f"u{size}")
        yield data[..., begin:end].view(f"u{size}"), panels.reshape(*words.shape, -1, WIDTH)


def swapped(name: str, units: Numbers) -> Numbers:
    """Let the second and the third of four bytes of nibbles change places, or change back: microkernel.py."""
    if name not in NIBBLES or units.itemsize < 4:
        return units
    return units & 0xFF0000FF | (units & 0xFF00) << 8 | units >> 8 & 0xFF00


class Arena:
    """Matrices side by side in large pieces of memory, which the system maps by huge pages.

    If each matrix of a few MB has memory of its own, a fifth of the time goes into translating addresses.
    """

    _unused = np.empty(0, np.uint8)

    def zeros(self, dtype: Any, *shape: int) -> Numbers:
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        n_taken = -(-n_bytes // CACHE_LINE) * CACHE_LINE
        if n_taken > len(self._unused):
            self._unused = np.zeros(max(n_taken, ARENA) + CACHE_LINE, np.uint8)
            self._unused = self._unused[-self._unused.ctypes.data % CACHE_LINE :]
        array: Numbers = self._unused[:n_bytes].view(dtype).reshape(shape)
        self._unused = self._unused[n_taken:]
        return array


arena = Arena()


def narrowest(w: Numbers) -> tuple[str, Numbers]:
    """The first format that holds every value, BF16, F16 or F32, and the numbers in it."""
    if w.dtype == np.uint16:
        return "BF16", w
    halves = w.view(np.uint16)  # the lower ones first: little-endian
    if not halves[..., ::2].any():
        return "BF16", halves[..., 1::2]
    with np.errstate(over="ignore"):
        float16 = w.astype(np.float16)
    if np.array_equal(float16, w):
        return "F16", float16
    return "F32", w


def pack_floats(w: Numbers) -> Panels:
    """Pack a matrix of float32, or of bfloat16 as uint16, in its exact format."""
    name, numbers = narrowest(w)
    if name == "BF16":
        numbers = np.pad(numbers, ((0, 0), (0, w.shape[1] % 2)))
    data = np.ascontiguousarray(numbers).view(np.uint8).reshape(len(w), -1, FIRST.get(name, 2))
    return pack_blocks(Blocks(name, data), w.shape[1])


def pack_blocks(w: Blocks, n_in: int = 0) -> Panels:
    """Pack blocks as they are, unit by unit. n_in: the inputs, if they do not fill the last block."""
    n_out, n_blocks, block_bytes = w.data.shape
    record = np.dtype([(w.format, np.uint8, (WIDTH * block_bytes,))])
    words = arena.zeros(record, math.ceil(n_out / WIDTH), n_blocks)
    for units, panels in sections(w.format, w.data, words):
        lanes = np.moveaxis(units, 0, -1)
        for panel, first in zip(panels, range(0, n_out, WIDTH), strict=True):
            some = lanes[..., first : first + WIDTH]
            panel[..., : some.shape[-1]] = some
            panel[...] = swapped(w.format, panel)
    return Panels(n_out, n_in or w.shape[1], w.format, words)


def pack(w: Numbers | list[Blocks] | Mxfp4, name: str | None = None) -> Any:
    """Return Panels of a matrix, or of blocks that stack to one, in the format of this name.

    Of the matrices of experts it is a list.

    Without a name floats and MXFP4 stay as exact as they are, and blocks as with_minima() leaves them; those
    of different formats that stack to one matrix become Q8_0.
    """
    if isinstance(w, Mxfp4):
        return [pack_blocks(Blocks("MXFP4", rows)) for rows in gguf_bytes(w)]
    if isinstance(w, list):
        formats = {kept(part.format) for part in w}
        if len(formats) == 1 and name in (None, *formats):
            data = np.concatenate([with_minima(part).data for part in w])
            return pack_blocks(Blocks(formats.pop(), data))
    elif w.ndim == 3:
        return [pack_floats(np.ascontiguousarray(matrix)) for matrix in w]
    elif name is None or name == narrowest(w)[0]:
        return pack_floats(w)
    numbers: Array = unpacked(w)
    if name == "BF16" or numbers.shape[1] % BLOCK:
        return pack_floats(bfloat16(numbers))
    return pack_blocks(quantized(numbers, name or "Q8_0"))
