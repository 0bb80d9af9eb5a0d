"""Without `allow_versions`, a host with different package versions is refused, and the error names the packages. A host with a
different CPU or different XLA_FLAGS causes a warning. With `same_bits`, both kinds of hosts are refused."""

import gc
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from contextlib import contextmanager

import gymnasium
import hypothesis
import pytest

import choreo
from choreo.cli import main
from choreo.errors import RunError
from choreo.host.packages import packages_of
from choreo.runtime.coordinator.versions import Differences, Versions, compare, cpu_of, this_machine
from hosts import Agent, make_token
from tiny import Tiny

HERE = Versions(packages={"jax": "0.10.2", "python": "3.11.4"}, cpu="Xeon", cpu_features="abc", xla_flags="")
OTHER_FLAGS = "--xla_cpu_enable_fast_min_max=true"


@contextmanager
def agent(tmp_path, **variables):
    """Start an agent on loopback, with these environment variables. Yields the cluster that has only this host."""
    with Agent(make_token(tmp_path), **variables) as started:
        yield started.cluster


@pytest.fixture
def other_gymnasium(tmp_path):
    """A PYTHONPATH with which the installed version of Gymnasium appears to be 0.0.7."""
    folder = tmp_path / "site" / "gymnasium-0.0.7.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: gymnasium\nVersion: 0.0.7\n")
    return os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])


def train(cluster, **options):
    return choreo.train(
        Tiny(unroll=4), "CartPole-v1", num_envs=2, layout="fine", steps=8, cluster=cluster, progress=False, **options
    )


def test_a_host_with_a_different_version_is_refused_by_name(tmp_path, other_gymnasium):
    ours = importlib.metadata.version("gymnasium")
    with agent(tmp_path, PYTHONPATH=other_gymnasium) as cluster, pytest.raises(RunError) as refused:
        train(cluster, out=tmp_path / "run")
    host = f"127.0.0.1:{cluster.hosts[0].port}"
    assert str(refused.value) == (
        f"Host {host} has gymnasium 0.0.7 (this machine: {ours}). Other versions can give other results.\n"
        f"Install the same versions there (pip install gymnasium=={ours}), or accept the difference: "
        "--allow-versions (allow_versions=True)."
    )
    assert not (tmp_path / "run").exists()
    gc.collect()  # frees the objects of the refused run before the leak check of the next test


def test_allow_versions_warns_and_the_run_records_the_differences(tmp_path, other_gymnasium, capfd):
    with agent(tmp_path, PYTHONPATH=other_gymnasium, XLA_FLAGS=OTHER_FLAGS) as cluster:
        host = f"127.0.0.1:{cluster.hosts[0].port}"
        train(cluster, out=tmp_path / "run", allow_versions=True)
        shown = capfd.readouterr().err
        assert (
            shown.count(f"[{host}] It has gymnasium 0.0.7 (this machine: ")
            == shown.count("may not be the same bit for bit")
            == 1
        )
        assert f"XLA_FLAGS '{OTHER_FLAGS}' (this machine: '" in shown
        recorded = tomllib.loads((tmp_path / "run" / "run.toml").read_text())["versions"]
        assert recorded["jax"] == importlib.metadata.version("jax")
        assert recorded["hosts"] == {host: {"gymnasium": "0.0.7", "XLA_FLAGS": OTHER_FLAGS}}
        assert choreo.load(tmp_path / "run").rows
        file = tmp_path / "cluster.toml"
        port = cluster.hosts[0].port
        file.write_text(f'token_file = "token"\n[[hosts]]\naddress = "127.0.0.1"\nport = {port}\ncpus = 2\n')
        run = ["train", str(tmp_path / "run" / "run.toml"), "--cluster", str(file), "--out", str(tmp_path / "again")]
        assert main.main([*run, "--allow-versions", "--same-bits", "--quiet"]) == 1
    shown = capfd.readouterr().err
    assert shown.startswith(f"RunError: Host {host} has gymnasium 0.0.7 (this machine: ")
    assert "Use a host like this machine, or leave out --same-bits (same_bits=True)." in shown


