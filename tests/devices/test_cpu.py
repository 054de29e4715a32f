"""devices/cpu.py: NumPy's products of the same weights, and the same bits alone and in any batch."""

import logging
import shutil
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="pip install -e '.[fast]' brings Numba")

from filelock import FileLock
from numba import njit, types

from checkpoint.config import Config, read_config
from checkpoint.gguf_blocks import FLOATS, Blocks, decoded, quantized
from checkpoint.weights import Weights, bfloat16, read_weights, unpacked
from devices import cpu_kernels as kernels
from devices import cpu_sampling, microkernel
from devices import kernels as gpu_kernels
from devices.cpu import NOTHING, SMALL, FastOps
from devices.cpu_kernels import SPAN, shared
from devices.microkernel import FAST_BFLOAT16, FEATURES, WIDTH
from devices.panels import Panels, pack, pack_blocks, pack_floats
from helpers.device_ops import TABLES, sweep
from helpers.serving import TINY, until
from model import PAGE, Array, Batch, NumpyOps, Span, forward
from parity import CASES, folder_of
from sampling import Context, Sampling


def random(*shape: int) -> Array:
    return np.random.default_rng([*shape]).standard_normal(shape).astype(np.float32)


def bfloat16s(*shape: int) -> Array:
    """Values that bfloat16 holds, of very different sizes."""
    rng = np.random.default_rng([*shape])
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(np.float32)
    values.view(np.uint32)[...] &= 0xFFFF0000
    return values


@cache
def ops() -> FastOps:
    config = read_config(TINY)
    return FastOps(config, read_weights(TINY, config, pack), 2 * PAGE, 2, 1)


def product(x: Array, w: Any) -> Array:
    """x @ w.T by FastOps."""
    return ops()._product(ops()._stored(x, w), w, None)


def in_format(name: str, n_out: int, n_in: int) -> tuple[Panels, Array]:
    """A matrix packed in a format, and the numbers that it holds."""
    w = random(n_out, n_in)
    if name in FLOATS:
        w = {"BF16": bfloat16s(n_out, n_in), "F16": w.astype(np.float16).astype(np.float32), "F32": w}[name]
        return pack_floats(w), w
    blocks = quantized(w, name)
    return pack_blocks(blocks), decoded(blocks)


SIZES = [(1, 1), (31, 33), (65, 127), (1000, 36)]  # (n_out, n_in)
BLOCK_SIZES = [(1, 32), (33, 64), (100, 576)]
FORMS = [(name, *size) for name in FLOATS for size in SIZES]
FORMS += [(name, *size) for name in ("Q8_0", "Q5_1", "Q4_1", "MXFP4") for size in BLOCK_SIZES]


@pytest.mark.parametrize(("name", "n_out", "n_in"), FORMS)
@pytest.mark.parametrize("n_rows", [1, 6])
def test_is_the_product(name: str, n_out: int, n_in: int, n_rows: int) -> None:
    """A sum of n products, each step rounded once, is off by n * 2^-24 of the sum of their sizes at most."""
    packed, w = in_format(name, n_out, n_in)
    x = bfloat16s(n_rows, n_in)  # rounding to bfloat16 changes nothing
    assert packed.format == name
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    limit = (n_in + 2) * 2.0**-24 * np.abs(x) @ np.abs(w).T.astype(np.float64)
    if packed.is_quantized:
        largest = np.abs(x).reshape(n_rows, -1, 32).max(2).repeat(32, 1)
        # x is rounded to 16 bits of the largest of 32 numbers. Those of Q4_1 and Q5_1 have no sign, but a
        # minimum: both may be larger than w.
        limit += (2.0**-16 + 2.0**-20) * largest @ (np.abs(w) + 2 * np.abs(w).max()).T
    assert (np.abs(product(x, packed) - exact) <= limit).all()


