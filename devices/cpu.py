"""The ops on a processor at the speed of its memory: weights as the file has them, kernels compiled by Numba.

    matrix, or blocks of a file --pack()--> Panels --FastOps--> the ops of NumpyOps, at fewer bytes

Decoding a token reads every weight once and uses it once, so it takes as long as the bytes of the weights
take to come from memory. Most checkpoints hold bfloat16, the upper half of a float32; blocks of 8 or 4 bits
with a scale are half and a quarter of that. A prompt uses each weight many times, so it takes as long as its
products: these run on the instructions for narrow numbers that microkernel.py describes. FastOps differs from
NumpyOps, the spec, in the order of its sums and in what it rounds (rule 2). NumpyOps serves if Numba is not
installed.

Authority: model.NumpyOps, op by op.

Rules of this file:
1. A row has the same bits alone, in any batch and in a prefill chunk (cpu_kernels.py).
2. We round: weights, if they are packed in fewer bits; the inputs of a product with blocks to 16 bits;
   those of a product with bfloat16 to bfloat16 if that product is faster (FAST_BFLOAT16); keys and values in
   the KV cache to bfloat16. `tests/perplexity.py` prints the perplexity of each.

Not here: the spec of the ops (model.py), packing weights (panels.py), the kernels (cpu_kernels.py, and
microkernel.py for the loop of all products).
"""

import ctypes
import importlib.metadata
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import numba
import numpy as np
import threadpoolctl

from checkpoint.config import Config
from checkpoint.weights import Layer, Matrix, Packer, Weights
from devices.cpu_kernels import (
    ATTENTION_ROWS,
    attention,
    compiling,
    numba_config,
    product,
    rms_norm,
    rotate_and_cache,
    shared,
    silu_product,
    store_rows,
)
from devices.cpu_sampling import SETTINGS, choose_rows, settings
from devices.kernels import CHOICE_WIDTH
from devices.microkernel import WIDTH, X_DTYPE
from devices.panels import Panels, pack
from devices.step_memory import flags_of, read_choices
from model import PAGE, Array, Batch, Ints, Numbers, NumpyOps, Span
from sampling import Choice, Context, Sampling, apply_penalties

log = logging.getLogger("cpu")

SMALL = 2**20  # multiplications: one thread is done with fewer before a second has woken up
# --weights               of the layers, of the embedding and the head, which 4 bits harm most
WEIGHTS = {"bfloat16": ("BF16", "BF16"), "int8": ("Q8_0", "Q8_0"), "int4": ("Q4_1", "Q8_0")}


