"""The profile names the worker that others wait for: a slow learner, a worker with slow environments, or a straggler."""

import contextlib
import dataclasses
import os
import re
import time
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest

import choreo
from choreo import envs
from choreo.layouts import Layout, coarse, fine
from choreo.plans.build import plan
from choreo.runtime.engine.profile import Profile
from choreo.runtime.local import Local
from tiny import Tiny

LOCKSTEP, LATE, ANY = coarse(2), coarse(2, max_lag=2), coarse(2, max_lag=4, merge="any")
"""The layouts of the long tests. CI uses layouts that start faster: one worker, or workers that only step environments."""


def slow_factory(seconds: float, mark: str = ""):
    """A class of environments that sleep in each step. With a path `mark`, only the environments of one worker
    sleep: the worker that is the first to create a link at this path."""
    coordinator = os.getpid()

    class Slow(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self):
            self.seconds = seconds
            if mark and os.getpid() != coordinator:
                with contextlib.suppress(FileExistsError):  # another worker was first
                    Path(mark).symlink_to(str(os.getpid()))
                self.seconds = seconds if os.readlink(mark) == str(os.getpid()) else 0.0

        def reset(self, *, seed=None, options=None):
            return np.zeros(4, np.float32), {}

        def step(self, action):
            time.sleep(self.seconds)
            return np.zeros(4, np.float32), 1.0, False, False, {}

    return Slow


def nap(iterations):
    time.sleep(0.05)
    return iterations


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowTiny(Tiny):
    """`Tiny` with a learner that sleeps."""

    def iterate(self, env, carry, key):
        carry, metrics = super().iterate(env, carry, key)
        sleep = choreo.host_fragment("learner", nap, jax.ShapeDtypeStruct((), np.int32))
        return carry._replace(train=carry.train._replace(iterations=sleep(carry.train.iterations))), metrics


def profiled(algo, factory, layout: Layout) -> Profile:
    runtime = Local(plan(algo, envs.from_factory(factory, 4), layout), profile=True)
    try:
        runtime.start(jax.random.key(0))
        runtime.run(0, 60)
        return runtime.profile()
    finally:
        runtime.close()


@pytest.mark.parametrize("layout", [fine(1), pytest.param(ANY, marks=pytest.mark.long)], ids=["fine", "any"])
def test_the_verdict_names_slow_environments(layout):
    verdict = profiled(Tiny(unroll=4), slow_factory(0.01), layout).verdict
    workers, learner = (re.escape(group.name) for group in layout.groups)
    assert re.fullmatch(
        rf"`{learner}` waits \d+% of its time for `{workers}-\d`, which spends \d+% of its time in env\.", verdict
    ), verdict


@pytest.mark.parametrize(
    "layout", [coarse(1, max_lag=2), pytest.param(LATE, marks=pytest.mark.long)], ids=["one", "two"]
)
def test_the_verdict_names_a_slow_learner(layout):
    verdict = profiled(SlowTiny(unroll=4), slow_factory(0.0), layout).verdict
    assert re.match(r"`env\+actor-\d` waits \d+% of its time for `buffer\+learner`, which spends", verdict), verdict


@pytest.mark.parametrize("layout", [fine(2), pytest.param(LOCKSTEP, marks=pytest.mark.long)], ids=["fine", "coarse"])
def test_the_verdict_names_a_straggler(layout, tmp_path):
    """In lockstep the fast worker waits for the learner, which waits for the slow worker."""
    profile = profiled(Tiny(unroll=4), slow_factory(0.02, str(tmp_path / "mark")), layout)
    workers = [f"{layout.groups[0].name}-{i}" for i in range(2)]
    slow = max(workers, key=lambda worker: profile.shares(worker)["env"])
    assert profile.verdict.rpartition("for ")[2].startswith(f"`{slow}`, which spends"), profile.verdict


def test_the_verdict_follows_a_chain_of_waiting_workers():
    def record(*totals):
        return {"seconds": 10.0, "totals": [list(t) for t in totals], "spans": []}

    profile = Profile({
        "fast": record(("env", "step", 1.0), ("wait", "learner", 9.0)),
        "slow": record(("env", "step", 9.0), ("wait", "learner", 0.5)),
        "learner": record(("learn", "learn", 1.0), ("wait", "slow", 8.0), ("wait", "fast", 0.1)),
    })  # fmt: skip
    assert profile.verdict == (
        "`fast` waits 90% of its time for `learner`, which waits 80% of its time for `slow`, which spends 90% of its time "
        "in env."
    )
