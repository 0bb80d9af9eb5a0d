"""A small program whose edges can be counted by hand. It has a loop in a loop, and a non-standard role (`planner`)."""

from dataclasses import dataclass
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

import choreo


class Carry(NamedTuple):
    train: jax.Array
    """Parameters; f32[3], 12 bytes."""
    place: jax.Array
    """Positions, one per environment; f32[2], 8 bytes."""


@dataclass(frozen=True)
class Line:
    """Environments on a line. They have no `step`: the program calls the fragment `move` instead."""

    num_envs: int = 2
    name: str = "toy:Line"
    observation_space = property(lambda self: gymnasium.spaces.Box(-1, 1, (1,), np.float32))
    action_space = property(lambda self: gymnasium.spaces.Discrete(2))

    def with_num_envs(self, num_envs: int) -> "Line":
        return Line(num_envs)


@choreo.fragment("env")
def move(place: jax.Array, push: jax.Array) -> jax.Array:
    return place + push


@choreo.fragment("planner")
def think(train: jax.Array, thought: jax.Array) -> jax.Array:
    return thought * train[0]


@choreo.fragment("learner")
def learn(train: jax.Array, path: jax.Array) -> jax.Array:
    return train + jnp.mean(path)


@choreo.fragment("learner")
def shrink(train: jax.Array) -> jax.Array:
    return 0.5 * train


@dataclass(frozen=True, kw_only=True)
class Nested:
    """Each iteration takes 5 steps in the environments. Before each step, `think` runs 3 times."""

    unroll: int = 5

    def init(self, env, key):
        return Carry(jnp.ones(3, jnp.float32), jnp.zeros(env.num_envs, jnp.float32))

    def iterate(self, env, carry, key):
        def ponder(thought, _):
            return think(carry.train, thought), None

        def step(place, _):
            thought, _ = jax.lax.scan(ponder, place, length=3)
            place = move(place, -thought)  # the minus is glue between two fragments
            return place, place

        place, path = jax.lax.scan(step, carry.place, length=self.unroll)
        train = learn(carry.train, path)
        return Carry(shrink(train), place), {"length": jnp.sum(path)}
