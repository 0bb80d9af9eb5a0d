"""Names of the steps of a plan, under which a runtime measures how long they take. Importing this file does not import JAX.

A worker has only those steps in which one of its groups takes part. So a step is named by its position among the steps of
one group, which is the same in the whole plan and at a worker.
"""

from typing import Literal, NamedTuple, Protocol, runtime_checkable

from choreo.partition.program import Program, groups_of, walk
from choreo.types import GroupName

Phase = Literal["run", "send", "wait", "hand over"]
"""What is measured: a run of a segment or a host call; sending one message or waiting for one message of a transfer; or all of a
transfer between sites of one process."""


class StepPhase(NamedTuple):
    """What is measured of a step, at one group."""

    program: str
    """The name of the program: "init" or "iterate"."""
    group: GroupName
    """A group that takes part in the step."""
    number: int
    """The position of the step among all steps of this group, in the order of `walk`."""
    phase: Phase
    """What is measured."""


@runtime_checkable
class StepTimes(Protocol):
    """Measured times of the steps of a plan; `runtime.engine.profile.Profile` has this form."""

    @property
    def plan_name(self) -> str:
        """The plan that was measured; see `Plan.name`."""
        ...

    def mean_seconds(self, phase: StepPhase) -> float | None:
        """The mean over all measurements of this phase; None if the phase was never measured."""
        ...


def step_numbers(program: Program) -> dict[tuple[int, GroupName], int]:
    """The position of each step among the steps of each of its groups, by the `id` of the step and the group."""
    numbers: dict[tuple[int, GroupName], int] = {}
    reached: dict[GroupName, int] = {}
    for step, _ in walk(program.steps):
        for group in groups_of(step):
            numbers[id(step), group] = reached.setdefault(group, 0)
            reached[group] += 1
    return numbers
