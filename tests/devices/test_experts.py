"""devices/experts.py: mixtures of experts against NumPy's on the same weights, and the same bits alone, in
any batch and in a chunk. Without Numba there is nothing to test, and these say so.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="pip install -e '.[fast]' brings Numba")

from checkpoint.config import FAMILIES, Config, read_config
from checkpoint.weights import Mxfp4, Weights, decoded_mxfp4, read_weights
from devices.experts import LANES, ROWS, ExpertOps, expert_products, pack
from model import Array, Batch, NumpyOps, Span, forward
from parity import CASES, every_mxfp4, write

MIXTURES = [name for name, case in CASES.items() if FAMILIES[case.model_type].mixture]
IN_BFLOAT16 = [name for name in MIXTURES if CASES[name].dtype == "BF16"]
ROUNDING = 2e-4  # of a logit, as in test_model.py
PAGES = [5, 0, 3]  # of one sequence
TOKENS = [(11 * i * i + 3) % 90 for i in range(150)]


@cache
def both(name: str) -> tuple[Config, Weights, Weights]:
    """As NumpyOps has the weights, and as ExpertOps."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), CASES[name])
        config = read_config(Path(folder))
        return config, read_weights(Path(folder), config), read_weights(Path(folder), config, pack)


def ops(kind: type[NumpyOps], config: Config, weights: Weights) -> NumpyOps:
    return kind(config, weights, max_seq_len=192, n_pages=6, max_batch=3)


def steps(o: NumpyOps, sizes: list[int], others: int = 0) -> Array:
    """The logits of the last token, read in parts of these sizes, beside others that come and go."""
    o._kv[PAGES] = np.nan  # memory may hold anything until it is written
    start, found = 0, np.empty(0, np.float32)
    for n, size in enumerate(sizes):
        spans = [Span(0, PAGES, TOKENS[start : start + size], start, 1)]
        for i in range(n % (others + 1)):
            spans.insert(0, Span(1 + i, [1 + i], [n % 90], 0, 1))
        found = forward(o, o.weights, Batch(spans))[-1]
        start += size
    return found


@pytest.mark.parametrize("name", MIXTURES)
def test_equals_numpy(name: str) -> None:
    config, wide, packed = both(name)
    expected = steps(ops(NumpyOps, config, wide), [64, 64, 1, 1])
    assert np.abs(steps(ops(ExpertOps, config, packed), [64, 64, 1, 1]) - expected).max() < ROUNDING


@pytest.mark.parametrize("name", MIXTURES)
def test_same_bits_alone_batched_and_in_a_chunk(name: str) -> None:
    config, _, packed = both(name)
    o = ops(ExpertOps, config, packed)
    expected = steps(o, [1] * 150)
    for sizes in ([64, 64, 22], [1, 63, 64, 21, 1], [128, *[1] * 22]):
        assert np.array_equal(steps(o, sizes), expected)
    assert np.array_equal(steps(o, [1] * 150, others=2), expected)


@pytest.mark.parametrize("name", IN_BFLOAT16)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_what_no_row_has_chosen_is_not_read(name: str, n_threads: int) -> None:
    """It may be no number."""
    config, _, packed = both(name)
    assert config.experts
    w = packed.layers[1].w_gate_up
    x = np.random.default_rng(0).standard_normal((4, config.dim)).astype(np.float32)
    chosen = np.array([2, 0, 2, 3])
    expected = expert_products(x, w, chosen, n_threads)
    unread = np.ones(config.experts.n, bool)
    unread[chosen] = False
    poisoned = poison(w, unread)
    assert np.array_equal(expert_products(x, poisoned, chosen, n_threads), expected)
    assert np.isnan(expert_products(x, poisoned, np.array([2, 1, 2, 3]), n_threads)[1]).all()


def poison(w: Any, experts: Array) -> Any:
    if isinstance(w, Mxfp4):
        scales = w.scales.copy()
        scales[experts] = 255
        return Mxfp4(w.blocks, scales)
    bits = w.copy()
    bits[experts] = 0x7FC0  # a NaN
    return bits


def test_every_number_of_mxfp4_times_one() -> None:
    """One of 512 inputs is 1: the product is that number itself."""
    every = every_mxfp4()
    packed = Mxfp4(every.blocks[:, 10:245], every.scales[:, 10:245])  # none is infinite, and no sum rounds
    numbers = decoded_mxfp4(packed)[0]
    for i in range(0, 512, 7):
        x = np.zeros((1, 512), np.float32)
        x[0, i] = 1
        assert np.array_equal(expert_products(x, packed, np.zeros(1, np.int64), 1)[0], numbers[:, i])


@pytest.mark.parametrize("n_out", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5])
@pytest.mark.parametrize("is_mxfp4", [True, False])
def test_any_size(n_out: int, is_mxfp4: bool) -> None:
    rng = np.random.default_rng(n_out)
    n_in = 3 * 2 * LANES
    x = rng.standard_normal((7, n_in)).astype(np.float32)
    chosen = rng.integers(0, 5, 7)
    w: Any = rng.integers(0x3F00, 0x4000, (5, n_out, n_in)).astype(np.uint16)
    wide: Array = (w.astype(np.uint32) << 16).view(np.float32)
    if is_mxfp4:
        blocks = rng.integers(0, 256, (5, n_out, 3, LANES), np.uint8)
        w = Mxfp4(blocks, rng.integers(120, 130, (5, n_out, 3), np.uint8))
        wide = decoded_mxfp4(w)
    expected = np.stack([wide[e].astype(np.float64) @ row for e, row in zip(chosen, x, strict=True)])
    found = [expert_products(x, w, chosen, n_threads) for n_threads in (1, 2)]
    assert np.array_equal(found[0], found[1])
    assert np.abs(found[0] - expected).max() < 1e-5 * np.abs(expected).max()
