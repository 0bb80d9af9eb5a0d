"""Tests of the cache of lowered programs (`compiled_once.py`).

If two programs differ in anything on which lowering depends, the cache must distinguish them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compiled_once

pytestmark = pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="the cache is used only with JAX before 0.11")
X = jnp.arange(3.0)


def scaled(by):
    """A new function in every call. For the same `by`, the function always has the same equations."""
    return lambda x: jax.lax.fori_loop(0, 2, lambda _, x: x * by, x)


def lowered(by, x=X, **options):
    return jax.jit(scaled(by), **options).lower(x)


def test_the_same_program_is_lowered_once():
    assert lowered(np.float32([1, 2, 3])) is lowered(np.float32([1, 2, 3]))
    assert lowered(2.0) is lowered(2.0)


@pytest.mark.parametrize("other", [3.0, -2.0, np.float32([2, 2, 2])], ids=str)
def test_a_program_with_different_numbers_is_lowered_separately(other):
    assert lowered(2.0) is not lowered(other)


def test_arrays_that_print_alike_are_distinguished():
    one, other = np.float32([1, 2, 3]), np.float32([1, 2, 4])
    assert str(jax.make_jaxpr(scaled(one))(X)) == str(jax.make_jaxpr(scaled(other))(X))
    assert lowered(one) is not lowered(other)
    np.testing.assert_array_equal(lowered(other).compile()(X), [0, 4, 32])


def test_a_program_with_different_arguments_is_lowered_separately():
    ways = [
        lowered(2.0),
        lowered(2.0, jnp.arange(4.0)),
        lowered(2.0, donate_argnums=0),
        lowered(2.0, jax.device_put(X, jax.devices()[1])),
        lowered(2.0, np.arange(3, dtype=np.float32)),
    ]
    assert len({id(way) for way in ways}) == len(ways)


def test_a_program_with_a_different_configuration_is_lowered_separately():
    with jax.default_device(jax.devices()[1]):
        there = lowered(2.0, np.arange(3, dtype=np.float32))
    here = lowered(2.0, np.arange(3, dtype=np.float32))
    assert here is not there
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not before)
    try:
        assert lowered(2.0, np.arange(3, dtype=np.float32)) is not here
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def test_programs_with_callbacks_are_not_cached():
    def calling(fn):
        like = jax.ShapeDtypeStruct((3,), jnp.float32)
        return jax.jit(lambda x: jax.pure_callback(fn, like, x)).lower(X).compile()(X)

    np.testing.assert_array_equal(calling(lambda x: np.float32(x + 1)), X + 1)
    np.testing.assert_array_equal(calling(lambda x: np.float32(x + 2)), X + 2)


def test_the_least_recently_used_program_is_dropped():
    compiled_once.forget()
    used_again, unused = lowered(0.5), lowered(0.25)
    for i in range(compiled_once.MOST - 1):
        compiled_once._lowered[(i,)] = used_again
    assert lowered(0.5) is used_again  # this call finds one program too many in the cache, and drops `unused`
    assert len(compiled_once._lowered) == compiled_once.MOST
    assert lowered(0.25) is not unused


def test_forget_empties_the_cache():
    first = lowered(0.5)
    compiled_once.forget()
    assert lowered(0.5) is not first
