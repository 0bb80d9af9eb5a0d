"""How large the products of matrices in a traced program are: what says whether more than one core can help with one."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax.extend.core as jec

from choreo import _compat
from choreo.graph.graph import Graph


def largest_product(graph: Graph) -> int:
    """Multiplications in the largest product or convolution."""
    return max(_products(op.eqn for op in graph.block.ops), default=0)


def _products(eqns: Iterable[jec.JaxprEqn]) -> Iterator[int]:
    for eqn in eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            yield _multiplications(eqn)
        for inner in _compat.inner_jaxprs(eqn):
            yield from _products(inner.jaxpr.eqns)


def _multiplications(eqn: jec.JaxprEqn) -> int:
    """For each result, one for each pair of numbers that is summed up in it."""
    shapes: list[Any] = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]  # pyright: ignore[reportAttributeAccessIssue]
    left, right, result = shapes
    if eqn.primitive.name == "dot_general":
        (summed, _), _ = eqn.params["dimension_numbers"]
        pairs = math.prod(left[axis] for axis in summed)
    else:
        pairs = math.prod(right) // right[eqn.params["dimension_numbers"].rhs_spec[0]]
    return math.prod(result) * pairs
