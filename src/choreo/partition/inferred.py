"""The results of `inference.py`: the form of every variable of a program, and how to evaluate the program on blocks.

    demand(inference, pieces of outputs)                   backward: which pieces of inputs and results are needed
    emit(inference, pieces of inputs, pieces of outputs)   forward: computes just the pieces that are needed

Random numbers are the same for any number of replicas, because a value that depends on no environment is computed whole
and then sliced. The slice is taken as early as possible: an equation that can run on blocks reads slices of its operands, and only
the equations before it compute whole values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.extend.core as jec

from choreo import _compat
from choreo.partition.lattice import Demand, Form, Get, Mixed, Mixes, Size, Way, slice_block
from choreo.partition.program import Axis
from choreo.partition.whole_equations import evaluate_whole


@dataclass(frozen=True, eq=False)
class InferredEqn:
    """One equation with the forms of its results, and how it is evaluated at a replica."""

    eqn: jec.JaxprEqn
    whole: bool
    """Are all operands whole? Then a replica can run the equation of the full program unchanged."""
    way: Way | None
    """How the equation runs on blocks. None: it cannot, or all operands are whole and none has a proposed axis."""
    outs: tuple[Form, ...]
    """The forms of its results."""

    def uses(self, wanted: Demand) -> tuple[bool, list[bool]]:
        """Return whether the equation must run on whole operands, and which results its way must compute, to give these pieces."""
        run_whole, native = False, [False] * len(wanted)
        for o, pieces in enumerate(wanted):
            for axis in pieces:
                if mixed := self.outs[o].mixed:
                    raise Mixes(mixed)
                offered = self.way.native[o] if self.way else "nothing"
                if offered == axis and not (axis is None and self.whole):
                    native[o] = True
                elif self.whole:
                    run_whole = True
                elif offered is None:
                    native[o] = True  # the way gives the whole result, from which the block is sliced
                else:
                    raise Mixes(
                        Mixed(f"`{self.eqn.primitive.name}` would have to be computed for all environments", "")
                    )
        return run_whole, native

    def demand(self, wanted: Demand) -> Demand:
        """The pieces of the operands that the equation reads, to compute the wanted pieces of its results."""
        run_whole, native = self.uses(wanted)
        use_way = self._uses_way(run_whole, native)
        need = self.way.demand(native) if self.way and use_way else [set() for _ in self.eqn.invars]
        if run_whole or (self.eqn.effects and not use_way):
            if not self.whole:
                why = f"`{self.eqn.primitive.name}` has an effect on data of all environments"
                raise Mixes(Mixed(why, _compat.where(self.eqn)))
            need = [pieces | {None} for pieces in need]
        return need

    def _uses_way(self, run_whole: bool, native: Sequence[bool]) -> bool:
        """Does the equation run on blocks? If it has an effect, it runs even if no result is wanted: on blocks if possible."""
        return self.way is not None and (any(native) or (bool(self.eqn.effects) and not run_whole))

    def emit(self, get: Get, wanted: Demand, index: Any, size: Size) -> list[dict[Axis, Any]]:
        """Compute the wanted pieces of each result, at replica `index`."""
        run_whole, native = self.uses(wanted)
        results: list[dict[Axis, Any]] = [{} for _ in wanted]
        use_way = self._uses_way(run_whole, native)
        if run_whole or (self.eqn.effects and not use_way):
            values = evaluate_whole(self.eqn, [get(i, None) for i in range(len(self.eqn.invars))])
            for pieces, value in zip(results, values, strict=True):
                pieces[None] = value
        if self.way and use_way:
            for o, value in enumerate(self.way.emit(get, native, index)):
                if native[o]:
                    results[o][self.way.native[o]] = value  # pyright: ignore[reportArgumentType]
        for pieces, axes in zip(results, wanted, strict=True):
            for axis in axes - pieces.keys():
                pieces[axis] = slice_block(pieces[None], axis, index, size)
        return results


@dataclass(eq=False)
class Inference:
    """A jaxpr, with the forms and the way of each equation."""

    closed: jec.ClosedJaxpr
    size: Size
    eqns: list[InferredEqn]
    """One for each equation, in order."""
    outs: list[Form]
    """The forms of its outputs."""
    demands: dict[Any, tuple[Demand, list[Demand]]] = field(default_factory=dict)
    """The results of earlier calls of `demand`. Without this cache, the innermost of d nested calls would be
    visited 2^d times."""

    def native(self) -> list[Axis | Mixed]:
        """The piece of each output that is computed directly, or why there is none."""
        return [form.mixed or form.axis for form in self.outs]


def demand(inference: Inference, wanted: Demand) -> tuple[Demand, list[Demand]]:
    """Which pieces are needed of the inputs, and of the results of every equation, to compute the wanted outputs."""
    asked = tuple(frozenset(pieces) for pieces in wanted)
    if asked in inference.demands:
        return inference.demands[asked]
    jaxpr = inference.closed.jaxpr
    needs: dict[Any, set[Axis]] = {}

    def need(var, pieces):
        if not isinstance(var, jec.Literal):
            needs.setdefault(var, set()).update(pieces)

    for var, pieces in zip(jaxpr.outvars, wanted, strict=True):
        need(var, pieces)
    per_eqn: list[Demand] = []
    for inferred in reversed(inference.eqns):
        outs = [needs.get(v, set()) for v in inferred.eqn.outvars]
        per_eqn.append(outs)
        if any(outs) or inferred.eqn.effects:
            for var, pieces in zip(inferred.eqn.invars, inferred.demand(outs), strict=True):
                need(var, pieces)
    inference.demands[asked] = [needs.get(v, set()) for v in jaxpr.invars], per_eqn[::-1]
    return inference.demands[asked]


def emit(
    inference: Inference, inputs: Sequence[Mapping[Axis, Any]], wanted: Demand, index: Any
) -> list[dict[Axis, Any]]:
    """Compute the wanted pieces of the outputs from pieces of the inputs."""
    jaxpr, size = inference.closed.jaxpr, inference.size
    _, per_eqn = demand(inference, wanted)
    held: dict[Any, dict[Axis, Any]] = {
        v: {None: c} for v, c in zip(jaxpr.constvars, inference.closed.consts, strict=True)
    }
    held.update((v, dict(pieces)) for v, pieces in zip(jaxpr.invars, inputs, strict=True))

    def piece(var, axis):
        if isinstance(var, jec.Literal):
            return slice_block(var.val, axis, index, size)
        pieces = held[var]
        if axis not in pieces:
            pieces[axis] = slice_block(pieces[None], axis, index, size)
        return pieces[axis]

    for inferred, outs in zip(inference.eqns, per_eqn, strict=True):
        if any(outs) or inferred.eqn.effects:
            results = inferred.emit(lambda i, axis, eqn=inferred.eqn: piece(eqn.invars[i], axis), outs, index, size)
            held.update(zip(inferred.eqn.outvars, results, strict=True))
    return [{axis: piece(v, axis) for axis in axes} for v, axes in zip(jaxpr.outvars, wanted, strict=True)]
