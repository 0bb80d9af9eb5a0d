"""Plans as text and pictures: a change in the cut shows in the diff; bytes against what really moves."""

import functools
import pickle

import jax
import pytest

from choreo.algos import A2C, DQN, PPO
from choreo.envs import make
from choreo.layouts import (
    ALIASES,
    PRESETS,
    Group,
    Layout,
    apex,
    central,
    coarse,
    fine,
    fused,
    multi_learner,
    per_agent,
    sebulba,
)
from choreo.partition.program import Transfer, walk
from choreo.plans.plan import Plan, plan, plan_traced, trace_for
from choreo.plans.printer import crossings
from choreo.runtime.engine.messages import Topology, messages
from choreo.runtime.inprocess import InProcess
from goldens import FOLDER, check_golden
from laws.test_agents import Bandits, Meeting
from pictures import arrows, check_legible, texts
from tiny import Tiny

PPO_LAYOUTS = {
    "fused": fused(),
    "fused_2_devices": fused(devices=2, shards=4),
    "coarse_x1": coarse(1),
    "coarse_x2": coarse(2),
    "coarse_x2_exact": coarse(2, exact=True),
    "fine_x2": fine(2),
    "env_x2_actor_x3": Layout(Group("env", replicas=2, device="cpu"), Group("actor", replicas=3), Group("learner")),
    "coarse_x2_lag": coarse(2, max_lag=4),
    "multi_learner_x2": multi_learner(2, shards=4),
    "sebulba_x4_x2": sebulba(4, 2),
    "central_x2": central(2),
}
A2C_LAYOUTS = {"a2c_central_x2": central(2), "a2c_a3c_x2": ALIASES["a3c"](2)}
DQN_LAYOUTS = {"dqn_apex_x4_x2": apex(4, 2)}
LAYOUTS = PPO_LAYOUTS | A2C_LAYOUTS | DQN_LAYOUTS


ENV = make("jax:CartPole-v1", 12)


@functools.cache
def planned(name: str) -> Plan:
    """Made where it is looked at first."""
    algo, layout = algorithm(name), LAYOUTS[name]
    return plan_traced(
        traced(algo, layout.shards, layout.num_workers), layout, title=f"{type(algo).__name__} on {ENV.name}"
    )


def algorithm(name: str):
    if name in DQN_LAYOUTS:
        return DQN(prioritized=True, buffer_shards=2)
    return A2C(unroll=16) if name in A2C_LAYOUTS else PPO(unroll=16, minibatch_size=24)


@functools.cache
def traced(algo, shards: int, num_workers: int):
    """Of each algorithm only one trace for so many shards."""
    layouts = [layout for name, layout in LAYOUTS.items() if algorithm(name) == algo]
    return trace_for(
        algo, ENV, next(each for each in layouts if (each.shards, each.num_workers) == (shards, num_workers))
    )


def printed(name: str) -> str:
    """What `test_print` compares with."""
    return (FOLDER / f"plan_{name}.txt").read_text()


def test_every_preset_is_here():
    """But one: none of these has agents."""
    assert {layout.name for layout in LAYOUTS.values()} >= {*PRESETS} - {"per_agent"}


def test_agents():
    shown = plan(Bandits(), Meeting(6), per_agent())
    assert "actor+buffer+learner: 2 replicas, 1 agent each" in str(shown)
    assert "env: 1 site, all 6 environments" in str(shown)
    words = texts(shown.draw())
    assert "1 agent each" in words
    check_legible(shown.draw())


@pytest.mark.parametrize("name", LAYOUTS)
def test_print(name):
    text = str(planned(name))
    check_golden(f"plan_{name}", text)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", LAYOUTS)
def test_picture(name):
    shown = planned(name)
    svg = shown.draw()
    check_legible(svg)
    words = " ".join(texts(svg))
    learning = ("gradient", "update") if name in A2C_LAYOUTS else ("learn",)
    assert all(fragment in words for fragment in ("act", "step_one", *learning))
    assert all(group in words for group in shown.sites.replicas)
    transfers = [step for step, _ in walk(shown.iterate.steps) if isinstance(step, Transfer)]
    assert len(arrows(svg)) == len(transfers) == len(list(crossings(shown, shown.iterate)))


