"""The law for stored states of Python environments: a run that continues from them has the same bits as a run that went on.

The states are stored by environment, so another number of workers, or one process, can load them.
"""

import functools

import jax
import numpy as np
import pytest

import choreo
from choreo.envs import make
from choreo.envs.gymnasium import from_factory
from choreo.errors import RunError
from choreo.host.states import encode
from choreo.layouts import Layout, coarse, fine, fused
from choreo.plans.build import plan
from choreo.runs import checkpoint
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from host.toys import Wander, WanderTogether
from laws.reference import assert_same_bits, named
from tiny import Tiny

KEY = jax.random.key(5)


@functools.cache
def planned(factory, layout: Layout):
    return plan(Tiny(unroll=5), from_factory(factory, 4, info_keys="steps" if factory is Wander else ()), layout)


def stored(runtime, layout, folder, factory=Wander):
    """Run 5 iterations, store the run, and run 5 more. Returns the result of the last 5 iterations."""
    running = runtime(planned(factory, layout))
    try:
        running.start(KEY)
        running.run(0, 5)
        states = running.host_states()
        assert states.lost == () and [len(each) for each in states.objects.values()] == [4]
        checkpoint.save_stream(folder / "c", running.plan.carry, running.stream, iteration=5, host=states)
        metrics = running.run(5, 10)
        return named(running.carry(), metrics)
    finally:
        running.close()


def continued(runtime, layout, folder, factory=Wander):
    """Load the run in a fresh runtime, and run 5 iterations. Returns their result."""
    running = runtime(planned(factory, layout))
    try:
        running.restore(checkpoint.load(folder / "c", running.plan.carry), KEY)
        states = checkpoint.load_host_states(folder / "c")
        assert states is not None
        running.load_host_states(states)
        metrics = running.run(5, 10)
        return named(running.carry(), metrics)
    finally:
        running.close()


FUSED, FINE_1, FINE_2 = (InProcess, fused()), (Local, fine(1)), (Local, fine(2))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(FUSED, FUSED, id="one process"),
        pytest.param((InProcess, fine(2)), FUSED, id="two sites in one process"),
        pytest.param(FINE_2, FINE_2, id="two workers"),
        pytest.param(FINE_2, FINE_1, id="two workers, then one"),
        pytest.param((InProcess, coarse(2)), (Local, coarse(2)), id="two that act, then two workers"),
    ],
)
def test_a_run_continues_bit_for_bit_from_stored_environments(before, after, tmp_path):
    went_on = stored(*before, tmp_path)
    assert_same_bits(continued(*after, tmp_path), went_on)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_vector_environments_continue_bit_for_bit(mode, tmp_path):
    factory = functools.partial(WanderTogether, mode=mode)
    went_on = stored(InProcess, fused(), tmp_path, factory)
    assert_same_bits(continued(InProcess, fused(), tmp_path, factory), went_on)


@pytest.mark.parametrize("runtime", [InProcess, Local])
def test_states_are_stored_by_environment_when_workers_do_not_wait_for_each_other(runtime):
    layout, states = coarse(2, max_lag=1, merge="any"), []
    for before in (runtime, InProcess):
        running = before(planned(Wander, layout))
        try:
            running.start(KEY)
            if states:
                running.load_host_states(states[0])
            else:
                running.run(0, 2)
            states.append(running.host_states())
        finally:
            running.close()
    (stored, loaded) = (encode(list(each.objects[0]), "x") for each in states)
    assert stored[0] == loaded[0] and len(stored[0]) == 4
    assert len({each.tobytes() for each in stored[1]}) == 4  # every environment has its own position
    assert [each.tobytes() for each in stored[1]] == [each.tobytes() for each in loaded[1]]


@pytest.mark.parametrize("runtime", [InProcess, Local])
def test_environments_without_state_are_named_and_never_loaded(runtime):
    the_plan = plan(Tiny(unroll=2), make("CartPole-v1", 4), fine(2))
    running = runtime(the_plan)
    try:
        running.start(KEY)
        states = running.host_states()
        assert states.lost == ("`CartPoleEnv` of `CartPole-v1` has no methods `state` and `load`.",)
        with pytest.raises(RunError, match="The state of the Python objects was not stored completely: `CartPoleEnv`"):
            running.load_host_states(states)
    finally:
        running.close()


class Drift:
    """A stateful function: adds a number that grows with every call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return np.asarray(x) + np.float32(self.calls)

    def state(self):
        return {"calls": self.calls}

    def load(self, state):
        self.calls = state["calls"]


def test_the_state_of_a_host_fragment_is_stored_and_loaded():
    carries = []
    for fn in (Drift(), Drift()):
        runtime = InProcess(plan(Drifting(fn), make("jax:CartPole-v1", 4), fused()))
        runtime.start(KEY)
        carries.append(runtime)
    first, second = carries
    first.run(0, 3)
    states = first.host_states()
    assert states.lost == () and states.objects == {0: [{"calls": 3}]}
    second.restore(first.carry(), KEY)
    second.load_host_states(states)
    assert_same_bits(second.run(3, 5), first.run(3, 5))


class Drifting(Tiny):
    """`Tiny` with a host fragment in its iteration."""

    def __new__(cls, fn):
        return super().__new__(cls)

    def __init__(self, fn):
        super().__init__(unroll=2)
        object.__setattr__(self, "drift", choreo.host_fragment("learner", fn, jax.ShapeDtypeStruct((), np.float32)))

    def iterate(self, env, carry, key):
        carry, metrics = super().iterate(env, carry, key)
        return carry, metrics | {"drift": self.drift(metrics["loss"])}
