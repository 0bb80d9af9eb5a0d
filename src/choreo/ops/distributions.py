"""Action distributions: small pytrees, of one environment or (under `vmap`) of many."""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from choreo.types import Key


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
