"""The forward pass of a transformer, written once, over an `ops` object; NumpyOps is the spec, in float32.

    Batch of Spans --forward()--> logits of the rows that are wanted --ops.pick()--> token ids

Authority: "Attention Is All You Need" (arXiv 1706.03762), RMSNorm 1910.07467, RoPE 2104.09864,
SwiGLU 2002.05202, grouped-query attention 2305.13245; what a family adds is in `weights.py`.

Rules of this file:
1. The ops are cut where a GPU kernel is: each is one kernel's work, with its norm, bias or residual inside.
2. A step's rows are tokens of any number of sequences. Prefill and decode are the same pass.
3. Rotary pairs are adjacent (weights.py puts them so): a pair is a complex number, a rotation one product.
4. A sequence gets the same bits alone and in any batch: no product and no sum runs over rows of two spans,
   for BLAS sums one row in another order than several. Prefill and decode agree up to rounding, about 1e-6.
5. What is drawn depends on logits, seed, choice and position alone.

Not here: which rows to compute next (engine.py), files (weights.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weights import Config, Layer, Weights, as_read, rope_table

Array = NDArray[np.float32]
Ints = NDArray[np.int64]

BLOCK_BYTES = 4 * 2**20  # of weights, for one product: fits the last cache of most processors

# --- what goes in -------------------------------------------------------------------------------------------


class Cache:
    """Keys and values of one sequence: room for its tokens, doubled when it is full, up to `max_tokens`.

    All room at once would not do: a huge page of memory is given as a whole when a byte of it is written,
    and the first token alone writes to one in every layer and head.
    """

    def __init__(self, config: Config, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.k: Array = np.empty((config.n_layers, config.n_kv_heads, 0, config.head_dim), np.float32)
        self.v = self.k

    def reserve(self, n_tokens: int) -> None:
        """Make room for so many tokens in all."""
        room = self.k.shape[2]
        if n_tokens > room:
            room = max(n_tokens, min(2 * room, self._max_tokens))
            self.k, self.v = _widened(self.k, room), _widened(self.v, room)


def _widened(old: Array, room: int) -> Array:
    n_layers, n_kv_heads, n_tokens, head_dim = old.shape
    new = np.empty((n_layers, n_kv_heads, room, head_dim), np.float32)
    new[:, :, :n_tokens] = old
    return new


class Span(NamedTuple):
    """Consecutive tokens of one sequence in a batch."""

    cache: Cache
    token_ids: Sequence[int]
    start: int  # position of the first of them; all before it are in the cache
    wanted: bool  # are the logits of the last one wanted?


class Batch:
    """One step's rows: the tokens of all spans, one span after another."""

    def __init__(self, spans: Sequence[Span]) -> None:
        ends = [int(end) for end in np.cumsum([len(s.token_ids) for s in spans])]
        self.spans = spans
        self.groups = [
            slice(end - len(s.token_ids), end) for s, end in zip(spans, ends, strict=True)
        ]  # their rows
        self.token_ids: Ints = np.concatenate([np.array(s.token_ids, np.int64) for s in spans])  # (n_rows,)
        self.positions: Ints = np.concatenate(
            [s.start + np.arange(len(s.token_ids)) for s in spans]
        )  # (n_rows,)
        self.wanted: Ints = np.array(
            [end - 1 for s, end in zip(spans, ends, strict=True) if s.wanted], np.int64
        )


@dataclass(frozen=True)
class Sampling:
    """How to choose a token. The defaults choose from the model's own distribution."""

    temperature: float = 1.0  # 0 = the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0  # which of the request's n choices: they share the seed and nothing else
    presence_penalty: float = (
        0.0  # both as platform.openai.com/docs/api-reference/chat/create has them: of the output
    )
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # arXiv 1909.05858: of prompt and output, as in generation_config.json
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n_top_logprobs: int | None = None  # None = no logprobs, 0 = the chosen token's only


class Context(NamedTuple):
    """What a choice depends on besides the logits."""

    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]
    mask: NDArray[np.bool_] | None = None  # (vocab_size,) the tokens that may be chosen; None: all


