"""Functions for learning action values: n-step returns, and distributions of returns. Docstrings name the paper's equation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Atoms = Float[Array, " atom"]
"""One number for each atom, or for each quantile, of a distribution."""


class NStep(NamedTuple):
    """The n-step return of the first step of a window."""

    reward: jax.Array
    """Discounted sum of the rewards of the steps that count (see `n_step`)."""
    discount: jax.Array
    """Discount of the value to bootstrap from; 0 where the episode terminated."""
    steps: jax.Array
    """Number of steps that count; also the index, in the window, of the observation to bootstrap from."""
    weight: jax.Array
    """1; 0 if no step counts, because a time limit ended the episode at the first step (see `n_step`)."""


def n_step(
    reward_t: Float[Array, " time"], discount_t: Float[Array, " time"], last_t: Bool[Array, " time"], gamma: float
) -> NStep:
    """The n-step return of the first step of a window of n + 1 steps (Sutton & Barto 2018, eq. 7.1).

    The last step of the window only gives the observation to bootstrap from. The other steps count up to the first end of an
    episode. If a time limit ended this episode, the last step of the episode does not count, because the observation after that
    step is not stored.
    """
    reward_t, discount_t, last_t = reward_t[:-1], discount_t[:-1], last_t[:-1]
    cut_t = last_t & (discount_t > 0)
    # A step counts if no episode ended at an earlier step, and no time limit ended the episode at this step.
    counts_t = jnp.cumprod(jnp.where(cut_t, 0, 1)) * jnp.cumprod(jnp.roll(jnp.where(last_t, 0, 1), 1).at[0].set(1))
    factor_t = jnp.cumprod(jnp.where(counts_t > 0, gamma * discount_t, 1.0))
    before_t = jnp.roll(factor_t, 1).at[0].set(1.0)
    reward = jnp.sum(jnp.where(counts_t > 0, before_t * reward_t, 0.0))
    steps = jnp.sum(counts_t)
    return NStep(reward, factor_t[-1], steps, (steps > 0).astype(reward_t.dtype))


def categorical_projection(support: Atoms, probs: Atoms, onto: Atoms) -> Atoms:
    """A distribution over `support`, projected onto the evenly spaced atoms `onto` (Bellemare et al. 2017, eq. 7)."""
    spacing = onto[1] - onto[0]
    inside = jnp.clip(support, onto[0], onto[-1])
    near = jnp.clip(1 - jnp.abs(inside[None, :] - onto[:, None]) / spacing, 0, 1)  # rows: `onto`; columns: `support`
    return near @ probs


def quantile_huber(quantiles: Atoms, target: Atoms, delta: float = 1.0) -> Float[Array, ""]:
    """The loss of quantile regression (Dabney et al. 2018, eq. 10); `target` are samples of the return.

    Quantile i of n has the level (i + 0.5) / n.
    """
    num = len(quantiles)
    levels = (jnp.arange(num, dtype=quantiles.dtype) + 0.5) / num
    error = target[None, :] - quantiles[:, None]
    weight = jnp.abs(levels[:, None] - (jax.lax.stop_gradient(error) < 0).astype(quantiles.dtype))
    return jnp.sum(jnp.mean(weight * huber(error, delta), axis=1))


def huber(error: Float[Array, "..."], delta: float = 1.0) -> Float[Array, "..."]:
    """Huber's loss (Huber 1964): half the square of the error, but linear where |error| exceeds `delta`."""
    size = jnp.abs(error)
    within = jnp.minimum(size, delta)
    return 0.5 * within**2 + delta * (size - within)
