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
from choreo.runtime.engine.schedule import Read, Seeded, Traffic

POLL_S = 50e-6
"""How long to sleep between two looks for an arrival; it doubles up to `LONGEST_POLL_S`."""
LONGEST_POLL_S = 1e-3


class Arrivals(Execution):
    """Executes the programs of the workers, or of the site that learns, or of all."""

    def __init__(self, orders: Orders, hood: Neighbourhood, backend: Backend, watch: Watch | None = None):
        super().__init__(orders, hood, backend, watch)
        self.copies = [c for c in range(orders.copies) if self._lives_here(c)]
        self.machines = {c: self._machine(c, watch) for c in self.copies}
        self.parts = dict.fromkeys(self.copies, 0)
        """How many parts each worker has made."""
        watch = watch or (lambda kind, name, fn: fn)
        self.sleeps = {c: watch("wait", self._homes_of(c)[0], time.sleep) for c in self.copies}
        self.traffic = Traffic(orders.copies, orders.max_lag)
        self.replayed: list[Read] | None = None
        self.reads_at: dict[int, list[int]] = {}
        """By the log that is replayed: the workers that read a version."""

    def _lives_here(self, copy: int) -> bool:
        return any(self._site(site, copy) in self.hood.sites for site in self._program_sites())

    def _program_sites(self) -> list[Site]:
        return [(group, 0) for group in dict.fromkeys(group for group, _ in self.hood.homes)]

    def _site(self, site: Site, copy: int) -> Site:
        """The site of the plan that a site of one worker's program stands for."""
        return site if site[0] == self.orders.learner else (site[0], copy)

    def _machine(self, copy: int, watch: Watch | None) -> Machine:
        homes = {site: self.hood.homes[self._site(site, copy)] for site in self._program_sites()}
        hood = Neighbourhood(me=self.hood.me, homes=homes, links=self.hood.links)
        hosts = {
            site: HostObjects(copy, self.orders.copies, sharing=self.hosts[own], each=True)
            for site in homes if (own := self._site(site, copy)) in self.hosts
        }  # fmt: skip
        return Machine(self.orders.iterate, hood, self.backend, hosts, watch, one_by_one=True)

    def host_objects(self) -> list[HostObjects]:
        return super().host_objects() + [own for machine in self.machines.values() for own in machine.hosts.values()]

    def replay(self, log: list[Read]) -> None:
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
        for number in range(first * self.orders.copies, stop * self.orders.copies):
            if self.replayed is None:
                for copy in self.traffic.start(stop * self.orders.copies - number):
                    self._publish(copy, number)
                copy = self.pick(self.traffic.eligible())
            else:
                copy = self._next_logged(number)
            self._one_part(copy, number, rows)

    def pick(self, eligible: list[int]) -> int:
        assert isinstance(self.versions, Seeded)
        return self.versions.pick(eligible)

    def _next_logged(self, number: int) -> int:
        """By the log: let workers read now who did so then, and say whose part is next."""
        assert self.replayed is not None
        if number >= len(self.replayed):
            raise RunError(f"The log ends before update {number}.", fix="Replay no more than was logged.")
        for copy in self.reads_at.get(number, ()):
            self._publish(copy, number)
            self.traffic.under_way[copy] = number
        return _copy_of(self.replayed[number].reader)

    def _learn_from_others(
        self, first: int, stop: int, rows: dict[Site, list[dict[str, Any]]], begins: Callable[[int], None] | None
    ) -> None:
        for number in range(first * self.orders.copies, stop * self.orders.copies):
            if begins is not None and number % self.orders.copies == 0:
                begins(number // self.orders.copies)
            for copy in self.traffic.start(stop * self.orders.copies - number):
                self._publish(copy, number)
            self._one_part(self._arrived(self.traffic.eligible()), number, rows)
        for machine in self.machines.values():
            machine.say_no_more_work()

    def _arrived(self, eligible: list[int]) -> int:
        """The first of these workers whose part is here."""
        pause = POLL_S
        ready = {c: self.hood.links[home].ready for c in eligible for home in self._homes_of(c)}
        while True:
            for copy in eligible:
                if ready[copy]():
                    return copy
            self.sleeps[eligible[0]](pause)
            pause = min(2 * pause, LONGEST_POLL_S)

    def _homes_of(self, copy: int) -> list[str]:
        return [home for site, home in self.machines[copy].hood.homes.items() if site[0] != self.orders.learner]

    def _work(self, rows: dict[Site, list[dict[str, Any]]], begins: Callable[[int], None] | None) -> None:
        ((copy, _),) = self.machines.items()
        while True:
            if begins is not None:
                begins(self.parts[copy])
            try:
                self._one_part(copy, 0, rows)
            except NoMoreWork:
                return

    def _publish(self, copy: int, number: int) -> None:
        self.machines[copy].updates.number = number
        self.machines[copy].publish(self._given(copy))

    def _one_part(self, copy: int, number: int, rows: dict[Site, list[dict[str, Any]]]) -> None:
        """Run the program of one worker, as far as it lives here."""
        machine, read = self.machines[copy], number
        machine.updates.number = number
        given = self._given(copy)
        results = machine.run(given)
        if self.learns:
            read = self.traffic.under_way[copy] if self.replayed is not None else self.traffic.learned_from(copy)
            worker = next(group for group, _ in self._program_sites() if group != self.orders.learner)
            self.log.append(Read(f"{worker}-{copy}", number, read))
        machine.updates.log.clear()
        owned = self._owned(self.orders.iterate, results)
        for site, leaves in owned.items():
            self.leaves[self._site(site, copy)] = leaves
        for site, metrics in self._metrics(results, owned).items():
            rows[self._site(site, copy)].append(metrics)
        self.parts[copy] += 1

    def _given(self, copy: int) -> Mapping[Site, Mapping[int, Any]]:
        num_carry, given = self.orders.num_carry, {}
        for site in self.machines[copy].stores:
            own = self._site(site, copy)
            leaves = dict(enumerate(self.leaves[own]))
            number = np.asarray(self.parts[copy], np.int32)
            given[site] = {**leaves, num_carry: self.keys[copy, site[0]], num_carry + 1: number}
        return given

    def _set_keys(self, run_key: np.ndarray) -> None:
        """Every worker has a key of its own."""
        super()._set_keys(run_key)
        self.keys = {
            (copy, site[0]): self.backend.fold_in(self._keys(run_key, site), copy)
            for copy in self.copies for site in self.machines[copy].stores
        }  # fmt: skip


def _copy_of(reader: str) -> int:
    return int(reader.rpartition("-")[2])
