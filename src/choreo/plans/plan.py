"""graph x layout -> Plan: plain data that says, before anything starts, who computes what and what crosses.

A plan prints, compares, pickles and draws. Pickled, its segments are serialised StableHLO (`jax.export`), so that a worker
needs neither the user's code nor a trace of it.
"""

import functools
import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh

from choreo._compat import is_key, key_impl
from choreo.dtypes import KEY_IMPLS, NAMES
from choreo.errors import AlgorithmError, LayoutError, PartitionError
from choreo.graph.ir import Graph
from choreo.graph.products import largest_product
from choreo.layouts.base import Layout
from choreo.layouts.forgotten import forgotten_marks
from choreo.partition.carry import (
    block_type,
    is_type,
    leaf_text,
    leaves_of,
    named,
    same_leaf,
    same_structure,
    typed_as,
    types_of,
    with_leaves,
)
from choreo.partition.mapped import trusted
from choreo.partition.passes import partition
from choreo.partition.place import Sites
from choreo.partition.program import (
    ArrayType,
    Axis,
    KeyType,
    Loop,
    Port,
    Program,
    Segment,
    Step,
    Transfer,
    groups_of,
    walk,
)
from choreo.partition.reduce import REPLICA_AXIS
from choreo.partition.relax import relax
from choreo.partition.together import over_devices, whole_type
from choreo.partition.trace import Traced, merge_shards, split_shards, trace
from choreo.plans.exported import ExportedFn
from choreo.roles import Reduction
from choreo.types import GroupName, PyTree


