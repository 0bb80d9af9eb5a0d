"""`q[jnp.arange(E), a]` and `x.at[jnp.arange(E), a].set(v)`: each of the E environments reads or writes its own row.

Such a `gather` or `scatter` runs on blocks only if the indices into the env axis are known to be the row numbers. A
second, small abstract interpretation finds this out. It derives a *fact* about each value, equation by equation, beginning at
`iota`:

    k           every element of the value is its own index along axis k
    (k, None)   the same for column 0 of the last axis (which is not k); nothing is known of column 1
    FALSE       every element is False: for example the test whether an index is negative
    None        nothing is known

A fact is kept only while the dtype can hold all row numbers. The numbers count the rows of the full program. A replica
subtracts the number of its first row from them, and then uses them as indices into its block of the operand.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from choreo import _compat
from choreo.partition.lattice import Demand, Form, Get, Size
from choreo.partition.program import Axis

FALSE = "false"
Fact = int | tuple[Axis, ...] | str | None
"""What is known of a value: see the list above."""


class Facts:
    """The facts about the variables of a program. `given`: those about its inputs; empty if nothing is known."""

    def __init__(self, closed: jec.ClosedJaxpr, given: Sequence[Fact]):
        jaxpr = closed.jaxpr
        self.known: dict[Any, Fact] = dict(zip(jaxpr.invars, given, strict=True)) if given else {}
        self.known.update((v, _of_constant(c)) for v, c in zip(jaxpr.constvars, closed.consts, strict=True))
        for eqn in jaxpr.eqns:
            self.known.update(zip(eqn.outvars, _results(eqn, self.of(eqn.invars)), strict=True))

    def of(self, variables: Sequence[Any]) -> list[Fact]:
        return [_of_constant(v.val) if isinstance(v, jec.Literal) else self.known.get(v) for v in variables]


def _results(eqn: jec.JaxprEqn, facts: list[Fact]) -> list[Fact]:
    if (inner := _compat.inner_jaxpr(eqn)) is not None:
        return Facts(inner, facts).of(inner.jaxpr.outvars)
    rule = RULES.get(eqn.primitive)
    fact = rule(eqn, facts) if rule else None
    return [fact if fact is None or fact == FALSE or _can_count(eqn.outvars[0].aval, fact) else None] * len(eqn.outvars)


def _can_count(aval: Any, fact: Any) -> bool:
    """Can the dtype hold the numbers of all rows?"""
    axes = [axis for axis in (fact if isinstance(fact, tuple) else (fact,)) if axis is not None]
    return jnp.issubdtype(aval.dtype, jnp.integer) and all(aval.shape[k] - 1 <= jnp.iinfo(aval.dtype).max for k in axes)


def _of_constant(array: Any) -> Fact:
    """The fact about a constant: an array that the program closes over may be `np.arange`."""
    shape = getattr(array, "shape", ())
    if shape and array.dtype == bool:
        return None if np.any(np.asarray(array)) else FALSE
    if not shape or not jnp.issubdtype(array.dtype, jnp.integer):
        return None
    longest = max(range(len(shape)), key=lambda d: shape[d])
    numbers = np.arange(shape[longest]).reshape([-1 if d == longest else 1 for d in range(len(shape))])
    return longest if np.array_equal(np.asarray(array), np.broadcast_to(numbers, shape)) else None


def _iota(eqn, facts):
    return int(eqn.params["dimension"])


def _same(eqn, facts):
    """A copy, or a change of dtype. If the new dtype cannot hold the numbers, `_can_count` drops the fact."""
    return facts[0]


def _broadcast_in_dim(eqn, facts):
    (fact, *_), dims, shape = facts, eqn.params["broadcast_dimensions"], eqn.params["shape"]
    if fact == FALSE:
        return FALSE
    # If an axis of length 1 is broadcast, all its elements are 0: no row numbers.
    if not isinstance(fact, int) or shape[dims[fact]] != _shape(eqn.invars[0])[fact]:
        return None
    return int(dims[fact])


def _reshape(eqn, facts):
    (fact, *_), old, new = facts, _shape(eqn.invars[0]), eqn.params["new_sizes"]
    if not isinstance(fact, int) or eqn.params.get("dimensions") is not None:
        return None
    # An axis is kept if its length and the product of the dimensions before it stay the same.
    before = int(np.prod(old[:fact]))
    return next((d for d in range(len(new)) if new[d] == old[fact] and int(np.prod(new[:d])) == before), None)


def _squeeze(eqn, facts):
    fact, rank = facts[0], len(_shape(eqn.invars[0]))
    removed = {int(d) % rank for d in eqn.params["dimensions"]}
    return fact - sum(d < fact for d in removed) if isinstance(fact, int) and fact not in removed else None


def _transpose(eqn, facts):
    return list(eqn.params["permutation"]).index(facts[0]) if isinstance(facts[0], int) else None


def _lt(eqn, facts):
    """`row number < 0` is FALSE."""
    zero = eqn.invars[1]
    below_zero = isinstance(zero, jec.Literal) and not _shape(zero) and zero.val == 0
    return FALSE if isinstance(facts[0], int) and below_zero else None


def _select_n(eqn, facts):
    return facts[1] if facts[0] == FALSE else None


def _concatenate(eqn, facts):
    last = len(_shape(eqn.outvars[0])) - 1
    if eqn.params["dimension"] != last:
        return None
    columns: list[Axis] = []
    for var, fact in zip(eqn.invars, facts, strict=True):
        columns += _columns(fact, last, _shape(var)[last])
    return tuple(columns) if any(k is not None for k in columns) else None


def _columns(fact: Fact, last: int, count: int) -> tuple[Axis, ...]:
    """The fact about each column of the last axis."""
    if isinstance(fact, tuple):
        return fact
    return (fact if isinstance(fact, int) and fact != last else None,) * count


RULES = {
    primitives.broadcast_in_dim_p: _broadcast_in_dim,
    primitives.concatenate_p: _concatenate,
    primitives.convert_element_type_p: _same,
    primitives.copy_p: _same,
    primitives.iota_p: _iota,
    primitives.lt_p: _lt,
    primitives.reshape_p: _reshape,
    primitives.select_n_p: _select_n,
    primitives.squeeze_p: _squeeze,
    primitives.transpose_p: _transpose,
}
SCATTERS = {
    primitives.scatter_p,
    primitives.scatter_add_p,
    primitives.scatter_mul_p,
    primitives.scatter_min_p,
    primitives.scatter_max_p,
    *_compat.primitives(["scatter-sub"]),
}


class OwnRows:
    """The way of a gather or scatter in which position i along an axis of the indices reads or writes row i of the operand.

    Proof. Let the index into axis d of the operand be, everywhere, the position i along axis k of the indices. Let both axes
    have the same length, and let a slice take one row of axis d. Row i is always in range, so the mode for indices out of
    range does not matter: position i reads (writes) row i and no other row. The other indices only select the place in the
    row. So block r of the results (of the written operand) needs block r of the operand, of the indices and of the updates,
    and nothing else. In the block, row i has the number i - (number of the block's first row). Sorted indices stay sorted,
    and unique indices stay unique.
    """

    def __init__(self, eqn: jec.JaxprEqn, option: "_Option", size: Size):
        self.eqn, self.option, self.size = eqn, option, size
        self.native = [option.out]

    @staticmethod
    def of(eqn: jec.JaxprEqn, forms: Sequence[Form], facts: Sequence[Fact], size: Size) -> "OwnRows | None":
        if eqn.primitive is not primitives.gather_p and eqn.primitive not in SCATTERS:
            return None
        for option in _options(eqn, facts[1]):
            if all(form.whole or form.axis == axis for form, axis in zip(forms, option.ins, strict=True)):
                return OwnRows(eqn, option, size) if option.length % size.blocks == 0 else None
        return None

    def demand(self, outs: Sequence[bool]) -> Demand:
        return [{axis} for axis in self.option.ins]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        operand, indices, *updates = [get(i, axis) for i, axis in enumerate(self.option.ins)]
        first = jnp.asarray(index * self.size.of(self.option.length), indices.dtype)
        here = jnp.arange(indices.shape[-1]) == self.option.column
        local = indices - jnp.broadcast_to(jnp.where(here, first, jnp.zeros_like(first)), indices.shape)
        return _compat.bind(self.eqn, self.eqn.params, [operand, local, *updates])


class _Option(NamedTuple):
    """One choice of axes along which a gather or scatter can be divided into rows."""

    length: int
    """The number of rows."""
    column: int
    """The column of the indices that holds the row numbers."""
    ins: tuple[Axis, ...]
    """The axis along which each operand is a block."""
    out: Axis
    """The axis along which the result is a block."""


def _options(eqn: jec.JaxprEqn, fact: Fact) -> Iterator[_Option]:
    operand, indices = map(_shape, eqn.invars[:2])
    n = eqn.params["dimension_numbers"]
    if eqn.primitive is primitives.gather_p:
        dims, windows, paired = n.start_index_map, n.offset_dims, n.start_indices_batching_dims
        single_row = [d for d in dims if eqn.params["slice_sizes"][d] == 1]
        picked = _shape(eqn.outvars[0])
    else:
        dims, windows, paired = n.scatter_dims_to_operand_dims, n.update_window_dims, n.scatter_indices_batching_dims
        single_row = n.inserted_window_dims
        picked = _shape(eqn.invars[2])
    # The axes of the picked (or written) array are those of the indices except the last, in their order, and those of the slices.
    around = [axis for axis in range(len(picked)) if axis not in windows]
    for column, (d, k) in enumerate(zip(dims, _columns(fact, len(indices) - 1, len(dims)), strict=True)):
        if k is None or k in paired or d not in single_row or operand[d] != indices[k]:
            continue
        if eqn.primitive is primitives.gather_p:
            yield _Option(operand[d], column, (int(d), k), around[k])
        else:
            yield _Option(operand[d], column, (int(d), k, around[k]), int(d))


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape
