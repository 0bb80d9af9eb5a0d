"""Programs with shapes that depend on the number of environments E, and with other sizes that happen to equal E.

If Choreo found the env axis by its length, it would divide a wrong axis, or divide a leaf that has no env axis.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

import choreo
from laws.edge_cases.program import acts, learn, state_and_weights
from partition.ponds import Functions

SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "E": lambda E: (E,),
    "E + 1": lambda E: (E + 1,),
    "2E": lambda E: (2 * E,),
    "ring buffer of 4E rows": lambda E: (4 * E, 2),
    "E / 2": lambda E: (max(E // 2, 1),),
    "E * E": lambda E: (E * E,),
    "[T, E]": lambda E: (3, E),
    "[E, T]": lambda E: (E, 3),
    "[E, E]": lambda E: (E, E),
    "[E, 2E]": lambda E: (E, 2 * E),
    "[2E, E]": lambda E: (2 * E, E),
    "[E, 1]": lambda E: (E, 1),
    "[1, E]": lambda E: (1, E),
    "[E, 0]": lambda E: (E, 0),
}
"""Shapes of a leaf for E environments. T is a time axis of length 3."""


def with_shape(name: str) -> Functions:
    """The learner writes states into a leaf of the shape `name`, as into a ring buffer, and learns from the mean of the leaf.

    With merge="any" or learner shards, each call of the learner gets only some of the E environments. If Choreo then divided a
    leaf of 4E rows as if the leaf had E rows, the mean would be wrong.
    """

    def init(env, key):
        leaf = jnp.zeros(SHAPES[name](env.num_envs))
        return state_and_weights(env, key) | {"leaf": leaf, "at": jnp.int32(0)}

    def iterate(env, c, key):
        E, size = env.num_envs, math.prod(SHAPES[name](env.num_envs))

        @choreo.fragment("learner")
        def learn_and_write(w, leaf, at, s):
            flat = leaf.reshape(-1)
            some = min(E, size)
            if some:
                flat = flat.at[(at + jnp.arange(some)) % size].set(jnp.tanh(s[:some, 0]))
            mean = jnp.sum(flat) / max(size, 1)
            return w - 0.1 * mean * jnp.tanh(w), flat.reshape(leaf.shape), at + E, mean

        s = env.step(c["s"], acts(c["w"], c["s"]))
        w, leaf, at, mean = learn_and_write(c["w"], c["leaf"], c["at"], s)
        return {"s": s, "w": w, "leaf": leaf, "at": at}, {"mean": mean, "filled": jnp.sum(leaf != 0)}

    return Functions(init, iterate)


def with_rows(name: str) -> Functions:
    """Each environment keeps its own row of a leaf with one env axis. A block must be taken along this axis."""

    def init(env, key):
        leaf = jnp.zeros(SHAPES[name](env.num_envs))
        return state_and_weights(env, key) | {"leaf": leaf}

    def iterate(env, c, key):
        s = env.step(c["s"], acts(c["w"], c["s"]))
        axis = {"E": 0, "[T, E]": 1, "[E, T]": 0, "[E, 1]": 0, "[1, E]": 1, "[E, 0]": 0}[name]
        shape = [env.num_envs if d == axis else 1 for d in range(c["leaf"].ndim)]
        leaf = 0.5 * c["leaf"] + s[:, 0].reshape(shape)
        w = learn(c["w"], s) + (0.1 * jnp.mean(leaf) if leaf.size else 0.0)
        return {"s": s, "w": w, "leaf": leaf}, {"sum": jnp.sum(leaf)}

    return Functions(init, iterate)


ONE_AXIS = ("E", "[T, E]", "[E, T]", "[E, 1]", "[1, E]", "[E, 0]")
"""Shapes with exactly one axis of length E."""


def square_and_weights(env, key):
    """The usual carry, and a matrix [width, width]."""
    width = env.width
    return state_and_weights(env, key) | {"m": jnp.linspace(-0.3, 0.3, width * width).reshape(width, width)}


def dense(env, c, key):
    """A dense layer with weights [width, width]. Neither axis of the weights is the env axis, even if width equals E."""
    mapped = jax.vmap(choreo.fragment("actor")(lambda m, s: jnp.tanh(m @ s)), (None, 0))
    s = env.step(c["s"], mapped(c["m"], c["s"]))
    m = choreo.fragment("learner")(lambda m, s: m - 0.05 * (s.T @ s) / len(s))(c["m"], s)
    return {"s": s, "w": learn(c["w"], s), "m": m}, {"m": jnp.mean(m)}


def batched(env, c, key):
    """The actor multiplies all states [E, width] by a matrix [width, width]. If width equals E, both
    arrays have the same shape."""
    s = env.step(c["s"], choreo.fragment("actor")(lambda m, s: jnp.tanh(s @ m))(c["m"], c["s"]))
    return {"s": s, "w": learn(c["w"], s), "m": c["m"].T}, {"m": jnp.sum(s[0])}


def transposed_and_summed(env, c, key):
    """A cumulative sum along the features of the transposed action. The sum does not mix environments."""
    s = env.step(c["s"], jnp.cumsum(acts(c["w"], c["s"]).T, axis=0).T)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s[0])}


def summed_over_environments_transposed(env, c, key):
    """A cumulative sum along the environments of the transposed action. The sum mixes environments, so a block is not enough."""
    s = env.step(c["s"], choreo.fragment("actor")(lambda w, s: jnp.cumsum((w * s).T, axis=1).T)(c["w"][None], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s[:, 0])}


def as_many_steps_as_environments(env, c, key):
    """A rollout of as many steps as there are environments: [T, E, width] with T = E. Then T and E are swapped."""

    def step(s, t):
        s = env.step(s, acts(c["w"], s) + 0.01 * t)
        return s, s

    s, states = lax.scan(step, c["s"], jnp.arange(env.num_envs, dtype=jnp.float32))
    total = jnp.swapaxes(jnp.cumsum(states, axis=0), 0, 1)  # [E, T, width]
    return {"s": s, "w": learn(c["w"], total[:, -1])}, {"m": jnp.mean(total[0]), "n": jnp.mean(states[0])}


def keys_per_environment_and_one_key(env, c, key):
    """Random numbers of two kinds: with one key per environment, and as one array [E, width] from a single key.

    A replica that draws the second array only for its own block gets different numbers than the reference.
    """
    draw = choreo.fragment("actor")(lambda s, k: jnp.tanh(s) + 0.1 * jax.random.normal(k, s.shape))
    s = env.step(c["s"], jax.vmap(draw)(c["s"], env.keys(key)))
    noise = jax.random.normal(key, (env.num_envs, env.width))
    return {"s": s, "w": learn(c["w"], s + 0.1 * noise)}, {"m": jnp.mean(s)}


def pairs(env, c, key):
    """The learner reads a number for each pair of environments, [E, E]. Both axes are env axes, but only one can be divided."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    near = jnp.tanh(s @ s.T)
    return {"s": s, "w": learn(c["w"], near, near[0])}, {"m": jnp.mean(near[:, 0])}


