"""A single primitive on blocks, by its rule in `rules.py`."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jec

from choreo import _compat
from choreo.partition.lattice import Demand, Form, Get, Mixes, Size
from choreo.partition.rules import Split, split


def by_rule(eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size) -> "ByRule":
    """The way of a primitive, made by its rule. Raises `Mixes` if the primitive has no rule, or if its rule does not fit."""
    axes = [form.axis for form in forms]
    try:
        return ByRule(eqn, split(eqn, axes, size), forms)
    except Mixes:
        # For a whole operand, the axis is only a proposal. Try again without these proposals: a table that all environments
        # read, for example, must stay whole.
        fewer = [None if form.whole else form.axis for form in forms]
        if fewer == axes or all(axis is None for axis in fewer):
            raise
        return ByRule(eqn, split(eqn, fewer, size), forms)


class ByRule:
    """The way of a primitive: the same primitive on blocks, with the parameters that its rule gives for a block."""

    def __init__(self, eqn: jec.JaxprEqn, rule: Split, forms: Sequence[Form]):
        for form, axis in zip(forms, rule.ins, strict=True):
            if not form.whole and form.axis != axis:
                raise Mixes(f"`{eqn.primitive.name}` needs data of other environments")
        self.eqn, self.rule, self.native = eqn, rule, rule.outs

    def demand(self, outs: Sequence[bool]) -> Demand:
        return [{axis} for axis in self.rule.ins]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        return _compat.bind(self.eqn, self.rule.params, [get(i, axis) for i, axis in enumerate(self.rule.ins)])
