"""What `StateMachine` is told (events), what it answers (commands), and the ways in which a run can fail (failures)."""

from dataclasses import dataclass
from typing import Any, TypeAlias

# ---- Events. The pool reports what happened to the workers, and which commands it sends to them.


@dataclass(frozen=True, kw_only=True)
class WorkerStarted:
    """A worker has a process and a control connection."""

    worker: str
    """The worker's name."""
    uses_collectives: bool = False
    """True if the worker combines values with other workers inside compiled programs."""


@dataclass(frozen=True, kw_only=True)
class CommandSent:
    """The coordinator begins to send a command to a worker, which must answer it with one reply."""

    worker: str
    """The worker's name."""
    kind: str
    """The kind of the command."""


@dataclass(frozen=True, kw_only=True)
class RepliesAwaited:
    """The coordinator begins to wait for the replies to the commands that it has sent."""

    doing: str
    """What the workers are doing, for the error after a timeout."""
    timeout_s: float | None = None
    """How long the replies may take; None means no limit."""


@dataclass(frozen=True, kw_only=True)
class WorkerReplied:
    """A worker has answered a command."""

    worker: str
    """The worker's name."""
    kind: str
    """The kind of the reply."""


@dataclass(frozen=True, kw_only=True)
class WorkerHeard:
    """Some bytes went to a worker or came from it, or the worker reported an iteration. So the worker's process is running."""

    worker: str
    """The worker's name."""


@dataclass(frozen=True, kw_only=True)
class HeartBeat:
    """A thread of a worker has answered the question whether the worker is alive."""

    worker: str
    """The worker's name."""
    moves: int
    """A number that changes whenever the main thread has moved."""
    doing: str
    """What the main thread does: "idle", "computing", "waiting" for another worker, or running "python"."""
    stack: str = ""
    """The innermost calls of the main thread, if the coordinator asked for them."""


@dataclass(frozen=True, kw_only=True)
class WorkerReported:
    """A worker has reported the error that ends it."""

    worker: str
    """The worker's name."""
    report: dict[str, Any]
    """The header of the error report."""


@dataclass(frozen=True, kw_only=True)
class ConnectionClosed:
    """The control connection of a worker has ended, and all its frames were read."""

    worker: str
    """The worker's name."""


@dataclass(frozen=True, kw_only=True)
class ProcessEnded:
    """The process of a worker has ended."""

    worker: str
    """The worker's name."""
    code: int
    """The exit code; a negative number is the number of a signal."""


@dataclass(frozen=True, kw_only=True)
class OutOfReach:
    """The launcher cannot reach the process of a worker any more, and will not learn its exit code."""

    worker: str
    """The worker's name."""
    why: str
    """What happened, as a sentence."""
    fix: str
    """What to do next."""


@dataclass(frozen=True, kw_only=True)
class TimePassed:
    """The pool has polled all workers once. The machine only checks its time limits."""


@dataclass(frozen=True, kw_only=True)
class ToldToStop:
    """The run is over: the workers must close their environments and end."""


MachineEvent: TypeAlias = (
    WorkerStarted
    | CommandSent
    | RepliesAwaited
    | WorkerReplied
    | WorkerHeard
    | HeartBeat
    | WorkerReported
    | ConnectionClosed
    | ProcessEnded
    | OutOfReach
    | TimePassed
    | ToldToStop
)

# ---- Failures: why a run ends. `supervision.describe` makes the error for the user.


@dataclass(frozen=True, kw_only=True)
class EndedEarly:
    """A worker has ended before it was told to stop."""

    worker: str
    """The worker that failed first."""
    code: int | None
    """Its exit code, if that is known."""
    report: dict[str, Any] | None
    """Its error report, if it sent one."""
    out_of_reach: OutOfReach | None
    """Why the worker cannot be reached any more, if its launcher has lost the worker."""


@dataclass(frozen=True, kw_only=True)
class FellSilent:
    """A worker has given no sign of life for too long."""

    worker: str
    """The silent worker."""
    seconds: float
    """How long it was silent."""


@dataclass(frozen=True, kw_only=True)
class CutOff:
    """Two workers have lost the connection to each other, although both still run."""

    worker: str
    """The worker that noticed the loss."""
    peer: str
    """The other worker."""


@dataclass(frozen=True, kw_only=True)
class TooLate:
    """Some workers did not reply in time."""

    workers: tuple[str, ...]
    """The workers that did not reply."""
    doing: str
    """What they were doing."""
    timeout_s: float
    """The time limit for the replies, in seconds."""


@dataclass(frozen=True, kw_only=True)
class UnexpectedReply:
    """A worker has replied although it was not asked anything."""

    worker: str
    """The worker."""
    kind: str
    """The kind of its reply."""


Failure: TypeAlias = EndedEarly | FellSilent | CutOff | TooLate | UnexpectedReply

# ---- Commands. The pool executes them in order.


@dataclass(frozen=True, kw_only=True)
class AskForHeartBeat:
    """Ask a worker whether it is alive."""

    worker: str
    """The worker's name."""
    stack: bool = False
    """True if the answer must also hold the stack of the main thread."""


@dataclass(frozen=True, kw_only=True)
class Announce:
    """Print a line about a worker."""

    worker: str
    """The worker's name."""
    line: str
    """The line."""


@dataclass(frozen=True, kw_only=True)
class ShowState:
    """Show what a worker is doing."""

    worker: str
    """The worker's name."""
    state: str
    """What the worker is doing, for people to read."""


@dataclass(frozen=True, kw_only=True)
class SendStop:
    """Tell all workers to stop."""


@dataclass(frozen=True, kw_only=True)
class KillAll:
    """Kill all workers, and read their last output."""


@dataclass(frozen=True, kw_only=True)
class RaiseError:
    """End the run with an error."""

    failure: Failure
    """Why the run ends."""


MachineCommand: TypeAlias = AskForHeartBeat | Announce | ShowState | SendStop | KillAll | RaiseError
