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
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benches.harness import Case, Figures, number_option, report
from benches.runs import Row, generate, row_cases
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


def floor(config: Config, row: Row) -> Figures:
    n_bytes = step_bytes(config, row.batch, row.n_prompt + row.n_new // 2)
    return {row.name: row.batch * read_bandwidth() / n_bytes}


def run(args: argparse.Namespace) -> None:
    with TemporaryDirectory() as folder:
        directory = files(args, Path(folder))
        config = read_config(directory)
        weights = read_weights(directory, config, CudaOps.pack)
    length = max(*args.contexts, *args.prompts) + args.new + 1
    engines = [engine_of(name, config, weights, length, max(args.batches)) for name in args.contenders]
    runs = dict(zip(args.contenders, (partial(generate, engine) for engine in engines), strict=True))
    usual = {name: partial(run, sampling=SAMPLED) for name, run in runs.items()}
    rows = [
        Row(f"decode, {batch} x {context}, tokens/s", "decode", batch, context, args.new)
        for context, batch in itertools.product(args.contexts, args.batches)
    ]
    sampled = Row("decode, sampled, tokens/s", "decode", 1, args.contexts[0], args.new)
    prompts = [Row(f"first token of {n}, ms", "first_ms", 1, n, 1) for n in args.prompts]
    cases = [*row_cases(rows, runs, config.vocab_size), *row_cases([sampled], usual, config.vocab_size)]
    floors: list[Case] = [{"floor": partial(floor, config, row)} for row in (*rows, sampled)]
    cases = [{**case, **of_memory} for case, of_memory in zip(cases, floors, strict=True)]
    cases += row_cases(prompts, runs, config.vocab_size)
    card = cupy().cuda.runtime.getDeviceProperties(0)["name"].decode()
    report(args, f"{card}, {directory.name}, bfloat16.", cases)
    for engine in engines:
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
