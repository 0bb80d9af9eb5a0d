"""`Backend`: the operations on compiled functions and device arrays that a `Machine` needs.

Two classes implement this protocol: `PythonOnly`, for processes that run only Python, and `JaxBackend` in `jax_backend.py`.
This module does not import JAX.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from choreo.partition.program import KeyType, Move, Program, Ref, Segment, Transfer
from choreo.plans.step_times import StepPhase
from choreo.types import GroupName

Site = tuple[GroupName, int]
"""A group, and the number of one of its replicas."""


@runtime_checkable
class Timed(Protocol):
    """Wraps functions so that a profile times them; `profile.Recorder.timed` is one."""

    def __call__(
        self,
        kind: str,
        name: str,
        fn: Callable[..., Any],
        *,
        phase: StepPhase | None = None,
        runs: Callable[..., int] | int = 1,
    ) -> Callable[..., Any]:
        """Return a function that does the same as `fn`.

        If `fn` runs exactly one phase of a step, `phase` is this phase. `runs` is how often one call of `fn` runs the phase, or a
        function that returns this number for the arguments of the call.
        """
        ...


def untimed(
    kind: str, name: str, fn: Callable[..., Any], *, phase: StepPhase | None = None, runs: Callable[..., int] | int = 1
) -> Callable[..., Any]:
    """The `Timed` of a run without a profile: returns `fn`."""
    return fn


@runtime_checkable
class Loaded(Protocol):
    """A function that is compiled when it is first called."""

    call: Callable[..., Any]
    """The function to call. The first call replaces this attribute, so read the attribute again for every call."""


@runtime_checkable
class Backend(Protocol):
    """Operations on compiled functions and device arrays."""

    def load(self, segment: Segment, replica: int = 0) -> Loaded:
        """Load a segment for the device of one replica. `call` of the result is `(replica, round, *inputs) -> results`.

        `round` is the round of the loop around the segment; 0 if there is no such loop.
        """
        ...

    def scalar(self, number: int) -> Any:
        """An integer as an argument for compiled functions, in the form that is fastest to pass."""
        ...

    def to_host(self, value: Any) -> np.ndarray:
        """A value as a numpy array. A random key becomes its key data."""
        ...

    def on_host(self, value: Any) -> bool:
        """Return True if the value is in host memory. Then `to_host` makes no copy."""
        ...

    def wait_for(self, values: Any) -> None:
        """Wait until these results of a compiled function are computed.

        A profile needs this, because the call of a compiled function may return before the results are computed.
        """
        ...

    def load_together(self, segment: Segment, here: Sequence[int], replicas: int) -> Callable[..., list[Sequence[Any]]]:
        """Load a segment whose replicas combine values. `here` are the replicas in this process.

        `replicas` is the number of replicas in all processes.
        Returns the function `(round, inputs of each replica here) -> results of each replica here`.
        """
        ...

    def from_host(self, array: np.ndarray, like: Any, site: Site) -> Any:
        """Put a received array on the device of a site. `like` has the shape and dtype of the value."""
        ...

    def host_type(self, like: Any) -> tuple[tuple[int, ...], np.dtype]:
        """The shape and dtype of `to_host(value)`, for a value with the shape and dtype of `like`."""
        ...

    def stack(self, slices: list[Any], like: Any) -> Any:
        """Stack the results of all rounds of a loop. `like` has the shape and dtype of the stack."""
        ...

    def reshard(self, parts: list[Any], move: Move, receiver: int, receivers: int, transfer: Transfer) -> Any:
        """The piece of a value for one receiver, made from the `parts` of all senders. All senders are in this process."""
        ...

    def key(self, data: np.ndarray, site: Site) -> Any:
        """Make a random key from its key data, on the device of a site."""
        ...

    def fold_in(self, key: Any, number: int) -> Any:
        """`jax.random.fold_in`."""
        ...

    def copy(self, value: Any) -> Any:
        """A copy that shares no memory with the value."""
        ...

    def own(self, values: list[Any], refs: Sequence[Ref | None]) -> list[Any]:
        """Return the leaves of a new carry, copied where necessary so that no two leaves share memory.

        The next iteration may donate the memory of each leaf. `refs` says where each leaf comes from.
        """
        ...

    def iteration_loop(self, program: Program, segment: Segment, num_carry: int, here: Sequence[int]) -> Any:
        """An `IterationLoop`, which runs several iterations in one compiled call, or None if the segment cannot run in a loop."""
        ...


def host_type(like: Any) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of a value in host memory, where a random key is its key data."""
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

    def wait_for(self, values: Any) -> None:
        pass  # Python functions return when they have computed their results

    def load_together(self, segment: Segment, here: Sequence[int], replicas: int) -> Callable[..., list[Sequence[Any]]]:
        raise AssertionError(f"`{segment.group}` runs Python only, but its program has the segment `{segment.name}`")

    def from_host(self, array: np.ndarray, like: Any, site: Site) -> np.ndarray:
        return array

    def host_type(self, like: Any) -> tuple[tuple[int, ...], np.dtype]:
        return host_type(like)

    def stack(self, slices: list[Any], like: Any) -> np.ndarray:
        return np.stack(slices) if slices else np.empty(*host_type(like))

    def reshard(self, parts: list[Any], move: Move, receiver: int, receivers: int, transfer: Transfer) -> Any:
        raise AssertionError(
            "a process that runs only Python has sites of one group, so no value moves between its sites"
        )

    def key(self, data: np.ndarray, site: Site) -> np.ndarray:
        return data

    def fold_in(self, key: Any, number: int) -> np.ndarray:
        return key  # a process without JAX draws no random numbers

    def copy(self, value: Any) -> Any:
        return np.array(value)

    def own(self, values: list[Any], refs: Sequence[Ref | None]) -> list[Any]:
        return values  # a process without JAX donates no memory

    def iteration_loop(self, program: Program, segment: Segment, num_carry: int, here: Sequence[int]) -> Any:
        raise AssertionError("a process that runs only Python has no compiled segment")
