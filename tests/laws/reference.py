"""The reference results of the law (docs/law.md), runs of plans, and functions that compare the two.

level 2, 3   `reference_run`       `jax.jit(iterate)` of the algorithm without marks
             `sharded_reference`   the same for S learner shards: `vmap` of `iterate`; each shard has E/S of the E environments
             `merged_reference`    the same for merge="any": `iterate` on the environments of one worker at a time
level 2      `assert_same_bits`    types and bits of every leaf and every metric
level 3      `assert_close`        types, and numbers up to a tolerance
level 4      `check_bounds`        a relaxed run read only versions that its layout allows
"""

import collections
from collections.abc import Callable
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from choreo.layouts import Layout
from choreo.partition.trace import merge_shards, split_shards, trace
from choreo.plans.build import plan
from choreo.plans.plan import Plan
from choreo.roles import SHARD_AXIS
from choreo.runtime.engine.metrics import combine_metrics
from choreo.runtime.engine.schedule import VersionRead
from choreo.runtime.inprocess import InProcess
from choreo.testing import unmarked

Run = dict[str, Any]
"""All results that a user can see, by name: the structure of the carry, its leaves, and every metric of every iteration. Arrays
are NumPy arrays; other leaves are unchanged."""
STRUCTURE = "the carry's structure"


def reference_run(algo: Any, env: Any, key: jax.Array, iterations: int = 3) -> Run:
    """Run `jax.jit` of the algorithm's own functions, without marks; return the result. Of Choreo, this uses only `unmarked`."""
    init_key, run_key = jax.random.split(key)
    iterate = eqx.filter_jit(lambda carry, key: algo.iterate(env, carry, key))
    with unmarked():
        carry, rows = init_of(algo, env)(init_key), []
        for i in range(iterations):
            carry, metrics = iterate(carry, jax.random.fold_in(run_key, i))
            rows.append(metrics)
    return named(carry, stacked(rows))


