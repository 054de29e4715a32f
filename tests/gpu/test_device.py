"""On a real GPU: what the emulator cannot show. `pytest tests/gpu`; without a GPU it is skipped by name.

The tensor cores add in an order of their own, memory is ordered as the hardware orders it, and the driver
takes graphs and early launches or does not. So: CudaOps against NumpyOps, and the laws to the bit, at real
shapes too.
"""

import importlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu
from gpu import CudaOps
from kernels import Kernels
from model import Choice, Context, NumpyOps, Sampling, Span
from parity import CASES
from test_compile import MODELS
from test_gpu import BITS, BITS_OF_ALL, apart, by_steps, choices, made_on, ours, rows, tile, tokens
from test_kernels import random_weights
from weights import Config

pytestmark = pytest.mark.skipif(gpu.missing() is not None, reason=f"no GPU: {gpu.missing()}")

LAYERS = 4  # of a model of a real shape: as many as the laws need


def cupy() -> Any:
    return importlib.import_module("cupy")


def real(name: str, **changes: Any) -> CudaOps:
    """A model of a real shape with random weights and a few layers."""
    one: Config = MODELS[name]
    c = replace(one, n_layers=LAYERS, windows=(None,) * LAYERS, rotary=(True,) * LAYERS, **changes)
    return CudaOps(c, random_weights(cupy(), c), 2048, 512, 64, cupy())


def span(slot: int, token_ids: Sequence[int], start: int, n_wanted: int = 1, tile: bool = False) -> Span:
    return Span(slot, [slot * 8 + i for i in range(8)], token_ids, start, n_wanted, tile)


@pytest.mark.parametrize("name", CASES)
def test_logprobs_are_those_of_numpy(name: str) -> None:
    model, token_ids = ours(name), tokens(40)
    spans = [tile(token_ids[:33]), rows(token_ids[33:34], 33), rows(token_ids[34:], 34, n_wanted=3)]
    numpy = NumpyOps(model.config, model.weights, 128, 24, 6)
    assert apart(by_steps(made_on(cupy(), name), spans), by_steps(numpy, spans, BITS_OF_ALL)) < 0.2


@pytest.mark.parametrize("name", MODELS)
def test_rows_have_the_same_bits_in_any_company(name: str) -> None:
    """Prefill = decode, alone = batched, chunked = whole, drafts or none, at 1 to 64 sequences."""
    ops = real(name)
    prompt = [int(i) for i in np.random.default_rng(1).integers(0, ops.config.vocab_size, 300)]
    whole = choices(ops, [span(0, prompt[:256], 0, 0, True)]) + choices(
        ops, [span(0, prompt[256:], 256, 1, True)]
    )
    chunks = [choices(ops, [span(1, prompt[i : i + 75], i, i == 225, i % 2 == 0)]) for i in range(0, 300, 75)]
    assert chunks[-1] == whole
    choices(ops, [span(2, prompt[:290], 0, 0, True)])
    expected = [choices(ops, [span(2, prompt[i : i + 1], i)])[0][0] for i in range(290, 300)]
    assert [expected[-1]] == whole[0]
    assert choices(ops, [span(0, prompt[290:], 290, 10)]) == [expected]
    for n in (2, 5, 16, 17, 40, 60):
        alike = [Span(s, [s * 8 + i for i in range(5)], prompt[:70], 0, 1, True) for s in range(3, n)]
        firsts = choices(ops, alike)
        assert all(first == firsts[0] for first in firsts)
        decode = [Span(s, [s * 8 + i for i in range(5)], [7], 70, 1, False) for s in range(3, n)]
        for _ in range(2):  # kernel by kernel, then as a graph
            assert all(got == choices(ops, decode[:1])[0] for got in choices(ops, decode))


def test_graphs_and_early_launches_change_nothing() -> None:
    early, late = real("Qwen3-0.6B"), real("Qwen3-0.6B")
    late._kernels = Kernels(cupy(), late.config)
    plain = real("Qwen3-0.6B")
    plain._replay = plain._compute  # type: ignore[method-assign]
    runs: list[list[Choice]] = []
    for ops in (early, late, plain):
        first = choices(ops, [span(0, list(range(100)), 0, 1, True)])[0][0]
        tickets = [
            ops.launch(
                [Span(0, list(range(8)), None, 100 + i, 1, False)],
                [Context(BITS, [], [first.token_id], None, 1 + i)],
            )
            for i in range(40)
        ]
        runs.append([choice for ticket in tickets for [choice] in ops.read(ticket)])
    assert runs[0] == runs[1] == runs[2]
    assert all(early._graphs.values()), "the driver takes graphs"
    if int(cupy().cuda.Device().compute_capability) >= 90:
        assert early._kernels._driver is not None, "and kernels that start early"


def test_sampling_is_that_of_numpy() -> None:
    ops = real("SmolLM2-135M")
    token_ids = list(range(50))
    samplings = [
        Sampling(seed=1),
        Sampling(0.7, top_p=0.9, top_k=50, seed=2),
        Sampling(0, repetition_penalty=1.2, presence_penalty=0.5),
        Sampling(1.2, min_p=0.05, seed=3, logit_bias={5: 4.0}),
    ]
    choices(ops, [span(0, token_ids, 0, 1, True)])
    raw = ops._buffers["raw"].get()[:1]
    for sampling in samplings:
        for number in range(20):
            context = Context(replace(sampling, seed=number), token_ids, [3] * number)
            got = ops.read(ops.launch([span(0, token_ids[-1:], 49)], [context]))
            assert np.array_equal(ops._buffers["raw"].get()[:1], raw)
            assert got == [NumpyOps.pick(None, raw, [context])]  # type: ignore[arg-type]


@pytest.mark.skipif(
    not shutil.which("compute-sanitizer"), reason="no compute-sanitizer: CUDA's toolkit has it"
)
@pytest.mark.timeout(600)  # every access is watched
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "initcheck", "racecheck"])
def test_compute_sanitizer(tool: str) -> None:
    here = Path(__file__)
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--report-api-errors",
        "no",  # what CuPy asks of a driver that lacks it is no fault
        sys.executable,
        "-m",
        "pytest",
        "-q",
    ]
    inner = [str(here), "-k", "test_logprobs_are_those_of_numpy and (qwen3-layer-types or llama-biases)"]
    ended = subprocess.run(
        [*command, *inner], capture_output=True, text=True, timeout=580, cwd=here.parents[2]
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert "passed" in ended.stdout
    assert "skipped" not in ended.stdout


def test_pages_are_of_the_size_that_is_computed_with() -> None:
    ops = real("Qwen3-0.6B")
    pools = [*ops._keys, *ops._values]
    assert sum(pool.nbytes for pool in pools) == ops.n_pages * CudaOps.page_bytes(ops.config)
