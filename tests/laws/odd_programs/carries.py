"""Programs with an odd carry or odd metrics. Each docstring says what a naive compiler (see `__init__.py`) would do wrong."""

import jax
import jax.numpy as jnp
from jax import lax

import choreo
from laws.odd_programs.program import TABLE, E, act, acts, learn, plain, program, state_and_weights


@program()
def metrics_per_environment(env, c, key):
    """Metrics with entries for each environment. The env axis is the first axis of "s" and the second axis of "t" and "stack";
    "flat" has no env axis. Blocks must be put together along the right axis."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"s": s, "t": s.T, "stack": jnp.stack([s, -s]), "flat": s.reshape(-1)}


@program()
def metrics_are_literals(env, c, key):
    """Metrics that no fragment computes: a literal, numbers from `arange` and from the key, and leaves of the old
    carry. Each must come from a site that has the whole value."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {
        "e": jnp.float32(E),
        "i": jnp.arange(E),
        "k": jax.random.normal(key, (E,)),
        "w": c["w"],
        "old": c["s"],
    }


@program(
    lambda env, key: {
        "a": env.reset(env.keys(key)),
        "b": env.reset(env.keys(jax.random.fold_in(key, 1))),
        "w": jnp.ones(3),
    }
)
def carry_swapped(env, c, key):
    """The new "a" is the old "b", and the new "b" is computed from the old "a". Writing the new "a" before the old "a" is read
    would lose a state."""
    return {"a": c["b"], "b": env.step(c["a"], acts(c["w"], c["b"])), "w": learn(c["w"], c["a"], c["b"])}, {
        "m": jnp.mean(c["a"])
    }


@program(lambda env, key: {"a": env.reset(env.keys(key)), "b": jnp.zeros((E, 3)), "w": jnp.ones(3), "v": jnp.zeros(3)})
def carry_rotates_through_four_leaves(env, c, key):
    """Each leaf gets its new value from another leaf. Some leaves are divided into blocks, and the others are whole. If
    a site kept the old value of a leaf, the result would be wrong one iteration later."""
    s = env.step(c["a"], acts(c["w"], c["b"]))
    return {"a": c["b"] + s, "b": s, "w": learn(c["v"], s), "v": c["w"]}, {"m": jnp.mean(s)}


@program()
def carry_unchanged(env, c, key):
    """The carry is returned unchanged, and metrics are computed from it. Donating its memory to another value would
    corrupt the next iteration."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return c, {"m": jnp.mean(s), "each": s}


@program(lambda env, key: state_and_weights(env, key) | {"c": jnp.zeros((E, 2)), "k": jnp.zeros(()), "n": jnp.int32(0)})
def carry_becomes_constant(env, c, key):
    """`iterate` reads the leaves "c" and "k" and returns a constant for each. A compiler that uses the
    constant in all iterations is wrong in the first iteration."""
    s = env.step(c["s"], acts(c["w"], c["s"])) + c["k"]
    return {"s": s, "w": learn(c["w"], s), "c": jnp.ones((E, 2)), "k": jnp.float32(0.25), "n": c["n"] + 1}, {
        "c": jnp.sum(c["c"])
    }


@program(lambda env, key: state_and_weights(env, key) | {"twin": jnp.zeros((E, 3)), "v": jnp.zeros(3)})
def same_value_twice(env, c, key):
    """One value becomes two leaves, and two metrics. Donating one of the leaves would destroy the other if both share
    memory."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    w = learn(c["w"], s + c["twin"])
    return {"s": s, "twin": s, "w": w, "v": w}, {"a": jnp.mean(s), "b": jnp.mean(s), "w": w}


@program(lambda env, key: {"s": env.reset(env.keys(key)), "w": jnp.mean(env.reset(env.keys(key)), axis=0)})
def weights_from_the_first_states(env, c, key):
    """`init` makes the weights from a mean over the states of all environments. A site that runs `init` on its own
    block gets different weights."""
    return plain(env, c, key)


@program(lambda env, key: {"s": jnp.cumsum(env.reset(env.keys(key)), axis=0), "w": jnp.ones(3)})
def first_states_mixed_by_init(env, c, key):
    """`init` mixes environments (a cumulative sum). A site that runs `init` on its own block starts its sum at its own
    first row."""
    return plain(env, c, key)


