"""The ops on a processor at the speed of its memory: weights kept as bfloat16, kernels compiled by Numba.

    matrix in float32 --pack()--> Panels --FastOps--> the products of NumpyOps, at half the bytes

Decoding a token reads every weight once and uses it once, so it takes as long as the bytes of the weights
take to come from memory. Most checkpoints hold bfloat16, the upper half of a float32: widening it in a
register, by a shift, is exact, and costs nothing while the processor waits for memory. FastOps differs from
NumpyOps, the spec, in the order of its sums only; where Numba is not installed NumpyOps serves.

Authority: "Anatomy of High-Performance Matrix Multiplication" (Goto, van de Geijn 2008) for panels and tiles;
https://numba.readthedocs.io/en/stable/user/parallel.html for threads.

Rules of this file:
1. A panel holds WIDTH outputs side by side, input after input: a kernel reads memory from front to back, and
   a vector of the compiler is WIDTH sums, never a part of one sum.
2. Every sum runs over the inputs in their order, and each step of it is fused (rounded once). So a row has
   the same bits alone, in any batch and in a prefill chunk. Threads share out panels, which changes no sum.
3. Rows are computed in tiles of four, so that a weight is widened once for four; the rest one by one.
4. Packing loses no bit: a matrix with a value that bfloat16 cannot hold stays float32, and NumPy multiplies
   by it.
5. Norms and attention are kernels as well, also row by row. So no result depends on its neighbours, and no
   thread of BLAS, which spins while it waits for its next product, takes a core from ours.

Not here: what the ops are (model.py), reading files (checkpoint/weights.py).
"""

import ctypes
import importlib.metadata
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import threadpoolctl
from numba import njit, prange
from numpy.typing import NDArray

from checkpoint.config import Config
from checkpoint.weights import MATRICES, Layer, Matrix, Weights, widen
from model import PAGE, Array, Batch, Ints, NumpyOps

log = logging.getLogger("cpu")

WIDTH = 96  # outputs of a panel: six registers of AVX-512, twelve of AVX2
STEP = 4  # inputs that a sum takes between being read from the cache and written back
TILE = 4  # rows of a product that are computed together
BLOCK = 16  # rows of one sequence that attend together
LANES = 16  # numbers that softmax compares at a time
ARENA = 2**25  # numbers of packed matrices that lie in one piece of memory
SMALL = 2**18  # multiplications: one thread is done with fewer before a second has woken up

# With "tbb" the calling thread does what no other has begun, so it never waits for a thread that other work
# keeps from running. With "omp" all wait for all, and a thread without a processor stops the others: a tenth
# of the speed. "threadsafe" leaves out "workqueue", which takes 60 us to hand work over, and crashes when two
# engines of a process use it.
numba_config: Any = numba.config
numba_config.THREADING_LAYER = "threadsafe"
numba_config.THREADING_LAYER_PRIORITY = ["tbb", "omp", "workqueue"]

