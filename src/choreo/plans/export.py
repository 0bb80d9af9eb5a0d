"""Export programs, so that they can be sent to other processes. Segments become serialised StableHLO (`jax.export`), and types
become data that a process without JAX can read."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh

from choreo._compat import key_impl
from choreo.errors import PartitionError
from choreo.partition.collectives import over_devices, whole_type
from choreo.partition.program import ArrayType, KeyType, Loop, Program, Segment, Step, Transfer, groups_of
from choreo.partition.reduce import REPLICA_AXIS
from choreo.plans.exported_fn import ExportedFn
from choreo.types import GroupName


def export_program(
    program: Program, groups: Collection[GroupName], replicas: Mapping[GroupName, int | None]
) -> Program:
    """The part of a program that the workers of `groups` need, in a form that pickles.

    `replicas`: the number of replicas of every group. Steps in which none of `groups` takes part are left out.
    """
    steps = tuple(
        _export_step(step, groups, replicas) for step in program.steps if not groups_of(step).isdisjoint(groups)
    )
    ins, outs = (tuple(replace(p, aval=array_type(p.aval)) for p in ports) for ports in (program.ins, program.outs))
    return replace(program, steps=steps, ins=ins, outs=outs)


def _export_step(step: Step, groups: Collection[GroupName], replicas: Mapping[GroupName, int | None]) -> Step:
    if isinstance(step, Segment):
        ins = tuple(replace(given, aval=array_type(given.aval)) for given in step.ins)
        out_avals = tuple(array_type(aval) for aval in step.out_avals)
        return replace(
            step, fn=ExportedFn(export_segment(step, replicas[step.group] or 1)), ins=ins, out_avals=out_avals
        )
    if isinstance(step, Loop):
        inside = [inner for inner in step.body if not groups_of(inner).isdisjoint(groups)]
        body = tuple(_export_step(inner, groups, replicas) for inner in inside)
        parts = {g: replace(part, ys=_export_ys(part.ys)) for g, part in step.parts.items() if g in groups}
        return replace(step, body=body, parts=parts)
    if isinstance(step, Transfer):
        return replace(step, moves=tuple(replace(move, aval=array_type(move.aval)) for move in step.moves))
    return step


def _export_ys(ys: Any) -> Any:
    return tuple((ref, slot, array_type(aval)) for ref, slot, aval in ys)


def export_segment(segment: Segment, replicas: int) -> bytes:
    """A segment as serialised StableHLO. `replicas`: how many replicas the segment's group has."""
    if isinstance(segment.fn, ExportedFn):
        return segment.fn.serialized
    scalar = jax.ShapeDtypeStruct((), np.int32)
    fn, index, given = segment.fn, scalar, [given.aval for given in segment.ins]
    if segment.combines:
        fn = over_devices(segment, AbstractMesh((replicas,), (REPLICA_AXIS,)))
        index = whole_type(jax.ShapeDtypeStruct((1,), np.int32), 0, replicas)
        given = [whole_type(x.aval, x.axis, replicas) for x in segment.ins]
    jitted = jax.jit(fn, donate_argnums=[2 + p for p in segment.donated])
    try:
        return bytes(export.export(jitted)(index, scalar, *given).serialize())
    except NotImplementedError as error:
        raise PartitionError(
            f"The segment `{segment.name}` of `{segment.group}` calls Python while it runs, so it cannot be sent to another "
            f"process: {error}",
            fix="Remove jax.debug.print and other callbacks, or make the call a choreo.host_fragment. "
            "Or use `--runtime inprocess`, which can run such a segment.",
        ) from error


def array_type(aval: Any) -> ArrayType:
    """Shape and dtype in a form that a process without JAX can read."""
    if isinstance(aval, ArrayType):
        return aval
    if isinstance(aval.dtype, np.dtype):
        return ArrayType(tuple(aval.shape), aval.dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype))
    return ArrayType(tuple(aval.shape), KeyType(key_impl(aval.dtype), data.shape[0]))
