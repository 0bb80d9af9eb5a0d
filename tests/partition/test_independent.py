"""Tests of the list of primitives in `independent.py`: under `vmap`, they compute each row only from the same row.

For each primitive that has an example here, the tests change all rows except one, and compare the bits of this row. `obstacle`
must find primitives that are not on the list. Each primitive of the installed JAX is either on the list or known to be refused.
"""

import importlib
import warnings

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.scipy import linalg

from choreo import _compat
from choreo.partition.independent import (
    BY_WHAT_IS_INSIDE,
    ELEMENTWISE,
    OF_A_MATRIX,
    RANDOM,
    SAFE,
    WITHIN_A_ROW,
    obstacle,
)

ROWS = 4
"""The number of rows of a batch. The tests compare the results for row 1."""


# Types of arguments: f is float32, i is int32, u is uint32, b is bool, c is complex64.


def f(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def u(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.uint32)


def b(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


def c(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.complex64)


KEY = jax.eval_shape(lambda: jax.random.key(0))
SYMMETRIC = lambda x: x @ x.T + 3.0 * jnp.eye(3)  # noqa: E731

ONE = "acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor "\
      "is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh abs"  # fmt: skip
TWO = "add atan2 div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter pow rem sub zeta polygamma"
BITS = "and or xor shift_left shift_right_arithmetic shift_right_logical"


def bind(name, *values, **params):
    (primitive,) = _compat.primitives([name])
    return primitive.bind(*values, **params)


EXAMPLES = {
    **{name: (getattr(lax, name), [f(3)]) for name in ONE.split()},
    **{name: (getattr(lax, name), [f(3), f(3)]) for name in TWO.split()},
    **{name: (getattr(lax, f"bitwise_{name}", None) or getattr(lax, name), [i(3), i(3)]) for name in BITS.split()},
    "add_any": (lambda x: jax.vjp(lambda x: (jnp.sin(x), jnp.cos(x)), x)[1]((x, 2.0 * x)), [f(3)]),
    "argmax": (jnp.argmax, [f(3)]),
    "argmin": (jnp.argmin, [f(3)]),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, jnp.int32), [f(3)]),
    "broadcast_in_dim": (lambda x: jnp.broadcast_to(x, (2, 3)), [f(3)]),
    "cholesky": (lambda x: jnp.linalg.cholesky(SYMMETRIC(x)), [f(3, 3)]),
    "clamp": (lambda a, x, b: lax.clamp(a, x, b), [f(), f(3), f()]),
    "closed_call": (lambda x: x, [f(3)]),  # only custom derivatives make this primitive, and other examples test them
    "clz": (lax.clz, [i(3)]),
    "complex": (lax.complex, [f(3), f(3)]),
    "concatenate": (lambda x, y: jnp.concatenate([x, y]), [f(3), f(2)]),
    "cond": (lambda p, x: lax.cond(p > 0, jnp.sin, jnp.cos, x), [f(), f(3)]),
    "conj": (jnp.conj, [c(3)]),
    "conv_general_dilated": (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), [f(1, 2, 4, 4), f(3, 2, 2, 2)]),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), [f(3)]),
    "copy": (jnp.copy, [f(3)]),
    "cumlogsumexp": (lax.cumlogsumexp, [f(3)]),
    "cummax": (lax.cummax, [f(3)]),
    "cummin": (lax.cummin, [f(3)]),
    "cumprod": (lax.cumprod, [f(3)]),
    "cumsum": (lax.cumsum, [f(3)]),
    "custom_jvp_call": (jax.nn.relu, [f(3)]),
    "custom_linear_solve": (lambda x, y: linalg.solve(SYMMETRIC(x), y), [f(3, 3), f(3)]),
    "custom_vjp_call": (lambda x: _custom_vjp(x), [f(3)]),
    "dot_general": (lambda x, y: x @ y, [f(2, 3), f(3, 2)]),
    "dynamic_slice": (lambda x, n: lax.dynamic_slice(x, (n,), (2,)), [f(5), i()]),
    "dynamic_update_slice": (lambda x, y, n: lax.dynamic_update_slice(x, y, (n,)), [f(5), f(2), i()]),
    "eig": (lambda x: jnp.linalg.eigvals(jnp.where(jnp.isfinite(x), x, 0.0)), [f(3, 3)]),
    "eigh": (lambda x: jnp.linalg.eigh(SYMMETRIC(x))[0], [f(3, 3)]),
    "eq_to": (lambda x, y: bind("eq_to", x, y), [f(3), f(3)]),
    "fft": (lambda x: jnp.real(jnp.fft.fft(x)), [f(4)]),
    "gather": (lambda x, n: x[n], [f(5), i(2)]),
    "geqrf": (lambda x: bind("geqrf", x), [f(3, 3)]),
    "hessenberg": (lambda x: linalg.hessenberg(jnp.where(jnp.isfinite(x), x, 0.0)), [f(3, 3)]),
    "householder_product": (lambda x, t: lax.linalg.householder_product(x, t), [f(3, 3), f(3)]),
    "imag": (jnp.imag, [c(3)]),
    "integer_pow": (lambda x: x**3, [f(3)]),
    "iota": (lambda x: x + lax.iota(jnp.float32, 3), [f(3)]),
    "jit": (jax.jit(jnp.sin), [f(3)]),
    "le_to": (lambda x, y: bind("le_to", x, y), [f(3), f(3)]),
    "log2": (lambda x: bind("log2", x, accuracy=None), [f(3)]),
    "lt_to": (lambda x, y: bind("lt_to", x, y), [f(3), f(3)]),
    "lu": (lambda x: lax.linalg.lu(x)[0], [f(3, 3)]),
    "lu_pivots_to_permutation": (lambda n: lax.linalg.lu_pivots_to_permutation(n % 3, 3), [i(3)]),
    "mulhi": (lambda x, y: bind("mulhi", x, y), [u(3), u(3)]),
    "name": (lambda x: checkpoint_name(x, "x"), [f(3)]),
    "not": (lax.bitwise_not, [i(3)]),
    "one_minus_square": (lambda x: bind("one_minus_square", x), [f(3)]),
    "optimization_barrier": (lax.optimization_barrier, [f(3)]),
    "ormqr": (lambda x, y: lax.linalg.ormqr(*bind("geqrf", x), y), [f(3, 3), f(3, 2)]),
    "pad": (lambda x, v: lax.pad(x, v, [(1, 1, 0)]), [f(3), f()]),
    "population_count": (lax.population_count, [i(3)]),
    "qr": (lambda x: jnp.linalg.qr(x)[1], [f(3, 3)]),
    "random_bits": (lambda key: jax.random.bits(key, (3,)), [KEY]),
    "random_clone": (lambda key: jax.random.bits(jax.random.clone(key), (3,)), [KEY]),
    "random_fold_in": (jax.random.fold_in, [KEY, u()]),
    "random_gamma": (lambda key, a: jax.random.gamma(key, jnp.clip(jnp.where(jnp.isfinite(a), a, 1.0), 0.1, 9.0)), [KEY, f(3)]),
    "random_seed": (jax.random.key, [u()]),
    "random_split": (jax.random.split, [KEY]),
    "random_unwrap": (jax.random.key_data, [KEY]),
    "random_wrap": (jax.random.wrap_key_data, [u(2)]),
    "real": (jnp.real, [c(3)]),
    "reduce": (lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + 2.0 * b, (0,)), [f(3)]),
    "reduce_and": (jnp.all, [b(3)]),
    "reduce_max": (jnp.max, [f(3)]),
    "reduce_min": (jnp.min, [f(3)]),
    "reduce_or": (jnp.any, [b(3)]),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 7), [f(3)]),
    "reduce_prod": (jnp.prod, [f(3)]),
    "reduce_sum": (jnp.sum, [f(3)]),
    "reduce_window": (lambda x: lax.reduce_window(x, np.float32(0), lambda a, b: a + 2.0 * b, (2,), (1,), "VALID"), [f(4)]),
    "reduce_window_max": (lambda x: lax.reduce_window(x, -np.inf, lax.max, (2,), (1,), "VALID"), [f(4)]),
    "reduce_window_min": (lambda x: lax.reduce_window(x, np.inf, lax.min, (2,), (1,), "VALID"), [f(4)]),
    "reduce_window_sum": (lambda x: lax.reduce_window(x, np.float32(0), lax.add, (2,), (1,), "VALID"), [f(4)]),
    "reduce_xor": (lambda x: lax.reduce_xor(x, (0,)), [i(3)]),
    "remat2": (jax.checkpoint(jnp.sin), [f(3)]),
    "reshape": (lambda x: x.reshape(2, 3), [f(6)]),
    "rev": (lambda x: x[::-1], [f(3)]),
    "scan": (lambda x, y: lax.scan(lambda c, r: (c * r, c), x, y), [f(), f(3)]),
    "scatter": (lambda x, n, y: x.at[n].set(y), [f(5), i(2), f(2)]),
    "scatter-add": (lambda x, n, y: x.at[n].add(y), [f(5), i(2), f(2)]),
    "scatter-max": (lambda x, n, y: x.at[n].max(y), [f(5), i(2), f(2)]),
    "scatter-min": (lambda x, n, y: x.at[n].min(y), [f(5), i(2), f(2)]),
    "scatter-mul": (lambda x, n, y: x.at[n].multiply(y), [f(5), i(2), f(2)]),
    "scatter-sub": (lambda x, n, y: x.at[n].subtract(y), [f(5), i(2), f(2)]),
    "schur": (lambda x: lax.linalg.schur(jnp.where(jnp.isfinite(x), x, 0.0))[0], [f(3, 3)]),
    "select_and_gather_add": (lambda x: jax.jvp(_pooled, (x,), (2.0 * x,))[1], [f(4)]),
    "select_and_scatter_add": (lambda x: jax.grad(lambda x: jnp.sum(_pooled(x)))(x), [f(4)]),
    "select_n": (jnp.where, [b(3), f(3), f(3)]),
    "slice": (lambda x: x[1:], [f(3)]),
    "sort": (jnp.sort, [f(3)]),
    "split": (lambda x: lax.split(x, (1, 2)), [f(3)]),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), [f(1, 3)]),
    "stack": (lambda x, y: bind("stack", x, y, axis=0), [f(3), f(3)]),
    "stop_gradient": (lax.stop_gradient, [f(3)]),
    "svd": (lambda x: jnp.linalg.svd(jnp.where(jnp.isfinite(x), x, 0.0))[1], [f(3, 3)]),
    "threefry2x32": (lambda k, x: jax.extend.random.threefry_2x32(k, x), [u(2), u(4)]),
    "tile": (lambda x: bind("tile", x, reps=(2,)), [f(3)]),
    "top_k": (lambda x: lax.top_k(x, 2), [f(4)]),
    "transpose": (jnp.transpose, [f(2, 3)]),
    "triangular_solve": (lambda x, y: linalg.solve_triangular(x, y), [f(3, 3), f(3)]),
    "tridiagonal": (lambda x: lax.linalg.tridiagonal(SYMMETRIC(x))[1], [f(3, 3)]),
    "tridiagonal_solve": (lambda d, x: lax.linalg.tridiagonal_solve(d, d + 3.0, d, x), [f(3), f(3, 1)]),
    "unstack": (lambda x: bind("unstack", x, axis=0), [f(3)]),
    "while": (lambda x: _halved(x), [f(3)]),
}  # fmt: skip
"""For each primitive, a function of one row, and the types of its arguments."""
MADE_INDIRECTLY = {"closed_call", "stop_gradient", "custom_lin", "copy"}
"""Primitives that need no example, or that need not occur in the jaxpr of their example: calls, and primitives that JAX itself adds
or removes."""


