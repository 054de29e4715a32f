"""What the host does for a step on a GPU: the engine and CudaOps, with a device that takes no time.

    prompts --Engine.generate()--> CudaOps over NoDevice --> microseconds of the processor a step

The engine's thread is what a GPU waits for where it takes longer than the step; the rest of the process, the
event loop that gives each reader its token, runs beside it and shares the interpreter.

Rules of this file:
1. Microseconds are of the processor, not of the clock: a busy machine changes them little. The least of the
   rounds is reported.
2. Memory of the device is memory of the host that nobody computes in: every token is 0.
3. The engine runs ahead of the readers: by the time that all have their first token it has made hundreds of
   steps. So a run has thousands, or there are none left to measure.

Not here: the device's time (gpu.py, gpu_ops.py).
"""

import argparse
import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benches.common import cpu_name, repeat_option, write
from benches.gpu import heading, line
from benches.gpu_checkpoint import FOR_ALL, SHAPES
from checkpoint.config import parse_config
from checkpoint.weights import Layer, Weights
from devices.cuda import CudaOps
from engine import Engine, StepOutput
from model import PAGE
from sampling import Sampling
from scheduler import Sequence
from server import tune_garbage_collector

MAX_SEQ_LEN = 4096
LAUNCHES = SimpleNamespace(cuLaunchKernelEx=lambda *_: 0)


class Array(np.ndarray[Any, Any]):
    """cupy.ndarray, as far as a step touches it; nothing is copied."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def set(self, host: Any, stream: Any = None) -> None:
        pass

    def get(self, stream: Any = None, out: Any = None, blocking: bool = True) -> None:
        pass


class NoDevice:
    """The module cupy over a device that takes no time."""

    def __init__(self) -> None:
        graph = SimpleNamespace(launch=lambda stream: None)
        stream = NoStream(graph)
        event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
        function = NoFunction()
        self.driver = LAUNCHES
        self.cuda = SimpleNamespace(
            Stream=lambda non_blocking: stream,
            Event=lambda disable_timing: event,
            Device=lambda: SimpleNamespace(compute_capability="90"),
            get_current_stream=lambda: stream,
            alloc_pinned_memory=bytearray,
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        )
        self._module = SimpleNamespace(get_function=lambda name: function)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        return np.zeros(shape, dtype).view(Array)

    def RawModule(self, **_: Any) -> Any:
        return self._module


class NoStream:
    ptr = 0

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def begin_capture(self) -> None:
        pass

    def end_capture(self) -> Any:
        return self._graph

    def synchronize(self) -> None:
        pass


class NoFunction:
    kernel = SimpleNamespace(ptr=0)

    def __call__(self, grid: Any, block: Any, args: Any) -> None:
        pass


def no_weights(cp: NoDevice, n_layers: int) -> Weights:
    """Arrays that nobody reads."""
    array = cp.zeros((1, 1), np.uint16)
    layers = [Layer(array, array, array, array, array, array) for _ in range(n_layers)]
    return Weights(array, layers, array, array)


class Cost(NamedTuple):
    """Microseconds of the processor a step."""

    engine: float  # the engine's thread
    process: float  # all threads


def run(args: argparse.Namespace) -> None:
    tune_garbage_collector()
    write(report(args), args.out)


def report(args: argparse.Namespace) -> Iterator[str]:
    yield f"{cpu_name()}; microseconds of the processor a step of decoding, least of {args.repeat}."
    yield "The device takes no time.\n"
    yield from heading("batch", "engine's thread", "process")
    for batch in args.batches:
        costs = [cost(batch, args.new, partial(sampling, args)) for _ in range(args.repeat)]
        engine = min(one.engine for one in costs)
        process = min(one.process for one in costs)
        yield line(str(batch), f"{1e6 * engine:.0f}", f"{1e6 * process:.0f}")
    yield ""


def sampling(args: argparse.Namespace, number: int) -> Sampling:
    if args.sampled:
        return Sampling(temperature=0.7, top_p=0.9, top_k=50, seed=number)
    return Sampling(temperature=0)


def cost(batch: int, n_new: int, sampling: Callable[[int], Sampling]) -> Cost:
    """Decode n_new tokens of so many sequences; their first tokens are not counted."""
    cp = NoDevice()
    config = parse_config(SHAPES["qwen3-0.6b"] | FOR_ALL, {})
    config = replace(config, n_layers=1, windows=(None,), rotary=(True,), vocab_size=1024)
    pages = batch * -(-MAX_SEQ_LEN // PAGE)
    engine = Engine(CudaOps(config, no_weights(cp, 1), MAX_SEQ_LEN, pages, batch, cp))
    ident = engine._thread.ident
    assert ident is not None
    clock = time.pthread_getcpuclockid(ident)
    n_begun = 0
    measured: list[tuple[float, float, int]] = []

    def measure() -> None:
        measured.append((time.clock_gettime(clock), time.process_time(), engine.counts()["steps"]))

    async def one(number: int) -> None:
        request = Sequence([number] * 300, n_new, frozenset([1]), sampling(number))
        has_begun = False

        def take(step: StepOutput) -> bool:
            nonlocal n_begun, has_begun
            if step.finish == "failed":
                raise RuntimeError(step.message)
            if not has_begun:
                has_begun = True
                n_begun += 1
                if n_begun == batch:
                    measure()
            return True

        await engine.generate(request, take)

    async def main() -> None:
        await asyncio.gather(*(one(number) for number in range(batch)))
        measure()  # by then every sequence has ended

    gc.collect()
    asyncio.run(main())
    engine.close()
    (engine_0, process_0, steps_0), (engine_1, process_1, steps_1) = measured
    n = max(1, steps_1 - steps_0)
    return Cost((engine_1 - engine_0) / n, (process_1 - process_0) / n)


def options(add: argparse.ArgumentParser) -> None:
    repeat_option(add)
    batches = [1, 4, 16, 64]
    text = f"sequences side by side (default: {' '.join(map(str, batches))})"
    add.add_argument("--batches", type=int, nargs="+", default=batches, metavar="N", help=text)
    add.add_argument("--new", type=int, default=3000, metavar="N", help="tokens of each (default: 3000)")
    add.add_argument("--sampled", action="store_true", help="drawn with top_k and top_p; else greedy")