class Choice(NamedTuple):
    """A chosen token; logprobs are the model's own, before temperature, penalties and bias."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob), likeliest first


# --- the forward pass ---------------------------------------------------------------------------------------


def forward(ops: "NumpyOps", weights: Weights, batch: Batch) -> Array:
    """The logits of the wanted rows, (n_wanted, vocab_size); keys and values go to the spans' caches."""
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
    about = "NumPy, float32"

    def __init__(self, config: Config, max_seq_len: int) -> None:
        self.config = config
        self._rope = rope_table(config, max_seq_len)  # (max_seq_len, head_dim / 2) complex64
        self._buffers: dict[str, Array] = {}

    def embed(self, batch: Batch, weights: Weights) -> Array:
        x = self._buffer("x", len(batch.token_ids), self.config.dim)
        return np.take(weights.embed, batch.token_ids, axis=0, out=x)

    def qkv(self, x: Array, layer: Layer, batch: Batch) -> Array:
        return self._linear("qkv", self._rms_norm(x, layer.attn_norm), layer.wqkv, layer.bqkv, batch.groups)

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
        y = self._buffer("y", n_rows, c.n_heads * c.head_dim)
        for span, rows in zip(batch.spans, batch.groups, strict=True):
            end = span.start + len(span.token_ids)
            span.cache.reserve(end)
            span.cache.k[i, :, span.start : end] = k[rows].transpose(1, 0, 2)
            span.cache.v[i, :, span.start : end] = v[rows].transpose(1, 0, 2)
            self._attend_one(
                q[rows], span.cache.k[i, :, :end], span.cache.v[i, :, :end], c.windows[i], y[rows]
            )
        return y

    def out(self, x: Array, y: Array, layer: Layer, batch: Batch) -> None:
        x += self._linear("out", y, layer.wo, layer.bo, batch.groups)

    def gate_up(self, x: Array, layer: Layer, batch: Batch) -> Array:
        normed = self._rms_norm(x, layer.mlp_norm)
        both = self._linear("gate_up", normed, layer.w_gate_up, layer.b_gate_up, batch.groups)
        gate, up = both[:, : self.config.hidden_dim], both[:, self.config.hidden_dim :]
        h = np.negative(gate, out=self._buffer("h", len(x), self.config.hidden_dim))
        with np.errstate(over="ignore"):  # exp(-gate) may be infinite: then silu(gate) is 0, as it should be
            np.exp(h, out=h)
        h += 1
        np.divide(gate, h, out=h)  # silu(gate) = gate / (1 + exp(-gate))
        h *= up
        return h

    def down(self, x: Array, h: Array, layer: Layer, batch: Batch) -> None:
        x += self._linear("down", h, layer.w_down, layer.b_down, batch.groups)

    def logits(self, x: Array, weights: Weights, batch: Batch) -> Array:
        last = self._rms_norm(x[batch.wanted], weights.norm)
        return self._linear("logits", last, weights.head, None, [slice(i, i + 1) for i in range(len(last))])

    def pick(self, logits: Array, contexts: Sequence[Context]) -> list[Choice]:
        return [_pick(row, context) for row, context in zip(logits, contexts, strict=True)]

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

    def _attend_one(self, q: Array, k: Array, v: Array, window: int | None, y: Array) -> None:
        """softmax(q k^T / sqrt(head_dim)) v for the last n tokens of one sequence, into y.

        q (n, n_heads, head_dim); k, v (n_kv_heads, end, head_dim); n_heads / n_kv_heads query heads share a
        key head.
        """
        n, (n_kv_heads, end, head_dim) = len(q), k.shape
        first = 0 if window is None else max(0, end - n - window + 1)  # what the first query can still see
        k, v = k[:, first:], v[:, first:]
        q = q.reshape(n, n_kv_heads, -1, head_dim).transpose(1, 2, 0, 3).reshape(n_kv_heads, -1, head_dim)
        scores = q @ k.transpose(0, 2, 1)  # (n_kv_heads, group * n, end - first)
        scores *= head_dim**-0.5
        if n > 1:
            query, key = np.arange(end - n, end)[:, None], np.arange(first, end)
            hidden = key > query if window is None else (key > query) | (key <= query - window)
            scores.reshape(n_kv_heads, -1, n, end - first)[:, :, hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        heads = (scores @ v).reshape(n_kv_heads, -1, n, head_dim)
        y.reshape(n, n_kv_heads, -1, head_dim)[:] = heads.transpose(2, 0, 1, 3)


def _norm_heads(heads: Array, w: Array, eps: float) -> None:
    """RMSNorm of each head, in place; heads (n, n_heads, head_dim)."""
    heads *= 1 / np.sqrt(np.vecdot(heads, heads)[..., None] / heads.shape[-1] + eps)
    heads *= w


# --- sampling -----------------------------------------------------------------------------------------------


def _pick(raw: Array, context: Context) -> Choice:
    """Choose a token by its logits, (vocab_size,)."""
    if not np.isfinite(raw.max()):
        raise ArithmeticError("the model's logits are no finite numbers")
    s = context.sampling
    logits = _penalised(raw, context)
    if s.temperature == 0:
        token_id = int(logits.argmax())
    else:
        token_id = _draw(_filtered(logits, s), _uniform(s.seed, s.choice, len(context.output)))
    if s.n_top_logprobs is None:
        return Choice(token_id)
    logprobs = raw - raw.max()
    logprobs -= np.log(np.exp(logprobs, dtype=np.float64).sum())
    return Choice(token_id, float(logprobs[token_id]), _top(logprobs, s.n_top_logprobs))


def _penalised(logits: Array, context: Context) -> Array:
    s = context.sampling
    if s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty or s.logit_bias:
        logits = logits.copy()
    if s.repetition_penalty != 1:
        seen = np.unique(np.array([*context.prompt, *context.output], np.int64))
        logits[seen] = np.where(
            logits[seen] > 0, logits[seen] / s.repetition_penalty, logits[seen] * s.repetition_penalty
        )
    if (s.presence_penalty or s.frequency_penalty) and context.output:
        said, count = np.unique(np.array(context.output, np.int64), return_counts=True)
        logits[said] -= (s.presence_penalty + s.frequency_penalty * count).astype(np.float32)
    if s.logit_bias:
        logits[list(s.logit_bias)] += np.array(list(s.logit_bias.values()), np.float32)
    return logits if context.mask is None else np.where(context.mask, logits, np.float32(-np.inf))


def _filtered(logits: Array, s: Sampling) -> NDArray[np.float64]:
    """Unnormalised probabilities, (vocab_size,), 0 where top_k, top_p or min_p forbid the token.

    All three keep the likeliest tokens, so each is a threshold. top_p counts what top_k has left, as vLLM
    does.
    """
    with np.errstate(over="ignore"):  # a temperature near 0 leaves the likeliest token alone
        p: NDArray[np.float64] = np.exp(
            (logits - logits.max()).astype(np.float64) / s.temperature
        )  # at most 1
    threshold = s.min_p
    if 0 < s.top_k < len(p):
        threshold = max(threshold, np.partition(p, -s.top_k)[-s.top_k])
    if s.top_p < 1:
        total = p[p >= threshold].sum()
        tail = (1 - s.top_p) * total / len(p)  # all tokens below this together do not make up 1 - top_p
        falling = np.sort(p[p >= max(threshold, tail)])[::-1]
        n_nucleus = np.searchsorted(np.cumsum(falling), s.top_p * total) + 1
        threshold = falling[: int(n_nucleus)][-1]
    p[p < threshold] = 0
    return p


def _draw(p: NDArray[np.float64], u: float) -> int:
    """The token in whose part of [0, sum of p) the number u * sum lies."""
    total = np.cumsum(p)
    return int(np.searchsorted(total, min(u * total[-1], np.nextafter(total[-1], 0)), side="right"))


def _uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: Philox is a function of key and counter."""
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, choice], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())


def _top(logprobs: Array, n: int) -> tuple[tuple[int, float], ...]:
    if n == 0:
        return ()
    likeliest = np.argpartition(logprobs, -n)[-n:]
    return tuple(
        (int(i), float(logprobs[i])) for i in likeliest[np.argsort(-logprobs[likeliest], kind="stable")]
    )
