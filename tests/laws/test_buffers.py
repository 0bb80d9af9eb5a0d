"""Replay wherever a layout puts it: on a site of its own, over as many sites as there are shards, with Python environments."""

import functools

import jax
import numpy as np
import pytest

import choreo
from choreo import envs
from choreo.algos import DQN
from choreo.layouts import Group, Layout, apex
from choreo.networks.q import q_mlp
from choreo.plans.build import plan
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from laws.reference import assert_close, assert_same_bits, reference_run, run_of

KEY = jax.random.key(3)
CARTPOLE = envs.make("jax:CartPole-v1", 8)
SMALL = functools.partial(
    DQN, unroll=4, updates=2, batch_size=8, capacity=64, min_size=32, network=functools.partial(q_mlp, hidden=(8,))
)
"""Eight steps of each environment: after two iterations they are overwritten."""
OWN_SITE = Layout(Group("env", "actor", replicas=2), Group("buffer"), Group("learner"))


@functools.cache
def reference(algo: DQN):
    return reference_run(algo, CARTPOLE, KEY, iterations=5)


@pytest.mark.long  # in CI with Python environments, below, and on two sites in the matrix
@pytest.mark.parametrize("algo", [SMALL(), SMALL(head="c51", prioritized=True)], ids=["uniform", "prioritized c51"])
def test_on_a_site_of_its_own(algo):
    assert_close(run_of(InProcess(plan(algo, CARTPOLE, OWN_SITE)), KEY, iterations=5), reference(algo), 1e-5)


@pytest.mark.parametrize(("workers", "buffers"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.long)])
def test_over_sites_that_share_its_shards(workers, buffers):
    algo = SMALL(prioritized=True, buffer_shards=4)
    the_plan = plan(algo, CARTPOLE, apex(workers, buffers))
    assert_close(run_of(InProcess(the_plan), KEY, iterations=5), reference(algo), 1e-5)


def test_with_workers_and_python_environments():
    """One of each; several of each are in the matrix."""
    env = envs.make("CartPole-v1", 8)
    algo = SMALL(prioritized=True, buffer_shards=2)
    the_plan = plan(algo, env, apex(1, 1))
    run = run_of(Local(the_plan), KEY)
    assert_same_bits(run, run_of(InProcess(the_plan), KEY))
    assert_close(run, reference_run(algo, env, KEY), 1e-5)


def test_what_is_stored_is_part_of_a_checkpoint(tmp_path):
    """A run that is resumed draws what the other one draws: every number of the rest of it is the same."""
    algo = SMALL(prioritized=True, total_steps=320)
    train = functools.partial(
        choreo.train, algo, "jax:CartPole-v1", num_envs=8, seed=1, checkpoint_every=5, progress=False
    )
    whole = train(steps=320)
    train(steps=160, out=tmp_path / "run")
    rest = choreo.resume(tmp_path / "run", steps=320, progress=False)
    for name in ("loss", "td_error", "replay_size", "samples_per_insert"):
        np.testing.assert_array_equal([row[name] for row in rest.rows[-5:]], [row[name] for row in whole.rows[-5:]])
