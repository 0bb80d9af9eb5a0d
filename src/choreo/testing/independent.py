"""`check_independent`: test fragments that the user marked `independent=True`, which Choreo trusts without a proof.

A row is the input of one environment. The test runs the fragment on a batch of random rows. Then it replaces all rows but one by
other numbers, NaN and infinity, and runs the fragment again. If a single bit in the results of the unchanged row differs, this row
depends on the other rows. Finally the test runs one row alone, and compares its results with those in the batch. The test can find
a counterexample; it cannot prove independence.
"""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from choreo import _compat
from choreo.errors import AlgorithmError
from choreo.partition.mapped import trusted
from choreo.partition.trace import trace
from choreo.roles import Call

OTHERS = {"large numbers": 7.5, "negative numbers": -7.5, "NaN": jnp.nan, "infinity": jnp.inf}
"""The values that replace floats in the other rows."""
MOST_ROWS = 8
"""The largest number of rows that are tested."""


def check_independent(algo: Any, env: Any) -> list[str]:
    """Test all fragments that Choreo trusts without a proof, and return their names; raise AlgorithmError if one mixes rows."""
    traced = trace(algo, env)
    calls = [
        call for program in (traced.init, traced.iterate) for op in program.fragments() for call in trusted(op.eqn)
    ]
    for call in calls:
        _check_call(call)
    return list(dict.fromkeys(call.name for call in calls))


def _check_call(call: Call) -> None:
    (vmap, *_), closed = call.vmaps, call.jaxpr
    assert closed is not None, "`trusted` returns only calls with a program"
    run = jax.jit(jax.vmap(lambda *row: _compat.eval_jaxpr(closed, row), vmap.in_axes))
    arguments = [
        _draw(aval, axis, vmap.size, seed)
        for seed, (aval, axis) in enumerate(zip(call.in_avals, vmap.in_axes, strict=True))
    ]
    with _without_callback_log():
        try:
            results = run(*arguments)
        except (RuntimeError, ValueError) as error:
            raise AlgorithmError(
                f"The fragment `{call.name}` (independent=True) cannot be tested: it raises an error for a batch of random "
                "numbers.",
                fix="Let it return results for any numbers.",
            ) from error
        _try_other_rows(call, run, arguments, results)
        _try_one_row(call, run, arguments, results)


def _try_other_rows(call: Call, run: Callable[..., Any], arguments: list[jax.Array], results: list[jax.Array]) -> None:
    """Replace all rows but one, and check that the results of this row do not change."""
    (vmap, *_), tried = call.vmaps, 0
    for row, (what, value) in itertools.product(range(min(vmap.size, MOST_ROWS)), OTHERS.items()):
        changed = [_replace_others(x, axis, row, value) for x, axis in zip(arguments, vmap.in_axes, strict=True)]
        try:
            found = run(*changed)
        except (
            RuntimeError,
            ValueError,
        ):  # the fragment itself raises for such values, for example with `equinox.error_if`
            continue
        tried += 1
        if _bits_of_row(found, row) != _bits_of_row(results, row):
            raise _mixed_error(call, f"with {what} in the other rows of the batch")
    if not tried:
        raise AlgorithmError(
            f"The fragment `{call.name}` (independent=True) cannot be tested: it raises an error for every value that the test "
            "puts into the other rows.",
            fix="Let it return results for any numbers.",
        )


def _try_one_row(call: Call, run: Callable[..., Any], arguments: list[jax.Array], results: list[jax.Array]) -> None:
    """Check that the last row alone gives the same results as in the batch, up to rounding, which depends on shapes."""
    (vmap, *_) = call.vmaps
    row = vmap.size - 1
    one = [
        x if axis is None else lax.slice_in_dim(x, row, row + 1, axis=axis)
        for x, axis in zip(arguments, vmap.in_axes, strict=True)
    ]
    for among, alone in zip(results, run(*one), strict=True):
        if not _is_close(_numbers(among)[row], _numbers(alone)[0]):
            raise _mixed_error(call, "in a batch of only one row")


def _mixed_error(call: Call, how: str) -> AlgorithmError:
    return AlgorithmError(
        f"The fragment `{call.name}` is marked independent=True, but environments mix in it: {how}, the result for one "
        "environment changes.",
        fix="Leave out independent=True: Choreo then refuses the layouts in which the result would depend on how environments "
        "are divided.",
    )


@contextlib.contextmanager
def _without_callback_log() -> Iterator[None]:
    """Suppress JAX's log of callbacks that raise. A callback of the fragment may raise because of our random numbers."""
    logger = logging.getLogger("jax._src.callback")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _draw(aval: Any, axis: int | None, size: int, seed: int) -> jax.Array:
    """Random numbers of the type `aval`, for all rows."""
    shape = aval.shape if axis is None else (*aval.shape[:axis], size, *aval.shape[axis:])
    key = jax.random.key(seed)
    if _compat.is_key(aval.dtype):
        keys = jax.random.split(jax.random.key(seed, impl=_compat.key_impl(aval.dtype)), max(1, int(np.prod(shape))))
        return keys.reshape(shape)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return jax.random.normal(key, shape).astype(aval.dtype)
    return jax.random.randint(key, shape, 0, 2).astype(aval.dtype)


def _replace_others(x: jax.Array, axis: int | None, row: int, value: float) -> jax.Array:
    """Replace all rows but `row`. Floats become `value`; for integers and keys, the order of the rows is reversed."""
    if axis is None:
        return x
    others = jnp.full(x.shape, value, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.flip(x, axis)
    here = (slice(None),) * axis + (row,)
    return others.at[here].set(x[here])


def _bits_of_row(results: list[jax.Array], row: int) -> list[bytes]:
    return [_numbers(x)[row].tobytes() for x in results]


def _numbers(x: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if _compat.is_key(x.dtype) else x)


def _is_close(a: np.ndarray, b: np.ndarray) -> bool:
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool(np.array_equal(a, b))
    return bool(np.allclose(a.astype(np.complex128), b.astype(np.complex128), rtol=1e-4, atol=1e-4, equal_nan=True))
