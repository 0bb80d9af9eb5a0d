"""What a replica can compute from its block of the environments, proved equation by equation.

A value at a replica has a *form*: it is there whole (the same on every replica), or can be had as a block along one axis, or
both (a random key split E ways, say: computed whole, or only this replica's rows), or neither: then it mixes environments.
A *piece* of a value is one thing a replica holds of it, named by an axis: `None` for the whole, k for the block along axis k.

    infer(jaxpr, forms of inputs)        forward: the form of every variable, and a `Way` to compute every equation
    demand(inference, pieces of outputs) backward: which pieces of the inputs are needed
    emit(inference, pieces of inputs)    forward: computes just the pieces demanded

Randomness comes out the same however many replicas there are, because a value that depends on no environment is computed
whole and cut; the cut sinks back through every equation that can run on a block, so only the first producer runs whole.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jec
import jax.extend.core.primitives
import numpy as np
from jax import lax

from choreo import _compat
from choreo.host import HostMethod
from choreo.partition.forms import WHOLE, Demand, Form, Get, Mixed, Way, cut
from choreo.partition.mapped import Mapped, name_the_mark
from choreo.partition.reduce import AllReduce, combines
from choreo.partition.rows import Fact, Facts, OwnRows
from choreo.partition.split import Axis, Mixes, Size, Split, split
from choreo.roles import SHARD_NUMBERS, find_call, find_reduction, without_number


@dataclass(frozen=True, eq=False)
class InferredEqn:
    """One equation with the forms of its operands and results, and its way to run on blocks."""

    eqn: jec.JaxprEqn
    whole: bool
    """All operands can be had whole: the equation can run as it stands in the full program."""
    way: Way | None
    outs: tuple[Form, ...]

    def uses(self, wanted: Demand) -> tuple[bool, list[bool]]:
        """Does it run whole, and which results come from its blocks, to give the wanted pieces?"""
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
                    native[o] = True  # the same on every replica, then cut
                else:
                    raise Mixes(
                        Mixed(f"`{self.eqn.primitive.name}` would have to be computed for all environments", "")
                    )
        return run_whole, native

    def demand(self, wanted: Demand) -> Demand:
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
        """An effect happens even if no result is wanted: on blocks if it can, else whole."""
        return self.way is not None and (any(native) or (bool(self.eqn.effects) and not run_whole))

    def emit(self, get: Get, wanted: Demand, index: Any, size: Size) -> list[dict[Axis, Any]]:
        run_whole, native = self.uses(wanted)
        results: list[dict[Axis, Any]] = [{} for _ in wanted]
        use_way = self._uses_way(run_whole, native)
        if run_whole or (self.eqn.effects and not use_way):
            values = run(self.eqn, [get(i, None) for i in range(len(self.eqn.invars))])
            for pieces, value in zip(results, values, strict=True):
                pieces[None] = value
        if self.way and use_way:
            for o, value in enumerate(self.way.emit(get, native, index)):
                if native[o]:
                    results[o][self.way.native[o]] = value  # pyright: ignore[reportArgumentType]
        for pieces, axes in zip(results, wanted, strict=True):
            for axis in axes - pieces.keys():
                pieces[axis] = cut(pieces[None], axis, index, size)
        return results


def run(eqn: jec.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """An equation of the full program, as it stands; the numbers of fragments' calls are not part of what is compiled."""
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
        return cls.of(jax.make_jaxpr(lambda *values: run(eqn, values))(*avals), wanted)

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Compute the results from the used inputs; None for each result that is not wanted."""
        results = iter(_compat.eval_jaxpr(self.closed, values))
        return [next(results) if want else None for want in self.wanted]


def infer_step(
    eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size, at: str = "", facts: Sequence[Fact] = ()
) -> InferredEqn:
    """The forms of an equation's results.

    `at`: the user's line, if it is known; `facts`: what is known of its operands, see `rows.py`.
    """
    at = at or _compat.where(eqn)
    forms = [_in_blocks(var, form, size, at) for var, form in zip(eqn.invars, forms, strict=True)]
    call = find_call(_compat.call_name(eqn))
    # Python is called for the replica's own environments, also where its operands are the same everywhere.
    on_host = call is not None and isinstance(call.host, HostMethod)
    impure = None if call is not None and call.host else _compat.impure_primitive(eqn)
    whole = all(form.whole for form in forms) and not on_host and impure is None
    try:
        if impure is not None and _compat.inner_jaxpr(eqn) is None:
            # Each replica would call it, and be given something else.
            raise Mixes(f"`{impure}` need not give the same result again")
        way = _find_way(eqn, forms, size, at, facts)
        native = way.native if way else [None] * len(eqn.outvars)
    except Mixes as reason:
        mixed = reason.args[0] if isinstance(reason.args[0], Mixed) else Mixed(str(reason), at)
        way, native = None, [mixed] * len(eqn.outvars)
    outs = []
    for var, axis in zip(eqn.outvars, native, strict=True):
        if whole:
            known = axis if isinstance(axis, int) else None
            outs.append(Form(True, known if way else _env_axis(eqn, var, size)))
        elif isinstance(axis, Mixed):
            outs.append(Form(False, None, name_the_mark(axis, call)))
        else:
            outs.append(Form(axis is None, axis))
    return InferredEqn(eqn, whole, way, tuple(outs))


def _in_blocks(var: Any, form: Form, size: Size, at: str) -> Form:
    """A value's form at replicas of this size: another group may have divided it into blocks where this one cannot."""
    if form.axis is None or var.aval.shape[form.axis] % size.blocks == 0:
        return form
    if form.whole:
        return Form(True)
    why = f"{var.aval.shape[form.axis]} groups of environments cannot be divided into {size.blocks} blocks"
    return Form(False, None, Mixed(why, at))


