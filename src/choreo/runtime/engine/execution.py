"""A plan, executed at the sites that live in this process: all of them (`inprocess`), or those of one worker."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from choreo.host import HostObjects
from choreo.partition.program import Axis, HostCall, Program, Segment, walk
from choreo.runtime.engine.backend import Backend, Site, Watch
from choreo.runtime.engine.machine import Machine
from choreo.runtime.engine.messages import Neighbourhood
from choreo.runtime.engine.profile import kind_of
from choreo.runtime.engine.schedule import ChooseVersion, Replayed, Seeded, VersionRead
from choreo.types import GroupName


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a process must know of a plan."""

    init: Program
    """key -> carry"""
    iterate: Program
    """carry, key, iteration -> carry, metrics"""
    num_carry: int
    """How many of iterate's inputs and outputs are the carry."""
    carry_axes: tuple[Axis, ...] = ()
    """The env axis of each leaf of the carry."""
    shards: int = 1
    max_lag: int = 0
    num_workers: int = 1
    """With merge="any": how many workers are learned from one by one."""
    learner: GroupName = ""
    """With merge="any": who learns."""
    single: Segment | None = None
    """The one segment of an iteration, if everything is compiled into one."""


SiteLeaves = dict[Site, list[Any]]
"""For each site here, what it holds of a list of values; None where it holds nothing."""


