"""devices/cpu.py: its products against NumPy's on the same weights, in float64 where rounding is in
question, and the same bits alone and in any batch. Without Numba there is nothing to test, and these say so.
"""

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="pip install -e '.[fast]' brings Numba")

from numba import njit

from checkpoint.config import FAMILIES, Config, read_config
from checkpoint.weights import Weights, read_weights
from devices import cpu
from devices.cpu import SMALL, WIDTH, FastOps, Panels, pack
from engine import Engine
from helpers.engines import alone, endless, play, steps_of
from helpers.serving import TINY
from model import PAGE, Array, Batch, NumpyOps, Span, forward
from parity import CASES, write

SIZES = [(1, 1), (3, 2), (31, 33), (64, 64), (65, 127), (1000, 36)]  # (n_out, n_in)
ROWS = [1, 2, 3, 4, 5, 7, 8, 31, 32, 33]


def bfloat16s(*shape: int) -> Array:
    """Values that bfloat16 holds, of very different sizes."""
    rng = np.random.default_rng([*shape])
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(np.float32)
    values.view(np.uint32)[...] &= 0xFFFF0000
    return values


def product(x: Array, w: Any) -> Array:
    """x @ w.T by FastOps."""
    return ops()._linear(x, w, None, [slice(0, len(x))])


def ops() -> FastOps:
    config = read_config(TINY)
    return FastOps(config, read_weights(TINY, config, FastOps.pack), 8, 1, 1)


# ---- Products ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_out", "n_in"), SIZES)
@pytest.mark.parametrize("n_rows", [1, 6])
def test_is_the_product(n_out: int, n_in: int, n_rows: int) -> None:
    """A sum of n products, each step rounded once, is off by n * 2^-24 of the sum of their sizes at most."""
    x, w = bfloat16s(n_rows, n_in), bfloat16s(n_out, n_in)
    packed = pack(w)
    assert isinstance(packed, Panels)
    exact, size = x.astype(np.float64) @ w.T.astype(np.float64), np.abs(x) @ np.abs(w).T.astype(np.float64)
    assert (np.abs(product(x, packed) - exact) <= n_in * 2.0**-24 * size).all()


@pytest.mark.parametrize("n_in", [3, 4, 33, 576])
def test_sums_in_order_by_fused_steps(n_in: int) -> None:
    """Rule 2 to the bit: float64 holds the product of two float32 exactly, so a fused step is one addition in
    it, rounded (twice, which differs from once in one sum of 2^29).
    """
    x, w = np.random.default_rng(n_in).standard_normal((1, n_in)).astype(np.float32), bfloat16s(WIDTH, n_in)
    sums = np.zeros(WIDTH, np.float32)
    for k in range(n_in):
        sums = (sums.astype(np.float64) + np.float64(x[0, k]) * w[:, k].astype(np.float64)).astype(np.float32)
    assert np.array_equal(product(x, pack(w))[0], sums)


