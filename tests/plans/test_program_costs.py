"""The costs that a plan states are right.

The number of bytes is compared with the bytes that sites receive in a run, and the number of messages with the messages that
worker processes would send. The size of the largest matrix product is compared with a count by hand.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import choreo
from choreo.envs import make
from choreo.layouts import Group, Layout, coarse, fine
from choreo.partition.code import SegmentCode
from choreo.partition.program import Segment, Transfer, walk
from choreo.plans.build import plan
from choreo.plans.flops import count_flops
from choreo.plans.program_costs import segment_jaxpr
from choreo.runtime.engine.messages import Topology, messages
from choreo.runtime.inprocess import InProcess
from plans.planned import LAYOUTS, planned
from tiny import Tiny


class Weighing(InProcess):
    """A runtime that adds up the bytes that sites receive."""

    def __init__(self, plan):
        super().__init__(plan)
        self.received, reshard = 0, self.backend.reshard

        def weigh(parts, move, receiver, receivers, transfer):
            value = reshard(parts, move, receiver, receivers, transfer)
            self.received += value.nbytes
            return value

        self.backend.reshard = weigh


@pytest.mark.parametrize(
    "layout",
    [
        coarse(2),
        fine(2),
        Layout(Group("env", replicas=4), Group("actor", replicas=2), Group("learner")),
        coarse(2, shards=2),
    ],
    ids=["coarse", "fine", "three groups", "shards"],
)
def test_bytes_are_those_that_sites_receive(layout):
    shown = plan(Tiny(unroll=3), make("jax:CartPole-v1", 4), layout)
    runtime = Weighing(shown)
    runtime.start(jax.random.key(0))
    assert runtime.received == shown.costs().init.nbytes
    runtime.received = 0
    runtime.run(0, 1)
    assert runtime.received == shown.costs().iterate.nbytes > 0
    runtime.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_printed_and_counted_is_what_the_interpreter_evaluates(name):
    """A segment has copies of some facts about its code, because workers do not get the code. The print and the costs read these
    copies, so the copies must agree with the code."""
    shown = planned(name)
    costs = iter(shown.costs().iterate.steps)
    for step, _ in walk(shown.iterate.steps):
        if isinstance(step, Segment):
            code = step.fn
            assert isinstance(code, SegmentCode)
            repeated = (step.name, step.roles, step.out_axes, step.out_avals, step.combines)
            assert repeated == (code.name, code.roles, code.out_axes, code.out_avals, code.combines)
            jaxpr = segment_jaxpr(step, shown.replicas(step.group))
            assert [v.aval.shape for v in jaxpr.outvars] == [aval.shape for aval in code.out_avals]
            cost = next(costs)
            assert (cost.name, cost.roles) == (code.name, code.roles)
            assert cost.flops == count_flops(jaxpr).times(cost.blocks).number


def test_equations_that_no_result_needs_are_not_counted():
    """XLA removes such equations, so they cost nothing."""

    class Wasteful(Tiny):
        @choreo.fragment("learner")
        def learn(self, train, trajectory):
            jnp.ones((500, 500)) @ jnp.ones((500, 500))
            return train, {}

    costs = plan(Wasteful(unroll=3), make("jax:CartPole-v1", 4), coarse(2)).costs()
    (learn,) = (step for step in costs.iterate.steps if "learn" in step.name or step.group == "buffer+learner")
    assert learn.flops is not None and learn.flops < 1000


def test_asking_for_costs_starts_no_backend_of_jax():
    """The number of XLA's threads is chosen from the costs. XLA reads this number when its backend starts, so Choreo must know the
    costs before then."""
    code = (
        "import choreo; from choreo import _compat\n"
        "shown = choreo.plan(choreo.PPO(), 'jax:CartPole-v1', choreo.coarse(workers=2))\n"
        "shown.costs(); print(shown.costs().largest_product, _compat.clients_exist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [str(128 * 8 * 64 * 64), "False"]


def test_a_replica_sends_only_to_replicas_that_need_some_of_its_environments():
    """The env replicas hold the environments 0-5 and 6-11, and the actor replicas hold 0-3, 4-7 and 8-11: four pairs overlap."""
    layout = LAYOUTS["env_x2_actor_x3"]
    shown = plan(Tiny(unroll=3), make("jax:CartPole-v1", 12), layout)
    counts = {(c.src, c.dst): c.num_messages for c in shown.costs().iterate.crossings}
    assert counts["env", "actor"] == counts["actor", "env"] == 4
    assert counts["learner", "actor"] == counts["actor", "learner"] == 3


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if not layout.exact])
def test_messages_are_those_of_worker_processes(name):
    shown = planned(name)
    # With merge="any" (`num_workers` > 1), the program has the steps of the learner and of only one worker. So each group has one
    # site here, and the counts are multiplied by the number of workers below.
    one_worker = {(group, 0): group for group in shown.sites.replicas}
    process_of_site = one_worker if shown.num_workers > 1 else {site: f"{site}" for site in shown.all_sites}
    topology = Topology(me="", process_of_site=process_of_site)
    transfers = [step for step, _ in walk(shown.iterate.steps) if isinstance(step, Transfer)]
    counts = [len(messages(step, topology)) * shown.num_workers for step in transfers]
    assert counts == [c.num_messages for c in shown.costs().iterate.crossings]
