"""A program with features that PPO does not have, for law levels 2 and 3 (`test_layouts.py`).

A compiler that was tested with PPO alone could compute each of these features wrongly:

- nested scans, and keys made by `fold_in` of the step and the index of the environment, as well as by `split`;
- glue that mixes environments: a mean inside both scans, and a standard deviation outside of them;
- a role that is not a standard one ("critic"), and a gradient that flows through fragments of two roles;
- a Flax network, whose parameters are a dict and not a module;
- a carry with a counter, a value that never changes, and two values that swap places.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from choreo import fragment


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, param_dtype=jnp.result_type(float))
        return dense(3)(nn.tanh(dense(8)(x)))


class Carry(NamedTuple):
    train: Any
    """Parameters and the state of the optimiser."""
    env_state: Any
    """State of all environments."""
    obs: jax.Array
    """Observation of each environment."""
    ping: jax.Array
    """A number per environment. Its next value is half of `pong`."""
    pong: jax.Array
    """A number per environment. Its next value is `ping`."""
    never: jax.Array
    """Never changes."""
    count: jax.Array
    """Grows by the number of environments in each iteration."""


@dataclass(frozen=True, kw_only=True)
class Other:
    """The program with the features listed above."""

    learning_rate: float = 0.05
    """Step size of the optimiser."""
    rounds: int = 2
    """Length of the outer scan."""
    steps: int = 3
    """Length of the inner scan: steps per environment and round."""
    optimizer: Any = None
    """Makes the optimiser from the learning rate; None stands for SGD with momentum."""

    @property
    def unroll(self):
        return self.rounds * self.steps

    def opt(self):
        return (self.optimizer or functools.partial(optax.sgd, momentum=0.9))(self.learning_rate)

    def init(self, env, key):
        key_net, key_critic, key_env = jax.random.split(key, 3)
        size = env.observation_space.shape[0]
        actor = Net().init(key_net, jnp.zeros(size))
        critic = jax.random.normal(key_critic, (size,))
        env_state, obs = env.reset(env.keys(key_env))
        ping = jnp.arange(env.num_envs, dtype=obs.dtype)
        params = {"actor": actor, "critic": critic}
        return Carry((params, self.opt().init(params)), env_state, obs, ping, -ping, jnp.float32(7), jnp.int32(0))

    def policy(self, train):
        return train[0]

    @fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        logits = Net().apply(params["actor"], obs)
        return jnp.argmax(logits[:2] + jax.random.gumbel(key, (2,), logits.dtype)), logits

    @fragment("critic")
    def error(self, critic, obs, judged, target):
        value = jnp.tanh(obs @ critic) + judged  # a batch of environments without vmap
        return jnp.mean((value - target) ** 2)

    @fragment("learner")
    def judge(self, actor, obs):
        return Net().apply(actor, obs)[..., 2]

    @fragment("learner")
    def update(self, train, grads):
        params, state = train
        updates, state = self.opt().update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def iterate(self, env, carry, key):
        params = carry.train[0]

        def step(position, i):
            env_state, obs = position
            keys = jax.vmap(lambda e: jax.random.fold_in(jax.random.fold_in(key, i), e))(jnp.arange(env.num_envs))
            centred = obs - 0.01 * jnp.mean(obs, axis=0, keepdims=True)  # mixes environments, inside two loops
            action, _ = jax.vmap(self.act, (None, 0, 0))(params, centred, keys)
            env_state, ts = env.step(env_state, action)
            return (env_state, ts.obs), (centred, ts.reward, ts.last)

        def round_(position, r):
            return jax.lax.scan(step, position, r * self.steps + jnp.arange(self.steps))

        (env_state, obs), (seen, reward, last) = jax.lax.scan(
            round_, (carry.env_state, carry.obs), jnp.arange(self.rounds)
        )
        noise = jax.random.normal(jax.random.split(key)[1], (env.num_envs,), seen.dtype)

        def loss(params):
            judged = self.judge(params["actor"], seen[-1, -1])
            return self.error(params["critic"], seen[-1, -1], judged, jnp.sum(reward, (0, 1)) + noise)

        value, grads = jax.value_and_grad(loss)(params)
        train = self.update(carry.train, grads)
        metrics = {"loss": value, "ends": jnp.sum(last), "spread": jnp.std(obs), "count": carry.count, "constant": 1.5}
        after = Carry(train, env_state, obs, carry.pong * 0.5, carry.ping, carry.never, carry.count + env.num_envs)
        return after, metrics
