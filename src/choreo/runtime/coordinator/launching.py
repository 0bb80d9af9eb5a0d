"""Start the workers of a deployment, on this machine and through agents, and prepare them to run.

The steps in order, and what is true after each step:

start_workers      every worker has a process and a control connection
compare_versions   this run accepts the versions and the CPU of every worker
set_up             every worker knows its sites, its channels and its programs
introduce          workers know each other's addresses and keys (only if a carrier is "tcp" or "passed", or with collectives)
ready              every worker has opened its channels and loaded its programs
"""

import contextlib
import secrets
import sys
import time
from collections.abc import Mapping

import numpy as np

from choreo.runtime.coordinator.briefing import briefing, environment_variables
from choreo.runtime.coordinator.cluster import ClusterError, Host
from choreo.runtime.coordinator.conversation import Conversation
from choreo.runtime.coordinator.deployment import Deployment, packages_of_plan
from choreo.runtime.coordinator.handle import WorkerHandle
from choreo.runtime.coordinator.launcher import Launcher, WorkerProcess
from choreo.runtime.coordinator.local_launcher import LocalLauncher
from choreo.runtime.coordinator.open_files import check_limit
from choreo.runtime.coordinator.pool import WorkerPool
from choreo.runtime.coordinator.remote import AgentLauncher
from choreo.runtime.coordinator.silence import Silence
from choreo.runtime.coordinator.versions import Versions, compare, this_machine
from choreo.runtime.coordinator.wiring import choose_carriers, make_channels

START_S = 120.0
"""How long a worker may take for each step of the start."""


def launch(
    conversation: Conversation,
    programs: Mapping[str, bytes],
    *,
    token: bytes | None,
    allow_versions: bool,
    same_bits: bool,
    profile: bool,
    env_timeout_s: float,
    silence: Silence,
) -> dict[str, dict[str, str]]:
    """Start all workers with their programs, and wait until they are ready. Returns the result of `compare_versions`.

    If this fails, the workers that were started stay in the conversation's pool, and the caller must kill the pool.
    """
    deployment = conversation.deployment
    launchers = launchers_of(deployment, token, silence)
    carriers = choose_carriers(deployment, launchers)
    check_limit(carriers, deployment.hosts)
    links, ends = make_channels(deployment, carriers)
    with contextlib.ExitStack() as stack:
        for end in (end for each in ends.values() for end in each):
            # The workers inherit these ends. Close them here, so that the death of a worker closes all its ends of channels.
            stack.callback(end.close)
        fds = {worker: [fd for end in ends[worker] for fd in end.fds] for worker in deployment.workers}
        start_workers(conversation.pool, deployment, launchers, fds)
    differences = compare_versions(conversation, allow_versions=allow_versions, same_bits=same_bits)
    introduction = not {"tcp", "passed"}.isdisjoint(carriers.values()) or any(
        map(deployment.collective, deployment.workers)
    )
    secret = secrets.token_hex(32)
    for worker in deployment.workers:
        header = briefing(
            deployment,
            worker,
            links[worker],
            introduction=introduction,
            profile=profile,
            env_timeout_s=env_timeout_s,
            silence=silence,
            secret=secret,
        )
        conversation.tell(worker, header, [np.frombuffer(programs[worker], np.uint8)])
    if introduction:
        introduce(conversation)
    conversation.await_replies("ready", doing="starting", timeout_s=START_S)
    return differences


def launchers_of(deployment: Deployment, token: bytes | None, silence: Silence) -> dict[str, Launcher]:
    """The launcher of each worker. Workers on one host have the same launcher."""
    here = LocalLauncher()
    by_host: dict[Host, Launcher] = {
        host: AgentLauncher(host, _checked(token), silence_s=silence.connection_s) if host.port else here
        for host in dict.fromkeys(deployment.hosts.values())
    }
    return {worker: by_host[host] for worker, host in deployment.hosts.items()}


def start_workers(
    pool: WorkerPool, deployment: Deployment, launchers: Mapping[str, Launcher], fds: Mapping[str, list[int]]
) -> None:
    """Start all workers, then wait until each has a control connection. Each worker inherits its file descriptors in `fds`."""
    deadline = time.monotonic() + START_S
    started: dict[str, WorkerProcess] = {}
    # Workers on other hosts come first: while they start, this machine starts its own workers.
    slow_first = sorted(deployment.workers, key=lambda worker: launchers[worker].shared_memory == "inherited")
    try:
        for worker in slow_first:
            started[worker] = launchers[worker].start(worker, environment_variables(deployment, worker), fds[worker])
        for worker in deployment.workers:
            handle = WorkerHandle(worker, started[worker], started[worker].connect(deadline))
            del started[worker]
            pool.add(handle, uses_collectives=deployment.collective(worker) is not None)
    finally:
        for process in started.values():  # after an error: the processes that are not in the pool
            process.close()


def _checked(token: bytes | None) -> bytes:
    if token is None:
        raise ClusterError(
            "The cluster has hosts with an agent, which asks for a token, but no token_file.",
            fix='Give the cluster a token file: Cluster(hosts=..., token_file="token").',
        )
    return token


def compare_versions(conversation: Conversation, *, allow_versions: bool, same_bits: bool) -> dict[str, dict[str, str]]:
    """Compare the versions, CPU and XLA_FLAGS of each worker's host with this machine.

    Returns, for each host that differs, the names of the differences and the host's values. Raises RunError for a difference
    that this run does not accept.
    """
    deployment = conversation.deployment
    packages = packages_of_plan(deployment.plan)
    conversation.tell_all({"kind": "versions", "packages": packages, "path": sys.path})
    here = this_machine(packages)
    differences: dict[str, dict[str, str]] = {}
    replies = conversation.await_replies("versions", doing="starting", timeout_s=START_S)
    for worker, (header, _) in replies.items():
        host = deployment.hosts[worker]
        place = f"{host.address}:{host.port}" if host.port else host.address
        found = compare(place, Versions.from_json(header["versions"]), here)
        found.check(allow_versions=allow_versions, same_bits=same_bits)
        if found.recorded and place not in differences:
            differences[place] = found.recorded
            conversation.pool.on_output(place, found.warning or "")
    return differences


def introduce(conversation: Conversation) -> None:
    """Tell all workers the addresses and public keys of all workers, and the address of the first worker of each collective.

    No worker connects before all workers admit connections from the other workers.
    """
    replies = conversation.await_replies("listening", doing="starting", timeout_s=START_S)
    headers = {worker: header for worker, (header, _) in replies.items()}
    contacts = {worker: header["contact"] for worker, header in headers.items() if header["contact"]}
    rendezvous = {header["group"]: header["rendezvous"] for header in headers.values() if header["rendezvous"]}
    conversation.tell_all({"kind": "contacts", "contacts": contacts, "rendezvous": rendezvous})
    replies = conversation.await_replies("admitted", doing="starting", timeout_s=START_S)
    passed = [channel for header, _ in replies.values() for channel in header["passed"]]
    conversation.tell_all({"kind": "connect", "passed": passed})