def test_a_host_with_equal_versions_has_no_differences():
    assert compare("b", HERE, HERE) == Differences(host="b", packages={}, bits={})
    assert not compare("b", HERE, HERE).recorded


def test_differences_of_packages_and_of_cpu_or_flags_are_listed_separately():
    there = Versions(packages={"jax": "0.9.1", "python": "3.12.1"}, cpu="Xeon", cpu_features="abd", xla_flags="--a")
    found = compare("b", there, HERE)
    assert found.packages == {"jax": ("0.9.1", "0.10.2"), "python": ("3.12.1", "3.11.4")}
    assert found.bits == {"CPU": ("Xeon, features abd", "Xeon, features abc"), "XLA_FLAGS": ("--a", "")}
    assert found.recorded == {"jax": "0.9.1", "python": "3.12.1", "CPU": "Xeon, features abd", "XLA_FLAGS": "--a"}
    with pytest.raises(RunError) as refused:
        found.check(allow_versions=False, same_bits=False)
    assert str(refused.value) == (
        "Host b has jax 0.9.1 (this machine: 0.10.2); Python 3.12.1 (this machine: 3.11.4). Other versions can give other "
        "results.\nInstall the same versions there (pip install jax==0.10.2, and Python 3.11.4), or accept the "
        "difference: --allow-versions (allow_versions=True)."
    )
    found.check(allow_versions=True, same_bits=False)
    with pytest.raises(
        RunError, match=r"has x 1 \(this machine: none\). Other.*\nInstall the same versions here, or accept"
    ):
        Differences(host="b", packages={"x": ("1", "none")}, bits={}).check(allow_versions=False, same_bits=False)
    with pytest.raises(
        RunError, match=r"Host b has CPU Xeon, features abd \(this machine: Xeon, features abc\); XLA_FLAGS"
    ):
        Differences(host="b", packages={}, bits=found.bits).check(allow_versions=False, same_bits=True)


def test_a_missing_package_has_the_version_none():
    there = this_machine(["no-such-package"])
    assert there.packages["no-such-package"] == "none"
    assert {"choreo", "jax", "jaxlib", "numpy", "python"} < set(there.packages)
    assert there == Versions.from_json(there.to_json())


def test_the_order_of_xla_flags_does_not_matter(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", " --b=1  --a ")
    assert this_machine([]).xla_flags == "--a --b=1"


def test_cpus_with_different_features_differ():
    def text(flags, name="Xeon"):
        return f"processor : 0\nmodel name : {name}\nflags : {flags}\n\nprocessor : 1\nmodel name : other\nflags : x\n"

    assert cpu_of(text("avx fma")) == cpu_of(text("fma avx")) != cpu_of(text("avx"))
    assert cpu_of(text("avx"))[0] == "Xeon"
    assert cpu_of("processor : 0\nFeatures : neon sve\n")[1] != cpu_of("processor : 0\nFeatures : neon\n")[1]
    assert cpu_of("")[0], "without /proc/cpuinfo, the name of the CPU must be the machine type"


def test_reading_versions_imports_no_jax():
    code = (
        "import sys, choreo.runtime.worker, choreo.runtime.coordinator.versions as v; v.this_machine(['gymnasium'])\n"
        "print([m for m in ('jax', 'gymnasium', 'ml_dtypes') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


class Physics(gymnasium.Env):
    """A user's environment that uses other packages."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def step(self, action):
        import psutil  # noqa: F401  `packages_of` does not find imports inside of functions

        return hypothesis.strategies.integers


def test_the_packages_of_an_environment_are_found():
    env = gymnasium.make("CartPole-v1")
    assert packages_of(env) == ("gymnasium", "numpy")
    assert packages_of(gymnasium.wrappers.TimeLimit(Physics(), 3)) == ("gymnasium", "hypothesis")
    assert packages_of(lambda: hypothesis.strategies) == ("hypothesis",)
