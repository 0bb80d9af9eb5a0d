"""Find out whether a program mixes rows if it is called under `vmap`. A row is what one index of the mapped axis selects.

A program mixes no rows if every primitive in it computes row i of its results from row i of its operands only. But
`vmap` calls the batching rule of each primitive, and a batching rule can do anything: that of Equinox's `unvmap_any` reads all
rows at once. So Choreo accepts a program only if every primitive in it is on the list below and has JAX's own batching rule.
The list is written by hand. It names JAX's own primitive objects; a user's primitive of the same name is a different object.
`tests/partition/test_independent.py` tests each primitive of the list: if all rows but one are replaced by NaN, infinity or
noise, the bits of the result for the remaining row do not change. The tests also fail if the installed JAX has a primitive that
is neither on the list nor known to be unsafe.

Control flow and custom derivatives mix no rows if the programs inside them mix none. This also holds if a predicate differs
between rows. Under `vmap`, a `while` then runs until the predicate of every row is false, and a row whose predicate is false
keeps its values. A `cond` then computes every branch for all rows, and selects for each row the results of its branch.
"""

from typing import Any

import jax.extend.core as jec

from choreo import _compat

ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz
complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg
nextafter not one_minus_square optimization_barrier or polygamma population_count pow real reduce_precision
rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
square stop_gradient sub tan tanh threefry2x32 xor zeta
"""
WITHIN_A_ROW = """
argmax argmin broadcast_in_dim concatenate conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum dot_general
dynamic_slice dynamic_update_slice fft gather iota pad reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
reduce_window_max reduce_window_min reduce_window_sum reduce_xor reshape rev scatter scatter-add scatter-max scatter-min
scatter-mul scatter-sub select_and_gather_add
select_and_scatter_add slice sort split squeeze stack tile top_k transpose unstack
"""
OF_A_MATRIX = """
cholesky eig eigh geqrf hessenberg householder_product lu lu_pivots_to_permutation ormqr qr schur svd
triangular_solve tridiagonal tridiagonal_solve
"""
RANDOM = "random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap"
"""For Threefry keys only: under `vmap`, an rbg generator uses the first key for all rows."""
BY_WHAT_IS_INSIDE = """
closed_call cond custom_jvp_call custom_linear_solve custom_lin custom_vjp_call jit
reduce reduce_window remat2 scan while
"""

SAFE = _compat.primitives(" ".join((ELEMENTWISE, WITHIN_A_ROW, OF_A_MATRIX, RANDOM, BY_WHAT_IS_INSIDE)).split())


def obstacle(closed: jec.ClosedJaxpr) -> jec.JaxprEqn | None:
    """The first equation that might mix rows under `vmap`; None if there is none."""
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive not in SAFE or not _compat.has_own_batching_rule(eqn.primitive) or not _keys_are_threefry(eqn):
            return eqn
        for inner in _compat.inner_jaxprs(eqn):
            if found := obstacle(inner):
                return found
    return None


def _keys_are_threefry(eqn: jec.JaxprEqn) -> bool:
    avals: list[Any] = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    return all(_compat.is_threefry(aval.dtype) for aval in avals if _compat.is_key(aval.dtype))
