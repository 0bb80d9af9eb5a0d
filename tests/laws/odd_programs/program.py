"""How an odd program is registered, and the fragments, arrays and the rollout that many odd programs share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import choreo

E = 6
"""Number of environments."""
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""By name: init(env, key) -> carry, and iterate(env, carry, key) -> carry, metrics."""
TABLE = jnp.linspace(-1.0, 1.0, E * 3).reshape(E, 3)
SQUARE = jnp.linspace(-1.0, 1.0, E * E).reshape(E, E)
"""Constant arrays with axes of length E."""


@dataclass(frozen=True)
class Program:
    """The registered program `name`, as an algorithm."""

    name: str

    def init(self, env, key):
        return PROGRAMS[self.name][0](env, key)

    def iterate(self, env, carry, key):
        return PROGRAMS[self.name][1](env, carry, key)


def state_and_weights(env, key):
    """The usual carry: a state per environment, and weights that all environments share."""
    return {"s": env.reset(env.keys(key)), "w": jnp.linspace(0.5, 1.5, env.width)}


def program(init=state_and_weights):
    """Register the decorated `iterate` under its own name, with spaces for underscores."""

    def register(iterate):
        PROGRAMS[iterate.__name__.replace("_", " ")] = (init, iterate)
        return iterate

    return register


@choreo.fragment("actor")
def act(w, s):
    return w * jnp.tanh(s)


@choreo.fragment("actor")
def act_random(w, s, key):
    return w * jnp.tanh(s) + 0.1 * jax.random.normal(key, s.shape)


@choreo.fragment("learner")
def learn(w, *xs):
    return w - sum(0.05 * jnp.mean(jnp.tanh(x) ** 2) for x in xs)


def acts(w, s):
    """Act for each environment: the fragment under `vmap`."""
    return jax.vmap(act, (None, 0))(w, s)


@program()
def plain(env, c, key):
    """Act, step, learn: nothing is odd here. Many other programs differ from this program in one thing."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


def unroll(env, c, **kwargs):
    """Act and step in a scan; return the last state and the state after each step."""

    def step(s, x):
        s = env.step(s, acts(c["w"], s))
        return s, s

    return lax.scan(step, c["s"], None, **kwargs)
