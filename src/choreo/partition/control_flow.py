"""Calls, loops and branches on blocks. Each class is the `Way` of one kind of equation that contains programs.

    Called         jit, remat, a custom derivative: the program inside, evaluated in place
    Scan           a loop over time: the same loop, with its body on blocks
    ScanOverEnvs   `lax.map` over the environments: the same loop over the replica's environments
    While          a loop whose predicate is the same at every replica, or has one value per environment
    Cond           a branch that is the same at every replica
    Solve          `custom_linear_solve`: the program of its solver

The forms of a loop's carry are a least fixed point: they start as the forms of the initial values, and rise until a round
changes none. `inference.py` imports this file, so this file cannot import `inference.py`. The classes that infer the programs
inside an equation get the function for this (`Infer`) as an argument.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.extend.core as jec
import jax.extend.core.primitives
import numpy as np
from jax import lax

from choreo import _compat
from choreo.partition.inferred import Inference, demand, emit
from choreo.partition.lattice import Demand, Form, Get, Mixed, Mixes, Way
from choreo.partition.program import Axis
from choreo.partition.reduce import combines

Infer = Callable[[jec.ClosedJaxpr, Sequence[Form]], Inference]
"""(a program, the forms of its inputs) -> its inference."""


class Called:
    """A call whose program is evaluated in place: jit, remat, a custom derivative."""

    def __init__(self, inner: Inference):
        self.inner, self.native = inner, inner.native()

    def demand(self, outs: Sequence[bool]) -> Demand:
        return demand(self.inner, _native_pieces(self.native, outs))[0]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        wanted = _native_pieces(self.native, outs)
        results = emit(self.inner, _given(get, demand(self.inner, wanted)[0]), wanted, index)
        return [_single(pieces) for pieces in results]


class Scan:
    """A scan over an axis that is not the env axis: the same loop, with its body on blocks."""

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form], infer: Infer):
        self.p = _compat.scan_params(eqn)
        c, k = self.p.num_consts, self.p.num_carry
        xs = [Form(form.whole, form.axis - 1 if form.axis else None) for form in forms[c + k :]]
        self.carry, self.inner = _carry_forms(
            forms[c : c + k],
            lambda carry: infer(self.p.body, [*forms[:c], *carry, *xs]),
            lambda inner: inner.outs[:k],
        )
        ys = [axis + 1 if isinstance(axis, int) else axis for axis in self.inner.native()[k:]]
        self.native = [*(form.axis for form in self.carry), *ys]

    def _wanted(self, outs: Sequence[bool]) -> Demand:
        """The pieces that are wanted of the body's results: those of all carried values, and the slices of the wanted stacks."""
        k = self.p.num_carry
        ys = [axis - 1 if isinstance(axis, int) else axis for axis in self.native[k:]]
        return [*({form.axis} for form in self.carry), *_native_pieces(ys, outs[k:])]

    def demand(self, outs: Sequence[bool]) -> Demand:
        c, k = self.p.num_consts, self.p.num_carry
        need = demand(self.inner, self._wanted(outs))[0]
        xs = [{axis if axis is None else axis + 1 for axis in axes} for axes in need[c + k :]]
        return [*need[:c], *({form.axis} for form in self.carry), *xs]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        c, k = self.p.num_consts, self.p.num_carry
        wanted = self._wanted(outs)
        given = _given(get, self.demand(outs))
        consts, init = given[:c], [_single(pieces) for pieces in given[c : c + k]]

        def body(carry, x):
            inputs = [*consts, *({f.axis: v} for f, v in zip(self.carry, carry, strict=True)), *_shift(x, -1)]
            results = [_single(pieces) for pieces in emit(self.inner, inputs, wanted, index)]
            return results[:k], results[k:]

        xs, unflatten = _flatten(given[c + k :])
        carry, ys = lax.scan(
            lambda carry, x: body(carry, unflatten(x)), init, xs, self.p.length, self.p.reverse, self.p.unroll
        )
        return [*carry, *ys]


class ScanOverEnvs:
    """`lax.map` over the environments: a scan that carries nothing.

    Step i computes row i of each result from row i of each stacked operand, and from constants that are the same on every
    replica. So block r of the results is the same scan over block r of the operands, whatever the body computes.
    """

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form]):
        self.p = _compat.scan_params(eqn)
        consts, xs = forms[: self.p.num_consts], forms[self.p.num_consts :]
        if self.p.num_carry or eqn.effects or combines(eqn):
            raise Mixes("`scan` goes through the environments one by one")
        if not all(form.whole for form in consts) or not all(form.whole or form.axis == 0 for form in xs):
            raise Mixes(
                "`scan` goes through the environments one by one, and reads data of other environments in each step"
            )
        self.native = [0] * len(eqn.outvars)

    def demand(self, outs: Sequence[bool]) -> Demand:
        return [{None} if i < self.p.num_consts else {0} for i in range(len(self.p.body.jaxpr.invars))]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        values = [_single(pieces) for pieces in _given(get, self.demand(outs))]
        consts, xs = values[: self.p.num_consts], values[self.p.num_consts :]

        def body(_, row):
            return None, _compat.eval_jaxpr(self.p.body, [*consts, *row])

        return lax.scan(body, None, xs, None, self.p.reverse, self.p.unroll)[1]


