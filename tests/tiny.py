"""The smallest algorithm that learns, as a user would write it: REINFORCE with a linear policy. It compiles fast."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

import choreo
from choreo.loops import Position, rollout


class Train(NamedTuple):
    """The learned state."""

    weights: jax.Array
    """Weights of the policy: [input, action]"""
    iterations: jax.Array
    """Iterations so far."""


class Carry(NamedTuple):
    """What one iteration hands to the next."""

    train: Train
    """The learned state."""
    position: Position
    """State and observations of the environments."""


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """REINFORCE with a linear policy."""

    learning_rate: float = 0.1
    """Step size of the gradient ascent."""
    unroll: int = 16
    """Steps per environment and iteration."""
    total_steps: int | None = None
    """Environment steps of the whole run. The step size falls to 0 over these steps. `choreo.train` replaces None by the number of
    steps of the run. If the value is still None when `learn` runs, the step size is constant."""
    nan_at: int = -1
    """The iteration that reports NaN as its loss; -1 if no iteration does."""
    centred: bool = True
    """Whether the learner subtracts the mean return as a baseline."""
    squash: Callable[[jax.Array], jax.Array] = jnp.tanh
    """A function that is applied to observations."""

    def init(self, env, key):
        env_state, obs = env.reset(env.keys(key))
        weights = jnp.zeros((env.observation_space.shape[0], env.action_space.n), obs.dtype)
        return Carry(Train(weights, jnp.zeros((), jnp.int32)), Position(env_state, obs))

    def policy(self, train):
        return train.weights

    @choreo.fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        logits = self.squash(obs) @ params
        return (jnp.argmax(logits) if greedy else jax.random.categorical(key, logits)), ()

    def iterate(self, env, carry, key):
        params = self.policy(carry.train)
        position, trajectory, episodes = rollout(env, self.act, params, carry.position, key, self.unroll)
        train, metrics = self.learn(carry.train, trajectory)
        return Carry(train, position), episodes | metrics

    @choreo.fragment("learner")
    def learn(self, train, trajectory):
        def step(after, now):
            total = now.reward + jnp.where(now.last, 0, after)
            return total, total

        _, returns = jax.lax.scan(step, jnp.zeros_like(trajectory.reward[0]), trajectory, reverse=True)
        advantage = returns - jnp.mean(returns) if self.centred else returns

        def loss(weights):
            log_pi = jax.nn.log_softmax(self.squash(trajectory.obs) @ weights)
            chosen = jnp.take_along_axis(log_pi, trajectory.action[..., None], axis=-1)[..., 0]
            return -jnp.mean(chosen * advantage)

        value, grad = jax.value_and_grad(loss)(train.weights)
        rate = jnp.full((), self.learning_rate, value.dtype)
        if self.total_steps is not None:
            progress = train.iterations.astype(value.dtype) * (trajectory.reward.size / self.total_steps)
            rate = rate * (1 - progress)
        value = jnp.where(train.iterations == self.nan_at, jnp.nan, value)
        train = Train(train.weights - rate * choreo.all_reduce(grad), train.iterations + 1)
        return train, {"loss": value, "rate": rate}
