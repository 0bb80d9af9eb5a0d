"""IMPALA with actors that lag behind the learner, and the gradient of IMPALA.

The tests that A2C, IMPALA and REINFORCE share are in test_one_gradient.py.
"""

import functools

import jax
import numpy as np
import optax
import pytest

from algos.one_gradient import MEMORY, SMALL, check_sgd_step, trajectory_of
from algos.toys import Recall, TwoStep, batch
from choreo import envs
from choreo.algos.a2c import A2C
from choreo.algos.impala import IMPALA
from choreo.algos.one_gradient import Carry
from choreo.errors import AlgorithmError
from choreo.loops import count_steps, rollout


@pytest.mark.parametrize(
    ("env", "network", "iterations"),
    [(batch(TwoStep(), 16), SMALL, 400), pytest.param(batch(Recall(), 16), MEMORY, 600, marks=pytest.mark.long)],
    ids=["two_step", "recall"],
)
def test_finds_the_best_return_although_actors_lag_four_iterations_behind(env, network, iterations):
    algo = IMPALA(unroll=8, learning_rate=1e-2, entropy_coef=0.0, network=network)
    metrics = learn_with_lag(algo, env, iterations, 4)
    assert metrics["episode_return"][-5:].mean() >= 0.99
    assert np.abs(metrics["importance"][:100] - 1).max() > 1e-3  # the lag made a difference


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def learn_with_lag(algo, env, iterations, lag):
    """Learn with actors whose parameters are `lag` iterations old. Returns the metrics of every iteration."""
    key_init, key = jax.random.split(jax.random.key(0))
    carry = algo.init(env, key_init)

    def iterate(state, key):
        carry, (params, *rest) = state
        fresh = algo.initial_state(params)
        end, trajectory, episodes = rollout(env, algo.act, params, carry.position, key, algo.unroll, fresh=fresh)
        gradient, metrics = algo.gradient(carry.train.params, trajectory, carry.position.memory)
        steps = count_steps(trajectory.reward.size, trajectory.reward.dtype)
        train, _ = algo.update(carry.train, gradient, steps)
        return (Carry(train, end), [*rest, train.params]), episodes | metrics

    start = (carry, [carry.train.params] * (lag + 1))
    return jax.lax.scan(iterate, start, jax.random.split(key, iterations))[1]


def test_without_lag_the_gradient_of_impala_equals_that_of_a2c():
    """Without lag, the learner recomputes exactly the probabilities that the actor recorded.

    This also holds with memory, and with ends of episodes in the trajectory.
    """
    with jax.enable_x64(True):
        algo, a2c = IMPALA(unroll=40, trace_lambda=0.9, network=MEMORY), A2C(unroll=40, gae_lambda=0.9, network=MEMORY)
        carry, trajectory = trajectory_of(algo, envs.make("jax:CartPole-v1", num_envs=4))
        assert trajectory.last.any()
        ours, metrics = algo.gradient(carry.train.params, trajectory, carry.position.memory)
        theirs, _ = a2c.gradient(carry.train.params, trajectory, carry.position.memory)
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(metrics["importance"], 1, rtol=1e-12)
        np.testing.assert_allclose(metrics["behaviour_kl"], 0, atol=1e-12)


def test_one_sgd_step_follows_the_gradient_of_the_textbook_loss():
    """The parameters of the actor differ from those of the learner, so the weights of V-trace are not 1."""
    with jax.enable_x64(True):
        algo = IMPALA(unroll=16, learning_rate=0.1, trace_lambda=1.0, network=SMALL, optimizer=optax.sgd)
        carry, trajectory = trajectory_of(algo, envs.make("jax:CartPole-v1", num_envs=4))
        learner = jax.tree.map(
            lambda x: x + 0.3 * jax.random.normal(jax.random.key(2), x.shape), carry.train.params.network
        )
        train = carry.train._replace(params=carry.train.params._replace(network=learner))
        target, advantage = _vtrace_by_hand(algo, learner, trajectory)
        metrics = check_sgd_step(algo, train, trajectory, target=target, advantage=advantage)
        assert metrics["behaviour_kl"] > 0.01


def _vtrace_by_hand(algo, network, trajectory):
    (pi, value_tm1), (_, value_t) = (jax.vmap(jax.vmap(network))(x) for x in (trajectory.obs, trajectory.next_obs))
    ratio = np.exp(np.asarray(pi.log_prob(trajectory.action) - trajectory.extras.log_prob(trajectory.action)))
    reward, discount, last, value_tm1, value_t = map(
        np.asarray, (trajectory.reward, trajectory.discount * algo.gamma, trajectory.last, value_tm1, value_t)
    )
    target, advantage = np.zeros_like(reward), np.zeros_like(reward)
    for e in range(reward.shape[1]):
        beyond = value_t[-1, e]  # v_{s+1} in the paper's notation
        for t in reversed(range(len(reward))):
            beyond = value_t[t, e] if last[t, e] else beyond
            weight = min(1.0, ratio[t, e])
            advantage[t, e] = weight * (reward[t, e] + discount[t, e] * beyond - value_tm1[t, e])
            delta = weight * (reward[t, e] + discount[t, e] * value_t[t, e] - value_tm1[t, e])
            beyond = target[t, e] = value_tm1[t, e] + delta + discount[t, e] * weight * (beyond - value_t[t, e])
    return target, advantage


IMPOSSIBLE = [
    ({"rho_bar": 0.5}, r"IMPALA\(c_bar=1.0\) may not be larger than rho_bar=0.5"),
    ({"c_bar": 0.0}, r"IMPALA\(c_bar=0.0\) must be above 0"),
]


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE, ids=["c_bar above rho_bar", "c_bar of 0"])
def test_impossible_bounds_of_importance_weights_are_refused(options, message):
    with pytest.raises(AlgorithmError, match=message):
        IMPALA(**options)
