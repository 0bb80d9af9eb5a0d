"""merge="any": one site learns from the part of each worker as it arrives.

    worker 0   reads version 0 ── acts ──▶ update 1 ── reads version 1 ── acts ──────▶ update 3
    worker 1   reads version 0 ── acts ──────────▶ update 2 ── reads version 2 ── acts ──▶ update 4

Every worker runs the same program, with environments of its own; who learns holds what is shared. What a run means is given
by its log: the workers in the order in which they were learned from, each with the version it had read. In this process the
order is drawn at random from a seed, or taken from a log; among processes it is that of arrival.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from choreo.errors import RunError
from choreo.host import HostObjects
from choreo.runtime.engine.backend import Backend, Site, Watch
from choreo.runtime.engine.bundles import NoMoreWork
from choreo.runtime.engine.execution import Execution, Orders
from choreo.runtime.engine.machine import Machine
from choreo.runtime.engine.messages import Neighbourhood
from choreo.runtime.engine.schedule import Seeded, Traffic, VersionRead

POLL_S = 50e-6
"""How long to sleep between two looks for an arrival; it doubles up to `LONGEST_POLL_S`."""
LONGEST_POLL_S = 1e-3


class Arrivals(Execution):
    """Executes the programs of the workers, or of the site that learns, or of all."""

    def __init__(self, orders: Orders, hood: Neighbourhood, backend: Backend, watch: Watch | None = None):
        super().__init__(orders, hood, backend, watch)
        self.workers = [c for c in range(orders.num_workers) if self._lives_here(c)]
        self.machines = {c: self._machine(c, watch) for c in self.workers}
        self.parts = dict.fromkeys(self.workers, 0)
        """How many parts each worker has made."""
        watch = watch or (lambda kind, name, fn: fn)
        self.sleeps = {c: watch("wait", self._homes_of(c)[0], time.sleep) for c in self.workers}
        self.traffic = Traffic(orders.num_workers, orders.max_lag)
        self.replayed: list[VersionRead] | None = None
        self.reads_at: dict[int, list[int]] = {}
        """By the log that is replayed: the workers that read a version."""

    def _lives_here(self, worker: int) -> bool:
        return any(self._site(site, worker) in self.hood.sites for site in self._program_sites())

    def _program_sites(self) -> list[Site]:
        return [(group, 0) for group in dict.fromkeys(group for group, _ in self.hood.homes)]

    def _site(self, site: Site, worker: int) -> Site:
        """The site of the plan that a site of one worker's program stands for."""
        return site if site[0] == self.orders.learner else (site[0], worker)

    def _machine(self, worker: int, watch: Watch | None) -> Machine:
        homes = {site: self.hood.homes[self._site(site, worker)] for site in self._program_sites()}
        hood = Neighbourhood(me=self.hood.me, homes=homes, links=self.hood.links)
        hosts = {
            site: HostObjects(worker, self.orders.num_workers, sharing=self.hosts[own], each=True)
            for site in homes if (own := self._site(site, worker)) in self.hosts
        }  # fmt: skip
        return Machine(self.orders.iterate, hood, self.backend, hosts, watch, one_by_one=True)

    def host_objects(self) -> list[HostObjects]:
        return super().host_objects() + [own for machine in self.machines.values() for own in machine.hosts.values()]

    def replay(self, log: list[VersionRead]) -> None:
        self.replayed, self.reads_at = log, {}
        for read in log:
            self.reads_at.setdefault(read.version, []).append(_copy_of(read.reader))

    @property
    def learns(self) -> bool:
        return (self.orders.learner, 0) in self.hood.sites

    def run(
        self, first: int, stop: int, begins: Callable[[int], None] | None = None
    ) -> dict[Site, dict[str, np.ndarray]]:
        """Learn from so many parts as there are workers, in every iteration; see `Execution.run`."""
        self.log = []
        rows: dict[Site, list[dict[str, Any]]] = {site: [] for site in self.hood.sites}
        if not self.learns:
            self._work(rows, begins)
        elif len(self.hood.homes) > len(self.hood.sites):
            self._learn_from_others(first, stop, rows, begins)
        else:
            self._do_all(first, stop, rows)
        return {
            site: {name: np.stack([self.backend.to_host(row[name]) for row in got]) for name in got[0]}
            for site, got in rows.items()
            if got
        }

    def _do_all(self, first: int, stop: int, rows: dict[Site, list[dict[str, Any]]]) -> None:
        for number in range(first * self.orders.num_workers, stop * self.orders.num_workers):
            if self.replayed is None:
                for worker in self.traffic.start(stop * self.orders.num_workers - number):
                    self._publish(worker, number)
                worker = self.pick(self.traffic.eligible())
            else:
                worker = self._next_logged(number)
            self._one_part(worker, number, rows)

    def pick(self, eligible: list[int]) -> int:
        assert isinstance(self.versions, Seeded)
        return self.versions.pick(eligible)

    def _next_logged(self, number: int) -> int:
        """By the log: let workers read now who did so then, and say whose part is next."""
        assert self.replayed is not None
        if number >= len(self.replayed):
            raise RunError(f"The log ends before update {number}.", fix="Replay no more than was logged.")
        for worker in self.reads_at.get(number, ()):
            self._publish(worker, number)
            self.traffic.under_way[worker] = number
        return _copy_of(self.replayed[number].reader)

    def _learn_from_others(
        self, first: int, stop: int, rows: dict[Site, list[dict[str, Any]]], begins: Callable[[int], None] | None
    ) -> None:
        for number in range(first * self.orders.num_workers, stop * self.orders.num_workers):
            if begins is not None and number % self.orders.num_workers == 0:
                begins(number // self.orders.num_workers)
            for worker in self.traffic.start(stop * self.orders.num_workers - number):
                self._publish(worker, number)
            self._one_part(self._arrived(self.traffic.eligible()), number, rows)
        for machine in self.machines.values():
            machine.say_no_more_work()

    def _arrived(self, eligible: list[int]) -> int:
        """The first of these workers whose part is here."""
        pause = POLL_S
        ready = {c: self.hood.links[home].ready for c in eligible for home in self._homes_of(c)}
        while True:
            for worker in eligible:
                if ready[worker]():
                    return worker
            self.sleeps[eligible[0]](pause)
            pause = min(2 * pause, LONGEST_POLL_S)

    def _homes_of(self, worker: int) -> list[str]:
        return [home for site, home in self.machines[worker].hood.homes.items() if site[0] != self.orders.learner]

    def _work(self, rows: dict[Site, list[dict[str, Any]]], begins: Callable[[int], None] | None) -> None:
        ((worker, _),) = self.machines.items()
        while True:
            if begins is not None:
                begins(self.parts[worker])
            try:
                self._one_part(worker, 0, rows)
            except NoMoreWork:
                return

    def _publish(self, worker: int, number: int) -> None:
        self.machines[worker].updates.number = number
        self.machines[worker].publish(self._given(worker))

    def _one_part(self, worker: int, number: int, rows: dict[Site, list[dict[str, Any]]]) -> None:
        """Run the program of one worker, as far as it lives here."""
        machine, read = self.machines[worker], number
        machine.updates.number = number
        given = self._given(worker)
        results = machine.run(given)
        if self.learns:
            read = self.traffic.under_way[worker] if self.replayed is not None else self.traffic.learned_from(worker)
            group = next(name for name, _ in self._program_sites() if name != self.orders.learner)
            self.log.append(VersionRead(f"{group}-{worker}", number, read))
        machine.updates.log.clear()
        owned = self._owned(self.orders.iterate, results)
        for site, leaves in owned.items():
            self.leaves[self._site(site, worker)] = leaves
        for site, metrics in self._metrics(results, owned).items():
            rows[self._site(site, worker)].append(metrics)
        self.parts[worker] += 1

    def _given(self, worker: int) -> Mapping[Site, Mapping[int, Any]]:
        num_carry, given = self.orders.num_carry, {}
        for site in self.machines[worker].stores:
            own = self._site(site, worker)
            leaves = dict(enumerate(self.leaves[own]))
            number = np.asarray(self.parts[worker], np.int32)
            given[site] = {**leaves, num_carry: self.keys[worker, site[0]], num_carry + 1: number}
        return given

    def _set_keys(self, run_key: np.ndarray) -> None:
        """Every worker has a key of its own."""
        super()._set_keys(run_key)
        self.keys = {
            (worker, site[0]): self.backend.fold_in(self._keys(run_key, site), worker)
            for worker in self.workers for site in self.machines[worker].stores
        }  # fmt: skip


def _copy_of(reader: str) -> int:
    return int(reader.rpartition("-")[2])
