"""Test that a layout changes nothing but time: run a few iterations, and compare the results with those of a reference.

    deviations    the difference of every leaf of the carry and of every metric from each reference, and the allowed difference
    check_layout  returns the largest difference, or raises a PartitionError that names the worst deviation

These are the references and the allowed differences. `docs/law.md` explains them:

    layout                                      reference                     allowed
    every site computes whole arrays            jax.jit(iterate)              0
    replicas or devices divide the arrays       jax.jit(iterate)              1e-5
    several learner shards                      jax.jit(jax.vmap(iterate))    1e-5
    exact=True                                  the layout with one worker    0
    relaxed                                     a replay of the log           0

The first three references run `iterate` without marks. A layout with exact=True is also compared with jax.jit(iterate), as in the
first two rows. A relaxed layout with merge="all" is also run without its lag, and then compared as in the rows above.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from choreo import roles
from choreo.envs.gymnasium import HostEnv
from choreo.errors import PartitionError
from choreo.layouts.base import Layout
from choreo.plans.build import plan
from choreo.plans.plan import Plan
from choreo.runtime.engine.metrics import combine_metrics
from choreo.runtime.engine.schedule import VersionRead
from choreo.runtime.inprocess import InProcess
from choreo.testing.marks import unmarked

ROUNDING = 1e-5
"""The difference that level 3 of the law allows in float32 over three iterations."""
LAST_BIT = 1e-6
"""Where the law promises equal bits, the compiler may still round a last bit differently. For a difference up to this number,
`beyond` says so."""

Values = dict[str, np.ndarray]
"""Every leaf of the final carry, and every metric over all iterations, by name."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The difference of one leaf of the carry, or of one metric over all iterations, from the reference."""

    name: str
    """The leaf or the metric: `carry.train.weights`, `metrics['loss']`."""
    difference: float
    """The largest |a - b| / max(1, |b|) for floats, |a - b| for integers; inf if shapes or types differ. `b` is the reference."""
    allowed: float
    """The largest difference that is allowed."""
    reference: str
    """The name of the reference."""

    @property
    def is_allowed(self) -> bool:
        """Whether the difference is at most the allowed difference."""
        return self.difference <= self.allowed


def check_layout(
    algo: Any, env: Any, layout: Layout, *, iterations: int = 3, tolerance: float | None = None, seed: int = 0
) -> float:
    """Run a few iterations in the layout, and compare carry and metrics with the references; returns the largest difference.

    Raises PartitionError if a leaf or metric differs by more than `tolerance` (default: the difference that the law allows). A plan
    is proved correct when it is made; this test only confirms the proof with numbers. With many iterations, a correct plan may
    fail the test, because rounding may have changed a sampled action.
    """
    found = deviations(algo, env, layout, iterations=iterations, tolerance=tolerance, seed=seed)
    worst = worst_of(found)
    if not worst.is_allowed:
        raise beyond(worst, env, iterations)
    return max(deviation.difference for deviation in found)


def deviations(
    algo: Any, env: Any, layout: Layout, *, iterations: int = 3, tolerance: float | None = None, seed: int = 0
) -> list[Deviation]:
    """The deviation of every leaf of the carry and every metric from each reference that the law names for this layout.

    `tolerance` is the allowed difference; None means the difference that the law allows.
    """
    key, the_plan = jax.random.key(seed), plan(algo, env, layout)
    planned, log = _planned_run(the_plan, key, iterations)
    if layout.is_relaxed:
        again, _ = _planned_run(the_plan, key, iterations, replay=log)
        found = _compare(planned, again, reference="a replay of the log", allowed=tolerance or 0.0)
        if layout.merge == "any":  # each update uses the data of one worker, so no run in lockstep has the same updates
            return found
        # With a lag, results may differ from the plain program without any mistake, so this comparison would show nothing. So
        # compare the plain program with the same layout without a lag.
        in_lockstep = deviations(algo, env, _in_lockstep(layout), iterations=iterations, tolerance=tolerance, seed=seed)
        return found + [
            replace(deviation, reference=f"{deviation.reference}, if max_lag=0") for deviation in in_lockstep
        ]
    found = []
    if layout.exact:
        alone, _ = _planned_run(plan(algo, env, _with_one_worker(layout)), key, iterations)
        found += _compare(planned, alone, reference="the layout with one worker", allowed=tolerance or 0.0)
    plain = _plain_run(algo, env, key, iterations, the_plan)
    by_law = 0.0 if _has_the_same_shapes(the_plan) else ROUNDING
    name = "jax.jit(iterate)" if the_plan.shards == 1 else f"jax.vmap(iterate) over {the_plan.shards} shards"
    return found + _compare(planned, plain, reference=name, allowed=by_law if tolerance is None else tolerance)


