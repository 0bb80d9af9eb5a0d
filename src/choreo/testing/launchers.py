"""`check_launcher`: test whether a launcher keeps the contract in `choreo.runtime.coordinator.launcher`.

    from choreo.testing import check_launcher
    check_launcher(launcher)        # returns None, or raises a LauncherError that says how the launcher breaks the contract

Each check starts real workers, and lets a worker run a piece of Python instead of the programs of a plan. The workers may be on
another machine. So another worker there checks whether a process still exists.
"""

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from choreo.runtime.coordinator.control_frames import Frame, receive_frame, send_frame
from choreo.runtime.coordinator.handle import WorkerHandle
from choreo.runtime.coordinator.launcher import ControlConnection, Launcher, LauncherError, WorkerProcess

PATIENCE_S = 60.0
"""After this time, a step that should have ended counts as hanging."""
END_S = 10.0
"""How long a process may take to end after it was killed, or after its connections were closed."""
NUM_LINES = 3_000
"""How many lines a worker prints in the check of output."""
SPEAK = f"""
for i in range({NUM_LINES}):
    stream = sys.stdout if i % 2 else sys.stderr
    stream.write(f"line {{i}} ")
    stream.flush()
    stream.write("x" * (i % 100) + "\\n")
    stream.flush()
os.write(1, "no line break: ä".encode())
"""
START_CHILD_AND_SLEEP = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
SHOW_RUNNING = """
def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

end = time.monotonic() + patience_s
while time.monotonic() < end and any(map(is_running, pids)):
    time.sleep(0.05)
print([is_running(pid) for pid in pids], flush=True)
"""


def check_launcher(launcher: Launcher) -> None:
    """Start workers, let them print, end and fail, and kill them; raise LauncherError if a result breaks the contract."""
    check_parts(launcher)
    open_before = _open_files()  # the first worker may open files that stay open, for example those of ZeroMQ
    check_variables(launcher)
    check_output(launcher)
    check_exit_codes(launcher)
    check_frames(launcher)
    check_stop(launcher)
    check_several(launcher)
    check_kill(launcher)
    check_close(launcher)
    if launcher.shared_memory == "inherited":
        check_descriptors(launcher)
    _await(lambda: _open_files() <= open_before, END_S)
    left = _open_files() - open_before
    _require(left <= 0, f"after all workers have ended, {left} more files are open in this process than before.")


def check_parts(launcher: Launcher) -> None:
    """Check that the launcher, its processes and their connections have every part."""
    _require(isinstance(launcher, Launcher), f"`{type(launcher).__name__}` lacks a part of Launcher.")
    with _started(launcher) as (process, control):
        _require(isinstance(process, WorkerProcess), f"`{type(process).__name__}` lacks a part of WorkerProcess.")
        _require(
            isinstance(control, ControlConnection), f"`{type(control).__name__}` lacks a part of ControlConnection."
        )
        _require(process.pid > 0, f"the number of the process is {process.pid}.")
        _require(process.poll() is None, "a process that runs has an exit code.")
        _require(process.lost_sight() is None, "a process that runs counts as out of reach.")


def check_variables(launcher: Launcher) -> None:
    """Check that environment variables arrive, also if their values are empty or hold unusual characters."""
    variables = {"CHOREO_CHECK": "a b=c 'd' \"e\" $HOME ä", "CHOREO_EMPTY": ""}
    lines, _ = _run(launcher, f"print([os.environ[name] for name in {list(variables)}], flush=True)", variables)
    _require(lines == [repr(list(variables.values()))], f"environment variables arrive as {lines}.")


def check_output(launcher: Launcher) -> None:
    """Check that all lines of both streams arrive complete and in order, also the last one, which has no line break."""
    lines, _ = _run(launcher, SPEAK)
    expected = [f"line {i} {'x' * (i % 100)}" for i in range(NUM_LINES)] + ["no line break: ä"]
    wrong = next((i for i, line in enumerate(expected) if lines[i : i + 1] != [line]), None)
    _require(
        lines == expected, f"of {len(expected)} lines, {len(lines)} arrive; the first wrong line is number {wrong}."
    )


def check_exit_codes(launcher: Launcher) -> None:
    """Check the exit codes of a worker that exits, and of a worker that a signal ends."""
    ends = {0: "os._exit(0)", 7: "os._exit(7)", -signal.SIGKILL: f"os.kill(os.getpid(), {int(signal.SIGKILL)})"}
    for code, end in ends.items():
        _, found = _run(launcher, end)
        _require(found == code, f"a worker that ends with {int(code)} has the exit code {found}.")


def check_frames(launcher: Launcher) -> None:
    """Check that large frames pass through the control connection, in both directions."""
    text = os.urandom(1_000_000).hex()
    with _started(launcher) as (_, control):
        header, _ = _order(control, f"raise ValueError({text!r})")
        arrived = header["kind"] == "error" and header["what"] == text
        _require(arrived, "a large frame does not arrive as it was sent.")


def check_stop(launcher: Launcher) -> None:
    """Check that a worker that is told to stop ends with exit code 0, and that its connection ends."""
    with _started(launcher) as (process, control):
        send_frame(control, {"kind": "stop"})
        _require(receive_frame(control) is None, "a worker that was told to stop sends something.")
        _await(lambda: process.wait(0.1) is not None, END_S)
        _require(process.poll() == 0, f"a worker that was told to stop has the exit code {process.poll()}.")


