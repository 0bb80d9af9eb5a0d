"""Executes a plan at the sites of this process, iteration by iteration. A `Machine` runs each of the plan's two programs.

The process has all sites of the plan (`inprocess`), or only the sites of one worker.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from choreo.host import HostObjects
from choreo.partition.program import Axis, HostCall, Program, Segment, walk
from choreo.plans.step_times import StepPhase
from choreo.runtime.engine.backend import Backend, Site, Timed, untimed
from choreo.runtime.engine.machine import Machine
from choreo.runtime.engine.messages import Topology
from choreo.runtime.engine.profile import kind_of
from choreo.runtime.engine.schedule import ChooseVersion, ReplayedVersions, SeededVersions, VersionRead
from choreo.types import GroupName

HostNumbers = Mapping[GroupName, tuple[int, ...]]
"""For each group, the numbers of its Python objects, in the order in which its sites first call them."""


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The programs of a plan, and everything else that a process needs to run them."""

    init: Program
    """Computes the carry from a key."""
    iterate: Program
    """Computes the next carry and metrics from the carry, the key of the iterations and the number of the iteration."""
    num_carry: int
    """The number of leaves of the carry. The leaves are the first inputs and the first outputs of `iterate`."""
    carry_axes: tuple[Axis, ...] = ()
    """The env axis of each leaf of the carry."""
    shards: int = 1
    """The number of learner shards."""
    max_lag: int = 0
    """A worker may read a version that is up to this many updates old."""
    num_workers: int = 1
    """With merge="any", the number of workers; each update uses the data of one of them. Otherwise 1."""
    learner: GroupName = ""
    """With merge="any", the group that learns."""
    single: Segment | None = None
    """The segment that computes a whole iteration, if the plan has such a segment."""
    host_numbers: HostNumbers = field(default_factory=dict)
    """The numbers of the Python objects, which are the same in every process and in every layout."""


SiteValues = dict[Site, list[Any]]
"""For each site in this process, a list of values. A value that the site does not hold is None."""


