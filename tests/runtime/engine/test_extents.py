"""The extents of a leaf are small, and cover each element of the leaf once, in C order. `chunks` puts small extents together."""

import itertools

import numpy as np
import pytest

from choreo.runtime.engine.extents import chunks, extents

SHAPES = [(), (0, 4), (12,), (4, 6), (6, 4, 2), (2, 1, 4, 6)]
CASES = [
    (shape, axis, replicas)
    for shape in SHAPES
    for axis, replicas in itertools.product([None, *range(len(shape))], [1, 2])
    if axis is None or shape[axis] % replicas == 0
]


@pytest.mark.parametrize("most_bytes", [1, 8, 20, 64, 10_000])
@pytest.mark.parametrize(("shape", "axis", "replicas"), CASES)
def test_extents_have_all_elements_in_order(shape, axis, replicas, most_bytes):
    leaf = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    sites = tuple(("env", r) for r in range(1 if axis is None else replicas))
    blocks = dict(zip(sites, [leaf] if axis is None else np.split(leaf, replicas, axis), strict=True))
    joined = []
    for each in extents(3, shape, leaf.itemsize, axis, sites, most_bytes):
        elements = each.join([each.take(blocks[site]) for site in each.sites])
        assert each.leaf == 3 and elements.ndim == 1
        assert elements.nbytes == each.size_bytes <= max(most_bytes, leaf.itemsize)
        joined.append(elements)
    assert np.concatenate([*joined, np.empty(0, np.int32)]).tobytes() == leaf.tobytes()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([3, 3, 3], [[0, 1, 2]]),
        ([9, 1, 1], [[0, 1], [2]]),
        ([1, 50, 1, 50, 50], [[0], [1], [2], [3], [4]]),
        ([0, 10, 0], [[0, 1, 2]]),
    ],
)
def test_a_chunk_holds_at_most_ten_bytes_or_one_larger_item(sizes, expected):
    assert list(chunks(range(len(sizes)), lambda i: sizes[i], 10)) == expected
