"""From homes and needs to a program: segments as large as they can be, and exactly the values that cross.

Greedy and in program order: take the group of the first op that is left, run everything there that can run, send what others
need, go on. What has no home is computed inside each segment that uses it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np
from jax import lax

from choreo.graph.ir import Block, Graph, Op, Operand, Value
from choreo.partition.blocks import cut as cut_block
from choreo.partition.demand import Needs
from choreo.partition.program import (
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
)  # fmt: skip
from choreo.partition.split import Axis, Size
from choreo.types import GroupName


def cut(graph: Graph, needs: Needs, outputs: Mapping[int, Mapping[GroupName, Axis]]) -> Program:
    """`outputs`: which piece of which output a group holds in the end, as given to `find_needs`."""
    cutter = _Cutter(needs)
    steps = cutter.block_steps(graph.block, stacked=frozenset(), fixed=frozenset())
    ins = [cutter.port(name, value) for name, value in zip(graph.in_names, graph.block.ins, strict=True)]
    outs = []
    for position, (name, out) in enumerate(zip(graph.out_names, graph.block.outs, strict=True)):
        if position < graph.block.num_carry:  # lies where it is read in the next iteration
            held = {group: axis for group, (_, axis) in ins[position].held.items()}
        else:
            held = outputs[position]
        outs.append(Port(name, out.aval, {group: (cutter.ref(out, axis), axis) for group, axis in held.items()}))
    return Program(graph.name, tuple(steps), tuple(ins), tuple(outs))


class _Cutter:
    def __init__(self, needs: Needs):
        self.needs, self.placement, self.sites = needs, needs.placement, needs.sites
        self.slots: dict[tuple[Value, Axis], Slot] = {}
        self.consts: dict[Value, Any] = {}
        self.sources: dict[Op, set[Value]] = {}
        self.xs_outside: dict[Value, Operand] = {}
        """What a loop's slices are slices of."""

    def slot(self, value: Value, axis: Axis) -> Slot:
        return self.slots.setdefault((value, axis), len(self.slots))

    def ref(self, operand: Operand, axis: Axis) -> Ref:
        if not isinstance(operand, Value):
            return Constant(_literal(operand))
        return Constant(self.consts[operand]) if operand in self.consts else self.slot(operand, axis)

    def port(self, name: str, value: Value) -> Port:
        """An input of the program, at its home or, if it has none, wherever it is read."""
        groups = [group for group in self.needs.groups(value) if self.placement.home(value) in (None, group)]
        axes = {group: self.placement.natural(value, group) for group in groups}
        return Port(name, value.aval, {group: (self.slot(value, axis), axis) for group, axis in axes.items()})

    def block_steps(self, block: Block, stacked: frozenset[Value], fixed: frozenset[Value]) -> list[Step]:
        """The steps of a block.

        `stacked`: its inputs that hold one slice per step of the loop around; `fixed`: what a loop carries unchanged.
        """
        self.consts.update(block.consts)
        steps: list[Step] = []
        ready: dict[GroupName, set[Value]] = {group: set() for group in self.sites.replicas}
        for value in block.ins:
            home = self.placement.home(value)
            for group in self.needs.groups(value):
                sent = value in block.carry_ins and home not in (None, group) and value not in fixed
                if not sent:
                    ready[group].add(value)
        steps += self._transfers([v for v in block.carry_ins if v not in fixed], ready)
        rest = [op for op in block.ops if self._live(op)]
        producers = block.producers()
        prepared: dict[GroupName, set[Value]] = {group: set() for group in self.sites.replicas}
        while rest:
            op = next(op for op in rest if self._can_run(op, ready, producers))
            if op not in self.placement.ops:
                steps += self._prepare(op, block, producers, prepared, stacked)
                steps.append(self._loop(op, block))
                rest.remove(op)
                made = [v for v in op.outs if v]
                for value, group, _ in self._stacked_here(op):
                    ready[group].add(value)
                for value in made:
                    if self.placement.home(value) is None:
                        for group in self.needs.groups(value):
                            ready[group].add(value)
            elif op.call and op.call.host:
                home = self.placement.ops[op]
                assert home is not None
                steps += self._prepare(op, block, producers, prepared, stacked)
                outs = tuple(self.slot(v, None) if v else None for v in op.outs)
                steps.append(HostCall(home, op.name, tuple(self.ref(v, None) for v in op.ins), outs, op.call.host))
                rest.remove(op)
                made = [v for v in op.outs if v]
            else:
                group = self.placement.ops[op]
                assert group is not None
                ops = self._grow(group, rest, ready, producers)
                rest = [op for op in rest if op not in ops]
                made = [v for o in ops for v in o.outs if v]
                steps.append(self._segment(group, ops, block, producers, stacked, extra=()))
            for value in made:
                home = self.placement.home(value)
                if home is not None:
                    ready[home].add(value)
            steps += self._transfers(made, ready)
        return steps + self._homeless_outputs(block, producers, prepared, stacked)

    def _live(self, op: Op) -> bool:
        if op not in self.placement.ops:
            body = op.body
            assert body is not None
            return any(self.needs.groups(v) for v in op.outs if v) or any(self._live(inner) for inner in body.ops)
        home = self.placement.ops[op]
        return home is not None and (bool(op.eqn.effects) or any(self.needs.at(v, home) for v in op.outs if v))

    def _can_run(self, op: Op, ready: dict[GroupName, set[Value]], producers: dict[Value, Op]) -> bool:
        for value in self._sources(op, producers):
            groups = [self.placement.ops[op]] if op in self.placement.ops else self.needs.groups(value)
            if any(value not in ready[group] for group in groups if group is not None and self.needs.at(value, group)):
                return False
        return True

    def _sources(self, op: Op, producers: dict[Value, Op]) -> set[Value]:
        """What must be there before an op can run, with all that has no home and goes into it."""
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
        """Everything that a group can run before it hears from another."""
        ops: list[Op] = []
        for op in rest:
            here = self.placement.ops.get(op) == group and not (op.call and op.call.host)
            if here and self._can_run(op, ready, producers):
                ops.append(op)
                ready[group].update(v for v in op.outs if v)
        return ops

    def _transfers(self, values: Iterable[Value], ready: dict[GroupName, set[Value]]) -> list[Step]:
        bundles: dict[tuple[GroupName, GroupName], list[Move]] = {}
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
                    bundles.setdefault((src, dst), []).append(move)
                ready[dst].add(value)
        return [Transfer(src, dst, tuple(moves)) for (src, dst), moves in bundles.items()]

    def _prepare(self, op: Op, block: Block, producers, prepared, stacked) -> list[Step]:
        """Before a loop or a host call: compute what it reads and nobody is home of."""
        steps = []
        for group in self.sites.replicas:
            wanted = [v for v in op.values() if self._homeless(v, producers) and self.needs.at(v, group)]
            wanted = [v for v in dict.fromkeys(wanted) if v not in prepared[group]]
            if wanted and self._reads(op, group):
                steps.append(self._segment(group, [], block, producers, stacked, extra=wanted))
                prepared[group].update(wanted)
        return steps

    def _reads(self, op: Op, group: GroupName) -> bool:
        return op not in self.placement.ops or self.placement.ops[op] == group

    def _homeless_outputs(self, block: Block, producers, prepared, stacked) -> list[Step]:
        steps = []
        for group in self.sites.replicas:
            wanted = [v for v in dict.fromkeys(v for v in block.outs if isinstance(v, Value))
                      if self._homeless(v, producers) and self.needs.at(v, group) and v not in prepared[group]]  # fmt: skip
            if wanted:
                steps.append(self._segment(group, [], block, producers, stacked, extra=wanted))
        return steps

    def _homeless(self, value: Value, producers: dict[Value, Op]) -> bool:
        return self.placement.home(value) is None and value in producers and producers[value] in self.placement.ops

    def _segment(self, group: GroupName, ops: Sequence[Op], block: Block, producers: dict[Value, Op],
                 stacked: frozenset[Value], extra: Iterable[Value]) -> Segment:  # fmt: skip
        needs, size = self.needs, self.sites.size(group)
        everything = self._with_homeless(group, ops, extra, block, producers)
        made = {v for op in everything for v in op.outs if v}
        ins: list[Input] = []
        keys: list[tuple[Value, Axis]] = []
        for op in everything:
            pieces = needs.operands(op, group, needs.wanted(op, group))
            for operand, axes in zip(op.ins, pieces, strict=True):
                if not isinstance(operand, Value) or operand in made or operand in self.consts:
                    continue
                for axis in sorted(needs.held(operand, group, axes), key=str):
                    if (operand, axis) not in keys:
                        keys.append((operand, axis))
                        ins.append(self._input(operand, axis, size, operand in stacked))
        outs = [(v, axis) for op in ops for v in op.outs if v and self._used_outside(v, group, ops, block, producers)
                for axis in sorted(needs.at(v, group), key=str)]  # fmt: skip
        outs += [(v, axis) for v in extra for axis in sorted(needs.at(v, group), key=str)]
        consts = {v: self.consts[v] for op in everything for v in op.values() if v in self.consts}
        fn = _segment_fn(everything, keys, [x.stacked for x in ins], outs, consts, needs, group, size)
        name = "+".join(dict.fromkeys(_fragment_names(ops))) or "glue"
        out_avals = tuple(_piece_aval(v.aval, axis, size) for v, axis in outs)
        return Segment(group, name, tuple(ins), tuple(self.slot(v, axis) for v, axis in outs), out_avals, fn)

    def _input(self, value: Value, axis: Axis, size: Size | None, stacked: bool) -> Input:
        outer = self.xs_outside[value] if stacked else value
        outer_axis = axis + 1 if stacked and axis is not None else axis
        return Input(self.slot(value, axis), stacked, _piece_aval(outer.aval, outer_axis, size), value.label)

    def _with_homeless(self, group: GroupName, ops: Sequence[Op], extra: Iterable[Value], block: Block,
                       producers: dict[Value, Op]) -> list[Op]:  # fmt: skip
        """The ops, and all that has no home and goes into them, in program order."""
        found = set(ops)
        todo = [v for op in ops for v in op.values()] + list(extra)
        while todo:
            value = todo.pop()
            if self._homeless(value, producers) and producers[value] not in found:
                found.add(producers[value])
                todo += producers[value].values()
        return [op for op in block.ops if op in found]

    def _used_outside(self, value: Value, group: GroupName, ops: Sequence[Op], block: Block, producers) -> bool:
        if not self.needs.at(value, group):
            return False
        inside = set(ops)
        read_later = any(value in op.ins and self._runs_at(op, group) and op not in inside for op in block.ops)
        return read_later or value in block.outs or bool(self.needs.crossings(value))

    def _runs_at(self, op: Op, group: GroupName) -> bool:
        return op not in self.placement.ops or self.placement.ops[op] in (None, group)

    def _stacked_here(self, op: Op) -> list[tuple[Value, GroupName, Operand]]:
        """Stacked results that a group can make by itself, since it sees every slice anyway."""
        body = op.body
        assert body is not None
        found = []
        for value, inner in zip(op.outs[body.num_carry :], body.ys, strict=True):
            for group in self.needs.groups(value) if value else []:
                at_home = self.placement.home(inner) in (None, group)
                if value and (at_home or self._sees(inner, value, group)):
                    found.append((value, group, inner))
        return found

    def _sees(self, inner: Operand, outer: Value, group: GroupName) -> bool:
        shifted = {axis if axis is None else axis - 1 for axis in self.needs.at(outer, group)}
        return 0 not in self.needs.at(outer, group) and shifted <= self.needs.at(inner, group)

    def _loop(self, op: Op, block: Block) -> Loop:
        body = op.body
        assert body is not None
        c, k = body.num_consts, body.num_carry
        self.xs_outside.update(zip(body.xs, op.ins[c + k :], strict=True))
        single = {v for inner in body.ops if inner not in self.placement.ops or inner.host for v in inner.values()}
        single |= {v for v in body.outs if isinstance(v, Value)}  # read one slice at a time by others than segments
        fixed = {v for v, out in zip(body.carry_ins, body.carry_outs, strict=True) if v is out}
        steps = self.block_steps(body, stacked=frozenset(body.xs) - single, fixed=frozenset(fixed))
        stacks = self._stacked_here(op)
        parts = {}
        for group in self.sites.replicas:
            consts, xs, slices, carry = [], [], [], []
            for inner, outer in zip(body.const_ins, op.ins, strict=False):
                consts += [(self.slot(inner, a), self.ref(outer, a)) for a in self.needs.at(inner, group)]
            for inner, outer in zip(body.xs, op.ins[c + k :], strict=True):
                pairs = [
                    (self.slot(inner, a), self.ref(outer, a if a is None else a + 1))
                    for a in self.needs.at(inner, group)
                ]
                (slices if inner in single else xs).extend(pairs)
            for position, (inner, out) in enumerate(zip(body.carry_ins, body.carry_outs, strict=True)):
                init, final = op.ins[c + position], op.outs[position]
                if out is inner:
                    consts += [(self.slot(inner, a), self.ref(init, a)) for a in self.needs.at(inner, group)]
                if self.placement.home(inner) not in (None, group) or not self.needs.at(inner, group):
                    continue
                axis = self.placement.natural(inner, group)
                last = self.slot(final, axis) if final and self.needs.at(final, group) else None
                carry.append((self.slot(inner, axis), self.ref(init, axis), self.ref(out, axis), last))
            ys = []
            for value, at, inner in stacks:
                if at == group:
                    axes = self.needs.at(value, group)
                    size = self.sites.size(group)
                    ys += [(self.ref(inner, a if a is None else a - 1), self.slot(value, a), _piece_aval(value.aval, a, size))
                           for a in axes]  # fmt: skip
            part = LoopPart(tuple(consts), tuple(carry), tuple(xs), tuple(slices), tuple(ys))
            if part != LoopPart() or any(group in groups_of(step) for step in steps):
                parts[group] = part
        return Loop(body.length, body.reverse, parts, tuple(steps))


