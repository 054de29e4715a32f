"""Section 2 of micro.py over NumPy: matrices in place of loops, and the whole prompt in one piece.

python course/numpy_micro.py tests/models/tiny
"""

import sys
from http.server import HTTPServer
from typing import Any

try:
    import numpy as np
except ImportError:
    sys.exit("error: expected NumPy: pip install numpy (micro.py needs nothing)")

from course import micro
from course.micro import CONFIG, HEAD, N_KV_HEADS, N_LAYERS, D

Array = np.ndarray[Any, np.dtype[Any]]  # of float32

WEIGHTS = {name: np.array(rows, np.float32) for name, rows in micro.WEIGHTS.items()}


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
    """RoPE: turn the pair x[i] + j x[i + D/2] of each row by its position * SPEEDS[i]."""
    angles = np.outer(np.arange(start, start + len(x)), micro.SPEEDS)[:, None]  # (n, 1, D/2)
    turned = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1, dtype=np.float32, casting="same_kind")


def attention(x: Array, layer: str, start: int, cache: Array) -> Array:
    """softmax(q K^T / sqrt(D)) V: each row over itself and all rows before it"""
    end = start + len(x)
    q, k, v = (linear(x, f"{layer}{name}_proj").reshape(len(x), -1, D) for name in "qkv")
    cache[0, start:end] = rotate(norm(k, layer + "k_norm"), start)
    cache[1, start:end] = v
    queries = rotate(norm(q, layer + "q_norm"), start)
    is_later = np.arange(end) > np.arange(start, end)[:, None]  # (n, end): the causal mask
    mixed = []
    for h in range(q.shape[1]):
        keys, values = cache[:, :end, h * N_KV_HEADS // q.shape[1]]  # query heads share a key head
        scores = queries[:, h] @ keys.T / np.sqrt(np.float32(D))
        scores[is_later] = -np.inf
        mixed.append(softmax(scores) @ values)
    return linear(np.concatenate(mixed, -1), layer + "o_proj")


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


def new_cache(n_tokens: int) -> Array:
    """Return room for the keys and values of so many tokens: the longest that the answer may become."""
    return np.zeros((N_LAYERS, 2, n_tokens, N_KV_HEADS, D), np.float32)


def take_over() -> None:
    """Let micro.py compute with these functions in place of its own."""
    vars(micro).update(forward=forward, new_cache=new_cache)


if __name__ == "__main__":
    take_over()
    HTTPServer(("127.0.0.1", int(sys.argv[2]) if sys.argv[2:] else 8001), micro.Handler).serve_forever()
