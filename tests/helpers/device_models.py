"""Whole models on a device, step by step: small ones of several families, and the spans to run them with.

Used by tests/devices on the emulator, and by tests/gpu on a GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from checkpoint.weights import Mxfp4, Weights, bfloat16, read_weights, unpacked
from devices.cuda import CudaOps, on_device
from helpers.emulator import Emulator
from helpers.tables import table
from model import Span
from parity import Ours, folder_of
from sampling import Choice, Context, Sampling

MAX_SEQ_LEN, N_PAGES, MAX_BATCH = 128, 24, 6
SAMPLINGS = table("sampling")
BITS = Sampling(temperature=0, n_top_logprobs=20)  # == compares the bits of 20 logits as well
BITS_OF_ALL = replace(BITS, n_top_logprobs=96)
VARIED = ["smollm3-untied-biases", "qwen3-layer-types", "gpt-oss", "qwen3-moe-dense-layers"]


def model_of(name: str) -> Ours:
    """Return a model for NumpyOps, with weights that bfloat16 holds."""
    return both_of(name)[0]


@cache
def both_of(name: str) -> tuple[Ours, Weights]:
    """Return a model for NumpyOps, and its weights as CudaOps take them, still on the host."""
    with folder_of(name) as folder:
        model = Ours(folder)
        packed = read_weights(folder, model.config, lambda w: w if isinstance(w, Mxfp4) else bfloat16(w))
    model.weights = on_device(model.weights, lambda a: None if a is None else unpacked(bfloat16(a)))
    return model, packed


def ops_of(name: str, order: int = 0) -> CudaOps:
    return ops_on(Emulator(order), name)


def ops_on(cp: Any, name: str, ops: type[CudaOps] = CudaOps) -> CudaOps:
    """`cp`: the emulator, or cupy."""
    model, packed = both_of(name)
    return ops(model.config, packed, MAX_SEQ_LEN, N_PAGES, MAX_BATCH, cp)


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng([n, seed]).integers(0, 96, n)]


def pages(slot: int) -> list[int]:
    """Return a page table whose pages are in no order; 2 pages hold MAX_SEQ_LEN tokens."""
    return [N_PAGES - 1 - slot, slot]


def sampling_of(row: dict[str, Any]) -> Sampling:
    """Return the sampling of a row of tables/sampling.toml, whose token ids are strings."""
    bias = {int(token_id): value for token_id, value in row.get("logit_bias", {}).items()}
    return Sampling(**row | {"logit_bias": bias})


def choices(ops: Any, spans: Sequence[Span], sampling: Sampling = BITS) -> list[list[Choice]]:
    contexts = [Context(sampling, [], []) for s in spans for _ in range(s.n_wanted)]
    of_rows = iter(ops.read(ops.launch(spans, contexts)))
    return [list(islice(of_rows, span.n_wanted)) for span in spans]


def rows(token_ids: Sequence[int] | None, start: int = 0, slot: int = 0, n_wanted: int = 1) -> Span:
    return Span(slot, pages(slot), token_ids, start, n_wanted)


def apart(some: Sequence[Choice], others: Sequence[Choice]) -> float:
    """Return the root mean square of the differences of the 20 largest logprobs."""
    pairs = [(p, dict(b.top)[i]) for a, b in zip(some, others, strict=True) for i, p in a.top[:20]]
    return float(np.sqrt(np.mean(np.square(np.diff(pairs)))))


def same(got: Choice, expected: Choice, limit: float = 1e-4) -> bool:
    """The same tokens; logprobs are that far apart at most."""
    ids, logprobs = list[list[int]](), list[Any]()
    for choice in (got, expected):
        ids.append([choice.token_id, *(token_id for token_id, _ in choice.top)])
        logprobs.append(np.array([choice.logprob, *(logprob for _, logprob in choice.top)], np.float32))
    return ids[0] == ids[1] and np.allclose(logprobs[0], logprobs[1], rtol=0, atol=limit, equal_nan=True)


def by_steps(ops: Any, spans: Sequence[Span], sampling: Sampling = BITS) -> list[Choice]:
    """Run one span after another, each in a step of its own."""
    return [choice for span in spans for got in choices(ops, [span], sampling) for choice in got]


def kept(ops: CudaOps, slot: int) -> list[bytes]:
    """Return the bits of all layers' keys and values in the pages of a slot."""
    pools = [*ops._keys, *ops._values]
    return [pool[number].get().tobytes() for number in pages(slot) for pool in pools]