def _fragment_names(ops: Iterable[Op]) -> list[str]:
    names = []
    for op in ops:
        if op.call:
            names.append(op.call.name)
        elif op.body:
            names.append(f"{op.body.length} x ({'+'.join(dict.fromkeys(_fragment_names(op.body.ops)))})")
        elif op.roles:
            names.append(op.name)
    return names


def _literal(literal: Any) -> np.ndarray:
    return np.asarray(literal.val, literal.aval.dtype)


def _piece_aval(aval: Any, axis: Axis, size: Size | None) -> Any:
    shape = list(aval.shape)
    if axis is not None and size is not None:
        shape[axis] = size.block
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype)


def _segment_fn(ops, keys, stacked, outs, consts, needs: Needs, group: GroupName, size: Size | None):
    """The function of a segment: evaluates its ops one by one, so that JAX can trace and compile it."""

    def segment(index, t, *values):
        held: dict[Value, dict[Axis, Any]] = {v: {None: c} for v, c in consts.items()}
        for (value, axis), array, is_stacked in zip(keys, values, stacked, strict=True):
            array = lax.dynamic_index_in_dim(array, t, 0, keepdims=False) if is_stacked else array
            held.setdefault(value, {})[axis] = array

        def piece(operand, axis):
            if isinstance(operand, jec.Literal):
                return operand.val
            pieces = held[operand]
            if axis not in pieces:
                assert size is not None
                pieces[axis] = cut_block(pieces[None], axis, index, size)
            return pieces[axis]

        for op in ops:
            step = needs.step(op, group)
            wanted = needs.wanted(op, group)
            results: list[dict[Axis, Any]]
            if step is None or size is None:
                pruned = needs.pruned(op, wanted)
                values = [piece(v, None) for v, used in zip(op.ins, pruned.used, strict=True) if used]
                results = [{None: result} for result in pruned.run(values)]
            else:
                results = step.emit(lambda i, axis, op=op: piece(op.ins[i], axis), wanted, index, size)
            held.update((v, r) for v, r in zip(op.outs, results, strict=True) if v)
        return [piece(v, axis) for v, axis in outs]

    return segment
