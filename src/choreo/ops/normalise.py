"""Running mean and variance of a stream of batches (Chan et al. 1979, eq. 2.1), combined over learner shards."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from choreo.roles import all_reduce


class Moments(NamedTuple):
    """Statistics of one observation, element by element."""

    num: Float[Array, ""]
    mean: Float[Array, "*obs"]
    var: Float[Array, "*obs"]

    @classmethod
    def of_nothing(cls, shape: tuple[int, ...]) -> "Moments":
        """Before any data: normalising with these changes nothing."""
        return cls(jnp.zeros(()), jnp.zeros(shape), jnp.ones(shape))


def update_moments(moments: Moments, batch: Shaped[Array, "..."]) -> Moments:
    """Take in a batch with any number of leading axes; equal on all shards."""
    batch = batch.reshape(-1, *moments.mean.shape).astype(moments.mean.dtype)
    mean = all_reduce(jnp.mean(batch, axis=0))
    var = all_reduce(jnp.mean((batch - mean[None]) ** 2, axis=0))
    count = all_reduce(jnp.full((), batch.shape[0], moments.num.dtype), "sum")
    return _merge(moments, mean, var, count)


class Seen(NamedTuple):
    """A batch, in numbers that may be averaged over shards: unlike variances, each is a mean over the batch."""

    mean: Float[Array, "*obs"]
    square: Float[Array, "*obs"]
    """Of the distance from `around`."""
    around: Float[Array, "*obs"]
    """The same for all shards, and near the mean: squares of large numbers leave no digits for the variance."""


def look(moments: Moments, batch: Shaped[Array, "..."]) -> Seen:
    """What `merge_moments` needs of a batch with any number of leading axes."""
    around = moments.mean
    batch = batch.reshape(-1, *around.shape).astype(around.dtype)
    return Seen(jnp.mean(batch, axis=0), jnp.mean((batch - around[None]) ** 2, axis=0), around)


def merge_moments(moments: Moments, seen: Seen, count: Float[Array, ""]) -> Moments:
    """Take in `count` observations; `seen` is the average over the shards that saw them."""
    var = jnp.maximum(seen.square - (seen.mean - seen.around) ** 2, 0)
    return _merge(moments, seen.mean, var, count.astype(moments.num.dtype))


def _merge(moments: Moments, mean: Array, var: Array, count: Array) -> Moments:
    total = moments.num + count
    delta, weight = mean - moments.mean, count / total
    new_var = (1 - weight) * moments.var + weight * var + weight * (1 - weight) * delta**2
    return Moments(total, moments.mean + weight * delta, new_var)


def normalise(moments: Moments, obs: Shaped[Array, "*obs"], *, limit: float = 10.0) -> Float[Array, "*obs"]:
    """An observation to mean 0 and variance 1, clipped to +-`limit`."""
    scaled = (obs.astype(moments.mean.dtype) - moments.mean) * jax.lax.rsqrt(moments.var + 1e-8)
    return jnp.clip(scaled, -limit, limit)
