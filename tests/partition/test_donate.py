"""Donation: a result takes over the memory of an input only if nothing else can read this memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo.layouts import Group, Layout, coarse, fine, fused
from choreo.partition.program import Loop, Program, Segment, Transfer
from choreo.partition.program import walk as walk_steps
from choreo.plans.build import plan
from choreo.runtime.inprocess import InProcess
from laws.reference import assert_close, assert_same_bits, planned_run, reference_run
from partition.ponds import WALK, Functions, Pond, push, pushed, still

SIZE = 1 << 16
KEY = jax.random.key(5)


@choreo.fragment("learner")
def add(buffer, w, s, at):
    """Write one row of a large array, as a replay buffer does, and learn from a different row."""
    buffer = jax.lax.dynamic_update_slice(buffer, s.reshape(1, -1), (at, 0))
    return buffer, w - 0.1 * jnp.mean(buffer[at // 2]), at + 1


def start(env, key):
    carry = still(env, key)
    return {"s": carry["s"], "w": carry["w"], "buffer": jnp.zeros((SIZE, 18)), "at": jnp.int32(0)}


def go(env, carry, key):
    s = pushed(env, carry)
    buffer, w, at = add(carry["buffer"], carry["w"], s, carry["at"])
    return {"s": s, "w": w, "buffer": buffer, "at": at}, {"sum": jnp.sum(w)}


REPLAY = Functions(start, go)


def buffers(runtime: InProcess) -> list[jax.Array]:
    return [
        leaf
        for leaves in runtime.execution.leaves.values()
        for leaf in leaves
        if leaf is not None and leaf.shape == (SIZE, 18)
    ]


@pytest.mark.parametrize(
    "layout", [fused(), coarse(1), coarse(2), fine(1)], ids=["fused", "coarse x1", "coarse x2", "fine x1"]
)
def test_a_large_buffer_is_updated_in_place(layout):
    runtime = InProcess(plan(REPLAY, Pond(), layout))
    runtime.start(KEY)
    runtime.run(0, 1)
    addresses = set()
    for i in range(1, 5):
        runtime.run(i, i + 1)
        (buffer,) = buffers(runtime)
        addresses.add(buffer.unsafe_buffer_pointer())
    assert len(addresses) == 1, "the buffer was copied"
    rows = np.asarray(runtime.carry()["buffer"])
    assert np.all(np.any(rows[:5] != 0, axis=1)) and not np.any(rows[5:])


def donated(program: Program) -> dict[str, set[str]]:
    """For each segment, by name: the labels of the inputs that are donated."""
    return {s.name: {s.ins[p].label for p in s.donated} for s, _ in walk_steps(program.steps) if isinstance(s, Segment)}


class TestDonatedInputs:
    def test_fused_donates_all_carried_values(self):
        assert donated(plan(WALK, Pond(), fused()).iterate) == {"4 x (act+step)+learn": {"['w']", "['slow']", "['s']"}}

    def test_keys_and_iteration_are_never_donated(self):
        for layout in (fused(), coarse(2), fine(2)):
            for labels in donated(plan(WALK, Pond(), layout).iterate).values():
                assert not labels & {"key", "iteration"}

    def test_a_receiver_gets_a_copy_of_a_value_that_the_sender_donates(self):
        """The learner donates `w` after it has sent `w` to the actor, so the actor must have a copy."""
        program = plan(WALK, Pond(), coarse(1)).iterate
        assert donated(program) == {"4 x (act+step)": {"['s']"}, "learn": {"['w']", "['slow']"}}
        copied = {
            move.label: move.copied for step in program.steps if isinstance(step, Transfer) for move in step.moves
        }
        assert copied["['w']"]

    def test_an_input_that_is_read_later_is_not_donated(self):
        @choreo.fragment("learner")
        def improve(w, s):
            return w - jnp.mean(s, 0)

        @choreo.fragment("learner")
        def difference(before, after, s):
            return before - after * jnp.mean(s, 0)

        def two_segments(env, carry, key):
            """The learner runs, then the environments, then the learner again. The second segment of the learner also reads the
            old weights."""
            w = improve(carry["w"], carry["s"])
            s = env.step(carry["s"], jax.vmap(push, (None, 0))(w, carry["s"]))
            return {"w": w, "s": s, "slow": difference(carry["w"], w, s)}, {"m": jnp.sum(carry["slow"])}

        algo = Functions(still, two_segments)
        program = plan(algo, Pond(), coarse(1)).iterate
        first = next(s for s in program.steps if isinstance(s, Segment) and "improve" in s.name)
        assert not {"['w']"} & {first.ins[p].label for p in first.donated}
        assert_same_bits(planned_run(algo, Pond(), coarse(1), KEY), reference_run(algo, Pond(), KEY))

    def test_inputs_of_a_split_loop_and_values_inside_it_are_not_donated(self):
        for layout in (fine(2), Layout(Group("env"), Group("actor"), Group("learner"))):
            program = plan(WALK, Pond(), layout).iterate
            (loop,) = [step for step in program.steps if isinstance(step, Loop)]
            assert not any(s.donated for s in loop.body if isinstance(s, Segment))
            outside = {
                ref
                for part in loop.parts.values()
                for _, ref, *_ in (*part.consts, *part.carry, *part.xs, *part.slices)
            }
            taken = {s.ins[p].slot for s in program.steps if isinstance(s, Segment) for p in s.donated}
            assert not outside & taken

    def test_no_more_inputs_are_donated_than_there_are_results_of_the_same_type(self):
        """XLA warns if no result has the type of a donated input. In tests, a warning is an error."""

        @choreo.fragment("learner")
        def merge(a, b, s):
            return a + b + jnp.mean(s, 0)

        def merging(env, carry, key):
            s = env.step(carry["s"], carry["s"])
            w = merge(carry["w"], carry["slow"], s)
            return {"w": w, "slow": w[::-1] * 0.5, "s": s}, {"m": jnp.sum(w)}

        algo = Functions(still, merging)
        for segment, _ in walk_steps(plan(algo, Pond(), coarse(1)).iterate.steps):
            if isinstance(segment, Segment):
                given = [str(segment.ins[p].aval) for p in segment.donated]
                results = [str(aval) for aval in segment.out_avals]
                assert all(given.count(aval) <= results.count(aval) for aval in given)
        assert_same_bits(planned_run(algo, Pond(), coarse(1), KEY), reference_run(algo, Pond(), KEY))


TWINS = {
    "returned by init": lambda w: {"w": w, "slow": w},
    "a constant of the user": lambda w: {"w": GLOBAL, "slow": GLOBAL},
}
"""Functions that return one array as two leaves."""
GLOBAL = jnp.array([0.5, 1.0, 1.5])


@pytest.mark.parametrize(
    "layout", [fused(), coarse(1), coarse(2), fine(1)], ids=["fused", "coarse x1", "coarse x2", "fine x1"]
)
@pytest.mark.parametrize("twins", TWINS.values(), ids=TWINS)
def test_one_array_may_be_two_leaves_of_the_first_carry(layout, twins):
    """Both leaves are donated, and different results take over their memory. So each leaf must be a separate copy of the array."""

    @choreo.fragment("learner")
    def improve(w, slow, s):
        return w - 0.1 * jnp.mean(s, 0), 0.9 * slow + 0.1 * w

    def start(env, key):
        carry = still(env, key)
        return twins(carry["w"]) | {"s": carry["s"]}

    def share(env, carry, key):
        s = pushed(env, carry)
        w, slow = improve(carry["w"], carry["slow"], s)
        return {"w": w, "slow": slow, "s": s}, {"m": jnp.sum(slow)}

    algo = Functions(start, share)
    assert_close(planned_run(algo, Pond(), layout, KEY, 4), reference_run(algo, Pond(), KEY, 4), 1e-5)
    np.testing.assert_array_equal(GLOBAL, [0.5, 1.0, 1.5])


def test_one_result_may_be_two_leaves_of_the_next_carry():
    """For example, a target network becomes a copy of the trained network. The two leaves must not share memory."""

    @choreo.fragment("learner")
    def improve(w, slow, s):
        w = w - 0.1 * jnp.mean(s, 0) + 0.01 * slow
        return w, w

    def copy_target(env, carry, key):
        s = env.step(carry["s"], jax.vmap(push, (None, 0))(carry["slow"], carry["s"]))
        w, slow = improve(carry["w"], carry["slow"], s)
        return {"w": w, "slow": slow, "s": s}, {"m": jnp.sum(slow)}

    # With fewer environments, the loop of `fused` would touch less than 1 kB. XLA compiles such a loop into one kernel, which
    # rounds differently from `jax.jit` of one iteration.
    algo, env = Functions(still, copy_target), Pond(num_envs=64)
    reference = reference_run(algo, env, KEY, 4)
    for layout in (fused(), coarse(1), fine(1)):
        assert_same_bits(planned_run(algo, env, layout, KEY, 4), reference)
