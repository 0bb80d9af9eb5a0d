"""`Runtime`: the interface of all runtimes. A runtime executes a plan. In lockstep, all runtimes give the same bits for a plan."""

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from choreo.host.states import HostStates
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

    def host_states(self) -> HostStates:
        """The states of all Python objects, such as environments; `lost` names the objects whose state cannot be stored."""
        ...

    def load_host_states(self, states: HostStates) -> None:
        """Let all Python objects continue from these states, which any layout may have stored. Call `restore` before or after.

        Raises RunError if a state is missing or does not fit the plan.
        """
        ...

    def close(self) -> None:
        """End all processes and environments that this runtime has started."""
        ...
