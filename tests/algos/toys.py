"""Tasks so small that their best return can be computed by hand. Each is a `JaxEnv`: one environment."""

import functools
from dataclasses import dataclass

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from choreo.envs import EnvStep, JaxEnv, VmapEnv


def box(num: int) -> gymnasium.spaces.Box:
    return gymnasium.spaces.Box(-1.0, 1.0, (num,), np.float32)


def one_hot(i: jax.Array, num: int) -> jax.Array:
    return jax.nn.one_hot(i, num, dtype=jnp.result_type(float))


def number(x: jax.Array) -> jax.Array:
    return x.astype(jnp.result_type(float))


@dataclass(frozen=True)
class Match:
    """One step: see one of three signs, name it. Best: 1; blind: 1/3."""

    name: str = "toy:Match"
    time_limit: int | None = None
    observation_space = property(lambda self: box(3))
    action_space = property(lambda self: gymnasium.spaces.Discrete(3))

    def reset(self, key):
        sign = jax.random.randint(key, (), 0, 3)
        return sign, one_hot(sign, 3)

    def step(self, sign, action, key):
        return sign, EnvStep(one_hot(sign, 3), number(action == sign), jnp.ones((), bool))


@dataclass(frozen=True)
class TwoStep:
    """The first action leads left (0) or right (1); the second pays 0.5 on the left, and on the right 1 for action 0. Best: 1."""

    name: str = "toy:TwoStep"
    time_limit: int | None = None
    observation_space = property(lambda self: box(3))
    action_space = property(lambda self: gymnasium.spaces.Discrete(2))

    def reset(self, key):
        return jnp.int32(0), one_hot(jnp.int32(0), 3)

    def step(self, place, action, key):
        start, right = place == 0, place == 2
        paid = jnp.where(right, number(action == 0), 0.5)
        reward = jnp.where(start, 0.0, paid)
        place = jnp.where(start, 1 + action, place)
        return place, EnvStep(one_hot(place, 3), reward, ~start)


@dataclass(frozen=True)
class Aim:
    """One step, continuous: the best action is half of the observation. Best: 0."""

    name: str = "toy:Aim"
    time_limit: int | None = None
    observation_space = property(lambda self: box(1))
    action_space = property(lambda self: box(1))

    def reset(self, key):
        target = jax.random.uniform(key, (1,), minval=-1.0, maxval=1.0)
        return target, target

    def step(self, target, action, key):
        return target, EnvStep(target, -((action[0] - target[0] / 2) ** 2), jnp.ones((), bool))


@dataclass(frozen=True)
class Recall:
    """See a sign, then nothing, then name the sign. Best: 1; without memory: 1/2."""

    name: str = "toy:Recall"
    time_limit: int | None = None
    observation_space = property(lambda self: box(2))
    action_space = property(lambda self: gymnasium.spaces.Discrete(2))

    def reset(self, key):
        sign = jax.random.randint(key, (), 0, 2)
        return (sign, jnp.int32(0)), one_hot(sign, 2)

    def step(self, state, action, key):
        sign, t = state
        over = t == 1
        return (sign, t + 1), EnvStep(jnp.zeros(2, jnp.result_type(float)), number(over & (action == sign)), over)


@dataclass(frozen=True)
class Income:
    """Every step pays 1 for any action; only the time limit ends an episode. The value is 1 / (1 - gamma)."""

    name: str = "toy:Income"
    time_limit: int | None = 5
    observation_space = property(lambda self: box(1))
    action_space = property(lambda self: gymnasium.spaces.Discrete(2))

    def reset(self, key):
        return jnp.int32(0), jnp.ones(1, jnp.result_type(float))

    def step(self, state, action, key):
        return state, EnvStep(
            jnp.ones(1, jnp.result_type(float)), jnp.ones((), jnp.result_type(float)), jnp.zeros((), bool)
        )


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["which"], meta_fields=["tasks", "observation_space", "action_space"]
)
@dataclass(frozen=True)
class OneOf:
    """One of several tasks, chosen by the array `which`, so that one compiled program serves all of them.

    Observations are padded with zeros to the longest; all tasks have the action space of the first.
    """

    which: jax.Array
    tasks: tuple[JaxEnv, ...]
    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    name = property(lambda self: "toy:OneOf")
    time_limit = property(lambda self: max(task.time_limit or 0 for task in self.tasks))

    def reset(self, key):
        states, obs = zip(*(task.reset(key) for task in self.tasks), strict=True)
        return states, self.chosen([self.filled(x) for x in obs])

    def step(self, states, action, key):
        pairs = [task.step(state, action, key) for task, state in zip(self.tasks, states, strict=True)]
        states, steps = zip(*pairs, strict=True)
        obs = self.chosen([self.filled(step.obs) for step in steps])
        return states, EnvStep(obs, self.chosen([x.reward for x in steps]), self.chosen([x.terminated for x in steps]))

    def chosen(self, each):
        return jnp.stack(each)[self.which]

    def filled(self, obs):
        return jnp.pad(obs, (0, self.observation_space.shape[0] - obs.size))


DISCRETE = {"match": Match(), "two_step": TwoStep(), "recall": Recall(), "income": Income()}


def one_of(tasks: dict[str, JaxEnv], which: jax.Array, num_envs: int) -> VmapEnv:
    each = tuple(tasks.values())
    longest = max((task.observation_space for task in each), key=lambda space: space.shape)
    return batch(OneOf(which, each, longest, each[0].action_space), num_envs)


def batch(env, num_envs: int) -> VmapEnv:
    return VmapEnv(env=env, num_envs=num_envs)
