"""Tasks with episodes of one step, over spaces of every kind. The best return of every task is 1.

A `Task` is one environment, with any observation space. `OneStep` makes a batch of environments from a task.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from algos.toys import as_float
from choreo.envs import TimeStep
from choreo.roles import fragment

FORBIDDEN = -1e6
"""Reward of a masked action. It is so low that a single masked action makes the mean return of an iteration negative."""


class Task(Protocol):
    observation_space: gymnasium.Space
    action_space: gymnasium.Space

    def see(self, key) -> Any:
        """The observation."""
        ...

    def pay(self, obs, action) -> jax.Array:
        """The reward of an action after this observation."""
        ...


@dataclass(frozen=True)
class OneStep:
    task: Task
    num_envs: int
    name = property(lambda self: f"toy:{type(self.task).__name__}")
    observation_space = property(lambda self: self.task.observation_space)
    action_space = property(lambda self: self.task.action_space)

    def keys(self, key):
        return jax.random.split(key, self.num_envs)

    def reset(self, keys):
        return jax.vmap(functools.partial(begin, self.task))(keys)

    def step(self, state, action):
        return jax.vmap(functools.partial(act_once, self.task))(state, action)

    def with_num_envs(self, num_envs):
        return dataclasses.replace(self, num_envs=num_envs)


@fragment("env")
def begin(task, key):
    key, key_see = jax.random.split(key)
    obs = task.see(key_see)
    return (key, obs), obs


@fragment("env")
def act_once(task, state, action):
    key, key_see = jax.random.split(state[0])
    obs, reward = task.see(key_see), task.pay(state[1], action).astype(jnp.result_type(float))
    info = {"episode_return": reward, "episode_length": jnp.int32(1)}
    return (key, obs), TimeStep(obs, reward, jnp.zeros_like(reward), jnp.bool(True), state[1], info)


@dataclass(frozen=True)
class Name:
    """The best action is the observation minus 3, so both have the same index in their spaces. Neither space begins at 0."""

    observation_space = property(lambda self: spaces.Discrete(3, start=2))
    action_space = property(lambda self: spaces.Discrete(3, start=-1))

    def see(self, key):
        return jax.random.randint(key, (), 2, 5)

    def pay(self, obs, action):
        return as_float(action == obs - 3)


@dataclass(frozen=True)
class Pieces:
    """The observation is nested. Each of its three leaves has two values. The best action repeats the leaves as three bits."""

    observation_space = property(
        lambda self: spaces.Dict(
            sign=spaces.Discrete(2, start=3),
            rest=spaces.Tuple([spaces.Box(0.0, 1.0, (1,), np.float32), spaces.Dict(flag=spaces.MultiBinary(1))]),
        )
    )
    action_space = property(lambda self: spaces.MultiBinary(3))

    def see(self, key):
        sign, level, flag = jax.random.randint(key, (3,), 0, 2)
        return {"sign": 3 + sign, "rest": (as_float(level)[None], {"flag": flag[None].astype(jnp.int8)})}

    def pay(self, obs, action):
        level, inner = obs["rest"]
        pieces = (obs["sign"] - 3, level[0], inner["flag"][0])
        return jnp.mean(as_float(action == jnp.stack([x.astype(jnp.int8) for x in pieces])))


@dataclass(frozen=True)
class Copy:
    """The best action has the same two indices as the observation. Every dimension of both spaces has a different `start`."""

    observation_space = property(lambda self: spaces.MultiDiscrete([2, 3], start=[5, -1]))
    action_space = property(lambda self: spaces.MultiDiscrete([2, 3], start=[1, 0]))

    def see(self, key):
        return jax.random.randint(key, (2,), jnp.array([5, -1]), jnp.array([7, 2]))

    def pay(self, obs, action):
        return jnp.mean(as_float(action == obs + jnp.array([-4, 1])))


@dataclass(frozen=True)
class Side:
    """The observation is an image. The best action says which half of the image is bright."""

    observation_space = property(lambda self: spaces.Box(0, 255, (4, 4, 1), np.uint8))
    action_space = property(lambda self: spaces.Discrete(2))

    def see(self, key):
        right = jax.random.bernoulli(key)
        columns = jnp.where(right, jnp.array([0, 0, 200, 255]), jnp.array([255, 200, 0, 0])).astype(jnp.uint8)
        return jnp.broadcast_to(columns[None, :, None], (4, 4, 1))

    def pay(self, obs, action):
        return as_float(action == (obs[0, 3, 0] > 0).astype(jnp.int32))


@dataclass(frozen=True)
class Highest:
    """The best action is the highest allowed number. In half of the episodes, the highest number of all is masked."""

    observation_space = property(
        lambda self: spaces.Dict(action_mask=spaces.MultiBinary(4), nothing=spaces.Box(1.0, 1.0, (1,), np.float32))
    )
    action_space = property(lambda self: spaces.Discrete(4, start=1))

    def see(self, key):
        allowed = jnp.array([1, 1, 1, 0]) + jax.random.bernoulli(key).astype(jnp.int32) * jnp.array([0, 0, 0, 1])
        return {"action_mask": allowed.astype(jnp.int8), "nothing": jnp.ones(1, jnp.result_type(float))}

    def pay(self, obs, action):
        mask = obs["action_mask"].astype(bool)
        best = jnp.max(jnp.where(mask, jnp.arange(1, 5), 0))
        return jnp.where(mask[action - 1], as_float(action == best), FORBIDDEN)


@dataclass(frozen=True)
class HighestOfTwo:
    """`Highest` with actions of two dimensions: the first has 2 numbers, the second 3. The mask is a Box."""

    observation_space = property(
        lambda self: spaces.Dict(
            action_mask=spaces.Box(0, 1, (5,), np.float32), nothing=spaces.Box(1.0, 1.0, (1,), np.float32)
        )
    )
    action_space = property(lambda self: spaces.MultiDiscrete([2, 3]))

    def see(self, key):
        one, other = jax.random.bernoulli(key, shape=(2,))
        allowed = as_float(jnp.stack([jnp.bool(True), one, jnp.bool(True), other, other]))
        return {"action_mask": allowed, "nothing": jnp.ones(1, jnp.result_type(float))}

    def pay(self, obs, action):
        one, other = obs["action_mask"][:2] > 0, obs["action_mask"][2:] > 0
        paid = as_float(action == jnp.stack([one[1].astype(jnp.int32), 2 * other[2].astype(jnp.int32)]))
        return jnp.where(one[action[0]] & other[action[1]], jnp.mean(paid), FORBIDDEN)
