"""How long a worker may be silent: the only place with these times.

    beat_s     the coordinator asks a worker that it waits for whether the worker is alive
    named_s    the worker has not answered: one line names it
    stuck_s    the worker answers, but its main thread does not move: one line names it and shows where it is
    dead_s     the worker has not answered: the run ends with an error that names it

A *heartbeat* is the answer of a thread of the worker: it arrives even if the main thread is busy. *Progress* means that the
main thread moves. Only a missing heartbeat ends a run. An ended process or a closed connection ends a run at once.
"""

import math
from dataclasses import dataclass

from choreo.errors import RunError

LONGEST_S = 1e6
"""The longest time that can be given; ZeroMQ counts milliseconds in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Silence:
    """The times after which a silent worker is named, and after which it counts as dead."""

    dead_s: float = 300.0
    """A worker without a heartbeat for this time is dead; `--silence` sets this time."""
    named_s: float = 10.0
    """A worker without a heartbeat for this time is named."""
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
        """The time between two heartbeats of a worker that the coordinator waits for."""
        return min(2.0, self.named_s / 4, self.dead_s / 4)

    @property
    def connection_s(self) -> float:
        """The limit for connections: ZeroMQ counts a silent peer as lost after this time.

        It is longer than `dead_s`, so that the coordinator, which knows all workers, names the silent worker first.
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
