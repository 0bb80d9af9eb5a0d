"""A program that this process has lowered and compiled already is taken as it is.

Layouts share most of their programs, and a run that is repeated shares them all: three of four segments of the law matrix
are equal to one before them. What JAX keeps on disk is found by the lowered program, and lowering takes as long as compiling
in haste. Here it is found by all that the lowering is made of:

    equations, with all their types and parameters    the jaxpr, printed
    numbers in them                                   every constant and literal, bit by bit: the print leaves arrays out
    arguments                                         shape, type, sharding, committed or not; donated or not
    surroundings                                      default device, 64 bits or 32, in haste or not

What calls back into Python is not shared: the print does not say which function it is.
"""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core as jec

MOST = 200
"""So many programs are kept, those used last: the others' memory is wanted."""

_lower = jax.stages.Traced.lower
_lowered: collections.OrderedDict[tuple[Any, ...], jax.stages.Lowered] = collections.OrderedDict()


def install() -> None:
    """For every `jax.jit(...).lower()` of this process; `compile` of what is lowered compiles once by itself."""
    jax.stages.Traced.lower = lower


def forget() -> None:
    _lowered.clear()


def lower(traced: jax.stages.Traced, **options: Any) -> jax.stages.Lowered:
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
    params = tuple((name, value) for name, value in sorted(traced._params.items()) if name != "jaxpr")
    config: Any = jax.config
    surroundings = config.jax_default_device, config.jax_enable_x64, config.read("jax_disable_most_optimizations")
    trees = jax.tree.structure(traced.args_info), traced.out_tree
    return text, tuple(numbers_in(traced.jaxpr)), params, tuple(traced._meta_tys_flat), trees, surroundings


def numbers_in(closed: jec.ClosedJaxpr) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Constants and literals, in the order of the equations."""
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
