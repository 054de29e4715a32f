"""Prefill and decoding on the processor, beside others: the same weights, prompts, machine and minutes.

    --model or --shape, --weights x ROWS x contenders --generate()--> Speeds --rounds()--> table

The engine runs in each format of the weights, and with NumpyOps; `llama.cpp` is its server in this process,
with the same GGUF file (`pip install xllamacpp`).

Rules of this file:
1. All are greedy. What only this engine does (prefix caching, drafts) is beside the same without it.
2. The memory's speed is measured by as many threads, between the runs, with the maximum of an array of 1 GB.

Not here: how long an HTTP request takes (http.py, server.py).
"""

import argparse
import importlib.util
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import threadpoolctl

from benches.harness import Case, Figures, about, model_option, number_option, prose, rounds, table, write
from benches.runs import (
    MAX_BATCH,
    Prompts,
    Row,
    Run,
    Speeds,
    generate,
    random_prompts,
    row_cases,
    speeds,
    with_pages,
)
from benches.weights import SHAPES, checkpoint, read_bytes
from checkpoint import hub
from checkpoint.config import Config, read_config
from checkpoint.weights import Weights, read_weights
from engine import Engine
from model import Batch, NumpyOps, Span, forward
from service.loading import cpu_ops, packs
from tokenizer import Tokenizer

MEMORY = "memory, GB/s"
N_TURN = 1000  # tokens of a first turn
N_WINDOW = 512  # tokens that see each other, as in llama.cpp's perplexity
AS_IN_FILE = "file"  # as a name of weights
FORMATS = (AS_IN_FILE, "bfloat16", "int8", "int4")

# --- contenders ---------------------------------------------------------------------------------------------