class While:
    """A while loop whose predicate is the same at every replica, or has one value per environment (`vmap` makes such loops)."""

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form], infer: Infer):
        self.eqn, self.p = eqn, _compat.while_params(eqn)
        c, b = self.p.num_cond_consts, self.p.num_body_consts
        self.cond_forms, self.body_forms, init = forms[:c], forms[c : c + b], forms[c + b :]

        def infer_both(carry):
            cond = infer(self.p.cond, [*self.cond_forms, *carry])
            return cond, infer(self.p.body, [*self.body_forms, *carry])

        self.carry, (self.cond, self.body) = _carry_forms(init, infer_both, lambda inner: inner[1].outs)
        self.predicate_axis = self._predicate_axis()
        if self.predicate_axis is not None and any(form.axis != self.predicate_axis for form in self.carry):
            self.carry = [Form(False, self.predicate_axis) for _ in self.carry]
            self.cond, self.body = infer_both(self.carry)
            if any(not self._one_per_environment(out) for out in [*self.cond.outs, *self.body.outs]):
                raise Mixes("`while` carries a value that does not have one row per environment")
        self.native = [form.axis for form in self.carry]

    def _predicate_axis(self) -> Axis:
        """The axis along which the predicate must be a block; None if it can be computed whole.

        A predicate that has axes was made by `vmap`. Its axes are the first axes of every carried value. The loop runs until
        the predicate of every row is false, and a row whose predicate is false keeps its values. If the predicate of a row
        reads only this row, a false predicate stays false. So the row does not depend on how many rounds the rows of other
        blocks need, and each replica can stop when its own rows are done. If one carried value is a block along an axis of
        the predicate, the predicate and all carried values must therefore be blocks along this axis. This includes values
        that every replica could compute whole, such as `arange`.
        """
        (predicate,) = self.cond.outs
        if predicate.mixed:
            raise Mixes(predicate.mixed)
        rank = len(self.p.cond.jaxpr.outvars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
        axes = {form.axis for form in self.carry if form.axis is not None and rank}
        axes |= set() if predicate.whole else {predicate.axis}
        if not any(axis < rank for axis in axes):  # pyright: ignore[reportOptionalOperand]
            return None
        if len(axes) > 1:
            raise Mixes("`while` carries environments along different axes")
        return axes.pop()

    def _one_per_environment(self, out: Form) -> bool:
        return not out.mixed and (out.whole or out.axis == self.predicate_axis)

    def _needs(self) -> tuple[Demand, Demand]:
        cond = demand(self.cond, [{self.predicate_axis}])[0]
        return cond, demand(self.body, [{form.axis} for form in self.carry])[0]

    def demand(self, outs: Sequence[bool]) -> Demand:
        c, b = self.p.num_cond_consts, self.p.num_body_consts
        cond, body = self._needs()
        return [*cond[:c], *body[:b], *({form.axis} for form in self.carry)]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        c, b = self.p.num_cond_consts, self.p.num_body_consts
        given = _given(get, self.demand(outs))
        cond_consts, unflatten_cond = _flatten(given[:c])
        body_consts, unflatten_body = _flatten(given[c : c + b])
        init = [_single(pieces) for pieces in given[c + b :]]

        def carried(values):
            return [{form.axis: v} for form, v in zip(self.carry, values, strict=True)]

        def cond(index, consts, carry):
            inputs = [*unflatten_cond(consts), *carried(carry)]
            return _single(emit(self.cond, inputs, [{self.predicate_axis}], index)[0])

        def body(index, consts, carry):
            inputs = [*unflatten_body(consts), *carried(carry)]
            return [_single(p) for p in emit(self.body, inputs, [{form.axis} for form in self.carry], index)]

        cond_jaxpr = jax.make_jaxpr(cond)(index, cond_consts, init)
        body_jaxpr = jax.make_jaxpr(body)(index, body_consts, init)
        params = self.eqn.params | {
            "cond_jaxpr": cond_jaxpr, "body_jaxpr": body_jaxpr,
            "cond_nconsts": 1 + len(cond_consts), "body_nconsts": 1 + len(body_consts),
        }  # fmt: skip
        return _compat.bind(self.eqn, params, [index, *cond_consts, index, *body_consts, *init])


class Cond:
    """A `cond` in which every replica takes the same branch, each on its own block."""

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form], infer: Infer):
        if not forms[0].whole:
            raise Mixes("`cond` branches on one environment's data")
        self.branches = [infer(branch, forms[1:]) for branch in eqn.params["branches"]]
        self.native = [self._common(outs) for outs in zip(*(branch.outs for branch in self.branches), strict=True)]

    @staticmethod
    def _common(outs: Sequence[Form]) -> Axis | Mixed:
        if mixed := next((form.mixed for form in outs if form.mixed), None):
            return mixed
        axes = {form.axis for form in outs if not form.whole}
        if len(axes) > 1:
            raise Mixes("the branches of `cond` leave the env axis in different places")
        return axes.pop() if axes else None

    def demand(self, outs: Sequence[bool]) -> Demand:
        needs = [demand(branch, _native_pieces(self.native, outs))[0] for branch in self.branches]
        return [{None}, *(set().union(*pieces) for pieces in zip(*needs, strict=True))]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        wanted = _native_pieces(self.native, outs)
        which, *operands = _given(get, self.demand(outs))
        flat, unflatten = _flatten(operands)
        branches = [
            lambda operands, branch=branch: [_single(p) for p in emit(branch, unflatten(operands), wanted, index) if p]
            for branch in self.branches
        ]
        results = iter(lax.switch(lax.convert_element_type(which[None], np.int32), branches, flat))
        return [next(results) if out else None for out in outs]


