"""A replay that consists of buffer shards, for the algorithms that learn from replay.

    iterate:    draw -> learn             from stored steps
                rollout -> add            with the parameters from the beginning of the iteration

Within an iteration, learning does not depend on acting, because a step is never drawn in the iteration that collects the step. So
a site that acts and a site that learns can work at the same time, even in lockstep.

    1 shard     [env]                     one replay over all environments
    B shards    B x [env / B]             one replay for the environments of each shard; each gives 1 / B of a batch
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from choreo.buffers.base import Replay, ReplayState, Sample, StoredStep
from choreo.buffers.tables import Draw, Table, TableState
from choreo.envs.base import Env
from choreo.errors import AlgorithmError
from choreo.loops import Transition
from choreo.roles import fragment, num_shards
from choreo.types import Key, PyTree

source_info_util.register_exclusion(__file__)


Priority = Callable[[StoredStep], jax.Array]
"""A function from the steps of an item to the priority of the item."""


class Batches(NamedTuple):
    """The items that one iteration learns from."""

    steps: StoredStep
    """The steps of each item: [update, item, step, ...]"""
    probability: jax.Array
    """Probability with which each item was drawn: [update, item]"""
    ready: jax.Array
    """False while too few steps are stored to learn from."""


def make_replay(
    *,
    capacity: int,
    unroll: int,
    length: int,
    updates: int,
    batch_size: int,
    min_size: int,
    shards: int = 1,
    prioritized: bool = False,
    exponent: float = 0.6,
    stack: int = 1,
) -> Replay:
    """The replay of one buffer shard. `capacity`, `batch_size` and `min_size` are totals over all shards.

    An item has `length` steps. An iteration makes `updates` updates, and one draw returns the items for all of them.
    """
    if shards < 1 or batch_size % shards:
        raise AlgorithmError(
            f"A batch of {batch_size} cannot be drawn evenly from {shards} buffer shards.",
            fix=f"Use a batch_size of {-(-batch_size // max(shards, 1)) * max(shards, 1)}, or another number of shards.",
        )
    if min_size < batch_size:
        raise AlgorithmError(
            f"min_size={min_size} is less than batch_size={batch_size}: the first batches would be the same few steps again "
            "and again.",
            fix=f"Use min_size={batch_size} or more.",
        )
    table = Table(
        length=length,
        batch=updates * batch_size // shards,
        sampler="prioritized" if prioritized else "uniform",
        exponent=exponent,
        min_size=-(-min_size // shards),
    )
    return Replay(capacity=-(-capacity // shards), unroll=unroll, tables=(table,), stack=stack)


def num_updates(updates_per_step: float, unroll: int, env: Env) -> int:
    """The number of gradient updates in one iteration. `updates_per_step` is the update-to-data ratio.

    `env` has the environments of one learner shard; the ratio counts the steps of all learner shards.
    """
    num_envs = env.num_envs * num_shards()
    updates = updates_per_step * unroll * num_envs
    whole = max(round(updates), 1)
    if (
        abs(updates - whole) > 1e-6 * whole
    ):  # the tolerance is for ratios such as 1/3, which a float cannot hold exactly
        raise AlgorithmError(
            f"updates_per_step={updates_per_step:g} gives {updates:g} updates in an iteration of {unroll * num_envs} steps "
            f"(unroll={unroll} x {num_envs} environments), but the number of updates must be whole.",
            fix=f"Use updates_per_step={whole / (unroll * num_envs):.10g}, which gives {whole}; or change unroll or the number "
            "of environments.",
        )
    return whole


def step_types(env: Env, act: Callable[..., Any], *args: Any) -> StoredStep:
    """The types of one stored step of one environment; `act(*args, obs, key)` returns the action and the extras."""

    def one_step(key: Key) -> StoredStep:
        state, obs = env.reset(env.keys(key))
        action, extras = jax.vmap(lambda obs, key: act(*args, obs, key))(obs, env.keys(key))
        _, ts = env.step(state, action)
        return StoredStep(obs, action, ts.reward, ts.discount, ts.last, extras)

    every = jax.eval_shape(one_step, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), every)


def init_replay(replay: Replay, step: StoredStep, num_envs: int, shards: int) -> ReplayState:
    """An empty replay with all its shards. `replay` describes one shard, and `step` has the types of one stored step."""
    if num_envs % shards:
        raise AlgorithmError(
            f"{num_envs} environments cannot be divided evenly among {shards} buffer shards.",
            fix=f"Use {math.gcd(num_envs, shards)} shards, or {-(-num_envs // shards) * shards} environments.",
        )
    one = jax.eval_shape(lambda: replay.init(step, num_envs // shards))
    return jax.tree.map(lambda x: jnp.zeros((x.shape[0] * shards, *x.shape[1:]) if x.shape else (), x.dtype), one)


def draw(
    replay: Replay, state: ReplayState, key: Key, *, updates: int, shards: int
) -> tuple[ReplayState, Batches, Draw]:
    """Draw the items to learn from in this iteration. Returns the new state, the items, and their places in the replay."""
    if shards == 1:
        tables, sample = sample_items(replay, state, key)
        sample = sample._replace(**jax.tree.map(lambda x: x[None], {"steps": sample.steps, "where": sample.where}))
    else:
        axes = jax.tree.map(_env_axis, state)
        tables, sample = jax.vmap(
            lambda state, key: sample_items(replay, state, key),
            in_axes=(axes, 0),
            out_axes=(axes.tables, Sample(steps=0, where=0, ready=None)),  # pyright: ignore[reportArgumentType]
        )(_divided(state, shards), jax.random.split(key, shards))
        tables = _joined(tables)
    steps, probability = jax.tree.map(lambda x: _per_update(x, updates), (sample.steps, sample.where.probability))
    return state._replace(tables=tables), Batches(steps, probability, sample.ready), sample.where


def update_priorities(replay: Replay, state: ReplayState, where: Draw, priorities: jax.Array) -> ReplayState:
    """The replay with new priorities [update, item] of the items that were drawn."""
    shards = len(where.env)
    priorities = jnp.moveaxis(priorities.reshape(len(priorities), shards, -1), 0, 2).reshape(shards, -1)
    if shards == 1:
        where, priorities = jax.tree.map(lambda x: x[0], (where, priorities))
        return state._replace(tables=set_priorities(replay, state.tables, where, priorities))
    axes = jax.tree.map(_env_axis, state.tables)
    change = jax.vmap(lambda *args: set_priorities(replay, *args), in_axes=(axes, 0, 0), out_axes=axes)
    return state._replace(tables=_joined(change(_divided(state.tables, shards), where, priorities)))


@fragment("buffer")
def sample_items(replay: Replay, state: ReplayState, key: Key) -> tuple[dict[str, TableState], Sample]:
    """Draw one shard's part of the batches."""
    state, sample = replay.sample(state, key)
    return state.tables, sample


