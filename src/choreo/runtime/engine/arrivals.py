"""merge="any": each update uses the data of one worker, and the learner uses the workers' data in the order of arrival.

    worker 0   reads version 0 ── acts ──▶ update 1 ── reads version 1 ── acts ──────▶ update 3
    worker 1   reads version 0 ── acts ──────────▶ update 2 ── reads version 2 ── acts ──▶ update 4

Each worker has its own environments. In one *round*, a worker runs the program once, and the learner makes one update from
its data. The learner holds the state that all workers share. An iteration has as many updates as there are workers. The log of
a run holds, for every update, the worker whose data was used and the version that this worker had read. The log determines the
results of the run. If all sites are in one process, the order of the workers is drawn at random from a seed, or taken from a log
that is replayed. With several processes, the order of arrival decides.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from choreo.errors import RunError
from choreo.host import HostObjects
from choreo.runtime.engine.backend import Backend, Site, Timed, untimed
from choreo.runtime.engine.bundles import NoMoreWork
from choreo.runtime.engine.execution import Execution, Programs
from choreo.runtime.engine.machine import Machine
from choreo.runtime.engine.messages import Topology
from choreo.runtime.engine.schedule import LagSchedule, SeededVersions, VersionRead

Rows = dict[Site, list[dict[str, Any]]]
"""For each site in this process, the metrics of each round."""


class Arrivals(Execution):
    """Executes a plan with merge="any" at the sites of this process.

    The process has the sites of one worker, the site of the learner, or all sites.
    """

    def __init__(self, programs: Programs, topology: Topology, backend: Backend, timed: Timed | None = None):
        super().__init__(programs, topology, backend, timed)
        self.workers = [worker for worker in range(programs.num_workers) if self._is_here(worker)]
        """The workers whose programs have a site in this process. In the learner's process, these are all workers; in any other
        process, it is one worker."""
        self.machines = {worker: self._machine(worker, timed) for worker in self.workers}
        self.rounds = dict.fromkeys(self.workers, 0)
        """The number of rounds that each worker has run."""
        timed = timed or untimed
        wait = topology.wait_for_any
        self.waits = {worker: timed("wait", self._processes_of(worker)[0], wait) for worker in self.workers if wait}
        """For each worker, a function that waits until the data of any of several workers arrives. The profile shows the time of
        the call as a wait for the worker whose function was called."""
        self.schedule = LagSchedule(programs.num_workers, programs.max_lag)
        self.replayed: list[VersionRead] | None = None
        self.reads_at: dict[int, list[int]] = {}
        """In the log that is replayed: for each version, the workers that read it."""

    def _is_here(self, worker: int) -> bool:
        return any(self._site(site, worker) in self.topology.sites for site in self._program_sites())

    def _program_sites(self) -> list[Site]:
        """The sites of a worker's program: replica 0 of each group."""
        return [(group, 0) for group in dict.fromkeys(group for group, _ in self.topology.process_of_site)]

    def _site(self, site: Site, worker: int) -> Site:
        """Translate a site of a worker's program to the site of the plan."""
        return site if site[0] == self.programs.learner else (site[0], worker)

    def _machine(self, worker: int, timed: Timed | None) -> Machine:
        own = {site: self._site(site, worker) for site in self._program_sites()}
        process_of_site = {site: self.topology.process_of_site[own[site]] for site in own}
        topology = Topology(me=self.topology.me, process_of_site=process_of_site, links=self.topology.links)
        objects = {
            site: HostObjects(worker, self.programs.num_workers, sharing=self.objects[own[site]], each=True)
            for site in own if own[site] in self.objects
        }  # fmt: skip
        return Machine(self.programs.iterate, topology, self.backend, objects, timed, one_by_one=True)

    def host_objects(self) -> list[HostObjects]:
        return super().host_objects() + [own for machine in self.machines.values() for own in machine.objects.values()]

    def replay(self, log: list[VersionRead]) -> None:
        self.replayed, self.reads_at = log, {}
        for read in log:
            self.reads_at.setdefault(read.version, []).append(read.worker)

    @property
    def learns(self) -> bool:
        """Whether the learner is in this process."""
        return (self.programs.learner, 0) in self.topology.sites

    def run(
        self, first: int, stop: int, begins: Callable[[int], None] | None = None
    ) -> dict[Site, dict[str, np.ndarray]]:
        """Run iterations first .. stop - 1, each with as many updates as there are workers; see `Execution.run`."""
        self.log = []
        rows: Rows = {site: [] for site in self.topology.sites}
        if not self.learns:
            self._run_worker(rows, begins)
        elif self.has_all_sites:
            self._run_all(first, stop, rows)
        else:
            self._run_learner(first, stop, rows, begins)
        return {
            site: {name: np.stack([self.backend.to_host(row[name]) for row in got]) for name in got[0]}
            for site, got in rows.items()
            if got
        }

    def _run_all(self, first: int, stop: int, rows: Rows) -> None:
        """Run all workers and the learner, one round after the other."""
        for number in range(first * self.programs.num_workers, stop * self.programs.num_workers):
            if self.replayed is None:
                for worker in self.schedule.start(stop * self.programs.num_workers - number):
                    self._publish(worker, number)
                worker = self._pick(self.schedule.eligible())
            else:
                worker = self._next_logged(number)
            self._run_round(worker, number, rows)

    def _pick(self, eligible: list[int]) -> int:
        assert isinstance(self.choose_version, SeededVersions)
        return self.choose_version.pick(eligible)

    def _next_logged(self, number: int) -> int:
        """Publish version `number` to the workers that read this version in the replayed log.

        Returns the worker whose data update `number` uses.
        """
        assert self.replayed is not None
        if number >= len(self.replayed):
            raise RunError(f"The log ends before update {number}.", fix="Replay only the iterations that were logged.")
        for worker in self.reads_at.get(number, ()):
            self._publish(worker, number)
            self.schedule.busy[worker] = number
        return self.replayed[number].worker

    def _run_learner(self, first: int, stop: int, rows: Rows, begins: Callable[[int], None] | None) -> None:
        """Run the learner. It makes one update whenever the data of one worker arrives."""
        for number in range(first * self.programs.num_workers, stop * self.programs.num_workers):
            if begins is not None and number % self.programs.num_workers == 0:
                begins(number // self.programs.num_workers)
            for worker in self.schedule.start(stop * self.programs.num_workers - number):
                self._publish(worker, number)
            self._run_round(self._arrived(self.schedule.eligible()), number, rows)
        for machine in self.machines.values():
            machine.send_no_more_work()

    def _arrived(self, eligible: list[int]) -> int:
        """Wait until the data of one of these workers has arrived. Returns this worker."""
        names = {worker: self._processes_of(worker)[-1] for worker in eligible}
        while True:
            for worker, name in names.items():
                if self.topology.links[name].ready():
                    return worker
            self.waits[eligible[0]](list(names.values()))

    def _processes_of(self, worker: int) -> list[str]:
        """The processes of a worker's program, without the process of the learner."""
        processes = self.machines[worker].topology.process_of_site
        return [process for (group, _), process in processes.items() if group != self.programs.learner]

    def _run_worker(self, rows: Rows, begins: Callable[[int], None] | None) -> None:
        """Run rounds of the one worker in this process, until the learner sends that it needs no more data."""
        ((worker, _),) = self.machines.items()
        while True:
            if begins is not None:
                begins(self.rounds[worker])
            try:
                self._run_round(worker, 0, rows)
            except NoMoreWork:
                return

    def _publish(self, worker: int, number: int) -> None:
        """Send a worker the current version, the state after `number` updates."""
        self.machines[worker].update.number = number
        self.machines[worker].publish(self._given(worker))

    def _run_round(self, worker: int, number: int, rows: Rows) -> None:
        """Run one round of a worker's program at the sites of this process."""
        machine, read = self.machines[worker], number
        machine.update.number = number
        given = self._given(worker)
        results = machine.run(given)
        if self.learns:
            read = self.schedule.busy[worker] if self.replayed is not None else self.schedule.learned_from(worker)
            group = next(name for name, _ in self._program_sites() if name != self.programs.learner)
            self.log.append(VersionRead(f"{group}-{worker}", number, read))
        machine.update.log.clear()
        owned = self._owned(self.programs.iterate, results)
        for site, leaves in owned.items():
            self.leaves[self._site(site, worker)] = leaves
        for site, metrics in self._metrics(results, owned).items():
            rows[self._site(site, worker)].append(metrics)
        self.rounds[worker] += 1

    def _given(self, worker: int) -> Mapping[Site, Mapping[int, Any]]:
        """The inputs of a worker's program at the sites of this process."""
        num_carry, given = self.programs.num_carry, {}
        for site in self.machines[worker].stores:
            own = self._site(site, worker)
            leaves = dict(enumerate(self.leaves[own]))
            number = np.asarray(self.rounds[worker], np.int32)
            given[site] = {**leaves, num_carry: self.keys[worker, site[0]], num_carry + 1: number}
        return given

    def _set_keys(self, run_key: np.ndarray) -> None:
        """Give every worker its own key."""
        super()._set_keys(run_key)
        self.keys = {
            (worker, site[0]): self.backend.fold_in(self._keys(run_key, site), worker)
            for worker in self.workers for site in self.machines[worker].stores
        }  # fmt: skip
