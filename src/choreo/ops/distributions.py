"""Action distributions: small pytrees, of one environment or (under `vmap`) of many."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from choreo.ops.bounds import Bounds
from choreo.types import Key

MASKED = -1e9
"""The logit of an action that may not be taken: never sampled, yet finite, and so are entropy and gradients."""


@runtime_checkable
class Distribution(Protocol):
    """What a network says about actions; `pi` in our code."""

    def sample(self, key: Key) -> Array: ...

    def mode(self) -> Array:
        """The likeliest action."""
        ...

    def log_prob(self, action: Array) -> Array: ...

    def entropy(self) -> Array: ...


class Categorical(NamedTuple):
    """One of n actions."""

    logits: Float[Array, "*batch n"]

    def sample(self, key: Key) -> Int[Array, "*batch"]:
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def mode(self) -> Int[Array, "*batch"]:
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
        # A one-hot product, not a gather: its gradient is a product again, where a gather's is a scatter.
        chosen = jax.nn.one_hot(action, self.logits.shape[-1], dtype=self.logits.dtype)
        return jnp.sum(jax.nn.log_softmax(self.logits) * chosen, axis=-1)

    def entropy(self) -> Float[Array, "*batch"]:
        log_p = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


class Gaussian(NamedTuple):
    """Independent normal variables; log-probabilities are summed over the last axis."""

    mean: Float[Array, "*batch n"]
    log_std: Float[Array, "*batch n"]

    def sample(self, key: Key) -> Float[Array, "*batch n"]:
        return self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape, self.mean.dtype)

    def mode(self) -> Float[Array, "*batch n"]:
        return self.mean

    def log_prob(self, action: Float[Array, "*batch n"]) -> Float[Array, "*batch"]:
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return -jnp.sum(0.5 * z**2 + self.log_std + 0.5 * float(np.log(2 * np.pi)), axis=-1)

    def entropy(self) -> Float[Array, "*batch"]:
        return jnp.sum(self.log_std + 0.5 * float(np.log(2 * np.pi * np.e)), axis=-1)


class Squashed(NamedTuple):
    """Normal variables, squeezed by tanh into the bounds of a space.

    Densities are those of actions scaled to [-1, 1]: an entropy then means the same whatever units a space has.
    """

    gaussian: Gaussian
    bounds: Bounds

    def sample(self, key: Key) -> Float[Array, "*action"]:
        return self.sample_and_log_prob(key)[0]

    def mode(self) -> Float[Array, "*action"]:
        """The middle of the distribution: where half of the actions are lower, in each dimension."""
        return self.bounds.scale(jnp.tanh(self.gaussian.mean))

    def sample_and_log_prob(self, key: Key) -> tuple[Float[Array, "*action"], Float[Array, ""]]:
        """Both from the variable before tanh, which cannot be found again from an action at the bounds."""
        x = self.gaussian.sample(key)
        # log(1 - tanh(x)^2), written so that it does not round to log(0) (Haarnoja et al. 2018, appendix C).
        log_slope = 2 * (math.log(2) - x - jax.nn.softplus(-2 * x))
        return self.bounds.scale(jnp.tanh(x)), self.gaussian.log_prob(x) - jnp.sum(log_slope)


class Bernoulli(NamedTuple):
    """0 or 1."""

    logits: Float[Array, "*batch"]

    def sample(self, key: Key) -> Int[Array, "*batch"]:
        return jax.random.bernoulli(key, jax.nn.sigmoid(self.logits)).astype(jnp.int8)

    def mode(self) -> Int[Array, "*batch"]:
        return (self.logits > 0).astype(jnp.int8)

    def log_prob(self, action: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
        return jax.nn.log_sigmoid(jnp.where(action == 1, self.logits, -self.logits))

    def entropy(self) -> Float[Array, "*batch"]:
        p = jax.nn.sigmoid(self.logits)
        return -p * jax.nn.log_sigmoid(self.logits) - (1 - p) * jax.nn.log_sigmoid(-self.logits)


class Independent(NamedTuple):
    """Several actions at once, each drawn for itself; log-probabilities are summed over the last axis."""

    each: Distribution
    """Its last axis counts the dimensions of an action."""

    def sample(self, key: Key) -> Int[Array, "*batch n"]:
        return self.each.sample(key)

    def mode(self) -> Int[Array, "*batch n"]:
        return self.each.mode()

    def log_prob(self, action: Int[Array, "*batch n"]) -> Float[Array, "*batch"]:
        return jnp.sum(self.each.log_prob(action), axis=-1)

    def entropy(self) -> Float[Array, "*batch"]:
        return jnp.sum(self.each.entropy(), axis=-1)


class Shifted(NamedTuple):
    """Actions counted from `start` instead of 0."""

    counted: Distribution
    """Of actions counted from 0."""
    start: Int[Array, "*action"]
    """The first action."""

    def sample(self, key: Key) -> Int[Array, "*action"]:
        return self.counted.sample(key) + self.start

    def mode(self) -> Int[Array, "*action"]:
        return self.counted.mode() + self.start

    def log_prob(self, action: Int[Array, "*action"]) -> Float[Array, "*batch"]:
        return self.counted.log_prob(action - self.start)

    def entropy(self) -> Float[Array, "*batch"]:
        return self.counted.entropy()


def masked(logits: Float[Array, "n"], mask: Bool[Array, "n"] | None) -> Float[Array, "n"]:
    """Only where `mask` is true may an action be taken; None: everywhere. If it is true nowhere, all are alike."""
    if mask is None:
        return logits
    # A random number added to -1e9 is lost in rounding: were all logits MASKED, the first action would always be drawn.
    return jnp.where(mask, logits, jnp.where(jnp.any(mask), MASKED, 0.0).astype(logits.dtype))


def multi_categorical(
    logits: Float[Array, "total"], sizes: Sequence[int], mask: Bool[Array, "total"] | None = None
) -> Independent:
    """One of sizes[0] actions, one of sizes[1], ...: their logits (and masks) one after another."""
    ends = np.cumsum(sizes)[:-1]
    masks = [None] * len(sizes) if mask is None else jnp.split(mask, ends)
    rows = [masked(row, allowed) for row, allowed in zip(jnp.split(logits, ends), masks, strict=True)]
    # As one matrix, shorter rows filled up with actions that are never taken.
    filled = [jnp.pad(row, (0, max(sizes) - len(row)), constant_values=MASKED) for row in rows]
    return Independent(Categorical(jnp.stack(filled)))
