"""The machines that a run may use; `cluster.toml` describes them.

    token_file = "token"              the file with the secret that agents ask for, relative to the folder of cluster.toml

    [[hosts]]
    address = "10.0.0.1"              groups that are not replicated, such as the learner, run on the first host with their device
    cpus = 8
    devices = ["cpu", "gpu"]

    [[hosts]]
    address = "10.0.0.2"
    port = 7000                       the port of `choreo agent` on this host; the coordinator's machine needs no agent
    cpus = 16

Without such a file, the cluster consists of this machine only. A layout says how many worker processes there are, and `place`
chooses a host for each of them. This module does not import JAX, and does not check whether a host can be reached.
"""

import difflib
import ipaddress
import os
import re
import stat
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from choreo.errors import ChoreoError
from choreo.types import GroupName

LOOPBACK = "127.0.0.1"
HOST_KINDS = {"address": str, "port": int, "cpus": int, "devices": list}
"""The type of each setting of a host in cluster.toml."""
HOST_EXAMPLE = {
    "address": 'address = "10.0.0.1"',
    "port": "port = 7000",
    "cpus": "cpus = 8",
    "devices": 'devices = ["cpu"]',
}
PLATFORMS = ("cpu", "gpu", "tpu")
"""The kinds of devices, as in the `device` of a group."""


