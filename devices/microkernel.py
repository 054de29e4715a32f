"""The micro-kernel: a tile of a matrix product in the registers of the processor, for each format of weights.

    x (n_rows, ...), a panel of W (n_blocks, ...) --add_rows()--> y (n_rows, WIDTH) = x W^T + y or 0

A compiler does not keep the sums of a tile in registers by itself, so this one loop is written in LLVM's own
language: up to 8 x WIDTH sums, and for each block of inputs one load of the weights, which all rows share.
8 x 32 sums are 16 registers of AVX-512; the other half hold the factors. AVX2 has half as many, of half the
size, for 4 x 16 sums.

Each format, the form of x that it needs (cpu.py rounds x), and the sum:

    format      weights of a block     x                   sum of an output
    F32         1 input                float32             sum = fma(x, w, sum)
    F16         1 input                float32             the same; widening a float16 is exact
    BF16        2 inputs               float32             the same; widening a bfloat16 is a shift, and exact
    BF16        2 inputs               bfloat16            sum = fma(x0, w0, fma(x1, w1, sum))
    Q8_0        32 of 8 bits           16 bits, a scale    their integer dot product, which is exact, then
    Q5_1        32 of 5 bits           for each 32         sum = fma(dot, scale * scale of x, sum), before it
    Q4_1        32 of 4 bits                               sum = fma(sum of x, minimum, sum) if there is one
    MXFP4       32 of 4 bits

Two instructions do twice the products of `vfmadd`, if a processor has them. `vpdpwssd` (AVX512-VNNI)
multiplies 32 pairs of 16-bit integers and adds them to 16 sums; x has 16 bits rather than the usual 8,
because rounding x to 8 bits costs more than rounding the weights. A processor without it gets the same bits
by `vpmaddwd` (AVX2) and an addition, or by what all processors have (portable_dot). `vdpbf16ps` (AVX512-BF16)
multiplies pairs of bfloat16 and adds them to 16 float32 sums. AMD's processors from Zen 4 on run it at full
speed; a Xeon of 2023 does half as many products with it as with `vfmadd`. So x is rounded to bfloat16 on the
former only (FAST_BFLOAT16); rows have other bits there than on the latter.

Authority: "BLIS: A Framework for Rapidly Instantiating BLAS Functionality" (Van Zee, van de Geijn 2015);
https://llvm.org/docs/LangRef.html; Intel's Intrinsics Guide, _mm512_dpwssd_epi32 and _mm512_dpbf16_ps; for
the blocks checkpoint/gguf_blocks.py; for MXFP4 https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.

Rules of this file:
1. A sum runs over the inputs in their order for any number of rows: a row has the same bits in any tile.
2. A sum begins with zero or with the value in y: the caller chooses.

Not here: which threads compute what, how weights become panels, how x is rounded (cpu.py).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

llvmlite.binding.initialize_native_asmparser()  # for the instructions that are written as such
codegen = cpu_target.target_context.codegen()
_, PROCESSOR, target_features = codegen.magic_tuple()  # $NUMBA_CPU_NAME and $NUMBA_CPU_FEATURES change them
FEATURES = set(target_features.split(","))
HAS_AVX512 = "+avx512bw" in FEATURES  # with products of 16-bit integers
HAS_VNNI = "+avx512vnni" in FEATURES
FAST_BFLOAT16 = "+avx512bf16" in FEATURES and PROCESSOR.startswith("znver")

# Rows of a tile: as many of the largest as fit, then of the next. With AVX2 6 are no faster, and 8 = 6 + 2.
TILES = (8, 4, 3, 2, 1) if HAS_AVX512 else (4, 3, 2, 1)
# Numbers of 32 bits in a register, and one more register, for what an instruction needs by the way
LANES, SCRATCH = (16, "zmm15") if HAS_AVX512 else (8, "ymm15")
WIDTH = 2 * LANES  # outputs of a tile, and of a panel: two registers side by side
CACHE_LINE = 64  # bytes
AHEAD = 4096  # bytes: how far ahead of the loads a panel is prefetched
BLOCK = 32  # inputs that share a scale, as in GGUF
PAIRS = BLOCK // 2
X_HEADER = 2  # words of a block of x before its numbers: their scale, and the scale times their sum
X_WORDS = X_HEADER + PAIRS  # of 32 bits

FLOAT, BYTE, SHORT, INT, LONG = ir.FloatType(), *map(ir.IntType, (8, 16, 32, 64))
# Of WIDTH outputs: LLVM takes as many registers as they need. INTS(4) is a constant: 4 in each lane.
FLOATS = ir.VectorType(FLOAT, WIDTH)
INTS = ir.VectorType(INT, WIDTH)
HALVES = ir.VectorType(ir.HalfType(), WIDTH)  # float16
SIXTEENS = ir.VectorType(SHORT, WIDTH)
SCALES = ir.VectorType(BYTE, WIDTH)  # of one byte each
SHORTS = ir.VectorType(SHORT, 2 * WIDTH)  # two an output
BYTES = ir.VectorType(BYTE, 2 * WIDTH)

Value = Any  # of LLVM

X_DTYPE: Any = np.uint16 if FAST_BFLOAT16 else np.float32  # of x, if the weights are bfloat16

# --- what LLVM needs in more than one word ------------------------------------------------------------------


def moved(b, address, n_bytes):
    return b.add(address, LONG(n_bytes))


def load(b, address, n_bytes, of):
    """What lies n_bytes after an address."""
    return b.load(b.inttoptr(moved(b, address, n_bytes), of.as_pointer()), align=1)


def load_float(b, address, n_bytes):
    """The float32 that lies n_bytes after an address, in every lane."""
    undefined = FLOATS(ir.Undefined)
    first = b.insert_element(undefined, load(b, address, n_bytes, FLOAT), INT(0))
    return b.shuffle_vector(first, undefined, INTS(0))


def call(b, name, result, *arguments):
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), arguments)


def prefetch(b, address, n_bytes):
    """Ask memory for n_bytes that will be read soon, into all levels of the cache.

    A processor looks ahead by itself, but not beyond a page of 4 KB, and begins anew in the next one.
    """
    how = [INT(number) for number in (0, 2, 1)]  # to read; into all levels; data
    for offset in range(0, n_bytes, CACHE_LINE):
        place = b.inttoptr(moved(b, address, offset), BYTE.as_pointer())
        call(b, "llvm.prefetch.p0", ir.VoidType(), place, *how)


# --- products -----------------------------------------------------------------------------------------------
# (x, w, total) -> total + x w in each lane, for what a lane of 32 bits holds of x and w.


def fma(b, x, w, total):
    """One float32 each, rounded once."""
    return call(b, f"llvm.fma.v{WIDTH}f32", FLOATS, x, w, total)


def instruction(lines, changes=""):
    """A product written as instructions: x is $1, w is $2, and the total $0.

    LLVM makes two of its intrinsic for vpdpwssd (llvm/llvm-project#84182). It adds up products of vpmaddwd
    of many inputs at once, and has no registers for them.
    """
    register = ir.VectorType(INT, LANES)
    signature = ir.FunctionType(register, [register] * 3)

    def dot(b, *operands):
        found = []
        for first in (0, LANES):
            lanes = register([*range(first, first + LANES)])
            some = [b.bitcast(operand, INTS) for operand in operands]
            parts = [b.shuffle_vector(operand, operand, lanes) for operand in some]
            found.append(b.asm(signature, lines, f"=v,v,v,0{changes}", parts, False))
        return b.bitcast(b.shuffle_vector(*found, INTS([*range(WIDTH)])), operands[-1].type)

    return dot


# A pair of bfloat16 each: the second is added first, and each step rounded.
bfloat16_dot = instruction("vdpbf16ps $2, $1, $0")
# A pair of 16-bit integers each, w SHORTS, total INTS; and the same with AVX2
vnni_dot = instruction("vpdpwssd $2, $1, $0")
two_step_dot = instruction(f"vpmaddwd $2, $1, %{SCRATCH}; vpaddd %{SCRATCH}, $0, $0", f",~{{{SCRATCH}}}")


def portable_dot(b, x, w, total):
    """The same, by instructions that every processor has."""
    pairs = b.bitcast(x, INTS), b.bitcast(w, INTS)
    for n_bits in (16, 0):  # which push the first of a pair, then the second, to the upper half
        numbers = [b.ashr(b.shl(pair, INTS(n_bits)), INTS(16)) for pair in pairs]
        total = b.add(total, b.mul(*numbers))
    return total


DOT = vnni_dot if HAS_VNNI else two_step_dot if "+avx2" in FEATURES else portable_dot

# --- the formats --------------------------------------------------------------------------------------------
# How a block of weights is read, as vectors with one value an output.

Inputs = Iterable[tuple[int, Value]]  # which word of x it is multiplied by; read when it is its turn
STAGE_BITS = 4  # by which the integer sums are moved down between two stages


class Block(NamedTuple):
    inputs: Sequence[Inputs]  # in stages. FLOATS, one input each; or INTS and SHORTS, two inputs each
    scales: Value = None  # FLOATS; none if the weights are floats
    minima: Value = None  # the same


def load_halves(b, w, n_bytes):
    """WIDTH numbers in float16, which float32 holds exactly."""
    return b.fpext(load(b, w, n_bytes, HALVES), FLOATS)


def read_words(b, w):
    """A float32, or a pair of bfloat16 that is multiplied by a pair."""
    return Block([[(0, load(b, w, 0, FLOATS))]])


def read_float16(b, w):
    return Block([[(0, load_halves(b, w, 0))]])


def read_bfloat16(b, w):
    """A pair, for x in float32: a bfloat16 is the upper half of a float32."""
    pairs = load(b, w, 0, INTS)
    numbers = b.shl(pairs, INTS(16)), b.and_(pairs, INTS(-(2**16)))
    return Block([[(i, b.bitcast(number, FLOATS)) for i, number in enumerate(numbers)]])


def read_int8(b, w):
    """WIDTH scales; then two bytes an output for each pair of inputs."""
    pairs = ((i, b.sext(load(b, w, 2 * WIDTH * (1 + i), BYTES), SHORTS)) for i in range(PAIRS))
    return Block([pairs], load_halves(b, w, 0))


# The pairs of inputs in four bytes of an output: (number of the first such pair, how far its bits are moved
# down, the power of 2 that they are multiplied by then). To mask bits where they stand is one instruction, to
# move them down is another; in stages the sums of a block are moved down instead.
IN_STAGES = [[(1, 0, 8)], [(8, 0, 4)], [(0, 0, 0), (9, 12, 0)]]
AT_ONCE = [[(1, 8, 0), (8, 4, 0), (0, 0, 0), (9, 12, 0)]]


def nibbles(b, w, n_bytes, stages, made):
    """Each 16 bits of an output hold the first numbers of four pairs, or their second ones.

    `made` takes a pair, the power of 2, and bits; it returns the numbers.
    """

    def stage(places):
        for i in range(PAIRS // 4):
            bits = load(b, w, n_bytes + 4 * WIDTH * i, SHORTS)
            for first, down, power in places:
                pair = first + 2 * i
                some = b.and_(b.lshr(bits, SHORTS(down)), SHORTS(15 << power))
                yield pair, made(pair, power, some)

    return [stage(places) for places in stages]


def read_int4(b, w):
    """WIDTH scales, WIDTH minima; then the numbers."""
    numbers = nibbles(b, w, 4 * WIDTH, IN_STAGES, lambda pair, power, some: some)
    return Block(numbers, load_halves(b, w, 0), load_halves(b, w, 2 * WIDTH))


def read_int5(b, w):
    """WIDTH scales, WIDTH minima; the fifth bits of 16 inputs an output, twice; then the other bits."""
    fifths = []
    for half in range(2):
        bits = b.zext(load(b, w, 2 * WIDTH * (2 + half), SIXTEENS), INTS)
        # Move the bit of an odd input into the upper half of a lane; the even input's is in the lower half.
        fifths.append(b.bitcast(b.or_(bits, b.shl(bits, INTS(15))), SHORTS))

    def with_fifth(pair, power, numbers):
        half, place = divmod(pair, PAIRS // 2)
        bit = b.and_(b.lshr(fifths[half], SHORTS(2 * place)), SHORTS(1))
        return b.or_(numbers, b.shl(bit, SHORTS(4 + power)))

    numbers = nibbles(b, w, 8 * WIDTH, IN_STAGES, with_fifth)
    return Block(numbers, load_halves(b, w, 0), load_halves(b, w, 2 * WIDTH))


LEAST_EXPONENT = 0x00400000  # the bits of 2^-127, the meaning of an exponent of 0


def read_mxfp4(b, w):
    """WIDTH exponents of 2, plus 127, of a byte each; then the numbers. 255 is an infinite scale."""

    def twice_e2m1(pair, power, codes):
        """Return the codes' numbers, times 2: 0, 1, 2, 3, 4, 6, 8, 12, then the same, negative.

        Not a table: without AVX-512 LLVM reads one number after another, and compiles for a minute.
        """
        size = b.and_(codes, SHORTS(7))
        saturated = f"llvm.usub.sat.v{SHORTS.count}i16"
        above_4, above_6 = (call(b, saturated, SHORTS, size, SHORTS(n)) for n in (4, 6))
        number = b.add(b.add(size, above_4), b.shl(above_6, SHORTS(1)))
        return b.select(b.icmp_unsigned(">", codes, SHORTS(7)), b.neg(number), number)

    bits = b.shl(b.zext(load(b, w, 0, SCALES), INTS), INTS(23))
    bits = call(b, f"llvm.umax.v{WIDTH}i32", INTS, bits, INTS(LEAST_EXPONENT))
    scales = b.fmul(b.bitcast(bits, FLOATS), FLOATS(0.5))
    return Block(nibbles(b, w, WIDTH, AT_ONCE, twice_e2m1), scales)


class Format(NamedTuple):
    read: Callable[..., Block]  # from the address of a block
    dot: Callable[..., Value]  # one of the products above
    n_bytes: int  # of a block that are prefetched; 0: none, because most such blocks are in a cache already
    x_words: int  # of 32 bits, that a row of x has for the block


# fmt: off
#  (format, dtype of x)       read           dot            bytes of all outputs, words of x
FORMATS = {
    ("F32", types.float32):   Format(read_words,     fma,          0,          1),
    ("F16", types.float32):   Format(read_float16,   fma,          WIDTH * 2,  1),
    ("BF16", types.float32):  Format(read_bfloat16,  fma,          WIDTH * 4,  2),
    ("BF16", types.uint16):   Format(read_words,     bfloat16_dot, WIDTH * 4,  1),
    ("Q8_0", types.int16):    Format(read_int8,      DOT,          WIDTH * 34, X_WORDS),
    ("Q4_1", types.int16):    Format(read_int4,      DOT,          WIDTH * 20, X_WORDS),
    ("Q5_1", types.int16):    Format(read_int5,      DOT,          WIDTH * 24, X_WORDS),
    ("MXFP4", types.int16):   Format(read_mxfp4,     DOT,          WIDTH * 17, X_WORDS),
}
# fmt: on

# --- a block of the product ---------------------------------------------------------------------------------
# `x` are the addresses of the block in each row, `sums` what each row has so far; they return the new sums.


def add_products(b, x, inputs, dot, sums):
    for i, w in inputs:
        sums = [dot(b, load_float(b, row, 4 * i), w, total) for row, total in zip(x, sums, strict=True)]
    return sums


def add_block(b, x, w, dot, sums):
    if w.scales is None:
        [inputs] = w.inputs
        return add_products(b, x, inputs, dot, sums)
    dots = [INTS(0)] * len(x)
    numbers = [moved(b, row, 4 * X_HEADER) for row in x]
    for inputs in w.inputs:
        dots = [b.ashr(total, INTS(STAGE_BITS)) for total in dots]
        dots = add_products(b, numbers, inputs, dot, dots)
    found = []
    for row, total, integers in zip(x, sums, dots, strict=True):
        if w.minima is not None:
            total = fma(b, load_float(b, row, 4), w.minima, total)
        scale = b.fmul(load_float(b, row, 0), w.scales)
        found.append(fma(b, b.sitofp(integers, FLOATS), scale, total))
    return found


# --- the tile -----------------------------------------------------------------------------------------------


def rows_of(context, b, kind, value):
    """How many rows an array has, and the address of a row by its number."""
    array = context.make_array(kind)(context, b, value)
    address = b.ptrtoint(array.data, LONG)
    stride = cgutils.unpack_tuple(b, array.strides)[0]
    n_rows = cgutils.unpack_tuple(b, array.shape)[0]
    return n_rows, lambda r: b.add(address, b.mul(stride, r))


@intrinsic
def add_rows(typing, x, w, y, adds, ahead):
    """y = x @ w, and if `adds` plus y, for any number of rows. The weights that lie `ahead` bytes after those
    that are read are asked of memory. x (n_rows, ...), w (n_blocks, ...), y (n_rows, WIDTH) float32.
    """
    signature = types.void(x, w, y, types.boolean, types.int64)
    # w is bfloat16, or has records of one field, with the name of the format
    [name] = ["BF16"] if w.dtype == types.uint16 else w.dtype.fields
    form = FORMATS[name, x.dtype]

    def generate(context, b, signature, arguments):
        # Sums without a register lie on the stack. LLVM aligns it for a vector that code refers to; else a
        # sum lay in two cache lines, or did not, by chance: up to a third of the time.
        vector = cgutils.alloca_once(b, FLOATS)
        b.asm(ir.FunctionType(ir.VoidType(), [vector.type]), "", "r", [vector], True)
        arrays = zip(signature.args[:3], arguments[:3], strict=True)
        (_, x_row), (n_blocks, w_row), (n_rows, y_row) = (rows_of(context, b, *array) for array in arrays)
        adds, ahead = arguments[3:]
        done = LONG(0)
        for n in TILES:
            size = LONG(n)
            n_tiles = b.udiv(b.sub(n_rows, done), size)
            with cgutils.for_range(b, n_tiles, intp=LONG) as tiles:
                first = b.add(done, b.mul(tiles.index, size))
                rows = [moved(b, first, r) for r in range(n)]
                x_rows = [x_row(r) for r in rows]
                places = [b.inttoptr(y_row(r), FLOATS.as_pointer()) for r in rows]
                before = [b.select(adds, b.load(place, align=4), FLOATS(0)) for place in places]
                variables = [cgutils.alloca_once_value(b, value) for value in before]
                with cgutils.for_range(b, n_blocks, intp=LONG) as loop:
                    w_block = w_row(loop.index)
                    prefetch(b, b.add(w_block, ahead), form.n_bytes)
                    x_block = b.mul(loop.index, LONG(4 * form.x_words))
                    x_blocks = [b.add(row, x_block) for row in x_rows]
                    so_far = [b.load(variable) for variable in variables]
                    sums = add_block(b, x_blocks, form.read(b, w_block), form.dot, so_far)
                    for value, variable in zip(sums, variables, strict=True):
                        b.store(value, variable)
                for variable, place in zip(variables, places, strict=True):
                    b.store(b.load(variable), place, align=4)
            done = b.add(done, b.mul(n_tiles, size))
        return context.get_dummy_value()

    return signature, generate
