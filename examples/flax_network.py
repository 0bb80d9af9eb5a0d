"""Train PPO with a Flax network: `python examples/flax_network.py`.

PPO takes a factory `(observation_space, action_space, key) -> module`. The module must be a pytree that can be called as
`module(obs) -> (pi, value)`. Flax keeps a module and its parameters apart, so a small class holds both.
"""

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import tyro

import choreo
from choreo.algos import PPO
from choreo.ops import Categorical


class Torso(nn.Module):
    """Hidden layers that actor and critic share, with an output layer for the actor and an output layer for the critic."""

    num_actions: int

    @nn.compact
    def __call__(self, obs):
        x = nn.tanh(nn.Dense(64)(obs))
        x = nn.tanh(nn.Dense(64)(x))
        logits = nn.Dense(self.num_actions, kernel_init=nn.initializers.orthogonal(0.01))(x)
        return logits, nn.Dense(1)(x)[0]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["variables"], meta_fields=["module"])
@dataclass(frozen=True)
class FlaxNetwork:
    """A Flax module with its variables: a pytree whose leaves are the variables."""

    variables: Any
    module: nn.Module

    def __call__(self, obs):
        logits, value = self.module.apply(self.variables, obs)
        return Categorical(logits), value


def flax_network(observation_space, action_space, key):
    module = Torso(num_actions=int(action_space.n))
    return FlaxNetwork(module.init(key, jnp.zeros(observation_space.shape)), module)


def main(steps: int = 300_000, seed: int = 0) -> None:
    """Train PPO with a Flax network on CartPole."""
    run = choreo.train(PPO(network=flax_network), "jax:CartPole-v1", layout=choreo.fused(), steps=steps, seed=seed)
    print(run.evaluate(episodes=100))


if __name__ == "__main__":
    tyro.cli(main)