def _env_axis(eqn: jec.JaxprEqn, var: Any, size: Size) -> Axis:
    """Where a value that depends on no environment may first be cut: a proposal, never needed for being right."""
    if size.shards:  # few enough to be as many as something else: here we know
        return 0 if _compat.call_name(eqn) == SHARD_NUMBERS else None
    return next((d for d, n in enumerate(getattr(var.aval, "shape", ())) if n == size.full), None)


def _find_way(eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size, at: str, facts: Sequence[Fact]) -> Way | None:
    call = find_call(_compat.call_name(eqn))
    inner = _compat.inner_jaxpr(eqn)
    on_host, reduces = call is not None and isinstance(call.host, HostMethod), find_reduction(_compat.call_name(eqn))
    for form in forms:
        if form.mixed and (
            inner is None or on_host or reduces
        ):  # some results of other calls may not need this operand
            raise Mixes(form.mixed)
    if on_host:
        return OnHost(eqn, forms, size)
    if call and (mapped := Mapped.of(eqn, call, size)) and mapped.accepts(forms):
        return mapped
    if all(form == WHOLE for form in forms) and (inner is None or _compat.impure_primitive(eqn) is None):
        return None
    if inner is not None:
        return AllReduce(eqn, inner, forms) if reduces else Called(infer(inner, forms, size, at, facts))
    if eqn.primitive in CONTROL:
        return CONTROL[eqn.primitive](eqn, forms, size, at)
    try:
        return _cut(eqn, forms, size)
    except Mixes:
        if facts and (own := OwnRows.of(eqn, forms, facts, size)):
            return own
        raise


def _cut(eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size) -> "Cut":
    axes = [form.axis for form in forms]
    try:
        return Cut(eqn, split(eqn, axes, size), forms)
    except Mixes:
        # Perhaps an operand that can be had whole should be: a table into which every environment looks, say.
        less = [None if form.whole else form.axis for form in forms]
        if less == axes or all(axis is None for axis in less):
            raise
        return Cut(eqn, split(eqn, less, size), forms)


