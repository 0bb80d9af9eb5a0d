"""The law for every algorithm in every layout: see `matrix.py`, from which the cells come."""

import functools

import jax
import pytest

from choreo.errors import LayoutError, PartitionError
from choreo.layouts import Group, Layout
from choreo.plans.build import plan_traced, trace_for
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from laws import matrix
from laws.reference import (
    assert_close,
    assert_same_bits,
    check_bounds,
    reference_run,
    run_of,
    sharded_reference,
)

KEY = jax.random.key(5)


@functools.cache
def reference(algo: str, shards: int):
    if shards == 1:
        return reference_run(matrix.algorithm(algo), matrix.environment(algo), KEY)
    return sharded_reference(matrix.algorithm(algo), matrix.environment(algo), shards, KEY)


@functools.cache
def planned(algo: str, layout: str):
    wanted = matrix.layouts()[layout]
    program = traced(algo, wanted.shards, wanted if wanted.merge == "any" else None)
    return plan_traced(program, wanted, title=f"{algo} {layout}")


@functools.cache
def traced(algo: str, shards: int, one_by_one: Layout | None):
    """What `plan` traces: the same for all layouts with as many shards, but for those that hear workers one by one."""
    layout = one_by_one or Layout(Group("env", "actor", "buffer", "learner"), shards=shards)
    return trace_for(matrix.algorithm(algo), matrix.environment(algo), layout)


PAIRS = matrix.pairs()
OTHERS = [cell for cell in matrix.CELLS if cell not in PAIRS and not matrix.refused(*cell)]


@pytest.mark.parametrize(("algo", "layout"), matrix.CELLS)
def test_cell(algo, layout):
    """In one process; a pair also with worker processes, here, where it is planned and compiled already."""
    if refusal := matrix.refused(algo, layout):
        with pytest.raises((LayoutError, PartitionError)) as error:
            planned(algo, layout)
        assert str(error.value).startswith(refusal)
        return
    run = check(InProcess(planned(algo, layout)), algo, layout)
    if (algo, layout) in PAIRS:
        check_with_worker_processes(algo, layout, run)


@pytest.mark.long
@pytest.mark.parametrize(("algo", "layout"), OTHERS)
def test_with_worker_processes(algo, layout):
    check_with_worker_processes(algo, layout, run_of(InProcess(planned(algo, layout)), KEY))


def check(runtime, algo: str, layout: str):
    the_plan = runtime.plan
    run = run_of(runtime, KEY)
    if the_plan.layout.is_relaxed:
        check_log(runtime, run)
    else:
        assert_close(run, reference(algo, the_plan.shards), 1e-5)
    return run


def check_log(runtime, run):
    log = list(runtime.log)
    assert_same_bits(run_of(InProcess(runtime.plan, replay=log), KEY), run)
    check_bounds(log, run, runtime.plan.layout, iterations=3)


def check_with_worker_processes(algo: str, layout: str, in_one_process):
    """By its own log, or the bits of one process, which are close to the reference."""
    runtime = Local(planned(algo, layout))
    run = run_of(runtime, KEY)
    if runtime.plan.layout.is_relaxed:
        check_log(runtime, run)
    else:
        assert_same_bits(run, in_one_process)


def test_every_algorithm_and_every_layout_has_cells():
    assert {algo for algo, _ in matrix.pairs()} == {algo for algo, _ in matrix.CELLS}
    assert {layout for _, layout in matrix.pairs()} == set(matrix.layouts()) - {"per_agent"}


def test_the_docs_have_the_matrix():
    assert matrix.PAGE.read_text() == matrix.page(set(matrix.CELLS)), "pytest tests/laws/test_matrix.py writes it"
