"""Distributions agree with SciPy and distrax, and their samples have the right frequencies and moments.

One more test checks the clipped surrogate of PPO.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from choreo import ops
from choreo.ops import Bernoulli, Independent, Shifted, masked, multi_categorical

LOGITS = np.array([[0.3, -1.2, 2.0, 0.0], [5.0, -5.0, 0.0, 1.0]], np.float32)
MEAN, LOG_STD = np.array([0.5, -2.0], np.float32), np.array([0.2, -1.0], np.float32)


def test_log_prob_and_entropy_of_categorical_equal_scipy():
    pi, probs = ops.Categorical(jnp.asarray(LOGITS)), scipy.special.softmax(LOGITS, axis=-1)
    for action in range(4):
        got = pi.log_prob(jnp.full(2, action, jnp.int32))
        np.testing.assert_allclose(got, np.log(probs[:, action]), rtol=1e-5)
    np.testing.assert_allclose(pi.entropy(), scipy.stats.entropy(probs, axis=-1), rtol=1e-5)
    assert pi.mode().tolist() == [2, 0]


def test_categorical_samples_have_the_right_frequencies():
    pi = ops.Categorical(jnp.asarray(LOGITS[0]))
    sample = jax.vmap(pi.sample)(jax.random.split(jax.random.key(0), 20_000))
    frequency = np.bincount(sample, minlength=4) / 20_000
    np.testing.assert_allclose(frequency, scipy.special.softmax(LOGITS[0]), atol=0.015)
    assert sample.dtype == pi.mode().dtype == jnp.int32


def test_a_certain_action_has_no_entropy_and_a_finite_gradient():
    grad = jax.grad(lambda logits: ops.Categorical(logits).entropy())(jnp.array([200.0, 0.0]))
    assert np.isfinite(grad).all()
    assert ops.Categorical(jnp.array([200.0, 0.0])).entropy() == 0


def test_log_prob_and_entropy_of_gaussian_equal_scipy():
    pi, x = ops.Gaussian(jnp.asarray(MEAN), jnp.asarray(LOG_STD)), np.array([0.1, -3.0], np.float32)
    scipy_pi = scipy.stats.norm(MEAN, np.exp(LOG_STD))
    np.testing.assert_allclose(pi.log_prob(jnp.asarray(x)), scipy_pi.logpdf(x).sum(), rtol=1e-5)
    np.testing.assert_allclose(pi.entropy(), scipy_pi.entropy().sum(), rtol=1e-5)
    assert (pi.mode() == MEAN).all()


def test_gaussian_samples_have_the_right_moments():
    pi = ops.Gaussian(jnp.asarray(MEAN), jnp.asarray(LOG_STD))
    sample = jax.vmap(pi.sample)(jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_allclose(sample.mean(0), MEAN, atol=0.03)
    np.testing.assert_allclose(sample.std(0), np.exp(LOG_STD), rtol=0.03)


def test_log_prob_and_entropy_of_bernoulli_equal_scipy():
    logits = np.array([0.3, -4.0, 0.0], np.float32)
    pi, scipy_pi = Bernoulli(jnp.asarray(logits)), scipy.stats.bernoulli(scipy.special.expit(logits))
    for action in (0, 1):
        got = pi.log_prob(jnp.full(3, action, jnp.int8))
        np.testing.assert_allclose(got, scipy_pi.logpmf(action), rtol=1e-5)
    np.testing.assert_allclose(pi.entropy(), scipy_pi.entropy(), rtol=1e-5)
    assert pi.mode().tolist() == [1, 0, 0]
    sample = jax.vmap(pi.sample)(jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_allclose(sample.mean(0), scipy.special.expit(logits), atol=0.015)
    assert sample.dtype == pi.mode().dtype == jnp.int8


def test_a_certain_bernoulli_has_no_entropy_and_a_finite_gradient():
    for logits in (200.0, -200.0):
        value, grad = jax.value_and_grad(lambda x: Bernoulli(x).entropy())(jnp.float32(logits))
        assert value == 0 and np.isfinite(grad)


def test_multi_categorical_adds_log_probs_and_entropies_of_its_parts():
    flat, sizes = jnp.asarray(np.concatenate([LOGITS[0, :2], LOGITS[1]])), (2, 4)
    pi, parts = multi_categorical(flat, sizes), [ops.Categorical(flat[:2]), ops.Categorical(flat[2:])]
    np.testing.assert_allclose(pi.entropy(), sum(part.entropy() for part in parts), rtol=1e-5)
    for action in np.ndindex(sizes):
        want = sum(part.log_prob(jnp.int32(i)) for part, i in zip(parts, action, strict=True))
        np.testing.assert_allclose(pi.log_prob(jnp.array(action, jnp.int32)), want, rtol=1e-5)
    assert pi.mode().tolist() == [part.mode() for part in parts]
    sample = np.asarray(jax.vmap(pi.sample)(jax.random.split(jax.random.key(0), 20_000)))
    assert sample.max(0).tolist() == [1, 3]  # the padding of the shorter row is never drawn
    joint = np.histogram2d(sample[:, 0], sample[:, 1], bins=[np.arange(3), np.arange(5)])[0] / 20_000
    np.testing.assert_allclose(joint, np.outer(*(jax.nn.softmax(part.logits) for part in parts)), atol=0.015)


def test_shifted_actions_count_from_the_given_start():
    start, pi = jnp.array([5, -1], jnp.int32), multi_categorical(jnp.asarray(LOGITS[0]), (2, 2))
    shifted = Shifted(pi, start)
    assert shifted.mode().tolist() == [5, -1] and pi.mode().tolist() == [0, 0]
    key = jax.random.key(0)
    np.testing.assert_array_equal(shifted.sample(key), pi.sample(key) + start)
    assert shifted.log_prob(shifted.sample(key)) == pi.log_prob(pi.sample(key))
    assert shifted.entropy() == pi.entropy()


@pytest.mark.parametrize("x64", [False, True])
def test_a_masked_action_is_never_drawn_and_gradients_are_finite(x64):
    with jax.enable_x64(x64):
        logits, mask = jnp.asarray(LOGITS[0]), jnp.array([True, False, False, True])
        pi, rest = ops.Categorical(masked(logits, mask)), ops.Categorical(logits[jnp.array([0, 3])])
        assert pi.logits.dtype == logits.dtype
        np.testing.assert_allclose(pi.entropy(), rest.entropy(), rtol=1e-5)
        np.testing.assert_allclose(pi.log_prob(jnp.int32(3)), rest.log_prob(jnp.int32(1)), rtol=1e-5)
        assert set(jax.vmap(pi.sample)(jax.random.split(jax.random.key(0), 1000)).tolist()) == {0, 3}
        assert pi.mode() == 0  # action 2 has a larger logit, but is masked
        for part in (
            lambda pi: pi.entropy(),
            lambda pi: pi.log_prob(jnp.int32(0)),
            lambda pi: pi.log_prob(jnp.int32(1)),
        ):
            value, grad = jax.value_and_grad(lambda x, part=part: part(ops.Categorical(masked(x, mask))))(logits)
            assert np.isfinite(value) and np.isfinite(grad).all()
            assert (np.asarray(grad)[1:3] == 0).all()  # a masked logit learns nothing


def test_if_every_action_is_masked_all_are_equally_likely():
    pi = ops.Categorical(masked(jnp.asarray(LOGITS[0]), jnp.zeros(4, bool)))
    sample = jax.vmap(pi.sample)(jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_allclose(np.bincount(sample, minlength=4) / 20_000, 0.25, atol=0.015)
    mask = jnp.array([False, False, True, False, True])
    pi = multi_categorical(jnp.arange(5.0), (2, 3), mask)  # masks all actions of the first dimension
    sample = jax.vmap(pi.sample)(jax.random.split(jax.random.key(0), 20_000))
    np.testing.assert_allclose(np.bincount(sample[:, 0], minlength=3) / 20_000, [0.5, 0.5, 0], atol=0.015)
    assert set(sample[:, 1].tolist()) == {0, 2}


def test_the_surrogate_is_clipped_only_on_one_side_of_one():
    """Schulman et al. 2017, figure 1: the loss is constant where it would otherwise fall as the ratio moves away from 1."""
    ratio = jnp.array([0.5, 1.0, 1.5, 0.5, 1.0, 1.5])
    advantage = jnp.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    loss = ops.clipped_surrogate(ratio, advantage, 0.2)
    np.testing.assert_allclose(loss, [-0.5, -1.0, -1.2, 0.8, 1.0, 1.5], rtol=1e-6)
    slope = jax.vmap(jax.grad(lambda r, a: ops.clipped_surrogate(r, a, 0.2)))(ratio, advantage)
    assert (np.asarray(slope) == 0).tolist() == [False, False, True, True, False, False]


@pytest.mark.long
def test_log_probs_and_entropies_equal_distrax():
    """`make test` skips this test, because the tests above already compare with SciPy."""
    distrax = pytest.importorskip("distrax", reason="distrax is not installed; the tests above compare with SciPy")
    ours, theirs = ops.Categorical(jnp.asarray(LOGITS)), distrax.Categorical(logits=jnp.asarray(LOGITS))
    action = jnp.array([1, 3], jnp.int32)
    np.testing.assert_allclose(ours.log_prob(action), theirs.log_prob(action), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-5)
    ours = ops.Gaussian(jnp.asarray(MEAN), jnp.asarray(LOG_STD))
    theirs = distrax.MultivariateNormalDiag(jnp.asarray(MEAN), jnp.exp(jnp.asarray(LOG_STD)))
    np.testing.assert_allclose(ours.log_prob(jnp.zeros(2)), theirs.log_prob(jnp.zeros(2)), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-5)
    flags, action = jnp.asarray(LOGITS), jnp.array([[0, 1, 1, 0], [1, 1, 0, 0]], jnp.int8)
    ours, theirs = Independent(Bernoulli(flags)), distrax.Independent(distrax.Bernoulli(flags), 1)
    np.testing.assert_allclose(ours.log_prob(action), theirs.log_prob(action.astype(float)), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-5)
    rows, action = jnp.stack([flags, flags + 1.0, -flags]), jnp.array([[0, 1], [2, 3], [1, 0]], jnp.int32)
    ours, theirs = Independent(ops.Categorical(rows)), distrax.Independent(distrax.Categorical(logits=rows), 1)
    np.testing.assert_allclose(ours.log_prob(action), theirs.log_prob(action), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-5)
    ours, theirs = multi_categorical(flags.ravel(), (4, 4)), distrax.Independent(distrax.Categorical(logits=flags), 1)
    action = jnp.array([3, 1], jnp.int32)
    np.testing.assert_allclose(ours.log_prob(action), theirs.log_prob(action), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy(), rtol=1e-5)
