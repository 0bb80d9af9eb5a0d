"""One worker, as the coordinator sees it: its process, its control connection, its output."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from choreo.runtime.coordinator.launcher import ControlConnection, WorkerProcess

LAST_LINES = 60
"""How many lines of a worker's output are kept. If the worker dies without a report, the error shows these lines. A
traceback of all threads usually fits into them."""


@dataclass(eq=False)
class WorkerHandle:
    """One worker, as the coordinator sees it."""

    name: str
    """The worker's name, for example `env+actor-0`."""
    process: WorkerProcess
    """The worker's process, on this machine or on another host."""
    control: ControlConnection
    """The connection for commands and replies."""
    lines: "deque[str]" = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    """The last lines of the worker's output."""
    unfinished_line: bytes = b""
    """Output after the last line break."""
    control_open: bool = True
    """False after the worker has reported an error, or after its control connection has closed."""
    reading: bool = False
    """True while a frame is being received, and for ever if Ctrl-C interrupts `receive_frame`: then no frame can be read any more,
    because nobody knows where the next frame begins."""
    sending: bool = False
    """True while a frame is being sent, and for ever if Ctrl-C interrupts `send_frame`: then no frame can be sent any more, because
    the worker would take its bytes for the rest of the interrupted frame."""
    state: str = "starting"
    """What the worker is doing, for people to read."""
    end_noted: bool = False
    """True after the state machine was told that the process has ended, or cannot be reached."""

    def has_frame(self, ready: Collection[Any]) -> bool:
        """Return True if a frame, or the end of the connection, can be read. `ready` holds the sockets that are ready."""
        return self.control_open and self.control.has_bytes([each for each in self.control.pollable if each in ready])

    def read_output(self) -> tuple[list[str], bool]:
        """Read new output of the worker. Returns its complete lines, and True if there was any new output.

        One call does not always read all new output: to read all of it, call this function until the second result is False.
        When the output has ended, its last line counts as complete, even without a line break.
        """
        data, ended = self.process.read_output()
        *lines, self.unfinished_line = (self.unfinished_line + data).split(b"\n")
        if ended and self.unfinished_line and not data:
            lines, self.unfinished_line = [*lines, self.unfinished_line], b""
        return [line.decode(errors="replace") for line in lines], bool(data)

    @property
    def whereabouts(self) -> str:
        """The worker's process and host, for messages."""
        where = "" if self.process.address is None else f" on {self.process.address}"
        return f"process {self.process.pid}{where}"
