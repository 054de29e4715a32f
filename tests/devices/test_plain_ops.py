"""The plain kernels against NumpyOps, and each fast one against its plain one, on the emulator.

A plain kernel and a fast one round to bfloat16 at the same places, so what differs is the order of sums in
float32, and, if a sum comes out at the edge of a rounding, one step of bfloat16. The bounds are a few times
what was seen: products 1e-6 of a row's norm, 3e-4 if rows are normed (of some thousand numbers one is rounded
the other way); what is rounded itself a step, 2^-8, in at most 2 numbers of 100, as attention to up to 32
keys; to more keys 5e-3, for shares are rounded below another greatest score; choices none.

Not here: a fast kernel beside another (test_kernels.py), whole models (test_cuda.py), a GPU (tests/gpu).
"""

import pytest

from devices.kernels import PLAIN_CODE, signatures
from helpers import emulator
from helpers.device_models import VARIED, by_steps, ops_of, ops_on, read_any_way, rows, tokens
from helpers.device_ops import (
    CONFIGS,
    MIXTURES,
    attended_alike,
    both,
    near,
    nearly_the_same,
    rounded,
    span,
    spans_of,
    sweep,
)
from helpers.emulator import Emulator
from helpers.plain_ops import PlainOps
from model import Batch

pytestmark = pytest.mark.skipif(emulator.MISSING is not None, reason=str(emulator.MISSING))

PRODUCTS = {"qkv": 3e-4, "gate_up": 2**-8, "logits": 3e-4, "out": 1e-6, "down": 1e-6}


# ---- Kernel by kernel --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 31, 32, 33])
@pytest.mark.parametrize("name", sweep(["grouped", "plain"], ["grouped"]))
def test_products(name: str, n: int) -> None:
    m = both(name, 0)
    x, y, h = m.inputs(n)
    fast, plain = m.products(x, y, h), both(name, 0, ops=PlainOps).products(x, y, h)
    for op, tolerance in PRODUCTS.items():
        assert near(fast[op], plain[op], tolerance), op
    assert nearly_the_same(fast["gate_up"], plain["gate_up"])
    numpy, layer, spans = m.numpy, m.layer, spans_of(n)
    assert near(plain["qkv"], numpy.qkv(x, layer, spans))
    assert near(plain["gate_up"], numpy.gate_up(x, layer, spans), 8e-3)
    assert near(plain["logits"], numpy._rms_norm(x[:32], m.weights.norm) @ m.weights.head.T)
    for op, inputs in (("out", y), ("down", h)):
        expected = x.copy()
        getattr(numpy, op)(expected, rounded(inputs), layer, spans)
        assert near(plain[op], expected, PRODUCTS[op])


@pytest.mark.parametrize("name", sweep(CONFIGS, ["grouped", "window", "sinks", "many-heads"]))
def test_attend(name: str) -> None:
    """Queries that see one key, 31, 32, 33, and those of several pieces."""
    fast, plain = both(name, 0), both(name, 0, ops=PlainOps)
    for n in (30, 131, 300):
        spans = Batch([span(1, 0, n + 5, True)])
        expected = plain.numpy.attend(plain.qkv_noise(n + 5), plain.layer, 0, spans)
        got = plain.attended(n)
        assert near(got[0], expected, 8e-3)
        assert attended_alike(fast.attended(n), got)


@pytest.mark.parametrize("name", sweep(["many-heads", "large-head", *MIXTURES], ["many-heads", "mxfp4"]))
def test_no_plain_kernel_races_or_leaves_its_arrays(name: str) -> None:
    both(name, 0, True, PlainOps).run_every_kernel(20)


# ---- All together ------------------------------------------------------------------------------------------


def test_every_op_is_plain() -> None:
    """No op is left to a fast kernel."""
    ops = ops_on(Emulator(), "qwen3-moe-dense-layers", PlainOps)  # it has an MLP in some layers too
    by_steps(ops, [rows(tokens(40)), rows([3], 40), rows([4, 5], 41, n_wanted=2)])
    assert isinstance(ops, PlainOps)
    assert not ops._kernels._functions
    assert {name for name, _ in ops._plain_kernels._functions} == signatures(PLAIN_CODE.read_text()).keys()


@pytest.mark.parametrize("name", sweep(VARIED, [VARIED[0], "gpt-oss"]))
def test_the_same_logprobs_whichever_way_a_prompt_is_read(name: str) -> None:
    """To the bit; and they are near those of the fast kernels."""
    ops, token_ids = ops_on(Emulator(), name, PlainOps), tokens(90)
    read_any_way(ops)
    by_steps(ops, [rows(token_ids)])
    fast = ops_of(name)
    by_steps(fast, [rows(token_ids)])
    assert near(fast._buffers["raw"].get()[:1], ops._buffers["raw"].get()[:1], 2e-2)
