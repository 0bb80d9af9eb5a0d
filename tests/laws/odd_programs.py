"""Small programs with something odd in each: (init, iterate) by name. All on `Pond`, with E environments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import choreo

E = 6
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""init(env, key) -> carry, iterate(env, carry, key) -> carry, metrics."""


@dataclass(frozen=True)
class Program:
    """An algorithm made of two functions."""

    name: str

    def init(self, env, key):
        return PROGRAMS[self.name][0](env, key)

    def iterate(self, env, carry, key):
        return PROGRAMS[self.name][1](env, carry, key)


def state_and_weights(env, key):
    return {"s": env.reset(env.keys(key)), "w": jnp.linspace(0.5, 1.5, env.width)}


def program(init=state_and_weights):
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
    return jax.vmap(act, (None, 0))(w, s)


@program()
def plain(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def metrics_per_environment(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"s": s, "t": s.T, "stack": jnp.stack([s, -s]), "flat": s.reshape(-1)}


@program()
def metrics_are_literals(env, c, key):
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
    return {"a": c["b"], "b": env.step(c["a"], acts(c["w"], c["b"])), "w": learn(c["w"], c["a"], c["b"])}, {
        "m": jnp.mean(c["a"])
    }


@program(lambda env, key: {"a": env.reset(env.keys(key)), "b": jnp.zeros((E, 3)), "w": jnp.ones(3), "v": jnp.zeros(3)})
def carry_rotates_whole_and_blocks(env, c, key):
    s = env.step(c["a"], acts(c["w"], c["b"]))
    return {"a": c["b"] + s, "b": s, "w": learn(c["v"], s), "v": c["w"]}, {"m": jnp.mean(s)}


@program()
def carry_unchanged(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return c, {"m": jnp.mean(s), "each": s}


@program(lambda env, key: state_and_weights(env, key) | {"c": jnp.zeros((E, 2)), "k": jnp.zeros(()), "n": jnp.int32(0)})
def carry_becomes_constant(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"])) + c["k"]
    return {"s": s, "w": learn(c["w"], s), "c": jnp.ones((E, 2)), "k": jnp.float32(0.25), "n": c["n"] + 1}, {
        "c": jnp.sum(c["c"])
    }


@program(lambda env, key: state_and_weights(env, key) | {"twin": jnp.zeros((E, 3)), "v": jnp.zeros(3)})
def same_value_twice(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]))
    w = learn(c["w"], s + c["twin"])
    return {"s": s, "twin": s, "w": w, "v": w}, {"a": jnp.mean(s), "b": jnp.mean(s), "w": w}


@program(
    lambda env, key: (
        state_and_weights(env, key) | {"key": env.keys(key), "one": key, "flag": jnp.zeros(E, bool), "i": jnp.arange(E)}
    )
)
def keys_flags_and_integers(env, c, key):
    a = jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], c["key"])
    s = env.step(c["s"], jnp.where(jnp.tile(c["flag"][:, None], (1, 3)), a, -a))
    return {
        "s": s,
        "w": learn(c["w"], s),
        "key": jax.vmap(jax.random.fold_in)(c["key"], c["i"]),
        "one": jax.random.fold_in(c["one"], 3),
        "flag": s[:, 0] > 0,
        "i": c["i"] + jnp.where(c["flag"], 1, 2),
    }, {"m": jnp.sum(c["i"])}


