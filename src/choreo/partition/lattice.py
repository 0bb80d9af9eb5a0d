"""The abstract domain: what a replica of a group can compute of a value, if it holds only its block of a named axis.

The proof that a program can be divided is an abstract interpretation (`inference.py`). Its *lattice element* is a `Form`:

                   mixed                  top, with a reason (`Mixed`): no replica can compute the value
                 /   |   \\
        block 0   block 1   ...           replica r can compute block r of the value along one axis, and no more
                 \\   |   /
                   whole                  bottom: every replica can compute the whole value

Forms only rise. In a loop, the forms of the carry start as the forms of its initial values, and reach a fixed point after a
few rounds.

A *transfer function*, from forms of operands to forms of results, is a `Way`: one object for one equation, which also
computes the equation on blocks. Making a `Way` raises `Mixes` if the equation cannot run on blocks. For a call, a scan or a
branch, some results can be top while the others are not.

The axis that a group divides has a name: `env`, the axis of the shards, or the `axis_name` of a `jax.vmap`. Two groups may divide
different axes: `env` and `agent`, for example. The analysis then runs once for each name, and a value has one form for each
name (`Forms`). The forms of different names say nothing about each other. A group reads only the form for the axis that the
group divides, because the group holds all of every other axis.

A *piece* of a value is the part of it that a replica holds. A piece is named by an axis: None for the whole value, k for the
replica's block along axis k.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax import lax

from choreo.partition.program import Axis
from choreo.roles import SHARD_AXIS
from choreo.types import AxisName

ENV_AXIS: AxisName = "env"
"""The name of the axis that counts environments."""


class Mixed(NamedTuple):
    """Top: why no replica can compute a value."""

    why: str
    at: str
    """The line of the user's code where environments mix."""
    fragment: str = ""
    """The fragment in which environments mix, if it is known."""
    vouch: str = ""
    """The decorator with which the user can vouch for the fragment; empty if this would not help."""
    group: str = ""
    """The group that runs the fragment."""


class Mixes(Exception):
    """Data of different environments are mixed. The argument is a `Mixed`, or only the reason as text."""


class Form(NamedTuple):
    """What a replica can compute of a value: the lattice element."""

    whole: bool
    """Can every replica compute the whole value?"""
    axis: Axis = None
    """The axis along which a replica can compute its block. For a whole value the axis is only a proposal: a reader
    may work with blocks along this axis in place of the whole."""
    mixed: Mixed | None = None
    """Why the value is neither whole nor a block; None if it is one of the two."""


WHOLE = Form(True)
Forms = Mapping[AxisName, Form]
"""The form of one value for each axis that some group divides."""
Demand = Sequence[Set[Axis]]
"""For each of several values, the pieces that are needed of it."""
Get = Callable[[int, Axis], Any]
"""(position of an operand, axis) -> the piece of this operand along this axis."""


@runtime_checkable
class Way(Protocol):
    """A transfer function: how one equation computes on blocks. Constructing it checks the forms of the operands."""

    @property
    def native(self) -> Sequence[Axis | Mixed]:
        """For each result, the one piece that this way computes, or why there is none."""
        ...

    def demand(self, outs: Sequence[bool]) -> Demand:
        """The pieces of the operands that are read to compute the results marked in `outs`."""
        ...

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        """Compute the results marked in `outs`, at replica `index`. The values returned for other results have no meaning."""
        ...


class Size(NamedTuple):
    """The axis that is divided, how long it is, and how long one block of it is."""

    full: int
    block: int
    name: AxisName = ENV_AXIS
    """The name of the axis. Choreo recognises the shard axis by the call of `shard_numbers`, and the axis of a `jax.vmap` by its
    `axis_name`, never by the length of an axis."""

    @property
    def is_mapped(self) -> bool:
        """Is this the named axis of a user's `jax.vmap`, and neither the env axis nor the shard axis?"""
        return self.name not in (ENV_AXIS, SHARD_AXIS)

    @property
    def blocks(self) -> int:
        """The number of blocks into which an axis is divided."""
        return self.full // self.block

    def of(self, length: int) -> int:
        """The number of rows in one block of an axis of this length."""
        assert length % self.blocks == 0, f"{length} rows cannot be divided into {self.blocks} blocks"
        return length // self.blocks


def slice_block(value: Any, axis: Axis, index: Any, size: Size) -> Any:
    """Block `index` of a whole value along an axis; the value itself, if `axis` is None."""
    if axis is None:
        return value
    rows = size.of(value.shape[axis])
    return lax.dynamic_slice_in_dim(value, index * rows, rows, axis)


def piece_type(aval: Any, axis: Axis, size: Size | None) -> jax.ShapeDtypeStruct:
    """The type of a piece, given the type of the whole value; `size` is None where there are no blocks."""
    shape = list(aval.shape)
    if axis is not None and size is not None:
        shape[axis] = size.of(shape[axis])
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype)