@pytest.mark.parametrize(("n_out", "n_in"), [*SIZES, (SMALL // 64, 64)])  # the last: with all threads
def test_a_row_has_the_same_bits_in_any_batch(n_out: int, n_in: int) -> None:
    x, w = bfloat16s(max(ROWS), n_in), pack(bfloat16s(n_out, n_in))
    alone = np.concatenate([product(row[None], w) for row in x])
    for n_rows in ROWS:
        for first in {0, max(ROWS) - n_rows}:
            rows = slice(first, first + n_rows)
            assert np.array_equal(product(x[rows].copy(), w), alone[rows])


def test_threads_change_nothing() -> None:
    x, w = bfloat16s(9, 64), pack(bfloat16s(SMALL // 64, 64))
    assert isinstance(w, Panels)
    one, all_cores = (np.empty((9, w.n_out), np.float32) for _ in range(2))
    cpu.product(x, w.bits, one)
    cpu.shared_product(x, w.bits, all_cores)
    assert np.array_equal(one, all_cores)


def test_what_threads_share_is_compiled_for_threads() -> None:
    """Numba's cache once gave the kernel of one thread for both, for it was made of the same function."""
    x, y, at = bfloat16s(1, 4), np.empty((1, WIDTH), np.float32), np.zeros((1, 1), np.int64)
    q, kv = np.zeros((1, 2, 4), np.float32), np.zeros((1, 1, 2, 1, PAGE, 4), np.float32)
    attended = q, kv, 0, np.zeros(2, np.float32), at, at[0], np.array([[0, 1, 0]]), 9, q.copy()
    arguments: dict[Any, tuple[Any, ...]] = {
        (cpu.product, cpu.shared_product): (x, np.zeros((1, 4, WIDTH), np.uint16), y),
        (cpu.attention, cpu.shared_attention): attended,
    }
    for kernels, given in arguments.items():
        assert len({place(kernel) for kernel in kernels}) == 2  # what the cache tells functions by
        for kernel, is_parallel in zip(kernels, (False, True), strict=True):
            kernel(*given)
            assert all(bool(result.reload_init) is is_parallel for result in kernel.overloads.values())


def test_nothing_is_left_to_compile_for_the_first_request() -> None:
    kernels: list[Any] = [cpu.rms_norm, cpu.product, cpu.shared_product, cpu.attention, cpu.shared_attention]
    cpu.compile_kernels()
    before = [list(kernel.overloads) for kernel in kernels]
    config = read_config(TINY)
    for prompts in ([[1] * 60], [[1] * 5] * 9):
        logits(FastOps, read_weights(TINY, config, pack), prompts, 3, config)
    assert [list(kernel.overloads) for kernel in kernels] == before


def place(kernel: Any) -> tuple[str, int]:
    return kernel.py_func.__qualname__, kernel.py_func.__code__.co_firstlineno


def test_bias() -> None:
    x, w, b = bfloat16s(5, 8), bfloat16s(70, 8), bfloat16s(70)
    expected = product(x, pack(w)) + b
    assert np.array_equal(ops()._linear(x, pack(w), b, []), expected)


# ---- Weights -----------------------------------------------------------------------------------------------


def test_packing_is_exact() -> None:
    w = bfloat16s(65, 7)
    w[0, :3] = -0.0, np.float32(2.0**-126), np.inf
    packed = pack(w)
    assert isinstance(packed, Panels)
    wide = packed.take(np.arange(65)).astype(np.uint32) << 16
    assert np.array_equal(wide, w.view(np.uint32))


def test_what_bfloat16_cannot_hold_stays() -> None:
    w = bfloat16s(65, 7)
    w[64, 6] = np.nextafter(np.float32(1), np.float32(2))
    assert pack(w) is w


def test_half_the_bytes() -> None:
    config = read_config(TINY)
    wide, packed = read_weights(TINY, config), read_weights(TINY, config, FastOps.pack)
    norms = 4 * config.dim
    assert 2 * norms < packed.nbytes < 0.6 * wide.nbytes  # 128 outputs take two panels of 96
    assert packed.head is packed.embed  # tied: one copy


# ---- The forward pass --------------------------------------------------------------------------------------


def logits(kind: type[NumpyOps], weights: Weights, prompts: list[list[int]], n_new: int, c: Config) -> Array:
    """Of all prompts in a batch, then of n_new steps with the same token each. (n_new + 1, n, vocab_size)"""
    ops = kind(c, weights, PAGE, len(prompts), len(prompts))
    starts, found = [0] * len(prompts), list[Array]()
    for tokens in [prompts, *[[[7]] * len(prompts)] * n_new]:
        spans = [Span(i, [i], t, starts[i], 1, is_chunk=len(t) > 1) for i, t in enumerate(tokens)]
        found.append(forward(ops, weights, Batch(spans)))
        starts = [span.end for span in spans]
    return np.array(found)


def both(directory: Path) -> tuple[Config, Weights, Weights]:
    config = read_config(directory)
    return config, read_weights(directory, config), read_weights(directory, config, FastOps.pack)


PROMPTS = [[5, 6, 7, 8, 9], [11], [*range(20, 59)]]


DENSE = [name for name, case in CASES.items() if FAMILIES[case.model_type].mixture is None]


@pytest.mark.parametrize("name", DENSE)  # test_experts.py has the others
def test_equals_numpy(name: str) -> None:
    """Families, biases, untied heads; files in bfloat16, and in float16 and float32, which stay as read."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), CASES[name])
        config, wide, packed = both(Path(folder))
    assert isinstance(packed.embed, Panels) == (CASES[name].dtype == "BF16")
    expected = logits(NumpyOps, wide, PROMPTS, 3, config)
    found = logits(FastOps, packed, PROMPTS, 3, config)
    assert np.abs(found - expected).max() < 2e-4  # test_model.py's ROUNDING


def test_same_bits_alone_and_batched() -> None:
    config, _, packed = both(TINY)
    together = logits(FastOps, packed, PROMPTS, 3, config)
    for i, prompt in enumerate(PROMPTS):
        assert np.array_equal(logits(FastOps, packed, [prompt], 3, config)[:, 0], together[:, i])


def rounded(name: str) -> tuple[Config, Weights, Weights]:
    """A case with its weights rounded to bfloat16: as they are, and packed."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), CASES[name])
        config = read_config(Path(folder))
        wide = read_weights(Path(folder), config, cut)
        packed = read_weights(Path(folder), config, lambda w: pack(cut(w)))
    return config, wide, packed


def cut(w: Array) -> Array:
    bits: Array = (w.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return bits


PAGES = [5, 0, 3]  # of one sequence
SOME = ["llama-3", "mistral-window", "qwen3", "qwen3-layer-types", "smollm3-window"]
TOKENS = [(11 * i * i + 3) % 90 for i in range(150)]


def steps(ops: NumpyOps, weights: Weights, sizes: list[int]) -> Array:
    """The logits of the last token, read in parts of these sizes, beside another sequence."""
    ops._kv[PAGES] = np.nan  # memory may hold anything until it is written
    start, found = 0, np.empty(0, np.float32)
    for n, size in enumerate(sizes):
        mine = Span(0, PAGES, TOKENS[start : start + size], start, 1, is_chunk=size > 1)
        other = Span(1, [1], [n % 90], 0, 1, is_chunk=False)
        found = forward(ops, weights, Batch([other, mine] if n % 2 else [mine]))[-1]
        start += size
    assert start == len(TOKENS)
    return found


@pytest.mark.parametrize("name", SOME)
def test_a_row_has_the_same_bits_in_a_chunk_as_by_itself(name: str) -> None:
    """Over several pages, with windows, groups and norms of heads; rounding apart, they are NumPy's."""
    config, wide, packed = rounded(name)
    spec, fast = (kind(config, w, 192, 6, 2) for kind, w in ((NumpyOps, wide), (FastOps, packed)))
    assert fast.chunk_invariant
    expected = steps(fast, packed, [1] * 150)
    for sizes in ([64, 64, 22], [150], [1, 63, 64, 21, 1], [7, 33, 90, 20], [128, *[1] * 22]):
        assert np.array_equal(steps(fast, packed, sizes), expected)
    assert np.abs(expected - steps(spec, wide, [64, 64, 22])).max() < 2e-4


def test_weights_of_another_kind_are_not_row_invariant() -> None:
    config, wide, packed = both(TINY)
    packed.layers[1] = replace(packed.layers[1], w_down=wide.layers[1].w_down)
    assert not FastOps(config, packed, PAGE, 1, 1).chunk_invariant


def test_exp() -> None:
    x = -np.geomspace(1e-6, 200, 4000, dtype=np.float32)
    got = np.array([kernel_exp(v) for v in x])
    assert np.abs(got - np.exp(x)).max() < 2e-7
    assert got[x < -88].max() == kernel_exp(np.float32(-np.inf)) == 0
    assert kernel_exp(np.float32(0)) == 1


@njit
def kernel_exp(x: Any) -> Any:
    return cpu.exp(x)


def test_an_engine_shares_what_was_said_too() -> None:
    """Rows have the same bits wherever they are computed, so the pages of an answer serve the next turn."""
    config = read_config(TINY)
    engine = Engine(FastOps(config, read_weights(TINY, config, pack), 512, 16, 2))
    said = alone(engine, endless(70, 100)).ids
    prompt = [*endless(70, 1).prompt, *said, 7]
    [*_, last] = play(steps_of(engine, replace(endless(1, 1), prompt=prompt)), "a second turn")
    assert last.cached_tokens == 2 * PAGE
    engine.close()


def test_a_matrix_of_each_kind() -> None:
    """One matrix that bfloat16 cannot hold is NumPy's, the others are not."""
    config, wide, packed = both(TINY)
    packed.layers[1] = replace(packed.layers[1], w_down=wide.layers[1].w_down)
    expected = logits(NumpyOps, wide, PROMPTS, 1, config)
    assert np.abs(logits(FastOps, packed, PROMPTS, 1, config) - expected).max() < 2e-3


# ---- Starting ----------------------------------------------------------------------------------------------


KERNELS: dict[Any, tuple[Any, ...]] = {
    cpu.one_row: (np.zeros(4, "f4"), np.zeros((4, WIDTH), "u2"), np.zeros(WIDTH, "f4")),
    cpu.four_rows: (np.zeros((4, 4), "f4"), np.zeros((4, WIDTH), "u2"), np.zeros((4, WIDTH), "f4")),
    cpu.add_product: (np.zeros(4, "f4"), np.zeros((4, PAGE), "f4"), np.zeros(PAGE, "f4")),
    cpu.softmax: (np.zeros(PAGE, "f4"), np.float32(0)),
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.py_func.__name__)
def test_kernels_use_vectors(kernel: Any) -> None:
    """A kernel that the compiler did not vectorise is right, and ten times as slow."""
    liberties = kernel.targetoptions.get("fastmath", cpu.LIBERTIES)
    fresh = njit(nogil=True, fastmath=liberties)(kernel.py_func)  # from the cache it would have no listing
    fresh(*KERNELS[kernel])
    [code] = fresh.inspect_asm().values()
    fused = [line for line in code.splitlines() if re.search(r"\bv?fn?m(add|la)\w*\s", line)]
    assert len([line for line in fused if re.search(r"[zy]mm|\.4s", line)]) >= 4, code
