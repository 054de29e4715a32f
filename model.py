"""The transformer's forward pass, written once over a set of ops; NumpyOps is their spec, in float32.

    [Span, ...] --Batch()--> rows --forward()--> logits of the wanted rows --pick()--> [Choice, ...]

A step computes rows, and a row is one token of one sequence. Prefill (a chunk of a prompt) and decode (the
newest token of an answer) are the same pass, and one batch may hold rows of both: continuous batching with
chunked prefill. Keys and values are kept in the KV cache, a pool of pages (PagedAttention,
https://arxiv.org/abs/2309.06180); a sequence's page table names the pages that hold its tokens.

Authority: "Attention Is All You Need" (https://arxiv.org/abs/1706.03762) with the changes of Llama
(https://arxiv.org/abs/2302.13971); each op names the paper of its formula.

Rules of this file:
1. An op is the work of one GPU kernel (or a few): its norm, its bias and its residual addition are inside it.
2. Batch invariance: a row is computed by itself. So it has the same bits alone, in any batch, in any prefill
   chunk, and wherever its pages lie. NumpyOps multiplies one row at a time, because BLAS sums in
   another order for several rows than for one.
3. Rotary pairs are ADJACENT: a pair of a head is a complex number (checkpoint/weights.py orders them so).

Why ops and one function over them, and not a module for each layer as in PyTorch: CPU, GPU and NumPy share
the order of the steps, which is where forward passes go wrong, and differ in the ops, which tests compare one
by one. The price: a model that needs a new op needs it three times.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from checkpoint.config import Config
from checkpoint.rope import rope_table
from checkpoint.weights import Layer, Matrix, Weights, unpacked
from sampling import Choice, Context, pick_token

Array = NDArray[np.float32]
Ints = NDArray[np.int64]
Numbers = NDArray[Any]  # of the dtype of a format

PAGE = 64  # tokens of a KV cache page
# A step in flight, as launch() returns it and read() takes it. On a GPU it is a HostMemory of
# devices/step_memory.py, on a CPU the choices themselves, because launch() has computed them.
Ticket = Any


# --- what goes in -------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Consecutive tokens of one sequence, computed in one step."""

    slot: int  # place in the running batch, below max_batch, that the sequence occupies
    pages: Sequence[int]  # its page table: the token at position p lies in page pages[p // PAGE]
    # None: one token, the newest one chosen for this slot; only the device knows it yet (if n_ahead > 0).
    token_ids: Sequence[int] | None
    start: int  # position of the first token; the KV cache holds all tokens before it
    n_wanted: int  # wanted rows, the last ones: a token is chosen from the logits of each

    @property
    def n_rows(self) -> int:
        return 1 if self.token_ids is None else len(self.token_ids)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.n_rows


class Batch:
    """The rows of one step: the tokens of all spans, one span after another."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        token_ids: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        wanted_rows: list[int] = []
        self.page_tables: list[Sequence[int]] = []  # of each row, the page table of its sequence
        for span in spans:
            assert span.token_ids is not None  # only a GPU chains spans
            token_ids += span.token_ids
            span_positions = range(span.start, span.end)
            positions += span_positions
            pages += [span.pages[position // PAGE] for position in span_positions]
            wanted_rows += range(len(token_ids) - span.n_wanted, len(token_ids))
            self.page_tables += [span.pages] * len(span.token_ids)
        self.token_ids = np.array(token_ids, np.int64)  # (n_rows,)
        self.positions = np.array(positions, np.int64)  # (n_rows,)
        self.wanted_rows = np.array(wanted_rows, np.int64)  # (n_wanted,) of all spans
        self.pages = np.array(pages, np.int64)  # (n_rows,) the page that each token lies in
        self.offsets = self.positions % PAGE  # (n_rows,) and its place in that page


# --- the forward pass ---------------------------------------------------------------------------------------


def forward(ops: Any, weights: Weights, batch: Any) -> Any:
    """Return the logits of the wanted rows, (n_wanted, vocab_size); cache the keys and values of all rows.

    A row is wanted if its next token is to be chosen. `ops` has the ops of NumpyOps; `batch` is a Batch, or
    the device's own form of it. x is the residual stream, (n_rows, dim), to which some ops add.
    """
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


def rotate(x: Array, turns: NDArray[np.complex64]) -> Array:
    """Turn each pair of a head, seen as a complex number, by its angle at the row's position.

    RoPE, https://arxiv.org/abs/2104.09864, equation 12. x (n_rows, n_heads, head_dim), pairs adjacent;
    turns (n_rows, head_dim/2) = cos + i sin
    """
    pairs = x.view(np.complex64)  # (n_rows, n_heads, head_dim/2)
    return (pairs * turns[:, None]).view(np.float32)


def softmax(x: Array, sink: Array | None = None) -> Array:
    """exp(x) / sum(exp(x)) over the last axis; the largest x is subtracted first, so that exp stays finite.

    An attention sink is one more x, whose result is left out: https://arxiv.org/abs/2309.17453
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


