"""The costs of a plan. FLOPs equal a count by hand, for all replicas and all rounds of loops. Seconds are measured, estimated or
unknown."""

import json
import pickle
import time
from dataclasses import dataclass, replace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo import envs
from choreo.algos import A2C
from choreo.envs import make
from choreo.errors import ChoreoError
from choreo.graph.text import format_bytes
from choreo.layouts import ALIASES, Group, Layout, coarse, fine, fused, multi_learner
from choreo.loops import rollout
from choreo.plans.build import plan
from choreo.plans.costs import Costs, Rates, StepCost
from choreo.plans.flops import format_flops
from choreo.plans.step_times import StepPhase
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from pictures import texts
from plans.planned import LAYOUTS, planned
from tiny import Carry, Tiny

ENVS, UNROLL, OBS, ACTIONS = 8, 5, 4, 2
RATES = Rates(flops_per_s=1e9, bytes_per_s=1e6, seconds_per_message=1e-3)


@dataclass(frozen=True, kw_only=True)
class Linear(Tiny):
    """Tiny with FLOPs that are easy to count: it acts with one product of matrices, and learns with two."""

    unroll: int = UNROLL

    def iterate(self, env, carry, key):
        position, trajectory, _ = rollout(env, self.act, carry.train.weights, carry.position, key, self.unroll)
        train, metrics = self.learn(carry.train, trajectory)
        return Carry(train, position), metrics  # without metrics of episodes, which would add FLOPs

    @choreo.fragment("actor")
    def act(self, params, obs, key, *, greedy=False):
        return jnp.argmax(obs @ params), ()

    @choreo.fragment("learner")
    def learn(self, train, trajectory):
        total = jnp.einsum("teo,tea->oa", trajectory.obs, trajectory.obs @ train.weights)
        return train._replace(weights=choreo.all_reduce(total)), {}


def step_of(costs: Costs, name: str, program: str = "iterate") -> StepCost:
    (found,) = (step for step in getattr(costs, program).steps if name in step.name)
    return found


def linear(layout, envs=ENVS):
    return plan(Linear(), make("jax:CartPole-v1", envs), layout)


ACT = ENVS * (2 * OBS * ACTIONS + ACTIONS)
"""FLOPs of acting once for all environments: a product and the comparisons of argmax."""
LEARN = 2 * (2 * UNROLL * ENVS * OBS * ACTIONS)
"""FLOPs of learning once: two products of matrices."""


