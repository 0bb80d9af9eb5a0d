"""Runs whose algorithm says how many environment steps an iteration takes (this can be 0), and runs without metrics of episodes."""

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import choreo
from choreo import envs
from choreo.cli.main import main
from choreo.errors import AlgorithmError, DivergedError, RunError
from choreo.runs import resolve
from choreo.runs.events import BoundaryReached, RunBegan
from choreo.runs.figures import learning_curve, summary_table
from choreo.runs.folder import RunFolder
from choreo.runs.progress import progress_line
from choreo.runs.steps import env_steps_per_iteration, steps_of

FOLDER = Path(__file__).parents[1]
Tiny = resolve.algorithm_class(f"{FOLDER / 'tiny.py'}:Tiny")
IMITATION = f"{FOLDER / 'offline.py'}:Imitation"
Imitation = resolve.algorithm_class(IMITATION)
CARTPOLE = "jax:CartPole-v1"
ENV = envs.make(CARTPOLE, 8)


def imitate(iterations, **options):
    return choreo.train(Imitation(), CARTPOLE, steps=iterations, **options)


def takes(steps):
    """Tiny, with a method that says how many environment steps an iteration takes."""

    @dataclass(frozen=True, kw_only=True)
    class Saying(Tiny):
        def steps_per_iteration(self, env):
            return steps(env) if callable(steps) else steps

    return Saying()


# The number of steps in an iteration.


def test_an_iteration_takes_unroll_steps_of_every_environment_unless_the_algorithm_says_otherwise():
    assert env_steps_per_iteration(Tiny(unroll=16), ENV) == 128
    assert env_steps_per_iteration(takes(lambda env: 2 * env.num_envs), ENV) == 16
    assert env_steps_per_iteration(takes(np.int64(3)), ENV) == 3