class Solve:
    """`custom_linear_solve`: its results are those of its solver; its other programs are only for derivatives."""

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form], infer: Infer):
        lengths, self.num_ins = eqn.params["const_lengths"], len(forms)
        start, end = lengths.matvec + lengths.vecmat, sum(lengths)
        self.used = [*range(start, start + lengths.solve), *range(end, self.num_ins)]
        solver = eqn.params["jaxprs"].solve
        self.inner = Called(infer(solver, [forms[i] for i in self.used]))
        self.native = self.inner.native

    def demand(self, outs: Sequence[bool]) -> Demand:
        need: list[Set[Axis]] = [set() for _ in range(self.num_ins)]
        for i, pieces in zip(self.used, self.inner.demand(outs), strict=True):
            need[i] = pieces
        return need

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        return self.inner.emit(lambda i, axis: get(self.used[i], axis), outs, index)


def _scan(eqn: jec.JaxprEqn, forms: Sequence[Form], infer: Infer) -> Way:
    p = _compat.scan_params(eqn)
    over_envs = any(form.axis == 0 and not form.whole for form in forms[p.num_consts + p.num_carry :])
    return ScanOverEnvs(eqn, forms) if over_envs else Scan(eqn, forms, infer)


CONTROL_FLOW: dict[jec.Primitive, Callable[[jec.JaxprEqn, Sequence[Form], Infer], Way]] = {
    jec.primitives.scan_p: _scan,
    jec.primitives.while_p: While,
    jec.primitives.cond_p: Cond,
    jec.primitives.linear_solve_p: Solve,
}


def _native_pieces(native: Sequence[Axis | Mixed], outs: Sequence[bool]) -> Demand:
    """The piece that a way computes of each result, if the result is wanted."""
    return [{axis} if out else set() for axis, out in zip(native, outs, strict=True)]  # pyright: ignore[reportReturnType]


def _given(get: Get, need: Demand) -> list[dict[Axis, Any]]:
    return [{axis: get(i, axis) for axis in axes} for i, axes in enumerate(need)]


def _single(pieces: Mapping[Axis, Any]) -> Any:
    return next(iter(pieces.values()), None)


def _flatten(given: Sequence[Mapping[Axis, Any]]) -> tuple[list[Any], Callable[[Sequence[Any]], list[dict[Axis, Any]]]]:
    """Return the pieces as a plain list, and the inverse function. JAX does not accept these dicts as pytrees: it sorts the keys
    of a dict, and None cannot be compared with a number."""
    keys = [list(pieces) for pieces in given]

    def unflatten(values):
        rest = iter(values)
        return [{axis: next(rest) for axis in axes} for axes in keys]

    return [value for pieces in given for value in pieces.values()], unflatten


def _shift(pieces: Sequence[Mapping[Axis, Any]], by: int) -> list[dict[Axis, Any]]:
    return [{axis if axis is None else axis + by: value for axis, value in one.items()} for one in pieces]


def _carry_forms(init: Sequence[Form], infer_body: Callable, outs_of: Callable) -> tuple[list[Form], Any]:
    """The forms of a loop's carry, as a least fixed point, and the result of `infer_body` for them.

    A form that is whole can become a block, and a block never becomes whole again, so the iteration ends.
    """
    carry = [Form(form.whole, None if form.whole else form.axis) for form in init]
    while True:
        inner = infer_body(carry)
        after = []
        for before, out in zip(carry, outs_of(inner), strict=True):
            if out.mixed:
                raise Mixes(out.mixed)
            after.append(before if out.whole else Form(False, out.axis))
            if not before.whole and after[-1].axis != before.axis:
                raise Mixes("a loop moves the env axis of a value that it carries")
        if after == carry:
            return carry, inner
        carry = after
