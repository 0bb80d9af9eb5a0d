"""How large the products of matrices in a program are, counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from choreo.graph.graph import Graph
from choreo.graph.ir import Body, Op
from choreo.graph.products import largest_product


def graph(fn, *shapes) -> Graph:
    """As much of a graph as is looked at."""
    eqns = jax.make_jaxpr(fn)(*(jnp.zeros(shape) for shape in shapes)).jaxpr.eqns
    ops = tuple(Op(eqn, (), (), frozenset()) for eqn in eqns)
    return Graph("iterate", Body((), ops, (), {}, 0, 0), (), (), 1)


def image(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID")


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (lambda x: x + 1, [(4, 4)], 0),
        (lambda x, y: x @ y, [(3, 5), (5, 7)], 3 * 5 * 7),
        (lambda x, y: x @ y, [(2, 3, 5), (2, 5, 7)], 2 * 3 * 5 * 7),
        (image, [(2, 3, 8, 8), (6, 3, 4, 4)], (2 * 6 * 5 * 5) * (3 * 4 * 4)),
        (jax.jit(lambda x, y: x @ y), [(3, 5), (5, 7)], 3 * 5 * 7),
        (lambda x: lax.scan(lambda c, _: (c @ c, None), x, length=9)[0], [(4, 4)], 4 * 4 * 4),
    ],
    ids=["none", "matrices", "batch", "convolution", "in a jit", "in a scan: of one round"],
)
def test_the_largest_product(fn, shapes, expected):
    assert largest_product(graph(fn, *shapes)) == expected


def test_of_several_the_largest():
    assert largest_product(graph(lambda x, y: (x @ y, y @ x), (3, 50), (50, 3))) == 50 * 3 * 50