def test_promise_is_that_of_the_law():
    promises = {name: printed(name).split("Promise: ")[1] for name in LAYOUTS}
    for name in ("fused", "coarse_x1", "coarse_x2_exact"):
        assert promises[name].startswith("bit for bit"), name
    for name in ("coarse_x2", "fine_x2", "env_x2_actor_x3"):
        assert promises[name].startswith("what jax.jit(iterate) computes, up to rounding"), name
    for name in ("fused_2_devices", "multi_learner_x2", "sebulba_x4_x2"):
        assert promises[name].startswith("what vmap(iterate) over 4 learner shards computes, up to rounding"), name
        assert "exact" not in promises[name]  # which shards do not go with
    assert "bit for bit" not in promises["coarse_x2_lag"] + promises["a2c_a3c_x2"]
    assert promises["coarse_x2_lag"].startswith("what a worker reads is at most 4 updates old (max_lag=4). Results")


def test_who_carries_how_many_shards_and_combines_them():
    text = {name: " ".join(printed(name).split()) for name in LAYOUTS}
    assert all("12 environments, 4 learner shards" in text[name] for name in ("multi_learner_x2", "sebulba_x4_x2"))
    assert "2 replicas, 6 environments each, 2 shards each" in text["multi_learner_x2"]
    assert "learn, all-reduce over 2 replicas" in text["multi_learner_x2"]
    assert "env+actor: 4 replicas, 3 environments each, 1 shard each" in text["sebulba_x4_x2"]
    assert "buffer+learner: 2 replicas, 6 environments each, 2 shards each" in text["sebulba_x4_x2"]
    assert "1 site, all 12 environments, all 4 shards, on 2 devices, 2 shards on each" in text["fused_2_devices"]
    assert "learn, all-reduce over 2 devices" in text["fused_2_devices"]
    assert "all-reduce" not in text["central_x2"] + text["coarse_x2"]
    assert "all-reduce over 2 replicas" in " ".join(texts(planned("sebulba_x4_x2").draw()))


def test_what_may_be_out_of_date():
    assert "receive from buffer+learner, up to 4 updates old" in printed("coarse_x2_lag")
    assert "updates old" not in printed("coarse_x2")
    drawn = [arrow for arrow in arrows(planned("coarse_x2_lag").draw()) if arrow.get("stroke-dasharray")]
    assert len(drawn) == 1
    assert "1 site, 6 environments at a time" in printed("a2c_a3c_x2")


def test_one_shard_on_several_devices_is_divided_by_the_compiler():
    shown = plan(Tiny(unroll=3), make("jax:CartPole-v1", 4), fused(devices=2, shards=1))
    assert "1 site, all 4 environments, on 2 devices, divided by the compiler" in str(shown)


class Weighing(InProcess):
    """Adds up the bytes that arrive somewhere."""

    def __init__(self, plan):
        super().__init__(plan)
        self.arrived, hand_over = 0, self.backend.reshard

        def weigh(parts, move, receiver, receivers, transfer):
            value = hand_over(parts, move, receiver, receivers, transfer)
            self.arrived += value.nbytes
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


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if not layout.exact])
def test_messages_are_those_of_worker_processes(name):
    shown = planned(name)
    alone = {(group, 0): group for group in shown.sites.replicas}
    process_of_site = alone if shown.num_workers > 1 else {site: f"{site}" for site in shown.all_sites}
    topology = Topology(me="", process_of_site=process_of_site)
    transfers = [step for step, _ in walk(shown.iterate.steps) if isinstance(step, Transfer)]
    counts = [len(messages(step, topology)) * shown.num_workers for step in transfers]
    assert counts == [c.num_messages for c in crossings(shown, shown.iterate)]


def test_pickled_plan_prints_the_same():
    shown = plan(Tiny(unroll=3), make("jax:CartPole-v1", 4), coarse(2))
    again = pickle.loads(pickle.dumps(shown))
    assert str(again) == str(shown) and again.draw() == shown.draw()