class OnHost:
    """A method of an object that each site makes for its own environments: every operand and result is a block."""

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size):
        for var, form in zip(eqn.invars, forms, strict=True):
            if not var.aval.shape or var.aval.shape[0] != size.full or not (form.whole or form.axis == 0):  # pyright: ignore[reportAttributeAccessIssue]
                raise Mixes("a host method needs operands whose first axis is that of the environments")
        self.native = [0] * len(eqn.outvars)
        self.num_ins = len(eqn.invars)

    def demand(self, outs: Sequence[bool]) -> Demand:
        return [{0} for _ in range(self.num_ins)]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        raise AssertionError("Python is called by the site, not from a segment")


class Cut:
    """A single primitive, cut by its rule."""

    def __init__(self, eqn: jec.JaxprEqn, rule: Split, forms: Sequence[Form]):
        for form, axis in zip(forms, rule.ins, strict=True):
            if not form.whole and form.axis != axis:
                raise Mixes(f"`{eqn.primitive.name}` needs data of other environments")
        self.eqn, self.rule, self.native = eqn, rule, rule.outs

    def demand(self, outs: Sequence[bool]) -> Demand:
        return [{axis} for axis in self.rule.ins]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        return _compat.bind(self.eqn, self.rule.params, [get(i, axis) for i, axis in enumerate(self.rule.ins)])


@dataclass(eq=False)
class Inference:
    """A jaxpr with the form of each variable."""

    closed: jec.ClosedJaxpr
    size: Size
    steps: list[InferredEqn]
    outs: list[Form]
    demands: dict[Any, tuple[Demand, list[Demand]]] = field(default_factory=dict)
    """What `demand` found before: without it, calls nested d deep would be gone through 2^d times."""

    def native(self) -> list[Axis | Mixed]:
        return [form.mixed or (None if form.axis is None else form.axis) for form in self.outs]


def infer(
    closed: jec.ClosedJaxpr, forms: Sequence[Form], size: Size, at: str = "", facts: Sequence[Fact] = ()
) -> Inference:
    jaxpr, proved = closed.jaxpr, Facts(closed, facts)
    known: dict[Any, Form] = dict.fromkeys(jaxpr.constvars, WHOLE) | dict(zip(jaxpr.invars, forms, strict=True))

    def form(var):
        return WHOLE if isinstance(var, jec.Literal) else known[var]

    steps = []
    for eqn in jaxpr.eqns:
        # A function of JAX's is blamed on its caller; within the user's own, each equation has its line.
        line = at if _compat.is_written_by_jax(closed) else _compat.where(eqn) or at
        step = infer_step(eqn, [form(v) for v in eqn.invars], size, line, proved.of(eqn.invars))
        known.update(zip(eqn.outvars, step.outs, strict=True))
        steps.append(step)
    return Inference(closed, size, steps, [form(v) for v in jaxpr.outvars])


def demand(inference: Inference, wanted: Demand) -> tuple[Demand, list[Demand]]:
    """Demand needed of the inputs, and of the results of every equation."""
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
    per_step: list[Demand] = []
    for step in reversed(inference.steps):
        outs = [needs.get(v, set()) for v in step.eqn.outvars]
        per_step.append(outs)
        if any(outs) or step.eqn.effects:
            for var, pieces in zip(step.eqn.invars, step.demand(outs), strict=True):
                need(var, pieces)
    inference.demands[asked] = [needs.get(v, set()) for v in jaxpr.invars], per_step[::-1]
    return inference.demands[asked]


def emit(
    inference: Inference, inputs: Sequence[Mapping[Axis, Any]], wanted: Demand, index: Any
) -> list[dict[Axis, Any]]:
    """Compute the wanted pieces of the outputs from pieces of the inputs."""
    jaxpr, size = inference.closed.jaxpr, inference.size
    _, per_step = demand(inference, wanted)
    held: dict[Any, dict[Axis, Any]] = {
        v: {None: c} for v, c in zip(jaxpr.constvars, inference.closed.consts, strict=True)
    }
    held.update((v, dict(pieces)) for v, pieces in zip(jaxpr.invars, inputs, strict=True))

    def piece(var, axis):
        if isinstance(var, jec.Literal):
            return cut(var.val, axis, index, size)
        pieces = held[var]
        if axis not in pieces:
            pieces[axis] = cut(pieces[None], axis, index, size)
        return pieces[axis]

    for step, outs in zip(inference.steps, per_step, strict=True):
        if any(outs) or step.eqn.effects:
            results = step.emit(lambda i, axis, eqn=step.eqn: piece(eqn.invars[i], axis), outs, index, size)
            held.update(zip(step.eqn.outvars, results, strict=True))
    return [{axis: piece(v, axis) for axis in axes} for v, axes in zip(jaxpr.outvars, wanted, strict=True)]


