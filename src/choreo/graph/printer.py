"""A graph as text: fragments with their roles, the loops around them, and the edges between them. Glue is counted, not listed."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from choreo.graph.edges import Edge, End, find_edges, runs, value_names
from choreo.graph.ir import Body, Op, Value
from choreo.graph.text import WIDTH, count, describe, format_bytes, shorten, table

if TYPE_CHECKING:
    from choreo.graph.graph import Graph
else:  # graph.py imports this module
    Graph = Any


def format_graph(graph: Graph) -> str:
    """The fragments of a graph in order, with the values that they read and return, and a table of the edges."""
    names, fragments = end_names(graph), list(graph.fragments())
    glue = sum(len(list(_glue(body))) for body in _bodies(graph.body))
    head = f"{graph.name} on {count(graph.num_envs, 'environment')}: {count(len(fragments), 'fragment')} of "
    lines = [f"{head}{', '.join(graph.roles) or 'no role'}; {count(glue, 'equation')} of glue", ""]
    lines += _Printer(graph, names).body(graph.body, indent="")
    rows = [_edge_row(edge, names) for edge in find_edges(graph)]
    lines += ["", *table(["from -> to", "what", "times", "bytes", "per iteration"], rows, align="<<>>>", flexible=1)]
    return "\n".join(line.rstrip() for line in lines)


def end_names(graph: Graph) -> dict[End, str]:
    """Names of the fragments, the carry and the metrics. The second fragment with the name `act` is `act#2`."""
    seen: Counter[str] = Counter()
    names: dict[End, str] = {"carry": "carry", "metrics": "metrics"}
    for op in graph.fragments():
        seen[op.name] += 1
        names[op] = op.name if seen[op.name] == 1 else f"{op.name}#{seen[op.name]}"
    return names


class _Printer:
    def __init__(self, graph: Graph, names: dict[End, str]):
        self.names, self.values, self.runs = names, value_names(graph), runs(graph)

    def body(self, body: Body, indent: str) -> list[str]:
        lines: list[str] = []
        for op in body.ops:
            if op.body:
                backwards = ", backwards" if op.body.reverse else ""
                lines.append(_with_line(f"{indent}{op.body.length} x{backwards}", op))
                lines += self.body(op.body, indent + "│ ")
            elif op.roles:
                lines += self.fragment(op, indent)
        glue = [op.name for op in _glue(body)]
        return [*lines, shorten(f"{indent}{'glue':9}{_most_common(glue)}", WIDTH)] if glue else lines

    def fragment(self, op: Op, indent: str) -> list[str]:
        more = [f"runs {self.runs[op]} x"] if self.runs[op] > 1 else []
        more += [f"for each of {size}" for size in vmapped(op)] + (["Python on the host"] if op.host else [])
        head = f"{indent}{'+'.join(sorted(op.roles)):9}{self.names[op]}" + (f"  ({', '.join(more)})" if more else "")
        return [
            _with_line(head, op),
            *self.values_line(f"{indent}{'':9}reads  ", op.values()),
            *self.values_line(f"{indent}{'':9}gives  ", (value for value in op.outs if value)),
        ]

    def values_line(self, start: str, values: Iterable[Value]) -> list[str]:
        reads = [replace(value, label=self.values.get(value, "")) for value in values]
        return [start + shorten(_describe_size(reads), WIDTH - len(start))]


def _with_line(text: str, op: Op) -> str:
    return shorten(f"{text:<58}  {user_line(op)}", WIDTH)


def user_line(op: Op) -> str:
    """The user's file and line, without folder and column: `my_ppo.py:88 (act)`."""
    match = re.fullmatch(r"(.*?):(\d+)(?::\d+)?( \(.*\))?", op.at)
    if not match:
        return op.at
    path, line, function = match.groups()
    return f"{os.path.basename(path)}:{line}{(function or '').replace('.<locals>', '')}"


def vmapped(op: Op) -> list[int]:
    """Sizes of the vmaps around a fragment, outermost first."""
    return [vmap.size for vmap in reversed(op.call.vmaps)] if op.call else []


def _describe_size(values: Sequence[Value]) -> str:
    size = format_bytes(sum(value.nbytes for value in values))
    return f"{size}: {describe(values)}" if values else "nothing"


def _bodies(body: Body) -> Iterable[Body]:
    yield body
    for op in body.ops:
        if op.body:
            yield from _bodies(op.body)


def _glue(body: Body) -> Iterable[Op]:
    return (op for op in body.ops if not op.roles)


def _most_common(names: Sequence[str]) -> str:
    counted = Counter(name.strip("_") for name in names).most_common()
    return f"{count(len(names), 'equation')}: " + ", ".join(f"{n} {name}" if n > 1 else name for name, n in counted)


def _edge_row(edge: Edge, names: dict[End, str]) -> list[str]:
    when = ", next round" if edge.next_of else ", first round" if edge.first_only else ""
    ends = f"{names[edge.src]} -> {names[edge.dst]}{when}"
    size = format_bytes(edge.nbytes)
    return [ends, describe(edge.reads), f"{edge.times} x", size, format_bytes(edge.nbytes * edge.times)]
