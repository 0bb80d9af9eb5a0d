"""Squashed Gaussians: their densities equal those of distrax and are finite in the tails. The greedy action is the median."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from choreo.networks import Bounds, Squashed

UNIT = Bounds((-1.0, -1.0), (1.0, 1.0), (2,))
WIDE = Bounds((-2.0, 0.0), (2.0, 10.0), (2,))


@pytest.mark.parametrize("bounds", [pytest.param(UNIT, marks=pytest.mark.long), WIDE], ids=["unit", "wide"])
def test_densities_equal_those_of_distrax(bounds):
    """Choreo gives the density of the action scaled to [-1, 1], and distrax gives the density of the action itself.

    So the test adds log(width / 2) of each dimension to the log-density of distrax.
    """
    distrax = pytest.importorskip("distrax", reason="distrax is not installed")
    mean, log_std = jnp.array([0.5, -1.0]), jnp.array([-0.3, 0.2])
    ours = Squashed(mean, log_std, bounds)
    low, high = jnp.array(bounds.low), jnp.array(bounds.high)
    squash = distrax.Chain([distrax.ScalarAffine((low + high) / 2, (high - low) / 2), distrax.Tanh()])
    theirs = distrax.Transformed(distrax.MultivariateNormalDiag(mean, jnp.exp(log_std)), distrax.Block(squash, 1))
    keys = jax.random.split(jax.random.key(0), 20)
    action, log_prob = jax.jit(jax.vmap(ours.sample_and_log_prob))(keys)
    expected = jax.jit(jax.vmap(theirs.log_prob))(action) + jnp.sum(jnp.log((high - low) / 2))
    np.testing.assert_allclose(log_prob, expected, rtol=1e-3, atol=1e-3)


def test_densities_in_the_tails_are_finite():
    """For large |x|, float32 rounds tanh(x) to 1 or -1. But the slope of tanh is about 4 exp(-2 |x|), not 0. So the logarithm of
    the slope must be finite."""

    def drawn(mean):
        pi = Squashed(mean, jnp.array([-9.0, -9.0]), UNIT)
        return pi.sample_and_log_prob(jax.random.key(0))[::-1]

    (log_prob, action), gradient = jax.jit(jax.value_and_grad(drawn, has_aux=True))(jnp.array([20.0, -20.0]))
    np.testing.assert_allclose(action, [1.0, -1.0], rtol=1e-6)
    assert np.isfinite(log_prob)
    np.testing.assert_allclose(gradient, [2.0, -2.0], rtol=1e-4)


def test_the_greedy_action_is_the_median_of_the_distribution():
    pi = Squashed(jnp.array([0.5, -1.0]), jnp.array([0.0, 0.0]), WIDE)
    drawn = jax.jit(jax.vmap(pi.sample))(jax.random.split(jax.random.key(0), 4000))
    np.testing.assert_allclose(np.median(drawn, axis=0), pi.mode(), atol=0.15)
    np.testing.assert_allclose(pi.mode(), [2 * np.tanh(0.5), 5 + 5 * np.tanh(-1.0)], rtol=1e-5)
