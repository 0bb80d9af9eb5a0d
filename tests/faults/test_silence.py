"""Suspended workers (SIGSTOP). A silent worker is named, and later counts as dead, which ends the run. If the worker goes on before
that, the run goes on too. Also workers that answer, but make no progress.

Most tests use short times. Two of the tests marked `long` use the default times, which a user's run has.
"""

import contextlib
import dataclasses
import os
import signal
import threading
import time

import jax
import numpy as np
import psutil
import pytest
import zmq

import choreo
from choreo import envs
from choreo.cli import main
from choreo.errors import RunError
from choreo.runtime.channels.keys import authenticator
from choreo.runtime.channels.sockets import context_of_process
from choreo.runtime.coordinator.silence import Silence
from choreo.runtime.coordinator.supervision import WorkerError
from choreo.runtime.local import Local
from faults.scenes import KEY, alone, assert_same_bits, cartpole, play
from faults.test_learners import planned
from hosts import Agent, make_token
from tiny import Tiny

# These two calls open files that stay open, so they come before the first check for leaks.
context_of_process().socket(zmq.PAIR).close()
authenticator()

SHORT = Silence(dead_s=20.0, named_s=1.0)
"""A silent worker is named after 1 s. It counts as dead only after 20 s, so a worker on a slow machine is not dead."""
SUSPENDED_S = 2.5
WORKERS = {"coarse x2": ["env+actor-0", "buffer+learner"], "fine x2": ["env-1", "actor+buffer+learner"]}
CARRIERS = {"shm": {"carrier": "shm"}, "tcp": {"carrier": "tcp"}}
CELLS = [(layout, who, carrier) for layout, names in WORKERS.items() for who in names for carrier in CARRIERS]
CI = [("coarse x2", "buffer+learner", "shm"), ("fine x2", "env-1", "tcp"), ("fine x2", "actor+buffer+learner", "shm")]


def marks(cell):
    return [] if cell in CI else [pytest.mark.long]


def suspend_for(local: Local, who: str, seconds: float) -> threading.Timer:
    worker = psutil.Process(local.pool.handles[who].process.pid)
    wake = threading.Timer(seconds, worker.resume)
    worker.suspend()
    wake.start()
    return wake


def check_goes_on(local_of, layout: str, who: str, seconds: float, named_s: float) -> None:
    """A worker is suspended for a while. One line names it, a second line says that it is back. The results do not change."""
    said: list[tuple[str, str, float]] = []
    states: list[dict[str, str]] = []
    local = local_of(
        on_output=lambda worker, line: said.append((worker, line, time.monotonic())), on_states=states.append
    )
    wakes: list[threading.Timer] = []
    assert_same_bits(play(local, after_ten=lambda: wakes.append(suspend_for(local, who, seconds))), alone(layout))
    wakes[0].join()
    assert [worker for worker, _, _ in said] == [who, who], said
    assert said[0][1] == f"nothing heard from `{who}` for {named_s:g} s"
    assert said[1][1].startswith(f"heard from `{who}` again after ")
    assert any(each[who] == "silent" for each in states)


@pytest.mark.parametrize(("layout", "who", "carrier"), [pytest.param(*cell, marks=marks(cell)) for cell in CELLS])
def test_a_suspended_worker_is_named_and_the_run_goes_on_with_the_same_results(layout, who, carrier):
    def local_of(**options):
        return Local(cartpole(layout), silence=SHORT, **CARRIERS[carrier], **options)

    check_goes_on(local_of, layout, who, SUSPENDED_S, 1.0)


@pytest.mark.parametrize("who", ["env-0", pytest.param("actor+buffer+learner", marks=pytest.mark.long)])
def test_a_suspended_worker_of_an_agent_is_named_and_the_run_goes_on(who, tmp_path):
    with Agent(make_token(tmp_path)) as agent:

        def local_of(**options):
            return Local(cartpole("fine x1"), cluster=agent.cluster, silence=SHORT, **options)

        check_goes_on(local_of, "fine x1", who, SUSPENDED_S, 1.0)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "who", "carrier"), CELLS)
def test_with_the_times_of_a_users_run_a_worker_is_named_after_10_s(layout, who, carrier):
    def local_of(**options):
        return Local(cartpole(layout), **CARRIERS[carrier], **options)

    check_goes_on(local_of, layout, who, 15.0, 10.0)


