"""The family of A2C, IMPALA and REINFORCE: tasks whose best return is known, learner shards, and wrong options.

Where a result depends only on the loop that the family shares, CI tests one algorithm, and `make test-long` tests all of them.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from algos.one_gradient import (
    MEMORY,
    SMALL,
    assert_shards_equal,
    assert_shards_equal_whole,
    first_value,
    float_types,
    iterate_on_two_shards,
    learn,
    learn_task,
    on_two_shards,
)
from algos.one_step import Copy, HighestOfTwo, Name, OneStep, Pieces
from algos.toys import Aim, Recall, batch
from choreo import envs
from choreo.algos.a2c import A2C
from choreo.algos.impala import IMPALA
from choreo.algos.reinforce import REINFORCE
from choreo.errors import AlgorithmError
from choreo.testing import check_algorithm

FAMILY = {"A2C": A2C, "IMPALA": IMPALA, "REINFORCE": REINFORCE}
TOY = {name: algo(unroll=8, learning_rate=1e-2, entropy_coef=0.0, network=SMALL) for name, algo in FAMILY.items()}
ITERATIONS = 400
TOTAL_STEPS = {"A2C": 320 * 8 * 16, "IMPALA": ITERATIONS * 8 * 16, "REINFORCE": None}
"""Steps until the learning rate is 0, or None for a constant rate. With A2C, the rate reaches 0 before the last iteration."""
LOW_GAMMA = {
    name: dataclasses.replace(toy, gamma=0.8, max_grad_norm=10.0, total_steps=TOTAL_STEPS[name])
    for name, toy in TOY.items()
}
"""`TOY` with a small gamma, for tasks of a few steps."""

each_algorithm = pytest.mark.parametrize("name", FAMILY)


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@each_algorithm
@pytest.mark.parametrize(("task", "value"), [("match", 1.0), ("two_step", 0.8)])
def test_finds_the_best_return_and_its_value(name, task, value):
    carry, metrics = learn_task(LOW_GAMMA[name], task, ITERATIONS)
    assert metrics["episode_return"][-5:].mean() >= 0.99
    np.testing.assert_allclose(first_value(carry), value, atol=0.1)
    check_importance(name, metrics)


TASKS = {
    "aim": (batch(Aim(), 16), SMALL, -0.02),
    "recall": (batch(Recall(), 16), MEMORY, 0.99),
    "copy": (OneStep(Copy(), 16), SMALL, 0.99),
    "pieces": (OneStep(Pieces(), 16), SMALL, 0.99),
}
"""For each task: the environments, the network, and the mean return that learning must reach."""


@pytest.mark.parametrize(
    ("name", "task", "iterations"),
    [
        ("A2C", "aim", 600),
        ("A2C", "recall", 300),
        long("A2C", "copy", 300),  # in CI, test_spaces.py tests this task with PPO
        long("IMPALA", "aim", 800),
        long("IMPALA", "recall", 300),
        long("REINFORCE", "aim", 600),
        long("REINFORCE", "recall", 300),
        long("REINFORCE", "pieces", 300),
    ],
)
def test_finds_the_best_return(name, task, iterations):
    env, network, least = TASKS[task]
    _, metrics = learn(dataclasses.replace(TOY[name], network=network), env, iterations, 0)
    assert metrics["episode_return"][-5:].mean() >= least
    check_importance(name, metrics)


def check_importance(name, metrics):
    """These tests have no lag, so the importance weights of IMPALA must be 1."""
    if name == "IMPALA":
        np.testing.assert_allclose(metrics["importance"], 1, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "iterations"),
    [
        ("A2C", {}, 200),
        ("IMPALA", {"network": MEMORY, "normalise_obs": True}, 300),
        ("REINFORCE", {"normalise_obs": True}, 200),
    ],
)
def test_takes_the_best_allowed_action_and_never_a_masked_one(name, options, iterations):
    """Also checks that a mask is not normalised. CI tests the same in test_spaces.py, with PPO, which uses the same networks."""
    carry, metrics = learn(dataclasses.replace(TOY[name], **options), OneStep(HighestOfTwo(), 16), iterations, 0)
    assert metrics["episode_return"].min() >= 0  # one masked action would make a mean negative
    assert metrics["episode_return"][-5:].mean() >= 0.99
    if "normalise_obs" in options:
        assert carry.train.params.moments["action_mask"] is None


@pytest.mark.long
def test_learns_from_pieces_and_normalises_each_box():
    """test_spaces.py tests the same in CI, with PPO."""
    carry, metrics = learn(dataclasses.replace(TOY["A2C"], normalise_obs=True), OneStep(Pieces(), 16), 300, 0)
    assert metrics["episode_return"][-5:].mean() >= 0.99
    moments = carry.train.params.moments
    assert moments["sign"] is None and moments["rest"][0].num == 300 * 8 * 16
    np.testing.assert_allclose(moments["rest"][0].var, 0.25, atol=0.05)


@each_algorithm
def test_a_time_limit_is_bootstrapped(name):
    """With a reward of 1 in every step, the value is 1 / (1 - gamma) = 5.

    Without bootstrapping at the time limit of 5 steps, the value would be at most 3.4.
    """
    carry, _ = learn_task(LOW_GAMMA[name], "income", ITERATIONS)
    np.testing.assert_allclose(first_value(carry), 5.0, rtol=0.02)


def test_the_learning_rate_falls_to_zero():
    _, metrics = learn_task(LOW_GAMMA["A2C"], "match", ITERATIONS)
    expected = 1e-2 * np.maximum(1 - np.arange(ITERATIONS) / 320, 0)
    np.testing.assert_allclose(metrics["learning_rate"], expected, rtol=1e-5, atol=1e-8)


@each_algorithm
@pytest.mark.parametrize(
    ("network", "env"), [long(SMALL, "jax:CartPole-v1"), (MEMORY, "jax:Pendulum-v1")], ids=["mlp", "lstm"]
)
def test_each_algorithm_passes_check_algorithm(name, network, env):
    algo = FAMILY[name](unroll=8, network=network, normalise_obs=True, total_steps=10_000)
    check_algorithm(algo, envs.make(env, num_envs=4))


@each_algorithm
@pytest.mark.parametrize("network", [SMALL, MEMORY], ids=["mlp", "lstm"])
@pytest.mark.parametrize("x64", [False, True])
def test_every_float_has_64_bits_with_x64_and_else_32(name, network, x64):
    with jax.enable_x64(x64):
        algo = FAMILY[name](unroll=8, network=network, normalise_obs=True, total_steps=10_000)
        out = jax.eval_shape(functools.partial(learn, algo, envs.make("jax:Pendulum-v1", num_envs=4), 2), 0)
        assert float_types(out) == {"float64" if x64 else "float32"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("A2C", {"unroll": 4, "total_steps": 10_000}),
        long("IMPALA", {"unroll": 5, "network": MEMORY}),
        ("REINFORCE", {"unroll": 4, "total_steps": 10_000}),
    ],
)
def test_two_shards_learn_the_same_as_one_shard_with_all_environments(name, options):
    """The mean over the two shards is the mean over all environments, for gradients and for statistics of observations."""
    with jax.enable_x64(True):
        algo = dataclasses.replace(TOY[name], normalise_obs=True, optimizer=optax.sgd, **options)
        shards, whole = on_two_shards(algo, batch(Aim(), 8))
        assert_shards_equal_whole(shards, whole)
        assert whole.params.moments.num == algo.unroll * 8


@pytest.mark.long
@pytest.mark.parametrize(("name", "total_steps"), [("A2C", 10_000), ("IMPALA", 10_000), ("REINFORCE", None)])
def test_shards_stay_equal_over_an_iteration(name, total_steps):
    """CI does not run this test. CI runs the test above for one update, and the law matrix (tests/laws) for whole iterations."""
    algo = dataclasses.replace(TOY[name], unroll=4, normalise_obs=True, total_steps=total_steps)
    train, metrics = iterate_on_two_shards(algo, batch(Aim(), 8))
    assert_shards_equal(train)
    assert metrics["value_loss"][0] != metrics["value_loss"][1]  # the shards had different data
    assert train.params.moments.num[0] == 2 * 4 * 8


@each_algorithm
def test_an_unroll_of_0_is_refused(name):
    with pytest.raises(AlgorithmError, match=rf"{name}\(unroll=0\) must be at least 1"):
        FAMILY[name](unroll=0)


@each_algorithm
def test_normalise_obs_without_a_box_is_refused(name):
    env = OneStep(Name(), 8)
    with pytest.raises(AlgorithmError, match="normalise_obs needs observations in a Box, not in Discrete"):
        jax.eval_shape(functools.partial(FAMILY[name](normalise_obs=True).init, env), jax.random.key(0))