def worst_of(found: list[Deviation]) -> Deviation:
    """The largest of the deviations that are not allowed; if all are allowed, the largest of all."""
    return max(found, key=lambda deviation: (not deviation.is_allowed, deviation.difference))


def beyond(worst: Deviation, env: Any, iterations: int) -> PartitionError:
    """The error for a deviation that is not allowed."""
    fix = "Please report this program: Choreo should have refused to make a wrong plan."
    if worst.allowed == 0 and worst.difference <= LAST_BIT:
        fix = (
            "The compiler may have rounded a last bit differently (docs/law.md, the limits of level 2). "
            f"Use tolerance={LAST_BIT} (--tolerance {LAST_BIT}) to allow such a difference."
        )
    elif isinstance(env, HostEnv):
        fix = (
            f"Test with choreo.testing.check_env whether `{env.name}` repeats its steps for the same seed and actions. If the "
            "environment repeats its steps, please report this program: Choreo should have refused to make a wrong plan."
        )
    return PartitionError(
        f"After {iterations} iterations in this layout, `{worst.name}` differs by {worst.difference:.1e} from "
        f"{worst.reference}; the largest allowed difference is {worst.allowed:g}.",
        fix=fix,
    )


def _has_the_same_shapes(the_plan: Plan) -> bool:
    """Whether level 2 of the law applies: every site computes whole arrays, like the plain program."""
    sites = the_plan.sites.replicas
    divided = any(group.devices > 1 for group in the_plan.layout.groups if group.name in sites)
    return not divided and the_plan.shards == 1 and all(the_plan.replicas(group) == 1 for group in sites)


def _in_lockstep(layout: Layout) -> Layout:
    return Layout(*layout.groups, exact=layout.exact, shards=layout.shards, name=layout.name)


def _with_one_worker(layout: Layout) -> Layout:
    groups = [
        g if g.replicas is None else type(g)(*g.roles, replicas=1, device=g.device, axis=g.axis) for g in layout.groups
    ]
    return Layout(*groups, exact=layout.exact, name=layout.name)


def _planned_run(
    the_plan: Plan, key: jax.Array, iterations: int, replay: list[VersionRead] | None = None
) -> tuple[Values, list[VersionRead]]:
    runtime = InProcess(the_plan, replay=replay)
    with contextlib.closing(runtime):
        runtime.start(key)
        metrics = runtime.run(0, iterations)
        return _named(runtime.carry(), metrics), runtime.log


def _plain_run(algo: Any, env: Any, key: jax.Array, iterations: int, the_plan: Plan) -> Values:
    """The values of a run without layout and marks: of `jit(iterate)` or, with several shards, of `jit(vmap(iterate))`."""
    init_key, run_key = jax.random.split(key)
    with unmarked(), _new_host_objects():
        carry = eqx.filter_jit(lambda key: algo.init(env, key))(init_key)
        if the_plan.shards > 1:
            return _plain_shards(algo, env, carry, run_key, iterations, the_plan)

        @eqx.filter_jit
        def iterate(carry, key):
            carry, metrics = algo.iterate(env, carry, key)
            return carry, {name: jnp.asarray(value) for name, value in metrics.items()}

        rows = []
        for i in range(iterations):
            carry, metrics = iterate(carry, jax.random.fold_in(run_key, i))
            rows.append(metrics)
        return _named(carry, _stacked(rows))


