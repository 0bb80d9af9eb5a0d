"""Networks for values of actions.

A *factory* `(observation_space, action_space, key, *, atoms, dueling) -> module` builds one; the module is any pytree of
arrays with

    module(obs) -> [action, atom]         one environment; what atoms mean is the algorithm's: one is a value

Change a factory's options with `functools.partial(q_mlp, hidden=(256, 256))`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
from gymnasium import spaces

from choreo import networks
from choreo.errors import AlgorithmError
from choreo.types import Key, PyTree

QFactory = Callable[..., Any]
"""Builds a network for given spaces, atoms, and with or without a dueling head."""


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
    encode = networks.encoder(observation_space)
    widths = (encode.size, *hidden)
    torso = Layers(encode, networks.layers(key_torso, widths))
    return QNetwork(torso, q_head(observation_space, action_space, key_head, widths[-1], atoms, dueling=dueling))


def q_cnn(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    *,
    atoms: int = 1,
    dueling: bool = False,
    width: int = 512,
) -> "QNetwork":
    """The network of Mnih et al. 2015 on stacked frames [height, width, channel]."""
    key_torso, key_head = jax.random.split(key)
    features = networks.atari_cnn(observation_space, action_space, key_torso, width=width)
    torso = Frames(features.convolutions, features.torso)
    return QNetwork(torso, q_head(observation_space, action_space, key_head, width, atoms, dueling=dueling))


class QNetwork(eqx.Module):
    torso: "Layers | Frames"
    head: "QHead"

    def __call__(self, obs: PyTree) -> jax.Array:
        return self.head(self.torso(obs))


class Layers(eqx.Module):
    encode: networks.Encoder
    layers: tuple[eqx.nn.Linear, ...]

    def __call__(self, obs: PyTree) -> jax.Array:
        return networks.rectified(self.layers, self.encode(obs))


class Frames(eqx.Module):
    convolutions: tuple[eqx.nn.Conv2d, ...]
    torso: eqx.nn.Linear

    def __call__(self, obs: PyTree) -> jax.Array:
        return networks.frame_features(self.convolutions, self.torso, obs)


class QHead(eqx.Module):
    """From features to [action, atom]."""

    advantage: eqx.nn.Linear
    value: eqx.nn.Linear | None
    """What all actions have in common (Wang et al. 2016, eq. 9); None: each has its own."""
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
    networks.check_action_mask(observation_space, action_space)
    if not isinstance(action_space, spaces.Discrete):
        raise AlgorithmError(
            f"Values of actions need a Discrete space of them, not {action_space}.",
            fix="Use ddpg, td3 or sac for a Box; ppo, a2c or impala for others.",
        )
    key_advantage, key_value = jax.random.split(key)
    advantage = networks.linear(key_advantage, width, int(action_space.n) * atoms, scale=0.1)
    return QHead(advantage, networks.linear(key_value, width, atoms, scale=0.1) if dueling else None, atoms)
