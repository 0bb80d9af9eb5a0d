"""Messages give each receiver its piece of a value, for any number of senders and receivers, and for any axes of the pieces. Loops
stack the results of their rounds. `_read_once` finds the slots that have one segment as their only reader."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreo.host import HostObjects
from choreo.partition.program import Constant, HostCall, Input, Loop, LoopPart, Move, Port, Program, Segment, Transfer
from choreo.runtime.engine import machine
from choreo.runtime.engine.backend import PythonOnly
from choreo.runtime.engine.blocks import block
from choreo.runtime.engine.jax_backend import reshard
from choreo.runtime.engine.messages import Topology, messages

AXES = st.sampled_from([None, 0, 1])
COUNTS = st.sampled_from([1, 2, 3, 4])


@given(senders=COUNTS, receivers=COUNTS, src_axis=AXES, dst_axis=AXES)
def test_overlaps_add_up_to_the_block_of_each_receiver(senders, receivers, src_axis, dst_axis):
    whole = np.arange(12 * 24 * 2).reshape(12, 24, 2)
    move = Move("x", jax.ShapeDtypeStruct(whole.shape, whole.dtype), 0, src_axis, 1, dst_axis)
    held = [block(whole, src_axis, s, senders) for s in range(senders)]
    process_of_site = {("a", s): f"a-{s}" for s in range(senders)} | {("b", d): f"b-{d}" for d in range(receivers)}
    found = messages(Transfer("a", "b", (move,)), Topology(me="a-0", process_of_site=process_of_site))
    for d in range(receivers):
        expected = np.asarray(reshard([jax.numpy.asarray(x) for x in held], move, d, receivers))
        np.testing.assert_array_equal(expected, block(whole, dst_axis, d, receivers))
        got = np.full(expected.shape, -1)
        for message in (message for (_, dst), message in found.items() if dst == f"b-{d}"):
            for overlap in message:
                sent = held[overlap.sender][overlap.take]
                assert sent.shape == overlap.shape(whole.shape), (
                    "`overlap.shape`, from which the size of the channel follows, is wrong"
                )
                got[overlap.put] = sent
        np.testing.assert_array_equal(got, expected)


def test_a_value_that_all_senders_hold_is_sent_once():
    move = Move("x", jax.ShapeDtypeStruct((4,), np.dtype(np.float32)), 0, None, 1, None)
    process_of_site = {("a", 0): "a-0", ("a", 1): "a-1", ("b", 0): "b"}
    assert list(messages(Transfer("a", "b", (move,)), Topology(me="b", process_of_site=process_of_site))) == [
        ("a-0", "b")
    ]


@pytest.mark.parametrize(("src", "dst", "count"), [(0, 0, 4), (0, 1, 16), (None, 0, 4), (0, None, 16)])
def test_only_blocks_that_overlap_are_sent(src, dst, count):
    move = Move("x", jax.ShapeDtypeStruct((8, 8), np.dtype(np.float32)), 0, src, 1, dst)
    process_of_site = {("a", s): f"a-{s}" for s in range(4)} | {("b", d): f"b-{d}" for d in range(4)}
    found = messages(Transfer("a", "b", (move,)), Topology(me="a-0", process_of_site=process_of_site))
    assert sum(len(message) for message in found.values()) == count


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_stacks_the_results_of_its_rounds(reverse):
    """The results are small arrays, large arrays, and a constant. Large arrays are written directly into the stack."""
    large = machine.SMALL_BYTES  # an array of this many float32 numbers has 4 * SMALL_BYTES bytes
    reused = np.empty(1, np.int32)

    def count(x):
        reused[:] = x + 1  # a host function may return the same array object in every round
        return reused, np.full(large, x[0], np.float32)

    stacks = [_type((4, 1), np.int32), _type((4, large), np.float32), _type((4, 1), np.int32)]
    part = LoopPart(
        carry=((0, 10, 1, 11),),
        ys=tuple(zip((1, 2, Constant(np.full(1, 7, np.int32))), (12, 13, 14), stacks, strict=True)),
    )
    body = HostCall("env", "count", ins=(0,), sliced=(False,), outs=(1, 2), fn=count)
    program = Program(
        "iterate",
        steps=(Loop(4, reverse, {"env": part}, (body,)),),
        ins=(Port("x", _type((1,), np.int32), {"env": (10, None)}),),
        outs=tuple(Port(str(slot), None, {"env": (slot, None)}) for slot in (11, 12, 13, 14)),
    )
    site = ("env", 0)
    runner = machine.Machine(
        program, Topology(me="env", process_of_site={site: "env"}), PythonOnly(), {site: HostObjects()}
    )
    for first in (0, 5):
        last, small, rows, same = runner.run({site: {0: np.full(1, first, np.int32)}})[site]
        in_order = np.arange(first, first + 4)[:: -1 if reverse else 1]
        np.testing.assert_array_equal(last, [first + 4])
        np.testing.assert_array_equal(small[:, 0], in_order + 1)
        np.testing.assert_array_equal(rows, np.repeat(in_order, large).reshape(4, large))
        np.testing.assert_array_equal(same, np.full((4, 1), 7))
        assert (small.dtype, rows.dtype) == (np.int32, np.float32)


def test_read_once_finds_the_slots_that_only_one_segment_reads():
    """Slots 1 and 6 each have one reader, a segment. Two segments read slot 2. Slots 3, 4 and 5 each have two readers: one
    segment and one other reader, which is the output for slot 3, a loop for slot 4, and a transfer for slot 5."""
    program = Program(
        "iterate",
        steps=(
            _segment(1, 2, 3, 4, 5),
            _segment(2, 6),
            Loop(2, False, {"a": LoopPart(consts=((7, 4),))}, ()),
            Transfer("a", "b", (Move("x", None, 5, None, 8, None),)),
        ),
        ins=(),
        outs=(Port("y", None, {"a": (3, None)}),),
    )
    assert machine._read_once(program) == {1, 6}


def _segment(*slots: int) -> Segment:
    ins = tuple(Input(slot, False, None, None, "") for slot in slots)
    return Segment("a", "learn", ins, (), (), lambda *_: [])


def _type(shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))
