"""`n_step` equals a loop, with a termination or a time limit at any step. Without time limits, `n_step` equals rlax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from choreo import ops

GAMMA = 0.9
ENDS = ("goes on", "terminates", "time limit")


def by_hand(reward, discount, last):
    """The discounted sum of the rewards, the factor of the bootstrapped value, and the number of steps that count."""
    total, factor, steps = 0.0, 1.0, 0
    for r, d, ended in list(zip(reward, discount, last, strict=True))[:-1]:
        if ended and d > 0:  # A time limit. The observation after this step was not stored, so the step does not count.
            break
        total += factor * r
        factor *= GAMMA * d
        steps += 1
        if ended:
            break
    return total, factor, steps


def window(ends):
    reward = np.arange(1.0, len(ends) + 1)
    discount = np.array([0.0 if end == "terminates" else 1.0 for end in ends])
    return reward, discount, np.array([end != "goes on" for end in ends])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equals_the_loop_with_every_kind_of_end_at_every_step(n):
    windows = [window(ends) for ends in itertools.product(ENDS, repeat=n + 1)]
    reward, discount, last = (np.array(x) for x in zip(*windows, strict=True))
    got = jax.jit(jax.vmap(lambda *args: ops.n_step(*args, GAMMA)))(
        jnp.asarray(reward, jnp.float32), jnp.asarray(discount, jnp.float32), jnp.asarray(last)
    )
    for i, one in enumerate(windows):
        total, factor, steps = by_hand(*one)
        np.testing.assert_allclose(got.steps[i], steps)
        np.testing.assert_allclose(got.weight[i], float(steps > 0))
        np.testing.assert_allclose(got.reward[i], total, rtol=1e-6)
        if steps:
            np.testing.assert_allclose(got.discount[i], factor, rtol=1e-6)


def test_without_time_limits_it_equals_rlax():
    """rlax has no time limits. It adds the steps after the end of an episode with the factor 0, so the return is the same."""
    rlax = pytest.importorskip("rlax", reason="rlax is not installed; the test above compares with a loop")
    n_step = jax.jit(lambda *args: ops.n_step(*args, GAMMA))
    rng = np.random.default_rng(0)
    for _ in range(20):
        reward = rng.normal(size=6).astype(np.float32)
        value = rng.normal(size=6).astype(np.float32)  # value of the observation at each step
        last = rng.random(6) < 0.2
        discount = np.where(last, 0.0, 1.0).astype(np.float32)
        got = n_step(jnp.asarray(reward), jnp.asarray(discount), jnp.asarray(last))
        target = got.reward + got.discount * value[int(got.steps)]
        # For the step from t to t + 1, rlax takes the reward, the discount, and the value of the observation at t + 1.
        theirs = rlax.n_step_bootstrapped_returns(
            jnp.asarray(reward[:5]), GAMMA * jnp.asarray(discount[:5]), jnp.asarray(value[1:]), n=5
        )
        np.testing.assert_allclose(target, theirs[0], rtol=1e-5, atol=1e-6)
