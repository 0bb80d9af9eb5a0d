"""With worker processes, PPO learns to act in environments whose observations or actions have several parts.

The best return of both toys is known. A policy must use several parts of an observation to reach this return.
"""

import gymnasium
import numpy as np
import pytest

import choreo

LENGTH = 8
"""The number of steps of an episode, which is also the best return of both toys."""


class Toy(gymnasium.Env):
    """A contextual bandit: the observation of each step is independent of the steps before."""

    def ask(self):
        """The next observation."""
        raise NotImplementedError

    def answer(self, action) -> float:
        """The reward of the action for the last observation."""
        raise NotImplementedError

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.ask(), {}

    def step(self, action):
        reward, self.steps = self.answer(action), self.steps + 1
        return self.ask(), reward, False, self.steps == LENGTH, {}


class Signs(Toy):
    """The right action is 2 * (1 if the number is positive, else 0) + (1 if the lamp is on, else 0). It gives a reward of 1. All
    other actions give 0.

    The two other bits of the observation are noise.
    """

    observation_space = gymnasium.spaces.Dict(
        number=gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32),
        lamp=gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2), gymnasium.spaces.MultiBinary(2)]),
    )
    action_space = gymnasium.spaces.Discrete(4)

    def ask(self):
        number, lamp = self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32), int(self.np_random.integers(2))
        self.right = 2 * int(number[0] > 0) + lamp
        return {"number": number, "lamp": (lamp, self.np_random.integers(2, size=2, dtype=np.int8))}

    def answer(self, action):
        return float(action == self.right)


class Dials(Toy):
    """The observation shows a number for each of three dials. The action sets the dials. Each dial that is set to its number
    adds 1/3 to the reward."""

    observation_space = gymnasium.spaces.MultiDiscrete([2, 3, 4])
    action_space = gymnasium.spaces.MultiDiscrete([2, 3, 4])

    def ask(self):
        self.shown = self.np_random.integers([2, 3, 4])
        return self.shown

    def answer(self, action):
        assert action.shape == (3,)
        return float(np.mean(action == self.shown))


@pytest.mark.parametrize("toy", [Signs, Dials])
@pytest.mark.parametrize(
    "layout",
    # CI runs only the layout whose workers start fastest.
    [choreo.fine(workers=1), pytest.param(choreo.coarse(workers=2), marks=pytest.mark.long)],
    ids=["fine", "coarse"],
)
def test_ppo_almost_reaches_the_best_return_of_a_toy(toy, layout):
    run = choreo.train(
        choreo.PPO(unroll=32, minibatch_size=64, gamma=0.0),
        toy,
        num_envs=8,
        layout=layout,
        runtime="local",
        steps=8_192,
        seed=0,
    )
    # The mean return of a policy that chooses actions at random.
    chance = {Signs: LENGTH / 4, Dials: LENGTH * (1 / 2 + 1 / 3 + 1 / 4) / 3}[toy]
    assert run.metrics["episode_return"][0] == pytest.approx(chance, abs=1.2)
    assert run.evaluate(episodes=64).mean >= 0.95 * LENGTH
