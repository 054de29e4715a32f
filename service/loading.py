"""Loading a model: from the options and a directory to the LocalWorker that serves it on this machine.

    directory, options --load()--> LocalWorker --facts()--> the lines that the server prints at its start

It chooses the ops (the kernels of a GPU, Numba or NumPy) and the size of the page pool of the KV cache.

Rules of this file:
1. We refuse a setting that cannot work before we read the weights, and name the option to change.
2. We compute with the fastest installed ops, which a line of the start names.
3. The operator chose the model: if one of its files never ends, the start hangs.

Not here: the options themselves (options.py), obtaining the files (checkpoint/hub.py), reading them
(checkpoint/).
"""

import argparse
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint.config import Config, UnsupportedModel, read_config
from checkpoint.weights import n_params, read_weights
from devices import check, cuda, kernels
from dialects.matchers import Grammars
from engine import Engine
from model import PAGE, NumpyOps
from request import params
from request.template import ChatTemplate
from tokenizer import Tokenizer
from worker import LocalWorker

log = logging.getLogger("loading")

GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# A million of heads of 128: the table has 4 bytes for each dimension of each position, so 512 MB, and making
# it takes three times as much.
MAX_POSITION_DIMS = 2**27
# fmt: off
#    file                            number in it                 bytes
MEMORY_LIMITS = [
    ("/proc/meminfo",                r"MemAvailable: +(\d+) kB",  1024),
    ("/sys/fs/cgroup/memory.max",    r"\d+",                      1),  # "max" without a limit
]
# fmt: on


def load(directory: Path, args: argparse.Namespace) -> LocalWorker:
    """Return the worker over a model; raises ValueError, and what the readers of the files raise."""
    ops_class = ops_of(args.device)
    config = read_config(directory)
    max_seq_len = context_length(config, args.max_model_len)
    defaults = generation_defaults(config.generation)
    vocabulary = directory / "tokenizer.json"
    try:
        template = ChatTemplate.load(directory)
    except (TypeError, KeyError, RecursionError, MemoryError) as error:
        raise UnsupportedModel(f"the chat template in {directory} cannot be read: {error!r}") from error
    tokenizer = Tokenizer(vocabulary)
    # Some generation_config.json name only other ends: https://github.com/Blaizzy/mlx-vlm/pull/2112
    end = tokenizer.added.get(template.tokens.get("eos_token", ""))
    if end is not None and end not in config.eos_token_ids:
        config = replace(config, eos_token_ids=(*config.eos_token_ids, end))
    grammars = Grammars(vocabulary, config.vocab_size, config.eos_token_ids)
    try:
        runner = make_runner(ops_class, directory, config, max_seq_len, args)
    except Exception as error:
        if ops_class is not cuda.CudaOps or isinstance(error, ValueError):
            raise
        if args.device == "cuda":
            raise ValueError(f"--device cuda: {error}") from error
        log.warning("the CPU serves, because the GPU cannot: %s", error)
        runner = make_runner(ops_of("cpu"), directory, config, max_seq_len, args)
        runner.degraded["by the CPU"] = str(error)
    engine = Engine(runner, args.speculate)
    name = directory.name
    if args.model and not Path(args.model).exists():  # an id on the Hub
        name = args.model
    return LocalWorker(
        engine,
        tokenizer,
        template,
        grammars,
        args.dialect,
        args.served_model_name or [name],
        defaults,
        args.max_output_tokens,
    )


