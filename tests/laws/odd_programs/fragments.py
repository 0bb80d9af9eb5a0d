"""Programs that call fragments in odd ways: under unusual `vmap`s, nested, with closures, with effects, in gradients.

"Each replica would ..." says what a naive compiler would do wrong: it runs the user's code on each block of environments.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import choreo
from laws.odd_programs.program import SQUARE, TABLE, E, act, acts, learn, plain, program


@jax.custom_batching.custom_vmap
def centre_under_vmap(row):
    """Return the row unchanged. Under `vmap`, the result is each row minus the mean of all rows."""
    return row


@centre_under_vmap.def_vmap
def centre_the_batch(axis_size, in_batched, x):
    return x - jnp.mean(x, axis=0, keepdims=True), True


@choreo.fragment("actor")
def act_together(w, row):
    return centre_under_vmap(w * row)


@program()
def fragment_with_a_custom_vmap_rule(env, c, key):
    """Under `vmap` the fragment subtracts the mean of the batch. The code for one environment does not show that, and
    each replica would subtract the mean of its own block."""
    s = env.step(c["s"], jax.vmap(act_together, (None, 0))(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@choreo.fragment("actor")
def act_by_callback(w, row):
    whitened = lambda x: x - x.mean(axis=0, keepdims=True) if x.ndim > 1 else x  # noqa: E731
    return w * jax.pure_callback(whitened, jax.ShapeDtypeStruct(row.shape, row.dtype), row, vmap_method="expand_dims")


@program()
def fragment_with_a_callback_on_the_batch(env, c, key):
    """Under `vmap` a Python callback sees the whole batch and subtracts its mean. No compiler can look into the
    callback."""
    s = env.step(c["s"], jax.vmap(act_by_callback, (None, 0))(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@choreo.fragment("actor")
def act_named(w, row):
    return w * row - lax.pmean(row, "envs")


@program()
def fragment_with_a_named_mean(env, c, key):
    """A `pmean` over the axis of the `vmap`: each replica would take the mean of its own block."""
    s = env.step(c["s"], jax.vmap(act_named, (None, 0), axis_name="envs")(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@choreo.fragment("actor")
def act_by_index(w, row):
    return w * row * lax.axis_index("envs").astype(row.dtype)


@program()
def fragment_that_reads_its_axis_index(env, c, key):
    """`axis_index` of the `vmap`: each replica would count its own environments from 0."""
    s = env.step(c["s"], jax.vmap(act_by_index, (None, 0), axis_name="envs")(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def axes_other_than_the_first(env, c, key):
    """`vmap` over axis 1, and results on axis 1. The block of a replica is not along the first axis."""
    a = jax.vmap(act, (None, 1), 1)(c["w"], c["s"].T)
    b = jax.vmap(act, (0, None), 1)(c["s"], c["w"])
    s = env.step(c["s"], a.T + b.T)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def nested_vmaps(env, c, key):
    """Two `vmap`s around one fragment. The environments are in the outer `vmap` of the first call, and in the inner `vmap` of
    the second call. So the block of a replica is along a different axis in each call."""
    one = choreo.fragment("actor")(lambda w, x: w * jnp.tanh(x))
    a = jax.vmap(jax.vmap(one), (None, 0))(c["w"], c["s"])
    b = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(c["w"], c["s"][:, 0])
    s = env.step(c["s"], a + b.T)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def every_pair_by_vmap(env, c, key):
    """Two `vmap`s over the environments give all pairs, [E, E]. Only the outer axis can be divided; along the inner
    axis, every replica needs all environments."""
    pair = choreo.fragment("actor")(lambda x, y: jnp.tanh(x @ y))
    a = jax.vmap(jax.vmap(pair, (None, 0)), (0, None))(c["s"], c["s"])
    s = env.step(c["s"], a @ c["s"])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(a[0])}


@program()
def every_pair_transposed(env, c, key):
    """All pairs again, but the outer `vmap` is over the second argument: the two axes of length E are swapped."""
    pair = choreo.fragment("actor")(lambda x, y: jnp.tanh(x @ (y + 1.0)))
    a = jax.vmap(jax.vmap(pair, (0, None)), (None, 0))(c["s"], c["s"])
    s = env.step(c["s"], a @ c["s"])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(a[0])}


@program()
def fragment_with_vmap_on_states_and_without_on_weights(env, c, key):
    """One fragment is called under `vmap` on states, and without `vmap` on weights. What Choreo proves about one call must
    not be used for the other call."""
    top = choreo.fragment("actor")(lambda x: x - jnp.max(x, axis=0, keepdims=True))
    s = env.step(c["s"], jax.vmap(top)(c["s"]))
    return {"s": s, "w": learn(top(c["w"]), s)}, {"m": jnp.mean(s)}


@program()
def fragment_with_vmap_and_on_the_batch(env, c, key):
    """One fragment is called under `vmap` on states, and without `vmap` on the batch, where its maximum is over environments."""
    top = choreo.fragment("actor")(lambda x: x - jnp.max(x, axis=0, keepdims=True))
    s = env.step(c["s"], jax.vmap(top)(c["s"]) + top(c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def two_fragments_of_one_name(env, c, key):
    """Two different functions with the same name and the same shapes. A cache by name would run one of them twice."""

    def f(x):
        return 2.0 * x

    first = choreo.fragment("actor")(f)

    def f(x):
        return jnp.sin(x) + 1.0

    second = choreo.fragment("actor")(f)
    s = env.step(c["s"], jax.vmap(first)(c["s"]) + jax.vmap(second)(c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def nested_fragments(env, c, key):
    """A learner fragment calls a mapped actor fragment. The inner call is part of the outer fragment, and takes all
    environments."""
    outer = choreo.fragment("learner")(lambda w, s: jnp.mean(acts(w, s), axis=0) + w)
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s, "w": 0.5 * outer(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def fragment_in_a_mapped_fragment(env, c, key):
    """A mapped actor fragment calls another fragment. The inner call is part of the program for one environment,
    and has no `vmap` of its own."""
    outer = choreo.fragment("actor")(lambda w, s: act(w, jnp.sort(s)) + jnp.max(s))
    s = env.step(c["s"], jax.vmap(outer, (None, 0))(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def fragment_that_closes_over_a_traced_value(env, c, key):
    """The fragment closes over the carried weights: an input that is not among its arguments."""
    f = choreo.fragment("actor")(lambda s: c["w"] * jnp.tanh(s))
    s = env.step(c["s"], jax.vmap(f)(c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def fragment_that_closes_over_all_environments(env, c, key):
    """A mapped fragment closes over the states of all environments and takes their mean. Each replica needs the states of
    all environments."""
    f = choreo.fragment("actor")(lambda s: jnp.tanh(s) * jnp.mean(c["s"], axis=0))
    s = env.step(c["s"], jax.vmap(f)(c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def arrays_closed_over(env, c, key):
    """Fragments close over constant arrays of E rows, [E, 3] and [E, E]. Some of these uses need only the
    replica's block of the array, others need the whole array."""
    f = choreo.fragment("actor")(lambda s: s * TABLE)
    g = choreo.fragment("actor")(lambda s, i: s @ TABLE.T @ SQUARE[i] + TABLE[i])
    s = env.step(c["s"], f(c["s"]) + jax.vmap(g)(c["s"], jnp.arange(E)) + TABLE[::-1])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def a_role_that_no_group_has(env, c, key):
    """The role "critic" is in no group of the layout, so its fragment runs at the site of the learner. The fragment takes a
    mean over all environments."""
    judge = choreo.fragment("critic")(lambda s: s - jnp.mean(s, axis=0, keepdims=True))
    s = env.step(c["s"], judge(acts(c["w"], c["s"])))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def fragments_without_environments_as_input(env, c, key):
    """Two env fragments return [E, 3], but no argument has an env axis: one uses `arange`, the other draws with one key. Each
    replica must take its block of the full result."""
    noise = choreo.fragment("env")(lambda: jnp.arange(3.0 * E).reshape(E, 3))()
    drawn = choreo.fragment("env")(lambda k: jax.random.normal(k, (E, 3)))(key)
    s = env.step(c["s"], acts(c["w"], c["s"]) + noise + drawn)
    return {"s": s, "w": learn(c["w"], drawn)}, {"m": jnp.mean(noise)}


