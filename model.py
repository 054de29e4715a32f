"""The transformer's forward pass, written once over a set of ops; NumpyOps is their spec, in float32.

    [Span, ...] --Batch()--> rows --forward()--> logits of the wanted rows --pick()--> [Choice, ...]

A step computes rows, and a row is one token of one sequence. Prefill (a chunk of a prompt) and decode (the
next token of an answer) are the same pass, and a batch may hold rows of both: continuous batching with
chunked prefill. Keys and values are kept in the KV cache, a pool of pages (PagedAttention,
https://arxiv.org/abs/2309.06180); a sequence's page table names the pages that hold its tokens.

Authority: "Attention Is All You Need" (https://arxiv.org/abs/1706.03762) with the changes of Llama
(https://arxiv.org/abs/2302.13971); each op names the paper of its formula.

Rules of this file:
1. An op is the work of one GPU kernel (or a few): its norm, its bias and its residual addition are inside it.
2. Batch invariance: a sequence gets the same bits alone and in any batch, wherever its pages lie. So every
   product covers the rows of one group, because BLAS sums one row in another order than several. A prefill
   chunk and its tokens one by one are different groups, and agree up to rounding, about 1e-6.
3. Rotary pairs are ADJACENT: a pair of a head is a complex number (checkpoint/weights.py orders them so).

Not here: which rows to compute next (scheduler.py), which page is whose (pages.py), what the families of
models differ in (checkpoint/config.py), files (checkpoint/weights.py), logits to a token (sampling.py), speed
(devices/).
"""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from checkpoint.config import Config
from checkpoint.rope import rope_table
from checkpoint.weights import Layer, Matrix, Weights, unpacked
from sampling import Choice, Context, pick_token

Array = NDArray[np.float32]
Ints = NDArray[np.int64]

PAGE = 64  # tokens of a KV cache page
CHUNK = PAGE  # tokens of a prefill chunk; a prompt is cut at its multiples

# --- what goes in -------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Consecutive tokens of one sequence that a step computes."""

    slot: int  # row of the running batch, below max_batch, that the sequence occupies
    pages: Sequence[int]  # its page table: the token at position p lies in page pages[p // PAGE]
    # None: one token, the newest that the slot chose; only the device knows it yet (where n_ahead > 0).
    token_ids: Sequence[int] | None
    start: int  # position of the first token; the KV cache holds all tokens before it
    n_wanted: int  # wanted rows, the last ones: a token is chosen from the logits of each
    is_chunk: bool = False  # True: prefill, the rows of a chunk are one group; False: each row is a group

    @property
    def end(self) -> int:
        """Position after the last token."""
        if self.token_ids is None:
            return self.start + 1
        return self.start + len(self.token_ids)


class Group(NamedTuple):
    """Rows that are multiplied together (rule 2): a prefill chunk, or one token."""

    pages: Sequence[int]  # page table of their sequence
    start: int  # position of the first row
    rows: slice  # of the batch


