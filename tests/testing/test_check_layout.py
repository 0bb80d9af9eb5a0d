"""`check_layout` tells equal from wrong."""

import pytest

from choreo.envs import make
from choreo.errors import PartitionError
from choreo.layouts import coarse, fused
from choreo.runtime.inprocess import InProcess
from choreo.testing import check_layout
from laws.other import Other

ENV = make("jax:CartPole-v1", 4)


def test_the_same_bits():
    assert check_layout(Other(), ENV, fused()) == 0.0


def test_a_wrong_plan_is_found(monkeypatch):
    run = InProcess.run

    def skip_the_last(self, first, stop):
        return run(self, first, stop - 1)

    monkeypatch.setattr(InProcess, "run", skip_the_last)
    with pytest.raises(PartitionError, match=r"`carry.*` is off by .* from jax.jit\(iterate\) after 3 iterations"):
        check_layout(Other(), ENV, coarse(1))