def check_several(launcher: Launcher) -> None:
    """Check that two workers run at the same time, each with its own connection."""
    with _started(launcher) as (one, to_one), _started(launcher) as (two, to_two):
        _require(one.pid != two.pid, "two workers have the same process.")
        for process, control in ((two, to_two), (one, to_one)):
            header, _ = _order(control, "raise ValueError(os.getpid())")
            _require(header["what"] == str(process.pid), "a command goes to another worker than it was sent to.")


def check_kill(launcher: Launcher) -> None:
    """Check that `kill` and `close` end a worker that is busy, and the processes that it has started."""
    with _started(launcher) as (process, control):
        pids = _start_child(process, control)
        process.kill()
        process.wait(1.0)
    _check_ended(launcher, pids, "`kill` and `close`")


def check_close(launcher: Launcher) -> None:
    """Check that `close` alone ends a worker that is busy, and the processes that it has started."""
    with _started(launcher) as (process, control):
        pids = _start_child(process, control)
    _check_ended(launcher, pids, "`close`")


def check_descriptors(launcher: Launcher) -> None:
    """Check that a worker inherits the file descriptors that it is given, and that no other process holds them afterwards."""
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as pipe:
        try:
            process = launcher.start("check", {}, (theirs,))
        finally:
            os.close(theirs)
        with _connected(process) as control:
            _order(control, f"os.write({theirs}, b'inherited'); raise ValueError")
        _require(pipe.read() == b"inherited", "a file descriptor is not inherited.")


def _start_child(process: WorkerProcess, control: ControlConnection) -> list[int]:
    """Let a worker start a child process and then sleep; return the numbers of both processes."""
    _tell(control, START_CHILD_AND_SLEEP)
    handle, lines = WorkerHandle("check", process, control), list[str]()
    _await(lambda: bool(lines.extend(handle.read_output()[0]) or lines), PATIENCE_S)
    _require(
        bool(lines) and lines[0].startswith("child "), f"the lines of a worker do not arrive while it runs: {lines}."
    )
    return [process.pid, int(lines[0].split()[1])]


def _check_ended(launcher: Launcher, pids: list[int], how: str) -> None:
    lines, _ = _run(launcher, f"pids, patience_s = {pids}, {END_S}\n{SHOW_RUNNING}")
    _require(
        lines == ["[False, False]"], f"after {how}, [the worker, a process that it has started] still run: {lines}."
    )


@contextlib.contextmanager
def _started(
    launcher: Launcher, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[WorkerProcess, ControlConnection]]:
    process = launcher.start("check", variables or {})
    with _connected(process) as control:
        yield process, control


@contextlib.contextmanager
def _connected(process: WorkerProcess) -> Iterator[ControlConnection]:
    """Wait until a worker runs; at the end, close its connections."""
    try:
        with contextlib.closing(process.connect(time.monotonic() + PATIENCE_S)) as control:
            control.settimeout(PATIENCE_S)
            yield control
    finally:
        process.close()


def _run(launcher: Launcher, code: str, variables: Mapping[str, str] | None = None) -> tuple[list[str], int]:
    """Let a worker run a piece of Python and end; return the lines that it has printed, and its exit code."""
    with _started(launcher, variables) as (process, control):
        _tell(control, f"{code}\nos._exit(0)")
        handle, lines = WorkerHandle("check", process, control), list[str]()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ended_with = process.poll()
            new, more = handle.read_output()
            lines += new
            if ended_with is not None and not more:
                return lines, ended_with
            _require(time.monotonic() < deadline, f"a worker does not end within {PATIENCE_S:g} s.")
            if not more:
                time.sleep(0.01)


def _order(control: ControlConnection, code: str) -> Frame:
    """Let a worker run a piece of Python that raises an error; return the frame with its report."""
    _tell(control, code)
    frame = receive_frame(control)
    if frame is None:
        raise _broken("the connection ends without the report of an error.")
    return frame


def _tell(control: ControlConnection, code: str) -> None:
    """Send the command `set_up` with `code` in place of programs. The worker runs the code when it unpickles the programs."""
    header = {
        "kind": "set_up", "name": "check", "env_timeout_s": 0.0, "silence_s": 300.0, "secret": "", "links": [], "host": "127.0.0.1",
        "introduction": False, "collective": None, "platforms": None, "profile": False, "process_of_site": [],
    }  # fmt: skip
    send_frame(control, header, [np.frombuffer(pickle.dumps(_RunsWhenUnpickled(code)), np.uint8)])


class _RunsWhenUnpickled:
    """Python code that runs when this object is unpickled."""

    def __init__(self, code: str):
        self.code = f"import os, subprocess, sys, time\n{code}"

    def __reduce__(self) -> Any:
        return exec, (self.code, {})


def _await(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _require(condition: bool, how: str) -> None:
    if not condition:
        raise _broken(how)


def _broken(how: str) -> LauncherError:
    return LauncherError(f"The launcher breaks its contract: {how}", fix="See choreo.runtime.coordinator.launcher.")
