"""`LocalLauncher`: starts workers as child processes on this machine.

A worker inherits one end of a socket pair as its control socket, and a pipe to which it writes its output.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from typing import Any, Literal

from choreo.runtime.coordinator.launcher import LostSight


class LocalLauncher:
    """Starts workers on this machine."""

    shared_memory: Literal["inherited"] = "inherited"

    def start(self, name: str, variables: Mapping[str, str], fds: Collection[int] = ()) -> "LocalProcess":
        """Start a worker as a child process."""
        ours, theirs = socket.socketpair()
        try:
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
        except BaseException:
            ours.close()
            raise
        return LocalProcess(process, ours)


class LocalProcess:
    """A child process that is a worker."""

    address = None

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket):
        assert process.stdout is not None
        self._process, self._control, self._output = process, SocketConnection(control), process.stdout
        os.set_blocking(self._output.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def connect(self, deadline: float) -> "SocketConnection":
        return self._control

    @property
    def pollable(self) -> list[int]:
        return [] if self._output.closed else [self._output.fileno()]

    def read_output(self) -> tuple[bytes, bool]:
        if self._output.closed:
            return b"", True
        try:
            data = os.read(self._output.fileno(), 65536)
        except BlockingIOError:
            return b"", False
        if not data:
            self._output.close()  # a pipe that has ended would be ready in every poll
        return data, not data

    def poll(self) -> int | None:
        return self._process.poll()

    def lost_sight(self) -> LostSight | None:
        return None

    def wait(self, timeout_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the worker has already ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._control.close()
        self._output.close()


class SocketConnection:
    """A control connection through a socket."""

    def __init__(self, sock: socket.socket):
        self._socket = sock

    @property
    def pollable(self) -> list[Any]:
        return [self._socket.fileno()]

    def has_bytes(self, ready: Collection[Any]) -> bool:
        return bool(ready)

    def send(self, data: Any, /) -> int:
        return self._socket.send(data)

    def recv_into(self, view: memoryview, /) -> int:
        return self._socket.recv_into(view)

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._socket.close()