@pytest.mark.parametrize("answer", [-1, 2.0, None, True, "8"])
def test_an_answer_that_is_not_a_number_of_steps_is_refused_before_anything_is_written(answer, tmp_path):
    message = f"`Saying.steps_per_iteration` returns {answer!r}, which is not a number of steps.\nReturn a whole number"
    with pytest.raises(AlgorithmError, match=re.escape(message)):
        choreo.train(takes(answer), CARTPOLE, steps=1, out=tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_field_in_place_of_the_method_is_refused():
    field = dataclasses.make_dataclass(
        "Field", [("steps_per_iteration", int, 8)], bases=(Tiny,), frozen=True, kw_only=True
    )
    with pytest.raises(
        AlgorithmError, match="`Field.steps_per_iteration` is not a method.\nWrite it as `steps_per_iteration"
    ):
        choreo.train(field(), CARTPOLE, steps=1)


def test_steps_of_a_run_are_counted_as_the_algorithm_says():
    run = choreo.train(takes(lambda env: 20 * env.num_envs), CARTPOLE, steps=300)
    assert run.metrics["env_steps"].tolist() == [160, 320]
    assert run.summary["env_steps"] == run.algo.total_steps == 320


def test_the_steps_of_a_row_are_environment_steps_or_iterations():
    assert steps_of({"iteration": 4, "env_steps": 640}) == 640
    assert steps_of({"iteration": 4, "env_steps": 0}) == 5


# Training without environment steps and without metrics of episodes.


def test_without_environment_steps_the_steps_of_a_run_are_iterations(tmp_path):
    heard = []
    run = imitate(300, out=tmp_path / "x", subscribers=[heard.append])
    assert len(run.rows) == run.algo.total_steps == 300
    assert set(run.metrics) == {"iteration", "env_steps", "seconds", "loss"}  # no columns for metrics of episodes
    assert not run.metrics["env_steps"].any()
    began = heard[0]
    assert isinstance(began, RunBegan) and (began.total_steps, began.iterations) == (300, 300)
    boundaries = [event.iterations_done for event in heard if isinstance(event, BoundaryReached)]
    assert boundaries == [256, 300]  # 256 is the limit of a chunk without environment steps
    assert run.timing.steps_per_second > 0
    assert "train_return" not in run.summary and run.summary["env_steps"] == 0 and run.summary["iterations"] == 300
    assert repr(run) == f"<Run Imitation  jax:CartPole-v1: 300 iterations, {tmp_path / 'x'}>"
    assert np.isnan(run.train_return)
    assert run.evaluate(episodes=20).mean > 100  # it has learned
    assert choreo.load(tmp_path / "x").training_summary == run.training_summary


def test_a_resumed_run_without_environment_steps_equals_the_uninterrupted_run(tmp_path):
    options = {"eval_every": 2, "eval_episodes": 2, "checkpoint_every": 2}
    whole = imitate(6, **options)

    def interrupt(iteration, row):
        if iteration == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        imitate(6, out=tmp_path / "x", on_iteration=interrupt, **options)
    resumed = choreo.resume(tmp_path / "x")
    assert resumed.training_summary["params_hash"] == whole.training_summary["params_hash"]
    for one, other in zip(resumed.rows, whole.rows, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert RunFolder(tmp_path / "x").read_metrics() == resumed.rows
    with pytest.raises(RunError, match="x is finished: 6 iterations, 6 steps") as error:
        choreo.resume(tmp_path / "x")
    assert "--steps 12" in str(error.value)


def test_training_without_environments_gives_the_same_bits_in_worker_processes():
    alone, workers = imitate(3), imitate(3, layout=choreo.multi_learner(workers=1), runtime="local")
    assert workers.training_summary["params_hash"] == alone.training_summary["params_hash"]


def test_only_an_evaluation_can_stop_a_run_that_measures_no_episodes(tmp_path):
    with pytest.raises(RunError) as error:
        imitate(6, stop_at_return=10, out=tmp_path / "x")
    assert str(error.value) == (
        "stop_at_return=10 is never reached: `Imitation.iterate` returns no metrics of episodes, and there are no evaluations.\n"
        "Evaluate the parameters: give --eval-every 100 (eval_every=100)."
    )
    assert list(tmp_path.iterdir()) == []
    assert len(imitate(6, stop_at_return=1, eval_every=2, eval_episodes=2).rows) == 2


def test_a_loss_that_is_not_finite_stops_a_run_without_episodes():
    with pytest.raises(DivergedError, match="`loss` is nan at iteration 2 of 6"):
        choreo.train(Imitation(nan_at=2), CARTPOLE, steps=6)


def test_an_algorithm_without_any_metric_trains():
    class Silent(Imitation):
        def iterate(self, env, carry, key):
            return super().iterate(env, carry, key)[0], {}

    run = choreo.train(Silent(), CARTPOLE, steps=3)
    assert [set(row) for row in run.rows] == [{"iteration", "env_steps", "seconds"}] * 3
    assert run.plot().axes[0].get_legend() is None


def test_an_algorithm_with_environment_steps_may_measure_no_episodes(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Unmeasured(Tiny):
        def iterate(self, env, carry, key):
            carry, metrics = super().iterate(env, carry, key)
            return carry, {"loss": metrics["loss"]}

    run = choreo.train(
        Unmeasured(), CARTPOLE, steps=3 * 128, out=tmp_path / "x", layout=choreo.coarse(2), runtime="inprocess"
    )
    assert run.metrics["env_steps"].tolist() == [128, 256, 384] and "train_return" not in run.metrics
    assert run.plot().axes[0].get_xlabel() == "environment steps"


# How runs without environment steps are shown.


def test_the_progress_line_counts_iterations_if_there_are_no_environment_steps():
    row = {"iteration": 1499, "env_steps": 0, "loss": 0.25, "eval_return": 9.0}
    line = progress_line("Imitation", row, total_steps=3000, steps_per_second=500.0)
    assert line == "Imitation  50%  1.5k iterations  500 iterations/s  eval 9  loss 0.25  0:03 left"


def test_the_learning_curve_shows_evaluations_or_else_the_loss():
    metrics = {"iteration": np.arange(3), "env_steps": np.zeros(3, int), "loss": np.array([3.0, 2.0, 1.0])}
    (axes,) = learning_curve(metrics, title="x").axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("iterations", "loss")
    assert axes.lines[0].get_xydata().tolist() == [[1, 3], [2, 2], [3, 1]]
    (axes,) = learning_curve(metrics | {"eval_return": np.array([np.nan, 7, 8])}, title="x").axes
    assert axes.get_ylabel() == "episode return"
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[2, 7], [3, 8]]]


def test_the_final_table_counts_iterations_if_there_are_no_environment_steps():
    summary = {"return": 9.0, "iterations": 1234, "env_steps": 0, "steps_per_second": 500.0}
    table = summary_table(summary, title="x", folder=None)
    labels, texts = (list(column.cells) for column in table.columns)
    assert dict(zip(labels, texts, strict=True)) == {
        "return (greedy, 100 fresh episodes)": "9.0", "iterations": "1,234", "iterations per second": "500",
    }  # fmt: skip


def test_tensorboard_counts_iterations_if_there_are_no_environment_steps(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX", reason="the extra choreo[tensorboard] is not installed")
    import tensorboardX

    written = []
    add_scalar = tensorboardX.SummaryWriter.add_scalar
    monkeypatch.setattr(
        tensorboardX.SummaryWriter,
        "add_scalar",
        lambda self, name, value, step: (written.append((name, step)), add_scalar(self, name, value, step)),
    )
    imitate(2, out=tmp_path / "x", loggers=["tensorboard"])
    assert [step for name, step in written if name == "loss"] == [1, 2]


def test_the_commands_work_without_environment_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", IMITATION, CARTPOLE, "--steps", "20", "--eval-every", "10", "--out", "x", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["env_steps"] == 0 and "train_return" not in json.loads(out)
    assert "Imitation 100%  20 iterations" in err and "iterations per second" in err
    assert main(["resume", "x", "--steps", "30", "--quiet"]) == 0
    assert len(choreo.load("x").rows) == 30
    # The learning rate of iterations 0 to 19 fell to 0 over 20 iterations. In the replay it falls over 30, so the weights differ.
    assert main(["replay", "x", "--quiet"]) == 1
    assert main(["train", "x/run.toml", "--out", "y", "--quiet"]) == 0
    assert main(["compare", "x", "y", "-o", "compare.png"]) == 0
    assert main(["evaluate", "x", "--episodes", "3"]) == 0
    assert main(["check", IMITATION, CARTPOLE, "--layout", "multi_learner", "--workers", "2", "--json"]) == 0
    assert main(["graph", IMITATION, CARTPOLE, "--layout", "multi_learner"]) == 0
    assert Path("compare.png").exists() and "Traceback" not in capsys.readouterr().err
    assert main(["train", IMITATION, CARTPOLE, "--stop-at-return", "3", "--quiet"]) == 1
    assert "stop_at_return=3 is never reached" in capsys.readouterr().err
