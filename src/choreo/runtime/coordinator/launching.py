"""Start the workers of a deployment, on this machine and through agents, and prepare them to run.

The steps in order, and what is true after each step:

start_workers      every worker has a process and a control connection
compare_versions   every worker runs on versions that this run accepts
set_up             every worker knows its sites, its channels and its programs
introduce          workers with channels over TCP, or with collectives, know each other's addresses and keys
ready              every worker has opened its channels and loaded its programs
"""

import contextlib
import secrets
import sys
import time
from collections.abc import Mapping

import numpy as np

from choreo.runtime.channels.keys import KeyPair
from choreo.runtime.coordinator.briefing import briefing, environment_variables
from choreo.runtime.coordinator.cluster import ClusterError
from choreo.runtime.coordinator.conversation import Conversation
from choreo.runtime.coordinator.deployment import Deployment, packages_of_plan
from choreo.runtime.coordinator.handle import WorkerHandle
from choreo.runtime.coordinator.pool import WorkerPool
from choreo.runtime.coordinator.remote import RemoteProcess
from choreo.runtime.coordinator.versions import Versions, compare, this_machine
from choreo.runtime.coordinator.wiring import make_channels

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
) -> dict[str, dict[str, str]]:
    """Start all workers with their programs, and wait until they are ready. Returns the result of `compare_versions`.

    If this fails, the workers that were started stay in the conversation's pool, and the caller must kill the pool.
    """
    deployment = conversation.deployment
    links, ends = make_channels(deployment)
    with contextlib.ExitStack() as stack:
        for end in (end for each in ends.values() for end in each):
            # After the start, only the worker holds its ends of channels, so that they are closed when the worker dies.
            stack.callback(end.close)
        fds = {worker: [fd for end in ends[worker] for fd in end.fds] for worker in deployment.workers}
        start_workers(conversation.pool, deployment, fds, token)
    differences = compare_versions(conversation, allow_versions=allow_versions, same_bits=same_bits)
    for worker in deployment.workers:
        header = briefing(deployment, worker, links[worker], profile=profile, env_timeout_s=env_timeout_s)
        conversation.tell(worker, header, [np.frombuffer(programs[worker], np.uint8)])
    if deployment.needs_introduction:
        introduce(conversation)
    conversation.await_replies("ready", doing="starting", timeout_s=START_S)
    return differences


def start_workers(pool: WorkerPool, deployment: Deployment, fds: Mapping[str, list[int]], token: bytes | None) -> None:
    """Start all workers, then connect to the workers on other hosts. Each worker on this machine inherits its `fds`."""
    keys, run, deadline = KeyPair.new(), secrets.token_hex(4), time.monotonic() + START_S
    requested: dict[str, RemoteProcess] = {}
    try:
        for worker, host in deployment.hosts.items():
            if host.port:
                requested[worker] = RemoteProcess(host, _checked(token))
                requested[worker].spawn(worker, environment_variables(deployment, worker), run=run, key=keys.public)
        for worker in deployment.workers:
            if worker not in requested:
                pool.add(WorkerHandle.start_here(worker, environment_variables(deployment, worker), fds[worker]))
        for worker in list(requested):
            pool.add(WorkerHandle(worker, requested[worker], requested[worker].reach_worker(worker, keys, deadline)))
            del requested[worker]
    finally:
        for process in requested.values():  # these are not in the pool yet
            process.close()
    pool.handles = {worker: pool.handles[worker] for worker in deployment.workers}
    for worker, handle in pool.handles.items():
        handle.uses_collectives = deployment.collective(worker) is not None


def _checked(token: bytes | None) -> bytes:
    if token is None:
        raise ClusterError(
            "The cluster has hosts with an agent, which asks for a token, but no token_file.",
            fix='Give the cluster a token file: Cluster(hosts=..., token_file="token").',
        )
    return token


def compare_versions(conversation: Conversation, *, allow_versions: bool, same_bits: bool) -> dict[str, dict[str, str]]:
    """Compare the versions, CPU and XLA_FLAGS of each worker's host with this machine. Returns the differences of each host.

    Raises RunError for a difference that this run does not accept.
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
    conversation.await_replies("admitted", doing="starting", timeout_s=START_S)
    conversation.tell_all({"kind": "connect"})
