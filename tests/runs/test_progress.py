import tempfile

import pytest

from choreo.runs.events import BoundaryReached, IterationDone, RunBegan, RunEnded, WorkerOutput, WorkerStates
from choreo.runs.progress import PLAIN_LINES, Progress

BEGAN = RunBegan(
    algorithm="PPO", environment="jax:CartPole-v1", folder=None, total_steps=10_000, iterations=100, iterations_done=0
)
OUTPUT = WorkerOutput(worker="env-0", line="a word")
STATES = WorkerStates(states={"env-0": "iteration 7", "learner": "iteration 6"})
ENDED = RunEnded(how="finished")


def boundary(done):
    row = {"iteration": done - 1, "env_steps": 100 * done, "train_return": 20.0}
    return BoundaryReached(iterations_done=done, steps_per_second=1000.0, row=row)


def shown(*events, show=True):
    with tempfile.TemporaryFile("w+") as file:
        progress = Progress(show=show, file=file)
        for event in events:
            progress(event)
        file.seek(0)
        return file.read()


def test_outside_of_a_terminal_a_run_has_at_most_ten_progress_lines():
    text = shown(BEGAN, *(boundary(i + 1) for i in range(100)), STATES, ENDED)
    first, *lines = text.splitlines()
    assert first == "PPO: compiling ..." and len(lines) == PLAIN_LINES
    assert lines[0] == "PPO  10%  1k steps  1k steps/s  return 20  0:09 left"
    assert lines[-1].startswith("PPO 100%")


def test_only_the_output_of_workers_is_printed_if_progress_is_not_shown():
    assert shown(BEGAN, OUTPUT, boundary(50), STATES, ENDED, show=False) == "[env-0] a word\n"


def test_in_a_terminal_one_line_is_kept_up_to_date_until_the_run_ends(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats the file as a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    text = shown(BEGAN, boundary(50), STATES, OUTPUT, ENDED)
    for part in ("PPO: compiling ...", "PPO  50%", "env-0: iteration 7   learner: iteration 6", "[env-0] a word"):
        assert part in text
    hidden, visible = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hidden) == 1 and text.rindex(visible) > text.rindex("PPO  50%")  # the cursor is back at the end


@pytest.mark.parametrize("event", [ENDED, IterationDone(iteration=0, row={})])
def test_events_that_progress_does_not_show_print_nothing(event):
    assert shown(event) == ""
