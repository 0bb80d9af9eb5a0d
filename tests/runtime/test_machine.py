"""What is sent is what arrives: pieces from any number of senders to any number of receivers, in any blocks."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreo.partition.program import Move, Transfer
from choreo.runtime.device import block, reshard
from choreo.runtime.messages import Neighbourhood, messages

AXES = st.sampled_from([None, 0, 1])
COUNTS = st.sampled_from([1, 2, 3, 4])


@given(senders=COUNTS, receivers=COUNTS, src_axis=AXES, dst_axis=AXES)
def test_pieces_make_up_what_each_receiver_gets(senders, receivers, src_axis, dst_axis):
    whole = np.arange(12 * 24 * 2).reshape(12, 24, 2)
    move = Move("x", jax.ShapeDtypeStruct(whole.shape, whole.dtype), 0, src_axis, 1, dst_axis)
    held = [block(whole, src_axis, s, senders) for s in range(senders)]
    homes = {("a", s): f"a-{s}" for s in range(senders)} | {("b", d): f"b-{d}" for d in range(receivers)}
    found = messages(Transfer("a", "b", (move,)), Neighbourhood(me="a-0", homes=homes))
    for d in range(receivers):
        expected = np.asarray(reshard([jax.numpy.asarray(x) for x in held], move, d, receivers))
        np.testing.assert_array_equal(expected, block(whole, dst_axis, d, receivers))
        got = np.full(expected.shape, -1)
        for pieces in (p for (_, dst), p in found.items() if dst == f"b-{d}"):
            for piece in pieces:
                sent = held[piece.sender][piece.take]
                assert sent.shape == piece.shape(whole.shape), "what the channel makes room for"
                got[piece.put] = sent
        np.testing.assert_array_equal(got, expected)


def test_a_value_that_everybody_holds_is_sent_once():
    move = Move("x", jax.ShapeDtypeStruct((4,), np.dtype(np.float32)), 0, None, 1, None)
    homes = {("a", 0): "a-0", ("a", 1): "a-1", ("b", 0): "b"}
    assert list(messages(Transfer("a", "b", (move,)), Neighbourhood(me="b", homes=homes))) == [("a-0", "b")]


@pytest.mark.parametrize(("src", "dst", "count"), [(0, 0, 4), (0, 1, 16), (None, 0, 4), (0, None, 16)])
def test_only_blocks_that_meet_are_sent(src, dst, count):
    move = Move("x", jax.ShapeDtypeStruct((8, 8), np.dtype(np.float32)), 0, src, 1, dst)
    homes = {("a", s): f"a-{s}" for s in range(4)} | {("b", d): f"b-{d}" for d in range(4)}
    found = messages(Transfer("a", "b", (move,)), Neighbourhood(me="a-0", homes=homes))
    assert sum(len(pieces) for pieces in found.values()) == count
