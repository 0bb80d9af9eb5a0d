"""REINFORCE on tasks whose best return is known, its gradient by hand, and episodes cut by the unroll."""

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
from algos.one_step import HighestOfTwo, OneStep, Pieces
from algos.toys import Aim, Recall, batch
from choreo import envs, networks
from choreo.algos.reinforce import REINFORCE
from choreo.errors import AlgorithmError
from choreo.testing import check_algorithm

SMALL = functools.partial(networks.mlp, hidden=(16,))
MEMORY = functools.partial(networks.lstm, hidden=(16,), width=16)
TOY = REINFORCE(unroll=8, learning_rate=1e-2, entropy_coef=0.0, network=SMALL)
ITERATIONS = 400
HASTY = dataclasses.replace(TOY, gamma=0.8, max_grad_norm=10.0)
"""For tasks of a few steps."""


@pytest.mark.parametrize(("task", "value"), [("match", 1.0), ("two_step", 0.8)])
def test_finds_the_best_return_and_its_value(task, value):
    carry, metrics = learn_task(HASTY, task, ITERATIONS)
    assert metrics["episode_return"][-5:].mean() >= 0.99
    np.testing.assert_allclose(first_value(carry), value, atol=0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("env", "network", "iterations", "best"),
    [
        (batch(Aim(), 16), SMALL, 600, -0.02),
        (batch(Recall(), 16), MEMORY, 300, 0.99),
        (OneStep(Pieces(), 16), SMALL, 300, 0.99),
    ],
    ids=["aim", "recall", "pieces"],
)
def test_finds_the_best_return(env, network, iterations, best):
    """In CI: A2C, with the same networks and the same memory along a trajectory."""
    _, metrics = learn(dataclasses.replace(TOY, network=network), env, iterations, 0)
    assert metrics["episode_return"][-5:].mean() >= best


@pytest.mark.long
def test_masks_and_statistics_of_observations():
    """In CI: PPO, test_spaces.py; the networks are the same."""
    _, metrics = learn(dataclasses.replace(TOY, normalise_obs=True), OneStep(HighestOfTwo(), 16), 200, 0)
    assert metrics["episode_return"].min() >= 0  # a masked action costs far more
    assert metrics["episode_return"][-5:].mean() >= 0.99


@pytest.mark.parametrize("unroll", [3, 8])
def test_an_episode_that_was_cut_goes_on(unroll):
    """An endless income is worth 1 / (1 - gamma) = 5, cut by its time limit of 5 steps or by an unroll of 3."""
    carry, _ = learn_task(dataclasses.replace(HASTY, unroll=unroll), "income", ITERATIONS)
    np.testing.assert_allclose(first_value(carry), 5.0, rtol=0.02)


@pytest.mark.parametrize(
    ("network", "env"),
    [pytest.param(SMALL, "jax:CartPole-v1", marks=pytest.mark.long), (MEMORY, "jax:Pendulum-v1")],
    ids=["mlp", "lstm"],
)
def test_keeps_the_protocol(network, env):
    algo = REINFORCE(unroll=8, network=network, normalise_obs=True, total_steps=10_000)
    check_algorithm(algo, envs.make(env, num_envs=4))


def test_one_step_of_gradient_descent_by_hand():
    """Plain SGD: new parameters are old ones less the gradient of the textbook loss, returns by a loop."""
    with jax.enable_x64(True):
        algo = REINFORCE(unroll=16, learning_rate=0.1, network=SMALL, optimizer=optax.sgd)
        carry, trajectory = trajectory_of(algo, envs.make("jax:CartPole-v1", num_envs=4))
        advantage, value = by_hand(carry, trajectory, algo.gamma, 1.0)

        def textbook(module):
            pi, now = jax.vmap(jax.vmap(module))(trajectory.obs)
            probs = jax.nn.softmax(pi.logits)
            log_prob = jnp.log(jnp.take_along_axis(probs, trajectory.action[..., None], axis=-1))[..., 0]
            entropy = -jnp.sum(probs * jnp.log(probs), axis=-1)
            return_ = value + advantage
            loss = -log_prob * advantage + algo.value_coef * 0.5 * (now - return_) ** 2 - algo.entropy_coef * entropy
            return jnp.mean(loss)

        gradient, _ = algo.gradient(carry.train.params, trajectory, None)
        train, _ = algo.update(carry.train, gradient, jnp.float64(64))
        old = carry.train.params.network
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, old, jax.jit(jax.grad(textbook))(old))
        for new, want in zip(jax.tree.leaves(train.params.network), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(new, want, rtol=1e-9, atol=1e-12)


def test_two_shards_are_one_twice_as_large():
    with jax.enable_x64(True):
        algo = dataclasses.replace(TOY, unroll=4, normalise_obs=True, total_steps=10_000, optimizer=optax.sgd)
        shards, whole = on_two_shards(algo, batch(Aim(), 8))
        for both, one in zip(jax.tree.leaves(shards), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(both[0], both[1])
            np.testing.assert_allclose(both[0], one, rtol=1e-10, atol=1e-12)


@pytest.mark.long
def test_shards_stay_equal():
    """A whole iteration; in CI: a step of it above, and the law matrix."""
    train, _ = iterate_on_two_shards(dataclasses.replace(TOY, unroll=4, normalise_obs=True), batch(Aim(), 8))
    for leaf in jax.tree.leaves(train):
        np.testing.assert_array_equal(leaf[0], leaf[1])


def test_impossible_counts():
    with pytest.raises(AlgorithmError, match=r"REINFORCE\(unroll=0\) must be at least 1"):
        REINFORCE(unroll=0)
