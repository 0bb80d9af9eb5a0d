"""Environments whose step takes a millisecond. Without JAX: workers import this file."""

import contextlib
import os
import time
from pathlib import Path

import gymnasium
import numpy as np

STEP_S = 1e-3
"""How long a step takes."""


class Waiting(gymnasium.Env):
    """A step sleeps: like a simulator in another process, or a robot."""

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
    """A step computes: like a simulator in this process. Counted in CPU time, so that it is the same work on a busy machine."""

    def spend(self):
        until = time.thread_time() + STEP_S
        while time.thread_time() < until:
            pass


class Straggling(Waiting):
    """Those of one worker, whichever comes first to `mark`, take four times as long."""

    def __init__(self, mark: str, coordinator: int):
        if os.getpid() != coordinator:
            with contextlib.suppress(FileExistsError):
                Path(mark).symlink_to(str(os.getpid()))
        self.slow = os.path.islink(mark) and os.readlink(mark) == str(os.getpid())

    def spend(self):
        time.sleep(STEP_S * (4 if self.slow else 1))
