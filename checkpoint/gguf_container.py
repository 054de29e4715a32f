"""The container of a GGUF file: what its header says, and where each tensor lies.

    FILE.gguf --read()--> Container: metadata by name, the place of each tensor by name

    magic "GGUF" | u32 version | u64 n_tensors | u64 n_entries | entries | tensors | padding | data
        entry     string name | u32 type | value          a value may be an array: u32 type | u64 n | values
        tensor    string name | u32 n_dims | u64 sizes, the innermost first | u32 format | u64 offset in data
        string    u64 n_bytes | UTF-8                     all of it little-endian

Authority: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; for what a file may not say,
gguf_init_from_file_impl in https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/gguf.cpp. The `gguf`
package knows the formats of tensors. Its reader is not used: it makes an array of each byte string, which
takes seconds for a vocabulary, and holds no count against the size of the file.

Rules of this file:
  * A file is not believed. Each count and size is checked against the bytes that are there before anything is
    made of it, and a header has at most MAX_HEADER_BYTES. This bounds time and memory.
  * Tensors follow one another in their order, as llama.cpp requires, so no tensor overlaps another.
  * What is wrong raises ValueError; read() makes UnsupportedModel of it, in one line.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from checkpoint.blocks import FLOATS, Blocks, sizes
from checkpoint.config import UnsupportedModel

MAX_HEADER_BYTES = 2**26  # a vocabulary of 262,000 tokens takes 15 MB
MAX_DIMS = 4
ALIGNMENT = 32  # bytes of the data, unless general.alignment says otherwise
POWERS_OF_2 = [2**n for n in range(16)]

# GGUF's number of a type of value
U32, U64 = np.dtype("<u4"), np.dtype("<u8")
STRING, ARRAY = 8, 9
NUMBERS = dict(enumerate(map(np.dtype, ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))))
NUMBERS |= {10: U64, 11: np.dtype("<i8"), 12: np.dtype("<f8")}

# Formats of tensors that are no floats
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


class Container(NamedTuple):
    metadata: dict[str, Any]  # str, int, float, bool, list[str], or an array of numbers
    tensors: dict[str, NDArray[Any] | Blocks]  # views of the file


class Header:
    """Reads the bytes of a header from front to back."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data[:MAX_HEADER_BYTES].data
        self.position = 0

    def numbers(self, dtype: np.dtype[Any], n: int) -> NDArray[Any]:
        start = self.position
        self.position += n * dtype.itemsize
        if self.position > len(self._data):
            raise ValueError(
                f"{n} values at byte {start} of the header, which ends at byte {len(self._data)}"
            )
        return np.frombuffer(self._data[start : self.position], dtype)

    def integer(self, dtype: np.dtype[Any]) -> int:
        return int(self.numbers(dtype, 1)[0])

    def string(self) -> str:
        n_bytes = self.integer(U64)
        return self.numbers(NUMBERS[0], n_bytes).tobytes().decode()

    def value(self) -> Any:
        """Read the type of a value, then the value."""
        kind = self.integer(U32)
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.numbers(NUMBERS[kind], 1)[0].item()
        kind = self.integer(U32)
        n = self.integer(U64)
        if kind == STRING:
            return [self.string() for _ in range(n)]  # ends with the bytes: each string takes 8 or more
        return self.numbers(NUMBERS[kind], n)


@lru_cache(maxsize=1)  # as_directory() reads a file, and then map_tensors()
def read(file: Path) -> Container:
    """Map a file; raises UnsupportedModel for one that is unreadable, cut, or contradicts itself."""
    try:
        return parse(np.memmap(file, np.uint8, mode="r").view(np.ndarray))
    except OSError as error:
        raise UnsupportedModel(f"{file.resolve()}: {error.strerror}") from error
    except (ValueError, KeyError) as error:  # also text that is not UTF-8, and an empty file
        reason = f"a value of type {error}" if isinstance(error, KeyError) else error
        raise UnsupportedModel(f"{file.resolve()} is not a GGUF file, or broken: {reason}") from None


def parse(data: NDArray[np.uint8]) -> Container:
    header = Header(data)
    magic = header.numbers(NUMBERS[0], 4).tobytes()
    version = header.integer(U32)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r}, version {version}; supported: b'GGUF', 2 or 3")
    n_tensors = header.integer(U64)
    n_entries = header.integer(U64)
    metadata: dict[str, Any] = {}
    for _ in range(n_entries):
        name = header.string()
        if name in metadata:
            raise ValueError(f"{name[:80]!r} stands twice in the metadata")
        metadata[name] = header.value()
    step = metadata.get("general.alignment", ALIGNMENT)
    if type(step) is not int or step not in POWERS_OF_2:
        raise ValueError(f"general.alignment is {str(step)[:80]!r}; supported: powers of 2")
    places = [read_place(header) for _ in range(n_tensors)]
    start = begin = -(-header.position // step) * step
    tensors: dict[str, NDArray[Any] | Blocks] = {}
    for name, block_format, shape, n_bytes, offset in places:
        end = begin + n_bytes
        if name in tensors or start + offset != begin or end > len(data):
            raise ValueError(f"tensor {name} is there twice, or does not lie at bytes {begin} to {end}")
        tensors[name] = tensor_of(block_format, shape, data[begin:end])
        begin = -(-end // step) * step
    return Container(metadata, tensors)


def read_place(header: Header) -> tuple[str, str, tuple[int, ...], int, int]:
    """Read what the header says of a tensor: its name, format, shape, bytes, and offset in the data."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # here, for it takes a while

    name = header.string()
    n_dims = header.integer(U32)
    if not name.isprintable() or not 1 <= n_dims <= MAX_DIMS:
        raise ValueError(f"tensor {name[:80]!r} has {n_dims} dimensions; supported: 1 to {MAX_DIMS}")
    dims = [header.integer(U64) for _ in range(n_dims)]
    kind = GGMLQuantizationType(header.integer(U32))
    if kind.name not in FLOATS and (kind.name not in BLOCKS or n_dims != 2):
        supported = f"{', '.join(FLOATS)}; for matrices also {', '.join(BLOCKS)}"
        raise ValueError(f"tensor {name} is {kind.name} {dims}; supported: {supported}")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in dims or dims[0] % block:
        raise ValueError(f"tensor {name} has the sizes {dims}; supported: rows of whole blocks of {block}")
    n_bytes = math.prod(dims) // block * block_bytes
    return name, kind.name, tuple(reversed(dims)), n_bytes, header.integer(U64)


def tensor_of(block_format: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> NDArray[Any] | Blocks:
    if block_format in FLOATS:
        return data.view(FLOATS[block_format]).reshape(shape)
    return Blocks(block_format, data.reshape(shape[0], -1, sizes(block_format).n_bytes))