def _plain_shards(algo: Any, env: Any, carry: Any, run_key: jax.Array, iterations: int, the_plan: Plan) -> Values:
    shards, axes = the_plan.shards, list(the_plan.carry_axes)
    carry = jax.tree.map(lambda x, form: jnp.asarray(x) if _is_array(form) else x, carry, the_plan.carry)
    tree = jax.tree.structure(eqx.filter(carry, eqx.is_array))
    static = eqx.filter(carry, eqx.is_array, inverse=True)
    env = env.with_num_envs(env.num_envs // shards)

    def one_shard(leaves, key):
        after, metrics = algo.iterate(env, eqx.combine(jax.tree.unflatten(tree, leaves), static), key)
        return jax.tree.leaves(eqx.filter(after, eqx.is_array)), {name: jnp.asarray(x) for name, x in metrics.items()}

    together = jax.jit(jax.vmap(one_shard, (axes, 0), (axes, 0), axis_name=roles.SHARD_AXIS))
    leaves, rows = the_plan.leaves(carry), []
    for i in range(iterations):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(run_key, i), jnp.arange(shards))
        leaves, metrics = together(leaves, keys)
        rows.append(metrics)
    return _named(the_plan.combine(leaves), combine_metrics(_stacked(rows), the_plan.reductions))


def _is_array(form: Any) -> bool:
    """Whether a leaf of the plan's carry is an array; a plan never changes the other leaves."""
    return isinstance(form, jax.ShapeDtypeStruct) or eqx.is_array(form)


@contextlib.contextmanager
def _new_host_objects() -> Iterator[None]:
    """Hide the Python environments that this process keeps for compiled programs, so that the programs make new ones.

    At the end, the new environments are closed, and the old ones are put back. A run with the old environments could give other
    results, because they may keep state that `reset` does not reset.
    """
    kept = dict(roles._host_objects)
    roles._host_objects.clear()
    try:
        yield
    finally:
        jax.effects_barrier()  # wait until no callback uses the objects
        for objects in roles._host_objects.values():
            objects.close()
        roles._host_objects.clear()
        roles._host_objects.update(kept)


def _stacked(rows: list[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def _named(carry: Any, metrics: Mapping[str, np.ndarray]) -> Values:
    leaves = jax.tree_util.tree_leaves_with_path(carry)
    # Compare Python numbers too. A plan never changes them, but in the run without a layout `iterate` may have changed them. Then
    # the two results differ.
    named = {f"carry{jax.tree_util.keystr(path)}": _as_numpy(leaf) for path, leaf in leaves if eqx.is_array_like(leaf)}
    return named | {f"metrics[{name!r}]": np.asarray(values) for name, values in metrics.items()}


def _as_numpy(leaf: Any) -> np.ndarray:
    leaf = jnp.asarray(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _compare(run: Values, wanted: Values, *, reference: str, allowed: float) -> list[Deviation]:
    """The deviation of each value. The difference is infinite if only one run has the value, or if shapes or types differ."""
    names = dict.fromkeys([*wanted, *run])
    return [
        Deviation(
            name=name,
            difference=_difference(run[name], wanted[name]) if name in run and name in wanted else math.inf,
            allowed=allowed,
            reference=reference,
        )
        for name in names
    ]


def _difference(found: np.ndarray, wanted: np.ndarray) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return math.inf
    if not wanted.size:
        return 0.0
    real = jnp.issubdtype(wanted.dtype, jnp.inexact)
    wide = np.complex128 if jnp.issubdtype(wanted.dtype, jnp.complexfloating) else np.float64
    a, b = found.astype(wide), wanted.astype(wide)
    with np.errstate(invalid="ignore"):  # inf - inf would cause a warning
        difference = np.abs(a - b) / (np.maximum(1.0, np.abs(b)) if real else 1.0)
    difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, difference)
    return float(np.max(np.where(np.isnan(difference), math.inf, difference)))
