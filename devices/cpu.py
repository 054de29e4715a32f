"""The ops on a processor at the speed of its memory: weights as the file has them, kernels compiled by Numba.

    matrix, or blocks of a GGUF file --pack()--> Panels --FastOps--> the ops of NumpyOps, at fewer bytes

Decoding a token reads every weight once and uses it once, so it takes as long as the bytes of the weights
take to come from memory. Most checkpoints hold bfloat16, the upper half of a float32: widening it in a
register is exact, and costs nothing while the processor waits for memory. Blocks of 8 or 4 bits with a scale
are half and a quarter of that. FastOps differs from NumpyOps, the spec, in the order of its sums, and with
such blocks in that the inputs of a product are rounded to 16 bits; where Numba is not installed NumpyOps
serves.

Authority: https://numba.readthedocs.io/en/stable/user/parallel.html for threads.

Rules of this file:
1. Every sum runs over the inputs in their order (microkernel.py). So a row has the same bits alone, in any
   batch and in a prefill chunk. Threads share out panels, rows and blocks of attention: no sum.
2. Packing floats loses no bit: a matrix is kept in the narrowest format that holds all its values.
3. What packing loses otherwise is measured and said (Panels.lost, FastOps.about).
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
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import threadpoolctl
from numba import njit, prange
from numpy.typing import NDArray

from checkpoint.blocks import Blocks, decoded, quantized, with_minima
from checkpoint.config import Config
from checkpoint.default_model import cache_folder
from checkpoint.weights import Layer, Matrix, Packer, Weights, bfloat16, unpacked, widen
from devices import microkernel
from devices.microkernel import BLOCK, CACHE_LINE, ROWS, WIDTH, X_WORDS
from model import PAGE, Array, Batch, Ints, NumpyOps

log = logging.getLogger("cpu")

ATTENTION_ROWS = 16  # rows of one sequence that attend together
WIDE_ROWS = 48  # of a product, from which on it is faster to widen a panel once than for each tile of rows
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

# fmt: off
#  GGUF's name of the format   dtype of the words, by which microkernel.py tells it
FORMATS: dict[str, Any] = {
    "BF16":                    np.uint16,
    "F16":                     np.int16,
    "F32":                     np.float32,
    "Q8_0":                    np.uint8,
    "Q4_1":                    np.uint32,
}
# fmt: on
# --weights               of the layers, of the embedding and the head, which 4 bits harm most
WEIGHTS = {"bfloat16": ("BF16", "BF16"), "int8": ("Q8_0", "Q8_0"), "int4": ("Q4_1", "Q8_0")}
N_SCALES = {"Q8_0": 1, "Q4_1": 2}  # float16 numbers in front of a block: scale, minimum


@dataclass(frozen=True)
class Panels:
    """A matrix (n_out, n_in) of one format, padded with zeros to whole panels.

    In a panel lie WIDTH outputs side by side, block of inputs after block, so that a kernel reads memory from
    front to back: words (n_panels, n_blocks, what a block of the format has).
    """

    n_out: int
    n_in: int
    format: str  # a key of FORMATS
    words: NDArray[Any]
    lost: float = 0.0  # sum of the squares of what rounding has changed, where packing has rounded
    total: float = 0.0  # of all numbers, where it has

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    @property
    def is_quantized(self) -> bool:
        return self.format in N_SCALES

    def take(self, rows: Ints) -> Array:
        """Some rows of the matrix, (len(rows), n_in) float32."""
        panel = rows // WIDTH
        lane = rows % WIDTH
        if self.is_quantized:
            return decoded(Blocks(self.format, pairs_of(self.words)[panel, :, :, lane].view(np.uint8)))
        values = self.words[panel, :, lane].reshape(len(rows), -1)[:, : self.n_in]
        if self.format == "F16":
            values = values.view(np.float16)
        x = np.empty(values.shape, np.float32)
        widen(values, x)
        return x


def pairs_of(words: NDArray[Any]) -> NDArray[np.uint16]:
    """Panels of blocks, two bytes of a block an output: (n_panels, n_blocks, bytes of a block / 2, WIDTH)."""
    return words.view(np.uint16).reshape(*words.shape[:2], -1, WIDTH)


class Arena:
    """Matrices side by side in large pieces of memory, which the system maps by huge pages.

    Where each matrix of a few MB has memory of its own, a fifth of the time goes into translating addresses.
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
    words = arena.zeros(FORMATS[name], n_panels, n_blocks, WIDTH, n_inputs)
    for panel, first in zip(words, range(0, n_out, WIDTH), strict=True):
        rows = numbers[first : first + WIDTH]
        for i in range(n_inputs):
            inputs = rows[:, i::n_inputs].T
            panel[: len(inputs), : len(rows), i] = inputs
    return Panels(n_out, n_in, name, words)