@fragment("buffer")
def set_priorities(
    replay: Replay, tables: dict[str, TableState], where: Draw, priorities: jax.Array
) -> dict[str, TableState]:
    """Set one shard's part of the priorities."""
    (table,) = replay.tables
    return {table.name: table.set_priorities(tables[table.name], where.env, where.time, priorities)}


@fragment("buffer")
def add(
    replay: Replay, state: ReplayState, trajectory: Transition, shards: int, priority: Priority | None = None
) -> tuple[ReplayState, dict[str, jax.Array]]:
    """The replay with new steps [time, env], and its metrics; each shard stores the steps of its own environments."""
    t = trajectory
    state = replay.add(state, StoredStep(t.obs, t.action, t.reward, t.discount, t.last, t.extras), priority)
    metrics = replay.metrics(state)
    return state, metrics | {"samples_per_insert": metrics["samples_per_insert"] * shards}


def _env_axis(x: jax.Array) -> int | None:
    """The env axis of an array of the replay: the first axis; None if the array is one number for all environments."""
    return 0 if x.ndim else None


def _divided(tree: PyTree, shards: int) -> PyTree:
    """From [env, ...] to [shard, env, ...]."""
    return jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:]) if x.ndim else x, tree)


def _joined(tree: PyTree) -> PyTree:
    """From [shard, env, ...] to [env, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]) if x.ndim else x, tree)


def _per_update(x: jax.Array, updates: int) -> jax.Array:
    """From [shard, item, ...] to [update, item, ...]; every update has the same number of items of each shard."""
    x = jnp.moveaxis(x.reshape(len(x), -1, updates, *x.shape[2:]), 2, 0)
    return x.reshape(updates, -1, *x.shape[3:])
