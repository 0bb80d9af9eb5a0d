"""Worker processes, one per site: on this machine, with nothing to install or start, or on the hosts of a cluster.

The coordinator (this object, in the user's process) owns them:

    coordinator ── control socket ── worker env+actor-0 ══ shared memory ══ worker learner
                └─ control socket ── worker env+actor-1 ══ shared memory ══╝

Of a worker on another host, the control socket is a tunnel, and channels are TCP; both are encrypted.

It hears of a worker's end at once (its control socket closes), looks for whoever began it, ends all others and raises one
error with that worker's name and traceback. All shared memory and all sockets are without names, so nothing outlives the
processes. It runs no threads: worker output and replies are read while it waits for workers.
"""

import contextlib
import itertools
import os
import secrets
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import zmq

from choreo._compat import is_key, key_impl
from choreo.errors import ChoreoError, PartitionError
from choreo.partition.program import HostCall, Segment, Transfer, walk
from choreo.plans.plan import Plan, array_type, exported
from choreo.runtime.channels.base import message_bytes
from choreo.runtime.channels.keys import KeyPair
from choreo.runtime.channels.shm import make_shm_channel
from choreo.runtime.channels.tcp_ends import SILENCE_S
from choreo.runtime.coordinator.cluster import Cluster, ClusterError
from choreo.runtime.coordinator.member import Member, WorkerError, describe, describe_silent
from choreo.runtime.coordinator.processes import (
    check_collectives,
    collective_address,
    environments_of,
    homes_of,
    hosts_of,
    packages_of_plan,
)
from choreo.runtime.coordinator.remote import RemoteProcess
from choreo.runtime.coordinator.versions import Versions, compare, this_machine
from choreo.runtime.coordinator.wire import Frame, WireError, receive_frame, send_frame
from choreo.runtime.engine.assemble import join_carry, orders_of, split_carry, split_key
from choreo.runtime.engine.backend import host_type
from choreo.runtime.engine.bundles import BUNDLE
from choreo.runtime.engine.messages import Neighbourhood, messages
from choreo.runtime.engine.metrics import join_metrics
from choreo.runtime.engine.profile import Profile
from choreo.runtime.engine.schedule import VersionRead, from_json
from choreo.runtime.engine.threads import XLA_THREADS, useful_threads
from choreo.types import Key, PyTree

SLOTS = 2
"""Messages that may wait in a channel."""
GRACE_S = 2.0
"""How long to look for the worker that failed first, and how long workers have to end."""
START_S = 120.0
"""How long a worker may take to be ready."""
ASIDE = "iteration"
"""What workers say without being asked."""
CHATTER = "[Gloo] Rank "
"""How the lines begin that a library prints when all is well."""


