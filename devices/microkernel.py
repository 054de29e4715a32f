"""The micro-kernel: a tile of a matrix product in the registers of the processor, for each format of weights.

    x (n_rows, n_in), Panels' words (n_panels, n_blocks, ...) --add_product()--> y += x W^T

A compiler does not keep the sums of a tile in registers by itself, so this one loop is written in LLVM's own
language: ROWS x WIDTH sums, and for each block of inputs one load of the weights, which all rows share.
8 x 32 sums are 16 registers of AVX-512; the other half hold what is multiplied. From the cache a Xeon of
2023 does 0.99 of the float32 multiplications that it can do, and 0.8 of those of 16 bits.

Five formats, told apart by the dtype of the weights; a block is what lies together for each output:

    float32    one input                              sum = fma(x, w, sum)
    int16      float16; one input                     widened by the processor, which is exact, then the same
    uint16     bfloat16; two inputs                   each widened by a shift, which is exact, then the same
    uint8      int8 (GGUF's Q8_0); 32 inputs          their integer dot product, exact, then
    uint32     int4 (GGUF's Q4_1); 32 inputs          sum = fma(dot, scale * scale of x, sum)

For the last two x comes as 16-bit integers with a scale for each 32 (round_block()); with 8 bits, as
elsewhere, rounding x costs more than rounding the weights. `vpdpwssd` multiplies 32 pairs of 16-bit numbers
and adds them to 16 sums, in one instruction (AVX512-VNNI), at twice the products of the float32 `vfmadd`. The
sum is exact, so a processor without it gets the same bits by other instructions (portable_dot).

Where there are many rows, widen() first writes a panel as the registers shall have it, float32 or 16 bits,
with the scales in float32; int32 and int64 are the dtypes of what it makes of int8 and int4. The numbers are
the same, so are the sums.

`vpdpbf16ps` (AVX512-BF16) multiplies pairs of bfloat16 and adds them to 16 float32 sums. It is not used: it
wants x rounded to 8 bits of mantissa as well, takes denormal numbers for 0, and on that Xeon does half as
many products a second as `vfmadd`, which loses nothing. `vpdpbusd` does four times as many, of 8 bits.

Authority: "BLIS: A Framework for Rapidly Instantiating BLAS Functionality" (Van Zee, van de Geijn 2015);
https://llvm.org/docs/LangRef.html; Intel's Intrinsics Guide, _mm512_dpwssd_epi32.

Rules of this file:
1. A sum runs over the inputs in their order for any number of rows: a row has the same bits in any tile.
2. y is added to, never overwritten: the caller begins with zeros, or with what is already there.

Not here: which threads compute what (cpu.py), how weights become panels (cpu.py).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

ROWS = 8  # of a tile; fewer are computed as 4, then 3, 2 or 1
LANES = 16  # numbers of 32 bits in a register of AVX-512; LLVM makes several smaller ones of it elsewhere
VECTORS = 2  # registers side by side
WIDTH = VECTORS * LANES  # outputs of a tile, and of a panel
CACHE_LINE = 64  # bytes
AHEAD = 4096  # bytes of weights, from where they are read to where they are asked of memory
BLOCK = 32  # inputs that share a scale, as in GGUF
PAIRS = BLOCK // 2
X_HEADER = 2  # words of a block of x in front of its numbers: their scale, and it times their sum
X_WORDS = X_HEADER + PAIRS
X_MAX = 32767  # 16 bits. The largest sum, of 32 products with 128, is below 2^31
TINY_BITS = 27 << 23  # of 2^-100: the largest number of a block of x is taken for at least this

unpack_tuple: Any = cgutils.unpack_tuple
get_or_insert_function: Any = cgutils.get_or_insert_function

FLOAT = ir.FloatType()
INT = ir.IntType(32)
LONG = ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT, LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)  # float16
SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
BYTES = ir.VectorType(ir.IntType(8), 2 * LANES)

Value = Any  # of LLVM
Sums = list[list[Value]]  # (rows, VECTORS)

llvmlite.binding.initialize_native_asmparser()  # for vnni_dot()
target_features: Any = cpu_target.target_context.codegen().magic_tuple()[2]  # with $NUMBA_CPU_FEATURES
HAS_VNNI = "+avx512vnni" in target_features.split(",")

# --- what LLVM needs in more than one word ------------------------------------------------------------------


def repeated(vector: Any, number: int) -> Value:
    return ir.Constant(vector, [number] * vector.count)


def broadcast(b: Any, number: Value, vector: Any) -> Value:
    """The number in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = b.insert_element(undefined, number, ir.Constant(INT, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * LANES))


