"""The machines a run may use, as a value; `cluster.toml` is this, written down.

    token_file = "token"              the secret that agents ask for, beside this file

    [[hosts]]
    address = "10.0.0.1"              the first host also gets what is not replicated: the learner
    cpus = 8
    devices = ["cpu", "gpu"]

    [[hosts]]
    address = "10.0.0.2"
    port = 7000                       of the `choreo agent` there; this machine needs none
    cpus = 16

Without a file, a cluster is this machine. A layout says how many sites there are, `place` on which host each is. Nothing
here imports JAX, or looks whether a host is there.
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
HOST_EXAMPLE = {
    "address": 'address = "10.0.0.1"',
    "port": "port = 7000",
    "cpus": "cpus = 8",
    "devices": 'devices = ["cpu"]',
}
PLATFORMS = ("cpu", "gpu", "tpu")
"""What a host can compute on, as layouts call it."""


class ClusterError(ChoreoError):
    """A cluster that cannot be, or that has no place for a group."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine."""

    address: str
    """Its name or number in the network."""
    port: int = 0
    """Where `choreo agent` listens there; 0: this is the machine of the coordinator, which needs no agent."""
    cpus: int = 1
    """How many workers it can run side by side; hosts with more get more."""
    devices: tuple[str, ...] = ("cpu",)
    """What it computes on; a group with device="gpu" is placed only where there is one."""

    def __post_init__(self):
        if not self.address or re.search(r"\s", self.address):
            raise ClusterError(
                f"{self.address!r} is no address of a host.", fix='Give a name or a number: address = "10.0.0.1".'
            )
        if glued := re.fullmatch(r"([^:]+):(\d+)", self.address):
            raise ClusterError(
                f"The address {self.address!r} has a port in it.",
                fix=f'Give both: address = "{glued[1]}" and port = {glued[2]}.',
            )
        if not 0 <= self.port < 2**16:
            raise ClusterError(f"{self.address} has no port {self.port}.", fix="Give a number from 1 to 65535.")
        if self.cpus < 1:
            raise ClusterError(f"{self.address} has cpus = {self.cpus}.", fix="Give how many it has, at least 1.")
        if not self.devices:
            raise ClusterError(f"{self.address} has no devices.", fix='Give devices = ["cpu"], or leave it out.')
        for device in self.devices:
            if device not in PLATFORMS:
                raise ClusterError(f"{self.address} has an unknown device {device!r}.", fix=_near(device, PLATFORMS))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines a run may use."""

    hosts: tuple[Host, ...]
    """The first also gets what is not replicated."""
    token_file: Path | None = None
    """Holds the secret that agents ask for; None: a new one for each run, which is enough for this machine."""

    def __post_init__(self):
        if not self.hosts:
            raise ClusterError("A cluster needs at least one host.", fix="Add a table [[hosts]] with its address.")
        for i, host in enumerate(self.hosts):
            # Two hosts at one address are two network namespaces, or a mistake; ports tell them apart.
            if (host.address, host.port) in [(other.address, other.port) for other in self.hosts[:i]]:
                where = host.address + (f" port {host.port}" if host.port else "")
                raise ClusterError(f"The host {where} is listed twice.", fix="Name each once, with all its cpus.")

        here = [host.address for host in self.hosts if not host.port]
        if len(here) > 1:
            raise ClusterError(
                f"{' and '.join(here)} have no port, and only this machine needs none.",
                fix="Give the port of the `choreo agent` on each of the others: port = 7000.",
            )

    @classmethod
    def local(cls) -> "Cluster":
        """This machine, with the cpus that this process may use."""
        return cls(hosts=(Host(address=LOOPBACK, cpus=len(os.sched_getaffinity(0)), devices=PLATFORMS),))

    @classmethod
    def from_toml(cls, file: str | Path) -> "Cluster":
        """The cluster in a file; a relative `token_file` is meant from the folder of that file."""
        file = Path(file)
        data = _read(file)
        _check_keys(data, ("hosts", "token_file"), at=f"{file}")
        hosts = data.get("hosts", [])
        if not isinstance(hosts, list) or not all(isinstance(host, dict) for host in hosts):
            raise ClusterError(f"`hosts` in {file} is no list of tables.", fix="Write [[hosts]], in two brackets.")
        token = data.get("token_file")
        if not isinstance(token, str | None):
            raise ClusterError(f"{file} says token_file = {token!r}.", fix='Give a path: token_file = "token".')
        try:
            cluster = cls(
                hosts=tuple(_host(host, at=f"{file}, hosts[{i}]") for i, host in enumerate(hosts)),
                token_file=None if token is None else file.parent / Path(token).expanduser(),
            )
        except ClusterError as error:
            raise ClusterError(error.what, fix=error.fix, **({"at": str(file)} | error.places)) from error
        if cluster.token() is None and any(host.port for host in cluster.hosts):
            raise ClusterError(
                "Hosts with a port have an agent, which asks for a token, and there is no token_file.",
                at=str(file),
                fix='Add token_file = "token", and give the same file to `choreo agent` there.',
            )
        return cluster

    def token(self) -> bytes | None:
        """The secret in `token_file`; refuses a file that others can read."""
        if self.token_file is None:
            return None
        try:
            text = self.token_file.read_bytes().strip()
            mode = self.token_file.stat().st_mode
        except OSError as error:
            raise ClusterError(
                f"The token file {self.token_file} cannot be read: {error.strerror}.",
                fix="Make one, the same on every host: `openssl rand -hex 32 > token; chmod 600 token`.",
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ClusterError(
                f"Others can read the token file {self.token_file}.", fix=f"Run `chmod 600 {self.token_file}`."
            )
        if len(text) < 16:
            raise ClusterError(
                f"The token in {self.token_file} has {len(text)} bytes; that can be guessed.",
                fix="Make one of 16 or more: `openssl rand -hex 32 > token`.",
            )
        return text


class SiteHost(NamedTuple):
    """Where one site is."""

    group: GroupName
    replica: int
    """0 for a group that is not replicated."""
    host: Host


def place(
    sites: Mapping[GroupName, int | None], cluster: Cluster, *, devices: Mapping[GroupName, str | None] | None = None
) -> list[SiteHost]:
    """A host for every site: `sites` says how many replicas a group has, None for one that is not replicated.

    Replicas go around the hosts in proportion to their cpus; those of two groups with the same number of replicas meet on
    the same hosts. What is not replicated is on the first host. `devices` says what a group computes on, if it matters.
    """
    placements = []
    for group, replicas in sites.items():
        hosts = _hosts_with((devices or {}).get(group), group, cluster)
        workers = dict.fromkeys(hosts, 0)
        for replica in range(replicas or 1):
            # The host that would still have most of a cpu for each of its workers; the first of equals.
            host = hosts[0] if replicas is None else min(hosts, key=lambda h: (workers[h] + 1) / h.cpus)
            workers[host] += 1
            placements.append(SiteHost(group, replica, host))
    return placements


def on_one_machine(hosts: Collection[Host]) -> bool:
    """Do these hosts have one address, or are they all this machine? Two names of another machine count as two."""
    here = {host.address for host in hosts if not host.port}
    machines = {LOOPBACK if is_loopback(host.address) or host.address in here else host.address for host in hosts}
    return len(machines) == 1


def is_loopback(address: str) -> bool:
    """Can only this machine reach that address? Names are not looked up."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _hosts_with(device: str | None, group: GroupName, cluster: Cluster) -> list[Host]:
    hosts = [host for host in cluster.hosts if device is None or device in host.devices]
    if not hosts:
        raise ClusterError(
            f"The layout wants `{group}` on {device!r}, and no host has one.",
            fix=f"Add {device!r} to the devices of the hosts that have one, or change the group's `device`.",
        )
    return hosts


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ClusterError(f"{file} cannot be read: {error.strerror}.", fix="Name a file with [[hosts]].") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"{file} is no valid TOML: {error}.", fix="Mend that line.") from error


def _host(data: dict[str, Any], *, at: str) -> Host:
    _check_keys(data, HOST_KINDS, at=at)
    if "address" not in data:
        raise ClusterError("A host has no address.", at=at, fix=f"Add {HOST_EXAMPLE['address']}.")
    for key, kind in HOST_KINDS.items():
        value = data.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ClusterError(f"{key} = {value!r} is no {kind.__name__}.", at=at, fix=f"Write {HOST_EXAMPLE[key]}.")
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