def table_with_as_many_rows_as_environments(env, c, key):
    """Each environment looks up a row, by its state, in a table with E rows. The table must stay whole."""
    table = jnp.linspace(-1.0, 1.0, env.num_envs * env.width).reshape(env.num_envs, env.width)
    look = choreo.fragment("actor")(lambda t, s: s + t[jnp.argmax(s) % len(t)])
    s = env.step(c["s"], jax.vmap(look, (None, 0))(table, c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


def pairs_and_square(env, key):
    """The usual carry, a number for each pair of environments [E, E], and a matrix [width, width]."""
    width = env.width
    return state_and_weights(env, key) | {
        "seen": jnp.zeros((env.num_envs, env.num_envs)),
        "v": jnp.zeros((width, width)),
    }


def squares_carried(env, c, key):
    """Two square matrices in the carry with different meanings: [E, E] of all pairs, and [width, width]."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    seen = 0.5 * c["seen"] + jnp.tanh(s @ s.T) * jnp.arange(env.num_envs, dtype=s.dtype)[None]
    v = 0.5 * c["v"] + jnp.tanh(s.T @ s)
    return {"s": s, "w": learn(c["w"], seen, v), "seen": seen, "v": v.T}, {"m": jnp.mean(seen[0]), "v": jnp.mean(v[0])}


SIZED: dict[str, Functions] = {
    fn.__name__.replace("_", " "): Functions(init, fn)
    for init, fn in (
        (square_and_weights, dense),
        (square_and_weights, batched),
        (state_and_weights, transposed_and_summed),
        (state_and_weights, summed_over_environments_transposed),
        (state_and_weights, as_many_steps_as_environments),
        (state_and_weights, keys_per_environment_and_one_key),
        (state_and_weights, pairs),
        (state_and_weights, table_with_as_many_rows_as_environments),
        (pairs_and_square, squares_carried),
    )
}
"""Programs for tests in which the number of environments equals another size of the program."""
