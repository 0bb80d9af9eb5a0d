"""The metric `train_return`: after each iteration, the mean return of the last 100 or more training episodes.

An algorithm that trains without episodes, for example from a fixed dataset, returns no metrics of episodes. Then there is no
`train_return`.
"""

import collections
import math
from collections.abc import Collection, Sequence

from choreo.runs.folder import Row

EPISODES_PER_RETURN = 100
"""`train_return` is the mean over at least this many episodes. While fewer have ended, it is the mean over all episodes."""

EPISODES = ("episode_return", "episodes")
"""The metrics that `train_return` is computed from. An algorithm returns both or neither."""


def measures_episodes(metrics: Collection[str]) -> bool:
    """Whether `train_return` can be computed from metrics with these names."""
    return all(name in metrics for name in EPISODES)


class EpisodeReturns:
    """A moving window: the smallest number of newest iterations that together have at least 100 episodes."""

    def __init__(self, rows: Sequence[Row]):
        """`rows`: the metrics of earlier iterations, in order."""
        self._window: collections.deque[tuple[float, float]] = collections.deque()  # (episodes, their mean return)
        self._episodes = 0.0
        for row in rows:
            if measures_episodes(row):
                self.add(row)

    def add(self, row: Row) -> float:
        """Add the episodes of one iteration. Returns the mean return over the window, or NaN if the window has no episode."""
        if row["episodes"] > 0:
            self._window.append((row["episodes"], row["episode_return"]))
            self._episodes += row["episodes"]
        while self._window and self._episodes - self._window[0][0] >= EPISODES_PER_RETURN:
            self._episodes -= self._window.popleft()[0]
        return sum(n * mean for n, mean in self._window) / self._episodes if self._window else math.nan