@dataclass(frozen=True, eq=False)
class Plan:
    """An algorithm on an environment in a layout, ready to run."""

    title: str
    """Algorithm and environment."""
    layout: Layout
    sites: Sites
    init: Program
    """key -> carry"""
    iterate: Program
    """carry, key, iteration -> carry, metrics"""
    num_carry: int
    """How many of iterate's inputs and outputs are the carry."""
    carry_axes: tuple[Axis, ...]
    """The env axis of each leaf of the carry."""
    reductions: Mapping[str, Reduction]
    """How each metric is reduced over learner shards, or over the workers that are learned from one by one."""
    largest_product: int
    """Multiplications in the largest product of matrices."""
    trusted: tuple[str, ...] = ()
    """Replicated fragments for which the user vouches (`independent=True`), because nothing is proved of them."""
    warnings: tuple[str, ...] = ()
    """What was probably not meant: a role that no fragment has, say."""
    carry: PyTree = field(default=None, repr=False)
    """The form of the carry, with its static leaves; not pickled, since only the coordinator puts a carry together."""

    @property
    def num_envs(self) -> int:
        return self.sites.num_envs

    @property
    def shards(self) -> int:
        return self.sites.shards

    @property
    def num_workers(self) -> int:
        """With merge="any": how many workers are learned from one by one."""
        return self.sites.num_workers

    @property
    def num_sites(self) -> int:
        return sum(self.replicas(group) for group in self.sites.replicas)

    def replicas(self, group: GroupName) -> int:
        return self.sites.replicas[group] or 1

    def platform(self, group: GroupName) -> str | None:
        """The kind of device a group runs on; None: whatever JAX prefers."""
        return next(g.device for g in self.layout.groups if g.name == group)

    @property
    def all_sites(self) -> list[tuple[GroupName, int]]:
        return [(group, r) for group in self.sites.replicas for r in range(self.replicas(group))]

    @property
    def num_processes(self) -> int:
        """Replicas of a group may share a process: those on its devices do."""
        groups = [g for g in self.layout.groups if g.name in self.sites.replicas]
        return sum(self.replicas(g.name) if g.axis else g.replicas or 1 for g in groups)

    @property
    def partitioned(self) -> dict[GroupName, int]:
        """Groups that are one program on several devices."""
        groups = [g for g in self.layout.groups if g.devices > 1 and self.sites.replicas.get(g.name, 1) is None]
        if groups and self.single is None and self.iterate.steps:
            raise LayoutError(
                f"{self.layout!r}: with one shard, only a run that is a single program can be divided among devices.",
                fix=f"Use shards: Layout(..., shards={groups[0].devices}).",
            )
        return {g.name: g.devices for g in groups}

    @property
    def combining(self) -> set[GroupName]:
        """Groups whose replicas combine values while they run."""
        return {step.group for step, _ in walk(self.iterate.steps) if isinstance(step, Segment) and step.combines}

    @property
    def metric_names(self) -> list[str]:
        return [port.name for port in self.iterate.outs[self.num_carry :]]

    @property
    def single(self) -> Segment | None:
        """The one segment of an iteration, if everything is compiled into one."""
        steps = self.iterate.steps
        alone = len(self.sites.replicas) == 1 and len(steps) == 1
        return steps[0] if alone and isinstance(steps[0], Segment) else None

    def combine(self, leaves: list[Any]) -> PyTree:
        """A carry from its array leaves, as sites hold them."""
        leaves = [self._merged(leaf, axis) for leaf, axis in zip(leaves, self.carry_axes, strict=True)]
        typed = [typed_as(leaf, like) for leaf, like in zip(leaves, types_of(self.carry), strict=True)]
        return with_leaves(self.carry, typed)

    def leaves(self, carry: PyTree) -> list[Any]:
        """The array leaves of a carry, as sites hold them."""
        leaves = leaves_of(carry, self.carry)
        if self.shards == 1:
            return leaves
        return [split_shards(leaf, axis, self.shards) for leaf, axis in zip(leaves, self.carry_axes, strict=True)]

    def _merged(self, leaf: Any, axis: Axis) -> Any:
        return leaf if self.shards == 1 else merge_shards(leaf, axis)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that a worker would be told."""
        from choreo.plans.printer import format_plan

        # Without warnings: they name lines, and where in a file something stands is not part of the plan.
        digest = hashlib.sha256(f"{format_plan(replace(self, warnings=()))}{self.layout!r}".encode())
        for program in (self.init, self.iterate):
            for step, _ in walk(exported(program, self.sites.replicas, self.sites.replicas).steps):
                digest.update(_describe(step).encode())
                if isinstance(step, Segment):
                    digest.update(_code(step).encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __str__(self) -> str:
        from choreo.plans.printer import format_plan

        return format_plan(self)

    def draw(self) -> str:
        """The plan as an SVG picture."""
        from choreo.plans.drawing import draw_plan

        return draw_plan(self)

    def __getstate__(self) -> dict[str, Any]:
        plain = (
            "title",
            "layout",
            "sites",
            "num_carry",
            "carry_axes",
            "reductions",
            "largest_product",
            "trusted",
            "warnings",
        )
        state = {name: getattr(self, name) for name in plain}
        groups = list(self.sites.replicas)
        init, iterate = (exported(program, groups, self.sites.replicas) for program in (self.init, self.iterate))
        return state | {"carry": None, "init": init, "iterate": iterate}


def plan(algo: Any, env: Any, layout: Layout) -> Plan:
    """Say how `algo` would run on `env` in `layout`: sites, fragments, what crosses, how many bytes.

    Nothing is computed and nothing started. Raises PartitionError or LayoutError if the layout cannot keep its promise.
    """
    title = f"{type(algo).__name__} on {getattr(env, 'name', type(env).__name__)}"
    return plan_traced(trace_for(algo, env, layout), layout, title=title)


def trace_for(algo: Any, env: Any, layout: Layout) -> Traced:
    """An algorithm traced for the shards of a layout, or for one of the workers that it learns from one by one."""
    layout.check_counts(env.num_envs)  # before the environments are divided
    _check_buffers(algo, layout)
    traced = trace(algo, env, layout.shards)
    if layout.merge == "all":
        return traced
    part = trace(algo, env.with_num_envs(env.num_envs // layout.num_workers))
    return replace(traced, iterate=part.iterate, uncut=_uncut_leaf(type(algo).__name__, traced, part))


def _check_buffers(algo: Any, layout: Layout) -> None:
    """Whole buffer shards live at each site of replay: said before the proof fails somewhere within a draw."""
    buffers, shards = layout.group_of("buffer").replicas or 1, getattr(algo, "buffer_shards", None)
    if shards is not None and layout.shards == 1 and shards % buffers:
        name = type(algo).__name__
        raise LayoutError(
            f"{buffers} replicas of `{layout.group_of('buffer').name}` cannot share {shards} buffer shard{'s' * (shards > 1)}: "
            f"every batch of {name} would have to be drawn by all of them together.",
            fix=f"Use {name}(buffer_shards={buffers}) (--buffer-shards {buffers}): a replay for each, part of the results. "
            "Or use one replica.",
        )


def _uncut_leaf(name: str, whole: Traced, part: Traced) -> AlgorithmError | None:
    """With merge="any", `init` is run for all environments, `iterate` for those of one worker: each leaf must be a block of
    the whole, or the same."""
    axes, num_workers = iter(whole.carry_axes), whole.num_envs // part.num_envs
    if not same_structure(jax.tree.structure(whole.carry), jax.tree.structure(part.carry)):
        raise AlgorithmError(
            f"`{name}.init` returns a carry whose structure depends on the number of environments.",
            fix="Let the number of environments change shapes only: one array with an env axis in place of many arrays.",
        )
    rows = zip(jax.tree_util.tree_leaves_with_path(whole.carry), jax.tree.leaves(part.carry), strict=True)
    for (path, leaf), own in rows:
        expected = block_type(leaf, next(axes), num_workers) if is_type(leaf) else leaf
        if not same_leaf(expected, own):
            said = [leaf_text(each) for each in (leaf, own)]
            return AlgorithmError(
                f"`carry{jax.tree_util.keystr(path)}` of `{name}` is {said[0]} for {whole.num_envs} environments and {said[1]} "
                f'for {part.num_envs}; with merge="any" a worker has {part.num_envs} of them, and its block is cut along an '
                f"axis of exactly {whole.num_envs}.",
                fix="Give it an axis of its own for environments, as in [num_envs, 4] in place of [4 * num_envs], or a shape that "
                'does not depend on their number. Or use merge="all".',
            )
    return None


def plan_traced(traced: Traced, layout: Layout, *, title: str) -> Plan:
    roles = dict.fromkeys([*traced.iterate.roles, *traced.init.roles])
    if layout.axis:
        along = _count_along(traced, layout.axis)
        _check_told_apart(layout.axis, along, traced.num_envs)
        sites = layout.sites(roles, traced.num_envs, along)
        traced = replace(traced, carry_axes=_axes_of_size(traced, along))
    else:
        sites = layout.sites(roles, traced.num_envs)
    sites = replace(sites, python=_python_groups(traced, sites))
    relaxed = functools.partial(relax, max_lag=layout.max_lag, merge=layout.merge, layout=layout.name)
    relaxed = relaxed if layout.is_relaxed else None
    if layout.merge == "any":
        init, iterate = partition(traced, sites.of_one_worker(), init_sites=sites, relaxed=relaxed)
        iterate = _blocks_of_workers(iterate, traced, sites)
        if traced.uncut is not None:
            raise traced.uncut
    else:
        init, iterate = partition(traced, sites, relaxed=relaxed)
    _check_types(init, iterate)
    num_carry, product = traced.iterate.block.num_carry, largest_product(traced.iterate)
    return Plan(
        title,
        layout,
        sites,
        init,
        iterate,
        num_carry,
        traced.carry_axes,
        traced.reductions,
        product,
        _trusted(traced, sites),
        forgotten_marks(traced, layout, sites),
        traced.carry,
    )


def _trusted(traced: Traced, sites: Sites) -> tuple[str, ...]:
    """Fragments of replicated groups for which the user vouches."""
    names = [
        call.name
        for program in (traced.init, traced.iterate)
        for op in program.fragments()
        if any(sites.size(sites.group(role)) for role in op.roles)
        for call in trusted(op.eqn)
    ]
    return tuple(dict.fromkeys(names))


def _check_types(init: Program, iterate: Program) -> None:
    """Refuse types that cannot leave a compiled program, before anything starts."""
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
                    f"`{name}` holds random keys of the generator `{key_impl(aval.dtype)}`, which a worker does not know.",
                    fix=f"Use one of JAX's own: {', '.join(KEY_IMPLS)}.",
                )
        elif aval.dtype.name not in NAMES:
            raise PartitionError(
                f"`{name}` is {aval.dtype.name}{list(aval.shape)}: values of this type cannot go from one compiled program to "
                "another, nor into a checkpoint.",
                fix="Keep it as int8 (or another type of 4 bits or more), and convert it inside of the fragment.",
            )


def _count_along(traced: Traced, axis: str) -> int:
    """How many there are along a mapped axis: as the vmaps around fragments tell."""
    calls = [op.call for op in traced.iterate.fragments() if op.call]
    return next((vmap.size for call in calls for vmap in call.vmaps if vmap.axis_name == axis), 0)


def _check_told_apart(axis: str, count: int, num_envs: int) -> None:
    if count == num_envs:
        raise LayoutError(
            f"There are {count} along {axis!r} and {num_envs} environments: the axis that this layout divides is recognised by "
            "its length, and cannot be told from that of the environments.",
            fix=f"Use another number of environments (--num-envs {2 * num_envs}), or a layout that does not divide {axis!r}.",
        )


def _axes_of_size(traced: Traced, count: int) -> tuple[Axis, ...]:
    """A proposal of where each leaf of the carry may be divided; the proof is in `partition/blocks.py`.

    Where several axes have that length, the first is proposed: a wrong one cannot be proved, or is as good.
    """
    shapes = [value.aval.shape for value in traced.iterate.block.carry_ins]
    return tuple(next((d for d, n in enumerate(shape) if n == count), None) for shape in shapes)


def _blocks_of_workers(iterate: Program, traced: Traced, sites: Sites) -> Program:
    """The program of one worker, whose share of the carry is a block of the whole."""
    num_carry = traced.iterate.block.num_carry

    def block(port: Port, axis: Axis) -> Port:
        own = {group: (ref, axis if sites.size(group) else None) for group, (ref, _) in port.held.items()}
        if axis is not None and not all(sites.size(group) for group in own):
            raise PartitionError(
                f'With merge="any" the learner hears one worker at a time, and `{named(port.name)}`, which it keeps, has the '
                "environments of all of them.",
                fix='Use merge="all" (with max_lag, workers need not wait for it); with replay, the layout apex.',
            )
        if axis is None and all(sites.size(group) for group in own) and _is_written(iterate, port, num_carry):
            raise PartitionError(
                f'With merge="any" every worker would have its own `{named(port.name)}`, which has no env axis.',
                fix='Let the learner compute it (a fragment of the role `learner` or `update`), or use merge="all".',
            )
        return replace(port, held=own)

    ins, outs = (
        tuple(block(port, traced.carry_axes[i]) if i < num_carry else port for i, port in enumerate(ports))
        for ports in (iterate.ins, iterate.outs)
    )
    return replace(iterate, ins=ins, outs=outs)


def _is_written(iterate: Program, port: Port, num_carry: int) -> bool:
    before, after = (next(p for p in ports[:num_carry] if p.name == port.name) for ports in (iterate.ins, iterate.outs))
    return any(before.held[group][0] != after.held[group][0] for group in before.held)


def _python_groups(traced: Traced, sites: Sites) -> frozenset[GroupName]:
    """Groups whose fragments are all Python: nothing has to be compiled there."""
    compiled = {sites.default}
    for program in (traced.init, traced.iterate):
        for op in program.fragments():
            compiled |= set() if op.call and op.call.host else {sites.group(role) for role in op.roles}
    return frozenset(sites.replicas) - compiled


def graph(algo: Any, env: Any) -> Graph:
    """The fragmented dataflow graph of one iteration."""
    return trace(algo, env).iterate


def export_segment(segment: Segment, replicas: int) -> bytes:
    """A segment as serialised StableHLO; `replicas` of its group."""
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
            f"The segment `{segment.name}` of `{segment.group}` calls Python while it runs, and cannot leave this process: {error}",
            fix="Remove jax.debug.print and other callbacks, or make the call a choreo.host_fragment; "
            "`--runtime inprocess` runs it as it is.",
        ) from error


def _code(segment: Segment) -> str:
    """A segment as text, without the lines it came from: where in a script a plan is made is not part of it."""
    assert isinstance(segment.fn, ExportedFn)
    text = export.deserialize(bytearray(segment.fn.serialized)).mlir_module()
    text = re.sub(r" ?loc\((?:[^()]|\([^()]*\))*\)", "", text)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#loc"))


def exported(program: Program, groups: Collection[GroupName], replicas: Mapping[GroupName, int | None]) -> Program:
    """A program as the workers of these groups need it: without traces, and without what others do alone."""
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


def array_type(aval: Any) -> ArrayType:
    """A type that can be read without JAX."""
    if isinstance(aval, ArrayType):
        return aval
    if isinstance(aval.dtype, np.dtype):
        return ArrayType(tuple(aval.shape), aval.dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype))
    return ArrayType(tuple(aval.shape), KeyType(key_impl(aval.dtype), data.shape[0]))


def _describe(step: Step) -> str:
    if isinstance(step, Segment):
        return f"{step.group} {step.name} {step.ins} {step.outs} {step.donated}"
    return f"{step.length} {step.reverse} {step.parts}" if isinstance(step, Loop) else repr(step)
