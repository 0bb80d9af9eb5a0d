"""Level 1 of the law (docs/law.md): the same plan gives the same bits in one process and in worker processes.

The workers exchange messages over shared memory or over TCP, on one host or on two.
"""

import functools

import jax
import numpy as np
import pytest

from choreo import networks
from choreo.algos.dqn import DQN
from choreo.algos.ppo import PPO
from choreo.envs import make
from choreo.errors import UnknownNameError
from choreo.layouts import Group, Layout, apex, coarse, fine, fused, sebulba
from choreo.plans.build import plan, plan_traced, trace_for
from choreo.runtime.engine import assemble
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from hosts import two_hosts as two_hosts  # a fixture
from laws.reference import assert_same_bits, run_of
from tiny import Tiny

KEY = jax.random.key(3)
NUM_ENVS = 8
ALGO = PPO(
    unroll=4, epochs=2, minibatch_size=16, total_steps=320, network=functools.partial(networks.mlp, hidden=(16,))
)
THREE_SITES = {
    "jax": Layout(Group("env", replicas=2), Group("actor"), Group("learner")),
    "gymnasium": Layout(Group("env", replicas=4), Group("actor", replicas=2), Group("learner")),
}
"""A layout with three groups, for each kind of environment. Workers that only step Python environments start fast, because they do
not import JAX. So the layout for Python environments has more sites, and blocks of two different sizes."""
LAYOUTS = {
    "fused": fused(),
    "coarse x1": coarse(1),
    "coarse x2": coarse(2),
    "coarse x4": coarse(4),
    "fine x1": fine(1),
    "fine x2": fine(2),
}
ENVS = {"jax": "jax:CartPole-v1", "gymnasium": "CartPole-v1"}
CELLS = [(env, name, layout) for env in ENVS for name, layout in (LAYOUTS | {"three sites": THREE_SITES[env]}).items()]
CI = {("gymnasium", "fused"), ("gymnasium", "fine x1"), ("gymnasium", "three sites")}
"""The cells that `make test` runs over shared memory. The tests over TCP run more layouts, and `test_matrix.py` runs JAX
environments over shared memory."""
OPTIMISED = ("jax", "coarse x1")


@functools.cache
def traced(env: str):
    return trace_for(ALGO, make(ENVS[env], NUM_ENVS), fused())


@functools.cache
def planned(env: str, layout: Layout):
    return plan_traced(traced(env), layout, title=env)


@functools.cache
def in_one_process(env: str, layout: Layout):
    """The result in one process."""
    return run_of(InProcess(planned(env, layout)), KEY)


def marks(env: str, name: str):
    if (env, name) == OPTIMISED:
        return [pytest.mark.optimised]
    return [] if (env, name) in CI else [pytest.mark.long]


@pytest.mark.parametrize(
    ("env", "layout"),
    [pytest.param(env, layout, id=f"{env}-{name}", marks=marks(env, name)) for env, name, layout in CELLS],
)
def test_workers_over_shared_memory_give_the_same_bits(env, layout):
    assert_same_bits(run_of(Local(planned(env, layout)), KEY), in_one_process(env, layout))


@pytest.mark.parametrize(
    ("env", "layout"),
    [
        pytest.param("jax", coarse(2), id="jax-coarse x2"),
        pytest.param("gymnasium", fine(2), id="gymnasium-fine x2"),
        pytest.param("gymnasium", THREE_SITES["gymnasium"], id="gymnasium-three sites", marks=pytest.mark.long),
    ],
)
def test_workers_over_tcp_give_the_same_bits(env, layout):
    """All workers are on one host; `TestTwoHosts` has two hosts."""
    assert_same_bits(run_of(Local(planned(env, layout), carrier="tcp"), KEY), in_one_process(env, layout))


@pytest.mark.long  # `make test` runs exact blocks in one process, in test_layouts.py
def test_workers_in_exact_blocks_give_the_same_bits():
    """With `exact=True`, the size of a block does not depend on the number of workers. So four workers give the bits of two."""
    run = run_of(Local(planned("jax", coarse(4, exact=True))), KEY)
    assert_same_bits(run, in_one_process("jax", coarse(4, exact=True)))
    assert_same_bits(run, in_one_process("jax", coarse(2, exact=True)))