class Execution:
    """Runs iterations. Between calls every site is at a boundary, and `leaves` holds each site's leaves of the carry."""

    def __init__(
        self,
        programs: Programs,
        topology: Topology,
        backend: Backend,
        timed: Timed | None = None,
    ):
        self.programs, self.topology, self.backend = programs, topology, backend
        self.objects = {site: HostObjects(site[1], topology.replicas(site[0])) for site in topology.sites}
        self.leaves: SiteValues = {}
        self.key: dict[Site, Any] = {}
        self.init = Machine(programs.init, topology, backend, self.objects, timed)
        self.choose_version: ChooseVersion | None = None
        """Chooses the versions to read, if all sites are in this process."""
        self.log: list[VersionRead] = []
        """The versions that were read in the last call of `run`."""
        if programs.num_workers > 1:
            return  # the subclass `Arrivals` runs the iterations
        self.iterate = Machine(programs.iterate, topology, backend, self.objects, timed, choose_version=self._version)
        self.loop = None
        if programs.single is not None and self.has_all_sites:
            here = topology.here(programs.single.group)
            self.loop = backend.iteration_loop(programs.iterate, programs.single, programs.num_carry, here)
        if self.loop is not None and programs.single is not None:
            single, run = programs.single, self.loop.run
            phase = StepPhase(programs.iterate.name, single.group, 0, "run")
            # Arguments of `run`: (carries, keys, first, stop). A call runs the segment for each iteration, at each replica.
            self.run_loop = (timed or untimed)(
                kind_of(single.roles), single.name, run, phase=phase,
                runs=lambda carries, _, first, stop: len(carries) * (stop - first),
            )  # fmt: skip

    def start(self, init_key: np.ndarray, run_key: np.ndarray) -> None:
        """Run `init`. Both keys are key data."""
        given = {site: {0: self._keys(init_key, site)} for site in self.topology.sites}
        self.leaves = {site: self._divided(leaves, site) for site, leaves in
                       self._owned(self.programs.init, self.init.run(given)).items()}  # fmt: skip
        self._set_keys(run_key)

    def restore(self, leaves: SiteValues, run_key: np.ndarray) -> None:
        """Use `leaves` as the carry, instead of running `init`."""
        self.leaves = leaves
        self._set_keys(run_key)

    def _set_keys(self, run_key: np.ndarray) -> None:
        self.key = {site: self._keys(run_key, site) for site in self.topology.sites}
        if self.has_all_sites:
            self.choose_version = SeededVersions(run_key.tolist(), self.programs.max_lag)

    @property
    def has_all_sites(self) -> bool:
        """Whether all sites are in this process.

        If all sites are in this process, the versions to read are drawn at random from the key of the run, or are replayed.
        """
        return len(self.topology.sites) == len(self.topology.process_of_site)

    def replay(self, log: list[VersionRead]) -> None:
        """From now on, read the same versions as another run. `log` is the log of that run."""
        self.choose_version = ReplayedVersions(log)

    def _version(self, reader: str, update: int, oldest: int) -> int:
        return oldest if self.choose_version is None else self.choose_version(reader, update, oldest)

    def run(
        self, first: int, stop: int, begins: Callable[[int], None] | None = None
    ) -> dict[Site, dict[str, np.ndarray]]:
        """Run iterations first .. stop - 1. Returns the metrics of each site, with one entry per iteration.

        Calls `begins(i)` when iteration i begins, but not if one compiled loop runs all iterations.
        """
        if self.loop is not None and stop > first:
            return self._run_loop(first, stop)
        rows = []
        for i in range(first, stop):
            if begins is not None:
                begins(i)
            rows.append(self._run_one(i))
        self.log = list(self.iterate.update.log)
        self.iterate.update.log.clear()
        return {
            site: {name: np.stack([self.backend.to_host(row[site][name]) for row in rows]) for name in rows[0][site]}
            for site in (self.topology.sites if rows else [])
        }

    @property
    def runs_python(self) -> bool:
        """Whether an iteration calls Python functions."""
        return any(isinstance(step, HostCall) for step, _ in walk(self.programs.iterate.steps))

    def host_calls(self) -> int:
        """A counter that grows by one at the beginning and at the end of every Python call. So it is odd during a call."""
        return sum(objects.calls for objects in self.host_objects())

    def current_env(self) -> int | None:
        """The number of the Python environment that is being stepped, or None."""
        return next((i for objects in self.host_objects() if (i := objects.current()) is not None), None)

    def host_objects(self) -> list[HostObjects]:
        """The Python objects of all sites in this process."""
        return list(self.objects.values())

    def close(self) -> None:
        self.leaves.clear()
        for objects in self.objects.values():
            objects.close()

    def _run_one(self, i: int) -> dict[Site, dict[str, Any]]:
        num_carry = self.programs.num_carry
        given = {
            site: {**dict(enumerate(leaves)), num_carry: self.key[site], num_carry + 1: np.asarray(i, np.int32)}
            for site, leaves in self.leaves.items()
        }
        self.leaves = {}  # segments may donate the memory of the leaves
        self.iterate.update.number = i
        results = self.iterate.run(given)
        del given
        self.leaves = self._owned(self.programs.iterate, results)
        return self._metrics(results, self.leaves)

    def _metrics(self, results: Mapping[Site, list[Any]], owned: "SiteValues") -> dict[Site, dict[str, Any]]:
        num_carry = self.programs.num_carry
        metrics: dict[Site, dict[str, Any]] = {site: {} for site in results}
        for site, values in results.items():
            carried = {id(leaf) for leaf in owned[site]}
            for port, value in zip(self.programs.iterate.outs[num_carry:], values[num_carry:], strict=True):
                if next(iter(port.held)) == site[0]:
                    # Copy a metric that is also a leaf of the carry: the next iteration may donate the memory of the leaf.
                    metrics[site][port.name] = self.backend.copy(value) if id(value) in carried else value
        return metrics

    def _run_loop(self, first: int, stop: int) -> dict[Site, dict[str, np.ndarray]]:
        assert self.loop is not None
        sites, carries = list(self.leaves), list(self.leaves.values())
        self.leaves = {}
        results = self.run_loop(carries, [self.key[site] for site in sites], first, stop)
        self.leaves = {site: carry for site, (carry, _) in zip(sites, results, strict=True)}
        names = [port.name for port in self.programs.iterate.outs[self.programs.num_carry :]]
        return {site: dict(zip(names, rows, strict=True)) for site, (_, rows) in zip(sites, results, strict=True)}

    def _owned(self, program: Program, results: Mapping[Site, list[Any]]) -> SiteValues:
        ports = program.outs[: self.programs.num_carry]
        owned = {}
        for site, values in results.items():
            refs = [port.held[site[0]][0] if site[0] in port.held else None for port in ports]
            owned[site] = self.backend.own(values[: self.programs.num_carry], refs)
        return owned

    def _divided(self, leaves: list[Any], site: Site) -> list[Any]:
        """Reshape the carry of `init` for `iterate`: the env axis is divided into two axes (shard, environment)."""
        if self.programs.shards == 1:
            return leaves
        divided = []
        for leaf, axis, port in zip(leaves, self.programs.carry_axes, self.programs.iterate.ins, strict=False):
            if leaf is not None and axis is not None:
                num_blocks = self.topology.replicas(site[0]) if port.held[site[0]][1] is not None else 1
                shards, shape = self.programs.shards // num_blocks, leaf.shape
                leaf = leaf.reshape(*shape[:axis], shards, shape[axis] // shards, *shape[axis + 1 :])
            divided.append(leaf)
        return divided

    def _keys(self, data: np.ndarray, site: Site) -> Any:
        return self.backend.key(data, site)
