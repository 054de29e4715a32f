"""The plain kernels against NumpyOps, and each fast one against its plain one, on the emulator.

A plain kernel and a fast one round to bfloat16 at the same places, so what differs is the order of sums in
float32, and, where a sum comes out at the edge of a rounding, one step of bfloat16. Hence the bounds, each a
few times what was seen:

    products                          1e-6 of a row's norm; NumPy's float32 is 4e-3 away
    products of rows that are normed  3e-4: of some thousand normed numbers one is rounded the other way
    what is rounded itself            a step, 2^-8, in at most 2 numbers of 100
    attention to up to 32 keys        the same; to more 5e-3: shares are rounded below another greatest score
    choices                           none

Not here: the fast kernels against NumPy (test_kernels.py), a real GPU (tests/gpu).
"""

import pytest

from devices.kernels import PLAIN_CODE, signatures
from helpers import emulator
from helpers.device_models import (
    VARIED,
    by_steps,
    choices,
    ops_of,
    ops_on,
    page,
    pages,
    prefill,
    rows,
    tokens,
)
from helpers.device_ops import (
    CONFIGS,
    MIXTURES,
    STEP,
    Both,
    attended,
    attended_alike,
    both,
    near,
    nearly_the_same,
    noise,
    products,
    qkv_noise,
    rounded,
    run_every_kernel,
    span,
    spans_of,
    sweep,
    wanted,
)
from helpers.emulator import Emulator
from helpers.plain_ops import PlainOps
from model import PAGE, Batch, Span

pytestmark = pytest.mark.skipif(emulator.MISSING is not None, reason=str(emulator.MISSING))

PRODUCTS = {"qkv": 3e-4, "gate_up": STEP, "logits": 3e-4, "out": 1e-6, "down": 1e-6}


def pair(name: str) -> tuple[Both, Both]:
    """A model with the fast kernels, and with the plain ones."""
    return both(name, 0), both(name, 0, ops=PlainOps)


# ---- Kernel by kernel --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 31, 32, 33])
@pytest.mark.parametrize("name", sweep(["grouped", "plain"], ["grouped"]))
def test_products(name: str, n: int) -> None:
    fast, plain = (products(m, n) for m in pair(name))
    for op, tolerance in PRODUCTS.items():
        assert near(fast[op], plain[op], tolerance), op
    assert nearly_the_same(fast["gate_up"], plain["gate_up"])
    m = both(name, 0)
    numpy, layer, spans, x = m.numpy, m.layer, spans_of(n), noise(n, m.config.dim)
    assert near(plain["qkv"], numpy.qkv(x, layer, spans))
    assert near(plain["gate_up"], numpy.gate_up(x, layer, spans), 8e-3)
    assert near(plain["logits"], numpy._rms_norm(x[wanted(n)], m.weights.norm) @ m.weights.head.T)
    for op, size in (("out", m.config.n_heads * m.config.head_dim), ("down", m.config.hidden_dim)):
        expected = x.copy()
        getattr(numpy, op)(expected, rounded(noise(n, size)), layer, spans)
        assert near(plain[op], expected, PRODUCTS[op])


@pytest.mark.parametrize("name", sweep(CONFIGS, ["grouped", "window", "many-heads"]))
def test_attend(name: str) -> None:
    """Queries that see one key, 31, 32, 33, and those of several pieces."""
    fast, plain = pair(name)
    for n in (30, 131):
        spans = Batch([span(1, 0, n + 5, True)])
        expected = plain.numpy.attend(qkv_noise(plain, n + 5), plain.layer, 0, spans)
        got = attended(plain, n)
        assert near(got[0], expected, 8e-3)
        assert attended_alike(attended(fast, n), got)


@pytest.mark.parametrize("name", sweep(["many-heads", "large-head", *MIXTURES], ["many-heads", "mxfp4"]))
def test_no_plain_kernel_races_or_leaves_its_arrays(name: str) -> None:
    run_every_kernel(both(name, 0, True, PlainOps), 20)


# ---- All together ------------------------------------------------------------------------------------------


def test_every_op_is_plain() -> None:
    """No op is left to a fast kernel."""
    ops = ops_on(Emulator(), "qwen3-moe-dense-layers", PlainOps)  # it has an MLP in some layers too
    by_steps(ops, [prefill(tokens(40)), rows([3], 40), rows([4, 5], 41, n_wanted=2)])
    assert isinstance(ops, PlainOps)
    assert not ops._kernels._functions
    assert {name for name, _ in ops._plain_kernels._functions} == signatures(PLAIN_CODE.read_text()).keys()


@pytest.mark.parametrize("name", sweep(VARIED, [VARIED[0], "gpt-oss"]))
def test_the_same_logprobs_whichever_way_a_prompt_is_read(name: str) -> None:
    """To the bit: whole, in chunks, row by row, from another's page; and near those of the fast kernels."""
    ops, token_ids = ops_on(Emulator(), name, PlainOps), tokens(90)
    [whole] = by_steps(ops, [prefill(token_ids)])
    ways = {
        "one by one": [rows(token_ids[i : i + 1], i, 1, n_wanted=i == 89) for i in range(90)],
        "in chunks": [prefill(token_ids[:64], 0, 2, 0), prefill(token_ids[64:], 64, 2)],
        "rows, then a tile": [rows(token_ids[:7], 0, 3, 0), prefill(token_ids[7:], 7, 3)],
        "cached": [Span(4, [pages(0)[0], 12], token_ids[PAGE:], PAGE, 1)],
    }
    for way, spans in ways.items():
        assert [choices(ops, [span]) for span in spans][-1] == [[whole]], way
    for slot in (1, 2, 3):
        assert [page(ops, number) for number in pages(slot)] == [page(ops, number) for number in pages(0)]
    fast = ops_of(name)
    by_steps(fast, [prefill(token_ids)])
    assert near(fast._buffers["raw"].get()[:1], ops._buffers["raw"].get()[:1], 2e-2)
