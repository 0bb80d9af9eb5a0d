"""Write a safetensors file array by array, so that only one array must be in memory at a time.

    │ 8 bytes: size of the header │ header: JSON │ array │ array │ ...

The library `safetensors` writes the same bytes, but needs all arrays at once (`serialize_file` takes a pointer to each of them).
A run with workers has its arrays in other processes, and a replay can be larger than half of the memory. So this module writes
the format itself. Files are read with the library.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedIOBase

import numpy as np

CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "int32": "I32",
    "uint32": "U32", "float32": "F32", "float64": "F64", "int64": "I64", "uint64": "U64",
}  # fmt: skip
"""The types that a file can hold, by their names in numpy, in the order of the library."""
RANKS = {name: rank for rank, name in enumerate(CODES)}


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """What the header of a file says about one array."""

    name: str
    """The name of the array."""
    dtype: str
    """The name of its type, one of `CODES`."""
    shape: tuple[int, ...]
    """Its shape."""

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * np.dtype(self.dtype).itemsize


def in_file_order(arrays: Iterable[StoredArray]) -> list[StoredArray]:
    """The order of the arrays in a file: wide types first, so that every array is aligned to its type; then by name."""
    return sorted(arrays, key=lambda array: (-RANKS[array.dtype], array.name))


def write(
    file: BufferedIOBase, arrays: Sequence[StoredArray], metadata: Mapping[str, str], read: Iterator[np.ndarray]
) -> None:
    """Write a file. `read` gives the arrays in the order of `arrays`, which is that of `in_file_order`.

    Each array is dropped before the next one is taken from `read`.
    """
    file.write(_header(arrays, metadata))
    for stored in arrays:
        data = _bytes_of(next(read), stored)
        file.write(data)
        del data  # before the next array arrives


def _header(arrays: Sequence[StoredArray], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    first = 0
    for array in arrays:
        stop = first + array.size_bytes
        entries[array.name] = {"dtype": CODES[array.dtype], "shape": array.shape, "data_offsets": [first, stop]}
        first = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the arrays begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _bytes_of(array: np.ndarray, stored: StoredArray) -> memoryview:
    """The bytes of an array in C order and little-endian; the same memory, if the array is stored like this."""
    assert array.shape == stored.shape and array.dtype.name == stored.dtype, (stored, array.shape, array.dtype)
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return plain.reshape(-1).view(np.uint8).data
