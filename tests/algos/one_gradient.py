"""Shared code for the tests of algorithms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from algos.toys import DISCRETE, one_of
from choreo import networks
from choreo.loops import count_steps, rollout
from choreo.roles import SHARD_AXIS, all_reduce

SMALL = functools.partial(networks.mlp, hidden=(16,))
MEMORY = functools.partial(networks.lstm, hidden=(16,), width=16)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def learn(algo, env, iterations, seed):
    return iterate_often(algo, env, iterations, seed)


def iterate_often(algo, env, iterations, seed):
    """Run `init` and then several iterations. Returns the last carry, and the metrics of every iteration."""
    key_init, key = jax.random.split(jax.random.key(seed))
    carry = algo.init(env, key_init)
    return jax.lax.scan(lambda c, k: algo.iterate(env, c, k), carry, jax.random.split(key, iterations))


def learn_task(algo, task, iterations, num_envs=16):
    """`learn` on a task of `DISCRETE`, with seed 0. One compiled program serves all these tasks."""
    return _learn_task(algo, iterations, num_envs, jnp.int32(list(DISCRETE).index(task)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _learn_task(algo, iterations, num_envs, which):
    return iterate_often(algo, one_of(DISCRETE, which, num_envs), iterations, 0)


def first_value(carry):
    """The value that the network gives to [1, 0, 0], which can be the first observation in every task of `DISCRETE`."""
    return carry.train.params.network(jnp.array([1.0, 0.0, 0.0]))[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def trajectory_of(algo, env):
    """The carry of `init`, and a trajectory that begins with this carry."""
    carry = algo.init(env, jax.random.key(0))
    params = carry.train.params
    fresh = algo.initial_state(params)
    return carry, rollout(env, algo.act, params, carry.position, jax.random.key(1), algo.unroll, fresh=fresh)[1]


def gae_by_hand(carry, trajectory, gamma, lambda_):
    """Generalised advantages, computed by a loop, and the values of the observations. Both are NumPy arrays [time, env]."""
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


def check_sgd_step(algo, train, trajectory, *, target, advantage):
    """Check one update of an algorithm that uses plain SGD with learning rate 0.1.

    The new parameters must be the old ones minus 0.1 times the gradient of the textbook loss.
    Returns the metrics of `algo.gradient`.
    """

    def textbook(module):
        pi, value = jax.vmap(jax.vmap(module))(trajectory.obs)
        probs = jax.nn.softmax(pi.logits)
        log_prob = jnp.log(jnp.take_along_axis(probs, trajectory.action[..., None], axis=-1))[..., 0]
        entropy = -jnp.sum(probs * jnp.log(probs), axis=-1)
        # `value_coef` is 0.5, and the loss of the critic is half the squared error. `entropy_coef` is 0.01.
        return jnp.mean(-log_prob * advantage + 0.5 * 0.5 * (value - target) ** 2 - 0.01 * entropy)

    gradient, metrics = algo.gradient(train.params, trajectory, None)
    after, _ = algo.update(train, gradient, jnp.float64(trajectory.reward.size))
    old = train.params.network
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, old, jax.jit(jax.grad(textbook))(old))
    for new, want in zip(jax.tree.leaves(after.params.network), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(new, want, rtol=1e-9, atol=1e-12)
    return metrics


def on_two_shards(algo, env):
    """Learn from one trajectory, on two shards with half of the environments each, and on one shard with all of them.

    Returns the train states of the two shards, with a leading axis of 2 in every array, and the train state of the one shard.
    """
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
    """One iteration as docs/law.md defines it for two shards: a vmap with a named axis, and a different key for each shard.

    Returns the train states and the metrics. Every array has a leading axis of 2.
    """
    carry = jax.jit(algo.init, static_argnums=0)(env, jax.random.key(0))
    both = carry._replace(position=jax.tree.map(lambda x: jnp.stack([x, x]), carry.position))
    axes = carry._replace(train=None, position=0)
    iterate = jax.vmap(functools.partial(algo.iterate, env), in_axes=(axes, 0), axis_name=SHARD_AXIS)
    after, metrics = jax.jit(iterate)(both, jax.random.split(jax.random.key(1), 2))
    return after.train, metrics


def assert_shards_equal(train):
    """Assert that the train states of the two shards are equal bit for bit."""
    for leaf in jax.tree.leaves(train):
        np.testing.assert_array_equal(leaf[0], leaf[1])


def assert_shards_equal_whole(shards, whole):
    """Assert that the states of both shards are equal bit for bit, and equal to `whole`, the state of one shard, up to 1e-10."""
    assert_shards_equal(shards)
    for both, one in zip(jax.tree.leaves(shards), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(both[0], one, rtol=1e-10, atol=1e-12)


def float_types(out):
    """The names of all floating-point types in a pytree of arrays or shapes."""
    return {x.dtype.name for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)}
