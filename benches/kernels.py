"""Each kernel of a step by itself on a GPU: its launches in all layers, as one CUDA graph.

    spans of a step --launches()--> {kernel: its launches} --timed()--> µs in the step

The last row of a step is the whole of it. What starting kernels early brings: bench.py gpu --contenders.

Not here: whether the numbers are right (tests/gpu), a whole engine (gpu.py).
"""

import argparse
import importlib
import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benches import gpu
from benches.harness import GREEDY, Case, Figures, report
from devices.cuda import CudaOps
from devices.kernels import CHAINS, Kernels
from model import PAGE, Span
from sampling import Context

N_TIMES = 20  # a graph is launched in each round

Launch = tuple[Any, ...]  # the arguments of Kernels.launch(): a kernel's name is the first


def launches(ops: CudaOps, spans: list[Span]) -> dict[str, list[Launch]]:
    """Return what a step launches, by the kernel's name; each time it is the same step, not the next one."""
    found: dict[str, list[Launch]] = {}

    def launch(*arguments: Any) -> None:
        found.setdefault(arguments[0], []).append(arguments)

    with ops._stream:
        host, step = ops._upload_step(spans, [Context(GREEDY, [], [])] * len(spans))
        step.views["pick_rows"][:, 4] = CHAINS
    ops._stream.synchronize()
    host.free.append(host)
    kernels = ops._kernels
    ops._kernels = cast(Kernels, SimpleNamespace(launch=launch))
    ops._compute(step)
    ops._kernels = kernels
    return found


def timed(launches: list[Launch], ops: CudaOps, row: str) -> Figures:
    """Return the microseconds of the launches together."""
    cuda = importlib.import_module("cupy").cuda

    def launch_all() -> None:
        for launch in launches:
            ops._kernels.launch(*launch)

    with ops._stream:
        launch_all()  # loads what is not loaded: a capture must not do that
        graph = ops._capture(launch_all)
        begin, end = cuda.Event(), cuda.Event()
        begin.record(ops._stream)
        for _ in range(N_TIMES):
            graph.launch(ops._stream)
        end.record(ops._stream)
        end.synchronize()
    return {row: 1e3 * float(cuda.get_elapsed_time(begin, end)) / N_TIMES}


def cases(ops: CudaOps, title: str, n: int, context: int, n_each: int) -> Iterator[Case]:
    """Yield the kernels of a step: n sequences, each with so many new tokens after so many."""
    n_pages = -(-(context + n_each) // PAGE)
    token_ids = np.random.default_rng(0).integers(ops.config.vocab_size, size=n_each).tolist()
    spans: list[Span] = []
    for slot in range(n):
        pages = range(slot * n_pages, (slot + 1) * n_pages)
        spans.append(Span(slot, list(pages), token_ids, context, 1))
    by_kernel = launches(ops, spans)
    by_kernel["the whole step"] = [*itertools.chain(*by_kernel.values())]
    for kernel, of_kernel in by_kernel.items():
        yield {"": of_kernel}, partial(timed, ops=ops, row=f"{title}: {kernel}, µs")


def run(args: argparse.Namespace) -> None:
    ops = gpu.ops_of(args, max(args.contexts) + CudaOps.chunk + PAGE)
    found: list[Case] = []
    for context in args.contexts:
        for n in args.batches:
            found += cases(ops, f"{n} x {context}", n, context, 1)
        found += cases(ops, f"{ops.chunk} of a prompt after {context}", 1, context, ops.chunk)
    report(args, f"The kernels at the shape of {args.model or args.shape}.", found)


options = gpu.shape_options
