"""DDPG's losses against numbers computed by hand, and its exploration.

The tests that DDPG, TD3 and SAC share are in test_replayed_control.py.
"""

import functools

import jax
import numpy as np
import pytest

from algos.continuous import by_hand, shoot, window
from choreo.algos.ddpg import DDPG
from choreo.networks import deterministic

SMALL = functools.partial(deterministic, hidden=(32, 32), critics=1)


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        (window(), 1 + 0.9 * (2 * 0.5 + 0.2)),
        (window(discount=0.0, last=True), 1.0),
    ],
    ids=["goes on", "terminates"],
)
def test_losses_equal_numbers_computed_by_hand(steps, wanted):
    losses = DDPG(gamma=0.9).item_losses(by_hand(0.25, [1.0]), by_hand(0.5, [2.0]), steps)
    q = 1 * -0.5 + 0.1
    np.testing.assert_allclose(losses["critic_loss"], 0.5 * (q - wanted) ** 2, rtol=1e-6)
    np.testing.assert_allclose(losses["policy_loss"], -(1 * 0.25 + 0.1), rtol=1e-6)
    np.testing.assert_allclose(losses["q"], q, rtol=1e-6)


def test_the_critic_loss_changes_only_critics_and_the_policy_loss_only_the_policy():
    algo, target = DDPG(gamma=0.9), by_hand(0.5, [2.0])
    steps = jax.tree.map(lambda x: x[None], window())
    gradient = jax.jit(jax.grad(lambda network: algo.loss(network, target, steps, jax.random.key(0))[0]))(
        by_hand(0.25, [1.0])
    )
    # The gradient is (value - target) times the action, -0.5. The value is -0.5 + 0.1 = -0.4, and the target is
    # 1 + 0.9 * (2 * 0.5 + 0.2) = 2.08.
    np.testing.assert_allclose(gradient.critics[0].slope, (-0.4 - 2.08) * -0.5, rtol=1e-5)
    np.testing.assert_allclose(gradient.policy.action, [-1.0], rtol=1e-6)


def test_the_last_step_before_a_time_limit_has_no_critic_loss():
    losses = DDPG().item_losses(by_hand(0.25, [1.0]), by_hand(0.5, [2.0]), window(last=True))
    assert losses["critic_loss"] == 0


def test_exploring_actions_stay_in_the_action_space():
    algo, env = DDPG(noise=2.0, network=SMALL), shoot()
    train = jax.jit(algo.init, static_argnums=0)(env, jax.random.key(0)).train
    params = algo.policy(train)._replace(updates=np.int32(1))  # before the first update, actions are uniform
    keys, obs = jax.random.split(jax.random.key(1), 500), np.zeros(1, np.float32)
    noisy = np.asarray(jax.jit(jax.vmap(lambda key: algo.act(params, obs, key)[0]))(keys))
    # The standard deviation of the noise is 2 half-widths, the whole width of the action space. So many actions are clipped.
    assert noisy.min() == -1 and noisy.max() == 3
    assert np.unique(noisy).size > 100
    quiet = DDPG(noise=0.1, network=SMALL)
    noisy = np.asarray(jax.jit(jax.vmap(lambda key: quiet.act(params, obs, key)[0]))(keys))
    np.testing.assert_allclose(noisy.std(), 0.1 * 2, rtol=0.15)  # `noise` is in half-widths; a half-width is 2
