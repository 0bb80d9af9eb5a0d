"""Spaces in the form that networks need: an observation as one vector, a mask of actions, the bounds of continuous actions.

`encoder` accepts nested Dict and Tuple spaces and concatenates their leaves to one vector. If a Dict has the key `action_mask`,
the value of this key says which actions are allowed, and is not part of the vector.

    {"action_mask": MultiBinary(3), "place": Discrete(5), "speed": Box(2)}  ->  [one-hot of place, speed], mask

This file has no weights, only static data and pure functions.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Float

from choreo.errors import AlgorithmError
from choreo.types import Key, PyTree

ACTION_MASK = "action_mask"
"""The key of a Dict observation that says which actions are allowed."""


@dataclass(frozen=True)
class Encoder:
    """From an observation to a vector: the concatenated leaves of the observation, without the action mask."""

    parts: tuple["Numbers | OneHot", ...]
    """How each leaf becomes a vector."""

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def __call__(self, obs: PyTree) -> jax.Array:
        arrays = jax.tree.leaves(without_mask(obs))
        return jnp.concatenate([part(x) for part, x in zip(self.parts, arrays, strict=True)])


jax.tree_util.register_static(Encoder)


@dataclass(frozen=True)
class Numbers:
    """A Box or MultiBinary as a vector. Numbers of type uint8 are taken for pixels and divided by `pixel_scale`; others are not."""

    size: int
    """Length of the vector."""
    pixel_scale: float
    """The largest value of a pixel."""

    def __call__(self, obs: jax.Array) -> jax.Array:
        x = obs.ravel().astype(jnp.result_type(float))
        return x / self.pixel_scale if obs.dtype == jnp.uint8 else x


@dataclass(frozen=True)
class OneHot:
    """A Discrete or MultiDiscrete as a vector: the concatenated one-hot vectors of its dimensions."""

    sizes: tuple[int, ...]
    """Number of values of each dimension."""
    start: tuple[int, ...]
    """Smallest value of each dimension."""

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def __call__(self, obs: jax.Array) -> jax.Array:
        # All dimensions at once: element i of the result is 1 if the observation has value[i] in dimension[i].
        dimension = np.repeat(np.arange(len(self.sizes)), self.sizes)
        value = np.concatenate([np.arange(n) + first for n, first in zip(self.sizes, self.start, strict=True)])
        return (obs.ravel().astype(jnp.int32)[dimension] == value.astype(np.int32)).astype(jnp.result_type(float))


def encoder(space: gymnasium.Space) -> Encoder:
    """The encoder of an observation space; `AlgorithmError` if it cannot encode a part, or if the vector would be empty."""
    encode = Encoder(tuple(_encode_leaf(path, leaf) for path, leaf in leaves(without_mask(space))))
    if encode.size == 0:
        raise AlgorithmError(
            f"There is nothing to observe in {space}.",
            fix="Add a part that is constant, such as Box(1, 1, (1,)).",
        )
    return encode


def _encode_leaf(path: str, space: gymnasium.Space) -> Numbers | OneHot:
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
        f"The built-in networks cannot read `{path}`, which is {space}.",
        fix="Encode it as numbers in a wrapper, or set `network` to your own factory.",
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
    """The elements of an array, as Python integers."""
    return tuple(map(int, numbers.ravel()))


def action_mask(obs: PyTree) -> jax.Array | None:
    """Which actions are allowed: the concatenated masks of all action dimensions; None if the observation has no mask."""
    if not isinstance(obs, dict) or ACTION_MASK not in obs:
        return None
    return jnp.concatenate([x.ravel().astype(bool) for x in jax.tree.leaves(obs[ACTION_MASK])])


def without_mask(obs: PyTree) -> PyTree:
    """An observation, or an observation space, without its action mask."""
    if isinstance(obs, spaces.Dict):
        return spaces.Dict({name: part for name, part in obs.items() if name != ACTION_MASK})
    return {name: x for name, x in obs.items() if name != ACTION_MASK} if isinstance(obs, dict) else obs


def check_action_mask(observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
    """Raise AlgorithmError if the observation has an action mask that does not fit the action space.

    Without this check, a mask for Box or MultiBinary actions would be ignored.
    """
    if not isinstance(observation_space, spaces.Dict) or ACTION_MASK not in observation_space.spaces:
        return
    rename = f"If the key {ACTION_MASK!r} is an ordinary observation, give the key a different name."
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
            fix=f"Make it MultiBinary({num}): the masks of all action dimensions, concatenated. {rename}",
        )


@dataclass(frozen=True)
class Bounds:
    """A Box with finite bounds. A *unit action* is an action as a vector whose numbers are scaled to [-1, 1]."""

    low: tuple[float, ...]
    """Lower bound of each element."""
    high: tuple[float, ...]
    """Upper bound of each element."""
    shape: tuple[int, ...]
    """Shape of an action."""

    @property
    def size(self) -> int:
        return len(self.low)

    def scale(self, unit: Float[Array, "n"]) -> Float[Array, "*action"]:
        """From a unit action to an action."""
        middle, half = self._affine(unit.dtype)
        return (middle + half * unit).reshape(self.shape)

    def unscale(self, action: Float[Array, "*action"]) -> Float[Array, "n"]:
        """From an action to a unit action."""
        middle, half = self._affine(action.dtype)
        return (action.ravel() - middle) / half

    def add(self, action: Float[Array, "*action"], noise: Float[Array, "n"]) -> Float[Array, "*action"]:
        """An action plus `noise`, clipped to the bounds; `noise` is in units of half the width of the space."""
        return self.scale(jnp.clip(self.unscale(action) + noise, -1, 1))

    def uniform(self, key: Key) -> Float[Array, "*action"]:
        """An action drawn uniformly from the space."""
        return self.scale(jax.random.uniform(key, (self.size,), jnp.result_type(float), -1, 1))

    def _affine(self, dtype: Any) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
        """The middle of the space, and half its width."""
        low, high = np.array(self.low), np.array(self.high)
        return jnp.asarray((low + high) / 2, dtype), jnp.asarray((high - low) / 2, dtype)


jax.tree_util.register_static(Bounds)


def bounds_of(space: gymnasium.Space) -> Bounds:
    """The bounds of an action space; `AlgorithmError` if the space is not a Box of real numbers with finite bounds."""
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise AlgorithmError(
            f"Actions must be real numbers in a Box, not {space}.",
            fix="For Discrete actions use DQN, PPO or A2C.",
        )
    finite = np.isfinite(space.low) & np.isfinite(space.high) & (space.low < space.high)
    if not finite.all() or not space.shape or not math.prod(space.shape):
        raise AlgorithmError(
            f"Actions must be in a Box with finite bounds, the lower one below the upper one, not in {space}.",
            fix="Bound them in a wrapper (gymnasium.wrappers.RescaleAction); or use PPO, which does not need bounds.",
        )
    low, high = (tuple(x.astype(float).ravel().tolist()) for x in (space.low, space.high))
    return Bounds(low, high, space.shape)
