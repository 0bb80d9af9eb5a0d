"""Never silently wrong: a program under a layout is refused with the user's line, or equals the reference.

Segments are evaluated op by op: what is under test is which program a site is given, not XLA, and equations of the same
shape compile once for all tests. `compiled=True` runs segments as they run in earnest, with donation.
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
from choreo.plans.plan import Plan, plan_traced, trace_for
from choreo.runtime.engine.schedule import VersionRead
from choreo.runtime.inprocess import InProcess
from choreo.testing import unmarked
from laws.reference import Run, assert_close, merged_reference, named, reference_run, sharded_reference, stacked

LAYOUTS = {
    "coarse x2": coarse(2),
    "fine x2": fine(2),
    "env x2, actor x3": Layout(Group("env", replicas=2), Group("actor", replicas=3), Group("buffer", "learner")),
}
"""Those of the issue."""
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


@dataclass(frozen=True)
class Pond:
    """The smallest environment: a state of `width` numbers each, moved by an action of the same shape."""

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
        return 0.6 * state + 0.4 * jnp.tanh(0.2 * action)  # contracts: rounding must not grow into a difference


class OpByOp(InProcess):
    """The serial runtime, without compiling segments."""

    def __init__(self, plan: Plan, **options: Any):
        super().__init__(plan, **options)
        self.backend.compiled = lambda fn, *_: SimpleNamespace(call=fn)
        self.backend.loaded.clear()
        self.execution = type(self.execution)(self.execution.programs, self.execution.topology, self.backend)


def refuse_or_equal(
    algo: Any,
    env: Any,
    file: str,
    layouts: dict[str, Layout] = LAYOUTS,
    *,
    tolerance: float = 1e-5,
    compiled: bool = False,
    meaning: Callable[[], Run] | None = None,
) -> dict[str, ChoreoError | None]:
    """Run under each layout; return the refusals. `file`: the user's file, whose line a refusal must name.
    `meaning`: the reference result, where several programs have the same."""
    traced = functools.cache(lambda: trace(algo, env))
    reference = meaning or functools.cache(
        lambda: (reference_run if compiled else reference_op_by_op)(algo, env, jax.random.key(KEY))
    )
    refusals: dict[str, ChoreoError | None] = {}
    for name, layout in layouts.items():
        try:
            usual = layout.shards == 1 and layout.merge == "all"
            planned = plan_traced(traced() if usual else trace_for(algo, env, layout), layout, title=name)
        except AlgorithmError as refusal:
            assert re.search(r"`carry|metric", str(refusal)), f"the refusal does not name a leaf or a metric: {refusal}"
            refusals[name] = refusal
            continue
        except (PartitionError, LayoutError) as refusal:
            if not (layout.is_relaxed and "merge" in str(refusal) and layout.merge == "any"):  # the user's own option
                names_the_users_line(refusal, file)
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
            raise AssertionError(f"silently wrong under {name}: {wrong}") from wrong
        refusals[name] = None
    return refusals


def reference_op_by_op(algo: Any, env: Any, key: jax.Array, iterations: int = 3) -> Run:
    """The reference meaning without compiling it as one: what a user gets who calls `iterate` of unmarked functions."""
    init_key, run_key = jax.random.split(key)
    with unmarked():
        carry, rows = as_jax(algo.init(env, init_key)), []
        for i in range(iterations):
            carry, metrics = algo.iterate(env, carry, jax.random.fold_in(run_key, i))
            carry = as_jax(carry)
            rows.append(as_jax(metrics))
    return named(carry, stacked(rows))


def as_jax(tree: Any) -> Any:
    """NumPy's arrays as JAX's, as they come out of a `jit`."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x, tree)


def planned_run(planned: Plan, runtime: type[InProcess], replay: list[VersionRead] | None = None) -> Run:
    return run_and_log(planned, runtime, replay)[0]


def run_and_log(
    planned: Plan, runtime: type[InProcess], replay: list[VersionRead] | None = None
) -> tuple[Run, list[VersionRead]]:
    running = runtime(planned, replay=replay)
    running.start(jax.random.key(KEY))
    metrics = running.run(0, 3)
    metrics = {name: value for name, value in metrics.items() if name not in LAGS}
    return named(running.carry(), metrics), list(running.log)


LAGS = ("lag_mean", "lag_max")


def run_without_lag(planned: Plan, runtime: type[InProcess]) -> Run:
    """A relaxed layout in which every reader happens to read the newest version: the law of one that is not relaxed."""
    _, log = run_and_log(planned, runtime)
    return planned_run(planned, runtime, [read._replace(version=read.update) for read in log])


def run_merged(algo: Any, env: Any, planned: Plan, runtime: type[InProcess]) -> tuple[Run, Run]:
    """With merge="any" and no lag: what it gives, and what it means."""
    run, log = run_and_log(planned, runtime)
    return run, merged_reference(algo, env, planned.num_workers, log, jax.random.key(KEY), jit=lambda fn: fn)


def names_the_users_line(refusal: Exception, file: str) -> None:
    line = re.search(rf"{re.escape(Path(file).name)}:\d+", str(refusal))
    assert line, f"the refusal does not name a line of {Path(file).name}: {refusal}"
