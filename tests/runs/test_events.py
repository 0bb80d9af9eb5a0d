"""A run delivers its events to all subscribers, in order. A subscriber can stop the run. An error in a subscriber ends the run."""

import json
import math
import os
import re
import signal
import typing
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest

import choreo
from choreo.errors import ChoreoWarning, DivergedError, RunError
from choreo.runs import events, resolve
from choreo.runs.events import (
    BoundaryReached,
    CheckpointSaved,
    EvaluationDone,
    EventStream,
    IterationDone,
    RunBegan,
    RunEnded,
    WarningGiven,
    WorkerOutput,
    WorkerStates,
)
from choreo.runs.folder import RunFolder

Tiny = resolve.algorithm_class(f"{Path(__file__).parents[1] / 'tiny.py'}:Tiny")
CARTPOLE = "jax:CartPole-v1"
PER_ITERATION = 16 * 8


def run_tiny(iterations, *subscribers, fields=None, env=CARTPOLE, **options):
    algo = Tiny(**({"total_steps": 10 * PER_ITERATION} | (fields or {})))
    return choreo.train(algo, env, steps=iterations * PER_ITERATION, subscribers=subscribers, **options)


def brief(event):
    """A short text for an event: the kind of the event, and the iterations or the name that it carries."""
    match event:
        case RunBegan():
            return f"began {event.iterations_done} of {event.iterations}"
        case IterationDone():
            return f"iteration {event.iteration}"
        case EvaluationDone() | BoundaryReached() | CheckpointSaved():
            return f"{type(event).__name__} {event.iterations_done}"
        case RunEnded():
            return f"{event.how}{f' by {event.stopped_by}' if event.stopped_by else ''}"
        case WorkerOutput():
            return f"{event.worker}: {event.line}"
        case WarningGiven():
            return "warning"
        case WorkerStates():
            return "states"


def told(heard, *, without=("states",)):
    return [text for text in map(brief, heard) if text not in without]


BUSY = {"eval_every": 2, "eval_episodes": 2, "checkpoint_every": 4}
"""Options for a run with evaluations, and with fewer checkpoints than boundaries."""
OF_A_BUSY_RUN = [
    "began 0 of 6",
    "iteration 0", "iteration 1", "EvaluationDone 2", "BoundaryReached 2",
    "iteration 2", "iteration 3", "EvaluationDone 4", "BoundaryReached 4", "CheckpointSaved 4",
    "iteration 4", "iteration 5", "EvaluationDone 6", "BoundaryReached 6", "CheckpointSaved 6",
    "finished",
]  # fmt: skip


# Every event of a run, in order.


def test_a_subscriber_hears_every_event_of_a_run_in_order(tmp_path):
    heard = []
    run = run_tiny(6, heard.append, out=tmp_path / "x", **BUSY)
    assert list(map(brief, heard)) == OF_A_BUSY_RUN
    assert heard[0] == RunBegan(
        algorithm="Tiny", environment=CARTPOLE, folder=tmp_path / "x", total_steps=768, iterations=6, iterations_done=0
    )
    rows = [event.row for event in heard if isinstance(event, IterationDone)]
    np.testing.assert_equal(rows, run.rows)
    boundaries = [event for event in heard if isinstance(event, BoundaryReached)]
    np.testing.assert_equal([event.row for event in boundaries], run.rows[1::2])
    assert all(event.steps_per_second > 0 for event in boundaries)
    returns = [event.mean_return for event in heard if isinstance(event, EvaluationDone)]
    assert returns == [row["eval_return"] for row in run.rows[1::2]]
    assert {event.path for event in heard if isinstance(event, CheckpointSaved)} == {
        run.path / "checkpoint.safetensors"
    }


def test_worker_processes_change_no_event_and_add_their_states(tmp_path):
    heard = []
    run_tiny(6, heard.append, out=tmp_path / "x", layout="coarse", **BUSY)
    assert told(heard) == OF_A_BUSY_RUN
    states = [event.states for event in heard if isinstance(event, WorkerStates)]
    assert states and all(list(state) == ["env+actor-0", "buffer+learner"] for state in states)
    # Workers report progress only between two boundaries.
    for event, after in zip(heard, heard[1:], strict=False):
        if isinstance(event, WorkerStates):
            assert isinstance(after, WorkerStates | IterationDone)


