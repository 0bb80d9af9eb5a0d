"""Levels 1 and 3 of the law (docs/law.md) for replay buffers at separate sites.

Floats agree with the reference, `jax.jit(iterate)`, up to 1e-5 after three or five iterations. From the third iteration on, new
steps overwrite the oldest steps. Worker processes give the same bits as one process. A resumed run gives the same bits as an
uninterrupted run.
"""

import functools

import jax
import numpy as np
import pytest

import choreo
from choreo import envs
from choreo.algos import DQN
from choreo.layouts import Group, Layout, apex
from choreo.networks import q_mlp
from choreo.plans.build import plan
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from laws.reference import assert_close, assert_same_bits, reference_run, run_of

KEY = jax.random.key(3)
CARTPOLE = envs.make("jax:CartPole-v1", 8)
SMALL = functools.partial(
    DQN,
    unroll=4,
    updates_per_step=2 / 32,
    batch_size=8,
    capacity=64,
    min_size=32,
    network=functools.partial(q_mlp, hidden=(8,)),
)
"""A small DQN. Its buffer holds eight steps of each environment, so that the third iteration overwrites the steps of the first."""
OWN_SITE = Layout(Group("env", "actor", replicas=2), Group("buffer"), Group("learner"))


@functools.cache
def reference(algo: DQN):
    return reference_run(algo, CARTPOLE, KEY, iterations=5)


@pytest.mark.long  # `make test` need not run this: a test below has one buffer site, and test_matrix.py has two
@pytest.mark.parametrize("algo", [SMALL(), SMALL(head="c51", prioritized=True)], ids=["uniform", "prioritized c51"])
def test_a_buffer_at_its_own_site_gives_the_reference_result(algo):
    assert_close(run_of(InProcess(plan(algo, CARTPOLE, OWN_SITE)), KEY, iterations=5), reference(algo), 1e-5)


@pytest.mark.parametrize(("workers", "buffers"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.long)])
def test_buffer_shards_at_several_sites_give_the_reference_result(workers, buffers):
    algo = SMALL(prioritized=True, buffer_shards=4)
    the_plan = plan(algo, CARTPOLE, apex(workers, buffers))
    assert_close(run_of(InProcess(the_plan), KEY, iterations=5), reference(algo), 1e-5)


def test_workers_with_python_environments_give_the_same_bits_as_one_process():
    """This test has one worker and one buffer site; test_matrix.py has two of each."""
    env = envs.make("CartPole-v1", 8)
    algo = SMALL(prioritized=True, buffer_shards=2)
    the_plan = plan(algo, env, apex(1, 1))
    run = run_of(Local(the_plan), KEY)
    assert_same_bits(run, run_of(InProcess(the_plan), KEY))
    assert_close(run, reference_run(algo, env, KEY), 1e-5)


def test_a_resumed_run_continues_with_the_buffer_of_the_checkpoint(tmp_path):
    """A resumed run draws the same samples as an uninterrupted run: the rows after the checkpoint are equal."""
    algo = SMALL(prioritized=True, total_steps=320)
    train = functools.partial(
        choreo.train, algo, "jax:CartPole-v1", num_envs=8, seed=1, checkpoint_every=5, progress=False
    )
    uninterrupted = train(steps=320)
    train(steps=160, out=tmp_path / "run")
    resumed = choreo.resume(tmp_path / "run", steps=320, progress=False)
    for name in ("loss", "td_error", "replay_size", "samples_per_insert"):
        np.testing.assert_array_equal(
            [row[name] for row in resumed.rows[-5:]], [row[name] for row in uninterrupted.rows[-5:]]
        )
