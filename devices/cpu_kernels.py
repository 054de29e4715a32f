"""The kernels of a CPU besides the product of a tile: inputs of products, attention, and threads.

    x, Panels --product()--> x W^T      x --rms_norm(), silu_product(), store_rows()--> the input of a product
    heads --rotate_and_cache()--> KV cache --attention()--> y

Numba compiles them. They declare no types, because Numba takes those of the arguments; the docstrings give
the shapes. Each kernel that has a prange is compiled twice: for one thread, and for all (shared).

Authority: https://numba.readthedocs.io/en/stable/user/parallel.html for threads; for attention in pieces
"Self-attention Does Not Need O(n^2) Memory" (https://arxiv.org/abs/2112.05682).

Rules of this file:
1. Every sum runs over the inputs in their order (microkernel.py). So a row has the same bits alone, in any
   batch and in a prefill chunk. Threads share out panels, rows and blocks of attention, never a sum.
2. Norms and attention are kernels as well, also row by row. So no result depends on its neighbours, and no
   thread of BLAS, which spins while it waits for its next product, takes a core from ours.

Not here: the ops (cpu.py), how weights become panels (panels.py), the loop of all products (microkernel.py).
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
from filelock import FileLock, Timeout
from numba import jit, njit, prange, types
from numba.core import event
from numba.extending import overload

import sampling
from checkpoint.default_model import HubError
from devices import microkernel
from devices.kernels import cache_file
from devices.microkernel import AHEAD, BLOCK, WIDTH, X_DTYPE, X_HEADER
from model import PAGE
from sampling import UNDERFLOW

log = logging.getLogger("cpu")

ATTENTION_ROWS = 32  # rows of one sequence that attend together
SPAN = 8 * PAGE  # keys that they attend to at once

# With "tbb" the calling thread does the work that no other has begun, so it never waits for a thread that
# other work keeps from running. With "omp" all threads wait for all, and a thread without a processor stops
# the others: a tenth of the speed. "threadsafe" leaves out "workqueue", which takes 60 us to hand work over,
# and crashes when two engines of a process use it.
numba_config: Any = numba.config
numba_config.THREADING_LAYER = "threadsafe"
numba_config.THREADING_LAYER_PRIORITY = ["tbb", "omp", "workqueue"]

# The flag "contract" lets LLVM fuse a multiplication and an addition, and nothing else: it keeps the order of
# each sum. For sums within a row the compiler may choose the order ("reassoc"), so that it depends on nothing
# else in the batch; such a sum is a function of its own, because a kernel is compiled twice.

LIBERTIES = {"contract"}
ROW_LIBERTIES = LIBERTIES | {"reassoc", "nnan", "nsz"}


def can_cache() -> bool:
    """True if Numba has a folder to keep what it has compiled. Without one each start compiles."""
    try:
        if not numba_config.CACHE_DIR:  # $NUMBA_CACHE_DIR
            folder = cache_file()  # beside each module, Numba would use old ones after another has changed
            folder.mkdir(parents=True, exist_ok=True)  # else Numba would use another one
            numba_config.CACHE_DIR = str(folder)
        njit(cache=True)(can_cache)
    except (RuntimeError, OSError, HubError) as error:  # HubError: without a home
        log.warning("each start compiles the kernels, for they cannot be kept (%s): set LLMREF_CACHE", error)
        return False
    return True


class Announcer(event.Listener):
    """Logs that compiling has begun. A start that finds every kernel in Numba's cache compiles nothing."""

    has_begun = False

    def on_start(self, event: Any) -> None:
        if not self.has_begun:
            self.has_begun = True
            log.info("compiling the kernels, which takes most of a minute, or longer on a busy machine")

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def compiling() -> Iterator[None]:
    """Let one process compile, and say so; processes that wait for it then read its cache."""
    with ExitStack() as stack:
        if OPTIONS["cache"]:
            lock = FileLock(Path(numba_config.CACHE_DIR) / "lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                log.info("waiting for another process, which gets the kernels ready")
                lock.acquire()
            stack.callback(lock.release)
        stack.enter_context(event.install_listener("numba:compile", Announcer()))
        yield


# The error model: a check of each divisor would keep a loop from becoming vector code. A leaf allocates
# nothing, so that Numba need not count who uses an array: two atomic instructions for each slice took half of
# the time of some kernels.
OPTIONS: dict[str, Any] = {"nogil": True, "cache": can_cache(), "error_model": "numpy"}
kernel = njit(fastmath=LIBERTIES, **OPTIONS)
LEAF: Any = {"error_model": "numpy", "fastmath": LIBERTIES, "_nrt": False}
leaf = njit(**OPTIONS | LEAF)
row_kernel = njit(fastmath=ROW_LIBERTIES, **OPTIONS)


@cache
def shared(one: Any) -> Any:
    """A kernel with prange, compiled once more, for all threads; the other is for one.

    It needs a name of its own: the key of Numba's cache leaves out `parallel`, so for one function compiled
    both ways it would return whichever was compiled first.
    """
    function = one.py_func
    copy = FunctionType(function.__code__, function.__globals__, f"shared_{function.__name__}")
    copy.__qualname__ = copy.__name__
    return jit(parallel=True, cache=OPTIONS["cache"], **one.targetoptions)(copy)


add_rows: Any = microkernel.add_rows  # Numba gives it the types and the code; mypy sees the generator

# --- products -----------------------------------------------------------------------------------------------


@leaf
def product(x, words, y, residual):
    """y = x W^T and residual += y; a panel stays in the cache until all rows are multiplied by it.

    x (n_rows, ...), words (n_panels, n_blocks), y (n_rows, n_panels * WIDTH), residual (n_rows, n_out) or
    (0, 0).
    """
    for p in prange(len(words)):
        first = p * WIDTH
        sums = y[:, first : first + WIDTH]
        add_rows(x, words[p], sums, False, AHEAD)
        for r in range(len(residual)):
            for j in range(min(WIDTH, residual.shape[1] - first)):
                residual[r, first + j] += sums[r, j]


# --- what goes into a product -------------------------------------------------------------------------------

X_MAX = np.float32(32767)  # 16 bits; the largest sum, of 32 products with 128, is below 2^31
LEAST_SIZE = np.int32(27 << 23)  # the bits of 2^-100: the largest number of a block is at least this
NO_SIGN = np.int32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)  # the bits; those of NaN are above
NAN = np.uint16(0x7FC0)
SIXTEEN = np.uint32(16)


