"""Checks that each rule of `rules.RULES` obeys this law:

    block r of equation(full operands)  ==  split equation(block r of each operand)

An example is a function with its operands. For each equation of the function, the tests try every combination of axes: a
combination says along which axis each operand is divided, or that the operand is whole. If the rule allows the combination, the
law must hold. An example also says how many combinations the rule must allow at least. The elements of a float operand all
differ, so a test notices a row of a wrong environment.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from choreo import _compat
from choreo.partition.lattice import Mixes, Size
from choreo.partition.rules import RULES, split

E, BLOCK = 6, 3
SIZE = Size(E, BLOCK)
GROUPS = 10
"""The length of an axis that is not the env axis, but can be divided into the same number of blocks."""


@dataclass(frozen=True)
class Example:
    """A function, and the shapes of its operands. The test tries to divide each axis of length E, GROUPS or E * GROUPS."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ()
    """A dtype for each operand, or "key" for random keys, or "index" for indices. Empty if all are float32."""
    allowed: int = 1
    """The rule of `primitive` must allow at least this number of combinations of axes. 0 means that the rule must refuse all."""
    primitive: str | None = None
    """The name of the primitive that `allowed` is about. None means the primitive of the last equation."""

    def operands(self) -> list[jax.Array]:
        dtypes = self.dtypes or ("float32",) * len(self.shapes)
        return [_numbers(i, shape, dtype) for i, (shape, dtype) in enumerate(zip(self.shapes, dtypes, strict=True))]


