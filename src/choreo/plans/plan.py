"""A plan: plain data that says, before anything starts, what every site computes and which values cross between sites.

A plan can be printed, compared, pickled and drawn. In a pickled plan, segments are serialised StableHLO (`jax.export`), so
that a worker never traces the user's code. A worker imports this code only for host calls.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from choreo.errors import ChoreoError, LayoutError
from choreo.layouts.base import Layout
from choreo.partition.carry import is_type, leaves_of, typed_as, types_of, with_leaves
from choreo.partition.place import Sites
from choreo.partition.program import Axis, Program, Segment, walk
from choreo.partition.trace import merge_shards, split_shards
from choreo.plans.carry_part import part_of
from choreo.plans.costs import Costs, Rates
from choreo.plans.drawing import draw_plan
from choreo.plans.export import export_program
from choreo.plans.fingerprint import hash_programs
from choreo.plans.printer import format_plan, title
from choreo.plans.program_costs import GroupSites, program_costs
from choreo.plans.step_times import StepTimes
from choreo.roles import Reduction
from choreo.types import GroupName, PyTree


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """An algorithm on an environment in a layout, ready to run."""

    title: str
    """The names of the algorithm and the environment: `PPO on jax:CartPole-v1`."""
    layout: Layout
    sites: Sites
    """The groups of the layout that have work to do, and how they divide the environments."""
    init: Program
    """key -> carry"""
    iterate: Program
    """carry, key, iteration -> carry, metrics"""
    num_carry: int
    """The number of array leaves of the carry. They are the first inputs and the first outputs of `iterate`."""
    carry_axes: tuple[Axis, ...]
    """The axis along which each leaf of the carry is divided among replicas; None for a leaf that is not divided."""
    reductions: Mapping[str, Reduction]
    """How each metric is reduced over the learner shards, or over the workers' updates with merge="any"."""
    trusted: tuple[str, ...] = ()
    """The names of replicated fragments for which the user vouches with `independent=True`, because Choreo has no proof."""
    warnings: tuple[str, ...] = ()
    """Messages about probable mistakes of the user: for example, a group whose role no fragment has."""
    carry: PyTree = field(default=None, repr=False)
    """The form of the carry: the types of its array leaves, and its static leaves. Not pickled, because only the coordinator
    needs it (`combine`, `leaves`)."""
    stored_costs: Costs | None = field(default=None, repr=False)
    """The costs, if this plan was pickled. They are stored, because they cannot be read from serialised StableHLO."""

    @property
    def num_envs(self) -> int:
        return self.sites.num_envs

    @property
    def shards(self) -> int:
        return self.sites.shards

    @property
    def num_workers(self) -> int:
        """With merge="any": the number of workers, whose results the learner takes one at a time; else 1."""
        return self.sites.num_workers

    @property
    def num_sites(self) -> int:
        """The number of replicas of all groups together."""
        return sum(self.replicas(group) for group in self.sites.replicas)

    def replicas(self, group: GroupName) -> int:
        """The number of sites of a group."""
        return self.sites.replicas[group] or 1

    def processes(self, group: GroupName) -> int:
        """The number of processes of a group. With `exact`, or on several devices, several replicas run in one process."""
        found = next(g for g in self.layout.groups if g.name == group)
        return found.replicas or (self.replicas(group) if found.axis else 1)

    def platform(self, group: GroupName) -> str | None:
        """The platform of a group's devices; None for JAX's default."""
        return next(g.device for g in self.layout.groups if g.name == group)

    @property
    def all_sites(self) -> list[tuple[GroupName, int]]:
        """Every site, as a pair (group, number of the replica)."""
        return [(group, r) for group in self.sites.replicas for r in range(self.replicas(group))]

    @property
    def num_processes(self) -> int:
        """The number of processes of all groups together."""
        return sum(self.processes(group) for group in self.sites.replicas)

    @property
    def partitioned(self) -> dict[GroupName, int]:
        """The groups whose single program XLA divides among several devices, with the number of devices.

        Raises LayoutError if there is such a group in a plan with several programs.
        """
        groups = [g for g in self.layout.groups if g.devices > 1 and self.sites.replicas.get(g.name, 1) is None]
        if groups and self.single is None and self.iterate.steps:
            raise LayoutError(
                f"{self.layout!r}: with one shard, only a plan with a single program can be divided among devices.",
                fix=f"Use shards: Layout(..., shards={groups[0].devices}).",
            )
        return {g.name: g.devices for g in groups}

    @property
    def combining(self) -> set[GroupName]:
        """Groups whose replicas combine values while a segment runs (all-reduce)."""
        return {step.group for step, _ in walk(self.iterate.steps) if isinstance(step, Segment) and step.combines}

    @property
    def metric_names(self) -> list[str]:
        return [port.name for port in self.iterate.outs[self.num_carry :]]

    @property
    def single(self) -> Segment | None:
        """The segment that is the whole iteration; None if an iteration has several steps or groups."""
        steps = self.iterate.steps
        only = len(self.sites.replicas) == 1 and len(steps) == 1
        return steps[0] if only and isinstance(steps[0], Segment) else None

    def combine(self, leaves: Iterable[Any], part: str | None = None) -> PyTree:
        """The carry, made from its array leaves as sites hold them: with several shards, [shard, env] in place of [env].

        With `part`, only this part of the carry; `leaves` are then the leaves of the part.
        """
        form = self.carry if part is None else part_of(self.carry, part)[0]
        merged = [self.merged(leaf, i) for leaf, i in zip(leaves, self.leaves_of_part(part), strict=True)]
        return with_leaves(form, [typed_as(leaf, like) for leaf, like in zip(merged, types_of(form), strict=True)])

    def leaves_of_part(self, part: str | None) -> range:
        """The positions of the array leaves of a part of the carry, such as `train`, among all array leaves; None: all."""
        if part is None:
            return range(self.num_carry)
        _, places = part_of(self.carry, part)
        is_array = [is_type(leaf) for leaf in jax.tree.leaves(self.carry)]
        first = sum(is_array[: places.start])
        return range(first, first + sum(is_array[places.start : places.stop]))

    def leaves(self, carry: PyTree) -> list[Any]:
        """The array leaves of a carry, in the form that sites hold; the inverse of `combine`."""
        leaves = leaves_of(carry, self.carry)
        if self.shards == 1:
            return leaves
        return [split_shards(leaf, axis, self.shards) for leaf, axis in zip(leaves, self.carry_axes, strict=True)]

    def merged(self, leaf: Any, i: int) -> Any:
        """Array leaf number `i` as the carry has it, from the form in which sites hold it."""
        return leaf if self.shards == 1 else merge_shards(leaf, self.carry_axes[i])

    @property
    def name(self) -> str:
        """The plan in one line: `PPO on jax:CartPole-v1, 16 environments: Layout(...)`."""
        return f"{title(self)}: {self.layout!r}"

    def costs(self, profile: StepTimes | None = None, *, rates: Rates | None = None) -> Costs:
        """What every site computes and what crosses between groups: FLOPs, bytes, messages and seconds.

        With `profile`, the seconds are those that a run of this plan has measured (`train(profile=True)`, `run.profile`). With
        `rates`, the seconds are estimated from FLOPs, messages and bytes. Without either, they are None. The first call
        traces the segments; nothing is compiled.
        """
        if profile is not None and rates is not None:
            raise ChoreoError(
                "plan.costs was given both a profile and rates, so its seconds would be both measured and estimated.",
                fix="Give one of the two; call plan.costs twice to compare them.",
            )
        if profile is not None:
            if profile.plan_name != self.name:
                raise ChoreoError(
                    "The profile is from a run of another plan.",
                    profile=profile.plan_name,
                    plan=self.name,
                    fix="Use the profile of a run of this plan, or make the plan of that run: "
                    "choreo.plan(run.algo, run.env, run.layout).",
                )
            return self._known_costs.measured(profile)
        return self._known_costs if rates is None else self._known_costs.estimated(rates)

    @functools.cached_property
    def _known_costs(self) -> Costs:
        """The costs without seconds."""
        if self.stored_costs is not None:
            return self.stored_costs
        sites = {
            group: GroupSites(processes=self.processes(group), replicas=self.replicas(group))
            for group in self.sites.replicas
        }
        init = program_costs(self.init, sites)
        if self.num_workers > 1:
            sites[self.sites.default] = replace(sites[self.sites.default], rounds=self.num_workers)
        return Costs(init=init, iterate=program_costs(self.iterate, sites, num_workers=self.num_workers))

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the printed plan and of the programs that workers receive. The first access exports these programs."""
        # Leave out warnings: they name lines of the user's file, and the fingerprint must not change if the code moves.
        text = f"{format_plan(replace(self, warnings=(), stored_costs=self.costs()))}{self.layout!r}"
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
        plain = ("title", "layout", "sites", "num_carry", "carry_axes", "reductions", "trusted",
                 "warnings")  # fmt: skip
        state = {name: getattr(self, name) for name in plain}
        groups = list(self.sites.replicas)
        init, iterate = (export_program(program, groups, self.sites.replicas) for program in (self.init, self.iterate))
        return state | {"carry": None, "init": init, "iterate": iterate, "stored_costs": self.costs()}