def places_of(b: Any, address: Value, n_bytes: int, of: Any, n: int) -> list[Value]:
    """Pointers to n things that lie side by side, the first n_bytes behind an address."""
    first = b.inttoptr(b.add(address, ir.Constant(LONG, n_bytes)), of.as_pointer())
    return [b.gep(first, [ir.Constant(LONG, i)]) for i in range(n)]


def load(b: Any, address: Value, n_bytes: int, of: Any) -> Value:
    """What lies n_bytes behind an address."""
    [place] = places_of(b, address, n_bytes, of, 1)
    return b.load(place, align=2)


def call(b: Any, name: str, result: Any, *arguments: Value, fastmath: Sequence[str] = ()) -> Value:
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    function = get_or_insert_function(b.module, signature, name)
    return b.call(function, arguments, fastmath=fastmath)


def prefetch(b: Any, address: Value, n_bytes: int) -> None:
    """Ask memory for what will be read AHEAD of an address: n_bytes of it, by all levels of the cache.

    A processor looks ahead by itself, but not beyond a page of 4 KB, and begins anew in the next one.
    """
    byte = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT])
    function = get_or_insert_function(b.module, signature, "llvm.prefetch.p0")
    to_read, all_levels, data = (ir.Constant(INT, number) for number in (0, 3, 1))
    for offset in range(0, n_bytes, CACHE_LINE):
        place = b.inttoptr(b.add(address, ir.Constant(LONG, AHEAD + offset)), byte)
        b.call(function, [place, to_read, all_levels, data])


def fma(b: Any, x: Value, w: Value, total: Value) -> Value:
    """x * w + total, rounded once."""
    return call(b, f"llvm.fma.v{LANES}f32", FLOATS, x, w, total)


# --- the formats --------------------------------------------------------------------------------------------
# How a block of weights is read, as vectors with one value an output.

Inputs = Iterator[tuple[int, list[Value]]]  # (number of the input or pair, its (VECTORS,)), as they are read


class Block(NamedTuple):
    inputs: Inputs  # FLOATS, one input each; or SHORTS, two inputs each
    scales: Sequence[Value] = ()  # FLOATS (VECTORS,); none where the inputs are FLOATS
    minima: Sequence[Value] = ()  # the same


def load_row(b: Any, w: Value, n_bytes: int, of: Any) -> list[Value]:
    """(VECTORS,) of what lies n_bytes behind an address."""
    return [b.load(place, align=2) for place in places_of(b, w, n_bytes, of, VECTORS)]


def load_halves(b: Any, w: Value, n_bytes: int) -> list[Value]:
    """WIDTH numbers in float16, which float32 holds exactly."""
    return [b.fpext(halves, FLOATS) for halves in load_row(b, w, n_bytes, HALVES)]


def read_float32(b: Any, w: Value) -> Block:
    return Block(iter([(0, load_row(b, w, 0, FLOATS))]))


def read_float16(b: Any, w: Value) -> Block:
    return Block(iter([(0, load_halves(b, w, 0))]))


def read_bfloat16(b: Any, w: Value) -> Block:
    """A bfloat16 is the upper half of a float32: the first of a word is shifted up, the second is there."""
    words = load_row(b, w, 0, INTS)
    first = [b.bitcast(b.shl(word, repeated(INTS, 16)), FLOATS) for word in words]
    second = [b.bitcast(b.and_(word, repeated(INTS, -(2**16))), FLOATS) for word in words]
    return Block(iter([(0, first), (1, second)]))


def read_int8(b: Any, w: Value) -> Block:
    """WIDTH scales; then two bytes an output for each pair of inputs."""

    def pairs() -> Inputs:
        for i in range(PAIRS):
            bytes_ = load_row(b, w, 2 * WIDTH * (1 + i), BYTES)
            yield i, [b.sext(two, SHORTS) for two in bytes_]

    return Block(pairs(), load_halves(b, w, 0))


