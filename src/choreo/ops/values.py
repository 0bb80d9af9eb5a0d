"""Values of actions as distributions, and what all learners of values share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Atoms = Float[Array, " atom"]


def categorical_projection(support: Atoms, probs: Atoms, onto: Atoms) -> Atoms:
    """A distribution over `support`, as one over the evenly spaced atoms `onto` (Bellemare et al. 2017, eq. 7)."""
    spacing = onto[1] - onto[0]
    inside = jnp.clip(support, onto[0], onto[-1])
    near = jnp.clip(1 - jnp.abs(inside[None, :] - onto[:, None]) / spacing, 0, 1)  # [onto, support]
    return near @ probs


def quantile_huber(quantiles: Atoms, target: Atoms, delta: float = 1.0) -> Float[Array, ""]:
    """Quantile regression (Dabney et al. 2018, eq. 10): `quantiles` at the middles of equal parts, against samples."""
    num = len(quantiles)
    levels = (jnp.arange(num, dtype=quantiles.dtype) + 0.5) / num
    error = target[None, :] - quantiles[:, None]
    weight = jnp.abs(levels[:, None] - (jax.lax.stop_gradient(error) < 0).astype(quantiles.dtype))
    return jnp.sum(jnp.mean(weight * huber(error, delta), axis=1))


def huber(error: Float[Array, "..."], delta: float = 1.0) -> Float[Array, "..."]:
    """Half the square, but from `delta` on a straight line."""
    size = jnp.abs(error)
    within = jnp.minimum(size, delta)
    return 0.5 * within**2 + delta * (size - within)
