"""Collectives are neither encrypted nor authenticated: other machines must not reach them, unless the user trusts the network."""

import functools
import ipaddress
import os
import sys
from pathlib import Path

import jax
import psutil
import pytest

import choreo
from choreo import envs
from choreo.cli import main
from choreo.errors import RunError
from choreo.plans.build import plan
from choreo.runtime import worker
from choreo.runtime.coordinator.cluster import Cluster, Host
from choreo.runtime.coordinator.deployment import check_collectives, collective_address, hosts_of
from choreo.runtime.local import Local
from hosts import two_hosts as two_hosts  # a fixture
from tiny import Tiny

LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""
TINY = f"{Path(__file__).parents[1] / 'tiny.py'}:Tiny"
HERE = Host(address="10.0.0.1")
REFUSED = (
    "`env+actor+buffer+learner-0` on 10.0.0.1 and `env+actor+buffer+learner-1` on 10.0.0.2 combine gradients by "
    "collectives (Gloo or NCCL), which are neither encrypted nor authenticated.\nPut these workers on one host. Or, if you "
    "trust everybody in the network, give --trust-network (trust_network=True)."
)


@functools.cache
def planned(layout):
    return plan(Tiny(unroll=4), envs.make("jax:CartPole-v1", 4), layout)


def listening(pid: int) -> set[str]:
    """The addresses at which a process listens, read from /proc, because psutil does not look into other network namespaces."""
    process = Path(f"/proc/{pid}")
    sockets = {os.readlink(file) for file in (process / "fd").iterdir()}
    rows = [line.split() for kind in ("tcp", "tcp6") for line in (process / "net" / kind).read_text().splitlines()[1:]]
    return {address_of(row[1]) for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in sockets}


def address_of(row: str) -> str:
    """The address in a text such as "0100007F:1F90", which holds words of four bytes in this machine's byte order, then a port."""
    words = row.partition(":")[0]
    packed = b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)  # gRPC binds IPv6 sockets to IPv4 addresses


class TestListening:
    """The addresses at which JAX's coordination service and Gloo listen while learners combine gradients."""

    @pytest.mark.parametrize(
        ("address", "expected"),
        [
            pytest.param(None, "127.0.0.1", id="a local run"),
            # No default is this address. So a process that listens at this address has read the address from the cluster.
            pytest.param("127.0.0.2", "127.0.0.2", id="another loopback address"),
            # This address is reserved for documentation. It is no address of this machine, so no process can listen at it.
            pytest.param("192.0.2.77", "127.0.0.1", id="one host of a cluster"),
        ],
    )
    def test_workers_on_one_host_listen_only_at_its_loopback_address(self, address, expected):
        cluster = address and Cluster(hosts=(Host(address=address, cpus=2),))
        runtime = Local(planned(choreo.multi_learner(2)), cluster=cluster)
        try:
            runtime.start(jax.random.key(0))
            runtime.run(0, 2)
            found = [listening(handle.process.pid) for handle in runtime.pool.handles.values()]
        finally:
            runtime.close()
        assert found == [{expected}, {expected}]

    def test_workers_on_two_hosts_listen_only_at_the_address_of_their_host(self, two_hosts):
        """If network namespaces cannot be made, both hosts are this machine."""
        runtime = Local(planned(choreo.multi_learner(2)), cluster=two_hosts, trust_network=True)
        try:
            runtime.start(jax.random.key(0))
            runtime.run(0, 2)
            started = psutil.Process().children(recursive=True)
            found = [listening(each.pid) for each in started if "choreo.runtime.worker" in each.cmdline()]
        finally:
            runtime.close()
        assert sorted(found, key=sorted) == sorted([{host.address} for host in two_hosts.hosts], key=sorted)


