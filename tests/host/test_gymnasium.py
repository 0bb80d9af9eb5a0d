"""A batch of Gymnasium environments: the rules for a TimeStep, types, seeds, stored states, and errors."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import (
    ClipReward,
    FrameStackObservation,
    NormalizeReward,
    OrderEnforcing,
    PassiveEnvChecker,
    TimeLimit,
    TransformObservation,
)

from choreo.errors import EnvError, UnknownNameError
from choreo.host.states import NoState
from host.toys import Count, Faulty, Masked, Nested, Wander, assert_continues, batch, play, seeds


@pytest.mark.parametrize("truncates", [False, True])
def test_an_episode_ends_and_the_next_begins_in_the_same_step(truncates):
    block = batch(Count, truncates=truncates)
    rows = play(block, 7)
    for t, (obs, reward, discount, last, next_obs, episode_return, episode_length) in enumerate(rows, start=1):
        ends = t % 3 == 0
        assert (obs[:, 0] == t % 3).all()
        assert (next_obs[:, 0] == (3 if ends else t % 3)).all()
        assert (next_obs is obs) == (not ends)
        assert (last == ends).all()
        assert (discount == (0 if ends and not truncates else 1)).all()
        assert (reward == 1).all()
        assert (episode_return == (t - 1) % 3 + 1).all() and (episode_length == (t - 1) % 3 + 1).all()
    types = [x.dtype for x in rows[0]]
    assert types == [np.float32, np.float32, np.float32, np.bool_, np.float32, np.float32, np.int32]


def test_results_of_a_call_are_never_changed_later():
    block = batch(Count)
    token, *_ = block.reset(np.arange(len(block.envs)))
    given, copies = [], []
    for _ in range(7):  # episodes have 3 steps
        token, *row = block.step(token, np.zeros(len(block.envs), np.int32))
        given += row
        copies += [x.copy() for x in row]
    block.reset(np.arange(len(block.envs)))
    assert all((x == y).all() for x, y in zip(given, copies, strict=True))


def test_episodes_of_different_environments_end_at_different_times():
    lengths = iter([2, 3])
    block = batch(
        lambda: Count(length=next(lengths, 2)), range(2)
    )  # `probe` makes an environment of length 2; then the batch makes two, of lengths 3 and 2
    rows = play(block, 6)
    assert [row[3].tolist() for row in rows] == [[t % 3 == 0, t % 2 == 0] for t in range(1, 7)]
    assert [row[6].tolist() for row in rows][2:4] == [[3, 1], [1, 2]]


def test_episodes_do_not_depend_on_the_division_into_blocks():
    whole = play(batch("CartPole-v1", range(4)), 60)
    parts = [play(batch("CartPole-v1", range(i, i + 2)), 60, seed=i) for i in (0, 2)]
    for row, left, right in zip(whole, *parts, strict=True):
        for x, a, b in zip(row, left, right, strict=True):
            np.testing.assert_array_equal(x, np.concatenate([a, b]))
    assert whole[-1][3].shape == (4,) and any(row[3].any() for row in whole)


def test_a_batch_takes_the_same_steps_as_gymnasium():
    env, block = (
        gymnasium.make("CartPole-v1", max_episode_steps=15),
        batch("CartPole-v1", range(1), max_episode_steps=15),
    )
    expected, (token, obs) = env.reset(seed=7)[0], block.reset(seeds(7))
    rng = np.random.default_rng(0)
    ends = set()
    for _ in range(100):
        np.testing.assert_array_equal(obs[0], expected)
        action = rng.integers(2)
        expected, reward, terminated, truncated, _ = env.step(action)
        token, obs, rewards, discount, last, next_obs, _, _ = block.step(token, np.array([action], np.int32))
        np.testing.assert_array_equal(next_obs[0], expected)
        assert (rewards[0], discount[0], last[0]) == (reward, not terminated, terminated or truncated)
        if terminated or truncated:
            ends.add((terminated, truncated))
            expected, _ = env.reset()
    assert len(ends) == 2, "the test needs both a termination and a truncation"


def test_time_limits_outside_and_inside_of_other_wrappers_end_episodes():
    block = batch(lambda: TimeLimit(ClipReward(TimeLimit(Count(length=9), 4), 0, 0.5), 2))
    rows = play(block, 4)
    assert [row[3][0] for row in rows] == [False, True, False, True]
    assert all(row[2][0] == 1 and row[1][0] == 0.5 for row in rows)
    inner = play(batch(lambda: ClipReward(TimeLimit(Count(length=9), 2), 0, 0.5)), 4)
    assert [row[3][0] for row in inner] == [False, True, False, True]


def test_the_checker_of_gymnasium_runs_in_the_first_episode_only(monkeypatch):
    calls = []
    step = PassiveEnvChecker.step
    monkeypatch.setattr(PassiveEnvChecker, "step", lambda self, action: calls.append(action) or step(self, action))
    rows = play(batch(lambda: PassiveEnvChecker(ClipReward(Count(length=3), 0, 0.5)), range(1)), 8)
    assert [row[3][0] for row in rows] == [False, False, True, False, False, True, False, False]
    assert len(calls) == 3, "the checker was called after the first episode, or was never called"


def test_wrappers_are_applied():
    block = batch(lambda: FrameStackObservation(NormalizeReward(Count()), 3))
    (row, *_) = play(block, 1)
    assert row[0].shape == (2, 3, 2) and (row[0][0, :, 0] == [0, 0, 1]).all()


def test_box_actions_are_clipped_and_copied():
    seen = []

    class Keeps(Count):
        action_space = spaces.Box(-2, 2, (1,), np.float32)

        def step(self, action):
            seen.append(action)
            return super().step(float(action[0]))

    actions = np.array([[9.0], [-9.0]], np.float32)
    (row,) = play(batch(Keeps), 1, actions)
    actions.fill(1)
    assert row[1].tolist() == [2, -2]
    assert [x.tolist() for x in seen] == [[2], [-2]] and seen[0].dtype == np.float32


def test_a_discrete_action_is_an_int_with_the_attributes_of_a_numpy_integer():
    seen = []

    class Keeps(Count):
        action_space = spaces.Discrete(3, start=5)

        def step(self, action):
            seen.append(action)
            assert self.action_space.contains(action)
            return super().step(action)

    play(batch(Keeps), 1, np.array([5, 7], np.int32))
    assert seen == [5, 7] and isinstance(seen[0], int)
    assert (seen[1].item(), seen[1].dtype, seen[1].shape) == (7, np.int64, ())


def test_observations_and_actions_may_be_trees():
    block = batch(Nested)
    push, jump = np.array([[0.5, 9.0], [0.0, -9.0]], np.float32), np.array([1, 3], np.int32)
    token, *obs = block.reset(seeds(0, 1))
    leaves = [("int32", (2,)), ("int8", (2, 3)), ("uint8", (2, 4, 4, 1)), ("int32", (2, 2)), ("float32", (2, 2, 2))]
    assert [(x.dtype.name, x.shape) for x in obs] == leaves  # sorted by key: a[0], a[1], image, m, z
    for t in range(1, 5):
        token, number, bits, image, multi, box, reward, discount, last, *more = block.step(token, jump, push)
        assert reward.tolist() == [2.5, 2.0]
        assert (number == t % 4 - 3).all() and (image == t % 4).all()
        assert (multi == [1, 3]).all() and (bits == [1, 0, 1]).all() and (box == 0.25).all()
        assert (last == (t == 4)).all()
    assert (more[0] == 1).all() and (more[2] == 4).all()  # next_obs belongs to the episode that has ended


def test_a_wide_batch_keeps_types_of_64_bits():
    token, *obs = batch(Nested, wide=True).reset(seeds(0, 1))
    assert [x.dtype.name for x in obs] == ["int64", "int8", "uint8", "int64", "float64"]


@pytest.mark.parametrize("name, types", [
    ("FrozenLake-v1", ["int32"]),
    ("Blackjack-v1", ["int32"] * 3),
    ("Pendulum-v1", ["float32"]),
    ("Taxi-v4", ["int8", "int32"]),
])  # fmt: skip
def test_observations_of_gymnasium_get_types_of_at_most_32_bits(name, types):
    block = batch(name, range(3))
    low = np.zeros((3, 1), np.float32) if name == "Pendulum-v1" else np.zeros(3, np.int32)
    token, *obs = block.reset(seeds(1, 2, 3))
    assert [x.dtype.name for x in obs] == types
    rows = play(block, 30, low)
    assert all(row[0].shape[0] == 3 for row in rows)
    block.close()


def test_the_action_mask_in_info_becomes_part_of_the_observation():
    block = batch(Masked)
    assert sorted(block.form.observation_space.spaces) == ["action_mask", "obs"]
    token, mask, obs = block.reset(seeds(0, 1))
    assert mask.tolist() == [[1, 0, 0, 0, 0]] * 2 and mask.dtype == np.int8
    for t in range(1, 4):
        token, mask, obs, _, _, last, next_mask, next_obs, *_ = block.step(token, np.zeros(2, np.int32))
        assert mask.sum(1).tolist() == [t % 3 + 1] * 2 and next_mask.sum(1).tolist() == [t + 1] * 2
        assert (next_obs[:, 0] == t).all()


def test_a_missing_action_mask_is_refused():
    class Forgets(Masked):
        def step(self, action):
            obs, *rest, info = super().step(action)
            return obs, *rest, {}

    with pytest.raises(
        EnvError, match=r"`step` of environment 0 of `Forgets` returned .*without info\['action_mask'\]"
    ):
        play(batch(Forgets), 1)


def test_info_keys_hold_the_numbers_of_the_running_episode():
    rows = play(batch(Count, info_keys=("time", "late", "never")), 4)
    seen = [[x[0] for x in row[-3:]] for row in rows]
    assert seen == [[1, 0, 0], [2, 1, 0], [3, 1, 0], [1, 0, 0]]
    assert rows[0][-1].dtype == np.float32


def test_an_info_that_is_not_a_number_is_refused():
    class Wordy(Count):
        def step(self, action):
            obs, *rest, info = super().step(action)
            return obs, *rest, {"word": "yes"}

    with pytest.raises(
        EnvError, match=r"`step` of environment 0 of `Wordy` returned a str as info\['word'\], not a number"
    ):
        play(batch(Wordy, info_keys=("word",)), 1)


FAULTS = {
    "raise": "Environment 5 of `Faulty` raised ValueError in step: the motor is on fire",
    "raise in reset": "Environment 5 of `Faulty` raised ZeroDivisionError in reset: no more episodes",
    "shape": r"`step` of environment 5 of `Faulty` returned an observation float32\[1\] where its space says float32\[2\]",
    "dtype": r"`step` of environment 5 of `Faulty` returned an observation float64\[2\] where its space says float32\[2\]",
    "list": r"`step` of environment 5 of `Faulty` returned an observation a list where its space says float32\[2\]",
    "nan": "`step` of environment 5 of `Faulty` returned NaN in its observation",
    "nan reward": "`step` of environment 5 of `Faulty` returned NaN as its reward",
    "array reward": r"`step` of environment 5 of `Faulty` returned an array float64\[1\] as reward, not a number",
    "no reward": "`step` of environment 5 of `Faulty` returned NaN as its reward",
    "four": r"`step` of environment 5 of `Faulty` returned 4 values, not \(obs, reward, terminated, truncated, info\)",
    "none": "`step` of environment 5 of `Faulty` returned a NoneType, not",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_names_the_environment(fault):
    block = batch(Faulty, range(4, 7), fault=fault, seed=11)
    with pytest.raises(EnvError, match=FAULTS[fault]) as error:
        play(block, 6, seed=10)
    if "raise" in fault:
        assert "toys.py" in str(error.traceback[-1].path) or error.value.__cause__ is not None
        assert isinstance(error.value.__cause__, ValueError | ZeroDivisionError)


def test_without_a_fault_there_is_no_error():
    assert len(play(batch(Faulty, range(4, 7), fault="nothing"), 6)) == 6


def test_current_is_the_number_of_the_running_environment():
    numbers = []

    class Watched(Count):
        def step(self, action):
            numbers.append(block.current)
            return super().step(action)

    block = batch(Watched, range(3, 6))
    play(block, 1)
    assert numbers == [3, 4, 5] and block.current is None


def test_a_stale_token_is_refused():
    """A token holds the number of steps so far. `reset` and `step` return it, and the next `step` needs it."""
    block = batch(Count)
    with pytest.raises(EnvError, match="asked to continue from step 0, but its environments have not been reset"):
        block.step(np.zeros(2, np.int32), np.zeros(2, np.int32))
    token, _ = block.reset(seeds(0, 1))
    later, *_ = block.step(token, np.zeros(2, np.int32))
    with pytest.raises(EnvError, match=r"from step 0, but its environments have taken 1 steps\. .* cannot go back"):
        block.step(token, np.zeros(2, np.int32))
    block.step(later, np.zeros(2, np.int32))
    again, _ = block.reset(seeds(0, 1))
    assert again.tolist() == [0, 0]


class Remembering(gymnasium.Wrapper):
    """A wrapper with a state. `state` returns this state together with the state of the wrapped environment."""

    def __init__(self, env):
        super().__init__(env)
        self.total = 0.0

    def step(self, action):
        obs, reward, *rest = self.env.step(action)
        self.total += reward
        return obs, self.total, *rest

    def state(self):
        return {"total": self.total, "env": self.unwrapped.state()}

    def load(self, state):
        self.total = state["total"]
        self.unwrapped.load(state["env"])


@pytest.mark.parametrize("before", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize(
    "factory",
    [
        Wander,
        lambda: TimeLimit(OrderEnforcing(PassiveEnvChecker(Wander())), 4),
        lambda: PassiveEnvChecker(TimeLimit(TimeLimit(Wander(), 7), 4)),
        lambda: TimeLimit(Remembering(Wander()), 4),
    ],
    ids=["bare", "as gymnasium.make", "time limit inside", "wrapper with a state"],
)
def test_a_batch_continues_from_a_stored_state(factory, before):
    assert_continues(factory, before, info_keys=("steps",))
    assert_continues(factory, before, wide=True)


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (Count, "`Count` of `Count` has no methods `state` and `load`"),
        ("CartPole-v1", "`CartPoleEnv` of `CartPole-v1` has no methods `state` and `load`"),
        (lambda: TimeLimit(ClipReward(Wander(), 0, 1), 9), "`ClipReward` of `.*` has no methods `state` and `load`"),
    ],
)
def test_a_batch_without_its_whole_state_says_so(factory, why):
    block = batch(factory)
    play(block, 1)
    with pytest.raises(NoState, match=why):
        block.state()
    with pytest.raises(NoState, match=why):
        block.load([{"token": 1, "began": 0, "return": 0.0, "info": [], "env": None}] * 2)
    with pytest.raises(NoState, match="has not been reset"):
        batch(Wander).state()


def test_an_error_of_state_or_load_names_the_environment():
    class Broken(Wander):
        def load(self, state):
            raise KeyError("position")

    block = batch(Broken, range(4, 6))
    play(block, 1)
    with pytest.raises(EnvError, match="Environment 4 of `Broken` raised KeyError in load: 'position'"):
        block.load(block.state())
    del block.members[1].random
    with pytest.raises(EnvError, match="Environment 5 of `Broken` raised AttributeError in state"):
        block.state()


def test_close_closes_every_environment():
    made = []

    def make():
        made.append(Count())
        return made[-1]

    block = batch(make, range(3))
    # `probe` made the first environment, and has already closed it.
    assert [env.closed for env in made] == [True, False, False, False]
    block.close()
    assert all(env.closed for env in made)


@pytest.mark.parametrize("make, message", [
    (lambda: 3, "`lambda at test_gymnasium.py:.*` made a int, which is neither a gymnasium.Env nor a choreo.envs.JaxEnv"),
    (lambda: 1 / 0, "could not be made: ZeroDivisionError: division by zero"),
    (lambda: gymnasium.make_vec("CartPole-v1", 2), "made a vector environment of 2 environments, but takes no argument `num_envs`"),
    (lambda: TransformObservation(Count(), str, spaces.Text(5)), "The observation of .* has a Text space, which has no fixed"),
    (lambda: TransformObservation(Count(), str, spaces.Dict(a=spaces.Tuple([spaces.Sequence(spaces.Discrete(2))]))),
     r"has a Sequence space at \['a'\]\[0\]"),
    (gymnasium.Env, "The `observation_space` of `Env` is None, which is not a Gymnasium space"),
])  # fmt: skip
def test_unusable_environments_are_refused(make, message):
    with pytest.raises(EnvError, match=message):
        batch(make)


def test_an_unknown_id_gets_suggestions():
    with pytest.raises(UnknownNameError, match="There is no environment `CartPol-v1`") as error:
        batch("CartPol-v1")
    assert "`CartPole-v1`" in str(error.value)
    with pytest.raises(UnknownNameError, match="There is no environment `Xyzzy99-v3`.\n.*`package:Id-v0`"):
        batch("Xyzzy99-v3")
    with pytest.raises(EnvError, match="There is no module `nowhere` for `nowhere:Id-v0`"):
        batch("nowhere:Id-v0")
    with pytest.raises(EnvError, match="`CartPole-v1` could not be made: TypeError: .*gravity"):
        batch("CartPole-v1", gravity=1.0)
