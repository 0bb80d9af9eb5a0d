"""The piece of a value that one replica holds."""

from typing import Any

from choreo.partition.program import Axis


def block(value: Any, axis: Axis, r: int, n: int) -> Any:
    """Block `r` of `n` equal blocks of a value along an axis, or the whole value if `axis` is None."""
    if axis is None or n == 1:
        return value
    size = value.shape[axis] // n
    return value[(slice(None),) * axis + (slice(r * size, (r + 1) * size),)]
