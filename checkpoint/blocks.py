"""Blocks of a GGUF file: 32 numbers of 4 to 8 bits, or 256, with their scales, as the file has them.

    float32 --quantized()--> Blocks --decoded()--> float32

Authority: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md names the formats; the `gguf` package,
which reads and writes them here, is llama.cpp's own (https://github.com/ggml-org/llama.cpp/tree/master/gguf-py).
Of a block with scale d and minimum m a number q stands for

    Q8_0    d * q           q of 8 bits, with a sign
    Q4_0    d * (q - 8)     q of 4 bits
    Q4_1    d * q + m       q of 4 bits

Rules of this file:
  * The names of the formats are GGUF's.
  * Nothing is decoded before it has to be: a product that reads blocks gets them as they are.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class Sizes(NamedTuple):
    """What a block of a format holds, and takes."""

    n_numbers: int
    n_bytes: int


class Blocks(NamedTuple):
    """A matrix (n_out, n_in) in blocks."""

    format: str  # a name of gguf.GGMLQuantizationType
    data: NDArray[np.uint8]  # (n_out, n_blocks, bytes of a block)

    @property
    def n_in(self) -> int:
        n_blocks: int = self.data.shape[1]
        return n_blocks * sizes(self.format).n_numbers

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.n_in

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def sizes(format: str) -> Sizes:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # here, for only files in blocks need it

    return Sizes(*GGML_QUANT_SIZES[GGMLQuantizationType[format]])


def decoded(blocks: Blocks) -> Array:
    """Return the numbers that the blocks stand for, (n_out, n_in)."""
    from gguf import GGMLQuantizationType, dequantize

    numbers: Array = dequantize(
        blocks.data.reshape(len(blocks.data), -1), GGMLQuantizationType[blocks.format]
    )
    return numbers


def quantized(numbers: Array, format: str) -> Blocks:
    """Round a matrix (n_out, n_in), n_in a multiple of 32, to Q8_0 or Q4_1."""
    from gguf import GGMLQuantizationType, quantize

    data = quantize(numbers, GGMLQuantizationType[format])
    return Blocks(format, data.reshape(len(numbers), -1, sizes(format).n_bytes))


def with_minima(blocks: Blocks) -> Blocks:
    """Write Q4_0 as Q4_1, which stands for the same numbers: the minimum is -8 times the scale."""
    if blocks.format != "Q4_0":
        return blocks
    scales = np.ascontiguousarray(blocks.data[:, :, :2]).view(np.float16)
    minima = (scales * np.float16(-8)).view(np.uint8)
    return Blocks("Q4_1", np.concatenate([blocks.data[:, :, :2], minima, blocks.data[:, :, 2:]], axis=2))
