"""Each kernel of a step by itself on a GPU: its launches in all layers, as one CUDA graph.

    spans of a step --launches()--> {kernel: its launches} --timed()--> µs in the step, GB/s of what it reads

The last row of a step is the whole of it. What starting kernels early brings: bench.py gpu --contenders.

Not here: whether the numbers are right (tests/gpu), a whole engine (gpu.py).
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from benches import gpu
from benches.harness import Case, Figures, report
from benches.runs import GREEDY
from checkpoint.config import read_config
from checkpoint.weights import read_weights
from devices.cuda import CudaOps
from devices.kernels import CHAINS, Kernels
from model import PAGE, Span
from sampling import Context

N_TIMES = 20  # a graph is launched in each round

Launch = tuple[Any, ...]  # the arguments of Kernels.launch(): a kernel's name is the first


class Recorder:
    """Stands where Kernels stands, and keeps the launches by the kernel's name."""

    def __init__(self) -> None:
        self.launches: dict[str, list[Launch]] = {}

    def launch(self, *launch: Any) -> None:
        self.launches.setdefault(launch[0], []).append(launch)


def launches(ops: CudaOps, span_of: Callable[[int], Span], n: int) -> dict[str, list[Launch]]:
    """Return what a step of n spans launches; each time it is the same step, not the next one."""
    contexts = [Context(GREEDY, [], [])] * n
    with ops._stream:
        memory, host, step = ops._upload_step([span_of(slot) for slot in range(n)], contexts)
        step.views["pick_rows"][:, 4] = CHAINS
    ops._stream.synchronize()
    memory.free.append(host)
    kernels, recorder = ops._kernels, Recorder()
    ops._kernels = cast(Kernels, recorder)
    ops._compute(step)
    ops._kernels = kernels
    return recorder.launches


def timed(ops: CudaOps, row: str, launches: list[Launch], n_bytes: int) -> Figures:
    """Microseconds of the launches together; n_bytes: what they must read."""
    event = gpu.cupy().cuda.Event

    def launch_all() -> None:
        for launch in launches:
            ops._kernels.launch(*launch)

    with ops._stream:
        launch_all()  # loads what is not loaded: a capture must not do that
        graph = ops._capture(launch_all)
        begin, end = event(), event()
        begin.record(ops._stream)
        for _ in range(N_TIMES):
            graph.launch(ops._stream)
        end.record(ops._stream)
        end.synchronize()
    us = 1e3 * float(gpu.cupy().cuda.get_elapsed_time(begin, end)) / N_TIMES
    figures = {f"{row}, µs": us}
    if n_bytes:
        figures[f"{row}, GB/s"] = n_bytes / us / 1e3
    return figures


def matrix_bytes(ops: CudaOps, launches: list[Launch]) -> int:
    """Bytes of the layers' matrices, and of the head, that launches of one kernel read; 0 for experts."""
    name, _, arguments, *_ = launches[0]
    matrices = {*vars(ops.weights.layers[0]), "head"}
    names = [
        parameter.name
        for parameter in ops._kernels._signatures[name].parameters
        if parameter.name in matrices
    ]
    n_bytes = (int(arguments[name].nbytes) for name in names if arguments[name] is not None)
    return len(launches) * sum(n_bytes)


def cases(ops: CudaOps, title: str, n: int, context: int, n_each: int) -> Iterator[Case]:
    """The kernels of a step: n sequences, each with so many new tokens after so many."""
    n_pages = -(-(context + n_each) // PAGE)
    token_ids = np.random.default_rng(0).integers(ops.config.vocab_size, size=n_each).tolist()

    def span_of(slot: int) -> Span:
        pages = range(slot * n_pages, (slot + 1) * n_pages)
        return Span(slot, list(pages), token_ids, context, 1)

    by_kernel = launches(ops, span_of, n)
    for kernel, of_kernel in by_kernel.items():
        yield {"": partial(timed, ops, f"{title}: {kernel}", of_kernel, matrix_bytes(ops, of_kernel))}
    step = [*itertools.chain(*by_kernel.values())]
    n_bytes = gpu.step_bytes(ops.config, n * n_each, context)
    yield {"": partial(timed, ops, f"{title}: the whole step", step, n_bytes if n_each == 1 else 0)}


def run(args: argparse.Namespace) -> None:
    length = max(args.contexts) + CudaOps.chunk + PAGE
    most = max(args.batches)
    with TemporaryDirectory() as folder:
        directory = gpu.files(args, Path(folder))
        config = read_config(directory)
        weights = read_weights(directory, config, CudaOps.pack)
    ops = CudaOps(config, weights, length, most * -(-length // PAGE), most)
    found: list[Case] = []
    for context in args.contexts:
        for n in args.batches:
            found += cases(ops, f"{n} x {context}", n, context, 1)
        found += cases(ops, f"{ops.chunk} of a prompt after {context}", 1, context, ops.chunk)
    report(args, f"The kernels at the shape of {directory.name}.", found)


def options(add: argparse.ArgumentParser) -> None:
    gpu.shape_options(add)
