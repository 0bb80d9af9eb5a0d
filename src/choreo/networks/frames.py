"""Convolutions on stacked frames [height, width, channel]: the network of Mnih et al. 2015.

atari_cnn    frames -> convolutions -> layer -> PolicyHead, value     an actor-critic with one torso
q_cnn        frames -> convolutions -> layer -> QHead                 values of Discrete actions
"""

import math
from collections.abc import Sequence

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
from gymnasium import spaces

from choreo.envs.spaces import action_mask, check_action_mask, leaves, without_mask
from choreo.errors import AlgorithmError
from choreo.networks.dense import PolicyHead, linear, orthogonal, policy_head
from choreo.networks.q import QNetwork, q_head
from choreo.ops import Distribution
from choreo.types import Key, PyTree


def atari_cnn(
    observation_space: gymnasium.Space, action_space: gymnasium.Space, key: Key, *, width: int = 512
) -> "AtariCNN":
    """An actor-critic on stacked frames; actor and critic share all but their last layers."""
    check_action_mask(observation_space, action_space)
    image, *others = [leaf for _, leaf in leaves(without_mask(observation_space))] or [None]
    if others or not isinstance(image, spaces.Box) or len(image.shape) != 3:
        raise AlgorithmError(
            f"atari_cnn needs images [height, width, channel], not {observation_space}.",
            fix="Use network=choreo.networks.mlp for vectors.",
        )
    keys = jax.random.split(key, 6)
    height, breadth, channels = image.shape
    convolutions = []
    for key_conv, (filters, size, stride) in zip(keys[:3], ((32, 8, 4), (64, 4, 2), (64, 3, 1)), strict=True):
        convolutions.append(convolution(key_conv, channels, filters, size, stride))
        height, breadth, channels = (height - size) // stride + 1, (breadth - size) // stride + 1, filters
    if height < 1 or breadth < 1:
        raise AlgorithmError(
            f"atari_cnn needs images of at least 36 x 36, not {image.shape[:2]}.",
            fix="Resize the frames, or set `network` to your own factory.",
        )
    return AtariCNN(
        convolutions=tuple(convolutions),
        torso=linear(keys[3], height * breadth * channels, width),
        policy=policy_head(action_space, width, keys[4]),
        value=linear(keys[5], width, 1, scale=1.0),
    )


def q_cnn(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    *,
    atoms: int = 1,
    dueling: bool = False,
    width: int = 512,
) -> QNetwork:
    """Values of actions, from stacked frames."""
    key_torso, key_head = jax.random.split(key)
    features = atari_cnn(observation_space, action_space, key_torso, width=width)
    torso = Frames(features.convolutions, features.torso)
    return QNetwork(torso, q_head(observation_space, action_space, key_head, width, atoms, dueling=dueling))


class AtariCNN(eqx.Module):
    """The network of `atari_cnn`."""

    convolutions: tuple[eqx.nn.Conv2d, ...]
    torso: eqx.nn.Linear
    policy: PolicyHead
    value: eqx.nn.Linear

    def __call__(self, obs: PyTree) -> tuple[Distribution, jax.Array]:
        x = frame_features(self.convolutions, self.torso, obs)
        return self.policy(x, action_mask(obs)), self.value(x)[0]


class Frames(eqx.Module):
    """From frames to features: the torso of `q_cnn`."""

    convolutions: tuple[eqx.nn.Conv2d, ...]
    torso: eqx.nn.Linear

    def __call__(self, obs: PyTree) -> jax.Array:
        return frame_features(self.convolutions, self.torso, obs)


def frame_features(convolutions: Sequence[eqx.nn.Conv2d], torso: eqx.nn.Linear, obs: PyTree) -> jax.Array:
    """Convolutions and one layer on an image [height, width, channel]."""
    (image,) = jax.tree.leaves(without_mask(obs))
    # Look at the dtype of the array, not at the dtype of the space: with `normalise_obs`, integer pixels have become floats, which
    # need no scaling.
    pixel_scale = 255.0 if jnp.issubdtype(image.dtype, jnp.integer) else 1.0
    x = jnp.moveaxis(image, -1, 0).astype(torso.weight.dtype) / pixel_scale
    for conv in convolutions:
        x = jax.nn.relu(conv(x))
    return jax.nn.relu(torso(x.ravel()))


def convolution(key: Key, num_in: int, num_out: int, size: int, stride: int) -> eqx.nn.Conv2d:
    """A convolution with orthogonal weights and zero biases."""
    return orthogonal(eqx.nn.Conv2d(num_in, num_out, size, stride, key=key), key, math.sqrt(2))
