"""The ops of model.py by the plain kernels of kernels.cu: what the fast ones are held against.

    the same forward() --PlainOps--> kernels with a thread for each number that comes out

Authority: model.NumpyOps, op by op; for how a step comes and goes gpu.CudaOps, whose steps these are.

Rules of this file:
1. An op is its plain kernels one after another; nothing is fused, nothing depends on how many rows there are.
2. What lies in memory is what CudaOps has there, so that an op of one can follow an op of the other.

A module of its own, for who serves needs none of it: tests and `bench.py gpu` do.

Not here: arithmetic (kernels.cu), steps, pages and graphs (cuda.py).
"""

from typing import Any

import numpy as np

from checkpoint.weights import Layer, Weights
from devices.cuda import CudaOps
from devices.kernels import PLAIN, DeviceArray
from devices.steps import DeviceStep


class PlainOps(CudaOps):
    """CudaOps, each number by a thread of its own."""

    def _allocate(self, weights: Weights) -> None:
        super()._allocate(weights)
        shape = self._limits.rows, 2 * self.config.hidden_dim
        self._buffers["gate_up"] = self._cp.zeros(shape, np.dtype("f4"))

    # --- the ops --------------------------------------------------------------------------------------------

    def embed(self, batch: DeviceStep, weights: Weights) -> DeviceArray:
        b, views = self._buffers, batch.views
        arguments = weights.embed, views["tokens"], views["slots"], b["chosen"], b["x"]
        self._launch_plain("embed", batch.n_rows * self.config.dim, *arguments)
        return b["x"]

    def qkv(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> DeviceArray:
        normed = self._norm(x, layer.attn_norm, None, batch.n_rows)
        return self._linear(normed, layer.wqkv, layer.bqkv, self._buffers["qkv"], batch.n_rows)

    def attend(self, qkv: DeviceArray, layer: Layer, i: int, batch: DeviceStep) -> DeviceArray:
        c, b, views = self.config, self._buffers, batch.views
        keys, values, pages, rotary = self._keys[i], self._values[i], b["pages"], int(c.rotary[i])
        where = keys, values, views["positions"], views["slots"], pages
        norms, max_pages = (layer.q_norm, layer.k_norm, b["rope"]), pages.shape[1]
        n_heads = c.n_heads + 2 * c.n_kv_heads
        self._launch_plain("keep", batch.n_rows * n_heads, qkv, *norms, *where, max_pages, rotary)
        n, window = batch.n_rows * c.n_heads * c.head_dim, c.windows[i] or 0
        self._launch_plain("attend", n, qkv, *where, b["y"], max_pages, window)
        return b["y"]

    def out(self, x: DeviceArray, y: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        self._linear(y, layer.wo, layer.bo, x, batch.n_rows, adds=1)

    def gate_up(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> DeviceArray:
        normed, h = self._norm(x, layer.mlp_norm, None, batch.n_rows), self._buffers["h"]
        both = self._linear(normed, layer.w_gate_up, layer.b_gate_up, self._buffers["gate_up"], batch.n_rows)
        self._launch_plain("silu_mul", batch.n_rows * self.config.hidden_dim, both, h)
        return h

    def down(self, x: DeviceArray, h: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        self._linear(h, layer.w_down, layer.b_down, x, batch.n_rows, adds=1)

    def logits(self, x: DeviceArray, weights: Weights, batch: DeviceStep) -> DeviceArray:
        raw = self._buffers["raw"]
        if batch.n_wanted:
            normed = self._norm(x, weights.norm, batch.views["wanted"], batch.n_wanted)
            self._linear(normed, weights.head, None, raw, batch.n_wanted)
        return raw

    def pick(self, logits: DeviceArray, batch: DeviceStep) -> None:
        b, views = self._buffers, batch.views
        settings = views["picked"], views["settings"], views["seeds"], b["masks"]
        slots = views["tokens"], b["counts"], b["biases"], b["chosen"]
        self._launch_plain("pick", batch.n_wanted, logits, b["logits"], *settings, *slots, b["choices"])

    def _norm(self, x: DeviceArray, w: DeviceArray, rows: DeviceArray | None, n: int) -> DeviceArray:
        normed = self._buffers["normed"]
        self._launch_plain("rms_norm", n * self.config.dim, w, x, rows, normed)
        return normed

    def _linear(
        self, x: DeviceArray, w: DeviceArray, b: DeviceArray | None, y: DeviceArray, n: int, adds: int = 0
    ) -> DeviceArray:
        """y = x w^T + b for n rows, or y += it; w as (n_out, n_in)."""
        self._launch_plain("linear", n * len(w), w, b, x, y, w.shape[1], len(w), adds)
        return y

    def _launch_plain(self, name: str, n: int, *arguments: Any) -> None:
        """A thread for each of n numbers."""
        self._kernels.launch(f"plain_{name}", PLAIN, (-(-n // 256),), *arguments, n)
