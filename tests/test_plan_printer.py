"""Plans as text and pictures: a change in the cut shows in the diff; bytes against what really moves."""

import pickle

import jax
import pytest

from choreo.algos.ppo import PPO
from choreo.envs import make
from choreo.layouts import Group, Layout, coarse, fine, fused
from choreo.partition.program import Transfer, walk
from choreo.plan_printer import crossings
from choreo.plans import plan
from choreo.runtime.inprocess import InProcess
from goldens import check_golden
from pictures import arrows, check_legible, texts
from tiny import Tiny

LAYOUTS = {
    "fused": fused(),
    "coarse_x1": coarse(1),
    "coarse_x2": coarse(2),
    "coarse_x2_exact": coarse(2, exact=True),
    "fine_x2": fine(2),
    "env_x2_actor_x3": Layout(Group("env", replicas=2, device="cpu"), Group("actor", replicas=3), Group("learner")),
}


@pytest.fixture(scope="module")
def plans():
    env = make("jax:CartPole-v1", 12)
    return {name: plan(PPO(unroll=16, minibatch_size=32), env, layout) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_print(plans, name):
    text = str(plans[name])
    check_golden(f"plan_{name}", text)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", LAYOUTS)
def test_picture(plans, name):
    shown = plans[name]
    svg = shown.draw()
    check_legible(svg)
    words = " ".join(texts(svg))
    assert all(fragment in words for fragment in ("act", "step_one", "learn"))
    assert all(group in words for group in shown.sites.replicas)
    transfers = [step for step, _ in walk(shown.iterate.steps) if isinstance(step, Transfer)]
    assert len(arrows(svg)) == len(transfers) == len(list(crossings(shown, shown.iterate)))


def test_promise_is_that_of_the_law(plans):
    promises = {name: str(shown).split("Promise: ")[1] for name, shown in plans.items()}
    for name in ("fused", "coarse_x1", "coarse_x2_exact"):
        assert promises[name].startswith("bit for bit"), name
    for name in ("coarse_x2", "fine_x2", "env_x2_actor_x3"):
        assert promises[name].startswith("what jax.jit(iterate) computes, up to rounding"), name


class Weighing(InProcess):
    """Adds up the bytes that arrive somewhere."""

    def __init__(self, plan):
        super().__init__(plan)
        self.arrived, hand_over = 0, self.device.reshard

        def weigh(*args):
            value = hand_over(*args)
            self.arrived += value.nbytes
            return value

        self.device.reshard = weigh


@pytest.mark.parametrize(
    "layout",
    [coarse(2), fine(2), Layout(Group("env", replicas=4), Group("actor", replicas=2), Group("learner"))],
    ids=["coarse", "fine", "three groups"],
)
def test_bytes_are_those_that_move(layout):
    shown = plan(Tiny(unroll=3), make("jax:CartPole-v1", 4), layout)
    runtime = Weighing(shown)
    runtime.start(jax.random.key(0))
    assert runtime.arrived == sum(c.nbytes * c.times for c in crossings(shown, shown.init))
    runtime.arrived = 0
    runtime.run(0, 1)
    assert runtime.arrived == sum(c.nbytes * c.times for c in crossings(shown, shown.iterate)) > 0
    runtime.close()


def test_messages_between_replicas_that_share_environments():
    """Blocks of 6 and of 4 environments: 0-5 and 6-11 against 0-3, 4-7, 8-11 touch in four places."""
    layout = LAYOUTS["env_x2_actor_x3"]
    shown = plan(Tiny(unroll=3), make("jax:CartPole-v1", 12), layout)
    counts = {(c.src, c.dst): c.num_messages for c in crossings(shown, shown.iterate)}
    assert counts["env", "actor"] == counts["actor", "env"] == 4
    assert counts["learner", "actor"] == counts["actor", "learner"] == 3


def test_pickled_plan_prints_the_same():
    shown = plan(Tiny(unroll=3), make("jax:CartPole-v1", 4), coarse(2))
    again = pickle.loads(pickle.dumps(shown))
    assert str(again) == str(shown) and again.draw() == shown.draw()
