"""The micro-kernel: a tile of a matrix product in the registers of the processor, for each format of weights.

    x (n_rows, n_in), Panels' words (n_panels, n_blocks, ...) --add_product()--> y += x W^T

A compiler does not keep the sums of a tile in registers by itself, so this one loop is written in LLVM's own
language: ROWS x WIDTH sums, and for each block of inputs one load of the weights, which all rows share.
8 x 32 sums are 16 registers of AVX-512; the other half hold what is multiplied. On a Xeon of 2023 it does
0.88 of the multiplications that the processor can do, where a BLAS does 0.70.

Five formats, told apart by the dtype of the weights; a word is 32 bits that belong to one output:

    float32    a word is one input                    sum = fma(x, w, sum)
    int16      float16; half a word is one input      widened by the processor, which is exact, then the same
    uint16     bfloat16; a word is two inputs         each widened by a shift, which is exact, then the same
    uint8      int8 (GGUF's Q8_0); 4 inputs a word    32 inputs share a scale: an integer dot product of the
    uint32     int4 (GGUF's Q4_1); 8 inputs a word    32, exact, then sum = fma(dot, scale * scale of x, sum)

For the last two x comes as 16-bit integers with a scale for each 32 (quantize()); with 8 bits, as elsewhere,
rounding x costs more than rounding the weights. `vpdpwssd` multiplies 32 pairs of 16-bit numbers and adds
them to 16 sums, in one instruction (AVX512-VNNI). The sum is exact, so a processor without it gets the same
bits by other instructions (portable_dot).

`vpdpbf16ps` (AVX512-BF16) multiplies pairs of bfloat16 the same way and adds them to 16 float32 sums. It is
not used: it wants x rounded to 8 bits of mantissa as well, takes denormal numbers for 0, and on that Xeon
does half as many products a second as the float32 `vfmadd`, which loses nothing.

Authority: "BLIS: A Framework for Rapidly Instantiating BLAS Functionality" (Van Zee, van de Geijn 2015);
https://llvm.org/docs/LangRef.html; Intel's Intrinsics Guide, _mm512_dpwssd_epi32.

Rules of this file:
1. A sum runs over the inputs in their order for any number of rows: a row has the same bits in any tile.
2. y is added to, never overwritten: the caller begins with zeros, or with what is already there.

Not here: which threads compute what (cpu.py), how weights become panels (cpu.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS = 8  # of a tile; fewer are computed as 4, 2 and 1
LANES = 16  # numbers of 32 bits in a register of AVX-512; LLVM makes several smaller ones of it elsewhere
VECTORS = 2  # registers side by side
WIDTH = VECTORS * LANES  # outputs of a tile, and of a panel
BLOCK = 32  # inputs that share a scale, as in GGUF
X_HEADER = 3  # words of a block of x in front of its numbers: scale, offset, shift (quantize())
X_WORDS = X_HEADER + BLOCK // 2
X_MAX = 32767  # 16 bits. The largest sum, of 32 products with 255, is below 2^31
ZERO = 128  # what an int8 weight of 0 is stored as

unpack_tuple: Any = cgutils.unpack_tuple
get_or_insert_function: Any = cgutils.get_or_insert_function

FLOAT = ir.FloatType()
INT = ir.IntType(32)
LONG = ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT, LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)  # float16
SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)

Value = Any  # of LLVM
Sums = list[list[Value]]  # (rows, VECTORS)

HAS_VNNI = bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))

# --- what LLVM needs in more than one word ------------------------------------------------------------------


def repeated(number: int) -> Value:
    return ir.Constant(INTS, [number] * LANES)


def broadcast(b: Any, number: Value, vector: Any) -> Value:
    """The number in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = b.insert_element(undefined, number, ir.Constant(INT, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def load(b: Any, address: Value, n_bytes: int, of: Any) -> Value:
    """What lies n_bytes behind an address."""
    pointer = b.inttoptr(b.add(address, ir.Constant(LONG, n_bytes)), of.as_pointer())
    return b.load(pointer, align=2)


def call(b: Any, name: str, result: Any, *arguments: Value) -> Value:
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    function = get_or_insert_function(b.module, signature, name)
    return b.call(function, arguments)


def fma(b: Any, x: Value, w: Value, total: Value) -> Value:
    """x * w + total, rounded once."""
    return call(b, f"llvm.fma.v{LANES}f32", FLOATS, x, w, total)


# --- the formats --------------------------------------------------------------------------------------------
# One block of each: x has the address of the block in each row, w that of the weights. -> the new sums


def add_floats(b: Any, x: Sequence[Value], inputs: list[list[Value]], sums: Sums) -> Sums:
    """inputs (n_inputs, VECTORS): the weights of one input after another, as float32."""
    for k, ws in enumerate(inputs):
        for r, address in enumerate(x):
            number = broadcast(b, load(b, address, 4 * k, FLOAT), FLOATS)
            sums[r] = [fma(b, number, w, total) for w, total in zip(ws, sums[r], strict=True)]
    return sums


def words_of(b: Any, w: Value, n_bytes: int) -> list[Value]:
    """WIDTH words, one an output."""
    return [load(b, w, n_bytes + 4 * LANES * v, INTS) for v in range(VECTORS)]


def add_float32(b: Any, x: Sequence[Value], w: Value, sums: Sums) -> Sums:
    return add_floats(b, x, [[b.bitcast(word, FLOATS) for word in words_of(b, w, 0)]], sums)


def add_float16(b: Any, x: Sequence[Value], w: Value, sums: Sums) -> Sums:
    halves = [load(b, w, 2 * LANES * v, HALVES) for v in range(VECTORS)]
    return add_floats(b, x, [[b.fpext(half, FLOATS) for half in halves]], sums)


def add_bfloat16(b: Any, x: Sequence[Value], w: Value, sums: Sums) -> Sums:
    """A bfloat16 is the upper half of a float32: the first of a word is shifted up, the second is there."""
    words = words_of(b, w, 0)
    first = [b.bitcast(b.shl(word, repeated(16)), FLOATS) for word in words]
    second = [b.bitcast(b.and_(word, repeated(-(2**16))), FLOATS) for word in words]
    return add_floats(b, x, [first, second], sums)


def add_int8(b: Any, x: Sequence[Value], w: Value, sums: Sums) -> Sums:
    """WIDTH scales, then 8 words an output; a weight q is stored as q + ZERO, which x's offset takes off."""
    dots = [[broadcast(b, load(b, address, 4, INT), INTS)] * VECTORS for address in x]
    for i in range(BLOCK // 4):
        words = words_of(b, w, 2 * WIDTH + 4 * WIDTH * i)
        for pair, shift in ((2 * i, 0), (2 * i + 1, 8)):
            dots = add_pairs(b, x, pair, [parts(b, word, shift, 0x00FF00FF) for word in words], dots)
    return scaled(b, x, w, dots, sums)


def add_int4(b: Any, x: Sequence[Value], w: Value, sums: Sums) -> Sums:
    """WIDTH scales, WIDTH minima, then 4 words an output.

    Word i has inputs 4i to 4i + 3 in the lower halves of its bytes, 4i + 16 to 4i + 19 in the upper ones.
    """
    dots = [[repeated(0)] * VECTORS for _ in x]
    for i in range(BLOCK // 8):
        words = words_of(b, w, 4 * WIDTH + 4 * WIDTH * i)
        for pair, shift in ((2 * i, 0), (2 * i + 1, 8), (2 * i + 8, 4), (2 * i + 9, 12)):
            dots = add_pairs(b, x, pair, [parts(b, word, shift, 0x000F000F) for word in words], dots)
    for r, address in enumerate(x):
        shift_of_x = broadcast(b, load(b, address, 8, FLOAT), FLOATS)
        for v in range(VECTORS):
            minimum = b.fpext(load(b, w, 2 * WIDTH + 2 * LANES * v, HALVES), FLOATS)
            sums[r][v] = fma(b, shift_of_x, minimum, sums[r][v])
    return scaled(b, x, w, dots, sums)


def parts(b: Any, word: Value, shift: int, mask: int) -> Value:
    """The two numbers of each word that begin at bits shift and shift + 16, as pairs of 16 bits."""
    return b.and_(b.lshr(word, repeated(shift)), repeated(mask))


def add_pairs(b: Any, x: Sequence[Value], pair: int, ws: list[Value], dots: Sums) -> Sums:
    for r, address in enumerate(x):
        numbers = broadcast(b, load(b, address, 4 * (X_HEADER + pair), INT), INTS)
        dots[r] = [DOT(b, numbers, w, total) for w, total in zip(ws, dots[r], strict=True)]
    return dots


def scaled(b: Any, x: Sequence[Value], w: Value, dots: Sums, sums: Sums) -> Sums:
    for r, address in enumerate(x):
        scale_of_x = broadcast(b, load(b, address, 0, FLOAT), FLOATS)
        for v in range(VECTORS):
            scale = b.fmul(scale_of_x, b.fpext(load(b, w, 2 * LANES * v, HALVES), FLOATS))
            sums[r][v] = fma(b, b.sitofp(dots[r][v], FLOATS), scale, sums[r][v])
    return sums


def vnni_dot(b: Any, x: Value, w: Value, total: Value) -> Value:
    """total + x_0 w_0 + x_1 w_1 in each lane, for pairs of 16 bits with a sign."""
    return call(b, "llvm.x86.avx512.vpdpwssd.512", INTS, total, b.bitcast(x, SHORTS), b.bitcast(w, SHORTS))


def portable_dot(b: Any, x: Value, w: Value, total: Value) -> Value:
    """The same, by instructions that every processor has; w has no sign."""
    sixteen = repeated(16)
    first = b.mul(b.ashr(b.shl(x, sixteen), sixteen), b.and_(w, repeated(0xFFFF)))
    second = b.mul(b.ashr(x, sixteen), b.lshr(w, sixteen))
    return b.add(total, b.add(first, second))


DOT = vnni_dot if HAS_VNNI else portable_dot

Add = Callable[[Any, Sequence[Value], Value, Sums], Sums]

# fmt: off
#  dtype of the weights   block of it    bytes of a block of x
FORMATS: dict[Any, tuple[Add, int]] = {
    types.float32:        (add_float32,  4),
    types.int16:          (add_float16,  4),
    types.uint16:         (add_bfloat16, 8),
    types.uint8:          (add_int8,     4 * X_WORDS),
    types.uint32:         (add_int4,     4 * X_WORDS),
}
# fmt: on

# --- the loop -----------------------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def add_tile(typing: Any, n_rows: Any, x: Any, w: Any, y: Any) -> Any:
    """y += x @ w for n_rows, a literal. x (n_rows, ...), w (n_blocks, ...), y (n_rows, WIDTH) float32."""
    signature = types.void(n_rows, x, w, y)
    add, x_bytes = FORMATS[w.dtype]

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Value:
        arrays = [
            context.make_array(kind)(context, b, value)
            for kind, value in zip(signature.args[1:], arguments[1:], strict=True)
        ]
        addresses = [b.ptrtoint(array.data, LONG) for array in arrays]
        strides = [unpack_tuple(b, array.strides)[0] for array in arrays]  # bytes
        n_blocks = unpack_tuple(b, arrays[1].shape)[0]

        def rows_of(i: int) -> list[Value]:
            return [
                b.add(addresses[i], b.mul(strides[i], ir.Constant(LONG, r)))
                for r in range(n_rows.literal_value)
            ]

        x_rows = rows_of(0)
        y_rows = [b.inttoptr(address, FLOATS.as_pointer()) for address in rows_of(2)]
        places = [[b.gep(row, [ir.Constant(LONG, v)]) for v in range(VECTORS)] for row in y_rows]
        before = [[b.load(place, align=4) for place in row] for row in places]

        # for k in range(n_blocks): sums = add(sums). A phi is a variable of a loop: it has one value when the
        # loop is entered, another when it comes round.
        entry, loop, end = b.block, b.append_basic_block("loop"), b.append_basic_block("end")
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(LONG)
        sums = [[b.phi(FLOATS) for _ in row] for row in before]
        x_blocks = [b.add(row, b.mul(k, ir.Constant(LONG, x_bytes))) for row in x_rows]
        w_block = b.add(addresses[1], b.mul(k, strides[1]))
        after = add(b, x_blocks, w_block, [list(row) for row in sums])
        following = b.add(k, ir.Constant(LONG, 1))
        k.add_incoming(ir.Constant(LONG, 0), entry)
        k.add_incoming(following, loop)
        for r, row in enumerate(sums):
            for v, total in enumerate(row):
                total.add_incoming(before[r][v], entry)
                total.add_incoming(after[r][v], loop)
        b.cbranch(b.icmp_signed("<", following, n_blocks), loop, end)
        b.position_at_end(end)
        for r, row in enumerate(places):
            for v, place in enumerate(row):
                b.store(after[r][v], place, align=4)
        return context.get_dummy_value()

    return signature, generate
