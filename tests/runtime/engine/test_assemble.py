"""`chunks` divides leaves into chunks of a bounded size."""

import pytest

from choreo.runtime.engine.assemble import chunks


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
def test_a_chunk_holds_at_most_ten_bytes_or_one_larger_leaf(sizes, expected):
    assert list(chunks(range(len(sizes)), lambda i: sizes[i], 10)) == expected
