"""Running mean and variance of a stream of observations (Chan et al. 1979, eq. 2.1), combined over learner shards.

An observation may be a pytree. Its statistics are a pytree with the same structure: `Moments` for each part that is normalised,
and None for each part that is not (a Discrete part, an action mask).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from choreo.envs.spaces import ACTION_MASK
from choreo.errors import AlgorithmError
from choreo.roles import all_reduce
from choreo.types import PyTree


class Moments(NamedTuple):
    """Statistics of one part of an observation, element by element."""

    num: Float[Array, ""]
    """Number of observations so far."""
    mean: Float[Array, "*obs"]
    var: Float[Array, "*obs"]

    @classmethod
    def of_nothing(cls, shape: tuple[int, ...]) -> "Moments":
        """Mean 0 and variance 1, before the first observation: `normalise` then only clips."""
        return cls(jnp.zeros(()), jnp.zeros(shape), jnp.ones(shape))


class Seen(NamedTuple):
    """Means over a batch of observations. The means of several shards can be averaged. Variances cannot be averaged in this way,
    because the shards have different means."""

    mean: Float[Array, "*obs"]
    square: Float[Array, "*obs"]
    """Mean squared distance from `around`."""
    around: Float[Array, "*obs"]
    """A point near the mean, equal on all shards. The variance is `square - (mean - around)**2`. If `around` were 0, the variance
    could be a small difference of two large numbers, and rounding errors would be large."""


def initial_moments(space: gymnasium.Space) -> PyTree:
    """The statistics of an observation space before the first observation; `AlgorithmError` if the space has no Box."""
    moments = _moments_of_nothing(space)
    if not jax.tree.leaves(moments):
        raise AlgorithmError(
            f"normalise_obs needs observations in a Box, not in {space}.", fix="Leave normalise_obs off."
        )
    return moments


def _moments_of_nothing(space: gymnasium.Space) -> PyTree:
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: None if name == ACTION_MASK else _moments_of_nothing(part) for name, part in space.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(map(_moments_of_nothing, space))
    return Moments.of_nothing(space.shape) if isinstance(space, gymnasium.spaces.Box) else None


def normalise(moments: PyTree, obs: PyTree, *, limit: float = 10.0) -> PyTree:
    """An observation, scaled to mean 0 and variance 1 and clipped to +-`limit`; parts without statistics do not change."""

    def scale(moments: Moments, x: jax.Array) -> jax.Array:
        scaled = (x.astype(moments.mean.dtype) - moments.mean) * jax.lax.rsqrt(moments.var + 1e-8)
        return jnp.clip(scaled, -limit, limit)

    return _each_part(lambda m, x: x if m is None else scale(m, x), moments, obs)


def update_moments(moments: PyTree, obs: PyTree) -> PyTree:
    """The statistics after one more batch of observations [..., *obs] on each shard; the result is equal on all shards."""

    def update(moments: Moments, batch: jax.Array) -> Moments:
        batch = batch.reshape(-1, *moments.mean.shape).astype(moments.mean.dtype)
        mean = all_reduce(jnp.mean(batch, axis=0))
        var = all_reduce(jnp.mean((batch - mean[None]) ** 2, axis=0))
        count = all_reduce(jnp.full((), batch.shape[0], moments.num.dtype), "sum")
        return _merge(moments, mean, var, count)

    return _each_part(lambda m, x: m if m is None else update(m, x), moments, obs)


def look(moments: PyTree, obs: PyTree) -> PyTree:
    """The means (`Seen`) of a batch of observations [..., *obs], for `merge_moments`."""

    def see(moments: Moments, batch: jax.Array) -> Seen:
        around = moments.mean
        batch = batch.reshape(-1, *around.shape).astype(around.dtype)
        return Seen(jnp.mean(batch, axis=0), jnp.mean((batch - around[None]) ** 2, axis=0), around)

    return _each_part(lambda m, x: m if m is None else see(m, x), moments, obs)


def merge_moments(moments: PyTree, seen: PyTree, count: Float[Array, ""]) -> PyTree:
    """The statistics after `count` more observations on all shards; `seen` is the mean of the shards' results of `look`."""

    def merge(moments: Moments, seen: Seen) -> Moments:
        var = jnp.maximum(seen.square - (seen.mean - seen.around) ** 2, 0)
        return _merge(moments, seen.mean, var, count.astype(moments.num.dtype))

    return _each_part(lambda m, s: m if m is None else merge(m, s), moments, seen)


def _merge(moments: Moments, mean: Array, var: Array, count: Array) -> Moments:
    total = moments.num + count
    delta, weight = mean - moments.mean, count / total
    new_var = (1 - weight) * moments.var + weight * var + weight * (1 - weight) * delta**2
    return Moments(total, moments.mean + weight * delta, new_var)


def _each_part(fn: Callable[[Moments | None, Any], PyTree], moments: PyTree, obs: PyTree) -> PyTree:
    return jax.tree.map(fn, moments, obs, is_leaf=lambda m: m is None or isinstance(m, Moments))