def _numbers(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    if dtype == "key":
        return jax.random.split(jax.random.key(seed), shape) if shape else jax.random.key(seed)
    if dtype == "index":  # in range, and out of range at both ends of an axis of length E
        return jnp.asarray(np.random.RandomState(seed).randint(-1, E + 2, shape), jnp.int32)
    values = np.random.RandomState(seed).permutation(max(1, int(np.prod(shape)))).reshape(shape)
    if dtype == "bool":
        return jnp.asarray(values % 2 == 0)
    if dtype.startswith(("int", "uint")):
        return jnp.asarray(values + 1, dtype)
    return jnp.asarray((values + 1) / (values.size + 1.5), dtype)


def block_of(value: Any, axis: int | None, r: int) -> Any:
    if axis is None:
        return value
    rows = SIZE.of(np.shape(value)[axis])
    if _compat.is_key(value.dtype):
        return lax.slice_in_dim(value, r * rows, (r + 1) * rows, axis=axis)
    # NumPy takes the slice, because JAX would compile a program for each shape.
    return jnp.asarray(np.asarray(value)[(slice(None),) * axis + (slice(r * rows, (r + 1) * rows),)])


def as_numpy(value: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(value) if _compat.is_key(value.dtype) else value)


def check(example: Example) -> dict[str, int]:
    """Check the law for every equation and every combination of axes. Return, for each primitive, the number of combinations that
    its rule allows for the last equation with this primitive."""
    operands = example.operands()
    closed = jax.make_jaxpr(example.fn)(*operands)
    ways: dict[str, int] = {}
    for eqn, values in _equations(closed, operands):
        allowed = _check_eqn(eqn, values)
        ways.pop(eqn.primitive.name, None)  # so that the last equation of the program is the last entry
        ways[eqn.primitive.name] = allowed
    return ways


@functools.cache
def check_named(name: str) -> dict[str, int]:
    return check(EXAMPLES[name])


def _equations(closed, operands):
    """Every equation, with the full values of its operands. Calls are inlined."""
    known = dict(zip(closed.jaxpr.invars, operands, strict=True)) | dict(
        zip(closed.jaxpr.constvars, closed.consts, strict=True)
    )
    for eqn in closed.jaxpr.eqns:
        values = [known[v] if v in known else v.val for v in (_Hashable.of(v, known) for v in eqn.invars)]
        inner = _compat.inner_jaxpr(eqn)
        if inner is not None:
            yield from _equations(inner, values)
        else:
            yield eqn, values
        known.update(zip(eqn.outvars, _compat.bind(eqn, eqn.params, values), strict=True))


class _Hashable:
    """Takes the place of a JAX literal, which cannot be a key of a dict."""

    def __init__(self, val: Any):
        self.val = val

    @staticmethod
    def of(var: Any, known: dict[Any, Any]) -> Any:
        return _Hashable(var.val) if hasattr(var, "val") else var


def _check_eqn(eqn, values) -> int:
    name = eqn.primitive.name
    if name not in RULES or not values:
        return 0
    full = _compat.bind(eqn, eqn.params, values)
    choices = [[None, *(d for d, n in enumerate(np.shape(v)) if n in (E, GROUPS, E * GROUPS))] for v in values]
    allowed = 0
    for axes in itertools.product(*choices):
        if all(axis is None for axis in axes):
            continue
        try:
            ins, outs, params = split(eqn, axes, SIZE)
        except Mixes:
            continue
        # `have` is the axis of the block that a replica has, and `want` is the piece that the rule needs. If the two differ, `ByRule`
        # refuses the combination, unless the replica also has the whole operand. The combination with None as the axis of this
        # operand tests that case, so skip this combination.
        if any(have is not None and want != have for have, want in zip(axes, ins, strict=True)):
            continue
        allowed += 1
        for r in range(E // BLOCK):
            block = _compat.bind(eqn, params, [block_of(v, axis, r) for v, axis in zip(values, ins, strict=True)])
            for o, (got, whole) in enumerate(zip(block, full, strict=True)):
                expected = block_of(whole, outs[o], r)
                assert np.shape(got) == np.shape(expected), (name, axes, ins, outs, np.shape(got))
                np.testing.assert_allclose(
                    as_numpy(got).astype(_wide(got)),
                    as_numpy(expected).astype(_wide(got)),
                    rtol=2e-6,
                    atol=2e-6,
                    err_msg=f"{name}: replica has axes {axes}, rule takes {ins}; result {o} along {outs[o]}, block {r}",
                )
    return allowed


def _wide(value: Any) -> Any:
    if _compat.is_key(value.dtype):
        return np.uint32
    return np.float32 if value.dtype == jnp.bfloat16 else value.dtype


UNARY = """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1
floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh""".split()
BINARY = "add atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter pow rem sub zeta".split()
INTEGER = [
    "mulhi",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
]
CUMULATIVE = "cumsum cumprod cummax cummin cumlogsumexp".split()
REDUCERS = {"sum": lax.add, "max": lax.max, "min": lax.min}


def named(name: str) -> Callable[..., Any]:
    return getattr(lax, name)


def unary(name: str, dtype: str = "float32") -> Example:
    return Example(named(name), ((2, E),), (dtype,))


def binary(name: str, dtype: str = "float32") -> Example:
    return Example(named(name), ((E, 2), (E, 2)), (dtype, dtype), allowed=3)


def symmetric(x: jax.Array) -> jax.Array:
    """Symmetric matrices that are far from singular."""
    return x + jnp.swapaxes(x, -1, -2) + jnp.broadcast_to(jnp.diag(jnp.arange(1.0, 1 + x.shape[-1])), x.shape)


def gather_from(fn, *shapes, allowed=1) -> Example:
    return Example(fn, shapes, ("float32", *["index"] * (len(shapes) - 1)), allowed)


def scatter_to(name: str, mode: str | None = None) -> dict[str, Example]:
    """Examples of scatters. The operand is [E, E] where possible, so that a wrong axis also has the length E."""

    def each(x, i, u):
        return jax.vmap(lambda x, i, u: getattr(x.at[i], name)(u, mode=mode))(x, i, u)

    def window(x, i, u):
        return getattr(x.at[i], name)(u, mode=mode)

    def table(x, i, u):
        return getattr(x.at[:, i], name)(u, mode=mode)

    return {
        f"scatter {name}, each its own": Example(each, ((E, E), (E, 2), (E, 2)), ("float32", "index", "float32"), 1),
        f"scatter {name}, one window each": Example(window, ((4, E), (2,), (2, E)), ("float32", "index", "float32"), 1),
        f"scatter {name}, square": Example(window, ((E, E), (2,), (2, E)), ("float32", "index", "float32"), 1),
        f"scatter {name}, by column": Example(table, ((E, E), (2,), (E, 2)), ("float32", "index", "float32"), 1),
        f"scatter {name}, into one table": Example(window, ((4,), (E,), (E,)), ("float32", "index", "float32"), 0),
    }


EXAMPLES: dict[str, Example] = {
    **{name: unary(name) for name in UNARY},
    **{name: binary(name) for name in BINARY},
    **{name: binary(name, "int32") for name in INTEGER},
    **{name: unary(name, "uint32") for name in ("clz", "population_count", "bitwise_not")},
    **{name: unary(name, "complex64") for name in ("real", "imag", "conj")},
    **{name: Example(lambda x, name=name: named(name)(x, axis=0), ((4, E),)) for name in CUMULATIVE},
    **{f"{name} of a square": Example(lambda x, name=name: named(name)(x, axis=1), ((E, E),)) for name in CUMULATIVE},
    **{
        f"{name} reversed": Example(lambda x, name=name: named(name)(x, axis=0, reverse=True), ((E, 2),), (), 0)
        for name in CUMULATIVE
    },
    "integer_pow": Example(lambda x: lax.integer_pow(x, 3), ((E, E),), (), 2),
    "polygamma": Example(lambda x: lax.polygamma(jnp.ones_like(x), x), ((E, 2),)),
    "betainc": Example(lax.betainc, ((E, 2),) * 3),
    "convert": Example(lambda x: x.astype(jnp.int32), ((E,),)),
    "reduce_precision": Example(lambda x: lax.reduce_precision(x, 5, 10), ((E,),)),
    "copy": Example(jnp.copy, ((E,),)),
    "stop_gradient": Example(lambda x: lax.stop_gradient(x) + x, ((E,),)),
    "add_any": Example(lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(x) + jnp.cos(x) * x))(x), ((E,),)),
    "total order": Example(lambda x: lax.sort([x, -x], dimension=0, num_keys=2), ((2, E),)),
    "clamp by scalars": Example(lambda x: lax.clamp(0.2, x, 0.7), ((E, E),), (), 2),
    "clamp by arrays": Example(lax.clamp, ((E, 2),) * 3, (), 7),
    "select by each": Example(lambda p, x, y: lax.select_n(p, x, y), ((E, 2),) * 3, ("bool", "float32", "float32"), 7),
    "select by one": Example(
        lambda p, x, y: lax.select_n(p, x, y), ((), (E, E), (E, E)), ("bool", "float32", "float32"), 6
    ),
    "add of a broadcast row": Example(lambda x, y: x + jnp.broadcast_to(y, (E, E)), ((E, E), (E,)), (), 2),
    "optimization_barrier": Example(lambda x, y: lax.optimization_barrier((x, y)), ((E, 2), (2, E)), (), 3),
    "broadcast": Example(lambda x: lax.broadcast_in_dim(x, (E, E, 2), (1,)), ((E,),)),
    "broadcast before": Example(lambda x: lax.broadcast_in_dim(x, (2, E, 1), (1,)), ((E,),)),
    "reshape, squeezed": Example(lambda x: x.reshape(2, E, 3), ((2, E, 1, 3),)),
    "reshape, others merged": Example(lambda x: x.reshape(E, 6), ((E, 2, 3),)),
    "reshape, others divided": Example(lambda x: x.reshape(2, 2, E), ((4, E),)),
    "reshape, merged": Example(lambda x: x.reshape(12), ((2, E),), (), 0),
    "reshape, divided": Example(lambda x: x.reshape(2, 3, 2), ((E, 2),)),
    "reshape, divided so that no axis holds the blocks": Example(lambda x: x.reshape(3, 2, 2), ((E, 2),), (), 0),
    "reshape, into groups": Example(lambda x: x.reshape(GROUPS, E), ((E * GROUPS,),)),
    "reshape, groups joined": Example(lambda x: x.reshape(3, E * GROUPS), ((3, GROUPS, E),)),
    "reshape, within groups": Example(lambda x: x.reshape(GROUPS, E, 5), ((GROUPS, 5, E),)),
    "groups, added": Example(lambda x, y: x + y, ((2, GROUPS), (2, GROUPS)), (), 3),
    "groups, broadcast": Example(lambda x: jnp.broadcast_to(x[:, None], (GROUPS, 3)), ((GROUPS,),)),
    "groups, sliced": Example(lambda x: lax.slice(x, (0, 1), (GROUPS, 4)), ((GROUPS, 5),)),
    "groups, gathered": gather_from(jax.vmap(lambda x, i: x[i]), (GROUPS, 7), (GROUPS, 3), allowed=3),
    "groups, scattered": Example(
        jax.vmap(lambda x, i, v: x.at[i].set(v)),
        ((GROUPS, 7), (GROUPS, 3), (GROUPS, 3)),
        ("float32", "index", "float32"),
        7,
        primitive="scatter",
    ),
    "groups, sorted": Example(lambda x: lax.sort(x, dimension=1), ((GROUPS, 5),)),
    "groups, summed": Example(lambda x: jnp.sum(x, axis=0), ((GROUPS, 5),), (), 0),
    "reshape that looks like a transpose": Example(lambda x: x.reshape(E, 4), ((4, E),), (), 0),
    "reshape, square": Example(lambda x: x.reshape(1, E, 1, E), ((E, E),), (), 2),
    "reshape, [3, E] to [E, 3]": Example(lambda x: x.reshape(2, E, 3), ((2, 3, E),), (), 0),
    "transpose": Example(lambda x: jnp.transpose(x, (2, 0, 1)), ((2, E, E),), (), 2),
    "squeeze": Example(lambda x: lax.squeeze(x, (0, 2)), ((1, E, 1, 3),)),
    "squeeze from the end": Example(lambda x: lax.squeeze(x, (-3,)), ((1, E, 3),)),
    "concatenate": Example(lambda x, y: lax.concatenate([x, y, x], 1), ((E, 2), (E, 3)), (), 3),
    "concatenate environments": Example(lambda x, y: lax.concatenate([x, y], 0), ((E, 2), (E, 2)), (), 0),
    "concatenate squares": Example(lambda x, y: lax.concatenate([x, y], 0), ((E, E), (E, E)), (), 3),
    "slice": Example(lambda x: lax.slice(x, (0, 1), (E, 4), (1, 2)), ((E, 5),)),
    "slice of environments": Example(lambda x: lax.slice(x, (0,), (E,), (2,)), ((E,),), (), 0),
    "slice of a square": Example(lambda x: lax.slice(x, (1, 0), (E, E)), ((E, E),)),
    "dynamic_slice": Example(lambda x, i: lax.dynamic_slice(x, (i, i), (E, 2)), ((E, 5), ()), ("float32", "index")),
    "dynamic_slice of environments": Example(
        lambda x, i: lax.dynamic_slice(x, (i,), (3,)), ((E,), ()), ("float32", "index"), 0
    ),
    "dynamic_update_slice": Example(
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), ((E, 5), (E, 2), ()), ("float32", "float32", "index"), 3
    ),
    "dynamic_update_slice, square": Example(
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), ((E, E), (2, E), ()), ("float32", "float32", "index"), 3
    ),
    "dynamic_update_slice of environments": Example(
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i,)), ((E,), (2,), ()), ("float32", "float32", "index"), 0
    ),
    "pad": Example(lambda x: lax.pad(x, 0.5, ((0, 0, 0), (1, -1, 1))), ((E, E),)),
    "pad environments": Example(lambda x: lax.pad(x, 0.5, ((1, -1, 0),)), ((E,),), (), 0),
    "rev": Example(lambda x: lax.rev(x, (0,)), ((E, E),)),
    "argmax": Example(lambda x: lax.argmax(x, 1, jnp.int32), ((E, E, 2),)),
    "argmin": Example(lambda x: lax.argmin(x, 0, jnp.int32), ((2, E),)),
    "reduce_sum": Example(lambda x: jnp.sum(x, axis=(0, 2)), ((2, E, E, 3),)),
    "reduce_max": Example(lambda x: jnp.max(x, axis=1), ((E, E),)),
    "reduce_min": Example(lambda x: jnp.min(x, axis=0), ((E, E),)),
    "reduce_prod": Example(lambda x: jnp.prod(x, axis=(0, 1)), ((2, 2, E),)),
    "reduce_and": Example(lambda x: jnp.all(x, axis=0), ((2, E),), ("bool",)),
    "reduce_or": Example(lambda x: jnp.any(x, axis=1), ((E, 2),), ("bool",)),
    "reduce_xor": Example(lambda x: lax.reduce_xor(x, (0,)), ((2, E),), ("int32",)),
    "sort": Example(lambda x, y: lax.sort([x, y], dimension=1), ((E, E), (E, E)), (), 3),
    "sort environments": Example(lambda x: lax.sort(x, dimension=0), ((E, 2),), (), 0),
    "stack": Example(lambda x, y: jnp.stack([x, y], 1), ((E, E), (E, E)), (), 3),
    "stack in front": Example(lambda x, y: jnp.stack([x, y]), ((E, 2), (E, 2)), (), 3),
    "unstack": Example(lambda x: jnp.unstack(x, axis=1), ((E, 3),)),
    "unstack environments": Example(lambda x: jnp.unstack(x), ((E, 3),), (), 0),
    "split": Example(lambda x: lax.split(x, (2, 3), axis=0), ((5, E),)),
    "split environments": Example(lambda x: lax.split(x, (3, 3), axis=0), ((E, 2),), (), 0),
    "top_k": Example(lambda x: lax.top_k(x, 2), ((E, E),)),
    "top_k over the first axis": Example(lambda x: lax.top_k(x, 2, axis=0), ((5, E),)),
    "dot, left free": Example(lambda x, y: x @ y, ((E, 4), (4, 2))),
    "dot, right free": Example(lambda x, y: x @ y, ((2, 4), (4, E))),
    "dot, contracted": Example(lambda x, y: x.T @ y, ((E, 2), (E, 2)), (), 0),
    "dot, square": Example(lambda x, y: x @ y, ((E, E), (E, E)), (), 2),
    "dot, batched": Example(lambda x, y: jnp.einsum("beij,bejk->beik", x, y), ((2, E, 3, E), (2, E, E, 3)), (), 3),
    "dot, batched in another order": Example(lambda x, y: jnp.einsum("ieb,bke->ekib", x, y), ((3, E, 2), (2, 4, E))),
    "dot, every pair": Example(lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))), ((E, 3), (E, 3)), (), 2),
    "convolution": Example(lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME"), ((E, 2, 6, 6), (4, 2, 3, 3))),
    "convolution, other layout": Example(
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=("HNC", "HIO", "HCN")),
        ((E, E, 2), (3, 2, 4)),
    ),
    "convolution in groups": Example(
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", feature_group_count=2), ((E, 4, 5), (4, 2, 3))
    ),
    "convolution, batch in groups": Example(
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", batch_group_count=2), ((E, 2, 5), (4, 2, 3)), (), 0
    ),
    "convolution, environments as channels": Example(
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME"), ((2, E, 5), (4, E, 3)), (), 0
    ),
    "convolution, environments in space": Example(
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME"), ((2, 2, E), (4, 2, 3)), (), 0
    ),
    **{
        f"window {name}": Example(
            lambda x, f=f, name=name: lax.reduce_window(
                x, {"sum": 0.0, "max": -jnp.inf, "min": jnp.inf}[name], f, (1, 2), (1, 2), "SAME"
            ),
            ((E, E),),
        )
        for name, f in REDUCERS.items()
    },
    "window over environments": Example(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "SAME"), ((E,),), (), 0
    ),
    "window of one, strided": Example(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (2, 1), "VALID"), ((E, 4),), (), 0
    ),
    "gather, table": gather_from(lambda x, i: x[i], (4, 2), (E,)),
    "gather, square table": gather_from(lambda x, i: x[i], (E, 2), (E,)),
    "gather, table by two indices": gather_from(lambda x, i, j: x[i, j], (4, E), (E, 2), (E, 2), allowed=1),
    "gather, each its own": gather_from(lambda x, i: jnp.take_along_axis(x, i, axis=1), (E, E), (E, 2), allowed=3),
    "gather, each its own, clipped": gather_from(
        lambda x, i: jnp.take_along_axis(x, i, axis=1, mode="clip"), (E, 4), (E, 2), allowed=3
    ),
    "gather, each its own, second axis": gather_from(
        lambda x, i: jax.vmap(lambda x, i: x[i], (1, 1), 1)(x, i), (4, E), (2, E), allowed=1
    ),
    "gather, whole rows": gather_from(lambda x, i: x[:, i], (E, E), (3,)),
    "gather, whole rows at the end": gather_from(lambda x, i: x[i], (4, 3, E), (3, 2)),
    "gather, some environments": gather_from(lambda x, i: x[i], (E,), (3,), allowed=0),
    "gather, no env axis": gather_from(
        lambda x, i: lax.gather(x, i, lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 2)), (4, 2), (3, 1), allowed=0
    ),
    "gather, index vector along environments": Example(
        lambda x, i: lax.gather(x, i, lax.GatherDimensionNumbers((), tuple(range(E)), tuple(range(E))), (1,) * E),
        ((2,) * E, (4, E)),
        ("float32", "index"),
        0,
    ),
    **scatter_to("set"),
    **scatter_to("add"),
    **scatter_to("multiply"),
    **scatter_to("min"),
    **scatter_to("max"),
    **scatter_to("add", "clip"),
    "scatter subtract": scatter_to("subtract")["scatter subtract, square"],
    "cholesky": Example(
        lambda x: lax.linalg.cholesky(
            x @ jnp.swapaxes(x, 1, 2) + 9 * jnp.broadcast_to(jnp.eye(3), (E, 3, 3)), symmetrize_input=False
        ),
        ((E, 3, 3),),
    ),
    "cholesky of environments": Example(
        lambda x: lax.linalg.cholesky(x, symmetrize_input=False), ((E, E),), (), 0, primitive="cholesky"
    ),
    "triangular_solve": Example(
        lambda a, b: lax.linalg.triangular_solve(a + 9.0, b, left_side=True, lower=True), ((E, 3, 3), (E, 3, 2)), (), 3
    ),
    "eigh": Example(lambda x: jnp.linalg.eigh(symmetric(x)), ((E, 3, 3),), primitive="eigh"),
    "eigh of environments": Example(lambda x: jnp.linalg.eigh(x), ((2, E, E),), (), 0, primitive="eigh"),
    "lu": Example(lambda x: jnp.linalg.slogdet(symmetric(x)), ((E, 3, 3),), primitive="lu"),
    "lu of environments": Example(lax.linalg.lu, ((E, E),), (), 0, primitive="lu"),
    "lu_pivots_to_permutation": Example(lambda p: lax.linalg.lu_pivots_to_permutation(p % 4, 4), ((E, 4),), ("int32",)),
    "lu_pivots_to_permutation of environments": Example(
        lambda p: lax.linalg.lu_pivots_to_permutation(p % E, E), ((2, E),), ("int32",), 0
    ),
    "qr": Example(lambda x: jnp.linalg.qr(symmetric(x)), ((E, 3, 3),), primitive="qr"),
    "qr of environments": Example(lambda x: jnp.linalg.qr(x), ((E, 3),), (), 0, primitive="qr"),
    "householder_product": Example(lax.linalg.householder_product, ((E, E, 4), (E, 4))),
    "householder_product of environments": Example(lax.linalg.householder_product, ((E, 4), (4,)), (), 0),
    "svd": Example(lambda x: jnp.linalg.svd(symmetric(x), compute_uv=False), ((2, E, 3, 3),), primitive="svd"),
    "svd of environments": Example(lambda x: jnp.linalg.svd(x), ((3, E),), (), 0, primitive="svd"),
    "tridiagonal_solve": Example(
        lambda d, b: lax.linalg.tridiagonal_solve(d, d + 3.0, d, b), ((E, E), (E, E, 2)), primitive="tridiagonal_solve"
    ),
    "tridiagonal_solve of environments": Example(
        lambda d, b: lax.linalg.tridiagonal_solve(d, d + 3.0, d, b),
        ((E,), (E, 2)),
        (),
        0,
        primitive="tridiagonal_solve",
    ),
    "fft": Example(lambda x: jnp.fft.fft(x), ((E, E),), primitive="fft"),
    "fft of real numbers": Example(lambda x: jnp.fft.rfft2(x), ((E, 3, E),), primitive="fft"),
    "fft backwards": Example(lambda x: lax.fft(x, "IRFFT", (6,)), ((E, 4),), ("complex64",)),
    "fft of environments": Example(lambda x: jnp.fft.fft2(x), ((4, E, 3),), (), 0, primitive="fft"),
    "tile": Example(lambda x: lax.tile(x, (2, 1, 3)), ((2, E, E),)),
    "tile environments": Example(lambda x: lax.tile(x, (2, 1)), ((E, 3),), (), 0),
    "tile of a square": Example(lambda x: lax.tile(x, (1, 2)), ((E, E),)),
    "name": Example(lambda x: checkpoint_name(x, "x"), ((2, E),)),
    "device_put": Example(lambda x: jax.device_put(x), ((2, E),)),
    "random_gamma": Example(
        jax.vmap(jax.random.gamma), ((E,), (E, E)), ("key", "float32"), 1, primitive="random_gamma"
    ),
    "random_gamma by a matrix of keys": Example(
        jax.vmap(jax.vmap(lambda k, a: jax.random.gamma(k, a))),
        ((2, E), (2, E, 3)),
        ("key", "float32"),
        3,
        "random_gamma",
    ),
    "random_gamma by one key": Example(jax.random.gamma, ((), (E, 2)), ("key", "float32"), 0, primitive="random_gamma"),
    "random_gamma by keys that are not per environment": Example(
        jax.vmap(jax.random.gamma), ((2,), (2, E)), ("key", "float32"), 0, primitive="random_gamma"
    ),
    "bitcast": Example(lambda x: lax.bitcast_convert_type(x, jnp.int32), ((2, E),)),
    "bitcast, narrower": Example(lambda x: lax.bitcast_convert_type(x, jnp.uint8), ((2, E),)),
    "bitcast, wider": Example(lambda x: lax.bitcast_convert_type(x, jnp.uint32), ((E, 4),), ("uint8",)),
    "random_bits": Example(lambda k: jax.vmap(lambda k: jax.random.bits(k, (E,)))(k), ((E,),), ("key",)),
    "random_bits of a matrix of keys": Example(
        jax.vmap(jax.vmap(lambda k: jax.random.bits(k, (2,)))), ((2, E),), ("key",)
    ),
    "random_split": Example(jax.vmap(lambda k: jax.random.split(k, E)), ((E,),), ("key",)),
    "random_fold_in": Example(jax.vmap(jax.random.fold_in), ((E,), (E,)), ("key", "uint32"), 3),
    "random_fold_in of one key": Example(
        lambda k, i: jax.vmap(jax.random.fold_in, (None, 0))(k, i), ((), (E,)), ("key", "uint32")
    ),
    "random_seed": Example(jax.vmap(jax.random.key), ((E,),), ("uint32",)),
    "random_unwrap": Example(jax.random.key_data, ((2, E),), ("key",)),
    "random_wrap": Example(jax.random.wrap_key_data, ((2, E, 2),), ("uint32",)),
    "threefry2x32": Example(
        jax.vmap(
            lambda k: jax.random.bits(jax.random.wrap_key_data(k), (3,)),
        ),
        ((E, 2),),
        ("uint32",),
    ),
    "threefry2x32 of raw keys": Example(
        jax.vmap(lambda k: jax.extend.random.threefry_2x32(k, jnp.arange(4, dtype=jnp.uint32))), ((E, 2),), ("uint32",)
    ),
}

