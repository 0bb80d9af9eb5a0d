"""`Backend`: every operation of a `Machine` on compiled functions and device arrays.

Two classes implement it: `PythonOnly`, for processes that run only Python, and `JaxBackend` in `jax_backend.py`. Nothing
here imports JAX.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from choreo.partition.program import KeyType, Move, Program, Ref, Segment, Transfer
from choreo.types import GroupName

Site = tuple[GroupName, int]
"""A group, and the number of one of its replicas."""
Timed = Callable[[str, str, Callable[..., Any]], Callable[..., Any]]
"""(kind of work, name, function) -> the same function, timed; see `profile.py`."""


@runtime_checkable
class Loaded(Protocol):
    """A function that is compiled when it is first called."""

    call: Callable[..., Any]
    """The function to call. The first call replaces this attribute, so read it anew for every call."""


@runtime_checkable
class Backend(Protocol):
    """Operations on compiled functions and device arrays."""

    def load(self, segment: Segment, replica: int = 0) -> Loaded:
        """The function `(replica, step, *inputs) -> results` of a segment, compiled for the device of one replica."""
        ...

    def scalar(self, number: int) -> Any:
        """A number in the form that a compiled function takes fastest."""
        ...

    def to_host(self, value: Any) -> np.ndarray:
        """A value as a numpy array; random keys as their key data."""
        ...

    def on_host(self, value: Any) -> bool:
        """Is the value in host memory, so that `to_host` copies nothing?"""
        ...

    def load_together(self, segment: Segment, here: Sequence[int], replicas: int) -> Callable[..., list[Sequence[Any]]]:
        """A function whose replicas combine values: `(step, inputs of each replica here) -> results of each of them`."""
        ...

    def from_host(self, array: np.ndarray, like: Any, site: Site) -> Any:
        """A received array on the device of a site; `like` has the type of the value."""
        ...

    def host_type(self, like: Any) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of `to_host(value)`, for a value of the type of `like`."""
        ...

    def stack(self, slices: list[Any], like: Any) -> Any:
        """The slices of all steps of a loop, stacked; `like` has the type of the stack."""
        ...

    def reshard(self, parts: list[Any], move: Move, receiver: int, receivers: int, transfer: Transfer) -> Any:
        """The value of one receiver, from the `parts` that the senders hold; all senders are in this process."""
        ...

    def key(self, data: np.ndarray, site: Site) -> Any:
        """A random key from its key data."""
        ...

    def fold_in(self, key: Any, number: int) -> Any:
        """`jax.random.fold_in`."""
        ...

    def copy(self, value: Any) -> Any:
        """A copy that shares no memory with the value."""
        ...

    def own(self, values: list[Any], refs: Sequence[Ref | None]) -> list[Any]:
        """The leaves of a new carry, such that no two share memory: a segment may donate each of them."""
        ...

    def iteration_loop(self, program: Program, segment: Segment, num_carry: int, here: Sequence[int]) -> Any:
        """An `IterationLoop`, which runs several iterations in one compiled call; None if this segment cannot be looped."""
        ...


def host_type(like: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a value in host memory; random keys are their key data."""
    if isinstance(like.dtype, KeyType):
        return (*like.shape, like.dtype.words), np.dtype(np.uint32)
    return tuple(like.shape), np.dtype(like.dtype)


class PythonOnly:
    """The `Backend` of a process that runs only Python."""

    def load(self, segment: Segment, replica: int = 0) -> Loaded:
        raise AssertionError(f"`{segment.group}` runs Python only, but its program has the segment `{segment.name}`")

    def scalar(self, number: int) -> int:
        return number

    def to_host(self, value: Any) -> np.ndarray:
        return np.asarray(value)

    def on_host(self, value: Any) -> bool:
        return True

    def load_together(self, segment: Segment, here: Sequence[int], replicas: int) -> Callable[..., list[Sequence[Any]]]:
        raise AssertionError(f"`{segment.group}` runs Python only, but its program has the segment `{segment.name}`")

    def from_host(self, array: np.ndarray, like: Any, site: Site) -> np.ndarray:
        return array

    def host_type(self, like: Any) -> tuple[tuple[int, ...], np.dtype]:
        return host_type(like)

    def stack(self, slices: list[Any], like: Any) -> np.ndarray:
        return np.stack(slices) if slices else np.empty(*host_type(like))

    def reshard(self, parts: list[Any], move: Move, receiver: int, receivers: int, transfer: Transfer) -> Any:
        raise AssertionError("a process that only runs Python holds sites of one group")

    def key(self, data: np.ndarray, site: Site) -> np.ndarray:
        return data

    def fold_in(self, key: Any, number: int) -> np.ndarray:
        return key  # nothing here draws random numbers

    def copy(self, value: Any) -> Any:
        return np.array(value)

    def own(self, values: list[Any], refs: Sequence[Ref | None]) -> list[Any]:
        return values  # nothing here donates memory

    def iteration_loop(self, program: Program, segment: Segment, num_carry: int, here: Sequence[int]) -> Any:
        raise AssertionError("a process that only runs Python has no compiled segment")
