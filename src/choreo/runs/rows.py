"""Turn the metrics that a runtime returns into rows: one row of numbers per iteration."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from choreo.runs.config import RunConfig
from choreo.runs.episode_returns import EpisodeReturns, measures_episodes
from choreo.runs.folder import Row
from choreo.runtime.engine.metrics import as_numbers

EPISODE_METRICS = ("episode", "train_return")
"""Metrics whose names begin with one of these words can be NaN: in some iterations, no episode ends."""


def make_rows(
    config: RunConfig, metrics: Mapping[str, Any], iterations: range, returns: EpisodeReturns, *, seconds: float
) -> list[Row]:
    """The rows of `iterations`, which the runtime ran in one call.

    `metrics` has one entry per iteration under each name. `seconds` is the time at the end of the call; it is in all rows.
    """
    columns = {name: as_numbers(values).tolist() for name, values in metrics.items()}
    rows = []
    for i, iteration in enumerate(iterations):
        env_steps = (iteration + 1) * config.env_steps_per_iteration
        row = {"iteration": iteration, "env_steps": env_steps, "seconds": round(seconds, 3)}
        row |= {name: values[i] for name, values in columns.items()}
        if measures_episodes(row):
            row["train_return"] = returns.add(row)
        rows.append(row)
    return rows


class NotFinite(NamedTuple):
    """A metric that is infinite or NaN."""

    iteration: int
    metric: str
    value: float


def first_not_finite(rows: Sequence[Row]) -> NotFinite | None:
    """The first metric that is not finite, or None. Metrics of episodes are not checked, because they may be NaN."""
    for row in rows:
        for name, value in row.items():
            if not name.startswith(EPISODE_METRICS) and not math.isfinite(value):
                return NotFinite(int(row["iteration"]), name, value)
    return None
