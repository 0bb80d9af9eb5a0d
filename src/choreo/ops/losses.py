"""Losses, per sample: the caller takes the mean."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def clipped_surrogate(
    ratio_t: Float[Array, "*batch"], advantage_t: Float[Array, "*batch"], epsilon: float
) -> Float[Array, "*batch"]:
    """PPO's loss (Schulman et al. 2017, eq. 7), negated: to be minimised. `ratio_t` is pi(a) / pi_old(a)."""
    clipped_t = jnp.clip(ratio_t, 1 - epsilon, 1 + epsilon)
    return -jnp.minimum(ratio_t * advantage_t, clipped_t * advantage_t)
