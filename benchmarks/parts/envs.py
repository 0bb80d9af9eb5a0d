"""Environments whose steps take a millisecond, or longer. Workers import this file, so it does not import JAX."""

import contextlib
import os
import time
from pathlib import Path

import gymnasium
import numpy as np

STEP_S = 1e-3
"""How long a step takes, in seconds."""


class Waiting(gymnasium.Env):
    """A step sleeps, as if it waited for a robot or for a simulator in a different process."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._look(), {}

    def step(self, action):
        self.spend()
        self.steps += 1
        return self._look(), float(action), False, self.steps == 100, {}

    def spend(self):
        time.sleep(STEP_S)

    def _look(self):
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)


class Computing(Waiting):
    """A step computes, like a simulator in this process.

    A step takes 1 ms of CPU time, not of wall time, so that a step does the same work on a busy machine as on an idle one.
    """

    def spend(self):
        until = time.thread_time() + STEP_S
        while time.thread_time() < until:
            pass


class Straggling(Waiting):
    """Steps take four times as long in one of the workers: in the worker that creates the symbolic link `mark` before the others.

    `coordinator` is the process id of the coordinator. The coordinator also makes an environment, but does not create the link.
    """

    def __init__(self, mark: str, coordinator: int):
        if os.getpid() != coordinator:
            with contextlib.suppress(FileExistsError):
                Path(mark).symlink_to(str(os.getpid()))
        self.slow = os.path.islink(mark) and os.readlink(mark) == str(os.getpid())

    def spend(self):
        time.sleep(STEP_S * (4 if self.slow else 1))
