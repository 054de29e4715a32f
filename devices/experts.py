"""Mixtures of experts on a processor: each matrix that some row has chosen is read once, and no other.

    rows of x, one for each expert that a token chose; which expert --expert_products()--> rows of y

A token reads the matrices of its experts alone, so a mixture decodes as fast as a model of their size.
Weights lie as in the checkpoint, an output behind another: bfloat16, float32 where that cannot hold them, or
MXFP4, whose 4 bits become float32 in a register, by a look-up in a table of 16 numbers.

Authority: model.NumpyOps.experts; for MXFP4 checkpoint/weights.py; the LLVM language reference
(https://llvm.org/docs/LangRef.html) for what `mxfp4_product` is made of.

Rules of this file:
1. A number of y is one product of a row of weights and a row of x, whose order of adding follows from its
   length alone: a row has the same bits alone, in any batch and in a prefill chunk.
2. A task is some rows of weights and all rows of x that chose their expert: what is read is used while it is
   in the cache.

Not here: which experts are chosen, and the sum of theirs (model.py); dense matrices, attention (cpu.py).
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from checkpoint.blocks import Blocks
from checkpoint.config import Config
from checkpoint.weights import E2M1, Matrix, Mxfp4, Weights, bfloat16
from devices import cpu
from devices.cpu import LIBERTIES, FastOps, exact_format, kernel, shared
from model import Array, Ints

ROWS = 64  # of a matrix, that a task multiplies
LANES = 16  # bytes of a block of MXFP4, and sums of a vector

FACTORS = np.ldexp(np.ones(255), np.arange(255) - 127).astype(np.float32)  # by scale
FACTORS = np.append(FACTORS, np.float32(np.nan))  # 255 means no number

FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
BYTES = ir.VectorType(ir.IntType(8), LANES)


def look_up(build: Any, indices: Any) -> Any:
    """E2M1[indices] for a vector; LLVM makes it one instruction where the processor has one (AVX-512)."""
    table = ir.Constant(FLOATS, [ir.Constant(FLOAT, float(number)) for number in E2M1])
    numbers = ir.Constant(FLOATS, ir.Undefined)
    for lane in range(LANES):
        index = build.extract_element(indices, ir.Constant(INT, lane))
        number = build.extract_element(table, index)
        numbers = build.insert_element(numbers, number, ir.Constant(INT, lane))
    return numbers


def half(build: Any, vector: Any, first: int, n: int) -> Any:
    mask = ir.Constant(ir.VectorType(INT, n), list(range(first, first + n)))
    return build.shuffle_vector(vector, vector, mask)


@intrinsic
def mxfp4_product(typing_context: Any, blocks: Any, scales: Any, factors: Any, x: Any, n: Any) -> Any:
    """The product of n blocks with x, whose even numbers of a block come before its odd ones.

    All but n are addresses. Lane i of a vector has bytes i of all blocks:

        sum += factors[scales[b]] * (E2M1[low half of blocks[b]] * x[b, :16] + E2M1[high half] * x[b, 16:])
    """
    signature = types.float32(types.uintp, types.uintp, types.uintp, types.uintp, types.intp)

    def generate(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        fma_type = ir.FunctionType(FLOATS, [FLOATS] * 3)
        fma = build.module.declare_intrinsic("llvm.fma.v16f32", (), fma_type)
        n = arguments[-1]
        byte = ir.IntType(8).as_pointer()
        blocks, scales = (build.inttoptr(address, byte) for address in arguments[:2])
        factors, x = (build.inttoptr(address, FLOAT.as_pointer()) for address in arguments[2:4])

        def load(pointer: Any, vector: Any, offset: Any) -> Any:
            address = build.gep(pointer, [offset])
            return build.load(build.bitcast(address, vector.as_pointer()), align=1)

        before = build.block
        loop = build.append_basic_block("blocks")
        after = build.append_basic_block("blocks.end")
        build.branch(loop)
        build.position_at_end(loop)
        b = build.phi(LONG)
        total = build.phi(FLOATS)
        b.add_incoming(ir.Constant(LONG, 0), before)
        total.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)

        pairs = build.zext(load(blocks, BYTES, build.mul(b, ir.Constant(LONG, LANES))), INTS)
        low = look_up(build, build.and_(pairs, ir.Constant(INTS, [15] * LANES)))
        high = look_up(build, build.lshr(pairs, ir.Constant(INTS, [4] * LANES)))
        even_at = build.mul(b, ir.Constant(LONG, 2 * LANES))
        odd_at = build.add(even_at, ir.Constant(LONG, LANES))
        products = build.fmul(low, load(x, FLOATS, even_at))
        products = build.call(fma, [high, load(x, FLOATS, odd_at), products])
        scale = build.zext(build.load(build.gep(scales, [b])), LONG)
        factor = build.load(build.gep(factors, [scale]))
        undefined = ir.Constant(FLOATS, ir.Undefined)
        factor = build.insert_element(undefined, factor, ir.Constant(INT, 0))
        factor = build.shuffle_vector(factor, undefined, ir.Constant(INTS, [0] * LANES))
        total_now = build.call(fma, [products, factor, total])
        next_b = build.add(b, ir.Constant(LONG, 1))
        b.add_incoming(next_b, loop)
        total.add_incoming(total_now, loop)
        build.cbranch(build.icmp_signed("<", next_b, n), loop, after)

        build.position_at_end(after)
        lanes = total_now
        n_lanes = LANES
        while n_lanes > 1:
            n_lanes //= 2
            lanes = build.fadd(half(build, lanes, 0, n_lanes), half(build, lanes, n_lanes, n_lanes))
        return build.extract_element(lanes, ir.Constant(INT, 0))

    return signature, generate


def widened(number: Any) -> Any:
    """A weight as float32: as one of the two functions below, by its type."""


@overload(widened)
def _widened(number: Any) -> Any:
    def of_float32(number: Any) -> Any:
        return number

    def of_bfloat16(number: Any) -> Any:
        return np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)

    return of_float32 if isinstance(number, types.Float) else of_bfloat16


@kernel(liberties=LIBERTIES | {"reassoc"})
def float_product(w: Any, x: Any) -> Any:
    """The product of two rows, w in bfloat16 or float32."""
    total = np.float32(0)
    for k in range(len(x)):
        total += x[k] * widened(w[k])
    return total


def row_product(w: Any, e: int, r: int, x: Any) -> Any:
    """Row r of expert e times x: as one of the two functions below, by the type of w."""


@overload(row_product)
def _row_product(w: Any, e: Any, r: Any, x: Any) -> Any:
    if isinstance(w, types.BaseTuple):

        def of_mxfp4(w: Any, e: Any, r: Any, x: Any) -> Any:
            blocks, scales, factors = w
            addresses = blocks[e, r].ctypes.data, scales[e, r].ctypes.data, factors.ctypes.data
            return mxfp4_product(*addresses, x.ctypes.data, scales.shape[2])  # type: ignore[call-arg]

        return of_mxfp4

    def of_floats(w: Any, e: Any, r: Any, x: Any) -> Any:
        return float_product(w[e, r], x)

    return of_floats


@kernel
def rows_of_expert(w: Any, e: int, pairs: Any, first: int, x: Any, y: Any) -> None:
    """Multiply ROWS rows of an expert by those rows of x that chose it."""
    for r in range(first, min(first + ROWS, y.shape[1])):
        for pair in pairs:
            y[pair, r] = row_product(w, e, r, x[pair])


@kernel
def products(w: Any, experts: Any, ends: Any, pairs: Any, x: Any, y: Any) -> None:
    """y[pair] = x[pair] w[e]^T; the pairs of experts[i] are pairs[ends[i] : ends[i + 1]]."""
    n_tasks = -(-y.shape[1] // ROWS)  # of an expert
    for task in prange(len(experts) * n_tasks):
        i = task // n_tasks
        rows_of_expert(w, experts[i], pairs[ends[i] : ends[i + 1]], task % n_tasks * ROWS, x, y)


shared_products = shared(products)


def expert_products(x: Array, w: Mxfp4 | NDArray[Any], chosen: Ints, n_threads: int) -> Array:
    """The row of each pair times the matrix of its expert.

    x (n_pairs, n_in), chosen (n_pairs,), w (n_experts, n_out, n_in) -> (n_pairs, n_out)
    """
    pairs = np.argsort(chosen, kind="stable")
    experts, begins = np.unique(chosen[pairs], return_index=True)
    ends = np.append(begins, len(pairs))
    if isinstance(w, Mxfp4):
        y = np.empty((len(x), w.blocks.shape[1]), np.float32)
        x = np.ascontiguousarray(x.reshape(len(x), -1, LANES, 2).swapaxes(2, 3)).reshape(len(x), -1)
        matrices: Any = (w.blocks, w.scales, FACTORS)
    else:
        y = np.empty((len(x), w.shape[1]), np.float32)
        matrices = w
    if n_threads == 1:
        products(matrices, experts, ends, pairs, x, y)
    else:
        numba.set_num_threads(n_threads)  # it holds for the calling thread, whichever that is
        shared_products(matrices, experts, ends, pairs, x, y)
    return y


# --- the ops ------------------------------------------------------------------------------------------------


def pack(w: NDArray[Any] | list[Blocks] | Mxfp4) -> Matrix:
    """Return a matrix as FastOps has it; those of experts in bfloat16, where it can hold them."""
    if isinstance(w, Mxfp4):
        return w
    if isinstance(w, list) or w.ndim == 2:
        return cpu.pack(w)
    if exact_format(w) == "BF16":
        return bfloat16(w)
    return w


class ExpertOps(FastOps):
    """FastOps, with kernels for mixtures of experts."""

    pack = staticmethod(pack)  # type: ignore[assignment]  # it takes no name of a format

    def __init__(
        self, config: Config, weights: Weights, max_seq_len: int, n_pages: int, max_batch: int
    ) -> None:
        super().__init__(config, weights, max_seq_len, n_pages, max_batch)
        if config.experts:
            layer = weights.layers[config.experts.layers.index(True)]
            x = np.zeros((1, config.dim), np.float32)
            self._expert_linear(x, layer.w_gate_up, None, np.zeros(1, np.int64))  # compiles the kernel
            mixtures = [layer for layer in weights.layers if layer.router is not None]
            n_bytes = sum(layer.w_gate_up.nbytes + layer.w_down.nbytes for layer in mixtures)
            self.about += f"; {n_bytes / 1e6:.0f} MB of experts"

    def _expert_linear(self, x: Array, w: Matrix, b: Array | None, experts: Ints) -> Array:
        y = expert_products(x, w, experts, self._n_threads)
        if b is not None:
            y += b[experts]
        return y
