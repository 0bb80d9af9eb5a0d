"""A2C on tasks whose best return is known, its gradient against a direct computation, and its two halves over shards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from algos.one_gradient import (
    by_hand,
    first_value,
    iterate_on_two_shards,
    learn,
    learn_task,
    on_two_shards,
    trajectory_of,
)
from algos.one_step import Copy, HighestOfTwo, Name, OneStep, Pieces
from algos.toys import Aim, Recall, batch
from choreo import envs, networks
from choreo.algos.a2c import A2C
from choreo.algos.one_gradient import Gradient
from choreo.errors import AlgorithmError
from choreo.testing import check_algorithm

SMALL = functools.partial(networks.mlp, hidden=(16,))
MEMORY = functools.partial(networks.lstm, hidden=(16,), width=16)
TOY = A2C(unroll=8, learning_rate=1e-2, entropy_coef=0.0, network=SMALL)
ITERATIONS = 400
HASTY = dataclasses.replace(TOY, gamma=0.8, max_grad_norm=10.0, total_steps=320 * 8 * 16)
"""For tasks of a few steps; the learning rate reaches 0 before the end."""


@pytest.mark.parametrize(("task", "value"), [("match", 1.0), ("two_step", 0.8)])
def test_finds_the_best_return_and_its_value(task, value):
    carry, metrics = learn_task(HASTY, task, ITERATIONS)
    assert metrics["episode_return"][-5:].mean() >= 0.99
    np.testing.assert_allclose(first_value(carry), value, atol=0.1)


@pytest.mark.parametrize(
    ("env", "network", "iterations", "best"),
    [
        (batch(Aim(), 16), SMALL, 600, -0.02),
        (batch(Recall(), 16), MEMORY, 300, 0.99),
        pytest.param(OneStep(Copy(), 16), SMALL, 300, 0.99, marks=pytest.mark.long),  # in CI: PPO, test_spaces.py
    ],
    ids=["aim", "recall", "copy"],
)
def test_finds_the_best_return(env, network, iterations, best):
    _, metrics = learn(dataclasses.replace(TOY, network=network), env, iterations, 0)
    assert metrics["episode_return"][-5:].mean() >= best


@pytest.mark.long
def test_masks_and_statistics_of_observations():
    """In CI: PPO, test_spaces.py; the networks are the same."""
    algo = dataclasses.replace(TOY, normalise_obs=True)
    carry, metrics = learn(algo, OneStep(Pieces(), 16), 300, 0)
    assert metrics["episode_return"][-5:].mean() >= 0.99
    moments = carry.train.params.moments
    assert moments["sign"] is None and moments["rest"][0].num == 300 * 8 * 16
    np.testing.assert_allclose(moments["rest"][0].var, 0.25, atol=0.05)
    _, metrics = learn(TOY, OneStep(HighestOfTwo(), 16), 200, 0)
    assert metrics["episode_return"].min() >= 0  # a masked action costs far more
    assert metrics["episode_return"][-5:].mean() >= 0.99


def test_a_time_limit_is_bootstrapped():
    """The value of an endless income is 1 / (1 - gamma) = 5; cut off after 5 steps it would be 3.4 at most."""
    carry, _ = learn_task(HASTY, "income", ITERATIONS)
    np.testing.assert_allclose(first_value(carry), 5.0, rtol=0.02)


@pytest.mark.parametrize(
    ("network", "env"),
    [pytest.param(SMALL, "jax:CartPole-v1", marks=pytest.mark.long), (MEMORY, "jax:Pendulum-v1")],
    ids=["mlp", "lstm"],
)
def test_keeps_the_protocol(network, env):
    algo = A2C(unroll=8, network=network, normalise_obs=True, total_steps=10_000)
    check_algorithm(algo, envs.make(env, num_envs=4))


def test_one_step_of_gradient_descent_by_hand():
    """Plain SGD: new parameters are old ones less the gradient of the textbook loss, advantages by a loop."""
    with jax.enable_x64(True):
        algo = A2C(unroll=16, learning_rate=0.1, gae_lambda=0.9, network=SMALL, optimizer=optax.sgd)
        carry, trajectory = trajectory_of(algo, envs.make("jax:CartPole-v1", num_envs=4))
        advantage, value = by_hand(carry, trajectory, algo.gamma, 0.9)

        def textbook(module):
            pi, now = jax.vmap(jax.vmap(module))(trajectory.obs)
            probs = jax.nn.softmax(pi.logits)
            log_prob = jnp.log(jnp.take_along_axis(probs, trajectory.action[..., None], axis=-1))[..., 0]
            entropy = -jnp.sum(probs * jnp.log(probs), axis=-1)
            return jnp.mean(-log_prob * advantage + 0.25 * (now - value - advantage) ** 2 - 0.01 * entropy)

        gradient, _ = algo.gradient(carry.train.params, trajectory, None)
        train, _ = algo.update(carry.train, gradient, jnp.float64(64))
        old = carry.train.params.network
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, old, jax.jit(jax.grad(textbook))(old))
        for new, want in zip(jax.tree.leaves(train.params.network), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(new, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("network", [SMALL, MEMORY], ids=["mlp", "lstm"])
@pytest.mark.parametrize("x64", [False, True])
def test_every_number_has_the_precision_asked_for(network, x64):
    with jax.enable_x64(x64):
        algo = A2C(unroll=8, network=network, normalise_obs=True, total_steps=10_000)
        out = jax.eval_shape(functools.partial(learn, algo, envs.make("jax:Pendulum-v1", num_envs=4), 2), 0)
        leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert {x.dtype.name for x in leaves} == {"float64" if x64 else "float32"}


def test_the_learning_rate_falls_to_zero():
    _, metrics = learn_task(HASTY, "match", ITERATIONS)
    expected = 1e-2 * np.maximum(1 - np.arange(ITERATIONS) / 320, 0)
    np.testing.assert_allclose(metrics["learning_rate"], expected, rtol=1e-5, atol=1e-8)


def test_two_shards_are_one_twice_as_large():
    """Means of means: the step of two shards is that of one with all their environments, statistics included."""
    with jax.enable_x64(True):
        algo = dataclasses.replace(TOY, unroll=4, normalise_obs=True, total_steps=10_000, optimizer=optax.sgd)
        shards, whole = on_two_shards(algo, batch(Aim(), 8))
        for both, one in zip(jax.tree.leaves(shards), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(both[0], both[1])
            np.testing.assert_allclose(both[0], one, rtol=1e-10, atol=1e-12)
        assert whole.params.moments.num == 4 * 8


@pytest.mark.long
def test_shards_stay_equal():
    """A whole iteration; in CI: a step of it above, and the law matrix."""
    algo = dataclasses.replace(TOY, unroll=4, normalise_obs=True, total_steps=10_000)
    train, metrics = iterate_on_two_shards(algo, batch(Aim(), 8))
    for leaf in jax.tree.leaves(train):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    assert metrics["value_loss"][0] != metrics["value_loss"][1]  # each saw its own data
    assert train.params.moments.num[0] == 2 * 4 * 8


def test_gradients_are_clipped_where_they_are_applied():
    algo = A2C(unroll=4, learning_rate=1.0, max_grad_norm=1e-3, network=SMALL)
    train = jax.jit(algo.init, static_argnums=0)(batch(Aim(), 8), jax.random.key(0)).train
    ones = jax.tree.map(jnp.ones_like, train.params.network)
    train, metrics = algo.update(train, Gradient(ones, None), jnp.float32(32))
    np.testing.assert_allclose(metrics["grad_norm"], sum(x.size for x in jax.tree.leaves(ones)) ** 0.5, rtol=1e-6)
    mean_square = optax.tree.get(train.optimizer, "nu")  # of RMSProp, which began with none
    np.testing.assert_allclose(sum(np.sum(x) for x in jax.tree.leaves(mean_square)), 0.01 * 1e-3**2, rtol=1e-4)


def test_impossible_counts():
    with pytest.raises(AlgorithmError, match=r"A2C\(unroll=0\) must be at least 1"):
        A2C(unroll=0)


def test_normalising_needs_a_box():
    env = OneStep(Name(), 8)
    with pytest.raises(AlgorithmError, match="normalise_obs needs observations in a Box, not in Discrete"):
        jax.eval_shape(functools.partial(A2C(normalise_obs=True).init, env), jax.random.key(0))
