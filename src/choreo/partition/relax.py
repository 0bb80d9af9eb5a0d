"""Which transfers of a program may bring values that are out of date: values that one group carries, and
another group only reads.

Lag belongs to a pair (sender, receiver) of groups. A pair can have lag only if everything that the sender sends to the receiver
is carried from iteration to iteration: parameters for workers, for example. These values travel as one bundle, so that a reader
never gets half of an update. If the sender also sends data of the same iteration, such as actions in the layout `fine`,
the pair cannot have lag.

Often glue stands between a carried value and its reader: a cast, a broadcast, a product with a constant. A copy of the glue
is then computed at the reader, so that only the carried value crosses:

    learner:  w ── half = 0.5 * w ──> actor      becomes      learner:  w ──> actor:  half = 0.5 * w

The copy is the same function of the same values, so the results do not change. Only `w` may be out of date. Everything that
the actor computes from its bundle comes from one version.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from choreo import _compat
from choreo.errors import LayoutError
from choreo.graph.graph import Graph
from choreo.graph.ir import Body, Op, Operand, Value
from choreo.graph.verify import verify
from choreo.partition.place import Placement
from choreo.partition.program import Program, Transfer, walk
from choreo.partition.reduce import combines
from choreo.types import GroupName


def copy_for_readers(graph: Graph, placement: Placement) -> tuple[Graph, dict[Op, GroupName]]:
    """Return the graph with copies of the glue between carried values and their readers in other groups, and each copy's home."""
    copier = _Copier(graph.body, placement)
    body = replace(graph.body, ops=tuple(copier.ops()))
    return verify(replace(graph, body=body), after="copy_for_readers"), copier.homes


class _Copier:
    def __init__(self, body: Body, placement: Placement):
        self.body, self.placement, self.producers = body, placement, body.producers()
        self.numbers = itertools.count(1 + max((v.number for v in _values(body)), default=0))
        self.copies: dict[tuple[Value, GroupName], Value] = {}
        self.homes: dict[Op, GroupName] = {}
        self.pure: dict[Value, bool] = {}

    def ops(self) -> Iterator[Op]:
        """The ops of the body, each preceded by the copies that it reads."""
        for op in self.body.ops:
            ins = []
            for position, operand in enumerate(op.ins):
                reader = self._reader(op, position)
                if reader is not None and isinstance(operand, Value) and self._is_wanted(operand, reader):
                    yield from self._copy(operand, reader)
                    operand = self.copies[operand, reader]
                ins.append(operand)
            yield replace(op, ins=tuple(ins)) if tuple(ins) != op.ins else op

    def _reader(self, op: Op, position: int) -> GroupName | None:
        """The group that reads an operand; None if no single group reads it."""
        if op in self.placement.ops:
            return self.placement.ops[op]
        body = op.body
        assert body is not None
        if position >= body.num_consts or body.ins[position] in body.outs:
            return None
        inside = [(inner, i) for inner in body.ops for i, v in enumerate(inner.ins) if v is body.ins[position]]
        readers = {self._reader(inner, i) for inner, i in inside}
        return readers.pop() if len(readers) == 1 else None

    def _is_wanted(self, value: Value, reader: GroupName) -> bool:
        """Should the reader compute its own copy of this value?"""
        home, sites = self.placement.home(value), self.placement.sites
        away = home is not None and home != reader and reader not in sites.python
        return away and value in self.producers and self._is_of_carried(value)

    def _is_of_carried(self, operand: Operand) -> bool:
        """Is the operand an input, a constant or without a home, or the result of pure glue on such values?"""
        if not isinstance(operand, Value) or operand not in self.producers or self.placement.home(operand) is None:
            return True
        if operand not in self.pure:
            op = self.producers[operand]
            is_glue = not op.roles and op.body is None and not combines(op.eqn)
            is_glue = is_glue and not op.eqn.effects and _compat.impure_primitive(op.eqn) is None
            self.pure[operand] = is_glue and all(self._is_of_carried(v) for v in op.ins)
        return self.pure[operand]

    def _copy(self, value: Value, reader: GroupName) -> Iterator[Op]:
        """Yield copies for a reader: first of the ops that make the operands, then of the op that makes the value."""
        if (value, reader) in self.copies:
            return
        op = self.producers[value]
        ins = []
        for operand in op.ins:
            if isinstance(operand, Value) and self._is_wanted(operand, reader):
                yield from self._copy(operand, reader)
                operand = self.copies[operand, reader]
            ins.append(operand)
        outs = tuple(Value(next(self.numbers), v.aval, v.label) if v else None for v in op.outs)
        self.copies.update(((v, reader), new) for v, new in zip(op.outs, outs, strict=True) if v and new)
        copy = replace(op, ins=tuple(ins), outs=outs)
        self.homes[copy] = reader
        yield copy


def _values(body: Body) -> Iterator[Value]:
    yield from body.ins
    yield from body.consts
    for op in body.ops:
        yield from (v for v in op.outs if v)
        if op.body:
            yield from _values(op.body)


def relax(program: Program, max_lag: int, *, merge: str, layout: str) -> Program:
    """The program in which every transfer that may lag has `lag=max_lag`. Raises LayoutError if no transfer may lag."""
    pairs = relaxable(program)
    if not pairs:
        asked = {f"max_lag={max_lag}": max_lag > 0, f'merge="{merge}"': merge != "all"}
        options = " and ".join(option for option, given in asked.items() if given)
        presets = ["coarse", "sebulba", "central"] if merge == "all" else ["coarse", "central"]
        others = ", ".join(name for name in presets if name != layout)
        raise LayoutError(
            f"The layout {layout} has {options}, but nothing in it may be out of date. A group may read old values only from "
            "a group that sends it nothing but values that are carried from iteration to iteration.",
            fix=f"Leave out {options}, or use a layout whose workers act with parameters of a learner: {others}.",
        )
    for reader in sorted({dst for _, dst in pairs}):
        senders = sorted(src for src, dst in pairs if dst == reader)
        if len(senders) > 1:
            raise LayoutError(
                f"`{reader}` would read old values from {' and '.join(f'`{src}`' for src in senders)}, each at a version of its "
                "own. A group may read old values from one group only, so that everything that it reads comes from the same "
                "update.",
                fix=f"Put the roles of these groups into one group, or leave out max_lag={max_lag}.",
            )
    steps = [
        replace(step, lag=max_lag) if isinstance(step, Transfer) and (step.src, step.dst) in pairs else step
        for step in program.steps
    ]
    return replace(program, steps=tuple(steps))


def relaxable(program: Program) -> set[tuple[GroupName, GroupName]]:
    """The pairs (sender, receiver) of groups between which only carried values travel."""
    carried = {(group, ref) for port in program.ins for group, (ref, _) in port.held.items()}
    transfers = [step for step, _ in walk(program.steps) if isinstance(step, Transfer)]
    fresh = {
        (step.src, step.dst) for step in transfers if any((step.src, move.src) not in carried for move in step.moves)
    }
    inside = {(step.src, step.dst) for step in transfers if step not in program.steps}
    return {(step.src, step.dst) for step in transfers} - fresh - inside
