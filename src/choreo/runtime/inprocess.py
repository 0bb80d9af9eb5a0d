"""The serial runtime: executes a plan in this process, one step after the other, without threads.

This runtime defines the results of a plan in lockstep: every other runtime must give the same bits. Breakpoints and
`jax.debug.print` in the user's code work, because this process traces and runs all segments.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from choreo.host.states import HostStates
from choreo.plans.plan import Plan
from choreo.runtime.engine import host_states
from choreo.runtime.engine.arrivals import Arrivals
from choreo.runtime.engine.assemble import (
    extents_of_leaf,
    join_leaf,
    programs_of,
    sites_of_leaf,
    sizes_of_objects,
    split_carry,
    split_key,
)
from choreo.runtime.engine.backend import Site
from choreo.runtime.engine.execution import Execution
from choreo.runtime.engine.jax_backend import JaxBackend
from choreo.runtime.engine.messages import Topology
from choreo.runtime.engine.metrics import join_metrics
from choreo.runtime.engine.profile import Profile, Recorder
from choreo.runtime.engine.schedule import VersionRead
from choreo.runtime.engine.xla_threads import start_jax
from choreo.types import Key, PyTree


class InProcess:
    """Executes a plan serially."""

    def __init__(self, plan: Plan, *, profile: bool = False, replay: list[VersionRead] | None = None):
        """With `profile`, the steps are timed. `replay` is for relaxed layouts: the log of another run of this plan, so that this
        run reads the same versions. If `replay` is None, versions are drawn at random from the key of the run."""
        self.plan, self.recorder = plan, Recorder() if profile else None
        self.replayed, self.log = replay, []
        timed = self.recorder and self.recorder.timed
        start_jax(plan)
        platforms = {group: plan.platform(group) for group in plan.sites.replicas}
        self.backend = JaxBackend(platforms, timed, carry_axes=plan.carry_axes, partitioned=plan.partitioned,
                             num_devices={group: plan.replicas(group) for group in plan.combining})  # fmt: skip
        for group in plan.layout.groups:
            if group.name in platforms:
                self.backend.check_devices(group.name, group.devices)
        programs = programs_of(plan, plan.init, plan.iterate)
        topology = Topology(me="here", process_of_site=dict.fromkeys(plan.all_sites, "here"))
        self.execution = (Arrivals if programs.num_workers > 1 else Execution)(programs, topology, self.backend, timed)

    @property
    def compile_seconds(self) -> float:
        return self.backend.compile_seconds

    @property
    def differences(self) -> dict[str, dict[str, str]]:
        return {}

    def start(self, key: Key) -> None:
        self.execution.start(*split_key(key))
        if self.replayed is not None:
            self.execution.replay(self.replayed)

    def run(self, first: int, stop: int) -> dict[str, np.ndarray]:
        metrics = self.execution.run(first, stop)
        self.log += self.execution.log
        return join_metrics(self.plan, metrics, self.execution.log, range(first, stop))

    def carry(self, part: str | None = None) -> PyTree:
        # The leaves are copied, because the next iteration may donate the memory of the carry.
        leaves = [
            jnp.copy(join_leaf(self.plan, i, [jnp.asarray(each) for each in self._parts(i)]))
            for i in self.plan.leaves_of_part(part)
        ]
        return self.plan.combine(leaves, part)

    def stream(self, which: Iterable[int]) -> Iterator[np.ndarray]:
        for i in which:
            parts = dict(zip(sites_of_leaf(self.plan, i), map(self.backend.to_host, self._parts(i)), strict=True))
            for extent in extents_of_leaf(self.plan, i):
                yield extent.join([extent.take(parts[site]) for site in extent.sites])

    def _parts(self, i: int) -> list[Any]:
        return [self.execution.leaves[site][i] for site in sites_of_leaf(self.plan, i)]

    def restore(self, carry: PyTree, key: Key) -> None:
        leaves = {
            site: [None if leaf is None else self._put(leaf, site) for leaf in row]
            for site, row in split_carry(self.plan, carry).items()
        }
        self.execution.restore(leaves, split_key(key)[1])

    def host_states(self) -> HostStates:
        return HostStates.gathered(*host_states.collect(self.execution))

    def load_host_states(self, states: HostStates) -> None:
        states.check(sizes_of_objects(self.plan))
        host_states.load(self.execution, states.objects)

    def _put(self, leaf: Any, site: Site) -> Any:
        return jax.device_put(jnp.copy(leaf), self.backend.device(site))

    def profile(self) -> Profile:
        assert self.recorder is not None, "the runtime was made without profile=True"
        return Profile({"this process": self.recorder.to_json()}, self.plan.name)

    def close(self) -> None:
        self.execution.close()
