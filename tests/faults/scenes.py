"""Parts that the tests of faults share: small plans, an environment with a fault, and a search for what a run leaves behind.

The environment reads its fault from environment variables of its process, so that one plan serves all faults:

    FAULT=segfault                the fault; `misbehave` lists all faults
    UNLUCKY=<seed>                the seed of the environment that has the fault

The fault happens in step number `FAULT_STEP` of that environment.
"""

import contextlib
import ctypes
import functools
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import psutil

import choreo
from choreo import envs
from choreo.envs.gymnasium import seeds
from choreo.plans.plan import Plan
from choreo.runtime.engine.assemble import split_key
from choreo.runtime.inprocess import InProcess
from tiny import Tiny

KEY = jax.random.key(3)
NUM_ENVS = 4
FAULT_STEP = 7
LAYOUTS = {
    "fused": choreo.fused(),
    "coarse x2": choreo.coarse(2),
    "fine x1": choreo.fine(1),
    "fine x2": choreo.fine(2),
    "three sites": choreo.Layout(choreo.Group("env", replicas=2), choreo.Group("actor"), choreo.Group("learner")),
}


@functools.cache
def cartpole(layout: str, *, unroll: int = 4, num_envs: int = NUM_ENVS) -> Plan:
    return choreo.plan(Tiny(unroll=unroll), envs.make("CartPole-v1", num_envs), LAYOUTS[layout])


@functools.cache
def naughty(layout: str) -> Plan:
    return choreo.plan(Tiny(unroll=4), envs.from_factory(naughty_factory(), NUM_ENVS), LAYOUTS[layout])


def naughty_factory():
    """Returns a class of environments. Workers cannot import this module. A class made inside a function is pickled by value."""

    class Naughty(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.unlucky = str(seed) == os.environ.get("UNLUCKY")
            self.steps = 0
            return np.zeros(3, np.float32), {}

        def step(self, action):
            self.steps += 1
            obs = np.full(3, 0.5, np.float32)
            if self.unlucky and self.steps == FAULT_STEP:
                obs = self.misbehave(obs)
            return obs, 1.0, False, False, {}

        def misbehave(self, obs):
            match os.environ["FAULT"]:
                case "raise":
                    raise ValueError("the pole fell off the table")
                case "hang":
                    while True:
                        time.sleep(0.01)
                case "hang with the GIL":
                    ctypes.PyDLL(None).sleep(600)  # does not release the GIL, so no other thread runs
                case "wrong shape":
                    return np.zeros(5, np.float32)
                case "nan":
                    return obs * np.float32("nan")
                case "wrong type":
                    return obs.astype(np.float64)
                case "exit":
                    sys.exit("enough of this")
                case "exit at once":
                    os._exit(3)
                case "segfault":
                    ctypes.string_at(0)
                case "speak":
                    print("a word from the environment", flush=True)
                    warnings.warn("an old way of doing it", stacklevel=1)
                    print(f"jax is {'' if 'jax' in sys.modules else 'not '}imported", flush=True)
                    return obs

    return Naughty


def unlucky(index: int) -> dict[str, str]:
    """The variable UNLUCKY, which gives the fault to environment number `index`. The test must set the variable FAULT itself."""
    init_key = jax.random.wrap_key_data(jnp.asarray(split_key(KEY)[0]))
    return {"UNLUCKY": str(seeds(jax.random.split(init_key, NUM_ENVS))[index])}


def play(runtime, *, after_ten: Callable[[], None] = lambda: None):
    """Run 40 iterations. Return the metrics of the first 10, those of the other 30, and the carry.

    `after_ten` is called after 10 iterations, when everything is compiled.
    """
    with contextlib.closing(runtime):
        runtime.start(KEY)
        first = runtime.run(0, 10)
        after_ten()
        return first, runtime.run(10, 40), runtime.carry()


@functools.cache
def alone(layout: str):
    """The reference: the results of the same run in this process, without faults."""
    return play(InProcess(cartpole(layout)))


def assert_same_bits(run, reference) -> None:
    jax.tree.map(np.testing.assert_array_equal, run, reference)


def leftovers(mark: str) -> set[str]:
    """Everything that a run might leave: processes with the mark, open files, named shared memory, listening ports."""
    gc.collect()
    files = {f"open file {fd}" for fd in os.listdir("/proc/self/fd")}
    memory = {f"shared memory {name}" for name in os.listdir("/dev/shm")}
    ports = {f"port {c.laddr.port}" for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    return {*marked(mark), *files, *memory, *ports}


def marked(mark: str) -> list[str]:
    """The processes that have this mark in their environment variables."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FAULTS_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:
            continue  # the process has just ended, or belongs to another user
    return found
