"""The usual loops of an algorithm, as plain functions.

    begin          environments after their reset
    rollout        a trajectory [time, env], and the metrics of its episodes
    unfold         the results of a network with memory along one sequence [time]
    minibatches    a batch in random order, divided into minibatches
    anneal         the learning rate, which falls to 0 over the run

These functions have no role and do not depend on the layout. You can write a `lax.scan` by hand instead.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from choreo.envs.base import Env
from choreo.roles import all_reduce, metric
from choreo.types import Key, PyTree

source_info_util.register_exclusion(__file__)


class Transition(NamedTuple):
    """One step of every environment; a trajectory has a time axis in front: [time, env, ...]."""

    obs: jax.Array
    """Observation before the step."""
    action: jax.Array
    """Action of the step."""
    extras: PyTree
    """The second result of `act`: any values to learn from, such as the distribution of the action."""
    reward: jax.Array
    """Reward of the step."""
    discount: jax.Array
    """0 where the episode terminated, else 1."""
    last: jax.Array
    """True where the episode ended: it terminated or was truncated."""
    next_obs: jax.Array
    """Observation after the step. Where the episode ended, this is its last observation, not the first of the next episode."""


class Position(NamedTuple):
    """The state of all environments between two iterations."""

    env_state: PyTree
    """State of the environments."""
    obs: jax.Array
    """Observation to act on next: [env, ...]."""
    memory: PyTree = None
    """Memory of the network in each environment; None if the network has none."""


def begin(env: Env, key: Key, fresh: PyTree = None) -> Position:
    """Reset all environments; returns their `Position`. `fresh` is the memory of one environment when an episode begins."""
    env_state, obs = env.reset(env.keys(key))
    return Position(env_state, obs, jax.tree.map(lambda x: jnp.broadcast_to(x, (env.num_envs, *x.shape)), fresh))


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

    `act(params, obs, key) -> (action, extras)` is for one environment. If the network has memory (`start.memory` [env, ...]),
    the form is `act(params, obs, key, memory) -> (action, extras, memory)`, and `fresh` is the memory at the beginning of
    an episode. With `each` [env, ...], `act` takes one more argument, the part of `each` for its environment:
    `act(params, obs, key, each)`.

    Returns the `Position` after the last step, the trajectory [time, env, ...], and the metrics of episodes that ended.
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

    # Compute the metrics after the loop. With environments in Python, a compiled call in the loop would cost time at every step.
    end, (trajectory, info) = jax.lax.scan(step, start, jax.random.split(key, unroll))
    return end, trajectory, episode_metrics(trajectory.last, info)


def unfold(
    apply: Callable[[PyTree, PyTree], tuple[Any, ...]], obs: PyTree, last: jax.Array, memory: PyTree, fresh: PyTree
) -> tuple[Any, ...]:
    """Apply a network along one sequence [time, ...]; returns the results of `apply` at every step.

    `apply(obs, memory) -> (..., memory)` is the network on one observation. `memory` is the memory before the first step
    (None for a network without memory). After the last step of an episode, the memory becomes `fresh`, as for a new episode.
    """
    if memory is None:
        return jax.vmap(apply, (0, None))(obs, None)

    def step(memory: PyTree, now: tuple[PyTree, jax.Array]):
        obs, last = now
        *results, memory = apply(obs, memory)
        return jax.tree.map(lambda new, old: select(last, new, old), fresh, memory), (*results, memory)

    return jax.lax.scan(step, memory, (obs, last))[1]


def select(last: jax.Array, fresh: jax.Array, memory: jax.Array) -> jax.Array:
    """`fresh` [...] where `last` [env] is True, elsewhere `memory` [env, ...]."""
    last = last.reshape(last.shape + (1,) * fresh.ndim)
    return jnp.where(last, jnp.broadcast_to(fresh, memory.shape), memory)


def episode_metrics(last: jax.Array, info: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The number of episodes that ended, and their mean return and length (NaN if no episode ended).

    `last` and the arrays in `info` are [time, env]. Every other number `x` in `info` becomes the metric `episode_x`. This is
    the mean, over the same episodes, of `x` at the last step of each episode.
    """
    dtype = info["episode_return"].dtype

    def total(x: jax.Array) -> jax.Array:
        # Sum over time first: then the site of the environments sends only one number per environment.
        return jnp.sum(jnp.sum(jnp.where(last, x.astype(dtype), 0), axis=0))

    # Some vector environments pause for a step between two episodes, and report the pause as an episode of length 0.
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
    """The numbers 0 .. num - 1 in random order.

    `jax.random.permutation` sorts pairs of a random number and an index; with 1,626 pairs or more, it sorts them twice. For up to
    65,536 indices, this function puts each index and at least 16 random bits into one integer, and sorts the integers once. This
    takes a sixth of the time. Two indices with equal random bits keep their order; for each pair, the probability of equal bits is
    at most 1 in 65,536.
    """
    bits = jax.random.bits(key, (num,), jnp.uint32)
    if num > 1 << 16:
        return jnp.argsort(bits)
    index_bits = jnp.uint32((1 << (num - 1).bit_length()) - 1)
    return (jnp.sort(bits & ~index_bits | jnp.arange(num, dtype=jnp.uint32)) & index_bits).astype(jnp.int32)


def count_steps(num: int, dtype: Any) -> jax.Array:
    """Environment steps of this iteration on all learner shards together; `num` is the number on this shard."""
    return all_reduce(jnp.full((), num, dtype), "sum")


def anneal(learning_rate: float, total_steps: int | None, iterations: jax.Array, steps: jax.Array) -> jax.Array:
    """The learning rate. It falls linearly to 0 over `total_steps`; it is constant if `total_steps` is None.

    `iterations` is the number of iterations so far, and `steps` is the number of environment steps in each iteration.
    """
    initial = jnp.full((), learning_rate, steps.dtype)
    if total_steps is None:
        return initial
    fraction_done = iterations.astype(steps.dtype) * (steps / total_steps)
    return initial * jnp.maximum(1 - fraction_done, 0)
