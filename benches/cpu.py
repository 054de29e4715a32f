"""Prefill and decoding on the processor, beside others: the same weights, prompts, machine and minutes.

    --model or --shape, --weights x rows x contenders --generate()--> token times --rounds()--> table

The engine runs in each format of the weights, and with NumpyOps; `llama.cpp` is its server in this process,
with the same GGUF file (`pip install xllamacpp`).

Rules of this file:
1. All are greedy.
2. The floor is what the memory allows, for the first of the formats: the weights are read once for a token.
   Its speed is measured by as many threads, in the same rounds, with the maximum of an array of 1 GB.

Not here: how long an HTTP request takes (http.py, server.py).
"""

import argparse
import importlib.util
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import threadpoolctl

from benches import decoding
from benches.decoding import Prompts, Row, Run, TokenTimes
from benches.harness import Case, Commands, Figures, Options, prose
from checkpoint.config import read_config
from checkpoint.weights import read_weights
from engine import Engine
from model import PAGE, Batch, NumpyOps, Span, forward
from service.loading import ops_of, packs
from tokenizer import Tokenizer

MAX_BATCH = 8
MAX_SEQ_LEN = 1024
N_WINDOW = 512  # tokens that see each other, as in llama.cpp's perplexity
N_PAGES = MAX_BATCH * MAX_SEQ_LEN // PAGE

# --- contenders ---------------------------------------------------------------------------------------------


def llama_cpp(file: Path, n_threads: int, prompts: Prompts, n_new: int) -> TokenTimes:
    """Ask for completions, a thread for each. The server lives for one run: waiting takes others' time."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel = MAX_BATCH
    params.n_ctx = MAX_BATCH * MAX_SEQ_LEN
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.cache_ram_mib = 0  # no prompt of an earlier round
    params.verbosity = 0
    server = xllamacpp.Server(params)
    greedy = {"temperature": 0, "samplers": [], "ignore_eos": True, "cache_prompt": False, "stream": True}

    def one(prompt: list[int]) -> list[float]:
        times: list[float] = []
        began = time.perf_counter()

        def on_chunk(_: Any) -> None:  # true would end it
            times.append(time.perf_counter() - began)

        server.handle_completions({"prompt": prompt, "n_predict": n_new, **greedy}, on_chunk)
        return times[:n_new]  # the last chunk has no text, but the reason of the end

    one(prompts[0][::-1])  # another prompt, to warm up
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


# --- what is measured ---------------------------------------------------------------------------------------


def read_bandwidth(n_threads: int, n: int = 2**28) -> float:
    """Return how many bytes a second as many threads can read."""
    parts = np.array_split(np.ones(n, np.int32), n_threads)
    with ThreadPoolExecutor(n_threads) as pool:
        began = time.perf_counter()
        list(pool.map(np.max, parts))
        return 4 * n / (time.perf_counter() - began)


def perplexity(ops: NumpyOps, token_ids: list[int]) -> Figures:
    """Return that of each token of a text but the first of a window, given those before it."""
    losses: list[float] = []
    for start in range(0, len(token_ids), N_WINDOW):
        window = token_ids[start : start + N_WINDOW]
        span = Span(0, range(N_PAGES), window[:-1], 0, len(window) - 1)
        logits = forward(ops, ops.weights, Batch([span])).astype(np.float64)
        losses += list(np.logaddexp.reduce(logits, axis=1) - logits[range(len(logits)), window[1:]])
    return {f"perplexity of {len(token_ids)} tokens": float(np.exp(np.mean(losses)))}


def run(args: argparse.Namespace) -> None:
    with threadpoolctl.threadpool_limits(args.threads, user_api="blas"), TemporaryDirectory() as folder:
        directory = decoding.checkpoint(args, Path(folder))
        config = read_config(directory)
        kind = ops_of("cpu")
        ops: dict[str, NumpyOps] = {}
        for name in args.weights:
            weights = read_weights(directory, config, *packs(kind, config, None if name == "file" else name))
            ops[name] = kind(config, weights, MAX_SEQ_LEN, N_PAGES, MAX_BATCH)
        about = [f"{args.shape or directory.name}, {config.n_layers} layers, {args.threads} threads."]
        about += [f"{name}: {each.about}." for name, each in ops.items()]
        runs: dict[str, Run] = {name: partial(decoding.generate, Engine(each)) for name, each in ops.items()}
        if not args.shape:
            numpy = NumpyOps(config, read_weights(directory, config), MAX_SEQ_LEN, N_PAGES, MAX_BATCH)
            runs["NumPy"] = partial(decoding.generate, Engine(numpy))
        file = directory / "model.gguf"
        if file.is_file() and importlib.util.find_spec("xllamacpp"):
            runs["llama.cpp"] = partial(llama_cpp, file, args.threads)
        n_bytes = ops[args.weights[0]].weights.nbytes

        def floor(row: Row) -> float:
            n_read = decoding.read_bytes(config, row.batch) if config.experts else n_bytes
            return read_bandwidth(args.threads) / n_read

        more: list[Case] = []
        if args.perplexity:
            tokenizer = Tokenizer(directory / "tokenizer.json")
            token_ids = tokenizer.encode(prose(8 * args.perplexity))[: args.perplexity]
            more.append((ops, partial(perplexity, token_ids=token_ids)))
        decoding.measure(args, "\n\n".join(about), runs, floor, *more)


OPTIONS: Options = {
    **decoding.options("", [128], [32], [1, MAX_BATCH]),
    "--threads": (os.cpu_count() or 1, "for ours and for llama.cpp"),
    "--perplexity": (0, "measure it on so many tokens of prose"),
    "--weights": (["file"], "file, as they are there, or as of server.py: bfloat16, int8, int4"),
}
COMMANDS: Commands = {"cpu": (run, OPTIONS)}
