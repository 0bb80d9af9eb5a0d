"""Does a layout change nothing but time? For an algorithm of your own, against `jax.jit(iterate)`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from choreo.errors import PartitionError
from choreo.layouts.base import Layout
from choreo.plans import Plan, plan
from choreo.roles import SHARD_AXIS
from choreo.runtime.inprocess import InProcess


def check_layout(
    algo: Any, env: Any, layout: Layout, *, iterations: int = 3, tolerance: float = 1e-5, seed: int = 0
) -> float:
    """Run a few iterations planned and plain; returns the largest difference in the carry, relative to 1 or the value.

    The proof that a plan is right does not need this: it is a second look, with numbers. 0 means the same bits. Raises
    PartitionError if some leaf differs by more than `tolerance`; where actions are sampled, rounding can make that happen
    to a right plan after many iterations, when it flips one of them. A relaxed layout is compared with its own log,
    replayed.
    """
    key, the_plan = jax.random.key(seed), plan(algo, env, layout)
    runtime = InProcess(the_plan)
    planned = _leaves(_carry_of(runtime, key, iterations))
    if layout.is_relaxed:
        plain = _leaves(_carry_of(InProcess(the_plan, replay=runtime.log), key, iterations))
    else:
        plain = _leaves(_plain_run(algo, env, key, iterations, the_plan))
    worst = {name: _difference(planned[name], value) for name, value in plain.items()}
    name = max(worst, key=lambda n: worst[n])
    if not worst[name] <= tolerance:
        raise PartitionError(
            f"In this layout, `carry{name}` is off by {worst[name]:.1e} from jax.jit(iterate) after {iterations} iterations.",
            fix="Please report this program: a plan that is wrong should have been refused.",
        )
    return worst[name]


def _carry_of(runtime: InProcess, key: jax.Array, iterations: int) -> Any:
    runtime.start(key)
    runtime.run(0, iterations)
    return runtime.carry()


def _plain_run(algo: Any, env: Any, key: jax.Array, iterations: int, the_plan: Plan) -> Any:
    """Without sites: `jit(iterate)`, or with several shards `jit(vmap(iterate))`."""
    init_key, run_key = jax.random.split(key)
    carry = eqx.filter_jit(lambda key: algo.init(env, key))(init_key)
    iterate, shards = eqx.filter_jit(lambda carry, key: algo.iterate(env, carry, key)[0]), the_plan.shards
    if shards == 1:
        for i in range(iterations):
            carry = iterate(carry, jax.random.fold_in(run_key, i))
        return carry
    arrays, static = eqx.partition(carry, eqx.is_array)
    axes, tree = list(the_plan.carry_axes), jax.tree.structure(arrays)
    env = env.with_num_envs(env.num_envs // shards)

    def one_shard(leaves, key):
        after, _ = algo.iterate(env, eqx.combine(jax.tree.unflatten(tree, leaves), static), key)
        return jax.tree.leaves(eqx.filter(after, eqx.is_array))

    together = jax.jit(jax.vmap(one_shard, (axes, 0), axes, axis_name=SHARD_AXIS))
    leaves = the_plan.leaves(carry)
    for i in range(iterations):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(run_key, i), jnp.arange(shards))
        leaves = together(leaves, keys)
    return the_plan.combine(leaves)


def _leaves(carry: Any) -> dict[str, np.ndarray]:
    named = jax.tree_util.tree_leaves_with_path(eqx.filter(carry, eqx.is_array))
    return {jax.tree_util.keystr(path): _as_numpy(leaf) for path, leaf in named}


def _as_numpy(leaf: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    if np.array_equal(a, b, equal_nan=np.issubdtype(b.dtype, np.inexact)):
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b))))
