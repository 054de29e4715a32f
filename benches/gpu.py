"""How near the engine decodes to what the memory bandwidth of a GPU allows.

    --shape or --model x rows x contenders --generate()--> tokens/s beside the floor --rounds()--> table

The floor of a step is the bytes that it must read (weights once, of experts those that are chosen, the KV
cache of every sequence) over the bandwidth that a kernel which only reads reaches here, in the same rounds.
`--contenders` puts the engine without one of its features beside it. Other servers: bench.py http.

Not here: whether the answers are right (tests/gpu), single kernels (kernels.py).
"""

import argparse
import importlib
import itertools
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benches import weights as shapes
from benches.harness import Case, Figures, Row, Run, generate, number_option, report, speed
from checkpoint.config import Config, read_config
from checkpoint.weights import read_weights
from devices.cuda import CudaOps
from engine import Engine
from model import PAGE

CONTENDERS = "engine", "no-early", "no-graphs"  # as it is, and without a feature

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
MAX_READ = 1 << 26  # pieces of 16 bytes: 1 GiB; or a sixteenth of what is free
READ_THREADS = 512  # of a block: four blocks fill a processor
N_READS = 8


def read_bandwidth() -> float:
    """Return bytes a second of a kernel that only reads: the limit of decoding on this card."""
    cp = importlib.import_module("cupy")
    n_blocks = 4 * cp.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    n = min(MAX_READ, cp.cuda.Device().mem_info[0] >> 8)
    n -= n % (4 * n_blocks * READ_THREADS)  # every thread reads as many, four at a time
    noise = np.random.default_rng(0).integers(0, 1 << 32, 1 << 22, np.uint32)
    x, out = cp.asarray(np.resize(noise, 4 * n)), cp.zeros(1, np.uint32)
    kernel = cp.RawModule(code=READ).get_function("read_all")
    stream = cp.cuda.get_current_stream()
    stream.synchronize()
    began = time.perf_counter()
    for _ in range(N_READS):
        kernel((n_blocks,), (READ_THREADS,), (x, np.int32(n), out))
    stream.synchronize()
    return float(N_READS * 16 * n / (time.perf_counter() - began))


def step_bytes(config: Config, batch: int, context: int) -> int:
    """Return what a decoding step reads at least: weights and the KV cache of all sequences.

    A layer with a window reads no more of the cache than that.
    """
    n_seen = sum(min(context, window or context) for window in config.windows)
    return shapes.read_bytes(config, batch) + 2 * batch * 2 * n_seen * config.n_kv_heads * config.head_dim


def floor(config: Config, row: Row) -> Figures:
    n_bytes = step_bytes(config, row.batch, row.n_prompt + row.n_new // 2)
    return {row.name: row.batch * read_bandwidth() / n_bytes}


def ops_of(args: argparse.Namespace, length: int) -> CudaOps:
    """Return the ops of the model that the options name, with pages for the largest batch."""
    with TemporaryDirectory() as folder:
        directory = shapes.checkpoint(args, Path(folder))
        config = read_config(directory)
        weights = read_weights(directory, config, CudaOps.pack)
    max_batch = max(args.batches)
    return CudaOps(config, weights, length, max_batch * -(-length // PAGE), max_batch)


def run(args: argparse.Namespace) -> None:
    length = max(*args.contexts, *args.prompts) + args.new + 1
    engines: dict[str, Engine] = {}
    for name in args.contenders:
        ops = ops_of(args, length)
        ops._uses_graphs = name != "no-graphs"
        if name == "no-early":
            ops._kernels._driver = None
        engines[name] = Engine(ops)
    runs: dict[str, Run] = {name: partial(generate, engine) for name, engine in engines.items()}
    cases: list[Case] = []
    for context, batch in itertools.product(args.contexts, args.batches):
        row = Row(f"decode, {batch} x {context}, tokens/s", batch, context, args.new)
        cases.append((runs, partial(speed, row=row)))
        cases.append(({"floor": ops.config}, partial(floor, row=row)))
    for n in args.prompts:
        cases.append((runs, partial(speed, row=Row(f"prompt of {n}, tokens/s", 1, n, 1))))
    card = importlib.import_module("cupy").cuda.runtime.getDeviceProperties(0)["name"].decode()
    report(args, f"{card}, {args.model or args.shape}, bfloat16.", cases)


def shape_options(add: argparse.ArgumentParser) -> None:
    shapes.options(add)
    number_option(add, "--batches", [1, 4, 16, 64], "sequences")
    number_option(add, "--contexts", [256, 4096], "tokens before")
    add.set_defaults(repeat=3, shape="qwen3-0.6b")


def options(add: argparse.ArgumentParser) -> None:
    shape_options(add)
    about = f"the engine, and without a feature: {', '.join(CONTENDERS)}"
    add.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=["engine"], metavar="NAME", help=about
    )
    number_option(add, "--prompts", [512, 4096], "tokens")
    number_option(add, "--new", 128, "tokens to decode")
