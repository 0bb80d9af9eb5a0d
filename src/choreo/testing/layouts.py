"""Does a layout change nothing but time? For an algorithm of your own, against `jax.jit(iterate)`."""

from typing import Any

import equinox as eqx
import jax
import numpy as np

from choreo.errors import PartitionError
from choreo.layouts.base import Layout
from choreo.plans import plan
from choreo.runtime.inprocess import InProcess


def check_layout(
    algo: Any, env: Any, layout: Layout, *, iterations: int = 3, tolerance: float = 1e-5, seed: int = 0
) -> float:
    """Run a few iterations planned and plain; returns the largest difference in the carry, relative to 1 or the value.

    The proof that a plan is right does not need this: it is a second look, with numbers. 0 means the same bits. Raises
    PartitionError if some leaf differs by more than `tolerance`; where actions are sampled, rounding can make that happen
    to a right plan after many iterations, when it flips one of them.
    """
    key = jax.random.key(seed)
    runtime = InProcess(plan(algo, env, layout))
    runtime.start(key)
    runtime.run(0, iterations)
    planned, plain = _leaves(runtime.carry()), _leaves(_plain_run(algo, env, key, iterations))
    worst = {name: _difference(planned[name], value) for name, value in plain.items()}
    name = max(worst, key=lambda n: worst[n])
    if not worst[name] <= tolerance:
        raise PartitionError(
            f"In this layout, `carry{name}` is off by {worst[name]:.1e} from jax.jit(iterate) after {iterations} iterations.",
            fix="Please report this program: a plan that is wrong should have been refused.",
        )
    return worst[name]


def _plain_run(algo: Any, env: Any, key: jax.Array, iterations: int) -> Any:
    init_key, run_key = jax.random.split(key)
    carry = eqx.filter_jit(lambda key: algo.init(env, key))(init_key)
    iterate = eqx.filter_jit(lambda carry, key: algo.iterate(env, carry, key)[0])
    for i in range(iterations):
        carry = iterate(carry, jax.random.fold_in(run_key, i))
    return carry


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