@program()
def statics_that_compare_equal(env, c, key):
    """The fragment is called with True and with 1, which compare equal in Python but stand for different factors. A cache that
    compares with `==` would use one factor for both calls."""
    scaled = choreo.fragment("actor")(lambda s, n: s * jnp.float32(2.0 if isinstance(n, bool) else 3.0))
    s = env.step(c["s"], scaled(c["s"], True) + scaled(c["s"], 1))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def actor_makes_rows_from_shared_weights(env, c, key):
    """The actor makes [E] numbers from the weights alone. No environment is an input, but the result has one entry
    for each environment."""
    boost = choreo.fragment("actor")(lambda w: jnp.sum(w) * jnp.ones((E,)))(c["w"])
    s = env.step(c["s"], acts(c["w"], c["s"]) * (boost[:, None] * jnp.ones((1, 3))))
    return {"s": s, "w": learn(c["w"], boost)}, {"m": boost}


@program()
def env_fragment_returns_a_sum_over_environments(env, c, key):
    """An env fragment returns a sum over all environments. Each replica would sum its own block."""
    total = choreo.fragment("env")(lambda s: jnp.sum(s, axis=0))(c["s"])
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], total)}, {"m": total}


@program()
def env_fragment_returns_the_first_row(env, c, key):
    """An env fragment returns the row of the first environment. Each replica would return the first row of its own
    block."""
    first = choreo.fragment("env")(lambda s: s[0])(c["s"])
    s = env.step(c["s"], acts(c["w"], c["s"]) + jnp.tile(first, (E, 1)))
    return {"s": s, "w": learn(c["w"], first)}, {"m": first}


