"""The smallest algorithm that learns without environment steps: it imitates an expert for CartPole on random observations.

Its only metric is the loss; it has no metrics of episodes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

import choreo


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


@dataclass(frozen=True, kw_only=True)
class Imitation:
    """Behavioural cloning of an expert that pushes the cart to the side to which the pole falls."""

    learning_rate: float = 1.0
    """Step size of the gradient descent. It falls to 0 over `total_steps`, if this is not None."""
    batch_size: int = 64
    """Number of observations in each iteration. The expert chooses an action for each of them."""
    total_steps: int | None = None
    """Steps of the whole run; here a step is an iteration. `choreo.train` replaces None by the number of iterations of the run."""
    nan_at: int = -1
    """The iteration that reports NaN as its loss; -1 if no iteration does."""

    def steps_per_iteration(self, env):
        return 0

    def init(self, env, key):
        weights = jnp.zeros((env.observation_space.shape[0], env.action_space.n), jnp.float32)
        return Carry(Train(weights, jnp.zeros((), jnp.int32)))

    def policy(self, train):
        return train.weights

    @choreo.fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        logits = obs @ params
        return (jnp.argmax(logits) if greedy else jax.random.categorical(key, logits)), ()

    def iterate(self, env, carry, key):
        obs = jax.random.normal(key, (self.batch_size, env.observation_space.shape[0]), jnp.float32)
        train, loss = self.learn(carry.train, obs)
        return Carry(train), {"loss": loss}

    @choreo.fragment("learner")
    def learn(self, train, obs):
        expert = (obs[:, 2] + obs[:, 3] > 0).astype(jnp.int32)

        def loss(weights):
            log_pi = jax.nn.log_softmax(obs @ weights)
            return -jnp.mean(jnp.take_along_axis(log_pi, expert[:, None], axis=1))

        value, grad = jax.value_and_grad(loss)(train.weights)
        rate = jnp.float32(self.learning_rate)
        if self.total_steps is not None:
            rate = rate * (1 - train.iterations.astype(jnp.float32) / self.total_steps)
        value = jnp.where(train.iterations == self.nan_at, jnp.nan, value)
        return Train(train.weights - rate * choreo.all_reduce(grad), train.iterations + 1), value
