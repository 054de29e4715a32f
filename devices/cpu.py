"""The ops on a processor at the speed of its memory: weights as the file has them, kernels compiled by Numba.

    matrix, or blocks of a file --pack()--> Panels --FastOps--> the ops of NumpyOps, at fewer bytes

Decoding a token reads every weight once and uses it once, so it takes as long as the bytes of the weights
take to come from memory. Most checkpoints hold bfloat16, the upper half of a float32; blocks of 8 or 4 bits
with a scale are half and a quarter of that. A prompt uses each weight many times, so it takes as long as its
products: these run on the instructions for narrow numbers that microkernel.py describes. FastOps differs from
NumpyOps, the spec, in the order of its sums and in what it rounds (rule 3). NumpyOps serves if Numba is not
installed.

Authority: https://numba.readthedocs.io/en/stable/user/parallel.html for threads; for attention in pieces
"Self-attention Does Not Need O(n^2) Memory" (https://arxiv.org/abs/2112.05682).

Rules of this file:
1. Every sum runs over the inputs in their order (microkernel.py). So a row has the same bits alone, in any
   batch and in a prefill chunk. Threads share out panels, rows and blocks of attention: no sum.
2. Packing floats loses no bit: a matrix is kept in the narrowest format that holds all its values.
3. What is rounded is measured or said (Panels.lost, FastOps.about): weights if they are packed in fewer bits;
   the inputs of a product with blocks to 16 bits; those of a product with bfloat16 to bfloat16 if that
   product is faster (FAST_BFLOAT16); keys and values in the KV cache to bfloat16.
4. Norms and attention are kernels as well, also row by row. So no result depends on its neighbours, and no
   thread of BLAS, which spins while it waits for its next product, takes a core from ours.

Not here: what the ops are (model.py), the loop of all products (microkernel.py), reading files
(checkpoint/weights.py), what the blocks of a GGUF file hold (checkpoint/blocks.py).
"""

import ctypes
import hashlib
import importlib.metadata
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import threadpoolctl
from numba import njit, prange, types
from numba.extending import overload
from numpy.typing import DTypeLike, NDArray

from checkpoint.blocks import Blocks, decoded, quantized, with_minima
from checkpoint.config import Config
from checkpoint.default_model import cache_folder
from checkpoint.weights import Layer, Matrix, Mxfp4, Packer, Weights, bfloat16, unpacked, widen
from devices import microkernel
from devices.microkernel import AHEAD, BLOCK, CACHE_LINE, FAST_BFLOAT16, ROWS, WIDTH, X_HEADER, X_WORDS
from model import PAGE, Array, Batch, Ints, NumpyOps, Span, forward

log = logging.getLogger("cpu")

ATTENTION_ROWS = 16  # rows of one sequence that attend together
SPAN = 4 * PAGE  # keys that they attend to at once
ARENA = 2**26  # bytes of packed matrices that lie in one piece of memory
SMALL = 2**18  # multiplications: one thread is done with fewer before a second has woken up

# With "tbb" the calling thread does what no other has begun, so it never waits for a thread that other work
# keeps from running. With "omp" all wait for all, and a thread without a processor stops the others: a tenth
# of the speed. "threadsafe" leaves out "workqueue", which takes 60 us to hand work over, and crashes when two
# engines of a process use it.
numba_config: Any = numba.config
numba_config.THREADING_LAYER = "threadsafe"
numba_config.THREADING_LAYER_PRIORITY = ["tbb", "omp", "workqueue"]

# --- the weights --------------------------------------------------------------------------------------------

DTYPES: dict[str, DTypeLike] = {"BF16": np.uint16, "F16": np.int16, "F32": np.float32}  # of floats, by format
# --weights               of the layers, of the embedding and the head, which 4 bits harm most
WEIGHTS = {"bfloat16": ("BF16", "BF16"), "int8": ("Q8_0", "Q8_0"), "int4": ("Q4_1", "Q8_0")}
# The bytes of a block that are numbers by themselves; all others come in pairs.
SINGLE_BYTES = {"MXFP4": (0, 1)}


@dataclass(frozen=True)
class Panels:
    """A matrix (n_out, n_in) of one format, padded with zeros to whole panels.

    In a panel lie WIDTH outputs side by side, block of inputs after block, so that a kernel reads memory from
    front to back: words (n_panels, n_blocks) of records for blocks, (n_panels, n_blocks, WIDTH, inputs of a
    block) for floats. The matrices of experts have an axis more, which comes first.
    """

    n_out: int
    n_in: int
    format: str  # GGUF's name, a key of microkernel.FORMATS
    words: NDArray[Any]
    lost: float = 0.0  # sum of the squares of what rounding has changed, if packing has rounded
    total: float = 0.0  # of all numbers, if it has

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    @property
    def is_quantized(self) -> bool:
        return self.format not in DTYPES

    def expert(self, e: int) -> "Panels":
        return replace(self, words=self.words[e])

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
        panel = rows // WIDTH
        lane = rows % WIDTH
        if self.is_quantized:
            n_bytes = self.words.itemsize // WIDTH
            data = np.empty((len(rows), self.words.shape[1], n_bytes), np.uint8)
            for begin, end, units in sections(self.words):
                data[:, :, begin:end] = units[panel, :, :, lane].view(np.uint8)
            return decoded(Blocks(self.format, data))
        values = self.words[panel, :, lane].reshape(len(rows), -1)[:, : self.n_in]
        if self.format == "F16":
            values = values.view(np.float16)
        x = np.empty(values.shape, np.float32)
        widen(values, x)
        return x


