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
  * Tensors follow one another in their order, as llama.cpp requires, so no tensor overlaps another, and none
    stands twice.
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
ALIGNMENT = 32  # bytes of the data, unless general.alignment says otherwise

U32, U64 = np.dtype("<u4"), np.dtype("<u8")
STRING, ARRAY = 8, 9  # GGUF's numbers of types of values, beside those of numbers

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
            raise ValueError(f"{n} values at byte {start}, but the header ends at byte {len(self._data)}")
        return np.frombuffer(self._data[start : self.position], dtype)

    def integer(self, dtype: np.dtype[Any]) -> int:
        return int(self.numbers(dtype, 1)[0])

    def string(self) -> str:
        n_bytes = self.integer(U64)
        return self.numbers(np.dtype(np.uint8), n_bytes).tobytes().decode()

    def value(self) -> Any:
        """Read the type of a value, then the value."""
        from gguf import GGUFReader, GGUFValueType  # here, for it takes a while

        kind = self.integer(U32)
        n = 1
        is_array = kind == ARRAY
        if is_array:
            kind = self.integer(U32)
            n = self.integer(U64)
        if kind == STRING:
            strings = (self.string() for _ in range(n))  # ends with the bytes: each string takes 8 or more
            return list(strings) if is_array else next(strings)
        dtype: Any = GGUFReader.gguf_scalar_to_np[GGUFValueType(kind)]
        numbers = self.numbers(np.dtype(dtype), n)
        return numbers if is_array else numbers.item()


@lru_cache(maxsize=1)  # as_directory() reads a file, and then map_tensors()
def read(file: Path) -> Container:
    """Map a file; raises UnsupportedModel for one that is unreadable, cut, or contradicts itself."""
    try:
        return parse(np.memmap(file, np.uint8, mode="r").view(np.ndarray))
    except (OSError, ValueError, KeyError) as error:  # also text that is not UTF-8, and an empty file
        raise UnsupportedModel(f"{file.resolve()} is not a GGUF file that can be read: {error}") from None


def parse(data: NDArray[np.uint8]) -> Container:
    header = Header(data)
    magic = header.numbers(np.dtype(np.uint8), 4).tobytes()
    version = header.integer(U32)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r}, version {version}; supported: b'GGUF', 2 or 3")
    n_tensors = header.integer(U64)
    n_entries = header.integer(U64)
    metadata: dict[str, Any] = {}
    for _ in range(n_entries):
        name = header.string()
        metadata[name] = header.value()
    step = metadata.get("general.alignment", ALIGNMENT)
    if type(step) is not int or step < 1:
        raise ValueError(f"general.alignment is {str(step)[:80]!r}; supported: a number of bytes")
    places: dict[str, Place] = {}
    for _ in range(n_tensors):
        name = header.string()
        places[name] = read_place(header, name[:80])
    start = begin = -(-header.position // step) * step
    tensors: dict[str, NDArray[Any] | Blocks] = {}
    for name, place in places.items():
        end = begin + place.n_bytes
        if start + place.offset != begin or end > len(data):
            raise ValueError(f"tensor {name[:80]!r} does not lie at bytes {begin} to {end}, or stands twice")
        tensors[name] = tensor_of(place, data[begin:end])
        begin = -(-end // step) * step
    return Container(metadata, tensors)


class Place(NamedTuple):
    """What the header says of a tensor."""

    format: str
    shape: tuple[int, ...]
    n_bytes: int
    offset: int  # in the data


def read_place(header: Header, name: str) -> Place:
    from gguf import GGMLQuantizationType  # here, for it takes a while

    dims = header.numbers(U64, header.integer(U32)).tolist()
    block_format = GGMLQuantizationType(header.integer(U32)).name
    n_numbers, n_bytes = sizes(block_format)
    is_supported = block_format in FLOATS or (block_format in BLOCKS and len(dims) == 2)
    if not is_supported or not dims or 0 in dims or dims[0] % n_numbers:
        supported = f"{', '.join(FLOATS)}; for matrices of whole blocks also {', '.join(BLOCKS)}"
        raise ValueError(f"tensor {name!r} is {block_format} {dims[:9]}; supported: {supported}")
    n_bytes *= math.prod(dims) // n_numbers
    return Place(block_format, tuple(reversed(dims)), n_bytes, header.integer(U64))


def tensor_of(place: Place, data: NDArray[np.uint8]) -> NDArray[Any] | Blocks:
    if place.format in FLOATS:
        return data.view(FLOATS[place.format]).reshape(place.shape)
    return Blocks(place.format, data.reshape(place.shape[0], -1, sizes(place.format).n_bytes))