class Called:
    """A call whose inside is computed in place: jit, remat, a custom derivative."""

    def __init__(self, inner: Inference):
        self.inner, self.native = inner, inner.native()

    def wanted(self, outs: Sequence[bool]) -> Demand:
        return [{axis} if out else set() for axis, out in zip(self.native, outs, strict=True)]  # pyright: ignore[reportReturnType]

    def demand(self, outs: Sequence[bool]) -> Demand:
        return demand(self.inner, self.wanted(outs))[0]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        wanted = self.wanted(outs)
        results = emit(self.inner, _given(get, demand(self.inner, wanted)[0]), wanted, index)
        return [_single(pieces) for pieces in results]


def _given(get: Get, need: Demand) -> list[dict[Axis, Any]]:
    return [{axis: get(i, axis) for axis in axes} for i, axes in enumerate(need)]


def _single(pieces: Mapping[Axis, Any]) -> Any:
    return next(iter(pieces.values()), None)


class Scan:
    """A scan that stays whole at its site: the same loop over a body on blocks."""

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size, at: str):
        self.p, self.size = _compat.scan_params(eqn), size
        c, k = self.p.num_consts, self.p.num_carry
        xs = [Form(form.whole, form.axis - 1 if form.axis else None) for form in forms[c + k :]]
        self.carry, self.inner = _carry_forms(
            forms[c : c + k],
            lambda carry: infer(self.p.body, [*forms[:c], *carry, *xs], size, at),
            lambda inner: inner.outs[:k],
        )
        ys = [axis + 1 if isinstance(axis, int) else axis for axis in self.inner.native()[k:]]
        self.native = [*(form.axis for form in self.carry), *ys]

    def _wanted(self, outs: Sequence[bool]) -> Demand:
        ys = [axis - 1 if isinstance(axis, int) else axis for axis in self.native[self.p.num_carry :]]
        wanted = [{axis} if out else set() for axis, out in zip(ys, outs[self.p.num_carry :], strict=True)]
        return [*({form.axis} for form in self.carry), *wanted]  # pyright: ignore[reportReturnType]

    def _need(self, outs: Sequence[bool]) -> Demand:
        return demand(self.inner, self._wanted(outs))[0]

    def demand(self, outs: Sequence[bool]) -> Demand:
        c, k = self.p.num_consts, self.p.num_carry
        need = self._need(outs)
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

        xs, forms = _flat(given[c + k :])
        carry, ys = lax.scan(
            lambda carry, x: body(carry, forms(x)), init, xs, self.p.length, self.p.reverse, self.p.unroll
        )
        return [*carry, *ys]


def _flat(given: Sequence[Mapping[Axis, Any]]) -> tuple[list[Any], Callable[[Sequence[Any]], list[dict[Axis, Any]]]]:
    """Demand as a plain list, and the way back: `None` and numbers cannot be sorted, so this is no pytree."""
    keys = [list(pieces) for pieces in given]

    def back(values):
        rest = iter(values)
        return [{axis: next(rest) for axis in axes} for axes in keys]

    return [value for pieces in given for value in pieces.values()], back


def _shift(pieces: Sequence[Mapping[Axis, Any]], by: int) -> list[dict[Axis, Any]]:
    return [{axis if axis is None else axis + by: value for axis, value in one.items()} for one in pieces]