class TestRefused:
    def test_learners_on_two_hosts_are_refused_before_any_process_starts(self, monkeypatch):
        monkeypatch.setattr("choreo.runtime.local.launch", raise_launched)
        cluster = Cluster(hosts=(HERE, Host(address="10.0.0.2", port=7000)))
        with pytest.raises(RunError) as refused:
            Local(planned(choreo.multi_learner(2)), cluster=cluster)
        assert str(refused.value) == REFUSED
        with pytest.raises(RunError, match="Launched"):
            Local(planned(choreo.multi_learner(2)), cluster=cluster, trust_network=True)

    def test_learners_are_refused_if_only_the_last_is_on_a_second_host(self):
        the_plan = planned(choreo.multi_learner(4))
        cluster = Cluster(hosts=(Host(address="10.0.0.1", cpus=3), Host(address="10.0.0.2", port=7000)))
        with pytest.raises(RunError, match=r"`.*-0` on 10\.0\.0\.1 and `.*-3` on 10\.0\.0\.2 combine gradients"):
            check_collectives(the_plan, hosts_of(the_plan, cluster), trust_network=False)

    def test_workers_that_only_exchange_messages_are_accepted(self):
        """Channels between hosts are encrypted."""
        the_plan = planned(choreo.coarse(2))
        cluster = Cluster(hosts=(HERE, Host(address="10.0.0.2", port=7000)))
        hosts = hosts_of(the_plan, cluster)
        assert {host.address for host in hosts.values()} == {"10.0.0.1", "10.0.0.2"}
        check_collectives(the_plan, hosts, trust_network=False)

    @pytest.mark.parametrize("trusted", [False, True])
    def test_the_command_line_refuses_learners_on_two_hosts_without_trust_network(
        self, trusted, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr("choreo.runtime.local.launch", raise_launched)
        (tmp_path / "token").write_text("0123456789abcdef")
        (tmp_path / "token").chmod(0o600)
        (tmp_path / "cluster.toml").write_text(
            'token_file = "token"\n[[hosts]]\naddress = "10.0.0.1"\n[[hosts]]\naddress = "10.0.0.2"\nport = 7000\n'
        )
        options = ["--layout", "multi_learner", "--workers", "2", "--num-envs", "4", "--steps", "16", "--quiet"]
        where = ["--cluster", str(tmp_path / "cluster.toml"), "--out", str(tmp_path / "run")]
        command = ["train", TINY, "jax:CartPole-v1", *options, *where, *["--trust-network"] * trusted]
        assert main.main(command) == 1
        assert capsys.readouterr().err == f"RunError: {'Launched.' if trusted else REFUSED}\n"
        assert not (tmp_path / "run").exists()


def raise_launched(*_args, **_options):
    raise RunError("Launched.")


AGENT = Host(address="10.0.0.2", port=7000)


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        pytest.param([HERE, HERE], ["127.0.0.1"] * 2, id="this machine"),
        pytest.param([AGENT, AGENT], ["127.0.0.1"] * 2, id="one other machine"),
        pytest.param([AGENT, Host(address="10.0.0.2", port=7001)], ["127.0.0.1"] * 2, id="one address, two ports"),
        pytest.param([HERE, Host(address="10.0.0.1", port=7000)], ["127.0.0.1"] * 2, id="an agent on this machine"),
        pytest.param([HERE, Host(address="127.0.0.1", port=7000)], ["127.0.0.1"] * 2, id="an agent on loopback"),
        pytest.param([Host(address="::1"), Host(address="localhost", port=7000)], ["::1", "localhost"], id="loopback"),
        pytest.param([HERE, AGENT], None, id="two machines"),
        pytest.param([AGENT, Host(address="127.0.0.1", port=7000)], None, id="another machine and this one"),
        pytest.param([Host(address="node-1", port=7000), Host(address="node-2", port=7000)], None, id="two names"),
    ],
)
def test_the_address_of_a_collective_is_loopback_on_one_machine(hosts, addresses):
    """If the hosts are different machines, each worker listens at the address of its own host."""
    the_plan = planned(choreo.multi_learner(2))
    workers = dict(zip(hosts_of(the_plan, Cluster.local()), hosts, strict=True))
    if addresses is None:
        addresses = [host.address for host in hosts]
        with pytest.raises(RunError, match="combine gradients"):
            check_collectives(the_plan, workers, trust_network=False)
        check_collectives(the_plan, workers, trust_network=True)
    else:
        check_collectives(the_plan, workers, trust_network=False)
    assert [collective_address(host, hosts) for host in hosts] == addresses


@pytest.mark.parametrize(
    ("address", "given", "interface"),
    [("127.0.0.1", None, "=lo"), ("127.0.0.1", "eth1", "eth1"), ("10.0.0.1", None, None)],
    ids=["one machine", "the user chose an interface", "several machines"],
)
def test_nccl_uses_the_loopback_interface_on_one_machine(address, given, interface, monkeypatch):
    """Checks only the environment variable: NCCL itself needs an accelerator."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", given or "")  # monkeypatch restores the old value after the test
    if given is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    for part in ("jax.distributed.initialize", "jax.config.update", "choreo._compat.use_gloo_at"):
        monkeypatch.setattr(part, lambda *_args, **_options: None)
    worker._join_collective({"group": "learner", "rank": 0, "size": 2, "address": address}, f"{address}:1234", 300.0)
    assert os.environ.get("NCCL_SOCKET_IFNAME") == interface
