"""Draw a graph: one lane for carry and metrics, and one lane for each role. Fragments are boxes, and edges are arrows."""

from typing import TYPE_CHECKING, Any

from choreo.graph.edges import CARRY, METRICS, Edge, End, find_edges
from choreo.graph.ir import Body, Op
from choreo.graph.printer import end_names, user_line, vmapped
from choreo.graph.svg import Arrow, Box, Item, Lane, LoopFrame, draw_lanes
from choreo.graph.text import count, describe, format_bytes

if TYPE_CHECKING:
    from choreo.graph.graph import Graph
else:  # graph.py imports this module
    Graph = Any


def draw_graph(graph: Graph) -> str:
    """The fragmented dataflow graph as SVG text."""
    lanes = [Lane("carry, metrics"), *(Lane(role, roles=(role,)) for role in graph.roles)]
    drawer = _Drawer(graph)
    items = [*drawer.body(graph.body), *drawer.ends()]
    fragments, envs = count(len(list(graph.fragments())), "fragment"), count(graph.num_envs, "environment")
    subtitle = f"One iteration of {envs}: {fragments}. Values of dashed arrows are read in the next round of the loop."
    return draw_lanes(f"{graph.name}: the fragmented dataflow graph", subtitle, lanes, items)


class _Drawer:
    def __init__(self, graph: Graph):
        self.names, self.edges = end_names(graph), find_edges(graph)
        self.lane_of_role = {role: i + 1 for i, role in enumerate(graph.roles)}

    def body(self, body: Body) -> list[Item]:
        items: list[Item] = []
        for op in body.ops:
            if op.body:
                items.append(self.loop(op, op.body))
            elif op.roles:
                items += [self.arrow(edge) for edge in self.into(op) if not edge.next_of]
                items.append(self.fragment(op))
        return items

    def loop(self, op: Op, body: Body) -> LoopFrame:
        inside = self.body(body)
        inside += [self.arrow(edge) for edge in self.edges if edge.next_of is op and edge.src is not edge.dst]
        return LoopFrame(f"× {body.length}" + (" backwards" if body.reverse else ""), user_line(op), tuple(inside))

    def fragment(self, op: Op) -> Box:
        kept = [edge for edge in self.into(op) if edge.src is op]
        lines = [f"for each of {' x '.join(map(str, vmapped(op)))}"] if vmapped(op) else []
        lines += ["Python on the host"] if op.host else []
        lines += [f"keeps {describe(edge.reads)}" for edge in kept]
        return Box(self.lane(op), self.names[op], (*lines, user_line(op)), tuple(sorted(op.roles)))

    def ends(self) -> list[Item]:
        """Arrows to the carry, which the next iteration reads, and to the metrics."""
        return [self.arrow(edge) for end in (CARRY, METRICS) for edge in self.into(end) if edge.src is not end]

    def into(self, end: End) -> list[Edge]:
        return [edge for edge in self.edges if edge.dst is end]

    def arrow(self, edge: Edge) -> Arrow:
        what = f"metrics: {describe(edge.reads)}" if edge.dst is METRICS else describe(edge.reads)
        size = format_bytes(edge.nbytes) + (f", {edge.times} ×" if edge.times > 1 else "")
        size += ", first round" if edge.first_only else ""
        return Arrow(self.lane(edge.src), self.lane(edge.dst), what, size, dashed=bool(edge.next_of))

    def lane(self, end: End) -> int:
        return self.lane_of_role[min(end.roles)] if isinstance(end, Op) else 0
