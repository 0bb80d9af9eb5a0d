"""Networks of dense layers. An `Encoder` turns each observation into one vector.

mlp             obs -> layers -> PolicyHead -> pi              actor-critics: PPO, A2C, IMPALA, REINFORCE
                obs -> layers -> value
deterministic   obs -> layers -> tanh, scaled -> action        control: DDPG, TD3
squashed        obs -> layers -> Squashed                      control: SAC
                obs, action -> layers -> value                 each critic of DDPG, TD3 and SAC
"""

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
from gymnasium import spaces
from jaxtyping import Array, Float

from choreo.envs.spaces import Bounds, Encoder, action_mask, bounds_of, check_action_mask, encoder, integers
from choreo.errors import AlgorithmError
from choreo.ops import Bernoulli, Categorical, Distribution, Gaussian, Independent, Shifted, masked, multi_categorical
from choreo.types import Key, PyTree

Factory = Callable[[gymnasium.Space, gymnasium.Space, Key], Any]
"""Builds a network: (observation_space, action_space, key) -> module."""

LOG_STD = (-20.0, 2.0)
"""The range to which `squashed` clips the logarithm of a standard deviation (Haarnoja et al. 2018)."""


def mlp(
    observation_space: gymnasium.Space, action_space: gymnasium.Space, key: Key, *, hidden: Sequence[int] = (64, 64)
) -> "ActorCritic":
    """The usual network of PPO for vectors: actor and critic share no weights; tanh layers with orthogonal weights."""
    check_action_mask(observation_space, action_space)
    key_actor, key_critic, key_policy, key_value = jax.random.split(key, 4)
    encode = encoder(observation_space)
    widths = (encode.size, *hidden)
    return ActorCritic(
        encode=encode,
        actor=layers(key_actor, widths),
        critic=layers(key_critic, widths),
        policy=policy_head(action_space, widths[-1], key_policy),
        value=linear(key_value, widths[-1], 1, scale=1.0),
    )


def deterministic(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    *,
    hidden: Sequence[int] = (256, 256),
    critics: int = 2,
) -> "Control":
    """The usual network of TD3, of ReLU layers: a policy that returns one action, and critics that give values to actions."""
    key_policy, key_critics = jax.random.split(key)
    return Control(
        policy=Deterministic(*_policy_parts(observation_space, action_space, key_policy, hidden)),
        critics=_critics(observation_space, action_space, key_critics, hidden, critics),
    )


def squashed(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    *,
    hidden: Sequence[int] = (256, 256),
    critics: int = 2,
) -> "Control":
    """The usual network of SAC, of ReLU layers: a policy that returns a `Squashed` distribution, and critics as for TD3."""
    key_policy, key_critics = jax.random.split(key)
    return Control(
        policy=Stochastic(*_policy_parts(observation_space, action_space, key_policy, hidden, outputs=2)),
        critics=_critics(observation_space, action_space, key_critics, hidden, critics),
    )


class ActorCritic(eqx.Module):
    """The network of `mlp`."""

    encode: Encoder
    actor: tuple[eqx.nn.Linear, ...]
    critic: tuple[eqx.nn.Linear, ...]
    policy: "PolicyHead"
    value: eqx.nn.Linear

    def __call__(self, obs: PyTree) -> tuple[Distribution, jax.Array]:
        x = self.encode(obs)
        pi = self.policy(apply_tanh(self.actor, x), action_mask(obs))
        return pi, self.value(apply_tanh(self.critic, x))[0]


class PolicyHead(eqx.Module):
    """From features to an action distribution: the last layer of every actor-critic's policy."""

    @abc.abstractmethod
    def __call__(self, features: jax.Array, mask: jax.Array | None) -> Distribution:
        """The distribution of actions; `mask` is True for each allowed action, or None if all actions are allowed."""


class Continuous(PolicyHead):
    """For a Box with one axis."""

    output: eqx.nn.Linear
    log_std: jax.Array
    """Logarithm of the standard deviation of each action dimension; it does not depend on the observation."""

    def __call__(self, features: jax.Array, mask: jax.Array | None) -> Gaussian:
        return Gaussian(self.output(features), self.log_std)


