"""What the tests of algorithms with one gradient per iteration share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from algos.toys import DISCRETE, one_of
from choreo.loops import count_steps, rollout
from choreo.roles import SHARD_AXIS, all_reduce


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def learn(algo, env, iterations, seed):
    return iterate_often(algo, env, iterations, seed)


def iterate_often(algo, env, iterations, seed):
    """-> the last carry, and the metrics of every iteration."""
    key_init, key = jax.random.split(jax.random.key(seed))
    carry = algo.init(env, key_init)
    return jax.lax.scan(lambda c, k: algo.iterate(env, c, k), carry, jax.random.split(key, iterations))


def learn_task(algo, task, iterations, num_envs=16):
    """The same on a task of `DISCRETE`; compiled once for all of them."""
    return _learn_task(algo, iterations, num_envs, jnp.int32(list(DISCRETE).index(task)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _learn_task(algo, iterations, num_envs, which):
    return iterate_often(algo, one_of(DISCRETE, which, num_envs), iterations, 0)


def first_value(carry):
    """What the network says of the first thing one sees in most tasks of `DISCRETE`."""
    return carry.train.params.network(jnp.array([1.0, 0.0, 0.0]))[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def trajectory_of(algo, env):
    """The first carry, and the trajectory that begins there."""
    carry = algo.init(env, jax.random.key(0))
    params = carry.train.params
    fresh = algo.initial_state(params)
    return carry, rollout(env, algo.act, params, carry.position, jax.random.key(1), algo.unroll, fresh=fresh)[1]


def by_hand(carry, trajectory, gamma, lambda_):
    """Advantages by a loop, and the values they were computed from: numpy, [time, env]."""
    network = jax.jit(jax.vmap(jax.vmap(carry.train.params.network)))
    value_tm1, value_t = (np.asarray(network(obs)[1]) for obs in (trajectory.obs, trajectory.next_obs))
    reward, discount, last = map(np.asarray, (trajectory.reward, trajectory.discount, trajectory.last))
    advantage = np.zeros_like(reward)
    for e in range(reward.shape[1]):
        running = 0.0
        for t in reversed(range(len(reward))):
            delta = reward[t, e] + gamma * discount[t, e] * value_t[t, e] - value_tm1[t, e]
            running = advantage[t, e] = delta + (0.0 if last[t, e] else gamma * lambda_ * running)
    return advantage, value_tm1


def on_two_shards(algo, env):
    """What one trajectory makes of `train`: its environments on two shards (so everything twice), and all on one."""
    carry, trajectory = trajectory_of(algo, env)
    halves = jax.tree.map(lambda x: x.reshape(x.shape[0], 2, -1, *x.shape[2:]), trajectory)
    memory = carry.position.memory
    memories = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), memory)
    step = functools.partial(_learn_from, algo)
    shards = jax.jit(jax.vmap(step, (None, 1, 0), axis_name=SHARD_AXIS))(carry.train, halves, memories)
    return shards, jax.jit(step)(carry.train, trajectory, memory)


def _learn_from(algo, train, trajectory, memory):
    gradient, _ = algo.gradient(train.params, trajectory, memory)
    steps = count_steps(trajectory.reward.size, trajectory.reward.dtype)
    return algo.update(train, all_reduce(gradient), steps)[0]


def iterate_on_two_shards(algo, env):
    """One iteration by the reference meaning: a vmap with a named axis and a key for each. -> `train` and metrics, twice."""
    carry = jax.jit(algo.init, static_argnums=0)(env, jax.random.key(0))
    both = carry._replace(position=jax.tree.map(lambda x: jnp.stack([x, x]), carry.position))
    axes = carry._replace(train=None, position=0)
    iterate = jax.vmap(functools.partial(algo.iterate, env), in_axes=(axes, 0), axis_name=SHARD_AXIS)
    after, metrics = jax.jit(iterate)(both, jax.random.split(jax.random.key(1), 2))
    return after.train, metrics
