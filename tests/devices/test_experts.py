"""The products of experts in devices/cpu.py, against NumPy on the same weights; skipped without Numba."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="pip install -e '.[fast]' brings Numba")

from checkpoint.config import read_config
from checkpoint.weights import Mxfp4, decoded_mxfp4, read_weights
from devices.cpu import FastOps
from devices.microkernel import WIDTH
from devices.panels import pack
from model import Array
from parity import CASES, every_mxfp4, write


def products(o: FastOps, x: Array, w: Any, experts: Any) -> Array:
    return o._expert_linear(x, pack(w), None, np.asarray(experts))


@cache
def some_ops() -> FastOps:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), CASES["mixtral"])
        config = read_config(Path(folder))
        return FastOps(config, read_weights(Path(folder), config, pack), 192, 6, 3)


@pytest.mark.parametrize("is_mxfp4", [True, False])
def test_what_no_row_has_chosen_is_not_read(is_mxfp4: bool) -> None:
    """It may be no number."""
    w, _ = experts_of(is_mxfp4, 4, 40, 64)
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    expected = products(some_ops(), x, w, [2, 0, 2, 3])
    if is_mxfp4:
        w.scales[1] = 255
    else:
        w[1] = 0x7FC0  # a NaN
    assert np.array_equal(products(some_ops(), x, w, [2, 0, 2, 3]), expected)
    found = products(some_ops(), x, w, [2, 1, 2, 3])
    assert not np.isfinite(found[1]).any()
    assert np.array_equal(found[[0, 2, 3]], expected[[0, 2, 3]])


def test_every_number_of_mxfp4_times_one() -> None:
    """One of 512 inputs is 1: the product is that number itself, for 2^15 / 32767 is rounded away."""
    every = every_mxfp4()
    packed = Mxfp4(every.blocks[:, 10:245], every.scales[:, 10:245])  # none is infinite, and no sum rounds
    numbers = decoded_mxfp4(packed)[0]
    for i in range(0, 512, 7):
        x = np.zeros((1, 512), np.float32)
        x[0, i] = 1
        found = products(some_ops(), x, packed, [0])[0]
        assert np.abs(found - numbers[:, i]).max() <= 2.0**-22 * np.abs(numbers[:, i]).max()


def experts_of(is_mxfp4: bool, n: int, n_out: int, n_in: int) -> tuple[Any, Array]:
    """Matrices, and the numbers that they hold."""
    rng = np.random.default_rng(n_out)
    if is_mxfp4:
        blocks = rng.integers(0, 256, (n, n_out, n_in // 32, 16), np.uint8)
        packed = Mxfp4(blocks, rng.integers(120, 130, (n, n_out, n_in // 32), np.uint8))
        return packed, decoded_mxfp4(packed)
    w = rng.integers(0x3F00, 0x4000, (n, n_out, n_in)).astype(np.uint16)
    return w, (w.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("n_out", [1, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH + 5])
@pytest.mark.parametrize("is_mxfp4", [True, False])
def test_any_size(n_out: int, is_mxfp4: bool) -> None:
    w, wide = experts_of(is_mxfp4, 5, n_out, 96)
    x = np.random.default_rng(n_out).integers(-128, 128, (7, 96)).astype(np.float32)  # as bfloat16 has them
    chosen = np.array([3, 0, 4, 4, 0, 1, 3])
    expected = np.stack([wide[e].astype(np.float64) @ row for e, row in zip(chosen, x, strict=True)])
    found = products(some_ops(), x, w, chosen)
    limit = 1e-4 * np.abs(x).max() * np.abs(wide).max(axis=(1, 2))[chosen] * 96
    assert (np.abs(found - expected) <= limit[:, None]).all()
    alone = [products(some_ops(), x[i : i + 1], w, chosen[i : i + 1]) for i in range(7)]
    assert np.array_equal(np.concatenate(alone), found)
