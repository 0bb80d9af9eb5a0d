"""`check_layout` tells equal from wrong."""

import pytest

from choreo.envs import make
from choreo.errors import PartitionError
from choreo.layouts import coarse, fused, multi_learner
from choreo.runtime.inprocess import InProcess
from choreo.testing import check_layout
from tiny import Tiny

ENV = make("jax:CartPole-v1", 4)
ALGO = Tiny(unroll=4)


def test_the_same_bits():
    assert check_layout(ALGO, ENV, fused()) == 0.0


@pytest.mark.parametrize("layout", [multi_learner(2), coarse(2, max_lag=2, merge="any")])
def test_shards_and_relaxed_layouts(layout):
    assert check_layout(ALGO, ENV, layout) < 1e-6


def test_a_wrong_plan_is_found(monkeypatch):
    run = InProcess.run

    def skip_the_last(self, first, stop):
        return run(self, first, stop - 1)

    monkeypatch.setattr(InProcess, "run", skip_the_last)
    with pytest.raises(PartitionError, match=r"`carry.*` is off by .* from jax.jit\(iterate\) after 3 iterations"):
        check_layout(ALGO, ENV, coarse(1))