class ClusterError(ChoreoError):
    """The description of a cluster is not valid, or the cluster has no host for a group."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine."""

    address: str
    """The name or the IP address of the host."""
    port: int = 0
    """The port of `choreo agent` on the host. The coordinator's own machine needs no agent and has port 0."""
    cpus: int = 1
    """The number of CPU cores. Hosts get workers in proportion to their cores, and the workers of a host share its cores."""
    devices: tuple[str, ...] = ("cpu",)
    """The kinds of devices that the host has. A group with device="gpu" is placed only on hosts with a "gpu"."""

    def __post_init__(self):
        if not self.address or re.search(r"\s", self.address):
            raise ClusterError(
                f"{self.address!r} is not the address of a host.",
                fix='Give a name or an IP address: address = "10.0.0.1".',
            )
        if with_port := re.fullmatch(r"([^:]+):(\d+)", self.address):
            raise ClusterError(
                f"The address {self.address!r} contains a port.",
                fix=f'Write two settings: address = "{with_port[1]}" and port = {with_port[2]}.',
            )
        if not 0 <= self.port < 2**16:
            raise ClusterError(f"{self.address} has no port {self.port}.", fix="Give a number from 1 to 65535.")
        if self.cpus < 1:
            raise ClusterError(f"{self.address} has cpus = {self.cpus}.", fix="Give its number of cpus, at least 1.")
        if not self.devices:
            raise ClusterError(
                f"{self.address} has no devices.", fix='Write devices = ["cpu"], or leave the setting `devices` out.'
            )
        for device in self.devices:
            if device not in PLATFORMS:
                raise ClusterError(f"{self.address} has an unknown device {device!r}.", fix=_near(device, PLATFORMS))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines that a run may use."""

    hosts: tuple[Host, ...]
    """The machines. A group that is not replicated runs on the first machine that has the device of the group."""
    token_file: Path | None = None
    """The file with the secret that agents ask for. None if no host has an agent."""

    def __post_init__(self):
        if not self.hosts:
            raise ClusterError("A cluster needs at least one host.", fix="Add a table [[hosts]] with its address.")
        for i, host in enumerate(self.hosts):
            # Two agents may run on one machine. So two hosts may have the same address if their ports differ.
            if (host.address, host.port) in [(other.address, other.port) for other in self.hosts[:i]]:
                where = host.address + (f" port {host.port}" if host.port else "")
                raise ClusterError(f"The host {where} is listed twice.", fix="List each host once, with all its cpus.")

        here = [host.address for host in self.hosts if not host.port]
        if len(here) > 1:
            raise ClusterError(
                f"{' and '.join(here)} have no port, but every host except this machine needs one.",
                fix="Give the port of `choreo agent` on every other host, for example port = 7000.",
            )

    @classmethod
    def local(cls) -> "Cluster":
        """A cluster of only this machine, with the cpus that this process may use."""
        return cls(hosts=(Host(address=LOOPBACK, cpus=len(os.sched_getaffinity(0)), devices=PLATFORMS),))

    @classmethod
    def from_toml(cls, file: str | Path) -> "Cluster":
        """Read a cluster from a file. A relative `token_file` is relative to the folder of this file."""
        file = Path(file)
        data = _read(file)
        _check_keys(data, ("hosts", "token_file"), at=f"{file}")
        hosts = data.get("hosts", [])
        if not isinstance(hosts, list) or not all(isinstance(host, dict) for host in hosts):
            raise ClusterError(f"`hosts` in {file} is not a list of tables.", fix="Write [[hosts]], with two brackets.")
        token = data.get("token_file")
        if not isinstance(token, str | None):
            raise ClusterError(
                f"token_file = {token!r} in {file} is not a path.", fix='Give a path, for example token_file = "token".'
            )
        try:
            cluster = cls(
                hosts=tuple(_host(host, at=f"{file}, hosts[{i}]") for i, host in enumerate(hosts)),
                token_file=None if token is None else file.parent / Path(token).expanduser(),
            )
        except ClusterError as error:
            raise ClusterError(error.what, fix=error.fix, **({"at": str(file)} | error.places)) from error
        if cluster.token() is None and any(host.port for host in cluster.hosts):
            raise ClusterError(
                "Hosts with a port have an agent, which asks for a token, but there is no token_file.",
                at=str(file),
                fix='Add token_file = "token", and give the same file to `choreo agent` on these hosts.',
            )
        return cluster

    def token(self) -> bytes | None:
        """The secret in `token_file`, or None without a `token_file`.

        Raises ClusterError if other users can read the file, or if the secret is shorter than 16 bytes.
        """
        if self.token_file is None:
            return None
        try:
            text = self.token_file.read_bytes().strip()
            mode = self.token_file.stat().st_mode
        except OSError as error:
            raise ClusterError(
                f"The token file {self.token_file} cannot be read: {error.strerror}.",
                fix="Make a token file, and copy it to every host: `openssl rand -hex 32 > token; chmod 600 token`.",
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ClusterError(
                f"Others can read the token file {self.token_file}.", fix=f"Run `chmod 600 {self.token_file}`."
            )
        if len(text) < 16:
            raise ClusterError(
                f"The token in {self.token_file} has {len(text)} bytes, so it can be guessed.",
                fix="Make a token of 16 bytes or more: `openssl rand -hex 32 > token`.",
            )
        return text


class SiteHost(NamedTuple):
    """The host of one worker process."""

    group: GroupName
    """The group whose sites the process runs."""
    replica: int
    """The number of the process in its group; 0 for a group that is not replicated."""
    host: Host
    """The host where the process runs."""


def place(
    sites: Mapping[GroupName, int | None], cluster: Cluster, *, devices: Mapping[GroupName, str | None] | None = None
) -> list[SiteHost]:
    """Choose a host for every worker process.

    `sites` gives the number of processes of each group, or None for a group that is not replicated. It counts processes,
    because several sites of a group may share a process: see `deployment.assign_processes`. `devices` is the kind of device
    that each group needs; None stands for any kind.

    Hosts get processes in proportion to their cpus. If two groups have equally many processes and need the same device, then
    process i of one group and process i of the other are on the same host. A group that is not replicated is on the first
    host that has the device.
    """
    placements = []
    for group, replicas in sites.items():
        hosts = _hosts_with((devices or {}).get(group), group, cluster)
        workers = dict.fromkeys(hosts, 0)
        for replica in range(replicas or 1):
            # Choose the host that, with this worker, has the most cpus per worker of the group. If several are equal, the first.
            host = hosts[0] if replicas is None else min(hosts, key=lambda h: (workers[h] + 1) / h.cpus)
            workers[host] += 1
            placements.append(SiteHost(group, replica, host))
    return placements


def on_one_machine(hosts: Collection[Host]) -> bool:
    """Return True if these hosts are one machine: they have the same address, or they are all this machine.

    Two different names of another machine count as two machines.
    """
    here = {host.address for host in hosts if not host.port}
    machines = {LOOPBACK if is_loopback(host.address) or host.address in here else host.address for host in hosts}
    return len(machines) == 1


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach the address. Host names other than `localhost` are not looked up."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _hosts_with(device: str | None, group: GroupName, cluster: Cluster) -> list[Host]:
    hosts = [host for host in cluster.hosts if device is None or device in host.devices]
    if not hosts:
        raise ClusterError(
            f"The layout wants `{group}` on {device!r}, but no host has such a device.",
            fix=f"Add {device!r} to the `devices` of every host that has such a device, or change the group's `device`.",
        )
    return hosts


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ClusterError(
            f"{file} cannot be read: {error.strerror}.", fix="Give the path of a file with [[hosts]]."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"{file} is not valid TOML: {error}.", fix="Correct that line.") from error


def _host(data: dict[str, Any], *, at: str) -> Host:
    _check_keys(data, HOST_KINDS, at=at)
    if "address" not in data:
        raise ClusterError("A host has no address.", at=at, fix=f"Add {HOST_EXAMPLE['address']}.")
    for key, kind in HOST_KINDS.items():
        value = data.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ClusterError(
                f"{key} = {value!r} is not of type {kind.__name__}.", at=at, fix=f"Write {HOST_EXAMPLE[key]}."
            )
    fields: dict[str, Any] = {key: tuple(map(str, value)) if key == "devices" else value for key, value in data.items()}
    try:
        return Host(**fields)
    except ClusterError as error:
        raise ClusterError(error.what, at=at, fix=error.fix) from error


def _check_keys(data: Mapping[str, Any], known: Collection[str], *, at: str) -> None:
    for key in data:
        if key not in known:
            raise ClusterError(f"There is no setting `{key}` here.", at=at, fix=_near(key, known))


def _near(name: Any, known: Collection[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=2, cutoff=0.5)
    return f"Did you mean {' or '.join(f'`{c}`' for c in close)}?" if close else f"Known: {', '.join(known)}."
