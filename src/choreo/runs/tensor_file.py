"""Write a safetensors file from a stream of elements. No array needs to be in memory as a whole.

    │ 8 bytes: size of the header │ header: JSON │ array │ array │ ...

The library `safetensors` writes the same bytes, but needs all arrays at once (`serialize_file` takes a pointer to each of them).
A run with workers has its arrays in other processes. One array of a replay can be larger than half of the memory, and then a
second copy would not fit. So this module writes the format itself. Files are read with the library.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase

import numpy as np

from choreo.dtypes import dtype_named

CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "int32": "I32",
    "uint32": "U32", "float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64",
}  # fmt: skip
"""The types that a file can hold, by their names in numpy. The library orders arrays by type in the reverse of this order."""
RANKS = {name: rank for rank, name in enumerate(CODES)}


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """One array of a file."""

    name: str
    """The name of the array."""
    kind: str
    """The name of its type. An array of a type that is not in `CODES` is stored as bytes."""
    shape: tuple[int, ...]
    """Its shape."""

    @property
    def dtype(self) -> str:
        """The name of the type in the file."""
        return self.kind if self.kind in CODES else "uint8"

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape in the file. If the array is stored as bytes, the new last axis has the bytes of one element."""
        return self.shape if self.kind in CODES else (*self.shape, dtype_named(self.kind).itemsize)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.file_shape) * np.dtype(self.dtype).itemsize


def in_file_order(arrays: Iterable[StoredArray]) -> list[StoredArray]:
    """The order of the arrays in a file: wide types first, so that every array is aligned to its type; then by name."""
    return sorted(arrays, key=lambda array: (-RANKS[array.dtype], array.name))


def write(
    file: BufferedIOBase, arrays: Sequence[StoredArray], metadata: Mapping[str, str], stream: Iterator[np.ndarray]
) -> None:
    """Write a file. `arrays` are in the order of `in_file_order`.

    `stream` gives the elements of these arrays in C order. It may divide an array into several arrays of any shape.
    `write` keeps no reference to one of them when it takes the next.
    """
    file.write(_header(arrays, metadata))
    stream = filter(np.size, stream)  # an array without elements may be in the stream or not
    for stored in arrays:
        missing_bytes = stored.size_bytes
        while missing_bytes:
            data = _bytes_of(next(stream), stored)
            missing_bytes -= len(data)
            assert missing_bytes >= 0, (stored, missing_bytes)
            file.write(data)
            del data  # before the next elements arrive


def _header(arrays: Sequence[StoredArray], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    first = 0
    for array in arrays:
        stop = first + array.size_bytes
        entries[array.name] = {"dtype": CODES[array.dtype], "shape": array.file_shape, "data_offsets": [first, stop]}
        first = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the arrays begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _bytes_of(elements: np.ndarray, stored: StoredArray) -> memoryview:
    """The bytes of elements, in C order and little-endian. Elements that are already stored like this are not copied."""
    assert elements.dtype.name == stored.kind, (stored, elements.dtype)
    return np.ascontiguousarray(elements, elements.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
