"""The three differences between TD3 and DDPG: the smaller of two values, noise in the target, and delayed updates of the policy.

The tests that DDPG, TD3 and SAC share are in test_replayed_control.py.
"""

import functools

import jax
import numpy as np
import optax
import pytest

from algos.continuous import by_hand, shoot, some_batches, window
from choreo.algos.td3 import TD3
from choreo.errors import AlgorithmError
from choreo.networks import deterministic

SMALL = functools.partial(deterministic, hidden=(32, 32))


@pytest.mark.parametrize(("action", "slope"), [(0.5, 2.0), (-0.5, 3.0)])
def test_the_target_takes_the_smaller_value_of_the_two_critics(action, slope):
    algo, network, target = TD3(gamma=0.9, target_noise=0.0), by_hand(0.0, [1.0, 4.0]), by_hand(action, [2.0, 3.0])
    key = jax.random.key(0)
    losses = algo.item_losses(network.critics, target, window(), key)
    wanted = 1 + 0.9 * (slope * action + 0.2)
    np.testing.assert_allclose(losses["q"], [-0.5 + 0.1, -2.0 + 0.1], rtol=1e-6)
    np.testing.assert_allclose(losses["critic_loss"], 0.5 * ((-0.4 - wanted) ** 2 + (-1.9 - wanted) ** 2), rtol=1e-6)
    losses = algo.item_losses(network.critics, target, window(discount=0.0, last=True), key)
    np.testing.assert_allclose(losses["critic_loss"], 0.5 * ((-0.4 - 1) ** 2 + (-1.9 - 1) ** 2), rtol=1e-6)
    losses = algo.item_losses(network.critics, target, window(last=True), key)
    assert losses["critic_loss"] == 0  # the last step before a time limit


def test_targets_are_values_of_actions_with_clipped_noise():
    """The noise is so large that it is almost always clipped. The actions are then 0.5 - 0.1 and 0.5 + 0.1."""
    algo = TD3(gamma=0.9, target_noise=1e4, target_noise_clip=0.1)
    network, target = by_hand(0.0, [1.0]), by_hand(0.5, [2.0])
    keys = jax.random.split(jax.random.key(0), 64)
    step = functools.partial(algo.item_losses, network.critics, target, window())
    losses = jax.jit(jax.vmap(step))(keys)["critic_loss"]
    expected = [0.5 * (-0.4 - (1 + 0.9 * (2 * action + 0.2))) ** 2 for action in (0.4, 0.6)]
    np.testing.assert_allclose(np.unique(np.round(losses, 4)), expected, rtol=1e-4)


def test_actions_with_noise_stay_in_the_action_space():
    """The noise is almost always clipped to -0.4 or 0.4. The actions are then 0.9 - 0.4, and 1, the bound of the action space."""
    algo = TD3(gamma=0.9, target_noise=1e4, target_noise_clip=0.4)
    keys = jax.random.split(jax.random.key(0), 64)
    step = functools.partial(algo.item_losses, by_hand(0.0, [1.0]).critics, by_hand(0.9, [2.0]), window())
    losses = jax.jit(jax.vmap(step))(keys)["critic_loss"]
    expected = [0.5 * (-0.4 - (1 + 0.9 * (2 * action + 0.2))) ** 2 for action in (0.5, 1.0)]
    np.testing.assert_allclose(np.unique(np.round(losses, 4)), expected, rtol=1e-4)


def test_the_policy_loss_is_minus_the_value_of_the_first_critic():
    steps = jax.tree.map(lambda x: x[None], window())
    network, algo = by_hand(0.25, [1.5, -9.0]), TD3()
    np.testing.assert_allclose(algo.policy_loss(*network, steps.obs), -(1.5 * 0.25 + 0.1), rtol=1e-6)


def test_only_every_third_update_changes_the_policy_and_the_targets():
    """The other updates do not change the state of the policy's optimiser either."""
    algo = TD3(policy_delay=3, network=SMALL)
    train = jax.jit(algo.init, static_argnums=0)(shoot(), jax.random.key(0)).train
    changed = []
    learn = jax.jit(algo.learn)
    for i in range(6):
        batches = some_batches(updates=1, items=4)
        after, _ = learn(train, batches, jax.random.key(i))
        parts = ("learned.policy", "target", "optimizer.0", "learned.critics", "optimizer.1")
        changed.append([_differ(train, after, part) for part in parts])
        train = after
    critics_only, all_parts = [False, False, False, True, True], [True] * 5
    assert changed == [critics_only, critics_only, all_parts] * 2
    assert optax.tree.get(train.optimizer[0], "count") == 2


def _differ(before, after, part):
    for name in part.split("."):
        before, after = (x[int(name)] if name.isdigit() else getattr(x, name) for x in (before, after))
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return not all(np.array_equal(x, y) for x, y in pairs)


def test_a_policy_delay_of_zero_is_refused():
    with pytest.raises(AlgorithmError, match=r"TD3\(policy_delay=0\) must be at least 1"):
        TD3(policy_delay=0)
