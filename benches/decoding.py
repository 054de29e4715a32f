"""How fast the engine decodes, beside what the memory allows: bench.py cpu, gpu, gpu-parts and gpu-report.

    --model, or --shape: random weights --checkpoint()--> a folder that every reader of checkpoints takes
    rows --generate()--> when each token came --speed()--> tokens a second --rounds()--> table

shapes.json has the config.json of each shape. Those whose name begins with "dry" are of no model. Weights are
bfloat16, or MXFP4 where a model has that, and never zeros: a product of zeros is faster. They repeat
after BLOCK numbers, which no kernel can tell, and so an 8B takes seconds.

The floor of a step is the bytes that it must read (weights once, of experts those that are chosen, the KV
cache of every sequence) over the bandwidth: of a CPU that of a plain read, measured in the same rounds, of a
GPU that of its data sheet.

On a GPU the page says what the check of a start found (devices/check.py), and each op's time in a decoding
step of one sequence. Launched directly it takes longer than in a CUDA graph, so beside its floor the time
tells which op is slow here, no more. `gpu-parts 1`, `2` and `3` are commands of less than ten minutes. A step
of one is a process of its own, for an error of CUDA spoils the process that it comes in. If a step fails,
which each does without a device, the next one runs, and the command fails.

Not here: other servers (bench.py http); whether the answers are right (tests/gpu, tests/perplexity.py); each
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
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from safetensors import TensorSpec, serialize_file

import scheduler
from benches.harness import FOLDER, ROOT, Case, Commands, Figures, Options, report
from checkpoint import hub
from checkpoint.config import Config, read_config
from checkpoint.weights import Part, all_parts, n_weight_bytes
from devices import check
from devices.cuda import NO_EARLY, NO_GRAPHS, OPS
from engine import Engine, StepOutput
from model import NumpyOps, Span, forward
from sampling import Context, Sampling
from service.loading import generation_defaults, make_runner, ops_of

BLOCK = 1 << 22  # numbers
SCALE = 0.02  # their standard deviation
MXFP4_SCALE = 121  # of a block: its numbers are some 2^-5
N_WORDS = 512  # tokens that every vocabulary has
SHAPES: dict[str, dict[str, Any]] = json.loads((FOLDER / "shapes.json").read_text(encoding="utf-8"))

ON_CPU = "file", "bfloat16", "int8", "int4", "numpy"  # as --weights; NumPy computes in float32
ON_GPU = {"engine": "", "no-early": NO_EARLY, "no-graphs": NO_GRAPHS}  # and what each does without
N_READ = 1 << 30  # bytes, to measure the memory of a CPU
CLOCK, BUS = 36, 37  # kHz and bits: cudaDevAttrMemoryClockRate, cudaDevAttrGlobalMemoryBusWidth
N_TIMED = 20  # launches of an op, one after another

COMMAND_S = 560  # of the ten minutes that a command may take
LAWS = "-m pytest -q -rs tests/gpu -k"
PARTS = {
    1: [f"{LAWS} 'not sanitizer'", "bench.py gpu"],
    2: [
        "bench.py gpu --contexts 256 --contenders engine no-early no-graphs",
        "bench.py gpu --shape qwen3-8b",
    ],
    3: [f"{LAWS} memcheck", f"{LAWS} racecheck"],
}

_random = np.random.default_rng(0)  # no run finds its prompt in a prefix cache


class Row(NamedTuple):
    name: str
    batch: int
    n_prompt: int
    n_new: int  # 1: the row is about the prompt
    sampling: Sampling = Sampling(temperature=0)


# --- models -------------------------------------------------------------------------------------------------


def checkpoint(args: argparse.Namespace, folder: Path) -> Path:
    """Return the folder of --model; of --shape, once its files are written into this folder."""
    if args.model or not args.shape:
        return hub.find(args.model or None)
    (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]), encoding="utf-8")
    parts = all_parts(read_config(folder))
    noise = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * SCALE
    in_bfloat16 = noise.view(np.uint16)[1::2]  # the upper halves
    random = np.resize(in_bfloat16, max(map(part_bytes, parts)) // 2)
    scales = np.full(len(random), MXFP4_SCALE, np.uint8)
    specs: dict[str, TensorSpec] = {}
    for part in parts:
        array = scales if part.field.endswith("_scales") else random  # that of all matrices is the same
        dtype = "uint8" if part.is_mxfp4 else "bfloat16"
        pointer, size = array.ctypes.data, part_bytes(part)
        specs[part.name] = TensorSpec(dtype=dtype, shape=part.shape, data_ptr=pointer, data_len=size)
    serialize_file(specs, folder / "model.safetensors")
    return folder


def part_bytes(part: Part) -> int:
    return math.prod(part.shape) * (1 if part.is_mxfp4 else 2)


def step_bytes(config: Config, batch: int, context: int, packed: float = 1) -> int:
    """Return what a decoding step reads at least: weights and the KV cache of all sequences.

    Of the experts as many are read as rows choose that choose at random; an embedding only if it is the head.
    A layer with a window reads no more of the cache than that. The weights take `packed` times what they take
    in bfloat16.
    """
    total = 0.0
    for part in all_parts(config):
        if config.experts and ".experts." in part.name:
            total += part_bytes(part) * (1 - (1 - config.experts.n_chosen / config.experts.n) ** batch)
        elif part.field != "embed" or config.tied:
            total += part_bytes(part)
    n_seen = sum(min(context, window or context) for window in config.windows)
    return round(total * packed) + 4 * batch * n_seen * config.n_kv_heads * config.head_dim


def load(contender: str, directory: Path, length: int, max_batch: int) -> Any:
    """Return the ops of a contender, one of ON_CPU or ON_GPU, with room for a full batch."""
    config = read_config(directory)
    kind = NumpyOps if contender == "numpy" else ops_of("cuda" if contender in ON_GPU else "cpu")
    weights = None if contender in ("file", "numpy", *ON_GPU) else contender
    options: Any = SimpleNamespace(max_batch=max_batch, kv_memory=None, weights=weights, check_kernels=True)
    ops = make_runner(kind, directory, config, length, options)
    if without := ON_GPU.get(contender):
        ops.step_back(without, "to measure it")
    return ops


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
    clock, bus = map(importlib.import_module("cupy").cuda.runtime.deviceGetAttribute, (CLOCK, BUS), (0, 0))
    return float(2e3 * clock * bus / 8)  # two transfers a cycle


def speed(engine: Engine, row: Row) -> Figures:
    """Return tokens a second: of the prompts if one token is said, else of all after the first ones."""
    token_times = asyncio.run(generate(engine, row))
    first_s = max(times[0] for times in token_times)
    if row.n_new == 1:
        return {row.name: row.n_prompt / first_s}
    later = [s for times in token_times for s in times if s > first_s]
    return {row.name: len(later) / (max(later) - first_s)}


async def generate(engine: Engine, row: Row) -> list[list[float]]:
    """Ask the engine for all answers together, as the server does; return when tokens came, in seconds."""

    async def one(prompt: list[int]) -> list[float]:
        times: list[float] = []

        def read(step: StepOutput) -> bool:
            times.extend(time.perf_counter() - began for _ in step.tokens)
            assert step.finish != "failed", step.message
            return True

        await engine.generate(scheduler.Sequence(prompt, row.n_new, frozenset(), row.sampling), read)
        return times

    prompts = _random.integers(N_WORDS, size=(row.batch, row.n_prompt)).tolist()
    began = time.perf_counter()
    return await asyncio.gather(*map(one, prompts))


def op_times(engine: Any) -> Figures:
    """Return the microseconds of each op of a decoding step, each launched again and again."""
    ops = engine._runner
    figures: dict[str, float] = {}

    def timed(op: str, *arguments: Any) -> Any:
        began = time.perf_counter()
        for _ in range(N_TIMED):
            result = getattr(ops, op)(*arguments)
        ops._stream.synchronize()
        figures[f"{op}, µs"] = (time.perf_counter() - began) / N_TIMED * 1e6
        return result

    step: Any = SimpleNamespace(**{op: partial(timed, op) for op in OPS})
    with ops._stream:
        host, batch = ops._upload_step([Span(0, [0], [1], 0, 1)], [Context(Sampling(), [], [])])
        step.pick(forward(step, ops.weights, batch), batch)
        host.free.append(host)
    return figures


def run(args: argparse.Namespace) -> None:
    """Measure prefill and decoding, beside what the memory allows."""
    length = max(*args.prompts, *args.contexts) + args.new + 1
    with TemporaryDirectory() as folder:
        directory = checkpoint(args, Path(folder))
        ops = {name: load(name, directory, length, max(args.batches)) for name in args.contenders}
    engines = {name: Engine(each) for name, each in ops.items()}
    first, *_ = ops.values()
    config, weights = first.config, first.weights
    rows = [Row(f"prompt of {n}, tokens/s", 1, n, 1) for n in args.prompts]
    decoded = [
        Row(f"decode, {batch} x {context}, tokens/s", batch, context, args.new)
        for context, batch in itertools.product(args.contexts, args.batches)
    ]
    own = Sampling(**generation_defaults(config.generation))
    sampled = decoded[-1]._replace(name=f"sampled, {decoded[-1].name}", sampling=own)
    cases: list[Case] = [(engines, partial(speed, row=row)) for row in (*rows, *decoded, sampled)]
    about = [f"{args.shape or directory.name}.", *map(str, (first.about | first.degraded).items())]
    matrices: dict[str, Any] = {}
    packed, bandwidth = weights.nbytes / n_weight_bytes(config), bandwidth_of_cpu
    if args.contenders[0] in ON_GPU:
        packed, bandwidth = 1, bandwidth_of_gpu
        cp = importlib.import_module("cupy")
        about += [
            f"CUDA driver {cp.cuda.runtime.driverGetVersion()}, CuPy {cp.__version__}.",
            *(f"{op}: {share:.2%} from plain kernels." for op, share in check.prove(first).items()),
        ]
        layer = weights.layers[0]
        matrices = {"qkv": layer.wqkv, "out": layer.wo, "gate_up": layer.w_gate_up, "down": layer.w_down}
        matrices["logits"] = weights.head
        cases.append(({args.contenders[0]: engines[args.contenders[0]]}, op_times))

    def floors(_: Any) -> Figures:
        bytes_s = bandwidth()
        figures = {f"{op}, µs": 1e6 * getattr(x, "nbytes", 0) / bytes_s for op, x in matrices.items()}
        for row in decoded:
            n_bytes = step_bytes(config, row.batch, row.n_prompt, packed)
            figures[row.name] = row.batch * bytes_s / n_bytes
        return figures

    report(args, "\n".join(about), [*cases, ({"floor": 0}, floors)])


def run_part(args: argparse.Namespace) -> None:
    """Run all that a GPU is needed for, in three commands of less than ten minutes."""
    deadline = time.monotonic() + COMMAND_S
    statuses: list[int] = []
    for step in PARTS[args.part]:
        print("==", step, flush=True)
        words, seconds = [sys.executable, *shlex.split(step)], deadline - time.monotonic()
        statuses.append(subprocess.run(words, cwd=ROOT, timeout=seconds).returncode)
    print("exit statuses", statuses)
    sys.exit(any(statuses))


def options(
    shape: str, contenders: Any, prompts: list[int], contexts: list[int], batches: list[int]
) -> Options:
    return {
        "--model": ("", "as of server.py; without it, the default model"),
        "--shape": (shape, f"random weights instead: {', '.join(SHAPES)}"),
        "--contenders": ([*contenders][:1], f"of {', '.join(contenders)}"),
        "--prompts": (prompts, "tokens"),
        "--contexts": (contexts, "tokens before what is decoded"),
        "--batches": (batches, "sequences"),
        "--new": (64, "tokens to decode"),
    }


PART = (1, "1: is it right, and how fast? 2: what do features bring? an 8B; 3: memcheck, racecheck")
COMMANDS: Commands = {
    "cpu": (run, options("", ON_CPU, [128], [32], [1, 8, 16])),
    "gpu": (run, options("qwen3-0.6b", ON_GPU, [512, 4096], [256, 4096], [1, 4, 16, 64])),
    "gpu-report": (run, options("qwen3-0.6b", ON_GPU, [1000], [256], [1, 8, 64])),
    "gpu-parts": (run_part, {"part": PART}),
}