def sections(words: NDArray[Any]) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """The bytes begin:end of all blocks, (n_panels, n_blocks, units of these bytes, WIDTH).

    A unit is two bytes or a single one.
    """
    n_bytes = words.itemsize // WIDTH
    [name] = words.dtype.names or ()
    begin, end = SINGLE_BYTES.get(name, (0, 0))
    in_bytes = words.view(np.uint8).reshape(*words.shape, -1)
    for first, last, dtype in [(0, begin, "u2"), (begin, end, "u1"), (end, n_bytes, "u2")]:
        if first < last:
            units = in_bytes[:, :, first * WIDTH : last * WIDTH].view(dtype)
            yield first, last, units.reshape(*words.shape, -1, WIDTH)


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


def exact_format(w: NDArray[Any]) -> str:
    """The first format that holds every value: BF16, which uint16 is already, F16 or F32."""
    if w.dtype == np.uint16:
        return "BF16"
    if not w.view(np.uint16)[..., ::2].any():  # the lower halves: little-endian
        return "BF16"
    with np.errstate(over="ignore"):
        if np.array_equal(w.astype(np.float16), w):
            return "F16"
    return "F32"


def pack_floats(w: NDArray[Any]) -> Panels:
    """Pack a matrix of float32, or of bfloat16 as uint16, in its exact format."""
    n_out, n_in = w.shape
    name = exact_format(w)
    numbers = w
    if name == "BF16" and w.dtype != np.uint16:
        numbers = w.view(np.uint16)[:, 1::2]
    elif name == "F16":
        numbers = w.astype(np.float16).view(np.int16)
    n_inputs = 2 if name == "BF16" else 1  # of a block
    n_panels = math.ceil(n_out / WIDTH)
    n_blocks = math.ceil(n_in / n_inputs)
    words = arena.zeros(DTYPES[name], n_panels, n_blocks, WIDTH, n_inputs)
    for panel, first in zip(words, range(0, n_out, WIDTH), strict=True):
        rows = numbers[first : first + WIDTH]
        for i in range(n_inputs):
            inputs = rows[:, i::n_inputs].T
            panel[: len(inputs), : len(rows), i] = inputs
    return Panels(n_out, n_in, name, words)


def pack_blocks(w: Blocks) -> Panels:
    """Pack blocks as they are, WIDTH of them side by side, unit by unit."""
    n_out, n_blocks, block_bytes = w.data.shape
    record = np.dtype([(w.format, np.uint8, (WIDTH * block_bytes,))])
    words = arena.zeros(record, math.ceil(n_out / WIDTH), n_blocks)
    for begin, end, units in sections(words):
        rows = w.data[:, :, begin:end].view(units.dtype)  # (n_out, n_blocks, units of a block)
        for panel, first in zip(units, range(0, n_out, WIDTH), strict=True):
            some = rows[first : first + WIDTH]
            panel[:, :, : len(some)] = some.transpose(1, 2, 0)
    return Panels(n_out, w.n_in, w.format, words)


def pack(w: NDArray[Any] | list[Blocks] | Mxfp4, name: str | None = None) -> Panels:
    """Pack a matrix, the blocks that stack to one, or the matrices of experts, in the format of this name.

    Without a name floats and MXFP4 stay as exact as they are, and blocks as with_minima() leaves them; those
    of different formats that stack to one matrix become Q8_0.
    """
    if isinstance(w, Mxfp4) or (isinstance(w, np.ndarray) and w.ndim == 3):
        return pack_experts(w)
    if isinstance(w, list):
        parts = [with_minima(part) for part in w]
        [format_, *others] = {part.format for part in parts}
        if not others and name in (None, format_):
            some = [part._replace(data=part.data[::WIDTH]) for part in w]  # rows, for all would take long
            near = unpacked([with_minima(part) for part in some])
            return measured(pack_blocks(stacked(parts)), unpacked(some), near)
        return rounded(unpacked(w), name or "Q8_0")
    if name is None or name == exact_format(w):
        return pack_floats(w)
    return rounded(unpacked(w), name)


def pack_experts(w: NDArray[Any] | Mxfp4) -> Panels:
    """Pack matrices (n_experts, n_out, n_in) one after another."""
    n_experts, n_out = (w.blocks if isinstance(w, Mxfp4) else w).shape[:2]
    padding = [(0, 0), (0, -n_out % WIDTH)]  # so that each begins a panel
    if isinstance(w, Mxfp4):
        data = np.pad(mxfp4_bytes(w), [*padding, (0, 0), (0, 0)])
        panels = pack_blocks(Blocks("MXFP4", data.reshape(-1, *data.shape[2:])))
    else:
        rows = np.pad(w, [*padding, (0, 0)])
        panels = pack_floats(rows.reshape(-1, rows.shape[2]))
    words = panels.words.reshape(n_experts, -1, *panels.words.shape[1:])
    return replace(panels, n_out=n_out, words=words)


