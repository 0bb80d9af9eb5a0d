"""The carry and the fragments that the programs of the edge cases share."""

import jax
import jax.numpy as jnp

import choreo


def state_and_weights(env, key):
    """The usual carry: a state per environment, and weights that all environments share."""
    return {"s": env.reset(env.keys(key)), "w": jnp.linspace(0.5, 1.5, env.width)}


@choreo.fragment("actor")
def act(w, s):
    return w * jnp.tanh(s)


@choreo.fragment("learner")
def learn(w, *xs):
    return w - choreo.all_reduce(sum(0.05 * jnp.mean(jnp.tanh(x) ** 2) for x in xs))


def acts(w, s):
    """Act for each environment: the fragment under `vmap`."""
    return jax.vmap(act, (None, 0))(w, s)
