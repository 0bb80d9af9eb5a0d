"""Read a leaf of the carry from the sites that hold its blocks, without having the whole leaf in memory.

A checkpoint stores the elements of a leaf in C order. If replicas divide a leaf along its axis 1, this order alternates between
the sites:

    leaf [3, 4]     site 0 holds [3, 2]     site 1 holds [3, 2]        order: a b A B  c d C D  e f E F
                         a b                     A B
                         c d                     C D
                         e f                     E F

The block of a site is used as a matrix of shape [outer, inner]. `outer` is the product of the lengths of all axes before the
divided axis. An *extent* is some rows of all sites, or a part of one row of one site.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from choreo.partition.program import Axis
from choreo.runtime.engine.backend import Site

Sized = TypeVar("Sized")


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Consecutive elements of a leaf, in C order."""

    leaf: int
    """The number of the leaf."""
    sites: tuple[Site, ...]
    """The sites that hold the elements."""
    outer: int
    """The number of rows of a site's block."""
    rows: tuple[int, int]
    """The first row of the extent, and the row after its last one."""
    columns: tuple[int, int]
    """The first element in each of these rows, and the element after the last one."""
    size_bytes: int
    """The size of all elements of the extent, at all its sites."""

    def take(self, block: np.ndarray) -> np.ndarray:
        """The elements [row, column] of this extent in the block of one site."""
        return block.reshape(self.outer, -1)[slice(*self.rows), slice(*self.columns)]

    def join(self, taken: list[np.ndarray]) -> np.ndarray:
        """The elements of this extent in C order. `taken` holds the result of `take` for each of its sites."""
        return (taken[0] if len(taken) == 1 else np.concatenate(taken, axis=1)).reshape(-1)


def extents(
    leaf: int, shape: tuple[int, ...], itemsize: int, axis: Axis, sites: tuple[Site, ...], most_bytes: int
) -> Iterator[Extent]:
    """The extents of a leaf in C order, each of at most `most_bytes`, but of at least one element.

    `shape` and `itemsize` are those of the whole leaf in host memory. The sites hold equal blocks along `axis`.
    """
    size, outer = math.prod(shape), 1 if axis is None or len(sites) == 1 else math.prod(shape[:axis])
    if size == 0:
        return
    inner = size // outer // len(sites)
    row_bytes = len(sites) * inner * itemsize
    if row_bytes <= most_bytes:
        step = most_bytes // row_bytes
        for row in range(0, outer, step):
            stop = min(row + step, outer)
            yield Extent(leaf=leaf, sites=sites, outer=outer, rows=(row, stop), columns=(0, inner),
                       size_bytes=(stop - row) * row_bytes)  # fmt: skip
        return
    step = max(1, most_bytes // itemsize)
    for row in range(outer):
        for site in sites:
            for column in range(0, inner, step):
                stop = min(column + step, inner)
                yield Extent(leaf=leaf, sites=(site,), outer=outer, rows=(row, row + 1), columns=(column, stop),
                           size_bytes=(stop - column) * itemsize)  # fmt: skip


def chunks(items: Iterable[Sized], size_bytes: Callable[[Sized], int], most_bytes: int) -> Iterator[list[Sized]]:
    """Divide items into chunks of at most `most_bytes`, in the same order. A larger item is a chunk of its own."""
    chunk, total = [], 0
    for item in items:
        if chunk and total + size_bytes(item) > most_bytes:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size_bytes(item)
    if chunk:
        yield chunk
