"""Networks for actor-critic algorithms, and what a network is.

A *factory* `(observation_space, action_space, key) -> module` builds one; the module is any pytree of arrays with

    module(obs) -> (pi, value)                            one environment; pi is an `ops.Distribution`
    module(obs, memory) -> (pi, value, memory)            if it derives from `Recurrent`

Change a factory's options with `functools.partial(mlp, hidden=(256, 256))`.
"""

import abc
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp

from choreo.errors import AlgorithmError
from choreo.ops import Categorical, Distribution, Gaussian
from choreo.roles import is_array
from choreo.types import Key, PyTree

Factory = Callable[[gymnasium.Space, gymnasium.Space, Key], Any]
"""Builds a network for given spaces."""


def mlp(
    observation_space: gymnasium.Space, action_space: gymnasium.Space, key: Key, *, hidden: Sequence[int] = (64, 64)
) -> "ActorCritic":
    """Actor and critic apart, tanh layers, orthogonal weights: what PPO is usually run with on vectors."""
    key_actor, key_critic, key_policy, key_value = jax.random.split(key, 4)
    encode = encoder(observation_space)
    widths = (encode.size, *hidden)
    return ActorCritic(
        encode=encode,
        actor=layers(key_actor, widths),
        critic=layers(key_critic, widths),
        policy=policy_head(action_space, widths[-1], key_policy),
        value=linear(key_value, widths[-1], 1, scale=1.0),
    )


def atari_cnn(
    observation_space: gymnasium.Space, action_space: gymnasium.Space, key: Key, *, width: int = 512
) -> "AtariCNN":
    """The network of Mnih et al. 2015 on stacked frames [height, width, channel], shared by actor and critic."""
    if not isinstance(observation_space, gymnasium.spaces.Box) or len(observation_space.shape) != 3:
        raise AlgorithmError(
            f"atari_cnn needs images [height, width, channel], not {observation_space}.",
            fix="Use network=choreo.networks.mlp for vectors.",
        )
    keys = jax.random.split(key, 6)
    height, breadth, channels = observation_space.shape
    convolutions = []
    for key_conv, (filters, size, stride) in zip(keys[:3], ((32, 8, 4), (64, 4, 2), (64, 3, 1)), strict=True):
        convolutions.append(convolution(key_conv, channels, filters, size, stride))
        height, breadth, channels = (height - size) // stride + 1, (breadth - size) // stride + 1, filters
    if height < 1 or breadth < 1:
        raise AlgorithmError(
            f"atari_cnn needs images of at least 36 x 36, not {observation_space.shape[:2]}.",
            fix="Resize the frames, or pass a network of your own.",
        )
    return AtariCNN(
        convolutions=tuple(convolutions),
        torso=linear(keys[3], height * breadth * channels, width),
        policy=policy_head(action_space, width, keys[4]),
        value=linear(keys[5], width, 1, scale=1.0),
        pixel_scale=255.0 if jnp.issubdtype(observation_space.dtype, jnp.integer) else 1.0,
    )


def lstm(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    *,
    hidden: Sequence[int] = (64,),
    width: int = 64,
) -> "LSTM":
    """Tanh layers, then an LSTM shared by actor and critic, for tasks that need memory."""
    key_torso, key_cell, key_policy, key_value = jax.random.split(key, 4)
    encode = encoder(observation_space)
    widths = (encode.size, *hidden)
    return LSTM(
        encode=encode,
        torso=layers(key_torso, widths),
        cell=eqx.nn.LSTMCell(widths[-1], width, key=key_cell),
        policy=policy_head(action_space, width, key_policy),
        value=linear(key_value, width, 1, scale=1.0),
    )


NETWORKS = {"mlp": mlp, "atari_cnn": atari_cnn, "lstm": lstm}
"""Factories by name."""


class Recurrent(eqx.Module):
    """A network with memory: `module(obs, memory) -> (pi, value, memory)`."""

    @abc.abstractmethod
    def initial_state(self) -> PyTree:
        """The memory an episode begins with, of one environment."""

    @abc.abstractmethod
    def __call__(self, obs: jax.Array, memory: PyTree) -> tuple[Distribution, jax.Array, PyTree]:
        """One step of one environment."""


class ActorCritic(eqx.Module):
    encode: "Encoder"
    actor: tuple[eqx.nn.Linear, ...]
    critic: tuple[eqx.nn.Linear, ...]
    policy: "PolicyHead"
    value: eqx.nn.Linear

    def __call__(self, obs: jax.Array) -> tuple[Distribution, jax.Array]:
        x = self.encode(obs)
        return self.policy(apply(self.actor, x)), self.value(apply(self.critic, x))[0]


class AtariCNN(eqx.Module):
    convolutions: tuple[eqx.nn.Conv2d, ...]
    torso: eqx.nn.Linear
    policy: "PolicyHead"
    value: eqx.nn.Linear
    pixel_scale: float = eqx.field(static=True)

    def __call__(self, obs: jax.Array) -> tuple[Distribution, jax.Array]:
        x = jnp.moveaxis(obs, -1, 0).astype(self.torso.weight.dtype) / self.pixel_scale
        for conv in self.convolutions:
            x = jax.nn.relu(conv(x))
        x = jax.nn.relu(self.torso(x.ravel()))
        return self.policy(x), self.value(x)[0]


