"""Commands to workers and their replies. A worker answers every command except `stop` with one reply."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from choreo.runtime.coordinator.control_frames import Frame
from choreo.runtime.coordinator.deployment import Deployment
from choreo.runtime.coordinator.pool import WorkerPool


class Conversation:
    """Sends commands to all workers of a run, and receives their replies.

    If a worker ends or does not reply in time, the method that is running kills all workers and raises the error for the user.
    If several workers have ended, this error is about the worker that failed first.
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
        self.pool.tell(worker, header, arrays)

    def await_replies(self, kind: str, *, doing: str, timeout_s: float | None = None) -> dict[str, Frame]:
        """Wait for the reply of every worker, and return the replies by worker.

        All replies must be of this `kind`. `doing` describes the command in an error message. During the wait, the pool
        passes on the lines that the workers print.
        """
        replies: dict[str, Frame] = {}
        workers = self.deployment.workers
        self.pool.expect_replies(doing=doing, timeout_s=timeout_s)
        while len(replies) < len(workers):
            for worker, frame in self.pool.replies():
                header, _ = frame
                assert header["kind"] == kind, (header, kind)
                replies[worker] = frame
                if "compile_seconds" in header:
                    self.compile_seconds[worker] = header["compile_seconds"]
        return {name: replies[name] for name in workers}