def _carry_forms(init: Sequence[Form], infer_body: Callable, outs_of: Callable) -> tuple[list[Form], Any]:
    """What the carry of a loop is, by going round until nothing changes: from whole to block, never back."""
    carry = [Form(form.whole, None if form.whole else form.axis) for form in init]
    while True:
        inner = infer_body(carry)
        after = []
        for before, out in zip(carry, outs_of(inner), strict=True):
            if out.mixed:
                raise Mixes(out.mixed)
            after.append(before if out.whole else Form(False, out.axis))
            if not before.whole and after[-1].axis != before.axis:
                raise Mixes("a loop moves the env axis of what it carries")
        if after == carry:
            return carry, inner
        carry = after


class Rows:
    """`lax.map` over the environments: a scan that carries nothing.

    Step i computes row i of each result from row i of what it goes through, and from constants that are the same on every
    replica: so block r of the results is the same scan over block r, whatever is done to a row.
    """

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form]):
        self.p = _compat.scan_params(eqn)
        consts, xs = forms[: self.p.num_consts], forms[self.p.num_consts :]
        if self.p.num_carry or eqn.effects or combines(eqn):
            raise Mixes("`scan` goes through the environments one by one")
        if not all(form.whole for form in consts) or not all(form.whole or form.axis == 0 for form in xs):
            raise Mixes("`scan` goes through the environments one by one, and looks at others on its way")
        self.native = [0] * len(eqn.outvars)

    def demand(self, outs: Sequence[bool]) -> Demand:
        return [{None} if i < self.p.num_consts else {0} for i in range(len(self.p.body.jaxpr.invars))]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        consts, xs = _halves([_single(pieces) for pieces in _given(get, self.demand(outs))], self.p.num_consts)

        def body(_, row):
            return None, _compat.eval_jaxpr(self.p.body, [*consts, *row])

        return lax.scan(body, None, xs, None, self.p.reverse, self.p.unroll)[1]


