"""Pendulum-v1 in JAX, with the same equations of motion as in Gymnasium."""

from dataclasses import dataclass
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from choreo.envs.vmap import EnvStep
from choreo.types import Key

MAX_SPEED, MAX_TORQUE, DT = 8.0, 2.0, 0.05
MASS, LENGTH = 1.0, 1.0


class PendulumState(NamedTuple):
    """Angle and angular velocity."""

    theta: jax.Array
    """Angle of the pendulum; 0 is upright."""
    theta_dot: jax.Array
    """Angular velocity of the pendulum."""


@dataclass(frozen=True, kw_only=True)
class Pendulum:
    """Swing a pendulum up and hold it upright; the cost is a weighted sum of squared angle, velocity and torque."""

    gravity: float = 10.0
    """Acceleration of gravity."""
    time_limit: int = 200
    """Steps after which an episode is truncated; no episode terminates."""

    @property
    def name(self) -> str:
        return "jax:Pendulum-v1"

    @property
    def observation_space(self) -> gymnasium.spaces.Box:
        high = np.array([1.0, 1.0, MAX_SPEED], np.float32)
        return gymnasium.spaces.Box(-high, high, dtype=np.float32)

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-MAX_TORQUE, MAX_TORQUE, (1,), np.float32)

    def reset(self, key: Key) -> tuple[PendulumState, jax.Array]:
        theta, theta_dot = jax.random.uniform(key, (2,), minval=-1.0, maxval=1.0)
        state = PendulumState(theta * jnp.pi, theta_dot)
        return state, observe(state)

    def step(self, state: PendulumState, action: jax.Array, key: Key) -> tuple[PendulumState, EnvStep]:
        del key
        theta, theta_dot = state
        torque = jnp.clip(action[0], -MAX_TORQUE, MAX_TORQUE).astype(theta.dtype)
        angle = (theta + jnp.pi) % (2 * jnp.pi) - jnp.pi
        cost = angle**2 + 0.1 * theta_dot**2 + 0.001 * torque**2

        acceleration = 3 * self.gravity / (2 * LENGTH) * jnp.sin(theta) + 3.0 / (MASS * LENGTH**2) * torque
        theta_dot = jnp.clip(theta_dot + acceleration * DT, -MAX_SPEED, MAX_SPEED)
        state = PendulumState(theta + theta_dot * DT, theta_dot)
        return state, EnvStep(observe(state), -cost, jnp.zeros((), bool))


def observe(state: PendulumState) -> jax.Array:
    return jnp.stack([jnp.cos(state.theta), jnp.sin(state.theta), state.theta_dot])
