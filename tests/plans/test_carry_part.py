"""`part_of` finds a part of a carry by the name of its field or key, and counts the leaves before the part."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from choreo.errors import UnknownNameError
from choreo.plans.carry_part import part_of


class Carry(NamedTuple):
    first: dict[str, int]
    train: tuple[int, ...]
    empty: None
    last: int


CARRY = Carry(first={"b": 1, "a": 0}, train=(2, 3, 4), empty=None, last=5)


@pytest.mark.parametrize("carry", [CARRY, CARRY._asdict()], ids=["NamedTuple", "dict"])
def test_a_part_has_the_leaves_at_its_places(carry):
    leaves = jax.tree.leaves(carry)
    for name, expected in CARRY._asdict().items():
        part, places = part_of(carry, name)
        assert part == expected
        assert [leaves[i] for i in places] == jax.tree.leaves(part)


def test_an_unknown_part_is_refused():
    with pytest.raises(UnknownNameError) as refusal:
        part_of(CARRY, "weights")
    assert str(refusal.value) == "There is no part of the carry `weights`.\nKnown: empty, first, last, train."
    with pytest.raises(UnknownNameError, match="There is no part of the carry `train`"):
        part_of(jnp.zeros(3), "train")