def context_length(config: Config, option: int | None) -> int:
    """Return the longest context in tokens, prompt and answer; raises UnsupportedModel."""
    length, rope = config.max_seq_len, config.rope
    if rope.short_factor != rope.long_factor:  # up to this length it is as trained (checkpoint/rope.py)
        length = rope.original_max_position_embeddings
    length = option or length
    longest = min(config.max_seq_len, MAX_POSITION_DIMS // config.head_dim)
    if not 2 <= length <= longest:
        raise UnsupportedModel(
            f"--max-model-len {length}: expected 2 to {longest}, the limit of the model or of the table of "
            "rotary positions"
        )
    return length


def generation_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that generation_config.json presets; raises BadInput for a value out of range."""
    if generation.get("do_sample") is False:
        generation = {**generation, "temperature": 0}  # greedy
    return {
        name: params.COMMON[name].check(generation[name], f"generation_config.{name}")
        for name in GENERATION_DEFAULTS
        if generation.get(name) is not None
    }


# --- ops and memory -----------------------------------------------------------------------------------------


def make_runner(
    ops_class: Any, directory: Path, config: Config, max_seq_len: int, args: argparse.Namespace
) -> Any:
    """Return the ops with the weights, on a GPU checked; raises MemoryError, and what a GPU raises."""
    is_cuda = ops_class is cuda.CudaOps
    if is_cuda:
        kernels.check_sizes(config)
        room = cuda.room(config, max_seq_len, args.max_batch)
        if (directory / "model.gguf").is_file():
            log.warning("a GPU multiplies by bfloat16 alone; the weights of this GGUF file are rounded to it")
    else:
        room = free_memory() // 4  # the system gives memory only for pages that are used
    n_pages = pool(ops_class.page_bytes(config), max_seq_len, args.max_batch, args.kv_memory, room)
    weights = read_weights(directory, config, *packs(ops_class, config, args.weights))
    runner = ops_class(config, weights, max_seq_len, n_pages, args.max_batch)
    if is_cuda:
        check.prove(runner, args.check_kernels)
    return runner


def ops_of(device: str) -> Any:
    """Return the fastest ops that are installed; raises ValueError for "cuda" if there is no GPU."""
    if device != "cpu":
        missing = cuda.missing()
        if not missing:
            return cuda.CudaOps
        if device == "cuda":
            raise ValueError(f"--device cuda: {missing}")
    try:
        from devices.cpu import FastOps
    except ImportError as error:
        log.info("NumPy computes (%s); `pip install numba tbb` brings what is several times as fast", error)
        return NumpyOps
    return FastOps


def packs(ops_class: Any, config: Config, weights: str | None) -> list[Any]:
    """Return how read_weights() packs the matrices of the layers, and the outer ones, for --weights."""
    if weights is None:
        return [ops_class.pack]
    if config.experts or not hasattr(ops_class, "pack_as"):
        raise ValueError(
            f"--weights {weights}: expected a model without experts, on a CPU, with Numba: "
            "give --device cpu, and pip install numba tbb; or leave it out"
        )
    return ops_class.pack_as(weights)  # type: ignore[no-any-return]


def pool(page_bytes: int, max_seq_len: int, max_batch: int, kv_memory: int | None, room: int) -> int:
    """Return the number of pages in the pool of the KV cache: --kv-memory, else what `room` bytes hold.

    Without the option it is at most what a full batch of the longest contexts can use.
    """
    n_bytes = kv_memory or room
    n_pages = n_bytes // page_bytes
    if n_pages < 1:
        raise ValueError(f"--kv-memory {n_bytes}: expected {page_bytes} or more, for a page of {PAGE} tokens")
    return n_pages if kv_memory else min(n_pages, max_batch * -(-max_seq_len // PAGE))


def free_memory() -> int:
    """Return the free memory in bytes: as Linux reports it, also in a container; on other systems 4 GiB."""
    limits = [
        int(number) * unit
        for file, pattern, unit in MEMORY_LIMITS
        if Path(file).exists()
        for number in re.findall(pattern, Path(file).read_text(encoding="utf-8"))
    ]
    return min(limits, default=4 * 2**30)


# --- the server's lines at its start ------------------------------------------------------------------------


def facts(worker: LocalWorker) -> dict[str, str]:
    engine = worker.engine
    lines = {
        "model": f"{worker.names[0]} ({engine.config.model_type}), "
        f"{n_params(engine.config) / 1e6:.1f} M parameters",
        "context": f"{engine.max_seq_len} tokens; room for {engine.counts()['pages'] * PAGE} in the KV cache",
        "dialect": worker.dialect_name,
        **engine.about,
    }
    if engine.degraded:
        lines["degraded"] = ", ".join(f"{how} ({why})" for how, why in engine.degraded.items())
    return lines
