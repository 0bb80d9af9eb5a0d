"""The table of all array types that can leave a compiled program. Each type has a name.

    "float32" -> a type of numpy        "bfloat16" -> a type of ml_dtypes, which is imported when it is first needed

Checkpoints, and messages between processes, contain these names. They cannot contain `dtype.str`: for bfloat16, this is `<V2`,
which says only that an element has two bytes. numpy and JAX store a number of 4 bits in one byte, and messages do the same.
This module does not import JAX.
"""

import functools

import numpy as np

NUMPY = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip
FOUR_BITS = ("int4", "uint4", "float4_e2m1fn")
EXTENDED = (
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", *FOUR_BITS,
)  # fmt: skip
"""Types of ml_dtypes. int2 and uint2 are left out: JAX cannot export them, and XLA on CPU aborts the process when it
concatenates two such arrays."""
NAMES = frozenset((*NUMPY, *EXTENDED))
KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
"""JAX's built-in random generators, which every process has."""


@functools.cache
def dtype_named(name: str) -> np.dtype:
    """The type with this name. Raises KeyError if the name is not in the table."""
    if name not in NAMES:
        raise KeyError(name)
    if name in NUMPY:
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))


@functools.cache
def name_of(dtype: np.dtype) -> str:
    """The name of a type, which may have either byte order. Raises KeyError if the type is not in the table."""
    if dtype.name not in NAMES or dtype_named(dtype.name) != dtype.newbyteorder("="):
        raise KeyError(dtype.name)
    return dtype.name
