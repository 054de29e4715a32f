"""How near the engine decodes to what the memory bandwidth of a GPU allows; all that a GPU is needed for.

    --shape or --model x rows x contenders --generate()--> tokens/s beside the floor --rounds()--> table

The floor of a step is the bytes that it must read (weights once, of experts those that are chosen, the KV
cache of every sequence) over the bandwidth that a kernel which only reads reaches here, in the same rounds.
`--contenders` puts the engine without one of its features beside it. Other servers: bench.py http.

`gpu-parts 1`, `2` and `3` are commands of less than ten minutes. A step is a process of its own, for an
error of CUDA spoils the process that it comes in. If one fails, which each does without a device, the next
one runs, and the command fails. It ends when its time is over.

Not here: whether the answers are right (tests/gpu); each kernel by itself (nsys and ncu of NVIDIA).
"""

import argparse
import importlib
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benches import decoding
from benches.decoding import Row
from benches.harness import ROOT, Commands
from checkpoint.config import Config, read_config
from checkpoint.weights import read_weights
from devices.cuda import NO_EARLY, NO_GRAPHS, CudaOps
from engine import Engine
from model import PAGE

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

COMMAND_S = 560  # of the ten minutes that a command may take
LAWS = ["-m", "pytest", "-q", "-rs", "tests/gpu", "-k"]
ENGINE = ["bench.py", "gpu", "--out"]
FEATURES = ["--contexts", "256", "--contenders", "engine", "no-early", "no-graphs"]
# fmt: off
PARTS = {
    1: [[*LAWS, "not sanitizer"], [*ENGINE, "results/gpu.md"]],
    2: [[*ENGINE, "results/gpu-features.md", *FEATURES],
        [*ENGINE, "results/gpu-8b.md", "--shape", "qwen3-8b"]],
    3: [[*LAWS, "memcheck"], [*LAWS, "racecheck"]],
}
# fmt: on


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
    return decoding.read_bytes(config, batch) + 4 * batch * n_seen * config.n_kv_heads * config.head_dim


def engine_of(args: argparse.Namespace, contender: str) -> Engine:
    """Return the engine with the model that the options name, and pages for the largest batch."""
    with TemporaryDirectory() as folder:
        directory = decoding.checkpoint(args, Path(folder))
        config = read_config(directory)
        weights = read_weights(directory, config, CudaOps.pack)
    length = max(*args.contexts, *args.prompts) + args.new + 1
    max_batch = max(args.batches)
    ops = CudaOps(config, weights, length, max_batch * -(-length // PAGE), max_batch)
    if contender != "engine":
        ops.step_back({"no-graphs": NO_GRAPHS, "no-early": NO_EARLY}[contender], "to measure it")
    return Engine(ops)


def run(args: argparse.Namespace) -> None:
    measure(args, {name: engine_of(args, name) for name in args.contenders})


def measure(args: argparse.Namespace, engines: dict[str, Engine], about: str = "") -> None:
    config = next(iter(engines.values())).config

    def floor(row: Row) -> float:
        return read_bandwidth() / step_bytes(config, row.batch, row.n_prompt + row.n_new // 2)

    card = importlib.import_module("cupy").cuda.runtime.getDeviceProperties(0)["name"].decode()
    about = f"{card}, {args.model or args.shape}, bfloat16.\n{about}"
    runs = {name: partial(decoding.generate, engine) for name, engine in engines.items()}
    decoding.measure(args, about, runs, floor)


def run_part(args: argparse.Namespace) -> None:
    """Run the steps of a part; exits with 0 if all went well."""
    deadline = time.monotonic() + COMMAND_S
    statuses: list[int] = []
    for step in PARTS[args.part]:
        seconds_left = deadline - time.monotonic()
        print("==", *step, f"at most {seconds_left:.0f} s", flush=True)
        statuses.append(subprocess.run([sys.executable, *step], cwd=ROOT, timeout=seconds_left).returncode)
    print("exit statuses", statuses)
    sys.exit(max(statuses))


CONTENDERS = (["engine"], "the engine, and without a feature: engine, no-early, no-graphs")
OPTIONS = decoding.options("qwen3-0.6b", [512, 4096], [256, 4096], [1, 4, 16, 64])
PART = (1, "1: is it right, and how fast? 2: what do features bring? an 8B; 3: memcheck, racecheck")
COMMANDS: Commands = {
    "gpu": (run, {**OPTIONS, "--contenders": CONTENDERS}),
    "gpu-parts": (run_part, {"part": PART}),
}