def pack_blocks(w: Blocks) -> Panels:
    """The blocks of Q8_0 or Q4_1 as they are, WIDTH of them side by side."""
    n_out, n_blocks, block_bytes = w.data.shape
    n_panels = math.ceil(n_out / WIDTH)
    dtype = np.dtype(FORMATS[w.format])
    words = arena.zeros(dtype, n_panels, n_blocks, WIDTH * block_bytes // dtype.itemsize)
    pairs = w.data.view(np.uint16)  # (n_out, n_blocks, bytes of a block / 2)
    for panel, first in zip(pairs_of(words), range(0, n_out, WIDTH), strict=True):
        rows = pairs[first : first + WIDTH]
        panel[:, :, : len(rows)] = rows.transpose(1, 2, 0)
    return Panels(n_out, w.n_in, w.format, words)


def pack(w: NDArray[Any] | list[Blocks], name: str | None = None) -> Panels:
    """Pack a matrix, or the blocks that stack to one, in the format of this name.

    Without a name floats stay as exact as they are, and blocks of Q4 and Q8_0 stay as they are; others become
    Q8_0. So do blocks of different formats that stack to one matrix.
    """
    if isinstance(w, list):
        formats = {part.format for part in w}
        if name in (None, "Q4_1") and formats <= {"Q4_0", "Q4_1"}:
            return pack_blocks(stacked([with_minima(part) for part in w]))
        if formats == {name or "Q8_0"}:
            return pack_blocks(stacked(w))
        return rounded(unpacked(w), name or "Q8_0")
    if name is None or name == exact_format(w):
        return pack_floats(w)
    return rounded(unpacked(w), name)


def rounded(w: Array, name: str) -> Panels:
    """Pack what the format cannot hold, and note by how much that changes the matrix."""
    if name == "BF16" or w.shape[1] % BLOCK:
        bits = bfloat16(w)
        near: Array = unpacked(bits)
        panels = pack_floats(bits)
    else:
        blocks = quantized(w, name)
        near = decoded(blocks)
        panels = pack_blocks(blocks)
    lost = np.square(w - near).sum(dtype=np.float64)
    total = np.square(w).sum(dtype=np.float64)
    return replace(panels, lost=float(lost), total=float(total))


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
largest: Any = microkernel.largest
round_block: Any = microkernel.round_block
widened: Any = microkernel.widened


@kernel
def add_rows(x: Any, w: Any, y: Any) -> None:
    """y += x @ w for any number of rows, w as wide as a tile."""
    r = 0
    while len(y) - r >= ROWS:
        add_tile(ROWS, x[r:], w, y[r:])
        r += ROWS
    if len(y) - r >= 4:
        add_tile(4, x[r:], w, y[r:])
        r += 4
    n_left = len(y) - r
    if n_left == 3:
        add_tile(3, x[r:], w, y[r:])
    elif n_left == 2:
        add_tile(2, x[r:], w, y[r:])
    elif n_left == 1:
        add_tile(1, x[r:], w, y[r:])


@kernel
def product(x: Any, words: Any, y: Any) -> None:
    """y = x W^T; a panel stays in the cache until all rows are multiplied by it.

    x (n_rows, ...), words (n_panels, n_blocks, ...), y (n_rows, n_panels * WIDTH).
    """
    for p in prange(len(words)):
        sums = y[:, p * WIDTH : (p + 1) * WIDTH]
        sums[:] = 0
        if len(x) >= WIDE_ROWS:
            add_rows(x, widened(words[p]), sums)
        else:
            add_rows(x, words[p], sums)


@kernel
def quantize(x: Any, words: Any) -> None:
    """Round x for blocks of weights. x (n_rows, n_blocks * BLOCK), words (n_rows, n_blocks, X_WORDS)"""
    for r in prange(len(x)):
        for k in range(words.shape[1]):
            round_block(x[r, k * BLOCK :], words[r, k])


@kernel(liberties=ROW_LIBERTIES)
def rms_norm(x: Any, w: Any, eps: Any, y: Any) -> None:
    """y = x / sqrt(mean(x^2) + eps) * w for each row; w (n,)."""
    for r in prange(len(x)):
        total = np.float32(0)
        for d in range(len(w)):
            total += x[r, d] * x[r, d]
        scale = np.float32(1) / np.sqrt(total / np.float32(len(w)) + eps)
        for d in range(len(w)):
            y[r, d] = x[r, d] * scale * w[d]


@kernel(liberties=ROW_LIBERTIES)
def silu_product(gate_up: Any, y: Any) -> None:
    """y = silu(gate) * up for each row; gate_up (n_rows, 2 n), y (n_rows, n)."""
    n = y.shape[1]
    for r in prange(len(y)):
        gates = gate_up[r, :n]
        ups = gate_up[r, n:]
        for j in range(n):
            y[r, j] = gates[j] / (ONE + exp(min(-gates[j], -UNDERFLOW))) * ups[j]


# --- attention ----------------------------------------------------------------------------------------------
# Row by row: which keys a row sees, and in which order, follows from its position alone. The rows of a block
# are computed together only to share what is read from memory. In a page the keys of a head lie across, as a
# matrix (head_dim, PAGE), so that the scores of a page are a product like any other.


@kernel
def rotate(head: Any, turn: Any) -> None:
    """Turn the pairs of a head, adjacent, by their angles; turn (head_dim,) has cos and sin of each."""
    for i in range(len(head) // 2):
        real, imaginary = head[2 * i], head[2 * i + 1]
        cos, sin = turn[2 * i], turn[2 * i + 1]
        head[2 * i] = real * cos - imaginary * sin
        head[2 * i + 1] = real * sin + imaginary * cos


@kernel
def rotate_and_cache(
    heads: Any, kv: Any, i: int, pages: Any, positions: Any, turns: Any, is_rotary: bool
) -> None:
    """Rotate queries and keys in place, and write keys and values to the KV cache.

    heads (n_rows, n_heads + 2 * n_kv_heads, head_dim), turns (max_seq_len, head_dim), kv as of attention()
    """
    n_kv_heads, head_dim = kv.shape[3], heads.shape[2]
    n_rotated = heads.shape[1] - n_kv_heads
    for r in prange(len(heads)):
        turn = turns[positions[r]]
        if is_rotary:
            for h in range(n_rotated):
                rotate(heads[r, h], turn)
        offset = positions[r] % PAGE
        for h in range(n_kv_heads):
            keys = kv[pages[r], i, 0, h].reshape(head_dim, PAGE)
            keys[:, offset] = heads[r, n_rotated - n_kv_heads + h]
            kv[pages[r], i, 1, h, offset] = heads[r, n_rotated + h]


@kernel
def add_product(x: Any, w: Any, y: Any) -> None:
    """y += x @ w, x (n_rows, n), w (n, n_out), y (n_rows, n_out) float32: tiles, then what fills none."""
    n_tiled = y.shape[1] // WIDTH * WIDTH
    if len(w) > 0:
        for j in range(0, n_tiled, WIDTH):
            add_rows(x, w[:, j : j + WIDTH], y[:, j : j + WIDTH])
        for r in range(len(x)):
            for k in range(len(w)):
                for j in range(n_tiled, y.shape[1]):
                    y[r, j] += x[r, k] * w[k, j]


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


@kernel(liberties=ROW_LIBERTIES)
def exponentials(s: Any, sink: Any) -> Any:
    """s = e^(s - maximum) in place; return their sum and a sink's, by which they are the softmax."""
    maximum = max(largest(s), sink)
    total = exp(sink - maximum)
    for j in range(len(s)):
        s[j] = exp(s[j] - maximum)
        total += s[j]
    return total


@kernel
def attend_block(
    heads: Any,
    kv: Any,
    i: int,
    sinks: Any,
    page_tables: Any,
    positions: Any,
    blocks: Any,
    window: int,
    task: int,
    y: Any,
) -> None:
    """Attend from the rows of one block, with the query heads that share one key head; see attention()."""
    n_kv_heads, head_dim = kv.shape[3], heads.shape[2]
    h = task % n_kv_heads
    first, stop, table_number = blocks[task // n_kv_heads]
    page_table = page_tables[table_number]
    n = y.shape[1] // n_kv_heads  # query heads that share a key head
    factor = ONE / np.sqrt(np.float32(head_dim))
    queries = np.empty(((stop - first) * n, head_dim), np.float32)
    for r in range(len(queries)):
        for d in range(head_dim):
            queries[r, d] = heads[first + r // n, h * n + r % n, d] * factor
    start = max(0, positions[first] - window + 1) // PAGE * PAGE  # where the first visible page begins
    n_pages = (positions[stop - 1] - start) // PAGE + 1
    scores = np.zeros((len(queries), n_pages * PAGE), np.float32)
    # Numba compiles add_product() once for each kind of array, so all are slices, also where one is whole.
    for p in range(n_pages):
        keys = kv[page_table[start // PAGE + p], i, 0, h].reshape(head_dim, PAGE)
        add_product(queries[:, :head_dim], keys[:, :PAGE], scores[:, p * PAGE : (p + 1) * PAGE])
    totals = np.empty(len(queries), np.float32)
    for r in range(len(queries)):
        position = positions[first + r // n]
        low = max(0, position - window + 1) - start  # the row sees the keys from low
        end = position + 1 - start  # to end
        begin = low // PAGE * PAGE
        scores[r, :begin] = 0
        scores[r, begin:low] = -np.inf
        page_end = -(-end // PAGE) * PAGE  # the same pages, wherever the block begins
        scores[r, end:page_end] = -np.inf
        totals[r] = exponentials(scores[r, begin:page_end], sinks[h * n + r % n])
    sums = np.zeros_like(queries)
    n_seen = positions[first] + 1 - start  # by all rows; a key in front of a row's window counts 0
    for p in range(n_pages):
        values = kv[page_table[start // PAGE + p], i, 1, h, :PAGE, :head_dim]
        probs = scores[:, p * PAGE : (p + 1) * PAGE]
        n_all = min(PAGE, max(0, n_seen - p * PAGE))
        add_product(probs, values[:n_all], sums[:, :head_dim])
        for r in range(0, len(queries), n):  # behind those a row reads only what it sees: others may be NaN
            end = min(PAGE, positions[first + r // n] + 1 - start - p * PAGE)
            if end > n_all:
                add_product(probs[r : r + n, n_all:], values[n_all:end], sums[r : r + n, :head_dim])
    for r in range(len(queries)):
        for d in range(head_dim):
            y[first + r // n, h * n + r % n, d] = sums[r, d] / totals[r]


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
    for task in prange(len(blocks) * kv.shape[3]):
        attend_block(heads, kv, i, sinks, page_tables, positions, blocks, window, task, y)


KERNELS = (product, quantize, rms_norm, silu_product, rotate_and_cache, attention)
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


def compile_kernels(formats: Collection[str]) -> int:
    """Compile the kernels, or read them from where they are kept; return the threads for large products.

    These are as many as BLAS may use, so that one option limits both.
    """
    log.info("getting the kernels ready: the first start compiles them, which takes some twenty seconds")
    started = time.perf_counter()
    load_tbb()
    blas = [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    n_threads: int = min(max(blas, default=1), numba_config.NUMBA_NUM_THREADS)
    if n_threads > 1:
        try:
            compile_with(SHARED, formats)
        except ValueError as error:  # there is no threading layer; the message says what to install
            log.warning("one thread: %s", " ".join(str(error).split()))
            n_threads = 1
    compile_with({one: one for one in KERNELS}, formats)
    log.info("kernels ready in %.1f s", time.perf_counter() - started)
    return n_threads


def compile_with(kernels: dict[Any, Any], formats: Collection[str]) -> None:
    """Call each kernel once, the product once a format of weights."""
    rows = np.zeros((1, BLOCK), np.float32)
    quantized_rows = np.zeros((1, 1, X_WORDS), np.float32)
    y = np.zeros((1, WIDTH), np.float32)
    kernels[rms_norm](rows, rows[0], np.float32(1), rows.copy())
    kernels[silu_product](rows, rows[:, : BLOCK // 2].copy())
    kernels[quantize](rows, quantized_rows)
    for name in formats:
        w = pack_floats(rows).words.astype(FORMATS[name])
        x: NDArray[Any] = rows
        if name in N_SCALES:
            w = pack_blocks(quantized(rows, name)).words
            x = quantized_rows
        kernels[product](x, w, y)
    heads = np.zeros((1, 3, WIDTH), np.float32)
    kv = np.zeros((1, 1, 2, 1, PAGE, WIDTH), np.float32)
    zero = np.zeros((1, 1), np.int64)
    kernels[rotate_and_cache](heads, kv, 0, zero[0], zero[0], heads[0], True)
    y = np.zeros((1, 1, WIDTH), np.float32)
    kernels[attention](heads, kv, 0, rows[0], zero, zero[0], np.array([[0, 1, 0]]), 1, y)


# --- the ops ------------------------------------------------------------------------------------------------


class FastOps(NumpyOps):
    """NumpyOps, with kernels for what its ops are made of; for weights that were read with `pack`."""

    pack = staticmethod(pack)

    def __init__(
        self, config: Config, weights: Weights, max_seq_len: int, n_pages: int, max_batch: int
    ) -> None:
        super().__init__(config, weights, max_seq_len, n_pages, max_batch)
        panels = panels_of(weights)
        self._n_threads = compile_kernels({matrix.format for matrix in panels})
        # NumpyOps' memory in another order: each head's part of a page is one matrix, and keys lie across.
        c = config
        self._kv = self._kv.reshape(n_pages, c.n_layers, 2, c.n_kv_heads, PAGE, c.head_dim)
        self._turns: Array = self._rope.view(np.float32)  # (max_seq_len, head_dim)
        self._blocks: AttentionBlocks | None = None  # those of the batch that was computed last
        self._no_sinks = np.full(c.n_heads, -np.inf, np.float32)
        self.about = f"Numba, {self._n_threads} threads, {about(panels)}"

    @staticmethod
    def pack_as(weights: str) -> list[Packer]:
        """For read_weights(): how a key of WEIGHTS packs the matrices of the layers, and the outer ones."""
        return [partial(pack, name=name) for name in WEIGHTS[weights]]

    def embed(self, batch: Batch, weights: Weights) -> Array:
        if self._n_threads > 1:
            numba.set_num_threads(self._n_threads)  # it holds for the calling thread, whichever that is
        x: Array = weights.embed.take(batch.token_ids)
        return x

    def gate_up(self, x: Array, layer: Layer, batch: Batch) -> Array:
        normed = self._rms_norm(x, layer.mlp_norm)
        gate_up = self._linear(normed, layer.w_gate_up, layer.b_gate_up)
        h = np.empty((len(x), self.config.hidden_dim), np.float32)
        self._run(silu_product, 8 * h.size, gate_up, h)
        return h

    def _run(self, one: Any, n_multiplications: int, *arguments: Any) -> None:
        """Call a kernel, with all threads where that is worth their waking up."""
        if self._n_threads == 1 or n_multiplications <= SMALL:
            one(*arguments)
            return
        SHARED[one](*arguments)

    def _rms_norm(self, x: Array, w: Array) -> Array:
        rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        y = np.empty_like(rows)
        self._run(rms_norm, 4 * rows.size, rows, w, np.float32(self.config.norm_eps), y)
        return y.reshape(x.shape)

    def _linear(self, x: Array, w: Matrix, b: Array | None) -> Array:
        """x W^T + b"""
        n_panels, n_blocks = w.words.shape[:2]
        rows = np.ascontiguousarray(x)
        if w.is_quantized:
            words = np.empty((len(x), n_blocks, X_WORDS), np.float32)
            self._run(quantize, 4 * x.size, rows, words)
            rows = words
        elif w.format == "BF16" and w.n_in % 2:
            rows = np.pad(x, [(0, 0), (0, 1)])
        padded = np.empty((len(x), n_panels * WIDTH), np.float32)
        self._run(product, padded.size * w.n_in, rows, w.words, padded)
        y = np.ascontiguousarray(padded[:, : w.n_out])
        if b is not None:
            y += b
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
            self._blocks = AttentionBlocks(batch)
        blocks = self._blocks
        window = c.windows[i] or self.max_seq_len
        sinks = self._no_sinks if layer.sinks is None else layer.sinks
        y = np.empty((len(qkv), c.n_heads, c.head_dim), np.float32)
        arguments = self._kv, i, sinks, blocks.page_tables, batch.positions, blocks.rows, window
        self._run(attention, 2 * y[0].size * blocks.n_keys, heads, *arguments, y)
        return y.reshape(len(y), -1)


class AttentionBlocks:
    """How the attention of a batch is cut into tasks, the same in all layers: ATTENTION_ROWS of a span."""

    def __init__(self, batch: Batch) -> None:
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
        self.rows: Ints = np.array(rows, np.int64)  # (n_blocks, 3): first row, end of the rows, page table


def panels_of(weights: Weights) -> list[Panels]:
    """The matrices; one that is embedding and head is one."""
    arrays = {id(array): array for array in (weights.embed, weights.head)}
    for layer in weights.layers:
        arrays |= {id(array): array for array in vars(layer).values()}
    return [array for array in arrays.values() if isinstance(array, Panels)]


def about(panels: list[Panels]) -> str:
    """How large the weights are, and what packing has lost."""
    sizes = Counter[str]()
    for matrix in panels:
        sizes[matrix.format] += matrix.nbytes
    formats = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in sizes.most_common())
    size = f"{sum(sizes.values()) / 1e6:.0f} MB of weights ({formats})"
    lost = sum(matrix.lost for matrix in panels)
    if not lost:
        return f"{size}, as exact as in the file"
    percent = 100 * math.sqrt(lost / sum(matrix.total for matrix in panels))
    return f"{size}, changed by rounding by {percent:.2g} %"
