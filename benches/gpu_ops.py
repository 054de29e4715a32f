"""Each kernel by itself on a GPU: microseconds, bytes or operations a second, beside cuBLAS where torch is.

    shape --gpu_checkpoint--> CudaOps --CUDA graphs of one op in all layers--> Timings --report()--> tables

A graph holds the op once for each layer, so that weights come from memory and not from the L2 cache. `early`
is with programmatic dependent launch, `late` without; `blocks` is CudaOps.enough_blocks: a product is cut
into the largest shape for its rows that gives so many blocks.

To try where a GPU is at hand, for nobody could measure it yet; each is a number of the source:
    enough_blocks 1, 64, 256, 10**9   devices/cuda.py: which shape for 5 rows and more (swept here)
    AHEAD 2, 4, 8; L2_BYTES 0, 32768  kernels.cu: steps of weights in registers, and brought to the L2 cache
    X_STAGES 0, 2, 4                  devices/kernels.py: of the ring through which few rows read x
                                      (0 is LLMREF_NO_STAGING=1); the losers go
    STAGES 3, 4                       kernels.cu: of the ring of x and w in wide blocks; more than 48 KB of
                                      shared memory must be asked for
    wgmma for many rows               needs sm_90a: NVRTC by ourselves, loaded as a cubin, for CuPy asks for
                                      sm_90; and another order of terms within a group of 16, for its operands
                                      come in chunks of 8 neighbours: 8 bytes a lane at k = 4t and 16 + 4t

In narrow blocks (up to 32 columns) weights come through registers, not through a ring: 64 KB of them are on
their way to a block of 16 rows, where 17 KB to a processor keep an H100's memory busy (3.35 TB/s times
0.65 µs). Nor should a ring help 64 rows by 32 columns: for each byte of weights such a block reads two of x,
and the L2 cache is what limits it.

Rules of this file:
1. Results are on disk after each op, whatever ends the command.
2. An op that fails is a line, and the others go on.

Not here: whether the numbers are right (tests/gpu), a whole engine (gpu.py).
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benches import gpu
from benches.common import GREEDY
from benches.gpu_checkpoint import expert_bytes
from benches.gpu_contenders import Cell, cupy
from checkpoint.config import read_config
from checkpoint.weights import Layer, bfloat16, read_weights
from devices.cuda import CudaOps
from devices.kernels import ANY_SHAPE, FEW_ROWS
from devices.steps import DeviceStep, place_spans
from model import PAGE, Span
from sampling import Context

N_LAUNCHES = 140  # of the smallest kernel, in a row: about the launches of a step of 28 layers
ROUNDS = 5  # of which the median is reported
N_TIMES = 20  # a graph is launched in each round


class Timing(NamedTuple):
    """One op at one size. n_bytes and n_operations are those of one of it; 0: they are not the point."""

    op: str
    n_rows: int
    context: int  # tokens before the row; 0: does not matter
    blocks: int  # CudaOps.enough_blocks; 0: does not matter
    late_us: float
    early_us: float
    n_bytes: int
    n_operations: int

    @property
    def best_us(self) -> float:
        return min(self.late_us, self.early_us)


class Stand:
    """CudaOps with all that an op needs before it can be timed alone."""

    def __init__(self, folder: Path, max_context: int, max_batch: int) -> None:
        config = read_config(folder)
        self.n_pages_each = -(-(max_context + 1) // PAGE)
        config = replace(config, max_seq_len=max(config.max_seq_len, self.n_pages_each * PAGE))
        self.cp = cupy()
        weights = read_weights(folder, config, CudaOps.pack)
        n_pages = self.n_pages_each * max_batch
        self.ops = CudaOps(config, weights, self.n_pages_each * PAGE, n_pages, max_batch)
        self.config = self.ops.config
        self.stream = self.ops._stream
        self.layers = self.ops.weights.layers
        rng = np.random.default_rng(0)
        for name in ("x", "y", "h"):  # of zeros a product is faster, and all choose the same experts
            buffer = self.ops._buffers[name]
            noise = rng.standard_normal(buffer.shape, np.float32)
            buffer.set(noise if buffer.dtype == np.float32 else bfloat16(noise))

    def rows(self, n: int, n_wanted: int = 0) -> DeviceStep:
        """A step for the ops that look at no page."""
        wanted = self.cp.asarray(np.arange(max(n_wanted, 1), dtype=np.int32))
        return DeviceStep({"wanted": wanted}, n, n_wanted, 0, 0, 1, False, False)

    def decode(self, n: int, context: int) -> DeviceStep:
        """The next token of n sequences, each behind so many."""
        spans = []
        for slot in range(n):
            pages = range(slot * self.n_pages_each, (slot + 1) * self.n_pages_each)
            spans.append(Span(slot, list(pages), [1 + slot], context, 1))
        contexts = [Context(GREEDY, [], [])] * n
        with self.stream:
            memory, host, step = self.ops._upload_step(place_spans(spans, contexts))
        self.stream.synchronize()
        memory.free.append(host)
        return step

    def microseconds(self, work: Callable[[], None], n: int, early: bool) -> float:
        """Median time of one of the n things that work() does, as a CUDA graph."""
        with self.stream:
            work()  # loads what is not loaded: a capture must not do that
            graph = self._captured(work, early)
            times = [self._elapsed_us(graph) for _ in range(1 + ROUNDS)]
        return median(times[1:]) / N_TIMES / n

    def _captured(self, work: Callable[[], None], early: bool) -> Any:
        kernels = self.ops._kernels
        kernels.overlap = early and kernels._driver is not None
        self.stream.begin_capture()
        try:
            work()
        finally:
            graph = self.stream.end_capture()
            kernels.overlap = False
        return graph

    def _elapsed_us(self, graph: Any) -> float:
        begin, end = self.cp.cuda.Event(), self.cp.cuda.Event()
        begin.record(self.stream)
        for _ in range(N_TIMES):
            graph.launch(self.stream)
        end.record(self.stream)
        end.synchronize()
        return 1e3 * float(self.cp.cuda.get_elapsed_time(begin, end))

    def timing(
        self,
        op: str,
        n_rows: int,
        work: Callable[[], None],
        n: int,
        context: int = 0,
        blocks: int = 0,
        n_bytes: int = 0,
        n_operations: int = 0,
    ) -> Timing:
        late_us = self.microseconds(work, n, early=False)
        early_us = self.microseconds(work, n, early=True)
        return Timing(op, n_rows, context, blocks, late_us, early_us, n_bytes, n_operations)


# --- the ops ------------------------------------------------------------------------------------------------


def launches(stand: Stand) -> Iterator[Timing]:
    """What a launch costs beside its work: one block of rms_norm."""
    ops = stand.ops
    x, normed = ops._buffers["x"], ops._buffers["normed"]

    def work() -> None:
        for _ in range(N_LAUNCHES):
            ops._kernels.launch("rms_norm", ANY_SHAPE, (1,), ops.weights.norm, x, None, normed)

    yield stand.timing("a launch", 1, work, N_LAUNCHES)


def products(stand: Stand, n: int) -> Iterator[Timing]:
    c, ops = stand.config, stand.ops
    x, y, h = (ops._buffers[name] for name in ("x", "y", "h"))
    step = stand.rows(n)
    n_heads = c.n_heads * c.head_dim
    # fmt: off
    #    op         numbers of its matrices           of a layer
    table: list[tuple[str, int, Callable[[Layer], object]]] = [
        ("qkv",     (n_heads + 2 * c.n_kv_heads * c.head_dim) * c.dim, lambda layer: ops.qkv(x, layer, step)),
        ("out",     c.dim * n_heads,                  lambda layer: ops.out(x, y, layer, step)),
        ("gate_up", 2 * c.hidden_dim * c.dim,         lambda layer: ops.gate_up(x, layer, step)),
        ("down",    c.dim * c.hidden_dim,             lambda layer: ops.down(x, h, layer, step)),
    ]
    # fmt: on
    if c.experts:
        table = table[:2]  # experts() has the rest
    sweep = [CudaOps.enough_blocks]
    if n >= FEW_ROWS.min_rows:
        sweep = [1, CudaOps.enough_blocks, 256, 10**9]
    for op, size, of_layer in table:

        def work(of_layer: Callable[[Layer], object] = of_layer) -> None:
            for layer in stand.layers:
                of_layer(layer)

        for blocks in sweep:
            ops.enough_blocks = blocks
            sizes = {"n_bytes": 2 * size, "n_operations": 2 * size * n}
            yield stand.timing(op, n, work, len(stand.layers), blocks=blocks, **sizes)
    ops.enough_blocks = CudaOps.enough_blocks


def experts(stand: Stand, n: int) -> Iterator[Timing]:
    """All kernels of a mixture's experts, router and all; nothing where the model is no mixture."""
    c, ops = stand.config, stand.ops
    if not c.experts:
        return
    step = stand.rows(n)

    def work() -> None:
        for layer in stand.layers:
            ops.experts(ops._buffers["x"], layer, step)

    sizes = {
        "n_bytes": round(expert_bytes(c, n) / c.n_layers),
        "n_operations": 2 * n * c.experts.n_chosen * 3 * c.experts.hidden_dim * c.dim,
    }
    yield stand.timing("experts", n, work, len(stand.layers), **sizes)


