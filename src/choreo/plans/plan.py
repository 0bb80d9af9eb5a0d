"""A plan: plain data that says, before anything starts, which site computes which fragments and what crosses between sites.

A plan prints, compares, pickles and draws. Pickled, its segments are serialised StableHLO (`jax.export`), so that a worker
needs neither the user's code nor a trace of it.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

from choreo.errors import LayoutError
from choreo.layouts.base import Layout
from choreo.partition.carry import leaves_of, typed_as, types_of, with_leaves
from choreo.partition.place import Sites
from choreo.partition.program import Axis, Program, Segment, walk
from choreo.partition.trace import merge_shards, split_shards
from choreo.plans.costs import Costs, communication
from choreo.plans.drawing import draw_plan
from choreo.plans.export import export_program
from choreo.plans.fingerprint import hash_programs
from choreo.plans.printer import format_plan
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

    def processes(self, group: GroupName) -> int:
        """How many processes the layout asks for. With `exact`, or on several devices, replicas share a process."""
        found = next(g for g in self.layout.groups if g.name == group)
        return found.replicas or (self.replicas(group) if found.axis else 1)

    def platform(self, group: GroupName) -> str | None:
        """The kind of device a group runs on; None: whatever JAX prefers."""
        return next(g.device for g in self.layout.groups if g.name == group)

    @property
    def all_sites(self) -> list[tuple[GroupName, int]]:
        return [(group, r) for group in self.sites.replicas for r in range(self.replicas(group))]

    @property
    def num_processes(self) -> int:
        """Replicas of a group may share a process: those on its devices do."""
        return sum(self.processes(group) for group in self.sites.replicas)

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
    def costs(self) -> Costs:
        """Messages and bytes between groups, and the size of the largest product of matrices."""
        processes = {group: self.processes(group) for group in self.sites.replicas}
        return Costs(
            init=communication(self.init, processes),
            iterate=communication(self.iterate, processes, num_workers=self.num_workers),
            largest_product=self.largest_product,
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that a worker would be told."""
        # Without warnings: they name lines, and where in a file something stands is not part of the plan.
        text = f"{format_plan(replace(self, warnings=()))}{self.layout!r}"
        return hash_programs(text, (self.init, self.iterate), self.sites.replicas)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __str__(self) -> str:
        return format_plan(self)

    def draw(self) -> str:
        """The plan as an SVG picture."""
        return draw_plan(self)

    def __getstate__(self) -> dict[str, Any]:
        plain = ("title", "layout", "sites", "num_carry", "carry_axes", "largest_product", "trusted", "warnings")
        state = {name: getattr(self, name) for name in plain}
        groups = list(self.sites.replicas)
        init, iterate = (export_program(program, groups, self.sites.replicas) for program in (self.init, self.iterate))
        return state | {"carry": None, "init": init, "iterate": iterate}
