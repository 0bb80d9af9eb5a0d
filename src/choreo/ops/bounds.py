"""Bounds of continuous actions, and numbers between -1 and 1 in their place."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from choreo.types import Key


@dataclass(frozen=True)
class Bounds:
    """A Box with finite bounds; `unit` actions are a vector of numbers between -1 and 1."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.low)

    def scale(self, unit: Float[Array, "n"]) -> Float[Array, "*action"]:
        """An action of the space."""
        middle, half = self._affine(unit.dtype)
        return (middle + half * unit).reshape(self.shape)

    def unscale(self, action: Float[Array, "*action"]) -> Float[Array, "n"]:
        """As a vector of numbers between -1 and 1."""
        middle, half = self._affine(action.dtype)
        return (action.ravel() - middle) / half

    def add(self, action: Float[Array, "*action"], noise: Float[Array, "n"]) -> Float[Array, "*action"]:
        """`noise`, a vector in units of half the width of the space, on top of an action; the sum is kept in the space."""
        return self.scale(jnp.clip(self.unscale(action) + noise, -1, 1))

    def uniform(self, key: Key) -> Float[Array, "*action"]:
        """Any action."""
        return self.scale(jax.random.uniform(key, (self.size,), jnp.result_type(float), -1, 1))

    def _affine(self, dtype: Any) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
        low, high = np.array(self.low), np.array(self.high)
        return jnp.asarray((low + high) / 2, dtype), jnp.asarray((high - low) / 2, dtype)


jax.tree_util.register_static(Bounds)