def mxfp4_bytes(w: Mxfp4) -> NDArray[np.uint8]:
    """Blocks as GGUF has them: the scale, then in the lower halves of 16 bytes the first 16 numbers."""
    data = np.empty((*w.scales.shape, 17), np.uint8)
    data[..., 0] = w.scales
    for e, blocks in enumerate(w.blocks):  # (n_out, n_in/32, 16), two numbers that follow one another a byte
        numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 2 * 16)
        data[e, :, :, 1:] = numbers[..., :16] | numbers[..., 16:] << 4
    return data


def rounded(w: Array, name: str) -> Panels:
    """Pack what the format cannot hold."""
    if name == "BF16" or w.shape[1] % BLOCK:
        bits = bfloat16(w)
        near: Array = unpacked(bits)
        panels = pack_floats(bits)
    else:
        blocks = quantized(w, name)
        near = decoded(blocks)
        panels = pack_blocks(blocks)
    return measured(panels, w, near)


def measured(panels: Panels, exact: Array, near: Array) -> Panels:
    """Note by how much rounding has changed the matrix, as some or all of its rows show it."""
    times = panels.n_out / len(exact)
    lost = times * float(np.square(exact - near).sum(dtype=np.float64))
    total = times * float(np.square(exact).sum(dtype=np.float64))
    return replace(panels, lost=lost, total=total)


def stacked(parts: list[Blocks]) -> Blocks:
    return Blocks(parts[0].format, np.concatenate([part.data for part in parts]))


# --- the kernels --------------------------------------------------------------------------------------------
# The flag "contract" lets LLVM fuse a multiplication and an addition, and nothing else: it keeps the order of
# each sum. For sums within a row, and for maxima, the compiler may choose the order ("reassoc"): it does so
# once, when it compiles, so that the order depends on nothing else in the batch.

LIBERTIES = {"contract"}
ROW_LIBERTIES = LIBERTIES | {"reassoc", "nnan", "nsz"}


def kernel_folder() -> Path:
    """Where Numba keeps what it has compiled of the modules of this folder, as they are now.

    Beside each module, where it would, it finds kernels that were compiled before another module has changed.
    """
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    digest = hashlib.sha256(b"".join([*sources, bytes([PAGE])])).hexdigest()
    return cache_folder() / "kernels" / digest[:16]


def can_cache() -> bool:
    """Is there a folder where Numba can keep what it has compiled? Without one each start compiles."""
    try:
        if not numba_config.CACHE_DIR:  # $NUMBA_CACHE_DIR
            folder = kernel_folder()
            folder.mkdir(parents=True, exist_ok=True)  # else Numba would use another one
            numba_config.CACHE_DIR = str(folder)
        njit(cache=True)(can_cache)
    except (RuntimeError, OSError):  # also without a home
        return False
    return True


CACHE = can_cache()


def kernel(function: Any = None, liberties: set[str] = LIBERTIES, parallel: bool = False) -> Any:
    if function is None:
        return lambda function: kernel(function, liberties, parallel)
    # The error model: a check of each divisor would keep a loop from becoming vector code.
    compiler: Any = njit  # whose types leave out some options
    options = {"cache": CACHE, "fastmath": liberties, "error_model": "numpy", "parallel": parallel}
    return compiler(nogil=True, **options)(function)


def shared(one: Any) -> Any:
    """A kernel with prange, compiled once more, for all threads; the other is for one.

    It needs a name of its own: the key of Numba's cache leaves out `parallel`, so for one function compiled
    both ways it would return whichever was compiled first.
    """
    function = one.py_func
    copy = FunctionType(function.__code__, function.__globals__, f"shared_{function.__name__}")
    copy.__qualname__ = copy.__name__
    copy.__doc__ = function.__doc__
    return kernel(copy, one.targetoptions["fastmath"], parallel=True)


add_tile: Any = microkernel.add_tile  # Numba gives it the types and the code; mypy sees the generator

# --- products -----------------------------------------------------------------------------------------------


@kernel
def add_rows(x: Any, w: Any, y: Any, adds: bool, ahead: int) -> None:
    """y = x @ w, and if `adds` plus y, for any number of rows, w as wide as a tile."""
    r = 0
    while len(y) - r >= ROWS:
        add_tile(ROWS, x[r:], w, y[r:], adds, ahead)
        r += ROWS
    if len(y) - r >= 4:
        add_tile(4, x[r:], w, y[r:], adds, ahead)
        r += 4
    n_left = len(y) - r
    if n_left == 3:
        add_tile(3, x[r:], w, y[r:], adds, ahead)
    elif n_left == 2:
        add_tile(2, x[r:], w, y[r:], adds, ahead)
    elif n_left == 1:
        add_tile(1, x[r:], w, y[r:], adds, ahead)


