"""An algorithm for whole runs on CartPole, to check the metrics, the summary and the evaluation that a user sees."""

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import choreo
from choreo.loops import Position, rollout


class Learned(NamedTuple):
    """The train state."""

    weights: jax.Array
    """Weights of the linear policy: a row per number in the observation, a column per action."""
    updates: Any
    """Number of updates. `init` returns it as a Python number."""
    notes: Any
    """An OrderedDict with a bfloat16 array that changes, and with None and a Python number, which do not change."""


class Whole(NamedTuple):
    """The carry."""

    train: Learned
    """The train state."""
    position: Position
    """State and observation of the environments."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A small learner with several odd things at once: Python numbers, containers, metrics that are not in alphabetical order.

    The loss ignores the rewards, because the tests only compare results and need no good policy.
    """

    unroll: int = 4
    """Steps per environment and iteration."""
    sign: Any = 1
    """The type of this number selects the greedy policy: with an int the policy balances the pole, with a float it does not."""

    def init(self, env, key):
        env_state, obs = env.reset(env.keys(key))
        notes = collections.OrderedDict(z=jnp.zeros(4, jnp.bfloat16), a=(None, 0.5))
        return Whole(Learned(jnp.zeros((4, 2)), 0, notes), Position(env_state, obs))

    def policy(self, train):
        return train.weights

    @choreo.fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        if greedy:
            falls_right = obs[2] + obs[3] > 0
            return (falls_right if isinstance(self.sign, int) else ~falls_right).astype(jnp.int32), ()
        return jax.random.categorical(key, jnp.tanh(obs) @ params), ()

    def iterate(self, env, carry, key):
        position, trajectory, episodes = rollout(env, self.act, carry.train.weights, carry.position, key, self.unroll)
        train, loss = self.learn(carry.train, trajectory)
        metrics = collections.OrderedDict(zeta=loss, updates=carry.train.updates, **episodes)
        metrics["alpha"] = jnp.max(train.weights)
        return Whole(train, position), metrics

    @choreo.fragment("learner")
    def learn(self, train, trajectory):
        def loss(weights):
            log_pi = jax.nn.log_softmax(jnp.tanh(trajectory.obs) @ weights)
            return -jnp.mean(jnp.take_along_axis(log_pi, trajectory.action[..., None], axis=-1) * (1 + trajectory.obs))

        value, grad = jax.value_and_grad(loss)(train.weights)
        rate = 0.1 * (1.0 + jnp.asarray(train.updates).astype(jnp.float32))
        notes = collections.OrderedDict(z=train.notes["z"] + np.ones((), jnp.bfloat16), a=train.notes["a"])
        return Learned(train.weights - rate * grad, train.updates + 1, notes), value
