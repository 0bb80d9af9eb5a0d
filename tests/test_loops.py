"""Rollouts, minibatches and episode metrics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algos.toys import Income, Recall, TwoStep, batch
from choreo import loops


def right_then_zero(params, obs, key):
    return jnp.where(obs[0] == 1, 1, 0).astype(jnp.int32), {"seen": obs[0]}


def test_a_rollout_records_every_step_and_every_episode():
    env = batch(TwoStep(), 3)
    env_state, obs = env.reset(env.keys(jax.random.key(0)))
    start = loops.Position(env_state, obs)
    end, trajectory, metrics = loops.rollout(env, right_then_zero, None, start, jax.random.key(1), 5)
    column = jax.tree.map(lambda x: x[:, 0].tolist(), trajectory)
    assert column.action == [1, 0, 1, 0, 1]
    assert column.reward == [0, 1, 0, 1, 0]
    assert column.last == [False, True, False, True, False]
    assert column.discount == [1, 0, 1, 0, 1]
    assert column.extras["seen"] == [1, 0, 1, 0, 1]
    first, right = [1, 0, 0], [0, 0, 1]
    assert column.obs == [first, right, first, right, first]
    # The first step of an episode goes to the right, and the second step stays there.
    assert column.next_obs == [right] * 5
    assert end.obs.tolist() == [right] * 3 and end.memory is None
    assert {name: float(x) for name, x in metrics.items()} == {
        "episode_return": 1, "episode_length": 2, "episodes": 6
    }  # fmt: skip


def test_metrics_of_episodes_are_nan_if_no_episode_ended():
    env = batch(Income(), 2)
    env_state, obs = env.reset(env.keys(jax.random.key(0)))
    start = loops.Position(env_state, obs)
    _, _, metrics = loops.rollout(env, right_then_zero, None, start, jax.random.key(1), 4)
    assert metrics["episodes"] == 0
    assert np.isnan(metrics["episode_return"]) and np.isnan(metrics["episode_length"])


def test_memory_starts_anew_in_each_episode():
    """Here the memory is the number of steps in the episode. Every episode has two steps, so the numbers are 1, 2, 1, 2, ..."""

    def act(params, obs, key, memory):
        memory = {"steps": memory["steps"] + 1}
        return jnp.int32(0), memory["steps"], memory

    env, fresh = batch(Recall(), 3), {"steps": jnp.zeros((), jnp.int32)}
    env_state, obs = env.reset(env.keys(jax.random.key(0)))
    start = loops.Position(env_state, obs, {"steps": jnp.zeros(3, jnp.int32)})
    end, trajectory, _ = loops.rollout(env, act, None, start, jax.random.key(1), 5, fresh=fresh)
    assert trajectory.extras[:, 0].tolist() == [1, 2, 1, 2, 1]
    assert end.memory["steps"].tolist() == [1, 1, 1]


# With more than 65,536 indices, `permutation` sorts in a different way.
@pytest.mark.parametrize("num", [1, 7, 1024, 2049, 65_536, 65_537])
def test_a_permutation_has_every_number_once(num):
    order = jax.jit(functools.partial(loops.permutation, num=num))(jax.random.key(0))
    assert sorted(order.tolist()) == list(range(num))


def test_every_order_is_equally_likely():
    orders = jax.vmap(functools.partial(loops.permutation, num=3))(jax.random.split(jax.random.key(0), 6_000))
    _, counts = np.unique(np.asarray(orders), axis=0, return_counts=True)
    np.testing.assert_allclose(counts, 1_000, rtol=0.12)  # four standard deviations


def test_minibatches_keep_the_leaves_of_a_row_together():
    rows = {"x": jnp.arange(12), "y": jnp.arange(24).reshape(12, 2)}
    parts = loops.minibatches(rows, jax.random.key(0), 4)
    assert parts["x"].shape == (3, 4) and parts["y"].shape == (3, 4, 2)
    assert sorted(parts["x"].ravel().tolist()) == list(range(12))
    assert (parts["y"][..., 0] == 2 * parts["x"]).all()