@program()
def keys_by_split(env, c, key):
    k1, k2 = jax.random.split(key)
    a = jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], env.keys(k1))
    s = env.step(c["s"], a + 0.1 * jax.random.normal(k2, (E, 3)))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def keys_by_fold_in(env, c, key):
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(E))
    s = env.step(c["s"], jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], keys))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def keys_in_another_order(env, c, key):
    a = jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], env.keys(key)[::-1])
    s = env.step(c["s"], a + jax.random.permutation(key, E).astype(a.dtype)[:, None] * jnp.ones((1, 3)))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def keys_from_environments(env, c, key):
    keys = jax.vmap(lambda row: jax.random.fold_in(key, (100 * row[0]).astype(jnp.int32)))(c["s"])
    s = env.step(c["s"], jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], keys))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def keys_of_another_kind(env, c, key):
    keys = jax.random.split(jax.random.key(jax.random.randint(key, (), 0, 99), impl="rbg"), E)
    s = env.step(c["s"], jax.vmap(act_random, (None, 0, 0))(c["w"], c["s"], keys))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def glue_draws_by_keys_of_another_kind(env, c, key):
    keys = jax.random.split(jax.random.key(jax.random.randint(key, (), 0, 99), impl="rbg"), E)
    s = env.step(c["s"], acts(c["w"], c["s"] + jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@jax.custom_batching.custom_vmap
def meet(row):
    return row


@meet.def_vmap
def meet_all(axis_size, in_batched, x):
    return x - jnp.mean(x, axis=0, keepdims=True), True


@choreo.fragment("actor")
def act_together(w, row):
    return meet(w * row)


@program()
def fragment_with_a_rule_of_its_own_for_vmap(env, c, key):
    s = env.step(c["s"], jax.vmap(act_together, (None, 0))(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@choreo.fragment("actor")
def act_by_callback(w, row):
    whitened = lambda x: x - x.mean(axis=0, keepdims=True) if x.ndim > 1 else x  # noqa: E731
    return w * jax.pure_callback(whitened, jax.ShapeDtypeStruct(row.shape, row.dtype), row, vmap_method="expand_dims")


@program()
def fragment_with_a_callback_on_the_batch(env, c, key):
    s = env.step(c["s"], jax.vmap(act_by_callback, (None, 0))(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@choreo.fragment("actor")
def act_named(w, row):
    return w * row - lax.pmean(row, "envs")


@program()
def fragment_with_a_named_mean(env, c, key):
    s = env.step(c["s"], jax.vmap(act_named, (None, 0), axis_name="envs")(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@choreo.fragment("actor")
def act_by_index(w, row):
    return w * row * lax.axis_index("envs").astype(row.dtype)


@program()
def fragment_that_asks_for_its_index(env, c, key):
    s = env.step(c["s"], jax.vmap(act_by_index, (None, 0), axis_name="envs")(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def axes_other_than_the_first(env, c, key):
    a = jax.vmap(act, (None, 1), 1)(c["w"], c["s"].T)
    b = jax.vmap(act, (0, None), 1)(c["s"], c["w"])
    s = env.step(c["s"], a.T + b.T)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def nested_vmaps(env, c, key):
    one = choreo.fragment("actor")(lambda w, x: w * jnp.tanh(x))
    a = jax.vmap(jax.vmap(one), (None, 0))(c["w"], c["s"])
    b = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(c["w"], c["s"][:, 0])
    s = env.step(c["s"], a + b.T)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def every_pair_by_vmap(env, c, key):
    pair = choreo.fragment("actor")(lambda x, y: jnp.tanh(x @ y))
    a = jax.vmap(jax.vmap(pair, (None, 0)), (0, None))(c["s"], c["s"])
    s = env.step(c["s"], a @ c["s"])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(a[0])}


@program()
def every_pair_transposed(env, c, key):
    pair = choreo.fragment("actor")(lambda x, y: jnp.tanh(x @ (y + 1.0)))
    a = jax.vmap(jax.vmap(pair, (0, None)), (None, 0))(c["s"], c["s"])
    s = env.step(c["s"], a @ c["s"])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(a[0])}


@program()
def fragment_mapped_and_not(env, c, key):
    double = choreo.fragment("actor")(lambda x: x - jnp.max(x, axis=0, keepdims=True))
    s = env.step(c["s"], jax.vmap(double)(c["s"]))
    return {"s": s, "w": learn(double(c["w"]), s)}, {"m": jnp.mean(s)}


@program()
def fragment_mapped_and_batched(env, c, key):
    top = choreo.fragment("actor")(lambda x: x - jnp.max(x, axis=0, keepdims=True))
    s = env.step(c["s"], jax.vmap(top)(c["s"]) + top(c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def two_fragments_of_one_name(env, c, key):
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
    outer = choreo.fragment("learner")(lambda w, s: jnp.mean(acts(w, s), axis=0) + w)
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s, "w": 0.5 * outer(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def fragment_in_a_mapped_fragment(env, c, key):
    outer = choreo.fragment("actor")(lambda w, s: act(w, jnp.sort(s)) + jnp.max(s))
    s = env.step(c["s"], jax.vmap(outer, (None, 0))(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def fragment_that_closes_over_a_traced_value(env, c, key):
    f = choreo.fragment("actor")(lambda s: c["w"] * jnp.tanh(s))
    s = env.step(c["s"], jax.vmap(f)(c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def fragment_that_closes_over_all_environments(env, c, key):
    f = choreo.fragment("actor")(lambda s: jnp.tanh(s) * jnp.mean(c["s"], axis=0))
    s = env.step(c["s"], jax.vmap(f)(c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


TABLE = jnp.linspace(-1.0, 1.0, E * 3).reshape(E, 3)
SQUARE = jnp.linspace(-1.0, 1.0, E * E).reshape(E, E)


@program()
def arrays_closed_over(env, c, key):
    f = choreo.fragment("actor")(lambda s: s * TABLE)
    g = choreo.fragment("actor")(lambda s, i: s @ TABLE.T @ SQUARE[i] + TABLE[i])
    s = env.step(c["s"], f(c["s"]) + jax.vmap(g)(c["s"], jnp.arange(E)) + TABLE[::-1])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program(lambda env, key: {"s": jax.random.normal(key, (E, E)), "w": jnp.linspace(0.5, 1.5, E)})
def hidden_size_is_E(env, c, key):
    a = acts(c["w"], c["s"])
    s = env.step(c["s"], a @ SQUARE + c["s"] @ jnp.diag(c["w"]))
    return {"s": s, "w": learn(c["w"], s) + 0.0 * jnp.sum(s.T, axis=1)}, {"m": s @ c["w"]}


@program(lambda env, key: {"s": jax.random.normal(key, (E, E)), "w": jnp.eye(E)})
def hidden_size_is_E_transposed(env, c, key):
    s = env.step(c["s"], (c["w"] @ c["s"].T).T)
    return {"s": s, "w": 0.5 * learn(c["w"], s) + 0.1 * SQUARE}, {"m": jnp.sum(s, axis=1), "n": jnp.sum(s, axis=0)}


def unrolled(env, c, key, body=None, **kwargs):
    def step(s, x):
        s = env.step(s, acts(c["w"], s))
        return s, s

    return lax.scan(body or step, c["s"], None, **kwargs)


@program()
def unroll_is_E(env, c, key):
    s, ss = unrolled(env, c, key, length=E)
    a = jnp.swapaxes(ss, 0, 1)
    return {"s": s, "w": learn(c["w"], ss[:, 0], a[:, 1])}, {
        "m": jnp.sum(ss, axis=(0, 2)),
        "n": jnp.sum(ss, axis=(1, 2)),
    }


@program()
def unroll_reversed(env, c, key):
    s, ss = unrolled(env, c, key, length=3, reverse=True)
    return {"s": s, "w": learn(c["w"], ss * jnp.arange(1.0, 4.0)[:, None, None])}, {"m": ss}


@program()
def unroll_of_one(env, c, key):
    s, ss = unrolled(env, c, key, length=1)
    return {"s": s, "w": learn(c["w"], ss)}, {"m": ss}


@program()
def unroll_of_zero(env, c, key):
    s, ss = unrolled(env, c, key, length=0)
    return {"s": env.step(s, acts(c["w"], s)), "w": learn(c["w"], s) + jnp.sum(ss)}, {"m": jnp.mean(s)}


@program()
def slices_that_are_environments(env, c, key):
    xs = jax.random.normal(key, (4, E, 3))

    def step(s, x):
        s = env.step(s, acts(c["w"], s) + x)
        return s, (x, s, x[:, 0])

    s, (x, ss, x0) = lax.scan(step, c["s"], xs)
    return {"s": s, "w": learn(c["w"], ss, x)}, {"m": jnp.mean(x), "x0": x0}


@program()
def slices_from_environments(env, c, key):
    xs = jnp.stack([c["s"], jnp.sin(c["s"]), c["s"] ** 2])

    def step(s, x):
        s = env.step(s, acts(c["w"], s) + x)
        return s, (x, s)

    s, (x, ss) = lax.scan(step, c["s"], xs, reverse=True)
    return {"s": s, "w": learn(c["w"], ss, x)}, {"m": jnp.mean(x, axis=(0, 2))}


@program()
def scan_over_environments(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]))
    total, partial = lax.scan(lambda t, row: (t + row, act(t, row)), c["w"], s)
    return {"s": s, "w": learn(total, s)}, {"m": partial}


@program()
def scan_over_environments_with_every_role(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]))

    def step(w, row):
        w = learn(w, act(w, row))
        return w, w

    w, ws = lax.scan(step, c["w"], s)
    return {"s": s, "w": w}, {"m": ws}


@program()
def learner_speaks_to_each_environment(env, c, key):
    goal = choreo.fragment("learner")(lambda w, s: jnp.cumsum(jnp.tile(w, (E, 1)) * s, axis=0))(c["w"], c["s"])
    s = env.step(c["s"], jax.vmap(act)(goal, c["s"]))
    return {"s": s, "w": learn(c["w"], goal)}, {"m": jnp.mean(goal)}


@program(lambda env, key: state_and_weights(env, key) | {"goal": jnp.ones((E, 3)), "count": jnp.zeros((E,), jnp.int32)})
def learner_keeps_something_for_each_environment(env, c, key):
    s = env.step(c["s"], jax.vmap(act)(c["goal"], c["s"]))
    goal = choreo.fragment("learner")(lambda g, s: jnp.roll(0.5 * g + s, 1, axis=0))(c["goal"], s)
    return {"s": s, "w": learn(c["w"], goal), "goal": goal, "count": c["count"] + (goal[:, 0] > 0).astype(jnp.int32)}, {
        "m": c["count"]
    }


@program(lambda env, key: state_and_weights(env, key) | {"buffer": jnp.zeros((8, E, 3)), "at": jnp.int32(0)})
def a_buffer_with_time_first(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]))
    buffer = choreo.fragment("buffer")(lambda b, s, i: lax.dynamic_update_slice(b, s[None], (i, 0, 0)))(
        c["buffer"], s, c["at"]
    )
    return {"s": s, "w": learn(c["w"], buffer), "buffer": buffer, "at": (c["at"] + 1) % 8}, {"m": jnp.mean(buffer)}


@program(lambda env, key: state_and_weights(env, key) | {"last": jnp.zeros((4, E, 3))})
def a_history_at_the_environment(env, c, key):
    s = env.step(c["s"], acts(c["w"], jnp.mean(c["last"], axis=0)))
    last = jnp.concatenate([c["last"][1:], s[None]])
    return {"s": s, "w": learn(c["w"], last), "last": last}, {"m": jnp.mean(last)}


@program()
def an_iterate_that_is_jitted(env, c, key):
    return jax.jit(lambda c, key: PROGRAMS["plain"][1](env, c, key))(c, key)


@program()
def a_remat_scan_with_a_gradient(env, c, key):
    @jax.checkpoint
    def step(s, _):
        return 0.5 * jnp.tanh(acts(c["w"], s)) + 0.5 * s, ()

    def loss(w, s):
        body = jax.checkpoint(lambda s, _: (0.5 * jnp.tanh(acts(w, s)) + 0.5 * s, jnp.mean(s)))
        s, means = lax.scan(body, s, None, 3)
        return jnp.mean(s**2) + jnp.sum(means)

    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s, "w": c["w"] - 0.1 * jax.grad(loss)(c["w"], s)}, {"m": jax.grad(loss, 1)(c["w"], s)}


@program()
def a_gradient_through_a_mapped_fragment(env, c, key):
    grads = jax.vmap(jax.grad(lambda w, s: jnp.sum(act(w, s) ** 2)), (None, 0))(c["w"], c["s"])
    total = jax.grad(lambda w: jnp.mean(acts(w, c["s"]) ** 3))(c["w"])
    each = jax.grad(lambda s: jnp.sum(acts(c["w"], s) ** 2))(c["s"])
    s = env.step(c["s"], grads + each)
    return {"s": s, "w": learn(c["w"], s) - 0.1 * total}, {"m": jnp.mean(grads)}


@program()
def a_gradient_of_a_linear_fragment(env, c, key):
    twice = choreo.fragment("actor")(lambda w, s: w * s)
    each = jax.vmap(lambda s: jax.jvp(lambda s: twice(c["w"], s), (s,), (jnp.ones_like(s),))[1])(c["s"])
    back = jax.grad(lambda s: jnp.sum(jax.vmap(twice, (None, 0))(c["w"], s) * TABLE))(c["s"])
    s = env.step(c["s"], each + back)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(each)}


@program()
def control_flow_nested_three_deep(env, c, key):
    def deep(s):
        def body(i, s):
            return lax.cond(
                i > 0, lambda s: lax.scan(lambda s, t: (jnp.sin(s) + t * s, s), s, jnp.arange(2.0))[0], jnp.cos, s
            )

        return lax.fori_loop(0, 3, body, s)

    s = env.step(c["s"], choreo.fragment("actor")(deep)(c["s"]) + jax.vmap(choreo.fragment("actor")(deep))(c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def control_flow_that_mixes_three_deep(env, c, key):
    def deep(s):
        def body(i, s):
            return lax.cond(
                i > 0,
                lambda s: lax.scan(lambda s, t: (jnp.sin(s) + t * jnp.roll(s, 1, 0), s), s, jnp.arange(2.0))[0],
                jnp.cos,
                s,
            )

        return lax.fori_loop(0, 3, body, s)

    s = env.step(c["s"], choreo.fragment("actor")(deep)(c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def a_loop_that_mixes_only_later(env, c, key):
    """The carry is whole at first; the third round brings in what the environments hold, and then sums it."""

    def body(carry, t):
        a, b, d = carry
        return (b, d, jnp.cumsum(a, axis=0) + c["s"]), jnp.mean(a)

    zero = jnp.zeros((E, 3))
    (a, b, d), means = choreo.fragment("actor")(lambda s: lax.scan(body, (zero, zero, zero), jnp.arange(4)))(c["s"])
    s = env.step(c["s"], a + b + d)
    return {"s": s, "w": learn(c["w"], s)}, {"m": means}


@program()
def a_loop_whose_carry_becomes_a_block_later(env, c, key):
    zero = jnp.zeros((E, 3))

    @choreo.fragment("actor")
    def f(s):
        return lax.scan(
            lambda carry, t: ((carry[1], carry[2], jnp.sin(carry[0]) + s), carry[0]), (zero, zero, zero), jnp.arange(4)
        )

    (a, b, d), history = f(c["s"])
    s = env.step(c["s"], a + b + d + history[3])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(history, axis=(0, 2))}


@program()
def a_loop_that_moves_the_axis(env, c, key):
    f = choreo.fragment("actor")(lambda s: lax.scan(lambda x, t: (x.T + t, ()), s @ TABLE.T, jnp.arange(2.0))[0])
    s = env.step(c["s"], f(c["s"]) @ TABLE)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def a_branch_chosen_by_the_mean(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]))
    s2 = lax.cond(jnp.mean(s) > 0, lambda s: s, lambda s: -s, s)
    return {"s": s2, "w": learn(c["w"], s2)}, {"m": jnp.mean(s)}


@program()
def a_branch_with_fragments_of_two_roles(env, c, key):
    s = lax.cond(c["w"][0] > 0, lambda s: env.step(s, acts(c["w"], s)), lambda s: env.step(s, s), c["s"])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def a_while_with_fragments_of_two_roles(env, c, key):
    s = lax.fori_loop(0, 2, lambda i, s: env.step(s, acts(c["w"], s)), c["s"])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def while_per_environment(env, c, key):
    def halve(x):
        return lax.while_loop(lambda c: jnp.abs(c[0][0]) > 0.05, lambda c: (0.6 * c[0], c[1] + 1), (x, 0))

    a, n = jax.vmap(halve)(c["s"])
    b, m = jax.vmap(choreo.fragment("actor")(halve))(c["s"])
    s = env.step(c["s"], a + b)
    return {"s": s, "w": learn(c["w"], s)}, {"n": n, "m": jnp.sum(m)}


@program()
def a_batched_fragment_with_a_while_per_environment(env, c, key):
    def halve(x, k):
        def body(c):
            return 0.6 * c[0], c[1] + 1, jax.random.fold_in(c[2], c[1])

        x, n, k = lax.while_loop(lambda c: jnp.abs(c[0][0]) > 0.05, body, (x, 0, k))
        return x, n + jax.random.randint(k, (), 0, 9)

    a, n = choreo.fragment("actor")(jax.vmap(halve))(c["s"], env.keys(key))
    s = env.step(c["s"], a)
    return {"s": s, "w": learn(c["w"], s)}, {"n": n}


@program()
def a_number_of_rounds_per_environment_from_arange(env, c, key):
    def rounds(n, x):
        return lax.fori_loop(0, n, lambda t, x: 0.7 * x + 0.1 * t, x)

    def at_most(n, x):
        return lax.while_loop(
            lambda c: (c[0] < n) & (jnp.abs(c[1][0]) > 0.01), lambda c: (c[0] + 1, 0.6 * c[1]), (0, x)
        )

    a = choreo.fragment("actor")(lambda s: jax.vmap(rounds)(jnp.arange(E), s))(c["s"])
    n, b = choreo.fragment("env")(lambda s: jax.vmap(at_most)(E - jnp.arange(E), s))(c["s"])
    s = env.step(c["s"], a + b + jax.vmap(rounds)(jnp.arange(E) // 2, c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"n": n}


@program()
def groups_that_the_next_group_cannot_divide(env, c, key):
    groups = choreo.fragment("env")(lambda s: jax.jit(lambda s: jnp.sin(s).reshape(2, 3, 3))(s))(c["s"])
    same, a = choreo.fragment("actor")(lambda g, s: jax.jit(lambda g, s: (g, jnp.cos(s)))(g, s))(groups, c["s"])
    s = env.step(c["s"], a + same.reshape(E, 3))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def time_and_environments_merged(env, c, key):
    s, ss = unrolled(env, c, key, length=4)
    flat = ss.reshape(4 * E, 3)
    order = jax.random.permutation(key, 4 * E)
    batches = flat[order].reshape(3, 8, 3)
    w, losses = lax.scan(lambda w, b: (learn(w, b), jnp.mean(b)), c["w"], batches)
    return {"s": s, "w": w}, {"l": losses, "each": flat.reshape(4, E, 3)[:, :, 0]}


@program()
def time_and_environments_merged_for_the_actor(env, c, key):
    s, ss = unrolled(env, c, key, length=2)
    a = jax.vmap(act, (None, 0))(c["w"], ss.reshape(2 * E, 3)).reshape(2, E, 3)
    return {"s": env.step(s, a[0] + a[1]), "w": learn(c["w"], a)}, {"m": jnp.mean(a)}


@program()
def half_precision(env, c, key):
    a = acts(c["w"].astype(jnp.bfloat16), c["s"].astype(jnp.bfloat16))
    s = env.step(c["s"], a.astype(jnp.float32))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s), "h": a[:, 0].astype(jnp.float32)}


@program()
def actor_alone_decides(env, c, key):
    """A value that no environment knows, made by a replicated group."""
    boost = choreo.fragment("actor")(lambda w: jnp.sum(w) * jnp.ones((E,)))(c["w"])
    s = env.step(c["s"], acts(c["w"], c["s"]) * (boost[:, None] * jnp.ones((1, 3))))
    return {"s": s, "w": learn(c["w"], boost)}, {"m": boost}


@program()
def environment_shares_its_sum(env, c, key):
    total = choreo.fragment("env")(lambda s: jnp.sum(s, axis=0))(c["s"])
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], total)}, {"m": total}


@program()
def environment_shares_the_first(env, c, key):
    first = choreo.fragment("env")(lambda s: s[0])(c["s"])
    s = env.step(c["s"], acts(c["w"], c["s"]) + jnp.tile(first, (E, 1)))
    return {"s": s, "w": learn(c["w"], first)}, {"m": first}


@program(lambda env, key: {"s": env.reset(env.keys(key)), "w": jnp.mean(env.reset(env.keys(key)), axis=0)})
def weights_from_the_first_states(env, c, key):
    return PROGRAMS["plain"][1](env, c, key)


@program(lambda env, key: {"s": jnp.cumsum(env.reset(env.keys(key)), axis=0), "w": jnp.ones(3)})
def first_states_mixed(env, c, key):
    return PROGRAMS["plain"][1](env, c, key)


@program(lambda env, key: {"s": env.reset(env.keys(key)).T, "w": jnp.ones(3)})
def environments_along_the_second_axis(env, c, key):
    s = env.step(c["s"].T, acts(c["w"], c["s"].T))
    return {"s": s.T, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program(lambda env, key: {"s": env.reset(env.keys(key)).reshape(-1), "w": jnp.ones(3)})
def environments_flattened_in_the_carry(env, c, key):
    s = env.step(c["s"].reshape(E, 3), acts(c["w"], c["s"].reshape(E, 3)))
    return {"s": s.reshape(-1), "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def order_of_environments_reversed_in_the_carry(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]))
    return {"s": s[::-1], "w": learn(c["w"], s[0])}, {"m": s[0]}


@program()
def nested_scans_over_roles(env, c, key):
    def outer(carry, k):
        s, w = carry

        def inner(s, k):
            s = env.step(s, jax.vmap(act_random, (None, 0, 0))(w, s, env.keys(k)))
            return s, s

        s, ss = lax.scan(inner, s, jax.random.split(k, 2))
        return (s, learn(w, ss)), jnp.mean(ss)

    (s, w), means = lax.scan(outer, (c["s"], c["w"]), jax.random.split(key, 2))
    return {"s": s, "w": w}, {"m": means}


@program()
def a_scan_that_returns_its_carry_twice(env, c, key):
    def step(carry, t):
        s, old, n = carry
        new = env.step(s, acts(c["w"], old))
        return (new, s, n + 1), (new, new, s, n, jnp.float32(2.0), c["w"])

    (s, old, n), (a, b, d, ns, two, ws) = lax.scan(step, (c["s"], c["s"], jnp.int32(0)), jnp.arange(3))
    return {"s": s, "w": learn(c["w"], a + b, d, old)}, {"n": ns, "two": two, "ws": ws, "d": d, "last": n}


@program()
def a_scan_with_an_accumulator_over_environments(env, c, key):
    def step(carry, t):
        s, total = carry
        s = env.step(s, acts(c["w"], s) + total)
        return (s, total + jnp.mean(s)), total

    (s, total), totals = lax.scan(step, (c["s"], jnp.float32(0.0)), None, 3)
    return {"s": s, "w": learn(c["w"], s) + total}, {"t": totals}


@program()
def a_scan_with_a_constant_from_the_environments(env, c, key):
    base = jnp.sin(c["s"])

    def step(s, t):
        s = env.step(s, acts(c["w"], s) + base * t)
        return s, base[:, 0] + s[:, 0]

    s, out = lax.scan(step, c["s"], jnp.arange(3.0))
    return {"s": s, "w": learn(c["w"], out)}, {"out": out}


@program()
def a_scan_whose_results_nobody_reads(env, c, key):
    def step(carry, t):
        s, junk = carry
        s = env.step(s, acts(c["w"], s))
        return (s, junk + jnp.sum(s)), jnp.sort(s, axis=0)

    (s, _), _ = lax.scan(step, (c["s"], jnp.float32(0.0)), None, 2)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def printing(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]))
    jax.debug.print("mean {}", jnp.mean(s))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def printing_each_environment(env, c, key):
    f = choreo.fragment("actor")(lambda w, s: (jax.debug.print("row {}", s), w * s)[1])
    s = env.step(c["s"], jax.vmap(f, (None, 0))(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def printing_in_a_batched_fragment(env, c, key):
    f = choreo.fragment("actor")(lambda w, s: (jax.debug.print("all {}", s), s * w[0])[1])
    s = env.step(c["s"], f(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def printing_only_a_scalar_in_a_batched_fragment(env, c, key):
    f = choreo.fragment("actor")(lambda w, s: (jax.debug.print("w {}", w[0]), s * w[0])[1])
    s = env.step(c["s"], f(c["w"], c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def printing_in_a_scan(env, c, key):
    def step(s, t):
        s = env.step(s, acts(c["w"], s))
        jax.debug.print("{} {}", t, s[0, 0])
        return s, ()

    s, _ = lax.scan(step, c["s"], jnp.arange(2))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def a_role_nobody_has(env, c, key):
    judge = choreo.fragment("critic")(lambda s: s - jnp.mean(s, axis=0, keepdims=True))
    s = env.step(c["s"], judge(acts(c["w"], c["s"])))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def a_fragment_with_nothing_from_outside(env, c, key):
    noise = choreo.fragment("env")(lambda: jnp.arange(3.0 * E).reshape(E, 3))()
    drawn = choreo.fragment("env")(lambda k: jax.random.normal(k, (E, 3)))(key)
    s = env.step(c["s"], acts(c["w"], c["s"]) + noise + drawn)
    return {"s": s, "w": learn(c["w"], drawn)}, {"m": jnp.mean(noise)}


@program()
def a_table_that_every_environment_reads(env, c, key):
    table = jnp.sin(jnp.outer(jnp.arange(float(E)), c["w"]))
    index = jnp.abs(100 * c["s"][:, 0]).astype(jnp.int32) % E
    a = jax.vmap(choreo.fragment("actor")(lambda t, i: t[i]), (None, 0))(table, index)
    s = env.step(c["s"], a + table[index])
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def shared_value_of_length_E_next_to_environments(env, c, key):
    """`logits` has length E, but its axis is not the environments'."""
    logits = jnp.cumsum(jnp.linspace(0.0, 1.0, E) * c["w"][0])
    score = c["s"] @ TABLE.T * jnp.tile(logits, (E, 1)) + jnp.tile(logits, (E, 1))
    s = env.step(c["s"], score @ TABLE)
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(score, axis=0), "n": logits}


@program()
def shared_square(env, c, key):
    square = SQUARE * c["w"][0]
    f = choreo.fragment("actor")(lambda q, s: q.T @ jnp.ones((E, 3)) * s + q[:, :3])
    s = env.step(c["s"], f(square, c["s"]))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def statics_that_compare_equal(env, c, key):
    scaled = choreo.fragment("actor")(lambda s, n: s * jnp.float32(2.0 if isinstance(n, bool) else 3.0))
    s = env.step(c["s"], scaled(c["s"], True) + scaled(c["s"], 1))
    return {"s": s, "w": learn(c["w"], s)}, {"m": jnp.mean(s)}


@program()
def donated_and_read_again(env, c, key):
    s1 = env.step(c["s"], acts(c["w"], c["s"]))
    s2 = env.step(s1, acts(c["w"], s1))
    s3 = env.step(c["s"], s2)
    return {"s": s3, "w": learn(c["w"], s1, c["s"])}, {"m": jnp.mean(c["s"] - s1), "w": c["w"], "s": c["s"]}


@program()
def a_metric_that_is_carried(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]))
    w = learn(c["w"], s)
    return {"s": s, "w": w}, {"w": w, "s": s}


def rows_for(env):
    """An array that `init` closes over, for as many environments as it is asked about."""
    return TABLE if env.num_envs == E else jnp.ones((env.num_envs, 3))


@program(lambda env, key: {"s": rows_for(env), "w": jnp.ones(3)})
def carry_starts_as_a_constant_array(env, c, key):
    return PROGRAMS["plain"][1](env, c, key)


@program(
    lambda env, key: state_and_weights(env, key) | {"c": jnp.zeros((E, 3)) if env.num_envs == E else rows_for(env)}
)
def carry_becomes_a_constant_array(env, c, key):
    s = env.step(c["s"], acts(c["w"], c["s"]) + c["c"])
    return {"s": s, "w": learn(c["w"], s), "c": TABLE}, {"m": jnp.mean(s), "t": TABLE}


@program()
def a_scan_with_constant_arrays(env, c, key):
    def step(carry, x):
        s, base = carry
        return (env.step(s, acts(c["w"], s) + base + x), TABLE), (TABLE, x, base)

    (s, base), (a, b, d) = lax.scan(step, (c["s"], TABLE[::-1]), jnp.stack([TABLE, -TABLE, TABLE]))
    return {"s": s + base, "w": learn(c["w"], a, b, d)}, {"a": a, "d": d}


@program()
def constant_arrays_given_to_fragments(env, c, key):
    add = choreo.fragment("actor")(lambda s, t: s + t)
    a = add(c["s"], TABLE) + jax.jit(lambda s, t: add(s, t))(c["s"], np.asarray(TABLE))
    s = env.step(c["s"], a + choreo.fragment("env")(lambda s: (s, TABLE * 2.0))(c["s"])[1])
    return {"s": s, "w": learn(c["w"], s, TABLE)}, {"m": jnp.mean(s), "t": TABLE}


def raw_keys(env, key):
    raw = jax.random.key_data(key)
    return state_and_weights(env, key) | {"each": jax.random.split(raw, env.num_envs), "one": raw}


@program(raw_keys)
def raw_keys_in_the_carry(env, c, key):
    one, drawn = jax.random.split(c["one"])
    each = jax.vmap(jax.random.split)(c["each"])
    a = acts(c["w"], c["s"]) + jax.vmap(lambda k: jax.random.normal(k, (3,)))(each[:, 1])
    s = env.step(c["s"], a + jax.vmap(lambda k: jax.random.uniform(k, (3,)))(jax.random.split(drawn, E)))
    return {"s": s, "w": learn(c["w"], s), "each": each[:, 0], "one": one}, {"m": jnp.mean(s)}


@program(lambda env, key: state_and_weights(env, key) | {"n": jnp.int32(0), "x": jnp.zeros((E, 3))})
def glue_read_by_three_groups(env, c, key):
    g = jnp.tanh(c["w"]) * c["n"].astype(jnp.float32)
    b = jnp.broadcast_to(g, (E, 3)) + c["x"]
    s = env.step(c["s"] + b, acts(g, c["s"] * b))
    return {"s": s, "w": learn(g, s + b), "n": c["n"] + 1, "x": 0.1 * b}, {"g": g, "b": b}


@program(
    lambda env, key: state_and_weights(env, key) | {"v": jnp.ones(3), "t": jnp.zeros((E, 3)), "a": jnp.zeros((E, 3))}
)
def carry_changes_places_between_groups(env, c, key):
    a = acts(c["w"], c["s"] + c["t"])
    s = env.step(c["a"], a)
    metrics = {name: c[name] for name in ("w", "v", "s", "t")}
    return {"s": c["t"], "t": a, "a": s, "w": c["v"], "v": learn(c["w"], s)}, metrics


@program()
def counters_in_a_split_loop(env, c, key):
    def step(state, _):
        s, n, w = state
        s = env.step(s, acts(w, s) * n)
        return (s, n + 1.0, w), (2.0 * n, s, w)

    (s, n, w), (ns, ss, ws) = lax.scan(step, (c["s"], jnp.float32(0), c["w"]), None, length=3)
    return {"s": s, "w": learn(w, ss)}, {"n": n, "ns": ns, "ws": ws, "ss": ss}
