"""kernels.cu, kernel by kernel, on the emulator: against the op of the same name, in two orders of threads.

Weights are bfloat16 in both, so that what differs is the rounding of what lies between two kernels: a part in
2^9 of a number. Inputs have outliers, as real models do (arXiv 2402.17762). The sizes are multiples of
nothing but 8, which rows of matrices must be.
"""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pytest

from devices.kernels import SHAPES, model_constants, shape_for
from helpers import emulator
from helpers.device_ops import (
    CONFIGS,
    LONG,
    MIXTURES,
    SAMPLINGS,
    Both,
    attend,
    best,
    both,
    near,
    noise,
    pick,
    qkv_noise,
    rounded,
    run_every_kernel,
    same,
    span,
    spans_of,
    sweep,
)
from helpers.plain_ops import PlainOps
from model import PAGE, Array, Batch, Span
from sampling import NO_TOKEN, Context, Sampling, pick_token

pytestmark = pytest.mark.skipif(emulator.MISSING is not None, reason=str(emulator.MISSING))

# rows of a product, how many blocks are enough, and the order of threads. Each shape is taken, and it norms
# its rows or not: up to NORMED_ROWS it does.
ROWS = [(1, 64, 0), (3, 64, 1), (5, 1, 0), (17, 20, 1), (64, 1, 0), (130, 1, 1)]
ALL_ROWS = [
    (n, enough, order)
    for enough, sizes in {64: (1, 2, 3, 16, 33, 130), 1: (5, 16, 17, 64, 130), 20: (17, 65, 130)}.items()
    for n in sizes
    for order in (0, 1)
]


def with_orders(names: Iterable[str], first: Collection[str]) -> list[Any]:
    """Each of the first names with an order of threads by turns; in the sweep all names with both."""
    pairs = [(name, order) for name in names for order in (0, 1)]
    return sweep(pairs, [(name, i % 2) for i, name in enumerate(first)])


# Those models of which each takes a way through attention that no other takes.
ATTENDS = ["grouped", "sinks", "many-heads", "large-head"]


# ---- Products ----------------------------------------------------------------------------------------------


def test_each_shape_is_taken() -> None:
    c = CONFIGS["grouped"]
    columns = model_constants(c)["QKV_DIM"], c.dim, 2 * c.hidden_dim
    assert {shape_for(n, n_columns, enough) for n, enough, _ in ROWS for n_columns in columns} == {*SHAPES}


@pytest.mark.parametrize(("n", "enough", "order"), sweep(ALL_ROWS, ROWS))
def test_products(n: int, enough: int, order: int) -> None:
    for name in ("grouped", "plain") if n == 1 else ("grouped",):
        m = both(name, order, enough_blocks=enough)
        c, rows = m.config, spans_of(n)
        x, y, h = noise(n, c.dim), noise(n, c.n_heads * c.head_dim), noise(n, c.hidden_dim)
        m.cuda.qkv(m.put("x", x), m.device_layer, m.batch(n))
        assert near(m.got("qkv", n), m.numpy.qkv(x, m.layer, rows))
        m.cuda.gate_up(m.put("x", x), m.device_layer, m.batch(n))
        assert near(m.got("h", n), m.numpy.gate_up(x, m.layer, rows), 8e-3)
        for op, inputs in (("out", y), ("down", h)):
            expected = x.copy()
            getattr(m.numpy, op)(expected, rounded(inputs), m.layer, rows)
            getattr(m.cuda, op)(
                m.put("x", x), m.put("y" if op == "out" else "h", inputs), m.device_layer, m.batch(n)
            )
            assert near(m.got("x", n), expected, 1e-5)


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
    """Whatever the shape of the blocks: alone, in a tile, in many; and whether the product norms its rows or
    `rms_norm` has. The sizes leave parts short, and empty.
    """
    shapes = {"grouped": (130, 33, 16, 3, 2, 1), "uneven": (17, 3, 2)}
    c = CONFIGS[name]
    rows = max(shapes[name])
    x, y, h = noise(rows, c.dim), noise(rows, c.n_heads * c.head_dim), noise(rows, c.hidden_dim)
    results: list[list[Array]] = []
    for enough in (1, 20, 64):
        m = both(name, 0, enough_blocks=enough)
        for n in shapes[name]:
            m.cuda.qkv(m.put("x", x[:n]), m.device_layer, m.batch(n))
            m.cuda.gate_up(m.cuda._buffers["x"], m.device_layer, m.batch(n))
            results.append([m.got("qkv", n), m.got("h", n)])
            m.cuda.out(m.cuda._buffers["x"], m.put("y", y[:n]), m.device_layer, m.batch(n))
            m.cuda.down(m.cuda._buffers["x"], m.put("h", h[:n]), m.device_layer, m.batch(n))
            m.cuda.logits(m.cuda._buffers["x"], m.cuda.weights, m.batch(n, range(min(n, 32))))
            results[-1] += [m.got("x", n), m.got("raw", min(n, 32))]
    for fewer in results[1:]:
        for whole, part in zip(results[0], fewer, strict=True):
            assert np.array_equal(whole[: len(part)], part)


