"""Each kernel by itself on a GPU, as a CUDA graph over all layers, launched late (in order) and early.

    ops x rows --microseconds()--> µs of one, GB/s of what it must read --rounds()--> table

Not here: whether the numbers are right (tests/gpu), a whole engine (gpu.py).
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benches import gpu
from benches.harness import Case, Figures, report
from benches.runs import GREEDY
from benches.weights import expert_bytes
from checkpoint.config import read_config
from checkpoint.weights import bfloat16, read_weights
from devices.cuda import CudaOps
from devices.kernels import CHAINS
from devices.steps import DeviceStep
from model import PAGE, Span
from sampling import Context

N_LAUNCHES = 140  # of the smallest kernel, in a row: about the launches of a step of 28 layers
N_TIMES = 20  # a graph is launched in each round


class Work(NamedTuple):
    """Something to time."""

    name: str
    run: Callable[[], None]
    n: int  # how many of them run() does
    n_bytes: int  # that one of them must read; 0: not the point


class Stand:
    """CudaOps with all that an op needs before it can be timed alone."""

    def __init__(self, folder: Path, max_context: int, max_batch: int) -> None:
        config = read_config(folder)
        self.n_pages_each = -(-(max_context + 1) // PAGE)
        length = self.n_pages_each * PAGE
        self.config = replace(config, max_seq_len=max(config.max_seq_len, length))
        weights = read_weights(folder, self.config, CudaOps.pack)
        self.ops = CudaOps(self.config, weights, length, self.n_pages_each * max_batch, max_batch)
        rng = np.random.default_rng(0)
        for name in ("x", "y", "h"):  # of zeros a product is faster, and all choose the same experts
            buffer = self.ops._buffers[name]
            noise = rng.standard_normal(buffer.shape, np.float32)
            buffer.set(noise if buffer.dtype == np.float32 else bfloat16(noise))

    def rows(self, n: int, n_wanted: int = 0) -> DeviceStep:
        """A step for the ops that look at no page."""
        wanted = gpu.cupy().asarray(np.arange(max(n_wanted, 1), dtype=np.int32))
        return DeviceStep({"wanted": wanted}, n, n_wanted, 0, 0, 1, False, False)

    def decode(self, n: int, context: int) -> DeviceStep:
        """The next token of n sequences, each after so many."""
        spans = []
        for slot in range(n):
            pages = range(slot * self.n_pages_each, (slot + 1) * self.n_pages_each)
            spans.append(Span(slot, list(pages), [1 + slot], context, 1))
        with self.ops._stream:
            memory, host, step = self.ops._upload_step(spans, [Context(GREEDY, [], [])] * n)
            step.views["pick_rows"][:, 4] = CHAINS  # each time the same step, not the next one
        self.ops._stream.synchronize()
        memory.free.append(host)
        return step

    def time(self, work: Work, early: bool) -> Figures:
        kernels, stream, cp = self.ops._kernels, self.ops._stream, gpu.cupy()
        with stream:
            work.run()  # loads what is not loaded: a capture must not do that
            kernels.overlap = early and kernels._driver is not None
            stream.begin_capture()
            try:
                work.run()
            finally:
                graph = stream.end_capture()
                kernels.overlap = False
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            begin.record(stream)
            for _ in range(N_TIMES):
                graph.launch(stream)
            end.record(stream)
            end.synchronize()
        us = 1e3 * float(cp.cuda.get_elapsed_time(begin, end)) / N_TIMES / work.n
        figures = {f"{work.name}, µs": us}
        if work.n_bytes:
            figures[f"{work.name}, GB/s"] = work.n_bytes / us / 1e3
        return figures


def launches(stand: Stand) -> Work:
    """What a launch costs beside its work: one block of rms_norm."""
    ops = stand.ops

    def launch() -> None:
        for _ in range(N_LAUNCHES):
            arrays = {
                "w": ops.weights.norm,
                "x": ops._buffers["x"],
                "rows": None,
                "y": ops._buffers["normed"],
            }
            ops._kernels.launch("rms_norm", (1,), arrays)

    return Work("a launch", launch, N_LAUNCHES, 0)


def products(stand: Stand, n: int) -> Iterator[Work]:
    """The ops that look at no page, for n rows; of a mixture, all kernels of its experts."""
    c, ops, step = stand.config, stand.ops, stand.rows(n)
    x, y, h = (ops._buffers[name] for name in ("x", "y", "h"))
    n_q = c.n_heads * c.head_dim
    n_qkv = n_q + 2 * c.n_kv_heads * c.head_dim
    # fmt: off
    #    op         inputs   bytes of its matrices
    table: dict[str, tuple[Sequence[Any], int]] = {
        "qkv":     ((x,),   2 * n_qkv * c.dim),
        "out":     ((x, y), 2 * n_q * c.dim),
    }
    if c.experts:
        table["experts"] = (x,), round(expert_bytes(c, n) / c.n_layers)
    else:
        table["gate_up"] = (x,), 4 * c.hidden_dim * c.dim
        table["down"] = (x, h), 2 * c.hidden_dim * c.dim
    # fmt: on

    def op_of_layers(name: str, inputs: Sequence[Any]) -> None:
        for layer in ops.weights.layers:
            getattr(ops, name)(*inputs, layer, step)

    for name, (inputs, n_bytes) in table.items():
        yield Work(f"{name}, {n} rows", partial(op_of_layers, name, inputs), c.n_layers, n_bytes)


def logits(stand: Stand, n: int) -> Work:
    ops, c = stand.ops, stand.config
    run = partial(ops.logits, ops._buffers["x"], ops.weights, stand.rows(n, n))
    return Work(f"logits, {n} rows", run, 1, 2 * c.vocab_size * c.dim)


def steps(stand: Stand, n: int, context: int) -> Iterator[Work]:
    """Attention of n sequences, and their whole step."""
    c, ops, step = stand.config, stand.ops, stand.decode(n, context)

    def attend() -> None:
        for i, layer in enumerate(ops.weights.layers):
            ops.attend(ops._buffers["qkv"], layer, i, step)

    n_bytes = 2 * 2 * c.n_kv_heads * c.head_dim * (context + 1) * n
    yield Work(f"attend, {n} x {context}", attend, c.n_layers, n_bytes)
    compute = partial(ops._compute, step)
    yield Work(f"decode step, {n} x {context}", compute, 1, gpu.step_bytes(c, n, context))


def run(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        stand = Stand(gpu.files(args, Path(folder)), max(args.contexts), max(args.batches))
    works = [launches(stand)]
    for n in args.rows:
        works += products(stand, n)
    works += [logits(stand, n) for n in args.batches]
    for n, context in itertools.product(args.batches, args.contexts):
        works += steps(stand, n, context)
    cases: list[Case] = []
    for work in works:
        cases.append({"late": partial(stand.time, work, False), "early": partial(stand.time, work, True)})
    report(args, f"The kernels at the shape of {args.shape}.", cases)


def options(add: argparse.ArgumentParser) -> None:
    gpu.shape_options(add)
    rows = [1, 2, 4, 5, 8, 16, 17, 64, 128, 256, 512]
    add.add_argument("--rows", type=int, nargs="+", default=rows, metavar="N", help="of a product")
