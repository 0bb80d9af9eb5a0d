"""Tasks whose best return can be computed by hand. Each task is a `JaxEnv`, which is one environment without a batch axis."""

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


def as_float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.result_type(float))


@dataclass(frozen=True)
class Match:
    """Episodes of one step. The observation is one of three signs, and the best action is the number of this sign.

    The best return is 1. The mean return of random actions is 1/3.
    """

    name: str = "toy:Match"
    time_limit: int | None = None
    observation_space = property(lambda self: box(3))
    action_space = property(lambda self: gymnasium.spaces.Discrete(3))

    def reset(self, key):
        sign = jax.random.randint(key, (), 0, 3)
        return sign, one_hot(sign, 3)

    def step(self, sign, action, key):
        return sign, EnvStep(one_hot(sign, 3), as_float(action == sign), jnp.ones((), bool))


@dataclass(frozen=True)
class TwoStep:
    """Episodes of two steps. The first action leads to the left (0) or to the right (1).

    On the left, any second action pays 0.5. On the right, action 0 pays 1, and action 1 pays 0. The best return is 1.
    """

    name: str = "toy:TwoStep"
    time_limit: int | None = None
    observation_space = property(lambda self: box(3))
    action_space = property(lambda self: gymnasium.spaces.Discrete(2))

    def reset(self, key):
        return jnp.int32(0), one_hot(jnp.int32(0), 3)

    def step(self, place, action, key):
        start, right = place == 0, place == 2
        paid = jnp.where(right, as_float(action == 0), 0.5)
        reward = jnp.where(start, 0.0, paid)
        place = jnp.where(start, 1 + action, place)
        return place, EnvStep(one_hot(place, 3), reward, ~start)


@dataclass(frozen=True)
class Aim:
    """Episodes of one step. The action is a number, and the best action is the observation divided by 2. The best return is 0."""

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
    """Episodes of two steps. Only the first observation shows a sign, and the best second action is the number of this sign.

    The best return is 1. Without memory, the mean return is 1/2.
    """

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
        return (sign, t + 1), EnvStep(jnp.zeros(2, jnp.result_type(float)), as_float(over & (action == sign)), over)


@dataclass(frozen=True)
class Income:
    """Every step pays 1 for any action. Only the time limit ends an episode, so the value is 1 / (1 - gamma)."""

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
    """One of several tasks. The array `which` chooses the task, so that one compiled program serves all of them.

    Observations are padded with zeros to the length of the longest observation. The action space is that of the first task.
    """

    which: jax.Array
    tasks: tuple[JaxEnv, ...]
    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    name = property(lambda self: "toy:OneOf")
    time_limit = property(lambda self: max(task.time_limit or 0 for task in self.tasks))

    def reset(self, key):
        states, obs = zip(*(task.reset(key) for task in self.tasks), strict=True)
        return states, self.chosen([self.padded(x) for x in obs])

    def step(self, states, action, key):
        pairs = [task.step(state, action, key) for task, state in zip(self.tasks, states, strict=True)]
        states, steps = zip(*pairs, strict=True)
        obs = self.chosen([self.padded(step.obs) for step in steps])
        return states, EnvStep(obs, self.chosen([x.reward for x in steps]), self.chosen([x.terminated for x in steps]))

    def chosen(self, each):
        """The element of `each` that belongs to the chosen task."""
        return jnp.stack(each)[self.which]

    def padded(self, obs):
        return jnp.pad(obs, (0, self.observation_space.shape[0] - obs.size))


DISCRETE = {"match": Match(), "two_step": TwoStep(), "recall": Recall(), "income": Income()}


def one_of(tasks: dict[str, JaxEnv], which: jax.Array, num_envs: int) -> VmapEnv:
    each = tuple(tasks.values())
    longest = max((task.observation_space for task in each), key=lambda space: space.shape)
    return batch(OneOf(which, each, longest, each[0].action_space), num_envs)


def batch(env, num_envs: int) -> VmapEnv:
    return VmapEnv(env=env, num_envs=num_envs)
