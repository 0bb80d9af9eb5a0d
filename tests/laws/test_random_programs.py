"""Level 3 of the law (docs/law.md) for random programs.

Choreo must either refuse a program and name the user's line, or compute what the program without marks computes, up to 2e-5.

A program has three lists of instructions: one before a scan over `env.step`, one inside the scan, one after it. An
instruction names an op, the operands, and how the op is called: as glue, in a fragment of some role, or in a mapped fragment (a
fragment of one environment, called under `vmap`). Some ops have a scan, cond, while loop or jit around them. With E environments
and T steps, the kinds of values are

    env [E, 3]     shared [3]     time [T, E, 3]     count [E] of integers     key (an operand only)

The float results of all ops are squashed by tanh, so that rounding errors do not grow.

A wide program varies more: its carry can be in any container and can have unusual leaves, its metrics can be in any order, and
some ops compute in other types. Its number of environments can equal the width of a state, the number of steps in the scan, or the
number of replicas.
"""

import collections
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax

import choreo
from choreo.layouts import Group, Layout, coarse, fine, fused
from laws.edge_cases.leaves import ARRAYS, PYTHON
from laws.refuse_or_equal import MORE_LAYOUTS, Pond, refuse_or_equal

T = 3
WEIGHTS = jnp.linspace(-0.5, 0.5, 9).reshape(3, 3)
Ops = dict[str, tuple[tuple[str, ...], str, Any]]
"""For each op, by name: the kinds of its operands, the kind of its result, and its function."""


@functools.cache
def ops(E: int) -> Ops:
    """The ops for E environments."""
    with jax.ensure_compile_time_eval():  # the cache keeps these arrays, so they must not be tracers
        square = jnp.linspace(-0.3, 0.3, E * E).reshape(E, E)
        columns = jnp.linspace(-0.3, 0.3, 3 * E).reshape(E, 3) if E < 3 else square[:, :3]

    def lines(x):
        return jnp.broadcast_to(x, (E, 3))

    return {
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
        "mixing square": (("env",), "env", lambda x: square @ x),
        "harmless square": (("env",), "env", lambda x: columns * x),
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
    } | {name: (("env",), "env", fn) for name, fn in OTHER_TYPES.items()}


OTHER_TYPES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "by bfloat16": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "by float16": lambda x: (x.astype(jnp.float16) * np.float16(0.5)).astype(x.dtype),
    "by int8": lambda x: x + 0.1 * jnp.round(9 * x).astype(jnp.int8).astype(x.dtype),
    "by uint8": lambda x: x * (jnp.abs(9 * x).astype(jnp.uint8) % np.uint8(3)).astype(x.dtype),
    "by bool": lambda x: jnp.where(jnp.any(x > 0, axis=-1, keepdims=True), x, -0.5 * x),
    "by complex": lambda x: jnp.real(lax.complex(x, 0.5 * x) * lax.complex(x, -x)),
    "by bits": lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.uint32) ^ np.uint32(1 << 31), x.dtype
    ),
    "by nothing": lambda x: x + jnp.sum(x[..., :0], axis=-1, keepdims=True),
}
"""Ops whose intermediate values are not ordinary float32 arrays: they have another type, or no elements ("by nothing"). Each op
works on a batch and on one environment."""
NARROW_OPS = sorted(set(ops(6)) - set(OTHER_TYPES))
"""The ops of programs that are not wide."""


ROWS: dict[str, Any] = {
    "sin": jnp.sin,
    "sort each": jnp.sort,
    "over E": lambda x: x / 6,
    "dense": lambda x: jnp.tanh(x @ WEIGHTS),
    "softmax": jax.nn.softmax,
    "add": lambda x, y: x + 0.5 * y,
    "multiply": lambda x, y: x * y,
    "per-env loop": lambda r: lax.while_loop(lambda r: jnp.abs(r[0]) > 0.3, lambda r: r / 2, r),
    "time total": lambda x: jnp.sum(x, axis=0),
    **OTHER_TYPES,
}
"""The functions of mapped fragments. Each function is the op of the same name for one environment. An exception is "over E", which
here always divides by 6."""
ROLES = ("env", "actor", "buffer", "learner")


class Instruction(NamedTuple):
    """One step of a random program."""

    op: str
    """Name of the op."""
    kind: str
    """How the op is called: as "glue", or in a "fragment" or a "mapped" fragment. An op that is not in `ROWS` cannot be mapped:
    "mapped" then means glue."""
    role: str
    """Role of the fragment."""
    around: str
    """Control flow around the op: "" (none), "scan", "cond", "while" or "jit"."""
    operands: tuple[int, int, int]
    """For each operand: the index of a value among the values of its kind, modulo the number of these values."""