@kernel
def product(x: Any, words: Any, y: Any, residual: Any) -> None:
    """y = x W^T and residual += y; a panel stays in the cache until all rows are multiplied by it.

    x (n_rows, ...), words (n_panels, n_blocks, ...), y (n_rows, n_panels * WIDTH), residual (n_rows, n_out)
    or (0, 0).
    """
    for p in prange(len(words)):
        first = p * WIDTH
        sums = y[:, first : first + WIDTH]
        add_rows(x, words[p], sums, False, AHEAD)
        for r in range(len(residual)):
            for j in range(min(WIDTH, residual.shape[1] - first)):
                residual[r, first + j] += sums[r, j]


# --- what goes into a product -------------------------------------------------------------------------------

X_DTYPE: Any = np.uint16 if FAST_BFLOAT16 else np.float32  # of x, if the weights are bfloat16
X_MAX = np.float32(32767)  # 16 bits; the largest sum, of 32 products with 128, is below 2^31
LEAST_SIZE = np.int32(
    27 << 23
)  # the bits of 2^-100: the largest number of a block is taken for at least this
NO_SIGN = np.int32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)  # the bits; those of NaN are above
NAN = np.uint16(0x7FC0)
SIXTEEN = np.uint32(16)


def store_row(row: Any, y: Any) -> None:
    """Write a row (n,) float32 in the form that a product takes: by the dtype of y, as one of these three."""


def as_floats(row: Any, y: Any) -> None:
    y[: len(row)] = row
    y[len(row) :] = 0


def as_bfloat16(row: Any, y: Any) -> None:
    """Round to bfloat16, ties to even; NaN stays."""
    all_bits = row.view(np.uint32)
    for d in range(len(row)):
        bits = all_bits[d]
        up = np.uint32(0x7FFF) + ((bits >> SIXTEEN) & np.uint32(1))
        is_number = (bits & np.uint32(NO_SIGN)) <= INFINITY
        y[d] = np.uint16((bits + up) >> SIXTEEN) if is_number else NAN
    y[len(row) :] = 0


def as_blocks(row: Any, y: Any) -> None:
    """Round to 16 bits with a scale for each BLOCK.

    y (n_blocks, 2 * X_WORDS) int16: two float32, the scale and the scale times the sum of the numbers; then
    the numbers. The largest is found in the bits: without the sign these are in the order of the numbers, and
    those of NaN are above.
    """
    all_bits = row.view(np.int32)
    for k in range(len(y)):
        largest_bits: Any = LEAST_SIZE
        for i in range(k * BLOCK, (k + 1) * BLOCK):
            largest_bits = max(largest_bits, all_bits[i] & NO_SIGN)
        size = np.int32(largest_bits).view(np.float32)
        factor = X_MAX / size
        total = np.int32(0)
        for i in range(BLOCK):
            number = np.int32(np.rint(row[k * BLOCK + i] * factor))
            total += number
            y[k, 2 * X_HEADER + i] = number
        scale = np.float32(size / X_MAX)
        for i, header in enumerate((scale, scale * np.float32(total))):
            bits = np.float32(header).view(np.int32)
            y[k, 2 * i] = bits
            y[k, 2 * i + 1] = bits >> 16


FORMS = {types.float32: as_floats, types.uint16: as_bfloat16, types.int16: as_blocks}


@overload(store_row, jit_options={"error_model": "numpy"})
def _store_row(row: Any, y: Any) -> Any:
    return FORMS[y.dtype]


@kernel
def store_rows(x: Any, y: Any) -> None:
    for r in prange(len(x)):
        store_row(x[r], y[r])


@kernel(liberties=ROW_LIBERTIES)
def rms_norm(x: Any, w: Any, eps: Any, y: Any) -> None:
    """y = x / sqrt(mean(x^2) + eps) * w for each row; w (n,), y in any form of store_row()."""
    for r in prange(len(x)):
        total = np.float32(0)
        for d in range(len(w)):
            total += x[r, d] * x[r, d]
        scale = np.float32(1) / np.sqrt(total / np.float32(len(w)) + eps)
        normed = np.empty(len(w), np.float32)
        for d in range(len(w)):
            normed[d] = x[r, d] * scale * w[d]
        store_row(normed, y[r])


@kernel(liberties=ROW_LIBERTIES)
def silu_product(gate_up: Any, y: Any) -> None:
    """y = silu(gate) * up for each row; gate_up (n_rows, 2 n), y in any form of store_row()."""
    n = gate_up.shape[1] // 2
    for r in prange(len(gate_up)):
        gates = gate_up[r, :n]
        ups = gate_up[r, n:]
        h = np.empty(n, np.float32)
        for j in range(n):
            h[j] = gates[j] / (ONE + exp(min(-gates[j], -UNDERFLOW))) * ups[j]
        store_row(h, y[r])


@njit(inline="always")
def exp(x: Any) -> Any:
    """e^x for x <= 88: 2^n times the Taylor series of e^r, |r| <= ln(2) / 2; 0 below -87."""
    x = max(x, UNDERFLOW)
    n = np.floor(x * LOG2_E + HALF)
    r = x - n * LN_2
    series = TAYLOR[0]
    for c in TAYLOR[1:]:
        series = series * r + c
    return series * np.int32(np.int32(n + BIAS) << np.int32(23)).view(np.float32)