def store_row(row, y):
    """Write a row (n,) float32 in the form that a product takes: by the dtype of y, as one of these three."""


def as_floats(row, y):
    for d in range(len(row)):
        y[d] = row[d]
    y[len(row) :] = 0


@njit(inline="always")
def bfloat16(number):
    """Round to bfloat16, ties to even; NaN stays."""
    bits = np.float32(number).view(np.uint32)
    up = np.uint32(0x7FFF) + ((bits >> SIXTEEN) & np.uint32(1))
    is_number = (bits & np.uint32(NO_SIGN)) <= INFINITY
    return np.uint16((bits + up) >> SIXTEEN) if is_number else NAN


def as_bfloat16(row, y):
    for d in range(len(row)):
        y[d] = bfloat16(row[d])
    y[len(row) :] = 0


def as_blocks(row, y):
    """Round to 16 bits with a scale for each BLOCK.

    y (n_blocks, 2 * X_WORDS) int16: two float32, the scale and the scale times the sum of the numbers; then
    the numbers. The largest is found in the bits: without the sign these are in the order of the numbers, and
    those of NaN are above.
    """
    headers = y.view(np.float32)
    for k in range(len(y)):
        some = row[k * BLOCK : (k + 1) * BLOCK]
        numbers = y[k, 2 * X_HEADER :]
        bits = some.view(np.int32)
        largest_bits = LEAST_SIZE
        for i in range(len(some)):
            largest_bits = max(largest_bits, bits[i] & NO_SIGN)
        size = np.int32(largest_bits).view(np.float32)
        factor = X_MAX / size
        total = np.int32(0)
        for i in range(len(some)):
            number = np.int32(np.rint(some[i] * factor))
            total += number
            numbers[i] = number
        headers[k, 0] = size / X_MAX
        headers[k, 1] = headers[k, 0] * np.float32(total)


FORMS = {types.float32: as_floats, types.uint16: as_bfloat16, types.int16: as_blocks}


# Inlined: its calls took a fifth of the time of attention.
@overload(store_row, jit_options=LEAF | {"forceinline": True})
def _store_row(row, y):
    return FORMS[y.dtype]


