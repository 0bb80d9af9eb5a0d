"""`Launcher`: the interface of everything that starts workers.

    launcher.start(name, variables, fds) ──▶ WorkerProcess       output, exit code, end
                                               └─ connect() ──▶ ControlConnection      commands and replies

There are two launchers: `LocalLauncher` starts child processes, and `AgentLauncher` asks the agent on another host. Nothing else
in the coordinator knows where a worker runs. `choreo.testing.check_launcher` tests whether a launcher keeps this contract.
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

        `ready` holds those of `pollable` that are ready. With an empty `ready`, bytes that were read earlier may be left.
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
        """Wait until the worker runs; return the control connection. Raises RunError with the worker's output if it does not start.

        `deadline` is a time of `time.monotonic`.
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
        """The exit code, or None while the process runs or its exit code is unknown. A signal N gives -N."""
        ...

    def lost_sight(self) -> LostSight | None:
        """Why this process cannot be reached any more, although its exit code is unknown. None as long as it can be reached."""
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the exit code; None if it does not come in time, or if the process cannot be reached."""
        ...

    def kill(self) -> None:
        """Kill the process and the processes that it has started, if that is possible before `close`. Output can still be read."""
        ...

    def close(self) -> None:
        """Close all connections. At the latest now, the process ends, and so do the processes that it has started."""
        ...


@runtime_checkable
class Launcher(Protocol):
    """Starts workers in one place."""

    @property
    def shared_memory(self) -> Literal["inherited", "passed"]:
        """How two workers of this launcher, which are on one machine, get a channel in shared memory.

        "inherited": they inherit its file descriptors. "passed": one worker passes them to the other. If that fails, for example
        because the workers are in different containers, the two workers use TCP.
        """
        ...

    def start(self, name: str, variables: Mapping[str, str], fds: Collection[int] = ()) -> WorkerProcess:
        """Start a worker. Does not wait until it runs.

        `variables` are environment variables, in addition to those of the process that starts the worker. The worker inherits
        the file descriptors `fds`, which must be empty unless `shared_memory` is "inherited". The worker must end when the
        coordinator ends.
        """
        ...
