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

from benches import weights as shapes
from benches.harness import (
    Case,
    Figures,
    Prompts,
    Row,
    Run,
    TokenTimes,
    generate,
    number_option,
    prose,
    report,
    speed,
)
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

        def on_chunk(chunk: Any) -> bool:
            times.append(time.perf_counter() - started)
            return False  # go on

        server.handle_completions({"prompt": prompt, "n_predict": n_new} | greedy, on_chunk)
        return times[:n_new]  # the last chunk has no text, but the reason of the end

    started = time.perf_counter()
    one(prompts[0][::-1])  # another prompt, to warm up
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


# --- what is measured ---------------------------------------------------------------------------------------


def floor(n_threads: int, row: Row, n_bytes: int, n: int = 2**28) -> Figures:
    """Return how often a second as many threads could read so many bytes."""
    parts = np.array_split(np.ones(n, np.int32), n_threads)
    with ThreadPoolExecutor(n_threads) as pool:
        started = time.perf_counter()
        list(pool.map(np.max, parts))
        seconds = time.perf_counter() - started
    return {row.name: 4 * n / seconds / n_bytes}


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
        measure(shapes.checkpoint(args, Path(folder)), args)


def measure(directory: Path, args: argparse.Namespace) -> None:
    config = read_config(directory)
    kind = ops_of("cpu")
    ops: dict[str, NumpyOps] = {}
    for name in args.weights:
        packers = packs(kind, config, None if name == "file" else name)
        weights = read_weights(directory, config, *packers)
        ops[name] = kind(config, weights, MAX_SEQ_LEN, N_PAGES, MAX_BATCH)
    about = [f"{args.shape or directory.name}, {config.n_layers} layers, {args.threads} threads."]
    about += [f"{name}: {each.about}." for name, each in ops.items()]
    runs: dict[str, Run] = {name: partial(generate, Engine(each)) for name, each in ops.items()}
    if not args.shape:
        numpy = NumpyOps(config, read_weights(directory, config), MAX_SEQ_LEN, N_PAGES, MAX_BATCH)
        runs["NumPy"] = partial(generate, Engine(numpy))
    file = directory / "model.gguf"
    if file.is_file() and importlib.util.find_spec("xllamacpp"):
        runs["llama.cpp"] = partial(llama_cpp, file, args.threads)
    decode = Row("decode, batch 1, tokens/s", 1, 32, args.new)
    rows = [
        Row("prefill, 128 tokens, tokens/s", 1, 128, 1),
        decode,
        Row(f"decode, batch {MAX_BATCH}, tokens/s", MAX_BATCH, 32, args.new),
    ]
    cases: list[Case] = [(runs, partial(speed, row=row)) for row in rows]
    first, *_ = ops.values()
    n_bytes = shapes.read_bytes(config, 1) if config.experts else first.weights.nbytes
    cases.append(({"floor": args.threads}, partial(floor, row=decode, n_bytes=n_bytes)))
    if args.perplexity:
        tokenizer = Tokenizer(directory / "tokenizer.json")
        token_ids = tokenizer.encode(prose(8 * args.perplexity))[: args.perplexity]
        cases.append((ops, partial(perplexity, token_ids=token_ids)))
    report(args, "\n\n".join(about), cases)


def options(add: argparse.ArgumentParser) -> None:
    shapes.options(add)
    number_option(add, "--new", 64, "tokens to decode")
    number_option(add, "--threads", os.cpu_count() or 1, "for ours and for llama.cpp")
    number_option(add, "--perplexity", 0, "measure it on so many tokens of prose")
    about = "file, as they are there, or as of server.py: bfloat16, int8, int4"
    add.add_argument("--weights", nargs="+", default=["file"], metavar="NAME", help=about)