def logits(stand: Stand, n: int) -> Iterator[Timing]:
    c, ops = stand.config, stand.ops
    step = stand.rows(n, n)

    def work() -> None:
        ops.logits(ops._buffers["x"], ops.weights, step)

    size = c.vocab_size * c.dim
    yield stand.timing("logits", n, work, 1, n_bytes=2 * size, n_operations=2 * size * n)


def attention(stand: Stand, n: int, context: int) -> Iterator[Timing]:
    c, ops = stand.config, stand.ops
    step = stand.decode(n, context)

    def work() -> None:
        for i, layer in enumerate(stand.layers):
            ops.attend(ops._buffers["qkv"], layer, i, step)

    n_bytes = 2 * 2 * c.n_kv_heads * c.head_dim * (context + 1) * n
    yield stand.timing("attend", n, work, len(stand.layers), context=context, n_bytes=n_bytes)


def decode_step(stand: Stand, n: int, context: int) -> Iterator[Timing]:
    step = stand.decode(n, context)
    cell = Cell(n, context, 2)
    n_bytes = gpu.step_bytes(stand.config, cell)
    work = partial(stand.ops._compute, step)
    yield stand.timing("decode step", n, work, 1, context=context, n_bytes=n_bytes)


def cublas(stand: Stand, n: int) -> Iterator[Timing]:
    """The same products by torch, in a CUDA graph as well; nothing where torch finds no GPU."""
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    c = stand.config
    n_heads = c.n_heads * c.head_dim
    # fmt: off
    #    op         size           columns
    table = [
        ("qkv",     c.dim,         n_heads + 2 * c.n_kv_heads * c.head_dim),
        ("out",     n_heads,       c.dim),
        ("gate_up", c.dim,         2 * c.hidden_dim),
        ("down",    c.hidden_dim,  c.dim),
    ]
    # fmt: on
    if c.experts:
        table = table[:2]  # torch has no one product for experts
    for op, size, n_columns in table:
        like = {"device": "cuda", "dtype": torch.bfloat16}
        matrices = [torch.randn(n_columns, size, **like) for _ in range(min(len(stand.layers), 12))]
        x = torch.randn(n, size, **like)
        us = torch_microseconds(torch, x, matrices)
        sizes = {"n_bytes": 2 * size * n_columns, "n_operations": 2 * size * n_columns * n}
        yield Timing(f"cuBLAS {op}", n, 0, 0, us, us, **sizes)