@pytest.mark.parametrize("order", [0, 1])
def test_what_a_product_prefetches_lies_in_its_weights(order: int) -> None:
    """The checker looks; there is more of a row than registers hold, and parts are short, and empty."""
    m, x = both("long", order, True), noise(1, LONG.dim)
    m.cuda.logits(m.put("x", x), m.cuda.weights, m.batch(1, [0]))
    assert near(m.got("raw", 1), m.numpy._rms_norm(x, m.weights.norm) @ m.weights.head.T)


# ---- Attention ---------------------------------------------------------------------------------------------

LENGTHS = [1, 31, 32, 33, 127, 128, 129, 300]  # a warp's keys, a piece, and those around


@pytest.mark.parametrize(("name", "order"), with_orders(CONFIGS, ATTENDS))
def test_attend(name: str, order: int) -> None:
    """A prompt as a tile, then a token, then some at once."""
    m = both(name, order)
    for length in LENGTHS:
        qkv = qkv_noise(m, length + 5)
        expected = m.numpy.attend(qkv.copy(), m.layer, 0, Batch([span(1, 0, length + 5, True)]))
        tile = attend(m, [span(1, 0, length, True)], qkv[:length])
        token = attend(m, [span(1, length, 1, False)], qkv[length : length + 1])
        some = attend(m, [span(1, length + 1, 4, False)], qkv[length + 1 :])
        assert near(np.concatenate([tile, token, some]), expected, 8e-3)


@pytest.mark.parametrize("name", sweep(CONFIGS, ATTENDS))
def test_attention_has_the_same_bits_in_tiles_and_row_by_row(name: str) -> None:
    m, n = both(name, 0), 150
    qkv = qkv_noise(m, n)
    whole = attend(m, [span(1, 0, n, True)], qkv)
    pages = m.cuda._keys[0].get().copy(), m.cuda._values[0].get().copy()
    rows = [attend(m, [span(1, i, 1, False)], qkv[i : i + 1])[0] for i in range(n)]
    assert np.array_equal(whole, rows)
    assert np.array_equal(pages, (m.cuda._keys[0].get(), m.cuda._values[0].get()))
    parts = [attend(m, [span(1, i, min(31, n - i), i % 2 == 0)], qkv[i : i + 31]) for i in range(0, n, 31)]
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("name", ["grouped", "sinks"])
def test_what_lies_behind_a_sequence_in_its_page_is_not_seen(name: str) -> None:
    """Pages are not cleared: what an earlier sequence left there may be anything."""
    m = both(name, 0)
    c, qkv = m.config, qkv_noise(m, 71)
    results = []
    for left in (0, 0x7FC0):  # 0x7FC0: NaN
        keys = np.zeros((16, c.n_kv_heads, PAGE, 32), np.uint16)  # heads of 20, padded with zeros
        keys[..., :20] = left
        m.cuda._keys[0].set(keys.reshape(m.cuda._keys[0].shape))
        m.cuda._values[0].set(keys.swapaxes(2, 3).reshape(m.cuda._values[0].shape).copy())
        prompt, token = (
            attend(m, [span(1, 0, 70, True)], qkv[:70]),
            attend(m, [span(1, 70, 1, False)], qkv[70:]),
        )
        results.append(np.concatenate([prompt, token]))
    assert np.array_equal(results[0], results[1])


# ---- Sampling ----------------------------------------------------------------------------------------------

PROMPT, OUTPUT = [3, 3, 500, 999], [4, 4, 4, 500, 17]


@pytest.mark.parametrize("order", sweep([0, 1], [1]))
@pytest.mark.parametrize("changes", SAMPLINGS, ids=str)
def test_pick(changes: dict[str, Any], order: int) -> None:
    m = both("grouped", order)
    raw = np.random.default_rng(5).normal(0, 3, (3, 1001)).astype(np.float32)
    samplings = [Sampling(**changes | {"seed": seed, "choice": seed % 2}) for seed in range(3)]
    contexts = [Context(sampling, PROMPT, OUTPUT) for sampling in samplings]
    for got, logits, context in zip(pick(m, raw, contexts), raw, contexts, strict=True):
        assert same(got, pick_token(logits, context))


# fmt: off
MANY = [{}, {"top_k": 40}, {"top_p": 0.2, "min_p": 0.001}, {"top_k": 30_000, "top_p": 0.99},
        {"temperature": 0.05, "top_k": 40, "top_p": 0.95}]  # in the last, most tokens weigh nothing
