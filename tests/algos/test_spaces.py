"""PPO with observations and actions in every kind of space, and REINFORCE in a layout. The best return of every task is 1."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.one_gradient import MEMORY, SMALL, learn
from algos.one_step import Copy, Highest, HighestOfTwo, Name, OneStep, Pieces, Side
from choreo.algos.ppo import PPO
from choreo.algos.reinforce import REINFORCE
from choreo.errors import AlgorithmError
from choreo.layouts import fine
from laws.reference import assert_close, planned_run, reference_run

TOY = PPO(unroll=8, minibatch_size=64, learning_rate=1e-2, entropy_coef=0.0, network=SMALL)
NORMALISED = dataclasses.replace(TOY, normalise_obs=True)


# CI does not run Name, because observations of Pieces and actions of Highest are also in Discrete spaces that do not begin at 0.
@pytest.mark.parametrize(
    "task", [pytest.param(Name(), marks=pytest.mark.long), Copy(), Side()], ids=lambda task: type(task).__name__
)
def test_finds_the_best_return(task):
    carry, metrics = learn(TOY, OneStep(task, 16), 40, 0)
    assert metrics["episode_return"][-5:].mean() >= 0.99
    _check_actions_are_in_the_space(TOY, OneStep(task, 16), carry)


def test_learns_from_nested_observations_and_normalises_only_their_boxes():
    env = OneStep(Pieces(), 16)
    carry, metrics = learn(NORMALISED, env, 40, 0)
    assert metrics["episode_return"][-5:].mean() >= 0.99
    moments = carry.train.params.moments
    assert moments["sign"] is None and moments["rest"][1] == {"flag": None}
    np.testing.assert_allclose(moments["rest"][0].mean, 0.5, atol=0.05)
    np.testing.assert_allclose(moments["rest"][0].var, 0.25, atol=0.05)
    assert moments["rest"][0].num == 40 * 8 * 16
    _check_actions_are_in_the_space(NORMALISED, env, carry)


def _check_actions_are_in_the_space(algo, env, carry):
    _, obs = env.reset(env.keys(jax.random.key(1)))
    actions, _ = jax.vmap(algo.act, (None, 0, 0))(carry.train.params, obs, env.keys(jax.random.key(2)))
    assert all(env.action_space.contains(action) for action in np.asarray(actions))
    assert len(np.unique(actions, axis=0)) >= 2


def test_takes_the_best_allowed_action_and_never_a_masked_one():
    carry, metrics = learn(TOY, OneStep(Highest(), 16), 40, 0)
    _check_returns_are_best_and_no_action_was_masked(metrics)
    act = functools.partial(TOY.act, carry.train.params, key=jax.random.key(0), greedy=True)
    for allowed, best in [((1, 1, 1, 1), 4), ((1, 1, 1, 0), 3), ((1, 0, 0, 0), 1), ((0, 0, 0, 1), 4)]:
        action, _ = act({"action_mask": jnp.array(allowed, jnp.int8), "nothing": jnp.ones(1)})
        assert action == best


def test_a_mask_for_actions_of_two_dimensions_works_with_memory_and_normalised_observations():
    """The mask is in a Box, like the other observation. But the mask is not normalised."""
    carry, metrics = learn(dataclasses.replace(NORMALISED, network=MEMORY), OneStep(HighestOfTwo(), 16), 40, 0)
    _check_returns_are_best_and_no_action_was_masked(metrics)
    assert carry.train.params.moments["action_mask"] is None


def _check_returns_are_best_and_no_action_was_masked(metrics):
    assert metrics["episode_return"].min() >= 0  # one masked action would make a mean negative
    assert metrics["episode_return"][-5:].mean() >= 0.99
    for name in ("loss", "entropy", "approx_kl"):
        assert np.isfinite(metrics[name]).all()


def test_normalise_obs_without_a_box_is_refused():
    env = OneStep(Name(), 8)
    with pytest.raises(AlgorithmError, match="normalise_obs needs observations in a Box, not in Discrete"):
        jax.eval_shape(functools.partial(PPO(normalise_obs=True).init, env), jax.random.key(0))


def test_a_layout_does_not_change_results_with_masks_and_multi_discrete_actions():
    algo = REINFORCE(unroll=4, network=SMALL, normalise_obs=True)
    env, key = OneStep(HighestOfTwo(), 4), jax.random.key(0)
    assert_close(planned_run(algo, env, fine(2), key, 2), reference_run(algo, env, key, 2), 1e-5)