ONE = np.float32(1)
HALF = np.float32(0.5)
BIAS = np.float32(127)  # of a float32's exponent
UNDERFLOW = np.float32(-88)  # where e^x becomes 0; e^88 is still finite
LN_2 = np.float32(math.log(2))
LOG2_E = np.float32(1 / math.log(2))
TAYLOR = tuple(np.float32(1 / math.factorial(k)) for k in range(7, -1, -1))

# --- attention ----------------------------------------------------------------------------------------------
# Row by row: which keys a row sees, and in which order, follows from its position alone. The rows of a block
# are computed together only to share what is read from memory. They take SPAN keys at a time: the sum of
# e^score and the sum of values so far are scaled down whenever a larger score turns up (online softmax), so
# the scratch memory of a block does not grow with the context.
#
# The KV cache holds bfloat16 in pairs, as the product takes them. Of a head and a page the keys lie across,
# (width / 2, PAGE, 2): two numbers of each key side by side, so that the scores of a page are a product with
# PAGE outputs; the values are (PAGE / 2, width, 2), two tokens side by side: a product with `width` outputs,
# head_dim rounded up to whole tiles.


@kernel
def rotate(head: Any, turn: Any) -> None:
    """Turn the pairs of a head, adjacent, by their angles; turn (head_dim,) has cos and sin of each."""
    for i in range(len(head) // 2):
        real, imaginary = head[2 * i], head[2 * i + 1]
        cos, sin = turn[2 * i], turn[2 * i + 1]
        head[2 * i] = real * cos - imaginary * sin
        head[2 * i + 1] = real * sin + imaginary * cos


@kernel
def key_panels(page: Any) -> Any:
    return page.reshape(PAGE // WIDTH, -1, WIDTH, 2)


@kernel
def value_panels(page: Any) -> Any:
    return page.reshape(-1, PAGE // 2, WIDTH, 2)


@kernel
def write_cache(key: Any, value: Any, offset: int, keys: Any, values: Any) -> None:
    """Put the key and the value of one head in their place of a page."""
    numbers = np.empty(values.shape[0] * WIDTH, np.uint16)
    store_row(key, numbers)
    keys[offset // WIDTH, :, offset % WIDTH] = numbers.reshape(-1, 2)
    store_row(value, numbers)
    values[:, offset // 2, :, offset % 2] = numbers.reshape(-1, WIDTH)


@kernel
def rotate_and_cache(
    heads: Any, kv: Any, i: int, pages: Any, positions: Any, turns: Any, is_rotary: bool
) -> None:
    """Rotate queries and keys in place, and write keys and values to the KV cache.

    heads (n_rows, n_heads + 2 * n_kv_heads, head_dim), turns (max_seq_len, head_dim), kv as of attention()
    """
    n_kv_heads = kv.shape[3]
    n_rotated = heads.shape[1] - n_kv_heads
    for r in prange(len(heads)):
        turn = turns[positions[r]]
        if is_rotary:
            for h in range(n_rotated):
                rotate(heads[r, h], turn)
        for h in range(n_kv_heads):
            keys = key_panels(kv[pages[r], i, 0, h])
            values = value_panels(kv[pages[r], i, 1, h])
            key = heads[r, n_rotated - n_kv_heads + h]
            write_cache(key, heads[r, n_rotated + h], positions[r] % PAGE, keys, values)


@kernel
def add_product(x: Any, panels: Any, y: Any, adds: bool, ahead: int) -> None:
    """add_rows() for each panel. panels (n_panels, n_pairs, WIDTH, 2), y (n_rows, n_panels * WIDTH)"""
    for p in range(len(panels)):
        add_rows(x, panels[p], y[:, p * WIDTH : (p + 1) * WIDTH], adds, ahead)


@kernel
def largest(s: Any) -> Any:
    """The largest of s float32. A compiler takes integers side by side, floats one by one.

    With the other bits of negative numbers inverted, bits are in the order of the numbers.
    """
    most = LEAST_BITS
    bits = s.view(np.int32)
    for j in range(len(bits)):
        most = max(most, bits[j] ^ ((bits[j] >> 31) & NO_SIGN))
    return np.int32(most ^ ((most >> 31) & NO_SIGN)).view(np.float32)


LEAST = np.float32(-1e38)
LEAST_BITS = np.int32(-(2**31))


@kernel(liberties=ROW_LIBERTIES)
def exponentials(s: Any, maximum: Any) -> Any:
    """s = e^(s - maximum) in place; return their sum."""
    total = np.float32(0)
    for j in range(len(s)):
        s[j] = exp(s[j] - maximum)
        total += s[j]
    return total


@kernel
def add_values(probs: Any, values: Any, first_sees: int, n: int, sums: Any, ahead: int) -> None:
    """sums += probs @ values for a page, of which a row reads only what it sees: the rest may be NaN.

    The first n queries see `first_sees` tokens, the next n one more, and so on.
    """
    n_pairs = min(PAGE, max(0, first_sees)) // 2  # that all see
    if n_pairs > 0:
        add_product(probs[:, : 2 * n_pairs], values[:, :n_pairs], sums, True, ahead)
    last_sees = min(PAGE, first_sees + len(sums) // n - 1)
    others = values[:, n_pairs : (last_sees + 1) // 2].copy()
    for r in range(len(sums) - n, -1, -n):  # backwards: what a row does not see becomes 0, and stays so
        sees = min(PAGE, first_sees + r // n)
        if sees <= 2 * n_pairs:
            break
        if sees < 2 * (n_pairs + others.shape[1]):
            others[:, sees // 2 - n_pairs, :, sees % 2] = 0
        add_product(probs[r : r + n, 2 * n_pairs :], others, sums[r : r + n], True, 0)


@kernel
def attend_block(
    heads: Any,
    kv: Any,
    i: int,
    h: int,
    sinks: Any,
    page_table: Any,
    positions: Any,
    window: int,
    y: Any,
) -> None:
    """Attend from the rows of one block, with the query heads that share key head h; see attention()."""
    n_kv_heads, head_dim = kv.shape[3], heads.shape[2]
    n = y.shape[1] // n_kv_heads  # query heads that share a key head
    n_queries = len(positions) * n
    factor = ONE / np.sqrt(np.float32(head_dim))
    queries = np.empty((n_queries, head_dim), X_DTYPE)
    maxima = np.empty(n_queries, np.float32)
    totals = np.empty(n_queries, np.float32)
    for r in range(n_queries):
        store_row(heads[r // n, h * n + r % n] * factor, queries[r])
        sink = sinks[h * n + r % n]
        maxima[r] = max(sink, LEAST)
        totals[r] = exp(sink - maxima[r])
    scores = np.empty((n_queries, SPAN), np.float32)
    probs = np.empty((n_queries, SPAN), X_DTYPE)
    sums = np.zeros((n_queries, kv.shape[4] // PAGE), np.float32)
    first_page = max(0, positions[0] - window + 1) // PAGE
    end_page = positions[-1] // PAGE + 1
    for begin in range(first_page * PAGE // SPAN * SPAN, end_page * PAGE, SPAN):
        pages = range(max(first_page, begin // PAGE), min(end_page, (begin + SPAN) // PAGE))
        for p in pages:
            keys = key_panels(kv[page_table[p], i, 0, h])[:, : head_dim // 2]
            column = p * PAGE - begin
            ahead = (page_table[min(p + 1, end_page - 1)] - page_table[p]) * kv.strides[0]  # to the next page
            add_product(queries, keys, scores[:, column : column + PAGE], False, ahead)

        for r in range(n_queries):
            position = positions[r // n]
            low = max(0, position - window + 1) - begin  # the row sees the keys from low
            end = position + 1 - begin  # to end
            first = min(SPAN, max(0, low) // PAGE * PAGE)  # the same pages, wherever the block begins
            last = min(SPAN, -(-end // PAGE) * PAGE)
            probs[r, :first] = 0
            if first >= last:
                continue
            scores[r, first : max(first, low)] = -np.inf
            scores[r, end:last] = -np.inf
            seen = scores[r, first:last]
            maximum = max(maxima[r], largest(seen))
            decay = exp(maxima[r] - maximum)
            maxima[r] = maximum
            totals[r] = totals[r] * decay + exponentials(seen, maximum)
            for d in range(head_dim):
                sums[r, d] *= decay
            store_row(seen, probs[r, first:last])

        for p in pages:
            values = value_panels(kv[page_table[p], i, 1, h])
            column = p * PAGE - begin
            ahead = (page_table[min(p + 1, end_page - 1)] - page_table[p]) * kv.strides[0]
            first_sees = positions[0] + 1 - p * PAGE
            add_values(probs[:, column : column + PAGE], values, first_sees, n, sums, ahead)
    for r in range(n_queries):
        for d in range(head_dim):
            y[r // n, h * n + r % n, d] = sums[r, d] / totals[r]


@kernel
def attention(
    heads: Any,
    kv: Any,
    i: int,
    sinks: Any,
    page_tables: Any,
    positions: Any,
    blocks: Any,
    window: int,
    y: Any,
) -> None:
    """y = softmax(q k^T / sqrt(head_dim)) v; a row sees itself and the window - 1 tokens before it.

    heads are those of rotate_and_cache(), of which q comes first; y (n_rows, n_heads, head_dim). sinks
    (n_heads,) are -inf in a model without. kv is FastOps' page pool, blocks (n_blocks, 3) has the first row
    of each, the end of its rows, and the number of their page table.
    """
    n_kv_heads = kv.shape[3]
    for task in prange(len(blocks) * n_kv_heads):
        first, stop, number = blocks[task // n_kv_heads]
        rows = positions[first:stop]
        attend_block(
            heads[first:stop],
            kv,
            i,
            task % n_kv_heads,
            sinks,
            page_tables[number],
            rows,
            window,
            y[first:stop],
        )


KERNELS = (product, store_rows, rms_norm, silu_product, rotate_and_cache, attention)
SHARED = {one: shared(one) for one in KERNELS}  # the same for all threads


def load_tbb() -> None:
    """Load oneTBB from where pip has put it: neither Numba nor the system looks there."""
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name in ("libtbb.so.12", "tbb12.dll"):
            ctypes.CDLL(str(file.locate()))


def usable_threads() -> int:
    """As many as BLAS may use, so that one option limits both."""
    blas = [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    n_threads: int = min(max(blas, default=1), numba_config.NUMBA_NUM_THREADS)
    return n_threads


# --- the ops ------------------------------------------------------------------------------------------------


class FastOps(NumpyOps):
    """NumpyOps, with kernels for what its ops are made of; for weights that were read with `pack`."""

    pack = staticmethod(pack)
    kv_dtype = "bfloat16"

    def __init__(
        self, config: Config, weights: Weights, max_seq_len: int, n_pages: int, max_batch: int
    ) -> None:
        super().__init__(config, weights, max_seq_len, n_pages, max_batch)
        c = config
        shape = (n_pages, c.n_layers, 2, c.n_kv_heads, PAGE * padded(c.head_dim))
        self._kv: Any = np.empty(shape, np.uint16)
        self._turns: Array = self._rope.view(np.float32)  # (max_seq_len, head_dim)
        self._blocks: AttentionBlocks | None = None  # those of the batch that was computed last
        self._no_sinks = np.full(c.n_heads, -np.inf, np.float32)
        self._n_threads = usable_threads()
        self._small = SMALL
        load_tbb()
        self.get_ready()
        self.about = f"Numba, {self._n_threads} threads, {about(panels_of(weights))}"

    @staticmethod
    def page_bytes(config: Config) -> int:
        return 2 * config.n_layers * 2 * PAGE * config.n_kv_heads * padded(config.head_dim)

    @staticmethod
    def pack_as(weights: str) -> list[Packer]:
        """For read_weights(): how a key of WEIGHTS packs the matrices of the layers, and the outer ones."""
        return [partial(pack, name=name) for name in WEIGHTS[weights]]

    def get_ready(self) -> None:
        """Compile the kernels, or read them from where they are kept, by a step of one token.

        One thread computes it, then all, in those layers that differ in the kinds of their weights.
        """
        log.info("getting the kernels ready: the first start compiles them, which takes some twenty seconds")
        started = time.perf_counter()
        layers = {tuple(map(kind_of, vars(layer).values())): layer for layer in self.weights.layers}
        weights = replace(self.weights, layers=[*layers.values()])
        batch = Batch([Span(0, [0], [0], 0, 1)])
        if self._n_threads > 1:
            self._small = 0  # so all threads compute everything
            try:
                forward(self, weights, batch)
            except ValueError as error:  # there is no threading layer; the message says what to install
                log.warning("one thread: %s", " ".join(str(error).split()))
                self._n_threads = 1
        self._small = sys.maxsize
        forward(self, weights, batch)
        self._small = SMALL
        log.info("kernels ready in %.1f s", time.perf_counter() - started)

    def embed(self, batch: Batch, weights: Weights) -> Array:
        if self._n_threads > 1:
            numba.set_num_threads(self._n_threads)  # it holds for the calling thread, whichever that is
        x: Array = weights.embed.take(batch.token_ids)
        return x

    def qkv(self, x: Array, layer: Layer, batch: Batch) -> Array:
        normed = self._normed(x, layer.attn_norm, layer.wqkv.inputs(len(x)))
        return self._product(normed, layer.wqkv, layer.bqkv)

    def out(self, x: Array, y: Array, layer: Layer, batch: Batch) -> None:
        self._product(self._stored(y, layer.wo.inputs(len(y))), layer.wo, layer.bo, x)

    def gate_up(self, x: Array, layer: Layer, batch: Batch) -> NDArray[Any]:
        """The hidden layer in the form that `down` multiplies."""
        normed = self._normed(x, layer.mlp_norm, layer.w_gate_up.inputs(len(x)))
        gate_up = self._product(normed, layer.w_gate_up, layer.b_gate_up)
        h: NDArray[Any] = layer.w_down.inputs(len(x))
        self._run(silu_product, 4 * gate_up.size, gate_up, h)
        return h

    def down(self, x: Array, h: NDArray[Any], layer: Layer, batch: Batch) -> None:
        self._product(h, layer.w_down, layer.b_down, x)

    def logits(self, x: Array, weights: Weights, batch: Batch) -> Array:
        rows = x[batch.wanted_rows]
        normed = self._normed(rows, weights.norm, weights.head.inputs(len(rows)))
        return self._product(normed, weights.head, None)

    def _run(self, one: Any, n_multiplications: int, *arguments: Any) -> None:
        """Call a kernel, with all threads if that is worth their waking up."""
        if self._n_threads == 1 or n_multiplications <= self._small:
            one(*arguments)
            return
        SHARED[one](*arguments)

    def _normed(self, x: Array, w: Array, y: NDArray[Any]) -> NDArray[Any]:
        """RMSNorm(x), written to y in the form that it has."""
        self._run(rms_norm, 4 * x.size, x, w, np.float32(self.config.norm_eps), y)
        return y

    def _rms_norm(self, x: Array, w: Array) -> Array:
        rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        return self._normed(rows, w, np.empty_like(rows)).reshape(x.shape)

    def _stored(self, x: Array, rows: NDArray[Any]) -> NDArray[Any]:
        """x, written to rows in the form that they have."""
        self._run(store_rows, 4 * x.size, np.ascontiguousarray(x), rows)
        return rows

    def _linear(self, x: Array, w: Matrix, b: Array | None) -> Array:
        """The scores of a router: rounding x might choose other experts."""
        return self._product(self._stored(x, w.inputs(len(x), np.float32)), w, b)

    def _product(self, x: NDArray[Any], w: Matrix, b: Array | None, residual: Array | None = None) -> Array:
        """x W^T + b for rows in the form of w.inputs(); it is added to a residual, if there is one."""
        sums = np.empty((len(x), len(w.words) * WIDTH), np.float32)
        into = NOTHING if residual is None else residual
        self._run(product, sums.size * w.n_in, x, w.words, sums, into)
        y = np.ascontiguousarray(sums[:, : w.n_out]) if residual is None else residual
        if b is not None:
            y += b
        return y

    def _expert_linear(self, x: Array, w: Matrix, b: Array | None, experts: Ints) -> Array:
        y = np.empty((len(x), w.n_out), np.float32)
        for e in np.unique(experts):  # what no row has chosen is not read
            rows = experts == e
            matrix = w.expert(e)
            y[rows] = self._product(self._stored(x[rows], matrix.inputs(len(x[rows]))), matrix, None)
        if b is not None:
            y += b[experts]
        return y

    def attend(self, qkv: Array, layer: Layer, i: int, batch: Batch) -> Array:
        c = self.config
        heads = qkv.reshape(len(qkv), -1, c.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = heads[:, : c.n_heads]
            k = heads[:, c.n_heads : -c.n_kv_heads]
            q[...] = self._rms_norm(q, layer.q_norm)
            k[...] = self._rms_norm(k, layer.k_norm)
        places = batch.pages, batch.positions
        self._run(rotate_and_cache, 4 * qkv.size, heads, self._kv, i, *places, self._turns, c.rotary[i])
        if self._blocks is None or self._blocks.batch is not batch:
            self._blocks = AttentionBlocks(batch, self._n_threads)
        blocks = self._blocks
        window = c.windows[i] or self.max_seq_len
        sinks = self._no_sinks if layer.sinks is None else layer.sinks
        y = np.empty((len(qkv), c.n_heads, c.head_dim), np.float32)
        arguments = self._kv, i, sinks, blocks.page_tables, batch.positions, blocks.rows, window
        self._run(attention, 2 * y[0].size * blocks.n_keys, heads, *arguments, y)
        return y.reshape(len(y), -1)


NOTHING = np.empty((0, 0), np.float32)


class AttentionBlocks:
    """How the attention of a batch is cut into tasks, the same in all layers: ATTENTION_ROWS of a span."""

    def __init__(self, batch: Batch, n_threads: int) -> None:
        self.batch = batch
        self.n_keys = int(batch.positions.sum()) + len(batch.positions)  # seen by all rows, without a window
        longest = max(len(span.pages) for span in batch.spans)
        self.page_tables: Ints = np.zeros((len(batch.spans), longest), np.int64)  # filled up with 0
        rows: list[tuple[int, int, int]] = []
        first_row = 0
        for number, span in enumerate(batch.spans):
            self.page_tables[number, : len(span.pages)] = span.pages
            end_row = first_row + span.end - span.start
            for first in range(first_row, end_row, ATTENTION_ROWS):
                rows.append((first, min(first + ATTENTION_ROWS, end_row), number))
            first_row = end_row
        dealt: list[tuple[int, int, int]] = []  # each thread takes blocks that follow one another
        for thread in range(n_threads):  # a later block of a prompt sees more keys, so all get some of these
            dealt += rows[thread::n_threads]
        self.rows: Ints = np.array(dealt, np.int64)  # (n_blocks, 3): first row, end of the rows, page table


def padded(head_dim: int) -> int:
    """Numbers of a value in the KV cache: whole tiles."""
    return -(-head_dim // WIDTH) * WIDTH


def kind_of(weight: Any) -> str:
    """What decides which kernels a weight needs."""
    return weight.format if isinstance(weight, Panels) else type(weight).__name__


def panels_of(weights: Weights) -> list[Panels]:
    """The matrices; one that is embedding and head is one."""
    arrays = {id(array): array for array in (weights.embed, weights.head)}
    for layer in weights.layers:
        arrays |= {id(array): array for array in vars(layer).values()}
    return [array for array in arrays.values() if isinstance(array, Panels)]


def about(panels: list[Panels]) -> str:
    """How large the weights are, and what packing and the products round."""
    sizes = Counter[str]()
    for matrix in panels:
        sizes[matrix.format] += matrix.nbytes
    formats = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in sizes.most_common())
    size = f"{sum(sizes.values()) / 1e6:.0f} MB of weights ({formats})"
    changed = "as exact as in the file"
    lost = sum(matrix.lost for matrix in panels)
    if lost:
        percent = 100 * math.sqrt(lost / sum(matrix.total for matrix in panels))
        changed = f"changed by rounding by {percent:.2g} %"
    if "BF16" in sizes and FAST_BFLOAT16:
        changed += ", multiplied in bfloat16"
    return f"{size}, {changed}"
