"""Choreo restores the settings of JAX (`jax.config`). Each script runs in a new process, in which JAX has not started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import jax
import choreo.runs.training
from choreo.errors import ChoreoError
from tiny import Tiny

def changed():
    after = jax.config.values
    return {name: after[name] for name in before if after[name] != before[name]}

before = dict(jax.config.values)
"""


def run(script: str, folder: Path, **env: str) -> None:
    """Run a script as a user would: without the settings of our tests, and with a cache of compiled programs."""
    ours = ("JAX_", "XLA_", "CHOREO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = f"{Path(__file__).parents[1]}:{Path(__file__).parents[2] / 'src'}"
    env = kept | {"JAX_PLATFORMS": "cpu", "CHOREO_CACHE": str(folder / "cache"), "PYTHONPATH": paths} | env
    ran = subprocess.run([sys.executable, "-c", BEGIN + script], cwd=folder, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_train_load_and_evaluate_restore_the_settings(tmp_path):
    run(
        """
choreo.train(Tiny(unroll=4), "CartPole-v1", num_envs=2, steps=8, out="x")
assert changed() == {}
try:
    choreo.train(Tiny(unroll=4, nan_at=0), "CartPole-v1", num_envs=2, steps=8)
except ChoreoError:
    assert changed() == {}
else:
    raise AssertionError
choreo.load("x").evaluate(1)
assert changed() == {}
choreo.replay("x")
assert changed() == {}
""",
        tmp_path,
    )
    assert list((tmp_path / "cache").iterdir())  # the cache was in use


def test_only_the_number_of_devices_stays_changed_once_jax_has_started(tmp_path):
    run(
        """
try:
    choreo.train("no_such", "jax:CartPole-v1", layout=choreo.fused(devices=2), steps=8)
except ChoreoError:
    assert changed() == {}
choreo.train(Tiny(unroll=4), "jax:CartPole-v1", layout=choreo.fused(devices=2), num_envs=4, steps=16)
assert len(jax.devices()) == 2
assert changed() == {"jax_num_cpu_devices": 2}  # JAX has started, and now refuses to change this number
""",
        tmp_path,
    )


@pytest.mark.parametrize(
    "env", [{"JAX_NUM_CPU_DEVICES": "3"}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}], ids=["jax", "xla"]
)
def test_settings_of_the_user_are_not_changed(env, tmp_path):
    run(
        """
from choreo.runs import jax_settings
jax_settings.prepare(choreo.fused(devices=2), choreo.envs.make("CartPole-v1", 2))
assert changed() == {}
assert len(jax.devices()) == 3
with jax_settings.put_back():
    jax.config.update("jax_log_compiles", True)  # as the user's code may do
assert changed() == {"jax_log_compiles": True}
""",
        tmp_path,
        JAX_CPU_ENABLE_ASYNC_DISPATCH="true",
        **env,
    )