def _pooled(x):
    return lax.reduce_window(x, -np.inf, lax.max, (2,), (1,), "VALID")


def _halved(x):
    """Halve a row until its first element is small, at most 9 times. The limit is needed because infinity never becomes small."""
    return lax.while_loop(lambda c: (jnp.abs(c[1][0]) > 0.1) & (c[0] < 9), lambda c: (c[0] + 1, 0.5 * c[1]), (0, x))[1]


@jax.custom_vjp
def _custom_vjp(x):
    return jnp.sin(x)


_custom_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * x,))

NAMES = " ".join((ELEMENTWISE, WITHIN_A_ROW, OF_A_MATRIX, RANDOM, BY_WHAT_IS_INSIDE)).split()
INSTALLED = [name for name in NAMES if _compat.primitives([name])]


def test_the_list_has_no_name_twice():
    assert len(NAMES) == len(set(NAMES))


def test_every_name_has_an_example():
    assert set(INSTALLED) - set(EXAMPLES) - MADE_INDIRECTLY == set()


@pytest.mark.parametrize("name", [name for name in INSTALLED if name in EXAMPLES])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(name):
    fn, types = EXAMPLES[name]
    closed = jax.make_jaxpr(fn)(*types)
    assert name in MADE_INDIRECTLY or name in {eqn.primitive.name for eqn in equations(closed)}, (
        "the example must use the primitive"
    )
    assert obstacle(closed) is None
    for mapped in ways_to_map(len(types)):
        batch = jax.jit(jax.vmap(fn, [0 if each else None for each in mapped]))
        arguments = [
            draw(t, seed, ROWS if each else None) for seed, (t, each) in enumerate(zip(types, mapped, strict=True))
        ]
        expected = bits_of_row(batch(*arguments))
        for other in ("nan", "inf", "noise"):
            spoiled = [spoil(x, other) if each else x for x, each in zip(arguments, mapped, strict=True)]
            assert bits_of_row(batch(*spoiled)) == expected, (mapped, other)


