"""Networks for actor-critic algorithms, and what a network is.

A *factory* `(observation_space, action_space, key) -> module` builds one; the module is any pytree of arrays with

    module(obs) -> (pi, value)                            one environment; pi is an `ops.Distribution`
    module(obs, memory) -> (pi, value, memory)            if it derives from `Recurrent`

Change a factory's options with `functools.partial(mlp, hidden=(256, 256))`.

`mlp` and `lstm` read any nesting of Dict and Tuple spaces, its leaves one after another as one vector, but for the key
`action_mask` of a Dict: that one says which actions may be taken.

    {"action_mask": MultiBinary(3), "place": Discrete(5), "speed": Box(2)}  ->  [one-hot of place, speed], mask
"""

import abc
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from choreo.errors import AlgorithmError
from choreo.ops import Categorical, Distribution, Gaussian
from choreo.ops.distributions import Bernoulli, Independent, Shifted, masked, multi_categorical
from choreo.static_key import is_array
from choreo.types import Key, PyTree

Factory = Callable[[gymnasium.Space, gymnasium.Space, Key], Any]
"""Builds a network for given spaces."""

ACTION_MASK = "action_mask"
"""The key of a Dict observation that says which actions may be taken."""


def mlp(
    observation_space: gymnasium.Space, action_space: gymnasium.Space, key: Key, *, hidden: Sequence[int] = (64, 64)
) -> "ActorCritic":
    """Actor and critic apart, tanh layers, orthogonal weights: what PPO is usually run with on vectors."""
    check_action_mask(observation_space, action_space)
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
            fix="Resize the frames, or pass a network of your own.",
        )
    return AtariCNN(
        convolutions=tuple(convolutions),
        torso=linear(keys[3], height * breadth * channels, width),
        policy=policy_head(action_space, width, keys[4]),
        value=linear(keys[5], width, 1, scale=1.0),
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
    check_action_mask(observation_space, action_space)
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


class Recurrent(eqx.Module):
    """A network with memory: `module(obs, memory) -> (pi, value, memory)`."""

    @abc.abstractmethod
    def initial_state(self) -> PyTree:
        """The memory an episode begins with, of one environment."""

    @abc.abstractmethod
    def __call__(self, obs: PyTree, memory: PyTree) -> tuple[Distribution, jax.Array, PyTree]:
        """One step of one environment."""


class ActorCritic(eqx.Module):
    encode: "Encoder"
    actor: tuple[eqx.nn.Linear, ...]
    critic: tuple[eqx.nn.Linear, ...]
    policy: "PolicyHead"
    value: eqx.nn.Linear

    def __call__(self, obs: PyTree) -> tuple[Distribution, jax.Array]:
        x = self.encode(obs)
        return self.policy(apply(self.actor, x), action_mask(obs)), self.value(apply(self.critic, x))[0]


class AtariCNN(eqx.Module):
    convolutions: tuple[eqx.nn.Conv2d, ...]
    torso: eqx.nn.Linear
    policy: "PolicyHead"
    value: eqx.nn.Linear

    def __call__(self, obs: PyTree) -> tuple[Distribution, jax.Array]:
        x = frame_features(self.convolutions, self.torso, obs)
        return self.policy(x, action_mask(obs)), self.value(x)[0]


def frame_features(convolutions: Sequence[eqx.nn.Conv2d], torso: eqx.nn.Linear, obs: PyTree) -> jax.Array:
    """Convolutions and one layer on an image [height, width, channel]."""
    (image,) = jax.tree.leaves(without_mask(obs))
    # By the array's type, not the space's: pixels that were normalised are in scale already.
    pixel_scale = 255.0 if jnp.issubdtype(image.dtype, jnp.integer) else 1.0
    x = jnp.moveaxis(image, -1, 0).astype(torso.weight.dtype) / pixel_scale
    for conv in convolutions:
        x = jax.nn.relu(conv(x))
    return jax.nn.relu(torso(x.ravel()))


class LSTM(Recurrent):
    encode: "Encoder"
    torso: tuple[eqx.nn.Linear, ...]
    cell: eqx.nn.LSTMCell
    policy: "PolicyHead"
    value: eqx.nn.Linear

    def initial_state(self) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros(self.cell.hidden_size, self.cell.weight_hh.dtype)
        return zeros, zeros

    def __call__(self, obs: PyTree, memory: PyTree) -> tuple[Distribution, jax.Array, PyTree]:
        memory = self.cell(apply(self.torso, self.encode(obs)), memory)
        return self.policy(memory[0], action_mask(obs)), self.value(memory[0])[0], memory


class PolicyHead(eqx.Module):
    """From features to an action distribution: the last layer of every actor."""

    @abc.abstractmethod
    def __call__(self, features: jax.Array, mask: jax.Array | None) -> Distribution:
        """`mask` says which of the logits may be taken; None: all of them."""


class Continuous(PolicyHead):
    """For a Box with one axis."""

    output: eqx.nn.Linear
    log_std: jax.Array
    """Of each action dimension, whatever the observation."""

    def __call__(self, features: jax.Array, mask: jax.Array | None) -> Gaussian:
        return Gaussian(self.output(features), self.log_std)


class Choice(PolicyHead):
    """For Discrete actions."""

    output: eqx.nn.Linear
    start: int = eqx.field(static=True)

    def __call__(self, features: jax.Array, mask: jax.Array | None) -> Categorical | Shifted:
        pi = Categorical(masked(self.output(features), mask))
        return Shifted(pi, jnp.int32(self.start)) if self.start else pi


class Choices(PolicyHead):
    """For MultiDiscrete actions: each dimension is drawn for itself."""

    output: eqx.nn.Linear
    sizes: tuple[int, ...] = eqx.field(static=True)
    start: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, features: jax.Array, mask: jax.Array | None) -> Independent | Shifted:
        pi = multi_categorical(self.output(features), self.sizes, mask)
        return Shifted(pi, jnp.array(self.start, jnp.int32)) if any(self.start) else pi


