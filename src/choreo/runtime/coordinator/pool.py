"""All workers of a run. The pool waits for them, reads their frames, passes on their output, and ends them.

The pool has no threads: it reads output and frames while the coordinator waits for workers. The pool usually notices the end of
a worker at once, because the worker's control connection closes; see `ended` for the exception.
"""

import contextlib
import time
import traceback
from collections.abc import Callable
from typing import Any

import zmq

from choreo.runtime.coordinator.control_frames import PROGRESS, Frame, WireError, receive_frame, send_frame
from choreo.runtime.coordinator.handle import WorkerHandle

GRACE_S = 2.0
"""How long workers may take to end after the command `stop`. Also, after a failure, how long the coordinator searches for the
worker that failed first."""
NOISE = "[Gloo] Rank "
"""Output lines that begin with this text are not passed on. Gloo prints such a line at each connection."""


class WorkerPool:
    """The workers of a run, by name."""

    def __init__(
        self,
        on_output: Callable[[str, str], None],
        on_states: Callable[[dict[str, str]], None] | None = None,
    ):
        """`on_output(worker, line)` is called for every line that a worker prints. `on_states` is called with `states()`
        when a worker reports progress."""
        self.on_output, self.on_states = on_output, on_states
        self.handles: dict[str, WorkerHandle] = {}
        self._poller = zmq.Poller()

    def add(self, handle: WorkerHandle) -> None:
        """Add a worker. From now on `select` listens to this worker, and `kill` ends it."""
        self.handles[handle.name] = handle
        self.listen(handle)
        for source in handle.output_sources:
            self._poller.register(source, zmq.POLLIN)

    def listen(self, handle: WorkerHandle) -> None:
        for source in handle.control_sources:
            self._poller.register(source, zmq.POLLIN)

    def stop_listening(self, handle: WorkerHandle) -> None:
        handle.control_open = False
        for source in handle.control_sources:
            self._unregister(source)

    def states(self) -> dict[str, str]:
        """What each worker is doing, for people to read."""
        return {name: handle.state for name, handle in self.handles.items()}

    def select(self, *, timeout_s: float) -> list[WorkerHandle]:
        """Wait up to `timeout_s` seconds until a worker prints or sends something. Pass on the output of all workers.

        Returns the workers from which `receive` can read a frame, or the end of the connection, without waiting.
        """
        talking = [handle for handle in self.handles.values() if handle.control_open]
        frame_waits = any(handle.has_frame(()) for handle in talking)
        ready = {source for source, _ in self._poller.poll(0 if frame_waits else int(1000 * timeout_s))}
        for handle in self.handles.values():
            if not ready.isdisjoint(handle.output_sources):
                self._pass_on_output(handle)
        return [handle for handle in talking if handle.has_frame(ready.intersection(handle.control_sources))]

    def receive(self, handle: WorkerHandle) -> Frame | None:
        """Receive a worker's next frame. Returns None if the worker ended or reported an error; the report is in `handle.error`."""
        # If Ctrl-C interrupts `receive_frame`, `control_open` stays False, because the rest of the frame cannot be read any more.
        handle.control_open = False
        try:
            frame = receive_frame(handle.control)
        except WireError as error:
            frame = _report_of(error, handle.name), []
        if frame is None or frame[0]["kind"] == "error":
            handle.error = frame and frame[0]
            self.stop_listening(handle)
            return None
        handle.control_open = True
        if frame[0]["kind"] == PROGRESS:
            handle.state = f"iteration {frame[0]['iteration']}"
            if self.on_states is not None:
                self.on_states(self.states())
        return frame

    def ended(self) -> list[WorkerHandle]:
        """Workers whose process has ended.

        The end of a process usually closes its control connection. But a process that the worker started can keep it open.
        """
        return [handle for handle in self.handles.values() if handle.process.poll() is not None]

    def close(self) -> None:
        """Tell all workers to stop, so that they close their environments. After GRACE_S, kill the workers that still run."""
        deadline = time.monotonic() + GRACE_S
        try:
            for handle in self.handles.values():
                handle.control.settimeout(GRACE_S)
                with contextlib.suppress(OSError):  # the worker may have ended already
                    send_frame(handle.control, {"kind": "stop"})
                if not handle.control_open:
                    self.stop_listening(handle)
            while any(handle.is_alive for handle in self.handles.values()) and time.monotonic() < deadline:
                for handle in self.select(timeout_s=0.02):
                    self.receive(handle)
        except TimeoutError:
            return  # a worker stopped in the middle of a frame
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all workers and the processes that their environments have started, and pass on their last output."""
        handles = list(self.handles.values())
        self.handles.clear()
        for handle in handles:
            handle.kill()
        try:
            for handle in handles:
                handle.process.wait()
            for handle in handles:  # after all waits: `on_output` may raise the error of a subscriber
                while self._pass_on_output(handle):
                    pass
        finally:
            for handle in handles:
                handle.close()

    def _pass_on_output(self, handle: WorkerHandle) -> bool:
        """Pass on the new output of a worker. Returns False if there was no new output."""
        before = handle.output_sources
        lines, more = handle.read_output()
        for source in before:
            if source not in handle.output_sources:  # a closed pipe would be ready in every poll
                self._unregister(source)
        for line in lines:
            if not line.startswith(NOISE):
                handle.lines.append(line)
                self.on_output(handle.name, line)
        return more

    def _unregister(self, source: Any) -> None:
        if source in self._poller:
            self._poller.unregister(source)


def _report_of(error: WireError, worker: str) -> dict[str, Any]:
    """The error report for a worker that sent invalid bytes instead of a frame."""
    trace = "".join(traceback.format_exception(error))
    return {"kind": "error", "known": True, "type": "RunError", "what": error.what, "fix": None,
            "places": {"worker": worker}, "traceback": trace}  # fmt: skip
