"""kernels.cu and plain.cu, kernel by kernel, on the emulator; choices as sampling.py's.

The plain kernels are held against NumpyOps, the fast ones against the plain ones, and against one another to
the bit. A plain kernel and a fast one round to bfloat16 at the same places, so they differ by the order of
sums in float32, and now and then by a step of bfloat16, 2^-8. The bounds are a few times what was seen.
Inputs have outliers, as real models do (arXiv 2402.17762); sizes are multiples of nothing but 8.
"""

import itertools
from typing import Any

import numpy as np
import pytest

from checkpoint.weights import bfloat16, unpacked
from devices.cuda import CudaOps
from devices.kernels import PLAIN, PLAIN_CODE, SHAPES, shape_for, signatures
from helpers import device_ops, emulator
from helpers.device_models import SAMPLINGS, by_steps, ops_on, rows, same, sampling_of, tokens
from helpers.device_ops import CONFIGS, MIXTURES, Both, PlainOps, best, both, near, noise, span, sweep
from model import PAGE, Array, Batch, Span
from sampling import NO_TOKEN, Context, Sampling, pick_token

pytestmark = pytest.mark.skipif(emulator.MISSING is not None, reason=str(emulator.MISSING))


def test_every_op_is_plain() -> None:
    """No op of PlainOps is left to a fast kernel."""
    ops = ops_on(emulator.Emulator(), "qwen3-moe-dense-layers", PlainOps)  # it has an MLP in some layers too
    kernels = ops.kernels
    kernels._modules = {PLAIN: kernels._modules[PLAIN]}
    by_steps(
        ops, [rows(tokens(40)), rows([3], 40), rows([4, 5], 41, n_wanted=2)], Sampling(presence_penalty=1)
    )
    assert kernels._function.cache_info().currsize == len(signatures(PLAIN_CODE.read_text()))


PRODUCTS = {"qkv": 3e-4, "gate_up": 2**-8, "logits": 3e-4, "out": 1e-6, "down": 1e-6}


@pytest.mark.parametrize("n", sweep([1, 31, 32, 33], [1, 33]))
@pytest.mark.parametrize("name", sweep(["grouped", "plain"], ["grouped"]))
def test_products(name: str, n: int) -> None:
    m = both(name, 0)
    x, y, h = m.inputs(n)
    fast, plain = m.products(x, y, h), both(name, 0, ops=PlainOps).products(x, y, h)
    for op, tolerance in PRODUCTS.items():
        assert near(fast[op], plain[op], tolerance), op
    assert device_ops.nearly_the_same(fast["gate_up"], plain["gate_up"])
    numpy, layer, spans = m.numpy, m.layer, device_ops.spans_of(n)
    assert near(plain["qkv"], numpy.qkv(x, layer, spans))
    assert near(plain["gate_up"], numpy.gate_up(x, layer, spans), 8e-3)
    assert near(plain["logits"], numpy._rms_norm(x[:32], m.weights.norm) @ m.weights.head.T)
    for op, inputs in (("out", y), ("down", h)):
        expected = x.copy()
        getattr(numpy, op)(expected, unpacked(bfloat16(inputs)), layer, spans)
        assert near(plain[op], expected, PRODUCTS[op])


@pytest.mark.parametrize(("enough", "order"), [(64, 0), (1, 1)])
def test_logits_are_those_of_the_wanted_rows(enough: int, order: int) -> None:
    m = both("grouped", order, enough_blocks=enough)
    x = noise(33, m.config.dim)
    for wanted in ([32], [7, 0, 3], list(range(20))):
        m.put("best", np.zeros(len(wanted), np.uint64))  # as `pick` leaves it
        m.cuda.logits(m.put("x", x), m.cuda.weights, m.batch(33, wanted))
        normed = m.numpy._rms_norm(x[wanted], m.weights.norm)
        assert near(raw := m.got("raw", len(wanted)), normed @ m.weights.head.T)
        assert list(m.got("best", len(wanted))) == [best(row) for row in raw]


@pytest.mark.parametrize("name", sweep(["grouped", "uneven"], ["grouped"]))
def test_a_row_has_the_same_bits_beside_any_others(name: str) -> None:
    """Whatever the shape of the blocks, and whether the product norms its rows or `rms_norm` has."""
    shapes = {"grouped": (130, 33, 16, 3, 2, 1), "uneven": (17, 3, 2)}
    ways = {}
    for enough, n in itertools.product((1, 20, 64), shapes[name]):
        ways[shape_for(n, CONFIGS[name].dim, enough), min(n, 3)] = enough, n
    assert name == "uneven" or {shape for shape, _ in ways} == {*SHAPES}
    whole: dict[str, Array] = {}
    for enough, n in ways.values():
        m = both(name, 0, enough_blocks=enough)
        found = m.products(*[rows[:n] for rows in m.inputs(max(shapes[name]))])
        whole = whole or found
        assert all(np.array_equal(whole[op][: len(part)], part) for op, part in found.items())


