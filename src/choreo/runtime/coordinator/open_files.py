"""The limit of open files of a process, and how many open files a run needs.

The coordinator needs a few file descriptors for each worker. Until all workers have started, it needs four more for each channel
in shared memory. Linux gives a process a soft limit, usually 1,024, and lets the process raise this limit to the hard limit.
"""

import os
import resource
from collections import Counter
from collections.abc import Mapping

from choreo.errors import RunError
from choreo.runtime.coordinator.cluster import Host

PER_WORKER = 4
"""Open files of the coordinator for each worker on this machine: control connection, output, and during the start two more."""
PER_REMOTE_WORKER = 12
"""Open files of the coordinator for each worker on another host: two connections of ZeroMQ with their monitors."""
PER_SHM_CHANNEL = 4
"""Open files of the coordinator for each channel in shared memory, until all workers have started: the memory and the doorbell of
both ends."""
PER_SHM_END = 2
"""Open files of a worker for each of its ends of channels in shared memory, while the worker opens them."""
PER_TCP_END = 8
"""Open files of a worker for each of its ends of channels over TCP: a connection of ZeroMQ with its monitor."""
RESERVE = 64
"""Files for everything else: libraries, environments, the run folder."""


def raise_limit() -> int:
    """Raise the limit of open files of this process, and of processes that it starts, to the hard limit. Returns the new limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def check_limit(carriers: Mapping[tuple[str, str, str], str], hosts: Mapping[str, Host]) -> None:
    """Raise the limit of open files. Raises RunError if the hard limit is too low for this run.

    `carriers` are the carriers of all channels, by (sender, receiver, kind). `hosts` are the hosts of all workers.
    """
    needed, limit = files_needed(carriers, hosts), raise_limit()
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise RunError(
            f"This run has {len(hosts)} workers and needs {needed:,} open files, but this process may open only {limit:,}.",
            fix="Raise the hard limit (`ulimit -Hn`; see /etc/security/limits.conf), or use fewer workers.",
        )


def files_needed(carriers: Mapping[tuple[str, str, str], str], hosts: Mapping[str, Host]) -> int:
    """The most files that the coordinator, or a worker on this machine, has open at the same time."""
    here = [worker for worker, host in hosts.items() if not host.port]
    coordinator = PER_WORKER * len(here) + PER_REMOTE_WORKER * (len(hosts) - len(here))
    coordinator += PER_SHM_CHANNEL * list(carriers.values()).count("shm") + len(os.listdir("/proc/self/fd"))
    ends = Counter((worker, carrier) for key, carrier in carriers.items() for worker in key[:2])
    busiest = max((PER_SHM_END * ends[w, "shm"] + PER_TCP_END * ends[w, "tcp"] for w in here), default=0)
    return max(coordinator, busiest) + RESERVE