WAYS = ["float32", "bfloat16"] if FAST_BFLOAT16 else ["float32"]  # of a row that is multiplied by bfloat16


@pytest.mark.parametrize("n_in", [2, 4, 34, 576])
@pytest.mark.parametrize("way", WAYS)
def test_sums_in_order_by_fused_steps(way: str, n_in: int) -> None:
    """A fused step is one addition in float64, which holds a product of float32 exactly, then rounded."""
    x, w = random(1, n_in), bfloat16s(WIDTH, n_in)
    order = np.arange(n_in)
    rows: Any = x
    if way == "bfloat16":
        rows = bfloat16(x)
        x = unpacked(rows)
        order = order.reshape(-1, 2)[:, ::-1].ravel()  # of a pair the second is added first
    sums = np.zeros(WIDTH, np.float32)
    for k in order:
        sums = (sums.astype(np.float64) + np.float64(x[0, k]) * w[:, k].astype(np.float64)).astype(np.float32)
    y = np.full((1, WIDTH), np.nan, np.float32)
    kernels.product(rows, pack_floats(w).words, y, NOTHING)
    assert np.array_equal(y[0], sums)


@pytest.mark.parametrize(("name", "n_out", "n_in"), [*FORMS, ("BF16", SMALL // 64, 64)])  # with all threads
def test_a_row_has_the_same_bits_in_any_batch(name: str, n_out: int, n_in: int) -> None:
    x, (w, _) = bfloat16s(64, n_in), in_format(name, n_out, n_in)
    alone = np.concatenate([product(row[None], w) for row in x])
    for n_rows in (1, 2, 3, 4, 5, 7, 8, 33, 64):
        for rows in (slice(n_rows), slice(64 - n_rows, 64)):
            assert np.array_equal(product(x[rows].copy(), w), alone[rows])


@pytest.mark.parametrize("name", sweep(["Q8_0", "Q4_1"], ["Q8_0"]))
def test_a_processor_without_vnni_sums_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX2's and the portable instructions compute the same integers, extreme ones too."""
    packed, _ = in_format(name, WIDTH, 64)
    rows = ops()._stored(random(8, 64), packed)
    numbers = rows[:, :, 4:]
    numbers[...] = np.random.default_rng(0).integers(-(2**15), 2**15, numbers.shape)
    numbers[4:6], numbers[6:] = -(2**15), 2**15 - 1
    expected, found = (np.empty((8, WIDTH), np.float32) for _ in range(2))
    kernels.product(rows, packed.words, expected, NOTHING)
    key = name, types.int16
    dots = [microkernel.portable_dot]
    if "+avx2" in FEATURES:
        dots.append(microkernel.two_step_dot)
    for dot in dots:
        monkeypatch.setitem(microkernel.FORMATS, key, microkernel.FORMATS[key]._replace(dot=dot))
        fresh = njit(fastmath={"contract"}, error_model="numpy")(kernels.product.py_func)
        fresh(rows.repeat(2, 0)[::2], packed.words, found, NOTHING)  # of a type not compiled yet
        assert np.array_equal(found, expected)


@pytest.mark.skipif(not microkernel.HAS_VNNI, reason="the processor has no AVX512-VNNI")
@pytest.mark.parametrize("name", sweep(["Q8_0", "Q4_1"], ["Q8_0"]))
def test_integers_are_multiplied_and_added_in_one_instruction(name: str) -> None:
    """LLVM takes two in place of its intrinsic, half as fast: llvm/llvm-project#84182."""
    packed, _ = in_format(name, WIDTH, 32)
    fresh = njit(nogil=True, error_model="numpy")(kernels.product.py_func)  # a cached one has no listing
    fresh(packed.inputs(8), packed.words, np.zeros((8, WIDTH), np.float32), NOTHING)
    [code] = fresh.inspect_asm().values()  # what the processor executes
    assert "vpdpwssd" in code
    assert "vpmaddwd" not in code


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_no_number_stays_none(number: float) -> None:
    """Rounded to 0 it would be an answer: a model with one broken weight said its token 0 for ever."""
    x = np.ones((1, 64), np.float32)
    x[0, 40] = number
    for name in ("Q8_0", "BF16"):
        y = product(x, pack(np.ones((32, 64), np.float32), name))
        assert not np.isfinite(y).any()


def test_rounding_to_bfloat16() -> None:
    """To the nearest, ties to even, as checkpoint.weights rounds weights."""
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32)
    x = np.append(bits, bits & 0xFFFF8000).view(np.float32)[None]
    stored = np.empty(x.shape, np.uint16)
    kernels.store_rows(x, stored)
    expected = np.where(np.isnan(x), x, unpacked(bfloat16(x)))
    assert np.array_equal(unpacked(stored), expected, equal_nan=True)


def shares(one: Any) -> bool:
    """Whether it is a kernel whose work threads share out."""
    return "prange" in getattr(one, "py_func", shares).__code__.co_names


KERNELS = [one for module in (kernels, cpu_sampling) for one in vars(module).values() if shares(one)]


def test_what_threads_share_is_compiled_for_threads() -> None:
    """Numba's cache once gave the kernel of one thread for both, for it was made of the same function."""
    ops()
    for one in KERNELS:
        assert one.py_func.__qualname__ != shared(one).py_func.__qualname__  # by which the cache tells them
        for kernel, is_parallel in ((one, False), (shared(one), True)):
            assert all(bool(result.reload_init) is is_parallel for result in kernel.overloads.values())


def test_nothing_is_left_to_compile_for_the_first_request() -> None:
    config = read_config(TINY)
    kernels: list[Any] = [*KERNELS, *map(shared, KERNELS)]
    weights = read_weights(TINY, config, pack)
    FastOps(config, weights, PAGE, 2, 1)
    before = [list(kernel.overloads) for kernel in kernels]
    for prompts in ([[1] * 60], [[1] * 5] * 9, [[1]] * 9):
        spans = [Span(i, [i], prompt, 0, 1) for i, prompt in enumerate(prompts)]
        contexts = [Context(Sampling(seed=i, logit_bias={i: 1.0}), [], []) for i in range(len(spans))]
        FastOps(config, weights, PAGE, 9, 9).launch(spans, contexts)
    assert [list(kernel.overloads) for kernel in kernels] == before


def test_packing_is_exact() -> None:
    w = bfloat16s(65, 7)
    w[0, :3] = -0.0, np.float32(2.0**-126), np.inf
    packed = pack_floats(w)
    assert packed.format == "BF16"
    assert np.array_equal(packed.take(np.arange(65)).view(np.uint32), w.view(np.uint32))
    bits = pack_floats((w.view(np.uint32) >> 16).astype(np.uint16))  # as weights.py hands on bfloat16
    assert bits.format == "BF16"
    assert np.array_equal(bits.words, packed.words)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1"])
def test_blocks_of_a_file(name: str) -> None:
    """They stand for the same numbers; --weights int4 does not round 4 bits once more."""
    blocks = [quantized(random(64, 96), name), quantized(random(32, 96), name)]
    packed = pack(blocks)
    assert packed.format[:2] == name[:2]
    assert np.array_equal(packed.take(np.arange(96)), unpacked(blocks))
    assert np.array_equal(pack(blocks, packed.format).words, packed.words)


@pytest.mark.parametrize(("name", "n_bytes", "begin", "n", "kept", "limit"), TABLES["blocks_of_256"])
def test_blocks_of_256(name: str, n_bytes: int, begin: int, n: int, kept: str, limit: float) -> None:
    """Bug: a file in Q4_K_M took 22 s at every start, and grew by a third: it became Q8_0 by float32."""
    rng = np.random.default_rng(n_bytes)
    data = rng.integers(0, 256, (70, 3, n_bytes), np.uint8)  # every pattern of bits stands for a number
    data[:, :, begin : begin + 2 * n] = rng.uniform(1e-4, 2e-3, (70, 3, n)).astype(np.float16).view(np.uint8)
    packed, expected = pack([Blocks(name, data)]), decoded(Blocks(name, data))
    assert packed.format == kept
    assert np.abs(packed.take(np.arange(70)) - expected).max() < limit * np.abs(expected).max()


@pytest.mark.parametrize("name", ["BF16", "Q8_0", "Q4_1"])
def test_a_format_for_all_matrices(name: str) -> None:
    w = random(40, 64)
    for packed in (pack(w, name), pack([quantized(w, "Q5_1")], name)):
        assert packed.format == name
    assert pack(random(40, 36), name).format == "BF16"  # no whole blocks
    different = [quantized(w, "Q4_1"), quantized(w, "Q8_0")]  # as in files of Q4_K_M
    assert pack(different).format == "Q8_0"
    assert np.abs(pack(different).take(np.arange(80))[:40] - decoded(different[0])).max() < 0.02


def test_what_no_row_has_chosen_is_not_read() -> None:
    """A matrix of an expert may hold what is no number."""
    x, w = random(4, 64), random(4, 40, 64)
    expected = ops()._expert_linear(x, pack(w), None, np.array([2, 0, 2, 3]))
    w[1] = np.inf
    assert np.array_equal(ops()._expert_linear(x, pack(w), None, np.array([2, 0, 2, 3])), expected)
    found = ops()._expert_linear(x, pack(w), None, np.array([2, 1, 2, 3]))
    assert not np.isfinite(found[1]).any()
    assert np.array_equal(found[[0, 2, 3]], expected[[0, 2, 3]])


def both(name: str) -> tuple[Config, Weights, Weights]:
    """A model of parity.py, for NumpyOps and for FastOps."""
    with folder_of(name) as directory:
        config = read_config(directory)
        return config, read_weights(directory, config), read_weights(directory, config, pack)


LONG_PROMPTS = [[5, 6, 7, 8, 9], [11], [*range(20, 59)], [(7 * i * i + 1) % 90 for i in range(SPAN + 44)]]


SOME = ["llama-3", "mistral-window", "qwen3-layer-types", "smollm3-window", "granite-tied", "phi-4-mini"]
SOME += [name for name, case in CASES.items() if "num_experts_per_tok" in case.changes]


@pytest.mark.parametrize("name", sweep(CASES, [*SOME, "qwen2", "llama-head-dim", "granite-biases"]))
def test_equals_numpy(name: str) -> None:
    """Each op from the same inputs as the spec's: what one rounds is not multiplied by the next."""
    c, wide, packed = both(name)
    assert packed.embed.format == (CASES[name].dtype if c.embed_scale == 1 else "F32")
    spec, fast = (kind(c, w, 576, 36, 4) for kind, w in ((NumpyOps, wide), (FastOps, packed)))
    batch = Batch([Span(i, range(9 * i, 9 * i + 9), prompt, 0, 1) for i, prompt in enumerate(LONG_PROMPTS)])
    x = spec.embed(batch, wide)
    assert np.array_equal(fast.embed(batch, packed), x)
    for i, (layer, packed_layer) in enumerate(zip(wide.layers, packed.layers, strict=True)):
        qkv = spec.qkv(x, layer, batch)
        assert_close(fast.qkv(x, packed_layer, batch), qkv)
        y = spec.attend(qkv.copy(), layer, i, batch)
        assert_close(fast.attend(qkv.copy(), packed_layer, i, batch), y)
        for half in ("out", "mlp"):
            mine = x.copy()
            for ops, residual, some in ((fast, mine, packed_layer), (spec, x, layer)):
                if half == "out":
                    ops.out(residual, y, some, batch)
                elif layer.router is not None:
                    ops.experts(residual, some, batch)
                else:
                    ops.down(residual, ops.gate_up(residual, some, batch), some, batch)
            assert_close(mine, x)
    assert_close(fast.logits(x, packed, batch), spec.logits(x, wide, batch))


def assert_close(found: Array, expected: Array) -> None:
    """Rounding to bfloat16 changes a number by up to 2^-9 of its size, and the scores of attention all."""
    assert np.abs(found - expected).max() < 2.0**-5 * np.abs(expected).max()


PAGES = [5, 0, 3, 2, 4, 9, 8, 6, 7]  # of one sequence
NOT_A_NUMBER = 0x7FC0  # in bfloat16
TOKENS = LONG_PROMPTS[-1]


def steps(ops: NumpyOps, weights: Weights, sizes: list[int]) -> Array:
    """The logits of the last token, read in parts of these sizes, beside another sequence."""
    ops._kv[PAGES] = NOT_A_NUMBER  # memory may hold anything until it is written
    start, found = 0, np.empty(0, np.float32)
    for n, size in enumerate(sizes):
        mine = Span(0, PAGES, TOKENS[start : start + size], start, 1)
        other = Span(1, [1], [n % 90], 0, 1)
        found = forward(ops, weights, Batch([other, mine] if n % 2 else [mine]))[-1]
        start += size
    assert start == len(TOKENS)
    return found


@pytest.mark.parametrize("name", sweep(SOME, ["llama-3", "qwen3-layer-types", "mixtral-window", "gpt-oss"]))
def test_a_row_has_the_same_bits_in_a_chunk_as_by_itself(name: str) -> None:
    """Over several pages, more keys than are attended to at once, windows, groups and norms of heads.

    By one thread, and by all: Numba once moved memory that each row wrote to out of the loop that they share.
    """
    config, _, packed = both(name)
    fast = FastOps(config, packed, 576, 10, 2)
    fast._small = sys.maxsize
    expected = steps(fast, packed, [1] * 556)
    fast._small = 0
    for sizes in ([64] * 8 + [44], [556], [1, 63, 64, 21, 107, 300], [7, 33, 90, 426], [514, *[1] * 42]):
        assert np.array_equal(steps(fast, packed, sizes), expected)


def test_a_changed_module_compiles_all_kernels_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba looks at the module of a kernel alone: an update of microkernel.py ran what it had been."""
    folder = shutil.copytree(gpu_kernels.PLAIN_CODE.parent, tmp_path / "devices")
    before = gpu_kernels.cache_file()
    monkeypatch.setattr(gpu_kernels, "PLAIN_CODE", folder / "plain.cu")
    assert gpu_kernels.cache_file() == before
    with (folder / "microkernel.py").open("a") as file:
        file.write("# changed\n")
    assert gpu_kernels.cache_file() != before


# --- a start ------------------------------------------------------------------------------------------------


def test_one_process_compiles_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bugs: nine starts at once compiled the same for minutes; a start that compiled nothing announced it."""
    monkeypatch.setattr(kernels.numba_config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(kernels.OPTIONS, "cache", True)
    caplog.set_level(logging.INFO)
    order = list[str]()

    def other() -> None:
        with kernels.compiling():
            order.append("the other")

    thread = threading.Thread(target=other)
    with FileLock(tmp_path / "lock"):
        thread.start()
        until(lambda: bool(caplog.messages), "the other one waits")
        order.append("this one")
    thread.join()
    assert order == ["this one", "the other"]
    assert caplog.messages == ["waiting for another process, which gets the kernels ready"]
    with kernels.compiling():
        for n in (1, 2):
            assert njit(lambda x: x + 1)(n) == n + 1
    assert caplog.messages[1].startswith("compiling the kernels")
    assert len(caplog.messages) == 2


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMREF_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(kernels.numba_config, "CACHE_DIR", "")
    assert not kernels.can_cache()
    assert "each start compiles the kernels" in caplog.text
