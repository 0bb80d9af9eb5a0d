"""Who reads whose results: the edges between fragments, seen through glue and through the ends of scans.

    act --i32[8]--> step_one --f32[8,4]--> act, in the next round

An edge ends at a fragment, or at the carry or the metrics of the whole program. Keys and constants make no edges:
whoever needs them computes them. A graph that `verify` refuses must still print: nothing here is strict.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from choreo.graph.ir import Body, Op, Operand, Value

if TYPE_CHECKING:
    from choreo.graph.graph import Graph
else:  # graph.py imports this module
    Graph = Any

CARRY, METRICS = "carry", "metrics"
End: TypeAlias = Op | Literal["carry", "metrics"]
Turns: TypeAlias = tuple[tuple[Op, Literal["first", "next"]], ...]
"""For a value that scans carry, outermost first: read in the first round, or in the round after it was made."""


@dataclass(frozen=True, eq=False)
class Edge:
    """What one fragment reads of another's results."""

    src: End
    dst: End
    reads: tuple[Value, ...]
    """The values, labelled with the user's names for them; "" where there is none."""
    turns: Turns
    """In which rounds of the scans around it."""
    times: int
    """How often per iteration."""

    @property
    def next_of(self) -> Op | None:
        """The scan in whose next round this is read."""
        return next((scan for scan, kind in self.turns if kind == "next"), None)

    @property
    def first_only(self) -> bool:
        """Does only the first round of a scan read this?"""
        return bool(self.turns) and self.next_of is None

    @property
    def nbytes(self) -> int:
        """Of all values, once."""
        return sum(read.nbytes for read in self.reads)


def find_edges(graph: Graph) -> list[Edge]:
    """The edges of a graph, in order of the fragments that read."""
    flow, names = _Flow(graph), value_names(graph)
    order: list[End] = [CARRY, *graph.fragments(), METRICS]
    edges = []
    for dst, reads in flow.reads.items():
        bundles: dict[tuple[End, Turns], list[Value]] = {}
        for operand, origins in reads:
            label = operand.label if isinstance(dst, str) else names.get(operand, "")
            ends: set[tuple[End, Turns]] = {(CARRY if isinstance(src, Value) else src, turns) for src, turns in origins}
            for bundle in ends:
                bundles.setdefault(bundle, []).append(replace(operand, label=label))
        found = [
            Edge(src, dst, tuple(given), turns, _share(flow.runs[dst], turns))
            for (src, turns), given in bundles.items()
        ]
        edges += sorted(found, key=lambda e: (order.index(e.src), [kind for _, kind in e.turns], e.times))
    return [edge for edge in edges if edge.times]


def value_names(graph: Graph) -> dict[Value, str]:
    """Values by the user's names for them: leaves of the carry and metrics, also where they pass through scans."""
    names = dict(zip(graph.block.ins, graph.in_names, strict=False))
    for value, name in zip(graph.block.outs, graph.out_names, strict=False):
        if isinstance(value, Value):
            names.setdefault(value, name)
    _name_block(graph.block, names)
    return names


def _name_block(block: Body, names: dict[Value, str]) -> None:
    def pass_on(known: Operand | None, other: Operand | None) -> None:
        if isinstance(known, Value) and isinstance(other, Value) and known in names:
            names.setdefault(other, names[known])

    for op in block.ops:
        for value in op.outs:
            if value and is_path(value.label):
                names.setdefault(value, value.label)
        if op.body:
            for outer, inner in zip(op.ins, op.body.ins, strict=False):
                pass_on(outer, inner)
            for before, after in zip(op.body.carry_ins, op.body.carry_outs, strict=False):
                pass_on(before, after)
            _name_block(op.body, names)
            for inner, outer in zip(op.body.outs, op.outs, strict=False):
                pass_on(inner, outer)


def is_path(label: str) -> bool:
    """Is it a name in the user's data? Else it is that of an operation, which says little about its result."""
    return "." in label or "[" in label


