"""The types of arrays that may leave a compiled program, by name: a closed table.

    "float32" -> numpy's own        "bfloat16" -> of ml_dtypes, which is imported when such a type is first asked for

A name is what travels between processes and what a checkpoint stores. `dtype.str` will not do: it is `<V2` for bfloat16.
numpy and JAX hold numbers of 4 bits one per byte, and so they travel. Nothing here imports JAX.
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
"""Those of ml_dtypes. int2 and uint2 are not among them: JAX cannot export them, and XLA on CPU ends the process when it
joins two such arrays."""
NAMES = frozenset((*NUMPY, *EXTENDED))
KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
"""JAX's own random generators: every process has them."""


@functools.cache
def dtype_named(name: str) -> np.dtype:
    """The type of this name; KeyError if the table has none."""
    if name not in NAMES:
        raise KeyError(name)
    if name in NUMPY:
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))


@functools.cache
def name_of(dtype: np.dtype) -> str:
    """The name of a type, in whatever byte order it is held; KeyError if the table has none."""
    if dtype.name not in NAMES or dtype_named(dtype.name) != dtype.newbyteorder("="):
        raise KeyError(dtype.name)
    return dtype.name
