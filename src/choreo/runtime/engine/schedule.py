"""Asynchronous runs: which version each worker reads, and which worker's data is learned from next.

With `max_lag` = k, a reader may use a version up to k updates old. Every read is logged, and replaying the log gives the
same run bit for bit. In one process a seed draws the versions; among processes the order of arrival decides.

    merge="all"   one update per iteration, from all workers         log: for update 7, env+actor-1 read version 5
    merge="any"   one update per worker, as soon as its data is here log: update 7 is from worker 1, which read version 5
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from choreo.errors import RunError


class VersionRead(NamedTuple):
    """One entry of the log: a worker read a version."""

    reader: str
    """The worker's group and number, `env+actor-1` for example."""
    update: int
    """The number of the update that the worker's data goes into."""
    version: int
    """The version that was read: the number of updates before it."""

    @property
    def lag(self) -> int:
        """How many updates old the version was."""
        return self.update - self.version

    @property
    def worker(self) -> int:
        """The number of the worker within its group."""
        return int(self.reader.rpartition("-")[2])


ChooseVersion = Callable[[str, int, int], int]
"""(reader, number of the update, oldest version that is kept) -> the version to read."""


class SeededVersions:
    """Draws lags at random: the same lags for the same seed. A reader never goes back to an older version."""

    def __init__(self, seed: Iterable[int], max_lag: int):
        self.rng, self.max_lag = np.random.default_rng(list(seed)), max_lag
        self.last: dict[str, int] = {}

    def __call__(self, reader: str, update: int, oldest: int) -> int:
        drawn = update - int(self.rng.integers(self.max_lag + 1))
        self.last[reader] = max(drawn, oldest, self.last.get(reader, 0))
        return self.last[reader]

    def pick(self, eligible: list[int]) -> int:
        """One of these workers."""
        return eligible[int(self.rng.integers(len(eligible)))]


class ReplayedVersions:
    """Chooses the versions that another run has read, from its log."""

    def __init__(self, log: Iterable[VersionRead]):
        self.versions = {(read.reader, read.update): read.version for read in log}

    def __call__(self, reader: str, update: int, oldest: int) -> int:
        version = self.versions.get((reader, update))
        if version is None:
            raise RunError(f"The log ends before update {update} of `{reader}`.", fix="Replay no more than was logged.")
        return version


class LagSchedule:
    """With merge="any": which workers may start, and which may be learned from next, so that no lag exceeds `max_lag`.

    Busy workers are kept in the order in which they started. Invariant: the version that the j-th of them has read is at
    most max_lag - j updates old. Starting a worker keeps the invariant; learning from a worker keeps it if all workers that
    started before that worker stay within their bound after one more update. The worker that started first is always eligible.
    """

    def __init__(self, workers: int, max_lag: int):
        self.max_lag, self.version = max_lag, 0
        self.idle = list(range(workers))
        self.busy: dict[int, int] = {}
        """The version that each busy worker has read."""

    def start(self, left: int) -> list[int]:
        """Workers that start now, with the current version; `left` is the number of updates that are still wanted."""
        room = min(self.max_lag + 1, left) - len(self.busy)
        chosen, self.idle = self.idle[: max(room, 0)], self.idle[max(room, 0) :]
        self.busy.update(dict.fromkeys(chosen, self.version))
        return chosen

    def eligible(self) -> list[int]:
        """Workers that may be learned from next."""
        found = []
        for j, (worker, version) in enumerate(self.busy.items()):
            found.append(worker)
            if self.version + 1 - version > self.max_lag - j:
                break  # this worker cannot wait for another update: later workers must not come first
        return found

    def learned_from(self, worker: int) -> int:
        """Count one update, from this worker's data; returns the version that the worker had read."""
        self.version += 1
        self.idle.append(worker)
        return self.busy.pop(worker)


def lag_metrics(log: list[VersionRead], updates: range, per_iteration: int = 1) -> dict[str, np.ndarray]:
    """Mean and largest lag of each iteration, which is `per_iteration` updates."""
    lags: dict[int, list[int]] = {}
    for read in log:
        lags.setdefault((read.update - updates.start) // per_iteration, []).append(read.lag)
    rows = [lags.get(i, [0]) for i in range(len(updates) // per_iteration)]
    return {"lag_mean": np.array([np.mean(row) for row in rows]), "lag_max": np.array([np.max(row) for row in rows])}


def from_json(rows: Iterable[Any]) -> list[VersionRead]:
    """A log that was sent as JSON."""
    return [VersionRead(*row) for row in rows]
