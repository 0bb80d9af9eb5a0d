"""Programs with axes that look like the env axis, and programs that merge or split the env axis.

A compiler that finds the env axis by its length divides the wrong axis here, or gathers blocks in the wrong order.
"""

import jax
import jax.numpy as jnp
from jax import lax

import choreo
from laws.odd_programs.program import SQUARE, TABLE, E, act, acts, learn, program, unroll


@program(lambda env, key: {"s": jax.random.normal(key, (E, E)), "w": jnp.linspace(0.5, 1.5, E)})
def hidden_size_is_E(env, c, key):
    """The state of an environment has E numbers, so the array of all states is [E, E]. Both axes have length E, but only
    the first one is the env axis."""
    a = acts(c["w"], c["s"])
    s = env.step(c["s"], a @ SQUARE + c["s"] @ jnp.diag(c["w"]))
    return {"s": s, "w": learn(c["w"], s) + 0.0 * jnp.sum(s.T, axis=1)}, {"m": s @ c["w"]}


@program(lambda env, key: {"s": jax.random.normal(key, (E, E)), "w": jnp.eye(E)})
def hidden_size_is_E_transposed(env, c, key):
    """The array of all states is [E, E] again. A weight matrix [E, E] multiplies the transposed array from the left, and
    the metrics are sums along each axis of the new array."""
    s = env.step(c["s"], (c["w"] @ c["s"].T).T)
    return {"s": s, "w": 0.5 * learn(c["w"], s) + 0.1 * SQUARE}, {"m": jnp.sum(s, axis=1), "n": jnp.sum(s, axis=0)}


@program()
def unroll_is_E(env, c, key):
    """A rollout of E steps, [time, E, 3]: the time axis is as long as the env axis. The program also swaps these two axes,
    and sums over each of them."""
    s, ss = unroll(env, c, length=E)
    a = jnp.swapaxes(ss, 0, 1)
    return {"s": s, "w": learn(c["w"], ss[:, 0], a[:, 1])}, {
        "m": jnp.sum(ss, axis=(0, 2)),
        "n": jnp.sum(ss, axis=(1, 2)),
    }


@program()
def time_and_environments_merged(env, c, key):
    """Minibatches as in PPO: time and environments are merged into one axis and shuffled. Only a
    site that has all environments can shuffle the merged axis."""
    s, ss = unroll(env, c, length=4)
    flat = ss.reshape(4 * E, 3)
    order = jax.random.permutation(key, 4 * E)
    batches = flat[order].reshape(3, 8, 3)
    w, losses = lax.scan(lambda w, b: (learn(w, b), jnp.mean(b)), c["w"], batches)
    return {"s": s, "w": w}, {"l": losses, "each": flat.reshape(4, E, 3)[:, :, 0]}


@program()
def time_and_environments_merged_for_the_actor(env, c, key):
    """The actor is mapped over the merged axis of time and environments; a block of that axis is not a block of
    environments."""
    s, ss = unroll(env, c, length=2)
    a = jax.vmap(act, (None, 0))(c["w"], ss.reshape(2 * E, 3)).reshape(2, E, 3)
    return {"s": env.step(s, a[0] + a[1]), "w": learn(c["w"], a)}, {"m": jnp.mean(a)}


@program()
def a_table_that_every_environment_reads(env, c, key):
    """Every environment reads a row of a table with E rows, chosen by its state. The table must stay whole, though its
    first axis has length E."""
    table = jnp.sin(jnp.outer(jnp.arange(float(E)), c["w"]))
    index = jnp.abs(100 * c["s"][:, 0]).astype(jnp.int32) % E
    a = jax.vmap(choreo.fragment("actor")(lambda t, i: t[i]), (None, 0))(table, index)
    s = env.step(c["s"], a + table[index])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def shared_value_of_length_E_next_to_environments(env, c, key):
    """`logits` has length E, but its axis is not the env axis. Each environment needs the whole array."""
    logits = jnp.cumsum(jnp.linspace(0.0, 1.0, E) * c["w"][0])
    score = c["s"] @ TABLE.T * jnp.tile(logits, (E, 1)) + jnp.tile(logits, (E, 1))
    s = env.step(c["s"], score @ TABLE)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(score, axis=0), "n": logits}


@program()
def shared_square_matrix(env, c, key):
    """Neither axis of the matrix [E, E] is the env axis. The matrix is transposed, contracted and sliced, and the results are
    combined with the states of the environments."""
    square = SQUARE * c["w"][0]
    f = choreo.fragment("actor")(lambda q, s: q.T @ jnp.ones((E, 3)) * s + q[:, :3])
    s = env.step(c["s"], f(square, c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def an_axis_that_the_next_group_cannot_divide(env, c, key):
    """Inside a `jit`, the states become [2, 3, 3]: two sets of three environments. Two replicas of the env group can divide the
    first axis, but three replicas of the actor group cannot."""
    groups = choreo.fragment("env")(lambda s: jax.jit(lambda s: jnp.sin(s).reshape(2, 3, 3))(s))(c["s"])
    same, a = choreo.fragment("actor")(lambda g, s: jax.jit(lambda g, s: (g, jnp.cos(s)))(g, s))(groups, c["s"])
    s = env.step(c["s"], a + same.reshape(E, 3))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}