def torch_microseconds(torch: Any, x: Any, matrices: Sequence[Any]) -> float:
    """Median time of one product."""

    def work() -> None:
        for w in matrices:
            x @ w.T

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(1 + ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(N_TIMES):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return float(median(times[1:])) / N_TIMES / len(matrices)


# --- the command --------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Time every op at every size, and report."""
    with TemporaryDirectory() as temporary:
        folder = gpu.files(args, Path(temporary))
        max_batch = max(args.batches)
        stand = Stand(folder, max(args.contexts), max_batch)
    timings = list[Timing]()
    for measurement in measurements(stand, args):
        try:
            for timing in measurement:
                timings.append(timing)
                save(timings, args)
                print(" | ".join(cells_of(timing)), file=sys.stderr, flush=True)
        except Exception as error:
            print(f"failed: {gpu.reason(error)}", file=sys.stderr, flush=True)
    print("\n".join(report(timings, args.shape)), end="")


def measurements(stand: Stand, args: argparse.Namespace) -> Iterator[Iterator[Timing]]:
    yield launches(stand)
    for n in args.batches:
        yield decode_step(stand, n, args.contexts[0])
    for n in args.rows:
        yield products(stand, n)
        yield experts(stand, n)
    for n in args.batches:
        yield logits(stand, n)
        for context in args.contexts:
            yield attention(stand, n, context)
    for n in args.rows:
        yield cublas(stand, n)


def save(timings: Sequence[Timing], args: argparse.Namespace) -> None:
    if not args.out:
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [timing._asdict() for timing in timings]
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    args.out.write_text("\n".join(report(timings, args.shape)), encoding="utf-8")


def report(timings: Sequence[Timing], shape: str) -> Iterator[str]:
    """A table for each op."""
    yield f"# The kernels at the shape of {shape}"
    for op, group in groupby(sorted(timings, key=lambda timing: timing.op), lambda timing: timing.op):
        yield f"\n## {op}\n"
        yield from gpu.heading("op", "rows", "context", "blocks", "late, µs", "early, µs", "GB/s", "TFLOP/s")
        for timing in group:
            yield gpu.line(*cells_of(timing))
    yield ""


def cells_of(timing: Timing) -> list[str]:
    sizes = [timing.op, str(timing.n_rows), str(timing.context or ""), str(timing.blocks or "")]
    speeds = [timing.n_bytes / timing.best_us / 1e3, timing.n_operations / timing.best_us / 1e6]
    return [*sizes, *(f"{value:.2f}" for value in (timing.late_us, timing.early_us, *speeds))]


def options(add: argparse.ArgumentParser) -> None:
    gpu.shape_options(add)
    add.description = __doc__
    add.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, default, about in (
        ("rows", [1, 2, 4, 5, 8, 16, 17, 64, 128, 256, 512], "of a product"),
        ("batches", [1, 4, 16, 64], "sequences that decode side by side"),
        ("contexts", [100, 1000, 4000], "tokens before the one that attends"),
    ):
        text = f"{about} (default: {' '.join(map(str, default))})"
        add.add_argument(f"--{name}", type=int, nargs="+", default=default, metavar="N", help=text)