def _halves(values: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    return values[:count], values[count:]


class While:
    """A while loop; its predicate is the same everywhere, or one per environment (as `vmap` makes it)."""

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size, at: str):
        self.eqn, self.p = eqn, _compat.while_params(eqn)
        c, b = self.p.num_cond_consts, self.p.num_body_consts
        self.cond_forms, self.body_forms, init = forms[:c], forms[c : c + b], forms[c + b :]

        def infer_both(carry):
            cond = infer(self.p.cond, [*self.cond_forms, *carry], size, at)
            return cond, infer(self.p.body, [*self.body_forms, *carry], size, at)

        self.carry, (self.cond, self.body) = _carry_forms(init, infer_both, lambda inner: inner[1].outs)
        self.predicate_axis = self._predicate_axis()
        if self.predicate_axis is not None and any(form.axis != self.predicate_axis for form in self.carry):
            self.carry = [Form(False, self.predicate_axis) for _ in self.carry]
            self.cond, self.body = infer_both(self.carry)
            if any(not self._one_per_environment(out) for out in [*self.cond.outs, *self.body.outs]):
                raise Mixes("`while` carries a value that is not one per environment")
        self.native = [form.axis for form in self.carry]

    def _predicate_axis(self) -> Axis:
        """Along which axis the predicate stands in blocks; None: it is given whole.

        A predicate with axes is one that `vmap` made: its axes are the first of everything that is carried, and it
        selects, row by row, what moves on. A row whose predicate is false stays as it is, and so does its predicate, if
        that reads nothing but the row: then it does not matter how often the rows of other blocks go round. So what is
        carried along one of the predicate's axes must be so altogether, and the predicate with it, even if that is the
        same on every replica (a number of rounds computed from `arange`, say).
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
        (cond_consts, cond_forms), (body_consts, body_forms) = _flat(given[:c]), _flat(given[c : c + b])
        init = [_single(pieces) for pieces in given[c + b :]]

        def carried(values):
            return [{form.axis: v} for form, v in zip(self.carry, values, strict=True)]

        def cond(index, consts, carry):
            inputs = [*cond_forms(consts), *carried(carry)]
            return _single(emit(self.cond, inputs, [{self.predicate_axis}], index)[0])

        def body(index, consts, carry):
            inputs = [*body_forms(consts), *carried(carry)]
            return [_single(p) for p in emit(self.body, inputs, [{form.axis} for form in self.carry], index)]

        cond_jaxpr = jax.make_jaxpr(cond)(index, cond_consts, init)
        body_jaxpr = jax.make_jaxpr(body)(index, body_consts, init)
        params = self.eqn.params | {
            "cond_jaxpr": cond_jaxpr, "body_jaxpr": body_jaxpr,
            "cond_nconsts": 1 + len(cond_consts), "body_nconsts": 1 + len(body_consts),
        }  # fmt: skip
        return _compat.bind(self.eqn, params, [index, *cond_consts, index, *body_consts, *init])


class Cond:
    """A branch: the same branch on every replica, each on its blocks."""

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size, at: str):
        if not forms[0].whole:
            raise Mixes("`cond` branches on one environment's data")
        self.branches = [infer(branch, forms[1:], size, at) for branch in eqn.params["branches"]]
        self.native = [self._common(outs) for outs in zip(*(branch.outs for branch in self.branches), strict=True)]

    @staticmethod
    def _common(outs: Sequence[Form]) -> Axis | Mixed:
        if mixed := next((form.mixed for form in outs if form.mixed), None):
            return mixed
        axes = {form.axis for form in outs if not form.whole}
        if len(axes) > 1:
            raise Mixes("the branches of `cond` leave the env axis in different places")
        return axes.pop() if axes else None

    def _wanted(self, outs: Sequence[bool]) -> Demand:
        return [{axis} if out else set() for axis, out in zip(self.native, outs, strict=True)]  # pyright: ignore[reportReturnType]

    def demand(self, outs: Sequence[bool]) -> Demand:
        needs = [demand(branch, self._wanted(outs))[0] for branch in self.branches]
        return [{None}, *(set().union(*pieces) for pieces in zip(*needs, strict=True))]

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        wanted = self._wanted(outs)
        which, *operands = _given(get, self.demand(outs))
        flat, forms = _flat(operands)
        branches = [
            lambda operands, branch=branch: [_single(p) for p in emit(branch, forms(operands), wanted, index) if p]
            for branch in self.branches
        ]
        results = iter(lax.switch(lax.convert_element_type(which[None], np.int32), branches, flat))
        return [next(results) if out else None for out in outs]


class Solve:
    """`custom_linear_solve`: its value is what its solver gives; the other programs in it are for derivatives."""

    def __init__(self, eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size, at: str):
        lengths, self.num_ins = eqn.params["const_lengths"], len(forms)
        start, end = lengths.matvec + lengths.vecmat, sum(lengths)
        self.used = [*range(start, start + lengths.solve), *range(end, self.num_ins)]
        solver = eqn.params["jaxprs"].solve
        self.inner = Called(infer(solver, [forms[i] for i in self.used], size, at))
        self.native = self.inner.native

    def demand(self, outs: Sequence[bool]) -> Demand:
        need: list[Set[Axis]] = [set() for _ in range(self.num_ins)]
        for i, pieces in zip(self.used, self.inner.demand(outs), strict=True):
            need[i] = pieces
        return need

    def emit(self, get: Get, outs: Sequence[bool], index: Any) -> list[Any]:
        return self.inner.emit(lambda i, axis: get(self.used[i], axis), outs, index)


def _scan(eqn: jec.JaxprEqn, forms: Sequence[Form], size: Size, at: str) -> Way:
    p = _compat.scan_params(eqn)
    over_envs = any(form.axis == 0 and not form.whole for form in forms[p.num_consts + p.num_carry :])
    return Rows(eqn, forms) if over_envs else Scan(eqn, forms, size, at)


CONTROL: dict[jec.Primitive, Callable[[jec.JaxprEqn, Sequence[Form], Size, str], Way]] = {
    jec.primitives.scan_p: _scan,
    jec.primitives.while_p: While,
    jec.primitives.cond_p: Cond,
    jec.primitives.linear_solve_p: Solve,
}
