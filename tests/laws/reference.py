"""The reference meaning of an algorithm, `jax.jit(iterate)` without its marks, and a planned run to compare with it."""

import collections
from collections.abc import Callable
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from choreo.layouts import Layout
from choreo.partition.trace import merge_shards, split_shards, trace
from choreo.plans.plan import Plan, plan
from choreo.roles import SHARD_AXIS
from choreo.runtime.engine.schedule import VersionRead
from choreo.runtime.inprocess import InProcess, combine_metrics
from choreo.testing import unmarked

Run = dict[str, Any]
"""All that a user can see: the carry's structure, each of its leaves (arrays as NumPy's, whatever else as it is), and every
metric of every iteration, by name."""
STRUCTURE = "the carry's structure"


def reference_run(algo: Any, env: Any, key: jax.Array, iterations: int = 3) -> Run:
    """Without any of Choreo's machinery: `jax.jit` of the algorithm's own functions, as if nothing were marked."""
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
    """The meaning of shards, without any of Choreo's machinery but the way a carry is divided."""
    init_key, run_key = jax.random.split(key)
    with unmarked():
        carry = init_of(algo, env, jit)(init_key)
        axes = env_axes(algo, env, carry)
        arrays, static = eqx.partition(carry, eqx.is_array)
        leaves, tree = jax.tree.flatten(arrays)
        env_of_shard = env.with_num_envs(env.num_envs // shards)

        def one(leaves, key):
            before = eqx.combine(jax.tree.unflatten(tree, leaves), static)
            carry, metrics = algo.iterate(env_of_shard, before, key)
            return jax.tree.leaves(eqx.filter(carry, eqx.is_array)), metrics

        @jit
        def iterate(leaves, key):
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(shards))
            return jax.vmap(one, (axes, 0), (axes, 0), axis_name=SHARD_AXIS)(leaves, keys)

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
    """The meaning of merge="any" without lag: `iterate` on the environments of one worker after the other, as logged."""
    init_key, run_key = jax.random.split(key)
    few = env.with_num_envs(env.num_envs // workers)
    iterate = jit(lambda carry, key: algo.iterate(few, carry, key))
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
            c = int(read.reader.rpartition("-")[2])
            given = [leaf if axis is None else leaf[c] for leaf, axis in zip(blocks, axes, strict=True)]
            before = eqx.combine(jax.tree.unflatten(tree, given), static)
            key = jax.random.fold_in(jax.random.fold_in(run_key, c), parts[c])
            carry, metrics = iterate(before, key)
            parts[c] += 1
            rows.append(metrics)
            for i, (leaf, axis) in enumerate(zip(jax.tree.leaves(eqx.filter(carry, eqx.is_array)), axes, strict=True)):
                if axis is None:
                    blocks[i] = leaf
                else:
                    blocks[i][c] = leaf
        whole = [leaf if axis is None else jnp.concatenate(leaf, axis) for leaf, axis in zip(blocks, axes, strict=True)]
    metrics = {name: values.reshape(-1, workers, *values.shape[1:]) for name, values in stacked(rows).items()}
    return named(
        eqx.combine(jax.tree.unflatten(tree, whole), static), combine_metrics(metrics, trace(algo, env).reductions)
    )


def env_axes(algo: Any, env: Any, carry: Any) -> list[int | None]:
    """Where each array of the carry has its environments: the one axis that is as long as they are many, also for twice as many."""
    with unmarked():
        twice = eqx.filter_eval_shape(
            lambda key: algo.init(env.with_num_envs(2 * env.num_envs), key), jax.eval_shape(lambda: jax.random.key(0))
        )
    small, large = (
        jax.tree.leaves(eqx.filter(tree, lambda x: isinstance(x, jax.ShapeDtypeStruct) or eqx.is_array(x)))
        for tree in (carry, twice)
    )
    as_many, axes = (env.num_envs, 2 * env.num_envs), []
    for one, two in zip(small, large, strict=True):
        found = [d for d, lengths in enumerate(zip(one.shape, two.shape, strict=True)) if lengths == as_many]
        axes.append(found[0] if len(found) == 1 else None)
    return axes


_inits: collections.OrderedDict[tuple[int, ...], tuple[Any, ...]] = collections.OrderedDict()


def init_of(algo: Any, env: Any, jit: Callable[..., Any] = eqx.filter_jit) -> Callable[[jax.Array], Any]:
    """Compiled once, with shards or without. By identity: A(1) == A(1.0), but they may mean something else."""
    of = id(algo), id(env), id(jit)
    if of not in _inits:
        filtered = jit if jit is not jax.jit else eqx.filter_jit
        _inits[of] = filtered(lambda key: algo.init(env, key)), algo, env, jit  # kept alive, lest an id be used again
        while len(_inits) > 8:
            _inits.popitem(last=False)
    return _inits[of][0]


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
        assert_same_leaf(name, run[name], value, None)


def assert_close(run: Run, reference: Run, tolerance: float) -> None:
    """Law level 3: other shapes, other rounding."""
    assert run.keys() == reference.keys()
    for name, value in reference.items():
        assert_same_leaf(name, run[name], value, tolerance)


def assert_same_leaf(name: str, found: Any, wanted: Any, tolerance: float | None) -> None:
    """`tolerance`: of numbers that are rounded; None: not at all, and -0.0 is not 0.0."""
    if not isinstance(found, np.ndarray) or not isinstance(wanted, np.ndarray):
        assert_same_static(name, found, wanted, tolerance)
        return
    assert found.shape == wanted.shape, f"{name}: {found.shape}, not {wanted.shape}"
    if name.startswith("metrics/"):  # a row of a table: float64 says the same as float32
        assert kind(found) == kind(wanted), f"{name}: {found.dtype}, not {wanted.dtype}"
    else:
        assert found.dtype == wanted.dtype, f"{name}: {found.dtype}, not {wanted.dtype}"
    rounded = tolerance is not None and kind(wanted) in ("floating", "complex")
    precision = float(jnp.finfo(wanted.dtype).eps) if rounded and kind(wanted) == "floating" else 0.0
    found, wanted = plain(found), plain(wanted)
    if rounded:
        least = max(tolerance or 0.0, 2 * precision)
        np.testing.assert_allclose(found, wanted, rtol=least, atol=least, err_msg=name)
    else:
        np.testing.assert_array_equal(found, wanted, err_msg=name)
        if wanted.dtype.kind == "f":
            numbers = ~np.isnan(wanted)
            np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(wanted)[numbers], err_msg=name)