def load_tbb() -> None:
    """Load oneTBB from the folder in which pip put it: neither Numba nor the system looks there."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("tbb") or []:
            if file.name in ("libtbb.so.12", "tbb12.dll"):
                ctypes.CDLL(str(file.locate()))


# --- the ops ------------------------------------------------------------------------------------------------


NOTHING = np.empty((0, 0), np.float32)


class FastOps(NumpyOps):
    """NumpyOps, with kernels for what its ops are made of; for weights that were read with `pack`."""

    pack = staticmethod(pack)

    def __post_init__(self) -> None:
        super().__post_init__()
        c = self.config
        numbers = np.empty(self.n_pages * self.page_bytes(c) // 2, np.uint16)
        self._kv: Any = numbers.reshape(self.n_pages, c.n_layers, 2, c.n_kv_heads, -1)
        shape = self.n_pages, c.n_kv_heads, -1
        self._caches = []  # keys and values of a layer, by the panels that attention() multiplies
        for keys, values in self._kv.transpose(1, 2, 0, 3, 4):
            of_keys = keys.reshape(*shape[:2], PAGE // WIDTH, -1, WIDTH, 2)
            self._caches.append((of_keys, values.reshape(*shape, PAGE // 2, WIDTH, 2)))
        self._turns: Array = self._rope.view(np.float32)  # (max_seq_len, head_dim)
        self._no_sinks = np.full(c.n_heads, -np.inf, np.float32)
        # As many threads as BLAS may use, so that one option limits both
        blas = [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
        self._n_threads = min(max(blas, default=1), numba_config.NUMBA_NUM_THREADS)
        load_tbb()
        self.get_ready()
        device = f"Numba, {self._n_threads} threads, {self.weights.nbytes / 1e6:.0f} MB of weights"
        self.about = {"device": device}

    @staticmethod
    def page_bytes(config: Config) -> int:
        width = -(-config.head_dim // WIDTH) * WIDTH  # of a key or a value: whole tiles
        return 2 * config.n_layers * 2 * PAGE * config.n_kv_heads * width

    @staticmethod
    def pack_as(weights: str) -> list[Packer]:
        """For read_weights(): how a key of WEIGHTS packs the matrices of the layers, and the outer ones."""
        return [partial(pack, name=name) for name in WEIGHTS[weights]]

    def get_ready(self) -> None:
        """Compile the kernels, or read them from their cache, by a step of one token.

        One thread computes it, then all.
        """
        try:
            with compiling():
                for small in (sys.maxsize, 0):
                    self._small = small
                    self.launch([Span(0, [0], [0], 0, 1)], [Context(Sampling(), [], [])])
        except ValueError as error:  # no threading layer is installed; the message names the packages
            log.warning("one thread: %s", " ".join(str(error).split()))
            self._n_threads = 1
        self._small = SMALL

    def embed(self, batch: Batch, weights: Weights) -> Array:
        if self._n_threads > 1:
            numba.set_num_threads(self._n_threads)  # it holds for the calling thread, whichever that is
        self._tasks = attention_tasks(batch, self._n_threads)  # the same in all layers
        x: Array = weights.embed.take(batch.token_ids)
        return x

    def out(self, x: Array, y: Array, layer: Layer, batch: Batch) -> None:
        self._product(self._stored(y, layer.wo), layer.wo, layer.bo, x)

    def gate_up(self, x: Array, layer: Layer, batch: Batch) -> Numbers:
        """The hidden layer in the form that `down` multiplies."""
        gate_up = self._normed_linear(x, layer.mlp_norm, layer.w_gate_up, layer.b_gate_up)
        h: Numbers = layer.w_down.inputs(len(x))
        self._run(silu_product, 4 * gate_up.size, gate_up, h)
        return h

    def down(self, x: Array, h: Numbers, layer: Layer, batch: Batch) -> None:
        self._product(h, layer.w_down, layer.b_down, x)

    def _run(self, one: Any, n_multiplications: int, *arguments: Any) -> None:
        """Call a kernel, with all threads if that is worth their waking up."""
        is_shared = self._n_threads > 1 and n_multiplications > self._small
        (shared(one) if is_shared else one)(*arguments)

    def _normed(self, x: Array, w: Array, y: Numbers) -> Numbers:
        """RMSNorm(x), written to y in the form that it has."""
        self._run(rms_norm, 4 * x.size, x, w, np.float32(self.config.norm_eps), y)
        return y

    def _normed_linear(self, x: Array, norm: Array, w: Matrix, b: Array | None) -> Array:
        return self._product(self._normed(x, norm, w.inputs(len(x))), w, b)

    def _rms_norm(self, x: Array, w: Array) -> Array:
        rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        return self._normed(rows, w, np.empty_like(rows)).reshape(x.shape)

    def _stored(self, x: Array, w: Panels, of_bfloat16: Any = X_DTYPE) -> Numbers:
        """x in the form that a product with w takes."""
        rows = w.inputs(len(x), of_bfloat16)
        self._run(store_rows, 4 * x.size, np.ascontiguousarray(x), rows)
        return rows

    def _linear(self, x: Array, w: Matrix, b: Array | None) -> Array:
        """The scores of a router: rounding x might choose other experts."""
        return self._product(self._stored(x, w, np.float32), w, b)

    def _product(self, x: Numbers, w: Matrix, b: Array | None, residual: Array = NOTHING) -> Array:
        """x W^T + b for rows in the form of w.inputs(); it is added to a residual, if there is one."""
        sums = np.empty((len(x), len(w.words) * WIDTH), np.float32)
        self._run(product, sums.size * w.n_in, x, w.words, sums, residual)
        y = residual if len(residual) else np.ascontiguousarray(sums[:, : w.n_out])
        if b is not None:
            y += b
        return y

    def _expert_linear(self, x: Array, w: Matrix, b: Array | None, experts: Ints) -> Array:
        y = np.empty((len(x), w[0].n_out), np.float32)
        for e in np.unique(experts):  # experts that no row has chosen are not read
            rows = experts == e
            y[rows] = self._product(self._stored(x[rows], w[e]), w[e], None)
        if b is not None:
            y += b[experts]
        return y

    def attend(self, qkv: Array, layer: Layer, i: int, batch: Batch) -> Array:
        c = self.config
        heads = qkv.reshape(len(qkv), -1, c.head_dim)
        q, k = heads[:, : c.n_heads], heads[:, c.n_heads : -c.n_kv_heads]
        for some, norm in ((q, layer.q_norm), (k, layer.k_norm)):
            if norm is not None:
                some[...] = self._rms_norm(some, norm)
        cache = self._caches[i]
        turns = batch.pages, batch.positions, self._turns, c.rotary[i]
        self._run(rotate_and_cache, 4 * qkv.size, heads, *cache, *turns)
        window = c.windows[i] or self.max_seq_len
        sinks = self._no_sinks if layer.sinks is None else layer.sinks
        y = np.empty(q.shape, np.float32)
        tables, blocks = self._tasks
        n_keys = tables.shape[1] * PAGE  # seen by a row, at most
        seen = sinks, tables, batch.positions, blocks, window
        self._run(attention, 2 * y.size * n_keys, heads, *cache, *seen, y)
        return y.reshape(len(y), -1)

    def pick(self, logits: Array, contexts: Sequence[Context]) -> list[Choice]:
        """Choose as sampling.pick_token(), all rows at once."""
        changed = [i for i, context in enumerate(contexts) if flags_of(context)]
        penalised = [apply_penalties(logits[i], contexts[i]) for i in changed]
        places = np.full(len(logits), -1)  # of a row among those
        places[changed] = range(len(changed))
        changed_rows = np.array(penalised, np.float32).reshape(-1, logits.shape[1])
        asked = np.array([settings(context) for context in contexts], SETTINGS)
        choices = np.zeros((len(logits), CHOICE_WIDTH), np.int32)
        self._run(choose_rows, 8 * logits.size, logits, changed_rows, places, asked, choices)
        return read_choices(choices, contexts)


def attention_tasks(batch: Batch, n_threads: int) -> tuple[Ints, Ints]:
    """How the attention of a batch is cut into tasks: ATTENTION_ROWS of a span.

    Return the page tables (n_spans, max_pages), filled up with 0, and the blocks (n_blocks, 3): first row,
    end of the rows, page table.
    """
    rows = zip_longest(*(span.pages for span in batch.spans), fillvalue=0)
    page_tables: Ints = np.array([*rows], np.int64).T.copy()
    blocks: list[tuple[int, int, int]] = []
    end = 0
    for number, span in enumerate(batch.spans):
        begin, end = end, end + span.n_rows
        for first in range(begin, end, ATTENTION_ROWS):
            blocks.append((first, min(first + ATTENTION_ROWS, end), number))
    # Each thread takes blocks that follow one another. A later block of a prompt sees more keys, so all get
    # some of these.
    dealt = chain(*(blocks[thread::n_threads] for thread in range(n_threads)))
    return page_tables, np.array(list(dealt), np.int64)
