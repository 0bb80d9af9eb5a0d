"""The number that names a step is the same in the whole plan and in the part of the plan that a worker gets."""

import pytest

from choreo.partition.program import Transfer, groups_of, walk
from choreo.plans.export import export_program
from choreo.plans.step_times import step_numbers
from plans.planned import planned


def described(step) -> str:
    name = f"{step.src} -> {step.dst}" if isinstance(step, Transfer) else getattr(step, "name", "")
    return f"{type(step).__name__} {name}"


@pytest.mark.parametrize("name", ["fine_x2", "env_x2_actor_x3", "dqn_apex_x4_x2", "coarse_x2_lag"])
def test_a_step_has_the_same_number_at_a_worker_as_in_the_plan(name):
    shown = planned(name)
    for program in (shown.init, shown.iterate):
        numbers = step_numbers(program)
        for group in shown.sites.replicas:
            own = export_program(program, [group], shown.sites.replicas)
            at_worker = step_numbers(own)
            whole = {numbers[id(s), group]: described(s) for s, _ in walk(program.steps) if group in groups_of(s)}
            part = {at_worker[id(s), group]: described(s) for s, _ in walk(own.steps) if group in groups_of(s)}
            assert part == whole and sorted(whole) == list(range(len(whole)))
