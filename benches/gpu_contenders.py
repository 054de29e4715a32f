"""The engine and its peers, for `bench.py gpu`: each decodes as it runs fastest, from the same files.

    start(folder, cells) --> Started --at(cell)--> Round --round(prompts)--> seconds

`transformers` runs eager, with a static cache and a compiled forward pass, and by its own continuous
batching, as it chooses to run that and with CUDA graphs; `compiled-loop` is the shortest decoder that
torch.compile makes fast, in the manner of gpt-fast (https://github.com/meta-pytorch/gpt-fast); llama.cpp
runs in its own `llama-bench`. `engine-no-early` is the engine without programmatic dependent launch,
`engine-no-graphs` without CUDA graphs, `engine-no-staging` without the ring through which few rows of x are
read, `engine-plain` with the plain kernels for the layers: they show what each of these brings.

Rules of this file:
1. Decoding is the time of n_new tokens less the time of one, so that prefill never counts. A peer that
   reports the time of each token is asked for it instead.
2. A contender that is through gives the card's memory back to the next one.

Not here: rounds, medians, the report (benches/gpu.py).
"""

import gc
import importlib
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benches.common import GREEDY, Prompts, engine_run
from checkpoint.config import Config, read_config
from checkpoint.weights import read_weights
from devices.cuda import NO_GRAPHS, NO_PDL, CudaOps
from devices.kernels import NO_STAGING
from devices.plain_ops import PlainOps
from engine import Engine
from model import PAGE
from sampling import Sampling


class Cell(NamedTuple):
    """What is timed: sequences side by side, tokens of each prompt, tokens to decode; 1: until the first."""

    batch: int
    n_prompt: int
    n_new: int
    sampled: bool = False  # as SAMPLED, the usual request; else greedily

    def __str__(self) -> str:
        text = f"{self.batch}, {self.n_prompt}"
        if self.sampled:
            text += ", sampled"
        return text


SAMPLED = Sampling(temperature=0.7, top_p=0.9, top_k=50, seed=1)

Run = Callable[[Prompts, int], object]  # (prompts, tokens to decode after each): returns when all are decoded
Times = tuple[float, float]  # seconds: until the first token where the rest is timed, else 0; in total
Round = Callable[[Prompts], Times]


class Started(NamedTuple):
    """A contender that has read its files."""

    at: Callable[[Cell], Round]  # prepares a cell; the one before is done with
    about: Callable[[], str]  # how it has run


class Contender(NamedTuple):
    """A program that can decode, and the cells that are worth the minutes they take."""

    start: Callable[[Path, Sequence[Cell]], AbstractContextManager[Started]]
    takes: Callable[[Cell], bool]


def rounds(run: Run, cell: Cell) -> Round:
    """By the clock on the wall."""

    def elapsed(prompts: Prompts, n_new: int) -> float:
        started = time.perf_counter()
        run(prompts, n_new)
        return time.perf_counter() - started

    if cell.n_new == 1:
        return lambda prompts: (0, elapsed(prompts, 1))
    return lambda prompts: (elapsed(prompts, 1), elapsed(prompts, cell.n_new))


def cupy() -> Any:
    return importlib.import_module("cupy")


def release() -> None:
    """Give the memory of what is done with back to the card."""
    gc.collect()
    if torch := sys.modules.get("torch"):
        torch.compiler.reset()
        torch.cuda.empty_cache()
    cupy().get_default_memory_pool().free_all_blocks()


# --- ours ---------------------------------------------------------------------------------------------------


