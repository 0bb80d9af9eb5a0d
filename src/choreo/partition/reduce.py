"""`all_reduce` at one of N replicas, which holds S/N of the S shards: combine its own shards, then combine over the replicas.

    full program     h = psum(x[S, ...], axes=0);  mean = h / S
    at a replica     h = psum over replicas of psum(x[S/N, ...], axes=0);  mean = h / S

All values of one dtype are combined over the replicas as one vector: twenty collectives cost ten times as much as one.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax

from choreo import _compat
from choreo.partition.lattice import Demand, Form, Get, Mixes
from choreo.partition.program import Axis
from choreo.roles import find_reduction

REPLICA_AXIS = "choreo_replica"
"""The name of the mapped axis over which the replicas of a group combine values."""
COMBINING = ("psum", "pmax")
"""The primitives in an `all_reduce` that combine shards."""


class AllReduce:
    """The `Way` of an `all_reduce` call. The call has the same results at every replica."""

    def __init__(self, eqn: jec.JaxprEqn, inner: jec.ClosedJaxpr, forms: Sequence[Form]):
        self.inner, self.native = inner, [None] * len(eqn.outvars)
        self.axes, self.early = _reduced_axes(inner.jaxpr)
        for form, axis in zip(forms, self.axes, strict=True):
            if not form.whole and form.axis != axis:
                raise Mixes("`all_reduce` was differentiated, or combines something other than shards")

    def demand(self, outs: Sequence[bool]) -> Demand:
        return [{axis} for axis in self.axes]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        jaxpr = self.inner.jaxpr
        held: dict[Any, Any] = dict(zip(jaxpr.constvars, self.inner.consts, strict=True))
        held.update((var, get(i, axis)) for i, (var, axis) in enumerate(zip(jaxpr.invars, self.axes, strict=True)))

        def read(var: Any) -> Any:
            return var.val if isinstance(var, jec.Literal) else held[var]

        for eqn in self.early:
            held.update(zip(eqn.outvars, _compat.bind(eqn, eqn.params, [read(v) for v in eqn.invars]), strict=True))
        for name in COMBINING:
            own = [eqn.outvars[0] for eqn in self.early if eqn.primitive.name == name]
            held.update(zip(own, over_replicas(name, [held[var] for var in own]), strict=True))
        for eqn in jaxpr.eqns:
            if eqn not in self.early:
                held.update(zip(eqn.outvars, _compat.bind(eqn, eqn.params, [read(v) for v in eqn.invars]), strict=True))
        return [read(var) for var in jaxpr.outvars]


def over_replicas(name: str, values: list[jax.Array]) -> list[jax.Array]:
    """Combine values over the replicas of the group, with one collective per dtype."""
    combine = {"psum": lax.psum, "pmax": lax.pmax}[name]
    results: list[Any] = list(values)
    for dtype in dict.fromkeys(value.dtype for value in values):
        chosen = [i for i, value in enumerate(values) if value.dtype == dtype]
        vector = combine(jnp.concatenate([values[i].reshape(-1) for i in chosen]), REPLICA_AXIS)
        start = 0
        for i in chosen:
            results[i] = vector[start : start + values[i].size].reshape(values[i].shape)
            start += values[i].size
    return results


def _reduced_axes(jaxpr: Any) -> tuple[tuple[Axis, ...], list[jec.JaxprEqn]]:
    """Return the axis along which each operand is combined, and the equations that combine, with the
    transposes and conversions before them.

    `jaxpr`: the program of an `all_reduce`, as `vmap` over the shards made it.
    """
    origin = {var: (i, tuple(range(len(var.aval.shape)))) for i, var in enumerate(jaxpr.invars)}
    axes: list[Axis] = [None] * len(jaxpr.invars)
    early = []
    for eqn in jaxpr.eqns:
        name, source = eqn.primitive.name, eqn.invars[0]
        given = origin.get(source) if not isinstance(source, jec.Literal) else None
        if given and name == "transpose":
            i, dims = given
            origin[eqn.outvars[0]] = i, tuple(dims[d] for d in eqn.params["permutation"])
        elif given and name == "convert_element_type":  # `psum` counts booleans as integers
            origin[eqn.outvars[0]] = given
        elif given and name in COMBINING and len(eqn.params["axes"]) == 1:
            i, dims = given
            axes[i] = dims[eqn.params["axes"][0]]
        elif name in (*COMBINING, "transpose"):
            raise Mixes("`all_reduce` was differentiated")
        else:
            continue
        early.append(eqn)
    others = [eqn.invars for eqn in jaxpr.eqns if eqn not in early]
    for var in [var for invars in (*others, jaxpr.outvars) for var in invars if not isinstance(var, jec.Literal)]:
        if var in origin and axes[origin[var][0]] is not None:
            raise Mixes("`all_reduce` was differentiated: a value that it combines is also used in another way")
    return tuple(axes), early


def combines(eqn: jec.JaxprEqn) -> bool:
    """Is there an `all_reduce` in this equation?"""
    return find_reduction(_compat.call_name(eqn)) is not None or any(
        combines(e) for inner in _compat.inner_jaxprs(eqn) for e in inner.jaxpr.eqns
    )
