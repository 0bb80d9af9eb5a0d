"""The number of threads that XLA starts. Each measurement starts a new process, which counts its own threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from choreo.runtime.engine.xla_threads import XLA_THREADS

THREADS = Path("/proc/self/task")
SCRIPT = f"""
import functools, pathlib, sys
import choreo
from choreo.networks import mlp
from choreo.runtime.make import make_runtime
network = functools.partial(mlp, hidden=(int(sys.argv[1]),) * 2)
algo = choreo.PPO(unroll=32, epochs=1, minibatch_size=256, network=network)
make_runtime("inprocess", choreo.plan(algo, "jax:CartPole-v1", num_envs=8), profile=False)
print(sum("XLAEigen" in (task / "comm").read_text() for task in pathlib.Path("{THREADS}").iterdir()))
"""

pytestmark = pytest.mark.skipif(not THREADS.exists() or os.cpu_count() == 1, reason="needs /proc and several cores")


def threads(hidden: int, **variables: str) -> int:
    env = {name: value for name, value in os.environ.items() if name not in XLA_THREADS} | variables
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(hidden)], env=env, capture_output=True, check=True)
    return int(ran.stdout)


def test_small_networks_use_one_thread_unless_the_user_sets_the_number():
    assert threads(64) == 1
    assert threads(64, NPROC="2") == 2


def test_large_networks_use_one_thread_per_core():
    assert threads(512) == os.cpu_count()
