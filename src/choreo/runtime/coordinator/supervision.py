"""Handles the end of a worker: finds the worker that failed first, and makes the one error that the user gets.

When a worker dies, its peers lose a channel and fail, too. `end_run` waits a moment and collects the workers that have ended.
It then looks for the culprit: the first worker that ended for another reason than a lost peer. It kills all workers, and
describes how the culprit ended. Only `end_run` and `_gather` do I/O.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from choreo import errors
from choreo.errors import ChoreoError, RunError
from choreo.runtime.channels.sockets import CONTROL_SILENCE_S
from choreo.runtime.channels.tcp_ends import CHANNEL_SILENCE_S
from choreo.runtime.coordinator.deployment import Deployment
from choreo.runtime.coordinator.handle import WorkerHandle
from choreo.runtime.coordinator.pool import GRACE_S, WorkerPool
from choreo.runtime.coordinator.remote import RemoteProcess

COLLECTIVES = ("Gloo", "NCCL", "coordination service")
"""Words of error messages. An error with one of these words says that a collective has lost a worker."""
HANGS = "Timeout ("
"""`faulthandler` prints a line that begins like this when an environment blocks the Python interpreter for too long."""


class WorkerError(RunError):
    """A worker failed or was lost."""


def end_run(pool: WorkerPool, first: WorkerHandle, deployment: Deployment) -> ChoreoError:
    """End all workers, because the worker `first` has ended. Returns the error for the user."""
    ended = _gather(pool, first)
    culprit = find_culprit(ended)
    if culprit is None and deployment.over_tcp and (silent := find_silent(ended, pool.handles)) is not None:
        lost, heard_by = silent
        pool.kill()
        return describe_silence(lost, CHANNEL_SILENCE_S, heard_by=f"`{heard_by.name}`")
    culprit = culprit or first
    with contextlib.suppress(subprocess.TimeoutExpired):  # a worker may still run after it has reported its error
        culprit.process.wait(timeout=1.0)
    code = culprit.process.poll()
    pool.kill()  # this also reads the last output, which `describe_end` needs
    return describe_end(culprit, code, deployment.environments(culprit.name))


def _gather(pool: WorkerPool, first: WorkerHandle) -> list[WorkerHandle]:
    """Wait up to GRACE_S for the end of the culprit. Returns all workers that have ended, including `first`."""
    ended, deadline = [first], time.monotonic() + GRACE_S
    while first.control_open and first in pool.select(timeout_s=0.0):
        pool.receive(first)
    while find_culprit(ended) is None and time.monotonic() < deadline:
        closed = [other for other in pool.select(timeout_s=0.05) if pool.receive(other) is None]
        ended += [other for other in dict.fromkeys([*closed, *pool.ended()]) if other not in ended]
    return ended


def find_culprit(ended: Sequence[WorkerHandle]) -> WorkerHandle | None:
    """Return the first worker that did not end because of a lost peer, or None if all of them lost a peer."""
    return next((handle for handle in ended if not lost_a_peer(handle)), None)


def lost_a_peer(handle: WorkerHandle) -> bool:
    """Return True if this worker ended because another worker ended."""
    if handle.error is None:  # JAX aborts a process if its collective has lost another process
        return handle.uses_collectives and handle.process.poll() == -signal.SIGABRT
    lost = handle.error["type"] in ("PeerLost", "ReceiverClosed", "EndOfChannel")
    return lost or (handle.uses_collectives and any(word in handle.error["what"] for word in COLLECTIVES))


def find_silent(
    ended: Collection[WorkerHandle], handles: Mapping[str, WorkerHandle]
) -> tuple[WorkerHandle, WorkerHandle] | None:
    """Find a worker to which a peer has lost the connection. Returns this worker and the peer.

    Call this only if no worker has ended for another reason. Then the process of the worker is stopped, or its network
    connection is cut.
    """
    for handle in ended:
        if handle.error is not None and handle.error["type"] == "PeerLost":
            peer = handle.error["places"].get("peer")
            if peer in handles:
                return handles[peer], handle
    return None


def describe_silence(handle: WorkerHandle, silence_s: float, *, heard_by: str) -> ChoreoError:
    """The error for a worker that still runs but sends nothing, not even heartbeats."""
    return WorkerError(
        f"Nothing heard from `{handle.name}` ({handle.whereabouts}) for {silence_s:g} s; {heard_by} waited for it.",
        fix=f"`{handle.name}` is stopped, its machine is overloaded or asleep, or its network connection is cut.",
    )


def describe_end(handle: WorkerHandle, code: int | None, environments: list[range]) -> ChoreoError:
    """The error for a worker that ended.

    The error shows the worker's own report. Without a report, it shows the exit code, the environments and the last output.
    """
    if handle.error is not None:
        return _describe_report(handle, handle.error)
    if isinstance(handle.process, RemoteProcess) and (code is None or handle.process.agent_stopped):
        return _describe_remote(handle, handle.process)
    if code is None:
        ended = "closed its connection"
    else:
        ended = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    what = f"Worker `{handle.name}` ({handle.whereabouts}) {ended}."
    if any(line.startswith(HANGS) for line in handle.lines):
        what = f"An environment of worker `{handle.name}` hangs, and lets no other thread run."
    # If a process ends without a report, most likely one of its environments has ended the process.
    numbers = " and ".join(str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in environments)
    running = f" It was running environments {numbers}." if numbers else ""
    last = "".join(f"\n  {line}" for line in handle.lines)
    return WorkerError(
        f"{what}{running}{' Its last output:' if last else ''}{last}",
        fix="The kernel sends SIGKILL when the machine is out of memory: use fewer workers or environments."
        if code == -signal.SIGKILL
        else None,
    )


def _describe_remote(handle: WorkerHandle, process: RemoteProcess) -> ChoreoError:
    """The error for a worker on another host whose exit code is unknown, or whose agent was stopped."""
    agent = f"the agent at {process.host.address}:{process.host.port}"
    if process.agent_stopped:
        return WorkerError(f"{agent.capitalize()} was stopped, and so its worker `{handle.name}` ended.",
                           fix="Start the agent again, then train again.")  # fmt: skip
    if process.is_connected:
        return describe_silence(handle, CONTROL_SILENCE_S, heard_by="the coordinator")
    return WorkerError(
        f"Worker `{handle.name}` ({handle.whereabouts}) and {agent} were lost.",
        fix="The agent or its machine has ended, or the network between the machines is cut.",
    )


def _describe_report(handle: WorkerHandle, report: dict[str, Any]) -> ChoreoError:
    """The error that a worker reported, with the worker's traceback. An error of `choreo.errors` keeps its class."""
    name, process = handle.name, handle.process
    host = {"host": process.host.address} if isinstance(process, RemoteProcess) else {}
    cls = getattr(errors, report["type"], None) if report["known"] else None
    if isinstance(cls, type) and issubclass(cls, ChoreoError):
        found = cls(report["what"], fix=report["fix"], **{**report["places"], "worker": name, **host})
    else:
        found = WorkerError(f"Worker `{name}` failed: {report['type']}: {report['what']}", fix=report["fix"])
    found.add_note(f"In worker `{name}`:\n{report['traceback'].rstrip()}")
    return found


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
