"""Replicas divide the work: each of N workers computes about 1/N of the FLOPs of a single worker.

The results of a plan can be right although every replica computes everything. So the tests ask XLA for the FLOPs of the compiled
segments of one worker. A test fails if the worker needs over 10% more FLOPs than its share.
"""

import functools

import jax
import numpy as np
import pytest

from choreo import networks
from choreo.algos.ppo import PPO
from choreo.envs import make
from choreo.layouts import Layout, coarse
from choreo.partition.program import Segment, walk
from choreo.partition.trace import trace
from choreo.plans.build import plan_traced

NUM_ENVS = 16
SLACK = 1.1
"""A worker is allowed to do 10% more than its share, because every replica does a little work for all environments, for example
`jax.random.split`."""
WORKERS = "env+actor"


@functools.cache
def traced():
    algo = PPO(network=functools.partial(networks.mlp, hidden=(64, 64)), unroll=16, minibatch_size=64)
    return trace(algo, make("jax:CartPole-v1", NUM_ENVS))


@functools.cache
def flops(layout: Layout) -> float:
    """FLOPs of one worker in one iteration."""
    planned = plan_traced(traced(), layout, title="work")
    found = [(s, times) for s, times in walk(planned.iterate.steps) if isinstance(s, Segment) and s.group == WORKERS]
    assert found
    return sum(times * _flops(segment) for segment, times in found)


def _flops(segment: Segment) -> float:
    scalar = jax.ShapeDtypeStruct((), np.int32)
    avals = [jax.ShapeDtypeStruct(given.aval.shape, given.aval.dtype) for given in segment.ins]
    cost = jax.jit(segment.fn).lower(scalar, scalar, *avals).compile().cost_analysis()
    return cost["flops"]


def test_the_flops_include_the_network():
    """For 16 environments, one call of a network with two layers of 64 units takes about 143,000 FLOPs. If the count were smaller,
    XLA would not have counted the network."""
    assert flops(coarse(1)) > NUM_ENVS * 2 * (4 * 64 + 64 * 64 + 64 * 2)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_worker_does_its_share_and_no_more(workers):
    share = flops(coarse(workers)) / flops(coarse(1))
    assert share <= SLACK / workers
