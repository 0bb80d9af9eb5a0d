"""A host method (`choreo.host_method`) on blocks: Python that each site calls for its own environments."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jec

from choreo.partition.lattice import Demand, Form, Get, Mixes, Size


class OnHost:
    """The way of a host method. Each site makes its own object, for its own block of environments, and calls the method on it.

    All operands and results are blocks along axis 0.
    """

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size):
        if size.is_mapped:
            raise Mixes(
                f"each object of a host method holds whole environments, so the axis `{size.name}` cannot be divided"
            )
        for var, form in zip(eqn.invars, forms, strict=True):
            if not var.aval.shape or var.aval.shape[0] != size.full or not (form.whole or form.axis == 0):  # pyright: ignore[reportAttributeAccessIssue]
                raise Mixes("a host method needs operands whose first axis is the env axis")
        self.native = [0] * len(eqn.outvars)
        self.num_ins = len(eqn.invars)

    def demand(self, outs: Sequence[bool]) -> Demand:
        return [{0} for _ in range(self.num_ins)]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        raise AssertionError("a host method is called by the site, never inside a segment")
