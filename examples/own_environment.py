"""Train in your own Gymnasium environment with two workers. Run it as a script, or cell by cell in a notebook.

This script needs no `__main__` guard, because workers never import the script.

python examples/own_environment.py
"""

# %%
import gymnasium

import choreo


class MyEnv(gymnasium.Env):
    """A safe with `difficulty + 1` lights. In each of ten steps one light is on; an action that names this light is rewarded."""

    def __init__(self, difficulty: int):
        self.lights = difficulty + 1
        self.observation_space = gymnasium.spaces.Discrete(self.lights)
        self.action_space = gymnasium.spaces.Discrete(self.lights)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def step(self, action):
        opened = action == self.light
        self.steps += 1
        return self.look(), float(opened), False, self.steps == 10, {}

    def look(self):
        self.light = self.np_random.integers(self.lights)
        return self.light


class MyWrapper(gymnasium.RewardWrapper):
    """Scales rewards, so that the largest possible return is 1."""

    def reward(self, reward):
        return float(reward) / 10


# %%
run = choreo.train(
    choreo.PPO(unroll=32),
    lambda: MyWrapper(MyEnv(difficulty=3)),
    num_envs=8,
    layout=choreo.coarse(workers=2),
    steps=8_192,
    out="runs/safe",
    loggers=["tensorboard"],
)

# %%
print(f"Share of the largest return: {run.evaluate(episodes=50).mean:.2f}")
