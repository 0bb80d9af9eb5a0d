"""The memory and the open files of a long run do not grow."""

import contextlib
import os

import psutil
import pytest

from choreo.runtime.local import Local
from faults.scenes import KEY, cartpole

FIRST, LAST = 2_000, 10_000


@pytest.mark.long
def test_memory_and_files_do_not_grow_over_10000_iterations():
    with contextlib.closing(Local(cartpole("fine x1", unroll=1, num_envs=1))) as local:
        local.start(KEY)
        run(local, 0, FIRST)
        early = usage(local)
        run(local, FIRST, LAST)
        late = usage(local)
    for name, (files, kilobytes) in early.items():
        assert late[name][0] == files, name
        # Over 8,000 iterations, a leak of one array per message would be more than 1 MB.
        assert late[name][1] - kilobytes < 1024, f"{name}: {kilobytes} kB, then {late[name][1]} kB"


def run(local, first, stop):
    for i in range(first, stop, 200):
        local.run(i, i + 200)


def usage(local) -> dict[str, tuple[int, int]]:
    """Open files and resident kilobytes of every process."""
    pids = {name: handle.process.pid for name, handle in local.pool.handles.items()} | {"coordinator": os.getpid()}
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    return {name: (p.num_fds(), p.memory_info().rss // 1024) for name, p in processes.items()}