OTHER_NAMES = {
    "copy_p": "a copy that jit makes of its arguments",
    "one_minus_square": "in the derivative of tanh, in newer JAX",
    "eq_to": "total order comparison: only inside the comparator of a sort",
    "le_to": "total order comparison: only inside the comparator of a sort",
    "lt_to": "total order comparison: only inside the comparator of a sort",
    "scatter_add": "scatter-add, in newer JAX",
    "scatter_mul": "scatter-mul, in newer JAX",
    "scatter_sub": "scatter-sub, in newer JAX",
    "scatter_min": "scatter-min, in newer JAX",
    "scatter_max": "scatter-max, in newer JAX",
}
"""The names in RULES that no example uses in this version of JAX, each with its meaning."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_block_of_the_result_equals_the_split_equation_on_blocks(name):
    ways, wanted = check_named(name), EXAMPLES[name].allowed
    primitive = EXAMPLES[name].primitive or list(ways)[-1]
    assert ways[primitive] >= wanted, (
        f"the rule of `{primitive}` allows {ways[primitive]} combinations of axes, but must allow at least {wanted}"
    )
    assert wanted or not ways[primitive], f"the rule of `{primitive}` must refuse all combinations of axes"


def test_every_rule_has_an_example():
    seen = {primitive for name in EXAMPLES for primitive, allowed in check_named(name).items() if allowed}
    assert seen | OTHER_NAMES.keys() >= RULES.keys(), sorted(RULES.keys() - seen - OTHER_NAMES.keys())
    assert seen & OTHER_NAMES.keys() == set(), "a name that an example uses must not be in OTHER_NAMES"


DIMENSIONS = st.sampled_from([1, 2, 3, E, E])


@st.composite
def random_examples(draw) -> Example:
    """An equation with random shapes and parameters. Dimensions that are not the env axis often have length E as well."""
    shape = tuple(draw(st.lists(DIMENSIONS, min_size=1, max_size=4)))
    axis = draw(st.integers(0, len(shape) - 1))
    some_axes = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    order = tuple(draw(st.permutations(range(len(shape)))))
    low = tuple(draw(st.integers(0, n - 1)) if draw(st.booleans()) else 0 for n in shape)
    high = tuple(draw(st.integers(a + 1, n)) if draw(st.booleans()) else n for a, n in zip(low, shape, strict=True))
    dtypes = ("float32",)

    def one(fn: Callable[[jax.Array], Any]) -> Example:
        return Example(fn, (shape,), dtypes, 0)

    kind = draw(st.sampled_from(sorted(RANDOM_KINDS)))
    if kind == "dot":
        return draw(random_dots())
    if kind == "reshape":
        flat = int(np.prod(shape))
        sizes = [n for n in (1, 2, 3, E, 2 * E, 3 * E, E * E) if flat % n == 0]
        first = draw(st.sampled_from(sizes))
        second = draw(st.sampled_from([n for n in sizes if flat // first % n == 0]))
        return one(lambda x: x.reshape(first, second, -1))
    if kind == "broadcast":
        wide = tuple(draw(DIMENSIONS) if n == 1 else n for n in shape)
        at = draw(st.integers(0, len(shape)))
        dims = tuple(d + (d >= at) for d in range(len(shape)))
        return one(lambda x: lax.broadcast_in_dim(x, (*wide[:at], E, *wide[at:]), dims))
    if kind == "gather":
        return Example(lambda x, i: jnp.take(x, i, axis=axis), (shape, (draw(DIMENSIONS),)), ("float32", "index"), 0)
    if kind == "concatenate":
        return Example(lambda x, y: lax.concatenate([x, y], axis), (shape, shape), (), 0)
    if kind == "scatter":
        rest = (*shape[:axis], 2, *shape[axis + 1 :])
        put = (slice(None),) * axis
        return Example(lambda x, i, u: x.at[(*put, i)].add(u), (shape, (2,), rest), ("float32", "index", "float32"), 0)
    if kind == "dynamic_slice":
        sizes = tuple(b - a for a, b in zip(low, high, strict=True))
        return Example(
            lambda x, i: lax.dynamic_slice(x, (i,) * len(shape), sizes), (shape, ()), ("float32", "index"), 0
        )
    return one(
        {
            "transpose": lambda x: lax.transpose(x, order),
            "reduce": lambda x: jnp.max(x, axis=some_axes),
            "argmax": lambda x: lax.argmax(x, axis, jnp.int32),
            "cumulative": lambda x: lax.cumsum(x, axis=axis),
            "sort": lambda x: lax.sort([x, -x], dimension=axis),
            "rev": lambda x: lax.rev(x, some_axes),
            "slice": lambda x: lax.slice(x, low, high),
            "pad": lambda x: lax.pad(x, 0.5, tuple((a, a, 0) for a in low)),
            "squeeze": lambda x: lax.squeeze(x, tuple(d for d in some_axes if shape[d] == 1)),
        }[kind]
    )


RANDOM_KINDS = """argmax broadcast concatenate cumulative dot dynamic_slice gather pad reduce reshape rev scatter slice sort squeeze
transpose""".split()


@st.composite
def random_dots(draw) -> Example:
    """A dot_general with random dimension numbers. Dimensions of all kinds (contracted, batch, free) often have length E."""
    contracted, batch, left, right = (draw(st.lists(DIMENSIONS, max_size=n)) for n in (1, 2, 1, 1))

    def side(free):
        dims = [*(("c", i, n) for i, n in enumerate(contracted)), *(("b", i, n) for i, n in enumerate(batch))]
        dims = draw(st.permutations([*dims, *(("f", i, n) for i, n in enumerate(free))]))
        at = {(kind, i): d for d, (kind, i, _) in enumerate(dims)}
        found = (tuple(at["c", i] for i in range(len(contracted))), tuple(at["b", i] for i in range(len(batch))))
        return tuple(n for *_, n in dims), *found

    (lhs, lhs_contract, lhs_batch), (rhs, rhs_contract, rhs_batch) = side(left), side(right)
    numbers = ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))
    return Example(lambda x, y: lax.dot_general(x, y, numbers), (lhs, rhs), (), 0)


@hypothesis_settings(max_examples=20)
@given(example=random_examples())
def test_the_law_holds_for_random_equations(example):
    check(example)


@pytest.mark.long
@hypothesis_settings(max_examples=200)
@given(example=random_examples())
def test_the_law_holds_for_many_random_equations(example):
    check(example)
