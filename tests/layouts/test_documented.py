"""The commands in the tables of docs/layouts.md give a plan, and the page names other systems for distributed RL.

If several commands have the same algorithm and layout, only one of them is tested.
"""

import re
import shlex
from pathlib import Path

import pytest

from choreo.cli import arguments, main
from choreo.layouts import ALIASES, PRESETS

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"
COMMANDS = sorted(set(re.findall(r"`choreo train (\w+ ENV[^`]*)`", PAGE.read_text())))


def layout_of(command):
    parser = arguments.make_parser("train", "")
    arguments.add_layout(parser, default="fused")
    options, _ = parser.parse_known_args(shlex.split(command)[2:])
    return arguments.layout_of(options)


DISTINCT = {(command.split()[0], layout_of(command)): command for command in COMMANDS}
"""One command for each pair of an algorithm and a layout, because the docs have several commands for some of the pairs."""


FASTEST_FIRST = ["impala", "a2c", "ppo", "dqn"]
"""The algorithms, sorted by the time that a plan for them takes."""


def commands():
    """The commands of `DISTINCT`, as parameters of the test.

    A command is marked `long` unless one of these is new, that is, in no earlier command: its algorithm, its preset, its `merge`,
    and whether it has a lag.
    """
    seen = set()
    for (algo, layout), command in sorted(DISTINCT.items(), key=lambda pair: FASTEST_FIRST.index(pair[0][0])):
        new = {algo, layout.name, f"merge {layout.merge}", f"lag {layout.max_lag > 0}"} - seen
        seen |= new
        yield pytest.param(command, id=command, marks=() if new else pytest.mark.long)


@pytest.mark.parametrize("command", list(commands()))
def test_a_documented_command_gives_a_plan(command):
    assert main.main(["graph", *shlex.split(command.replace("ENV", "jax:CartPole-v1", 1))]) == 0


def test_the_tables_are_found_and_name_only_known_layouts():
    named = {found[1] for command in COMMANDS if (found := re.search(r"--layout (\w+)", command))}
    assert named <= {*PRESETS, *ALIASES}
    assert named >= {"fused", "coarse", "fine", "multi_learner", "sebulba", "central", "a3c", "impala", "seed_rl"}
    assert len(COMMANDS) > 15


@pytest.mark.parametrize(
    "system",
    ["A3C", "IMPALA", "SEED RL", "Acme", "Anakin", "Sebulba", "WarpDrive", "RLlib",
     "GPUOnly", "SingleLearnerCoarse", "SingleLearnerFine", "MultiLearner", "Central", "Environments"],
)  # fmt: skip
def test_the_page_names_the_system(system):
    assert system in PAGE.read_text()