def equations(closed):
    for eqn in closed.jaxpr.eqns:
        yield eqn
        for inner in _compat.inner_jaxprs(eqn):
            yield from equations(inner)


def ways_to_map(count):
    """Which arguments are mapped: all of them, or only one of them. For each such choice, a bool for each argument."""
    ways = {tuple([True] * count), *(tuple(k == j for k in range(count)) for j in range(count))}
    return sorted(ways, reverse=True)


def draw(kind, seed, rows):
    rng = np.random.default_rng(seed)
    shape = kind.shape if rows is None else (rows, *kind.shape)
    if _compat.is_key(kind.dtype):
        return jax.random.split(jax.random.key(seed), rows) if rows else jax.random.key(seed)
    if kind.dtype == jnp.bool_:
        return jnp.asarray(rng.integers(0, 2, shape), jnp.bool_)
    if jnp.issubdtype(kind.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 4, shape), kind.dtype)
    if jnp.issubdtype(kind.dtype, jnp.complexfloating):
        return jnp.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape), kind.dtype)
    return jnp.asarray(rng.uniform(0.1, 0.9, shape), kind.dtype)


def spoil(x, how):
    """A copy of the batch in which all rows except row 1 are replaced."""
    if _compat.is_key(x.dtype):
        return x.at[np.array([0, 2, 3])].set(jax.random.split(jax.random.key(99), 3))
    if jnp.issubdtype(x.dtype, jnp.inexact):
        value = {"nan": jnp.nan, "inf": -jnp.inf, "noise": -7.5}[how]
    else:
        value = (
            {"nan": jnp.iinfo(x.dtype).max, "inf": jnp.iinfo(x.dtype).min, "noise": 3}[how] if x.dtype != bool else True
        )
    return x.at[np.array([0, 2, 3])].set(jnp.asarray(value, x.dtype))


