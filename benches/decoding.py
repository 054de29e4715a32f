"""How fast the engine decodes, beside what the memory allows: bench.py cpu, gpu, gpu-parts and gpu-report.

    --model --load()--> ops; rows of the options --speed()--> tokens a second --rounds()--> table

A model may be a shape: shapes.json has the config.json of each. Those whose name begins with "dry" are of no
model. Their weights are random, in bfloat16, or MXFP4 where a model has that, and never zeros: a product of
zeros is faster. All are views of the same numbers, which no kernel can tell, and so an 8B takes seconds.

The floor of a step is the bytes that it must read (weights once, of experts those that are chosen, the KV
cache of every sequence) over the bandwidth, that of a plain read, measured in the same rounds.

On a GPU the page says what the check of a start found (devices/check.py). `gpu-report` has the time of each
op of a step as well, in all layers together. `gpu-parts 1`, `2` and `3` are commands of less than ten
minutes. A step of one is a process of its own, for an error of CUDA spoils the process that it comes in. If a
step fails, which each does without a device, the next one runs, and the command fails.

Not here: other servers (servers.py); whether the answers are right (tests/gpu, tests/perplexity.py); each
kernel by itself (nsys and ncu of NVIDIA).
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benches.harness import FOLDER, ROOT, Answer, Case, figures, report
from checkpoint import hub
from checkpoint.config import Config, parse_config, read_config
from checkpoint.weights import all_parts, map_tensors, n_weight_bytes
from devices.cuda import NO_GRAPHS, OPS, PRODUCTS
from engine import Engine, StepOutput
from model import PAGE, NumpyOps, Span
from sampling import Context, Sampling
from scheduler import Sequence
from service.loading import generation_defaults, make_runner, ops_of

BLOCK = 1 << 22  # numbers of noise, which repeat
SCALE = 0.02  # their standard deviation
MXFP4 = 121  # a scale of some 2^-5, and two numbers of 4 bits
N_WORDS = 512  # tokens that every vocabulary has
SHAPES: dict[str, dict[str, Any]] = json.loads((FOLDER / "shapes.json").read_text(encoding="utf-8"))

ROUNDED = "bfloat16", "int8", "int4"  # as --weights; the other contenders: file, numpy, cuda
N_READ = 1 << 29  # bytes, to measure the memory
N_LAUNCHES = 20  # whose time is taken together

GREEDY = Sampling(temperature=0)
_random = np.random.default_rng(0)  # no run finds its prompt in a prefix cache


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


def op_bytes(config: Config, batch: int, context: int, packed: float) -> dict[str, float]:
    """Return what each op of a decoding step reads at least: weights and the KV cache of all sequences.

    Of the experts as many are read as rows choose that choose at random; an embedding only if it is the head.
    A layer with a window reads no more of the cache than that. The weights take `packed` times what they take
    in bfloat16. What is no matrix is little, and counted with the embedding; `pick` reads what a cache has.
    """
    op_of = {matrix: op for op, (matrix, _) in PRODUCTS.items()} | {"embed": "logits", "router": "experts"}
    found: dict[str, float] = defaultdict(float, embed=0, pick=0)
    for part in all_parts(config):
        n_bytes = packed * math.prod(part.shape) * (1 if part.is_mxfp4 else 2)
        if config.experts and ".experts." in part.name:
            found["experts"] += n_bytes * (1 - (1 - config.experts.n_chosen / config.experts.n) ** batch)
        elif part.field != "embed" or config.tied:
            found[op_of.get(part.field, "embed")] += n_bytes
    n_seen = sum(min(context, window or context) for window in config.windows)
    found["attend"] = 4 * batch * n_seen * config.n_kv_heads * config.head_dim
    return {op: found[op] for op in OPS if op in found}


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


def op_times(stream: Any, launches: Iterable[Callable[[], Any]]) -> list[float]:
    """Return the µs that each launch takes on a GPU."""
    times = []
    for launch in launches:
        stream.synchronize()
        began = time.perf_counter()
        for _ in range(N_LAUNCHES):
            launch()
        stream.synchronize()
        times.append(1e6 * (time.perf_counter() - began) / N_LAUNCHES)
    return times


def bandwidth_of_gpu(cp: Any) -> float:
    x = cp.zeros(N_READ // 4, "f4")
    [time_us] = op_times(cp.cuda.get_current_stream(), [x.sum])
    return 1e6 * N_READ / time_us


def op_launches(ops: Any, batch: int, context: int, names: Iterable[str]) -> list[Any]:
    """Return what computes a decoding step, and a CUDA graph of each of its ops by itself, over all layers.

    They run in this order: a step uploads its numbers, and `pick`, the last op, makes those of the next.
    """
    n = -(-ops.max_seq_len // PAGE)
    pages = np.arange(batch * n).reshape(batch, n) % ops.n_pages
    spans = [Span(slot, list(of_slot), [0], context, 1) for slot, of_slot in enumerate(pages)]
    contexts = [Context(GREEDY, [], [])] * batch
    launches = [lambda: ops.read(ops.launch(spans, contexts))]
    with ops._stream:
        _, step = ops._upload_step(spans, contexts)
        for name in names:
            others: Any = dict.fromkeys(OPS.keys() - {name}, lambda *_: None)
            with patch.multiple(ops, **others):
                ops._compute(step)  # everything is loaded then
                launches.append(partial(ops._capture(step).launch, ops._stream))
    return launches


def speed(batch: int, n_prompt: int, n_new: int, sampling: Sampling, engine: Engine) -> list[float]:
    """Return tokens a second: of the prompt if one token is said, else of all answers after the first ones.

    The engine is asked for all answers together, as the server asks it.
    """
    times: list[float] = []

    def read(step: StepOutput) -> bool:
        times.extend(time.monotonic() for _ in step.tokens)
        assert step.finish != "failed", step.message
        return True

    async def together() -> Answer:
        prompts = _random.integers(N_WORDS, size=(batch, n_prompt)).tolist()
        sequences = [Sequence(prompt, n_new, frozenset(), sampling) for prompt in prompts]
        asked_at = time.monotonic()
        await asyncio.gather(*(engine.generate(sequence, read) for sequence in sequences))
        return Answer(asked_at, times, len(times))

    found = figures([asyncio.run(together())])
    return [1e3 * n_prompt / found["first text, ms"] if n_new == 1 else found["tokens/s"]]


def floors(bandwidth: Callable[[], float], batch: int, all_bytes: Iterable[float]) -> list[float]:
    """Return the best of a step that reads so many bytes in its ops: tokens a second, its µs, each op's."""
    at_once = bandwidth()
    times = [n_bytes / at_once for n_bytes in all_bytes]
    return [batch / sum(times), *(1e6 * time_s for time_s in (sum(times), *times))]


