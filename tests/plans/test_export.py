"""A segment that calls Python while it runs cannot be exported; the message says what to do."""

import pickle

import jax
import pytest

from choreo.envs import make
from choreo.errors import PartitionError
from choreo.layouts import coarse
from choreo.plans.build import plan
from tiny import Tiny


class Printing(Tiny):
    def iterate(self, env, carry, key):
        jax.debug.print("one more iteration")
        return super().iterate(env, carry, key)


def test_a_segment_that_prints_cannot_be_exported():
    shown = plan(Printing(unroll=3), make("jax:CartPole-v1", 4), coarse(2))
    with pytest.raises(PartitionError) as refusal:
        pickle.dumps(shown)
    message = str(refusal.value)
    assert "of `buffer+learner` calls Python while it runs, so it cannot be sent to another process: " in message
    assert message.endswith(
        "make the call a choreo.host_fragment. Or use `--runtime inprocess`, which can run such a segment."
    )
