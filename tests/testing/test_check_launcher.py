"""Both launchers of Choreo pass `check_launcher`. Launchers that each break one part of the contract are refused."""

import contextlib
import os

import pytest
import zmq

from choreo.runtime.channels.keys import authenticator
from choreo.runtime.channels.sockets import context_of_process
from choreo.runtime.coordinator.launcher import LauncherError
from choreo.runtime.coordinator.local_launcher import LocalLauncher, LocalProcess
from choreo.runtime.coordinator.remote import AgentLauncher
from choreo.testing import check_launcher
from choreo.testing.launchers import check_close, check_exit_codes, check_output, check_parts, check_variables
from hosts import Agent, make_token

context_of_process().socket(zmq.PAIR).close()
authenticator()


def test_the_local_launcher_keeps_the_contract():
    check_launcher(LocalLauncher())


def test_the_launcher_of_an_agent_keeps_the_contract(tmp_path):
    with Agent(make_token(tmp_path)) as agent:
        check_launcher(AgentLauncher(agent.host, agent.token.read_bytes()))


class Wrong(LocalLauncher):
    """A launcher that breaks its contract."""

    def start(self, name, variables, fds=()):
        return self.spoil(super().start(name, variables, fds))

    def spoil(self, process: LocalProcess):
        return process


class WithoutVariables(Wrong):
    def start(self, name, variables, fds=()):
        return super().start(name, dict.fromkeys(variables, "?"), fds)


class WithoutPid(Wrong):
    def spoil(self, process):
        return _Changed(process, pid=-1)


class LosesLines(Wrong):
    def spoil(self, process):
        return _Changed(process, read_output=lambda: (process.read_output()[0].replace(b"line 7 ", b""), False))


class ChangesCodes(Wrong):
    def spoil(self, process):
        return _Changed(process, poll=lambda: process.poll() and 1)


class LeavesWorkers(Wrong):
    """A launcher whose `close` ends neither the worker nor the process that the worker has started."""

    started: list[LocalProcess]

    def spoil(self, process):
        self.started = [*getattr(self, "started", []), process]
        return _Changed(process, close=process._output.close)


class _Changed:
    """A process in which some methods are replaced."""

    def __init__(self, process: LocalProcess, **parts):
        self._process = process
        self.__dict__.update(parts)

    def __getattr__(self, name: str):
        return getattr(self._process, name)


@pytest.mark.parametrize(
    ("launcher", "check", "says"),
    [
        (WithoutVariables(), check_variables, r"environment variables arrive as \["),
        (WithoutPid(), check_parts, "the number of the process is -1"),
        (LosesLines(), check_output, r"of 3001 lines, \d+ arrive; the first wrong line is number 7"),
        (ChangesCodes(), check_exit_codes, "a worker that ends with 7 has the exit code 1"),
    ],
)
def test_a_launcher_that_breaks_its_contract_is_refused(launcher, check, says):
    with pytest.raises(LauncherError, match=f"The launcher breaks its contract: {says}"):
        check(launcher)


def test_a_launcher_that_leaves_processes_is_refused(monkeypatch):
    monkeypatch.setattr("choreo.testing.launchers.END_S", 1.0)
    launcher = LeavesWorkers()
    try:
        with pytest.raises(
            LauncherError, match=r"after `close`, \[the worker, a process that it has started\] still run"
        ):
            # A worker also ends when its control connection is closed. So the test keeps a copy of the connection open.
            _keep_connections(launcher)
            check_close(launcher)
    finally:
        for process in launcher.started:
            process.close()
        for fd in launcher.copies:
            with contextlib.suppress(OSError):
                os.close(fd)


def _keep_connections(launcher: LeavesWorkers) -> None:
    launcher.copies = []
    spoil = launcher.spoil

    def keep(process):
        launcher.copies.append(os.dup(process.connect(0.0).pollable[0]))
        return spoil(process)

    launcher.spoil = keep
