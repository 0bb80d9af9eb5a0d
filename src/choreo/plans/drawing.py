"""A plan as a picture: one lane per group of sites, their work in order, and every message between them."""

from collections.abc import Iterator, Sequence

from choreo.graph.printer import count, format_bytes, wrap
from choreo.graph.svg import Arrow, Box, Item, Lane, LoopFrame, draw_lanes
from choreo.partition.program import Loop, Step, Transfer
from choreo.plans.plan import Plan
from choreo.plans.printer import (
    Crossing,
    age,
    crossings,
    num_replicas,
    plan_groups,
    promise,
    step_name,
    step_notes,
    title,
    where,
)
from choreo.types import GroupName, Role

GLUE = "glue"
"""The name of a segment without fragments."""


def draw_plan(plan: Plan) -> str:
    """The plan of one iteration as SVG text."""
    lanes = [
        Lane(name, tuple(where(plan, group).split(", ")), _roles(plan, name), replicas=num_replicas(plan, name))
        for group in plan_groups(plan)
        for name in [group.name]
    ]
    found = list(crossings(plan, plan.iterate))
    items = list(_items(plan, plan.iterate.steps, lanes, iter(found)))
    layout = f"Layout {plan.layout.name}: {_total(found)}"
    return draw_lanes(title(plan), layout, lanes, items, wrap(promise(plan), 120))


def _roles(plan: Plan, group: GroupName) -> tuple[Role, ...]:
    """The algorithm's roles that live there: not all that the layout names, and perhaps some that it does not."""
    return tuple(sorted(role for role, home in plan.sites.group_of.items() if home == group))


def _items(plan: Plan, steps: Sequence[Step], lanes: Sequence[Lane], found: Iterator[Crossing]) -> Iterator[Item]:
    """`found`: the crossings of all transfers, in the order of the steps."""
    lane_of = {lane.title: i for i, lane in enumerate(lanes)}
    for step in steps:
        if isinstance(step, Loop):
            times = f"× {step.length}" + (" backwards" if step.reverse else "")
            yield LoopFrame(times, "", tuple(_items(plan, step.body, lanes, found)))
        elif isinstance(step, Transfer):
            crossing = next(found)
            size = _size(crossing) + age(step)
            yield Arrow(lane_of[step.src], lane_of[step.dst], crossing.what, size, dashed=bool(step.lag))
        else:
            lane = lane_of[step.group]
            roles = () if step.name == GLUE else lanes[lane].roles
            yield Box(lane, step_name(step), tuple(step_notes(plan, step)), roles)


def _total(found: Sequence[Crossing]) -> str:
    if not found:
        return "nothing crosses"
    messages = count(sum(c.times * c.num_messages for c in found), "message")
    return f"{messages}, {format_bytes(sum(c.nbytes * c.times for c in found))} per iteration"


def _size(crossing: Crossing) -> str:
    messages = count(crossing.num_messages, "message")
    if crossing.times == 1:
        return f"{format_bytes(crossing.nbytes)} in {messages}"
    per_iteration = format_bytes(crossing.nbytes * crossing.times)
    return f"{format_bytes(crossing.nbytes)} in {messages}, {per_iteration} per iteration"
