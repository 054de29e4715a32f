"""The ops of model.py by the plain kernels of plain.cu: what the fast ones are held against.

    the same forward() --PlainOps--> kernels with a thread for each number that comes out

Authority: model.NumpyOps, op by op; for how a step comes and goes cuda.CudaOps, whose steps these are.

Rules of this file:
1. An op is its plain kernels one after another; nothing is fused, nothing depends on how many rows there are.
2. What lies in memory is what CudaOps has there, so that an op of one can follow an op of the other.

The server needs none of it: tests and `bench.py gpu` do.

Not here: arithmetic (plain.cu), steps, pages and graphs (cuda.py).
"""

from typing import Any

import numpy as np

from checkpoint.weights import Layer, Weights
from devices.cuda import CudaOps, expert_arrays
from devices.kernels import ANY_SHAPE, PLAIN_CODE, THREADS, DeviceArray, Kernels
from devices.steps import DeviceStep


class PlainOps(CudaOps):
    """CudaOps, each number by a thread of its own."""

    def _allocate(self, weights: Weights) -> None:
        super()._allocate(weights)
        shape = self._limits.rows, 2 * self.config.hidden_dim
        self._buffers["gate_up"] = self._cp.zeros(shape, np.dtype("f4"))
        if self.config.experts:
            shape = len(self._buffers["experts"]), 2 * self.config.experts.hidden_dim
            self._buffers["expert_gate_up"] = self._cp.zeros(shape, np.dtype("f4"))
        self._plain_kernels = Kernels(self._cp, self.config, path=PLAIN_CODE, shapes=[ANY_SHAPE])

    # --- the ops --------------------------------------------------------------------------------------------

    def embed(self, batch: DeviceStep, weights: Weights) -> DeviceArray:
        x, chosen = self._buffers["x"], self._buffers["chosen"]
        tokens, slots = batch.views["tokens"], batch.views["slots"]
        self._launch_plain("embed", batch.n_rows * self.config.dim, weights.embed, tokens, slots, chosen, x)
        return x

    def qkv(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> DeviceArray:
        qkv = self._buffers["qkv"]
        normed = self._norm(x, layer.attn_norm, None, batch.n_rows)
        self._linear(normed, layer.wqkv, layer.bqkv, qkv, batch.n_rows)
        return qkv

    def attend(self, qkv: DeviceArray, layer: Layer, i: int, batch: DeviceStep) -> DeviceArray:
        c, n_rows = self.config, batch.n_rows
        rope, y, page_tables = self._buffers["rope"], self._buffers["y"], self._buffers["page_tables"]
        positions, slots = batch.views["positions"], batch.views["slots"]
        cache = self._keys[i], self._values[i], positions, slots, page_tables
        max_pages = page_tables.shape[1]
        rotary = int(c.rotary[i])
        window = c.windows[i] or 0

        n_heads = n_rows * (c.n_heads + c.n_kv_heads)
        self._launch_plain("rotate", n_heads, qkv, layer.q_norm, layer.k_norm, rope, positions, rotary)
        self._launch_plain("write_kv", n_rows * c.n_kv_heads * c.head_dim, qkv, *cache, max_pages)
        self._launch_plain(
            "attend", n_rows * c.n_heads * c.head_dim, qkv, *cache, layer.sinks, y, max_pages, window
        )
        return y

    def out(self, x: DeviceArray, y: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        self._linear(y, layer.wo, layer.bo, x, batch.n_rows, adds=1)

    def gate_up(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> DeviceArray:
        h, gate_up = self._buffers["h"], self._buffers["gate_up"]
        normed = self._norm(x, layer.mlp_norm, None, batch.n_rows)
        self._linear(normed, layer.w_gate_up, layer.b_gate_up, gate_up, batch.n_rows)
        self._launch_plain("silu_mul", batch.n_rows * self.config.hidden_dim, gate_up, h)
        return h

    def down(self, x: DeviceArray, h: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        self._linear(h, layer.w_down, layer.b_down, x, batch.n_rows, adds=1)

    def experts(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        c, b, n = self.config, self._buffers, batch.n_rows
        assert c.experts is not None
        n_chosen, size = c.experts.n_chosen, c.experts.hidden_dim
        chosen, shares, y = b["experts"], b["shares"], b["expert_y"]
        normed = self._norm(x, layer.mlp_norm, None, n)
        self._linear(normed, layer.router, layer.b_router, b["scores"], n)
        self._launch_plain("route", n, b["scores"], chosen, shares)
        gate_up = *expert_arrays(layer.w_gate_up), layer.b_gate_up, normed, chosen, b["expert_gate_up"]
        n_gate_up = n * n_chosen * 2 * size
        self._launch_plain("expert_linear", n_gate_up, *gate_up, c.dim, 2 * size, n_chosen)
        self._launch_plain("expert_swiglu", n * n_chosen * size, b["expert_gate_up"], b["expert_h"])
        down = *expert_arrays(layer.w_down), layer.b_down, b["expert_h"], chosen, y
        self._launch_plain("expert_linear", n * n_chosen * c.dim, *down, size, c.dim, 1)
        self._launch_plain("add_experts", n * c.dim, shares, y, x)

    def logits(self, x: DeviceArray, weights: Weights, batch: DeviceStep) -> DeviceArray:
        raw = self._buffers["raw"]
        if batch.n_wanted:
            normed = self._norm(x, weights.norm, batch.views["wanted"], batch.n_wanted)
            self._linear(normed, weights.head, None, raw, batch.n_wanted)
        return raw

    def pick(self, logits: DeviceArray, batch: DeviceStep) -> None:
        b, views = self._buffers, batch.views
        of_row = views["pick_rows"], views["settings"], views["seeds"], b["masks"]
        of_slot = views["tokens"], b["counts"], b["biases"], b["chosen"]
        self._launch_plain("pick", batch.n_wanted, logits, b["logits"], *of_row, *of_slot, b["choices"])

    def _norm(self, x: DeviceArray, w: DeviceArray, rows: DeviceArray | None, n: int) -> DeviceArray:
        normed = self._buffers["normed"]
        self._launch_plain("rms_norm", n * self.config.dim, w, x, rows, normed)
        return normed

    def _linear(
        self, x: DeviceArray, w: DeviceArray, b: DeviceArray | None, y: DeviceArray, n: int, adds: int = 0
    ) -> None:
        """y = x w^T + b for n rows, or with `adds` y += x w^T + b; w as (n_columns, size)."""
        n_columns, size = w.shape
        self._launch_plain("linear", n * n_columns, w, b, x, y, size, n_columns, adds)

    def _launch_plain(self, name: str, n: int, *arguments: Any) -> None:
        """A thread for each of n numbers."""
        n_blocks = -(-n // THREADS)
        self._plain_kernels.launch(name, ANY_SHAPE, (n_blocks,), *arguments, n)
