"""`check_layout` tells equal from wrong."""

import functools

import pytest

from choreo import networks
from choreo.algos import A2C
from choreo.envs import make
from choreo.errors import PartitionError
from choreo.layouts import central, coarse, fused
from choreo.runtime.inprocess import InProcess
from choreo.testing import check_layout
from laws.other import Other

ENV = make("jax:CartPole-v1", 4)


def test_the_same_bits():
    assert check_layout(Other(), ENV, fused()) == 0.0


@pytest.mark.parametrize("layout", [central(2), central(2, max_lag=2, merge="any")])
def test_shards_and_relaxed_layouts(layout):
    algo = A2C(unroll=4, network=functools.partial(networks.mlp, hidden=(8,)))
    assert check_layout(algo, ENV, layout) < 1e-6


def test_a_wrong_plan_is_found(monkeypatch):
    run = InProcess.run

    def skip_the_last(self, first, stop):
        return run(self, first, stop - 1)

    monkeypatch.setattr(InProcess, "run", skip_the_last)
    with pytest.raises(PartitionError, match=r"`carry.*` is off by .* from jax.jit\(iterate\) after 3 iterations"):
        check_layout(Other(), ENV, coarse(1))
