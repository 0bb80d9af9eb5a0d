"""Networks for values of Discrete actions.

A *factory* `(observation_space, action_space, key, *, atoms, dueling) -> module` builds a network; the module is any pytree of
arrays with

    module(obs) -> [action, atom]         for one environment

A single atom is the value of the action. Several atoms describe the distribution of the action's return. The algorithm decides how
the atoms do this: as logits of fixed values, or as quantiles.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
from gymnasium import spaces

from choreo.envs.spaces import Encoder, check_action_mask, encoder
from choreo.errors import AlgorithmError
from choreo.networks.dense import apply_relu, layers, linear
from choreo.types import Key, PyTree

QFactory = Callable[..., Any]
"""Builds a network: (observation_space, action_space, key, *, atoms, dueling) -> module."""


def q_mlp(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    *,
    atoms: int = 1,
    dueling: bool = False,
    hidden: Sequence[int] = (128, 128),
) -> "QNetwork":
    """ReLU layers on vectors."""
    key_torso, key_head = jax.random.split(key)
    encode = encoder(observation_space)
    widths = (encode.size, *hidden)
    torso = Layers(encode, layers(key_torso, widths))
    return QNetwork(torso, q_head(observation_space, action_space, key_head, widths[-1], atoms, dueling=dueling))


class QNetwork(eqx.Module):
    """From an observation to [action, atom]."""

    torso: Callable[[PyTree], jax.Array]
    """From an observation to features."""
    head: "QHead"

    def __call__(self, obs: PyTree) -> jax.Array:
        return self.head(self.torso(obs))


class Layers(eqx.Module):
    """From an observation to features: the torso of `q_mlp`."""

    encode: Encoder
    layers: tuple[eqx.nn.Linear, ...]

    def __call__(self, obs: PyTree) -> jax.Array:
        return apply_relu(self.layers, self.encode(obs))


class QHead(eqx.Module):
    """From features to [action, atom]."""

    advantage: eqx.nn.Linear
    value: eqx.nn.Linear | None
    """The value of the state, which all actions share (Wang et al. 2016, eq. 9); None if the head is not dueling."""
    atoms: int = eqx.field(static=True)

    def __call__(self, features: jax.Array) -> jax.Array:
        advantage = self.advantage(features).reshape(-1, self.atoms)
        if self.value is None:
            return advantage
        return self.value(features)[None] + advantage - jnp.mean(advantage, axis=0, keepdims=True)


def q_head(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    width: int,
    atoms: int,
    *,
    dueling: bool,
) -> QHead:
    """The head for a Discrete action space, on features of length `width`."""
    check_action_mask(observation_space, action_space)
    if not isinstance(action_space, spaces.Discrete):
        raise AlgorithmError(
            f"Action values need a Discrete action space, not {action_space}.",
            fix="Use ddpg, td3 or sac for a Box; ppo, a2c or impala for others.",
        )
    key_advantage, key_value = jax.random.split(key)
    advantage = linear(key_advantage, width, int(action_space.n) * atoms, scale=0.1)
    return QHead(advantage, linear(key_value, width, atoms, scale=0.1) if dueling else None, atoms)
