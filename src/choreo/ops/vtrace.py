"""V-trace (Espeholt et al. 2018): values and advantages of a policy, from trajectories [time, env] of an older one.

Time limits and the ends of episodes are treated as in `choreo.ops.returns`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from choreo.ops.returns import Flags, PerStep, accumulate


class VTrace(NamedTuple):
    """What to learn from."""

    target_tm1: PerStep
    """v_s of equation 1: what the critic should say."""
    advantage_t: PerStep
    """rho_s (r_s + gamma v_{s+1} - V(x_s)): what the gradient of the log-probability is multiplied with."""


def vtrace(
    ratio_t: PerStep,
    reward_t: PerStep,
    discount_t: PerStep,
    last_t: Flags,
    value_tm1: PerStep,
    value_t: PerStep,
    lambda_: float = 1.0,
    *,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    """Equation 1 of the paper, as its remark 1; `ratio_t` is pi(a) / mu(a), `lambda_` the one of its remark 2.

    Where pi = mu these are the lambda-return and generalised advantages, if `rho_bar` and `c_bar` are at least 1.
    """
    rho_t, c_t = jnp.minimum(ratio_t, rho_bar), lambda_ * jnp.minimum(ratio_t, c_bar)
    delta_t = reward_t + discount_t * value_t - value_tm1
    error_tm1 = accumulate(rho_t * delta_t, jnp.where(last_t, 0.0, discount_t * c_t), jnp.zeros_like(delta_t[0]))
    # v_{s+1} - V(x_{s+1}); nothing is known of it beyond the trajectory, nor beyond an episode's end.
    error_t = jnp.where(last_t, 0.0, _next(error_tm1))
    return VTrace(value_tm1 + error_tm1, rho_t * (delta_t + lambda_ * discount_t * error_t))


def _next(x_t: PerStep) -> Float[Array, "time env"]:
    return jnp.concatenate([x_t[1:], jnp.zeros_like(x_t[:1])])
