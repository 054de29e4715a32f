"""Products at the speed of memory: weights kept as bfloat16, multiplied by kernels that Numba compiles.

    matrix in float32 --pack()--> Panels --FastOps--> the products of NumpyOps, at half the bytes

To decode a token is to read every weight once and use it once, so a token takes as long as its bytes take
from memory. Most checkpoints hold bfloat16, the upper half of a float32: widening it in a register, a shift,
is exact and costs nothing while memory is waited for. Only the order of the sums differs from NumpyOps, which
is the spec, and what computes where Numba is not installed.

Authority: "Anatomy of High-Performance Matrix Multiplication" (Goto, van de Geijn 2008) for panels and tiles;
Numba's https://numba.readthedocs.io/en/stable/user/parallel.html for threads.

Rules of this file:
1. A panel holds WIDTH outputs side by side, input after input: a kernel reads memory from front to back, and
   what the compiler makes a vector is WIDTH sums, never a part of one.
2. Every sum runs over the inputs in their order, each step fused (one rounding). So a row has the same bits
   alone, in any batch and in a prompt; threads share out panels, and change nothing.
3. Rows are taken by fours: a weight that has been widened serves four. What is left is taken one by one.
4. No bit is lost: a matrix with a value that bfloat16 cannot hold stays as it is, and NumPy multiplies by it.
5. Norms and attention are kernels too, row by row as well. So nothing here depends on what else is computed,
   and no thread of BLAS, which waits for its next product by spinning, is in the way of ours.

Not here: what the ops are (model.py), files (checkpoint/weights.py).
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

from checkpoint.weights import Weights, widen
from model import PAGE, Array, Batch, Ints, NumpyOps

log = logging.getLogger("cpu")

WIDTH = 96  # outputs of a panel: six registers of AVX-512, twelve of AVX2
STEP = 4  # inputs that a sum takes between being read from the cache and written back
TILE = 4  # rows of a product that are computed together
ROWS = 16  # of a sequence, that attend together
LANES = 16  # numbers that are compared at a time
BLOCK = 2**25  # numbers of packed matrices that lie in one piece of memory
SMALL = 2**18  # multiplications: fewer are done before a second thread has woken up

# With "tbb" the calling thread does what no other has begun, so beside other work it waits for nobody. With
# "omp" each waits for all, and one that has no processor stops the others: a tenth of the speed. "threadsafe"
# leaves out "workqueue", which takes 60 us to hand work over, and dies when two engines in a process use it.
config: Any = numba.config
config.THREADING_LAYER = "threadsafe"
config.THREADING_LAYER_PRIORITY = ["tbb", "omp", "workqueue"]

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
        """Some of its rows, (len(rows), n_in)."""
        found: NDArray[np.uint16] = self.bits[rows // WIDTH, : self.n_in, rows % WIDTH]
        return found


class Blocks:
    """Zeros side by side in large pieces, which the system maps by huge pages: where each matrix of a few
    MB has memory of its own, a fifth of the time goes into looking up its pages.
    """

    def __init__(self) -> None:
        self._rest = np.empty(0, np.uint16)

    def zeros(self, *shape: int) -> NDArray[np.uint16]:
        n = math.prod(shape)
        if n > len(self._rest):
            self._rest = np.zeros(max(n, BLOCK), np.uint16)
        found, self._rest = self._rest[:n], self._rest[n:]
        return found.reshape(shape)


blocks = Blocks()


def pack(w: Array) -> Array | Panels:
    """The matrix by panels, or as it came where bfloat16 cannot hold it."""
    (n_out, n_in), halves = w.shape, w.view(np.uint16).reshape(*w.shape, 2)  # lower, upper: little-endian
    if halves[..., 0].any():
        return w
    n_panels, n_steps = -(-n_out // WIDTH), -(-n_in // STEP)
    bits = blocks.zeros(n_panels, n_steps * STEP, WIDTH)
    for panel, first in zip(bits, range(0, n_out, WIDTH), strict=True):
        rows = halves[first : first + WIDTH, :, 1]
        panel[:n_in, : len(rows)] = rows.T
    return Panels(n_out, n_in, bits)


# --- the kernels --------------------------------------------------------------------------------------------
# In all of them x is (n_rows, n_in) float32, w (n_in, WIDTH) a panel. "contract" allows the fused step and no
# other liberty: LLVM keeps the order of each sum.

LIBERTIES = {"contract"}


def may_keep() -> bool:
    """Is there a folder in which Numba can keep what it compiles? Without one each start compiles."""
    try:
        njit(cache=True)(may_keep)
    except RuntimeError:
        return False
    return True


CACHE = may_keep()
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
    """The columns of y = x @ w that panel p of w, (n_panels, n_in, WIDTH), holds: it stays in the cache until
    all rows have had it.
    """
    columns, n_tiled = slice(p * WIDTH, min((p + 1) * WIDTH, y.shape[1])), len(x) // TILE * TILE
    for r in range(0, n_tiled, TILE):
        four_rows(x[r : r + TILE], w[p], y[r : r + TILE, columns])
    for r in range(n_tiled, len(x)):
        one_row(x[r], w[p], y[r, columns])


# By one thread and by all. They are functions of their own, for Numba's cache does not tell `parallel` apart:
# of one function it would give the first that was compiled, whichever is asked for.


@kernel
def product(x: Any, w: Any, y: Any) -> None:
    for p in range(len(w)):
        panel(x, w, p, y)


@parallel_kernel
def shared_product(x: Any, w: Any, y: Any) -> None:
    for p in prange(len(w)):
        panel(x, w, p, y)


# Sums whose order the compiler may choose: the same whatever stands around, for it chooses when it compiles.
within_a_row = njit(nogil=True, cache=CACHE, fastmath=LIBERTIES | {"reassoc"})


@within_a_row
def normed(x: Any, w: Any, eps: Any, y: Any) -> None:
    """RMSNorm of each row; w (n,)."""
    for r in range(len(x)):
        total = np.float32(0)
        for d in range(len(w)):
            total += x[r, d] * x[r, d]
        scale = np.float32(1) / np.sqrt(total / np.float32(len(w)) + eps)
        for d in range(len(w)):
            y[r, d] = x[r, d] * scale * w[d]


# --- attention ----------------------------------------------------------------------------------------------
# Row by row: what a row sees, and in which order, follows from its position. Rows share what is read.
# Keys lie in their page across, so that a page is a matrix (head_dim, PAGE) and its scores are a product too.


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


HALF, BIAS, UNDERFLOW = np.float32(0.5), np.float32(127), np.float32(-88)
LN_2, LOG2_E = np.float32(math.log(2)), np.float32(1 / math.log(2))
TAYLOR = tuple(np.float32(1 / math.factorial(k)) for k in range(7, -1, -1))


@within_a_row
def softmax(s: Any) -> None:
    """In place; len(s) is a multiple of LANES."""
    tops = s[:LANES].copy()
    for j in range(LANES, len(s), LANES):
        for i in range(LANES):
            tops[i] = max(tops[i], s[j + i])
    top, total = tops.max(), np.float32(0)
    for j in range(len(s)):
        s[j] = exp(s[j] - top)
        total += s[j]
    for j in range(len(s)):
        s[j] /= total


@kernel
def one_head(
    q: Any, kv: Any, i: int, tables: Any, positions: Any, blocks: Any, window: int, task: int, y: Any
) -> None:
    """y = softmax(q k^T) v for the rows of a block and the heads that share a key head; see attention()."""
    n_kv_heads, head_dim = kv.shape[3], q.shape[2]
    n, h, (first, stop, t) = q.shape[1] // n_kv_heads, task % n_kv_heads, blocks[task // n_kv_heads]
    table = tables[t]
    start = max(0, positions[first] - window + 1) // PAGE * PAGE  # of the first page that is seen
    n_pages = (positions[stop - 1] - start) // PAGE + 1
    scores = np.zeros((stop - first, n, n_pages * PAGE), np.float32)
    for p in range(n_pages):
        keys = kv[table[start // PAGE + p], i, 0, h].reshape(head_dim, PAGE)
        for r in range(first, stop):
            for g in range(n):
                add_product(q[r, h * n + g], keys, scores[r - first, g, p * PAGE : (p + 1) * PAGE])
    for r in range(first, stop):
        low, end = max(0, positions[r] - window + 1) - start, positions[r] + 1 - start  # what it sees
        whole = slice(low // PAGE * PAGE, -(-end // PAGE) * PAGE)  # the same, wherever the block begins
        for g in range(n):
            scores[r - first, g, :low] = -np.inf
            scores[r - first, g, end:] = -np.inf
            softmax(scores[r - first, g, whole])
    y[first:stop, h * n : h * n + n] = 0
    for p in range(n_pages):
        values, begin = kv[table[start // PAGE + p], i, 1, h], p * PAGE
        for r in range(first, stop):
            end = positions[r] + 1 - start
            if begin + PAGE > end - window:
                for g in range(n):
                    part = scores[r - first, g, begin : min(begin + PAGE, end)]
                    add_product(part, values, y[r, h * n + g])


@kernel
def attention(q: Any, kv: Any, i: int, tables: Any, positions: Any, blocks: Any, window: int, y: Any) -> None:
    """q, y (n_rows, n_heads, head_dim); kv: NumpyOps' pool, its keys across; blocks (n, 3): rows from, to,
    and the number of their page table. A row sees what is less than `window` before it.
    """
    for task in range(len(blocks) * kv.shape[3]):
        one_head(q, kv, i, tables, positions, blocks, window, task, y)


@parallel_kernel
def shared_attention(
    q: Any, kv: Any, i: int, tables: Any, positions: Any, blocks: Any, window: int, y: Any
) -> None:
    for task in prange(len(blocks) * kv.shape[3]):
        one_head(q, kv, i, tables, positions, blocks, window, task, y)


def load_tbb() -> None:
    """Where pip has put it neither Numba nor the system looks for it."""
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name in ("libtbb.so.12", "tbb12.dll"):
            ctypes.CDLL(str(file.locate()))


def compiled() -> int:
    """Compile the kernels, or read them from __pycache__; how many threads there are for large products.

    As many as BLAS may use, so that one option limits both.
    """
    log.info("getting the kernels ready: the first start compiles them, which takes about ten seconds")
    started = time.perf_counter()
    load_tbb()
    blas = [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    n_threads: int = min(max(blas, default=1), config.NUMBA_NUM_THREADS)
    row, panels = np.zeros((1, STEP), np.float32), np.zeros((1, STEP, WIDTH), np.uint16)
    q, kv = np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, 2, 1, PAGE, 1), np.float32)
    at = np.zeros((1, 1), np.int64)
    attended = q, kv, 0, at, at[0], np.array([[0, 1, 0]]), 1, q.copy()
    normed(row, row[0], np.float32(1), row.copy())
    product(row, panels, row.copy())
    attention(*attended)
    if n_threads > 1:
        try:
            shared_product(row, panels, row.copy())
            shared_attention(*attended)
        except ValueError as error:  # no threading layer; it says what to install
            log.warning("one thread: %s", " ".join(str(error).split()))
            n_threads = 1
    log.info("kernels ready in %.1f s", time.perf_counter() - started)
    return n_threads


# --- the ops ------------------------------------------------------------------------------------------------


class FastOps(NumpyOps):
    """NumpyOps by kernels, for weights that were read with `pack`."""

    pack = staticmethod(pack)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._n_threads = compiled()
        pages, (head_dim, page) = self._kv[:, :, 0], (self.config.head_dim, PAGE)
        self._keys: Array = pages.reshape(*pages.shape[:3], head_dim, page)  # the same memory, keys across
        assert np.shares_memory(self._keys, self._kv)
        self._seen: Batch | None = None  # the batch that the next two are of
        self._blocks, self._n_keys = np.empty((0, 3), np.int64), 0
        self.chunk_invariant = all(isinstance(w, Panels) for w in matrices(self.weights))
        size = f"{self.weights.nbytes / 1e6:.0f} MB of weights, in bfloat16 where that is exact"
        self.about = f"Numba, {self._n_threads} threads, {size}"

    def embed(self, batch: Batch, weights: Weights) -> Array:
        if not isinstance(weights.embed, Panels):
            return super().embed(batch, weights)
        x = self._buffer("x", len(batch.token_ids), self.config.dim)
        widen(weights.embed.take(batch.token_ids), x)
        return x

    def _linear(self, name: str, x: Array, w: Any, b: Array | None, groups: Sequence[slice]) -> Array:
        """x @ w.T + b; every row is a group of its own (rule 2)."""
        if not isinstance(w, Panels):
            return super()._linear(name, x, w, b, groups)
        y = self._buffer(name, len(x), w.n_out)
        padded = np.pad(x, [(0, 0), (0, w.bits.shape[1] - w.n_in)]) if w.n_in % STEP else x
        if self._n_threads > 1 and len(x) * w.bits.size > SMALL:
            numba.set_num_threads(self._n_threads)  # of this thread, whichever calls
            shared_product(padded, w.bits, y)
        else:
            product(padded, w.bits, y)
        if b is not None:
            y += b
        return y

    def _rms_norm(self, x: Array, w: Array) -> Array:
        y = self._buffer("normed", *x.shape)
        normed(x, w, np.float32(self.config.norm_eps), y)
        return y

    def _keep(self, k: Array, v: Array, i: int, batch: Batch) -> None:
        self._keys[batch.pages, i, :, :, batch.places] = k
        self._kv[batch.pages, i, 1, :, batch.places] = v

    def _attend_all(self, q: Array, i: int, batch: Batch, y: Array) -> None:
        if self._seen is not batch:
            self._seen, self._blocks = batch, blocks_of(batch)
            self._n_keys = int(batch.positions.sum()) + len(q)  # of all rows, as far as no window hides them
        window = self.config.windows[i] or self.max_seq_len
        is_small = 2 * q[0].size * self._n_keys <= SMALL
        attend = attention if self._n_threads == 1 or is_small else shared_attention
        where = batch.tables, batch.positions, self._blocks, window
        attend(np.ascontiguousarray(q), self._kv, i, *where, y.reshape(q.shape))


def matrices(weights: Weights) -> list[Any]:
    parts = [part for layer in weights.layers for part in vars(layer).values()]
    return [w for w in (weights.head, *parts) if w is not None and getattr(w, "ndim", 2) == 2]


def blocks_of(batch: Batch) -> Ints:
    """Rows of one sequence that attend together: from, to, the number of their group. (n, 3)"""
    return np.array(
        [
            (first, min(first + ROWS, group.rows.stop), n)
            for n, group in enumerate(batch.groups)
            for first in range(group.rows.start, group.rows.stop, ROWS)
        ]
    )