@program()
def learner_sends_a_row_to_each_environment(env, c, key):
    """The learner computes one goal per environment by a cumulative sum; each actor needs its block of the goals."""
    goal = choreo.fragment("learner")(lambda w, s: jnp.cumsum(jnp.tile(w, (E, 1)) * s, axis=0))(c["w"], c["s"])
    s = env.step(c["s"], jax.vmap(act)(goal, c["s"]))
    return {"s": s, "w": learn(c["w"], goal)}, {"m": jnp.mean(goal)}


@program()
def constant_arrays_given_to_fragments(env, c, key):
    """Constant arrays of E rows are arguments and results of fragments, also inside a `jit` and as NumPy arrays. With
    `jax_use_simplified_jaxpr_constants` these arrays are literals of the jaxpr."""
    add = choreo.fragment("actor")(lambda s, t: s + t)
    a = add(c["s"], TABLE) + jax.jit(lambda s, t: add(s, t))(c["s"], np.asarray(TABLE))
    s = env.step(c["s"], a + choreo.fragment("env")(lambda s: (s, TABLE * 2.0))(c["s"])[1])
    return {"s": s, "w": learn(c["w"], s, TABLE)}, {"m": jnp.mean(s), "t": TABLE}


@program()
def iterate_inside_a_jit(env, c, key):
    """The whole `iterate` is inside a `jit`, so that the fragments are one level deeper."""
    return jax.jit(lambda c, key: plain(env, c, key))(c, key)


@program()
def a_gradient_through_a_mapped_fragment(env, c, key):
    """Gradients of a mapped fragment: per environment, for the shared weights (a sum over all environments), and for
    the states. Each replica would sum its own block."""
    grads = jax.vmap(jax.grad(lambda w, s: jnp.sum(act(w, s) ** 2)), (None, 0))(c["w"], c["s"])
    total = jax.grad(lambda w: jnp.mean(acts(w, c["s"]) ** 3))(c["w"])
    each = jax.grad(lambda s: jnp.sum(acts(c["w"], s) ** 2))(c["s"])
    s = env.step(c["s"], grads + each)
    return {"s": s, "w": learn(c["w"], s) - 0.1 * total}, {"m": jnp.mean(grads)}


@program()
def a_gradient_of_a_linear_fragment(env, c, key):
    """Forward and reverse derivatives of a linear fragment. For the reverse derivative, JAX transposes the fragment: the
    result is a program that the user never wrote."""
    twice = choreo.fragment("actor")(lambda w, s: w * s)
    each = jax.vmap(lambda s: jax.jvp(lambda s: twice(c["w"], s), (s,), (jnp.ones_like(s),))[1])(c["s"])
    back = jax.grad(lambda s: jnp.sum(jax.vmap(twice, (None, 0))(c["w"], s) * TABLE))(c["s"])
    s = env.step(c["s"], each + back)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(each)}


@program()
def half_precision(env, c, key):
    """The actor computes in bfloat16. Computing in float32 instead would give a different result than the reference."""
    a = acts(c["w"].astype(jnp.bfloat16), c["s"].astype(jnp.bfloat16))
    s = env.step(c["s"], a.astype(jnp.float32))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s), "h": a[:, 0].astype(jnp.float32)}


@program()
def printing_in_glue(env, c, key):
    """Glue prints a mean over environments. The print must not change the result."""
    s = env.step(c["s"], acts(c["w"], c["s"]))
    jax.debug.print("mean {}", jnp.mean(s))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def printing_each_environment(env, c, key):
    """A mapped fragment prints its row. Each replica is allowed to print the rows of its own environments."""
    f = choreo.fragment("actor")(lambda w, s: (jax.debug.print("row {}", s), w * s)[1])
    s = env.step(c["s"], jax.vmap(f, (None, 0))(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def printing_in_a_batched_fragment(env, c, key):
    """A fragment prints the whole batch. Each replica would print its own block."""
    f = choreo.fragment("actor")(lambda w, s: (jax.debug.print("all {}", s), s * w[0])[1])
    s = env.step(c["s"], f(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def printing_only_a_scalar_in_a_batched_fragment(env, c, key):
    """A fragment of the whole batch prints one shared number. Each replica would print the number again."""
    f = choreo.fragment("actor")(lambda w, s: (jax.debug.print("w {}", w[0]), s * w[0])[1])
    s = env.step(c["s"], f(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def printing_in_a_scan(env, c, key):
    """Glue prints one number of the first environment in each step of a scan that is divided between sites."""

    def step(s, t):
        s = env.step(s, acts(c["w"], s))
        jax.debug.print("{} {}", t, s[0, 0])
        return s, ()

    s, _ = lax.scan(step, c["s"], jnp.arange(2))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}
