"""A model's directory to the worker that serves it on this machine: with which ops, in how much memory.

    options of the command line --device(), load()--> LocalWorker --facts()--> what the server says of it

Rules of this file:
1. What cannot work is said before the weights are read, and names the option to change.
2. The fastest ops that are installed compute: which, and what would be faster, is in the log.

Not here: the options (server.py), obtaining the files (checkpoint/hub.py).
"""

import argparse
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import threadpoolctl

from checkpoint.config import UnsupportedModel, read_config
from checkpoint.weights import n_params, read_weights
from devices import cuda, kernels
from dialects.structured_output import Grammars
from engine import Engine, ModelRunner
from model import PAGE, NumpyOps
from request import params
from request.template import ChatTemplate
from tokenizer import Tokenizer
from worker import LocalWorker

log = logging.getLogger("loading")

GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def device(wanted: str) -> str:
    """cpu or cuda, for auto what there is; raises ValueError where there is no GPU to compute on."""
    missing = None if wanted == "cpu" else cuda.missing()
    if wanted == "cuda" and missing:
        raise ValueError(f"--device cuda: {missing}")
    return "cpu" if wanted == "cpu" or missing else "cuda"


def load(directory: Path, args: argparse.Namespace) -> LocalWorker:
    config = read_config(directory)
    length = args.max_model_len or config.max_seq_len
    if not 2 <= length <= config.max_seq_len:
        limit = f"expected 2 to {config.max_seq_len}, the model's own limit"
        raise UnsupportedModel(f"--max-model-len {length}: {limit}")
    defaults = generation_defaults(config.generation)
    vocabulary = directory / "tokenizer.json"
    template, tokenizer = ChatTemplate.load(directory), Tokenizer(vocabulary)
    grammars = Grammars(vocabulary, config.vocab_size, config.eos_token_ids)
    kind: type[NumpyOps] | type[cuda.CudaOps]
    if args.device == "cuda":
        kernels.check_sizes(config)
        kind, room = cuda.CudaOps, cuda.room(config, length, args.max_batch)
    else:
        kind, room = cpu_ops(), free_memory() // 4  # no more is real than is used
    n_pages = pool(kind.page_bytes(config), length, args.max_batch, args.kv_memory, room)
    loaded = read_weights(directory, config, kind.pack)
    runner: ModelRunner = kind(config, loaded, length, n_pages, args.max_batch)
    by_id = args.model and not Path(args.model).exists()
    names = args.served_model_name or [args.model if by_id else directory.name]
    engine = Engine(runner, args.speculate)
    return LocalWorker(engine, tokenizer, template, grammars, args.dialect, names, defaults)


def generation_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that generation_config.json presets; raises BadInput for a value out of range."""
    given = {name: generation[name] for name in GENERATION_DEFAULTS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        given["temperature"] = 0  # greedy
    return {
        name: params.COMMON[name].check(value, f"generation_config.{name}") for name, value in given.items()
    }


def cpu_ops() -> type[NumpyOps]:
    """The fastest that is installed."""
    try:
        from devices.cpu import FastOps
    except ImportError as error:
        log.info("NumPy computes (%s); pip install -e '.[fast]' brings what is twice as fast", error)
        return NumpyOps
    return FastOps


def pool(page_bytes: int, length: int, max_batch: int, kv_memory: int | None, room: int) -> int:
    """Pages for keys and values; by default what there is room for, as far as whole contexts of all that run
    at once can use it.
    """
    if kv_memory:
        if kv_memory < page_bytes:
            limit = f"expected {page_bytes} or more, for a page of {PAGE} tokens"
            raise ValueError(f"--kv-memory {kv_memory}: {limit}")
        return kv_memory // page_bytes
    whole = max_batch * -(-length // PAGE)
    return max(1, min(whole, room // page_bytes))


def free_memory() -> int:
    """Bytes, as far as the system says: what is available on Linux, what is there elsewhere."""
    lines = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    found = [path.read_text(encoding="utf-8") if path.exists() else "" for path in lines]
    available = re.search(r"MemAvailable: +(\d+) kB", found[0])
    in_all = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4 * 2**30
    free = int(available[1]) * 1024 if available else in_all
    return min(free, int(found[1])) if found[1].strip().isdigit() else free


def facts(args: argparse.Namespace, worker: LocalWorker) -> dict[str, str]:
    config, n_pages = worker.engine.config, worker.engine.counts()["pages"]
    dtype, size = ("bfloat16", 2) if args.device == "cuda" else ("float32", 4)
    per_token = 2 * size * config.n_layers * config.n_kv_heads * config.head_dim  # k and v
    blas = [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    return {
        "model": f"{worker.names[0]} ({config.model_type}), {n_params(config) / 1e6:.1f} M parameters",
        "memory": f"{per_token / 1e3:.0f} kB a token of context, keys and values in {dtype}",
        "context": f"{worker.engine.max_seq_len} tokens",
        "pages": f"{n_pages} of {PAGE} tokens, at most {n_pages * PAGE * per_token / 1e6:.0f} MB",
        "dialect": worker.dialect,
        "device": f"{args.device}: {worker.engine.about}; {max(blas, default=1)} BLAS threads",
    }
