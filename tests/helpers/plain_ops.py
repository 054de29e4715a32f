"""The ops of model.py by the plain kernels of plain.cu, with which the fast kernels are compared.

    the same forward() --PlainOps--> kernels with a thread for each number that comes out

Authority: model.NumpyOps, op by op. The steps and the memory are those of cuda.CudaOps, so an op of one class
can follow an op of the other.
"""

from typing import Any

import numpy as np

from checkpoint.weights import Layer, Weights
from devices.cuda import CudaOps, expert_matrices
from devices.kernels import ANY_SHAPE, PLAIN_CODE, THREADS, DeviceArray, Kernels
from devices.steps import DeviceStep


class PlainOps(CudaOps):
    """CudaOps, each number by a thread of its own."""

    def _allocate(self, weights: Weights) -> None:
        super()._allocate(weights)
        experts = self.config.experts
        shapes = {"gate_up": (len(self._buffers["x"]), 2 * self.config.hidden_dim)}
        if experts:
            shapes["expert_gate_up"] = len(self._buffers["experts"]), 2 * experts.hidden_dim
        self._buffers |= {name: self._cp.zeros(shape, np.dtype("f4")) for name, shape in shapes.items()}
        self._plain_kernels = Kernels(self._cp, self.config, path=PLAIN_CODE, shapes=[ANY_SHAPE])

    # --- the ops --------------------------------------------------------------------------------------------

    def embed(self, batch: DeviceStep, weights: Weights) -> DeviceArray:
        self._run("embed", batch, batch.n_rows * self.config.dim, embed=weights.embed)
        return self._buffers["x"]

    def qkv(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> DeviceArray:
        self._norm(batch, layer.attn_norm)
        return self._linear(batch, layer.wqkv, layer.bqkv, "normed", "qkv")

    def attend(self, qkv: DeviceArray, layer: Layer, i: int, batch: DeviceStep) -> DeviceArray:
        c, n = self.config, batch.n_rows
        arguments = self._attention_arguments(layer, i)
        self._run("rotate", batch, n * (c.n_heads + c.n_kv_heads), **arguments)
        self._run("write_kv", batch, n * c.n_kv_heads * c.head_dim, **arguments)
        self._run("attend", batch, n * c.n_heads * c.head_dim, **arguments)
        return self._buffers["y"]

    def out(self, x: DeviceArray, y: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        self._linear(batch, layer.wo, layer.bo, "y", "x", adds=1)

    def gate_up(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> DeviceArray:
        self._norm(batch, layer.mlp_norm)
        self._linear(batch, layer.w_gate_up, layer.b_gate_up, "normed", "gate_up")
        self._run("silu_mul", batch, batch.n_rows * self.config.hidden_dim)
        return self._buffers["h"]

    def down(self, x: DeviceArray, h: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        self._linear(batch, layer.w_down, layer.b_down, "h", "x", adds=1)

    def experts(self, x: DeviceArray, layer: Layer, batch: DeviceStep) -> None:
        c, n = self.config, batch.n_rows
        assert c.experts is not None
        n_pairs, size = n * c.experts.n_chosen, c.experts.hidden_dim
        self._norm(batch, layer.mlp_norm)
        self._linear(batch, layer.router, layer.b_router, "normed", "scores")
        self._run("route", batch, n)
        gate_up = expert_matrices(layer.w_gate_up) | {"b": layer.b_gate_up, "a_row": c.experts.n_chosen}
        self._expert_linear(batch, n_pairs, gate_up, "normed", "expert_gate_up")
        self._run("expert_swiglu", batch, n_pairs * size)
        down = expert_matrices(layer.w_down) | {"b": layer.b_down, "a_row": 1}
        self._expert_linear(batch, n_pairs, down, "expert_h", "expert_y")
        self._run("add_experts", batch, n * c.dim)

    def logits(self, x: DeviceArray, weights: Weights, batch: DeviceStep) -> DeviceArray:
        if batch.n_wanted:
            self._norm(batch, weights.norm, batch.views["wanted"], batch.n_wanted)
            self._linear(batch, weights.head, None, "normed", "raw", batch.n_wanted)
        return self._buffers["raw"]

    def pick(self, logits: DeviceArray, batch: DeviceStep) -> None:
        self._run("pick", batch, batch.n_wanted)

    def _norm(
        self, batch: DeviceStep, w: DeviceArray, rows: DeviceArray | None = None, n: int | None = None
    ) -> None:
        n_numbers = (n or batch.n_rows) * self.config.dim
        self._run("rms_norm", batch, n_numbers, w=w, rows=rows, y=self._buffers["normed"])

    def _linear(
        self, batch: DeviceStep, w: Any, b: Any, x: str, y: str, n: int | None = None, adds: int = 0
    ) -> DeviceArray:
        """y = x w^T + b for n rows, or with `adds` y += x w^T + b; w as (n_columns, size)."""
        n_columns, size = w.shape
        arrays = {"w": w, "b": b, "x": self._buffers[x], "y": self._buffers[y]}
        n_numbers = (n or batch.n_rows) * n_columns
        self._run("linear", batch, n_numbers, **arrays, size=size, n_columns=n_columns, adds=adds)
        return arrays["y"]

    def _expert_linear(
        self, batch: DeviceStep, n_pairs: int, matrices: dict[str, Any], x: str, y: str
    ) -> None:
        """y = x w^T + b for the expert of each pair."""
        arguments = matrices | {"x": self._buffers[x], "y": self._buffers[y]}
        size, n_columns = arguments["x"].shape[1], arguments["y"].shape[1]
        self._run("expert_linear", batch, n_pairs * n_columns, **arguments, size=size, n_columns=n_columns)

    def _run(self, name: str, batch: DeviceStep, n: int, **arguments: Any) -> None:
        """Launch a kernel with a thread for each of n numbers."""
        n_blocks = -(-n // THREADS)
        self._plain_kernels.launch(name, (n_blocks,), self._buffers | batch.views | arguments | {"n": n})
