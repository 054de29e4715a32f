"""The forward pass of a transformer, written once, over an `ops` object; NumpyOps is the spec, in float32.

    Spans --ops.launch()--> a Ticket --ops.read()--> the Choices of the rows that are wanted
    within: Batch --forward()--> logits of those rows --pick()--> Choices

Authority: "Attention Is All You Need" (arXiv 1706.03762), RMSNorm 1910.07467, RoPE 2104.09864,
SwiGLU 2002.05202, grouped-query attention 2305.13245; what a family adds is in `checkpoint/weights.py`.

Rules of this file:
1. The ops are cut where a GPU kernel is: each is one kernel's work, with its norm, bias or residual inside.
2. A step's rows are tokens of any number of sequences. Prefill and decode are the same pass.
3. Rotary pairs are adjacent (checkpoint/weights.py puts them so): a pair is a complex number, a rotation one
   product.
4. A sequence gets the same bits alone and in any batch, wherever its pages lie: every product covers
   rows of one group and whole pages, for BLAS sums one row in another order than several.
   A chunk of the prompt and its rows one by one agree up to rounding, about 1e-6.
5. What is drawn depends on logits, seed, choice and the number of the output token alone.

Not here: which rows to compute next (engine.py), whose page is whose (pages.py), files
(checkpoint/weights.py).
"""

import itertools
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from checkpoint.config import Config
from checkpoint.rope import rope_table
from checkpoint.weights import Layer, Weights, as_read
from sampling import Choice, Context, pick_token

Array = NDArray[np.float32]
Ints = NDArray[np.int64]

PAGE = 64  # tokens whose keys and values one page holds
CHUNK = PAGE  # tokens of a prompt that are computed together, always cut at its multiples
BLOCK_BYTES = 4 * 2**20  # of weights, for one product: fits the last cache of most processors

# --- what goes in -------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Consecutive tokens of one sequence in a step."""

    slot: int  # the place, of max_batch, that the sequence runs in
    pages: Sequence[int]  # the token at position p has its keys and values in pages[p // PAGE]
    token_ids: Sequence[int] | None  # None: the one token that the slot chose last, not yet read perhaps
    start: int  # position of the first of them; all before it are in the pages
    n_wanted: int  # of how many of its last rows a choice is wanted
    is_chunk: bool  # a chunk of the prompt, computed together; else each row is by itself

    @property
    def end(self) -> int:
        return self.start + (1 if self.token_ids is None else len(self.token_ids))


class Group(NamedTuple):
    """Rows that are computed together: a prefill chunk, or a token."""

    pages: Sequence[int]
    start: int  # position of the first
    rows: slice  # of the batch


class Batch:
    """One step's rows: the tokens of all spans, one span after another. No span is chained here."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.groups: list[Group] = []
        token_ids, wanted = list[int](), list[int]()
        for span in spans:
            assert span.token_ids is not None
            first, n = len(token_ids), len(span.token_ids)
            for i in range(0, n, size := CHUNK if span.is_chunk else 1):
                rows = slice(first + i, first + min(i + size, n))
                self.groups.append(Group(span.pages, span.start + i, rows))
            token_ids += span.token_ids
            wanted += range(len(token_ids) - span.n_wanted, len(token_ids))
        self.rows = [group.rows for group in self.groups]
        self.token_ids: Ints = np.array(token_ids, np.int64)  # (n_rows,)
        self.positions: Ints = np.concatenate(
            [span.start + np.arange(span.end - span.start) for span in spans]
        )  # (n_rows,)
        self.pages: Ints = np.array(
            [span.pages[p // PAGE] for span in spans for p in range(span.start, span.end)], np.int64
        )  # (n_rows,)
        self.places = self.positions % PAGE  # in those pages
        self.wanted: Ints = np.array(wanted, np.int64)  # rows

    @cached_property
    def tables(self) -> Ints:
        """The page tables of the groups, (n_groups, n_pages of the longest); 0 behind the end of one."""
        tables = np.zeros((len(self.groups), max(len(group.pages) for group in self.groups)), np.int64)
        for table, group in zip(tables, self.groups, strict=True):
            table[: len(group.pages)] = group.pages
        return tables


Ticket = Any  # of a step that was launched; what it is inside is the ops' own affair


# --- the forward pass ---------------------------------------------------------------------------------------


def forward(ops: "NumpyOps", weights: Weights, batch: Batch) -> Array:
    """The logits of the wanted rows, (n_wanted, vocab_size); keys and values go to the spans' pages."""
    x = ops.embed(batch, weights)  # (n_rows, dim), the residual stream
    for i, layer in enumerate(weights.layers):
        qkv = ops.qkv(x, layer, batch)  # (n_rows, (n_heads + 2 * n_kv_heads) * head_dim)
        y = ops.attend(qkv, layer, i, batch)  # (n_rows, n_heads * head_dim)
        ops.out(x, y, layer, batch)
        h = ops.gate_up(x, layer, batch)  # (n_rows, hidden_dim)
        ops.down(x, h, layer, batch)
    return ops.logits(x, weights, batch)


