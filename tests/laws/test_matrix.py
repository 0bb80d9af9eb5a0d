"""The law (docs/law.md) for every algorithm in every layout. A cell is one such pair; the cells come from `matrix.py`.

This is what each kind of cell must do:

lockstep layout, one process     agree with the reference, `jax.jit(iterate)`, up to 1e-5 after three iterations (level 3)
lockstep layout, workers         give the bits that the same plan gives in one process (level 1)
relaxed layout                   keep every lag within `max_lag`, and replay from its log with the same bits (level 4)
cell that cannot run             be refused with the message that `matrix.py` states
"""

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
    """The trace of an algorithm. All layouts with the same number of shards share one trace.

    With merge="any", the learner uses the parts of the workers one by one. So each such layout needs a separate trace: pass the
    layout as `one_by_one`.
    """
    layout = one_by_one or Layout(Group("env", "actor", "buffer", "learner"), shards=shards)
    return trace_for(matrix.algorithm(algo), matrix.environment(algo), layout)


WITH_WORKERS = matrix.cells_with_workers()
"""Cells that `test_cell` also runs with worker processes."""
OTHERS = [cell for cell in matrix.CELLS if cell not in WITH_WORKERS and not matrix.refused(*cell)]


@pytest.mark.parametrize(("algo", "layout"), matrix.CELLS)
def test_cell(algo, layout):
    """Run one cell in one process. If the cell is in `WITH_WORKERS`, also run the same plan with worker processes."""
    if refusal := matrix.refused(algo, layout):
        with pytest.raises((LayoutError, PartitionError)) as error:
            planned(algo, layout)
        assert str(error.value).startswith(refusal)
        return
    run = check(InProcess(planned(algo, layout)), algo)
    if (algo, layout) in WITH_WORKERS:
        check_with_worker_processes(algo, layout, run)


@pytest.mark.long
@pytest.mark.parametrize(("algo", "layout"), OTHERS)
def test_the_other_cells_keep_the_law_with_worker_processes(algo, layout):
    check_with_worker_processes(algo, layout, run_of(InProcess(planned(algo, layout)), KEY))


def check(runtime, algo: str):
    """Run a cell, compare it with its reference or replay its log, and return its result."""
    run = run_of(runtime, KEY)
    if runtime.plan.layout.is_relaxed:
        check_log(runtime, run)
    else:
        assert_close(run, reference(algo, runtime.plan.shards), 1e-5)
    return run


def check_log(runtime, run):
    """Assert that a replay of the log gives the same bits, and that the log keeps the bounds of the layout."""
    log = list(runtime.log)
    assert_same_bits(run_of(InProcess(runtime.plan, replay=log), KEY), run)
    check_bounds(log, run, runtime.plan.layout, iterations=3)


def check_with_worker_processes(algo: str, layout: str, in_one_process):
    """Run a cell with worker processes. If the run is relaxed, check its log. If not, it must have the bits of `in_one_process`."""
    runtime = Local(planned(algo, layout))
    run = run_of(runtime, KEY)
    if runtime.plan.layout.is_relaxed:
        check_log(runtime, run)
    else:
        assert_same_bits(run, in_one_process)


def test_every_algorithm_and_every_layout_has_a_cell_with_worker_processes():
    assert {algo for algo, _ in matrix.cells_with_workers()} == {algo for algo, _ in matrix.CELLS}
    assert {layout for _, layout in matrix.cells_with_workers()} == set(matrix.layouts()) - {"per_agent"}


def test_the_docs_have_the_matrix():
    assert matrix.PAGE.read_text() == matrix.page(set(matrix.CELLS)), (
        "docs/matrix.md is out of date; a run of the whole tests/laws/test_matrix.py writes it"
    )
