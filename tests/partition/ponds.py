"""A small algorithm (an actor, a learner and a loop) and a small environment, for tests of the compiler."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import choreo
from laws.refuse_or_equal import Pond as Pond

STEPS = 4


@dataclass(frozen=True)
class Functions:
    """An algorithm made of two functions."""

    start: Callable[..., Any]
    """(env, key) -> carry"""
    go: Callable[..., Any]
    """(env, carry, key) -> carry, metrics"""

    def init(self, env, key):
        return self.start(env, key)

    def iterate(self, env, carry, key):
        return self.go(env, carry, key)


def reset(env, key):
    """The first carry. Actor and learner read `w`, only the learner reads `slow`, and `s` has one row per environment."""
    return {"w": jnp.linspace(0.5, 1.5, env.width), "slow": jnp.zeros(env.width), "s": env.reset(env.keys(key))}


def still(env, key):
    """The first carry, like `reset`. It has no random numbers, because they take long to compile."""
    s = jnp.linspace(-1.0, 1.0, env.num_envs * env.width).reshape(env.num_envs, env.width)
    return {"w": jnp.linspace(0.5, 1.5, env.width), "slow": jnp.zeros(env.width), "s": s}


@choreo.fragment("actor")
def push(w, s):
    return w * jnp.tanh(s)


@choreo.fragment("actor")
def act(w, s, key):
    return w * jnp.tanh(s) + 0.1 * jax.random.normal(key, s.shape)


@choreo.fragment("learner")
def learn(w, slow, path):
    slow = 0.9 * slow + 0.1 * jnp.mean(path, (0, 1))
    return w - 0.05 * slow, slow, jnp.sum(slow)


def pushed(env, carry):
    """The states of all environments after one step."""
    return env.step(carry["s"], jax.vmap(push, (None, 0))(carry["w"], carry["s"]))


def walk(env, carry, key):
    """One iteration: act and step STEPS times, then learn from `path`, the states before each step."""

    def step(s, key):
        action = jax.vmap(act, (None, 0, 0))(carry["w"], s, env.keys(key))
        return env.step(s, action), s

    s, path = jax.lax.scan(step, carry["s"], jax.random.split(key, STEPS))
    w, slow, loss = learn(carry["w"], carry["slow"], path)
    return {"w": w, "slow": slow, "s": s}, {"loss": loss}


WALK = Functions(reset, walk)
