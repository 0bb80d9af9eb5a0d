"""All workers of a run: the I/O of the coordinator.

The pool polls the workers, tells the state machine what happened, and executes the commands of the state machine. The pool has
no threads: it reads output and frames while the coordinator waits for workers, or sends to a worker.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import zmq

from choreo.runtime.coordinator.control_frames import BEAT, PROGRESS, Frame, WireError, receive_frame, send_frame
from choreo.runtime.coordinator.handle import WorkerHandle
from choreo.runtime.coordinator.machine_events import (
    Announce,
    AskForHeartBeat,
    CommandSent,
    ConnectionClosed,
    EndedEarly,
    Failure,
    HeartBeat,
    KillAll,
    MachineCommand,
    MachineEvent,
    OutOfReach,
    ProcessEnded,
    RaiseError,
    RepliesAwaited,
    SendStop,
    ShowState,
    TimePassed,
    ToldToStop,
    WorkerHeard,
    WorkerReplied,
    WorkerReported,
    WorkerStarted,
)
from choreo.runtime.coordinator.silence import Silence
from choreo.runtime.coordinator.state_machine import Stage, StateMachine
from choreo.runtime.coordinator.supervision import describe

STALL_S = 0.5
"""If no byte can be sent to or received from a worker for this time, the pool polls all workers once, and then tries again."""
LAST_OUTPUT_S = 1.0
"""How long the pool waits for a killed process to end, before it reads the last output of the process."""
NOISE = "[Gloo] Rank "
"""Output lines that begin with this text are not passed on. Gloo prints such a line at each connection."""
Replies = list[tuple[str, Frame]]
"""Names of workers and their replies."""


class WorkerPool:
    """The workers of a run, by name."""

    def __init__(
        self,
        on_output: Callable[[str, str], None],
        on_states: Callable[[dict[str, str]], None] | None = None,
        *,
        silence: Silence | None = None,
        environments: Mapping[str, list[range]] | None = None,
    ):
        """`on_output(worker, line)` is called for every line that a worker prints, and for every line about a silent worker.
        `on_states` is called with `states()` when a worker reports progress or becomes silent. `environments` are the numbers
        of the Python environments of each worker, for error messages."""
        self.on_output, self.on_states, self.environments = on_output, on_states, environments or {}
        self.machine = StateMachine(silence)
        self.handles: dict[str, WorkerHandle] = {}
        self._poller = zmq.Poller()
        self._early: Replies = []
        """Replies that arrived while the pool was sending or receiving something else."""

    def add(self, handle: WorkerHandle, *, uses_collectives: bool = False) -> None:
        """Add a worker. From now on the pool listens to this worker, and `kill` ends it."""
        self.handles[handle.name] = handle
        self.listen(handle)
        for source in handle.process.pollable:
            self._poller.register(source, zmq.POLLIN)
        self._do(WorkerStarted(worker=handle.name, uses_collectives=uses_collectives))

    def listen(self, handle: WorkerHandle) -> None:
        handle.control.settimeout(STALL_S)
        for source in handle.control.pollable:
            self._poller.register(source, zmq.POLLIN)

    def stop_listening(self, handle: WorkerHandle) -> None:
        handle.control_open = False
        for source in handle.control.pollable:
            self._unregister(source)

    def states(self) -> dict[str, str]:
        """What each worker is doing, for people to read."""
        return {name: handle.state for name, handle in self.handles.items()}

    def tell(self, worker: str, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Send a command to a worker. Raises the error of the worker that failed first if a worker fails meanwhile."""
        handle = self.handles[worker]
        self._do(CommandSent(worker=worker, kind=header["kind"]))
        try:
            self._send(handle, header, arrays)
        except OSError:
            # The worker has ended. Read its report or the end of its connection, until `take_turn` raises the error of the run.
            while True:
                self._early += self.take_turn()

    def expect_replies(self, *, doing: str, timeout_s: float | None) -> None:
        """Begin to wait for the replies to the commands that were sent; see `RepliesAwaited` for the arguments."""
        self._do(RepliesAwaited(doing=doing, timeout_s=timeout_s))

    def replies(self) -> Replies:
        """Wait until at least one worker has replied.

        Raises the error of the worker that failed first if a worker fails meanwhile.
        """
        while not self._early:
            self._early += self.take_turn()
        found, self._early = self._early, []
        return found

    def take_turn(self, *, timeout_s: float | None = None) -> Replies:
        """Wait at most `timeout_s` until something happens, and handle all that has happened. Returns the replies that arrived."""
        wait_s = self.machine.next_check_s if timeout_s is None else timeout_s
        frame_waits = any(handle.has_frame(()) for handle in self.handles.values() if not handle.reading)
        ready = {source for source, _ in self._poller.poll(0 if frame_waits else int(1000 * wait_s))}
        replies: Replies = []
        for handle in list(self.handles.values()):
            if not ready.isdisjoint(handle.process.pollable):
                self._pass_on_output(handle)
        for handle in list(self.handles.values()):
            if not handle.reading and handle.has_frame(ready):
                frame = self._receive(handle)
                if frame is not None:
                    replies.append((handle.name, frame))
        for handle in list(self.handles.values()):
            self._note_end(handle)
        self._do(TimePassed())
        return replies

    def close(self) -> None:
        """Tell all workers to stop, so that they close their environments. After GRACE_S, kill the workers that still run."""
        try:
            self._do(ToldToStop())
            while self.machine.stage is Stage.STOPPING:
                self.take_turn()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all workers and the processes that their environments have started, and pass on their last output."""
        handles = list(self.handles.values())
        self.handles.clear()
        for handle in handles:
            handle.process.kill()
        try:
            for handle in handles:
                handle.process.wait(LAST_OUTPUT_S if handle.process.address is None else 0.0)
            # In a second loop: `on_output` may raise the error of a subscriber, but every process must have its time to end.
            for handle in handles:
                while self._pass_on_output(handle):
                    pass
        finally:
            for handle in handles:
                handle.control.close()
                handle.process.close()

    # -- Events ------------------------------------------------------------------------------------------------------------

    def _receive(self, handle: WorkerHandle) -> Frame | None:
        """Receive a worker's next frame, and tell the machine. Returns the frame if it is a reply."""
        handle.reading = True  # stays True if Ctrl-C interrupts `receive_frame`
        try:
            frame = receive_frame(handle.control, _Watch(self, handle.name))
        except WireError as error:
            frame = _report_of(error, handle.name), []
        handle.reading = False
        if frame is None:
            self.stop_listening(handle)
            self._do(ConnectionClosed(worker=handle.name))
            return None
        header = frame[0]
        match header["kind"]:
            case "error":
                self.stop_listening(handle)
                self._do(WorkerReported(worker=handle.name, report=header))
            case _ if header["kind"] == PROGRESS:
                self._do(WorkerHeard(worker=handle.name))
                self._show(handle.name, f"iteration {header['iteration']}")
            case _ if header["kind"] == BEAT:
                self._do(
                    HeartBeat(worker=handle.name, moves=header["moves"], doing=header["doing"], stack=header["stack"])
                )
            case kind:
                self._do(WorkerReplied(worker=handle.name, kind=kind))
                return frame
        return None

    def _note_end(self, handle: WorkerHandle) -> None:
        """Tell the machine if the process of a worker has ended.

        The end of a process usually closes its control connection. But a process that the worker started can keep it open.
        """
        if handle.end_noted:
            return
        if (lost := handle.process.lost_sight()) is not None:
            handle.end_noted = True
            self._do(OutOfReach(worker=handle.name, why=lost.why, fix=lost.fix))
        elif (code := handle.process.poll()) is not None:
            handle.end_noted = True
            self._do(ProcessEnded(worker=handle.name, code=code))

    # -- Commands ----------------------------------------------------------------------------------------------------------

    def _do(self, event: MachineEvent) -> None:
        """Tell the machine about an event, and execute the commands that it answers."""
        everybody = dict(self.handles)  # `KillAll` empties `handles`, but the error describes the workers
        for command in self.machine.handle(event, now=time.monotonic()):
            self._execute(command, everybody)

    def _execute(self, command: MachineCommand, everybody: Mapping[str, WorkerHandle]) -> None:
        match command:
            case AskForHeartBeat(worker=name):
                handle = self.handles[name]
                if handle.control_open and not handle.sending:
                    self._send_if_possible(handle, {"kind": BEAT, "stack": command.stack})
            case Announce(worker=name):
                self.on_output(name, command.line)
            case ShowState(worker=name):
                self.handles[name].state = command.state
                if command.state == "silent" and self.on_states is not None:
                    self.on_states(self.states())
            case SendStop():
                for handle in list(self.handles.values()):
                    if handle.control_open and not handle.sending and handle.name in self.handles:
                        self._send_if_possible(handle, {"kind": "stop"})
            case KillAll():
                self.kill()
            case RaiseError():
                raise self._error(command.failure, everybody)

    def _error(self, failure: Failure, everybody: Mapping[str, WorkerHandle]) -> Exception:
        error = describe(failure, everybody, self.environments)
        if not (isinstance(failure, EndedEarly) and failure.report is not None):  # the worker's traceback says more
            error.add_note(f"What the coordinator saw, and when:\n{self.machine.story()}")
        return error

    def _send_if_possible(self, handle: WorkerHandle, header: dict[str, Any]) -> None:
        """Send a small frame. If the worker has ended, do nothing: `take_turn` notices the end."""
        with contextlib.suppress(OSError):
            self._send(handle, header, ())

    def _send(self, handle: WorkerHandle, header: dict[str, Any], arrays: Sequence[np.ndarray]) -> None:
        handle.sending = True
        send_frame(handle.control, header, arrays, _Watch(self, handle.name))
        handle.sending = False

    def _show(self, worker: str, state: str) -> None:
        self.handles[worker].state = state
        if self.on_states is not None:
            self.on_states(self.states())

    def _pass_on_output(self, handle: WorkerHandle) -> bool:
        """Pass on the new output of a worker. Returns False if there was no new output."""
        before = handle.process.pollable
        lines, more = handle.read_output()
        for source in before:
            if source not in handle.process.pollable:  # a closed pipe would be ready in every poll
                self._unregister(source)
        for line in lines:
            if not line.startswith(NOISE):
                handle.lines.append(line)
                self.on_output(handle.name, line)
        return more

    def _unregister(self, source: Any) -> None:
        if source in self._poller:
            self._poller.unregister(source)


class _Watch:
    """Lets the pool poll all workers while a frame from or to one worker does not move."""

    def __init__(self, pool: WorkerPool, worker: str):
        self._pool, self._worker, self._moved = pool, worker, False

    def moved(self) -> None:
        self._moved = True

    def stalled(self) -> None:
        if self._moved:
            self._moved = False
            self._pool._do(WorkerHeard(worker=self._worker))
        self._pool._early += self._pool.take_turn(timeout_s=0.0)
        if self._worker not in self._pool.handles:
            raise ConnectionAbortedError(f"`{self._worker}` was killed")


def _report_of(error: WireError, worker: str) -> dict[str, Any]:
    """The error report for a worker that sent invalid bytes instead of a frame."""
    trace = "".join(traceback.format_exception(error))
    return {"kind": "error", "known": True, "type": "RunError", "what": error.what, "fix": None,
            "places": {"worker": worker}, "traceback": trace}  # fmt: skip