@contextmanager
def engine(
    directory: Path,
    cells: Sequence[Cell],
    kind: type[CudaOps] = CudaOps,
    without: str = "",
) -> Iterator[Started]:
    """Engine.generate, as the server calls it, sampling included.

    without: the environment variable of devices/cuda.py or devices/kernels.py that switches a feature off.
    """
    config = read_config(directory)
    max_batch = max(cell.batch for cell in cells)
    length = max(cell.n_prompt + cell.n_new for cell in cells) + 1
    weights = read_weights(directory, config, CudaOps.pack)
    if without:
        os.environ[without] = "1"
    try:
        ops = kind(config, weights, length, max_batch * -(-length // PAGE), max_batch)
    finally:
        os.environ.pop(without, None)
    ours = Engine(ops)

    def about() -> str:
        graphs = list(ops._graphs.values())
        n_captured = sum(graph is not None for graph in graphs)
        early = "early launches" if ops._kernels._driver else "no early launches"
        return f"{n_captured} of {len(graphs)} graphs, {early}"

    def at(cell: Cell) -> Round:
        sampling = SAMPLED if cell.sampled else GREEDY
        return rounds(engine_run(ours, sampling), cell)

    try:
        yield Started(at, about)
    finally:
        ours.close()


class PlainForward(PlainOps):
    """The layers by plain kernels; one thread that goes through the vocabulary would hide them."""

    logits, pick = CudaOps.logits, CudaOps.pick


# --- transformers -------------------------------------------------------------------------------------------


def transformers() -> Any:
    """The package, quiet."""
    package = importlib.import_module("transformers")
    package.utils.logging.set_verbosity_error()
    package.utils.logging.disable_progress_bar()
    return package


def model_of(directory: Path) -> Any:
    import torch

    model = transformers().AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return model.to(device()).eval()


def device() -> str:
    """The GPU; a dry run on a machine without one takes the processor."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def attention(model: Any) -> str:
    return f"attention {model.config._attn_implementation}"


@contextmanager
def generated(directory: Path, cells: Sequence[Cell], cache: str | None = None) -> Iterator[Started]:
    """model.generate, greedy, for exactly so many tokens; behind a static cache it compiles itself."""
    import torch

    model = model_of(directory)

    def run(prompts: Prompts, n_new: int) -> None:
        token_ids = torch.tensor(prompts, device=model.device)
        model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            min_new_tokens=n_new,
            max_new_tokens=n_new,
            pad_token_id=0,
            cache_implementation=cache,
        )
        synchronize()

    yield Started(partial(rounds, run), partial(attention, model))


@contextmanager
def continuous(directory: Path, cells: Sequence[Cell], graphs: bool | None) -> Iterator[Started]:
    """generate_batch: continuous batching. graphs: whether to use CUDA graphs; None: its own choice."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # or each call is a line
    model = model_of(directory)

    def at(cell: Cell) -> Round:
        model.destroy_cached_continuous_batching_manager()  # it is sized for what it is first asked
        release()
        settings = transformers().GenerationConfig(
            max_new_tokens=cell.n_new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        # Twice what it needs, as safety margins ask. By itself it takes all free memory, and fills a mask for
        # that, and captures graphs of that: minutes before it begins.
        n_blocks = 2 * cell.batch * -(-(cell.n_prompt + cell.n_new) // 256)
        batching = transformers().ContinuousBatchingConfig(
            use_cuda_graph=graphs, block_size=256, num_blocks=n_blocks, max_batch_tokens=8192
        )

        def round_(prompts: Prompts) -> Times:
            done = model.generate_batch(
                prompts,
                generation_config=settings,
                continuous_batching_config=batching,
                persistent_manager=True,
                record_timestamps=True,  # around its work it stops a thread and collects garbage
            )
            times = [result.timestamps for result in done.values()]
            if [len(of_one) for of_one in times] != [cell.n_new] * cell.batch:  # it only logs failures
                raise RuntimeError(f"expected {cell.n_new} tokens each, got {[*map(len, times)]}")
            return 0, decode_seconds(times)

        return round_

    def about() -> str:
        manager = model._cached_continuous_batching_manager
        manager.switch_to_cb_friendly_attn(model)  # it has switched back
        config = manager.continuous_batching_config
        return (
            f"{attention(model)}, use_cuda_graph {config.use_cuda_graph}, async {config.use_async_batching}"
        )

    yield Started(at, about)
    model.destroy_cached_continuous_batching_manager()


def decode_seconds(times: Sequence[Sequence[float]]) -> float:
    """What all tokens behind the first ones take, at the rate from when all sequences decode."""
    begun = max(of_one[0] for of_one in times)
    n_timed = sum(t > begun for of_one in times for t in of_one)
    n_all = sum(len(of_one) - 1 for of_one in times)
    return (max(of_one[-1] for of_one in times) - begun) * n_all / n_timed


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- a compiled loop ----------------------------------------------------------------------------------------


@contextmanager
def compiled_loop(directory: Path, cells: Sequence[Cell]) -> Iterator[Started]:
    """Static keys and values, one compiled step, CUDA graphs by torch.compile; prompts in one pass.

    Tuned as gpt-fast tunes itself: https://github.com/meta-pytorch/gpt-fast/blob/main/generate.py
    """
    import torch

    tuning: Any = importlib.import_module("torch._inductor.config")
    tuning.coordinate_descent_tuning = True
    torch.set_float32_matmul_precision("high")
    model, config = model_of(directory), read_config(directory)

    def at(cell: Cell) -> Round:
        decoder = compiled_decoder(model, config, cell)
        step = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)

        def run(prompts: Prompts, n_new: int) -> None:
            n_prompt = len(prompts[0])
            with torch.no_grad():
                token_ids = torch.tensor(prompts, device=device())
                token_ids = decoder(token_ids, torch.arange(n_prompt, device=device()))
                position = torch.tensor([n_prompt], device=device())
                for _ in range(n_new - 1):
                    token_ids = step(token_ids.clone(), position)
                    position += 1
            synchronize()

        return rounds(run, cell)

    yield Started(at, lambda: "scaled_dot_product_attention, reduce-overhead, coordinate_descent_tuning")


def compiled_decoder(causal: Any, config: Config, cell: Cell) -> Any:
    """The forward pass in torch, over the model's own modules: (batch, n) token ids to (batch, 1)."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention, silu

    model, head = causal.model, causal.lm_head  # a tied head is the embedding already
    length = -(-(cell.n_prompt + cell.n_new) // 64) * 64  # masks are read by whole vectors
    shape = (cell.batch, config.n_kv_heads, length, config.head_dim)
    cache = [(zeros(shape), zeros(shape)) for _ in range(config.n_layers)]  # keys, values
    visible = torch.ones(length, length, dtype=torch.bool, device=device()).tril()
    tensors = [visible, *itertools.chain(*cache)]
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)  # what a step changes may be in a CUDA graph only then

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def attended(q: Any, keys: Any, values: Any, mask: Any) -> Any:
        if q.shape[2] > 1:
            return scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
        q = q.unflatten(1, (config.n_kv_heads, -1)).squeeze(3)  # one token: heads as queries, keys read once
        return scaled_dot_product_attention(q, keys, values, mask).flatten(1, 2).unsqueeze(2)

    def decoder(token_ids: Any, positions: Any) -> Any:
        x = model.embed_tokens(token_ids)
        cos, sin = (t[:, None] for t in model.rotary_emb(x, positions[None]))
        for layer, (keys, values) in zip(model.layers, cache, strict=True):
            a, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                p(normed).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
                for p in (a.q_proj, a.k_proj, a.v_proj)
            )
            if config.qk_norm:
                q, k = a.q_norm(q), a.k_norm(k)
            keys[:, :, positions] = rotated(k, cos, sin)
            values[:, :, positions] = v
            y = attended(rotated(q, cos, sin), keys, values, visible[positions])
            x = x + a.o_proj(y.transpose(1, 2).flatten(2))
            m, normed = layer.mlp, layer.post_attention_layernorm(x)
            x = x + m.down_proj(silu(m.gate_proj(normed)) * m.up_proj(normed))
        return head(model.norm(x[:, -1:])).argmax(-1)

    return decoder


def zeros(shape: Sequence[int]) -> Any:
    import torch

    return torch.zeros(shape, dtype=torch.bfloat16, device=device())


# --- llama.cpp ----------------------------------------------------------------------------------------------


@contextmanager
def llama_bench(directory: Path, cells: Sequence[Cell]) -> Iterator[Started]:
    """Its own measurement, of a GGUF file of the same shape."""
    program, model = shutil.which("llama-bench"), directory / GGUF
    if not program or not model.exists():
        raise FileNotFoundError("it needs `llama-bench` on the PATH and --gguf FILE")

    def at(cell: Cell) -> Round:
        of_cell = ["-p", "0", "-n", str(cell.n_new), "-d", str(cell.n_prompt)]
        command = [program, "-m", str(model), "-ngl", "99", *of_cell, "-r", "1", "-o", "json"]

        def round_(prompts: Prompts) -> Times:
            [measured] = json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL))
            return 0, measured["avg_ns"] / 1e9 * (cell.n_new - 1) / cell.n_new

        return round_

    yield Started(at, lambda: "llama-bench")


GGUF = "model.gguf"  # in the checkpoint's folder

# --- the contenders, and the cells of each ------------------------------------------------------------------


def any_cell(cell: Cell) -> bool:
    return True


def greedy(cell: Cell) -> bool:
    return not cell.sampled


def decode(cell: Cell) -> bool:
    return greedy(cell) and cell.n_new > 1


def short(cell: Cell) -> bool:
    return decode(cell) and cell.n_prompt < 1024


def one_sequence(cell: Cell) -> bool:
    return decode(cell) and cell.batch == 1


OURS = "engine"  # and, with a dash behind it, without a feature
# fmt: off
CONTENDERS = {  # the strongest first, for time may run out
    #                                 start                                                     takes
    OURS:                             Contender(engine,                                         any_cell),
    "compiled-loop":                  Contender(compiled_loop,                                  short),
    f"{OURS}-no-early":               Contender(partial(engine, without=NO_PDL),                 short),
    f"{OURS}-no-graphs":              Contender(partial(engine, without=NO_GRAPHS),                short),
    f"{OURS}-no-staging": Contender(partial(engine, without=NO_STAGING), short),
    f"{OURS}-plain":                  Contender(partial(engine, kind=PlainForward),             short),
    "transformers-compiled":          Contender(partial(generated, cache="static"),             one_sequence),
    "transformers-eager":             Contender(generated,                                      greedy),
    "transformers-continuous":        Contender(partial(continuous, graphs=None),               short),
    "transformers-continuous-graphs": Contender(partial(continuous, graphs=True),               short),
    "llama.cpp":                      Contender(llama_bench,                                    one_sequence),
}
# fmt: on
