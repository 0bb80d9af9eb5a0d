"""`Cluster` reads and checks `cluster.toml`; `place` chooses a host for every site."""

import os
import subprocess
import sys

import pytest

from choreo.runtime.coordinator.cluster import Cluster, ClusterError, Host, place

TWO_HOSTS = """
token_file = "token"

[[hosts]]
address = "10.0.0.1"
port = 7000
cpus = 2
devices = ["cpu", "gpu"]

[[hosts]]
address = "node-2"
port = 7001
cpus = 4
"""


def write(folder, text, *, token="0123456789abcdef\n", mode=0o600):
    (folder / "cluster.toml").write_text(text)
    (folder / "token").write_text(token)
    (folder / "token").chmod(mode)
    return folder / "cluster.toml"


def address_of_each_site(placements):
    return {f"{p.group}-{p.replica}": p.host.address for p in placements}


# Reading cluster.toml.


def test_all_settings_of_a_file_are_read(tmp_path):
    cluster = Cluster.from_toml(write(tmp_path, TWO_HOSTS))
    assert cluster == Cluster(
        hosts=(
            Host(address="10.0.0.1", port=7000, cpus=2, devices=("cpu", "gpu")),
            Host(address="node-2", port=7001, cpus=4, devices=("cpu",)),
        ),
        token_file=tmp_path / "token",
    )
    assert cluster.token() == b"0123456789abcdef"
    assert hash(cluster)


def test_the_local_cluster_is_this_machine():
    cluster = Cluster.local()
    assert cluster.token() is None and [host.port for host in cluster.hosts] == [0]
    assert [host.cpus for host in cluster.hosts] == [len(os.sched_getaffinity(0))]


def test_one_address_may_be_two_hosts_if_the_ports_differ():
    hosts = (Host(address="localhost", port=1), Host(address="localhost", port=2))
    assert Cluster(hosts=hosts).hosts == hosts


def test_reading_a_cluster_imports_no_jax():
    code = (
        "import sys, choreo.runtime.coordinator.cluster as cluster; cluster.Cluster.local()\n"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[[hosts]]\naddress = "a"\n[[hosts]]\naddress = "b"',
            "a and b have no port, but every host except this machine needs one.\n  at  cluster.toml\n"
            "Give the port of `choreo agent`",
        ),
        (
            '[[hosts]]\naddress = "a"\nport = 7000',
            "Hosts with a port have an agent, which asks for a token, but there is no token_file.\n  at  cluster.toml\n",
        ),
        ("", "A cluster needs at least one host.\n  at  cluster.toml\nAdd a table [[hosts]] with its address."),
        ("hosts = []", "A cluster needs at least one host."),
        ("hosts = 3", "`hosts` in cluster.toml is not a list of tables.\nWrite [[hosts]], with two brackets."),
        ('[hosts]\naddress = "a"', "`hosts` in cluster.toml is not a list of tables."),
        ("[[host]]", "There is no setting `host` here.\n  at  cluster.toml\nDid you mean `hosts`?"),
        (
            '[[hosts]]\naddress = "a"\n[[hosts]]\naddres = "b"',
            "There is no setting `addres` here.\n  at  cluster.toml, hosts[1]\nDid you mean `address`?",
        ),
        (
            "[[hosts]]\ncpus = 2",
            'A host has no address.\n  at  cluster.toml, hosts[0]\nAdd address = "10.0.0.1".',
        ),
        (
            '[[hosts]]\naddress = ""',
            "'' is not the address of a host.\n  at  cluster.toml, hosts[0]\nGive a name or an IP address",
        ),
        (
            '[[hosts]]\naddress = "a:7000"',
            "The address 'a:7000' contains a port.\n  at  cluster.toml, hosts[0]\n"
            'Write two settings: address = "a" and port = 7000.',
        ),
        (
            '[[hosts]]\naddress = "a"\nport = "x"',
            "port = 'x' is not of type int.\n  at  cluster.toml, hosts[0]\nWrite port = 7000.",
        ),
        ('[[hosts]]\naddress = "a"\nport = 70000', "a has no port 70000.\n  at  cluster.toml, hosts[0]"),
        (
            '[[hosts]]\naddress = "a"\ncpus = 0',
            "a has cpus = 0.\n  at  cluster.toml, hosts[0]\nGive its number of cpus",
        ),
        ('[[hosts]]\naddress = "a"\ncpus = true', "cpus = True is not of type int."),
        ('[[hosts]]\naddress = "a"\ndevices = "gpu"', "devices = 'gpu' is not of type list."),
        ('[[hosts]]\naddress = "a"\ndevices = []', "a has no devices."),
        (
            '[[hosts]]\naddress = "a"\ndevices = ["gpus"]',
            "a has an unknown device 'gpus'.\n  at  cluster.toml, hosts[0]\nDid you mean `gpu`",
        ),
        (
            2 * '[[hosts]]\naddress = "a"\nport = 7000\n',
            "The host a port 7000 is listed twice.\n  at  cluster.toml\nList each host once, with all its cpus.",
        ),
        ("token_file = 3", "token_file = 3 in cluster.toml is not a path.\n"),
        ("hosts = = 3", "cluster.toml is not valid TOML: Invalid value (at line 1, column 9).\nCorrect that line."),
        (
            'token_file = "gone"\n[[hosts]]\naddress = "a"',
            "The token file gone cannot be read: No such file or directory.\nMake a token file, and copy it to every host",
        ),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, monkeypatch, text, message):
    write(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClusterError) as error:
        Cluster.from_toml("cluster.toml")
    assert str(error.value).startswith(message)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ClusterError, match="gone.toml cannot be read: No such file or directory"):
        Cluster.from_toml(tmp_path / "gone.toml")


