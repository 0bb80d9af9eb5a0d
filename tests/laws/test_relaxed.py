"""Level 4 of the law (docs/law.md): a relaxed run (`max_lag`, `merge="any"`) replays bit for bit from its log.

The log says which version of the parameters each worker read, and in which order the learner used the workers' parts. No
version is more than `max_lag` updates old. Two tests also compare a run with a loop that is written by hand: one run without lag,
and one run with lag. Both results agree up to 1e-5.

Other tests check that Choreo refuses layouts that cannot be relaxed, and a log that is too short.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import choreo
from choreo import envs, networks
from choreo.algos.a2c import A2C
from choreo.errors import LayoutError, RunError
from choreo.partition.program import Transfer
from choreo.plans.build import plan
from choreo.runtime.engine.schedule import LagSchedule
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from laws.reference import assert_close, assert_same_bits, check_bounds, named, run_of
from partition.ponds import Functions, Pond, learn, push, still

KEY = jax.random.key(3)
ENV = envs.make("jax:CartPole-v1", 8)
NETWORK = functools.partial(networks.mlp, hidden=(16,))
ALGO = A2C(unroll=4, network=NETWORK)
CELLS = {
    "coarse, any": choreo.coarse(4, max_lag=5, merge="any"),
    "sebulba, lag": choreo.sebulba(4, 2, max_lag=3),
    "central, any": choreo.central(4, max_lag=3, merge="any"),
}
"""Layouts with four workers. `test_matrix.py` runs every relaxed layout with two workers, in one process and in several."""


@functools.cache
def planned(cell: str):
    return plan(ALGO, ENV, CELLS[cell])


def logged_run(runtime, iterations: int = 6):
    """The result of a run, and its log."""
    return run_of(runtime, KEY, iterations), list(runtime.log)


@pytest.mark.parametrize("cell", CELLS)
def test_a_run_in_one_process_replays_and_keeps_the_bounds_of_its_layout(cell):
    check_replay(InProcess(planned(cell)))


@pytest.mark.long  # `make test` runs relaxed layouts with two workers, in test_matrix.py
def test_a_run_with_workers_replays_in_one_process():
    check_replay(Local(planned("central, any")))


@pytest.mark.long  # `make test` runs TCP in test_runtimes.py, and relaxed layouts with workers in test_matrix.py
def test_a_run_with_python_environments_over_tcp_replays_in_one_process():
    the_plan = plan(ALGO, envs.make("CartPole-v1", 8), choreo.coarse(2, max_lag=3, merge="any"))
    check_replay(Local(the_plan, carrier="tcp"))


def check_replay(runtime):
    """Assert that a replay of the log in one process gives the same bits, and that the log keeps the bounds of the layout."""
    run, log = logged_run(runtime)
    assert_same_bits(run_of(InProcess(runtime.plan, replay=log), KEY, 6), run)
    check_bounds(log, run, runtime.plan.layout, iterations=6)


def test_merge_any_without_lag_is_iterate_on_one_part_after_the_other():
    """The reference for merge="any" is a loop that calls `jax.jit(iterate)` once for each part, in the order of the log."""
    algo, workers = ALGO, 4
    the_plan = plan(algo, ENV, choreo.coarse(workers, merge="any"))
    run, log = logged_run(InProcess(the_plan), iterations=3)
    assert [read.lag for read in log] == [0] * 12
    assert len({read.reader for read in log}) > 1

    init_key, run_key = jax.random.split(KEY)
    whole = jax.jit(lambda key: algo.init(ENV, key))(init_key)
    env = ENV.with_num_envs(2)
    iterate = jax.jit(lambda carry, key: algo.iterate(env, carry, key))
    train, positions, parts = whole.train, [], [0] * workers
    for c in range(workers):
        positions.append(jax.tree.map(lambda x, c=c: x[2 * c : 2 * c + 2], whole.position))
    for read in log:
        c = int(read.reader[-1])
        key = jax.random.fold_in(jax.random.fold_in(run_key, c), parts[c])
        carry, _ = iterate(whole._replace(train=train, position=positions[c]), key)
        train, positions[c], parts[c] = carry.train, carry.position, parts[c] + 1
    position = jax.tree.map(lambda *blocks: jnp.concatenate(blocks), *positions)
    expected = named(whole._replace(train=train, position=position), {})
    assert_close({name: run[name] for name in expected}, expected, 1e-5)


@given(st.integers(1, 6), st.integers(0, 7), st.integers(1, 60), st.randoms(use_true_random=False))
def test_a_schedule_never_stops_and_never_exceeds_the_lag(workers, max_lag, total, random):
    schedule, most = LagSchedule(workers, max_lag), 0
    for done in range(total):
        schedule.start(total - done)
        most = max(most, len(schedule.busy))
        eligible = schedule.eligible()
        assert eligible
        lag = schedule.version - schedule.busy[chosen := random.choice(eligible)]
        assert 0 <= lag <= max_lag
        schedule.learned_from(chosen)
    assert not schedule.busy
    assert most == min(workers, max_lag + 1, total)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (choreo.Layout(choreo.Group("env", replicas=2), choreo.Group("actor", "learner"), max_lag=1),
         "The layout custom has max_lag=1, but nothing in it may be out of date"),
        (choreo.Layout(choreo.Group("env", "actor", "learner"), max_lag=1),
         "The layout custom has max_lag=1, but nothing in it may be out of date. A group may read old values only from a "
         "group that sends it nothing but values that are carried from iteration to iteration.\nLeave out max_lag=1, or use a layout whose workers act "
         "with parameters of a learner: coarse, sebulba, central."),
        (choreo.Layout(choreo.Group("env", replicas=2), choreo.Group("actor", "learner"), merge="any"),
         'The layout custom has merge="any", but nothing in it may be out of date. A group may read old values only from a '
         'group that sends it nothing but values that are carried from iteration to iteration.\nLeave out merge="any", or use a layout whose workers act '
         "with parameters of a learner: coarse, central."),
        (choreo.Layout(choreo.Group("env", replicas=2), choreo.Group("actor", replicas=2), choreo.Group("learner"),
                       merge="any"),
         'Layout(Group(\'env\', replicas=2), Group(\'actor\', replicas=2), Group(\'learner\'), merge=\'any\'): merge="any" '
         "needs one group with replicas (the workers)"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be_relaxed_are_refused(layout, message):
    with pytest.raises(LayoutError) as refusal:
        plan(ALGO, ENV, layout)
    assert str(refusal.value).startswith(message)


def act_for_both(env, carry, key):
    """The actor reads `s`, which the environments carry, and `w`, which the learner carries."""
    s = env.step(carry["s"], jax.vmap(push, (None, 0))(carry["w"], carry["s"]))
    w, slow, _ = learn(carry["w"], carry["slow"], s[None])
    return {"w": w, "slow": slow, "s": s}, {"m": jnp.sum(carry["w"])}


def test_a_group_cannot_read_old_values_from_two_groups():
    """The log has one version for each reader and update, so a replay could not tell the two versions apart."""
    layout = choreo.Layout(choreo.Group("env"), choreo.Group("actor"), choreo.Group("learner"), max_lag=2)
    with pytest.raises(LayoutError) as refusal:
        plan(Functions(still, act_for_both), Pond(), layout)
    assert str(refusal.value) == (
        "`actor` would read old values from `env` and `learner`, each at a version of its own. A group may read old values from "
        "one group only, so that everything that it reads comes from the same update.\n"
        "Put the roles of these groups into one group, or leave out max_lag=2."
    )


def act_twice(env, w, slow, s):
    """Take two steps. Glue computes the weights of the actor from two carried values."""
    half = 0.5 * w + 1.0
    both = half * slow
    for _ in range(2):
        s = env.step(s, jax.vmap(push, (None, 0))(half + both, s))
    return half, both, s


def act_by_glue(env, carry, key):
    """Glue computes `half` and `both` from carried values. The actor and the learner read the two, and the new carry depends on
    `both` too."""
    half, both, s = act_twice(env, carry["w"], carry["slow"], carry["s"])
    w, slow, loss = learn(half, carry["slow"] + both, s[None])
    return {"w": w, "slow": 0.5 * both + slow, "s": s}, {"loss": loss, "half": half[0]}


def test_glue_reads_one_version_of_the_carried_values():
    """A worker computes the glue from the version of `w` and `slow` that the log names. The learner uses the newest version.

    The test computes the expected result without Choreo, from the log.
    """
    algo, env, layout = Functions(still, act_by_glue), Pond(6), choreo.coarse(2, max_lag=2)
    the_plan = plan(algo, env, layout)
    assert [[m.label for m in t.moves] for t in the_plan.iterate.steps if isinstance(t, Transfer) and t.lag] == [
        ["['slow']", "['w']"]
    ]
    run, log = logged_run(InProcess(the_plan))
    assert_same_bits(run_of(InProcess(the_plan, replay=log), KEY, 6), run)
    assert len({read.lag for read in log}) > 1

    with choreo.testing.unmarked():
        versions, rows = [still(env, KEY)], []
        for i in range(6):
            read = {int(entry.reader[-1]): versions[entry.version] for entry in log if entry.update == i}
            now = versions[i]
            blocks = [act_twice(Pond(3), read[r]["w"], read[r]["slow"], now["s"][3 * r : 3 * r + 3])[2] for r in (0, 1)]
            half, both, _ = act_twice(env, now["w"], now["slow"], now["s"])
            w, slow, loss = learn(half, now["slow"] + both, jnp.concatenate(blocks)[None])
            versions.append({"w": w, "slow": 0.5 * both + slow, "s": jnp.concatenate(blocks)})
            rows.append({"loss": loss, "half": half[0]})
    expected = named(versions[-1], {name: np.stack([row[name] for row in rows]) for name in rows[0]})
    assert_close({name: run[name] for name in expected}, expected, 1e-5)


def test_with_merge_any_glue_reads_one_version_of_the_carried_values():
    """The test replays the log, and the replay must give the same bits."""
    the_plan = plan(Functions(still, act_by_glue), Pond(6), choreo.coarse(2, max_lag=3, merge="any"))
    run, log = logged_run(InProcess(the_plan))
    assert_same_bits(run_of(InProcess(the_plan, replay=log), KEY, 6), run)


def test_a_log_that_is_too_short_is_refused():
    _, log = logged_run(InProcess(planned("central, any")), iterations=1)
    with pytest.raises(RunError, match=r"The log ends before update 4\."):
        run_of(InProcess(planned("central, any"), replay=log), KEY, 2)
