"""Where a plan runs: the worker process of each site, and the host of each worker. For example:

    sites         env+actor 0 .. 3 (one for each block; with exact=True, 8 environments make four blocks), learner 0
    processes     env+actor-0 and env+actor-1 (workers=2) run two sites each, and learner runs one site
    hosts         `cluster.place` chooses the host of each process

Everything here is computed before any process is started.
"""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from choreo.errors import RunError
from choreo.host import HostMethod
from choreo.host.make_batch import MakeBatch
from choreo.host.packages import packages_of
from choreo.partition.program import HostCall, Segment, walk
from choreo.plans.plan import Plan
from choreo.runtime.coordinator.cluster import LOOPBACK, Cluster, Host, is_loopback, on_one_machine, place
from choreo.runtime.engine.backend import Site


@dataclass(frozen=True, kw_only=True, eq=False)
class Deployment:
    """A plan, divided over worker processes on the hosts of a cluster."""

    plan: Plan
    """The plan to execute."""
    process_of_site: Mapping[Site, str]
    """The name of the worker process that runs each site."""
    hosts: Mapping[str, Host]
    """The host of each worker."""
    over_tcp: bool
    """True if all channels between workers must use TCP. If False, two workers on one host may use shared memory."""

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster, *, over_tcp: bool) -> "Deployment":
        """The deployment of a plan on a cluster."""
        return cls(plan=plan, process_of_site=assign_processes(plan), hosts=hosts_of(plan, cluster), over_tcp=over_tcp)

    @functools.cached_property
    def workers(self) -> list[str]:
        """The names of all workers."""
        return list(dict.fromkeys(self.process_of_site.values()))

    def groups(self, worker: str) -> list[str]:
        """The groups that have a site in a worker."""
        return list(dict.fromkeys(group for (group, _), name in self.process_of_site.items() if name == worker))

    def compiles(self, worker: str) -> bool:
        """Return True if a worker runs compiled programs. Otherwise it runs only Python, and need not import JAX."""
        groups, programs = self.groups(worker), (self.plan.init, self.plan.iterate)
        return any(isinstance(step, Segment) and step.group in groups for p in programs for step, _ in walk(p.steps))

    def collective(self, worker: str) -> dict[str, Any] | None:
        """The collective in which a worker combines values with other processes inside compiled programs, or None.

        Returns the group, the worker's rank, the number of processes, and the address where the worker listens for the collective.
        """
        for (group, r), name in self.process_of_site.items():
            processes = {other for (g, _), other in self.process_of_site.items() if g == group}
            if name == worker and group in self.plan.combining and len(processes) > 1:
                address = collective_address(self.hosts[worker], [self.hosts[other] for other in processes])
                return {"group": group, "rank": r, "size": len(processes), "address": address}
        return None

    def environments(self, worker: str) -> list[range]:
        """The numbers of the Python environments that a worker steps."""
        found = {
            (site, step.fn.num_envs)
            for step, _ in walk(self.plan.iterate.steps)
            if isinstance(step, HostCall) and isinstance(step.fn, HostMethod)
            for site, name in self.process_of_site.items()
            if name == worker and site[0] == step.group
        }
        blocks = [(r, count // self.plan.replicas(group)) for (group, r), count in sorted(found)]
        return [range(r * size, (r + 1) * size) for r, size in blocks]


def assign_processes(plan: Plan) -> dict[Site, str]:
    """The worker process of each site. Usually, each site has its own process.

    With `exact`, or if a group has several devices, several sites of a group may share a process.
    """
    processes = {}
    for group, r in plan.all_sites:
        blocks = plan.replicas(group)
        workers = _num_workers(plan, group)
        processes[group, r] = group if workers is None else f"{group}-{r * workers // blocks}"
    return processes


def hosts_of(plan: Plan, cluster: Cluster) -> dict[str, Host]:
    """The host of each worker."""
    workers = {group: _num_workers(plan, group) for group in plan.sites.replicas}
    found = place(workers, cluster, devices={group: plan.platform(group) for group in workers})
    return {p.group if workers[p.group] is None else f"{p.group}-{p.replica}": p.host for p in found}


def _num_workers(plan: Plan, group: str) -> int | None:
    """How many processes a group has, or None for a group that is not replicated."""
    (found,) = (g for g in plan.layout.groups if g.name == group)
    return plan.replicas(group) if found.axis else found.replicas


def check_collectives(plan: Plan, hosts: Mapping[str, Host], *, trust_network: bool) -> None:
    """Raise RunError if workers on different machines combine values by collectives, and `trust_network` is False.

    Collectives use JAX's coordination service, and Gloo or NCCL. None of these encrypts or authenticates its connections.
    """
    processes = assign_processes(plan)
    for group in sorted(plan.combining):
        workers = list(dict.fromkeys(name for (other, _), name in processes.items() if other == group))
        one = workers[0]
        for other in workers[1:]:
            if not trust_network and not on_one_machine([hosts[one], hosts[other]]):
                raise RunError(
                    f"`{one}` on {hosts[one].address} and `{other}` on {hosts[other].address} combine gradients by "
                    "collectives (Gloo or NCCL), which are neither encrypted nor authenticated.",
                    fix="Put these workers on one host. Or, if you trust everybody in the network, give --trust-network "
                    "(trust_network=True).",
                )


def collective_address(host: Host, hosts: Collection[Host]) -> str:
    """The address where a worker on `host` listens for its collective. `hosts` are the hosts of all workers of the collective.

    If all these workers are on one machine, the address is a loopback address, which no other machine can reach.
    """
    return LOOPBACK if on_one_machine(hosts) and not is_loopback(host.address) else host.address


def packages_of_plan(plan: Plan) -> list[str]:
    """The installed packages that contain the plan's Python environments and functions."""
    calls = [step for p in (plan.init, plan.iterate) for step, _ in walk(p.steps) if isinstance(step, HostCall)]
    made_by = [step.fn.make if isinstance(step.fn, HostMethod) else step.fn for step in calls]
    found = [by.form.packages if isinstance(by, MakeBatch) else packages_of(by) for by in made_by]
    return sorted({name for packages in found for name in packages})
