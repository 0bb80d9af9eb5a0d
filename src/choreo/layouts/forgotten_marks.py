"""Warn about forgotten marks: without `@fragment` on `act` or `learn`, results are right, but code may run at the wrong site.

Code without a mark is glue, and glue is placed where the fewest bytes cross between sites. So an unmarked `learn` may run at
the workers. Values that the learner should keep would then cross in every iteration.
"""

from collections import Counter
from collections.abc import Iterator

from choreo.graph.ir import Body
from choreo.layouts.base import Layout
from choreo.partition.place import Placement, Sites, place
from choreo.partition.trace import Traced
from choreo.types import GroupName

ROLES_FOR = {"actor": {"actor"}, "learner": {"learner", "gradient", "update"}}
"""For the roles `actor` and `learner` of a layout: the roles of the fragments that do this work."""
MOST_FUNCTIONS = 3
"""The largest number of functions that a warning names per group."""


def forgotten_marks(traced: Traced, layout: Layout, sites: Sites) -> tuple[str, ...]:
    """A warning for each of the roles `actor` and `learner` that the layout names, if no fragment does the work of this role."""
    named = {role for group in layout.groups for role in group.roles}
    found_roles = traced.iterate.roles
    missing = [role for role, roles in ROLES_FOR.items() if role in named and roles.isdisjoint(found_roles)]
    if "env" not in found_roles:  # as in offline training, nobody acts
        missing = [role for role in missing if role != "actor"]
    if len(layout.groups) == 1 or not missing:
        return ()
    sites = sites.of_one_worker() if sites.num_workers > 1 else sites
    placement = place(traced.iterate, sites, traced.carry_axes)
    found = Counter(_glue(traced.iterate.body, placement))
    placed = "; ".join(text for group in sites.replicas if (text := _functions_at(group, found)))
    return tuple(_warning(role, layout, placed) for role in missing)


def _warning(role: str, layout: Layout, placed: str) -> str:
    group = layout.group_of(role).name
    where = f"Unmarked code runs where the fewest bytes cross between sites: {placed}. " if placed else ""
    return (
        f"No fragment has the role `{role}`, for which {layout.name} has the group `{group}`. {where}"
        f'Mark the function that should run at `{group}`: @choreo.fragment("{role}").'
    )


def _functions_at(group: GroupName, found: Counter[tuple[GroupName, str]]) -> str:
    """A text with the functions that have the most glue in a group: "A.learn (my.py:12), ... at `env+actor`"."""
    functions: dict[str, tuple[str, int]] = {}
    for (its_group, at), times in found.items():
        if its_group == group and at:
            line, _, function = at.removesuffix(")").partition(" (")
            first, so_far = functions.get(function, (line.rpartition(":")[0], 0))
            functions[function] = first, so_far + times
    most = sorted(functions.items(), key=lambda item: -item[1][1])
    names = [f"{function or 'glue'} ({line})" for function, (line, _) in most[:MOST_FUNCTIONS]]
    more = [f"{len(most) - MOST_FUNCTIONS} more"] if len(most) > MOST_FUNCTIONS else []
    return f"{', '.join([*names, *more])} at `{group}`" if names else ""


def _glue(body: Body, placement: Placement, around: GroupName | None = None) -> Iterator[tuple[GroupName, str]]:
    """Yield (group, line) of every op without a role. `around`: the group of an enclosing scan that is not split."""
    for op in body.ops:
        group = around or placement.ops.get(op)
        if op.body:
            yield from _glue(op.body, placement, group)
        elif group is not None and not op.roles:
            yield group, op.at