def talkative():
    """Returns a class of environments that print when they are reset or closed. The class is local, so workers get it by value."""

    class Talkative(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            print("reset", flush=True)
            return np.zeros(4, np.float32), {}

        def step(self, action):
            return np.zeros(4, np.float32), 1.0, False, False, {}

        def close(self):
            print("closed", flush=True)

    return Talkative


def test_lines_that_workers_print_are_events_until_the_last_one(capfd):
    heard = []
    run_tiny(1, heard.append, env=talkative(), num_envs=1, layout="fine", fields={"unroll": PER_ITERATION})
    assert told(heard) == [
        "began 0 of 1", "env-0: reset", "iteration 0", "BoundaryReached 1", "env-0: closed", "finished",
    ]  # fmt: skip
    assert "[env-0] reset\n[env-0] closed\n" in capfd.readouterr().err  # the progress subscriber prints these lines


def test_a_resumed_run_begins_where_the_checkpoint_is(tmp_path):
    run_tiny(2, out=tmp_path / "x")
    heard = []
    choreo.resume(tmp_path / "x", steps=3 * PER_ITERATION, subscribers=[heard.append])
    assert told(heard) == ["began 2 of 3", "iteration 2", "BoundaryReached 3", "CheckpointSaved 3", "finished"]


def test_warnings_about_the_plan_are_events():
    @dataclass(frozen=True, kw_only=True)
    class Unmarked(Tiny):
        def act(self, params, obs, key, *, greedy=False):
            return Tiny.act.__wrapped__(self, params, obs, key, greedy=greedy)

    heard = []
    with pytest.warns(ChoreoWarning, match="No fragment has the role `actor`") as shown:
        choreo.train(Unmarked(), CARTPOLE, steps=1, layout="coarse", runtime="inprocess", subscribers=[heard.append])
    assert told(heard) == ["began 0 of 1", "warning", "iteration 0", "BoundaryReached 1", "finished"]
    assert [str(warning.message) for warning in shown] == [heard[1].text]


def test_progress_loggers_and_callbacks_are_subscribers_in_this_order(monkeypatch):
    order = []
    show = lambda self, event: order.append(("progress", type(event)))  # noqa: E731
    monkeypatch.setattr("choreo.runs.progress.Progress.__call__", show)

    class Rows:
        def log(self, row):
            order.append(("logger", IterationDone))

        def close(self):
            order.append(("logger", RunEnded))

    class Subscriber:
        def __call__(self, event):
            order.append(("subscriber", type(event)))

    run_tiny(1, Subscriber(), loggers=[Rows()], on_iteration=lambda i, row: order.append(("callback", IterationDone)))
    assert order == [
        ("progress", RunBegan), ("subscriber", RunBegan),
        ("progress", IterationDone), ("logger", IterationDone), ("callback", IterationDone), ("subscriber", IterationDone),
        ("progress", BoundaryReached), ("subscriber", BoundaryReached),
        ("progress", RunEnded), ("logger", RunEnded), ("subscriber", RunEnded),
    ]  # fmt: skip


def test_the_names_of_all_events_are_public():
    for kind in typing.get_args(events.Event):
        assert getattr(choreo, kind.__name__) is kind
    assert choreo.Event is events.Event and choreo.Subscriber is events.Subscriber


def test_a_subscriber_that_changes_a_row_does_not_change_the_run(tmp_path):
    def spoil(event):
        if isinstance(event, IterationDone | BoundaryReached):
            event.row.clear()

    run = run_tiny(2, spoil, out=tmp_path / "x")
    assert [row["env_steps"] for row in run.rows] == [128, 256]
    np.testing.assert_equal(RunFolder(tmp_path / "x").read_metrics(), run.rows)


# Runs that are stopped.


def test_reaching_stop_at_return_ends_the_run_with_a_checkpoint(tmp_path):
    heard = []
    run_tiny(6, heard.append, out=tmp_path / "x", eval_every=2, eval_episodes=2, stop_at_return=1.0)
    assert told(heard) == [
        "began 0 of 6", "iteration 0", "iteration 1", "EvaluationDone 2", "BoundaryReached 2", "CheckpointSaved 2",
        "stopped by stop_at_return",
    ]  # fmt: skip


def test_on_iteration_stops_the_run_at_the_boundary_of_its_iteration(tmp_path):
    heard = []
    run_tiny(6, heard.append, out=tmp_path / "x", checkpoint_every=2, on_iteration=lambda i, row: i == 2)
    assert told(heard) == [
        "began 0 of 6",
        "iteration 0", "iteration 1", "BoundaryReached 2", "CheckpointSaved 2",
        "iteration 2", "iteration 3", "BoundaryReached 4", "CheckpointSaved 4",
        "stopped by on_iteration",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "iterations"),
    [(RunBegan, 2), (IterationDone, 2), (EvaluationDone, 2), (BoundaryReached, 2), (CheckpointSaved, 4), (RunEnded, 6)],
)
def test_a_subscriber_that_returns_true_stops_the_run_at_the_next_boundary(kind, iterations, tmp_path):
    heard = []

    def stop(event):
        heard.append(event)
        return isinstance(event, kind)

    run_tiny(6, stop, out=tmp_path / "x", **BUSY)
    name = "test_a_subscriber_that_returns_true_stops_the_run_at_the_next_boundary.<locals>.stop"
    if kind is RunEnded:
        assert told(heard) == OF_A_BUSY_RUN
        return
    whole = OF_A_BUSY_RUN[: OF_A_BUSY_RUN.index(f"BoundaryReached {iterations}") + 1]
    assert told(heard) == [*whole, f"CheckpointSaved {iterations}", f"stopped by {name}"]
    assert len(choreo.load(tmp_path / "x").rows) == iterations


