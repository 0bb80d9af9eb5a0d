"""Who reads which version, and whose part is learned from next: by a seed, by what arrives, or by the log of another run.

With `max_lag`, a reader may use a version up to so many updates old. What was read is logged; replaying the log gives the
same run.

    merge="all"   one update per iteration, from all workers      log: at iteration 7, env+actor-1 read version 5
    merge="any"   one update per worker's part, as it arrives     log: update 7 was learned from worker 1, which read version 5
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from choreo.errors import RunError


class VersionRead(NamedTuple):
    """One entry of the log."""

    reader: str
    """The worker."""
    update: int
    """The update that its data goes into."""
    version: int
    """How many updates were in what it read."""

    @property
    def lag(self) -> int:
        return self.update - self.version


ChooseVersion = Callable[[str, int, int], int]
"""From a reader, the number of the update, and the oldest version there is, to the version it reads."""


class Seeded:
    """Lags drawn at random: the same for the same seed. Versions never go back."""

    def __init__(self, seed: Iterable[int], max_lag: int):
        self.rng, self.max_lag = np.random.default_rng(list(seed)), max_lag
        self.last: dict[str, int] = {}

    def __call__(self, reader: str, update: int, oldest: int) -> int:
        drawn = update - int(self.rng.integers(self.max_lag + 1))
        self.last[reader] = max(drawn, oldest, self.last.get(reader, 0))
        return self.last[reader]

    def pick(self, eligible: list[int]) -> int:
        return eligible[int(self.rng.integers(len(eligible)))]


class Replayed:
    """What another run read."""

    def __init__(self, log: Iterable[VersionRead]):
        self.versions = {(read.reader, read.update): read.version for read in log}

    def __call__(self, reader: str, update: int, oldest: int) -> int:
        version = self.versions.get((reader, update))
        if version is None:
            raise RunError(f"The log ends before update {update} of `{reader}`.", fix="Replay no more than was logged.")
        return version


class Traffic:
    """With merge="any": who may start, and whose part may be learned from next, so that none is older than `max_lag`.

    Workers under way are kept in the order in which they started. The j-th of them has read a version at most
    max_lag - j updates old; starting one, and learning from one whose elders stay within that, keeps it so. The eldest may
    always be next.
    """

    def __init__(self, workers: int, max_lag: int):
        self.max_lag, self.version = max_lag, 0
        self.idle = list(range(workers))
        self.under_way: dict[int, int] = {}
        """What each worker has read."""

    def start(self, left: int) -> list[int]:
        """Workers that begin now, with the current version; `left`: how many parts are still wanted."""
        room = min(self.max_lag + 1, left) - len(self.under_way)
        chosen, self.idle = self.idle[: max(room, 0)], self.idle[max(room, 0) :]
        self.under_way.update(dict.fromkeys(chosen, self.version))
        return chosen

    def eligible(self) -> list[int]:
        found = []
        for j, (worker, version) in enumerate(self.under_way.items()):
            found.append(worker)
            if self.version + 1 - version > self.max_lag - j:
                break  # it cannot wait any longer: nobody who started after it may go first
        return found

    def learned_from(self, worker: int) -> int:
        """One update more; returns the version that the worker had read."""
        self.version += 1
        self.idle.append(worker)
        return self.under_way.pop(worker)


def lag_metrics(log: list[VersionRead], updates: range, per_iteration: int = 1) -> dict[str, np.ndarray]:
    """Mean and largest lag of each iteration."""
    lags: dict[int, list[int]] = {}
    for read in log:
        lags.setdefault((read.update - updates.start) // per_iteration, []).append(read.lag)
    rows = [lags.get(i, [0]) for i in range(len(updates) // per_iteration)]
    return {"lag_mean": np.array([np.mean(row) for row in rows]), "lag_max": np.array([np.max(row) for row in rows])}


def from_json(rows: Iterable[Any]) -> list[VersionRead]:
    return [VersionRead(*row) for row in rows]