@leaf
def store_rows(x, y):
    for r in prange(len(x)):
        store_row(x[r], y[r])


@row_kernel
def sum_of_squares(x):
    total = np.float32(0)
    for d in range(len(x)):
        total += x[d] * x[d]
    return total


@kernel
def rms_norm(x, w, eps, y):
    """y = x / sqrt(mean(x^2) + eps) * w for each row; w (n,), y in any form of store_row()."""
    for r in prange(len(x)):
        scale = ONE / np.sqrt(sum_of_squares(x[r]) / np.float32(len(w)) + eps)
        normed = np.empty(len(w), np.float32)
        for d in range(len(w)):
            normed[d] = x[r, d] * scale * w[d]
        store_row(normed, y[r])


@kernel
def silu_product(gate_up, y):
    """y = silu(gate) * up for each row; gate_up (n_rows, 2 n), y in any form of store_row()."""
    n = gate_up.shape[1] // 2
    for r in prange(len(gate_up)):
        gates = gate_up[r, :n]
        ups = gate_up[r, n:]
        h = np.empty(n, np.float32)
        for j in range(n):
            h[j] = gates[j] / (ONE + exp(min(-gates[j], -UNDERFLOW))) * ups[j]
        store_row(h, y[r])


exp: Any = njit(inline="always")(sampling.exp)
ONE = np.float32(1)

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


