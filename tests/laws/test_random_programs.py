"""Random small algorithms under several layouts: refused with the user's line, or equal to the reference.

A program is a list of instructions over four kinds of values; an instruction takes an op, what it is (glue, a fragment of some
role, a mapped fragment, or any of these inside a scan, cond, while or jit) and operands among the values of the right kind.

    env [E, 3]     shared [3]     time [T, E, 3]     count [E] of integers

Two lists run before and after a scan over `env.step`, one inside. Values are squashed, so that rounding does not grow.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import choreo
from laws.refuse_or_equal import MORE_LAYOUTS, Pond, refuse_or_equal

E, T = 6, 3
WEIGHTS = jnp.linspace(-0.5, 0.5, 9).reshape(3, 3)
SQUARE = jnp.linspace(-0.3, 0.3, E * E).reshape(E, E)


def lines(x):
    return jnp.broadcast_to(x, (E, 3))


OPS: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "sin": (("env",), "env", jnp.sin),
    "roll": (("env",), "env", lambda x: jnp.roll(x, 1, axis=0)),
    "cumsum": (("env",), "env", lambda x: jnp.cumsum(x, axis=0)),
    "centre": (("env",), "env", lambda x: x - jnp.mean(x, axis=0, keepdims=True)),
    "sort": (("env",), "env", lambda x: jnp.sort(x, axis=0)),
    "sort each": (("env",), "env", lambda x: jnp.sort(x, axis=1)),
    "flip": (("env",), "env", lambda x: x[::-1]),
    "number": (("env",), "env", lambda x: x * (jnp.arange(1.0, E + 1)[:, None] * jnp.ones((1, 3)))),
    "over E": (("env",), "env", lambda x: x / len(x)),
    "dense": (("env",), "env", lambda x: jnp.tanh(x @ WEIGHTS)),
    "softmax": (("env",), "env", lambda x: jax.nn.softmax(x, axis=1)),
    "mixing square": (("env",), "env", lambda x: SQUARE @ x),
    "harmless square": (("env",), "env", lambda x: SQUARE[:, :3] * x),
    "merge and part": (("env",), "env", lambda x: jnp.sin(x.reshape(-1)).reshape(E, 3)),
    "turn": (("env",), "env", lambda x: jnp.cumsum(x.T, axis=0).T),
    "scatter": (("env", "count"), "env", lambda x, i: jnp.zeros((E, 3)).at[i % E].add(x)),
    "look up another": (("env", "count"), "env", lambda x, i: x[i % E]),
    "look up its own": (("env", "count"), "env", lambda x, i: jnp.take_along_axis(x, (i % 3)[:, None], axis=1) + x),
    "look up shared": (("shared", "count"), "env", lambda w, i: w[i % 3][:, None] * jnp.ones((1, 3))),
    "add": (("env", "env"), "env", lambda x, y: x + 0.5 * y),
    "multiply": (("env", "env"), "env", lambda x, y: x * y),
    "pairs": (("env", "env"), "env", lambda x, y: (x @ y.T) @ y),
    "scale": (("env", "shared"), "env", lambda x, w: x * lines(w)),
    "outer": (("shared",), "env", lambda w: jnp.outer(jnp.linspace(-1.0, 1.0, E), w)),
    "noise": (("shared", "key"), "env", lambda w, k: jax.random.normal(k, (E, 3)) * lines(w)),
    "noise by split": (
        ("env", "key"),
        "env",
        lambda x, k: x + jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.split(k, E)),
    ),
    "noise by fold_in": (
        ("count", "key"),
        "env",
        lambda i, k: jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(k, i), (3,)))(i),
    ),
    "shuffle": (("env", "key"), "env", lambda x, k: jax.random.permutation(k, x)),
    "per-env loop": (
        ("env",),
        "env",
        lambda x: jax.vmap(lambda r: lax.while_loop(lambda r: jnp.abs(r[0]) > 0.3, lambda r: r / 2, r))(x),
    ),
    "mean": (("env",), "shared", lambda x: jnp.mean(x, axis=0)),
    "first": (("env",), "shared", lambda x: x[0]),
    "maximum": (("env",), "shared", lambda x: jnp.max(x, axis=0)),
    "contract": (("env", "env"), "shared", lambda x, y: x.T @ y[:, 0]),
    "shared sin": (("shared",), "shared", lambda w: jnp.sin(w) + 0.3),
    "shared cumsum": (("shared",), "shared", jnp.cumsum),
    "shared add": (("shared", "shared"), "shared", lambda w, v: w - 0.5 * v),
    "shared noise": (("shared", "key"), "shared", lambda w, k: w + jax.random.normal(k, (3,))),
    "stack": (("env", "env", "env"), "time", lambda x, y, z: jnp.stack([x, y, z])),
    "time sum": (("time",), "time", lambda x: jnp.cumsum(x, axis=0)),
    "time turned": (("time",), "time", lambda x: x[::-1]),
    "time merged": (("time",), "time", lambda x: jnp.roll(x.reshape(T * E, 3), 1, axis=0).reshape(T, E, 3)),
    "time swapped": (("time",), "time", lambda x: jnp.swapaxes(jnp.cumsum(jnp.swapaxes(x, 0, 1), axis=1), 0, 1)),
    "time shuffled": (
        ("time", "key"),
        "time",
        lambda x, k: x.reshape(T * E, 3)[jax.random.permutation(k, T * E)].reshape(T, E, 3),
    ),
    "time last": (("time",), "env", lambda x: x[-1]),
    "time total": (("time",), "env", lambda x: jnp.sum(x, axis=0)),
    "time mean": (("time",), "shared", lambda x: jnp.mean(x, axis=(0, 1))),
    "time scanned": (
        ("time", "env"),
        "env",
        lambda x, y: lax.scan(lambda c, r: (0.5 * c + r, ()), y, x, reverse=True)[0],
    ),
    "time scanned, mixing": (
        ("time", "shared"),
        "shared",
        lambda x, w: lax.scan(lambda c, r: (0.5 * c + r[0], ()), w, x)[0],
    ),
    "time gradient": (("time", "shared"), "shared", lambda x, w: jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)),
    "count up": (("count",), "count", lambda i: i + 1),
    "count by sum": (("count",), "count", jnp.cumsum),
    "count by key": (("count", "key"), "count", lambda i, k: i + jax.random.randint(k, (E,), 0, 9)),
}
"""Kinds of the operands, kind of the result, and what it computes."""

ROWS: dict[str, Any] = {
    "sin": jnp.sin,
    "sort each": jnp.sort,
    "over E": lambda x: x / E,
    "dense": lambda x: jnp.tanh(x @ WEIGHTS),
    "softmax": jax.nn.softmax,
    "add": lambda x, y: x + 0.5 * y,
    "multiply": lambda x, y: x * y,
    "per-env loop": lambda r: lax.while_loop(lambda r: jnp.abs(r[0]) > 0.3, lambda r: r / 2, r),
    "time total": lambda x: jnp.sum(x, axis=0),
}
"""The same for one environment: these can be mapped."""
ROLES = ("env", "actor", "buffer", "learner")


class Instruction(NamedTuple):
    """One step of a random program."""

    op: str
    kind: str
    """glue, fragment or mapped."""
    role: str
    around: str
    """Nothing, scan, cond, while or jit."""
    operands: tuple[int, int, int]


@dataclass(frozen=True)
class RandomProgram:
    """An algorithm made of instructions."""

    before: tuple[Instruction, ...]
    inside: tuple[Instruction, ...]
    after: tuple[Instruction, ...]
    picks: tuple[int, ...]
    """Which values become the carry and the metrics."""

    def init(self, env, key):
        state = env.reset(env.keys(key))
        return {
            "state": state,
            "memory": jnp.zeros((E, 3)),
            "weights": jnp.linspace(0.2, 1.0, 3),
            "more": jnp.ones(3),
            "count": jnp.arange(E),
            "past": jnp.zeros((T, E, 3)),
        }

    def iterate(self, env, carry, key):
        key_before, key_inside, key_after = jax.random.split(key, 3)
        pool = {
            "env": [carry["state"], carry["memory"]],
            "shared": [carry["weights"], carry["more"]],
            "time": [carry["past"]],
            "count": [carry["count"]],
        }
        pool = execute(self.before, pool, key_before)
        pick = iter(self.picks * 3)

        def choose(kind, among):
            return among[kind][next(pick) % len(among[kind])]

        def step(c, x):
            state, shared = c
            key, given = x
            inner = {
                "env": [state, given, *pool["env"]],
                "shared": [shared, *pool["shared"]],
                "time": pool["time"],
                "count": pool["count"],
            }
            inner = execute(self.inside, inner, key)
            state = env.step(state, inner["env"][-1])
            return (state, squash(inner["shared"][-1])), (state, choose("env", inner), choose("shared", inner))

        init = (carry["state"], choose("shared", pool))
        (state, shared), (states, others, numbers) = lax.scan(
            step, init, (jax.random.split(key_inside, T), pool["time"][-1])
        )
        pool["env"].append(state)
        pool["shared"] += [shared, jnp.sum(numbers, axis=0)]
        pool["time"] += [states, others]
        pool = execute(self.after, pool, key_after)
        after = {
            "state": state if next(pick) % 2 else squash(choose("env", pool)),
            "memory": choose("env", pool),
            "weights": squash(choose("shared", pool)),
            "more": choose("shared", pool),
            "count": choose("count", pool),
            "past": choose("time", pool),
        }
        return after, {"a": choose("env", pool), "b": choose("shared", pool), "c": jnp.mean(choose("time", pool))}


def squash(x):
    return 0.9 * jnp.tanh(x)


def execute(instructions, pool, key):
    pool = {kind: list(values) for kind, values in pool.items()}
    for i, (name, kind, role, around, operands) in enumerate(instructions):
        takes, gives, fn = OPS[name]
        mapped = kind == "mapped" and name in ROWS
        if mapped:
            axes = tuple({"env": 0, "time": 1}[take] for take in takes)
            fn = jax.vmap(choreo.fragment(role)(ROWS[name]), axes)
        args = [
            jax.random.fold_in(key, i) if take == "key" else pool[take][n % len(pool[take])]
            for take, n in zip(takes, operands, strict=False)
        ]
        fn = surround(around, fn, gives, args)
        if kind == "fragment":
            fn = choreo.fragment(role)(fn)
        result = fn(*args)
        pool[gives].append(result if gives == "count" else squash(result))
    return pool


def surround(around, fn, gives, args):
    if around == "jit":
        return jax.jit(fn)
    if around == "cond":
        like = jax.eval_shape(fn, *args)
        return lambda *args: lax.cond(
            jnp.sum(jnp.arange(3)) > 2, fn, lambda *_: jnp.zeros(like.shape, like.dtype), *args
        )
    if around == "scan":
        like = jax.eval_shape(fn, *args)
        return lambda *args: lax.scan(
            lambda c, t: (fn(*args) + t * c, ()), jnp.zeros(like.shape, like.dtype), jnp.arange(2, dtype=like.dtype)
        )[0]
    if around == "while":
        like = jax.eval_shape(fn, *args)
        return lambda *args: lax.fori_loop(0, 2, lambda i, c: fn(*args) + c, jnp.zeros(like.shape, like.dtype))
    return fn


INSTRUCTIONS = st.builds(
    Instruction,
    op=st.sampled_from(sorted(OPS)),
    kind=st.sampled_from(["glue", "glue", "fragment", "mapped"]),
    role=st.sampled_from(ROLES),
    around=st.sampled_from(["", "", "", "scan", "cond", "while", "jit"]),
    operands=st.tuples(*[st.integers(0, 7)] * 3),
)
PROGRAMS = st.builds(
    RandomProgram,
    before=st.lists(INSTRUCTIONS, max_size=3).map(tuple),
    inside=st.lists(INSTRUCTIONS, max_size=3).map(tuple),
    after=st.lists(INSTRUCTIONS, max_size=4).map(tuple),
    picks=st.lists(st.integers(0, 9), min_size=6, max_size=6).map(tuple),
)


SOME_LAYOUTS = {name: MORE_LAYOUTS[name] for name in ("coarse x2", "env x2, actor x3", "actor x3")}


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(program=PROGRAMS)
def test_random_programs_are_refused_or_equal(program):
    refuse_or_equal(program, Pond(E), __file__, SOME_LAYOUTS, tolerance=2e-5)


@pytest.mark.long
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(program=PROGRAMS)
def test_many_more_are(program):
    refuse_or_equal(program, Pond(E), __file__, MORE_LAYOUTS, tolerance=2e-5)
