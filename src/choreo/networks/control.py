"""Networks for continuous actions within bounds: a policy, and critics that value actions.

A *factory* `(observation_space, action_space, key) -> module` builds one; the module is any pytree of arrays with

    module.policy(obs) -> pi, or an action                one environment; with `bounds` of the action space
    module.critics                                        a tuple; each is critic(obs, action) -> value

Change a factory's options with `functools.partial(squashed, hidden=(64, 64))`.
"""

import math
from collections.abc import Sequence

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from choreo.errors import AlgorithmError
from choreo.networks import Encoder, check_action_mask, encoder, layers, linear, rectified
from choreo.ops import Bounds, Gaussian, Squashed
from choreo.types import Key, PyTree


def deterministic(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    *,
    hidden: Sequence[int] = (256, 256),
    critics: int = 2,
) -> "Control":
    """A policy that names one action, and critics of actions; ReLU layers: what TD3 is usually run with."""
    key_policy, key_critics = jax.random.split(key)
    return Control(
        policy=Deterministic(*control_policy(observation_space, action_space, key_policy, hidden)),
        critics=action_critics(observation_space, action_space, key_critics, hidden, critics),
    )


def squashed(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    *,
    hidden: Sequence[int] = (256, 256),
    critics: int = 2,
) -> "Control":
    """A policy that draws an action within bounds, and critics of actions; ReLU layers: what SAC is usually run with."""
    key_policy, key_critics = jax.random.split(key)
    return Control(
        policy=Stochastic(*control_policy(observation_space, action_space, key_policy, hidden, outputs=2)),
        critics=action_critics(observation_space, action_space, key_critics, hidden, critics),
    )


class Control(eqx.Module):
    """A network for continuous actions: a policy, which is all that acting needs, and critics of actions."""

    policy: "Deterministic | Stochastic"
    critics: tuple["ActionCritic", ...]


class Deterministic(eqx.Module):
    """From an observation to an action."""

    encode: Encoder
    torso: tuple[eqx.nn.Linear, ...]
    output: eqx.nn.Linear
    bounds: Bounds

    def __call__(self, obs: PyTree) -> jax.Array:
        return self.bounds.scale(jnp.tanh(self.output(rectified(self.torso, self.encode(obs)))))


class Stochastic(eqx.Module):
    """From an observation to a distribution over actions."""

    encode: Encoder
    torso: tuple[eqx.nn.Linear, ...]
    output: eqx.nn.Linear
    bounds: Bounds

    def __call__(self, obs: PyTree) -> Squashed:
        mean, log_std = jnp.split(self.output(rectified(self.torso, self.encode(obs))), 2)
        return Squashed(Gaussian(mean, jnp.clip(log_std, *LOG_STD)), self.bounds)


LOG_STD = (-20.0, 2.0)
"""Between these the logarithm of a standard deviation is kept (Haarnoja et al. 2018)."""


class ActionCritic(eqx.Module):
    """From an observation and an action to a value."""

    encode: Encoder
    torso: tuple[eqx.nn.Linear, ...]
    output: eqx.nn.Linear
    bounds: Bounds

    def __call__(self, obs: PyTree, action: jax.Array) -> jax.Array:
        x = jnp.concatenate([self.encode(obs), self.bounds.unscale(action)])
        return self.output(rectified(self.torso, x))[0]


def control_policy(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    hidden: Sequence[int],
    *,
    outputs: int = 1,
) -> tuple[Encoder, tuple[eqx.nn.Linear, ...], eqx.nn.Linear, Bounds]:
    """The parts of a policy, with so many outputs for each dimension of an action."""
    check_action_mask(observation_space, action_space)
    encode, bounds = encoder(observation_space), bounds_of(action_space)
    key_torso, key_output = jax.random.split(key)
    widths = (encode.size, *hidden)
    # Small weights at first: actions in the middle of the space, where tanh has a slope.
    return encode, layers(key_torso, widths), linear(key_output, widths[-1], outputs * bounds.size, scale=0.01), bounds


def action_critics(
    observation_space: gymnasium.Space, action_space: gymnasium.Space, key: Key, hidden: Sequence[int], num: int
) -> tuple[ActionCritic, ...]:
    """Critics that differ in their first weights."""
    if num < 1:
        raise AlgorithmError(f"A network with critics={num} has nothing to learn from.", fix="Give it one, or two.")
    encode, bounds = encoder(observation_space), bounds_of(action_space)
    widths = (encode.size + bounds.size, *hidden)

    def critic(key: Key) -> ActionCritic:
        key_torso, key_output = jax.random.split(key)
        return ActionCritic(encode, layers(key_torso, widths), linear(key_output, widths[-1], 1, scale=1.0), bounds)

    return tuple(map(critic, jax.random.split(key, num)))


def bounds_of(space: gymnasium.Space) -> Bounds:
    """Of actions that are real numbers; refused if there is no end to them, or no choice."""
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise AlgorithmError(
            f"Actions must be real numbers in a Box, not {space}.",
            fix="For Discrete actions use DQN, PPO or A2C.",
        )
    finite = np.isfinite(space.low) & np.isfinite(space.high) & (space.low < space.high)
    if not finite.all() or not space.shape or not math.prod(space.shape):
        raise AlgorithmError(
            f"Actions must be in a Box with finite bounds, the lower one below the upper one, not in {space}.",
            fix="Bound them in a wrapper (gymnasium.wrappers.RescaleAction); or use PPO, which does not need bounds.",
        )
    low, high = (tuple(x.astype(float).ravel().tolist()) for x in (space.low, space.high))
    return Bounds(low, high, space.shape)
