"""Returns and advantages of trajectories [time, env].

`discount_t` is the discount factor, 0 where the episode terminated; `last_t` is True where it ended for either reason.
At a time limit the discount is not 0, so the value of the true successor is bootstrapped, while nothing flows back
from the next episode.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

PerStep = Float[Array, "time env"]
Flags = Bool[Array, "time env"]


def gae(
    reward_t: PerStep, discount_t: PerStep, last_t: Flags, value_tm1: PerStep, value_t: PerStep, lambda_: float
) -> PerStep:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16); `value_t` is the value of `next_obs`."""
    delta_t = reward_t + discount_t * value_t - value_tm1
    return accumulate(delta_t, jnp.where(last_t, 0.0, lambda_ * discount_t), jnp.zeros_like(delta_t[0]))


def lambda_return(reward_t: PerStep, discount_t: PerStep, last_t: Flags, value_t: PerStep, lambda_: float) -> PerStep:
    """The lambda-return (Sutton & Barto 2018, eq. 12.18); `lambda_` 1 is Monte Carlo, 0 is one step."""
    # As in `gae`, the trace ends where the episode does, and what is left of it is bootstrapped.
    trace_t = jnp.where(last_t, 0.0, jnp.full_like(discount_t, lambda_))
    bootstrap_t = reward_t + discount_t * (1 - trace_t) * value_t
    return accumulate(bootstrap_t, discount_t * trace_t, value_t[-1])


def discounted_return(reward_t: PerStep, discount_t: PerStep, last_t: Flags, value_t: PerStep) -> PerStep:
    """The discounted sum of rewards to the episode's end or the trajectory's, bootstrapped from `value_t` there."""
    return lambda_return(reward_t, discount_t, last_t, value_t, 1.0)


class NStep(NamedTuple):
    """What an n-step return says about the first step of a window."""

    reward: jax.Array
    """Discounted rewards of the steps that count."""
    discount: jax.Array
    """Of the value to bootstrap from; 0 where the episode terminated."""
    steps: jax.Array
    """How many steps count: bootstrap from the observation that many steps after the first."""
    weight: jax.Array
    """1; but 0 where no step counts, because a time limit cut the first one, and its successor was not stored."""


def n_step(
    reward_t: Float[Array, " time"], discount_t: Float[Array, " time"], last_t: Bool[Array, " time"], gamma: float
) -> NStep:
    """The return of the first steps of one window of n + 1, whose last one is only there to bootstrap from.

    A window ends where its episode terminates; at a time limit it ends a step earlier, with an observation that is stored.
    """
    reward_t, discount_t, last_t = reward_t[:-1], discount_t[:-1], last_t[:-1]
    cut_t = last_t & (discount_t > 0)
    # A step counts if no episode ended before it, and no time limit cuts it.
    counts_t = jnp.cumprod(jnp.where(cut_t, 0, 1)) * jnp.cumprod(jnp.roll(jnp.where(last_t, 0, 1), 1).at[0].set(1))
    factor_t = jnp.cumprod(jnp.where(counts_t > 0, gamma * discount_t, 1.0))
    before_t = jnp.roll(factor_t, 1).at[0].set(1.0)
    reward = jnp.sum(jnp.where(counts_t > 0, before_t * reward_t, 0.0))
    steps = jnp.sum(counts_t)
    return NStep(reward, factor_t[-1], steps, (steps > 0).astype(reward_t.dtype))


def accumulate(x_t: PerStep, decay_t: PerStep, beyond: Float[Array, " env"]) -> PerStep:
    """y_t = x_t + decay_t * y_{t+1}, from the end; `beyond` is y after the last step."""

    def step(y, now):
        x, decay = now
        y = x + decay * y
        return y, y

    return jax.lax.scan(step, beyond, (x_t, decay_t), reverse=True, unroll=min(8, x_t.shape[0]))[1]