@leaf
def rotate(head, turn):
    """Turn the pairs of a head, adjacent, by their angles; turn (head_dim,) has cos and sin of each."""
    for i in range(len(head) // 2):
        real, imaginary = head[2 * i], head[2 * i + 1]
        cos, sin = turn[2 * i], turn[2 * i + 1]
        head[2 * i] = real * cos - imaginary * sin
        head[2 * i + 1] = real * sin + imaginary * cos


@leaf
def rotate_and_cache(heads, keys, values, pages, positions, turns, is_rotary):
    """Rotate queries and keys in place, and write keys and values to the KV cache.

    heads (n_rows, n_heads + 2 * n_kv_heads, head_dim), turns (max_seq_len, head_dim), keys and values as of
    attention(). The value that follows the last row of a page becomes 0 if it lies beside that row's: it is
    multiplied by 0, and the memory may hold NaN.
    """
    n_kv_heads = keys.shape[1]
    n_rotated = heads.shape[1] - n_kv_heads
    for r in prange(len(heads)):
        turn = turns[positions[r]]
        offset = positions[r] % PAGE
        is_last = r + 1 == len(heads) or pages[r + 1] != pages[r]
        if is_rotary:
            for h in range(n_rotated):
                rotate(heads[r, h], turn)
        for h in range(n_kv_heads):
            of_key, of_value = keys[pages[r], h], values[pages[r], h]
            key, value = heads[r, n_rotated - n_kv_heads + h], heads[r, n_rotated + h]
            for d in range(len(key)):
                of_key[offset // WIDTH, d // 2, offset % WIDTH, d % 2] = bfloat16(key[d])
                of_value[d // WIDTH, offset // 2, d % WIDTH, offset % 2] = bfloat16(value[d])
            if is_last:
                of_value[:, offset // 2, :, offset % 2 + 1 :] = 0


@leaf
def add_product(x, panels, y, adds, ahead):
    """add_rows() for each panel. panels (n_panels, n_pairs, WIDTH, 2), y (n_rows, n_panels * WIDTH)"""
    for p in range(len(panels)):
        add_rows(x, panels[p], y[:, p * WIDTH : (p + 1) * WIDTH], adds, ahead)


@leaf
def largest(s):
    """The largest of s float32; NaN if there is one.

    A compiler takes integers side by side, floats one by one. Above -inf as integers of 32 bits without sign,
    a NaN is the largest, of either sign.
    """
    most = np.uint32(0)
    bits = s.view(np.int32)
    for j in range(len(bits)):
        most = max(most, np.uint32(rank(bits[j]) - LEAST_RANK))
    return number_of(np.int32(most) + LEAST_RANK)


@njit(inline="always")
def rank(bits):
    """Bits in the order of the numbers, if the other bits of negative ones are inverted. Its own inverse."""
    return bits ^ ((bits >> 31) & NO_SIGN)


@njit(inline="always")
def number_of(rank_of_it):
    return np.int32(rank(np.int32(rank_of_it))).view(np.float32)


LEAST = np.float32(-1e38)
LEAST_RANK = (~INFINITY).view(np.int32)  # of -inf


@row_kernel
def exponentials(s, maximum):
    """s = e^(s - maximum) in place; return their sum."""
    total = np.float32(0)
    for j in range(len(s)):
        s[j] = exp(s[j] - maximum)
        total += s[j]
    return total


@leaf
def attend_block(heads, keys, values, h, sinks, page_table, positions, window, scratch, y):
    """Attend from the rows of one block, with the query heads that share key head h; see attention()."""
    queries, maxima, totals, scores, probs, sums = scratch
    n_queries, head_dim = queries.shape
    n = n_queries // len(positions)  # query heads that share a key head
    factor = ONE / np.sqrt(np.float32(head_dim))
    for r in range(n_queries):
        query = heads[r // n, h * n + r % n]
        for d in range(head_dim):
            query[d] *= factor
        store_row(query, queries[r])
        sink = sinks[h * n + r % n]
        maxima[r] = max(sink, LEAST)
        totals[r] = exp(sink - maxima[r])
    sums[:] = 0
    first_page = max(0, positions[0] - window + 1) // PAGE
    end_page = positions[-1] // PAGE + 1
    for begin in range(first_page * PAGE // SPAN * SPAN, end_page * PAGE, SPAN):
        pages = range(max(first_page, begin // PAGE), min(end_page, (begin + SPAN) // PAGE))
        for p in pages:
            panels = keys[page_table[p], h, :, : head_dim // 2]
            column = p * PAGE - begin
            # Its bytes are those to the next page, which is fetched meanwhile.
            ahead = (page_table[min(p + 1, end_page - 1)] - page_table[p]) * keys.strides[0]
            add_product(queries, panels, scores[:, column : column + PAGE], False, ahead)

        for r in range(n_queries):
            position = positions[r // n]
            low = max(0, position - window + 1) - begin  # the row sees the keys from low
            end = position + 1 - begin  # to end
            first = min(SPAN, max(0, low) // PAGE * PAGE)  # the same pages, wherever the block begins
            last = min(SPAN, -(-end // PAGE) * PAGE)
            probs[r] = 0
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
            n_seen = min(PAGE, positions[-1] + 1 - p * PAGE)
            panels = values[page_table[p], h, :, : (n_seen + 1) // 2]
            column = p * PAGE - begin
            ahead = (page_table[min(p + 1, end_page - 1)] - page_table[p]) * values.strides[0]
            add_product(probs[:, column : column + PAGE], panels, sums, True, ahead)
    for r in range(n_queries):
        for d in range(head_dim):
            y[r // n, h * n + r % n, d] = sums[r, d] / totals[r]


@kernel
def attention(heads, keys, values, sinks, page_tables, positions, blocks, window, y):
    """y = softmax(q k^T / sqrt(head_dim)) v; a row sees itself and the window - 1 tokens before it.

    heads are those of rotate_and_cache(), of which q comes first; y (n_rows, n_heads, head_dim). sinks
    (n_heads,) are -inf in a model without. keys (n_pages, n_kv_heads, PAGE / WIDTH, width / 2, WIDTH, 2) and
    values (n_pages, n_kv_heads, width / WIDTH, PAGE / 2, WIDTH, 2) are bfloat16; blocks (n_blocks, 3) has the
    first row of each, the end of its rows, and the number of their page table.
    """
    n_kv_heads = keys.shape[1]
    for task in prange(len(blocks) * n_kv_heads):
        first, stop, number = blocks[task // n_kv_heads]
        rows, page_table = positions[first:stop], page_tables[number]
        h = task % n_kv_heads
        n = len(rows) * (y.shape[1] // n_kv_heads)
        scratch = (
            np.empty((n, heads.shape[2]), X_DTYPE),  # queries
            np.empty(n, np.float32),  # their largest scores so far
            np.empty(n, np.float32),  # the sums of e^score
            np.empty((n, SPAN), np.float32),  # scores
            np.empty((n, SPAN), X_DTYPE),  # e^score
            np.empty((n, values.shape[2] * WIDTH), np.float32),  # sums of values
        )
        seen = heads[first:stop], keys, values, h, sinks, page_table
        attend_block(*seen, rows, window, scratch, y[first:stop])
