"""`check_layout` accepts correct plans and refuses wrong ones."""

import re
from dataclasses import dataclass

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest

from choreo.envs import make
from choreo.envs.gymnasium import from_factory
from choreo.errors import PartitionError
from choreo.layouts import coarse, fused, multi_learner
from choreo.runtime.inprocess import InProcess
from choreo.testing import check_layout, layouts
from choreo.testing.layouts import Deviation, beyond, deviations
from tiny import Tiny

ENV = make("jax:CartPole-v1", 4)
ALGO = Tiny(unroll=4)


def test_a_fused_layout_gives_the_same_bits():
    assert check_layout(ALGO, ENV, fused()) == 0.0


@pytest.mark.parametrize("layout", [multi_learner(2), coarse(2, max_lag=2, merge="any")])
def test_learner_shards_and_relaxed_layouts_pass(layout):
    assert check_layout(ALGO, ENV, layout) < 1e-6


def test_a_relaxed_layout_is_also_tested_in_lockstep():
    found = deviations(ALGO, ENV, coarse(2, max_lag=2))
    assert {d.reference: d.allowed for d in found} == {"a replay of the log": 0, "jax.jit(iterate), if max_lag=0": 1e-5}
    assert all(d.is_allowed for d in found)


def test_a_plan_that_skips_an_iteration_is_refused(monkeypatch):
    run = InProcess.run

    def skip_the_last_iteration(self, first, stop):
        return run(self, first, stop - 1)

    monkeypatch.setattr(InProcess, "run", skip_the_last_iteration)
    with pytest.raises(
        PartitionError, match=r"After 3 iterations in this layout, `.*` differs by .* from jax.jit\(iterate\);"
    ):
        check_layout(ALGO, ENV, coarse(1))


def test_a_wrong_type_in_the_carry_is_refused(monkeypatch):
    carry = InProcess.carry

    def carry_with_a_wrong_type(self):
        found = carry(self)
        return found._replace(train=found.train._replace(iterations=found.train.iterations.astype(jnp.float32)))

    monkeypatch.setattr(InProcess, "carry", carry_with_a_wrong_type)
    with pytest.raises(PartitionError, match=r"`carry.train.iterations` differs by inf from jax.jit\(iterate\)"):
        check_layout(ALGO, ENV, coarse(1))


def test_wrong_metrics_are_refused(monkeypatch):
    run = InProcess.run

    def mislabelled(self, first, stop):
        metrics = run(self, first, stop)
        return metrics | {"loss": metrics["episodes"], "episodes": metrics["loss"]}

    monkeypatch.setattr(InProcess, "run", mislabelled)
    with pytest.raises(PartitionError, match=r"`metrics\['(loss|episodes)'\]` differs by .* from jax.jit\(iterate\)"):
        check_layout(ALGO, ENV, coarse(1))


@dataclass(frozen=True)
class Level:
    """A factory of environments that change with every reset, so that no environment repeats its first episode."""

    def __call__(self):
        return Harder()


class Harder(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1e3, 1e3, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    level = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level += 1
        return np.full(2, self.level, np.float32), {}

    def step(self, action):
        return np.full(2, self.level, np.float32), float(self.level), True, False, {}


def test_new_python_environments_are_made_for_the_reference():
    env = from_factory(Level(), 4)
    assert check_layout(ALGO, env, coarse(2)) < 1e-5
    # The second check would fail if it used the environments of the first check.
    assert check_layout(ALGO, env, coarse(2)) < 1e-5


@pytest.mark.parametrize(
    ("difference", "env", "fix"),
    [
        (1e-8, ENV, "rounded a last bit differently .*--tolerance 1e-06"),
        (1e-3, ENV, "Please report this program"),
        (1e-3, make("CartPole-v1", 2), "whether `CartPole-v1` repeats its steps"),
    ],
)
def test_the_proposed_fix_fits_the_difference_and_the_environment(difference, env, fix):
    worst = Deviation(name="carry.x", difference=difference, allowed=0.0, reference="jax.jit(iterate)")
    assert re.search(fix, str(beyond(worst, env, 3)))


def test_differences_are_relative_for_floats_and_absolute_for_integers():
    nan = float("nan")
    for a, b, difference in [([nan, 1.0], [nan, 1.0], 0), ([nan], [1.0], float("inf")), ([1e3], [1e3 + 1], 1 / 1001),
                             ([7], [8], 1), ([2**31], [2**31 + 1], 1), ([True], [False], 1), ([], [], 0)]:  # fmt: skip
        assert layouts._difference(np.array(a), np.array(b)) == pytest.approx(difference)
    assert layouts._difference(np.zeros(2), np.zeros(3)) == float("inf")
