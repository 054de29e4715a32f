"""Sections 2 and 3 of micro.py over NumPy: matrices in place of loops, and the whole prompt in one piece.

python course/numpy_micro.py tests/models/tiny
"""

import sys
from collections.abc import Iterator
from http.server import HTTPServer
from typing import Any

import numpy as np

from course import micro
from course.micro import CONFIG, ENDS, HEAD, N_KV_HEADS, N_LAYERS, D

Array = np.ndarray[Any, np.dtype[Any]]  # of float32

WEIGHTS = {name: np.array(rows, np.float32) for name, rows in micro.WEIGHTS.items()}
SPEEDS = np.array(micro.SPEEDS)
ANGLES = np.outer(np.arange(CONFIG["max_position_embeddings"]), SPEEDS)[:, None]  # (max_len, 1, D/2)
COS, SIN = np.cos(ANGLES, dtype=np.float32), np.sin(ANGLES, dtype=np.float32)


def linear(x: Array, name: str) -> Array:
    """x W^T: (n, n_in), with W of shape (n_out, n_in) -> (n, n_out)"""
    return x @ WEIGHTS[name + ".weight"].T


def norm(x: Array, name: str) -> Array:
    """x / sqrt(mean(x^2) + eps) * w, over the last axis"""
    root: Array = np.sqrt(np.mean(x**2, -1, keepdims=True) + CONFIG["rms_norm_eps"])
    return x / root * WEIGHTS[name + ".weight"]


def softmax(x: Array) -> Array:
    """exp(x) / sum(exp(x)), over the last axis"""
    exps: Array = np.exp(x - x.max(-1, keepdims=True))
    shares: Array = exps / exps.sum(-1, keepdims=True)
    return shares


def rotate(x: Array, start: int) -> Array:
    """RoPE: turn the pair (x[i], x[i + D/2]) of each row by its position * SPEEDS[i]."""
    a, b = np.split(x, 2, -1)
    cos, sin = COS[start : start + len(x)], SIN[start : start + len(x)]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(x: Array, layer: str, start: int, cache: Array) -> Array:
    """softmax(q K^T / sqrt(D)) V: each row over itself and all rows before it"""
    end = start + len(x)
    q, k, v = (linear(x, f"{layer}{name}_proj").reshape(len(x), -1, D) for name in "qkv")
    cache[0, start:end] = rotate(norm(k, layer + "k_norm"), start)
    cache[1, start:end] = v
    keys, values = cache[:, :end]
    # Axes: n token, g key head, h query head of that key head, d number of a head, k key.
    queries = rotate(norm(q, layer + "q_norm"), start).reshape(len(x), N_KV_HEADS, -1, D)
    scores = np.einsum("nghd,kgd->ghnk", queries, keys) / np.sqrt(np.float32(D))
    is_later = np.arange(end) > np.arange(start, end)[:, None]  # (n, k): the causal mask
    scores[:, :, is_later] = -np.inf
    mixed = np.einsum("ghnk,kgd->nghd", softmax(scores), values)
    return linear(mixed.reshape(len(x), -1), layer + "o_proj")


def forward(token_ids: list[int], start: int, cache: Array) -> Array:
    """Return the logits after these tokens, the first of which stands at position `start`: (vocab_size,)"""
    x: Array = WEIGHTS["model.embed_tokens.weight"][token_ids]  # (n, dim), the residual stream
    for i in range(N_LAYERS):
        layer = f"model.layers.{i}."
        x = x + attention(norm(x, layer + "input_layernorm"), layer + "self_attn.", start, cache[i])
        normed = norm(x, layer + "post_attention_layernorm")
        gate, up = (linear(normed, f"{layer}mlp.{name}_proj") for name in ("gate", "up"))
        x = x + linear(gate / (1 + np.exp(-gate)) * up, layer + "mlp.down_proj")
    return linear(norm(x[-1], "model.norm"), HEAD)


def generate(prompt: list[int], limit: int, temperature: float, seed: int | None) -> Iterator[int]:
    """Yield one new token after another; the last one ends the turn, unless the limit cuts it."""
    dice, token_ids, position = np.random.default_rng(seed), prompt, 0
    cache = new_cache(len(prompt) + max(limit, 0))
    for _ in range(limit):
        logits = forward(token_ids, position, cache)
        position += len(token_ids)
        token = int(logits.argmax())
        if temperature:
            token = int(dice.choice(len(logits), p=softmax(logits.astype(np.float64) / temperature)))
        yield token
        if token in ENDS:
            return
        token_ids = [token]


def new_cache(n_tokens: int) -> Array:
    """Return room for the keys and values of so many tokens: the longest that the answer may become."""
    return np.zeros((N_LAYERS, 2, n_tokens, N_KV_HEADS, D), np.float32)


if __name__ == "__main__":
    micro.generate = generate
    HTTPServer(("127.0.0.1", int(sys.argv[2]) if sys.argv[2:] else 8001), micro.Handler).serve_forever()
