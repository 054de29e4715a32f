"""devices/cpu.py: its products against NumPy's on the same weights, in float64 if rounding is in question,
and the same bits alone and in any batch. Without Numba there is nothing to test, and these say so.
"""

import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="pip install -e '.[fast]' brings Numba")

from numba import njit, types
from numba.extending import intrinsic

from checkpoint.blocks import Blocks, decoded, quantized
from checkpoint.config import Config, read_config
from checkpoint.weights import Mxfp4, Weights, bfloat16, decoded_mxfp4, read_weights, unpacked
from devices import cpu_kernels as kernels
from devices import microkernel
from devices.cpu import NOTHING, SMALL, FastOps
from devices.cpu_kernels import KERNELS, SHARED, SPAN
from devices.microkernel import FAST_BFLOAT16, WIDTH
from devices.panels import Panels, pack, pack_blocks, pack_floats
from helpers.serving import TINY
from model import PAGE, Array, Batch, NumpyOps, Span, forward
from parity import CASES, every_mxfp4, write

SIZES = [(1, 1), (31, 33), (65, 127), (1000, 36)]  # (n_out, n_in)
ROWS = [1, 2, 3, 4, 5, 7, 8, 33, 64]


def bfloat16s(*shape: int) -> Array:
    """Values that bfloat16 holds, of very different sizes."""
    rng = np.random.default_rng([*shape])
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(np.float32)
    values.view(np.uint32)[...] &= 0xFFFF0000
    return values


def product(x: Array, w: Any) -> Array:
    """x @ w.T by FastOps."""
    return ops()._product(ops()._stored(x, w), w, None)


@cache
def ops() -> FastOps:
    config = read_config(TINY)
    return FastOps(config, read_weights(TINY, config, pack), 8, 1, 1)


# ---- Products ----------------------------------------------------------------------------------------------


def random(*shape: int) -> Array:
    return np.random.default_rng([*shape]).standard_normal(shape).astype(np.float32)


def rounded_to_bfloat16(x: Array) -> Array:
    numbers: Array = unpacked(bfloat16(x))
    return numbers


def as_multiplied(x: Array, packed: Panels) -> Array:
    """What a product multiplies the weights by, but for the 16 bits of those with blocks."""
    return rounded_to_bfloat16(x) if packed.format == "BF16" and FAST_BFLOAT16 else x