@pytest.mark.parametrize("order", [0, 1])
def test_what_a_product_prefetches_lies_in_its_weights(order: int) -> None:
    """The checker looks. A row is longer than what registers hold, and parts are short, and empty."""
    m = both("long", order, True)
    x = noise(1, m.config.dim)
    m.cuda.logits(m.put("x", x), m.cuda.weights, m.batch(1, [0]))
    assert near(m.got("raw", 1), m.numpy._rms_norm(x, m.weights.norm) @ m.weights.head.T)


@pytest.mark.parametrize("name", sweep(CONFIGS, ["grouped", "window", "sinks"]))
def test_attend(name: str) -> None:
    """Queries that see one key, 31, 32, 33, and those of several pieces."""
    fast, plain = both(name, 0), both(name, 0, ops=PlainOps)
    for n in (30, 131, 300):
        spans = Batch([span(1, 0, n + 5, True)])
        expected = plain.numpy.attend(plain.qkv_noise(n + 5), plain.layer, 0, spans)
        got = plain.attended(n)
        assert near(got[0], expected, 8e-3), device_ops.difference(got[0], expected)
        assert device_ops.attended_alike(fast.attended(n), got)


@pytest.mark.parametrize("name", sweep(CONFIGS, ["grouped", "sinks", "window"]))
def test_attention_has_the_same_bits_in_tiles_and_row_by_row(name: str) -> None:
    m, n = both(name, 0), 150
    qkv = m.qkv_noise(n)
    whole = m.attend([span(1, 0, n, True)], qkv)
    pages = m.cuda._keys[0].get().copy(), m.cuda._values[0].get().copy()
    rows = [m.attend([span(1, i, 1, False)], qkv[i : i + 1])[0] for i in range(n)]
    assert np.array_equal(whole, rows), f"in a tile and alone, {device_ops.difference(whole, rows, 0)}"
    assert np.array_equal(pages, (m.cuda._keys[0].get(), m.cuda._values[0].get()))
    parts = [m.attend([span(1, i, min(31, n - i), i % 2 == 0)], qkv[i : i + 31]) for i in range(0, n, 31)]
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("name", ["grouped", "sinks"])
def test_what_lies_behind_a_sequence_in_its_page_is_not_seen(name: str) -> None:
    """Pages are not cleared: what an earlier sequence left there may be anything."""
    m = both(name, 0)
    c, qkv = m.config, m.qkv_noise(71)
    results = []
    for left in (0, 0x7FC0):  # 0x7FC0: NaN
        keys = np.zeros((16, c.n_kv_heads, PAGE, 32), np.uint16)  # heads of 20, padded with zeros
        keys[..., :20] = left
        m.cuda._keys[0].set(keys.reshape(m.cuda._keys[0].shape))
        m.cuda._values[0].set(keys.swapaxes(2, 3).reshape(m.cuda._values[0].shape).copy())
        spans = (span(1, 0, 70, True), qkv[:70]), (span(1, 70, 1, False), qkv[70:])
        results.append(np.concatenate([m.attend([one], rows) for one, rows in spans]))
    assert np.array_equal(results[0], results[1])


MASKS = [[0], [1000], [31, 32, 33], range(0, 1001, 7)]  # of the tokens that are allowed
PICKS: list[tuple[str, dict[str, Any], Any]] = [("grouped", changes, None) for changes in SAMPLINGS["picked"]]
PICKS += [("many-tokens", changes, None) for changes in SAMPLINGS["picked_of_many"]]
PICKS += [("grouped", {"temperature": t}, allowed) for allowed, t in itertools.product(MASKS, (0.0, 1.0))]


@pytest.mark.parametrize("order", sweep([0, 1], [1]))
@pytest.mark.parametrize(("name", "changes", "allowed"), PICKS, ids=str)
def test_pick(name: str, changes: dict[str, Any], allowed: Any, order: int) -> None:
    m = both(name, order)
    raw = np.random.default_rng(5).normal(0, 3, (3, m.config.vocab_size)).astype(np.float32)
    mask = None if allowed is None else np.isin(np.arange(m.config.vocab_size), allowed)
    samplings = [sampling_of(changes | {"seed": seed, "choice": seed % 2}) for seed in range(3)]
    contexts = [Context(sampling, [3, 3, 500, 999], [4, 4, 4, 500, 17], mask) for sampling in samplings]
    for got, logits, context in zip(m.pick(raw, contexts), raw, contexts, strict=True):
        assert same(got, pick_token(logits, context))


