"""The container of a GGUF file: its header, and the place of each tensor.

    FILE.gguf --read()--> Metadata, Tensors

    magic "GGUF" | u32 version | u64 n_tensors | u64 n_entries | entries | tensors | padding | data
        entry     string name | u32 type | value          a value may be an array: u32 type | u64 n | values
        tensor    string name | u32 n_dims | u64 sizes, the innermost first | u32 format | u64 offset in data
        string    u64 n_bytes | UTF-8                     all of it little-endian

Authority: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; for the values that a file may not have,
gguf_init_from_file_impl in https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/gguf.cpp. The `gguf`
package knows the formats of tensors. Its reader is not used: it makes an array of each byte string, which
takes seconds for a vocabulary, and holds no count against the size of the file.

Rules of this file:
  * We do not trust the file. We check each count and size against the bytes that are there before we use it,
    and a header has at most MAX_HEADER_BYTES. This bounds time and memory.
  * Tensors follow one another in their order, as llama.cpp requires, so no tensor overlaps another or occurs
    twice.
  * A malformed file raises ValueError, an unreadable one OSError; gguf_file.as_directory() turns either into
    one line.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoint.gguf_blocks import FLOATS, Blocks, sizes

MAX_HEADER_BYTES = 2**26  # a vocabulary of 262,000 tokens takes 15 MB
ALIGNMENT = 32  # bytes: a tensor begins at a multiple. Another general.alignment is refused

U32, U64 = 4, 8  # bytes
STRING, ARRAY, UINT64 = 8, 9, 10  # GGUF's numbers of types of values

# of vectors, and of matrices: by the number of dimensions
FORMATS = {1: [*FLOATS], 2: [*FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]}

Metadata = dict[str, Any]  # by name: str, int, float, bool, list[str], or an array of numbers
Tensors = dict[str, NDArray[Any] | Blocks]  # by name: views of the file


class Header:
    """Reads the bytes of a header from front to back."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data[:MAX_HEADER_BYTES].data
        self.position = 0

    def read(self, n_bytes: int) -> memoryview:
        start = self.position
        self.position += n_bytes
        if self.position > len(self._data):
            raise ValueError(f"it is cut, or no GGUF: {n_bytes} bytes at byte {start} of {len(self._data)}")
        return self._data[start : self.position]

    def integer(self, n_bytes: int) -> int:
        return int.from_bytes(self.read(n_bytes), "little")

    def string(self) -> str:
        return str(self.read(self.integer(U64)), "utf-8")

    def numbers(self, kind: int, n: int) -> NDArray[Any]:
        from gguf import GGUFReader, GGUFValueType  # here, for it takes a while

        dtype = np.dtype(GGUFReader.gguf_scalar_to_np[GGUFValueType(kind)])
        return np.frombuffer(self.read(n * dtype.itemsize), dtype)

    def value(self) -> Any:
        """Read the type of a value, then the value."""
        kind = self.integer(U32)
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.numbers(kind, 1).item()
        kind, n = self.integer(U32), self.integer(U64)
        if kind == STRING:
            return [self.string() for _ in range(n)]  # ends with the bytes: each string takes 8 or more
        return self.numbers(kind, n)


@lru_cache(maxsize=1)  # as_directory() reads a file, and then map_tensors()
def read(file: Path) -> tuple[Metadata, Tensors]:
    """Map a file; raises OSError or ValueError for one that is unreadable, cut, or contradicts itself."""
    return parse(np.memmap(file, np.uint8, mode="r").view(np.ndarray))


def parse(data: NDArray[np.uint8]) -> tuple[Metadata, Tensors]:
    from gguf import GGMLQuantizationType  # here, for it takes a while

    header = Header(data)
    magic = bytes(header.read(4))
    version = header.integer(U32)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r}, version {version}; supported: b'GGUF', 2 or 3")
    n_tensors, n_entries = header.integer(U64), header.integer(U64)
    metadata: Metadata = {}
    for _ in range(n_entries):
        name = header.string()
        metadata[name] = header.value()
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if alignment != ALIGNMENT:
        raise ValueError(f"general.alignment is {str(alignment)[:80]!r}; supported: {ALIGNMENT}")
    places: dict[str, tuple[list[int], str, int]] = {}  # by name: sizes, format, offset in the data
    for _ in range(n_tensors):
        name = header.string()
        dims = header.numbers(UINT64, header.integer(U32))[:3].tolist()  # three are not supported
        block_format = GGMLQuantizationType(header.integer(U32)).name
        n_numbers, _ = sizes(block_format)
        if block_format not in FORMATS.get(len(dims), []) or 0 in dims or dims[0] % n_numbers:
            raise ValueError(f"tensor {name[:80]!r} is {block_format} {dims}; supported: blocks of {FORMATS}")
        places[name] = dims, block_format, header.integer(U64)
    start = begin = aligned(header.position)
    tensors: Tensors = {}
    for name, (dims, block_format, offset) in places.items():
        n_numbers, n_bytes = sizes(block_format)
        end = begin + math.prod(dims) // n_numbers * n_bytes
        if end > len(data):
            raise ValueError(f"it is cut at byte {len(data)}: tensor {name[:80]!r} ends at byte {end}")
        if start + offset != begin:
            raise ValueError(f"tensor {name[:80]!r} does not lie at bytes {begin} to {end}, or occurs twice")
        tensor = data[begin:end]
        if block_format in FLOATS:
            tensors[name] = tensor.view(FLOATS[block_format]).reshape(dims[::-1])
        else:
            tensors[name] = Blocks(block_format, tensor.reshape(dims[1], -1, n_bytes))
        begin = aligned(end)
    return metadata, tensors


def aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT
