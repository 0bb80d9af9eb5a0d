"""Profiles: the shares add up, the verdict names the bottleneck, and the trace has the format of Perfetto."""

import json
import time

import jax
import pytest

from choreo.envs import make
from choreo.layouts import fine, fused
from choreo.plans.build import plan
from choreo.plans.step_times import StepPhase
from choreo.runtime.engine.profile import Profile, Recorder, kind_of
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from tiny import Tiny


def record(seconds, *totals):
    return {"seconds": seconds, "totals": [list(t) for t in totals], "spans": []}


def test_shares_add_up_and_the_verdict_names_the_bottleneck():
    profile = Profile({
        "actor-0": record(10.0, ("env", "step", 8.0), ("act", "act", 1.0), ("wait", "learner", 0.5)),
        "learner": record(10.0, ("learn", "learn", 2.0), ("wait", "actor-0", 7.0), ("compile", "learner", 1.0)),
    })  # fmt: skip
    assert profile.kinds == ["env", "act", "learn", "wait", "compile", "other"]
    assert profile.shares("actor-0") == pytest.approx({"env": 0.8, "act": 0.1, "wait": 0.05, "other": 0.05})
    assert abs(sum(profile.shares("learner").values()) - 1) < 1e-12
    assert profile.verdict == "`learner` waits 70% of its time for `actor-0`, which spends 80% of its time in env."


def test_the_verdict_says_when_nobody_waits():
    assert Profile({"here": record(1.0, ("env", "step", 1.0))}).verdict == "Nobody waits for anybody."


def test_the_time_of_a_nested_span_is_counted_once():
    recorder = Recorder()
    inner = recorder.timed("compile", "x", lambda: time.sleep(0.02))
    recorder.timed("learn", "learn", inner)()
    assert recorder.totals["compile", "x"] >= 0.02 > recorder.totals["learn", "learn"]
    assert [span[0] for span in recorder.spans] == ["compile", "learn"]


ACT, LEARN = StepPhase("iterate", "actor", 3, "run"), StepPhase("iterate", "learner", 3, "run")


def test_the_mean_of_a_step_is_over_all_calls_at_all_workers():
    workers = {name: Recorder() for name in ("actor-0", "actor-1", "learner")}
    workers["actor-0"].steps = {ACT: (1, 0.5)}
    workers["actor-1"].steps = {ACT: (3, 0.5)}
    workers["learner"].steps = {LEARN: (2, 7.0)}
    sent = json.loads(json.dumps({name: recorder.to_json() for name, recorder in workers.items()}))
    profile = Profile(sent, "PPO on CartPole")
    assert profile.plan_name == "PPO on CartPole"
    assert (profile.mean_seconds(ACT), profile.mean_seconds(LEARN)) == (0.25, 3.5)
    assert profile.mean_seconds(ACT._replace(phase="wait")) is None


def test_a_call_that_runs_a_step_several_times_counts_as_often():
    recorder = Recorder()
    compile_ = recorder.timed("compile", "x", lambda: time.sleep(0.05))
    recorder.timed("learn", "learn", lambda n: compile_(), phase=LEARN, runs=lambda n: n)(4)
    recorder.timed("act", "act", time.sleep, phase=ACT, runs=2)(0.02)
    (times, seconds), (act_times, act_seconds) = recorder.steps[LEARN], recorder.steps[ACT]
    assert times == 4 and seconds < 0.05, "the time of compiling must not count as time of the step"
    assert act_times == 2 and act_seconds >= 0.02


def test_the_kind_of_a_segment_follows_from_its_roles():
    assert [kind_of(roles) for roles in ([], ["env"], ["env", "actor"], ["learner"])] == [
        "other", "env", "env+act", "learn"]  # fmt: skip


def test_the_profile_of_a_run_in_this_process_shows_the_time_of_compiling():
    runtime = InProcess(plan(Tiny(unroll=2), make("jax:CartPole-v1", 4), fused()), profile=True)
    runtime.start(jax.random.key(0))
    runtime.run(0, 2)
    profile = runtime.profile()
    runtime.close()
    assert list(profile.workers) == ["this process"]
    assert profile.shares("this process")["compile"] > 0


def test_the_profile_of_a_run_with_workers_shows_which_workers_wait():
    runtime = Local(plan(Tiny(unroll=2), make("CartPole-v1", 4), fine(2)), profile=True)
    try:
        runtime.start(jax.random.key(0))
        runtime.run(0, 3)
        profile = runtime.profile()
    finally:
        runtime.close()
    workers = list(profile.workers)
    assert len(workers) == 3 and workers[-1] not in profile.waits(workers[-1])
    assert set(profile.waits(workers[-1])) == set(workers[:2]), "the learner must wait for both other workers"
    assert profile.shares(workers[0])["env"] > 0
    events = json.loads(profile.trace())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == set(workers)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")


def test_workers_report_the_iteration_that_they_run():
    heard = []
    runtime = Local(plan(Tiny(unroll=2), make("CartPole-v1", 4), fine(1)), on_states=heard.append)
    try:
        runtime.start(jax.random.key(0))
        runtime.run(0, 2)
    finally:
        runtime.close()
    assert {"iteration 0"} <= {state for states in heard for state in states.values()}
