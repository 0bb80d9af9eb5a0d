"""The serial twin: executes a plan in this process, one step after the other, without threads.

This is the specification of what a plan means; every other runtime must give the same bits. Breakpoints and
`jax.debug.print` in the user's code work, since segments are traced and run here.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from choreo.partition.program import Program, Segment
from choreo.plans.plan import Plan
from choreo.roles import Reduction
from choreo.runtime.engine.arrivals import Arrivals
from choreo.runtime.engine.backend import Site
from choreo.runtime.engine.device import Device, block, join
from choreo.runtime.engine.execution import Execution, Orders
from choreo.runtime.engine.messages import Neighbourhood
from choreo.runtime.engine.profile import Profile, Recorder
from choreo.runtime.engine.schedule import VersionRead, lag_metrics
from choreo.runtime.engine.threads import start_jax
from choreo.types import Key, PyTree


class InProcess:
    """Executes a plan serially."""

    def __init__(self, plan: Plan, *, profile: bool = False, replay: list[VersionRead] | None = None):
        """`replay`: the log of another run of this plan, if what it read may have been out of date."""
        self.plan, self.recorder = plan, Recorder() if profile else None
        self.replayed, self.log = replay, []
        watch = self.recorder and self.recorder.watch
        start_jax(plan)
        platforms = {group: plan.platform(group) for group in plan.sites.replicas}
        self.device = Device(platforms, watch, carry_axes=plan.carry_axes, partitioned=plan.partitioned,
                             spread={group: plan.replicas(group) for group in plan.combining})  # fmt: skip
        for group in plan.layout.groups:
            if group.name in platforms:
                self.device.check_devices(group.name, group.devices)
        orders = orders_of(plan, plan.init, plan.iterate)
        hood = Neighbourhood(me="here", homes=dict.fromkeys(plan.all_sites, "here"))
        self.execution = (Arrivals if orders.num_workers > 1 else Execution)(orders, hood, self.device, watch)

    @property
    def compile_seconds(self) -> float:
        return self.device.compile_seconds

    @property
    def differences(self) -> dict[str, dict[str, str]]:
        return {}

    def start(self, key: Key) -> None:
        self.execution.start(*split_key(key))
        if self.replayed is not None:
            self.execution.replay(self.replayed)

    def run(self, first: int, stop: int) -> dict[str, np.ndarray]:
        pieces = self.execution.run(first, stop)
        self.log += self.execution.log
        return join_metrics(self.plan, pieces, self.execution.log, range(first, stop))

    def carry(self) -> PyTree:
        # Copies: what runs next may take over the memory of the carry.
        return self.plan.combine([jnp.copy(leaf) for leaf in join_carry(self.plan, self.execution.leaves)])

    def restore(self, carry: PyTree, key: Key) -> None:
        leaves = {
            site: [None if leaf is None else self._put(leaf, site) for leaf in row]
            for site, row in split_carry(self.plan, carry).items()
        }
        self.execution.restore(leaves, split_key(key)[1])

    def _put(self, leaf: Any, site: Site) -> Any:
        return jax.device_put(jnp.copy(leaf), self.device.device(site))

    def profile(self) -> Profile:
        assert self.recorder is not None, "made without profile=True"
        return Profile({"this process": self.recorder.take()})

    def close(self) -> None:
        self.execution.close()


def orders_of(plan: Plan, init: Program, iterate: Program) -> Orders:
    """What a process must know of a plan; with the programs as it needs them."""
    single = iterate.steps[0] if plan.single else None
    assert single is None or isinstance(single, Segment)
    return Orders(
        init=init, iterate=iterate, num_carry=plan.num_carry, carry_axes=plan.carry_axes, shards=plan.shards,
        max_lag=plan.layout.max_lag, num_workers=plan.num_workers, learner=plan.sites.default, single=single,
    )  # fmt: skip


def split_key(key: Key) -> tuple[np.ndarray, np.ndarray]:
    """The keys of `init` and of the iterations, as numbers."""
    init_key, run_key = jax.random.split(key)
    return np.asarray(jax.random.key_data(init_key)), np.asarray(jax.random.key_data(run_key))


def join_metrics(
    plan: Plan, pieces: dict[Any, dict[str, np.ndarray]], log: list[VersionRead], iterations: range
) -> dict[str, np.ndarray]:
    """Each metric from what the sites hold of it, one entry per iteration; `log`: what was read in them."""
    if plan.num_workers > 1:
        updates = range(iterations.start * plan.num_workers, iterations.stop * plan.num_workers)
        return _join_parts(plan, pieces, log) | lag_metrics(log, updates, plan.num_workers)
    metrics = _join_sites(plan, pieces)
    return metrics | lag_metrics(log, iterations) if plan.layout.is_relaxed else metrics


def _join_parts(plan: Plan, pieces: dict[Any, dict[str, np.ndarray]], log: list[VersionRead]) -> dict[str, np.ndarray]:
    """With merge="any": the metrics of the parts that make an iteration, as of so many shards."""
    order = [int(read.reader.rpartition("-")[2]) for read in log]
    metrics = {}
    for port in plan.iterate.outs[plan.num_carry :] if pieces else ():
        group = next(iter(port.held))
        rows = {r: iter(values[port.name]) for (g, r), values in pieces.items() if g == group}
        found = [next(rows[worker if plan.sites.size(group) else 0]) for worker in order]
        metrics[port.name] = np.stack(found).reshape(-1, plan.num_workers, *found[0].shape)
    return combine_metrics(metrics, plan.reductions)


def _join_sites(plan: Plan, pieces: dict[Any, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    metrics = {}
    for port in plan.iterate.outs[plan.num_carry :] if pieces else ():
        group, (_, axis) = next(iter(port.held.items()))
        parts = [pieces[group, r][port.name] for r in range(plan.replicas(group))]
        metrics[port.name] = parts[0] if axis is None or len(parts) == 1 else np.concatenate(parts, axis + 1)
    return metrics if plan.shards == 1 else combine_metrics(metrics, plan.reductions)


def combine_metrics(metrics: dict[str, np.ndarray], reductions: Mapping[str, Reduction]) -> dict[str, np.ndarray]:
    """One number for all shards, from [iteration, shard], reduced as each metric declares."""
    metrics = {name: as_numbers(values) for name, values in metrics.items()}

    def combined(values: np.ndarray, reduction: Reduction) -> np.ndarray:
        if not reduction.weight:
            return _REDUCE[reduction.op](values, 1)
        # Integers have no NaN, and their products may overflow.
        values = values if np.issubdtype(values.dtype, np.inexact) else values.astype(np.float64)
        weights = metrics[reduction.weight]
        total, weighted = weights.sum(1), np.where(weights > 0, values * weights, 0).sum(1)
        return np.divide(weighted, total, out=np.full_like(weighted, np.nan), where=total > 0)

    return {name: combined(values, reductions[name]) for name, values in metrics.items()}


_REDUCE = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min}


def as_numbers(values: Any) -> np.ndarray:
    """Metrics in a type of numpy's own that holds them all: bfloat16 and its kind can neither be added up nor written."""
    values = np.asarray(values)
    if jnp.issubdtype(values.dtype, np.floating) and values.dtype.itemsize < 4:
        return values.astype(np.float32)
    if jnp.issubdtype(values.dtype, np.integer) and values.dtype.kind not in "iu":  # int4 and its kind
        return values.astype(np.int32)
    return values


def join_carry(plan: Plan, pieces: dict[Any, list[Any]]) -> list[Any]:
    """The leaves of the whole carry, from what the sites hold of it."""
    whole = []
    for i, port in enumerate(plan.iterate.ins[: plan.num_carry]):
        group, (_, axis) = next(iter(port.held.items()))
        parts = [jnp.asarray(pieces[group, r][i]) for r in range(plan.replicas(group))]
        (device, *_) = parts[0].devices()
        whole.append(join([jax.device_put(part, device) for part in parts], axis))
    return whole


def split_carry(plan: Plan, carry: PyTree) -> dict[Any, list[Any]]:
    """What each site holds of a carry."""
    whole, ports = plan.leaves(carry), plan.iterate.ins[: plan.num_carry]
    return {
        (group, r): [
            block(leaf, port.held[group][1], r, plan.replicas(group)) if group in port.held else None
            for leaf, port in zip(whole, ports, strict=True)
        ]
        for group, r in plan.all_sites
    }