def test_a_token_that_others_can_read_or_guess_is_refused(tmp_path):
    with pytest.raises(ClusterError, match="Others can read the token file .*\nRun `chmod 600"):
        Cluster.from_toml(write(tmp_path, TWO_HOSTS, mode=0o640))
    with pytest.raises(ClusterError, match="has 5 bytes, so it can be guessed"):
        Cluster.from_toml(write(tmp_path, TWO_HOSTS, token="guess\n"))


# Placing sites on hosts.

BIG, SMALL = Host(address="big", cpus=4, devices=("cpu", "gpu")), Host(address="small", port=7000, cpus=2)
CLUSTER = Cluster(hosts=(BIG, SMALL))


def test_replicas_are_placed_in_proportion_to_cpus_and_a_single_site_on_the_first_host():
    sites = {"env+actor": 6, "buffer+learner": None}
    where = address_of_each_site(place(sites, CLUSTER))
    assert list(where) == [*(f"env+actor-{i}" for i in range(6)), "buffer+learner-0"]
    workers = [where[f"env+actor-{i}"] for i in range(6)]
    assert (workers.count("big"), workers.count("small")) == (4, 2)
    assert where["buffer+learner-0"] == "big"


@pytest.mark.parametrize("replicas", range(1, 14))
def test_no_host_gets_a_worker_if_another_host_would_have_fewer_workers_per_cpu(replicas):
    where = [p.host for p in place({"env": replicas}, CLUSTER)]
    assert len(where) == replicas
    for host, other in ((BIG, SMALL), (SMALL, BIG)):
        assert where.count(host) / host.cpus <= (where.count(other) + 1) / other.cpus


def test_replicas_of_two_groups_with_the_same_index_are_on_the_same_host():
    where = address_of_each_site(place({"env": 3, "actor": 3, "learner": None}, CLUSTER))
    assert all(where[f"env-{i}"] == where[f"actor-{i}"] for i in range(3))


def test_a_group_is_placed_on_a_host_with_its_device():
    small_first = Cluster(hosts=(SMALL, BIG))
    assert address_of_each_site(place({"env": 1, "learner": None}, small_first)) == {
        "env-0": "big",
        "learner-0": "small",
    }
    where = address_of_each_site(
        place({"env": 3, "learner": None}, small_first, devices={"learner": "gpu", "env": None})
    )
    assert where["learner-0"] == "big"
    where = address_of_each_site(place({"env": 3}, small_first, devices={"env": "gpu"}))
    assert set(where.values()) == {"big"}
    with pytest.raises(ClusterError, match="The layout wants `learner` on 'tpu', but no host has such a device"):
        place({"learner": None}, small_first, devices={"learner": "tpu"})


def test_the_local_cluster_places_every_site_on_this_machine():
    assert {p.host.address for p in place({"env": 3, "learner": None}, Cluster.local())} == {"127.0.0.1"}
