"""How long a worker may be silent: the only place with these times.

    beat_s     no sign of life from the worker for this time: the coordinator asks the worker for a heartbeat
    named_s    still no sign of life: a line of output names the worker
    dead_s     still no sign of life: the run ends with an error that names the worker
    stuck_s    the worker answers, but its main thread has not moved for this time: a line names the worker and shows its stack

The coordinator watches a worker in this way while the worker executes a command. A *heartbeat* is the answer of a second thread
of the worker: it arrives even if the main thread is busy. *Progress* means that the main thread moves. Missing progress does not
end a run; a missing heartbeat ends it after `dead_s`, and an ended process or a closed connection at once.
"""

import math
from dataclasses import dataclass

from choreo.errors import RunError

LONGEST_S = 1e6
"""The largest `dead_s`: times are given to ZeroMQ as a number of milliseconds with 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Silence:
    """The times after which a silent worker is named, and after which it counts as dead."""

    dead_s: float = 300.0
    """A worker without a sign of life for this time counts as dead; `--silence` sets this time."""
    named_s: float = 10.0
    """A worker without a sign of life for this time is named."""
    stuck_s: float = 30.0
    """A worker whose main thread has not moved for this time is named, with its stack."""

    def __post_init__(self):
        if not 1.0 <= self.dead_s <= LONGEST_S or math.isnan(self.dead_s):
            raise RunError(
                f"A worker cannot count as dead after {self.dead_s:g} s without a sign of life.",
                fix="Give --silence (silence=) a number of seconds between 1 and 1,000,000; the default is 300.",
            )

    @property
    def beat_s(self) -> float:
        """If a worker that executes a command has given no sign of life for this time, the coordinator asks it for a heartbeat."""
        return min(2.0, self.named_s / 4, self.dead_s / 4)

    @property
    def connection_s(self) -> float:
        """The limit for connections: ZeroMQ counts a silent peer as lost after this time.

        This limit is longer than `dead_s`, so that the coordinator, which knows all workers, names the silent worker first.
        """
        return 1.2 * self.dead_s + 5.0

    @property
    def collective_s(self) -> float:
        """The limit for collectives: JAX aborts a worker whose peer in a collective is silent for this time.

        It is long, because JAX sends two heartbeats in this time, and each costs safety: for some seconds after a worker has sent
        something, gRPC waits for the answer to a ping, and closes the connection of a worker that is suspended then for more
        than 60 s. JAX aborts that worker. This limit of gRPC cannot be set from Python.
        """
        return 10 * self.connection_s
