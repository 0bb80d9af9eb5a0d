"""Counts of the FLOPs of programs equal counts by hand. A while loop makes a count a lower bound, and an operation whose FLOPs are
not known makes the count unknown."""

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import pytest
from jax import lax

from choreo.plans.flops import Flops, count_flops, format_flops, largest_product


def jaxpr(fn, *shapes):
    return jax.make_jaxpr(fn)(*(jnp.zeros(shape) for shape in shapes)).jaxpr


def image(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID")


def rounds(n, fn):
    return lambda x: lax.scan(lambda carry, _: (fn(carry), None), x, length=n)[0]


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (lambda x, y: x @ y, [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (lambda x, y: x @ y, [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        (image, [(2, 3, 8, 8), (6, 3, 4, 4)], 2 * (2 * 6 * 5 * 5) * (3 * 4 * 4)),
        (lambda x: jnp.tanh(x) + 1, [(4, 5)], 20 + 20),
        (lambda x: x < 0.5, [(4, 5)], 20),
        (lambda x: jnp.sum(x, 0), [(4, 5)], 20),
        (lambda x: jnp.argmax(x, 0), [(4, 5)], 20),
        (lambda x: x.at[jnp.array([0, 2])].add(jnp.ones((2, 5))), [(4, 5)], 10),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"), [(4, 6)], (2 * 3) * 4),
        (lambda x: lax.sort(x), [(3, 8)], 24 * 3),
        (jax.jit(lambda x, y: x @ y), [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (jax.checkpoint(lambda x, y: x @ y), [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (rounds(9, lambda x: x @ x), [(4, 4)], 9 * 2 * 4**3),
        (rounds(9, rounds(5, lambda x: x @ x)), [(4, 4)], 9 * 5 * 2 * 4**3),
        (lambda x: lax.cond(True, lambda x: x @ x, lambda x: x + 1, x), [(4, 4)], 2 * 4**3),
        (lambda x: jnp.concatenate([x.T.reshape(20), x.reshape(20)])[::2], [(4, 5)], 0),
        (lambda x: (x.astype(jnp.int32) + 1) @ jnp.ones((5, 2), jnp.int32), [(4, 5)], 0),
    ],
    ids=["matrices", "batch", "convolution", "elementwise", "comparison", "sum", "argmax", "scatter-add", "pooling", "sort",
         "in a jit", "in a checkpoint", "in a scan", "in two scans", "in a branch", "moves of data", "integers"],
)  # fmt: skip
def test_a_count_equals_the_count_by_hand(fn, shapes, expected):
    assert count_flops(jaxpr(fn, *shapes)) == Flops(expected)


def test_the_gradient_of_a_linear_layer_needs_two_products_more():
    """The forward pass, the gradient of the weights and the gradient of the inputs are three products of the same size."""

    def loss(w, x):
        return jnp.sum(x @ w)

    product, results = 2 * 3 * 5 * 7, 3 * 7
    assert count_flops(jaxpr(loss, (5, 7), (3, 5))) == Flops(product + results)
    both = jax.value_and_grad(loss, (0, 1))
    assert count_flops(jaxpr(both, (5, 7), (3, 5))) == Flops(3 * product + results)


def test_the_rounds_of_a_while_loop_are_unknown_so_the_count_is_a_lower_bound():
    loop = jaxpr(lambda x: lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ x, x), (4, 4))
    assert count_flops(loop) == Flops(2 * 4**3 + 1, at_least=True)
    inside = jaxpr(rounds(3, lambda x: lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ x, x)), (4, 4))
    assert count_flops(inside) == Flops(3 * (2 * 4**3 + 1), at_least=True)


def test_a_while_loop_over_integers_has_exactly_no_flops():
    assert count_flops(jaxpr(lambda x: (x, lax.while_loop(lambda i: i < 9, lambda i: 2 * i, 1)), (4,))) == Flops(0)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.linalg.cholesky(x) + 1,
        lambda x: jnp.fft.fft(x),
        rounds(3, lambda x: jnp.linalg.cholesky(x)),
        lambda x: lax.while_loop(lambda x: x[0, 0] < 1, lambda x: jnp.linalg.cholesky(x), x),
        lambda x: lax.cond(True, lambda x: jnp.linalg.cholesky(x), lambda x: x, x),
        lambda x: jax.pure_callback(lambda x: x, x, x),
    ],
    ids=["cholesky", "fft", "in a scan", "in a while loop", "in a branch", "Python"],
)
def test_what_is_not_known_makes_the_count_unknown(fn):
    assert count_flops(jaxpr(fn, (4, 4))) == Flops(None)


def test_a_primitive_of_the_user_is_unknown_although_its_name_is_add():
    mine = jec.Primitive("add")
    mine.def_abstract_eval(lambda x: x)
    assert count_flops(jax.make_jaxpr(lambda x: mine.bind(x))(jnp.ones(3)).jaxpr) == Flops(None)


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (Flops(0), "0 FLOP"),
        (Flops(999), "999 FLOP"),
        (Flops(1000), "1 kFLOP"),
        (Flops(999_499), "999 kFLOP"),
        (Flops(999_500), "1 MFLOP"),
        (Flops(51_600_000_000), "51.6 GFLOP"),
        (Flops(1234, at_least=True), "at least 1.23 kFLOP"),
        (Flops(None), "FLOPs unknown"),
    ],
)
def test_a_number_is_printed_with_a_unit(flops, text):
    assert format_flops(flops.number, at_least=flops.at_least) == text


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (lambda x: x + 1, [(4, 4)], 0),
        (lambda x, y: x @ y, [(3, 5), (5, 7)], 3 * 5 * 7),
        (lambda x, y: x @ y, [(2, 3, 5), (2, 5, 7)], 2 * 3 * 5 * 7),
        (image, [(2, 3, 8, 8), (6, 3, 4, 4)], (2 * 6 * 5 * 5) * (3 * 4 * 4)),
        (jax.jit(lambda x, y: x @ y), [(3, 5), (5, 7)], 3 * 5 * 7),
        (rounds(9, lambda x: x @ x), [(4, 4)], 4 * 4 * 4),
        (lambda x, y: (x @ y, y @ x), [(3, 50), (50, 3)], 50 * 3 * 50),
    ],
    ids=["none", "matrices", "batch", "convolution", "in a jit", "in a scan: one round", "the largest of two"],
)
def test_the_size_of_a_product_is_its_number_of_multiplications(fn, shapes, expected):
    assert largest_product(jaxpr(fn, *shapes)) == expected
