"""Commands to workers and their replies. A worker answers every command except `stop` with one reply.

Before its reply, a worker may send progress frames, which this module ignores.
"""

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from choreo.runtime.coordinator.control_frames import PROGRESS, Frame, send_frame
from choreo.runtime.coordinator.deployment import Deployment
from choreo.runtime.coordinator.handle import WorkerHandle
from choreo.runtime.coordinator.pool import WorkerPool
from choreo.runtime.coordinator.supervision import WorkerError, end_run


class Conversation:
    """Sends commands to all workers of a run, and receives their replies.

    If a worker ends, each method kills all other workers and raises the error of the worker that failed first.
    """

    def __init__(self, pool: WorkerPool, deployment: Deployment):
        self.pool, self.deployment = pool, deployment
        self.compile_seconds: dict[str, float] = {}
        """How long each worker has compiled so far, according to its last reply."""

    def tell_all(self, header: dict[str, Any], arrays: Iterable[np.ndarray] = ()) -> None:
        """Send one command to all workers."""
        arrays = list(arrays)
        for worker in self.deployment.workers:
            self.tell(worker, header, arrays)

    def tell(self, worker: str, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Send a command to one worker."""
        handle = self.pool.handles[worker]
        try:
            send_frame(handle.control, header, arrays)
        except OSError:
            raise self._ended(handle) from None
        handle.state = header["kind"]

    def await_replies(self, kind: str, *, doing: str, timeout_s: float | None = None) -> dict[str, Frame]:
        """Wait for the reply of every worker, and return the replies by worker. Until then, print what the workers print.

        All replies must be of this `kind`. `doing` describes the command in an error message.
        """
        replies: dict[str, Frame] = {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        workers = self.deployment.workers
        while len(replies) < len(workers):
            if deadline is not None and time.monotonic() > deadline:
                late = ", ".join(f"`{name}`" for name in workers if name not in replies)
                self.pool.kill()
                raise WorkerError(f"{late} did not answer within {timeout_s:g} s while {doing}.",
                                  fix="The machine may be overloaded: use fewer workers.")  # fmt: skip
            for handle in self.pool.select(timeout_s=1.0):
                frame = self.pool.receive(handle)
                if frame is None:
                    raise self._ended(handle)
                header, _ = frame
                if header["kind"] == PROGRESS:
                    continue
                assert header["kind"] == kind, (header, kind)
                replies[handle.name] = frame
                handle.state = "idle"
                if "compile_seconds" in header:
                    self.compile_seconds[handle.name] = header["compile_seconds"]
            for handle in self.pool.ended():
                raise self._ended(handle)
        return {name: replies[name] for name in workers}

    def _ended(self, handle: WorkerHandle) -> Exception:
        return end_run(self.pool, handle, self.deployment)