def bits_of_row(out):
    leaves = [jax.random.key_data(x) if _compat.is_key(x.dtype) else x for x in jax.tree.leaves(out)]
    return [np.asarray(x)[1].tobytes() for x in leaves]


class TestRefused:
    """`obstacle` finds a primitive that is not on the list or uses rbg keys. The primitive can be anywhere in the program."""

    def test_random_numbers_from_rbg_keys_are_refused(self):
        key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
        for fn in (jax.random.bits, jax.random.split, lambda k: jax.random.fold_in(k, 1), jax.random.key_data):
            assert obstacle(jax.make_jaxpr(fn)(key)) is not None

    def test_a_callback_within_control_flow_is_refused(self):
        def call(x):
            return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x)

        inside = {
            "scan": lambda x: lax.scan(lambda c, _: (call(c), ()), x, None, 2)[0],
            "while": lambda x: lax.while_loop(lambda c: c > 0, call, x),
            "predicate": lambda x: lax.while_loop(lambda c: call(c) > 0, jnp.sin, x),
            "cond": lambda x: lax.cond(x > 0, call, jnp.sin, x),
            "remat": jax.checkpoint(call),
            "custom_jvp": _with_jvp(call),
        }
        for name, fn in inside.items():
            found = obstacle(jax.make_jaxpr(fn)(f()))
            assert found is not None and found.primitive.name == "pure_callback", name

    def test_a_collective_is_refused(self):
        closed = jax.make_jaxpr(lambda x: lax.psum(x, "envs"), axis_env=[("envs", 3)])(f(3))
        assert obstacle(closed) is not None