def test_the_best_is_forgotten_once_it_is_picked() -> None:
    """Of rows that pad a step too, or the next one would find it."""
    m = both("grouped", 0)
    for slot in (2, -1):
        with m.cuda._stream:
            greedy = Context(Sampling(temperature=0), [], [])
            host, batch = m.cuda._upload_step([Span(2, [0], [0], 0, 1)], [greedy])
            batch.views["pick_rows"].set(np.array([[slot, 0, 0, 0, 0, -1]], np.int32))
            m.put("best", np.array([best(np.zeros(1001, np.float32))], np.uint64))
            m.cuda.pick(m.put("raw", np.zeros((1, 1001), np.float32)), batch)
            host.free.append(host)
            assert m.got("best", 1) == 0


def test_no_token_is_chosen_by_logits_that_are_no_numbers() -> None:
    m, zeros = both("grouped", 0), np.zeros((1, 1001), np.float32)
    free, nothing_allowed = Context(Sampling(), [], []), Context(Sampling(), [], [], np.zeros(1001, bool))
    assert m.pick(zeros, [nothing_allowed])[0].token_id == NO_TOKEN
    for worst in (np.nan, np.inf, -np.nan):
        raw = zeros.copy()
        raw[0, 1000] = worst
        assert m.pick(raw, [free])[0].token_id == NO_TOKEN
    assert m.pick(zeros - np.inf, [free])[0].token_id == NO_TOKEN


def test_the_first_of_equals_is_the_likeliest() -> None:
    raw = np.zeros((1, 1001), np.float32)
    raw[0, [40, 700]] = 1
    raw[0, :30] = -0.0
    [choice] = both("grouped", 0).pick(raw, [Context(Sampling(temperature=0, n_top_logprobs=3), [], [])])
    assert choice.token_id == 40
    assert [token_id for token_id, _ in choice.top] == [40, 700, 0]


def experts_of(m: Both, x: Array) -> Array:
    """x with what its rows' experts add."""
    m.cuda.experts(m.put("x", x), m.device_layer, m.batch(len(x)))
    return m.got("x", len(x))


@pytest.mark.parametrize("n", sweep([1, 2, 16, 17, 33, 300], [1, 17, 300]))
@pytest.mark.parametrize("name", MIXTURES)
def test_experts(name: str, n: int) -> None:
    """Groups of a row, of a tile, of some, of more than go at a time; the plain kernels say the same."""
    m, plain = both(name, 0), both(name, 0, ops=PlainOps)
    x = np.random.default_rng(n).standard_normal((n, m.config.dim), np.float32)
    expected = x.copy()
    m.numpy.experts(expected, m.layer, device_ops.spans_of(n))
    found = experts_of(m, x)
    assert near(found - x, experts_of(plain, x) - x)
    n_apart = (np.linalg.norm(found - expected, axis=1) > 0.02 * np.linalg.norm(expected - x, axis=1)).sum()
    assert n_apart <= n / 20  # of a near tie another expert is chosen, for what is scored was rounded
    alone = [experts_of(m, x[i : i + 1])[0] for i in range(0, n, 1 + n // 7)]
    assert np.array_equal(alone, found[:: 1 + n // 7])


def test_scores_that_are_no_numbers_choose_experts_all_the_same() -> None:
    """So no kernel leaves its arrays; the row fails when its token is chosen."""
    m = both("mxfp4", 0)
    x = np.ones((3, m.config.dim), np.float32)
    x[1] = np.nan
    assert np.isnan(experts_of(m, x)).all(1).tolist() == [False, True, False]


CHECKED = [*itertools.product(["many-heads", "large-head", *MIXTURES], [0, 1])]


@pytest.mark.parametrize("ops", sweep([CudaOps, PlainOps], [CudaOps]))
@pytest.mark.parametrize(("name", "order"), sweep(CHECKED, [("mxfp4", 1)]))
def test_no_kernel_races_or_leaves_its_arrays(name: str, order: int, ops: Any) -> None:
    """Every kernel, in every shape, on shapes that are small: the checker is slow."""
    m = both(name, order, True, ops, enough_blocks=1)
    m.run_every_kernel(20 if ops is PlainOps else 66)
    x, y, h = m.inputs(1)
    assert near(m.products(x, y, h)["qkv"], m.numpy.qkv(x, m.layer, device_ops.spans_of(1)))
