"""graph x layout -> Plan: plain data that says, before anything starts, who computes what and what crosses.

A plan prints, compares, pickles and draws. Pickled, its segments are serialised StableHLO (`jax.export`), so that a worker
needs neither the user's code nor a trace of it.
"""

import functools
import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import export

from choreo.errors import PartitionError
from choreo.graph.ir import Graph
from choreo.layouts.base import Layout
from choreo.partition import partition
from choreo.partition.place import Sites
from choreo.partition.program import HostCall, Loop, Program, Segment, Step, walk
from choreo.partition.trace import Traced, trace
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
    carry: PyTree = field(default=None, repr=False)
    """The form of the carry, with its static leaves; not pickled, since only the coordinator puts a carry together."""

    @property
    def num_envs(self) -> int:
        return self.sites.num_envs

    @property
    def num_sites(self) -> int:
        return sum(self.replicas(group) for group in self.sites.replicas)

    def replicas(self, group: GroupName) -> int:
        return self.sites.replicas[group] or 1

    @property
    def metric_names(self) -> list[str]:
        return [port.name for port in self.iterate.outs[self.num_carry :]]

    @property
    def single(self) -> Segment | None:
        """The one segment of an iteration, if everything is compiled into one."""
        steps = self.iterate.steps
        return steps[0] if self.num_sites == 1 and len(steps) == 1 and isinstance(steps[0], Segment) else None

    def combine(self, leaves: list[Any]) -> PyTree:
        """A carry from its array leaves."""
        arrays, static = eqx.partition(self.carry, lambda x: isinstance(x, jax.ShapeDtypeStruct) or eqx.is_array(x))
        return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), static)

    def leaves(self, carry: PyTree) -> list[Any]:
        return jax.tree.leaves(eqx.filter(carry, eqx.is_array))

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that a worker would be told."""
        digest = hashlib.sha256(f"{self}{self.layout!r}".encode())
        for program in (self.init, self.iterate):
            for step, _ in walk(program.steps):
                digest.update(_describe(step).encode())
                if isinstance(step, Segment):
                    digest.update(_code(step).encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __str__(self) -> str:
        from choreo.plan_printer import format_plan

        return format_plan(self)

    def draw(self) -> str:
        """The plan as an SVG picture."""
        from choreo.plan_draw import draw_plan

        return draw_plan(self)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("title", "layout", "sites", "num_carry")}
        return state | {"carry": None, "init": _exported(self.init), "iterate": _exported(self.iterate)}


def plan(algo: Any, env: Any, layout: Layout) -> Plan:
    """Say how `algo` would run on `env` in `layout`: sites, fragments, what crosses, how many bytes.

    Nothing is computed and nothing started. Raises PartitionError or LayoutError if the layout cannot keep its promise.
    """
    return plan_traced(
        trace(algo, env), layout, title=f"{type(algo).__name__} on {getattr(env, 'name', type(env).__name__)}"
    )


def plan_traced(traced: Traced, layout: Layout, *, title: str) -> Plan:
    roles = dict.fromkeys([*traced.iterate.roles, *traced.init.roles])
    sites = layout.sites(roles, traced.num_envs)
    init, iterate = partition(traced, sites)
    return Plan(title, layout, sites, init, iterate, traced.iterate.block.num_carry, traced.carry)


def graph(algo: Any, env: Any) -> Graph:
    """The fragmented dataflow graph of one iteration."""
    return trace(algo, env).iterate


def export_segment(segment: Segment) -> bytes:
    """A segment as serialised StableHLO."""
    if isinstance(segment.fn, ExportedFn):
        return segment.fn.serialized
    scalar = jax.ShapeDtypeStruct((), np.int32)
    jitted = jax.jit(segment.fn, donate_argnums=[2 + p for p in segment.donated])
    try:
        return bytes(export.export(jitted)(scalar, scalar, *(given.aval for given in segment.ins)).serialize())
    except NotImplementedError as error:
        raise PartitionError(
            f"The segment `{segment.name}` of `{segment.group}` calls Python while it runs, and cannot leave this process: {error}",
            fix="Remove jax.debug.print and other callbacks, or make the call a choreo.host_fragment; "
            "`--runtime inprocess` runs it as it is.",
        ) from error


def _code(segment: Segment) -> str:
    """A segment as text, without the lines it came from: where in a script a plan is made is not part of it."""
    text = export.deserialize(bytearray(export_segment(segment))).mlir_module()
    text = re.sub(r" ?loc\((?:[^()]|\([^()]*\))*\)", "", text)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#loc"))


@dataclass(frozen=True)
class ExportedFn:
    """A segment's function, back from serialised StableHLO."""

    serialized: bytes

    @functools.cached_property
    def call(self) -> Any:
        return export.deserialize(bytearray(self.serialized)).call

    def __call__(self, *args: Any) -> list[Any]:
        return self.call(*args)

    def __getstate__(self) -> dict[str, bytes]:
        return {"serialized": self.serialized}


def _exported(program: Program) -> Program:
    return replace(program, steps=tuple(_export_step(step) for step in program.steps))


def _export_step(step: Step) -> Step:
    if isinstance(step, Segment):
        return replace(step, fn=ExportedFn(export_segment(step)))
    if isinstance(step, Loop):
        return replace(step, body=tuple(_export_step(inner) for inner in step.body))
    if isinstance(step, HostCall):
        raise PartitionError(
            f"The host fragment `{step.name}` is Python of this process, and does not travel with a plan.",
            fix="Run the plan here: `--runtime inprocess`.",
        )
    return step


def _describe(step: Step) -> str:
    if isinstance(step, Segment):
        return f"{step.group} {step.name} {step.ins} {step.outs} {step.donated}"
    return f"{step.length} {step.reverse} {step.parts}" if isinstance(step, Loop) else repr(step)