def all_cases(args: argparse.Namespace, ops: dict[str, Any], config: Config) -> Iterator[Case]:
    """Yield a case for each prompt, and for each context and batch: of a step, and of its ops."""
    first, *_ = ops.values()
    packed, bandwidth = first.weights.nbytes / n_weight_bytes(config), bandwidth_of_cpu
    if "cuda" in ops:
        packed, bandwidth = 1, partial(bandwidth_of_gpu, first.cp)
    engines = {name: Engine(each) for name, each in ops.items()}
    for n in args.prompts:
        yield Case([f"prompt of {n}, tokens/s"], engines, partial(speed, 1, n, 1, GREEDY))
    for context, batch in itertools.product(args.contexts, args.batches):
        title = f"{batch} x {context}"
        of_ops = op_bytes(config, batch, context, packed)
        lines = [f"decode, {title}, tokens/s"]
        yield Case(lines, engines, partial(speed, batch, context, args.new, GREEDY))
        if args.table.get("ops") and NO_GRAPHS not in first.degraded:
            of_each = [f"{op}, {title}, µs" for op in ("a step", *of_ops)]
            yield Case(
                of_each,
                {"cuda": op_launches(first, batch, context, of_ops)},
                partial(op_times, first._stream),
            )
            lines += of_each
        yield Case(lines, {"floor": of_ops.values()}, partial(floors, bandwidth, batch))
    own = Sampling(**generation_defaults(config.generation))
    sampled = partial(speed, batch, context, args.new, own)
    yield Case([f"sampled, decode, {title}, tokens/s"], engines, sampled)
    yield Case(["memory, GB/s"], {"floor": bandwidth}, lambda measure: [measure() / 1e9])


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
    first, *_ = ops.values()
    about = [f"{name}: {value}." for name, value in (first.about | first.degraded).items()]
    if "cuda" in ops:
        cp = first.cp
        about.append(f"Driver {cp.cuda.runtime.driverGetVersion()}, CuPy {cp.__version__}.")
        about += [f"{op}: {share:.2%} from plain kernels." for op, share in first.differences.items()]
    report(args, "\n".join([directory.name, *about]), [*all_cases(args, ops, config)])


def run_part(args: argparse.Namespace) -> None:
    statuses: list[int] = []
    for step in args.table["parts"][args.part - 1]:
        statuses.append(subprocess.run([sys.executable, *shlex.split(step)], cwd=ROOT).returncode)
    sys.exit(any(statuses))