def assert_same_static(name: str, found: Any, wanted: Any, tolerance: float | None) -> None:
    """A leaf that is no array, the same in type and bits. A Python number that changes may have become an array of its type."""
    if isinstance(found, np.ndarray) and isinstance(wanted, (bool, int, float, complex)):
        assert_same_leaf(name, found, np.asarray(jnp.asarray(wanted)), tolerance)
        return
    assert type(found) is type(wanted), f"{name}: {found!r}, not {wanted!r}"
    assert found is wanted or (found == wanted and repr(found) == repr(wanted)), f"{name}: {found!r}, not {wanted!r}"


def kind(array: np.ndarray) -> str:
    """Also of the types that NumPy has not."""
    kinds = {"bool": jnp.bool_, "integer": jnp.integer, "floating": jnp.floating, "complex": jnp.complexfloating}
    return next(name for name, dtype in kinds.items() if jnp.issubdtype(array.dtype, dtype))


def plain(array: np.ndarray) -> np.ndarray:
    """The same numbers in a type that NumPy can compare: bfloat16, float8 and int4 are strangers to it."""
    if array.dtype.isbuiltin == 1:
        return array
    return array.astype(np.float32 if kind(array) == "floating" else np.int32)


def check_bounds(log: list[VersionRead], run: Run, layout: Layout, iterations: int) -> None:
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
    """Each metric over the iterations."""
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def is_key(leaf: Any) -> TypeGuard[jax.Array]:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_numpy(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