class Choice(PolicyHead):
    """For Discrete actions."""

    output: eqx.nn.Linear
    start: int = eqx.field(static=True)

    def __call__(self, features: jax.Array, mask: jax.Array | None) -> Categorical | Shifted:
        pi = Categorical(masked(self.output(features), mask))
        return Shifted(pi, jnp.int32(self.start)) if self.start else pi


class Choices(PolicyHead):
    """For MultiDiscrete actions, whose dimensions are independent."""

    output: eqx.nn.Linear
    sizes: tuple[int, ...] = eqx.field(static=True)
    start: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, features: jax.Array, mask: jax.Array | None) -> Independent | Shifted:
        pi = multi_categorical(self.output(features), self.sizes, mask)
        return Shifted(pi, jnp.array(self.start, jnp.int32)) if any(self.start) else pi


class Switches(PolicyHead):
    """For MultiBinary actions, whose dimensions are independent."""

    output: eqx.nn.Linear

    def __call__(self, features: jax.Array, mask: jax.Array | None) -> Independent:
        return Independent(Bernoulli(self.output(features)))


def policy_head(action_space: gymnasium.Space, width: int, key: Key) -> PolicyHead:
    """The head for an action space, on features of length `width`."""
    # With small initial weights, every action is about equally likely (Andrychowicz et al. 2021, section 3.2).
    output = functools.partial(linear, key, width, scale=0.01)
    if isinstance(action_space, spaces.Discrete):
        return Choice(output(int(action_space.n)), int(action_space.start))
    num = action_space.shape[0] if action_space.shape and len(action_space.shape) == 1 else None
    if isinstance(action_space, spaces.Box) and num:
        return Continuous(output(num), jnp.zeros(num))
    if isinstance(action_space, spaces.MultiDiscrete) and num:
        sizes = integers(action_space.nvec)
        return Choices(output(sum(sizes)), sizes, integers(action_space.start))
    if isinstance(action_space, spaces.MultiBinary) and num:
        return Switches(output(num))
    raise AlgorithmError(
        "The built-in networks act in Discrete spaces, and in Box, MultiDiscrete and MultiBinary spaces with one axis, "
        f"not in {action_space}.",
        fix="Flatten the action in a wrapper, or set `network` to your own factory, whose module returns a "
        "distribution over such actions.",
    )


class Control(eqx.Module):
    """The network of `deterministic` and `squashed`: a policy, which is all that acting needs, and critics."""

    policy: "Deterministic | Stochastic"
    critics: tuple["ActionCritic", ...]


class Deterministic(eqx.Module):
    """From an observation to an action."""

    encode: Encoder
    torso: tuple[eqx.nn.Linear, ...]
    output: eqx.nn.Linear
    bounds: Bounds

    def __call__(self, obs: PyTree) -> jax.Array:
        return self.bounds.scale(jnp.tanh(self.output(apply_relu(self.torso, self.encode(obs)))))


class Stochastic(eqx.Module):
    """From an observation to a distribution over actions."""

    encode: Encoder
    torso: tuple[eqx.nn.Linear, ...]
    output: eqx.nn.Linear
    bounds: Bounds

    def __call__(self, obs: PyTree) -> "Squashed":
        mean, log_std = jnp.split(self.output(apply_relu(self.torso, self.encode(obs))), 2)
        return Squashed(mean, jnp.clip(log_std, *LOG_STD), self.bounds)


class Squashed(NamedTuple):
    """A diagonal Gaussian, squashed by tanh into the bounds of a space (Haarnoja et al. 2018, appendix C).

    Densities are those of actions scaled to [-1, 1], so that the entropy does not depend on the bounds of the space.
    """

    mean: Float[Array, "n"]
    """Mean of the Gaussian."""
    log_std: Float[Array, "n"]
    """Logarithm of the standard deviation of the Gaussian."""
    bounds: Bounds
    """Bounds of the action space."""

    def sample(self, key: Key) -> Float[Array, "*action"]:
        return self.sample_and_log_prob(key)[0]

    def mode(self) -> Float[Array, "*action"]:
        """The median of each dimension. It is not the maximum of the density, which can be at the bounds."""
        return self.bounds.scale(jnp.tanh(self.mean))

    def sample_and_log_prob(self, key: Key) -> tuple[Float[Array, "*action"], Float[Array, ""]]:
        """Sample an action; returns the action and its log-density.

        Both are computed from the sample `x` before tanh, because `x` cannot be computed from an action at the bounds.
        """
        x = self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape, self.mean.dtype)
        # log(1 - tanh(x)^2), written so that it does not round to log(0).
        log_slope = 2 * (math.log(2) - x - jax.nn.softplus(-2 * x))
        action = self.bounds.scale(jnp.tanh(x))
        z = (x - self.mean) * jnp.exp(-self.log_std)
        log_prob = -jnp.sum(0.5 * z**2 + self.log_std + 0.5 * math.log(2 * math.pi), axis=-1)
        return action, log_prob - jnp.sum(log_slope)


