"""After `kill -9` of any worker at any moment, the run ends within seconds with an error that names the worker, and leaves nothing
behind."""

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import threading
import time

import gymnasium
import numpy as np
import psutil
import pytest

import choreo
from choreo import envs
from choreo.runtime.coordinator.supervision import WorkerError
from choreo.runtime.local import Local
from faults.scenes import KEY, LAYOUTS, cartpole
from tiny import Tiny

SCENES = [("coarse x2", "shm"), ("fine x2", "shm"), ("three sites", "shm"), ("fine x2", "tcp"), ("coarse x2", "tcp")]
NAMES = {
    "coarse x2": ["env+actor-0", "env+actor-1", "buffer+learner"],
    "fine x2": ["env-0", "env-1", "actor+buffer+learner"],
    "three sites": ["env-0", "env-1", "actor", "learner"],
}


CI = range(5, 10)
"""The seeds that CI runs. They use each scene once, and three of these seeds kill a worker while the run starts.
`test_learners.py` kills learners that use collectives."""


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in CI else [pytest.mark.long]) for seed in range(20)]
)
def test_a_killed_worker_ends_the_run(seed):
    (layout, carrier), rng = SCENES[seed % len(SCENES)], random.Random(seed)
    plan, who = cartpole(layout), rng.randrange(len(NAMES[layout]))
    starting = seed % 2  # odd seeds kill during the start (1 to 2 s), even seeds during iterations (milliseconds each)
    with Killer(workers=len(NAMES[layout]), who=who, after_s=rng.uniform(0.0, 1.5 if starting else 0.2)) as killer:
        if starting:
            killer.allowed.set()
        with pytest.raises(WorkerError) as caught:
            run_for_ever(Local(plan, carrier=carrier), killer.allowed)
        ended = time.monotonic()
    assert killer.killed_at is not None, str(caught.value)
    assert ended - killer.killed_at < 5.0
    found = re.match(r"Worker `(.*)` \(process (\d+)\) was killed by SIGKILL\.", str(caught.value))
    assert found, str(caught.value)
    assert found[1] == NAMES[layout][who]
    assert int(found[2]) == killer.pid
    assert "out of memory" in str(caught.value)


def run_for_ever(local, running: threading.Event):
    with contextlib.closing(local):
        local.start(KEY)
        for i in itertools.count():
            local.run(10 * i, 10 * i + 10)
            running.set()


class Killer:
    """Kills one worker, `after_s` seconds after `allowed` is set. `who` is the index of the worker in the order of process ids."""

    def __init__(self, *, workers: int, who: int, after_s: float):
        self.workers, self.who, self.after_s = workers, who, after_s
        self.allowed = threading.Event()
        self.pid: int | None = None
        self.killed_at: float | None = None
        self.thread = threading.Thread(target=self._kill)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.thread.join()

    def _kill(self):
        deadline = time.monotonic() + 60.0
        while len(pids := our_workers()) < self.workers and time.monotonic() < deadline:
            time.sleep(0.01)
        self.allowed.wait(60.0)
        time.sleep(self.after_s)
        self.pid = pids[self.who]
        os.kill(self.pid, signal.SIGKILL)
        self.killed_at = time.monotonic()


def our_workers() -> list[int]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "choreo.runtime.worker" in child.cmdline():
                found.append(child.pid)
    return sorted(found)


def parents_factory():
    class Parent(gymnasium.Env):
        """Starts two processes: a program, and a fork of the worker. The fork inherits all sockets of the worker."""

        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            # The coordinator makes an environment too, to read the spaces. The test sets CHILDREN only after that.
            if "CHILDREN" in os.environ:
                self.program = subprocess.Popen(["sleep", "600"])
                if os.fork() == 0:
                    time.sleep(600)
                print("children are there", flush=True)
            return np.zeros(3, np.float32), {}

        def step(self, action):
            return np.zeros(3, np.float32), 0.0, False, False, {}

    return Parent


def test_processes_that_an_environment_started_end_with_its_worker(monkeypatch):
    said = []
    plan = choreo.plan(Tiny(unroll=4), envs.from_factory(parents_factory(), 1), LAYOUTS["fine x1"])
    monkeypatch.setenv("CHILDREN", "yes")
    with contextlib.closing(Local(plan, on_output=lambda *words: said.append(words))) as local:
        local.start(KEY)
        assert ("env-0", "children are there") in said
        os.kill(local.pool.handles["env-0"].process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"`env-0` .* was killed by SIGKILL\."):
            local.run(0, 10)
