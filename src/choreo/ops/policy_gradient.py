"""The parts of a policy gradient: distributions of actions, and advantages of actions. Docstrings name the paper's equation.

    gradient of  -log_prob(action) * advantage       log_prob: Categorical, Gaussian, ...
                                                     advantage: gae, lambda_return, vtrace

A distribution is a small pytree for one environment or, under `vmap`, for many. Advantages and returns are computed from
trajectories [time, env]. The suffix `_tm1` ("t minus 1") means before a step, `_t` during or after the step:

    value_tm1                  the value of the observation before the step (`obs` of a `Transition`)
    reward_t                   the reward of the step
    discount_t                 the discount factor, but 0 where the episode terminated
    last_t                     True where the episode terminated or reached a time limit
    value_t                    the value of the observation after the step (`next_obs` of a `Transition`)

At a time limit the discount is not 0, so the return bootstraps from `value_t`. Rewards of the next episode never count.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from choreo.types import Key

PerStep = Float[Array, "time env"]
Flags = Bool[Array, "time env"]

MASKED = -1e9
"""The logit of a forbidden action: so low that it is never sampled, but finite, so that entropy and gradients are finite."""


@runtime_checkable
class Distribution(Protocol):
    """A distribution over actions; `pi` in our code."""

    def sample(self, key: Key) -> Array: ...

    def mode(self) -> Array:
        """The likeliest action."""
        ...

    def log_prob(self, action: Array) -> Array: ...

    def entropy(self) -> Array: ...


class Categorical(NamedTuple):
    """A choice of one of n actions."""

    logits: Float[Array, "*batch n"]

    def sample(self, key: Key) -> Int[Array, "*batch"]:
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def mode(self) -> Int[Array, "*batch"]:
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
        # A product with a one-hot vector is used instead of a gather, because the gradient of a gather is a slow scatter.
        chosen = jax.nn.one_hot(action, self.logits.shape[-1], dtype=self.logits.dtype)
        return jnp.sum(jax.nn.log_softmax(self.logits) * chosen, axis=-1)

    def entropy(self) -> Float[Array, "*batch"]:
        log_p = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


class Gaussian(NamedTuple):
    """Independent normal variables; log-probabilities are summed over the last axis."""

    mean: Float[Array, "*batch n"]
    log_std: Float[Array, "*batch n"]

    def sample(self, key: Key) -> Float[Array, "*batch n"]:
        return self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape, self.mean.dtype)

    def mode(self) -> Float[Array, "*batch n"]:
        return self.mean

    def log_prob(self, action: Float[Array, "*batch n"]) -> Float[Array, "*batch"]:
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return -jnp.sum(0.5 * z**2 + self.log_std + 0.5 * float(np.log(2 * np.pi)), axis=-1)

    def entropy(self) -> Float[Array, "*batch"]:
        return jnp.sum(self.log_std + 0.5 * float(np.log(2 * np.pi * np.e)), axis=-1)


class Bernoulli(NamedTuple):
    """A choice of 0 or 1."""

    logits: Float[Array, "*batch"]

    def sample(self, key: Key) -> Int[Array, "*batch"]:
        return jax.random.bernoulli(key, jax.nn.sigmoid(self.logits)).astype(jnp.int8)

    def mode(self) -> Int[Array, "*batch"]:
        return (self.logits > 0).astype(jnp.int8)

    def log_prob(self, action: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
        return jax.nn.log_sigmoid(jnp.where(action == 1, self.logits, -self.logits))

    def entropy(self) -> Float[Array, "*batch"]:
        p = jax.nn.sigmoid(self.logits)
        return -p * jax.nn.log_sigmoid(self.logits) - (1 - p) * jax.nn.log_sigmoid(-self.logits)


class Independent(NamedTuple):
    """A vector of n independent actions; log-probabilities and entropies are summed over the n actions."""

    each: Distribution
    """One distribution with the shape [*batch, n]: entry i along the last axis is the distribution of action i."""

    def sample(self, key: Key) -> Int[Array, "*batch n"]:
        return self.each.sample(key)

    def mode(self) -> Int[Array, "*batch n"]:
        return self.each.mode()

    def log_prob(self, action: Int[Array, "*batch n"]) -> Float[Array, "*batch"]:
        return jnp.sum(self.each.log_prob(action), axis=-1)

    def entropy(self) -> Float[Array, "*batch"]:
        return jnp.sum(self.each.entropy(), axis=-1)


class Shifted(NamedTuple):
    """A distribution of actions that are numbered from `start` instead of 0."""

    counted: Distribution
    """The distribution of actions that are numbered from 0."""
    start: Int[Array, "*action"]
    """The first action."""

    def sample(self, key: Key) -> Int[Array, "*action"]:
        return self.counted.sample(key) + self.start

    def mode(self) -> Int[Array, "*action"]:
        return self.counted.mode() + self.start

    def log_prob(self, action: Int[Array, "*action"]) -> Float[Array, "*batch"]:
        return self.counted.log_prob(action - self.start)

    def entropy(self) -> Float[Array, "*batch"]:
        return self.counted.entropy()


def masked(logits: Float[Array, "n"], mask: Bool[Array, "n"] | None) -> Float[Array, "n"]:
    """Logits that allow an action only where `mask` is True.

    With None, the logits do not change. If `mask` is False everywhere, all actions are equally likely.
    """
    if mask is None:
        return logits
    # If all logits were MASKED, sampling would always draw the first action, because rounding removes the noise added to -1e9.
    return jnp.where(mask, logits, jnp.where(jnp.any(mask), MASKED, 0.0).astype(logits.dtype))


def multi_categorical(
    logits: Float[Array, "total"], sizes: Sequence[int], mask: Bool[Array, "total"] | None = None
) -> Independent:
    """A distribution over vectors of actions; dimension i has sizes[i] actions.

    `logits` and `mask` contain the values of dimension 0, then those of dimension 1, and so on.
    """
    ends = np.cumsum(sizes)[:-1]
    masks = [None] * len(sizes) if mask is None else jnp.split(mask, ends)
    rows = [masked(row, allowed) for row, allowed in zip(jnp.split(logits, ends), masks, strict=True)]
    # One matrix for all dimensions; shorter rows are padded with forbidden actions.
    filled = [jnp.pad(row, (0, max(sizes) - len(row)), constant_values=MASKED) for row in rows]
    return Independent(Categorical(jnp.stack(filled)))


def gae(
    reward_t: PerStep, discount_t: PerStep, last_t: Flags, value_tm1: PerStep, value_t: PerStep, lambda_: float
) -> PerStep:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16)."""
    delta_t = reward_t + discount_t * value_t - value_tm1
    return accumulate(delta_t, jnp.where(last_t, 0.0, lambda_ * discount_t), jnp.zeros_like(delta_t[0]))


