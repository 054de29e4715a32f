"""Blocks of a GGUF file: 32 numbers of 4 to 8 bits, or 256, with their scales, as the file has them.

    float32 --quantized()--> Blocks --decoded()--> float32

Authority: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md names the formats; the `gguf` package,
which reads and writes them here, is llama.cpp's own (https://github.com/ggml-org/llama.cpp/tree/master/gguf-py).
In a block with scale d and minimum m, the stored number q means

    Q8_0    d * q           q of 8 bits, with a sign
    Q4_0    d * (q - 8)     q of 4 bits
    Q4_1    d * q + m       q of 4 bits

Rules of this file:
  * The names of the formats are GGUF's.
  * We decode as late as possible: a product that reads blocks gets them as they are.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
# Floats, by the names that safetensors and GGUF share. NumPy has no bfloat16, so it is seen as uint16.
FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
ROWS = 1024  # rows of a matrix that are float32 at once


class Blocks(NamedTuple):
    """A matrix (n_out, n_in) in blocks."""

    format: str  # a name of gguf.GGMLQuantizationType
    data: NDArray[np.uint8]  # (n_out, n_blocks, bytes of a block)

    @property
    def shape(self) -> tuple[int, int]:
        n_numbers, _ = sizes(self.format)
        return len(self.data), self.data.shape[1] * n_numbers

    @property
    def dtype(self) -> str:
        return self.format


def sizes(format: str) -> tuple[int, int]:
    """Return how many numbers a block holds, and how many bytes it takes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # here, for only files in blocks need it

    return GGML_QUANT_SIZES[GGMLQuantizationType[format]]


def decoded(blocks: Blocks) -> Array:
    """Decode the blocks to float32, (n_out, n_in)."""
    from gguf import GGMLQuantizationType, dequantize

    numbers: Array = dequantize(
        blocks.data.reshape(len(blocks.data), -1), GGMLQuantizationType[blocks.format]
    )
    return numbers


def quantized(numbers: Array, format: str) -> Blocks:
    """Round a matrix (n_out, n_in), n_in a multiple of 32, to Q8_0 or Q4_1."""
    from gguf import GGMLQuantizationType, quantize

    data = quantize(numbers, GGMLQuantizationType[format])
    _, n_bytes = sizes(format)
    return Blocks(format, data.reshape(len(numbers), -1, n_bytes))


def kept(format: str) -> str:
    """Return the format to which with_minima() converts blocks of this one."""
    return f"{format[:2]}_1" if format[1] in "45" else "Q8_0"


def with_minima(blocks: Blocks) -> Blocks:
    """Write blocks as Q4_1 or Q5_1, whose numbers have no sign, or Q6_K as Q8_0; others stay as they are.

    Q4_0 and Q5_0 keep their values exactly. Q4_K and Q5_K keep the numbers of each block, and we round their
    scales to float16; we round Q6_K to 8 bits.
    """
    data = blocks.data
    match blocks.format:
        case "Q4_0" | "Q5_0":
            offset = {"Q4_0": 8, "Q5_0": 16}[blocks.format]
            scales = data[:, :, :2].view(np.float16)
            return Blocks(kept(blocks.format), in_bytes(scales, -offset * scales, data[:, :, 2:]))
        case "Q4_K" | "Q5_K":
            return blocks_of_32(blocks)
        case "Q6_K":
            return eight_bits(blocks)
        case _:
            return blocks


def in_bytes(*fields: NDArray[Any]) -> NDArray[np.uint8]:
    """Join the fields of each block, one after another: (n_out, n_blocks, bytes of a block)."""
    return np.concatenate([np.ascontiguousarray(field).view(np.uint8) for field in fields], axis=2)


def blocks_of_32(blocks: Blocks) -> Blocks:
    """Write Q4_K as Q4_1 and Q5_K as Q5_1; dequantize_row_q4_K and _q5_K of ggml-quants.c define the bits."""
    from gguf.quants import Q4_K

    data = blocks.data
    rows = len(data)
    factors = data[:, :, :4].view(np.float16).astype(np.float32).reshape(-1, 2)
    sixes = Q4_K.get_scale_min(data[:, :, 4:16].reshape(-1, 12))  # of scales and of minima, (..., 8)
    scales = (factors[:, :1] * sixes[0]).astype(np.float16).reshape(rows, -1, 1)
    minima = (-factors[:, 1:] * sixes[1]).astype(np.float16).reshape(rows, -1, 1)
    fifths: list[NDArray[np.uint8]] = []
    if blocks.format == "Q5_K":  # a bit for each block of 32 in 32 bytes
        parts = np.arange(8, dtype=np.uint8)[:, None]
        bits = data[:, :, None, 16:48] >> parts & 1  # (n_out, n_blocks, 8, 32)
        fifths = [np.packbits(bits, axis=3, bitorder="little").reshape(rows, -1, 4)]
    fours = data[:, :, -128:].reshape(rows, -1, 1, 32)  # two blocks of 32 in the halves of 32 bytes
    numbers = np.concatenate([fours & 15, fours >> 4], axis=2)
    halves = (numbers[..., :16] | numbers[..., 16:] << 4).reshape(rows, -1, 16)
    return Blocks(kept(blocks.format), in_bytes(scales, minima, *fifths, halves))


def eight_bits(blocks: Blocks) -> Blocks:
    """Round blocks to Q8_0, a few rows at a time: a large matrix would take gigabytes as float32."""
    parts = [
        quantized(decoded(blocks._replace(data=blocks.data[first : first + ROWS])), "Q8_0").data
        for first in range(0, len(blocks.data), ROWS)
    ]
    return Blocks("Q8_0", np.concatenate(parts))
