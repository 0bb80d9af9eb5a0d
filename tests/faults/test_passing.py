"""Two workers of one agent share memory: one worker passes file descriptors to the other. If it cannot, the two use TCP."""

import contextlib
from pathlib import Path

import psutil
import pytest
import zmq

from choreo.runtime.channels.keys import authenticator
from choreo.runtime.channels.sockets import context_of_process
from choreo.runtime.coordinator.cluster import Cluster, Host
from choreo.runtime.local import Local
from faults.scenes import KEY, alone, assert_same_bits, cartpole, play
from hosts import Agent, make_token

# These two calls open files that stay open, so they come before the first check for leaks.
context_of_process().socket(zmq.PAIR).close()
authenticator()

NO_UNIX_SOCKETS = """
import socket
connect = socket.socket.connect
def refuse(self, address):
    if self.family == socket.AF_UNIX:
        raise ConnectionRefusedError("this container has a network of its own")
    return connect(self, address)
socket.socket.connect = refuse
"""


def shared(worker: psutil.Process) -> int:
    """The number of shared-memory channels that a process has mapped."""
    return sum("memfd:choreo" in line for line in Path(f"/proc/{worker.pid}/maps").read_text().splitlines())


def shared_by_all(local: Local) -> dict[str, int]:
    return {name: shared(psutil.Process(handle.process.pid)) for name, handle in local.pool.handles.items()}


@pytest.mark.parametrize("layout", ["fine x1", "coarse x2"])
def test_workers_of_one_agent_share_memory_and_give_the_same_bits(layout, tmp_path):
    found: dict[str, int] = {}
    with Agent(make_token(tmp_path)) as agent:
        local = Local(cartpole(layout), cluster=agent.cluster)
        run = play(local, after_ten=lambda: found.update(shared_by_all(local)))
    assert_same_bits(run, alone(layout))
    learner = next(name for name in found if "learner" in name)
    assert found[learner] == sum(found.values()) - found[learner] > 0, found
    assert all(found.values())


def test_without_unix_sockets_they_use_tcp_and_give_the_same_bits(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_UNIX_SOCKETS)
    found: dict[str, int] = {}
    with Agent(make_token(tmp_path), PYTHONPATH=f"{tmp_path / 'site'}:{Path(__file__).parents[2] / 'src'}") as agent:
        local = Local(cartpole("fine x1"), cluster=agent.cluster)
        run = play(local, after_ten=lambda: found.update(shared_by_all(local)))
    assert_same_bits(run, alone("fine x1"))
    assert set(found.values()) == {0}


def test_only_workers_of_the_same_launcher_share_memory(tmp_path):
    """The coordinator starts one worker, and an agent on the same machine starts two workers."""
    with Agent(make_token(tmp_path)) as agent:
        here = Host(address="127.0.0.1", cpus=1)
        there = Host(address="127.0.0.1", port=agent.port, cpus=1)
        cluster = Cluster(hosts=(there, here), token_file=agent.token)
        with contextlib.closing(Local(cartpole("coarse x2"), cluster=cluster)) as local:
            local.start(KEY)
            local.run(0, 3)
            found = shared_by_all(local)
            by_address = {name: handle.process.address for name, handle in local.pool.handles.items()}
    assert sorted(by_address.values(), key=str) == ["127.0.0.1", "127.0.0.1", None]
    assert {name for name, count in found.items() if count == 0} == {
        n for n, address in by_address.items() if address is None
    }
