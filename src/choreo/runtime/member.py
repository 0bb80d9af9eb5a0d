"""A worker as its coordinator sees it: what it says, whether it lives, and why it ended."""

import signal
import socket
import subprocess
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from choreo import errors
from choreo.errors import ChoreoError, RunError
from choreo.runtime.remote import RemoteProcess
from choreo.runtime.sockets import SILENCE_S
from choreo.runtime.tunnel import Tunnel

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
    error: dict[str, Any] | None = None
    """Why it ended, in its own words."""
    talks: bool = True
    """Until it reported an error, or its control socket closed."""
    state: str = "starting"
    """For people: what it is doing."""
    combines: bool = False
    """Does it combine values with others inside of compiled programs?"""

    @property
    def lives(self) -> bool:
        """As far as one can tell: of a worker on another host, only its agent can."""
        heard = not isinstance(self.process, RemoteProcess) or self.process.is_connected
        return self.process.poll() is None and heard

    @property
    def only_suffers(self) -> bool:
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
        f"Nothing heard from `{member.name}` ({member.whereabouts}) for {silence_s:g} s, said {heard_by}. It has not ended.",
        fix="It is stopped, its machine is overloaded or asleep, or the network between them is cut.",
    )


def describe(member: Member, code: int | None, envs: list[range]) -> ChoreoError:
    """The one error for a worker's end: in its own words, or by its exit code."""
    if member.error is not None:
        return _in_its_words(member.name, member.error)
    if code is None and isinstance(member.process, RemoteProcess):
        heard_by = "the coordinator" if member.process.is_connected else "the coordinator, nor from its agent"
        return describe_silent(member, SILENCE_S, heard_by=heard_by)
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


def _in_its_words(name: str, error: dict[str, Any]) -> ChoreoError:
    cls = getattr(errors, error["type"], None) if error["known"] else None
    if isinstance(cls, type) and issubclass(cls, ChoreoError):
        found = cls(error["what"], fix=error["fix"], **{**error["places"], "worker": name})
    else:
        found = WorkerError(f"Worker `{name}` failed: {error['type']}: {error['what']}", fix=error["fix"])
    found.add_note(f"In worker `{name}`:\n{error['traceback'].rstrip()}")
    return found


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
