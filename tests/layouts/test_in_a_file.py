"""A user can define a layout in a file, as a value or as a function.

Choreo finds the layout by the name `file.py:name`, passes options to the function, and records the layout in run.toml. A wrong
name or option is refused.
"""

import runpy
from pathlib import Path

import pytest

import choreo
from choreo.cli.main import main
from choreo.errors import ChoreoError
from choreo.layouts import PRESETS, Group, Layout, apex, central, coarse, fine, fused, multi_learner, per_agent, sebulba
from choreo.runs import resolve
from choreo.runs.training import load
from tiny import Tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_layouts.py"
TINY = f"{Path(__file__).parents[1] / 'tiny.py'}:Tiny"
CARTPOLE = "jax:CartPole-v1"
OWN = """
import choreo

three = choreo.Layout(choreo.Group("env", replicas=2), choreo.Group("actor"), choreo.Group("learner"))
named = choreo.Layout(choreo.Group("env", "actor"), choreo.Group("learner"), name="mine")
number = 3

def two_stage(workers=2, *, exact=False):
    groups = choreo.Group("env", replicas=workers), choreo.Group("actor", "learner")
    return choreo.Layout(*groups, exact=exact)

def needy(pods):
    return two_stage(pods)

def forgetful():
    two_stage()

def open_to_all(**options):
    return choreo.coarse(**options)
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)


def two_stage(workers, *, exact=False):
    """The layout that Choreo must make for `own.py:two_stage`."""
    groups = Group("env", replicas=workers), Group("actor", "learner")
    return Layout(*groups, exact=exact, name="two_stage")


class TestFound:
    def test_a_function_in_a_file_is_found_and_called_with_the_options(self):
        assert resolve.layout("own.py:two_stage") == two_stage(2)
        assert resolve.layout("own.py:two_stage", workers=4, exact=True) == two_stage(4, exact=True)
        assert resolve.layout("own.py:open_to_all", workers=4, max_lag=2) == coarse(4, max_lag=2)

    def test_a_layout_without_a_name_gets_the_name_of_its_variable(self):
        assert resolve.layout("own.py:three").name == "three"
        assert resolve.layout("own.py:named").name == "mine"

    def test_a_function_in_a_module_is_found(self):
        assert resolve.layout("choreo.layouts.presets:coarse", workers=3) == coarse(3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gone.py:two_stage", {}, "There is no file `gone.py`.\n"),
        (
            "empty/gone.py:x",
            {},
            "There is no file `empty/gone.py` for `empty/gone.py:x`.\nGive a path relative to this folder.",
        ),
        ("no_such_module:x", {}, "There is no module `no_such_module` for `no_such_module:x`.\n"),
        ("own.py:two_stages", {}, "There is no name in own.py `two_stages`.\nDid you mean `two_stage`?"),
        ("own.py:thre", {}, "There is no name in own.py `thre`.\nDid you mean `three`"),
        ("own.py:number", {}, "`own.py:number` is not a layout, but an int.\nA layout is choreo.Layout("),
        ("own.py:forgetful", {}, "The result of `own.py:forgetful` is not a layout, but a NoneType.\n"),
        ("own.py:needy", {}, "`own.py:needy` needs `pods`.\nGive `pods` a default. Only --workers"),
        (
            "own.py:two_stage",
            {"learners": 2},
            "`own.py:two_stage` takes no `learners`.\nIt takes `workers`, `exact`.",
        ),
        (
            "own.py:three",
            {"workers": 2},
            "`own.py:three` is a value, not a function, and takes no `workers`.\n"
            "Make it a function: def three(*, workers): return choreo.Layout(...)",
        ),
        ("two_stage", {}, "There is no layout `two_stage`.\n"),
        (3, {}, "3 is not a layout, but an int.\n"),
    ],
)
def test_a_wrong_name_or_option_is_refused(name, options, message):
    with pytest.raises(ChoreoError) as refusal:
        resolve.layout(name, **options)
    assert str(refusal.value).startswith(message)


def test_the_message_for_an_unknown_name_mentions_files():
    with pytest.raises(ChoreoError, match=r"A layout of your own is `file\.py:name`"):
        resolve.layout("two_stage")


class TestRun:
    def test_a_recorded_layout_runs_again_without_its_file(self):
        command = ["train", TINY, CARTPOLE, "--num-envs", "4", "--steps", "1", "--runtime", "inprocess", "--quiet"]
        assert main([*command, "--layout", "own.py:two_stage", "--workers", "4", "--out", "x"]) == 0
        run = load("x")
        assert run.config.layout == two_stage(4)
        Path("own.py").unlink()
        assert main(["train", "x/run.toml", "--out", "y", "--quiet"]) == 0
        again = load("y")
        assert again.config == run.config
        assert again.training_summary["params_hash"] == run.training_summary["params_hash"]

    def test_a_plan_in_python_accepts_the_name_of_a_layout_in_a_file(self):
        assert choreo.plan(Tiny(), CARTPOLE, "own.py:three", num_envs=4).layout.name == "three"
        assert choreo.plan(Tiny(), CARTPOLE, "own.py:two_stage", num_envs=4).layout == two_stage(2)

    def test_the_layouts_of_the_example_compute_the_reference_result(self):
        made = runpy.run_path(str(EXAMPLE))
        for layout in (made["two_stage"](workers=4), made["SPLIT_ACTOR"]):
            difference = choreo.testing.check_layout(Tiny(unroll=4), choreo.envs.make(CARTPOLE, 4), layout)
            assert difference < 1e-5


class TestMadeWith:
    """`made_with` finds the arguments from which a preset made a layout. They include the number of shards, because results
    depend on this number."""

    LAYOUTS = (
        fused(),
        fused(devices=2),
        fused(shards=4),
        coarse(3),
        coarse(2, exact=True),
        coarse(2, shards=4, max_lag=2),
        fine(4, shards=4),
        multi_learner(4),
        multi_learner(2, shards=8),
        sebulba(4, 2, max_lag=1),
        central(4),
        central(2, max_lag=4, merge="any"),
        apex(4, 2, max_lag=1),
        per_agent(),
    )

    @pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
    def test_the_arguments_make_the_same_layout_again(self, layout):
        options = resolve.made_with(layout)
        assert options is not None and options.get("shards", 1) == layout.shards
        assert resolve.layout(layout.name, **options) == layout

    def test_every_preset_is_tested(self):
        assert {layout.name for layout in self.LAYOUTS} == set(PRESETS)

    def test_a_layout_that_no_preset_makes_has_no_arguments(self):
        groups = Group("env", replicas=2), Group("actor"), Group("learner")
        assert resolve.made_with(Layout(*groups)) is None
        assert resolve.made_with(Layout(*groups, name="coarse")) is None