class Switches(PolicyHead):
    """For MultiBinary actions: each is on or off."""

    output: eqx.nn.Linear

    def __call__(self, features: jax.Array, mask: jax.Array | None) -> Independent:
        return Independent(Bernoulli(self.output(features)))


def policy_head(action_space: gymnasium.Space, width: int, key: Key) -> PolicyHead:
    # Small weights at first: every action about equally likely (Andrychowicz et al. 2021, section 3.2).
    output = functools.partial(linear, key, width, scale=0.01)
    if isinstance(action_space, spaces.Discrete):
        return Choice(output(int(action_space.n)), int(action_space.start))
    num = action_space.shape[0] if action_space.shape and len(action_space.shape) == 1 else None
    if isinstance(action_space, spaces.Box) and num:
        return Continuous(output(num), jnp.zeros(num))
    if isinstance(action_space, spaces.MultiDiscrete) and num:
        sizes = integers(action_space.nvec)
        return Choices(output(sum(sizes)), sizes, integers(action_space.start))
    if isinstance(action_space, spaces.MultiBinary) and num:
        return Switches(output(num))
    raise AlgorithmError(
        "The built-in networks act in Discrete spaces, and in Box, MultiDiscrete and MultiBinary spaces with one axis, "
        f"not in {action_space}.",
        fix="Flatten the action in a wrapper, or pass network= a factory of your own, whose module returns a "
        "distribution over such actions.",
    )


def check_action_mask(observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
    """Refuse a mask that does not fit the actions: left alone, it would be ignored."""
    if not isinstance(observation_space, spaces.Dict) or ACTION_MASK not in observation_space.spaces:
        return
    rename = f"Give the key another name than {ACTION_MASK!r} if it is an observation like others."
    if not isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete):
        raise AlgorithmError(
            f"An action mask is for Discrete and MultiDiscrete actions, not for {action_space}.", fix=rename
        )
    num = int(action_space.n) if isinstance(action_space, spaces.Discrete) else int(action_space.nvec.sum())
    parts = [space for _, space in leaves(observation_space[ACTION_MASK])]
    sizes = [math.prod(space.shape) for space in parts if isinstance(space, spaces.Box | spaces.MultiBinary)]
    if len(sizes) < len(parts) or sum(sizes) != num:
        raise AlgorithmError(
            f"The action mask {observation_space[ACTION_MASK]} does not fit the actions {action_space}: "
            f"it needs {num} numbers, 1 where an action may be taken and 0 where not.",
            fix=f"Make it MultiBinary({num}), the dimensions of an action one after another. {rename}",
        )


