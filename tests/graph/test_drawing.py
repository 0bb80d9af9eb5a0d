"""Pictures of graphs are valid SVG and show every fragment and edge. No text overlaps other text."""

import pytest

from choreo.algos.ppo import PPO
from choreo.envs import make
from choreo.graph.edges import find_edges
from choreo.graph.printer import end_names
from choreo.graph.svg import OTHER_COLOURS, ROLE_COLOURS, Arrow, Box, Lane, draw_lanes, fold, role_colour
from choreo.graph.text import format_bytes
from choreo.plans.build import graph
from graph.programs import Line, Nested
from pictures import arrows, check_legible, texts


@pytest.mark.parametrize(
    "algo, env",
    [(PPO(unroll=16, minibatch_size=32), make("jax:CartPole-v1", 8)), (Nested(), Line())],
    ids=["ppo", "nested"],
)
def test_every_fragment_and_edge_is_in_the_picture(algo, env):
    shown = graph(algo, env)
    svg, edges, names = shown.draw(), find_edges(shown), end_names(shown)
    check_legible(svg)
    words = texts(svg)
    assert {names[op] for op in shown.fragments()} | set(shown.roles) <= set(words)
    assert "× 5" in words or "× 16" in words
    # An edge from a fragment to itself has no arrow: it is text in the box of the fragment.
    between = [edge for edge in edges if edge.src is not edge.dst]
    assert len(arrows(svg)) == len(between)
    assert all(any(word.startswith(format_bytes(edge.nbytes)) for word in words) for edge in between)
    assert sum(word.startswith("keeps") for word in words) == len(edges) - len(between)


def test_every_role_is_drawn_in_its_own_colour():
    assert role_colour("actor") == ROLE_COLOURS["actor"] and role_colour("planner") in OTHER_COLOURS
    svg = graph(Nested(), Line()).draw()
    assert all(role_colour(role) in svg for role in ("env", "planner", "learner"))


def test_names_are_escaped_and_long_names_are_shortened():
    lanes = [Lane("<script>&", ("a line " * 20,), ("env",), replicas=9), *(Lane(f"role{i}" * 9) for i in range(5))]
    boxes = [Box(0, "name" * 40, ("words " * 30,), ("env", "actor"))]
    svg = draw_lanes(
        "T" * 300, "s" * 300, lanes, [*boxes, Arrow(0, 1, "what " * 50, "size"), Arrow(5, 5, "self " * 9, "1 B")]
    )
    check_legible(svg)
    assert "<script>&" in texts(svg) and "<script>" not in svg


def test_fold_keeps_all_words():
    assert fold("one two three", 10, 30) == ["one", "two", "three"]
    assert fold("one two three four", 10, 30) == ["one", "two", "three four"]
