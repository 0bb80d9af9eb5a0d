"""The reference meaning of an algorithm, `jax.jit(iterate)`, and a planned run to compare with it."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from choreo.layouts import Layout
from choreo.partition.trace import merge_shards, split_shards
from choreo.plans import Plan, plan
from choreo.roles import SHARD_AXIS
from choreo.runtime.inprocess import InProcess, combine_metrics
from choreo.runtime.schedule import Read

Run = dict[str, np.ndarray]
"""Every leaf of the final carry, and every metric of every iteration, by name."""


def reference_run(algo: Any, env: Any, key: jax.Array, iterations: int = 3) -> Run:
    """Without any of Choreo's machinery: `jax.jit` of the algorithm's own functions."""
    init_key, run_key = jax.random.split(key)
    carry = init_of(algo, env)(init_key)
    iterate = eqx.filter_jit(lambda carry, key: algo.iterate(env, carry, key))
    rows = []
    for i in range(iterations):
        carry, metrics = iterate(carry, jax.random.fold_in(run_key, i))
        rows.append(metrics)
    return named(carry, {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]})


def sharded_reference(algo: Any, env: Any, shards: int, key: jax.Array, iterations: int = 3) -> Run:
    """The meaning of shards, without any of Choreo's machinery but the way a carry is divided."""
    init_key, run_key = jax.random.split(key)
    leaves, tree = jax.tree.flatten(init_of(algo, env)(init_key))
    twice = jax.eval_shape(lambda: algo.init(env.with_num_envs(2 * env.num_envs), init_key))
    axes = [next((d for d, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if b == 2 * a), None)
            for one, two in zip(leaves, jax.tree.leaves(twice), strict=True)]  # fmt: skip
    env_of_shard = env.with_num_envs(env.num_envs // shards)

    @jax.jit
    def iterate(leaves, key):
        def one(leaves, key):
            carry, metrics = algo.iterate(env_of_shard, jax.tree.unflatten(tree, leaves), key)
            return jax.tree.leaves(carry), metrics

        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(shards))
        return jax.vmap(one, (axes, 0), (axes, 0), axis_name=SHARD_AXIS)(leaves, keys)

    leaves = [split_shards(leaf, axis, shards) for leaf, axis in zip(leaves, axes, strict=True)]
    rows = []
    for i in range(iterations):
        leaves, metrics = iterate(leaves, jax.random.fold_in(run_key, i))
        rows.append(metrics)
    carry = jax.tree.unflatten(tree, [merge_shards(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)])
    metrics = {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}
    return named(carry, combine_metrics(metrics))


@functools.lru_cache(maxsize=8)
def init_of(algo: Any, env: Any) -> Callable[[jax.Array], Any]:
    """Compiled once, with shards or without."""
    return eqx.filter_jit(lambda key: algo.init(env, key))


def planned_run(algo: Any, env: Any, layout: Layout | Plan, key: jax.Array, iterations: int = 3) -> Run:
    """Through graph, plan and the serial runtime."""
    planned = layout if isinstance(layout, Plan) else plan(algo, env, layout)
    return run_of(InProcess(planned), key, iterations)


def run_of(runtime: Any, key: jax.Array, iterations: int = 3) -> Run:
    """Through one runtime, which is closed afterwards."""
    try:
        runtime.start(key)
        metrics = runtime.run(0, iterations)
        return named(runtime.carry(), metrics)
    finally:
        runtime.close()


def assert_same_bits(run: Run, reference: Run) -> None:
    """Law level 2."""
    assert run.keys() == reference.keys()
    for name, value in reference.items():
        np.testing.assert_array_equal(run[name], value, err_msg=name)


def assert_close(run: Run, reference: Run, tolerance: float) -> None:
    """Law level 3: other shapes, other rounding."""
    assert run.keys() == reference.keys()
    for name, value in reference.items():
        np.testing.assert_allclose(run[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def check_bounds(log: list[Read], run: Run, layout: Layout, iterations: int) -> None:
    """Law level 4, beside the replay: never older than allowed, never backwards, every update from as many parts as stated."""
    workers = next(group.replicas for group in layout.groups if group.replicas)
    assert all(0 <= read.lag <= layout.max_lag for read in log)
    assert run["metrics/lag_max"].max() == max(read.lag for read in log)
    for reader in {read.reader for read in log}:
        versions = [read.version for read in log if read.reader == reader]
        assert versions == sorted(versions)
    per_update = 1 if layout.merge == "any" else workers
    updates = [read.update for read in log]
    assert sorted(updates) == sorted(list(range(len(log) // per_update)) * per_update)
    assert len(log) == iterations * workers
    assert run[".train.iterations"] == len(log) // per_update


def named(carry: Any, metrics: dict[str, np.ndarray]) -> Run:
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(carry, eqx.is_array))
    named = {jax.tree_util.keystr(path): _as_numpy(leaf) for path, leaf in leaves}
    return named | {f"metrics/{name}": value for name, value in metrics.items()}


def _as_numpy(leaf: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
