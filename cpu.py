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
5. Norms, and the attention of rows that are computed by themselves, are kernels too: for one token NumPy's
   calls take longer than what they do.

Not here: what the ops are (model.py), files (weights.py).
"""

import ctypes
import importlib.metadata
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import threadpoolctl
from numba import njit, prange
from numpy.typing import NDArray

from model import PAGE, Array, Batch, Ints, NumpyOps
from weights import Weights, widen

log = logging.getLogger("cpu")

WIDTH = 96  # outputs of a panel: six registers of AVX-512, twelve of AVX2
STEP = 4  # inputs that a sum takes between being read from the cache and written back
TILE = 4  # rows
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


@within_a_row
def one_head(q: Any, kv: Any, i: int, table: Any, first: int, end: int, h: int, y: Any) -> None:
    """y = softmax(q k^T) v of the heads q, (n, head_dim), that share key head h; kv is NumpyOps' pool."""
    n, head_dim = q.shape
    scores = np.empty((n, end - first), np.float32)
    for t in range(first, end):
        key = kv[table[t // PAGE], i, 0, h, t % PAGE]
        for g in range(n):
            total = np.float32(0)
            for d in range(head_dim):
                total += q[g, d] * key[d]
            scores[g, t - first] = total
    for g in range(n):
        scores[g] = np.exp(scores[g] - scores[g].max())
        scores[g] /= scores[g].sum()
    y[:] = 0
    for t in range(first, end):
        value = kv[table[t // PAGE], i, 1, h, t % PAGE]
        for g in range(n):
            p = scores[g, t - first]
            for d in range(head_dim):
                y[g, d] += p * value[d]


@kernel
def head(q: Any, kv: Any, i: int, tables: Any, firsts: Any, ends: Any, task: int, y: Any) -> None:
    """A row and a key head, of single rows: q and y (n_rows, n_heads, head_dim); row r sees what is from
    firsts[r] to ends[r].
    """
    n_kv_heads = kv.shape[3]
    n, r, h = q.shape[1] // n_kv_heads, task // n_kv_heads, task % n_kv_heads
    heads = slice(h * n, h * n + n)
    one_head(q[r, heads], kv, i, tables[r], firsts[r], ends[r], h, y[r, heads])


@kernel
def attention(q: Any, kv: Any, i: int, tables: Any, firsts: Any, ends: Any, y: Any) -> None:
    for task in range(len(q) * kv.shape[3]):
        head(q, kv, i, tables, firsts, ends, task, y)


@parallel_kernel
def shared_attention(q: Any, kv: Any, i: int, tables: Any, firsts: Any, ends: Any, y: Any) -> None:
    for task in prange(len(q) * kv.shape[3]):
        head(q, kv, i, tables, firsts, ends, task, y)


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
    row, q, at = np.zeros((1, STEP), np.float32), np.zeros((1, 1, 1), np.float32), np.zeros(1, np.int64)
    panels, kv = np.zeros((1, STEP, WIDTH), np.uint16), np.zeros((1, 1, 2, 1, PAGE, 1), np.float32)
    normed(row, row[0], np.float32(1), row.copy())
    product(row, panels, row.copy())
    attention(q, kv, 0, at[None], at, at + 1, q.copy())
    if n_threads > 1:
        try:
            shared_product(row, panels, row.copy())
            shared_attention(q, kv, 0, at[None], at, at + 1, q.copy())
        except ValueError as error:  # no threading layer; it says what to install
            log.warning("one thread: %s", " ".join(str(error).split()))
            n_threads = 1
    log.info("kernels ready in %.1f s", time.perf_counter() - started)
    return n_threads


# --- the ops ------------------------------------------------------------------------------------------------


class Alone(NamedTuple):
    """Rows that are computed by themselves, and what each of them sees."""

    rows: Ints  # of the batch
    tables: Ints  # (n, n_pages)
    firsts: Ints  # positions
    ends: Ints  # behind the last
    n_keys: int  # of all


class FastOps(NumpyOps):
    """NumpyOps by kernels, for weights that were read with `pack`."""

    pack = staticmethod(pack)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._n_threads = compiled()
        self._seen: Batch | None = None  # the batch that `_alone` is of
        self._alone: dict[int | None, Alone] = {}
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

    def _attend_all(self, q: Array, i: int, batch: Batch, y: Array) -> None:
        """Tiles as NumpyOps has them, the other rows each by itself, whoever is beside it."""
        alone = self._rows_alone(batch, self.config.windows[i])
        if len(alone.rows) < len(batch.groups):  # a step that only decodes has no tiles
            for group in batch.groups:
                if group.rows.stop - group.rows.start > 1:
                    self._attend_one(q[group.rows], i, group, y[group.rows])
        if len(alone.rows):
            answers = np.empty((len(alone.rows), *q.shape[1:]), np.float32)
            n_products = 2 * q[0].size * alone.n_keys
            attend = shared_attention if self._n_threads > 1 and n_products > SMALL else attention
            attend(q[alone.rows], self._kv, i, alone.tables, alone.firsts, alone.ends, answers)
            y[alone.rows] = answers.reshape(len(answers), -1)

    def _rows_alone(self, batch: Batch, window: int | None) -> Alone:
        """The rows of a batch that are groups of their own, the same in every layer with this window."""
        if self._seen is not batch:
            self._seen, self._alone = batch, {}
        if window not in self._alone:
            single = [n for n, rows in enumerate(batch.rows) if rows.stop - rows.start == 1]
            rows = np.array([batch.rows[n].start for n in single], np.int64)
            ends = batch.positions[rows] + 1
            firsts = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
            found = Alone(rows, batch.tables[single], firsts, ends, int((ends - firsts).sum()))
            self._alone[window] = found
        return self._alone[window]