class ActionCritic(eqx.Module):
    """From an observation and an action to a value."""

    encode: Encoder
    torso: tuple[eqx.nn.Linear, ...]
    output: eqx.nn.Linear
    bounds: Bounds

    def __call__(self, obs: PyTree, action: jax.Array) -> jax.Array:
        x = jnp.concatenate([self.encode(obs), self.bounds.unscale(action)])
        return self.output(apply_relu(self.torso, x))[0]


def _policy_parts(
    observation_space: gymnasium.Space,
    action_space: gymnasium.Space,
    key: Key,
    hidden: Sequence[int],
    *,
    outputs: int = 1,
) -> tuple[Encoder, tuple[eqx.nn.Linear, ...], eqx.nn.Linear, Bounds]:
    """The fields of a control policy with `outputs` numbers for each dimension of an action."""
    check_action_mask(observation_space, action_space)
    encode, bounds = encoder(observation_space), bounds_of(action_space)
    key_torso, key_output = jax.random.split(key)
    widths = (encode.size, *hidden)
    # With small initial weights, actions begin in the middle of the space, where the gradient of tanh is large.
    return encode, layers(key_torso, widths), linear(key_output, widths[-1], outputs * bounds.size, scale=0.01), bounds


def _critics(
    observation_space: gymnasium.Space, action_space: gymnasium.Space, key: Key, hidden: Sequence[int], num: int
) -> tuple[ActionCritic, ...]:
    """A tuple of `num` critics, which share no weights."""
    if num < 1:
        raise AlgorithmError(f"A network with critics={num} has nothing to learn from.", fix="Use one or two critics.")
    encode, bounds = encoder(observation_space), bounds_of(action_space)
    widths = (encode.size + bounds.size, *hidden)

    def critic(key: Key) -> ActionCritic:
        key_torso, key_output = jax.random.split(key)
        return ActionCritic(encode, layers(key_torso, widths), linear(key_output, widths[-1], 1, scale=1.0), bounds)

    return tuple(map(critic, jax.random.split(key, num)))


def layers(key: Key, widths: Sequence[int]) -> tuple[eqx.nn.Linear, ...]:
    """Dense layers; layer i has widths[i] inputs and widths[i + 1] outputs."""
    keys = jax.random.split(key, max(len(widths) - 1, 1))
    return tuple(linear(k, m, n) for k, m, n in zip(keys, widths[:-1], widths[1:], strict=False))


def linear(key: Key, num_in: int, num_out: int, *, scale: float = math.sqrt(2)) -> eqx.nn.Linear:
    """An affine layer with orthogonal weights and zero biases."""
    return orthogonal(eqx.nn.Linear(num_in, num_out, key=key), key, scale)


def orthogonal(layer: Any, key: Key, scale: float) -> Any:
    """Replace the weights of a dense or convolution layer by orthogonal ones (Saxe et al. 2014), and its biases by zeros."""
    shape = layer.weight.shape
    matrix = jax.nn.initializers.orthogonal(scale)(key, (shape[0], math.prod(shape[1:])), layer.weight.dtype)
    return eqx.tree_at(lambda x: (x.weight, x.bias), layer, (matrix.reshape(shape), jnp.zeros_like(layer.bias)))


def apply_tanh(layers: Sequence[eqx.nn.Linear], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jnp.tanh(layer(x))
    return x


def apply_relu(layers: Sequence[eqx.nn.Linear], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jax.nn.relu(layer(x))
    return x
