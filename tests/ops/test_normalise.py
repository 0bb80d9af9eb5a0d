"""Running statistics equal those of all data. They are updated in one step (`update_moments`) or two (`look`, `merge_moments`)."""

import jax
import jax.numpy as jnp
import numpy as np

from choreo import ops


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


def test_statistics_of_shards_may_be_averaged():
    """The means of the shards differ, and are near 300. The variance of all data must include these differences, and must be
    accurate although it is small compared to the squares of the means."""
    rng = np.random.default_rng(0)
    data = (300 + 2 * rng.normal(size=(6, 4, 16, 3)) + np.arange(4)[:, None, None]).astype(np.float32)
    moments = ops.Moments.of_nothing((3,))
    for shards in jnp.asarray(data):
        each = jax.vmap(lambda batch, moments=moments: ops.look(moments, batch))(shards)
        moments = ops.merge_moments(moments, jax.tree.map(lambda x: x.mean(0), each), jnp.float32(4 * 16))
    everything = data.reshape(-1, 3).astype(np.float64)
    assert moments.num == len(everything)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.var, everything.var(0), rtol=5e-3)


def test_with_one_shard_two_steps_equal_one_update():
    data = jnp.asarray(np.random.default_rng(1).normal(3.0, 2.0, (5, 7, 4, 3)).astype(np.float32))
    halves = whole = ops.Moments.of_nothing((3,))
    for batch in data:
        halves = ops.merge_moments(halves, ops.look(halves, batch), jnp.float32(28))
        whole = ops.update_moments(whole, batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), halves, whole)


def test_batches_seen_with_older_statistics_count_equally():
    """Asynchronous workers call `look` with old statistics. The statistics have changed when `merge_moments` is called."""
    data = jnp.asarray(np.random.default_rng(2).normal(3.0, 2.0, (4, 50, 3)).astype(np.float32))
    old = now = ops.Moments.of_nothing((3,))
    for batch in data:
        now = ops.merge_moments(now, ops.look(old, batch), jnp.float32(50))
    np.testing.assert_allclose(now.mean, data.mean((0, 1)), rtol=1e-4)
    np.testing.assert_allclose(now.var, data.var((0, 1)), rtol=1e-4)


def test_a_constant_has_no_variance():
    """Rounding must not make the variance negative: its square root would be NaN."""
    moments, batch = ops.Moments.of_nothing((1,)), jnp.full((10, 1), 0.1)
    for _ in range(5):
        moments = ops.merge_moments(moments, ops.look(moments, batch), jnp.float32(10))
    assert 0 <= moments.var[0] < 1e-6
    assert np.isfinite(ops.normalise(moments, batch[0])).all()
