"""A graph as text, for a person: fragments by role, the loops around them, and what flows between them.

Glue is counted, not listed. Also the words for values, types and sizes, here and in plans and pictures.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from choreo import _compat
from choreo.graph.edges import Edge, End, find_edges, runs, value_names
from choreo.graph.ir import Body, Op, Value

if TYPE_CHECKING:
    from choreo.graph.graph import Graph
else:  # graph.py imports this module
    Graph = Any

WIDTH = 100


def format_graph(graph: Graph) -> str:
    """The fragments of one iteration, in order, and the edges between them."""
    names, fragments = end_names(graph), list(graph.fragments())
    glue = sum(len(list(_glue(block))) for block in _blocks(graph.block))
    head = f"{graph.name} on {count(graph.num_envs, 'environment')}: {count(len(fragments), 'fragment')} of "
    lines = [f"{head}{', '.join(graph.roles) or 'no role'}; {count(glue, 'equation')} of glue", ""]
    lines += _Printer(graph, names).block(graph.block, indent="")
    rows = [_edge_row(edge, names) for edge in find_edges(graph)]
    lines += ["", *table(["from -> to", "what", "times", "bytes", "per iteration"], rows, align="<<>>>", flexible=1)]
    return "\n".join(line.rstrip() for line in lines)


def end_names(graph: Graph) -> dict[End, str]:
    """What fragments are called; a second fragment of the same name gets a number."""
    seen: Counter[str] = Counter()
    names: dict[End, str] = {"carry": "carry", "metrics": "metrics"}
    for op in graph.fragments():
        seen[op.name] += 1
        names[op] = op.name if seen[op.name] == 1 else f"{op.name}#{seen[op.name]}"
    return names


class _Printer:
    def __init__(self, graph: Graph, names: dict[End, str]):
        self.names, self.values, self.runs = names, value_names(graph), runs(graph)

    def block(self, block: Body, indent: str) -> list[str]:
        lines: list[str] = []
        for op in block.ops:
            if op.body:
                backwards = ", backwards" if op.body.reverse else ""
                lines.append(_with_line(f"{indent}{op.body.length} x{backwards}", op))
                lines += self.block(op.body, indent + "│ ")
            elif op.roles:
                lines += self.fragment(op, indent)
        glue = [op.name for op in _glue(block)]
        return [*lines, shorten(f"{indent}{'glue':9}{_common(glue)}", WIDTH)] if glue else lines

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
        return [start + shorten(describe_size(reads), WIDTH - len(start))]


def _with_line(text: str, op: Op) -> str:
    return shorten(f"{text:<58}  {user_line(op)}", WIDTH)


def _edge_row(edge: Edge, names: dict[End, str]) -> list[str]:
    when = ", next round" if edge.next_of else ", first round" if edge.first_only else ""
    ends = f"{names[edge.src]} -> {names[edge.dst]}{when}"
    size = format_bytes(edge.nbytes)
    return [ends, describe(edge.reads), f"{edge.times} x", size, format_bytes(edge.nbytes * edge.times)]


def _blocks(block: Body) -> Iterable[Body]:
    yield block
    for op in block.ops:
        if op.body:
            yield from _blocks(op.body)


def _glue(block: Body) -> Iterable[Op]:
    return (op for op in block.ops if not op.roles)


def _common(names: Sequence[str]) -> str:
    counted = Counter(name.strip("_") for name in names).most_common()
    return f"{count(len(names), 'equation')}: " + ", ".join(f"{n} {name}" if n > 1 else name for name, n in counted)


def vmapped(op: Op) -> list[int]:
    """Sizes of the vmaps around a fragment, outermost first."""
    return [vmap.size for vmap in reversed(op.call.vmaps)] if op.call else []


def user_line(op: Op) -> str:
    """`my_ppo.py:88 (act)`: file and line without the folder and the column."""
    match = re.fullmatch(r"(.*?):(\d+)(?::\d+)?( \(.*\))?", op.at)
    if not match:
        return op.at
    path, line, function = match.groups()
    return f"{os.path.basename(path)}:{line}{(function or '').replace('.<locals>', '')}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_bytes(number: int) -> str:
    if number < 1000:
        return f"{number} B"
    size, units = number / 1000, iter(("kB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 999.5:
        size, unit = size / 1000, next(units)
    return f"{size:.3g} {unit}"


def format_type(aval: Any) -> str:
    """`f32[8,4]`, as JAX prints it."""
    kind = "key" if _compat.is_key(aval.dtype) else re.sub(r"^(b?)([fiuc])[a-z]*(?=\d)", r"\1\2", str(aval.dtype))
    return f"{kind}[{','.join(map(str, aval.shape))}]"


def describe(values: Iterable[Any]) -> str:
    """Values (anything with `label` and `aval`) by name and type: many of one tree by the part they share."""
    named: dict[str, list[tuple[str, Any]]] = {}
    for value in values:
        named.setdefault(_root(value.label), []).append((value.label, value.aval))
    return ", ".join(_describe_tree(leaves) for leaves in named.values()) or "nothing"


def describe_size(values: Sequence[Value]) -> str:
    size = format_bytes(sum(value.nbytes for value in values))
    return f"{size}: {describe(values)}" if values else "nothing"


def _describe_tree(leaves: list[tuple[str, Any]]) -> str:
    labels = [label for label, _ in leaves]
    if not labels[0]:
        counted = Counter(format_type(aval) for _, aval in leaves)
        return ", ".join(f"{n}×{kind}" if n > 1 else kind for kind, n in counted.items())
    if len(leaves) <= 2:
        return ", ".join(f"{label} {format_type(aval)}" if aval.shape else label for label, aval in leaves)
    kinds = dict.fromkeys(format_type(aval).split("[")[0] for _, aval in leaves)
    return f"{_shared(labels)} ({len(leaves)} arrays, {'/'.join(kinds)})"


def _parts(label: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]|\.?[^.\[]+", label)


def _root(label: str) -> str:
    return _parts(label)[0] if label else ""


def _shared(labels: Sequence[str]) -> str:
    return "".join(os.path.commonprefix([_parts(label) for label in labels]))


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, align: str, flexible: int) -> list[str]:
    """Columns two spaces apart; the `flexible` one is wrapped where the table would be wider than `WIDTH`."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    rest = sum(widths) - widths[flexible] + 2 * (len(head) - 1)
    widths[flexible] = min(widths[flexible], max(WIDTH - rest, 20))
    lines = []
    for row in (head, *rows):
        first, *more = wrap(row[flexible], widths[flexible])
        cells = [*row[:flexible], first, *row[flexible + 1 :]]
        lines.append("  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(cells, align, widths, strict=True)).rstrip())
        margin = " " * (sum(widths[:flexible]) + 2 * flexible + 2)
        lines += [margin + line for line in more]
    return [lines[0], "─" * (sum(widths) + 2 * (len(head) - 1)), *lines[1:]]


def wrap(text: str, width: int) -> list[str]:
    """Lines of whole words; continued lines are two shorter, for their indent."""
    lines = [""]
    for word in text.split(" "):
        room = width if len(lines) == 1 else width - 2
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if len(joined) <= room:
            lines[-1] = joined
        else:
            lines.append(word)
    return [shorten(line, width) for line in lines if line] or [""]
