"""The fragmented dataflow graph of one traced function. A graph can print and draw itself."""

from collections.abc import Iterator
from dataclasses import dataclass

from choreo.graph.drawing import draw_graph
from choreo.graph.ir import Body, Op
from choreo.graph.printer import format_graph
from choreo.types import Role


@dataclass(frozen=True, eq=False)
class Graph:
    """One traced function of an algorithm."""

    name: str
    """`init` or `iterate`."""
    body: Body
    in_names: tuple[str, ...]
    """One name for each input of the body: a path into the carry, `key` or `iteration`."""
    out_names: tuple[str, ...]
    """One name for each output of the body: a path into the carry or the metrics."""
    num_envs: int
    """The number of environments for which the function was traced."""

    @property
    def roles(self) -> list[Role]:
        """The roles of all fragments, in order of first appearance."""
        return list(dict.fromkeys(role for op in self.fragments() for role in op.roles))

    def fragments(self, body: Body | None = None) -> Iterator[Op]:
        """All fragments, in order, also those inside of scans."""
        for op in (body or self.body).ops:
            if op.body:
                yield from self.fragments(op.body)
            elif op.roles:
                yield op

    def __str__(self) -> str:
        return format_graph(self)

    def draw(self) -> str:
        """The graph as an SVG picture."""
        return draw_graph(self)
