"""Pictures of plans show every group, fragment and transfer. No text overlaps other text."""

import pickle

import pytest

from choreo.envs import make
from choreo.layouts import coarse, per_agent
from choreo.partition.program import Transfer, walk
from choreo.plans.build import plan
from laws.test_agents import Bandits, Meeting
from pictures import arrows, check_legible, texts
from plans.planned import A2C_LAYOUTS, LAYOUTS, planned
from tiny import Tiny


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_group_fragment_and_transfer_is_in_the_picture(name):
    shown = planned(name)
    svg = shown.draw()
    check_legible(svg)
    words = " ".join(texts(svg))
    learning = ("gradient", "update") if name in A2C_LAYOUTS else ("learn",)
    assert all(fragment in words for fragment in ("act", "step_one", *learning))
    assert all(group in words for group in shown.sites.replicas)
    transfers = [step for step, _ in walk(shown.iterate.steps) if isinstance(step, Transfer)]
    assert len(arrows(svg)) == len(transfers) == len(shown.costs().iterate.crossings)


def test_the_number_of_agents_is_in_the_picture():
    svg = plan(Bandits(), Meeting(6), per_agent()).draw()
    check_legible(svg)
    assert "1 agent each" in texts(svg)


def test_all_reduce_is_named_in_the_picture():
    assert "all-reduce over 2 replicas" in " ".join(texts(planned("sebulba_x4_x2").draw()))


def test_values_that_may_be_out_of_date_have_a_dashed_arrow():
    dashed = [arrow for arrow in arrows(planned("coarse_x2_lag").draw()) if arrow.get("stroke-dasharray")]
    assert len(dashed) == 1


def test_a_pickled_plan_draws_the_same_picture():
    shown = plan(Tiny(unroll=3), make("jax:CartPole-v1", 4), coarse(2))
    assert pickle.loads(pickle.dumps(shown)).draw() == shown.draw()