@dataclass(frozen=True)
class RandomProgram:
    """An algorithm made of instructions."""

    before: tuple[Instruction, ...]
    """Instructions before the scan."""
    inside: tuple[Instruction, ...]
    """Instructions in each step of the scan."""
    after: tuple[Instruction, ...]
    """Instructions after the scan."""
    picks: tuple[int, ...]
    """Indices of the values that become the carry and the metrics, modulo the number of values of the same kind."""

    def init(self, env, key):
        E = env.num_envs
        return {
            "state": env.reset(env.keys(key)),
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
    """Return a copy of the pool (the values by kind) with the result of each instruction appended."""
    table = ops(len(pool["env"][0]))
    pool = {kind: list(values) for kind, values in pool.items()}
    for i, (name, kind, role, around, operands) in enumerate(instructions):
        takes, gives, fn = table[name]
        mapped = kind == "mapped" and name in ROWS
        if mapped:
            axes = tuple({"env": 0, "time": 1}[take] for take in takes)
            fn = jax.vmap(choreo.fragment(role)(ROWS[name]), axes)
        args = [
            jax.random.fold_in(key, i) if take == "key" else pool[take][n % len(pool[take])]
            for take, n in zip(takes, operands, strict=False)
        ]
        fn = surround(around, fn, args)
        if kind == "fragment":
            fn = choreo.fragment(role)(fn)
        result = fn(*args)
        pool[gives].append(result if gives == "count" else squash(result))
    return pool


def surround(around, fn, args):
    """The function with the control flow `around` it."""
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
        return lambda *args: lax.while_loop(
            lambda x: x[0] < 2, lambda x: (x[0] + 1, fn(*args) + x[1]), (0, jnp.zeros(like.shape, like.dtype))
        )[1]
    return fn


INSTRUCTIONS = st.builds(
    Instruction,
    op=st.sampled_from(NARROW_OPS),
    kind=st.sampled_from(["glue", "glue", "fragment", "mapped"]),
    role=st.sampled_from(ROLES),
    around=st.sampled_from(["", "", "", "scan", "cond", "while", "jit"]),
    operands=st.tuples(*[st.integers(0, 7)] * 3),
)
PARTS = {
    "before": st.lists(INSTRUCTIONS, max_size=3).map(tuple),
    "inside": st.lists(INSTRUCTIONS, max_size=3).map(tuple),
    "after": st.lists(INSTRUCTIONS, max_size=4).map(tuple),
    "picks": st.lists(st.integers(0, 9), min_size=6, max_size=6).map(tuple),
}
PROGRAMS = st.builds(RandomProgram, **PARTS)


class CarryTuple(NamedTuple):
    """The carry of a random program as a NamedTuple."""

    state: Any
    memory: Any
    weights: Any
    more: Any
    count: Any
    past: Any


class CarryModule(eqx.Module):
    """The carry of a random program as a module, with the fields in a different order."""

    past: Any
    count: Any
    more: Any
    weights: Any
    memory: Any
    state: Any
    squash: Callable[..., Any] = jnp.tanh
    size: Any = eqx.field(static=True, default=1.0)


CONTAINERS: dict[str, tuple[Callable[[dict[str, Any]], Any], Callable[[Any], dict[str, Any]]]] = {
    "dict": (dict, dict),
    "OrderedDict": (lambda c: collections.OrderedDict(reversed(c.items())), dict),
    "defaultdict": (lambda c: collections.defaultdict(None, c), dict),
    "NamedTuple": (lambda c: CarryTuple(**c), lambda c: c._asdict()),
    "Module": (lambda c: CarryModule(**c), lambda c: {name: getattr(c, name) for name in CarryTuple._fields}),
    "list": (lambda c: [None, [*c.values()], ()], lambda c: dict(zip(CarryTuple._fields, c[1], strict=True))),
    "int keys": (
        lambda c: {10 - i: (value,) for i, value in enumerate(c.values())},
        lambda c: {name: c[10 - i][0] for i, name in enumerate(CarryTuple._fields)},
    ),
}
"""How to put the carry of a random program into a container, and how to get it out again."""
LEAVES = ARRAYS | {f"Python's {name}": leaf for name, leaf in PYTHON.items()}
METRICS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": dict,
    "out of order": lambda m: collections.OrderedDict(sorted(m.items(), key=lambda item: item[0][::-1], reverse=True)),
    "default": lambda m: collections.defaultdict(float, m),
}