def test_a_runtime_continues_from_the_carry_of_another():
    here, there = InProcess(planned("jax", coarse(2))), Local(planned("jax", coarse(2)))
    try:
        here.start(KEY)
        here.run(0, 1)
        there.restore(here.carry(), KEY)
        there.run(1, 2)
        here.restore(there.carry(), KEY)
        here.run(2, 3)
        there.run(2, 3)
        for one, other in zip(*(jax.tree.leaves(r.carry().train) for r in (here, there)), strict=True):
            assert one.tobytes() == other.tobytes()
    finally:
        here.close()
        there.close()


def planned_replay(layout: Layout):
    """A plan whose replay is divided among two sites."""
    algo = DQN(
        unroll=4,
        batch_size=8,
        min_size=8,
        capacity=64,
        buffer_shards=2,
        network=functools.partial(networks.q_mlp, hidden=(16,)),
    )
    return plan(algo, make(ENVS["jax"], NUM_ENVS), layout)


@pytest.mark.parametrize(
    ("runtime", "extent_bytes"), [(InProcess, 20), (InProcess, 2**22), (Local, 2**22)], ids=["20 B", "4 MiB", "workers"]
)
@pytest.mark.parametrize(
    "make_plan",
    [
        pytest.param(lambda: planned("gymnasium", fine(2)), id="gymnasium-fine x2"),
        pytest.param(lambda: plan(ALGO, make(ENVS["jax"], NUM_ENVS), sebulba(2, 1, shards=2)), id="jax-two shards"),
        pytest.param(lambda: planned_replay(apex(2, buffers=2)), id="jax-apex x2 x2"),
        pytest.param(
            lambda: plan(Tiny(), make(ENVS["jax"], NUM_ENVS), coarse(2, max_lag=1, merge="any")), id="jax-any x2"
        ),
    ],
)
def test_a_part_and_a_stream_of_the_carry_equal_the_whole_carry(make_plan, runtime, extent_bytes, monkeypatch):
    running = runtime(make_plan())
    try:
        running.start(KEY)
        running.run(0, 2)
        whole = running.carry()
        for name in whole._fields:
            part, expected = running.carry(part=name), getattr(whole, name)
            assert jax.tree.structure(part) == jax.tree.structure(expected)
            assert [as_bytes(leaf) for leaf in jax.tree.leaves(part)] == [
                as_bytes(leaf) for leaf in jax.tree.leaves(expected)
            ]
        expected = [as_bytes(leaf)[-1] for leaf in jax.tree.leaves(whole)]
        backwards = range(len(expected) - 1, -1, -1)
        monkeypatch.setattr(assemble, "EXTENT_BYTES", extent_bytes)
        streamed = list(running.stream(backwards))
        assert b"".join(each.tobytes() for each in streamed) == b"".join(expected[i] for i in backwards)
        assert extent_bytes > 100 or max(each.nbytes for each in streamed) <= extent_bytes
        with pytest.raises(UnknownNameError, match="There is no part of the carry `trian`.\nDid you mean `train`?"):
            running.carry(part="trian")
        running.run(2, 3)  # the error and the reading have not disturbed the run
    finally:
        running.close()


def as_bytes(leaf):
    leaf = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return leaf.dtype.name, leaf.shape, np.asarray(leaf).tobytes()


class TestTwoHosts:
    """The second host is an agent in a network namespace. On a machine without namespaces, both hosts use 127.0.0.1."""

    @pytest.mark.parametrize(
        ("env", "layout"),
        [
            pytest.param("jax", fine(2), id="fine", marks=pytest.mark.long),
            pytest.param("gymnasium", coarse(2), id="coarse"),
        ],
    )
    def test_workers_on_two_hosts_give_the_same_bits(self, env, layout, two_hosts):
        assert_same_bits(run_of(Local(planned(env, layout), cluster=two_hosts), KEY), in_one_process(env, layout))
