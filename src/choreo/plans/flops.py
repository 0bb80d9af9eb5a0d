"""Count the floating-point operations (FLOPs) of a traced program.

    count_flops(jaxpr) -> Flops      what every equation computes; the body of a loop counts once for every round
    largest_product(jaxpr)           the size of the largest matrix product or convolution

Operations on integers, booleans and random keys, and moves of data, are not floating-point operations: they count as 0.
An equation that is not known here makes the count unknown, never 0.
"""

# Why not a library: JAX's `Lowered.cost_analysis()` and `jax.experimental.roofline` (0.10.2 and 0.12) count the body of a
# scan once, so 9 rounds of a product of 4 x 4 matrices count as 130 and 128 FLOPs in place of 1,152. Lowering the segments of PPO
# and DQN takes 0.1 to 0.3 s each. Tracing them takes 1 to 40 ms, so that a plan still prints in a tenth of a second.

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.extend.core as jec
import jax.numpy as jnp

from choreo import _compat


class Flops(NamedTuple):
    """A number of floating-point operations."""

    number: int | None
    """None: unknown."""
    at_least: bool = False
    """True if the number is a lower bound: the body of a `while` loop counts once, because its number of rounds is not known."""

    def times(self, rounds: int) -> "Flops":
        return Flops(None if self.number is None else rounds * self.number, self.at_least)


def format_flops(flops: int | None, *, at_least: bool = False) -> str:
    """The number with three digits and a unit: `1.23 MFLOP`, `at least 512 FLOP` or `FLOPs unknown`.

    >>> format_flops(1_234_567), format_flops(None)
    ('1.23 MFLOP', 'FLOPs unknown')
    """
    if flops is None:
        return "FLOPs unknown"
    size, units, unit = float(flops), iter("kMGTPEZY"), ""
    while size >= 999.5:
        size, unit = size / 1000, next(units)
    return f"{'at least ' if at_least else ''}{size:.3g} {unit}FLOP"


def count_flops(jaxpr: jec.Jaxpr) -> Flops:
    """The floating-point operations of one evaluation of a program.

    A product of matrices [m, k] and [k, n] counts as 2 m k n, an elementwise function as one operation for each element of its
    result, a sum as one for each element of its operand. A `cond` counts as its most expensive branch.
    """
    return _Counter().count(jaxpr)


def largest_product(jaxpr: jec.Jaxpr) -> int:
    """The number of multiplications in the largest matrix product or convolution of a program; 0 if there is none."""
    return max(_products(jaxpr), default=0)


def _products(jaxpr: jec.Jaxpr) -> Iterator[int]:
    for eqn in jaxpr.eqns:
        if eqn.primitive in _PRODUCTS:
            yield _multiplications(eqn)
        for inner in _compat.inner_jaxprs(eqn):
            yield from _products(inner.jaxpr)


class _Counter:
    """Counts the operations of programs. It remembers the count of each program, because a program is often called many times."""

    def __init__(self):
        self.known: dict[jec.Jaxpr, Flops] = {}

    def count(self, jaxpr: jec.Jaxpr) -> Flops:
        if jaxpr not in self.known:
            self.known[jaxpr] = _total(*(self._count_eqn(eqn) for eqn in jaxpr.eqns))
        return self.known[jaxpr]

    def _count_eqn(self, eqn: jec.JaxprEqn) -> Flops:
        if eqn.primitive in _SCAN:
            scan = _compat.scan_params(eqn)
            return self.count(scan.body.jaxpr).times(scan.length)
        if eqn.primitive in _WHILE:
            loop = _compat.while_params(eqn)
            once = _total(self.count(loop.cond.jaxpr), self.count(loop.body.jaxpr))
            return once._replace(at_least=bool(once.number))
        if eqn.primitive in _COND:
            branches = [self.count(branch.jaxpr) for branch in eqn.params["branches"]]
            numbers = [branch.number for branch in branches if branch.number is not None]
            known = len(numbers) == len(branches)
            return Flops(max(numbers) if known else None, any(branch.at_least for branch in branches))
        if inner := _compat.inner_jaxpr(eqn):
            return self.count(inner.jaxpr)
        if not any(_is_float(var) for var in (*eqn.invars, *eqn.outvars)) or eqn.primitive in _MOVES:
            return Flops(0)
        return Flops(_operations(eqn))


