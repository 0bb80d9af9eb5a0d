"""The metrics of a run, joined from the metrics that each site returns.

join_metrics      metrics of all sites -> one array per metric, with one entry per iteration; adds the lag of a relaxed run
combine_metrics   [iteration, shard] -> [iteration]; each metric declares how it is reduced (`choreo.metric`)
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from choreo.plans.plan import Plan
from choreo.roles import Reduction
from choreo.runtime.engine.backend import Site
from choreo.runtime.engine.schedule import VersionRead, lag_metrics

SiteMetrics = dict[Site, dict[str, np.ndarray]]
"""For each site, the metrics that it returned."""


def join_metrics(plan: Plan, metrics: SiteMetrics, log: list[VersionRead], iterations: range) -> dict[str, np.ndarray]:
    """Return each metric as an array with one entry per iteration. `log` holds the versions read in `iterations`."""
    if plan.num_workers > 1:
        updates = range(iterations.start * plan.num_workers, iterations.stop * plan.num_workers)
        return _join_updates(plan, metrics, log) | lag_metrics(log, updates, plan.num_workers)
    joined = _join_sites(plan, metrics)
    return joined | lag_metrics(log, iterations) if plan.layout.is_relaxed else joined


def _join_updates(plan: Plan, metrics: SiteMetrics, log: list[VersionRead]) -> dict[str, np.ndarray]:
    """Join the metrics with merge="any". An iteration has as many updates as there are workers.

    The metrics of the updates of one iteration are reduced in the same way as the metrics of several shards.
    Every site returns its metrics in the order in which it computed them. `log` says which worker each update came from.
    """
    joined = {}
    for port in plan.iterate.outs[plan.num_carry :] if metrics else ():
        group = next(iter(port.held))
        rows = {r: iter(values[port.name]) for (g, r), values in metrics.items() if g == group}
        found = [next(rows[worker if plan.sites.size(group) else 0]) for worker in (read.worker for read in log)]
        joined[port.name] = np.stack(found).reshape(-1, plan.num_workers, *found[0].shape)
    return combine_metrics(joined, plan.reductions)


def _join_sites(plan: Plan, metrics: SiteMetrics) -> dict[str, np.ndarray]:
    joined = {}
    for port in plan.iterate.outs[plan.num_carry :] if metrics else ():
        group, (_, axis) = next(iter(port.held.items()))
        parts = [metrics[group, r][port.name] for r in range(plan.replicas(group))]
        joined[port.name] = parts[0] if axis is None or len(parts) == 1 else np.concatenate(parts, axis + 1)
    return joined if plan.shards == 1 else combine_metrics(joined, plan.reductions)


def combine_metrics(metrics: dict[str, np.ndarray], reductions: Mapping[str, Reduction]) -> dict[str, np.ndarray]:
    """Reduce arrays [iteration, shard] to arrays [iteration], as each metric declares."""
    metrics = {name: as_numbers(values) for name, values in metrics.items()}

    def combined(values: np.ndarray, reduction: Reduction) -> np.ndarray:
        if not reduction.weight:
            return _REDUCE[reduction.op](values, 1)
        # Compute in floats, because the mean is NaN if all weights are 0 (no episode ended), and products of integers may overflow.
        values = values if np.issubdtype(values.dtype, np.inexact) else values.astype(np.float64)
        weights = metrics[reduction.weight]
        total, weighted = weights.sum(1), np.where(weights > 0, values * weights, 0).sum(1)
        return np.divide(weighted, total, out=np.full_like(weighted, np.nan), where=total > 0)

    return {name: combined(values, reductions[name]) for name, values in metrics.items()}


_REDUCE = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min}


def as_numbers(values: Any) -> np.ndarray:
    """Convert values to one of numpy's own dtypes. Other dtypes, such as bfloat16 and int4, cannot be summed or written as JSON."""
    values = np.asarray(values)
    if jnp.issubdtype(values.dtype, np.floating) and values.dtype.itemsize < 4:
        return values.astype(np.float32)
    if jnp.issubdtype(values.dtype, np.integer) and values.dtype.kind not in "iu":  # int4, uint4
        return values.astype(np.int32)
    return values
