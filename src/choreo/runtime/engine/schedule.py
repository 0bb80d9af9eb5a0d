"""The schedule of relaxed runs: which version each worker reads, and which worker's data the learner uses next.

With `max_lag` = k, a reader may use a version that is up to k updates old. Every read is logged, and replaying the log gives
the same run bit for bit. If all sites are in one process, the versions and the workers are drawn at random from a seed.
With several processes, the order of arrival decides.

    merge="all"   one update per iteration, from all workers              log: for update 7, env+actor-1 read version 5
    merge="any"   one update whenever the data of one worker has arrived  log: update 7 is from worker 1, which read version 5
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from choreo.errors import RunError


class VersionRead(NamedTuple):
    """One entry of the log: a worker read a version."""

    reader: str
    """The worker's group and number, for example `env+actor-1`."""
    update: int
    """The number of the update that uses the worker's data."""
    version: int
    """The version that was read. Version n is the state after n updates."""

    @property
    def lag(self) -> int:
        """How many updates old the version was."""
        return self.update - self.version

    @property
    def worker(self) -> int:
        """The number of the worker within its group."""
        return int(self.reader.rpartition("-")[2])


ChooseVersion = Callable[[str, int, int], int]
"""A function `(reader, number of the update, oldest version that is kept) -> version to read`."""


class SeededVersions:
    """Draws lags at random. The same seed gives the same lags. A reader never goes back to an older version."""

    def __init__(self, seed: Iterable[int], max_lag: int):
        self.rng, self.max_lag = np.random.default_rng(list(seed)), max_lag
        self.last: dict[str, int] = {}

    def __call__(self, reader: str, update: int, oldest: int) -> int:
        drawn = update - int(self.rng.integers(self.max_lag + 1))
        self.last[reader] = max(drawn, oldest, self.last.get(reader, 0))
        return self.last[reader]

    def pick(self, eligible: list[int]) -> int:
        """Draw one of these workers at random."""
        return eligible[int(self.rng.integers(len(eligible)))]


class ReplayedVersions:
    """Chooses the same versions as another run, from the log of that run."""

    def __init__(self, log: Iterable[VersionRead]):
        self.versions = {(read.reader, read.update): read.version for read in log}

    def __call__(self, reader: str, update: int, oldest: int) -> int:
        version = self.versions.get((reader, update))
        if version is None:
            raise RunError(
                f"The log ends before update {update} of `{reader}`.",
                fix="Replay only the iterations that were logged.",
            )
        return version


class LagSchedule:
    """With merge="any": decides which workers may start, and whose data may be used next, so that no lag exceeds `max_lag`.

    A worker is busy from its start until an update has used its data. Busy workers are kept in the order in which they started,
    j = 0, 1, ... Invariant: the version of busy worker j is at most max_lag - j updates old. Starting a worker keeps the
    invariant: the new worker has the current version, and at most max_lag + 1 workers are busy. An update from worker j makes
    the versions of all other busy workers one update older. The workers after j also move up by one place, so they keep the
    invariant. The workers before j do not move up. So worker j is eligible for the next update only if the versions of the
    workers 0 .. j - 1 can become one update older without breaking the invariant. Worker 0 is always eligible.
    """

    def __init__(self, workers: int, max_lag: int):
        self.max_lag, self.version = max_lag, 0
        self.idle = list(range(workers))
        self.busy: dict[int, int] = {}
        """The version that each busy worker has read."""

    def start(self, left: int) -> list[int]:
        """Start as many idle workers as possible, with the current version. Returns the workers that start.

        `left` is the number of updates that the caller still wants.
        """
        room = min(self.max_lag + 1, left) - len(self.busy)
        chosen, self.idle = self.idle[: max(room, 0)], self.idle[max(room, 0) :]
        self.busy.update(dict.fromkeys(chosen, self.version))
        return chosen

    def eligible(self) -> list[int]:
        """The workers whose data may be used for the next update."""
        found = []
        for j, (worker, version) in enumerate(self.busy.items()):
            found.append(worker)
            if self.version + 1 - version > self.max_lag - j:
                break  # this version must not become older, so the next update must not use the data of a later worker
        return found

    def learned_from(self, worker: int) -> int:
        """Count one update from this worker's data. Returns the version that the worker had read."""
        self.version += 1
        self.idle.append(worker)
        return self.busy.pop(worker)


def lag_metrics(log: list[VersionRead], updates: range, per_iteration: int = 1) -> dict[str, np.ndarray]:
    """The mean and the largest lag of each iteration. `per_iteration` is the number of updates in one iteration."""
    lags: dict[int, list[int]] = {}
    for read in log:
        lags.setdefault((read.update - updates.start) // per_iteration, []).append(read.lag)
    rows = [lags.get(i, [0]) for i in range(len(updates) // per_iteration)]
    return {"lag_mean": np.array([np.mean(row) for row in rows]), "lag_max": np.array([np.max(row) for row in rows])}


def from_json(rows: Iterable[Any]) -> list[VersionRead]:
    """A log that was sent as JSON."""
    return [VersionRead(*row) for row in rows]
