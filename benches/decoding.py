"""How fast the engine decodes, beside what the memory allows: bench.py cpu, gpu, gpu-parts and gpu-report.

    --model --load()--> ops; rows of the options --speed()--> tokens a second --rounds()--> table

A model may be a shape: shapes.json has the config.json of each. Those whose name begins with "dry" are of no
model. Their weights are random, in bfloat16, or MXFP4 where a model has that, and never zeros: a product of
zeros is faster. All are views of the same numbers, which no kernel can tell, and so an 8B takes seconds.

The floor of a step is the bytes that it must read (weights once, of experts those that are chosen, the KV
cache of every sequence) over the bandwidth: of a CPU that of a plain read, measured in the same rounds, of a
GPU that of its data sheet.

On a GPU the page says what the check of a start found (devices/check.py). `gpu-parts 1`, `2` and `3` are
commands of less than ten minutes. A step of one is a process of its own, for an error of CUDA spoils the
process that it comes in. If a step fails, which each does without a device, the next one runs, and the
command fails.

Not here: other servers (servers.py); whether the answers are right (tests/gpu, tests/perplexity.py); each
kernel by itself (nsys and ncu of NVIDIA).
"""

import argparse
import asyncio
import importlib
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benches.harness import FOLDER, ROOT, Answer, Case, Figures, figures, report
from checkpoint import hub
from checkpoint.config import Config, parse_config, read_config
from checkpoint.weights import all_parts, map_tensors, n_weight_bytes
from engine import Engine, StepOutput
from model import NumpyOps
from sampling import Sampling
from scheduler import Sequence
from service.loading import generation_defaults, make_runner, ops_of

BLOCK = 1 << 22  # numbers of noise, which repeat
SCALE = 0.02  # their standard deviation
MXFP4 = 121  # a scale of some 2^-5, and two numbers of 4 bits
N_WORDS = 512  # tokens that every vocabulary has
SHAPES: dict[str, dict[str, Any]] = json.loads((FOLDER / "shapes.json").read_text(encoding="utf-8"))

ROUNDED = "bfloat16", "int8", "int4"  # as --weights; the other contenders: file, numpy, cuda
N_READ = 1 << 30  # bytes, to measure the memory of a CPU
CLOCK, BUS = 36, 37  # kHz and bits: cudaDevAttrMemoryClockRate, cudaDevAttrGlobalMemoryBusWidth

_random = np.random.default_rng(0)  # no run finds its prompt in a prefix cache


class Row(NamedTuple):
    name: str
    batch: int
    n_prompt: int
    n_new: int  # 1: the row is about the prompt
    sampling: Sampling = Sampling(temperature=0)


# --- models -------------------------------------------------------------------------------------------------


def random_tensors(config: Config, _: Path) -> dict[str, NDArray[Any]]:
    """Return a tensor for each part of a checkpoint."""
    parts = all_parts(config)
    noise = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * SCALE
    in_bfloat16 = noise.view(np.uint16)[1::2]  # the upper halves
    random = np.resize(in_bfloat16, max(math.prod(part.shape) for part in parts))
    scales = np.full(random.shape, MXFP4, np.uint8)
    return {
        part.name: (scales if part.is_mxfp4 else random)[: math.prod(part.shape)].reshape(part.shape)
        for part in parts
    }


def step_bytes(config: Config, batch: int, context: int, packed: float = 1) -> int:
    """Return what a decoding step reads at least: weights and the KV cache of all sequences.

    Of the experts as many are read as rows choose that choose at random; an embedding only if it is the head.
    A layer with a window reads no more of the cache than that. The weights take `packed` times what they take
    in bfloat16.
    """
    total = 0.0
    for part in all_parts(config):
        n_bytes = math.prod(part.shape) * (1 if part.is_mxfp4 else 2)
        if config.experts and ".experts." in part.name:
            total += n_bytes * (1 - (1 - config.experts.n_chosen / config.experts.n) ** batch)
        elif part.field != "embed" or config.tied:
            total += n_bytes
    n_seen = sum(min(context, window or context) for window in config.windows)
    return round(total * packed) + 4 * batch * n_seen * config.n_kv_heads * config.head_dim


