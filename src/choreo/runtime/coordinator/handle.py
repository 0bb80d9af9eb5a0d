"""One worker, as the coordinator sees it: its process, its control connection, its output."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from choreo.runtime.coordinator.remote import RemoteProcess
from choreo.runtime.coordinator.tunnel import Tunnel

LAST_LINES = 60
"""How many lines of a worker's output are kept. If the worker dies without a report, the error shows these lines. They are
enough for a traceback of all threads."""


@dataclass(eq=False)
class WorkerHandle:
    """One worker, as the coordinator sees it."""

    name: str
    """The worker's name, for example `env+actor-0`."""
    process: "subprocess.Popen[bytes] | RemoteProcess"
    """The worker's process, on this machine or on another host."""
    control: socket.socket | Tunnel
    """The connection for commands and replies."""
    lines: "deque[str]" = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    """The last lines of the worker's output."""
    unfinished_line: bytes = b""
    """Output after the last line break."""
    output_closed: bool = False
    """True after a worker on this machine has closed its output."""
    error: dict[str, Any] | None = None
    """The error report of the worker, if it sent one before it ended."""
    control_open: bool = True
    """False after the worker has reported an error, or after its control connection has closed."""
    state: str = "starting"
    """What the worker is doing, for people to read."""
    uses_collectives: bool = False
    """True if the worker combines values with other workers inside compiled programs."""

    @classmethod
    def start_here(cls, name: str, variables: Mapping[str, str], fds: Collection[int]) -> "WorkerHandle":
        """Start a worker on this machine.

        The worker inherits the environment variables of this process and the file descriptors `fds`. `variables` are
        additional environment variables.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                # -P: Python must not import modules from the current folder.
                [sys.executable, "-P", "-m", "choreo.runtime.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *fds],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                # In a new session, Ctrl-C does not reach the worker, and `kill` can end all processes of its environments.
                start_new_session=True,
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return cls(name, process, ours)

    @property
    def control_sources(self) -> list[Any]:
        """Sockets or descriptors to poll. When one of them is ready, a frame may have arrived, or the connection has ended."""
        return self.control.pollable if isinstance(self.control, Tunnel) else [self.control.fileno()]

    @property
    def output_sources(self) -> list[Any]:
        """Sockets or descriptors to poll for the worker's output."""
        if isinstance(self.process, RemoteProcess):
            return self.process.pollable
        return [] if self.process.stdout is None or self.output_closed else [self.process.stdout.fileno()]

    def has_frame(self, ready: Collection[Any]) -> bool:
        """Return True if `receive_frame` can read a frame, or the end of the connection, without waiting.

        `ready` holds the `control_sources` that are ready.
        """
        if not isinstance(self.control, Tunnel):
            return bool(ready)
        if self.control.monitor in ready:
            self.control.check_connection()
        return self.control.pending or self.control.lost or self.control.socket in ready

    def read_output(self) -> tuple[list[str], bool]:
        """Read new output of the worker. Returns its complete lines, and True if there was any new output.

        One call does not always read all new output: to read all of it, call this function until the second result is False.
        When the output has ended, its last line counts as complete, even without a line break.
        """
        if isinstance(self.process, RemoteProcess):
            data = self.process.read_messages()
            ended = not data and self.process.poll() is not None
        elif self.process.stdout is None or self.output_closed:
            return [], False
        else:
            try:
                data = os.read(self.process.stdout.fileno(), 65536)
            except BlockingIOError:
                return [], False
            ended = self.output_closed = not data
        *lines, self.unfinished_line = (self.unfinished_line + data).split(b"\n")
        if ended and self.unfinished_line:
            lines, self.unfinished_line = [self.unfinished_line], b""
        return [line.decode(errors="replace") for line in lines], bool(data)

    def kill(self) -> None:
        """Kill a worker on this machine, and the processes that its environments have started.

        For a worker on another host, this method does nothing: `close` ends that worker.
        """
        if isinstance(self.process, subprocess.Popen):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the worker has already ended
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close all connections. If the worker is on another host, its agent then kills the worker."""
        self.control.close()
        if isinstance(self.process, RemoteProcess):
            self.process.close()
        elif self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def is_alive(self) -> bool:
        """Whether the worker is running. A worker on another host counts as ended when the connection to its agent is lost."""
        reachable = not isinstance(self.process, RemoteProcess) or self.process.is_connected
        return self.process.poll() is None and reachable

    @property
    def whereabouts(self) -> str:
        """The worker's process and host, for messages."""
        process = self.process
        where = f" on {process.host.address}" if isinstance(process, RemoteProcess) else ""
        return f"process {process.pid}{where}"
