"""The usual loops of an algorithm, as plain functions: collect a trajectory, cut it into minibatches, sum up episodes.

They carry no role and know no layout; a `lax.scan` written by hand in their place works just as well.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from choreo.envs.base import Env
from choreo.roles import metric
from choreo.types import Key, PyTree

source_info_util.register_exclusion(__file__)


class Transition(NamedTuple):
    """One step of every environment; a trajectory has a time axis in front: [time, env, ...]."""

    obs: jax.Array
    """What was acted on."""
    action: jax.Array
    """What was done."""
    extras: PyTree
    """What `act` returned beside the action."""
    reward: jax.Array
    """What it gave."""
    discount: jax.Array
    """0 where the episode terminated, else 1."""
    last: jax.Array
    """True where the episode ended, for either reason."""
    next_obs: jax.Array
    """The true successor of `obs`."""


class Position(NamedTuple):
    """Where the environments stand between two iterations."""

    env_state: PyTree
    """State of the environments."""
    obs: jax.Array
    """What to act on next."""
    memory: PyTree = None
    """The network's recurrent state in each environment; None if it has none."""


def rollout(
    env: Env,
    act: Callable[..., Any],
    params: PyTree,
    start: Position,
    key: Key,
    unroll: int,
    *,
    fresh: PyTree = None,
    each: PyTree = None,
) -> tuple[Position, Transition, dict[str, jax.Array]]:
    """Act for `unroll` steps in every environment.

    `act(params, obs, key) -> (action, extras)` is for one environment. If the network has memory, `start.memory` [env],
    it is `act(params, obs, key, memory) -> (action, extras, memory)`, and `fresh` is the memory an episode begins with.
    `each` [env] is what else `act` takes, of each environment: `act(params, obs, key, each)`.
    Returns where the environments stand now, the trajectory [time, env, ...], and the metrics of episodes that ended.
    """

    def step(now: Position, key: Key):
        keys = env.keys(key)
        more = [x for x in (now.memory, each) if x is not None]
        action, extras, *after = jax.vmap(act, (None, 0, 0, *(0 for _ in more)))(params, now.obs, keys, *more)
        memory = after[0] if after else None
        env_state, ts = env.step(now.env_state, action)
        memory = jax.tree.map(lambda old, new: select(ts.last, new, old), memory, fresh)
        transition = Transition(now.obs, action, extras, ts.reward, ts.discount, ts.last, ts.next_obs)
        return Position(env_state, ts.obs, memory), (transition, ts.info)

    # What only sums up comes after the loop: with environments in Python, every compiled call in it is paid per step.
    end, (trajectory, info) = jax.lax.scan(step, start, jax.random.split(key, unroll))
    return end, trajectory, episode_metrics(trajectory.last, info)


def select(last: jax.Array, fresh: jax.Array, memory: jax.Array) -> jax.Array:
    """`memory` [env, ...], but `fresh` [...] where `last` [env]."""
    last = last.reshape(last.shape + (1,) * fresh.ndim)
    return jnp.where(last, jnp.broadcast_to(fresh, memory.shape), memory)


def episode_metrics(last: jax.Array, info: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Mean return and length of the episodes that ended, NaN if none did; from `last` and `info` [time, env].

    Other numbers in `info` are averaged likewise, as they were in the last step: `x` becomes `episode_x`.
    """
    dtype = info["episode_return"].dtype

    def total(x: jax.Array) -> jax.Array:
        # Time first: what then has to leave an environment's site is one number per environment.
        return jnp.sum(jnp.sum(jnp.where(last, x.astype(dtype), 0), axis=0))

    # Some vector environments pause between two episodes, and tell that as an episode of no length.
    count = total((info["episode_length"] > 0).astype(dtype))
    per_episode = jnp.where(count > 0, 1 / jnp.maximum(count, 1), jnp.nan)
    means = {name if name.startswith("episode_") else f"episode_{name}": x for name, x in info.items()}
    per_episode_metrics = {name: metric(total(x) * per_episode, weight="episodes") for name, x in means.items()}
    return per_episode_metrics | {"episodes": metric(count, reduce="sum")}


def minibatches(batch: PyTree, key: Key, size: int) -> PyTree:
    """A batch [n, ...] in random order, as [n / size, size, ...]; `size` must divide n."""
    num = len(jax.tree.leaves(batch)[0])
    order = permutation(key, num)
    return jax.tree.map(lambda x: x[order].reshape(num // size, size, *x.shape[1:]), batch)


def permutation(key: Key, num: int) -> jax.Array:
    """0 .. num - 1 in random order.

    `jax.random.permutation` sorts pairs, of a random number and a place, and from 1,626 of them on twice. Here both are one
    number where at least 16 bits of it are random, which is sorted in a sixth of the time. Those with equal bits, one pair in
    65,536 or fewer, keep their order.
    """
    bits = jax.random.bits(key, (num,), jnp.uint32)
    if num > 1 << 16:
        return jnp.argsort(bits)
    place = jnp.uint32((1 << (num - 1).bit_length()) - 1)
    return (jnp.sort(bits & ~place | jnp.arange(num, dtype=jnp.uint32)) & place).astype(jnp.int32)
