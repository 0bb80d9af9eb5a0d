"""If one of several learners is killed, no other learner hangs. The run ends with an error that names the killed learner."""

import functools
import re
import time

import pytest

import choreo
from choreo import envs, networks
from choreo.algos import A2C
from choreo.plans.build import plan
from choreo.runtime.coordinator.supervision import WorkerError
from choreo.runtime.local import Local
from faults.test_kill import Killer, run_for_ever
from tiny import Tiny

LAYOUTS = {
    "multi_learner": (choreo.multi_learner(2), ["env+actor+buffer+learner-0", "env+actor+buffer+learner-1"]),
    "sebulba": (choreo.sebulba(2, 2, max_lag=2), ["env+actor-0", "env+actor-1", "buffer+learner-0", "buffer+learner-1"]),
    "central": (choreo.central(2, max_lag=2, merge="any"), ["env+actor+gradient-0", "env+actor+gradient-1",
                                                            "buffer+learner+update"]),
}  # fmt: skip


@functools.cache
def planned(layout: str):
    a2c = A2C(unroll=4, network=functools.partial(networks.mlp, hidden=(8,)))
    algo = a2c if layout == "central" else Tiny(unroll=4)  # `Tiny` has no separate `gradient` role
    return plan(algo, envs.make("jax:CartPole-v1", 4), LAYOUTS[layout][0])


@pytest.mark.parametrize(
    ("layout", "who"),
    [
        ("multi_learner", 1),
        pytest.param("multi_learner", 0, marks=pytest.mark.long),
        pytest.param("sebulba", 2, marks=pytest.mark.long),
        pytest.param("central", 1, marks=pytest.mark.long),
    ],
)
def test_a_killed_learner_ends_the_run(layout, who):
    names = LAYOUTS[layout][1]
    with Killer(workers=len(names), who=who, after_s=0.3) as killer:
        with pytest.raises(WorkerError) as caught:
            run_for_ever(Local(planned(layout)), killer.allowed)
        ended = time.monotonic()
    assert killer.killed_at is not None, str(caught.value)
    assert ended - killer.killed_at < 10.0
    found = re.match(r"Worker `(.*)` \(process (\d+)\) was killed by SIGKILL\.", str(caught.value))
    assert found, str(caught.value)
    assert (found[1], int(found[2])) == (names[who], killer.pid)