def sharded_reference(
    algo: Any, env: Any, shards: int, key: jax.Array, iterations: int = 3, *, jit: Callable[..., Any] = jax.jit
) -> Run:
    """The result that S shards must give: `vmap` of `iterate` over the shards. Each shard has its own key.

    Of Choreo, this uses only `unmarked`, the functions that divide a carry into shards and that combine metrics, and the trace,
    which says how each metric is combined.
    """
    init_key, run_key = jax.random.split(key)
    with unmarked():
        carry = init_of(algo, env, jit)(init_key)
        axes = env_axes(algo, env, carry)
        arrays, static = eqx.partition(carry, eqx.is_array)
        leaves, tree = jax.tree.flatten(arrays)
        env_of_shard = env.with_num_envs(env.num_envs // shards)

        def iterate_shard(leaves, key):
            before = eqx.combine(jax.tree.unflatten(tree, leaves), static)
            carry, metrics = algo.iterate(env_of_shard, before, key)
            return jax.tree.leaves(eqx.filter(carry, eqx.is_array)), metrics

        @jit
        def iterate(leaves, key):
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(shards))
            return jax.vmap(iterate_shard, (axes, 0), (axes, 0), axis_name=SHARD_AXIS)(leaves, keys)

        leaves = [split_shards(leaf, axis, shards) for leaf, axis in zip(leaves, axes, strict=True)]
        rows = []
        for i in range(iterations):
            leaves, metrics = iterate(leaves, jax.random.fold_in(run_key, i))
            rows.append(metrics)
    leaves = [merge_shards(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
    carry = eqx.combine(jax.tree.unflatten(tree, leaves), static)
    return named(carry, combine_metrics(stacked(rows), trace(algo, env).reductions))


def merged_reference(
    algo: Any,
    env: Any,
    workers: int,
    log: list[VersionRead],
    key: jax.Array,
    *,
    jit: Callable[..., Any] = eqx.filter_jit,
) -> Run:
    """The result that merge="any" must give without lag: `iterate` on the environments of one worker at a time.

    The workers take turns in the order of the log.
    """
    init_key, run_key = jax.random.split(key)
    env_of_worker = env.with_num_envs(env.num_envs // workers)
    iterate = jit(lambda carry, key: algo.iterate(env_of_worker, carry, key))
    with unmarked():
        carry = init_of(algo, env, jit)(init_key)
        axes = env_axes(algo, env, carry)
        leaves, tree = jax.tree.flatten(eqx.filter(carry, eqx.is_array))
        static = eqx.filter(carry, eqx.is_array, inverse=True)
        blocks = [
            leaf if axis is None else jnp.split(leaf, workers, axis) for leaf, axis in zip(leaves, axes, strict=True)
        ]
        rows, parts = [], [0] * workers
        for read in log:
            assert read.lag == 0
            worker = int(read.reader.rpartition("-")[2])
            given = [leaf if axis is None else leaf[worker] for leaf, axis in zip(blocks, axes, strict=True)]
            before = eqx.combine(jax.tree.unflatten(tree, given), static)
            key = jax.random.fold_in(jax.random.fold_in(run_key, worker), parts[worker])
            carry, metrics = iterate(before, key)
            parts[worker] += 1
            rows.append(metrics)
            for i, (leaf, axis) in enumerate(zip(jax.tree.leaves(eqx.filter(carry, eqx.is_array)), axes, strict=True)):
                if axis is None:
                    blocks[i] = leaf
                else:
                    blocks[i][worker] = leaf
        whole = [leaf if axis is None else jnp.concatenate(leaf, axis) for leaf, axis in zip(blocks, axes, strict=True)]
    metrics = {name: values.reshape(-1, workers, *values.shape[1:]) for name, values in stacked(rows).items()}
    return named(
        eqx.combine(jax.tree.unflatten(tree, whole), static), combine_metrics(metrics, trace(algo, env).reductions)
    )


def env_axes(algo: Any, env: Any, carry: Any) -> list[int | None]:
    """For each array of the carry: its env axis, or None.

    The env axis is the only axis whose length is E for E environments, and 2E for 2E environments. The result is None if no axis
    has these lengths, or if several axes have them.
    """
    with unmarked():
        twice = eqx.filter_eval_shape(
            lambda key: algo.init(env.with_num_envs(2 * env.num_envs), key), jax.eval_shape(lambda: jax.random.key(0))
        )
    small, large = (
        jax.tree.leaves(eqx.filter(tree, lambda x: isinstance(x, jax.ShapeDtypeStruct) or eqx.is_array(x)))
        for tree in (carry, twice)
    )
    num_envs, axes = (env.num_envs, 2 * env.num_envs), []
    for one, two in zip(small, large, strict=True):
        found = [d for d, lengths in enumerate(zip(one.shape, two.shape, strict=True)) if lengths == num_envs]
        axes.append(found[0] if len(found) == 1 else None)
    return axes


_inits: collections.OrderedDict[tuple[int, ...], tuple[Any, ...]] = collections.OrderedDict()


def init_of(algo: Any, env: Any, jit: Callable[..., Any] = eqx.filter_jit) -> Callable[[jax.Array], Any]:
    """The compiled `init` of `algo`, from a cache that holds eight of them.

    The cache compares algorithms by identity: A(1) == A(1.0), but the two can compute different results.
    """
    identity = id(algo), id(env), id(jit)
    if identity not in _inits:
        filtered = jit if jit is not jax.jit else eqx.filter_jit
        # The entry keeps the objects alive, so that no new object can get one of their ids.
        _inits[identity] = filtered(lambda key: algo.init(env, key)), algo, env, jit
        while len(_inits) > 8:
            _inits.popitem(last=False)
    return _inits[identity][0]


def planned_run(algo: Any, env: Any, layout: Layout | Plan, key: jax.Array, iterations: int = 3) -> Run:
    """Run in one process; return the result. `layout` is a layout for `algo` and `env`, or a plan."""
    planned = layout if isinstance(layout, Plan) else plan(algo, env, layout)
    return run_of(InProcess(planned), key, iterations)


def run_of(runtime: Any, key: jax.Array, iterations: int = 3) -> Run:
    """Run in `runtime` and close it; return the result."""
    try:
        runtime.start(key)
        metrics = runtime.run(0, iterations)
        return named(runtime.carry(), metrics)
    finally:
        runtime.close()


def assert_same_bits(run: Run, reference: Run) -> None:
    """Assert law level 2: every leaf and every metric has the same type and the same bits."""
    assert run.keys() == reference.keys()
    for name, value in reference.items():
        assert_same_leaf(name, run[name], value, None)


def assert_close(run: Run, reference: Run, tolerance: float) -> None:
    """Assert law level 3: every leaf and every metric has the same type, and floats agree up to `tolerance`.

    Floats need not be equal: replicas compute with smaller arrays, and rounding depends on the shape of an array.
    """
    assert run.keys() == reference.keys()
    for name, value in reference.items():
        assert_same_leaf(name, run[name], value, tolerance)


def assert_same_leaf(name: str, found: Any, wanted: Any, tolerance: float | None) -> None:
    """Assert that two leaves have the same shape, type and values.

    Floats may differ by `tolerance`. If `tolerance` is None, floats must have the same bits: -0.0 is not equal to 0.0.
    """
    if not isinstance(found, np.ndarray) or not isinstance(wanted, np.ndarray):
        _assert_same_static(name, found, wanted, tolerance)
        return
    assert found.shape == wanted.shape, f"{name}: {found.shape}, not {wanted.shape}"
    if name.startswith("metrics/"):  # a run can store a float32 metric as float64
        assert kind(found) == kind(wanted), f"{name}: {found.dtype}, not {wanted.dtype}"
    else:
        assert found.dtype == wanted.dtype, f"{name}: {found.dtype}, not {wanted.dtype}"
    rounded = tolerance is not None and kind(wanted) in ("floating", "complex")
    precision = float(jnp.finfo(wanted.dtype).eps) if rounded and kind(wanted) == "floating" else 0.0
    found, wanted = plain(found), plain(wanted)
    if rounded:
        allowed = max(tolerance or 0.0, 2 * precision)  # bfloat16 and float8 are too coarse for 1e-5
        np.testing.assert_allclose(found, wanted, rtol=allowed, atol=allowed, err_msg=name)
    else:
        np.testing.assert_array_equal(found, wanted, err_msg=name)
        if wanted.dtype.kind == "f":
            numbers = ~np.isnan(wanted)
            np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(wanted)[numbers], err_msg=name)


def _assert_same_static(name: str, found: Any, wanted: Any, tolerance: float | None) -> None:
    """Assert that two leaves have the same type and bits. At least one of them is not an array.

    If the reference has a Python number, the run is allowed to have an array of the type that JAX gives to this number. The
    reason is that a number that changes becomes an array in Choreo's carry.
    """
    if isinstance(found, np.ndarray) and isinstance(wanted, (bool, int, float, complex)):
        assert_same_leaf(name, found, np.asarray(jnp.asarray(wanted)), tolerance)
        return
    assert type(found) is type(wanted), f"{name}: {found!r}, not {wanted!r}"
    assert found is wanted or (found == wanted and repr(found) == repr(wanted)), f"{name}: {found!r}, not {wanted!r}"


def kind(array: np.ndarray) -> str:
    """The kind of an array's type. This also works for types that NumPy does not know, such as bfloat16."""
    kinds = {"bool": jnp.bool_, "integer": jnp.integer, "floating": jnp.floating, "complex": jnp.complexfloating}
    return next(name for name, dtype in kinds.items() if jnp.issubdtype(array.dtype, dtype))


def plain(array: np.ndarray) -> np.ndarray:
    """The same numbers in a type that NumPy can compare. NumPy does not know bfloat16, float8 and int4."""
    if array.dtype.isbuiltin == 1:
        return array
    return array.astype(np.float32 if kind(array) == "floating" else np.int32)


def check_bounds(log: list[VersionRead], run: Run, layout: Layout, iterations: int) -> None:
    """Assert law level 4, apart from the replay: the log of a relaxed run stays within the bounds of its layout.

    No worker reads a version that is more than `max_lag` updates old, or older than the version that it read before. Every
    update learns from the part of one worker (merge="any"), or from the parts of all workers.
    """
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
    """The results of a run by name: see `Run`."""
    run: Run = {STRUCTURE: jax.tree.structure(carry)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
        name = jax.tree_util.keystr(path)
        if eqx.is_array(leaf) or isinstance(leaf, np.generic):
            run[name] = as_numpy(leaf)
        else:
            run[name] = leaf
        if is_key(leaf):
            run[f"impl of {name}"] = str(jax.random.key_impl(leaf))
    return run | {f"metrics/{name}": value for name, value in metrics.items()}


def stacked(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Each metric as an array over the iterations."""
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def is_key(leaf: Any) -> TypeGuard[jax.Array]:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_numpy(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