def runs(graph: Graph) -> dict[Op, int]:
    """How often each fragment runs in one iteration."""
    return {op: n for op, n in _Flow(graph).runs.items() if isinstance(op, Op)}


_Origins: TypeAlias = frozenset[tuple[Op | Value, Turns]]
"""What a value is computed from: fragments, and leaves of the carry."""
_NOTHING: _Origins = frozenset()


def _share(times: int, turns: Turns) -> int:
    for scan, kind in turns:
        assert scan.body is not None
        once = times // max(scan.body.length, 1)
        times = once if kind == "first" else times - once
    return times


class _Flow:
    def __init__(self, graph: Graph):
        self.reads: dict[End, list[tuple[Value, _Origins]]] = {}
        self.runs: dict[End, int] = {}
        num_carry = graph.block.num_carry
        given = [frozenset([(v, ())]) for v in graph.block.ins[:num_carry]]
        given += [_NOTHING] * (len(graph.block.ins) - num_carry)
        outs = self._through(graph.block, given, times=1)
        for position, (value, name, origins) in enumerate(zip(graph.block.outs, graph.out_names, outs, strict=False)):
            carried = position < num_carry or not num_carry  # everything that `init` returns is carry
            untouched = position < num_carry and value is graph.block.ins[position]
            if isinstance(value, Value) and not untouched:
                self._read(CARRY if carried else METRICS, replace(value, label=name), origins)
        self.runs |= {CARRY: 1, METRICS: 1}

    def _read(self, end: End, value: Value, origins: _Origins) -> None:
        self.reads.setdefault(end, []).append((value, origins))

    def _through(self, block: Body, given: Sequence[_Origins], times: int) -> list[_Origins]:
        known = dict(zip(block.ins, given, strict=False))

        def origins(operand: Operand) -> _Origins:
            return known.get(operand, _NOTHING) if isinstance(operand, Value) else _NOTHING

        for op in block.ops:
            ins = [origins(operand) for operand in op.ins]
            if op.body:
                results = self._through_scan(op, op.body, ins, times)
            elif op.roles:
                self.runs[op] = times
                self.reads[op] = []
                for operand, found in zip(op.ins, ins, strict=False):
                    if isinstance(operand, Value):
                        self._read(op, operand, found)
                results = [frozenset([(op, ())])] * len(op.outs)
            else:
                results = [_union(ins)] * len(op.outs)
            known.update((value, found) for value, found in zip(op.outs, results, strict=False) if value)
        return [origins(operand) for operand in block.outs]

    def _through_scan(self, op: Op, body: Body, ins: list[_Origins], times: int) -> list[_Origins]:
        c, k = body.num_consts, body.num_carry
        fixed = [before is after for before, after in zip(body.carry_ins, body.carry_outs, strict=False)]
        start = ins[c : c + k]
        carry = [found if same else _tag(found, op, "first") for found, same in zip(start, fixed, strict=False)]
        while True:  # what a round leaves to the next: grows until nothing is added
            outs = self._through(body, [*ins[:c], *carry, *ins[c + k :]], times * body.length)
            later = [_tag(found, op, "next") for found in outs[:k]]
            grown = [now if same else now | new for now, new, same in zip(carry, later, fixed, strict=False)]
            if grown == carry:
                return [_untag(found, op) for found in outs]
            carry = grown


def _union(found: Iterable[_Origins]) -> _Origins:
    return frozenset().union(*found)


def _tag(found: _Origins, scan: Op, kind: Literal["first", "next"]) -> _Origins:
    return frozenset((src, turns if _turn(turns, scan) else (*turns, (scan, kind))) for src, turns in found)


def _untag(found: _Origins, scan: Op) -> _Origins:
    """As seen after a scan: what only its first round has read does not count beside what the rounds have made."""
    later = [(src, turns) for src, turns in found if _turn(turns, scan) != "first"]
    return frozenset((src, tuple(turn for turn in turns if turn[0] is not scan)) for src, turns in later or found)


def _turn(turns: Turns, scan: Op) -> str | None:
    return next((kind for other, kind in turns if other is scan), None)