# --- the weights --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panels:
    """A matrix (n_out, n_in) of bfloat16, padded with zeros to whole panels and whole steps."""

    n_out: int
    n_in: int
    bits: NDArray[np.uint16]  # (n_panels, n_in, WIDTH)

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Some rows of the matrix, (len(rows), n_in)."""
        bits: NDArray[np.uint16] = self.bits[rows // WIDTH, : self.n_in, rows % WIDTH]
        return bits


class Arena:
    """Matrices side by side in large pieces of memory, which the system maps by huge pages.

    Where each matrix of a few MB has memory of its own, a fifth of the time goes into translating addresses.
    """

    def __init__(self) -> None:
        self._unused = np.empty(0, np.uint16)

    def zeros(self, *shape: int) -> NDArray[np.uint16]:
        n = math.prod(shape)
        if n > len(self._unused):
            self._unused = np.zeros(max(n, ARENA), np.uint16)
        array = self._unused[:n].reshape(shape)
        self._unused = self._unused[n:]
        return array


arena = Arena()


def pack(w: NDArray[Any]) -> Array | Panels:
    """Return the matrix as panels, or as it is where bfloat16 cannot hold it; uint16 is bfloat16."""
    n_out, n_in = w.shape
    upper = w
    if w.dtype != np.uint16:
        halves = w.view(np.uint16).reshape(n_out, n_in, 2)  # lower, upper: little-endian
        if halves[..., 0].any():
            return w
        upper = halves[..., 1]
    n_panels = math.ceil(n_out / WIDTH)
    n_steps = math.ceil(n_in / STEP)
    bits = arena.zeros(n_panels, n_steps * STEP, WIDTH)
    for panel, first in zip(bits, range(0, n_out, WIDTH), strict=True):
        rows = upper[first : first + WIDTH]
        panel[:n_in, : len(rows)] = rows.T
    return Panels(n_out, n_in, bits)


# --- the kernels --------------------------------------------------------------------------------------------
# In all of them x is (n_rows, n_in) float32, and w, a panel, is (n_in, WIDTH). The flag "contract" lets LLVM
# fuse a multiplication and an addition, and nothing else: it keeps the order of each sum.

LIBERTIES = {"contract"}


def can_cache() -> bool:
    """Is there a folder where Numba can keep what it has compiled? Without one each start compiles."""
    try:
        njit(cache=True)(can_cache)
    except RuntimeError:
        return False
    return True


CACHE = can_cache()
kernel = njit(nogil=True, cache=CACHE, fastmath=LIBERTIES)
parallel_kernel = njit(nogil=True, cache=CACHE, fastmath=LIBERTIES, parallel=True)


@njit(inline="always")
def widened(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@kernel
def one_row(x: Any, w: Any, y: Any) -> None:
    """y = x @ w for one row, (n_in,)."""
    sums = np.zeros(WIDTH, np.float32)
    for k in range(0, len(w), STEP):
        for j in range(WIDTH):
            total = sums[j]
            for i in range(STEP):
                total += x[k + i] * widened(w[k + i, j])
            sums[j] = total
    for j in range(len(y)):
        y[j] = sums[j]


@kernel
def four_rows(x: Any, w: Any, y: Any) -> None:
    """y = x @ w for TILE rows."""
    sums = np.zeros((TILE, WIDTH), np.float32)
    for k in range(0, len(w), STEP):
        for j in range(WIDTH):
            ws = (widened(w[k, j]), widened(w[k + 1, j]), widened(w[k + 2, j]), widened(w[k + 3, j]))
            for r in range(TILE):
                total = sums[r, j]
                for i in range(STEP):
                    total += x[r, k + i] * ws[i]
                sums[r, j] = total
    for r in range(TILE):
        for j in range(y.shape[1]):
            y[r, j] = sums[r, j]


@kernel
def panel(x: Any, w: Any, p: int, y: Any) -> None:
    """Compute the columns of y = x @ w that panel p of w, (n_panels, n_in, WIDTH), holds.

    The panel stays in the cache until all rows are multiplied by it.
    """
    columns = slice(p * WIDTH, min((p + 1) * WIDTH, y.shape[1]))
    n_tiled = len(x) // TILE * TILE
    for r in range(0, n_tiled, TILE):
        four_rows(x[r : r + TILE], w[p], y[r : r + TILE, columns])
    for r in range(n_tiled, len(x)):
        one_row(x[r], w[p], y[r, columns])


# One for a single thread, one for all. They are two functions, because the key of Numba's cache leaves out
# `parallel`: for one function compiled both ways it would return whichever was compiled first.


@kernel
def product(x: Any, w: Any, y: Any) -> None:
    for p in range(len(w)):
        panel(x, w, p, y)


@parallel_kernel
def shared_product(x: Any, w: Any, y: Any) -> None:
    for p in prange(len(w)):
        panel(x, w, p, y)


# For sums within a row the compiler may choose the order: it does so once, when it compiles, so that the
# order depends on nothing else in the batch.
row_kernel = njit(nogil=True, cache=CACHE, fastmath=LIBERTIES | {"reassoc"})


@row_kernel
def rms_norm(x: Any, w: Any, eps: Any, y: Any) -> None:
    """y = x / sqrt(mean(x^2) + eps) * w for each row; w (n,)."""
    for r in range(len(x)):
        total = np.float32(0)
        for d in range(len(w)):
            total += x[r, d] * x[r, d]
        scale = np.float32(1) / np.sqrt(total / np.float32(len(w)) + eps)
        for d in range(len(w)):
            y[r, d] = x[r, d] * scale * w[d]


# --- attention ----------------------------------------------------------------------------------------------
# Row by row: which keys a row sees, and in which order, follows from its position alone. The rows of a block
# are computed together only to share what is read from memory. In a page the keys of a head lie across, as a
# matrix (head_dim, PAGE), so that the scores of a page are a product like any other.


@njit(inline="always")
def add_product(x: Any, w: Any, y: Any) -> None:
    """y += x @ w for one row, x (n,), w (n, n_out) float32."""
    n = len(x) // STEP * STEP
    for k in range(0, n, STEP):
        for j in range(len(y)):
            total = y[j]
            for i in range(STEP):
                total += x[k + i] * w[k + i, j]
            y[j] = total
    for k in range(n, len(x)):
        for j in range(len(y)):
            y[j] += x[k] * w[k, j]


@njit(inline="always")
def exp(x: Any) -> Any:
    """e^x for x <= 0: 2^n times the Taylor series of e^r, |r| <= ln(2) / 2; 0 below -87."""
    x = max(x, UNDERFLOW)
    n = np.floor(x * LOG2_E + HALF)
    r = x - n * LN_2
    series = TAYLOR[0]
    for c in TAYLOR[1:]:
        series = series * r + c
    return series * np.int32(np.int32(n + BIAS) << np.int32(23)).view(np.float32)


HALF = np.float32(0.5)
BIAS = np.float32(127)  # of a float32's exponent
UNDERFLOW = np.float32(-88)
LN_2 = np.float32(math.log(2))
LOG2_E = np.float32(1 / math.log(2))
TAYLOR = tuple(np.float32(1 / math.factorial(k)) for k in range(7, -1, -1))


@row_kernel
def softmax(s: Any, sink: Any) -> None:
    """Softmax of s and a sink, in place and without the sink's; len(s) is a multiple of LANES."""
    maxima = s[:LANES].copy()  # one a lane, so that the compiler compares LANES numbers at once
    for j in range(LANES, len(s), LANES):
        for i in range(LANES):
            maxima[i] = max(maxima[i], s[j + i])
    maximum = max(maxima.max(), sink)
    total = exp(sink - maximum)
    for j in range(len(s)):
        s[j] = exp(s[j] - maximum)
        total += s[j]
    for j in range(len(s)):
        s[j] /= total


