"""How a value can be had at a replica: the words of `blocks.py`."""

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax import lax

from choreo.partition.split import Axis, Size


class Mixed(NamedTuple):
    """Why a value cannot be had at a replica."""

    why: str
    at: str
    """The user's line."""
    fragment: str = ""
    """The fragment in which it happens, if it is known."""
    vouch: str = ""
    """The mark with which the user may vouch for that fragment, if nothing but proof is missing."""
    group: str = ""
    """Where that fragment runs."""


class Form(NamedTuple):
    """How a value can be had at a replica; see the module's docstring."""

    whole: bool
    axis: Axis = None
    mixed: Mixed | None = None


WHOLE = Form(True)
Demand = Sequence[Set[Axis]]
"""For each of several values, the pieces that are needed of it."""
Get = Callable[[int, Axis], Any]
"""The piece of operand number i."""


@runtime_checkable
class Way(Protocol):
    """How an equation computes on blocks."""

    @property
    def native(self) -> Sequence[Axis | Mixed]:
        """The one piece of each result that this way computes, or why there is none."""
        ...

    def demand(self, outs: Sequence[bool]) -> Demand: ...
    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]: ...


def cut(value: Any, axis: Axis, index: Any, size: Size) -> Any:
    """Block `index` of a whole value."""
    if axis is None:
        return value
    rows = size.of(value.shape[axis])
    return lax.dynamic_slice_in_dim(value, index * rows, rows, axis)


def piece_type(aval: Any, axis: Axis, size: Size | None) -> jax.ShapeDtypeStruct:
    """The type of a block along `axis`, given the type of the whole value; `size` None: there are no blocks."""
    shape = list(aval.shape)
    if axis is not None and size is not None:
        shape[axis] = size.of(shape[axis])
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype)
