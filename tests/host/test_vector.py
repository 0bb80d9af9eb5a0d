"""Vector environments give the same results in each of Gymnasium's autoreset modes. Also their states, and their errors."""

import functools

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from choreo.errors import EnvError
from choreo.host.states import NoState
from host.toys import Count, Nested, WanderTogether, assert_continues, batch, play, seeds

ONES = np.ones(3, np.int32)


def vectorised(mode, length=3, truncates=False):
    lengths = iter(range(length, 99))

    def make(num_envs):
        return SyncVectorEnv([lambda: Count(next(lengths), truncates)] * num_envs, autoreset_mode=mode)

    return make


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("truncates", [False, True])
def test_every_mode_equals_single_environments(mode, truncates):
    singles = iter([3, 4, 5, 6])  # one length for the environment of `probe`, then three for the batch
    expected = play(batch(lambda: Count(next(singles), truncates), range(3), info_keys=("late",)), 20)
    vector = play(batch(vectorised(mode, 3, truncates), range(3), info_keys=("late",)), 20)
    for one, other in zip(expected, vector, strict=True):
        for x, y in zip(one, other, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_trees_of_observations_are_the_same_in_every_mode(mode):
    make = lambda num_envs: SyncVectorEnv([Nested] * num_envs, autoreset_mode=mode)  # noqa: E731
    action = (ONES, np.full((3, 2), 0.5, np.float32))
    for one, other in zip(
        play(batch(Nested, range(3)), 9, *action), play(batch(make, range(3)), 9, *action), strict=True
    ):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_an_async_vector_environment_resets_in_the_same_step():
    block = batch(lambda num_envs: AsyncVectorEnv([Count] * num_envs, context="spawn"), range(3))
    rows = play(block, 4)
    block.close()
    assert [row[3].all() for row in rows] == [False, False, True, False]
    assert [row[0][0, 0] for row in rows] == [1, 2, 0, 1] and rows[2][4][0, 0] == 3


class Native(VectorEnv):
    """A typical vector environment in mode NEXT_STEP: the step after an episode ignores its action and begins the next episode."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space, single_action_space = Count.observation_space, Count.action_space

    def __init__(self, num_envs, truncates=False):
        self.num_envs, self.truncates = num_envs, truncates
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # accepts a single seed only
        self.time, self.done = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        return self.observe(), {}

    def observe(self):
        return np.stack([self.time, np.arange(self.num_envs)], axis=1).astype(np.float32)

    def step(self, actions):
        self.time = np.where(self.done, 0, self.time + 1)
        reward = np.where(self.done, 0.0, actions)
        self.done = self.time >= 2 + np.arange(self.num_envs)
        no_env = np.zeros_like(self.done)
        ends = (no_env, self.done) if self.truncates else (self.done, no_env)
        return self.observe(), reward, *ends, {}


@pytest.mark.parametrize("truncates", [False, True])
def test_the_extra_step_of_mode_next_step_changes_no_return_and_no_target(truncates):
    rows = play(batch(lambda num_envs: Native(num_envs, truncates), range(3)), 12)
    obs, reward, discount, last, next_obs, episode_return, episode_length = (
        np.stack(x) for x in zip(*rows, strict=True)
    )
    for i in range(3):
        length = 2 + i
        for t in range(12):
            time = t % (length + 1) + 1  # an episode has `length` steps, and the extra step follows
            if time <= length:
                assert next_obs[t, i, 0] == obs[t, i, 0] == time
                assert (reward[t, i], episode_return[t, i], episode_length[t, i]) == (1, time, time)
                assert last[t, i] == (time == length)
                assert discount[t, i] == (1 if truncates or time < length else 0)
            else:
                # `next_obs` repeats the last observation; `obs` is the first observation of the next episode.
                assert (next_obs[t, i, 0], obs[t, i, 0]) == (length, 0)
                assert (reward[t, i], episode_return[t, i], episode_length[t, i]) == (0, 0, 0)
                assert last[t, i] and discount[t, i] == (1 if truncates else 0)


class NativeWithState(Native):
    """A `Native` whose state can be stored."""

    def state(self):
        return [{"time": time, "done": done} for time, done in zip(self.time.tolist(), self.done.tolist(), strict=True)]

    def load(self, states):
        self.time, self.done = (np.array([state[name] for state in states]) for name in ("time", "done"))


@pytest.mark.parametrize("before", range(8))
def test_a_vector_environment_continues_from_a_stored_state(before):
    assert_continues(NativeWithState, before)
    for mode in AutoresetMode:
        assert_continues(functools.partial(WanderTogether, mode=mode.value), before, info_keys=("steps",))


def test_a_vector_environment_without_state_says_so():
    block = batch(Native, range(3))
    play(block, 1)
    with pytest.raises(NoState, match="The vector environment `Native` has no methods `state` and `load`"):
        block.state()


def test_the_vector_entry_point_of_gymnasium_gives_complete_episodes():
    from choreo.host.make_batch import MakeBatch
    from choreo.host.probe import probe
    from choreo.host.sources import Source

    source = Source.of_id("CartPole-v1", {}, vector=True)
    block = MakeBatch(source=source, form=probe(source))(range(3))
    rows = play(block, 40, seed=1)
    lengths = [row[6][i] for row in rows for i in range(3) if row[3][i] and row[6][i] > 0]
    returns = [row[5][i] for row in rows for i in range(3) if row[3][i] and row[6][i] > 0]
    # All actions push to the right, so the pole soon falls.
    assert lengths == returns and 8 <= min(lengths) <= max(lengths) <= 12


def test_wrong_vector_environments_are_refused():
    class NoMode(Native):
        metadata = {}

    with pytest.raises(EnvError, match="vector environment `NoMode` does not say how it begins the next episode"):
        batch(NoMode)

    class Short(Native):
        def step(self, actions):
            return super().step(actions)[:4]

    with pytest.raises(EnvError, match="`step` of environment 0 of `Short` returned 4 values, not"):
        play(batch(Short, range(3)), 1)

    class Raises(Native):
        def step(self, actions):
            raise ValueError("out of memory")

    with pytest.raises(
        EnvError, match="One of the environments 4 to 6 of `Raises` raised ValueError in step: out of mem"
    ):
        play(batch(Raises, range(4, 7)), 1)

    class Wide(Native):
        def observe(self):
            return super().observe().astype(np.float64)

    with pytest.raises(
        EnvError, match=r"`Wide` returned observations float64\[3, 2\] where its space says float32\[3, 2\]"
    ):
        play(batch(Wide, range(3)), 1)


def test_envpool_gives_complete_episodes_that_depend_only_on_seeds():
    pytest.importorskip("envpool", reason="the extra choreo[envpool] is not installed")
    from choreo.host.envpool import make_envpool

    whole = batch(make_envpool, range(3), env_id="CartPole-v1", num_threads=1)
    rows = play(whole, 25, seed=1)
    assert any(row[3].any() for row in rows)
    for obs, reward, discount, last, next_obs, episode_return, episode_length in rows:
        assert (episode_return == episode_length).all() and (discount == 1 - last).all() and (reward == 1).all()
        assert (abs(obs[last]) <= 0.05).all() and (abs(next_obs[last, 2]) > 0.2).all()
        assert (obs[~last] == next_obs[~last]).all()
    whole.close()
    part = batch(make_envpool, range(1, 2), env_id="CartPole-v1", num_threads=1)
    token, obs = part.reset(seeds(2))
    for row in rows:
        token, obs, *_ = part.step(token, ONES[:1])
        np.testing.assert_array_equal(obs[0], row[0][1])  # results depend on the seed, not on the block
    part.close()
