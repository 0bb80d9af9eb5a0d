"""`Launcher`: the interface of everything that starts workers.

    launcher.start(name, variables, fds) ──▶ WorkerProcess       output, exit code, end
                                               └─ connect() ──▶ ControlConnection      commands and replies

There are two launchers: `LocalLauncher` starts child processes, and `AgentLauncher` asks the agent on another host. The
coordinator uses both in the same way, through the protocols below. `choreo.testing.check_launcher` tests whether a launcher keeps
the contract that their docstrings state.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from choreo.errors import RunError


class LauncherError(RunError):
    """A launcher breaks its contract."""


@dataclass(frozen=True, kw_only=True)
class LostSight:
    """Why a launcher cannot reach a process any more."""

    why: str
    """What happened, as a sentence that names the worker."""
    fix: str
    """What to do next."""


@runtime_checkable
class ControlConnection(Protocol):
    """A stream of bytes to a worker. Only one thread uses it."""

    @property
    def pollable(self) -> list[Any]:
        """Sockets or descriptors to poll. When one of them is ready, call `has_bytes`."""
        ...

    def has_bytes(self, ready: Collection[Any]) -> bool:
        """Return True if `recv_into` can return bytes, or the end of the stream, without waiting.

        `ready` holds the elements of `pollable` that are ready. Even if `ready` is empty, the result can be True: the connection
        may hold bytes that have arrived and that `recv_into` has not returned yet.
        """
        ...

    def send(self, data: Any, /) -> int:
        """Send some of these bytes. Returns how many; raises OSError if the worker is gone, TimeoutError after the time limit."""
        ...

    def recv_into(self, view: memoryview, /) -> int:
        """Read at least one byte. Returns how many, or 0 at the end of the stream; raises TimeoutError after the time limit."""
        ...

    def settimeout(self, seconds: float | None) -> None:
        """Set how long `send` and `recv_into` may wait; None means no limit."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class WorkerProcess(Protocol):
    """A worker that a launcher has started."""

    @property
    def pid(self) -> int:
        """The number of the process on its machine."""
        ...

    @property
    def address(self) -> str | None:
        """The address of its host; None on this machine."""
        ...

    def connect(self, deadline: float) -> ControlConnection:
        """Wait until the worker runs; return the control connection. `deadline` is a time of `time.monotonic`.

        Raises RunError with the worker's output if the worker does not start.
        """
        ...

    @property
    def pollable(self) -> list[Any]:
        """Sockets or descriptors to poll. When one of them is ready, call `read_output`."""
        ...

    def read_output(self) -> tuple[bytes, bool]:
        """Read new output without waiting. Returns the bytes, and True if the output has ended, so that no more will come."""
        ...

    def poll(self) -> int | None:
        """The exit code, or None while the process runs or its exit code is unknown. If signal N ended the process: -N."""
        ...

    def lost_sight(self) -> LostSight | None:
        """Why this process cannot be reached any more. None if the process can be reached, or if its exit code is known."""
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the exit code and return it, or None if it does not come in time or the process cannot be reached."""
        ...

    def kill(self) -> None:
        """Kill the process and the processes that it has started. Their output can still be read.

        A launcher that can kill them only by closing the connection does nothing here; then `close` kills them.
        """
        ...

    def close(self) -> None:
        """Close all connections. If the process still runs, this ends the process and the processes that it has started."""
        ...


@runtime_checkable
class Launcher(Protocol):
    """Starts workers in one place."""

    @property
    def shared_memory(self) -> Literal["inherited", "passed"]:
        """How two workers of this launcher, which are on one machine, get a channel in shared memory.

        "inherited": both workers inherit file descriptors of the channel. "passed": one worker passes file descriptors to the
        other. If the passing fails, for example because the workers are in different containers, the two workers use TCP.
        """
        ...

    def start(self, name: str, variables: Mapping[str, str], fds: Collection[int] = ()) -> WorkerProcess:
        """Start a worker. Does not wait until it runs.

        `variables` are environment variables, in addition to those of the process that starts the worker. The worker inherits
        the file descriptors `fds`, which must be empty unless `shared_memory` is "inherited". The worker must end when the
        coordinator ends.
        """
        ...
