"""A worker as its coordinator sees it: what it says, whether it lives, and why it ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from choreo import errors
from choreo.errors import ChoreoError, RunError
from choreo.runtime.channels.sockets import SILENCE_S
from choreo.runtime.coordinator.remote import RemoteProcess
from choreo.runtime.coordinator.tunnel import Tunnel

LAST_LINES = 60
"""Of a worker's output, shown when it dies without a word: a traceback of every thread fits."""
COLLECTIVES = ("Gloo", "NCCL", "coordination service")
"""Whose errors tell that a peer of a worker is gone."""
HANGS = "Timeout ("
"""How the last words begin of a worker that was stopped because an environment holds the interpreter."""


class WorkerError(RunError):
    """A worker failed or was lost."""


@dataclass(eq=False)
class Member:
    """A worker as its coordinator sees it."""

    name: str
    process: "subprocess.Popen[bytes] | RemoteProcess"
    control: socket.socket | Tunnel
    lines: "deque[str]" = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    """Its last output."""
    rest: bytes = b""
    """Output that is no whole line yet."""
    printed_all: bool = False
    """Has it closed its output?"""
    error: dict[str, Any] | None = None
    """Why it ended, in its own words."""
    talks: bool = True
    """Until it reported an error, or its control socket closed."""
    state: str = "starting"
    """For people: what it is doing."""
    combines: bool = False
    """Does it combine values with others inside of compiled programs?"""

    @classmethod
    def start_here(cls, name: str, variables: Mapping[str, str], fds: Collection[int]) -> "Member":
        """A worker on this machine, with these environment variables beside our own, and these descriptors of ours."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                # -P: nothing is imported from the folder that happens to be the current one.
                [sys.executable, "-P", "-m", "choreo.runtime.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *fds],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,  # Ctrl-C is ours to hear; and what an environment starts ends with it
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return cls(name, process, ours)

    @property
    def controls(self) -> list[Any]:
        """Sockets or descriptors to wait for: when one is ready, there may be a frame, or its end."""
        return self.control.pollable if isinstance(self.control, Tunnel) else [self.control.fileno()]

    @property
    def outputs(self) -> list[Any]:
        """The same, for what it prints."""
        if isinstance(self.process, RemoteProcess):
            return self.process.pollable
        return [] if self.process.stdout is None or self.printed_all else [self.process.stdout.fileno()]

    def has_frame(self, ready: Collection[Any]) -> bool:
        """Would `receive_frame` return at once, with a frame or None? `ready` are those of `controls` that were reported."""
        if not isinstance(self.control, Tunnel):
            return bool(ready)
        if self.control.monitor in ready:
            self.control.hear_of_the_end()
        return self.control.pending or self.control.lost or self.control.socket in ready

    def read_output(self) -> tuple[list[str], bool]:
        """The lines printed since the last call, and whether another call may find more."""
        if isinstance(self.process, RemoteProcess):
            data = self.process.hear()
            ended = not data and self.process.poll() is not None
        elif self.process.stdout is None or self.printed_all:
            return [], False
        else:
            try:
                data = os.read(self.process.stdout.fileno(), 65536)
            except BlockingIOError:
                return [], False
            ended = self.printed_all = not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        if ended and self.rest:
            lines, self.rest = [self.rest], b""
        return [line.decode(errors="replace") for line in lines], bool(data)

    def kill(self) -> None:
        """End it, with all that its environments have started. Of a worker elsewhere, `close` lets its agent do that."""
        if isinstance(self.process, subprocess.Popen):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.control.close()
        if isinstance(self.process, RemoteProcess):
            self.process.close()
        elif self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def lives(self) -> bool:
        """As far as one can tell: of a worker on another host, only its agent can."""
        heard = not isinstance(self.process, RemoteProcess) or self.process.is_connected
        return self.process.poll() is None and heard

    @property
    def lost_a_peer(self) -> bool:
        """Did it end because another one did?"""
        if self.error is None:
            return self.combines and self.process.poll() == -signal.SIGABRT  # so does JAX end who lost a peer
        lost = self.error["type"] in ("PeerLost", "ReceiverClosed", "EndOfChannel")
        return lost or (self.combines and any(word in self.error["what"] for word in COLLECTIVES))

    @property
    def whereabouts(self) -> str:
        process = self.process
        where = f" on {process.host.address}" if isinstance(process, RemoteProcess) else ""
        return f"process {process.pid}{where}"


def describe_silent(member: Member, silence_s: float, *, heard_by: str) -> ChoreoError:
    """The error for a worker that others wait for in vain, although it has not ended."""
    return WorkerError(
        f"Nothing heard from `{member.name}` ({member.whereabouts}) for {silence_s:g} s; {heard_by} waited for it.",
        fix="It is stopped, its machine is overloaded or asleep, or the network between them is cut.",
    )


def describe(member: Member, code: int | None, envs: list[range]) -> ChoreoError:
    """The one error for a worker's end: in its own words, or by its exit code."""
    if member.error is not None:
        return _in_its_words(member, member.error)
    if isinstance(member.process, RemoteProcess) and (code is None or member.process.agent_stopped):
        return _describe_remote(member, member.process)
    if code is None:
        ended = "closed its connection"
    else:
        ended = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    what = f"Worker `{member.name}` ({member.whereabouts}) {ended}."
    if any(line.startswith(HANGS) for line in member.lines):
        what = f"An environment of worker `{member.name}` hangs, and lets no other thread run."
    # A process that ends by itself was most likely ended by an environment.
    blocks = " and ".join(str(b[0]) if len(b) == 1 else f"{b[0]} to {b[-1]}" for b in envs)
    running = f" It was running environments {blocks}." if blocks else ""
    last = "".join(f"\n  {line}" for line in member.lines)
    return WorkerError(
        f"{what}{running}{' Its last output:' if last else ''}{last}",
        fix="SIGKILL without a cause is often the kernel, out of memory: use fewer workers or environments."
        if code == -signal.SIGKILL
        else None,
    )


def _describe_remote(member: Member, process: RemoteProcess) -> ChoreoError:
    """The error for a worker on another host whose exit code says nothing, or is not known."""
    agent = f"the agent at {process.host.address}:{process.host.port}"
    if process.agent_stopped:
        return WorkerError(f"{agent.capitalize()} was stopped, and its worker `{member.name}` with it.",
                           fix="Start the agent again, then train again.")  # fmt: skip
    if process.is_connected:
        return describe_silent(member, SILENCE_S, heard_by="the coordinator")
    return WorkerError(
        f"Worker `{member.name}` ({member.whereabouts}) and {agent} were lost.",
        fix="The agent or its machine has ended, or the network between the machines is cut.",
    )


def _in_its_words(member: Member, error: dict[str, Any]) -> ChoreoError:
    name, process = member.name, member.process
    host = {"host": process.host.address} if isinstance(process, RemoteProcess) else {}
    cls = getattr(errors, error["type"], None) if error["known"] else None
    if isinstance(cls, type) and issubclass(cls, ChoreoError):
        found = cls(error["what"], fix=error["fix"], **{**error["places"], "worker": name, **host})
    else:
        found = WorkerError(f"Worker `{name}` failed: {error['type']}: {error['what']}", fix=error["fix"])
    found.add_note(f"In worker `{name}`:\n{error['traceback'].rstrip()}")
    return found


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