def in_format(name: str, n_out: int, n_in: int) -> tuple[Panels, Array]:
    """A matrix packed in a format, and the numbers that it holds."""
    w = random(n_out, n_in)
    if name == "MXFP4":
        data = np.random.default_rng(n_out).integers(0, 256, (n_out, n_in // 32, 17), np.uint8)
        data[:, :, 0] = 124  # exponents of 2, plus 127
        return pack_blocks(Blocks(name, data)), decoded(Blocks(name, data))
    if name.startswith("Q"):
        blocks = quantized(w, name)
        return pack_blocks(blocks), decoded(blocks)
    if name == "BF16":
        w = bfloat16s(n_out, n_in)
    if name == "F16":
        w = w.astype(np.float16).astype(np.float32)
    return pack_floats(w), w


BLOCK_SIZES = [(1, 32), (33, 64), (100, 576)]  # (n_out, n_in)
FORMATS = ["BF16", "F16", "F32", "Q8_0", "Q5_1", "Q4_1", "MXFP4"]
FORMS = [(name, *size) for name in FORMATS for size in (BLOCK_SIZES if name[0] in "QM" else SIZES)]


@pytest.mark.parametrize(("name", "n_out", "n_in"), FORMS)
@pytest.mark.parametrize("n_rows", [1, 6])
def test_is_the_product(name: str, n_out: int, n_in: int, n_rows: int) -> None:
    """A sum of n products, each step rounded once, is off by n * 2^-24 of the sum of their sizes at most.

    With blocks x is rounded to 16 bits of the largest of 32 numbers.
    """
    packed, w = in_format(name, n_out, n_in)
    x = bfloat16s(n_rows, n_in)
    assert packed.format == name
    exact = as_multiplied(x, packed).astype(np.float64) @ w.T.astype(np.float64)
    limit = (n_in + 2) * 2.0**-24 * np.abs(x) @ np.abs(w).T.astype(np.float64)
    if packed.is_quantized:
        largest = np.abs(x).reshape(n_rows, -1, 32).max(2).repeat(32, 1)
        # a block of Q4_1 or Q5_1 has numbers without a sign, and a minimum: both may be larger than w
        limit += (2.0**-16 + 2.0**-20) * largest @ (np.abs(w) + 2 * np.abs(w).max()).T
    assert (np.abs(product(x, packed) - exact) <= limit).all()


WAYS = ["float32", "bfloat16"] if FAST_BFLOAT16 else ["float32"]  # of a row that is multiplied by bfloat16


@pytest.mark.parametrize("n_in", [2, 4, 34, 576])
@pytest.mark.parametrize("way", WAYS)
def test_sums_in_order_by_fused_steps(way: str, n_in: int) -> None:
    """The rule of the micro-kernel to the bit: float64 holds the product of two float32 exactly, so a fused
    step is one addition in it, rounded (twice, which differs from once in one sum of 2^29). Of a pair of
    bfloat16 the second is added first.
    """
    x, w = random(1, n_in), bfloat16s(WIDTH, n_in)
    order = np.arange(n_in)
    rows: Any = x
    if way == "bfloat16":
        x = rounded_to_bfloat16(x)
        rows = bfloat16(x)
        order = order.reshape(-1, 2)[:, ::-1].ravel()
    sums = np.zeros(WIDTH, np.float32)
    for k in order:
        sums = (sums.astype(np.float64) + np.float64(x[0, k]) * w[:, k].astype(np.float64)).astype(np.float32)
    y = np.full((1, WIDTH), np.nan, np.float32)
    kernels.product(rows, pack_floats(w).words, y, NOTHING)
    assert np.array_equal(y[0], sums)


@pytest.mark.parametrize(("name", "n_out", "n_in"), [*FORMS, ("BF16", SMALL // 64, 64)])  # with all threads
def test_a_row_has_the_same_bits_in_any_batch(name: str, n_out: int, n_in: int) -> None:
    x, (w, _) = bfloat16s(max(ROWS), n_in), in_format(name, n_out, n_in)
    alone = np.concatenate([product(row[None], w) for row in x])
    for n_rows in ROWS:
        for first in {0, max(ROWS) - n_rows}:
            rows = slice(first, first + n_rows)
            assert np.array_equal(product(x[rows].copy(), w), alone[rows])


def test_threads_change_nothing() -> None:
    """Numba once moved memory that each row wrote to out of the loop that threads share."""
    config, _, packed = both(TINY)
    fast = FastOps(config, packed, 320, 10, 2)
    found = []
    for small in (sys.maxsize, 0):  # one thread computes all, or all do
        fast._small = small
        batch = Batch([Span(i, range(5 * i, 5 * i + 5), LONG_PROMPTS[-1], 0, 9) for i in range(2)])
        found.append((forward(fast, packed, batch), fast._kv.copy()))
    for mine, theirs in zip(*found, strict=True):
        assert np.array_equal(mine, theirs)


def test_a_processor_without_vnni_sums_the_same_bits() -> None:
    """The portable instructions compute the same integers, extreme ones too."""
    x = np.random.default_rng(0).integers(-(2**15), 2**15, (40, 32)).astype(np.int16)
    w = np.random.default_rng(1).integers(-128, 128, (40, 32)).astype(np.int16)
    x[0], w[0] = -(2**15), -128
    x[1], w[1] = 2**15 - 1, -128
    total = np.arange(-20, 20, dtype=np.int32)[:, None].repeat(16, 1)
    expected = total + (x.astype(np.int32) * w).reshape(40, 16, 2).sum(2)
    ways = [microkernel.portable_dot]
    if microkernel.HAS_VNNI:
        ways.append(microkernel.vnni_dot)
    for dot in ways:
        for row in range(40):
            assert np.array_equal(dot_of(dot)(x[row], w[row], total[row].copy()), expected[row])


@pytest.mark.skipif(not microkernel.HAS_VNNI, reason="the processor has no AVX512-VNNI")
@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_integers_are_multiplied_and_added_in_one_instruction(name: str) -> None:
    """LLVM takes two in place of its intrinsic, half as fast: llvm/llvm-project#84182."""
    packed, _ = in_format(name, WIDTH, 32)
    code = listing(
        kernels.add_rows, packed.inputs(8), packed.words[0], np.zeros((8, WIDTH), np.float32), False, 0
    )
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
    is_number = ~np.isnan(x)
    assert np.array_equal(stored[is_number], bfloat16(x[is_number]))
    assert np.isnan(unpacked(stored)[~is_number]).all()


@cache
def dot_of(dot: Any) -> Any:
    """A function of arrays that holds one dot product of 16 lanes."""

    @intrinsic
    def generator(typing: Any, x: Any, w: Any, total: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
            pairs = zip(signature.args, arguments, strict=True)
            pointers = [context.make_array(kind)(context, b, value).data for kind, value in pairs]
            places = [b.bitcast(pointer, microkernel.INTS.as_pointer()) for pointer in pointers]
            x, w, total = (b.load(place, align=2) for place in places)
            x = b.bitcast(x, microkernel.FLOATS)
            b.store(dot(b, x, b.bitcast(w, microkernel.SHORTS), total), places[2], align=2)
            return context.get_dummy_value()

        return types.void(x, w, total), generate

    add_dot: Any = generator  # Numba gives it the types; mypy sees the generator

    @njit
    def run(x: Any, w: Any, total: Any) -> Any:
        add_dot(x, w, total)
        return total

    return run


def test_what_threads_share_is_compiled_for_threads() -> None:
    """Numba's cache once gave the kernel of one thread for both, for it was made of the same function."""
    ops()
    for one, shared in SHARED.items():
        assert len({place(one), place(shared)}) == 2  # what the cache tells functions by
        for kernel, is_parallel in ((one, False), (shared, True)):
            assert all(bool(result.reload_init) is is_parallel for result in kernel.overloads.values())


def test_nothing_is_left_to_compile_for_the_first_request() -> None:
    config = read_config(TINY)
    kernels: list[Any] = [*KERNELS, *SHARED.values()]
    weights = read_weights(TINY, config, pack)
    FastOps(config, weights, PAGE, 1, 1)
    before = [list(kernel.overloads) for kernel in kernels]
    for prompts in ([[1] * 60], [[1] * 5] * 9):
        logits(FastOps, weights, prompts, 3, config)
    assert [list(kernel.overloads) for kernel in kernels] == before


def place(kernel: Any) -> tuple[str, int]:
    return kernel.py_func.__qualname__, kernel.py_func.__code__.co_firstlineno


# ---- Weights -----------------------------------------------------------------------------------------------


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
    """They stand for the same numbers as in the file; --weights int4 does not round 4 bits once more."""
    blocks = [quantized(random(64, 96), name), quantized(random(32, 96), name)]
    packed = pack(blocks)
    expected = np.concatenate([decoded(part) for part in blocks])
    assert packed.format[:2] == name[:2]
    assert np.array_equal(packed.take(np.arange(96)), expected)
    assert np.array_equal(pack(blocks, packed.format).words, packed.words)


# fmt: off
#  format   bytes, where scales of scales begin, their number, the format here, its largest error
BLOCKS_OF_256 = [
    ("Q4_K", 144, 0,   2, "Q4_1", 0.0005),
    ("Q5_K", 176, 0,   2, "Q5_1", 0.0005),
    ("Q6_K", 210, 208, 1, "Q8_0", 0.005),
]
# fmt: on


@pytest.mark.parametrize(("name", "n_bytes", "begin", "n", "kept", "limit"), BLOCKS_OF_256)
def test_blocks_of_256(name: str, n_bytes: int, begin: int, n: int, kept: str, limit: float) -> None:
    """Bug: a file in Q4_K_M took 22 s at every start, and grew by a third: it became Q8_0 by float32."""
    rng = np.random.default_rng(n_bytes)
    data = rng.integers(0, 256, (70, 3, n_bytes), np.uint8)  # every pattern of bits stands for a number
    scales = rng.uniform(1e-4, 2e-3, (70, 3, n)).astype(np.float16)
    data[:, :, begin : begin + 2 * n] = scales.view(np.uint8)
    blocks = Blocks(name, data)
    packed = pack([blocks])
    assert packed.format == kept
    expected = decoded(blocks)
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


# ---- Experts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_mxfp4", [True, False])
def test_what_no_row_has_chosen_is_not_read(is_mxfp4: bool) -> None:
    """It may be no number."""
    rng = np.random.default_rng(0)
    w: Any = bfloat16(rng.standard_normal((4, 40, 64)).astype(np.float32))
    if is_mxfp4:
        blocks = rng.integers(0, 256, (4, 40, 2, 16), np.uint8)
        w = Mxfp4(blocks, rng.integers(120, 130, (4, 40, 2), np.uint8))
    x = random(4, 64)
    expected = ops()._expert_linear(x, pack(w), None, np.array([2, 0, 2, 3]))
    if is_mxfp4:
        w.scales[1] = 255
    else:
        w[1] = 0x7FC0  # a NaN
    packed = pack(w)
    assert np.array_equal(ops()._expert_linear(x, packed, None, np.array([2, 0, 2, 3])), expected)
    found = ops()._expert_linear(x, packed, None, np.array([2, 1, 2, 3]))
    assert not np.isfinite(found[1]).any()
    assert np.array_equal(found[[0, 2, 3]], expected[[0, 2, 3]])


def test_every_number_of_mxfp4_times_one() -> None:
    """One of 512 inputs is 1: the product is that number itself, for 2^15 / 32767 is rounded away."""
    every = every_mxfp4()
    w = Mxfp4(every.blocks[:, 10:245], every.scales[:, 10:245])  # none is infinite, and no sum rounds
    numbers, [packed] = decoded_mxfp4(w)[0], pack(w)
    for i in range(0, 512, 7):
        found = product(np.eye(1, 512, i, dtype=np.float32), packed)[0]
        assert np.abs(found - numbers[:, i]).max() <= 2.0**-22 * np.abs(numbers[:, i]).max()


# ---- The forward pass --------------------------------------------------------------------------------------


def logits(kind: type[NumpyOps], weights: Weights, prompts: list[list[int]], n_new: int, c: Config) -> Array:
    """Of all prompts in a batch, then of n_new steps with the same token each. (n_new + 1, n, vocab_size)"""
    ops = kind(c, weights, PAGE, len(prompts), len(prompts))
    starts, found = [0] * len(prompts), list[Array]()
    for tokens in [prompts, *[[[7]] * len(prompts)] * n_new]:
        spans = [Span(i, [i], t, starts[i], 1) for i, t in enumerate(tokens)]
        found.append(forward(ops, weights, Batch(spans)))
        starts = [span.end for span in spans]
    return np.array(found)


def both(directory: Path) -> tuple[Config, Weights, Weights]:
    config = read_config(directory)
    return config, read_weights(directory, config), read_weights(directory, config, pack)


PROMPTS = [[5, 6, 7, 8, 9], [11], [*range(20, 59)]]


def same_ops(c: Config, wide: Weights, packed: Weights, prompts: list[list[int]]) -> None:
    """Each op of FastOps from the same inputs as the spec's: what one rounds is not multiplied by the next.

    Rounding to bfloat16 changes a number by up to 2^-9 of its size, and the scores of attention all.
    """
    spec, fast = (kind(c, w, 320, 20, 4) for kind, w in ((NumpyOps, wide), (FastOps, packed)))
    batch = Batch([Span(i, range(5 * i, 5 * i + 5), prompt, 0, 1) for i, prompt in enumerate(prompts)])
    x = spec.embed(batch, wide)
    assert np.array_equal(fast.embed(batch, packed), x)
    for i, (layer, packed_layer) in enumerate(zip(wide.layers, packed.layers, strict=True)):
        qkv = spec.qkv(x, layer, batch)
        assert_close(fast.qkv(x, packed_layer, batch), qkv)
        y = spec.attend(qkv.copy(), layer, i, batch)
        assert_close(fast.attend(qkv.copy(), packed_layer, i, batch), y)
        mine = x.copy()
        fast.out(mine, y, packed_layer, batch)
        spec.out(x, y, layer, batch)
        assert_close(mine, x)
        mine = x.copy()
        for ops, residual, some in ((fast, mine, packed_layer), (spec, x, layer)):
            if layer.router is not None:
                ops.experts(residual, some, batch)
            else:
                ops.down(residual, ops.gate_up(residual, some, batch), some, batch)
        assert_close(mine, x)
    assert_close(fast.logits(x, packed, batch), spec.logits(x, wide, batch))


def assert_close(found: Array, expected: Array) -> None:
    assert np.abs(found - expected).max() < 2.0**-5 * np.abs(expected).max()


LONG_PROMPTS = [*PROMPTS, [(7 * i * i + 1) % 90 for i in range(SPAN + 44)]]


@pytest.mark.parametrize("name", CASES)
def test_equals_numpy(name: str) -> None:
    """Families, biases, untied heads; files in bfloat16, and in float16 and float32, which stay as read."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), CASES[name])
        config, wide, packed = both(Path(folder))
    assert packed.embed.format == CASES[name].dtype
    same_ops(config, wide, packed, LONG_PROMPTS)


PAGES = [5, 0, 3, 2, 4]  # of one sequence
NOT_A_NUMBER = 0x7FC0  # in bfloat16
SOME = ["llama-3", "mistral-window", "qwen3-layer-types", "smollm3-window"]
SOME += [name for name, case in CASES.items() if "num_experts_per_tok" in case.changes]
TOKENS = [(11 * i * i + 3) % 90 for i in range(SPAN + 44)]


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


@pytest.mark.parametrize("name", SOME)
def test_a_row_has_the_same_bits_in_a_chunk_as_by_itself(name: str) -> None:
    """Over several pages, more keys than are attended to at once, windows, groups and norms of heads."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), CASES[name])
        config, _, packed = both(Path(folder))
    fast = FastOps(config, packed, 320, 6, 2)
    expected = steps(fast, packed, [1] * 300)
    for sizes in ([64] * 4 + [44], [300], [1, 63, 64, 21, 107, 44], [7, 33, 90, 170], [258, *[1] * 42]):
        assert np.array_equal(steps(fast, packed, sizes), expected)


# ---- Starting ----------------------------------------------------------------------------------------------


def listing(kernel: Any, *arguments: Any) -> str:
    """What the processor executes."""
    options = {key: kernel.targetoptions[key] for key in ("fastmath", "error_model")}
    fresh = njit(nogil=True, **options)(kernel.py_func)  # from the cache it would have no listing
    fresh(*arguments)
    [code] = fresh.inspect_asm().values()
    return str(code)


def test_kernels_are_compiled_anew_when_any_of_their_modules_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba looks at the module of a kernel alone: an update of microkernel.py ran what it had been."""
    folder = shutil.copytree(Path(kernels.__file__).parent, tmp_path / "devices")
    before = kernels.kernel_folder()
    monkeypatch.setattr(kernels, "__file__", str(folder / "cpu_kernels.py"))
    assert kernels.kernel_folder() == before
    with (folder / "microkernel.py").open("a") as file:
        file.write("# changed\n")
    assert kernels.kernel_folder() != before
