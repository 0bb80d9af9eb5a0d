"""V-trace equals its definition (a sum over products) and rlax. In special cases, V-trace equals a simpler formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from choreo import ops
from ops.trajectories import random_steps

TIME, ENV, GAMMA = 30, 5, 0.97


@pytest.fixture
def steps():
    """Within an episode, the value after a step equals the value before the next step."""
    reward, discount, last, value_tm1, value_t = random_steps(TIME, ENV, GAMMA)
    value_t[:-1] = np.where(last[:-1], value_t[:-1], value_tm1[1:])
    return reward, discount, last, value_tm1, value_t


@pytest.fixture
def ratio():
    """For each action, its probability now divided by its probability when it was chosen. Some ratios are above 1, others below."""
    return np.exp(np.random.default_rng(1).normal(0, 0.7, (TIME, ENV))).astype(np.float32)


def by_definition(ratio, steps, rho_bar, c_bar, lambda_):
    """Equation 1 of the IMPALA paper for each step s. The sum runs over the steps t from s to the end of the episode:

    V(x_s) + sum_t gamma^(t-s) c_s ... c_(t-1) rho_t delta_t
    """
    reward, discount, last, value_tm1, value_t = steps
    out = value_tm1.astype(np.float64)
    for e in range(ENV):
        for start in range(TIME):
            factor = 1.0
            for t in range(start, TIME):
                delta = reward[t, e] + discount[t, e] * value_t[t, e] - value_tm1[t, e]
                out[start, e] += factor * min(rho_bar, ratio[t, e]) * delta
                factor *= discount[t, e] * lambda_ * min(c_bar, ratio[t, e])
                if last[t, e]:
                    break
    return out


@pytest.mark.parametrize(("rho_bar", "c_bar", "lambda_"), [(1.0, 1.0, 1.0), (2.0, 1.0, 0.9), (1.5, 0.5, 0.0)])
def test_equals_the_sum_of_the_definition(ratio, steps, rho_bar, c_bar, lambda_):
    got = ops.vtrace(*map(jnp.asarray, (ratio, *steps)), lambda_, rho_bar=rho_bar, c_bar=c_bar)
    target = by_definition(ratio, steps, rho_bar, c_bar, lambda_)
    np.testing.assert_allclose(got.target_tm1, target, rtol=1e-4, atol=1e-5)
    if lambda_ == 1.0:
        reward, discount, last, value_tm1, value_t = steps
        following = np.where(last | (np.arange(TIME) == TIME - 1)[:, None], value_t, np.roll(target, -1, axis=0))
        advantage = np.minimum(rho_bar, ratio) * (reward + discount * following - value_tm1)
        np.testing.assert_allclose(got.advantage_t, advantage, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lambda_", [0.0, 0.9, 1.0])
def test_on_policy_it_equals_the_lambda_return_and_gae(steps, lambda_):
    reward, discount, last, value_tm1, value_t = map(jnp.asarray, steps)
    got = ops.vtrace(jnp.ones((TIME, ENV)), *map(jnp.asarray, steps), lambda_)
    target = ops.lambda_return(reward, discount, last, value_t, lambda_)
    np.testing.assert_allclose(got.target_tm1, target, rtol=1e-4, atol=1e-5)
    advantage = ops.gae(reward, discount, last, value_tm1, value_t, lambda_)
    np.testing.assert_allclose(got.advantage_t, advantage, rtol=1e-4, atol=1e-5)


def test_steps_with_a_ratio_of_zero_change_nothing(steps):
    got = ops.vtrace(jnp.zeros((TIME, ENV)), *map(jnp.asarray, steps))
    np.testing.assert_array_equal(got.target_tm1, steps[3])
    np.testing.assert_array_equal(got.advantage_t, 0)


def test_clipped_ratios_act_like_ratios_of_one(ratio, steps):
    """In the first call, every ratio is above both bounds (`rho_bar` and `c_bar`), which are 1 by default."""
    high = ops.vtrace(*map(jnp.asarray, (ratio + 1, *steps)))
    ones = ops.vtrace(jnp.ones((TIME, ENV)), *map(jnp.asarray, steps))
    np.testing.assert_array_equal(high.target_tm1, ones.target_tm1)
    np.testing.assert_array_equal(high.advantage_t, ones.advantage_t)


def test_nothing_leaks_from_the_next_episode(ratio, steps):
    first, env = int(np.argmax(steps[2][:, 0])), 0
    assert 0 < first < TIME - 1
    reward = steps[0].copy()
    reward[first + 1 :, env] += 100.0
    before, after = (ops.vtrace(*map(jnp.asarray, (ratio, r, *steps[1:]))) for r in (steps[0], reward))
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[: first + 1, env], y[: first + 1, env])
        assert (x[first + 1 :, env] != y[first + 1 :, env]).any()


@pytest.mark.parametrize(("bar", "lambda_"), [(1.0, 1.0), (1.0, 0.9), (1.7, 0.8)])
def test_without_time_limits_it_equals_rlax(ratio, steps, bar, lambda_):
    """rlax always clips the ratios c at 1, so `vtrace` must use its default `c_bar`, which is also 1."""
    rlax = pytest.importorskip("rlax", reason="rlax is not installed; a test above compares with the definition")
    reward, discount, _, value_tm1, value_t = steps
    value_t = np.concatenate([value_tm1[1:], value_t[-1:]])
    last = discount == 0
    got = ops.vtrace(*map(jnp.asarray, (ratio, reward, discount, last, value_tm1, value_t)), lambda_, rho_bar=bar)
    for e in range(ENV):
        with jax.numpy_dtype_promotion("standard"):  # rlax mixes dtypes
            theirs = rlax.vtrace_td_error_and_advantage(
                *(jnp.asarray(x[:, e]) for x in (value_tm1, value_t, reward, discount, ratio)),
                lambda_=lambda_,
                clip_rho_threshold=bar,
                clip_pg_rho_threshold=bar,
            )
        np.testing.assert_allclose(got.target_tm1[:, e] - value_tm1[:, e], theirs.errors, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got.advantage_t[:, e], theirs.pg_advantage, rtol=1e-4, atol=1e-5)


def test_the_target_weights_rewards_by_the_clipped_policy():
    """Section 4.1 of the IMPALA paper, for one step and four actions. The policy mu chooses the actions; the policy pi is learned.

    With rho_bar = 10, no ratio is clipped, and the mean target is the sum of the rewards weighted by pi. With rho_bar = 1, the
    weights are min(pi, mu).
    """
    mu, pi, reward = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.3, 0.1, 0.1], [3.0, -1.0, 2.0, 5.0]], np.float32)
    one = jnp.ones((1, 4))  # every action occurs once; `mu @ ...` below computes the mean over actions
    ended, zero = one.astype(bool), jnp.zeros((1, 4))
    args = (jnp.asarray(pi / mu)[None], jnp.asarray(reward)[None], zero, ended, zero, zero)
    full, clipped = (mu @ np.asarray(ops.vtrace(*args, rho_bar=bar).target_tm1[0]) for bar in (10.0, 1.0))
    np.testing.assert_allclose(full, pi @ reward, rtol=1e-6)
    np.testing.assert_allclose(clipped, np.minimum(mu, pi) @ reward, rtol=1e-6)
