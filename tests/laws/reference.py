"""The reference meaning of an algorithm, `jax.jit(iterate)`, and a planned run to compare with it."""

from typing import Any

import equinox as eqx
import jax
import numpy as np

from choreo.layouts import Layout
from choreo.plans import Plan, plan
from choreo.runtime.inprocess import InProcess

Run = dict[str, np.ndarray]
"""Every leaf of the final carry, and every metric of every iteration, by name."""


def reference_run(algo: Any, env: Any, key: jax.Array, iterations: int = 3) -> Run:
    """Without any of Choreo's machinery: `jax.jit` of the algorithm's own functions."""
    init_key, run_key = jax.random.split(key)
    carry = eqx.filter_jit(lambda key: algo.init(env, key))(init_key)
    iterate = eqx.filter_jit(lambda carry, key: algo.iterate(env, carry, key))
    rows = []
    for i in range(iterations):
        carry, metrics = iterate(carry, jax.random.fold_in(run_key, i))
        rows.append(metrics)
    return named(carry, {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]})


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


def named(carry: Any, metrics: dict[str, np.ndarray]) -> Run:
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(carry, eqx.is_array))
    named = {jax.tree_util.keystr(path): _as_numpy(leaf) for path, leaf in leaves}
    return named | {f"metrics/{name}": value for name, value in metrics.items()}


def _as_numpy(leaf: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