class Execution:
    """Runs iterations. Between calls every site stands at a boundary, and `leaves` is what it holds of the carry."""

    def __init__(
        self,
        orders: Orders,
        hood: Neighbourhood,
        backend: Backend,
        watch: Watch | None = None,
    ):
        self.orders, self.hood, self.backend = orders, hood, backend
        self.hosts = {site: HostObjects(site[1], hood.replicas(site[0])) for site in hood.sites}
        self.leaves: SiteLeaves = {}
        self.key: dict[Site, Any] = {}
        self.init = Machine(orders.init, hood, backend, self.hosts, watch)
        self.versions: ChooseVersion | None = None
        """Who reads which version, where that is decided here."""
        self.log: list[VersionRead] = []
        """What was read in the last call of `run`."""
        if orders.num_workers > 1:
            return  # see `Arrivals`
        self.iterate = Machine(orders.iterate, hood, backend, self.hosts, watch, versions=self._version)
        self.chunks = None
        if orders.single is not None and self.decides:
            here = hood.here(orders.single.group)
            self.chunks = backend.chunks(orders.iterate, orders.single, orders.num_carry, here)
        if self.chunks is not None:
            assert orders.single is not None
            run = self.chunks.run
            self.run_chunk = watch(kind_of(orders.single.roles), orders.single.name, run) if watch else run

    def start(self, init_key: np.ndarray, run_key: np.ndarray) -> None:
        """Run `init`; keys are given as their numbers."""
        given = {site: {0: self._keys(init_key, site)} for site in self.hood.sites}
        self.leaves = {site: self._divided(leaves, site) for site, leaves in
                       self._owned(self.orders.init, self.init.run(given)).items()}  # fmt: skip
        self._set_keys(run_key)

    def restore(self, leaves: SiteLeaves, run_key: np.ndarray) -> None:
        """Take a carry in place of running `init`."""
        self.leaves = leaves
        self._set_keys(run_key)

    def _set_keys(self, run_key: np.ndarray) -> None:
        self.key = {site: self._keys(run_key, site) for site in self.hood.sites}
        if self.decides:
            self.versions = Seeded(run_key.tolist(), self.orders.max_lag)

    @property
    def decides(self) -> bool:
        """Is all of it here? Then what may be out of date is drawn at random, from the run's key."""
        return len(self.hood.sites) == len(self.hood.homes)

    def replay(self, log: list[VersionRead]) -> None:
        """Read what another run has read."""
        self.versions = Replayed(log)

    def _version(self, reader: str, update: int, oldest: int) -> int:
        return oldest if self.versions is None else self.versions(reader, update, oldest)

    def run(
        self, first: int, stop: int, begins: Callable[[int], None] | None = None
    ) -> dict[Site, dict[str, np.ndarray]]:
        """Run iterations first .. stop - 1: the metrics each site holds, one entry per iteration.

        `begins` is called with the number of each iteration that begins.
        """
        if self.chunks is not None and stop > first:
            return self._run_chunk(first, stop)
        rows = []
        for i in range(first, stop):
            if begins is not None:
                begins(i)
            rows.append(self._run_one(i))
        self.log = list(self.iterate.updates.log)
        self.iterate.updates.log.clear()
        return {
            site: {name: np.stack([self.backend.to_host(row[site][name]) for row in rows]) for name in rows[0][site]}
            for site in (self.hood.sites if rows else [])
        }

    @property
    def runs_python(self) -> bool:
        """Are there calls of Python among what is to be run here?"""
        return any(isinstance(step, HostCall) for step, _ in walk(self.orders.iterate.steps))

    def host_calls(self) -> int:
        """Counts up at the beginning and at the end of every call of Python: odd while one is running."""
        return sum(objects.calls for objects in self.host_objects())

    def current_env(self) -> int | None:
        """The environment that is being stepped, if one is."""
        return next((i for objects in self.host_objects() if (i := objects.current()) is not None), None)

    def host_objects(self) -> list[HostObjects]:
        return list(self.hosts.values())

    def close(self) -> None:
        self.leaves.clear()
        for objects in self.hosts.values():
            objects.close()

    def _run_one(self, i: int) -> dict[Site, dict[str, Any]]:
        num_carry = self.orders.num_carry
        given = {
            site: {**dict(enumerate(leaves)), num_carry: self.key[site], num_carry + 1: np.asarray(i, np.int32)}
            for site, leaves in self.leaves.items()
        }
        self.leaves = {}  # segments may take over their memory
        self.iterate.updates.number = i
        results = self.iterate.run(given)
        del given
        self.leaves = self._owned(self.orders.iterate, results)
        return self._metrics(results, self.leaves)

    def _metrics(self, results: Mapping[Site, list[Any]], owned: "SiteLeaves") -> dict[Site, dict[str, Any]]:
        num_carry = self.orders.num_carry
        metrics: dict[Site, dict[str, Any]] = {site: {} for site in results}
        for site, values in results.items():
            carried = {id(leaf) for leaf in owned[site]}
            for port, value in zip(self.orders.iterate.outs[num_carry:], values[num_carry:], strict=True):
                if next(iter(port.held)) == site[0]:
                    # The next iteration may take over the memory of what is carried.
                    metrics[site][port.name] = self.backend.copy(value) if id(value) in carried else value
        return metrics

    def _run_chunk(self, first: int, stop: int) -> dict[Site, dict[str, np.ndarray]]:
        assert self.chunks is not None
        sites, carries = list(self.leaves), list(self.leaves.values())
        self.leaves = {}
        results = self.run_chunk(carries, [self.key[site] for site in sites], first, stop)
        self.leaves = {site: carry for site, (carry, _) in zip(sites, results, strict=True)}
        names = [port.name for port in self.orders.iterate.outs[self.orders.num_carry :]]
        return {site: dict(zip(names, rows, strict=True)) for site, (_, rows) in zip(sites, results, strict=True)}

    def _owned(self, program: Program, results: Mapping[Site, list[Any]]) -> SiteLeaves:
        ports = program.outs[: self.orders.num_carry]
        owned = {}
        for site, values in results.items():
            refs = [port.held[site[0]][0] if site[0] in port.held else None for port in ports]
            owned[site] = self.backend.own(values[: self.orders.num_carry], refs)
        return owned

    def _divided(self, leaves: list[Any], site: Site) -> list[Any]:
        """What `init` has made, as `iterate` reads it: the environments of each shard apart."""
        if self.orders.shards == 1:
            return leaves
        divided = []
        for leaf, axis, port in zip(leaves, self.orders.carry_axes, self.orders.iterate.ins, strict=False):
            if leaf is not None and axis is not None:
                held = self.hood.replicas(site[0]) if port.held[site[0]][1] is not None else 1
                shards, shape = self.orders.shards // held, leaf.shape
                leaf = leaf.reshape(*shape[:axis], shards, shape[axis] // shards, *shape[axis + 1 :])
            divided.append(leaf)
        return divided

    def _keys(self, data: np.ndarray, site: Site) -> Any:
        return self.backend.key(data, site)
