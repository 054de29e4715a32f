"""Decoding on the processor with random weights of real shapes: what share of the memory's speed is used.

    shape --cut()--> a config of as many layers as memory holds --random_weights()--> ops --decode()--> speed

A token reads each weight that it needs once, so the memory's speed divided by the bytes of these is a limit.

Rules of this file:
1. The memory's speed is measured by the same threads, between the runs: the sum of an array of 1 GB. The best
   of some passes counts, for it stands as a limit.
2. Layers are all alike, so the speed of the whole model follows from the bytes that it reads.

Not here: the quality of what random weights say; models that are at hand (cpu.py).
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from datetime import date
from statistics import median
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import njit, prange

from benches.common import GREEDY, cpu_name
from benches.gpu_checkpoint import SHAPES, read_bytes
from checkpoint.config import Config, parse_config
from checkpoint.weights import Layer, Matrix, Mxfp4, Packer, Weights, n_weight_bytes
from devices.cpu import WEIGHTS, FastOps
from model import PAGE, Span
from sampling import Context
from service.loading import free_memory, packs

N_CONTEXT = 256  # tokens of a sequence
BATCHES = (1, 8)
BLOCK = 2**22  # random numbers, which matrices are filled with again and again
GIGABYTE = np.ones(2**28, np.float32)
N_PASSES = 5  # over it


# --- the model ----------------------------------------------------------------------------------------------


def cut(shape: dict[str, Any], room: int) -> Config:
    """The model with as many of its layers as fit into `room` bytes."""
    for n_layers in range(shape["num_hidden_layers"], 0, -1):
        config = parse_config(shape | {"num_hidden_layers": n_layers}, {})
        if n_weight_bytes(config) <= room:
            return config
    raise SystemExit(f"a layer and the head take {n_weight_bytes(config) / 1e9:.1f} GB; give more --memory")


def random_weights(config: Config, pack: Packer, pack_outer: Packer) -> Weights:
    """Each matrix as FastOps keep it; the packers are for those of layers, and for embedding and head."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(BLOCK, np.float32)
    noise.view(np.uint32)[...] &= 0xFFFF0000  # bfloat16
    random_bytes = rng.integers(0, 256, BLOCK, np.uint8)

    def array(*shape: int) -> Any:
        return np.resize(noise * np.float32(2.0 ** -np.ceil(np.log2(shape[-1]) / 2)), shape)

    def experts_of(n: int, n_out: int, n_in: int) -> Matrix:
        if config.experts and config.experts.mxfp4:
            blocks = np.resize(random_bytes, (n, n_out, n_in // 32, 16))
            return Mxfp4(blocks, np.full((n, n_out, n_in // 32), 120, np.uint8))
        return np.stack([pack(array(1, n_out, n_in))[0] for _ in range(n)])

    c = config
    experts = c.experts
    n_q = c.n_heads * c.head_dim
    n_qkv = n_q + 2 * c.n_kv_heads * c.head_dim
    layers: list[Layer] = []
    for _ in range(c.n_layers):
        layer = Layer(
            attn_norm=np.ones(c.dim, np.float32),
            wqkv=pack(array(n_qkv, c.dim)),
            wo=pack(array(c.dim, n_q)),
            mlp_norm=np.ones(c.dim, np.float32),
            w_gate_up=None,
            w_down=None,
        )
        if experts:
            layer.w_gate_up = experts_of(experts.n, 2 * experts.hidden_dim, c.dim)
            layer.w_down = experts_of(experts.n, c.dim, experts.hidden_dim)
            layer.router = pack(array(experts.n, c.dim))
        else:
            layer.w_gate_up = pack(array(2 * c.hidden_dim, c.dim))
            layer.w_down = pack(array(c.dim, c.hidden_dim))
        if c.sinks:
            layer.sinks = np.zeros(c.n_heads, np.float32)
        if c.qk_norm:
            layer.q_norm = layer.k_norm = np.ones(c.head_dim, np.float32)
        if c.qkv_bias:
            layer.bqkv = np.zeros(n_qkv, np.float32)
        layers.append(layer)
    embed = pack_outer(array(c.vocab_size, c.dim))
    head = embed
    if not c.tied:
        head = pack_outer(array(c.vocab_size, c.dim))
    return Weights(embed, layers, np.ones(c.dim, np.float32), head)


# --- the measurements ---------------------------------------------------------------------------------------


class Speed(NamedTuple):
    tokens: dict[int, float]  # a second, by batch
    memory: float  # bytes a second


@njit(nogil=True, parallel=True, fastmath=True)
def total(array: Any) -> Any:
    result = np.float32(0)
    for i in prange(len(array)):
        result += array[i]
    return result


def layer_bytes(weights: Weights) -> int:
    parts = vars(weights.layers[0]).values()
    return sum(part.nbytes for part in parts if part is not None)


def memory_speed(n_threads: int) -> float:
    """Bytes a second that as many threads read."""
    numba.set_num_threads(n_threads)
    passes = []
    for _ in range(N_PASSES):
        started = time.perf_counter()
        total(GIGABYTE)
        passes.append(time.perf_counter() - started)
    return GIGABYTE.nbytes / min(passes)


def decode(ops: FastOps, batch: int, n_new: int) -> float:
    """Tokens a second, of sequences with other tokens each."""
    rng = np.random.default_rng(batch)
    n_pages = N_CONTEXT // PAGE
    started = time.perf_counter()
    for position in range(n_new):
        spans: list[Span] = []
        for i in range(batch):
            token_ids = [int(rng.integers(ops.config.vocab_size))]
            pages = range(i * n_pages, (i + 1) * n_pages)
            spans.append(Span(i, pages, token_ids, position, 1))
        ops.read(ops.launch(spans, [Context(GREEDY, [], [])] * batch))
    return batch * n_new / (time.perf_counter() - started)


def measure(ops: FastOps, n_new: int, repeat: int, n_threads: int) -> Iterator[Speed]:
    """A round warms up and does not count."""
    for number in range(repeat + 1):
        tokens = {batch: decode(ops, batch, n_new) for batch in BATCHES}
        speed = Speed(tokens, memory_speed(n_threads))
        of_batches = ", ".join(f"batch {batch} {value:.2f} tok/s" for batch, value in tokens.items())
        print(f"round {number}/{repeat}  {of_batches}, memory {speed.memory / 1e9:.1f} GB/s", file=sys.stderr)
        if number:
            yield speed


def report(args: argparse.Namespace) -> Iterator[str]:
    for name in args.shape:
        formats: list[str | None] = [None]  # as the file has them, which is all that experts can be in
        if parse_config(SHAPES[name], {}).experts is None:
            formats = args.weights or list(WEIGHTS)
        for weights_format in formats:
            yield from report_of(name, weights_format, args)


def report_of(name: str, weights_format: str | None, args: argparse.Namespace) -> Iterator[str]:
    config = cut(SHAPES[name], int(args.memory * 1e9) or free_memory() * 3 // 4)
    whole = parse_config(SHAPES[name], {})
    n_pages = max(BATCHES) * N_CONTEXT // PAGE
    packers = packs(FastOps, config, weights_format)
    weights = random_weights(config, packers[0], packers[-1])
    ops = FastOps(config, weights, N_CONTEXT, n_pages, max(BATCHES))
    speeds = list(measure(ops, min(args.new, N_CONTEXT), args.repeat, args.threads))
    memory = median(speed.memory for speed in speeds)
    size, read = n_weight_bytes(config), read_bytes(config, 1)
    scale = n_weight_bytes(whole) / size, read_bytes(whole, 1) / read
    if config.experts is None:  # its matrices may have fewer bits than the file's, and the head others
        size = weights.nbytes
        read = size if config.tied else size - weights.embed.nbytes
        more = (whole.n_layers - config.n_layers) * layer_bytes(weights)
        scale = (size + more) / size, (read + more) / read
    yield f"{date.today()}, {name} with random weights, {config.n_layers} of {whole.n_layers} layers, "
    yield f"{ops.about}; {cpu_name()}, {os.cpu_count()} cores, {args.threads} threads."
    yield ""
    yield f"| median of {args.repeat} | {config.n_layers} layers | the whole model |"
    yield "|---|---|---|"
    yield f"| weights | {size / 1e9:.2f} GB | {size * scale[0] / 1e9:.2f} GB |"
    yield f"| read a token | {read / 1e9:.3f} GB | {read * scale[1] / 1e9:.3f} GB |"
    for batch in BATCHES:
        tokens = median(speed.tokens[batch] for speed in speeds)
        follows = f"{tokens / scale[1]:.1f} tokens/s" if batch == 1 else ""
        yield f"| decode, batch {batch} | {tokens:.1f} tokens/s | {follows} |"
    share = median(speed.tokens[1] * read / speed.memory for speed in speeds)
    yield f"| memory read | {memory / 1e9:.1f} GB/s | |"
    yield f"| share of it at batch 1 | {share:.0%} | |"
    yield ""