def action_mask(obs: PyTree) -> jax.Array | None:
    """Which actions may be taken, the dimensions of an action one after another; None: all of them."""
    if not isinstance(obs, dict) or ACTION_MASK not in obs:
        return None
    return jnp.concatenate([x.ravel().astype(bool) for x in jax.tree.leaves(obs[ACTION_MASK])])


def without_mask(obs: PyTree) -> PyTree:
    """What there is to observe, of an observation or of its space."""
    if isinstance(obs, spaces.Dict):
        return spaces.Dict({name: part for name, part in obs.items() if name != ACTION_MASK})
    return {name: x for name, x in obs.items() if name != ACTION_MASK} if isinstance(obs, dict) else obs


@dataclass(frozen=True)
class Encoder:
    """From an observation to a vector: its leaves one after another, without the action mask."""

    parts: tuple["Numbers | OneHot", ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def __call__(self, obs: PyTree) -> jax.Array:
        arrays = jax.tree.leaves(without_mask(obs))
        return jnp.concatenate([part(x) for part, x in zip(self.parts, arrays, strict=True)])


jax.tree_util.register_static(Encoder)


@dataclass(frozen=True)
class Numbers:
    """A Box or MultiBinary, flattened; pixels become 0 to 1 unless they were normalised before (and are no uint8)."""

    size: int
    pixel_scale: float

    def __call__(self, obs: jax.Array) -> jax.Array:
        x = obs.ravel().astype(jnp.result_type(float))
        return x / self.pixel_scale if obs.dtype == jnp.uint8 else x


@dataclass(frozen=True)
class OneHot:
    """A Discrete or MultiDiscrete: a one for the value of each dimension, zeros for all others."""

    sizes: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def __call__(self, obs: jax.Array) -> jax.Array:
        # All dimensions at once: each element of the result has its dimension and the value it stands for.
        dimension = np.repeat(np.arange(len(self.sizes)), self.sizes)
        value = np.concatenate([np.arange(n) + first for n, first in zip(self.sizes, self.start, strict=True)])
        return (obs.ravel().astype(jnp.int32)[dimension] == value.astype(np.int32)).astype(jnp.result_type(float))


def encoder(space: gymnasium.Space) -> Encoder:
    encode = Encoder(tuple(encode_leaf(path, leaf) for path, leaf in leaves(without_mask(space))))
    if encode.size == 0:
        raise AlgorithmError(
            f"There is nothing to observe in {space}.",
            fix="Add a part that is constant, such as Box(1, 1, (1,)).",
        )
    return encode


def encode_leaf(path: str, space: gymnasium.Space) -> Numbers | OneHot:
    if isinstance(space, spaces.Discrete):
        return OneHot((int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        return OneHot(integers(space.nvec), integers(space.start))
    if isinstance(space, spaces.MultiBinary):
        return Numbers(math.prod(space.shape), pixel_scale=1.0)
    if isinstance(space, spaces.Box):
        highest = space.high.max(initial=1) if space.dtype == np.uint8 else 1
        return Numbers(math.prod(space.shape), pixel_scale=float(highest))
    raise AlgorithmError(
        f"The built-in networks do not read {space}, as `{path}` is.",
        fix="Encode it as numbers in a wrapper, or pass network= a factory of your own.",
    )


def leaves(space: gymnasium.Space, path: str = "obs") -> Iterator[tuple[str, gymnasium.Space]]:
    """The spaces that hold arrays, each with its path, in the order of `jax.tree.leaves` of an observation."""
    if isinstance(space, spaces.Dict):
        inner = [(repr(name), space[name]) for name in sorted(space.spaces)]
    elif isinstance(space, spaces.Tuple):
        inner = [(repr(i), part) for i, part in enumerate(space)]
    else:
        yield path, space
        return
    for name, part in inner:
        yield from leaves(part, f"{path}[{name}]")


def integers(numbers: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, numbers.ravel()))


def layers(key: Key, widths: Sequence[int]) -> tuple[eqx.nn.Linear, ...]:
    keys = jax.random.split(key, max(len(widths) - 1, 1))
    return tuple(linear(k, m, n) for k, m, n in zip(keys, widths[:-1], widths[1:], strict=False))


def apply(layers: Sequence[eqx.nn.Linear], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jnp.tanh(layer(x))
    return x


def rectified(layers: Sequence[eqx.nn.Linear], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jax.nn.relu(layer(x))
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