class Batch:
    """The rows of one step: the tokens of all spans, one span after another."""

    def __init__(self, spans: Sequence[Span]) -> None:
        token_ids: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        wanted_rows: list[int] = []
        self.groups: list[Group] = []
        for span in spans:
            assert span.token_ids is not None, "expected token ids: only a GPU chains spans"
            first_row = len(token_ids)
            end_row = first_row + len(span.token_ids)
            group_size = CHUNK if span.is_chunk else 1
            for row in range(first_row, end_row, group_size):
                rows = slice(row, min(row + group_size, end_row))
                self.groups.append(Group(span.pages, span.start + row - first_row, rows))
            token_ids += span.token_ids
            positions += range(span.start, span.end)
            pages += [span.pages[position // PAGE] for position in range(span.start, span.end)]
            wanted_rows += range(end_row - span.n_wanted, end_row)
        self.token_ids: Ints = np.array(token_ids, np.int64)  # (n_rows,)
        self.positions: Ints = np.array(positions, np.int64)  # (n_rows,)
        self.pages: Ints = np.array(pages, np.int64)  # (n_rows,) the page that each token lies in
        self.offsets = self.positions % PAGE  # (n_rows,) and its place in that page
        self.wanted_rows: Ints = np.array(wanted_rows, np.int64)  # (n_wanted,) of all spans
        self.row_groups = [group.rows for group in self.groups]


# --- the forward pass ---------------------------------------------------------------------------------------

BatchT = TypeVar("BatchT", contravariant=True)
ArrayT = TypeVar("ArrayT")


class Ops(Protocol[BatchT, ArrayT]):
    """The ops of a forward pass: NumpyOps defines them, devices/ has faster ones.

    x is the residual stream, (n_rows, dim); `out` and `down` add to it in place.
    """

    def embed(self, batch: BatchT, weights: Weights) -> ArrayT:
        """Begin the residual stream. -> (n_rows, dim)"""

    def qkv(self, x: ArrayT, layer: Layer, batch: BatchT) -> ArrayT:
        """Project to queries, keys, values. -> (n_rows, (n_heads + 2 * n_kv_heads) * head_dim)"""

    def attend(self, qkv: ArrayT, layer: Layer, i: int, batch: BatchT) -> ArrayT:
        """Write layer i's keys and values to the KV cache, and attend. -> (n_rows, n_heads * head_dim)"""

    def out(self, x: ArrayT, y: ArrayT, layer: Layer, batch: BatchT) -> None:
        """Add the projection of y, the attention's result."""

    def gate_up(self, x: ArrayT, layer: Layer, batch: BatchT) -> ArrayT:
        """The hidden layer of the MLP. -> (n_rows, hidden_dim)"""

    def down(self, x: ArrayT, h: ArrayT, layer: Layer, batch: BatchT) -> None:
        """Add the projection of h, the hidden layer."""

    def experts(self, x: ArrayT, layer: Layer, batch: BatchT) -> None:
        """Add the weighted sum of the MLPs that the router chooses for each row (mixture of experts)."""

    def logits(self, x: ArrayT, weights: Weights, batch: BatchT) -> ArrayT:
        """The logits of the wanted rows. -> (n_wanted, vocab_size)"""


def forward(ops: Ops[BatchT, ArrayT], weights: Weights, batch: BatchT) -> ArrayT:
    """Return the logits of the wanted rows, (n_wanted, vocab_size); all rows' keys and values are cached."""
    x = ops.embed(batch, weights)
    for i, layer in enumerate(weights.layers):
        qkv = ops.qkv(x, layer, batch)
        y = ops.attend(qkv, layer, i, batch)
        ops.out(x, y, layer, batch)  # residual connection: x += ...
        if layer.router is not None:
            ops.experts(x, layer, batch)  # residual connection: x += ...
        else:
            h = ops.gate_up(x, layer, batch)
            ops.down(x, h, layer, batch)  # residual connection: x += ...
    return ops.logits(x, weights, batch)


# --- the ops ------------------------------------------------------------------------------------------------

Ticket = Any  # a step in flight, as launch() returns it and read() takes it; the ops decide what it is


class NumpyOps:
    """The spec: each op in the fewest lines that say what it does.

    In a formula W is a matrix as the checkpoint has it, (outputs, inputs), so that y = x W^T.
    """

    pack = staticmethod(unpacked)  # how checkpoint.weights.read_weights keeps a matrix for these ops
    chunk = CHUNK
    n_ahead = 0  # steps that may be launched before the first of them is read
    chunk_invariant = False  # a row has other bits in a prefill chunk than by itself: rule 2

    def __init__(
        self, config: Config, weights: Weights, max_seq_len: int, n_pages: int, max_batch: int
    ) -> None:
        self.about = f"NumPy, {weights.nbytes / 1e6:.0f} MB of weights in float32"
        self.config = config
        self.weights = weights
        self.max_seq_len = max_seq_len
        self.n_pages = n_pages
        self.max_batch = max_batch
        # cos + i sin, (max_seq_len, head_dim/2) complex64
        self._rope = rope_table(config.rope, config.head_dim, max_seq_len)
        # The page pool; axis 2 is keys, then values. The page is the first axis, so that what a page holds
        # lies together, and the operating system gives it memory only when its first token is written.
        shape = (n_pages, config.n_layers, 2, PAGE, config.n_kv_heads, config.head_dim)
        self._kv: Array = np.empty(shape, np.float32)

    @staticmethod
    def page_bytes(config: Config) -> int:
        n_numbers = config.n_layers * 2 * PAGE * config.n_kv_heads * config.head_dim
        return 4 * n_numbers

    # --- steps ----------------------------------------------------------------------------------------------

    def launch(self, spans: Sequence[Span], contexts: Sequence[Context]) -> Ticket:
        """Compute a step; `contexts` has one for each wanted row, in the order of the rows."""
        logits = forward(self, self.weights, Batch(spans))
        choices = iter(self.pick(logits, contexts))  # one a wanted row, of all spans
        return [list(islice(choices, span.n_wanted)) for span in spans if span.n_wanted]

    def read(self, ticket: Ticket) -> list[list[Choice]]:
        """Return the choices of each span with wanted rows; tickets are read in the order of their launch."""
        return ticket  # type: ignore[no-any-return]

    # --- the forward pass, op by op -------------------------------------------------------------------------

    def embed(self, batch: Batch, weights: Weights) -> Array:
        """x = E[token_id]"""
        return weights.embed[batch.token_ids]  # type: ignore[no-any-return]

    def qkv(self, x: Array, layer: Layer, batch: Batch) -> Array:
        """[q, k, v] = RMSNorm(x) W_qkv^T + b"""
        normed = self._rms_norm(x, layer.attn_norm)
        return self._linear(normed, layer.wqkv, layer.bqkv, batch.row_groups)

    def attend(self, qkv: Array, layer: Layer, i: int, batch: Batch) -> Array:
        """y = attention(rotate(q), rotate(k), v), where k and v are those of all tokens so far.

        Qwen3 norms each head of q and k before the rotation: https://arxiv.org/abs/2505.09388, section 2.
        """
        c = self.config
        heads = qkv.reshape(len(qkv), -1, c.head_dim)  # (n_rows, n_heads + 2 * n_kv_heads, head_dim)
        q = heads[:, : c.n_heads]
        k = heads[:, c.n_heads : -c.n_kv_heads]
        v = heads[:, -c.n_kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._rms_norm(q, layer.q_norm)
            k = self._rms_norm(k, layer.k_norm)
        if c.rotary[i]:
            turns = self._rope[batch.positions]  # (n_rows, head_dim/2)
            q = rotate(q, turns)
            k = rotate(k, turns)
        self._write_cache(k, v, i, batch)
        return self._attention(q, layer, i, batch)

    def out(self, x: Array, y: Array, layer: Layer, batch: Batch) -> None:
        """x += y W_o^T + b"""
        x += self._linear(y, layer.wo, layer.bo, batch.row_groups)

    def gate_up(self, x: Array, layer: Layer, batch: Batch) -> Array:
        """h = swiglu(RMSNorm(x) W_gate_up^T + b)"""
        normed = self._rms_norm(x, layer.mlp_norm)
        return self._swiglu(self._linear(normed, layer.w_gate_up, layer.b_gate_up, batch.row_groups))

    def down(self, x: Array, h: Array, layer: Layer, batch: Batch) -> None:
        """x += h W_down^T + b"""
        x += self._linear(h, layer.w_down, layer.b_down, batch.row_groups)

    def experts(self, x: Array, layer: Layer, batch: Batch) -> None:
        """x += sum of share_e * (h_e W_down_e^T + b_e) over the experts e that the row has chosen, where
        h_e = swiglu(RMSNorm(x) W_gate_up_e^T + b_e). Each row is a group of its own.

        https://arxiv.org/abs/1701.06538, equation 1
        """
        normed = self._rms_norm(x, layer.mlp_norm)
        chosen, shares = self._route(normed, layer, batch)
        n_chosen = chosen.shape[1]
        experts = chosen.ravel()  # (n_rows * n_chosen,)
        inputs = normed.repeat(n_chosen, axis=0)
        gate_up = self._expert_linear(inputs, layer.w_gate_up, layer.b_gate_up, experts)
        y = self._expert_linear(self._swiglu(gate_up), layer.w_down, layer.b_down, experts)
        y = y.reshape(-1, n_chosen, x.shape[1])
        for i in range(n_chosen):
            x += shares[:, i, None] * y[:, i]

    def logits(self, x: Array, weights: Weights, batch: Batch) -> Array:
        """RMSNorm(x) W_head^T for the wanted rows; each is a group of its own."""
        normed = self._rms_norm(x[batch.wanted_rows], weights.norm)
        groups = [slice(row, row + 1) for row in range(len(normed))]
        return self._linear(normed, weights.head, None, groups)

    def pick(self, logits: Array, contexts: Sequence[Context]) -> list[Choice]:
        """Choose a token for each wanted row (sampling.py)."""
        return [pick_token(row, context) for row, context in zip(logits, contexts, strict=True)]

    # --- what the ops are made of ---------------------------------------------------------------------------

    def _rms_norm(self, x: Array, w: Array) -> Array:
        """x / sqrt(mean(x^2) + eps) * w, over the last axis. https://arxiv.org/abs/1910.07467, equation 4"""
        mean_square = np.mean(x**2, axis=-1, keepdims=True)
        normed: Array = x / np.sqrt(mean_square + self.config.norm_eps)
        return normed * w

    def _linear(self, x: Array, w: Matrix, b: Array | None, row_groups: Sequence[slice]) -> Array:
        """x W^T + b, one product a group of rows (rule 2). x (n_rows, n_in), w (n_out, n_in), b (n_out,)"""
        y = np.empty((len(x), len(w)), np.float32)
        for rows in row_groups:
            y[rows] = x[rows] @ w.T  # (row, input) (input, output) -> (row, output)
        if b is not None:
            y += b
        return y

    def _route(self, normed: Array, layer: Layer, batch: Batch) -> tuple[Ints, Array]:
        """The experts that each row chooses, those with the highest scores, and their shares in the sum.

        A share is the softmax of the score, over all experts or over the chosen ones. Both (n_rows, n_chosen)
        """
        assert self.config.experts is not None
        scores = self._linear(normed, layer.router, layer.b_router, batch.row_groups)  # (n_rows, n_experts)
        ranked = np.argsort(-scores, axis=-1, kind="stable")  # of equals the first
        chosen = ranked[:, : self.config.experts.n_chosen]
        if self.config.experts.normalised:
            return chosen, softmax(np.take_along_axis(scores, chosen, -1))
        return chosen, np.take_along_axis(softmax(scores), chosen, -1)

    def _expert_linear(self, x: Array, w: Matrix, b: Array | None, experts: Ints) -> Array:
        """x[i] W_e^T + b_e, where e is experts[i]. x (n, n_in), w (n_experts, n_out, n_in) -> (n, n_out)"""
        y = np.stack([row @ w[e].T for row, e in zip(x, experts, strict=True)])
        if b is not None:
            y += b[experts]
        return y

    def _swiglu(self, gate_up: Array) -> Array:
        """silu(gate) * up: SwiGLU, https://arxiv.org/abs/2002.05202, equation 6. (..., 2 n) -> (..., n)

        gpt-oss clamps both, and has gate * sigmoid(alpha * gate) * (up + 1):
        https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/model.py, swiglu
        """
        gate, up = np.split(gate_up, 2, axis=-1)
        experts = self.config.experts
        if experts is None or experts.limit is None:
            return silu(gate) * up
        gate = np.minimum(gate, experts.limit)
        up = np.clip(up, -experts.limit, experts.limit)
        return silu(gate, experts.alpha) * (up + 1)

    def _write_cache(self, k: Array, v: Array, i: int, batch: Batch) -> None:
        """Put each row's key and value in its place of its page. k, v (n_rows, n_kv_heads, head_dim)"""
        self._kv[batch.pages, i, 0, batch.offsets] = k
        self._kv[batch.pages, i, 1, batch.offsets] = v

    def _attention(self, q: Array, layer: Layer, i: int, batch: Batch) -> Array:
        """Attend group by group. q (n_rows, n_heads, head_dim) -> (n_rows, n_heads * head_dim)"""
        y = np.empty((len(q), self.config.n_heads * self.config.head_dim), np.float32)
        for group in batch.groups:
            y[group.rows] = self._attention_of_group(q[group.rows], layer.sinks, i, group)
        return y

    def _attention_of_group(self, q: Array, sinks: Array | None, i: int, group: Group) -> Array:
        """softmax(Q K^T / sqrt(head_dim)) V, https://arxiv.org/abs/1706.03762, equation 1.

        n_heads / n_kv_heads query heads share a key head: grouped-query attention,
        https://arxiv.org/abs/2305.13245. Pages in front of a sliding window are not read.
        """
        c = self.config
        window = c.windows[i]
        n = len(q)
        end = group.start + n
        first_page = 0
        if window is not None:
            first_page = max(0, group.start - window + 1) // PAGE  # the first that holds a visible key
        key_positions = np.arange(first_page * PAGE, end)  # (n_keys,)
        visible = visible_keys(np.arange(group.start, end), key_positions, window)  # (n, n_keys)

        # Axes: q query, k key, d head_dim, g key head, h query head among those that share the key head.
        pages = list(group.pages[first_page : math.ceil(end / PAGE)])
        keys = self._read_cache(pages, i, 0)[: len(key_positions)].transpose(1, 2, 0)  # (g, d, k)
        values = self._read_cache(pages, i, 1)[: len(key_positions)].transpose(1, 0, 2)  # (g, k, d)
        queries = q.reshape(n, c.n_kv_heads, -1, c.head_dim).transpose(1, 2, 0, 3)  # (g, h, q, d)
        scores = queries @ keys[:, None] / math.sqrt(c.head_dim)  # (g, h, q, k)
        scores = np.where(visible, scores, -np.inf)
        if sinks is not None:
            sinks = sinks.reshape(c.n_kv_heads, -1, 1, 1)  # (g, h, 1, 1)
        probs = softmax(scores, sinks)  # (g, h, q, k)
        y: Array = probs @ values[:, None]  # (g, h, q, d)
        return y.transpose(2, 0, 1, 3).reshape(n, -1)

    def _read_cache(self, pages: Sequence[int], i: int, which: int) -> Array:
        """The keys (0) or values (1) of layer i in some pages, (len(pages) * PAGE, n_kv_heads, head_dim)."""
        return self._kv[pages, i, which].reshape(-1, self.config.n_kv_heads, self.config.head_dim)


def visible_keys(query_positions: Ints, key_positions: Ints, window: int | None) -> NDArray[np.bool_]:
    """Which keys a query sees: those up to its own position; with a sliding window of w, the last w of them.

    https://arxiv.org/abs/2310.06825, section 2. -> (n_queries, n_keys)
    """
    visible: NDArray[np.bool_] = key_positions <= query_positions[:, None]
    if window is not None:
        visible &= key_positions > query_positions[:, None] - window
    return visible


def rotate(x: Array, turns: NDArray[np.complex64]) -> Array:
    """Turn each pair of a head, seen as a complex number, by its angle at the row's position.

    RoPE, https://arxiv.org/abs/2104.09864, equation 12. x (n_rows, n_heads, head_dim), pairs adjacent;
    turns (n_rows, head_dim/2) = cos + i sin
    """
    pairs = x.view(np.complex64)  # (n_rows, n_heads, head_dim/2)
    return (pairs * turns[:, None]).view(np.float32)


def softmax(x: Array, sink: Array | None = None) -> Array:
    """exp(x) / sum(exp(x)) over the last axis; the largest is subtracted first, so that exp stays finite.

    A sink is one more x, whose result is left out (attention sink): https://arxiv.org/abs/2309.17453
    """
    top: Array = x.max(axis=-1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink)
    exp: Array = np.exp(x - top)
    total: Array = exp.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    return exp / total


@np.errstate(over="ignore")  # exp(-x) may be infinite: then x / inf is 0, the limit
def silu(x: Array, alpha: float = 1.0) -> Array:
    """x * sigmoid(alpha * x). https://arxiv.org/abs/1702.03118"""
    return x / (1 + np.exp(-alpha * x))  # type: ignore[no-any-return]
