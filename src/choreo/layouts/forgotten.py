"""Forgotten marks: without `@fragment` on `act` or `learn` a run is right, but not where it was meant to be.

What is not marked is glue, and goes where it costs the fewest bytes: `learn` may end up with the workers, each of which then
sends what the learner should have kept to itself.
"""

from collections import Counter
from collections.abc import Iterator

from choreo.graph.ir import Body
from choreo.layouts.base import Layout
from choreo.partition.place import Placement, Sites, place
from choreo.partition.trace import Traced
from choreo.types import GroupName

MEANT = {"actor": {"actor"}, "learner": {"learner", "gradient", "update"}}
"""Roles that a layout with several groups is about, and those of fragments that do that work."""
MOST_FUNCTIONS = 3
"""Functions named for each group, at most."""


def forgotten_marks(traced: Traced, layout: Layout, sites: Sites) -> tuple[str, ...]:
    """A warning for each such role that a group is named after, and no fragment has."""
    named = {role for group in layout.groups for role in group.roles}
    missing = [role for role, roles in MEANT.items() if role in named and roles.isdisjoint(traced.iterate.roles)]
    if len(layout.groups) == 1 or not missing:
        return ()
    sites = sites.of_one_worker() if sites.num_workers > 1 else sites
    placement = place(traced.iterate, sites, traced.carry_axes)
    found = Counter(_glue(traced.iterate.body, placement))
    instead = "; ".join(text for group in sites.replicas if (text := _at(group, found)))
    return tuple(_warning(role, layout, instead) for role in missing)


def _warning(role: str, layout: Layout, instead: str) -> str:
    where = f"What is not marked runs where it costs the fewest bytes: {instead}. " if instead else ""
    return (
        f"No fragment has the role `{role}`, for which {layout.name} has the group `{layout.group_of(role).name}`. {where}"
        f'Mark the function that should run there: @choreo.fragment("{role}").'
    )


def _at(group: GroupName, found: Counter[tuple[GroupName, str]]) -> str:
    """`at `env+actor`: A.learn (my.py:12), ...`: where most of a group's glue was written."""
    functions: dict[str, tuple[str, int]] = {}
    for (home, at), times in found.items():
        if home == group and at:
            line, _, function = at.removesuffix(")").partition(" (")
            first, so_far = functions.get(function, (line.rpartition(":")[0], 0))
            functions[function] = first, so_far + times
    most = sorted(functions.items(), key=lambda item: -item[1][1])
    names = [f"{function or 'glue'} ({line})" for function, (line, _) in most[:MOST_FUNCTIONS]]
    more = [f"{len(most) - MOST_FUNCTIONS} more"] if len(most) > MOST_FUNCTIONS else []
    return f"at `{group}` {', '.join([*names, *more])}" if names else ""


def _glue(body: Body, placement: Placement, around: GroupName | None = None) -> Iterator[tuple[GroupName, str]]:
    """(home, line) of every op without a role; `around`: the home of a scan that is not split."""
    for op in body.ops:
        home = around or placement.ops.get(op)
        if op.body:
            yield from _glue(op.body, placement, home)
        elif home is not None and not op.roles:
            yield home, op.at
