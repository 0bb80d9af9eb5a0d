"""The edges of a graph: which fragment reads the results of which fragment, directly, through glue or through scans.

    act --i32[8]--> step_one --f32[8,4]--> act, in the next round

An end of an edge is a fragment, the carry or the metrics. A *round* is one step of a scan. Random keys and constants make no
edges, because every site computes them itself. The functions of this file also accept graphs that are not valid, because
`verify` prints the graphs that it refuses. So the calls of `zip` are not strict.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from choreo.graph.ir import Body, Op, Operand, Value

if TYPE_CHECKING:
    from choreo.graph.graph import Graph
else:  # graph.py imports the printer, which imports this module
    Graph = Any

CARRY, METRICS = "carry", "metrics"
End: TypeAlias = Op | Literal["carry", "metrics"]
Rounds: TypeAlias = tuple[tuple[Op, Literal["first", "next"]], ...]
"""The scans that carry a value to its reader, outermost first. "first": the first round of the scan reads the value, which comes
from outside. "next": every later round reads the value, which comes from the round before."""


@dataclass(frozen=True, eq=False)
class Edge:
    """The values that one end reads from another end, or from itself in an earlier round."""

    src: End
    dst: End
    reads: tuple[Value, ...]
    """The values. Each label is the user's name for the value, or "" if the value has no name."""
    rounds: Rounds
    """In which rounds of the scans around `dst` the values are read."""
    times: int
    """How often the values are read per iteration."""

    @property
    def next_of(self) -> Op | None:
        """The outermost scan in which a later round reads the values; None if there is no such scan."""
        return next((scan for scan, kind in self.rounds if kind == "next"), None)

    @property
    def first_only(self) -> bool:
        """True if only the first round of a scan reads the values."""
        return bool(self.rounds) and self.next_of is None

    @property
    def nbytes(self) -> int:
        """Bytes of all values, read once."""
        return sum(read.nbytes for read in self.reads)


def find_edges(graph: Graph) -> list[Edge]:
    """The edges of a graph, sorted by the fragments that read."""
    flow, names = _Flow(graph), value_names(graph)
    order: list[End] = [CARRY, *graph.fragments(), METRICS]
    edges = []
    for dst, reads in flow.reads.items():
        values_from: dict[tuple[End, Rounds], list[Value]] = {}
        for operand, origins in reads:
            label = operand.label if isinstance(dst, str) else names.get(operand, "")
            ends: set[tuple[End, Rounds]] = {
                (CARRY if isinstance(src, Value) else src, rounds) for src, rounds in origins
            }
            for end in ends:
                values_from.setdefault(end, []).append(replace(operand, label=label))
        found = [
            Edge(src, dst, tuple(values), rounds, _times_in(rounds, flow.runs[dst]))
            for (src, rounds), values in values_from.items()
        ]
        edges += sorted(found, key=lambda e: (order.index(e.src), [kind for _, kind in e.rounds], e.times))
    return [edge for edge in edges if edge.times]


def value_names(graph: Graph) -> dict[Value, str]:
    """The user's names for values. The leaves of the carry and the metrics have names, and keep them where scans pass them on."""
    names = dict(zip(graph.body.ins, graph.in_names, strict=False))
    for value, name in zip(graph.body.outs, graph.out_names, strict=False):
        if isinstance(value, Value):
            names.setdefault(value, name)
    _name_body(graph.body, names)
    return names


def _name_body(body: Body, names: dict[Value, str]) -> None:
    """Add names for the values of a body: for results whose label is a path, and for values that scans pass on."""

    def pass_on(known: Operand | None, other: Operand | None) -> None:
        if isinstance(known, Value) and isinstance(other, Value) and known in names:
            names.setdefault(other, names[known])

    for op in body.ops:
        for value in op.outs:
            if value and is_path(value.label):
                names.setdefault(value, value.label)
        if op.body:
            for outer, inner in zip(op.ins, op.body.ins, strict=False):
                pass_on(outer, inner)
            for before, after in zip(op.body.carry_ins, op.body.carry_outs, strict=False):
                pass_on(before, after)
            _name_body(op.body, names)
            for inner, outer in zip(op.body.outs, op.outs, strict=False):
                pass_on(inner, outer)


