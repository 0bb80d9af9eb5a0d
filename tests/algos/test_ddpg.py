"""DDPG on tasks whose values are known, its losses against numbers computed by hand, and its step over shards."""

import functools
import math

import jax
import numpy as np
import optax
import pytest

from algos import continuous
from algos.continuous import GAMMA, by_hand, window
from algos.toys import Match, batch
from choreo.algos.ddpg import DDPG
from choreo.errors import AlgorithmError
from choreo.networks import deterministic
from choreo.testing import check_algorithm

SMALL = functools.partial(deterministic, hidden=(32, 32), critics=1)
TOY = DDPG(
    learning_rate=3e-3, updates_per_step=1 / 8, tau=0.05, gamma=GAMMA, noise=0.3,
    batch_size=64, min_size=256, capacity=20_000, network=SMALL,
)  # fmt: skip


def test_finds_the_best_action_and_its_value():
    continuous.check_one_step(TOY, 1200)


def test_values_reach_back_over_a_step():
    continuous.check_two_steps(TOY, 1200)


def test_values_go_on_behind_a_time_limit():
    continuous.check_discounting(TOY, 1200)


def test_begins_with_any_action():
    continuous.check_beginning(TOY)


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        (window(), 1 + 0.9 * (2 * 0.5 + 0.2)),
        (window(discount=0.0, last=True), 1.0),
    ],
    ids=["goes on", "terminates"],
)
def test_losses_by_hand(steps, wanted):
    losses = DDPG(gamma=0.9).item_losses(by_hand(0.25, [1.0]), by_hand(0.5, [2.0]), steps)
    q = 1 * -0.5 + 0.1
    np.testing.assert_allclose(losses["critic_loss"], 0.5 * (q - wanted) ** 2, rtol=1e-6)
    np.testing.assert_allclose(losses["policy_loss"], -(1 * 0.25 + 0.1), rtol=1e-6)
    np.testing.assert_allclose(losses["q"], q, rtol=1e-6)


def test_each_loss_changes_its_own_part():
    algo, target = DDPG(gamma=0.9), by_hand(0.5, [2.0])
    steps = jax.tree.map(lambda x: x[None], window())
    gradient = jax.jit(jax.grad(lambda network: algo.loss(network, target, steps, jax.random.key(0))[0]))(
        by_hand(0.25, [1.0])
    )
    np.testing.assert_allclose(gradient.critics[0].slope, (-0.4 - 2.08) * -0.5, rtol=1e-5)
    np.testing.assert_allclose(gradient.policy.action, [-1.0], rtol=1e-6)


def test_a_step_that_a_time_limit_cut_is_left_out():
    losses = DDPG().item_losses(by_hand(0.25, [1.0]), by_hand(0.5, [2.0]), window(last=True))
    assert losses["critic_loss"] == 0


def test_two_shards_are_one_twice_as_large():
    with jax.enable_x64(True):
        algo = DDPG(learning_rate=0.1, network=SMALL, optimizer=optax.sgd)
        shards, whole = continuous.on_two_shards(algo), continuous.on_one_shard(algo)
        for both, one in zip(jax.tree.leaves(shards), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(both[0], both[1])
            np.testing.assert_allclose(both[0], one, rtol=1e-10, atol=1e-12)


def test_exploration_stays_in_the_space():
    algo, env = DDPG(noise=2.0, network=SMALL), continuous.shoot()
    train = jax.jit(algo.init, static_argnums=0)(env, jax.random.key(0)).train
    params = algo.policy(train)._replace(updates=np.int32(1))
    keys, obs = jax.random.split(jax.random.key(1), 500), np.zeros(1, np.float32)
    noisy = np.asarray(jax.jit(jax.vmap(lambda key: algo.act(params, obs, key)[0]))(keys))
    assert noisy.min() == -1 and noisy.max() == 3  # 2 is the whole width: many are beyond, and brought back
    assert np.unique(noisy).size > 100
    few = DDPG(noise=0.1, network=SMALL)
    noisy = np.asarray(jax.jit(jax.vmap(lambda key: few.act(params, obs, key)[0]))(keys))
    np.testing.assert_allclose(noisy.std(), 0.1 * 2, rtol=0.15)  # of half the width, which is 2


def test_keeps_the_protocol():
    check_algorithm(TOY, continuous.parts())


@pytest.mark.parametrize("x64", [False, True])
def test_every_number_has_the_precision_asked_for(x64):
    continuous.check_precision(TOY, x64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unroll": 0}, r"DDPG\(unroll=0\) must be at least 1"),
        ({"batch_size": 0}, r"DDPG\(batch_size=0\) must be at least 1"),
        ({"updates_per_step": 0.0}, r"DDPG\(updates_per_step=0.0\) must be above 0, and finite"),
        ({"updates_per_step": math.inf}, r"DDPG\(updates_per_step=inf\) must be above 0, and finite"),
        ({"tau": 0.0}, r"DDPG\(tau=0.0\) must be above 0, and at most 1"),
        ({"tau": 1.5}, r"DDPG\(tau=1.5\) must be above 0, and at most 1"),
        ({"min_size": 10}, "min_size=10 is less than batch_size=256"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(AlgorithmError, match=message):
        DDPG(**options)


def test_discrete_actions_are_refused():
    with pytest.raises(AlgorithmError, match=r"real numbers in a Box, not Discrete\(3\)(.|\n)*use DQN, PPO or A2C"):
        DDPG().init(batch(Match(), 8), jax.random.key(0))