def load(contender: str, directory: Path, config: Config, length: int, max_batch: int) -> Any:
    """Return the ops of a contender, with room for a full batch."""
    weights = contender if contender in ROUNDED else None
    options: Any = SimpleNamespace(max_batch=max_batch, kv_memory=None, weights=weights, check_kernels=True)
    kind = NumpyOps if contender == "numpy" else ops_of("cuda" if contender == "cuda" else "cpu")
    return make_runner(kind, directory, config, length, options)


# --- what is measured ---------------------------------------------------------------------------------------


def bandwidth_of_cpu() -> float:
    """Return bytes a second that all cores read: each the maximum of its part of an array."""
    n_threads = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(N_READ // 4, np.int32), n_threads)
    with ThreadPoolExecutor(n_threads) as pool:
        began = time.perf_counter()
        list(pool.map(np.max, parts))
        return N_READ / (time.perf_counter() - began)


def bandwidth_of_gpu() -> float:
    attribute = importlib.import_module("cupy").cuda.runtime.deviceGetAttribute
    return float(2e3 * attribute(CLOCK, 0) * attribute(BUS, 0) / 8)  # two transfers a cycle


def speed(engine: Engine, row: Row) -> Figures:
    """Return tokens a second: of the prompt if one token is said, else of all answers after the first ones.

    The engine is asked for all answers together, as the server asks it.
    """
    answers: list[Answer] = []

    async def one() -> None:
        asked_at = time.monotonic()
        times: list[float] = []

        def read(step: StepOutput) -> bool:
            times.extend(time.monotonic() for _ in step.tokens)
            assert step.finish != "failed", step.message
            return True

        prompt = _random.integers(N_WORDS, size=row.n_prompt).tolist()
        await engine.generate(Sequence(prompt, row.n_new, frozenset(), row.sampling), read)
        answers.append(Answer(asked_at, times, len(times)))

    async def together() -> None:
        await asyncio.gather(*(one() for _ in range(row.batch)))

    asyncio.run(together())
    found = figures(answers)
    if row.n_new == 1:
        return {row.name: 1e3 * row.n_prompt / found["first text, ms"]}
    return {row.name: found["tokens/s"]}


def run(args: argparse.Namespace) -> None:
    read: Any = map_tensors
    if args.model in SHAPES:
        directory, config = Path(args.model), parse_config(SHAPES[args.model], {})
        read = partial(random_tensors, config)
    else:
        directory = hub.find(args.model or None)
        config = read_config(directory)
    sizes = max(*args.prompts, *args.contexts) + args.new + 1, max(args.batches)
    with patch("checkpoint.weights.map_tensors", read):
        ops = {name: load(name, directory, config, *sizes) for name in args.contenders}
    engines = {name: Engine(each) for name, each in ops.items()}
    rows = [Row(f"prompt of {n}, tokens/s", 1, n, 1) for n in args.prompts]
    for context, batch in itertools.product(args.contexts, args.batches):
        rows.append(Row(f"decode, {batch} x {context}, tokens/s", batch, context, args.new))
    own = Sampling(**generation_defaults(config.generation))
    rows.append(rows[-1]._replace(name=f"sampled, {rows[-1].name}", sampling=own))
    first, *_ = ops.values()
    packed, bandwidth = first.weights.nbytes / n_weight_bytes(config), bandwidth_of_cpu
    about = [f"{name}: {value}." for name, value in (first.about | first.degraded).items()]
    if "cuda" in ops:
        packed, bandwidth = 1, bandwidth_of_gpu
        about += [f"{op}: {share:.2%} from plain kernels." for op, share in first.differences.items()]

    def floor(row: Row) -> Figures:
        n_bytes = step_bytes(config, row.batch, row.n_prompt, packed)
        return {row.name: row.batch * bandwidth() / n_bytes}

    cases: list[Case] = []
    for row in rows:
        cases.append((engines, partial(speed, row=row)))
        if row.n_new > 1:
            cases.append(({"floor": row}, floor))
    report(args, "\n".join([directory.name, *about]), cases)


def run_part(args: argparse.Namespace) -> None:
    statuses: list[int] = []
    for step in args.table["parts"][args.part - 1]:
        statuses.append(subprocess.run([sys.executable, *shlex.split(step)], cwd=ROOT).returncode)
    sys.exit(any(statuses))