class Local:
    """Executes a plan with worker processes."""

    def __init__(
        self,
        plan: Plan,
        *,
        carrier: str = "shm",
        cluster: Cluster | None = None,
        env_timeout_s: float = 60.0,
        profile: bool = False,
        allow_versions: bool = False,
        same_bits: bool = False,
        trust_network: bool = False,
        on_output: Callable[[str, str], None] | None = None,
        on_states: Callable[[dict[str, str]], None] | None = None,
    ):
        """`on_output` gets each line a worker prints, `on_states` what each is doing, whenever that is heard.
        `allow_versions`: take hosts with other versions, too; `same_bits`: refuse whatever may round differently;
        `trust_network`: let workers on different machines combine values, although nothing protects that."""
        self.plan, self.profiling, self.env_timeout_s = plan, profile, env_timeout_s
        self.on_output, self.on_states = on_output or _print_line, on_states
        self.seconds: dict[str, float] = {}
        self.log: list[VersionRead] = []
        """What was read, where that may be out of date."""
        self.differences: dict[str, dict[str, str]] = {}
        """What hosts have that this machine has not, by host."""
        self.members: dict[str, Member] = {}
        self.poller = zmq.Poller()
        self.hood = Neighbourhood(me="coordinator", homes=homes_of(plan))
        self.workers = list(dict.fromkeys(self.hood.homes.values()))
        self.hosts = hosts_of(plan, cluster or Cluster.local())
        check_collectives(plan, self.hosts, trust_network=trust_network)
        self.token = cluster.token() if cluster is not None else None
        self.over_tcp = carrier == "tcp" or any(host.port for host in self.hosts.values())
        self.meet = (self.over_tcp and len(self.workers) > 1) or any(map(self._together, self.workers))
        orders = {name: self._orders(name) for name in self.workers}  # refuses before anything is started
        try:
            self._launch(orders, allow_versions=allow_versions, same_bits=same_bits)
        except BaseException:
            self._kill()
            raise

    @property
    def compile_seconds(self) -> float:
        return max(self.seconds.values(), default=0.0)

    def start(self, key: Key) -> None:
        self._tell({"kind": "start"}, split_key(key))
        self._await("done", doing="init")

    def run(self, first: int, stop: int) -> dict[str, np.ndarray]:
        self._tell({"kind": "run", "first": first, "stop": stop})
        pieces: dict[Any, dict[str, np.ndarray]] = {}
        log: list[VersionRead] = []
        for header, arrays in self._await("ran", doing=f"iterations {first} to {stop - 1}"):
            log += from_json(header["log"])
            for (group, r, name), array in zip(header["names"], arrays, strict=True):
                pieces.setdefault((group, r), {})[name] = array
        self.log += log
        return join_metrics(self.plan, pieces, log, range(first, stop))

    def carry(self) -> PyTree:
        self._tell({"kind": "carry"})
        pieces: dict[Any, list[Any]] = {site: [None] * self.plan.num_carry for site in self.plan.all_sites}
        for header, arrays in self._await("carry", doing="sending the carry"):
            for (group, r, i), array in zip(header["names"], arrays, strict=True):
                pieces[group, r][i] = _to_jax(array, self.plan.iterate.ins[i].aval)
        return self.plan.combine([jnp.asarray(leaf) for leaf in join_carry(self.plan, pieces)])

    def restore(self, carry: PyTree, key: Key) -> None:
        pieces, run_key = split_carry(self.plan, carry), split_key(key)[1]
        for name in self.workers:
            held = [((*site, i), _to_numpy(leaf)) for site, leaves in pieces.items()
                    for i, leaf in enumerate(leaves) if self.hood.homes[site] == name and leaf is not None]  # fmt: skip
            header = {"kind": "restore", "num_carry": self.plan.num_carry, "names": [where for where, _ in held]}
            self._tell_one(self.members[name], header, [run_key, *(leaf for _, leaf in held)])
        self._await("done", doing="taking the carry")

    def profile(self) -> Profile:
        """What each worker did so far."""
        self._tell({"kind": "profile"})
        replies = self._await("profile", doing="telling what they did")
        return Profile({name: header["taken"] for name, (header, _) in zip(self.workers, replies, strict=True)})

    def states(self) -> dict[str, str]:
        """For people: what each worker is doing."""
        return {name: member.state for name, member in self.members.items()}

    def close(self) -> None:
        """End all workers: politely, so that environments are closed; then by force."""
        deadline = time.monotonic() + GRACE_S
        try:
            for member in self.members.values():
                member.control.settimeout(GRACE_S)
                with contextlib.suppress(OSError):  # it may be gone already
                    send_frame(member.control, {"kind": "stop"})
                if not member.talks:
                    self._stop_listening(member)
            while any(member.lives for member in self.members.values()) and time.monotonic() < deadline:
                for member in self._select(timeout_s=0.02):
                    self._hear(member)
        except TimeoutError:
            return  # it was stopped in the middle of a word
        finally:
            self._kill()

    def _launch(self, orders: dict[str, bytes], *, allow_versions: bool, same_bits: bool) -> None:
        links, ends = self._links()
        with contextlib.ExitStack() as stack:
            for end in (end for each in ends.values() for end in each):
                stack.callback(end.close)  # later only workers hold them: when one dies, its peers hear it
            self._start_workers({name: [fd for end in ends[name] for fd in end.fds] for name in self.workers})
        self._greet(allow_versions=allow_versions, same_bits=same_bits)
        for name in self.workers:
            groups = self._groups(name)
            header = {
                "kind": "brief",
                "name": name,
                "homes": [[*site, home] for site, home in self.hood.homes.items()],
                "links": links[name],
                "host": self.hosts[name].address,
                "compiled": {g: self.plan.platform(g) for g in groups} if self._compiles(name) else None,
                "meet": self.meet,
                "together": self._together(name),
                "spread": {g.name: g.devices for g in self.plan.layout.groups if g.name in groups and g.devices > 1},
                "x64": jnp.result_type(float) == np.float64,
                "prng": str(jax.random.key_impl(jax.random.key(0))),
                "profile": self.profiling,
                "env_timeout_s": self.env_timeout_s,
            }
            self._tell_one(self.members[name], header, [np.frombuffer(orders[name], np.uint8)])
        if self.meet:
            replies = self._await("listening", doing="starting", timeout_s=START_S)
            heard = {name: header for name, (header, _) in zip(self.workers, replies, strict=True)}
            cards = {name: header["card"] for name, header in heard.items() if header["card"]}
            meet_at = {header["group"]: header["meet_at"] for header in heard.values() if header["meet_at"]}
            self._tell({"kind": "cards", "cards": cards, "meet_at": meet_at})
            self._await("met", doing="starting", timeout_s=START_S)
            self._tell({"kind": "connect"})
        self._await("ready", doing="starting", timeout_s=START_S)

    def _greet(self, *, allow_versions: bool, same_bits: bool) -> None:
        """Compare what each worker runs on with what this process does, before anything else is said to it."""
        packages = packages_of_plan(self.plan)
        self._tell({"kind": "greet", "packages": packages, "path": sys.path})
        here, replies = this_machine(packages), self._await("hello", doing="starting", timeout_s=START_S)
        for name, (header, _) in zip(self.workers, replies, strict=True):
            host = self.hosts[name]
            place = f"{host.address}:{host.port}" if host.port else host.address
            found = compare(place, Versions.from_json(header["versions"]), here)
            found.check(allow_versions=allow_versions, same_bits=same_bits)
            if found.recorded and place not in self.differences:
                self.differences[place] = found.recorded
                self.on_output(place, found.warning or "")

    def _start_workers(self, fds: dict[str, list[int]]) -> None:
        """Start all, then wait for those on other hosts; `fds` are the descriptors that each inherits."""
        keys, run, deadline = KeyPair.new(), secrets.token_hex(4), time.monotonic() + START_S
        asked: dict[str, RemoteProcess] = {}
        try:
            for name, host in self.hosts.items():
                if host.port:
                    asked[name] = RemoteProcess(host, self._token())
                    asked[name].spawn(name, self._environment(name), run=run, key=keys.public)
            for name in self.workers:
                if name not in asked:
                    self._add(Member.start_here(name, self._environment(name), fds[name]))
            for name in list(asked):
                self._add(Member(name, asked[name], asked[name].reach_worker(name, keys, deadline)))
                del asked[name]
        finally:
            for process in asked.values():  # those that are not members
                process.close()
        self.members = {name: self.members[name] for name in self.workers}

    def _token(self) -> bytes:
        if self.token is None:
            raise ClusterError(
                "The cluster has hosts with an agent, which asks for a token, and no token_file.",
                fix='Give it one: Cluster(hosts=..., token_file="token").',
            )
        return self.token

    def _add(self, member: Member) -> None:
        """Listen to a worker."""
        self.members[member.name], member.combines = member, self._together(member.name) is not None
        for each in (*member.controls, *member.outputs):
            self.poller.register(each, zmq.POLLIN)

    def _unwatch(self, each: Any) -> None:
        if each in self.poller:
            self.poller.unregister(each)

    def _orders(self, name: str) -> bytes:
        """What a worker has to do, ready to be sent."""
        plan, groups = self.plan, self._groups(name)
        init, iterate = (exported(program, groups, plan.sites.replicas) for program in (plan.init, plan.iterate))
        orders = orders_of(plan, init, iterate)
        try:
            return cloudpickle.dumps(orders)
        except (TypeError, AttributeError, ValueError, NotImplementedError, OSError) as error:
            python = [step.name for step, _ in walk(iterate.steps) if isinstance(step, HostCall)]
            raise PartitionError(
                f"What `{name}` must run cannot leave this process: {error}",
                fix=f"Make what {', '.join(f'`{n}`' for n in python) or 'it'} holds picklable (open files, locks and "
                "windows inside the factory, not before), or use `--runtime inprocess`.",
            ) from error

    def _together(self, name: str) -> dict[str, Any] | None:
        """The group in which a worker combines values with others while they run, and its place among them."""
        for (group, r), home in self.hood.homes.items():
            processes = {other for (g, _), other in self.hood.homes.items() if g == group}
            if home == name and group in self.plan.combining and len(processes) > 1:
                address = collective_address(self.hosts[name], [self.hosts[other] for other in processes])
                return {"group": group, "number": r, "of": len(processes), "address": address}
        return None

    def _groups(self, name: str) -> list[str]:
        return list(dict.fromkeys(group for (group, _), home in self.hood.homes.items() if home == name))

    def _compiles(self, name: str) -> bool:
        groups = self._groups(name)
        programs = (self.plan.init, self.plan.iterate)
        return any(isinstance(step, Segment) and step.group in groups for p in programs for step, _ in walk(p.steps))

    def _links(self) -> tuple[dict[str, list[list[Any]]], dict[str, list[Any]]]:
        """For each worker, the description of its channels and its ends of them."""
        sizes: dict[tuple[str, str, str], int] = {}
        for program, hoods in ((self.plan.init, [self.hood]), (self.plan.iterate, self._hoods())):
            for (step, _), hood in itertools.product(walk(program.steps), hoods):
                if not isinstance(step, Transfer):
                    continue
                kind = BUNDLE if step.lag is not None else ""
                for pair, pieces in messages(step, hood).items():
                    if pair[0] != pair[1]:
                        sizes[*pair, kind] = max(sizes.get((*pair, kind), 0), _message_bytes(pieces))
        waiting = max(SLOTS, self.plan.layout.max_lag + 2)
        links: dict[str, list[list[Any]]] = {name: [] for name in self.workers}
        ends: dict[str, list[Any]] = {name: [] for name in self.workers}
        for (src, dst, kind), size in sizes.items():
            if self.over_tcp:
                for name in (src, dst):
                    links[name].append([src, dst, kind, "tcp", size, waiting])
                continue
            for name, end in zip((src, dst), make_shm_channel(size, waiting), strict=True):
                links[name].append([src, dst, kind, "shm", *end.fds, end.slot_bytes, end.slots])
                ends[name].append(end)
        return links, ends

    def _hoods(self) -> list[Neighbourhood]:
        """Who takes part in an iteration: everybody; or, one after the other, each worker with who learns from it."""
        if self.plan.num_workers == 1:
            return [self.hood]
        learner = self.plan.sites.default
        return [
            Neighbourhood(me="coordinator", homes={
                (group, 0): self.hood.homes[group, 0 if group == learner else worker] for group in self.plan.sites.replicas
            }) for worker in range(self.plan.num_workers)
        ]  # fmt: skip

    def _environment(self, name: str) -> dict[str, str]:
        """Environment variables of a worker: no more threads than it has cores to itself."""
        host = self.hosts[name]
        cores = max(1, host.cpus // sum(other == host for other in self.hosts.values()))
        limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(cores))
        limits |= dict.fromkeys(XLA_THREADS, str(useful_threads(self.plan, cores)))
        platforms = {self.plan.platform(group) for group in self._groups(name)}
        chosen = {"JAX_PLATFORMS": ",".join(sorted(p for p in platforms if p))} if None not in platforms else {}
        # Several workers may share an accelerator: none may take all of its memory at the start.
        shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        given = {name: os.environ[name] for name in (*limits, *shared) if name in os.environ}
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"} if self._together(name) else {}  # it warns of what we asked for
        return {**limits, **shared, **quiet, **given, **chosen, "PYTHONUNBUFFERED": "1"}

    def _tell(self, header: dict[str, Any], arrays: Iterable[np.ndarray] = ()) -> None:
        arrays = list(arrays)
        for name in self.workers:
            self._tell_one(self.members[name], header, arrays)

    def _tell_one(self, member: Member, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        try:
            send_frame(member.control, header, arrays)
        except OSError:
            self._fail(member)
        member.state = header["kind"]

    def _await(self, kind: str, *, doing: str, timeout_s: float | None = None) -> list[Frame]:
        """One reply of each worker, in their order; meanwhile their output is passed on."""
        replies: dict[str, Frame] = {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(replies) < len(self.workers):
            if deadline is not None and time.monotonic() > deadline:
                late = ", ".join(f"`{name}`" for name in self.workers if name not in replies)
                self._kill()
                raise WorkerError(f"{late} did not answer within {timeout_s:g} s while {doing}.",
                                  fix="The machine may be overloaded: use fewer workers.")  # fmt: skip
            for member in self._select(timeout_s=1.0):
                frame = self._hear(member)
                if frame is None:
                    self._fail(member)
                if frame[0]["kind"] == ASIDE:
                    continue
                assert frame[0]["kind"] == kind, (frame[0], kind)
                replies[member.name] = frame
                member.state = "idle"
                self.seconds[member.name] = frame[0].get("compile_seconds", self.seconds.get(member.name, 0.0))
            for member in self._ended():
                self._fail(member)
        return [replies[name] for name in self.workers]

    def _fail(self, member: Member) -> NoReturn:
        """A worker ended. Find out who was the first, end all, and say so once."""
        lost, deadline = [member], time.monotonic() + GRACE_S
        while member.talks and member in self._select(timeout_s=0.0):
            self._hear(member)
        while all(each.lost_a_peer for each in lost) and time.monotonic() < deadline:
            heard = [other for other in self._select(timeout_s=0.05) if self._hear(other) is None]
            lost += [other for other in dict.fromkeys([*heard, *self._ended()]) if other not in lost]
        culprit = next((each for each in lost if not each.lost_a_peer), None)
        if culprit is None and (silent := self._silent(lost)):
            self._kill()
            raise silent
        culprit = culprit or member
        with contextlib.suppress(subprocess.TimeoutExpired):  # a worker that reported may take a moment to end
            culprit.process.wait(timeout=1.0)
        code = culprit.process.poll()
        self._kill()
        raise describe(culprit, code, environments_of(self.plan, self.hood, culprit.name))

    def _silent(self, suffering: list[Member]) -> ChoreoError | None:
        """The error for a worker that lives, but that others have lost: it is stopped, or cut off."""
        for each in suffering:
            peer = each.error and each.error["places"].get("peer")
            if each.error and each.error["type"] == "PeerLost" and peer in self.members and self.over_tcp:
                return describe_silent(self.members[peer], SILENCE_S, heard_by=f"`{each.name}`")
        return None

    def _select(self, *, timeout_s: float) -> list[Member]:
        """Wait for workers to say something: pass on what they print, and return those with a frame for us."""
        talking = [member for member in self.members.values() if member.talks]
        here = any(member.has_frame(()) for member in talking)
        ready = {each for each, _ in self.poller.poll(0 if here else int(1000 * timeout_s))}
        for member in self.members.values():
            if not ready.isdisjoint(member.outputs):
                self._take_output(member)
        return [member for member in talking if member.has_frame(ready.intersection(member.controls))]

    def _hear(self, member: Member) -> Frame | None:
        """A worker's next frame; None if it ended, and then `member.error` says why, if it told."""
        member.talks = False  # if Ctrl-C comes in the middle of a frame, what follows makes no sense
        try:
            frame = receive_frame(member.control)
        except WireError as error:
            places, trace = {"worker": member.name}, "".join(traceback.format_exception(error))
            frame = {"kind": "error", "known": True, "type": "RunError", "what": error.what, "fix": None,
                     "places": places, "traceback": trace}, []  # fmt: skip
        if frame is None or frame[0]["kind"] == "error":
            member.error = frame and frame[0]
            self._stop_listening(member)
            return None
        member.talks = True
        if frame[0]["kind"] == ASIDE:
            member.state = f"iteration {frame[0]['number']}"
            if self.on_states is not None:
                self.on_states(self.states())
        return frame

    def _stop_listening(self, member: Member) -> None:
        member.talks = False
        for each in member.controls:
            self._unwatch(each)

    def _ended(self) -> list[Member]:
        """Workers that are no more. Most are heard of by the end of their socket; not if a process they started has it."""
        return [member for member in self.members.values() if member.process.poll() is not None]

    def _take_output(self, member: Member) -> bool:
        """Pass on what a worker printed; False if there was nothing."""
        watched = member.outputs
        lines, more = member.read_output()
        for each in watched:
            if each not in member.outputs:  # the end of a pipe would be ready for ever
                self._unwatch(each)
        for line in lines:
            if not line.startswith(CHATTER):
                member.lines.append(line)
                self.on_output(member.name, line)
        return more

    def _kill(self) -> None:
        """End whoever still lives, with all that environments have started."""
        members = list(self.members.values())
        self.members.clear()
        for member in members:
            member.kill()
        try:
            for member in members:
                member.process.wait()
                while self._take_output(member):
                    pass
        finally:
            for member in members:
                member.close()


def _message_bytes(pieces: list[Any]) -> int:
    types = [host_type(array_type(piece.move.aval)) for piece in pieces]
    head = jax.ShapeDtypeStruct((2,), np.uint64)  # of a bundle: its version
    return message_bytes([head] + [
        jax.ShapeDtypeStruct(piece.shape(shape), dtype) for piece, (shape, dtype) in zip(pieces, types, strict=True)
    ])  # fmt: skip


def _to_jax(array: np.ndarray, aval: Any) -> jax.Array:
    value = jnp.asarray(array)
    return jax.random.wrap_key_data(value, impl=key_impl(aval.dtype)) if is_key(aval.dtype) else value


def _to_numpy(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf)


def _print_line(worker: str, line: str) -> None:
    print(f"[{worker}] {line}", file=sys.stderr, flush=True)
