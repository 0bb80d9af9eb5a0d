"""The runtime with worker processes, on this machine or on a cluster. On this machine, it needs no set-up.

The coordinator (the user's process, with a `Local` object) owns the workers:

    coordinator ── control socket ── worker env+actor-0 ══ shared memory ══ worker learner
                └─ control socket ── worker env+actor-1 ══ shared memory ══╝

For a worker on another host, the control socket is an encrypted tunnel. Channels between two hosts are encrypted TCP connections.

    deployment.py     the worker of each site, and the host of each worker
    briefing.py       the settings of each worker          wiring.py        the channels between workers
    launching.py      start workers and set them up        handle.py        one worker
    conversation.py   commands and replies                 pool.py          all workers: poll, read, end
    state_machine.py  decides who failed first, who is silent  supervision.py  makes the error for the user

When a worker ends before it is told to stop, the coordinator ends all other workers and raises one error, with the name and
the traceback of the worker that failed first. Shared memory and sockets have no names in the file system, so nothing remains
after the processes end.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from choreo._compat import is_key, key_impl
from choreo.host.states import HostStates, SiteStates, decode, encode
from choreo.plans.plan import Plan
from choreo.runtime.coordinator.briefing import pickled_programs
from choreo.runtime.coordinator.cluster import Cluster
from choreo.runtime.coordinator.conversation import Conversation
from choreo.runtime.coordinator.deployment import Deployment, check_collectives
from choreo.runtime.coordinator.launching import launch
from choreo.runtime.coordinator.pool import WorkerPool
from choreo.runtime.coordinator.silence import Silence
from choreo.runtime.engine.assemble import (
    EXTENT_BYTES,
    extents_of_leaf,
    sizes_of_objects,
    split_carry,
    split_key,
    type_of_leaf,
)
from choreo.runtime.engine.backend import Site
from choreo.runtime.engine.extents import Extent, chunks
from choreo.runtime.engine.metrics import join_metrics
from choreo.runtime.engine.profile import Profile
from choreo.runtime.engine.schedule import VersionRead, from_json
from choreo.types import Key, PyTree


class Local:
    """Executes a plan with worker processes."""

    def __init__(
        self,
        plan: Plan,
        *,
        carrier: str = "shm",
        cluster: Cluster | None = None,
        env_timeout_s: float = 60.0,
        silence: Silence | None = None,
        profile: bool = False,
        allow_versions: bool = False,
        same_bits: bool = False,
        trust_network: bool = False,
        on_output: Callable[[str, str], None] | None = None,
        on_states: Callable[[dict[str, str]], None] | None = None,
    ):
        """Start the workers of a plan, and wait until they are ready.

        carrier           "shm": channels between workers on one host may use shared memory; "tcp": all channels use TCP
        cluster           the hosts to use; None for only this machine
        env_timeout_s     seconds after which an environment that does not return counts as hanging; 0 turns the check off
        silence           how long a worker may be silent until it is named, and until it counts as dead
        profile           time the steps of the workers
        allow_versions    accept hosts with different versions of Python or of packages
        same_bits         refuse hosts whose results may differ in some bit: different versions, CPU or XLA_FLAGS
        trust_network     let workers on different machines use collectives, which are neither encrypted nor authenticated
        on_output         called as `on_output(worker, line)` for each line that a worker prints, and for each line about a worker
        on_states         called with the states of all workers (such as "iteration 7") when a worker reports progress or is silent
        """
        cluster_of_run = cluster or Cluster.local()
        self.plan, self.deployment = plan, Deployment.of(plan, cluster_of_run, over_tcp=carrier == "tcp")
        check_collectives(plan, self.deployment.hosts, trust_network=trust_network)
        token = cluster_of_run.token()
        # Pickle the programs before any worker is started: pickling raises an error if an environment cannot be pickled.
        programs = {worker: pickled_programs(self.deployment, worker) for worker in self.deployment.workers}
        self.log: list[VersionRead] = []
        """In a relaxed layout, the version that each worker read for each update, since the caller last cleared this list."""
        silence = silence or Silence()
        environments = {worker: self.deployment.environments(worker) for worker in self.deployment.workers}
        self.pool = WorkerPool(on_output or _print_line, on_states, silence=silence, environments=environments)
        self.conversation = Conversation(self.pool, self.deployment)
        try:
            self.differences = launch(
                self.conversation, programs, token=token, allow_versions=allow_versions, same_bits=same_bits,
                profile=profile, env_timeout_s=env_timeout_s, silence=silence,
            )  # fmt: skip
        except BaseException:
            self.pool.kill()
            raise

    @property
    def compile_seconds(self) -> float:
        return max(self.conversation.compile_seconds.values(), default=0.0)

    def start(self, key: Key) -> None:
        self.conversation.tell_all({"kind": "start"}, split_key(key))
        self.conversation.await_replies("done", doing="init")

    def run(self, first: int, stop: int) -> dict[str, np.ndarray]:
        self.conversation.tell_all({"kind": "run", "first": first, "stop": stop})
        metrics: dict[Site, dict[str, np.ndarray]] = {}
        log: list[VersionRead] = []
        replies = self.conversation.await_replies("ran", doing=f"iterations {first} to {stop - 1}")
        for header, arrays in replies.values():
            log += from_json(header["log"])
            for (group, r, name), array in zip(header["names"], arrays, strict=True):
                metrics.setdefault((group, r), {})[name] = array
        self.log += log
        return join_metrics(self.plan, metrics, log, range(first, stop))

    def carry(self, part: str | None = None) -> PyTree:
        which = self.plan.leaves_of_part(part)
        leaves, stream = [], self.stream(which)
        for i in which:
            leaf = np.empty(*type_of_leaf(self.plan, i))
            flat, filled = leaf.reshape(-1), 0
            while filled < flat.size:
                elements = next(stream)
                flat[filled : filled + elements.size] = elements
                filled += elements.size
            leaves.append(_to_jax(leaf, self.plan.iterate.ins[i].aval))
        return self.plan.combine(leaves, part)

    def stream(self, which: Iterable[int]) -> Iterator[np.ndarray]:
        extents = (extent for i in which for extent in extents_of_leaf(self.plan, i))
        for chunk in chunks(extents, lambda extent: extent.size_bytes, EXTENT_BYTES):
            received = self._ask_for(chunk)
            for extent in chunk:
                yield extent.join([received[site].pop(0) for site in extent.sites])

    def _ask_for(self, chunk: Sequence[Extent]) -> dict[Site, list[np.ndarray]]:
        """The elements of these extents that each site holds."""
        sites = dict.fromkeys(site for extent in chunk for site in extent.sites)
        of_site = {site: [extent for extent in chunk if site in extent.sites] for site in sites}
        for worker in self.deployment.workers:
            wanted = [[*site, extent.leaf, extent.outer, extent.rows, extent.columns] for site in of_site
                      if self.deployment.process_of_site[site] == worker for extent in of_site[site]]  # fmt: skip
            self.conversation.tell(worker, {"kind": "carry", "extents": wanted}, [])
        received: dict[Site, list[np.ndarray]] = {site: [] for site in of_site}
        for header, arrays in self.conversation.await_replies("carry", doing="sending the carry").values():
            for (group, r), array in zip(header["sites"], arrays, strict=True):
                received[group, r].append(array)
        return received

    def restore(self, carry: PyTree, key: Key) -> None:
        parts, run_key = split_carry(self.plan, carry), split_key(key)[1]
        for worker in self.deployment.workers:
            held = [((*site, i), _to_numpy(leaf)) for site, leaves in parts.items()
                    if self.deployment.process_of_site[site] == worker
                    for i, leaf in enumerate(leaves) if leaf is not None]  # fmt: skip
            header = {"kind": "restore", "num_carry": self.plan.num_carry, "names": [where for where, _ in held]}
            self.conversation.tell(worker, header, [run_key, *(leaf for _, leaf in held)])
        self.conversation.await_replies("done", doing="restoring the carry")

    def host_states(self) -> HostStates:
        self.conversation.tell_all({"kind": "host_states"})
        parts: list[SiteStates] = []
        lost: list[str] = []
        for header, arrays in self.conversation.await_replies("host_states", doing="sending their states").values():
            lost += header["lost"]
            parts += [
                SiteStates(number=number, first=first, states=decode(states, arrays))
                for number, first, states in header["parts"]
            ]
        return HostStates.gathered(parts, lost)

    def load_host_states(self, states: HostStates) -> None:
        states.check(sizes_of_objects(self.plan))
        objects, arrays = encode([list(each) for each in states.objects.values()], "a stored object")
        numbered = dict(zip(states.objects, objects, strict=True))
        self.conversation.tell_all({"kind": "load_host_states", "objects": list(numbered.items())}, arrays)
        self.conversation.await_replies("done", doing="loading their states")

    def profile(self) -> Profile:
        """How each worker has spent its time so far."""
        self.conversation.tell_all({"kind": "profile"})
        replies = self.conversation.await_replies("profile", doing="sending their profiles")
        return Profile({worker: header["recorded"] for worker, (header, _) in replies.items()}, self.plan.name)

    def close(self) -> None:
        """Stop all workers and close their environments. Workers that do not stop in time are killed."""
        self.pool.close()


def _to_jax(array: np.ndarray, aval: Any) -> jax.Array:
    value = jnp.asarray(array)
    return jax.random.wrap_key_data(value, impl=key_impl(aval.dtype)) if is_key(aval.dtype) else value


def _to_numpy(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf)


def _print_line(worker: str, line: str) -> None:
    print(f"[{worker}] {line}", file=sys.stderr, flush=True)
