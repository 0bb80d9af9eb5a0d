from dataclasses import dataclass

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo import envs
from choreo.envs import EnvStep, VmapEnv
from choreo.errors import AlgorithmError, RunError
from choreo.runs.evaluation import evaluate


@dataclass(frozen=True, kw_only=True)
class ShortOrLong:
    """Half of the episodes last 1 step, and half last 50. The reward is 1 if the action is the number of earlier steps."""

    lengths: tuple[int, int] = (1, 50)
    name = "test:ShortOrLong"
    time_limit = None
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(1000)

    def reset(self, key):
        length = jnp.where(jax.random.bernoulli(key), *self.lengths)
        return (length, jnp.zeros((), jnp.int32)), jnp.zeros(1, jnp.float32)

    def step(self, state, action, key):
        length, time = state
        reward = (action == time).astype(jnp.float32)
        return (length, time + 1), EnvStep(jnp.zeros(1, jnp.float32), reward, time + 1 >= length)


@dataclass(frozen=True, kw_only=True)
class Counting:
    """An algorithm whose recurrent state counts the steps of an episode. The action is this count."""

    @choreo.fragment("actor")
    def act(self, params, obs, key, state, *, greedy=False):
        return state["count"], (), {"count": state["count"] + 1}

    def initial_state(self, params):
        return {"count": jnp.zeros((), jnp.int32)}


@dataclass(frozen=True, kw_only=True)
class Always:
    """An algorithm that takes the action `params` if greedy, and otherwise the action `params` + 1."""

    @choreo.fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        return jnp.int32(0 if greedy else 1) + params, ()


@dataclass(frozen=True, kw_only=True)
class NeverGreedy:
    """An algorithm whose `act` has no parameter `greedy`."""

    @choreo.fragment("actor")
    def act(self, params, obs, key):
        return jnp.int32(0), ()


ENV = VmapEnv(env=ShortOrLong(), num_envs=2)
KEY = jax.random.key(0)


@pytest.mark.parametrize("episodes", [1, pytest.param(100, marks=pytest.mark.long), 128, 300])
def test_an_evaluation_has_exactly_as_many_episodes_as_asked_for(episodes):
    result = evaluate(Counting(), ENV, None, key=KEY, episodes=episodes)
    assert len(result.returns) == len(result.lengths) == episodes
    assert set(result.lengths) <= {1, 50}


def test_short_episodes_are_not_favoured():
    # 128 environments play at the same time. The first 128 episodes that end have a mean length of about 2.
    lengths = evaluate(Counting(), ENV, None, key=KEY, episodes=128).lengths
    assert abs(lengths.mean() - 25.5) < 9  # the standard error of the mean is 2.2


def test_the_recurrent_state_starts_anew_with_each_episode():
    result = evaluate(Counting(), ENV, None, key=KEY, episodes=300)
    np.testing.assert_array_equal(result.returns, result.lengths)


def test_greedy_is_passed_to_act():
    env, zero = VmapEnv(env=ShortOrLong(lengths=(1, 1)), num_envs=2), jnp.int32(0)
    assert evaluate(Always(), env, zero, key=KEY, episodes=5).mean == 1.0
    assert evaluate(Always(), env, zero, key=KEY, episodes=5, greedy=False).mean == 0.0
    assert float(evaluate(Always(), env, zero + 1, key=KEY, episodes=5)) == 0.0


def test_equal_keys_give_equal_episodes_and_different_keys_do_not():
    one, again, other = (
        evaluate(Counting(), ENV, None, key=jax.random.key(seed), episodes=64).lengths for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


def test_a_result_prints_its_mean_and_the_number_of_episodes():
    env = VmapEnv(env=ShortOrLong(lengths=(50, 50)), num_envs=2)
    text = str(evaluate(Counting(), env, None, key=KEY, episodes=5))
    assert text == "return 50.0 ± 0.0 over 5 episodes of 50 steps"


def test_episodes_that_do_not_end_give_an_error():
    env = VmapEnv(env=ShortOrLong(lengths=(10**9, 10**9)), num_envs=2)
    with pytest.raises(RunError, match="test:ShortOrLong gave up: episodes are longer than 2,000 steps"):
        evaluate(Counting(), env, None, key=KEY, episodes=3, max_episode_steps=2000)


class ShortOrLongHost(gymnasium.Env):
    """`ShortOrLong` as a Python environment. `open_now` lists the environments that are not closed."""

    observation_space, action_space = ShortOrLong.observation_space, ShortOrLong.action_space
    open_now: list["ShortOrLongHost"] = []

    def __init__(self, lengths=(1, 50)):
        self.lengths = lengths
        self.open_now.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.length = 0, self.lengths[self.np_random.integers(2)]
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(1, np.float32), float(action == self.time - 1), self.time >= self.length, False, {}

    def close(self):
        self.open_now.remove(self)


HOST = envs.from_factory(ShortOrLongHost, 2)


@pytest.mark.parametrize("episodes", [1, pytest.param(16, marks=pytest.mark.long), 100])
def test_in_python_an_evaluation_has_exactly_as_many_episodes_as_asked_for(episodes):
    result = evaluate(Counting(), HOST, None, key=KEY, episodes=episodes)
    assert len(result.returns) == len(result.lengths) == episodes
    assert set(result.lengths) <= {1, 50}
    np.testing.assert_array_equal(result.returns, result.lengths)  # the recurrent state starts anew with each episode
    assert not ShortOrLongHost.open_now, "the evaluation did not close its environments"


def test_in_python_short_episodes_are_not_favoured():
    # 16 environments play at the same time. The first 16 episodes that end have a mean length of about 2.
    lengths = np.concatenate(
        [evaluate(Counting(), HOST, None, key=jax.random.key(seed), episodes=16).lengths for seed in range(8)]
    )
    assert abs(lengths.mean() - 25.5) < 9  # the standard error of the mean is 2.2


def test_in_python_the_key_and_greedy_are_used():
    one, again, other = (
        evaluate(Counting(), HOST, None, key=jax.random.key(seed), episodes=32).lengths for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    env = envs.from_factory(ShortOrLongHost, 2, lengths=(1, 1))
    assert evaluate(Always(), env, jnp.int32(0), key=KEY, episodes=5).mean == 1.0
    assert evaluate(Always(), env, jnp.int32(0), key=KEY, episodes=5, greedy=False).mean == 0.0


def test_in_python_episodes_that_do_not_end_give_an_error():
    env = envs.from_factory(ShortOrLongHost, 2, lengths=(10**9, 10**9))
    with pytest.raises(RunError, match="ShortOrLongHost gave up: episodes are longer than 50 steps"):
        evaluate(Counting(), env, None, key=KEY, episodes=3, max_episode_steps=50)
    assert not ShortOrLongHost.open_now


def test_evaluation_does_not_disturb_the_environments_of_a_run():
    env = envs.from_factory(ShortOrLongHost, 2)
    state, _ = env.reset(env.keys(KEY))
    evaluate(Counting(), env, None, key=KEY, episodes=2)
    state, _ = env.step(state, jnp.zeros(2, jnp.int32))
    assert state.tolist() == [1, 1]
    ShortOrLongHost.open_now.clear()


def test_an_evaluation_needs_an_episode_and_the_parameter_greedy_of_act():
    with pytest.raises(RunError, match="needs at least one episode"):
        evaluate(Counting(), ENV, None, key=KEY, episodes=0)
    with pytest.raises(AlgorithmError, match="`NeverGreedy.act` takes no `greedy`"):
        evaluate(NeverGreedy(), ENV, None, key=KEY)