class LSTM(Recurrent):
    encode: "Encoder"
    torso: tuple[eqx.nn.Linear, ...]
    cell: eqx.nn.LSTMCell
    policy: "PolicyHead"
    value: eqx.nn.Linear

    def initial_state(self) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros(self.cell.hidden_size, self.cell.weight_hh.dtype)
        return zeros, zeros

    def __call__(self, obs: jax.Array, memory: PyTree) -> tuple[Distribution, jax.Array, PyTree]:
        memory = self.cell(apply(self.torso, self.encode(obs)), memory)
        return self.policy(memory[0]), self.value(memory[0])[0], memory


class PolicyHead(eqx.Module):
    """From features to an action distribution: the last layer of every actor."""

    output: eqx.nn.Linear
    log_std: jax.Array | None
    """Of each action dimension, whatever the observation; None for discrete actions."""
    shape: tuple[int, ...] = eqx.field(static=True)
    """Of a continuous action."""

    def __call__(self, features: jax.Array) -> Distribution:
        if self.log_std is None:
            return Categorical(self.output(features))
        return Gaussian(self.output(features).reshape(self.shape), self.log_std)


def policy_head(action_space: gymnasium.Space, width: int, key: Key) -> PolicyHead:
    # Small weights at first: every action about equally likely (Andrychowicz et al. 2021, section 3.2).
    if isinstance(action_space, gymnasium.spaces.Discrete) and action_space.start == 0:
        return PolicyHead(linear(key, width, int(action_space.n), scale=0.01), None, ())
    if isinstance(action_space, gymnasium.spaces.Box) and len(action_space.shape) == 1:
        num = action_space.shape[0]
        return PolicyHead(linear(key, width, num, scale=0.01), jnp.zeros(num), (num,))
    raise AlgorithmError(
        f"The built-in networks act in Discrete (from 0) and in Box spaces with one axis, not in {action_space}.",
        fix="Pass network= a factory of your own, whose module returns a distribution over such actions.",
    )


@dataclass(frozen=True)
class Encoder:
    """From an observation to a vector: a Box is flattened, a Discrete becomes one-hot."""

    size: int
    one_hot: bool

    def __call__(self, obs: jax.Array) -> jax.Array:
        dtype = jnp.result_type(float)
        return jax.nn.one_hot(obs, self.size, dtype=dtype) if self.one_hot else obs.ravel().astype(dtype)


jax.tree_util.register_static(Encoder)


def encoder(space: gymnasium.Space) -> Encoder:
    if isinstance(space, gymnasium.spaces.Discrete) and space.start == 0:
        return Encoder(int(space.n), one_hot=True)
    if isinstance(space, gymnasium.spaces.Box):
        return Encoder(math.prod(space.shape), one_hot=False)
    raise AlgorithmError(
        f"The built-in networks read Box and Discrete (from 0) observations, not {space}.",
        fix="Pass network= a factory of your own.",
    )


def layers(key: Key, widths: Sequence[int]) -> tuple[eqx.nn.Linear, ...]:
    keys = jax.random.split(key, max(len(widths) - 1, 1))
    return tuple(linear(k, m, n) for k, m, n in zip(keys, widths[:-1], widths[1:], strict=False))


def apply(layers: Sequence[eqx.nn.Linear], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jnp.tanh(layer(x))
    return x


def linear(key: Key, num_in: int, num_out: int, *, scale: float = math.sqrt(2)) -> eqx.nn.Linear:
    """An affine layer with orthogonal weights and no bias at first."""
    return orthogonal(eqx.nn.Linear(num_in, num_out, key=key), key, scale)


def convolution(key: Key, num_in: int, num_out: int, size: int, stride: int) -> eqx.nn.Conv2d:
    return orthogonal(eqx.nn.Conv2d(num_in, num_out, size, stride, key=key), key, math.sqrt(2))


def orthogonal(layer: Any, key: Key, scale: float) -> Any:
    shape = layer.weight.shape
    matrix = jax.nn.initializers.orthogonal(scale)(key, (shape[0], math.prod(shape[1:])), layer.weight.dtype)
    return eqx.tree_at(lambda x: (x.weight, x.bias), layer, (matrix.reshape(shape), jnp.zeros_like(layer.bias)))


def freeze(module: PyTree) -> PyTree:
    """A module with only arrays for leaves: others (an activation function) move into its structure."""
    return jax.tree.map(lambda x: x if is_array(x) else Static(x), module)


def thaw(frozen: PyTree) -> PyTree:
    """The module that was frozen."""
    is_static = lambda x: isinstance(x, Static)  # noqa: E731
    return jax.tree.map(lambda x: x.value if is_static(x) else x, frozen, is_leaf=is_static)


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["value"])
@dataclass(frozen=True)
class Static:
    """A leaf of a module that is no array."""

    value: Any
