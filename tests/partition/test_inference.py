"""Tests of `infer`, `demand` and `emit` on whole programs. They compare the pieces that a replica computes with the full results.

A program is a function of arrays. A replica has some inputs as a whole, and only its block of all other inputs. For each result,
`infer` says which pieces a replica can compute: the whole, its block, or none (the result is mixed). For each piece that a replica
can compute, `demand` names the pieces of the inputs that are needed for it. From these pieces of the inputs, `emit` must compute
the same numbers as the full program. If a replica has only its block of an input, `demand` must not name more than this block.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import choreo
from choreo import _compat
from choreo.partition.inference import infer
from choreo.partition.inferred import demand, emit
from choreo.partition.lattice import WHOLE, Form, Mixes, Size
from choreo.partition.program import Axis
from choreo.partition.row_numbers import Facts

E, BLOCK = 6, 2
SIZE = Size(E, BLOCK)
MIXED = "mixed"
W = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)
PER_ENV = jnp.linspace(-1.0, 1.0, E * 3).reshape(E, 3)
PER_MATRIX = jnp.broadcast_to(jnp.eye(3), (E, 3, 3))
S = ((E, 3), 0)  # one row per environment
SHARED = ((3,), None)
KEY = ("key", None)
KEYS = ("keys", 0)


@dataclass(frozen=True)
class Case:
    """A program, its inputs, and what `infer` must find for its results.

    `ins` holds the shape and the env axis of each input. The axis is None if a replica has the whole input. In place of a shape,
    "key" means one random key, "keys" means one key per environment, and ("index", E) means one index per environment. `outs` holds
    one entry per result: its env axis, or None if a replica can compute the whole, or MIXED.
    """

    fn: Callable[..., Any]
    ins: tuple[tuple[Any, Axis], ...]
    outs: tuple[Any, ...]


def actor(fn):
    return choreo.fragment("actor")(fn)


def nested(inner):
    """A while loop around a cond around a scan."""

    def body(i, x):
        return lax.cond(
            i > 0, lambda x: lax.scan(lambda x, t: (inner(x) + t * x, x), x, jnp.arange(2.0))[0], jnp.cos, x
        )

    return lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, body(*c)), (0, x))[1]


def scan_of_cond_of_while(x):
    def halve(x):
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] / 2), (0, x))[1]

    return lax.scan(lambda x, t: (lax.switch(t, [jnp.sin, halve, lambda x: x + PER_ENV], x), x[:, 0]), x, jnp.arange(3))


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -0.5, 0.5)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 0.4, g, 0.1 * g),))


@jax.custom_vjp
def backward_mixes(x):
    return jnp.sin(x)


backward_mixes.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cumsum(g * x, axis=0),))


@jax.custom_jvp
def scaled(x):
    return 2.0 * x


scaled.defjvp(lambda primals, tangents: (scaled(*primals), 3.0 * tangents[0]))


def until_small(row):
    return lax.while_loop(lambda c: jnp.abs(c[0][0]) > 0.05, lambda c: (0.6 * c[0], c[1] + 1), (row, 0))


def count_up(carry):
    return carry[0] + 1, 0.6 * carry[1] + carry[0]


def until(n, row):
    return lax.while_loop(lambda c: c[0] < n, count_up, (0, row))[1]


def draw(key):
    return jax.random.normal(key, (3,))


def gradient(fn):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))))


row_fn = actor(lambda w, row: jnp.cumsum(w * row) + jnp.sort(row)[0])
column_fn = actor(lambda column: column - jnp.max(column))
pair_fn = actor(lambda x, y: jnp.tanh(x @ y))
named_fn = actor(lambda row: row - lax.pmean(row, "envs"))
index_fn = actor(lambda row: row * lax.axis_index("envs").astype(row.dtype))
closing_fn = actor(lambda row, i: row @ W + PER_ENV[i])
printing_fn = actor(lambda row: (jax.debug.print("{}", row), row + 1)[1])
rbg_fn = actor(lambda i: jax.random.normal(jax.random.wrap_key_data(i * jnp.ones(4, jnp.uint32), impl="rbg"), (2,)))
rows_key_fn = actor(lambda row, key: row + draw(key))
linear_fn = actor(lambda w, row: w * row)

CASES = {
    "identity": Case(lambda x: x, (S,), (0,)),
    "one result twice": Case(lambda x: (jnp.sin(x),) * 2, (S,), (0, 0)),
    "a literal result": Case(lambda x: (x + 1, 3.0), (S,), (0, None)),
    "shared beside blocks": Case(lambda w, x: (jnp.cumsum(w), x * jnp.tile(w, (E, 1))), (SHARED, S), (None, 0)),
    "mixed beside blocks": Case(lambda x: (jnp.mean(x), jnp.sin(x), jnp.sort(x, 0)), (S,), (MIXED, 0, MIXED)),
    "from mixed": Case(lambda x: (x - jnp.mean(x, 0, keepdims=True)) * 0.0, (S,), (MIXED,)),
    "constant of E rows": Case(lambda x: x * PER_ENV, (S,), (0,)),
    "constant in another order": Case(lambda x: x * PER_ENV[::-1] + jnp.cumsum(PER_ENV, 0), (S,), (0,)),
    "number of the environment": Case(lambda x: x + jnp.tile(jnp.arange(float(E))[:, None], (1, 3)), (S,), (0,)),
    "one key, a row each": Case(lambda k, x: x + jax.random.normal(k, (E, 3)), (KEY, S), (0,)),
    "one key, split": Case(lambda k, x: x + jax.vmap(draw)(jax.random.split(k, E)), (KEY, S), (0,)),
    "one key, permuted": Case(lambda k, x: x + PER_ENV[jax.random.permutation(k, E)], (KEY, S), (0,)),
    "one key, permuting blocks": Case(lambda k, x: x[jax.random.permutation(k, E)], (KEY, S), (MIXED,)),
    "a key each": Case(jax.vmap(draw), (KEYS,), (0,)),
    "a key each, folded": Case(
        jax.vmap(lambda k, r: draw(jax.random.fold_in(k, (9 * r[0]).astype(jnp.int32)))), (KEYS, S), (0,)
    ),
    "a key each, rolled": Case(lambda k: jnp.roll(k, 1), (KEYS,), (MIXED,)),
    "while, cond, scan": Case(nested(jnp.sin), (S,), (0,)),
    "while, cond, scan that mixes": Case(nested(lambda x: jnp.roll(x, 1, 0)), (S,), (MIXED,)),
    "scan, cond, while": Case(scan_of_cond_of_while, (S,), (0, 1)),
    "scan, reversed": Case(
        lambda x: lax.scan(lambda c, t: (c * 0.5 + t, c), x, jnp.arange(4.0), reverse=True), (S,), (0, 1)
    ),
    "scan, unrolled": Case(
        lambda x: lax.scan(lambda c, t: (c * 0.5 + t, c), x, jnp.arange(4.0), unroll=2), (S,), (0, 1)
    ),
    "scan of length 1": Case(lambda x: lax.scan(lambda c, t: (c + t, c), x, jnp.arange(1.0)), (S,), (0, 1)),
    "scan of length 0": Case(lambda x: lax.scan(lambda c, t: (c + t, c), x, jnp.zeros(0)), (S,), (0, 1)),
    "scan over time": Case(
        lambda w, xs: lax.scan(lambda c, x: (c + jnp.mean(w) * x, x - c), jnp.zeros((E, 3)), xs),
        (SHARED, ((4, E, 3), 1)),
        (0, 1),
    ),
    "scan over time, as long as E": Case(
        lambda xs: lax.scan(lambda c, x: (c + x, x - c), jnp.zeros((E, 3)), xs), (((E, E, 3), 1),), (0, 1)
    ),
    "scan over environments": Case(lambda x: lax.scan(lambda c, r: (c + r, c), jnp.zeros(3), x), (S,), (MIXED, MIXED)),
    "scan over shared, as long as E": Case(
        lambda w, x: lax.scan(lambda c, r: (c * jnp.mean(r), c), x, jnp.outer(jnp.arange(float(E)), w)),
        (SHARED, S),
        (0, 1),
    ),
    "scan, carry becomes a block later": Case(
        lambda x: lax.scan(
            lambda c, t: ((c[1], c[2], jnp.sin(c[0]) + x), c[0]), (jnp.zeros((E, 3)),) * 3, jnp.arange(4)
        ),
        (S,),
        (0, 0, 0, 1),
    ),
    "scan, carry mixes later": Case(
        lambda x: lax.scan(
            lambda c, t: ((c[1], c[2], jnp.cumsum(c[0], 0) + x), 0), (jnp.zeros((E, 3)),) * 3, jnp.arange(4)
        )[0],
        (S,),
        (MIXED, MIXED, MIXED),
    ),
    "scan, carry whole beside blocks": Case(
        lambda w, x: lax.scan(
            lambda c, t: ((jnp.cumsum(c[0]), c[1] * jnp.tile(c[0], (E, 1))), c[0]), (w, x), jnp.arange(3)
        ),
        (SHARED, S),
        (None, 0, None),
    ),
    "scan, carry swapped": Case(
        lambda x, y: lax.scan(lambda c, t: ((c[1], c[0] + t), c[1]), (x, y), jnp.arange(3.0)), (S, S), (0, 0, 1)
    ),
    "scan, carry swapped with a whole array": Case(
        lambda x: lax.scan(lambda c, t: ((c[1], c[0] + t), c[1]), (x, PER_ENV), jnp.arange(3.0)), (S,), (0, 0, 1)
    ),
    "scan, keys": Case(
        lambda k, x: lax.scan(lambda c, k: (c + jax.vmap(draw)(jax.random.split(k, E)), ()), x, jax.random.split(k, 3))[
            0
        ],
        (KEY, S),
        (0,),
    ),
    "scan, carry transposed": Case(
        lambda x: lax.scan(lambda c, t: (c.T + t, ()), x, jnp.arange(2.0))[0], (((E, E), 0),), (MIXED,)
    ),
    "cond on shared": Case(lambda w, x: lax.cond(w[0] > 0, jnp.sin, lambda x: PER_ENV, x), (SHARED, S), (0,)),
    "cond on an environment": Case(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), (S,), (MIXED,)),
    "cond, one branch mixes": Case(
        lambda w, x: lax.cond(w[0] > 0, lambda x: (jnp.sin(x), x), lambda x: (jnp.sort(x, 0), x), x),
        (SHARED, S),
        (MIXED, 0),
    ),
    "cond, axis in two places": Case(
        lambda w, x: lax.cond(w[0] > 0, jnp.transpose, jnp.sin, x), (SHARED, ((E, E), 0)), (MIXED,)
    ),
    "cond per environment": Case(jax.vmap(lambda r: lax.cond(r[0] > 0, jnp.sin, jnp.cos, r)), (S,), (0,)),
    "while per environment": Case(jax.vmap(until_small), (S,), (0, 0)),
    "while per environment, second axis": Case(jax.vmap(until_small, 1, (1, 0)), (((3, E), 1),), (1, 0)),
    "while per environment and member": Case(jax.vmap(jax.vmap(until_small)), (((E, 2, 3), 0),), (0, 0)),
    "while per member and environment": Case(jax.vmap(jax.vmap(until_small)), (((2, E, 3), 1),), (1, 1)),
    "while for all": Case(lambda x: lax.while_loop(lambda x: jnp.any(x > 0.1), lambda x: x / 2, x), (S,), (MIXED,)),
    "while counted by shared": Case(
        lambda w, x: lax.while_loop(lambda c: jnp.sum(c[0]) < 9, lambda c: (c[0] + 1, c[1] / 2), (w, x)),
        (SHARED, S),
        (None, 0),
    ),
    "while per environment, counted by arange": Case(jax.vmap(lambda row, n: until(n, row)), (S, ((E,), None)), (0,)),
    "while per environment, counted by arange, second axis": Case(
        jax.vmap(lambda column, n: until(n, column), (1, 0), 1), (((3, E), 1), ((E,), None)), (1,)
    ),
    "while per environment and member, counted by arange": Case(
        lambda x: jax.vmap(jax.vmap(until))(jnp.arange(2 * E).reshape(E, 2), x), (((E, 2, 3), 0),), (0,)
    ),
    "while per member and environment, counted by arange": Case(
        lambda x: jax.vmap(jax.vmap(until))(jnp.arange(2 * E).reshape(2, E), x), (((2, E, 3), 1),), (1,)
    ),
    "while per member, over environments": Case(lambda x: jax.vmap(until)(jnp.arange(4), x), (((4, E), 1),), (1,)),
    "while per environment, counted by all": Case(
        lambda x: jax.vmap(until)(jnp.cumsum(jnp.arange(E)) % 4, x), (S,), (0,)
    ),
    "while per environment, rounds that mix": Case(
        jax.vmap(
            lambda row, n: lax.while_loop(lambda c: lax.psum(c[0], "e") < n, count_up, (0, row))[1], axis_name="e"
        ),
        (S, ((E,), None)),
        (MIXED,),
    ),
    "jit returns groups that cannot be divided": Case(
        lambda groups, x: jax.jit(lambda groups, x: (groups, x + 1.0))(groups, x), (((4, 3), 0), S), (MIXED, 0)
    ),
    "jit returns shared groups": Case(
        lambda k, x: jax.jit(lambda groups, x: (groups, x + 1.0))(jax.random.split(k, E).reshape(2, 3), x),
        (KEY, S),
        (None, 0),
    ),
    "jit, one result mixed and one not": Case(
        lambda x: jax.jit(lambda a, b: (a + 1.0, b + 1.0))(x, x[::-1]), (S,), (0, MIXED)
    ),
    "map": Case(lambda w, x: lax.map(lambda row: jnp.sort(row * w), x), (SHARED, S), (0,)),
    "map, reversed, with row numbers and keys": Case(
        lambda k, x: lax.scan(
            lambda _, row: (None, (row[0] + draw(row[1]), row[2] * 2)),
            None,
            (x, jax.random.split(k, E), jnp.arange(E)),
            reverse=True,
        )[1],
        (KEY, S),
        (0, 0),
    ),
    "map over another axis": Case(lambda x: lax.map(jnp.sin, x), (((3, E), 1),), (1,)),
    "map that reads another row": Case(lambda x: lax.map(lambda row: row - x[0], x), (S,), (MIXED,)),
    "map over rolled rows": Case(lambda x: lax.map(lambda r: r[0] - r[1], (x, jnp.roll(x, 1, 0))), (S,), (MIXED,)),
    "map over two axes": Case(
        lambda x, y: lax.map(lambda r: r[0] - r[1], (x, y)), (((E, E), 0), ((E, E), 1)), (MIXED,)
    ),
    "scan over environments that counts": Case(
        lambda x: lax.scan(lambda n, row: (n + 1.0, row * n), 0.0, x)[1], (S,), (MIXED,)
    ),
    "solve": Case(lambda a, b: jnp.linalg.solve(a + 3.0 * PER_MATRIX, b), (((E, 3, 3), 0), ((E, 3, 2), 0)), (0,)),
    "solve, gradient": Case(
        lambda a, b: gradient(lambda b: jnp.linalg.solve(a + 3.0 * PER_MATRIX, b))(b),
        (((E, 3, 3), 0), ((E, 3, 2), 0)),
        (0,),
    ),
    "solve for all": Case(lambda a: jnp.linalg.solve(a + jnp.eye(E), PER_ENV), (((E, E), 0),), (MIXED,)),
    "custom_vjp": Case(lambda x: (clipped(x), gradient(clipped)(x)), (S,), (0, 0)),
    "custom_vjp whose derivative mixes": Case(
        lambda x: (backward_mixes(x), gradient(backward_mixes)(x)), (S,), (0, MIXED)
    ),
    "custom_jvp": Case(lambda x: (scaled(x), gradient(scaled)(x)), (S,), (0, 0)),
    "remat": Case(
        lambda w, x: jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x)))(
            x * jnp.tile(w, (E, 1))
        ),
        (SHARED, S),
        (0,),
    ),
    "remat in scan": Case(
        lambda x: gradient(
            lambda x: lax.scan(jax.checkpoint(lambda c, t: (jnp.sin(c) + t, ())), x, jnp.arange(3.0))[0]
        )(x),
        (S,),
        (0,),
    ),
    "gradient of shared": Case(lambda w, x: jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w), (SHARED, S), (MIXED,)),
    "mapped fragment": Case(jax.vmap(row_fn, (None, 0)), (SHARED, S), (0,)),
    "mapped fragment, all whole": Case(lambda w: jax.vmap(row_fn, (None, 0))(w, PER_ENV), (SHARED,), (0,)),
    "mapped fragment, whole columns": Case(jax.vmap(column_fn, 1, 1), (((E, E), 1),), (1,)),
    "mapped fragment over another axis": Case(jax.vmap(column_fn, 1, 1), (((E, E), 0),), (MIXED,)),
    "mapped fragment, axis moved": Case(lambda x: jax.vmap(column_fn, 1, 0)(x), (((4, E), 1),), (0,)),
    "mapped fragment, nested": Case(jax.vmap(jax.vmap(row_fn, (None, 0)), (None, 0)), (SHARED, ((E, 2, 3), 0)), (0,)),
    "mapped fragment, nested the other way": Case(
        jax.vmap(jax.vmap(row_fn, (None, 0)), (None, 0)), (SHARED, ((2, E, 3), 1)), (1,)
    ),
    "mapped fragment, every pair": Case(
        lambda x, y: jax.vmap(jax.vmap(pair_fn, (None, 0)), (0, None))(x, y), (S, S), (MIXED,)
    ),
    "mapped fragment, pairs with a table": Case(
        lambda x: jax.vmap(jax.vmap(pair_fn, (None, 0)), (0, None))(x, PER_ENV), (S,), (0,)
    ),
    "mapped fragment with a shared block": Case(
        jax.vmap(lambda x, i: row_fn(x[0], x[i]), (None, 0)), (S, ((E,), 0)), (MIXED,)
    ),
    "mapped fragment, named mean": Case(jax.vmap(named_fn, axis_name="envs"), (S,), (MIXED,)),
    "mapped fragment, named index": Case(jax.vmap(index_fn, axis_name="envs"), (S,), (0,)),
    "mapped fragment, named mean of members": Case(  # harmless, but `pmean` calls `psum`, which has no rule
        jax.vmap(jax.vmap(named_fn, axis_name="envs")), (((E, 2, 3), 0),), (MIXED,)
    ),
    "mapped fragment, arrays closed over": Case(lambda x: jax.vmap(closing_fn)(x, jnp.arange(E)), (S,), (0,)),
    "mapped fragment, a traced value closed over": Case(
        lambda w, x: jax.vmap(actor(lambda r: r * w))(x), (SHARED, S), (0,)
    ),
    "mapped fragment, blocks closed over": Case(
        lambda x: jax.vmap(actor(lambda r: r * jnp.mean(x, 0)))(x), (S,), (MIXED,)
    ),
    "mapped fragment with a key each": Case(jax.vmap(rows_key_fn), (S, KEYS), (0,)),
    "mapped fragment in a scan": Case(
        lambda w, x: lax.scan(lambda x, t: (jax.vmap(row_fn, (None, 0))(w, x) * t, ()), x, jnp.arange(3.0))[0],
        (SHARED, S),
        (0,),
    ),
    "mapped fragment, gradient each": Case(
        jax.vmap(jax.grad(lambda r, w: jnp.sum(row_fn(w, r))), (0, None)), (S, SHARED), (0,)
    ),
    "mapped fragment, gradient": Case(
        lambda w, x: gradient(lambda x: jax.vmap(row_fn, (None, 0))(w, x))(x), (SHARED, S), (0,)
    ),
    "mapped fragment, gradient of shared": Case(
        lambda w, x: gradient(lambda w: jax.vmap(row_fn, (None, 0))(w, x))(w), (SHARED, S), (MIXED,)
    ),
    "linear mapped fragment, gradient": Case(
        lambda w, x: gradient(lambda x: jax.vmap(linear_fn, (None, 0))(w, x))(x), (SHARED, S), (0,)
    ),
    "linear mapped fragment, derivative": Case(
        lambda w, x: jax.jvp(lambda x: jax.vmap(linear_fn, (None, 0))(w, x), (x,), (jnp.ones_like(x),)),
        (SHARED, S),
        (0, 0),
    ),
    "mapped fragment under remat": Case(
        lambda w, x: gradient(jax.checkpoint(lambda x: jax.vmap(row_fn, (None, 0))(w, x)))(x), (SHARED, S), (0,)
    ),
    "batched fragment": Case(actor(lambda x: jnp.sin(x) @ W), (S,), (0,)),
    "batched fragment that mixes": Case(actor(lambda x: (x[::-1], x + 1)), (S,), (MIXED, 0)),
    "keys of the rbg generator": Case(
        lambda k: jax.vmap(draw)(
            jax.random.wrap_key_data(jnp.tile(jax.vmap(jax.random.key_data)(k), (1, 2)), impl="rbg")
        ),
        (KEYS,),
        (MIXED,),
    ),
    "mapped fragment, keys of the rbg generator": Case(
        lambda x: jax.vmap(rbg_fn)((99 * jnp.abs(x[:, 0])).astype(jnp.uint32)), (S,), (MIXED,)
    ),
}


def own(fn, outs=(0,), ins=(S, (("index", E), 0))) -> Case:
    """A case whose inputs are an array and one index per environment. Some indices are out of range."""
    return Case(fn, ins, outs)


ROWS = np.arange(E)
THICK = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(1,), start_index_map=(0, 1))
SQUARE = ((E, E), 0)
INDEX = (("index", E), 0)
# In the first programs, each environment reads or writes only its own row, because `arange` gives the row numbers.
IN_ROWS: dict[str, Case] = {
    "read": own(lambda x, a: x[jnp.arange(E), a]),
    "read, numpy": own(lambda x, a: x[ROWS, a]),
    "read, small integers": own(lambda x, a: x[jnp.arange(E, dtype=jnp.uint8), a]),
    **{
        f"read, {mode}": own(lambda x, a, mode=mode: x.at[jnp.arange(E), a].get(mode=mode)) for mode in ("fill", "clip")
    },
    "read, several": own(lambda x, a: x[jnp.arange(E)[:, None], jnp.stack([a, 2 - a], 1)]),
    "read slices": own(lambda x, a: (x[:, :, None] * x[:, None])[jnp.arange(E), a]),
    "read two indices": own(lambda x, a: (x[:, :, None] * x[:, None])[jnp.arange(E), a, 2 - a]),
    "read whole rows": own(lambda x, a: x[jnp.arange(E)]),
    "read columns": own(lambda x, a: x[a, jnp.arange(E)], ins=(((3, E), 1), INDEX)),
    "read a square": own(lambda x, a: x[jnp.arange(E), a], ins=(SQUARE, INDEX)),
    "read the diagonal": own(lambda x, a: x[jnp.arange(E), jnp.arange(E)], ins=(SQUARE, INDEX)),
    "read the diagonal, second axis": own(lambda x, a: x[jnp.arange(E), jnp.arange(E)], ins=(((E, E), 1), INDEX)),
    "read over time": own(lambda x, a: x[:, jnp.arange(E), a], (1,), ins=(((2, E, 3), 1), INDEX)),
    "read times and rows": own(
        lambda x, a: x[jnp.arange(2)[:, None], jnp.arange(E), a], (1,), ins=(((2, E, 3), 1), INDEX)
    ),
    "read, in a jit": own(lambda x, a: jax.jit(lambda x, i, a: x[i, a])(x, jnp.arange(E), a)),
    "read, in a scan": own(lambda x, a: lax.scan(lambda x, t: (x * 0.5, x[jnp.arange(E), a]), x, None, 2)[1], (1,)),
    "read, gradient": own(lambda x, a: jax.grad(lambda x: jnp.sum(jnp.sin(x[jnp.arange(E), a])))(x)),
    **{
        f"write {mode}": own(lambda x, a, mode=mode: x.at[jnp.arange(E), a].set(x[:, 0] + 9.0, mode=mode))
        for mode in ("drop", "clip")
    },
    **{
        f"write by {name}": own(lambda x, a, name=name: getattr(x.at[jnp.arange(E), a], name)(x[:, 0] + 9.0))
        for name in ("set", "add", "multiply", "min", "max")
    },
    "write to zeros": own(lambda x, a: jnp.zeros((E, 3)).at[jnp.arange(E), a].set(x[:, 0])),
    "write whole rows": own(lambda x, a: x.at[jnp.arange(E)].add(2.0 * x)),
    "write to a square": own(lambda x, a: x.at[jnp.arange(E), a].set(7.0), ins=(SQUARE, INDEX)),
    "write the same place twice": own(lambda x, a: x.at[jnp.arange(E)[:, None], jnp.stack([a, a], 1)].add(1.0)),
    # The programs named "no: ..." look similar. Nothing proves that each environment uses only its own row, so their results count
    # as mixed.
    **{
        f"no: {name}": own(lambda x, a, rows=rows: (x[rows(), a], x.at[rows(), a].set(7.0)), (MIXED, MIXED))
        for name, rows in {
            "one too far": lambda: jnp.arange(E) + 1,
            "starting at one": lambda: jnp.arange(1, E + 1),
            "reversed": lambda: jnp.arange(E)[::-1],
            "negative": lambda: jnp.arange(E) - E,
            "negative, descending": lambda: -jnp.arange(E),
            "rolled": lambda: jnp.roll(jnp.arange(E), 1),
            "halved": lambda: jnp.arange(E) // 2,
            "part of a longer arange": lambda: jnp.arange(2 * E)[E:],
            "zeros": lambda: jnp.zeros(E, jnp.int32),
            "one row for all": lambda: jnp.broadcast_to(jnp.arange(1), (E,)),
            "through floats": lambda: (jnp.arange(float(E)) * 0.9).astype(jnp.int32),
            "some numbers replaced": lambda: jnp.where(jnp.arange(E) < 3, 2, jnp.arange(E)),
            "numpy, rolled": lambda: np.roll(ROWS, 1),
            "by groups": lambda: jnp.arange(E).reshape(2, 3).T.reshape(E),
            "another axis of a table": lambda: (jnp.arange(E)[None] + jnp.zeros((E, 1), jnp.int32))[:, 1],
        }.items()
    },
    "no: some rows": own(lambda x, a: x[jnp.arange(3), a[:3]], (MIXED,)),
    "no: as many rows as blocks": own(lambda x, a: x[jnp.arange(3), jnp.arange(3)], (MIXED,)),
    "no: numbers in groups": own(
        lambda x, a: x.at[jnp.arange(E).reshape(3, 2), 0].get(mode="clip"), (MIXED,), (((3, 4), 0), INDEX)
    ),
    "no: rows of another axis": own(lambda x, a: x[a, jnp.arange(E)], (MIXED,), (SQUARE, INDEX)),
    "no: the numbers of features": own(lambda x, a: x.T[jnp.arange(3)[:, None], a[None]], (MIXED,)),
    "no: rows chosen by features": own(lambda x, a: x[jnp.arange(E)[None], a[:, None]], (MIXED,)),
    "no: two rows thick": own(
        lambda x, a: lax.gather(
            x, lax.concatenate([jnp.arange(E)[:, None], a[:, None]], 1), THICK, (2, 1), mode="clip"
        ),
        (MIXED,),
    ),
    "no: paired with another axis": own(
        lambda x, a: jax.vmap(lambda row, i: row[i])(x, jnp.arange(E)), (MIXED,), (((E, E), 1), INDEX)
    ),
    "no: rolled in the carry of a scan": own(
        lambda x, a: lax.scan(lambda i, _: (jnp.roll(i, 1), x[i, a]), jnp.arange(E), None, 2)[1], (MIXED,)
    ),
    "no: a user's own index": own(lambda x, a: x[a, jnp.zeros(E, jnp.int32)], (MIXED,)),
}
CASES |= {f"rows: {name}": case for name, case in IN_ROWS.items()}


def values_of(case: Case) -> list[jax.Array]:
    """The inputs of a case. An array of shape (E,) is `arange(E)`, and arrays of other shapes are random numbers."""

    def value(i, shape):
        if shape == ("index", E):
            return jnp.array([0, -1, 5, 2, -4, 1])
        if isinstance(shape, str):
            return jax.random.key(i) if shape == "key" else jax.random.split(jax.random.key(i), E)
        return jax.random.normal(jax.random.key(i), shape) if shape != (E,) else jnp.arange(E)

    return [value(i, shape) for i, (shape, _) in enumerate(case.ins)]


def block(value: jax.Array, axis: Axis, r: int) -> jax.Array:
    if axis is None:
        return value
    if _compat.is_key(value.dtype):
        return lax.slice_in_dim(value, r * BLOCK, (r + 1) * BLOCK, axis=axis)
    # NumPy takes the slice, because JAX would compile a program for each shape.
    return jnp.asarray(np.asarray(value)[(slice(None),) * axis + (slice(r * BLOCK, (r + 1) * BLOCK),)])


def as_numpy(value: Any) -> np.ndarray:
    value = jnp.asarray(value)
    return np.asarray(jax.random.key_data(value) if _compat.is_key(value.dtype) else value)


def emit_one(inference, order, wanted, o, axis, inputs, r):
    """What replica `r` computes for result `o`: its block along `axis`, or the whole if `axis` is None.

    `inputs` holds pieces of each input; `order` names these pieces.
    """
    given = [dict(zip(pieces, values, strict=True)) for pieces, values in zip(order, inputs, strict=True)]
    return emit(inference, given, wanted, r)[o][axis]


@pytest.mark.parametrize("name", CASES)
def test_a_piece_computed_by_a_replica_equals_that_piece_of_the_full_result(name):
    case = CASES[name]
    values = values_of(case)
    closed = jax.make_jaxpr(case.fn)(*values)
    full = jax.tree.leaves(case.fn(*values))
    forms = [WHOLE if axis is None else Form(False, axis) for _, axis in case.ins]
    inference = infer(closed, forms, SIZE)
    assert [MIXED if form.mixed else form.axis for form in inference.outs] == list(case.outs)
    for o, form in enumerate(inference.outs):
        if form.mixed:
            assert "test_inference.py:" in form.mixed.at, f"no line of the user in {form.mixed}"
            with pytest.raises(Mixes):
                demand(inference, [{None} if i == o else set() for i in range(len(full))])
            continue
        for axis in {form.axis, *([None] if form.whole else [])}:
            wanted = [{axis} if i == o else set() for i in range(len(full))]
            needed, _ = demand(inference, wanted)
            for pieces, (_, in_axis) in zip(needed, case.ins, strict=True):
                assert in_axis is None or pieces <= {in_axis}, (
                    f"result {o} needs the pieces {pieces} of an input, but the replica has only its block along axis {in_axis}"
                )
            order = [tuple(pieces) for pieces in needed]
            emitted = jax.jit(functools.partial(emit_one, inference, order, wanted, o, axis))
            for r in range(E // BLOCK):
                inputs = [[block(v, a, r) for a in pieces] for v, pieces in zip(values, order, strict=True)]
                got = emitted(inputs, np.int32(r))
                np.testing.assert_allclose(
                    as_numpy(got),
                    as_numpy(block(full[o], axis, r)),
                    rtol=1e-5,
                    atol=1e-5,
                    err_msg=f"result {o} at replica {r}: the piece along axis {axis} (None: the whole)",
                )


def test_a_replica_splits_the_whole_key_but_draws_only_for_its_block():
    closed = jax.make_jaxpr(lambda k, x: x + jax.vmap(draw)(jax.random.split(k, E)))(jax.random.key(0), PER_ENV)
    inference = infer(closed, [WHOLE, Form(False, 0)], SIZE)
    emitted = jax.make_jaxpr(lambda k, x, i: emit(inference, [{None: k}, {0: x}], [{0}], i)[0][0])(
        jax.random.key(0), PER_ENV[:BLOCK], np.int32(0)
    )
    sizes = {str(eqn.primitive): [v.aval.shape for v in eqn.outvars] for eqn in _flat(emitted.jaxpr)}
    assert sizes["random_split"] == [(E,)]
    assert sizes["random_bits"] == [(BLOCK, 3)]


def _flat(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _compat.inner_jaxprs(eqn):
            yield from _flat(inner.jaxpr)


def test_a_print_of_a_whole_value_is_kept(capsys):
    fn = actor(lambda w, x: (jax.debug.print("w={}", w[0]), x * jnp.tile(w, (E, 1)))[1])
    closed = jax.make_jaxpr(fn)(jnp.ones(3), PER_ENV)
    inference = infer(closed, [WHOLE, Form(False, 0)], SIZE)
    needed, _ = demand(inference, [{0}])
    assert needed == [{None}, {0}]
    result = emit(inference, [{None: jnp.ones(3)}, {0: PER_ENV[:BLOCK]}], [{0}], np.int32(0))[0][0]
    np.testing.assert_array_equal(result, PER_ENV[:BLOCK])
    jax.effects_barrier()
    assert capsys.readouterr().out.count("w=1.0") == 1


def test_a_print_for_each_environment_is_refused():
    closed = jax.make_jaxpr(jax.vmap(printing_fn))(PER_ENV)
    inference = infer(closed, [Form(False, 0)], SIZE)
    with pytest.raises(Mixes):
        demand(inference, [{0}])


def test_keys_joined_in_columns_are_not_row_numbers():
    closed = jax.make_jaxpr(lambda k: lax.concatenate([k, k], 1))(jax.random.split(jax.random.key(0), (E, 1)))
    assert Facts(closed, ()).of(closed.jaxpr.outvars) == [None]


@pytest.mark.parametrize("narrow", [jnp.int8, jnp.uint8, jnp.bfloat16, bool])
def test_row_numbers_are_forgotten_if_a_dtype_cannot_hold_them(narrow):
    def known(dtype):
        closed = jax.make_jaxpr(lambda: lax.iota(jnp.int32, 300).astype(dtype).astype(jnp.int32))()
        return Facts(closed, ()).of(closed.jaxpr.outvars)

    assert known(jnp.int16) == [0]
    assert known(narrow) == [None]
