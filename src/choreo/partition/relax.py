"""Which messages of a program may be out of date: what one group carries on and another only reads.

Lag belongs to a pair of groups. It may be given to a pair if all that goes from one to the other is carried from iteration
to iteration: parameters to workers, say. All of it travels as one bundle, so that nobody reads half of an update. Where data
of the same iteration goes the same way, as actions do in `fine`, there is nothing to relax.
"""

from dataclasses import replace

from choreo.errors import LayoutError
from choreo.partition.program import Program, Transfer, walk
from choreo.types import GroupName


def relax(program: Program, max_lag: int, *, layout: str) -> Program:
    """The program with `lag` given to every bundle that may have it."""
    pairs = relaxable(program)
    if not pairs:
        raise LayoutError(
            f"The layout {layout} has max_lag={max_lag}, but nothing in it may be out of date: no site only reads what "
            "another one carries from iteration to iteration.",
            fix="Leave out max_lag, or use a layout whose workers act with parameters of a learner: coarse, sebulba, central.",
        )
    steps = [
        replace(step, lag=max_lag) if isinstance(step, Transfer) and (step.src, step.dst) in pairs else step
        for step in program.steps
    ]
    return replace(program, steps=tuple(steps))


def relaxable(program: Program) -> set[tuple[GroupName, GroupName]]:
    """Pairs between which only carried values travel."""
    carried = {(group, ref) for port in program.ins for group, (ref, _) in port.held.items()}
    transfers = [step for step, _ in walk(program.steps) if isinstance(step, Transfer)]
    fresh = {
        (step.src, step.dst) for step in transfers if any((step.src, move.src) not in carried for move in step.moves)
    }
    inside = {(step.src, step.dst) for step in transfers if step not in program.steps}
    return {(step.src, step.dst) for step in transfers} - fresh - inside
