import json
import math
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from choreo.cli.main import main
from choreo.errors import RunError
from choreo.runs.compare import Comparison, Record
from choreo.runs.episode_returns import EPISODES_PER_RETURN, EpisodeReturns
from choreo.runs.folder import RunFolder, to_json
from choreo.runs.training import train as train_for_real

STEPS = 1000
ENV = {"name": "jax:CartPole-v1", "num_envs": 8}
COARSE = {
    "class": "Layout",
    "fields": {
        "name": "coarse",
        "groups": {"tuple": [{"fields": {"replicas": 2}}, {"fields": {"replicas": {"none": True}}}]},
    },
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_offline_run(name, evaluations, *, summary=None):
    """Write the folder of a run without environment steps and episodes. `evaluations` has a return or None for each iteration."""
    folder = RunFolder(name)
    Path(name).mkdir()
    folder.write_config({"algorithm": {"class": "x.y:Mine"}, "environment": ENV, "layout": COARSE})
    rows = [{"iteration": i, "env_steps": 0, "seconds": float(i + 1), "loss": 1.0} for i in range(len(evaluations))]
    folder.append_metrics([row | ({"eval_return": e} if e else {}) for row, e in zip(rows, evaluations, strict=True)])
    if summary is not None:
        folder.write_text("summary.json", to_json({"iterations": len(rows)} | summary))


def write_run(name, returns, seconds, *, episodes=60, env=None, summary=None):
    """Write a run folder as training does. `returns` and `seconds` have one number for each row of the metrics."""
    folder = RunFolder(name)
    Path(name).mkdir()
    folder.write_config({"algorithm": {"class": "x.y:MyPPO"}, "environment": env or ENV, "layout": COARSE})
    history = EpisodeReturns([])
    rows = []
    for i, (value, at) in enumerate(zip(returns, seconds, strict=True)):
        row = {
            "iteration": i,
            "env_steps": (i + 1) * STEPS,
            "seconds": at,
            "episodes": float(episodes),
            "episode_return": value,
        }
        rows.append(row | {"train_return": history.add(row)})
    folder.append_metrics(rows)
    if summary is not None:
        folder.write_text("summary.json", to_json({"iterations": len(rows)} | summary))
    return folder


def printed(comparison):
    """The printed table, as a dict from the label of each line to the texts in its columns."""
    with open(os.devnull, "w") as nowhere:
        console = Console(width=160, record=True, file=nowhere)
        console.print(comparison.table())
    lines = [re.split(r"\s{2,}", line.strip()) for line in console.export_text().splitlines()]
    return {label: texts for label, *texts in lines}


def test_a_record_that_is_read_from_a_folder_equals_the_run():
    run = train_for_real(
        f"{Path(__file__).parents[1] / 'tiny.py'}:Tiny",
        "jax:CartPole-v1",
        steps=4000,
        out="x",
        eval_every=16,
        eval_episodes=2,
    )
    record = Record.read("x")
    assert (record.algorithm, record.environment, record.layout) == ("Tiny", "jax:CartPole-v1", "fused")
    assert record.is_finished and record.final_return == run.train_return
    assert record.steps_per_second == pytest.approx(run.timing.steps_per_second)
    assert record.evaluation == run.rows[-1]["eval_return"]
    assert len(record.boundaries) == 2 and record.env_steps[-1] == 4096


def test_returns_are_compared_at_the_same_steps_and_the_same_time():
    # Rows of the same chunk have the same time: `a` has 2 chunks of 2 rows, and `b` has 4.
    write_run("a", [10, 20, 30, 40], [4, 4, 8, 8], episodes=200, summary={"steps_per_second": 500.0})
    write_run(
        "b",
        [20, 40, 60, 80, 100, 120, 140, 160],
        [1, 1, 2, 2, 3, 3, 4, 4],
        episodes=200,
        summary={"steps_per_second": 2000.0},
    )
    a, b = Comparison.of(["a", "b"]).to_dict()["runs"]
    assert a["return_at_steps"] == [(1000, 10), (2000, 20), (3000, 30), (4000, 40)]
    assert b["return_at_steps"] == [(1000, 20), (2000, 40), (3000, 60), (4000, 80)]
    assert b["return_at_seconds"] == [(1, 40), (2, 80), (3, 120), (4, 160)]
    assert [s for s, _ in a["return_at_seconds"]] == [1, 2, 3, 4]
    assert [math.isnan(value) for _, value in a["return_at_seconds"]] == [True, True, True, False]
    assert a["return_at_seconds"][-1] == (4, 20)


def test_runs_are_compared_by_speed_and_by_the_time_to_the_same_return():
    write_run("a", [10, 20, 30, 40], [4, 4, 8, 8], episodes=200, summary={"steps_per_second": 500.0})
    write_run("b", [15, 30, 60, 70], [1, 1, 2, 2], episodes=200, summary={"steps_per_second": 2000.0})
    comparison = Comparison.of(["a", "b"])
    assert comparison.at_return == 40.0  # the highest return that both runs reached
    a, b = comparison.to_dict()["runs"]
    assert (a["speedup"], b["speedup"]) == (1.0, 4.0)
    assert (a["seconds_to_return"], b["seconds_to_return"]) == (8.0, 2.0)
    assert (a["speedup_to_return"], b["speedup_to_return"]) == (1.0, 4.0)
    asked = Comparison.of(["a", "b"], at_return=50).to_dict()["runs"]
    assert math.isnan(asked[0]["seconds_to_return"]) and asked[1]["seconds_to_return"] == 2.0
    lines = printed(comparison)
    assert lines["seconds to return 40.0"] == ["8.0", "2.0"]
    assert lines["steps per second"] == ["500", "2,000"]
    assert lines["speed-up"] == ["1.00x", "4.00x"]
    assert lines["layout"] == ["coarse x2", "coarse x2"]
    assert "environment" not in lines and "jax:CartPole-v1" in lines


def test_a_return_is_the_mean_of_at_least_100_episodes_if_there_are_so_many():
    write_run("few", [10, 20], [1, 2], episodes=30)
    write_run("many", [10, 20, 30], [1, 2, 3], episodes=60)
    few, many = Record.read("few"), Record.read("many")
    assert (few.final_return, few.episodes) == (15.0, 60)
    assert (many.final_return, many.episodes) == (25.0, 120)
    assert many.episodes >= EPISODES_PER_RETURN > few.episodes


def test_a_mean_over_fewer_than_100_episodes_does_not_count_as_reached():
    write_run("x", [90, 10, 30, 50], [1, 2, 3, 4], episodes=40)
    assert Record.read("x").first_at(50.0) is None
    assert Record.read("x").first_at(35.0) == 2  # the first row whose return is a mean over 100 episodes or more
    assert Record.read("x").best_return == pytest.approx(130 / 3)


def test_an_unfinished_run_is_compared_as_far_as_it_got():
    write_run("a", [10, 20, 30, 40], [4, 4, 8, 8], episodes=200, summary={"steps_per_second": 500.0})
    folder = write_run("b", [10, 20, 30, 40, 50, 60], [3, 3, 4, 4, 5, 5], episodes=200)
    with open(folder.metrics, "a") as file:
        file.write('{"iteration": 6, "env_st')
    record = Record.read("b")
    # Only the 4,000 steps and the 2 seconds after the first boundary count, because the time before includes compiling.
    assert not record.is_finished and record.steps_per_second == 4000 / 2
    write_run("c", [10], [3], episodes=200)
    lines = printed(Comparison.of(["a", "b", "c"]))
    assert lines["state"] == ["finished", "unfinished", "unfinished"]
    assert lines["steps per second"] == ["500", "2,000", "-"]
    assert lines["final return"] == ["40.0", "60.0", "10.0"]


def test_a_summary_with_fewer_iterations_than_rows_is_ignored():
    write_run("x", [10, 20, 30], [1, 2, 3], summary={"iterations": 2, "steps_per_second": 7.0})
    record = Record.read("x")
    assert not record.is_finished and record.steps_per_second == 1000.0


def test_the_times_of_a_resumed_run_are_added_up():
    write_run("x", [1, 2, 3, 4, 5], [3, 5, 2, 4, 1])
    assert Record.read("x").seconds.tolist() == [3, 5, 7, 9, 10]


def test_runs_of_different_environments_are_not_compared_by_return():
    write_run("a", [10, 20], [1, 2], episodes=200)
    write_run(
        "b",
        [-900, -800],
        [1, 2],
        episodes=200,
        env={"name": "/elsewhere/my_env.py:make_env", "num_envs": 8, "kwargs": {"level": 3}},
    )
    comparison = Comparison.of(["a", "b"])
    assert comparison.title == (
        "Different environments, whose returns cannot be compared: jax:CartPole-v1, my_env.py:make_env (level=3)"
    )
    lines = printed(comparison)
    assert lines["environment"] == ["jax:CartPole-v1", "my_env.py:make_env (level=3)"]
    assert not any(label.startswith("seconds to return") for label in lines)


def test_a_run_without_any_ended_episode_has_no_return():
    write_run("a", [10, 20], [1, 2])
    write_run("b", [math.nan, math.nan], [1, 2], episodes=0)
    comparison = Comparison.of(["a", "b"])
    assert printed(comparison)["final return"] == ["15.0", "-"]
    assert comparison.to_dict()["at_return"] is None


# The command.


def test_compare_prints_a_table_and_writes_a_picture(capsys):
    write_run("a", [10, 20, 30, 40], [4, 4, 8, 8])
    write_run("b[1]", [15, 30, 60, 70], [1, 1, 2, 2])
    assert main(["compare", "a", "b[1]", "-o", "compare.png"]) == 0
    out = capsys.readouterr().out
    assert "b[1]" in out and "final return" in out and out.endswith("Wrote compare.png.\n")
    assert Path("compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_two_panels():
    write_run("a", [10, 20, 30, 40], [4, 4, 8, 8])
    write_run("b", [15, 30, 60, 70], [1, 1, 2, 2])
    over_steps, over_seconds = Comparison.of(["a", "b"]).figure().axes
    assert [len(line.get_xdata()) for line in over_steps.lines] == [4, 4]
    assert [line.get_xdata().tolist() for line in over_seconds.lines] == [[4, 8], [1, 2]]
    assert (over_steps.get_xlabel(), over_seconds.get_xlabel()) == ("environment steps", "seconds, compiling included")


def test_json_is_one_object(capsys):
    write_run("a", [10, 20], [1, 2])
    write_run("b", [math.nan, math.nan], [1, 2], episodes=0)
    assert main(["compare", "a", "b", "--json", "-o", "c.png"]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    data = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [run["return"] for run in data["runs"]] == [15.0, None]
    assert err == "Wrote c.png.\n"


def test_wrong_arguments_are_refused(capsys):
    def fails(*args, code):
        assert main(["compare", *args]) == code
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err
        return err

    write_run("a", [10], [1])
    write_run("empty", [], [])
    assert fails("a", code=2) == (
        "UsageError: `choreo compare` needs two runs or more.\nSee `choreo compare --help`.\n"
    )
    assert "gone does not exist" in fails("a", "gone", code=1)
    assert fails("a", "empty", code=1).startswith("RunError: empty has no metrics yet.\nWait until")
    assert "There is no folder no" in fails("a", "a", "-o", "no/x.png", code=2)
    assert "There is no option `--at-retrun`.\nDid you mean `--at-return`?" in fails(
        "a", "a", "--at-retrun", "1", code=2
    )


def test_the_error_names_a_line_that_is_not_a_row():
    folder = write_run("a", [10], [1])
    folder.metrics.write_text(f"{folder.metrics.read_text()}oops\n")
    with pytest.raises(RunError, match="Line 2 of a/metrics.jsonl is not a row of metrics: 'oops'"):
        Record.read("a")


@pytest.mark.parametrize("table", ["algorithm", "environment", "layout"])
@pytest.mark.parametrize(
    "value", ["text", [1], {"class": [1]}, {"fields": "x"}, {"fields": {"groups": {"tuple": [3, {}]}}}, {"kwargs": 3}]
)
def test_a_run_with_a_run_toml_of_the_wrong_form_can_be_compared(table, value):
    folder = write_run("a", [10], [1])
    config = folder.read_config() | {table: value}
    assert Comparison(
        records=(Record(path=folder.path, config=config, rows=folder.read_metrics(), summary={}),), at_return=0.0
    ).to_dict()


def test_dollar_signs_are_not_read_as_formulas_and_control_characters_are_escaped(capsys):
    folder = write_run("a$b$", [10], [1], env={"name": "$\\x", "num_envs": 2, "kwargs": {"x": "[red]$"}})
    folder.path.rename("\x1b[2J$")
    assert main(["compare", "\x1b[2J$", "\x1b[2J$", "-o", "compare.png"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b[2J$" in out and "$\\x (x=[red]$)" in out


def test_runs_without_environment_steps_are_compared_by_iterations_and_evaluations():
    write_offline_run("a", [None, 10.0, None, 20.0], summary={"steps_per_second": 100.0})
    write_offline_run("b", [None, 30.0, None, None], summary={"steps_per_second": 400.0})
    comparison = Comparison.of(["a", "b"])
    a, b = comparison.to_dict()["runs"]
    assert comparison.at_return == 20.0
    assert (a["env_steps"], a["iterations"], a["speedup"], b["speedup"]) == (0, 4, 1.0, 4.0)
    assert a["return_at_steps"][1:] == [(2, 10.0), (3, 10.0), (4, 20.0)] and math.isnan(a["return_at_steps"][0][1])
    assert (a["seconds_to_return"], b["seconds_to_return"]) == (4.0, 2.0)
    table = printed(comparison)
    assert table["iterations"] == ["4", "4"] and table["iterations per second"] == ["100", "400"]
    assert table["return at 2 iterations"] == ["10.0", "30.0"]
    assert table["final return"] == ["20.0", "30.0"] and "over the last episodes" not in table
    over_steps, _ = comparison.figure().axes
    assert (over_steps.get_xlabel(), over_steps.get_ylabel()) == ("iterations", "return (last evaluation, greedy)")
    assert over_steps.lines[0].get_xdata().tolist() == [1, 2, 3, 4]
    assert len(json.loads(to_json(comparison.to_dict()))["runs"]) == 2


def test_steps_of_the_environment_are_not_compared_with_iterations():
    write_run("a", [10, 20], [4, 8], episodes=200, summary={"steps_per_second": 500.0})
    write_offline_run("b", [None, 30.0], summary={"steps_per_second": 100.0})
    comparison = Comparison.of(["a", "b"])
    a, b = comparison.to_dict()["runs"]
    assert a["return_at_steps"] == b["return_at_steps"] == []
    assert math.isnan(b["speedup"]) and math.isnan(b["return"]) and b["eval_return"] == 30.0
    table = printed(comparison)
    assert table["steps or iterations per second"] == ["500", "100"] and table["speed-up"] == ["1.00x", "-"]
    assert table["final return"] == ["20.0", "-"] and table["last evaluation (greedy)"] == ["-", "30.0"]
    assert table["over the last episodes"] == ["200", "-"]
    assert comparison.figure().axes[0].get_xlabel() == "environment steps or iterations"