@pytest.mark.parametrize("answer", [np.True_, jnp.bool_(True)])
def test_a_true_of_numpy_or_jax_stops_the_run(answer):
    assert len(run_tiny(2, lambda event: answer, checkpoint_every=1).rows) == 1


@pytest.mark.parametrize("answer", [7, "true", [0], np.ones(2, bool), np.False_, None])
def test_other_results_of_a_subscriber_mean_nothing(answer):
    heard = []
    assert len(run_tiny(2, lambda event: answer, heard.append, checkpoint_every=1).rows) == 2
    assert told(heard)[-1] == "finished"


def test_a_request_to_stop_at_the_last_boundary_leaves_the_run_finished():
    heard = []
    run_tiny(2, heard.append, on_iteration=lambda i, row: i == 1)
    assert told(heard)[-1] == "finished"


# Runs that end with an error.


def test_a_run_that_diverges_ends_after_the_iteration_that_did(tmp_path):
    heard = []
    with pytest.raises(DivergedError) as error:
        run_tiny(6, heard.append, fields={"nan_at": 2}, out=tmp_path / "x", **BUSY)
    assert told(heard) == [
        "began 0 of 6", "iteration 0", "iteration 1", "EvaluationDone 2", "BoundaryReached 2", "iteration 2", "diverged",
    ]  # fmt: skip
    assert heard[-1].error is error.value
    assert math.isnan(heard[-2].row["loss"])


@pytest.mark.parametrize("layout", ["fused", "coarse"])
def test_ctrl_c_ends_the_run_and_everything_is_closed(layout, tmp_path):
    heard = []

    def press_ctrl_c(event):
        if isinstance(event, IterationDone) and event.iteration == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as error:
        run_tiny(6, heard.append, press_ctrl_c, out=tmp_path / "x", layout=layout, checkpoint_every=2)
    assert told(heard) == [
        "began 0 of 6", "iteration 0", "iteration 1", "BoundaryReached 2", "CheckpointSaved 2",
        "iteration 2", "iteration 3", "interrupted",
    ]  # fmt: skip
    assert heard[-1].error is error.value and not hasattr(error.value, "__notes__")
    assert len(RunFolder(tmp_path / "x").read_metrics()) == 4  # rows are written before their events are delivered


def test_a_worker_that_fails_ends_the_run_as_failed():
    def broken():
        class Broken(talkative()):
            def step(self, action):
                raise ValueError("no step")

        return Broken

    heard = []
    with pytest.raises(choreo.errors.ChoreoError, match="no step"):
        run_tiny(1, heard.append, env=broken(), num_envs=1, layout="fine")
    ends = told(heard)
    assert ends[0] == "began 0 of 8" and ends[-1] == "failed" and "iteration 0" not in ends


def raises_at(kind, error=None):
    def fail(event):
        if isinstance(event, kind):
            raise error or ZeroDivisionError("my page is broken")

    return fail


@pytest.mark.parametrize("kind", [RunBegan, IterationDone, EvaluationDone, BoundaryReached, CheckpointSaved])
def test_the_error_of_a_subscriber_ends_the_run(kind, tmp_path):
    before, after = [], []
    with pytest.raises(ZeroDivisionError, match="my page is broken") as error:
        run_tiny(6, before.append, raises_at(kind), after.append, out=tmp_path / "x", **BUSY)
    name = kind.__name__
    assert error.value.__notes__ == [
        f"The subscriber `raises_at.<locals>.fail` raised this error when it got {name}. The error ended the run."
    ]
    assert error.traceback[-1].path == Path(__file__) and error.traceback[-1].name == "fail"
    first = next(i for i, event in enumerate(before) if isinstance(event, kind))
    assert told(before) == [*OF_A_BUSY_RUN[: first + 1], "failed"]
    assert told(after) == [*OF_A_BUSY_RUN[:first], "failed"]
    if kind is CheckpointSaved:
        # Nothing is lost: the run, resumed from its checkpoint, ends with the same bits as a run without the error.
        resumed, whole = choreo.resume(tmp_path / "x"), run_tiny(6, **BUSY)
        assert resumed.training_summary["params_hash"] == whole.training_summary["params_hash"]
    elif kind is not RunBegan:
        assert len(RunFolder(tmp_path / "x").read_metrics()) == 2
    else:
        assert not (tmp_path / "x").exists()  # the run ended before its first boundary, so its folder is removed


