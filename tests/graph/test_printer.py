"""The text of a graph equals a golden print, and the edges of a small graph are those counted by hand in its program."""

import re
from dataclasses import replace

import pytest

from choreo.algos.ppo import PPO
from choreo.envs import make
from choreo.graph.edges import find_edges, runs
from choreo.graph.printer import end_names
from choreo.graph.text import WIDTH
from choreo.graph.verify import verify
from choreo.plans.build import graph
from goldens import check_golden
from graph.programs import Line, Nested


@pytest.fixture(scope="module")
def nested():
    return graph(Nested(), Line())


@pytest.fixture(scope="module")
def ppo():
    return graph(PPO(unroll=16, minibatch_size=32), make("jax:CartPole-v1", 8))


def test_ppo_prints_its_golden(ppo):
    check_golden("graph_ppo", str(ppo))


def test_nested_loops_print_their_golden(nested):
    check_golden("graph_nested", str(nested))


def test_print_is_short_and_names_no_folder(ppo, nested):
    for text in (str(ppo), str(nested)):
        assert max(map(len, text.splitlines())) <= WIDTH
        assert 15 <= len(text.splitlines()) <= 45
        assert not re.search(r"/\w+\.py", text), "the print names a folder"


def test_a_fragment_in_nested_loops_runs_once_per_round(nested):
    assert {op.name: n for op, n in runs(nested).items()} == {"think": 15, "move": 5, "learn": 1, "shrink": 1}


def test_edges_are_those_counted_by_hand(nested):
    names = end_names(nested)
    when = {e: "next" if e.next_of else "first" if e.first_only else "" for e in find_edges(nested)}
    found = {(names[e.src], names[e.dst], when[e]): (e.times, e.nbytes) for e in when}
    assert found == {
        ("carry", "think", ""): (15, 12),  # the parameters
        ("carry", "think", "first"): (1, 8),  # in the first step, the first `think` reads the place from the carry
        ("think", "think", "next"): (10, 8),  # in each of 5 steps, 2 of 3 calls read the result of the call before
        ("move", "think", "next"): (4, 8),  # in each later step, the first `think` reads the place from `move`
        ("carry", "move", "first"): (1, 8),
        ("think", "move", ""): (5, 8),  # through the glue `-thought`
        ("move", "move", "next"): (4, 8),
        ("carry", "learn", ""): (1, 12),
        ("move", "learn", ""): (1, 40),  # the path: 5 steps x 2 environments x 4 bytes
        ("learn", "shrink", ""): (1, 12),
        ("shrink", "carry", ""): (1, 12),
        ("move", "carry", ""): (1, 8),
        ("move", "metrics", ""): (1, 4),
    }


def test_broken_graph_still_prints(nested):
    """`verify` prints the graph that it refuses."""
    broken = replace(nested, in_names=nested.in_names[1:], out_names=nested.out_names[:-1])
    with pytest.raises(AssertionError, match="an input without a name\\n.*4 fragments of planner, env, learner"):
        verify(broken, after="my_pass")


def test_second_call_of_a_fragment_gets_a_number():
    class Twice(Nested):
        def iterate(self, env, carry, key):
            carry, metrics = super().iterate(env, carry, key)
            return super().iterate(env, carry, key)[0], metrics

    names = end_names(graph(Twice(), Line())).values()
    assert {"move", "move#2", "learn", "learn#2"} <= set(names)
