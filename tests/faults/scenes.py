"""What the tests of faults share: small plans, an environment that does whatever the test says, and traces of a run.

The environment reads what to do from the environment variables of its process, so that one plan serves every deed:

    MISDEED=segfault   UNLUCKY=<seed of the one that does it>   at its SEVENTH step
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
SEVENTH = 7
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
    """Defined within a function, so that it goes to workers by value: they cannot import the tests."""

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
            if self.unlucky and self.steps == SEVENTH:
                obs = self.misbehave(obs)
            return obs, 1.0, False, False, {}

        def misbehave(self, obs):
            match os.environ["MISDEED"]:
                case "raise":
                    raise ValueError("the pole fell off the table")
                case "hang":
                    while True:
                        time.sleep(0.01)
                case "hang, alone":
                    ctypes.PyDLL(None).sleep(600)  # keeps the interpreter to itself
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
    """The environment variables that make one environment the one."""
    init_key = jax.random.wrap_key_data(jnp.asarray(split_key(KEY)[0]))
    return {"UNLUCKY": str(seeds(jax.random.split(init_key, NUM_ENVS))[index])}


def play(runtime, *, halfway: Callable[[], None] = lambda: None):
    """All that a run of 40 iterations gives; `halfway` is called when everything has been compiled."""
    with contextlib.closing(runtime):
        runtime.start(KEY)
        first = runtime.run(0, 10)
        halfway()
        return first, runtime.run(10, 40), runtime.carry()


@functools.cache
def alone(layout: str):
    """The same run, in this process and undisturbed."""
    return play(InProcess(cartpole(layout)))


def assert_same_bits(run, reference) -> None:
    jax.tree.map(np.testing.assert_array_equal, run, reference)


def traces(mark: str) -> set[str]:
    """What a run may leave behind: processes, however distant; open files; named shared memory; ports we listen at."""
    gc.collect()
    files = {f"open file {fd}" for fd in os.listdir("/proc/self/fd")}
    memory = {f"shared memory {name}" for name in os.listdir("/dev/shm")}
    ports = {f"port {c.laddr.port}" for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    return {*marked(mark), *files, *memory, *ports}


def marked(mark: str) -> list[str]:
    """Processes that were started with this mark among their environment variables."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FAULTS_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:
            continue  # it ended while we looked, or is none of ours
    return found
