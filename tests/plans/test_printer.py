"""The text of a plan equals a golden print, so that every change of a partition shows in a diff."""

import pickle

import pytest

from choreo.envs import make
from choreo.layouts import PRESETS, coarse, fused, per_agent
from choreo.plans.build import plan
from goldens import FOLDER, check_golden
from laws.test_agents import Bandits, Meeting
from plans.planned import LAYOUTS, planned
from tiny import Tiny


def printed(name: str) -> str:
    """The golden print of a plan. `test_a_plan_prints_its_golden` checks that the plan prints this text."""
    return (FOLDER / f"plan_{name}.txt").read_text()


def test_every_preset_has_a_golden():
    # `per_agent` needs an algorithm with agents: see test_the_number_of_agents_is_printed.
    assert {layout.name for layout in LAYOUTS.values()} >= {*PRESETS} - {"per_agent"}


def test_the_number_of_agents_is_printed():
    shown = plan(Bandits(), Meeting(6), per_agent())
    assert "actor+buffer+learner: 2 replicas, 1 agent each" in str(shown)
    assert "env: 1 site, all 6 environments" in str(shown)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_prints_its_golden(name):
    text = str(planned(name))
    check_golden(f"plan_{name}", text)
    assert max(map(len, text.splitlines())) <= 100


def test_the_promise_states_the_level_of_the_law():
    promises = {name: printed(name).split("Promise: ")[1] for name in LAYOUTS}
    for name in ("fused", "coarse_x1"):
        assert promises[name].startswith("bit for bit"), name
    assert promises["coarse_x2_exact"].startswith("the same bits for any number of replicas (on CPU, exact=True)")
    for name in ("coarse_x2", "fine_x2", "env_x2_actor_x3"):
        assert promises[name].startswith("what jax.jit(iterate) computes, up to rounding"), name
    for name in ("fused_2_devices", "multi_learner_x2", "sebulba_x4_x2"):
        assert promises[name].startswith("what vmap(iterate) over 4 learner shards computes, up to rounding"), name
        assert "exact" not in promises[name]  # exact=True is refused with shards
    assert "bit for bit" not in promises["coarse_x2_lag"] + promises["a2c_a3c_x2"]
    assert promises["coarse_x2_lag"].startswith(
        "workers read values that are at most 4 updates old (max_lag=4). Results"
    )


def test_shards_of_replicas_and_all_reduce_are_printed():
    text = {name: " ".join(printed(name).split()) for name in LAYOUTS}
    assert all("12 environments, 4 learner shards" in text[name] for name in ("multi_learner_x2", "sebulba_x4_x2"))
    assert "2 replicas, 6 environments each, 2 shards each" in text["multi_learner_x2"]
    assert "learn, all-reduce over 2 replicas" in text["multi_learner_x2"]
    assert "env+actor: 4 replicas, 3 environments each, 1 shard each" in text["sebulba_x4_x2"]
    assert "buffer+learner: 2 replicas, 6 environments each, 2 shards each" in text["sebulba_x4_x2"]
    assert "1 site, all 12 environments, all 4 shards, on 2 devices, 2 shards on each" in text["fused_2_devices"]
    assert "learn, all-reduce over 2 devices" in text["fused_2_devices"]
    assert "all-reduce" not in text["central_x2"] + text["coarse_x2"]


def test_lag_is_printed():
    assert "receive from buffer+learner, up to 4 updates old" in printed("coarse_x2_lag")
    assert "updates old" not in printed("coarse_x2")
    assert "1 site, 6 environments at a time" in printed("a2c_a3c_x2")


def test_one_shard_on_several_devices_is_divided_by_the_compiler():
    shown = plan(Tiny(unroll=3), make("jax:CartPole-v1", 4), fused(devices=2, shards=1))
    assert "1 site, all 4 environments, on 2 devices, divided by the compiler" in str(shown)


def test_a_pickled_plan_prints_the_same_text():
    shown = plan(Tiny(unroll=3), make("jax:CartPole-v1", 4), coarse(2))
    again = pickle.loads(pickle.dumps(shown))
    assert str(again) == str(shown)
