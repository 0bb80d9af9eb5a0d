"""CartPole-v1 in JAX, with the same equations of motion as in Gymnasium (Barto, Sutton & Anderson 1983)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from choreo.envs.vmap import EnvStep
from choreo.types import Key

GRAVITY, FORCE, TAU = 9.8, 10.0, 0.02
MASS_POLE, MASS, HALF_LENGTH = 0.1, 1.1, 0.5
X_LIMIT, THETA_LIMIT = 2.4, 12 * 2 * math.pi / 360


class CartPoleState(NamedTuple):
    """Position and velocity of cart and pole."""

    x: jax.Array
    """Position of the cart."""
    x_dot: jax.Array
    """Velocity of the cart."""
    theta: jax.Array
    """Angle of the pole; 0 is upright."""
    theta_dot: jax.Array
    """Angular velocity of the pole."""


@dataclass(frozen=True, kw_only=True)
class CartPole:
    """Keep a pole upright by pushing its cart to the left (0) or to the right (1); each step gives reward 1."""

    time_limit: int = 500
    """Steps after which an episode is truncated."""

    @property
    def name(self) -> str:
        return "jax:CartPole-v1"

    @property
    def observation_space(self) -> gymnasium.spaces.Box:
        high = np.array([X_LIMIT * 2, np.inf, THETA_LIMIT * 2, np.inf], np.float32)
        return gymnasium.spaces.Box(-high, high, dtype=np.float32)

    @property
    def action_space(self) -> gymnasium.spaces.Discrete:
        return gymnasium.spaces.Discrete(2)

    def reset(self, key: Key) -> tuple[CartPoleState, jax.Array]:
        obs = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
        return CartPoleState(*obs), obs

    def step(self, state: CartPoleState, action: jax.Array, key: Key) -> tuple[CartPoleState, EnvStep]:
        del key
        x, x_dot, theta, theta_dot = state
        force = jnp.where(action == 1, FORCE, -FORCE).astype(x.dtype)
        cos, sin = jnp.cos(theta), jnp.sin(theta)
        push = (force + MASS_POLE * HALF_LENGTH * theta_dot**2 * sin) / MASS
        theta_acc = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - MASS_POLE * cos**2 / MASS))
        x_acc = push - MASS_POLE * HALF_LENGTH * theta_acc * cos / MASS

        state = CartPoleState(
            x + TAU * x_dot, x_dot + TAU * x_acc, theta + TAU * theta_dot, theta_dot + TAU * theta_acc
        )
        terminated = (jnp.abs(state.x) > X_LIMIT) | (jnp.abs(state.theta) > THETA_LIMIT)
        return state, EnvStep(jnp.stack(state), jnp.ones((), x.dtype), terminated)
