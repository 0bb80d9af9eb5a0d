"""Returns and advantages equal NumPy loops and closed forms, on random trajectories with terminations and time limits."""

import jax.numpy as jnp
import numpy as np
import pytest

from choreo import ops
from ops.trajectories import random_steps

TIME, ENV, GAMMA = 40, 6, 0.97


@pytest.fixture
def steps():
    return random_steps(TIME, ENV, GAMMA)


def by_hand(steps, lambda_):
    """The lambda-return as Sutton & Barto define it, for every step of every environment: a weighted sum of n-step returns."""
    reward, discount, last, _, value_t = steps
    out = np.zeros((TIME, ENV))
    for e in range(ENV):
        for start in range(TIME):
            n_step, total, factor, weight = [], 0.0, 1.0, []
            for t in range(start, TIME):
                total += factor * reward[t, e]
                factor *= discount[t, e]
                n_step.append(total + factor * value_t[t, e])
                weight.append((1 - lambda_) * lambda_ ** (t - start))
                if last[t, e]:
                    break
            weight[-1] = lambda_ ** (len(weight) - 1)  # the longest return takes all of the remaining weight
            out[start, e] = np.dot(weight, n_step)
    return out


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
def test_lambda_return_is_the_weighted_sum_of_n_step_returns(steps, lambda_):
    reward, discount, last, _, value_t = map(jnp.asarray, steps)
    got = ops.lambda_return(reward, discount, last, value_t, lambda_)
    np.testing.assert_allclose(got, by_hand(steps, lambda_), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
def test_gae_equals_its_recursion(steps, lambda_):
    reward, discount, last, value_tm1, value_t = steps
    expected, running = np.zeros((TIME, ENV)), np.zeros(ENV)
    for t in reversed(range(TIME)):
        delta = reward[t] + discount[t] * value_t[t] - value_tm1[t]
        running = expected[t] = delta + np.where(last[t], 0, lambda_ * discount[t] * running)
    np.testing.assert_allclose(ops.gae(*map(jnp.asarray, steps), lambda_), expected, rtol=1e-4, atol=1e-5)


def test_gae_is_lambda_return_minus_value_if_values_are_consistent(steps):
    """Values are consistent if, within an episode, the value after a step equals the value before the next step."""
    reward, discount, last, value_tm1, value_t = steps
    value_t = np.where(last, value_t, np.roll(value_tm1, -1, axis=0))
    reward, discount, last, value_tm1, value_t = map(jnp.asarray, (reward, discount, last, value_tm1, value_t))
    got = ops.gae(reward, discount, last, value_tm1, value_t, 0.9) + value_tm1
    np.testing.assert_allclose(got, ops.lambda_return(reward, discount, last, value_t, 0.9), rtol=1e-4, atol=1e-4)


def test_the_discounted_return_of_ones_equals_the_closed_form():
    """The sum of n terms, 1 + g + g^2 + ..., is (1 - g^n) / (1 - g). With a bootstrapped value for all later terms, the sum is
    1 / (1 - g)."""
    ones, never = jnp.ones((10, 1)), jnp.zeros((10, 1), bool)
    ended = never.at[-1].set(True)
    left = np.arange(10, 0, -1)[:, None]
    got = ops.discounted_return(ones, GAMMA * (1 - ended.astype(jnp.float32)), ended, jnp.zeros((10, 1)))
    np.testing.assert_allclose(got, (1 - GAMMA**left) / (1 - GAMMA), rtol=1e-5)
    endless = ops.discounted_return(ones, GAMMA * ones, never, jnp.full((10, 1), 1 / (1 - GAMMA)))
    np.testing.assert_allclose(endless, 1 / (1 - GAMMA), rtol=1e-5)


def test_without_time_limits_gae_and_lambda_return_equal_rlax(steps):
    rlax = pytest.importorskip("rlax", reason="rlax is not installed; the tests above compare with NumPy loops")
    reward, discount, last, value_tm1, value_t = steps
    value_t = np.roll(value_tm1, -1, axis=0)
    last = discount == 0
    values = np.concatenate([value_tm1, value_t[-1:]])
    got = ops.gae(*map(jnp.asarray, (reward, discount, last, value_tm1, value_t)), 0.9)
    returns = ops.lambda_return(*map(jnp.asarray, (reward, discount, last, value_t)), 0.9)
    for e in range(ENV):
        theirs = rlax.truncated_generalized_advantage_estimation(reward[:, e], discount[:, e], 0.9, values[:, e])
        np.testing.assert_allclose(got[:, e], theirs, rtol=1e-4, atol=1e-5)
        theirs = rlax.lambda_returns(reward[:, e], discount[:, e], value_t[:, e], 0.9)
        np.testing.assert_allclose(returns[:, e], theirs, rtol=1e-4, atol=1e-5)
