"""The built-in environments: for the same actions, the same steps as Gymnasium's; ends of episodes, and clipped actions."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from choreo import envs
from choreo.envs.cartpole import CartPole, CartPoleState
from choreo.envs.pendulum import Pendulum, PendulumState

PAIRS = {"CartPole-v1": (CartPole(), CartPoleState), "Pendulum-v1": (Pendulum(), PendulumState)}


@pytest.mark.parametrize("name", PAIRS)
def test_every_step_equals_gymnasium(name):
    """Compares whole episodes, in float64. Only the initial state is copied from Gymnasium."""
    env, make_state = PAIRS[name]
    theirs = gymnasium.make(name)
    theirs.action_space.seed(0)
    with jax.enable_x64(True):
        step = jax.jit(env.step)
        for seed in range(5):
            obs, _ = theirs.reset(seed=seed)
            state = make_state(*jnp.asarray(theirs.unwrapped.state, jnp.float64))
            for t in range(1, env.time_limit + 1):
                # Gymnasium's Pendulum computes in the type of the action, so the action is float64.
                action = np.asarray(theirs.action_space.sample(), np.int64 if name == "CartPole-v1" else np.float64)
                obs, reward, terminated, truncated, _ = theirs.step(action)
                state, ours = step(state, jnp.asarray(action), jax.random.key(0))
                np.testing.assert_allclose(ours.obs, obs, rtol=1e-6, atol=1e-7)  # Gymnasium rounds obs to float32
                np.testing.assert_allclose(np.stack(state), theirs.unwrapped.state, rtol=1e-9, atol=1e-11)
                np.testing.assert_allclose(ours.reward, reward, rtol=1e-12)
                assert bool(ours.terminated) == terminated
                assert truncated == (t == env.time_limit)
                if terminated or truncated:
                    break


@pytest.mark.parametrize("name", PAIRS)
def test_spaces_equal_gymnasium(name):
    env, theirs = PAIRS[name][0], gymnasium.make(name)
    assert env.observation_space == theirs.observation_space
    assert env.action_space == theirs.action_space


@pytest.mark.parametrize("name", PAIRS)
def test_reset_covers_the_range_of_gymnasium(name):
    env, theirs = PAIRS[name][0], gymnasium.make(name)
    states = np.stack(jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 4_000))[0], axis=1)
    expected = np.stack([theirs.reset(seed=seed) and theirs.unwrapped.state for seed in range(4_000)])
    np.testing.assert_allclose(states.min(0), expected.min(0), rtol=0.02)
    np.testing.assert_allclose(states.max(0), expected.max(0), rtol=0.02)
    np.testing.assert_allclose(states.std(0), expected.std(0), rtol=0.05)


def test_a_fallen_pole_terminates_and_resets_in_the_same_step():
    env = envs.make("jax:CartPole-v1", num_envs=3)
    state, obs = env.reset(env.keys(jax.random.key(0)))
    step = jax.jit(env.step)
    length = 0
    while length == 0 or not ts.last.any():
        before, length = state, length + 1
        state, ts = step(state, jnp.ones(3, jnp.int32))
        assert ts.last.any() or (ts.next_obs == ts.obs).all()
    (i, *_) = np.flatnonzero(ts.last)
    assert ts.discount[i] == 0 and ts.reward[i] == 1
    assert int(ts.info["episode_length"][i]) == float(ts.info["episode_return"][i]) == length
    assert abs(ts.next_obs[i, 2]) > 12 * np.pi / 180  # the pole has fallen
    assert (abs(ts.obs[i]) <= 0.05).all()  # the first observation of a new episode
    assert (state.episode_length[i], state.episode_return[i]) == (0, 0)
    _, fell = CartPole().step(jax.tree.map(lambda x: x[i], before.inner), jnp.int32(1), jax.random.key(0))
    np.testing.assert_allclose(ts.next_obs[i], fell.obs, rtol=1e-6)


def test_a_time_limit_truncates_the_episode():
    env = envs.make("jax:Pendulum-v1", num_envs=2, time_limit=3)
    state, _ = env.reset(env.keys(jax.random.key(0)))
    lasts, discounts, returns = [], [], []
    for _ in range(7):
        state, ts = env.step(state, jnp.zeros((2, 1)))
        lasts.append(bool(ts.last[0])), discounts.append(float(ts.discount[0]))
        returns.append(float(ts.info["episode_return"][0] - ts.reward[0]))
    assert lasts == [False, False, True] * 2 + [False]
    assert discounts == [1.0] * 7
    assert returns[0] == returns[3] == returns[6] == 0.0  # the sum is 0 at the beginning of each episode


def test_termination_in_the_step_of_the_time_limit_is_not_a_truncation():
    length = _steps_until_fall()
    env = envs.make("jax:CartPole-v1", num_envs=1, time_limit=length)
    state, _ = env.reset(env.keys(jax.random.key(0)))
    for _ in range(length):
        state, ts = env.step(state, jnp.ones(1, jnp.int32))
    assert ts.last[0] and ts.discount[0] == 0


def _steps_until_fall() -> int:
    env = envs.make("jax:CartPole-v1", num_envs=1)
    state, _ = env.reset(env.keys(jax.random.key(0)))
    for t in range(1, 100):
        state, ts = env.step(state, jnp.ones(1, jnp.int32))
        if ts.last[0]:
            return t
    raise AssertionError("the pole never fell")


def test_actions_outside_a_box_are_clipped():
    env = envs.make("jax:Pendulum-v1", num_envs=2)
    state, _ = env.reset(env.keys(jax.random.key(0)))
    _, wild = env.step(state, jnp.array([[9.0], [-9.0]]))
    _, tame = env.step(state, jnp.array([[2.0], [-2.0]]))
    assert (wild.next_obs == tame.next_obs).all() and (wild.reward == tame.reward).all()