def is_path(label: str) -> bool:
    """True for a path into the user's data, such as `train.params`; False for the name of an operation."""
    return "." in label or "[" in label


def runs(graph: Graph) -> dict[Op, int]:
    """How often each fragment runs per iteration."""
    return {op: n for op, n in _Flow(graph).runs.items() if isinstance(op, Op)}


_Origins: TypeAlias = frozenset[tuple[Op | Value, Rounds]]
"""The fragments and the leaves of the carry from which a value is computed, each with the rounds in which it is read."""
_NOTHING: _Origins = frozenset()


def _times_in(rounds: Rounds, times: int) -> int:
    """How many of a fragment's `times` runs per iteration are in these rounds."""
    for scan, kind in rounds:
        assert scan.body is not None
        once = times // max(scan.body.length, 1)
        times = once if kind == "first" else times - once
    return times


class _Flow:
    """Def-use analysis of a whole graph: the values that each fragment reads, their origins, and how often the fragment runs."""

    def __init__(self, graph: Graph):
        self.reads: dict[End, list[tuple[Value, _Origins]]] = {}
        self.runs: dict[End, int] = {}
        num_carry = graph.body.num_carry
        given = [frozenset([(v, ())]) for v in graph.body.ins[:num_carry]]
        given += [_NOTHING] * (len(graph.body.ins) - num_carry)
        outs = self._through(graph.body, given, times=1)
        for position, (value, name, origins) in enumerate(zip(graph.body.outs, graph.out_names, outs, strict=False)):
            carried = position < num_carry or not num_carry  # `init` reads no carry, and returns only the carry
            untouched = position < num_carry and value is graph.body.ins[position]
            if isinstance(value, Value) and not untouched:
                self._read(CARRY if carried else METRICS, replace(value, label=name), origins)
        self.runs |= {CARRY: 1, METRICS: 1}

    def _read(self, end: End, value: Value, origins: _Origins) -> None:
        self.reads.setdefault(end, []).append((value, origins))

    def _through(self, body: Body, given: Sequence[_Origins], times: int) -> list[_Origins]:
        known = dict(zip(body.ins, given, strict=False))

        def origins(operand: Operand) -> _Origins:
            return known.get(operand, _NOTHING) if isinstance(operand, Value) else _NOTHING

        for op in body.ops:
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
        return [origins(operand) for operand in body.outs]

    def _through_scan(self, op: Op, body: Body, ins: list[_Origins], times: int) -> list[_Origins]:
        c, k = body.num_consts, body.num_carry
        fixed = [before is after for before, after in zip(body.carry_ins, body.carry_outs, strict=False)]
        start = ins[c : c + k]
        carry = [found if same else _read_in(found, op, "first") for found, same in zip(start, fixed, strict=False)]
        while True:  # until a fixed point: the origins of the carry only grow
            outs = self._through(body, [*ins[:c], *carry, *ins[c + k :]], times * body.length)
            later = [_read_in(found, op, "next") for found in outs[:k]]
            grown = [now if same else now | new for now, new, same in zip(carry, later, fixed, strict=False)]
            if grown == carry:
                return [_after(found, op) for found in outs]
            carry = grown


def _union(found: Iterable[_Origins]) -> _Origins:
    return frozenset().union(*found)


def _read_in(found: _Origins, scan: Op, kind: Literal["first", "next"]) -> _Origins:
    """The origins of a value that a scan carries. `kind` says which rounds of the scan read the value."""
    return frozenset((src, rounds if _kind(rounds, scan) else (*rounds, (scan, kind))) for src, rounds in found)


def _after(found: _Origins, scan: Op) -> _Origins:
    """The origins of a result of a scan. If a round produces the result, origins from before the scan are left out."""
    produced = [(src, rounds) for src, rounds in found if _kind(rounds, scan) != "first"]
    return frozenset((src, tuple(each for each in rounds if each[0] is not scan)) for src, rounds in produced or found)


def _kind(rounds: Rounds, scan: Op) -> str | None:
    return next((kind for other, kind in rounds if other is scan), None)