def _with_jvp(fn):
    fn = jax.custom_jvp(fn)
    fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0]))
    return fn


REFUSED = """
accum_grad_in_ref after_all all_gather all_gather_invariant all_gather_reduced all_to_all approx_top_k axis_index call
call_hi_primitive cholesky_update composite conv create_token custom_jvp_call_jaxpr dce_sink device_put empty empty2 empty_ref
eval_jaxpr free_ref freeze from_edtype geqp3 get iota_2x32_shape layout_constraint linear_call new_ref pbroadcast
pbroadcast_dynamic philox2x32 philox4x32 platform_index pmax pmin polynomial ppermute precv preduced psend psum psum_invariant pvary
ragged_all_to_all ragged_dot_general reduce_scatter reduced_vary_cast reduced_vary_cast_p regularized_incomplete_beta relayout
remat_opt reshard rng_bit_generator rng_uniform scaled_dot select_and_scatter sharding_constraint stage swap symmetric_product
threefry4x32 tie to_edtype
unreachable unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p
zeros_like xla_metadata_value xla_metadata_call compute_on inspect_sharding has_memory_space debug_callback debug_print
io_callback pure_callback buffer_callback custom_vmap_call custom_partitioning ffi_call shard_map shard_alike check
call_exported dim_as_value dimension_size shape_assertion tpu_custom_call
""".split()
"""Primitives that were reviewed and are not on the list: collectives, callbacks, tokens, references, and primitives whose
exact result XLA is free to choose. Some of them could be proved independent, but no program has needed them.
`regularized_incomplete_beta` is refused because its loop runs until all elements of the batch have converged, so each
element can change the last bits of the others."""
REFUSED_MODULES = (
    "jax._src.cudnn", "jax._src.hijax", "jax._src.pallas", "jax._src.state", "jax.experimental.sparse",
    "jax._src.tpu", "jax._src.mosaic", "jax._src.thunky", "jax.experimental",
)  # fmt: skip
"""Modules for kernels, references and sparse matrices. None of their primitives is on the list."""


def test_every_primitive_of_the_installed_jax_has_been_reviewed():
    """Each primitive is on the list, in REFUSED, or in one of REFUSED_MODULES; or it is one half of a collective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("jax.experimental.sparse", "jax.experimental.pallas", "jax.experimental.checkify",
                       "jax.experimental.custom_partitioning", "jax.export", "jax.ffi", "jax.scipy.special"):  # fmt: skip
            importlib.import_module(module)
    modules_of = {}
    for name, module in list(importlib.sys.modules.items()):
        if name.startswith("jax"):
            for value in list(vars(module).values()):
                if isinstance(value, jec.Primitive):
                    modules_of.setdefault(value, []).append(name)
    unknown = {
        primitive.name: modules
        for primitive, modules in modules_of.items()
        if primitive not in SAFE
        and primitive.name not in REFUSED
        and not primitive.name.endswith(("_start", "_done"))  # the two halves of a collective
        and not all(module.startswith(REFUSED_MODULES) for module in modules)
    }
    assert not unknown