@dataclass(frozen=True)
class WideProgram:
    """A random program whose carry is in a container and has additional, unusual leaves. Its metrics have several types."""

    program: RandomProgram
    """The program that computes carry and metrics."""
    container: str
    """Container of the carry."""
    leaves: tuple[tuple[str, str], ...]
    """The additional leaves. They come in pairs: a leaf of `LEAVES`, and the same leaf after one change. This field holds, for each
    pair, the name in `LEAVES` and an entry of `TREATMENTS`."""
    metrics: str
    """Container of the metrics."""

    def init(self, env, key):
        leaves = [LEAVES[name] for name, _ in self.leaves]
        return CONTAINERS[self.container][0](self.program.init(env, key)), [
            (leaf, change(leaf)) for leaf, change in leaves
        ]

    def iterate(self, env, carry, key):
        carry, leaves = carry
        make, take = CONTAINERS[self.container]
        carry, metrics = take(carry), {}
        for (name, treatment), (leaf, _) in zip(self.leaves, leaves, strict=True):
            if treatment == "read" and "key" not in name:
                number = jnp.sum(jnp.real(jnp.asarray(leaf)).astype(jnp.float32))
                carry["weights"] = carry["weights"] + 0.1 * jnp.tanh(jnp.where(jnp.isfinite(number), number, 1.0))
        after, metrics = self.program.iterate(env, carry, key)
        leaves = [
            self.changed(name, treatment, *pair) for (name, treatment), pair in zip(self.leaves, leaves, strict=True)
        ]
        metrics = {"z": jnp.sum(after["count"]), "any": jnp.any(after["state"] > 0), "two": 2, **metrics}
        return (make(after), leaves), METRICS[self.metrics](metrics)

    def changed(self, name, treatment, one, other):
        """The new values of a pair of leaves. `name` is the name of both in `LEAVES`."""
        change = LEAVES[name][1]
        if treatment == "kept":
            return one, other
        if treatment == "swapped":
            return other, one
        return (change(one), other) if treatment in ("changed", "read") else (change(other), change(other))


WIDE_INSTRUCTIONS = st.builds(
    Instruction,
    op=st.sampled_from(sorted(ops(6))) | st.sampled_from(sorted(OTHER_TYPES)),
    kind=st.sampled_from(["glue", "fragment", "mapped"]),
    role=st.sampled_from(ROLES),
    around=st.sampled_from(["", "", "", "scan", "cond", "while", "jit"]),
    operands=st.tuples(*[st.integers(0, 7)] * 3),
)
TREATMENTS = ("kept", "changed", "swapped", "doubled", "read")
"""What an iteration does with a pair of leaves. It keeps both; changes the first; swaps the two; gives both the same new value
("doubled"); or reads the first and changes it."""
WIDE_PROGRAMS = st.builds(
    WideProgram,
    program=st.builds(
        RandomProgram,
        before=st.lists(WIDE_INSTRUCTIONS, max_size=2).map(tuple),
        inside=st.lists(WIDE_INSTRUCTIONS, max_size=2).map(tuple),
        after=st.lists(WIDE_INSTRUCTIONS, max_size=3).map(tuple),
        picks=PARTS["picks"],
    ),
    container=st.sampled_from(sorted(CONTAINERS)),
    leaves=st.lists(st.tuples(st.sampled_from(sorted(LEAVES)), st.sampled_from(TREATMENTS)), max_size=4).map(tuple),
    metrics=st.sampled_from(sorted(METRICS)),
)

SOME_LAYOUTS = {name: MORE_LAYOUTS[name] for name in ("coarse x2", "env x2, actor x3", "actor x3")}
LAYOUTS_OF = {
    6: {"fused": fused()} | MORE_LAYOUTS,
    3: {"fused": fused(), "coarse x3": coarse(3), "actor x3": MORE_LAYOUTS["actor x3"],
        "everything x3": Layout(Group("env", "actor", "buffer", "learner", replicas=3))},
    2: {"fused": fused(), "coarse x2": coarse(2), "fine x2": fine(2), "everything x2": MORE_LAYOUTS["everything x2"]},
    1: {"fused": fused(), "coarse x1": coarse(1), "three sites": MORE_LAYOUTS["three sites"]},
}  # fmt: skip
"""The layouts for each number of environments. The number 3 is also the width of a state and the number of steps; 3, 2 and 1 are
also numbers of replicas."""
SIZES = st.sampled_from([6, 3, 3, 2, 1])

# Hypothesis derives the random programs from the name and the source of each test below (`derandomize` in tests/conftest.py).
# So if you rename such a test or change its source, even its docstring, the test runs other programs.


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(program=PROGRAMS)
def test_random_programs_are_refused_or_equal(program):
    refuse_or_equal(program, Pond(6), __file__, SOME_LAYOUTS, tolerance=2e-5)


# Hypothesis does not shrink a failing program here, because that takes minutes.
# `test_many_more_wide_programs_are_refused_or_equal` does shrink.
@settings(max_examples=2, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])
@given(program=WIDE_PROGRAMS, size=SIZES)
def test_wide_programs_are_refused_or_equal(program, size):
    refuse_or_equal(program, Pond(size), __file__, dict([*LAYOUTS_OF[size].items()][:2]), tolerance=2e-5)


@pytest.mark.long
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(program=PROGRAMS)
def test_many_more_random_programs_are_refused_or_equal(program):
    refuse_or_equal(program, Pond(6), __file__, MORE_LAYOUTS, tolerance=2e-5)


@pytest.mark.long
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(program=WIDE_PROGRAMS, size=SIZES)
def test_many_more_wide_programs_are_refused_or_equal(program, size):
    refuse_or_equal(program, Pond(size), __file__, LAYOUTS_OF[size], tolerance=2e-5)
