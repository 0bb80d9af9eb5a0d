"""The family of DDPG, TD3 and SAC: tasks whose values are known, the first actions, learner shards, and wrong options.

Where a result depends only on the loop that the family shares, CI tests DDPG, and `make test-long` tests TD3 and SAC too.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from algos.continuous import (
    GAMMA,
    actions,
    learn_task,
    on_one_shard,
    on_two_shards,
    parts,
    shoot,
    toy,
    values,
    within_one,
)
from algos.one_gradient import assert_shards_equal_whole, float_types, learn
from algos.toys import Match, batch
from choreo.algos.ddpg import DDPG
from choreo.algos.sac import SAC
from choreo.algos.td3 import TD3
from choreo.errors import AlgorithmError
from choreo.networks import deterministic, squashed
from choreo.testing import check_algorithm

FAMILY = {"DDPG": DDPG, "TD3": TD3, "SAC": SAC}
NETWORKS = {
    "DDPG": functools.partial(deterministic, hidden=(32, 32), critics=1),
    "TD3": functools.partial(deterministic, hidden=(32, 32)),
    "SAC": functools.partial(squashed, hidden=(32, 32)),
}
TOY = {
    "DDPG": toy(DDPG, noise=0.3, network=NETWORKS["DDPG"]),
    "TD3": toy(TD3, noise=0.3, target_noise=0.05, network=NETWORKS["TD3"]),
    "SAC": toy(SAC, temperature=0.005, network=NETWORKS["SAC"]),
}
ITERATIONS = 1200

each_algorithm = pytest.mark.parametrize("name", FAMILY)
ddpg_in_ci = pytest.mark.parametrize(
    "name", ["DDPG", pytest.param("TD3", marks=pytest.mark.long), pytest.param("SAC", marks=pytest.mark.long)]
)


@each_algorithm
def test_finds_the_best_action_and_the_values_of_actions_near_it(name):
    train = learn_task(TOY[name], "shoot", ITERATIONS)
    seen = np.linspace(-0.9, 0.9, 7, dtype=np.float32)
    obs, best = np.stack([seen, np.zeros(7, np.float32)], axis=1), 1 + seen
    np.testing.assert_allclose(actions(TOY[name], train, obs), best, atol=0.15)
    for beside in (0.0, 0.4, -0.4):
        found = values(train.learned, obs, best + np.float32(beside))
        np.testing.assert_allclose(found, -(beside**2), atol=0.1)


@each_algorithm
def test_values_of_the_first_step_include_the_reward_of_the_second(name):
    """In the task Walk, only the second step has a reward. The value of the first step is this reward, discounted."""
    train = learn_task(TOY[name], "walk", ITERATIONS)
    start, there = np.zeros((1, 2), np.float32), np.array([[1.0, 0.5]], np.float32)
    network, best = train.learned, np.full(1, 2.0, np.float32)
    found = within_one(actions(TOY[name], train, np.concatenate([start, there])))
    np.testing.assert_allclose(found, 0.5, atol=0.15)
    np.testing.assert_allclose(values(network, there, best), 1.0, atol=0.1)
    np.testing.assert_allclose(values(network, start, best), GAMMA, atol=0.1)
    np.testing.assert_allclose(values(network, start, best - np.float32(1.2)), GAMMA * (1 - 0.36), atol=0.1)


@each_algorithm
def test_a_time_limit_is_bootstrapped(name):
    train = learn_task(TOY[name], "rest", ITERATIONS)
    obs = np.array([[1.0, 0.0]], np.float32)
    np.testing.assert_allclose(within_one(actions(TOY[name], train, obs)), 0.0, atol=0.15)
    found = values(train.learned, obs, np.full(1, 1.0, np.float32))
    np.testing.assert_allclose(found, 1 / (1 - GAMMA), atol=0.1)


@ddpg_in_ci
def test_until_min_size_steps_are_stored_actions_are_uniform_and_nothing_is_learned(name):
    algo, env = TOY[name], shoot(16)
    iterate = jax.jit(algo.iterate, static_argnums=0)
    first = carry = jax.jit(algo.init, static_argnums=0)(env, jax.random.key(0))
    num = -(-algo.min_size // (16 * algo.unroll))
    for i in range(num):
        carry, metrics = iterate(env, carry, jax.random.key(i))
        assert metrics["learned"] == 0
    assert carry.train.iterations == num
    before = first.train._replace(iterations=jnp.int32(num))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(carry.train), strict=True):
        np.testing.assert_array_equal(old, new)
    check_first_actions(algo, carry.train, np.asarray(carry.replay.steps.action)[:, : num * algo.unroll].ravel())
    carry, metrics = iterate(env, carry, jax.random.key(num))
    assert metrics["learned"] == 1 and int(carry.train.updates) == algo.updates_per_step * algo.unroll * 16


@pytest.mark.parametrize("name", ["TD3", "SAC"])
def test_before_the_first_update_actions_are_uniform(name):
    """This test calls only `act`. For DDPG, the test above shows the same in CI."""
    algo = TOY[name]
    train = jax.jit(algo.init, static_argnums=0)(shoot(), jax.random.key(0)).train
    obs, keys = jnp.zeros(1), jax.random.split(jax.random.key(1), 500)
    check_first_actions(algo, train, jax.jit(jax.vmap(lambda key: algo.act(algo.policy(train), obs, key)[0]))(keys))


def check_first_actions(algo, train, taken):
    """Check that the actions `taken` are uniform in [-1, 3], the action space of Shoot, and that the greedy action is near 1."""
    taken = np.asarray(taken)
    assert taken.min() < -0.8 and taken.max() > 2.8 and (-1 <= taken).all() and (taken <= 3).all()
    np.testing.assert_allclose([taken.mean(), taken.std()], [1.0, 4 / 12**0.5], atol=0.2)
    assert abs(actions(algo, train, np.zeros((1, 1), np.float32))[0] - 1) < 0.1


@pytest.mark.parametrize(
    ("name", "options"), [("DDPG", {}), pytest.param("TD3", {"target_noise": 0.0}, marks=pytest.mark.long)]
)
def test_two_shards_learn_the_same_as_one_shard_with_all_items(name, options):
    """The loss must not draw random numbers, because two shards draw different numbers than one shard does.

    The loss of SAC draws actions. So test_sac.py tests only that shards stay equal.
    """
    with jax.enable_x64(True):
        algo = FAMILY[name](learning_rate=0.1, network=NETWORKS[name], optimizer=optax.sgd, **options)
        assert_shards_equal_whole(on_two_shards(algo), on_one_shard(algo))


@ddpg_in_ci
def test_each_algorithm_passes_check_algorithm(name):
    """CI runs this test only for DDPG. For TD3 and SAC, CI runs the law matrix (tests/laws)."""
    check_algorithm(with_all_its_parts(name), parts())


@each_algorithm
@pytest.mark.parametrize("x64", [False, True])
def test_every_float_has_64_bits_with_x64_and_else_32(name, x64):
    with jax.enable_x64(x64):
        carry, metrics = jax.eval_shape(functools.partial(learn, with_all_its_parts(name), shoot(), 2), 0)
        out = carry.train, carry.replay.steps, metrics["critic_loss"], metrics["q"]
        assert float_types(out) == {"float64" if x64 else "float32"}


def with_all_its_parts(name):
    """The algorithm of `TOY`. Here, SAC learns its temperature instead of using a fixed one."""
    return dataclasses.replace(TOY["SAC"], temperature=None) if name == "SAC" else TOY[name]


@each_algorithm
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unroll": 0}, r"NAME\(unroll=0\) must be at least 1"),
        ({"batch_size": 0}, r"NAME\(batch_size=0\) must be at least 1"),
        ({"updates_per_step": 0.0}, r"NAME\(updates_per_step=0.0\) must be above 0, and finite"),
        ({"updates_per_step": math.inf}, r"NAME\(updates_per_step=inf\) must be above 0, and finite"),
        ({"tau": 0.0}, r"NAME\(tau=0.0\) must be above 0, and at most 1"),
        ({"tau": 1.5}, r"NAME\(tau=1.5\) must be above 0, and at most 1"),
        ({"min_size": 10}, "min_size=10 is less than batch_size=256"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(AlgorithmError, match=message.replace("NAME", name)):
        FAMILY[name](**options)


@each_algorithm
def test_discrete_actions_are_refused(name):
    with pytest.raises(AlgorithmError, match=r"real numbers in a Box, not Discrete\(3\)(.|\n)*use DQN, PPO or A2C"):
        FAMILY[name]().init(batch(Match(), 8), jax.random.key(0))
