"""What a runtime does with compiled functions and device arrays: an interface, and its form for sites that compile nothing.

Nothing here imports JAX; `device.py` does.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from choreo.partition.program import KeyType, Move, Program, Ref, Segment, Transfer
from choreo.types import GroupName

Site = tuple[GroupName, int]
"""A group and the number of one of its replicas."""
Watch = Callable[[str, str, Callable[..., Any]], Callable[..., Any]]
"""From a kind of work, its name and a function to the same function, timed."""


@runtime_checkable
class Loaded(Protocol):
    """A function that is compiled when it is first called."""

    call: Callable[..., Any]
    """Not the same after that: to be looked up whenever it is called."""


@runtime_checkable
class Backend(Protocol):
    """What can be done with compiled functions and device arrays."""

    def load(self, segment: Segment, replica: int = 0) -> Loaded:
        """The compiled function `(replica, step, *inputs) -> results`, to run at one of the replicas."""
        ...

    def scalar(self, number: int) -> Any:
        """A number as a compiled function likes it best."""
        ...

    def to_host(self, value: Any) -> np.ndarray:
        """A value as numpy, to be sent."""
        ...

    def on_host(self, value: Any) -> bool:
        """Is it cheap to read from Python?"""
        ...

    def load_together(self, segment: Segment, here: Sequence[int], replicas: int) -> Callable[..., list[Sequence[Any]]]:
        """A compiled function whose replicas combine values: `(step, inputs of each replica here) -> results of each`."""
        ...

    def from_host(self, array: np.ndarray, like: Any, site: Site) -> Any:
        """What was received, on the site's device; `like` tells its type."""
        ...

    def host_type(self, like: Any) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and type of a value as it is sent."""
        ...

    def stack(self, slices: list[Any], like: Any) -> Any:
        """Slices of a loop as one array."""
        ...

    def reshard(self, parts: list[Any], move: Move, receiver: int, receivers: int, transfer: Transfer) -> Any:
        """What a receiver here gets from senders that are all here."""
        ...

    def key(self, data: np.ndarray, site: Site) -> Any:
        """A random key from its numbers."""
        ...

    def fold_in(self, key: Any, number: int) -> Any:
        """Another random key."""
        ...

    def copy(self, value: Any) -> Any:
        """The same in memory of its own."""
        ...

    def own(self, values: list[Any], refs: Sequence[Ref | None]) -> list[Any]:
        """What is carried on, each value in memory of its own."""
        ...

    def chunks(self, program: Program, segment: Segment, num_carry: int, here: Sequence[int]) -> Any:
        """Runs several iterations at once."""
        ...


def host_type(like: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of a value as it is sent: random keys go as their numbers."""
    if isinstance(like.dtype, KeyType):
        return (*like.shape, like.dtype.words), np.dtype(np.uint32)
    return tuple(like.shape), np.dtype(like.dtype)


class PythonOnly:
    """The `Backend` of sites that compile nothing."""

    def load(self, segment: Segment, replica: int = 0) -> Loaded:
        raise AssertionError(f"`{segment.group}` was to run nothing but Python, and got the segment `{segment.name}`")

    def scalar(self, number: int) -> int:
        return number

    def to_host(self, value: Any) -> np.ndarray:
        return np.asarray(value)

    def on_host(self, value: Any) -> bool:
        return True

    def load_together(self, segment: Segment, here: Sequence[int], replicas: int) -> Callable[..., list[Sequence[Any]]]:
        raise AssertionError(f"`{segment.group}` was to run nothing but Python, and got the segment `{segment.name}`")

    def from_host(self, array: np.ndarray, like: Any, site: Site) -> np.ndarray:
        return array

    def host_type(self, like: Any) -> tuple[tuple[int, ...], np.dtype]:
        return host_type(like)

    def stack(self, slices: list[Any], like: Any) -> np.ndarray:
        return np.stack(slices) if slices else np.empty(*host_type(like))

    def reshard(self, parts: list[Any], move: Move, receiver: int, receivers: int, transfer: Transfer) -> Any:
        raise AssertionError("a worker that only runs Python holds sites of one group")

    def key(self, data: np.ndarray, site: Site) -> np.ndarray:
        return data

    def fold_in(self, key: Any, number: int) -> np.ndarray:
        return key  # nothing here draws random numbers

    def copy(self, value: Any) -> Any:
        return np.array(value)

    def own(self, values: list[Any], refs: Sequence[Ref | None]) -> list[Any]:
        return values  # nothing here takes over memory

    def chunks(self, program: Program, segment: Segment, num_carry: int, here: Sequence[int]) -> Any:
        raise AssertionError("Python alone is never one compiled segment")
