"""Fragments called under `vmap`. Such a fragment is a program for one environment, so the primitives in it need no rule."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np

from choreo import _compat
from choreo.partition.independent import obstacle
from choreo.partition.lattice import Demand, Form, Get, Mixed, Size
from choreo.partition.program import Axis
from choreo.roles import Call, find_call, without_number


class Mapped:
    """The way of a fragment that is called under `vmap` and does not mix environments. `independent.py` proves this, or the
    user vouches for it.

    This way runs `vmap` of the program for one environment, at block size. This program was recorded when the fragment was called.
    The record is trusted only if `vmap` over all environments gives exactly the program in the equation: under `grad`, an
    equation of the same name and types may be the transposed program.
    """

    def __init__(self, call: Call, native: tuple[Axis, ...], size: Size):
        program = _closed(call)
        self.closed = jec.ClosedJaxpr(_compat.rename_in(program.jaxpr, without_number), program.consts)
        (vmap,) = call.vmaps
        self.native, self.in_axes = native, vmap.in_axes
        self.block = size.of(vmap.size)
        self.over_axis = vmap.axis_name == size.name if size.is_mapped else vmap.size == size.full

    @staticmethod
    def of(eqn: jec.JaxprEqn, call: Call, size: Size) -> "Mapped | None":
        """The way of a call. None if this way does not apply: the call is not mapped over environments, the record does not fit the
        equation, or environments may mix and the user does not vouch for the fragment."""
        if len(call.vmaps) != 1 or call.vmaps[0].size % size.blocks or call.host or call.jaxpr is None:
            return None
        if eqn.effects and not call.independent:
            return None
        if len(eqn.invars) != len(call.in_avals):  # the fragment closes over traced values, which the record lacks
            return None
        out_axes = _mapped_out_axes(call, _text(eqn.params["jaxpr"]))
        return Mapped(call, out_axes, size) if out_axes is not None else None

    def accepts(self, forms: Sequence[Form]) -> bool:
        """Are the operands available along the axes over which the call is mapped?"""
        if len(forms) != len(self.in_axes):
            return False
        pairs = list(zip(forms, self.in_axes, strict=True))
        fits = all(form.whole or (axis is not None and form.axis == axis) for form, axis in pairs)
        # If the mapped axis is neither declared by its name nor as long as the env axis, at least one operand must be a block: this
        # proves that the axis is divided.
        return fits and (self.over_axis or any(not form.whole for form in forms))

    def demand(self, outs: Sequence[bool]) -> Demand:
        _, used = _compat.prune(self.closed, outs)
        return [{axis} if use else set() for axis, use in zip(self.in_axes, used, strict=True)]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        pruned, used = _compat.prune(self.closed, outs)
        in_axes = [axis for axis, use in zip(self.in_axes, used, strict=True) if use]
        out_axes = [axis for axis, out in zip(self.native, outs, strict=True) if out]
        blocks = [get(i, axis) for i, (axis, use) in enumerate(zip(self.in_axes, used, strict=True)) if use]
        run_one = functools.partial(_call_one, pruned)
        if all(axis is None for axis in in_axes):  # no operand is mapped, and `vmap` refuses such a call
            results = [jnp.stack([x] * self.block, axis) if axis is not None else x
                       for x, axis in zip(run_one(*blocks), out_axes, strict=True)]  # fmt: skip
        else:
            results = jax.vmap(run_one, in_axes=in_axes, out_axes=out_axes, axis_size=self.block)(*blocks)
        rest = iter(results)
        return [next(rest) if out else None for out in outs]


def trusted(eqn: jec.JaxprEqn) -> Iterator[Call]:
    """Find, inside an equation, the mapped fragments for which the user vouches and Choreo has no proof."""
    call = find_call(_compat.call_name(eqn))
    if call and call.independent and call.vmaps and call.jaxpr is not None and obstacle(call.jaxpr):
        yield call
    for inner in _compat.inner_jaxprs(eqn):
        for each in inner.jaxpr.eqns:
            yield from trusted(each)


def with_vouch(mixed: Mixed, call: Call | None) -> Mixed:
    """The reason, with the decorator by which the user can vouch for the fragment; unchanged if vouching would not help."""
    unproved = call is not None and call.vmaps and not call.independent and call.jaxpr and obstacle(call.jaxpr)
    if call is None or not unproved or mixed.vouch:
        return mixed
    return mixed._replace(
        fragment=mixed.fragment or call.name, vouch=f'@choreo.fragment("{call.role}", independent=True)'
    )


def _closed(call: Call) -> jec.ClosedJaxpr:
    assert call.jaxpr is not None, "`Mapped.of` has checked this"
    return call.jaxpr


def _call_one(closed: jec.ClosedJaxpr, *values: Any) -> list[Any]:
    return _compat.eval_jaxpr(closed, values)


@functools.lru_cache(maxsize=1024)
def _mapped_out_axes(call: Call, text: str) -> tuple[Axis, ...] | None:
    """The mapped axis of each result. None if environments may mix, or if `vmap` of the recorded program is not the program of
    the equation (`text`)."""
    if not call.independent and obstacle(_closed(call)):
        return None
    try:
        actual = _map_call(call, call.vmaps[0].size)
        used = {n for aval in [*call.in_avals, *(v.aval for v in actual.outvars)] for n in aval.shape}
        odd = next(n for n in (7919, 7927, 7933, 7937) if n not in used)  # a length that no other axis has
        other = _map_call(call, odd)
    except NameError:  # a collective over the mapped axis, which could mix environments
        return None
    if _text(actual.params["jaxpr"]) != text:
        return None
    shapes = zip(_shapes(other.outvars), _shapes(_closed(call).jaxpr.outvars), strict=True)
    return tuple(None if len(mapped) == len(one) else mapped.index(odd) for mapped, one in shapes)


def _shapes(variables: Sequence[Any]) -> list[tuple[int, ...]]:
    return [v.aval.shape for v in variables]


def _map_call(call: Call, size: int) -> jec.JaxprEqn:
    def insert(aval, axis):
        return _compat.struct_of(aval, aval.shape if axis is None else (*aval.shape[:axis], size, *aval.shape[axis:]))

    in_axes = call.vmaps[0].in_axes
    args = [insert(aval, axis) for aval, axis in zip(call.in_avals, in_axes, strict=True)]
    one = jax.jit(functools.partial(_call_one, _closed(call)))
    closed = jax.make_jaxpr(jax.vmap(one, in_axes=in_axes, axis_size=size))(*args)
    return next(eqn for eqn in closed.jaxpr.eqns if _compat.call_name(eqn) is not None)


def _text(closed: jec.ClosedJaxpr) -> str:
    """A program as text, with the contents of its arrays, which JAX does not print."""
    arrays = "".join(
        f"{np.asarray(c).tobytes()!r}" if not _compat.is_key(c.dtype) else repr(c) for c in _arrays(closed)
    )
    return f"{closed.jaxpr.pretty_print(use_color=False)}{arrays}"


def _arrays(closed: jec.ClosedJaxpr) -> Iterator[Any]:
    """All constants of a program. With `jax_use_simplified_jaxpr_constants`, JAX stores constants as literals."""
    yield from closed.consts
    for eqn in closed.jaxpr.eqns:
        yield from (var.val for var in eqn.invars if isinstance(var, jec.Literal) and np.shape(var.val))
        for inner in _compat.inner_jaxprs(eqn):
            yield from _arrays(inner)
