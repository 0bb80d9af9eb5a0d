"""`refuse_or_equal` checks that Choreo either refuses a program and names the user's line, or computes the reference result.

This is law level 3 for programs of any kind: an accepted program is never silently wrong. The reference is the
program without marks. The tolerance is 1e-5 unless a test passes a different one.

Segments are evaluated op by op, because these tests check which program each site gets, and not how XLA compiles it. This is
also faster: an op is compiled once per shape for all tests. With `compiled=True` segments are compiled as in a run, with
donation.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import choreo
from choreo.errors import AlgorithmError, ChoreoError, LayoutError, PartitionError
from choreo.layouts import Group, Layout, coarse, fine
from choreo.partition.trace import trace
from choreo.plans.build import plan_traced, trace_for
from choreo.plans.plan import Plan
from choreo.runtime.engine.schedule import VersionRead
from choreo.runtime.inprocess import InProcess
from choreo.testing import unmarked
from laws.reference import Run, assert_close, merged_reference, named, reference_run, sharded_reference, stacked

LAYOUTS = {
    "coarse x2": coarse(2),
    "fine x2": fine(2),
    "env x2, actor x3": Layout(Group("env", replicas=2), Group("actor", replicas=3), Group("buffer", "learner")),
}
"""Two presets, and a layout in which two groups divide the environments into blocks of different sizes."""
EVERYTHING_REPLICATED = Layout(Group("env", "actor", "buffer", "learner", replicas=2))
ACTOR_DIVIDED = Layout(Group("actor", replicas=3), Group("env", "buffer", "learner"))
EXACT = coarse(3, exact=True)
MORE_LAYOUTS = LAYOUTS | {
    "everything x2": EVERYTHING_REPLICATED,
    "actor x3": ACTOR_DIVIDED,
    "coarse x3 exact": EXACT,
    "three sites": Layout(Group("env"), Group("actor"), Group("learner")),
}
KEY = 7
"""The seed of all runs."""


@dataclass(frozen=True)
class Pond:
    """A minimal environment. Its state is an array of `width` numbers, and an action of the same shape changes the state."""

    num_envs: int = 6
    width: int = 3

    def with_num_envs(self, n: int) -> "Pond":
        return replace(self, num_envs=n)

    def keys(self, key):
        return jax.random.split(key, self.num_envs)

    @choreo.fragment("env")
    def reset(self, keys):
        return jax.vmap(lambda key: jax.random.normal(key, (self.width,)))(keys)

    @choreo.fragment("env")
    def step(self, state, action):
        return 0.6 * state + 0.4 * jnp.tanh(0.2 * action)  # a contraction: rounding errors shrink


class OpByOp(InProcess):
    """An in-process runtime that evaluates segments op by op instead of compiling them."""

    def __init__(self, plan: Plan, **options: Any):
        super().__init__(plan, **options)
        self.backend.compiled = lambda fn, *_: SimpleNamespace(call=fn)
        self.backend.loaded.clear()
        self.execution = type(self.execution)(self.execution.programs, self.execution.topology, self.backend)


def refuse_or_equal(
    algo: Any,
    env: Any,
    source: str,
    layouts: dict[str, Layout] = LAYOUTS,
    *,
    tolerance: float = 1e-5,
    compiled: bool = False,
    reference: Callable[[], Run] | None = None,
) -> dict[str, ChoreoError | None]:
    """Run `algo` for three iterations under each layout; return, for each layout's name, the refusal or None.

    The test fails if a result differs from the reference, or if a refusal does not say what is refused. An `AlgorithmError`
    must name a leaf or a metric. Any other refusal must name a line of `source` (the user's file, or folder of files), unless
    the refusal is about merge="any". `reference` is a function that returns the reference result; pass it if several programs
    share the result.
    """
    traced = functools.cache(lambda: trace(algo, env))
    reference = reference or functools.cache(
        lambda: (reference_run if compiled else reference_op_by_op)(algo, env, jax.random.key(KEY))
    )
    refusals: dict[str, ChoreoError | None] = {}
    for name, layout in layouts.items():
        try:
            shares_trace = layout.shards == 1 and layout.merge == "all"
            planned = plan_traced(traced() if shares_trace else trace_for(algo, env, layout), layout, title=name)
        except AlgorithmError as refusal:
            assert re.search(r"`carry|metric", str(refusal)), f"the refusal does not name a leaf or a metric: {refusal}"
            refusals[name] = refusal
            continue
        except (PartitionError, LayoutError) as refusal:
            # A refusal because of merge="any" is about the layout, and names no line.
            if not (layout.is_relaxed and "merge" in str(refusal) and layout.merge == "any"):
                assert_names_a_line(refusal, source)
            refusals[name] = refusal
            continue
        runtime = InProcess if compiled else OpByOp
        if layout.merge == "any":
            run, wanted = run_merged(algo, env, planned, runtime)
        elif layout.shards > 1:
            wanted = sharded_reference(algo, env, layout.shards, jax.random.key(KEY), jit=lambda fn: fn)
            run = planned_run(planned, runtime)
        else:
            run, wanted = (run_without_lag if layout.max_lag else planned_run)(planned, runtime), reference()
        try:
            assert_close(run, wanted, tolerance)
        except AssertionError as wrong:
            raise AssertionError(f"The result is silently wrong under the layout `{name}`: {wrong}") from wrong
        refusals[name] = None
    return refusals


def reference_op_by_op(algo: Any, env: Any, key: jax.Array, iterations: int = 3) -> Run:
    """The result of the program without marks. `init` and `iterate` are not compiled, but evaluated op by op."""
    init_key, run_key = jax.random.split(key)
    with unmarked():
        carry, rows = as_jax(algo.init(env, init_key)), []
        for i in range(iterations):
            carry, metrics = algo.iterate(env, carry, jax.random.fold_in(run_key, i))
            carry = as_jax(carry)
            rows.append(as_jax(metrics))
    return named(carry, stacked(rows))


def as_jax(tree: Any) -> Any:
    """The same tree with JAX arrays in place of NumPy arrays and scalars, as `jax.jit` would return it."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x, tree)


def planned_run(planned: Plan, runtime: type[InProcess], replay: list[VersionRead] | None = None) -> Run:
    """Run three iterations of a plan; return the result without the metrics `lag_mean` and `lag_max`."""
    return run_and_log(planned, runtime, replay)[0]


def run_and_log(
    planned: Plan, runtime: type[InProcess], replay: list[VersionRead] | None = None
) -> tuple[Run, list[VersionRead]]:
    """Run three iterations of a plan; return the result, and the log of which version each worker read."""
    running = runtime(planned, replay=replay)
    running.start(jax.random.key(KEY))
    metrics = running.run(0, 3)
    metrics = {name: value for name, value in metrics.items() if name not in ("lag_mean", "lag_max")}
    return named(running.carry(), metrics), list(running.log)


def run_without_lag(planned: Plan, runtime: type[InProcess]) -> Run:
    """Replay a relaxed plan with a log in which every worker reads the newest version.

    Without any lag, a relaxed layout must give the reference result.
    """
    _, log = run_and_log(planned, runtime)
    return planned_run(planned, runtime, [read._replace(version=read.update) for read in log])


def run_merged(algo: Any, env: Any, planned: Plan, runtime: type[InProcess]) -> tuple[Run, Run]:
    """The result of a plan with merge="any" and no lag, and its reference result for the same order of arrival."""
    run, log = run_and_log(planned, runtime)
    return run, merged_reference(algo, env, planned.num_workers, log, jax.random.key(KEY), jit=lambda fn: fn)


def assert_names_a_line(refusal: Exception, source: str) -> None:
    """Assert that a refusal names a line of `source`: the user's file, or the folder of the user's files."""
    files = re.escape(source) + (r"/\w+\.py" if Path(source).is_dir() else "")
    assert re.search(rf"{files}:\d+", str(refusal)), f"the refusal does not name a line of {source}: {refusal}"
