"""How near the engine decodes to what the memory bandwidth of a GPU allows.

    --shape or --model x cells x contenders --generate()--> tokens/s beside the floor --rounds()--> table

The floor of a step is the bytes that it must read (weights once, of experts those that are chosen, the KV
cache of every sequence) over the bandwidth that a kernel which only reads reaches here, in the same rounds.
`--contenders` puts the engine without one of its features beside it. Other servers: bench.py http.

Not here: whether the answers are right (tests/gpu), single kernels (kernels.py).
"""

import argparse
import importlib
import itertools
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benches.harness import Case, Figures, number_option, report
from benches.runs import GREEDY, generate, random_prompts
from benches.weights import SHAPES, checkpoint, read_bytes
from checkpoint.config import Config, read_config
from checkpoint.weights import Weights, read_weights
from devices.cuda import NO_GRAPHS, NO_PDL, CudaOps
from engine import Engine
from model import PAGE
from sampling import Sampling

SAMPLED = Sampling(temperature=0.7, top_p=0.9, top_k=50, seed=1)  # as the usual request


# fmt: off
#  contender            environment variable that switches a feature off
CONTENDERS = {
    "engine":          "",
    "no-early":        NO_PDL,
    "no-graphs":       NO_GRAPHS,
}
# fmt: on

READ = r"""
extern "C" __global__ void read_all(const unsigned *x, int n, unsigned *out) {
  long n_threads = (long)gridDim.x * blockDim.x;
  unsigned seen = 0;
  for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i + 3 * n_threads < n; i += 4 * n_threads) {
    uint4 v[4];  // on their way together
    for (int j = 0; j < 4; j++) v[j] = ((const uint4 *)x)[i + j * n_threads];
    for (int j = 0; j < 4; j++) seen ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (seen == 0x9e3779b9u) *out = seen;  // never, as good as; without it nothing would be read
}
"""
MAX_READ = 1 << 28  # pieces of 16 bytes: 4 GiB; or a sixteenth of what is free
READ_THREADS = 512  # of a block: four blocks fill a processor


def cupy() -> Any:
    return importlib.import_module("cupy")


def read_bandwidth() -> float:
    """Bytes a second of a kernel that only reads: the limit of decoding on this card."""
    cp = cupy()
    n_most: int = min(MAX_READ, cp.cuda.Device().mem_info[0] >> 8)
    noise = np.random.default_rng(0).integers(0, 1 << 32, 1 << 22, np.uint32)
    x, out = cp.empty(4 * n_most, np.uint32), cp.zeros(1, np.uint32)
    for begin in range(0, len(x), len(noise)):
        x[begin : begin + len(noise)] = cp.asarray(noise[: len(x) - begin])
    kernel = cp.RawModule(code=READ).get_function("read_all")
    n_processors = cp.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    stream = cp.cuda.get_current_stream()

    def bandwidth(n_blocks: int) -> float:
        n = n_most - n_most % (4 * n_blocks * READ_THREADS)  # every thread reads as many, four at a time
        times = []
        for _ in range(5):
            stream.synchronize()
            began = time.perf_counter()
            for _ in range(4):
                kernel((n_blocks,), (READ_THREADS,), (x, np.int32(n), out))
            stream.synchronize()
            times.append(time.perf_counter() - began)
        return 16 * n * 4 / median(times[1:])

    return max(bandwidth(n_processors * n) for n in (1, 2, 4))  # how many it takes to be fast differs by card


def step_bytes(config: Config, batch: int, context: int) -> int:
    """What a decoding step reads at least: weights and the KV cache of all sequences.

    A layer with a window reads no more of the cache than that.
    """
    n_seen = sum(min(context, window or context) for window in config.windows)
    return read_bytes(config, batch) + 2 * batch * 2 * n_seen * config.n_kv_heads * config.head_dim


def engine_of(name: str, config: Config, weights: Weights, length: int, max_batch: int) -> Engine:
    variable = CONTENDERS[name]
    if variable:
        os.environ[variable] = "1"
    try:
        return Engine(CudaOps(config, weights, length, max_batch * -(-length // PAGE), max_batch))
    finally:
        os.environ.pop(variable, None)


# --- what is measured ---------------------------------------------------------------------------------------

Numbers = Iterator[int]  # of runs: none finds its prompt in a prefix cache


def decode(
    engine: Engine, row: str, batch: int, context: int, n_new: int, sampling: Sampling, numbers: Numbers
) -> Figures:
    prompts = random_prompts(engine.config.vocab_size, batch, context, next(numbers))
    return {row: generate(engine, prompts, n_new, sampling).decode}


def first_token(engine: Engine, n_prompt: int, numbers: Numbers) -> Figures:
    prompts = random_prompts(engine.config.vocab_size, 1, n_prompt, next(numbers))
    return {f"first token of {n_prompt}, ms": 1e3 * generate(engine, prompts, 1).first_s}


def floor(config: Config, row: str, batch: int, context: int) -> Figures:
    return {row: batch * read_bandwidth() / step_bytes(config, batch, context)}


def run(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        directory = files(args, Path(folder))
        config = read_config(directory)
        weights = read_weights(directory, config, CudaOps.pack)
    length = max(*args.contexts, *args.prompts) + args.new + 1
    names = args.contenders
    engines = {name: engine_of(name, config, weights, length, max(args.batches)) for name in names}
    numbers = itertools.count()
    cells = [(batch, context, GREEDY) for context in args.contexts for batch in args.batches]
    cells.append((1, args.contexts[0], SAMPLED))
    cases: list[Case] = []
    for batch, context, sampling in cells:
        row = f"decode, {batch} x {context}{', sampled' if sampling is SAMPLED else ''}, tokens/s"
        cell = (row, batch, context)
        case = {
            name: partial(decode, engine, *cell, args.new, sampling, numbers)
            for name, engine in engines.items()
        }
        cases.append(case | {"floor": partial(floor, config, row, batch, context + args.new // 2)})
    for n in args.prompts:
        cases.append({name: partial(first_token, engine, n, numbers) for name, engine in engines.items()})
    card = cupy().cuda.runtime.getDeviceProperties(0)["name"].decode()
    report(args, f"{card}, {directory.name}, bfloat16.", cases)
    for engine in engines.values():
        engine.close()


def files(args: argparse.Namespace, folder: Path) -> Path:
    """--model, or random weights of a real shape."""
    if args.model:
        return Path(args.model)
    return checkpoint(args.shape, (args.keep or folder) / args.shape)


def shape_options(add: argparse.ArgumentParser) -> None:
    add.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", metavar="NAME", help=", ".join(SHAPES))
    add.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint instead")
    add.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of shapes here")
    add.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N", help="sequences")
    add.add_argument(
        "--contexts", type=int, nargs="+", default=[256, 4096], metavar="N", help="tokens before"
    )
    add.set_defaults(repeat=3)


def options(add: argparse.ArgumentParser) -> None:
    shape_options(add)
    add.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["engine"], metavar="NAME",
                     help=f"the engine, and without a feature: {', '.join(CONTENDERS)}")  # fmt: skip
    add.add_argument(
        "--prompts", type=int, nargs="+", default=[512, 4096], metavar="N", help="first tokens of"
    )
    number_option(add, "--new", 128, "tokens to decode")