@pytest.mark.parametrize(("layout", "who", "carrier"), [pytest.param(*cell, marks=marks(cell)) for cell in CELLS])
def test_a_worker_that_stays_suspended_ends_the_run_with_one_error(layout, who, carrier):
    local = Local(cartpole(layout), silence=Silence(dead_s=3.0, named_s=1.0), **CARRIERS[carrier])
    with contextlib.closing(local):
        local.start(KEY)
        local.run(0, 10)
        pid = local.pool.handles[who].process.pid
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            local.run(10, 100_000)
        assert time.monotonic() - began < 15.0
    assert str(caught.value) == (
        f"Nothing heard from `{who}` (process {pid}) for 3 s.\n`{who}` is stopped, its machine is overloaded or asleep, or its "
        "network connection is cut. To wait longer for a silent worker, give --silence SECONDS (silence=)."
    )
    (story,) = caught.value.__notes__
    assert story.startswith("What the coordinator saw, and when:\n")
    assert f"Announce {who}" in story and story.endswith("RaiseError FellSilent")


def test_a_worker_that_is_suspended_while_a_large_command_is_sent_ends_the_run():
    """The socket to the worker fills up in the middle of the command."""
    local = Local(cartpole("fine x1"), silence=Silence(dead_s=3.0, named_s=1.0))
    with contextlib.closing(local):
        local.start(KEY)
        os.kill(local.pool.handles["env-0"].process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match="Nothing heard from `env-0` "):
            local.conversation.tell("env-0", {"kind": "start"}, [np.zeros(50_000_000, np.uint8)])


def collectives(seconds: float, silence: Silence, *, quiet_s: float = 0.0) -> list[str]:
    """Suspend one of two learners that combine gradients, `quiet_s` seconds after the first iterations.

    Returns the lines of `on_output`, which name a silent worker.
    """
    said: list[str] = []
    local = Local(planned("multi_learner"), silence=silence, on_output=lambda _, line: said.append(line))
    who = next(name for name in local.pool.handles if name.endswith("1"))
    with contextlib.closing(local):
        local.start(KEY)
        local.run(0, 10)
        time.sleep(quiet_s)
        wake = suspend_for(local, who, seconds)
        local.run(10, 200)
        wake.join()
    return said


def test_a_suspended_learner_with_collectives_does_not_end_the_run():
    assert [line.partition(" for ")[0].partition(" again")[0] for line in collectives(SUSPENDED_S, SHORT)] == [
        "nothing heard from `env+actor+buffer+learner-1`",
        "heard from `env+actor+buffer+learner-1`",
    ]


@pytest.mark.long
def test_a_learner_that_is_suspended_for_130_s_does_not_abort():
    """By default, JAX aborts all learners when one learner is silent for 100 s. Choreo changes this default.

    For some seconds after the start, gRPC waits for the answer to a ping, and allows 60 s for it: see `Silence.collective_s`.
    """
    assert len(collectives(130.0, Silence(), quiet_s=30.0)) == 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thoughtful(Tiny):
    """`Tiny` with a learner that sleeps for 3 s in Python in iteration 1."""

    def iterate(self, env, carry, key):
        carry, metrics = super().iterate(env, carry, key)
        think = choreo.host_fragment("learner", think_once, jax.ShapeDtypeStruct((), np.int32))
        return carry._replace(train=carry.train._replace(iterations=think(carry.train.iterations))), metrics


def think_once(iterations):
    if iterations == 1:
        time.sleep(3.0)
    return iterations


def test_a_worker_that_answers_but_does_not_move_is_named_with_its_stack_and_is_not_dead():
    said: list[tuple[str, str]] = []
    plan = choreo.plan(Thoughtful(unroll=4), envs.make("CartPole-v1", 2), choreo.fine(1))
    silence = Silence(dead_s=1.5, named_s=1.0, stuck_s=1.0)
    with contextlib.closing(Local(plan, silence=silence, on_output=lambda *line: said.append(line))) as local:
        local.start(KEY)
        said.clear()  # the start may also give such a line, because importing JAX takes seconds
        local.run(0, 3)
    ((who, line),) = said
    assert who == "actor+buffer+learner"
    assert line.startswith("`actor+buffer+learner` answers, but has made no progress for ")
    assert "time.sleep(3.0)" in line


@pytest.mark.parametrize("given", ["0", "-3", "nan", "inf", "1e9"])
def test_a_limit_that_makes_no_sense_is_refused_before_anything_starts(given, tmp_path, capsys):
    command = ["train", "a2c", "jax:CartPole-v1", "--steps", "64", "--out", str(tmp_path / "run"), "--quiet"]
    assert main.main([*command, "--silence", given]) == 1
    assert capsys.readouterr().err.endswith(
        "Give --silence (silence=) a number of seconds between 1 and 1,000,000; the default is 300.\n"
    )
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match="cannot count as dead after"):
        choreo.train("a2c", "jax:CartPole-v1", steps=64, silence=float(given))
