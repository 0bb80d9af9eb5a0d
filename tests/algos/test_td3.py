"""TD3 on tasks whose values are known, and its three changes, each against numbers computed by hand."""

import functools

import jax
import numpy as np
import optax
import pytest

from algos import continuous
from algos.continuous import GAMMA, by_hand, window
from choreo.algos.td3 import TD3
from choreo.errors import AlgorithmError
from choreo.networks import deterministic
from choreo.testing import check_algorithm

SMALL = functools.partial(deterministic, hidden=(32, 32))
TOY = TD3(
    learning_rate=3e-3, updates_per_step=1 / 8, tau=0.05, gamma=GAMMA, noise=0.3, target_noise=0.05,
    batch_size=64, min_size=256, capacity=20_000, network=SMALL,
)  # fmt: skip


def test_finds_the_best_action_and_its_value():
    continuous.check_one_step(TOY, 1200)


def test_values_reach_back_over_a_step():
    continuous.check_two_steps(TOY, 1200)


def test_values_go_on_behind_a_time_limit():
    continuous.check_discounting(TOY, 1200)


def test_begins_with_any_action():
    continuous.check_first_actions(TOY)


@pytest.mark.long
def test_learns_nothing_before_there_is_enough():
    """In CI: DDPG, with the same `learn`."""
    continuous.check_beginning(TOY)


@pytest.mark.parametrize(("action", "slope"), [(0.5, 2.0), (-0.5, 3.0)])
def test_targets_are_the_smaller_of_two(action, slope):
    algo, network, target = TD3(gamma=0.9, target_noise=0.0), by_hand(0.0, [1.0, 4.0]), by_hand(action, [2.0, 3.0])
    key = jax.random.key(0)
    losses = algo.item_losses(network.critics, target, window(), key)
    wanted = 1 + 0.9 * (slope * action + 0.2)
    np.testing.assert_allclose(losses["q"], [-0.5 + 0.1, -2.0 + 0.1], rtol=1e-6)
    np.testing.assert_allclose(losses["critic_loss"], 0.5 * ((-0.4 - wanted) ** 2 + (-1.9 - wanted) ** 2), rtol=1e-6)
    losses = algo.item_losses(network.critics, target, window(discount=0.0, last=True), key)
    np.testing.assert_allclose(losses["critic_loss"], 0.5 * ((-0.4 - 1) ** 2 + (-1.9 - 1) ** 2), rtol=1e-6)
    losses = algo.item_losses(network.critics, target, window(last=True), key)
    assert losses["critic_loss"] == 0  # a time limit


def test_targets_are_smoothed_over_actions_nearby():
    """Noise so large that it is clipped, almost always: targets are those of the actions 0.1 below and above."""
    algo = TD3(gamma=0.9, target_noise=1e4, target_noise_clip=0.1)
    network, target = by_hand(0.0, [1.0]), by_hand(0.5, [2.0])
    keys = jax.random.split(jax.random.key(0), 64)
    step = functools.partial(algo.item_losses, network.critics, target, window())
    losses = jax.jit(jax.vmap(step))(keys)["critic_loss"]
    expected = [0.5 * (-0.4 - (1 + 0.9 * (2 * action + 0.2))) ** 2 for action in (0.4, 0.6)]
    np.testing.assert_allclose(np.unique(np.round(losses, 4)), expected, rtol=1e-4)


def test_smoothed_actions_stay_in_the_space():
    algo = TD3(gamma=0.9, target_noise=1e4, target_noise_clip=0.4)
    keys = jax.random.split(jax.random.key(0), 64)
    step = functools.partial(algo.item_losses, by_hand(0.0, [1.0]).critics, by_hand(0.9, [2.0]), window())
    losses = jax.jit(jax.vmap(step))(keys)["critic_loss"]
    expected = [0.5 * (-0.4 - (1 + 0.9 * (2 * action + 0.2))) ** 2 for action in (0.5, 1.0)]
    np.testing.assert_allclose(np.unique(np.round(losses, 4)), expected, rtol=1e-4)


def test_the_policy_follows_the_first_critic():
    steps = jax.tree.map(lambda x: x[None], window())
    network, algo = by_hand(0.25, [1.5, -9.0]), TD3()
    np.testing.assert_allclose(algo.policy_loss(*network, steps.obs), -(1.5 * 0.25 + 0.1), rtol=1e-6)


def test_the_policy_and_the_targets_wait():
    """Every third update; Adam's own memory waits with them."""
    algo = TD3(policy_delay=3, network=SMALL)
    train = jax.jit(algo.init, static_argnums=0)(continuous.shoot(), jax.random.key(0)).train
    changed = []
    learn = jax.jit(algo.learn)
    for i in range(6):
        batches = continuous.some_batches(updates=1, items=4)
        after, _ = learn(train, batches, jax.random.key(i))
        parts = ("learned.policy", "target", "optimizer.0", "learned.critics", "optimizer.1")
        changed.append([_differ(train, after, part) for part in parts])
        train = after
    rarely, always = [False, False, False, True, True], [True] * 5
    assert changed == [rarely, rarely, always] * 2
    assert optax.tree.get(train.optimizer[0], "count") == 2


def _differ(before, after, part):
    for name in part.split("."):
        before, after = (x[int(name)] if name.isdigit() else getattr(x, name) for x in (before, after))
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return not all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.long  # in CI for DDPG, whose loop it shares
def test_two_shards_are_one_twice_as_large():
    with jax.enable_x64(True):
        algo = TD3(learning_rate=0.1, target_noise=0.0, network=SMALL, optimizer=optax.sgd)
        shards, whole = continuous.on_two_shards(algo), continuous.on_one_shard(algo)
        for both, one in zip(jax.tree.leaves(shards), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(both[0], both[1])
            np.testing.assert_allclose(both[0], one, rtol=1e-10, atol=1e-12)


@pytest.mark.long
def test_keeps_the_protocol():
    """In CI: DDPG; all of TD3 runs in the law matrix."""
    check_algorithm(TOY, continuous.parts())


@pytest.mark.parametrize("x64", [False, True])
def test_every_number_has_the_precision_asked_for(x64):
    continuous.check_precision(TOY, x64)


def test_impossible_options():
    with pytest.raises(AlgorithmError, match=r"TD3\(policy_delay=0\) must be at least 1"):
        TD3(policy_delay=0)
    with pytest.raises(AlgorithmError, match=r"TD3\(batch_size=0\) must be at least 1"):
        TD3(batch_size=0)
