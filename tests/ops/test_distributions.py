"""Distributions against SciPy and against what their samples do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from choreo import ops

LOGITS = np.array([[0.3, -1.2, 2.0, 0.0], [5.0, -5.0, 0.0, 1.0]], np.float32)
MEAN, LOG_STD = np.array([0.5, -2.0], np.float32), np.array([0.2, -1.0], np.float32)


def test_categorical_log_prob_and_entropy():
    pi, probs = ops.Categorical(jnp.asarray(LOGITS)), scipy.special.softmax(LOGITS, axis=-1)
    for action in range(4):
        got = pi.log_prob(jnp.full(2, action, jnp.int32))
        np.testing.assert_allclose(got, np.log(probs[:, action]), rtol=1e-5)
    np.testing.assert_allclose(pi.entropy(), scipy.stats.entropy(probs, axis=-1), rtol=1e-5)
    assert pi.mode().tolist() == [2, 0]


def test_categorical_samples_have_these_frequencies():
    pi = ops.Categorical(jnp.asarray(LOGITS[0]))
    sample = jax.vmap(pi.sample)(jax.random.split(jax.random.key(0), 20_000))
    frequency = np.bincount(sample, minlength=4) / 20_000
    np.testing.assert_allclose(frequency, scipy.special.softmax(LOGITS[0]), atol=0.015)
    assert sample.dtype == pi.mode().dtype == jnp.int32


def test_a_certain_action_has_no_entropy_and_a_finite_gradient():
    grad = jax.grad(lambda logits: ops.Categorical(logits).entropy())(jnp.array([200.0, 0.0]))
    assert np.isfinite(grad).all()
    assert ops.Categorical(jnp.array([200.0, 0.0])).entropy() == 0


def test_gaussian_log_prob_and_entropy():
    pi, x = ops.Gaussian(jnp.asarray(MEAN), jnp.asarray(LOG_STD)), np.array([0.1, -3.0], np.float32)
    scipy_pi = scipy.stats.norm(MEAN, np.exp(LOG_STD))
    np.testing.assert_allclose(pi.log_prob(jnp.asarray(x)), scipy_pi.logpdf(x).sum(), rtol=1e-5)
    np.testing.assert_allclose(pi.entropy(), scipy_pi.entropy().sum(), rtol=1e-5)
    assert (pi.mode() == MEAN).all()


def test_gaussian_samples_have_these_moments():
    pi = ops.Gaussian(jnp.asarray(MEAN), jnp.asarray(LOG_STD))
    sample = jax.vmap(pi.sample)(jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_allclose(sample.mean(0), MEAN, atol=0.03)
    np.testing.assert_allclose(sample.std(0), np.exp(LOG_STD), rtol=0.03)


def test_clipped_surrogate_by_cases():
    """Schulman et al. 2017, figure 1: clipped only where moving on would be rewarded."""
    ratio = jnp.array([0.5, 1.0, 1.5, 0.5, 1.0, 1.5])
    advantage = jnp.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    loss = ops.clipped_surrogate(ratio, advantage, 0.2)
    np.testing.assert_allclose(loss, [-0.5, -1.0, -1.2, 0.8, 1.0, 1.5], rtol=1e-6)
    slope = jax.vmap(jax.grad(lambda r, a: ops.clipped_surrogate(r, a, 0.2)))(ratio, advantage)
    assert (np.asarray(slope) == 0).tolist() == [False, False, True, True, False, False]


def test_moments_of_a_stream_are_those_of_all_data():
    data = np.random.default_rng(0).normal(3.0, 2.0, (5, 7, 4, 3)).astype(np.float32)
    moments = ops.Moments.of_nothing((3,))
    unchanged = ops.normalise(moments, jnp.asarray(data[0, 0, 0]))
    np.testing.assert_allclose(unchanged, data[0, 0, 0], rtol=1e-6)
    for batch in data:
        moments = ops.update_moments(moments, jnp.asarray(batch))
    everything = data.reshape(-1, 3)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.var, everything.var(0), rtol=1e-4)
    scaled = jax.vmap(lambda x: ops.normalise(moments, x))(jnp.asarray(everything))
    np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(scaled.std(0), 1, rtol=1e-4)
    assert ops.normalise(moments, jnp.full(3, 1e6)).tolist() == [10.0] * 3


def test_against_distrax():
    distrax = pytest.importorskip("distrax", reason="distrax is not installed; SciPy above stands alone")
    ours, theirs = ops.Categorical(jnp.asarray(LOGITS)), distrax.Categorical(logits=jnp.asarray(LOGITS))
    action = jnp.array([1, 3], jnp.int32)
    np.testing.assert_allclose(ours.log_prob(action), theirs.log_prob(action), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-5)
    ours = ops.Gaussian(jnp.asarray(MEAN), jnp.asarray(LOG_STD))
    theirs = distrax.MultivariateNormalDiag(jnp.asarray(MEAN), jnp.exp(jnp.asarray(LOG_STD)))
    np.testing.assert_allclose(ours.log_prob(jnp.zeros(2)), theirs.log_prob(jnp.zeros(2)), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-5)
