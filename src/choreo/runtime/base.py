"""`Runtime`: executes a plan. All runtimes give the same bits for the same plan."""

from typing import Protocol, runtime_checkable

import numpy as np

from choreo.runtime.engine.schedule import VersionRead
from choreo.types import Key, PyTree


@runtime_checkable
class Runtime(Protocol):
    """Executes a plan. Between calls all sites are at a boundary: a consistent cut."""

    @property
    def compile_seconds(self) -> float:
        """Time spent compiling so far."""
        ...

    @property
    def log(self) -> list[VersionRead]:
        """In a relaxed layout, the versions that were read since the caller last cleared this list; otherwise empty."""
        ...

    @property
    def differences(self) -> dict[str, dict[str, str]]:
        """For each host whose versions or CPU differ from this machine: its version of each."""
        ...

    def start(self, key: Key) -> None:
        """Run `init`."""
        ...

    def run(self, first: int, stop: int) -> dict[str, np.ndarray]:
        """Run iterations first .. stop - 1; returns each metric, one entry per iteration."""
        ...

    def carry(self) -> PyTree:
        """The whole carry, gathered from all sites."""
        ...

    def restore(self, carry: PyTree, key: Key) -> None:
        """Continue from this carry, instead of running `init`."""
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...
