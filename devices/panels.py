"""Weights as the kernels of a CPU read them: panels of WIDTH outputs side by side, in the format of the file.

    matrix, or blocks of a file --pack()--> Panels, which microkernel.py reads from front to back

Most checkpoints hold bfloat16, the upper half of a float32; blocks of 8 or 4 bits with a scale are half and a
quarter of that. Decoding takes as long as these bytes take to come from memory.

Authority: the names and the blocks of the formats are GGUF's (checkpoint/blocks.py).

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
from numpy.typing import DTypeLike, NDArray

from checkpoint.blocks import Blocks, decoded, kept, quantized, with_minima
from checkpoint.weights import Mxfp4, bfloat16, gguf_bytes, unpacked
from devices.microkernel import BLOCK, CACHE_LINE, WIDTH, X_DTYPE, X_WORDS
from model import Array, Ints

ARENA = 2**26  # bytes of packed matrices that lie in one piece of memory
DTYPES: dict[str, DTypeLike] = {"BF16": np.uint16, "F16": np.int16, "F32": np.float32}  # of floats, by format


@dataclass(frozen=True)
class Panels:
    """A matrix (n_out, n_in) of one format, padded with zeros to whole panels.

    In a panel lie WIDTH outputs side by side, block of inputs after block, so that a kernel reads memory from
    front to back: words (n_panels, n_blocks) of records for blocks, (n_panels, n_blocks, WIDTH, inputs of a
    block) for floats.
    """

    n_out: int
    n_in: int
    format: str  # GGUF's name, a key of microkernel.FORMATS
    words: NDArray[Any]

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    @property
    def is_quantized(self) -> bool:
        return self.format not in DTYPES

    def inputs(self, n_rows: int, of_bfloat16: Any = None) -> NDArray[Any]:
        """Memory for rows of x in the form that the product takes: store_row() fills it.

        Bfloat16 can be multiplied by rows in float32 too, which `of_bfloat16` asks for.
        """
        n_blocks = self.words.shape[1]
        if self.is_quantized:
            return np.empty((n_rows, n_blocks, 2 * X_WORDS), np.int16)
        n_in = n_blocks * self.words.shape[3]
        dtype: Any = np.float32
        if self.format == "BF16":
            dtype = of_bfloat16 or X_DTYPE
        return np.empty((n_rows, n_in), dtype)

    def take(self, rows: Ints) -> Array:
        """Some rows of the matrix, (len(rows), n_in) float32."""
        panel, lane = rows // WIDTH, rows % WIDTH
        if self.is_quantized:
            data = np.empty((len(rows), self.words.shape[1], self.words.itemsize // WIDTH), np.uint8)
            for units, panels in sections(self.format, data, self.words):
                units[...] = panels[panel, :, :, lane]
            return decoded(Blocks(self.format, data))
        values = self.words[panel, :, lane].reshape(len(rows), -1)[:, : self.n_in]
        if self.format == "F16":
            values = values.view(np.float16)
        x: Array = unpacked(values).astype(np.float32)
        return x


def sections(name: str, data: Any, words: Any) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """The units of blocks in two parts, (n_out, n_blocks, units) and (n_panels, n_blocks, units, WIDTH).

    data (n_out, n_blocks, bytes of a block) uint8. A unit is two bytes; but the scale of MXFP4, which comes
    first, is a single byte.
    """
    n_single = int(name == "MXFP4")
    n_pairs = data.shape[2] // 2
    of_one = np.dtype([("single", "u1", (n_single,)), ("pairs", "u2", (n_pairs,))])
    of_panel = np.dtype([("single", "u1", (n_single, WIDTH)), ("pairs", "u2", (n_pairs, WIDTH))])
    for part in ("single", "pairs"):
        yield data.view(of_one)[..., 0][part], words.view(of_panel)[part]


class Arena:
    """Matrices side by side in large pieces of memory, which the system maps by huge pages.

    If each matrix of a few MB has memory of its own, a fifth of the time goes into translating addresses.
    """

    def __init__(self) -> None:
        self._unused = np.empty(0, np.uint8)

    def zeros(self, dtype: Any, *shape: int) -> NDArray[Any]:
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        n_taken = -(-n_bytes // CACHE_LINE) * CACHE_LINE
        if n_taken > len(self._unused):
            self._unused = np.zeros(max(n_taken, ARENA) + CACHE_LINE, np.uint8)
            self._unused = self._unused[-self._unused.ctypes.data % CACHE_LINE :]
        array: NDArray[Any] = self._unused[:n_bytes].view(dtype).reshape(shape)
        self._unused = self._unused[n_taken:]
        return array


arena = Arena()


def narrowest(w: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """The first format that holds every value, BF16, F16 or F32, and the numbers in it."""
    if w.dtype == np.uint16:
        return "BF16", w
    halves = w.view(np.uint16)  # the lower ones first: little-endian
    if not halves[..., ::2].any():
        return "BF16", halves[..., 1::2]
    with np.errstate(over="ignore"):
        float16 = w.astype(np.float16)
    if np.array_equal(float16, w):
        return "F16", float16.view(np.int16)
    return "F32", w


def fill(panels: NDArray[Any], rows: NDArray[Any]) -> None:
    """Put rows side by side, WIDTH rows in a panel. panels (n_panels, ..., WIDTH), rows (n_out, ...)"""
    lanes = np.moveaxis(rows, 0, -1)
    for first in range(0, len(rows), WIDTH):
        some = lanes[..., first : first + WIDTH]
        panels[first // WIDTH, ..., : some.shape[-1]] = some


def pack_floats(w: NDArray[Any]) -> Panels:
    """Pack a matrix of float32, or of bfloat16 as uint16, in its exact format."""
    n_out, n_in = w.shape
    name, numbers = narrowest(w)
    n_inputs = 2 if name == "BF16" else 1  # of a block
    words = arena.zeros(DTYPES[name], math.ceil(n_out / WIDTH), math.ceil(n_in / n_inputs), WIDTH, n_inputs)
    for i in range(n_inputs):
        inputs = numbers[:, i::n_inputs]
        fill(words[:, : inputs.shape[1], :, i], inputs)
    return Panels(n_out, n_in, name, words)


def pack_blocks(w: Blocks) -> Panels:
    """Pack blocks as they are, unit by unit."""
    n_out, n_blocks, block_bytes = w.data.shape
    record = np.dtype([(w.format, np.uint8, (WIDTH * block_bytes,))])
    words = arena.zeros(record, math.ceil(n_out / WIDTH), n_blocks)
    for units, panels in sections(w.format, w.data, words):
        fill(panels, units)
    return Panels(*w.shape, w.format, words)


def pack(w: NDArray[Any] | list[Blocks] | Mxfp4, name: str | None = None) -> Any:
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
