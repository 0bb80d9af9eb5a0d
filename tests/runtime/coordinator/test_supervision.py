"""The error for each failure, with its text. `tests/faults` causes the failures in real runs."""

import types
from collections import deque

import pytest

from choreo.errors import EnvError
from choreo.runtime.coordinator.handle import WorkerHandle
from choreo.runtime.coordinator.machine_events import (
    CutOff,
    EndedEarly,
    FellSilent,
    OutOfReach,
    TooLate,
    UnexpectedReply,
)
from choreo.runtime.coordinator.supervision import WorkerError, describe


def handle(name: str, pid: int, address: str | None, *lines: str) -> WorkerHandle:
    """A handle with only the fields that an error shows. It has no real process, and no connection."""
    found = WorkerHandle.__new__(WorkerHandle)
    found.name, found.process, found.lines = name, types.SimpleNamespace(pid=pid, address=address), deque(lines)
    return found


HANDLES = {
    "env-0": handle("env-0", 11, None, "a last word"),
    "env-1": handle("env-1", 12, "10.0.0.2"),
    "learner": handle("learner", 13, None, "Timeout (0:01:00)!"),
}
NUMBERS = {"env-0": [range(4), range(6, 7)], "env-1": [range(7, 9)]}
REPORT = {
    "type": "EnvError", "known": True, "what": "Environment 3 raised.", "fix": "Correct it.", "places": {}, "traceback": "Tr\n",
}  # fmt: skip


def ended(worker: str, *, code=None, report=None, out_of_reach=None) -> EndedEarly:
    return EndedEarly(worker=worker, code=code, report=report, out_of_reach=out_of_reach)


LOST = OutOfReach(worker="env-1", why="The agent at 10.0.0.2:7000 was stopped.", fix="Start it.")
OUT_OF_MEMORY = "The kernel sends SIGKILL when the machine is out of memory: use fewer workers or environments."
CASES = [
    (
        ended("env-0", code=-9),
        "Worker `env-0` (process 11) was killed by SIGKILL. It was running environments 0 to 3 and 6. Its last output:\n"
        f"  a last word\n{OUT_OF_MEMORY}",
    ),
    (
        ended("env-1", code=-99),
        "Worker `env-1` (process 12 on 10.0.0.2) was killed by signal 99. It was running environments 7 to 8.",
    ),
    (
        ended("env-1", code=3),
        "Worker `env-1` (process 12 on 10.0.0.2) ended with exit code 3. It was running environments 7 to 8.",
    ),
    (
        ended("env-1"),
        "Worker `env-1` (process 12 on 10.0.0.2) closed its connection. It was running environments 7 to 8.",
    ),
    (ended("env-1", out_of_reach=LOST), "The agent at 10.0.0.2:7000 was stopped.\nStart it."),
    (
        ended("learner", code=1),
        "An environment of worker `learner` hangs, and lets no other thread run. Its last output:\n  Timeout (0:01:00)!",
    ),
    (
        ended("learner", report=REPORT | {"type": "KeyError", "known": False, "what": "'x'", "fix": None}),
        "Worker `learner` failed: KeyError: 'x'",
    ),
    (
        FellSilent(worker="learner", seconds=300.0),
        "Nothing heard from `learner` (process 13) for 300 s.\n`learner` is stopped, its machine is overloaded or asleep, or its "
        "network connection is cut. To wait longer for a silent worker, give --silence SECONDS (silence=).",
    ),
    (
        CutOff(worker="learner", peer="env-1"),
        "`learner` (process 13) and `env-1` (process 12 on 10.0.0.2) have lost the connection to each other, although both still "
        "run.\nLook for the reason in the network between the two hosts.",
    ),
    (
        TooLate(workers=("env-0", "env-1"), doing="starting", timeout_s=120.0),
        "`env-0`, `env-1` did not answer within 120 s while starting.\nThe machine may be overloaded: use fewer workers.",
    ),
    (
        UnexpectedReply(worker="env-0", kind="ran"),
        "Worker `env-0` sent the reply `ran`, but was not asked.\nThis is an error in Choreo; please report it.",
    ),
]


@pytest.mark.parametrize(("failure", "text"), CASES)
def test_each_failure_has_one_clear_error(failure, text):
    error = describe(failure, HANDLES, NUMBERS)
    assert type(error) is WorkerError
    assert str(error) == text


def test_an_error_of_choreo_keeps_its_class_and_names_worker_and_host():
    error = describe(ended("env-1", code=1, report=REPORT), HANDLES, NUMBERS)
    assert type(error) is EnvError
    assert str(error) == "Environment 3 raised.\n  worker  env-1\n  host    10.0.0.2\nCorrect it."
    assert error.__notes__ == ["In worker `env-1`:\nTr"]
