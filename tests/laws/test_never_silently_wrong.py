"""Level 3 of the law (docs/law.md) for programs that mix environments: each program is either refused or computed correctly.

A refusal is an error that names the user's line. A correct result equals the reference result up to 1e-5.

A mixer is a function of an array [E, 3] that returns an array [E, 3], with one row for each of E environments. The row of one
environment in the result depends, or seems to depend, on the rows of other environments. If Choreo ran a mixer on a block of
environments, the result could be wrong, and no error would show it. Each mixer of `MIXERS` is tried

    alone, and inside   scan, cond, while, custom_vjp, remat
    as                  glue, a fragment of the whole batch, a mapped fragment

Each mixer of `MORE_MIXERS` is tried alone, as glue and as a fragment of the whole batch. The reference is the program without its
marks, evaluated op by op. `odd_programs/` has whole programs for the same law.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import choreo
from laws import odd_programs
from laws.odd_programs import PROGRAMS, Program
from laws.reference import Run
from laws.refuse_or_equal import (
    EVERYTHING_REPLICATED,
    KEY,
    LAYOUTS,
    MORE_LAYOUTS,
    Pond,
    reference_op_by_op,
    refuse_or_equal,
)

E = 6
UNEQUAL_GROUPS = {"env x2, actor x3": LAYOUTS["env x2, actor x3"]}
"""A layout in which two groups have blocks of different sizes. Between these groups, Choreo must cut values into other blocks.
So most tests with a single layout use this layout."""


def rows(values):
    """[E] -> [E, 3]: the value of each environment, three times."""
    return jnp.broadcast_to(values[:, None], (len(values), 3))


def every(values):
    """[3] -> [E, 3]: the same three numbers for every environment."""
    return jnp.broadcast_to(values, (E, 3))


def matrices(x):
    """[E, 3] -> [E, 3, 3]: an invertible matrix for each environment."""
    return x[:, :, None] * x[:, None, :] + jnp.broadcast_to(jnp.diag(jnp.arange(1.0, 4.0)), (E, 3, 3))


def merged(x):
    """[E, 3] -> [2 E, 3]: two time steps of all environments, merged into one axis as for minibatches."""
    return jnp.stack([x, 2.0 * x]).reshape(2 * E, 3)


def structure(x):
    """The number of equations depends on the number of environments: a block would give a different program."""
    for i in range(len(x)):
        x = x.at[i].set(jnp.sin(x[i] + i))
    return x if len(x) > 4 else -x


MIXERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "mean": lambda x: x - jnp.mean(x, axis=0, keepdims=True),
    "sort": lambda x: jnp.sort(x, axis=0),
    "roll": lambda x: jnp.roll(x, 1, axis=0),
    "cumulative sum": lambda x: jnp.cumsum(x, axis=0),
    "index of another": lambda x: x[jnp.argmax(x[:, 0]) + jnp.zeros(E, jnp.int32)] + x,
    "contraction": lambda x: x @ (x.T @ x),
    "time x env merged": lambda x: jnp.cumsum(merged(x), axis=0).reshape(2, E, 3)[1],
    "factor num_envs": lambda x: x / len(x),
    "literal of E": lambda x: x + rows(jnp.arange(E, dtype=x.dtype) * (2.0 * len(x))),
    "structure": structure,
}
"""The ten basic mixers. In each, environments mix, or the result depends on the number of environments."""

ROTATION = jnp.roll(jnp.eye(E), 1, axis=0)
LINE = jnp.linspace(-1.0, 1.0, E)
TABLE = jnp.linspace(-1.0, 1.0, E * 3).reshape(E, 3)
SQUARE = jnp.linspace(-1.0, 1.0, E * E).reshape(E, E)

MORE_MIXERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    # Reductions, selection and order along environments.
    "max": lambda x: x - jnp.max(x, axis=0, keepdims=True),
    "norm of all": lambda x: x / (1.0 + jnp.linalg.norm(x)),
    "flip": lambda x: x[::-1],
    "first environment": lambda x: x - every(x[0]),
    "all but the last": lambda x: jnp.concatenate([x[:-1], 2.0 * x[-1:]]),
    "halves swapped": lambda x: jnp.concatenate([x[E // 2 :], x[: E // 2]]),
    "every second": lambda x: jnp.repeat(x[::2], 2, axis=0),
    "shift with pad": lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "order": lambda x: x[jnp.argsort(x[:, 0])],
    "rank": lambda x: rows(jnp.argsort(jnp.argsort(x[:, 0])).astype(x.dtype)),
    "top": lambda x: every(lax.top_k(x.T, 2)[0][:, 0]),
    # Constant arrays with axes of length E.
    "constant rotation": lambda x: ROTATION @ x,
    "constant line": lambda x: x * rows(LINE),
    "constant square, contracted": lambda x: jnp.tanh(x @ x.T @ SQUARE @ x),
    "constant square, taken by row": lambda x: SQUARE[:, :3] * x,
    "constant square, taken by column": lambda x: SQUARE[:3].T * x,
    # All pairs of environments.
    "all pairs": lambda x: jnp.sum(x[:, None, :] - x[None, :, :], axis=1),
    "diagonal of all pairs": lambda x: rows(jnp.diagonal(x @ x.T)),
    # Normalisation over environments.
    "softmax over environments": lambda x: jax.nn.softmax(x, axis=0),
    "whitened": lambda x: (x - every(jnp.mean(x, axis=0))) / every(jnp.std(x, axis=0) + 1e-3),
    # Transposes, reshapes and merged axes.
    "transposed twice": lambda x: jnp.cumsum(x.T, axis=1).T,
    "transposed, harmless": lambda x: jnp.cumsum(x.T, axis=0).T,
    "flattened": lambda x: jnp.cumsum(x.reshape(-1)).reshape(E, 3),
    "flattened, harmless": lambda x: jnp.sin(x.reshape(-1)).reshape(E, 3),
    "halved by reshape": lambda x: x.reshape(2, E // 2, 3)[::-1].reshape(E, 3),
    "merged, harmless": lambda x: jnp.cos(merged(x)).reshape(2, E, 3).sum(axis=0),
    "merged the other way": lambda x: jnp.roll(jnp.stack([x, -x], axis=1).reshape(2 * E, 3), 1, axis=0)[::2],
    # Scans and maps along environments, and linear solves.
    "scan over environments": lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x)[1],
    "map over environments": lambda x: lax.map(jnp.sin, x),
    "map that looks at another": lambda x: lax.map(lambda row: row - x[0], x),
    "map with row numbers": lambda x: lax.map(lambda r: r[0] * r[1], (x, jnp.arange(float(E)))),
    "map with row numbers, rolled": lambda x: lax.map(lambda r: r[0] * r[1], (x, jnp.roll(jnp.arange(float(E)), 1))),
    "map by row number": lambda x: lax.map(lambda i: x[i], jnp.arange(E)),
    "scan over environments that counts": lambda x: lax.scan(lambda n, row: (n + 1.0, row * n), 0.0, x)[1],
    "solve of each": lambda x: jnp.linalg.solve(matrices(x), x[:, :, None])[:, :, 0],
    "solve for all": lambda x: jnp.linalg.solve(x @ x.T + jnp.eye(E), x),
    "scan with a table": lambda x: lax.scan(lambda c, i: (c.at[i].set(c[i - 1] + 1.0), ()), x, jnp.arange(1, E))[0],
    "associative scan": lambda x: lax.associative_scan(jnp.multiply, x),
    # Collectives over the named axis of a vmap.
    "named mean": lambda x: jax.vmap(lambda row: row - lax.pmean(row, "envs"), axis_name="envs")(x),
    "named index": lambda x: jax.vmap(lambda row: row * lax.axis_index("envs").astype(row.dtype), axis_name="envs")(x),
    "named permutation": lambda x: jax.vmap(
        lambda row: lax.ppermute(row, "envs", [(i, (i + 1) % E) for i in range(E)]), axis_name="envs"
    )(x),
    "named size": lambda x: jax.vmap(lambda row: row / lax.psum(1, "envs"), axis_name="envs")(x),
    # Branches and loops, on all environments together or on each.
    "branch on any": lambda x: lax.cond(jnp.any(x > 0.5), lambda x: -x, jnp.sin, x),
    "branch on each": lambda x: jax.vmap(lambda row: lax.cond(row[0] > 0, jnp.sin, jnp.negative, row))(x),
    "loop until all": lambda x: lax.while_loop(lambda x: jnp.any(jnp.abs(x) > 0.1), lambda x: 0.7 * x, x),
    "loop until each": lambda x: jax.vmap(
        lambda r: lax.while_loop(lambda r: jnp.abs(r[0]) > 0.1, lambda r: 0.7 * r, r)
    )(x),
    # Gather and scatter: rows by number and rows by data.
    "own row, by arange": lambda x: rows(x[jnp.arange(E), jnp.argmax(x, axis=1)]),
    "own row, out of range": lambda x: rows(
        x.at[jnp.arange(E), jnp.argmax(x, axis=1) * 2].get(mode="fill", fill_value=9.0)
    ),
    "own row, written": lambda x: x.at[jnp.arange(E), jnp.argmax(x, axis=1) * 2 - 1].set(x[:, 0], mode="drop"),
    "own row of a product": lambda x: rows((x @ TABLE.T)[jnp.arange(E), jnp.argmax(x, axis=1)]),
    "the next row": lambda x: rows(x[jnp.arange(E) + 1, jnp.argmax(x, axis=1)]),
    "the row from the end": lambda x: x.at[-jnp.arange(E), jnp.argmax(x, axis=1)].set(7.0),
    "rows reversed": lambda x: x.at[jnp.arange(E)[::-1], jnp.argmax(x, axis=1)].add(x[:, 0]),
    "rows of the other axis": lambda x: rows((x @ TABLE.T)[jnp.argmax(x, axis=1), jnp.arange(E)]),
    "first rows only": lambda x: x.at[jnp.arange(3), jnp.argmax(x, axis=1)[:3]].set(7.0),
    "scatter by data": lambda x: jnp.zeros_like(x).at[jnp.argsort(x[:, 1])].add(x),
    "scatter to one": lambda x: x.at[0].add(jnp.sum(x, axis=0)),
    "histogram": lambda x: x + every(jnp.zeros(3).at[jnp.abs(x[:, 0] * 10).astype(jnp.int32) % 3].add(1.0)),
    "segment sum": lambda x: jax.ops.segment_sum(x, jnp.array([0, 0, 1, 1, 5, 5]), E),
    # Windows, convolutions, dynamic slices, FFT and matrix products.
    "window over environments": lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"),
    "window over features": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"),
    "convolution over environments": lambda x: (
        lax.conv_general_dilated(x.T[None], jnp.ones((3, 3, 3)), (1,), "SAME", dimension_numbers=("NCH", "OIH", "NCH"))[
            0
        ].T
    ),
    "convolution, environments as channels": lambda x: lax.conv_general_dilated(
        x[None],
        jnp.linspace(0.0, 1.0, E * E * 3).reshape(E, E, 3),
        (1,),
        "SAME",
        dimension_numbers=("NCH", "OIH", "NCH"),
    )[0],
    "dynamic slice by data": lambda x: every(
        lax.dynamic_slice(x, (jnp.argmax(x[:, 0]).astype(jnp.int32), 0), (1, 3))[0]
    ),
    "dynamic slice of each": lambda x: rows(jax.vmap(lambda r: lax.dynamic_slice(r, (jnp.argmax(r),), (1,))[0])(x)),
    "dynamic update by data": lambda x: lax.dynamic_update_slice(x, x[:1], (jnp.argmax(x[:, 0]).astype(jnp.int32), 0)),
    "fft": lambda x: jnp.real(jnp.fft.fft(x, axis=0)),
    "covariance inverse": lambda x: x @ jnp.linalg.inv(x.T @ x + jnp.eye(3)),
    # Tiling, clipping and selection.
    "tiled": lambda x: jnp.tile(x, (2, 1))[1 : E + 1],
    "clipped by the mean": lambda x: jnp.clip(x, -jnp.mean(jnp.abs(x)), jnp.mean(jnp.abs(x))),
    "where all": lambda x: jnp.where(jnp.all(x > 0, axis=1, keepdims=True), x, -x),
    # Random numbers.
    "permutation": lambda x: jax.random.permutation(jax.random.key(3), x),
    "permuted index": lambda x: x[jax.random.permutation(jax.random.key(3), E)],
    "random per environment": lambda x: x + jax.random.normal(jax.random.key(1), (E, 3)),
    "random from data": lambda x: x + jax.random.normal(jax.random.key(jnp.sum(x > 0)), (E, 3)),
    "random by env key": lambda x: (
        x + jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.split(jax.random.key(1), E))
    ),
    "random by fold_in": lambda x: (
        x + jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (3,)))(jnp.arange(E))
    ),
    "random by gamma": lambda x: x + jax.random.gamma(jax.random.key(1), jnp.abs(x) + 1.0),
    "random by rbg": lambda x: (
        x + jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.split(jax.random.key(1, impl="rbg"), E))
    ),
    "keys rolled": lambda x: (
        x + jax.vmap(lambda k: jax.random.normal(k, (3,)))(jnp.roll(jax.random.split(jax.random.key(1), E), 1))
    ),
    # Types and bits.
    "dtype": lambda x: (jnp.round(8 * x).astype(jnp.bfloat16) * E).astype(x.dtype),
    "bits": lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.uint8).reshape(-1, 4), jnp.float32
    ).reshape(E, 3),
    # Derivatives.
    "gradient of a sum": lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))(x),
    "gradient of a mean": lambda x: jax.grad(lambda x: jnp.mean(x) ** 2)(x),
    "gradient, sorted": lambda x: jax.grad(lambda x: jnp.sum(jnp.sort(x, axis=0) * rows(LINE)))(x),
    "jacobian": lambda x: jax.jacfwd(lambda x: jnp.sum(x**2, axis=1))(x).sum(axis=1),
    # More groups of similar functions: some mix environments, the others do not.
    "tiled by features": lambda x: jnp.tile(x, (1, 2))[:, 1:4] + jnp.tile(x, (2, 1, 1))[1],
    "tiled, then cut": lambda x: jnp.tile(x, (2, 1))[E:],
    "gamma by env key": lambda x: (
        jax.vmap(lambda k, a: jax.random.gamma(k, 1.0 + jnp.abs(a)))(jax.random.split(jax.random.key(1), E), x)
        + jax.vmap(lambda k, a: jax.random.beta(k, 1.0 + jnp.abs(a), 2.0))(jax.random.split(jax.random.key(2), E), x)
    ),
    "gamma by env key, rolled": lambda x: jax.vmap(lambda k, a: jax.random.gamma(k, 1.0 + jnp.abs(a)))(
        jnp.roll(jax.random.split(jax.random.key(1), E), 1), x
    ),
    "gamma by rbg key": lambda x: jax.vmap(lambda k, a: jax.random.gamma(k, 1.0 + jnp.abs(a)))(
        jax.random.split(jax.random.key(1, impl="rbg"), E), x
    ),
    "checkpoint name": lambda x: checkpoint_name(jnp.sin(x), "hidden"),
    "fft of features": lambda x: jnp.real(jnp.fft.fft(x, axis=1)),
    "matrices of each": lambda x: jnp.linalg.eigvalsh(matrices(x)) + jnp.linalg.inv(matrices(x))[:, 0],
    "factors of each": lambda x: (
        jnp.linalg.svd(matrices(x), compute_uv=False) + jnp.abs(jnp.linalg.qr(matrices(x))[1][:, 2])
    ),
    "singular values of all": lambda x: x * every(jnp.linalg.svd(x, compute_uv=False)),
    "custom rule of vmap": lambda x: jax.vmap(centre_under_vmap)(x),
    "inside jit": jax.jit(lambda x: x - jnp.mean(x, axis=0, keepdims=True)),
}
"""Functions that mix environments, and similar functions that do not mix them. The rules must distinguish the two kinds."""


@jax.custom_batching.custom_vmap
def centre_under_vmap(row):
    """Return the row unchanged. Under `vmap`, the result is each row minus the mean of all rows.

    The function must be in this file, because the tests expect that a refusal names a line of this file.
    """
    return row


@centre_under_vmap.def_vmap
def _centre_the_batch(axis_size, in_batched, x):
    return x - jnp.mean(x, axis=0, keepdims=True), True


def in_scan(mix):
    return lambda x: lax.scan(lambda x, t: (mix(x) + 0.1 * x, ()), x, jnp.arange(2))[0]


def in_cond(mix):
    return lambda x: lax.cond(jnp.arange(3)[2] > 1, mix, jnp.negative, x)


def in_while(mix):
    return lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, mix(c[1])), (0, x))[1]


def in_custom_vjp(mix):
    """The mixer in a function whose derivative mixes as well."""

    @jax.custom_vjp
    def f(x):
        return mix(x)

    f.defvjp(lambda x: (mix(x), x), lambda x, g: (mix(g) + x,))
    return lambda x: f(x) + jax.grad(lambda x: jnp.sum(f(x) * x))(x)


def in_remat(mix):
    return lambda x: x + jax.grad(lambda x: jnp.sum(jax.checkpoint(mix)(jnp.sin(x)) ** 2))(x)


AROUND = {
    "alone": lambda mix: mix,
    "scan": in_scan,
    "cond": in_cond,
    "while": in_while,
    "custom_vjp": in_custom_vjp,
    "remat": in_remat,
}


def glue(mix):
    return mix


def batched(role):
    return lambda mix: choreo.fragment(role)(mix)


def mapped(role):
    """Calls a fragment under `vmap`, once for each environment i. The fragment mixes all environments and returns row i."""
    return lambda mix: lambda x: jax.vmap(choreo.fragment(role)(lambda x, i: mix(x)[i]), (None, 0))(x, jnp.arange(E))


KINDS = {"glue": glue, "batched": batched("actor"), "batched env": batched("env"), "mapped": mapped("actor")}


@choreo.fragment("actor")
def act(weights, state):
    return weights * jnp.tanh(state)


@choreo.fragment("learner")
def learn(weights, action):
    return weights - 0.1 * jnp.mean(jnp.tanh(0.1 * action) ** 2, axis=tuple(range(action.ndim - 1)))


@dataclass(frozen=True)
class Algo:
    """An algorithm that acts, steps the environments and learns, with a mixer in one place."""

    mix: Callable[[jax.Array], jax.Array]
    """The mixer."""
    where: str = "action"
    """What is mixed: "action" (before the step), "state" (after the step), or "step" (the action of each step of a scan)."""

    def init(self, env, key):
        return {"state": env.reset(env.keys(key)), "weights": jnp.linspace(0.5, 1.5, env.width)}

    def iterate(self, env, carry, key):
        def step(state, _):
            action = jax.vmap(act, (None, 0))(carry["weights"], state)
            if self.where in ("action", "step"):
                action = self.mix(action)
            state = env.step(state, action)
            return self.mix(state) if self.where == "state" else state, action

        if self.where == "step":
            state, action = lax.scan(step, carry["state"], None, 2)
        else:
            state, action = step(carry["state"], None)
        weights = learn(carry["weights"], action)
        return {"state": state, "weights": weights}, {"action": jnp.mean(action), "each": state[:, 0]}


@functools.cache
def reference(mixer: str, around: str) -> Run:
    """The reference result. It is the same for every entry of `KINDS`, because the reference has no marks."""
    algo = Algo(AROUND[around]((MIXERS | MORE_MIXERS)[mixer]))
    return reference_op_by_op(algo, Pond(E), jax.random.key(KEY))


def case(*parts: str, ci: bool) -> Any:
    """The arguments of one test. If `ci` is False, only `make test-long` runs this test."""
    return pytest.param(*parts, id=" - ".join(parts), marks=[] if ci else [pytest.mark.long])


def mixer_cases() -> list[Any]:
    """All combinations. `make test` runs each mixer with each entry of `KINDS`, but each of these pairs with only one entry of
    `AROUND`."""
    cells = itertools.product(enumerate(MIXERS), enumerate(AROUND), enumerate(KINDS))
    return [case(mixer, around, kind, ci=(m + k) % len(AROUND) == a) for (m, mixer), (a, around), (k, kind) in cells]


@pytest.mark.parametrize(("mixer", "around", "kind"), mixer_cases())
def test_the_ten_ways_to_mix_are_refused_or_equal(mixer, around, kind):
    algo = Algo(KINDS[kind](AROUND[around](MIXERS[mixer])))
    layouts = LAYOUTS if around in ("alone", "scan") else UNEQUAL_GROUPS
    refusals = refuse_or_equal(algo, Pond(E), __file__, layouts, reference=lambda: reference(mixer, around))
    if kind == "glue":  # glue can run at the site of the learner, which has all environments
        assert not any(refusals.values()), refusals


def more_ways() -> list[Any]:
    """All combinations. `make test` runs every mixer in an actor fragment, a third of the mixers also as glue, and another third
    also in an env fragment."""
    cells = itertools.product(enumerate(MORE_MIXERS), enumerate(["glue", "batched env", "batched"]))
    return [case(mixer, kind, ci=kind == "batched" or m % 3 == k) for (m, mixer), (k, kind) in cells]


@pytest.mark.parametrize(("mixer", "kind"), more_ways())
def test_more_ways_to_mix_are_refused_or_equal(mixer, kind):
    algo = Algo(KINDS[kind](MORE_MIXERS[mixer]))
    refuse_or_equal(algo, Pond(E), __file__, UNEQUAL_GROUPS, reference=lambda: reference(mixer, "alone"))


@pytest.mark.parametrize(
    "mixer",
    ["own row, by arange", "own row, out of range", "own row, written", "own row of a product", "gamma by env key",
     "tiled by features", "checkpoint name", "fft of features", "matrices of each", "map over environments", "solve of each"],
)  # fmt: skip
def test_functions_that_do_not_mix_run_on_blocks(mixer):
    """These functions only look like mixers. If Choreo lost the rule for one of them, it would refuse the function. Then only this
    test would fail, because the other tests of these functions accept a refusal."""
    algo = Algo(batched("actor")(MORE_MIXERS[mixer]))
    assert not any(
        refuse_or_equal(algo, Pond(E), __file__, UNEQUAL_GROUPS, reference=lambda: reference(mixer, "alone")).values()
    )


def places() -> list[Any]:
    """Every mixer of `MIXERS` on the state, and on the actions of a scan. `make test` runs each mixer in one of the two places."""
    cells = itertools.product(enumerate(MIXERS), enumerate(["state", "step"]))
    return [case(mixer, where, ci=m % 2 == w) for (m, mixer), (w, where) in cells]


@pytest.mark.parametrize(("mixer", "where"), places())
def test_mixing_in_the_carry_or_in_a_scan_is_refused_or_equal(mixer, where):
    refuse_or_equal(Algo(MIXERS[mixer], where), Pond(E), __file__, MORE_LAYOUTS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_odd_programs_are_refused_or_equal(name, capfd):
    refuse_or_equal(
        Program(name), Pond(E), odd_programs.FOLDER, UNEQUAL_GROUPS | {"everything x2": EVERYTHING_REPLICATED}
    )


@pytest.mark.parametrize(
    "name",
    ["a metric that is carried", "donated and read again", "same value twice", "carry swapped", "carry unchanged"],
)
def test_no_memory_is_donated_that_is_still_used(name):
    """Segments are compiled as in a run. Donating memory that another value still uses would give a wrong result."""
    refuse_or_equal(Program(name), Pond(E), odd_programs.FOLDER, UNEQUAL_GROUPS, compiled=True)


@pytest.fixture
def arrays_as_literals():
    """During the test, the array constants of a program are literals of its jaxpr."""
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    yield
    jax.config.update("jax_use_simplified_jaxpr_constants", False)


@pytest.mark.parametrize("name", ["constant arrays given to fragments", "a scan with constant arrays"])
def test_arrays_as_literals_are_accepted(name, arrays_as_literals):
    refusals = refuse_or_equal(Program(name), Pond(E), odd_programs.FOLDER, UNEQUAL_GROUPS)
    assert not any(refusals.values()), refusals
