"""IMPALA on tasks whose best return is known, with actors up to date and behind; its gradient by hand, and at no lag."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from algos.one_gradient import (
    first_value,
    iterate_on_two_shards,
    learn,
    learn_task,
    on_two_shards,
    trajectory_of,
)
from algos.one_step import HighestOfTwo, OneStep
from algos.toys import Aim, Recall, TwoStep, batch
from choreo import envs, networks
from choreo.algos.a2c import A2C
from choreo.algos.impala import IMPALA
from choreo.algos.one_gradient import Carry
from choreo.errors import AlgorithmError
from choreo.loops import count_steps, rollout
from choreo.testing import check_algorithm

SMALL = functools.partial(networks.mlp, hidden=(16,))
MEMORY = functools.partial(networks.lstm, hidden=(16,), width=16)
TOY = IMPALA(unroll=8, learning_rate=1e-2, entropy_coef=0.0, network=SMALL)
ITERATIONS = 400
HASTY = dataclasses.replace(TOY, gamma=0.8, max_grad_norm=10.0, total_steps=ITERATIONS * 8 * 16)
"""For tasks of a few steps."""
TASKS = {
    "two_step": (batch(TwoStep(), 16), SMALL, 200, 0.99),
    "aim": (batch(Aim(), 16), SMALL, 800, -0.02),
    "recall": (batch(Recall(), 16), MEMORY, 300, 0.99),
}


@pytest.mark.parametrize(("task", "value"), [("match", 1.0), ("two_step", 0.8)])
def test_finds_the_best_return_and_its_value(task, value):
    carry, metrics = learn_task(HASTY, task, ITERATIONS)
    assert metrics["episode_return"][-5:].mean() >= 0.99
    np.testing.assert_allclose(first_value(carry), value, atol=0.1)
    np.testing.assert_allclose(metrics["importance"], 1, atol=1e-4)  # nothing to correct


@pytest.mark.long
@pytest.mark.parametrize("task", ["aim", "recall"])
def test_finds_the_best_return(task):
    """In CI: A2C, whose gradient is the same, as is shown below."""
    env, network, iterations, best = TASKS[task]
    _, metrics = learn(dataclasses.replace(TOY, network=network), env, iterations, 0)
    assert metrics["episode_return"][-5:].mean() >= best
    np.testing.assert_allclose(metrics["importance"], 1, atol=1e-4)


@pytest.mark.parametrize("task", ["two_step", pytest.param("recall", marks=pytest.mark.long)])
def test_finds_it_with_parameters_of_four_iterations_ago(task):
    env, network, iterations, best = TASKS[task]
    metrics = learn_behind(dataclasses.replace(TOY, network=network), env, 2 * iterations, 4)
    assert metrics["episode_return"][-5:].mean() >= best
    assert np.abs(metrics["importance"][:100] - 1).max() > 1e-3  # there was something to correct


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def learn_behind(algo, env, iterations, lag):
    """Every iteration acts with the parameters of `lag` iterations before."""
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


@pytest.mark.long
def test_masks_with_memory_and_statistics_of_observations():
    """In CI: PPO, test_spaces.py; the networks are the same."""
    algo = dataclasses.replace(TOY, network=MEMORY, normalise_obs=True)
    carry, metrics = learn(algo, OneStep(HighestOfTwo(), 16), 300, 0)
    assert metrics["episode_return"].min() >= 0  # a masked action costs far more
    assert metrics["episode_return"][-5:].mean() >= 0.99
    assert carry.train.params.moments["action_mask"] is None


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
    algo = IMPALA(unroll=8, network=network, normalise_obs=True, total_steps=10_000)
    check_algorithm(algo, envs.make(env, num_envs=4))


def test_without_lag_its_gradient_is_that_of_a2c():
    """Also with memory, over episode ends: the learner finds the probabilities that the actor noted."""
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


def test_one_step_of_gradient_descent_by_hand():
    """Behind, plain SGD: new parameters are old ones less the gradient of the paper's loss, v_s by a loop."""
    with jax.enable_x64(True):
        algo = IMPALA(unroll=16, learning_rate=0.1, trace_lambda=1.0, network=SMALL, optimizer=optax.sgd)
        carry, trajectory = trajectory_of(algo, envs.make("jax:CartPole-v1", num_envs=4))
        old = jax.tree.map(
            lambda x: x + 0.3 * jax.random.normal(jax.random.key(2), x.shape), carry.train.params.network
        )
        train = carry.train._replace(params=carry.train.params._replace(network=old))
        target, advantage = _vtrace_by_hand(algo, old, trajectory)

        def paper(module):
            pi, value = jax.vmap(jax.vmap(module))(trajectory.obs)
            probs = jax.nn.softmax(pi.logits)
            log_prob = jnp.log(jnp.take_along_axis(probs, trajectory.action[..., None], axis=-1))[..., 0]
            entropy = -jnp.sum(probs * jnp.log(probs), axis=-1)
            loss = -log_prob * advantage + algo.value_coef * 0.5 * (value - target) ** 2 - algo.entropy_coef * entropy
            return jnp.mean(loss)

        gradient, metrics = algo.gradient(train.params, trajectory, None)
        after, _ = algo.update(train, gradient, jnp.float64(64))
        assert metrics["behaviour_kl"] > 0.01
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, old, jax.jit(jax.grad(paper))(old))
        for new, want in zip(jax.tree.leaves(after.params.network), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(new, want, rtol=1e-9, atol=1e-12)


def _vtrace_by_hand(algo, network, trajectory):
    (pi, value_tm1), (_, value_t) = (jax.vmap(jax.vmap(network))(x) for x in (trajectory.obs, trajectory.next_obs))
    ratio = np.exp(np.asarray(pi.log_prob(trajectory.action) - trajectory.extras.log_prob(trajectory.action)))
    reward, discount, last, value_tm1, value_t = map(
        np.asarray, (trajectory.reward, trajectory.discount * algo.gamma, trajectory.last, value_tm1, value_t)
    )
    target, advantage = np.zeros_like(reward), np.zeros_like(reward)
    for e in range(reward.shape[1]):
        beyond = value_t[-1, e]  # v_{s+1}
        for t in reversed(range(len(reward))):
            beyond = value_t[t, e] if last[t, e] else beyond
            weight = min(1.0, ratio[t, e])
            advantage[t, e] = weight * (reward[t, e] + discount[t, e] * beyond - value_tm1[t, e])
            delta = weight * (reward[t, e] + discount[t, e] * value_t[t, e] - value_tm1[t, e])
            beyond = target[t, e] = value_tm1[t, e] + delta + discount[t, e] * weight * (beyond - value_t[t, e])
    return target, advantage


@pytest.mark.parametrize("network", [SMALL, MEMORY], ids=["mlp", "lstm"])
@pytest.mark.parametrize("x64", [False, True])
def test_every_number_has_the_precision_asked_for(network, x64):
    with jax.enable_x64(x64):
        algo = IMPALA(unroll=8, network=network, normalise_obs=True, total_steps=10_000)
        out = jax.eval_shape(functools.partial(learn, algo, envs.make("jax:Pendulum-v1", num_envs=4), 2), 0)
        leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert {x.dtype.name for x in leaves} == {"float64" if x64 else "float32"}


@pytest.mark.long  # in CI for A2C, whose update it shares
def test_two_shards_are_one_twice_as_large():
    with jax.enable_x64(True):
        algo = dataclasses.replace(TOY, unroll=5, network=MEMORY, normalise_obs=True, optimizer=optax.sgd)
        shards, whole = on_two_shards(algo, batch(Aim(), 8))
        for both, one in zip(jax.tree.leaves(shards), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(both[0], both[1])
            np.testing.assert_allclose(both[0], one, rtol=1e-10, atol=1e-12)
        assert whole.params.moments.num == 5 * 8


@pytest.mark.long
def test_shards_stay_equal():
    """A whole iteration; in CI: a step of it above, and the law matrix."""
    algo = dataclasses.replace(TOY, unroll=4, normalise_obs=True, total_steps=10_000)
    train, _ = iterate_on_two_shards(algo, batch(Aim(), 8))
    for leaf in jax.tree.leaves(train):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    assert train.params.moments.num[0] == 2 * 4 * 8


IMPOSSIBLE = [
    ({"unroll": 0}, r"IMPALA\(unroll=0\) must be at least 1"),
    ({"rho_bar": 0.5}, r"IMPALA\(c_bar=1.0\) may not be larger than rho_bar=0.5"),
    ({"c_bar": 0.0}, r"IMPALA\(c_bar=0.0\) must be above 0"),
]


@pytest.mark.parametrize(("options", "what"), IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_what_cannot_be(options, what):
    with pytest.raises(AlgorithmError, match=what):
        IMPALA(**options)