@kernel
def attend_block(
    q: Any,
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
    n_kv_heads = kv.shape[3]
    head_dim = q.shape[2]
    n = q.shape[1] // n_kv_heads  # query heads that share a key head
    h = task % n_kv_heads
    first, stop, table_number = blocks[task // n_kv_heads]
    page_table = page_tables[table_number]
    start = max(0, positions[first] - window + 1) // PAGE * PAGE  # where the first visible page begins
    n_pages = (positions[stop - 1] - start) // PAGE + 1
    scores = np.zeros((stop - first, n, n_pages * PAGE), np.float32)
    for p in range(n_pages):
        keys = kv[page_table[start // PAGE + p], i, 0, h].reshape(head_dim, PAGE)
        for r in range(first, stop):
            for g in range(n):
                add_product(q[r, h * n + g], keys, scores[r - first, g, p * PAGE : (p + 1) * PAGE])
    for r in range(first, stop):
        low = max(0, positions[r] - window + 1) - start  # the row sees the keys from low
        end = positions[r] + 1 - start  # to end
        pages = slice(low // PAGE * PAGE, -(-end // PAGE) * PAGE)  # the same, wherever the block begins
        for g in range(n):
            scores[r - first, g, :low] = -np.inf
            scores[r - first, g, end:] = -np.inf
            softmax(scores[r - first, g, pages], sinks[h * n + g])
    y[first:stop, h * n : h * n + n] = 0
    for p in range(n_pages):
        values = kv[page_table[start // PAGE + p], i, 1, h]
        begin = p * PAGE
        for r in range(first, stop):
            end = positions[r] + 1 - start
            if begin + PAGE > end - window:
                for g in range(n):
                    probs = scores[r - first, g, begin : min(begin + PAGE, end)]
                    add_product(probs, values, y[r, h * n + g])


@kernel
def attention(
    q: Any, kv: Any, i: int, sinks: Any, page_tables: Any, positions: Any, blocks: Any, window: int, y: Any
) -> None:
    """y = softmax(q k^T) v in layer i; a row sees itself and the window - 1 tokens before it.

    q, scaled, and y are (n_rows, n_heads, head_dim), sinks (n_heads,) are -inf in a model without, kv is
    FastOps' page pool, blocks (n_blocks, 3) has the
    first row of each, the end of its rows, and the number of their page table.
    """
    for task in range(len(blocks) * kv.shape[3]):
        attend_block(q, kv, i, sinks, page_tables, positions, blocks, window, task, y)


@parallel_kernel
def shared_attention(
    q: Any, kv: Any, i: int, sinks: Any, page_tables: Any, positions: Any, blocks: Any, window: int, y: Any
) -> None:
    for task in prange(len(blocks) * kv.shape[3]):
        attend_block(q, kv, i, sinks, page_tables, positions, blocks, window, task, y)


def load_tbb() -> None:
    """Load oneTBB from where pip has put it: neither Numba nor the system looks there."""
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name in ("libtbb.so.12", "tbb12.dll"):
            ctypes.CDLL(str(file.locate()))


def compile_kernels() -> int:
    """Compile the kernels, or read them from __pycache__; return the number of threads for large products.

    These are as many as BLAS may use, so that one option limits both.
    """
    log.info("getting the kernels ready: the first start compiles them, which takes about ten seconds")
    started = time.perf_counter()
    load_tbb()
    blas = [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    n_threads: int = min(max(blas, default=1), numba_config.NUMBA_NUM_THREADS)
    row = np.zeros((1, STEP), np.float32)
    panels = np.zeros((1, STEP, WIDTH), np.uint16)
    q = np.zeros((1, 1, 1), np.float32)
    kv = np.zeros((1, 1, 2, 1, PAGE, 1), np.float32)
    page_tables = np.zeros((1, 1), np.int64)
    positions = np.zeros(1, np.int64)
    blocks = np.array([[0, 1, 0]])
    attention_arguments = q, kv, 0, row[0], page_tables, positions, blocks, 1, q.copy()
    rms_norm(row, row[0], np.float32(1), row.copy())
    product(row, panels, row.copy())
    attention(*attention_arguments)
    if n_threads > 1:
        try:
            shared_product(row, panels, row.copy())
            shared_attention(*attention_arguments)
        except ValueError as error:  # there is no threading layer; the message says what to install
            log.warning("one thread: %s", " ".join(str(error).split()))
            n_threads = 1
    log.info("kernels ready in %.1f s", time.perf_counter() - started)
    return n_threads


# --- the ops ------------------------------------------------------------------------------------------------


class FastOps(NumpyOps):
    """NumpyOps, with kernels for what its ops are made of; for weights that were read with `pack`."""

    pack = staticmethod(pack)

    def __init__(
        self, config: Config, weights: Weights, max_seq_len: int, n_pages: int, max_batch: int
    ) -> None:
        super().__init__(config, weights, max_seq_len, n_pages, max_batch)
        self._n_threads = compile_kernels()
        # NumpyOps' memory in another order: each head's part of a page is one matrix, and keys lie across.
        c = config
        self._kv = self._kv.reshape(n_pages, c.n_layers, 2, c.n_kv_heads, PAGE, c.head_dim)
        self._keys = self._kv[:, :, 0].reshape(n_pages, c.n_layers, c.n_kv_heads, c.head_dim, PAGE)
        assert np.shares_memory(self._keys, self._kv)
        self._blocks: AttentionBlocks | None = None  # those of the batch that was computed last
        self._no_sinks = np.full(c.n_heads, -np.inf, np.float32)
        self.chunk_invariant = not any(is_float32(w) for w in matrices(weights))
        size = f"{weights.nbytes / 1e6:.0f} MB of weights, in bfloat16 where that is exact"
        self.about = f"Numba, {self._n_threads} threads, {size}"

    def embed(self, batch: Batch, weights: Weights) -> Array:
        if not isinstance(weights.embed, Panels):
            return super().embed(batch, weights)
        x = np.empty((len(batch.token_ids), self.config.dim), np.float32)
        widen(weights.embed.take(batch.token_ids), x)
        return x

    def _rms_norm(self, x: Array, w: Array) -> Array:
        rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        y = np.empty_like(rows)
        rms_norm(rows, w, np.float32(self.config.norm_eps), y)
        return y.reshape(x.shape)

    def _linear(self, x: Array, w: Matrix, b: Array | None, row_groups: Sequence[slice]) -> Array:
        """x W^T + b; every row is a group by itself (rule 2)."""
        if not isinstance(w, Panels):
            return super()._linear(x, w, b, row_groups)
        y = np.empty((len(x), w.n_out), np.float32)
        if w.n_in % STEP:
            x = np.pad(x, [(0, 0), (0, w.bits.shape[1] - w.n_in)])
        if self._n_threads > 1 and len(x) * w.bits.size > SMALL:
            numba.set_num_threads(self._n_threads)  # it holds for the calling thread, whichever that is
            shared_product(x, w.bits, y)
        else:
            product(x, w.bits, y)
        if b is not None:
            y += b
        return y

    def _write_cache(self, k: Array, v: Array, i: int, batch: Batch) -> None:
        self._keys[batch.pages, i, :, :, batch.offsets] = k
        self._kv[batch.pages, i, 1, :, batch.offsets] = v

    def _attention(self, q: Array, layer: Layer, i: int, batch: Batch) -> Array:
        if self._blocks is None or self._blocks.batch is not batch:
            self._blocks = AttentionBlocks(batch)
        blocks = self._blocks
        window = self.config.windows[i] or self.max_seq_len
        attend = shared_attention
        if self._n_threads == 1 or 2 * q[0].size * blocks.n_keys <= SMALL:
            attend = attention
        scaled = q * np.float32(self.config.head_dim**-0.5)
        y = np.empty_like(scaled)
        sinks = self._no_sinks if layer.sinks is None else layer.sinks
        attend(scaled, self._kv, i, sinks, blocks.page_tables, batch.positions, blocks.rows, window, y)
        return y.reshape(len(y), -1)


class AttentionBlocks:
    """How the attention of a batch is cut into tasks: BLOCK rows of a group each, the same in all layers."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.n_keys = int(batch.positions.sum()) + len(batch.positions)  # seen by all rows, without a window
        rows: list[tuple[int, int, int]] = []
        for number, group in enumerate(batch.groups):
            for first in range(group.rows.start, group.rows.stop, BLOCK):
                rows.append((first, min(first + BLOCK, group.rows.stop), number))
        self.rows: Ints = np.array(rows, np.int64)  # (n_blocks, 3): first row, end of the rows, page table
        longest = max(len(group.pages) for group in batch.groups)
        self.page_tables: Ints = np.zeros((len(batch.groups), longest), np.int64)  # filled up with 0
        for page_table, group in zip(self.page_tables, batch.groups, strict=True):
            page_table[: len(group.pages)] = group.pages


def is_float32(w: Matrix) -> bool:
    return isinstance(w, np.ndarray) and w.dtype == np.float32


def matrices(weights: Weights) -> list[Matrix]:
    """The matrices of all layers, and the head."""
    found = [weights.head]
    for layer in weights.layers:
        found += [matrix for name, matrix in vars(layer).items() if name in MATRICES and matrix is not None]
    return found