def read_int4(b: Any, w: Value) -> Block:
    """WIDTH scales, WIDTH minima; then two bytes an output, that hold a pair of inputs in their lower halves,
    and in the upper ones the pair that lies 16 inputs behind it.
    """

    def pairs() -> Inputs:
        for i in range(PAIRS // 2):
            bytes_ = load_row(b, w, 2 * WIDTH * (2 + i), BYTES)
            both = [b.zext(two, SHORTS) for two in bytes_]
            yield i, [b.and_(numbers, repeated(SHORTS, 15)) for numbers in both]
            yield PAIRS // 2 + i, [b.lshr(numbers, repeated(SHORTS, 4)) for numbers in both]

    return Block(pairs(), load_halves(b, w, 0), load_halves(b, w, 2 * WIDTH))


def read_wide(n_header: int) -> Callable[[Any, Value], Block]:
    """A block as widen() writes it: n_header times WIDTH floats, the scales and minima; then its pairs."""

    def read(b: Any, w: Value) -> Block:
        header = [load_row(b, w, 4 * WIDTH * i, FLOATS) for i in range(n_header)]

        def pairs() -> Inputs:
            for i in range(PAIRS):
                yield i, load_row(b, w, 4 * WIDTH * (n_header + i), SHORTS)

        return Block(pairs(), *header)

    return read


class Format(NamedTuple):
    read: Callable[[Any, Value], Block]  # from the address of a block
    n_bytes: int  # of a block that is fetched ahead; 0: it is not, for most such blocks are in a cache
    x_words: int  # that a row of x has for the block
    wide: Any  # dtype of the format that widen() makes of it
    wide_blocks: int  # that it makes of one
    wide_words: int  # of an output in each


# fmt: off
#  dtype of the weights  read, bytes of all outputs, words of x, widened: dtype, blocks, words
FORMATS: dict[Any, Format] = {
    types.float32: Format(read_float32,  0,          1,       np.float32, 1, 1),
    types.int16:   Format(read_float16,  WIDTH * 2,  1,       np.float32, 1, 1),
    types.uint16:  Format(read_bfloat16, WIDTH * 4,  2,       np.float32, 2, 1),
    types.uint8:   Format(read_int8,     WIDTH * 34, X_WORDS, np.int32,   1, 1 + PAIRS),
    types.uint32:  Format(read_int4,     WIDTH * 20, X_WORDS, np.int64,   1, 2 + PAIRS),
    types.int32:   Format(read_wide(1),  0,          X_WORDS, np.int32,   1, 1 + PAIRS),
    types.int64:   Format(read_wide(2),  0,          X_WORDS, np.int64,   1, 2 + PAIRS),
}
# fmt: on

# --- a block of the product ---------------------------------------------------------------------------------
# x has the address of the block in each row. -> the new sums


def add_block(b: Any, x: Sequence[Value], w: Block, sums: Sums) -> Sums:
    if w.scales:
        return add_scaled(b, x, w, sums)
    for i, ws in w.inputs:
        for r, address in enumerate(x):
            number = broadcast(b, load(b, address, 4 * i, FLOAT), FLOATS)
            sums[r] = [fma(b, number, w, total) for w, total in zip(ws, sums[r], strict=True)]
    return sums


def add_scaled(b: Any, x: Sequence[Value], w: Block, sums: Sums) -> Sums:
    dots = [[repeated(INTS, 0)] * VECTORS for _ in x]
    for i, ws in w.inputs:
        for r, address in enumerate(x):
            numbers = broadcast(b, load(b, address, 4 * (X_HEADER + i), INT), INTS)
            dots[r] = [DOT(b, numbers, w, dot) for w, dot in zip(ws, dots[r], strict=True)]
    for r, address in enumerate(x):
        scale_of_x = broadcast(b, load(b, address, 0, FLOAT), FLOATS)
        sum_of_x = broadcast(b, load(b, address, 4, FLOAT), FLOATS)
        for v, minimum in enumerate(w.minima):
            sums[r][v] = fma(b, sum_of_x, minimum, sums[r][v])
        for v, scale in enumerate(w.scales):
            dot = b.sitofp(dots[r][v], FLOATS)
            sums[r][v] = fma(b, dot, b.fmul(scale_of_x, scale), sums[r][v])
    return sums


def vnni_dot(b: Any, x: Value, w: Value, total: Value) -> Value:
    """total + x_0 w_0 + x_1 w_1 in each lane, for pairs of 16 bits with a sign; x and total INTS, w SHORTS.

    Written as the instruction, for of the intrinsic LLVM makes two others (llvm/llvm-project#84182).
    """
    signature = ir.FunctionType(INTS, [INTS, SHORTS, INTS])
    return b.asm(signature, "vpdpwssd $2, $1, $0", "=v,v,v,0", [x, w, total], False)


def portable_dot(b: Any, x: Value, w: Value, total: Value) -> Value:
    """The same, by instructions that every processor has."""
    sixteen = repeated(INTS, 16)
    w = b.bitcast(w, INTS)
    first = b.mul(b.ashr(b.shl(x, sixteen), sixteen), b.ashr(b.shl(w, sixteen), sixteen))
    second = b.mul(b.ashr(x, sixteen), b.ashr(w, sixteen))
    return b.add(total, b.add(first, second))


DOT = vnni_dot if HAS_VNNI else portable_dot

# --- the tile -----------------------------------------------------------------------------------------------


def for_blocks(
    b: Any, n: Value, values: list[Value], body: Callable[[Value, list[Value]], list[Value]]
) -> Any:
    """for k in range(n): values = body(k, values). -> the last values

    A phi is a variable of a loop: it has one value when the loop is entered, another when it comes round.
    """
    entry, loop, end = b.block, b.append_basic_block("loop"), b.append_basic_block("end")
    b.branch(loop)
    b.position_at_end(loop)
    k = b.phi(LONG)
    variables = [b.phi(value.type) for value in values]
    after = body(k, list(variables))
    following = b.add(k, ir.Constant(LONG, 1))
    k.add_incoming(ir.Constant(LONG, 0), entry)
    k.add_incoming(following, loop)
    for variable, before, new in zip(variables, values, after, strict=True):
        variable.add_incoming(before, entry)
        variable.add_incoming(new, loop)
    b.cbranch(b.icmp_signed("<", following, n), loop, end)
    b.position_at_end(end)
    return after


class Operand:
    """An array in a kernel: the address of its data, its shape, and its strides in bytes."""

    def __init__(self, context: Any, b: Any, kind: Any, value: Value) -> None:
        array = context.make_array(kind)(context, b, value)
        self.b = b
        self.address = b.ptrtoint(array.data, LONG)
        self.strides = unpack_tuple(b, array.strides)
        self.shape = unpack_tuple(b, array.shape)

    def row(self, r: int | Value) -> Value:
        """The address of its r-th row."""
        if isinstance(r, int):
            r = ir.Constant(LONG, r)
        return self.b.add(self.address, self.b.mul(self.strides[0], r))


@intrinsic(prefer_literal=True)
def add_tile(typing: Any, n_rows: Any, x: Any, w: Any, y: Any) -> Any:
    """y += x @ w for n_rows, a literal. x (n_rows, ...), w (n_blocks, ...), y (n_rows, WIDTH) float32."""
    signature = types.void(n_rows, x, w, y)
    form = FORMATS[w.dtype]

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Value:
        kinds = zip(signature.args[1:], arguments[1:], strict=True)
        x, w, y = (Operand(context, b, kind, value) for kind, value in kinds)
        rows = range(n_rows.literal_value)
        x_rows = [x.row(r) for r in rows]
        places: list[Value] = []  # of the sums, (n_rows * VECTORS,)
        for r in rows:
            places += places_of(b, y.row(r), 0, FLOATS, VECTORS)

        def body(k: Value, values: list[Value]) -> list[Value]:
            prefetch(b, w.row(k), form.n_bytes)
            x_block = b.mul(k, ir.Constant(LONG, 4 * form.x_words))
            x_blocks = [b.add(row, x_block) for row in x_rows]
            sums = [values[i : i + VECTORS] for i in range(0, len(values), VECTORS)]
            sums = add_block(b, x_blocks, form.read(b, w.row(k)), sums)
            return [total for row in sums for total in row]

        before = [b.load(place, align=4) for place in places]
        after = for_blocks(b, w.shape[0], before, body)
        for place, value in zip(places, after, strict=True):
            b.store(value, place, align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def widen(typing: Any, w: Any, wide: Any) -> Any:
    """Write the blocks of w one behind another, each as the tile has it in registers once it is read."""
    signature = types.void(w, wide)
    form = FORMATS[w.dtype]

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Value:
        kinds = zip(signature.args, arguments, strict=True)
        w, wide = (Operand(context, b, kind, value) for kind, value in kinds)
        n_bytes = 4 * WIDTH * form.wide_blocks * form.wide_words

        def body(k: Value, values: list[Value]) -> list[Value]:
            prefetch(b, w.row(k), form.n_bytes)
            block = form.read(b, w.row(k))
            place = b.add(wide.address, b.mul(k, ir.Constant(LONG, n_bytes)))
            header = [*block.scales, *block.minima]
            store_all(b, place, 0, header)
            for i, vectors in block.inputs:
                store_all(b, place, 4 * LANES * (len(header) + VECTORS * i), vectors)
            return values

        for_blocks(b, w.shape[0], [], body)
        return context.get_dummy_value()

    return signature, generate


def store_all(b: Any, address: Value, n_bytes: int, vectors: Sequence[Value]) -> None:
    """Write vectors one behind another, n_bytes behind an address."""
    for i, vector in enumerate(vectors):
        [place] = places_of(b, address, n_bytes + 4 * LANES * i, vector.type, 1)
        b.store(vector, place, align=4)


def widened(w: Any) -> Any:
    """A panel (n_blocks, ...) in the format that the tile takes most easily."""


@overload(widened)
def _widened(w: Any) -> Any:
    form = FORMATS[w.dtype]
    dtype = form.wide
    n_blocks = form.wide_blocks
    block_bytes = 4 * WIDTH * form.wide_words

    def as_it_is(w: Any) -> Any:
        return w

    def copy(w: Any) -> Any:
        n_bytes = len(w) * n_blocks * block_bytes
        memory = np.empty(n_bytes + CACHE_LINE, np.uint8)
        first = CACHE_LINE - memory.ctypes.data % CACHE_LINE  # a vector in two lines takes two loads
        panel = memory[first : first + n_bytes].view(dtype).reshape(len(w) * n_blocks, -1)
        write(w, panel)
        return panel

    write: Any = widen
    return as_it_is if w.dtype == types.float32 else copy


# --- what goes in: x rounded; and a maximum -----------------------------------------------------------------


def larger(b: Any, x: Value, y: Value) -> Value:
    """The larger number in each lane."""
    return call(b, f"llvm.maxnum.v{LANES}f32", FLOATS, x, y, fastmath=["nnan"])


def largest_lane(b: Any, x: Value) -> Value:
    return call(b, f"llvm.vector.reduce.fmax.v{LANES}f32", FLOAT, x, fastmath=["nnan"])


@intrinsic
def largest(typing: Any, x: Any) -> Any:
    """The largest of x float32, whose length is a multiple of LANES; a compiler takes them one by one."""
    signature = types.float32(x)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Value:
        x = Operand(context, b, signature.args[0], arguments[0])
        vectors = b.inttoptr(x.address, FLOATS.as_pointer())

        def body(k: Value, values: list[Value]) -> list[Value]:
            return [larger(b, values[0], b.load(b.gep(vectors, [k]), align=4))]

        n_vectors = b.udiv(x.shape[0], ir.Constant(LONG, LANES))
        [maxima] = for_blocks(b, n_vectors, [b.load(vectors, align=4)], body)
        return largest_lane(b, maxima)

    return signature, generate


def size_of(b: Any, *numbers: Value) -> Value:
    """The largest absolute value, but at least 2^-100; NaN where one is NaN.

    Found in their bits: without the sign these are in the order of the numbers, and those of NaN are above.
    """
    no_sign = repeated(INTS, 0x7FFFFFFF)
    bits = [b.and_(b.bitcast(vector, INTS), no_sign) for vector in numbers]
    most = call(b, f"llvm.smax.v{LANES}i32", INTS, *bits)
    largest_bits = call(b, f"llvm.vector.reduce.smax.v{LANES}i32", INT, most)
    return b.bitcast(call(b, "llvm.smax.i32", INT, largest_bits, ir.Constant(INT, TINY_BITS)), FLOAT)


@intrinsic
def round_block(typing: Any, x: Any, words: Any) -> Any:
    """Round x (BLOCK,) to 16 bits. words (X_WORDS,) = scale, scale * sum of the numbers, the numbers"""
    signature = types.void(x, words)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Value:
        kinds = zip(signature.args, arguments, strict=True)
        x, words = (Operand(context, b, kind, value).address for kind, value in kinds)
        first, second = (b.load(place, align=4) for place in places_of(b, x, 0, FLOATS, 2))
        size = size_of(b, first, second)
        factor = broadcast(b, b.fdiv(ir.Constant(FLOAT, X_MAX), size), FLOATS)
        rounded = [
            b.fptosi(call(b, f"llvm.rint.v{LANES}f32", FLOATS, b.fmul(numbers, factor)), INTS)
            for numbers in (first, second)
        ]
        total = call(b, f"llvm.vector.reduce.add.v{LANES}i32", INT, b.add(*rounded))
        scale = b.fdiv(size, ir.Constant(FLOAT, X_MAX))
        header = [scale, b.fmul(scale, b.sitofp(total, FLOAT))]
        for place, number in zip(places_of(b, words, 0, FLOAT, X_HEADER), header, strict=True):
            b.store(number, place)
        halves = ir.VectorType(ir.IntType(16), LANES)
        for place, numbers in zip(places_of(b, words, 4 * X_HEADER, halves, 2), rounded, strict=True):
            b.store(b.trunc(numbers, halves), place, align=4)
        return context.get_dummy_value()

    return signature, generate