def _total(*parts: Flops) -> Flops:
    numbers = [part.number for part in parts if part.number is not None]
    known = len(numbers) == len(parts)
    return Flops(sum(numbers) if known else None, known and any(part.at_least for part in parts))


def _operations(eqn: jec.JaxprEqn) -> int | None:
    """The floating-point operations of one equation on floating-point numbers; None if they are not known."""
    if eqn.primitive in _PRODUCTS:
        return 2 * _multiplications(eqn)  # a multiplication and an addition
    if eqn.primitive in _ONE_PER_RESULT:
        return _size(eqn.outvars[0])
    if eqn.primitive in _ONE_PER_OPERAND:
        return sum(_size(var) for var in eqn.invars)
    if eqn.primitive in _ONE_PER_UPDATE:
        return _size(eqn.invars[2])
    if eqn.primitive in _WINDOWS:
        return _size(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"])
    if eqn.primitive in _SORTS:
        aval: Any = eqn.invars[0].aval
        return _size(eqn.invars[0]) * math.ceil(math.log2(max(aval.shape[eqn.params.get("dimension", -1)], 1)))
    return None


def _multiplications(eqn: jec.JaxprEqn) -> int:
    """The number of elements of the result, times the number of terms that are summed up for each element."""
    shapes: list[Any] = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]  # pyright: ignore[reportAttributeAccessIssue]
    left, right, result = shapes
    if eqn.primitive.name == "dot_general":
        (summed, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(left[axis] for axis in summed)
    else:
        terms = math.prod(right) // right[eqn.params["dimension_numbers"].rhs_spec[0]]
    return math.prod(result) * terms


def _is_float(var: Any) -> bool:
    return hasattr(var.aval, "dtype") and jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _size(var: Any) -> int:
    return math.prod(var.aval.shape)


_PRODUCTS = _compat.primitives(["dot_general", "conv_general_dilated"])
_SCAN, _WHILE, _COND = (_compat.primitives([name]) for name in ("scan", "while", "cond"))
_MOVES = _compat.primitives(
    """all_gather all_to_all bitcast_convert_type broadcast_in_dim complex concatenate convert_element_type copy copy_p
    debug_callback debug_print device_put dynamic_slice dynamic_update_slice gather imag iota layout_constraint name
    optimization_barrier pad ppermute real reshape rev scatter select_n sharding_constraint slice split squeeze stack
    stop_gradient tile transpose unstack""".split()
)
"""These move or select numbers, and compute nothing."""
_ONE_PER_RESULT = _compat.primitives(
    """abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp conj cos cosh digamma div eq
    eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le le_to lgamma log
    log1p log2 logistic lt lt_to max min mul ne neg nextafter one_minus_square polygamma pow reduce_precision
    regularized_incomplete_beta rem round rsqrt sign sin sinh sqrt square sub tan tanh zeta""".split()
)
_ONE_PER_OPERAND = _compat.primitives(
    """argmax argmin cumlogsumexp cummax cummin cumprod cumsum pmax pmin psum psum_invariant reduce_max reduce_min reduce_prod
    reduce_sum""".split()
)
"""Reductions, also over replicas."""
_ONE_PER_UPDATE = _compat.primitives(
    f"scatter{mark}{name}" for name in ("add", "max", "min", "mul", "sub") for mark in "-_"
)
_WINDOWS = _compat.primitives(["reduce_window_max", "reduce_window_min", "reduce_window_sum"])
_SORTS = _compat.primitives(["sort", "top_k"])
"""n log2(n) comparisons."""
