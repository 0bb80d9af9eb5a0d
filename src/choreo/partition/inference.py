"""Abstract interpretation: the form of every value of a program for one named axis, proved equation by equation.

    infer(jaxpr, forms of inputs)       every equation in order -> Inference (`inferred.py`)
    infer_eqn(eqn, forms of operands)   one equation            -> InferredEqn, with the forms of its results and its `Way`

`lattice.py` describes the lattice. `infer_eqn` looks for a way to run an equation on blocks, in this order:

    host method  ->  mapped fragment  ->  all_reduce  ->  call  ->  control flow  ->  rule of the primitive
    ->  gather or scatter of each environment's own rows

If there is no way, the results are mixed. They are whole, however, if all operands are whole and the equation gives the same
results at every replica.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jec

from choreo import _compat
from choreo.host import HostMethod
from choreo.partition.by_rule import by_rule
from choreo.partition.control_flow import CONTROL_FLOW, Called
from choreo.partition.inferred import Inference, InferredEqn
from choreo.partition.lattice import ENV_AXIS, WHOLE, Form, Mixed, Mixes, Size, Way
from choreo.partition.mapped import Mapped, with_vouch
from choreo.partition.on_host import OnHost
from choreo.partition.program import Axis
from choreo.partition.reduce import AllReduce
from choreo.partition.row_numbers import Fact, Facts, OwnRows
from choreo.roles import SHARD_AXIS, SHARD_NUMBERS, Call, find_call, find_reduction


def infer(
    closed: jec.ClosedJaxpr, forms: Sequence[Form], size: Size, at: str = "", facts: Sequence[Fact] = ()
) -> Inference:
    """The form of every variable of a program at block size `size`, given the forms of its inputs.

    `at`: the user's line, for equations that have no line of their own; `facts`: what is known of the inputs (`row_numbers.py`).
    """
    jaxpr, proved = closed.jaxpr, Facts(closed, facts)
    known: dict[Any, Form] = dict.fromkeys(jaxpr.constvars, WHOLE) | dict(zip(jaxpr.invars, forms, strict=True))

    def form(var):
        return WHOLE if isinstance(var, jec.Literal) else known[var]

    eqns = []
    for eqn in jaxpr.eqns:
        # Inside a function of JAX, report the line of the user's call; elsewhere, each equation has its own line.
        line = at if _compat.is_written_by_jax(closed) else _compat.where(eqn) or at
        inferred = infer_eqn(eqn, [form(v) for v in eqn.invars], size, line, proved.of(eqn.invars))
        known.update(zip(eqn.outvars, inferred.outs, strict=True))
        eqns.append(inferred)
    return Inference(closed, size, eqns, [form(v) for v in jaxpr.outvars])


def infer_eqn(
    eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size, at: str = "", facts: Sequence[Fact] = ()
) -> InferredEqn:
    """The forms of an equation's results, and its way to run on blocks.

    `at`: the user's line, if it is known; `facts`: what is known of its operands (`row_numbers.py`).
    """
    at = at or _compat.where(eqn)
    forms = [_in_blocks(var, form, size, at) for var, form in zip(eqn.invars, forms, strict=True)]
    call = find_call(_compat.call_name(eqn))
    # Each site calls a host method for its own environments, even if the operands are the same everywhere.
    on_host = call is not None and isinstance(call.host, HostMethod)
    impure = None if call is not None and call.host else _compat.impure_primitive(eqn)
    declared = _declared_axes(eqn, call, size)
    if declared is not None:
        forms = [Form(True, axis) if form.whole else form for form, axis in zip(forms, declared, strict=True)]
    whole = all(form.whole for form in forms) and not on_host and impure is None and declared is None
    try:
        if impure is not None and _compat.inner_jaxpr(eqn) is None:
            # Every replica would call the primitive, and each could get a different result.
            raise Mixes(f"`{impure}` may give a different result in every call")
        way = _find_way(eqn, forms, size, at, facts)
        native = way.native if way else [None] * len(eqn.outvars)
    except Mixes as reason:
        mixed = reason.args[0] if isinstance(reason.args[0], Mixed) else Mixed(str(reason), at)
        way, native = None, [mixed] * len(eqn.outvars)
    outs = []
    for var, axis in zip(eqn.outvars, native, strict=True):
        if whole:
            known = axis if isinstance(axis, int) else None
            outs.append(Form(True, known if way else _env_axis(eqn, var, size)))
        elif isinstance(axis, Mixed):
            outs.append(Form(False, None, with_vouch(axis, call)))
        else:
            outs.append(Form(axis is None, axis))
    return InferredEqn(eqn, whole, way, tuple(outs))


def _declared_axes(eqn: jec.JaxprEqn, call: Call | None, size: Size) -> list[Axis] | None:
    """For a fragment that is called under the `jax.vmap` of the divided axis: the mapped axis of each operand. None
    for every other equation.

    A call under this `vmap` declares which axis is divided, as the outputs of an environment do for the env axis. So its
    results are blocks, even if all operands are whole.
    """
    if call is None or not size.is_mapped or len(eqn.invars) != len(call.in_avals):
        return None
    if any(not _is_operand(var, call, i) for i, var in enumerate(eqn.invars)):
        return None  # under `grad`, an equation of the same name may be the transposed program, with other operands
    level = next((k for k, vmap in enumerate(call.vmaps) if vmap.axis_name == size.name), None)
    if level is None or not any(axis is not None for axis in call.vmaps[level].in_axes):
        return None
    axes: list[Axis] = list(call.vmaps[level].in_axes)
    for outer in call.vmaps[level + 1 :]:  # each vmap further out inserts one more axis
        axes = [
            axis + 1 if axis is not None and inserted is not None and inserted <= axis else axis
            for axis, inserted in zip(axes, outer.in_axes, strict=True)
        ]
    return axes


def _is_operand(var: Any, call: Call, position: int) -> bool:
    """Does the operand have the shape that the recorded call has at this position, with the axes of all vmaps inserted?"""
    shape = list(call.in_avals[position].shape)
    for vmap in call.vmaps:
        axis = vmap.in_axes[position]
        if axis is not None:
            shape.insert(axis, vmap.size)
    return tuple(shape) == var.aval.shape


def _in_blocks(var: Any, form: Form, size: Size, at: str) -> Form:
    """The form of an operand for blocks of this size. The operand can come from a group with a different number of
    blocks, which divides it along an axis whose length is not a multiple of `size.blocks`. Then this axis cannot be used: a
    whole operand stays whole, any other operand is mixed."""
    if form.axis is None or var.aval.shape[form.axis] % size.blocks == 0:
        return form
    if form.whole:
        return Form(True)
    why = f"an axis of length {var.aval.shape[form.axis]} cannot be divided into {size.blocks} blocks"
    return Form(False, None, Mixed(why, at))


def _env_axis(eqn: jec.JaxprEqn, var: Any, size: Size) -> Axis:
    """A proposal for the axis of a whole value along which readers may work with blocks. A wrong proposal costs only time."""
    if size.name == SHARD_AXIS:  # another axis may have the same small length
        return 0 if _compat.call_name(eqn) == SHARD_NUMBERS else None
    if size.name != ENV_AXIS:
        return None
    return next((d for d, n in enumerate(getattr(var.aval, "shape", ())) if n == size.full), None)


def _find_way(eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size, at: str, facts: Sequence[Fact]) -> Way | None:
    """How an equation runs on blocks; None if all operands are whole and none has a proposed axis. Raises `Mixes` if the equation
    cannot run on blocks."""
    call, inner = find_call(_compat.call_name(eqn)), _compat.inner_jaxpr(eqn)
    on_host, reduces = call is not None and isinstance(call.host, HostMethod), find_reduction(_compat.call_name(eqn))
    reads_all = inner is None or on_host or reduces  # in other calls, some results may not depend on a mixed operand
    if reads_all and (mixed := next((form.mixed for form in forms if form.mixed), None)):
        raise Mixes(mixed)
    if on_host:
        return OnHost(eqn, forms, size)
    if call and (mapped := Mapped.of(eqn, call, size)) and mapped.accepts(forms):
        return mapped
    if all(form == WHOLE for form in forms) and (inner is None or _compat.impure_primitive(eqn) is None):
        return None
    if inner is not None:
        return AllReduce(eqn, inner, forms) if reduces else Called(infer(inner, forms, size, at, facts))
    if eqn.primitive in CONTROL_FLOW:
        return CONTROL_FLOW[eqn.primitive](eqn, forms, lambda inner, forms: infer(inner, forms, size, at))
    try:
        return by_rule(eqn, forms, size)
    except Mixes:
        if facts and (own := OwnRows.of(eqn, forms, facts, size)):
            return own
        raise
