"""Draw a plan: one lane for each group. The steps of a group are boxes, in order, and transfers are arrows."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from choreo.graph.svg import Arrow, Box, Item, Lane, LoopFrame, draw_lanes
from choreo.graph.text import count, describe, format_bytes, wrap
from choreo.partition.program import Loop, Step, Transfer
from choreo.plans.costs import Crossing, ProgramCosts
from choreo.plans.printer import (
    age,
    plan_groups,
    promise,
    step_name,
    step_notes,
    title,
    where,
)
from choreo.types import GroupName, Role

if TYPE_CHECKING:
    from choreo.plans.plan import Plan
else:  # plan.py imports this module
    Plan = Any

GLUE = "glue"
"""The name of a segment without fragments."""


def draw_plan(plan: Plan) -> str:
    """The plan of one iteration as SVG text."""
    lanes = [
        Lane(name, tuple(where(plan, group).split(", ")), _roles(plan, name), replicas=plan.processes(name))
        for group in plan_groups(plan)
        for name in [group.name]
    ]
    sent = plan.costs().iterate
    items = list(_items(plan, plan.iterate.steps, lanes, iter(sent.crossings)))
    layout = f"Layout {plan.layout.name}: {_total(sent)}"
    return draw_lanes(title(plan), layout, lanes, items, wrap(promise(plan), 120))


def _roles(plan: Plan, group: GroupName) -> tuple[Role, ...]:
    """The algorithm's roles in a group. The layout may name roles that the algorithm lacks, and the algorithm may have roles that
    the layout does not name."""
    return tuple(sorted(role for role, its_group in plan.sites.group_of.items() if its_group == group))


def _items(plan: Plan, steps: Sequence[Step], lanes: Sequence[Lane], crossings: Iterator[Crossing]) -> Iterator[Item]:
    """Boxes, arrows and frames of some steps. `crossings` yields the crossing of each transfer, in the order of the steps."""
    lane_of = {lane.title: i for i, lane in enumerate(lanes)}
    for step in steps:
        if isinstance(step, Loop):
            times = f"× {step.length}" + (" backwards" if step.reverse else "")
            yield LoopFrame(times, "", tuple(_items(plan, step.body, lanes, crossings)))
        elif isinstance(step, Transfer):
            crossing = next(crossings)
            size = _size(crossing) + age(step)
            yield Arrow(lane_of[step.src], lane_of[step.dst], describe(crossing.moves), size, dashed=bool(step.lag))
        else:
            lane = lane_of[step.group]
            roles = () if step.name == GLUE else lanes[lane].roles
            yield Box(lane, step_name(step), tuple(step_notes(plan, step)), roles)


def _total(sent: ProgramCosts) -> str:
    if not sent.crossings:
        return "nothing crosses"
    return f"{count(sent.num_messages, 'message')}, {format_bytes(sent.nbytes)} per iteration"


def _size(crossing: Crossing) -> str:
    messages = count(crossing.num_messages, "message")
    if crossing.times == 1:
        return f"{format_bytes(crossing.nbytes)} in {messages}"
    return f"{format_bytes(crossing.nbytes)} in {messages}, {format_bytes(crossing.total_nbytes)} per iteration"