def lambda_return(reward_t: PerStep, discount_t: PerStep, last_t: Flags, value_t: PerStep, lambda_: float) -> PerStep:
    """The lambda-return (Sutton & Barto 2018, eq. 12.18); lambda_=1 is the Monte Carlo return, lambda_=0 the one-step return."""
    # As in `gae`, the trace ends with the episode; the last step of an episode bootstraps from `value_t`.
    trace_t = jnp.where(last_t, 0.0, jnp.full_like(discount_t, lambda_))
    bootstrap_t = reward_t + discount_t * (1 - trace_t) * value_t
    return accumulate(bootstrap_t, discount_t * trace_t, value_t[-1])


def discounted_return(reward_t: PerStep, discount_t: PerStep, last_t: Flags, value_t: PerStep) -> PerStep:
    """The discounted sum of rewards up to the end of the episode or trajectory, plus the discounted `value_t` at this end."""
    return lambda_return(reward_t, discount_t, last_t, value_t, 1.0)


class VTrace(NamedTuple):
    """Targets and advantages for a policy, from trajectories that an older policy collected."""

    target_tm1: PerStep
    """v_s of equation 1: the critic's target."""
    advantage_t: PerStep
    """The factor of the log-probability's gradient: rho_s (r_s + gamma v_{s+1} - V(x_s)), if `lambda_` is 1."""


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
    """V-trace (Espeholt et al. 2018, eq. 1 in the form of remark 1); `lambda_` is the lambda of remark 2.

    `ratio_t` is pi(a) / mu(a): pi is the learner's policy, mu the policy that acted. If pi = mu, and `rho_bar` and `c_bar` are
    at least 1, the results are the lambda-return and the generalised advantages.
    """
    rho_t, c_t = jnp.minimum(ratio_t, rho_bar), lambda_ * jnp.minimum(ratio_t, c_bar)
    delta_t = reward_t + discount_t * value_t - value_tm1
    error_tm1 = accumulate(rho_t * delta_t, jnp.where(last_t, 0.0, discount_t * c_t), jnp.zeros_like(delta_t[0]))
    # v_{s+1} - V(x_{s+1}); 0 after the last step of the trajectory and after the last step of an episode.
    next_error_tm1 = jnp.concatenate([error_tm1[1:], jnp.zeros_like(error_tm1[:1])])
    error_t = jnp.where(last_t, 0.0, next_error_tm1)
    return VTrace(value_tm1 + error_tm1, rho_t * (delta_t + lambda_ * discount_t * error_t))


def accumulate(x_t: PerStep, decay_t: PerStep, beyond: Float[Array, " env"]) -> PerStep:
    """y_t = x_t + decay_t * y_{t+1}, computed from the last step to the first; `beyond` is y after the last step."""

    def step(y, now):
        x, decay = now
        y = x + decay * y
        return y, y

    return jax.lax.scan(step, beyond, (x_t, decay_t), reverse=True, unroll=min(8, x_t.shape[0]))[1]


def clipped_surrogate(
    ratio_t: Float[Array, "*batch"], advantage_t: Float[Array, "*batch"], epsilon: float
) -> Float[Array, "*batch"]:
    """The loss of each sample: PPO's objective (Schulman et al. 2017, eq. 7), negated. `ratio_t` is pi(a) / pi_old(a)."""
    clipped_t = jnp.clip(ratio_t, 1 - epsilon, 1 + epsilon)
    return -jnp.minimum(ratio_t * advantage_t, clipped_t * advantage_t)


def clipped(optimizer: optax.GradientTransformation, max_norm: float) -> optax.GradientTransformation:
    """Scale gradients down to `max_norm`, then apply `optimizer` to all parameters as one vector.

    An optimiser runs a few small operations on each parameter array. For small arrays, starting these operations takes longer than
    computing them. If all parameters are one vector, these operations run only once. This saves 7% of PPO's time to learn with two
    networks of 2 x 64 units.
    """
    return optax.chain(optax.clip_by_global_norm(max_norm), optax.flatten(optimizer))