@pytest.mark.parametrize("kind", [WorkerStates, WorkerOutput])
def test_an_error_at_an_event_of_a_worker_ends_all_workers(kind):
    heard = []
    fields = {"unroll": PER_ITERATION // 2}
    with pytest.raises(ZeroDivisionError, match="my page is broken"):
        run_tiny(4, heard.append, raises_at(kind), env=talkative(), num_envs=2, layout="fine", fields=fields)
    assert told(heard)[-1] == "failed" and isinstance(heard[-1].error, ZeroDivisionError)


def test_an_error_at_the_last_words_of_workers_leaves_no_process():
    def fail(event):
        if isinstance(event, WorkerOutput) and event.line == "closed":
            raise ZeroDivisionError("my page is broken")

    heard = []
    layout, fields = choreo.fine(workers=2), {"unroll": PER_ITERATION // 2}
    with pytest.raises(ZeroDivisionError, match="my page is broken"):
        run_tiny(1, heard.append, fail, env=talkative(), num_envs=2, layout=layout, fields=fields)
    assert told(heard)[-1] == "failed"


def test_the_error_of_a_subscriber_at_the_end_of_a_run_comes_after_everything_is_written(tmp_path):
    heard = []
    with pytest.raises(ZeroDivisionError, match="the first") as error:
        run_tiny(
            2,
            raises_at(RunEnded, ZeroDivisionError("the first")),
            raises_at(RunEnded, ZeroDivisionError("the second")),
            heard.append,
            out=tmp_path / "x",
        )
    assert told(heard)[-1] == "finished"
    (note,) = error.value.__notes__
    assert note.startswith(
        "When the run had ended, the subscriber `raises_at.<locals>.fail` also raised an error:\nTraceback"
    )
    assert "ZeroDivisionError: the second" in note
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["iterations"] == 2
    assert len(choreo.load(tmp_path / "x").rows) == 2


def test_an_error_at_the_end_does_not_hide_the_error_of_the_run():
    with pytest.raises(DivergedError) as error:
        run_tiny(2, raises_at(RunEnded), fields={"nan_at": 0})
    assert "ZeroDivisionError: my page is broken" in error.value.__notes__[0]


def test_a_logger_is_closed_once_even_if_it_failed():
    class Fragile:
        closed = 0

        def log(self, row):
            raise OSError("the disk is full")

        def close(self):
            self.closed += 1

    fragile = Fragile()
    with pytest.raises(OSError, match="the disk is full") as error:
        run_tiny(2, loggers=[fragile])
    assert error.value.__notes__ == [
        "The subscriber `Fragile` raised this error when it got IterationDone. The error ended the run."
    ]
    assert fragile.closed == 1


def test_a_subscriber_that_failed_hears_only_the_end():
    heard, stream = [], EventStream()

    def fail_once(event):
        heard.append(type(event))
        if len(heard) == 1:
            raise ValueError

    stream.subscribe(fail_once)
    with pytest.raises(ValueError), stream.ending(is_finished=lambda: True):
        with pytest.raises(ValueError):
            stream.emit(WarningGiven(text="one"))
        stream.emit(WarningGiven(text="two"))
        raise ValueError
    assert heard == [WarningGiven, RunEnded]


@pytest.mark.parametrize(
    ("subscribers", "message"),
    [
        (
            [3],
            "`int` is not a subscriber: it cannot be called.\nA subscriber is a function, or an object with `__call__`",
        ),
        (
            print,
            "subscribers=<built-in function print> is not a list.\nPass a list of functions: subscribers=[my_function].",
        ),
    ],
)
def test_unusable_subscribers_are_refused_before_anything_is_written(subscribers, message, tmp_path):
    with pytest.raises(RunError, match=re.escape(message)):
        choreo.train(Tiny(), CARTPOLE, steps=1, out=tmp_path / "x", subscribers=subscribers)
    assert list(tmp_path.iterdir()) == []
