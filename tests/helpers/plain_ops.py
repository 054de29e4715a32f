"""CudaOps whose ops all run by the plain kernels of plain.cu, with which the fast kernels are compared."""

from typing import Any

from devices.cuda import CudaOps

OPS = {"embed", "qkv", "attend", "out", "gate_up", "down", "experts", "logits", "pick"}  # of model.NumpyOps


class PlainOps(CudaOps):
    """CudaOps, each number by a thread of its own."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._kernels.plain = OPS
