"""On a real GPU: what the emulator cannot show, for the hardware orders sums and memory in a way of its own.

CudaOps against NumpyOps, and against PlainOps at real shapes, for which NumPy would take minutes; the laws to
the bit. `make gpu-1` runs it, with CuPy, NVRTC, NumPy, jinja2, safetensors, tokenizers, tqdm,
pytest, pytest-timeout and hypothesis, and nothing beside them.
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

from checkpoint.config import Config
from devices import cuda
from devices.cuda import NO_GRAPHS, CudaOps
from helpers import device_ops
from helpers.device_models import BITS, BITS_OF_ALL, apart, by_steps, choices, model_of, ops_on, rows, tokens
from helpers.device_ops import CONFIGS, MODELS, Both, PlainOps, near, nearly_the_same, random_weights
from helpers.emulator import Emulator
from model import NumpyOps, Span
from parity import CASES
from sampling import Choice, Context

pytestmark = pytest.mark.skipif(cuda.missing() is not None, reason=f"no GPU: {cuda.missing()}")

LAYERS = 4  # of a model of a real shape: as many as the laws need


def cupy() -> Any:
    return importlib.import_module("cupy")


def real(name: str, ops: type[CudaOps] = CudaOps) -> CudaOps:
    """A model of a real shape with random weights, and a few layers."""
    one: Config = MODELS[name]
    experts = one.experts and one.experts._replace(layers=(True,) * LAYERS)
    windows, rotary = (None,) * LAYERS, (True,) * LAYERS
    c = replace(one, n_layers=LAYERS, windows=windows, rotary=rotary, experts=experts)
    return ops(c, random_weights(c), 2048, 512, 64, cupy())


class Real(Both):
    """Its ops one by one, as Both has them but for NumPy's."""

    def __init__(self, ops: CudaOps) -> None:
        self.config, self.cuda, self.device_layer = ops.config, ops, ops.weights.layers[0]


def span(slot: int, token_ids: Sequence[int] | None, start: int, n_wanted: int = 1) -> Span:
    return Span(slot, [slot * 8 + i for i in range(8)], token_ids, start, n_wanted)


@pytest.mark.parametrize("name", CASES)
def test_logprobs_are_those_of_numpy(name: str) -> None:
    model, token_ids = model_of(name), tokens(40)
    spans = [rows(token_ids[:33]), rows(token_ids[33:34], 33), rows(token_ids[34:], 34, n_wanted=3)]
    numpy = NumpyOps(model.config, model.weights, 128, 24, 6)
    assert apart(by_steps(ops_on(cupy(), name), spans), by_steps(numpy, spans, BITS_OF_ALL)) < 0.2


# Sums have up to 14,336 terms, of which a tensor core adds 16 without rounding to the nearest: 1e-4 of a
# row's norm; after a norm, where some numbers are rounded the other way, 2e-3.
SUM, AFTER_NORM = 1e-4, 2e-3


@pytest.mark.parametrize("name", MODELS)
def test_each_op_is_its_plain_kernel(name: str) -> None:
    fast, plain = Real(real(name)), Real(real(name, PlainOps))
    for n in (1, 16, 33, 130):
        got, expected = fast.products(*fast.inputs(n)), plain.products(*fast.inputs(n))
        for op in got:
            assert near(got[op], expected[op], SUM if op in ("out", "down") else AFTER_NORM), (op, n)
        assert plain.config.experts or nearly_the_same(got["gate_up"], expected["gate_up"], 0.1), n
    for n in (30, 131, 310):
        assert device_ops.attended_alike(fast.attended(n), plain.attended(n)), n


def test_products_have_the_bits_of_the_emulator() -> None:
    """Its tensor cores are those of Hopper, as others have measured them; norms are the hardware's own."""
    is_hopper = int(cupy().cuda.Device().compute_capability) >= 90  # or Blackwell, which adds alike
    c = CONFIGS["grouped"]
    for n in (1, 2, 16, 33, 130):
        devices = [Real(CudaOps(c, random_weights(c), 400, 16, 4, cp)) for cp in (cupy(), Emulator())]
        real, emulated = (device.products(*device.inputs(n)) for device in devices)
        for op in ("out", "down"):
            assert near(real[op], emulated[op], SUM), n
            assert np.array_equal(real[op], emulated[op]) or not is_hopper, n


@pytest.mark.parametrize("name", MODELS)
def test_rows_have_the_same_bits_in_any_company(name: str) -> None:
    """Prefill = decode, alone = batched, chunked = whole, drafts or none, at 1 to 64 sequences."""
    ops = real(name)
    prompt = [int(i) for i in np.random.default_rng(1).integers(0, ops.config.vocab_size, 300)]
    whole = choices(ops, [span(0, prompt[:256], 0, 0)]) + choices(ops, [span(0, prompt[256:], 256, 1)])
    chunks = [choices(ops, [span(1, prompt[i : i + 75], i, i == 225)]) for i in range(0, 300, 75)]
    assert chunks[-1] == whole
    choices(ops, [span(2, prompt[:290], 0, 0)])
    expected = [choices(ops, [span(2, prompt[i : i + 1], i)])[0][0] for i in range(290, 300)]
    assert [expected[-1]] == whole[0]
    assert choices(ops, [span(0, prompt[290:], 290, 10)]) == [expected]
    for n in (5, 16, 17, 40, 60):
        firsts = choices(ops, [span(slot, prompt[:70], 0) for slot in range(3, n)])
        assert all(first == firsts[0] for first in firsts)
        decode = [span(slot, [7], 70) for slot in range(3, n)]
        for _ in range(2):  # kernel by kernel, then as a graph
            assert all(got == choices(ops, decode[:1])[0] for got in choices(ops, decode))


def test_graphs_change_nothing() -> None:
    graphs, plain = (real("Qwen3-0.6B") for _ in range(2))
    plain.step_back(NO_GRAPHS, "for a test")
    runs: list[list[Choice]] = []
    for ops in (graphs, plain):
        first = choices(ops, [span(0, list(range(100)), 0, 1)])[0][0]
        tickets = []
        for i in range(40):
            context = Context(BITS, [], [first.token_id], None, 1 + i)
            tickets.append(ops.launch([span(0, None, 100 + i)], [context]))
        runs.append([choice for ticket in tickets for choice in ops.read(ticket)])
    assert runs[0] == runs[1]
    assert all(graphs._graphs.values()), "the driver takes graphs"


@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="CUDA's toolkit has compute-sanitizer")
@pytest.mark.timeout(280)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "initcheck", "racecheck"])
def test_compute_sanitizer(tool: str) -> None:
    here = Path(__file__)
    # what CuPy asks of a driver that lacks it is no fault
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    cases = "test_logprobs_are_those_of_numpy and (qwen3-layer-types or llama-biases)"
    inner = [sys.executable, "-m", "pytest", "-q", "--timeout=0", str(here), "-k", cases]
    ended = subprocess.run([*sanitizer, *inner], capture_output=True, text=True, cwd=here.parents[2])
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert "2 passed" in ended.stdout
    assert "skipped" not in ended.stdout
