"""If an environment misbehaves, the run ends with one error that names the environment, its worker, or both."""

import contextlib
import itertools
import os
import re
import sys
import threading
import types

import psutil
import pytest

import choreo
from choreo import envs
from choreo.errors import ChoreoError, EnvError
from choreo.runtime.coordinator.supervision import WorkerError
from choreo.runtime.inprocess import InProcess
from choreo.runtime.local import Local
from faults.scenes import KEY, LAYOUTS, NUM_ENVS, naughty, naughty_factory, unlucky
from tiny import Tiny

RETURNED = {
    "wrong shape": r"an observation float32\[5\] where its space says float32\[3\]",
    "nan": r"NaN in its observation",
    "wrong type": r"an observation float64\[3\] where its space says float32\[3\]",
}
ENV_ERRORS = {
    "raise": r"Environment 3 of `Naughty` raised ValueError in step: the pole fell off the table",
    **{fault: rf"`step` of environment 3 of `Naughty` returned {what}" for fault, what in RETURNED.items()},
    "exit": r"Environment 3 .*SystemExit.*: enough of this",
    "hang": r"Environment 3 hangs: it has not returned for 1 s\.",
}
WORKER_ERRORS = {
    "hang with the GIL": r"An environment of worker `{}` hangs, and lets no other thread run\.",
    "exit at once": r"Worker `{}` \(process \d+\) ended with exit code 3\.",
    "segfault": r"Worker `{}` \(process \d+\) was killed by SIGSEGV\.",
}
WORKER_OF_3 = {"coarse x2": "env+actor-1", "fine x2": "env-1"}
IN_ONE_PROCESS = ("wrong shape", "wrong type")
"""CI tests these faults in one process only. This is enough: the function that detects these faults also detects `nan`, and CI
tests `nan` with workers."""


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        *[
            pytest.param(fault, "fine x2", marks=[pytest.mark.long] if fault in IN_ONE_PROCESS else [])
            for fault in ENV_ERRORS
        ],
        pytest.param("raise", "coarse x2", marks=pytest.mark.long),
    ],
)
def test_the_error_names_the_environment_and_its_worker(fault, layout, misbehave):
    error = misbehave(fault, lambda: Local(naughty(layout), env_timeout_s=1.0))
    assert isinstance(error, EnvError)
    assert re.match(ENV_ERRORS[fault], str(error)), str(error)
    assert error.places["worker"] == WORKER_OF_3[layout]
    (note,) = error.__notes__
    assert note.startswith(f"In worker `{WORKER_OF_3[layout]}`:\n")
    assert fault in RETURNED or "in misbehave" in note


@pytest.mark.parametrize(
    ("fault", "layout"),
    [*itertools.product(WORKER_ERRORS, ["fine x2"]), pytest.param("segfault", "coarse x2", marks=pytest.mark.long)],
)
def test_if_an_environment_kills_or_blocks_its_worker_the_error_names_the_worker(fault, layout, misbehave):
    error = misbehave(fault, lambda: Local(naughty(layout), env_timeout_s=1.0))
    assert isinstance(error, WorkerError)
    assert re.match(WORKER_ERRORS[fault].format(re.escape(WORKER_OF_3[layout])), str(error)), str(error)
    assert "It was running environments 2 to 3." in str(error)
    if fault != "exit at once":  # `os._exit` prints no traceback
        assert "in misbehave" in str(error)


@pytest.mark.parametrize("fault", ["raise", *RETURNED])
def test_in_one_process_the_error_names_no_worker(fault, misbehave):
    error = misbehave(fault, lambda: InProcess(naughty("fused")))
    assert isinstance(error, EnvError)
    assert re.match(ENV_ERRORS[fault], str(error)), str(error)
    assert "worker" not in error.places
    assert fault != "raise" or isinstance(error.__cause__, ValueError)


@pytest.fixture
def misbehave(monkeypatch):
    def play(fault, make_runtime) -> ChoreoError:
        """Run with a fault in environment 3; return the error."""
        for name, value in (unlucky(3) | {"FAULT": fault}).items():
            monkeypatch.setenv(name, value)
        with contextlib.closing(make_runtime()) as runtime, pytest.raises(ChoreoError) as caught:
            runtime.start(KEY)
            runtime.run(0, 10)
        return caught.value

    return play


def test_the_coordinator_prints_the_output_of_workers(monkeypatch, capsys):
    for name, value in (unlucky(2) | {"FAULT": "speak"}).items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(Local(naughty("fine x2"))) as local:
        local.start(KEY)
        local.run(0, 3)
        megabytes = psutil.Process(local.pool.handles["env-1"].process.pid).memory_info().rss / 2**20
    said = capsys.readouterr().err
    assert "[env-1] a word from the environment\n" in said
    assert re.search(r"^\[env-1\] .*UserWarning: an old way of doing it$", said, re.MULTILINE)
    assert "[env-1] jax is not imported\n" in said
    assert megabytes < 60


def test_a_factory_that_cannot_be_pickled_is_refused_before_any_process_starts(monkeypatch):
    lock = threading.Lock()
    make = naughty_factory()

    def factory():
        assert not lock.locked()
        return make()

    plan = choreo.plan(Tiny(unroll=4), envs.from_factory(factory, NUM_ENVS), LAYOUTS["fine x2"])
    monkeypatch.setattr("choreo.runtime.coordinator.local_launcher.subprocess.Popen", None)
    with pytest.raises(ChoreoError, match=r"`factory` cannot be sent to another process: TypeError: .*lock"):
        Local(plan)


def test_the_error_names_the_module_that_a_worker_cannot_import(monkeypatch):
    ghost = types.ModuleType("ghost_of_a_module")
    monkeypatch.setitem(sys.modules, "ghost_of_a_module", ghost)
    ghost.__dict__["Env"] = type("Env", (naughty_factory(),), {"__module__": "ghost_of_a_module"})
    plan = choreo.plan(Tiny(unroll=4), envs.from_factory(ghost.__dict__["Env"], NUM_ENVS), LAYOUTS["fine x1"])
    with contextlib.closing(Local(plan)) as local, pytest.raises(EnvError) as caught:
        local.start(KEY)
    assert "No module named 'ghost_of_a_module'" in str(caught.value)
    assert "Install the modules that the factory imports, or put them into the folder" in str(caught.value)
    assert caught.value.places["worker"] == "env-0"


def closing_factory():
    class BadEnd(naughty_factory()):
        def close(self):
            if "STUCK" in os.environ:
                raise OSError("the window is stuck")

    return BadEnd


def test_an_error_while_closing_an_environment_is_printed(monkeypatch, capsys):
    plan = choreo.plan(Tiny(unroll=4), envs.from_factory(closing_factory(), 1), LAYOUTS["fine x1"])
    monkeypatch.setenv("STUCK", "yes")
    with contextlib.closing(Local(plan)) as local:
        local.start(KEY)
    assert "[env-0] OSError: the window is stuck\n" in capsys.readouterr().err
