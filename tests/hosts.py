"""A second host for tests: an agent that listens on loopback, or in a separate network namespace."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from choreo.runtime.coordinator.cluster import Cluster, Host


def make_token(folder: Path) -> Path:
    token = folder / "token"
    token.write_text(os.urandom(16).hex())
    token.chmod(0o600)
    return token


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Agent:
    """A process that runs `choreo agent`."""

    def __init__(self, token: Path, *, address: str = "127.0.0.1", port: int = 0, enter: tuple = (), **variables: str):
        self.token, self.address, self.port = token, address, port or free_port()
        self.logged: str | None = None
        command = [*enter, sys.executable, "-m", "choreo", "agent", "--address", address, "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--token-file", str(token)], stdout=subprocess.PIPE, text=True, env=os.environ | variables
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()

    @property
    def host(self) -> Host:
        return Host(address=self.address, port=self.port, cpus=2)

    @property
    def cluster(self) -> Cluster:
        """A cluster whose only host is that of this agent."""
        return Cluster(hosts=(self.host,), token_file=self.token)

    def end(self) -> str:
        """End the process; return its log."""
        if self.logged is None:
            self.process.terminate()
            self.logged = self.process.communicate()[0]
        return self.logged

    def __enter__(self) -> "Agent":
        assert "Waiting" in self.first_line, self.first_line
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@contextmanager
def two_hosts_in(folder: Path) -> Iterator[Cluster]:
    """A cluster of this machine and a second host in a network namespace. Without namespaces, both hosts are on loopback."""
    with Namespace() as there:
        place = {"address": there.address, "port": there.port, "enter": there.enter}
        with Agent(make_token(folder), **place) as agent:
            here = Host(address=there.gateway, cpus=1)
            yield Cluster(hosts=(here, Host(address=there.address, port=agent.port, cpus=1)), token_file=agent.token)


@pytest.fixture
def two_hosts(tmp_path):
    with two_hosts_in(tmp_path) as cluster:
        yield cluster


class Namespace:
    """A network namespace, connected to the namespace of the tests by a pair of virtual network devices.

    `cable` is the device on the side of the tests. If this process is not allowed to create a namespace, all addresses are on
    loopback instead.
    """

    def __init__(self):
        self.name, number = f"choreo{os.getpid()}", os.getpid() % 250 + 1
        self.gateway, self.address, self.port = f"10.77.{number}.1", f"10.77.{number}.2", 7000
        self.cable = f"ch{os.getpid()}"
        self.enter = ("ip", "netns", "exec", self.name)

    def __enter__(self) -> "Namespace":
        steps = [
            f"netns add {self.name}",
            f"link add {self.cable} type veth peer name inside netns {self.name}",
            f"addr add {self.gateway}/24 dev {self.cable}",
            f"link set {self.cable} up",
            f"-n {self.name} addr add {self.address}/24 dev inside",
            f"-n {self.name} link set inside up",
            f"-n {self.name} link set lo up",
        ]
        able = shutil.which("ip") and os.geteuid() == 0
        if not able or any(subprocess.run(["ip", *step.split()], capture_output=True).returncode for step in steps):
            self.__exit__()
            self.gateway = self.address = "127.0.0.1"
            self.cable, self.port, self.enter = "lo", 20_000 + os.getpid() % 20_000, ()
        return self

    def __exit__(self, *_: object) -> None:
        if Path(f"/var/run/netns/{self.name}").exists():
            subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=True)
            time.sleep(0.1)  # the virtual devices disappear a moment later
