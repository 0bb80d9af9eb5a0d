"""Runs in which a signal suspends or kills a worker, or interrupts, terminates or kills the coordinator. Also two runs at once."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from choreo.runtime.local import Local
from faults.scenes import alone, assert_same_bits, cartpole, marked, play

SUSPENDED_S = 3.0
TINY = Path(__file__).parents[1] / "tiny.py"


@pytest.mark.parametrize(
    ("layout", "carrier", "who"),
    [("fine x2", "shm", "env-1"), pytest.param("coarse x2", "tcp", "env+actor-0", marks=pytest.mark.long)],
)
def test_a_worker_that_is_suspended_for_a_while_does_not_change_the_results(layout, carrier, who):
    local = Local(cartpole(layout), carrier=carrier)
    worker = psutil.Process(local.pool.handles[who].process.pid)
    wake = threading.Timer(SUSPENDED_S, worker.resume)

    def after_ten():
        worker.suspend()
        wake.start()

    assert_same_bits(play(local, after_ten=after_ten), alone(layout))
    wake.join()


@pytest.mark.parametrize(
    ("layouts", "carrier"),
    [(["fine x1", "fine x2"], "shm"), pytest.param(["fine x2", "coarse x2"], "tcp", marks=pytest.mark.long)],
)
def test_two_runs_at_once_do_not_disturb_each_other(layouts, carrier):
    with ThreadPoolExecutor() as pool:
        runs = pool.map(lambda layout: play(Local(cartpole(layout), carrier=carrier)), layouts)
        for layout, run in zip(layouts, runs, strict=True):
            assert_same_bits(run, alone(layout))


@pytest.mark.parametrize(
    ("number", "code", "layout"),
    [
        (signal.SIGINT, 130, "fine"),
        pytest.param(signal.SIGINT, 130, "coarse", marks=pytest.mark.long),
        (signal.SIGTERM, -signal.SIGTERM, "fine"),
        (signal.SIGKILL, -signal.SIGKILL, "fine"),
    ],
)
def test_no_worker_outlives_the_train_command(number, code, layout, tmp_path, mark):
    with command(tmp_path, layout) as (process, log):
        assert len(marked(mark)) == 4, marked(mark)
        os.kill(process.pid, number)
        assert_all_end(process, code, mark, log)
    if number == signal.SIGINT:
        assert log.read_text().count("Interrupted") == 1
        assert "Traceback" not in log.read_text()


def test_the_train_command_names_the_killed_worker_once(tmp_path, mark):
    with command(tmp_path, "fine") as (process, log):
        worker = psutil.Process(process.pid).children()[0]
        worker.kill()
        assert_all_end(process, 1, mark, log)
    said = log.read_text().splitlines()
    assert [line.split(":")[0] for line in said if "SIGKILL" in line] == [
        "WorkerError",
        "The kernel sends SIGKILL when the machine is out of memory",
    ]
    assert f"(process {worker.pid}) was killed by SIGKILL." in log.read_text()


@contextlib.contextmanager
def command(folder: Path, layout: str):
    """Start `choreo train` and wait for its first metrics; yield its process and the file with its output."""
    out, log = folder / "run", folder / "log"
    words = f"train {TINY}:Tiny CartPole-v1 --num-envs 4 --layout {layout} --workers 2 --steps 1e9 --unroll 4 --quiet"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "choreo", *words.split(), "--checkpoint-every", "10", "--out", str(out)],
            stdout=file,
            stderr=file,
        )
    try:
        deadline = time.monotonic() + 90.0
        while not (out / "metrics.jsonl").is_file():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield process, log
    finally:
        process.kill()
        process.wait()


def assert_all_end(process: "subprocess.Popen[bytes]", code: int, mark: str, log: Path) -> None:
    began = time.monotonic()
    assert process.wait(timeout=30) == code, log.read_text()
    while left := marked(mark):
        assert time.monotonic() - began < 5.0, left
        time.sleep(0.02)
