"""Which worker a site lives in, and on which host."""

from collections.abc import Collection

from choreo.errors import RunError
from choreo.host import HostMethod
from choreo.host.make_batch import MakeBatch
from choreo.host.packages import packages_of
from choreo.partition.program import HostCall, walk
from choreo.plans.plan import Plan
from choreo.runtime.coordinator.cluster import LOOPBACK, Cluster, Host, is_loopback, on_one_machine, place
from choreo.runtime.engine.messages import Neighbourhood


def homes_of(plan: Plan) -> dict[tuple[str, int], str]:
    """The worker of each site: one each; with `exact`, several blocks of environments share one."""
    homes = {}
    for group, r in plan.all_sites:
        blocks = plan.replicas(group)
        workers = _num_workers(plan, group)
        homes[group, r] = group if workers is None else f"{group}-{r * workers // blocks}"
    return homes


def _num_workers(plan: Plan, group: str) -> int | None:
    """How many processes a group has; None for one that is never divided."""
    (found,) = (g for g in plan.layout.groups if g.name == group)
    return plan.replicas(group) if found.axis else found.replicas


def hosts_of(plan: Plan, cluster: Cluster) -> dict[str, Host]:
    """The host of each worker."""
    workers = {group: _num_workers(plan, group) for group in plan.sites.replicas}
    found = place(workers, cluster, devices={group: plan.platform(group) for group in workers})
    return {p.group if workers[p.group] is None else f"{p.group}-{p.replica}": p.host for p in found}


def check_collectives(plan: Plan, hosts: dict[str, Host], *, trust_network: bool) -> None:
    """Refuse workers on different machines that combine values with collectives, unless the network is trusted.

    Collectives are JAX's coordination service, and Gloo or NCCL. None of them encrypts or authenticates.
    """
    homes = homes_of(plan)
    for group in sorted(plan.combining):
        workers = list(dict.fromkeys(home for (other, _), home in homes.items() if other == group))
        one = workers[0]
        for other in workers[1:]:
            if not trust_network and not on_one_machine([hosts[one], hosts[other]]):
                raise RunError(
                    f"`{one}` on {hosts[one].address} and `{other}` on {hosts[other].address} combine gradients by "
                    "collectives (Gloo or NCCL), which are neither encrypted nor authenticated.",
                    fix="Put them on one host, or, in a network where everybody is trusted, give --trust-network "
                    "(trust_network=True).",
                )


def collective_address(host: Host, hosts: Collection[Host]) -> str:
    """Where a worker on this host listens for the workers on all these, with which it combines values.

    No other machine can reach it if all are on one machine.
    """
    return LOOPBACK if on_one_machine(hosts) and not is_loopback(host.address) else host.address


def packages_of_plan(plan: Plan) -> list[str]:
    """The installed packages that its calls of Python are made of."""
    calls = [step for p in (plan.init, plan.iterate) for step, _ in walk(p.steps) if isinstance(step, HostCall)]
    made_by = [step.fn.make if isinstance(step.fn, HostMethod) else step.fn for step in calls]
    found = [by.form.packages if isinstance(by, MakeBatch) else packages_of(by) for by in made_by]
    return sorted({name for packages in found for name in packages})


def environments_of(plan: Plan, hood: Neighbourhood, worker: str) -> list[range]:
    """The numbers of the environments that run in a worker as Python."""
    found = {
        (site, step.fn.num_envs)
        for step, _ in walk(plan.iterate.steps)
        if isinstance(step, HostCall) and isinstance(step.fn, HostMethod)
        for site, home in hood.homes.items()
        if home == worker and site[0] == step.group
    }
    blocks = [(r, count // hood.replicas(group)) for (group, r), count in sorted(found)]
    return [range(r * size, (r + 1) * size) for r, size in blocks]