@dataclass(eq=False)
class NumpyOps:
    """The spec: each op in the fewest lines that are clear. The engine's thread alone calls it.

    In a formula W is a matrix as in the checkpoint, (outputs, inputs), so that y = x W^T.
    """

    config: Config
    weights: Weights
    max_seq_len: int  # tokens of a sequence
    n_pages: int  # of the KV cache
    max_batch: int  # sequences of a step

    pack = staticmethod(unpacked)  # how checkpoint.weights.read_weights keeps a matrix for these ops
    chunk = PAGE  # tokens of a prefill chunk
    max_wanted = sys.maxsize  # rows of a step from which a token may be chosen
    n_ahead = 0  # steps that are launched after the one that is read next

    def __post_init__(self) -> None:
        c = self.config
        self.about = {"device": f"NumPy, {self.weights.nbytes / 1e6:.0f} MB of weights in float32"}
        self.degraded: dict[str, str] = {}  # what is slower than it could be, and why
        # cos + i sin, (max_seq_len, head_dim/2) complex64
        self._rope = rope_table(c.rope, c.head_dim, self.max_seq_len)
        # The page pool; axis 2 is keys, then values. The page is the first axis, so a page is contiguous, and
        # the operating system gives it memory only when its first token is written.
        shape = (self.n_pages, c.n_layers, 2, PAGE, c.n_kv_heads, c.head_dim)
        self._kv: Array = np.empty(shape, np.float32)

    def launch(self, spans: Sequence[Span], contexts: Sequence[Context]) -> Ticket:
        """Compute a step. `contexts` has an element for each wanted row, in the order of the rows."""
        return self.pick(forward(self, self.weights, Batch(spans)), contexts)

    def embed(self, batch: Batch, weights: Weights) -> Array:
        """x = E[token_id]"""
        return weights.embed[batch.token_ids]  # type: ignore[no-any-return]

    def qkv(self, x: Array, layer: Layer, batch: Batch) -> Array:
        """[q, k, v] = RMSNorm(x) W_qkv^T + b"""
        return self._normed_linear(x, layer.attn_norm, layer.wqkv, layer.bqkv)

    def _normed_linear(self, x: Array, norm: Array, w: Matrix, b: Array | None) -> Array:
        """RMSNorm(x) W^T + b"""
        return self._linear(self._rms_norm(x, norm), w, b)

    def _rms_norm(self, x: Array, w: Array) -> Array:
        """x / sqrt(mean(x^2) + eps) * w, over the last axis. https://arxiv.org/abs/1910.07467, equation 4"""
        mean_square = np.mean(x**2, axis=-1, keepdims=True)
        normed: Array = x / np.sqrt(mean_square + self.config.norm_eps)
        return normed * w

    def _linear(self, x: Array, w: Matrix, b: Array | None) -> Array:
        """x W^T + b. x (n_rows, n_in), w (n_out, n_in), b (n_out,) -> (n_rows, n_out)"""
        y: Array = (x[:, None] @ w.T)[:, 0]  # a product for each row (rule 2): (row, 1, in) (in, out)
        if b is not None:
            y += b
        return y

    def attend(self, qkv: Array, layer: Layer, i: int, batch: Batch) -> Array:
        """y = attention(rotate(q), rotate(k), v), with k and v of all tokens so far.

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
        self._kv[batch.pages, i, 0, batch.offsets] = k
        self._kv[batch.pages, i, 1, batch.offsets] = v
        return self._attention(q, layer, i, batch)

    def _attention(self, q: Array, layer: Layer, i: int, batch: Batch) -> Array:
        """softmax(q K^T / sqrt(head_dim)) V. q (n_rows, n_heads, head_dim) -> (n_rows, n_heads * head_dim)

        https://arxiv.org/abs/1706.03762, equation 1, row by row (rule 2). A row sees all tokens up to its own
        position (the causal mask); with a sliding window of w it sees the last w of these, https://arxiv.org/abs/2310.06825,
        section 2. n_heads / n_kv_heads query heads share a key head: grouped-query attention,
        https://arxiv.org/abs/2305.13245
        """
        c = self.config
        window = c.windows[i] or self.max_seq_len
        sinks = layer.sinks
        if sinks is not None:
            sinks = sinks.reshape(c.n_kv_heads, -1, 1)  # (g, h, 1)
        outputs = np.empty((len(q), c.n_heads * c.head_dim), np.float32)
        # Axes: k key, d head_dim, g key head, h query head among those that share the key head.
        for row, position in enumerate(batch.positions):
            seen = np.arange(max(0, position + 1 - window), position + 1)  # (n_keys,) positions
            pages = np.take(batch.page_tables[row], seen // PAGE)
            keys = self._kv[pages, i, 0, seen % PAGE].transpose(1, 2, 0)  # (g, d, k)
            values = self._kv[pages, i, 1, seen % PAGE].transpose(1, 0, 2)  # (g, k, d)
            queries = q[row].reshape(c.n_kv_heads, -1, c.head_dim)  # (g, h, d)
            scores = queries @ keys / math.sqrt(c.head_dim)  # (g, h, k)
            y: Array = softmax(scores, sinks) @ values  # (g, h, d)
            outputs[row] = y.reshape(-1)
        return outputs

    def out(self, x: Array, y: Array, layer: Layer, batch: Batch) -> None:
        """x += y W_o^T + b"""
        x += self._linear(y, layer.wo, layer.bo)

    def gate_up(self, x: Array, layer: Layer, batch: Batch) -> Array:
        """h = swiglu(RMSNorm(x) W_gate_up^T + b)"""
        gate_up = self._normed_linear(x, layer.mlp_norm, layer.w_gate_up, layer.b_gate_up)
        return self._swiglu(gate_up)

    def _swiglu(self, gate_up: Array) -> Array:
        """silu(gate) * up: SwiGLU, https://arxiv.org/abs/2002.05202, equation 6. (..., 2 n) -> (..., n)

        gpt-oss clamps both, and computes gate * sigmoid(alpha * gate) * (up + 1):
        https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/model.py, swiglu
        """
        gate, up = np.split(gate_up, 2, axis=-1)
        experts = self.config.experts
        if experts is None or experts.limit is None:
            return silu(gate) * up
        gate = np.minimum(gate, experts.limit)
        up = np.clip(up, -experts.limit, experts.limit)
        return silu(gate, experts.alpha) * (up + 1)

    def down(self, x: Array, h: Array, layer: Layer, batch: Batch) -> None:
        """x += h W_down^T + b"""
        x += self._linear(h, layer.w_down, layer.b_down)

    def logits(self, x: Array, weights: Weights, batch: Batch) -> Array:
        """RMSNorm(x) W_head^T for the wanted rows."""
        return self._normed_linear(x[batch.wanted_rows], weights.norm, weights.head, None)

    def pick(self, logits: Array, contexts: Sequence[Context]) -> list[Choice]:
        """Choose a token for each wanted row (sampling.py)."""
        return [pick_token(row, context) for row, context in zip(logits, contexts, strict=True)]

    def read(self, ticket: Ticket) -> list[Choice]:
        """Return the choice of each wanted row. The engine reads tickets in the order of their launch."""
        return ticket  # type: ignore[no-any-return]

    # --- the fold of this class: a request goes on with the next one ----------------------------------------

    @staticmethod
    def page_bytes(config: Config) -> int:
        return 4 * config.n_layers * 2 * PAGE * config.n_kv_heads * config.head_dim

    # --- the forward pass, op by op -------------------------------------------------------------------------

    def experts(self, x: Array, layer: Layer, batch: Batch) -> None:
        """x += sum of share_e * (h_e W_down_e^T + b_e) over the experts e that the row has chosen, where
        h_e = swiglu(RMSNorm(x) W_gate_up_e^T + b_e).

        https://arxiv.org/abs/1701.06538, equation 1
        """
        normed = self._rms_norm(x, layer.mlp_norm)
        chosen, shares = self._route(normed, layer)
        n_chosen = chosen.shape[1]
        experts = chosen.ravel()  # (n_rows * n_chosen,): an expert computes all its rows at once
        inputs = normed.repeat(n_chosen, axis=0)
        gate_up = self._expert_linear(inputs, layer.w_gate_up, layer.b_gate_up, experts)
        y = self._expert_linear(self._swiglu(gate_up), layer.w_down, layer.b_down, experts)
        y = y.reshape(-1, n_chosen, x.shape[1])
        for i in range(n_chosen):
            x += shares[:, i, None] * y[:, i]

    # --- what the ops are made of ---------------------------------------------------------------------------

    def _route(self, normed: Array, layer: Layer) -> tuple[Ints, Array]:
        """Return the experts that each row chooses, and their shares in the sum. Both are (n_rows, n_chosen).

        A row chooses the experts with the highest scores. A share is the softmax of the score, over all
        experts or over the chosen ones.
        """
        assert self.config.experts is not None
        scores = self._linear(normed, layer.router, layer.b_router)  # (n_rows, n_experts)
        ranked = np.argsort(-scores, axis=-1, kind="stable")  # of equals the first
        chosen = ranked[:, : self.config.experts.n_chosen]
        if self.config.experts.normalised:
            return chosen, softmax(np.take_along_axis(scores, chosen, -1))
        return chosen, np.take_along_axis(softmax(scores), chosen, -1)

    def _expert_linear(self, x: Array, w: Matrix, b: Array | None, experts: Ints) -> Array:
        """x[i] W_e^T + b_e, with e = experts[i]. x (n, n_in), w (n_experts, n_out, n_in) -> (n, n_out)"""
        y = np.stack([row @ w[e].T for row, e in zip(x, experts, strict=True)])
        if b is not None:
            y += b[experts]
        return y
