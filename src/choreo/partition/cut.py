"""The pass that cuts a graph into a program: segments as large as possible, and transfers of the values that cross.

    graph    act  env  act  env ... learn          homes from `place.py`, needed pieces from `demand.py`
    program  segment at workers | transfer | segment at the learner

The pass is greedy and goes in program order: take the first remaining op that can run, put every op of its group that can run
into one segment, send the results that other groups need, and repeat. A split scan becomes a `Loop`, and a host fragment a
`HostCall`. An op without a home is computed inside every segment that uses its result.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from choreo.errors import PartitionError
from choreo.graph.graph import Graph
from choreo.graph.ir import Body, Op, Operand, Value
from choreo.partition.code import CodeInput, OpsCode, OpStep, as_segment
from choreo.partition.demand import Needs
from choreo.partition.lattice import Size, piece_type
from choreo.partition.place import Sites
from choreo.partition.program import (
    Axis,
    Constant,
    HostCall,
    Input,
    Loop,
    LoopPart,
    Move,
    Port,
    Program,
    Ref,
    Segment,
    Slot,
    Step,
    Transfer,
    groups_of,
)
from choreo.types import GroupName


def cut(graph: Graph, needs: Needs, outputs: Mapping[int, Mapping[GroupName, Axis]]) -> Program:
    """The program of a graph. `outputs`: for each output that is not carried, the piece that each group holds in the end, as
    in `needs_of`."""
    cutter, body = _Cutter(needs), graph.body
    ins = [cutter.port(name, value) for name, value in zip(graph.in_names, body.ins, strict=True)]
    # A carried value ends at the groups where it began, and in the same pieces, because the next iteration reads it there.
    carried = {i: {group: axis for group, (_, axis) in ins[i].held.items()} for i in range(body.num_carry)}
    ends = {**carried, **outputs}
    exits = [(body.outs[i], group, axis) for i, groups in ends.items() for group, axis in groups.items()]
    steps = cutter.body_steps(body, exits, stacked=frozenset(), fixed=frozenset())
    outs = []
    for position, (name, out) in enumerate(zip(graph.out_names, body.outs, strict=True)):
        held = {group: (cutter.ref(out, axis), axis) for group, axis in ends[position].items()}
        outs.append(Port(name, out.aval, held))
    return Program(graph.name, tuple(steps), tuple(ins), tuple(outs))


PieceAt = tuple[Operand, GroupName, Axis]
"""A piece of a value at a group."""


class _Cutter:
    def __init__(self, needs: Needs):
        self.needs, self.placement, self.sites = needs, needs.placement, needs.sites
        self.slots: dict[tuple[Value, Axis], Slot] = {}
        self.consts: dict[Value, Any] = {}
        self.sources: dict[Op, set[Value]] = {}
        """A cache, see `_sources`."""
        self.xs_outside: dict[Value, Operand] = {}
        """For each slice that a loop reads: the stack outside of the loop."""

    def slot(self, value: Value, axis: Axis) -> Slot:
        return self.slots.setdefault((value, axis), len(self.slots))

    def ref(self, operand: Operand, axis: Axis) -> Ref:
        if not isinstance(operand, Value):
            return Constant(_literal(operand))
        constant = operand in self.consts and axis is None
        return Constant(self.consts[operand]) if constant else self.slot(operand, axis)

    def port(self, name: str, value: Value) -> Port:
        """The port of an input. The home of the value holds it; a value without a home is held by every group that needs it."""
        groups = [group for group in self.needs.groups(value) if self.placement.home(value) in (None, group)]
        axes = {group: self.placement.natural(value, group) for group in groups}
        return Port(name, value.aval, {group: (self.slot(value, axis), axis) for group, axis in axes.items()})

    def body_steps(
        self, body: Body, exits: list[PieceAt], *, stacked: frozenset[Value], fixed: frozenset[Value]
    ) -> list[Step]:
        """The steps of a body.

        `exits`: the pieces that must exist at the end of the body; `stacked`: the inputs of the body that hold one slice per
        step of the loop around the body; `fixed`: the values that the same loop carries unchanged.
        """
        self.consts.update(body.consts)
        steps: list[Step] = []
        ready: dict[GroupName, set[Value]] = {group: set() for group in self.sites.replicas}
        for value in body.ins:
            home = self.placement.home(value)
            for group in self.needs.groups(value):
                sent = value in body.carry_ins and home not in (None, group) and value not in fixed
                if not sent:
                    ready[group].add(value)
        steps += self._transfers([v for v in body.carry_ins if v not in fixed], ready)
        rest = [op for op in body.ops if self._live(op)]
        producers = body.producers()
        made_already: set[PieceAt] = set()
        while rest:
            op = next((op for op in rest if self._can_run(op, ready, producers)), None)
            if op is None:
                raise _stuck(rest[0], self.sites)
            if op not in self.placement.ops:
                loop, entries = self._loop(op, body)
                steps += self._make(entries, made_already, body, producers, stacked)
                steps.append(loop)
                rest.remove(op)
                made = [v for v in op.outs if v]
                for value, group, _ in self._stacked_here(op, body):
                    ready[group].add(value)
                for value in made:
                    if self.placement.home(value) is None:
                        for group in self.needs.groups(value):
                            ready[group].add(value)
            elif op.call and op.call.host:
                home = self.placement.ops[op]
                assert home is not None
                call, entries = self._host_call(op, home, producers)
                steps += self._make(entries, made_already, body, producers, stacked)
                steps.append(call)
                rest.remove(op)
                made = [v for v in op.outs if v]
            else:
                group = self.placement.ops[op]
                assert group is not None
                ops = self._grow(group, rest, ready, producers)
                rest = [op for op in rest if op not in ops]
                made = [v for o in ops for v in o.outs if v]
                last = not any(self._takes_part(op, group) for op in rest)
                extra = self._ends(exits, group, made_already, ready, producers) if last else []
                steps.append(self._segment(group, ops, body, producers, stacked, extra=extra))
            for value in made:
                home = self.placement.home(value)
                if home is not None:
                    ready[home].add(value)
            steps += self._transfers(made, ready)
        return steps + self._make(exits, made_already, body, producers, stacked)

    def _host_call(self, op: Op, home: GroupName, producers: dict[Value, Op]) -> tuple[HostCall, list[PieceAt]]:
        """A host call, and the pieces that must exist before it."""
        assert op.call is not None and op.call.host is not None
        axis = 0 if self.sites.size(home) else None
        ins: list[PieceAt] = []
        for operand in op.ins:
            whole = not isinstance(operand, Value) or operand in self.consts
            if isinstance(operand, Value) and not whole and not self._homeless(operand, producers):
                whole = self.needs.held(operand, home, {axis}) == {None}
            ins.append((operand, home, None if whole else axis))
        refs = tuple(self.ref(operand, have) for operand, _, have in ins)
        sliced = tuple(have != axis for _, _, have in ins)
        outs = tuple(self.slot(v, axis) if v else None for v in op.outs)
        return HostCall(home, op.name, refs, sliced, outs, op.call.host, self.sites.shards), ins

    def _live(self, op: Op) -> bool:
        """Liveness: does a group need a result of the op, or does the op have an effect?"""
        if op not in self.placement.ops:
            body = op.body
            assert body is not None
            return any(self.needs.groups(v) for v in op.outs if v) or any(self._live(inner) for inner in body.ops)
        home = self.placement.ops[op]
        return home is not None and (bool(op.eqn.effects) or any(self.needs.at(v, home) for v in op.outs if v))

    def _can_run(self, op: Op, ready: dict[GroupName, set[Value]], producers: dict[Value, Op]) -> bool:
        """Does every group that runs the op have all values that the op reads?"""
        for value in self._sources(op, producers):
            groups = [self.placement.ops[op]] if op in self.placement.ops else self.needs.groups(value)
            if any(value not in ready[group] for group in groups if group is not None and self.needs.at(value, group)):
                return False
        return True

    def _sources(self, op: Op, producers: dict[Value, Op]) -> set[Value]:
        """The values that must exist before an op can run. Operands without a home are replaced by their own operands."""
        if op not in self.sources:
            found, todo = set(), list(op.values())
            while todo:
                value = todo.pop()
                if self._homeless(value, producers):
                    todo += producers[value].values()
                elif value not in self.consts:
                    found.add(value)
            self.sources[op] = found
        return self.sources[op]

    def _grow(self, group: GroupName, rest: list[Op], ready: dict[GroupName, set[Value]], producers) -> list[Op]:
        """The ops that a group can run before it must receive something. Adds their results to `ready`."""
        ops: list[Op] = []
        for op in rest:
            here = self.placement.ops.get(op) == group and not (op.call and op.call.host)
            if here and self._can_run(op, ready, producers):
                ops.append(op)
                ready[group].update(v for v in op.outs if v)
        return ops

    def _transfers(self, values: Iterable[Value], ready: dict[GroupName, set[Value]]) -> list[Step]:
        moves_between: dict[tuple[GroupName, GroupName], list[Move]] = {}
        for value in values:
            src = self.placement.home(value)
            for dst in self.needs.crossings(value):
                if src is None or value in ready[dst]:
                    continue
                src_axis = self.placement.natural(value, src)
                for axis in sorted(self.needs.at(value, dst), key=str):
                    move = Move(
                        value.label, value.aval, self.slot(value, src_axis), src_axis, self.slot(value, axis), axis
                    )
                    moves_between.setdefault((src, dst), []).append(move)
                ready[dst].add(value)
        return [Transfer(src, dst, tuple(moves)) for (src, dst), moves in moves_between.items()]

    def _takes_part(self, op: Op, group: GroupName) -> bool:
        """Does the group run this op, or part of it? A split scan may run in every group."""
        return op not in self.placement.ops or self.placement.ops[op] == group

    def _ends(self, exits: Iterable[PieceAt], group: GroupName, made: set[PieceAt],
              ready: dict[GroupName, set[Value]], producers) -> list[tuple[Value, Axis]]:  # fmt: skip
        """The pieces of outputs that no segment returns yet, and that the last segment of a group can return as well. If this
        segment did not return them, a counter in the carry, for example, would need a separate segment."""
        here = [piece for piece in exits if piece[1] == group and self._reads_only(piece[0], ready[group], producers)]
        return self._unmade(here, made, producers).get(group, [])

    def _reads_only(self, operand: Operand, ready: set[Value], producers: dict[Value, Op]) -> bool:
        """Can an output be computed from the values that are ready?"""
        if not isinstance(operand, Value):
            return True
        read = self._sources(producers[operand], producers) if self._homeless(operand, producers) else {operand}
        return read - set(self.consts) <= ready

    def _make(self, pieces: Iterable[PieceAt], made: set[PieceAt], body: Body, producers, stacked) -> list[Step]:
        """Segments for the pieces that no other segment returns."""
        wanted = self._unmade(pieces, made, producers)
        return [self._segment(group, [], body, producers, stacked, extra=extra) for group, extra in wanted.items()]

    def _unmade(
        self, pieces: Iterable[PieceAt], made: set[PieceAt], producers: dict[Value, Op]
    ) -> dict[GroupName, list[tuple[Value, Axis]]]:
        """The pieces that no segment returns yet: those of values without a home, and blocks of values that a group holds
        whole. Adds them to `made`."""
        wanted: dict[GroupName, list[tuple[Value, Axis]]] = {}
        for operand, group, axis in pieces:
            if not isinstance(operand, Value) or (operand, group, axis) in made:
                continue
            held_whole = axis is not None and self.needs.held(operand, group, {axis}) == {None}
            if held_whole or self._homeless(operand, producers):
                wanted.setdefault(group, []).append((operand, axis))
                made.add((operand, group, axis))
        return wanted

    def _homeless(self, value: Value, producers: dict[Value, Op]) -> bool:
        """Is the value the result of an op without a home?"""
        return self.placement.home(value) is None and value in producers and producers[value] in self.placement.ops

    def _segment(self, group: GroupName, ops: Sequence[Op], body: Body, producers: dict[Value, Op],
                 stacked: frozenset[Value], extra: Sequence[tuple[Value, Axis]]) -> Segment:  # fmt: skip
        """The segment that runs these ops at a group, and returns the `extra` pieces as well."""
        needs, size = self.needs, self.sites.size(group)
        everything = self._with_homeless(ops, [v for v, _ in extra], body, producers)
        made = {v for op in everything for v in op.outs if v}
        read: list[tuple[Operand, Set[Axis]]] = [(v, {axis}) for v, axis in extra]
        for op in everything:
            read += zip(op.ins, needs.operands(op, group, needs.wanted(op, group)), strict=True)
        keys: dict[tuple[Value, Axis], None] = {}
        for operand, axes in read:
            if isinstance(operand, Value) and operand not in made and operand not in self.consts:
                keys.update(
                    dict.fromkeys((operand, axis) for axis in sorted(needs.held(operand, group, axes), key=str))
                )
        ins = tuple(self._input(value, axis, size, value in stacked) for value, axis in keys)
        outs = [(v, axis) for op in ops for v in op.outs if v and self._used_outside(v, group, ops, body, producers)
                for axis in sorted(needs.at(v, group), key=str)]  # fmt: skip
        outs += extra
        consts = {v: self.consts[v] for v, _ in read if isinstance(v, Value) and v in self.consts}
        steps = tuple(self._op_step(op, group) for op in everything)
        code = OpsCode(group, ins, consts, steps, tuple(outs), size)
        given = [Input(self.slot(i.value, i.axis), i.stacked, i.aval, i.outer_axis, i.value.label) for i in ins]
        return as_segment(code, group, given, [self.slot(v, axis) for v, axis in outs])

    def _op_step(self, op: Op, group: GroupName) -> OpStep:
        wanted = self.needs.wanted(op, group)
        evaluation = self.needs.inferred(op, group) or self.needs.pruned(op, wanted)
        return OpStep(op, tuple(frozenset(axes) for axes in wanted), evaluation)

    def _input(self, value: Value, axis: Axis, size: Size | None, stacked: bool) -> CodeInput:
        outer = self.xs_outside[value] if stacked else value
        outer_axis = axis + 1 if stacked and axis is not None else axis
        return CodeInput(value, axis, stacked, piece_type(outer.aval, outer_axis, size))

    def _with_homeless(self, ops: Sequence[Op], extra: Iterable[Value], body: Body, producers) -> list[Op]:
        """The ops, and the ops without a home that they and `extra` need, in program order."""
        found = set(ops)
        todo = [v for op in ops for v in op.values()] + list(extra)
        while todo:
            value = todo.pop()
            if self._homeless(value, producers) and producers[value] not in found:
                found.add(producers[value])
                todo += producers[value].values()
        return [op for op in body.ops if op in found]

    def _used_outside(self, value: Value, group: GroupName, ops: Sequence[Op], body: Body, producers) -> bool:
        """Does anything outside of these ops read this result?"""
        if not self.needs.at(value, group):
            return False
        inside = set(ops)
        read_later = any(value in op.ins and self._runs_at(op, group) and op not in inside for op in body.ops)
        return read_later or value in body.outs or bool(self.needs.crossings(value))

    def _runs_at(self, op: Op, group: GroupName) -> bool:
        return op not in self.placement.ops or self.placement.ops[op] in (None, group)

    def _stacked_here(self, op: Op, around: Body) -> list[tuple[Value, GroupName, Operand]]:
        """Return (stack, group, slice) for every stacked result that a group builds itself, because the group holds every slice."""
        body = op.body
        assert body is not None
        found = []
        for value, inner in zip(op.outs[body.num_carry :], body.ys, strict=True):
            if value is None:
                continue
            home, groups = self.placement.home(inner), self.needs.groups(value)
            seen_by = [group for group in groups if home in (None, group) or self._sees(inner, value, group)]
            if home is not None and seen_by == groups and not self._read_at(value, home, around):
                # The home would need the stack only to send it, but every reader builds its own stack.
                seen_by = [group for group in seen_by if group != home]
            found += [(value, group, inner) for group in seen_by]
        return found

    def _read_at(self, value: Value, group: GroupName, body: Body) -> bool:
        return value in body.outs or any(value in op.ins and self._runs_at(op, group) for op in body.ops)

    def _sees(self, inner: Operand, outer: Value, group: GroupName) -> bool:
        """In each step of the loop, does the group hold the slices of all pieces that it needs of the stack `outer`?"""
        shifted = {axis if axis is None else axis - 1 for axis in self.needs.at(outer, group)}
        return 0 not in self.needs.at(outer, group) and shifted <= self.needs.at(inner, group)

    def _loop(self, op: Op, around: Body) -> tuple[Loop, list[PieceAt]]:
        """The loop of a split scan, and the pieces that must exist before it. `around`: the body that contains the scan."""
        body = op.body
        assert body is not None
        c, k = body.num_consts, body.num_carry
        self.xs_outside.update(zip(body.xs, op.ins[c + k :], strict=True))
        self.consts.update(body.consts)
        # If something other than a segment reads a slice, the loop takes the slice out of its stack at every step.
        single = {v for inner in body.ops if inner not in self.placement.ops or inner.host for v in inner.values()}
        single |= {v for v in body.outs if isinstance(v, Value)}
        fixed = {v for v, out in zip(body.carry_ins, body.carry_outs, strict=True) if v is out}
        entries: list[PieceAt] = []
        exits: list[PieceAt] = []

        def entry(operand: Operand, group: GroupName, axis: Axis) -> Ref:
            entries.append((operand, group, axis))
            return self.ref(operand, axis)

        def exit_(operand: Operand, group: GroupName, axis: Axis) -> Ref:
            exits.append((operand, group, axis))
            return self.ref(operand, axis)

        parts = {}
        for group in self.sites.replicas:
            consts, xs, slices, carry, ys = [], [], [], [], []
            for inner, outer in zip(body.const_ins, op.ins, strict=False):
                consts += [(self.slot(inner, a), entry(outer, group, a)) for a in self.needs.at(inner, group)]
            for inner, outer in zip(body.xs, op.ins[c + k :], strict=True):
                for a in self.needs.at(inner, group):
                    pair = (self.slot(inner, a), entry(outer, group, a if a is None else a + 1))
                    (slices if inner in single else xs).append(pair)
            for position, (inner, out) in enumerate(zip(body.carry_ins, body.carry_outs, strict=True)):
                init, final = op.ins[c + position], op.outs[position]
                if inner in fixed:
                    consts += [(self.slot(inner, a), entry(init, group, a)) for a in self.needs.at(inner, group)]
                if self.placement.home(inner) not in (None, group) or not self.needs.at(inner, group):
                    continue
                axis = self.placement.natural(inner, group)
                last = self.slot(final, axis) if final and self.needs.at(final, group) else None
                carry.append((self.slot(inner, axis), entry(init, group, axis), exit_(out, group, axis), last))
            for value, at, inner in self._stacked_here(op, around):
                for a in self.needs.at(value, group) if at == group else ():
                    aval = piece_type(value.aval, a, self.sites.size(group))
                    ys.append((exit_(inner, group, a if a is None else a - 1), self.slot(value, a), aval))
            parts[group] = LoopPart(tuple(consts), tuple(carry), tuple(xs), tuple(slices), tuple(ys))
        steps = self.body_steps(body, exits, stacked=frozenset(body.xs) - single, fixed=frozenset(fixed))
        taking_part = {group for step in steps for group in groups_of(step)}
        parts = {group: part for group, part in parts.items() if part != LoopPart() or group in taking_part}
        return Loop(body.length, body.reverse, parts, tuple(steps)), entries


def _stuck(op: Op, sites: Sites) -> PartitionError:
    groups = ", ".join(f"`{group}`" for group in sites.replicas)
    return PartitionError(
        f"`{op.name}` needs a value that no site ({groups}) can compute before `{op.name}` runs.",
        at=op.at,
        fix="This is a bug in Choreo: please report it. To avoid the bug, put the role of this op and the roles that it "
        "reads from into one group.",
    )


def _literal(literal: Any) -> np.ndarray:
    return np.asarray(literal.val, literal.aval.dtype)