@program(lambda env, key: {"s": env.reset(env.keys(key)).T, "w": jnp.ones(3)})
def environments_along_the_second_axis(env, c, key):
    """The carried state is [3, E]. If its first axis were divided, each replica would have only some features of every
    environment."""
    s = env.step(c["s"].T, acts(c["w"], c["s"].T))
    return {"s": s.T, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program(lambda env, key: {"s": env.reset(env.keys(key)).reshape(-1), "w": jnp.ones(3)})
def environments_flattened_in_the_carry(env, c, key):
    """The carried state is [3 E], with no axis of length E. The state must stay whole, or be divided in multiples of three."""
    s = env.step(c["s"].reshape(E, 3), acts(c["w"], c["s"].reshape(E, 3)))
    return {"s": s.reshape(-1), "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def order_of_environments_reversed_in_the_carry(env, c, key):
    """The order of the environments is reversed in each iteration. A naive compiler would let each replica reverse
    its own block."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s[::-1], "w": learn(c["w"], s[0])}, {"m": s[0]}


@program(lambda env, key: state_and_weights(env, key) | {"goal": jnp.ones((E, 3)), "count": jnp.zeros((E,), jnp.int32)})
def learner_keeps_a_row_for_each_environment(env, c, key):
    """The learner carries one row per environment and rolls the rows. The actor needs its block of the rows, and
    the learner needs all rows."""
    s = env.step(c["s"], jax.vmap(act)(c["goal"], c["s"]))
    goal = choreo.fragment("learner")(lambda g, s: jnp.roll(0.5 * g + s, 1, axis=0))(c["goal"], s)
    return {"s": s, "w": learn(c["w"], goal), "goal": goal, "count": c["count"] + (goal[:, 0] > 0).astype(jnp.int32)}, {
        "m": c["count"]
    }


@program(lambda env, key: state_and_weights(env, key) | {"buffer": jnp.zeros((8, E, 3)), "at": jnp.int32(0)})
def a_buffer_with_time_first(env, c, key):
    """A ring buffer [time, E, 3], written at a carried position. The first axis is time, and must not be divided."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    buffer = choreo.fragment("buffer")(lambda b, s, i: lax.dynamic_update_slice(b, s[None], (i, 0, 0)))(
        c["buffer"], s, c["at"]
    )
    return {"s": s, "w": learn(c["w"], buffer), "buffer": buffer, "at": (c["at"] + 1) % 8}, {"m": jnp.mean(buffer)}


@program(lambda env, key: state_and_weights(env, key) | {"last": jnp.zeros((4, E, 3))})
def a_history_at_the_environment(env, c, key):
    """The last four states, [4, E, 3], are shifted by glue and read by the actor. The first axis is time, and must not
    be divided."""
    s = env.step(c["s"], acts(c["w"], jnp.mean(c["last"], axis=0)))
    last = jnp.concatenate([c["last"][1:], s[None]])
    return {"s": s, "w": learn(c["w"], last), "last": last}, {"m": jnp.mean(last)}


@program()
def donated_and_read_again(env, c, key):
    """The old state is read by the first step, the last step, the learner and the metrics. Donating the state to
    the first step would leave garbage for the later readers."""
    s1 = env.step(c["s"], acts(c["w"], c["s"]))
    s2 = env.step(s1, acts(c["w"], s1))
    s3 = env.step(c["s"], s2)
    return {"s": s3, "w": learn(c["w"], s1, c["s"])}, {"m": jnp.mean(c["s"] - s1), "w": c["w"], "s": c["s"]}


@program()
def a_metric_that_is_carried(env, c, key):
    """The same values are metrics and leaves of the new carry. The next iteration must not overwrite metrics that were not fetched
    yet."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    w = learn(c["w"], s)
    return {"s": s, "w": w}, {"w": w, "s": s}


def rows_for(env):
    """The array that `init` closes over: `TABLE` for E environments, and ones for any other number."""
    return TABLE if env.num_envs == E else jnp.ones((env.num_envs, 3))


@program(lambda env, key: {"s": rows_for(env), "w": jnp.ones(3)})
def carry_starts_as_a_constant_array(env, c, key):
    """`init` returns an array that it closes over: the state comes from no fragment, so nothing but its shape suggests
    an env axis."""
    return plain(env, c, key)


@program(
    lambda env, key: state_and_weights(env, key) | {"c": jnp.zeros((E, 3)) if env.num_envs == E else rows_for(env)}
)
def carry_becomes_a_constant_array(env, c, key):
    """`iterate` returns an array that it closes over, as a leaf and as a metric. Each replica needs its block of the leaf, but
    the metric is the whole array."""
    s = env.step(c["s"], acts(c["w"], c["s"]) + c["c"])
    return {"s": s, "w": learn(c["w"], s), "c": TABLE}, {"m": jnp.mean(s), "t": TABLE}


@program(
    lambda env, key: state_and_weights(env, key) | {"v": jnp.ones(3), "t": jnp.zeros((E, 3)), "a": jnp.zeros((E, 3))}
)
def carry_changes_places_between_groups(env, c, key):
    """Leaves change places, also between groups: "s" gets the old "t", "t" the action, "a" the new state, and "w" the old "v".
    Each site must send the old value before it stores the new value."""
    a = acts(c["w"], c["s"] + c["t"])
    s = env.step(c["a"], a)
    metrics = {name: c[name] for name in ("w", "v", "s", "t")}
    return {"s": c["t"], "t": a, "a": s, "w": c["v"], "v": learn(c["w"], s)}, metrics


@program(lambda env, key: state_and_weights(env, key) | {"n": jnp.int32(0), "x": jnp.zeros((E, 3))})
def glue_read_by_three_groups(env, c, key):
    """Values that glue computes are read by three groups and carried as well. Each group is allowed to compute its own copy, but
    all copies must come from the same iteration."""
    g = jnp.tanh(c["w"]) * c["n"].astype(jnp.float32)
    b = jnp.broadcast_to(g, (E, 3)) + c["x"]
    s = env.step(c["s"] + b, acts(g, c["s"] * b))
    return {"s": s, "w": learn(g, s + b), "n": c["n"] + 1, "x": 0.1 * b}, {"g": g, "b": b}