def test_flops_equal_a_count_by_hand():
    layout = Layout(Group("env", replicas=2), Group("actor", replicas=2), Group("learner"))
    costs = linear(layout).costs()
    act, learn = step_of(costs, "act"), step_of(costs, "learn")
    assert (act.group, act.replicas, act.times, act.flops) == ("actor", 2, UNROLL, ACT // 2)
    assert act.total_flops == UNROLL * ACT
    assert (learn.group, learn.replicas, learn.times, learn.flops) == ("learner", 1, 1, LEARN)
    assert act.roles == ("actor",) and not act.on_host and not act.flops_at_least
    assert costs.largest_product == UNROLL * ENVS * OBS * ACTIONS


def test_bytes_that_a_segment_reads_and_returns_are_those_of_its_arrays():
    layout = Layout(Group("env"), Group("actor", replicas=2), Group("learner"))
    act = step_of(linear(layout).costs(), "act")
    # Each replica has half of the environments. `act` reads the weights and the observations of this half, and perhaps keys. It
    # returns an action for each environment of this half: 4 bytes (int32), or 8 bytes.
    keys = act.input_nbytes - 4 * OBS * ACTIONS - 4 * OBS * ENVS // 2
    assert keys in (0, 8, 8 * ENVS // 2), "apart from weights and observations, `act` may read only keys"
    assert act.output_nbytes in (4 * ENVS // 2, 8 * ENVS // 2), "`act` should return only actions"


def test_bytes_and_messages_of_crossings_equal_a_count_by_hand():
    costs = linear(fine(2)).costs()
    crossings = {(c.src, c.dst): c for c in costs.iterate.crossings if c.times > 1}
    observed, acted = crossings["env", "actor+buffer+learner"], crossings["actor+buffer+learner", "env"]
    assert (acted.times, acted.num_messages, acted.nbytes) == (UNROLL, 2, 4 * ENVS)
    assert (observed.times, observed.num_messages) == (UNROLL, 2) and observed.nbytes >= 4 * OBS * ENVS
    assert costs.iterate.num_messages == sum(c.times * c.num_messages for c in costs.iterate.crossings)


def actors(replicas, **options):
    return Layout(Group("env"), Group("actor", replicas=replicas), Group("learner"), **options)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_flops_of_all_replicas_are_those_of_the_whole(replicas):
    """Each of N replicas computes one of N blocks of the environments, so all replicas together compute every environment once."""
    act = step_of(linear(actors(replicas)).costs(), "act")
    assert (act.replicas, act.blocks, act.flops) == (replicas, 1, ACT // replicas)
    assert act.total_flops == UNROLL * ACT


def test_what_does_not_depend_on_environments_counts_at_every_replica():
    """One step of CartPole has one operation on constants, the product of mass and length. Each replica computes this product:
    4 replicas compute it 4 times, one replica computes it once."""
    whole, split = (step_of(linear(coarse(n)).costs(), "act") for n in (1, 4))
    assert split.total_flops == whole.total_flops + 3 * UNROLL


def test_blocks_of_one_process_count_together():
    """With exact=True, the process of a replica computes several blocks, one after the other. Their FLOPs are added up."""
    act = step_of(linear(actors(2, exact=True)).costs(), "act")
    assert act.blocks > 1 and (act.replicas, act.flops, act.total_flops) == (2, ACT // 2, UNROLL * ACT)


def test_a_loop_inside_of_a_segment_counts_for_every_round():
    once, often = (
        step_of(plan(Linear(unroll=n), make("jax:CartPole-v1", ENVS), coarse(2)).costs(), "act") for n in (1, 10)
    )
    assert once.times == often.times == 1 and once.flops and often.flops
    assert often.flops == 10 * once.flops


def test_learner_shards_count_together():
    """Each of two replicas does half of the work. In addition, `all_reduce` takes the mean over the shards, with three operations for
    each weight: a sum over the replica's shards, a sum over the replicas, and a division by the number of shards."""
    two, one = (step_of(linear(multi_learner(n, shards=n)).costs(), "learn") for n in (2, 1))
    assert one.flops is not None and two.replicas == 2
    on_constants = UNROLL  # one operation for each step of CartPole, as above; every replica computes it
    assert two.flops == (one.flops - on_constants) // 2 + on_constants + 3 * OBS * ACTIONS


def test_with_merge_any_the_learner_runs_once_for_each_worker():
    shown = planned("a2c_a3c_x2")
    gradient, update = step_of(shown.costs(), "gradient"), step_of(shown.costs(), "update")
    assert (gradient.replicas, gradient.times) == (2, 1)
    assert (update.replicas, update.times) == (1, 2)


def test_a_while_loop_makes_the_flops_a_lower_bound_and_python_makes_them_unknown():
    class Searching(Linear):
        @choreo.fragment("learner")
        def learn(self, train, trajectory):
            found = jax.lax.while_loop(lambda w: w[0, 0] < 1, lambda w: w + 1, train.weights)
            return train._replace(weights=found), {}

    shown = plan(Searching(), make("CartPole-v1", 2), coarse(1))
    learn, env = step_of(shown.costs(), "learn"), next(s for s in shown.costs().iterate.steps if s.on_host)
    assert learn.flops == OBS * ACTIONS + 1 and learn.flops_at_least
    assert "learn, at least 9 FLOP" in str(shown)
    assert env.flops is None and env.total_flops is None and env.input_nbytes is None
    assert shown.costs().iterate.flops_at_least and shown.costs().iterate.flops is not None


def test_an_unknown_computation_is_printed_as_unknown_never_as_0():
    class Solving(Linear):
        @choreo.fragment("learner")
        def learn(self, train, trajectory):
            return train._replace(weights=train.weights + jnp.linalg.cholesky(jnp.eye(2))[0, 0]), {}

    shown = plan(Solving(), make("jax:CartPole-v1", 2), coarse(1))
    assert step_of(shown.costs(), "learn").flops is None and shown.costs().iterate.flops is None
    assert "learn, FLOPs unknown" in str(shown)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_print_and_the_picture_show_the_numbers_of_the_data(name):
    shown = planned(name)
    costs = shown.costs()
    picture, text = " ".join(texts(shown.draw())), str(shown)
    for step in costs.iterate.steps:
        flops = format_flops(step.flops, at_least=step.flops_at_least)
        assert flops in picture
        assert any(line.endswith(f", {flops}") and step.name.split("+")[-1] in line for line in text.splitlines())
    if costs.iterate.crossings:
        assert format_bytes(costs.iterate.nbytes) in text and format_bytes(costs.iterate.nbytes) in picture


@pytest.mark.parametrize("name", ["coarse_x2", "multi_learner_x2", "a2c_a3c_x2", "dqn_apex_x4_x2"])
def test_costs_are_data_that_pickles_and_compares_and_becomes_json(name):
    costs = planned(name).costs()
    assert pickle.loads(pickle.dumps(costs)) == costs
    assert pickle.loads(pickle.dumps(planned(name))).costs() == costs
    assert costs != costs.estimated(RATES)
    plain = costs.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["iterate"]["nbytes"] == costs.iterate.nbytes and plain["seconds_are"] == "unknown"
    assert [step["flops"] for step in plain["iterate"]["steps"]] == [step.flops for step in costs.iterate.steps]


def test_the_seconds_of_a_plan_that_did_not_run_are_unknown():
    costs = linear(coarse(2)).costs()
    assert costs.seconds_are == "unknown"
    assert {each.seconds for each in (*costs.iterate.steps, *costs.iterate.crossings)} == {None}


def test_estimated_seconds_follow_from_the_rates():
    costs = linear(coarse(2)).costs(rates=RATES)
    assert costs.seconds_are == "estimated"
    assert step_of(costs, "learn").seconds == LEARN / 1e9
    crossing = costs.iterate.crossings[0]
    assert crossing.seconds == pytest.approx(crossing.num_messages * 1e-3 + crossing.nbytes / 1e6)
    assert crossing.wait_seconds is None


def test_no_seconds_are_estimated_for_unknown_flops():
    costs = plan(Linear(), make("CartPole-v1", 2), coarse(1)).costs(rates=RATES)
    assert [step.seconds for step in costs.iterate.steps if step.on_host] == [None]
    bound = replace(costs.iterate.steps[0], flops=100, flops_at_least=True)
    bounded = replace(costs, iterate=replace(costs.iterate, steps=(bound,)))
    assert bounded.estimated(RATES).iterate.steps[0].seconds is None


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"flops_per_s": 0}, "Rates(flops_per_s=0) is not a rate.\nGive a finite number above 0;"),
        ({"bytes_per_s": float("inf")}, "Rates(bytes_per_s=inf) is not a rate.\nGive a finite number above 0;"),
        ({"seconds_per_message": -1}, "Rates(seconds_per_message=-1) is not a number of seconds.\nGive a finite number that"),
        ({"flops_per_s": float("nan")}, "Rates(flops_per_s=nan) is not a rate."),
    ],
)  # fmt: skip
def test_impossible_rates_are_refused(rates, message):
    with pytest.raises(ChoreoError) as refusal:
        Rates(**({"flops_per_s": 1e9, "bytes_per_s": 1e9, "seconds_per_message": 0} | rates))
    assert str(refusal.value).startswith(message)


class FakeTimes:
    """A profile with invented times: in the measured phase, step number n took n microseconds."""

    def __init__(self, shown, phase: str):
        self.plan_name, self.phase = shown.name, phase

    def mean_seconds(self, phase: StepPhase) -> float | None:
        return 1e-6 * phase.number if phase.phase == self.phase else None


def test_the_profile_of_another_plan_is_refused():
    profile = FakeTimes(linear(coarse(4)), "run")
    with pytest.raises(ChoreoError) as refusal:
        linear(coarse(2)).costs(profile)
    assert str(refusal.value) == (
        "The profile is from a run of another plan.\n"
        "  profile  Linear on jax:CartPole-v1, 8 environments: Layout(Group('env', 'actor', replicas=4), "
        "Group('buffer', 'learner'))\n"
        "  plan     Linear on jax:CartPole-v1, 8 environments: Layout(Group('env', 'actor', replicas=2), "
        "Group('buffer', 'learner'))\n"
        "Use the profile of a run of this plan, or make the plan of that run: choreo.plan(run.algo, run.env, run.layout)."
    )


def test_a_profile_and_rates_together_are_refused():
    shown = linear(coarse(2))
    with pytest.raises(ChoreoError) as refusal:
        shown.costs(FakeTimes(shown, "run"), rates=RATES)
    assert str(refusal.value) == (
        "plan.costs was given both a profile and rates, so its seconds would be both measured and estimated.\n"
        "Give one of the two; call plan.costs twice to compare them."
    )


SLEEP_S = 0.05


class Napping(gymnasium.Env):
    """An environment in which every step takes at least SLEEP_S seconds."""

    observation_space = gymnasium.spaces.Box(-1, 1, (OBS,), np.float32)
    action_space = gymnasium.spaces.Discrete(ACTIONS)

    def reset(self, *, seed=None, options=None):
        return np.zeros(OBS, np.float32), {}

    def step(self, action):
        time.sleep(SLEEP_S)
        return np.zeros(OBS, np.float32), 1.0, False, False, {}


@dataclass(frozen=True, kw_only=True)
class Heavy(Linear):
    """Linear with a learner that computes a product of large matrices many times."""

    @choreo.fragment("learner")
    def learn(self, train, trajectory):
        large = jnp.broadcast_to(train.weights[0, 0], (400, 400))
        total, _ = jax.lax.scan(lambda x, _: (x @ x, None), large, length=40)
        return train._replace(weights=train.weights + 0 * total[0, 0]), {}


def profiled(shown, runtime) -> Costs:
    """The costs of a plan, with seconds from a profile of four iterations."""
    try:
        runtime.start(jax.random.key(0))
        runtime.run(0, 4)
        return shown.costs(runtime.profile())
    finally:
        runtime.close()


@pytest.mark.parametrize("make_runtime", [InProcess, Local])
def test_measured_seconds_belong_to_the_step_that_took_them(make_runtime):
    """Each of two `env` sites has one environment, which sleeps in every step. The learner computes much more than the actor."""
    shown = plan(Heavy(), envs.from_factory(Napping, 2), fine(2))
    costs = profiled(shown, make_runtime(shown, profile=True))
    assert costs.seconds_are == "measured"
    (env,) = (step for step in costs.iterate.steps if step.on_host)
    act, learn = step_of(costs, "act"), step_of(costs, "learn")
    assert SLEEP_S <= env.seconds < 10 * SLEEP_S and env.total_seconds == pytest.approx(UNROLL * env.seconds)
    assert act.seconds < SLEEP_S / 4 and act.seconds < learn.seconds / 4
    assert all(step.seconds is not None for step in costs.init.steps)
    observed, acted = (next(c for c in costs.iterate.crossings if (c.dst == "env") == to_env and c.times == UNROLL)
                       for to_env in (False, True))  # fmt: skip
    assert 0 < observed.seconds < SLEEP_S / 2 and 0 < acted.seconds < SLEEP_S / 2, "small messages should be fast"
    if make_runtime is InProcess:
        assert observed.wait_seconds is acted.wait_seconds is None, "within one process, no site waits for a message"
    else:
        # Both workers sleep at the same time. So the learner waits for about SLEEP_S until it has the message of the first worker,
        # and then hardly at all for the message of the second. The mean of the two is about SLEEP_S / 2.
        assert SLEEP_S / 4 < observed.wait_seconds < 10 * SLEEP_S


@pytest.mark.parametrize("layout", [fused(), fused(shards=2), multi_learner(2, shards=2)], ids=repr)
def test_iterations_in_one_compiled_loop_are_measured_per_iteration(layout):
    shown = plan(Heavy(), make("jax:CartPole-v1", 4), layout)
    began = time.perf_counter()
    costs = profiled(shown, InProcess(shown, profile=True))
    (step,) = costs.iterate.steps
    assert step.seconds is not None and 0 < 4 * step.replicas * step.seconds < time.perf_counter() - began


def test_measured_seconds_of_a_relaxed_layout():
    shown = plan(Linear(), make("jax:CartPole-v1", 4), coarse(2, max_lag=2))
    for make_runtime in (InProcess, Local):
        costs = profiled(shown, make_runtime(shown, profile=True))
        assert all(each.seconds > 0 for each in (*costs.iterate.steps, *costs.iterate.crossings))


def test_measured_seconds_when_the_learner_takes_results_as_they_arrive():
    shown = plan(A2C(unroll=4), make("jax:CartPole-v1", 4), ALIASES["a3c"](2))
    for make_runtime in (InProcess, Local):
        costs = profiled(shown, make_runtime(shown, profile=True))
        assert all(each.seconds > 0 for each in (*costs.iterate.steps, *costs.iterate.crossings))