# fmt: on


@pytest.mark.parametrize("changes", MANY, ids=str)
def test_pick_of_many_tokens(changes: dict[str, Any]) -> None:
    """So many that a warp has words of many, and a draw goes over runs of runs."""
    m = both("many-tokens", 0)
    raw = np.random.default_rng(7).normal(0, 2, (2, 70_001)).astype(np.float32)
    raw[:, [5, 40_000, 70_000]] += 8
    contexts = [Context(Sampling(**changes | {"seed": seed}), [], []) for seed in range(2)]
    assert pick(m, raw, contexts) == [pick_token(row, c) for row, c in zip(raw, contexts, strict=True)]


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


@pytest.mark.parametrize("allowed", [[0], [1000], [31, 32, 33], range(0, 1001, 7)], ids=str)
def test_pick_among_the_tokens_of_a_mask(allowed: list[int]) -> None:
    m = both("grouped", 0)
    raw = np.random.default_rng(6).normal(0, 3, 1001).astype(np.float32)
    mask = np.isin(np.arange(1001), allowed)
    contexts = [Context(Sampling(temperature=t), PROMPT, OUTPUT, mask) for t in (0.0, 1.0)]
    assert pick(m, np.stack([raw, raw]), contexts) == [pick_token(raw, context) for context in contexts]


@pytest.mark.parametrize("worst", [np.nan, np.inf, -np.nan])
def test_no_token_is_chosen_by_logits_that_are_no_numbers(worst: float) -> None:
    m, zeros = both("grouped", 0), np.zeros((1, 1001), np.float32)
    raw = zeros.copy()
    raw[0, 1000] = worst
    free, nothing_allowed = Context(Sampling(), [], []), Context(Sampling(), [], [], np.zeros(1001, bool))
    for logits, context in ((raw, free), (zeros - np.inf, free), (zeros, nothing_allowed)):
        assert pick(m, logits, [context])[0].token_id == NO_TOKEN


def test_the_first_of_equals_is_the_likeliest() -> None:
    raw = np.zeros((1, 1001), np.float32)
    raw[0, [40, 700]] = 1
    raw[0, :30] = -0.0
    greedy = Sampling(temperature=0, n_top_logprobs=3)
    [choice] = pick(both("grouped", 0), raw, [Context(greedy, [], [])])
    assert choice.token_id == 40
    assert [token_id for token_id, _ in choice.top] == [40, 700, 0]


# ---- Experts -----------------------------------------------------------------------------------------------


def experts_of(m: Both, x: Array) -> Array:
    """x with what its rows' experts add."""
    device_x = m.put("x", x)
    m.cuda.experts(device_x, m.device_layer, m.batch(len(x)))
    found: Array = m.got("x", len(x))
    return found


@pytest.mark.parametrize("n", sweep([1, 2, 16, 17, 33, 300], [1, 17, 300]))
@pytest.mark.parametrize("name", MIXTURES)
def test_experts(name: str, n: int) -> None:
    """Groups of a row, of a tile, of some, of more than go at a time; the plain kernels say the same."""
    m, plain = both(name, 0), both(name, 0, ops=PlainOps)
    x = np.random.default_rng(n).standard_normal((n, m.config.dim), np.float32)
    expected = x.copy()
    m.numpy.experts(expected, m.layer, spans_of(n))
    found = experts_of(m, x)
    assert near(found - x, experts_of(plain, x) - x)
    n_apart = (np.linalg.norm(found - expected, axis=1) > 0.02 * np.linalg.norm(expected - x, axis=1)).sum()
    assert n_apart <= n / 20  # of a near tie another expert is chosen, for what is scored was rounded
    alone = [experts_of(m, x[i : i + 1])[0] for i in range(0, n, 1 + n // 7)]
    assert np.array_equal(alone, found[:: 1 + n // 7])


def test_scores_that_are_no_numbers_choose_experts_all_the_same() -> None:
    """So that no kernel leaves its arrays; the row fails when its token is chosen."""
    m = both("mxfp4", 0)
    x = np.ones((3, m.config.dim), np.float32)
    x[1] = np.nan
    found = experts_of(m, x)
    assert np.isnan(found[1]).all()
    assert np.array_equal(found[0], experts_of(m, x[:1])[0])


# ---- Under the checker -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "order"), with_orders(["many-heads", "large-head", *MIXTURES], ["many-heads", "mxfp4"])
)
def test_no_kernel_races_or_leaves_its_arrays(name: str, order: int) -> None:
    """Every kernel, in every shape, on shapes that are small: the checker is slow."""
    run_every_kernel(both(name, order, True, enough_blocks=1))
