"""Makes the one error that the user gets when a run fails, from a `Failure` of the state machine."""

import signal
from collections.abc import Mapping
from typing import Any

from choreo import errors
from choreo.errors import ChoreoError, RunError
from choreo.runtime.coordinator.handle import WorkerHandle
from choreo.runtime.coordinator.machine_events import (
    CutOff,
    EndedEarly,
    Failure,
    FellSilent,
    TooLate,
    UnexpectedReply,
)

HANGS = "Timeout ("
"""`faulthandler` prints a line that begins like this when an environment blocks the Python interpreter for too long."""


class WorkerError(RunError):
    """A worker failed or was lost."""


def describe(
    failure: Failure, handles: Mapping[str, WorkerHandle], environments: Mapping[str, list[range]]
) -> ChoreoError:
    """The error for the user. `handles` must have the workers' last output; `environments` are the numbers of the Python
    environments of each worker."""
    match failure:
        case EndedEarly(worker=name):
            return _describe_end(failure, handles[name], environments.get(name, []))
        case FellSilent(worker=name):
            return WorkerError(
                f"Nothing heard from `{name}` ({handles[name].whereabouts}) for {failure.seconds:g} s.",
                fix=f"`{name}` is stopped, its machine is overloaded or asleep, or its network connection is cut. To wait longer "
                "for a silent worker, give --silence SECONDS (silence=).",
            )
        case CutOff(worker=name, peer=peer):
            return WorkerError(
                f"`{name}` ({handles[name].whereabouts}) and `{peer}` ({handles[peer].whereabouts}) have lost the connection to "
                "each other, although both still run.",
                fix="Look for the reason in the network between the two hosts.",
            )
        case TooLate(workers=names):
            late = ", ".join(f"`{name}`" for name in names)
            return WorkerError(f"{late} did not answer within {failure.timeout_s:g} s while {failure.doing}.",
                               fix="The machine may be overloaded: use fewer workers.")  # fmt: skip
        case UnexpectedReply(worker=name):
            return WorkerError(f"Worker `{name}` sent the reply `{failure.kind}`, but was not asked.",
                               fix="This is an error in Choreo; please report it.")  # fmt: skip


def _describe_end(failure: EndedEarly, handle: WorkerHandle, environments: list[range]) -> ChoreoError:
    """The error for a worker that ended.

    The error shows the worker's own report. Without a report, it shows the exit code, the environments and the last output.
    """
    if failure.report is not None:
        return _describe_report(handle, failure.report)
    if failure.out_of_reach is not None:
        return WorkerError(failure.out_of_reach.why, fix=failure.out_of_reach.fix)
    code = failure.code
    if code is None:
        ended = "closed its connection"
    else:
        ended = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    what = f"Worker `{handle.name}` ({handle.whereabouts}) {ended}."
    if any(line.startswith(HANGS) for line in handle.lines):
        what = f"An environment of worker `{handle.name}` hangs, and lets no other thread run."
    # If a process ends without a report, most likely one of its environments has ended the process.
    numbers = " and ".join(str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in environments)
    running = f" It was running environments {numbers}." if numbers else ""
    last = "".join(f"\n  {line}" for line in handle.lines)
    return WorkerError(
        f"{what}{running}{' Its last output:' if last else ''}{last}",
        fix="The kernel sends SIGKILL when the machine is out of memory: use fewer workers or environments."
        if code == -signal.SIGKILL
        else None,
    )


def _describe_report(handle: WorkerHandle, report: dict[str, Any]) -> ChoreoError:
    """The error that a worker reported, with the worker's traceback. An error of `choreo.errors` keeps its class."""
    name, address = handle.name, handle.process.address
    host = {} if address is None else {"host": address}
    cls = getattr(errors, report["type"], None) if report["known"] else None
    if isinstance(cls, type) and issubclass(cls, ChoreoError):
        found = cls(report["what"], fix=report["fix"], **{**report["places"], "worker": name, **host})
    else:
        found = WorkerError(f"Worker `{name}` failed: {report['type']}: {report['what']}", fix=report["fix"])
    found.add_note(f"In worker `{name}`:\n{report['traceback'].rstrip()}")
    return found


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
