"""`Runtime`: the interface of all runtimes. A runtime executes a plan. In lockstep, all runtimes give the same bits for a plan."""

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from choreo.runtime.engine.schedule import VersionRead
from choreo.types import Key, PyTree


@runtime_checkable
class Runtime(Protocol):
    """Executes a plan. Between calls, all sites are at the same boundary, so their state is a consistent cut."""

    @property
    def compile_seconds(self) -> float:
        """Time spent compiling so far."""
        ...

    @property
    def log(self) -> list[VersionRead]:
        """In a relaxed layout, the versions that were read since the caller last cleared this list. In lockstep, an empty list."""
        ...

    @property
    def differences(self) -> dict[str, dict[str, str]]:
        """For each host that differs from this machine: the packages and settings that differ, with the host's values."""
        ...

    def start(self, key: Key) -> None:
        """Run `init`."""
        ...

    def run(self, first: int, stop: int) -> dict[str, np.ndarray]:
        """Run iterations first .. stop - 1. Returns each metric as an array with one entry per iteration."""
        ...

    def carry(self, part: str | None = None) -> PyTree:
        """A copy of the carry, gathered from all sites. With `part` (such as "train"), only this field of the carry."""
        ...

    def stream(self, which: Iterable[int]) -> Iterator[np.ndarray]:
        """The elements of some array leaves of the carry in C order, as flat arrays in host memory, one after the other.

        `which` are the positions of the leaves among all array leaves (`Plan.carry`). A random key is its key data. A leaf
        can arrive in several flat arrays, so that no whole leaf need be in memory. Read and drop all of them before the next
        iteration.
        """
        ...

    def restore(self, carry: PyTree, key: Key) -> None:
        """Continue from this carry instead of running `init`. `key` is the key of the run, as for `start`."""
        ...

    def close(self) -> None:
        """End all processes and environments that this runtime has started."""
        ...
