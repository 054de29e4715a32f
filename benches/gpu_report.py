"""A page about one GPU, to attach to an issue: what the check of the kernels found, times, tokens a second.

    python bench.py gpu-report --out results/gpu/NAME.md

It is the check of a start (devices/check.py), each op by itself in a decoding step of one sequence, and the
table of `bench.py gpu`. An op is launched directly and takes longer than in a CUDA graph, so its time
beside its floor, the bytes of its weights over the measured bandwidth, tells which op is slow here, no more.
"""

import argparse
import importlib
import time
from functools import partial
from typing import Any

from benches import decoding, gpu
from benches.harness import Commands
from devices import check
from devices.cuda import CudaOps, plainly
from model import Span, forward
from sampling import Context, Sampling

N_TIMED = 20  # launches of an op, one after another


class Timed:
    """The ops of a step, each launched again and again until its microseconds are known."""

    def __init__(self, ops: CudaOps) -> None:
        self._ops = ops
        self.microseconds: dict[str, float] = {}

    def __getattr__(self, op: str) -> Any:
        return partial(self._run, op)

    def _run(self, op: str, *arguments: Any) -> Any:
        stream = self._ops._stream
        stream.synchronize()
        began = time.perf_counter()
        for _ in range(N_TIMED):
            result = getattr(self._ops, op)(*arguments)
        stream.synchronize()
        self.microseconds[op] = (time.perf_counter() - began) / N_TIMED * 1e6
        return result


def op_rows(ops: CudaOps) -> list[str]:
    """Return a row for each op: how far its logprobs are from plain kernels', its time and its floor."""
    plain = check.by_plain_kernels(ops)
    layer, bandwidth = ops.weights.layers[0], gpu.read_bandwidth()
    matrices = {"qkv": layer.wqkv, "out": layer.wo, "gate_up": layer.w_gate_up, "down": layer.w_down}
    matrices["logits"] = ops.weights.head
    timed = Timed(ops)
    with ops._stream:
        host, batch = ops._upload_step([Span(0, [0], [1], 0, 1)], [Context(Sampling(), [], [])])
        timed.pick(forward(timed, ops.weights, batch), batch)
        host.free.append(host)
    rows = ["| op | logprobs from plain | microseconds | floor |", "|---|---|---|---|"]
    for op, microseconds in timed.microseconds.items():
        with check.without(ops, *[how for how in check.EVERYTHING if how != plainly(op)]):
            why, difference = check.flaw(ops, plain)
        floor = getattr(matrices.get(op), "nbytes", 0) / bandwidth * 1e6
        rows.append(f"| {op} | {why or f'{difference:.1g}'} | {microseconds:.1f} | {floor:.1f} |")
    return rows


def report(args: argparse.Namespace) -> None:
    engine = gpu.engine_of(args, "engine")
    ops: Any = engine._runner
    check.prove(ops, anew=True)
    cp = importlib.import_module("cupy")
    about = [f"CUDA driver {cp.cuda.runtime.driverGetVersion()}, CuPy {cp.__version__}."]
    about += [f"{name}: {value}." for name, value in (ops.about | ops.degraded).items()]
    gpu.measure(args, {"engine": engine}, "\n".join([*about, "", *op_rows(ops), ""]))


COMMANDS: Commands = {
    "gpu-report": (report, decoding.options("qwen3-0.6b", [1000], [256], [1, 8, 64])),
}
