"""algorithm x environment x layout -> Plan: trace the algorithm, divide its program among sites, check the result."""

import functools
from dataclasses import replace
from typing import Any

from choreo._compat import is_key, key_impl
from choreo.dtypes import KEY_IMPLS, NAMES
from choreo.errors import LayoutError, PartitionError
from choreo.graph.graph import Graph
from choreo.layouts.base import Layout
from choreo.layouts.forgotten_marks import forgotten_marks
from choreo.partition.carry import named
from choreo.partition.mapped import trusted
from choreo.partition.passes import partition
from choreo.partition.place import Sites
from choreo.partition.program import Program, Segment, Transfer, walk
from choreo.partition.relax import relax
from choreo.partition.trace import Traced, trace
from choreo.plans.merge_any import indivisible_leaf_error, iterate_of_one_worker
from choreo.plans.plan import Plan
from choreo.types import AxisName, GroupName


def plan(algo: Any, env: Any, layout: Layout) -> Plan:
    """Return how `algo` would run on `env` in `layout`: the sites, their fragments, and the values that are sent between
    sites, with their sizes in bytes.

    Runs no iteration and starts no process. Raises PartitionError or LayoutError if the algorithm cannot be divided as
    the layout says.
    """
    return plan_traced(trace_for(algo, env, layout), layout, title=plan_title(algo, env))


def plan_title(algo: Any, env: Any) -> str:
    """The names of the algorithm and the environment: `PPO on jax:CartPole-v1`."""
    return f"{type(algo).__name__} on {getattr(env, 'name', type(env).__name__)}"


def trace_for(algo: Any, env: Any, layout: Layout) -> Traced:
    """Trace an algorithm for the shards of a layout. With merge="any", `iterate` is traced for the environments of one worker."""
    layout.check_counts(env.num_envs)  # before the environments are divided
    _check_buffers(algo, layout)
    traced = trace(algo, env, layout.shards)
    if layout.merge == "all":
        return traced
    part = trace(algo, env.with_num_envs(env.num_envs // layout.num_workers))
    return replace(traced, iterate=part.iterate, indivisible=indivisible_leaf_error(type(algo).__name__, traced, part))


def _check_buffers(algo: Any, layout: Layout) -> None:
    """Raise if the buffer shards cannot be divided equally among the buffer replicas. Without this check, the later proof would
    fail, with a less clear message."""
    buffers, shards = layout.group_of("buffer").replicas or 1, getattr(algo, "buffer_shards", None)
    if shards is not None and layout.shards == 1 and shards % buffers:
        name = type(algo).__name__
        raise LayoutError(
            f"{shards} buffer shard{'s' * (shards > 1)} cannot be divided equally among {buffers} replicas of "
            f"`{layout.group_of('buffer').name}`. A shard draws from all of its steps, so it must be at one replica.",
            fix=f"Use {name}(buffer_shards={buffers}) (--buffer-shards {buffers}), so that each replica has its own replay; "
            "this changes the results. Or use one replica.",
        )


def plan_traced(traced: Traced, layout: Layout, *, title: str) -> Plan:
    """The plan of an algorithm that `trace_for` has traced for this layout."""
    roles = dict.fromkeys([*traced.iterate.roles, *traced.init.roles])
    sites = layout.sites(roles, traced.num_envs, {axis: _count_along(traced, axis) for axis in layout.axes})
    sites = replace(sites, python=_python_groups(traced, sites))
    relaxed = functools.partial(relax, max_lag=layout.max_lag, merge=layout.merge, layout=layout.name)
    relaxed = relaxed if layout.is_relaxed else None
    if layout.merge == "any":
        init, iterate = partition(traced, sites.of_one_worker(), init_sites=sites, relaxed=relaxed)
        iterate = iterate_of_one_worker(iterate, traced, sites)
        if traced.indivisible is not None:
            raise traced.indivisible
    else:
        init, iterate = partition(traced, sites, relaxed=relaxed)
    _check_types(init, iterate)
    return Plan(
        title=title,
        layout=layout,
        sites=sites,
        init=init,
        iterate=iterate,
        num_carry=traced.iterate.body.num_carry,
        carry_axes=traced.carry_axes,
        reductions=traced.reductions,
        trusted=_trusted(traced, sites),
        warnings=forgotten_marks(traced, layout, sites),
        carry=traced.carry,
    )


def _count_along(traced: Traced, axis: AxisName) -> int:
    """The length of a mapped axis, as recorded when fragments were called under its vmap; 0 if no fragment was called under it.

    Raises LayoutError if vmaps of this name have different lengths.
    """
    calls = [op.call for op in traced.iterate.fragments() if op.call]
    found = sorted({vmap.size for call in calls for vmap in call.vmaps if vmap.axis_name == axis})
    if len(found) > 1:
        raise LayoutError(
            f"Fragments are called under vmaps of the axis {axis!r} with the lengths {' and '.join(map(str, found))}.",
            fix="Give axes of different lengths different names, or use a layout that does not divide this axis.",
        )
    return found[0] if found else 0


def _python_groups(traced: Traced, sites: Sites) -> frozenset[GroupName]:
    """Groups whose fragments are all host fragments: their sites compile nothing. The default group is never among them."""
    compiled = {sites.default}
    for program in (traced.init, traced.iterate):
        for op in program.fragments():
            compiled |= set() if op.call and op.call.host else {sites.group(role) for role in op.roles}
    return frozenset(sites.replicas) - compiled


def _check_types(init: Program, iterate: Program) -> None:
    """Refuse values whose type cannot leave a compiled program, before anything starts."""
    num_carry = len(init.outs)
    types = [(named(port.name), port.aval) for port in init.outs]
    types += [(f"metrics.{port.name}", port.aval) for port in iterate.outs[num_carry:]]
    for step, _ in (*walk(init.steps), *walk(iterate.steps)):
        if isinstance(step, Transfer):
            types += [(move.label, move.aval) for move in step.moves]
        elif isinstance(step, Segment):
            types += [(given.label, given.aval) for given in step.ins]
            types += [(f"a result of {step.name}", aval) for aval in step.out_avals]
    for name, aval in types:
        if is_key(aval.dtype):
            if key_impl(aval.dtype) not in KEY_IMPLS:
                raise PartitionError(
                    f"`{name}` holds random keys of the generator `{key_impl(aval.dtype)}`, which workers do not know.",
                    fix=f"Use one of JAX's own generators: {', '.join(KEY_IMPLS)}.",
                )
        elif aval.dtype.name not in NAMES:
            raise PartitionError(
                f"`{name}` is {aval.dtype.name}{list(aval.shape)}: values of this type cannot go from one compiled program to "
                "another, or into a checkpoint.",
                fix="Keep it as int8 (or any type of 4 bits or more), and convert it inside of the fragment.",
            )


def _trusted(traced: Traced, sites: Sites) -> tuple[str, ...]:
    """The names of the fragments in replicated groups for which the user vouches with `independent=True`."""
    names = [
        call.name
        for program in (traced.init, traced.iterate)
        for op in program.fragments()
        if any(sites.size(sites.group(role)) for role in op.roles)
        for call in trusted(op.eqn)
    ]
    return tuple(dict.fromkeys(names))


def graph(algo: Any, env: Any) -> Graph:
    """Trace `algo`, and return the fragmented dataflow graph of one iteration."""
    return trace(algo, env).iterate
