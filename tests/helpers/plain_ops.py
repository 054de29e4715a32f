"""CudaOps whose ops all run by the plain kernels of plain.cu, with which the fast kernels are compared."""

from typing import Any

from devices.cuda import OPS, CudaOps, plainly


class PlainOps(CudaOps):
    """CudaOps, each number by a thread of its own."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.degraded |= dict.fromkeys(map(plainly, OPS), "for a test")
