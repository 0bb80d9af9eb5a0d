"""A cache of lowered programs, so that a test process lowers and compiles equal programs only once.

Many programs of the tests are equal: layouts share most of their programs, and a repeated run has the same programs as the first.
Three quarters of the segments of the law matrix are equal to an earlier segment. JAX's own cache on disk would save only about
half of the time. The key of JAX's cache is the lowered program, so JAX must lower a program before looking for it in the cache,
and lowering takes as long as compiling without optimisations. The key of the cache in this file contains everything that
lowering depends on:

    equations, with all their types and parameters    the printed jaxpr
    numbers in the equations                          the bits of every constant and literal, because the print omits arrays
    arguments                                         shape, type, sharding, committed or not; donated or not
    arguments and results                             the structures of their pytrees
    configuration                                     default device, 64 bits or 32, optimised or not

Programs with callbacks into Python are not cached, because the printed jaxpr does not identify the Python function.
"""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core as jec

MOST = 200
"""The largest number of programs in the cache, to limit the memory. The cache drops the least recently used programs."""

_lower = jax.stages.Traced.lower
_lowered: collections.OrderedDict[tuple[Any, ...], jax.stages.Lowered] = collections.OrderedDict()


def install() -> None:
    """Use the cache for every `jax.jit(...).lower()` of this process. JAX compiles each `Lowered` object of the cache only once."""
    jax.stages.Traced.lower = lower


def forget() -> None:
    """Empty the cache."""
    _lowered.clear()


def lower(traced: jax.stages.Traced, **options: Any) -> jax.stages.Lowered:
    """Return `traced.lower(**options)`, from the cache if possible. Calls with options are not cached."""
    text = str(traced.jaxpr)
    if options or "callback" in text:
        return _lower(traced, **options)
    found = key(traced, text)
    if found not in _lowered:
        _lowered[found] = _lower(traced)
    _lowered.move_to_end(found)
    while len(_lowered) > MOST:
        _lowered.popitem(last=False)
    return _lowered[found]


def key(traced: Any, text: str) -> tuple[Any, ...]:
    """The key of a traced program, whose jaxpr prints as `text`."""
    params = tuple((name, value) for name, value in sorted(traced._params.items()) if name != "jaxpr")
    config: Any = jax.config
    settings = config.jax_default_device, config.jax_enable_x64, config.read("jax_disable_most_optimizations")
    trees = jax.tree.structure(traced.args_info), traced.out_tree
    return text, tuple(numbers_in(traced.jaxpr)), params, tuple(traced._meta_tys_flat), trees, settings


def numbers_in(closed: jec.ClosedJaxpr) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """The type, shape and bits of all constants and literals, in the order of the equations."""
    yield from map(bits, closed.consts)
    yield from numbers_in_equations(closed.jaxpr)


def numbers_in_equations(jaxpr: jec.Jaxpr) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    for eqn in jaxpr.eqns:
        yield from (bits(atom.val) for atom in eqn.invars if isinstance(atom, jec.Literal))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from numbers_in(inner) if isinstance(inner, jec.ClosedJaxpr) else numbers_in_equations(inner)
    yield from (bits(atom.val) for atom in jaxpr.outvars if isinstance(atom, jec.Literal))


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, (jec.Jaxpr, jec.ClosedJaxpr))


def bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    if jax.dtypes.issubdtype(jax.dtypes.result_type(value), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()
