"""Evaluate an equation unchanged, as it was traced for all environments, or only its wanted results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jec

from choreo import _compat
from choreo.roles import without_number


def evaluate_whole(eqn: jec.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Return the results of an equation, computed on all environments.

    The name of a fragment contains the number of its call, which differs from trace to trace. The number is removed here, so that
    equal programs have equal names.
    """
    return _compat.bind(eqn, _compat.rename_calls(eqn, without_number).params, values)


@dataclass(frozen=True, eq=False)
class Pruned:
    """A program without the equations and inputs that its wanted results do not need.

    A site that only acts does not receive the critic's weights: they are inputs that no wanted result needs.
    """

    closed: jec.ClosedJaxpr
    """The program that is left."""
    used: tuple[bool, ...]
    """Which inputs of the unpruned program are left."""
    wanted: tuple[bool, ...]
    """Which results of the unpruned program are left."""

    @classmethod
    def of(cls, closed: jec.ClosedJaxpr, wanted: Sequence[bool]) -> "Pruned":
        pruned, used = _compat.prune(closed, wanted)
        return cls(pruned, used, tuple(wanted))

    @classmethod
    def of_eqn(cls, eqn: jec.JaxprEqn, wanted: Sequence[bool]) -> "Pruned":
        avals = [_compat.struct_of(v.aval) for v in eqn.invars]
        return cls.of(jax.make_jaxpr(lambda *values: evaluate_whole(eqn, values))(*avals), wanted)

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Compute the results from the used inputs; None for each result that is not wanted."""
        results = iter(_compat.eval_jaxpr(self.closed, values))
        return [next(results) if want else None for want in self.wanted]