class NumpyOps:
    """Each op in the fewest lines that say what it does. Results live in buffers that the next call of the
    op reuses.
    """

    pack = staticmethod(as_read)  # what weights.read_weights makes of a matrix for these ops
    chunk = CHUNK
    n_ahead = 0  # steps that may be launched before the first of them is read
    chunk_invariant = False  # has a row the same bits in a prefill chunk as by itself?

    def __init__(
        self, config: Config, weights: Weights, max_seq_len: int, n_pages: int, max_batch: int
    ) -> None:
        self.about = f"NumPy, {weights.nbytes / 1e6:.0f} MB of weights in float32"
        self.config = config
        self.weights = weights
        self.max_seq_len = max_seq_len
        self.n_pages = n_pages
        self.max_batch = max_batch
        self._rope = rope_table(config.rope, config.head_dim, max_seq_len)  # complex64
        # All of a page lies together: memory that no token has reached yet is never touched, and is not real.
        shape = (n_pages, config.n_layers, 2, config.n_kv_heads, PAGE, config.head_dim)
        self._kv: Array = np.empty(shape, np.float32)
        self._chosen = [deque[int](maxlen=self.n_ahead + 1) for _ in range(max_batch)]  # by slots, the last
        self._buffers: dict[str, Array] = {}

    @staticmethod
    def page_bytes(config: Config) -> int:
        return 2 * 4 * config.n_layers * config.n_kv_heads * PAGE * config.head_dim

    # --- steps ----------------------------------------------------------------------------------------------

    def launch(self, spans: Sequence[Span], contexts: Sequence[Context]) -> Ticket:
        """Begin a step; here, do it. `contexts`: of each wanted row, in the order of the rows.

        A step sees what the steps before it have written and chosen.
        """
        known = [
            span if span.token_ids is not None else span._replace(token_ids=[self._chosen[span.slot][-1]])
            for span in spans
        ]
        logits = forward(self, self.weights, Batch(known))
        slots = [span.slot for span in spans for _ in range(span.n_wanted)]
        whole = [self._whole(context, slot) for context, slot in zip(contexts, slots, strict=True)]
        choices = iter(self.pick(logits, whole))
        ticket = [[next(choices) for _ in range(span.n_wanted)] for span in spans if span.n_wanted]
        for slot, context, choice in zip(slots, contexts, itertools.chain(*ticket), strict=True):
            if not context.n_unread:
                self._chosen[slot].clear()
            self._chosen[slot].append(choice.token_id)
        return ticket

    def _whole(self, context: Context, slot: int) -> Context:
        """With the tokens of the output that nobody has read."""
        unread = list(self._chosen[slot])[-context.n_unread :] if context.n_unread else []
        return context._replace(output=[*context.output, *unread], n_unread=0) if unread else context

    def read(self, ticket: Ticket) -> list[list[Choice]]:
        """What each span that wanted something got, in their order; tickets are read as they were made."""
        return ticket  # type: ignore[no-any-return]

    # --- the ops --------------------------------------------------------------------------------------------

    def embed(self, batch: Batch, weights: Weights) -> Array:
        x = self._buffer("x", len(batch.token_ids), self.config.dim)
        return np.take(weights.embed, batch.token_ids, axis=0, out=x)

    def qkv(self, x: Array, layer: Layer, batch: Batch) -> Array:
        return self._linear("qkv", self._rms_norm(x, layer.attn_norm), layer.wqkv, layer.bqkv, batch.rows)

    def attend(self, qkv: Array, layer: Layer, i: int, batch: Batch) -> Array:
        """Norm and rotate q and k, append k and v to the caches, attend."""
        c, n_rows = self.config, len(qkv)
        heads = qkv.reshape(n_rows, c.n_heads + 2 * c.n_kv_heads, c.head_dim)
        n_qk = c.n_heads + c.n_kv_heads
        q, k, v = heads[:, : c.n_heads], heads[:, c.n_heads : n_qk], heads[:, n_qk:]
        if layer.q_norm is not None and layer.k_norm is not None:
            _norm_heads(q, layer.q_norm, c.norm_eps)
            _norm_heads(k, layer.k_norm, c.norm_eps)
        if c.rotary[i]:
            pairs = heads[:, :n_qk].view(np.complex64)
            pairs *= self._rope[batch.positions, None]
        q *= np.float32(c.head_dim**-0.5)
        self._keep(k, v, i, batch)
        y = self._buffer("y", n_rows, c.n_heads * c.head_dim)
        self._attend_all(q, i, batch, y)
        return y

    def out(self, x: Array, y: Array, layer: Layer, batch: Batch) -> None:
        x += self._linear("out", y, layer.wo, layer.bo, batch.rows)

    def gate_up(self, x: Array, layer: Layer, batch: Batch) -> Array:
        normed = self._rms_norm(x, layer.mlp_norm)
        both = self._linear("gate_up", normed, layer.w_gate_up, layer.b_gate_up, batch.rows)
        gate, up = both[:, : self.config.hidden_dim], both[:, self.config.hidden_dim :]
        h = np.negative(gate, out=self._buffer("h", len(x), self.config.hidden_dim))
        with np.errstate(over="ignore"):  # exp(-gate) may be infinite: then silu(gate) is 0, as it should be
            np.exp(h, out=h)
        h += 1
        np.divide(gate, h, out=h)  # silu(gate) = gate / (1 + exp(-gate))
        h *= up
        return h

    def down(self, x: Array, h: Array, layer: Layer, batch: Batch) -> None:
        x += self._linear("down", h, layer.w_down, layer.b_down, batch.rows)

    def logits(self, x: Array, weights: Weights, batch: Batch) -> Array:
        last = self._rms_norm(x[batch.wanted], weights.norm)
        return self._linear("logits", last, weights.head, None, [slice(i, i + 1) for i in range(len(last))])

    def pick(self, logits: Array, contexts: Sequence[Context]) -> list[Choice]:
        return [pick_token(row, context) for row, context in zip(logits, contexts, strict=True)]

    def _buffer(self, name: str, n_rows: int, n_columns: int) -> Array:
        """Uninitialised (n_rows, n_columns), the same memory for the same name."""
        if name not in self._buffers or len(self._buffers[name]) < n_rows:
            self._buffers[name] = np.empty((n_rows, n_columns), np.float32)
        return self._buffers[name][:n_rows]

    def _linear(self, name: str, x: Array, w: Array, b: Array | None, groups: Sequence[slice]) -> Array:
        """x @ w.T + b, with w as (n_out, n_in); one product a group of rows.

        By blocks of w that stay in the processor's cache: all groups together read w from memory once.
        """
        y = self._buffer(name, len(x), len(w))
        n = max(1, BLOCK_BYTES // w[:1].nbytes)
        for first in range(0, len(w), n):
            for rows in groups:
                np.matmul(x[rows], w[first : first + n].T, out=y[rows, first : first + n])
        if b is not None:
            y += b
        return y

    def _rms_norm(self, x: Array, w: Array) -> Array:
        """x / sqrt(mean(x^2) + eps) * w"""
        y = np.multiply(x, w, out=self._buffer("normed", *x.shape))
        y *= 1 / np.sqrt(np.vecdot(x, x)[:, None] / x.shape[1] + self.config.norm_eps)
        return y

    def _keep(self, k: Array, v: Array, i: int, batch: Batch) -> None:
        pages = self._kv[:, i]  # (n_pages, 2, n_kv_heads, PAGE, head_dim)
        pages[batch.pages, 0, :, batch.places] = k
        pages[batch.pages, 1, :, batch.places] = v

    def _attend_all(self, q: Array, i: int, batch: Batch, y: Array) -> None:
        """Group by group; q (n_rows, n_heads, head_dim), scaled; y (n_rows, n_heads * head_dim)."""
        for group in batch.groups:
            self._attend_one(q[group.rows], i, group, y[group.rows])

    def _attend_one(self, q: Array, i: int, group: Group, y: Array) -> None:
        """softmax(q k^T) v for the tokens of one group, into y; a whole page is one product, so that sums are
        the same wherever the pages lie.

        q (n, n_heads, head_dim), scaled; n_heads / n_kv_heads query heads share a key head.
        """
        c, n, window = self.config, len(q), self.config.windows[i]
        end = group.start + n
        first = 0 if window is None else max(0, group.start - window + 1) // PAGE
        numbers = range(first, -(-end // PAGE))  # of the pages with keys that are seen
        pages = [group.pages[number] for number in numbers]
        kv = self._kv[pages, i]  # (n_pages, 2, n_kv_heads, PAGE, head_dim)
        kv[-1, :, :, (end - 1) % PAGE + 1 :] = 0  # what no token has reached
        q = q.reshape(n, c.n_kv_heads, -1, c.head_dim).transpose(1, 2, 0, 3)
        q = q.reshape(c.n_kv_heads, -1, c.head_dim)  # (n_kv_heads, group * n, head_dim)
        scores = q @ kv[:, 0].swapaxes(2, 3)  # (n_pages, n_kv_heads, group * n, PAGE)
        query = np.arange(group.start, end)[:, None]
        key = np.arange(numbers.start * PAGE, numbers.stop * PAGE).reshape(-1, 1, 1, 1, PAGE)
        hidden = (key > query) if window is None else (key > query) | (key <= query - window)
        np.copyto(scores.reshape(len(kv), c.n_kv_heads, -1, n, PAGE), -np.inf, where=hidden)
        scores -= scores.max(axis=(0, 3), keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=(0, 3), keepdims=True)
        heads = (scores @ kv[:, 1]).sum(axis=0).reshape(c.n_kv_heads, -1, n, c.head_dim)
        y.reshape(n, c.n_kv_heads, -1, c.head_dim)[:] = heads.transpose(2, 0, 1, 3)


def _norm_heads(heads: Array, w: Array, eps: float) -> None:
    """RMSNorm of each head, in place; heads (n, n_heads, head_dim)."""
    heads *= 1 / np.sqrt(np.vecdot(heads, heads)[..., None] / heads.shape[-1] + eps)
    heads *= w