def llama_cpp_run(file: Path, max_seq_len: int, n_threads: int, prompts: Prompts, n_new: int) -> Speeds:
    """Its completions, a thread for each. The server lives for one run: one that waits takes others' time."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel = MAX_BATCH
    params.n_ctx = MAX_BATCH * max_seq_len
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.cache_ram_mib = 0  # no prompt of an earlier round
    params.verbosity = 0
    server = xllamacpp.Server(params)
    greedy = {"temperature": 0, "samplers": [], "ignore_eos": True, "cache_prompt": False, "stream": True}

    def one(prompt: list[int], n_new: int) -> list[float]:
        times: list[float] = []
        body = {"prompt": prompt, "n_predict": n_new} | greedy

        def on_chunk(chunk: Any) -> bool:
            times.append(time.perf_counter())
            return False  # go on

        server.handle_completions(body, on_chunk)
        return times[:n_new]  # the last chunk has no text, but the reason of the end

    one(prompts[0][::-1], 4)  # another prompt, to warm up
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        times = list(pool.map(lambda prompt: one(prompt, n_new), prompts))
    return speeds(prompts, started, times)


# --- what is measured ---------------------------------------------------------------------------------------


def memory_speed(n_threads: int, n: int = 2**28) -> Figures:
    """Return what as many threads read of n numbers; the best of some passes, for it stands as a limit."""
    parts = np.array_split(np.ones(n, np.int32), n_threads)
    passes = []
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            passes.append(time.perf_counter() - started)
    return {MEMORY: 4 * n / min(passes) / 1e9}


def token_bytes(config: Config, weights: Weights) -> int:
    """Bytes of the weights that one token reads."""
    if config.experts:
        return read_bytes(config, 1)
    n_unread = 0 if config.tied else weights.embed.nbytes
    return int(weights.nbytes - n_unread)


def feature_cases(kind: type[NumpyOps], config: Config, weights: Weights, text: list[int]) -> list[Case]:
    """What prefix caching and speculative decoding bring, to a second turn and to a text that repeats."""
    length = min(config.max_seq_len, N_TURN + 2 * len(text))
    plain, drafting = (Engine(with_pages(kind, config, weights, length), speculate=n) for n in (0, 4))

    def second_turn(is_cached: bool) -> Figures:
        first, other = (random_prompts(config.vocab_size, 1, N_TURN)[0] for _ in range(2))
        generate(plain, [first], 1)
        second = [*(first if is_cached else other), *text]
        return {"prefill of a second turn, tokens/s": generate(plain, [second], 1).prefill}

    def repeating(engine: Engine) -> Figures:
        return {"decode of a text that repeats, tokens/s": generate(engine, [text * 2], len(text)).decode}

    return [
        {"without": partial(second_turn, False), "prefix cache": partial(second_turn, True)},
        {"without": partial(repeating, plain), "drafts": partial(repeating, drafting)},
    ]


def perplexity(kind: type[NumpyOps], config: Config, weights: Weights, token_ids: list[int]) -> Figures:
    """Of each token of a text but the first of a window, given those before it."""
    ops = with_pages(kind, config, weights, N_WINDOW)
    losses: list[float] = []
    for start in range(0, len(token_ids), N_WINDOW):
        window = token_ids[start : start + N_WINDOW]
        span = Span(0, range(ops.n_pages), window[:-1], 0, len(window) - 1)
        logits = forward(ops, weights, Batch([span])).astype(np.float64)
        losses += list(np.logaddexp.reduce(logits, axis=1) - logits[range(len(logits)), window[1:]])
    return {f"perplexity of {len(token_ids)} tokens": float(np.exp(np.mean(losses)))}


# --- the command --------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    with threadpoolctl.threadpool_limits(args.threads, user_api="blas"), TemporaryDirectory() as folder:
        directory = checkpoint(args.shape, Path(folder), args.layers) if args.shape else hub.find(args.model)
        write(list(report(directory, args)), args.out)


def report(directory: Path, args: argparse.Namespace) -> Iterator[str]:
    config = read_config(directory)
    ops = cpu_ops()
    max_seq_len = min(config.max_seq_len, 256 + args.new)
    formats: dict[str, Weights] = {}
    engines: dict[str, Engine] = {}
    for name in args.weights:
        packers = packs(ops, config, None if name == AS_IN_FILE else name)
        formats[name] = read_weights(directory, config, *packers)
        engines[name] = Engine(with_pages(ops, config, formats[name], max_seq_len))
    if not args.shape and ops is not NumpyOps:
        engines["NumPy"] = Engine(with_pages(NumpyOps, config, read_weights(directory, config), max_seq_len))
    runs: dict[str, Run] = {name: partial(generate, engine) for name, engine in engines.items()}
    file = directory / "model.gguf"
    if file.is_file() and importlib.util.find_spec("xllamacpp"):
        runs["llama.cpp"] = partial(llama_cpp_run, file, max_seq_len, args.threads)
    decode = Row("decode, batch 1, tokens/s", "decode", 1, 32, args.new)
    rows = [
        Row("prefill, 128 tokens, tokens/s", "prefill", 1, 128, 1),
        decode,
        Row(f"decode, batch {MAX_BATCH}, tokens/s", "decode", MAX_BATCH, 32, args.new),
    ]
    cases: list[Case] = [{"": partial(memory_speed, args.threads)}]
    medians = rounds([*cases, *row_cases(rows, runs, config.vocab_size)], args.repeat)
    memory = medians.pop(MEMORY)[""]
    shares = {}
    for name, weights in formats.items():
        shares[name] = medians[decode.name][name] * token_bytes(config, weights) / memory / 1e7
    medians[f"batch 1, % of {memory:.1f} GB/s that are read"] = shares
    yield about(f"{args.shape or directory.name}, {config.n_layers} layers, {args.threads} threads.")
    for name, engine in engines.items():
        yield f"{name}: {engine.about}.\n"
    yield from table(medians)
    if args.shape:
        return
    tokenizer = Tokenizer(directory / "tokenizer.json")
    if args.perplexity:
        token_ids = tokenizer.encode(prose(8 * args.perplexity))[: args.perplexity]
        case = {name: partial(perplexity, ops, config, w, token_ids) for name, w in formats.items()}
        yield from table(rounds([case], 1))
    text = tokenizer.encode(prose(8 * args.new))[: args.new]
    yield from table(rounds(feature_cases(ops, config, formats[args.weights[0]], text), args.repeat))


def options(add: argparse.ArgumentParser) -> None:
    model_option(add)
    add.add_argument("--shape", choices=SHAPES, metavar="NAME", help=f"random weights: {', '.join(SHAPES)}")
    number_option(add, "--layers", 1000, "of --shape, at most: what memory holds")
    number_option(add, "--new", 64, "tokens to decode")
    number_option(add, "--threads", os.cpu_count() or 1, "for ours and for llama.cpp")
    number_option(add, "--perplexity", 0, "measure it on so many tokens of prose")
    text = "as of server.py, or file: as in the file"
    add.add_argument("--weights", nargs="+", choices=FORMATS, default=[AS_IN_FILE], metavar="NAME", help=text)
